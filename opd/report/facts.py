"""What a run directory says, as the plain data that the page is drawn from."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from opd import families
from opd.config.run_changes import changes_in_words, changes_of, recipe_file
from opd.config.runs import read_resolved
from opd.errors import RunDirectoryError
from opd.files import json_object, lines_checked, read_lines
from opd.holder import at_work
from opd.monitors.history import with_estimates
from opd.monitors.monitor import Monitor
from opd.report.graph import stage_graph
from opd.report.measured import checked_stages, so_far, with_newest
from opd.report.words import gains, in_words

POINTS = 1000  # of a curve
SAMPLES = 600  # completions in a page
TOKEN_BYTES = 12 << 20  # of the completions that a page shows token by token
DOMAIN = "DOMAIN"  # in what monitors read: one metric of every domain
CREDENTIALS = re.compile(r"(://)[^/\s@'\"]+@")


def run_facts(directory: str | Path, *, whole: bool = False) -> dict[str, Any]:
    """Everything that the page shows of a run, dead or alive. `whole`: nothing is thinned out, as when it is drawn for print."""
    _require_run(Path(directory))
    root = Path(directory).absolute()
    resolved, changes = read_resolved(root, recipe_file(root).name), changes_of(root)
    checked = lines_checked(root)
    metrics, samples, tokens, answers, monitors = (
        read_lines(root / f"{name}.jsonl", checked=checked).whole
        for name in ("metrics", "samples", "tokens", "answers", "monitors")
    )
    summary = _json(root / "summary.json")
    ended, differences = checked_stages(root, summary)
    stages = _stages(root, resolved, ended, metrics)
    shown = samples if whole else _spread(samples, SAMPLES)
    found = {
        "name": root.name,
        "recipe": resolved.get("name", root.name),
        "status": summary.get("status", "running" if at_work(root) else "cut off"),
        "stages": stages,
        "graph": stage_graph(resolved.get("stages", [])),
        "metrics": _columns(_earlier_steps(metrics, stages), None if whole else POINTS),
        "samples": shown,
        "tokens": _within(tokens, {line.get("id") for line in shown}, None if whole else TOKEN_BYTES),
        "answers": answers,
        "monitors": [line for line in monitors if "words" in line],
        **_watched(resolved, metrics),
        "diagnose": _json(root / "diagnose.json"),
        "start": _json(root / "start.json"),
        "text": _recipe_text(root),
    }
    changed = [f"Changed on the way: {line}." for line in changes_in_words(changes, len(stages))]
    words = " ".join([in_words(found), *changed, *differences])
    return {**found, "words": words, "gains": [gain._asdict() for gain in gains(found)]}


def _require_run(directory: Path) -> None:
    """Said of a name that was mistyped before any of its files is missed."""
    if directory.is_dir() and (directory / "resolved.yaml").exists():
        return
    what = "no such directory" if not directory.exists() else "not the directory of a run, which has a resolved.yaml"
    raise RunDirectoryError(
        f"{str(directory)!r}: {what}. `opd run` says at its end where a run is: runs/NAME, or --out."
    )


def _watched(resolved: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`watched`: monitors that had all they read in a stage; `partly`: in which, where not in all that have begun. `unread`: the others, and
    what they lacked. Runs from before there were any have none.
    """
    lacking: dict[str, dict[str, list[str]]] = {}  # monitor -> stage -> metrics
    for stage in resolved["stages"]:
        known = {
            key
            for line in metrics
            if line["stage"] == stage["name"]
            for key, value in with_estimates(line).items()
            if value is not None
        }
        for one in stage.get("monitors", {}).get("watch", ()) if known else ():  # a stage that has begun
            lacking.setdefault(str(one["kind"]), {})[stage["name"]] = _lacking(str(one["kind"]), known)
    seen = {name: [stage for stage, missing in by.items() if not missing] for name, by in lacking.items()}
    begun = {line["stage"] for line in metrics}
    return {
        "watched": [name for name, stages in seen.items() if stages],
        "partly": {name: stages for name, stages in seen.items() if stages and len(stages) < len(begun)},
        "unread": {
            name: ", ".join(dict.fromkeys(metric for missing in by.values() for metric in missing))
            for name, by in lacking.items()
            if not seen[name]
        },
    }


def _lacking(name: str, known: Collection[str]) -> list[str]:
    """Metrics that a monitor reads and that no step has."""
    kind = families.find("monitor", name) if name in families.names("monitor") else None
    if kind is None or not issubclass(kind, Monitor):
        return ["its plugin is not loaded"]
    return [
        key
        for key in kind.reads
        if not any(
            found.startswith(key.removesuffix(DOMAIN)) if key.endswith(DOMAIN) else found == key for found in known
        )
    ]


def _json(path: Path) -> dict[str, Any]:
    return json_object(path) if path.is_file() else {}


