"""AdamW with warm-up, a schedule and gradient clipping."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from opd.config import Train
from opd.errors import ModelError, UserError

MASTER = "master"  # of a checkpoint's tensors: NAME.master beside NAME.exp_avg
_HOOKS = WeakIdKeyDictionary()  # a weight of half precision -> what gives its gradients to the newest optimiser


class Optimiser:
    """Weights of half precision are computed with, and trained through fp32 masters of theirs.

    Their gradients are taken over as each micro-batch gives them, and added up in fp32. Weights that are fp32 themselves,
    LoRA's among them, are their own masters. `train.precision: bfloat16` trains half weights as they are.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], spec: Train) -> None:
        self._spec, self._parameters = spec, dict(parameters)
        self._halves = {
            name: parameter
            for name, parameter in parameters.items()
            if parameter.dtype != torch.float32 and spec.precision != "bfloat16"
        }
        self._masters = {
            name: nn.Parameter(self._here(parameter.detach()).float()) if name in self._halves else self._own(parameter)
            for name, parameter in parameters.items()
        }
        self._hooks = {name: self._hook(parameter, self._masters[name]) for name, parameter in self._halves.items()}
        masters = self._masters.values()
        decayed = [parameter for parameter in masters if parameter.ndim > 1]
        others = [parameter for parameter in masters if parameter.ndim <= 1]  # norms and biases
        groups = [{"params": decayed, "weight_decay": spec.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.updates = 0  # applied so far
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=spec.lr,
            betas=spec.betas,
            eps=spec.eps,
            fused=True,  # one pass over weights, moments and gradients
        )

    def clip(self) -> float:
        """The gradient norm, after which gradients are at most `clip` long."""
        if any(_HOOKS[parameter] is not self._hooks[name] for name, parameter in self._halves.items()):
            raise UserError(
                "another optimiser has been made for these weights, and it gets their gradients now. Go on with that one, "
                "or make a new one."
            )
        return self._clip(math.inf if self._spec.clip is None else self._spec.clip)

    def _clip(self, limit: float) -> float:
        masters = list(self._masters.values())
        total = nn.utils.get_total_norm([master.grad for master in masters if master.grad is not None])
        return shorten(masters, limit, total)

    def _own(self, parameter: nn.Parameter) -> nn.Parameter:
        """A weight that is its own master."""
        return parameter

    @staticmethod
    def _here(tensor: torch.Tensor) -> torch.Tensor:
        """What this process has of a weight: all of it, unless weights are spread over ranks."""
        return tensor

    def _part(self, tensor: torch.Tensor, owner: nn.Parameter) -> torch.Tensor:
        """What this process keeps of a whole tensor that belongs to a weight."""
        return tensor

    def step(self, step: int) -> float:
        """Apply the gradients of step `step` (counted from 1); returns the learning rate used."""
        rate = learning_rate(step, self._spec)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self._round()
        self.updates += 1
        self.discard()
        return rate

    @torch.no_grad()
    def _round(self) -> None:
        """The weights to compute with, from their masters; in place, so that a sampler goes on sharing them."""
        if self._halves:
            halves = [self._here(half) for half in self._halves.values()]
            torch._foreach_copy_(halves, [self._masters[name] for name in self._halves])

    def gradients(self, names: Iterable[str]) -> list[torch.Tensor]:
        """Of these weights, as they are now: what this process has of them."""
        owners = [self._masters[name] if name in self._halves else self._parameters[name] for name in names]
        return [
            torch.zeros_like(self._here(owner)) if owner.grad is None else self._here(owner.grad) for owner in owners
        ]

    def discard(self) -> None:
        """Forget the gradients of an update that must not be applied, those that no master has taken over among them."""
        self.adamw.zero_grad(set_to_none=True)
        for parameter in self._parameters.values():
            parameter.grad = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Moments by parameter name, and masters, for a checkpoint."""
        found = {f"{name}.{MASTER}": self._masters[name].detach() for name in self._halves}
        for name, master in self._masters.items():
            for key, value in self.adamw.state.get(master, {}).items():
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
        with torch.no_grad():
            for name, half in self._halves.items():  # where the checkpoint has none: saved in another precision
                self._masters[name].copy_(self._here(half))
            for name, (owner, _, key) in keys.items():
                master, part = self._masters[owner], self._part(tensors[name], self._parameters[owner])
                if key == MASTER:
                    master.copy_(part)
                else:
                    self.adamw.state[master][key] = part.to(master.device, copy=True)
        self._round()
        self.updates = updates

    @classmethod
    def _hook(cls, half: nn.Parameter, master: nn.Parameter) -> RemovableHandle:
        """A gradient goes to one master only, so an optimiser made earlier loses this weight."""
        if half in _HOOKS:
            _HOOKS[half].remove()
        handle = half.register_post_accumulate_grad_hook(partial(_take_over, weakref.ref(master), cls._here))
        _HOOKS[half] = handle
        return handle


def _take_over(
    master: weakref.ref[nn.Parameter], here: Callable[[torch.Tensor], torch.Tensor], half: nn.Parameter
) -> None:
    """The gradient that a weight has just got goes to its master, as long as there is one."""
    owner = master()
    if owner is None or half.grad is None:
        return
    grad = here(half.grad)
    owner.grad = grad.float() if owner.grad is None else owner.grad.add_(grad)
    half.grad = None


def shorten(parameters: list[nn.Parameter], limit: float, total: torch.Tensor) -> float:
    """Gradients of norm `total` to `limit` at most; shorter ones, which torch would multiply by one, are left alone."""
    if limit / (total + 1e-6) < 1:
        nn.utils.clip_grads_with_norm_(parameters, limit, total)
    return float(total)


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
