"""Old module names that plugins may still import.

An old run resumes with its copy of a plugin, which imports the old names. They work, with one warning.
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
    "opd.data.render": "opd.data.prompts",
    "opd.data.row_source": "opd.data.sources",
    "opd.data.selection": "opd.data.stream",
    "opd.data.shares": "opd.data.stream",
    "opd.data.source": "opd.data.sources",
    "opd.engines.draws": "opd.engines.requests",
    "opd.divergences.cross_vocabulary": "opd.divergences.compute",
    "opd.divergences.formulas": "opd.divergences.kinds",
    "opd.divergences.supports": "opd.divergences.torch_backend",
    "opd.errors": "opd.common.errors",
    "opd.families": "opd.registry",
    "opd.files": "opd.common.files",
    "opd.models.extract": "opd.models.load",
    "opd.models.recompute": "opd.models.language_model",
    "opd.models.routes": "opd.models.attention",
    "opd.models.shared_base": "opd.models.language_model",
    "opd.models.untrained": "opd.models.load",
    "opd.loop.demonstrate": "opd.loop.interventions",
    "opd.loop.experience": "opd.loop.interventions",
    "opd.loop.probes": "opd.loop.metrics",
    "opd.loop.rescue": "opd.loop.interventions",
    "opd.loop.rewarding": "opd.loop.producer",
    "opd.loop.samplers": "opd.loop.parts",
    "opd.monitors.history": "opd.monitors.monitor",
    "opd.monitors.kinds": "opd.monitors.monitor",
    "opd.objective.advantage_formulas": "opd.objective.advantages",
    "opd.objective.crossed": "opd.objective.term",
    "opd.objective.direct": "opd.objective.term",
    "opd.objective.first_pass": "opd.objective.objective",
    "opd.objective.forms": "opd.objective.term",
    "opd.objective.magnitude": "opd.objective.advantages",
    "opd.objective.pairwise": "opd.objective.term",
    "opd.objective.reward_gates": "opd.objective.gates",
    "opd.objective.sampled": "opd.objective.term",
    "opd.objective.schedule": "opd.objective.term",
    "opd.objective.surrogates": "opd.objective.policy_gradient",
    "opd.objective.value": "opd.objective.policy_gradient",
    "opd.recipe.schema": "opd.recipe.read",
    "opd.remote": "opd.common.http",
    "opd.rewards.answers": "opd.rewards.texts",
    "opd.rewards.callables": "opd.rewards.custom",
    "opd.rewards.maths": "opd.rewards.texts",
    "opd.rewards.pool": "opd.rewards.workers",
    "opd.rewards.settings": "opd.rewards.reward",
    "opd.rewards.verifier": "opd.rewards.reward",
    "opd.rewards.worker": "opd.rewards.workers",
    "opd.rollouts.sampler": "opd.rollouts.rollouter",
    "opd.runner.live": "opd.runner.directory",
    "opd.sampling": "opd.engines",
    "opd.sampling.choose": "opd.engines.builtin",
    "opd.sampling.collect": "opd.rollouts.rollouter",
    "opd.sampling.draws": "opd.engines.requests",
    "opd.sampling.engine": "opd.engines.builtin",
    "opd.sampling.plain": "opd.engines.builtin",
    "opd.sampling.requests": "opd.engines.requests",
    "opd.sampling.rollouts": "opd.rollouts.settings",
    "opd.sampling.sampler": "opd.rollouts.rollouter",
    "opd.sampling.samplers": "opd.engines.kinds",
    "opd.sampling.sampling": "opd.engines.requests",
    "opd.sampling.vllm": "opd.engines.vllm",
    "opd.sampling.writers": "opd.rollouts.writers",
    "opd.settings": "opd.registry",
    "opd.shorthand": "opd.common.short_forms",
    "opd.store.index": "opd.store.rollouts",
    "opd.store.reading": "opd.store.rollouts",
    "opd.store.records": "opd.store.log",
    "opd.store.state": "opd.store.rollouts",
    "opd.teachers.adapter": "opd.teachers.kinds",
    "opd.teachers.crossing": "opd.teachers.views",
    "opd.teachers.following": "opd.teachers.kinds",
    "opd.teachers.group_views": "opd.teachers.views",
    "opd.teachers.local": "opd.teachers.scoring",
    "opd.teachers.of_student": "opd.teachers.kinds",
    "opd.teachers.router": "opd.teachers.kinds",
    "opd.teachers.teacher": "opd.teachers.pool",
    "opd.teachers.vllm": "opd.teachers.other_servers",
    "opd.trainer": "opd.loop",
    "opd.trainer.optimiser": "opd.loop.learner",
    "opd.trainer.trainer": "opd.loop.learner",
    "opd.types": "opd.records",
}


class MovedModules(MetaPathFinder, Loader):
    """Imports a module under its old name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if current_name(fullname) is None else ModuleSpec(fullname, self, is_package=fullname in PACKAGES)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        name = current_name(spec.name)
        assert name is not None
        if not any(other.startswith(f"{spec.name}.") for other in MOVED):  # else the warning names the module inside
            warnings.warn(f"{spec.name} is now {name}: import it by that name.", FutureWarning, stacklevel=2)
        module = importlib.import_module(name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the module has already run, under its new name."""
        module.__spec__ = self._spec


def current_name(name: str) -> str | None:
    """The current name of a module with an old name; None: the name is not an old one.

    >>> current_name("opd.sampling.writers"), current_name("opd.sampling.alongside"), current_name("opd.records")
    ('opd.rollouts.writers', 'opd.engines.alongside', None)
    """
    package, _, last = name.rpartition(".")
    return MOVED.get(name) or (f"{MOVED[package]}.{last}" if package in PACKAGES else None)


PACKAGES = (
    "opd.config",
    "opd.sampling",
    "opd.trainer",
)  # modules of these that are not in the table have kept their names


def find_moved_modules() -> None:
    """Install the finder before all others, which would load a module of a renamed package a second time."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
