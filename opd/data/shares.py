"""How the prompts of a step are divided among domains: as the recipe says, or by what each of them still needs. No torch here.

Long answers bring most of the tokens that are trained on, so domains with short ones starve; and one that is learnt needs no more.
A rule turns what was seen of the domains so far into a factor for each one's share. What it goes by is kept with the order of the
prompts, in every checkpoint: a run that is resumed divides them as it would have.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from opd.common.errors import RecipeError
from opd.registry import Choice, Fraction, Positive, Word

if TYPE_CHECKING:
    from opd.registry import StageView


AHEAD = 8  # steps in which `tokens` means to pay back what a domain is owed


@dataclass
class DomainRecord:
    """What is known of a domain; None: nothing yet."""

    length: float | None = None  # tokens of an answer, smoothed
    kl: float | None = None  # nats per token between student and teacher, smoothed
    tokens: int = 0  # of all answers so far
    recent: float = 0.0  # tokens of a step, smoothed
    gap: float | None = None  # the teacher's score less the student's, at the newest evaluation


@dataclass(frozen=True)
class DomainSeen:
    """What a step showed of a domain."""

    answers: int
    tokens: int
    kl: float | None


class Shares(Choice):
    """A rule. `prompts.N.share` says what it starts from."""

    family = "shares"
    steers: ClassVar[bool]  # whether shares change on the way


class StaticShares(Shares):
    """As the recipe says."""

    name = "static"
    by_default = True
    steers = False


class SteeredShares(Shares):
    """By what was seen of the domains so far."""

    steers = True
    smoothing: float = Field(0.8, ge=0, lt=1, description="weight of earlier steps in what is known of a domain")
    least: Fraction = Field(0.25, description="part of its own share that every domain keeps")

    @abstractmethod
    def factors(self, records: Mapping[str, DomainRecord], static: Mapping[str, float]) -> dict[str, float]:
        """What each domain's share is multiplied with, up to a common factor; domains that nothing is known of are left out."""
        raise NotImplementedError

    def refuse(self, view: StageView) -> Iterable[str]:
        if view.sources < 2:
            yield f"shares {self.name} divides prompts among domains, and there is one source of prompts. Drop it."
        if view.rollout.staleness:
            yield (
                f"shares {self.name} goes by every step before, and rollout.staleness {view.rollout.staleness} draws prompts ahead of "
                "them. Set staleness: 0, or shares: static."
            )


class TokenShares(SteeredShares):
    """The tokens trained on so far come to be divided as the recipe divides prompts: who has had fewer gets more."""

    name = "tokens"

    def factors(self, records: Mapping[str, DomainRecord], static: Mapping[str, float]) -> dict[str, float]:
        known = {domain: record for domain, record in records.items() if record.length}
        goal = sum(record.tokens + AHEAD * record.recent for record in known.values())
        whole = sum(static[domain] for domain in known)
        owed = {domain: max(static[domain] / whole * goal - record.tokens, 0.0) for domain, record in known.items()}
        return {domain: owed[domain] / (static[domain] * (record.length or 1.0)) for domain, record in known.items()}


class LengthShares(SteeredShares):
    """By how long answers are: to the power -1, every domain gets the same tokens per step for the same share."""

    name = "length"
    power: float = Field(-1.0, ge=-4, le=4, description="of the mean length; below 0 short answers get more prompts")

    def factors(self, records: Mapping[str, DomainRecord], static: Mapping[str, float]) -> dict[str, float]:
        return {domain: record.length**self.power for domain, record in records.items() if record.length}


class GapShares(SteeredShares):
    """By how far the student is behind its teachers."""

    name = "gap"
    of: Literal["kl", "score"] = Field("kl", description="nats per token, or what evaluation says of both")
    power: float = Field(1.0, gt=0, le=4, description="of the gap; higher: more for those far behind")

    def factors(self, records: Mapping[str, DomainRecord], static: Mapping[str, float]) -> dict[str, float]:
        gaps = {domain: record.kl if self.of == "kl" else record.gap for domain, record in records.items()}
        return {domain: max(gap, 0.0) ** self.power for domain, gap in gaps.items() if gap is not None}

    def refuse(self, view: StageView) -> Iterable[str]:
        yield from super().refuse(view)
        if "teacher" not in view.roles:
            yield "shares gap goes by the distance to teachers, and there is none. Give one, or choose tokens or length."
        elif self.of == "score" and not (view.teachers_evaluated and view.evaluates):
            yield (
                "shares gap of score compares evaluations of student and teachers: set eval.every, eval.prompts and "
                "eval.teachers, or go by kl."
            )


