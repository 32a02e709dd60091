"""vLLM as the sampler. Sampling is faster and scales out; vLLM draws the tokens, not opd. torch is imported lazily."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import mmap
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

import numpy as np
from pydantic import Field, model_validator

from opd.common.errors import ModelError, OpdError, RecipeError, RemoteError, ServerAway, TrainingError
from opd.common.http import LOOPBACK, HttpAddress, Variable, nothing, to_stderr, token_of
from opd.common.short_forms import SHORT_FORMS
from opd.common.text import plain
from opd.engines.kinds import BuiltInSampler, SamplerKind
from opd.engines.requests import request_key, uniforms
from opd.models.load import empty_model
from opd.models.settings import Lora
from opd.records import Finished, SampledToken, SampleRequest, TokenSampler, WeightsRef
from opd.registry import Address, Positive, StageView, Word

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from opd.engines.calls import Partner
    from opd.models.language_model import LanguageModel


ALONE = "shares all weights, and the engines get only the adapter of this student after every update"


class VllmSampler(SamplerKind):
    """Samples with vLLM engines in separate processes. They receive the student's weights after every update."""

    name = "vllm"
    leader_only = True
    takes_turns = True
    alongside_training = True

    python: Address | None = Field(
        None, description="of the environment that has vLLM, to start engines with; default: the one that runs opd"
    )
    replicas: int = Field(1, ge=1, le=64, description="engines started here")
    devices: list[Word] | None = Field(
        None, min_length=1, max_length=64, description="CUDA_VISIBLE_DEVICES of each replica; default: as it is here"
    )
    address: Annotated[list[HttpAddress], SHORT_FORMS["sampler.address"]] = Field(
        default_factory=list, max_length=64, description="of engines that are already running, instead of starting any"
    )
    token_env: Variable = Field("OPD_TOKEN", description="the variable that holds their token; of `address`")
    slots: Positive = Field(256, le=65_536, description="sequences that an engine decodes side by side")
    parallel: int = Field(1, ge=1, le=64, description="GPUs of one engine (tensor_parallel_size)")
    memory: float = Field(0.4, gt=0, le=1, description="share of a GPU's memory for weights and cache of an engine")
    cache: Positive | None = Field(None, le=4096, description="GiB of an engine's cache, on CPUs; default: vLLM's")
    eager: bool = Field(False, description="no compilation and no CUDA graphs: starts sooner, samples more slowly")
    lora: Literal["swap", "merge"] | None = Field(
        None,
        description="how engines get a student's adapters: separately (swap), or merged into all weights; default: swap if vLLM supports them",
    )
    weights: Literal["file", "shared"] = Field(
        "file",
        description="how engines get all weights: as a file over HTTP, or through memory shared with the trainer (same machine)",
    )
    correct: bool = Field(
        True,
        description="terms that weight by ratios and name no correction get tis, because log-probs of two engines differ",
    )
    tolerance: float = Field(
        0.2, gt=0, le=10, description="nats, on average, by which an engine's log-probs may differ from the trainer's"
    )
    patience: float = Field(600.0, ge=0, le=31_536_000, description="seconds without any engine before the run ends")

    @model_validator(mode="after")
    def _one_place(self) -> VllmSampler:
        if self.address and (self.python is not None or self.replicas != 1 or self.devices is not None):
            raise ValueError(
                "`address` names engines that are already running, so python, replicas and devices have no effect. Drop them"
            )
        if self.devices is not None and len(self.devices) != self.replicas:
            raise ValueError(f"{len(self.devices)} devices for {self.replicas} replicas: name one for each")
        if len(set(self.address)) < len(self.address):
            raise ValueError("an address is given twice")
        if self.weights == "shared":
            self._shares()
        return self

    def _shares(self) -> None:
        other = next((one for one in self.address if not LOOPBACK.fullmatch(urlsplit(one).hostname or "")), None)
        if other is not None:
            raise ValueError(
                f"weights shared needs engines on this machine, and {other} may be on another machine. Use 127.0.0.1, or set weights: file"
            )
        if self.parallel > 1:
            raise ValueError(
                f"weights shared supports engines on one GPU only: with parallel {self.parallel} an engine has processes that receive no handle. "
                "Set parallel: 1, or weights: file"
            )
        if self.lora == "swap":
            raise ValueError(f"weights shared {ALONE}. Set lora: merge, or weights: file")

    @property
    def interpreter(self) -> str:
        return self.python or sys.executable

    @property
    def corrects(self) -> bool:
        return self.correct

    def open(
        self, model: LanguageModel, max_length: int, *, merge_stop: tuple[int, ...], partner: Partner | None = None
    ) -> TokenSampler:

        return VllmEngine(model, self, max_length, merge_stop=merge_stop)

    def for_frozen_models(self) -> SamplerKind:
        return BuiltInSampler(dtype=self.dtype)

    def poll_stop(self, sampler: TokenSampler, check: Callable[[], None]) -> None:

        assert isinstance(sampler, VllmEngine)
        sampler.check = check

    def close(self, sampler: TokenSampler) -> None:

        assert isinstance(sampler, VllmEngine)
        sampler.close()

    def sequences(self) -> int:
        return 0  # the engines use their own memory

    def takes_adapters(self, config: Any, lora: Lora) -> bool:

        reason = "" if self.lora == "merge" else why_merged(config, lora)
        if reason and self.lora == "swap":
            raise RecipeError(f"sampler.lora swap: {reason}. Set it to merge.")
        swaps = self.lora != "merge" and not reason
        if swaps and self.weights == "shared":
            raise RecipeError(f"sampler.weights shared {ALONE}. Set sampler.lora: merge, or sampler.weights: file.")
        return swaps

    def adapter_notes(self, config: Any, lora: Lora) -> Iterable[str]:

        if self.takes_adapters(config, lora):
            yield "sampler.lora swap: the engines get the base weights once, and only the adapter after every update"
        else:
            reason = "as the recipe says" if self.lora == "merge" else why_merged(config, lora)
            yield f"sampler.lora merge: the engines get all weights after every update, with the adapter added to them: {reason}"

    def notes(self) -> Iterable[str]:
        count = len(self.address) or self.replicas
        yield (
            f"sampler: {count} vLLM engine{'s' if count > 1 else ''}, which get the weights after every update. Unlike with the built-in "
            "sampler, draws are not keyed by prompt and sample (a repeated run samples other answers), checkpoint.resume: exact is not "
            "supported, and log-probs under a temperature other than 1 are unknown. Interrupted answers resume after their last saved token"
        )

        if self.weights == "shared":
            yield "sampler.weights shared: the engines read a copy of the student's weights that the trainer keeps on its device in addition to its own"

    def inquire(self) -> Iterable[str]:

        if self.address:
            return check_engines(self.address, self.token_env)
        require_vllm(self.interpreter)
        return ()

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if self.lora is not None and not view.lora:
            yield f"sampler.lora {self.lora} applies to a student's adapters, and it has none. Drop it, or set student.lora."
        if view.resume == "exact":
            yield (
                "checkpoint.resume exact draws unfinished answers again, token by token, and vLLM would draw others. Set "
                "checkpoint.resume: prefill, or sampler.engine: builtin."
            )
        if view.rollout.staleness and view.rollout.in_flight == "keep":
            yield (
                "rollout.in_flight keep: vLLM reads unfinished answers again when its weights change. Set it to recompute, or to wait."
            )
        for term in view.terms if view.rollout.temperature != 1 else ():
            if term.compares_with_sampler:
                yield (
                    f"rollout.temperature {view.rollout.temperature:g} with sampler.engine vllm and a {term.name} term, which needs the "
                    "log-probs that tokens were drawn with: vLLM returns those at temperature 1 only. Set it to 1, or sampler.engine: builtin."
                )


