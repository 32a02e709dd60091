"""How a step's prompts are divided among domains: by fixed shares, or by what each domain still needs. No torch here.

Long answers provide most training tokens, so domains with short answers get few; and a domain that is learnt needs no
more. A rule turns the statistics of the domains so far into a factor for each domain's share. Checkpoints store these
statistics along with the prompt order, so a resumed run divides the prompts the same way.
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


AHEAD = 8  # steps in which `tokens` aims to make up a domain's deficit


@dataclass
class DomainRecord:
    """Statistics of a domain; None: not known yet."""

    length: float | None = None  # tokens per answer, smoothed
    kl: float | None = None  # nats per token between student and teacher, smoothed
    tokens: int = 0  # of all answers so far
    recent: float = 0.0  # tokens per step, smoothed
    gap: float | None = None  # the teacher's score minus the student's, at the latest evaluation


@dataclass(frozen=True)
class DomainSeen:
    """Statistics of a domain from one step."""

    answers: int
    tokens: int
    kl: float | None


class Shares(Choice):
    """A rule for the domains' shares, starting from `prompts.N.share`."""

    family = "shares"
    steers: ClassVar[bool]  # whether shares change during the run


class StaticShares(Shares):
    """Uses the recipe's fixed shares."""

    name = "static"
    by_default = True
    steers = False


class SteeredShares(Shares):
    """Base of rules that adapt shares to the statistics of the domains."""

    steers = True
    smoothing: float = Field(0.8, ge=0, lt=1, description="weight of earlier steps in what is known of a domain")
    least: Fraction = Field(0.25, description="part of its own share that every domain keeps")

    @abstractmethod
    def factors(self, records: Mapping[str, DomainRecord], static: Mapping[str, float]) -> dict[str, float]:
        """Factor of each domain's share, up to a common factor. Domains without data are left out."""
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
    """Makes the tokens trained on so far match the recipe's shares: domains with fewer tokens get more prompts."""

    name = "tokens"

    def factors(self, records: Mapping[str, DomainRecord], static: Mapping[str, float]) -> dict[str, float]:
        known = {domain: record for domain, record in records.items() if record.length}
        goal = sum(record.tokens + AHEAD * record.recent for record in known.values())
        whole = sum(static[domain] for domain in known)
        owed = {domain: max(static[domain] / whole * goal - record.tokens, 0.0) for domain, record in known.items()}
        return {domain: owed[domain] / (static[domain] * (record.length or 1.0)) for domain, record in known.items()}


class LengthShares(SteeredShares):
    """By answer length: with power -1, domains with equal shares get equal tokens per step."""

    name = "length"
    power: float = Field(-1.0, ge=-4, le=4, description="of the mean length; below 0 short answers get more prompts")

    def factors(self, records: Mapping[str, DomainRecord], static: Mapping[str, float]) -> dict[str, float]:
        return {domain: record.length**self.power for domain, record in records.items() if record.length}


class GapShares(SteeredShares):
    """By how far the student scores below its teachers."""

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
    """The statistics for a rule, and the resulting shares. `static`: domain -> the recipe's share."""

    def __init__(self, rule: Shares, static: Mapping[str, float]) -> None:
        assert isinstance(rule, SteeredShares)
        self._rule, total = rule, sum(static.values())
        self._static = {domain: share / total for domain, share in static.items()}
        self._records = {domain: DomainRecord() for domain in static}

    def observe(self, seen: Mapping[str, DomainSeen]) -> None:
        """Add the statistics of a finished step."""
        for domain, found in seen.items():
            record = self._records[domain]
            record.length = self._smooth(record.length, found.tokens / found.answers)
            record.kl = self._smooth(record.kl, found.kl)
            record.recent = self._smooth(record.recent if record.tokens else None, found.tokens) or 0.0
            record.tokens += found.tokens

    def shares(self, gaps: Mapping[str, float]) -> dict[str, float]:
        """Shares of every domain in the next step. `gaps`: the teacher's score minus the student's, if both are known."""
        for domain, gap in gaps.items():
            if domain in self._records:
                self._records[domain].gap = gap
        factors = self._rule.factors(self._records, self._static)
        known = sum(self._static[domain] for domain in factors)
        wanted = sum(self._static[domain] * factor for domain, factor in factors.items())
        if wanted <= 0:  # no data yet, or no domain needs more than others
            return dict(self._static)
        usual, least = wanted / known, self._rule.least  # a domain without data counts as the mean
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


# --- Selecting a stage's domains by an earlier stage's evaluations, e.g. RL only where distillation has flattened ---


class SelectionRule(Choice):
    """Chooses domains by an earlier stage's evaluations; applied once per domain, before the stage starts."""

    family = "select"
    stage: Word = Field(description="the earlier stage whose evaluations decide")

    @field_validator("stage", mode="before")
    @classmethod
    def _its_name(cls, given: Any) -> Any:
        """Accept `stage:NAME`, the form used elsewhere, for NAME."""
        return given.removeprefix("stage:") if isinstance(given, str) else given

    @abstractmethod
    def chooses(self, values: Sequence[float]) -> bool:
        """Whether to train on a domain. `values`: its evaluations in that stage, from before step 1 to after the last."""
        raise NotImplementedError

    def require(self, stage: str, domains: Iterable[str], evaluated: Collection[str]) -> None:
        """Raise an error for domains that the earlier stage did not evaluate."""
        unknown = [domain for domain in domains if domain not in evaluated]
        if unknown:
            raise RecipeError(
                f"stages.{stage}.select: stage {self.stage!r} does not evaluate {', '.join(unknown)}. Give it such prompts, or name "
                "them in its eval.further."
            )


class Flattened(SelectionRule):
    """Chooses domains whose last evaluations brought no improvement."""

    name = "flat"
    by_default = True
    evaluations: Positive = Field(1, description="the last ones that are looked at")
    gain: Fraction = Field(0.01, description="more than this above the best before them is not flat")

    def chooses(self, values: Sequence[float]) -> bool:
        before, last = values[: -self.evaluations], values[-self.evaluations :]
        return not before or max(last) <= max(before) + self.gain


class ScoreBetween(SelectionRule):
    """Chooses domains whose last evaluation is between two values: neither too hard nor learnt."""

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
