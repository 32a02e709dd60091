"""Where choices stand in a recipe, found from the models that read it, and what is left of one that gives way to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from opd.rewards.settings import RESERVED, AnyWay
from opd.settings import Choice, Family, family_of, keys_of
from opd.shorthand import WrittenAs

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
    some = next(iter(family.classes().values()))
    *_, base = (parent for parent in some.__mro__ if issubclass(parent, Choice) and parent is not Choice)
    return set(base.model_fields)
