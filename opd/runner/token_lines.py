"""tokens.jsonl: sampled completions token by token, in a form that a page can read without torch or a tokenizer.

    {"step": 41, "stage": "main", "id": …, "domain": …, "teacher": NAME, "ids": [T], "author": [T],
     "student": [T], "teacher_logprob": [T], "ratio": [T], "entropy": [T], "teacher_entropy": [T], "reverse_kl": [T],
     "student_top": [T x [[id, log-prob], …]], "teacher_top": the same, "texts": {id: text},
     "terms": {NAME: {"weight": [T], "advantage": [T], "gates": {NAME: [T]}}}, "left_out": tokens beyond the longest}

Log-probs are in nats, untempered, with all stop ids as one event; `ratio` is the student's less the teacher's. null: not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from opd.objective.trace import Trace
from opd.runner.stage import StageRun
from opd.types import Rollout

TOKENS = "tokens.jsonl"
LONGEST = 4096  # tokens of one completion
LIMIT = 64 << 20  # bytes of the file
FIRST = 1 / 16  # of them, that may be used from the start
DIGITS = 4


def room_for(path: Path, progress: float) -> int:
    """Bytes that may be added so far, so that the end of a long run is written down as well as its beginning."""
    return int(LIMIT * max(progress, FIRST)) - (path.stat().st_size if path.is_file() else 0)


def token_line(run: StageRun, step: int, rollout: Rollout, trace: Trace) -> dict[str, Any]:
    ids, part = rollout.response_ids.tolist(), slice(LONGEST)
    used = {*ids[part], *_ids(trace["student_top_ids"][part]), *_ids(trace["teacher_top_ids"][part])}
    return {
        "step": step,
        "stage": run.spec.name,
        "id": rollout.id,
        "domain": rollout.domain,
        "teacher": trace["by"],
        "ids": ids[part],
        "author": rollout.author[part].tolist(),
        "student": _rounded(trace["student"][part]),
        "teacher_logprob": _rounded(trace["teacher"][part]),
        "ratio": _rounded(trace["ratio"][part]) if "ratio" in trace else [None] * len(ids[part]),
        **{name: _rounded(trace[name][part]) for name in ("entropy", "teacher_entropy", "reverse_kl")},
        "student_top": _top(trace, "student", part),
        "teacher_top": _top(trace, "teacher", part),
        "texts": {str(index): run.student.tokenizer.decode([index]) for index in sorted(used)},
        "terms": {
            name: {
                key: {gate: _rounded(found[part]) for gate, found in values.items()}
                if isinstance(values, dict)
                else _rounded(values[part], significant=key == "weight")
                for key, values in term.items()
            }
            for name, term in trace["terms"].items()
        },
        "left_out": max(len(ids) - LONGEST, 0),
    }


def _ids(values: np.ndarray) -> Iterable[int]:
    return (index for index in values.ravel().tolist() if index >= 0)


def _top(trace: Trace, side: str, part: slice) -> list[list[list[float]]]:
    ids, logprobs = trace[f"{side}_top_ids"][part].tolist(), _rounded(trace[f"{side}_top"][part])
    return [
        [[index, value] for index, value in zip(row, values, strict=True) if index >= 0]
        for row, values in zip(ids, logprobs, strict=True)
    ]


def _rounded(values: np.ndarray, significant: bool = False) -> list[Any]:
    """Weights are as small as batches are large: they keep digits, not decimals."""
    if significant:
        return [float(f"{value:.{DIGITS}g}") for value in np.asarray(values).tolist()]
    found: list[Any] = np.round(np.asarray(values, dtype=np.float64), DIGITS).tolist()
    return found
