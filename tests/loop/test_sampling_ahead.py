"""Sampling ahead of training: what is drawn with which weights, and a run in which two threads work at once."""

from __future__ import annotations

import errno
import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import opd
from opd.common.errors import RecipeError, StoreError, TrainingError
from opd.engines.alongside import AheadSampler, ThreadSampler
from opd.engines.builtin import Engine
from opd.engines.kinds import BuiltInSampler
from opd.loop.producer import AheadProducer
from opd.models.attention import Packed
from opd.recipe import load_recipe
from opd.records import Author, Finished, SampledToken, SampleRequest, Sampling, WeightsRef
from opd.rollouts.rollouter import answers
from opd.runner import pipeline
from opd.store import RolloutStore
from opd.store.log import AppendFile, Files
from tests.support.ahead import AHEAD, changed
from tests.support.crash import durable, ended, kept, start
from tests.support.helpers import EOS, tiny_model

# The sampler


def opened(in_flight: Any) -> tuple[Any, ThreadSampler]:
    student = tiny_model("llama_tied")
    own = Engine(student.inference_copy(own=True), BuiltInSampler(slots=4), 64, merge_stop=(EOS,))
    return student, ThreadSampler(own, student, in_flight)


def requests(count: int = 4) -> list[SampleRequest]:
    prompt = np.arange(5, 12, dtype=np.int32)
    return [SampleRequest(f"r{key}", prompt, key, Sampling(12)) for key in range(count)]


def moved(student: Any, version: int) -> WeightsRef:
    with torch.no_grad():
        for parameter in student.module.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version)))
    return student.weights(version)


def read(student: Any, ids: torch.Tensor) -> torch.Tensor:
    return student.project(student.hidden(ids, Packed.of([len(ids)]))).logits()


def test_its_weights_are_its_own() -> None:
    student, sampler = opened("wait")
    student.module.requires_grad_(True)
    sampler.load(student.weights(0))
    before = [rollout.response_ids.tolist() for rollout in answers(sampler, requests())]
    loss = read(student, torch.arange(4, 12)).logsumexp(-1).sum()  # saves weights for its backward pass
    sampler.load(student.weights(1))
    assert [rollout.response_ids.tolist() for rollout in answers(sampler, requests())] == before
    loss.backward()  # which would refuse weights that were written to meanwhile
    moved(student, 2)  # and nobody told the sampler
    assert [rollout.response_ids.tolist() for rollout in answers(sampler, requests())] == before


@pytest.mark.parametrize("in_flight", ["recompute", "keep", "wait"])
def test_weights_that_come_in_flight(in_flight: str) -> None:
    student, sampler = opened(in_flight)
    first = tiny_model("llama_tied")  # the weights that it begins with
    sampler.load(student.weights(0))
    tokens: dict[str, list[SampledToken]] = {}
    finished = []
    for number, event in enumerate(sampler.sample(requests())):
        if number == 20:
            sampler.load(moved(student, 1))
        if isinstance(event, SampledToken):
            tokens.setdefault(event.request_id, []).append(event)
        else:
            finished.append(event.request_id)
    assert sorted(finished) == ["r0", "r1", "r2", "r3"]
    versions = {name: [token.version for token in found] for name, found in tokens.items()}
    assert all(found == sorted(found) for found in versions.values())
    assert any(0 < sum(found) < len(found) for found in versions.values()) == (in_flight != "wait")
    for request in requests():
        ids = torch.tensor([*request.prompt_ids.tolist(), *(token.token for token in tokens[request.id])])
        places = torch.arange(request.prompt_ids.size - 1, len(ids) - 1)
        with torch.no_grad():  # as old and new weights read everything that was written
            old, new = (
                read(model, ids).log_softmax(-1)[places, ids[places + 1]].tolist() for model in (first, student)
            )
        for token, *known in zip(tokens[request.id], old, new, strict=True):
            if token.token != EOS and (token.version == 0 or in_flight == "recompute"):
                assert token.logprob == pytest.approx(known[token.version], abs=1e-4)


def test_a_small_model_takes_a_batch_at_a_time() -> None:
    small, own = tiny_model("llama_tied"), BuiltInSampler(slots=32)
    wide = BuiltInSampler().for_batches(100, small)
    assert isinstance(wide, BuiltInSampler)
    assert (wide.slots, wide.prefill_rows) == (100, 64)
    assert BuiltInSampler().for_batches(6, small) == BuiltInSampler()
    assert own.for_batches(100, small) is own


