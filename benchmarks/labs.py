"""Every lab's pipeline whole, each a process with one thread: how long it takes, and its story.

    python benchmarks/labs.py --workers 8

Runs that are there already are read, not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from runs import save

from opd.config import shipped_recipes
from opd.runner.story import story_lines

LABS = [name for name in shipped_recipes() if name.startswith("labs/")]


def carry_out(name: str, directory: Path, changes: list[str]) -> dict[str, Any]:
    """The summary of a lab's run."""
    out = directory / name.removeprefix("labs/")
    if not (out / "summary.json").is_file():
        command = [sys.executable, "-m", "opd", "run", name, *changes, "--out", str(out), "--resume"]
        threads = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, env=threads, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads((out / "summary.json").read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("runs/labs"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--labs", nargs="+", default=LABS)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="for all of them")
    arguments = parser.parse_args()
    with ThreadPoolExecutor(max(arguments.workers, 1)) as pool:
        jobs = {name: pool.submit(carry_out, name, arguments.directory, arguments.set) for name in arguments.labs}
        found = {name: job.result() for name, job in jobs.items()}
    results = {
        name: {
            "status": summary["status"],
            "seconds": round(sum(stage["seconds"] for stage in summary["stages"]), 1),
            "tokens": sum(stage["tokens"] for stage in summary["stages"]),
            "story": summary.get("story", []),
        }
        for name, summary in found.items()
    }
    for name, result in results.items():
        print(f"{name}: {result['seconds']} s", *story_lines(result["story"]), sep="\n  ")
    save("labs-cpu.json", {"changes": arguments.set, "labs": results})


if __name__ == "__main__":
    main()
