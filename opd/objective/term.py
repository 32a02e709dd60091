"""The terms of an objective. The forms are subclasses of `Term`:

direct            divergence to the teacher, at every token of the chosen authors
candidates        the student's likeliest tokens at every position, each with an advantage and a clipped ratio
hpd               the given token and one drawn from the student, weighed by both distributions
policy_gradient   sampled token: an advantage (teacher log-ratio, outcome, both) times a surrogate's ratio
k2                sampled token: half the squared log-ratio to the teacher, differentiated directly
cross_entropy     negative log-likelihood of data, teacher, or chosen student tokens
pairwise          a preference between two answers to the same prompt, the better-rewarded and the other
uld, gold         distributions over different vocabularies, at spans that both tokenizers cut out

Others stand next to what they use: `value` in `policy_gradient`, `representation` and `dskd` in `hidden_states`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, get_args

import numpy as np
from pydantic import BaseModel, Field, model_validator

from opd.common.short_forms import SHORT_FORMS
from opd.divergences.kinds import LOG_ZERO, AnyDivergence, AnySupport, Full, ReverseKL
from opd.objective.corrections import LOG_LIMIT, AnyCorrection
from opd.objective.gates import AnyGate, keyed_uniforms
from opd.records import Author, Layers, SignalKind
from opd.registry import SETTINGS, Choice, Family, Fraction, Needs, Positive, StageView, Word, changed

if TYPE_CHECKING:
    from torch import Tensor

    from opd.divergences import Projection, RowStatistics
    from opd.divergences.kinds import Formula
    from opd.divergences.projection import Source
    from opd.models.modules import ModuleKind
    from opd.objective.advantages import AdvantagePart
    from opd.objective.batch import Batch, RewardsById
    from opd.objective.micro import MicroBatch
    from opd.objective.objective import PreparedTerm
    from opd.records import Rollout, Signal, TopK


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

    If several tokens are one event (`CrossVocabularyTerm`), each counts for a fraction of 1, and the means are over events.

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
AuthorName = Literal["student", "teacher", "data", "rejected"]
AUTHOR = {name: Author[name.upper()] for name in get_args(AuthorName)}


class Term(Choice):
    """One summand of the objective. For your own form, subclass and define `loss`, and `form_needs` if it uses a teacher."""

    family = "form"
    key = "form"
    usual_authors: ClassVar[tuple[AuthorName, ...]] = ("student", "teacher", "data")
    by_ratio: ClassVar[bool] = (
        False  # needs the log-prob that a token was sampled with, so it trains only on the student's tokens
    )

    states: ClassVar[Layers] = "last"  # the layers whose hidden states it reads
    one_model: ClassVar[bool] = False  # compares hidden states, so the teacher must be a single model
    uses_projectors: ClassVar[bool] = False  # reads modules that map between hidden spaces, instead of numbers
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
    domains: list[Word] | None = Field(
        None, min_length=1, max_length=1000, description="of the prompts whose answers it trains on; default: all"
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
            raise ValueError("the term uses no teacher, so `role` does nothing")
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

    def check_module(self, kind: ModuleKind) -> Iterable[str]:
        """Every mistake in its settings together with those of a module that it uses."""
        return ()

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

    def other_authors(self, rollout: Any) -> list[str]:
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

    def check(self, view: StageView) -> Iterable[str]:
        present, inner = present_authors(view.rollout), replace(view, term=self)
        present["data"] = present["data"] or (SOME if view.plain_text else 0.0)
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
            yield from part.check(inner)

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

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
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
    shares = dict.fromkeys(get_args(AuthorName), 0.0)
    left = None in rollout.by_sample  # whether the prompts' draws choose the writer of any sample
    later = rollout.ever_positive if rollout.share_schedule is not None else ()
    for key, writer in rollout.writers_by_key.items():
        moves = key in later or (key in ("prompts", "teacher_mix") and "student" in later)
        shares[writer.author] += (writer.share if left else 0.0) or (
            SOME if writer.samples or (moves and left) else 0.0
        )
    if rollout.rescue is not None:
        shares[rollout.rescue.trained_as] = shares[rollout.rescue.trained_as] or SOME
    others = (rollout.demonstrations, rollout.takeover, rollout.teacher_prefix)
    if others != (None, None, None):
        shares["teacher"] = shares["teacher"] or SOME
    return shares


def group_authors(rollout: Any) -> set[str]:
    """Authors that can have answers in one and the same group."""
    found = {writer.author for writer in rollout.writers if writer.samples}
    if None in rollout.by_sample:
        found |= {writer.author for writer in rollout.everyone if writer.share}
    if rollout.rescue is not None:
        found.add(rollout.rescue.trained_as)
    return found | ({"teacher"} if rollout.demonstrations is not None else set())


def scored_domains(terms: Sequence[Term], role: str) -> set[str] | None:
    """The domains whose answers some term compares with the model of a role; None: all."""
    asking = [term.domains for term in terms if role in term.roles]
    if not asking or None in asking:
        return None
    return {domain for domains in asking for domain in domains or ()}


def group_samples(rollout: Any, authors: Collection[str]) -> int:
    """How many samples of a group can be by these authors."""
    drawn = any(writer.share and writer.author in authors for writer in rollout.everyone)
    fixed = sum(writer.samples for writer in rollout.writers if writer.author in authors)
    return fixed + (rollout.by_sample.count(None) if drawn else 0)


def objective_mistakes(view: StageView) -> list[str]:
    """Every mistake in the objective that can be found from the recipe alone."""
    where = ["objective" if len(view.terms) == 1 else f"objective term {number}" for number in range(len(view.terms))]
    return [f"{place}: {text}" for place, term in zip(where, view.terms, strict=True) for text in term.check(view)]


def vocabulary_mistakes(terms: Sequence[Term], size: int) -> list[str]:
    """Mistakes that show once the number of the student's ids is known."""
    return [f"objective: {text}" for term in terms for gate in term.gate for text in gate.check_vocabulary(size)]


