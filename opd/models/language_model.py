"""A wrapper around any causal LM: hidden states of packed sequences, and the head as a `Projection`.

model = load_model("tiny/generalist")
hidden_TD = model.hidden(ids_T, Packed.of([12, 7]))       # two sequences back to back
projection = model.project(hidden_TD)                     # logits, not multiplied out
"""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from opd.common.errors import ModelError, RecipeError
from opd.divergences import Projection
from opd.divergences.projection import upload
from opd.models import lora
from opd.models.attention import Packed, Route, TakeRows, choose_route, rotary_limit
from opd.models.files import INDEX, read_header, read_json, read_shapes, reading_model, weight_files
from opd.models.load import (
    CONFIG,
    WEIGHTS_FILE,
    Location,
    empty_model,
    load_complete,
    load_config,
    load_tokenizer,
    locate,
    require_same_tensors,
    wanted_shapes,
)
from opd.models.tokenizers import stop_ids, vocabulary_size
from opd.records import Layers, Rollout, WeightsRef

if TYPE_CHECKING:
    from opd.models.cuda_graphs import PassGraphs
    from opd.models.settings import Lora


T = TypeVar("T")


class LanguageModel:
    """`module` is the stock transformers class with our attention switched on; LoRA layers, if any, are inside it."""

    sharded = False  # whether layers are sharded over ranks, which must then make the same number of passes

    passes_alone = True  # whether a pass involves only this process, so that it may make extra passes

    stays = True  # whether its weights keep their addresses, so that passes can be recorded

    has_modules = False  # whether trainable modules read its hidden states, even if it gets no gradient itself

    graphs: PassGraphs | None = None  # recorded passes; a copy has none

    lora: Lora | None = None  # settings of its adapters; a copy for sampling has them merged

    def __init__(self, module: Any, tokenizer: Any, name: str) -> None:
        self.module, self.tokenizer, self.name = module.eval(), tokenizer, name
        self.adapter: Any = None  # peft's wrapper, when there is one
        self._plain: Any = None  # the module before LoRA layers were added
        self.unquantised: dict[str, Tensor] = {}  # original weights of quantised layers, kept until they were compared
        self.head = plain_head(module, name)
        self.scale, self.softcap = logit_scale(module.config), logit_softcap(module.config)
        rows = self.head.weight.shape[0]
        self.stop_ids = stop_ids(module, tokenizer, rows, name)
        self.size = vocabulary_size(tokenizer, self.stop_ids, rows)
        self.own_attention: str = module.config._attn_implementation
        self.route: Route = choose_route(self)

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.module.parameters())
        kind = f"{type(self.module).__name__}{'' if self.lora is None else ' with LoRA'}"
        return f"LanguageModel({self.name!r}, {kind}, {count:,} parameters, {str(self.dtype)[6:]} on {self.device})"

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    @property
    def backbone(self) -> Any:
        """The model below the head. Llama 4's class names a base model that it does not have."""
        base = self.module.base_model
        return base if base is not self.module else next(self.module.children())

    @property
    def context(self) -> int:
        return context_of(self.module.config)

    def hidden(self, ids_T: Tensor, layout: Packed, layers: Sequence[int] = ()) -> Tensor:
        """Final hidden states (T, D) of sequences packed back to back; row t predicts token t + 1. With `layers`: (T, L, D)."""
        return self.route.hidden(self.backbone, ids_T, layout, layers)

    def project(self, hidden: Tensor) -> Projection:
        return Projection(hidden, self.head.weight, self.head.bias, self.scale, self.softcap, self.size)

    def predict(self, batch: Row) -> Projection:
        """The distribution of every response token of a batch: row t - 1 predicts token t."""
        hidden = None if self.graphs is None else self.graphs.hidden(batch.ids_T, batch.layout)
        if hidden is None:
            hidden = self.hidden(batch.ids_T, batch.layout)
        return self.project(TakeRows.apply(hidden, batch.predicting_N))

    def layers(self, batch: Row, layers: Layers) -> Tensor:
        """(N, L + 1, D), the hidden states after each of these layers and the final ones, at the rows that predict tokens."""
        depth = self.module.config.get_text_config().num_hidden_layers
        asked = [*layer_numbers(layers, depth), depth]
        return TakeRows.apply(self.hidden(batch.ids_T, batch.layout, asked), batch.predicting_N)

    def predict_layers(self, batch: Row, layers: Layers) -> tuple[Projection, Tensor]:
        """As `predict`, and the hidden states (N, L, D) after each of these layers."""
        states = self.layers(batch, layers)
        return self.project(states[:, -1]), states[:, :-1]

    @contextmanager
    def resident(self) -> Iterator[LanguageModel]:
        """The model with its weights in memory. Offloaded weights are loaded for the duration of the context."""
        yield self

    def inside(self, compute: Callable[[], T]) -> T:
        """Run code that reads weights for a loss. Sharded weights are gathered inside."""
        return compute()

    def passes(self, packs: Sequence[T]) -> Iterator[T]:
        """The packs, one after the other. On several ranks all make as many passes as the busiest one."""
        return iter(packs)

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    def outer(self) -> set[str]:
        """Names of trainable weights outside hidden layers: embeddings and the output head."""
        parts = {
            name for name, child in self.module.named_modules() if isinstance(child, nn.Embedding) or child is self.head
        }
        return {name for name in self.trainable() if name.rpartition(".")[0] in parts or ".lora_embedding_" in name}

    def finite(self) -> bool:
        """Whether all trainable weights are finite."""
        return all(bool(torch.isfinite(parameter).all()) for parameter in self.trainable().values())

    # LoRA

    def add_lora(self, settings: Lora) -> None:
        self._plain = share_module(self.module)
        self.adapter, self.lora = lora.attach(self.module, self.head, settings), settings

    def checkpoint_layers(self) -> None:
        """Trade time for memory in passes with gradients; copies for sampling do not recompute."""
        checkpoint_layers(self.module, self.name)

    def weights(self, version: int) -> WeightsRef:
        """The policy's weights by their plain names, LoRA merged. Weights without adapters are shared, not copied."""
        plain = self.module if self.adapter is None else self._plain
        tensors = {name: parameter.detach() for name, parameter in plain.named_parameters()}
        if self.adapter is not None:
            tensors |= lora.merged_weights(self.module)
        return WeightsRef(version, tensors)

    def factors(self) -> dict[str, Tensor]:
        """LoRA factors by their names in peft's files; shared, not copied."""
        return {lora.file_name(name): parameter.detach() for name, parameter in self.trainable().items()}

    def inference_copy(self, dtype: torch.dtype | None = None, *, own: bool = False) -> LanguageModel:
        """A second module for sampling. Tensors that need no conversion or merging are shared.

        `own`: do not share trainable weights or their autograd version counters, so that another thread may sample with
        the copy, and load weights, in the middle of a backward pass.
        """
        clone, moving = copy.copy(self), self.moving()
        plain = self.module if self.adapter is None else self._plain
        converted = dtype not in (None, self.dtype)  # then every load writes all weights
        copied = {name for name, _ in plain.named_parameters() if converted or name in moving}
        clone.module = share_module(plain, copied if own else ())
        clone.adapter, clone._plain, clone.graphs = None, None, None
        adapted = set() if self.adapter is None else moving
        for name, parameter in clone.module.named_parameters():
            if dtype not in (None, parameter.dtype):
                parameter.data = parameter.data.to(dtype)
            elif name in adapted and not own:
                parameter.data = parameter.data.clone()
        clone.head = clone.module.get_output_embeddings()
        plain_layers(clone.module)
        return clone

    def copied(self, dtype: torch.dtype | None, wanted: bool) -> LanguageModel | None:
        """An `inference_copy` if `wanted`. With weights sharded over ranks, all ranks must call it."""
        return self.inference_copy(dtype)

    def base(self) -> LanguageModel:
        """The model without its adapters; every tensor is shared."""
        clone = copy.copy(self)
        clone.module, clone.adapter, clone._plain, clone.graphs = share_module(self._plain), None, None, None
        clone.lora = None
        clone.head = clone.module.get_output_embeddings()
        plain_layers(clone.module)
        return clone

    def moving(self) -> set[str]:
        """Plain names of the weights that training changes."""
        return set(self.trainable()) if self.adapter is None else {name for name, _ in lora.adapted_layers(self.module)}

    # Saving

    def snapshot(self) -> LanguageModel:
        """A copy to `save` while this one trains on. A whole model is copied to the CPU; LoRA copies only its adapter."""
        whole = self.adapter is None
        memo: dict[int, Any] = {}
        for module in (self.module, self._plain):
            for parameter in module.parameters() if module is not None else ():
                tensor = parameter.detach()
                if whole or parameter.requires_grad:
                    tensor = tensor.to("cpu" if whole else tensor.device, copy=True)
                memo.setdefault(id(parameter), nn.Parameter(tensor, requires_grad=False))
        clone = copy.copy(self)
        clone.graphs = None
        clone.adapter, clone.module, clone._plain = copy.deepcopy((self.adapter, self.module, self._plain), memo)
        return clone

    def restore(self, directory: Path) -> None:
        """Load the weights that `save` wrote there, bit for bit; tensors shared with a sampler stay shared."""
        if self.adapter is not None:
            lora.load_adapter(self.adapter, directory / "adapter")
            return
        saved = load_complete(type(self.module), directory, str(directory), dtype=self.dtype)
        tensors = {name: parameter.detach() for name, parameter in saved.named_parameters()}
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                if name not in tensors or tensors[name].shape != parameter.shape:
                    raise ModelError(
                        f"{directory} does not fit model {self.name!r}: {name} is missing or of another shape."
                    )
                parameter.copy_(tensors[name])

    def save(self, directory: Path | str, stop: tuple[int, ...] = ()) -> None:
        """Write a plain Hugging Face directory with every stop id. LoRA is merged; the adapter is saved in `adapter/`."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        module = self.module
        if self.adapter is not None:
            module = share_module(self._plain)
            tensors = self.weights(0).tensors
            for name, parameter in module.named_parameters():
                parameter.data = tensors[name]
            lora.save_adapter(self.adapter, directory / "adapter")
        stops = tuple(dict.fromkeys(self.stop_ids + stop))
        if stops:
            module.generation_config.eos_token_id = stops[0] if len(stops) == 1 else list(stops)
        module.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)


def stored_parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor consists of: itself, the parts of a quantised one, or this rank's part of a sharded one."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    inside = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [part for found in inside if isinstance(found, Tensor) for part in stored_parts(found)]


def share_module(module: Any, copied: Collection[str] = ()) -> Any:
    """A copy of the module tree with frozen parameters that share the original's storage, except those named in `copied`."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(
            parameter.detach().clone() if name in copied else parameter.detach(), requires_grad=False
        )
        for name, parameter in module.named_parameters()
    }
    return copy.deepcopy(module, memo)


