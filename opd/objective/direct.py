"""A divergence to the teacher, differentiated exactly, at every token of the chosen authors."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field, model_validator

from opd.divergences.kinds import AnyDivergence, AnySupport, Full, ReverseKL
from opd.objective.term import CorrectedTerm
from opd.settings import Choice, Needs

if TYPE_CHECKING:
    from torch import Tensor

    from opd.divergences import Projection, RowStatistics
    from opd.divergences.mixture import Source
    from opd.objective.micro import MicroBatch
    from opd.objective.prepare import PreparedTerm
    from opd.types import SignalKind, TopK


class Direct(CorrectedTerm):
    name = "direct"
    by_default = True
    flat = ("divergence", "support")

    divergence: AnyDivergence = Field(ReverseKL(), description="of a direct term; of policy_gradient: whose advantage")
    support: AnySupport = Field(
        Full(), description="of a direct term: the exact full vocabulary, or the k likeliest ids"
    )
    temperature: float = Field(1.0, ge=0.01, le=100, description="of the divergence; sampling has its own")

    @model_validator(mode="after")
    def _means_something(self) -> Direct:
        if self.support.for_f_divergences and not self.divergence.f_divergence:
            raise ValueError(
                f"closure generalised is defined for f-divergences, and {self.divergence.name} is not one: "
                "use closure: tail"
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
        k = self.support.teacher_ids
        if k is None or (self.temperature != 1.0 and not self.support.leaves_rest):
            return needs | Needs(signals=((self.role, "hidden"),))
        return needs | Needs(topk=((self.role, k),))

    def advice(self, offers: Collection[SignalKind]) -> str:
        if "topk" not in offers:
            return super().advice(offers)
        return (
            "Of a teacher that gives its likeliest ids alone: support: topk with side: teacher, and at another temperature than 1, "
            "at which the mass of the others is not known, closure: renormalised."
        )

    def loss(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> Tensor:
        import torch

        from opd.divergences import divergence

        if self.correction is not None:
            weight_N = self._corrected(prepared, micro, weight_N)
        total = micro.projection.hidden.new_zeros((), dtype=torch.float32)
        for rows, teacher in micro.teacher_distributions(self.role, weight_N != 0):
            if not rows.size:
                continue
            student, tokens = micro.rows(rows), micro.tokens(rows)
            result = divergence(
                self.divergence.formula(),
                student,
                teacher,
                weight=micro.tensor(weight_N[rows]),
                temperature=self.temperature,
                merge=micro.merge,
                tokens=tokens,
                trusted=True,
                **self.support.truncation,
            )
            if (unknown := result.statistics.vague_tail) is not None and self.support.truncation["closure"] == "tail":
                micro.count(f"tail_unknown/{prepared.name}", unknown)
            self._note(micro, rows, self._untempered(micro, result.statistics, student, teacher, tokens))
            total = total + result.loss
        return total

    def _untempered(
        self, micro: MicroBatch, known: RowStatistics, student: Projection, teacher: Source | TopK, tokens: Tensor
    ) -> RowStatistics:
        """Statistics at temperature 1, for which a tempered divergence needs another pass."""
        from opd.divergences import TopK, divergence, statistics

        if self.temperature == 1.0:
            return known
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

    def _note(self, micro: MicroBatch, rows: np.ndarray, statistics: RowStatistics) -> None:
        assert statistics.reverse_kl is not None
        assert statistics.logprob is not None
        micro.note("reverse_kl", rows, statistics.reverse_kl)
        micro.note("entropy", rows, statistics.entropy)
        if self.correction is None:
            micro.note_mismatch(rows, statistics.logprob)

    def _corrected(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> np.ndarray:
        """A direct loss at t depends on the tokens before t alone, so their ratios, truncated, are its correction."""
        import torch

        assert self.correction is not None
        rows = np.arange(weight_N.size)
        with torch.no_grad():
            log_ratio = micro.log_ratio(rows, micro.current(rows))
        factor, bites = self.correction.apply(log_ratio, micro.segment(rows))
        micro.count(f"corrected/{prepared.name}", bites[micro.tensor(weight_N != 0)])
        return (weight_N * factor.cpu().numpy()).astype(np.float32)
