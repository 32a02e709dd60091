"""Check a model's files before building anything from them: impossible sizes, missing shards. After a library has failed on
a damaged file, find which file it was.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opd.common.errors import ModelError, OpdError, Stopped
from opd.common.text import first_line

INDEX = "model.safetensors.index.json"
READ = frozenset({"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", INDEX})
LAYERS = 10_000  # more than any model has, few enough to build
POSITIONS = 1 << 28
BOUNDS = ("limit", "clip", "max", "min")  # keys that contain one of these may be infinite, which means no bound
HEADER = 100 << 20  # bytes; the limit of safetensors itself
WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1,
          "F8_E4M3": 1, "F8_E5M2": 1}  # bytes of an element  # fmt: skip
AGAIN = "Download or copy the model again."


@contextmanager
def reading_model(name: str, what: str, directory: Path | None) -> Iterator[None]:
    """Turn any error that a library raises over a damaged file into one sentence that names the file."""
    try:
        yield
    except (OpdError, MemoryError, Stopped):
        raise
    except Exception as error:  # tokenizers raises bare Exception, and a wrong value in a config can cause any error
        if (
            type(error).__name__ == "OutOfMemoryError"
        ):  # torch's, by name so as not to import torch here; the caller says what to lower
            raise
        raise _explained(name, what, directory, error) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a panic in a library written in Rust
            raise
        raise _explained(name, what, directory, error) from None


def _explained(name: str, what: str, directory: Path | None, error: BaseException) -> ModelError:
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return ModelError(f"model {name!r}: {what} needs more memory than is available ({first_line(error)}).")
    if "trust_remote_code" in str(error):
        return ModelError(
            f"model {name!r}: {what} contains custom Python code, which is never run. Choose another model."
        )
    broken = first_broken(directory) if directory is not None else None
    if broken is not None:
        return ModelError(f"model {name!r}: {broken} {AGAIN}")
    kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
    return ModelError(f"model {name!r}: {what} could not be read: {kind}{first_line(error)}")


def first_broken(directory: Path) -> str | None:
    """A sentence about the first file that is not valid for its file type."""
    try:
        names = sorted(path for path in directory.iterdir() if path.name in READ or path.suffix == ".safetensors")
    except OSError as error:
        return f"{directory} cannot be read: {error.strerror}."
    for path in names:
        try:
            if path.suffix == ".json":
                read_json(path)
            else:
                read_header(path)
        except ModelError as error:
            return str(error)
    return None


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON ({first_line(error)}).") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds a {type(found).__name__}, not a JSON object.")
    return found


def read_header(path: Path) -> dict[str, int]:
    """Tensor name -> number of elements, from the header of a safetensors file; the data is not read."""
    return {name: math.prod(shape) for name, shape in read_shapes(path).items()}


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, from the header of a safetensors file, after checking its sizes against the file's."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size - 8, HEADER):
                raise ModelError(f"{path} is truncated or not a safetensors file: its header says {length} bytes.")
            header = json.loads(file.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            shapes = {name: tuple(int(length) for length in entry["shape"]) for name, entry in tensors.items()}
            end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
            wrong = next((name for name, entry in tensors.items() if not _fills(entry, shapes[name])), None)
    except ModelError:
        raise
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        raise ModelError(f"{path} has a damaged header.") from None
    if end != size - 8 - length:
        raise ModelError(
            f"{path} is truncated: its header describes {end} bytes, but only {size - 8 - length} are there."
        )
    if wrong is not None:
        raise ModelError(f"{path} has a damaged header: the size of {wrong!r} in bytes does not match its shape.")
    return shapes


def _fills(entry: dict[str, Any], shape: tuple[int, ...]) -> bool:
    """Whether a tensor's byte count matches its shape. Types narrower than a byte are left to the reader."""
    begin, end = entry["data_offsets"]
    width = WIDTHS.get(entry["dtype"])
    return bool(
        begin >= 0 and min(shape, default=0) >= 0 and (width is None or end - begin == width * math.prod(shape))
    )


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights. Raises ModelError if one is missing or outside the directory."""
    index, whole = directory / INDEX, directory / "model.safetensors"
    if whole.is_file():  # then transformers reads no other file
        return [whole]
    if not index.is_file():
        found = sorted(directory.glob("*.safetensors"))
        if not found:
            raise ModelError(
                f"{directory} has no .safetensors file. Pickled weights are never opened; save the model with "
                "save_pretrained, or name a directory that has its weights."
            )
        return found
    table = read_json(index).get("weight_map")
    names = sorted(set(table.values()), key=str) if isinstance(table, dict) else []
    if not names:
        raise ModelError(f"{index} has no weight_map. {AGAIN}")
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or "\0" in name:
            raise ModelError(f"{index} names {name!r}, which is not a file of this directory. {AGAIN}")
        if not (directory / name).is_file():
            raise ModelError(f"{index} names {name}, which is missing. {AGAIN}")
    return [directory / name for name in names]


def weights_here(directory: Path) -> bool:
    """Whether all weight files are here. A hub model's are downloaded when it is first read."""
    try:
        return bool(weight_files(directory))
    except ModelError:
        return False


def stored_tensors(directory: Path) -> dict[str, int]:
    """Name -> number of elements of every tensor in the weight files."""
    return {name: math.prod(shape) for name, shape in stored_shapes(directory).items()}


def stored_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in the weight files."""
    try:
        return {name: shape for file in weight_files(directory) for name, shape in read_shapes(file).items()}
    except ModelError as error:
        raise ModelError(f"model {str(directory)!r}: {error}") from None


def check_sizes(name: str, config: dict[str, Any], tensors: int | None = None) -> None:
    """Reject counts that would take hours to build. `tensors`: how many the weight files hold, if they are here."""
    limits = {"layer": LAYERS, "expert": 10 * LAYERS, "head": 10 * LAYERS, "position": POSITIONS}
    for key, value in _numbers(config):
        if math.isnan(value) or (math.isinf(value) and not any(part in key for part in BOUNDS)):
            raise ModelError(f"model {name!r}: its config says {key} {value}, which is not a usable number. {AGAIN}")
        counts = not key.startswith("vocab")  # Gemma's vocab_size_per_layer_input is not a number of layers
        limit = next((limit for part, limit in limits.items() if counts and part in key), None)
        if limit is not None and value > limit:
            raise ModelError(f"model {name!r}: its config says {key} {value}, more than any model has. {AGAIN}")
        if key not in ("num_hidden_layers", "num_layers", "n_layer", "n_layers"):
            continue
        if value < 1:
            raise ModelError(f"model {name!r}: its config says {key} {value}; a model has at least one layer. {AGAIN}")
        if tensors is not None and value > tensors:
            raise ModelError(
                f"model {name!r}: its config says {key} {value}, and its weight files hold {tensors} tensors. {AGAIN}"
            )


def _numbers(config: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """(key, number) at any depth. transformers writes `{"__float__": "Infinity"}` for values that JSON lacks."""
    waiting: list[tuple[str, Any]] = list(config.items())
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict) and value.keys() == {"__float__"}:
            value = {"Infinity": math.inf, "-Infinity": -math.inf}.get(str(value["__float__"]), math.nan)
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(key, item) for item in value]
        elif isinstance(value, int):
            yield key, min(max(value, -1), 1 << 62)
        elif isinstance(value, float):
            yield key, value