def logit_scale(config: Any) -> float:
    """Cohere multiplies its logits, Granite and MiniCPM divide them, Falcon-H1 has a multiplier for its head."""
    divisor = getattr(config, "logits_scaling", None) or 1.0
    return float(getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0 / divisor)


def logit_softcap(config: Any) -> float | None:
    """The cap on logits, under Gemma's, RecurrentGemma's or xLSTM's name for it."""
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    return next((value for value in (getattr(config, name, None) for name in names) if value), None)


def plain_head(module: Any, name: str) -> nn.Linear:
    if module.config.is_encoder_decoder:
        raise ModelError(f"model {name!r} has an encoder and a decoder, and only decoder-only models are supported.")
    head = module.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"model {name!r}: its output head is {type(head).__name__}, and only a plain linear head is supported."
        )
    return head


def context_of(config: Any) -> int:
    """The longest sequence; models without positions (Mamba, RWKV) have no limit.

    Dynamic NTK changes its rotary frequencies after a sequence longer than its training length, so that length is its limit.
    """
    names = ("max_position_embeddings", "max_seq_len", "context_length")
    known = [rotary_limit(config, "dynamic"), *(getattr(config, name, None) for name in names)]
    return next((int(value) for value in known if value), sys.maxsize)


# --- Only the output head of a model, for hidden states that come from elsewhere ---
#
# head = load_head("org/name")              # tokenizer, stop ids and one matrix; no layer is read
# head.project(hidden_ND, size)             # its distribution


