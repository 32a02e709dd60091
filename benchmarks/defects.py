"""Planted defects: what students make of what is wrong with their teacher or their reward.

    python benchmarks/defects.py --directory DIR --workers 16

Teachers are `tiny/arithmetic` after SFT on spoilt sums; students start as `tiny/generalist`, with the same rollouts for every method.

biased      sums that end in 7 are taught one too high. Defect: such a sum answered one too high (greedy)
noisy       one sum in five is taught a random wrong number. Defect: a wrong answer when sampled at temperature 1
hackable    the reward takes any answer that ends in 00. Defect: a wrong answer that ends in 00 (sampled); the teacher is sound

Amplification is the student's defect rate over the teacher's. Writes benchmarks/results/defects.json and docs/figures/defects.svg.
"""

from __future__ import annotations

import json
from typing import Any

from integration.arms import EXACT, FORWARD, GRPO, SAMPLED, SAMPLED_REWARD
from integration.domains import read
from integration.editions import REWARD, SFT, Edition
from integration.jobs import run_all
from integration.study import arguments, edition_of, score, spread
from runs import save, save_figure, saved

from opd.data.tasks import Dice

DOMAIN, GROUP = "arithmetic", 8
METHODS: dict[str, tuple[int, Any, dict[str, Any]]] = {  # samples per prompt, objective, further keys of `rollout`
    "exact reverse KL": (1, EXACT, {}),
    "exact forward KL": (1, FORWARD, {}),
    "sampled token": (1, SAMPLED, {}),
    "SFT on its samples": (1, SFT, {"teacher_share": 1.0}),
    "sampled token + reward": (GROUP, SAMPLED_REWARD, {}),
    "reward alone": (GROUP, GRPO, {}),
}
REWARDED = ("sampled token + reward", "reward alone")


def spoilt(kind: str, question: str, answer: str) -> str:
    dice = Dice(f"defects/{kind}/{question}")
    if kind == "biased" and answer.endswith("7"):
        return str(int(answer) + 1)
    if kind == "noisy" and dice.below(5) == 0:
        return str(20 + dice.below(179))
    return answer


def teacher_job(edition: Edition, kind: str, steps: int, rate: float) -> dict[str, Any]:
    path = edition.directory / f"{kind}.jsonl"
    rows = read(edition.data, DOMAIN, "train")
    rows = [row | {"completion": spoilt(kind, row["prompt"][0]["content"], row["answer"])} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe = edition.recipe("tiny/arithmetic", [DOMAIN], "report", 0)
    recipe["prompts"][0]["source"] = str(path.absolute())
    recipe["rollout"]["data_share"] = 1.0
    recipe["objective"] = SFT
    recipe["train"] |= {"steps": steps, "lr": rate}
    return measured(edition.job(f"teacher-{kind}", 0, "report", recipe=recipe, save=teacher_of(edition, kind)), kind)


def teacher_of(edition: Edition, kind: str) -> str:
    return str((edition.directory / "models" / kind).absolute())


def measured(job: dict[str, Any], kind: str) -> dict[str, Any]:
    job["measure"] |= {"answers": True} if kind == "biased" else {"answers": True, "temperature": 1.0}
    return job


def student_job(edition: Edition, kind: str, method: str, seed: int, rate: float) -> dict[str, Any]:
    samples, objective, rollout = METHODS[method]
    recipe = edition.recipe(edition.start, [DOMAIN], "report", seed)
    recipe["objective"] = objective
    recipe["rollout"] |= {"prompts": max(edition.rollouts // samples, 1), "samples": samples, **rollout}
    recipe["train"] |= {"steps": edition.steps, "lr": rate}
    if method != "reward alone":
        recipe["teachers"] = {DOMAIN: "tiny/arithmetic" if kind == "hackable" else teacher_of(edition, kind)}
    if kind == "hackable":
        recipe["rewards"] = [REWARD, {"kind": "format", "pattern": "00$"}]
    name = f"{kind}-{method}".replace(" + ", "-").replace(" ", "-")
    return measured(edition.job(name, seed, "report", recipe=recipe, scored=method != "reward alone"), kind)


def rate_of(kind: str, entry: dict[str, Any], edition: Edition) -> float:
    """How often the defect shows, of the answers where it can."""
    found = []
    for row, text in zip(read(edition.data, DOMAIN, "report"), entry["answers"][DOMAIN], strict=False):
        answer, said = row["answer"], text.strip()
        if kind == "biased" and answer.endswith("7"):
            found.append(said == str(int(answer) + 1))
        elif kind == "noisy":
            found.append(said != answer)
        elif kind == "hackable":
            found.append(said != answer and said.endswith("00"))
    return sum(found) / max(len(found), 1)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--teacher-steps", type=int, default=60)
    args = parser.parse_args()
    if args.draw:
        return draw(saved("defects.json")["defects"])
    edition = edition_of(args, [DOMAIN])
    teachers = {kind: teacher_job(edition, kind, args.teacher_steps, args.rates[0]) for kind in ("biased", "noisy")}
    told = run_all(list(teachers.values()), edition.directory, args.workers)
    methods = {
        kind: [method for method in METHODS if kind != "hackable" or method in (*REWARDED, "exact reverse KL")]
        for kind in ("biased", "noisy", "hackable")
    }
    jobs = {
        (kind, method, seed): student_job(edition, kind, method, seed, args.rates[-1] if method not in REWARDED else args.rates[0])
        for seed in range(args.seeds) for kind, chosen in methods.items() for method in chosen
    }  # fmt: skip
    found = run_all(list(jobs.values()), edition.directory, args.workers)
    table: dict[str, Any] = {}
    for kind, chosen in methods.items():
        teacher = rate_of(kind, told[teachers[kind]["name"]], edition) if kind in teachers else None
        table[kind] = {"teacher": teacher, "methods": {}}
        for method in chosen:
            entries = [found[jobs[kind, method, seed]["name"]] for seed in range(args.seeds)]
            rates = [rate_of(kind, entry, edition) for entry in entries]
            table[kind]["methods"][method] = {
                "rate": spread(rates), "score": spread([score(entry) for entry in entries]),
                "amplification": spread([rate / teacher for rate in rates]) if teacher else None,
            }  # fmt: skip
            print(f"{kind:9} {method:24} defect {sum(rates) / len(rates):.3f} (teacher {teacher}), score {table[kind]['methods'][method]['score']['value']:.3f}")  # fmt: skip
    save("defects.json", {
        "steps": args.steps, "rollouts": args.rollouts, "seeds": args.seeds, "rates": args.rates, "held_out": args.prompts, "defects": table,
    })  # fmt: skip
    return draw(table)


def draw(table: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(table), figsize=(12, 3.8))
    for axis, (kind, entry) in zip(axes, table.items(), strict=True):
        for number, found in enumerate(entry["methods"].values()):
            axis.plot(found["rate"]["by_seed"], [number] * len(found["rate"]["by_seed"]), "o", color=f"C{number}")
        axis.set_yticks(range(len(entry["methods"])), list(entry["methods"]), fontsize=7)
        if entry["teacher"] is not None:
            axis.axvline(entry["teacher"], color="0.4", linestyle=":", label="the teacher's")
        axis.set(title=kind, xlabel="defect rate")
        axis.plot([], [], "o", color="0.5", label="one seed")
    save_figure(figure, axes[-1], "defects.svg")


if __name__ == "__main__":
    main()