def module_mistakes(terms: Sequence[Term], modules: Mapping[str, ModuleKind]) -> list[str]:
    """Messages about modules that a term names but that do not exist or do something else, and about modules that do nothing."""
    heads = dict.fromkeys(name for term in terms for name in term.modules())
    scored = dict.fromkeys(name for term in terms for name in term.needs().scores)
    mapped = {name for term in terms if term.uses_projectors for name in term.modules()}
    known = ", ".join(modules) or "none"
    found = [
        f"objective: a term uses the module {name!r}, but the recipe's modules are: {known}. Add modules: {{{name}: …}}."
        for name in dict.fromkeys((*heads, *scored))
        if name not in modules
    ]
    for term in terms:
        used = (modules[name] for name in term.modules() if name in modules)
        found += [f"objective: {mistake}" for kind in used for mistake in term.check_module(kind)]
    for name, kind in modules.items():
        if kind.own and name in heads:
            found.append(
                f"objective: a term reads the module {name!r} at every position, and a {kind.name} gives one score per answer. Use "
                f"advantage: {{also: [{{kind: score, module: {name}}}]}}, or a module of kind head."
            )
        if not kind.own and name in scored:
            found.append(
                f"objective: a term reads the score that the module {name!r} gives an answer, and a {kind.name} gives numbers per "
                "position. Use a module of kind discriminator or reward_model."
            )
        if name in heads and kind.projects != (name in mapped):
            wanted = "projectors" if name in mapped else "head"
            found.append(
                f"objective: a term uses the module {name!r} as one of kind {wanted}, and it is a {kind.name}. Use a module of kind "
                f"{wanted}."
            )
        if not kind.learns and name not in scored:
            found.append(
                f"modules.{name}: it does not learn, and no term reads its score. Remove it, or add an advantage."
            )
        if not kind.own and name not in heads:
            found.append(f"modules.{name}: no term of the objective uses it. Remove it, or add a term.")
    return found


# --- Direct: a divergence to the teacher ---