# --- Exporting the student's weights ---
#
# WeightsFile sends a file; WeightsBuffer shares memory with engines on the same machine. A tied head is written out, since
# vLLM's CPU build otherwise keeps the old one. Ids beyond the shared vocabulary are cut off: our sampler never draws them.


FILE = "model.safetensors"
WHOLE = "100TB"  # shard size; large enough for a single file


class Exported:
    """Exports a model's weights. Every `write` reads the tensors of `model`, so load new weights into it first."""

    def __init__(self, model: LanguageModel) -> None:
        from opd.models.language_model import share_module

        self._model, self._module = model, share_module(model.module)
        config = self._module.config
        for part in {id(one): one for one in (config, config.get_text_config())}.values():
            part.tie_word_embeddings = False
        config.get_text_config().vocab_size = model.size
        config.architectures = [type(self._module).__name__]
        self._scratch = tempfile.TemporaryDirectory(prefix="opd-weights-")
        self.folder = Path(self._scratch.name)

    @property
    def config(self) -> dict[str, Any]:
        return dict(self._module.config.to_dict())

    def state(self) -> tuple[dict[str, Tensor], set[str]]:
        """(tensors by name, names of those with one row per vocabulary id). Nothing is copied."""
        model = self._model
        tables = {id(model.module.get_input_embeddings().weight), id(model.head.weight)}
        if model.head.bias is not None:
            tables.add(id(model.head.bias))
        parameters = dict(model.module.named_parameters(remove_duplicate=False))
        rows = {name for name, parameter in parameters.items() if id(parameter) in tables}
        state = {
            name: parameter.detach()[: model.size] if name in rows else parameter.detach()
            for name, parameter in parameters.items()
        }
        return state | {name: one for name, one in model.module.state_dict().items() if name not in state}, rows

    def close(self) -> None:
        self._scratch.cleanup()


