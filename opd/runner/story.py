"""What a pipeline did, stage by stage: what each gained and lost, per domain, against the model that it started from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from opd.config import Recipe
from opd.config.run_changes import changes_in_words, changes_of
from opd.config.stage import MERGED
from opd.evaluation import Measures
from opd.files import json_text, lines_checked, read_lines, write_whole
from opd.runner.merges import FOLDER
from opd.runner.results import Selected, StageResult, results_table
from opd.runner.watching import MONITORS
from opd.text import plain

NOISE = 2.0  # standard errors of a difference that count as none


def write_summary(recipe: Recipe, directory: Path, results: Sequence[StageResult], status: str) -> None:
    """summary.json: every stage's result, what was changed on the way, alarms of monitors, and of a pipeline the story."""
    summary: dict[str, Any] = {
        "recipe": recipe.name,
        "status": status,
        "stages": [result.to_json() for result in results],
    }
    if changes := changes_of(directory):
        summary["changes"] = [
            {"stage": name, **{key: part[key] for key in ("after", "keys", "lr", "schedule")}}
            for one in changes
            for name, part in one["stages"].items()
        ]
    if story := story_of(recipe, results):
        summary["story"] = story
    if alarms := alarms_of(directory):
        kept = ("stage", "step", "monitor", "words", "remedy", "recipe")
        summary["alarms"] = [{key: line[key] for key in kept} for line in alarms]
    write_whole(directory / "summary.json", json_text(summary, indent=1))


def alarms_of(directory: Path) -> list[dict[str, Any]]:
    """What monitors have said so far."""
    return read_lines(directory / MONITORS, checked=lines_checked(directory)).whole


def told(recipe: Recipe, directory: Path, results: Sequence[StageResult]) -> Iterator[str | Table]:
    """What is shown at the end: a table per stage, what was changed, of a pipeline the story, and alarms once more."""
    for result in results:
        if result.before:
            yield ""
            yield results_table(result)
    if changes := changes_of(directory):
        yield ""
        yield from (f"changed {line}" for line in changes_in_words(changes, len(recipe.stages)))
    if story := story_of(recipe, results):
        yield ""
        yield from story_lines(story)
    if alarms := alarms_of(directory):
        yield ""
        yield (
            f"{len(alarms)} alarms of monitors; see monitors.jsonl and the report"
            if len(alarms) > 1
            else "an alarm of a monitor"
        )
        yield from (f"  {line['stage']}, step {line['step']}, {line['monitor']}: {line['words']}" for line in alarms)


def story_of(recipe: Recipe, results: Sequence[StageResult]) -> list[dict[str, Any]]:
    """Of a pipeline: one chapter per stage that was measured before and after, or passed over; one that has not ended has none yet."""
    if len(recipe.stages) < 2:
        return []
    starts = {stage.name: stage.starts for stage in recipe.stages}
    found = []
    for result in results:
        changes = {
            domain: (before.value, after.value, _noise(before, after))
            for domain, before in result.before.items()
            if (after := result.after.get(domain)) and before.value is not None and after.value is not None
        }
        if not changes and result.passed_over is None:
            continue
        chapter = {"stage": result.name, "from": starts[result.name], "domains": _sorted_out(changes)}
        if result.selected is not None:
            chapter["selected"] = result.selected._asdict()
        if result.passed_over is not None:
            chapter["passed_over"] = _handed_on(result.passed_over)
        found.append(chapter)
    return found


def _handed_on(start: str) -> str:
    """What comes out of a stage that was passed over: the model of a stage before, or one that lies somewhere."""
    return f"{FOLDER}/{start.removeprefix(MERGED)}" if start.startswith(MERGED) else start


def _noise(before: Measures, after: Measures) -> float:
    return NOISE * ((before.stderr or 0.0) ** 2 + (after.stderr or 0.0) ** 2) ** 0.5


def _sorted_out(changes: Mapping[str, tuple[float, float, float]]) -> dict[str, dict[str, Any]]:
    """Largest gain first. `what`: gained, lost, or kept where the difference is within its noise."""
    ordered = sorted(changes.items(), key=lambda item: item[1][0] - item[1][1])
    return {
        domain: {
            "before": before,
            "after": after,
            "what": "kept" if abs(after - before) <= noise else "gained" if after > before else "lost",
        }
        for domain, (before, after, noise) in ordered
    }


def story_lines(story: Sequence[Mapping[str, Any]]) -> list[str]:
    """In words, for people; fits any width."""
    lines = ["the story: pass@1 before and after each stage"]
    for chapter in story:
        lines.append(f"{plain(chapter['stage'])}, from {plain(', '.join(chapter['from']))}")
        chosen = plain(Selected(**chapter["selected"]).in_words()) if "selected" in chapter else ""
        if "passed_over" in chapter:
            why = f": {chosen}" if chosen else ""  # runs from before it was noted do not know
            lines.append(f"  passed over{why}; what comes out of it is {plain(chapter['passed_over'])}")
        elif chosen:
            lines.append(f"  {chosen}")
        for what in ("gained", "lost", "kept"):
            told = [
                f"{plain(domain)} {found['before']:.1%} to {found['after']:.1%} ({found['after'] - found['before']:+.1%})"
                for domain, found in chapter["domains"].items()
                if found["what"] == what
            ]
            if told:
                lines.append(f"  {what:6} {', '.join(told)}")
    return lines
