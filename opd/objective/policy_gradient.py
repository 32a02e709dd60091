"""Policy gradient: an advantage of the sampled token times a surrogate of its ratio."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from opd.divergences.kinds import AnyDivergence, ReverseKL
from opd.objective.advantages import Advantage, AdvantagePart, SampledTokens
from opd.objective.batch import Batch, concatenated
from opd.objective.corrections import LOG_LIMIT, TIS, segment_mean
from opd.objective.term import CorrectedTerm, Term
from opd.registry import Choice, Family, Needs, changed

if TYPE_CHECKING:
    from torch import Tensor

    from opd.objective.micro import MicroBatch
    from opd.objective.objective import PreparedTerm
    from opd.records import Rollout


# --- Surrogates: losses from an advantage and the ratio of two policies ---
#
# The advantage is detached; gradients flow only through the current log-prob. The three policies are `behaviour` (the
# sampler's log-probs), `proximal` (the trainer's before this batch's updates) and `current`.


class Surrogate(Choice):
    family = "surrogate"
    multiplies_by_ratio: ClassVar[bool] = True  # multiplies by the token's own ratio, so a correction can build on it
    whole_rollouts: ClassVar[bool] = False  # uses the ratio of all tokens of a rollout, including gated ones
    against: Literal["behaviour", "proximal"] = Field(
        "behaviour", description="denominator of the ratio; proximal: the trainer at the start of this batch's updates"
    )

    @abstractmethod
    def losses(self, current: Tensor, old: Tensor, advantage: Tensor, segment: Tensor) -> tuple[Tensor, Tensor | None]:
        """(N,) losses, and where a clip acts (None: no clipping). `old`: denominator of the ratio, detached."""
        raise NotImplementedError


AnySurrogate = Annotated[Surrogate, Family("surrogate", default="importance_sampling")]


class ImportanceSampling(Surrogate):
    """Unclipped ratio, exactly unbiased for tokens drawn from `behaviour`."""

    name = "importance_sampling"
    by_default = True

    def losses(self, current: Tensor, old: Tensor, advantage: Tensor, segment: Tensor) -> tuple[Tensor, Tensor | None]:
        return importance_sampling(current, old, advantage), None


class ClippedSurrogate(Surrogate):
    low: float = Field(0.2, ge=0, le=1, description="ratios below 1 - low are clipped (ppo, cispo, gspo)")
    high: float = Field(0.2, ge=0, description="ratios above 1 + high are clipped")


class PPO(ClippedSurrogate):
    name = "ppo"
    dual: float | None = Field(
        None, gt=1, description="dual clip of ppo: the loss of a negative advantage is at most this times |A|"
    )

    def losses(self, current: Tensor, old: Tensor, advantage: Tensor, segment: Tensor) -> tuple[Tensor, Tensor | None]:
        clipped = cut_off(_log_ratio(current, old).exp(), advantage, self.low, self.high, self.dual)
        return ppo(current, old, advantage, self.low, self.high, self.dual), clipped


class CISPO(ClippedSurrogate):
    name = "cispo"
    multiplies_by_ratio = False

    def losses(self, current: Tensor, old: Tensor, advantage: Tensor, segment: Tensor) -> tuple[Tensor, Tensor | None]:
        ratio = _log_ratio(current, old).exp()
        clipped = (ratio - 1 > self.high) | (1 - ratio > self.low)
        return cispo(current, old, advantage, self.low, self.high), clipped


class GSPO(ClippedSurrogate):
    name = "gspo"
    multiplies_by_ratio = False
    whole_rollouts = True

    def losses(self, current: Tensor, old: Tensor, advantage: Tensor, segment: Tensor) -> tuple[Tensor, Tensor | None]:
        ratio = segment_mean(_log_ratio(current, old), segment).exp()[segment]
        clipped = cut_off(ratio, advantage, self.low, self.high)
        return gspo(current, old, advantage, segment, self.low, self.high), clipped


def _log_ratio(current: Tensor, old: Tensor) -> Tensor:
    return (current - old).detach().clamp(-LOG_LIMIT, LOG_LIMIT)


# --- The arithmetic of surrogates: (N,) losses ---


def importance_sampling(current: Tensor, behaviour: Tensor, advantage: Tensor) -> Tensor:
    """(N,) losses `-(current / behaviour)(y) * A`: unclipped, exactly unbiased for tokens drawn from `behaviour`."""
    return -(current - behaviour.detach()).exp() * advantage.detach()


def ppo(current: Tensor, old: Tensor, advantage: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """max(-r A, -clip(r, 1 - low, 1 + high) A). With `dual`, the loss of a negative advantage is at most dual * |A|.

    In OPD most advantages are negative, so mostly the lower clip and the dual clip act.
    """
    import torch

    ratio, advantage = _ratio(current, old), advantage.detach()
    losses = torch.maximum(-ratio * advantage, -ratio.clamp(1 - low, 1 + high) * advantage)
    if dual is None:
        return losses
    return torch.where(advantage < 0, torch.minimum(losses, -dual * advantage), losses)


def cispo(current: Tensor, old: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """-sg(clip(r)) A log current: the weight is clipped, the gradient never vanishes."""
    return -_ratio(current, old).detach().clamp(1 - low, 1 + high) * advantage.detach() * current


def gspo(current: Tensor, old: Tensor, advantage: Tensor, segment: Tensor, low: float, high: float) -> Tensor:
    """PPO's clip on the ratio of the whole sequence, exp(mean of log r), shared by all its tokens.

    A straight-through form gives each token the gradient of its own log-prob, scaled by the sequence's ratio.
    """
    import torch

    mean = segment_mean((current - old.detach()).detach(), segment).clamp(-LOG_LIMIT, LOG_LIMIT)
    ratio = mean.exp()[segment] * (current - current.detach()).exp()
    return torch.maximum(-ratio * advantage.detach(), -ratio.clamp(1 - low, 1 + high) * advantage.detach())


def cut_off(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """(N,) bool: tokens with their gradient clipped to 0, for ratios of tokens (ppo) or sequences (gspo)."""
    outside = ((ratio > 1 + high) & (advantage > 0)) | ((ratio < 1 - low) & (advantage < 0))
    return outside if dual is None else outside | ((ratio > dual) & (advantage < 0))


def _ratio(current: Tensor, old: Tensor) -> Tensor:
    return (current - old.detach()).clamp(-LOG_LIMIT, LOG_LIMIT).exp()


class PolicyGradient(CorrectedTerm):
    name = "policy_gradient"
    flat = ("divergence",)
    usual_authors = ("student",)
    by_ratio = True
    crosses = frozenset({"logprobs_at"})

    divergence: AnyDivergence = Field(ReverseKL(), description="of a direct term; of policy_gradient: whose advantage")
    advantage: Advantage = Field(Advantage(), description="of policy_gradient")
    surrogate: AnySurrogate = Field(ImportanceSampling(), description="of policy_gradient")

    @model_validator(mode="after")
    def _means_something(self) -> PolicyGradient:
        kind = self.divergence
        if "divergence" in changed(self) and not self.advantage.of_teacher:
            raise ValueError("teacher_weight is 0, so the divergence does nothing")
        if not kind.of_one_token:
            raise ValueError(f"{kind.name} has no advantage of the sampled token alone: use form: direct")
        if not kind.by_log_ratio and any(part.for_reverse_kl for part in self.advantage.parts):
            raise ValueError(f"extrapolation and kl_baseline are defined for reverse_kl, not for {kind.name}")
        if self.correction is not None and self.correction.weighs_by == "prefix":
            raise ValueError("prefix is for form: direct; policy_gradient is corrected by icepop, tis or mis")
        if (
            self.correction is not None
            and not self.surrogate.multiplies_by_ratio
            and self.surrogate.against == "behaviour"
        ):
            raise ValueError(
                f"{self.surrogate.name} does not multiply by the ratio itself, so a correction on top needs "
                "surrogate.against: proximal"
            )
        return self

    @property
    def compares_with_sampler(self) -> bool:
        by_advantage = self.advantage.student == "behaviour" and any(part.of_student for part in self.advantage.parts)
        return super().compares_with_sampler or by_advantage or self.surrogate.against == "behaviour"

    def corrected(self) -> Term:
        takes = self.surrogate.multiplies_by_ratio or self.surrogate.against == "proximal"
        return self.model_copy(update={"correction": TIS()}) if self.correction is None and takes else self

    @property
    def minimises(self) -> str:
        return self.divergence.name if self.advantage.of_teacher else ""

    @property
    def plain_kl(self) -> str:
        return self.divergence.plain_kl if self.advantage.of_teacher else ""

    @property
    def parts(self) -> Iterable[Choice]:
        return [*super().parts, self.divergence, *self.advantage.parts, self.surrogate]

    def form_needs(self, updates: int) -> Needs:
        asked = (
            self.surrogate.against == "proximal" or self.advantage.student == "proximal" or self.correction is not None
        )
        batch_first = any(part.needs_batch for part in self.advantage.parts)
        proximal = (updates > 1 and asked) or (batch_first and self.advantage.student != "behaviour")
        first = Needs(student=frozenset({("proximal",)} if proximal else ()))
        return self.advantage.needs(self.role) | first

    def leaves_out(self, batch: Batch) -> set[str]:
        return set().union(*(part.leaves_out(batch) for part in self.advantage.parts))

    # --- The advantage ---

    @property
    def advantages(self) -> Sequence[AdvantagePart]:
        return self.advantage.parts

    def prepare(self, prepared: PreparedTerm) -> list[Any]:
        rollouts = prepared.batch.rollouts
        known = self._known_logprobs(prepared.batch, rollouts)
        return self.advantage.prepare(SampledTokens(self, prepared, rollouts, known or []))

    def _known_logprobs(self, batch: Batch, rollouts: Sequence[Rollout]) -> list[np.ndarray] | None:
        """The student's untempered log-probs; None if they are those of the current policy."""
        if self.advantage.student == "behaviour":
            return [rollout.logprob.astype(np.float64) for rollout in rollouts]
        first = batch.first_pass.logprob
        if self.advantage.student == "proximal" and first:
            return [first[rollout.id] for rollout in rollouts]
        return None

    def token_advantages(self, prepared: PreparedTerm, micro: MicroBatch, rows: np.ndarray, current: Tensor) -> Tensor:
        rollouts, ends = micro.pack.rollouts, np.cumsum(micro.pack.response_lengths)[:-1]
        student = self._known_logprobs(prepared.batch, rollouts)
        if student is None:
            now_N = np.zeros(micro.projection.count)
            now_N[rows] = micro.untempered(rows, current).cpu().numpy()
            student = np.split(now_N, ends)
        exact = None
        if any(part.needs_exact_kl for part in self.advantage.parts):
            exact = np.split(self._exact_kl(micro, rows), ends)
        tokens = SampledTokens(self, prepared, rollouts, student, exact)
        value_N = np.concatenate(self.advantage.values(tokens, prepared.state))
        return micro.tensor(value_N[rows]).float()

    def _exact_kl(self, micro: MicroBatch, rows: np.ndarray) -> np.ndarray:
        """(N,) KL(student || teacher), the mean of the log-ratio. Adding it does not change the gradient's mean."""
        from opd.divergences import statistics

        open_N, kl_N = np.zeros(micro.projection.count, dtype=bool), np.zeros(micro.projection.count)
        open_N[rows] = True
        for chosen, teacher in micro.teacher_projections(self.role, open_N):
            student = micro.projection.rows(micro.tensor(chosen)).detach()
            values = statistics(student, teacher, merge=micro.merge).reverse_kl
            assert values is not None
            kl_N[chosen] = values.cpu().numpy()
        return kl_N

    # --- The loss ---

    def loss(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> Tensor:
        rows = np.flatnonzero(weight_N)
        if self.correction is not None or self.surrogate.whole_rollouts:  # needs whole rollouts, including gated tokens
            rows = np.flatnonzero(np.concatenate([prepared.eligible[item.id] for item in micro.pack.rollouts]))
        trained = micro.tensor(weight_N[rows] != 0)
        current = micro.current(rows)
        advantage = self.token_advantages(prepared, micro, rows, current).masked_fill(~trained, 0.0)
        micro.note_advantage(prepared.name, rows, advantage)
        decoupled = self.surrogate.against == "proximal"
        old = micro.proximal(rows, current) if decoupled else micro.behaviour(rows)
        segment = micro.segment(rows)
        losses, clipped = self.surrogate.losses(current, old, advantage, segment)
        if clipped is not None:
            micro.count(f"clipped/{prepared.name}", clipped[trained])
        log_ratio = micro.log_ratio(rows, current)
        if self.correction is not None:
            weight, bites = self.correction.apply(log_ratio, segment, included=not decoupled)
            micro.count(f"corrected/{prepared.name}", bites[trained])
            losses = losses * weight
        if self.advantage.of_teacher:  # k1: one-sample estimate of reverse KL
            sampled = concatenated(micro.pack.rollouts, "logprob")[rows]
            micro.estimate(rows, sampled - micro.teacher_logprobs(self.role, rows))
        return (losses * micro.tensor(weight_N[rows])).sum()
