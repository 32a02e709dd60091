"""Every place of a recipe where a choice stands, with its family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_origin

from opd.objective.advantages import Advantage
from opd.recipe.places import Place, below, family_at, options
from opd.recipe.stage import Stage
from opd.registry import Family, keys_of


def walk(place: Place = (Stage,), path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Family]]:
    family = family_at(place)
    if family is not None:
        yield path, family
    keys: set[str] = set()
    for option in options(place):
        if isinstance(option, Family):
            keys |= {key for choice in option.classes().values() for key in keys_of(choice)}
        elif get_origin(option) is dict:
            keys.add("name")
        else:
            keys |= {"also"} if option is Advantage else option.model_fields.keys()
    for key in sorted(keys):
        if path[:1] != ("rewards",) or key in ("domains", "name"):  # its keys are names of domains, whatever they are
            yield from walk(below(place, key), (*path, key))


PLACES = dict(walk())
