"""Which monitors speak on runs that go well: the quickstart and every lab's pipeline, whole, with all monitors on.

    python benchmarks/monitors.py --workers 8                  # the recipes as they are shipped: what is reported
    python benchmarks/monitors.py --workers 8 --seed 1         # another seed: what thresholds may be set by

Each run is a process with one thread. Runs that are there already are read, not repeated; recipes that are changed on
purpose (`--set`) go into a file of their own (`--name`).
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from runs import carry_out, refuse_other_changes, save

from opd.common.errors import RecipeError
from opd.monitors.monitor import usual_monitors
from opd.recipe import load_recipe, shipped_recipes

GOING_WELL = ["quickstart", *(name for name in shipped_recipes() if name.startswith("labs/"))]
EVERY, PROMPTS = 20, 100  # of evaluations; training does not depend on them
PREFIX = "prefix"  # the one that has to be asked for


def watched(name: str, seed: int, changes: list[str]) -> dict[str, Any]:
    """A shipped recipe with every monitor that can be carried out in each of its stages, and evaluations for those that read them."""
    recipe = load_recipe(name, [f"seed={seed}", "log.samples=0", *changes]).model_dump(mode="json")
    for stage in recipe["stages"]:
        stage["eval"] |= {"every": EVERY, "prompts": min(PROMPTS, stage["eval"]["prompts"])}
    for stage in (stage for stage in recipe["stages"] if stage["teachers"]):
        stage["monitors"]["watch"].append({"kind": PREFIX})
        try:
            load_recipe(recipe)
        except RecipeError:  # its teachers wait outside, or are no model
            stage["monitors"]["watch"].pop()
    return recipe


def alarms(directory: Path) -> dict[str, Any]:
    """What was raised in a run, and how near each stage came: how many probes were taken, and what the lowest of them said."""
    path = directory / "monitors.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    probes = [
        (key, value) for line in metrics for key, value in line.items() if key.startswith(("cosine/", "takeover/"))
    ]
    return {
        "steps": len(metrics),
        "probes": len(probes),
        "lowest cosine": min((value for key, value in probes if key.startswith("cosine/")), default=None),
        "alarms": [
            {key: json.loads(line)[key] for key in ("stage", "step", "monitor", "value", "threshold", "words")}
            for line in lines
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("runs/monitors"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--recipes", nargs="+", default=GOING_WELL)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="for all of them")
    parser.add_argument("--name", help="of the results, and the folder of the runs; default: seed-SEED")
    arguments = parser.parse_args()
    name = arguments.name or f"seed-{arguments.seed}"
    refuse_other_changes(f"monitors-{name}.json", arguments.set)
    directory = arguments.directory / name
    directory.mkdir(parents=True, exist_ok=True)

    def carried(recipe: str) -> dict[str, Any]:
        return alarms(carry_out(recipe.replace("/", "-"), watched(recipe, arguments.seed, arguments.set), directory))

    with ThreadPoolExecutor(max(arguments.workers, 1)) as pool:
        found = dict(zip(arguments.recipes, pool.map(carried, arguments.recipes), strict=True))
    for recipe, result in found.items():
        told = [f"{one['stage']}, step {one['step']}, {one['monitor']}: {one['words']}" for one in result["alarms"]]
        print(f"{recipe}: {result['steps']} steps, {len(told)} alarms", *told, sep="\n  ")
    results = {
        "seed": arguments.seed,
        "monitors": [*usual_monitors(), PREFIX],
        "changes": arguments.set,
        "recipes": found,
    }
    save(f"monitors-{name}.json", results)


if __name__ == "__main__":
    main()