# Runs


def test_a_run_ahead_of_itself(tmp_path: Path) -> None:
    run = opd.run(AHEAD, out=tmp_path / "run")
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4]
    assert all(0 <= line["staleness"] <= line["staleness/max"] <= 2 and line["time/wait"] >= 0 for line in run.metrics)
    entries = list(run.rollouts.entries.values())
    assert len(entries) == 24
    assert all(entry.stop and entry.teacher and "reward" in entry.notes for entry in entries)
    alone = opd.run(AHEAD | changed(rollout={"staleness": 0}), out=tmp_path / "alone")
    assert [entry.id for entry in alone.rollouts.entries.values()] == [entry.id for entry in entries]  # stream order
    assert run.metrics[0]["loss"] == pytest.approx(alone.metrics[0]["loss"], rel=1e-6)  # nothing is stale yet
    assert "time/wait" not in alone.metrics[0]
    assert not [thread for thread in threading.enumerate() if thread.name == "opd-sampler"]


SLOWLY: dict[str, Any] = {  # bfloat16 on a CPU
    "rollout": {"prompts": 2, "max_new_tokens": 2, "staleness": 2},
    "sampler": {"dtype": "bfloat16", "slots": 2, "prefill_rows": 1, "prefill_chunk": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"student": {"model": "tiny/generalist", "lora": {"rank": 4}}, **SLOWLY},
        {
            "train": {"steps": 3, "lr": 1e-3, "precision": "mixed", "minibatches": 2},
            "objective": {"form": "policy_gradient"},
            **SLOWLY,
        },
        {"teachers": {"teacher": {"kind": "ema", "rate": 0.5, "view": {"kind": "instruction", "instruction": "Add."}}}},
        {"train": {"steps": 3, "learn": False}},
    ],
    ids=["lora", "mixed", "ema", "scores"],
)
def test_other_students_and_teachers(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = opd.run(AHEAD | changed(train={"steps": 3}) | changes, out=tmp_path / "run")
    assert [line["step"] for line in run.metrics] == [1, 2, 3]
    assert all(line["staleness/max"] <= 2 for line in run.metrics)


def test_a_producer_is_gated_and_never_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[int, int]] = []
    sample = AheadProducer._sample

    def noted(self: AheadProducer, step: int, *rest: Any) -> Any:
        begun.append((step, self._maker.samplers.version))
        return sample(self, step, *rest)

    monkeypatch.setattr(AheadProducer, "_sample", noted)
    recipe = AHEAD | changed(rollout={"staleness": 1, "in_flight": "wait"})
    run = opd.run(recipe, out=tmp_path / "run")
    assert [step for step, _ in begun] == [1, 2, 3, 4]
    assert all(step <= trained + 2 for step, trained in begun)
    assert all(entry.versions[0] == entry.versions[1] for entry in run.rollouts.entries.values())


@pytest.mark.parametrize("who", ["_sample", pytest.param("_finish", marks=pytest.mark.slow)])
def test_an_error_in_another_thread_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    work = getattr(AheadProducer, who)

    def fails(self: AheadProducer, *rest: Any) -> Any:
        if len(self._maker.store) > 6:
            raise TrainingError("the sampler has had enough")
        return work(self, *rest)

    monkeypatch.setattr(AheadProducer, who, fails)
    with pytest.raises(TrainingError, match="had enough") as caught:
        opd.run(AHEAD, out=tmp_path / "run")
    assert str(caught.value).count("had enough") == 1
    monkeypatch.undo()
    assert len(opd.resume(tmp_path / "run").metrics) == 4


# Environments


PLAYED = AHEAD | {
    "prompts": "task:dialogue",
    "teachers": {"arithmetic": "tiny/arithmetic"},
    "rollout": {
        "prompts": 6, "max_new_tokens": 40, "staleness": 2, "environment": {"kind": "dialogue", "turn_tokens": 6},
    },
    "objective": {"form": "direct"},
}  # fmt: skip


def still(staleness: int, in_flight: str) -> dict[str, Any]:
    """Weights that do not move, so that it does not matter when a turn is sampled."""
    rollout = {**PLAYED["rollout"], "staleness": staleness, "in_flight": in_flight}
    return PLAYED | {"rollout": rollout, "train": {"steps": 3, "lr": 1e-30}}