class WeightsFile(Exported):
    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self._newest: Path | None = None

    def write(self, version: int) -> Path:
        """Write a new file and delete the previous one. A process that has the old file open can still read it."""
        state, rows = self.state()
        apart = {name: tensor.clone() if name in rows else tensor for name, tensor in state.items()}
        folder = self.folder / f"version-{version}"
        shutil.rmtree(folder, ignore_errors=True)
        self._module.save_pretrained(folder, state_dict=apart, max_shard_size=WHOLE)
        before, self._newest = self._newest, folder
        if before not in (None, folder):
            shutil.rmtree(before)
        return folder / FILE

    def give(self, replica: Replica, version: int, path: Path) -> bool:
        return put_file(replica, version, path, "weights")


def put_file(replica: Replica, version: int, path: Path, what: str) -> bool:
    """Send a file. Returns False if it was already replaced by a newer one."""
    try:
        replica.put(version, path, what)
    except FileNotFoundError:
        return False
    return True


# --- Sampling through one or more vLLM engines ---
#
# `load` sends weights to every engine and checks them with a fixed text. `sample` sends each request to the least loaded
# engine. If an engine dies, it is restarted or waited for, and the others resume its requests after the last token. Draws are
# vLLM's own and not keyed.


STOPS = 128  # most stop ids; vLLM returns their log-probs at every token
AGAIN = 2.0  # seconds between attempts to bring an engine back
LOOK = 0.5  # seconds between two calls of `check` during a wait
NOTHING_YET = 0.005  # seconds before a source that had no request is asked again
END = object()  # a source has no more requests
TRIES = 3  # attempts to bring an engine back, and deaths in a row that an engine may have before it draws a token


@dataclass(frozen=True, eq=False)
class Newest:
    """The newest weights, and the log-probs expected from an engine that has them."""

    place: Any  # what `write` returned
    expected: Expected


@dataclass(eq=False)
class Ticket:
    """A request in progress. `ids`: the response so far, including its prefix."""

    request: SampleRequest
    prompt: list[int]
    ids: list[int]

    @property
    def tokens(self) -> int:
        """The most tokens that an engine has to read and write for this request."""
        return len(self.prompt) + self.request.sampling.max_new_tokens


@dataclass(eq=False)
class EngineSession:
    """The work of one engine for one call of `sample`."""

    replica: Replica
    tickets: dict[str, Ticket] = field(default_factory=dict)
    session: str = field(
        default_factory=partial(secrets.token_hex, 8)
    )  # unique: the server may end a lost session late

    @property
    def load(self) -> int:
        return sum(ticket.tokens for ticket in self.tickets.values())


