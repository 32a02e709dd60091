"""Python callables as rewards: `opd.run(recipe, rewards=f)`.

A callable that was made in a notebook can be imported nowhere else, so its workers are forks of the process it was made in. A
recipe holds its name alone, and whoever goes on with the run has to give it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType

from pydantic import Field, PrivateAttr

from opd.errors import RecipeError
from opd.rewards.reward import Reward
from opd.rewards.settings import DEFAULT, Rewards
from opd.types import RewardResult, Sample

RewardFunction = Callable[[Sample], RewardResult | float | None]
GivenRewards = RewardFunction | Mapping[str, RewardFunction]  # for every domain, or by domain
known: dict[str, RewardFunction] = {}  # in a forked worker: what it was forked for


class PythonCallable(Reward):
    """A callable of one sample, by name."""

    name = "python callable"
    function: str = Field(description="name of the callable that `opd.run(…, rewards=f)` was given")
    _given: RewardFunction | None = PrivateAttr(None)

    def __eq__(self, other: object) -> bool:
        """By name: the callable itself is no part of a recipe."""
        return isinstance(other, PythonCallable) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash(self.label)

    @classmethod
    def of(cls, name: str, function: RewardFunction) -> PythonCallable:
        made = cls(function=name)
        made._given = function
        return made

    @property
    def label(self) -> str:
        return f"{self.name} {self.function}"

    @property
    def in_fork(self) -> bool:
        return True

    @property
    def given(self) -> RewardFunction:
        if self._given is None:
            raise RecipeError(
                f"rewards: the {self.label} cannot be read from a file. Give it from Python: opd.run(recipe, rewards={self.function})."
            )
        return self._given

    def require(self, sandbox: str) -> None:
        assert self.given is not None

    def reward(self, sample: Sample) -> RewardResult | float | None:
        return known[self.function](sample)


def callables(rewards: Rewards) -> Iterator[PythonCallable]:
    for kind in (kind for kinds in rewards.domains.values() for kind in kinds):
        if isinstance(kind, PythonCallable):
            yield kind


def with_callables(rewards: Rewards, given: GivenRewards) -> Rewards:
    """One callable rewards every domain; by domain they stand before what the recipe has for it."""
    by_domain = given if isinstance(given, Mapping) else {DEFAULT: given}
    if not by_domain or not all(isinstance(domain, str) and callable(one) for domain, one in by_domain.items()):
        raise RecipeError(f"rewards: expected a function of one sample, or {{domain: function}}, got {given!r}.")
    names = {domain: _name(function) for domain, function in by_domain.items()}
    made = {}
    for domain, function in by_domain.items():
        namesakes = [other for key, other in by_domain.items() if names[key] == names[domain]]
        shared = any(other is not function for other in namesakes)
        made[domain] = [PythonCallable.of(f"{names[domain]} for {domain}" if shared else names[domain], function)]
    kept = rewards.domains if isinstance(given, Mapping) else {}
    return rewards.model_copy(update={"domains": {**kept, **made}})


def _name(function: RewardFunction) -> str:
    named = isinstance(function, (FunctionType, MethodType, BuiltinFunctionType))
    return function.__name__ if named else type(function).__name__
