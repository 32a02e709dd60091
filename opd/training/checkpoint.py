"""Checkpoints: a Hugging Face model directory plus the trainer's state and a manifest, all there or not there at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from opd.errors import RunDirectoryError
from opd.models.language_model import LanguageModel

MANIFEST = "manifest.json"


def save_checkpoint(directory: Path, student: LanguageModel, stop_ids: tuple[int, ...], card: str,
                    tensors: dict[str, Any], state: dict[str, Any]) -> Path:  # fmt: skip
    """Write under a temporary name, sync, then rename: a half-written checkpoint never has its final name."""
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    student.save(partial, stop_ids)
    (partial / "README.md").write_text(card, encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial / "optimiser.safetensors")
    (partial / "trainer.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    manifest = {str(path.relative_to(partial)): sha256(path) for path in files}
    (partial / MANIFEST).write_text(json.dumps({"files": manifest}, indent=1), encoding="utf-8")
    for path in [*files, partial / MANIFEST]:
        _sync(path)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)
    _sync(directory.parent)
    return directory


def verify_checkpoint(directory: Path) -> None:
    """Every file of the manifest is there and unaltered."""
    manifest = directory / MANIFEST
    if not manifest.is_file():
        raise RunDirectoryError(
            f"checkpoint {directory}: no {MANIFEST}, so it was not written by a run or is incomplete."
        )
    for name, expected in json.loads(manifest.read_text(encoding="utf-8"))["files"].items():
        path = directory / name
        if not path.is_file():
            raise RunDirectoryError(f"checkpoint {directory}: {name} is missing.")
        if sha256(path) != expected:
            raise RunDirectoryError(f"checkpoint {directory}: {name} was altered (its sha256 does not match).")


def retain(directory: Path, keep: int, best: Path | None) -> None:
    """Delete all but the newest `keep` step checkpoints; the best one stays."""
    steps = sorted(path for path in directory.glob("step-*") if path.is_dir())
    for path in steps[:-keep]:
        if path != best:
            shutil.rmtree(path)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
