"""Teachers made of the student: a copy that follows its weights, and the student itself as it is now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from opd.divergences import Projection
from opd.models.language_model import LanguageModel
from opd.teachers.local import LocalTeacher
from opd.teachers.scoring import Page, ScoringTeacher
from opd.types import WeightsRef


def copy_of(student: LanguageModel) -> LanguageModel:
    """The policy as it is now, adapters merged; what training does not change is shared with the student."""
    tensors, moving = student.weights(0).tensors, student.moving()
    clone = student.inference_copy()
    for name, parameter in clone.module.named_parameters():
        if name in moving:
            parameter.data = tensors[name].clone()
    return clone


class FollowingTeacher(LocalTeacher):
    """After every `every` steps it goes `rate` of the way to the student's weights; 1 is a copy.

    Means are kept in fp32, whatever the weights: in bfloat16 a step of a hundredth would round to none.
    """

    def __init__(
        self,
        name: str,
        role: str,
        student: LanguageModel,
        batch_tokens: int | None,
        stop_ids: tuple[int, ...],
        *,
        every: int,
        rate: float,
    ) -> None:
        super().__init__(name, role, copy_of(student), batch_tokens, stop_ids)
        self._every, self._rate = every, rate
        moving = student.moving()
        self._weights = {name: parameter for name, parameter in self._model.module.named_parameters() if name in moving}
        self._means = {
            name: parameter.detach().float() if rate < 1 else parameter.detach()
            for name, parameter in self._weights.items()
        }

    @torch.no_grad()
    def observe(self, step: int, weights: WeightsRef) -> None:
        if step % self._every:
            return
        self.version += 1
        for name, mean in self._means.items():
            mean.lerp_(weights.tensors[name].to(mean.dtype), self._rate)
        self._take_over()

    def state(self) -> Mapping[str, Tensor]:
        return self._means

    @torch.no_grad()
    def restore(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        super().restore(version, tensors)
        for name, mean in self._means.items():
            mean.copy_(tensors[name])
        self._take_over()

    def _take_over(self) -> None:
        for name, parameter in self._weights.items():
            if parameter.data_ptr() != self._means[name].data_ptr():
                parameter.copy_(self._means[name])


class LiveStudent(ScoringTeacher):
    """Scores with the weights that the step begins with; its head is kept, since a step may have several updates."""

    def __init__(
        self, name: str, role: str, student: LanguageModel, batch_tokens: int | None, stop_ids: tuple[int, ...]
    ) -> None:
        super().__init__(name, role, stop_ids, batch_tokens, student.device)
        self._student, self.context = student, student.context
        self._keep_head()

    def _keep_head(self) -> None:
        head = self._student.head
        kept = [None if part is None else part.detach() for part in (head.weight, head.bias)]
        if head.weight.requires_grad:
            kept = [None if part is None else part.clone() for part in kept]
        self._weight, self._bias = kept

    def hidden(self, page: Page) -> Tensor:
        return self._student.predict(page).hidden

    @property
    def width(self) -> int:
        return int(self._student.head.weight.shape[1])

    def project(self, hidden: Tensor) -> Projection:
        assert self._weight is not None
        now = self._student.project(hidden.to(self._weight.dtype))
        return self.tempered(replace(now, weight=self._weight, bias=self._bias).detach())

    def observe(self, step: int, weights: WeightsRef) -> None:
        self.version = weights.version
        self._keep_head()

    def restore(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        super().restore(version, tensors)
        self._keep_head()
