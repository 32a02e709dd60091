"""Every choice in a recipe: what is left of its settings where a stage, or the command line, names another."""

from __future__ import annotations

from typing import Any

import pytest

from opd import registry
from opd.common.errors import RecipeError
from opd.objective.stopping import Patience
from opd.recipe import load_recipe
from opd.recipe.overrides import _common, apply_overrides, merge
from opd.registry import keys_of
from tests.support.places import PLACES

ADDITION = {"student": "tiny/generalist", "teachers": "tiny/arithmetic", "prompts": "task:addition"}


def nested(path: tuple[str, ...], value: Any) -> Any:
    return {path[0]: nested(path[1:], value)} if path else value


def test_every_family_is_used_somewhere() -> None:
    assert {family.name for family in PLACES.values()} == {entry.split(".")[0] for entry in registry.CHOICES}


@pytest.mark.parametrize("path", [path for path, family in PLACES.items() if len(family.names()) > 1], ids=".".join)
def test_another_choice_keeps_what_all_have(path: tuple[str, ...]) -> None:
    family = PLACES[path]
    common = dict.fromkeys(_common(family), 1)
    names = family.names()
    for before, now in zip(names, [*names[1:], names[0]], strict=True):
        old = {family.key: before, **dict.fromkeys(keys_of(family.find(before)), 1), "mistaken": 1}
        new = {family.key: now}
        assert merge(nested(path, old), nested(path, new)) == nested(path, common | new)
        raw = nested(path, dict(old))
        apply_overrides(raw, [f"{'.'.join((*path, family.key))}={now}"])
        assert raw == nested(path, common | new)
        assert merge(nested(path, old), nested(path, {family.key: before})) == nested(path, old)


@pytest.mark.parametrize(("default", "laid_over", "expected"), [
    ({"sampler": {"engine": "vllm", "memory": 0.3}}, {"sampler": {"engine": "builtin"}}, {"sampler": {"engine": "builtin"}}),
    ({"sampler": {"prefill_rows": 3}}, {"sampler": {"engine": "vllm"}}, {"sampler": {"engine": "vllm"}}),
    ({"sampler": "vllm"}, {"sampler": {"memory": 0.3}}, {"sampler": {"engine": "vllm", "memory": 0.3}}),
    ({"eval": {"every": 5, "early_stop": {"kind": "target", "value": 0.5}}}, {"eval": {"early_stop": {"kind": "patience"}}},
     {"eval": {"every": 5, "early_stop": {"kind": "patience"}}}),
    ({"eval": {"every": 5, "early_stop": {"patience": 2}}}, {"eval": {"early_stop": {"kind": "target"}}},
     {"eval": {"every": 5, "early_stop": {"kind": "target"}}}),
    ({"objective": {"coefficient": 0.5, "divergence": "jsd", "beta": 0.3}}, {"objective": {"form": "k2"}},
     {"objective": {"form": "k2", "coefficient": 0.5}}),
    ({"objective": {"divergence": "jsd", "beta": 0.3, "support": "topk", "k": 4}}, {"objective": {"divergence": "forward_kl"}},
     {"objective": {"divergence": "forward_kl", "support": "topk", "k": 4}}),
    ({"objective": {"divergence": "jsd", "beta": 0.3}}, {"objective": {"beta": 0.5}}, {"objective": {"divergence": "jsd", "beta": 0.5}}),
    ({"prompts": {"source": "task:addition", "domain": "sums", "difficulty": 0}}, {"prompts": {"source": "rows.jsonl"}},
     {"prompts": {"source": "rows.jsonl", "domain": "sums"}}),
    ({"prompts": {"kind": "file", "source": "rows", "limit": 3}}, {"prompts": {"source": "more"}},
     {"prompts": {"kind": "file", "source": "more", "limit": 3}}),
    ({"shares": {"kind": "gap", "power": 0.5}}, {"shares": {"kind": None}}, {"shares": {"kind": None}}),
    ({"rewards": {"maths": "exact"}}, {"rewards": {"maths": {"weight": 2}}}, {"rewards": {"maths": {"kind": "exact", "weight": 2}}}),
    ({"rewards": "exact"}, {"rewards": {"maths": {"kind": "numeric"}}}, {"rewards": {"maths": {"kind": "numeric"}}}),
    ({"rewards": {"kind": "exact", "stop_after": 9}}, {"rewards": {"maths": {"kind": "numeric"}}},
     {"rewards": {"maths": {"kind": "numeric"}, "stop_after": 9}}),
    ({"rewards": {"maths": "exact", "sandbox": "none"}}, {"rewards": {"kind": "numeric"}}, {"rewards": {"kind": "numeric", "sandbox": "none"}}),
    ({"rewards": {"maths": "exact", "sandbox": "none"}}, {"rewards": "numeric"}, {"rewards": "numeric"}),
    ({"rewards": {"kind": "exact", "weight": 2}}, {"rewards": {"field": "code"}}, {"rewards": {"kind": "exact", "weight": 2, "field": "code"}}),
    ({"rewards": {"kind": "exact"}}, {"rewards": {"tolernce": 1}}, {"rewards": {"kind": "exact", "tolernce": 1}}),
    ({"rewards": {"weight": 2}}, {"rewards": {"kind": "exact"}}, {"rewards": {"kind": "exact", "weight": 2}}),
    ({"rewards": {"kind": "exact"}}, {"rewards": {"maths": "my.py:brevity"}}, {"rewards": {"maths": "my.py:brevity"}}),
    ({"rewards": {"kind": "json", "weight": 2}}, {"rewards": {"json_schema": {"type": "object"}, "stop_after": 9}},
     {"rewards": {"kind": "json", "weight": 2, "json_schema": {"type": "object"}, "stop_after": 9}}),
])  # fmt: skip
def test_stages_lay_choices_over_choices(default: Any, laid_over: Any, expected: Any) -> None:
    assert merge(default, laid_over) == expected


@pytest.mark.parametrize("first", ["sampler.memory=0.3", "sampler.engine=vllm"])
def test_an_override_before_the_choice_it_belongs_to_stays(first: str) -> None:
    overrides = sorted(["sampler.memory=0.3", "sampler.engine=vllm"], key=lambda override: override != first)
    raw: dict[str, Any] = {"stages": [{"name": "a", "sampler": {"engine": "builtin", "prefill_rows": 3}}]}
    apply_overrides(raw, [f"stages.{'a' if number else '0'}.{text}" for number, text in enumerate(overrides)])
    assert raw["stages"][0]["sampler"] == {"engine": "vllm", "memory": 0.3}


def test_a_key_of_another_choice_that_was_written_is_rejected() -> None:
    raw = {**ADDITION, "eval": {"every": 5, "early_stop": {"kind": "target", "value": 0.5}}}
    assert load_recipe(raw, ["eval.early_stop.kind=patience"]).stages[0].eval.early_stop == Patience()
    with pytest.raises(RecipeError, match=r"eval.early_stop: value belongs to stop rule target, not to patience"):
        load_recipe(raw, ["eval.early_stop.value=0.7", "eval.early_stop.kind=patience"])
