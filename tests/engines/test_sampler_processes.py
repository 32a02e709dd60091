"""Samplers in processes of their own: the draws of one beside the trainer, weights that come meanwhile, and processes that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import opd
from opd.common.errors import OpdError, RecipeError, Stopped, TrainingError
from opd.common.messages import read_message, write_message
from opd.engines import prefork
from opd.engines.alongside import (
    DRAWN,
    READY,
    WEIGHTS,
    SamplerProcesses,
    SharedWeights,
    TurnProcesses,
    _draw,
    layout_of,
    main,
)
from opd.engines.builtin import Engine
from opd.engines.kinds import BuiltInSampler
from opd.models import load_model
from opd.models.language_model import LanguageModel
from opd.recipe import load_recipe
from opd.records import Author, Prompt, SampledToken, SampleRequest, Sampling, WeightsRef
from opd.rollouts.environments import Environment, Episode, Step, Turn
from opd.rollouts.rollouter import answers
from opd.store import RolloutStore
from opd.store.log import Files, SegmentLog
from opd.store.repair import check_log
from opd.store.rollouts import SamplerLog, folder_of, held_in, numbers_in
from tests.support.ahead import AHEAD, changed
from tests.support.crash import durable, ended, kept, start
from tests.support.stores import begin

LONG = 60  # tokens of an answer, so that there is time to strike


def facts(student: LanguageModel, **changes: Any) -> dict[str, Any]:
    sampler = BuiltInSampler(slots=4).model_dump(mode="json")
    found = {"revision": None, "sampler": sampler, "max_length": 80, "stop_ids": list(student.stop_ids)}
    return {**found, "threads": 1, "in_flight": "recompute", "commit_ms": 5, "fsync": "commit", **changes}


def requests(store: RolloutStore, count: int, tokens: int = 12, first: int = 0) -> list[SampleRequest]:
    """Begun in the store."""
    sampling, found = Sampling(tokens, temperature=4.0), []  # or all would say the same
    for key in range(first, first + count):
        prompt = np.arange(5, 12 + key % 7, dtype=np.int32)
        begin(store, f"r{key}", tuple(prompt.tolist()))
        found.append(SampleRequest(f"r{key}", prompt, key, sampling))
    return found


class Forked:
    """What `Popen` would give: a real process, without the seconds in which a new one imports torch."""

    def __init__(self, command: list[str], pass_fds: tuple[int, ...], **_: Any) -> None:
        self.returncode: int | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: the child needs none of them
            self.pid = os.fork()
        if not self.pid:
            try:
                (own,) = pass_fds
                for start, end in ((3, own), (own + 1, 1024)):
                    os.closerange(start, end)  # the trainer's ends of others' sockets
                self.work(int(command[-1]))
            finally:
                os._exit(0)

    work = staticmethod(main)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = 600.0) -> None:
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("forked", timeout)
            time.sleep(0.001)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def test_two_processes_draw_what_one_thread_does_and_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck = tmp_path / "struck"

    def held(log: SamplerLog, events: Any, names: dict[str, int], author: Author) -> Iterator[int]:
        """In the processes: three steps into the second part they wait until one of them is killed."""
        for step, count in enumerate(_draw(log, events, names, author)):
            waits = step == 2 and any(len(name) == 4 for name in names)
            if waits:
                (tmp_path / f"at-work-{os.getpid()}").touch()
            yield count
            while waits and not struck.exists():
                time.sleep(0.001)

    monkeypatch.setattr("opd.engines.alongside._draw", held)
    monkeypatch.setattr("opd.engines.prefork.subprocess.Popen", Forked)
    student = load_model("tiny/generalist")
    store = RolloutStore(tmp_path / "log", commit_ms=5, segment_bytes=1000)
    alone = Engine(student.inference_copy(), BuiltInSampler(slots=4), 80, merge_stop=student.stop_ids)
    alone.load(student.weights(7))
    both = SamplerProcesses(student, 2, store, facts(student))
    try:
        both.load(student.weights(7))
        asked = requests(store, 5)
        assert sum(both.keep(asked, Author.STUDENT)) == 60
        found = store.load([request.id for request in asked])
        for rollout, expected in zip(found, answers(alone, asked), strict=True):
            assert rollout.response_ids.tolist() == expected.response_ids.tolist()
            assert rollout.logprob.tolist() == pytest.approx(expected.logprob.tolist(), abs=1e-5)
            assert set(rollout.version.tolist()) == {7}
        with torch.no_grad():  # new weights while both are at work, and one of them dies
            student.head.weight.mul_(0.5)
        asked = requests(store, 4, LONG, first=100)
        for _ in both.keep(asked, Author.STUDENT):
            if len(list(tmp_path.glob("at-work-*"))) == 2 and not struck.exists():
                both.load(student.weights(8))
                both.processes[0].process.kill()
                struck.touch()
        found = store.load([request.id for request in asked])
        assert all(
            rollout.response_ids.size == LONG or rollout.response_ids[-1] in student.stop_ids for rollout in found
        )
        assert all((np.diff(rollout.version) >= 0).all() for rollout in found)
        assert {version for rollout in found for version in rollout.version.tolist()} == {7, 8}
        assert all(process.process.poll() is None for process in both.processes)
        full = {number for number, state in store.index.logs.items() if state.what == "settled"}
        store.reclaim(5)
        assert {1, 2} <= full  # the next part of a process whose log is full goes into another
        assert not {1, 2} & set(numbers_in(tmp_path / "log"))
    finally:
        both.close()
    store.close()
    assert all(process.process.returncode is not None for process in both.processes)
    again = RolloutStore(tmp_path / "log", read_only=True)
    assert [entry.id for entry in again.entries.values()] == [f"r{key}" for key in (*range(5), *range(100, 104))]
    assert again.where().ids == [f"r{key}" for key in range(100, 104)]
    assert {state.what for state in again.index.logs.values()} == {"gone", "settled"}
    assert not check_log(tmp_path / "log").damages


def test_what_is_drawn_when_the_run_is_to_end_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two group commits: processes are hung up on, and make it durable."""
    monkeypatch.setattr("opd.engines.alongside.LEAVE", 600.0)
    monkeypatch.setattr("opd.engines.prefork.subprocess.Popen", Forked)
    student, store, drawn = load_model("tiny/generalist"), RolloutStore(tmp_path / "log", commit_ms=5), 0

    def check() -> None:
        if drawn > 8 and all(process.ready for process in both.processes):
            raise Stopped

    both = SamplerProcesses(student, 2, store, facts(student, commit_ms=600_000), check)
    both.load(student.weights(7))
    asked = requests(store, 4, LONG)

    def sample() -> None:
        nonlocal drawn
        for count in both.keep(asked, Author.STUDENT):
            if both.processes[0].ready:  # and so deaf to it
                os.kill(both.processes[0].process.pid, signal.SIGTERM)  # as a scheduler does with all of a job
            drawn += count

    with pytest.raises(Stopped):
        sample()
    both.close()
    assert [process.process.returncode for process in both.processes] == [0, 0]
    lengths = [entry.length for entry in store.entries.values()]
    assert sum(lengths) >= drawn > 8
    store.close()
    again = RolloutStore(tmp_path / "log", read_only=True)
    assert [entry.length for entry in again.entries.values()] == lengths


