"""Advantages: the worth of a sampled token or a whole answer. They are summed, in numpy, because none needs gradients.

    A = outcome_weight * A_outcome + teacher_weight * A_teacher - reference_weight * (log student - log reference)

Axis legend: T = tokens of one response.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import numpy as np
from pydantic import (
    BaseModel,
    Field,
    GetJsonSchemaHandler,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema

from opd import registry
from opd.common.short_forms import SHORT_FORMS
from opd.objective.batch import Batch, ByRollout, beside, require_per_token
from opd.records import Rollout
from opd.registry import (
    SETTINGS,
    Choice,
    Count,
    Family,
    Fraction,
    Needs,
    Positive,
    StageView,
    changed,
    key_hint,
    schema_of,
)

if TYPE_CHECKING:
    from opd.objective.objective import PreparedTerm
    from opd.objective.policy_gradient import PolicyGradient


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """Rollouts that need advantages, with the student's untempered log-probs of their tokens."""

    term: PolicyGradient
    prepared: PreparedTerm
    rollouts: Sequence[Rollout]
    student: Sequence[np.ndarray]  # (T,) per rollout
    exact_kl: Sequence[np.ndarray] | None = (
        None  # (T,) KL(student || teacher) at each position, if an advantage needs it
    )

    @property
    def batch(self) -> Batch:
        return self.prepared.batch

    @property
    def counted(self) -> list[np.ndarray]:
        """(T,) bool per rollout: tokens with a nonzero gate factor."""
        return [self.prepared.factor[rollout.id] != 0 for rollout in self.rollouts]


@dataclass(frozen=True)
class AdvantageEstimate:
    """Advantages and returns of every response token, by rollout id; 0 at tokens that the student did not write."""

    advantages: ByRollout
    returns: ByRollout  # targets of the values


class AdvantagePart(Choice):
    """One summand of the advantage, its weight included."""

    family = "advantage"

    def needs(self, role: str = "teacher") -> Needs:
        return Needs()

    @property
    def acts(self) -> bool:
        """Whether the part adds anything."""
        return True

    @property
    def of_teacher(self) -> bool:
        """Whether it uses the teacher's log-probs and the term's divergence."""
        return False

    @property
    def of_student(self) -> bool:
        """Whether it uses the student's log-probs."""
        return False

    @property
    def needs_batch(self) -> bool:
        """Whether `prepare` needs the log-probs of the whole batch before it is split into micro-batches."""
        return False

    @property
    def needs_exact_kl(self) -> bool:
        """Whether it reads `SampledTokens.exact_kl`."""
        return False

    @property
    def for_reverse_kl(self) -> bool:
        """Whether it is defined only for the divergence reverse_kl."""
        return False

    def leaves_out(self, batch: Batch) -> set[str]:
        """Ids of rollouts that the term must not train on."""
        return set()

    @property
    def values_of(self) -> str | None:
        """Name of the value module that it compares returns with, if any. Such a part implements `estimate`."""
        return None

    def estimate(self, batch: Batch) -> AdvantageEstimate:
        """Advantages and returns of a whole batch."""
        raise NotImplementedError

    def prepare(self, tokens: SampledTokens) -> Any:
        """Compute what needs the whole batch before it is split. The result is passed to `values`."""
        return None

    @abstractmethod
    def values(self, tokens: SampledTokens, prepared: Any) -> list[np.ndarray]:
        """(T,) per rollout."""
        raise NotImplementedError


AnyAdvantage = Annotated[AdvantagePart, Family("advantage")]


