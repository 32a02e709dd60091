"""The version of opd: the release and a hash of the source, because the code changes between releases.

The hash is computed on demand without git, so a clone and an installed package with the same files have the same version.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

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