class ShareKeeper:
    """What a rule goes by, and the shares that follow from it. `static`: domain -> the recipe's share."""

    def __init__(self, rule: Shares, static: Mapping[str, float]) -> None:
        assert isinstance(rule, SteeredShares)
        self._rule, total = rule, sum(static.values())
        self._static = {domain: share / total for domain, share in static.items()}
        self._records = {domain: DomainRecord() for domain in static}

    def observe(self, seen: Mapping[str, DomainSeen]) -> None:
        """What the step that has ended showed."""
        for domain, found in seen.items():
            record = self._records[domain]
            record.length = self._smooth(record.length, found.tokens / found.answers)
            record.kl = self._smooth(record.kl, found.kl)
            record.recent = self._smooth(record.recent if record.tokens else None, found.tokens) or 0.0
            record.tokens += found.tokens

    def shares(self, gaps: Mapping[str, float]) -> dict[str, float]:
        """Of every domain in the next step; `gaps`: the teacher's score less the student's, where both are known."""
        for domain, gap in gaps.items():
            if domain in self._records:
                self._records[domain].gap = gap
        factors = self._rule.factors(self._records, self._static)
        known = sum(self._static[domain] for domain in factors)
        wanted = sum(self._static[domain] * factor for domain, factor in factors.items())
        if wanted <= 0:  # nothing is known yet, or nobody needs more than others
            return dict(self._static)
        usual, least = wanted / known, self._rule.least  # what nothing is known of is taken for the mean
        raw = {domain: share * factors.get(domain, usual) for domain, share in self._static.items()}
        total = sum(raw.values())
        return {domain: least * share + (1 - least) * raw[domain] / total for domain, share in self._static.items()}

    def _smooth(self, before: float | None, now: float | None) -> float | None:
        if before is None or now is None:
            return before if now is None else now
        return self._rule.smoothing * before + (1 - self._rule.smoothing) * now

    def state(self) -> dict[str, Any]:
        return {domain: asdict(record) for domain, record in self._records.items()}

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self._records = {domain: DomainRecord(**record) for domain, record in state.items()}


# Which domains a stage trains on, by what an earlier stage came to: RL polish only where distillation has flattened. No torch here.


class SelectionRule(Choice):
    """Asked once, for every domain of the stage's prompts, before the stage begins."""

    family = "select"
    stage: Word = Field(description="the earlier stage whose evaluations decide")

    @field_validator("stage", mode="before")
    @classmethod
    def _its_name(cls, given: Any) -> Any:
        """`stage:NAME`, as it is written everywhere else, is NAME."""
        return given.removeprefix("stage:") if isinstance(given, str) else given

    @abstractmethod
    def chooses(self, values: Sequence[float]) -> bool:
        """Whether to train on a domain; `values`: its evaluations in that stage, from before the first step to after the last."""
        raise NotImplementedError

    def require(self, stage: str, domains: Iterable[str], evaluated: Collection[str]) -> None:
        """Refuse domains of a stage's prompts of which the earlier one says nothing."""
        unknown = [domain for domain in domains if domain not in evaluated]
        if unknown:
            raise RecipeError(
                f"stages.{stage}.select: stage {self.stage!r} does not evaluate {', '.join(unknown)}. Give it such prompts, or name "
                "them in its eval.further."
            )


class Flattened(SelectionRule):
    """Domains in which the last evaluations brought nothing more."""

    name = "flat"
    by_default = True
    evaluations: Positive = Field(1, description="the last ones that are looked at")
    gain: Fraction = Field(0.01, description="more than this above the best before them is not flat")

    def chooses(self, values: Sequence[float]) -> bool:
        before, last = values[: -self.evaluations], values[-self.evaluations :]
        return not before or max(last) <= max(before) + self.gain


class ScoreBetween(SelectionRule):
    """Domains whose last evaluation lies between two values: neither hopeless nor learnt."""

    name = "score"
    least: Fraction = 0.0
    most: Fraction = 1.0

    @model_validator(mode="after")
    def _some(self) -> ScoreBetween:
        if self.least > self.most:
            raise ValueError(f"least ({self.least}) is more than most ({self.most}), so no domain is chosen")
        return self

    def chooses(self, values: Sequence[float]) -> bool:
        return self.least <= values[-1] <= self.most
