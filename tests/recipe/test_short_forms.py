"""Every short form is read, overridden, laid over, in the JSON schema, and named in messages where it was written."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, get_origin

import jsonschema
import pytest
from pydantic import BaseModel

from opd.common.errors import RecipeError
from opd.common.short_forms import SHORT_FORMS, TEXTS, ShortForm
from opd.recipe import load_recipe, recipe_schema
from opd.recipe.places import Place, below, flat_of, forms, options
from opd.recipe.stage import Recipe, Stage
from opd.registry import Choice, Family, keys_of
from tests.support.places import PLACES

MINIMAL: dict[str, Any] = {
    "student": "tiny/generalist",
    "prompts": "task:addition",
    "teachers": {"t": "tiny/arithmetic"},
}
SERVED = {"kind": "openai", "model": "m", "role": "teacher"}
MIXED = {"kind": "mixture", "parts": {"a": "tiny/arithmetic", "b": "tiny/generalist"}}
FAR = {"kind": "extrapolation", "toward": "tiny/arithmetic", "away": "tiny/generalist"}
RATIO = {"form": "policy_gradient", "advantage": {"outcome_weight": 1.0, "baseline": "batch"}}
URL = "http://127.0.0.1:8200"

# place -> the short form, the long one, and a value that is wrong there. `settings`: what stands around it.
ROWS: dict[str, tuple[Any, Any, Any]] = {
    "plugins": ("json", ["json"], 5),
    "student": ("tiny/generalist", {"model": "tiny/generalist"}, 5),
    "teachers": ("tiny/arithmetic", {"teacher": {"model": "tiny/arithmetic"}}, 5),
    "teachers.NAME.address": (URL, [URL], 5),
    "teachers.NAME.weights.NAME": (0.5, {"value": 0.5}, "much"),
    "teachers.NAME.by": (0.5, {"value": 0.5}, "much"),
    "prompts": ("task:addition", [{"source": "task:addition"}], 5),
    "rollout.writers": ({"kind": "data", "share": 0.5}, [{"kind": "data", "share": 0.5}], 5),
    "sampler.address": (URL, [URL], 5),
    "objective": ({"form": "direct"}, [{"form": "direct"}], 5),
    "objective.coefficient": (0.5, {"value": 0.5}, "much"),
    "objective.gate": ("random", [{"kind": "random"}], 5),
    "objective.advantage.also": ("magnitude", [{"kind": "magnitude"}], 5),
    "rewards": ("numeric", {"domains": {"default": [{"kind": "numeric"}]}}, 5),
    "rewards.DOMAIN": ("numeric", [{"kind": "numeric"}], 5),
    "eval.further": ("task:reverse", [{"source": "task:reverse"}], 5),
    "log": ("tensorboard", {"to": [{"kind": "tensorboard"}]}, 5),
    "log.to": ("tensorboard", [{"kind": "tensorboard"}], 5),
    "monitors": ("stop", {"action": "stop"}, "nothing"),
    "monitors.watch": ("kl", [{"kind": "kl"}], 5),
    "monitors.ignore": ("shortening", ["shortening"], 5),
    "cluster.sizes.NAME": ("32B", {"parameters": 32_000_000_000}, "lots"),
}  # fmt: skip
AROUND: dict[str, dict[str, Any]] = {
    "teachers.NAME.address": {"teachers": {"x": SERVED}, "objective": RATIO, "eval": {"teachers": False}},
    "teachers.NAME.weights.NAME": {"teachers": {"x": {**MIXED, "weights": {"b": 0.5}}}},
    "teachers.NAME.by": {"teachers": {"x": FAR}},
    "sampler.address": {"sampler": {"engine": "vllm"}, "rollout": {"max_new_tokens": 4}},
    "objective.advantage.also": {"objective": RATIO, "rollout": {"samples": 2}},
}
NAMES = {"teachers.NAME.weights.NAME": "teachers.x.weights.a", "rewards.DOMAIN": "rewards.addition"}


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(recipe_schema())


def key(place: str) -> str:
    """The place as an override names it."""
    return NAMES.get(place, place.replace("NAME", "x"))


def written(place: str, value: Any) -> dict[str, Any]:
    """A recipe with a value at a place."""
    raw = copy.deepcopy(MINIMAL | AROUND.get(place, {}))
    node, (*parents, last) = raw, key(place).split(".")
    for part in parents:
        node = node.setdefault(part, {})
    node[last] = value
    return raw


def read(raw: dict[str, Any], *overrides: str) -> str:
    return load_recipe(raw, overrides).to_yaml()


def test_every_row_is_tried_here() -> None:
    assert list(ROWS) == list(SHORT_FORMS)


@pytest.mark.parametrize("place", SHORT_FORMS)
def test_short_and_long_mean_the_same(place: str, validator: Any) -> None:
    short, long, _ = ROWS[place]
    assert read(written(place, short)) == read(written(place, long))
    for form in (short, long):
        validator.validate(written(place, form))


@pytest.mark.parametrize("place", SHORT_FORMS)
def test_an_override_writes_it_short_and_sets_keys_of_it(place: str) -> None:
    short, long, _ = ROWS[place]
    assert read(written(place, None), f"{key(place)}={json.dumps(short)}") == read(written(place, long))
    if isinstance(long, list):
        changed = read(written(place, short), f"{key(place)}.0={json.dumps(long[0])}")
    else:
        inner, value = next(iter(long.items()))
        changed = read(written(place, short), f"{key(place)}.{inner}={json.dumps(value)}")
    assert changed == read(written(place, long))


@pytest.mark.parametrize(("place", "keys"), [
    ("student", {"lora": {"rank": 4}}), ("teachers", {"teacher": {"dtype": "bfloat16"}}), ("log", {"samples": 0}),
    ("monitors", {"ignore": "shortening"}), ("objective.coefficient", {"to": 0.1, "over": 5}), ("rewards", {"stop_after": 9}),
    ("teachers.NAME.by", {"domains": {"addition": 0.5}}), ("teachers.NAME.weights.NAME", {"to": 0.5, "over": 3}),
    ("cluster.sizes.NAME", {"layers": 3}),
])  # fmt: skip
def test_a_stage_lays_keys_over_a_short_form_as_over_the_long_one(place: str, keys: dict[str, Any]) -> None:
    short, long, _ = ROWS[place]
    long = {"kind": short} if place == "rewards" else long
    stage: dict[str, Any] = {"name": "a"}
    node, (*parents, last) = stage, key(place).split(".")
    for part in parents:
        node = node.setdefault(part, {})
    node[last] = keys
    assert read(written(place, short) | {"stages": [stage]}) == read(written(place, long) | {"stages": [stage]})
    assert read(written(place, short) | {"stages": [stage]}) != read(
        written(place, short) | {"stages": [{"name": "a"}]}
    )


@pytest.mark.parametrize("place", SHORT_FORMS)
def test_mistakes_are_reported_at_the_place_where_they_were_written(place: str, validator: Any) -> None:
    wrong = ROWS[place][2]
    at = "objective.advantage" if place == "objective.advantage.also" else key(place)  # its parts are read at once
    with pytest.raises(RecipeError) as error:
        read(written(place, wrong))
    assert str(error.value).startswith(f"{at}: "), str(error.value)
    assert not validator.is_valid(written(place, wrong))


def marked(place: Place, path: str = "", seen: tuple[Any, ...] = ()) -> Iterator[tuple[str, ShortForm]]:
    """(path, form) of every mark on a field below a place."""
    yield from ((path, form) for form in forms(place) if not isinstance(form, Family))
    for option in options(place):
        if isinstance(option, Family):
            classes: list[type[BaseModel]] = list(option.classes().values())
        elif get_origin(option) is dict:
            if path.count("NAME") < 2:
                yield from marked(below((option,), "NAME"), f"{path}.NAME", seen)
            continue
        else:
            classes = [option]
        for model in classes:
            if model not in seen:
                own = keys_of(model) if issubclass(model, Choice) else {*model.model_fields, "also"}
                for name in sorted(own - flat_of(model).keys()):
                    yield from marked(below((model,), name), f"{path}.{name}", (*seen, model))


def test_every_mark_is_a_row_of_the_table() -> None:
    rows = {id(form) for form in SHORT_FORMS.values()}
    found = list(marked((Recipe, Stage)))
    assert {id(form) for _, form in found} == rows, [path for path, form in found if id(form) not in rows]


@pytest.mark.parametrize("path", [path for path, family in PLACES.items() if family.names()], ids=".".join)
def test_a_text_in_place_of_a_choice_is_short_for_one_key(path: tuple[str, ...]) -> None:
    family = PLACES[path]
    name = family.names()[0]
    text = "module:function" if family.name == "reward" else name
    form = TEXTS.get(family.name)
    assert family.long(name if family.name == "reward" else text) == {
        form.key if form and not form.pattern else family.key: name
    }
    assert form is None or family.long(text) == {**form.rest, form.key: text}
    long = family.long(text)
    assert family.long(long) is long


@pytest.mark.parametrize(
    ("family", "place"), [("gate", "objective.gate"), ("tracker", "log.to"), ("stop_rule", "eval.early_stop")]
)
def test_a_name_alone_is_in_the_schema_unless_the_choice_needs_more(family: str, place: str, validator: Any) -> None:
    for name in Family(family).names():
        raw = written(place, name)
        needs = [key for key, field in Family(family).find(name).model_fields.items() if field.is_required()]
        assert validator.is_valid(raw) == (not needs), name
        if needs:
            with pytest.raises(RecipeError, match=f"{place}.{needs[0]}: missing"):
                read(raw)