class VllmEngine:
    """Implements `TokenSampler`. One `sample` call at a time; `load` may be called between two of its events."""

    def __init__(
        self, model: LanguageModel, spec: VllmSampler, max_length: int, *, merge_stop: tuple[int, ...]
    ) -> None:
        from opd.engines.requests import check_context

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
        from opd.engines.requests import copy_weights

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
        self._each(self._bring, here or self.replicas, patience)  # lost engines come back while the others sample

    def _each(self, call: Callable[[Replica], Any], replicas: list[Replica], patience: float) -> None:
        """Call on all replicas in parallel. Unreachable replicas are skipped as long as one can be reached."""
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
                    to_stderr(f"{error} Continuing with the others")
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
        """Start the engine, give it the newest weights and check that it uses them."""
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
            raise RemoteError(
                f"{replica.address} runs an earlier vllm_server.py. Start the one from this version of opd."
            )
        if adapter is not None and found["base"] != adapter.base:
            replica.put(adapter.base, adapter.below)
        if not (adapter or self._weights).give(replica, given.expected.version, given.place):  # replaced meanwhile
            return
        scores = replica.ask("POST", "/score", {"texts": self._probe.texts})["logprobs"]
        given.expected.check(replica, scores, self._spec.tolerance)
        with self._lock:
            replica.fresh = given is self._newest

    def revive(self, replica: Replica, tell: Callable[[str, Any], None]) -> None:
        """Bring an engine back in a background thread, then call `tell` with "back", or with "gone" if that failed."""
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

    def sample(self, requests: Iterable[SampleRequest | None]) -> Iterator[SampledToken | Finished]:
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
    """One call of `VllmEngine.sample`."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.events: queue.Queue[tuple[str, Replica, Any]] = queue.Queue()  # (event, replica, details)
        self.lanes: dict[Replica, EngineSession] = {}
        self.deaths: dict[Replica, int] = {}  # in a row, without a token in between
        self.waiting: deque[Ticket] = deque()
        self.requests: Iterator[SampleRequest | None] = iter(())
        self.numbers, self.slots = 0, engine.slots
        self.over, self.more = False, True  # `more`: requests may follow
        for replica in engine.replicas:
            if replica.fresh:
                self.join(replica)
            else:
                self.revive(replica)

    def run(self, requests: Iterable[SampleRequest | None]) -> Iterator[SampledToken | Finished]:
        self.requests = iter(requests)
        while True:
            yield from self.admit()
            self.dispatch()
            if not self.more and not self.waiting and not any(lane.tickets for lane in self.lanes.values()):
                return
            found = self.next_event()
            if found is None:
                continue
            what, replica, details = found
            if what == "back":
                self.join(replica)
            elif what == "gone" and (not self.lanes or not isinstance(details, ServerAway)):
                raise details
            elif what in ("broken", "line") and self.lanes.get(replica) is details[0]:  # ignore sessions already lost
                if what == "broken":
                    self.lose(*details)
                else:
                    yield from self.read(*details)

    def admit(self) -> Iterator[Finished]:
        """Take the requests that there are. No more of them wait than could be sampled at once: an episode is opened when its request is taken."""
        from opd.engines.requests import sequence_ids

        while self.more and len(self.waiting) < self.slots * len(self.engine.replicas):
            request = next(self.requests, END)
            self.more = request is not END
            if not isinstance(request, SampleRequest):  # nothing yet, or no more
                return
            sequence, prefix = sequence_ids(request, self.engine.max_length)
            prompt = sequence[: sequence.size - prefix.size].tolist()
            ticket = Ticket(request, prompt, prefix.tolist())
            over = self.ended(ticket)
            if over is None:
                self.waiting.append(ticket)
            else:  # an interrupted rollout whose last token was saved, but not its end
                yield Finished(request.id, over)

    def next_event(self) -> tuple[str, Replica, Any] | None:
        """None: requests may have come meanwhile."""
        while True:
            try:
                return self.events.get(timeout=NOTHING_YET if self.more else LOOK)
            except queue.Empty:
                self.engine.check()
                if self.more:
                    return None

    def ended(self, ticket: Ticket) -> Any:
        from opd.engines.requests import why_over

        return why_over(ticket.ids, ticket.request, self.engine.model.tokenizer)

    # Engines

    def join(self, replica: Replica) -> None:
        lane = self.lanes[replica] = EngineSession(replica)
        threading.Thread(target=self._listen, args=(lane,), daemon=True).start()

    def _listen(self, lane: EngineSession) -> None:
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

    def lose(self, lane: EngineSession, error: ServerAway) -> None:
        """Queue its requests for other engines, which resume after the tokens received so far."""
        replica = lane.replica
        del self.lanes[replica]
        self.deaths[replica] = self.deaths.get(replica, 0) + 1
        if self.deaths[replica] > TRIES:
            raise ServerAway(f"{error} It ended {TRIES + 1} times in a row before it had drawn a token.")
        self.waiting.extendleft(reversed(lane.tickets.values()))
        replica.fresh = False
        to_stderr(f"{error} Its {len(lane.tickets)} unfinished answers continue on another engine, or when it is back")
        self.revive(replica)

    def revive(self, replica: Replica) -> None:
        self.engine.revive(replica, lambda what, more: self.events.put((what, replica, more)))

    # Requests

    def dispatch(self) -> None:
        """Send each request to the least loaded engine. Samples of one prompt stay together and share its prefill."""
        given: dict[str, tuple[EngineSession, dict[str, Ticket]]] = {}  # by session
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
            wanted = [self.request_body(name, ticket) for name, ticket in tickets.items()]
            try:
                lane.replica.ask("POST", "/submit", {"session": lane.session, "requests": wanted})
            except ServerAway as error:
                self.lose(lane, error)

    def request_body(self, name: str, ticket: Ticket) -> dict[str, Any]:
        how = ticket.request.sampling
        return {
            "name": name, "ids": ticket.prompt + ticket.ids, "max_tokens": how.max_new_tokens - (len(ticket.ids) - ticket.request.start),
            "temperature": how.temperature, "top_p": how.top_p, "top_k": how.top_k,
            "stop_ids": list(how.stop_ids),
        }  # fmt: skip

    def read(self, lane: EngineSession, line: dict[str, Any]) -> Iterator[SampledToken | Finished]:
        stopped = []
        for name, token, logprob, stop in line["tokens"]:
            ticket = lane.tickets.get(name)
            if ticket is None:  # it finished one step ago
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
                if over == "stop" and token not in request.sampling.stop_ids:  # a stop string, unknown to the engine
                    stopped.append(name)
                yield Finished(request.id, over)
        if stopped:
            self.abort(lane, stopped)

    def abort(self, lane: EngineSession, names: list[str] | None = None) -> None:
        body = {"session": lane.session} if names is None else {"session": lane.session, "names": names}
        try:
            lane.replica.ask("POST", "/abort", body)
        except ServerAway:
            return  # the engine is gone, and its requests with it

    def close(self) -> None:
        self.over = True
        for lane in self.lanes.values():
            self.abort(lane)


def _drawn(request: SampleRequest, logprob: float) -> float:
    """The log-prob under the sampling distribution, or NaN if unknown: vLLM reports the unmodified policy's."""
    how = request.sampling
    if how.temperature == 0:
        return 0.0
    return logprob if how.temperature == 1 and how.top_p == 1 and how.top_k == 0 else math.nan


