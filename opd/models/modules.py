"""Trainable modules beside the student: the family `module`. A kind holds its settings and opens the module.

A module reads the student's hidden states inside its pass, in the same forward and backward. It has an optimiser, a learning
rate and a gradient norm of its own: `opd.loop.learner.Learner`. On ranks every one has all of it.

    modules: {value: {kind: head, lr: 1.0e-3}}
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from opd.common.errors import ModelError
from opd.models.optimisers import AdamW, AnyOptimiser
from opd.registry import Choice, Family, Positive

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True)
class ModuleInputs:
    """What a module can know of the student that it reads."""

    width: int  # of its hidden states
    vocabulary: int
    device: torch.device
    dtype: torch.dtype  # of the module's weights: float32, or float64 where the student has that
    seed: int  # of the stage and the module's name: first weights are drawn from a generator of its own


class Module:
    """A trainable module by its name. `network` maps hidden states (N, width) to (N,) or (N, K) numbers."""

    def __init__(self, name: str, network: nn.Module) -> None:
        self.name, self.network = name, network

    def __call__(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.network(hidden)
        return found

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.network.named_parameters())

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {name: tensor.detach() for name, tensor in self.network.state_dict().items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """What `state` gave, bit for bit."""
        own = self.state()
        for name in sorted(own.keys() | tensors.keys()):
            if name not in own or name not in tensors or own[name].shape != tensors[name].shape:
                raise ModelError(f"module {self.name!r}: {name} of the checkpoint is missing or of another shape.")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


class ModuleKind(Choice):
    """One of your own is a subclass with `open`."""

    family = "module"
    lr: float = Field(
        1e-5, gt=0, le=1e9, description="largest learning rate; it follows train.warmup and train.schedule"
    )
    clip: float | None = Field(1.0, gt=0, description="largest gradient norm of the module; null: no clipping")
    every: Positive = Field(1, description="update it in every so many steps; gradients of the others are dropped")
    optimiser: AnyOptimiser = Field(AdamW(), description="of the module: adamw, muon, adamw8bit, or one of your own")

    @abstractmethod
    def open(self, name: str, inputs: ModuleInputs) -> Module:
        raise NotImplementedError

    def size(self, width: int) -> int:
        """Parameters, for the plan's estimate of memory."""
        return 0


AnyModule = Annotated[ModuleKind, Family("module")]


class ValueHead(ModuleKind):
    """One number per position: a linear layer, which begins at 0 everywhere."""

    name = "head"

    def open(self, name: str, inputs: ModuleInputs) -> Module:
        import torch

        class Numbers(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = torch.nn.Linear(inputs.width, 1, device="meta")
                self.linear.to_empty(device=inputs.device).to(inputs.dtype)
                torch.nn.init.zeros_(self.linear.weight)
                torch.nn.init.zeros_(self.linear.bias)

            def forward(self, hidden: Tensor) -> Tensor:
                found: Tensor = self.linear(hidden)
                return found.squeeze(-1)

        return Module(name, Numbers())

    def size(self, width: int) -> int:
        return width + 1


def open_modules(kinds: Mapping[str, ModuleKind], student: Any, seed: int) -> dict[str, Module]:
    """The modules of a stage. No random state but their own is touched."""
    import hashlib

    import torch

    dtype = torch.float64 if student.dtype == torch.float64 else torch.float32
    found = {}
    for name, kind in kinds.items():
        own = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1
        width = student.head.weight.shape[-1]
        found[name] = kind.open(name, ModuleInputs(width, student.size, student.device, dtype, own))
        if not any(parameter.requires_grad for parameter in found[name].parameters().values()):
            raise ModelError(f"module {name!r}, of kind {kind.name}, has no parameter to train.")
    return found
