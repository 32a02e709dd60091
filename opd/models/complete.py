"""A checkpoint must hold every tensor of its model, and no tensor that its config denies.

transformers fills what is missing with random numbers and drops what it has no place for, with a line in a log.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opd.errors import ModelError


def load_complete(architecture: Any, path: str | Path, name: str, **arguments: Any) -> Any:
    """`architecture.from_pretrained(path, …)`, refused where the checkpoint and the model differ."""
    with _no_report():
        module, info = architecture.from_pretrained(path, output_loading_info=True, use_safetensors=True, **arguments)
    _reject_difference(name, module, info)
    return module


def check_tensors(name: str, architecture: Any, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """The same from names and shapes alone: tensors without memory go through the conversions of the model's class."""
    import torch

    tensors = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    try:
        with _no_report():
            module, info = architecture.from_pretrained(
                None,
                config=copy.deepcopy(config),
                state_dict=tensors,
                dtype=torch.float32,
                device_map={"": "meta"},
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except RuntimeError as error:
        if "conversion" not in str(error):
            raise
        raise ModelError(
            f"model {name!r}: the tensors of its checkpoint cannot be joined to those of {architecture.__name__}: some are "
            "missing, or have other shapes than the rest. Download or save it again, or correct its config.json."
        ) from None
    _reject_difference(name, module, info)


def _reject_difference(name: str, module: Any, info: dict[str, Any]) -> None:
    if info["missing_keys"]:
        raise ModelError(
            f"model {name!r}: its checkpoint lacks {some(info['missing_keys'])}, which would be random numbers. "
            "Download or save it again, or correct its config.json."
        )
    if info["mismatched_keys"]:
        key, stored, wanted = min(info["mismatched_keys"])
        raise ModelError(
            f"model {name!r}: its checkpoint has {key} of shape {tuple(stored)}, and its config asks for {tuple(wanted)}. "
            "Correct its config.json, or download or save it again."
        )
    denied = denied_tensors(module, info["unexpected_keys"])
    if denied:
        raise ModelError(
            f"model {name!r}: its checkpoint has {some(denied)}, for which {type(module).__name__} with its config has no place, "
            "so it would not be the model that was trained. Correct its config.json."
        )


@contextmanager
def _no_report() -> Iterator[None]:
    """What differs is told here, in a sentence. transformers prints a table of it, with names as the file has them."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def denied_tensors(module: Any, extra: set[str]) -> list[str]:
    """Biases of linear layers that the config says have none, and layers beyond its number of them.

    Anything else that is left over (a vision tower, a value head, old buffers) takes no part in the language model, nor do
    layers that predict further tokens.
    """
    own = {name for name, _ in module.named_parameters()}
    shapes = {re.sub(r"\d+", "#", name) for name in own}
    config = module.config
    further = getattr(config, "num_nextn_predict_layers", None) or getattr(config, "num_mtp_layers", None)
    return sorted(
        name
        for name in extra
        if (name.endswith(".bias") and name.removesuffix("bias") + "weight" in own)
        or (not further and re.sub(r"\d+", "#", name) in shapes)
    )


def some(names: Any) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more tensors" if len(ordered) > 3 else "")
