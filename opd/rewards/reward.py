"""What every reward is made of: one class per kind, with its settings, what it needs to be there, and how an answer is rewarded.

The line they all keep: an answer that is no answer (garbage where a number was asked for, code that hangs or crashes) is
wrong, reward 0. A check that could not be made (no reference answer, a library that crashed or hung) gives no reward.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, Field

from opd import sandbox
from opd.common.chat_client import CallLog
from opd.common.errors import RecipeError
from opd.common.short_forms import SHORT_FORMS, ByDomain
from opd.records import Prompt, RewardResult, Sample
from opd.registry import SETTINGS, Choice, Family, Positive, nearest

MISSING = RewardResult(None, error="the prompt has no reference answer")


class OpenReward(Protocol):
    """A reward that is asked for over the network."""

    def reward(self, samples: Sequence[Sample]) -> list[RewardResult]: ...

    def drain(self) -> dict[str, float]:
        """Calls, tokens, cost and failures since it was last called."""

    def close(self) -> None: ...


class RewardKind(Choice):
    """One reward. Unless it says otherwise it runs in a worker process that is killed when an answer takes too long."""

    family = "reward"
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)  # of the rewards it may give
    in_process: ClassVar[bool] = False  # linear in the text, so it cannot hang
    evaluates: ClassVar[bool] = False  # a library that may run what it parses: only behind the sandbox's walls
    sees_prompt: ClassVar[bool] = False  # beyond its fields
    asks_prompt: ClassVar[bool] = False  # which reward to be
    asks_elsewhere: ClassVar[bool] = False  # over the network, many at once: from this process, through `open`
    from_python: ClassVar[bool] = False  # a callable of the program: a recipe holds its name alone
    package: ClassVar[str] = ""  # that has to be there
    install: ClassVar[str] = ""  # how it gets there

    weight: float = Field(1.0, allow_inf_nan=False, description="in a sum of rewards")
    time_limit: float = Field(10.0, gt=0, le=86_400, description="seconds per sample; code: per test case")

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.name

    @property
    def forks(self) -> bool:
        """Whether every answer gets a process of its own."""
        return self.evaluates

    @property
    def in_fork(self) -> bool:
        """Whether its workers are forks of this process, since it was made here and can be imported nowhere else."""
        return type(self).__module__ == "__main__"

    @property
    def functions(self) -> Mapping[str, Callable[[Sample], RewardResult | float | None]]:
        """Callables of this process that its forks have to know, by name."""
        return {}

    def reward(self, sample: Sample) -> RewardResult | float | None:
        """A number within `bounds`, or None: there is no reward for this answer."""
        raise NotImplementedError

    def open(self, calls: CallLog | None, check: Callable[[], None]) -> OpenReward:
        """What rewards many samples at once, where they are asked for elsewhere. `calls`: those that were made before."""
        raise NotImplementedError

    def covers(self, prompt: Prompt) -> bool:
        """Is there anything to reward this prompt's answers by?"""
        return True

    def doubt(self, prompt: Prompt) -> str:
        """Why no answer to this prompt is likely to be right, and what to do about it; empty: no reason is known."""
        return ""

    def chosen(self, fields: Mapping[str, Any]) -> RewardKind | str:
        """The reward that answers to such a prompt get, or why there is none."""
        return self

    def within(self, sandbox: str) -> RewardKind:
        """The same where the recipe's `rewards.sandbox` is this one."""
        return self

    def limit(self, sample: Sample) -> float:
        """Seconds for one sample."""
        return self.time_limit

    def require(self, sandbox: str) -> None:
        """Everything it needs is here, or the error says what is missing: now, not at step 400."""
        if self.package and not importable(self.package):
            raise RecipeError(f"rewards: kind {self.name} needs the {self.package} package: {self.install}.")
        self.walls(sandbox)

    def walls(self, sandbox: str) -> str:
        """The sandbox that its workers stand in."""
        return sandbox_here(sandbox) if self.evaluates else "none"

    def file(self) -> Path | None:
        """The user's own file that it reads, if any: a run notices when it changes."""
        return None

    def read_code(self) -> bytes | None:
        """The Python code of the user's own file, read now and kept in `code`; None: it has none."""
        return None

    @property
    def code(self) -> bytes | None:
        """What workers run for it: the bytes that were read, and hashed where a run is sealed."""
        return None

    def take_code(self, code: bytes) -> None:
        """In a worker: the bytes that the process which asks has read."""

    def load(self) -> None:
        """Everything it imports, so that it is not the sample's time. What an answer may reach is guarded first."""
        if self.package:
            importlib.import_module(self.package)


