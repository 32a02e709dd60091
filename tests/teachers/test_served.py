"""A served teacher is the one in this process, to the bit on a CPU; it is waited for, and never exchanged for another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import opd
from opd.common.errors import RecipeError, RemoteError, TokenizerMismatch
from opd.models import load_model
from opd.models.language_model import LanguageModel
from opd.recipe import load_recipe
from opd.records import SignalNeed
from opd.runner.plan import make_plan
from opd.teachers.served import ServedScorer
from tests.support.helpers import tiny_model
from tests.support.servers import TOKEN, TOKEN_ENV, ServeProcess, free_port, rollouts
from tests.support.teachers import recipe, served

LENGTHS = [(3, 5), (7, 2), (2, 30), (11, 17), (5, 1), (4, 40), (9, 9)]


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENV, TOKEN)


@pytest.fixture
def student() -> LanguageModel:
    return load_model("tiny/generalist")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_same_bits_as_in_process(server: ServeProcess, student: LanguageModel, temperature: float) -> None:
    asked = rollouts(student.size, LENGTHS)
    near = opd.Teacher({"model": "tiny/arithmetic", "batch_tokens": 64, "temperature": temperature}, student)
    far = opd.Teacher(served(server, batch_tokens=64, temperature=temperature), student)
    assert far.stop_ids == near.stop_ids
    for need in (SignalNeed("hidden"), SignalNeed("logprobs_at"), SignalNeed("topk", k=7), SignalNeed("topk", k=1000)):
        for one, other in zip(near.score(asked, need), far.score(asked, need), strict=True):
            assert one.spans == other.spans
            parts = [(one.values, other.values)]
            if need.kind == "topk":
                names = ("ids", "logprobs", "tail", "stop_logprob")
                parts = [(getattr(one.values, name), getattr(other.values, name)) for name in names]
                assert one.values.fingerprint == other.values.fingerprint
            for left, right in parts:
                assert np.array_equal(np.asarray(left), np.asarray(right))
    batch = opd.Pack.of(asked, student.device)
    gradients = []
    for teacher in (near, far):
        student.module.zero_grad()
        found = opd.divergence("reverse_kl", student.predict(batch), teacher.predict(batch), merge=[student.stop_ids])
        found.loss.backward()
        gradients.append(
            [found.loss.detach(), *(p.grad.clone() for p in student.module.parameters() if p.grad is not None)]
        )
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert far.version > 0


def test_a_mixture_may_have_parts_that_are_served(server: ServeProcess, tmp_path: Path) -> None:
    """With others of any kind; a resumed run finds the same ones."""
    found = []
    for name, expert in (("near", {"model": "tiny/arithmetic"}), ("far", served(server))):
        parts: dict[str, Any] = {"expert": expert, "start": {"kind": "ema"}}
        blend = {"kind": "mixture", "combine": "geometric", "parts": parts}
        run = opd.run(recipe(blend, steps=2) | {"checkpoint": {"every": 1}}, out=tmp_path / name)
        found.append([row["loss"] for row in run.metrics])
    assert found[0] == found[1]
    (plan,) = make_plan(load_recipe(recipe(blend)))
    assert any("teachers.arithmetic.expert: arithmetic at" in note and "weights" in note for note in plan.notes)
    wrong = {**blend, "parts": {**parts, "expert": served(server, model="nobody")}}
    with pytest.raises(RemoteError, match="no model 'nobody'"):
        make_plan(load_recipe(recipe(wrong)))


def test_the_table_at_the_start_knows_what_the_server_says(server: ServeProcess, tmp_path: Path) -> None:
    load_model("tiny/generalist").save(str(tmp_path / "student"), stop=(7,))
    spec = {**recipe(served(server), steps=1), "student": str(tmp_path / "student")}
    run = opd.run(spec, out=tmp_path / "run")
    (found,) = run.summary["stages"][0]["start"]
    assert found["ids_differ"] == 0
    assert [line for line in found["warnings"] if line.startswith("other stop ids: 1; the student 1, 7")], found


@pytest.mark.crash
def test_kill_9_in_mid_step_loses_nothing(
    server: ServeProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of 40 tokens: a step has several, and the server dies between two of them."""
    near = opd.run(recipe({"model": "tiny/arithmetic", "batch_tokens": 40}), out=tmp_path / "near")
    asked, ask = [0], ServedScorer._ask

    def struck(self: ServedScorer, *question: Any) -> dict[str, torch.Tensor]:
        asked[0] += 1
        if asked[0] == 8:  # the probe takes two
            server.kill()
            server.start(wait=False)
        return ask(self, *question)

    monkeypatch.setattr(ServedScorer, "_ask", struck)
    far = opd.run(recipe(served(server, batch_tokens=40, concurrency=1)), out=tmp_path / "far")
    assert asked[0] > 8
    said = (
        (tmp_path / "far" / "log.txt").read_text()
        if (tmp_path / "far" / "log.txt").exists()
        else capsys.readouterr().err
    )
    assert "waiting for" in said
    assert "is back" in said
    assert [row["loss"] for row in far.metrics] == [row["loss"] for row in near.metrics]
    assert len(list((tmp_path / "far" / "heads").iterdir())) == 1


