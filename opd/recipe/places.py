"""What a recipe accepts at each place, derived from the models that read it and from the marks on their fields."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from opd.common.short_forms import ByDomain, Short, ShortForm
from opd.registry import Choice, Family, family_of

Place = tuple[Any, ...]  # annotations of accepted values


def below(place: Place, key: str) -> Place:
    """What is accepted at a key of a place. All choices give a key the same meaning, so the choice makes no difference."""
    found: list[Any] = []
    for option in options(place):
        if isinstance(option, Family):
            found += [field for choice in option.classes().values() for field in fields(choice, key)]
        elif get_origin(option) is dict:
            found.append(get_args(option)[1])
        else:
            found += fields(option, key)
    return tuple(kind for number, kind in enumerate(found) if kind not in found[:number])


def family_at(place: Place) -> Family | None:
    """The family of which a choice is made there, if any."""
    return next((option for option in options(place) if isinstance(option, Family)), None)


def options(place: Place) -> Iterator[Any]:
    """Families, models and mappings that annotations allow. A list with one entry may be written as that entry."""
    for kind in place:
        origin, inner = get_origin(kind), get_args(kind)
        if origin is Annotated:
            family = next((mark for mark in inner[1:] if isinstance(mark, Family)), None)
            ways = next((mark.ways(inner[0]) for mark in inner[1:] if isinstance(mark, ByDomain)), ())
            yield from [family] if family else options((*ways, inner[0]))
        elif origin in (Union, UnionType, list, tuple):
            yield from options(inner)
        elif origin is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
            yield kind


def fields(model: type[BaseModel], key: str) -> list[Any]:
    """The annotation of a field, by the name that a recipe gives it; none if there is no such field."""
    for name, field in model.model_fields.items():
        written = next((mark.field for mark in field.metadata if isinstance(mark, ShortForm) and mark.field), name)
        if written == key:
            return [Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation]
    parts = [option for family in flat_of(model).values() for option in family.classes().values()]
    return [found for part in parts for found in fields(part, key)]


def flat_of(model: type[BaseModel]) -> dict[str, Family]:
    """Field -> its family, where the settings of a choice are written next to its name: `divergence: jsd, beta: 0.5`."""
    return {field: family_of(model, field) for field in model.flat} if issubclass(model, Choice) else {}


def forms(place: Place) -> Iterator[ShortForm]:
    """The short forms of a place, the outermost first."""
    for kind in place:
        origin, inner = get_origin(kind), get_args(kind)
        if origin is Annotated:
            yield from (mark for mark in inner[1:] if isinstance(mark, ShortForm))
            yield from forms(inner[:1])
            yield from forms(
                tuple(way for mark in inner[1:] if isinstance(mark, ByDomain) for way in mark.ways(inner[0]))
            )
        elif origin in (Union, UnionType, list, tuple):
            yield from forms(inner)


def as_mapping(place: Place, value: Any, *, keeping: bool = False) -> Any:
    """The mapping that a value is short for, or else the value itself.

    `keeping`: only if the other keys of a mapping are kept when the value is merged into it.
    """
    for form in forms(place):
        if isinstance(form, (Short, Family)) and (form.keeps or not keeping):
            value = form.long(value)
    return value


def key_of_text(place: Place, text: str) -> str | None:
    """The key whose value may be written alone, as this text."""
    long = as_mapping(place, text)
    return next((key for key, value in long.items() if value is text), None) if long is not text else None


def fields_at(place: Place) -> dict[str, FieldInfo]:
    """The keys that a mapping of settings may have there. Of a choice, those of the whole family."""
    models = [option for option in options(place) if get_origin(option) is None]
    every = [model.classes().values() if isinstance(model, Family) else [model] for model in models]
    return {key: field for some in every for model in some for key, field in model.model_fields.items()}
