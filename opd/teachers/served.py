"""A teacher on `opd serve`. Hidden states come over HTTP and the head once, so divergences stay exact. No torch here."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opd.common.context import RunContext
from opd.common.errors import RemoteError, RunDirectoryError, ServerAway, TokenizerMismatch
from opd.common.files import write_whole
from opd.common.http import Addresses, OneServer, Remote, Variable
from opd.common.text import plain
from opd.models.tokenizers import Elsewhere, fingerprint
from opd.records import Rendered, SignalNeed, TeacherLike, TopK
from opd.registry import Positive, Word
from opd.teachers.kinds import RemoteFacts, TeacherInputs, TeacherKind
from opd.teachers.pool import Probe
from opd.teachers.scoring import Page, ScoringTeacher
from opd.teachers.wire import (
    FRAME,
    INSTANCE_HEADER,
    PROTOCOL,
    WEIGHTS_HEADER,
    ScoreQuestion,
    WireError,
    read_answer,
    write_question,
)

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
    stands_still = True
    offers = frozenset({"logprobs_at", "hidden", "topk"})

    address: Addresses = Field(
        description="where `opd serve` listens: http://HOST:PORT; or several that serve the same"
    )
    model: Word = Field(description="what it is called there")
    token_env: Variable | None = Field(
        "OPD_TOKEN", description="the environment variable that holds the server's token"
    )
    batch_tokens: Positive = Field(8192, description="tokens in one request")
    temperature: float = Field(1.0, ge=0.01, le=100, description="of the teacher's distribution alone")
    concurrency: int = Field(4, ge=1, le=256, description="requests at once")
    timeout: float = Field(300.0, gt=0, le=86_400, description="seconds for one answer")
    patience: float = Field(3600.0, ge=0, le=31_536_000, description="seconds that the server may be away")
    exact: bool | None = Field(
        None,
        description="every request a forward pass of its own, for the same bits; default: where it computes on a CPU",
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

    def vocabulary(self, context: RunContext) -> Elsewhere | None:
        from opd.models.tokenizers import Elsewhere

        facts = self.facts(self.connect(context))
        return Elsewhere(self.title, facts.stop_ids, facts.rows)

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
        self.elsewhere = Elsewhere(kind.title, facts.stop_ids, facts.rows)
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
        return self.tempered(replace(whole, size=self._student.size))

    def _answers(self, asked: Sequence[tuple[list[Rendered], list[str]]], need: SignalNeed) -> Iterable[list[Any]]:
        """Sends requests in parallel. If a new server process answered any of them, the probe decides whether they count."""
        most = self._facts.limits.sequences
        long = [texts for texts, _ in asked if len(texts) > most]
        if long:
            raise RemoteError(
                f"{self._remote.address} takes {most} texts in one request, and {len(long[0])} are to be scored together. Lower "
                f"teachers.{self.name}.batch_tokens, or start it with --max-sequences {len(long[0])}."
            )
        calls = [partial(self._values, texts, need, ids) for texts, ids in asked]
        if self._checking:
            return self._remote.map(calls)
        self._checking = True
        try:
            self._remote.take_back(self._is_the_same)
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
                raise self._strange(f"{tensor.shape[0]} rows of {name} for {sum(counts)} tokens")
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
            raise self._strange(str(error)) from None
        expected = {"hidden": {"hidden"}, "logprobs": {"logprobs"}, "topk": {"ids", "logprobs", "tail", "stop"}}
        if tensors.keys() != expected[question.want]:
            raise self._strange(f"the tensors {sorted(tensors)} for {question.want}")
        if question.want == "hidden" and tensors["hidden"].shape[1:] != (self._facts.width,):
            raise self._strange(f"hidden states of shape {tuple(tensors['hidden'].shape)}, width {self._facts.width}")
        return tensors

    def _strange(self, found: str) -> RemoteError:
        return RemoteError(
            f"{self._remote.address}: model {self._kind.model!r} answered with {found}. Is it `opd serve`?"
        )

    # Checking that it is still the same teacher

    def _require_weights(self, weights: str) -> None:
        if weights != self._facts.weights:
            raise RemoteError(
                f"teacher {self.name!r}: {self._kind.title} had the weights {self._facts.weights[:12]} when the run opened it, and "
                f"serves {weights[:12]} now. Nothing was trained on them. Serve the former ones and resume, or start a new run."
            )

    def _is_the_same(self) -> None:
        """Raises unless a new process has the same facts and gives the same answers to the probe."""
        facts = self._kind.facts(self._remote)
        self._require_weights(facts.weights)
        told = {"instance", "limits"}
        if facts.model_dump(exclude=told) != self._facts.model_dump(exclude=told):
            raise RemoteError(
                f"teacher {self.name!r}: {self._kind.title} was started again with another dtype, device or head. Start it as it was, "
                "and resume the run."
            )
        self._known.add(facts.instance)
        self._probe.check(self)

    def restore(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        if version != self.version:
            raise RemoteError(
                f"teacher {self.name!r}: the checkpoint was trained with other weights of {self._kind.title} (version {version}) than "
                f"it serves now ({self.version}). Serve the former ones and resume, or start a new run."
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
                raise self._strange("a head that is not what its hash says")
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(file, frame)  # several ranks may write the same
        tensors = read_answer(frame)
        weight, bias = tensors["weight"].to(self.device), tensors.get("bias")
        if weight.shape[1] != self._facts.width or weight.shape[0] < self._facts.rows:
            raise self._strange(f"a head of shape {tuple(weight.shape)}")
        return weight, None if bias is None else bias.to(self.device)


# --- Checking that a server has not changed: at the first request, after every batch, and on resume ---


PROBE = "probe"
STARTED = re.compile(rb"^process_start_time_seconds (\S+)$", re.MULTILINE)  # among Prometheus metrics
ROUNDS = 3  # a server may be another process in each of this many rounds
T = TypeVar("T")


class Constancy:
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

        Requests answered by a server that is away at the check go to the others again. Requests answered during a restart are
        repeated, since another model may have answered.
        """
        probe, self._probe = self._probe, None  # the probe's own requests are not checked
        if probe is None:
            return self._remote.map(calls)
        look, found, missing, rounds = partial(self._look, probe), dict[int, T](), list(range(len(calls))), 0
        try:
            self._remote.take_back(look)
            while missing:
                self._changed.clear()
                answers = self._remote.map([partial(self._signed, calls[number]) for number in missing])
                away, rounds = self._remote.check_used(look), rounds + 1
                doubted = {*away, *(self._changed if rounds <= ROUNDS else self._give_up_telling())}
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
        place = self._remote.looked_at
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

    def _give_up_telling(self) -> list[OneServer | None]:
        """Stops watching restarts of addresses with several processes, where they cannot be detected."""
        for place in self._changed:
            self._processes[place] = None
            where = self._remote.address if place is None else place.address
            self._remote.say(
                f"{where} is another process whenever it is looked at; that one is restarted goes unnoticed"
            )
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
                f"teacher {teacher.name!r}: the run began with version {version} of what is read here of it, and this is "
                f"{teacher.version}. Restore its files, or start a new run."
            )
        then = np.asarray(tensors[PROBE])
        gap = float(np.abs(now - then).max()) if then.shape == now.shape else np.inf
        if not gap <= self._tolerance:
            raise RunDirectoryError(
                f"teacher {teacher.name!r}: {self._remote.address} serves another model than the run began with: log-probs of a fixed "
                f"probe differ by {gap:.3g} nats (tolerance {self._tolerance:g}). Serve the same one, or start a new run."
            )
