"""Checkpoints that are all there or not there, in the background, and the files and signals around them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import opd
from opd.common.errors import DiskError, Preempted, RunDirectoryError
from opd.common.files import read_sealed, sealed, write_sealed
from opd.loop.learner import Optimiser
from opd.models import load_model
from opd.recipe import Lora, Train
from opd.runner import checkpoint, pipeline
from opd.runner.checkpoint import (
    Saver,
    point_latest,
    retain,
    save_checkpoint,
    step_of,
    steps_in,
    tidy,
    verify_checkpoint,
)
from opd.runner.directory import Interrupts
from tests.support.crash import FORKS, ended
from tests.support.helpers import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", kind="llama_tied")


def small(model: str, **changes: Any) -> dict[str, Any]:
    return {
        "student": model, "teachers": {"a": model}, "prompts": [{"source": "task:addition", "domain": "a"}],
        "rollout": {"prompts": 4, "max_new_tokens": 6}, "sampler": {"slots": 4}, "train": {"steps": 4, "lr": 1e-2},
        "objective": {"form": "policy_gradient"}, "eval": {"prompts": 0}, "device": "cpu",
    } | changes  # fmt: skip


# Sealed files


def test_every_bit_of_a_sealed_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_sealed(path, {"step": 8, "best": None, "value": float("-inf"), "list": [1.5, "é"]})
    assert read_sealed(path) == {"step": 8, "best": None, "value": None, "list": [1.5, "é"]}
    path.write_text(sealed({"value": float("-inf")}))  # as older runs have it
    assert read_sealed(path) == {"value": float("-inf")}
    write_sealed(path, {"step": 8, "best": None, "value": float("-inf"), "list": [1.5, "é"]})
    data = path.read_bytes()
    for at in range(len(data)):
        for bit in range(8):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            with pytest.raises(RunDirectoryError, match=r"state.json"):
                read_sealed(path)
        path.write_bytes(data[:at])
        with pytest.raises(RunDirectoryError, match=r"state.json"):
            read_sealed(path)
    assert [item.name for item in tmp_path.iterdir()] == ["state.json"]


# Saving


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("lora", [None, Lora(rank=4)])
def test_a_snapshot_is_saved_as_it_was(model: str, tmp_path: Path, lora: Lora | None) -> None:
    """The bytes of a save in the background are those of a save on the spot, though training goes on meanwhile."""
    if lora:
        pytest.importorskip("peft")
    student = load_model(model, lora=lora)
    optimiser = Optimiser(student.trainable(), Train())

    def update() -> None:
        for parameter in student.trainable().values():
            parameter.grad = torch.ones_like(parameter)
        optimiser.step(1)

    update()
    save_checkpoint(tmp_path / "here", student, (1,), "card", optimiser.tensors(), {"step": 1})
    copy = student.snapshot()
    tensors = {name: tensor.clone() for name, tensor in optimiser.tensors().items()}
    saver, released = Saver(), threading.Event()

    def write() -> None:
        assert released.wait(600)
        save_checkpoint(tmp_path / "behind", copy, (1,), "card", tensors, {"step": 1})

    saver.save(write, background=True)
    update()  # would wait for ever, did the save hold it up
    assert saver.busy
    released.set()
    saver.wait()
    assert contents(tmp_path / "here") == contents(tmp_path / "behind")
    verify_checkpoint(tmp_path / "behind")
    restored, fresh = load_model(model, lora=lora), Optimiser(student.trainable(), Train())
    restored.restore(tmp_path / "behind")
    save_checkpoint(tmp_path / "again", restored, (1,), "card", tensors, {"step": 1})
    assert contents(tmp_path / "again") == contents(tmp_path / "here")
    fresh.restore(tensors, updates=1)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in fresh.tensors().items())


def test_training_continues_while_a_checkpoint_is_written(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first save ends only after the next step: a save that stalled the step would never end."""
    stepped, save, step = threading.Event(), checkpoint.save_checkpoint, pipeline.run_step

    def slow(directory: Path, *arguments: Any) -> Path:
        assert directory.name != "step-000002" or stepped.wait(600)
        return save(directory, *arguments)

    def noted(run: Any, number: int) -> Any:
        metrics = step(run, number)
        if number == 3:
            stepped.set()
        return metrics

    monkeypatch.setattr(checkpoint, "save_checkpoint", slow)
    monkeypatch.setattr(pipeline, "run_step", noted)
    behind = opd.run(small(model, checkpoint={"every": 2, "keep": 9}), out=tmp_path / "behind")
    assert stepped.is_set()
    stepped.set()
    here = opd.run(small(model, checkpoint={"every": 2, "keep": 9, "background": False}), out=tmp_path / "here")
    for ours, theirs in zip(behind.checkpoints, here.checkpoints, strict=True):
        for name in ("model.safetensors", "optimiser.safetensors"):
            assert (ours / name).read_bytes() == (theirs / name).read_bytes()