@dataclass(frozen=True, eq=False)
class OutputHead:
    """`weight` is None if only its shape was requested (`describe_head`)."""

    name: str
    tokenizer: Any
    stop_ids: tuple[int, ...]
    rows: int
    width: int
    context: int
    scale: float
    softcap: float | None
    weight: Tensor | None = None
    bias: Tensor | None = None

    def project(self, hidden: Tensor, size: int) -> Projection:
        assert self.weight is not None
        return Projection(hidden.to(self.weight), self.weight, self.bias, self.scale, self.softcap, size)

    @property
    def digest(self) -> str:
        """Hash of the weights in memory."""
        assert self.weight is not None
        raw = self.weight.detach().cpu().contiguous().view(torch.uint8)
        return hashlib.sha256(raw.numpy().data).hexdigest()


def describe_head(name: str, revision: str | None = None) -> OutputHead:
    """The head without its weight: reads only the model's config and tokenizer."""
    found, _ = _described(name, revision)
    return found


def load_head(name: str, revision: str | None = None, dtype: str = "float32", device: str = "cpu") -> OutputHead:
    from safetensors import safe_open

    found, module = _described(name, revision)
    location = locate(name, revision)
    if location.adapter is not None:
        raise ModelError(f"model {name!r} is an adapter, which has no output head. Name its base, {location.path!r}.")
    head = module.get_output_embeddings()
    names = _names(module, head.weight)
    if module.config.tie_word_embeddings:
        names += _names(module, module.get_input_embeddings().weight)

    def read(wanted: list[str], shape: tuple[int, ...]) -> Tensor:
        path, key = _stored(name, location, wanted)
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(key)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"model {name!r}: {key} in {path} is {tuple(tensor.shape)}, and its config says {shape}.")
        return tensor.to(device=device, dtype=getattr(torch, dtype))

    with reading_model(name, "its output head", location.directory):
        weight = read(names, (found.rows, found.width))
        bias = None if head.bias is None else read(_names(module, head.bias), (found.rows,))
    return replace(found, weight=weight, bias=bias)


