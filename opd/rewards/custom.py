"""A function of one's own as a reward, in a file beside the recipe or in a module on the Python path."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from opd.errors import RecipeError
from opd.rewards.reward import Reward, function_missing, importable
from opd.types import RewardResult, Sample


class Custom(Reward):
    """The function gives a number, a `RewardResult`, or None."""

    name = "custom"
    function: str = Field(description="module:function or file.py:function, called with one sample")
    fresh: bool = Field(True, description="a fresh process per answer; false: one that keeps a model or a connection")

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
        """`file.py:function`, or the module's file where Python would find it."""
        module = self.function.rpartition(":")[0]
        if module.endswith(".py"):
            path = Path(module).expanduser()
            return path if path.is_file() else None
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            return None  # the check of rewards says so
        return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None

    def load(self) -> None:
        find_function(self.function)

    def reward(self, sample: Sample) -> RewardResult | float | None:
        return find_function(self.function)(sample)


@cache
def find_function(name: str) -> Callable[[Sample], RewardResult | float | None]:
    """`module:function`, or `file.py:function`, which finds the modules beside its file too."""
    module_name, _, attribute = name.rpartition(":")
    if module_name.endswith(".py"):
        path = Path(module_name).resolve()
        spec = importlib.util.spec_from_file_location(f"opd_reward_{path.stem}", path)
        if spec is None or spec.loader is None or not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        sys.path.append(os.fspath(path.parent))
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_name)
    found = vars(module).get(attribute)
    if not callable(found):
        known = ", ".join(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise AttributeError(f"{module_name} has no function {attribute!r}; it has {known or 'none'}")
    return found
