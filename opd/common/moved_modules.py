"""Old names of modules that plugins may still import.

A kept run resumes with the copy of its plugin, which imports the old names. They work, with one warning.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "opd.chat": "opd.common.chat_client",
    "opd.config": "opd.recipe",
    "opd.data.generators": "opd.data.tasks",
    "opd.data.questions": "opd.data.prompts",
    "opd.data.row_source": "opd.data.sources",
    "opd.data.selection": "opd.data.shares",
    "opd.data.source": "opd.data.sources",
    "opd.errors": "opd.common.errors",
    "opd.families": "opd.registry",
    "opd.files": "opd.common.files",
    "opd.monitors.history": "opd.monitors.monitor",
    "opd.objective.advantage_formulas": "opd.objective.advantages",
    "opd.objective.crossed": "opd.objective.forms",
    "opd.objective.direct": "opd.objective.forms",
    "opd.objective.first_pass": "opd.objective.objective",
    "opd.objective.magnitude": "opd.objective.advantages",
    "opd.objective.reward_gates": "opd.objective.gates",
    "opd.objective.sampled": "opd.objective.forms",
    "opd.objective.schedule": "opd.objective.term",
    "opd.objective.surrogates": "opd.objective.policy_gradient",
    "opd.remote": "opd.common.http",
    "opd.rewards.callables": "opd.rewards.custom",
    "opd.rewards.maths": "opd.rewards.texts",
    "opd.rewards.settings": "opd.rewards.reward",
    "opd.rewards.verifier": "opd.rewards.texts",
    "opd.sampling": "opd.engines",
    "opd.sampling.choose": "opd.engines.builtin",
    "opd.sampling.collect": "opd.rollouts.rollouter",
    "opd.sampling.draws": "opd.engines.draws",
    "opd.sampling.engine": "opd.engines.builtin",
    "opd.sampling.plain": "opd.engines.builtin",
    "opd.sampling.requests": "opd.engines.requests",
    "opd.sampling.rollouts": "opd.rollouts.settings",
    "opd.sampling.sampler": "opd.rollouts.sampler",
    "opd.sampling.samplers": "opd.engines.kinds",
    "opd.sampling.sampling": "opd.engines.requests",
    "opd.sampling.vllm": "opd.engines.vllm",
    "opd.sampling.writers": "opd.rollouts.writers",
    "opd.settings": "opd.registry",
    "opd.shorthand": "opd.common.short_forms",
    "opd.teachers.adapter": "opd.teachers.kinds",
    "opd.teachers.crossing": "opd.teachers.views",
    "opd.teachers.following": "opd.teachers.of_student",
    "opd.teachers.group_views": "opd.teachers.views",
    "opd.teachers.local": "opd.teachers.scoring",
    "opd.teachers.vllm": "opd.teachers.other_servers",
    "opd.trainer": "opd.loop",
    "opd.trainer.optimiser": "opd.loop.learner",
    "opd.trainer.trainer": "opd.loop.learner",
    "opd.types": "opd.records",
}


class MovedModules(MetaPathFinder, Loader):
    """Finds a module by its old name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=fullname in PACKAGES) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name not in PACKAGES:  # the imported submodule warns
            warnings.warn(
                f"{spec.name} is now {MOVED[spec.name]}: import it by that name.", FutureWarning, stacklevel=2
            )
        module = importlib.import_module(MOVED[spec.name])
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has run already, and keeps its own name."""
        module.__spec__ = self._spec


PACKAGES = {name.rpartition(".")[0] for name in MOVED} & set(MOVED)


def find_moved_modules() -> None:
    """Add the finder at the end, so imports by current names never ask it."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
