"""The output head of a model without the rest of it, for hidden states that come from elsewhere.

head = load_head("org/name")              # tokenizer, stop ids and one matrix; no layer is read
head.project(hidden_ND, size)             # its distribution
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opd.divergences import Projection
from opd.errors import ModelError
from opd.models.directory import INDEX, read_header, read_json, reading_model, weight_files
from opd.models.language_model import context_of, logit_scale, logit_softcap, plain_head
from opd.models.load import Location, empty_model, load_config, load_tokenizer, locate
from opd.models.tokenizers import stop_ids


@dataclass(frozen=True, eq=False)
class OutputHead:
    """`weight` is None where only its shape was asked for."""

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
        """Of the weights as they are here."""
        assert self.weight is not None
        raw = self.weight.detach().cpu().contiguous().view(torch.uint8)
        return hashlib.sha256(raw.numpy().data).hexdigest()


def describe_head(name: str, revision: str | None = None) -> OutputHead:
    """All but the weights: only a model's config and tokenizer are read."""
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
        with suppress(OSError):  # there is none
            module.generation_config = GenerationConfig.from_pretrained(location.path, **location.arguments)
        rows, width = plain_head(module, name).weight.shape
        stops = stop_ids(module, tokenizer, rows, name)
    scale, softcap = logit_scale(config), logit_softcap(config)
    return OutputHead(name, tokenizer, stops, rows, width, context_of(config), scale, softcap), module


def _names(module: Any, tensor: Tensor) -> list[str]:
    return [key for key, other in module.named_parameters(remove_duplicate=False) if other is tensor]


def _stored(name: str, location: Location, wanted: list[str]) -> tuple[Path, str]:
    """The file that holds one of these tensors, and which."""
    for path in _files(location, wanted):
        for key in wanted:
            if key in read_header(path):
                return path, key
    raise ModelError(f"model {name!r}: its files hold none of {', '.join(wanted)}, which its output head is read from.")


def _files(location: Location, wanted: list[str]) -> Iterable[Path]:
    """Of a model on the hub, only those that the index names for these tensors are fetched."""
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
