"""The key `cluster`: how a run is spread over devices. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from opd.settings import SETTINGS, Count, Positive, Word
from opd.teachers.kinds import TeacherKind
from opd.teachers.pool_settings import TeacherPool, movable

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def in_numbers(value: Any) -> Any:
    """`32B`, `0.6B` and `135M` are numbers of parameters."""
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([KMBT]?)", value.strip()) if isinstance(value, str) else None
    return round(float(found[1]) * UNITS[found[2]]) if found is not None else value


Parameters = Annotated[int, BeforeValidator(in_numbers), Field(ge=1, le=10**15)]


class ModelSize(BaseModel):
    """Of a model that is not on this machine, for the plan alone. What is left out is guessed from `parameters`."""

    model_config = SETTINGS
    parameters: Parameters = Field(description="for example 32B")
    active: Parameters | None = Field(None, description="that one token goes through; default: all of them")
    width: Positive | None = Field(None, description="of the hidden states")
    layers: Positive | None = None
    vocabulary: Positive | None = None
    key_values: Positive | None = Field(None, description="numbers that a layer keeps per token, keys and values")
    tied: bool | None = Field(None, description="whether the head is the embedding")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"parameters": value} if isinstance(value, (str, int)) else value


class Cluster(BaseModel):
    """What several ranks share, and where the parts of a run are placed: docs/scale.md."""

    model_config = SETTINGS
    shard: Literal["full", "hybrid"] = Field(
        "full",
        description="full: over all ranks; hybrid: over the ranks of a group, each group a replica of the others",
    )
    group: Positive | None = Field(
        None, le=65_536, description="ranks of a group of shard: hybrid; default: those of one machine"
    )
    teachers: Literal["whole", "shard"] = Field(
        "whole", description="frozen teachers on several ranks: whole on each, or their layers spread over all"
    )
    trainers: Positive = Field(
        1, le=65_536, description="ranks, of `opd run --on ray`; torchrun is told by --nproc-per-node"
    )
    samplers: Count = Field(
        0, le=65_536, description="workers that sample, of --on ray, at most one per trainer; 0: the trainers do"
    )
    servers: Count = Field(
        0, le=65_536, description="workers that serve the frozen teachers, of --on ray; 0: they are with the trainers"
    )
    rewards: Count = Field(
        0, le=65_536, description="CPUs kept for reward workers beside the first trainer, of --on ray"
    )
    sizes: dict[Word, ModelSize] = Field(
        default_factory=dict,
        max_length=1000,
        description="model -> size, for `opd cluster plan` where the model is not on this machine",
    )

    @property
    def placement(self) -> tuple[int, int, int, int]:
        return self.trainers, self.samplers, self.servers, self.rewards

    @model_validator(mode="after")
    def _groups(self) -> Cluster:
        if self.group is not None and self.shard != "hybrid":
            raise ValueError(f"group {self.group} is for shard: hybrid; with {self.shard} all ranks are one group")
        return self

    def refuse(
        self, kinds: Mapping[str, TeacherKind], pool: TeacherPool, drawn: Iterable[str], evaluated: bool
    ) -> Iterable[str]:
        """`drawn`: keys of the recipe that draw tokens from teachers, or read all their weights at once."""
        if self.teachers == "whole":
            return
        if not movable(kinds):
            yield "cluster.teachers shard: only frozen teachers can be spread over ranks, and there is none. Drop it."
        if pool.resident is not None:
            yield (
                f"cluster.teachers shard with pool.resident {pool.resident}: their weights are spread over ranks, or come and "
                "go. Choose one."
            )
        for key in [*drawn, *(["eval.teachers"] if evaluated else [])]:
            yield (
                f"{key} needs all weights of a teacher on every rank, and with cluster.teachers shard each has a part. Drop "
                f"{key}, or set cluster.teachers: whole."
            )
