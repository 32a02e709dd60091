"""A teacher in this process: a model that scores exact token ids in packed batches."""

from __future__ import annotations

from torch import Tensor

from opd.divergences import Projection
from opd.models.language_model import LanguageModel
from opd.teachers.scoring import Page, ScoringTeacher


class LocalTeacher(ScoringTeacher):
    """A frozen checkpoint."""

    def __init__(
        self, name: str, role: str, model: LanguageModel, batch_tokens: int, stop_ids: tuple[int, ...]
    ) -> None:
        super().__init__(name, role, stop_ids, batch_tokens, model.device)
        self._model, self.context = model, model.context
        model.module.requires_grad_(False)

    @property
    def model(self) -> LanguageModel:
        return self._model

    def hidden(self, page: Page) -> Tensor:
        return self._model.predict(page).hidden

    def project(self, hidden: Tensor) -> Projection:
        return self._model.project(hidden.to(self._model.dtype))
