"""`make test-safety`: attacks on run directories by real processes, started at once, killed early, or without rights."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import yaml

import opd
from opd.common.errors import RecipeError
from tests.support.crash import FORKS, _command, ended, same_run, start
from tests.support.helpers import save_tiny
from tests.support.interrupted import SAMPLED, Crash, small, strike

pytestmark = pytest.mark.safety


def recipe(root: Path, **changes: Any) -> Path:
    models = {name: save_tiny(root / name, seed=seed) for seed, name in enumerate(("student", "teacher"))}
    path = root / "recipe.yaml"
    path.write_text(json.dumps(small(models, train={"steps": 2, "lr": 1e-2}, eval={"prompts": 0}) | changes))
    return path


def test_six_started_at_once_have_six_directories(tmp_path: Path) -> None:
    """Each carries out its own recipe, and is told where."""
    path = recipe(tmp_path)
    for number in range(4):
        out = tmp_path / f"round{number}" / "run"
        logs = [tmp_path / f"round{number}-{seed}.txt" for seed in range(6)]
        if number % 2:  # an empty directory that is there already
            out.mkdir(parents=True)
        processes = [start(log, "run", path, f"seed={seed}", "--out", out) for seed, log in enumerate(logs)]
        assert [ended(process) for process in processes] == [0] * 6, [log.read_text() for log in logs]
        told = [
            re.findall(r"^run directory: (.*?)(?: \(.* is taken\))?$", log.read_text(), re.MULTILINE)[-1]
            for log in logs
        ]
        assert sorted(told) == sorted(str(item) for item in out.parent.iterdir())
        assert len(set(told)) == 6
        for seed, directory in enumerate(told):
            run = opd.Run(directory)
            assert yaml.safe_load((run.directory / "resolved.yaml").read_text())["stages"][0]["seed"] == seed
            assert (run.summary["status"], len(run.metrics)) == ("done", 2)


# Killed early


def _killed(log: str, arguments: list[str], last: int) -> None:
    """The command, killed at its so-manieth operation on a directory."""
    left = itertools.count(last, -1)

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*given: Any, **options: Any) -> Any:
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*given, **options)

        return operation

    for name in ("mkdir", "replace", "rename", "fsync", "ftruncate"):
        setattr(os, name, counted(getattr(os, name)))
    _command(log, arguments)


def test_a_job_script_that_is_killed_early_again_and_again(tmp_path: Path) -> None:
    """One command, called until it succeeds. Each attempt lives for one operation more; all are the same run."""
    path, out, log = recipe(tmp_path), tmp_path / "runs" / "job", tmp_path / "log.txt"
    reference = opd.run(path, out=tmp_path / "reference")
    command = ["run", str(path), "--out", str(out), "--resume"]
    for last in range(2000):
        process = FORKS.Process(target=_killed, args=(str(log), command, last))
        process.start()
        code = ended(process)
        assert code in (0, -signal.SIGKILL), log.read_text()
        assert not out.parent.exists() or {item.name for item in out.parent.iterdir()} <= {"job"}
        if code == 0:
            break
    assert last > 10
    assert "Traceback" not in log.read_text()
    same_run(opd.Run(out), reference)


# Without rights


def _without_rights(log: str, arguments: list[str]) -> None:
    """The command under the permissions of files, which root otherwise passes over (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH)."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (
        (ctypes.c_uint32 * 2)(0x20080522, 0),
        (ctypes.c_uint32 * 6)(),
    )  # effective, permitted, inheritable; twice
    assert libc.capget(header, sets) == 0
    for place in range(3):
        sets[place] &= ~0b110
    assert libc.capset(header, sets) == 0
    _command(log, arguments)


def refused(log: Path, *arguments: str | Path) -> str:
    process = FORKS.Process(target=_without_rights, args=(str(log), [str(argument) for argument in arguments]))
    process.start()
    code, said = ended(process), log.read_text()
    assert code in (1, 2), said
    assert "Traceback" not in said
    log.unlink()
    return said


def test_a_place_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    place, path = tmp_path, recipe(tmp_path)
    for directory in (place / "closed", place / "sealed" / "run"):
        directory.mkdir(parents=True)
        directory.chmod(0o555)
    (place / "sealed").chmod(0o555)
    for out in (
        place / "closed" / "run",
        place / "closed",
        place / "sealed" / "run",
        place / "sealed" / "other",
        "/proc/run",
    ):
        for option in ((), ("--resume",)):
            said = refused(place / "log.txt", "run", path, "--out", out, *option)
            assert str(out) in said.replace("run.lock", "")


@pytest.mark.parametrize(
    "name",
    ["", "run.lock", "log.txt", "run.json", "resolved.yaml", "metrics.jsonl", "rollouts", "rollouts/segment-000000.log",
     "checkpoints/main", "checkpoints/main/step-000001/model.safetensors", "checkpoints/main/step-000001/trainer.json"],
)  # fmt: skip
def test_what_may_not_be_touched_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    place, path = tmp_path, recipe(tmp_path, checkpoint={"every": 1})
    with monkeypatch.context() as patch:
        strike(patch, SAMPLED, 2, Crash)
        with pytest.raises(Crash):
            opd.run(path, out=place / "run")
    victim = place / "run" / name
    for mode in (0o555, 0o000) if victim.is_dir() else (0o000,):
        victim.chmod(mode)
        said = refused(place / "log.txt", "resume", place / "run")
        assert (place / "run").name in said
        victim.chmod(0o755)


# A hub that fails


class Hub(BaseHTTPRequestHandler):
    """Knows its user and makes repositories; takes no files."""

    taken: tuple[str, ...] = ("/api/whoami-v2", "/api/repos/create")

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        good = self.path in self.taken
        body = json.dumps(
            {"name": "me", "url": "https://huggingface.co/me/mine", "type": "user"} if good else {"error": "no room"}
        ).encode()
        self.send_response(200 if good else 403)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    kind = type("Kind", (Hub,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield kind
    server.shutdown()
    server.server_close()


def test_a_push_that_fails_leaves_the_run_done(hub: type[Hub], tmp_path: Path) -> None:
    run = opd.run(recipe(tmp_path, hub={"repo": "me/mine"}), out=tmp_path / "run")
    assert run.summary["status"] == "done"
    said = (run.directory / "log.txt").read_text()
    assert re.search(
        rf"was not pushed to me/mine \(.*Later: hf upload me/mine {run.model} \. --exclude optimiser", said
    )


def test_a_hub_without_access_is_rejected_before_training(hub: type[Hub], tmp_path: Path) -> None:
    path = recipe(tmp_path, hub={"repo": "me/mine"})
    for known in ((), ("/api/whoami-v2",)):
        hub.taken = known
        with pytest.raises(RecipeError, match=r"hub.repo 'me/mine' cannot be written to .*hf auth login"):
            opd.run(path, out=tmp_path / "run")
        assert not (tmp_path / "run").exists()
