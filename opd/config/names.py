"""Names that become directories: of runs and of stages. One rule."""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import Path

from opd.config.plain_data import shown
from opd.errors import RunDirectoryError

RULE = (
    "letters, digits, and _ . + @ - or spaces between them, at most 64, beginning with a letter or digit; not `latest`"
)
NAME_PATTERN = r"[^\W_]([\w .+@-]{0,62}[\w+@-])?"
_NAME = re.compile(NAME_PATTERN)
_RESERVED = "latest"  # checkpoints/latest links to the newest checkpoint


def check_name(name: str) -> str:
    """A name as it is, or a refusal that says what names may be."""
    if _NAME.fullmatch(name) and folded(name) != _RESERVED and len(name.encode()) <= 128:
        return name
    raise ValueError(f"not a name that a directory can have. Use {RULE}")


def name_of_file(stem: str) -> str:
    """The default name of a run: its recipe's file name, with what a name may not hold replaced."""
    name = re.sub(r"[^\w .+@-]", "-", stem)[:40].strip(" .+@-_")
    return name if _NAME.fullmatch(name) and folded(name) != _RESERVED else "run"


def folded(name: str) -> str:
    """Equal for names that some file systems take for the same."""
    return unicodedata.normalize("NFC", name).casefold()


def check_output(wanted: str | Path) -> Path:
    """Where a run is to be written: a path whose parts can be made and read."""
    try:
        path = Path(wanted).expanduser()
    except RuntimeError:  # of an unknown user
        raise RunDirectoryError(
            f"run directory {shown(str(wanted))}: there is no such home. Write the path out."
        ) from None
    for part in path.parts:
        if any(unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") for character in part):
            raise RunDirectoryError(
                f"run directory {shown(str(path))}: control characters in {shown(part)}. Choose another name."
            )
        if len(part.encode(errors="surrogatepass")) > 200:
            raise RunDirectoryError(
                f"run directory {shown(str(path))}: a part of {len(part)} characters. Choose a shorter name."
            )
    if not str(wanted) or path.name in ("", ".."):
        raise RunDirectoryError(f"run directory {shown(str(path))}: name a directory, for example --out runs/first.")
    if os.path.exists(path) and not os.path.isdir(path):  # False where it may not be looked at
        raise RunDirectoryError(f"run directory {shown(str(path))}: a file of this name is there. Choose another name.")
    return path
