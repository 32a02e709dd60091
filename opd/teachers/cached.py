"""A teacher that has scored already: its signals come from an earlier run or stage, and its model is not loaded. No torch here.

Every signal is kept under whose it is (settings and weights hash), what was read (view, exact ids, spans) and in which vocabulary. What
does not match is an error that names the part, never a miss in silence.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator, model_validator

from opd.errors import DataError
from opd.settings import Address, Word
from opd.teachers.cache import ScoredStage
from opd.teachers.kinds import Supplies, TeacherKind
from opd.types import SignalKind, TeacherLike

if TYPE_CHECKING:
    from opd.models.tokenizers import Elsewhere
    from opd.teachers.kinds import Surroundings

STAGE = "stage:"


class CachedTeacher(TeacherKind):
    """What a teacher said in a stage with `train: {learn: false}`."""

    name = "cached"
    offers = frozenset({"logprobs_at", "hidden"})
    scores_any = False

    run: Address = Field(description="of cached: the run directory with the scores, or stage:NAME")
    stage: Word | None = Field(None, description="of cached: the stage that scored; default: the run's only one")
    teacher: Word | None = Field(None, description="of cached: its name there; default: the same, or the only one")
    model: Address | None = Field(None, description="of cached: whose scores they have to be; its weights are compared")
    revision: Word | None = None

    @field_validator("model")
    @classmethod
    def _lies_somewhere(cls, value: str | None) -> str | None:
        if value is not None and value.startswith(STAGE):
            raise ValueError("the weights of a stage cannot be compared here: leave `model` out")
        return value

    @model_validator(mode="after")
    def _of_a_model(self) -> CachedTeacher:
        if self.revision is not None and self.model is None:
            raise ValueError("`revision` is that of `model`, whose weights are compared: set `model`, or drop it")
        return self

    def earlier(self) -> Sequence[str]:
        return (self.run,)

    def inside(self, directory: Path) -> TeacherKind:
        if not self.run.startswith(STAGE):
            return self
        return self.model_copy(update={"run": str(directory), "stage": self.run.removeprefix(STAGE)})

    @property
    def title(self) -> str:
        return f"scores kept in {self.run}"

    @cached_property
    def scored(self) -> ScoredStage:
        from opd.sampling.replay import EarlierRun

        return ScoredStage.read(Path(self.run), EarlierRun(Path(self.run), self.stage).stage)

    def files(self) -> list[Path]:
        if self.run.startswith(STAGE):
            return []
        heads = [facts["head"] for facts in self.scored.teachers.values() if facts["head"] is not None]
        return [self.scored.path, *(self.scored.head_file(head) for head in heads)]

    def vocabulary(self, around: Surroundings) -> Elsewhere | None:
        from opd.models.tokenizers import Elsewhere

        return Elsewhere(f"{self.name} in {self.run}", self.scored.stop_ids, self.scored.size)

    def require(self, name: str, tokenizer: Any, signals: Collection[SignalKind]) -> None:
        from opd.models.identity import weights_hash
        from opd.models.tokenizers import fingerprint

        if self.run.startswith(STAGE):
            return  # a plan: that stage has not scored yet
        scored = self.scored
        known, facts = scored.teacher(self.teacher, name)
        if (now := fingerprint(tokenizer)) != scored.tokenizer:
            raise self.stale(name, "the tokenizer", scored.tokenizer, now)
        view = self.view.model_dump(mode="json")
        if facts["kind"]["view"] != view:
            raise self.stale(name, "the view", facts["kind"]["view"], view)
        if self.model is not None and (now := weights_hash(self.model, self.revision)) not in facts["weights"].values():
            there = ", ".join(f"{model} ({found[:12]}…)" for model, found in facts["weights"].items()) or "no model"
            raise self.stale(name, "the weights", there, f"{self.model} ({now[:12]}…)")
        missing = [kind for kind in signals if kind not in facts["signals"]]
        if missing:
            raise DataError(
                f"teachers.{name}: {missing[0]} is asked for, and teacher {known!r} left {', '.join(facts['signals']) or 'nothing'} "
                f"in {self.run}. Score with the objective that is trained with, or use another form of loss."
            )

    def stale(self, name: str, what: str, then: Any, now: Any) -> DataError:
        return DataError(
            f"teachers.{name}: the scores in {self.run} are stale: {what} differs: {then} when they were made, {now} now. "
            "Score again, or put back what was."
        )

    def open(self, name: str, supplies: Supplies) -> TeacherLike:
        from opd.teachers.from_cache import TeacherFromCache

        return TeacherFromCache(name, self, supplies)
