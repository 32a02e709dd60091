"""A run in a paragraph: the gain, its significance, the distance to the teacher, and what to look at."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

CLEAR = 2.0  # standard errors of a significant difference
STATUS = {
    "done": "",
    "running": "The run is still running. ",
    "cut off": "The run was cut off; `opd resume` continues it. ",
    "partial": "Only some of the stages were requested. ",
    "stopped": "The run was stopped early. ",
    "preempted": "The run was preempted; it can be resumed. ",
    "failed": "The run failed; the results up to the failure are shown. ",
}


class Gain(NamedTuple):
    """Held-out pass@1 of a domain. `spread`: the standard error of the difference."""

    domain: str
    before: float
    after: float
    teacher: float | None
    spread: float


def in_words(run: Mapping[str, Any]) -> str:
    stages = [stage for stage in run["stages"] if stage["steps"]]
    text = STATUS.get(run["status"], "")
    if not stages:
        return f"{text}No step has been taken yet."
    steps, tokens = sum(stage["steps"] for stage in stages), sum(stage["tokens"] for stage in stages)
    text += f"{steps:,} step{'s' * (steps != 1)} on {tokens:,} tokens in {duration(sum(stage['seconds'] for stage in stages))}. "
    if _measured(run):
        text += " ".join(_gained(gains(run))) + " "
    elif run["status"] == "done":
        text += (
            "Nothing was measured on held-out prompts (eval.prompts), so only the distance to the teacher is known. "
        )
    return (text + " ".join([*_signs(run["metrics"], stages[-1]["name"]), *_alarms(run)])).strip()


def lineage(graph: Mapping[str, Any], name: str) -> list[str]:
    """This stage and the stages that its student comes from, oldest first."""
    before = {edge["to"]: edge["from"] for edge in graph["edges"] if edge["as"] == "student"}
    names = [name]
    while before.get(names[0]) not in (None, *names):
        names.insert(0, before[names[0]])
    return names


def _measured(run: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The evaluated stages that lead to the last stage that has started."""
    begun = [stage for stage in run["stages"] if stage["steps"]]
    line = lineage(run["graph"], begun[-1]["name"]) if begun else []
    return [stage for stage in begun if stage["evals"] and stage["name"] in line]


def gains(run: Mapping[str, Any]) -> list[Gain]:
    """The gain per domain, from before its first evaluated stage to after its last."""
    stages, rows = _measured(run), []
    for domain, found in stages[-1]["evals"].items() if stages else ():
        start = next(stage["evals"][domain] for stage in stages if domain in stage["evals"])
        if start["before"] is not None and found["after"] is not None:
            spread = math.hypot(_error(start, "before"), _error(found, "after"))
            rows.append(Gain(domain, start["before"], found["after"], found.get("teacher"), spread))
    return rows


def _gained(rows: Sequence[Gain]) -> Iterator[str]:
    if not rows:
        yield "It has not been measured after training yet."
        return
    before, after = sum(row.before for row in rows) / len(rows), sum(row.after for row in rows) / len(rows)
    over = f" on average over {len(rows)} domains" if len(rows) > 1 else ""
    gained = f"Held-out pass@1 went from {before:.1%} to {after:.1%}{over}"
    known = [(row, row.teacher) for row in rows if row.teacher is not None]
    goal = sum(teacher for _, teacher in known) / len(known) if len(known) == len(rows) else None
    if goal is None:
        yield f"{gained}."
    elif after >= goal:
        yield f"{gained} and is at or above its teachers' {goal:.1%}."
    elif goal > before:
        yield f"{gained}, which is {(after - before) / (goal - before):.0%} of the way to its teachers' {goal:.1%}."
    else:
        yield f"{gained}; its teachers have {goal:.1%}."
    better = [row.domain for row in rows if row.after - row.before > CLEAR * row.spread]
    worse = [row.domain for row in rows if row.before - row.after > CLEAR * row.spread]
    same = [row.domain for row in rows if row.domain not in better and row.domain not in worse]
    if worse:
        yield f"{_listed(worse)} got worse."
    if same:
        yield f"{_listed(same)} did not change by more than chance (two standard errors)."
    if len(rows) > 1 and not worse and not same:
        yield "Every domain gained more than chance."
    below = [(teacher - row.after, row.domain) for row, teacher in known if teacher - row.after > CLEAR * row.spread]
    if below:
        yield f"Furthest from its teacher: {max(below)[1]}, by {100 * max(below)[0]:.1f} points."


def _signs(metrics: Mapping[str, Sequence[Any]], stage: str) -> Iterator[str]:
    """How the distance to the teacher and the answers changed in the last stage."""
    mine = [number for number, name in enumerate(metrics["stage"]) if name == stage]

    def ends(name: str) -> tuple[float, float] | None:
        values = (
            [metrics[name][number] for number in mine if metrics[name][number] is not None] if name in metrics else []
        )
        part = max(1, len(values) // 10)
        return (sum(values[:part]) / part, sum(values[-part:]) / part) if len(values) > 1 else None

    if len(mine) == 1 and (only := metrics.get("reverse_kl", [None])[mine[0]]) is not None:
        yield f"The divergence from the teacher is {only:.3g} nats per token."
    if (found := ends("reverse_kl")) is not None:
        yield f"The divergence from the teacher {_moved(*found)} from {found[0]:.3g} to {found[1]:.3g} nats per token (means of its first and last tenth)."
    if (found := ends("truncated")) is not None and found[1] > 0.05:
        yield f"{found[1]:.0%} of the last answers were cut off at the length limit ({found[0]:.0%} of the first)."
    if (found := ends("response_length")) is not None and found[0] > 0 and not 0.7 < found[1] / found[0] < 1.5:
        yield f"Answers went from {found[0]:.0f} to {found[1]:.0f} tokens."


def _alarms(run: Mapping[str, Any]) -> Iterator[str]:
    raised = list(dict.fromkeys(str(line["monitor"]) for line in run["monitors"]))
    if raised:
        yield f"Monitors raised an alarm: {_listed(raised)}."
    elif both := len(run["watched"]) + len(run["unread"]):
        others = f" (not {_listed(list(run['unread']))})" if run["unread"] else ""
        yield f"No alarm was raised; {len(run['watched'])} of {both} monitors had all their metrics{others}."


def _moved(first: float, last: float) -> str:
    return "fell" if last < first else "rose"


def _error(found: Mapping[str, Any], side: str) -> float:
    details = found.get("details", {}).get(side, {})
    value = details.get("greedy_stderr", details.get("sampled_stderr", found.get("stderr")))
    return float(value or 0.0)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def duration(seconds: float) -> str:
    """
    >>> duration(3723)
    '1 h 2 min'
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"
