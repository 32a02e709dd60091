"""Policy gradient: an advantage of the sampled token times a surrogate of its ratio. And the values that PPO learns."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PrivateAttr, model_validator

from opd.common.errors import TrainingError
from opd.divergences.kinds import AnyDivergence, ReverseKL
from opd.objective.advantages import Advantage, AdvantageEstimate, AdvantagePart, SampledTokens, moments, whitened_by
from opd.objective.batch import Batch, concatenated, own_turns, rewards_by_turn
from opd.objective.corrections import LOG_LIMIT, TIS, segment_mean
from opd.objective.term import CorrectedTerm, Term
from opd.records import Author
from opd.registry import Choice, Family, Fraction, Needs, StageView, Word, changed

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
    by_ratio: ClassVar[bool] = True  # needs the log-prob that a token was sampled with, which only the student's have
    of_teacher: ClassVar[bool] = False  # `losses` also gets the teacher's log-probs
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


class Shaped(Surrogate):
    """p / (p + gamma) of the student's probability p, without a ratio, so it can train on tokens of any author (LUFFY).

    The weight on grad log p is gamma p / (p + gamma)^2, which is largest at p = gamma.
    """

    name = "shaped"
    multiplies_by_ratio = False
    by_ratio = False
    gamma: float = Field(0.1, gt=0, le=1, description="of shaped: the probability at which a token is moved most")

    @model_validator(mode="after")
    def _has_no_ratio(self) -> Shaped:
        if "against" in changed(self):
            raise ValueError("shaped has no ratio, so `against` does nothing: drop it")
        return self

    def losses(self, current: Tensor, old: Tensor, advantage: Tensor, segment: Tensor) -> tuple[Tensor, Tensor | None]:
        return shaped(current, advantage, self.gamma), None


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


class TRRD(ClippedSurrogate):
    """PPO with the ratio (current / old)^alpha (current / teacher)^(1 - alpha), so the clip is around both (RLAD)."""

    name = "trrd"
    multiplies_by_ratio = False
    of_teacher = True
    alpha: float = Field(0.5, ge=0, lt=1, description="of trrd: 1 would be PPO, 0 clips around the teacher alone")
    bound: float = Field(1.0, gt=0, description="of trrd: log current - log teacher is cut to this in the ratio")

    def check(self, view: StageView) -> Iterable[str]:
        if view.rollout.temperature != 1:
            yield (
                f"surrogate trrd compares with the teacher as it is, but rollout.temperature is {view.rollout.temperature:g}. "
                "Sample at temperature 1, or use ppo."
            )

    def losses(
        self, current: Tensor, old: Tensor, advantage: Tensor, segment: Tensor, teacher: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        import torch

        assert teacher is not None
        gap = torch.where(teacher.isnan(), 0.0, current - teacher).clamp(-self.bound, self.bound)
        log_ratio = self.alpha * (current - old.detach()) + (1 - self.alpha) * gap
        clipped = cut_off(log_ratio.detach().exp(), advantage, self.low, self.high)
        return ppo(log_ratio, torch.zeros_like(log_ratio), advantage, self.low, self.high), clipped


def _log_ratio(current: Tensor, old: Tensor) -> Tensor:
    return (current - old).detach().clamp(-LOG_LIMIT, LOG_LIMIT)


# --- The arithmetic of surrogates: (N,) losses ---


def importance_sampling(current: Tensor, behaviour: Tensor, advantage: Tensor) -> Tensor:
    """(N,) losses `-(current / behaviour)(y) * A`: unclipped, exactly unbiased for tokens drawn from `behaviour`."""
    return -(current - behaviour.detach()).exp() * advantage.detach()


def shaped(current: Tensor, advantage: Tensor, gamma: float) -> Tensor:
    """-p / (p + gamma) A, differentiated through p."""
    return -(current - math.log(gamma)).sigmoid() * advantage.detach()


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
    crosses = frozenset({"logprobs_at"})

    divergence: AnyDivergence = Field(ReverseKL(), description="of a direct term; of policy_gradient: whose advantage")
    advantage: Advantage = Field(Advantage(), description="of policy_gradient")
    surrogate: AnySurrogate = Field(ImportanceSampling(), description="of policy_gradient")

    @property
    def by_ratio(self) -> bool:  # type: ignore[override]
        return self.surrogate.by_ratio

    @model_validator(mode="after")
    def _means_something(self) -> PolicyGradient:
        kind = self.divergence
        if self.correction is not None and not self.by_ratio:
            raise ValueError(f"{self.surrogate.name} has no ratio that could be corrected: drop `correction`")
        of_sampler = self.advantage.student == "behaviour" and any(part.of_student for part in self.advantage.parts)
        if of_sampler and self.on not in (None, ["student"]):
            raise ValueError(
                f"the advantage compares with the log-probs that tokens were sampled with, and those of {' and '.join(self.authors)} "
                "tokens are not known: set advantage.student: proximal, or teacher_weight: 0"
            )
        if "divergence" in changed(self) and not self.advantage.of_teacher:
            raise ValueError("teacher_weight is 0, so the divergence does nothing")
        if kind.adapts:
            raise ValueError(f"adapt gives every answer its own alpha of {kind.name}, which needs form: direct")
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
        by_surrogate = self.by_ratio and self.surrogate.against == "behaviour"
        return super().compares_with_sampler or by_advantage or by_surrogate

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
        anchored = Needs(signals=((self.role, "logprobs_at"),)) if self.surrogate.of_teacher else Needs()
        return self.advantage.needs(self.role) | anchored | first

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
        from opd.divergences.compute import statistics

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
        seen = {}
        if self.surrogate.of_teacher:
            seen["teacher"] = micro.tensor(micro.teacher_logprobs(self.role, rows)).to(current)
        losses, clipped = self.surrogate.losses(current, old, advantage, segment, **seen)
        if clipped is not None:
            micro.count(f"clipped/{prepared.name}", clipped[trained])
        log_ratio = micro.log_ratio(rows, current)
        if self.correction is not None:
            weight, altered = self.correction.apply(log_ratio, segment, included=not decoupled)
            micro.count(f"corrected/{prepared.name}", altered[trained])
            losses = losses * weight
        if self.advantage.of_teacher:  # k1: one-sample estimate of reverse KL
            sampled = concatenated(micro.pack.rollouts, "logprob")[rows]
            micro.estimate(rows, sampled - micro.teacher_logprobs(self.role, rows), self.role)
        return (losses * micro.tensor(weight_N[rows])).sum()


# --- Values of states, learnt by a module alongside the student: PPO's advantage, and the loss that trains the values ---
#
#     r_t   reward of token t: the answer's reward at the student's last token, minus reference_weight * (log S - log reference)
#     V_t   value of the state that predicts token t, before the first update on the batch
#     A_t   sum over i >= t of (gamma * lam)^(i-t) * (r_i + gamma * V_{i+1} - V_i): generalised advantage estimation
#     R_t   A_t + V_t: the target of the value
#
# Only the student's tokens count. Tokens by other authors are skipped: the next value and sum carry over.
#
# Axis legend: T = tokens of one response, N = response tokens of a micro-batch.


class GeneralisedAdvantage(AdvantagePart):
    """Generalised advantage estimation (GAE): the outcome reward, compared with the values of a module."""

    name = "gae"
    module: Word = Field(
        "value", description="of gae and value: name of the module that gives values, one number per position"
    )
    gamma: Fraction = Field(1.0, description="of gae: discount of later rewards")
    lam: Fraction = Field(1.0, description="of gae: 1 sums up rewards to the end, 0 trusts the next value")
    whiten: bool = Field(
        True, description="of gae: mean 0 and variance 1 over the batch's tokens; returns stay as they are"
    )
    reference_weight: float = Field(
        0.0, ge=0, description="of gae: KL penalty towards the role `reference`, token by token, as part of the reward"
    )

    @property
    def values_of(self) -> str | None:
        return self.module

    def needs(self, role: str = "teacher") -> Needs:
        needs = Needs(rewards=True, student=frozenset({("module", self.module)}), modules=(self.module,))
        if self.reference_weight:
            needs |= Needs(signals=(("reference", "logprobs_at"),), student=frozenset({("proximal",)}))
        return needs

    def estimate(self, batch: Batch) -> AdvantageEstimate:
        advantages, returns = {}, {}
        for rollout in batch.rollouts:
            values = batch.first_pass.modules[self.module][rollout.id]
            own = rollout.author == Author.STUDENT
            if values.shape != own.shape:
                raise TrainingError(
                    f"module {self.module!r} gave numbers of shape {values.shape} for {own.size} tokens, and a value is one "
                    "number per position. Use kind: head, or a module that gives (N,)."
                )
            advantages[rollout.id] = gae(self._rewards(batch, rollout), values, own, self.gamma, self.lam)
            returns[rollout.id] = np.where(own, advantages[rollout.id] + values, 0.0)
        return AdvantageEstimate(advantages, returns)

    def _rewards(self, batch: Batch, rollout: Rollout) -> np.ndarray:
        """(T,) reward of each token. A turn's reward goes to its last token, and the outcome reward to the student's last one."""
        own = np.flatnonzero(rollout.author == Author.STUDENT)
        rewards = np.zeros(rollout.response_ids.size)
        if self.reference_weight:
            student = batch.first_pass.logprob[rollout.id]
            (reference,) = batch.logprobs("reference", [rollout])
            rewards[own] = -self.reference_weight * (student - reference)[own]
        if rollout.id in batch.turn_rewards:
            by_turn = rewards_by_turn(batch, rollout)
            for (_, end), reward in zip(own_turns(rollout), [] if by_turn is None else by_turn, strict=False):
                rewards[end - 1] += reward
        elif own.size:
            rewards[own[-1]] += batch.rewards.get(rollout.id) or 0.0
        return rewards

    def prepare(self, tokens: SampledTokens) -> dict[str, np.ndarray]:
        """Computed over the whole batch, so that whitening does not depend on micro-batches."""
        found = self.estimate(tokens.batch).advantages
        if not self.whiten:
            return found
        values = [found[rollout.id] for rollout in tokens.rollouts]
        white = whitened_by(values, moments(values, tokens.counted))
        return {rollout.id: value for rollout, value in zip(tokens.rollouts, white, strict=True)}

    def values(self, tokens: SampledTokens, prepared: dict[str, np.ndarray]) -> list[np.ndarray]:
        return [prepared[rollout.id] for rollout in tokens.rollouts]


def gae(rewards_T: np.ndarray, values_T: np.ndarray, own_T: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """(T,) advantages of the student's tokens; other tokens are skipped and have 0.

    >>> gae(np.array([0.0, 9.0, 1.0]), np.array([0.5, 9.0, 0.25]), np.array([True, False, True]), 1.0, 1.0).tolist()
    [0.5, 0.0, 0.75]
    """
    advantages, ahead, after = np.zeros(rewards_T.size), 0.0, 0.0
    for index in np.flatnonzero(own_T)[::-1]:
        ahead = rewards_T[index] + gamma * after - values_T[index] + gamma * lam * ahead
        advantages[index], after = ahead, values_T[index]
    return advantages


class ValueLoss(Term):
    """Half the squared distance to the returns of the `gae` advantage of the same module, clipped around the old values."""

    name = "value"
    usual_authors = ("student",)

    module: Word = Field(
        "value", description="of gae and value: name of the module that gives values, one number per position"
    )
    clip: float | None = Field(
        0.5,
        gt=0,
        description="of value: how far a value may move from its old one before it stops learning; null: any way",
    )
    _estimator: AdvantagePart | None = PrivateAttr(None)

    def joined(self, terms: Sequence[Term]) -> Term:
        """Use the returns of the advantage that reads the same module, even if its term is inactive at a step."""
        found = self.model_copy()
        found._estimator = self._advantage(terms)
        return found

    def _advantage(self, terms: Sequence[Term]) -> AdvantagePart | None:
        parts = (part for term in terms for part in term.advantages)
        return next((part for part in parts if part.values_of == self.module), None)

    def form_needs(self, updates: int) -> Needs:
        own = Needs(rewards=True, student=frozenset({("module", self.module)}), modules=(self.module,))
        return own if self._estimator is None else own | self._estimator.needs(self.role)

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if self._advantage(view.terms) is None:
            yield (
                f"value learns the returns of an advantage, and no term has one for the module {self.module!r}. Add to a "
                f"policy_gradient term: advantage: {{also: [{{kind: gae, module: {self.module}}}]}}."
            )

    def prepare(self, prepared: PreparedTerm) -> AdvantageEstimate:
        assert self._estimator is not None
        found = self._estimator.estimate(prepared.batch)
        old = prepared.batch.first_pass.modules[self.module]
        pairs = [(found.returns[name][mask], old[name][mask]) for name, mask in prepared.counted.items()]
        returns, values = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
        if returns.size and returns.var() > 0:
            prepared.metrics[f"explained/{prepared.name}"] = float(1 - (returns - values).var() / returns.var())
        return found

    def loss(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> Tensor:
        rows, state = np.flatnonzero(weight_N), prepared.state
        rollouts, old = micro.pack.rollouts, prepared.batch.first_pass.modules[self.module]
        now = micro.module(self.module, rows)
        returns, before = (
            micro.tensor(np.concatenate([found[rollout.id] for rollout in rollouts])[rows]).to(now)
            for found in (state.returns, old)
        )
        losses, clipped = value_losses(now, before, returns, self.clip)
        if clipped is not None:
            micro.count(f"clipped/{prepared.name}", clipped)
        return (losses * micro.tensor(weight_N[rows])).sum()


def value_losses(now: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Any]:
    """(N,) losses 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), and where the clip acts (None: no clip)."""
    import torch

    plain = (now - returns) ** 2
    if clip is None:
        return 0.5 * plain, None
    near = (torch.maximum(torch.minimum(now, old + clip), old - clip) - returns) ** 2
    return 0.5 * torch.maximum(plain, near), (near > plain).detach()
