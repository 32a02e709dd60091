"""Gradient checkpointing: a layer keeps only its input and is recomputed in the backward pass.

transformers' own switch works only in training mode, which would also turn on the dropout of the base model's pre-training.
Here layers are wrapped instead, and the model stays in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from opd.common.errors import ModelError


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
