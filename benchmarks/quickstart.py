"""What the quickstart costs and reaches: CPU-seconds of the whole command, and the normalised score, seed by seed.

    python benchmarks/quickstart.py --directory DIR              # three seeds, one after the other

`opd run quickstart` as a user types it, in a process of its own: imports, samples, updates, both evaluations and the report.
CPU-seconds are those of the process and its children. Writes benchmarks/results/quickstart-ARCHITECTURE-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from runs import save


def measure(seed: int, directory: Path, changes: list[str]) -> dict[str, Any]:
    out = directory / f"seed-{seed}"
    command = [sys.executable, "-m", "opd.cli", "run", "quickstart", f"seed={seed}", *changes, "--out", str(out)]
    began, before = time.monotonic(), os.times()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = os.times()
    if done.returncode:
        raise SystemExit(f"seed {seed}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    (stage,) = json.loads((out / "summary.json").read_text(encoding="utf-8"))["stages"]
    user, system = after.children_user - before.children_user, after.children_system - before.children_system
    scores = stage["evals"]
    gained = sum(entry["after"] - entry["before"] for entry in scores.values())
    whole = sum(entry["teacher"] - entry["before"] for entry in scores.values())
    return {
        "seed": seed, "cpu_seconds": round(user + system, 1), "wall_seconds": round(time.monotonic() - began, 1),
        "normalised": gained / whole, "scores": scores,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--directory", type=Path, help="the runs go here; it must not have them yet")
    parser.add_argument("--set", nargs="*", default=[], help="changes of the recipe, for a test")
    args = parser.parse_args()
    directory = args.directory or Path(tempfile.mkdtemp())
    taken = [seed for seed in args.seeds if (directory / f"seed-{seed}").exists()]
    if taken:
        raise SystemExit(f"{directory} has runs of seeds {taken} already. Give another --directory.")
    runs = []
    for seed in args.seeds:
        runs.append(measure(seed, directory, args.set))
        print(
            "seed {seed}: {cpu_seconds} CPU-seconds, normalised score {normalised:.3f}".format(**runs[-1]), flush=True
        )
    save(f"quickstart-{platform.machine()}-cpu.json", {
        "cpu_seconds": mean(run["cpu_seconds"] for run in runs), "normalised": mean(run["normalised"] for run in runs), "changes": args.set,
        "runs": runs,
    })  # fmt: skip


if __name__ == "__main__":
    main()
