"""The start-up table: what it measures of a teacher beside its student, what it warns of, and that it changes nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import opd
from opd.runner.run_files import INPUTS, WRITTEN
from opd.teachers.table import Pair, warnings
from tests.support.helpers import TEMPLATE, save_tiny, tiny_model

RECIPE: dict[str, Any] = {
    "prompts": [{"source": "task:addition", "domain": "sums"}],
    "rollout": {"prompts": 4, "max_new_tokens": 4},
    "train": {"steps": 1},
    "eval": {"prompts": 0},
    "sampler": {"slots": 4},
    "device": "cpu",
}


def save(directory: Path, template: str = TEMPLATE, **config: Any) -> str:
    """The student's own weights, and what differs."""
    model, plain = tiny_model("llama", 0, **config), tiny_model("llama", 0)
    with torch.no_grad():
        for name, parameter in plain.module.named_parameters():
            model.module.get_parameter(name)[: parameter.shape[0]] = parameter
    model.tokenizer.chat_template = template
    model.save(directory)
    return str(directory)


def started(tmp_path: Path, teacher: str | dict[str, Any], *changes: str, **more: Any) -> tuple[Any, dict[str, Any]]:
    recipe = {**RECIPE, "student": save(tmp_path / "student"), "teachers": {"sums": teacher}, **more}
    run = opd.run(recipe, out=tmp_path / "run", overrides=list(changes))
    return run, json.loads((tmp_path / "run" / "start.json").read_text())["main"][0]


PLANTED: dict[str, tuple[dict[str, Any], str]] = {
    "template": ({"template": TEMPLATE.replace("}}", "}}?")}, "another chat template: "),
    "stop ids": ({"eos_token_id": [1, 7]}, "other stop ids: 1, 7; the student 1"),
    "origin": ({"seed": 5}, "weights with another origin: cosine "),
    "vocabulary": ({"vocab_size": 96}, "another vocabulary size: 96 rows of the head, the student 80"),
    "context": ({"max_position_embeddings": 64}, "a shorter context: 64 tokens, the student 256"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_each_planted_mismatch_is_named_and_no_other(planted: str, tmp_path: Path) -> None:
    settings, words = PLANTED[planted]
    teacher = (
        save_tiny(tmp_path / "teacher", **settings) if "seed" in settings else save(tmp_path / "teacher", **settings)
    )
    run, found = started(tmp_path, teacher)
    assert set(os.listdir(run.directory)) <= {*WRITTEN, INPUTS}  # a start that fails takes all of it away
    named = [line for line in found["warnings"] if not line.startswith("stops with probability")]  # random models
    assert named[0].startswith(words), named
    others = {what for name, (_, what) in PLANTED.items() if name != planted}
    assert not [line for line in named for what in others if line.startswith(what)]
    assert len(named) == 1 or planted == "origin"  # which is far away as well
    log = (run.directory / "log.txt").read_text()
    assert f"WARNING: {words.partition(':')[0]}: sums (" in log
    assert "teachers next to the student" in log
    assert run.summary["stages"][0]["start"] == [found]


def test_text_that_goes_past_the_chat_template_is_named(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    for text, told in (("5 6 7", True), ("<eos>5 6 7", False), ([{"role": "user", "content": "5 6"}], False)):
        rows.write_text(json.dumps({"prompt": text}) + "\n")
        prompts = [{"source": str(rows), "domain": "sums"}]
        here = tmp_path / str(len(os.listdir(tmp_path)))
        _, found = started(here, {"kind": "self"}, prompts=prompts)
        words = [line for line in found["warnings"] if line.startswith("prompts without the chat template: 1 of")]
        assert bool(words) == told


def test_the_student_as_its_own_teacher_is_at_distance_zero(tmp_path: Path) -> None:
    _, found = started(tmp_path, {"kind": "self"})
    assert found["kl"] == pytest.approx(0, abs=1e-6)
    assert (found["overlap"], found["ids_differ"], found["template"]) == (1.0, 0, 0.0)
    assert found["origin"] == pytest.approx(1)
    assert found["tokens"] > 0
    _, live = started(
        tmp_path / "live", {"kind": "live", "view": {"kind": "template", "template": "{answer} {prompt}"}}
    )
    assert live["kl"] > 0  # it reads more
    assert live["origin"] is None
    assert live["memory"] is None


def test_it_changes_nothing_and_can_be_switched_off(tmp_path: Path) -> None:
    losses = {}
    for table in ("true", "false"):
        recipe = {
            **RECIPE,
            "student": "tiny/generalist",
            "teachers": {"sums": "tiny/arithmetic"},
            "train": {"steps": 2},
        }
        run = opd.run(recipe, out=tmp_path / table, overrides=[f"log.start_table={table}"])
        losses[table] = [(line["loss"], line["grad_norm"], line["reverse_kl"]) for line in run.metrics]
        assert (run.directory / "start.json").exists() == (table == "true")
        assert bool(run.summary["stages"][0]["start"]) == (table == "true")
    assert losses["true"] == losses["false"]


@pytest.mark.slow
def test_a_resumed_run_does_not_measure_again(tmp_path: Path) -> None:
    recipe = {
        **RECIPE,
        "student": "tiny/generalist",
        "teachers": {"sums": "tiny/arithmetic"},
        "checkpoint": {"every": 1},
    }
    run = opd.run(recipe, out=tmp_path / "run")
    before = run.summary["stages"][0]["start"]
    (run.directory / "summary.json").unlink()
    (run.directory / "checkpoints" / "main" / "result.json").unlink()
    again = opd.resume(run.directory)
    assert again.summary["stages"][0]["start"] == before
    assert (run.directory / "log.txt").read_text().count("teachers next to the student") == 1


def test_one_line_for_what_several_teachers_have_in_common() -> None:
    lines = warnings([Pair("a", kl=0.2), Pair("b", kl=0.5, overlap=0.5), Pair("c", kl=0.1)])
    assert lines[0].startswith("initial KL above 0.15 nats per token: a (0.2), b (0.5). This often still works")
    assert lines[1].startswith("less than 70% of the 16 likeliest tokens agree: b (50%). ")
    assert len(lines) == 2


def test_a_cold_start_is_decided_by_a_diagnosis_alone() -> None:
    """The quickstart's teachers are as far away as this before training, and on-policy distillation works."""
    for teacher in (Pair("arithmetic", kl=0.23, overlap=0.66, stop_mass=0.7), Pair("other", kl=1.3, origin=0.1)):
        remedies = [finding.remedy for finding in teacher.findings]
        assert len(remedies) > 1
        assert all("`opd diagnose` " in remedy for remedy in remedies)
