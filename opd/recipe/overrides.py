"""`key.path=value` on the command line, and how a stage's keys are merged into the defaults."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from opd.common.errors import RecipeError
from opd.common.short_forms import ByDomain, OneOrMany
from opd.recipe.paths import with_absolute_paths
from opd.recipe.places import Place, as_mapping, below, family_at, fields, flat_of, forms
from opd.recipe.plain_data import DEEPEST, explain, parse_value, plain_data, shown
from opd.recipe.stage import Recipe, Stage
from opd.registry import Choice, Family, keys_of

STAGE: Place = (Stage,)
RECIPE: Place = (Recipe, Stage)


def inherited_settings(place: Place, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The old settings that remain when new ones are merged in: all, unless the new ones name another choice. Then only keys that all choices
    of the family share remain, and, if no choice was named before, keys that the new choice has. A single reward and rewards by domain
    replace each other.
    """
    family = family_at(place)
    if family is not None and _different_form(place, old, new, family):
        return {key: value for key, value in old.items() if key in ByDomain.reserved}
    stays = dict(old)
    if family is None:
        return stays
    classes = family.classes()
    before, now = family.named(old), family.named(new)
    if family.key in new and now is None:  # `null`: the default
        now = family.default
    inherited = family.key in old and family.key not in new
    if isinstance(now, str) and now != before and not inherited:
        usual = classes.get(str(family.default))
        if before is not None:
            stays = {key: value for key, value in old.items() if key in _common(family)}
        elif usual and now in classes:
            gone = keys_of(usual) - keys_of(classes[now])
            stays = {key: value for key, value in old.items() if key not in gone}
    chosen = classes.get(str(now if isinstance(now, str) and not inherited else before or family.default))
    if chosen is None:
        return stays
    for field, part in flat_of(chosen).items():
        if isinstance(new.get(field), str) and new[field] != stays.get(field, part.default):
            own = {key for option in part.classes().values() for key in option.model_fields} - _common(part)
            stays = {key: value for key, value in stays.items() if key not in own - chosen.model_fields.keys()}
    return stays


def _different_form(place: Place, old: Mapping[str, Any], new: Mapping[str, Any], family: Family) -> bool:
    """Whether one of the two is a single reward and the other has rewards by domain."""
    if not any(isinstance(form, ByDomain) for form in forms(place)):
        return False
    if family.key in new:
        return _by_domain(old, family)
    one = family.classes().get(str(old.get(family.key)))
    return one is not None and _by_domain({key: new[key] for key in new if not fields(one, key)}, family)


def _by_domain(rewards: Mapping[str, Any], family: Family) -> bool:
    entries = [entry for key, entry in rewards.items() if key not in ByDomain.reserved]
    return family.key not in rewards and ("domains" in rewards or any(_is_reward(entry, family) for entry in entries))


def _is_reward(entry: Any, family: Family) -> bool:
    if isinstance(entry, str):
        return family.named(family.long(entry)) in family.classes()
    return isinstance(entry, list) or (isinstance(entry, Mapping) and family.key in entry)


def _common(family: Family) -> set[str]:
    """Fields of the base class of a family."""
    some = next(iter(family.classes().values()), None)
    if some is None:  # all of its choices come from outside
        return set()
    *_, base = (parent for parent in some.__mro__ if issubclass(parent, Choice) and parent is not Choice)
    return set(base.model_fields)


def apply_overrides(raw: dict[str, Any], overrides: Iterable[str], base: Path | None = None) -> None:
    """Apply overrides in order. Naming another choice removes the settings of the old one, except those that an override set."""
    written: set[tuple[str, ...]] = set()
    for override in overrides:
        written.add(apply_override(raw, override, base, written))


def apply_override(
    raw: dict[str, Any], override: str, base: Path | None = None, written: Collection[tuple[str, ...]] = ()
) -> tuple[str, ...]:
    """Set `train.steps=50`, `prompts.0.share=2`, `objective.temperature=2` or `stages.NAME.train.lr=1e-5` in place.

    A path in the value is relative to `base` (default: the working directory). Keys at places in `written` stay. Returns the place.
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
    value = with_absolute_paths(value, base or Path.cwd(), STAGE, tuple(parts))
    *parents, last = parts
    node: Any = raw
    place = RECIPE
    where: tuple[str, ...] = ()
    for depth, part in enumerate(parents):
        where = (*where, str(_index(node, part, shown_override)) if isinstance(node, list) else part)
        if not isinstance(node, list):
            place = below(place, part)
        node = _enter(node, part, parts[depth + 1], place, shown_override)
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


def _enter(node: Any, part: str, then: str, place: Place, override: str) -> Any:
    """The mapping or list at `part`, created if missing, so that `then` can be set there. A short form becomes the long one."""
    key: Any
    if isinstance(node, list):
        key = _index(node, part, override)
        child = node[key]
    elif isinstance(node, dict):
        key, child = part, node.get(part)
    else:
        raise RecipeError(f"override {override}: {shown(part)} is looked up in {shown(node)}, which has no keys.")
    if child is None:
        child = {}
    elif not isinstance(child, list):
        listed = then == "0" and any(isinstance(form, (OneOrMany, ByDomain)) for form in forms(place))
        child = [child] if listed and not (isinstance(child, dict) and then in child) else child
        child = child if isinstance(child, (dict, list)) else as_mapping(place, child)
    elif not then.isdigit():
        child = as_mapping(place, child)
    node[key] = child
    return child


def _index(node: list[Any], part: str, override: str) -> int:
    if part.isascii() and part.isdigit() and len(part) < 10 and int(part) < len(node):
        return int(part)
    for index, item in enumerate(node):  # stages.NAME
        if isinstance(item, Mapping) and item.get("name") == part:
            return index
    names = [str(item["name"]) for item in node if isinstance(item, Mapping) and "name" in item]
    known = f"names {shown(', '.join(names))}" if names else f"{len(node)} items, counted from 0"
    raise RecipeError(f"override {override}: no item {shown(part)} in the list; it has {known}.")


def merge(base: Mapping[str, Any], override: Mapping[str, Any], place: Place = STAGE) -> dict[str, Any]:
    """Deep merge of mappings, including their short forms. Anything else replaces the old value: lists, and a short form over a mapping
    unless it keeps the other keys. If the new mapping names another choice, only keys that all choices share are kept.

    >>> merge({"train": {"steps": 9, "lr": 1}}, {"train": {"steps": 5}})
    {'train': {'steps': 5, 'lr': 1}}
    >>> merge({"shares": {"kind": "gap", "power": 0.5}}, {"shares": {"kind": "length"}})
    {'shares': {'kind': 'length'}}
    """
    merged = dict(base)
    for key, given in override.items():
        there = below(place, key)
        merged[key] = value = as_mapping(there, given, keeping=True)
        old = as_mapping(there, base.get(key))
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(inherited_settings(there, old, value), value, there)
    return merged