class Doomed(Forked):
    """Draws a token, and dies of what comes behind it."""

    @staticmethod
    def work(descriptor: int) -> None:
        trainer = Connection(descriptor)
        os.read(descriptor, len(WEIGHTS))  # whose descriptor is dropped
        trainer.recv_bytes()
        trainer.send_bytes(write_message((READY, None)))
        (directory, number, id, _), _, ((_, row, names, prompt_ids, columns),) = read_message(trainer.recv_bytes())
        log = SamplerLog(Path(directory), number, bytes.fromhex(id), commit_ms=0)
        log.begin(row, names, prompt_ids, columns)
        log.append([row], [5, -1.0, -1.0, -9.0, 7, 0])
        log.commit(sync=True)
        trainer.send_bytes(write_message((DRAWN, 1)))
        os._exit(9)


def test_a_process_that_dies_of_its_request_is_not_started_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opd.engines.prefork.subprocess.Popen", Doomed)
    student, said, store = load_model("tiny/generalist"), [], RolloutStore(tmp_path / "log", commit_ms=5)
    one = SamplerProcesses(student, 1, store, facts(student), report=said.append)
    with pytest.raises(TrainingError, match=r"ended 4 times without finishing an answer in between \(exit code 9\)"):
        list(one.keep(requests(store, 1), Author.STUDENT))
    one.close()
    assert len(said) == 3
    assert all("sampler process 0 has ended (exit code 9" in line for line in said)
    assert store.partial(["r0"])[0].response_ids.tolist() == [5, 5, 5, 5]  # what each has drawn is kept
    store.close()


