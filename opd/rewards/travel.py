"""How samples reach a worker: JSON lines. Nothing is unpickled, and nothing in a text can be anything but text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from opd.config import RewardSpec
from opd.types import Judgement, Prompt, Sample

RANGE = {"custom": (-1e6, 1e6)}  # of scores, by kind; all others: 0 to 1
SHORT = 1 << 63  # longer integers travel in hexadecimal: decimal digits of one are limited
READY = b"ready\n"  # a worker has started, or has loaded what the sample at hand needs


def pack(value: Any) -> Any:
    """Tuples, sets, bytes and dicts with other keys than text survive, tagged; a number of numpy's becomes Python's."""
    if value is None or type(value) in (bool, int, float, str):
        return value if type(value) is not int or -SHORT <= value < SHORT else {"$int": hex(value)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {str(key): pack(entry) for key, entry in value.items()}
        return {"$dict": [[pack(key), pack(entry)] for key, entry in value.items()]}
    if isinstance(value, list):
        return [pack(entry) for entry in value]
    if isinstance(value, tuple):
        return {"$tuple": [pack(entry) for entry in value]}
    return _pack_rare(value)


def _pack_rare(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return {"$set": [pack(entry) for entry in sorted(value, key=repr)]}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    for kind in (str, bool, int, float):  # np.str_, np.float64, enums
        if isinstance(value, kind):
            return pack(kind(value))
    return pack(value.tolist()) if hasattr(value, "tolist") else str(value)  # numpy; dates and the like


def unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [unpack(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (tag, inner), *_ = value.items()
        if tag in TAGS:
            return TAGS[tag](inner)
    return {key: unpack(entry) for key, entry in value.items()}


TAGS: dict[str, Callable[[Any], Any]] = {
    "$dict": lambda inner: {unpack(key): unpack(entry) for key, entry in inner},
    "$tuple": lambda inner: tuple(unpack(entry) for entry in inner),
    "$set": lambda inner: {unpack(entry) for entry in inner},
    "$bytes": bytes.fromhex,
    "$int": lambda inner: int(inner, 16),
}


class Request(NamedTuple):
    """A sample on its way to a scorer, and the seconds it may take."""

    name: str
    spec: RewardSpec
    sample: Sample
    limit: float


class Reply(NamedTuple):
    """A judgement on its way back. `lasting`: the same answer would cost as much again, so the failure is remembered."""

    judgement: Judgement
    lasting: bool = False
    timed_out: bool = False


def failure(error: str, *, timed_out: bool = False) -> Reply:
    """An answer that brought its scorer down."""
    return Reply(Judgement(None, error=error, by_answer=True), lasting=True, timed_out=timed_out)


def write_request(request: Request) -> bytes:
    """Raises ValueError, TypeError or RecursionError for fields that cannot travel."""
    name, spec, sample, limit = request
    prompt = sample.prompt
    facts = {"id": prompt.id, "domain": prompt.domain, "text": prompt.text, "messages": pack(prompt.messages)}
    body = {"name": name, "spec": spec.model_dump(mode="json"), "limit": limit, "prompt": facts, "fields": pack(prompt.fields)}  # fmt: skip
    return json.dumps({**body, "text": sample.text}).encode() + b"\n"


def read_request(line: bytes) -> Request:
    body = json.loads(line)
    prompt = Prompt(**{**body["prompt"], "messages": unpack(body["prompt"]["messages"])}, fields=unpack(body["fields"]))
    spec = RewardSpec.model_validate(body["spec"])
    return Request(body["name"], spec, Sample(prompt, body["text"]), body["limit"])


def content(request: Request) -> bytes:
    """What a judgement depends on. Only functions of one's own can see which prompt it is, beyond its fields."""
    name, spec, sample, _ = request
    prompt = sample.prompt
    facts = [prompt.id, prompt.domain, prompt.text, pack(prompt.messages)] if name == "custom" else []
    whole = [name, spec.model_dump(mode="json"), facts, pack(prompt.fields), sample.text]
    return hashlib.blake2b(json.dumps(whole).encode(), digest_size=16).digest()


def write_reply(reply: Reply) -> bytes:
    found = reply.judgement
    body = {"score": found.score, "per_turn": found.per_turn[:10_000], "feedback": found.feedback[:2000], "error": found.error[:500],
            "by_answer": found.by_answer, "lasting": reply.lasting, "timed_out": reply.timed_out}  # fmt: skip
    return json.dumps(body, default=str).encode() + b"\n"


def read_reply(line: bytes, name: str) -> Reply | None:
    """None: no judgement, whatever it is. A process that ran a hostile answer may say anything."""
    low, high = RANGE.get(name, (0.0, 1.0))
    try:
        body = json.loads(line)
        score, turns = body["score"], tuple(body["per_turn"])
        for value in (score, *turns):
            if value is not None and not (type(value) in (int, float) and low <= value <= high):
                return None
        whole = Judgement(
            None if score is None else float(score),
            tuple(float(turn) for turn in turns),
            str(body["feedback"])[:2000],
            str(body["error"])[:500],
            by_answer=score is None and body["by_answer"] is True,
        )
        return Reply(whole, body["lasting"] is True, body["timed_out"] is True)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
