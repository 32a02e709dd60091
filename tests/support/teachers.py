"""Settings of teachers, made up or behind `opd serve`, and a recipe that has one."""

from __future__ import annotations

from typing import Any

from opd.teachers.kinds import FrozenTeacher
from tests.support.servers import TOKEN_ENV, ServeProcess


def spec(**fields: object) -> FrozenTeacher:
    return FrozenTeacher(model="x", **fields)  # type: ignore[arg-type]


def served(server: ServeProcess, **more: Any) -> dict[str, Any]:
    return {"kind": "served", "address": server.address, "model": "arithmetic", "token_env": TOKEN_ENV, **more}


def recipe(teacher: Any, steps: int = 3) -> dict[str, Any]:
    return {
        "name": "served",
        "student": "tiny/generalist",
        "teachers": {"arithmetic": teacher},
        "prompts": [{"source": "task:addition", "domain": "arithmetic"}],
        "rollout": {"prompts": 8, "samples": 1, "max_new_tokens": 8},
        "objective": {"form": "direct", "divergence": "reverse_kl"},
        "train": {"steps": steps, "lr": 1e-4},
        "eval": {"prompts": 0},
        "device": "cpu",
    }
