"""The dispute ledger: what papers say against each other, at equal budgets, with random gates as controls.

    python benchmarks/disputes.py --directory DIR --workers 16

One domain of tiny models (addition; `tiny/generalist` learns from `tiny/arithmetic`), the same rollouts per step for all, two tuning
runs per arm. Writes benchmarks/results/disputes.json and docs/figures/disputes.svg.
"""

from __future__ import annotations

import argparse
from typing import Any

from integration.arms import EXACT, GRPO, SAMPLED, SAMPLED_REWARD, TOP_K
from integration.editions import Edition
from integration.study import Recipe, arguments, difference, edition_of, score, spread, tuned
from runs import save, save_figure, saved

DOMAIN, TEACHER, GROUP = "arithmetic", "tiny/arithmetic", 8
K2: dict[str, Any] = {"form": "k2", "coefficient": 0.3}
GATED: dict[str, Any] = {**K2, "gated": "zero"}


def scope(power: float) -> list[dict[str, Any]]:
    right: list[Any] = ["correct", *([{"kind": "perplexity", "of": "student", "power": power}] if power else [])]
    return [
        {"form": "cross_entropy", "on": ["student"], "gate": right},
        {"form": "policy_gradient", "gate": ["wrong", {"kind": "perplexity", "of": "teacher", "power": -1.0}]},
    ]


def arms(steps: int) -> dict[str, tuple[int, Any]]:
    """Name -> samples per prompt, objective."""
    half = max(steps // 2, 1)
    switch = [{**SAMPLED, "coefficient": {"until": half}}, {**GRPO, "coefficient": {"after": half}}]
    return {
        "full vocabulary": (1, EXACT),
        "top 16": (1, TOP_K),
        "sampled token": (1, SAMPLED),
        "TIP: unsure half": (1, {**EXACT, "gate": {"kind": "entropy", "share": 0.5}}),
        "TIP: soft or": (1, {**EXACT, "gate": {"kind": "soft_or", "share": 0.5}}),
        "SelecTKD: accepted": (1, {**EXACT, "gate": {"kind": "selectkd"}}),
        "random half": (1, {**EXACT, "gate": {"kind": "random", "share": 0.5}}),
        "reward alone": (GROUP, GRPO),
        "KDRL: teacher where wrong": (GROUP, [GRPO, {**GATED, "gate": "wrong"}]),
        "teacher where right": (GROUP, [GRPO, {**GATED, "gate": "correct"}]),
        "teacher everywhere": (GROUP, [GRPO, K2]),
        "teacher at random": (GROUP, [GRPO, {**GATED, "gate": {"kind": "random", "share": 0.5}}]),
        "SCOPE as published": (GROUP, scope(1.0)),
        "SCOPE as coded": (GROUP, scope(-1.0)),
        "SCOPE unweighted": (GROUP, scope(0.0)),
        "sum": (GROUP, SAMPLED_REWARD),
        "hard switch": (GROUP, switch),
    }


DISPUTES = {  # what one side says is better, and what the other does
    "full vocabulary (DeepSeek-V4) or sampled token (Nemotron, Thinking Machines)": ("full vocabulary", "sampled token"),
    "TIP's unsure half or SelecTKD's accepted tokens": ("TIP: unsure half", "SelecTKD: accepted"),
    "TIP's unsure half or any half": ("TIP: unsure half", "random half"),
    "SelecTKD's accepted tokens or a random half": ("SelecTKD: accepted", "random half"),
    "the teacher where answers are wrong (KDRL) or where they are right": (
        "KDRL: teacher where wrong", "teacher where right",
    ),
    "the teacher where answers are wrong or everywhere": ("KDRL: teacher where wrong", "teacher everywhere"),
    "SCOPE's sign: published or coded": ("SCOPE as published", "SCOPE as coded"),
    "sum of both advantages or a hard switch": ("sum", "hard switch"),
}  # fmt: skip


def recipe_of(edition: Edition, samples: int, objective: Any) -> Recipe:
    def make(rate: float, seed: int, split: Any) -> dict[str, Any]:
        recipe = edition.recipe(edition.start, edition.domains, split, seed)
        recipe["objective"] = objective
        recipe["rollout"] |= {"prompts": max(edition.rollouts // samples, 1), "samples": samples}
        recipe["train"] |= {"lr": rate, "steps": edition.steps}
        recipe["eval"]["every"] = max(edition.steps // 3, 1)
        if objective is not GRPO:
            recipe["teachers"] = {DOMAIN: TEACHER}
        return recipe

    return make


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--tuning-only", action="store_true", help="report the best tuning runs: one seed, on tuning prompts"
    )
    parser.add_argument(
        "--arms", nargs="+", help="some of them, with hyphens for spaces and without colons; default: all"
    )
    args: argparse.Namespace = parser.parse_args()
    if args.draw:
        return draw(saved("disputes.json")["scores"])
    edition = edition_of(args, [DOMAIN])
    names = {name: name.replace(":", "").replace(" ", "-") for name in arms(args.steps)}
    names = {name: short for name, short in names.items() if short in (args.arms or names.values())}
    found = tuned(edition, {names[name]: recipe_of(edition, *arms(args.steps)[name]) for name in names}, args)
    scores = {name: spread([score(entry) for entry in found[short]]) for name, short in names.items()}
    ledger = {
        title: difference(found[names[ours]], found[names[theirs]]) | {"ours": ours, "theirs": theirs}
        for title, (ours, theirs) in DISPUTES.items()
        if ours in names and theirs in names
    }
    for title, entry in ledger.items():
        print(f"{title}: {entry['value']:+.3f} [{entry['low']:+.3f}, {entry['high']:+.3f}]")
    save("disputes.json", {
        "domain": DOMAIN, "steps": args.steps, "rollouts": args.rollouts, "seeds": 1 if args.tuning_only else args.seeds,
        "split": "tune" if args.tuning_only else "report", "rates": args.rates, "held_out": args.prompts,
        "scores": scores, "ledger": ledger, "runs": found,
    })  # fmt: skip
    return draw(scores)


def draw(scores: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 6))
    for number, entry in enumerate(reversed(scores.values())):
        axis.plot([entry["low"], entry["high"]], [number, number], color="C0", linewidth=2, alpha=0.6)
        axis.plot(entry["by_seed"], [number] * len(entry["by_seed"]), "o", color="C0", markersize=3)
    axis.set_yticks(range(len(scores)), list(reversed(scores)))
    axis.set(xlabel="held-out score (greedy) after equal rollouts; points: seeds, bars: 95 %")
    axis.plot([], [], "o", color="C0", label="one seed")
    save_figure(figure, axis, "disputes.svg")


if __name__ == "__main__":
    main()
