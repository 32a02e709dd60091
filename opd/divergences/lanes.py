"""Elementwise functions whose result does not depend on where in a tensor an element lies.

On a CPU, PyTorch runs `exp`, `log` or `tanh` over whole vectors and finishes the last few elements one by one, with a
scalar function that may round the last bit differently (it does with AVX-512). A row at the end of a batch would then
differ from the same row at its beginning.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

LANES = 64  # elements one turn of the widest loop takes: two vectors of 512 bits, 16 bits each


def evenly(function: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """`function` of every element, padded to whole turns of the loop, so that equal elements give equal bits."""
    first = values[0]
    missing = -first.numel() % LANES
    if missing == 0 or first.device.type != "cpu":
        return function(*values)
    return function(*(pad(tensor.flatten(), (0, missing)) for tensor in values))[: first.numel()].view(first.shape)


def even_logsumexp(values: Tensor) -> Tensor:
    """(N, E) -> (N,). A row of -inf alone gives -inf."""
    peak = values.amax(-1).clamp(min=torch.finfo(values.dtype).min)
    return evenly(torch.log, evenly(torch.exp, values - peak[:, None]).sum(-1)) + peak
