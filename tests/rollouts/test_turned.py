"""Rollouts of a stage as data of a later one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import opd
from opd.common.errors import DataError, RecipeError
from opd.data.sources import Opening, prompt_source
from opd.models import load_tokenizer
from opd.recipe import load_recipe
from tests.support.crash import same_run
from tests.support.helpers import save_tiny
from tests.support.interrupted import Crash, strike

SAMPLING = {"form": "policy_gradient", "advantage": {"teacher_weight": 0, "outcome_weight": 1}}


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("models") / "student", seed=0)


@pytest.fixture(scope="module")
def answered(student: str, tmp_path_factory: pytest.TempPathFactory) -> opd.Run:
    spec = recipe(student, where={"finished": False})
    return opd.run(spec, out=tmp_path_factory.mktemp("runs") / "run")


def recipe(student: str, **source: Any) -> dict[str, Any]:
    turned = {"source": "stage:answer", "turn_into": "completion", **source}
    base = {
        "student": student, "device": "cpu", "sampler": {"slots": 4}, "eval": {"prompts": 0}, "log": {"start_table": False},
        "rollout": {"prompts": 5, "samples": 3, "max_new_tokens": 5}, "checkpoint": {"every": 1, "resume": "exact"},
    }  # fmt: skip
    answer = {
        "name": "answer", "prompts": [{"source": "task:addition", "domain": "a"}], "objective": SAMPLING,
        "train": {"steps": 2, "learn": False}, "rewards": {"kind": "format", "pattern": "[0-9a-m].*"},
    }  # fmt: skip
    learn = {
        "name": "learn", "prompts": [turned], "objective": {"form": "cross_entropy"},
        "rollout": {"samples": 1, "data_share": 1}, "train": {"steps": 3, "lr": 1e-2},
    }  # fmt: skip
    return {**base, "stages": [answer, learn]}


def turned(run: opd.Run, **settings: Any) -> Any:
    return prompt_source(f"run:{run.directory}", stage="answer", **settings).open(Opening("run:x"))


def test_where_keeps_what_its_conditions_say(answered: opd.Run) -> None:
    rewards = {item.id: answered.rollouts.entries[item.id].notes["reward"] for item in answered.rollouts}
    mine = [item for item in answered.rollouts if item.id.startswith("answer/")]
    assert set(rewards.values()) == {0.0, 1.0}
    for where, wanted in (
        ({"finished": False}, mine),
        ({"finished": False, "least_reward": 1}, [item for item in mine if rewards[item.id] == 1]),
        ({"finished": False, "most_reward": 0.5, "least_tokens": 3}, [i for i in mine if rewards[i.id] == 0 and len(i.response_ids) >= 3]),
        ({"finished": True, "most_tokens": 5} , [item for item in mine if item.stop != "length"]),
    ):  # fmt: skip
        if not wanted:
            with pytest.raises(DataError, match="passes `where`"):
                turned(answered, turn_into="completion", where=where)
            continue
        source = turned(answered, turn_into="completion", where=where)
        assert source.size == len(wanted)
    best = turned(answered, turn_into="completion", where={"finished": False, "per_prompt": 1})
    assert best.size == len({item.prompt_id for item in mine})
    chosen = best._rows.tolist()
    by_prompt: dict[str, list[Any]] = {}
    for item in mine:
        by_prompt.setdefault(item.prompt_id, []).append(item)
    kept = {answered.rollouts.entries[item.id].number for item in mine} & set(chosen)
    for some in by_prompt.values():
        (number,) = kept & {answered.rollouts.entries[item.id].number for item in some}
        reward = next(rewards[i.id] for i in some if answered.rollouts.entries[i.id].number == number)
        assert reward == max(rewards[item.id] for item in some)


def test_answers_become_completions_turns_or_text(answered: opd.Run, student: str) -> None:
    tokenizer = load_tokenizer(student, None)
    mine = [item for item in answered.rollouts if item.id.startswith("answer/")]
    first = mine[0]
    text = tokenizer.decode(first.response_ids.tolist(), skip_special_tokens=True)
    settings = {"where": {"finished": False}}
    done = turned(answered, turn_into="completion", **settings).train(0)
    assert (done.fields["completion"], done.messages[0]["role"]) == (text, "user")
    asks = {"ask": " again {answer}?", "ask_wrong": " wrong, it was {answer_given}"}
    reward = answered.rollouts.entries[first.id].notes["reward"]
    asked = f" again {done.fields['answer']}?" if reward == 1 else f" wrong, it was {text}"
    went_on = turned(answered, turn_into="messages", **asks, **settings).train(0)
    assert [one["role"] for one in went_on.messages] == ["user", "assistant", "user"]
    assert (went_on.messages[1]["content"], went_on.messages[2]["content"]) == (text, asked)
    whole = turned(answered, turn_into="text", **asks, **settings).train(0)
    assert whole.text == tokenizer.decode(first.prompt_ids.tolist()) + text + asked
    assert whole.messages is None
    assert len({done.id, went_on.id, whole.id}) == 3


def test_a_later_stage_trains_on_them_and_resumes_exactly(
    student: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = recipe(student, where={"finished": False, "per_prompt": 2})
    reference = opd.run(spec, out=tmp_path / "reference")
    learnt = [item for item in reference.rollouts if item.id.startswith("learn/")]
    assert {item.source for item in learnt} == {"data"}
    answers = {item.response_ids[:4].tobytes() for item in reference.rollouts if item.id.startswith("answer/")}
    assert {item.response_ids[:4].tobytes() for item in learnt} <= answers
    strike(monkeypatch, "opd.loop.step:micro_batches", 2, Crash)
    with pytest.raises(Crash):
        opd.run(spec, out=tmp_path / "run")
    same_run(opd.resume(tmp_path / "run"), reference)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ({"turn_into": "answers", "where": {"least_reward": 1}}, "belong to turn_into"),
        ({"turn_into": "messages"}, "needs `ask`"),
        ({"ask": "again"}, "makes none"),
        ({"where": {"least_reward": 1, "most_reward": 0}}, "must not be more than most_reward"),
        ({"where": {"least_tokens": 9, "most_tokens": 3}}, "must not be more than most_tokens"),
        ({"turn_into": "text", "ask": "again {"}, "single '{'"),
        ({"turn_into": "turns"}, "begins in mid-episode"),
    ],
)  # fmt: skip
def test_settings_that_mean_nothing_are_rejected(source: dict[str, Any], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        load_recipe(recipe("x", **source))
