"""Small arrays onto the device without waiting for it: a plain copy would first let everything queued there finish."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device | str) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()  # the caching host allocator keeps it until the copy is done
    return tensor.to(device, non_blocking=True)
