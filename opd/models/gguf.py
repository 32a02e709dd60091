"""GGUF files, converted once. Reading one takes transformers half a minute, so the result is kept as a Hugging Face directory.

The cache is `$XDG_CACHE_HOME/opd` (or `~/.cache/opd`), keyed by the file's path, size and time; delete it at will.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any


def converted(file: Path) -> Path:
    """A Hugging Face directory with the file's weights in fp32 and its tokenizer."""
    facts = file.stat()
    key = hashlib.sha256(f"{file.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opd"
    target = root / f"{file.stem}-{key}"
    if not (target / "config.json").is_file():
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

    module = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    _forget_quantisation(module)
    module.save_pretrained(target)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)


def _forget_quantisation(module: Any) -> None:
    """The weights were dequantised while loading; while the model remembers otherwise, `save_pretrained` refuses."""
    module.hf_quantizer = None
    module.is_quantized = False
    for holder in (module, module.config):
        for attribute in ("quantization_method", "quantization_config"):
            if hasattr(holder, attribute):
                delattr(holder, attribute)
