"""Advantages: the worth of a sampled token or a whole answer. They are summed, in numpy, because none needs gradients.

    A = outcome_weight * A_outcome + teacher_weight * A_teacher - reference_weight * (log student - log reference)

Axis legend: T = tokens of one response.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from opd.objective.batch import (
    Batch,
    ByRollout,
    episode_rewards,
    over_spans,
    own_turns,
    require_per_token,
    rewards_by_turn,
)
from opd.objective.gates import shuffled_order
from opd.objective.term import group_authors, group_samples
from opd.records import Author, Rollout
from opd.registry import (
    SETTINGS,
    Choice,
    Count,
    Family,
    Fraction,
    Needs,
    Positive,
    StageView,
    Word,
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
    baseline_of: Literal["own", "all"] = Field(
        "own", description="whose answers the baseline averages: those that the term trains on, or all (LUFFY)"
    )
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
        if self.outcome_weight == 0 and given & {"std", "overlong", "baseline", "baseline_of"}:
            raise ValueError("outcome_weight is 0, so baseline, baseline_of, std and overlong do nothing")
        if self.baseline == "none" and self.baseline_of == "all":
            raise ValueError("baseline_of says whose answers a baseline averages, and baseline is none: drop one")
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

    def check(self, view: StageView) -> Iterable[str]:
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
        elif view.term is not None and view.rollout.writers:
            yield from self._mistakes_of_authors(view)

    def _mistakes_of_authors(self, view: StageView) -> Iterable[str]:
        """Baselines over authors that do not write in a group."""
        own, in_group = view.term.authors, group_authors(view.rollout)
        if self.baseline_of == "all":
            if not in_group - {*own}:
                yield f"baseline_of: all, but only {' and '.join(own)} writes in a group. Drop it."
        elif (
            self.baseline in ("group", "leave_one_out") and in_group & {*own} and group_samples(view.rollout, own) == 1
        ):
            yield (
                f"baseline: {self.baseline} over the {' and '.join(own)} answers of a group, of which there is one: its advantage "
                "is 0. Set baseline_of: all, or baseline: batch."
            )

    def leaves_out(self, batch: Batch) -> set[str]:
        return {rollout.id for rollout in batch.rollouts if rollout.stop == "length" and self.overlong == "mask"}

    def worth(self, batch: Batch, rollout: Rollout) -> float | None:
        """What an answer is worth, before the baseline."""
        return batch.rewards.get(rollout.id)

    def prepare(self, tokens: SampledTokens) -> dict[str, float]:
        """Rollout id -> outcome advantage; 0 if there is no reward."""
        rollouts, batch, left_out = tokens.rollouts, tokens.batch, self.leaves_out(tokens.batch)
        rewards: list[float | None] = []
        answers = [rollout.episode for rollout in rollouts]
        sizes = Counter[str]()  # tokens of whole answers
        for rollout, answer in zip(rollouts, answers, strict=True):
            sizes[answer] += rollout.response_ids.size
        for rollout, answer in zip(
            rollouts, answers, strict=True
        ):  # others' answers are in the baseline only if it is of all
            eligible = self.baseline_of == "all" or bool(tokens.prepared.eligible[rollout.id].any())
            counts = eligible and rollout.id not in left_out
            reward = self.worth(batch, rollout) if counts else None
            if reward is not None and self.overlong == "penalise":
                reward += overlong_penalty(sizes[answer], tokens.prepared.max_new_tokens, self.overlong_buffer)
            rewards.append(reward)
        groups = [rollout.group for rollout in rollouts]
        values = outcome_advantages(rewards, groups, self.baseline, self.std, answers)
        return {rollout.id: float(np.nan_to_num(value)) for rollout, value in zip(rollouts, values, strict=True)}

    def values(self, tokens: SampledTokens, prepared: dict[str, float]) -> list[np.ndarray]:
        return [
            np.full(rollout.response_ids.size, self.outcome_weight * prepared.get(rollout.id, 0.0))
            for rollout in tokens.rollouts
        ]


@dataclass
class BatchAdvantages:
    """What the teacher's part needs of the whole batch before it is split."""

    moments: dict[str, tuple[float, float] | None] = field(default_factory=dict)  # for whitening, by group
    shuffled: ByRollout = field(default_factory=dict)


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
    future_only: bool = Field(False, description="returns start after the token: its own part is trained directly")
    add_own: bool = Field(False, description="of future_only: the token's own part is added to the return (TOP-D)")
    whiten: bool | Literal["group"] = Field(
        False, description="mean 0 and variance 1 of A_teacher over the batch's tokens; group: over each group's"
    )
    shuffle: Literal["none", "rollout", "batch"] = Field(
        "none",
        description="control: every token gets the A_teacher of another token of its rollout, or of the batch",
    )

    @model_validator(mode="after")
    def _consistent(self) -> TeacherAdvantage:
        returns = self.discount > 0
        if not returns and (self.length_normalised or self.future_only):
            raise ValueError("length_normalised and future_only belong to returns: set discount above 0")
        shaped = returns or self.whiten or self.clip is not None or self.extrapolation != 1 or self.shuffle != "none"
        if self.kl_baseline and shaped:
            raise ValueError(
                "kl_baseline belongs to the plain log-ratio: drop discount, whiten, clip, extrapolation and shuffle"
            )
        if self.add_own and not self.future_only:
            raise ValueError("add_own belongs to future_only: other returns have the token's own part already")
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
        return bool(self.whiten) or self.shuffle == "batch"

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

    def prepare(self, tokens: SampledTokens) -> BatchAdvantages:
        """What whitening and shuffling need of the whole batch."""
        if not self.needs_batch:
            return BatchAdvantages()
        parts = self._shaped(tokens)
        found = BatchAdvantages()
        if self.whiten:
            groups = np.array([self._group(rollout) for rollout in tokens.rollouts])
            for name in dict.fromkeys(groups.tolist()):
                members = np.flatnonzero(groups == name)
                chosen = [[side[number] for number in members] for side in (parts, tokens.counted)]
                found.moments[name] = moments(*chosen)
        if self.shuffle == "batch":
            ids = [rollout.id for rollout in tokens.rollouts]
            joined = [np.concatenate(values) for values in (parts, tokens.counted)]
            order = shuffled_order(f"{tokens.prepared.seed}/shuffle/{ids[0]}", joined[1].astype(bool))
            ends = np.cumsum([part.size for part in parts])[:-1]
            found.shuffled |= dict(zip(ids, np.split(joined[0][order], ends), strict=True))
        return found

    def values(self, tokens: SampledTokens, prepared: BatchAdvantages) -> list[np.ndarray]:
        parts = self._shaped(tokens)
        if self.shuffle == "batch":
            parts = [prepared.shuffled[rollout.id] for rollout in tokens.rollouts]
        elif self.shuffle == "rollout":
            keys = [f"{tokens.prepared.seed}/shuffle/{rollout.id}" for rollout in tokens.rollouts]
            parts = [
                part[shuffled_order(key, counted)]
                for part, key, counted in zip(parts, keys, tokens.counted, strict=True)
            ]
        if self.whiten:
            scales = [prepared.moments[self._group(rollout)] for rollout in tokens.rollouts]
            parts = [whitened_by([part], scale)[0] for part, scale in zip(parts, scales, strict=True)]
        weighed = [self.teacher_weight * part for part in parts]
        if self.kl_baseline:
            assert tokens.exact_kl is not None
            weighed = [part + self.teacher_weight * kl for part, kl in zip(weighed, tokens.exact_kl, strict=True)]
        return weighed

    def _group(self, rollout: Rollout) -> str:
        """What whitening is over: its group, or the batch."""
        return rollout.group if self.whiten == "group" else ""

    def _shaped(self, tokens: SampledTokens) -> list[np.ndarray]:
        """Each rollout's log-ratios, extrapolated, clipped and summed into returns, according to the settings."""
        rollouts, batch = tokens.rollouts, tokens.batch
        teachers, signals = batch.logprobs(tokens.term.role, rollouts), batch.signals[tokens.term.role, "logprobs_at"]
        students = [
            over_spans(student, signals[rollout.id]) for student, rollout in zip(tokens.student, rollouts, strict=True)
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
            own, value = value[counted], value.copy()
            value[counted] = returns(
                own, self.discount, length_normalised=self.length_normalised, future_only=self.future_only
            )
            if self.add_own:
                value[counted] += own
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
            raise ValueError(
                "whiten and shuffle: batch need the whole batch first: compare with behaviour or proximal, not with current"
            )
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
            over_spans(student, signals[rollout.id])
            for student, rollout in zip(tokens.student, tokens.rollouts, strict=True)
        ]
        return [
            weighed_by_teacher(outcome, teacher - student, share, self.band)
            for outcome, teacher, student in zip(super().values(tokens, prepared), teachers, students, strict=True)
        ]


