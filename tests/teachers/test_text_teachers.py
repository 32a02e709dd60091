"""Teachers that give text alone: scores as rewards, demonstrations in place of failed answers, what they cost, and resuming."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opd
from opd.common.chat_client import Answer, Chat, ChatQuestion, Endpoint
from opd.common.errors import RecipeError, RemoteError, TrainingError, UserError
from opd.records import Author, Prompt, Sample
from opd.rewards.chat import ChatReward, digit_of
from opd.rewards.reward import Rewards
from opd.rewards.rewarder import Rewarder
from tests.support.chat_endpoint import TOKEN, Served, serving


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


def endpoint(served: Served, **settings: Any) -> dict[str, Any]:
    return {"address": served.address, "model": "sums", "patience": 600, **settings}


def prompt(question: str = "add 2+3") -> Prompt:
    return Prompt("p", "sums", ({"role": "user", "content": question},))


def recipe(**changes: Any) -> dict[str, Any]:
    return {
        "name": "chat",
        "student": "tiny/generalist",
        "prompts": [{"source": "task:addition", "domain": "arithmetic"}],
        "rollout": {"prompts": 4, "samples": 2, "max_new_tokens": 6},
        "sampler": {"slots": 8},
        "objective": {"form": "policy_gradient", "advantage": {"teacher_weight": 0, "outcome_weight": 1}},
        "train": {"steps": 2},
        "eval": {"prompts": 0},
        "device": "cpu",
        "threads": 1,
        **changes,
    }


def demonstrated(served: Served, **settings: Any) -> dict[str, Any]:
    rollout = {**recipe()["rollout"], "demonstrations": {"endpoint": endpoint(served), **settings}}
    objective = [recipe()["objective"], {"form": "cross_entropy", "on": ["teacher"]}]
    return recipe(rollout=rollout, objective=objective, prompts=[{"source": "task:addition", "options": {"digits": 2}}])


def test_a_score_is_one_digit_and_nothing_else() -> None:
    scores = {"7": 7, "Score: 8": 8, "I give it **3**.": 3, "6/9": 6, "<think>2 or 4</think>Rating: 5": 5, "0\n": 0}
    assert {text: digit_of(text) for text in scores} == scores
    for text in (
        "",
        "10",
        "score 10",
        "4 or 5",
        "9.5",
        "good",
        "score: 3 … score: 7",
        "2+2=4 is right: yes",
        "-1 to 12",
    ):
        assert digit_of(text) is None, text


def test_rewards_are_asked_for_at_once_parsed_and_counted(served: Served) -> None:
    price = {"input": 1_000_000.0, "output": 2_000_000.0}
    rewarder = Rewarder(
        Rewards(domains={"default": [ChatReward(endpoint=endpoint(served, price=price, concurrency=3))]})
    )
    samples = [Sample(prompt(f"add 2+{n}"), str(n + 2 + n % 2)) for n in range(8)]
    assert [result.reward for result in rewarder([*samples, samples[0]])] == [1, 1 / 9] * 4 + [1]
    words = sum(len(text.split()) for text in served.asked)
    expected = {
        "calls": 8,
        "prompt_tokens": words,
        "completion_tokens": 8,
        "cost": words + 16,
        "failures": 0,
        "cached": 1,
    }
    assert expected.items() <= rewarder.drain().items()
    assert served.most <= 3
    served.says = "I would rather not say."
    assert [result.reward for result in rewarder([Sample(prompt("add 4+4"), "8")])] == [None]
    assert {"unparsed": 1, "failed": 1, "given": 0}.items() <= rewarder.drain().items()
    rewarder.close()


def test_what_model_and_rows_say_is_never_read_as_a_template(served: Served) -> None:
    kind = ChatReward(endpoint=endpoint(served), template="{prompt} {hint}\nAnswer:\n{response}\n\n")
    hostile = Prompt("p", "d", text="add 1+1 {hint} {response}", fields={"hint": "{prompt} {0.__class__}"})
    kind.open(None).reward([Sample(hostile, "{prompt}{{")])
    assert served.asked == ["add 1+1 {hint} {response} {prompt} {0.__class__}\nAnswer:\n{prompt}{{\n\n"]


def test_tokens_stay_in_the_environment_and_servers_that_fail_are_asked_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RemoteError, match="variable is not set"):
        Chat(Endpoint(**endpoint(served, token_env="OPD_TEST_TOKEN")))
    monkeypatch.setenv("OPD_TEST_TOKEN", TOKEN)
    served.fails = 2
    chat = Chat(Endpoint(**endpoint(served, token_env="OPD_TEST_TOKEN", concurrency=1)))
    assert chat.ask([ChatQuestion(None, "add 1+2")]) == [Answer("3")]
    assert served.tokens == [f"Bearer {TOKEN}"] * 3
    chat.close()


class Log(list[tuple[Any, Any]]):
    """Calls that were made before."""

    def find(self, about: str, call: Any) -> Any:
        return next((result for known, result in self if known == call), None)

    def add(self, about: str, call: Any, result: Any) -> None:
        self.append((call, result))

    def earlier(self) -> list[tuple[Any, Any]]:
        return list(self)


def test_after_a_resume_each_counts_what_it_asked_itself(served: Served) -> None:
    spec, log = Endpoint(**endpoint(served, max_calls=1)), Log()
    for purpose in ("demonstration", "reward"):
        Chat(spec, log, purpose=purpose).ask([ChatQuestion("main/p/0/0", "add 1+2")])
    totals = [Chat(spec, log, purpose=purpose).total["calls"] for purpose in ("demonstration", "reward", "other")]
    assert (totals, len(served.asked)) == ([1, 1, 0], 2)
    with pytest.raises(TrainingError, match="max_calls is 1"):
        Chat(spec, log, purpose="reward").ask([ChatQuestion("main/p/0/0", "add 1+3")])


def test_a_server_that_never_answered_is_an_error_and_one_that_stops_to_is_a_failure(served: Served) -> None:
    with pytest.raises(RemoteError, match=r"404.*Is the name right"):
        Chat(Endpoint(**endpoint(served) | {"address": served.address + "/wrong"})).ask([ChatQuestion(None, "add 1+2")])
    chat = Chat(Endpoint(**endpoint(served, patience=0.3)))
    assert chat.ask([ChatQuestion(None, "add 1+2")]) == [Answer("3")]
    served.fails = 1000
    (answer,) = chat.ask([ChatQuestion(None, "add 1+3")])
    assert "503" in answer.error
    assert chat.drain()["failures"] == 1
    served.fails, served.usage = 0, False
    priced = Chat(Endpoint(**endpoint(served, price={"input": 1, "output": 1})))
    with pytest.raises(RemoteError, match="does not say how many tokens"):
        priced.ask([ChatQuestion(None, "add 1+2")])


def test_a_run_is_rewarded_by_the_digits_and_stops_where_the_budget_ends(served: Served, tmp_path: Path) -> None:
    rewards = {"kind": "chat", "endpoint": endpoint(served, price={"input": 1, "output": 1}, max_calls=12)}
    with pytest.raises(TrainingError, match=r"max_calls is 12.*Afterwards: the weights of step \d"):
        opd.run(recipe(rewards=rewards, train={"steps": 50}), out=tmp_path / "run")
    run = opd.Run(tmp_path / "run")
    assert run.summary["status"] == "failed"
    assert run.metrics[0]["rewards/calls"] > 0
    assert run.metrics[0]["rewards/cost_total"] > 0
    assert sum(line["rewards/calls"] for line in run.metrics) <= 12
    rewarded = run.rollouts.where(reward=lambda column: ~np.isnan(column))  # the others came when the budget was spent
    assert set(rewarded.column("reward").tolist()) <= {1.0, 1 / 9}
    asked = len(served.asked)
    with pytest.raises(TrainingError, match="max_calls is 12"):  # calls of the earlier process count
        opd.resume(run.directory)
    assert len(served.asked) <= asked + 1  # one to try whether it answers
    with pytest.raises(RecipeError, match="max_cost needs a `price`"):
        opd.run(recipe(rewards={"kind": "chat", "endpoint": endpoint(served, max_cost=1)}), out=tmp_path / "other")


def test_demonstrations_replace_answers_that_failed_and_say_who_wrote_them(served: Served, tmp_path: Path) -> None:
    run = opd.run(demonstrated(served), out=tmp_path / "run")
    failed = run.rollouts.where(source="student", reward=0.0)
    written = list(run.rollouts.where(source="teacher:sums"))
    assert len(written) == len(failed) > 0
    assert {rollout.id for rollout in written} == {f"{id}/demonstration" for id in failed.ids}
    for rollout in written:
        assert (rollout.author == Author.TEACHER).all()
        assert np.isnan(rollout.logprob).all()
    assert set(run.rollouts.where(source="teacher:sums").column("reward").tolist()) == {1.0}  # the endpoint can add
    replaced = len(written) / len(run.rollouts.where(source="student"))
    assert np.mean([line["demonstrations/share"] for line in run.metrics]) == pytest.approx(replaced)
    assert sum(line["demonstrations/calls"] for line in run.metrics) == len(served.asked) == len(written)
    call = run.rollouts.environment(failed.ids[0])[0]
    assert call.call["messages"][0]["content"] in served.asked
    assert TOKEN not in json.dumps(call.call)


@pytest.mark.slow
def test_a_resumed_run_does_not_ask_again(served: Served, tmp_path: Path) -> None:
    by = {"kind": "chat", "endpoint": endpoint(served)}
    whole = opd.run(demonstrated(served, by=by, below=0.5), out=tmp_path / "whole")
    asked = len(served.asked)
    served.asked.clear()

    def stop(live: Any, rollouts: Any) -> None:
        live.stop()  # everything is sampled, asked and written; nothing is trained on

    run = opd.run(demonstrated(served, by=by, below=0.5), out=tmp_path / "parts", on_rollouts=stop)
    run = opd.resume(run.directory)
    assert len(served.asked) == asked
    assert [line["loss"] for line in run.metrics] == [line["loss"] for line in whole.metrics]


@pytest.mark.parametrize("says", ["", "42<|im_end|>", "no idea"], ids=["nothing", "special", "wrong"])
def test_what_cannot_be_used_replaces_nothing(says: str, served: Served, tmp_path: Path) -> None:
    from opd.models import load_tokenizer

    special = load_tokenizer("tiny/generalist", None).all_special_tokens[0]
    served.says = says.replace("<|im_end|>", special)
    run = opd.run(demonstrated(served) | {"train": {"steps": 1}}, out=tmp_path / "run")
    written = run.rollouts.where(source="teacher:sums")
    if says == "no idea":  # a text, though wrong: it is rewarded as such
        assert set(written.column("reward").tolist()) == {0.0}
    else:
        assert not len(written)
        assert run.metrics[0]["demonstrations/share"] == 0


def test_recipes_that_make_no_sense_are_rejected(served: Served, tmp_path: Path) -> None:
    given = demonstrated(served)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"objective": recipe()["objective"]}, "no term of the objective trains on teacher tokens"),
        (
            {"objective": {"form": "policy_gradient", "on": ["student", "teacher"]}},
            "trains only on tokens that the student",
        ),
        ({"rollout": {**given["rollout"], "contrast": 2}}, "with rollout.contrast"),
        (
            {"rewards": {"kind": "chat", "endpoint": endpoint(served), "template": "{prompt}"}},
            r"put \{response\} into it",
        ),
        ({"rewards": {"kind": "chat", "endpoint": {**endpoint(served), "address": "ftp://x"}}}, "http:// or https://"),
    ]
    for changes, message in wrong:
        with pytest.raises(UserError, match=message):
            opd.run(given | changes, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not served.asked
