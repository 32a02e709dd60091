"""A run on a Ray cluster of this machine: the numbers of one process, whatever is killed. `make test-ray`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import torch
import yaml

import opd
from opd.cluster.ray_run import require_ray, why_ended
from opd.cluster.remote_sampler import SamplerWorker, _array, _tensor
from opd.cluster.served_stage import served_models, served_name, served_stage
from opd.config import load_recipe
from opd.errors import RecipeError, UserError
from opd.models import load_model
from opd.store import RolloutStore
from opd.trainer.messages import read_message, write_message
from opd.types import SampleRequest, Sampling
from tests.ranks import differences, numbers

RECIPE = {
    "student": "tiny/generalist",
    "teachers": {"arithmetic": "tiny/arithmetic", "spelling": "tiny/spelling"},
    "prompts": [
        {"source": "task:addition", "domain": "arithmetic"},
        {"source": "task:reverse", "domain": "spelling"},
    ],
    "rollout": {"prompts": 16, "max_new_tokens": 16},
    "objective": {"form": "direct", "divergence": "forward_kl"},
    "train": {"steps": 12, "lr": 1e-3, "micro_tokens": 256},
    "eval": {"prompts": 20, "teachers": False},
    "checkpoint": {"every": 2},
    "cluster": {"trainers": 2, "samplers": 1, "servers": 1},
    "device": "cpu",
    "threads": 1,
}


def test_what_is_open_to_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    recipe = load_recipe(RECIPE)
    assert require_ray(recipe).placement == (2, 1, 1, 0)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(UserError, match="anybody who reaches this machine"):
        require_ray(recipe)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(UserError, match="RAY_ADDRESS is set"):
        require_ray(recipe)
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(RecipeError, match="each is asked by one of the 2 trainers"):
        require_ray(load_recipe({**RECIPE, "cluster": {"trainers": 2, "samplers": 3}}))


def test_the_recipe_stays_and_its_teachers_are_asked_elsewhere() -> None:
    (stage,) = load_recipe(RECIPE).stages
    assert served_models(stage) == ["tiny/arithmetic", "tiny/spelling"]
    placed = served_stage(stage, {"tiny/arithmetic": "http://127.0.0.1:9"})
    assert [kind.name for kind in placed.teachers.values()] == ["served", "frozen"]
    assert not placed.eval.weight_average
    assert served_stage(stage, {}) is stage
    assert placed.teachers["arithmetic"].role == stage.teachers["arithmetic"].role


def test_only_what_a_server_has_as_it_is_goes_there() -> None:
    teachers = {"arithmetic": "tiny/arithmetic", "spelling": {"model": "tiny/arithmetic", "dtype": "bfloat16"}}
    (stage,) = load_recipe({**RECIPE, "teachers": teachers}).stages
    placed = served_stage(stage, {"tiny/arithmetic": "http://127.0.0.1:9"})
    assert [kind.name for kind in placed.teachers.values()] == ["served", "frozen"]
    assert served_name("a/b") != served_name("a-b")
    stages = [{"name": "first"}, {"name": "second", "teachers": {"arithmetic": "stage:first"}}]
    _, second = load_recipe({**RECIPE, "stages": stages}).stages
    assert "stage:first" not in served_models(second)  # it is not there when servers start


def test_the_rank_that_tells_is_waited_for() -> None:
    assert why_ended([(0, ""), (1, "")], over=False) is None
    told = why_ended([(2, ""), (0, ""), (2, "prompts: none")], over=False)
    assert told is not None
    assert (str(told), told.exit_code) == ("prompts: none", 2)
    assert why_ended([(1, "")], over=True) is not None
    assert why_ended([(0, ""), (0, "")], over=True) is None


def test_a_sampler_of_a_later_stage_is_another_one() -> None:
    student, worker = load_model("tiny/spelling"), SamplerWorker()
    facts = {
        "model": "tiny/spelling", "revision": None, "dtype": "float32", "cuda": False, "sampler": {"engine": "builtin"},
        "threads": None, "stop_ids": list(student.stop_ids),
    }  # fmt: skip
    weights = (3, {name: _array(tensor) for name, tensor in student.weights(3).tensors.items()})
    for room in (16, 32):
        worker.load({**facts, "max_length": room}, weights)
        sampling = Sampling(room - 4, stop_ids=())
        message = write_message([SampleRequest("r", np.arange(20, 24, dtype=np.int32), 7, sampling)])
        events = [event for part in worker.sample(message) for event in read_message(part)]
        assert len(events) == room - 4 + 1


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_weights_of_any_shape_travel(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = (torch.randn(shape) * 9).to(dtype)
    back = _tensor(*_array(tensor))
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert torch.equal(back, tensor)


@pytest.mark.ray
def test_a_mistake_is_told_once(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    rollout = {**RECIPE["rollout"], "max_prompt_tokens": 1}  # type: ignore[dict-item]
    recipe.write_text(yaml.safe_dump({**RECIPE, "rollout": rollout}), encoding="utf-8")
    command = [sys.executable, "-m", "opd", "run", str(recipe), "--on", "ray", "--out", str(tmp_path / "run")]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert found.returncode == 2, found.stderr
    assert "max_prompt_tokens" in found.stderr
    assert "start again" not in found.stderr


@pytest.mark.ray
def test_every_kind_of_worker_may_be_killed(tmp_path: Path) -> None:
    recipe, run, mark = tmp_path / "recipe.yaml", tmp_path / "run", uuid4().hex
    recipe.write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    log = (tmp_path / "log.txt").open("w")
    command = [sys.executable, "-m", "opd", "run", str(recipe), "--on", "ray", "--out", str(run)]
    process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OPD_MARK": mark}, cwd=tmp_path)
    try:
        for step, kind in ((2, "SamplerWorker"), (4, "ServerWorker"), (6, "TrainerWorker")):
            while len(_numbers(run)) < step:
                assert process.poll() is None, (tmp_path / "log.txt").read_text()
                time.sleep(0.1)
            os.kill(_worker(kind, mark), signal.SIGKILL)
        assert process.wait(300) == 0, (tmp_path / "log.txt").read_text()
    finally:
        process.kill()
    assert "a trainer was lost; all 2 start again" in (tmp_path / "log.txt").read_text()
    opd.run(RECIPE, out=tmp_path / "one")
    assert not differences(tmp_path / "one", run, 1e-4)
    ours, theirs = opd.Run(run).summary, opd.Run(tmp_path / "one").summary
    assert ours["status"] == theirs["status"] == "done"
    stores = [RolloutStore(place / "rollouts", read_only=True).entries for place in (run, tmp_path / "one")]
    assert set(stores[0]) == set(stores[1])


def _numbers(run: Path) -> list[dict[str, float | None]]:
    return numbers(run) if (run / "metrics.jsonl").exists() else []


def _worker(kind: str, mark: str) -> int:
    """A process of ours that Ray has named after what it does."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for process in Path("/proc").glob("[0-9]*"):
            found = _facts(process)
            if found.get("cmdline", "").startswith(f"ray::{kind}") and f"OPD_MARK={mark}" in found.get("environ", ""):
                return int(process.name)
        time.sleep(0.1)
    raise AssertionError(f"no {kind}")


def _facts(process: Path) -> Mapping[str, str]:
    try:
        return {name: (process / name).read_bytes().decode(errors="replace") for name in ("cmdline", "environ")}
    except OSError:  # it has ended
        return {}
