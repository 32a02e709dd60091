"""A served teacher at work: asks in batches, waits for a server that is away, and refuses one that came back as another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from opd.divergences import Projection
from opd.errors import RemoteError, TokenizerMismatch
from opd.files import write_whole
from opd.models.tokenizers import Elsewhere, fingerprint
from opd.teachers.probe import Probe
from opd.teachers.scoring import Page, ScoringTeacher
from opd.teachers.wire import (
    FRAME,
    INSTANCE_HEADER,
    WEIGHTS_HEADER,
    ScoreQuestion,
    WireError,
    read_answer,
    write_question,
)
from opd.types import Rendered, SignalNeed, TopK

if TYPE_CHECKING:
    from opd.teachers.kinds import Supplies
    from opd.teachers.served import ServedTeacher

ROUNDING = 0.05  # nats that a probe may differ by where requests of several clients share a forward pass
HEADS = "heads"  # directory of heads by their hash


class ServedScorer(ScoringTeacher):
    """`hidden` comes from the server; what it means as a distribution is worked out here, with the server's head."""

    def __init__(self, name: str, kind: ServedTeacher, supplies: Supplies) -> None:
        self._kind, self._remote, self._student = kind, kind.connect(supplies.around), supplies.student
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
        self._weight, self._bias = self._head(supplies.around.directory)
        self._known, self._seen = {facts.instance}, set[str]()  # processes that serve it, and those that have answered
        self._checking = True  # what is asked now is not checked itself
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
        facts = self._facts
        whole = Projection(hidden.to(self._weight.dtype), self._weight, self._bias, facts.scale, facts.softcap)
        return self.tempered(replace(whole, size=self._student.size))

    def _answers(self, asked: Sequence[tuple[list[Rendered], list[str]]], need: SignalNeed) -> Iterable[list[Any]]:
        """Several requests at once. If the server was another process for any of them, the probe decides whether they count."""
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
                self._known |= self._seen  # of one that is away again: its weights are what their hash says
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

    # Whether it still is the teacher that was opened

    def _require_weights(self, weights: str) -> None:
        if weights != self._facts.weights:
            raise RemoteError(
                f"teacher {self.name!r}: {self._kind.title} had the weights {self._facts.weights[:12]} when the run opened it, and "
                f"serves {weights[:12]} now. Nothing was trained on them. Serve the former ones and resume, or start a new run."
            )

    def _is_the_same(self) -> None:
        """Of another process: the same facts, and the same answers to the probe."""
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
        """From the run's directory if it is there, and from the server if not; it is what its hash says, or refused."""
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
