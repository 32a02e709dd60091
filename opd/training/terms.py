"""The loss of one term on one micro-batch. Axis legend: N = response tokens of the micro-batch, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from opd.divergence import Projection, divergence, statistics, token_logprobs
from opd.divergence.projection import MergeGroups
from opd.models.packing import Pack
from opd.objective.corrections import LOG_LIMIT, correction_weight, prefix_weight, segment_mean, veto_weight
from opd.objective.surrogates import cispo, cut_off, gspo, importance_sampling, k2, ppo
from opd.teachers.local import LocalTeacher
from opd.training.judged import Judged, by_teacher, concatenated, segments, token_ids
from opd.training.prepare import TermPlan, token_advantages
from opd.types import Author


@dataclass
class Statistics:
    """Detached per-token values of one micro-batch, in the order of its rollouts; NaN where nothing was computed."""

    loss: dict[str, float] = field(default_factory=dict)
    reverse_kl: np.ndarray = field(default_factory=lambda: np.empty(0))
    entropy: np.ndarray = field(default_factory=lambda: np.empty(0))
    mismatch: np.ndarray = field(default_factory=lambda: np.empty(0))  # |log trainer - log sampler| of student tokens
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)  # share of tokens: (clipped or masked, all)

    @classmethod
    def empty(cls, count: int) -> Statistics:
        nothing = [np.full(count, np.nan) for _ in range(3)]
        return cls(reverse_kl=nothing[0], entropy=nothing[1], mismatch=nothing[2])


@dataclass(frozen=True, eq=False)
class Micro:
    """One forward pass and what is known about its tokens."""

    batch: Pack
    projection: Projection
    judged: Judged
    teachers: Mapping[str, LocalTeacher]
    merge: MergeGroups
    temperature: float  # of sampling
    mixed: float  # share of the teacher in the distribution sampled from
    statistics: Statistics

    @property
    def device(self) -> torch.device:
        return self.projection.hidden.device

    def tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def column(self, name: str, rows: np.ndarray) -> Tensor:
        return self.tensor(concatenated(self.batch.rollouts, name)[rows])

    def behaviour(self, rows: np.ndarray) -> Tensor:
        """Log-probs under the distribution drawn from, in the transform of `current`: what ratios are taken against."""
        return self.column("logprob_sampled", rows) if self.mixed else self.sampler(rows)

    def sampler(self, rows: np.ndarray) -> Tensor:
        """The student's own log-probs as the sampler computed them: what mismatch is measured against."""
        return self.column("logprob" if self.temperature == 1.0 else "logprob_sampled", rows)

    def proximal(self, rows: np.ndarray, current: Tensor) -> Tensor:
        """The trainer's at the start of this batch's updates; with one update per batch, the current ones."""
        survey = self.judged.survey.proximal
        if not survey:
            return current.detach()
        return self.tensor(np.concatenate([survey[item.id] for item in self.batch.rollouts])[rows]).float()

    def log_ratio(self, rows: np.ndarray, current: Tensor) -> Tensor:
        """log rho, trainer over sampler, of the student's tokens; 0 where somebody else wrote them. Noted as mismatch."""
        found = self.proximal(rows, current) - self.sampler(rows)
        theirs = concatenated(self.batch.rollouts, "author")[rows] != Author.STUDENT
        self.statistics.mismatch[rows] = np.where(theirs, np.nan, found.abs().cpu().numpy())
        return found.masked_fill(self.tensor(theirs), 0.0)

    def current(self, rows: np.ndarray) -> Tensor:
        """Ratios compare both sides under one transform: the merged policy itself at temperature 1, else the tempered one."""
        projection, ids = self.projection.rows(self.tensor(rows)), token_ids(self.batch, self.device)[self.tensor(rows)]
        if self.temperature == 1.0:
            return token_logprobs(projection, ids, merge=self.merge)
        return token_logprobs(projection, ids, temperature=self.temperature)

    def plain(self, rows: np.ndarray, current: Tensor) -> Tensor:
        """Detached log-probs of the policy itself: advantages are untempered."""
        if self.temperature == 1.0:
            return current.detach()
        projection, ids = self.projection.rows(self.tensor(rows)), token_ids(self.batch, self.device)[self.tensor(rows)]
        return token_logprobs(projection.detach(), ids, merge=self.merge)

    def estimate(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Reverse KL by one sample, where no term has computed it exactly."""
        known = self.statistics.reverse_kl[rows]
        self.statistics.reverse_kl[rows] = np.where(np.isnan(known), values, known)

    def count(self, name: str, changed: Tensor) -> None:
        self.statistics.counts[name] = (int(changed.sum()), changed.numel())


def term_loss(plan: TermPlan, micro: Micro, weight_N: np.ndarray) -> Tensor:
    term = plan.term
    if term.form == "direct":
        return _direct(plan, micro, weight_N)
    rows = np.flatnonzero(weight_N)
    if term.form == "cross_entropy":
        ids = token_ids(micro.batch, micro.device)[micro.tensor(rows)]
        found = token_logprobs(micro.projection.rows(micro.tensor(rows)), ids, merge=micro.merge)
        return -(found * micro.tensor(weight_N[rows])).sum()
    if term.correction is not None or term.surrogate.kind == "gspo":  # sequences are judged whole, gated or not
        rows = np.flatnonzero(np.concatenate([plan.own[rollout.id] for rollout in micro.batch.rollouts]))
    return (_k2 if term.form == "k2" else _policy_gradient)(plan, micro, weight_N, rows)


def _direct(plan: TermPlan, micro: Micro, weight_N: np.ndarray) -> Tensor:
    term, found_all = plan.term, micro.statistics
    if term.correction is not None:
        weight_N = _prefix_corrected(plan, micro, weight_N)
    ids = token_ids(micro.batch, micro.device)
    sampler = concatenated(micro.batch.rollouts, "logprob")
    sampler = np.where(concatenated(micro.batch.rollouts, "author") == Author.STUDENT, sampler, np.nan)
    total = micro.projection.hidden.new_zeros((), dtype=torch.float32)
    signals = micro.judged.signals[term.role, "hidden"]
    for rows, teacher in by_teacher(micro.batch, signals, micro.teachers, weight_N != 0, micro.device):
        if not rows.size:
            continue
        index = micro.tensor(rows)
        found = divergence(
            term.divergence, micro.projection.rows(index), teacher, weight=micro.tensor(weight_N[rows]),
            temperature=term.temperature, merge=micro.merge, tokens=ids[index], **term.truncation, **term.parameters,
        )  # fmt: skip
        found_all.reverse_kl[rows] = found.reverse_kl.cpu().numpy()
        found_all.entropy[rows] = found.entropy.cpu().numpy()
        if term.temperature == 1.0 and found.statistics.logprob is not None and term.correction is None:
            found_all.mismatch[rows] = np.abs(found.statistics.logprob.cpu().numpy() - sampler[rows])
        total = total + found.loss
    return total


def _prefix_corrected(plan: TermPlan, micro: Micro, weight_N: np.ndarray) -> np.ndarray:
    """A direct loss at t depends on the tokens before t alone, so their ratios, truncated, are its correction."""
    correction = plan.term.correction
    assert correction is not None
    rows = np.arange(weight_N.size)
    with torch.no_grad():
        log_ratio = micro.log_ratio(rows, micro.current(rows))
    segment = micro.tensor(segments(micro.batch))
    factor = torch.ones_like(log_ratio)
    if correction.kind == "prefix":
        factor = prefix_weight(log_ratio, segment, correction.high)
    changed = factor >= correction.high if correction.kind == "prefix" else factor == 0
    if correction.veto is not None:
        veto = veto_weight(log_ratio, segment, correction.veto)
        factor, changed = factor * veto, changed | (veto == 0)
    micro.count(f"corrected/{plan.name}", changed[micro.tensor(weight_N != 0)])
    return (weight_N * factor.cpu().numpy()).astype(np.float32)


def _k2(plan: TermPlan, micro: Micro, weight_N: np.ndarray, rows: np.ndarray) -> Tensor:
    teacher = micro.tensor(np.concatenate(micro.judged.logprobs(plan.term.role, micro.batch.rollouts))[rows]).float()
    ids = token_ids(micro.batch, micro.device)[micro.tensor(rows)]
    plain = token_logprobs(micro.projection.rows(micro.tensor(rows)), ids, merge=micro.merge)
    micro.estimate(rows, (plain.detach() - teacher).cpu().numpy())
    losses, log_ratio = k2(plain, teacher), micro.log_ratio(rows, plain)
    if plan.term.correction is not None:
        losses = losses * _correction(plan, micro, log_ratio, rows, weight_N, included=False)
    return (losses * micro.tensor(weight_N[rows])).sum()


def _policy_gradient(plan: TermPlan, micro: Micro, weight_N: np.ndarray, rows: np.ndarray) -> Tensor:
    term, current = plan.term, micro.current(rows)
    advantage = _advantage(plan, micro, rows, current)
    decoupled = term.surrogate.against == "proximal"
    old = micro.proximal(rows, current) if decoupled else micro.behaviour(rows)
    losses = _surrogate(plan, micro, current, old, advantage, rows, weight_N)
    log_ratio = micro.log_ratio(rows, current)
    if term.correction is not None:
        losses = losses * _correction(plan, micro, log_ratio, rows, weight_N, included=not decoupled)
    if term.advantage.teacher_weight:
        teacher = np.concatenate(micro.judged.logprobs(term.role, micro.batch.rollouts))[rows]
        micro.estimate(rows, concatenated(micro.batch.rollouts, "logprob")[rows] - teacher)  # k1: one sample of it
    return (losses * micro.tensor(weight_N[rows])).sum()


def _advantage(plan: TermPlan, micro: Micro, rows: np.ndarray, current: Tensor) -> Tensor:
    rollouts = micro.batch.rollouts
    if plan.advantage is not None:
        value = np.concatenate([plan.advantage[rollout.id] for rollout in rollouts])
    else:  # compared with the policy being trained, as it is now
        plain_N = np.zeros(micro.projection.count)
        plain_N[rows] = micro.plain(rows, current).cpu().numpy()
        students = np.split(plain_N, np.cumsum(micro.batch.response_lengths)[:-1])
        value = np.concatenate(token_advantages(plan, micro.judged, rollouts, students))
    if plan.term.advantage.kl_baseline:
        value = value.copy()
        value[rows] += plan.term.advantage.teacher_weight * _exact_kl(plan, micro, rows)[rows]
    return micro.tensor(value[rows]).float()


def _exact_kl(plan: TermPlan, micro: Micro, rows: np.ndarray) -> np.ndarray:
    """(N,) KL(student || teacher) of every row: what the log-ratio averages to, so adding it leaves the gradient's mean alone."""
    open_N = np.zeros(micro.projection.count, dtype=bool)
    open_N[rows] = True
    found = np.zeros(open_N.size)
    signals = micro.judged.signals[plan.term.role, "hidden"]
    for chosen, teacher in by_teacher(micro.batch, signals, micro.teachers, open_N, micro.device):
        own = micro.projection.rows(micro.tensor(chosen)).detach()
        values = statistics(own, teacher, merge=micro.merge).reverse_kl
        assert values is not None
        found[chosen] = values.cpu().numpy()
    return found


def _surrogate(
    plan: TermPlan,
    micro: Micro,
    current: Tensor,
    old: Tensor,
    advantage: Tensor,
    rows: np.ndarray,
    weight_N: np.ndarray,
) -> Tensor:
    spec = plan.term.surrogate
    if spec.kind == "importance_sampling":
        return importance_sampling(current, old, advantage)
    log_ratio, segment = (current - old).detach().clamp(-LOG_LIMIT, LOG_LIMIT), _segment(micro, rows)
    if spec.kind == "gspo":
        changed = cut_off(segment_mean(log_ratio, segment).exp()[segment], advantage, spec.low, spec.high)
        losses = gspo(current, old, advantage, segment, spec.low, spec.high)
    elif spec.kind == "cispo":
        changed = (log_ratio.exp() - 1 > spec.high) | (1 - log_ratio.exp() > spec.low)
        losses = cispo(current, old, advantage, spec.low, spec.high)
    else:
        changed = cut_off(log_ratio.exp(), advantage, spec.low, spec.high, spec.dual)
        losses = ppo(current, old, advantage, spec.low, spec.high, spec.dual)
    micro.count(f"clipped/{plan.name}", changed[micro.tensor(weight_N[rows] != 0)])
    return losses


def _correction(
    plan: TermPlan, micro: Micro, log_ratio: Tensor, rows: np.ndarray, weight_N: np.ndarray, *, included: bool
) -> Tensor:
    """(rows,) detached weights w(rho); masked tokens keep their place in the denominator.

    `included`: the surrogate's own ratio is rho already, so what is still missing is w(rho) / rho, not rho once more.
    """
    spec = plan.term.correction
    assert spec is not None
    assert spec.kind != "prefix"
    segment = _segment(micro, rows)
    found = correction_weight(spec.kind, log_ratio, segment, low=spec.low, high=spec.high, level=spec.level)
    changed = found >= spec.high if spec.kind == "tis" else found == 0
    if included and spec.kind != "none":
        found = found * (-log_ratio.detach().clamp(-LOG_LIMIT, LOG_LIMIT)).exp()
    if spec.veto is not None:
        veto = veto_weight(log_ratio, segment, spec.veto)
        found, changed = found * veto, changed | (veto == 0)
    micro.count(f"corrected/{plan.name}", changed[micro.tensor(weight_N[rows] != 0)])
    return found


def _segment(micro: Micro, rows: np.ndarray) -> Tensor:
    """Rollout numbers of some rows, counted from 0 without gaps."""
    return micro.tensor(np.unique(segments(micro.batch)[rows], return_inverse=True)[1])
