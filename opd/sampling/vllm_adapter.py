"""A student's adapter as vLLM takes it: a small file for every version, over weights that are given once."""

from __future__ import annotations

import secrets
from typing import Any

import torch
from safetensors.torch import save_file

from opd.errors import ModelError
from opd.models.language_model import LanguageModel
from opd.models.load import empty_model
from opd.models.lora import find_targets
from opd.models.settings import Lora
from opd.sampling.export import WeightsFile, put_file
from opd.sampling.vllm_replica import Replica
from opd.types import WeightsRef

RANK = 512  # the largest that vLLM can be started for


def why_merged(config: Any, settings: Lora) -> str:
    """Why vLLM cannot take such adapters of a model with this config by themselves; nothing if it can."""
    if settings.rank > RANK:
        return f"vLLM takes adapters of rank {RANK} at most, and student.lora.rank is {settings.rank}"
    module = empty_model(config)
    targets = find_targets(module, module.get_output_embeddings(), settings)
    if targets.parameters:
        return f"vLLM does not take adapters on a mixture's experts as they are trained here ({targets.parameters[0]})"
    kinds = {name: type(module.get_submodule(name)) for name in targets.modules}
    odd = next((name for name, kind in kinds.items() if not issubclass(kind, torch.nn.Linear)), None)
    return "" if odd is None else f"vLLM takes adapters on linear layers, and {odd} is a {kinds[odd].__name__}"


class AdapterFile:
    """`model`: a copy to sample with whose adapters add nothing yet, so that it is what lies below them."""

    def __init__(self, model: LanguageModel, file: WeightsFile) -> None:
        assert model.lora is not None
        self._dtype, self._folder = model.dtype, file.folder
        names = find_targets(model.module, model.head, model.lora).modules
        targets = sorted({name.rpartition(".")[2] for name in names})
        self.settings = {"r": model.lora.rank, "lora_alpha": model.lora.alpha, "target_modules": targets}
        self.base = secrets.randbelow(2**31)  # by which an engine says whose weights it has below
        self.below = file.write(self.base)
        self._newest, self.adds = self.below, False  # whether the newest changes anything

    def write(self, weights: WeightsRef) -> Any:
        """A file of its own. The one before goes: whoever reads it may do so to its end."""
        if not weights.adapter:
            raise ModelError(f"sampler: weights of version {weights.version} come without their adapter.")
        tensors = {name: tensor.to("cpu", self._dtype).contiguous() for name, tensor in weights.adapter.items()}
        self.adds = any(bool(tensor.any()) for name, tensor in tensors.items() if ".lora_B." in name)
        before, self._newest = self._newest, self._folder / f"adapter-{weights.version}.safetensors"
        save_file(tensors, self._newest)
        if before not in (self.below, self._newest):
            before.unlink()
        return self._newest

    def give(self, replica: Replica, version: int, path: Any) -> bool:
        return put_file(replica, version, path, "adapter")
