"""Several servers that serve one teacher: balanced by tokens; what one leaves unanswered goes to the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opd
from opd.common.errors import RecipeError, TrainingError
from opd.common.http import Remote
from opd.models import load_model
from opd.models.language_model import LanguageModel
from opd.recipe import load_recipe
from opd.records import SignalNeed
from opd.teachers.kinds import RunContext, TeacherInputs
from opd.teachers.other_servers import OpenAITeacher, VllmTeacher
from opd.teachers.served import ServedScorer
from tests.support.foreign_server import NAME, app_of, serving
from tests.support.helpers import save_tiny, tiny_model
from tests.support.rollouts import rollout
from tests.support.servers import TOKEN, TOKEN_ENV, ServeProcess, free_port
from tests.support.teachers import recipe, served

STOPS = (1, 3)
ROLLOUTS = [rollout(str(number), [5] * (1 + number % 7), [*range(6, 14), 1]) for number in range(12)]
LOGPROBS = SignalNeed("logprobs_at")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("replicas") / "teacher", seed=1)


@pytest.fixture(scope="module")
def model(directory: str) -> LanguageModel:
    return load_model(directory)


def opened(kind: str, addresses: list[str], directory: str, told: list[str]) -> Any:
    local = {"vllm": "weights", "openai": "tokenizer"}[kind]
    made = {"vllm": VllmTeacher, "openai": OpenAITeacher}[kind]
    spec = made(address=addresses, model=NAME, patience=5.0, concurrency=1, **{local: directory})  # type: ignore[arg-type]
    around = RunContext(say=told.append)
    return spec.open("t", TeacherInputs(tiny_model("llama", seed=2), STOPS, load_model, around))  # type: ignore[arg-type]


def values(teacher: Any) -> np.ndarray:
    return np.concatenate([signal.values for signal in teacher.score(ROLLOUTS, LOGPROBS)])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "runner", "path"), [("vllm", "pooling", "/pooling"), ("openai", "generate", "/v1/completions")])  # fmt: skip
def test_a_dead_ones_work_goes_to_the_other_and_it_is_taken_back(
    model: LanguageModel, directory: str, monkeypatch: pytest.MonkeyPatch, kind: str, runner: str, path: str
) -> None:
    monkeypatch.setattr("opd.common.http.LONGEST", 0.0)
    told: list[str] = []
    one, other = app_of(model, runner=runner), app_of(model, runner=runner)

    def asked(app: Any) -> int:
        found = app.state.asked.count(path)
        app.state.asked.clear()
        return found

    with serving(one) as first, serving(other) as second:
        alone = values(opened(kind, [first], directory, told))
        teacher = opened(kind, [first, second], directory, told)
        asked(one), asked(other)
        np.testing.assert_allclose(values(teacher), alone, atol=1e-6)
        assert min(asked(one), asked(other)) > 3  # the probe's texts
        ask, count = type(teacher)._ask, [0]

        def struck(self: Any, *question: Any) -> Any:
            count[0] += 1
            if count[0] == 5:
                other.state.fail = 1_000_000
            return ask(self, *question)

        monkeypatch.setattr(type(teacher), "_ask", struck)
        np.testing.assert_allclose(values(teacher), alone, atol=1e-6)
        assert any("is unreachable" in line and "using the others" in line for line in told)
        other.state.fail = 0
        asked(one), asked(other)
        np.testing.assert_allclose(values(teacher), alone, atol=1e-6)
        assert told[-1].endswith("is back")
        assert asked(one) > 3
        assert asked(other) > 6


def test_one_that_comes_back_as_another_is_left_alone(
    model: LanguageModel, directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opd.common.http.LONGEST", 0.0)
    stranger = app_of(load_model(save_tiny(tmp_path / "other", seed=9)))
    told: list[str] = []
    port = free_port()
    with serving(app_of(model)) as first:
        with serving(app_of(model), port) as second:
            teacher = opened("vllm", [first, second], directory, told)
            wanted = values(teacher)
        np.testing.assert_allclose(values(teacher), wanted, atol=1e-6)
        with serving(stranger, port):
            for _ in range(2):
                np.testing.assert_allclose(values(teacher), wanted, atol=1e-6)
            assert sum("is no longer used" in line for line in told) == 1
        with serving(stranger, port), pytest.raises(TrainingError, match="is not the one that was opened"):
            opened("vllm", [first, second], directory, told)


def test_answers_of_one_that_is_away_when_it_is_looked_at_do_not_count(
    model: LanguageModel, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opd.common.http.LONGEST", 0.0)
    one, other = app_of(model), app_of(model)
    check_used = Remote.check_used

    def too_late(self: Remote, check: Any) -> Any:
        other.state.fail = 1_000_000
        return check_used(self, check)

    with serving(one) as first, serving(other) as second:
        teacher = opened("vllm", [first, second], directory, [])
        wanted = values(teacher)
        other.state.noise = 5.0  # it has come back with other weights, and nobody has looked
        other.state.asked.clear()
        monkeypatch.setattr(Remote, "check_used", too_late)
        np.testing.assert_allclose(values(teacher), wanted, atol=1e-6)
        assert other.state.asked.count("/pooling") > 3


def test_no_address_comes_twice_or_is_missing() -> None:
    for address, said in (([], "at least 1"), (["http://a:1", "http://a:1/"], "twice")):
        with pytest.raises(RecipeError, match=said):
            load_recipe(recipe({"kind": "served", "model": "x", "address": address}))
    both = load_recipe(recipe({"kind": "served", "model": "x", "address": ["http://a:1", "http://b:1"]}))
    assert "http://a:1, http://b:1" in both.stages[0].teachers["arithmetic"].title


@pytest.mark.crash
def test_two_that_serve_give_the_losses_of_one_when_one_is_killed_in_mid_step(
    server: ServeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_ENV, TOKEN)
    near = opd.run(recipe({"model": "tiny/arithmetic", "batch_tokens": 40}), out=tmp_path / "near")
    asked, ask = [0], ServedScorer._ask
    with ServeProcess("tiny/arithmetic") as other:

        def struck(self: ServedScorer, *question: Any) -> Any:
            asked[0] += 1
            if asked[0] == 10:  # the probes take four
                other.kill()
            return ask(self, *question)

        monkeypatch.setattr(ServedScorer, "_ask", struck)
        both = served(server, address=[server.address, other.address], batch_tokens=40, concurrency=1)
        far = opd.run(recipe(both), out=tmp_path / "far")
    assert asked[0] > 10
    assert [row["loss"] for row in far.metrics] == [row["loss"] for row in near.metrics]
