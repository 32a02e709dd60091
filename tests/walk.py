"""Which functions one step of the quickstart runs through, by room and file.

    python -m tests.walk            # the third step: counts
    python -m tests.walk --list     # and the functions

A function counts once, however often it is called, if it stands under opd/. A call from a lower room into a higher one counts as
upward unless the caller was handed the object, as its own attribute or argument: see `tests/whole/test_structure.py` for imports.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

STEP = 3


def functions_of_step(step: int = STEP) -> set[CodeType]:
    """Distinct functions under opd/ that this step of the quickstart calls, in any thread of this process."""
    import opd
    from opd.runner import pipeline

    package = str(Path(opd.__file__).parent)
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            seen.add(frame.f_code)

    original = pipeline.run_step

    def watched(parts: Any, number: int) -> Any:
        if number != step:
            return original(parts, number)
        sys.setprofile(note)
        try:
            return original(parts, number)
        finally:
            sys.setprofile(None)

    pipeline.run_step = watched
    try:
        with tempfile.TemporaryDirectory() as directory:
            overrides = [f"train.steps={step}", "eval.prompts=0", "device=cpu", "log.start_table=false"]
            opd.run("quickstart", overrides=overrides, out=Path(directory) / "run")
    finally:
        pipeline.run_step = original
    return {code for code in seen if code.co_name not in ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="the functions, too")
    options = parser.parse_args()
    import opd

    package = Path(opd.__file__).parent
    found = sorted((str(Path(code.co_filename).relative_to(package)), code.co_qualname) for code in functions_of_step())
    files = Counter(path for path, _ in found)
    for path, count in sorted(files.items()):
        print(f"{count:4d}  {path}")
        for name in (name for where, name in found if where == path and options.list):
            print(f"        {name}")
    print(f"{len(found)} functions in {len(files)} files")


if __name__ == "__main__":
    main()
