"""OPD against RL from the same start: score against sampled tokens, at equal tokens per step.

    python benchmarks/opd_vs_rl.py --workers 2

The start is a model that has forgotten a skill (`tiny/spelling` on addition), the teacher one that has it. Ways to spend
128 rollouts per step: OPD with one sample per prompt and with eight, and with the exact divergence; GRPO; the hard switch;
the sum of both advantages. The same steps, learning rates and seeds for all; each method's rate is chosen by a run of its own on tuning
prompts, which are none of those reported on. Writes benchmarks/results/opd-vs-rl.json and docs/figures/opd-vs-rl.svg.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from integration.domains import Split
from integration.editions import REWARD, tiny
from runs import RESULTS, run_all, save, save_figure, tokens_to

TASK, DOMAIN, STUDENT, TEACHER = "task:addition", "arithmetic", "tiny/spelling", "tiny/arithmetic"
ROLLOUTS, TUNING_SEED = 128, 100
OUTCOME = {"teacher_weight": 0, "outcome_weight": 1, "baseline": "group", "std": True}
PPO = {"kind": "ppo", "low": 0.2, "high": 0.28}
SWITCH = 30  # steps of OPD before the hard switch

METHODS: dict[str, tuple[int, Any]] = {  # samples per prompt, objective
    "OPD, 1 sample": (1, {"form": "policy_gradient"}),
    "OPD, 8 samples": (8, {"form": "policy_gradient"}),
    "OPD, exact": (1, {"form": "direct", "divergence": "reverse_kl"}),
    "GRPO": (8, {"form": "policy_gradient", "advantage": OUTCOME, "surrogate": PPO}),
    "hard switch": (
        8,
        [
            {"form": "policy_gradient", "coefficient": {"until": SWITCH}},
            {"form": "policy_gradient", "coefficient": {"after": SWITCH}, "advantage": OUTCOME, "surrogate": PPO},
        ],
    ),
    "sum": (8, {"form": "policy_gradient", "advantage": {"outcome_weight": 1, "baseline": "group", "std": True}}),
}


def recipe(method: str, rate: float, seed: int, split: Split, args: argparse.Namespace) -> dict[str, Any]:
    samples, objective = METHODS[method]
    teachers = {} if method == "GRPO" else {DOMAIN: TEACHER}
    return {
        "student": STUDENT, "teachers": teachers, "prompts": args.edition.sources([DOMAIN], split), "rewards": REWARD,
        "rollout": {"prompts": ROLLOUTS // samples, "samples": samples, "max_new_tokens": 16}, "objective": objective,
        "train": {"steps": args.steps, "lr": rate, "warmup": 5, "micro_tokens": 8192},
        "eval": {"prompts": args.prompts, "every": args.every}, "device": "cpu", "threads": 1, "seed": seed,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--steps", type=int, default=600, help="of every method")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), help="GRPO among them")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=300, help="held-out prompts of an evaluation")
    parser.add_argument("--below", type=float, default=0.03, help="this far below the teacher's score is its level")
    parser.add_argument("--directory", type=Path, help="keep the runs here, and go on with those that are there")
    parser.add_argument("--draw", action="store_true", help="only draw the figure, from the results that are there")
    args = parser.parse_args()
    if args.draw:
        return draw(json.loads((RESULTS / "opd-vs-rl.json").read_text(encoding="utf-8")))
    directory = args.directory or Path(tempfile.mkdtemp())
    args.edition = tiny(directory)
    args.edition.counts = {"train": 4000, "screen": 8, "tune": args.prompts, "report": args.prompts}
    args.edition.write_data()
    tuning = run_all(
        {
            f"tuning {method}, lr {rate:g}": recipe(method, rate, TUNING_SEED, "tune", args)
            for method in args.methods
            for rate in args.rates
        },
        directory,
        args.workers,
    )
    best = {method: chosen(method, tuning, args) for method in args.methods}
    found = run_all(
        {
            f"{method}, lr {best[method]:g}, seed {seed}": recipe(method, best[method], seed, "report", args)
            for method in args.methods
            for seed in range(args.seeds)
        },
        directory,
        args.workers,
    )
    teacher = next(run["teacher"] for run in found.values() if run["teacher"] is not None)
    level = teacher - args.below
    methods = {method: summarise(method, best[method], args, found, level) for method in args.methods}
    grpo = methods["GRPO"]
    for method, entry in methods.items():
        entry["factor"] = round(grpo["tokens"] / entry["tokens"], 2) if entry["reached"] == args.seeds else None
        bound = "at least " if grpo["reached"] < args.seeds else ""
        told = "" if entry["factor"] is None else f"GRPO needs {bound}{entry['factor']}x; "
        print(f"{method:16} lr {entry['lr']:g}: {entry['tokens']:10,.0f} tokens to {level:.1%} ({entry['reached']} of {args.seeds} seeds); {told}"
              f"final {entry['final']:.1%}")  # fmt: skip
    save("opd-vs-rl.json", {
        "task": TASK, "student": STUDENT, "teacher": TEACHER, "teacher_score": teacher, "level": level, "steps": args.steps,
        "rollouts_per_step": ROLLOUTS, "rates": args.rates, "seeds": args.seeds, "switch": SWITCH, "held_out": args.prompts,
        "methods": methods, "runs": found, "tuning": tuning,
    })  # fmt: skip
    return draw(json.loads((RESULTS / "opd-vs-rl.json").read_text(encoding="utf-8")))


def chosen(method: str, tuning: dict[str, Any], args: argparse.Namespace) -> float:
    """The learning rate that is first at 90 % on tuning prompts; where none gets there, the one that ends highest."""

    def rank(rate: float) -> tuple[float, float]:
        curve = tuning[f"tuning {method}, lr {rate:g}"]["curve"]
        tokens = tokens_to(curve, 0.9)
        return (math.inf if tokens is None else tokens), -curve[-1][1]

    return float(min(args.rates, key=rank))


def summarise(method: str, rate: float, args: argparse.Namespace, found: dict[str, Any], level: float) -> dict[str, Any]:  # fmt: skip
    """A seed that missed the level counts all its tokens: a lower bound."""
    curves = [found[f"{method}, lr {rate:g}, seed {seed}"]["curve"] for seed in range(args.seeds)]
    tokens = {share: [tokens_to(curve, share) for curve in curves] for share in (0.8, 0.9, level)}
    spent = [one if one is not None else curve[-1][0] for one, curve in zip(tokens[level], curves, strict=True)]
    return {
        "lr": rate, "tokens": mean(spent), "reached": sum(one is not None for one in tokens[level]), "tokens_by_seed": tokens[level],
        "tokens_to_0.8": tokens[0.8], "tokens_to_0.9": tokens[0.9], "final": mean(curve[-1][1] for curve in curves),
    }  # fmt: skip


def draw(results: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.6))
    for number, (method, entry) in enumerate(results["methods"].items()):
        for seed in range(results["seeds"]):
            curve = results["runs"][f"{method}, lr {entry['lr']:g}, seed {seed}"]["curve"]
            label = f"{method} (lr {entry['lr']:g})" if seed == 0 else None
            axis.plot(
                [max(x, 1000) for x, _ in curve], [y for _, y in curve], color=f"C{number}", label=label, alpha=0.8
            )
    axis.axhline(results["teacher_score"], color="0.4", linestyle=":", label="teacher")
    axis.axhline(results["level"], color="0.7", linestyle=":")
    axis.set(
        xscale="log",
        xlabel="sampled tokens",
        ylabel="held-out score (greedy)",
        title="The same start and rollouts per step; one line per seed",
    )
    save_figure(figure, axis, "opd-vs-rl.svg")


if __name__ == "__main__":
    main()
