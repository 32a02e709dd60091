"""Terms on hidden states: those of student and teacher themselves (OPRD), or mapped into each other's space (DSKD, DSKDv2).

Hidden states are the last ones, after the final norm: what the output head reads. An exact teacher sends them anyway. OPRD can
compare those after other layers, too.

Axis legend: N = response tokens of the student, M = tokens of the teacher, d and D = widths of their hidden states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from opd.common.errors import ModelError
from opd.divergences.kinds import DivergenceKind, ForwardKL
from opd.objective.batch import concatenated
from opd.objective.term import SpanEvents, Term, events_of, present_authors
from opd.records import Layers
from opd.registry import Choice, Family, Needs, StageView, Word

if TYPE_CHECKING:
    from torch import Tensor

    from opd.divergences import Projection
    from opd.divergences.projection import MergeGroups
    from opd.models.modules import ModuleKind, Spaces
    from opd.objective.micro import MicroBatch
    from opd.objective.objective import PreparedTerm


class Representation(Term):
    """Mean squared distance of hidden states, over their width and over layers (OPRD). Both models need the same width and depth."""

    name = "representation"
    one_model = True

    layers: Layers = Field(
        "last", description="of representation: the layers after which states are compared; even, odd: counted from 0"
    )

    @property
    def states(self) -> Layers:  # type: ignore[override]
        return self.layers

    def form_needs(self, updates: int) -> Needs:
        return Needs(signals=((self.role, "hidden" if self.layers == "last" else "layers"),))

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if self.layers != "last" and view.train is not None and not view.train.learn:
            yield f"representation with layers {self.layers}, and train.learn false: states of several layers are not kept. Use layers: last."
        others = {term.states for term in view.terms} - {"last", self.layers}
        if self.layers != "last" and others:
            yield f"representation with layers {self.layers}, next to a term with layers {others.pop()}: a pass keeps one set. Use one of them."

    def loss(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> Tensor:
        import torch

        total = micro.projection.hidden.new_zeros((), dtype=torch.float32)
        for rows, student, theirs in self._compared(micro, weight_N != 0):
            if student.shape[-1] != theirs.shape[-1]:
                raise ModelError(
                    f"objective: representation compares hidden states number by number, and the student's have {student.shape[-1]} "
                    f"and the teacher's {theirs.shape[-1]}. Use form: dskd, which maps one to the other."
                )
            if student.shape != theirs.shape or not student.numel():
                raise ModelError(
                    f"objective: representation with layers {self.layers} compares {student.shape[1]} layers of the student with "
                    f"{theirs.shape[1]} of the teacher. Use layers: last."
                )
            distance = (student.to(micro.wide) - theirs.detach().to(micro.wide)).square().flatten(1).mean(-1)
            total = total + (distance * micro.tensor(weight_N[rows])).sum()
        return total

    def _compared(self, micro: MicroBatch, open_N: np.ndarray) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
        """(rows, the student's states, the teacher's): (n, D), or (n, L, D)."""
        from opd.divergences import Projection

        if self.layers == "last":
            for rows, teacher in micro.teacher_projections(self.role, open_N):
                assert isinstance(teacher, Projection)  # a mixture is rejected with the recipe
                yield rows, micro.rows(rows).hidden, teacher.hidden
            return
        assert micro.states is not None
        for rows, _, theirs in micro.teacher_states(self.role, "layers", open_N):
            yield rows, micro.states[micro.tensor(rows)], theirs


# --- Dual-space distillation: each model's states are mapped to the other's space, and go through the head there ---
#
# student's space   t2s = the teacher's states there. The map learns to predict labels: -log t2s(label). The student learns t2s, held
#                   fixed, where t2s predicts its label
# teacher's space   s2t = the student's states there, which learn the teacher's distribution
#
# Which tokens belong together is learnt, by attention from the student's tokens to those of the teacher (DSKD), or they are those
# that both models have after the same text (DSKDv2). `module.projectors` holds the maps and says which.


@dataclass(frozen=True, eq=False)
class Mapped:
    """Tokens of one teacher in a micro-batch, and their states in the other model's space."""

    rows_N: np.ndarray  # the student's tokens
    weight_N: np.ndarray
    t2s_Nd: Tensor
    rows_M: np.ndarray  # the teacher's tokens
    weight_M: np.ndarray
    s2t_MD: Tensor


