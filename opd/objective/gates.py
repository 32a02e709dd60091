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

from opd.objective.batch import CALLS, FAILED_CALLS, Batch
from opd.records import Rollout
from opd.registry import Choice, Count, Family, Fraction, Needs, Positive, StageView, changed

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
    closes_cut_off: ClassVar[bool] = False  # closes answers that the length limit cut off
    chooses_rollouts: ClassVar[bool] = False  # keeps some of a group's rollouts, which must be whole

    def needs(self, role: str = "teacher") -> Needs:
        return Needs()

    @property
    def by_student(self) -> bool:
        """Whether it uses the student's log-prob of sampled tokens. Tokens by other authors have none."""
        return False

    @abstractmethod
    def factors(self, view: GateView) -> Arrays:
        raise NotImplementedError

    def check_vocabulary(self, size: int) -> Iterable[str]:
        """Every mistake in its settings, given the number of the student's ids."""
        return ()

    def check(self, view: StageView) -> Iterable[str]:
        if self.compares_samples and view.rollout.samples == 1:
            yield f"gate {self.name} compares the samples of a prompt, but rollout.samples is 1. Set it to 2 or more."
        if self.chooses_rollouts and any(one is not None and one.history == "split" for one in view.environments):
            yield f"gate {self.name} with an environment whose history is split: it chooses among whole rollouts. Set history to keep."
        others = view.term.other_authors(view.rollout) if view.term is not None else []
        if self.by_student and others:
            yield (
                f"gate {self.name} uses the student's log-prob of the tokens it sampled, but the term also trains on "
                f"{others[0]} tokens. Set `on: [student]`."
            )


AnyGate = Annotated[Gate, Family("gate")]


class FinishedOnly(Gate):
    """Keeps rollouts that ended before the length limit."""

    name = "finished"
    closes_cut_off = True

    def factors(self, view: GateView) -> Arrays:
        return view.spread(np.array([float(rollout.stop != "length") for rollout in view.rollouts]))


class ShareGate(Gate):
    """Base of gates that keep the share of tokens with the largest `scores`."""

    share: float = Field(0.5, gt=0, le=1)
    per: Literal["batch", "rollout"] = Field(
        "batch",
        description="of entropy, soft_or and unlikely: whether the share is of the batch's tokens or of each rollout's",
    )

    @abstractmethod
    def scores(self, view: GateView) -> Arrays:
        raise NotImplementedError

    def factors(self, view: GateView) -> Arrays:
        values = self.scores(view)
        if self.per == "batch":
            return top_share(values, view.open, self.share)
        return [top_share([value], [mask], self.share)[0] for value, mask in zip(values, view.open, strict=True)]


class Entropy(ShareGate):
    """TIP: keeps the tokens with the highest student entropy."""

    name = "entropy"

    def needs(self, role: str = "teacher") -> Needs:
        return Needs(student=frozenset({("entropy",)}))

    def scores(self, view: GateView) -> Arrays:
        return [view.batch.first_pass.entropy[name] for name in view.ids]


class Unlikely(ShareGate):
    """OPSA: keeps the sampled tokens with the lowest student log-prob."""

    name = "unlikely"
    share: float = Field(0.2, gt=0, le=1)

    @property
    def by_student(self) -> bool:
        return True

    def scores(self, view: GateView) -> Arrays:
        return [-rollout.logprob.astype(np.float64) for rollout in view.rollouts]


