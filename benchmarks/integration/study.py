"""A study of a few arms on tiny models: each with the same tuning runs, then every seed on prompts for reporting."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from integration.editions import Edition, tiny
from integration.jobs import run_all
from integration.scores import share

TUNING_SEED = 100
Recipe = Callable[[float, int, Any], dict[str, Any]]  # learning rate, seed, split -> recipe


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path("runs") / Path(sys.argv[0]).stem
    parser.add_argument(
        "--directory", type=Path, default=default, help="the runs go here; what is there is not repeated"
    )
    parser.add_argument("--draw", action="store_true", help="only draw the figure, from the results that are there")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rollouts", type=int, default=128, help="per step")
    parser.add_argument("--rates", type=float, nargs="+", default=[4e-4, 1.2e-3], help="learning rates of tuning runs")
    parser.add_argument("--prompts", type=int, default=500, help="held-out prompts of a domain")
    return parser


def edition_of(args: argparse.Namespace, domains: list[str]) -> Edition:
    edition = tiny(args.directory)
    edition.domains, edition.steps, edition.rollouts, edition.prompts = domains, args.steps, args.rollouts, args.prompts
    edition.curve_prompts = min(args.prompts, 100)
    edition.counts = {
        "train": max(args.prompts * 6, 100), "screen": 8, "tune": min(args.prompts, 500), "report": args.prompts,
    }  # fmt: skip
    edition.write_data()
    return edition


def score(entry: Mapping[str, Any]) -> float:
    return mean(share(text) for text in entry["marks"].values())


def tuned(
    edition: Edition, arms: Mapping[str, Recipe], args: argparse.Namespace, measure: Mapping[str, Any] | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Arm -> its entries, one per seed, at the rate that was best on tuning prompts."""

    def job(arm: str, rate: float, seed: int, split: Any) -> dict[str, Any]:
        recipe = arms[arm](rate, seed, split)
        made = edition.job(arm, seed, split, tags=(f"{rate:g}",), recipe=recipe, settings={"lr": rate}, scored=bool(recipe.get("teachers")))  # fmt: skip
        made["measure"] |= measure or {}
        return made

    tuning = {(arm, rate): job(arm, rate, TUNING_SEED, "tune") for arm in arms for rate in args.rates}
    found = run_all(list(tuning.values()), edition.directory, args.workers)
    best = {arm: max(args.rates, key=lambda rate: score(found[tuning[arm, rate]["name"]])) for arm in arms}
    if args.tuning_only:
        return {arm: [found[tuning[arm, best[arm]]["name"]]] for arm in arms}
    jobs = {(arm, seed): job(arm, best[arm], seed, "report") for seed in range(args.seeds) for arm in arms}
    found = run_all(list(jobs.values()), edition.directory, args.workers)
    return {arm: [found[jobs[arm, seed]["name"]] for seed in range(args.seeds)] for arm in arms}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean over seeds with a 95 % bootstrap interval."""
    draws, array = np.random.default_rng(0), np.array(values, dtype=float)
    means = draws.choice(array, (2000, array.size)).mean(1)
    return {"value": float(array.mean()), "low": float(np.quantile(means, 0.025)), "high": float(np.quantile(means, 0.975)), "by_seed": list(values)}  # fmt: skip


def difference(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean score of one arm less another's, with a 95 % interval over seeds and prompts, paired by prompt."""
    domains, draws = list(ours[0]["marks"]), np.random.default_rng(0)
    a, b = (_marks(entries, domains) for entries in (ours, theirs))
    values = []
    for _ in range(2000):
        rows = draws.integers(a.shape[1], size=a.shape[1])
        mine, other = draws.integers(a.shape[0], size=a.shape[0]), draws.integers(b.shape[0], size=b.shape[0])
        values.append(a[np.ix_(mine, rows)].mean() - b[np.ix_(other, rows)].mean())
    low, high = np.quantile(values, (0.025, 0.975))
    return {"value": float(a.mean() - b.mean()), "low": float(low), "high": float(high)}


def _marks(entries: Sequence[Mapping[str, Any]], domains: Sequence[str]) -> np.ndarray:
    """(seeds, prompts of all domains)"""
    return np.array([[int(mark) for name in domains for mark in entry["marks"][name]] for entry in entries], dtype=float)  # fmt: skip
