"""Which prompts a step gets, and how they are divided among domains. No torch here.

Shares are exact, every prompt of a finite source is seen once per pass, and a few integers are enough to resume.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from opd.common.errors import DataError, RecipeError, UnopenedEpisode
from opd.data.sources import Source
from opd.records import Author, Rollout, Visit
from opd.registry import Choice, Fraction, Needs, Positive, StageView, Word

UNOPENED = 3  # prompts in a row whose environment does not begin
PATIENCE = 10_000  # prompts of an endless source that may be rejected in a row


class PromptStream:
    """Draws from several sources by share. Finite sources are reshuffled each pass, by (seed, source, pass).

    An unusable row takes its turn like any other and is then skipped, so it does not change the prompts after it.

    >>> stream = PromptStream(sources, shares=[3, 1], seed=0)   # doctest: +SKIP
    >>> [visit.source for visit in stream.take(4)]              # doctest: +SKIP
    [0, 0, 1, 0]
    """

    def __init__(self, sources: list[Source], shares: list[float], seed: int) -> None:
        self._sources, self._seed = sources, seed
        self._shares = np.asarray(shares, dtype=np.float64) / sum(shares)
        self._taken = np.zeros(len(sources), dtype=np.int64)
        self._owed = np.zeros(len(sources))  # prompts owed to each source when shares last changed
        self._before = np.zeros(len(sources), dtype=np.int64)  # prompts taken by then
        self._orders: dict[int, tuple[int, np.ndarray]] = {}
        self._unusable: Sequence[np.ndarray | None] = [None] * len(sources)
        self._fits: Callable[[Visit], bool] | None = None
        self._skips: Callable[[UnopenedEpisode], bool] = lambda error: False
        self._unopened = 0  # prompts in a row whose environment did not begin
        self.skipped = 0  # visits to unusable prompts
        self.keeper: ShareKeeper | None = None
        self._domains: list[str] = []  # of the sources, if shares follow a rule
        self._parts = np.ones(len(sources))  # each source's fraction of its domain's share
        self.curriculum: Curriculum | None = None
        self._known: dict[str, float] = {}  # the curriculum's measure of a prompt, by id
        self.passed_over = 0  # visits that the curriculum left out

    def leave_out(
        self,
        unusable: Sequence[np.ndarray | None],
        fits: Callable[[Visit], bool] | None,
        skips: Callable[[UnopenedEpisode], bool] = lambda error: False,
    ) -> None:
        """Set the rows of each finite source to skip, and a check for prompts that could not all be scanned. `skips`: whether to skip a
        prompt whose environment does not begin.
        """
        self._unusable, self._fits, self._skips = unusable, fits, skips

    def follow(self, curriculum: Curriculum | None) -> None:
        """Let a curriculum choose among the prompts of each pass."""
        endless = [source.name for source in self._sources if source.size is None]
        if curriculum is not None and endless:
            raise DataError(
                f"curriculum {curriculum.name} goes by what is known of a prompt from earlier passes, and prompts {endless[0]} have no end. "
                "Set `limit` there, or drop the curriculum."
            )
        self.curriculum = curriculum

    def study(self, values: Mapping[str, float]) -> dict[str, float]:
        """After a step: what the curriculum has measured of prompts, by id. Returns metrics."""
        self._known |= values
        found = {"curriculum/known": float(len(self._known)), "curriculum/passed_over": float(self.passed_over)}
        return found | ({"curriculum/mean": sum(values.values()) / len(values)} if values else {})

    def _takes(self, visit: Visit, position: int) -> bool:
        """Whether the curriculum takes a prompt now. A draw keyed by its place in the stream decides."""
        assert self.curriculum is not None
        value = self._known.get(visit.prompt.id)
        if value is None:  # every prompt is seen once
            return True
        chance = self.curriculum.chance(value, self._known)
        draw = np.random.default_rng([self._seed, visit.source, position, 1]).random()
        return bool(draw < max(chance, self.curriculum.least))

    def steer(self, rule: Shares) -> None:
        """Let shares follow a rule. Every source must then have a single domain."""
        if not rule.steers:
            return
        found = [sorted({prompt.domain for prompt in source.examples()}) for source in self._sources]
        for source, domains in zip(self._sources, found, strict=True):
            if len(domains) > 1:
                raise DataError(
                    f"prompts {source.name}: rows of the domains {', '.join(domains[:5])}, and shares {rule.name} divides prompts "
                    "among sources. Give every domain a source of its own, or set shares: static."
                )
        self._domains = [domain for domain, *_ in found]
        static: dict[str, float] = {}
        for domain, share in zip(self._domains, self._shares.tolist(), strict=True):
            static[domain] = static.get(domain, 0.0) + share
        if len(static) < 2:
            raise DataError(
                f"shares {rule.name} divides prompts among domains, and there is one: {self._domains[0]}. Drop it."
            )
        self._parts = self._shares / [static[domain] for domain in self._domains]
        self.keeper = ShareKeeper(rule, static)

    def reshare(self, shares: Mapping[str, float]) -> None:
        """Set the shares of domains from now on. Debts to sources from the old shares are kept."""
        owed = self._credit(0)
        self._owed, self._before = owed, self._taken.copy()
        self._shares = np.asarray([shares[domain] for domain in self._domains]) * self._parts

    def divide(
        self, gaps: Mapping[str, float], share: Callable[[Callable[[], dict[str, float]]], dict[str, float]]
    ) -> None:
        """Before a step: update the domains' shares, if a rule is set. `gaps`: how far each domain scores below its teacher.

        `share`: broadcasts the first rank's result to all ranks.
        """
        if (keeper := self.keeper) is not None:
            self.reshare(share(lambda: dict(keeper.shares(gaps))))

    def note(self, rollouts: Sequence[Rollout], metrics: Mapping[str, float | None]) -> dict[str, float]:
        """After a step: record the domains' statistics. Returns the shares of that step."""
        if self.keeper is None:
            return {}
        sizes: dict[str, list[int]] = {}
        for rollout in rollouts:
            sizes.setdefault(rollout.domain, []).append(int(rollout.response_ids.size))
        self.keeper.observe(
            {name: DomainSeen(len(size), sum(size), metrics.get(f"kl/{name}")) for name, size in sizes.items()}
        )
        return {f"share/{domain}": share for domain, share in self.shares.items()}

    def _credit(self, more: int) -> np.ndarray:
        """Prompts owed to each source after `more` further draws."""
        taken = self._taken - self._before
        credit: np.ndarray = self._owed + (self._shares * (taken.sum() + more) - taken)
        return credit

    @property
    def shares(self) -> dict[str, float]:
        """Current shares of the domains; empty if they are fixed."""
        found: dict[str, float] = {}
        for domain, share in zip(self._domains, self._shares.tolist(), strict=True) if self._domains else ():
            found[domain] = found.get(domain, 0.0) + share
        return found

    def take(self, count: int) -> list[Visit]:
        """The next usable prompts."""
        visits: list[Visit] = []
        skipped = 0  # in a row
        while len(visits) < count:
            visit = self._next()
            if visit is not None:
                visits.append(visit)
                skipped = 0
                continue
            skipped += 1
            if skipped > PATIENCE + sum(source.size or 0 for source in self._sources):
                raise DataError(
                    "prompts: thousands in a row cannot be used. Raise rollout.max_prompt_tokens, or lower "
                    "rollout.max_new_tokens."
                )
        return visits

    def _next(self) -> Visit | None:
        """The next visit by share and order; None if the prompt is unusable."""
        source = int(np.argmax(self._credit(1)))
        position = int(self._taken[source])
        self._taken[source] += 1
        size, unusable = self._sources[source].size, self._unusable[source]
        if size is None:
            visit, index = 0, position
        else:
            visit, offset = divmod(position, size)
            index = int(self._order(source, visit, size)[offset])
        if unusable is not None and unusable[index]:
            self.skipped += 1
            return None
        try:
            found = Visit(self._sources[source].train(index), visit, source)
        except UnopenedEpisode as error:
            self._unopened += 1
            if self._unopened >= UNOPENED or not self._skips(error):
                raise
            self.skipped += 1
            return None
        self._unopened = 0
        if self.curriculum is not None and not self._takes(found, position):
            self.passed_over += 1
            return None
        if self._fits is None or self._fits(found):
            return found
        self.skipped += 1
        return None

    def _order(self, source: int, visit: int, size: int) -> np.ndarray:
        cached = self._orders.get(source)
        if cached is None or cached[0] != visit:
            cached = (visit, np.random.default_rng([self._seed, source, visit]).permutation(size))
            self._orders[source] = cached
        return cached[1]

    def state(self) -> dict[str, Any]:
        state = {"taken": self._taken.tolist(), "skipped": self.skipped}
        if self.curriculum is not None:
            state |= {"curriculum": dict(self._known), "passed_over": self.passed_over}
        if self.keeper is not None:
            state |= {"shares": self._shares.tolist(), "owed": self._owed.tolist(), "before": self._before.tolist()}
            state["needs"] = self.keeper.state()
        return state

    def restore(self, state: dict[str, Any]) -> None:
        self._taken = np.asarray(state["taken"], dtype=np.int64)
        self.skipped = state.get("skipped", 0)  # runs of versions that could not skip rows
        if self.curriculum is not None:
            self._known, self.passed_over = dict(state["curriculum"]), state["passed_over"]
        if self.keeper is not None:
            self._shares, self._owed = np.asarray(state["shares"]), np.asarray(state["owed"])
            self._before = np.asarray(state["before"], dtype=np.int64)
            self.keeper.restore(state["needs"])


