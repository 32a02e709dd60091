"""Divergences from a formula alone: the gradient comes from autograd, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from opd.divergences.formulas import Formula


@dataclass(frozen=True)
class CustomFormula(Formula):
    """A formula of log-probs (N, K) to values (N,), in the place of one of the built-in kinds."""

    value: Callable[[Tensor, Tensor], Tensor] | None = None

    def __call__(self, student: Tensor, teacher: Tensor) -> Tensor:
        assert self.value is not None
        return self.value(student, teacher)

    @property
    def slope_at_one(self) -> float | None:
        return None

    def terms(self, student: Tensor, teacher: Tensor, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The value itself, and its derivative with respect to log S, which stands where S times the slope does."""
        with torch.enable_grad():
            leaf = student.detach().clone().requires_grad_()
            value = self(leaf, teacher)
            (slope,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach()[:, None], slope.clone()  # autograd may give a view of one number

    def outer(self, total: Tensor) -> tuple[Tensor, Tensor]:
        return total, torch.ones_like(total)
