"""The parameter-space baseline: the plain average of several models' weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from opd.errors import RecipeError
from opd.models.language_model import LanguageModel


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