# --- Shares: how a step's prompts are divided among domains, by fixed shares or by what each domain still needs ---
#
# Long answers provide most training tokens, so domains with short answers get few; and a domain that is learnt needs no
# more. A rule turns the statistics of the domains so far into a factor for each domain's share. Checkpoints store these
# statistics along with the prompt order, so a resumed run divides the prompts the same way.


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
    smoothing: float = Field(0.8, ge=0, lt=1, description="weight of earlier steps in a domain's statistics")
    least: Fraction = Field(0.25, description="smallest share of a domain, as a fraction of its share in the recipe")

    @abstractmethod
    def factors(self, records: Mapping[str, DomainRecord], static: Mapping[str, float]) -> dict[str, float]:
        """Factor of each domain's share, up to a common factor. Domains without data are left out."""
        raise NotImplementedError

    def check(self, view: StageView) -> Iterable[str]:
        if view.sources < 2:
            yield f"shares {self.name} divides prompts among domains, and there is one source of prompts. Drop it."
        if view.rollout.staleness:
            yield (
                f"shares {self.name} uses the statistics of every earlier step, and rollout.staleness {view.rollout.staleness} draws prompts before "
                "they are known. Set staleness: 0, or shares: static."
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
    of: Literal["kl", "score"] = Field("kl", description="the KL in nats per token, or evaluation scores")
    power: float = Field(1.0, gt=0, le=4, description="of the gap; higher: more prompts for domains with a large gap")

    def factors(self, records: Mapping[str, DomainRecord], static: Mapping[str, float]) -> dict[str, float]:
        gaps = {domain: record.kl if self.of == "kl" else record.gap for domain, record in records.items()}
        return {domain: max(gap, 0.0) ** self.power for domain, gap in gaps.items() if gap is not None}

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if "teacher" not in view.roles:
            yield "shares gap uses the distance to teachers, and there is none. Add one, or choose tokens or length."
        elif self.of == "score" and not (view.teachers_evaluated and view.evaluates):
            yield (
                "shares gap of score compares evaluations of student and teachers: set eval.every, eval.prompts and "
                "eval.teachers, or use of: kl."
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
    evaluations: Positive = Field(1, description="how many of the last evaluations to look at")
    gain: Fraction = Field(0.01, description="a larger gain over the best evaluation before them is not flat")

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


# --- Curricula: which prompts of a pass are taken, by what earlier passes have shown of them ---


class Curriculum(Choice):
    """Prefers some prompts of finite sources. A prompt is taken in its first pass, and later with a chance that its measure gives."""

    family = "curriculum"
    least: float = Field(
        0.1,
        gt=0,
        le=1,
        description="chance of a prompt that the curriculum does not want, so that it is measured again",
    )

    @property
    def compared(self) -> int:
        """How many of the likeliest ids of student and teacher it compares; 0: it does not go by their overlap."""
        return 0

    @abstractmethod
    def measures(
        self, rollouts: Sequence[Rollout], rewards: Mapping[str, float | None], means: Mapping[str, float]
    ) -> dict[str, float]:
        """The measure of the prompts of a step, by id.

        `means`: by rollout that a teacher scored, the mean of its tokens' |reverse KL|, or of the overlap if `compared` is not 0.
        """
        raise NotImplementedError

    @abstractmethod
    def chance(self, value: float, known: Mapping[str, float]) -> float:
        """The chance of a prompt with this measure, from 0 to 1. `known`: the measures of all prompts so far."""
        raise NotImplementedError

    def check(self, view: StageView) -> Iterable[str]:
        if view.rollout.staleness:
            yield (
                f"curriculum with rollout.staleness {view.rollout.staleness}: prompts would be drawn before earlier answers are known. "
                "Set staleness: 0."
            )
        left = view.rollout.ever_positive | {writer.author for writer in view.rollout.writers}
        if "student" not in left or None not in view.rollout.by_sample:
            yield f"{self.name} goes by the student's own answers, and others write all of them. Lower their shares, or drop the curriculum."


class PassRate(Curriculum):
    """Prefers prompts that the student solves sometimes: p^a (1 - p)^b of its pass rate p, relative to the largest (PACED)."""

    name = "pass_rate"
    a: float = Field(1.0, gt=0, le=10, description="of pass_rate: power of the pass rate")
    b: float = Field(1.0, gt=0, le=10, description="of pass_rate: power of the rate of failures")

    def needs(self) -> Needs:
        return Needs(rewards=True)

    def measures(
        self, rollouts: Sequence[Rollout], rewards: Mapping[str, float | None], means: Mapping[str, float]
    ) -> dict[str, float]:
        right: dict[str, list[bool]] = {}
        for rollout in {rollout.episode: rollout for rollout in rollouts}.values():
            reward = rewards.get(rollout.id)
            if reward is not None and (rollout.author == Author.STUDENT).any():
                right.setdefault(rollout.prompt_id, []).append(reward >= 1)
        return {name: sum(some) / len(some) for name, some in right.items()}

    def chance(self, value: float, known: Mapping[str, float]) -> float:
        top = self.a / (self.a + self.b)
        return float((value / top) ** self.a * ((1 - value) / (1 - top)) ** self.b)

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if view.rollout.samples == 1:
            yield "pass_rate needs several samples of a prompt, and rollout.samples is 1: every rate would be 0 or 1. Raise it."


class TeacherDistance(Curriculum):
    """Prefers prompts on whose answers student and teacher differ most, or least. Needs no verifier."""

    name = "kl"
    share: float = Field(0.5, gt=0, lt=1, description="of kl and overlap: the part of the prompts that it prefers")
    prefer: Literal["far", "near"] = Field(
        "far", description="of kl and overlap: prompts on which student and teacher differ most, or least"
    )

    def measures(
        self, rollouts: Sequence[Rollout], rewards: Mapping[str, float | None], means: Mapping[str, float]
    ) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        for rollout in rollouts:
            if rollout.id in means and (rollout.author == Author.STUDENT).any():
                found.setdefault(rollout.prompt_id, []).append(means[rollout.id])
        return {name: sum(some) / len(some) for name, some in found.items()}

    def chance(self, value: float, known: Mapping[str, float]) -> float:
        preferred = sum((other > value) if self.prefer == "far" else (other < value) for other in known.values())
        return float(preferred < self.share * len(known))

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if "teacher" not in view.roles:
            yield f"curriculum {self.name} goes by the distance to teachers, and there is none. Give one, or choose pass_rate."


class TopOverlap(TeacherDistance):
    """The same by how many of the likeliest ids student and teacher have in common: few are far."""

    name = "overlap"
    k: Positive = Field(16, le=1000, description="of overlap: number of likeliest ids of both sides")

    @property
    def compared(self) -> int:
        return self.k

    def chance(self, value: float, known: Mapping[str, float]) -> float:
        return super().chance(-value, {name: -other for name, other in known.items()})
