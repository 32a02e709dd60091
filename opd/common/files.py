"""Files that are written completely or not at all, and valid JSON with checksums.

json_text({"loss": float("nan")})      # {"loss": null}: numbers that are not finite become null, so every parser can read it
write_sealed(path, {"step": 8})        # {"step": 8, "sha256": "…"}: temporary name, fsync, rename, fsync of the folder
read_sealed(path)                      # {"step": 8}, or RunDirectoryError if a single bit differs
line_of({"step": 8})                   # {"step": 8, "crc": "…"}: a line of metrics.jsonl or samples.jsonl
read_lines(path, checked=True)         # the intact lines, and the numbers of the damaged ones
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import resource
import secrets
import shutil
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from opd.common.errors import DiskError, RunDirectoryError

SEALS = "run.json"  # checksums of the recipe and of all inputs; written when the run starts
FORMAT = 2  # of run directories; from 2 on, the lines of metrics.jsonl and samples.jsonl have checksums
SEAL, CRC = "sha256", "crc"
CRC_TAIL = len(f', "{CRC}": "00000000"}}')
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
DENIED = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ELOOP,
    errno.ENAMETOOLONG,
)
PARTIAL_BYTES = 8  # random bytes in a temporary name
PARTIAL = re.compile(rf"\.(?P<name>.+?)(?:\.[0-9a-f]{{{2 * PARTIAL_BYTES}}})?\.partial", re.S)
STALE = 3600.0  # seconds after which a temporary file is taken to be from a writer that was killed
HASH_CHUNK = 16 << 20
HASH_CACHED = 16 << 20  # bytes; smaller files are always read, which is fast and cannot be fooled


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON as the standard has it. Python would write NaN and Infinity, which other parsers reject."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


# Atomic writes


def cache_directory() -> Path | None:
    """The cache directory: `$XDG_CACHE_HOME/opd`, else `~/.cache/opd`. None if there is no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opd"
    except RuntimeError:
        return None


def sync(path: Path) -> None:
    """fsync a file, or a directory's list of names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, content: str | bytes) -> None:
    """A reader sees the old content or all of the new content, even after a power cut.

    The temporary name is random and the file must be new, so an existing link is never followed.
    """
    remove_partials(path.parent, {path.name}, older=STALE)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(PARTIAL_BYTES)}.partial")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def partial_of(name: str) -> str | None:
    """The file that a temporary name of `write_atomic` belongs to. Names from earlier versions have no random part.

    >>> partial_of(".run.json.0123456789abcdef.partial"), partial_of(".run.json.partial"), partial_of("run.json")
    ('run.json', 'run.json', None)
    """
    found = PARTIAL.fullmatch(name)
    return found["name"] if found else None


def remove_partials(folder: Path, names: Collection[str], *, older: float = 0.0) -> None:
    """Remove temporary files of killed writers that are `older` than so many seconds."""
    with os.scandir(folder) as entries:
        found = [entry for entry in entries if partial_of(entry.name) in names]
    for entry in found:
        with suppress(OSError):  # it belongs to another user, or another process removed it
            if not older or time.time() - entry.stat(follow_symlinks=False).st_mtime > older:
                os.unlink(entry.path)


def append_text(path: Path, text: str) -> None:
    """Append to a file, which is created if necessary. A symbolic link is an error, because the text would go elsewhere."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise RunDirectoryError(
            f"{path} is a symbolic link. A run writes only to its own files: delete the link, then continue."
        ) from None
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)


