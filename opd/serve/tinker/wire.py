"""The protobuf messages of the Tinker API, without the protobuf package: a few field types, read within limits.

    read_protobuf("ForwardBackwardRequest", body, most=1000)     # {"model_id": "…", "seq_id": 1, "data": [{…}, …], …}
    loss_rows(message, limits)                                  # the same as arrays

A message is a dictionary of the fields that were sent; unknown fields are skipped, as protobuf does.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from opd.common.text import plain
from opd.teachers.served import RequestLimits, WireError

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
FLOAT32, INT64 = 1, 2
DEPTH = 8  # of messages in messages; a request has five
MOST_CELLS = 1 << 24  # numbers of one tensor, and of all sparse tensors of a request together


class FieldType(NamedTuple):
    """`kind`: string, bytes, int, bool, double, or the name of a message."""

    name: str
    kind: str
    repeated: bool = False


# The requests that arrive as protobuf. Maps are repeated messages of a key and a value.
MESSAGES: dict[str, dict[int, FieldType]] = {
    "ForwardBackwardRequest": {
        1: FieldType("model_id", "string"),
        2: FieldType("seq_id", "int"),
        3: FieldType("data", "Datum", True),
        4: FieldType("loss_fn", "string"),
        5: FieldType("loss_fn_config", "NumberEntry", True),
        6: FieldType("forward_only", "bool"),
        7: FieldType("loss_fn_config_v2", "ConfigEntry", True),
    },
    "NumberEntry": {1: FieldType("key", "string"), 2: FieldType("value", "double")},
    "ConfigEntry": {1: FieldType("key", "string"), 2: FieldType("value", "ConfigValue")},
    "ConfigValue": {1: FieldType("number", "double"), 2: FieldType("text", "string")},
    "Datum": {1: FieldType("model_input", "Chunk", True), 2: FieldType("loss_fn_inputs", "InputEntry", True)},
    "InputEntry": {1: FieldType("key", "string"), 2: FieldType("value", "Tensor")},
    "Chunk": {
        1: FieldType("encoded_text", "EncodedText"),
        2: FieldType("image", "bytes"),
        3: FieldType("dmel", "bytes"),
    },
    "EncodedText": {1: FieldType("tokens", "bytes")},
    "Tensor": {
        1: FieldType("dense", "bytes"),
        2: FieldType("sparse_csr", "SparseCsr"),
        3: FieldType("dtype", "int"),
        4: FieldType("shape", "int", True),
    },
    "SparseCsr": {
        1: FieldType("values", "bytes"),
        2: FieldType("crow_indices", "bytes"),
        3: FieldType("col_indices", "bytes"),
    },
}
WIRES = {"string": LENGTH, "bytes": LENGTH, "int": VARINT, "bool": VARINT, "double": FIXED64}


def malformed(why: str) -> WireError:
    return WireError(400, f"the body is not the protobuf message that this address takes: {why}")


class MessageReader:
    """Reads one body. `most`: fields that all its messages may have together."""

    def __init__(self, body: bytes, most: int) -> None:
        self._body, self._left = memoryview(body), most

    def message(self, name: str, start: int, end: int, depth: int = 0) -> dict[str, Any]:
        if depth > DEPTH:
            raise malformed(f"messages inside messages more than {DEPTH} deep")
        fields, found, at = MESSAGES[name], dict[str, Any](), start
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise WireError(413, "the body has too many fields; send fewer data in one request")
            key, at = self._varint(at, end)
            wire, first = key & 7, at
            at = self._end_of(wire, at, end)
            field = fields.get(key >> 3)
            if field is None:
                continue
            if field.repeated:
                found.setdefault(field.name, []).extend(self._several(field, wire, first, at, depth))
            else:
                found[field.name] = self._value(field, wire, first, at, depth)
        return found

    def _several(self, field: FieldType, wire: int, first: int, end: int, depth: int) -> Iterable[Any]:
        if field.kind != "int" or wire != LENGTH:
            yield self._value(field, wire, first, end, depth)
            return
        _, at = self._varint(first, end)  # numbers are packed
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise WireError(413, "the body has too many numbers in a shape")
            value, at = self._varint(at, end)
            yield _signed(value)

    def _value(self, field: FieldType, wire: int, first: int, end: int, depth: int) -> Any:
        if wire != WIRES.get(field.kind, LENGTH):
            raise malformed(f"{field.name} has wire type {wire}")
        if wire == VARINT:
            value, _ = self._varint(first, end)
            return bool(value) if field.kind == "bool" else _signed(value)
        if wire == FIXED64:
            return struct.unpack("<d", self._body[first:end])[0]
        _, content = self._varint(first, end)
        if field.kind == "bytes":
            return bytes(self._body[content:end])
        if field.kind == "string":
            try:
                return bytes(self._body[content:end]).decode()
            except UnicodeDecodeError:
                raise malformed(f"{field.name} is not UTF-8") from None
        return self.message(field.kind, content, end, depth + 1)

    def _end_of(self, wire: int, at: int, end: int) -> int:
        if wire == VARINT:
            return self._varint(at, end)[1]
        if wire in (FIXED64, FIXED32):
            stop = at + (8 if wire == FIXED64 else 4)
        elif wire == LENGTH:
            size, content = self._varint(at, end)
            stop = content + size
        else:
            raise malformed(f"wire type {wire}")
        if stop > end:
            raise malformed("it ends early")
        return stop

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = 0
        for shift in range(0, 70, 7):
            if at >= end:
                raise malformed("it ends early")
            byte = self._body[at]
            value, at = value | (byte & 0x7F) << shift, at + 1
            if byte < 0x80:
                return value & (1 << 64) - 1, at
        raise malformed("a number of more than ten bytes")


def read_protobuf(name: str, body: bytes, most: int = 1 << 18) -> dict[str, Any]:
    return MessageReader(body, most).message(name, 0, len(body))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


# --- Writing ---


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def message_field(number: int, value: bytes | str | int | float) -> bytes:
    """One field: bytes of any kind, text, an integer or a double."""
    if isinstance(value, float):
        return varint(number << 3 | FIXED64) + struct.pack("<d", value)
    if isinstance(value, int):
        return varint(number << 3 | VARINT) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | LENGTH) + varint(len(content)) + content


def tensor_message(array: np.ndarray) -> bytes:
    dtype = INT64 if array.dtype.kind == "i" else FLOAT32
    parts = [message_field(1, array.astype(DTYPES[dtype]).tobytes()), message_field(3, dtype)]
    return b"".join(parts) + message_field(4, b"".join(map(varint, array.shape)))


def loss_message(outputs: Sequence[Mapping[str, np.ndarray]], metrics: Mapping[str, float]) -> bytes:
    """A ForwardBackwardOutput. Outputs of one width per field make one record; others one each."""
    widths = {tuple((name, array.shape[1:]) for name, array in sorted(each.items())) for each in outputs}
    groups = [outputs] if len(widths) == 1 else [[each] for each in outputs]
    parts = [message_field(1, "ArrayRecord"), *(message_field(2, _record(group)) for group in groups)]
    entries = (message_field(1, name) + message_field(2, float(value)) for name, value in metrics.items())
    return b"".join([*parts, *(message_field(3, entry) for entry in entries)])


def _record(outputs: Sequence[Mapping[str, np.ndarray]]) -> bytes:
    parts = [message_field(1, "ArrayRecord"), message_field(3, len(outputs))]
    for name in outputs[0]:
        arrays = [each[name].astype("<f4") for each in outputs]
        offsets = np.cumsum([0] + [array.nbytes for array in arrays]).astype("<i8")
        batched = b"".join(
            (
                message_field(1, b"".join(array.tobytes() for array in arrays)),
                message_field(2, offsets.tobytes()),
                message_field(3, FLOAT32),
                message_field(4, b"".join(map(varint, arrays[0].shape[1:]))) if arrays[0].ndim > 1 else b"",
            )
        )
        parts.append(message_field(2, message_field(1, name) + message_field(2, batched)))
    return b"".join(parts)


@dataclass(frozen=True, eq=False)
class SampledSequence:
    """`top`: ids and log-probs (T, K) of the likeliest tokens at each place, or None."""

    ids: np.ndarray
    logprobs: np.ndarray
    stopped: bool
    top: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(frozen=True, eq=False)
class SampleAnswer:
    """`prompt_logprobs` (P,): NaN where none was computed. `targets`: as the request's tensor."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: np.ndarray | None = None
    top: tuple[np.ndarray, np.ndarray] | None = None
    targets: np.ndarray | None = None

    def message(self) -> bytes:
        parts = [message_field(1, _sequence(each)) for each in self.sequences]
        if self.prompt_logprobs is not None:
            parts.append(message_field(2, self.prompt_logprobs.astype("<f4").tobytes()))
        if self.top is not None:
            parts.append(message_field(3, _top(*self.top)))
        if self.targets is not None:
            parts.append(message_field(5, tensor_message(self.targets)))
        return b"".join(parts)


