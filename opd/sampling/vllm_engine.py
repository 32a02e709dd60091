"""Samples through vLLM: one or several engines, each in a process of its own.

    load      weights to every engine, and a fixed text that has to come out as it does here
    sample    requests to the engine with the least to do; what a dead one had goes on elsewhere, behind its last token

An engine that died is started again, or waited for, while the others work. Draws are vLLM's own: not keyed.
"""

from __future__ import annotations

import math
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from opd.errors import OpdError, RemoteError, ServerAway, TrainingError
from opd.models.language_model import LanguageModel
from opd.remote import nothing, to_stderr
from opd.sampling.export import WeightsFile
from opd.sampling.requests import check_context, copy_weights, sequence_ids, why_over
from opd.sampling.vllm import VllmSampler
from opd.sampling.vllm_adapter import AdapterFile
from opd.sampling.vllm_probe import Expected, WeightsProbe
from opd.sampling.vllm_replica import Replica, replicas_of
from opd.sampling.vllm_weights import WeightsBuffer
from opd.types import Finished, SampledToken, SampleRequest, WeightsRef

STOPS = 128  # ids whose log-probs vLLM gives at every token
AGAIN = 2.0  # seconds between two tries to have an engine back
LOOK = 0.5  # seconds without news after which a wait looks whether it should end
TRIES = 3  # times in a row that an engine of ours may die before it has weights, or any before it has drawn a token


@dataclass(frozen=True, eq=False)
class Newest:
    """The newest weights, and what an engine that has them says."""

    place: Any  # as whoever wrote them says where
    expected: Expected


@dataclass(eq=False)
class Ticket:
    """A request on its way. `ids`: of the response so far, its prefix included."""

    request: SampleRequest
    prompt: list[int]
    ids: list[int]

    @property
    def tokens(self) -> int:
        """That an engine has to read and write for it, at most."""
        return len(self.prompt) + self.request.sampling.max_new_tokens


@dataclass(eq=False)
class Lane:
    """What one engine is doing for one call of `sample`."""

    replica: Replica
    tickets: dict[str, Ticket] = field(default_factory=dict)
    session: str = field(default_factory=partial(secrets.token_hex, 8))  # its own: over there a lost one ends later

    @property
    def load(self) -> int:
        return sum(ticket.tokens for ticket in self.tickets.values())


