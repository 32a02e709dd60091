"""Run directories under attack: started twice at once, killed early, moved, damaged, closed, with other inputs put under them."""

from __future__ import annotations

import json
import multiprocessing.synchronize
import os
import random
import shutil
import stat
import time
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

import opd
from opd.common.errors import DataError, OpdError, RecipeError, RunDirectoryError
from opd.common.files import append_text, json_text, line_of, read_lines, remove_partials, write_atomic
from opd.models import load_model
from opd.recipe import Stage
from opd.runner import inputs
from opd.runner.checkpoint import save_checkpoint
from opd.runner.lock import RunLock, claim
from opd.runner.run_files import withdraw
from opd.store.log import AppendFile
from tests.support.crash import FORKS, ended, same_run
from tests.support.helpers import save_tiny
from tests.support.interrupted import SAMPLED, Crash, small, strike


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(root / name, seed=seed) for seed, name in enumerate(("student", "teacher"))}


@pytest.fixture(scope="module")
def finished(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> opd.Run:
    return opd.run(small(models, train={"steps": 2}), out=tmp_path_factory.mktemp("finished") / "run")


# Links in the place of files


def test_a_planted_link_is_never_written_through(tmp_path: Path, models: dict[str, str]) -> None:
    """Under every temporary name that was ever used, and in place of files that are appended to and of directories."""
    others = tmp_path / "others.txt"
    others.write_text("mine")
    for name in (".report.html.partial", ".report.html.0123456789abcdef.partial", "log.txt", "segment.log"):
        (tmp_path / name).symlink_to(others)
    write_atomic(tmp_path / "report.html", "<p>")
    assert (tmp_path / "report.html").read_text() == "<p>"
    with pytest.raises(RunDirectoryError, match=r"log\.txt is a symbolic link.*delete the link"):
        append_text(tmp_path / "log.txt", "line")
    with pytest.raises(OSError, match="symbolic links"):
        AppendFile(tmp_path / "segment.log")
    assert others.read_text() == "mine"
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (tmp_path / "main").mkdir()
    (tmp_path / "main" / ".step-000001.partial").symlink_to(theirs)
    save_checkpoint(tmp_path / "main" / "step-000001", load_model(models["student"]), (1,), "card", {}, {"step": 1})
    assert (tmp_path / "main" / "step-000001").is_dir()
    assert not (tmp_path / "main" / "step-000001").is_symlink()
    assert list(theirs.iterdir()) == []


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    old, new = tmp_path / ".a.json.partial", tmp_path / ".a.json.0123456789abcdef.partial"
    for path in (old, new, tmp_path / ".b.json.partial", tmp_path / ".a.json.mine"):
        path.touch()
    os.utime(old, (0, 0))
    write_atomic(tmp_path / "a.json", "{}")  # another writer may be at work on the newer one
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", new.name, ".b.json.partial", ".a.json.mine"}
    remove_partials(tmp_path, {"a.json"})
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", ".b.json.partial", ".a.json.mine"}
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path / "folder", "text")
    assert not list(tmp_path.glob(".folder*"))  # a writer that fails takes its own away


# Two at once


def _claim(wanted: str, ready: multiprocessing.synchronize.Barrier, give_up: bool) -> None:
    try:
        for _ in range(20):
            _claim_once(Path(wanted), ready, give_up)
    except BaseException:
        ready.abort()  # the others need not wait for this one
        raise


def _claim_once(wanted: Path, ready: multiprocessing.synchronize.Barrier, give_up: bool) -> None:
    ready.wait()
    lock, made = claim(wanted)
    (lock.directory / "owner").open("x").close()  # an error, had another one been here
    if give_up:
        (lock.directory / "owner").unlink()
        withdraw(lock.directory, made, set())  # another one may be in it from the moment its lock is gone
        lock.release()
    ready.wait()
    lock.release()
    ready.wait()
    if not give_up:
        shutil.rmtree(lock.directory)
    ready.wait()


@pytest.mark.safety
def test_a_directory_is_claimed_by_one(tmp_path: Path) -> None:
    """Six processes, twenty rounds; two of them take their directory away again at once."""
    ready = FORKS.Barrier(6, timeout=600)
    processes = [FORKS.Process(target=_claim, args=(str(tmp_path / "run"), ready, number < 2)) for number in range(6)]
    for process in processes:
        process.start()
    assert [ended(process) for process in processes] == [0] * 6


def test_an_empty_directory_is_used_and_any_other_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lock, made = claim(tmp_path / "run")
    assert (lock.directory.name, made) == ("run", False)
    second, made = claim(tmp_path / "run")
    assert (second.directory.name, made) == ("run-2", True)
    (tmp_path / "run-3").write_text("a file")
    third, _ = claim(tmp_path / "run")
    assert third.directory.name == "run-4"
    for held in (lock, second, third):
        held.release()


