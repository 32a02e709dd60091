"""How answers are scored: one reward or a weighted sum, for every domain or by domain."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from opd.config.base import SETTINGS, Positive

Kind = Literal["verifier", "exact", "numeric", "format", "maths", "code", "json", "custom"]
DEFAULT = "default"  # the key for domains that have no entry of their own

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
    weight: float = Field(1.0, description="in a sum of rewards")
    time_limit: float = Field(10.0, gt=0, description="seconds per sample; code: per test case")
    field: str = Field("answer", description="the prompt's field that holds the right answer")
    extract: Literal["auto", "all", "last_line", "boxed"] = Field(
        "auto", description="where the answer stands; auto: all of it (exact), the boxed or else last number (numeric)"
    )
    ignore: list[Literal["case", "space", "punctuation", "articles"]] = Field(
        default_factory=list, description="differences an exact match overlooks"
    )
    tolerance: float = Field(1e-6, ge=0, description="largest relative difference of two numbers")
    absolute: float = Field(0.0, ge=0, description="largest absolute difference of two numbers")
    pattern: str | None = Field(None, description="regular expression")
    whole: bool = Field(False, description="the pattern must match all of the answer, not a part")
    json_schema: dict[str, Any] | None = Field(None, description="default: the prompt's field `schema`")
    function: str | None = Field(None, description="module:function, called with one sample")
    partial: bool = Field(False, description="score the share of passed tests instead of all or nothing")
    sandbox: Literal["auto", "bubblewrap", "namespaces", "none"] = "auto"
    memory: Positive = Field(512, description="megabytes of each process")
    processes: Positive = Field(8, description="processes and threads of a program")
    disk: Positive = Field(16, description="megabytes a program can write")

    @field_validator("pattern")
    @classmethod
    def _pattern(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
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


def read_rewards(value: Any) -> Any:
    """`numeric`, `{kind: …}`, a list of those, or any of them by domain -> lists by domain."""
    if isinstance(value, Mapping) and "kind" not in value:
        return {str(domain): _list(entry) for domain, entry in value.items()}
    return {DEFAULT: _list(value)}


def _list(value: Any) -> list[Any]:
    rows = value if isinstance(value, list) else [value]
    return [_one(row) for row in rows]


def _one(row: Any) -> Any:
    if not isinstance(row, str):
        return row
    return {"kind": "custom", "function": row} if ":" in row else {"kind": row}
