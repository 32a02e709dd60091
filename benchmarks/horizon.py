"""The horizon law: how the distance to the teacher grows with the length of the answer, on-policy and off-policy.

    python benchmarks/horizon.py --directory DIR --workers 16

One task (shift every letter along the alphabet) with answers of 5 to 20 tokens. Per length, SFT makes a start of `tiny/generalist` that has 0.3 of
the answers right (students that know nothing learn nothing from their own answers), and a teacher of the start; then students
learn from it for the same number of answer tokens: on their own answers (exact reverse KL), or on the teacher's (forward KL, which
is behaviour cloning). Regret is the KL of whole answers, student to teacher, on the student's own samples: the sum over tokens.
Cloning's bound grows with T squared, the on-policy one with T. The slopes of log regret over log T are kept, but three lengths are too few for an exponent.
Writes benchmarks/results/horizon.json and docs/figures/horizon.svg.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from integration.editions import SFT, Edition
from integration.jobs import run_all
from integration.scores import share
from integration.study import arguments, edition_of, spread
from runs import save, save_figure, saved

from opd.data.tasks import LETTERS, Dice

DOMAIN, LEVEL = "shift", 0.3
METHODS: dict[str, tuple[float, dict[str, Any]]] = {  # share of answers that the teacher writes, objective
    "on-policy": (0.0, {"form": "direct", "divergence": "reverse_kl"}),
    "on-policy, forward KL": (0.0, {"form": "direct", "divergence": "forward_kl"}),
    "off-policy": (1.0, {"form": "direct", "divergence": "forward_kl", "on": ["teacher"]}),
    "half of each": (0.5, {"form": "direct", "divergence": "forward_kl", "on": ["student", "teacher"]}),
}


def write_questions(directory: Path, length: int, prompts: int) -> None:
    for split, count in {"train": 20 * prompts, "tune": prompts, "report": prompts}.items():
        rows = []
        for index in range(count):
            dice = Dice(f"horizon/{length}/{split}/{index}")
            shift, word = (
                1 + dice.below(3),
                "".join(Dice(f"horizon/{length}/{split}/{index}/{at}").letters(1) for at in range(length)),
            )
            answer = "".join(LETTERS[(LETTERS.index(letter) + shift) % 26] for letter in word)
            messages = [{"role": "user", "content": f"shift {shift} {word}"}]
            rows.append({"prompt": messages, "completion": answer, "answer": answer, "domain": DOMAIN})
        path = directory / f"{DOMAIN}-{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def of_length(edition: Edition, length: int, prompts: int) -> Edition:
    from dataclasses import replace

    made = replace(edition, directory=edition.directory / f"T{length}", domains=[DOMAIN], max_new_tokens=length + 2)
    write_questions(made.data, length, prompts)
    return made


def base(edition: Edition, tokens: int, length: int, seed: int, split: Any) -> dict[str, Any]:
    """`tokens` of answers per step, whatever their length."""
    recipe = edition.recipe(str(model_of(edition, "start")), [DOMAIN], split, seed)
    recipe["rollout"]["prompts"] = max(tokens // length, 1)
    recipe["train"]["steps"] = edition.steps
    return recipe


def teacher_job(edition: Edition, tokens: int, length: int, rate: float, steps: int) -> dict[str, Any]:
    """Two stages by SFT on gold answers: the start, which ends at 0.3, and from there the teacher."""
    recipe = base(edition, tokens, length, 0, "tune")
    recipe["student"] = edition.start
    recipe["rollout"]["data_share"] = 1.0
    recipe["objective"] = SFT
    recipe["train"] |= {"lr": rate, "steps": steps, "schedule": "constant"}
    stop = {"every": 5, "early_stop": {"kind": "target", "value": LEVEL}}
    recipe["stages"] = [{"name": "start", "eval": stop}, {"name": "teacher", "train": {"schedule": "linear"}}]
    saved = {name: str(model_of(edition, name)) for name in ("start", "teacher")}
    return edition.job("teacher", 0, "tune", recipe=recipe, save_stages=saved)


def model_of(edition: Edition, name: str) -> Path:
    return (edition.directory / "models" / name).absolute()


def student_job(edition: Edition, method: str, tokens: int, length: int, rate: float, seed: int) -> dict[str, Any]:
    """The last stage only looks: its KL is on the student's own samples, before a step that changes nothing."""
    written, objective = METHODS[method]
    recipe = base(edition, tokens, length, seed, "report")
    recipe["teachers"] = {DOMAIN: str(model_of(edition, "teacher"))}
    recipe["train"]["lr"] = rate
    recipe["stages"] = [
        {"name": "learn", "objective": objective, "rollout": {"teacher_share": written}},
        {
            "name": "look",
            "objective": {"form": "direct", "divergence": "reverse_kl"},
            "train": {"lr": 1e-12, "warmup": 0, "steps": 1},
            "rollout": {"prompts": edition.prompts},
        },
    ]
    name = method.replace(",", "").replace(" ", "-")
    return edition.job(name, seed, "report", recipe=recipe, scored=True)


