"""A student whose weights are sharded over ranks (FSDP2). It only trains; copies for sampling and scoring are made beforehand.

The whole model is the root FSDP module. Everything that reads its head runs `inside`, where the root's weights are gathered,
tied or not. Every rank must make the same number of passes, because each pass gathers weights from all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from opd.common.errors import ModelError
from opd.divergences import Projection
from opd.models import lora
from opd.models.attention import Packed, switch_attention
from opd.models.files import read_header, reading_model, stored_tensors, weight_files, weights_here
from opd.models.fused_layers import fuse_layers, kernels_on
from opd.models.language_model import LanguageModel, Row, checkpoint_layers, decoder_layers
from opd.models.load import (
    GENERATION,
    attention_of,
    check_files,
    denied_tensors,
    load_config,
    load_tokenizer,
    locate,
    quiet_bars,
    weights_directory,
)
from opd.models.settings import Lora, layers_of_unit
from opd.records import Layers, WeightsRef

T = TypeVar("T")
SHARD = "shard"  # last dimension of the mesh, along which rows are sharded; any other dimension holds replicas


class ShardedModel(LanguageModel):
    """Built from a model that is complete on every rank; that model must not be used afterwards."""

    passes_alone = False
    stays = False

    def __init__(self, model: LanguageModel, mesh: DeviceMesh, most: Callable[[int], int], leads: bool) -> None:
        vars(self).update(vars(model))
        self._most, self._leads = most, leads
        self._template = _template(model)
        self._last: Projection | None = None  # from the latest pass
        frozen = set() if self.adapter is None else {p for p in self.module.parameters() if not p.requires_grad}
        shard_module(self.module, mesh, layers=self.adapter is None and self._one_call, ignored=frozen)
        self._weights = dict(self.module.named_parameters())

    @property
    def _one_call(self) -> bool:
        """Whether a pack calls every layer once. If not, ranks make different numbers of calls, so only the root is sharded."""
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
        """Whether this rank's part of the weights is finite."""
        return all(bool(torch.isfinite(weight.to_local()).all()) for weight in self.sharded_weights.values())

    # Passes

    def predict(self, batch: Row) -> Projection:
        self._last = super().predict(batch)
        return self._last

    def predict_layers(self, batch: Row, layers: Layers) -> tuple[Projection, Tensor]:
        self._last, states = super().predict_layers(batch, layers)
        return self._last, states

    def passes(self, packs: Sequence[T]) -> Iterator[T]:
        """Yield each pack, then make empty passes until every rank has made as many as the busiest one."""
        missing = self._most(len(packs)) - len(packs)
        try:
            yield from packs
            for _ in range(missing):
                loss = self.inside(self._empty_pass)
                if torch.is_grad_enabled():
                    loss.backward()
        finally:
            self._free_gathered()

    def inside(self, compute: Callable[[], T]) -> T:
        return self.module.inside(lambda: self._joined(compute()))

    def _joined(self, found: Any) -> Any:
        """Connect a loss that trains nothing, or perhaps only a module, to the weights.

        The rank then still takes part in the collectives of the backward pass.
        """
        joins = torch.is_grad_enabled() and isinstance(found, tuple)
        if joins and (self.has_modules or not found[0].requires_grad):
            found = (found[0] + self._zero(), *found[1:])
        self._last = None
        return found

    def _empty_pass(self) -> Tensor:
        ids = torch.full((1,), self.stop_ids[0] if self.stop_ids else 0, dtype=torch.int64, device=self.device)
        self._last = self.project(self.hidden(ids, Packed.of([1], self.device)))
        return self._zero()

    def _zero(self) -> Tensor:
        assert self._last is not None
        parts = [self._last.hidden, self._last.weight, *([] if self._last.bias is None else [self._last.bias])]
        return sum((0.0 * part.float().sum() for part in parts), start=torch.zeros((), device=self.device))

    # Full weights

    def _free_gathered(self) -> None:
        """Free gathered weights: an update changes only this rank's rows, so they would be stale."""
        for part in self._parts:
            part.reshard()

    def weights(self, version: int) -> WeightsRef:
        """Collective: all ranks must read the weights, in the same order."""
        self._free_gathered()
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
        """Collective: all ranks must call it."""
        self._free_gathered()
        return {lora.file_name(name): gather_full(weight) for name, weight in self.trainable().items()}

    def snapshot(self) -> LanguageModel:
        """A full copy in the leader's memory. Other ranks only help to gather it, and return themselves."""
        self._free_gathered()
        device = "cpu" if self.adapter is None else self.device
        tensors = {}
        for name, weight in self.sharded_weights.items():
            found = gather_full(weight)
            if self._leads:
                tensors[name] = found.to(device, copy=True)
        return self._filled(tensors) if self._leads else self

    def restore(self, directory: Path) -> None:
        self._free_gathered()
        empty = {name: torch.empty(weight.shape, dtype=weight.dtype) for name, weight in self.sharded_weights.items()}
        whole = self._filled(empty)
        whole.restore(directory)
        saved = dict(whole.module.named_parameters())
        with torch.no_grad():
            for name, weight in self.sharded_weights.items():
                weight.copy_(shard_of(saved[name].detach().to(self.device), weight))

    def _filled(self, tensors: Mapping[str, Tensor]) -> LanguageModel:
        """The template with these weights in place of the sharded ones."""
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
    """Weights by name; each is gathered when it is read."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> Tensor:
        return gather_full(self._weights[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


@torch.no_grad()
def gather_full(weight: Tensor) -> Tensor:
    """All rows of the weight, gathered from the ranks. Nothing is sent if one rank has them all."""
    if not isinstance(weight, DTensor):
        return weight.detach()
    return weight.to_local() if weight.device_mesh.shape[-1] == 1 else weight.full_tensor()


def shard_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has in full. Nothing is sent."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def shard_module(module: Any, mesh: DeviceMesh, *, layers: bool, ignored: Collection[nn.Parameter] = ()) -> None:
    """`layers`: shard groups of layers separately, too. `ignored`: weights under adapters, which the sampler shares in full."""
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        "ignored_params": set(ignored),
    }
    for unit in _units(decoder_layers(module)) if layers else ():
        fully_shard(unit, **settings)
    fully_shard(module, **settings)
    if mesh.shape[-1] == 1:  # a rank that has all rows never frees gathered weights
        module.set_reshard_after_forward(False)
        module.set_reshard_after_backward(False)
    for part in fsdp_parts(module):
        part.set_gradient_divide_factor(1.0)  # losses are weighted over the whole batch: gradients add up
        part.set_force_sum_reduction_for_comms(True)
    module.inside = _call
    register_fsdp_forward_method(module, "inside")


def _units(layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Groups of layers that are gathered together: each gather costs the host the same, however small."""
    sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
    each = layers_of_unit(len(layers), max(sizes, default=1))
    return [list(layers[first : first + each]) for first in range(0, len(layers), each)]


