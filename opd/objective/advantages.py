"""Advantages: what one sampled token, or one whole answer, is worth. They add up; numpy, since none is differentiated.

Axis legend: T = tokens of one response, B = rollouts of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

Baseline = Literal["group", "leave_one_out", "batch", "none"]
STD_FLOOR = 1e-4  # added to a group's standard deviation, as GRPO's implementations do


def outcome_advantages(
    scores: Sequence[float | None], groups: Sequence[str], baseline: Baseline = "group", std: bool = False
) -> np.ndarray:
    """(B,) reward minus baseline; NaN where there is no reward, which then enters no baseline either.

    group           minus the mean of the group: GRPO, with `std` divided by its standard deviation
    leave_one_out   minus the mean of the others of the group: RLOO
    batch           minus the mean of the batch: the plain baseline for one sample per prompt
    none            the reward itself

    >>> outcome_advantages([1, 0, 0, 0], ["a"] * 4).tolist()
    [0.75, -0.25, -0.25, -0.25]
    >>> outcome_advantages([1.0, 0.0, None], ["a"] * 3, "leave_one_out").tolist()
    [1.0, -1.0, nan]
    """
    rewards = np.array([np.nan if score is None else score for score in scores], dtype=np.float64)
    known = ~np.isnan(rewards)
    found = np.full(rewards.size, np.nan)
    unit = np.zeros(rewards.size, dtype=int) if baseline == "batch" else np.unique(groups, return_inverse=True)[1]
    for number in np.unique(unit[known]):
        members = known & (unit == number)
        values = rewards[members]
        if baseline == "none":
            centred = values
        elif baseline == "leave_one_out":  # alone in its group, a sample has nothing to be compared with
            centred = (values - values.mean()) * (values.size / (values.size - 1)) if values.size > 1 else 0 * values
        else:
            centred = values - values.mean()
        if std:
            centred = centred / ((values.std(ddof=1) if values.size > 1 else 0.0) + STD_FLOOR)
        found[members] = centred
    return found


def extrapolated(teacher_T: np.ndarray, student_T: np.ndarray, reference_T: np.ndarray, factor: float) -> np.ndarray:
    """G-OPD: factor * (log teacher - log reference) - (log student - log reference).

    A factor of 1 is plain OPD, since the reference cancels; above 1 the target lies past the teacher (ExOPD).
    """
    return (teacher_T - student_T) + (factor - 1) * (teacher_T - reference_T)


def returns(
    values_T: np.ndarray, discount: float, *, length_normalised: bool = False, future_only: bool = False
) -> np.ndarray:
    """Discounted sums of this and all later tokens' values: R_t = sum over i >= t of discount^(i-t) * value_i.

    `future_only` starts them at t + 1, for when the token's own part is trained directly (MiniLLM's single-step
    decomposition). `length_normalised` divides by the number of tokens summed over, so that long answers are not
    worth more or less for their length (MiniLLM again).

    >>> returns(np.array([1.0, 2.0, 4.0]), 0.5).tolist()
    [3.0, 4.0, 4.0]
    >>> returns(np.array([1.0, 2.0, 4.0]), 1.0, length_normalised=True, future_only=True).tolist()
    [3.0, 4.0, 0.0]
    """
    found = np.zeros(values_T.size, dtype=np.float64)
    running = 0.0
    for index in range(values_T.size - 1, -1, -1):
        own = values_T[index] + discount * running
        found[index] = discount * running if future_only else own
        running = own
    if length_normalised:
        left = np.arange(values_T.size, 0, -1) - (1 if future_only else 0)
        found /= np.maximum(left, 1)
    return found


def whitened(values: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Mean 0 and variance 1 over all tokens that count; the others are left out of the statistics."""
    every = np.concatenate([value[mask] for value, mask in zip(values, masks, strict=True)])
    if every.size < 2:
        return [np.zeros_like(value) for value in values]
    mean, std = every.mean(), every.std()
    return [(value - mean) / (std + 1e-8) for value in values]


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """0 up to `buffer` tokens before the limit, then a straight line down to -1 at the limit (DAPO's soft punishment).

    >>> [overlong_penalty(length, 100, 20) for length in (50, 80, 90, 100)]
    [0.0, 0.0, -0.5, -1.0]
    """
    return min(0.0, max(-1.0, (limit - buffer - length) / buffer)) + 0.0