class DualSpace(Term):
    name = "dskd"
    flat = ("divergence",)
    crosses = frozenset({"hidden"})
    one_model = uses_projectors = True

    module: Word = Field("spaces", description="of dskd: name of the module of kind projectors")
    divergence: Annotated[DivergenceKind, Family("divergence", default="forward_kl")] = Field(
        ForwardKL(), description="of dskd: in both spaces"
    )
    temperature: float = Field(2.0, ge=0.01, le=100, description="of dskd: of the divergence")
    labels: Literal["tokens", "teacher"] = Field(
        "tokens",
        description="of dskd: what the teacher's mapped states must predict: the next token, or the teacher's likeliest",
    )
    masked: bool = Field(
        True, description="of dskd: the student learns from mapped states only where they predict their label"
    )

    @model_validator(mode="after")
    def _means_something(self) -> DualSpace:
        if self.divergence.adapts:
            raise ValueError(
                f"adapt gives every answer its own alpha of {self.divergence.name}, which needs form: direct"
            )
        return self

    def form_needs(self, updates: int) -> Needs:
        return Needs(signals=((self.role, "hidden"),), modules=(self.module,))

    @property
    def parts(self) -> Iterable[Choice]:
        return [*super().parts, self.divergence]

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if self.labels == "tokens" and "student" in self.authors and present_authors(view.rollout)["student"] > 0:
            yield (
                "dskd with labels: tokens maps the teacher's states to the tokens that were written, and of the student's own samples "
                "these say nothing about the teacher. Set labels: teacher, or on: [data, teacher]."
            )

    def check_module(self, kind: ModuleKind) -> Iterable[str]:
        if self.labels == "teacher" and getattr(kind, "align", "tokens") == "attention":
            yield (
                "dskd with labels: teacher takes the teacher's likeliest token at the same place, and with align: attention none of its "
                f"places is the same. Set modules.{self.module}.align: tokens, or labels: tokens."
            )

    def loss(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> Tensor:
        import torch

        total = micro.projection.hidden.new_zeros((), dtype=torch.float32)
        with torch.autocast(micro.device.type, enabled=False):
            for events in events_of(micro, self.role, weight_N):
                mapped = self._mapped(micro, events, weight_N)
                if mapped.rows_N.size:
                    total = total + self._in_students_space(prepared, micro, events, mapped)
                    total = total + self._in_teachers_space(micro, events, mapped)
        return total

    def _mapped(self, micro: MicroBatch, events: SpanEvents, weight_N: np.ndarray) -> Mapped:
        spaces: Any = micro.modules[self.module]
        return attended(micro, events, weight_N, spaces) if spaces.attends else same_tokens(micro, events, spaces)

    def _in_students_space(
        self, prepared: PreparedTerm, micro: MicroBatch, events: SpanEvents, mapped: Mapped
    ) -> Tensor:
        from opd.divergences import divergence, token_logprobs
        from opd.divergences.projection import canonical_ids

        student = micro.projection.rows(micro.tensor(mapped.rows_N))
        t2s = replace(student.detach(), hidden=mapped.t2s_Nd.to(student.hidden.dtype))
        labels, known = self._labels(micro, events, mapped)
        weight = micro.tensor(mapped.weight_N) * known
        predicted = -(token_logprobs(t2s, labels, merge=micro.merge, trusted=True) * weight).sum()
        agree = known & (_likeliest(t2s.detach(), micro.merge) == canonical_ids(labels, micro.merge))
        micro.count(f"agreed/{prepared.name}", agree[known])
        taught = divergence(
            self.divergence.formula(), student, t2s.detach(), weight=weight * agree if self.masked else weight,
            temperature=self.temperature, merge=micro.merge, trusted=True,
        )  # fmt: skip
        return predicted + taught.loss

    def _in_teachers_space(self, micro: MicroBatch, events: SpanEvents, mapped: Mapped) -> Tensor:
        from opd.divergences import divergence

        teacher = _head(micro, events, mapped.rows_M)
        s2t = replace(teacher, hidden=mapped.s2t_MD.to(teacher.hidden.dtype))
        weight = micro.tensor(mapped.weight_M)
        return divergence(
            self.divergence.formula(), s2t, teacher, weight=weight, temperature=self.temperature,
            merge=_stops(micro, events), trusted=True,
        ).loss  # fmt: skip

    def _labels(self, micro: MicroBatch, events: SpanEvents, mapped: Mapped) -> tuple[Tensor, Tensor]:
        """(N,) the student's ids that mapped states must predict, and which of them exist."""
        import torch

        if self.labels == "tokens":
            tokens = micro.tokens(mapped.rows_N)
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        likeliest = _likeliest(_head(micro, events, mapped.rows_M), _stops(micro, events))
        if not events.crossed:
            return likeliest, likeliest < micro.projection.vocabulary
        ours, theirs = events.teacher.matched
        table = np.full(max(int(theirs.max(initial=0)), *events.teacher.stop_ids) + 1, -1, dtype=np.int64)
        table[theirs] = ours
        table[list(events.teacher.stop_ids)] = micro.merge[0][0]
        found = micro.tensor(np.append(table, -1))[likeliest.clamp(max=table.size)]
        return found.clamp(min=0), found >= 0


def same_tokens(micro: MicroBatch, events: SpanEvents, spaces: Spaces) -> Mapped:
    """The tokens that both models have after the same text. The others take no part."""
    s0, s1, t0, t1 = events.spans.T
    single = (s1 - s0 == 1) & (t1 - t0 == 1)
    ours, theirs, weight = s0[single], t0[single], events.weight[single].astype(np.float32)
    student = micro.projection.rows(micro.tensor(ours))
    t2s = spaces.to_student(events.hidden[micro.tensor(theirs)].to(micro.wide))
    return Mapped(ours, weight, t2s, theirs, weight, spaces.to_teacher(student.hidden.to(micro.wide), student.weight))


def attended(micro: MicroBatch, events: SpanEvents, weight_N: np.ndarray, spaces: Spaces) -> Mapped:
    """Every token of an answer attends to all of the same answer's tokens on the other side."""
    import torch

    wide, device = micro.wide, micro.device
    spanned = np.zeros(weight_N.size, dtype=bool)
    for s0, s1 in events.spans[:, :2]:
        spanned[s0:s1] = True
    ours = np.flatnonzero(spanned & (weight_N != 0))
    answers = np.repeat(np.arange(len(micro.pack.rollouts)), micro.pack.response_lengths)
    teacher = _head(micro, events, np.arange(events.ids.size))
    head, own_ids = teacher.weight.to(wide), concatenated(micro.pack.rollouts, "response_ids").astype(np.int64)
    scale = head.std()
    keys = _with_previous(head, events.ids.astype(np.int64), events.answer) / scale
    query = spaces.query(
        _with_previous(micro.projection.weight.detach().to(wide), own_ids, answers)[micro.tensor(ours)]
    )
    states = events.hidden.to(device, wide)
    states = states / states.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)
    theirs = spaces.to_student(states + head[micro.tensor(events.ids.astype(np.int64))] / scale)
    student = micro.projection.rows(micro.tensor(ours))
    mine = spaces.to_teacher(student.hidden.to(wide), student.weight)
    parts: list[tuple[np.ndarray, np.ndarray, Tensor, Tensor]] = []
    for answer in np.unique(answers[ours]):
        here, there = np.flatnonzero(answers[ours] == answer), np.flatnonzero(events.answer == answer)
        rows, columns = micro.tensor(here), micro.tensor(there)
        score = query[rows] @ keys[columns].T / keys.shape[1] ** 0.5
        parts.append((here, there, score.softmax(-1) @ theirs[columns], score.T.softmax(-1) @ mine[rows]))
    weight = [np.full(there.size, weight_N[ours[here]].mean()) for here, there, _, _ in parts]
    return Mapped(
        ours, weight_N[ours], torch.cat([part[2] for part in parts]),
        np.concatenate([part[1] for part in parts]), np.concatenate(weight).astype(np.float32), torch.cat([part[3] for part in parts]),
    )  # fmt: skip