class SoftOr(ShareGate):
    """TIP: keeps the tokens with the largest h + d - h*d; entropy h and reverse KL d are scaled to [0, 1] over the batch."""

    name = "soft_or"

    def needs(self, role: str = "teacher") -> Needs:
        return Needs(signals=((role, "hidden"),), student=frozenset({("comparison", role)}))

    def scores(self, view: GateView) -> Arrays:
        known = view.batch.first_pass
        entropies = [known.entropy[name] for name in view.ids]
        divergences = [known.reverse_kl[view.role][name] for name in view.ids]
        return soft_or(entropies, divergences, view.open)


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
    """SelecTKD: the student proposes, the teacher accepts. OSD: rejected tokens alone count."""

    name = "selectkd"
    accept: Literal["greedy", "speculative"] = Field(
        "greedy",
        description=(
            "greedy: the student's likeliest token is in the teacher's top k; "
            "speculative: min(1, T/S) of the sampled one"
        ),
    )
    k: Positive = Field(5, description="of greedy")
    draws: Positive = Field(
        1, description="of speculative: tokens that the student proposes; one accepted suffices (Spec-k)"
    )
    accepted: Fraction = Field(1.0, description="weight of accepted tokens; 0 with rejected 1 is OSD")
    rejected: Fraction = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> SelectKD:
        given = changed(self)
        if self.accept == "speculative" and "k" in given:
            raise ValueError("k belongs to accept: greedy")
        if self.accept == "greedy" and "draws" in given:
            raise ValueError("draws belongs to accept: speculative")
        if self.accepted == self.rejected:
            raise ValueError(
                f"accepted and rejected are both {self.accepted:g}, so the teacher's verdict does nothing: set one to 0"
            )
        return self

    @property
    def by_student(self) -> bool:
        return self.accept == "speculative"

    def needs(self, role: str = "teacher") -> Needs:
        if self.accept == "greedy":
            return Needs(signals=((role, "hidden"),), student=frozenset({("accepted", role, self.k)}))
        needs = Needs(signals=((role, "logprobs_at"),))
        if self.draws == 1:
            return needs
        return needs | Needs(signals=((role, "hidden"),), student=frozenset({("acceptance", role)}))

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
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
        return [np.where(taken, self.accepted, self.rejected) for taken in self._taken(view)]

    def _taken(self, view: GateView) -> Arrays:
        """(T,) bool per rollout: whether the teacher accepts."""
        known = view.batch.first_pass
        if self.accept == "greedy":
            return [known.accepted[view.role, self.k][name] > 0 for name in view.ids]
        keys = [f"accept/{name}" for name in view.ids]
        students = [rollout.logprob for rollout in view.rollouts]
        taken = speculative(keys, students, view.teacher_logprobs(), view.seed)
        if self.draws == 1:
            return taken
        rates = [known.acceptance[view.role][name] for name in view.ids]
        more = further_draws(keys, rates, self.draws - 1, view.seed)
        return [first | other for first, other in zip(taken, more, strict=True)]


