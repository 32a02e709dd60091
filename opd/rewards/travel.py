"""How samples reach a worker: JSON lines. Nothing is unpickled, and nothing in a text can be anything but text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from opd.config import RewardSpec
from opd.types import Judgement, Prompt, Sample

READY = b"ready\n"  # a worker has started, or has loaded what the sample at hand needs


def pack(value: Any) -> Any:
    """Tuples, sets, bytes and dicts with other keys than text survive, tagged; a number of numpy's becomes Python's."""
    if value is None or type(value) in (bool, int, float, str):
        return value
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
            return kind(value)
    return pack(value.tolist()) if hasattr(value, "tolist") else str(value)  # numpy; dates and the like


def unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [unpack(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (tag, inner), *_ = value.items()
        if tag == "$dict":
            return {unpack(key): unpack(entry) for key, entry in inner}
        if tag in ("$tuple", "$set"):
            entries = [unpack(entry) for entry in inner]
            return tuple(entries) if tag == "$tuple" else set(entries)
        if tag == "$bytes":
            return bytes.fromhex(inner)
    return {key: unpack(entry) for key, entry in value.items()}


def request(name: str, spec: RewardSpec, sample: Sample) -> bytes:
    prompt = sample.prompt
    facts = {"id": prompt.id, "domain": prompt.domain, "text": prompt.text, "messages": pack(prompt.messages)}
    body = {"name": name, "spec": spec.model_dump(mode="json"), "prompt": facts, "fields": pack(prompt.fields), "text": sample.text}  # fmt: skip
    return json.dumps(body).encode() + b"\n"


def read_request(line: bytes) -> tuple[str, RewardSpec, Sample]:
    body = json.loads(line)
    prompt = Prompt(**{**body["prompt"], "messages": unpack(body["prompt"]["messages"])}, fields=unpack(body["fields"]))
    return body["name"], RewardSpec.model_validate(body["spec"]), Sample(prompt, body["text"])


def reply(judgement: Judgement) -> bytes:
    body = {"score": judgement.score, "per_turn": judgement.per_turn, "feedback": judgement.feedback[:2000], "error": judgement.error[:500]}  # fmt: skip
    return json.dumps(body).encode() + b"\n"


def read_reply(line: bytes) -> Judgement | None:
    """None: no judgement, whatever it is. A worker that ran a hostile answer may say anything."""
    try:
        body = json.loads(line)
        score = None if body["score"] is None else float(body["score"])
        turns = tuple(float(turn) for turn in body["per_turn"])
        return Judgement(score, turns, str(body["feedback"]), str(body["error"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
