"""Preferences: the better-rewarded of two answers to a prompt becomes likelier than the other.

Pairs are formed within a group, from the student's own samples or a teacher's. Groups are never split, so neither are
pairs. With h the log-ratio of a whole answer, log student - log reference, and d = h(preferred) - h(rejected):

    dpo    -log sigmoid(reference_weight * d)              DPO, SPIN
    ipo    (d - 1 / (2 * reference_weight))^2              IPO
    orpo   -log sigmoid(log odds of the preferred - log odds of the rejected), no reference; odds p / (1 - p) of the
           geometric mean p of an answer's token probabilities. ORPO adds the cross-entropy of the preferred answer

Axis legend: P = pairs, N = tokens of the micro-batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from opd.objective.term import Term, pair_weights
from opd.registry import Choice, Family, Needs, StageView

if TYPE_CHECKING:
    from torch import Tensor

    from opd.objective.micro import MicroBatch
    from opd.objective.objective import PreparedTerm
    from opd.records import Rollout


Pair = tuple[str, str]  # ids of the preferred and the rejected rollout


@dataclass(frozen=True, eq=False)
class Answers:
    """Whole answers, one number each. Gate factors weigh the tokens' log-probs in the sums."""

    student: Tensor  # log-prob of the answer, with gradients
    reference: Tensor  # log-prob under the reference; 0 if it is not used
    length: Tensor  # number of tokens in the sum

    @property
    def log_ratio(self) -> Tensor:
        return self.student - self.reference

    def some(self, numbers: Tensor) -> Answers:
        return Answers(self.student[numbers], self.reference[numbers], self.length[numbers])


class Preference(Choice):
    """The loss of a pair. For your own preference, subclass and define `losses`."""

    family = "preference"
    by_reference: ClassVar[bool] = True  # compares with the model of the term's role

    @abstractmethod
    def losses(self, preferred: Answers, rejected: Answers) -> Tensor:
        """(P,) losses of the pairs."""
        raise NotImplementedError


AnyPreference = Annotated[Preference, Family("preference", default="dpo")]


class RatioPreference(Preference):
    """Base of preferences that use log-ratios to the reference."""

    reference_weight: float = Field(
        0.1, gt=0, description="beta of dpo, tau of ipo: weight of the KL penalty towards the reference that is implied"
    )
    length_normalised: bool = Field(False, description="of dpo and ipo: divide a log-ratio by its number of tokens")

    def margin(self, preferred: Answers, rejected: Answers) -> Tensor:
        return self._log_ratio(preferred) - self._log_ratio(rejected)

    def _log_ratio(self, side: Answers) -> Tensor:
        return side.log_ratio / side.length if self.length_normalised else side.log_ratio


class DPO(RatioPreference):
    name = "dpo"
    by_default = True

    def losses(self, preferred: Answers, rejected: Answers) -> Tensor:
        from torch.nn.functional import logsigmoid

        return -logsigmoid(self.reference_weight * self.margin(preferred, rejected))


class IPO(RatioPreference):
    name = "ipo"

    def losses(self, preferred: Answers, rejected: Answers) -> Tensor:
        return (self.margin(preferred, rejected) - 0.5 / self.reference_weight) ** 2


class ORPO(Preference):
    name = "orpo"
    by_reference = False

    def losses(self, preferred: Answers, rejected: Answers) -> Tensor:
        from torch.nn.functional import logsigmoid

        return -logsigmoid(log_odds(preferred) - log_odds(rejected))


def log_odds(side: Answers) -> Tensor:
    """log(p / (1 - p)), p the geometric mean of the answer's token probabilities, kept below 1."""
    mean = (side.student / side.length).clamp(max=-1e-6)
    return mean - (-mean.expm1()).log()


