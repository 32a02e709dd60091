"""Noise of the gradient: the sampled token, top-k and the full vocabulary, with one to twelve teachers.

    python benchmarks/gradient_variance.py

Nothing is trained. `tiny/generalist` answers batches of the same number of prompts, divided among its teachers; each estimator's gradient of reverse KL is
taken on the same rollouts, batch after batch. Noise is E|g - E g|^2 / |E g|^2 of one batch, unbiased; `alignment` is the cosine
between the mean gradient and the full vocabulary's. Twelve teachers are the four specialists at three strengths: generalist + a (specialist - generalist).
Writes benchmarks/results/gradient-variance.json and docs/figures/gradient-variance.svg.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from runs import save, save_figure, saved
from torch import Tensor

import opd

TASKS = {"arithmetic": "task:addition", "spelling": "task:reverse", "sorting": "task:sort", "ciphers": "task:caesar"}
STRENGTHS = (1.0, 0.75, 0.5)
ESTIMATORS = ("sampled token", "top 4", "top 16", "full vocabulary")


def teachers_of(student: Any) -> list[tuple[str, Any]]:
    """(task, teacher), the four at full strength first."""
    found, base = [], {name: parameter.detach().clone() for name, parameter in student.module.named_parameters()}
    for strength in STRENGTHS:
        for name, task in TASKS.items():
            teacher = opd.Teacher(f"tiny/{name}", student, name=f"{name}-{strength:g}")
            with torch.no_grad():
                for key, parameter in teacher.model.module.named_parameters():
                    parameter.data = base[key] + strength * (parameter.data - base[key])
            found.append((task, teacher))
    return found


def loss_of(estimator: str, student: Any, teacher: Any, batch: Any, tokens: Tensor) -> Tensor:
    """Summed over tokens."""
    merge = [student.stop_ids]
    mine, other = student.predict(batch), teacher.predict(batch)
    if estimator == "sampled token":
        chosen = opd.token_logprobs(mine, tokens, merge=merge)
        with torch.no_grad():
            advantage = opd.token_logprobs(other, tokens, merge=merge) - chosen
        return -(advantage * chosen).sum()
    if estimator == "full vocabulary":
        return opd.divergence("reverse_kl", mine, other, merge=merge).loss
    k = int(estimator.removeprefix("top "))
    return opd.divergence("reverse_kl", mine, other, merge=merge, support="topk", k=k).loss


def gradients(student: Any, teachers: list[tuple[str, Any]], args: argparse.Namespace) -> dict[str, Tensor]:
    """Estimator -> (batches, parameters)."""
    sampler = opd.Sampler(student, max_new_tokens=12, seed=len(teachers))
    each = args.rollouts // len(teachers)
    found: dict[str, list[Tensor]] = {name: [] for name in ESTIMATORS}
    for number in range(args.batches):
        asked = [
            (teacher, sampler.sample(opd.prompts(task, each, start=each * (number * len(teachers) + place))))
            for place, (task, teacher) in enumerate(teachers)
        ]
        total = sum(rollout.response_ids.size for _, rollouts in asked for rollout in rollouts)
        for name in ESTIMATORS:
            student.module.zero_grad()
            for teacher, rollouts in asked:
                batch = opd.Pack.of(rollouts, student.device)
                ids = torch.cat([torch.as_tensor(rollout.response_ids).long() for rollout in rollouts])
                (loss_of(name, student, teacher, batch, ids) / total).backward()
            parts = [
                parameter.grad.flatten() for parameter in student.module.parameters() if parameter.grad is not None
            ]
            found[name].append(torch.cat(parts).clone())
    return {name: torch.stack(rows) for name, rows in found.items()}


def noise(rows: Tensor) -> dict[str, float]:
    """Unbiased: the squared length of the mean is less its own noise."""
    n, mean = rows.shape[0], rows.mean(0)
    variance = float(((rows - mean) ** 2).sum() / (n - 1))
    signal = float((mean**2).sum()) - variance / n
    return {"variance": variance, "signal": signal, "noise": variance / signal if signal > 0 else float("inf")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teachers", type=int, nargs="+", default=[1, 2, 4, 8, 12])
    parser.add_argument("--rollouts", type=int, default=96, help="of a batch, divided among the teachers")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--draw", action="store_true", help="only draw the figure, from the results that are there")
    args = parser.parse_args()
    if args.draw:
        return draw(saved("gradient-variance.json")["teachers"])
    torch.set_num_threads(1)
    student = opd.load_model("tiny/generalist")
    everyone = teachers_of(student)
    table: dict[str, Any] = {}
    for number in args.teachers:
        found = gradients(student, everyone[:number], args)
        full = found["full vocabulary"].mean(0)
        table[str(number)] = {
            name: noise(rows) | {"alignment": float(torch.cosine_similarity(rows.mean(0), full, dim=0))}
            for name, rows in found.items()
        }
        print(number, {name: round(entry["noise"], 2) for name, entry in table[str(number)].items()}, flush=True)
    save("gradient-variance.json", {"rollouts": args.rollouts, "batches": args.batches, "teachers": table})
    return draw(table)


def draw(table: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.5, 4))
    places = [int(number) for number in table]
    for name in ESTIMATORS:
        axis.plot(places, [table[str(number)][name]["noise"] for number in places], "o-", label=name)
    axis.set(yscale="log", xlabel="teachers", ylabel="noise of one batch: variance / squared mean", xticks=places)
    save_figure(figure, axis, "gradient-variance.svg")


if __name__ == "__main__":
    main()
