"""AdamW with warm-up, a schedule and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from opd.config import Train
from opd.errors import ModelError


class Optimiser:
    def __init__(self, parameters: Mapping[str, nn.Parameter], spec: Train) -> None:
        self._spec, self._parameters = spec, dict(parameters)
        decayed = [parameter for parameter in parameters.values() if parameter.ndim > 1]
        others = [parameter for parameter in parameters.values() if parameter.ndim <= 1]  # norms and biases
        groups = [{"params": decayed, "weight_decay": spec.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.updates = 0  # applied so far
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=spec.lr, betas=spec.betas, eps=spec.eps
        )

    def clip(self) -> float:
        """The gradient norm, after which gradients are at most `clip` long."""
        limit = math.inf if self._spec.clip is None else self._spec.clip
        return float(nn.utils.clip_grad_norm_(list(self._parameters.values()), limit))

    def step(self, step: int) -> float:
        """Apply the gradients of step `step` (counted from 1); returns the learning rate used."""
        rate = learning_rate(step, self._spec)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self.updates += 1
        self.adamw.zero_grad(set_to_none=True)
        return rate

    def discard(self) -> None:
        """Forget the gradients of an update that must not be applied."""
        self.adamw.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Moments by parameter name, for a checkpoint."""
        found = {}
        for name, parameter in self._parameters.items():
            for key, value in self.adamw.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        return found

    def restore(self, tensors: Mapping[str, torch.Tensor], updates: int) -> None:
        """Take over what `tensors` gave, bit for bit."""
        keys = {name: name.rpartition(".") for name in tensors}
        unknown = sorted({parameter for parameter, _, _ in keys.values()} - self._parameters.keys())
        if unknown:
            raise ModelError(
                f"optimiser state of {unknown[0]!r}, which the student does not train. Is it another model?"
            )
        for name, (owner, _, key) in keys.items():
            parameter = self._parameters[owner]
            device = "cpu" if key == "step" else parameter.device  # where AdamW itself keeps its count
            self.adamw.state[parameter][key] = tensors[name].to(device, copy=True)
        self.updates = updates


def learning_rate(step: int, spec: Train) -> float:
    """Linear warm-up, then constant, linear to zero, or half a cosine to zero.

    >>> [learning_rate(step, Train(steps=4, lr=1.0, warmup=2, schedule="linear")) for step in (1, 2, 3, 4)]
    [0.5, 1.0, 0.6666666666666667, 0.33333333333333337]
    """
    if step <= spec.warmup:
        return spec.lr * step / spec.warmup
    done = (step - max(spec.warmup, 1)) / max(spec.steps - max(spec.warmup, 1) + 1, 1)
    if spec.schedule == "linear":
        return spec.lr * (1 - done)
    if spec.schedule == "cosine":
        return spec.lr * 0.5 * (1 + math.cos(math.pi * done))
    return spec.lr
