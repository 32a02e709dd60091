"""pass@k, standard errors, and verdicts that could not be reached."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.evaluation.passk import mean_and_stderr, pass_at_k


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
