"""Saved states on disk, under one folder per owner (a token's hash), training client and name.

    DIR/OWNER/RUN/weights/NAME/          tensors.safetensors: weights and optimiser; manifest.json
    DIR/OWNER/RUN/sampler_weights/NAME/  weights alone

`tinker://RUN/weights/NAME` names one; nobody but its owner can. A checkpoint appears whole or not at all, and its manifest holds a
checksum of the tensors. What is saved without a name belongs to a session and lies under DIR/.live; the journal names it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from opd.common.errors import RunDirectoryError, UserError
from opd.common.files import read_sealed, sha256, sync, write_sealed
from opd.common.text import plain
from opd.teachers.served import WireError

FORMAT = 1
TENSORS, MANIFEST = "tensors.safetensors", "manifest.json"
LIVE = ".live"
OR_OVERWRITE = {"weights": " or overwrite it", "sampler_weights": ""}
Kind = Literal["weights", "sampler_weights"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
PATH = re.compile(
    r"tinker://([A-Za-z0-9][A-Za-z0-9._:-]{0,199})/(weights|sampler_weights)/([A-Za-z0-9][A-Za-z0-9._-]{0,199})"
)


@dataclass(frozen=True)
class SavedClient:
    """What has to be known to make a client again. `rank` 0: all weights are trained."""

    base: str
    base_hash: str
    rank: int
    attention: bool
    mlp: bool
    updates: int
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class SavedState:
    """A saved state. `expires`: seconds since 1970, or None. `request`: the number of the request that saved it."""

    run: str
    kind: Kind
    name: str
    directory: Path
    client: SavedClient
    made: float
    expires: float | None
    bytes: int
    digest: str
    user_metadata: Mapping[str, str]
    request: int | None = None

    @property
    def path(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    def tensors(self) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        file = self.directory / TENSORS
        if not (self.directory / MANIFEST).is_file():
            raise WireError(404, f"{self.path} was deleted, or its time ran out")
        if read_sealed(self.directory / MANIFEST)["digest"] != self.digest:
            raise WireError(400, f"{self.path} was overwritten after this sampler was made; make another one")
        if sha256(file) != self.digest:
            raise WireError(400, f"{self.path} is damaged: its tensors do not have the checksum of its manifest")
        return dict(load_file(file))


class Checkpoints:
    """All checkpoints of one server. One process owns the folder at a time."""

    def __init__(self, directory: Path) -> None:
        self.root = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{directory}: another server uses these checkpoints. Name another --checkpoints."
            ) from None
        except OSError as error:
            raise UserError(f"{directory}: {error.strerror or error}. Name another --checkpoints.") from None
        for partial in directory.glob("*/*/*/.*"):
            place = partial.with_name(partial.name[1:].rpartition(".")[0])
            if (partial / MANIFEST).exists() and not place.exists():  # killed while it replaced one
                os.rename(partial, place)
            else:
                shutil.rmtree(partial, ignore_errors=True)
        for place in directory.glob("*/*/*/[!.]*"):
            with contextlib.suppress(WireError):  # a damaged one is an error for who asks for it
                self._read(place)  # removes it if its time ran out

    def save(
        self,
        owner: str,
        run: str,
        kind: Kind,
        name: str,
        tensors: Mapping[str, Tensor],
        client: SavedClient,
        *,
        overwrite: bool = False,
        seconds: float | None = None,
        user_metadata: Mapping[str, str] | None = None,
        request: int | None = None,
    ) -> SavedState:
        place = self._place(owner, run, kind, name)
        if request is not None and NAME.fullmatch(name):
            saved = self._read(place)
            if saved is not None and saved.request == request:  # the server was killed before it could answer
                return saved
        self.require_free(owner, run, kind, name, overwrite)
        partial = place.with_name(f".{name}.{secrets.token_hex(6)}")
        partial.mkdir(parents=True)
        made = time.time()
        found = SavedState(
            run, kind, name, place, client, made, None if seconds is None else made + seconds,
            *write_tensors(partial / TENSORS, tensors), dict(user_metadata or {}), request,
        )  # fmt: skip
        write_sealed(partial / MANIFEST, _to_manifest(found))
        sync(partial)
        if place.exists():
            old = place.with_name(f".{name}.{secrets.token_hex(6)}")
            os.rename(place, old)
            os.rename(partial, place)
            shutil.rmtree(old)
        else:
            os.rename(partial, place)
        sync(place.parent)
        return found

    def require_free(self, owner: str, run: str, kind: Kind, name: str, overwrite: bool) -> None:
        if not NAME.fullmatch(name):
            raise WireError(400, f"checkpoint name {plain(name, 80)!r}: letters, digits, '.', '_' and '-' only")
        if overwrite:
            return
        place = self._place(owner, run, kind, name)
        if self._read(place) is not None:
            raise WireError(400, f"checkpoint {name!r} exists already; take another name{OR_OVERWRITE[kind]}")
        shutil.rmtree(place, ignore_errors=True)  # what is left of one that was deleted

    def find(self, owner: str, path: str) -> SavedState:
        """The checkpoint of a path. Those of others are not there."""
        match = PATH.fullmatch(path)
        if match is None:
            raise WireError(400, f"{plain(path, 200)!r} is not a path like tinker://RUN/weights/NAME")
        run, kind, name = match.groups()
        found = self._read(self._place(owner, run, kind, name))  # type: ignore[arg-type]
        if found is None:
            raise WireError(404, f"there is no checkpoint {plain(path, 200)}")
        return found

    def of_run(self, owner: str, run: str) -> Iterator[SavedState]:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}", run):
            return
        for place in sorted(self._run(owner, run).glob("*/[!.]*")):
            found = self._read(place)
            if found is not None:
                yield found

    def delete(self, owner: str, path: str) -> None:
        found = self.find(owner, path)
        (found.directory / MANIFEST).unlink()  # from here on it is not a checkpoint
        shutil.rmtree(found.directory)

    def close(self) -> None:
        """Let another process use the folder."""
        os.close(self._lock)

    def keep_live(self, tensors: Mapping[str, Tensor]) -> Path:
        """Tensors without a name, in a file."""
        file = self.live_file(f"{secrets.token_hex(12)}.safetensors")
        file.parent.mkdir(exist_ok=True)
        write_tensors(file, tensors)
        sync(file.parent)
        return file

    def live_file(self, name: str) -> Path:
        return self.root / LIVE / name

    def _run(self, owner: str, run: str) -> Path:
        return self.root / owner / run.replace(":", "-")

    def _place(self, owner: str, run: str, kind: Kind, name: str) -> Path:
        return self._run(owner, run) / kind / name

    def _read(self, place: Path) -> SavedState | None:
        if not (place / MANIFEST).is_file():
            return None
        try:
            value = read_sealed(place / MANIFEST)
        except RunDirectoryError as error:
            raise WireError(400, str(error)) from None
        if value.pop("format") != FORMAT:
            raise WireError(400, f"{place.name} was saved by another version of opd")
        client = SavedClient(**value.pop("client"))
        found = SavedState(directory=place, client=client, **value)
        if found.expires is not None and found.expires < time.time():
            (place / MANIFEST).unlink(missing_ok=True)  # from here on it is not a checkpoint
            shutil.rmtree(place, ignore_errors=True)
            return None
        return found


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write and sync a file; its size and checksum."""
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)
        sync(file)
    except BaseException:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        raise
    return file.stat().st_size, sha256(file)


def _to_manifest(found: SavedState) -> dict[str, Any]:
    value = asdict(found)
    del value["directory"]
    return {"format": FORMAT, **value}