class Slow(Environment):
    """Answers a turn with its ids in reverse, after other turns have been sampled."""

    name = "slow"

    def open(self, prompt: Prompt, key: int) -> Episode:
        return SlowEpisode()


class SlowEpisode(Episode):
    def step(self, turn: Turn) -> Step:
        time.sleep(0.01 * (turn.number + 1))
        return Step(turn.ids[::-1].tolist(), reward=1.0, done=turn.number == 3)


def test_turns_in_two_processes_are_those_of_one_sampler_and_one_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    student, said = load_model("tiny/generalist"), []
    sampling, slow = Sampling(48, temperature=4.0), Slow(turns=4, turn_tokens=7)
    words = {f"r{key}": np.arange(5, 12 + key % 7, dtype=np.int32) for key in range(5)}
    prompts = {name: Prompt(name, "d", text="", environment=None if name == "r3" else slow) for name in words}
    asked = [SampleRequest(name, ids, key, sampling) for key, (name, ids) in enumerate(words.items())]
    alone = Engine(student.inference_copy(), BuiltInSampler(slots=4), 80, merge_stop=student.stop_ids)
    alone.load(student.weights(7))
    play: dict[str, Any] = {"prompts": prompts, "tokenizer": student.tokenizer}
    expected = answers(alone, asked, **play)
    monkeypatch.setattr("opd.engines.prefork.subprocess.Popen", Forked)
    both = TurnProcesses(student, 2, 3, facts(student), report=said.append)
    drawn: list[SampledToken] = []

    def drew(token: SampledToken) -> None:
        drawn.append(token)
        if len(drawn) == 40:
            both.workers[0].process.kill()

    try:
        both.load(student.weights(7))
        for ours, theirs in zip(answers(both, asked, on_token=drew, **play), expected, strict=True):
            assert ours.response_ids.tolist() == theirs.response_ids.tolist()
            assert ours.author.tolist() == theirs.author.tolist()
            assert ours.stop == theirs.stop
            assert np.allclose(ours.logprob, theirs.logprob, atol=1e-5, equal_nan=True)
        assert len(said) == 1
        assert "sampler process 0 has ended (exit code -9" in said[0]
        with torch.no_grad():
            student.head.weight.mul_(0.5)
        both.load(student.weights(8))
        (rollout,) = answers(both, asked[:1], **play)
        assert set(rollout.version[rollout.author == Author.STUDENT].tolist()) == {8}

        def stop() -> None:
            if any(process.open for process in both.workers):
                raise Stopped

        with pytest.raises(Stopped):
            answers(both, asked, check_stop=stop, **play)
        (again,) = answers(both, asked[:1], **play)  # with processes that are new
        assert again.response_ids.tolist() == rollout.response_ids.tolist()
    finally:
        both.close()
    assert all(process.process.returncode is not None for process in both.workers)


