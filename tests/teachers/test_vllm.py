"""A real vLLM server on the CPU as a teacher: `make test-vllm` installs it beside us and runs these."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import opd
from opd.loop.step import train_step
from opd.models import load_model
from opd.models.load import tiny_models
from opd.objective.batch import Batch
from opd.objective.objective import Objective
from opd.recipe import Train
from opd.records import SignalNeed
from opd.teachers.other_servers import PoolingTeacher
from tests.support.rollouts import rollout
from tests.support.servers import free_port
from tests.support.steps import KeepGradients

pytestmark = pytest.mark.vllm
PYTHON = Path(os.environ.get("VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()
NAME, STUDENT, TEACHER = "arithmetic", "tiny/generalist", "tiny/arithmetic"
STRANGER = "tiny/spelling"  # a student that is far from the teacher
POOLING = ["--runner", "pooling", "--convert", "embed", "--pooler-config.task", "token_embed"]
RUNNERS = {"pooling": POOLING, "another": POOLING, "generate": []}
READY = 1800  # seconds: a hang, on any machine
ROLLOUTS = [
    rollout(str(number), list(range(20, 26 + number)), [*range(30 + number, 36 + number), 1]) for number in range(8)
]


class Server:
    """The process."""

    def __init__(self, runner: str, directory: Path) -> None:
        self._runner, self._log, self._port = runner, directory / "server.log", free_port()
        self.address = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_models()[TEACHER]),
            "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(self._port), "--dtype", "float32",
            "--enforce-eager", *RUNNERS[self._runner],
        ]  # fmt: skip
        quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
        quiet |= {"VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **quiet},
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self._log.parent,
            )

    def ready(self) -> None:
        assert self._process is not None
        until = time.monotonic() + READY
        while time.monotonic() < until:
            try:
                urllib.request.urlopen(f"{self.address}/health", timeout=60)
                return
            except (urllib.error.URLError, OSError):
                assert self._process.poll() is None, self._log.read_text(errors="replace")[-3000:]
                time.sleep(1)
        raise AssertionError(self._log.read_text(errors="replace")[-3000:])

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Both at once: most of a start is importing."""
    assert PYTHON.exists(), "run `make test-vllm`, which installs vLLM into .venv-vllm"
    found = {runner: Server(runner, tmp_path_factory.mktemp(runner)) for runner in RUNNERS}
    try:
        for server in found.values():
            server.start()
        yield found
    finally:
        for server in found.values():
            server.kill()


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, servers: dict[str, Server]) -> Server:
    servers[request.param].ready()
    return servers[request.param]


only = pytest.mark.parametrize


def settings(server: Server, kind: str, *others: Server) -> dict[str, Any]:
    local = {"vllm": "weights", "openai": "tokenizer"}[kind]
    address = [one.address for one in (server, *others)]
    return {"kind": kind, "address": address, "model": NAME, local: TEACHER}


def step(teacher: Any, student: Any, **term: Any) -> tuple[float, torch.Tensor]:
    """Loss and gradients of one update."""
    student.module.requires_grad_(True)
    student.module.zero_grad()
    objective = Objective({"form": "direct", **term}, teacher, stop_ids=student.stop_ids)
    signals: dict[Any, Any] = {}
    for role, kind in objective.needs(1):
        found = teacher.score(ROLLOUTS, objective.need_given(signals, role, kind))
        signals[role, kind] = {item.id: signal for item, signal in zip(ROLLOUTS, found, strict=True)}
    result = train_step(
        student, Batch(ROLLOUTS, signals, {}), objective, KeepGradients(), train=Train(precision="float32")
    )
    loss = sum(value for _, statistics in result.statistics for value in statistics.loss.values())
    return loss, torch.cat([p.grad.flatten() for p in student.module.parameters() if p.grad is not None])


def recipe(teacher: dict[str, Any], steps: int, **objective: Any) -> dict[str, Any]:
    return {
        "student": STRANGER, "teachers": {"arithmetic": teacher},
        "prompts": [{"source": "task:addition", "domain": "arithmetic"}],
        "rollout": {"prompts": 16, "max_new_tokens": 12}, "sampler": {"slots": 16}, "train": {"steps": steps, "lr": 3e-4},
        "eval": {"prompts": 0}, "objective": objective, "device": "cpu",
    }  # fmt: skip


