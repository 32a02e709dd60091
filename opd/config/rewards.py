"""How answers are scored: one reward or a weighted sum, for every domain or by domain."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, field_validator, model_validator

from opd.settings import SETTINGS, Positive

Sandbox = Literal["auto", "bubblewrap", "namespaces", "none"]
Kind = Literal["verifier", "exact", "numeric", "format", "maths", "code", "json", "custom"]
DEFAULT = "default"  # the key for domains that have no entry of their own
RESERVED = ("sandbox", "stop_after")  # keys beside the domains

OWN: dict[str, tuple[str, ...]] = {  # keys that belong to some kinds only
    "field": ("exact", "numeric", "maths"),
    "extract": ("exact", "numeric"),
    "ignore": ("exact",),
    "tolerance": ("numeric",),
    "absolute": ("numeric",),
    "pattern": ("format",),
    "whole": ("format",),
    "json_schema": ("json",),
    "function": ("custom",),
    "fresh": ("custom",),
    "partial": ("code",),
    "sandbox": ("code",),
    "memory": ("code",),
    "processes": ("code",),
    "disk": ("code",),
}


class RewardSpec(BaseModel):
    """One reward. `kind` says which; a string is short for its kind, `module:function` for a function of your own."""

    model_config = SETTINGS
    kind: Kind = Field("verifier", description="verifier: the prompt's own")
    weight: float = Field(1.0, allow_inf_nan=False, description="in a sum of rewards")
    time_limit: float = Field(10.0, gt=0, le=86_400, description="seconds per sample; code: per test case")
    field: str = Field("answer", description="the prompt's field that holds the right answer")
    extract: Literal["auto", "all", "last_line", "boxed"] = Field(
        "auto", description="where the answer stands; auto: all of it (exact), the boxed or else last number (numeric)"
    )
    ignore: list[Literal["case", "space", "punctuation", "articles"]] = Field(
        default_factory=list, description="differences an exact match overlooks"
    )
    tolerance: float = Field(1e-6, ge=0, allow_inf_nan=False, description="largest relative difference of two numbers")
    absolute: float = Field(0.0, ge=0, allow_inf_nan=False, description="largest absolute difference of two numbers")
    pattern: str | None = Field(None, description="regular expression")
    whole: bool = Field(False, description="the pattern must match all of the answer, not a part")
    json_schema: dict[str, Any] | None = Field(None, description="default: the prompt's field `schema`")
    function: str | None = Field(None, description="module:function or file.py:function, called with one sample")
    fresh: bool = Field(True, description="a fresh process per answer; false: one that keeps a model or a connection")
    partial: bool = Field(False, description="score the share of passed tests instead of all or nothing")
    sandbox: Sandbox = Field("auto", description="of this reward's programs; auto: as `rewards.sandbox` says")
    memory: Positive = Field(512, le=1 << 20, description="megabytes of a program, all its processes together")
    processes: Positive = Field(8, le=4096, description="processes and threads of a program")
    disk: Positive = Field(16, le=1 << 20, description="megabytes a program can write")

    @field_validator("pattern")
    @classmethod
    def _pattern(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"not a regular expression ({error})") from None
        return value

    @field_validator("function")
    @classmethod
    def _function(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"([\w.]+|[^\x00-\x1f]+\.py):\w+", value):
            raise ValueError("expected module:function, for example my_rewards:brevity, or file.py:function")
        return value

    @model_validator(mode="after")
    def _own_keys(self) -> RewardSpec:
        for key in self.model_fields_set & OWN.keys():
            if self.kind not in OWN[key] and getattr(self, key) != type(self).model_fields[key].get_default(
                call_default_factory=True
            ):
                raise ValueError(f"{key} belongs to {' and '.join(OWN[key])}, not to {self.kind}")
        if self.kind == "format" and self.pattern is None:
            raise ValueError("a format reward needs a pattern")
        if self.kind == "custom" and self.function is None:
            raise ValueError("a custom reward needs a function: module:function")
        return self


class Rewards(BaseModel):
    """The rewards of a stage, by domain, and what holds for all of them."""

    model_config = SETTINGS
    domains: dict[str, Annotated[list[RewardSpec], Field(min_length=1)]] = Field(
        default_factory=dict, description="by domain, or `default`; domains without an entry: the prompt's own verifier"
    )
    sandbox: Sandbox = Field(
        "auto", description="of everything that may run what the model wrote; none: no walls at all"
    )
    stop_after: Positive = Field(5, description="steps in which nothing was rewarded, after which the run stops")


def read_rewards(value: Any) -> Any:
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
        return {"domains": {DEFAULT: _list(rest)}, **own}
    if isinstance(rest.get("domains"), Mapping) and len(rest) == 1:  # spelt out, as in a resolved recipe
        rest = rest["domains"]
    return {"domains": {str(domain): _list(entry) for domain, entry in rest.items() if entry is not None}, **own}


def rewards_schema(spelt_out: Mapping[str, Any]) -> dict[str, Any]:
    """JSON schema of every way to write rewards."""
    words = [{"enum": list(get_args(Kind))}, {"type": "string", "pattern": ":"}]
    reward = [*words, {"$ref": "#/$defs/RewardSpec"}]
    some = [*reward, {"type": "array", "items": {"anyOf": reward}, "minItems": 1}]
    own = {key: Rewards.model_json_schema()["properties"][key] for key in RESERVED}
    alone = {"type": "object", "properties": own, "required": ["kind", "stop_after"]}  # a single reward with it
    by_domain = {"type": "object", "properties": own, "additionalProperties": {"anyOf": [*some, {"type": "null"}]}}
    return {"anyOf": [*some, alone, spelt_out, by_domain]}


def _list(value: Any) -> list[Any]:
    rows = value if isinstance(value, list) else [value]
    return [_one(row) for row in rows]


def _one(row: Any) -> Any:
    if not isinstance(row, str):
        return row
    return {"kind": "custom", "function": row} if ":" in row else {"kind": row}