@pytest.mark.parametrize("background", [True, False])
def test_a_save_that_fails_ends_the_run(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    save, calls = checkpoint.save_checkpoint, []

    def full(directory: Path, *arguments: Any) -> Path:
        calls.append(directory)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(directory))
        return save(directory, *arguments)

    monkeypatch.setattr(checkpoint, "save_checkpoint", full)
    spec = small(model, checkpoint={"every": 1, "background": background, "resume": "exact"})
    with pytest.raises(DiskError, match=r"step-000002.*No space.*opd resume"):
        opd.run(spec, out=tmp_path / "run")
    run = opd.Run(tmp_path / "run")
    assert (run.summary["status"], run.model.name) == ("failed", "step-000001")
    assert opd.resume(run.directory).summary["status"] == "done"


def test_a_half_written_checkpoint_has_no_name(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    student = load_model(model)
    good = save_checkpoint(tmp_path / "main" / "step-000001", student, (1,), "card", {}, {"step": 1})
    original = Path.rename

    def cut(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise KeyboardInterrupt
        return original(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", cut)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path / "main" / "step-000002", student, (1,), "card", {}, {"step": 2})
    assert steps_in(tmp_path / "main") == [good]
    save_checkpoint(tmp_path / "main" / "step-000002", student, (1,), "card", {}, {"step": 2})
    assert sorted(path.name for path in (tmp_path / "main").iterdir()) == ["step-000001", "step-000002"]


def test_retention_and_the_latest_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "main"
    foreign = [
        "step-000002-backup",
        "step-2",
        "step-",
        "step-x",
        "step-000001 copy",
        ".step-000001.old.mine",
        "step-٠٠٠٠٠١",
    ]
    for name in foreign:
        (folder / name).mkdir(parents=True)
    (folder / "step-000000").mkdir()  # no manifest: not ours
    for step in range(1, 11):
        (folder / f"step-{step:06d}").mkdir()
        (folder / f"step-{step:06d}" / "manifest.json").touch()
        point_latest(folder / f"step-{step:06d}")
        retain(folder, keep=2, keep_every=4, best=folder / "step-000003")
        latest = tmp_path / "checkpoints" / "latest"
        assert latest.resolve().name == f"step-{step:06d}"
    assert [step_of(path) for path in steps_in(folder)] == [0, 3, 4, 8, 9, 10]
    tidy(folder)
    assert {path.name for path in folder.iterdir()} == {*foreign, *(path.name for path in steps_in(folder))}
    (folder / "step-1000000").mkdir()
    assert step_of(steps_in(folder)[-1]) == 1_000_000


# Ctrl-C and SIGTERM


def _stuck(path: str) -> None:
    """A process whose main thread is away in C code, where no Python signal handler runs."""
    with Interrupts(print, grace=1.0):
        Path(path).touch()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)


@pytest.mark.slow
def test_the_grace_time_holds_even_in_a_long_call(tmp_path: Path) -> None:
    process = FORKS.Process(target=_stuck, args=(str(tmp_path / "ready"),))
    process.start()
    while not (tmp_path / "ready").exists():
        assert process.is_alive()
        time.sleep(0.01)
    process.terminate()
    assert ended(process) == 75  # the call itself would take minutes


def test_sigterm_is_obeyed_at_the_next_check_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    said: list[str] = []
    with Interrupts(said.append, grace=3600) as signals:
        signals.check()
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(2):
            with pytest.raises(Preempted):
                signals.check()
        os.kill(os.getpid(), signal.SIGTERM)  # schedulers repeat themselves
        assert 0 < signals.left < 3600
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(said) == 1
    assert "opd resume" in said[0]
    assert not [thread for thread in threading.enumerate() if thread.name == "preemption" and not _gone(thread)]


def _gone(thread: threading.Thread) -> bool:
    thread.join(600)
    return not thread.is_alive()


def test_preemption_leaves_a_long_save_out(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that would not fit into the grace time is not begun: the store and the last checkpoint suffice."""
    step = pipeline.run_step

    def preempted(run: Any, number: int) -> Any:
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(run, number)

    monkeypatch.setattr(pipeline, "run_step", preempted)
    for name, seconds, saved in (("short", 0.0, ["step-000002"]), ("long", 1e6, [])):
        monkeypatch.setattr(checkpoint.StageCheckpoints, "_save_seconds", lambda self, seconds=seconds: seconds)
        with pytest.raises(Preempted):
            opd.run(small(model, checkpoint={"grace": 3600}), out=tmp_path / name)
        run = opd.Run(tmp_path / name)
        assert run.summary["status"] == "preempted"
        assert [path.name for path in run.checkpoints] == saved
    assert "longer than the grace time leaves" in (tmp_path / "long" / "log.txt").read_text()
    monkeypatch.setattr(pipeline, "run_step", step)
    resumed = opd.resume(tmp_path / "long")
    assert [line["step"] for line in resumed.metrics] == [1, 2, 3, 4]
    assert "took 4 finished rollouts" in (tmp_path / "long" / "log.txt").read_text()
    assert json.loads((tmp_path / "long" / "summary.json").read_text())["status"] == "done"
