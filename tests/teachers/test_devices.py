"""Teachers on another device than the student's: what is rejected, what is planned, and where hidden states go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import opd
from opd.common.errors import RecipeError
from opd.recipe import load_recipe
from opd.records import SignalNeed
from opd.runner import plan
from opd.runner.checks import check_stage
from opd.runner.plan import make_plan
from opd.teachers.kinds import ModelRef
from opd.teachers.pool import without_home
from opd.teachers.scoring import LocalTeacher
from tests.support.crash import same_run
from tests.support.helpers import save_tiny, tiny_model
from tests.support.rollouts import rollout


def recipe(teacher: dict[str, Any], **changes: Any) -> dict[str, Any]:
    prompts = [{"source": "task:addition", "domain": "t"}]
    base = {"student": "tiny/generalist", "teachers": {"t": teacher}, "prompts": prompts, "device": "cpu"}
    return {**base, "eval": {"prompts": 0}, **changes}


def there(device: str, **settings: Any) -> dict[str, Any]:
    return {"model": "tiny/arithmetic", "device": device, **settings}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_is_rejected_before_anything_is_loaded() -> None:
    parts = {"kind": "mixture", "parts": {"a": there("cuda:7"), "b": "tiny/generalist"}}
    for teacher in (there("cuda:7"), parts):
        with pytest.raises(RecipeError, match=r"teachers\.t: device 'cuda:7': no CUDA device is visible"):
            check_stage(load_recipe(recipe(teacher)).stages[0], lambda name: name)


def test_invalid_devices_and_mixing_across_devices_are_rejected() -> None:
    with pytest.raises(RecipeError, match="expected cpu, cuda or cuda:N; got 'tpu'"):
        load_recipe(recipe(there("tpu")))
    with pytest.raises(RecipeError, match="both must be on one device"):
        load_recipe(recipe(there("cpu"), rollout={"teacher_mix": 0.2}))


def test_memory_is_counted_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    (plain,) = make_plan(load_recipe(recipe({"model": "tiny/arithmetic"})))
    (same,) = make_plan(load_recipe(recipe(there("cpu"))))
    assert (same.memory, same.elsewhere) == (plain.memory, {})
    spec = load_recipe(recipe(there("cuda:1", dtype="bfloat16"))).stages[0]
    found = plan._held(spec, torch.device("cpu"), lambda name: name, 10)
    count = plain.teachers["t"]
    config = opd.load_model("tiny/arithmetic").module.config
    assert found == {"": config.vocab_size * config.hidden_size * 2, "cuda:1": count * 2}
    assert found == plan._held(spec, torch.device("cuda", 0), lambda name: name, 10)


def test_one_model_however_its_device_is_written() -> None:
    here, other = torch.device("cuda", 0), torch.device("cpu")
    assert (
        without_home(ModelRef("x", device="cuda"), here)
        == without_home(ModelRef("x", device="cuda:0"), here)
        == ModelRef("x")
    )
    assert without_home(ModelRef("x", device="cuda:1"), here).device == "cuda:1"
    assert without_home(ModelRef("x", device="cpu"), other) == ModelRef("x")


def test_hidden_states_meet_a_head_on_their_own_device() -> None:
    """The head is copied once, and a mixture of teachers on several devices is one on the student's."""
    teacher = LocalTeacher("t", "teacher", tiny_model("qwen2"), 99, (1,))
    (signal,) = teacher.score([rollout("1", [5, 6], [8, 9])], SignalNeed("hidden"))
    moved = teacher.project(signal.values.to("meta"))
    assert {moved.hidden.device.type, moved.weight.device.type} == {"meta"}
    assert teacher.project(signal.values.to("meta")).weight is moved.weight
    assert teacher.project(signal.values).weight is teacher.model.head.weight


def test_the_students_own_device_by_name_changes_nothing(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "teacher", seed=1)
    small = {"rollout": {"prompts": 2, "max_new_tokens": 3}, "sampler": {"slots": 2}, "train": {"steps": 2}}
    spec = {"student": save_tiny(tmp_path / "student"), **small}
    runs = [
        opd.run({**recipe(teacher, **spec)}, out=tmp_path / name)
        for name, teacher in (("plain", {"model": model}), ("named", {"model": model, "device": "cpu"}))
    ]
    same_run(runs[1], runs[0])