def fsdp_parts(module: Any) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _call(compute: Callable[[], T]) -> T:
    return compute()


def _template(model: LanguageModel) -> LanguageModel:
    """The model with sharded weights on the meta device; weights shared with a sampler stay shared."""
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


# --- Reading only this rank's rows ---
#
# The model is built on the meta device, sharded, and then filled from the files. No rank holds more than its share.


def module_without_weights(config: Any, dtype: str, directory: Path) -> Any:
    """The module in evaluation mode, with its buffers and generation config, and parameters on the meta device."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    with _without_weights():
        module = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=attention_of(config), trust_remote_code=False
        )
    module.tie_weights()
    if (directory / GENERATION).exists():
        module.generation_config = GenerationConfig.from_pretrained(directory)
    return module.eval()


def reads_by_parts(module: Any, directory: Path) -> bool:
    """Whether the files hold every tensor under the class's own name, and none that contradicts the config."""
    stored, known = stored_tensors(directory), _tensors(module)
    sizes = all(key not in known or known[key].numel() == count for key, count in stored.items())
    return sizes and not _missing(known, stored) and not denied_tensors(module, set(stored) - set(known))


def allocate(module: Any, device: str) -> None:
    """Allocate memory for this rank's part of the module; buffers keep their values."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to_empty(device=device)
    module.tie_weights()
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])


@torch.no_grad()
def read_parts(
    module: Any,
    name: str,
    directory: Path,
    rank: int,
    size: int,
    *,
    names: Mapping[str, str] | None = None,
    extra: Collection[str] = (),
) -> None:
    """Fill the module with this rank's rows of every tensor. A tied tensor is read under its first stored name.

    `names`: module name -> name in the files, if they differ. `extra`: names that no file has.
    """
    files = {key: file for file in weight_files(directory) for key in read_header(file)}
    tensors = {(names or {}).get(key, key): tensor for key, tensor in _tensors(module).items() if key not in extra}
    missing = _missing(tensors, files)
    if missing:
        raise ModelError(f"model {name!r}: {missing[0]} is not in its files, which use other names than its class.")
    read: set[int] = set()
    for file in dict.fromkeys(files.values()):
        with safe_open(file, "pt") as opened:
            for key, tensor in tensors.items():
                if files.get(key) == file and id(tensor) not in read:
                    read.add(id(tensor))
                    stored = opened.get_slice(key)
                    if tuple(stored.get_shape()) != tuple(tensor.shape):
                        raise ModelError(
                            f"model {name!r}: {key} has the shape {tuple(stored.get_shape())} in its files, and its config asks "
                            f"for {tuple(tensor.shape)}. Correct its config.json, or download it again."
                        )
                    _fill(tensor, stored, rank, size)


@contextmanager
def _without_weights() -> Iterator[None]:
    """Parameters created in this context are on the meta device; buffers are not."""
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


def _tensors(module: Any) -> dict[str, Tensor]:
    """What files store of a module, under all its names: parameters and persistent buffers."""
    found = dict(module.named_parameters(remove_duplicate=False))
    for place, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                found[f"{place}.{name}" if place else name] = buffer
    return found


def _missing(tensors: dict[str, Tensor], stored: Any) -> list[str]:
    """Tensors that are not stored under any of their names."""
    there = {id(tensor) for key, tensor in tensors.items() if key in stored}
    return [key for key, tensor in tensors.items() if id(tensor) not in there]


def _fill(weight: Tensor, stored: Any, rank: int, size: int) -> None:
    if not isinstance(weight, DTensor):
        weight.data.copy_(stored[...])
        return
    rows = weight.shape[0]
    chunk = -(-rows // size)
    start, stop = min(rank * chunk, rows), min((rank + 1) * chunk, rows)
    if start < stop:
        weight.to_local().copy_(stored[start:stop])


# --- A student that is sharded from the start ---
#
# Full copies are made only on request, for sampling or scoring. All ranks help to fill them.


class PreshardedModel(ShardedModel):
    """Each rank reads only its rows of the weights. `plain`: the module on the meta device, not sharded."""

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
        self._free_gathered()
        switch_attention(plain, module.config._attn_implementation)
        self._template = LanguageModel.__new__(LanguageModel)
        vars(self._template).update(vars(self) | {"module": plain, "head": plain.get_output_embeddings()})
        self._weights = dict(module.named_parameters())

    def inference_copy(self, dtype: torch.dtype | None = None, *, own: bool = False) -> LanguageModel:
        """A copy that shares no tensor with this model."""
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
        self._free_gathered()
        read_parts(self.module, self.name, directory, *self._place)


def files_here(name: str, revision: str | None) -> bool:
    directory = weights_directory(name, revision)
    return directory is not None and weights_here(directory)


def load_presharded(
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
) -> PreshardedModel | None:
    """None: each rank must load the full model. Its files are not here yet or use other tensor names than its class, or it does not run packed.

    With several machines, DistributedRanks agree on this beforehand (`files_here`): only some machines may have the weights.
    """

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
        attached = None if lora is None else AttachedAdapters(module, lora)
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
            model = PreshardedModel(*common)
        else:
            attached.fill(module, name, directory, device, place)
            model = PreshardedLora(*common, attached, saved)
    return model if model._one_call else None


# --- A student with adapters that is sharded from the start, frozen weights included ---
#
# Weights are merged layer by layer. No rank gathers more than one unit at a time, unless it asks for a copy for sampling.


class AttachedAdapters:
    """Adapters in a module on the meta device, and the map from its tensor names to the plain module's."""

    def __init__(self, module: Any, settings: Lora) -> None:
        """Stand-ins replace the weights meanwhile, so adapters are initialised exactly as with real weights."""
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
        """Fill the module, sharded by now, with this rank's rows of weights and adapters."""
        allocate(module, device)
        read_parts(module, name, directory, *place, names=self.plain_names, extra=self.drawn)
        with torch.no_grad():
            for key, weight in module.named_parameters():
                if key in self.drawn:
                    weight.copy_(shard_of(self.drawn[key].to(device), weight))


