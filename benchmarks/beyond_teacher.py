"""Past an imperfect teacher: OPD stops at the teacher's level, OPD plus outcome advantage does not; nor does reward alone.

    python benchmarks/beyond_teacher.py --workers 2

The teacher is mediocre on purpose (`tiny/generalist` adds two numbers right in about two of three questions), the student
worse (`tiny/spelling` has forgotten how). Same start, rollouts and learning rate; only `outcome_weight` differs, and whether there is a
teacher: without the arm "reward alone" a high score would say nothing about what the teacher contributes.
Writes benchmarks/results/beyond-teacher.json and docs/figures/beyond-teacher.svg.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from runs import run_all, save, save_figure, saved

TASK, DOMAIN, STUDENT, TEACHER = "task:addition", "arithmetic", "tiny/spelling", "tiny/generalist"


ALONE = "reward alone"


def recipe(arm: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    weight = 1.0 if arm == ALONE else float(arm)
    advantage: dict[str, Any] = {"outcome_weight": weight, "baseline": "group", "std": True} if weight else {}
    if arm == ALONE:
        advantage["teacher_weight"] = 0
    return {
        "student": STUDENT, "teachers": {} if arm == ALONE else {DOMAIN: TEACHER}, "prompts": [{"source": TASK, "domain": DOMAIN}],
        "rollout": {"prompts": 16, "samples": 8, "max_new_tokens": 16},
        "objective": {"form": "policy_gradient", "advantage": advantage, "aggregate": "sequence_mean"},
        "train": {"steps": args.steps, "lr": args.lr, "warmup": 5, "schedule": "linear", "micro_tokens": 8192},
        "eval": {"prompts": args.prompts, "every": 15}, "device": "cpu", "threads": 1, "seed": seed,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--weights", type=float, nargs="+", default=[0.0, 1.0, 3.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=400, help="held-out prompts of an evaluation")
    parser.add_argument("--directory", type=Path, help="keep the runs here, and go on with those that are there")
    parser.add_argument("--draw", action="store_true", help="only draw the figure, from the results that are there")
    args = parser.parse_args()
    if args.draw:
        return draw(saved("beyond-teacher.json"))
    directory = args.directory or Path(tempfile.mkdtemp())
    arms = [*(f"{weight:g}" for weight in args.weights), ALONE]
    jobs = {name(arm, seed): recipe(arm, seed, args) for arm in arms for seed in range(args.seeds)}
    found = run_all(jobs, directory, args.workers)
    teacher = next(run["teacher"] for run in found.values() if run["teacher"] is not None)
    table = {}
    for arm in arms:
        finals = [found[name(arm, seed)]["curve"][-1][1] for seed in range(args.seeds)]
        table[arm] = {
            "mean": mean(finals),
            "by_seed": finals,
            "std": stdev(finals) if len(finals) > 1 else None,
        }
        print(f"{arm}: {mean(finals):.1%} against the teacher's {teacher:.1%}")
    save("beyond-teacher.json", {
        "task": TASK, "student": STUDENT, "teacher": TEACHER, "teacher_score": teacher, "held_out": args.prompts,
        "lr": args.lr, "seeds": args.seeds, "outcome_weights": table, "runs": found,
    })  # fmt: skip
    return draw(saved("beyond-teacher.json"))


def name(arm: str, seed: int) -> str:
    return f"{arm}, seed {seed}" if arm == ALONE else f"weight {arm}, seed {seed}"


def draw(results: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.2))
    for number, arm in enumerate(results["outcome_weights"]):
        for seed in range(results["seeds"]):
            curve = results["runs"][name(arm, seed)]["curve"]
            label = None if seed else "OPD alone" if arm == "0" else arm if arm == ALONE else f"OPD + {arm} x outcome"
            axis.plot([x / 1000 for x, _ in curve], [y for _, y in curve], color=f"C{number}", label=label, alpha=0.8)
    axis.axhline(results["teacher_score"], color="0.4", linestyle=":", label="the imperfect teacher")
    axis.set(xlabel="sampled tokens (thousands)", ylabel="held-out score (greedy)", title="Past an imperfect teacher")
    save_figure(figure, axis, "beyond-teacher.svg")


if __name__ == "__main__":
    main()