def test_weights_in_shared_memory() -> None:
    class Taking:
        held: WeightsRef

        def load(self, weights: WeightsRef) -> None:
            self.held = WeightsRef(weights.version, {name: one.clone() for name, one in weights.tensors.items()})

        def sample(self, requests: Any) -> Any:
            raise NotImplementedError

    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.tensor(2.0)}
    writer, taking = SharedWeights(layout_of(tensors)), Taking()
    reader = SharedWeights(json.loads(json.dumps(writer.layout)), os.dup(writer.descriptor), {"d": torch.ones(1)})
    assert writer.version == reader.version == -1
    for version in (4, 2, 9):
        moved = {name: tensor * version for name, tensor in tensors.items()}
        writer.put(WeightsRef(version, {**moved, "d": torch.zeros(1)}))
        assert reader.version == reader.load(taking) == taking.held.version == version
        assert all(torch.equal(taking.held.tensors[name], moved[name]) for name in tensors)
        assert taking.held.tensors["d"] == 1
    reader.close()
    writer.close()


def test_processes_need_something_to_run_ahead_of() -> None:
    with pytest.raises(RecipeError, match=r"sampler\.processes 2"):
        load_recipe(AHEAD | {"rollout": {"staleness": 0}, "sampler": {"processes": 2}})


def test_interpreters_that_wait_end_when_their_stage_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are begun at once, and imports are what they do meanwhile; here they wait for the trainer's end at once."""
    begun: list[prefork.Interpreter] = []

    class Noted(prefork.Interpreter):
        def __init__(self, threads: int) -> None:
            super().__init__(threads)
            begun.append(self)

    waits = "import socket, sys; socket.socket(fileno=int(sys.argv[2])).recv(1)"
    monkeypatch.setattr(prefork, "BOOT", waits)
    monkeypatch.setattr(prefork, "Interpreter", Noted)
    ahead, missing = changed(sampler={"processes": 2}), {"student": {"model": str(tmp_path / "nobody")}}
    with pytest.raises(OpdError, match="nobody"):
        opd.run(AHEAD | ahead | missing, out=tmp_path / "run")
    assert [one.process.returncode for one in begun] == [-signal.SIGKILL] * 2
    stage = load_recipe(AHEAD | ahead).stages[0]
    with prefork.none_left():
        prefork.start_interpreters(*stage.sampler_processes)
        prefork.start_interpreters(*stage.sampler_processes)  # by the run, and by the stage's opening
        assert len(begun) == 4
        alone = prefork.taken(1)
        assert alone.process.poll() is None
    assert [one.process.returncode for one in begun].count(None) == 1
    alone.line.close()  # as when the trainer is killed
    assert alone.process.wait(600) == 0
    alone.printed.close()
    begun.clear()
    prefork.start_interpreters(*load_recipe(AHEAD | changed(rollout={"staleness": 0})).stages[0].sampler_processes)
    prefork.start_interpreters(*load_recipe(AHEAD).stages[0].sampler_processes)  # a thread
    assert not begun


# Runs


@pytest.mark.crash
@pytest.mark.parametrize("in_flight", ["recompute", "wait"])
def test_a_run_with_sampler_processes(tmp_path: Path, in_flight: str) -> None:
    settings = changed(rollout={"in_flight": in_flight}, sampler={"processes": 2})
    run = opd.run(AHEAD | settings, out=tmp_path / "run")
    alone = opd.run(AHEAD | changed(rollout={"staleness": 0}), out=tmp_path / "alone")
    entries, others = (list(one.rollouts.entries.values()) for one in (run, alone))
    assert [entry.id for entry in entries] == [entry.id for entry in others]
    assert all(entry.stop and entry.teacher and "reward" in entry.notes for entry in entries)
    assert all(line["staleness/max"] <= 2 for line in run.metrics)
    assert run.metrics[0]["loss"] == pytest.approx(alone.metrics[0]["loss"], rel=1e-5)
    if in_flight == "wait":
        assert all(entry.versions[0] == entry.versions[1] for entry in entries)


