"""What a stage has scored on held-out prompts, also while it trains or where it was cut off: `summary.json` comes at the end of a run alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from opd.errors import RunDirectoryError
from opd.files import json_object, read_sealed, sha256

VALUE, ERROR = "eval/", "eval_stderr/"  # of a domain, in metrics.jsonl


def so_far(folder: Path) -> dict[str, Any]:
    """Of a stage that no summary tells of, in the summary's words: its folder in `checkpoints` has what was measured. Nothing where nothing was."""
    for path, key in _places(folder):
        try:
            state = _checked(path)
        except (RunDirectoryError, OSError):
            continue  # it was altered, or has just made room for a newer one
        found = state.get(key) if key else state
        if isinstance(found, dict) and found.get("before"):
            return {"evals": {domain: _domain(found, domain) for domain in found["before"]}, "teachers": _values(found)}
    return {}


def checked_stages(directory: Path, summary: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The stages of a run's summary, and what was wrong with them: `summary.json` has no checksum, the result of a stage has one.

    Where both know a number and differ, the result counts.
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
    """The result of a finished stage; without what the end of a run may still change."""
    evals = {domain: _domain(state, domain) for domain in state["before"]}
    rest = {key: state[key] for key in ("history", "steps", "tokens") if key in state}
    return {"evals": evals, "teachers": _values(state), **rest}


def _differs(one: Any, other: Any) -> bool:
    """Keys that only one of them has do not count: they come and go with versions of opd."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return any(_differs(one[key], other[key]) for key in one if key in other) or (bool(one) != bool(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) != len(other) or any(_differs(*pair) for pair in zip(one, other, strict=True))
    return bool(one != other)


def _checked(path: Path) -> dict[str, Any]:
    """A file whose checksum holds: its own, or that in the manifest of its checkpoint."""
    if path.name != "trainer.json":
        return read_sealed(path)
    files = read_sealed(path.parent / "manifest.json")["files"]
    if files.get(path.name) != sha256(path):
        raise RunDirectoryError(f"{path} was altered or cut: its checksum does not match.")
    return json_object(path)


def _places(folder: Path) -> Iterator[tuple[Path, str]]:
    """Files that hold a result, newest first, and under which key."""
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
    """pass@1: greedy where there is one, else sampled."""
    return None if measures is None else measures.get("greedy", measures.get("sampled"))


def _share(found: Mapping[str, Any]) -> float | None:
    """Of the way from before to the teacher."""
    before, after, teacher = (found[side] for side in ("before", "after", "teacher"))
    if before is None or after is None or teacher is None or teacher <= before:
        return None
    return float((after - before) / (teacher - before))


def with_newest(evals: Mapping[str, dict[str, Any]], lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Where a domain was not measured after training (yet), the newest evaluation on the way stands for it: `at` is its step."""
    return {domain: _filled(domain, found, lines) for domain, found in evals.items()}


def _filled(domain: str, found: dict[str, Any], lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    seen = [line for line in lines if line.get(f"{VALUE}{domain}") is not None]
    if found["after"] is not None or not seen:
        return found
    newest, error = seen[-1], seen[-1].get(f"{ERROR}{domain}")
    now = {**found, "after": newest[f"{VALUE}{domain}"], "at": newest["step"]}
    details = {**found.get("details", {}), "after": {} if error is None else {"greedy_stderr": error}}
    return {**now, "normalised": _share({"teacher": None, **now}), "details": details}
