"""Base of teachers with their own distribution: texts packed back to back, one row per scored token.

Such a teacher gives `hidden`, and `project` turns that into its distribution; log-probs of the response follow.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from opd.common.text import first_line
from opd.models.tokenizers import RemoteVocabulary, fingerprint
from opd.records import Layers, Rendered, Rollout, Signal, SignalKind, SignalNeed, TopK, WeightsRef
from opd.teachers.views import response_after

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from opd.divergences import Projection
    from opd.models.attention import Packed
    from opd.models.language_model import LanguageModel

log = logging.getLogger(__name__)

BATCH_TOKENS = 8192  # default tokens per forward pass


@dataclass(frozen=True, eq=False)
class Page:
    """One forward pass. N = tokens that the spans of its texts pair with a response, in order."""

    ids_T: Tensor
    layout: Packed
    predicting_N: Tensor  # the row before each of them: position t - 1 predicts token t
    tokens_N: Tensor  # their ids
    counts: list[int]  # N of every text

    @classmethod
    def of(cls, texts: Sequence[Rendered], device: torch.device | str = "cpu") -> Page:
        from opd.divergences.projection import upload
        from opd.models.attention import Packed

        starts = np.cumsum([0] + [text.length for text in texts[:-1]])
        places = [start + _positions(text, 2) for start, text in zip(starts, texts, strict=True)]
        ids, places_N = np.concatenate([text.ids for text in texts]).astype(np.int64), np.concatenate(places)
        return cls(
            upload(ids, device),
            Packed.of(
                [length for text in texts for length in (text.lengths if text.breaks else [text.length])], device
            ),
            upload(places_N - 1, device),
            upload(ids[places_N], device),
            [place.size for place in places],
        )


def _positions(text: Rendered, first: int) -> np.ndarray:
    """Positions that the spans pair: in the response (first=0), or in the teacher's text (first=2)."""
    return np.concatenate([np.arange(span[first], span[first + 1]) for span in text.spans] or [np.zeros(0, dtype=int)])


def tempered(projection: Projection, temperature: float) -> Projection:
    """Divides logits by a temperature, after the softcap, so the cap shrinks with them."""
    if temperature == 1.0:
        return projection
    cap = None if projection.softcap is None else projection.softcap / temperature
    return replace(projection, scale=projection.scale / temperature, softcap=cap)


