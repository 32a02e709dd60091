"""A run on a Ray cluster of this machine: the numbers of one process, whatever is killed. `make test-ray`."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
import yaml

import opd
from opd.cluster import ray_workers
from opd.cluster.on_ray import (
    LOST,
    MOVED,
    STUCK,
    Machine,
    RayPlaces,
    Restarts,
    RunArguments,
    ServerWorker,
    WorkerEnded,
    WorkerGroup,
    by_machine,
    carry_out_on,
    describe_machine,
    free_port,
    local_cluster,
    marked,
    paths_of,
    require_ray,
    require_same_machine,
    served_models,
    served_name,
    served_stage,
    server_ended,
    variables_of,
    why_ended,
)
from opd.cluster.ray_workers import OTHER_WEIGHTS, RayRanks, SamplerWorker, TrainerWorker, _array, _tensor
from opd.common.errors import RanksLost, RecipeError, UserError
from opd.common.messages import read_message, write_message
from opd.engines.alongside import from_columns
from opd.models import load_model
from opd.recipe import load_recipe
from opd.records import Finished, SampledToken, SampleRequest, Sampling
from opd.runner.lock import RunLock
from opd.store import RolloutStore
from tests.support.ranks import differences, numbers

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


def test_settings_open_to_others_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    recipe = load_recipe(RECIPE)
    assert require_ray(recipe).placement == (2, 1, 1, 0)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(UserError, match="anybody who can reach this machine"):
        require_ray(recipe)
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(UserError, match="without RAY_AUTH_MODE=token"):
        require_ray(recipe)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert require_ray(recipe).trainers == 2
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    with pytest.raises(UserError, match="other users can read this file"):
        require_ray(recipe)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    with pytest.raises(UserError, match="on a machine of the cluster"):
        require_ray(recipe)
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(RecipeError, match="each serves one of the 2 trainers"):
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
    lost = why_ended([(1, ""), (LOST, "rank 0 lost its connection")], over=False)
    assert isinstance(lost, RanksLost)
    first = why_ended([(LOST, "rank 0 lost its connection"), (1, "KeyError: 'planted'")], over=False)
    assert str(first) == "KeyError: 'planted'"  # whoever tells of an error goes before who was lost by it
    assert why_ended([(0, ""), (0, "")], over=True) is None


def test_a_sampler_of_a_later_stage_is_another_one() -> None:
    student, worker = load_model("tiny/spelling"), SamplerWorker()
    anything = write_message([])
    assert read_message(b"".join(worker.sample(anything, 3))) == [OTHER_WEIGHTS]  # it has just been started again
    facts = {
        "model": "tiny/spelling", "revision": None, "dtype": "float32", "cuda": False, "sampler": {"engine": "builtin"},
        "threads": None, "stop_ids": list(student.stop_ids),
    }  # fmt: skip
    weights = (3, {name: _array(tensor) for name, tensor in student.weights(3).tensors.items()})
    for room in (16, 32):
        worker.load({**facts, "max_length": room}, weights)
        sampling = Sampling(room - 4, stop_ids=())
        message = write_message([SampleRequest("r", np.arange(20, 24, dtype=np.int32), 7, sampling)])
        events = [event for part in worker.sample(message, 3) for event in read_message(part)]
        assert len(events) == room - 4 + 1
    assert read_message(b"".join(worker.sample(anything, 4))) == [OTHER_WEIGHTS]  # newer ones did not reach it


def test_turns_arrive_while_others_are_sampled() -> None:
    """And a batch that the trainer has left does not disturb the next."""
    student, worker = load_model("tiny/spelling"), SamplerWorker()
    facts = {
        "model": "tiny/spelling", "revision": None, "dtype": "float32", "cuda": False, "sampler": {"engine": "builtin"},
        "threads": None, "stop_ids": list(student.stop_ids), "max_length": 64,
    }  # fmt: skip
    assert read_message(worker.turns(write_message([]), 3, "first")) is None  # it has just been started again
    worker.load(facts, (3, {name: _array(tensor) for name, tensor in student.weights(3).tensors.items()}))

    def taken(batch: str, *requests: SampleRequest) -> list[SampledToken | Finished]:
        return from_columns(read_message(worker.turns(write_message(list(requests)), 3, batch)))

    def request(name: str) -> SampleRequest:
        return SampleRequest(name, np.arange(20, 24, dtype=np.int32), int(name), Sampling(40, stop_ids=()))

    assert read_message(worker.turns(write_message([request("7")]), 4, "first")) is None  # other weights
    taken("left", request("7"), request("8"))
    events, late = taken("second", request("7")), [request("8")]
    while sum(isinstance(event, Finished) for event in events) < 2:
        events += taken("second", *late)
        late = []
    assert taken("second") == []
    whole = read_message(b"".join(worker.sample(write_message([request("7"), request("8")]), 3)))
    for name in ("7", "8"):
        drawn = [event.token for event in events if event.request_id == name and isinstance(event, SampledToken)]
        assert drawn == [event[1] for event in whole if event[0] == name and len(event) == len(SampledToken._fields)]
        assert len(drawn) == 40


def test_ranks_that_are_lost_at_the_same_step_again_and_again_do_not_start_for_ever(tmp_path: Path) -> None:
    metrics, restarts = tmp_path / "metrics.jsonl", Restarts(tmp_path)
    for _ in range(STUCK - 1):
        restarts.count("a segmentation fault")
    metrics.write_text("{}\n{}\n")  # two steps: as if nothing had been
    for _ in range(STUCK):
        restarts.count("a segmentation fault")
    metrics.write_text("{}\n")  # the next begins from a checkpoint
    with pytest.raises(RanksLost, match=r"getting past 2 steps: a segmentation fault"):
        restarts.count("a segmentation fault")


def test_trainers_open_no_samplers_in_addition_to_those_of_ray() -> None:
    assert not RayRanks(None, 0, 2, 0, ["a worker"], {}).opens_sampler(leader_only=False)
    assert RayRanks(None, 1, 2, 1, [], {}).opens_sampler(leader_only=False)
    assert not RayRanks(None, 1, 2, 1, [], {}).opens_sampler(leader_only=True)


def test_a_machine_that_does_not_see_the_same_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with marked(tmp_path / "runs") as mark:
        paths = [str(mark), str(tmp_path / "rows.jsonl"), str(tmp_path)]
        mine = describe_machine(paths)
        require_same_machine(mine, [describe_machine(paths)], str(mark))
        for path, seen, why in (
            (str(mark), "", f"{mark.parent} is not the same directory"),
            (paths[1], "", "rows.jsonl does not exist there"),
            (paths[1], "file 7 abc", "rows.jsonl differs there"),
        ):
            other = Machine("gpu-7", mine.versions, {**mine.seen, path: seen})
            with pytest.raises(UserError, match=f"machine gpu-7: .*{why}"):
                require_same_machine(mine, [other], str(mark))
        with pytest.raises(UserError, match=r"gpu-7 has opd 0\.0, and this one"):
            require_same_machine(mine, [Machine("gpu-7", {**mine.versions, "opd": "0.0"}, mine.seen)], str(mark))
    assert not mark.exists()


def test_what_a_recipe_names_is_looked_for_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    monkeypatch.setenv("JUDGE_KEY", "secret")
    served = {"kind": "served", "address": "http://10.0.0.1:1", "model": "m", "token_env": "JUDGE_KEY"}
    recipe = load_recipe({**RECIPE, "prompts": str(rows), "teachers": {"only": served}, "cluster": {}})
    assert paths_of(recipe) == [str(rows)]
    assert variables_of(recipe) == {"JUDGE_KEY": "secret"}


def test_ranks_of_one_machine_stand_together() -> None:
    assert by_machine(["b", "a", "b", "a"]) == [0, 2, 1, 3]
    group = WorkerGroup(None, None, {}, load_recipe(RECIPE).stages[0].cluster, print)
    found = [group._numbers(rank, ["b", "b", "b", "b", "a", "a"]) for rank in range(6)]
    assert [one["LOCAL_RANK"] for one in found] == ["0", "1", "2", "3", "0", "1"]
    assert {one["LOCAL_WORLD_SIZE"] for one in found} == {
        "2"
    }  # so that groups of hybrid sharding stay within a machine
    assert {one["WORLD_SIZE"] for one in found} == {"6"}


def test_the_lock_of_a_lost_machine_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    variables["MASTER_PORT"] = str(free_port("127.0.0.1"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_workers, "LEASE", 0.0)
    arguments = RunArguments("quickstart", (), str(tmp_path / "run"), str(tmp_path))
    (tmp_path / "run").mkdir()
    with RunLock(tmp_path / "run"):
        code, said = TrainerWorker().carry_out(variables, arguments, [], {}, restarted=True)
        assert (code, "is in use" in said) == (LOST, True)
        variables["MASTER_PORT"] = str(free_port("127.0.0.1"))
        assert TrainerWorker().carry_out(variables, arguments, [], {})[0] == 2


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """One cluster for all tests that need no command line."""
    with local_cluster(4, 0) as found:
        yield found


def group(ray: Any, say: Callable[[str], None] = print) -> WorkerGroup:
    return WorkerGroup(ray, None, {}, load_recipe(RECIPE).stages[0].cluster, say)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_weights_of_any_shape_travel(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = (torch.randn(shape) * 9).to(dtype)
    back = _tensor(*_array(tensor))
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert torch.equal(back, tensor)


@pytest.mark.ray
def test_an_unexpected_error_is_passed_on(ray: Any) -> None:
    @ray.remote(num_cpus=0)
    def bug() -> None:
        raise KeyError("planted")

    @ray.remote(num_cpus=0)
    def waits() -> tuple[int, str]:
        time.sleep(3600)
        return 0, ""

    with pytest.raises(WorkerEnded, match="planted"):
        group(ray)._wait([waits.remote(), bug.remote()], {}, [])


@pytest.mark.ray
def test_a_second_interrupt_leaves_at_once(ray: Any) -> None:
    @ray.remote(num_cpus=0)
    def deaf() -> tuple[int, str]:
        time.sleep(3600)
        return 0, ""

    before, said = signal.getsignal(signal.SIGINT), list[str]()

    def interrupt() -> None:
        while signal.getsignal(signal.SIGINT) is before:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        while not said:  # that the first one was heard
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    ranks = group(ray, said.append)
    task = deaf.remote()
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        ranks._wait([task], [], [])
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.ray
def test_a_server_that_cannot_start_tells_why(ray: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        worker = (
            ray.remote(ServerWorker)
            .options(num_cpus=0)
            .remote(["tiny/spelling"], "secret", "cpu", "float32", "127.0.0.1")
        )
        assert ray.get(worker.address.remote()).startswith("http://127.0.0.1:")
        code, said = ray.get(worker.wait.remote(f"http://127.0.0.1:{taken.getsockname()[1]}"))
        assert code == 2
        assert "is not available" in said
        assert ray.get(worker.wait.remote("http://127.0.0.9:1"))[0] == MOVED  # it was started again on another machine
    ended = server_ended(code, said)
    assert (ended.exit_code, "has ended (2)" in str(ended)) == (2, True)
    assert isinstance(server_ended(MOVED, "elsewhere"), RanksLost)  # the ranks have to be told where it is now


@pytest.mark.ray
def test_a_mistake_is_reported_once(ray: Any, tmp_path: Path) -> None:
    place, said = tmp_path / "recipe.yaml", list[str]()
    recipe = {**RECIPE, "rollout": {"prompts": 16, "max_new_tokens": 16, "max_prompt_tokens": 1}}
    place.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    loaded = load_recipe(recipe)
    with pytest.raises(WorkerEnded, match="max_prompt_tokens") as found:
        carry_out_on(
            ray,
            RunArguments(str(place), (), str(tmp_path / "run"), str(tmp_path)),
            loaded,
            RayPlaces.of(loaded),
            said.append,
        )
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
        for step, kind in ((1, "SamplerWorker"), (3, "ServerWorker"), (5, "TrainerWorker")):
            while len(_numbers(run)) < step:
                assert process.poll() is None, (tmp_path / "log.txt").read_text()
                time.sleep(0.02)
            os.kill(_worker(kind, mark, process), signal.SIGKILL)
        assert process.wait(1800) == 0, (tmp_path / "log.txt").read_text()
    finally:
        process.kill()
    assert "a trainer was lost; restarting all 2" in (tmp_path / "log.txt").read_text()
    opd.run(RECIPE, out=tmp_path / "one")
    assert not differences(tmp_path / "one", run, 1e-4)
    ours, theirs = opd.Run(run).summary, opd.Run(tmp_path / "one").summary
    assert ours["status"] == theirs["status"] == "done"
    scores = [[found["after"] for found in one["stages"][0]["evals"].values()] for one in (ours, theirs)]
    assert scores[0] == pytest.approx(scores[1], abs=0.051)  # one question of 20
    stores = [RolloutStore(place / "rollouts", read_only=True).entries for place in (run, tmp_path / "one")]
    assert set(stores[0]) == set(stores[1])


@pytest.mark.ray
def test_samplers_play_turns_and_one_is_killed(tmp_path: Path) -> None:
    mark, run = uuid4().hex, tmp_path / "run"
    dialogue = {"prompts": 16, "max_new_tokens": 48, "environment": {"kind": "dialogue", "turn_tokens": 8}}
    recipe = RECIPE | {
        "teachers": {"arithmetic": "tiny/arithmetic"}, "prompts": "task:dialogue", "rollout": dialogue, "eval": {"prompts": 4},
        "train": {"steps": 6, "lr": 1e-3, "micro_tokens": 256}, "cluster": {"trainers": 2, "samplers": 2},
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "opd", "run", "recipe.yaml", "--on", "ray", "--out", str(run)]
    with (tmp_path / "log.txt").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OPD_MARK": mark}, cwd=tmp_path)
    try:
        while len(_numbers(run)) < 1:
            assert process.poll() is None, (tmp_path / "log.txt").read_text()
            time.sleep(0.02)
        os.kill(_worker("SamplerWorker", mark, process), signal.SIGKILL)
        assert process.wait(1800) == 0, (tmp_path / "log.txt").read_text()
    finally:
        process.kill()
    opd.run(recipe, out=tmp_path / "one")
    assert not differences(tmp_path / "one", run, 1e-4)
    here, there = (RolloutStore(place / "rollouts", read_only=True) for place in (tmp_path / "one", run))
    assert set(here.entries) == set(there.entries)
    for ours, theirs in zip(here.load(list(here.entries)), there.load(list(here.entries)), strict=True):
        assert ours.author.tolist() == theirs.author.tolist()


NODES = """
import sys
from ray.cluster_utils import Cluster

nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
for number in (2, 3):
    nodes.add_node(wait=False, num_cpus=number - 1, node_ip_address=f"127.0.0.{number}")
nodes.wait_for_nodes()
print("at", nodes.address, flush=True)
sys.stdin.read()
nodes.shutdown()
"""


@pytest.mark.ray
def test_a_cluster_of_several_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three nodes with addresses of their own, and the command joins them."""
    place, token = tmp_path / "recipe.yaml", tmp_path / "token"
    recipe = {**RECIPE, "train": {"steps": 3, "lr": 1e-3, "micro_tokens": 256}, "eval": {"prompts": 0}}
    place.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    token.write_text(secrets.token_hex(32), encoding="ascii")
    token.chmod(0o600)
    for name, value in (("MODE", "token"), ("TOKEN_PATH", str(token))):
        monkeypatch.setenv(f"RAY_AUTH_{name}", value)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    nodes = subprocess.Popen([sys.executable, "-c", NODES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert nodes.stdin is not None
    assert nodes.stdout is not None
    try:
        address = next(line for line in nodes.stdout if line.startswith("at ")).split()[1]
        command = [sys.executable, "-m", "opd", "run", place.name, "--on", "ray", "--out", "run"]
        environment = {**os.environ, "RAY_ADDRESS": address}
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=1800, check=False
        )
    finally:
        nodes.communicate(timeout=1800)  # the end of its input ends it
    assert done.returncode == 0, done.stderr
    assert "2 trainers, 1 samplers, 1 servers of 2 teachers on 3 machines" in done.stderr
    opd.run(recipe, out=tmp_path / "one")
    assert not differences(tmp_path / "one", tmp_path / "run")


def _numbers(run: Path) -> list[dict[str, float | None]]:
    return numbers(run) if (run / "metrics.jsonl").exists() else []


def _worker(kind: str, mark: str, run: subprocess.Popen[bytes]) -> int:
    """A process of ours that Ray has named after what it does."""
    until = time.monotonic() + 600  # a hang, on any machine
    while time.monotonic() < until:
        assert run.poll() is None, "the run has ended"
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
