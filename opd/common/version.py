"""Which opd this is: the release and a hash of the source that runs, since between two releases the code changes as well.

Computed where it is asked for, so a clone, an installed package and an editable one say the same of the same files, without git.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

SHOWING = ("report", "diagnose", "cli.py", "__main__.py")  # parts that no result depends on


@cache
def this_version() -> str:
    """Such as `0.1.0+3f2a91c05be7`."""
    from opd import __version__

    return f"{__version__}+{source_hash(Path(__file__).parents[1])}"


def source_hash(package: Path) -> str:
    """Of the Python files by which a run computes."""
    whole = hashlib.sha256()
    for path in sorted(package.rglob("*.py"), key=lambda path: path.relative_to(package).as_posix()):
        name = path.relative_to(package)
        if name.parts[0] not in SHOWING:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            whole.update(f"{name.as_posix()} {content}\n".encode())
    return whole.hexdigest()[:12]