class VllmEngine:
    """Implements `types.TokenSampler`. One `sample` at a time; `load` may come between two events of it."""

    def __init__(
        self, model: LanguageModel, spec: VllmSampler, max_length: int, *, merge_stop: tuple[int, ...]
    ) -> None:
        check_context(model, max_length)
        stop = [index for index in merge_stop if index < model.size]
        if not 0 < len(stop) <= STOPS:
            raise RemoteError(f"sampler.engine vllm takes 1 to {STOPS} stop ids, and there are {len(stop)}.")
        self.model, self.max_length = model, max_length
        self.check: Callable[[], None] = nothing  # called during waits; it may raise to end them
        self._newest: Newest | None = None
        self._spec, self._busy, self.slots = spec, False, spec.slots
        self._lock, self._reviving = threading.Lock(), dict[Replica, Callable[[str, Any], None]]()
        self._closed = False
        swaps = model.lora is not None and spec.takes_adapters(model.module.config, model.lora)
        self._weights = WeightsBuffer(model) if spec.weights == "shared" else WeightsFile(model)
        self._adapter: AdapterFile | None = None
        if swaps:
            assert isinstance(self._weights, WeightsFile)
            self._adapter = AdapterFile(model, self._weights)
        self._opening = {
            "config": self._weights.config, "dtype": str(model.dtype).removeprefix("torch."), "max_length": max_length,
            "stop_ids": stop, "slots": spec.slots, "parallel": spec.parallel, "memory": spec.memory, "cache": spec.cache, "eager": spec.eager,
            "lora": None if self._adapter is None else self._adapter.settings,
        }  # fmt: skip
        self._probe = WeightsProbe(model, max_length, stop)
        devices: list[str | None] = [None] * spec.replicas if spec.devices is None else [*spec.devices]
        self.replicas = replicas_of(list(spec.address), spec.token_env, spec.interpreter, devices, self._weights.folder)
        try:
            self._each(self._open, self.replicas, patience=0)
        except ServerAway:
            if not spec.address:
                self.close()
                raise  # else `load` waits for them
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._closed = True
        for replica in self.replicas:
            replica.close()
        self._weights.close()

    # Weights

    def load(self, weights: WeightsRef) -> None:
        copy_weights(self.model, weights)
        place = self._weights.write(weights.version) if self._adapter is None else self._adapter.write(weights)
        settles = self._adapter is None or self._adapter.adds
        newest = Newest(place, replace(self._probe.expect(weights.version), settles=settles))
        with self._lock:
            self._newest = newest
            here = [replica for replica in self.replicas if replica.fresh]
            for replica in here:
                replica.fresh = False
        patience = self._spec.patience if self._spec.address else 0
        self._each(self._bring, here or self.replicas, patience)  # who was lost is brought back while others sample

    def _each(self, call: Callable[[Replica], Any], replicas: list[Replica], patience: float) -> None:
        """For all of them at once. One that is away is left out as long as another is there."""
        begun, waiting = time.monotonic(), False
        while True:
            with ThreadPoolExecutor(len(replicas), thread_name_prefix="vllm") as pool:
                tries = [pool.submit(call, replica) for replica in replicas]
            errors = [error for one in tries if (error := one.exception()) is not None]
            all_away = len(errors) == len(replicas)
            for error in errors:
                if not isinstance(error, ServerAway) or (all_away and time.monotonic() >= begun + patience):
                    raise error
            if not all_away:
                for error in errors:
                    to_stderr(f"{error} Going on with the others")
                return
            if not waiting:
                to_stderr(f"{errors[0]} Waiting for up to {patience:g} s")
            waiting = True
            self.wait(AGAIN)

    def wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, LOOK))

    def _open(self, replica: Replica) -> dict[str, Any]:
        replica.start()
        return replica.ask("POST", "/open", self._opening)

    def _bring(self, replica: Replica) -> None:
        """It runs, has the newest weights, and is seen to use them."""
        for left in reversed(range(TRIES)):
            try:
                with replica.lock:
                    while not replica.fresh:
                        self._give(replica)
                return
            except ServerAway:
                if not left:
                    raise
                time.sleep(AGAIN)

    def _give(self, replica: Replica) -> None:
        found = self._open(replica)
        given, adapter = self._newest, self._adapter
        assert given is not None
        if "base" not in found:
            raise RemoteError(f"{replica.address} runs an earlier vllm_server.py: start the one of this opd.")
        if adapter is not None and found["base"] != adapter.base:
            replica.put(adapter.base, adapter.below)
        if not (adapter or self._weights).give(replica, given.expected.version, given.place):  # newer ones are there
            return
        said = replica.ask("POST", "/score", {"texts": self._probe.texts})["logprobs"]
        given.expected.check(replica, said, self._spec.tolerance)
        with self._lock:
            replica.fresh = given is self._newest

    def revive(self, replica: Replica, tell: Callable[[str, Any], None]) -> None:
        """In a thread of its own, while others work; then `tell` hears that it is `back`, or `gone` for good."""
        with self._lock:
            begun = replica in self._reviving
            self._reviving[replica] = tell
        if not begun:
            threading.Thread(target=self._revive, args=(replica,), daemon=True).start()

    def _revive(self, replica: Replica) -> None:
        until = time.monotonic() + self._spec.patience
        found: tuple[str, Any] | None = None
        while found is None:
            try:
                self._bring(replica)
                found = "back", None
            except ServerAway as error:
                found = ("gone", error) if self._closed or time.monotonic() >= until else None
            except OpdError as error:
                found = "gone", error
        with self._lock:
            tell = self._reviving.pop(replica)
        tell(*found)

    # Sampling

    def sample(self, requests: Iterable[SampleRequest]) -> Iterator[SampledToken | Finished]:
        if self._busy:
            raise RuntimeError("this sampler is sampling already; finish or close that generator first")
        self._busy = True
        call = _Call(self)
        try:
            yield from call.run(requests)
        finally:
            call.close()
            self._busy = False


