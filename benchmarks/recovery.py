"""Forgetting and its recovery: skills learnt one after the other, then distilled back from what each stage had left.

    python benchmarks/recovery.py --directory DIR --workers 16

`tiny/generalist` goes through its four domains one at a time, by RL or by SFT on gold answers, at rates high enough to forget. A last
stage then learns from the models that earlier stages saved, each in its own domain (GLM-5's cross-stage distillation, one sample per
prompt), or goes on with RL on all domains for the same number of rollouts; its rate is the better of two tuning runs.
Writes benchmarks/results/recovery.json and docs/figures/recovery.svg.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

from integration.arms import EXACT, GRPO
from integration.editions import SFT, Edition
from integration.study import Recipe, arguments, edition_of, spread, tuned
from runs import save, save_figure, saved

DOMAINS = ["arithmetic", "spelling", "sorting", "ciphers"]
GROUP, PROMISE = 8, 0.97  # of its peak that every earlier domain is brought back to
LEARNT = {"rl": 8e-4, "sft": 2e-3}  # and the rates of their stages
RECOVERED = ("opd", "rl")


def recipe_of(edition: Edition, learnt: str, recovered: str) -> Recipe:
    def make(rate: float, seed: int, split: Any) -> dict[str, Any]:
        return recipe(edition, learnt, recovered, rate, seed, split)

    return make


def recipe(edition: Edition, learnt: str, recovered: str, rate: float, seed: int, split: Any) -> dict[str, Any]:
    found = edition.recipe(edition.start, DOMAINS, split, seed)
    sources = {source["domain"]: source for source in found["prompts"]}
    grouped = {"prompts": max(edition.rollouts // GROUP, 1), "samples": GROUP}
    how = (
        {"objective": GRPO, "rollout": grouped}
        if learnt == "rl"
        else {"objective": SFT, "rollout": {"data_share": 1.0}}
    )
    last: dict[str, Any] = {"name": "recovery", "prompts": list(sources.values()), "train": {"lr": rate}}
    if recovered == "opd":
        last |= {"objective": EXACT, "teachers": {domain: f"stage:{domain}" for domain in DOMAINS}}
    else:
        last |= {"objective": GRPO, "rollout": grouped}
    found["train"] |= {"steps": edition.steps, "lr": LEARNT[learnt]}
    found["eval"]["prompts"] = edition.prompts
    found["stages"] = [
        *({"name": domain, "prompts": [sources[domain]], **how} for domain in DOMAINS),
        last,
    ]
    return found


def read(entry: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By domain: the peak (behind its own stage), what was left before the last stage, and behind it."""
    evals = entry["evals"]
    return {
        domain: {
            "peak": evals[domain][domain]["after"], "left": evals["recovery"][domain]["before"],
            "after": evals["recovery"][domain]["after"],
        } for domain in DOMAINS
    }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(rates=[3e-4, 1.2e-3], tuning_only=False)
    args = parser.parse_args()
    if args.draw:
        return draw(saved("recovery.json")["table"])
    edition = edition_of(args, DOMAINS)
    arms = {(learnt, recovered): f"{learnt}-then-{recovered}" for learnt in LEARNT for recovered in RECOVERED}
    found = tuned(edition, {name: recipe_of(edition, *arm) for arm, name in arms.items()}, args)
    table: dict[str, Any] = {}
    for learnt in LEARNT:
        for recovered in RECOVERED:
            entries = found[arms[learnt, recovered]]
            runs = [read(entry) for entry in entries]
            lost = [mean(run[name]["left"] / run[name]["peak"] for name in DOMAINS[:-1]) for run in runs]
            back = [mean(run[name]["after"] / run[name]["peak"] for name in DOMAINS[:-1]) for run in runs]
            least = [min(run[name]["after"] / run[name]["peak"] for name in DOMAINS[:-1]) for run in runs]
            kept = [run[DOMAINS[-1]]["after"] / run[DOMAINS[-1]]["peak"] for run in runs]
            table[f"{learnt}, recovery by {recovered}"] = {
                "left_of_peak": spread(lost), "after_of_peak": spread(back), "worst_domain": spread(least), "last_domain": spread(kept),
                "kept_the_promise": sum(value >= PROMISE for value in least), "rate": entries[0]["settings"]["lr"], "runs": runs,
            }  # fmt: skip
            print(f"{learnt}, recovery by {recovered}: {mean(lost):.2f} of the peak left, {mean(back):.2f} after, worst {mean(least):.2f}, last {mean(kept):.2f}")  # fmt: skip
    save("recovery.json", {
        "domains": DOMAINS, "steps_per_stage": args.steps, "rollouts": args.rollouts, "seeds": args.seeds,
        "rates_learnt": LEARNT, "rates_tried": args.rates,
        "held_out": args.prompts, "promise": PROMISE, "table": table,
    })  # fmt: skip
    return draw(table)


def draw(table: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4))
    for number, (name, entry) in enumerate(table.items()):
        for place, key in enumerate(("left_of_peak", "after_of_peak", "worst_domain", "last_domain")):
            spot = place + 0.15 * (number - 1.5)
            axis.plot([spot] * len(entry[key]["by_seed"]), entry[key]["by_seed"], "o", color=f"C{number}", alpha=0.7, label=None if place else name)  # fmt: skip
    axis.axhline(PROMISE, color="0.5", linestyle=":")
    axis.set_xticks(range(4), ["before the last stage", "after it", "worst earlier domain", "last domain"])
    axis.set(ylabel="share of the domain's peak")
    save_figure(figure, axis, "recovery.svg")


if __name__ == "__main__":
    main()
