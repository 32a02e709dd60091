"""`key.path=value` on the command line, and how a stage's keys are laid over the defaults."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from opd.config.paths import anchored
from opd.config.places import Place, below, inherited_settings, spelled_out
from opd.config.plain_data import DEEPEST, explain, parse_value, plain_data, shown
from opd.config.stage import Stage
from opd.errors import RecipeError

SHORT = {  # what a plain value at these keys is short for
    "student": "model", "coefficient": "value", "gate": "kind", "surrogate": "kind", "correction": "kind", "prompts": "source",
    "sampler": "engine", "early_stop": "kind", "shares": "kind",
}  # fmt: skip


def apply_overrides(raw: dict[str, Any], overrides: Iterable[str], base: Path | None = None) -> None:
    """One after the other. One that names another choice takes the settings of the old one away, but none that an override set."""
    written: set[tuple[str, ...]] = set()
    for override in overrides:
        written.add(apply_override(raw, override, base, written))


def apply_override(
    raw: dict[str, Any], override: str, base: Path | None = None, written: Collection[tuple[str, ...]] = ()
) -> tuple[str, ...]:
    """Set `train.steps=50`, `prompts.0.share=2`, `objective.temperature=2` or `stages.NAME.train.lr=1e-5` in place.

    A path in the value is relative to `base`, the working directory unless given. Keys at places in `written` stay. The place that was set.
    """
    path, separator, text = override.partition("=")
    shown_override = shown(override)
    parts = path.split(".")
    if not separator or not all(parts) or len(parts) > DEEPEST:
        raise RecipeError(f"override {shown_override}: expected KEY=VALUE, for example train.steps=50.")
    plain_data(path, f"override {shown_override}")
    try:
        value = plain_data(parse_value(text), path)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {shown_override}: not a YAML value: {explain(error)}.") from None
    value = anchored(value, base or Path.cwd(), tuple(parts))
    *parents, last = parts
    node: Any = raw
    place: Place = (Stage,)
    where: tuple[str, ...] = ()
    for depth, part in enumerate(parents):
        where = (*where, str(_index(node, part, shown_override)) if isinstance(node, list) else part)
        if not isinstance(node, list) and where != ("stages",):
            place = below(place, part)
        node = _enter(node, part, parents[: depth + 1], shown_override)
    if isinstance(node, list):
        index = _index(node, last, shown_override)
        node[index], last = value, str(index)
    elif isinstance(node, dict):
        stays = inherited_settings(place, node, {last: value})
        for key in [key for key in node if key not in stays and (*where, key) not in written]:
            del node[key]
        node[last] = value
    else:
        raise RecipeError(f"override {shown_override}: {'.'.join(parents)} is {shown(node)}, which has no keys.")
    return (*where, last)


def _enter(node: Any, part: str, path: list[str], override: str) -> Any:
    """The mapping or list at `part`, made where there is none; short forms are written out on the way."""
    if isinstance(node, list):
        place: Any = _index(node, part, override)
        child = node[place]
    elif isinstance(node, dict):
        place, child = part, node.get(part)
    else:
        raise RecipeError(f"override {override}: {shown(part)} is looked up in {shown(node)}, which has no keys.")
    if child is None:
        child = {}
    elif not isinstance(child, (dict, list)):
        short = SHORT.get(part) or ("model" if _is_teacher(path) else None)
        short = short or ("source" if "prompts" in path[-2:-1] else None)
        child = {short: child} if short else child
    node[place] = child
    return child


def _is_teacher(path: list[str]) -> bool:
    return path[-2:-1] == ["teachers"] and len(path) in (2, 4)  # at the top, or in stages.NAME


def _index(node: list[Any], part: str, override: str) -> int:
    if part.isascii() and part.isdigit() and len(part) < 10 and int(part) < len(node):
        return int(part)
    for index, item in enumerate(node):  # stages.NAME
        if isinstance(item, Mapping) and item.get("name") == part:
            return index
    names = [str(item["name"]) for item in node if isinstance(item, Mapping) and "name" in item]
    known = f"names {shown(', '.join(names))}" if names else f"{len(node)} items, counted from 0"
    raise RecipeError(f"override {override}: no item {shown(part)} in the list; it has {known}.")


def merge(base: Mapping[str, Any], override: Mapping[str, Any], place: Place = (Stage,)) -> dict[str, Any]:
    """Deep merge of mappings; everything else (lists too) is replaced. Of another choice, whose keys mean other things, what
    all choices have stays.

    >>> merge({"train": {"steps": 9, "lr": 1}}, {"train": {"steps": 5}})
    {'train': {'steps': 5, 'lr': 1}}
    >>> merge({"shares": {"kind": "gap", "power": 0.5}}, {"shares": {"kind": "length"}})
    {'shares': {'kind': 'length'}}
    """
    merged = dict(base)
    for key, value in override.items():
        old, there = merged.get(key), below(place, key)
        if isinstance(value, Mapping):
            old = spelled_out(there, old, value)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(inherited_settings(there, old, value), value, there)
        else:
            merged[key] = value
    return merged
