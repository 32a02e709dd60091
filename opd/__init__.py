"""On-policy distillation of language models: the student samples, the teachers score every token.

The public names are here, in one flat namespace. Each is loaded when it is first used, so `import opd` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from opd.common.cpu_env import large_pages, round_alike
from opd.common.moved_modules import find_moved_modules
from opd.runner.run import Run, resume, run

if TYPE_CHECKING:
    from opd.common.errors import (
        DataError,
        DiskError,
        ModelError,
        OpdError,
        Preempted,
        RecipeError,
        RunDirectoryError,
        RunLocked,
        Stopped,
        StoreError,
        TokenizerMismatch,
        TrainingError,
        UserError,
    )
    from opd.data.sources import prompts
    from opd.divergences import Mixture, Projection, divergence, token_logprobs
    from opd.loop.learner import Trainer
    from opd.models import load_model
    from opd.models.language_model import LanguageModel, Pack
    from opd.objective.objective import Objective
    from opd.recipe import Recipe, load_recipe
    from opd.records import Prompt, RewardResult, Rollout, Sample
    from opd.registry import register
    from opd.rewards import Reward
    from opd.rollouts.rollouter import Sampler
    from opd.teachers.pool import Teacher

round_alike()  # before the first matrix product; child processes inherit it
large_pages()  # and before torch allocates
find_moved_modules()
__version__ = "0.1.0"
PLACES = {
    "opd.recipe": ("Recipe", "load_recipe"),
    "opd.data.sources": ("prompts",),
    "opd.divergences": ("Mixture", "Projection", "divergence", "token_logprobs"),
    "opd.common.errors": (
        "DataError",
        "DiskError",
        "ModelError",
        "OpdError",
        "Preempted",
        "RecipeError",
        "RunDirectoryError",
        "RunLocked",
        "Stopped",
        "StoreError",
        "TokenizerMismatch",
        "TrainingError",
        "UserError",
    ),
    "opd.registry": ("register",),
    "opd.models": ("load_model",),
    "opd.models.language_model": ("LanguageModel", "Pack"),
    "opd.objective.objective": ("Objective",),
    "opd.rewards": ("Reward",),
    "opd.rollouts.rollouter": ("Sampler",),
    "opd.teachers.pool": ("Teacher",),
    "opd.loop.learner": ("Trainer",),
    "opd.records": ("Prompt", "RewardResult", "Rollout", "Sample"),
}
LAZY = {name: place for place, names in PLACES.items() for name in names}
__all__ = [
    "DataError",
    "DiskError",
    "LanguageModel",
    "Mixture",
    "ModelError",
    "Objective",
    "OpdError",
    "Pack",
    "Preempted",
    "Projection",
    "Prompt",
    "Recipe",
    "RecipeError",
    "Reward",
    "RewardResult",
    "Rollout",
    "Run",
    "RunDirectoryError",
    "RunLocked",
    "Sample",
    "Sampler",
    "Stopped",
    "StoreError",
    "Teacher",
    "TokenizerMismatch",
    "Trainer",
    "TrainingError",
    "UserError",
    "__version__",
    "divergence",
    "load_model",
    "load_recipe",
    "prompts",
    "register",
    "resume",
    "run",
    "token_logprobs",
]


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module 'opd' has no attribute {name!r}")
    return getattr(importlib.import_module(LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
