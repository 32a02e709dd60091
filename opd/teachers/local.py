"""A teacher in this process: a model that scores exact token ids in packed batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opd.divergences import Projection
from opd.models.graphed import PassGraphs
from opd.models.language_model import LanguageModel
from opd.teachers.scoring import Page, ScoringTeacher
from opd.types import Rendered, SignalNeed


class LocalTeacher(ScoringTeacher):
    """A frozen checkpoint."""

    def __init__(
        self, name: str, role: str, model: LanguageModel, batch_tokens: int | None, stop_ids: tuple[int, ...]
    ) -> None:
        super().__init__(name, role, stop_ids, batch_tokens, model.device)
        self._model, self.context = model, model.context
        self._heads: dict[torch.device, tuple[Tensor, Tensor | None]] = {}  # copies on other devices than its own
        model.module.requires_grad_(False)
        model.graphs = model.graphs or PassGraphs.of(model)

    @property
    def model(self) -> LanguageModel:
        return self._model

    def hidden(self, page: Page) -> Tensor:
        return self._model.predict(page).hidden

    def _answers(self, asked: Sequence[tuple[list[Rendered], list[str]]], need: SignalNeed) -> Iterable[list[Any]]:
        fresh = [not self.is_known(ids, need) for _, ids in asked]
        values = self._fitting if self._model.passes_alone else self._values
        turns = self._model.passes([ids for (_, ids), new in zip(asked, fresh, strict=True) if new])
        for (texts, ids), new in zip(asked, fresh, strict=True):
            if new:
                next(turns)
            yield values(texts, need, ids)
        for _ in turns:  # none are left; where other ranks have more of them, this one joins in
            pass

    @property
    def width(self) -> int:
        return int(self._model.head.weight.shape[1])

    def project(self, hidden: Tensor) -> Projection:
        """On the device of the hidden states: the student's, where a loss is computed, has its own copy of the head."""
        projection = self._model.project(hidden.to(self._model.dtype))
        if hidden.device != projection.weight.device:
            weight, bias = self._head_on(hidden.device, projection)
            projection = replace(projection, weight=weight, bias=bias)
        return self.tempered(projection)

    def _head_on(self, device: torch.device, head: Projection) -> tuple[Tensor, Tensor | None]:
        if device not in self._heads:
            self._heads[device] = head.weight.to(device), None if head.bias is None else head.bias.to(device)
        return self._heads[device]
