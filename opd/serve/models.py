"""Served models: weights, the frame of the head, hashes of both, and the thread that scores."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opd.divergences import Projection, likeliest_ids, token_logprobs
from opd.divergences.projection import canonical_ids, log_probs, upload
from opd.models.language_model import LanguageModel, pack
from opd.models.tokenizers import fingerprint
from opd.records import Rendered
from opd.teachers.scoring import Page, tempered
from opd.teachers.served import PROTOCOL, ScoreRequest, write_answer

ROWS = 1024  # rows of log-probs at once, when a client asks about other ids


class ServedModel:
    """A model that only scores. `facts` has everything that a client needs to know about it."""

    def __init__(self, name: str, model: LanguageModel, batch_tokens: int) -> None:
        self.name, self.model, self._batch_tokens = name, model, batch_tokens
        model.module.requires_grad_(False)
        embedded = model.module.get_input_embeddings().weight.shape[0]
        self.rows = min(model.head.weight.shape[0], embedded)
        self.context = model.context
        self.weights = tensors_hash(dict(chain(model.module.named_parameters(), model.module.named_buffers())))
        self.head_hash = hashlib.sha256(self.head()).hexdigest()

    def head(self) -> bytes:
        """The output head as a frame. It is large, so it is made on demand and not kept."""
        head = self.model.head
        parts = {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})
        return write_answer({name: part.detach().cpu() for name, part in parts.items()})

    @property
    def facts(self) -> dict[str, Any]:
        model = self.model
        return {
            "protocol": PROTOCOL,
            "name": self.name,
            "weights": self.weights,
            "head": self.head_hash,
            "tokenizer": fingerprint(model.tokenizer),
            "stop_ids": list(model.stop_ids),
            "rows": self.rows,
            "width": model.head.weight.shape[1],
            "context": self.context,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": model.device.type,
            "scale": model.scale,
            "softcap": model.softcap,
        }

    @torch.no_grad()
    def answer(self, group: Sequence[ScoreRequest]) -> tuple[list[bytes], int]:
        """The frames of several requests, and the number of their forward passes."""
        texts = [_Text(str(number), text) for number, text in enumerate(chain(*(asked.texts for asked in group)))]
        pages = [Page.of([each.text for each in batch], self.model.device) for batch in pack(texts, self._batch_tokens)]
        hidden_ND = torch.cat([self.model.predict(page).hidden for page in pages])
        tokens_N = torch.cat([page.tokens_N for page in pages])
        counts = [asked.count for asked in group]
        parts = zip(group, hidden_ND.split(counts), tokens_N.split(counts), strict=True)
        return [write_answer(self._tensors(asked, hidden, tokens)) for asked, hidden, tokens in parts], len(pages)

    def _tensors(self, asked: ScoreRequest, hidden_ND: Tensor, tokens_N: Tensor) -> Mapping[str, Tensor]:
        question = asked.question
        if question.want == "hidden":
            return {"hidden": hidden_ND.cpu()}
        whole = self.model.project(hidden_ND.to(self.model.dtype))
        projection = tempered(replace(whole, size=question.size or self.model.size), question.temperature)
        if question.want == "topk":
            assert question.k is not None
            ids, logprobs, tail, stop = likeliest_ids(projection, question.k, question.stop_ids)
            found = {"ids": ids.int(), "logprobs": logprobs, "tail": tail, "stop": stop}
            return {name: part.cpu() for name, part in found.items()}
        if asked.tokens_NM is None:
            found_N = token_logprobs(projection, tokens_N, merge=(question.stop_ids,), trusted=True)
            return {"logprobs": found_N.cpu()}
        return {"logprobs": _given(projection, upload(asked.tokens_NM, hidden_ND.device), question.stop_ids).cpu()}


class _Text(NamedTuple):
    """Split texts into passes, in order."""

    id: str
    text: Rendered

    @property
    def length(self) -> int:
        return self.text.length


def _given(projection: Projection, tokens_NM: Tensor, stop_ids: tuple[int, ...]) -> Tensor:
    """(N, M) log-probs of ids that a client names, a few rows at a time."""
    ids = canonical_ids(tokens_NM, (stop_ids,))
    rows = [slice(start, start + ROWS) for start in range(0, max(projection.count, 1), ROWS)]
    parts = [
        log_probs(projection.rows(part), projection.vocabulary, (stop_ids,)).gather(-1, ids[part]) for part in rows
    ]
    return torch.cat(parts)


def tensors_hash(tensors: Mapping[str, Tensor]) -> str:
    """Names, types, shapes and bytes of all weights: two servers with the same hash give the same scores, up to rounding."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}\t{tensor.dtype}\t{tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# The scoring thread: requests that wait for the same model share forward passes. Sharing changes only rounding, because the order