def _described(name: str, revision: str | None) -> tuple[OutputHead, Any]:
    from transformers import GenerationConfig

    config, tokenizer, location = load_config(name, revision), load_tokenizer(name, revision), locate(name, revision)
    with reading_model(name, "its config", location.directory):
        module = empty_model(config)
        with suppress(OSError):  # no generation config
            module.generation_config = GenerationConfig.from_pretrained(location.path, **location.arguments)
        rows, width = plain_head(module, name).weight.shape
        stops = stop_ids(module, tokenizer, rows, name)
    scale, softcap = logit_scale(config), logit_softcap(config)
    return OutputHead(name, tokenizer, stops, rows, width, context_of(config), scale, softcap), module


def _names(module: Any, tensor: Tensor) -> list[str]:
    return [key for key, other in module.named_parameters(remove_duplicate=False) if other is tensor]


def _stored(name: str, location: Location, wanted: list[str]) -> tuple[Path, str]:
    """The file that holds one of these tensors, and that tensor's name."""
    for path in _files(location, wanted):
        for key in wanted:
            if key in read_header(path):
                return path, key
    raise ModelError(f"model {name!r}: its files hold none of {', '.join(wanted)}, which its output head is read from.")


def _files(location: Location, wanted: list[str]) -> Iterable[Path]:
    """The model's weight files. From the hub, only those with these tensors are downloaded."""
    if location.directory is not None:
        return weight_files(location.directory)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        table = read_json(Path(hf_hub_download(location.path, INDEX, revision=location.revision)))["weight_map"]
        files = dict.fromkeys(table[key] for key in wanted if key in table)
    except EntryNotFoundError:
        files = {"model.safetensors": None}
    return [Path(hf_hub_download(location.path, file, revision=location.revision)) for file in files]