def fresh_directory(path: Path) -> Path:
    """Make an empty directory that only this user can read. Anything of this name is removed first."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.mkdir(parents=True)
    return path


def sha256(path: Path) -> str:
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sealed(value: Mapping[str, Any]) -> str:
    """JSON text of a mapping with a checksum of the rest inside. Older files may hold NaN, so NaN is allowed here."""
    digest = hashlib.sha256(json.dumps(dict(value)).encode()).hexdigest()
    return json.dumps({**value, SEAL: digest}, indent=1) + "\n"


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    write_atomic(path, sealed(_finite(value)))


def read_sealed(path: Path) -> dict[str, Any]:
    """Read a sealed file. Its content must render to the same bytes, so even a changed space is found."""
    with reading(path):
        data = path.read_bytes()
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):  # not UTF-8, or not JSON
        value = None
    if isinstance(value, dict) and SEAL in value:
        del value[SEAL]
        if sealed(value).encode() == data:
            return value
    raise RunDirectoryError(f"{path} was altered or cut: its checksum does not match.")


# Files of JSON lines


@dataclass
class Lines:
    """A file of lines. A writer that was killed may leave half a line at the end."""

    whole: list[dict[str, Any]] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)  # their numbers, from 1
    torn: int = 0  # bytes after the last line end


def line_of(values: Mapping[str, Any]) -> str:
    """A plain JSON object in one line, with a CRC-32 of the rest of its text as the last key."""
    body = json_text(values)
    return f'{body[:-1]}, "{CRC}": "{zlib.crc32(body.encode()):08x}"}}\n'


def lines_checked(run: Path) -> bool:
    """Whether every line in a run directory has a checksum; older runs wrote none."""
    return (run / SEALS).exists() and read_sealed(run / SEALS).get("format", 1) >= 2


def read_lines(path: Path, *, checked: bool) -> Lines:
    """Read and verify every line. `checked=False`: lines may lack a checksum, as in runs of earlier versions."""
    found = Lines()
    if not path.exists():
        return found
    with reading(path):
        *ended, rest = path.read_bytes().split(b"\n")
    found.torn = len(rest)
    for number, raw in enumerate(ended, start=1):
        values = _line(raw, checked)
        if values is None:
            found.damaged.append(number)
        else:
            found.whole.append(values)
    return found


def _line(raw: bytes, checked: bool) -> dict[str, Any] | None:
    """The content of a line, without its checksum; None if it is damaged."""
    body, tail = raw[:-CRC_TAIL] + b"}", raw[-CRC_TAIL:]
    marked = tail.startswith(f', "{CRC}": "'.encode())
    if marked and tail != f', "{CRC}": "{zlib.crc32(body):08x}"}}'.encode():
        return None
    if checked and not marked:
        return None
    try:
        values = json.loads(body if marked else raw)
    except (ValueError, RecursionError):
        return None
    known = isinstance(values, dict) and isinstance(values.get("step"), int) and isinstance(values.get("stage"), str)
    return values if known else None


# Checksums of inputs


def content_hash(path: Path, advance: Callable[[int], None] = lambda _: None) -> str:
    """sha256 of a file. The hash of a large file is cached by its path, size and times.

    `advance` gets the number of bytes that were read. The cache is `$XDG_CACHE_HOME/opd/hashes`, which may be deleted.
    """
    facts = path.stat()
    if facts.st_size < HASH_CACHED:
        advance(facts.st_size)
        return sha256(path)
    key = f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns} {facts.st_ino}"
    root = cache_directory()
    kept = root / "hashes" / hashlib.sha256(key.encode()).hexdigest() if root is not None else None
    try:
        known = read_sealed(kept)["content"] if kept is not None else None
    except (RunDirectoryError, KeyError):  # missing or damaged: read the file itself
        known = None
    if known is not None:
        advance(facts.st_size)
        return str(known)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK):
            digest.update(chunk)
            advance(len(chunk))
    if kept is not None:
        with suppress(OSError):  # without a cache it is only slower
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(kept, {"key": key, "content": digest.hexdigest()})
    return digest.hexdigest()


# Disk errors


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an error while reading a file into a RunDirectoryError with the reason."""
    try:
        yield
    except FileNotFoundError:
        raise RunDirectoryError(f"{path} is missing.") from None
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}.") from None


@contextmanager
def disk_errors(directory: Path, advice: Callable[[], str]) -> Iterator[None]:
    """Turn a disk error into a DiskError. Writers in Rust raise errors that have only a text."""
    try:
        yield
    except Exception as error:
        number = _number(error)
        named = error.filename if isinstance(error, OSError) and error.filename else None
        place = Path(os.fsdecode(named)) if isinstance(named, (str, bytes)) else directory
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if number in DISK:
            raise DiskError(
                f"{place} could not be written: {why}. Nothing durable is lost. Free some space, then {advice()}"
            ) from error
        if number in DENIED and (place == directory or directory.absolute() in place.absolute().parents):
            raise RunDirectoryError(
                f"{place} could not be read or written: {why}. Fix its permissions, then {advice()}"
            ) from error
        raise


def _number(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    return next((code for code in (*DISK, *DENIED) if f"(os error {code})" in str(error)), None)


# Existence checks


def is_directory(path: Path) -> bool:
    """Whether a file exists. False for invalid names."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def json_object(path: Path) -> dict[str, Any]:
    """Read a file of a run directory that holds one JSON object."""
    with reading(path):
        data = path.read_bytes()
    try:
        return dict(json.loads(data))
    except (ValueError, TypeError, RecursionError):
        raise RunDirectoryError(f"{path} was altered or cut off: it is not a JSON object.") from None


# --- The version of opd: the release and a hash of the source, because the code changes between releases ---
#
# The hash is computed on demand without git, so a clone and an installed package with the same files have the same version.


SHOWING = ("report", "diagnose", "cli.py", "__main__.py")  # rooms that no result depends on


@cache
def this_version() -> str:
    """Such as `0.1.0+3f2a91c05be7`."""
    from opd import __version__

    return f"{__version__}+{source_hash(Path(__file__).parents[1])}"


def source_hash(package: Path) -> str:
    """Hash of the Python files that a run computes with."""
    whole = hashlib.sha256()
    for path in sorted(package.rglob("*.py"), key=lambda path: path.relative_to(package).as_posix()):
        name = path.relative_to(package)
        if name.parts[0] not in SHOWING:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            whole.update(f"{name.as_posix()} {content}\n".encode())
    return whole.hexdigest()[:12]


def allow_open_files(wanted: int) -> None:
    """Raise the limit of open files as far as the system allows. Each connection is one, and many systems start at 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
