"""Rollouts back to back in one row per forward pass, filled up to a token budget.

Position t - 1 predicts token t: `predicting` holds, for every response token in order, the row of the token before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from opd.divergences.upload import upload
from opd.models.attention import Packed
from opd.types import Rollout


@dataclass(frozen=True, eq=False, repr=False)
class Pack:
    """One forward pass. N = response tokens of all its rollouts, one after the other."""

    rollouts: tuple[Rollout, ...]
    ids_T: Tensor
    layout: Packed
    predicting_N: Tensor

    def __repr__(self) -> str:
        return f"Pack({len(self.rollouts)} rollouts, {self.ids_T.shape[0]} tokens, {self.predicting_N.shape[0]} of them responses)"

    @property
    def response_lengths(self) -> list[int]:
        return [rollout.response_ids.size for rollout in self.rollouts]

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], device: torch.device | str = "cpu") -> Pack:
        ids = np.concatenate([part for rollout in rollouts for part in (rollout.prompt_ids, rollout.response_ids)])
        starts = np.cumsum([0] + [rollout.length for rollout in rollouts[:-1]])
        predicting = [
            start + rollout.prompt_ids.size - 1 + np.arange(rollout.response_ids.size)
            for start, rollout in zip(starts, rollouts, strict=True)
        ]
        return cls(
            tuple(rollouts),
            upload(ids.astype(np.int64), device),
            Packed.of([rollout.length for rollout in rollouts], device),
            upload(np.concatenate(predicting), device),
        )


class Row(Protocol):
    """What a forward pass needs of a pack: ids back to back, and the rows that predict the tokens asked about.

    No row comes twice in `predicting_N`: its gradient is copied back, not added up (`attention.TakeRows`).
    """

    @property
    def ids_T(self) -> Tensor: ...
    @property
    def layout(self) -> Packed: ...
    @property
    def predicting_N(self) -> Tensor: ...


class Sized(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def length(self) -> int: ...


S = TypeVar("S", bound=Sized)


def pack(rollouts: Sequence[S], budget: int, unit: Callable[[S], str] | None = None) -> list[list[S]]:
    """Cut rollouts, in their order, into batches of at most `budget` tokens. Rollouts of one unit stay together.

    A single unit above the budget gets a batch of its own: it is never split, dropped or cut.
    """
    units: dict[str, list[S]] = {}
    for rollout in rollouts:
        units.setdefault(unit(rollout) if unit else rollout.id, []).append(rollout)
    batches: list[list[S]] = []
    room = 0
    for members in units.values():
        size = sum(rollout.length for rollout in members)
        if not batches or size > room:
            batches.append([])
            room = budget
        batches[-1] += members
        room -= size
    return batches
