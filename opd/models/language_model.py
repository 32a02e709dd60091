"""One wrapper around any causal LM: hidden states of packed sequences, and the head as a `Projection`.

model = load_model("tiny/generalist")
hidden_TD = model.hidden(ids_T, Packed.of([12, 7]))       # two sequences back to back
projection = model.project(hidden_TD)                     # logits, not multiplied out
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from opd.divergences import Projection
from opd.errors import ModelError
from opd.models import lora
from opd.models.attention import Packed, take
from opd.models.complete import load_complete
from opd.models.probe import choose_route, rotary_limit
from opd.models.recompute import checkpoint_layers, plain_layers
from opd.models.routes import Route
from opd.models.tokenizers import stop_ids, vocabulary_size
from opd.types import WeightsRef

if TYPE_CHECKING:
    from opd.models.graphed import PassGraphs
    from opd.models.packing import Row
    from opd.models.settings import Lora

T = TypeVar("T")


class LanguageModel:
    """`module` is the stock transformers class with our attention switched on; LoRA layers, if any, are inside it."""

    spread = False  # over ranks, which then make as many passes

    passes_alone = True  # whether a pass takes nobody but this process, so that it may make more of them

    stays = True  # whether its weights lie where they are, so that passes may be recorded

    graphs: PassGraphs | None = None  # of passes that are recorded; a copy has none

    lora: Lora | None = None  # settings of its adapters; a copy to sample with has them merged

    def __init__(self, module: Any, tokenizer: Any, name: str) -> None:
        self.module, self.tokenizer, self.name = module.eval(), tokenizer, name
        self.adapter: Any = None  # peft's wrapper, when there is one
        self._plain: Any = None  # the module as it was before LoRA layers were put in
        self.unquantised: dict[str, Tensor] = {}  # weights of quantised layers as they were, until someone has compared
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
        """The model below the head. Llama 4 has no base model of the name that its class gives."""
        base = self.module.base_model
        return base if base is not self.module else next(self.module.children())

    @property
    def context(self) -> int:
        return context_of(self.module.config)

    def hidden(self, ids_T: Tensor, layout: Packed) -> Tensor:
        """Final hidden states (T, D) of sequences packed back to back; row t predicts token t + 1."""
        return self.route.hidden(self.backbone, ids_T, layout)

    def project(self, hidden: Tensor) -> Projection:
        return Projection(hidden, self.head.weight, self.head.bias, self.scale, self.softcap, self.size)

    def predict(self, batch: Row) -> Projection:
        """The distribution of every response token of a batch: row t - 1 predicts token t."""
        hidden = None if self.graphs is None else self.graphs.hidden(batch.ids_T, batch.layout)
        if hidden is None:
            hidden = self.hidden(batch.ids_T, batch.layout)
        return self.project(take(hidden, batch.predicting_N))

    @contextmanager
    def resident(self) -> Iterator[LanguageModel]:
        """The model with its weights in memory; one whose weights wait elsewhere has them for as long."""
        yield self

    def inside(self, compute: Callable[[], T]) -> T:
        """Whatever reads weights for a loss runs in here: where they are sharded, they are whole inside."""
        return compute()

    def passes(self, packs: Sequence[T]) -> Iterator[T]:
        """The packs, one after the other; on several ranks all make as many passes as the busiest."""
        return iter(packs)

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    def finite(self) -> bool:
        """Whether all weights that training changes are numbers."""
        return all(bool(torch.isfinite(parameter).all()) for parameter in self.trainable().values())

    # LoRA

    def add_lora(self, settings: Lora) -> None:
        self._plain = share_module(self.module)
        self.adapter, self.lora = lora.attach(self.module, self.head, settings), settings

    def checkpoint_layers(self) -> None:
        """Trade time for memory in passes with gradients; copies for sampling are left as they are."""
        checkpoint_layers(self.module, self.name)

    def weights(self, version: int) -> WeightsRef:
        """The policy's weights by their plain names, LoRA merged; what is not adapted is shared, not copied."""
        plain = self.module if self.adapter is None else self._plain
        tensors = {name: parameter.detach() for name, parameter in plain.named_parameters()}
        if self.adapter is not None:
            tensors |= lora.merged_weights(self.module)
        return WeightsRef(version, tensors)

    def factors(self) -> dict[str, Tensor]:
        """LoRA's, by the names of peft's files; shared, not copied."""
        return {lora.file_name(name): parameter.detach() for name, parameter in self.trainable().items()}

    def inference_copy(self, dtype: torch.dtype | None = None, *, own: bool = False) -> LanguageModel:
        """A second module for sampling. Tensors are shared where nothing has to be converted or merged.

        `own`: whatever training changes is not shared, nor is the count of its changes that autograd keeps: another
        thread may sample with it, and load weights, in the middle of a backward pass.
        """
        clone, moving = copy.copy(self), self.moving()
        plain = self.module if self.adapter is None else self._plain
        converted = dtype not in (None, self.dtype)  # weights of another type are all written at every load
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
        """An `inference_copy` for who wants one; where weights are spread over ranks, all have to ask."""
        return self.inference_copy(dtype)

    def base(self) -> LanguageModel:
        """The model below the adapters; every tensor is shared."""
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
        """Take over the weights that `save` wrote there, bit for bit; tensors shared with a sampler stay shared."""
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
        """A plain Hugging Face directory (LoRA merged; the adapter beside it) that carries every stop id."""
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
    """The plain tensors that it is made of: itself, the several of a quantised one, or this rank's of one that is spread."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    inside = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [part for found in inside if isinstance(found, Tensor) for part in stored_parts(found)]


def share_module(module: Any, copied: Collection[str] = ()) -> Any:
    """A copy of the module tree whose frozen parameters share their storage with the original's, save for those `copied`."""
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
    """Gemma's name for it, RecurrentGemma's, and xLSTM's."""
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    return next((value for value in (getattr(config, name, None) for name in names) if value), None)


def plain_head(module: Any, name: str) -> nn.Linear:
    if module.config.is_encoder_decoder:
        raise ModelError(f"model {name!r} has an encoder and a decoder, and only decoders alone are supported.")
    head = module.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"model {name!r}: its output head is {type(head).__name__}, and only a plain linear head is supported."
        )
    return head


def context_of(config: Any) -> int:
    """The longest sequence; models without positions (Mamba, RWKV) have no limit of their own.

    Dynamic NTK turns positions differently once it has read something longer than it was trained on, so it stops there.
    """
    names = ("max_position_embeddings", "max_seq_len", "context_length")
    known = [rotary_limit(config, "dynamic"), *(getattr(config, name, None) for name in names)]
    return next((int(value) for value in known if value), sys.maxsize)
