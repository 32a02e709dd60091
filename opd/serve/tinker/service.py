"""Sessions, training clients, samplers and futures of the Tinker API. One thread computes; this is the order it keeps.

Requests of one training client run by their `seq_id`, which counts from 1, whatever order they arrive in. Samples that wait for the
same weights are drawn together. Every result is a future: its id says whose it is, and nobody else can ask for it.

A request that fails leaves everything as it was, with one consequence: if a forward_backward failed, the gradients of its update are
incomplete, so the next optim_step drops them and fails, too. After that the client can be used again.

All of this survives the process: what is accepted and answered goes into the journal (journal.py), and a new server begins by reading it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import secrets
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from opd.common.errors import OpdError, StoreError
from opd.common.text import first_line, plain
from opd.models.language_model import LanguageModel
from opd.models.lora import find_targets, require_peft
from opd.models.settings import Lora
from opd.serve.tinker.checkpoints import Checkpoints, SavedClient, SavedState
from opd.serve.tinker.journal import Journal, JournalEntry
from opd.serve.tinker.losses import loss_named
from opd.serve.tinker.requests import (
    LoadBody,
    LoraBody,
    NewModel,
    NewSampler,
    OptimStep,
    SampleBody,
    SaveForSampler,
    SaveState,
    parse_body,
)
from opd.serve.tinker.sampling import BaseSampler, Placed, SampleQuestion
from opd.serve.tinker.training import WEIGHTS, TrainedModel
from opd.serve.tinker.wire import LossRow, loss_config, loss_message, loss_rows, read_protobuf
from opd.teachers.served import RequestLimits, WireError

log = logging.getLogger(__name__)

ORDER_SECONDS = 300.0  # how long requests wait for an earlier one that has not arrived
SESSION_SECONDS = 900.0  # without a sign of life
RESULT_SECONDS = 600.0  # how long a result that was fetched can be fetched again
CLIENTS = 64  # training clients at once
SNAPSHOT_SECONDS = 30.0  # of computing that a restart may have to repeat for a client
MOST_LOOSE = 65_536  # bytes of a body that cannot be used and takes its turn all the same
TICK = 1.0
ALPHA = 32.0  # of LoRA, as in the service
ATTENTION = ("attn", "attention", "mixer", "ssm")  # what names of attention layers contain
HEAD_NOTE = "LoRA adapters go on all linear layers but the output head: train_unembed has no effect on this server."

Result = bytes | dict[str, Any]


@dataclass(frozen=True, eq=False)
class ServedBase:
    """A base model. `names`: its name here, and what it was loaded from. `tokenizer`: where the SDK finds the tokenizer."""

    name: str
    address: str
    model: LanguageModel
    digest: str
    sampler: BaseSampler
    tokenizer: str


@dataclass(frozen=True, eq=False)
class SamplerWeights:
    """What a sampler answers with. `key` None: the base's own weights. `file`: of a sampler without a name."""

    base: ServedBase
    key: str | None = None
    client: SavedClient | None = None
    read: Callable[[], Mapping[str, Tensor]] | None = None
    path: str | None = None
    file: Path | None = None


@dataclass(eq=False)
class Session:
    """What one client process made. `futures`: ids of its requests."""

    id: str
    owner: str
    seen: float
    clients: dict[str, TrainingClient] = field(default_factory=dict)
    samplers: dict[str, SamplerWeights] = field(default_factory=dict)
    futures: set[str] = field(default_factory=set)
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class TrainingClient:
    """`waiting`: requests that arrived before an earlier one. `broken`: why the gradients so far are incomplete. `lost`: why a
    restart could not restore it. `snapshot`: its last entry in the journal; `since`: seconds of computing after it.
    """

    id: str
    base: ServedBase
    lora: LoraBody | None
    metadata: Mapping[str, Any]
    model: TrainedModel | None = None
    next: int = 1
    waiting: dict[int, QueuedRequest] = field(default_factory=dict)
    digests: dict[int, bytes] = field(default_factory=dict)
    broken: str | None = None
    lost: str | None = None
    snapshot: Mapping[str, Any] | None = None
    since: float = 0.0
    used: float = field(default_factory=time.time)

    @property
    def rank(self) -> int:
        return 0 if self.lora is None else self.lora.rank

    @property
    def first(self) -> int:
        """The first request that the snapshot does not hold."""
        return 1 if self.snapshot is None else int(self.snapshot["next"])

    def ready(self) -> TrainedModel:
        if self.lost is not None:
            raise WireError(410, self.lost)
        if self.model is None:
            raise WireError(400, f"{self.id} was not created")
        return self.model

    def saved(self) -> SavedClient:
        lora = self.lora or LoraBody(rank=0)
        updates = self.ready().optimiser.updates
        metadata = dict(self.metadata)
        return SavedClient(
            self.base.name, self.base.digest, lora.rank, lora.train_attn, lora.train_mlp, updates, metadata
        )


