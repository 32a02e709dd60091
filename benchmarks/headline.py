"""OPD against RL by the protocol of docs/evidence/protocol.md: what a student costs at 50, 80 and 100 % of what RL gains.

    python benchmarks/headline.py --directory DIR --workers 16                 # tiny models on a CPU
    python benchmarks/headline.py --edition smol --domain sums --directory DIR # SmolLM2; needs the start of integrate.py

Five arms: the exact divergence, the sampled token, GRPO, SFT on the teacher's samples, SFT on gold answers. Each has the same
number of tuning runs (learning rates times group or batch sizes), on tuning prompts, and is then run with every seed on
prompts for reporting. Two teachers: what SFT on gold made of the same start, and what RL made of it (which is circular, and
says so). A level that a run never reaches is censored at what the run cost. Writes benchmarks/results/headline-EDITION.json and
docs/figures/headline-EDITION.svg.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise, product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from integration import editions
from integration.arms import EXACT, GRPO, SAMPLED
from integration.editions import SFT, Edition
from integration.jobs import run_all
from integration.report import parameters
from integration.scores import flops
from runs import save, save_figure, saved

LEVELS = (0.5, 0.8, 1.0)
TUNING_SEED, PLATEAU = 100, 3  # evaluations whose mean is where a run ended
TEACHERS = {"gold": "sft-gold", "rl": "grpo"}  # the arm whose model teaches
OBJECTIVES: dict[str, Any] = {
    "grpo": GRPO, "sft-gold": SFT, "exact": EXACT, "sampled": SAMPLED, "sft-teacher": SFT,
}  # fmt: skip
TAUGHT = ("exact", "sampled", "sft-teacher")
Reached = list[tuple[float, bool]]  # per seed: what was spent, and whether the level was reached by then


def recipe(edition: Edition, arm: str, rate: float, size: int, seed: int, split: Any, args: Any) -> dict[str, Any]:
    """`size`: samples per prompt where samples are drawn, else rows per step, of `rollouts` and of half of them."""
    found = edition.recipe(args.start, [args.domain], split, seed)
    samples = size if arm in ("grpo", "exact", "sampled") else 1
    rows = edition.rollouts if samples > 1 or size == min(args.sizes[arm]) else edition.rollouts // 2
    found["rollout"] |= {"prompts": max(rows // samples, 1), "samples": samples}
    found["rollout"] |= {"data_share": 1.0} if arm == "sft-gold" else {}
    found["rollout"] |= {"teacher_share": 1.0} if arm == "sft-teacher" else {}
    found["objective"] = OBJECTIVES[arm]
    steps = args.rl_steps if arm == "grpo" else args.steps
    found["train"] |= {"steps": steps, "lr": rate, "schedule": "constant"}
    found["eval"] |= {"prompts": args.prompts, "every": max(steps // args.points, 1)}
    return found


def jobs_of(edition: Edition, arm: str, teacher: str, setting: tuple[float, int], seed: int, split: Any, args: Any) -> dict[str, Any]:  # fmt: skip
    """One run; `teacher` is empty where there is none."""
    rate, size = setting
    made = recipe(edition, arm, rate, size, seed, split, args)
    if teacher:
        made["teachers"] = {args.domain: {"model": args.models[teacher]}}
    saved = {"save": model_of(edition, arm, setting)} if split == "tune" and arm in TEACHERS.values() else {}
    name = f"{arm}-{teacher}" if teacher else arm
    job = edition.job(
        name, seed, split, tags=(f"{rate:g}", size), recipe=made, scored=arm in ("exact", "sampled"),
        settings={"lr": rate, "size": size}, **saved,
    )  # fmt: skip
    return job


def model_of(edition: Edition, arm: str, setting: tuple[float, int]) -> str:
    return str((edition.directory / "models" / f"{arm}-{setting[0]:g}-{setting[1]}").absolute())


def settings_of(arm: str, args: argparse.Namespace) -> list[tuple[float, int]]:
    rates = args.rl_rates if arm == "grpo" else args.rates
    return list(product(rates, args.sizes[arm]))


def tune(edition: Edition, arms: list[tuple[str, str]], args: argparse.Namespace) -> dict[str, tuple[float, int]]:
    """The best setting of every arm: the highest score at its end, on tuning prompts."""
    jobs = {
        (arm, teacher, setting): jobs_of(edition, arm, teacher, setting, TUNING_SEED, "tune", args)
        for arm, teacher in arms
        for setting in settings_of(arm, args)
    }
    found = run_all(list(jobs.values()), edition.directory, args.workers)
    best: dict[str, tuple[float, int]] = {}
    scores: dict[str, float] = {}
    for (_, _, setting), job in jobs.items():
        name, score = job["arm"], plateau(found[job["name"]], args.domain)
        if score > scores.get(name, -1.0):
            best[name], scores[name] = setting, score
    return best


def plateau(entry: dict[str, Any], domain: str) -> float:
    return mean(point["scores"][domain] for point in entry["curve"][-PLATEAU:])


def make_teachers(edition: Edition, best: dict[str, tuple[float, int]], args: argparse.Namespace) -> dict[str, float]:
    """The models of the best tuning runs, and what they cost."""
    costs, args.models = {}, {}
    for teacher, arm in TEACHERS.items():
        job = jobs_of(edition, arm, "", best[arm], TUNING_SEED, "tune", args)
        entry = json.loads(Path(job["entry"]).read_text(encoding="utf-8"))
        costs[teacher] = flops(entry["cost"], parameters(edition), parameters(edition))
        args.models[teacher] = model_of(edition, arm, best[arm])
    return costs


def points_of(entry: dict[str, Any], domain: str, edition: Edition, start: float) -> list[tuple[float, float]]:
    """(FLOPs, score) at every evaluation: cost follows the tokens of the answers."""
    size = parameters(edition)
    whole, last = flops(entry["cost"], size, size), entry["curve"][-1]["tokens"]
    return [(0.0, start), *((whole * point["tokens"] / last, point["scores"][domain]) for point in entry["curve"])]


def cost_to(points: list[tuple[float, float]], level: float) -> tuple[float, bool]:
    """FLOPs until the level is first reached, on the straight line between evaluations; else all of them, censored."""
    for (spent, score), (next_spent, next_score) in pairwise(points):
        if next_score >= level:
            part = (level - score) / (next_score - score) if next_score > score else 0.0
            return spent + max(part, 0.0) * (next_spent - spent), True
    return points[-1][0], False


def factor(ours: Reached, rl: Reached, draws: int = 2000) -> dict[str, Any] | None:
    """RL's mean cost over an arm's, with a 95 % interval from drawing seeds anew. None: the arm missed the level with a seed, so its
    cost is not known. Where RL missed it, its cost is more than was spent: the factor is a lower bound, and has no upper end.
    """
    if not all(there for _, there in ours):
        return None
    rng = np.random.default_rng(0)
    a, b = (np.array([cost for cost, _ in found]) for found in (ours, rl))
    found = [rng.choice(b, b.size).mean() / rng.choice(a, a.size).mean() for _ in range(draws)]
    at_least = not all(there for _, there in rl)
    high = None if at_least else float(np.quantile(found, 0.975))
    return {"value": float(b.mean() / a.mean()), "low": float(np.quantile(found, 0.025)), "high": high, "at_least": at_least}  # fmt: skip


def told(entry: dict[str, Any]) -> str:
    if entry["factor"] is None:
        return f"missed by {entry['censored']} of {len(entry['by_seed'])}"
    return f"RL costs {_times(entry['factor'])} the FLOPs, {_times(entry['tokens_factor'])} the tokens of answers"


def _times(found: dict[str, Any]) -> str:
    high = "" if found["high"] is None else f"{found['high']:.1f}"
    return f"{'at least ' if found['at_least'] else ''}{found['value']:.1f}x [{found['low']:.1f}, {high}]"


def summarise(edition: Edition, runs: dict[str, list[dict[str, Any]]], teachers: dict[str, float], args: argparse.Namespace) -> dict[str, Any]:  # fmt: skip
    start = mean(entry["evals"]["main"][args.domain]["before"] for entry in runs["grpo"])
    gain = mean(plateau(entry, args.domain) for entry in runs["grpo"]) - start
    curves = {name: [points_of(entry, args.domain, edition, start) for entry in found] for name, found in runs.items()}
    answers = {
        name: [[(0.0, start), *((float(point["tokens"]), point["scores"][args.domain]) for point in entry["curve"])] for entry in found]
        for name, found in runs.items()
    }  # fmt: skip
    levels = {}
    for part in LEVELS if gain > 0 else ():  # where RL gained nothing, there is no level to reach
        level = start + part * gain
        reached = {name: [cost_to(points, level) for points in found] for name, found in curves.items()}
        tokens = {name: [cost_to(points, level) for points in found] for name, found in answers.items()}
        table: dict[str, Any] = {}
        for name, found in reached.items():
            costs = [cost for cost, _ in found]
            table[name] = {
                "flops": mean(costs), "by_seed": costs, "censored": sum(not there for _, there in found), "factor": factor(found, reached["grpo"]),
                "tokens": mean(spent for spent, _ in tokens[name]), "tokens_factor": factor(tokens[name], tokens["grpo"]),
            }  # fmt: skip
            teacher = name.rpartition("-")[2]
            if name.startswith(TAUGHT) and teacher in teachers:
                saved = mean(cost for cost, _ in reached["grpo"]) - mean(costs)
                known = table[name]["factor"] is not None and saved > 0  # at most so many, where RL missed the level
                table[name]["break_even_students"] = teachers[teacher] / saved if known else None
        levels[f"{part:g}"] = {"score": level, "rl_censored": table["grpo"]["censored"], "arms": table}
    return {"start": start, "rl_gain": gain, "levels": levels, "curves": curves}


def main() -> None:
    args = arguments().parse_args()
    name = "-".join(["headline", args.edition, *args.name, *(["tuning"] if args.tuning_only else [])])
    if args.draw:
        return draw(saved(f"{name}.json"), name)
    edition: Edition = getattr(editions, args.edition)(args.directory)
    edition.domains, edition.prompts = [args.domain], args.prompts
    edition.counts = {"train": args.train_rows, "screen": 8, "tune": args.prompts, "report": args.prompts}
    edition.rollouts, args.start = args.rollouts, args.start or edition.start
    if args.smallest:
        editions.smallest(edition)
    args.sizes = {arm: args.groups if arm == "grpo" else args.other_sizes for arm in OBJECTIVES}
    edition.write_data()
    best = tune(edition, [("grpo", ""), ("sft-gold", "")], args)
    teachers = make_teachers(edition, best, args)
    taught = [(arm, teacher) for teacher in args.teachers for arm in args.taught]
    best |= tune(edition, taught, args)
    seeds, split = ([TUNING_SEED], "tune") if args.tuning_only else (range(args.seeds), "report")
    jobs = {
        (arm, teacher, seed): jobs_of(edition, arm, teacher, best[f"{arm}-{teacher}" if teacher else arm], seed, split, args)
        for seed in seeds
        for arm, teacher in [("grpo", ""), ("sft-gold", ""), *taught]
    }  # fmt: skip
    found = run_all(list(jobs.values()), edition.directory, args.workers)
    runs: dict[str, list[dict[str, Any]]] = {}
    for job in jobs.values():
        runs.setdefault(job["arm"], []).append(found[job["name"]])
    results = summarise(edition, runs, teachers, args)
    if not results["levels"]:
        print(f"RL gained nothing from a start of {results['start']:.3f}: there is no level to compare at")
    for part, level in results["levels"].items():
        for arm, entry in level["arms"].items():
            print(f"{float(part):4.0%} of RL's gain ({level['score']:.3f}) {arm:18} {told(entry)}")
    save(f"{name}.json", {
        "edition": args.edition, "domain": args.domain, "student": args.start.rpartition("/")[2], "seeds": len(seeds), "split": split, "best": best,
        "tuning_runs": {arm: len(settings_of(arm, args)) for arm in OBJECTIVES}, "teachers_flops": teachers, "held_out": args.prompts,
        **results, "runs": runs,
    })  # fmt: skip
    return draw(results, name)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edition", choices=["tiny", "smol"], default="tiny")
    parser.add_argument("--domain", default="arithmetic")
    parser.add_argument("--start", help="the model that all begin with; default: the edition's own")
    parser.add_argument("--directory", type=Path, default=Path("runs/headline"))
    parser.add_argument("--name", nargs=1, default=[], help="of a further setting: results are headline-EDITION-NAME")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rl-steps", type=int, default=600)
    parser.add_argument("--rollouts", type=int, default=128)
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-4, 6e-4, 1.5e-3])
    parser.add_argument("--rl-rates", type=float, nargs="+", default=[1e-4, 3e-4, 6e-4])
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 16], help="samples per prompt that RL tries")
    parser.add_argument("--other-sizes", type=int, nargs="+", default=[1, 4], help="that the other arms try")
    parser.add_argument("--teachers", nargs="+", choices=list(TEACHERS), default=list(TEACHERS))
    parser.add_argument("--taught", nargs="+", choices=TAUGHT, default=list(TAUGHT), help="arms that learn from them")
    parser.add_argument(
        "--tuning-only", action="store_true", help="report the best tuning runs: one seed, on tuning prompts"
    )
    parser.add_argument("--draw", action="store_true", help="only draw the figure, from the results that are there")
    parser.add_argument("--points", type=int, default=20, help="evaluations of a run")
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--smallest", action="store_true", help="on a CPU, a handful of questions, for a test")
    parser.add_argument("--train-rows", type=int, default=4000)
    return parser


def draw(results: dict[str, Any], name: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.6))
    for number, (arm, curves) in enumerate(results["curves"].items()):
        for seed, points in enumerate(curves):
            label = None if seed else arm
            axis.plot([cost for cost, _ in points[1:]], [score for _, score in points[1:]], color=f"C{number}", alpha=0.7, label=label)  # fmt: skip
    for level in results["levels"].values():
        axis.axhline(level["score"], color="0.7", linestyle=":")
    axis.set(xscale="log", xlabel="FLOPs of the student's run (teachers given)", ylabel="held-out score (greedy)",
             title="OPD against RL; lines: 50, 80, 100 % of RL's gain")  # fmt: skip
    save_figure(figure, axis, f"{name}.svg")


if __name__ == "__main__":
    main()
