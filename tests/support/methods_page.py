"""Writes docs/methods.md from the recipes: `python -m tests.support.methods_page`. A test says when the page is stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opd.recipe import FAMILIES, Stage, load_recipe, recipe_facts, shipped_recipes

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"
HEAD = """# Methods

Every method is a recipe of at most 30 lines in `opd/recipes/methods`, here in the six families of the literature; `opd recipes show NAME`
prints one, with the published settings and where it differs. This page is written by `python -m tests.support.methods_page` from the
recipes: who writes and who scores the tokens and what is minimised from their settings, the rest from the lines of their comments that
begin with `family:`. Evidence says what was read: the authors' code, the paper, or notes about it. "Published" numbers are the authors', on their models;
"measured" ones are ours, on the small models that come with opd.
"""
COLUMNS = (
    "recipe",
    "who writes",
    "who scores",
    "what is minimised",
    "source",
    "evidence",
    "published",
    "measured here",
)


def page() -> str:
    facts = {
        name: recipe_facts(path.read_text(encoding="utf-8"))
        for name, path in shipped_recipes().items()
        if name.startswith("methods/")
    }
    lines = [HEAD]
    for family, title in FAMILIES.items():
        lines += [f"## {title}", "", _row(COLUMNS), _row(["---"] * len(COLUMNS))]
        lines += [_row(_cells(name, found)) for name, found in facts.items() if found.get("family") == family]
        lines.append("")
    return "\n".join(lines)


def _row(cells: Any) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cells(name: str, facts: dict[str, str]) -> list[str]:
    stages = [stage for stage in load_recipe(name).stages if stage.train.learn]
    settings = [_joined(part(stage) for stage in stages) for part in (_writers, _scorers, _objective)]
    return [f"`{name}`", *settings, *(facts.get(key, "") for key in ("source", "evidence", "published", "measured"))]


def _joined(texts: Any) -> str:
    return "; then ".join(dict.fromkeys(texts))


def _writers(stage: Stage) -> str:
    rollout = stage.rollout
    found = [
        f"{writer.name} ({writer.samples} of each group)" if writer.samples else _shared(writer.name, writer.share)
        for writer in rollout.everyone
        if writer.share or writer.samples
    ]
    further = [
        key for key in ("rescue", "takeover", "demonstrations", "teacher_prefix") if getattr(rollout, key) is not None
    ]
    groups = f", {rollout.samples} per prompt" if rollout.samples > 1 else ""
    return ", ".join([*found, *further]) + groups


def _shared(name: str, share: float) -> str:
    return name if share == 1 else f"{name} {share:.0%}"


def _scorers(stage: Stage) -> str:
    found = [
        teacher.name
        + (f" as {teacher.role}" if teacher.role != "teacher" else "")
        + ("" if teacher.view.as_sampled else f", view {teacher.view.name}")
        for teacher in stage.teachers.values()
    ]
    verified = any(term.needs().rewards for term in stage.objective)
    return ", ".join([*dict.fromkeys(found), *(["rewards"] if verified else []), *stage.modules]) or "nobody"


def _objective(stage: Stage) -> str:
    return " + ".join(_term(term) for term in stage.objective)


def _term(term: Any) -> str:
    settings = term.model_dump(exclude_defaults=True)
    for key in ("form", "aggregate", "divergence"):
        settings.pop(key, None)
    title = f"{term.name} {term.minimises}".strip()
    return f"`{', '.join([title, *(f'{key}: {_short(value)}' for key, value in settings.items())])}`"


def _short(value: Any) -> str:
    """A value as a recipe writes it on one line."""
    if isinstance(value, dict):
        entries = [
            _short(entry) if key in ("kind", "value") else f"{key} {_short(entry)}" for key, entry in value.items()
        ]
        return entries[0] if len(entries) == 1 else f"{{{', '.join(entries)}}}"
    if isinstance(value, list):
        return ", ".join(_short(entry) for entry in value)
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE} written")
