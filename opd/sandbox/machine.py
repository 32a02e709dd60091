"""Which sandbox works on this machine."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
from functools import cache

from opd.errors import RecipeError
from opd.sandbox import seccomp
from opd.sandbox.walls import Limits, python, run_program

OLDEST_KERNEL = (5, 14)  # counts the processes of a user by namespace
log = logging.getLogger("opd.sandbox")


def choose(wanted: str) -> str:
    """`auto`, `bubblewrap`, `namespaces` or `none` -> what will be used. Refuses what does not work here, with the reason."""
    if wanted == "none" and sys.platform == "linux":
        log.warning("sandbox: none. Code written by the model runs WITHOUT A SANDBOX, with all rights of this user.")
        return "none"
    reasons = []
    for kind in ("bubblewrap", "namespaces") if wanted == "auto" else (wanted,):
        problem = trouble(kind)
        if not problem:
            return kind
        reasons.append(f"{kind}: {problem}")
    raise RecipeError(
        f"sandbox {wanted!r}: no sandbox for model-written code works here ({'; '.join(reasons)}). Install bubblewrap or allow "
        "user namespaces; or, if this machine holds nothing of value, write `rewards: {sandbox: none}`."
    )


@cache
def trouble(kind: str) -> str:
    """Why this kind of sandbox cannot be used here; empty if it can. Tried for real, once."""
    if sys.platform != "linux" or seccomp.machine() is None:
        return "needs Linux on x86_64 or aarch64"
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if version is None or (int(version[1]), int(version[2])) < OLDEST_KERNEL:
        return f"needs Linux 5.14 or newer, this is {os.uname().release}"
    if kind == "bubblewrap":
        if shutil.which("bwrap") is None:
            return "bwrap is not installed"
        if os.geteuid() == 0:
            return "its process limit does not bind root"
    try:
        outcome = run_program([python(), "-I", "-S", "-c", "print(1)"], kind=kind, limits=Limits(seconds=60.0))
    except OSError as error:
        return str(error)
    return "" if outcome.stdout == b"1\n" else (outcome.error or outcome.stderr.decode(errors="replace").strip())
