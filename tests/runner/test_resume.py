"""Runs that are interrupted and go on: with real kills, and with every way a run can stand still."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import opd
from opd.common.errors import DataError, OpdError, RecipeError, RunDirectoryError, RunLocked, Stopped, TrainingError
from opd.common.process_identity import this_process
from opd.loop.producer import RolloutRewards
from opd.recipe import load_recipe
from opd.records import SampledToken
from opd.report.facts import run_facts
from opd.rollouts.rollouter import DurableTokens
from opd.runner import lock as run_lock
from opd.runner.lock import RunLock
from opd.runner.run import verified_recipe
from opd.store import RolloutStore
from opd.teachers.scoring import LocalTeacher
from tests.support.crash import FORKS, RECIPE, durable, ended, kept, killed, same_run, start, written
from tests.support.helpers import save_tiny
from tests.support.interrupted import SAMPLED, SCORED, Crash, small, strike


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> opd.Run:
    """The run that nobody interrupts."""
    return opd.run(RECIPE, out=tmp_path_factory.mktemp("reference") / "run")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(json.dumps(RECIPE))
    return path


@pytest.mark.slow
def test_three_kills_leave_no_trace(reference: opd.Run, recipe: Path, tmp_path: Path) -> None:
    draw, total, directory = random.Random(str(tmp_path)), written(reference.directory), tmp_path / "run"
    for _ in range(3):
        killed(tmp_path / "out.txt", directory, total, draw, "run", recipe, "--out", directory, "--resume")
    assert ended(start(tmp_path / "out.txt", "run", recipe, "--out", directory, "--resume")) == 0
    run = opd.resume(directory)
    same_run(run, reference)
    code = ended(start(tmp_path / "again.txt", "resume", directory))
    assert (code, "is finished" in (tmp_path / "again.txt").read_text()) == (0, True)
    (directory / "summary.json").unlink()  # as if killed between the last checkpoint and the summary
    same_run(opd.resume(directory), reference)


@pytest.mark.slow
def test_sigterm_exits_with_resume_me_and_a_prefill_resumes(reference: opd.Run, recipe: Path, tmp_path: Path) -> None:
    directory, log = tmp_path / "run", tmp_path / "out.txt"
    process = start(log, "run", recipe, "checkpoint.resume=prefill", "checkpoint.every=0", "--out", directory, die=300)
    assert ended(process) == -signal.SIGKILL  # before the first checkpoint, within a step
    before = durable(directory)
    assert any(item.stop is None and item.response_ids.size for item in before.values())
    process = start(log, "resume", directory, die=200, by=signal.SIGTERM)
    assert ended(process) == 75, log.read_text()
    assert opd.Run(directory).summary["status"] == "preempted"
    kept(before, durable(directory))
    run = opd.resume(directory)
    found, wanted = durable(directory), durable(reference.directory)
    kept(before, found)
    assert found.keys() == wanted.keys()
    for key, item in wanted.items():  # keyed draws: the same tokens, unless a rounding decides
        if found[key].response_ids.tolist() == item.response_ids.tolist() and item.version[0] < 4:
            assert np.abs(found[key].logprob - item.logprob).max() < 1e-4
    assert [line["step"] for line in run.metrics] == list(range(1, 7))


# Runs small enough to stop and go on within this process


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(root / name, seed=seed) for seed, name in enumerate(("student", "teacher"))}


@pytest.mark.parametrize("objective", ["direct", "policy_gradient"])
def test_scores_and_signals_are_kept(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    spec = small(models, objective={"form": objective}, store={"hidden": True}, checkpoint={"resume": "exact"})
    reference = opd.run(spec, out=tmp_path / "reference")
    strike(monkeypatch, SCORED, 3, Crash)
    with pytest.raises(Crash):
        opd.run(spec, out=tmp_path / "run")
    asked: list[int] = []
    rewarded: list[bool] = []
    score, note = LocalTeacher.score, RolloutStore.note
    monkeypatch.setattr(LocalTeacher, "score", lambda *given: asked.append(len(given[1])) or score(*given))
    monkeypatch.setattr(
        RolloutStore, "note", lambda *given, **facts: rewarded.append("reward" in facts) or note(*given, **facts)
    )
    run = opd.resume(tmp_path / "run")
    assert (sum(asked), sum(rewarded)) == (4, 4)  # the fourth step; three were scored and rewarded before
    same_run(run, reference)


GROUPS: dict[str, dict[str, Any]] = {  # several writers in a group
    "pairs by author": {
        "rollout": {"samples": 3, "writers": [{"kind": "data", "samples": 1}, {"kind": "rejected", "samples": 1}]},
        "objective": [{"form": "pairwise", "role": "teacher", "pairs": "authors", "chosen": "data", "rejected": other} for other in ("student", "rejected")],
    },
    "traces": {
        "rollout": {"samples": 3, "writers": [{"kind": "data", "samples": 1}]},
        "objective": {"form": "policy_gradient", "on": ["student", "data"], "surrogate": "shaped", "advantage": {"teacher_weight": 0, "outcome_weight": 1}},
    },
    "own alphas": {
        "rollout": {"samples": 2, "writers": [{"kind": "teacher", "samples": 1}]},
        "objective": [{"divergence": "skew_kl", "adapt": True, "on": ["teacher"]}, {"divergence": "skew_reverse_kl", "adapt": True, "detached": True, "on": ["student"]}],
    },
    "anchor": {
        "teachers": {"a": {"kind": "ema", "rate": 0.2}},
        "rollout": {"samples": 3, "writers": [{"kind": "teacher", "samples": 2}]},
        "rewards": {"kind": "format", "pattern": "[0-9]"},
        "objective": [{"form": "cross_entropy", "on": ["teacher"], "gate": "best_of_group"}, {"form": "policy_gradient", "advantage": {"discount": 1, "also": {"kind": "anchor_rank"}}}],
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("place", [SAMPLED, SCORED])
def test_groups_of_several_writers_go_on(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    changes = GROUPS[name]
    spec = small(models, **changes | {"rollout": {"prompts": 4, "max_new_tokens": 6, **changes["rollout"]}})
    reference = opd.run(spec, out=tmp_path / "reference")
    assert any(line["grad_norm"] for line in reference.metrics)
    strike(monkeypatch, place, 3, Crash)
    with pytest.raises(Crash):
        opd.run(spec, out=tmp_path / "run")
    same_run(opd.resume(tmp_path / "run"), reference)


def test_ctrl_c_within_a_step_skips_and_repeats_no_prompt(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream had handed out the prompts of step 3 when the checkpoint of step 2 was saved."""
    spec = small(models, eval={"prompts": 2, "every": 2, "early_stop": {"patience": 9}}, checkpoint={"resume": "exact"})
    reference = opd.run(spec, out=tmp_path / "reference")
    strike(monkeypatch, SAMPLED, 3, signal.SIGINT)
    with pytest.raises(Stopped):
        opd.run(spec, out=tmp_path / "run")
    stopped = opd.Run(tmp_path / "run")
    assert (stopped.summary["status"], stopped.model.name) == ("stopped", "step-000002")
    same_run(opd.resume(tmp_path / "run"), reference)


