"""Messages between ranks: plain values, arrays and a few records, as bytes without code.

JSON first, then the arrays that it names, back to back. Floats are exact, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from opd.records import RewardResult, Rollout, SampleRequest, Sampling, Signal, TopK

KINDS = (Rollout, Sampling, SampleRequest, Signal, TopK, RewardResult)
RECORDS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in KINDS}
SIZE = 8  # bytes that say how long the JSON is


def write_message(value: Any) -> bytes:
    arrays = bytearray()
    text = json.dumps(_plain(value, arrays)).encode()
    return b"".join((len(text).to_bytes(SIZE, "little"), text, arrays))


def read_message(message: bytes) -> Any:
    end = SIZE + int.from_bytes(message[:SIZE], "little")
    return _decoded(json.loads(message[SIZE:end]), memoryview(message)[end:])


def _plain(value: Any, arrays: bytearray) -> Any:
    """Numbers, texts and lists are JSON; everything else is an object whose only key names its type."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_plain(item, arrays) for item in value]
    name, inside = _encoded(value, arrays)
    return {name: [_plain(item, arrays) for item in inside]}


def _encoded(value: Any, arrays: bytearray) -> tuple[str, Iterable[Any]]:
    if isinstance(value, tuple):
        return "tuple", value
    if isinstance(value, Mapping):
        return "mapping", map(list, value.items())
    if isinstance(value, np.ndarray):
        start = len(arrays)
        arrays += value.tobytes()
        return "array", [value.dtype.str, list(value.shape), start, len(arrays)]
    name = type(value).__name__
    if RECORDS.get(name) is not type(value):
        raise TypeError(f"ranks cannot send each other a {name}")
    return name, [getattr(value, field.name) for field in fields(value)]


def _decoded(value: Any, arrays: memoryview) -> Any:
    if isinstance(value, list):
        return [_decoded(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "tuple":
        return tuple(_decoded(item, arrays) for item in inside)
    if kind == "mapping":
        return {_decoded(key, arrays): _decoded(item, arrays) for key, item in inside}
    if kind == "array":
        dtype, shape, start, end = inside
        return np.frombuffer(bytes(arrays[start:end]), dtype=np.dtype(dtype)).reshape(shape).copy()
    return RECORDS[kind](*(_decoded(item, arrays) for item in inside))
