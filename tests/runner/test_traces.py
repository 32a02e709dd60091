"""Samples token by token: what is written is what the models say, and writing it changes nothing that is trained."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import opd
from opd.common.files import append_text, line_of
from opd.runner import reports
from tests.support.helpers import save_tiny, tiny_tokenizer

BOTH: dict[str, Any] = {"form": "direct", "gate": {"kind": "entropy", "share": 0.5}}
SAMPLED: dict[str, Any] = {"form": "policy_gradient"}
OBJECTIVES = {"hidden": BOTH, "logprobs_at": SAMPLED}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(root / name, seed=seed) for seed, name in enumerate(("student", "one", "two"))}


def recipe(models: dict[str, str], objective: Any, **log: Any) -> dict[str, Any]:
    return {
        "student": models["student"],
        "teachers": {"a": models["one"], "b": models["two"]},
        "prompts": [{"source": "task:addition", "domain": "a"}, {"source": "task:reverse", "domain": "b"}],
        "rollout": {"prompts": 8, "max_new_tokens": 6},
        "objective": objective,
        "train": {"steps": 2, "lr": 3e-3, "micro_tokens": 64},
        "eval": {"prompts": 2},
        "log": {"start_table": False, **(log or {"samples_every": 1})},
        "device": "cpu",
    }


@pytest.fixture(scope="module")
def runs(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, opd.Run]:
    root = tmp_path_factory.mktemp("runs")
    return {name: opd.run(recipe(models, term), out=root / name) for name, term in OBJECTIVES.items()}


@cache
def opened(model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@torch.no_grad()
def said(model: str, rollout: Any) -> np.ndarray:
    """(T, V) log-probs by a plain forward pass."""
    found = opened(model)
    ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.response_ids])[None].astype(np.int64))
    logits = found(ids).logits[0, rollout.prompt_ids.size - 1 : -1, : len(tiny_tokenizer())].double()
    return logits.log_softmax(-1).numpy()


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_tokens_are_what_the_models_say(models: dict[str, str], runs: dict[str, opd.Run], kind: str) -> None:
    run, objective = runs[kind], OBJECTIVES[kind]
    lines = [line for line in run.tokens if line["step"] == 1]
    assert {line["domain"] for line in lines} == {"a", "b"}
    assert len(lines) == 4
    samples = {line["id"]: line for line in run.samples}
    for line in lines:
        (rollout,) = run.rollouts.load([line["id"]])
        student, teacher = (
            said(models["student"], rollout),
            said(models["one" if line["teacher"] == "a" else "two"], rollout),
        )
        own = np.arange(rollout.response_ids.size), rollout.response_ids
        assert line["ids"] == rollout.response_ids.tolist()
        assert samples[line["id"]]["prompt_id"] == rollout.prompt_id
        np.testing.assert_allclose(line["student"], student[own], atol=2e-4)
        np.testing.assert_allclose(line["teacher_logprob"], teacher[own], atol=2e-4)
        np.testing.assert_allclose(line["ratio"], (student - teacher)[own], atol=3e-4)
        np.testing.assert_allclose(line["entropy"], -(np.exp(student) * student).sum(-1), atol=2e-4)
        assert [index for index, _ in line["student_top"][0]] == np.argsort(-student[0])[:5].tolist()
        assert set(line["texts"]) >= {str(index) for index in line["ids"]}
        (term,) = line["terms"].values()
        if objective is BOTH:
            np.testing.assert_allclose(line["reverse_kl"], (np.exp(student) * (student - teacher)).sum(-1), atol=2e-4)
            assert [index for index, _ in line["teacher_top"][0]] == np.argsort(-teacher[0])[:5].tolist()
            assert [weight > 0 for weight in term["weight"]] == [gate == 1 for gate in term["gates"]["entropy"]]
        else:
            assert line["teacher_top"][0] == []
            np.testing.assert_allclose(term["advantage"], (teacher - student)[own], atol=1e-3)
    answers = run.answers
    assert {(line["step"], line["who"]) for line in answers} >= {(0, "student"), (2, "student"), (0, "teacher:a")}
    assert len([line for line in answers if line["step"] == 2]) == 4


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_how_far_they_are_apart_is_in_the_store(models: dict[str, str], runs: dict[str, opd.Run], kind: str) -> None:
    """Of every rollout of the first step: exact if distributions were compared, else from the sampled tokens alone."""
    store = runs[kind].rollouts
    first = store.where(version_max=0)
    assert len(first) == 8
    for rollout, kl, mean, largest, at in zip(
        first, *(first.column(name) for name in ("kl", "log_ratio", "largest_ratio", "ratio_at")), strict=True
    ):
        student = said(models["student"], rollout)
        teacher = said(models["one" if rollout.domain == "a" else "two"], rollout)
        ratio = (student - teacher)[np.arange(rollout.response_ids.size), rollout.response_ids]
        if kind == "logprobs_at":
            assert np.isnan(kl)
            np.testing.assert_allclose(mean, ratio.mean(), atol=1e-3)
            assert at == np.abs(ratio).argmax()
        else:  # the gate leaves out some tokens
            exact = (np.exp(student) * (student - teacher)).sum(-1)
            assert exact.min() - 1e-3 < kl < exact.max() + 1e-3
        np.testing.assert_allclose(largest, ratio[at], atol=1e-3)
    furthest = first.sorted("largest_ratio").column("largest_ratio")
    assert (np.diff(np.abs(furthest)) <= 0).all()
    assert set(first.sorted("log_ratio", ascending=True).ids) == set(first.ids)


def test_writing_samples_changes_no_update(models: dict[str, str], runs: dict[str, opd.Run], tmp_path: Path) -> None:
    quiet, told = opd.run(recipe(models, BOTH, samples=0), out=tmp_path / "quiet"), runs["hidden"]
    assert [line["loss"] for line in quiet.metrics] == [line["loss"] for line in told.metrics]
    assert [line["grad_norm"] for line in quiet.metrics] == [line["grad_norm"] for line in told.metrics]
    assert quiet.tokens == []
    assert quiet.answers == told.answers  # which `eval.answers` counts


def test_every_answer_is_kept(models: dict[str, str], tmp_path: Path) -> None:
    """Its texts too, until the file is full; `eval.answers` sets how many."""
    spec = recipe(models, SAMPLED, samples=0) | {"train": {"steps": 1}}
    spec["eval"] = {"prompts": 5, "teachers": False, "answers_mib": 1}

    def fill(live: opd.Run, metrics: dict[str, Any]) -> None:
        line = {
            "step": 1,
            "stage": "main",
            "who": "another",
            "domain": "a",
            "prompt_id": "x",
            "prompt": "",
            "response": "x" * (1 << 20),
        }
        append_text(live.directory / "answers.jsonl", line_of(line))

    run = opd.run(spec, out=tmp_path / "run", on_step=fill)
    ours = [line for line in run.answers if line["who"] == "student"]
    (stage,) = run.summary["stages"]
    assert [(line["step"], line["domain"]) for line in ours] == [
        (step, name) for step in (0, 1) for name in "ab" for _ in range(5)
    ]
    assert all(line["prompt"] if line["step"] == 0 else line["left_out"] and not line["response"] for line in ours)
    for domain, found in stage["evals"].items():
        flips = found["flips"]
        assert sum(flips[name] for name in ("kept", "gained", "lost", "missed")) == found["n"] == 5
        assert (flips["gained"] - flips["lost"]) / 5 == pytest.approx(found["after"] - found["before"]), domain
    assert "McNemar" in (run.directory / "log.txt").read_text()
    spec["eval"] = {"prompts": 5, "teachers": False, "answers": 1}
    assert len(opd.run(spec, out=tmp_path / "one").answers) == 4


def test_the_file_stays_small_and_has_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "LIMIT", 1600)
    path = tmp_path / "tokens.jsonl"
    assert reports.room_for(path, 0.001) == 100  # something from the start
    path.write_bytes(b"x" * 800)
    assert reports.room_for(path, 0.25) < 0
    assert reports.room_for(path, 1.0) == 800  # and something at the end