class Trust(Gate):
    """Weighs a token by how far its teacher can be trusted there."""

    name = "trust"
    weighs = True
    by: Literal["ratio", "entropy"] = Field(
        "ratio", description="of trust: min(1, T/S) of the sampled token, or exp(-H) of the teacher's entropy H in nats"
    )
    power: float = Field(1.0, gt=0, description="of trust: the weight to this power; larger trusts less")
    bound: float | None = Field(
        None, gt=0, lt=1, description="of trust: a hard region: 1 if the weight is at least this, else 0"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Trust:
        if self.bound is not None and self.power != 1:
            raise ValueError("power belongs to the soft weight: with bound, change bound instead")
        return self

    @property
    def by_student(self) -> bool:
        return self.by == "ratio"

    def needs(self, role: str = "teacher") -> Needs:
        if self.by == "ratio":
            return Needs(signals=((role, "logprobs_at"),))
        return Needs(signals=((role, "hidden"),), student=frozenset({("comparison", role)}))

    def factors(self, view: GateView) -> Arrays:
        if self.by == "entropy":
            logs = [-view.batch.first_pass.teacher_entropy[view.role][name] for name in view.ids]
        else:
            students = [rollout.logprob.astype(np.float64) for rollout in view.rollouts]
            logs = [
                np.minimum(teacher - student, 0.0)
                for teacher, student in zip(view.teacher_logprobs(), students, strict=True)
            ]
        if self.bound is not None:
            return [np.where(np.isnan(log), np.nan, log >= np.log(self.bound)) for log in logs]
        return [np.exp(self.power * log) for log in logs]


class Drift(Gate):
    """IW-OPD: weighs a token by how little the student has left the teacher before it."""

    name = "drift"
    weighs = True
    gamma: float = Field(
        0.5,
        ge=0,
        description="of drift: the first token weighs 1 + gamma, falling to 1 with the answer's |log S - log T|",
    )
    most: float | None = Field(
        None, gt=0, description="of drift: nats of |log S - log T| after which the rest of an answer weighs 0"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Drift:
        if self.gamma == 0 and self.most is None:
            raise ValueError("gamma is 0 and most is not set, so every token weighs 1: set one of them")
        return self

    @property
    def by_student(self) -> bool:
        return True

    def needs(self, role: str = "teacher") -> Needs:
        return Needs(signals=((role, "logprobs_at"),))

    def factors(self, view: GateView) -> Arrays:
        gaps = [
            np.where(mask, np.abs(rollout.logprob - teacher), 0.0)
            for rollout, teacher, mask in zip(view.rollouts, view.teacher_logprobs(), view.eligible, strict=True)
        ]
        return [drift_weights(np.nan_to_num(gap), self.gamma, self.most) for gap in gaps]


class Tokens(Gate):
    """Closes tokens by id, or keeps them alone. Special tokens that a teacher scores badly are a reason."""

    name = "tokens"
    ids: list[Count] = Field(min_length=1, description="of tokens: ids in the student's vocabulary")
    occurrence: Literal["all", "first"] = Field(
        "all", description="of tokens: every occurrence in an answer, or the first of each id"
    )
    keep: bool = Field(False, description="of tokens: keep these and close the others")

    def check_vocabulary(self, size: int) -> Iterable[str]:
        unknown = [token for token in self.ids if token >= size]
        if unknown:
            yield (
                f"gate tokens names id {unknown[0]}, and the student's vocabulary has {size} ids, 0 to {size - 1}. Use ids of the "
                "student's own tokenizer."
            )

    def factors(self, view: GateView) -> Arrays:
        return [self._factors(rollout.response_ids) for rollout in view.rollouts]

    def _factors(self, ids_T: np.ndarray) -> np.ndarray:
        found = np.isin(ids_T, self.ids)
        if self.occurrence == "first":
            first = np.zeros(ids_T.size, dtype=bool)
            first[np.unique(ids_T, return_index=True)[1]] = True
            found &= first
        return (found if self.keep else ~found).astype(np.float64)


class Length(Gate):
    """Apple SSD: closes the shortest or the longest answers of a step."""

    name = "length"
    shortest: float = Field(
        0.0, ge=0, lt=1, description="of length: the part of a step's answers, the shortest, to close"
    )
    longest: float = Field(
        0.0, ge=0, lt=1, description="of length: the part of a step's answers, the longest, to close"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Length:
        if self.shortest == 0 and self.longest == 0:
            raise ValueError("shortest and longest are 0, so no answer is closed: set one, such as shortest: 0.1")
        if self.shortest + self.longest >= 1:
            raise ValueError(f"shortest {self.shortest:g} and longest {self.longest:g} close every answer")
        return self

    def factors(self, view: GateView) -> Arrays:
        is_open = np.array([bool(mask.any()) for mask in view.open])
        lengths = np.array([int(mask.sum()) for mask in view.eligible])
        members = np.flatnonzero(is_open)
        members = members[np.argsort(lengths[members], kind="stable")]
        kept = np.zeros(lengths.size)
        last = members.size - round(self.longest * members.size)
        kept[members[round(self.shortest * members.size) : last]] = 1.0
        return view.spread(kept)


class Keep(Gate):
    """GRPO-RoC: keeps some answers of every group, right and wrong in proportion, and drops groups without contrast."""

    name = "keep"
    compares_samples = chooses_rollouts = True
    share: float = Field(0.5, gt=0, lt=1)
    minimum: Positive = Field(2, description="of keep: right and wrong answers to keep, if there are so many")
    prefer: Literal["short", "likely", "random", "clean"] = Field(
        "short",
        description="of keep: which right answers stay, clean: those with the smallest share of failed tool calls (half without a call); "
        "of wrong ones a random part stays",
    )
    threshold: float = Field(0.5, description="a reward of at least this is correct")

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if self.prefer == "clean" and not any(one is None or one.has_tools for one in view.environments):  # not known
            yield (
                "gate keep with prefer: clean compares failed tool calls, and no environment of this recipe has tools. Set "
                "rollout.environment to one that has, or prefer: short."
            )

    @property
    def by_student(self) -> bool:
        return self.prefer == "likely"

    def needs(self, role: str = "teacher") -> Needs:
        return Needs(rewards=True)

    def factors(self, view: GateView) -> Arrays:
        kept = np.zeros(len(view.rollouts))
        groups: dict[str, list[int]] = {}
        for number, (group, reward) in enumerate(zip(view.groups, view.rewards, strict=True)):
            if reward is not None and view.open[number].any():
                groups.setdefault(group, []).append(number)
        for members in groups.values():
            kept[self._chosen(view, members)] = 1.0
        return view.spread(kept)

    def _chosen(self, view: GateView, members: list[int]) -> list[int]:
        right = [number for number in members if (view.rewards[number] or 0.0) >= self.threshold]
        wrong = [number for number in members if number not in right]
        if not right or not wrong:
            return []
        draws = {number: keyed_uniforms(f"{view.seed}/keep/{view.ids[number]}", 1)[0] for number in members}
        orders = {
            "short": lambda number: view.rollouts[number].response_ids.size,
            "likely": lambda number: -view.rollouts[number].logprob[view.eligible[number]].mean(),
            "random": draws.__getitem__,
            "clean": lambda number: (tool_penalty(view.rollouts[number]), draws[number]),
        }
        count = round(self.share * len(members))
        of_right = round(count * len(right) / len(members))
        of_right = min(max(of_right, self.minimum), len(right))
        of_wrong = min(max(count - of_right, self.minimum), len(wrong))
        right.sort(key=orders[self.prefer])
        wrong.sort(key=draws.__getitem__)
        return right[:of_right] + wrong[:of_wrong]


def tool_penalty(rollout: Rollout) -> float:
    """The share of an episode's tool calls that failed or could not be read; 0.5 without any call."""
    calls, failed = (rollout.extras.get(name, 0) for name in (CALLS, FAILED_CALLS))
    return min(1.0, failed / calls) if calls else 0.5


class BestOfGroup(Gate):
    """Keeps the best-rewarded answer of every group, of several the first sampled (BOND)."""

    name = "best_of_group"
    compares_samples = chooses_rollouts = True

    def needs(self, role: str = "teacher") -> Needs:
        return Needs(rewards=True)

    def factors(self, view: GateView) -> Arrays:
        best: dict[str, tuple[float, int, int]] = {}
        for number, (group, reward) in enumerate(zip(view.groups, view.rewards, strict=True)):
            if reward is not None and view.open[number].any():
                entry = (-reward, view.rollouts[number].sample, number)
                best[group] = min(best.get(group, entry), entry)
        kept = np.zeros(len(view.rollouts))
        kept[[number for _, _, number in best.values()]] = 1.0
        return view.spread(kept)


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

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if not view.environments:
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
        (keyed_uniforms(f"{seed}/{name}", length) < share).astype(np.float64)
        for name, length in zip(names, lengths, strict=True)
    ]


def speculative(
    names: Sequence[str], students: Sequence[np.ndarray], teachers: Sequence[np.ndarray], seed: int
) -> Arrays:
    """(T,) bool: accept a sampled token with probability min(1, T/S), as speculative decoding does."""
    return [
        keyed_uniforms(f"{seed}/{name}", student.size) < np.exp(np.minimum(teacher - student, 0.0))
        for name, student, teacher in zip(names, students, teachers, strict=True)
    ]


def further_draws(names: Sequence[str], rates: Sequence[np.ndarray], count: int, seed: int) -> Arrays:
    """(T,) bool: whether one of `count` further proposals is accepted, given the acceptance rate of a single one.

    A proposal drawn from S is accepted with probability sum min(S, T), so one of n is with 1 - (1 - sum min(S, T))^n: there
    is no need to draw them.
    """
    return [
        keyed_uniforms(f"{seed}/more/{name}", rate.size) < 1 - (1 - rate.clip(0, 1)) ** count
        for name, rate in zip(names, rates, strict=True)
    ]


def drift_weights(gap_T: np.ndarray, gamma: float, most: float | None) -> np.ndarray:
    """1 + gamma * (1 - C_t / C), with C_t the sum of the gaps before t and C of all; 0 where C_t exceeds `most`.

    >>> drift_weights(np.array([1.0, 3.0, 0.0]), 0.5, 2.0).tolist()
    [1.5, 1.375, 0.0]
    """
    before = gap_T.cumsum() - gap_T
    weights = 1 + gamma * (1 - before / max(gap_T.sum(), 1e-8))
    return weights if most is None else np.where(before > most, 0.0, weights)


def keyed_generator(key: str) -> np.random.Generator:
    """Random numbers that depend on the key alone, so every rank and every restart draws the same."""
    entropy = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest(), "big")
    return np.random.Generator(np.random.Philox(entropy))


def keyed_uniforms(key: str, count: int) -> np.ndarray:
    """(T,) numbers from [0, 1)."""
    return keyed_generator(key).random(count)


def shuffled_order(key: str, mask_T: np.ndarray) -> np.ndarray:
    """(T,) positions: a random cycle through those in the mask, so each takes the place of another; the others stay.

    >>> shuffled_order("a", np.array([True, False, True])).tolist()
    [2, 1, 0]
    """
    order, members = np.arange(mask_T.size), np.flatnonzero(mask_T)
    cycle = keyed_generator(key).permutation(members)
    order[cycle] = np.roll(cycle, 1)
    return order


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
        return pass_rates(view.rewards, view.groups, self.threshold, [rollout.episode for rollout in view.rollouts])

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


def pass_rates(
    scores: Sequence[float | None], groups: Sequence[str], threshold: float, answers: Sequence[str] | None = None
) -> np.ndarray:
    """(B,) pass rate of each rollout's group, among rollouts with a reward; NaN if there are none.

    `answers`: the answer that each rollout is a turn of, if some are of the same answer, which counts once.

    >>> pass_rates([1.0, 0.0, None, 0.0], ["a", "a", "a", "b"], 0.5).tolist()
    [0.5, 0.5, 0.5, 0.0]
    """
    passed = np.array([np.nan if score is None else float(score >= threshold) for score in scores])
    rates = np.full(passed.size, np.nan)
    first = np.ones(passed.size, dtype=bool)
    if answers is not None:
        first[:] = False
        first[np.unique(answers, return_index=True)[1]] = True
    for number in np.unique(groups):
        members = np.asarray(groups) == number
        known = passed[members & first & ~np.isnan(passed)]
        if known.size:
            rates[members] = known.mean()
    return rates
