"""Optimisers: the family `optimiser`. A kind holds its settings and creates torch optimisers.

`opd.loop.learner.Optimiser` handles masking, master weights, clipping and checkpoints for every kind. No torch at import.
"""

from __future__ import annotations

import importlib.util
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from opd.common.errors import RecipeError
from opd.registry import Choice, Family, Fraction, Positive

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    Gather = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class OptimisedWeights:
    """What an optimiser is created for. On several ranks, `masters` are this rank's rows of each weight; `shapes` are full shapes.

    `whole` gathers a weight's rows; all ranks must call it. `rows` takes this rank's rows of a full tensor.
    """

    masters: Mapping[str, nn.Parameter]
    shapes: Mapping[str, tuple[int, ...]]
    outer: frozenset[str]  # names of embeddings and the output head
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    sharded: bool
    whole: Gather
    rows: Gather

    def hidden_matrices(self) -> list[str]:
        return [name for name, shape in self.shapes.items() if len(shape) == 2 and name not in self.outer]

    def groups(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Parameter groups for torch: norms and biases are not decayed. `names`: only these weights; None: all."""
        chosen = [self.masters[name] for name in (self.masters if names is None else names)]
        decayed = [parameter for parameter in chosen if parameter.ndim > 1]
        others = [parameter for parameter in chosen if parameter.ndim <= 1]  # norms and biases
        found = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return [group for group in found if group["params"]]

    def adamw(self, names: Sequence[str] | None = None) -> list[Optimizer]:
        """AdamW for some weights, or for all. An empty list if there are no weights."""
        import torch

        groups = self.groups(names)
        if not groups:
            return []
        fused = True  # one pass over weights, moments and gradients
        return [torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused)]


class OptimiserKind(Choice):
    """To add your own, subclass this and define `open`."""

    family = "optimiser"
    title: ClassVar[str]  # in plans

    @abstractmethod
    def open(self, weights: OptimisedWeights) -> list[Optimizer]:
        """Torch optimisers that together update every weight once. Their state is tensors by name, in torch's layout."""
        raise NotImplementedError

    def state_bytes(self, matrices: int, others: int) -> int:
        """Bytes of optimiser state for this many numbers in hidden matrices and in other weights."""
        return 8 * (matrices + others)

    def gathered_bytes(self, numbers: int) -> int:
        """Bytes gathered for one update of sharded hidden matrices with this many numbers, those of all ranks of a group together."""
        return 0

    def update_bytes(self, matrix: int) -> int:
        """Temporary bytes while one sharded hidden matrix with this many numbers is updated."""
        return 0

    def to_plain(self, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The state of one weight as plain tensors and numbers, for a checkpoint."""
        yield from state.items()

    def from_plain(self, state: dict[str, Tensor], weight: Tensor) -> dict[str, Any]:
        """Convert the output of `to_plain` back to the optimiser's own state."""
        return dict(state)

    def require(self) -> None:
        """Raise an error if a package is not installed, before anything is loaded."""


OPTIMISERS = Family("optimiser", default="adamw")
AnyOptimiser = Annotated[OptimiserKind, OPTIMISERS]


class AdamW(OptimiserKind):
    """AdamW, with `train.betas`, `train.eps` and `train.weight_decay`."""

    name = "adamw"
    title = "AdamW"
    by_default = True

    def open(self, weights: OptimisedWeights) -> list[Optimizer]:
        return weights.adamw()


class Muon(OptimiserKind):
    """torch's Muon for matrices of hidden layers, and AdamW for embeddings, the head, norms, biases and experts.

    Orthogonalising an update needs the full matrix, so ranks gather it; momentum and master weights stay sharded.
    """

    name = "muon"
    title = "Muon"
    momentum: Fraction = Field(0.95, description="of muon: share of the previous updates' direction that is kept")
    nesterov: bool = Field(True, description="of muon: look ahead along the momentum")
    ns_steps: Positive = Field(5, le=99, description="of muon: Newton-Schulz iterations that orthogonalise an update")
    adjust: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="of muon: how `lr` is scaled by a matrix's shape; match_rms_adamw: updates as large as AdamW's",
    )

    def open(self, weights: OptimisedWeights) -> list[Optimizer]:
        import torch

        names = weights.hidden_matrices()
        others = [name for name in weights.masters if name not in set(names)]
        if not names:
            return weights.adamw()
        group = {"params": [weights.masters[name] for name in names], "weight_decay": weights.weight_decay}
        if weights.sharded:
            sharded = sharded_muon()(group, names, weights, self)
            return [sharded, *weights.adamw(others)]
        muon = torch.optim.Muon(
            [group], lr=weights.lr, momentum=self.momentum, nesterov=self.nesterov, ns_steps=self.ns_steps,
            adjust_lr_fn=self.adjust,
        )  # fmt: skip
        return [muon, *weights.adamw(others)]

    def state_bytes(self, matrices: int, others: int) -> int:
        return 4 * matrices + 8 * others

    def gathered_bytes(self, numbers: int) -> int:
        return 4 * numbers

    def update_bytes(self, matrix: int) -> int:
        """In fp32: the update before and after it is gathered, the matrix it is applied to, and its momentum. In bf16: what an iteration needs."""
        return (4 * 4 + 5 * 2) * matrix


def sharded_muon() -> Any:
    """The class of Muon for matrices sharded by rows. A function, so that torch is imported only when it is needed."""
    import torch

    class ShardedMuon(torch.optim.Optimizer):
        """Each rank keeps the momentum of its rows. The matrix is gathered to be orthogonalised."""

        def __init__(self, group: dict[str, Any], names: list[str], weights: OptimisedWeights, kind: Muon) -> None:
            super().__init__([group], {"lr": weights.lr})
            self._names, self._weights, self._kind = names, weights, kind

        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            (group,) = self.param_groups
            for name, rows in zip(self._names, group["params"], strict=True):
                if rows.grad is None:
                    continue
                state = self.state[rows]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(rows.grad)
                momentum = state["momentum_buffer"]
                momentum.lerp_(rows.grad, 1 - self._kind.momentum)
                update = rows.grad.lerp(momentum, self._kind.momentum) if self._kind.nesterov else momentum
                change = self._weights.rows(name, self._orthogonalised(self._weights.whole(name, update)))
                rows.mul_(1 - group["lr"] * group["weight_decay"])
                rows.add_(change.to(rows.dtype), alpha=group["lr"])

        def _orthogonalised(self, update: Tensor) -> Tensor:
            """The update that torch's Muon, without momentum, applies to a zero matrix at a learning rate of 1."""
            stand_in = torch.nn.Parameter(torch.zeros_like(update))
            stand_in.grad = update
            torch.optim.Muon(
                [stand_in], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, ns_steps=self._kind.ns_steps,
                adjust_lr_fn=self._kind.adjust,
            ).step()  # fmt: skip
            return stand_in.detach()

    return ShardedMuon


BLOCK = 256  # weights that share one scale of 8-bit moments
LEAST = 4096  # least number of weights in a matrix with 8-bit moments


class AdamW8bit(OptimiserKind):
    """torchao's AdamW with 8-bit moments, in blocks of 256 along a weight's rows.

    Small weights, and those whose row length is not a multiple of 256, keep 32-bit moments.
    """

    name = "adamw8bit"
    title = "8-bit AdamW"

    def require(self) -> None:
        if importlib.util.find_spec("torchao") is None:
            raise RecipeError("train.optimiser adamw8bit needs the torchao package: pip install torchao")

    def open(self, weights: OptimisedWeights) -> list[Optimizer]:
        self.require()
        names = [name for name, shape in weights.shapes.items() if math.prod(shape[1:]) % BLOCK == 0 and len(shape) > 1]
        names = [name for name in names if math.prod(weights.shapes[name]) >= LEAST]
        others = [name for name in weights.masters if name not in set(names)]
        if not names:
            return weights.adamw()
        small = small_moments()(weights.groups(names), lr=weights.lr, betas=weights.betas, eps=weights.eps)
        return [small, *weights.adamw(others)]

    def state_bytes(self, matrices: int, others: int) -> int:
        return 2 * (matrices + others) + 8 * (matrices + others) // BLOCK

    def to_plain(self, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        from torchao.optim.subclass_8bit import OptimState8bit

        for key, value in state.items():
            if isinstance(
                value, OptimState8bit
            ):  # one row of scales per row of the weight, so that they are sharded alike
                yield f"{key}.codes", value.codes
                yield f"{key}.scale", value.scale.view(value.codes.shape[0], -1)
            else:
                yield key, value

    def from_plain(self, state: dict[str, Tensor], weight: Tensor) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if not weight.numel():
            return dict(state)
        for key, value in state.items():
            name, _, part = key.partition(".")
            if not part:
                found[key] = value
            elif part == "codes":
                moment = eight_bits(weight, signed=name == "exp_avg")
                moment.codes.copy_(value)
                moment.scale.copy_(state[f"{name}.scale"].reshape(-1))
                found[name] = moment
        return found


def eight_bits(weight: Tensor, signed: bool) -> Any:
    """A zero moment for a weight, or for this rank's rows of it."""
    from torchao.optim.subclass_8bit import OptimState8bit

    return OptimState8bit.zeros(weight.shape, signed, BLOCK, weight.device, weight.dtype)


def small_moments() -> Any:
    """The class of torchao's AdamW with 8-bit moments for every weight. torchao would decide by the rank's rows; here `open` has
    decided by the full weight.
    """
    import torch
    from torchao.optim import AdamW8bit as Torchao

    class SmallMoments(Torchao):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            """For a weight without rows on this rank, there is nothing to update and the moments are empty."""
            for weight in (weight for group in self.param_groups for weight in group["params"]):
                if not weight.numel() and weight.grad is not None:
                    weight.grad = None
                    codes = torch.zeros_like(weight, dtype=torch.uint8)
                    scale = weight.new_empty((0, math.prod(weight.shape[1:]) // BLOCK), dtype=torch.float32)
                    moments = {
                        f"{name}.{key}": part
                        for name in ("exp_avg", "exp_avg_sq")
                        for key, part in (("codes", codes), ("scale", scale))
                    }
                    self.state[weight] = {"step": torch.tensor(0.0), **moments}
            super().step()

        def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
            found: Tensor = eight_bits(p, signed)
            return found

    return SmallMoments
