"""Checkpoints: a Hugging Face model directory plus the trainer's state and a manifest, all there or not there at all.

checkpoints/STAGE/step-000100/   model, optimiser.safetensors, trainer.json, manifest.json with the sha256 of every file;
                                 teachers/weights.safetensors, where teachers follow the student
checkpoints/latest               a link to the newest one, replaced in one move
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.errors import RunDirectoryError
from opd.files import fresh_directory, json_text, read_sealed, reading, sha256, sync, write_sealed

if TYPE_CHECKING:  # naming checkpoints needs no torch
    from opd.models.language_model import LanguageModel

NAME = re.compile(r"step-(?:[0-9]{6}|[1-9][0-9]{6,})")
MANIFEST, STATE, TENSORS = "manifest.json", "trainer.json", "optimiser.safetensors"
TEACHERS = "teachers/weights.safetensors"  # of teachers that follow the student


def checkpoint_directory(root: Path, stage: str, step: int) -> Path:
    return root / "checkpoints" / stage / f"step-{step:06d}"


def save_checkpoint(
    directory: Path,
    student: LanguageModel,
    stop_ids: tuple[int, ...],
    card: str,
    tensors: dict[str, Any],
    state: dict[str, Any],
    teachers: dict[str, Any] | None = None,
) -> Path:
    """Write under a temporary name, sync, then rename: a half-written checkpoint never has its final name."""
    from safetensors.torch import save_file

    partial = fresh_directory(directory.with_name(f".{directory.name}.partial"))
    student.save(partial, stop_ids)
    (partial / "README.md").write_text(card, encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial / TENSORS)
    if teachers:  # in a folder of their own: the model's is read by others
        (partial / TEACHERS).parent.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in teachers.items()}, partial / TEACHERS)
    (partial / STATE).write_text(json_text(state), encoding="utf-8")
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    for path in [*files, *(path for path in partial.rglob("*") if path.is_dir())]:
        sync(path)
    write_sealed(partial / MANIFEST, {"files": {str(path.relative_to(partial)): sha256(path) for path in files}})
    if directory.is_dir():  # a step that is done again, because its checkpoint was damaged or a newer one was
        old = directory.with_name(f".{directory.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
    partial.rename(directory)
    sync(directory.parent)
    shutil.rmtree(directory.with_name(f".{directory.name}.old"), ignore_errors=True)
    return directory


def verify_checkpoint(directory: Path) -> None:
    """Every file of the manifest is there and unaltered."""
    if not (directory / MANIFEST).is_file():
        raise RunDirectoryError(
            f"checkpoint {directory}: no {MANIFEST}, so it was not written by a run or is incomplete."
        )
    for name, expected in read_sealed(directory / MANIFEST)["files"].items():
        path = directory / name
        if not path.is_file():
            raise RunDirectoryError(f"checkpoint {directory}: {name} is missing.")
        if sha256(path) != expected:
            raise RunDirectoryError(f"checkpoint {directory}: {name} was altered (its sha256 does not match).")


def read_state(directory: Path) -> dict[str, Any]:
    """The trainer's state of a verified checkpoint."""
    with reading(directory / STATE):
        return json.loads((directory / STATE).read_text(encoding="utf-8"))


def steps_in(directory: Path) -> list[Path]:
    """The checkpoints of a stage, oldest first. Other names beside them are somebody else's."""
    if not directory.is_dir():
        return []
    with reading(directory):
        found = [path for path in directory.iterdir() if NAME.fullmatch(path.name)]
    return sorted((path for path in found if path.is_dir() and not path.is_symlink()), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def retain(directory: Path, keep: int, keep_every: int, best: Path | None) -> None:
    """Delete all but the newest `keep` step checkpoints; the best one and every `keep_every`-th step stay.

    Only what has our manifest is ours to delete.
    """
    ours = [path for path in steps_in(directory) if (path / MANIFEST).is_file()]
    for path in ours[:-keep]:
        if path != best and not (keep_every and step_of(path) % keep_every == 0):
            gone = path.with_name(f".{path.name}.old")
            path.rename(gone)  # first out of sight: half a directory never looks like a checkpoint
            shutil.rmtree(gone)


def point_latest(checkpoint: Path) -> None:
    """`checkpoints/latest` names this one from now on."""
    link = checkpoint.parent.parent / "latest"
    partial = link.with_name(".latest.partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(checkpoint.relative_to(link.parent), target_is_directory=True)
    os.replace(partial, link)
    sync(link.parent)


class Saver:
    """Writes one checkpoint at a time, in a thread where asked. An error in it comes up at the next call."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.seconds: float | None = None  # that the newest save took

    def save(self, write: Callable[[], None], *, background: bool) -> None:
        self.wait()

        def work() -> None:
            start = time.monotonic()
            try:
                write()
            except BaseException as error:  # raised again by `check`, in the trainer's thread
                self._error = error
            self.seconds = time.monotonic() - start

        if background:
            self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            work()
            self.check()

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise what a save that is over has run into."""
        if not self.busy and self._error is not None:
            error, self._error = self._error, None
            raise error

    def settle(self) -> None:
        """Let a save end when the run has failed already: its own error would hide the first."""
        if self._thread is not None:
            self._thread.join()

    def wait(self, timeout: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)
        self.check()
