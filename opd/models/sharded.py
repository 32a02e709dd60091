"""A student whose weights are spread over ranks (FSDP2). It trains; copies to sample and score with were made before.

The whole model is the root of the sharding, and everything that reads its head runs `inside`: there the root's weights are
whole, tied or not. Every rank has to make the same number of passes, since each gathers weights from all the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from opd.divergences import Projection
from opd.models import lora
from opd.models.attention import Packed
from opd.models.language_model import LanguageModel
from opd.models.packing import Row
from opd.models.recompute import decoder_layers
from opd.models.settings import layers_of_unit
from opd.types import WeightsRef

T = TypeVar("T")
SHARD = (
    "shard"  # of the mesh of ranks: the last dimension, along which rows are spread; along another, groups are replicas
)


class ShardedModel(LanguageModel):
    """Made of a model that is whole on every rank, and that must not be used afterwards."""

    passes_alone = False
    stays = False

    def __init__(self, model: LanguageModel, mesh: DeviceMesh, most: Callable[[int], int], leads: bool) -> None:
        vars(self).update(vars(model))
        self._most, self._leads = most, leads
        self._template = _template(model)
        self._last: Projection | None = None  # of the newest pass
        frozen = set() if self.adapter is None else {p for p in self.module.parameters() if not p.requires_grad}
        shard_module(self.module, mesh, layers=self.adapter is None and self._one_call, ignored=frozen)
        self._weights = dict(self.module.named_parameters())

    @property
    def _one_call(self) -> bool:
        """Whether a pack is one call of every layer. Else ranks would call them unequally often: the root alone is sharded."""
        return self.route.name == "packed" and self.route.limit is None

    @property
    def _parts(self) -> list[FSDPModule]:
        return fsdp_parts(self.module)

    @property
    def sharded_weights(self) -> dict[str, DTensor]:
        return {name: weight for name, weight in self._weights.items() if isinstance(weight, DTensor)}

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: weight for name, weight in self._weights.items() if weight.requires_grad}

    def finite(self) -> bool:
        """This rank's part of them."""
        return all(bool(torch.isfinite(weight.to_local()).all()) for weight in self.sharded_weights.values())

    # Passes

    def predict(self, batch: Row) -> Projection:
        self._last = super().predict(batch)
        return self._last

    def passes(self, packs: Sequence[T]) -> Iterator[T]:
        """Each pack, and passes without any until every rank has made as many as the busiest."""
        missing = self._most(len(packs)) - len(packs)
        try:
            yield from packs
            for _ in range(missing):
                loss = self.inside(self._nothing)
                if torch.is_grad_enabled():
                    loss.backward()
        finally:
            self._let_go()

    def inside(self, compute: Callable[[], T]) -> T:
        return self.module.inside(lambda: self._joined(compute()))

    def _joined(self, found: Any) -> Any:
        """A loss that trains on nothing still takes part in the backward pass, which gathers and reduces with the others."""
        if torch.is_grad_enabled() and isinstance(found, tuple) and not found[0].requires_grad:
            found = (found[0] + self._zero(), *found[1:])
        self._last = None
        return found

    def _nothing(self) -> Tensor:
        ids = torch.full((1,), self.stop_ids[0] if self.stop_ids else 0, dtype=torch.int64, device=self.device)
        self._last = self.project(self.hidden(ids, Packed.of([1], self.device)))
        return self._zero()

    def _zero(self) -> Tensor:
        assert self._last is not None
        parts = [self._last.hidden, self._last.weight, *([] if self._last.bias is None else [self._last.bias])]
        return sum((0.0 * part.float().sum() for part in parts), start=torch.zeros((), device=self.device))

    # Whole weights

    def _let_go(self) -> None:
        """Of what is gathered still: an update changes this rank's rows alone."""
        for part in self._parts:
            part.reshard()

    def weights(self, version: int) -> WeightsRef:
        """All ranks have to read them, in the same order."""
        self._let_go()
        if self.adapter is None:
            return WeightsRef(version, GatheredWeights(self._weights))
        for part in self._parts:
            part.unshard()
        tensors = {name: weight.detach() for name, weight in self._plain.named_parameters()}
        tensors |= lora.merged_weights(self.module)
        for part in self._parts:
            part.reshard()
        return WeightsRef(version, tensors)

    def factors(self) -> dict[str, Tensor]:
        """All ranks have to ask."""
        self._let_go()
        return {lora.file_name(name): whole_of(weight) for name, weight in self.trainable().items()}

    def snapshot(self) -> LanguageModel:
        """A whole copy in the leader's memory; on the others, which only help, nothing that could be saved."""
        self._let_go()
        device = "cpu" if self.adapter is None else self.device
        tensors = {}
        for name, weight in self.sharded_weights.items():
            found = whole_of(weight)
            if self._leads:
                tensors[name] = found.to(device, copy=True)
        return self._filled(tensors) if self._leads else self

    def restore(self, directory: Path) -> None:
        self._let_go()
        empty = {name: torch.empty(weight.shape, dtype=weight.dtype) for name, weight in self.sharded_weights.items()}
        whole = self._filled(empty)
        whole.restore(directory)
        saved = dict(whole.module.named_parameters())
        with torch.no_grad():
            for name, weight in self.sharded_weights.items():
                weight.copy_(shard_of(saved[name].detach().to(self.device), weight))

    def _filled(self, tensors: Mapping[str, Tensor]) -> LanguageModel:
        """The template with these weights in the places of those that are sharded."""
        memo: dict[int, Any] = {}
        for module in (self._template.module, self._template._plain):
            for name, weight in module.named_parameters() if module is not None else ():
                memo.setdefault(
                    id(weight), nn.Parameter(tensors[name], requires_grad=False) if weight.is_meta else weight
                )
        clone = copy.copy(self._template)
        clone.adapter, clone.module, clone._plain = copy.deepcopy((clone.adapter, clone.module, clone._plain), memo)
        clone.head = clone.module.get_output_embeddings()
        return clone