class _Call:
    """One run of `VllmEngine.sample`."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.events: queue.Queue[tuple[str, Replica, Any]] = queue.Queue()  # what happened, where, and more about it
        self.lanes: dict[Replica, Lane] = {}
        self.deaths: dict[Replica, int] = {}  # without a token since the one before
        self.waiting: deque[Ticket] = deque()
        self.numbers, self.slots = 0, engine.slots
        self.over = False
        for replica in engine.replicas:
            if replica.fresh:
                self.join(replica)
            else:
                self.revive(replica)

    def run(self, requests: Iterable[SampleRequest]) -> Iterator[SampledToken | Finished]:
        for request in requests:
            sequence, prefix = sequence_ids(request, self.engine.max_length)
            prompt = sequence[: sequence.size - prefix.size].tolist()
            ticket = Ticket(request, prompt, prefix.tolist())
            over = self.ended(ticket)
            if over is None:
                self.waiting.append(ticket)
            else:  # an interrupted rollout whose last token was kept, but not the fact that it was the last
                yield Finished(request.id, over)
        while True:
            self.hand_out()
            if not self.waiting and not any(lane.tickets for lane in self.lanes.values()):
                return
            what, replica, more = self.news()
            if what == "back":
                self.join(replica)
            elif what == "gone" and (not self.lanes or not isinstance(more, ServerAway)):
                raise more
            elif what in ("broken", "line") and self.lanes.get(replica) is more[0]:  # else of one that is lost already
                if what == "broken":
                    self.lose(*more)
                else:
                    yield from self.read(*more)

    def news(self) -> tuple[str, Replica, Any]:
        while True:
            try:
                return self.events.get(timeout=LOOK)
            except queue.Empty:
                self.engine.check()

    def ended(self, ticket: Ticket) -> Any:
        return why_over(ticket.ids, ticket.request.sampling, self.engine.model.tokenizer)

    # Engines

    def join(self, replica: Replica) -> None:
        lane = self.lanes[replica] = Lane(replica)
        threading.Thread(target=self._listen, args=(lane,), daemon=True).start()

    def _listen(self, lane: Lane) -> None:
        replica = lane.replica
        try:
            for line in replica.lines(lane.session):
                if self.over:
                    return
                self.events.put(("line", replica, (lane, line)))
        except ServerAway as error:
            self.events.put(("broken", replica, (lane, error)))
        except RemoteError as error:
            self.events.put(("gone", replica, error))

    def lose(self, lane: Lane, error: ServerAway) -> None:
        """Its requests go to others, behind the tokens that came from it."""
        replica = lane.replica
        del self.lanes[replica]
        self.deaths[replica] = self.deaths.get(replica, 0) + 1
        if self.deaths[replica] > TRIES:
            raise ServerAway(f"{error} It ended {TRIES + 1} times in a row before it had drawn a token.")
        self.waiting.extendleft(reversed(lane.tickets.values()))
        replica.fresh = False
        to_stderr(f"{error} Its {len(lane.tickets)} answers under way go on elsewhere, or when it is back")
        self.revive(replica)

    def revive(self, replica: Replica) -> None:
        self.engine.revive(replica, lambda what, more: self.events.put((what, replica, more)))

    # Requests

    def hand_out(self) -> None:
        """Each to the engine with the fewest tokens to do; samples of one prompt together, since it is read once for them."""
        given: dict[str, tuple[Lane, dict[str, Ticket]]] = {}  # by session
        lane, prompt = None, None
        while self.waiting and self.lanes:
            if lane is None or prompt != self.waiting[0].prompt or len(lane.tickets) >= self.slots:
                lane = min(self.lanes.values(), key=lambda lane: lane.load)
            if len(lane.tickets) >= self.slots:
                break
            self.numbers += 1
            ticket = self.waiting.popleft()
            prompt = ticket.prompt
            lane.tickets[str(self.numbers)] = ticket
            given.setdefault(lane.session, (lane, {}))[1][str(self.numbers)] = ticket
        for lane, tickets in given.values():
            wanted = [self.wish(name, ticket) for name, ticket in tickets.items()]
            try:
                lane.replica.ask("POST", "/submit", {"session": lane.session, "requests": wanted})
            except ServerAway as error:
                self.lose(lane, error)

    def wish(self, name: str, ticket: Ticket) -> dict[str, Any]:
        how = ticket.request.sampling
        return {
            "name": name, "ids": ticket.prompt + ticket.ids, "max_tokens": how.max_new_tokens - len(ticket.ids),
            "temperature": how.temperature, "top_p": how.top_p, "top_k": how.top_k,
            "stop_ids": list(how.stop_ids),
        }  # fmt: skip

    def read(self, lane: Lane, line: dict[str, Any]) -> Iterator[SampledToken | Finished]:
        stopped = []
        for name, token, logprob, stop in line["tokens"]:
            ticket = lane.tickets.get(name)
            if ticket is None:  # it was over one step ago
                continue
            request = ticket.request
            if math.isnan(logprob):
                raise TrainingError(
                    f"request {request.id!r}: the policy's logits (version {line['version']}) are not finite."
                )
            ticket.ids.append(token)
            self.deaths.pop(lane.replica, None)
            yield SampledToken(request.id, token, logprob, _drawn(request, logprob), stop, line["version"])
            over = self.ended(ticket)
            if over is not None:
                del lane.tickets[name]
                if over == "stop" and token not in request.sampling.stop_ids:  # a string: the engine goes on
                    stopped.append(name)
                yield Finished(request.id, over)
        if stopped:
            self.abort(lane, stopped)

    def abort(self, lane: Lane, names: list[str] | None = None) -> None:
        body = {"session": lane.session} if names is None else {"session": lane.session, "names": names}
        try:
            lane.replica.ask("POST", "/abort", body)
        except ServerAway:
            return  # it has forgotten them already

    def close(self) -> None:
        self.over = True
        for lane in self.lanes.values():
            self.abort(lane)


def _drawn(request: SampleRequest, logprob: float) -> float:
    """Under the distribution drawn from, where that is known: vLLM tells the policy's own."""
    how = request.sampling
    if how.temperature == 0:
        return 0.0
    return logprob if how.temperature == 1 and how.top_p == 1 and how.top_k == 0 else math.nan
