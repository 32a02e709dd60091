"""Gates: which tokens count, and how much. Factors per token, computed over the whole batch before it is split.

A gate returns one (T,) array per rollout: 0 closes a token, other numbers weigh it, NaN means unknown. A gate sees
only the tokens that earlier gates left open.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from opd.objective.batch import Batch
from opd.records import Rollout
from opd.registry import Choice, Family, Fraction, Needs, Positive, StageView, changed

Arrays = list[np.ndarray]


@dataclass(frozen=True, eq=False)
class GateView:
    """Inputs of a gate. Masks are (T,) bool, one per rollout of the batch."""

    batch: Batch
    role: str  # the term's role: which teacher's signals to use
    eligible: Sequence[np.ndarray]  # tokens of the authors that the term trains on
    open: Sequence[np.ndarray]  # eligible tokens that earlier gates left open
    seed: int

    @property
    def rollouts(self) -> Sequence[Rollout]:
        return self.batch.rollouts

    @property
    def ids(self) -> list[str]:
        return [rollout.id for rollout in self.rollouts]

    @property
    def groups(self) -> list[str]:
        return [rollout.group for rollout in self.rollouts]

    @property
    def rewards(self) -> list[float | None]:
        return [self.batch.rewards.get(rollout.id) for rollout in self.rollouts]

    def teacher_logprobs(self) -> Arrays:
        return self.batch.logprobs(self.role, self.rollouts)

    def spread(self, values_B: np.ndarray) -> Arrays:
        """Repeat each rollout's number over its tokens."""
        return [
            np.full(rollout.response_ids.size, value) for rollout, value in zip(self.rollouts, values_B, strict=True)
        ]


class Gate(Choice):
    family = "gate"
    weighs: ClassVar[bool] = False  # True: 0 is a small weight and stays in the mean; False: 0 closes the token
    compares_samples: ClassVar[bool] = False  # compares samples of one prompt, so it needs several

    def needs(self, role: str = "teacher") -> Needs:
        return Needs()

    @property
    def by_student(self) -> bool:
        """Whether it uses the student's log-prob of sampled tokens. Tokens by other authors have none."""
        return False

    @abstractmethod
    def factors(self, view: GateView) -> Arrays:
        raise NotImplementedError

    def refuse(self, view: StageView) -> Iterable[str]:
        if self.compares_samples and view.rollout.samples == 1:
            yield f"gate {self.name} compares the samples of a prompt, but rollout.samples is 1. Set it to 2 or more."
        others = view.term.authors_beside_student(view.rollout) if view.term is not None else []
        if self.by_student and others:
            yield (
                f"gate {self.name} uses the student's log-prob of the tokens it sampled, but the term also trains on "
                f"{others[0]} tokens. Set `on: [student]`."
            )


AnyGate = Annotated[Gate, Family("gate")]


class FinishedOnly(Gate):
    """Keeps rollouts that ended before the length limit."""

    name = "finished"

    def factors(self, view: GateView) -> Arrays:
        return view.spread(np.array([float(rollout.stop != "length") for rollout in view.rollouts]))


class Entropy(Gate):
    """TIP: keeps the share of the batch's tokens with the highest student entropy."""

    name = "entropy"
    share: float = Field(0.5, gt=0, le=1)

    def needs(self, role: str = "teacher") -> Needs:
        return Needs(student=frozenset({("entropy",)}))

    def factors(self, view: GateView) -> Arrays:
        return top_share([view.batch.first_pass.entropy[name] for name in view.ids], view.open, self.share)


class SoftOr(Gate):
    """TIP: keeps the tokens with the largest h + d - h*d; entropy h and reverse KL d are scaled to [0, 1] over the batch."""

    name = "soft_or"
    share: float = Field(0.5, gt=0, le=1)

    def needs(self, role: str = "teacher") -> Needs:
        return Needs(signals=((role, "hidden"),), student=frozenset({("comparison", role)}))

    def factors(self, view: GateView) -> Arrays:
        known = view.batch.first_pass
        entropies = [known.entropy[name] for name in view.ids]
        divergences = [known.reverse_kl[view.role][name] for name in view.ids]
        return top_share(soft_or(entropies, divergences, view.open), view.open, self.share)