class Pairwise(Term):
    """Trains on preferences between two answers to the same prompt."""

    name = "pairwise"
    flat = ("preference",)
    usual_authors = ("student", "teacher")

    role: str = Field("reference", description="whose signal")
    aggregate: Literal["pair_mean", "prompt_mean", "constant"] = "pair_mean"  # type: ignore[assignment]
    preference: AnyPreference = Field(DPO(), description="of pairwise: what a pair costs")
    pairs: Literal["best_worst", "all"] = Field(
        "best_worst",
        description=(
            "of pairwise: the best-rewarded answer of a prompt against the worst, or every two whose rewards differ"
        ),
    )

    def form_needs(self, updates: int) -> Needs:
        needs = Needs(rewards=True)
        return needs | Needs(signals=((self.role, "logprobs_at"),)) if self.preference.by_reference else needs

    @property
    def parts(self) -> Iterable[Choice]:
        return [*super().parts, self.preference]

    def refuse(self, view: StageView) -> Iterable[str]:
        if view.rollout.samples == 1:
            yield "pairwise compares the samples of a prompt, but rollout.samples is 1. Set it to 2 or more."
        alone = [
            key for key, writer in view.rollout.writers_by_key.items() if writer.share and writer.author != "student"
        ]
        if alone:
            yield (
                f"pairwise compares the answers to one prompt, and rollout.{alone[0]} has one writer answer all of them: no pair has two "
                "authors. Have it write some of every group instead: rollout.writers: [{kind: data, samples: 1}], say."
            )
        yield from super().refuse(view)

    def prepare(self, prepared: PreparedTerm) -> list[Pair]:
        groups: dict[str, list[tuple[int, str, float]]] = {}
        for rollout in prepared.batch.rollouts:
            reward = prepared.batch.rewards.get(rollout.id)
            if reward is not None and prepared.counted[rollout.id].any():
                groups.setdefault(rollout.group, []).append((rollout.sample, rollout.id, reward))
        in_order = [[(reward, name) for _, name, reward in sorted(members)] for members in groups.values()]
        pairs = [pair for rewarded in in_order for pair in preferences(rewarded, self.pairs)]
        prepared.metrics[f"pairs/{prepared.name}"] = len(pairs)
        return pairs

    def weights(self, prepared: PreparedTerm, rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
        """Token weights: the factor of the loss of each pair that the token's rollout belongs to."""
        group_of = {rollout.id: rollout.group for rollout in rollouts}
        pairs = [pair for pair in prepared.state if pair[0] in group_of]
        weights = pair_weights([group_of[preferred] for preferred, _ in pairs], self.aggregate, self.denominator)
        by_rollout = {name: weight for pair, weight in zip(pairs, weights, strict=True) for name in pair}
        return {
            name: ((factor != 0) * by_rollout.get(name, 0.0) * prepared.coefficient).astype(np.float32)
            for name, factor in ((name, prepared.factor[name]) for name in group_of)
        }

    def loss(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> Tensor:
        rows = np.flatnonzero(weight_N)
        position = {rollout.id: index for index, rollout in enumerate(micro.pack.rollouts)}
        owner = np.repeat(np.arange(len(position)), micro.pack.response_lengths)[rows]
        weight_B = np.zeros(len(position), dtype=np.float32)
        weight_B[owner] = weight_N[rows]  # all tokens of a rollout have the same
        pairs = [(position[one], position[other]) for one, other in prepared.state if one in position]
        trained = np.array([pair for pair in pairs if weight_B[list(pair)].all()], dtype=np.int64).reshape(-1, 2)
        answers = self._answers(prepared, micro, rows, owner)
        preferred, rejected = (answers.some(micro.tensor(numbers)) for numbers in trained.T)
        micro.count(f"agreed/{prepared.name}", preferred.log_ratio > rejected.log_ratio)
        return (self.preference.losses(preferred, rejected) * micro.tensor(weight_B[trained[:, 0]])).sum()

    def _answers(self, prepared: PreparedTerm, micro: MicroBatch, rows: np.ndarray, owner: np.ndarray) -> Answers:
        """Answers of all rollouts of the micro-batch; those without a trained token are empty."""
        student = micro.policy(rows)
        micro.note_mismatch(rows, student)
        factor_N = np.concatenate([prepared.factor[rollout.id] for rollout in micro.pack.rollouts])
        segment, count = micro.tensor(owner), len(micro.pack.rollouts)
        factor = micro.tensor(factor_N[rows]).to(student.dtype)

        def summed(values: Tensor) -> Tensor:
            return values.new_zeros(count).index_add(0, segment, values)

        reference = student.new_zeros(count)
        if self.preference.by_reference:
            reference = summed(micro.tensor(micro.teacher_logprobs(self.role, rows)).to(student.dtype) * factor)
        return Answers(summed(student * factor), reference, summed(student.new_ones(rows.size)))


def preferences(rewarded: Sequence[tuple[float, str]], pairs: Literal["best_worst", "all"]) -> list[Pair]:
    """(preferred, rejected) ids among the answers to one prompt, given as (reward, id) in the order of sampling.

    Equal rewards make no pair. `best_worst` breaks ties by taking the first best answer and the last worst one.

    >>> preferences([(1.0, "a"), (0.0, "b"), (0.5, "c")], "best_worst")
    [('a', 'b')]
    >>> preferences([(1.0, "a"), (0.0, "b"), (1.0, "c")], "all")
    [('a', 'b'), ('c', 'b')]
    """
    ordered = sorted(rewarded, key=lambda entry: -entry[0])
    if pairs == "best_worst":
        ordered = [ordered[0], ordered[-1]]
    return [(name, other) for reward, name in ordered for less, other in ordered if less < reward]
