"""Ten million index rows: open the store and look some of them up. CPU seconds and peak memory, no torch.

    OMP_NUM_THREADS=1 python benchmarks/store_index.py

The rows are made up (lognormal lengths, groups of four, four domains), with ids as long as a run's; opening and the
query run in a process of their own. Writes benchmarks/results/store-index-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from opd.store import RolloutStore
from opd.store.log import Files
from opd.store.rollouts import INDEX_COLUMNS, LINK_COLUMNS, RATIO_COLUMNS, Index, Texts, Vocabulary

RESULTS = Path(__file__).parent / "results"
GROUP = 4
NAMES = (
    b'["main/task:addition/train/00000000/0/0", "task:addition/train/00000000", "task:addition/train/00000000/0", ""]'
)
LIMITS = {"cpu_s": 15.0, "peak_gb": 2.0}


def make_index(rows: int) -> Index:
    rng = np.random.default_rng(0)
    group = np.arange(rows) // GROUP
    arrays = {name: np.zeros(rows, dtype=kind) for name, kind in (INDEX_COLUMNS | RATIO_COLUMNS | LINK_COLUMNS).items()}
    arrays["length"][:] = np.clip(np.exp(rng.normal(5.5, 0.8, rows)), 1, 8192)
    arrays["prompt_length"][:] = rng.integers(20, 200, rows)
    arrays["domain"][:] = rng.integers(1, 5, rows)
    arrays["source"][:], arrays["teacher"][:] = 1, arrays["domain"]
    arrays["version_min"][:] = arrays["version_max"][:] = group // 256
    arrays["reward"][:] = rng.random(rows) < 0.5
    arrays["stop"][:] = rng.integers(1, 3, rows)
    arrays["unit"][:] = (group.astype(np.uint64) + np.uint64(1)) * np.uint64(
        0x9E3779B97F4A7C15
    )  # scattered, as hashes are
    arrays["size"][:] = 200 + 21 * arrays["length"]
    arrays["offset"][:] = np.cumsum(arrays["size"], dtype=np.uint64)
    arrays["segment"][:] = arrays["offset"] >> 26
    index = Index(arrays)
    index.names = make_names(rows, group)
    index.facts = Texts(np.zeros(0, dtype="u1"), np.zeros(rows, dtype="<u8"))
    index.vocabularies["domain"] = Vocabulary(["", "arithmetic", "spelling", "sorting", "ciphers"])
    index.vocabularies["teacher"] = Vocabulary(["", "arithmetic", "spelling", "sorting", "ciphers"])
    index.vocabularies["source"] = Vocabulary(["", "student"])
    return index


def make_names(rows: int, group: np.ndarray) -> Texts:
    names = np.tile(np.frombuffer(NAMES, dtype="u1"), (rows, 1))
    places = [at for at in range(len(NAMES)) if NAMES[at : at + 8] == b"00000000"]
    for digit in range(8):
        value = (group // 10 ** (7 - digit) % 10 + ord("0")).astype("u1")
        for place in places:
            names[:, place + digit] = value
    names[:, NAMES.index(b'/0/0"') + 3] = np.arange(rows) % GROUP + ord("0")
    return Texts(names.reshape(-1), np.arange(1, rows + 1, dtype="<u8") * len(NAMES))


def make_store(directory: Path, rows: int) -> None:
    store = RolloutStore(directory, commit_ms=0)
    store.close()
    make_index(rows).save(directory / "index.bin", Files(), store.position)


def measure(directory: Path) -> dict[str, Any]:
    """In this process: open, and find the long wrong answers of one domain. `cpu_s` is all of it, imports too."""
    before = time.process_time()
    store = RolloutStore(directory, read_only=True)
    opened = time.process_time()
    found = store.where(domain="spelling", reward=0, length=lambda length: length > 1000)
    queried = time.process_time()
    assert store.index_was == "whole"
    assert 0 < len(found) < len(store)
    return {
        "rows": len(store), "index_gb": round((directory / "index.bin").stat().st_size / 1e9, 2), "found": len(found),
        "open_cpu_s": round(opened - before, 2), "query_cpu_s": round(queried - opened, 2),
        "cpu_s": round(time.process_time(), 2),
        "peak_gb": round(peak_bytes() / 1e9, 2),
    }  # fmt: skip


def peak_bytes() -> int:
    """Of this process alone: getrusage would also count the parent it was forked from."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return
    with tempfile.TemporaryDirectory() as name:
        make_store(Path(name), args.rows)
        command = [sys.executable, __file__, "--measure", name]
        numbers = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    record = {
        "machine": machine(), "python": platform.python_version(), "numpy": np.__version__, "command": f"python {' '.join(sys.argv)}",
        **numbers, "limits": LIMITS, "within_limits": all(numbers[name] < limit for name, limit in LIMITS.items()),
    }  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "store-index-cpu.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path.read_text())


def machine() -> str:
    lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout.splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name")), platform.machine())


if __name__ == "__main__":
    main()