# --- A fixed advantage: the control without a teacher, and OPSA ---


class FixedAdvantage(AdvantagePart):
    """The same advantage for every sampled token, or one that grows with the position's entropy (OPSA)."""

    name = "fixed"
    value: float = Field(-0.5, description="of fixed: every token's advantage; negative pushes down what was sampled")
    entropy_weight: float = Field(
        0.0, description="of fixed: added times the student's entropy, scaled to [0, 1] over the batch's trained tokens"
    )

    @model_validator(mode="after")
    def _does_something(self) -> FixedAdvantage:
        if self.value == 0 and self.entropy_weight == 0:
            raise ValueError("value and entropy_weight are 0, so there is no advantage: set value to -0.5, say")
        return self

    def needs(self, role: str = "teacher") -> Needs:
        return Needs(student=frozenset({("entropy",)})) if self.entropy_weight else Needs()

    def prepare(self, tokens: SampledTokens) -> tuple[float, float]:
        """The smallest entropy of the batch's trained tokens, and the range."""
        if not self.entropy_weight:
            return 0.0, 1.0
        known = [values[mask] for values, mask in zip(self._entropies(tokens), tokens.counted, strict=True)]
        every = np.concatenate(known)
        return (every.min(), max(every.max() - every.min(), 1e-12)) if every.size else (0.0, 1.0)

    def values(self, tokens: SampledTokens, prepared: tuple[float, float]) -> list[np.ndarray]:
        if not self.entropy_weight:
            return [np.full(rollout.response_ids.size, self.value) for rollout in tokens.rollouts]
        low, width = prepared
        return [self.value + self.entropy_weight * (values - low) / width for values in self._entropies(tokens)]

    def _entropies(self, tokens: SampledTokens) -> list[np.ndarray]:
        return [tokens.batch.first_pass.entropy[rollout.id] for rollout in tokens.rollouts]