@pytest.mark.crash
def test_a_run_with_episodes_and_sampler_processes(tmp_path: Path) -> None:
    """With weights that do not move, so that it does not matter when a turn is sampled."""
    dialogue = {"prompts": 6, "max_new_tokens": 40, "environment": {"kind": "dialogue", "turn_tokens": 6}}
    played = AHEAD | {"prompts": "task:dialogue", "teachers": {"arithmetic": "tiny/arithmetic"}}
    played |= {"objective": {"form": "direct"}, "train": {"steps": 3, "lr": 1e-30}}
    settings = {"rollout": {**dialogue, "staleness": 2}, "sampler": {"processes": 2}}
    ahead = durable(opd.run(played | settings, out=tmp_path / "run").directory)
    alone = durable(opd.run(played | {"rollout": dialogue}, out=tmp_path / "alone").directory)
    assert ahead.keys() == alone.keys()
    for name, rollout in alone.items():
        assert ahead[name].response_ids.tolist() == rollout.response_ids.tolist()
        assert ahead[name].author.tolist() == rollout.author.tolist()


@pytest.mark.crash
def test_a_process_that_cannot_live_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opd.engines.prefork.BOOT", "import sys; print('no luck', file=sys.stderr); sys.exit(3)")
    with pytest.raises(TrainingError, match=r"(?s)ended 4 times without finishing.*exit code 3.*no luck"):
        opd.run(AHEAD | changed(sampler={"processes": 1}), out=tmp_path / "run")
    monkeypatch.undo()
    assert len(opd.resume(tmp_path / "run").metrics) == 4


def children(log: Path) -> set[int]:
    """Sampler processes that live, of runs that print into this file."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command, environment = path.read_bytes(), path.with_name("environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"opd.engines.alongside" in command and f"PRINTS_TO={log}".encode() in environment:
            found.add(int(path.parent.name))
    return found


def all_gone(log: Path) -> None:
    until = time.monotonic() + 600  # a hang, on any machine
    while children(log) and time.monotonic() < until:
        time.sleep(0.1)
    assert not children(log)


def in_logs(directory: Path) -> dict[str, list[int]]:
    """Tokens in the logs of samplers of a dead run that nobody has settled yet: the store has not heard of all."""
    store, found = RolloutStore(directory, read_only=True), dict[str, list[int]]()
    for number, state in store.index.logs.items():
        if state.what == "open":
            log = SegmentLog(folder_of(directory, number), Files(), id=store.sampler_log_id(number))
            found |= {held.names["id"]: held.tokens()["response_ids"].tolist() for held in held_in(log).values()}
    return found


@pytest.mark.crash
def test_everything_is_killed_in_turn(tmp_path: Path) -> None:
    recipe, directory, log = tmp_path / "recipe.yaml", tmp_path / "run", tmp_path / "out.txt"
    settings = changed(sampler={"processes": 2}, rollout={"max_new_tokens": 16, "temperature": 4.0})
    recipe.write_text(json.dumps(AHEAD | settings | changed(checkpoint={"grace": 3600})))
    assert ended(start(log, "run", recipe, "--out", directory, die=60)) == -signal.SIGKILL
    all_gone(log)
    before, drawn = durable(directory), in_logs(directory / "rollouts")
    assert sum(map(len, drawn.values())) >= 60
    assert ended(start(log, "resume", directory, die=40, by=signal.SIGTERM)) == 75, log.read_text()
    after = durable(directory)
    kept(before, after)
    assert all(after[id].response_ids[: len(ids)].tolist() == ids for id, ids in drawn.items())
    assert not in_logs(directory / "rollouts")  # an end in good order leaves nothing to settle
    process = start(log, "resume", directory)
    while process.is_alive() and not (found := children(log)):
        time.sleep(0.05)
    os.kill(min(found), signal.SIGKILL)
    assert ended(process) == 0, log.read_text()
    found_now = durable(directory)
    kept(after, found_now)
    assert len(found_now) == 24
    assert all(item.stop is not None for item in found_now.values())
    assert not check_log(directory).damages
    all_gone(log)
