"""Sampling that runs ahead of training (`rollout.staleness`): batches come in the order of the stream, whoever is faster.

    producer   prompts -> sample -> store      a batch k once k <= steps trained + 1 + staleness: gated, never dropped
    beside     store -> reward -> score        one batch after the other; scores at most one batch ahead
    trainer    take -> loss -> update -> publish

Everything goes through the store. Where the trainer stands (stream, rollouts consumed) is where the batch that it took last
ends, so checkpoints and resumed runs know nothing of all this: what was sampled ahead is found in the store.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from opd.config import Stage
from opd.data.stream import PromptStream, Visit
from opd.errors import Stopped
from opd.models.varlen import beside_training
from opd.sampling.ahead import ThreadSampler
from opd.trainer.gather import Gathered, reward_stored, score
from opd.trainer.metrics import Clock
from opd.trainer.trajectories import Trajectories
from opd.types import Author, Rollout

if TYPE_CHECKING:
    from opd.runner.stage import StageRun

POLL = 0.05  # seconds between two looks at whether the run is to stop


class Closing(Stopped):
    """The trainer needs nothing more. Never seen outside the threads that it ends."""


@dataclass(frozen=True)
class Sampled:
    """A batch in the store, and where the stream and the store stood behind it."""

    step: int
    visits: list[Visit]
    written: list[str]
    stream: dict[str, Any]
    consumed: int | None
    used: int
    continued: int
    unshown: int
    seconds: float


class Ahead:
    """`take` and `trained` are the trainer's, in the thread that made this; the rest runs in two others."""

    def __init__(self, spec: Stage, check_stop: Callable[[], None]) -> None:
        self._staleness, self._check_stop = spec.rollout.staleness, check_stop
        self._scores = scores_ahead(spec)
        self._trainer = threading.get_ident()
        self._moved = threading.Condition()
        self._sampled: deque[tuple[Sampled, Future[Gathered]]] = deque()
        self._jobs: set[Future[Gathered]] = set()
        self._trained = self._taken = 0  # steps
        self._failure: BaseException | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def check_stop(self) -> None:
        """The run's own, which also ends the other threads when nobody needs them."""
        self._check_stop()
        if self._closing and threading.get_ident() != self._trainer:
            raise Closing

    # The trainer

    def take(self, run: StageRun, step: int, clock: Clock) -> Gathered:
        """The batch of this step, once it is there. An error of the other threads comes up here, in its batch's turn."""
        with clock("wait"):
            self.trained(step - 1)
            if self._thread is None:
                self._start(run, step)
            while not self._sampled and self._failure is None:
                self.check_stop()
                with self._moved:
                    self._moved.wait_for(lambda: self._sampled or self._failure is not None, POLL)
            if not self._sampled:
                assert self._failure is not None
                raise self._failure
            sampled, job = self._sampled.popleft()
            while not wait([job], POLL).done:
                self.check_stop()
            gathered = job.result()
        self._jobs.discard(job)
        run.stream.restore(sampled.stream)
        found = run.trajectories
        found.newest, found.consumed, found.unshown = sampled.written, sampled.consumed, sampled.unshown
        found.used, found.continued = sampled.used, sampled.continued
        with self._moved:
            self._taken = step
            self._moved.notify_all()
        return replace(gathered, metrics=gathered.metrics | staleness(gathered.rollouts, run.version))

    def trained(self, step: int) -> None:
        """The weights of this step are published, and what may follow on them may begin."""
        with self._moved:
            self._trained = max(self._trained, step)
            self._moved.notify_all()

    def close(self) -> None:
        """End both threads; what they have sampled is in the store. Their errors are nobody's any more."""
        with self._moved:
            self._closing = True
            self._moved.notify_all()
        if self._thread is not None:
            self._thread.join()
        for job in self._jobs:
            job.cancel()
        wait(self._jobs)

    # The producer

    def _start(self, run: StageRun, step: int) -> None:
        self._taken = step - 1
        stream = copy.copy(run.stream)
        stream.restore(run.stream.state())
        tokenizer = copy.deepcopy(run.student.tokenizer)  # they change their settings while they encode
        assert run.samplers.ahead is not None
        own = run.trajectories
        desk = replace(own.desk, tokenizer=tokenizer, student=run.samplers.ahead)
        trajectories = replace(own, tokenizer=tokenizer, desk=desk, check_stop=self.check_stop, newest=[])
        work = (run, step, stream, trajectories)
        self._thread = threading.Thread(target=self._produce, args=work, name="opd-sampler", daemon=True)
        self._thread.start()

    def _produce(self, run: StageRun, first: int, stream: PromptStream, trajectories: Trajectories) -> None:
        try:
            with _device(run.device, own_stream=True):
                for step in range(first, run.spec.train.steps + 1):
                    visits = stream.take(run.spec.rollout.prompts)
                    prompts = trajectories.rendered(visits)  # which does not depend on any step
                    self._wait(lambda step=step: step <= self._trained + 1 + self._staleness)  # type: ignore[misc]
                    sampled = self._sample(run, step, visits, prompts, stream.state(), trajectories)
                    with self._moved:
                        job = _beside().submit(self._finish, run, sampled)
                        self._jobs.add(job)
                        self._sampled.append((sampled, job))
                        self._moved.notify_all()
        except BaseException as error:  # raised again by `take`, in the trainer's thread
            with self._moved:
                self._failure = error
                self._moved.notify_all()

    def _sample(
        self,
        run: StageRun,
        step: int,
        visits: list[Visit],
        prompts: dict[str, np.ndarray],
        stream: dict[str, Any],
        trajectories: Trajectories,
    ) -> Sampled:
        """`stream`: where it stands behind these visits."""
        sampler, clock = run.samplers.ahead, Clock()
        assert sampler is not None
        with clock("sample"):
            if isinstance(sampler, ThreadSampler):
                sampler.take_over()
            written = trajectories.collect(visits, sampler.version, prompts, durable=False)
        return Sampled(
            step,
            visits,
            written,
            stream,
            trajectories.consumed,
            trajectories.used,
            trajectories.continued,
            trajectories.unshown,
            clock.seconds["sample"],
        )

    def _finish(self, run: StageRun, sampled: Sampled) -> Gathered:
        """Rewards as soon as a batch is in the store; scores while the batch before it is trained on."""
        clock = Clock()
        with _device(run.device):
            run.store.commit(sync=True)  # nothing is used before it is durable; the producer goes on meanwhile
            with clock("reward"):
                taken_up = bool(sampled.used or sampled.continued)
                gathered = reward_stored(run, sampled.visits, sampled.written, taken_up)
            if self._scores:
                self._wait(lambda: sampled.step <= self._taken + 1)
                with clock("score"):
                    gathered = replace(gathered, scored=score(run, gathered, sampled.step))
        spent = {"sample": sampled.seconds, **clock.seconds}
        told = {f"beside/{name}": round(seconds, 4) for name, seconds in spent.items()}
        if any(writer.shows_more for writer in run.spec.rollout.everyone):
            told["rollout/unshown"] = sampled.unshown / len(sampled.visits)
        if sampled.stream.get("skipped"):
            told["prompts/skipped"] = sampled.stream["skipped"]
        return replace(gathered, metrics=gathered.metrics | told)

    def _wait(self, ready: Callable[[], bool]) -> None:
        self.check_stop()
        while not ready():
            with self._moved:
                self._moved.wait_for(lambda: self._closing or ready(), 1.0)
            self.check_stop()


def scores_ahead(spec: Stage) -> bool:
    """Whether teachers are asked beside training: where what they say, and what is asked, does not depend on the step before."""
    waits = any("plateau" in (term.coefficient.until, term.coefficient.after) for term in spec.objective)
    still = all(kind.stands_still for kind in spec.teachers.values())
    return still and not waits and spec.pool.resident is None


def staleness(rollouts: list[Rollout], version: int) -> dict[str, float]:
    """By how many updates the weights that drew the student's tokens are behind those that train on them."""
    lags = np.concatenate([version - rollout.version[rollout.author == Author.STUDENT] for rollout in rollouts])
    return {"staleness": float(lags.mean()), "staleness/max": int(lags.max())} if lags.size else {}


@cache
def _beside() -> ThreadPoolExecutor:
    """One thread for the life of the process: workers of rewards end with the thread that started them."""
    return ThreadPoolExecutor(1, thread_name_prefix="opd-beside")


@contextmanager
def _device(device: torch.device, own_stream: bool = False) -> Iterator[None]:
    """In a thread that has just begun: the GPU to use, and a stream on it that does not wait for the trainer's."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device) if own_stream else None
    with beside_training(), torch.cuda.device(device), torch.cuda.stream(stream):
        yield
