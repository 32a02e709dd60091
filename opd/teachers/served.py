"""A teacher on `opd serve`. Hidden states come over HTTP and the head once, so divergences stay exact. No torch here."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opd.common.context import RunContext
from opd.common.errors import RemoteError, RunDirectoryError, ServerAway, TokenizerMismatch, UserError
from opd.common.files import write_atomic
from opd.common.http import Addresses, OneServer, Remote, Variable
from opd.common.text import plain
from opd.models.tokenizers import RemoteVocabulary, fingerprint
from opd.records import Rendered, SignalNeed, TeacherLike, TopK
from opd.registry import Positive, Word
from opd.teachers.kinds import RemoteFacts, TeacherInputs, TeacherKind
from opd.teachers.pool import Probe
from opd.teachers.scoring import Page, ScoringTeacher, tempered

if TYPE_CHECKING:
    from torch import Tensor

    from opd.divergences import Projection

GLANCE = 3.0  # timeout in seconds of the first, optional contact


class LimitFacts(BaseModel):
    """What the server accepts in one request."""

    bytes: int = Field(ge=1)
    tokens: int = Field(ge=1)
    sequences: int = Field(ge=1)


class ServedFacts(BaseModel):
    """Facts that a server states about a model."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    protocol: int
    weights: str = Field(pattern="^[0-9a-f]{64}$")
    head: str = Field(pattern="^[0-9a-f]{64}$")
    tokenizer: str
    stop_ids: tuple[int, ...]
    rows: int = Field(ge=1)
    width: int = Field(ge=1)
    context: int = Field(ge=1)
    dtype: str
    device: str
    scale: float
    softcap: float | None
    instance: str
    limits: LimitFacts

    @property
    def version(self) -> int:
        """Derived from the weights' hash. Every signal carries it, so resuming with other weights fails."""
        return int(self.weights[:12], 16)


class ServedTeacher(TeacherKind):
    """Scores with a model on `opd serve`."""

    name = "served"
    never_changes = True
    offers = frozenset({"logprobs_at", "hidden", "topk"})

    address: Addresses = Field(
        description="where `opd serve` listens: http://HOST:PORT; or several that serve the same"
    )
    model: Word = Field(description="its name on the server")
    token_env: Variable | None = Field(
        "OPD_TOKEN", description="the environment variable that holds the server's token"
    )
    batch_tokens: Positive = Field(8192, description="tokens in one request")
    temperature: float = Field(1.0, ge=0.01, le=100, description="of the teacher's distribution alone")
    concurrency: int = Field(4, ge=1, le=256, description="requests at once")
    timeout: float = Field(300.0, gt=0, le=86_400, description="seconds to wait for one answer")
    patience: float = Field(3600.0, ge=0, le=31_536_000, description="seconds to wait for an unreachable server")
    exact: bool | None = Field(
        None,
        description="a separate forward pass for each request, so that bits do not depend on other requests; default: if the server runs on a CPU",
    )

    @property
    def title(self) -> str:
        return f"{self.model} at {', '.join(self.address)}"

    def connect(self, context: RunContext, patience: float | None = None) -> Remote:
        return Remote(
            self.address,
            self.token_env,
            timeout=self.timeout if patience is None else GLANCE,
            patience=self.patience if patience is None else patience,
            concurrency=self.concurrency,
            say=context.say,
            check=context.check_stop,
        )

    def facts(self, remote: Remote) -> ServedFacts:
        """Facts about the model currently served under the name."""
        found = remote.json("GET", f"/models/{self.model}")
        try:
            facts = ServedFacts.model_validate(found)
        except ValidationError as error:
            raise RemoteError(
                f"{remote.address}: what it says about {self.model!r} cannot be read ({error.error_count()} mistakes, the first at "
                f"{'.'.join(map(str, error.errors()[0]['loc']))}). Is it `opd serve`?"
            ) from None
        if facts.protocol != PROTOCOL:
            raise RemoteError(
                f"{remote.address} speaks protocol {facts.protocol}, and this is {PROTOCOL}. Use the same version of opd on both sides."
            )
        return facts

    def inquire(self, name: str, tokenizer: Any, student: str) -> RemoteFacts:
        from opd.models.tokenizers import fingerprint

        where = f"teachers.{name}: {plain(self.title)}"
        try:
            facts = self.facts(self.connect(RunContext(say=lambda line: None), patience=0.0))
        except ServerAway as error:
            return RemoteFacts(notes=(f"{where}: not reachable now ({plain(error, 300)}). A run waits for it",))
        if facts.tokenizer != fingerprint(tokenizer):
            raise TokenizerMismatch(
                f"{where} has the tokenizer {facts.tokenizer}, and student {student} has {fingerprint(tokenizer)}: their ids mean "
                "different tokens. Serve a teacher with the student's own tokenizer."
            )
        known = f"weights {facts.weights[:12]}, {facts.dtype} on {facts.device}, width {facts.width}, context {facts.context:,}"
        return RemoteFacts(min(facts.context, facts.limits.tokens), (f"{where}: {known}",))

    def vocabulary(self, context: RunContext) -> RemoteVocabulary | None:
        from opd.models.tokenizers import RemoteVocabulary

        facts = self.facts(self.connect(context))
        return RemoteVocabulary(self.title, facts.stop_ids, facts.rows)

    def open(self, name: str, supplies: TeacherInputs) -> TeacherLike:

        return ServedScorer(name, self, supplies)


