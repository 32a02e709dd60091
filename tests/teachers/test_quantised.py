"""Quantised teachers: what is quantised and what is not, what it costs, and what is rejected."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import opd
from opd.common.errors import RecipeError
from opd.divergences.projection import log_probs
from opd.models.language_model import Pack
from opd.recipe import load_recipe
from opd.records import SignalNeed
from opd.runner.plan import make_plan
from opd.teachers.kinds import ModelRef
from opd.teachers.quantised import QuantisedTeacher, quantise_, require_quantiser
from opd.teachers.views import response_after
from tests.support.helpers import save_tiny, tiny_model
from tests.support.rollouts import rollout

pytest.importorskip("torchao")
pytestmark = pytest.mark.slow  # `make test-long` installs it
ROLLOUTS = [rollout("1", [5, 6, 7], [8, 9, 1]), rollout("2", [10], [11, 12])]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_linear_layers_are_quantised_and_the_head_is_not(kind: Any, family: str) -> None:
    plain, model = tiny_model(family), tiny_model(family)
    quantise_(model, kind)
    assert model.unquantised.keys() == {
        name for name, layer in plain.module.named_modules() if isinstance(layer, torch.nn.Linear) and name != "lm_head"
    }
    assert type(model.head.weight) is torch.nn.Parameter
    assert torch.equal(model.head.weight, plain.head.weight)
    layer = model.module.model.layers[0].self_attn.q_proj.weight
    stored = [getattr(layer, name) for name in layer.__tensor_flatten__()[0]]
    assert sum(part.numel() * part.element_size() for part in stored) < layer.numel() * 2  # of four bytes each
    assert layer.device.type == "cpu"


def test_mxfp4_takes_layers_that_its_groups_divide_in_bfloat16_alone() -> None:
    model = tiny_model("llama", intermediate_size=48)
    model.module.bfloat16()
    quantise_(model, "mxfp4")
    assert not [name for name in model.unquantised if name.endswith("down_proj")]  # 48 wide
    assert len(model.unquantised) == 12
    layer = model.module.model.layers[0].self_attn.q_proj.weight
    stored = [getattr(layer, name) for name in layer.__tensor_flatten__()[0]]
    assert (
        sum(part.numel() * part.element_size() for part in stored) <= layer.numel()
    )  # of two bytes; scales are padded
    teacher = QuantisedTeacher("t", "teacher", model, 99, (1, 3))
    assert 0 < teacher.measure([response_after(item.prompt_ids, item) for item in ROLLOUTS])["quantised_kl/t"] < 1
    require_quantiser("teachers.t", "mxfp4", "bfloat16", "cpu")
    with pytest.raises(RecipeError, match=r"mxfp4 with float32 does not run on cpu: .*set dtype: bfloat16"):
        require_quantiser("teachers.t", "mxfp4", "float32", "cpu")


def test_its_cost_is_the_kl_to_the_original_and_is_reported_once() -> None:
    plain, model = tiny_model("llama"), tiny_model("llama")
    quantise_(model, "int8")
    teacher = QuantisedTeacher("t", "teacher", model, 99, (1, 3))
    said = teacher.score(ROLLOUTS, SignalNeed("logprobs_at"))
    found = teacher.measure([response_after(item.prompt_ids, item) for item in ROLLOUTS])
    batch = Pack.of(ROLLOUTS, "cpu")
    with torch.no_grad():
        before, now = (log_probs(one.predict(batch), plain.size, [(1, 3)]) for one in (plain, model))
    expected = float((before.exp() * (before - now)).sum(-1).mean())
    assert found == {"quantised_kl/t": pytest.approx(expected, rel=1e-3, abs=1e-8)}
    assert 0 < expected < 0.1
    assert teacher.measure([response_after(item.prompt_ids, item) for item in ROLLOUTS]) == {}
    assert not model.unquantised
    for one, other in zip(said, teacher.score(ROLLOUTS, SignalNeed("logprobs_at")), strict=True):
        np.testing.assert_array_equal(one.values, other.values)  # quantised before and after


def test_a_run_prints_what_quantising_costs_and_evaluates_what_it_uses(tmp_path: Path) -> None:
    teacher, student = save_tiny(tmp_path / "teacher", seed=1), save_tiny(tmp_path / "student")
    parts = {"kind": "mixture", "parts": {"q": {"model": teacher, "quantise": "int8"}, "p": teacher}, "role": "other"}
    recipe = {
        "student": student,
        "teachers": {"t": {"model": teacher, "quantise": "int8"}, "m": parts},
        "prompts": [{"source": "task:addition", "domain": "t"}],
        "rollout": {"prompts": 2, "max_new_tokens": 3},
        "objective": [{"form": "direct"}, {"form": "direct", "role": "other"}],
        "sampler": {"slots": 2},
        "train": {"steps": 2},
        "eval": {"prompts": 2},
        "device": "cpu",
    }
    run = opd.run(recipe, out=tmp_path / "run")
    first, second = run.metrics
    assert 0 < first["quantised_kl/t"] < 0.1
    assert "quantised_kl/m.q" not in first  # the same model, which has been measured
    assert not any("quantised" in key for key in second)
    assert "quantised_kl/t" in (tmp_path / "run" / "log.txt").read_text()
    assert "t" in run.summary["stages"][0]["teachers"]


def test_what_cannot_run_is_rejected_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"student": "tiny/generalist", "prompts": [{"source": "task:addition", "domain": "t"}], "device": "cpu"}
    teacher = {"model": "tiny/arithmetic", "quantise": "int4"}
    with pytest.raises(RecipeError, match=r"teachers\.t: quantise: int4 with float32 does not run on cpu: .*Use int8"):
        make_plan(load_recipe({**base, "teachers": {"t": teacher}}))
    with pytest.raises(RecipeError, match="should be 'int8', 'fp8', 'int4' or 'mxfp4'"):
        load_recipe({**base, "teachers": {"t": {**teacher, "quantise": "int3"}}})
    teacher["quantise"] = "int8"
    with pytest.raises(RecipeError, match="a quantised teacher only scores"):
        load_recipe({**base, "teachers": {"t": teacher}, "rollout": {"teacher_mix": 0.2}})
    average = {"teachers": {"t": teacher, "u": {**teacher, "domains": ["u"]}}, "eval": {"weight_average": True}}
    with pytest.raises(RecipeError, match=r"those of teachers\.t are quantised"):
        load_recipe({**base, **average})
    (plain,) = make_plan(load_recipe({**base, "teachers": {"t": "tiny/arithmetic"}}))
    (smaller,) = make_plan(load_recipe({**base, "teachers": {"t": teacher}}))
    assert plain.memory["teachers"] / 4 < smaller.memory["teachers"] < plain.memory["teachers"] / 2
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torchao" else find(name))
    with pytest.raises(RecipeError, match=r"pip install 'opd\[quantised\]'"):
        require_quantiser("teachers.t", "int8", "float32", "cpu")


def test_equal_checkpoints_in_other_quantisations_share_nothing() -> None:
    student = opd.load_model("tiny/generalist")
    parts = {"a": "tiny/arithmetic", "b": {"model": "tiny/arithmetic", "quantise": "int8"}}
    mixture = opd.Teacher({"kind": "mixture", "parts": parts}, student)
    one, other = (part.model for part in mixture._opened._parts.values())
    assert one is not other
    assert not other.unquantised
    assert ModelRef("x", quantise="int8").identified("abc") == "int8 of abc"
    assert ModelRef("x").identified("abc") == "abc"
