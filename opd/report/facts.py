"""Read a run directory as plain data, for the page."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from opd import registry
from opd.common.errors import RunDirectoryError
from opd.common.files import json_object, lines_checked, read_lines, read_sealed, sha256
from opd.common.process_identity import is_running
from opd.monitors.monitor import Monitor, with_estimates
from opd.recipe import STAGE_PREFIX
from opd.recipe.paths import read_resolved
from opd.recipe.run_changes import changes_in_words, changes_of, recipe_file
from opd.report.answers import first_answers, flips_of_stages
from opd.report.words import gains, in_words

POINTS = 1000  # of a curve
SAMPLES = 600  # completions in a page
ANSWER_BYTES = 1 << 20  # of answers to held-out questions in a page
TOKEN_BYTES = 12 << 20  # of completions that a page shows token by token
DOMAIN = "DOMAIN"  # in what monitors read: one metric of every domain
CREDENTIALS = re.compile(r"(://)[^/\s@'\"]+@")


def run_facts(directory: str | Path, *, whole: bool = False) -> dict[str, Any]:
    """Everything that the page shows of a run. `whole`: curves keep all points, for print."""
    require_run(Path(directory))
    root = Path(directory).absolute()
    resolved, changes = read_resolved(root, recipe_file(root).name), changes_of(root)
    samples, tokens, answers, monitors = (_lines(root, name) for name in ("samples", "tokens", "answers", "monitors"))
    metrics, stages, status, differences = results_of(root, resolved)
    flips = flips_of_stages(answers)
    for stage in stages:
        for domain, evals in stage["evals"].items():
            if domain in flips.get(stage["name"], {}):
                evals["flips"] = flips[stage["name"]][domain].to_json()
    shown = samples if whole else _spread(samples, SAMPLES)
    found = {
        "name": root.name,
        "recipe": resolved.get("name", root.name),
        "status": status,
        "stages": stages,
        "graph": stage_graph(resolved.get("stages", [])),
        "metrics": _columns(_earlier_steps(metrics, stages), None if whole else POINTS),
        "samples": shown,
        "tokens": _within(tokens, {line.get("id") for line in shown}, None if whole else TOKEN_BYTES),
        "answers": answers if whole else first_answers(answers, ANSWER_BYTES),
        "monitors": [line for line in monitors if "words" in line],
        **_watched(resolved, metrics),
        "diagnose": _json(root / "diagnose.json"),
        "start": _json(root / "start.json"),
        "text": _recipe_text(root),
    }
    changed = [f"Changed during the run: {line}." for line in changes_in_words(changes, len(stages))]
    words = " ".join([in_words(found), *changed, *differences])
    return {**found, "words": words, "gains": [gain._asdict() for gain in gains(found)]}


def results_of(
    root: Path, resolved: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str, list[str]]:
    """The metrics of a run, its stages with their results, its status, and what is wrong with its summary."""
    summary, metrics = _json(root / "summary.json"), _lines(root, "metrics")
    ended, differences = checked_stages(root, summary)
    status = summary.get("status", "running" if is_running(root) else "cut off")
    return metrics, _stages(root, resolved, ended, metrics), str(status), differences


def _lines(root: Path, name: str) -> list[dict[str, Any]]:
    return read_lines(root / f"{name}.jsonl", checked=lines_checked(root)).whole


def require_run(directory: Path) -> None:
    """Reject a path that is not a run directory."""
    if directory.is_dir() and (directory / "resolved.yaml").exists():
        return
    what = "no such directory" if not directory.exists() else "not the directory of a run, which has a resolved.yaml"
    raise RunDirectoryError(
        f"{str(directory)!r}: {what}. `opd run` prints at its end where a run is: runs/NAME, or --out."
    )


def _watched(resolved: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`watched`: monitors that had all their metrics in a stage; `partly`: in which stages, if not in all started ones. `unread`: the
    other monitors and their missing metrics. Older runs have none.
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
        for one in stage.get("monitors", {}).get("watch", ()) if known else ():  # a stage that has started
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
    kind = registry.find("monitor", name) if name in registry.names("monitor") else None
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
    """The plan of each stage with its results. A live run has no summary yet, so its lines are counted."""
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
    """A short label of a student or a teacher."""
    if not isinstance(kind, Mapping):
        return str(kind)
    name = kind.get("model") or kind.get("url") or kind.get("kind", "")
    how = kind.get("kind", "frozen")
    return _public(f"{name}" if how in ("frozen", name) else f"{name} ({how})")


def _brief(term: Any) -> str:
    """A short label of a term: its form and its main settings."""
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
    """Rows with `at`, a step number that continues from stage to stage."""
    before, total = {}, 0
    for stage in stages:
        before[stage["name"]] = total
        total += max(stage["steps"], stage["planned"] or 0) if stage["steps"] else 0
    return [{"at": before.get(line["stage"], 0) + line["step"], **line} for line in metrics]


def _columns(lines: Sequence[Mapping[str, Any]], points: int | None) -> dict[str, list[Any]]:
    """Numbers by name. Long runs are thinned out evenly, and each point is a mean of its neighbours, so no spike is lost."""
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
    """Completions of the first and last snapshots, and evenly chosen ones between. Snapshots stay complete."""
    moments = list(dict.fromkeys((line["stage"], line["step"]) for line in lines))
    each = max(1, -(-len(lines) // max(len(moments), 1)))
    keep = max(2, count // each)
    if len(moments) > keep:
        moments = [moments[round(number * (len(moments) - 1) / (keep - 1))] for number in range(keep)]
    kept = set(moments)
    return [line for line in lines if (line["stage"], line["step"]) in kept]


def _within(lines: Sequence[dict[str, Any]], ids: set[Any], limit: int | None) -> list[dict[str, Any]]:
    """As many token views of those completions as fit, from both ends inwards, because changes are most visible there."""
    wanted = [line for line in lines if line["id"] in ids]
    if limit is None:
        return wanted
    order = [number for pair in zip(range(len(wanted)), reversed(range(len(wanted))), strict=True) for number in pair]
    kept, size = set[int](), 0
    for number in dict.fromkeys(order):
        size += 250 * len(wanted[number]["ids"])  # approximate bytes per token
        if size > limit and kept:
            break
        kept.add(number)
    return [wanted[number] for number in sorted(kept)]


# Held-out scores of stages, also of live and interrupted runs, which have no `summary.json`


VALUE, ERROR = "eval/", "eval_stderr/"  # of a domain, in metrics.jsonl


def so_far(folder: Path) -> dict[str, Any]:
    """The result of a stage without a summary, from its folder in `checkpoints`; empty if nothing was measured."""
    for path, key in _places(folder):
        try:
            state = _checked(path)
        except (RunDirectoryError, OSError):
            continue  # it was altered, or just replaced by a newer one
        found = state.get(key) if key else state
        if isinstance(found, dict) and found.get("before"):
            return {"evals": {domain: _domain(found, domain) for domain in found["before"]}, "teachers": _values(found)}
    return {}


def checked_stages(directory: Path, summary: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The stages of a run's summary, and problems. `summary.json` has no checksum, but the result of a stage has one.

    If both have a number and differ, the result is used.
    """
    stages = summary.get("stages", [])
    known = isinstance(stages, list) and all(
        isinstance(one, dict) and isinstance(one.get("name"), str) for one in stages
    )
    if not known:
        raise RunDirectoryError(f"{directory / 'summary.json'} was altered: it does not name the run's stages.")
    found, differences = [], []
    for stage in stages:
        path = directory / "checkpoints" / stage["name"] / "result.json"
        try:
            sealed = _in_words_of_summary(read_sealed(path)["result"]) if path.is_file() else {}
        except (RunDirectoryError, OSError) as error:
            differences.append(f"stage {stage['name']!r}: {error} summary.json could not be compared with it.")
            sealed = {}
        wrong = [key for key in sealed if key in stage and _differs(sealed[key], stage[key])]
        if wrong:
            differences.append(
                f"summary.json was altered: {', '.join(wrong)} of stage {stage['name']!r} are not what its result.json, which has a "
                "checksum, says. The values of result.json are used."
            )
        found.append({**stage, **{key: sealed[key] for key in wrong}})
    return found, differences