@dataclass(eq=False)
class QueuedRequest:
    """One request. `run` computes its result, unless it is a sample: then `question` and `weights` say what is drawn, and others
    for the same weights may join it.

    `kind`: its address. One of a training client has `client` and `seq_id`; `changes`: it changes the client, which `failed` does if `run` raises. It is
    `repeated` if it was answered before a restart.
    """

    id: str
    run: Callable[[], Result]
    kind: str = ""
    answer: Future[Result] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)
    fetched: float | None = None
    digest: bytes = b""
    question: SampleQuestion | None = None
    weights: SamplerWeights | None = None
    client: TrainingClient | None = None
    seq_id: int = 0
    changes: bool = False
    failed: Callable[[str], None] | None = None
    repeated: bool = False

    def fail(self, error: BaseException) -> None:
        """Keeps neither the error's traceback nor its causes, which hold the tensors of the pass that failed."""
        error.__context__ = error.__cause__ = None
        self.forget()
        self.answer.set_exception(error.with_traceback(None))

    def forget(self) -> None:
        """Let go of the client, and with it of the weights."""
        self.run, self.client, self.failed = dict, None, None

    def refuse(self, why: str) -> None:
        """Fail before it ran."""
        if self.answer.set_running_or_notify_cancel():
            self.fail(WireError(400, why))


