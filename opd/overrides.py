"""`key.path=value` on the command line, and how a stage's keys are laid over the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from opd.errors import RecipeError


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set `train.steps=50`, `prompts.0.share=2`, `objective.temperature=2` or `stages.NAME.train.lr=1e-5` in place."""
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise RecipeError(f"override {override!r}: expected KEY=VALUE, for example train.steps=50.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise RecipeError(f"override {override!r}: {text!r} is not a YAML value.") from None
    value = _number(value)
    *parents, last = path.split(".")
    node: Any = raw
    for part in parents:
        child = _child(node, part, override)
        if isinstance(child, str) and part in ("student", *_teacher_names(raw)):
            child = {"model": child}  # `student: tiny/generalist` is short for `student: {model: …}`
        elif child is None:
            child = {}
        if isinstance(node, list):
            node[_index(node, part, override)] = child
        else:
            node[part] = child
        node = child
    if isinstance(node, list):
        node[_index(node, last, override)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise RecipeError(f"override {override!r}: {'.'.join(parents)} is {node!r}, which has no keys.")


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-5 as a string; people mean the number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _teacher_names(raw: Mapping[str, Any]) -> tuple[str, ...]:
    teachers = raw.get("teachers")
    return tuple(teachers) if isinstance(teachers, Mapping) else ()


def _child(node: Any, part: str, override: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, part, override)]
    if isinstance(node, dict):
        return node.get(part)
    raise RecipeError(f"override {override!r}: {part!r} is looked up in {node!r}, which has no keys.")


def _index(node: list[Any], part: str, override: str) -> int:
    if part.isdigit() and int(part) < len(node):
        return int(part)
    for index, item in enumerate(node):  # stages.NAME
        if isinstance(item, Mapping) and item.get("name") == part:
            return index
    names = [str(item["name"]) for item in node if isinstance(item, Mapping) and "name" in item]
    known = f"names {', '.join(names)}" if names else f"indices 0 to {len(node) - 1}"
    raise RecipeError(f"override {override!r}: no item {part!r} in the list; it has {known}.")


def merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Deep merge of mappings; everything else (lists too) is replaced.

    >>> merge({"train": {"steps": 9, "lr": 1}}, {"train": {"steps": 5}})
    {'train': {'steps': 5, 'lr': 1}}
    """
    merged = dict(base)
    for key, value in override.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