class OutcomeAdvantage(AdvantagePart):
    """The reward of the whole answer, minus a baseline."""

    name = "outcome"
    outcome_weight: float = Field(0.0, ge=0)
    baseline: Baseline = Field("group", description="what is subtracted from a reward")
    std: bool = Field(False, description="divide by the standard deviation within the group (GRPO as published)")
    overlong: Literal["keep", "mask", "penalise"] = Field(
        "keep", description="what becomes of answers cut off by the length limit"
    )
    overlong_buffer: Positive = Field(
        16, description="penalise: the reward falls by up to 1 over the last tokens before the limit"
    )

    @model_validator(mode="after")
    def _consistent(self) -> OutcomeAdvantage:
        given = changed(self)
        if self.outcome_weight == 0 and given & {"std", "overlong", "baseline"}:
            raise ValueError("outcome_weight is 0, so baseline, std and overlong do nothing")
        if "overlong_buffer" in given and self.overlong != "penalise":
            raise ValueError("overlong_buffer belongs to overlong: penalise")
        if self.baseline == "none" and self.std:
            raise ValueError(
                "`std` divides rewards that a baseline has centred: set `baseline` to group, leave_one_out or batch"
            )
        return self

    @property
    def acts(self) -> bool:
        return self.outcome_weight != 0

    def needs(self, role: str = "teacher") -> Needs:
        return Needs(rewards=True)

    def refuse(self, view: StageView) -> Iterable[str]:
        limit = view.rollout.max_new_tokens
        if self.overlong == "penalise" and self.overlong_buffer >= limit:
            yield (
                f"overlong_buffer {self.overlong_buffer} with rollout.max_new_tokens {limit} penalises every answer. "
                "Set it to a part of the limit."
            )
        if view.rollout.samples == 1 and self.baseline in ("group", "leave_one_out"):
            yield (
                f"outcome_weight {self.outcome_weight:g} with baseline: {self.baseline} and rollout.samples 1: a "
                "sample alone in its group has advantage 0. Set rollout.samples to 2 or more, or baseline: batch."
            )

    def leaves_out(self, batch: Batch) -> set[str]:
        return {rollout.id for rollout in batch.rollouts if rollout.stop == "length" and self.overlong == "mask"}

    def prepare(self, tokens: SampledTokens) -> dict[str, float]:
        """Rollout id -> outcome advantage; 0 if there is no reward."""
        rollouts, batch, left_out = tokens.rollouts, tokens.batch, self.leaves_out(tokens.batch)
        rewards: list[float | None] = []
        for rollout in rollouts:  # answers by other authors are left out of the baseline
            counts = tokens.prepared.eligible[rollout.id].any() and rollout.id not in left_out
            reward = batch.rewards.get(rollout.id) if counts else None
            if reward is not None and self.overlong == "penalise":
                reward += overlong_penalty(
                    rollout.response_ids.size, tokens.prepared.max_new_tokens, self.overlong_buffer
                )
            rewards.append(reward)
        values = outcome_advantages(rewards, [rollout.group for rollout in rollouts], self.baseline, self.std)
        return {rollout.id: float(np.nan_to_num(value)) for rollout, value in zip(rollouts, values, strict=True)}

    def values(self, tokens: SampledTokens, prepared: dict[str, float]) -> list[np.ndarray]:
        return [
            np.full(rollout.response_ids.size, self.outcome_weight * prepared.get(rollout.id, 0.0))
            for rollout in tokens.rollouts
        ]


