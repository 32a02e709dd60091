"""A token-protected vLLM server for `sampler.engine: vllm`. It runs in vLLM's environment and imports nothing from opd.

    OPD_TOKEN=… python vllm_server.py --port 8300          # the model and its weights come from the run

POST /open      {"config": …, …}   open an engine for a model with this config; it has no weights yet
PUT  /weights?version=N            load a safetensors file; running requests continue with the new weights
POST /weights   {"version": N, "memory": …, "tensors": […]}   the same from the shared memory of a run on this machine
PUT  /adapter?version=N            the same for an adapter on these weights, if the engine was opened with adapters
POST /score     {"texts": [ids…]}  log-probs of all tokens of each text but the first
POST /submit    {"session": S, "requests": […]}
POST /abort     {"session": S, "names": […]}; without names: all requests, and the session ends
GET  /events?session=S             a session's tokens as they are drawn, one line of JSON per step
GET  /state                        the engine and its versions

Only the main thread uses the engine, so weights change between two steps, never within one.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import math
import mmap
import os
import queue
import re
import secrets
import shutil
import signal
import stat
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    import torch

BODY, PIECE = 256 << 20, 1 << 20  # most bytes of a JSON request; bytes of a file read at a time
QUIET = 5.0  # seconds without tokens before an empty line is sent as a sign of life
TOKEN = "OPD_TOKEN"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # LoRA ranks that vLLM supports


class RequestError(Exception):
    """An error response. Arguments: HTTP status, reason."""


class Host:
    """The engine, its requests and the queues of their tokens. All methods except `ask` run in the main thread."""

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._engine, self.identity, self.version = scratch, None, "", -1
        self._work: queue.Queue[tuple[Callable[[], Any], Future[Any]]] = queue.Queue()
        self._sessions: dict[str, queue.Queue[dict[str, Any]]] = {}
        self._stops: list[int] = []  # stop ids; their joint log-prob is sent with every token
        self._under_way: set[str] = set()
        self._scores: dict[str, list[float]] = {}
        self._max_length, self.hint = 0, ""  # `hint`: a prefix for error messages
        self._base: int | None = None  # version of the base weights of the adapter
        self._policy: Any = None  # the LoRA request that sampling uses, if there are adapters
        self._swap: Any = None  # the LoRA request that reloads the adapter

    def ask(self, call: Callable[[], Any]) -> Any:
        """Run a call in the main thread, between two steps. For use by other threads."""
        future: Future[Any] = Future()
        self._work.put((call, future))
        return future.result()

    def run(self) -> None:
        while True:
            busy = self._engine is not None and self._engine.has_unfinished_requests()
            try:
                call, future = self._work.get(block=not busy)
            except queue.Empty:
                self.step()
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

    # The engine

    def open(self, asked: dict[str, Any]) -> dict[str, Any]:
        rest = {name: value for name, value in asked.items() if name != "max_length"}
        identity = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
        if self._engine is None:
            self._engine, self.identity, self._stops = self._made(asked), identity, asked["stop_ids"]
            self._max_length = asked["max_length"]
        elif identity != self.identity or asked["max_length"] > self._max_length:
            raise RequestError(409, "it has an engine for another model, other settings or shorter answers: restart it")
        return self.state()

    def _made(self, asked: dict[str, Any]) -> Any:
        self._policy, self._swap, self.hint = None, None, ""
        if asked["cache"] is not None:
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(asked["cache"])
        try:
            from vllm import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine
        except ModuleNotFoundError as error:
            reason = f"{sys.executable} cannot import vLLM ({error}). Name the Python that has it under sampler.python"
            raise RequestError(501, reason) from None

        home = self._scratch / "model"
        home.mkdir(exist_ok=True)
        (home / "config.json").write_text(json.dumps(asked["config"]), encoding="utf-8")
        lora = {} if asked.get("lora") is None else self._prepare(asked["lora"])
        arguments = EngineArgs(
            model=str(home),
            load_format="dummy",
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype=asked["dtype"],
            max_model_len=asked["max_length"],
            max_num_seqs=asked["slots"],
            tensor_parallel_size=asked["parallel"],
            gpu_memory_utilization=asked["memory"],
            enforce_eager=asked["eager"],
            enable_prefix_caching=True,
            async_scheduling=False,  # so that the weights' version of every token is known
            disable_log_stats=True,
            seed=secrets.randbelow(2**31),  # with equal seeds, replicas would give a prompt the same answers
            **lora,
        )
        engine = LLMEngine.from_engine_args(arguments)
        engine.collective_rpc("update_config", args=({"load_config": {"load_format": "safetensors"}},))
        return engine

    def _prepare(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Create the adapter's folder; returns the engine's LoRA arguments."""
        from vllm.lora.request import LoRARequest

        folder = self._scratch / "adapter"
        folder.mkdir(exist_ok=True)
        self.hint = "if adapters are the cause, set sampler.lora: merge. "
        (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
        self._policy, self._swap = (LoRARequest("policy", 1, str(folder), load_inplace=new) for new in (False, True))
        rank, targets = min(rank for rank in RANKS if rank >= settings["r"]), settings["target_modules"]
        # without targets, vLLM reserves an adapter for the head, and then cannot score texts while it samples
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "lora_target_modules": targets}

    def load(self, version: int, path: Path | None, weights: Any = None) -> dict[str, Any]:
        """Load weights in place. Running requests are prefilled again, and the prefix cache is cleared."""
        source = {"weights_iterator": weights} if path is None else {"weights_path": str(path.parent)}
        self.engine.collective_rpc("reload_weights", kwargs=source)
        self._base = None if self._policy is None else version
        return self._loaded(version if self._policy is None else -1)

    def adapt(self, version: int, path: Path) -> dict[str, Any]:
        """Replace the adapter, likewise."""
        if self._base is None:
            raise RequestError(409, "it has no weights for an adapter")
        path.replace(Path(self._swap.lora_path) / "adapter_model.safetensors")
        self.engine.add_lora(self._swap)
        return self._loaded(version)

    def _loaded(self, version: int) -> dict[str, Any]:
        self.engine.reset_prefix_cache(reset_running_requests=True)
        self.version = version
        return self.state()

    @property
    def engine(self) -> Any:
        if self._engine is None:
            raise RequestError(409, "no engine is open")
        return self._engine

    def state(self) -> dict[str, Any]:
        return {"identity": self.identity, "version": self.version, "base": self._base}

    # Scoring

    def score(self, texts: list[list[int]]) -> list[list[float]]:
        from vllm import SamplingParams

        once = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        names = [f"score/{number}" for number in range(len(texts))]
        for name, ids in zip(names, texts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": ids}, once, lora_request=self._policy)
        self._scores = {}
        while len(self._scores) < len(names):
            self.step()
        return [self._scores[name] for name in names]

    # Sampling

    def submit(self, session: str, requests: list[dict[str, Any]]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self.version < 0:
            raise RequestError(409, "it has no weights yet")
        self._sessions.setdefault(session, queue.Queue())
        for request in requests:
            name = f"{session}/{request['name']}"
            params = SamplingParams(
                max_tokens=request["max_tokens"],
                temperature=request["temperature"],
                top_p=request["top_p"],
                top_k=request["top_k"],
                stop_token_ids=request["stop_ids"],
                ignore_eos=True,  # only `stop_token_ids` end an answer, not the config's eos
                logprob_token_ids=self._stops,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            self._under_way.add(name)
            self.engine.add_request(name, {"prompt_token_ids": request["ids"]}, params, lora_request=self._policy)

    def abort(self, session: str, names: list[str] | None) -> None:
        whole = [name for name in self._under_way if name.startswith(f"{session}/")]
        gone = whole if names is None else [f"{session}/{name}" for name in names]
        self.engine.abort_request(gone)
        self._under_way.difference_update(gone)
        if names is None:
            self._sessions.pop(session, None)

    def listen(self, session: str) -> queue.Queue[dict[str, Any]]:
        return self._sessions.setdefault(session, queue.Queue())

    def step(self) -> None:
        lines: dict[str, list[Any]] = {}
        for output in self.engine.step():
            name = output.request_id
            if output.prompt_logprobs is not None and name.startswith("score/"):
                pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
                self._scores[name] = [entry[token].logprob for token, entry in pairs]
            elif name in self._under_way:
                session, _, own = name.partition("/")
                part, stops = output.outputs[0], self._stops
                for token, entry in zip(part.token_ids, part.logprobs, strict=True):
                    ending = _log_sum([entry[stop].logprob for stop in stops])
                    logprob = ending if token in stops else entry[token].logprob
                    lines.setdefault(session, []).append([own, token, logprob, ending])
                if output.finished:
                    self._under_way.remove(name)
        for session, tokens in lines.items():
            if session in self._sessions:
                self._sessions[session].put({"version": self.version, "tokens": tokens})


def _log_sum(values: list[float]) -> float:
    most = max(values)
    return most if math.isinf(most) else most + math.log(sum(math.exp(value - most) for value in values))


class Handler(BaseHTTPRequestHandler):
    """Handles one HTTP connection. `host`, `token`, `scratch` and `limit` are set by `main`."""

    host: Host
    token: str
    scratch: Path
    limit: int
    timeout = 600  # seconds; a client that neither sends nor reads for longer is disconnected

    def do_GET(self) -> None:
        self._answer({"/state": self.host.state, "/events": self._events})

    def do_POST(self) -> None:
        host = self.host
        calls: dict[str, Callable[[dict[str, Any]], Any]] = {
            "/open": host.open,
            "/weights": lambda body: load_shared(host.load, body),
            "/score": lambda body: {"logprobs": host.score(body["texts"])},
            "/submit": lambda body: host.submit(body["session"], body["requests"]),
            "/abort": lambda body: host.abort(body["session"], body.get("names")),
        }
        self._answer({path: partial(self._asked, call) for path, call in calls.items()})

    def do_PUT(self) -> None:
        self._answer({"/weights": lambda: self._put(self.host.load), "/adapter": lambda: self._put(self.host.adapt)})

    def _answer(self, routes: dict[str, Callable[[], Any]]) -> None:
        try:
            given = self.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
                raise RequestError(401, "the token is missing or wrong")
            route = routes.get(urlsplit(self.path).path)
            if route is None:
                raise RequestError(404, "unknown path")
            found = route()
            if found is not None:
                self._send(200, found)
        except RequestError as error:
            self._send(error.args[0], {"error": error.args[1]})
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        except Exception as error:  # engine errors are sent to the client and logged
            traceback.print_exc()
            status = 400 if isinstance(error, (KeyError, TypeError, ValueError)) else 500
            hint = self.host.hint if urlsplit(self.path).path in ("/open", "/adapter") else ""
            self._send(status, {"error": f"{hint}{type(error).__name__}: {error}"})

    def _send(self, status: int, found: Any) -> None:
        body = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _length(self, most: int) -> int:
        length = int(self.headers.get("Content-Length", -1))
        if not 0 <= length <= most:
            raise RequestError(413, f"a body of {length} bytes; at most {most} are accepted")
        return length

    def _body(self) -> dict[str, Any]:
        found = json.loads(self.rfile.read(self._length(BODY)))
        if not isinstance(found, dict):
            raise ValueError("expected a mapping")
        return found

    def _query(self, name: str) -> str:
        return parse_qs(urlsplit(self.path).query)[name][0]

    def _asked(self, call: Callable[[dict[str, Any]], Any]) -> Any:
        body = self._body()
        return self.host.ask(lambda: call(body)) or {}

    def _put(self, load: Callable[[int, Path], Any]) -> Any:
        version, left = int(self._query("version")), self._length(self.limit)
        with tempfile.TemporaryDirectory(prefix="weights-", dir=self.scratch) as folder:
            path = Path(folder) / "model.safetensors"
            with path.open("wb") as file:
                while left:
                    piece = self.rfile.read(min(left, PIECE))
                    if not piece:
                        raise RequestError(400, f"{left} bytes are missing")
                    file.write(piece)
                    left -= len(piece)
            return self.host.ask(lambda: load(version, path))

    def _events(self) -> None:
        """Send event lines until the client disconnects."""
        session = self._query("session")
        lines = self.host.ask(lambda: self.host.listen(session))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.end_headers()  # no length: the stream ends with the connection
        self.close_connection = True
        try:
            while True:
                try:
                    line = lines.get(timeout=QUIET)
                except queue.Empty:
                    line = {"version": self.host.version, "tokens": []}
                self.wfile.write(json.dumps(line).encode() + b"\n")
                self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            self.host.ask(lambda: self.host.abort(session, None))

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: there are many requests, and errors are already printed."""


def end_with(parent: Any, scratch: Path) -> None:
    """End the engine and its workers when the parent process ends, even if it was killed."""
    parent.read()
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


# --- Memory shared by a run and the engines on its machine: `sampler.weights: shared`. The run uses this as well. ---
#
# {"process": P, "descriptor": D, "name": N}    anonymous memory of process P
# {"uuid": U, "handle": …, …}                   memory of the GPU U (CUDA IPC)
#
# Either is one block of bytes, with each tensor at its `start`.


MEMORY = re.compile(r"opd-vllm-weights-[0-9a-f]{16}")  # random: no other memory has this name

# torch decrements the run's counter, which is 1, after every opening. The counter is unsigned: one decrement too many makes it
# huge, and the memory is never freed. Shared memory cannot have this name (two slashes), and torch ignores a counter that
# it cannot open, so it stays 1 until the run decrements it.
UNCOUNTED = b"/opd/uncounted"


def load_shared(load: Callable[..., Any], asked: dict[str, Any]) -> Any:
    """Load weights from shared memory, in the engine. After it returns, the engine no longer reads the memory."""
    import torch

    memory = opened(asked["memory"])
    try:
        return load(asked["version"], None, list(tensors_in(memory, asked["tensors"])))
    finally:
        if memory.is_cuda:
            for device in {memory.device.index, torch.cuda.current_device()}:
                torch.cuda.synchronize(device)


def opened(memory: dict[str, Any]) -> torch.Tensor:
    """Open the memory as one tensor of bytes."""
    return _opened_cuda(memory) if "uuid" in memory else _opened_plain(**memory)


def tensors_in(memory: torch.Tensor, tensors: list[dict[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, view) of each tensor."""
    import torch

    for entry in tensors:
        dtype, shape, start = getattr(torch, entry["dtype"], None), entry["shape"], entry["start"]
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{entry['name']}: there is no dtype {entry['dtype']!r}")
        end = start + math.prod(shape) * dtype.itemsize
        if not 0 <= start <= end <= memory.numel():
            raise ValueError(f"{entry['name']} would take bytes {start} to {end} of {memory.numel()}")
        yield entry["name"], memory[start:end].view(dtype).view(shape)


def _opened_plain(process: int, descriptor: int, name: str) -> torch.Tensor:
    """Open anonymous memory. Never opens a file: the name must be one that a run gives, and the owner this user."""
    import torch

    if not MEMORY.fullmatch(name):
        raise ValueError(f"{name!r} is not the shared memory of a run")
    link = f"/proc/{int(process)}/fd/{int(descriptor)}"
    try:
        if os.readlink(link) != f"/memfd:{name} (deleted)":
            raise FileNotFoundError
        file = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        raise ValueError(
            f"the weights that process {process} shares cannot be opened from here: this engine is on another machine, in another "
            "container, or of another user. Set sampler.weights: file"
        ) from None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise ValueError(f"{name!r} belongs to another user")
        # copy-on-write: pages are shared until written to, and writes here do not reach the run
        return torch.frombuffer(mmap.mmap(file, found.st_size, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    finally:
        os.close(file)


def _opened_cuda(memory: dict[str, Any]) -> torch.Tensor:
    import torch

    seen = devices()
    if memory["uuid"] not in seen:
        raise ValueError(
            f"the run's weights are on GPU {memory['uuid']}, and this engine sees {', '.join(seen) or 'none'}. Name that one as well, "
            "after the engine's own, in sampler.devices; or set sampler.weights: file"
        )
    storage = torch.UntypedStorage._new_shared_cuda(*cuda_fields(memory, seen.index(memory["uuid"])))
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def devices() -> list[str]:
    """UUIDs of the GPUs that this process sees. Device numbers would depend on CUDA_VISIBLE_DEVICES."""
    import torch

    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def cuda_handle(uuid: str, fields: tuple[Any, ...]) -> dict[str, Any]:
    """The result of torch's `_share_cuda_` as JSON.

    Without its event: the run has already waited for its writes, and torch would leak an event at every opening. Without
    its counter: see `UNCOUNTED`.
    """
    _, handle, size, offset, *_ = fields
    return {"uuid": uuid, "size": size, "offset": offset, "handle": handle.hex()}


def cuda_fields(memory: dict[str, Any], index: int) -> tuple[Any, ...]:
    """The arguments of `_new_shared_cuda`. `index`: the GPU's number in this process."""
    size, offset = int(memory["size"]), int(memory["offset"])
    if min(size, offset) < 0:
        raise ValueError(f"invalid size and offset: {size}, {offset}")
    return index, bytes.fromhex(memory["handle"]), size, offset, UNCOUNTED, 0, b"", False


def main() -> None:
    parser = argparse.ArgumentParser(description="A vLLM engine that samples for `sampler: {engine: vllm}` of opd.")
    parser.add_argument("--host", default="127.0.0.1", help="not encrypted: use a tunnel for anything but loopback")
    parser.add_argument("--port", type=int, default=8300, help="0: any; it is printed")
    parser.add_argument("--token-env", default=TOKEN, help="environment variable with the token that runs must send")
    parser.add_argument("--max-gib", type=float, default=512.0, help="largest weights accepted")
    parser.add_argument("--child", action="store_true", help="end with the process that holds the standard input open")
    given = parser.parse_args()
    token = os.environ.get(given.token_env, "")
    if not token:
        sys.exit(f"{given.token_env} is not set: set it to the same token as on the machine of the run.")
    own = Path(__file__).resolve().parent  # opd's modules must not shadow those that vLLM imports
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != own]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # run the engine in this process
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer uses the same cores
    with tempfile.TemporaryDirectory(prefix="opd-vllm-") as scratch:
        Handler.host, Handler.token, Handler.scratch = Host(Path(scratch)), token, Path(scratch)
        Handler.limit = int(given.max_gib * 2**30)
        server = ThreadingHTTPServer((given.host, given.port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        if given.child:
            threading.Thread(target=end_with, args=(sys.stdin, Path(scratch)), daemon=True).start()
        print(json.dumps({"port": server.server_address[1]}), flush=True)
        os.dup2(2, 1)  # vLLM's output goes to stderr
        Handler.host.run()


if __name__ == "__main__":
    main()
