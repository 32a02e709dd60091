"""Our attention functions, registered with transformers under the name `opd`.

Stock model classes run unchanged: they hand query, key and value to whatever `config._attn_implementation` names,
and pass unknown keyword arguments along. A `layout` argument therefore travels from `backbone(…, layout=…)` to every
attention layer and says how the rows of this batch relate to each other: `Packed` here, the sampler's slots in
`rollout.slots`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "opd"


class Layout(Protocol):
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """query (B, H, Q, D), key and value (B, G, K, D) with G dividing H, sinks (H,) -> (B, Q, H, Dv)."""
        ...


class Unknown(Exception):
    """A model asks its attention for something these functions do not do."""


HARMLESS = {"position_ids", "cache_position"}  # tensors that stock classes pass along and attention itself never reads


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *,
    layout: Layout | None = None, scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """`s_aux` are attention sinks: one score per head that takes part in the softmax and leads nowhere."""
    if layout is None:
        raise Unknown("its layers do not pass arguments on to their attention")
    if attention_mask is not None:
        raise Unknown("it masks attention in a way of its own")
    for name, value_given in others.items():
        if isinstance(value_given, Tensor) and name not in HARMLESS:
            raise Unknown(f"it passes {name} to its attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layout.attend(query, key, value, scale, sliding_window, softcap, s_aux), None


AttentionInterface.register(NAME, attention)


@dataclass(frozen=True, eq=False)
class Packed:
    """Several sequences back to back in one row, each seeing only itself.

    For attention alone the sequences are padded on the right to a rectangle: behind a causal mask no real token sees
    the padding, so no mask is stored and nothing outside attention is computed on padding.
    """

    lengths: tuple[int, ...]
    positions: Tensor  # (T,) restart at 0 with each sequence
    cells: Tensor  # (T,) where each token sits in the flattened (sequences, longest) rectangle
    gather: Tensor  # (sequences * longest,) the token of each cell; padding repeats token 0

    @classmethod
    def of(cls, lengths: list[int], device: torch.device | str = "cpu") -> Packed:
        longest = max(lengths)
        positions = np.concatenate([np.arange(length) for length in lengths])
        cells = np.concatenate([row * longest + np.arange(length) for row, length in enumerate(lengths)])
        gather = np.zeros(len(lengths) * longest, dtype=np.int64)
        gather[cells] = np.arange(cells.size)
        positions_T, cells_T, gather_C = (torch.from_numpy(array).to(device) for array in (positions, cells, gather))
        return cls(tuple(lengths), positions_T, cells_T, gather_C)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        rows, longest = len(self.lengths), max(self.lengths)

        def rectangle(tensor: Tensor) -> Tensor:  # (1, H, T, D) -> (rows, H, longest, D)
            spread = tensor[0].transpose(0, 1)[self.gather]
            return spread.unflatten(0, (rows, longest)).transpose(1, 2)

        query, key, value = rectangle(query), rectangle(key), rectangle(value)
        if softcap is None and sinks is None and (window is None or window >= longest):
            out = scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
            )
        else:
            out = masked_attention(query, key, value, self._mask(longest, window, query.device), scale, softcap, sinks)
        return out.transpose(1, 2).flatten(0, 1)[self.cells][None]

    @staticmethod
    def _mask(longest: int, window: int | None, device: torch.device) -> Tensor:
        distance = torch.arange(longest, device=device)[:, None] - torch.arange(longest, device=device)
        return (distance >= 0) & (distance < (window or longest))


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention written out, for what the fused kernels do not offer: soft-capped scores, arbitrary masks, sinks."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, column], -1).softmax(-1, dtype=torch.float32)[..., :-1]
    return weights.to(query.dtype) @ value
