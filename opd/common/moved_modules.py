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
    """Finds a module of an old name where it is now."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if today(fullname) is None else ModuleSpec(fullname, self, is_package=fullname in PACKAGES)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        name = today(spec.name)
        assert name is not None
        if not any(other.startswith(f"{spec.name}.") for other in MOVED):  # else the warning names the module inside
            warnings.warn(f"{spec.name} is now {name}: import it by that name.", FutureWarning, stacklevel=2)
        module = importlib.import_module(name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has run already, and keeps its own name."""
        module.__spec__ = self._spec


def today(name: str) -> str | None:
    """The name that a module of an old name has now; None: the name is not an old one.

    >>> today("opd.sampling.writers"), today("opd.sampling.slots"), today("opd.records")
    ('opd.rollouts.writers', 'opd.engines.slots', None)
    """
    package, _, last = name.rpartition(".")
    return MOVED.get(name) or (f"{MOVED[package]}.{last}" if package in PACKAGES else None)


PACKAGES = (
    "opd.config",
    "opd.sampling",
    "opd.trainer",
)  # modules of these that are not in the table have kept their names


def find_moved_modules() -> None:
    """The finder comes first: a package of an old name is today's, in which others would find a file of the same name again."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
