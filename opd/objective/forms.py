"""Forms of a term: direct divergence, k2, cross-entropy, and ULD and GOLD for teachers with another tokenizer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from pydantic import Field, model_validator

from opd.divergences.kinds import AnyDivergence, AnySupport, Full, ReverseKL
from opd.objective.term import CorrectedTerm, Term
from opd.registry import Choice, Fraction, Needs, Positive, StageView

if TYPE_CHECKING:
    from torch import Tensor

    from opd.divergences import Projection, RowStatistics
    from opd.divergences.projection import Source
    from opd.objective.micro import MicroBatch
    from opd.objective.objective import PreparedTerm
    from opd.records import Rollout, Signal, SignalKind, TopK


class Direct(CorrectedTerm):
    name = "direct"
    by_default = True
    flat = ("divergence", "support")

    divergence: AnyDivergence = Field(ReverseKL(), description="of a direct term; of policy_gradient: whose advantage")
    support: AnySupport = Field(
        Full(), description="of a direct term: the exact full vocabulary, or the k likeliest ids"
    )
    temperature: float = Field(1.0, ge=0.01, le=100, description="of the divergence; sampling has its own")

    @model_validator(mode="after")
    def _means_something(self) -> Direct:
        if self.support.for_f_divergences and not self.divergence.f_divergence:
            raise ValueError(
                f"closure generalised is defined for f-divergences, and {self.divergence.name} is not one: "
                "use closure: tail"
            )
        if self.correction is not None and self.correction.weighs_by == "token":
            raise ValueError(
                f"{self.correction.name} weighs a token by its own ratio, which corrects nothing in a direct loss: it "
                "depends on the prefix alone. Use kind: prefix, or a veto"
            )
        return self

    @property
    def minimises(self) -> str:
        return self.divergence.name

    @property
    def plain_kl(self) -> str:
        return self.divergence.plain_kl

    @property
    def parts(self) -> Iterable[Choice]:
        return [*super().parts, self.divergence, self.support]

    def form_needs(self, updates: int) -> Needs:
        proximal = {("proximal",)} if updates > 1 and self.correction is not None else set()
        needs = Needs(student=frozenset(proximal))
        k = self.support.teacher_ids
        if k is None or (self.temperature != 1.0 and not self.support.leaves_rest):
            return needs | Needs(signals=((self.role, "hidden"),))
        return needs | Needs(topk=((self.role, k),))

    def advice(self, offers: Collection[SignalKind]) -> str:
        if "topk" not in offers:
            return super().advice(offers)
        return (
            "Of a teacher that gives its likeliest ids alone: support: topk with side: teacher, and at another temperature than 1, "
            "at which the mass of the others is not known, closure: renormalised."
        )

    def loss(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> Tensor:
        import torch

        from opd.divergences import divergence

        if self.correction is not None:
            weight_N = self._corrected(prepared, micro, weight_N)
        total = micro.projection.hidden.new_zeros((), dtype=torch.float32)
        for rows, teacher in micro.teacher_distributions(self.role, weight_N != 0):
            if not rows.size:
                continue
            student, tokens = micro.rows(rows), micro.tokens(rows)
            result = divergence(
                self.divergence.formula(),
                student,
                teacher,
                weight=micro.tensor(weight_N[rows]),
                temperature=self.temperature,
                merge=micro.merge,
                tokens=tokens,
                trusted=True,
                **self.support.truncation,
            )
            if (unknown := result.statistics.vague_tail) is not None and self.support.truncation["closure"] == "tail":
                micro.count(f"tail_unknown/{prepared.name}", unknown)
            self._note(micro, rows, self._untempered(micro, result.statistics, student, teacher, tokens))
            total = total + result.loss
        return total

    def _untempered(
        self, micro: MicroBatch, known: RowStatistics, student: Projection, teacher: Source | TopK, tokens: Tensor
    ) -> RowStatistics:
        """Statistics at temperature 1. A tempered divergence needs another pass for them."""
        from opd.divergences import TopK, divergence, statistics

        if self.temperature == 1.0:
            return known
        if isinstance(teacher, TopK):
            k = self.support.teacher_ids
            alone = divergence(
                "reverse_kl",
                student.detach(),
                teacher,
                support="topk",
                k=k,
                merge=micro.merge,
                tokens=tokens,
                trusted=True,
            )
            return alone.statistics
        return statistics(student.detach(), teacher, merge=micro.merge, tokens=tokens, trusted=True)

    def _note(self, micro: MicroBatch, rows: np.ndarray, statistics: RowStatistics) -> None:
        assert statistics.reverse_kl is not None
        assert statistics.logprob is not None
        micro.note("reverse_kl", rows, statistics.reverse_kl)
        micro.note("entropy", rows, statistics.entropy)
        if self.correction is None:
            micro.note_mismatch(rows, statistics.logprob)

    def _corrected(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> np.ndarray:
        """Weights times the correction. A direct loss at t depends only on the tokens before t, hence on their ratios."""
        import torch

        assert self.correction is not None
        rows = np.arange(weight_N.size)
        with torch.no_grad():
            log_ratio = micro.log_ratio(rows, micro.current(rows))
        factor, bites = self.correction.apply(log_ratio, micro.segment(rows))
        micro.count(f"corrected/{prepared.name}", bites[micro.tensor(weight_N != 0)])
        return (weight_N * factor.cpu().numpy()).astype(np.float32)


# --- Losses of the sampled token: k2 and cross-entropy ---


class K2(CorrectedTerm):
    """(log student - log teacher)^2 / 2. On samples of the student its gradient is reverse KL's (KDRL)."""

    name = "k2"
    usual_authors = ("student",)
    by_ratio = True

    @model_validator(mode="after")
    def _means_something(self) -> K2:
        if self.correction is not None and self.correction.weighs_by == "prefix":
            raise ValueError("prefix is for form: direct; k2 is corrected by icepop, tis or mis")
        return self

    @property
    def minimises(self) -> str:
        return "reverse_kl"

    def form_needs(self, updates: int) -> Needs:
        proximal = {("proximal",)} if updates > 1 and self.correction is not None else set()
        return Needs(signals=((self.role, "logprobs_at"),), student=frozenset(proximal))

    def refuse(self, view: StageView) -> Iterable[str]:
        drawn = view.rollout
        if drawn.temperature != 1:
            yield (
                f"rollout.temperature {drawn.temperature:g} with form: k2, whose gradient is reverse KL's only on "
                "samples of the policy itself. Sample at temperature 1, or use policy_gradient."
            )
        if drawn.teacher_mix:
            yield "rollout.teacher_mix with form: k2, which has no importance weight. Use policy_gradient."
        yield from super().refuse(view)

    def loss(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> Tensor:
        import torch

        rows = np.flatnonzero(weight_N)
        if self.correction is not None:  # corrections need whole rollouts, including gated tokens
            rows = np.flatnonzero(np.concatenate([prepared.eligible[item.id] for item in micro.pack.rollouts]))
        teacher = micro.tensor(micro.teacher_logprobs(self.role, rows)).float()
        policy = micro.policy(rows)
        trained = micro.tensor(weight_N[rows] != 0)
        micro.estimate(rows, policy.detach() - teacher)
        losses, log_ratio = k2(policy, torch.where(trained, teacher, policy.detach())), micro.log_ratio(rows, policy)
        if self.correction is not None:
            weight, bites = self.correction.apply(log_ratio, micro.segment(rows))
            micro.count(f"corrected/{prepared.name}", bites[trained])
            losses = losses * weight
        return (losses * micro.tensor(weight_N[rows])).sum()


def k2(current: Tensor, teacher: Tensor) -> Tensor:
    """(log current - log teacher)^2 / 2, differentiated directly."""
    return 0.5 * (current - teacher.detach()) ** 2


class CrossEntropy(Term):
    """Negative log-likelihood of the chosen authors' tokens."""

    name = "cross_entropy"
    usual_authors = ("data", "teacher")

    def loss(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> Tensor:
        rows = np.flatnonzero(weight_N)
        return -(micro.policy(rows) * micro.tensor(weight_N[rows])).sum()


# --- Teachers with another tokenizer: distributions compared at spans that both tokenizers share ---
#
# uld    sorted next-token probabilities, regardless of which tokens they belong to
# gold   the events of a whole span: tokens in both vocabularies are compared one by one, the others sorted
#
# With one tokenizer every token is a span: `gold` is the JSD, and `uld` is 0 if the two agree.


class CrossingHead(Protocol):
    """A teacher with another tokenizer: its stop ids, and the pairs of ids that mean the same on both sides."""

    stop_ids: tuple[int, ...]
    matched: tuple[np.ndarray, np.ndarray] | None


class Event(NamedTuple):
    """Tokens s0..s1 of a micro-batch, and rows t0..t1 of a teacher's signal."""

    s0: int
    s1: int
    t0: int
    t1: int


@dataclass(frozen=True, eq=False)
class SpanEvents:
    """Everything that one teacher scores in a micro-batch."""

    spans: np.ndarray  # (M, 4)
    weight: np.ndarray  # (M,) sum over a span's tokens, which share the weight of one event
    teacher: Any  # the teacher's head
    hidden: Tensor  # (rows, D)
    ids: np.ndarray  # (rows,) tokens that the rows predict
    crossed: bool


def events_of(micro: MicroBatch, role: str, weight_N: np.ndarray) -> Iterator[SpanEvents]:
    import torch

    signals = [micro.batch.signals[role, "hidden"][rollout.id] for rollout in micro.pack.rollouts]
    starts = np.cumsum([0, *micro.pack.response_lengths[:-1]])
    for name in dict.fromkeys(signal.teacher for signal in signals if signal.mask.any()):
        spans: list[Event] = []
        hidden: list[Tensor] = []
        ids: list[np.ndarray] = []
        at = 0
        for rollout, signal, start in zip(micro.pack.rollouts, signals, starts, strict=True):
            if signal.teacher != name or not signal.mask.any():
                continue
            spans += _spans(signal, int(start), at)
            ids.append(rollout.response_ids if signal.crossed is None else signal.crossed)
            hidden.append(signal.values.to(micro.device))
            at += ids[-1].size
        weights = np.array([weight_N[span.s0 : span.s1].sum() for span in spans])
        kept = np.flatnonzero(weights)
        if kept.size:
            crossed = any(signal.crossed is not None for signal in signals if signal.teacher == name)
            chosen = np.array(spans)[kept]
            yield SpanEvents(
                chosen, weights[kept], micro.teachers[name], torch.cat(hidden), np.concatenate(ids), crossed
            )


def _spans(signal: Signal, start: int, at: int) -> list[Event]:
    """One span per token with a shared tokenizer; otherwise the aligned spans."""
    if signal.crossed is None:
        return [
            Event(start + place, start + place + 1, at + place, at + place + 1)
            for place in np.flatnonzero(signal.mask).tolist()
        ]
    found = []
    for s0, s1, t0, t1 in signal.spans:
        found.append(Event(start + s0, start + s1, at, at + t1 - t0))
        at += t1 - t0
    return found


class CrossedTerm(Term):
    """Base class of ULD and GOLD."""

    crosses = frozenset({"hidden"})

    def form_needs(self, updates: int) -> Needs:
        return Needs(signals=((self.role, "hidden"),))

    def counts(self, prepared: PreparedTerm, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """A span is one event, split equally among its tokens, so `aggregate` takes means over spans."""
        signals = prepared.batch.signals[self.role, "hidden"]
        found = []
        for rollout in rollouts:
            signal, parts = signals[rollout.id], prepared.counted[rollout.id].astype(np.float64)
            if signal.crossed is not None:
                for s0, s1, _, _ in signal.spans:
                    parts[s0:s1] /= s1 - s0
            found.append(parts)
        return found

    def loss(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> Tensor:
        import torch

        total = micro.projection.hidden.new_zeros((), dtype=torch.float32)
        for events in events_of(micro, self.role, weight_N):
            loss, _ = self.distance(micro, events)
            total = total + loss
        return total

    @abstractmethod
    def distance(self, micro: MicroBatch, events: SpanEvents) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _merges(self, micro: MicroBatch, events: SpanEvents) -> tuple[Any, Any]:
        return micro.merge, ((tuple(events.teacher.stop_ids),) if events.crossed else micro.merge)

    def _sides(self, micro: MicroBatch, events: SpanEvents, column: int) -> tuple[Projection, Projection]:
        """Both distributions at one token of every span: the first (`column` 0) or the last (1)."""
        from opd.objective.micro import in_half

        first, last = (events.spans[:, 0], events.spans[:, 2]), (events.spans[:, 1] - 1, events.spans[:, 3] - 1)
        ours, theirs = last if column else first
        student = micro.projection.rows(micro.tensor(ours))
        teacher = events.teacher.project(events.hidden[micro.tensor(theirs)])
        return student, in_half(teacher, student.hidden.dtype)


class ULD(CrossedTerm):
    """Distance between sorted probabilities at the start of every span, where both models have read the same text."""

    name = "uld"
    k: Positive | None = Field(None, description="of uld: the likeliest ids that are compared one by one; default: all")

    def distance(self, micro: MicroBatch, events: SpanEvents) -> tuple[Tensor, Tensor]:
        from opd.divergences.cross_vocabulary import crossed_loss, sorted_distance

        student, teacher = self._sides(micro, events, 0)
        weight = micro.tensor(events.weight)

        def sorted_by_rank(log_s: Tensor, log_t: Tensor) -> Tensor:
            return sorted_distance(log_s.exp(), log_t.exp(), self.k)

        return crossed_loss(student, teacher, weight, sorted_by_rank, self._merges(micro, events))


class GOLD(CrossedTerm):
    """Compares spans: the distribution at a span's last token times the probability of the tokens before (chain rule)."""

    name = "gold"
    beta: Fraction = Field(0.5, description="of jsd: 0 is forward KL, 1 reverse KL")
    matched_weight: float | None = Field(
        None, ge=0, description="of gold: of the ids that both vocabularies have; default: their share of the teacher's"
    )
    unmatched_weight: float | None = Field(None, ge=0, description="of gold: of the others; default: the rest of 1")

    def distance(self, micro: MicroBatch, events: SpanEvents) -> tuple[Tensor, Tensor]:
        from opd.divergences.cross_vocabulary import crossed_loss, matched_distance

        student, teacher = self._sides(micro, events, 1)
        merges, ids = self._merges(micro, events), self._matched(micro, events)
        before = self._before(micro, events, merges) if events.crossed else None
        weights = None
        if ids is not None and (self.matched_weight is not None or self.unmatched_weight is not None):
            share = ids[1].numel() / teacher.vocabulary
            weights = (
                share if self.matched_weight is None else self.matched_weight,
                1 - share if self.unmatched_weight is None else self.unmatched_weight,
            )

        def one_by_one(log_s: Tensor, log_t: Tensor) -> Tensor:
            return matched_distance(log_s, log_t, ids, self.beta, weights)

        return crossed_loss(student, teacher, micro.tensor(events.weight), one_by_one, merges, before)

    def _matched(self, micro: MicroBatch, events: SpanEvents) -> tuple[Tensor, Tensor] | None:
        """Ids of the common events on both sides, including the stop event."""
        if not events.crossed:
            return None
        head: CrossingHead = events.teacher
        assert head.matched is not None
        stops = (micro.merge[0][:1], head.stop_ids[:1])
        pairs = [np.append(side, stop) for side, stop in zip(head.matched, stops, strict=True)]
        return micro.tensor(pairs[0].astype(np.int64)), micro.tensor(pairs[1].astype(np.int64))

    def _before(self, micro: MicroBatch, events: SpanEvents, merges: tuple[Any, Any]) -> tuple[Tensor, Tensor]:
        """(M,) log-probs of each span's tokens before the last one, on both sides."""
        from opd.divergences import token_logprobs

        spans, count = events.spans, len(events.spans)
        found = []
        for side, (first, last) in enumerate(((0, 1), (2, 3))):
            rows = np.concatenate([np.arange(span[first], span[last] - 1) for span in spans]).astype(np.int64)
            owner = np.repeat(np.arange(count), spans[:, last] - spans[:, first] - 1)
            sums = micro.projection.hidden.new_zeros(count, dtype=micro.wide)
            if rows.size and side == 0:
                student = micro.projection.rows(micro.tensor(rows))
                values = token_logprobs(student, micro.tokens(rows), merge=merges[0], trusted=True)
                sums = sums.index_add(0, micro.tensor(owner), values.to(sums))
            elif rows.size:
                teacher = events.teacher.project(events.hidden[micro.tensor(rows)])
                ids = micro.tensor(events.ids[rows].astype(np.int64))
                values = token_logprobs(teacher, ids, merge=merges[1], trusted=True).detach()
                sums = sums.index_add(0, micro.tensor(owner), values.to(sums))
            found.append(sums)
        return found[0], found[1]