class GatheredWeights(Mapping[str, Tensor]):
    """Weights by name, each whole only while it is looked at."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> Tensor:
        return whole_of(self._weights[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


@torch.no_grad()
def whole_of(weight: Tensor) -> Tensor:
    """All its rows, gathered from the ranks that have some. One rank by itself has them all."""
    if not isinstance(weight, DTensor):
        return weight.detach()
    return weight.to_local() if weight.device_mesh.shape[-1] == 1 else weight.full_tensor()


def shard_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has whole. Nothing is sent."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def shard_module(module: Any, mesh: DeviceMesh, *, layers: bool, ignored: Collection[nn.Parameter] = ()) -> None:
    """`layers`: each by itself, too. `ignored`: below adapters; the sampler holds the same tensors, whole."""
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        "ignored_params": set(ignored),
    }
    for unit in _units(decoder_layers(module)) if layers else ():
        fully_shard(unit, **settings)
    fully_shard(module, **settings)
    if mesh.shape[-1] == 1:  # a rank that has all rows keeps what it gathers, from the first pass to the last
        module.set_reshard_after_forward(False)
        module.set_reshard_after_backward(False)
    for part in fsdp_parts(module):
        part.set_gradient_divide_factor(1.0)  # weights are those of the whole batch: gradients add up
        part.set_force_sum_reduction_for_comms(True)
    module.inside = _call
    register_fsdp_forward_method(module, "inside")


def _units(layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Layers that are gathered together: every unit costs the host as much, however small it is."""
    sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
    each = layers_of_unit(len(layers), max(sizes, default=1))
    return [list(layers[first : first + each]) for first in range(0, len(layers), each)]


def fsdp_parts(module: Any) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _call(compute: Callable[[], T]) -> T:
    return compute()


def _template(model: LanguageModel) -> LanguageModel:
    """The model without memory for the weights that are sharded; what is shared with a sampler stays shared."""
    whole = model.adapter is None
    memo: dict[int, Any] = {}
    for module in (model.module, model._plain):
        for weight in module.parameters() if module is not None else ():
            tensor = weight.detach()
            held = torch.empty_like(tensor, device="meta") if whole or weight.requires_grad else tensor
            memo.setdefault(id(weight), nn.Parameter(held, requires_grad=False))
    clone = copy.copy(model)
    clone.adapter, clone.module, clone._plain = copy.deepcopy((model.adapter, model.module, model._plain), memo)
    return clone