# --- BOND: towards the best of n answers of an anchor ---
#
# The best of n answers of an anchor is y with log-probability log anchor(y) + (n - 1) log p(y) + constant, nearly, p(y) being the
# chance that an answer of the anchor is no better than y. KL(student || that) is minimised by the reward (n - 1) log p(y) minus
# log student(y) - log anchor(y), which is the teacher's part with discount 1 if the teacher is the anchor.


class AnchorRank(OutcomeAdvantage):
    """(n - 1) log of the share of the teacher's answers in the group that are no better, minus a baseline."""

    name = "anchor_rank"
    outcome_weight: float = Field(1.0, ge=0)
    baseline: Baseline = Field("batch", description="what is subtracted from a reward")
    n: Annotated[int, Field(ge=2, le=10_000)] = Field(2, description="of anchor_rank: towards the best of so many")
    rule: Literal["share", "worst"] = Field(
        "share", description="of anchor_rank: worst: 0, unless all of the teacher's answers are better (J-BOND)"
    )
    floor: float = Field(0.0625, gt=0, lt=1, description="of anchor_rank: stands for a share of 0; J-BOND 1/16")

    @model_validator(mode="after")
    def _weighs(self) -> AnchorRank:
        if self.outcome_weight == 0:
            raise ValueError("outcome_weight is 0, so the rank does nothing: remove it")
        if self.baseline_of == "all":
            raise ValueError(
                "baseline_of: all would average ranks of the teacher's answers against themselves. Drop it"
            )
        return self

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if view.rollout.mixed_authors:
            yield (
                "anchor_rank compares the student's answers with the teacher's, and with rollout.teacher_prefix, takeover or "
                "demonstrations.cut one answer has tokens of both. Drop one of them."
            )
        drawn = view.rollout  # a teacher with a share of the prompts answers alone
        alone = drawn.rescue is None and drawn.demonstrations is None
        in_groups = any(writer.samples and writer.author == "teacher" for writer in drawn.writers)
        if "teacher" not in group_authors(drawn) or (alone and not in_groups):
            yield (
                "anchor_rank compares with the teacher's answers to the same prompt, and none of a group is the teacher's. Add "
                "{kind: teacher, samples: 2} to rollout.writers."
            )

    def prepare(self, tokens: SampledTokens) -> dict[str, float]:
        """Like an outcome advantage, with ranks in place of rewards."""
        batch = tokens.batch
        anchors: dict[str, list[float]] = {}
        for rollout in {rollout.episode: rollout for rollout in batch.rollouts}.values():
            reward = batch.rewards.get(rollout.id)
            if reward is not None and (rollout.author == Author.TEACHER).any():
                anchors.setdefault(rollout.group, []).append(reward)
        ranks = {
            rollout.id: None if reward is None else self.rank(reward, anchors.get(rollout.group, []))
            for rollout in batch.rollouts
            for reward in (batch.rewards.get(rollout.id),)
        }
        return super().prepare(replace(tokens, prepared=replace(tokens.prepared, batch=replace(batch, rewards=ranks))))

    def rank(self, reward: float, anchors: Sequence[float]) -> float | None:
        """What an answer is worth next to the anchor's; None if the anchor has none.

        >>> [round(AnchorRank(n=3).rank(reward, [1.0, 0.5]), 3) for reward in (1.0, 0.5, 0.0)]
        [0.0, -1.386, -5.545]
        """
        if not anchors:
            return None
        share = sum(other <= reward for other in anchors) / len(anchors)
        if self.rule == "worst" and share:
            return 0.0
        return (self.n - 1) * math.log(max(share, self.floor))