def _sequence(each: SampledSequence) -> bytes:
    reason = 0 if each.stopped else 1
    parts = [message_field(1, reason), message_field(2, each.ids.astype("<i4").tobytes())]
    parts.append(message_field(3, each.logprobs.astype("<f4").tobytes()))
    return b"".join(parts) + (b"" if each.top is None else message_field(4, _top(*each.top)))


def _top(ids: np.ndarray, logprobs: np.ndarray) -> bytes:
    length, k = ids.shape
    arrays = message_field(1, ids.astype("<i4").tobytes()) + message_field(2, logprobs.astype("<f4").tobytes())
    return arrays + message_field(3, k) + message_field(4, length)


# --- Data of a request as arrays ---


@dataclass(frozen=True, eq=False)
class LossRow:
    """One datum: T input ids, and loss inputs by name, (T,) or (T, K). Position t predicts `target_tokens[t]`."""

    ids: np.ndarray
    inputs: Mapping[str, np.ndarray]

    @property
    def length(self) -> int:
        return int(self.ids.size)

    @property
    def widths(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Of its inputs. Data of the same widths can be computed together."""
        return tuple((name, array.shape[1:]) for name, array in sorted(self.inputs.items()))


def loss_rows(message: Mapping[str, Any], limits: RequestLimits) -> list[LossRow]:
    data = message.get("data", ())
    if len(data) > limits.sequences:
        raise WireError(413, f"{len(data)} data in one request; at most {limits.sequences} are accepted")
    cells = sum(map(_sparse_cells, data))
    if cells > MOST_CELLS:
        raise WireError(413, f"sparse tensors of {cells} numbers in one request; at most {MOST_CELLS} are accepted")
    rows = [_row(number, datum) for number, datum in enumerate(data)]
    total = sum(row.length for row in rows)
    if total > limits.tokens:
        raise WireError(413, f"{total} tokens in one request; at most {limits.tokens} are accepted")
    return rows


def _sparse_cells(datum: Mapping[str, Any]) -> int:
    """Numbers that the sparse tensors of a datum stand for. They take far fewer bytes to send."""
    tensors = (entry.get("value", {}) for entry in datum.get("loss_fn_inputs", ()))
    shapes = [tensor.get("shape", ()) for tensor in tensors if "sparse_csr" in tensor]
    return sum(math.prod(map(abs, shape)) for shape in shapes if len(shape) == 2)


def _row(number: int, datum: Mapping[str, Any]) -> LossRow:
    chunks = [_tokens(number, chunk) for chunk in datum.get("model_input", ())]
    ids = np.concatenate(chunks) if chunks else np.zeros(0, dtype=np.int64)
    inputs = {
        str(entry.get("key", "")): _array(
            f"datum {number}: {plain(entry.get('key', ''), 60)}", entry.get("value", {}), ids.size
        )
        for entry in datum.get("loss_fn_inputs", ())
    }
    return LossRow(ids, inputs)


def _tokens(number: int, chunk: Mapping[str, Any]) -> np.ndarray:
    if "encoded_text" not in chunk:
        raise WireError(400, f"datum {number}: only chunks of tokens are served; images and sound are not")
    raw = chunk["encoded_text"].get("tokens", b"")
    return _numbers(f"datum {number}: its tokens", raw, DTYPES[3]).astype(np.int64)


def _numbers(what: str, raw: bytes, dtype: np.dtype[Any]) -> np.ndarray:
    if len(raw) % dtype.itemsize:
        raise WireError(400, f"{what}: {len(raw)} bytes are not whole numbers of {dtype.itemsize} bytes")
    return np.frombuffer(raw, dtype=dtype)


def _array(what: str, tensor: Mapping[str, Any], length: int) -> np.ndarray:
    dtype = DTYPES.get(tensor.get("dtype", 0))
    if dtype is None:
        raise WireError(400, f"{what}: dtype {tensor.get('dtype', 0)} is not served; send float32 or int64")
    sparse, shape = tensor.get("sparse_csr"), tuple(tensor.get("shape", ()))
    if any(size < 0 for size in shape) or len(shape) > 2 or math.prod(shape) > MOST_CELLS:
        raise WireError(400, f"{what}: the shape {list(shape[:4])} is not served; send (T,) or (T, K)")
    values = _numbers(what, tensor.get("dense", b"") if sparse is None else sparse.get("values", b""), dtype)
    if sparse is None:
        shape = shape or (values.size,)
        if math.prod(shape) != values.size:
            raise WireError(400, f"{what}: {values.size} numbers do not fill the shape {list(shape)}")
        return values.reshape(shape)
    if shape[:1] != (length,):
        raise WireError(400, f"{what} has shape {list(shape)}; there are {length} tokens")
    return _dense(what, values, sparse, shape)


def _dense(what: str, values: np.ndarray, sparse: Mapping[str, bytes], shape: tuple[int, ...]) -> np.ndarray:
    """A sparse tensor with 0 wherever nothing is listed: a target with weight 0."""
    rows = _numbers(what, sparse.get("crow_indices", b""), DTYPES[2])
    columns = _numbers(what, sparse.get("col_indices", b""), DTYPES[2])
    whole = len(shape) == 2 and rows.size == shape[0] + 1 and columns.size == values.size
    if not (whole and rows[0] == 0 and rows[-1] == values.size and (np.diff(rows) >= 0).all()):
        raise WireError(400, f"{what}: the rows of the sparse tensor do not fit its shape {list(shape)}")
    if columns.size and (columns.min() < 0 or columns.max() >= shape[1]):
        raise WireError(400, f"{what}: a column of the sparse tensor is outside its shape {list(shape)}")
    array = np.zeros(shape, dtype=values.dtype)
    array[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return array


def loss_config(message: Mapping[str, Any]) -> dict[str, float | str]:
    """Settings of the loss: numbers and texts. The SDK sends numbers twice; the newer field wins."""
    found: dict[str, float | str] = {
        entry.get("key", ""): entry.get("value", 0.0) for entry in message.get("loss_fn_config", ())
    }
    for entry in message.get("loss_fn_config_v2", ()):
        value = entry.get("value", {})
        found[entry.get("key", "")] = value["text"] if "text" in value else value.get("number", 0.0)
    return found
