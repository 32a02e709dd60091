"""pass@k, standard errors, and verdicts that could not be reached."""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.errors import UserError
from opd.evaluation.passk import mean_and_stderr, pass_at_k
from opd.training.evaluate import evaluate_model


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(right: list[bool], k: int) -> None:
    value = pass_at_k(np.array(right, dtype=float), k)
    if k > len(right):
        assert math.isnan(value)
    else:
        subsets = list(combinations(right, k))
        assert value == pytest.approx(sum(any(subset) for subset in subsets) / len(subsets))


def test_unjudged_samples_are_left_out() -> None:
    assert pass_at_k(np.array([np.nan, 1.0, 0.0]), 2) == 1.0
    assert math.isnan(pass_at_k(np.array([np.nan, np.nan]), 1))
    assert mean_and_stderr([math.nan]) == (None, None)
    mean, stderr = mean_and_stderr([1.0, 0.0, 1.0, 0.0, math.nan])
    assert mean == 0.5
    assert stderr == pytest.approx(np.std([1, 0, 1, 0], ddof=1) / 2)


def test_eval_says_what_it_measured(tmp_path: Path) -> None:
    """A file is measured whole, a task on its held-out prompts; splits, counts and rewards can be chosen."""
    path = tmp_path / "sums.jsonl"
    rows = [
        {"prompt": [{"role": "user", "content": f"add {number}+11"}], "answer": str(number + 11)}
        for number in range(10, 29)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "add 1+1"}]))
    ask: dict[str, Any] = {"k": 0, "temperature": 1.0, "max_new_tokens": 4, "device": "cpu", "seed": 0}

    def measure(source: str, **changes: Any) -> Any:
        return evaluate_model("tiny/arithmetic", [source], **ask | changes)

    whole = measure(str(path))
    assert (whole.scores["sums"].n, whole.splits) == (19, {"sums": "all"})
    assert whole.what == f"19 of all prompts of {path}"
    assert whole.notes == (f"evaluation: 1 prompts of {path} have nothing to be judged by",)
    assert whole.to_json()["sums"]["split"] == "all"
    assert measure(str(path), split="heldout").scores["sums"].n == 1
    assert measure(str(path), split="train").scores["sums"].n == 18
    assert measure(str(path), count=3).scores["sums"].n == 3
    assert measure(str(path), rewards="{kind: format, pattern: '[0-9]+'}").scores["sums"].n == 20
    (tmp_path / "rewards.yaml").write_text("sums: [numeric]\n")
    assert measure(str(path), rewards=str(tmp_path / "rewards.yaml"), count=2).scores["sums"].n == 2
    task = measure("task:addition", count=5)
    assert (task.scores["arithmetic"].n, task.splits) == (5, {"arithmetic": "heldout"})
    for changes, words in (
        ({"source": "task:addition", "split": "all"}, "no end"),
        ({"source": str(path), "rewards": "numerical"}, "--rewards"),
        ({"source": str(path), "rewards": "{kind: format}"}, "needs a pattern"),
        ({"source": str(path), "max_new_tokens": 10_000}, "lower --max-new-tokens"),
        ({"source": str(path), "rewards": str(tmp_path / "no.yaml")}, "cannot be read"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            measure(**changes)
    path.write_text('{"prompt": "a"}\n' * 20)
    with pytest.raises(UserError, match="no prompt has an answer to check"):
        measure(str(path))