# Going on


def test_a_run_is_where_it_was_when_the_program_changes_its_folder(
    finished: opd.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished.directory.parent)
    run = opd.Run(finished.directory.name)
    monkeypatch.chdir(tmp_path)
    assert run.metrics == finished.metrics != []


def test_one_call_starts_or_resumes(models: dict[str, str], finished: opd.Run, tmp_path: Path) -> None:
    spec, where = small(models, train={"steps": 2}), tmp_path / "run"
    where.mkdir()
    random_name = ".run.json.0123456789abcdef.partial"
    for name in (
        "run.lock",
        "recipe.yaml",
        ".resolved.yaml.partial",
        random_name,
    ):  # killed before there was a run.json
        (where / name).write_text("half")
    same_run(opd.run(spec, out=where, resume=True), finished)
    before = (where / "metrics.jsonl").read_bytes()
    assert (
        opd.run(spec, out=where, resume=True).metrics == finished.metrics
        or (where / "metrics.jsonl").read_bytes() == before
    )
    with pytest.raises(RunDirectoryError, match=r"started with a different recipe.*opd resume"):
        opd.run(spec | {"seed": 7}, out=where, resume=True)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").touch()
    with pytest.raises(RunDirectoryError, match=r"neither empty nor a run directory: it contains 'mine.txt'"):
        opd.run(spec, out=tmp_path / "notes", resume=True)
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["mine.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "run"]


@pytest.mark.parametrize("begun", [False, True])
def test_a_start_that_fails_takes_nothing_away_that_it_found(
    models: dict[str, str], tmp_path: Path, begun: bool
) -> None:
    """Without a lock `recipe.yaml`, `plugins` and `inputs` are somebody's own, however often it is tried."""
    there = {"recipe.yaml", "plugins", "inputs"} | ({"run.lock"} if begun else set())
    for name in ("plugins", "inputs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("mine")
    (tmp_path / "recipe.yaml").write_text("mine")
    if begun:
        (tmp_path / "run.lock").touch()
    spec = small(models, teachers={"a": "tiny/nobody"})
    for _ in range(2):
        with pytest.raises(OpdError, match="tiny/nobody" if begun else "neither empty nor a run directory"):
            opd.run(spec, out=tmp_path, resume=True)
        assert {path.name for path in tmp_path.iterdir()} == there
        assert [(tmp_path / name / "mine.txt").read_text() for name in ("plugins", "inputs")] == ["mine"] * 2
    assert begun or (tmp_path / "recipe.yaml").read_text() == "mine"


@pytest.mark.slow
def test_a_moved_run_resumes_from_any_working_directory(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    student = {"model": models["student"], "lora": {"rank": 4}}
    stages = [{"name": "first"}, {"name": "second", "student": student | {"model": "stage:first"}}]
    spec = small(models, student=student, stages=stages, train={"steps": 2, "lr": 1e-2}, checkpoint={"every": 1})
    monkeypatch.chdir(tmp_path)
    reference = opd.run(spec, out="reference")
    with monkeypatch.context() as patch:
        strike(patch, SAMPLED, 4, Crash)
        with pytest.raises(Crash):
            opd.run(spec, out="run")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").rename(tmp_path / "elsewhere" / "moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    reference = opd.Run(tmp_path / "reference")
    run = opd.resume("moved")
    same_run(run, reference)
    assert (run.directory / run.summary["stages"][0]["best"]["path"]).is_dir()


# Other inputs


REWARD = "def score(sample):\n    return 1.0\n"


@pytest.mark.slow
def test_inputs_that_changed_are_rejected(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, student (a LoRA's base), teacher, tokenizer, reward; more of them, or one gone. Put back, the run goes on."""
    here = {name: shutil.copytree(path, tmp_path / name) for name, path in models.items()}
    rows, reward = tmp_path / "rows.jsonl", tmp_path / "brevity.py"
    rows.write_text("".join(json.dumps({"prompt": f"{number}+1=", "answer": "2"}) + "\n" for number in range(40)))
    reward.write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    spec = small(
        {name: str(path) for name, path in here.items()},
        prompts=[{"source": str(rows), "domain": "a"}],
        rewards="brevity:score",
        eval={"prompts": 0},
    )
    with monkeypatch.context() as patch:
        strike(patch, SAMPLED, 2, Crash)
        with pytest.raises(Crash):
            opd.run(spec, out=tmp_path / "run")
    altered = [rows, reward, here["student"] / "model.safetensors", here["teacher"] / "model.safetensors",
               here["teacher"] / "tokenizer.json", here["student"] / "config.json"]  # fmt: skip
    for path in altered:
        good = path.read_bytes()
        path.write_bytes(
            good.replace(b"1", b"7", 1) if path.suffix != ".safetensors" else good[:-1] + bytes([good[-1] ^ 1])
        )
        with pytest.raises(
            RunDirectoryError, match=rf"{path.name} \(.*has changed: sha256 \w+… then, \w+… now.*Restore them"
        ):
            opd.resume(tmp_path / "run")
        path.unlink()
        with pytest.raises(RunDirectoryError, match=rf"{path.name} \(.*is missing"):
            opd.resume(tmp_path / "run")
        path.write_bytes(good)
    extra = here["teacher"] / "model-00002.safetensors"
    extra.touch()
    with pytest.raises(RunDirectoryError, match=r"model-00002.safetensors \(teacher a\) did not exist then"):
        opd.resume(tmp_path / "run")
    extra.unlink()
    assert opd.resume(tmp_path / "run").summary["status"] == "done"
    rows.unlink()
    assert opd.resume(tmp_path / "run").summary["status"] == "done"  # a finished run reads nothing


def test_the_base_of_an_adapter_is_an_input(models: dict[str, str], tmp_path: Path) -> None:
    """Wherever it lies: its path may be relative to the adapter's directory."""
    base = shutil.copytree(models["teacher"], tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").touch()
    for path in (str(base), "../base"):
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": path}))
        stage = Stage.model_validate(
            {"student": models["student"], "teachers": {"t": str(tmp_path / "adapter")}, "prompts": ["task:addition"]}
        )
        recorded = inputs.inputs_of([stage], print)["main"]
        assert any(name.endswith("base/model.safetensors") for name in recorded)


def test_inputs_that_change_between_two_stages_are_rejected(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{number}+1="}) + "\n" for number in range(20)))
    spec = small(models, stages=[{"name": "one"}, {"name": "two"}], train={"steps": 1}, eval={"prompts": 0})
    push = opd.common.files.write_sealed

    def write(path: Path, value: Any) -> None:
        push(path, value)
        if path.name == "result.json":
            rows.write_text(rows.read_text().replace("+1", "+2"))

    monkeypatch.setattr("opd.runner.checkpoint.write_sealed", write)
    with pytest.raises(RunDirectoryError, match=r"stage 'two'.*rows.jsonl \(prompts\) has changed"):
        opd.run(spec | {"prompts": [{"source": str(rows), "domain": "a"}]}, out=tmp_path / "run")


def test_a_hub_model_stays_at_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    root = tmp_path / "models--org--name"
    for commit in ("a" * 40, "b" * 40):
        (root / "snapshots" / commit).mkdir(parents=True)
        (root / "snapshots" / commit / "config.json").write_text("{}")
    (root / "refs").mkdir()
    stage = Stage.model_validate({"student": "org/name", "teachers": {"t": "org/name"}, "prompts": ["task:addition"]})
    (root / "refs" / "main").write_text("a" * 40)
    recorded = inputs.inputs_of([stage], print)["main"]
    (root / "refs" / "main").write_text("b" * 40)
    inputs.check_inputs("main", recorded, inputs.inputs_of([stage], print, hub=False)["main"], tmp_path)
    assert inputs.revision_begun_with(recorded, "org/name", None) == "a" * 40
    assert inputs.revision_begun_with(recorded, "stage:one", None) is None


def test_large_files_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(opd.common.files, "HASH_CACHED", 4)
    path, read = tmp_path / "model.safetensors", []
    monkeypatch.setattr(opd.common.files.hashlib, "sha256", _counted(opd.common.files.hashlib.sha256, read))
    path.write_bytes(b"weights")
    first = opd.common.files.content_hash(path)
    assert opd.common.files.content_hash(path) == first
    assert read.count(b"weights") == 1
    facts = path.stat()
    path.write_bytes(b"WEIGHTS")
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))  # same size, same time of change
    assert opd.common.files.content_hash(path) != first


def test_many_files_are_hashed_side_by_side_and_one_with_two_names_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in range(20)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 1000)
    os.link(paths[0], tmp_path / "again")
    read = []
    content_hash = opd.common.files.content_hash
    monkeypatch.setattr(inputs, "content_hash", lambda path, told: (read.append(path), content_hash(path, told))[1])
    reader = inputs._Reader([*paths, tmp_path / "again"], print)
    assert [reader.hash(path) for path in paths] == [opd.common.files.sha256(path) for path in paths]
    assert reader.hash(tmp_path / "again") == reader.hash(paths[0])
    assert len(read) == len(paths)


@pytest.mark.parametrize("ended", ["by Ctrl-C", "by a file that cannot be read"])
def test_hashing_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: str) -> None:
    monkeypatch.setattr(inputs, "EVERY", 0.05)
    monkeypatch.setattr(inputs, "LONG", 0)
    monkeypatch.setattr(inputs, "THREADS", 2)
    paths = [tmp_path / name for name in "abcd"]
    for path in paths:
        path.write_bytes(b"weights")

    def endless(path: Path, told: Any) -> str:
        if ended != "by Ctrl-C":
            raise PermissionError(13, "Permission denied")
        while True:
            time.sleep(0.01)
            told(1)

    def stop(line: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inputs, "content_hash", endless)
    error = KeyboardInterrupt if ended == "by Ctrl-C" else DataError
    with pytest.raises(error):
        inputs._Reader(paths, stop).hash(paths[0])


def _counted(original: Any, read: list[bytes]) -> Any:
    def sha256(data: bytes = b"", **options: Any) -> Any:
        digest = original(data, **options)

        class Counting:
            def update(self, chunk: bytes) -> None:
                read.append(bytes(chunk))
                digest.update(chunk)

            def hexdigest(self) -> str:
                return str(digest.hexdigest())

        return Counting()

    return sha256


# Lines


def test_every_flip_in_metrics_is_noticed(finished: opd.Run, tmp_path: Path) -> None:
    shutil.copytree(finished.directory, tmp_path / "run", symlinks=True)
    run, path = opd.Run(tmp_path / "run"), tmp_path / "run" / "metrics.jsonl"
    whole, draw = path.read_bytes(), random.Random(0)
    ends = [at for at, byte in enumerate(whole) if byte == ord("\n")]
    keys = [whole.index(b'"crc"') + at for at in range(8)]
    for at in [*ends, *keys, *(draw.randrange(len(whole)) for _ in range(600))]:
        for bit in range(8) if at in ends else (draw.randrange(8),):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            with pytest.raises(RunDirectoryError, match=r"metrics.jsonl, line [123]: the line was altered or cut"):
                _ = run.metrics
    path.write_bytes(whole)
    assert run.metrics == finished.metrics
    for line in whole.splitlines():
        json.loads(line, parse_constant=_refuse)


def test_damaged_lines_are_named_on_resume(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike(monkeypatch, SAMPLED, 4, Crash)
    with pytest.raises(Crash):
        opd.run(small(models, eval={"prompts": 0}), out=tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        lines[0] + lines[1].replace(b'"step": 2', b'"step": 3') + lines[2] + b"[" * 100_000 + b'\n7\n"x"\n{"st'
    )
    run = opd.resume(tmp_path / "run")
    assert [line["step"] for line in run.metrics] == [1, 3, 4]
    said = (tmp_path / "run" / "log.txt").read_text()
    assert "metrics.jsonl, line 2: the line was altered or cut" in said
    assert "lacks 1 lines of stage main, the first of step 2" in said


def test_json_is_valid_json(tmp_path: Path) -> None:
    odd = {"loss": float("nan"), "deep": [{"x": (float("inf"), 1.5)}], "text": "\ud800é"}
    assert json.loads(json_text(odd), parse_constant=_refuse) == {
        "loss": None,
        "deep": [{"x": [None, 1.5]}],
        "text": "\ud800é",
    }
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "stage": "main", "loss": NaN}\n' + line_of({"step": 2, "stage": "main", "loss": odd}))
    old = read_lines(path, checked=False)  # begun before lines had checksums
    assert ([line["step"] for line in old.whole], old.damaged) == ([1, 2], [])
    assert read_lines(path, checked=True).damaged == [1]


def _refuse(name: str) -> None:
    raise AssertionError(name)


# A directory that is closed to us


@pytest.fixture(scope="module")
def crashed(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("crashed") / "run"
    with pytest.MonkeyPatch.context() as patch:
        strike(patch, SAMPLED, 2, Crash)
        with pytest.raises(Crash):
            opd.run(small(models, eval={"prompts": 0}), out=directory)
    return directory


@pytest.mark.parametrize(
    "name",
    [
        "rollouts",
        "checkpoints",
        "checkpoints/main",
        "log.txt",
        "run.lock",
        "resolved.yaml",
        "run.json",
        "metrics.jsonl",
    ],
)
def test_what_is_no_file_or_no_directory_is_named(crashed: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(crashed, tmp_path / "run", symlinks=True)
    path = tmp_path / "run" / name
    if path.is_dir():
        shutil.rmtree(path)
        path.touch()
    else:
        path.unlink()
        path.mkdir()
    with pytest.raises(OpdError, match=path.name):
        opd.resume(tmp_path / "run")


def test_a_hub_that_cannot_be_written_to_is_found_at_the_start(models: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"hub.repo 'me/mine'.*HF_HUB_OFFLINE"):
        opd.run(small(models, hub={"repo": "me/mine"}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_lock_without_a_name_is_still_a_lock(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        assert stat.S_IMODE((tmp_path / "run.lock").stat().st_mode) == 0o644
