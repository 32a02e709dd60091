"""What was changed in a run after it had begun: how `run.json` records it, and how it is described.

    {"recipe": "resolved-2.yaml",                       what the run carries out from then on
     "stages": {"main": {"after": 10,                   the last step that was trained as before
                         "keys": {"train.steps": [10, 20]},   key -> old and new value
                         "lr": [0.0001, 5e-05],         the learning rate of that step, and of the next one; null: no change
                         "schedule": "linear over 20 steps",  with which it continues
                         "result": {…}}}}               what the stage had ended with; null: it had not ended

`resolved.yaml`, `resolved-2.yaml`, … are never changed: one per part of the run.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from opd.common.files import SEALS, read_sealed
from opd.common.text import plain

RESOLVED = "resolved.yaml"
LONGEST = 120  # characters of a value in a message


class KeyChange(NamedTuple):
    key: str  # in its stage: train.steps
    old: Any
    new: Any

    def in_words(self) -> str:
        return f"{self.key} {shown_value(self.old)} → {shown_value(self.new)}"


def changes_of(directory: Path) -> list[dict[str, Any]]:
    """Oldest first. A `run.json` that is damaged is an error; a directory without one has none."""
    sealed = directory / SEALS
    found: list[dict[str, Any]] = read_sealed(sealed).get("changes", []) if sealed.is_file() else []
    return found


def recipe_file(directory: Path) -> Path:
    """What the run carries out now: `resolved.yaml`, or the file that its newest change wrote."""
    changes = changes_of(directory)
    return directory / (changes[-1]["recipe"] if changes else RESOLVED)


def recipe_name(changes: int) -> str:
    """The file's name after this many changes.

    >>> recipe_name(0), recipe_name(1)
    ('resolved.yaml', 'resolved-2.yaml')
    """
    return f"resolved-{changes + 1}.yaml" if changes else RESOLVED


def parts_of(changes: Sequence[Mapping[str, Any]], stage: str) -> list[dict[str, Any]]:
    """The changes of one stage, oldest first."""
    return [change["stages"][stage] for change in changes if stage in change["stages"]]


def changed_keys(
    before: Mapping[str, Any], after: Mapping[str, Any], place: str = "", *, whole: bool = False
) -> Iterator[KeyChange]:
    """The innermost keys that differ between two stages, given as plain data. A list is one value. With `whole`, so is a mapping whose keys
    have changed, such as another kind of a choice.

    >>> [change.in_words() for change in changed_keys({"train": {"steps": 10, "lr": 1.0}}, {"train": {"steps": 20, "lr": 1.0}})]
    ['train.steps 10 → 20']
    """
    for key in dict.fromkeys((*before, *after)):
        old, new, name = before.get(key), after.get(key), f"{place}{key}"
        if isinstance(old, Mapping) and isinstance(new, Mapping) and (not whole or old.keys() == new.keys()):
            yield from changed_keys(old, new, f"{name}.", whole=whole)
        elif old != new or (key in before) != (key in after):
            yield KeyChange(name, old, new)


def changed_text(text: str, stages: Mapping[str, Mapping[str, Sequence[Any]]]) -> str:
    """A resolved recipe with other values; `stages`: name -> key -> old and new value. Everything else is unchanged."""
    raw = copy.deepcopy(yaml.safe_load(text))
    for stage in raw["stages"]:
        for key, (_, new) in stages.get(stage["name"], {}).items():
            *parents, last = key.split(".")
            node = stage
            for part in parents:
                node = node.setdefault(part, {})  # runs of earlier versions do not spell out every section
            node[last] = new
    return yaml.safe_dump(raw, sort_keys=False, allow_unicode=True, width=120)


def shown_value(value: Any) -> str:
    return plain(json.dumps(value, ensure_ascii=False), LONGEST)


def part_in_words(part: Mapping[str, Any]) -> str:
    """One change of one stage.

    >>> part_in_words({"after": 10, "keys": {"train.steps": [10, 20]}, "lr": [0.1, 0.5], "schedule": "linear over 20 steps"})
    'after step 10: train.steps 10 → 20; learning rate 0.1 at step 10, 0.5 at step 11 (linear over 20 steps)'
    """
    after, rates = part["after"], part["lr"]
    changes = "; ".join(KeyChange(key, *values).in_words() for key, values in part["keys"].items())
    if rates is None:
        return f"after step {after}: {changes}"
    moved = f"learning rate {rates[0]:.6g} at step {after}, {rates[1]:.6g} at step {after + 1}"
    return f"after step {after}: {changes}; {moved} ({part['schedule']})"


def changes_in_words(changes: Sequence[Mapping[str, Any]], stages: int) -> list[str]:
    """A line per change; with several `stages`, their names."""
    return [
        (f"stage {plain(name)}, " if stages > 1 else "") + part_in_words(part)
        for change in changes
        for name, part in change["stages"].items()
    ]
