"""Messages between `opd serve` and a served teacher: questions and answers as safetensors frames, questions also as JSON.

    POST /models/NAME/score     ids of some texts, and which of their tokens are asked about
    -> hidden (N, D)  |  logprobs (N,) or (N, M)  |  ids, logprobs (N, K), tail, stop (N,)

A frame is the bytes of a safetensors file: an 8-byte length, a JSON header with names, types, shapes and offsets, and the data.
Reading a frame runs no code. docs/serving.md describes the protocol for other clients.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opd.common.errors import UserError
from opd.common.text import plain
from opd.records import Rendered

if TYPE_CHECKING:
    from torch import Tensor


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
            413, f"{max(asked.length, asked.count)} tokens in one request; at most {limits.tokens} are taken"
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
        raise WireError(413, f"{question.k} ids for each of {asked.count} tokens; at most {ENTRIES} come in one answer")
    _check_tokens(asked, limits, counted)
    return asked


def _at_most(count: int, most: int, what: str) -> None:
    if count > most:
        raise WireError(413, f"{count} {what} in one request; at most {most} are taken")


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
            raise WireError(422, f"id {highest} is asked about, and outside the vocabulary of {size} ids")
        return
    if asked.question.want != "logprobs":
        raise WireError(422, "`tokens` are for want: logprobs")
    if tokens.ndim != 2 or tokens.shape[0] != asked.count or not tokens.shape[1] >= 1:
        raise WireError(422, f"`tokens` has the shape {tokens.shape}; the spans ask about {asked.count} positions")
    if tokens.size > limits.tokens:
        raise WireError(413, f"{tokens.size} tokens to score in one request; at most {limits.tokens} are taken")
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
        raise WireError(400, f"the body is no JSON: {plain(error, 200)}") from None
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
        raise WireError(413, f"a header of {size} bytes; at most {HEADER} are taken")
    try:
        found = deserialize(body)
    except SafetensorError as error:
        raise WireError(400, f"the body is no whole safetensors frame: {plain(error, 200)}") from None
    header = json.loads(body[8 : 8 + size])
    tensors = {}
    for name, facts in found:
        if facts["dtype"] not in INTEGERS:
            raise WireError(422, f"tensor {plain(name, 60)!r} is of type {facts['dtype']}; questions hold I32 or I64")
        if len(facts["shape"]) > DIMENSIONS or max(facts["shape"], default=0) > LARGEST:
            raise WireError(
                400, f"tensor {plain(name, 60)!r} has the shape {plain(facts['shape'], 100)}, which no question has"
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
        raise WireError(502, f"the answer is no whole safetensors frame: {plain(error, 200)}") from None
