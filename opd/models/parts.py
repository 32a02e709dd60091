"""A model of which every rank reads its own part: built without memory for weights, sharded (FSDP2), and then filled with this
rank's rows of each tensor from the files, so that no rank ever holds more than its share of what is sharded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opd.errors import ModelError
from opd.models.complete import denied_tensors
from opd.models.directory import read_header, stored_tensors, weight_files
from opd.models.load import GENERATION, attention_of


def module_without_weights(config: Any, dtype: str, directory: Path) -> Any:
    """With the buffers and the generation config that it would be loaded with, and no dropout, either."""
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
    """Whether the files hold every tensor by the name that its class has for it, and none that the config denies."""
    stored, known = stored_tensors(directory), _tensors(module)
    sizes = all(key not in known or known[key].numel() == count for key, count in stored.items())
    return sizes and not _missing(known, stored) and not denied_tensors(module, set(stored) - set(known))


def allocate(module: Any, device: str) -> None:
    """Memory for what this rank has of it."""
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
    beside: Collection[str] = (),
) -> None:
    """This rank's rows of every tensor; of a tied one, under the first of its names that is stored.

    `names`: those of the files, where the module has others; `beside`: what no file has.
    """
    files = {key: file for file in weight_files(directory) for key in read_header(file)}
    tensors = {(names or {}).get(key, key): tensor for key, tensor in _tensors(module).items() if key not in beside}
    missing = _missing(tensors, files)
    if missing:
        raise ModelError(f"model {name!r}: {missing[0]} is not in its files, which have other names than its class.")
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


def _tensors(module: Any) -> dict[str, Tensor]:
    """What files hold of it, by all its names: parameters, and buffers that are no mere tables."""
    found = dict(module.named_parameters(remove_duplicate=False))
    for place, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                found[f"{place}.{name}" if place else name] = buffer
    return found


def _missing(tensors: dict[str, Tensor], stored: Any) -> list[str]:
    """Those that are stored under none of their names."""
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