def regret(entry: dict[str, Any]) -> dict[str, float]:
    """Nats per answer: the mean KL per token of the last look, times tokens per answer."""
    look = entry["last"]
    return {"per_token": look["reverse_kl"], "regret": look["reverse_kl"] * look["response_length"], "error": 1 - share(entry["marks"][DOMAIN])}  # fmt: skip


def slope(lengths: list[int], values: list[float]) -> float:
    return float(np.polyfit(np.log(lengths), np.log(np.maximum(values, 1e-9)), 1)[0])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[5, 10, 20])
    parser.add_argument("--tokens", type=int, default=1280, help="of answers, per step")
    parser.add_argument("--teacher-steps", type=int, default=150, help="and at most as many for the start")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    args = parser.parse_args()
    if args.draw:
        found = saved("horizon.json")
        return draw(found["lengths"], found["methods"])
    edition = edition_of(args, ["ciphers"])
    editions = {length: of_length(edition, length, args.prompts) for length in args.lengths}
    teachers = {
        length: teacher_job(made, args.tokens, length, args.rates[-1], args.teacher_steps)
        for length, made in editions.items()
    }
    for made in editions.values():
        (made.directory / "entries").mkdir(parents=True, exist_ok=True)
    for length, job in teachers.items():
        job["name"] = f"T{length}-teacher"
    told = run_all(list(teachers.values()), edition.directory, args.workers)
    jobs = {
        (method, length, seed): student_job(made, method, args.tokens, length, args.rates[0], seed)
        for seed in range(args.seeds)
        for length, made in editions.items()
        for method in args.methods
    }
    for (_, length, _), job in jobs.items():
        job["name"] = f"T{length}-{job['name']}"
    found = run_all(list(jobs.values()), edition.directory, args.workers)
    values = {key: regret(found[job["name"]]) for key, job in jobs.items()}
    table: dict[str, Any] = {}
    for method in args.methods:
        by_seed = [[values[method, length, seed]["regret"] for length in args.lengths] for seed in range(args.seeds)]
        table[method] = {
            "slope": spread([slope(args.lengths, row) for row in by_seed]), "regret_by_seed": by_seed,
            "error": [mean(values[method, length, seed]["error"] for seed in range(args.seeds)) for length in args.lengths],
        }  # fmt: skip
        print(f"{method}: regret grows like T^{table[method]['slope']['value']:.2f}; {np.mean(by_seed, 0).round(3)}")
    evals = {length: told[job["name"]]["evals"] for length, job in teachers.items()}
    levels = {
        length: {name: found[name][DOMAIN]["after"] for name in ("start", "teacher")} for length, found in evals.items()
    }
    save("horizon.json", {
        "lengths": args.lengths, "answer_tokens_per_step": args.tokens, "steps": args.steps, "rate": args.rates[0], "seeds": args.seeds,
        "teachers": levels, "methods": table,
    })  # fmt: skip
    return draw(args.lengths, table)


def draw(lengths: list[int], table: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.4))
    for number, (method, entry) in enumerate(table.items()):
        for row in entry["regret_by_seed"]:
            axis.plot(lengths, row, color=f"C{number}", alpha=0.3)
        axis.plot(lengths, np.mean(entry["regret_by_seed"], 0), "o-", color=f"C{number}", label=method)
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="tokens of an answer (T)",
        ylabel="KL of a whole answer to the teacher (nats)",
    )
    save_figure(figure, axis, "horizon.svg")


if __name__ == "__main__":
    main()
