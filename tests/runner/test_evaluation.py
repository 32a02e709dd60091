"""pass@k, standard errors, and rewards that could not be given."""

from __future__ import annotations

import io
import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from opd.common.errors import UserError
from opd.evaluation import Measures, mean_and_stderr, measure, pass_at_k
from opd.records import RewardResult
from opd.runner.evaluate import evaluate_model, measures_table
from opd.runner.results import StageResult, results_table, watched
from tests.support.rollouts import rollout


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(right: list[bool], k: int) -> None:
    value = pass_at_k(np.array(right, dtype=float), k)
    if k > len(right):
        assert math.isnan(value)
    else:
        subsets = list(combinations(right, k))
        assert value == pytest.approx(sum(any(subset) for subset in subsets) / len(subsets))


def test_unrewarded_samples_are_left_out() -> None:
    assert pass_at_k(np.array([np.nan, 1.0, 0.0]), 2) == 1.0
    assert math.isnan(pass_at_k(np.array([np.nan, np.nan]), 1))
    assert mean_and_stderr([math.nan]) == (None, None)
    mean, stderr = mean_and_stderr([1.0, 0.0, 1.0, 0.0, math.nan])
    assert mean == 0.5
    assert stderr == pytest.approx(np.std([1, 0, 1, 0], ddof=1) / 2)


BOMB = RewardResult(None, error="took too long", by_answer=True)
BROKEN = RewardResult(None, error="its worker could not start")


def score(*results: RewardResult) -> Measures:
    return measure({"greedy": [[result] for result in results]}, [rollout("1", [5], [6, 7, 1])] * len(results), 0)


def test_an_answer_that_brings_its_scorer_down_is_wrong() -> None:
    found = score(*[RewardResult(1.0)] * 2, *[BOMB] * 8)
    assert (found.value, found.n, found.failed, found.unrewarded, found.reward) == (0.2, 10, 8, 0, 0.2)
    sampled = measure({"sampled": [[RewardResult(1.0), BOMB], [BOMB, BOMB]]}, [rollout("1", [5], [6, 7, 1])] * 4, 2)
    assert (sampled.value, sampled.pass_at_k, sampled.failed) == (0.25, 0.5, 3)


def test_what_the_machine_did_is_left_out_and_counted() -> None:
    found = score(RewardResult(1.0), RewardResult(0.0), BROKEN, BROKEN)
    assert (found.value, found.n, found.failed, found.unrewarded) == (0.5, 2, 0, 2)


def test_only_full_rewards_count_and_the_mean_reward_is_separate() -> None:
    found = score(RewardResult(1.0), RewardResult(0.99), RewardResult(0.05), RewardResult(0.0))
    assert found.value == 0.25
    assert found.reward == pytest.approx(0.51)
    weighted = [RewardResult(0.25, full=0.25), RewardResult(0.1 + 0.2 + 0.7), RewardResult(1.2, full=1.0)]
    assert score(*weighted).value == 1.0
    assert found.to_json()["reward"] == found.reward


def test_partial_credit_is_shown_next_to_pass_at_1() -> None:
    def shown(table: Table) -> str:
        console = Console(width=200, record=True, file=io.StringIO())
        console.print(table)
        return console.export_text()

    whole, half = (
        Measures(n=4, greedy=0.5, greedy_stderr=0.1, reward=0.5),
        Measures(n=4, greedy=0.0, greedy_stderr=0.0, reward=0.25),
    )
    assert "mean reward" not in shown(measures_table("m", {"d": whole}))
    assert "mean reward" in shown(measures_table("m", {"d": half}))
    assert "0.25" in shown(measures_table("m", {"d": half}))
    assert "mean reward" not in shown(results_table(StageResult("main", before={"d": whole}, after={"d": whole})))
    found = shown(results_table(StageResult("main", before={"[/x]": half}, after={"[/x]": whole})))
    assert "mean reward of [/x], partial credit included: 0.25 before, 0.5 after" in " ".join(found.split())


def test_without_an_answer_rewarded_there_is_no_value() -> None:
    nothing = score(BROKEN, BROKEN)
    assert (nothing.value, nothing.stderr, nothing.reward, nothing.n) == (None, None, None, 0)
    assert watched({"d": nothing}, "pass@1") is None
    result = StageResult("main", before={"d": nothing}, after={"d": nothing})
    assert not result.note_evaluation(1, {"d": nothing}, watched({"d": nothing}, "pass@1"))
    assert "nan" not in json.dumps(result.to_json()).lower()
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(results_table(result))
    assert "–" in console.export_text()
    assert (
        Measures.of_json({"n": 3, "greedy": 0.5, "k": 0, "unjudged": 1, "length": 2.0, "truncated": 0.0}).value == 0.5
    )  # as older runs wrote it


def test_eval_says_what_it_measured(tmp_path: Path) -> None:
    """A file is measured whole, a task on its held-out prompts; splits, counts and rewards can be chosen."""
    path = tmp_path / "sums.jsonl"
    rows = [
        {"prompt": [{"role": "user", "content": f"add {number}+11"}], "answer": str(number + 11)}
        for number in range(10, 29)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "add 1+1"}]))
    ask: dict[str, Any] = {"k": 0, "max_new_tokens": 4, "device": "cpu", "seed": 0}

    def measure(source: str, **changes: Any) -> Any:
        return evaluate_model("tiny/arithmetic", [source], **ask | changes)

    whole = measure(str(path))
    assert (whole.domains["sums"].n, whole.splits) == (19, {"sums": "all"})
    assert whole.what == f"19 prompts of {path} (split all)"
    assert whole.notes == (f"evaluation: 1 prompts of {path} cannot be rewarded",)
    assert whole.to_json()["sums"]["split"] == "all"
    assert measure(str(path), split="heldout").domains["sums"].n == 2
    assert measure(str(path), split="train").domains["sums"].n == 17
    assert measure(str(path), count=3).domains["sums"].n == 3
    assert measure(str(path), rewards="{kind: format, pattern: '[0-9]+'}").domains["sums"].n == 20
    (tmp_path / "rewards.yaml").write_text("sums: [numeric]\n")
    assert measure(str(path), rewards=str(tmp_path / "rewards.yaml"), count=2).domains["sums"].n == 2
    task = measure("task:addition", count=5)
    assert (task.domains["arithmetic"].n, task.splits) == (5, {"arithmetic": "heldout"})
    found = {limit: measure("task:addition", count=40, max_new_tokens=limit).domains["arithmetic"] for limit in (3, 4)}
    assert found[4].length > 3
    assert found[4].truncated == 0  # three digits and the stop: the last token that there is room for
    assert 0 < found[3].truncated == pytest.approx(found[4].length - 3)  # two digits and the stop, or three digits
    for changes, words in (
        ({"source": "task:addition", "split": "all"}, "they are endless"),
        ({"source": str(path), "rewards": "numerical"}, "--rewards"),
        ({"source": str(path), "rewards": "{kind: format}"}, "needs a pattern"),
        ({"source": str(path), "max_new_tokens": 10_000}, "lower --max-new-tokens"),
        ({"source": str(path), "rewards": str(tmp_path / "no.yaml")}, "cannot be read"),
        ({"source": str(path), "temperature": 0.5}, "--temperature .* --k is 0"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            measure(**changes)
    path.write_text('{"prompt": "a"}\n' * 20)
    with pytest.raises(UserError, match="no prompt has an answer to check"):
        measure(str(path))
