"""How samples reach a worker: JSON lines. Nothing is unpickled, and nothing in a text can be anything but text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from opd import plugins
from opd.rewards.reward import FAMILY, RewardKind
from opd.types import Prompt, RewardResult, Sample

SHORT = 1 << 63  # longer integers travel in hexadecimal: decimal digits of one are limited
BYTES = "latin-1"  # code travels as text, a character for each byte: workers run what this process has read
READY = b"ready\n"  # a worker has started, or has loaded what the sample at hand needs


def tagged(value: Any) -> Any:
    """Tuples, sets, bytes and dicts with other keys than text survive, tagged; a number of numpy's becomes Python's."""
    if value is None or type(value) in (bool, int, float, str):
        return value if type(value) is not int or -SHORT <= value < SHORT else {"$int": hex(value)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {str(key): tagged(entry) for key, entry in value.items()}
        return {"$dict": [[tagged(key), tagged(entry)] for key, entry in value.items()]}
    if isinstance(value, list):
        return [tagged(entry) for entry in value]
    if isinstance(value, tuple):
        return {"$tuple": [tagged(entry) for entry in value]}
    return _tagged_rare(value)


def _tagged_rare(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return {"$set": [tagged(entry) for entry in sorted(value, key=repr)]}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    for kind in (str, bool, int, float):  # np.str_, np.float64, enums
        if isinstance(value, kind):
            return tagged(kind(value))
    return tagged(value.tolist()) if hasattr(value, "tolist") else str(value)  # numpy; dates and the like


def untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [untagged(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (tag, inner), *_ = value.items()
        if tag in TAGS:
            return TAGS[tag](inner)
    return {key: untagged(entry) for key, entry in value.items()}


TAGS: dict[str, Callable[[Any], Any]] = {
    "$dict": lambda inner: {untagged(key): untagged(entry) for key, entry in inner},
    "$tuple": lambda inner: tuple(untagged(entry) for entry in inner),
    "$set": lambda inner: {untagged(entry) for entry in inner},
    "$bytes": bytes.fromhex,
    "$int": lambda inner: int(inner, 16),
}


class Request(NamedTuple):
    """A sample on its way to a worker, the reward as the recipe has it, and the seconds it may take."""

    kind: RewardKind
    sandbox: str  # `rewards.sandbox` of the recipe
    sample: Sample
    limit: float

    def chosen(self) -> RewardKind:
        """The reward that the sample gets. ValueError: there is none."""
        found = self.kind.chosen(self.sample.prompt.fields)
        if isinstance(found, str):
            raise ValueError(found)
        return found.within(self.sandbox)


class Reply(NamedTuple):
    """A result on its way back. `lasting`: the same answer would cost as much again, so the failure is remembered."""

    result: RewardResult
    lasting: bool = False
    timed_out: bool = False


def failure(error: str, *, timed_out: bool = False) -> Reply:
    """An answer that brought its reward down."""
    return Reply(RewardResult(None, error=error, by_answer=True), lasting=True, timed_out=timed_out)


def write_request(request: Request) -> bytes:
    """Raises ValueError, TypeError or RecursionError for fields that cannot travel."""
    kind, sandbox, sample, limit = request
    prompt, plugin, code = sample.prompt, plugins.origin(type(kind)), kind.code
    file = plugin is not None and plugin.endswith(".py")
    body = {
        "kind": kind.model_dump(mode="json"),
        "code": None if code is None else code.decode(BYTES),
        "plugin": plugin,
        "plugin_code": plugins.source_of(plugin).decode(BYTES) if file and plugin is not None else None,
        "sandbox": sandbox,
        "limit": limit,
        "prompt": {"id": prompt.id, "domain": prompt.domain, "text": prompt.text, "messages": tagged(prompt.messages)},
        "fields": tagged(prompt.fields),
        "text": sample.text,
    }
    return json.dumps(body).encode() + b"\n"


def read_request(line: bytes) -> Request:
    body = json.loads(line)
    if body["plugin_code"] is not None:
        plugins.load_source(body["plugin"], body["plugin_code"].encode(BYTES))
    elif body["plugin"] is not None:
        plugins.load_plugins([body["plugin"]])
    prompt = Prompt(
        **{**body["prompt"], "messages": untagged(body["prompt"]["messages"])}, fields=untagged(body["fields"])
    )
    kind = FAMILY.read(body["kind"])
    assert isinstance(kind, RewardKind)
    if body["code"] is not None:
        kind.take_code(body["code"].encode(BYTES))
    return Request(kind, body["sandbox"], Sample(prompt, body["text"]), body["limit"])


def content(kind: RewardKind, sample: Sample) -> bytes:
    """What a reward depends on. Only rewards of one's own can see which prompt it is, beyond its fields."""
    prompt = sample.prompt
    facts = [prompt.id, prompt.domain, prompt.text, tagged(prompt.messages)] if kind.sees_prompt else []
    whole = [kind.model_dump(mode="json"), facts, tagged(prompt.fields), sample.text]
    return hashlib.blake2b(json.dumps(whole).encode(), digest_size=16).digest()


def write_reply(reply: Reply) -> bytes:
    result = reply.result
    body = {
        "reward": result.reward,
        "per_turn": result.per_turn[:10_000],
        "feedback": result.feedback[:2000],
        "error": result.error[:500],
        "by_answer": result.by_answer,
        "lasting": reply.lasting,
        "timed_out": reply.timed_out,
    }
    return json.dumps(body, default=str).encode() + b"\n"


def read_reply(line: bytes, bounds: tuple[float, float]) -> Reply | None:
    """None: no result, whatever it is. A process that ran a hostile answer may say anything."""
    low, high = bounds
    try:
        body = json.loads(line)
        reward, turns = body["reward"], tuple(body["per_turn"])
        for value in (reward, *turns):
            if value is not None and not (type(value) in (int, float) and low <= value <= high):
                return None
        whole = RewardResult(
            None if reward is None else float(reward),
            tuple(float(turn) for turn in turns),
            str(body["feedback"])[:2000],
            str(body["error"])[:500],
            by_answer=reward is None and body["by_answer"] is True,
        )
        return Reply(whole, body["lasting"] is True, body["timed_out"] is True)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