class Random(Gate):
    """Keeps a random share of tokens: the control at equal budget for every other gate."""

    name = "random"
    share: float = Field(0.5, gt=0, le=1)

    def factors(self, view: GateView) -> Arrays:
        lengths = [rollout.response_ids.size for rollout in view.rollouts]
        return random_share([f"gate/{name}" for name in view.ids], lengths, self.share, view.seed)


class TeacherEntropy(Gate):
    """Keeps tokens by the teacher's entropy at the position, in nats."""

    name = "teacher_entropy"
    below: float | None = Field(None, ge=0)
    above: float | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _bounded(self) -> TeacherEntropy:
        if self.below is None and self.above is None:
            raise ValueError("teacher_entropy needs `below` (the teacher is sure) or `above` (it is not), in nats")
        if self.below is not None and self.above is not None and self.above >= self.below:
            raise ValueError(f"`above` ({self.above:g}) must be less than `below` ({self.below:g})")
        return self

    def needs(self, role: str = "teacher") -> Needs:
        return Needs(signals=((role, "hidden"),), student=frozenset({("comparison", role)}))

    def factors(self, view: GateView) -> Arrays:
        low = -np.inf if self.above is None else self.above
        high = np.inf if self.below is None else self.below
        entropies = [view.batch.first_pass.teacher_entropy[view.role][name] for name in view.ids]
        return [((value > low) & (value < high)).astype(np.float64) for value in entropies]


class SelectKD(Gate):
    """SelecTKD: the student proposes, the teacher accepts. Rejected tokens weigh `rejected`."""

    name = "selectkd"
    accept: Literal["greedy", "speculative"] = Field(
        "greedy",
        description=(
            "greedy: the student's likeliest token is in the teacher's top k; "
            "speculative: min(1, T/S) of the sampled one"
        ),
    )
    k: Positive = Field(5, description="of greedy")
    rejected: Fraction = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> SelectKD:
        if self.accept == "speculative" and "k" in changed(self):
            raise ValueError("k belongs to accept: greedy")
        return self

    @property
    def by_student(self) -> bool:
        return self.accept == "speculative"

    def needs(self, role: str = "teacher") -> Needs:
        if self.accept == "speculative":
            return Needs(signals=((role, "logprobs_at"),))
        return Needs(signals=((role, "hidden"),), student=frozenset({("accepted", role, self.k)}))

    def refuse(self, view: StageView) -> Iterable[str]:
        yield from super().refuse(view)
        drawn = view.rollout
        if self.accept == "speculative" and (
            drawn.temperature != 1 or drawn.top_p < 1 or drawn.top_k or drawn.teacher_mix
        ):
            yield (
                "gate selectkd with accept: speculative takes min(1, T/S) of tokens drawn from the student itself, "
                f"but rollout has temperature {drawn.temperature:g}, top_p {drawn.top_p:g}, top_k {drawn.top_k} and "
                f"teacher_mix {drawn.teacher_mix:g}. Sample at temperature 1 without limits, or use accept: greedy."
            )

    def factors(self, view: GateView) -> Arrays:
        if self.accept == "greedy":
            accepted = view.batch.first_pass.accepted[view.role, self.k]
            return [np.where(accepted[name] > 0, 1.0, self.rejected) for name in view.ids]
        students = [rollout.logprob for rollout in view.rollouts]
        keys = [f"accept/{name}" for name in view.ids]
        return speculative(keys, students, view.teacher_logprobs(), self.rejected, view.seed)


class Perplexity(Gate):
    """SCOPE: weighs rollouts by perplexity^power, with mean 1 over the open rollouts of each group."""

    name = "perplexity"
    weighs = True
    compares_samples = True
    of: Literal["student", "teacher"] = "student"
    power: float = Field(1.0, description="1/tau favours what the model finds unlikely, -1/tau what it is sure of")

    @property
    def by_student(self) -> bool:
        return self.of == "student"

    def needs(self, role: str = "teacher") -> Needs:
        return Needs(signals=((role, "logprobs_at"),)) if self.of == "teacher" else Needs()

    def factors(self, view: GateView) -> Arrays:
        student = [rollout.logprob for rollout in view.rollouts]
        logprobs = student if self.of == "student" else view.teacher_logprobs()
        is_open = np.array([bool(mask.any()) for mask in view.open])
        means = np.array(
            [values[mask].mean() if mask.any() else 0.0 for values, mask in zip(logprobs, view.open, strict=True)]
        )
        return view.spread(perplexity_weights(means, view.groups, is_open, self.power))


