"""The base class of the objective's terms. The forms are its subclasses:

direct            divergence to the teacher, at every token of the chosen authors
policy_gradient   sampled token: an advantage (teacher log-ratio, outcome, both) times a surrogate's ratio
k2                sampled token: half the squared log-ratio to the teacher, differentiated directly
cross_entropy     negative log-likelihood of data, teacher, or chosen student tokens
pairwise          a preference between two answers to the same prompt, the better-rewarded and the other
uld, gold         distributions over different vocabularies, at spans that both tokenizers cut out
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, Field, model_validator

from opd.common.short_forms import SHORT_FORMS
from opd.objective.corrections import AnyCorrection
from opd.objective.gates import AnyGate
from opd.records import SignalKind
from opd.registry import SETTINGS, Choice, Family, Needs, Positive, StageView, changed

if TYPE_CHECKING:
    from torch import Tensor

    from opd.objective.advantages import AdvantagePart
    from opd.objective.batch import Batch
    from opd.objective.micro import MicroBatch
    from opd.objective.objective import PreparedTerm
    from opd.records import Rollout


# --- Coefficients that change with the step ---


Moment = Positive | Literal["plateau"]


class Schedule(BaseModel):
    """A coefficient that changes with the step. A plain number stays constant."""

    model_config = SETTINGS
    value: float = 1.0
    to: float | None = Field(None, description="where a straight line from `value` ends …")
    over: Positive | None = Field(None, description="… after this many steps; it stays there")
    until: Moment | None = Field(None, description="0 after this step, or once evaluation stops improving")
    after: Moment | None = Field(
        None, description="0 up to and including this step, or until evaluation stops improving"
    )

    @model_validator(mode="after")
    def _line(self) -> Schedule:
        if (self.to is None) != (self.over is None):
            raise ValueError("`to` and `over` belong together: {value: 5e-3, to: 1e-3, over: 100}")
        if isinstance(self.until, int) and isinstance(self.after, int) and self.until <= self.after:
            raise ValueError(f"`after` ({self.after}) must be less than `until` ({self.until})")
        return self

    def __str__(self) -> str:
        """The value, followed by `…` if it changes."""
        moving = (self.to, self.until, self.after) != (None, None, None)
        return f"{self.value:g}{'…' if moving else ''}"

    @property
    def never(self) -> bool:
        """Whether it is 0 at every step."""
        return self.value == 0 and not self.to

    def at(self, step: int, plateau: int | None) -> float:
        """The coefficient at a step, counted from 1. `plateau`: the step after which evaluation stopped improving."""
        first = 0
        if self.until is not None:
            end = plateau if self.until == "plateau" else self.until
            if end is not None and step > end:
                return 0.0
        if self.after is not None:
            start = plateau if self.after == "plateau" else self.after
            if start is None or step <= start:
                return 0.0
            first = start
        if self.to is None or self.over is None:
            return self.value
        return self.value + (self.to - self.value) * min((step - first - 1) / max(self.over - 1, 1), 1.0)


# --- Token weights: masks and denominators ---
#
# Every token gets a weight before the batch is split, so a term's loss is a plain weighted sum that does not depend on
# micro-batches, padding or packing. The denominators are global sums, so several processes only need to all-reduce them.


Aggregate = Literal["token_mean", "sequence_mean", "prompt_mean", "constant"]


def token_weights(
    masks: Sequence[np.ndarray], groups: Sequence[str], aggregate: Aggregate, denominator: float = 1.0
) -> list[np.ndarray]:
    """Weight of every token of every rollout.

    `masks`: (T,) per rollout, bool, or the fraction of 1 that a token counts for. `groups` names each rollout's prompt.

    token_mean      every token counts alike
    sequence_mean   every rollout counts alike, tokens alike within it
    prompt_mean     every prompt counts alike, tokens alike within its rollouts
    constant        the sum over tokens, divided by a constant

    If several tokens are one event (`CrossedTerm`), each counts for a fraction of 1, and the means are over events.

    >>> [w.tolist() for w in token_weights([np.ones(1, bool), np.ones(3, bool)], ["a", "b"], "token_mean")]
    [[0.25], [0.25, 0.25, 0.25]]
    """
    counts = np.array([mask.sum() for mask in masks], dtype=np.float64)
    if aggregate == "token_mean":
        per_token = np.full(len(masks), 1.0 / (counts.sum() or 1.0))
    elif aggregate == "sequence_mean":
        per_token = 1.0 / np.where(counts > 0, counts, 1.0) / max((counts > 0).sum(), 1)
    elif aggregate == "prompt_mean":
        names, member = np.unique(np.asarray(groups), return_inverse=True)
        totals = np.bincount(member, weights=counts, minlength=len(names))
        per_token = 1.0 / np.where(totals > 0, totals, 1.0)[member] / max((totals > 0).sum(), 1)
    else:
        per_token = np.full(len(masks), 1.0 / denominator)
    return [(mask * weight).astype(np.float32) for mask, weight in zip(masks, per_token, strict=True)]


def pair_weights(
    groups: Sequence[str], aggregate: Literal["pair_mean", "prompt_mean", "constant"], denominator: float = 1.0
) -> list[float]:
    """Weight of every pair of answers; `groups` names each pair's prompt.

    pair_mean       every pair counts alike
    prompt_mean     every prompt counts alike, pairs alike within it
    constant        the sum over pairs, divided by a constant

    >>> pair_weights(["a", "b", "b"], "prompt_mean")
    [0.5, 0.25, 0.25]
    """
    if aggregate == "constant":
        return [1.0 / denominator] * len(groups)
    if aggregate == "pair_mean":
        return [1.0 / len(groups) for _ in groups]
    counts = Counter(groups)
    return [1.0 / len(counts) / counts[group] for group in groups]


SOME = 1e-6  # stands for a positive share of prompts that is not known in advance
AuthorName = Literal["student", "teacher", "data"]


class Term(Choice):
    """One summand of the objective. For your own form, subclass and define `loss`, and `form_needs` if it uses a teacher."""

    family = "form"
    key = "form"
    usual_authors: ClassVar[tuple[AuthorName, ...]] = ("student", "teacher", "data")
    by_ratio: ClassVar[bool] = (
        False  # needs the log-prob that a token was sampled with, so it trains only on the student's tokens
    )

    crosses: ClassVar[frozenset[SignalKind]] = (
        frozenset()
    )  # signals that it can use from a teacher with another tokenizer

    role: str = Field("teacher", description="whose signal")
    on: list[AuthorName] | None = Field(
        None,
        min_length=1,
        description=(
            "authors of the tokens trained on; default: all, but student for policy_gradient and k2, data and teacher "
            "for cross_entropy"
        ),
    )
    coefficient: Annotated[Schedule, SHORT_FORMS["objective.coefficient"]] = Schedule()
    gate: Annotated[list[AnyGate], SHORT_FORMS["objective.gate"]] = Field(
        default_factory=list, description="which tokens count, and how much; several multiply"
    )
    gated: Literal["drop", "zero"] = Field(
        "drop", description="tokens a gate closes: leave the denominator, or stay in it"
    )
    aggregate: Literal["token_mean", "sequence_mean", "prompt_mean", "constant"] = "token_mean"
    denominator: float = Field(1.0, gt=0, description="of aggregate: constant")

    @model_validator(mode="after")
    def _consistent(self) -> Term:
        given = changed(self)
        if "denominator" in given and self.aggregate != "constant":
            raise ValueError(f"denominator belongs to aggregate: constant, not to {self.aggregate}")
        if "gated" in given and not self.gate:
            raise ValueError("`gated` says what becomes of tokens that a gate closes, but the term has no gate")
        if not self.roles and "role" in given:
            raise ValueError("the term asks no teacher, so `role` does nothing")
        if self.by_ratio and self.on not in (None, ["student"]):
            raise ValueError(f"{self.name} trains only on tokens that the student sampled, so `on` must be [student]")
        return self

    # --- Requirements ---

    def needs(self, updates: int = 1) -> Needs:
        """Requirements of the form and its gates.

        `updates`: optimiser steps per batch; with one, the proximal policy is the current one.
        """
        needs = self.form_needs(updates)
        for gate in self.gate:
            needs |= gate.needs(self.role)
        return needs

    def form_needs(self, updates: int) -> Needs:
        return Needs()

    def modules(self) -> tuple[str, ...]:
        """Names of the trainable modules that it uses."""
        return self.needs().modules

    @property
    def advantages(self) -> Sequence[AdvantagePart]:
        """Parts of the advantage, if it uses one."""
        return ()

    def joined(self, terms: Sequence[Term]) -> Term:
        """The term as part of the whole objective `terms`, for settings that it takes from another term."""
        return self

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the models that must score its tokens."""
        return tuple(dict.fromkeys(role for role, _ in self.needs().possible))

    def advice(self, offers: Collection[SignalKind]) -> str:
        """Advice for the user if a teacher with these offers cannot provide what the term needs."""
        return "Use another form of loss, or another kind of teacher."

    @property
    def minimises(self) -> str:
        """Name of the divergence to its role's model that it minimises; empty if none."""
        return ""

    @property
    def plain_kl(self) -> str:
        """Like `minimises`, but a divergence whose parameter makes it a plain KL has the name of that KL."""
        return self.minimises

    @property
    def authors(self) -> tuple[AuthorName, ...]:
        return self.usual_authors if self.on is None else tuple(self.on)

    def authors_beside_student(self, rollout: Any) -> list[str]:
        """Authors other than the student that it trains on and that the rollouts contain."""
        present = present_authors(rollout)
        return [author for author in self.authors if author != "student" and present[author] > 0]

    @property
    def compares_with_sampler(self) -> bool:
        """Whether it needs the log-prob that a token was sampled with."""
        return any(gate.by_student for gate in self.gate)

    def corrected(self) -> Term:
        """For a sampler whose log-probs differ from the trainer's: add a default correction if the form supports one."""
        return self

    # --- Checks ---

    @property
    def parts(self) -> Iterable[Choice]:
        return self.gate

    def refuse(self, view: StageView) -> Iterable[str]:
        present, inner = present_authors(view.rollout), replace(view, term=self)
        if self.coefficient.never:
            yield "the coefficient is 0 at every step, so the term does nothing. Remove the term."
        if not any(present[author] > 0 for author in self.authors):
            yield (
                f"{self.name} trains on {' and '.join(self.authors)} tokens, but the rollouts have none. "
                "Set rollout.data_share or rollout.teacher_share, or change the term's `on:`."
            )
        shown = view.rollout.shown_to_student
        if shown and "student" in self.authors and self.compares_with_sampler:
            yield (
                f"{self.name} compares with the log-probs that tokens were sampled with, and those of rollout.{shown[0]} were sampled "
                "under another prompt. Use surrogate.against: proximal, advantage.student: proximal and no correction, or set "
                "trained_as: teacher there."
            )
        for part in self.parts:
            yield from part.refuse(inner)

    # --- The loss ---

    def leaves_out(self, batch: Batch) -> set[str]:
        """Ids of rollouts that it must not train on."""
        return set()

    def prepare(self, prepared: PreparedTerm) -> Any:
        """Compute what needs the whole batch before it is split; kept as `prepared.state`."""
        return None

    def counts(self, prepared: PreparedTerm, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """(T,) per rollout: how much each token adds to the denominator of `aggregate`."""
        return [prepared.counted[rollout.id] for rollout in rollouts]

    def weights(self, prepared: PreparedTerm, rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
        """Rollout id -> (T,) token weights of an update: `weight_N` of the loss, with all denominators included."""
        masks, groups = self.counts(prepared, rollouts), [rollout.group for rollout in rollouts]
        weights = token_weights(masks, groups, self.aggregate, self.denominator)
        return {
            rollout.id: (weight * prepared.factor[rollout.id] * prepared.coefficient).astype(np.float32)
            for rollout, weight in zip(rollouts, weights, strict=True)
        }

    @abstractmethod
    def loss(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> Tensor:
        """Sum over a micro-batch's tokens of weight times loss. No group or pair is split across micro-batches."""
        raise NotImplementedError


class CorrectedTerm(Term):
    """A term that can be corrected for the gap between trainer and sampler."""

    correction: AnyCorrection | None = Field(None, description="of the gap between trainer and sampler")

    @property
    def compares_with_sampler(self) -> bool:
        return super().compares_with_sampler or self.correction is not None

    @property
    def parts(self) -> Iterable[Choice]:
        return [*self.gate, *([self.correction] if self.correction is not None else [])]

    def refuse(self, view: StageView) -> Iterable[str]:
        yield from super().refuse(view)
        if not self.by_ratio and self.correction is None:
            return
        drawn = view.rollout
        if drawn.top_p < 1 or drawn.top_k > 0:
            yield (
                f"rollout: top_p {drawn.top_p:g}, top_k {drawn.top_k} with a {self.name} term that weighs by ratios. "
                "Importance ratios are undefined for tokens that truncated sampling can never draw; set top_p: 1 and "
                "top_k: 0, or use form: direct."
            )
        if drawn.temperature == 0:
            yield (
                f"rollout.temperature 0 with a {self.name} term: greedy tokens carry no gradient. "
                "Sample at temperature 1."
            )


AnyTerm = Annotated[Term, Family("form", key="form", default="direct")]


def present_authors(rollout: Any) -> dict[str, float]:
    """The share of prompts that each author answers."""
    shares = {"student": 0.0, "data": 0.0, "teacher": 0.0}
    for writer in rollout.everyone:
        shares[writer.author] += writer.share or (SOME if writer.samples else 0.0)
    if rollout.rescue is not None:
        shares[rollout.rescue.trained_as] = shares[rollout.rescue.trained_as] or SOME
    if rollout.demonstrations is not None:
        shares["teacher"] = shares["teacher"] or SOME
    return shares


def refusals(view: StageView) -> list[str]:
    """Every mistake in the objective that can be found from the recipe alone."""
    where = ["objective" if len(view.terms) == 1 else f"objective term {number}" for number in range(len(view.terms))]
    return [f"{place}: {text}" for place, term in zip(where, view.terms, strict=True) for text in term.refuse(view)]


def module_mistakes(terms: Sequence[Term], modules: Collection[str]) -> list[str]:
    """Messages about modules that a term names but that do not exist, and about modules that no term uses."""
    used = dict.fromkeys(name for term in terms for name in term.modules())
    known = ", ".join(modules) or "none"
    missing = [
        f"objective: a term uses the module {name!r}, and the recipe's modules are: {known}. Add modules: {{{name}: …}}."
        for name in used
        if name not in modules
    ]
    idle = [
        f"modules.{name}: no term of the objective uses it. Remove it, or add a term."
        for name in modules
        if name not in used
    ]
    return missing + idle
