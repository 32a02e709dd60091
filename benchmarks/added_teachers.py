"""Score per added teacher: the same start and rollouts, with one specialist more each time.

    python benchmarks/added_teachers.py --directory DIR --workers 16

`tiny/generalist` learns from the first one to four of its specialists, each in its own domain, by the exact divergence; always measured on all four
domains. Rollouts per step stay the same, so every further teacher leaves less for the others.
Writes benchmarks/results/added-teachers.json and docs/figures/added-teachers.svg.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

from integration.arms import EXACT
from integration.editions import Edition
from integration.jobs import run_all
from integration.scores import share
from integration.study import arguments, edition_of, spread
from runs import save, save_figure, saved

DOMAINS = ["arithmetic", "spelling", "sorting", "ciphers"]


def job(edition: Edition, number: int, seed: int, rate: float) -> dict[str, Any]:
    """The first `number` domains have a teacher and prompts."""
    taught = DOMAINS[:number]
    recipe = edition.recipe(edition.start, taught, "report", seed)
    recipe["objective"] = EXACT
    recipe["teachers"] = {domain: edition.specialist(domain) for domain in taught}
    recipe["train"] |= {"steps": edition.steps, "lr": rate}
    return edition.job(f"teachers-{number}", seed, "report", recipe=recipe, scored=True)


def main() -> None:
    args = arguments(__doc__).parse_args()
    if args.draw:
        found = saved("added-teachers.json")
        return draw(found["start"], found["teachers"])
    edition = edition_of(args, DOMAINS)
    numbers = range(1, len(DOMAINS) + 1)
    jobs = {(n, seed): job(edition, n, seed, args.rates[-1]) for seed in range(args.seeds) for n in numbers}
    start = edition.job("start", 0, "report", model=edition.start)
    found = run_all([start, *jobs.values()], edition.directory, args.workers)
    before = {domain: share(text) for domain, text in found[start["name"]]["marks"].items()}
    table: dict[str, Any] = {}
    for n in numbers:
        after = [found[jobs[n, seed]["name"]]["marks"] for seed in range(args.seeds)]
        scores = [{domain: share(marks[domain]) for domain in DOMAINS} for marks in after]
        table[str(n)] = {
            "mean": spread([mean(one.values()) for one in scores]),
            "taught": spread([mean(one[domain] for domain in DOMAINS[:n]) for one in scores]),
            "untaught": spread([mean(one[domain] for domain in DOMAINS[n:]) for one in scores]) if n < len(DOMAINS) else None,
            "scores": scores,
        }  # fmt: skip
        print(f"{n} teachers: mean {table[str(n)]['mean']['value']:.3f}, taught {table[str(n)]['taught']['value']:.3f}")
    save("added-teachers.json", {
        "domains": DOMAINS, "steps": args.steps, "rollouts": args.rollouts, "rate": args.rates[-1], "seeds": args.seeds,
        "held_out": args.prompts, "start": before, "teachers": table,
    })  # fmt: skip
    return draw(before, table)


def draw(before: dict[str, float], table: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.5, 4))
    for color, key, label in (("C0", "mean", "all domains"), ("C1", "taught", "domains with a teacher"), ("C2", "untaught", "the others")):  # fmt: skip
        places = [int(n) for n, entry in table.items() if entry[key]]
        axis.plot(places, [table[str(n)][key]["value"] for n in places], "-", color=color, label=label)
        for n in places:
            axis.plot(
                [n] * len(table[str(n)][key]["by_seed"]), table[str(n)][key]["by_seed"], "o", color=color, markersize=3
            )
    axis.axhline(mean(before.values()), color="0.5", linestyle=":", label="the start")
    axis.set(xlabel="teachers", ylabel="held-out score (greedy)", xticks=range(1, len(table) + 1))
    save_figure(figure, axis, "added-teachers.svg")


if __name__ == "__main__":
    main()
