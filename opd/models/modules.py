"""Trainable modules alongside the student: the family `module`. A kind holds its settings and creates the module.

A module reads the student's hidden states in the same forward and backward pass. It has its own optimiser, learning rate and
gradient norm (`opd.loop.learner.Learner`). On several ranks, each has the full module.

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
    """What a module needs to know about the student."""

    width: int  # of the student's hidden states
    vocabulary: int
    device: torch.device
    dtype: torch.dtype  # of the module's weights: float32, or float64 if the student has float64
    seed: int  # from the stage's seed and the module's name, for the module's own generator of initial weights


class Module:
    """A named trainable module. `network` maps hidden states (N, width) to (N,) or (N, K) numbers."""

    def __init__(self, name: str, network: nn.Module) -> None:
        self.name, self.network = name, network

    def __call__(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.network(hidden)
        return found

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.network.named_parameters())

    def state(self) -> dict[str, Tensor]:
        """Tensors to save in a checkpoint."""
        return {name: tensor.detach() for name, tensor in self.network.state_dict().items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors from `state`, bit for bit."""
        own = self.state()
        for name in sorted(own.keys() | tensors.keys()):
            if name not in own or name not in tensors or own[name].shape != tensors[name].shape:
                raise ModelError(f"module {self.name!r}: {name} of the checkpoint is missing or of another shape.")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


class ModuleKind(Choice):
    """To add your own, subclass this and define `open`."""

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
        """Number of parameters, for the plan's memory estimate."""
        return 0


AnyModule = Annotated[ModuleKind, Family("module")]


class ValueHead(ModuleKind):
    """One number per position: a linear layer that starts at zero."""

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
    """Create a stage's modules. Only their own random states are used."""
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