# --- KETCHUP: the teacher's logits are the values of actions ---


class TeacherQ(AdvantagePart):
    """Returns of rewards q(s, y) - max q(s', .), with the teacher's logits as q, over blocks of `steps` tokens (KETCHUP)."""

    name = "ketchup"
    steps: Positive = Field(4, description="of ketchup: K, tokens per block; the pairs inside a block are left out")
    whiten: bool = Field(True, description="mean 0 and variance 1 over the batch's tokens, as a baseline")

    def needs(self, role: str = "teacher") -> Needs:
        return Needs(signals=((role, "hidden"),), student=frozenset({("logits", role)}))

    @property
    def needs_batch(self) -> bool:
        return self.whiten

    def prepare(self, tokens: SampledTokens) -> tuple[float, float] | None:
        return moments(self._returns(tokens), tokens.counted) if self.whiten else None

    def values(self, tokens: SampledTokens, prepared: tuple[float, float] | None) -> list[np.ndarray]:
        values = self._returns(tokens)
        return whitened_by(values, prepared) if self.whiten else values

    def _returns(self, tokens: SampledTokens) -> list[np.ndarray]:
        known, found = tokens.batch.first_pass.teacher_logits[tokens.term.role], []
        for rollout, counted in zip(tokens.rollouts, tokens.counted, strict=True):
            values = np.zeros(rollout.response_ids.size)
            logits = known[rollout.id][counted]
            values[counted] = q_returns(logits[:, 0], logits[:, 1], self.steps, ended=rollout.stop != "length")
            found.append(values)
        return found


# --- The score of a module, such as a discriminator, in place of a reward ---


class ScoreAdvantage(OutcomeAdvantage):
    """The score that a module gave the whole answer before this batch's updates, minus a baseline."""

    name = "score"
    outcome_weight: float = Field(1.0, ge=0)
    module: Word = Field("judge", description="of score: name of the module that scores answers")

    @model_validator(mode="after")
    def _weighs(self) -> ScoreAdvantage:
        if self.outcome_weight == 0:
            raise ValueError("outcome_weight is 0, so the score does nothing: remove it")
        return self

    def needs(self, role: str = "teacher") -> Needs:
        return Needs(scores=(self.module,))

    def worth(self, batch: Batch, rollout: Rollout) -> float | None:
        return batch.first_pass.scores[self.module][rollout.id]


# --- Credit by turn, for rollouts in environments ---