# --- The client of one `vllm_server.py` ---


SERVER = Path(__file__).with_name("vllm_server.py")
BEGIN = 60.0  # seconds for a process to report its port
CONNECT = 10.0  # seconds to connect
GLANCE = 10.0  # seconds to answer a check whether an engine is running
ANSWER = 1800.0  # seconds to answer: a starting engine compiles, and large weights take time
SILENCE = 60.0  # seconds without a line; the stream sends one at least every 5 s
TAIL = 2000  # characters of a log that an error quotes
TOKEN = "OPD_SAMPLER_TOKEN"
HAS_VLLM = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
RANKS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}


class Replica:
    """An engine at an address. Errors that a restart could fix are raised as `ServerAway`."""

    def __init__(self, address: str, token: str) -> None:
        self.address, self._token = address, token
        self.fresh = False  # whether it is verified to use the newest weights
        self.noise: float | None = None  # nats between its first log-probs and the trainer's
        self.lock = threading.Lock()  # held while weights are sent

    def start(self) -> None:
        """Start the engine. One at a given address is started by others, so this does nothing."""

    def close(self) -> None:
        """Stop what `start` started."""

    def exit_reason(self) -> str:
        return ""

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float = ANSWER
    ) -> dict[str, Any]:
        content = None if body is None else json.dumps(body).encode()
        return self._read(method, path, content, timeout=timeout)

    def put(self, version: int, file: Path, what: str = "weights") -> None:
        with file.open("rb") as content:
            self._read("PUT", f"/{what}?version={version}", content, file.stat().st_size)

    def _read(
        self,
        method: str,
        path: str,
        content: bytes | IO[bytes] | None,
        size: int | None = None,
        timeout: float = ANSWER,
    ) -> Any:
        try:
            with contextlib.closing(self._connection(timeout)) as connection:
                headers = {} if size is None else {"Content-Length": str(size)}
                with contextlib.suppress(
                    BrokenPipeError, ConnectionResetError
                ):  # it may have sent a reason before it closed the connection
                    connection.request(method, path, content, {**self._headers, **headers})
                response = connection.getresponse()
                found = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._away(method, path, error) from None
        try:
            answer = json.loads(found)
        except ValueError:
            raise RemoteError(f"{self.address}: {method} {path} did not return JSON. Is it vllm_server.py?") from None
        if response.status != 200:
            reason = plain(answer.get("error", answer), 600) if isinstance(answer, dict) else plain(answer, 600)
            raise RemoteError(f"{self.address}: {method} {path} was answered with {response.status}: {reason}.")
        return answer

    def lines(self, session: str) -> Iterator[dict[str, Any]]:
        """The lines of the event stream. Raises `ServerAway` when the stream ends."""
        path = f"/events?session={session}"
        try:
            with contextlib.closing(self._connection(SILENCE)) as connection:
                connection.request("GET", path, headers=self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise RemoteError(f"{self.address}: GET {path} was answered with {response.status}.")
                while line := response.readline():
                    yield json.loads(line)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._away("GET", path, error) from None
        raise self._away("GET", path, EOFError("the stream ended"))

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"}

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        parts = urlsplit(self.address)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=CONNECT)
        connection.connect()
        connection.sock.settimeout(timeout)
        return connection

    def _away(self, method: str, path: str, error: BaseException) -> ServerAway:
        reason = plain(error, 300) or type(error).__name__
        return ServerAway(f"vLLM at {self.address}: {method} {path}: {reason}.{self.exit_reason()}")


