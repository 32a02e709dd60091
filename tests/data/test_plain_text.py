"""Plain text as data, and terms that train on some domains only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import opd
from opd.common.errors import DataError, RecipeError
from opd.models import load_model
from opd.recipe import load_recipe
from opd.records import Author
from opd.teachers.scoring import LocalTeacher
from tests.support.helpers import save_tiny, term, tiny_model
from tests.support.rollouts import sampled_by, some_rollouts
from tests.support.steps import gradients

TEXTS = ["to be or not to be", "that is the question", "whether tis nobler in the mind to suffer"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(root / name, seed=seed) for seed, name in enumerate(("student", "teacher"))}


def recipe(models: dict[str, str], folder: Path, **more: Any) -> dict[str, Any]:
    rows = folder / "texts.jsonl"
    rows.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    text = {"source": str(rows), "domain": "text", "plain_text": True, "columns": {"text": "body"}}
    return {
        "student": models["student"], "teachers": {"a": models["teacher"]}, "device": "cpu", "sampler": {"slots": 4},
        "prompts": [{"source": "task:addition", "domain": "a"}, text],
        "rollout": {"prompts": 6, "samples": 2, "max_new_tokens": 24}, "train": {"steps": 2, "lr": 1e-3}, "eval": {"prompts": 0},
        "objective": [{"domains": ["a"]}, {"form": "cross_entropy", "domains": ["text"]}], **more,
    }  # fmt: skip


def test_every_token_of_a_text_but_the_first_is_data(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second teacherless domain needs no teacher, and none is asked about it."""
    asked: list[str] = []
    score = LocalTeacher.score
    monkeypatch.setattr(
        LocalTeacher, "score", lambda *given: asked.extend(item.domain for item in given[1]) or score(*given)
    )
    spec = recipe(models, tmp_path, log={"start_table": False})
    spec["prompts"] = spec["prompts"][1:]
    spec["teachers"] = {}
    spec["objective"] = {"form": "cross_entropy"}
    run = opd.run(spec, out=tmp_path / "run")
    model, module = load_model(models["student"]), AutoModelForCausalLM.from_pretrained(models["student"]).double()
    stop = model.stop_ids[0]
    nats = []
    first = [item for item in run.rollouts if item.visit < 2]
    assert {item.sample for item in first} == {0}  # a text is not answered several times
    for item in first:
        ids = [*item.prompt_ids.tolist(), *item.response_ids.tolist()]
        whole = next(text for text in TEXTS if model.tokenizer(text)["input_ids"][: len(ids) - 1] == ids[:-1])
        assert item.prompt_ids.size == 1
        assert (item.author == Author.DATA).all()
        cut = len(model.tokenizer(whole)["input_ids"]) > 24
        assert (item.stop, item.response_ids[-1] == stop) == (("length", False) if cut else ("stop", True))
        with torch.no_grad():
            logits = module(torch.tensor([ids])).logits[0, :-1, : model.size]  # without padding ids
        nats.append(-logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]].numpy())
    assert run.metrics[0]["loss"] == pytest.approx(
        np.concatenate(nats).mean(), rel=1e-5
    )  # each text twice in six prompts
    both = opd.run(recipe(models, tmp_path, log={"start_table": False}), out=tmp_path / "both")
    assert set(asked) == {"a"}
    assert {(item.domain, item.source) for item in both.rollouts} == {("a", "student"), ("text", "data")}
    assert both.metrics[0]["kl/text"] is None


def test_a_term_with_domains_trains_on_their_answers_alone() -> None:
    student, teacher = tiny_model(seed=1), tiny_model(seed=2)
    rollouts = sampled_by(student, some_rollouts())
    domains = sorted({item.domain for item in rollouts})
    assert len(domains) > 1
    whole, teachers = term(domains=domains[:1]), {name: teacher for name in domains}
    found = gradients(student, teachers, [whole], rollouts)
    wanted = gradients(student, teachers, [term()], [item for item in rollouts if item.domain == domains[0]])
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    for name, gradient in wanted[1].items():
        assert torch.allclose(found[1][name], gradient, atol=1e-6), name


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"objective": [{"domains": ["a"], "on": ["student"]}]}, "no term of the objective trains on data"),
        ({"objective": [{"domains": ["b"]}, {"form": "cross_entropy"}]}, "no prompt has the domain 'b'"),
        ({"objective": [{}, {"form": "cross_entropy"}], "teachers": {"a": "student", "b": "student"}}, "no teacher|scores no"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_on_is_rejected(
    models: dict[str, str], tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    spec = recipe(models, tmp_path, **changes)
    spec["teachers"] = {name: models["teacher"] for name in spec["teachers"]}
    with pytest.raises(RecipeError, match=why):
        opd.run(spec, out=tmp_path / "run")


def test_rows_without_text_are_named(models: dict[str, str], tmp_path: Path) -> None:
    spec = recipe(models, tmp_path)
    spec["prompts"][1]["columns"] = {}
    with pytest.raises(DataError, match="`text` must be text"):
        opd.run(spec, out=tmp_path / "run")
    assert load_recipe(spec).stages[0].prompts[1].gives_plain_text


def test_plain_text_beside_worked_answers_needs_no_completion(models: dict[str, str], tmp_path: Path) -> None:
    spec = recipe(models, tmp_path, rollout={"prompts": 6, "max_new_tokens": 24, "data_share": 0.5})
    spec["prompts"].append({"source": "task:reverse", "domain": "text", "plain_text": True})
    run = opd.run(spec, out=tmp_path / "run")
    assert {item.prompt_id.partition("/")[0] for item in run.rollouts if item.domain == "text"} >= {"task:reverse"}
