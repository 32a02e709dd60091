"""The arithmetic of advantages: plain functions of arrays.

Axis legend: T = tokens of one response, B = rollouts of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

Baseline = Literal["group", "leave_one_out", "batch", "none"]
STD_FLOOR = 1e-4  # added to a group's standard deviation, as GRPO's implementations do


def outcome_advantages(
    rewards: Sequence[float | None], groups: Sequence[str], baseline: Baseline = "group", std: bool = False
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
    reward_B = np.array([np.nan if reward is None else reward for reward in rewards], dtype=np.float64)
    known = ~np.isnan(reward_B)
    advantages = np.full(reward_B.size, np.nan)
    unit = np.zeros(reward_B.size, dtype=int) if baseline == "batch" else np.unique(groups, return_inverse=True)[1]
    for number in np.unique(unit[known]):
        members = known & (unit == number)
        values = reward_B[members]
        if baseline == "none":
            centred = values
        elif baseline == "leave_one_out":  # alone in its group, a sample has nothing to be compared with
            centred = (values - values.mean()) * (values.size / (values.size - 1)) if values.size > 1 else 0 * values
        else:
            centred = values - values.mean()
        if std:
            centred = centred / ((values.std(ddof=1) if values.size > 1 else 0.0) + STD_FLOOR)
        advantages[members] = centred
    return advantages


def extrapolated(teacher_T: np.ndarray, student_T: np.ndarray, reference_T: np.ndarray, factor: float) -> np.ndarray:
    """G-OPD: factor * (log teacher - log reference) - (log student - log reference).

    A factor of 1 is plain OPD, since the reference cancels; above 1 the target lies past the teacher (ExOPD).
    """
    return (teacher_T - student_T) + (factor - 1) * (teacher_T - reference_T)


def returns(
    values_T: np.ndarray, discount: float, *, length_normalised: bool = False, future_only: bool = False
) -> np.ndarray:
    """Discounted sums of this and all later tokens' values: R_t = sum over i >= t of discount^(i-t) * value_i.

    `future_only` starts them at t + 1, for when the token's here part is trained directly (MiniLLM's single-step
    decomposition). `length_normalised` divides by the number of tokens summed over, so that long answers are not
    worth more or less for their length (MiniLLM again).

    >>> returns(np.array([1.0, 2.0, 4.0]), 0.5).tolist()
    [3.0, 4.0, 4.0]
    >>> returns(np.array([1.0, 2.0, 4.0]), 1.0, length_normalised=True, future_only=True).tolist()
    [3.0, 4.0, 0.0]
    """
    sums = np.zeros(values_T.size, dtype=np.float64)
    running = 0.0
    for index in range(values_T.size - 1, -1, -1):
        here = values_T[index] + discount * running
        sums[index] = discount * running if future_only else here
        running = here
    if length_normalised:
        left = np.arange(values_T.size, 0, -1) - (1 if future_only else 0)
        sums /= np.maximum(left, 1)
    return sums


def moments(values: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> tuple[float, float] | None:
    """Mean and standard deviation over all tokens that count; None if there are too few."""
    every = np.concatenate([value[mask] for value, mask in zip(values, masks, strict=True)])
    return (every.mean(), every.std()) if every.size >= 2 else None


def whitened_by(values: Sequence[np.ndarray], scale: tuple[float, float] | None) -> list[np.ndarray]:
    """Mean 0 and variance 1 over the tokens that `moments` counted."""
    if scale is None:
        return [np.zeros_like(value) for value in values]
    mean, std = scale
    return [(value - mean) / (std + 1e-8) for value in values]


def weighed_by_teacher(outcome_T: np.ndarray, log_ratio_T: np.ndarray, share: float, band: float) -> np.ndarray:
    """RLSD: A * ((1 - share) + share * clip(exp(sign(A) * log_ratio), 1 - band, 1 + band)); log_ratio = log T - log S.

    Clipped before the exponential, so that no log-ratio overflows it.

    >>> weighed_by_teacher(np.array([2.0, -2.0, 0.0]), np.full(3, 9.0), 0.5, 0.2).round(6).tolist()
    [2.2, -1.8, 0.0]
    """
    signed = np.sign(outcome_T) * log_ratio_T
    weight = np.exp(signed.clip(np.log1p(-band), np.log1p(band)))
    return outcome_T * ((1 - share) + share * weight)


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """0 up to `buffer` tokens before the limit, then a straight line down to -1 at the limit (DAPO's soft punishment).

    >>> [overlong_penalty(length, 100, 20) for length in (50, 80, 90, 100)]
    [0.0, 0.0, -0.5, -1.0]
    """
    return min(0.0, max(-1.0, (limit - buffer - length) / buffer)) + 0.0
