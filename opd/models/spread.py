"""A frozen model whose layers are spread over ranks (FSDP2): each is whole on a device only while a pass goes through it.

It is read by parts, so that no rank ever holds more than its own. Embedding, norms and head are whole on every rank: losses
read the head itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from opd.errors import ModelError
from opd.models.attention import Packed
from opd.models.directory import reading_model
from opd.models.language_model import LanguageModel
from opd.models.load import check_files, load_config, load_tokenizer, locate, weights_directory
from opd.models.parts import allocate, module_without_weights, read_parts, reads_by_parts
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
    config, tokenizer = load_config(name, revision), load_tokenizer(name, revision)
    directory = weights_directory(name, revision)
    if directory is None:
        raise ModelError(f"model {name!r}: an adapter merged into its base has no files to read parts of. {WHOLE}")
    with reading_model(name, "the model", directory):
        check_files(name, config, locate(name, revision), directory)
        module = module_without_weights(config, dtype, directory)
        if not reads_by_parts(module, directory):
            raise ModelError(
                f"model {name!r}: its files have other names than its class, so they are read whole. {WHOLE}"
            )
        module.requires_grad_(False)
        layers = decoder_layers(module)
        if not layers:
            raise ModelError(f"model {name!r} has no layers that could be spread over ranks. {WHOLE}")
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        allocate(module, device)
        read_parts(module, name, directory, mesh.get_local_rank(), mesh.size())
    return SpreadModel(module, tokenizer, name, most)