def _in_words_of_summary(state: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a finished stage, without keys that the end of a run may change."""
    evals = {domain: _domain(state, domain) for domain in state["before"]}
    rest = {key: state[key] for key in ("history", "steps", "tokens") if key in state}
    return {"evals": evals, "teachers": _values(state), **rest}


def _differs(one: Any, other: Any) -> bool:
    """Differing keys. Keys that only one of them has are ignored, because they depend on the version of opd."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return any(_differs(one[key], other[key]) for key in one if key in other) or (bool(one) != bool(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) != len(other) or any(_differs(*pair) for pair in zip(one, other, strict=True))
    return bool(one != other)


def _checked(path: Path) -> dict[str, Any]:
    """Read a file and verify its checksum: its own, or that in the manifest of its checkpoint."""
    if path.name != "trainer.json":
        return read_sealed(path)
    files = read_sealed(path.parent / "manifest.json")["files"]
    if files.get(path.name) != sha256(path):
        raise RunDirectoryError(f"{path} was altered or cut: its checksum does not match.")
    return json_object(path)


def _places(folder: Path) -> Iterator[tuple[Path, str]]:
    """Files with a result, newest first, and the key of the result."""
    yield folder / "result.json", "result"
    yield from ((path, "result") for path in sorted(folder.glob("step-*/trainer.json"), reverse=True))
    yield folder / "before.json", ""


def _domain(state: Mapping[str, Any], domain: str) -> dict[str, Any]:
    teacher = state["teachers"].get(state.get("teacher_of", {}).get(domain, ""), {}).get(domain)
    sides = {"before": state["before"][domain], "after": state["after"].get(domain), "teacher": teacher}
    average = state["weight_average"].get(domain)
    found = {side: _value(measures) for side, measures in sides.items()}
    details = {side: measures for side, measures in sides.items() if measures}
    more = {} if average is None else {"weight_average": _value(average)}
    return {**found, **more, "n": state["before"][domain]["n"], "normalised": _share(found), "details": details}


def _values(state: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    return {name: {key: _value(one) for key, one in by.items()} for name, by in state["teachers"].items()}


def _value(measures: Mapping[str, Any] | None) -> float | None:
    """pass@1: greedy if measured, else sampled."""
    return None if measures is None else measures.get("greedy", measures.get("sampled"))


def _share(found: Mapping[str, Any]) -> float | None:
    """The fraction of the way from before to the teacher."""
    before, after, teacher = (found[side] for side in ("before", "after", "teacher"))
    if before is None or after is None or teacher is None or teacher <= before:
        return None
    return float((after - before) / (teacher - before))


def with_newest(evals: Mapping[str, dict[str, Any]], lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Scores per domain. A domain without a final score has its newest evaluation during training, with its step as `at`."""
    return {domain: _filled(domain, found, lines) for domain, found in evals.items()}


def _filled(domain: str, found: dict[str, Any], lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    seen = [line for line in lines if line.get(f"{VALUE}{domain}") is not None]
    if found["after"] is not None or not seen:
        return found
    newest, error = seen[-1], seen[-1].get(f"{ERROR}{domain}")
    now = {**found, "after": newest[f"{VALUE}{domain}"], "at": newest["step"]}
    details = {**found.get("details", {}), "after": {} if error is None else {"greedy_stderr": error}}
    return {**now, "normalised": _share({"teacher": None, **now}), "details": details}


# The graph of stages, to be drawn from left to right


def stage_graph(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`nodes`: stages with their column; `edges`: from, to, and the role of the model."""
    names = [str(stage.get("name", "")) for stage in stages]
    edges = [
        {"from": source, "to": name, "as": role}
        for stage, name in zip(stages, names, strict=True)
        for source, role in dict(reversed(list(_sources(stage)))).items()
        if source in names
    ]
    column: dict[str, int] = {}
    for name in names:  # a stage can only name an earlier one
        column[name] = 1 + max(
            (column[edge["from"]] for edge in edges if edge["to"] == name and edge["from"] in column), default=-1
        )
    return {"nodes": [{"name": name, "column": column[name]} for name in names], "edges": edges}


def _sources(stage: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(stage, role) of every earlier stage whose output is used anywhere in this value."""
    for key, value in stage.items():
        role = "student" if key == "student" else "teacher" if key == "teachers" else key
        for text in _texts(value):
            if text.startswith(STAGE_PREFIX):
                yield text.removeprefix(STAGE_PREFIX), role


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
