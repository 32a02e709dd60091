"""`key.path=value` on the command line, and how a stage's keys are laid over the defaults."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from opd.common.errors import RecipeError
from opd.recipe.paths import anchored
from opd.recipe.plain_data import DEEPEST, explain, parse_value, plain_data, shown
from opd.recipe.stage import Stage
from opd.registry import Choice, Family, WrittenAs, family_of, keys_of
from opd.rewards.reward import RESERVED, AnyWay

# Where choices stand in a recipe, found from the models that read it, and what is left of one that gives way to another.


Place = tuple[Any, ...]  # annotations of what may stand there


def below(place: Place, key: str) -> Place:
    """What may stand at a key of it. Which choice stands there makes no difference: one key means one thing in all of them."""
    found: list[Any] = []
    for option in _options(place):
        if isinstance(option, Family):
            found += [field for choice in option.classes().values() for field in _fields(choice, key)]
        elif get_origin(option) is dict:
            found.append(get_args(option)[1])
        else:
            found += _fields(option, key)
    return tuple(kind for number, kind in enumerate(found) if kind not in found[:number])


def family_at(place: Place) -> Family | None:
    """The choice that is made there, if any."""
    return next((option for option in _options(place) if isinstance(option, Family)), None)


def _options(place: Place) -> Iterator[Any]:
    """Families, models and mappings that annotations allow; the only entry of a list stands for the list."""
    for kind in place:
        origin, inner = get_origin(kind), get_args(kind)
        if origin is Annotated:
            family = next((mark for mark in inner[1:] if isinstance(mark, Family)), None)
            ways = next((mark.ways for mark in inner[1:] if isinstance(mark, AnyWay)), ())
            yield from [family] if family else _options((*ways, inner[0]))
        elif origin in (Union, UnionType, list, tuple):
            yield from _options(inner)
        elif origin is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
            yield kind


def _fields(model: type[BaseModel], key: str) -> list[Any]:
    for name, field in model.model_fields.items():
        written = next((mark.key for mark in field.metadata if isinstance(mark, WrittenAs)), name)
        if written == key:
            return [Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation]
    parts = [option for field in flat_of(model).values() for option in field.classes().values()]
    return [found for part in parts for found in _fields(part, key)]


def flat_of(model: type[BaseModel]) -> dict[str, Family]:
    """Field -> its family, where the settings of a choice stand beside its name: `divergence: jsd, beta: 0.5`."""
    return {field: family_of(model, field) for field in model.flat} if issubclass(model, Choice) else {}


def spelled_out(place: Place, old: Any, new: Mapping[str, Any]) -> Any:
    """The mapping that a name alone is short for, where new settings are those of what it names."""
    family = family_at(place)
    if family is None or not isinstance(old, str):
        return old
    whole = family.spelled_out(old)
    chosen = family.classes().get(str(family.named(whole)))
    return whole if chosen and new.keys() <= keys_of(chosen) else old


def inherited_settings(place: Place, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """What of old settings stays beside new ones: all, unless those name another choice. Then it is what all choices have; where none was
    written before, also what the new one has. One reward for every domain and rewards by domain take each other's place.
    """
    family = family_at(place)
    if family is not None and _other_way(place, old, new, family):
        return {key: value for key, value in old.items() if key in RESERVED}
    stays = dict(old)
    if family is None:
        return stays
    classes = family.classes()
    before, now = family.named(old), family.named(new)
    if family.key in new and now is None:  # `null`: the usual one
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


def _other_way(place: Place, old: Mapping[str, Any], new: Mapping[str, Any], family: Family) -> bool:
    """Whether one of the two is a reward for every domain, and the other rewards by domain."""
    marks = [mark for kind in place if get_origin(kind) is Annotated for mark in get_args(kind)[1:]]
    if not any(isinstance(mark, AnyWay) for mark in marks):
        return False
    if family.key in new:
        return _by_domain(old, family)
    one = family.classes().get(str(old.get(family.key)))
    return one is not None and _by_domain({key: new[key] for key in new if not _fields(one, key)}, family)


def _by_domain(rewards: Mapping[str, Any], family: Family) -> bool:
    entries = [entry for key, entry in rewards.items() if key not in RESERVED]
    return family.key not in rewards and ("domains" in rewards or any(_is_reward(entry, family) for entry in entries))


def _is_reward(entry: Any, family: Family) -> bool:
    if isinstance(entry, str):
        return family.named(family.spelled_out(entry)) in family.classes()
    return isinstance(entry, list) or (isinstance(entry, Mapping) and family.key in entry)


def _common(family: Family) -> set[str]:
    """Fields of the class that all choices of a family derive from."""
    some = next(iter(family.classes().values()), None)
    if some is None:  # all of its choices come from outside
        return set()
    *_, base = (parent for parent in some.__mro__ if issubclass(parent, Choice) and parent is not Choice)
    return set(base.model_fields)


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