class PreshardedLora(PreshardedModel):
    """`saved`: the same module on the meta device, before sharding; checkpoints are written from a filled copy."""

    def __init__(
        self,
        module: Any,
        plain: Any,
        tokenizer: Any,
        name: str,
        mesh: DeviceMesh,
        most: Callable[[int], int],
        leads: bool,
        attached: AttachedAdapters,
        saved: tuple[Any, Any],
    ) -> None:
        super().__init__(module, plain, tokenizer, name, mesh, most, leads)
        self.adapter, self._saved, self._plain_names = attached.adapter, saved, attached.plain_names
        self.lora = self._template.lora = attached.settings

    def weights(self, version: int) -> WeightsRef:
        self._free_gathered()
        return WeightsRef(version, MergedWeights(self.module, self._plain_names, merge=True))

    def base(self) -> LanguageModel:
        """A full copy of the base: here its weights are sharded."""
        return self._copy(MergedWeights(self.module, self._plain_names, merge=False), None)

    def snapshot(self) -> LanguageModel:
        self._free_gathered()
        tensors = {}
        for name, weight in self.sharded_weights.items():
            found = gather_full(weight)
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
        """Restore the adapters; nothing else has changed."""
        self._free_gathered()
        file = directory / "adapter" / "adapter_model.safetensors"
        saved = load_file(file)
        for name, weight in self.trainable().items():
            tensor = saved.get(lora.file_name(name))
            if tensor is None or tensor.shape != weight.shape:
                raise ModelError(f"{file} does not fit model {self.name!r}: {name} is missing or of another shape.")
            weight.copy_(shard_of(tensor.to(self.device, weight.dtype), weight))