def _stages(
    root: Path,
    resolved: Mapping[str, Any],
    summarised: Sequence[Mapping[str, Any]],
    metrics: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """What was planned, with what came of it. A run that is at work has no summary yet: its lines are counted."""
    ended = {stage["name"]: stage for stage in summarised}
    found = []
    for spec in resolved["stages"]:
        name = spec["name"]
        own = [line for line in metrics if line["stage"] == name]
        result = ended[name] if name in ended else so_far(root / "checkpoints" / name)
        phases: dict[str, float] = {}
        for line in own:
            for key, value in line.items():
                if key.startswith("time/") and isinstance(value, (int, float)):
                    phases[key.removeprefix("time/")] = phases.get(key.removeprefix("time/"), 0.0) + value
        history = [
            {"step": line["step"]}
            | {key.removeprefix("eval/"): value for key, value in line.items() if key.startswith("eval/")}
            for line in own
            if any(key.startswith("eval/") for key in line)
        ]
        found.append(
            {
                "name": name,
                "planned": spec.get("train", {}).get("steps"),
                "steps": result.get("steps", own[-1]["step"] if own else 0),
                "tokens": result.get("tokens", sum(line.get("tokens", 0) for line in own)),
                "seconds": result.get("seconds", sum(phases.values())),
                "phases": phases,
                "evals": with_newest(result.get("evals", {}), own),
                "history": result.get("history", history),
                "teachers": result.get("teachers", {}),
                "student": _model(spec.get("student")),
                "models": {key: _model(kind) for key, kind in (spec.get("teachers") or {}).items()},
                "objective": [_brief(term) for term in spec.get("objective", [])],
            }
        )
    return found


def _model(kind: Any) -> str:
    """Of a student or a teacher, in a few words."""
    if not isinstance(kind, Mapping):
        return str(kind)
    name = kind.get("model") or kind.get("url") or kind.get("kind", "")
    how = kind.get("kind", "frozen")
    return _public(f"{name}" if how in ("frozen", name) else f"{name} ({how})")


def _brief(term: Any) -> str:
    """A term of the objective: its form, and what distinguishes it."""
    if not isinstance(term, Mapping):
        return str(term)
    divergence = term.get("divergence")
    kind = divergence.get("kind") if isinstance(divergence, Mapping) else divergence
    gates = [gate.get("kind", "") for gate in term.get("gate", []) if isinstance(gate, Mapping)]
    return " · ".join(str(part) for part in (term.get("form", "direct"), kind, *gates) if part)


def _public(text: str) -> str:
    return CREDENTIALS.sub(r"\1…@", text)


def _recipe_text(root: Path) -> str:
    path = root / "recipe.yaml"
    return _public(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else ""


def _earlier_steps(metrics: Sequence[dict[str, Any]], stages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """With `at`, which counts on from stage to stage."""
    before, total = {}, 0
    for stage in stages:
        before[stage["name"]] = total
        total += max(stage["steps"], stage["planned"] or 0) if stage["steps"] else 0
    return [{"at": before.get(line["stage"], 0) + line["step"], **line} for line in metrics]


def _columns(lines: Sequence[Mapping[str, Any]], points: int | None) -> dict[str, list[Any]]:
    """Numbers by name; of long runs evenly many, each the mean of its neighbours, so that no spike is only half there."""
    names = [key for key in dict.fromkeys(key for line in lines for key in line) if key not in ("crc", "stage")]
    size = 1 if points is None or len(lines) <= points else -(-len(lines) // points)
    groups = [lines[first : first + size] for first in range(0, len(lines), size)]
    columns: dict[str, list[Any]] = {"stage": [group[-1]["stage"] for group in groups]}
    for name in names:
        values = [[line[name] for line in group if isinstance(line.get(name), (int, float))] for group in groups]
        columns[name] = [_mean(found) if name not in ("at", "step") else found[-1] for found in values]
    return columns


def _mean(values: Sequence[float]) -> float | None:
    return float(f"{sum(values) / len(values):.6g}") if values else None


def _spread(lines: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The first and the last, and evenly many between: whole snapshots, never a part of one."""
    moments = list(dict.fromkeys((line["stage"], line["step"]) for line in lines))
    each = max(1, -(-len(lines) // max(len(moments), 1)))
    keep = max(2, count // each)
    if len(moments) > keep:
        moments = [moments[round(number * (len(moments) - 1) / (keep - 1))] for number in range(keep)]
    kept = set(moments)
    return [line for line in lines if (line["stage"], line["step"]) in kept]


def _within(lines: Sequence[dict[str, Any]], ids: set[Any], limit: int | None) -> list[dict[str, Any]]:
    """Of those completions, as many as fit: from both ends inwards, since one looks for what has changed."""
    wanted = [line for line in lines if line["id"] in ids]
    if limit is None:
        return wanted
    order = [number for pair in zip(range(len(wanted)), reversed(range(len(wanted))), strict=True) for number in pair]
    kept, size = set[int](), 0
    for number in dict.fromkeys(order):
        size += 250 * len(wanted[number]["ids"])  # about what a token takes
        if size > limit and kept:
            break
        kept.add(number)
    return [wanted[number] for number in sorted(kept)]
