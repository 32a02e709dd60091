"""Many small training runs side by side, each a process with one thread, and the facts that go with a result."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parent.parent / "docs" / "figures"


def run_all(recipes: dict[str, dict[str, Any]], directory: Path, workers: int) -> dict[str, dict[str, Any]]:
    """Carry out every recipe; name -> its curve and summary. A run that is there already is read, not repeated. No workers: in this process."""
    directory.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    for name, recipe in recipes.items() if not workers else ():
        carry_out(name, recipe, directory, here=True)
    with ThreadPoolExecutor(workers or 1) as pool:
        futures = {name: pool.submit(_curve, name, recipe, directory) for name, recipe in recipes.items()}
        found = {}
        for number, (name, future) in enumerate(futures.items(), 1):
            found[name] = future.result()
            print(
                f"{number}/{len(futures)} {name}: {found[name]['curve'][-1]} ({time.monotonic() - started:.0f} s)",
                flush=True,
            )
    return found


def _curve(name: str, recipe: dict[str, Any], directory: Path) -> dict[str, Any]:
    return read_run(carry_out(name, recipe, directory))


def carry_out(name: str, recipe: dict[str, Any], directory: Path, here: bool = False) -> Path:
    """One recipe in a process of its own, or `here`, unless its run directory is there and complete."""
    out, path = directory / name, directory / f"{name}.yaml"
    summary = out / "summary.json"
    if not summary.is_file() or json.loads(summary.read_text(encoding="utf-8"))["status"] != "done":
        shutil.rmtree(out, ignore_errors=True)  # what an interrupted study left
        path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
        if here:
            import opd

            opd.run(path, out=out)
            return out
        command = [sys.executable, "-m", "opd.cli", "run", str(path), "--out", str(out)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    return out


def read_run(directory: Path) -> dict[str, Any]:
    """The score after so many sampled tokens: [tokens, score] at every evaluation, the first and the last included."""
    stage = json.loads((directory / "summary.json").read_text(encoding="utf-8"))["stages"][-1]
    ((domain, scores),) = stage["evals"].items()
    curve, tokens = [[0, scores["before"]]], 0
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in (line for line in lines if line["stage"] == stage["name"]):
        tokens += line["tokens"]
        if f"eval/{domain}" in line:
            curve.append([tokens, line[f"eval/{domain}"]])
    curve.append([tokens, scores["after"]])
    return {"curve": curve, "teacher": scores["teacher"], "n": scores["n"], "seconds": round(stage["seconds"], 1)}


def tokens_to(curve: list[list[float]], level: float) -> float | None:
    """Sampled tokens until the score is first at the level, on the straight line between two evaluations."""
    for (tokens, score), (next_tokens, next_score) in pairwise(curve):
        if next_score >= level:
            share = (level - score) / (next_score - score) if next_score > score else 0.0
            return tokens + max(share, 0.0) * (next_tokens - tokens)
    return None


def rollouts_of(tokens: list[tuple[list[int], list[int]]], domain: str) -> list[Any]:
    """Given (prompt, response) ids as rollouts that nobody sampled here, so that two trainers see the same ones."""
    import numpy as np

    from opd.records import Author, Rollout

    rollouts = []
    for number, (prompt, response) in enumerate(tokens):
        known = np.zeros(len(response), dtype=np.float32)
        rollout = Rollout(
            id=str(number), prompt_id=str(number), visit=0, sample=0, domain=domain, source="student",
            prompt_ids=np.array(prompt, dtype=np.int32), response_ids=np.array(response, dtype=np.int32),
            author=np.full(len(response), Author.STUDENT, dtype=np.uint8), logprob=known, logprob_sampled=known,
            logprob_stop=known, version=np.zeros(len(response), dtype=np.int32), stop="length", group=str(number),
        )  # fmt: skip
        rollouts.append(rollout)
    return rollouts


def save_figure(figure: Any, axis: Any, name: str) -> None:
    from matplotlib import rc_context

    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    with rc_context({"svg.hashsalt": name}):  # the same numbers make the same file
        figure.savefig(FIGURES / name, metadata={"Date": None})


def circumstances() -> dict[str, Any]:
    """What every result begins with: how it was made, where, and by which versions."""
    return {
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(_plain, sys.argv[1:])]),
        "machine": {"processor": _processor(), "architecture": platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in ("torch", "transformers", "numpy")},
    }


def _plain(argument: str) -> str:
    return "DIR" if Path(argument).is_absolute() else argument


def save(name: str, values: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / name).write_text(json.dumps(circumstances() | values, indent=1) + "\n", encoding="utf-8")


def saved(name: str) -> dict[str, Any]:
    """A result that is there: what `--draw` draws again."""
    return dict(json.loads((RESULTS / name).read_text(encoding="utf-8")))


def refuse_other_changes(name: str, changes: list[str]) -> None:
    """Results of recipes as they are, or changed in another way (`--set`), are not written over."""
    kept = saved(name)["changes"] if (RESULTS / name).is_file() else changes
    if kept != changes:
        what = f"with --set {' '.join(kept)}" if kept else "without --set"
        raise SystemExit(f"{RESULTS / name} has what was measured {what}. Give these results a --name of their own.")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