def layer_numbers(layers: Layers, depth: int) -> list[int]:
    """Of the layers after which states are taken, from 1."""
    first, every = {"last": (depth, 1), "all": (1, 1), "even": (1, 2), "odd": (2, 2)}[layers]
    return list(range(first, depth + 1, every))


# --- Packing rollouts into forward passes, up to a token budget ---
#
# Position t - 1 predicts token t: `predicting` holds, for every response token in order, the row of the token before it.


@dataclass(frozen=True, eq=False, repr=False)
class Pack:
    """One forward pass. N = response tokens of all its rollouts, one after the other."""

    rollouts: tuple[Rollout, ...]
    ids_T: Tensor
    layout: Packed
    predicting_N: Tensor
    response_lengths: list[int]

    def __repr__(self) -> str:
        return f"Pack({len(self.rollouts)} rollouts, {self.ids_T.shape[0]} tokens, {self.predicting_N.shape[0]} of them responses)"

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], device: torch.device | str = "cpu") -> Pack:
        ids = np.concatenate([part for rollout in rollouts for part in (rollout.prompt_ids, rollout.response_ids)])
        starts = np.cumsum([0] + [rollout.length for rollout in rollouts[:-1]])
        predicting = [
            start + rollout.prompt_ids.size - 1 + np.arange(rollout.response_ids.size)
            for start, rollout in zip(starts, rollouts, strict=True)
        ]
        return cls(
            tuple(rollouts),
            upload(ids.astype(np.int64), device),
            Packed.of([rollout.length for rollout in rollouts], device),
            upload(np.concatenate(predicting), device),
            [rollout.response_ids.size for rollout in rollouts],
        )


class Row(Protocol):
    """What a forward pass needs from a pack: ids back to back, and the rows that predict the tokens in question.

    `predicting_N` has no duplicates: its gradient is copied back, not added up (`attention.TakeRows`).
    """

    @property
    def ids_T(self) -> Tensor: ...
    @property
    def layout(self) -> Packed: ...
    @property
    def predicting_N(self) -> Tensor: ...


class Sized(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def length(self) -> int: ...


S = TypeVar("S", bound=Sized)


def pack(rollouts: Sequence[S], budget: int, unit: Callable[[S], str] | None = None) -> list[list[S]]:
    """Split rollouts, in order, into batches of at most `budget` tokens. Rollouts of one unit stay together.

    A unit above the budget gets a batch of its own: it is never split, dropped or truncated.
    """
    units: dict[str, list[S]] = {}
    for rollout in rollouts:
        units.setdefault(unit(rollout) if unit else rollout.id, []).append(rollout)
    batches: list[list[S]] = []
    room = 0
    for members in units.values():
        size = sum(rollout.length for rollout in members)
        if not batches or size > room:
            batches.append([])
            room = budget
        batches[-1] += members
        room -= size
    return batches


# --- Baseline: the plain average of several models' weights ---


def weight_average(models: Sequence[LanguageModel]) -> LanguageModel:
    """A model whose every weight is the mean of the given models' weights."""
    merged = models[0].inference_copy()
    tensors = [model.weights(0).tensors for model in models]
    with torch.no_grad():
        for name, parameter in merged.module.named_parameters():
            shapes = {tuple(weights[name].shape) for weights in tensors if name in weights}
            if len(shapes) != 1 or any(name not in weights for weights in tensors):
                raise RecipeError(
                    "eval.weight_average: the teachers do not have the same shapes, so their weights cannot be averaged. Set it to false."
                )
            found = [weights[name].to(parameter.device, torch.float32) for weights in tensors]
            parameter.data = torch.stack(found).mean(0).to(parameter.dtype)
    return merged


# --- Gradient checkpointing: a layer keeps only its input and is recomputed in the backward pass ---
#
# transformers' own switch works only in training mode, which would also turn on the dropout of the base model's pre-training.
# Here layers are wrapped instead, and the model stays in evaluation mode.


def checkpoint_layers(module: Any, name: str) -> None:
    layers = decoder_layers(module)
    if not layers:
        raise ModelError(
            f"student.gradient_checkpointing: model {name!r} ({type(module).__name__}) has no layers that can be recomputed. "
            "Leave it out, and lower train.micro_tokens instead."
        )
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward)


