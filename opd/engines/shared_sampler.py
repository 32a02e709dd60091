"""A sampler on several ranks. All ranks, or only the first ones, each answer a share of the requests; every rank sees all tokens.

Draws are keyed by the request, so the rank that answers it does not matter. Tokens are exchanged in rounds, so that the
leader can make them durable while sampling continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from opd.common.context import Peers
from opd.common.errors import Stopped
from opd.records import Author, Finished, SampledToken, SampleRequest, TokenSampler, WeightsRef

ROUND = 512  # events per rank and exchange
NOBODY = -1  # the author of a token is not given


class SharedSampler:
    """Distributes requests over ranks. `sharers`: the number of ranks, from the first, that have a sampler; default: all."""

    def __init__(self, sampler: TokenSampler | None, ranks: Peers, sharers: int | None = None) -> None:
        self.own, self._ranks = sampler, ranks
        self._sharers = ranks.size if sharers is None else sharers

    def load(self, weights: WeightsRef) -> None:
        if self.own is not None:
            self.own.load(weights)
            return
        for name in weights.tensors:  # access gathers from all ranks, for ranks with a sampler
            weights.tensors[name]

    def sample(self, requests: Iterable[SampleRequest]) -> Iterator[SampledToken | Finished]:
        mine = dealt(list(requests), self._ranks.rank, self._sharers)
        events = iter(self.own.sample(mine) if mine and self.own is not None else ())
        while True:
            part, stop = self._next(events)
            everyone = self._exchanged(part)
            with self._ranks.holding():  # a stop waits until drawn tokens are kept
                for found in everyone:
                    yield from found
            if stop is not None:
                raise stop
            self._ranks.poll_stop()
            if all(len(found) < ROUND for found in everyone):
                return

    def _next(self, events: Iterator[SampledToken | Finished]) -> tuple[list[SampledToken | Finished], Stopped | None]:
        """Some events, and a stop if one came. The events are still exchanged before this rank raises the stop."""
        part: list[SampledToken | Finished] = []
        try:
            with self._ranks.answering():
                part.extend(islice(events, ROUND))
        except Stopped as stop:
            return part, stop
        return part, None

    def _exchanged(self, part: list[SampledToken | Finished]) -> list[list[SampledToken | Finished]]:
        if self._ranks.size == 1:
            self._ranks.barrier()  # a stop is received here
            return [part]
        told = self._ranks.gather(to_columns(part))
        return [part if rank == self._ranks.rank else from_columns(found) for rank, found in enumerate(told)]


def to_columns(events: Sequence[SampledToken | Finished]) -> tuple[Any, ...]:
    """Events as arrays for a message: request names, index of each event's name, token, log-probs, version, author; and stop
    reasons by the position of the `Finished` event.
    """
    places = {name: place for place, name in enumerate(dict.fromkeys(event.request_id for event in events))}
    tokens = [event for event in events if isinstance(event, SampledToken)]
    _, token, *numbers, version, author = zip(*tokens, strict=True) if tokens else [()] * len(SampledToken._fields)
    who = np.array([places[event.request_id] for event in events], dtype=np.int32)
    ends = {place: event.stop for place, event in enumerate(events) if isinstance(event, Finished)}
    return (
        list(places),
        who,
        np.array(token, np.int64),
        np.array(numbers, np.float64),
        np.array(version, np.int64),
        np.array([NOBODY if one is None else one for one in author], np.int64),
        ends,
    )


def from_columns(columns: tuple[Any, ...]) -> list[SampledToken | Finished]:
    names, who, token, numbers, version, author, ends = columns
    authors = [None if one == NOBODY else Author(one) for one in author.tolist()]
    rows = iter(zip(token.tolist(), *numbers.tolist(), version.tolist(), authors, strict=True))
    return [
        Finished(names[one], ends[place]) if place in ends else SampledToken(names[one], *next(rows))
        for place, one in enumerate(who.tolist())
    ]


def dealt(requests: Sequence[SampleRequest], rank: int, size: int) -> list[SampleRequest]:
    """A rank's share: prompts are dealt in turn. Samples of one prompt stay together and share its prefill."""
    unit, found = -1, []
    for before, request in zip([None, *requests[:-1]], requests, strict=True):
        if before is None or not np.array_equal(before.prompt_ids, request.prompt_ids):
            unit += 1
        if unit % size == rank:
            found.append(request)
    return found
