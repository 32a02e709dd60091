"""Log-probs of a prompt's own tokens, as /v1/completions gives them: at the sampled tokens, and of the likeliest ids.

Such a server knows neither our stop event nor the mass behind its list. With several stop ids their sum is known where all are
listed, or where those that are not cannot change it; else it is missing, and masked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from opd.divergences.supports import sum_resolution
from opd.errors import RemoteError
from opd.models.head import describe_head
from opd.models.tokenizers import Elsewhere, fingerprint, require_same
from opd.teachers.kinds import Supplies
from opd.teachers.reconnecting import Constancy
from opd.teachers.views import behind
from opd.types import Rendered, Rollout, Signal, SignalKind, SignalNeed, TopK, WeightsRef

if TYPE_CHECKING:
    from opd.teachers.vllm import OpenAITeacher

SHARP = 1e-3  # nats by which ids that are not listed may change the stop event at most
LEAST = -9000.0  # vLLM writes -9999 for log 0
Listed = Mapping[int, float]  # id -> log-prob: the likeliest ids of a position, and the token that stands there


class CompletionsTeacher:
    offers: frozenset[SignalKind] = frozenset({"logprobs_at", "topk"})
    model = None

    def __init__(self, name: str, kind: OpenAITeacher, supplies: Supplies) -> None:
        self.name, self.role, self._kind = name, kind.role, kind
        student, head = supplies.student, describe_head(kind.local, kind.revision)
        require_same(student.tokenizer, head.tokenizer, student.name, f"{name} ({kind.local})")
        self._stops, self._fingerprint = supplies.stop_ids, fingerprint(head.tokenizer)
        self.elsewhere = Elsewhere(kind.title, head.stop_ids, head.rows)
        self.version = int(self._fingerprint[:12], 16)
        self._remote = kind.connect(supplies.around)
        self.context = min(head.context, kind.room(kind.longest(self._remote)))
        self._same = Constancy(self, self._remote, student.size, kind.tolerance)
        self._same.open(self._stops)
        plain = next(index for index in range(student.size) if index not in self._stops)
        self._ask([plain, plain], kind.max_logprobs)  # if that is too many, it says so now

    def score(
        self, rollouts: Sequence[Rollout], need: SignalNeed, seen: Sequence[Rendered] | None = None
    ) -> list[Signal]:
        if need.kind not in self.offers or need.ids is not None:
            raise ValueError(
                f"teacher {self.name!r} gives {', '.join(sorted(self.offers))} of the response tokens only"
            )
        seen = seen if seen is not None else [behind(rollout.prompt_ids, rollout) for rollout in rollouts]
        several = self._kind.max_logprobs if len(self._stops) > 1 else 0
        k = max(several, need.k or 0)
        answers = self._same.map([partial(self._ask, text.ids.tolist(), k) for text in seen])
        return [
            self._signal(rollout, text, listed, need.kind, k)
            for rollout, text, listed in zip(rollouts, seen, answers, strict=True)
        ]

    def _ask(self, ids: list[int], k: int) -> list[Listed | None]:
        """What is listed at every position of a text; None where nothing is, as at the first."""
        body = {
            "model": self._kind.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": k,
        }
        found = self._remote.json("POST", "/v1/completions", body, load=len(ids))
        try:
            entries = found["choices"][0]["prompt_logprobs"]
            listed = [None if entry is None else _listed(entry) for entry in entries]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise RemoteError(
                f"{self._kind.title}: its answer has no `prompt_logprobs` that can be read, so it does not give log-probs of a "
                "prompt's tokens. vLLM's generate server does; one that answers with texts alone cannot score."
            ) from None
        wrong = [
            place for place, (token, entry) in enumerate(zip(ids, listed, strict=False)) if token not in (entry or ids)
        ]
        if len(listed) != len(ids) or wrong:
            raise RemoteError(
                f"{self._kind.title}: {len(ids)} tokens were sent, and it answered about {len(listed)}"
                f"{f', another one at {wrong[0]}' if wrong else ''}. It has to score exactly the ids that it is given."
            )
        return listed

    def _signal(self, rollout: Rollout, text: Rendered, listed: list[Listed | None], kind: str, k: int) -> Signal:
        size = rollout.response_ids.size
        mask, own = np.zeros(size, dtype=bool), np.full(size, np.nan, dtype=np.float32)
        ids, logprobs = (
            np.full((size, max(k, 1)), -1, dtype=np.int32),
            np.full((size, max(k, 1)), np.nan, dtype=np.float32),
        )
        tops = TopK(ids, logprobs, own.copy(), own.copy(), self._fingerprint)
        for s0, s1, t0, _ in text.spans:
            for place in range(s0, s1):
                token = t0 + place - s0
                entry = listed[token]
                if entry is None:
                    continue
                if kind == "topk":
                    self._fill(tops, place, entry, k)
                    mask[place] = True
                else:
                    own[place] = self._logprob(entry, int(text.ids[token]), k)
                    mask[place] = not math.isnan(own[place])
        values = tops if kind == "topk" else own
        return Signal(self.name, self.version, self.role, text.view, text.spans, values, mask)

    def _logprob(self, entry: Listed, token: int, k: int) -> float:
        if token in self._stops and len(self._stops) > 1:
            return self._stop(entry, k)
        return entry[token] if entry[token] > LEAST else math.nan

    def _fill(self, tops: TopK, place: int, entry: Listed, k: int) -> None:
        """All that are listed; the token that stands there may come behind the likeliest, and is left out then."""
        likeliest = sorted(entry.items(), key=lambda item: -item[1])[: tops.ids.shape[1]]
        tops.ids[place, : len(likeliest)] = [index for index, _ in likeliest]
        tops.logprobs[place, : len(likeliest)] = [value for _, value in likeliest]
        rest = 1.0 - math.fsum(math.exp(value) for _, value in likeliest)
        tops.tail[place] = math.log(rest) if rest > sum_resolution(torch.float32) else math.nan  # smaller: not known
        tops.stop_logprob[place] = self._stop(entry, k)

    def _stop(self, entry: Listed, k: int) -> float:
        """Of all stop ids together; NaN where it is not known. One that is not listed is no likelier than the last of the k likeliest.

        The token that stands there is listed beside them, however unlikely it is.
        """
        known = [entry[index] for index in self._stops if index in entry]
        if not known:
            return math.nan
        mass = math.fsum(math.exp(value) for value in known)
        last = sorted(entry.values(), reverse=True)[:k][-1]
        unlisted = (len(self._stops) - len(known)) * math.exp(last)
        return math.log(mass) if mass > 0 and math.log1p(unlisted / mass) <= SHARP else math.nan

    def project(self, hidden: Any) -> Any:
        raise ValueError(f"teacher {self.name!r} gives no hidden states")

    def observe(self, step: int, weights: WeightsRef) -> None:
        """It does not move."""

    def state(self) -> Mapping[str, Any]:
        return self._same.state()

    def restore(self, version: int, tensors: Mapping[str, Any]) -> None:
        self._same.restore(version, tensors)


def _listed(entry: Mapping[str, Any]) -> Listed:
    found = {int(index): float(value["logprob"]) for index, value in entry.items()}
    if not found or not all(value <= 0.01 for value in found.values()):  # NaN is not, either
        raise ValueError("no log-probs")
    return found