class TeacherAdvantage(AdvantagePart):
    """The teacher's log-ratio at the sampled token, or the advantage of another divergence."""

    name = "teacher"
    teacher_weight: float = Field(1.0, ge=0)
    clip: float | None = Field(None, gt=0, description="largest |A_teacher| of a token")
    extrapolation: float = Field(
        1.0, ge=0, description="G-OPD's lambda: above 1 goes past the teacher, away from the role `reference`"
    )
    kl_baseline: bool = Field(
        False, description="add the exact KL of the position: same expectation, less variance (vOPD)"
    )
    discount: Fraction = Field(0.0, description="of A_teacher of later tokens; 0: each token its own only")
    length_normalised: bool = Field(False, description="divide returns by the number of tokens they sum over")
    future_only: bool = Field(False, description="returns start behind the token: its own part is trained directly")
    whiten: bool = Field(False, description="mean 0 and variance 1 of A_teacher over the batch's tokens")

    @model_validator(mode="after")
    def _consistent(self) -> TeacherAdvantage:
        returns = self.discount > 0
        if not returns and (self.length_normalised or self.future_only):
            raise ValueError("length_normalised and future_only belong to returns: set discount above 0")
        if self.kl_baseline and (returns or self.whiten or self.clip is not None or self.extrapolation != 1):
            raise ValueError(
                "kl_baseline belongs to the plain log-ratio: drop discount, whiten, clip and extrapolation"
            )
        if self.teacher_weight == 0 and changed(self) - {"teacher_weight"}:
            raise ValueError("teacher_weight is 0, so the other settings of the teacher's part do nothing")
        return self

    @property
    def acts(self) -> bool:
        return self.teacher_weight != 0

    @property
    def of_teacher(self) -> bool:
        return True

    @property
    def of_student(self) -> bool:
        return True

    @property
    def needs_batch(self) -> bool:
        return self.whiten

    @property
    def needs_exact_kl(self) -> bool:
        return self.kl_baseline

    @property
    def for_reverse_kl(self) -> bool:
        return self.extrapolation != 1 or self.kl_baseline

    def needs(self, role: str = "teacher") -> Needs:
        needs = Needs(signals=((role, "logprobs_at"),))
        if self.extrapolation != 1:
            needs |= Needs(signals=(("reference", "logprobs_at"),))
        return needs | Needs(signals=((role, "hidden"),)) if self.kl_baseline else needs

    def prepare(self, tokens: SampledTokens) -> tuple[float, float] | None:
        """Mean and standard deviation over the batch, for whitening."""
        return moments(self._shaped(tokens), tokens.counted) if self.whiten else None

    def values(self, tokens: SampledTokens, prepared: tuple[float, float] | None) -> list[np.ndarray]:
        parts = self._shaped(tokens)
        if self.whiten:
            parts = whitened_by(parts, prepared)
        weighed = [self.teacher_weight * part for part in parts]
        if self.kl_baseline:
            assert tokens.exact_kl is not None
            weighed = [part + self.teacher_weight * kl for part, kl in zip(weighed, tokens.exact_kl, strict=True)]
        return weighed

    def _shaped(self, tokens: SampledTokens) -> list[np.ndarray]:
        """Each rollout's log-ratios, extrapolated, clipped and summed into returns, according to the settings."""
        rollouts, batch = tokens.rollouts, tokens.batch
        teachers, signals = batch.logprobs(tokens.term.role, rollouts), batch.signals[tokens.term.role, "logprobs_at"]
        students = [
            beside(student, signals[rollout.id]) for student, rollout in zip(tokens.student, rollouts, strict=True)
        ]
        none = [np.zeros(0)] * len(rollouts)
        references = batch.logprobs("reference", rollouts) if self.extrapolation != 1 else none
        return [
            self._of_rollout(tokens, teacher, student, reference, counted)
            for teacher, student, reference, counted in zip(teachers, students, references, tokens.counted, strict=True)
        ]

    def _of_rollout(
        self,
        tokens: SampledTokens,
        teacher: np.ndarray,
        student: np.ndarray,
        reference: np.ndarray,
        counted: np.ndarray,
    ) -> np.ndarray:
        if self.extrapolation != 1:
            value = extrapolated(teacher, student, reference, self.extrapolation)
        else:
            import torch

            both = (torch.from_numpy(side.astype(np.float64)) for side in (student, teacher))
            value = tokens.term.divergence.advantage(*both).numpy()
        if self.clip is not None:
            value = value.clip(-self.clip, self.clip)
        if self.discount:  # over the counted tokens, in order
            value = value.copy()
            value[counted] = returns(
                value[counted], self.discount, length_normalised=self.length_normalised, future_only=self.future_only
            )
        return value


