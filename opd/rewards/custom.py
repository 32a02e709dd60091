"""Your own function as a reward, in a file next to the recipe or in a module on the Python path."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from pydantic import Field, PrivateAttr, field_validator, model_validator

from opd.common.errors import RecipeError
from opd.plugins import run_source
from opd.records import RewardResult, Sample
from opd.rewards.reward import DEFAULT, Reward, RewardKind, Rewards, function_missing, importable


class Custom(Reward):
    """Calls your function, which returns a number, a `RewardResult`, or None."""

    name = "custom"
    function: str = Field(description="module:function or file.py:function, called with one sample")
    fresh: bool = Field(True, description="a fresh process per answer; false: one that keeps a model or a connection")
    _code: bytes | None = PrivateAttr(None)

    def __eq__(self, other: object) -> bool:
        """Compares settings only, not whether the file was already read."""
        return isinstance(other, Custom) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash(self.function)

    @model_validator(mode="before")
    @classmethod
    def _has_function(cls, settings: Any) -> Any:
        if isinstance(settings, Mapping) and settings.get("function") is None:
            raise ValueError("a custom reward needs a function: module:function")
        return settings

    @field_validator("function")
    @classmethod
    def _function(cls, value: str) -> str:
        if not re.fullmatch(r"([\w.]+|[^\x00-\x1f]+\.py):\w+", value):
            if value.endswith(".py"):
                raise ValueError(f"expected file.py:function. {function_missing(value)}")
            raise ValueError("expected module:function, for example my_rewards:brevity, or file.py:function")
        return value

    @property
    def label(self) -> str:
        return self.function

    @property
    def forks(self) -> bool:
        return self.fresh

    def require(self, sandbox: str) -> None:
        module = self.function.rpartition(":")[0]
        if module.endswith(".py") and not Path(module).is_file():
            raise RecipeError(f"rewards: function {self.function!r}: there is no file {module}.")
        if not module.endswith(".py") and not importable(module):
            raise RecipeError(
                f"rewards: function {self.function!r}: there is no module {module!r} on the Python path. "
                "Write file.py:function, with the path of the file relative to the recipe."
            )

    def file(self) -> Path | None:
        """The file of `file.py:function`, or of the module if Python finds it."""
        module = self.function.rpartition(":")[0]
        if module.endswith(".py"):
            path = Path(module).expanduser()
            return path if path.is_file() else None
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            return None  # `check_rewards` reports it
        return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None

    def read_code(self) -> bytes | None:
        path = self.file()
        if path is None or path.suffix != ".py":  # an extension module, or no source
            return None
        try:
            self._code = path.read_bytes()
        except OSError as error:
            raise RecipeError(
                f"rewards: function {self.function!r}: {path} cannot be read: {error.strerror}. Check its permissions."
            ) from None
        return self._code

    @property
    def code(self) -> bytes | None:
        return self._code if self._code is not None else self.read_code()

    def take_code(self, code: bytes) -> None:
        self._code = code

    def load(self) -> None:
        find_function(self.function, self.code)

    def reward(self, sample: Sample) -> RewardResult | float | None:
        return find_function(self.function, self.code)(sample)


@cache
def find_function(name: str, code: bytes | None) -> Callable[[Sample], RewardResult | float | None]:
    """Loads `module:function`, or `file.py:function`, which can also import modules next to its file.

    Runs `code` rather than the file or its `__pycache__`; None: a module without source, which Python imports.
    """
    module_name, _, attribute = name.rpartition(":")
    if module_name.endswith(".py"):
        path = Path(module_name).expanduser().resolve()
        if code is None:
            raise FileNotFoundError(f"there is no file {path}")
        if (folder := os.fspath(path.parent)) not in sys.path:
            sys.path.append(folder)
        module = run_source(f"opd_reward_{path.stem}", os.fspath(path), code)
    else:
        spec = importlib.util.find_spec(module_name) if code is not None else None
        if code is not None and spec is not None and spec.origin is not None:
            module = run_source(module_name, spec.origin, code, spec.submodule_search_locations)
        else:
            module = importlib.import_module(module_name)
    found = vars(module).get(attribute)
    if not callable(found):
        known = ", ".join(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise AttributeError(f"{module_name} has no function {attribute!r}; it has {known or 'none'}")
    return found


# --- Python callables as rewards: `opd.run(recipe, rewards=f)` ---
# A callable from a notebook cannot be imported elsewhere, so its workers are forks of its process. A recipe holds only its name:
# pass it again to resume the run.


RewardFunction = Callable[[Sample], RewardResult | float | None]
GivenRewards = RewardFunction | Mapping[str, RewardFunction]  # for every domain, or by domain
known: dict[str, RewardFunction] = {}  # in a forked worker: its functions


class PythonCallable(Reward):
    """Calls a Python callable with one sample; the recipe holds its name."""

    name = "python callable"
    from_python = True
    function: str = Field(description="name of the callable that `opd.run(…, rewards=f)` was given")
    _given: RewardFunction | None = PrivateAttr(None)

    def __eq__(self, other: object) -> bool:
        """Compares names: the callable itself is not part of a recipe."""
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

    @property
    def functions(self) -> Mapping[str, RewardFunction]:
        return {self.function: self.given}

    def require(self, sandbox: str) -> None:
        assert self.given is not None

    def reward(self, sample: Sample) -> RewardResult | float | None:
        return known[self.function](sample)


def callables(rewards: Rewards) -> Iterator[RewardKind]:
    return (kind for kinds in rewards.domains.values() for kind in kinds if kind.from_python)


def with_callables(rewards: Rewards, given: GivenRewards) -> Rewards:
    """One callable replaces the recipe's rewards. Callables by domain override the recipe in those domains."""
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