def _with_previous(head: Tensor, ids: np.ndarray, answer: np.ndarray) -> Tensor:
    """(n, 2w) the head's rows of the token before and of the token itself; 0 before the first token of an answer."""
    import torch

    from opd.divergences.projection import upload

    rows = head[upload(ids, head.device)]
    before = torch.cat([torch.zeros_like(rows[:1]), rows[:-1]])
    first = np.diff(answer, prepend=-1) != 0
    return torch.cat([before.masked_fill(upload(first, head.device)[:, None], 0), rows], dim=-1)


def _head(micro: MicroBatch, events: SpanEvents, rows: np.ndarray) -> Projection:
    """The teacher's distributions at some of its tokens, without gradients."""
    from opd.objective.micro import in_half

    found: Projection = events.teacher.project(events.hidden[micro.tensor(rows)]).detach()
    return in_half(found, micro.projection.hidden.dtype)


def _stops(micro: MicroBatch, events: SpanEvents) -> MergeGroups:
    return (tuple(events.teacher.stop_ids),) if events.crossed else micro.merge


def _likeliest(projection: Projection, merge: MergeGroups) -> Tensor:
    """(N,) the likeliest id of each row, stop ids as one."""
    from opd.divergences import likeliest_ids
    from opd.divergences.projection import canonical_ids

    return canonical_ids(likeliest_ids(projection, 1)[0][:, 0], merge)