class Direct(CorrectedTerm):
    name = "direct"
    by_default = True
    flat = ("divergence", "support")

    divergence: AnyDivergence = Field(ReverseKL(), description="of a direct term; of policy_gradient: whose advantage")
    support: AnySupport = Field(
        Full(), description="of a direct term: the exact full vocabulary, or the k likeliest ids"
    )
    temperature: float = Field(1.0, ge=0.01, le=100, description="of the divergence; sampling has its own")
    shuffle: Literal["none", "rollout"] = Field(
        "none", description="control: every token gets the teacher's distribution at another token of its rollout"
    )

    @model_validator(mode="after")
    def _means_something(self) -> Direct:
        if self.support.for_f_divergences and not self.divergence.f_divergence:
            raise ValueError(
                f"closure generalised is defined for f-divergences, and {self.divergence.name} is not one: "
                "use closure: tail"
            )
        wanted = self.support.for_kl
        if wanted and self.divergence.plain_kl != wanted:
            raise ValueError(
                f"closure teacher_renormalised is defined for {wanted}, not for {self.divergence.name}: use closure: "
                "renormalised or tail"
            )
        if self.correction is not None and self.correction.weighs_by == "token":
            raise ValueError(
                f"{self.correction.name} weighs a token by its own ratio, which corrects nothing in a direct loss: it "
                "depends on the prefix alone. Use kind: prefix, or a veto"
            )
        return self

    @property
    def minimises(self) -> str:
        return self.divergence.name

    @property
    def plain_kl(self) -> str:
        return self.divergence.plain_kl

    @property
    def parts(self) -> Iterable[Choice]:
        return [*super().parts, self.divergence, self.support]

    def form_needs(self, updates: int) -> Needs:
        proximal = {("proximal",)} if updates > 1 and self.correction is not None else set()
        needs = Needs(student=frozenset(proximal))
        if self.divergence.adapts:
            needs |= Needs(signals=((self.role, "logprobs_at"),), student=frozenset({("proximal",)}))
        k = self.support.teacher_ids
        if k is None or (self.temperature != 1.0 and not self.support.leaves_rest):
            return needs | Needs(signals=((self.role, "hidden"),))
        return needs | Needs(topk=((self.role, k),))

    def advice(self, offers: Collection[SignalKind]) -> str:
        if "topk" not in offers:
            return super().advice(offers)
        return (
            "For a teacher that gives only its likeliest ids, set support: topk with side: teacher and, at a temperature other than 1, "
            "where the mass of the other ids is not known, closure: renormalised."
        )

    def prepare(self, prepared: PreparedTerm) -> dict[str, float] | None:
        """Each answer's own alpha, if the divergence adapts."""
        if not self.divergence.adapts:
            return None
        batch = prepared.batch
        rollouts = [rollout for rollout in batch.rollouts if prepared.counted[rollout.id].any()]
        counted = [prepared.counted[rollout.id] for rollout in rollouts]
        ours = [batch.first_pass.logprob[rollout.id] for rollout in rollouts]
        theirs = batch.logprobs(self.role, rollouts)
        student, teacher = (
            np.exp([line[mask].mean() for line, mask in zip(lines, counted, strict=True)]) for lines in (ours, theirs)
        )
        alphas = self.divergence.own_alphas(teacher, student)
        if alphas.size:
            prepared.metrics[f"alpha/{prepared.name}"] = float(alphas.mean())
        return {rollout.id: float(alpha) for rollout, alpha in zip(rollouts, alphas, strict=True)}

    def loss(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> Tensor:
        import torch

        from opd.divergences.compute import divergence

        if self.shuffle != "none":
            micro = micro.shuffled(self.role, prepared.seed, prepared.factor)
        if self.correction is not None:
            weight_N = self._corrected(prepared, micro, weight_N)
        total = micro.projection.hidden.new_zeros((), dtype=torch.float32)
        parts = [(self.divergence.formula(), weight_N != 0)]
        if self.divergence.adapts:
            parts = self._by_answer(prepared, micro, weight_N)
        for formula, open_N in parts:
            for rows, teacher in micro.teacher_distributions(self.role, open_N):
                if not rows.size:
                    continue
                student, tokens = micro.rows(rows), micro.tokens(rows)
                result = divergence(
                    formula,
                    student,
                    teacher,
                    weight=micro.tensor(weight_N[rows]),
                    temperature=self.temperature,
                    merge=micro.merge,
                    tokens=tokens,
                    trusted=True,
                    **self.support.truncation,
                )
                vague = result.statistics.vague_tail
                if vague is not None and self.support.truncation["closure"] == "tail":
                    micro.count(f"tail_unknown/{prepared.name}", vague)
                known = result.statistics
                if self.temperature != 1.0:
                    known = self._untempered(micro, student, teacher, tokens)
                assert known.reverse_kl is not None
                assert known.logprob is not None
                micro.note("reverse_kl", rows, known.reverse_kl)
                micro.note("kl", rows, known.reverse_kl, role=self.role)
                if known.teacher_logprob is not None:
                    micro.note("log_ratio", rows, known.logprob - known.teacher_logprob, role=self.role)
                micro.note("entropy", rows, known.entropy)
                if self.correction is None:
                    micro.note_mismatch(rows, known.logprob)
                total = total + result.loss
        return total

    def _by_answer(
        self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray
    ) -> list[tuple[Formula, np.ndarray]]:
        """(formula, its tokens) of every answer."""
        owner = np.repeat([rollout.id for rollout in micro.pack.rollouts], micro.pack.response_lengths)
        found = []
        for rollout in micro.pack.rollouts:
            if rollout.id in prepared.state:
                own = self.divergence.model_copy(update={"alpha": prepared.state[rollout.id]})
                found.append((own.formula(), (weight_N != 0) & (owner == rollout.id)))
        return found

    def _untempered(
        self, micro: MicroBatch, student: Projection, teacher: Source | TopK, tokens: Tensor
    ) -> RowStatistics:
        """Statistics at temperature 1, in a pass of their own."""
        from opd.divergences.compute import divergence, statistics
        from opd.records import TopK

        if isinstance(teacher, TopK):
            k = self.support.teacher_ids
            alone = divergence(
                "reverse_kl",
                student.detach(),
                teacher,
                support="topk",
                k=k,
                merge=micro.merge,
                tokens=tokens,
                trusted=True,
            )
            return alone.statistics
        return statistics(student.detach(), teacher, merge=micro.merge, tokens=tokens, trusted=True)

    def _corrected(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> np.ndarray:
        """Weights times the correction. A direct loss at t depends only on the tokens before t, hence on their ratios."""
        import torch

        assert self.correction is not None
        rows = np.arange(weight_N.size)
        with torch.no_grad():
            log_ratio = micro.log_ratio(rows, micro.current(rows))
        factor, altered = self.correction.apply(log_ratio, micro.segment(rows))
        micro.count(f"corrected/{prepared.name}", altered[micro.tensor(weight_N != 0)])
        return (weight_N * factor.cpu().numpy()).astype(np.float32)


# --- Losses of a few tokens per position: candidate sets, and HPD ---


class Candidates(Term):
    """Policy gradient on the student's k likeliest tokens at every position, with PPO's clip for each (Rethinking OPD).

    A_v = w_v (log T_v - log S_v), with S before the updates on the batch and w its probability renormalised on the set.
    """

    name = "candidates"
    usual_authors = ("student",)
    k: Positive = Field(16, description="of candidates: the student's likeliest ids before this batch's updates")
    weigh: Literal["student", "teacher", "none"] = Field(
        "student", description="of candidates: whose probability, renormalised on the set, weighs a candidate"
    )
    low: float = Field(0.2, ge=0, le=1, description="of candidates: ratios below 1 - low are clipped")
    high: float = Field(0.2, ge=0, description="of candidates: ratios above 1 + high are clipped")

    @property
    def minimises(self) -> str:
        return "reverse_kl"

    def form_needs(self, updates: int) -> Needs:
        first = {("candidates", self.k)} if updates > 1 else set()
        return Needs(signals=((self.role, "hidden"),), student=frozenset(first))

    def loss(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> Tensor:
        import torch

        from opd.divergences.compute import gathered_loss, statistics

        total = micro.projection.hidden.new_zeros((), dtype=torch.float32)
        for rows, teacher in micro.teacher_projections(self.role, weight_N != 0):
            student, weight = micro.rows(rows), micro.tensor(weight_N[rows])
            ids, old = micro.candidates(self.k, rows)

            def losses(log_s: Tensor, log_t: Tensor, part: slice, old: Tensor = old) -> Tensor:
                return candidate_losses(log_s, old[part].to(log_s), log_t, self.weigh, self.low, self.high)

            total = total + gathered_loss(student, teacher, ids, weight, losses, micro.merge).float()
            known = statistics(student.detach(), teacher, merge=micro.merge)
            assert known.reverse_kl is not None
            micro.note("reverse_kl", rows, known.reverse_kl)
            micro.note("kl", rows, known.reverse_kl, role=self.role)
            micro.note("entropy", rows, known.entropy)
        return total


def candidate_losses(current: Tensor, old: Tensor, teacher: Tensor, weigh: str, low: float, high: float) -> Tensor:
    """(N,) sums over candidates (N, K) of PPO's loss, with A_v = w_v (log T_v - log S_old,v)."""
    import torch

    advantage = (teacher - old).masked_fill(teacher <= LOG_ZERO / 2, 0.0)  # an id that the teacher does not have
    if weigh != "none":
        advantage = advantage * (old if weigh == "student" else teacher).softmax(-1)
    ratio = (current - old).clamp(-LOG_LIMIT, LOG_LIMIT).exp()
    return torch.maximum(-ratio * advantage, -ratio.clamp(1 - low, 1 + high) * advantage).sum(-1)


class HPD(Term):
    """HPD: likelihood of the given token and of one drawn from the student, weighed by S (log T - log S) of each."""

    name = "hpd"
    draw: Literal["sampled", "argmax"] = Field(
        "sampled", description="of hpd: the second token: drawn from the student, or its likeliest"
    )

    def form_needs(self, updates: int) -> Needs:
        return Needs(signals=((self.role, "hidden"),))

    def loss(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> Tensor:
        import torch

        from opd.divergences.compute import drawn_events, gathered_loss, likeliest_events
        from opd.divergences.projection import canonical_ids

        total = micro.projection.hidden.new_zeros((), dtype=torch.float32)
        names = [rollout.id for rollout in micro.pack.rollouts]
        keys = [f"{prepared.seed}/hpd/{name}" for name in names]
        uniform_N = np.concatenate(
            [keyed_uniforms(key, prepared.factor[name].size) for key, name in zip(keys, names, strict=True)]
        )
        for rows, teacher in micro.teacher_projections(self.role, weight_N != 0):
            student = micro.rows(rows)
            if self.draw == "argmax":
                second = likeliest_events(student.detach(), 1, micro.merge)[0].squeeze(-1)
            else:
                second = drawn_events(student.detach(), micro.tensor(uniform_N[rows]), micro.merge)
            first = canonical_ids(micro.tokens(rows), micro.merge)

            def losses(log_s: Tensor, log_t: Tensor, part: slice, other: Tensor = first != second) -> Tensor:
                return hpd_losses(log_s, log_t, other[part])

            ids, weight = torch.stack([first, second], -1), micro.tensor(weight_N[rows])
            total = total + gathered_loss(student, teacher, ids, weight, losses, micro.merge).float()
        return total


def hpd_losses(student: Tensor, teacher: Tensor, other: Tensor) -> Tensor:
    """(N,) losses from log-probs (N, 2) of the given token y and the drawn z; `other`: z is not y.

    With k = S (log T - log S): a_1 = k(y), plus T(y) if k(y) > 0, plus T(y) again if k(z) < 0 as well; a_2 = min(k(z), 0). The
    loss is -a_1 log S(y) - a_2 log S(z), with detached a.
    """
    fixed = student.detach()
    k = fixed.exp() * (teacher - fixed)
    up = k[:, 0] > 0
    first = k[:, 0] + teacher[:, 0].exp() * (up.to(k) + (up & (k[:, 1] < 0)).to(k))
    second = k[:, 1].clamp(max=0) * other
    return -first * student[:, 0] - second * student[:, 1]


# --- Losses of the sampled token: k2 and cross-entropy ---


class K2(CorrectedTerm):
    """(log student - log teacher)^2 / 2. On samples of the student its gradient is reverse KL's (KDRL)."""

    name = "k2"
    usual_authors = ("student",)
    by_ratio = True

    @model_validator(mode="after")
    def _means_something(self) -> K2:
        if self.correction is not None and self.correction.weighs_by == "prefix":
            raise ValueError("prefix is for form: direct; k2 is corrected by icepop, tis or mis")
        return self

    @property
    def minimises(self) -> str:
        return "reverse_kl"

    def form_needs(self, updates: int) -> Needs:
        proximal = {("proximal",)} if updates > 1 and self.correction is not None else set()
        return Needs(signals=((self.role, "logprobs_at"),), student=frozenset(proximal))

    def check(self, view: StageView) -> Iterable[str]:
        drawn = view.rollout
        if drawn.temperature != 1:
            yield (
                f"rollout.temperature {drawn.temperature:g} with form: k2, whose gradient is reverse KL's only on "
                "samples of the policy itself. Sample at temperature 1, or use policy_gradient."
            )
        if drawn.teacher_mix:
            yield "rollout.teacher_mix with form: k2, which has no importance weight. Use policy_gradient."
        yield from super().check(view)

    def loss(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> Tensor:
        import torch

        rows = np.flatnonzero(weight_N)
        if self.correction is not None:  # corrections need whole rollouts, including gated tokens
            rows = np.flatnonzero(np.concatenate([prepared.eligible[item.id] for item in micro.pack.rollouts]))
        teacher = micro.tensor(micro.teacher_logprobs(self.role, rows)).float()
        policy = micro.policy(rows)
        trained = micro.tensor(weight_N[rows] != 0)
        micro.estimate(rows, policy.detach() - teacher, self.role)
        losses, log_ratio = k2(policy, torch.where(trained, teacher, policy.detach())), micro.log_ratio(rows, policy)
        if self.correction is not None:
            weight, altered = self.correction.apply(log_ratio, micro.segment(rows))
            micro.count(f"corrected/{prepared.name}", altered[trained])
            losses = losses * weight
        return (losses * micro.tensor(weight_N[rows])).sum()


def k2(current: Tensor, teacher: Tensor) -> Tensor:
    """(log current - log teacher)^2 / 2, differentiated directly."""
    return 0.5 * (current - teacher.detach()) ** 2


class CrossEntropy(Term):
    """Negative log-likelihood of the chosen authors' tokens."""

    name = "cross_entropy"
    usual_authors = ("data", "teacher")

    def loss(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> Tensor:
        rows = np.flatnonzero(weight_N)
        return -(micro.policy(rows) * micro.tensor(weight_N[rows])).sum()


# --- Teachers with another tokenizer: distributions compared at spans that both tokenizers share ---
#
# uld    sorted next-token probabilities, regardless of which tokens they belong to
# gold   the events of a whole span: tokens in both vocabularies are compared one by one, the others sorted
#
# With one tokenizer every token is a span: `gold` is the JSD, and `uld` is 0 if the two agree.


class CrossVocabularyHead(Protocol):
    """A teacher with another tokenizer: its stop ids, and the pairs of ids that mean the same on both sides."""

    stop_ids: tuple[int, ...]
    matched: tuple[np.ndarray, np.ndarray] | None


class Event(NamedTuple):
    """Tokens s0..s1 of a micro-batch, and rows t0..t1 of a teacher's signal."""

    s0: int
    s1: int
    t0: int
    t1: int


@dataclass(frozen=True, eq=False)
class SpanEvents:
    """Everything that one teacher scores in a micro-batch."""

    spans: np.ndarray  # (M, 4)
    weight: np.ndarray  # (M,) sum over a span's tokens, which share the weight of one event
    teacher: Any  # the teacher's head
    hidden: Tensor  # (rows, D)
    ids: np.ndarray  # (rows,) tokens that the rows predict
    answer: np.ndarray  # (rows,) the rollout of the micro-batch that a row belongs to
    crossed: bool


def events_of(micro: MicroBatch, role: str, weight_N: np.ndarray) -> Iterator[SpanEvents]:
    import torch

    signals = [micro.batch.signals[role, "hidden"][rollout.id] for rollout in micro.pack.rollouts]
    starts = np.cumsum([0, *micro.pack.response_lengths[:-1]])
    for name in dict.fromkeys(signal.teacher for signal in signals if signal.mask.any()):
        spans: list[Event] = []
        hidden: list[Tensor] = []
        ids: list[np.ndarray] = []
        answer: list[np.ndarray] = []
        at = 0
        for number, (rollout, signal, start) in enumerate(zip(micro.pack.rollouts, signals, starts, strict=True)):
            if signal.teacher != name or not signal.mask.any():
                continue
            spans += _spans(signal, int(start), at)
            ids.append(rollout.response_ids if signal.crossed is None else signal.crossed)
            hidden.append(signal.values.to(micro.device))
            answer.append(np.full(ids[-1].size, number))
            at += ids[-1].size
        weights = np.array([weight_N[span.s0 : span.s1].sum() for span in spans])
        kept = np.flatnonzero(weights)
        if kept.size:
            crossed = any(signal.crossed is not None for signal in signals if signal.teacher == name)
            chosen = np.array(spans)[kept]
            yield SpanEvents(
                chosen, weights[kept], micro.teachers[name], torch.cat(hidden), np.concatenate(ids),
                np.concatenate(answer), crossed,
            )  # fmt: skip


def _spans(signal: Signal, start: int, at: int) -> list[Event]:
    """One span per token with a shared tokenizer; otherwise the aligned spans."""
    if signal.crossed is None:
        return [
            Event(start + place, start + place + 1, at + place, at + place + 1)
            for place in np.flatnonzero(signal.mask).tolist()
        ]
    found = []
    for s0, s1, t0, t1 in signal.spans:
        found.append(Event(start + s0, start + s1, at, at + t1 - t0))
        at += t1 - t0
    return found


class CrossVocabularyTerm(Term):
    """Base class of ULD and GOLD."""

    crosses = frozenset({"hidden"})

    def form_needs(self, updates: int) -> Needs:
        return Needs(signals=((self.role, "hidden"),))

    def counts(self, prepared: PreparedTerm, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """A span is one event, split equally among its tokens, so `aggregate` takes means over spans."""
        signals = prepared.batch.signals[self.role, "hidden"]
        found = []
        for rollout in rollouts:
            signal, parts = signals[rollout.id], prepared.counted[rollout.id].astype(np.float64)
            if signal.crossed is not None:
                for s0, s1, _, _ in signal.spans:
                    parts[s0:s1] /= s1 - s0
            found.append(parts)
        return found

    def loss(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> Tensor:
        import torch

        total = micro.projection.hidden.new_zeros((), dtype=torch.float32)
        for events in events_of(micro, self.role, weight_N):
            loss, _ = self.distance(micro, events)
            total = total + loss
        return total

    @abstractmethod
    def distance(self, micro: MicroBatch, events: SpanEvents) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _merges(self, micro: MicroBatch, events: SpanEvents) -> tuple[Any, Any]:
        return micro.merge, ((tuple(events.teacher.stop_ids),) if events.crossed else micro.merge)

    def _sides(self, micro: MicroBatch, events: SpanEvents, column: int) -> tuple[Projection, Projection]:
        """Both distributions at one token of every span: the first (`column` 0) or the last (1)."""
        from opd.objective.micro import in_half

        first, last = (events.spans[:, 0], events.spans[:, 2]), (events.spans[:, 1] - 1, events.spans[:, 3] - 1)
        ours, theirs = last if column else first
        student = micro.projection.rows(micro.tensor(ours))
        teacher = events.teacher.project(events.hidden[micro.tensor(theirs)])
        return student, in_half(teacher, student.hidden.dtype)


class ULD(CrossVocabularyTerm):
    """Distance between sorted probabilities at the start of every span, where both models have read the same text."""

    name = "uld"
    k: Positive | None = Field(None, description="of uld: the likeliest ids that are compared one by one; default: all")

    def distance(self, micro: MicroBatch, events: SpanEvents) -> tuple[Tensor, Tensor]:
        from opd.divergences.compute import cross_vocabulary_loss, sorted_distance

        student, teacher = self._sides(micro, events, 0)
        weight = micro.tensor(events.weight)

        def sorted_by_rank(log_s: Tensor, log_t: Tensor) -> Tensor:
            return sorted_distance(log_s.exp(), log_t.exp(), self.k)

        return cross_vocabulary_loss(student, teacher, weight, sorted_by_rank, self._merges(micro, events))


class GOLD(CrossVocabularyTerm):
    """Compares spans: the distribution at a span's last token times the probability of the tokens before (chain rule)."""

    name = "gold"
    beta: Fraction = Field(0.5, description="of jsd: 0 is forward KL, 1 reverse KL")
    matched_weight: float | None = Field(
        None, ge=0, description="of gold: of the ids that both vocabularies have; default: their share of the teacher's"
    )
    unmatched_weight: float | None = Field(None, ge=0, description="of gold: of the others; default: the rest of 1")

    def distance(self, micro: MicroBatch, events: SpanEvents) -> tuple[Tensor, Tensor]:
        from opd.divergences.compute import cross_vocabulary_loss, matched_distance

        student, teacher = self._sides(micro, events, 1)
        merges, ids = self._merges(micro, events), self._matched(micro, events)
        before = self._before(micro, events, merges) if events.crossed else None
        weights = None
        if ids is not None and (self.matched_weight is not None or self.unmatched_weight is not None):
            share = ids[1].numel() / teacher.vocabulary
            weights = (
                share if self.matched_weight is None else self.matched_weight,
                1 - share if self.unmatched_weight is None else self.unmatched_weight,
            )

        def one_by_one(log_s: Tensor, log_t: Tensor) -> Tensor:
            return matched_distance(log_s, log_t, ids, self.beta, weights)

        return cross_vocabulary_loss(student, teacher, micro.tensor(events.weight), one_by_one, merges, before)

    def _matched(self, micro: MicroBatch, events: SpanEvents) -> tuple[Tensor, Tensor] | None:
        """Ids of the common events on both sides, including the stop event."""
        if not events.crossed:
            return None
        head: CrossVocabularyHead = events.teacher
        assert head.matched is not None
        stops = (micro.merge[0][:1], head.stop_ids[:1])
        pairs = [np.append(side, stop) for side, stop in zip(head.matched, stops, strict=True)]
        return micro.tensor(pairs[0].astype(np.int64)), micro.tensor(pairs[1].astype(np.int64))

    def _before(self, micro: MicroBatch, events: SpanEvents, merges: tuple[Any, Any]) -> tuple[Tensor, Tensor]:
        """(M,) log-probs of each span's tokens before the last one, on both sides."""
        from opd.divergences.compute import token_logprobs

        spans, count = events.spans, len(events.spans)
        found = []
        for side, (first, last) in enumerate(((0, 1), (2, 3))):
            rows = np.concatenate([np.arange(span[first], span[last] - 1) for span in spans]).astype(np.int64)
            owner = np.repeat(np.arange(count), spans[:, last] - spans[:, first] - 1)
            sums = micro.projection.hidden.new_zeros(count, dtype=micro.wide)
            if rows.size and side == 0:
                student = micro.projection.rows(micro.tensor(rows))
                values = token_logprobs(student, micro.tokens(rows), merge=merges[0], trusted=True)
                sums = sums.index_add(0, micro.tensor(owner), values.to(sums))
            elif rows.size:
                teacher = events.teacher.project(events.hidden[micro.tensor(rows)])
                ids = micro.tensor(events.ids[rows].astype(np.int64))
                values = token_logprobs(teacher, ids, merge=merges[1], trusted=True).detach()
                sums = sums.index_add(0, micro.tensor(owner), values.to(sums))
            found.append(sums)
        return found[0], found[1]


# --- Preferences: the better-rewarded of two answers to a prompt becomes likelier than the other ---
#
# Pairs are formed within a group: by reward, by author (`chosen` and `rejected`), or by both. Groups are never split, so
# neither are pairs. With h the log-ratio of a whole answer, log student - log reference, and d = h(preferred) - h(rejected):
#
#     dpo    -log sigmoid(reference_weight * d)              DPO, SPIN
#     ipo    (d - 1 / (2 * reference_weight))^2              IPO
#     orpo   -log sigmoid(log odds of the preferred - log odds of the rejected), no reference; odds p / (1 - p) of the
#            geometric mean p of an answer's token probabilities. ORPO adds the cross-entropy of the preferred answer
#
# Axis legend: P = pairs, N = tokens of the micro-batch.


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
    preference: AnyPreference = Field(DPO(), description="of pairwise: the loss of a pair")
    pairs: Literal["best_worst", "all", "authors"] = Field(
        "best_worst",
        description=(
            "of pairwise: the best-rewarded answer of a prompt against the worst, every two whose rewards differ, or every "
            "answer by `chosen` against every one by `rejected`, whatever their rewards"
        ),
    )
    chosen: AuthorName | None = Field(None, description="of pairwise: author of the preferred answers; default: any")
    rejected: AuthorName | None = Field(None, description="of pairwise: author of the rejected answers; default: any")

    @model_validator(mode="after")
    def _two_sides(self) -> Pairwise:
        sides = [side for side in (self.chosen, self.rejected) if side is not None]
        if len(sides) == 1:
            raise ValueError("chosen and rejected belong together: name the authors of both answers of a pair")
        if self.pairs == "authors" and not sides:
            raise ValueError("pairs: authors needs the authors of both answers: {chosen: data, rejected: student}, say")
        if sides and self.chosen == self.rejected:
            raise ValueError(
                f"chosen and rejected are both {self.chosen}: a pair has two authors. For pairs of one author's answers by "
                f"reward, set `on: [{self.chosen}]` instead"
            )
        if sides and self.on is not None:
            raise ValueError("chosen and rejected name the authors already: drop `on`")
        return self

    @property
    def authors(self) -> tuple[AuthorName, ...]:
        if self.chosen is None or self.rejected is None:
            return super().authors
        return (self.chosen, self.rejected)

    def form_needs(self, updates: int) -> Needs:
        needs = Needs(rewards=self.pairs != "authors")
        return needs | Needs(signals=((self.role, "logprobs_at"),)) if self.preference.by_reference else needs

    @property
    def parts(self) -> Iterable[Choice]:
        return [*super().parts, self.preference]

    def check(self, view: StageView) -> Iterable[str]:
        if view.rollout.samples == 1:
            yield "pairwise compares the samples of a prompt, but rollout.samples is 1. Set it to 2 or more."
        if any(environment is not None and environment.history == "split" for environment in view.environments):
            yield "pairwise with an environment whose history is split: pairs are made of whole rollouts. Set history to keep."
        if view.rollout.mixed_authors and "teacher" in (self.chosen, self.rejected):
            yield (
                "pairwise with pairs by author, and with rollout.teacher_prefix, takeover or demonstrations.cut an answer has two: the "
                "student and a teacher. Drop one of them."
            )
        alone = [
            key for key, writer in view.rollout.writers_by_key.items() if writer.share and writer.author != "student"
        ]
        missing = [
            author for author in (self.chosen, self.rejected) if author and author not in group_authors(view.rollout)
        ]
        if missing:
            example = f"{{kind: {missing[0]}, samples: 1}}"
            advice = (
                "Leave a sample to it: raise rollout.samples."
                if missing[0] == "student"
                else f"Add {example} to rollout.writers."
            )
            yield f"pairwise pairs {self.chosen} with {self.rejected} answers, and no sample of a group is by {missing[0]}. {advice}"
        if alone:
            yield (
                f"pairwise compares the answers to one prompt, but with rollout.{alone[0]} one writer answers all of them: no pair has two "
                "authors. Let it write some of every group instead, for example: rollout.writers: [{kind: data, samples: 1}]."
            )
        yield from super().check(view)

    def prepare(self, prepared: PreparedTerm) -> list[Pair]:
        groups: dict[str, list[Rollout]] = {}
        for rollout in prepared.batch.rollouts:
            rewarded = self.pairs == "authors" or prepared.batch.rewards.get(rollout.id) is not None
            if rewarded and prepared.counted[rollout.id].any():
                groups.setdefault(rollout.group, []).append(rollout)
        pairs = [pair for members in groups.values() for pair in self._pairs(members, prepared.batch.rewards)]
        prepared.metrics[f"pairs/{prepared.name}"] = len(pairs)
        return pairs

    def _pairs(self, members: Sequence[Rollout], rewards: RewardsById) -> list[Pair]:
        """The pairs of a group."""
        in_order = sorted(members, key=lambda rollout: (rollout.sample, rollout.id))
        first, second = (
            [rollout.id for rollout in in_order if author is None or (rollout.author == AUTHOR[author]).any()]
            for author in (self.chosen, self.rejected)
        )
        if self.pairs == "authors":
            return [(one, other) for one in first for other in second]
        known = {rollout.id: rewards[rollout.id] or 0.0 for rollout in members}  # none of them failed
        return preferences(
            [(known[name], name) for name in first], self.pairs, [(known[name], name) for name in second]
        )

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


def preferences(
    rewarded: Sequence[tuple[float, str]],
    pairs: Literal["best_worst", "all"],
    others: Sequence[tuple[float, str]] | None = None,
) -> list[Pair]:
    """(preferred, rejected) ids among the answers to one prompt, given as (reward, id) in the order of sampling.

    Equal rewards make no pair. `best_worst` breaks ties by taking the first best answer and the last worst one. `others`: the
    answers that can be rejected, if they differ from those that can be preferred.

    >>> preferences([(1.0, "a"), (0.0, "b"), (0.5, "c")], "best_worst")
    [('a', 'b')]
    >>> preferences([(1.0, "a"), (0.0, "b"), (1.0, "c")], "all")
    [('a', 'b'), ('c', 'b')]
    >>> preferences([(1.0, "a"), (0.5, "b")], "best_worst", [(0.0, "c"), (1.0, "d")])
    [('a', 'c')]
    """
    best, worst = (
        sorted(side, key=lambda entry: -entry[0]) for side in (rewarded, rewarded if others is None else others)
    )
    if pairs == "best_worst":
        best, worst = best[:1], worst[-1:]
    return [(name, other) for reward, name in best for less, other in worst if less < reward]