def plain_layers(module: Any) -> None:
    """Undo `checkpoint_layers`, in a copy that only samples."""
    for layer in decoder_layers(module):
        vars(layer).pop("forward", None)


def decoder_layers(module: Any) -> list[Any]:
    return [child for child in module.modules() if isinstance(child, GradientCheckpointingLayer)]


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


# --- An adapter over a shared base model: it has its own layers, shares the base's tensors and merges nothing ---
#
# So each specialist over one base costs only its adapter. Adapters are never switched, so no model can answer with another's
# adapter, and the base is never written to.


# Settings that add more to the weights than a product of two factors, or change the base while loading.
OTHER_WAYS = ("use_dora", "modules_to_save", "trainable_token_indices", "layer_replication", "lora_bias", "use_qalora")
STARTS = (
    True,
    False,
    None,
    "gaussian",
)  # allowed `init_lora_weights`; others subtract the initial factors from the base


class AdaptedModel(LanguageModel):
    """A base with an adapter's layers added. Copies for sampling have the adapter merged."""

    def __init__(self, base: LanguageModel, name: str, directory: Path) -> None:
        vars(self).update(vars(base.inference_copy()))
        self.name, self._plain = name, share_module(self.module)
        self.adapter = _attached(self.module, name, directory, base.device)
        self.module.eval().requires_grad_(False)

    def inference_copy(self, dtype: torch.dtype | None = None, *, own: bool = False) -> LanguageModel:
        clone = super().inference_copy(dtype, own=own)
        merged = lora.merged_weights(self.module)
        for name, parameter in clone.module.named_parameters():
            if name in merged:
                parameter.data = merged[name].to(parameter.dtype)
        return clone


def check_adapter(name: str, directory: Path, empty: Any) -> None:
    """Reject an adapter that is incomplete or made for another model. `empty`: this model on the meta device."""
    settings = read_json(directory / CONFIG)
    _check_adapter_settings(name, settings)
    head = next(key for key, child in empty.named_modules() if child is empty.get_output_embeddings())
    with reading_model(name, "its adapter", directory):
        stored = read_shapes(directory / WEIGHTS_FILE)
        _check_adapter_tensors(name, stored, head)
        require_same_tensors(name, settings, wanted_shapes(name, directory, empty), stored)


def _check_adapter_settings(name: str, settings: dict[str, Any]) -> None:
    if settings.get("peft_type") != "LORA":
        raise ModelError(
            f"adapter {name!r} is a {settings.get('peft_type')}, and only LoRA can share its base. Merge it."
        )
    other = next((key for key in OTHER_WAYS if settings.get(key)), None)
    if other is None and settings.get("bias", "none") != "none":
        other = "bias"
    if other is None and settings.get("init_lora_weights") not in STARTS:
        other = "init_lora_weights"
    if other is not None:
        raise ModelError(
            f"adapter {name!r} has {other} {settings[other]!r}, which more than adds two factors to a base that is shared. "
            "Merge it into its base and name that as a frozen teacher."
        )


def _check_adapter_tensors(name: str, stored: dict[str, tuple[int, ...]], head: str) -> None:
    """Reject adapters on the head or on embeddings, which may share its matrix: exact divergences read the head's matrix directly."""
    for key in stored:
        if "lora_embedding" in key or f".{head}." in key or "lora_" not in key:
            what = "embeddings" if "embed" in key else "output head" if f".{head}." in key else "whole tensors"
            raise ModelError(
                f"adapter {name!r} has {key}: it changes the {what}, which adapters over a shared base cannot. "
                "Merge it into its base and name that as a frozen teacher."
            )


def _attached(module: Any, name: str, directory: Path, device: torch.device) -> Any:
    lora.require_peft()
    from peft import PeftModel

    with reading_model(name, "its adapter", directory):
        return PeftModel.from_pretrained(module, str(directory), is_trainable=False, torch_device=str(device))