class Reward(RewardKind):
    """A reward of your own: `@opd.register` above a subclass with `name`, settings, and `reward(sample)`.

    Every answer is rewarded in a fork of a worker that has loaded the class. `keeps_process` has one process for all answers
    instead: for rewards that load a model or open a connection when first asked.
    """

    bounds = (-1e6, 1e6)
    sees_prompt = True
    keeps_process: ClassVar[bool] = False

    @property
    def forks(self) -> bool:
        return not self.keeps_process


class RewardFamily(Family):
    """`numeric`, `{kind: numeric, …}`, and `module:function` or `file.py:function` for a function of one's own."""

    def find(self, name: object) -> type[Choice]:
        if isinstance(name, str) and name.endswith(".py"):
            raise ValueError(f"a reward is a function, and this is a file. {function_missing(name)}")
        if isinstance(name, str) and name not in self.names():
            known = [one for one in self.names() if one.isidentifier()]  # a recipe cannot name a Python callable
            own = "" if name.isidentifier() else "write module:function or file.py:function for your own; "
            raise ValueError(f"unknown reward {name!r}; {own}{nearest(name, known)}")
        return super().find(name)


FAMILY = RewardFamily("reward", default="verifier")


def function_missing(file: str) -> str:
    """How to name a function of a file of Python, with those that it defines; nothing of it is run."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # the file is not there, or is no Python
        return f"Name the function, too: {Path(file).name}:FUNCTION"
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    found = f"; it has {', '.join(names[:10])}" if names else "; it has none"
    return f"Name the function, too: {Path(file).name}:{names[0] if names else 'FUNCTION'}{found}"


def right(found: bool, feedback: str = "") -> RewardResult:
    return RewardResult(float(found), feedback=feedback)


def give(kind: RewardKind, sample: Sample) -> RewardResult:
    """The reward for a sample. ValueError: what the kind gave is no number in range."""
    found = kind.reward(sample)
    if found is None:
        return RewardResult(None, error=f"{kind.label} gave no reward")
    result = found if isinstance(found, RewardResult) else RewardResult(float(found))
    given, turns = (None if result.reward is None else float(result.reward)), tuple(map(float, result.per_turn))
    low, high = kind.bounds
    for value in (given, *turns):
        if value is not None and not (math.isfinite(value) and low <= value <= high):
            raise ValueError(f"{kind.label} gave {value}; a reward is a number from {low:g} to {high:g}")
    return replace(result, reward=given, per_turn=turns)


def importable(module: str) -> bool:
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


@cache
def sandbox_here(wanted: str) -> str:
    """What a recipe's `sandbox` is on this machine; tried, and warned of, once."""
    return sandbox.choose(wanted)


# A recipe's `rewards`: one reward or a weighted sum, for every domain or by domain, in every way they can be written.


Sandbox = Literal["auto", "bubblewrap", "namespaces", "none"]
DEFAULT = ByDomain.default
One = Annotated[RewardKind, FAMILY]


class Rewards(BaseModel):
    """The rewards of a stage, by domain, and what holds for all of them."""

    model_config = SETTINGS
    domains: dict[str, Annotated[list[One], Field(min_length=1), SHORT_FORMS["rewards.DOMAIN"]]] = Field(
        default_factory=dict, description="by domain, or `default`; domains without an entry: the prompt's own verifier"
    )
    sandbox: Sandbox = Field(
        "auto", description="of everything that may run what the model wrote; none: no walls at all"
    )
    stop_after: Positive = Field(5, description="steps in which nothing was rewarded, after which the run stops")

    @property
    def need_no_answer(self) -> bool:
        """Whether rows without an answer can be rewarded too."""
        return any(not reward.asks_prompt for rewards in self.domains.values() for reward in rewards)


AnyRewards = Annotated[Rewards, SHORT_FORMS["rewards"]]
