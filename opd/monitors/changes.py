"""Changes that remedies make to a stage as `resolved.yaml` has it. Each returns a copy, or None where it changes nothing."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

from opd.monitors.monitor import RecipeStage
from opd.text import plain

DIVERGENCE_KEYS = ("divergence", "alpha", "beta")
SUPPORT_KEYS = ("support", "k", "side", "closure")
SAMPLED_KEYS = ("advantage", "surrogate", "correction", *DIVERGENCE_KEYS)
Change = Callable[[dict[str, Any]], dict[str, Any] | None]  # of a term; None: it stays as it is


def with_terms(stage: RecipeStage, change: Change) -> RecipeStage | None:
    found = copy.deepcopy(stage)
    changed = [change(dict(term)) for term in found["objective"]]
    if not any(changed):
        return None
    found["objective"] = [new or old for new, old in zip(changed, found["objective"], strict=True)]
    return found


def with_settings(stage: RecipeStage, part: str, **settings: Any) -> RecipeStage | None:
    if all(stage[part].get(key) == value for key, value in settings.items()):
        return None
    return {**copy.deepcopy(stage), part: {**copy.deepcopy(stage[part]), **settings}}


def with_teachers(stage: RecipeStage, change: Change) -> RecipeStage | None:
    found = copy.deepcopy(stage)
    changed = {name: change(dict(kind)) for name, kind in found["teachers"].items()}
    if not any(changed.values()):
        return None
    found["teachers"] = {name: changed[name] or kind for name, kind in found["teachers"].items()}
    return found


def without(term: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in term.items() if key not in keys}


def other_divergence(kind: str, **settings: Any) -> Change:
    """Direct terms get this divergence, and those that go by sampled tokens become direct ones."""

    def change(term: dict[str, Any]) -> dict[str, Any] | None:
        if term["form"] == "direct" and term["divergence"] != kind:
            return {**without(term, *DIVERGENCE_KEYS), "divergence": kind, **settings}
        return {**direct(term), "divergence": kind, **settings} if goes_by_teacher(term) else None

    return change


def goes_by_teacher(term: dict[str, Any]) -> bool:
    """Whether it goes by what a teacher says of sampled tokens."""
    return term["form"] == "k2" or (
        term["form"] == "policy_gradient" and bool(term["advantage"].get("teacher_weight", 1))
    )


def direct(term: dict[str, Any]) -> dict[str, Any]:
    """A term of sampled tokens, computed exactly instead."""
    return {**without(term, *SAMPLED_KEYS), "form": "direct"}


def gated(gate: str) -> Change:
    """With one gate more."""

    def change(term: dict[str, Any]) -> dict[str, Any] | None:
        kinds = [one["kind"] for one in term["gate"]]
        return None if gate in kinds else {**term, "gate": [*term["gate"], {"kind": gate}]}

    return change


def slower(stage: RecipeStage) -> RecipeStage | None:
    """A third of the learning rate."""
    return with_settings(stage, "train", lr=stage["train"]["lr"] / 3)


def frozen(kind: dict[str, Any], start: dict[str, Any]) -> dict[str, Any]:
    """A teacher that is the student at the start of its stage, or a mixture of such, where the stage is to start elsewhere: `start` is its model."""
    if kind["kind"] in ("self", "base"):
        return {**kind, "kind": "frozen", **start}
    inner: dict[str, Any] = {key: frozen(kind[key], start) for key in ("toward", "away") if key in kind}
    if "parts" in kind:
        inner["parts"] = {name: frozen(part, start) for name, part in kind["parts"].items()}
    return {**kind, **inner}


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """What has changed, key by key.

    >>> list(differences({"train": {"lr": 0.3, "clip": 1.0}}, {"train": {"lr": 0.3 / 3}, "teachers": {"b": "x"}}))
    ['train.lr: 0.3 → 0.1', 'train.clip: dropped', 'teachers: {"b": "x"}']
    """
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            yield from differences(before.get(key), after.get(key), f"{place}.{key}" if place else key)
    elif isinstance(before, list) and isinstance(after, list):
        for number, (was, now) in enumerate(zip_longest(before, after)):
            yield from differences(was, now, f"{place}.{number}")
    elif after is None:
        yield f"{place}: dropped"
    else:
        yield f"{place}: {'' if before is None else f'{_shown(before)} → '}{_shown(after)}"


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else plain(json.dumps(value, ensure_ascii=False), 120)
