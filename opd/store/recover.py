"""A repair that was cut short: the clean log is whole, and only its name is missing.

`repair` writes the clean log beside the damaged one, with `repaired.json` as the last of its files, renames the
damaged one out of the way, and renames the clean one into its place. Killed before, nothing has changed; killed
between the two, either of the names `rollouts` and `rollouts.repaired` holds a whole log, and the next one who opens
it does the last step.
"""

from __future__ import annotations

import os
from pathlib import Path

from opd.errors import StoreError
from opd.store.files import Files

REPAIRED = "repaired.json"  # written by `opd store repair`: the log it came from, and what was lost
DAMAGED = ".damaged"


def repaired_name(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.repaired")


def pending_repair(directory: Path) -> Path | None:
    """The clean log that has yet to get this name."""
    clean = repaired_name(directory)
    return clean if not directory.exists() and (clean / REPAIRED).is_file() else None


def finish_repair(directory: Path) -> None:
    """Do what a repair that was killed left to do. Refuses to begin a new log beside a damaged one."""
    clean = pending_repair(directory)
    if clean is not None:
        os.rename(clean, directory)
        Files().sync_directory(directory.parent)
    damaged = directory.with_name(directory.name + DAMAGED)
    if not directory.exists() and damaged.exists():
        raise StoreError(
            f"{directory}, byte 0: the log is missing, but {damaged.name} is there: a repair has lost its result. "
            f"Rename it to {directory.name}, and repair it again with `opd store repair`."
        )