def test_episodes_ahead_of_training(tmp_path: Path) -> None:
    run = opd.run(PLAYED, out=tmp_path / "run")
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4]
    assert all(line["staleness/max"] <= 2 and line["env/turns"] > 1 for line in run.metrics)
    for rollout in durable(run.directory).values():
        assert rollout.stop in ("env", "length")
        own = rollout.author == Author.STUDENT
        assert (rollout.version[own] >= 0).all()
        assert (np.diff(rollout.version[own]) >= 0).all()


@pytest.mark.slow
def test_weights_that_do_not_move_play_the_same_episodes(tmp_path: Path) -> None:
    """Every update makes `recompute` ask for the turns that are being sampled once more."""
    alone = durable(opd.run(still(0, "recompute"), out=tmp_path / "alone").directory)
    for in_flight in ("recompute", "keep"):
        ahead = durable(opd.run(still(2, in_flight), out=tmp_path / in_flight).directory)
        assert ahead.keys() == alone.keys()
        for name, rollout in alone.items():
            assert ahead[name].response_ids.tolist() == rollout.response_ids.tolist()
            assert ahead[name].author.tolist() == rollout.author.tolist()


class Counting:
    """A sampler that answers each request with two tokens, and takes requests that come later."""

    def __init__(self) -> None:
        self.asked: list[SampleRequest] = []

    def load(self, weights: Any) -> int:
        return 0

    def sample(self, requests: Any) -> Any:
        for request in requests:
            if request is not None:
                self.asked.append(request)
                done = 0 if request.prefix_ids is None else request.prefix_ids.size
                for token in range(done - request.start, 2):
                    yield SampledToken(request.id, token, -1.0, -1.0, -1.0, 0)
                yield Finished(request.id, "length")


class Newest:
    version = 0

    def load(self, sampler: Any) -> int:
        return self.version


def test_a_turn_that_comes_later_continues_after_its_tokens_so_far() -> None:
    own, newest = Counting(), Newest()
    sampler, prompt, ready = AheadSampler(own, newest, "recompute"), np.arange(3, dtype=np.int32), []
    first = SampleRequest("r", prompt, 1, Sampling(2))

    def turns() -> Any:
        yield first
        yield None
        yield ready.pop()

    tokens: list[int] = []
    for event in sampler.sample(turns()):
        if isinstance(event, SampledToken):
            tokens.append(event.token)
            newest.version += len(tokens) % 2  # newer weights after the first token of each turn
        elif not ready and len(tokens) == 2:
            ids = np.array([0, 1, 9], dtype=np.int32)
            ready.append(SampleRequest("r", prompt, 1, Sampling(2), prefix_ids=ids, start=3))
    assert tokens == [0, 1, 0, 1]
    prefixes = [None if asked.prefix_ids is None else asked.prefix_ids.tolist() for asked in own.asked]
    assert prefixes == [None, [0], [0, 1, 9], [0, 1, 9, 0]]


SLOW_TOOL = """
import time
from pathlib import Path

import opd
from opd.rollouts.environments import Environment, Episode, Step


@opd.register
class Waits(Environment):
    name = "waits"
    closed: str
    seconds: float = 3600.0

    def open(self, prompt, key):
        return Waiting(self)


class Waiting(Episode):
    def __init__(self, environment):
        self.environment = environment

    def step(self, turn):
        time.sleep(self.environment.seconds)
        return Step(messages=[{"role": "user", "content": "more"}], reward=1.0)

    def close(self):
        with Path(self.environment.closed).open("a") as file:
            file.write("closed\\n")
"""


@pytest.mark.crash
def test_a_stop_closes_the_episodes_that_are_played_ahead(tmp_path: Path) -> None:
    """Tools that take an hour hold nobody up."""
    (tmp_path / "waits.py").write_text(SLOW_TOOL)
    waits = {"kind": "waits", "turn_tokens": 4, "call_seconds": 3600, "closed": str(tmp_path / "closed")}
    recipe = PLAYED | {"plugins": [str(tmp_path / "waits.py")], "rollout": {**PLAYED["rollout"], "environment": waits}}
    written, directory, log = tmp_path / "recipe.yaml", tmp_path / "run", tmp_path / "out.txt"
    written.write_text(json.dumps(recipe))
    process = start(log, "run", written, "--out", directory, die=20, by=signal.SIGTERM)
    began = time.monotonic()
    assert ended(process) == 75, log.read_text()
    assert time.monotonic() - began < 600  # much less than the tools take, however slow the machine
    assert (tmp_path / "closed").read_text().count("closed") >= 6  # the prompts' first messages open and close one each
    assert any(rollout.stop is None for rollout in durable(directory).values())