def test_other_weights_are_rejected(server: ServeProcess, student: LanguageModel) -> None:
    teacher: Any = opd.Teacher(served(server), student)
    with pytest.raises(RemoteError, match="trained with other weights"):
        teacher.restore(teacher.version + 1, {})
    teacher.restore(teacher.version, {})
    scorer = teacher._opened
    scorer._facts = scorer._facts.model_copy(update={"weights": "0" * 64})  # as if it had been another one at the start
    with pytest.raises(RemoteError, match=r"had the weights 000000000000 .* Nothing was trained on them"):
        teacher.score(rollouts(student.size, LENGTHS), SignalNeed("hidden"))


def test_another_tokenizer_is_rejected(server: ServeProcess) -> None:
    with pytest.raises(TokenizerMismatch, match="mean different tokens"):
        opd.Teacher(served(server), tiny_model())


def test_a_wrong_token_and_an_unknown_model(
    server: ServeProcess, student: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RemoteError, match="no model 'nobody' here; there are arithmetic"):
        opd.Teacher(served(server, model="nobody"), student)
    monkeypatch.setenv(TOKEN_ENV, "wrong")
    with pytest.raises(RemoteError, match="401") as caught:
        opd.Teacher(served(server), student)
    assert "wrong" not in str(caught.value)


def test_requests_that_the_server_rejects_are_reported_with_the_remedy(
    server: ServeProcess, student: LanguageModel
) -> None:
    teacher = opd.Teacher(served(server), student)
    with pytest.raises(RemoteError, match=r"accepts 8 texts per request, and 20 .* --max-sequences 20"):
        teacher.score(rollouts(student.size, [(2, 3)] * 20), SignalNeed("hidden"))


def test_a_plan_does_not_need_the_server_but_its_token(server: ServeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def notes(teacher: dict[str, Any]) -> str:
        return "\n".join(line for plan in make_plan(load_recipe(recipe(teacher))) for line in plan.lines())

    assert "arithmetic at http" in notes(served(server))
    assert "weights" in notes(served(server))
    assert "not reachable now" in notes({**served(server), "address": f"http://127.0.0.1:{free_port()}"})
    for token, said in (
        ("wrong", "401"),
        ("\u00e9t\u00e9", "only visible ASCII"),
        ("", f"token_env '{TOKEN_ENV}': this variable is not set"),
    ):
        monkeypatch.setenv(TOKEN_ENV, token)
        with pytest.raises(RemoteError, match=said):
            notes(served(server))  # as the run would


def test_recipes_that_cannot_be_meant() -> None:
    here = {"kind": "served", "address": "http://127.0.0.1:1", "model": "arithmetic"}
    with pytest.raises(RecipeError, match="http:// or https://"):
        load_recipe(recipe({**here, "address": "ftp://x"}))
    with pytest.raises(RecipeError, match="password") as caught:
        load_recipe(recipe({**here, "address": "http://me:hidden@x"}))
    assert "hidden" not in str(caught.value)
    with pytest.raises(RecipeError, match="name of an environment variable") as caught:
        load_recipe(recipe({**here, "token_env": "sk-hidden"}))
    assert "hidden" not in str(caught.value)
    with pytest.raises(RecipeError, match="model"):
        load_recipe(recipe({"kind": "served", "address": "http://127.0.0.1:1"}))
    mixed = recipe(here)
    mixed["rollout"]["teacher_mix"] = 0.2
    with pytest.raises(RecipeError, match="teacher_mix"):
        load_recipe(mixed)
