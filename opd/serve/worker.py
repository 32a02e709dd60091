"""One thread scores, for all clients and models: what waits for the same model shares forward passes.

Rounding is all that sharing can change: sums of a product are ordered by its shape. A question that says `exact` is scored by
itself, and its bits depend on nothing but its own texts.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from opd.serve.models import ServedModel
from opd.teachers.wire import ScoreRequest


class QueueFull(Exception):
    """There are too many waiting already."""


@dataclass(frozen=True, eq=False)
class ScoreJob:
    model: str
    asked: ScoreRequest
    answer: Future[bytes] = field(default_factory=Future)


class ScoringThread:
    """`waiting`: how many questions may wait; `tokens`: how many tokens they may have together."""

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
        """What waits is still scored."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while group := self._next():
            live = [job for job in group if job.answer.set_running_or_notify_cancel()]  # its client may have left
            if live:
                self._score(live)

    def _next(self) -> list[ScoreJob]:
        """The question that waits longest, and others that fit into its forward pass; none: the end."""
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
