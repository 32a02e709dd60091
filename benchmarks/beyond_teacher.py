"""Past an imperfect teacher: OPD stops at the teacher's level, OPD plus outcome advantage does not.

    python benchmarks/beyond_teacher.py --workers 2

The teacher learned from answers that end in a wrong letter in most questions of one kind (a shift by 5: one in five) and
gets the rest right. The student starts from a model that cannot do the task, so it has no better knowledge of its own
(reverse KL is mode-seeking: a student that is sure of the right letter would not unlearn it). Writes benchmarks/results/beyond-teacher.json and docs/figures/beyond-teacher.svg.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from runs import FIGURES, carry_out, run_all, save

from opd.data.tasks import LETTERS, get_task

TASK, DOMAIN = "task:caesar", "ciphers"
PROMPTS = [{"source": TASK, "domain": DOMAIN}]
FIXED: dict[str, Any] = {"device": "cpu", "threads": 1, "student": "tiny/generalist", "prompts": PROMPTS}


def write_answers(path: Path, count: int, wrong: float) -> None:
    """Questions of the task; where the shift is 5, a share `wrong` of the answers ends in the next letter."""
    task, generator = get_task(TASK.removeprefix("task:")), random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for index in range(count):
            prompt = task.prompt("train", index)
            answer = prompt.fields["answer"]
            if prompt.messages[0]["content"].startswith("shift 5") and generator.random() < wrong:
                answer = answer[:-1] + LETTERS[(LETTERS.index(answer[-1]) + 1) % 26]
            file.write(json.dumps({"prompt": prompt.messages, "completion": answer}) + "\n")


def objective(weight: float) -> dict[str, Any]:
    advantage = {"outcome_weight": weight, "baseline": "group", "std": True} if weight else {}
    return {"form": "policy_gradient", "advantage": advantage, "aggregate": "sequence_mean"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--teacher-steps", type=int, default=200, help="supervised steps of the imperfect teacher")
    parser.add_argument("--wrong", type=float, default=0.9, help="share of wrong answers where the shift is 5")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--weights", type=float, nargs="+", default=[0.0, 2.0, 5.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("--directory", type=Path, help="keep the runs here, and go on with those that are there")
    args = parser.parse_args()
    directory = args.directory or Path(tempfile.mkdtemp())
    directory.mkdir(parents=True, exist_ok=True)
    write_answers(directory / "answers.jsonl", 20_000, args.wrong)
    teacher = FIXED | {
        "prompts": [{"source": str(directory / "answers.jsonl"), "domain": DOMAIN}],
        "rollout": {"prompts": 64, "max_new_tokens": 16, "data_share": 1.0}, "objective": {"form": "cross_entropy"},
        "train": {"steps": args.teacher_steps, "lr": 3e-4, "warmup": 5}, "eval": {"prompts": 0},
    }  # fmt: skip
    carry_out("teacher", teacher, directory)
    model = directory / "teacher" / "checkpoints" / "main" / f"step-{args.teacher_steps:06d}"
    jobs = {
        f"weight {weight:g}, seed {seed}": FIXED | {
            "student": "tiny/spelling", "teachers": {DOMAIN: str(model)}, "rollout": {"prompts": 16, "samples": 8, "max_new_tokens": 16},
            "objective": objective(weight), "train": {"steps": args.steps, "lr": 6e-4, "warmup": 5, "schedule": "linear"},
            "eval": {"prompts": args.prompts, "every": 15}, "seed": seed,
        }
        for weight in args.weights
        for seed in range(args.seeds)
    }  # fmt: skip
    found = run_all(jobs, directory, args.workers)
    details = json.loads((directory / "weight 0, seed 0" / "summary.json").read_text(encoding="utf-8"))["stages"][0]
    level = details["evals"][DOMAIN]["teacher"]
    table = {}
    for weight in args.weights:
        finals = [found[f"weight {weight:g}, seed {seed}"]["curve"][-1][1] for seed in range(args.seeds)]
        table[f"{weight:g}"] = {
            "mean": mean(finals),
            "by_seed": finals,
            "std": stdev(finals) if len(finals) > 1 else None,
        }
        print(f"outcome_weight {weight:g}: {mean(finals):.1%} against the teacher's {level:.1%}")
    save("beyond-teacher.json", {
        "task": TASK, "teacher_steps": args.teacher_steps, "wrong": args.wrong, "teacher": level, "start": details["evals"][DOMAIN]["before"],
        "score": "greedy", "held_out": args.prompts, "outcome_weights": table, "runs": found,
    })  # fmt: skip
    draw(found, args.weights, args.seeds, level)


def draw(found: dict[str, Any], weights: list[float], seeds: int, level: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.2))
    for number, weight in enumerate(weights):
        for seed in range(seeds):
            curve = found[f"weight {weight:g}, seed {seed}"]["curve"]
            label = None if seed else "OPD alone" if weight == 0 else f"OPD + {weight:g} x outcome"
            axis.plot([x / 1000 for x, _ in curve], [y for _, y in curve], color=f"C{number}", label=label, alpha=0.8)
    axis.axhline(level, color="0.4", linestyle=":", label="the imperfect teacher")
    axis.set(xlabel="sampled tokens (thousands)", ylabel="held-out score (greedy)", title="Past an imperfect teacher")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(FIGURES / "beyond-teacher.svg")


if __name__ == "__main__":
    main()
