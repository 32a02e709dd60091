"""A disk that fills up, in a mount namespace of its own: `unshare -Urm python -m tests.support.crash_disk RECIPE REFERENCE MOUNT SIZE…`

Each size (in KiB) is a small tmpfs. The run on it ends with one message; with more room it goes on to the right end.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import opd
from tests.support.crash import durable, ended, kept, same_run, start

ROOM = "size=256m"


def fill(recipe: Path, reference: opd.Run, mount: Path, size: int) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(mount)], check=True)
    directory, log = mount / "run", mount.parent / f"disk{size}.txt"
    code = ended(start(log, "run", recipe, "--out", directory))
    said = log.read_text()
    assert code == 1, (size, code, said)
    assert "No space left on device" in said, said
    assert "opd resume" in said, said
    assert "Traceback" not in said, said
    before = durable(directory)
    subprocess.run(["mount", "-o", f"remount,{ROOM}", str(mount)], check=True)
    assert ended(start(log, "resume", directory)) == 0, log.read_text()
    kept(before, durable(directory))
    same_run(opd.Run(directory), reference)
    subprocess.run(["umount", "-l", str(mount)], check=True)
    print(f"full at {size} KiB with {len(before)} rollouts, resumed to the same end", flush=True)


if __name__ == "__main__":
    recipe, reference, mount, *sizes = sys.argv[1:]
    for size in sizes:
        fill(Path(recipe), opd.Run(reference), Path(mount), int(size))
