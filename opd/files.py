"""Files that are there whole or not at all, and small JSON files that cannot change unnoticed.

write_sealed(path, {"step": 8})        # {"step": 8, "sha256": "…"}: temporary name, fsync, rename, fsync of the folder
read_sealed(path)                      # {"step": 8}, or RunDirectoryError where a single bit differs
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opd.errors import RunDirectoryError

SEAL = "sha256"


def cache_directory() -> Path | None:
    """Where things are kept that can be made again: `$XDG_CACHE_HOME/opd`, else `~/.cache/opd`. None: there is no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opd"
    except RuntimeError:
        return None


def sync(path: Path) -> None:
    """Wait until the disk has a file, or a folder's list of names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, text: str) -> None:
    """A reader, now or after a power cut, sees the old text or the new one, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync(path.parent)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sealed(value: Mapping[str, Any]) -> str:
    """JSON text of a mapping with a checksum of the rest inside."""
    digest = hashlib.sha256(json.dumps(dict(value)).encode()).hexdigest()
    return json.dumps({**value, SEAL: digest}, indent=1) + "\n"


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    write_whole(path, sealed(value))


def read_sealed(path: Path) -> dict[str, Any]:
    """What was sealed. Rendering it again has to give the file byte for byte, so even a changed space is found."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise RunDirectoryError(f"{path} is missing.") from None
    try:
        value = json.loads(data)
    except ValueError:  # not UTF-8, or not JSON
        value = None
    if isinstance(value, dict) and SEAL in value:
        del value[SEAL]
        if sealed(value).encode() == data:
            return value
    raise RunDirectoryError(f"{path} was altered or cut: its checksum does not match.")