class Turns(Gate):
    """SOD: weighs turn k by min((d_1 + eps) / (d_k + eps), 1 + delta), with d the mean |log student - log teacher|."""

    name = "turns"
    weighs = True
    delta: float = Field(0.2, ge=0)
    eps: float = Field(1e-6, gt=0)

    @property
    def by_student(self) -> bool:
        return True

    def needs(self, role: str = "teacher") -> Needs:
        return Needs(signals=((role, "logprobs_at"),))

    def refuse(self, view: StageView) -> Iterable[str]:
        yield from super().refuse(view)
        if view.rollout.environment is None:
            yield (
                "gate turns compares the turns of a rollout, but every rollout of this recipe has one turn, which would "
                "weigh 1. Remove the gate: it is for episodes with an environment."
            )

    def factors(self, view: GateView) -> Arrays:
        return [
            turn_weights(np.abs(rollout.logprob - teacher), runs(mask), self.delta, self.eps)
            for rollout, teacher, mask in zip(view.rollouts, view.teacher_logprobs(), view.eligible, strict=True)
        ]


# --- The arithmetic of gates ---


def top_share(values: Sequence[np.ndarray], masks: Sequence[np.ndarray], share: float) -> Arrays:
    """1 for the `share` of the batch's counted tokens with the largest values (ties go to earlier ones), 0 elsewhere.

    >>> [gate.tolist() for gate in top_share([np.array([3.0, 1.0]), np.array([2.0, 0.0])], [np.ones(2, bool)] * 2, 0.5)]
    [[1.0, 0.0], [1.0, 0.0]]
    """
    flat, counted = np.concatenate(values), np.concatenate(masks)
    rows = np.flatnonzero(counted)
    kept = rows[np.argsort(-flat[rows], kind="stable")[: round(share * rows.size)]]
    gate = np.zeros(flat.size)
    gate[kept] = 1.0
    return np.split(gate, np.cumsum([value.size for value in values])[:-1])


