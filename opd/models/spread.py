"""A frozen model whose layers are spread over ranks (FSDP2): each is whole on a device only while a pass goes through it.

It is read shard by shard: built without weights, and every rank reads its own rows of each tensor from the files, so that no rank
ever holds more than its part. Embedding, norms and head are whole on every rank: losses read the head itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from opd.errors import ModelError
from opd.models.attention import Packed
from opd.models.directory import reading_model, weight_files
from opd.models.language_model import LanguageModel
from opd.models.load import attention_of, load_config, load_tokenizer, weights_directory
from opd.models.recompute import decoder_layers

T = TypeVar("T")
WHOLE = "Set cluster.teachers: whole, or serve it elsewhere (kind: served)."


class SpreadModel(LanguageModel):
    """All ranks make as many passes through it: each gathers layers from all the others."""

    spread = True
    stays = False

    def __init__(self, module: Any, tokenizer: Any, name: str, most: Callable[[int], int]) -> None:
        self._most = most
        super().__init__(module, tokenizer, name)
        if self.route.name != "packed" or self.route.limit is not None:
            raise ModelError(
                f"model {name!r}: sequences go through it {self.route.name}, and ranks would call its layers unequally often. {WHOLE}"
            )

    @torch.no_grad()
    def passes(self, packs: Sequence[T]) -> Iterator[T]:
        """Each pack, and passes without any until every rank has made as many as the busiest."""
        missing = self._most(len(packs)) - len(packs)
        yield from packs
        for _ in range(missing):
            self.hidden(torch.zeros(1, dtype=torch.int64, device=self.device), Packed.of([1], self.device))


def load_spread(
    name: str, *, dtype: str, device: str, revision: str | None, mesh: DeviceMesh, most: Callable[[int], int]
) -> SpreadModel:
    from transformers import AutoModelForCausalLM

    config, tokenizer = load_config(name, revision), load_tokenizer(name, revision)
    directory = weights_directory(name, revision)
    if directory is None:
        raise ModelError(f"model {name!r}: an adapter merged into its base has no files to read parts of. {WHOLE}")
    with reading_model(name, "the model", directory):
        with _without_weights():
            module = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, dtype), attn_implementation=attention_of(config), trust_remote_code=False
            )
        module.tie_weights()
        module.requires_grad_(False)
        layers = decoder_layers(module)
        if not layers:
            raise ModelError(f"model {name!r} has no layers that could be spread over ranks. {WHOLE}")
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        _allocate(module, device)
        _read(module, name, directory, mesh.get_local_rank(), mesh.size())
    return SpreadModel(module, tokenizer, name, most)


@contextmanager
def _without_weights() -> Iterator[None]:
    """Parameters that are made in here have no memory; buffers have."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _allocate(module: Any, device: str) -> None:
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to_empty(device=device)
    module.tie_weights()
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])


def _read(module: Any, name: str, directory: Path, rank: int, size: int) -> None:
    """This rank's rows of every tensor."""
    weights = dict(module.named_parameters())
    for file in weight_files(directory):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 — not a mapping
                weight = weights.pop(key, None)
                if weight is not None:
                    _fill(weight, opened.get_slice(key), rank, size)
    if weights:
        raise ModelError(
            f"model {name!r}: its files have other names than its class ({next(iter(weights))} is not in them), so they are read "
            f"whole. {WHOLE}"
        )


def _fill(weight: Tensor, stored: Any, rank: int, size: int) -> None:
    if tuple(stored.get_shape()) != tuple(weight.shape):
        raise ModelError(f"a tensor of shape {stored.get_shape()} where {list(weight.shape)} is expected")
    if not isinstance(weight, DTensor):
        weight.data.copy_(stored[...])
        return
    rows = weight.shape[0]
    chunk = -(-rows // size)
    start, stop = min(rank * chunk, rows), min((rank + 1) * chunk, rows)
    if start < stop:
        weight.to_local().copy_(stored[start:stop])