@only("server", ["pooling"], indirect=True)
@only("term", [{}, {"divergence": "forward_kl"}, {"divergence": "jsd"}, {"support": "topk", "k": 8}], ids=str)
def test_hidden_states_give_the_local_teachers_loss_and_gradients(server: Server, term: dict[str, Any]) -> None:
    student = load_model(STUDENT)
    loss, grads = step(opd.Teacher(TEACHER, student), student, **term)
    there = opd.Teacher(settings(server, "vllm"), student)
    assert all(there._opened._same._processes.values())  # a server that is restarted is noticed
    served, served_grads = step(there, student, **term)
    assert loss > 0.1
    assert served == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(served_grads, grads, rtol=1e-5, atol=1e-5 * float(grads.abs().max()))


@only("server", ["pooling"], indirect=True)
def test_a_student_learns_from_hidden_states(server: Server, tmp_path: Path) -> None:
    here = opd.run(recipe({"model": TEACHER}, 3, form="direct"), out=tmp_path / "here")
    there = opd.run(recipe(settings(server, "vllm"), 10, form="direct"), out=tmp_path / "there")
    losses = [[metric["loss"] for metric in run.metrics[:3]] for run in (there, here)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    kl = [metric["reverse_kl"] for metric in there.metrics]
    assert np.mean(kl[-3:]) < 0.7 * np.mean(kl[:3])


@only("server", ["pooling"], indirect=True)
def test_two_servers_give_the_losses_of_one_when_one_is_killed_in_mid_step(
    server: Server, servers: dict[str, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers["another"].ready()
    alone = opd.run(recipe(settings(server, "vllm"), 3, form="direct"), out=tmp_path / "alone")
    asked, ask = [0], PoolingTeacher._ask

    def struck(self: PoolingTeacher, ids: list[int]) -> np.ndarray:
        asked[0] += 1
        if asked[0] == 50:
            servers["another"].kill()
        return ask(self, ids)

    monkeypatch.setattr(PoolingTeacher, "_ask", struck)
    both = opd.run(recipe(settings(server, "vllm", servers["another"]), 3, form="direct"), out=tmp_path / "both")
    assert asked[0] > 3 * 16
    losses = [[metric["loss"] for metric in run.metrics] for run in (both, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert "using the others" in (tmp_path / "both" / "log.txt").read_text()


@only("server", ["generate"], indirect=True)
def test_log_probs_are_the_local_teachers(server: Server) -> None:
    student = load_model(STUDENT)
    here, there = opd.Teacher(TEACHER, student), opd.Teacher(settings(server, "openai"), student)
    needs = SignalNeed("logprobs_at"), SignalNeed("topk", k=8)
    for one, other in zip(here.score(ROLLOUTS, needs[0]), there.score(ROLLOUTS, needs[0]), strict=True):
        np.testing.assert_allclose(other.values, one.values, atol=1e-4)
    for one, other in zip(here.score(ROLLOUTS, needs[1]), there.score(ROLLOUTS, needs[1]), strict=True):
        np.testing.assert_allclose(other.values.logprobs[:, :6], one.values.logprobs[:, :6], atol=1e-4)
    loss, grads = step(here, student, support="topk", k=8)
    served, served_grads = step(there, student, support="topk", k=8)
    assert served == pytest.approx(loss, rel=2e-3)  # one minus a sum near 1, from numbers in fp32
    torch.testing.assert_close(served_grads, grads, rtol=2e-2, atol=2e-3 * float(grads.abs().max()))


@only("server", ["generate"], indirect=True)
@only(
    "objective", [{"form": "direct", "support": "topk", "k": 20}, {"form": "policy_gradient"}], ids=["topk", "sampled"]
)
def test_a_student_learns_from_log_probs(server: Server, tmp_path: Path, objective: dict[str, Any]) -> None:
    run = opd.run(recipe(settings(server, "openai"), 14, **objective), out=tmp_path / "run")
    kl = [metric["reverse_kl"] for metric in run.metrics]
    assert np.mean(kl[-3:]) < np.mean(kl[:3])
