"""AdamW over weights that are spread over ranks: each rank keeps masters and moments of its own part alone.

Masters are plain tensors, the rank's rows of each weight: what is done to every weight one by one takes no detour through
the bookkeeping of distributed tensors, which for hundreds of weights costs more than the arithmetic.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opd.models.sharded import SHARD, shard_of
from opd.trainer.optimiser import Optimiser, shorten


class ShardedOptimiser(Optimiser):
    @staticmethod
    def _here(tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def _own(self, parameter: nn.Parameter) -> nn.Parameter:
        """The same memory."""
        return nn.Parameter(self._here(parameter.detach()))

    @torch.no_grad()
    def _clip(self, limit: float) -> float:
        """By the norm over all ranks of a group; other groups have the same gradients."""
        for name, parameter in self._parameters.items():
            if name not in self._halves:
                self._take_gradient(name, parameter)
        masters = list(self._masters.values())
        squared = nn.utils.get_total_norm([master.grad for master in masters if master.grad is not None]).float() ** 2
        squared = squared.to(masters[0].device)
        dist.all_reduce(squared, group=self._mesh().get_group(SHARD))
        return shorten(masters, limit, squared.sqrt())

    def _take_gradient(self, name: str, parameter: nn.Parameter) -> None:
        """Of a weight that is its own master: of that, this rank's rows."""
        master, rows = self._masters[name], self._here(parameter.detach())
        if rows.numel() and rows.data_ptr() != master.data_ptr():
            raise RuntimeError(f"the rows of {name} lie elsewhere than when its optimiser was made")
        master.grad = None if parameter.grad is None else self._here(parameter.grad)

    def _part(self, tensor: Tensor, owner: nn.Parameter) -> Tensor:
        return self._here(shard_of(tensor.to(owner.device), owner)) if tensor.ndim else tensor

    def tensors(self) -> dict[str, Tensor]:
        """As distributed ones, for whoever gathers them."""
        return {key: self._spread(key.rpartition(".")[0], tensor) for key, tensor in super().tensors().items()}

    def _spread(self, name: str, tensor: Tensor) -> Tensor:
        owner = self._parameters[name]
        if not tensor.ndim:
            return tensor
        assert isinstance(owner, DTensor)
        return DTensor.from_local(
            tensor, owner.device_mesh, owner.placements, run_check=False, shape=owner.shape, stride=owner.stride()
        )

    def _mesh(self) -> dist.DeviceMesh:
        owner = next(iter(self._parameters.values()))
        assert isinstance(owner, DTensor)
        return owner.device_mesh
