"""A list of terms from the recipe, turned into one loss on packed rollouts.

    direct            exact full-vocabulary divergence to the teacher, at every token of the chosen authors
    policy_gradient   sampled token, advantage = teacher log-prob - behaviour log-prob, importance sampling
    cross_entropy     negative log-likelihood of data or teacher tokens

Weights are made for the whole batch before it is cut up; here they are only multiplied and summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from opd.config import Rollouts, Term
from opd.errors import RecipeError
from opd.models.language_model import LanguageModel
from opd.models.packing import Pack
from opd.objectives import Projection, divergence, importance_sampling, teacher_log_ratio, token_logprobs, token_weights
from opd.teachers.local import LocalTeacher
from opd.types import Author, Rollout, Signal, SignalKind

Signals = Mapping[tuple[str, SignalKind], Mapping[str, Signal]]  # (role, kind) -> rollout id -> signal
Weights = Mapping[str, np.ndarray]  # rollout id -> (T,) weights


@dataclass
class Statistics:
    """Detached per-token values of one micro-batch, in the order of its rollouts; NaN where nothing was computed."""

    loss: dict[str, float] = field(default_factory=dict)
    reverse_kl: np.ndarray = field(default_factory=lambda: np.empty(0))
    entropy: np.ndarray = field(default_factory=lambda: np.empty(0))
    mismatch: np.ndarray = field(default_factory=lambda: np.empty(0))  # |log current - log behaviour| of student tokens


class Objective:
    def __init__(
        self, terms: Sequence[Term], teachers: Mapping[str, LocalTeacher], rollout: Rollouts, stop_ids: tuple[int, ...]
    ) -> None:
        self.terms, self._teachers, self._merge, self._temperature = terms, teachers, (stop_ids,), rollout.temperature
        if any(term.form == "policy_gradient" for term in terms):
            _refuse_truncated_sampling(rollout)

    @property
    def needs(self) -> list[tuple[str, SignalKind]]:
        """Which role has to give which kind of signal."""
        kinds: dict[str, SignalKind] = {"direct": "hidden", "policy_gradient": "logprobs_at"}
        return list(dict.fromkeys((term.role, kinds[term.form]) for term in self.terms if term.form in kinds))

    def token_weights(self, rollouts: Sequence[Rollout]) -> list[Weights]:
        """One mapping per term. The only place where tokens are masked and denominators formed."""
        found: list[Weights] = []
        for term in self.terms:
            authors = [int(Author[name.upper()]) for name in term.authors]
            masks = [np.isin(rollout.author, authors) for rollout in rollouts]
            weights = token_weights(masks, [rollout.group for rollout in rollouts], term.aggregate, term.denominator)
            found.append(
                {rollout.id: weight * term.coefficient for rollout, weight in zip(rollouts, weights, strict=True)}
            )
        return found

    def __call__(
        self, student: LanguageModel, batch: Pack, signals: Signals, weights: Sequence[Weights]
    ) -> tuple[Tensor, Statistics]:
        hidden_ND = student.hidden(batch.ids_T, batch.layout)[batch.predicting_N]
        projection = _autocast_head(student.project(hidden_ND))
        count = hidden_ND.shape[0]
        statistics = Statistics(
            reverse_kl=np.full(count, np.nan), entropy=np.full(count, np.nan), mismatch=np.full(count, np.nan)
        )
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        for index, (term, by_rollout) in enumerate(zip(self.terms, weights, strict=True)):
            weight_N = np.concatenate([by_rollout[rollout.id] for rollout in batch.rollouts])
            rows = np.flatnonzero(weight_N)  # tokens this term leaves alone cost nothing
            if rows.size:
                loss = self._term(term, projection, batch, signals, weight_N, rows, statistics)
                statistics.loss[f"{index}:{term.form}"] = float(loss.detach())
                total = total + loss
        return total, statistics

    def _term(
        self, term: Term, projection: Projection, batch: Pack, signals: Signals,
        weight_N: np.ndarray, rows: np.ndarray, statistics: Statistics,
    ) -> Tensor:  # fmt: skip
        device = projection.hidden.device
        if term.form == "direct":
            return self._direct(term, projection, batch, signals[term.role, "hidden"], weight_N, statistics)
        index = torch.from_numpy(rows).to(device)
        ids = torch.from_numpy(_concatenate(batch, "response_ids")[rows].astype(np.int64)).to(device)
        weight = torch.from_numpy(weight_N[rows]).to(device)
        if term.form == "cross_entropy":
            return -(token_logprobs(projection.rows(index), ids, merge=self._merge) * weight).sum()
        judged = np.concatenate([signals[term.role, "logprobs_at"][rollout.id].values for rollout in batch.rollouts])
        return self._policy_gradient(projection.rows(index), ids, weight, batch, judged, rows, statistics)

    def _direct(
        self,
        term: Term,
        projection: Projection,
        batch: Pack,
        signals: Mapping[str, Signal],
        weight_N: np.ndarray,
        statistics: Statistics,
    ) -> Tensor:
        """One divergence per teacher in the batch; batches are ordered by teacher, so that is mostly one."""
        device = projection.hidden.device
        owner = np.repeat([signals[rollout.id].teacher for rollout in batch.rollouts], batch.response_lengths)
        total = projection.hidden.new_zeros((), dtype=torch.float32)
        for name in dict.fromkeys(owner.tolist()):
            rows = np.flatnonzero((owner == name) & (weight_N != 0))
            hidden = torch.cat(
                [signals[rollout.id].values for rollout in batch.rollouts if signals[rollout.id].teacher == name]
            )
            chosen = torch.from_numpy(np.flatnonzero(weight_N[owner == name])).to(device)
            found = divergence(
                term.divergence, projection.rows(torch.from_numpy(rows).to(device)), self._teachers[name].project(hidden.to(device)[chosen]),
                weight=torch.from_numpy(weight_N[rows]).to(device), support=term.support, temperature=term.temperature,
                merge=self._merge, **term.parameters,
            )  # fmt: skip
            statistics.reverse_kl[rows] = found.reverse_kl.cpu().numpy()
            statistics.entropy[rows] = found.entropy.cpu().numpy()
            total = total + found.loss
        return total

    def _policy_gradient(
        self,
        projection: Projection,
        ids: Tensor,
        weight: Tensor,
        batch: Pack,
        judged_N: np.ndarray,
        rows: np.ndarray,
        statistics: Statistics,
    ) -> Tensor:
        """Ratios compare both sides under one transform: the merged policy itself at temperature 1, else the tempered one."""
        device = projection.hidden.device

        def column(name: str) -> Tensor:
            return torch.from_numpy(_concatenate(batch, name)[rows]).to(device)

        plain = column("logprob")
        teacher = torch.from_numpy(judged_N[rows]).to(device)
        if self._temperature == 1.0:
            current, behaviour = token_logprobs(projection, ids, merge=self._merge), plain
        else:
            current, behaviour = (
                token_logprobs(projection, ids, temperature=self._temperature),
                column("logprob_sampled"),
            )
        losses = importance_sampling(current, behaviour, teacher_log_ratio(teacher, plain))
        statistics.reverse_kl[rows] = (plain - teacher).cpu().numpy()  # k1: one-sample estimate
        statistics.mismatch[rows] = (current.detach() - behaviour).abs().cpu().numpy()
        return (losses * weight).sum()


def _concatenate(batch: Pack, name: str) -> np.ndarray:
    return np.concatenate([getattr(rollout, name) for rollout in batch.rollouts])


def _autocast_head(projection: Projection) -> Projection:
    """Under bf16 autocast on a GPU the head runs on tensor cores too; logits still come out in fp32."""
    if projection.hidden.is_cuda and projection.hidden.dtype != projection.weight.dtype:
        return replace(projection, weight=projection.weight.to(projection.hidden.dtype))
    return projection


def _refuse_truncated_sampling(rollout: Rollouts) -> None:
    if rollout.top_p < 1 or rollout.top_k > 0:
        raise RecipeError(
            f"rollout: top_p {rollout.top_p}, top_k {rollout.top_k} with a policy_gradient term. Importance ratios are undefined for "
            "tokens that truncated sampling can never draw; set top_p: 1 and top_k: 0, or use form: direct."
        )
    if rollout.temperature == 0:
        raise RecipeError(
            "rollout.temperature 0 with a policy_gradient term: greedy tokens carry no gradient. Sample at temperature 1."
        )