class MergedWeights(Mapping[str, Tensor]):
    """Weights by their plain names, with adapters merged or not. A unit is gathered when one of its weights is read."""

    def __init__(self, module: Any, plain_names: Mapping[str, str], *, merge: bool) -> None:
        self._module, self._names, self._merge = module, plain_names, merge
        known = set(fsdp_parts(module))
        parts = {name: part for name, part in module.named_modules() if part in known}
        owner = {name: max((at for at in parts if _inside(name, at)), key=len) for name in plain_names}
        self._part = {plain: parts[owner[name]] for name, plain in plain_names.items()}
        self._held: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._held:
            self._held = {}  # free this unit's memory before gathering the next
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
    """Replace the parameters with these ids by others; a shared parameter stays shared."""
    for child in module.modules():
        for name, weight in child._parameters.items():
            if weight is not None and id(weight) in others:
                child._parameters[name] = others[id(weight)]


# --- A frozen model whose layers are sharded over ranks ---
#
# A layer is gathered only while a pass goes through it. Embedding, norms and head are in full on every rank, because losses
# read the head itself.


INSTEAD = "Set cluster.teachers: whole, or serve it elsewhere (kind: served)."


class ShardedFrozenModel(LanguageModel):
    """All ranks must make the same number of passes, because each pass gathers layers from all ranks."""

    sharded = True
    stays = False

    def __init__(self, module: Any, tokenizer: Any, name: str, most: Callable[[int], int]) -> None:
        self._most = most
        super().__init__(module, tokenizer, name)
        if self.route.name != "packed" or self.route.limit is not None:
            raise ModelError(
                f"model {name!r}: it runs {self.route.name}, so ranks would call its layers unequally often. {INSTEAD}"
            )

    @torch.no_grad()
    def passes(self, packs: Sequence[T]) -> Iterator[T]:
        """Yield each pack, then make empty passes until every rank has made as many as the busiest one."""
        missing = self._most(len(packs)) - len(packs)
        yield from packs
        for _ in range(missing):
            self.hidden(torch.zeros(1, dtype=torch.int64, device=self.device), Packed.of([1], self.device))


def load_sharded_frozen(
    name: str, *, dtype: str, device: str, revision: str | None, mesh: DeviceMesh, most: Callable[[int], int]
) -> ShardedFrozenModel:
    config, tokenizer = load_config(name, revision), load_tokenizer(name, revision)
    directory = weights_directory(name, revision)
    if directory is None:
        raise ModelError(
            f"model {name!r}: it is an adapter merged into its base, so there are no files that ranks can read in parts. {INSTEAD}"
        )
    with reading_model(name, "the model", directory):
        check_files(name, config, locate(name, revision), directory)
        module = module_without_weights(config, dtype, directory)
        if not reads_by_parts(module, directory):
            raise ModelError(
                f"model {name!r}: its files use other tensor names than its class, so ranks cannot read them in parts. {INSTEAD}"
            )
        module.requires_grad_(False)
        layers = decoder_layers(module)
        if not layers:
            raise ModelError(f"model {name!r} has no layers that could be sharded over ranks. {INSTEAD}")
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        allocate(module, device)
        read_parts(module, name, directory, mesh.get_local_rank(), mesh.size())
    return ShardedFrozenModel(module, tokenizer, name, most)
