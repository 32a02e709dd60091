"""The machines of a Ray cluster: where a worker is, and whether a machine sees what the run reads and writes.

Nothing is sent to them but the recipe's words: files, models and the run directory have to be at the same paths on every machine
that gets a worker, which is looked at before anything is started there.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import secrets
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from opd.config import Recipe
from opd.errors import UserError
from opd.version import this_version

PACKAGES = ("torch", "transformers")
MOST_FILES = 10_000  # of a directory, that are compared


class Machine(NamedTuple):
    """As one of its processes sees it."""

    name: str
    versions: dict[str, str]
    seen: dict[str, str]  # path -> what is there; nothing: no such path


def node_address() -> str:
    """Of the machine of this process, as the others reach it."""
    import ray

    found: str = ray.util.get_node_ip_address()
    return found


def free_port(host: str) -> int:
    """Above Ray's own and below those that kernels give to connections, one of which might take it before it is used."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
            try:
                one.bind((host, port))
                return port
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise


def look(paths: Sequence[str]) -> Machine:
    """Runs on each machine."""
    versions = {"Python": platform.python_version(), "opd": this_version()} | {name: version(name) for name in PACKAGES}
    return Machine(socket.gethostname(), versions, {path: _fingerprint(Path(path)) for path in paths})


def _fingerprint(path: Path) -> str:
    """A short file's content; the names of files in a directory, and their sizes where it is a model: files of other directories may grow
    meanwhile. Not their times: copies have others.
    """
    if path.is_dir():
        files, model = sorted(path.iterdir())[:MOST_FILES], (path / "config.json").is_file()
        listed = "\n".join(f"{file.name} {file.stat().st_size if model and file.is_file() else ''}" for file in files)
        return f"directory {hashlib.sha256(listed.encode()).hexdigest()[:16]}"
    if not path.is_file():
        return ""
    size = path.stat().st_size
    return f"file {size} {hashlib.sha256(path.read_bytes()).hexdigest()[:16] if size < 1 << 20 else ''}"


def paths_of(recipe: Recipe) -> list[str]:
    """Every path that it names: they are absolute by now."""
    found = dict.fromkeys(text for text in _texts(recipe.model_dump(mode="json")) if os.path.isabs(text))
    return [text for text in found if os.path.exists(text)]  # Path's would stumble over a long text that begins with /


def variables_of(recipe: Recipe) -> dict[str, str]:
    """Those that the recipe names (`token_env: NAME`), as this process has them."""
    names = {text for key, text in _pairs(recipe.model_dump(mode="json")) if key.endswith("_env")}
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(item)


def _pairs(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        yield from ((key, item) for key, item in value.items() if isinstance(item, str))
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _pairs(item)


@contextmanager
def marked(directory: Path) -> Iterator[Path]:
    """A file that only a machine with this very directory sees."""
    directory.mkdir(parents=True, exist_ok=True)
    mark = directory / f".opd-{secrets.token_hex(8)}"
    with mark.open("x", encoding="ascii") as file:
        file.write(secrets.token_hex(16))
    try:
        yield mark
    finally:
        with suppress(FileNotFoundError):
            mark.unlink()


def refuse_others(mine: Machine, others: Sequence[Machine], mark: str) -> None:
    """Name the machine and the path, or the package."""
    for other in others:
        for path, found in mine.seen.items():
            if other.seen.get(path) == found:
                continue
            what = f"{path} is {'another one' if other.seen.get(path) else 'not'} there"
            if path == mark:
                what = f"{Path(path).parent} is not the same directory there"
            raise UserError(
                f"machine {other.name}: {what}. The run directory, the working directory and everything that the recipe names "
                "by a path have to be at the same place on every machine of the cluster: put them on a shared file system."
            )
        for package, wanted in mine.versions.items():
            if other.versions.get(package) != wanted:
                raise UserError(
                    f"machine {other.name} has {package} {other.versions.get(package)}, and this one {wanted}. Install the same everywhere."
                )


def by_machine(nodes: Sequence[str]) -> list[int]:
    """Places in an order in which those of one machine stand together, the first one first."""
    first = {node: place for place, node in reversed(list(enumerate(nodes)))}
    return sorted(range(len(nodes)), key=lambda place: (first[nodes[place]], place))


def send_signal(ray: Any, where: Sequence[tuple[int, str]], number: signal.Signals) -> None:
    """`where`: processes and their nodes. Those of other machines get it from a task there, which nobody waits for."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    for process, node in where:
        if node == here:
            _signal_here(process, int(number))
        else:
            affinity = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            ray.remote(_signal_here).options(num_cpus=0, scheduling_strategy=affinity).remote(process, int(number))


def _signal_here(process: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has ended by itself
        os.kill(process, number)