class Service:
    """`waiting`: requests that may wait at once. Every one of the `owners` has an equal share of them, and of the clients.

    `seconds` of computing by kind of request and `tokens` that were trained on, sampled or scored are counted for the metrics.
    """

    def __init__(
        self,
        bases: Mapping[str, ServedBase],
        checkpoints: Checkpoints,
        limits: RequestLimits,
        batch_tokens: int,
        waiting: int,
        owners: int = 1,
    ) -> None:  # fmt: skip
        self.bases, self.checkpoints, self.limits = bases, checkpoints, limits
        self._batch_tokens = batch_tokens
        self._most, self._clients = max(1, waiting // owners), max(1, CLIENTS // owners)
        self.seconds, self.tokens = defaultdict[str, float](float), Counter[str]()
        self._sessions: dict[str, Session] = {}
        self._jobs: dict[str, tuple[Session, QueuedRequest]] = {}
        self._queue: deque[QueuedRequest] = deque()
        self._changed = threading.Condition(threading.RLock())
        self._closed = False
        self._tidied = time.monotonic()
        self._carriers: dict[Any, TrainedModel] = {}  # adapters over a base, to merge saved ones
        self.journal = Journal(checkpoints.root)
        self._restoring = True
        with self._changed:
            self._restore(self.journal.found)
        self._restoring, self.journal.found = False, []
        self._thread = threading.Thread(target=self._work, name="tinker", daemon=True)
        self._thread.start()

    @property
    def length(self) -> int:
        return sum(not job.answer.done() for _, job in list(self._jobs.values()))

    def _open(self, owner: str) -> int:
        return sum(session.owner == owner and not job.answer.done() for session, job in self._jobs.values())

    def close(self) -> None:
        """Stop after the request that runs now. The others are in the journal."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify()
        self._thread.join()
        self.journal.close()
        self.checkpoints.close()

    def _record(self, op: str, facts: Mapping[str, Any], data: bytes = b"") -> None:
        if not self._restoring:
            self.journal.add(op, facts, data)

    # Sessions

    def open_session(self, owner: str, metadata: Mapping[str, Any]) -> Session:
        with self._changed:
            session = Session(f"s{secrets.token_hex(12)}", owner, time.monotonic(), metadata=metadata)
            self._sessions[session.id] = session
            self._record("session", {"id": session.id, "owner": owner, "metadata": dict(metadata)})
            return session

    def session(self, owner: str, name: str) -> Session:
        with self._changed:
            found = self._sessions.get(name)
            if found is None or found.owner != owner:
                raise WireError(404, f"there is no session {plain(name, 80)!r}; it ended")
            found.seen = time.monotonic()
            return found

    def end_session(self, owner: str, name: str) -> None:
        with self._changed:
            self._drop(self.session(owner, name))

    def _drop(self, session: Session) -> None:
        """Free what a session holds: clients, samplers, futures. Saved checkpoints stay."""
        self._sessions.pop(session.id, None)
        self._record("end", {"id": session.id})
        for name in session.futures:
            _, job = self._jobs.pop(name)
            job.answer.cancel()
        for client in session.clients.values():
            self._drop_snapshot(client)
        for sampler in session.samplers.values():
            if sampler.file is not None:
                sampler.file.unlink(missing_ok=True)

    def _drop_snapshot(self, client: TrainingClient) -> None:
        if client.snapshot is not None:
            self.checkpoints.live_file(client.snapshot["file"]).unlink(missing_ok=True)

    def base(self, name: str) -> ServedBase:
        found = self.bases.get(name) or next((base for base in self.bases.values() if base.address == name), None)
        if found is None:
            raise WireError(404, f"no model {plain(name, 100)!r} here; there are {', '.join(self.bases)}")
        return found

    # Training clients

    def client(self, owner: str, name: str) -> tuple[Session, TrainingClient]:
        session, _, number = name.partition(":train:")
        with self._changed:
            found = self._sessions.get(session)
            if not number or found is None or found.owner != owner or name not in found.clients:
                raise WireError(404, f"there is no training client {plain(name, 100)!r}; it ended")
            found.seen = time.monotonic()
            found.clients[name].used = time.time()
            return found, found.clients[name]

    def create(self, owner: str, body: NewModel, raw: bytes, seed: int | None = None) -> QueuedRequest:
        """`seed`: of the adapters, where the body has none."""
        with self._changed:
            session = self.session(owner, body.session_id)
            name = f"{session.id}:train:{body.model_seq_id}"
            if f"{name}:0" in self._jobs:
                return self._jobs[f"{name}:0"][1]
            if name in session.clients:
                raise WireError(410, f"{name} was created, and the answer was fetched and is gone")
            if body.optimizer_config.get("type") != "adamw":
                raise WireError(
                    400, f"optimizer {plain(body.optimizer_config.get('type'), 40)!r}: only adamw is served"
                )
            base, lora = self.base(body.base_model), body.lora_config
            if lora is not None and lora.rank == 0:
                lora = None
            if lora is not None and not (lora.train_mlp or lora.train_attn):
                raise WireError(400, "adapters on the output head alone are not served: set train_mlp or train_attn")
            held = sum(len(each.clients) for each in self._sessions.values() if each.owner == owner)
            if held >= self._clients and not self._restoring:
                raise WireError(400, f"you have {held} training clients already; unload one first")
            if lora is not None and lora.seed is None:
                lora = lora.model_copy(update={"seed": secrets.randbits(62) if seed is None else seed})
            client = TrainingClient(name, base, lora, dict(body.user_metadata or {}))

            def make() -> Result:
                try:
                    settings = None if lora is None else self._lora(base, lora)
                    client.model = TrainedModel(base.model, settings, lora.seed if lora else None, self._batch_tokens)
                    if client.snapshot is not None:
                        self._resume(client, client.snapshot)
                except BaseException:
                    self._forget(session, client, f"{name} was not created")
                    raise
                return {"model_id": name, "type": "create_model"}

            job = self._submit(session, QueuedRequest(f"{name}:0", make, "create_model", client=client, changes=True))
            facts = {"session": session.id, "owner": owner, "address": "create_model", "base": base.digest}
            self._record("request", {"id": job.id, **facts, "seed": lora.seed if lora else None}, raw)
            session.clients[name] = client
            self._enqueue(job)
            return job

    def unload(self, owner: str, name: str) -> QueuedRequest:
        with self._changed:
            sent, again = self._jobs.get(f"{name}:unload", (None, None))
            if sent is not None and again is not None and sent.owner == owner:
                return again
            session, client = self.client(owner, name)
            result = {"model_id": name, "type": "unload_model"}
            job = QueuedRequest(f"{name}:unload", lambda: result, "unload_model")
            self._submit(session, job)
            facts = {"session": session.id, "owner": owner, "address": "unload_model"}
            self._record("request", {"id": job.id, **facts})
            self._forget(session, client, f"{name} was unloaded")
            self._enqueue(job)
        return job

    def _forget(self, session: Session, client: TrainingClient, why: str) -> None:
        """Frees its place. Requests that wait for one that did not arrive fail; those in the queue still run."""
        with self._changed:
            session.clients.pop(client.id, None)
            self._record("unload", {"id": client.id})
            self._drop_snapshot(client)
            for job in client.waiting.values():
                job.refuse(why)
            client.waiting.clear()

    def _lora(self, base: ServedBase, body: LoraBody) -> Lora:
        require_peft("a LoRA client")
        lora = Lora(rank=body.rank, alpha=ALPHA)
        if body.train_mlp and body.train_attn:
            return lora
        targets = find_targets(base.model.module, base.model.head, lora)
        names = [*targets.modules, *targets.parameters]
        chosen = [name for name in names if any(part in name for part in ATTENTION) == body.train_attn]
        if not chosen:
            raise WireError(400, f"{base.name} has no such layers: attention and MLP are told apart by their names")
        return lora.model_copy(update={"targets": chosen})

    def take_turn(self, address: str, owner: str, raw: bytes) -> QueuedRequest:
        """A request of a training client. A body that cannot be used takes its turn all the same and fails then."""
        if address == "forward_backward":
            message = read_protobuf("ForwardBackwardRequest", raw)
            try:
                rows = loss_rows(message, self.limits)
            except WireError as error:
                return self._fail_in_turn(address, owner, message, raw, error, not message.get("forward_only"))
            return self.passes(owner, message, rows, raw)
        submit, model = self._turns[address]
        try:
            body = parse_body(raw, model, self.limits)
        except WireError as error:
            return self._fail_in_turn(address, owner, _loose(raw), raw, error, False)
        return submit(owner, body, raw)

    @property
    def _turns(self) -> dict[str, tuple[Callable[[str, Any, bytes], QueuedRequest], type[Any]]]:
        return {
            "optim_step": (self.optim_step, OptimStep),
            "save_weights": (self.save, SaveState),
            "save_weights_for_sampler": (self.save_for_sampler, SaveForSampler),
            "load_weights": (self.load, LoadBody),
        }

    def _ordered(
        self,
        address: str,
        owner: str,
        name: str,
        seq_id: int,
        body: bytes,
        run: Callable[[Session, TrainingClient], Result],
        *,
        changes: bool,
        failed: Callable[[TrainingClient, str], None] | None = None,
    ) -> QueuedRequest:
        """Run a request of a training client when its turn comes. The same request twice is one request.

        `changes`: it changes the client. `failed`: what changes if it fails.
        """
        with self._changed:
            session, client = self.client(owner, name)
            digest = hashlib.sha256(body).digest()
            future = f"{name}:{seq_id}"
            if seq_id < 1:
                raise WireError(400, f"seq_id {seq_id}: the first request has 1")
            if seq_id in client.digests or seq_id < client.next:
                if client.digests.get(seq_id, digest) != digest:
                    raise WireError(400, f"seq_id {seq_id} of {name} was used by another request")
                if future not in self._jobs:
                    raise WireError(410, f"the result of request {seq_id} was fetched and is gone")
                return self._jobs[future][1]
            job = QueuedRequest(
                future, lambda: run(session, client), address, client=client, seq_id=seq_id, changes=changes
            )
            if failed is not None:
                job.failed = lambda why: failed(client, why)
            self._submit(session, job)
            facts = {"session": session.id, "owner": owner, "address": address, "client": name, "seq_id": seq_id}
            self._record("request", {"id": future, **facts, "digest": digest.hex()}, body)
            client.digests[seq_id] = digest
            client.waiting[seq_id] = job
            self._release(client)
            return job

    def _release(self, client: TrainingClient) -> None:
        while client.next in client.waiting:
            self._enqueue(client.waiting.pop(client.next))
            client.next += 1

    def passes(self, owner: str, message: Mapping[str, Any], rows: list[LossRow], body: bytes) -> QueuedRequest:
        forward_only, name = bool(message.get("forward_only")), str(message.get("model_id", ""))

        def run(session: Session, client: TrainingClient) -> Result:
            loss = loss_named(
                message.get("loss_fn", ""),
                loss_config(message),
                lambda teacher: self._teacher(session, client, teacher),
            )
            client.ready().check(rows, loss)
            self.tokens["trained"] += sum(row.length for row in rows)
            return loss_message(*client.ready().passes(rows, loss, backward=not forward_only))

        return self._ordered(
            "forward_backward", owner, name, int(message.get("seq_id", 0)), body, run,
            changes=not forward_only, failed=None if forward_only else _break,
        )  # fmt: skip

    def _teacher(self, session: Session, client: TrainingClient, name: str) -> LanguageModel:
        weights = self.weights_of(session.owner, None if name.startswith("tinker://") else name, name)
        teacher = weights.base.model if weights.key is None else self._placed(weights).model
        if weights.key is not None:
            client.since = SNAPSHOT_SECONDS  # what is saved may be gone when a restart repeats this
        from opd.models.tokenizers import fingerprint

        if fingerprint(teacher.tokenizer) != fingerprint(client.base.model.tokenizer):
            raise WireError(400, f"teacher {plain(name, 100)!r} has another tokenizer than {client.base.name}")
        return teacher

    def _fail_in_turn(
        self, address: str, owner: str, asked: Mapping[str, Any], body: bytes, error: WireError, trains: bool
    ) -> QueuedRequest:
        """A request that cannot run takes its turn all the same, so that later ones do not wait for it."""
        name, seq_id = asked.get("model_id"), asked.get("seq_id")
        if not isinstance(name, str) or not isinstance(seq_id, int):
            raise error

        def run(session: Session, client: TrainingClient) -> Result:
            raise error

        failed = _break if trains else None
        return self._ordered(address, owner, name, seq_id, body, run, changes=trains, failed=failed)

    def optim_step(self, owner: str, body: OptimStep, raw: bytes) -> QueuedRequest:
        def run(session: Session, client: TrainingClient) -> Result:
            if client.broken is not None:
                raise WireError(
                    400,
                    f"a forward_backward before this optim_step failed, so its gradients were dropped: {client.broken}",
                )
            return {"metrics": client.ready().update(body.adam_params.settings())}

        def failed(client: TrainingClient, why: str) -> None:
            client.broken = None
            if client.model is not None:
                client.model.optimiser.discard()

        return self._ordered("optim_step", owner, body.model_id, body.seq_id, raw, run, changes=True, failed=failed)

    # Checkpoints

    def save(self, owner: str, body: SaveState, raw: bytes) -> QueuedRequest:
        def run(session: Session, client: TrainingClient) -> Result:
            name = body.path or f"step-{client.ready().optimiser.updates:06d}"
            found = self.checkpoints.save(
                owner, client.id, "weights", name, client.ready().state(), client.saved(), overwrite=body.overwrite,
                seconds=body.ttl_seconds, user_metadata=body.user_metadata, request=body.seq_id,
            )  # fmt: skip
            return {"path": found.path, "type": "save_weights"}

        return self._ordered("save_weights", owner, body.model_id, body.seq_id, raw, run, changes=False)

    def save_for_sampler(self, owner: str, body: SaveForSampler, raw: bytes) -> QueuedRequest:
        def run(session: Session, client: TrainingClient) -> Result:
            tensors = {WEIGHTS + name: tensor for name, tensor in client.ready().weights().items()}
            if body.path is not None:
                found = self.checkpoints.save(
                    owner, client.id, "sampler_weights", body.path, tensors, client.saved(),
                    seconds=body.ttl_seconds, user_metadata=body.user_metadata, request=body.seq_id,
                )  # fmt: skip
                return {"path": found.path, "type": "save_weights_for_sampler"}
            file = self.checkpoints.keep_live(tensors)
            with self._changed:
                if session.id not in self._sessions:
                    file.unlink()
                    raise WireError(404, f"session {session.id} ended")
                number = body.sampling_session_seq_id or 0
                weights = self._live(client.base, file, client.saved())
                name = self._add_sampler(session, f"{number}:{client.id}:{body.seq_id}", weights)
            return {"sampling_session_id": name, "type": "save_weights_for_sampler"}

        return self._ordered("save_weights_for_sampler", owner, body.model_id, body.seq_id, raw, run, changes=False)

    def load(self, owner: str, body: LoadBody, raw: bytes) -> QueuedRequest:
        def run(session: Session, client: TrainingClient) -> Result:
            found = self.checkpoints.find(owner, body.path)
            saved = found.client
            if saved.base_hash != client.base.digest:
                raise WireError(
                    400,
                    f"{found.path} was trained from {saved.base}, whose weights are not those of {client.base.name} here",
                )
            if saved.rank != client.rank:
                raise WireError(
                    400, f"{found.path} has LoRA rank {saved.rank}, this client has {client.rank}; 0: all weights"
                )
            client.ready().restore(found.tensors(), saved.updates, body.optimizer)
            client.broken = None
            client.since = SNAPSHOT_SECONDS  # what was loaded may be gone when a restart repeats this
            return {"path": found.path, "model_id": client.id, "type": "load_weights"}

        return self._ordered("load_weights", owner, body.model_id, body.seq_id, raw, run, changes=True)

    # Samplers

    def create_sampler(self, owner: str, body: NewSampler) -> str:
        with self._changed:
            session = self.session(owner, body.session_id)
            weights = self.weights_of(owner, body.base_model, body.model_path)
            return self._add_sampler(session, str(body.sampling_session_seq_id), weights)

    def _add_sampler(self, session: Session, suffix: str, weights: SamplerWeights) -> str:
        name = f"{session.id}:sample:{suffix}"
        facts = {"base": weights.base.name, "path": weights.path, "key": weights.key, "live": weights.file is not None}
        client = None if weights.client is None else asdict(weights.client)
        self._record("sampler", {"id": name, "session": session.id, **facts, "client": client})
        session.samplers[name] = weights
        return name

    def _live(self, base: ServedBase, file: Path, client: SavedClient) -> SamplerWeights:
        return SamplerWeights(base, file.name, client, lambda: _tensors_of(file), file=file)

    def weights_of(self, owner: str, base: str | None, path: str | None) -> SamplerWeights:
        if path is None or not path.startswith("tinker://"):
            if base is None:
                raise WireError(400, "a sampler needs base_model or model_path")
            return SamplerWeights(self.base(base))
        found: SavedState = self.checkpoints.find(owner, path)
        of = next((each for each in self.bases.values() if each.digest == found.client.base_hash), None)
        if of is None:
            raise WireError(404, f"{found.path} was trained from {found.client.base}, which is not served here")
        if base is not None and self.base(base).digest != of.digest:
            raise WireError(400, f"{found.path} was trained from {found.client.base}, not from {plain(base, 100)}")
        return SamplerWeights(of, found.path + found.digest, found.client, found.tensors, found.path)

    def sampler(self, owner: str, name: str) -> tuple[Session, SamplerWeights]:
        with self._changed:
            session = self._sessions.get(name.partition(":sample:")[0])
            if session is None or session.owner != owner or name not in session.samplers:
                raise WireError(404, f"there is no sampler {plain(name, 100)!r}; its session ended")
            session.seen = time.monotonic()
            return session, session.samplers[name]

    def sample(
        self, owner: str, body: SampleBody, raw: bytes, kept: Mapping[str, Any] | None = None
    ) -> tuple[QueuedRequest, list[str]]:
        """`kept`: its entry in the journal, from before a restart."""
        if body.sampling_session_id is None:
            raise WireError(400, "sampling_session_id is missing; make a sampling client")
        name = body.sampling_session_id
        session, weights = self.sampler(owner, name)
        model = weights.base.model
        question = body.question(model.context, model.size, model.stop_ids, self.limits)
        if question.seed is None:
            question = replace(question, seed=kept["seed"] if kept else secrets.randbits(62))
        digest = hashlib.sha256(raw).digest()
        with self._changed:
            future = f"{name}:{secrets.token_hex(6) if body.seq_id is None else body.seq_id}"
            future = str(kept["id"]) if kept else future
            if future in self._jobs:  # sent again because its answer was lost
                job = self._jobs[future][1]
                if job.digest != digest:
                    raise WireError(400, f"seq_id {body.seq_id} of {name} was used by another request")
            else:
                job = QueuedRequest(future, dict, "asample", digest=digest, question=question, weights=weights)
                self._submit(session, job)
                facts = {"session": session.id, "owner": owner, "address": "asample", "seed": question.seed}
                self._record("request", {"id": future, **facts, "digest": digest.hex()}, raw)
                self._enqueue(job)
        return job, [f"{future}:{number}" for number in range(body.num_samples)]

    def _placed(self, weights: SamplerWeights) -> Placed:
        if weights.key is None:
            return weights.base.sampler.of_base()
        return weights.base.sampler.of(weights.key, lambda: self._merged(weights))

    def _merged(self, weights: SamplerWeights) -> Mapping[str, Tensor]:
        """All tensors of the base model, with what was trained."""
        assert weights.read is not None
        assert weights.client is not None
        tensors, client = weights.read(), weights.client
        if client.rank == 0:
            return {name.removeprefix(WEIGHTS): tensor for name, tensor in tensors.items() if name.startswith(WEIGHTS)}
        body = LoraBody(rank=client.rank, train_attn=client.attention, train_mlp=client.mlp)
        key = (weights.base.name, client.rank, client.attention, client.mlp)
        if key not in self._carriers:
            self._carriers[key] = TrainedModel(
                weights.base.model, self._lora(weights.base, body), 0, self._batch_tokens
            )
        self._carriers[key].restore(tensors, 0, optimiser=False)
        return self._carriers[key].model.weights(0).tensors

    # Futures

    def future(self, owner: str, name: str) -> QueuedRequest:
        with self._changed:
            session, job = self._jobs.get(name, (None, None))
            if session is None or job is None or session.owner != owner:
                raise WireError(404, f"there is no future {plain(name, 120)!r}; its session ended")
            session.seen = time.monotonic()
            return job

    def cancel(self, owner: str, name: str) -> None:
        job = self.future(owner, name)
        if job.question is None:  # later requests of the client count on its effect
            raise WireError(400, f"{plain(name, 120)} is not a sample; only samples can be cancelled")
        with self._changed:
            job.answer.cancel()

    def _submit(self, session: Session, job: QueuedRequest) -> QueuedRequest:
        if self._closed:
            raise WireError(503, "the server is shutting down")
        if self._open(session.owner) >= self._most and not self._restoring:
            raise WireError(
                429, f"{self._most} of your requests are waiting, and more are not accepted; ask again later"
            )
        self._jobs[job.id] = session, job
        session.futures.add(job.id)
        job.answer.add_done_callback(lambda answer: self._record_answer(job.id, answer))
        return job

    def _record_answer(self, name: str, answer: Future[Result]) -> None:
        if name in self._jobs:  # otherwise its session ended
            self._record("answer", {"id": name, **_form(answer)}, _content(answer))

    def _enqueue(self, job: QueuedRequest) -> None:
        self._queue.append(job)
        self._changed.notify()

    # Restarts

    def _take_snapshot(self, client: TrainingClient, model: TrainedModel, seq_id: int) -> None:
        """Keep the client as it is after this request. A restart repeats what comes after."""
        before, client.since = client.snapshot, 0.0
        try:
            file = self.checkpoints.keep_live(model.snapshot())
        except Exception as error:  # a full disk, say: the journal still has every request
            log.warning("no snapshot of %s: %s", client.id, first_line(error))
            return
        facts = {"id": client.id, "file": file.name, "next": seq_id + 1, "updates": model.optimiser.updates}
        with self._changed:
            session = self._sessions.get(client.id.partition(":train:")[0])
            if session is None or client.id not in session.clients:
                file.unlink()
                return
            client.snapshot = {**facts, "broken": client.broken}
            self._record("snapshot", client.snapshot)
        with contextlib.suppress(StoreError):  # whoever asks next gets it
            self.journal.sync()
            if before is not None:
                self.checkpoints.live_file(before["file"]).unlink(missing_ok=True)

    def _resume(self, client: TrainingClient, snapshot: Mapping[str, Any]) -> None:
        client.ready().resume(_tensors_of(self.checkpoints.live_file(snapshot["file"])), snapshot["updates"])
        client.broken = snapshot["broken"]

    def _repeat(self, job: QueuedRequest) -> None:
        """Bring a client to where it was after a request that was answered before the restart."""
        error, client = job.answer.exception(), job.client
        assert client is not None
        if error is not None:
            if job.failed is not None:
                job.failed(first_line(error))
        elif job.changes:
            try:
                job.run()
            except Exception as failure:
                client.lost = f"{client.id} could not be restored: {first_line(failure)}"
                log.warning("%s", client.lost, exc_info=failure)

    def _restore(self, entries: Sequence[JournalEntry]) -> None:
        """Everything as the journal has it. What was not finished goes into the queue again, in the order of before.

        A client is made again from its snapshot, and what came after it is repeated, whether it was answered or not.
        """
        ended = {entry.id for entry in entries if entry.op == "end"}
        unloaded = {entry.id for entry in entries if entry.op == "unload"}
        gone = {entry.id for entry in entries if entry.op == "gone"}
        answers = {entry.id: entry for entry in entries if entry.op == "answer"}
        snapshots = {entry.id: entry.facts for entry in entries if entry.op == "snapshot"}
        for entry in entries:
            if entry.op == "session" and entry.id not in ended:
                owner, metadata = entry.facts["owner"], entry.facts["metadata"]
                self._sessions[entry.id] = Session(entry.id, owner, time.monotonic(), metadata=metadata)
            session = self._sessions.get(entry.facts.get("session", entry.id.partition(":train:")[0]))
            if session is None:
                continue
            if entry.op == "sampler":
                self._restore_sampler(session, entry.facts)
            elif entry.op == "request":
                self._restore_request(session, entry, answers.get(entry.id), entry.id in gone, snapshots, unloaded)
            elif entry.op == "skip" and entry.id in session.clients:
                client = session.clients[entry.id]
                if entry.facts["last"] >= client.first:
                    client.waiting.clear()
                    self._skip_to(client, entry.facts["missing"], entry.facts["last"])
        self._remove_unused_files()

    def _restore_sampler(self, session: Session, facts: Mapping[str, Any]) -> None:
        try:
            if facts["live"]:
                file = self.checkpoints.live_file(facts["key"])
                weights = self._live(self.base(facts["base"]), file, SavedClient(**facts["client"]))
            else:
                weights = self.weights_of(session.owner, facts["base"], facts["path"])
        except WireError as error:
            log.warning("%s could not be restored: %s", facts["id"], error)
            return
        if weights.key == facts["key"]:  # otherwise overwritten since
            session.samplers[facts["id"]] = weights

    def _restore_request(
        self,
        session: Session,
        entry: JournalEntry,
        answer: JournalEntry | None,
        gone: bool,
        snapshots: Mapping[str, Mapping[str, Any]],
        unloaded: Collection[str],
    ) -> None:
        facts, address, name = entry.facts, entry.facts["address"], str(entry.facts.get("client", ""))
        client, raw = session.clients.get(name), bytes(entry.data)
        try:
            if address == "create_model" and entry.id.removesuffix(":0") not in unloaded:
                body = parse_body(raw, NewModel, self.limits)
                if self.base(body.base_model).digest != facts["base"]:
                    raise WireError(400, f"{body.base_model} has other weights than before")
                job = self.create(session.owner, body, raw, facts["seed"])
                assert job.client is not None
                job.client.snapshot = snapshots.get(job.client.id)
                job.client.next = job.client.first
            elif client is not None and facts["seq_id"] >= client.first:
                job = self.take_turn(address, session.owner, raw)
            elif address == "asample" and answer is None:
                job, _ = self.sample(session.owner, parse_body(raw, SampleBody, self.limits), raw, facts)
            else:
                job = self._submit(session, QueuedRequest(entry.id, dict))
                if address == "unload_model":
                    job.answer.set_result({"model_id": entry.id.removesuffix(":unload"), "type": "unload_model"})
                elif answer is None:
                    job.fail(WireError(410, f"{name or entry.id} could not be restored after a restart of the server"))
        except WireError as error:
            log.warning("%s could not be restored: %s", entry.id, error)
            job = self._submit(session, QueuedRequest(entry.id, dict))
            job.fail(WireError(410, f"{entry.id} could not be restored after a restart of the server: {error}"))
        job.digest = bytes.fromhex(facts.get("digest", ""))
        if client is not None:
            client.digests[facts["seq_id"]] = job.digest
        if answer is not None and not job.answer.done():
            job.repeated = True
            _answer_again(job, answer)
        if gone:
            del self._jobs[entry.id]
            session.futures.discard(entry.id)

    def _remove_unused_files(self) -> None:
        sessions = self._sessions.values()
        used = {sampler.key for session in sessions for sampler in session.samplers.values() if sampler.file}
        used |= {
            client.snapshot["file"] for session in sessions for client in session.clients.values() if client.snapshot
        }
        for file in self.checkpoints.live_file(".").glob("*"):
            if file.name not in used:
                file.unlink()

    def _needed(self, entry: JournalEntry) -> JournalEntry | None:
        """What is left of an entry when the journal is written anew."""
        session = self._sessions.get(entry.facts.get("session", entry.id.partition(":")[0]))
        if session is None or entry.op == "end":
            return None
        client, (_, job) = session.clients.get(entry.id), self._jobs.get(entry.id, (None, None))
        if entry.op in ("request", "answer", "gone"):
            name, _, number = entry.id.rpartition(":")
            of = session.clients.get(name)
            if of is not None and number.isdigit() and (number == "0" or int(number) >= of.first):
                return entry  # to repeat
            stripped = entry.op == "request" and job is not None and job.answer.done()
            kept, entry = job is not None, entry._replace(data=b"") if stripped else entry
        elif entry.op == "snapshot":
            kept = client is not None and entry.facts == client.snapshot
        elif entry.op == "sampler":
            kept = entry.id in session.samplers
        else:
            kept = entry.op == "session" or client is not None or f"{entry.id}:0" in self._jobs
        return entry if kept else None

    # The thread that computes

    def _work(self) -> None:
        while (jobs := self._next()) is not None:
            began = time.monotonic()
            live = [job for job in jobs if job.repeated or job.answer.set_running_or_notify_cancel()]
            if live and live[0].question is not None:
                self._finish_samples(live)
            elif live:
                self._finish(live[0])
            if live:
                self.seconds[live[0].kind] += time.monotonic() - began
            if self.journal.grown:
                with self._changed:
                    self.journal.rewrite(self._needed)

    def _next(self) -> Sequence[QueuedRequest] | None:
        """The request that has waited longest, and samples that can be drawn with it; None: stop."""
        with self._changed:
            while True:
                if not self._queue or time.monotonic() - self._tidied > TICK:
                    self._tidy()
                if self._queue:
                    break
                if self._closed:
                    return None
                self._changed.wait(TICK)
            first = self._queue.popleft()
            if first.question is None or first.weights is None:
                return [first]
            others = [job for job in self._queue if job.question is not None and _same(job.weights, first.weights)]
            taken = set(map(id, others))
            self._queue = deque(job for job in self._queue if id(job) not in taken)
            return [first, *others]

    def _finish_samples(self, jobs: Sequence[QueuedRequest]) -> None:
        first = jobs[0].weights
        assert first is not None
        try:
            placed = self._placed(first)
        except BaseException as error:
            self._failed(jobs, error)
            return
        if not self._draw(placed, jobs):
            for job in jobs:  # one bad question must not fail those of other owners
                self._draw(placed, [job])

    def _draw(self, placed: Placed, jobs: Sequence[QueuedRequest]) -> bool:
        """False: several were drawn together, and that failed."""
        questions = [job.question for job in jobs if job.question is not None]
        try:
            answers = placed.answers(questions)
            messages = [answer.message() for answer in answers]
        except BaseException as error:
            if len(jobs) > 1:
                return False
            self._failed(jobs, error)
            return True
        self.tokens["scored"] += sum(question.ids.size for question in questions)
        self.tokens["sampled"] += sum(each.ids.size for answer in answers for each in answer.sequences)
        for job, message in zip(jobs, messages, strict=True):
            job.answer.set_result(message)
        return True

    def _finish(self, job: QueuedRequest) -> None:
        client, began = job.client, time.monotonic()
        try:
            if job.repeated:
                self._repeat(job)
            else:
                result = job.run()
        except BaseException as error:
            if job.failed is not None:
                job.failed(first_line(error))
            self._failed([job], error)
        else:
            job.forget()
            if not job.repeated:
                job.answer.set_result(result)
        if client is not None and job.changes:
            client.since += time.monotonic() - began
            if client.since >= SNAPSHOT_SECONDS and job.seq_id and client.model is not None and client.lost is None:
                self._take_snapshot(client, client.model, job.seq_id)

    def _failed(self, jobs: Sequence[QueuedRequest], error: BaseException) -> None:
        if not isinstance(error, OpdError):
            log.warning("request %s failed", jobs[0].id, exc_info=error)
        for job in jobs:
            job.fail(error)

    def _tidy(self) -> None:
        """Give up on requests that never arrived, on sessions without a sign of life, and on results that were fetched."""
        self._tidied = now = time.monotonic()
        for session in list(self._sessions.values()):
            for client in session.clients.values():
                oldest = min((job.since for job in client.waiting.values()), default=now)
                if now - oldest > ORDER_SECONDS:
                    self._skip(client)
            open_jobs = any(not self._jobs[name][1].answer.done() for name in session.futures)
            if now - session.seen > SESSION_SECONDS and not open_jobs:
                self._drop(session)
        for name, (session, job) in list(self._jobs.items()):
            if job.fetched is not None and now - job.fetched > RESULT_SECONDS:
                del self._jobs[name]
                session.futures.discard(name)
                self._record("gone", {"id": name})

    def _skip(self, client: TrainingClient) -> None:
        missing, last = client.next, max(client.waiting)
        for job in client.waiting.values():
            job.refuse(f"request {missing} of {client.id} never arrived")
        client.waiting.clear()
        self._record("skip", {"id": client.id, "missing": missing, "last": last})
        self._skip_to(client, missing, last)

    def _skip_to(self, client: TrainingClient, missing: int, last: int) -> None:
        def run() -> Result:
            client.broken = f"request {missing} never arrived"
            return {}

        client.next = last + 1
        self._enqueue(QueuedRequest("", run, "skip", client=client, seq_id=last, changes=True))

    def gauges(self) -> dict[str, float]:
        with self._changed:
            clients = sum(len(session.clients) for session in self._sessions.values())
            return {"sessions": len(self._sessions), "training_clients": clients, "open_futures": self.length}

    def runs(self, owner: str) -> Iterator[tuple[Session, TrainingClient]]:
        with self._changed:
            found = [(session, client) for session in self._sessions.values() for client in session.clients.values()]
        return ((session, client) for session, client in found if session.owner == owner)


def _break(client: TrainingClient, why: str) -> None:
    client.broken = why


def _loose(raw: bytes) -> Mapping[str, Any]:
    """Whose turn a body that cannot be used would have been. Large ones are not read."""
    if len(raw) > MOST_LOOSE:
        return {}
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _form(answer: Future[Result]) -> dict[str, Any]:
    """What kind of answer it is, for the journal."""
    if answer.cancelled():
        return {"form": "cancelled"}
    error = answer.exception()
    if error is None:
        return {"form": "bytes" if isinstance(answer.result(), bytes) else "json"}
    return {
        "form": "error",
        "status": error.status if isinstance(error, WireError) else 400 if isinstance(error, OpdError) else 500,
    }


def _answer_again(job: QueuedRequest, entry: JournalEntry) -> None:
    """With the answer of before."""
    form, content = entry.facts["form"], bytes(entry.data)
    if form == "cancelled":
        job.answer.cancel()
    elif form == "error":
        job.answer.set_exception(WireError(entry.facts["status"], content.decode()))
    else:
        job.answer.set_result(content if form == "bytes" else json.loads(content))


def _content(answer: Future[Result]) -> bytes:
    if answer.cancelled():
        return b""
    error = answer.exception()
    if error is not None:
        return (str(error) if isinstance(error, OpdError) else first_line(error)).encode()
    found = answer.result()
    return found if isinstance(found, bytes) else json.dumps(found).encode()


def _same(one: SamplerWeights | None, other: SamplerWeights | None) -> bool:
    return one is not None and other is not None and one.base is other.base and one.key == other.key


def _tensors_of(file: Path) -> Mapping[str, Tensor]:
    from safetensors.torch import load_file

    return dict(load_file(file))