@pytest.mark.slow
def test_a_stop_during_an_evaluation_repeats_the_evaluation(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the step's samples were to be written behind it."""
    spec = small(models, eval={"prompts": 2, "every": 2}, log={"samples": 2, "samples_every": 1})
    reference = opd.run(spec, out=tmp_path / "reference")
    assert {line["step"] for line in reference.samples} == {1, 2, 3, 4}
    for call in (1, 3, 4):  # before, after step 2 (behind the teacher's), at the end
        with monkeypatch.context() as patch:
            strike(patch, "opd.runner.evaluate:Evaluator._measure", call, Stopped)
            with pytest.raises(Stopped):
                opd.run(spec, out=tmp_path / f"run{call}")
        same_run(opd.resume(tmp_path / f"run{call}"), reference)


@pytest.mark.slow
def test_stages_lora_and_random_state_resume(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    student = {"model": models["student"], "lora": {"rank": 4}}
    stages = [{"name": "first"}, {"name": "second", "student": student | {"model": "stage:first"}}]
    spec = small(models, student=student, stages=stages, train={"steps": 2, "lr": 1e-2}, checkpoint={"every": 1})
    drawn: list[tuple[float, ...]] = []  # a reward that draws without a key of its own
    reward = RolloutRewards.reward

    def moody(*given: Any) -> Any:
        drawn.append((float(torch.rand(1)), float(np.random.rand()), random.random()))
        return reward(*given)

    monkeypatch.setattr(RolloutRewards, "reward", moody)
    reference = opd.run(spec, out=tmp_path / "reference")
    last = drawn[-1]
    strike(monkeypatch, SCORED, 4, Crash)
    with pytest.raises(Crash):
        opd.run(spec, out=tmp_path / "run")
    torch.manual_seed(7)
    run = opd.resume(tmp_path / "run")
    same_run(run, reference)
    assert drawn[-1][0] == last[0]
    assert drawn[-1] == drawn[-2]  # the crashed process and the one after it
    assert (run.model / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small(models)
    reference = opd.run(spec, out=tmp_path / "reference")
    strike(monkeypatch, SCORED, 4, Crash)
    with pytest.raises(Crash):
        opd.run(spec, out=tmp_path / "run")
    run = opd.Run(tmp_path / "run")
    assert [path.name for path in run.checkpoints] == ["step-000002", "step-000003"]
    for name in ("manifest.json", "model.safetensors"):
        copy = tmp_path / name
        shutil.copytree(run.directory, copy, symlinks=True)
        _flip(copy / "checkpoints" / "main" / "step-000003" / name)
        resumed = opd.resume(copy)
        said = (copy / "log.txt").read_text()
        assert name in said
        assert "damaged-step-000003" in said
        assert (copy / "checkpoints" / "main" / "damaged-step-000003").is_dir()
        same_run(resumed, reference)
    for step in ("step-000002", "step-000003"):
        _flip(run.directory / "checkpoints" / "main" / step / "model.safetensors")
    with pytest.raises(RunDirectoryError, match=r"step-000003: model.safetensors was altered.*No other checkpoint"):
        opd.resume(run.directory)
    shutil.rmtree(run.directory / "checkpoints" / "main")
    same_run(opd.resume(run.directory), reference)  # every rollout is in the store


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_what_is_carried_out_cannot_change_unnoticed(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike(monkeypatch, SAMPLED, 2, Crash)
    with pytest.raises(Crash):
        opd.run(small(models), out=tmp_path / "run")
    for name in ("resolved.yaml", "run.json"):
        good = (tmp_path / "run" / name).read_bytes()
        _flip(tmp_path / "run" / name)
        with pytest.raises(RunDirectoryError, match=name):
            opd.resume(tmp_path / "run")
        (tmp_path / "run" / name).write_bytes(good)
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 2, "stage": "main"}\n{"step": 3, "st')
    assert [line["step"] for line in opd.resume(tmp_path / "run").metrics] == [1, 2, 3, 4]
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        opd.resume(tmp_path / "nowhere")


def test_answers_are_written_once(models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the answers of an evaluation, before the first step or after the last, and its result."""
    whole = opd.run(small(models, train={"steps": 2}), out=tmp_path / "whole").answers
    for place, call in (("opd.runner.pipeline:write_before", 1), ("opd.runner.pipeline:write_result", 1)):
        out = tmp_path / place.rpartition("_")[2]
        with monkeypatch.context() as patch:
            strike(patch, place, call, Crash)
            with pytest.raises(Crash):
                opd.run(small(models, train={"steps": 2}), out=out)
        assert opd.resume(out).answers == whole, place
        log = (out / "log.txt").read_text()
        assert re.search(r"answers\.jsonl: [24] lines that were written after the last durable state are removed", log)


def test_lines_that_are_missing_or_cut_are_reported(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike(monkeypatch, SAMPLED, 4, Crash)
    with pytest.raises(Crash):
        opd.run(small(models, log={"samples": 2, "samples_every": 1}), out=tmp_path / "run")
    files = {name: tmp_path / "run" / f"{name}.jsonl" for name in ("samples", "tokens", "answers")}
    for path in files.values():
        *kept, last = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(kept) + last[:7])
    opd.resume(tmp_path / "run")
    log = (tmp_path / "run" / "log.txt").read_text()
    for name, path in files.items():
        assert f"{path.name}: 7 bytes of an unfinished last line are removed" in log, name
        assert f"{path.name} lacks 1 of the " in log, name


def test_a_summary_that_the_results_contradict_is_not_believed(models: dict[str, str], tmp_path: Path) -> None:
    run = opd.run(small(models, train={"steps": 1}), out=tmp_path / "run")
    path, good = run.directory / "summary.json", run.summary
    forged = copy.deepcopy(good)
    forged["stages"][0]["evals"]["a"]["after"] = 1.0
    forged["stages"][0]["steps"] = 100
    path.write_text(json.dumps(forged))
    with pytest.warns(UserWarning, match=r"summary\.json was altered: evals, steps of stage 'main'"):
        assert [run.summary["stages"][0][key] for key in ("steps", "tokens")] == [1, good["stages"][0]["tokens"]]
    facts = run_facts(run.directory)
    assert facts["stages"][0]["evals"]["a"]["after"] == good["stages"][0]["evals"]["a"]["after"]
    assert "The values of result.json are used." in facts["words"]
    for text in (json.dumps(forged), '{"status": "done"'):
        path.write_text(text)
        opd.resume(run.directory)
        assert run.summary["stages"][0]["evals"] == good["stages"][0]["evals"]
        assert "summary.json is written again" in (run.directory / "log.txt").read_text()


def test_a_recipe_that_was_cut_off_is_written_again(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    strike(monkeypatch, SAMPLED, 2, Crash)
    with pytest.raises(Crash):
        opd.run(small(models), overrides=["train.steps=2"], out=tmp_path / "run")
    path = tmp_path / "run" / "resolved.yaml"
    good = path.read_bytes()
    for cut in (b"", good[:5], good[: len(good) // 2], good[:-1], good[:500] + bytes(300)):
        path.write_bytes(cut)
        assert verified_recipe(tmp_path / "run").stages[0].train.steps == 2
        assert path.read_bytes() == good
        assert "resolved.yaml was truncated. It was restored" in capsys.readouterr().err
    for edited in (good.replace(b"steps: 2", b"steps: 3"), b"stages: [1, 2]", b"name: x\n", b"- 1"):
        path.write_bytes(edited)
        with pytest.raises(RunDirectoryError, match=r"resolved\.yaml has been altered"):
            opd.resume(tmp_path / "run")
        assert path.read_bytes() == edited  # somebody's own change is not overwritten
    (tmp_path / "run" / "recipe.yaml").write_text("")
    path.write_bytes(good[:300])
    with pytest.raises(RunDirectoryError, match=r"resolved\.yaml has been altered"):
        opd.resume(tmp_path / "run")
    for text in (b"", b"stages: 3", b"stages: [1]", b"stages: [{name: 3}]", b"\xff", b"- 1", b"2026-99-99"):
        path.write_bytes(text)
        with pytest.raises(RunDirectoryError, match=r"resolved\.yaml was altered or cut off"):
            run_facts(tmp_path / "run")
        with pytest.raises(RunDirectoryError, match=r"resolved\.yaml was altered or cut off"):
            _ = opd.Run(tmp_path / "run").checkpoints
        with pytest.raises(RecipeError, match=r"resolved\.yaml was altered or cut off"):
            load_recipe(small(models, student=f"run:{tmp_path / 'run'}"))


def test_prompts_that_changed_are_rejected(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{number}+1="}) + "\n" for number in range(40)))
    strike(monkeypatch, SAMPLED, 2, Crash)
    with pytest.raises(Crash):
        opd.run(
            small(models, prompts=[{"source": str(rows), "domain": "a"}], eval={"prompts": 0}), out=tmp_path / "run"
        )
    rows.write_text(rows.read_text().replace("+1=", "+2="))
    with pytest.raises(
        RunDirectoryError, match=r"rows.jsonl \(prompts\) has changed: sha256 \w{12}… then, \w{12}… now.*opd run"
    ):
        opd.resume(tmp_path / "run")


def test_prompts_that_share_an_id_are_rejected(models: dict[str, str], tmp_path: Path) -> None:
    twice = [{"source": "task:addition", "domain": "a"}] * 2
    with pytest.raises(DataError, match="is listed twice"):
        opd.run(small(models, prompts=twice, eval={"prompts": 0}), out=tmp_path / "run")


# Policy versions


def test_a_rollout_continued_under_newer_weights_says_so(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of the policy as it was, then of the one that goes on; `refuse` ends the run instead."""
    spec = small(
        models, rollout={"prompts": 4, "max_new_tokens": 12}, checkpoint={"resume": "prefill"}, eval={"prompts": 0}
    )
    strike(monkeypatch, SAMPLED, 1, Crash)
    with pytest.raises(Crash):
        opd.run(spec, out=tmp_path / "run")
    (tmp_path / "half").mkdir()
    first = durable(tmp_path / "run")
    for directory, rule in ((tmp_path / "half" / "allow", "allow"), (tmp_path / "half" / "refuse", "refuse")):
        changed = spec | {"rollout": spec["rollout"] | {"mixed_versions": rule}}
        strike(monkeypatch, "opd.rollouts.rollouter:Rollouter.collect", 1, Crash)
        with pytest.raises(Crash):
            opd.run(changed, out=directory)
        store = RolloutStore(directory / "rollouts")
        for item in first.values():  # three tokens of an older policy each
            store.begin(id=item.id, prompt_id=item.prompt_id, visit=item.visit, sample=item.sample, domain=item.domain,
                        source=item.source, group=item.group, prompt_ids=item.prompt_ids)  # fmt: skip
            for at in range(3):
                store.append(SampledToken(item.id, int(item.response_ids[at]), float(item.logprob[at]),
                                          float(item.logprob_sampled[at]), float(item.logprob_stop[at]), -7))  # fmt: skip
        store.close()
    run = opd.resume(tmp_path / "half" / "allow")
    for key in first:
        (item,) = run.rollouts.load([key])
        assert item.version.tolist() == [-7] * 3 + [0] * (item.response_ids.size - 3)
        assert run.rollouts.entries[key].versions == (-7, 0)
    with pytest.raises(TrainingError, match=r"version -7.*version 0.*refuse"):
        opd.resume(tmp_path / "half" / "refuse")


def test_a_replay_that_differs_is_an_error(reference: opd.Run) -> None:
    item = next(item for item in durable(reference.directory).values() if item.response_ids.size > 2)

    def drawn(at: int, **changes: Any) -> SampledToken:
        token = SampledToken(item.id, int(item.response_ids[at]), float(item.logprob[at]), float(item.logprob_sampled[at]),
                             float(item.logprob_stop[at]), int(item.version[at]))  # fmt: skip
        return token._replace(**changes)

    replay = DurableTokens(item)
    assert all(replay.holds(drawn(at)) for at in range(item.response_ids.size))
    assert not replay.holds(drawn(0))
    for changes in ({"token": 3}, {"logprob": float(np.nextafter(item.logprob[0], np.float32(-9)))}, {"version": 9}):
        with pytest.raises(TrainingError, match="token 0: drawn again"):
            DurableTokens(item).holds(drawn(0, **changes))


# One owner


@pytest.mark.slow
def test_one_owner_per_run(models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strike(monkeypatch, SAMPLED, 2, Crash)
    with pytest.raises(Crash):
        opd.run(small(models), out=tmp_path / "run")
    with RunLock(tmp_path / "run") as lock:
        assert lock.previous is None  # it was given back
        with pytest.raises(RunLocked, match=rf"in use by process {os.getpid()} on .*, since"):
            opd.resume(tmp_path / "run")
        log = tmp_path / "out.txt"
        assert ended(start(log, "resume", tmp_path / "run")) == 2
        assert f"process {os.getpid()}" in log.read_text()
        assert len(durable(tmp_path / "run")) == 8  # readers do not ask
    assert opd.resume(tmp_path / "run").summary["status"] == "done"


@pytest.mark.slow
def test_exact_is_exact_and_prefill_only_rounds(reference: opd.Run, recipe: Path, tmp_path: Path) -> None:
    process = start(tmp_path / "out.txt", "run", recipe, "--out", tmp_path / "exact", die=400)
    assert ended(process) == -signal.SIGKILL
    before = durable(tmp_path / "exact")
    open_ones = [item for item in before.values() if item.stop is None and item.response_ids.size]
    assert open_ones
    shutil.copytree(tmp_path / "exact", tmp_path / "prefill", symlinks=True)
    same_run(opd.resume(tmp_path / "exact"), reference)
    opd.resume(tmp_path / "prefill", mode="prefill")
    found, wanted = durable(tmp_path / "prefill"), durable(reference.directory)
    kept(before, found)
    gaps = [np.abs(found[item.id].logprob - wanted[item.id].logprob).max() for item in open_ones]
    assert max(gaps) < 1e-4  # none at all where products round alike: see `opd.common.cpu_env`


def test_a_dead_owner_is_succeeded(recipe: Path, tmp_path: Path) -> None:
    process = start(tmp_path / "out.txt", "run", recipe, "--out", tmp_path / "run", die=50)
    assert ended(process) == -signal.SIGKILL
    with RunLock(tmp_path / "run") as lock:
        assert lock.previous is not None
        assert lock.previous["pid"] == process.pid


@pytest.mark.parametrize("ends", [True, False], ids=["it ends", "it stays"])
def test_a_job_that_is_started_again_waits_for_the_lock_of_another_machine(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    holder, waits, now = RunLock(tmp_path).take(), list[float](), [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds
        if seconds == run_lock.AGAIN:
            waits.append(seconds)
        if ends and len(waits) == 3:
            holder.release()

    monkeypatch.setattr(run_lock, "time", SimpleNamespace(sleep=wait, monotonic=lambda: now[0]))
    with pytest.raises(RunLocked):  # of this machine: the kernel knows
        RunLock(tmp_path).take_with_wait()
    assert not waits
    holder.path.write_text(json.dumps({**this_process(), "host": "gone", "boot": "another"}))
    with nullcontext() if ends else pytest.raises(RunLocked, match="on gone"):
        RunLock(tmp_path).take_with_wait().release()
    assert len(waits) == 3 if ends else run_lock.LEASE < now[0] < 2 * run_lock.LEASE
    assert capsys.readouterr().err.count("waiting") == 1


def _hold(directory: str, child: str) -> None:
    with RunLock(Path(directory)):
        if not os.fork():
            Path(child).write_text(str(os.getpid()))  # by now it has let go
            time.sleep(3600)
            os._exit(0)
        time.sleep(3600)


def test_a_child_that_outlives_the_owner_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A lock is shared with forked processes; a reward's worker must not lock a dead run."""
    process = FORKS.Process(target=_hold, args=(str(tmp_path), str(tmp_path / "child")))
    process.start()
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        assert process.is_alive()
        time.sleep(0.01)
    with pytest.raises(RunLocked, match=rf"process {process.pid} on"), RunLock(tmp_path):
        pass
    process.kill()
    ended(process)
    child = int((tmp_path / "child").read_text())
    try:
        os.kill(child, 0)  # alive
        with RunLock(tmp_path) as lock:
            assert lock.previous is not None
    finally:
        os.kill(child, signal.SIGKILL)


def test_an_unresumable_run_is_an_error_and_not_a_traceback(tmp_path: Path) -> None:
    log = tmp_path / "out.txt"
    assert ended(start(log, "resume", tmp_path)) == 2
    assert "Traceback" not in log.read_text()
    assert issubclass(RunLocked, OpdError)
