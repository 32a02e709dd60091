"""A student with adapters that is spread over ranks from the start: frozen weights as well, each rank reading its own rows.

Its weights are merged layer by layer: no rank ever has more than one of them whole, unless it asks for a copy to sample with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from opd.errors import ModelError
from opd.models import lora
from opd.models.language_model import LanguageModel
from opd.models.parts import allocate, read_parts
from opd.models.settings import Lora
from opd.models.sharded import fsdp_parts, shard_of, whole_of
from opd.models.sharded_parts import PartedModel
from opd.types import WeightsRef


class Attached:
    """Adapters in a module without memory for its weights: which of its tensors is which of the plain module's."""

    def __init__(self, module: Any, settings: Lora) -> None:
        """Adapters are drawn as they would be beside the weights themselves, which are stood in for meanwhile."""
        self.settings, weights = settings, _by_identity(module)
        stand_ins = {
            key: nn.Parameter(torch.zeros((), dtype=weight.dtype).expand(weight.shape), requires_grad=False)
            for key, (_, weight) in weights.items()
        }
        _exchange(module, {key: stand_ins[key] for key in weights})
        self.adapter = lora.attach(module, module.get_output_embeddings(), settings)
        names = {id(stand_ins[key]): name for key, (name, _) in weights.items()}
        found = dict(module.named_parameters())
        self.plain_names = {name: names[id(weight)] for name, weight in found.items() if id(weight) in names}
        self.drawn = {name: weight.detach().clone() for name, weight in found.items() if name not in self.plain_names}
        _exchange(module, {id(stand_ins[key]): weight for key, (_, weight) in weights.items()})
        for name, weight in module.named_parameters():
            weight.requires_grad_(name in self.drawn)

    def fill(self, module: Any, name: str, directory: Path, device: str, place: tuple[int, int]) -> None:
        """This rank's rows of everything, of a module that has been sharded by now."""
        allocate(module, device)
        read_parts(module, name, directory, *place, names=self.plain_names, beside=self.drawn)
        with torch.no_grad():
            for key, weight in module.named_parameters():
                if key in self.drawn:
                    weight.copy_(shard_of(self.drawn[key].to(device), weight))


class PartedLora(PartedModel):
    """`saved`: the same module without memory, before it was sharded; filled, it is what a checkpoint is written from."""

    def __init__(
        self,
        module: Any,
        plain: Any,
        tokenizer: Any,
        name: str,
        mesh: DeviceMesh,
        most: Callable[[int], int],
        leads: bool,
        attached: Attached,
        saved: tuple[Any, Any],
    ) -> None:
        super().__init__(module, plain, tokenizer, name, mesh, most, leads)
        self.adapter, self._saved, self._plain_names = attached.adapter, saved, attached.plain_names
        self.lora = self._template.lora = attached.settings

    def weights(self, version: int) -> WeightsRef:
        self._let_go()
        return WeightsRef(version, MergedWeights(self.module, self._plain_names, merge=True))

    def base(self) -> LanguageModel:
        """A whole copy: what lies below the adapters is in parts here."""
        return self._copy(MergedWeights(self.module, self._plain_names, merge=False), None)

    def snapshot(self) -> LanguageModel:
        self._let_go()
        tensors = {}
        for name, weight in self.sharded_weights.items():
            found = whole_of(weight)
            if self._leads:
                tensors[name] = found.to("cpu", copy=True)
        return self._whole(tensors) if self._leads else self

    def _whole(self, tensors: Mapping[str, Tensor]) -> LanguageModel:
        module, adapter = self._saved
        memo = {
            id(weight): nn.Parameter(tensors[key], requires_grad=False) for key, weight in module.named_parameters()
        }
        below = self._filled({plain: tensors[key] for key, plain in self._plain_names.items()})
        clone = copy.copy(below)
        clone.module, clone.adapter = copy.deepcopy((module, adapter), memo)
        clone._plain, clone.head = below.module, clone.module.get_output_embeddings()
        return clone

    @torch.no_grad()
    def restore(self, directory: Path) -> None:
        """Only adapters have changed."""
        self._let_go()
        file = directory / "adapter" / "adapter_model.safetensors"
        saved = load_file(file)
        for name, weight in self.trainable().items():
            tensor = saved.get(lora.file_name(name))
            if tensor is None or tensor.shape != weight.shape:
                raise ModelError(f"{file} does not fit model {self.name!r}: {name} is missing or of another shape.")
            weight.copy_(shard_of(tensor.to(self.device, weight.dtype), weight))


class MergedWeights(Mapping[str, Tensor]):
    """Weights by their plain names, adapters added to them or not: a layer is gathered when one of its weights is asked for."""

    def __init__(self, module: Any, plain_names: Mapping[str, str], *, merge: bool) -> None:
        self._module, self._names, self._merge = module, plain_names, merge
        known = set(fsdp_parts(module))
        parts = {name: part for name, part in module.named_modules() if part in known}
        owner = {name: max((at for at in parts if _inside(name, at)), key=len) for name in plain_names}
        self._part = {plain: parts[owner[name]] for name, plain in plain_names.items()}
        self._held: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._held:
            self._held = {}  # its memory is free before that of the next is taken
            self._held = self._gathered(self._part[name])
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._part)

    def __len__(self) -> int:
        return len(self._part)

    @torch.no_grad()
    def _gathered(self, part: Any) -> dict[str, Tensor]:
        part.unshard()
        try:
            adapted = dict(lora.adapted_layers(self._module)) if self._merge else {}
            return {
                plain: lora.merged(adapted[plain]) if plain in adapted else weight.detach().clone()
                for name, weight in self._module.named_parameters()
                if (plain := self._names.get(name)) is not None and self._part[plain] is part
            }
        finally:
            part.reshard()


def _inside(name: str, module: str) -> bool:
    return not module or name.startswith(f"{module}.")


def _by_identity(module: Any) -> dict[int, tuple[str, nn.Parameter]]:
    return {id(weight): (name, weight) for name, weight in module.named_parameters()}


def _exchange(module: Any, others: Mapping[int, nn.Parameter]) -> None:
    """Put other parameters into the places of those with these identities; one that stands in two places stays one."""
    for child in module.modules():
        for name, weight in child._parameters.items():
            if weight is not None and id(weight) in others:
                child._parameters[name] = others[id(weight)]
