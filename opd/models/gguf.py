"""Convert GGUF files, once. transformers takes half a minute to read one, so the result is cached as a Hugging Face directory.

The cache is `$XDG_CACHE_HOME/opd` (or `~/.cache/opd`), keyed by the file's path, size and modification time. It may be deleted
at any time.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from opd.common.errors import ModelError
from opd.models.files import AGAIN, check_sizes
from opd.models.load import load_complete, some

STRING, ARRAY = 8, 9
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a value, by type number
FORMATS = {4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
ALIGNMENT = 32  # bytes; of the data, unless the metadata give another
DIMENSIONS = 4  # most dimensions of a tensor
CHECKED = (
    "every tensor"  # part of the cache key: caches of earlier versions may have random weights in place of missing ones
)
DEPTH = 4  # most levels of nested arrays


def converted(file: Path) -> Path:
    """A Hugging Face directory with the file's weights in fp32 and its tokenizer."""
    facts = file.stat()
    key = hashlib.sha256(f"{CHECKED} {file.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opd"
    target = root / f"{file.stem}-{key}"
    if not (target / "config.json").is_file():
        check_described(file, check_header(file))
        root.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=root))
        try:
            _convert(file, partial)
            partial.rename(target)
        except OSError:
            if not (target / "config.json").is_file():  # else another process was faster; use its copy
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _convert(file: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = str(file)
    module = load_complete(
        AutoModelForCausalLM, file.parent, name, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
    )
    _forget_quantisation(module)
    module.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    tokenizer.clean_up_tokenization_spaces = False  # decoding would warn that it ignores this setting
    tokenizer.save_pretrained(target)


@dataclass(frozen=True)
class Header:
    """Facts from the metadata and the tensor table. `tensors`: name -> number of elements."""

    tensors: dict[str, int]
    architecture: str


def check_header(file: Path) -> Header:
    """Check the metadata and tensor table first: the gguf reader trusts their counts, and could loop for years."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelError(f"model {str(file)!r} is not a GGUF file: it does not begin with GGUF.")
        found: dict[str, Any] = {}
        with _reading_header(file, stream):
            _, tensors, fields = struct.unpack("<IQQ", stream.read(20))
            if max(tensors, fields) > size:
                raise ValueError
            for _ in range(fields):
                key = _bytes(stream, size).decode("utf-8")
                (kind,) = struct.unpack("<I", stream.read(4))
                found[key if key.startswith("general.") else key.rpartition(".")[2]] = _value(stream, kind, size)
        sizes = {"num_hidden_layers": found.get("block_count"), "num_attention_heads": found.get("head_count"),
                 "max_position_embeddings": found.get("context_length"), "num_experts": found.get("expert_count")}  # fmt: skip
        check_sizes(str(file), {key: value for key, value in sizes.items() if isinstance(value, int)}, tensors)
        with _reading_header(file, stream):
            entries = [_tensor(stream, size) for _ in range(tensors)]
        start = stream.tell()
    architecture = found.get("general.architecture")
    if not isinstance(architecture, str) or not entries:
        what = "general.architecture" if entries else "tensors"
        raise ModelError(f"model {str(file)!r}: this GGUF file has no {what}, so it is not a language model.")
    _check_places(file, entries, start, found.get("general.alignment", ALIGNMENT))
    return Header({entry.name: entry.elements for entry in entries}, architecture)


@contextmanager
def _reading_header(file: Path, stream: BinaryIO) -> Iterator[None]:
    try:
        yield
    except (struct.error, ValueError):
        raise ModelError(f"model {str(file)!r} has a damaged GGUF header at byte {stream.tell()}. {AGAIN}") from None


@dataclass(frozen=True)
class TensorEntry:
    """An entry of the tensor table. `offset` counts from the start of the data."""

    name: str
    elements: int
    kind: int
    offset: int


def _tensor(stream: BinaryIO, size: int) -> TensorEntry:
    name = _bytes(stream, size).decode("utf-8")
    (dimensions,) = struct.unpack("<I", stream.read(4))
    if not 1 <= dimensions <= DIMENSIONS:
        raise ValueError
    shape = struct.unpack(f"<{dimensions}Q", stream.read(8 * dimensions))
    kind, offset = struct.unpack("<IQ", stream.read(12))
    return TensorEntry(name, math.prod(shape), kind, offset)


def _check_places(file: Path, entries: list[TensorEntry], end: int, alignment: Any) -> None:
    """Check that tensors are unique, have a known type and lie inside the file."""
    from gguf.constants import GGML_QUANT_SIZES

    width = alignment if isinstance(alignment, int) and alignment > 0 else ALIGNMENT
    data = -(-end // width) * width
    there, names = file.stat().st_size, set()
    for entry in entries:
        block = GGML_QUANT_SIZES.get(entry.kind)
        if block is None:
            raise ModelError(
                f"model {str(file)!r}: {entry.name} is of type {entry.kind}, which the gguf package does not know."
            )
        if entry.name in names or entry.elements < 1 or entry.elements % block[0]:
            raise ModelError(f"model {str(file)!r} has a damaged table of tensors at {entry.name!r}. {AGAIN}")
        names.add(entry.name)
        last = data + entry.offset + entry.elements // block[0] * block[1]
        if last > there:
            raise ModelError(
                f"model {str(file)!r} is truncated: {entry.name} ends at byte {last:,}, and the file has {there:,}. {AGAIN}"
            )


def check_described(file: Path, header: Header) -> None:
    """Check that the file holds exactly the tensors of the model that its metadata describe.

    Uses the names that transformers reads, and a model on the meta device.
    """
    from transformers import AutoConfig

    from opd.models.load import empty_model

    name = str(file)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    module = empty_model(config)
    asked, stored = sum(parameter.numel() for parameter in module.parameters()), sum(header.tensors.values())
    if asked > 2 * stored:  # smaller gaps are reported below, by tensor name
        raise ModelError(
            f"model {name!r}: its metadata describe {asked:,} parameters, and the file holds {stored:,}. {AGAIN}"
        )
    targets = _targets(module, config, header.architecture)
    if (
        not targets
    ):  # transformers' other reader fills in nothing, so missing tensors are reported when the file is read
        return
    wanted = {key: parameter for key, parameter in module.named_parameters()}
    held: dict[str, int] = {}
    for source, target in targets.items():
        count = header.tensors.get(source) or header.tensors.get(
            f"{source}.weight"
        )  # experts are listed without the suffix
        if count is not None:
            held[target] = held.get(target, 0) + count
    missing = sorted(source for source, target in targets.items() if target in wanted and target not in held)
    if missing:
        raise ModelError(f"model {name!r}: it lacks {some(missing)}, which would be random numbers. {AGAIN}")
    for target, count in held.items():
        if target in wanted and wanted[target].numel() != count:
            raise ModelError(
                f"model {name!r}: it holds {count:,} elements for {target}, and its metadata describe "
                f"{wanted[target].numel():,}. {AGAIN}"
            )
    denied = [key for key in header.tensors if key not in targets and _denied(key, targets, config.num_hidden_layers)]
    if denied:
        raise ModelError(
            f"model {name!r}: it has {some(denied)}, which {type(module).__name__} with its metadata does not have, so it "
            f"would not be the model that was trained. {AGAIN}"
        )


def _targets(module: Any, config: Any, architecture: str) -> dict[str, str]:
    """GGUF name -> parameter that transformers fills from it. Empty if it reads the architecture with its other reader."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    try:
        from transformers.integrations.gguf.utils import is_gguf_arch_supported
    except ImportError:  # older transformers has only one reader
        pass
    else:
        if is_gguf_arch_supported(architecture):
            return {}
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    return dict(get_gguf_hf_weights_map(module, processor))


def _denied(key: str, targets: dict[str, str], layers: int) -> bool:
    """Whether this is a bias of a layer that should have none, or belongs to a layer beyond the config's number."""
    block = re.match(r"blk\.(\d+)\.", key)
    beyond = block is not None and int(block[1]) >= layers and re.sub(r"\d+", "0", key, count=1) in targets
    return beyond or (key.endswith(".bias") and key.removesuffix("bias") + "weight" in targets)


def _bytes(stream: BinaryIO, size: int) -> bytes:
    (length,) = struct.unpack("<Q", stream.read(8))
    if length > size - stream.tell():
        raise ValueError
    return stream.read(length)


def _value(stream: BinaryIO, kind: int, size: int, depth: int = 0) -> int | str | None:
    """Move past one value. Integers and strings are returned."""
    if kind == STRING:
        return _bytes(stream, size).decode("utf-8", "replace")
    if kind == ARRAY and depth < DEPTH:
        inner, count = struct.unpack("<IQ", stream.read(12))
        if count * WIDTHS.get(inner, 1) > size - stream.tell():
            raise ValueError
        if inner in WIDTHS:
            stream.seek(count * WIDTHS[inner], os.SEEK_CUR)
        else:
            for _ in range(count):
                _value(stream, inner, size, depth + 1)
    elif kind in WIDTHS:
        data = stream.read(WIDTHS[kind])
        if len(data) < WIDTHS[kind]:
            raise ValueError
        return int(struct.unpack(FORMATS[kind], data)[0]) if kind in FORMATS else None
    else:
        raise ValueError
    return None


def _forget_quantisation(module: Any) -> None:
    """Mark the model as not quantised. Loading dequantised its weights, but `save_pretrained` fails while the marks remain."""
    module.hf_quantizer = None
    module.is_quantized = False
    for holder in (module, module.config):
        for attribute in ("quantization_method", "quantization_config"):
            if hasattr(holder, attribute):
                delattr(holder, attribute)
