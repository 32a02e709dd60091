"""Restarting interrupted rollouts favours short answers; continuing them from a durable token does not.

    pip install matplotlib
    OMP_NUM_THREADS=1 python benchmarks/length_bias.py

Rollouts of mean length mu are written by slots that decode side by side; before each decode step the process is interrupted
with probability lambda. *Restart* draws every rollout that was under way again, from nothing. *Store* is the real `RolloutStore`:
the process is gone with all that was not committed, the log is opened again, and unfinished rollouts go on, with fresh draws,
from their last durable token. A rollout of length L survives restarting with probability (1 - lambda)^L, so for geometric
lengths the kept mean is mu / (1 + lambda mu); for any lengths it is E[L (1 - lambda)^L] / E[(1 - lambda)^L].

Standard errors take rollouts as independent; restarted ones share interruptions, so theirs are a little too small.
The equivalence test (two one-sided tests, within 5 % of mu, level 5 %) must pass for the store and fail for restarting.
Writes benchmarks/results/length-bias-cpu.json and docs/figures/length-bias.svg.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from opd.records import SampledToken
from opd.store import RolloutStore

HERE = Path(__file__).parent
MU, LONGEST, SLOTS, COMMIT_STEPS = 48.0, 1200, 32, 3
MARGIN, LEVEL_Z = 0.05, 1.6449
RATES = {"geometric": (0.25, 0.5, 1.0, 2.0), "lognormal": (1.0,)}  # lambda * mu
ENOUGH = 10_000  # rollouts; with fewer the tests decide nothing
PROMPT = np.array([1, 2, 3])


def hazard(kind: str) -> np.ndarray:
    """P(stop at token t | not before), t = 1, 2, …; the last is 1."""
    t = np.arange(1, LONGEST + 1)
    if kind == "geometric":
        return np.where(t == LONGEST, 1.0, 1 / MU)
    spread = 0.7
    mass = np.exp(-((np.log(t) - math.log(MU) + spread**2 / 2) ** 2) / (2 * spread**2)) / t
    mass /= mass.sum()
    return np.clip(mass / np.cumsum(mass[::-1])[::-1], 0, 1)


def exact(kind: str, rate: float) -> float:
    """Mean kept length if rollouts are restarted; with rate 0, the true mean."""
    h = hazard(kind)
    mass = h * np.concatenate([[1.0], np.cumprod(1 - h)[:-1]])
    t = np.arange(1, LONGEST + 1)
    weight = mass * (1 - rate) ** t
    return float((t * weight).sum() / weight.sum())


def restarted(kind: str, rate: float, count: int, seed: list[int]) -> tuple[np.ndarray, int]:
    """Kept lengths, and how often the process was interrupted."""
    rng, stops = np.random.default_rng(seed), hazard(kind)
    kept = np.zeros(count, dtype=np.int64)
    live, length = np.arange(min(SLOTS, count)), np.zeros(min(SLOTS, count), dtype=np.int64)
    waiting, interruptions = len(live), 0
    while len(live):
        if rng.random() < rate:
            length[:] = 0
            interruptions += 1
            continue
        length += 1
        done = rng.random(len(live)) < stops[length - 1]
        kept[live[done]] = length[done]
        fresh = np.arange(waiting, min(count, waiting + int(done.sum())))
        waiting += len(fresh)
        live = np.concatenate([live[~done], fresh])
        length = np.concatenate([length[~done], np.zeros(len(fresh), dtype=np.int64)])
    return kept, interruptions


def stored(kind: str, rate: float, count: int, seed: list[int], directory: Path) -> tuple[np.ndarray, int]:
    """The same through the rollout store; kept lengths are read back from the log at the end."""
    rng, stops = np.random.default_rng(seed), hazard(kind)
    store, length, waiting, steps, interruptions = RolloutStore(directory, commit_ms=0), dict[str, int](), 0, 0, 0
    while True:
        if rng.random() < rate:  # the process dies: what was not committed is gone with it
            RolloutStore(directory, commit_ms=0).close()  # recovers, and saves the index
            store = RolloutStore(directory, commit_ms=0)
            length = {rollout.id: rollout.response_ids.size for rollout in store.partial(store.unfinished())}
            waiting, interruptions = len(store), interruptions + 1
            continue
        while len(length) < SLOTS and waiting < count:
            name = f"r{waiting}"
            store.begin(id=name, prompt_id=name, visit=0, sample=0, domain="d", source="student", prompt_ids=PROMPT)
            length[name], waiting = 0, waiting + 1
        if not length:
            break
        draws = rng.random(len(length))
        for draw, name in zip(draws.tolist(), list(length), strict=True):
            length[name] += 1
            store.append(SampledToken(name, length[name], -1.0, -1.0, -5.0, interruptions))
            if draw < stops[length[name] - 1]:
                store.finish(name, "stop")
                del length[name]
        steps += 1
        if steps % COMMIT_STEPS == 0 or (not length and waiting == count):
            store.commit(sync=True)
    store.close()
    kept = RolloutStore(directory, read_only=True)
    for rollout in kept.where():  # every token once and in its place
        assert np.array_equal(rollout.response_ids, np.arange(1, rollout.response_ids.size + 1))
    assert len(kept.where()) == count
    return kept.index["length"].astype(np.int64), interruptions


def equivalence(kept: np.ndarray, mean: float) -> dict[str, Any]:
    """Two one-sided tests: is the mean of what was kept within the margin of the true mean?"""
    error = kept.std(ddof=1) / math.sqrt(len(kept))
    gap = min(kept.mean() - (1 - MARGIN) * mean, (1 + MARGIN) * mean - kept.mean()) / error
    return {
        "mean": round(float(kept.mean()), 3), "stderr": round(float(error), 3), "relative": round(float(kept.mean() / mean - 1), 4),
        "z": round(float(gap), 2), "p": float(f"{0.5 * math.erfc(gap / math.sqrt(2)):.3g}"), "equivalent": bool(gap > LEVEL_Z),
    }  # fmt: skip


def compare(kind: str, strength: float, count: int, seeds: int) -> dict[str, Any]:
    rate, true = strength / MU, exact(kind, 0.0)
    key = [list(RATES).index(kind), round(100 * strength)]
    restart, store, per_seed, interruptions = [], [], [], 0
    for seed in range(seeds):
        restart.append(restarted(kind, rate, count, [*key, seed, 0])[0])
        with tempfile.TemporaryDirectory() as name:
            lengths, times = stored(kind, rate, count, [*key, seed, 1], Path(name))
        store.append(lengths)
        interruptions += times
        per_seed.append([round(float(restart[-1].mean()), 2), round(float(lengths.mean()), 2)])
    return {
        "lengths": kind, "lambda_mu": strength, "true_mean": round(true, 3), "theory_restart": round(exact(kind, rate), 3),
        "formula_restart": round(true / (1 + rate * true), 3), "rollouts": count * seeds, "interruptions": interruptions,
        "restart": equivalence(np.concatenate(restart), true), "store": equivalence(np.concatenate(store), true),
        "means_by_seed_restart_store": per_seed,
    }  # fmt: skip


def plot(rows: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "opd"})
    figure, axis = plt.subplots(figsize=(6, 3.6))
    mine = [row for row in rows if row["lengths"] == "geometric"]
    strengths = np.linspace(0, max(row["lambda_mu"] for row in mine) * 1.05, 200)
    axis.axhspan(MU * (1 - MARGIN), MU * (1 + MARGIN), color="0.92", label="within 5 % of the true mean")
    axis.plot(strengths, MU / (1 + strengths), color="tab:red", lw=1, label="theory: μ / (1 + λμ)")
    for name, colour, label in (
        ("restart", "tab:red", "restarted from scratch"),
        ("store", "tab:blue", "continued by the store"),
    ):
        axis.errorbar([row["lambda_mu"] for row in mine], [row[name]["mean"] for row in mine],
                      [1.96 * row[name]["stderr"] for row in mine], fmt="o", color=colour, ms=5, capsize=3, label=label)  # fmt: skip
    axis.set(xlabel="interruptions per mean length, λμ", ylabel="mean kept length (tokens)", ylim=(0, MU * 1.2))
    axis.legend(frameon=False, fontsize=8, loc="center right", bbox_to_anchor=(1.0, 0.6))
    figure.tight_layout()
    figure.savefig(HERE.parent / "docs" / "figures" / "length-bias.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=2000, help="per seed")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--plot", action="store_true", help="only draw what was measured")
    args = parser.parse_args()
    path = HERE / "results" / "length-bias-cpu.json"
    if args.plot:
        plot(json.loads(path.read_text(encoding="utf-8"))["rows"])
        return
    rows = []
    for kind, strengths in RATES.items():
        for strength in strengths:
            start = time.process_time()
            rows.append(compare(kind, strength, args.rollouts, args.seeds))
            print(f"{time.process_time() - start:.0f} s", json.dumps(rows[-1]), flush=True)
    lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout.splitlines()
    machine = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name")), platform.machine()
    )
    record = {
        "machine": machine, "python": platform.python_version(), "numpy": np.__version__, "command": f"python {' '.join(sys.argv)}",
        "mu": MU, "margin": MARGIN, "slots": SLOTS, "commit_every_steps": COMMIT_STEPS, "rows": rows,
        "store_always_equivalent": all(row["store"]["equivalent"] for row in rows),
        "restart_never_equivalent": not any(row["restart"]["equivalent"] for row in rows),
    }  # fmt: skip
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    plot(rows)
    if args.rollouts * args.seeds >= ENOUGH:
        assert record["store_always_equivalent"]
        assert record["restart_never_equivalent"]


if __name__ == "__main__":
    main()