class OwnReplica(Replica):
    """An engine in a child process, which ends with this process, even when this one is killed."""

    def __init__(self, python: str, devices: str | None, log: Path) -> None:
        super().__init__("", secrets.token_urlsafe(32))
        self._python, self._devices, self._log = python, devices, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        environment = engine_environment() | {TOKEN: self._token}
        environment |= {} if self._devices is None else {"CUDA_VISIBLE_DEVICES": self._devices}
        command = [self._python, str(SERVER), "--port", "0", "--token-env", TOKEN, "--child"]
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
                )  # fmt: skip
        except OSError as error:
            raise no_python(self._python, error) from None
        assert self._process.stdout is not None
        timer = threading.Timer(BEGIN, self._process.kill)
        timer.start()
        first = self._process.stdout.readline()
        timer.cancel()
        if not first:
            raise RemoteError(f"sampler: vLLM did not start.{self.exit_reason()}")
        self.address = f"http://127.0.0.1:{json.loads(first)['port']}"

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # including the engine's workers
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def exit_reason(self) -> str:
        ended = self._process is None or self._process.poll() is not None
        tail = self._log.read_text(errors="replace")[-TAIL:] if self._log.exists() else ""
        return f" Its process has ended; the end of its log:\n{plain(tail, TAIL)}" if ended and tail else ""


def no_python(python: str, error: OSError) -> RemoteError:
    return RemoteError(f"sampler.python {python!r} cannot be started: {error.strerror}. Name the Python that has vLLM.")


def require_vllm(python: str) -> None:
    """Raise an error if this Python cannot start an engine. vLLM itself is not imported."""
    try:
        found = subprocess.run(
            [python, "-c", HAS_VLLM], env=engine_environment(), capture_output=True, timeout=BEGIN, check=False
        )
    except OSError as error:
        raise no_python(python, error) from None
    except subprocess.TimeoutExpired:
        raise RemoteError(f"sampler.python {python!r} has not answered within {BEGIN:g} s. Is it a Python?") from None
    if found.returncode:
        raise RemoteError(
            f"sampler.engine vllm: {python} has no vLLM. Install it there, name a Python that has it (sampler.python), or set "
            "sampler.engine: builtin."
        )


def check_engines(address: list[str], token_env: str) -> list[str]:
    """Check running engines: raise an error if one rejects our token; return a note for each unreachable one."""
    away = []
    for replica in replicas_of(address, token_env, "", [], Path()):
        try:
            replica.ask("GET", "/state", timeout=GLANCE)
        except ServerAway as error:
            away.append(f"sampler: not reachable now ({plain(error, 300)}). A run waits for it")
    return away


def engine_environment() -> dict[str, str]:
    """Our environment without the variables of a rank launcher: with them, an engine would wait forever for the ranks."""
    launched = ("TORCHELASTIC_", "TORCH_ELASTIC_")
    return {name: value for name, value in os.environ.items() if name not in RANKS and not name.startswith(launched)}


def replicas_of(
    address: list[str], token_env: str, python: str, devices: list[str | None], logs: Path
) -> list[Replica]:
    """The engines at `address`, or one child process per entry of `devices`."""
    if address:
        return [Replica(one, token_of(token_env, one) or "") for one in address]
    return [OwnReplica(python, device, logs / f"vllm-{number}.log") for number, device in enumerate(devices)]


# --- Adapters: a small file per version, on top of base weights that are sent once ---


RANK = 512  # the largest LoRA rank that vLLM supports


def why_merged(config: Any, settings: Lora) -> str:
    """Why vLLM cannot load these adapters separately for a model with this config; empty if it can."""
    import torch

    from opd.models.lora import find_targets

    if settings.rank > RANK:
        return f"vLLM supports adapters of rank {RANK} at most, and student.lora.rank is {settings.rank}"
    module = empty_model(config)
    targets = find_targets(module, module.get_output_embeddings(), settings)
    if targets.parameters:
        return (
            f"vLLM does not support adapters on a mixture's experts as they are trained here ({targets.parameters[0]})"
        )
    kinds = {name: type(module.get_submodule(name)) for name in targets.modules}
    odd = next((name for name, kind in kinds.items() if not issubclass(kind, torch.nn.Linear)), None)
    return "" if odd is None else f"vLLM supports adapters on linear layers, and {odd} is a {kinds[odd].__name__}"