# of sums depends on the shape. A request with `exact` is scored alone, so its bits depend only on its own texts.


class QueueFull(Exception):
    """Too many requests are waiting."""


@dataclass(frozen=True, eq=False)
class ScoreJob:
    model: str
    asked: ScoreRequest
    answer: Future[bytes] = field(default_factory=Future)


class ScoringThread:
    """`waiting`: the most requests that may wait; `tokens`: the most tokens that they may have in total."""

    def __init__(self, models: Mapping[str, ServedModel], *, batch_tokens: int, waiting: int, tokens: int) -> None:
        self._models, self._batch_tokens, self._most, self._most_tokens = models, batch_tokens, waiting, tokens
        self._jobs: deque[ScoreJob] = deque()
        self._tokens, self._closed, self._changed = 0, False, threading.Condition()
        self.passes: Counter[str] = Counter()
        self.scored: Counter[str] = Counter()
        self.questions: Counter[str] = Counter()
        self.seconds: dict[str, float] = dict.fromkeys(models, 0.0)
        self._thread = threading.Thread(target=self._work, name="scoring", daemon=True)
        self._thread.start()

    @property
    def length(self) -> int:
        return len(self._jobs)

    def submit(self, model: str, asked: ScoreRequest) -> Future[bytes]:
        job = ScoreJob(model, asked)
        with self._changed:
            if len(self._jobs) >= self._most or (self._jobs and self._tokens + asked.length > self._most_tokens):
                raise QueueFull
            self._jobs.append(job)
            self._tokens += asked.length
            self._changed.notify()
        return job.answer

    def close(self) -> None:
        """Stop after the waiting requests have been scored."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while group := self._next():
            live = [
                job for job in group if job.answer.set_running_or_notify_cancel()
            ]  # its client may have disconnected
            if live:
                self._score(live)

    def _next(self) -> list[ScoreJob]:
        """The request that has waited longest, and others that fit into its forward pass; none: stop."""
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            if not self._jobs:
                return []
            first = self._jobs.popleft()
            group, room = [first], self._batch_tokens - first.asked.length
            if not first.asked.question.exact:
                for job in [job for job in self._jobs if job.model == first.model and not job.asked.question.exact]:
                    if job.asked.length <= room:
                        room -= job.asked.length
                        group.append(job)
                taken = set(map(id, group))
                self._jobs = deque(job for job in self._jobs if id(job) not in taken)
            self._tokens -= sum(job.asked.length for job in group)
            return group

    def _score(self, group: list[ScoreJob]) -> None:
        model = group[0].model
        began = time.perf_counter()
        try:
            frames, passes = self._models[model].answer([job.asked for job in group])
        except BaseException as error:
            for job in group:
                job.answer.set_exception(error)
            return
        self.passes[model] += passes
        self.questions[model] += len(group)
        self.scored[model] += sum(job.asked.length for job in group)
        self.seconds[model] += time.perf_counter() - began
        for job, frame in zip(group, frames, strict=True):
            job.answer.set_result(frame)
