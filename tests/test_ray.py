"""A run on a Ray cluster of this machine: the numbers of one process, whatever is killed. `make test-ray`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
import yaml

import opd
from opd.cluster.ray_ranks import RayRanks
from opd.cluster.ray_run import RayPlaces, carry_out_on, local_cluster, require_ray
from opd.cluster.ray_workers import LOST, STUCK, Restarts, WorkerEnded, WorkerGroup, why_ended
from opd.cluster.remote_sampler import SamplerWorker, _array, _tensor
from opd.cluster.served_stage import served_models, served_name, served_stage
from opd.config import load_recipe
from opd.errors import RanksLost, RecipeError, UserError
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
    lost = why_ended([(1, ""), (LOST, "rank 0 lost touch")], over=False)
    assert isinstance(lost, RanksLost)
    first = why_ended([(LOST, "rank 0 lost touch"), (1, "KeyError: 'planted'")], over=False)
    assert str(first) == "KeyError: 'planted'"  # whoever tells of an error goes before who was lost by it
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


def test_ranks_that_are_lost_at_the_same_step_again_and_again_do_not_start_for_ever(tmp_path: Path) -> None:
    metrics, restarts = tmp_path / "metrics.jsonl", Restarts(tmp_path)
    for _ in range(STUCK - 1):
        restarts.count("a segmentation fault")
    metrics.write_text("{}\n{}\n")  # two steps: as if nothing had been
    for _ in range(STUCK):
        restarts.count("a segmentation fault")
    metrics.write_text("{}\n")  # the next begins from a checkpoint
    with pytest.raises(RanksLost, match=r"further than 2 steps: a segmentation fault"):
        restarts.count("a segmentation fault")


def test_trainers_open_no_samplers_beside_those_of_ray() -> None:
    assert not RayRanks(None, 0, 2, 0, ["a worker"], {}).opens_sampler(led=False)
    assert RayRanks(None, 1, 2, 1, [], {}).opens_sampler(led=False)
    assert not RayRanks(None, 1, 2, 1, [], {}).opens_sampler(led=True)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """One cluster for all tests that need no command line."""
    with local_cluster(4, 0) as found:
        yield found


def group(ray: Any) -> WorkerGroup:
    return WorkerGroup(ray, None, {}, load_recipe(RECIPE).stages[0].cluster, print)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_weights_of_any_shape_travel(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = (torch.randn(shape) * 9).to(dtype)
    back = _tensor(*_array(tensor))
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert torch.equal(back, tensor)


@pytest.mark.ray
def test_an_error_that_nobody_expected_comes_through(ray: Any) -> None:
    @ray.remote(num_cpus=0)
    def bug() -> None:
        raise KeyError("planted")

    @ray.remote(num_cpus=0)
    def waits() -> tuple[int, str]:
        time.sleep(60)
        return 0, ""

    with pytest.raises(WorkerEnded, match="planted"):
        group(ray)._wait([waits.remote(), bug.remote()], [], [])


@pytest.mark.ray
def test_a_second_interrupt_leaves_at_once(ray: Any) -> None:
    @ray.remote(num_cpus=0)
    def deaf() -> tuple[int, str]:
        time.sleep(600)
        return 0, ""

    def interrupt() -> None:
        for _ in range(2):
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        group(ray)._wait([deaf.remote()], [], [])
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.ray
def test_a_server_that_cannot_start_tells_why(ray: Any, tmp_path: Path) -> None:
    recipe = {**RECIPE, "cluster": {"trainers": 1, "servers": 1}}
    place = tmp_path / "recipe.yaml"
    place.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        cluster = load_recipe(recipe).stages[0].cluster
        placed = RayPlaces(cluster, dict.fromkeys(("tiny/arithmetic", "tiny/spelling"), address), 1, "float32")
        with pytest.raises(WorkerEnded, match=r"a server of teachers has ended \(2\)(.|\n)*cannot be listened on"):
            carry_out_on(ray, (str(place), (), str(tmp_path / "run")), load_recipe(recipe), placed, print)


@pytest.mark.ray
def test_a_mistake_is_told_once(ray: Any, tmp_path: Path) -> None:
    place, said = tmp_path / "recipe.yaml", list[str]()
    recipe = {**RECIPE, "rollout": {"prompts": 16, "max_new_tokens": 16, "max_prompt_tokens": 1}}
    place.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    loaded = load_recipe(recipe)
    with pytest.raises(WorkerEnded, match="max_prompt_tokens") as found:
        carry_out_on(ray, (str(place), (), str(tmp_path / "run")), loaded, RayPlaces.of(loaded), said.append)
    assert found.value.exit_code == 2
    assert not any("start again" in line for line in said)


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
    scores = [[found["after"] for found in one["stages"][0]["evals"].values()] for one in (ours, theirs)]
    assert scores[0] == pytest.approx(scores[1], abs=0.051)  # one question of 20
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