class AdapterFile:
    """Exports adapters. `model` is an inference copy whose adapters are still zero, so its weights are the base."""

    def __init__(self, model: LanguageModel, file: WeightsFile) -> None:
        from opd.models.lora import find_targets

        assert model.lora is not None
        self._dtype, self._folder = model.dtype, file.folder
        names = find_targets(model.module, model.head, model.lora).modules
        targets = sorted({name.rpartition(".")[2] for name in names})
        self.settings = {"r": model.lora.rank, "lora_alpha": model.lora.alpha, "target_modules": targets}
        self.base = secrets.randbelow(2**31)  # by which an engine reports which base weights it has
        self.below = file.write(self.base)
        self._newest, self.adds = self.below, False  # `adds`: whether the newest adapter is non-zero

    def write(self, weights: WeightsRef) -> Any:
        """Write a new file and delete the previous one. A process that has the old file open can still read it."""
        from safetensors.torch import save_file

        if not weights.adapter:
            raise ModelError(f"sampler: weights of version {weights.version} come without their adapter.")
        tensors = {name: tensor.to("cpu", self._dtype).contiguous() for name, tensor in weights.adapter.items()}
        self.adds = any(bool(tensor.any()) for name, tensor in tensors.items() if ".lora_B." in name)
        before, self._newest = self._newest, self._folder / f"adapter-{weights.version}.safetensors"
        save_file(tensors, self._newest)
        if before not in (self.below, self._newest):
            before.unlink()
        return self._newest

    def give(self, replica: Replica, version: int, path: Any) -> bool:
        return put_file(replica, version, path, "adapter")


# --- Checking an engine's weights ---
#
# The engine and the trainer score the same fixed text. Comparing log-probs is the only way to detect stale weights.


TEXTS, LENGTH = 8, 9  # 64 tokens are compared
ROUNDING = 1e-3  # nats, on average; two fp32 engines differ by much less
GROWTH = 4.0  # allowed multiple of an engine's first difference, which is its own rounding
NEARER = 3.0  # an engine this many times nearer to the previous weights still has those
SEEN = 1e-4  # nats; smaller differences cannot tell two versions apart


@dataclass(frozen=True, eq=False)
class Expected:
    """The trainer's log-probs of the text with the weights of this version, and with the previous ones."""

    version: int
    now: np.ndarray
    before: np.ndarray
    settles: bool = True  # whether the difference is the engine's rounding: a zero adapter is not rounded

    def check(self, replica: Replica, found: Sequence[Sequence[float]], tolerance: float) -> None:
        scores = np.array([value for text in found for value in text], dtype=np.float64)
        gap = float(np.abs(scores - self.now).mean()) if scores.shape == self.now.shape else np.inf
        allowed = tolerance if replica.noise is None else min(tolerance, max(ROUNDING, GROWTH * replica.noise))
        before = float(np.abs(scores - self.before).mean()) if self.before.size and gap > SEEN else np.inf
        if gap <= allowed and before * NEARER >= gap:
            replica.noise = gap if replica.noise is None and self.settles else replica.noise
            return
        older = f", and by {before:.3g} with the previous weights" if np.isfinite(before) else ""
        raise TrainingError(
            f"sampler: vLLM at {replica.address} does not sample with the weights of version {self.version}: log-probs of a fixed text "
            f"differ by {gap:.3g} nats on average from the trainer's (allowed {allowed:.3g}){older}. It still has older weights, or it "
            "computes something else. Nothing was sampled with them. Start the engines again and resume; sampler.tolerance is for "
            "engines that round more."
        )


class WeightsProbe:
    """The fixed text. `expect` scores it with the model's current weights."""

    def __init__(self, model: LanguageModel, max_length: int, avoid: Sequence[int]) -> None:
        self._model = model
        known = np.setdiff1d(np.arange(model.size), np.asarray(avoid))
        length = min(LENGTH, max_length - 1)
        draws = uniforms(request_key(0, "sampler probe", 0, 0), 0, TEXTS * length)
        ids = known[(draws * known.size).astype(np.int64)].reshape(TEXTS, length)
        self.texts: list[list[int]] = ids.tolist()
        self._before = np.zeros(0)

    def expect(self, version: int) -> Expected:
        import torch

        from opd.models.attention import Packed

        with torch.no_grad():
            model, lengths = self._model, [len(text) for text in self.texts]
            ids_T = torch.tensor(self.texts, device=model.device).flatten()
            logits = model.project(model.hidden(ids_T, Packed.of(lengths, model.device))).logits().float()
            found = logits.log_softmax(-1)[:-1].gather(-1, ids_T[1:, None])[:, 0].cpu().numpy().astype(np.float64)
            first = np.cumsum([0, *lengths])[1:-1] - 1  # predictions across a text boundary
            now, before = np.delete(found, first), self._before
            self._before = now
            return Expected(version, now, before)