def soft_or(entropies: Sequence[np.ndarray], divergences: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> Arrays:
    """h + d - h d, both scaled to [0, 1] over the batch's counted tokens: high if either is high."""
    h, d = _scaled(entropies, masks), _scaled(divergences, masks)
    return [unsure + far - unsure * far for unsure, far in zip(h, d, strict=True)]


def _scaled(values: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> Arrays:
    counted = np.concatenate([value[mask] for value, mask in zip(values, masks, strict=True)])
    if not counted.size:
        return [np.zeros_like(value) for value in values]
    low, high = counted.min(), counted.max()
    return [(value - low) / max(high - low, 1e-12) for value in values]


def random_share(names: Sequence[str], lengths: Sequence[int], share: float, seed: int) -> Arrays:
    """Open each token with probability `share`. Draws are keyed by (seed, rollout), so a restart repeats them."""
    return [
        (_uniforms(f"{seed}/{name}", length) < share).astype(np.float64)
        for name, length in zip(names, lengths, strict=True)
    ]


def speculative(
    names: Sequence[str], students: Sequence[np.ndarray], teachers: Sequence[np.ndarray], rejected: float, seed: int
) -> Arrays:
    """Accept a sampled token with probability min(1, T/S), as speculative decoding does; others weigh `rejected`."""
    factors = []
    for name, student, teacher in zip(names, students, teachers, strict=True):
        accept = _uniforms(f"{seed}/{name}", student.size) < np.exp(np.minimum(teacher - student, 0.0))
        factors.append(np.where(accept, 1.0, rejected))
    return factors


def _uniforms(key: str, count: int) -> np.ndarray:
    entropy = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest(), "big")
    return np.random.Generator(np.random.Philox(entropy)).random(count)


def perplexity_weights(
    mean_logprobs: np.ndarray, groups: Sequence[str], open_ones: np.ndarray, power: float
) -> np.ndarray:
    """(B,) perplexity^power among the open rollouts of each group, scaled to mean 1; 0 elsewhere.

    Perplexity is exp(-mean log-prob). A power of 1/tau favours rollouts that the model finds unlikely, -1/tau those it
    is sure of. A single rollout in a group weighs 1.

    >>> perplexity_weights(np.log([0.5, 0.25]), ["a", "a"], np.ones(2, bool), 1.0).round(3).tolist()
    [0.667, 1.333]
    """
    scaled = np.zeros(mean_logprobs.size)
    for name in np.unique(groups):
        members = np.flatnonzero((np.asarray(groups) == name) & open_ones)
        if members.size:
            logits = -power * mean_logprobs[members]
            weights = np.exp(logits - logits.max())
            scaled[members] = weights / weights.mean()
    return scaled


def turn_weights(gap_T: np.ndarray, turns: Sequence[tuple[int, int]], delta: float, eps: float) -> np.ndarray:
    """SOD: weight min((d_1 + eps) / (d_k + eps), 1 + delta) for tokens of turn k, d = mean |log student - log teacher|.

    >>> turn_weights(np.array([0.1, 0.1, 0.4, 0.05]), [(0, 2), (2, 3), (3, 4)], 0.2, 1e-9).round(3).tolist()
    [1.0, 1.0, 0.25, 1.2]
    """
    weights = np.ones(gap_T.size)
    means = [gap_T[start:end].mean() for start, end in turns]
    for (start, end), mean in zip(turns, means, strict=True):
        weights[start:end] = min((means[0] + eps) / (mean + eps), 1 + delta)
    return weights


def runs(mask_T: np.ndarray) -> list[tuple[int, int]]:
    """(start, end) of each run of True: the turns of a response.

    >>> runs(np.array([1, 1, 0, 1], dtype=bool))
    [(0, 2), (3, 4)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask_T, [False]]).astype(int)))
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


# --- Gates by reward: of the rollout itself, or of all samples of its prompt ---


class RewardGate(Gate):
    """Base of gates by the reward of the rollout, or the rewards of its whole group."""

    threshold: float = Field(0.5, description="a reward of at least this is correct")

    def needs(self, role: str = "teacher") -> Needs:
        return Needs(rewards=True)

    def passed(self, view: GateView) -> np.ndarray:
        """(B,) 1 if the reward passes, else 0; NaN if there is no reward."""
        return np.array([np.nan if reward is None else float(reward >= self.threshold) for reward in view.rewards])

    def pass_rates(self, view: GateView) -> np.ndarray:
        return pass_rates(view.rewards, view.groups, self.threshold)

    def _where(self, wanted: np.ndarray, rates: np.ndarray, view: GateView) -> Arrays:
        return view.spread(np.where(np.isnan(rates), np.nan, wanted.astype(np.float64)))


class Correct(RewardGate):
    name = "correct"

    def factors(self, view: GateView) -> Arrays:
        return view.spread(self.passed(view))


class Wrong(RewardGate):
    name = "wrong"

    def factors(self, view: GateView) -> Arrays:
        return view.spread(1 - self.passed(view))


class AllWrong(RewardGate):
    name = "all_wrong"

    def factors(self, view: GateView) -> Arrays:
        rates = self.pass_rates(view)
        return self._where(rates == 0, rates, view)


class AllCorrect(RewardGate):
    name = "all_correct"

    def factors(self, view: GateView) -> Arrays:
        rates = self.pass_rates(view)
        return self._where(rates == 1, rates, view)


class Contrast(RewardGate):
    """Keeps groups with both correct and wrong answers."""

    name = "contrast"
    compares_samples = True

    def factors(self, view: GateView) -> Arrays:
        rates = self.pass_rates(view)
        return self._where((rates > 0) & (rates < 1), rates, view)


class Paced(RewardGate):
    """PACED: weighs a prompt by p^a (1 - p)^b, with p its pass rate among this batch's samples."""

    name = "paced"
    weighs = True
    compares_samples = True
    a: float = Field(1.0, ge=0)
    b: float = Field(1.0, ge=0)

    def factors(self, view: GateView) -> Arrays:
        rates = self.pass_rates(view)
        return view.spread(rates**self.a * (1 - rates) ** self.b)


def pass_rates(scores: Sequence[float | None], groups: Sequence[str], threshold: float) -> np.ndarray:
    """(B,) pass rate of each rollout's group, among rollouts with a reward; NaN if there are none.

    >>> pass_rates([1.0, 0.0, None, 0.0], ["a", "a", "a", "b"], 0.5).tolist()
    [0.5, 0.5, 0.5, 0.0]
    """
    passed = np.array([np.nan if score is None else float(score >= threshold) for score in scores])
    rates = np.full(passed.size, np.nan)
    for number in np.unique(groups):
        members = np.asarray(groups) == number
        known = passed[members & ~np.isnan(passed)]
        if known.size:
            rates[members] = known.mean()
    return rates
