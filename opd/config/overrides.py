"""`key.path=value` on the command line, and how a stage's keys are laid over the defaults."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from opd import families
from opd.config.paths import anchored
from opd.config.plain_data import DEEPEST, explain, parse_value, plain_data, shown
from opd.errors import RecipeError
from opd.settings import Choice

SHORT = {  # what a plain value at these keys is short for
    "student": "model", "coefficient": "value", "gate": "kind", "surrogate": "kind", "correction": "kind", "prompts": "source",
    "sampler": "engine", "early_stop": "kind", "shares": "kind",
}  # fmt: skip


def apply_override(raw: dict[str, Any], override: str, base: Path | None = None) -> None:
    """Set `train.steps=50`, `prompts.0.share=2`, `objective.temperature=2` or `stages.NAME.train.lr=1e-5` in place.

    A path in the value is relative to `base`, the working directory unless given.
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
    for depth, part in enumerate(parents):
        node = _enter(node, part, parents[: depth + 1], shown_override)
    if isinstance(node, list):
        node[_index(node, last, shown_override)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise RecipeError(f"override {shown_override}: {'.'.join(parents)} is {shown(node)}, which has no keys.")


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


def merge(base: Mapping[str, Any], override: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Deep merge of mappings; everything else (lists too) is replaced. Of a mapping of another kind, whose keys mean other
    things, what all kinds have stays.

    >>> merge({"train": {"steps": 9, "lr": 1}}, {"train": {"steps": 5}})
    {'train': {'steps': 5, 'lr': 1}}
    >>> merge({"shares": {"kind": "gap", "power": 0.5}}, {"shares": {"kind": "length"}})
    {'shares': {'kind': 'length'}}
    """
    merged = dict(base)
    for key, value in override.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            place = (*path, str(key))
            merged[key] = merge(_kept(old, value, place), value, place)
        else:
            merged[key] = value
    return merged


def _kept(old: Mapping[str, Any], new: Mapping[str, Any], place: tuple[str, ...]) -> Mapping[str, Any]:
    """What of the old settings stays beside new ones. Where no kind was written, what the new kind has as well stays, too."""
    before, now = old.get("kind"), new.get("kind")
    if not isinstance(now, str) or before == now:
        return old
    family = _family(place)
    kinds = {name: families.find(family, name) for name in families.names(family)} if family else {}
    if before is not None:
        common = _common_fields(kinds[now]) if now in kinds else ()
        return {key: value for key, value in old.items() if key in common}
    usual = next((kind for kind in kinds.values() if kind.by_default), None)
    if now not in kinds or usual is None:
        return old
    gone = usual.model_fields.keys() - kinds[now].model_fields.keys()
    return {key: value for key, value in old.items() if key not in gone}


def _family(place: tuple[str, ...]) -> str | None:
    """The family of what stands there: keys are called as their family is, but for those that users name."""
    if place[0] == "teachers" and (len(place) == 2 or place[2:-1] == ("parts",)):
        return "teacher"
    if place[0] == "rewards":
        return "reward"
    return place[-1] if families.names(place[-1]) else None


def _common_fields(kind: type[Choice]) -> Collection[str]:
    """Of the class that all kinds of a family derive from."""
    *_, base = (parent for parent in kind.__mro__ if issubclass(parent, Choice) and parent is not Choice)
    return base.model_fields
