"""GGUF files, converted once. Reading one takes transformers half a minute, so the result is kept as a Hugging Face directory.

The cache is `$XDG_CACHE_HOME/opd` (or `~/.cache/opd`), keyed by the file's path, size and time; delete it at will.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

from opd.errors import ModelError
from opd.models.directory import check_sizes

STRING, ARRAY = 8, 9
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a value, by its type's number
FORMATS = {4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
DEPTH = 4  # of arrays in arrays


def converted(file: Path) -> Path:
    """A Hugging Face directory with the file's weights in fp32 and its tokenizer."""
    facts = file.stat()
    key = hashlib.sha256(f"{file.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opd"
    target = root / f"{file.stem}-{key}"
    if not (target / "config.json").is_file():
        check_header(file)
        root.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=root))
        try:
            _convert(file, partial)
            partial.rename(target)
        except OSError:
            if not (target / "config.json").is_file():  # else: another process was faster, and its copy is as good
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _convert(file: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
    )
    _forget_quantisation(module)
    module.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    tokenizer.clean_up_tokenization_spaces = False  # decoding would say that it ignores it
    tokenizer.save_pretrained(target)


def check_header(file: Path) -> None:
    """Walk the metadata once: the reader that follows trusts its counts, and would loop for years over a damaged one."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelError(f"model {str(file)!r} is not a GGUF file: it does not begin with GGUF.")
        try:
            _, tensors, fields = struct.unpack("<IQQ", stream.read(20))
            if max(tensors, fields) > size:
                raise ValueError
            found: dict[str, Any] = {}
            for _ in range(fields):
                key = _bytes(stream, size).decode("utf-8")
                (kind,) = struct.unpack("<I", stream.read(4))
                found[key.rpartition(".")[2]] = _value(stream, kind, size)
        except (struct.error, ValueError):
            raise ModelError(
                f"model {str(file)!r} has a damaged GGUF header at byte {stream.tell()}. Download the file again."
            ) from None
    sizes = {"num_hidden_layers": found.get("block_count"), "num_attention_heads": found.get("head_count"),
             "max_position_embeddings": found.get("context_length"), "num_experts": found.get("expert_count")}  # fmt: skip
    check_sizes(str(file), {key: value for key, value in sizes.items() if value is not None}, tensors)


def _bytes(stream: BinaryIO, size: int) -> bytes:
    (length,) = struct.unpack("<Q", stream.read(8))
    if length > size - stream.tell():
        raise ValueError
    return stream.read(length)


def _value(stream: BinaryIO, kind: int, size: int, depth: int = 0) -> int | None:
    """Move past one value; whole numbers are returned."""
    if kind == STRING:
        _bytes(stream, size)
    elif kind == ARRAY and depth < DEPTH:
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
    """The weights were dequantised while loading; while the model remembers otherwise, `save_pretrained` refuses."""
    module.hf_quantizer = None
    module.is_quantized = False
    for holder in (module, module.config):
        for attribute in ("quantization_method", "quantization_config"):
            if hasattr(holder, attribute):
                delattr(holder, attribute)
