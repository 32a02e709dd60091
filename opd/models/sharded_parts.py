"""A student that is spread over ranks from the start: each reads its own rows of the weights, and none ever has all of them.

A whole copy is there only where one is asked for: to sample with, or to score with. All ranks help to fill it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from opd.models.directory import reading_model, weights_here
from opd.models.fused import fuse_layers, kernels_on
from opd.models.language_model import LanguageModel
from opd.models.load import load_config, load_tokenizer, quiet_bars, weights_directory
from opd.models.parts import allocate, module_without_weights, read_parts, reads_by_parts
from opd.models.probe import switch_attention
from opd.models.recompute import checkpoint_layers, decoder_layers
from opd.models.settings import Lora
from opd.models.sharded import SHARD, ShardedModel, shard_module


class PartedModel(ShardedModel):
    """`plain`: the module without memory for its weights, and not sharded."""

    @torch.no_grad()
    def __init__(
        self,
        module: Any,
        plain: Any,
        tokenizer: Any,
        name: str,
        mesh: DeviceMesh,
        most: Callable[[int], int],
        leads: bool,
    ) -> None:
        self._most, self._leads, self._last = most, leads, None
        self._place = (mesh.get_local_rank(SHARD), mesh[SHARD].size())
        module.inside(lambda: LanguageModel.__init__(self, module, tokenizer, name))
        self._let_go()
        switch_attention(plain, module.config._attn_implementation)
        self._template = LanguageModel.__new__(LanguageModel)
        vars(self._template).update(vars(self) | {"module": plain, "head": plain.get_output_embeddings()})
        self._weights = dict(module.named_parameters())

    def inference_copy(self, dtype: torch.dtype | None = None, *, own: bool = False) -> LanguageModel:
        """Nothing of it is shared."""
        return self._copy(self.weights(0).tensors, dtype)

    def _copy(self, gathered: Mapping[str, Tensor], dtype: torch.dtype | None) -> LanguageModel:
        clone = self._filled({name: weight.to(dtype or weight.dtype, copy=True) for name, weight in gathered.items()})
        clone.module.to(self.device)  # buffers
        return clone

    def copied(self, dtype: torch.dtype | None, wanted: bool) -> LanguageModel | None:
        if wanted:
            return self.inference_copy(dtype)
        gathered = self.weights(0).tensors
        for name in gathered:
            gathered[name]
        return None

    def restore(self, directory: Path) -> None:
        if not reads_by_parts(self._template.module, directory):
            super().restore(directory)
            return
        self._let_go()
        read_parts(self.module, self.name, directory, *self._place)


def files_here(name: str, revision: str | None) -> bool:
    directory = weights_directory(name, revision)
    return directory is not None and weights_here(directory)


def load_parted(
    name: str,
    *,
    dtype: str,
    device: str,
    revision: str | None,
    lora: Lora | None,
    gradient_checkpointing: bool,
    mesh: DeviceMesh,
    most: Callable[[int], int],
    leads: bool,
) -> PartedModel | None:
    """None: it has to be read whole. Its files have other names than its class or are not here yet, or it does not run packed.

    Ranks of several machines agree on it beforehand (`files_here`): the weights may have come to some of them only.
    """
    from opd.models.sharded_lora import Attached, PartedLora

    directory = weights_directory(name, revision)
    if directory is None or not files_here(name, revision):
        return None
    config, tokenizer = load_config(name, revision), load_tokenizer(name, revision)
    quiet_bars()
    with reading_model(name, "the model", directory):
        module = module_without_weights(config, dtype, directory)
        half = dtype != "float32" and bool(module._keep_in_fp32_modules or module._keep_in_fp32_modules_strict)
        if half or not decoder_layers(module) or not reads_by_parts(module, directory):
            return None
        if kernels_on(device):
            fuse_layers(module)
        plain, place = copy.deepcopy(module), (mesh.get_local_rank(SHARD), mesh[SHARD].size())
        attached = None if lora is None else Attached(module, lora)
        saved = None if attached is None else copy.deepcopy((module, attached.adapter))
        if attached is None:
            module.requires_grad_(True)
        if gradient_checkpointing:
            checkpoint_layers(module, name)
        shard_module(module, mesh, layers=True)
        common = (module, plain, tokenizer, name, mesh, most, leads)
        if attached is None or saved is None:
            allocate(module, device)
            read_parts(module, name, directory, *place)
            model = PartedModel(*common)
        else:
            attached.fill(module, name, directory, device, place)
            model = PartedLora(*common, attached, saved)
    return model if model._one_call else None