class TurnAdvantage(AdvantagePart):
    """The rewards from a turn on, discounted by turn, minus what the group's other rollouts got from that turn on."""

    name = "turns"
    turn_weight: float = Field(1.0, gt=0, description="of turns: factor of the advantage")
    turn_discount: Fraction = Field(1.0, description="of turns: of the rewards of later turns; 0: each turn by itself")
    turn_baseline: Literal["turn", "group", "none"] = Field(
        "turn", description="of turns: mean over the group's rollouts at the same turn, over all their turns, or none"
    )

    def needs(self, role: str = "teacher") -> Needs:
        return Needs(rewards=True)

    def check(self, view: StageView) -> Iterable[str]:
        if not view.environments:
            yield "advantage turns divides rewards among turns, but every rollout of this recipe has one turn. Use outcome_weight."
        if view.rollout.samples == 1 and self.turn_baseline != "none":
            yield (
                f"advantage turns with turn_baseline {self.turn_baseline} and rollout.samples 1: a sample alone in its group has "
                "advantage 0. Set rollout.samples to 2 or more, or turn_baseline: none."
            )

    def prepare(self, tokens: SampledTokens) -> dict[str, np.ndarray]:
        """Rollout id -> (turns,) advantage of each turn; 0 without a reward."""
        episodes: dict[str, list[Rollout]] = {}  # with history split, an episode is several rollouts
        for rollout in tokens.rollouts:
            episodes.setdefault(rollout.episode, []).append(rollout)
        counts = {name: [len(own_turns(part)) for part in parts] for name, parts in episodes.items()}
        rewards = [
            episode_rewards(tokens.batch, tokens.batch.rewards.get(parts[0].id), name, sum(counts[name]))
            for name, parts in episodes.items()
        ]
        groups = [parts[0].group for parts in episodes.values()]
        found = turn_advantages(rewards, groups, self.turn_discount, self.turn_baseline)
        by_rollout: dict[str, np.ndarray] = {}
        for (name, parts), values in zip(episodes.items(), found, strict=True):
            ends = np.cumsum(counts[name])[:-1]
            by_rollout |= {
                part.id: turns for part, turns in zip(parts, np.split(values, ends), strict=True) if values.size
            }
        return by_rollout

    def values(self, tokens: SampledTokens, prepared: dict[str, np.ndarray]) -> list[np.ndarray]:
        found = []
        for rollout in tokens.rollouts:
            values = np.zeros(rollout.response_ids.size)
            if rollout.id in prepared:
                for (first, end), advantage in zip(own_turns(rollout), prepared[rollout.id], strict=True):
                    values[first:end] = self.turn_weight * advantage
            found.append(values)
        return found


class ProbingAdvantage(AdvantagePart):
    """A bonus for right whole dialogues, if those of the group end right more often than its cut ones (Probing-to-Refine)."""

    name = "probing"
    bonus: float = Field(0.5, gt=0, description="of probing: added at every token of a whole dialogue that ends right")
    margin: float = Field(
        1.0,
        gt=0,
        description="of probing: the mean outcome of whole dialogues must be above this many times that of cut ones",
    )

    def needs(self, role: str = "teacher") -> Needs:
        return Needs(rewards=True)

    def check(self, view: StageView) -> Iterable[str]:
        if None not in view.environments and not any(one.cuts for one in view.environments):  # None: not known
            yield "advantage probing compares whole dialogues with cut ones. Set rollout.environment: {kind: dialogue, cut: 0.5}."
        if any(one is not None and one.cuts and one.history == "split" for one in view.environments):
            yield "advantage probing tells cut dialogues by their number of turns, and with history split each turn is apart. Set history to keep."
        if view.rollout.samples == 1:
            yield "advantage probing compares the samples of a prompt, and rollout.samples is 1. Set it to 2 or more."

    def prepare(self, tokens: SampledTokens) -> dict[str, float]:
        """The bonus of every rollout, by id."""
        groups: dict[str, list[Rollout]] = {}
        for rollout in tokens.rollouts:
            groups.setdefault(rollout.group, []).append(rollout)
        found: dict[str, float] = {}
        for members in groups.values():
            turns = [rewards_by_turn(tokens.batch, rollout) for rollout in members]
            known = [(rollout, values) for rollout, values in zip(members, turns, strict=True) if values is not None]
            right = np.array([values[-1] > 1e-9 for _, values in known], dtype=np.float64)  # rewards are sums, rounded
            counts = np.array([values.size for _, values in known])
            bonuses = probing_bonuses(right, counts, self.bonus, self.margin)
            found |= {rollout.id: float(bonus) for (rollout, _), bonus in zip(known, bonuses, strict=True)}
        return found

    def values(self, tokens: SampledTokens, prepared: dict[str, float]) -> list[np.ndarray]:
        return [np.full(rollout.response_ids.size, prepared.get(rollout.id, 0.0)) for rollout in tokens.rollouts]


def probing_bonuses(right: np.ndarray, turns: np.ndarray, bonus: float, margin: float) -> np.ndarray:
    """The bonus of each dialogue of a group. Whole ones have the most turns; without any cut one there is nothing to compare.

    >>> probing_bonuses(np.array([1.0, 0.0, 0.0]), np.array([3, 3, 2]), 0.5, 1.0).tolist()
    [0.5, 0.0, 0.0]
    """
    whole = turns == turns.max(initial=0)
    if whole.all() or right[whole].mean() <= margin * right[~whole].mean():
        return np.zeros(right.size)
    return bonus * right * whole


