"""AdamW over weights that are spread over ranks: each rank keeps masters and moments of its own part alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opd.models.sharded import shard_of
from opd.trainer.optimiser import Optimiser


class ShardedOptimiser(Optimiser):
    def _norm(self, total: Tensor) -> float:
        return float(total.full_tensor() if isinstance(total, DTensor) else total)

    def _part(self, tensor: Tensor, owner: nn.Parameter) -> Tensor:
        return shard_of(tensor.to(owner.device), owner) if tensor.ndim else tensor

    @torch.no_grad()
    def _round(self) -> None:
        for name, half in self._halves.items():
            half.copy_(self._masters[name])
