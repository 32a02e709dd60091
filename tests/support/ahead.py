"""A recipe whose rollouts are sampled ahead of training."""

from __future__ import annotations

from typing import Any

from tests.support.crash import RECIPE

AHEAD: dict[str, Any] = RECIPE | {
    "rollout": {"prompts": 6, "max_new_tokens": 8, "staleness": 2},
    "train": {"steps": 4, "lr": 1e-3},
    "eval": {"prompts": 0},
    "checkpoint": {"every": 1},
    "log": {"start_table": False},
}


def changed(**keys: Any) -> dict[str, Any]:
    return {key: {**AHEAD[key], **value} if isinstance(value, dict) else value for key, value in keys.items()}