def turn_advantages(
    rewards: Sequence[np.ndarray | None], groups: Sequence[str], discount: float, baseline: str = "turn"
) -> list[np.ndarray]:
    """(turns,) per rollout: the discounted rewards from each turn on, minus the baseline.

    >>> [values.tolist() for values in turn_advantages([np.array([0.0, 1.0]), np.array([0.0])], ["a", "a"], 0.5)]
    [[0.25, 0.0], [-0.25]]
    """
    sums = [None if values is None else returns(values, discount) for values in rewards]
    found = []
    for own, group in zip(sums, groups, strict=True):
        others = [other for other, name in zip(sums, groups, strict=True) if name == group and other is not None]
        if own is None:
            found.append(np.zeros(0))
        elif baseline == "turn":
            means = [np.mean([other[turn] for other in others if other.size > turn]) for turn in range(own.size)]
            found.append(own - means)
        else:
            found.append(own - (np.mean(np.concatenate(others)) if baseline == "group" else 0.0))
    return found


# --- The arithmetic of advantages ---
#
# Axis legend: T = tokens of one response, B = rollouts of the batch.


Baseline = Literal["group", "leave_one_out", "batch", "none"]
STD_FLOOR = 1e-4  # added to a group's standard deviation, as in GRPO implementations


def outcome_advantages(
    rewards: Sequence[float | None],
    groups: Sequence[str],
    baseline: Baseline = "group",
    std: bool = False,
    answers: Sequence[str] | None = None,
) -> np.ndarray:
    """(B,) reward minus baseline; NaN for a missing reward, which is left out of the baseline.

    group           minus the mean of the group: GRPO, with `std` divided by its standard deviation
    leave_one_out   minus the mean of the other samples of the group: RLOO
    batch           minus the mean of the batch: the plain baseline for one sample per prompt
    none            the reward itself

    `answers`: the answer that each reward is of, if some are of turns of the same answer. Means are over answers, however many turns
    each has.

    >>> outcome_advantages([1, 0, 0, 0], ["a"] * 4).tolist()
    [0.75, -0.25, -0.25, -0.25]
    >>> outcome_advantages([1.0, 0.0, None], ["a"] * 3, "leave_one_out").tolist()
    [1.0, -1.0, nan]
    >>> outcome_advantages([1.0, 1.0, 1.0, 0.0], ["a"] * 4, answers=["x", "x", "x", "y"]).tolist()
    [0.5, 0.5, 0.5, -0.5]
    """
    reward_B = np.array([np.nan if reward is None else reward for reward in rewards], dtype=np.float64)
    known = ~np.isnan(reward_B)
    advantages = np.full(reward_B.size, np.nan)
    unit = np.zeros(reward_B.size, dtype=int) if baseline == "batch" else np.unique(groups, return_inverse=True)[1]
    for number in np.unique(unit[known]):
        members = known & (unit == number)
        values = reward_B[members]
        whole, of_turn = values, np.arange(values.size)
        if answers is not None:
            of_turn = np.unique(np.asarray(answers)[members], return_inverse=True)[1]
            if of_turn.max() + 1 < values.size:
                whole = np.bincount(of_turn, weights=values) / np.bincount(of_turn)
        if baseline == "none":
            centred = values
        elif baseline == "leave_one_out":  # a sample alone in its group has no baseline
            own = (whole - whole.mean()) * (whole.size / (whole.size - 1)) if whole.size > 1 else 0 * whole
            centred = own if whole is values else own[of_turn] + values - whole[of_turn]
        else:
            centred = values - whole.mean()
        if std:
            centred = centred / ((whole.std(ddof=1) if whole.size > 1 else 0.0) + STD_FLOOR)
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


def q_returns(chosen_T: np.ndarray, best_T: np.ndarray, steps: int, ended: bool) -> np.ndarray:
    """Sums of q(s_b, y_b) - max q(s_next, .) over this and all later blocks of `steps` tokens; b: a block's first token.

    After the last block comes a state of value 0 if the answer `ended`; one that was cut off has no known value, so its last
    block is left out.

    >>> q_returns(np.array([1.0, 2.0, 3.0]), np.array([5.0, 6.0, 7.0]), 2, ended=True).tolist()
    [-3.0, -3.0, 3.0]
    """
    starts = np.arange(0, chosen_T.size, steps)
    following = np.append(best_T[starts[1:]], 0.0)
    rewards = chosen_T[starts] - following[: starts.size]
    if not ended and rewards.size:
        rewards[-1] = 0.0
    return rewards[::-1].cumsum()[::-1].repeat(steps)[: chosen_T.size]


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
