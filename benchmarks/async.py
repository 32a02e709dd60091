"""Sampling ahead of training: the quickstart at several staleness bounds, over seeds.

Per bound: the final scores, how long the trainer waited until a batch was sampled, rewarded and scored, trained tokens per
second, how far tokens lagged behind, and whether the lengths of the answers are those of the synchronous run (two one-sided tests of
the means, within 5 %, level 5 %; beside it the largest gap between the two distributions). A score counts as within noise if it is
above the synchronous mean less twice the standard error of the difference over seeds and questions.
`--arms`: further settings beside the bounds. `--processes n`: samplers in so many processes; 0: one in a thread.

    python benchmarks/async.py --workers 3 --processes 4       # benchmarks/results/async-cpu.json, docs/figures/async.svg
    python benchmarks/async.py --workers 6 --processes 0 --name async-thread-cpu.json
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from runs import FIGURES, RESULTS, carry_out, save

import opd

NAME, THREAD = "async-cpu.json", "async-thread-cpu.json"
MARGIN, LEVEL_Z = 0.05, 1.6449
ARMS: dict[str, dict[str, Any]] = {
    "8, keep": {"rollout": {"staleness": 8, "in_flight": "keep"}},
    "8, wait": {"rollout": {"staleness": 8, "in_flight": "wait"}},
    "8, prefix": {"rollout": {"staleness": 8}, "objective": {"correction": {"kind": "prefix"}}},
    "0, prefix": {"rollout": {"staleness": 0}, "objective": {"correction": {"kind": "prefix"}}},
}


def recipe(changes: dict[str, Any], seed: int, args: argparse.Namespace) -> dict[str, Any]:
    plain: dict[str, Any] = yaml.safe_load((Path(opd.__file__).parent / "recipes" / "quickstart.yaml").read_text())
    for key, values in changes.items():
        plain[key] |= values
    plain["train"] |= {"steps": args.steps}
    plain["rollout"] |= {"prompts": args.prompts}
    plain["eval"] = {"prompts": args.questions, "teachers": False}
    ahead = plain["rollout"].get("staleness", 0)
    plain["sampler"] = {"slots": 128, "prefill_rows": 64}  # as sampling ahead in a thread has by itself
    if ahead and args.processes:
        plain["sampler"] = {"processes": args.processes}
    return plain | {"seed": seed}


def facts(directory: Path) -> dict[str, Any]:
    """Of one run. Of its last steps there is nothing to sample ahead any more, and of the first nothing was yet: they count."""
    stage = json.loads((directory / "summary.json").read_text(encoding="utf-8"))["stages"][-1]
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    seconds = sum(value for line in lines for key, value in line.items() if key.startswith("time/"))
    store = opd.Run(directory).rollouts
    return {
        "scores": {domain: found["after"] for domain, found in stage["evals"].items()},
        "questions": sum(found["n"] for found in stage["evals"].values()),
        "kl": lines[-1]["reverse_kl"],
        "wait": sum(line.get(f"time/{name}", 0.0) for line in lines for name in ("wait", "sample", "reward", "score")),
        "seconds": seconds,
        "tokens": sum(line["tokens"] for line in lines),
        "lag": float(np.mean([line.get("staleness", 0.0) for line in lines])),
        "lag_max": max(line.get("staleness/max", 0) for line in lines),
        "lengths": store.index["length"][np.flatnonzero(store.index["stop"])].astype(int).tolist(),
    }


def row(name: str, runs: list[dict[str, Any]], synchronous: list[dict[str, Any]]) -> dict[str, Any]:
    def scores(of: list[dict[str, Any]]) -> np.ndarray:
        return np.array([np.mean(list(run["scores"].values())) for run in of])

    mine, base = scores(runs), scores(synchronous)
    noise = sum(found.var(ddof=1) / len(found) if len(found) > 1 else 0.0 for found in (mine, base))
    noise += sum((found.mean() * (1 - found.mean())) / (len(of) * of[0]["questions"])
                 for found, of in ((mine, runs), (base, synchronous)))  # fmt: skip
    ours, theirs = (np.concatenate([run["lengths"] for run in of]) for of in (runs, synchronous))
    wait, waited = (float(np.mean([run["wait"] for run in of])) for of in (runs, synchronous))
    return {
        "arm": name, "scores": [round(float(score), 4) for score in mine], "mean": round(float(mine.mean()), 4),
        "by_domain": {domain: round(float(np.mean([run["scores"][domain] for run in runs])), 4) for domain in runs[0]["scores"]},
        "within_noise": bool(mine.mean() >= base.mean() - 2 * math.sqrt(noise)), "noise": round(math.sqrt(noise), 4),
        "kl": round(float(np.mean([run["kl"] for run in runs])), 4), "wait_s": round(wait, 2), "wait_share": round(wait / waited, 4),
        "tokens_per_s": round(sum(run["tokens"] for run in runs) / sum(run["seconds"] for run in runs), 1),
        "lag": round(float(np.mean([run["lag"] for run in runs])), 3), "lag_max": max(run["lag_max"] for run in runs),
        "length": equivalence(ours, theirs),
    }  # fmt: skip


def equivalence(ours: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
    """Two one-sided tests of the means, and the largest gap between the distributions (Kolmogorov-Smirnov)."""
    mean = theirs.mean()
    error = math.sqrt(ours.var(ddof=1) / ours.size + theirs.var(ddof=1) / theirs.size)
    gap = (MARGIN * mean - abs(ours.mean() - mean)) / max(error, 1e-12)
    grid = np.arange(max(ours.max(), theirs.max()) + 1)
    apart = np.abs(np.searchsorted(np.sort(ours), grid, "right") / ours.size
                   - np.searchsorted(np.sort(theirs), grid, "right") / theirs.size).max()  # fmt: skip
    return {
        "mean": round(float(ours.mean()), 4), "relative": round(float(ours.mean() / mean - 1), 5), "z": round(float(gap), 2),
        "equivalent": bool(gap > LEVEL_Z), "largest_gap": round(float(apart), 5),
    }  # fmt: skip


def rows_of(name: str) -> list[dict[str, Any]]:
    return list(json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"])


def plot(rows: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "opd"})
    figure, (quality, speed) = plt.subplots(1, 2, figsize=(8, 3.2))
    bounds = [found for found in rows if found["arm"].isdigit()]
    places, names = range(len(bounds)), [found["arm"] for found in bounds]
    for place, found in zip(places, bounds, strict=True):
        quality.plot([place] * len(found["scores"]), found["scores"], "o", color="tab:blue", ms=4, alpha=0.5)
    quality.plot(places, [found["mean"] for found in bounds], color="tab:blue", label="mean over domains, each seed")
    quality.set(xlabel="rollout.staleness", ylabel="final pass@1", ylim=(0, 1.02), xticks=places, xticklabels=names)
    speed.plot(places, [found["tokens_per_s"] for found in bounds], "o-", color="tab:green")
    speed.set(
        xlabel="rollout.staleness", ylabel="trained tokens per second", ylim=(0, None), xticks=places, xticklabels=names
    )
    waiting = speed.twinx()
    waiting.plot(places, [found["wait_s"] for found in bounds], "s--", color="tab:red", ms=4)
    waiting.set(ylabel="trainer waited, seconds", ylim=(0, None))
    speed.yaxis.label.set_color("tab:green")
    waiting.yaxis.label.set_color("tab:red")
    quality.legend(frameon=False, fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(FIGURES / "async.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="*", default=[], choices=list(ARMS), help="beside the bounds")
    parser.add_argument("--steps", type=int, default=190)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--questions", type=int, default=500, help="of each domain")
    parser.add_argument("--processes", type=int, default=4, help="that sample for one run; 0: a thread does")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--directory", type=Path, help="keep the runs here, and go on with those that are there")
    parser.add_argument("--name", default=NAME, choices=[NAME, THREAD], help="of the file with the results")
    parser.add_argument("--plot", action="store_true", help="only draw what was measured")
    args = parser.parse_args()
    if args.plot:
        plot(rows_of(NAME))
        return
    changes = {str(bound): {"rollout": {"staleness": bound}} for bound in sorted({0, *args.staleness})}
    changes |= {name: ARMS[name] for name in args.arms}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.workers) as pool:
        directory = args.directory or Path(name)
        directory.mkdir(parents=True, exist_ok=True)
        jobs = {
            arm: [
                pool.submit(carry_out, f"{arm.replace(', ', '-')}-seed{seed}", recipe(change, seed, args), directory)
                for seed in range(args.seeds)
            ]
            for arm, change in changes.items()
        }
        found: dict[str, list[dict[str, Any]]] = {}
        rows: list[dict[str, Any]] = []
        for arm, waiting in jobs.items():
            found[arm] = [facts(job.result()) for job in waiting]
            rows.append(row(arm, found[arm], found["0"]))
            print(json.dumps(rows[-1]), flush=True)
            told = {name: getattr(args, name) for name in ("steps", "processes", "seeds", "workers")}
            save(args.name, {"margin": MARGIN, **told, "rows": rows})  # what is known so far
    if args.name == NAME:
        plot(rows)


if __name__ == "__main__":
    main()
