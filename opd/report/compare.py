"""Runs side by side: their scores, the recipe keys in which they differ, and whether a difference is more than chance."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from opd.common.errors import UserError
from opd.common.text import cell, plain
from opd.recipe.paths import read_resolved
from opd.recipe.run_changes import recipe_file
from opd.report.answers import Flips, Marks, evaluation_answers, flips_between, student_marks
from opd.report.facts import require_run, results_of

SEED = "seed"  # the key whose values are grouped


def compare_runs(runs: Sequence[Path]) -> dict[str, Any]:
    """`runs`: name, status, scores by domain; `keys`: values of the keys that differ, in the order of `runs`; `seeds`: runs that only
    differ in their seed, with mean and standard deviation. Flips of a run are against the first one, on the prompts they share.
    """
    for run in runs:
        require_run(run)
    twice = next(
        (run for number, run in enumerate(runs) if run.absolute() in [one.absolute() for one in runs[:number]]), None
    )
    if twice is not None:
        raise UserError(f"{str(twice)!r} is given twice.")
    recipes = [read_resolved(run, recipe_file(run).name) for run in runs]
    keys = differing(recipes)
    newest = [newest_marks(run) for run in runs]
    found = []
    for run, recipe, marks in zip(runs, recipes, newest, strict=True):
        _, stages, status, _ = results_of(run.absolute(), recipe)
        scores = _scores(stages)
        if run is not runs[0]:
            for domain, flips in _flips(newest[0], marks).items():
                if domain in scores:
                    scores[domain]["flips"] = flips.to_json()
        found.append({"name": _name(run, runs), "status": status, "scores": scores})
    return {"runs": found, "keys": keys, "seeds": _over_seeds(found, keys)}


def _name(run: Path, runs: Sequence[Path]) -> str:
    names = [one.absolute().name for one in runs]
    return run.absolute().name if names.count(run.absolute().name) == 1 else str(run)


def _scores(stages: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By domain, the newest score of the last stage that measured it, with its standard error; before training where there is no other."""
    found: dict[str, dict[str, Any]] = {}
    for stage in stages:
        for domain, evals in stage["evals"].items():
            side = "after" if evals.get("after") is not None else "before"
            if evals.get(side) is None:
                continue
            details = evals.get("details", {}).get(side, {})
            error = details.get("greedy_stderr", details.get("sampled_stderr"))
            found[domain] = {"score": evals[side], "stderr": error, "stage": stage["name"], "side": side}
    return found


def newest_marks(run: Path) -> dict[str, Marks]:
    """By domain, the marks of the student's newest evaluation."""
    lines = evaluation_answers(run)
    stages = {line["stage"]: None for line in lines}  # in the order of the run
    marks = student_marks(lines)
    return {domain: by_step[max(by_step)] for stage in stages for (of, domain), by_step in marks.items() if of == stage}


def _flips(first: Mapping[str, Marks], second: Mapping[str, Marks]) -> dict[str, Flips]:
    found = {domain: flips_between(first[domain], second[domain]) for domain in first if domain in second}
    return {domain: flips for domain, flips in found.items() if sum(flips)}


# --- Recipes ---


def differing(recipes: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The keys whose values are not the same in all recipes, in the order of the recipes; None: not in this recipe."""
    flat = [dict(_flat(recipe)) for recipe in recipes]
    keys = dict.fromkeys(key for one in flat for key in one)
    values = {key: [one.get(key) for one in flat] for key in keys}
    return {key: found for key, found in values.items() if any(one != found[0] for one in found)}


def _flat(recipe: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys with dots, as overrides name them. The name of a recipe is left out; keys of a pipeline begin with their stage."""
    stages = recipe["stages"]
    for stage in stages:
        for key, value in stage.items():
            if key != "name":
                yield from _leaves(key if len(stages) == 1 else f"{stage['name']}.{key}", value)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, (Mapping, list)) or not value:
        yield key, value
        return
    items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else enumerate(value)
    for name, inner in items:
        yield from _leaves(f"{key}.{name}", inner)


# --- Seeds ---


def _over_seeds(runs: Sequence[Mapping[str, Any]], keys: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Groups of runs that only differ in their seeds: mean and standard deviation of each score."""
    groups: dict[str, list[int]] = {}
    for number in range(len(runs)):
        settings = {key: values[number] for key, values in keys.items() if not _is_seed(key)}
        groups.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(number)
    found = []
    for shared, numbers in groups.items():
        if len(numbers) == 1:
            continue
        by_domain: dict[str, list[float]] = {}
        for number in numbers:
            for domain, score in runs[number]["scores"].items():
                by_domain.setdefault(domain, []).append(score["score"])
        scores = {
            domain: {"mean": statistics.fmean(values), "deviation": statistics.stdev(values), "n": len(values)}
            for domain, values in by_domain.items()
            if len(values) > 1
        }
        found.append(
            {"runs": [runs[number]["name"] for number in numbers], "keys": json.loads(shared), "scores": scores}
        )
    return found


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2] == SEED


# --- In a terminal ---


def comparison_tables(found: Mapping[str, Any]) -> Iterator[Any]:
    from rich.table import Table
    from rich.text import Text

    runs, keys = found["runs"], found["keys"]
    domains = list(dict.fromkeys(domain for run in runs for domain in run["scores"]))
    table = Table(title="pass@1 ± standard error", title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("run", "status", *keys):
        table.add_column(cell(name))
    for domain in domains:
        table.add_column(cell(domain), justify="right")
    for number, run in enumerate(runs):
        values = [cell(_shown(by_run[number])) for by_run in keys.values()]
        table.add_row(
            cell(run["name"]), cell(run["status"]), *values, *(_score(run["scores"].get(domain)) for domain in domains)
        )
    notes = []
    if any("flips" in score for run in runs for score in run["scores"].values()):
        notes.append(
            f"+ −: right only here, right only in {plain(runs[0]['name'])}, on the prompts both answered; p: McNemar's exact test"
        )
    if any(score["side"] == "before" for run in runs for score in run["scores"].values()):
        notes.append("(before): not evaluated since training began")
    table.caption, table.caption_justify = Text("\n".join(notes), style="table.caption") if notes else None, "left"
    yield table
    if found["seeds"]:
        yield _seed_table(found["seeds"], domains)


def _seed_table(seeds: Sequence[Mapping[str, Any]], domains: Sequence[str]) -> Any:
    from rich.table import Table

    table = Table(
        title="over seeds: mean ± standard deviation",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    names = list(seeds[0]["keys"])
    for name in (*names, "runs", *domains):
        table.add_column(cell(name))
    for group in seeds:
        scores = [group["scores"].get(domain) for domain in domains]
        shown = ["–" if one is None else f"{one['mean']:.1%} ± {one['deviation']:.1%}" for one in scores]
        table.add_row(*(cell(_shown(group["keys"][name])) for name in names), str(len(group["runs"])), *shown)
    return table


def _shown(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def _score(score: Mapping[str, Any] | None) -> str:
    if score is None:
        return "–"
    text = f"{score['score']:.1%}" + (f" ± {score['stderr']:.1%}" if score["stderr"] is not None else "")
    if score["side"] == "before":
        text += " (before)"
    flips = score.get("flips")
    return text if flips is None else f"{text}  +{flips['gained']} −{flips['lost']} (p {flips['p']:.2g})"
