"""What teachers with a distribution of their own have in common: texts packed back to back, one row per token that is scored.

A teacher of this kind gives `hidden`, and `project` turns that into its distribution; log-probs of the response follow.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from opd.divergences import Projection, token_logprobs
from opd.divergences.upload import upload
from opd.models.attention import Packed
from opd.models.packing import pack
from opd.teachers.views import behind
from opd.types import Rendered, Rollout, Signal, SignalKind, SignalNeed, WeightsRef


@dataclass(frozen=True, eq=False)
class Page:
    """One forward pass. N = tokens that the spans of its texts pair with a response, one after the other."""

    ids_T: Tensor
    layout: Packed
    predicting_N: Tensor  # the row before each of them: position t - 1 predicts token t
    tokens_N: Tensor  # their ids
    counts: list[int]  # N of every text

    @classmethod
    def of(cls, texts: Sequence[Rendered], device: torch.device | str = "cpu") -> Page:
        starts = np.cumsum([0] + [text.length for text in texts[:-1]])
        places = [start + _positions(text, 2) for start, text in zip(starts, texts, strict=True)]
        ids, places_N = np.concatenate([text.ids for text in texts]).astype(np.int64), np.concatenate(places)
        return cls(
            upload(ids, device),
            Packed.of([text.length for text in texts], device),
            upload(places_N - 1, device),
            upload(ids[places_N], device),
            [place.size for place in places],
        )


def _positions(text: Rendered, first: int) -> np.ndarray:
    """Positions that the spans pair: in the response (0), or in what is read (2)."""
    return np.concatenate([np.arange(span[first], span[first + 1]) for span in text.spans] or [np.zeros(0, dtype=int)])


class ScoringTeacher:
    """A teacher is this with `hidden` and `project`."""

    offers: frozenset[SignalKind] = frozenset({"logprobs_at", "hidden"})
    version = 0
    context = sys.maxsize

    def __init__(
        self,
        name: str,
        role: str,
        stop_ids: tuple[int, ...],
        batch_tokens: int = 8192,
        device: torch.device | str = "cpu",
    ) -> None:
        self.name, self.role, self.device = name, role, device
        self._batch_tokens, self._merge = batch_tokens, (stop_ids,)

    @property
    def model(self) -> Any:
        return None

    def hidden(self, page: Page) -> Tensor:
        """(N, D), one row per token that is scored."""
        raise NotImplementedError

    def project(self, hidden: Tensor) -> Projection:
        raise NotImplementedError

    def score(
        self, rollouts: Sequence[Rollout], need: SignalNeed, seen: Sequence[Rendered] | None = None
    ) -> list[Signal]:
        """Hidden states, or log-probs of the response tokens, in the order of the rollouts."""
        if need.kind not in self.offers:
            raise ValueError(
                f"teacher {self.name!r} cannot give {need.kind!r}; it offers {', '.join(sorted(self.offers))}"
            )
        if need.ids is not None:
            raise ValueError(
                "a teacher of this kind gives log-probs at the response tokens; others come from its hidden states"
            )
        seen = seen if seen is not None else [behind(rollout.prompt_ids, rollout) for rollout in rollouts]
        order = sorted(range(len(seen)), key=lambda number: seen[number].length)
        found: dict[int, Signal] = {}
        for batch in pack([_Numbered(number, seen[number]) for number in order], self._batch_tokens):
            ids = [rollouts[number].id for number, _ in batch]
            for (number, text), values in zip(batch, self._values([text for _, text in batch], need, ids), strict=True):
                found[number] = self._signal(rollouts[number], text, values)
        return [found[number] for number in range(len(seen))]

    @torch.no_grad()
    def _values(self, texts: Sequence[Rendered], need: SignalNeed, ids: Sequence[str]) -> list[Any]:
        page = Page.of(texts, self.device)
        if need.hidden is not None and all(name in need.hidden for name in ids):
            hidden_ND = torch.cat([_reached(need.hidden[name]) for name in ids]).to(self.device)
        else:
            hidden_ND = self.hidden(page)
        if need.kind == "hidden":
            return list(hidden_ND.split(page.counts))
        logprobs_N = token_logprobs(self.project(hidden_ND), page.tokens_N, merge=self._merge).cpu()
        return [part.numpy() for part in logprobs_N.split(page.counts)]

    def _signal(self, rollout: Rollout, text: Rendered, values: Any) -> Signal:
        """Values at their response positions; NaN and masked where no span reaches."""
        mask = np.zeros(rollout.response_ids.size, dtype=bool)
        mask[_positions(text, 0)] = True
        if not mask.all():
            values = _spread(values, mask)
        return Signal(self.name, self.version, self.role, text.view, text.spans, values, mask)

    def observe(self, step: int, weights: WeightsRef) -> None:
        """It does not move."""

    def state(self) -> Mapping[str, Tensor]:
        return {}

    def restore(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self.version = version


class _Numbered(NamedTuple):
    """A text and its number, as `pack` cuts them into batches."""

    number: int
    text: Rendered

    @property
    def id(self) -> str:
        return str(self.number)

    @property
    def length(self) -> int:
        return self.text.length


def _reached(signal: Signal) -> Tensor:
    """Hidden states of the tokens that a span reaches."""
    values: Tensor = signal.values
    return values if signal.mask.all() else values[torch.from_numpy(signal.mask).to(values.device)]


def _spread(values: Any, mask: np.ndarray) -> Any:
    if isinstance(values, Tensor):
        whole = values.new_full((mask.size, *values.shape[1:]), float("nan"))
        whole[torch.from_numpy(mask).to(values.device)] = values
        return whole
    found = np.full(mask.size, np.nan, dtype=values.dtype)
    found[mask] = values
    return found