class ReferenceAdvantage(AdvantagePart):
    """Adds a KL penalty towards the role `reference` to the advantage."""

    name = "reference"
    reference_weight: float = Field(
        0.0, ge=0, description="KL penalty towards the role `reference`, as part of the advantage"
    )

    @property
    def acts(self) -> bool:
        return self.reference_weight != 0

    @property
    def of_student(self) -> bool:
        return True

    def needs(self, role: str = "teacher") -> Needs:
        return Needs(signals=(("reference", "logprobs_at"),))

    def values(self, tokens: SampledTokens, prepared: Any) -> list[np.ndarray]:
        references = tokens.batch.logprobs("reference", tokens.rollouts)
        return [
            -(self.reference_weight * (student - reference))
            for student, reference in zip(tokens.student, references, strict=True)
        ]


# --- The advantage of a policy-gradient term: a sum of parts ---


ALSO = SHORT_FORMS["objective.advantage.also"]
FLAT = ("outcome", "teacher", "reference")  # parts with settings directly under `advantage`; added in this order


class Advantage(BaseModel):
    """The sum of its parts. A recipe lists the settings of all parts under `advantage`."""

    model_config = SETTINGS
    student: Literal["behaviour", "proximal", "current"] = Field(
        "behaviour", description="whose log-prob the teacher's is compared with"
    )
    parts: Annotated[tuple[AnyAdvantage, ...], ALSO] = Field(default_factory=lambda: (TeacherAdvantage(),))

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or "parts" in value:
            return value
        rest, parts = dict(value), []
        for name in FLAT:
            part = registry.find("advantage", name)
            given = {key: rest.pop(key) for key in part.model_fields if key in rest}
            parts.append(part.model_validate(given))
        more = rest.pop("also", None) or []
        known = ("student", "also", *(key for name in FLAT for key in registry.find("advantage", name).model_fields))
        parts += [Family("advantage").read(entry) for entry in ALSO.long(more)]
        added = [part for part in cast("list[AdvantagePart]", parts) if part.acts]
        unknown = next((key for key in rest if key != "student"), None)
        if unknown is not None:
            raise ValueError(f"unknown key {unknown!r}; {key_hint([str(unknown)], known)}")
        return {**rest, "parts": added}

    @model_validator(mode="after")
    def _consistent(self) -> Advantage:
        if not self.parts:
            raise ValueError("every weight is 0, so there is no advantage")
        if self.student == "current" and any(part.needs_batch for part in self.parts):
            raise ValueError("whiten needs the whole batch first: compare with behaviour or proximal, not with current")
        if "student" in changed(self) and not any(part.of_student for part in self.parts):
            raise ValueError("teacher_weight and reference_weight are 0, so `student` does nothing")
        return self

    @model_serializer(mode="wrap")
    def _flat(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """The flat form used in recipes."""
        values: dict[str, Any] = {"student": self.student}
        left = list(self.parts)
        for name in FLAT:
            kind = registry.find("advantage", name)
            part = next((part for part in left if part.name == name), None)
            if part is not None:
                left.remove(part)
            weight = f"{name}_weight"
            values |= part.model_dump() if part is not None else kind.model_validate({weight: 0.0}).model_dump()
        values.pop("kind")
        if left:
            values["also"] = [part.model_dump() for part in left]
        if info.exclude_defaults:
            usual = Advantage().model_dump()
            return {key: value for key, value in values.items() if value != usual.get(key)}
        return values

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        reference = handler(schema)
        node = handler.resolve_ref_schema(reference)
        parts = node["properties"].pop("parts")
        for name in FLAT:
            part = handler.resolve_ref_schema(schema_of(registry.find("advantage", name), handler))
            node["properties"] |= {key: value for key, value in part["properties"].items() if key != "kind"}
        node["properties"]["also"] = parts | {"description": "further advantages, added to these"}
        return reference

    def needs(self, role: str) -> Needs:
        needs = Needs()
        for part in self.parts:
            needs |= part.needs(role)
        return needs

    @property
    def of_teacher(self) -> bool:
        return any(part.of_teacher for part in self.parts)

    def prepare(self, tokens: SampledTokens) -> list[Any]:
        return [part.prepare(tokens) for part in self.parts]

    def values(self, tokens: SampledTokens, prepared: Sequence[Any]) -> list[np.ndarray]:
        """(T,) per rollout. Token advantages are computed only here."""
        total = [np.zeros(rollout.response_ids.size) for rollout in tokens.rollouts]
        for part, state in zip(self.parts, prepared, strict=True):
            values = part.values(tokens, state)
            require_per_token(f"advantage {part.name}", values, tokens.rollouts)
            total = [before + value for before, value in zip(total, values, strict=True)]
        return total


# --- RLSD: the verifier sets the sign of the advantage, the teacher only its size per token ---


class MagnitudeAdvantage(OutcomeAdvantage):
    """A of the whole answer times (1 - share) + share * clip(exp(sign(A) * (log teacher - log student)), 1 - band, 1 + band)."""

    name = "magnitude"
    outcome_weight: float = Field(1.0, ge=0)
    share: Fraction = Field(0.5, description="of magnitude: RLSD's lambda; 0 is the outcome advantage alone")
    band: float = Field(
        0.2, gt=0, lt=1, description="of magnitude: a token's weight stays within 1 - band and 1 + band"
    )
    warmup: Count = Field(0, description="of magnitude: steps over which share rises from 0")
    decay: Count = Field(0, description="of magnitude: steps over which it falls to 0 afterwards; 0: it stays")

    @model_validator(mode="after")
    def _weighs(self) -> MagnitudeAdvantage:
        if self.outcome_weight == 0:
            raise ValueError("outcome_weight is 0, so there is no advantage to weigh")
        if self.share == 0:
            raise ValueError("share is 0, so the teacher does nothing: use outcome_weight without magnitude")
        return self

    @property
    def of_student(self) -> bool:
        return True

    def needs(self, role: str = "teacher") -> Needs:
        return super().needs(role) | Needs(signals=((role, "logprobs_at"),))

    def share_at(self, step: int) -> float:
        """Share at a step, counted from 1. The last warm-up step has the full share, the last decay step has 0."""
        if step <= self.warmup:
            return self.share * step / self.warmup
        if not self.decay:
            return self.share
        return self.share * max(0.0, 1 - (step - self.warmup) / self.decay)

    def values(self, tokens: SampledTokens, prepared: Any) -> list[np.ndarray]:
        share = self.share_at(tokens.prepared.step)
        teachers = tokens.batch.logprobs(tokens.term.role, tokens.rollouts)
        signals = tokens.batch.signals[tokens.term.role, "logprobs_at"]
        students = [
            beside(student, signals[rollout.id])
            for student, rollout in zip(tokens.student, tokens.rollouts, strict=True)
        ]
        return [
            weighed_by_teacher(outcome, teacher - student, share, self.band)
            for outcome, teacher, student in zip(super().values(tokens, prepared), teachers, students, strict=True)
        ]


# --- The arithmetic of advantages ---
#
# Axis legend: T = tokens of one response, B = rollouts of the batch.


Baseline = Literal["group", "leave_one_out", "batch", "none"]
STD_FLOOR = 1e-4  # added to a group's standard deviation, as in GRPO implementations


def outcome_advantages(
    rewards: Sequence[float | None], groups: Sequence[str], baseline: Baseline = "group", std: bool = False
) -> np.ndarray:
    """(B,) reward minus baseline; NaN for a missing reward, which is left out of the baseline.

    group           minus the mean of the group: GRPO, with `std` divided by its standard deviation
    leave_one_out   minus the mean of the other samples of the group: RLOO
    batch           minus the mean of the batch: the plain baseline for one sample per prompt
    none            the reward itself

    >>> outcome_advantages([1, 0, 0, 0], ["a"] * 4).tolist()
    [0.75, -0.25, -0.25, -0.25]
    >>> outcome_advantages([1.0, 0.0, None], ["a"] * 3, "leave_one_out").tolist()
    [1.0, -1.0, nan]
    """
    reward_B = np.array([np.nan if reward is None else reward for reward in rewards], dtype=np.float64)
    known = ~np.isnan(reward_B)
    advantages = np.full(reward_B.size, np.nan)
    unit = np.zeros(reward_B.size, dtype=int) if baseline == "batch" else np.unique(groups, return_inverse=True)[1]
    for number in np.unique(unit[known]):
        members = known & (unit == number)
        values = reward_B[members]
        if baseline == "none":
            centred = values
        elif baseline == "leave_one_out":  # a sample alone in its group has no baseline
            centred = (values - values.mean()) * (values.size / (values.size - 1)) if values.size > 1 else 0 * values
        else:
            centred = values - values.mean()
        if std:
            centred = centred / ((values.std(ddof=1) if values.size > 1 else 0.0) + STD_FLOOR)
        advantages[members] = centred
    return advantages


def extrapolated(teacher_T: np.ndarray, student_T: np.ndarray, reference_T: np.ndarray, factor: float) -> np.ndarray:
    """G-OPD: factor * (log teacher - log reference) - (log student - log reference).

    A factor of 1 is plain OPD, because the reference cancels; above 1 the target is beyond the teacher (ExOPD).
    """
    return (teacher_T - student_T) + (factor - 1) * (teacher_T - reference_T)


def returns(
    values_T: np.ndarray, discount: float, *, length_normalised: bool = False, future_only: bool = False
) -> np.ndarray:
    """Discounted sums of this and all later tokens' values: R_t = sum over i >= t of discount^(i-t) * value_i.

    `future_only` starts the sums at t + 1, for when the token's own part is trained directly (MiniLLM's single-step
    decomposition). `length_normalised` divides by the number of summed tokens, so that returns do not depend on the
    answer's length (also MiniLLM).

    >>> returns(np.array([1.0, 2.0, 4.0]), 0.5).tolist()
    [3.0, 4.0, 4.0]
    >>> returns(np.array([1.0, 2.0, 4.0]), 1.0, length_normalised=True, future_only=True).tolist()
    [3.0, 4.0, 0.0]
    """
    sums = np.zeros(values_T.size, dtype=np.float64)
    running = 0.0
    for index in range(values_T.size - 1, -1, -1):
        here = values_T[index] + discount * running
        sums[index] = discount * running if future_only else here
        running = here
    if length_normalised:
        left = np.arange(values_T.size, 0, -1) - (1 if future_only else 0)
        sums /= np.maximum(left, 1)
    return sums


def moments(values: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> tuple[float, float] | None:
    """Mean and standard deviation over all counted tokens; None if there are fewer than two."""
    every = np.concatenate([value[mask] for value, mask in zip(values, masks, strict=True)])
    return (every.mean(), every.std()) if every.size >= 2 else None


def whitened_by(values: Sequence[np.ndarray], scale: tuple[float, float] | None) -> list[np.ndarray]:
    """Values scaled to mean 0 and variance 1 over the tokens that `moments` counted."""
    if scale is None:
        return [np.zeros_like(value) for value in values]
    mean, std = scale
    return [(value - mean) / (std + 1e-8) for value in values]


def weighed_by_teacher(outcome_T: np.ndarray, log_ratio_T: np.ndarray, share: float, band: float) -> np.ndarray:
    """RLSD: A * ((1 - share) + share * clip(exp(sign(A) * log_ratio), 1 - band, 1 + band)); log_ratio = log T - log S.

    The log-ratio is clipped before the exponential, so the exponential cannot overflow.

    >>> weighed_by_teacher(np.array([2.0, -2.0, 0.0]), np.full(3, 9.0), 0.5, 0.2).round(6).tolist()
    [2.2, -1.8, 0.0]
    """
    signed = np.sign(outcome_T) * log_ratio_T
    weight = np.exp(signed.clip(np.log1p(-band), np.log1p(band)))
    return outcome_T * ((1 - share) + share * weight)


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """0 until `buffer` tokens before the limit, then linear down to -1 at the limit (DAPO's soft punishment).

    >>> [overlong_penalty(length, 100, 20) for length in (50, 80, 90, 100)]
    [0.0, 0.0, -0.5, -1.0]
    """
    return min(0.0, max(-1.0, (limit - buffer - length) / buffer)) + 0.0
