"""A sampler on several ranks: each answers its share of the requests, or the first ranks all of them, and every rank sees every token.

Draws are keyed by the request, so who answers it changes nothing. Tokens are exchanged in rounds, so that the leader can make
them durable while others are still being drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.types import Finished, SampledToken, SampleRequest, TokenSampler, WeightsRef

if TYPE_CHECKING:
    from opd.trainer.world import World

ROUND = 512  # events of a rank between two exchanges


class SharedSampler:
    """`sharers`: how many ranks have one, the first ones; default: all."""

    def __init__(self, sampler: TokenSampler | None, world: World, sharers: int | None = None) -> None:
        self.own, self._world = sampler, world
        self._sharers = world.size if sharers is None else sharers

    def load(self, weights: WeightsRef) -> None:
        if self.own is not None:
            self.own.load(weights)
            return
        for name in weights.tensors:  # gathered from all ranks, for those that have a sampler
            weights.tensors[name]

    def sample(self, requests: Iterable[SampleRequest]) -> Iterator[SampledToken | Finished]:
        mine = dealt(list(requests), self._world.rank, self._sharers)
        events = iter(self.own.sample(mine) if mine and self.own is not None else ())
        while True:
            part = [tuple(event) for event in islice(events, ROUND)]
            everyone: list[list[tuple[Any, ...]]] = self._world.gather(part)
            for event in (event for found in everyone for event in found):
                yield Finished(*event) if len(event) == len(Finished._fields) else SampledToken(*event)
            if all(len(found) < ROUND for found in everyone):
                return


def dealt(requests: Sequence[SampleRequest], rank: int, size: int) -> list[SampleRequest]:
    """Prompts in turn; samples of one prompt stay together, since a sampler reads it once for all of them."""
    unit, found = -1, []
    for before, request in zip([None, *requests[:-1]], requests, strict=True):
        if before is None or not np.array_equal(before.prompt_ids, request.prompt_ids):
            unit += 1
        if unit % size == rank:
            found.append(request)
    return found
