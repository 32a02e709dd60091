"""A monitor: one way in which a run fails. Its settings are its thresholds; (P) is a published number, (H) a heuristic of ours."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, Field, model_validator

from opd import families
from opd.monitors.history import History
from opd.settings import SETTINGS, Choice, Family, Word
from opd.shorthand import OneOrMany

RecipeStage = dict[str, Any]  # a stage as `resolved.yaml` has it; a remedy changes a copy of its own


@dataclass(frozen=True)
class Alarm:
    """`words`: what is the matter, for somebody who has not read the code."""

    value: float
    threshold: float
    words: str


class StepProbe(Protocol):
    """A step that has just been trained on, for monitors that have to look at more than its metrics. Nothing is computed unasked."""

    @property
    def step(self) -> int: ...

    @property
    def evaluates(self) -> bool:
        """Whether held-out prompts are asked on the way."""

    def cosines(self, answers: int) -> dict[str, float]:
        """Domain -> the cosine between its gradient, over so many answers, and that of all others; nothing below two teachers."""

    def teachers_calibration(self, answers: int) -> dict[str, float]:
        """The expected calibration error of teachers on so many answers of the student, from what they have said of them already."""

    def taken_over(self, answers: int, depth: float) -> dict[str, float]:
        """How much more often the teacher is right than the student: from the beginning on, and behind a part of its answers."""


class Monitor(Choice):
    """Asked after every step. An alarm is raised once, and again only after it has been quiet for a while."""

    family = "monitor"
    usual: ClassVar[bool] = True  # watches without being asked, since what it reads is there anyway
    reads: ClassVar[tuple[str, ...]]  # metrics; without them it stays quiet
    remedy: ClassVar[str]  # what is published against it, in words
    samples_teacher: ClassVar[bool] = False  # the prompt's own, which has to have a model in this process
    action: Literal["warn", "stop"] | None = Field(None, description="of one monitor; default: that of all")

    def measure(self, probe: StepProbe) -> dict[str, float]:
        """Metrics that it adds to those of a step; most have all they need."""
        return {}

    @abstractmethod
    def alarm(self, history: History) -> Alarm | None:
        """None: nothing is the matter, or it cannot be told."""
        raise NotImplementedError

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        """Recipes that apply the remedy, the best first; the first that can be carried out is written down."""
        return iter(())


AnyMonitor = Annotated[Monitor, Family("monitor")]


class Monitors(BaseModel):
    """What is watched while a stage trains."""

    model_config = SETTINGS
    action: Literal["warn", "stop", "off"] = Field(
        "warn", description="what an alarm does: say so, or end the run after a checkpoint; off: nothing is watched"
    )
    watch: Annotated[list[AnyMonitor], OneOrMany()] = Field(
        default_factory=list,
        max_length=100,
        description="monitors with settings of their own; the usual ones are added",
    )
    ignore: Annotated[list[Word], OneOrMany()] = Field(
        default_factory=list, max_length=100, description="usual monitors that are left out"
    )

    @model_validator(mode="after")
    def _means_something(self) -> Monitors:
        names = [monitor.name for monitor in self.watch]
        if self.action == "off" and (names or self.ignore):
            raise ValueError("action off watches nothing: drop `watch` and `ignore`, or the action")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"watch: {twice[0]} comes twice: keep one")
        if unknown := [name for name in self.ignore if name not in usual_monitors()]:
            raise ValueError(
                f"ignore: {unknown[0]!r} is not watched anyway; those that are: {', '.join(usual_monitors())}"
            )
        if both := [name for name in self.ignore if name in names]:
            raise ValueError(f"ignore: {both[0]} stands under `watch`, too: keep one")
        return self

    def completed(self) -> Monitors:
        """With the usual ones, so that `resolved.yaml` names all that was watched."""
        if self.action == "off":
            return self
        named = {*self.ignore, *(monitor.name for monitor in self.watch)}
        usual = [families.find("monitor", name)() for name in usual_monitors() if name not in named]
        return self.model_copy(update={"watch": [*self.watch, *usual]})

    def action_of(self, monitor: Monitor) -> str:
        return monitor.action or self.action


def usual_monitors() -> list[str]:
    """Those that watch without being asked."""
    found = {name: families.find("monitor", name) for name in families.names("monitor")}
    return [name for name, kind in found.items() if issubclass(kind, Monitor) and kind.usual]