class ScoringTeacher:
    """Implement `hidden` and `project` to make a teacher."""

    offers: frozenset[SignalKind] = frozenset({"logprobs_at", "hidden", "topk"})
    version = 0
    context = sys.maxsize
    temperature = 1.0  # of its own distribution, independent of the student's
    model: Any = None  # in this process, if there is one
    elsewhere: RemoteVocabulary | None = None  # facts about models outside of this process
    matched: tuple[np.ndarray, np.ndarray] | None = (
        None  # matching ids of student and teacher, if their tokenizers differ
    )

    def __init__(
        self,
        name: str,
        role: str,
        stop_ids: tuple[int, ...],
        batch_tokens: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.name, self.role, self.device = name, role, device
        self.stop_ids, self._batch_tokens = stop_ids, batch_tokens or BATCH_TOKENS

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the tokenizer."""
        return "" if self.model is None else fingerprint(self.model.tokenizer)

    def hidden(self, page: Page) -> Tensor:
        """(N, D), one row per scored token."""
        raise NotImplementedError

    def layers(self, page: Page, layers: Layers) -> Tensor:
        """(N, L, D), hidden states after each of these layers."""
        raise NotImplementedError

    def project(self, hidden: Tensor) -> Any:
        """Its distribution: a `Projection`, or a `Mixture` of several."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """D of the hidden states that `project` takes; a mixture splits its parts by it."""
        raise NotImplementedError

    def kept(self, hidden: Tensor) -> Tensor:
        """Hidden states as kept until the loss. Override to move them elsewhere."""
        return hidden

    def measure(self, texts: Sequence[Rendered]) -> dict[str, float]:
        """Extra metrics, measured on the texts of the first batch."""
        return {}

    def require_offered(self, need: SignalNeed) -> None:
        if need.kind not in self.offers:
            raise ValueError(
                f"teacher {self.name!r} does not offer {need.kind!r}; it offers {', '.join(sorted(self.offers))}"
            )
        if need.ids is not None:
            raise ValueError(
                "a teacher of this kind gives log-probs at the response tokens; others come from its hidden states"
            )

    def score(
        self, rollouts: Sequence[Rollout], need: SignalNeed, seen: Sequence[Rendered] | None = None
    ) -> list[Signal]:
        """Hidden states, or log-probs of the response tokens, in the order of the rollouts."""
        from opd.models.language_model import pack

        self.require_offered(need)
        seen = seen if seen is not None else [response_after(rollout.prompt_ids, rollout) for rollout in rollouts]
        items = [_Item(str(number), text.length, number, text) for number, text in enumerate(seen)]
        items.sort(key=attrgetter("length"))
        found: dict[int, Signal] = {}
        batches = pack(items, self._batch_tokens)
        asked = [([item.text for item in batch], [rollouts[item.number].id for item in batch]) for batch in batches]
        for batch, answers in zip(batches, self._answers(asked, need), strict=True):
            for item, values in zip(batch, answers, strict=True):
                found[item.number] = self._signal(rollouts[item.number], item.text, values)
        return [found[number] for number in range(len(seen))]

    def _answers(self, asked: Sequence[tuple[list[Rendered], list[str]]], need: SignalNeed) -> Iterable[list[Any]]:
        """The values of each batch of texts and rollout ids."""
        return (self._fitting(texts, need, ids) for texts, ids in asked)

    def _fitting(self, texts: Sequence[Rendered], need: SignalNeed, ids: Sequence[str]) -> list[Any]:
        """The values of a batch. If memory runs out, splits it in halves and halves later batches."""
        import torch

        try:
            return self._values(texts, need, ids)
        except torch.OutOfMemoryError as error:
            if len(texts) == 1:
                raise
            log.warning(
                "teacher %s: memory ran out; retrying with half as many tokens at once (%s)",
                self.name,
                first_line(error),
            )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        middle = len(texts) // 2
        self._batch_tokens = min(self._batch_tokens, max(sum(text.length for text in texts) // 2, 1))
        return [
            *self._fitting(texts[:middle], need, ids[:middle]),
            *self._fitting(texts[middle:], need, ids[middle:]),
        ]

    def _values(self, texts: Sequence[Rendered], need: SignalNeed, ids: Sequence[str]) -> list[Any]:
        import torch

        from opd.divergences import token_logprobs

        with torch.no_grad():
            page = Page.of(texts, self.device)
            if need.kind == "layers":
                return list(self.kept(self.layers(page, need.layers)).split(page.counts))
            if need.hidden is not None and all(name in need.hidden for name in ids):
                hidden_ND = torch.cat([reached(need.hidden[name]).to(self.device) for name in ids])
            else:
                hidden_ND = self.hidden(page)
            if need.kind == "hidden":
                return list(self.kept(hidden_ND).split(page.counts))
            if need.kind == "topk":
                if need.k is None:
                    raise ValueError("topk needs the number of ids: SignalNeed('topk', k=…)")
                return self._likeliest(self.project(hidden_ND), need.k, page.counts)
            projection = self.project(hidden_ND)
            logprobs_N = token_logprobs(projection, page.tokens_N, merge=(self.stop_ids,), trusted=True)
            return [part.numpy() for part in logprobs_N.cpu().split(page.counts)]

    def _likeliest(self, projection: Projection, k: int, counts: Sequence[int]) -> list[TopK]:
        """The k likeliest ids and every stop id, so that stop ids can be one event at any temperature."""
        from opd.divergences import likeliest_ids

        ids, logprobs, tail, stop = (part.cpu().numpy() for part in likeliest_ids(projection, k, self.stop_ids))
        whole = TopK(ids.astype(np.int32), logprobs, tail, stop, self.fingerprint)
        return [whole.rows(index) for index in np.split(np.arange(len(tail)), np.cumsum(counts)[:-1])]

    def _signal(self, rollout: Rollout, text: Rendered, values: Any) -> Signal:
        """Puts values at their response positions; NaN and masked outside of spans."""
        from torch import Tensor

        mask = np.zeros(rollout.response_ids.size, dtype=bool)
        mask[_positions(text, 0)] = True
        if text.crossed:
            ids = text.ids[_positions(text, 2)]
            values = values if isinstance(values, Tensor) else span_sums(values, text.spans, mask.size)
            return Signal(self.name, self.version, self.role, text.view, text.spans, values, mask, crossed=ids)
        if not mask.all():
            values = spread(values, mask)
        return Signal(self.name, self.version, self.role, text.view, text.spans, values, mask)

    def observe(self, step: int, weights: WeightsRef) -> None:
        """Does nothing: it never changes."""

    def state(self) -> Mapping[str, Tensor]:
        return {}

    def restore(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self.version = version


class _Item(NamedTuple):
    """A text, its length and its number, for `pack`."""

    id: str
    length: int
    number: int
    text: Rendered


def reached(signal: Signal) -> Tensor:
    """Hidden states of the tokens inside spans."""
    import torch

    values: Tensor = signal.values
    if signal.crossed is not None:  # the teacher's own tokens, all of them in spans
        return values
    return values if signal.mask.all() else values[torch.from_numpy(signal.mask).to(values.device)]


def span_sums(values: np.ndarray, spans: Sequence[tuple[int, int, int, int]], size: int) -> np.ndarray:
    """(T,) log-probs of spans, each divided over the student's tokens in it. `values`: log-probs of the teacher's tokens."""
    found, at = np.full(size, np.nan, dtype=values.dtype), 0
    for s0, s1, t0, t1 in spans:
        found[s0:s1] = values[at : at + t1 - t0].sum() / (s1 - s0)
        at += t1 - t0
    return found


def spread(values: Any, mask: np.ndarray) -> Any:
    import torch
    from torch import Tensor

    if isinstance(values, TopK):
        return values.spread(mask)
    if isinstance(values, Tensor):
        whole = values.new_full((mask.size, *values.shape[1:]), float("nan"))
        whole[torch.from_numpy(mask).to(values.device)] = values
        return whole
    found = np.full(mask.size, np.nan, dtype=values.dtype)
    found[mask] = values
    return found


# --- A teacher in this process: scores exact token ids in packed batches ---


class LocalTeacher(ScoringTeacher):
    """A frozen checkpoint."""

    offers = ScoringTeacher.offers | {"layers"}

    def __init__(
        self, name: str, role: str, model: LanguageModel, batch_tokens: int | None, stop_ids: tuple[int, ...]
    ) -> None:
        from opd.models.cuda_graphs import PassGraphs

        super().__init__(name, role, stop_ids, batch_tokens, model.device)
        self.model: LanguageModel = model
        self.context = model.context
        self._heads: dict[torch.device, tuple[Tensor, Tensor | None]] = {}  # copies on other devices
        model.module.requires_grad_(False)
        model.graphs = model.graphs or PassGraphs.of(model)

    def hidden(self, page: Page) -> Tensor:
        return self.model.predict(page).hidden

    def layers(self, page: Page, layers: Layers) -> Tensor:
        return self.model.layers(page, layers)[:, :-1]

    def _answers(self, asked: Sequence[tuple[list[Rendered], list[str]]], need: SignalNeed) -> Iterable[list[Any]]:
        known = need.hidden or {}  # the hidden states of these rollouts need no forward pass
        fresh = [any(name not in known for name in ids) for _, ids in asked]
        values = self._fitting if self.model.passes_alone else self._values
        turns = self.model.passes([ids for (_, ids), new in zip(asked, fresh, strict=True) if new])
        for (texts, ids), new in zip(asked, fresh, strict=True):
            if new:
                next(turns)
            yield values(texts, need, ids)
        for _ in turns:  # no texts remain here; join the passes of ranks that have more
            pass

    @property
    def width(self) -> int:
        return int(self.model.head.weight.shape[1])

    def project(self, hidden: Tensor) -> Projection:
        """Projects on the device of the hidden states. The student's device, which computes the loss, has a copy of the head."""
        projection = self.model.project(hidden.to(self.model.dtype))
        if hidden.device != projection.weight.device:
            weight, bias = self._head_on(hidden.device, projection)
            projection = replace(projection, weight=weight, bias=bias)
        return tempered(projection, self.temperature)

    def _head_on(self, device: torch.device, head: Projection) -> tuple[Tensor, Tensor | None]:
        if device not in self._heads:
            self._heads[device] = head.weight.to(device), None if head.bias is None else head.bias.to(device)
        return self._heads[device]
