"""How a batch of sequences goes through a model: packed, padded, or one sequence at a time.

Packed is what a model gets when its probe allows it (see `models.probe`). Models with state other than keys and values
(Mamba, gated delta nets, short convolutions), or whose attention does not come through transformers' interface, would
carry one packed sequence into the next: they run through their stock forward pass on rectangles padded on the right.
Behind a causal model's own mask or recurrence no real token sees the padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opd.models.attention import Packed

STRETCH = 2  # a rectangle's longest sequence is at most this many times its shortest, so at most half of it is padding


@dataclass(frozen=True)
class PackedRoute:
    """All sequences back to back in one row, through our attention.

    Beyond `limit` tokens longrope's frequencies follow the largest position of the batch, so every sequence goes alone.
    """

    limit: int | None = None
    name: str = "packed"
    why: str = ""

    def hidden(self, backbone: Any, ids_T: Tensor, layout: Packed) -> Tensor:
        """Final hidden states (T, D) of the sequences that `layout` describes."""
        if self.limit is None or max(layout.lengths) <= self.limit:
            return _packed(backbone, ids_T, layout)
        parts = ids_T.split(list(layout.lengths))
        return torch.cat([_packed(backbone, part, Packed.of([part.numel()], part.device)) for part in parts])


@dataclass(frozen=True)
class StockRoute:
    """The stock forward pass on rectangles of sequences of similar length; `alone`: one sequence each."""

    why: str
    alone: bool = False
    limit: int | None = None

    @property
    def name(self) -> str:
        return "alone" if self.alone else "padded"

    def hidden(self, backbone: Any, ids_T: Tensor, layout: Packed) -> Tensor:
        parts = ids_T.split(list(layout.lengths))
        found: dict[int, Tensor] = {}
        for group in self._groups(layout.lengths):
            longest = max(layout.lengths[index] for index in group)
            rows = ids_T[:1].repeat(len(group), longest)
            for row, index in enumerate(group):
                rows[row, : layout.lengths[index]] = parts[index]
            out = backbone(input_ids=rows, use_cache=False).last_hidden_state
            found |= {index: out[row, : layout.lengths[index]] for row, index in enumerate(group)}
        return torch.cat([found[index] for index in range(len(parts))])

    def _groups(self, lengths: tuple[int, ...]) -> list[list[int]]:
        alone = self.alone or (self.limit is not None and max(lengths) > self.limit)
        groups: list[list[int]] = []
        for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
            if alone or not groups or lengths[index] > STRETCH * lengths[groups[-1][0]]:
                groups.append([])
            groups[-1].append(index)
        return groups


Route = PackedRoute | StockRoute


def _packed(backbone: Any, ids_T: Tensor, layout: Packed) -> Tensor:
    out = backbone(input_ids=ids_T[None], position_ids=layout.positions[None], use_cache=False, layout=layout)
    return out.last_hidden_state.squeeze(0)