@pytest.mark.crash
def test_killed_while_both_work(tmp_path: Path) -> None:
    recipe, directory, log = tmp_path / "recipe.yaml", tmp_path / "run", tmp_path / "out.txt"
    recipe.write_text(json.dumps(AHEAD))
    assert ended(start(log, "run", recipe, "--out", directory, die=60)) == -signal.SIGKILL
    before = durable(directory)
    assert ended(start(log, "resume", directory, die=30, by=signal.SIGTERM)) == 75, log.read_text()
    kept(before, durable(directory))
    run = opd.resume(directory)
    found = durable(directory)
    kept(before, found)
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4]
    assert len(found) == 24
    assert all(item.stop is not None for item in found.values())


class FullFile(AppendFile):
    left = 0

    def write(self, data: bytes) -> None:
        FullFile.left -= len(data)
        if FullFile.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(data)


class FullFiles(Files):
    def append(self, path: Path) -> AppendFile:
        return FullFile(path)


@pytest.mark.crash
@pytest.mark.parametrize("room", [3000, 14000])
def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    monkeypatch.setattr(FullFile, "left", room)
    monkeypatch.setattr(pipeline, "RolloutStore", lambda place: RolloutStore(place, files=FullFiles()))
    with pytest.raises(StoreError, match="disk is full"):
        opd.run(AHEAD, out=tmp_path / "run")
    assert not [thread for thread in threading.enumerate() if thread.name == "opd-sampler"]
    monkeypatch.undo()
    before = durable(tmp_path / "run")
    run = opd.resume(tmp_path / "run")
    found = durable(tmp_path / "run")
    kept(before, found)
    assert (len(found), len(run.metrics)) == (24, 4)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rollout": {"samples": 2, "contrast": 2}, "objective": [{"form": "policy_gradient", "advantage": {"outcome_weight": 1}}]},
         "rollout.contrast 2"),
        ({"rollout": {"teacher_mix": 0.2}}, "rollout.teacher_mix"),
        ({"rollout": {"teacher_share": 0.5}}, "rollout.teacher_share"),
        ({"rollout": {"mixed_versions": "refuse"}}, "mixed_versions refuse"),
        ({"rollout": {"data_share": 1.0}}, "the student writes nothing"),
        ({"checkpoint": {"resume": "exact"}}, "checkpoint.resume exact"),
        ({"rollout": {"staleness": 0, "in_flight": "wait"}}, "in_flight wait"),
    ],
)  # fmt: skip
def test_what_cannot_be_sampled_ahead(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(AHEAD | changed(**keys))


def test_policy_gradients_are_corrected_for_older_weights() -> None:
    terms = [
        {"form": "direct"},
        {"form": "policy_gradient"},
        {"form": "policy_gradient", "correction": {"kind": "icepop"}},
    ]
    (stage,) = load_recipe(AHEAD | {"objective": terms}).stages
    found = [term.correction for term in stage.objective]
    assert [None if correction is None else correction.name for correction in found] == [None, "tis", "icepop"]
    (again,) = load_recipe(yaml.safe_load(load_recipe(AHEAD | {"objective": terms}).to_yaml())).stages
    assert again == stage
    (alone,) = load_recipe(AHEAD | changed(rollout={"staleness": 0}) | {"objective": terms}).stages
    assert alone.objective[1].correction is None


def test_the_index_is_saved_while_another_thread_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opd.store.rollouts.INDEX_ROWS", 10)
    store, prompt = RolloutStore(tmp_path / "log", commit_ms=1), np.arange(3)

    def write(name: str) -> None:
        for number in range(150):
            id = f"{name}{number}"
            store.begin(id=id, prompt_id=id, visit=0, sample=0, domain="d", source="student", prompt_ids=prompt)
            store.append(SampledToken(id, number, -1.0, -1.0, -5.0, 0))
            store.finish(id, "stop")
            store.note(id, reward=1.0)
            if number % 10 == 0:
                store.commit(sync=True)

    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.commit(sync=True)
    assert (tmp_path / "log" / "index.bin").is_file()
    assert len(RolloutStore(tmp_path / "log", read_only=True)) == 300  # from an index that was saved on the way
    store.close()
    again = RolloutStore(tmp_path / "log", read_only=True)
    assert len(again.where(reward=1.0)) == 300