# --- Scoring: asks in batches, waits for an unreachable server, rejects one that returns as another model ---


ROUNDING = 0.05  # tolerance of the probe in nats when requests of several clients share a forward pass
HEADS = "heads"  # directory of heads by their hash


class ServedScorer(ScoringTeacher):
    """Hidden states come from the server. They are projected locally with the server's head."""

    def __init__(self, name: str, kind: ServedTeacher, supplies: TeacherInputs) -> None:
        self._kind, self._remote, self._student = kind, kind.connect(supplies.context), supplies.student
        self._facts = facts = kind.facts(self._remote)
        batch_tokens = min(kind.batch_tokens, facts.limits.tokens)
        super().__init__(name, kind.role, supplies.stop_ids, batch_tokens, supplies.student.device)
        self.temperature, self.version = kind.temperature, facts.version
        self.context = min(facts.context, facts.limits.tokens)
        self._exact = facts.device == "cpu" if kind.exact is None else kind.exact
        ours = fingerprint(supplies.student.tokenizer)
        if facts.tokenizer != ours:
            raise TokenizerMismatch(
                f"teacher {name!r} ({kind.title}) has the tokenizer {facts.tokenizer}, and student {supplies.student.name} has "
                f"{ours}: their ids mean different tokens. Serve a teacher with the student's own tokenizer."
            )
        self.fingerprint = facts.tokenizer
        self.elsewhere = RemoteVocabulary(kind.title, facts.stop_ids, facts.rows)
        self._weight, self._bias = self._head(supplies.context.directory)
        self._known, self._seen = {facts.instance}, set[str]()  # checked server processes, and those that have answered
        self._checking = True  # requests of a check are not checked themselves
        self._probe = Probe(
            self, supplies.student.size, avoid=self.stop_ids, tolerance=0.0 if self._exact else ROUNDING
        )
        for place in self._remote.places:
            place.used = True
        self._remote.check_used(self._is_the_same)
        self._checking = False

    # Scoring

    def hidden(self, page: Page) -> Tensor:
        raise NotImplementedError("texts are sent, not pages")

    @property
    def width(self) -> int:
        return self._facts.width

    def project(self, hidden: Tensor) -> Projection:
        from opd.divergences import Projection

        facts = self._facts
        whole = Projection(hidden.to(self._weight.dtype), self._weight, self._bias, facts.scale, facts.softcap)
        return tempered(replace(whole, size=self._student.size), self.temperature)

    def _answers(self, asked: Sequence[tuple[list[Rendered], list[str]]], need: SignalNeed) -> Iterable[list[Any]]:
        """Sends requests in parallel. If a new server process answered any of them, the probe decides whether they count."""
        most = self._facts.limits.sequences
        long = [texts for texts, _ in asked if len(texts) > most]
        if long:
            raise RemoteError(
                f"{self._remote.address} accepts {most} texts per request, and {len(long[0])} have to be scored together. Lower "
                f"teachers.{self.name}.batch_tokens, or start it with --max-sequences {len(long[0])}."
            )
        calls = [partial(self._values, texts, need, ids) for texts, ids in asked]
        if self._checking:
            return self._remote.map(calls)
        self._checking = True
        try:
            self._remote.readmit(self._is_the_same)
            found = self._remote.map(calls)
            if not self._seen <= self._known:
                self._remote.check_used(self._is_the_same)
                self._known |= self._seen  # includes servers that are away again: their weights' hash was checked
        finally:
            self._checking = False
        return found

    def _values(self, texts: Sequence[Rendered], need: SignalNeed, ids: Sequence[str]) -> list[Any]:
        if need.hidden is not None and all(name in need.hidden for name in ids):
            return super()._values(texts, need, ids)
        want = {"hidden": "hidden", "logprobs_at": "logprobs", "topk": "topk"}[need.kind]
        question = ScoreQuestion.model_validate(
            {
                "want": want,
                "k": min(need.k or 1, self._student.size) if want == "topk" else None,
                "stop_ids": () if want == "hidden" else self.stop_ids,
                "size": None if want == "hidden" else self._student.size,
                "temperature": 1.0 if want == "hidden" else self.temperature,
                "exact": self._exact,
            }
        )
        tensors = self._ask(question, texts)
        counts = [sum(t1 - t0 for _, _, t0, t1 in text.spans) for text in texts]
        for name, tensor in tensors.items():
            if tensor.shape[0] != sum(counts):
                raise self._bad_answer(f"{tensor.shape[0]} rows of {name} for {sum(counts)} tokens")
        if want == "hidden":
            return list(tensors["hidden"].to(self.device).split(counts))
        if want == "logprobs":
            return [part.numpy() for part in tensors["logprobs"].split(counts)]
        likeliest, logprobs, tail, stop = (tensors[name].numpy() for name in ("ids", "logprobs", "tail", "stop"))
        whole = TopK(likeliest, logprobs, tail, stop, self.fingerprint)
        return [whole.rows(index) for index in np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])]

    def _ask(self, question: ScoreQuestion, texts: Sequence[Rendered]) -> dict[str, Tensor]:
        body, headers = self._remote.bytes(
            "POST",
            f"/models/{self._kind.model}/score",
            write_question(question, texts),
            accept=FRAME,
            load=sum(text.length for text in texts),
        )
        self._require_weights(headers.get(WEIGHTS_HEADER, "none"))
        self._seen.add(headers.get(INSTANCE_HEADER, ""))
        try:
            tensors = read_answer(body)
        except WireError as error:
            raise self._bad_answer(str(error)) from None
        expected = {"hidden": {"hidden"}, "logprobs": {"logprobs"}, "topk": {"ids", "logprobs", "tail", "stop"}}
        if tensors.keys() != expected[question.want]:
            raise self._bad_answer(f"the tensors {sorted(tensors)} for {question.want}")
        if question.want == "hidden" and tensors["hidden"].shape[1:] != (self._facts.width,):
            raise self._bad_answer(
                f"hidden states of shape {tuple(tensors['hidden'].shape)}, width {self._facts.width}"
            )
        return tensors

    def _bad_answer(self, found: str) -> RemoteError:
        return RemoteError(
            f"{self._remote.address}: model {self._kind.model!r} answered with {found}. Is it `opd serve`?"
        )

    # Checking that it is still the same teacher

    def _require_weights(self, weights: str) -> None:
        if weights != self._facts.weights:
            raise RemoteError(
                f"teacher {self.name!r}: {self._kind.title} had the weights {self._facts.weights[:12]} when the run opened it, and "
                f"serves {weights[:12]} now. Nothing was trained on them. Serve the earlier ones and resume, or start a new run."
            )

    def _is_the_same(self) -> None:
        """Raises unless a new process has the same facts and gives the same answers to the probe."""
        facts = self._kind.facts(self._remote)
        self._require_weights(facts.weights)
        may_change = {"instance", "limits"}
        if facts.model_dump(exclude=may_change) != self._facts.model_dump(exclude=may_change):
            raise RemoteError(
                f"teacher {self.name!r}: {self._kind.title} was restarted with another dtype, device or head. Start it with the earlier ones, "
                "and resume the run."
            )
        self._known.add(facts.instance)
        self._probe.check(self)

    def restore(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        if version != self.version:
            raise RemoteError(
                f"teacher {self.name!r}: the checkpoint was trained with other weights of {self._kind.title} (version {version}) than "
                f"it serves now ({self.version}). Serve the earlier ones and resume, or start a new run."
            )

    # The head

    def _head(self, directory: Path | None) -> tuple[Tensor, Tensor | None]:
        """Reads the head from the run's directory, or else from the server. Raises if it does not match its hash."""
        digest = self._facts.head
        file = None if directory is None else directory / HEADS / f"{digest}.safetensors"
        frame = file.read_bytes() if file is not None and file.is_file() else b""
        if hashlib.sha256(frame).hexdigest() != digest:
            frame, _ = self._remote.bytes("GET", f"/models/{self._kind.model}/head/{digest}", accept=FRAME)
            if hashlib.sha256(frame).hexdigest() != digest:
                raise self._bad_answer("a head that does not match its hash")
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(file, frame)  # several ranks may write the same
        tensors = read_answer(frame)
        weight, bias = tensors["weight"].to(self.device), tensors.get("bias")
        if weight.shape[1] != self._facts.width or weight.shape[0] < self._facts.rows:
            raise self._bad_answer(f"a head of shape {tuple(weight.shape)}")
        return weight, None if bias is None else bias.to(self.device)


# --- Checking that a server has not changed: at the first request, after every batch, and on resume ---


PROBE = "probe"
STARTED = re.compile(rb"^process_start_time_seconds (\S+)$", re.MULTILINE)  # among Prometheus metrics
ROUNDS = 3  # after this many rounds with another process each time, restarts of a server are no longer watched
T = TypeVar("T")


class RemoteProbe:
    """A probe for a remote teacher. The scores go into checkpoints, so that a resume can verify the teacher."""

    def __init__(self, teacher: TeacherLike, remote: Remote, size: int, tolerance: float) -> None:
        self._teacher, self._remote, self._size, self._tolerance = teacher, remote, size, tolerance
        self._probe: Probe | None = None
        self._processes: dict[OneServer | None, str | None] = {}  # last seen process of each server; None: unknown
        self._changed: set[OneServer | None] = set()  # servers that changed since the last batch began

    def open(self, avoid: tuple[int, ...]) -> None:
        """Asks twice, to detect a server that is not deterministic, and servers with different models."""
        probe = Probe(self._teacher, self._size, avoid=avoid, tolerance=self._tolerance)
        for place in self._remote.places:
            place.used = True
        self._remote.check_used(partial(self._look, probe))
        self._probe = probe

    def map(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Answers in order. They count only if their server is still the same afterwards, since it may have been restarted.

        Requests answered by a server that is unreachable at the check are sent to the others again. Requests answered during a restart are
        repeated, since another model may have answered.
        """
        probe, self._probe = self._probe, None  # the probe's own requests are not checked
        if probe is None:
            return self._remote.map(calls)
        look, found, missing, rounds = partial(self._look, probe), dict[int, T](), list(range(len(calls))), 0
        try:
            self._remote.readmit(look)
            while missing:
                self._changed.clear()
                answers = self._remote.map([partial(self._signed, calls[number]) for number in missing])
                away, rounds = self._remote.check_used(look), rounds + 1
                doubted = {*away, *(self._changed if rounds <= ROUNDS else self._stop_watching())}
                found |= {
                    n: answer for n, (answer, place) in zip(missing, answers, strict=True) if place not in doubted
                }
                missing = [number for number in missing if number not in found]
        finally:
            self._probe = probe
        return [found[number] for number in range(len(calls))]

    def _look(self, probe: Probe) -> None:
        """Checks the probe's answers, and notes whether the server's process has changed since the last check."""
        probe.check(self._teacher)
        place = self._remote.only_place
        before = self._processes.get(place, "")
        if before is not None:
            self._processes[place] = now = self._process()
            if before not in ("", now):
                self._changed.add(place)

    def _process(self) -> str | None:
        """The server's start time from vLLM's metrics; None if it has none."""
        try:
            metrics, _ = self._remote.bytes("GET", "/metrics", accept="text/plain")
        except ServerAway:
            raise
        except RemoteError:  # no metrics
            return None
        found = STARTED.search(metrics)
        return None if found is None else found[1].decode()

    def _stop_watching(self) -> list[OneServer | None]:
        """Stops watching restarts of addresses with several processes, where they cannot be detected."""
        for place in self._changed:
            self._processes[place] = None
            where = self._remote.address if place is None else place.address
            self._remote.say(f"{where}: every check reaches another process, so restarts cannot be detected")
        return []

    def _signed(self, call: Callable[[], T]) -> tuple[T, OneServer | None]:
        return call(), self._remote.answered_by

    def state(self) -> Mapping[str, Any]:
        import torch

        assert self._probe is not None
        return {PROBE: torch.from_numpy(self._probe.logprobs)}

    def restore(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Raises if the teacher differs from the one that the run began with."""
        assert self._probe is not None
        teacher, now = self._teacher, self._probe.logprobs
        if version != teacher.version:
            raise RunDirectoryError(
                f"teacher {teacher.name!r}: the run began with version {version} of the files that are read locally, and they now have version "
                f"{teacher.version}. Restore its files, or start a new run."
            )
        then = np.asarray(tensors[PROBE])
        gap = float(np.abs(now - then).max()) if then.shape == now.shape else np.inf
        if not gap <= self._tolerance:
            raise RunDirectoryError(
                f"teacher {teacher.name!r}: {self._remote.address} serves another model than the run began with: log-probs of a fixed "
                f"probe differ by {gap:.3g} nats (tolerance {self._tolerance:g}). Serve the same one, or start a new run."
            )


# --- Messages between `opd serve` and a served teacher: questions and answers as safetensors frames, questions also as JSON ---
#
# POST /models/NAME/score     ids of some texts, and which of their tokens are asked about
# -> hidden (N, D)  |  logprobs (N,) or (N, M)  |  ids, logprobs (N, K), tail, stop (N,)
#
# A frame is the bytes of a safetensors file: an 8-byte length, a JSON header with names, types, shapes and offsets, and the data.
# Reading a frame runs no code. docs/serving.md describes the protocol for other clients.


PROTOCOL = 1
FRAME = "application/x-safetensors"
WEIGHTS_HEADER, INSTANCE_HEADER = "x-opd-weights", "x-opd-instance"
INTEGERS: dict[str, np.dtype[Any]] = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}
LARGEST = 2**31 - 1
ENTRIES = 1 << 26  # likeliest ids in one answer, half a GiB
STOP_IDS = 1024
KEYS = 32  # of a JSON question; more than it has fields
HEADER = 64 << 10  # bytes of a frame's header: a few tensors and a question
DIMENSIONS = 2
Id = Annotated[int, Field(ge=0, le=LARGEST, strict=True)]


class WireError(UserError):
    """A request that cannot be answered, with its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ScoreQuestion(BaseModel):
    """A question about texts. `stop_ids` are one event; `size`: number of real ids, the rest of the head is padding."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    want: Literal["hidden", "logprobs", "topk"]
    k: int | None = Field(None, ge=1, le=LARGEST, strict=True)
    stop_ids: Annotated[tuple[Id, ...], Field(fail_fast=True)] = Field((), max_length=STOP_IDS)
    size: int | None = Field(None, ge=1, le=LARGEST, strict=True)
    temperature: float = Field(1.0, ge=0.01, le=100)
    exact: bool = False  # a separate forward pass: the answer's bits do not depend on other requests


Ids = Annotated[list[Id], Field(fail_fast=True)]
Spans = Annotated[list[tuple[Id, Id]], Field(fail_fast=True)]


class TextQuestion(ScoreQuestion):
    """A question with its texts, as a JSON body. Validation stops at the first mistake, since there may be as many as ids."""

    ids: Annotated[list[Ids], Field(fail_fast=True)]
    spans: Annotated[list[Spans], Field(fail_fast=True)] | None = None
    tokens: Annotated[list[Ids], Field(fail_fast=True)] | None = None


@dataclass(frozen=True)
class RequestLimits:
    """What a server accepts in one request."""

    bytes: int = 16 << 20
    tokens: int = 131_072
    sequences: int = 4096

    @property
    def spans(self) -> int:
        """A span covers at least one token or is empty, and a text has at most one empty span."""
        return self.tokens + self.sequences

    @property
    def lists(self) -> int:
        """In JSON: lists of texts, spans, and rows of `tokens`."""
        return 8 + 2 * self.sequences + self.spans + self.tokens

    @property
    def commas(self) -> int:
        """In JSON: commas between ids, spans, their ends, `tokens`, stop ids, and all these lists."""
        return self.lists + 2 * self.tokens + self.spans + STOP_IDS + KEYS


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    """A validated question."""

    question: ScoreQuestion
    texts: list[Rendered]
    tokens_NM: np.ndarray | None = None  # score these ids instead of the tokens in the text

    @property
    def length(self) -> int:
        return sum(text.length for text in self.texts)

    @property
    def count(self) -> int:
        return sum(t1 - t0 for text in self.texts for _, _, t0, t1 in text.spans)


def write_question(question: ScoreQuestion, texts: Sequence[Rendered]) -> bytes:
    from safetensors.numpy import save

    spans = [(number, t0, t1) for number, text in enumerate(texts) for _, _, t0, t1 in text.spans]
    tensors = {
        "ids": np.concatenate([text.ids for text in texts]).astype("<i4"),
        "lengths": np.array([text.length for text in texts], dtype="<i4"),
        "spans": np.array(spans, dtype="<i4").reshape(-1, 3),
    }
    frame: bytes = save(tensors, metadata={"question": question.model_dump_json(exclude_defaults=True)})
    return frame


def read_question(body: bytes, kind: str, limits: RequestLimits, rows: int, size: int, context: int) -> ScoreRequest:
    """Reads and validates a request's body. WireError statuses: 400 unreadable, 413 too large, 422 invalid.

    `rows`: ids that the model can read; `size`: number of real ids if the question does not say. An index out of range would
    crash the GPU for all clients.
    """
    asked = _from_json(body, limits) if kind == "application/json" else _from_frame(body, limits)
    if not asked.texts:
        raise WireError(422, "there is no text to score")
    _at_most(len(asked.texts), limits.sequences, "texts")
    if max(asked.length, asked.count) > limits.tokens:
        raise WireError(
            413, f"{max(asked.length, asked.count)} tokens in one request; at most {limits.tokens} are accepted"
        )
    for number, text in enumerate(asked.texts):
        _check_text(number, text, rows, context)
    question = asked.question
    if question.want == "topk" and question.k is None:
        raise WireError(422, "topk needs `k`, how many ids are wanted")
    if (question.k or 0) > rows or (question.size or 0) > rows:
        raise WireError(422, f"`k` and `size` are at most the vocabulary's {rows} ids")
    counted = question.size or size
    if any(index >= counted for index in question.stop_ids):
        raise WireError(422, f"stop_ids: {max(question.stop_ids)} is outside the vocabulary of {counted} ids")
    if (question.k or 0) * asked.count > ENTRIES:
        raise WireError(
            413, f"{question.k} ids for each of {asked.count} tokens; at most {ENTRIES} fit into one answer"
        )
    _check_tokens(asked, limits, counted)
    return asked


def _at_most(count: int, most: int, what: str) -> None:
    if count > most:
        raise WireError(413, f"{count} {what} in one request; at most {most} are accepted")


def _check_text(number: int, text: Rendered, rows: int, context: int) -> None:
    if not 1 <= text.length <= context:
        raise WireError(422, f"text {number} has {text.length} tokens; the model reads 1 to {context}")
    outside = text.ids[(text.ids < 0) | (text.ids >= rows)]
    if outside.size:
        raise WireError(422, f"text {number}: id {outside[0]} is outside the vocabulary of {rows} ids")
    ends = [0, *(place for _, _, t0, t1 in text.spans for place in (t0, t1)), text.length]
    if any(later < earlier for earlier, later in pairwise(ends)) or (text.spans and text.spans[0][2] < 1):
        raise WireError(
            422,
            f"text {number}: spans are pairs 1 <= start <= end <= {text.length}, in order and apart; got {ends[1:-1][:8]}",
        )


def _check_tokens(asked: ScoreRequest, limits: RequestLimits, size: int) -> None:
    tokens = asked.tokens_NM
    if tokens is None:
        scored = [text.ids[t0:t1] for text in asked.texts for _, _, t0, t1 in text.spans]
        highest = max((int(ids.max(initial=0)) for ids in scored), default=0)
        if asked.question.want == "logprobs" and highest >= size:
            raise WireError(422, f"id {highest} is requested, and lies outside the vocabulary of {size} ids")
        return
    if asked.question.want != "logprobs":
        raise WireError(422, "`tokens` are for want: logprobs")
    if tokens.ndim != 2 or tokens.shape[0] != asked.count or not tokens.shape[1] >= 1:
        raise WireError(422, f"`tokens` has the shape {tokens.shape}; the spans ask about {asked.count} positions")
    if tokens.size > limits.tokens:
        raise WireError(413, f"{tokens.size} tokens to score in one request; at most {limits.tokens} are accepted")
    if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= size:
        raise WireError(422, f"`tokens` holds ids outside the vocabulary of {size} ids")


def _rendered(ids: np.ndarray, spans: Sequence[tuple[int, int]]) -> Rendered:
    return Rendered(ids, tuple((t0, t1, t0, t1) for t0, t1 in spans))


def _from_json(body: bytes, limits: RequestLimits) -> ScoreRequest:
    """Counts lists and commas before parsing: a list takes two bytes in JSON, and a hundred times that in memory."""
    _at_most(body.count(b"["), limits.lists, "lists")
    _at_most(body.count(b","), limits.commas, "commas")
    _at_most(max(body.count(b":"), body.count(b"{")), KEYS, "keys")
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(400, f"the body is not JSON: {plain(error, 200)}") from None
    if isinstance(raw, dict) and isinstance(raw.get("ids"), list):
        _at_most(len(raw["ids"]), limits.sequences, "texts")
    try:
        found = TextQuestion.model_validate(raw)
    except ValidationError as error:
        raise WireError(422, _first_mistake(error)) from None
    spans = found.spans if found.spans is not None else [[(1, max(len(ids), 1))] for ids in found.ids]
    if len(spans) != len(found.ids):
        raise WireError(422, f"{len(found.ids)} texts and spans for {len(spans)}")
    texts = [_rendered(np.array(ids, dtype=np.int32), here) for ids, here in zip(found.ids, spans, strict=True)]
    if found.tokens is not None and len({len(row) for row in found.tokens}) > 1:
        raise WireError(422, "`tokens` has rows of different lengths")
    tokens = None if found.tokens is None else np.array(found.tokens or [[]], dtype=np.int64)
    return ScoreRequest(found, texts, tokens)


def _from_frame(body: bytes, limits: RequestLimits) -> ScoreRequest:
    tensors, metadata = _integers(body)
    try:
        question = ScoreQuestion.model_validate_json(metadata.get("question", ""))
    except ValidationError as error:
        raise WireError(422, f"metadata `question`: {_first_mistake(error)}") from None
    missing = {"ids", "lengths"} - tensors.keys()
    unknown = tensors.keys() - {"ids", "lengths", "spans", "tokens"}
    if missing or unknown:
        raise WireError(
            422, f"a question has the tensors ids, lengths, spans and tokens; this has {plain(sorted(tensors), 200)}"
        )
    ids, lengths = tensors["ids"], tensors["lengths"].astype(np.int64)
    if ids.ndim != 1 or lengths.ndim != 1:
        raise WireError(422, f"ids and lengths have one dimension each, not {ids.ndim} and {lengths.ndim}")
    _at_most(lengths.size, limits.sequences, "texts")
    _at_most(ids.size, limits.tokens, "tokens")
    if ((lengths < 0) | (lengths > ids.size)).any() or lengths.sum() != ids.size:  # bounds avoid overflow
        raise WireError(422, f"lengths are {plain(lengths[:8].tolist())} …, and do not add up to {ids.size} ids")
    if ids.size and not (ids.min() >= 0 and ids.max() <= LARGEST):
        raise WireError(422, f"ids are 0 to {LARGEST}")
    spans = tensors.get("spans")
    if spans is None:
        spans = np.array([(number, 1, max(length, 1)) for number, length in enumerate(lengths)]).reshape(-1, 3)
    if spans.ndim != 2 or spans.shape[1] != 3 or ((spans < 0) | (spans > LARGEST)).any():
        raise WireError(422, "spans are rows of three: text, start, end")
    _at_most(len(spans), limits.spans, "spans")
    if (np.diff(spans[:, 0]) < 0).any() or (spans[:, 0] >= lengths.size).any():
        raise WireError(422, f"spans name texts 0 to {lengths.size - 1}, in order")
    parts = np.split(ids.astype(np.int32), np.cumsum(lengths)[:-1]) if lengths.size else []
    by_text: list[list[tuple[int, int]]] = [[] for _ in parts]
    for number, t0, t1 in spans.tolist():
        by_text[number].append((t0, t1))
    tokens = tensors.get("tokens")
    texts = [_rendered(part, here) for part, here in zip(parts, by_text, strict=True)]
    return ScoreRequest(question, texts, tokens if tokens is None or tokens.ndim != 1 else tokens[:, None])


def _integers(body: bytes) -> tuple[dict[str, np.ndarray], Mapping[str, str]]:
    """The tensors and metadata of a frame. The size of its header is checked before anything is read."""
    from safetensors import SafetensorError, deserialize

    size = int.from_bytes(body[:8], "little")
    if HEADER < size <= len(body) - 8:  # if longer than the body, it is not a frame
        raise WireError(413, f"a header of {size} bytes; at most {HEADER} are accepted")
    try:
        found = deserialize(body)
    except SafetensorError as error:
        raise WireError(400, f"the body is not a complete safetensors frame: {plain(error, 200)}") from None
    header = json.loads(body[8 : 8 + size])
    tensors = {}
    for name, facts in found:
        if facts["dtype"] not in INTEGERS:
            raise WireError(422, f"tensor {plain(name, 60)!r} is of type {facts['dtype']}; questions hold I32 or I64")
        if len(facts["shape"]) > DIMENSIONS or max(facts["shape"], default=0) > LARGEST:
            raise WireError(
                400,
                f"tensor {plain(name, 60)!r} has the shape {plain(facts['shape'], 100)}, which is not valid in a question",
            )
        tensors[name] = np.frombuffer(facts["data"], dtype=INTEGERS[facts["dtype"]]).reshape(facts["shape"])
    return tensors, header.get("__metadata__") or {}


def _first_mistake(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return plain(f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": "), 300)


# Answers


def write_answer(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors must be on the CPU; bfloat16 stays bfloat16."""
    from safetensors.torch import save

    frame: bytes = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return frame


def read_answer(body: bytes) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return dict(load(body))
    except SafetensorError as error:
        raise WireError(502, f"the answer is not a complete safetensors frame: {plain(error, 200)}") from None
