"""A recipe's `rewards`: one reward or a weighted sum, for every domain or by domain, in every way they can be written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from opd.rewards.reward import FAMILY, RewardKind
from opd.settings import SETTINGS, Positive

Sandbox = Literal["auto", "bubblewrap", "namespaces", "none"]
DEFAULT = "default"  # the key for domains that have no entry of their own
One = Annotated[RewardKind, FAMILY]
RESERVED = ("sandbox", "stop_after")  # keys beside the domains


class Rewards(BaseModel):
    """The rewards of a stage, by domain, and what holds for all of them."""

    model_config = SETTINGS
    domains: dict[str, Annotated[list[One], Field(min_length=1)]] = Field(
        default_factory=dict, description="by domain, or `default`; domains without an entry: the prompt's own verifier"
    )
    sandbox: Sandbox = Field(
        "auto", description="of everything that may run what the model wrote; none: no walls at all"
    )
    stop_after: Positive = Field(5, description="steps in which nothing was rewarded, after which the run stops")

    @property
    def need_no_answer(self) -> bool:
        """Whether rows without an answer can be rewarded too."""
        return any(not reward.asks_prompt for rewards in self.domains.values() for reward in rewards)


class AnyWay:
    """Marks a field that reads every way to write rewards."""

    ways = (One, dict[str, One])  # beside `Rewards` itself

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(spelt_out, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        whole = handler(schema)
        known = handler.resolve_ref_schema(whole)["properties"]
        one = known["domains"]["additionalProperties"]["items"]
        some = [*one["anyOf"], {"type": "array", "items": one, "minItems": 1}]
        own = {key: known[key] for key in RESERVED}
        alone = {"type": "object", "properties": own, "required": ["kind", "stop_after"]}  # a single reward with it
        by_domain = {"type": "object", "properties": own, "additionalProperties": {"anyOf": [*some, {"type": "null"}]}}
        return {"anyOf": [*some, alone, whole, by_domain]}


AnyRewards = Annotated[Rewards, AnyWay()]


def spelt_out(value: Any) -> Any:
    """`numeric`, `{kind: …}`, a list of those, or any of them by domain -> the fields of `Rewards`."""
    if isinstance(value, Rewards):
        return value
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return {"domains": {DEFAULT: _list(value)}}
    own = {
        key: value[key] for key in RESERVED if key in value and not (key == "sandbox" and value.get("kind") == "code")
    }
    rest = {key: entry for key, entry in value.items() if key not in own}
    if "kind" in rest:
        return {"domains": {DEFAULT: [rest]}, **own}
    if isinstance(rest.get("domains"), Mapping) and len(rest) == 1:  # spelt out, as in a resolved recipe
        rest = rest["domains"]
    return {"domains": {str(domain): _list(entry) for domain, entry in rest.items() if entry is not None}, **own}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
