"""When a stage ends before its last step, and what is said of it."""

from __future__ import annotations

from opd.config import Stage
from opd.runner.results import StageResult


def good_enough(spec: Stage, result: StageResult) -> bool:
    """By its evaluations."""
    stop = spec.eval.early_stop
    return stop is not None and stop.should_stop(result.evaluations(spec.eval.metric))


def spent(spec: Stage, result: StageResult) -> bool:
    """It has had its tokens."""
    return spec.train.tokens is not None and result.tokens >= spec.train.tokens


def early_stop(spec: Stage, result: StageResult, enough: bool) -> str:
    """`enough`: its evaluations said so; otherwise its tokens are spent."""
    why = (
        f"the best {spec.eval.metric} was at step {result.best_step}"
        if enough
        else f"{result.tokens:,} response tokens, of train.tokens {spec.train.tokens:,}"
    )
    return f"{spec.name}: early stop after step {result.steps}; {why}"