# --- Sharing weights in memory: `sampler.weights: shared` ---
#
# One buffer, on the trainer's GPU (opened by CUDA IPC handle) or in anonymous CPU memory (opened through its process). Nothing
# is written to disk or sent. Engines read it only while they answer a request, so one buffer suffices: `write` waits for readers.


ALIGN = 64  # bytes; every tensor starts at a multiple


class WeightsBuffer(Exported):
    """A copy of the model's weights. The model's own may be training, and change while an engine restarts."""

    def __init__(self, model: LanguageModel) -> None:
        from opd.engines.vllm_server import tensors_in

        super().__init__(model)
        self._turn = threading.Condition()
        self._readers, self._writes = 0, 0
        self.tensors: list[dict[str, Any]] = []
        end = 0
        for name, tensor in self._named().items():
            entry = {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            self.tensors.append(entry | {"start": end})
            end += -(-math.prod(tensor.shape) * tensor.element_size() // ALIGN) * ALIGN
        self.memory: CudaMemory | PlainMemory = (
            CudaMemory(end, model.device) if model.device.type == "cuda" else PlainMemory(end)
        )
        self._places = dict(tensors_in(self.memory.bytes, self.tensors))

    def _named(self) -> dict[str, Tensor]:
        """Tensors by the names that `save_pretrained` would use. Shared layers appear once."""
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        state, rows = self.state()
        ignored = self._module._keys_to_ignore_on_save or ()
        kept = {name: tensor for name, tensor in state.items() if name not in ignored and name not in rows}
        kept = remove_tied_weights_from_state_dict(kept, self._module)
        return dict(revert_weight_conversion(self._module, kept | {name: state[name] for name in sorted(rows)}))

    def write(self, version: int) -> int:
        """Copy the weights. Returns the number of this write, for `give`."""
        import torch

        with torch.no_grad(), self._turn:  # no new readers meanwhile
            self._turn.wait_for(lambda: not self._readers)
            for name, tensor in self._named().items():
                self._places[name].copy_(tensor)
            self.memory.settle()
            self._writes += 1
            return self._writes

    def give(self, replica: Replica, version: int, written: int) -> bool:
        """Let an engine read the weights. Returns False if newer ones have replaced them.

        Once this returns or raises, the engine has finished reading or is lost.
        """
        with self._turn:
            if written != self._writes:
                return False
            self._readers += 1
        try:
            replica.ask("POST", "/weights", {"version": version, "memory": self.memory.handle, "tensors": self.tensors})
        finally:
            with self._turn:
                self._readers -= 1
                self._turn.notify_all()
        return True

    def close(self) -> None:
        self._places = {}
        self.memory.close()
        super().close()


class PlainMemory:
    """Anonymous shared CPU memory. It is freed with the last process that holds it, even after kill -9."""

    def __init__(self, size: int) -> None:
        import torch

        if sys.platform != "linux":
            raise RemoteError("sampler.weights shared needs Linux. Set sampler.weights: file.")
        name = f"opd-vllm-weights-{secrets.token_hex(8)}"
        self._descriptor = os.memfd_create(name)
        os.ftruncate(self._descriptor, size)
        self.bytes = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)
        self.handle = {"process": os.getpid(), "descriptor": self._descriptor, "name": name}

    def settle(self) -> None:
        """Nothing to do: writes are visible to other processes immediately."""

    def close(self) -> None:
        import torch

        self.bytes = torch.empty(0)
        os.close(self._descriptor)


class CudaMemory:
    """Shared GPU memory. torch's count of readers is not used: an engine's answer says that it has finished reading."""

    def __init__(self, size: int, device: torch.device) -> None:
        import torch

        from opd.engines.vllm_server import cuda_handle

        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        fields = self.bytes.untyped_storage()._share_cuda_()
        self.handle = cuda_handle(str(torch.cuda.get_device_properties(device).uuid), fields)
        self._counter, self._device = fields[4:6], device

    def settle(self) -> None:
        import torch

        torch.cuda.current_stream(self._device).synchronize()  # another process does not wait for our stream

    def close(self) -> None:
        """Set torch's count to zero, so that torch frees the memory with its last tensor. Engines never change the count."""
        import torch

        torch.UntypedStorage._release_ipc_counter_cuda(*self._counter)
        self.bytes = torch.empty(0)
