"""Runs small enough to be stopped and resumed in the process of a test."""

from __future__ import annotations

import itertools
import os
import pkgutil
from typing import Any

import pytest


def small(models: dict[str, str], **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "student": models["student"],
        "teachers": {"a": models["teacher"]},
        "prompts": [{"source": "task:addition", "domain": "a"}],
        "rollout": {"prompts": 4, "max_new_tokens": 6},
        "sampler": {"slots": 4},
        "train": {"steps": 4, "lr": 1e-2},
        "eval": {"prompts": 2},
        "checkpoint": {"every": 1, "keep": 2, "resume": "exact"},
        "device": "cpu",
    }
    return base | changes


class Crash(BaseException):
    """Ends a run where it stands: nothing is saved on the way out."""


def strike(monkeypatch: pytest.MonkeyPatch, place: str, call: int, what: type[BaseException] | int) -> None:
    """The given call of a function raises, or sends a signal and goes on; all others are as ever."""
    original = pkgutil.resolve_name(place)
    calls = itertools.count(1)

    def struck(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            if not isinstance(what, int):
                raise what
            os.kill(os.getpid(), what)
        return original(*arguments, **options)

    monkeypatch.setattr(place.replace(":", "."), struck)


SAMPLED = "opd.loop.scorer:Scorer.score"  # called once per step, when its rollouts are drawn and rewarded
SCORED = "opd.loop.step:micro_batches"  # and once they are scored
