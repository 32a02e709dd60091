"""Base classes of rewards, the prompt's own verifier, and a recipe's `rewards`.

A kind of reward is one class with its settings, its requirements, and how it rewards an answer.

The common rule: an invalid answer (garbage instead of a number, code that hangs or crashes) is wrong, reward 0. A check that
could not be made (no reference answer, a library that crashed or hung) gives no reward.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, Field

from opd import registry, sandbox
from opd.common.chat_client import CallLog
from opd.common.errors import RecipeError
from opd.common.short_forms import SHORT_FORMS, ByDomain
from opd.data.tasks import GYM, TASK, get_task
from opd.records import Prompt, RewardResult, Sample
from opd.registry import SETTINGS, Choice, Family, Positive, nearest

MISSING = RewardResult(None, error="the prompt has no reference answer")


class OpenReward(Protocol):
    """A reward computed over the network."""

    def reward(self, samples: Sequence[Sample]) -> list[RewardResult]: ...

    def drain(self) -> dict[str, float]:
        """Calls, tokens, cost and failures since the last `drain`."""

    def close(self) -> None: ...


class RewardKind(Choice):
    """One reward. By default it runs in a worker process, which is killed if an answer takes too long."""

    family = "reward"
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)  # lowest and highest reward
    in_process: ClassVar[bool] = False  # runs in this process: linear in the text, so it cannot hang
    evaluates: ClassVar[bool] = False  # uses a library that may run what it parses: only inside the sandbox
    sees_prompt: ClassVar[bool] = False  # reads more of the prompt than its fields
    asks_prompt: ClassVar[bool] = False  # the prompt names the reward
    asks_elsewhere: ClassVar[bool] = False  # over the network, many at once: from this process, through `open`
    from_python: ClassVar[bool] = False  # a callable of the program: a recipe holds only its name
    package: ClassVar[str] = ""  # required package
    install: ClassVar[str] = ""  # how to install it

    weight: float = Field(1.0, allow_inf_nan=False, description="in a sum of rewards")
    time_limit: float = Field(10.0, gt=0, le=86_400, description="seconds per sample; code: per test case")

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.name

    @property
    def forks(self) -> bool:
        """Whether every answer gets its own process."""
        return self.evaluates

    @property
    def in_fork(self) -> bool:
        """Whether its workers are forks of this process, because it cannot be imported elsewhere."""
        return type(self).__module__ == "__main__"

    @property
    def functions(self) -> Mapping[str, Callable[[Sample], RewardResult | float | None]]:
        """Callables of this process that its forks need, by name."""
        return {}

    def reward(self, sample: Sample) -> RewardResult | float | None:
        """A number within `bounds`, or None: no reward for this answer."""
        raise NotImplementedError

    def open(self, calls: CallLog | None, check: Callable[[], None]) -> OpenReward:
        """Opens a reward with `asks_elsewhere`, which rewards many samples at once. `calls`: log of earlier calls."""
        raise NotImplementedError

    def covers(self, prompt: Prompt) -> bool:
        """Whether answers to this prompt can be rewarded."""
        return True

    def doubt(self, prompt: Prompt) -> str:
        """Why answers to this prompt will likely all be wrong, and what to do about it; empty if no reason is known."""
        return ""

    def chosen(self, fields: Mapping[str, Any]) -> RewardKind | str:
        """The reward used for prompts with these fields, or why there is none."""
        return self

    def within(self, sandbox: str) -> RewardKind:
        """The same reward with the recipe's `rewards.sandbox`."""
        return self

    def limit(self, sample: Sample) -> float:
        """Time limit for one sample, in seconds."""
        return self.time_limit

    def require(self, sandbox: str) -> None:
        """Raises if something it needs is missing: now, not at step 400."""
        if self.package and not importable(self.package):
            raise RecipeError(f"rewards: kind {self.name} needs the {self.package} package: {self.install}.")
        self.worker_sandbox(sandbox)

    def worker_sandbox(self, sandbox: str) -> str:
        """The sandbox of its workers."""
        return sandbox_here(sandbox) if self.evaluates else "none"

    def file(self) -> Path | None:
        """The user's file that it reads, if any; a run notices if it changes."""
        return None

    def read_code(self) -> bytes | None:
        """Reads the Python code of the user's file and keeps it in `code`; None: no file."""
        return None

    @property
    def code(self) -> bytes | None:
        """The code that workers run: the bytes that were read, and hashed when a run is sealed."""
        return None

    def take_code(self, code: bytes) -> None:
        """In a worker: receives the bytes that the parent process read."""

    def load(self) -> None:
        """Imports its libraries, so that this does not count as the sample's time. Installs guards first."""
        if self.package:
            importlib.import_module(self.package)


class Reward(RewardKind):
    """For your own reward: put `@opd.register` above a subclass with `name`, settings, and `reward(sample)`.

    Every answer is rewarded in a fork of a worker that has loaded the class. With `keeps_process`, one process rewards all
    answers: for rewards that load a model or open a connection on first use.
    """

    bounds = (-1e6, 1e6)
    sees_prompt = True
    keeps_process: ClassVar[bool] = False

    @property
    def forks(self) -> bool:
        return not self.keeps_process


class RewardFamily(Family):
    """`numeric`, `{kind: numeric, …}`, and `module:function` or `file.py:function` for your own function."""

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
    """Tells how to name a function of a Python file, and lists those it defines without running it."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # no such file, or not Python
        return f"Name the function, too: {Path(file).name}:FUNCTION"
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    found = f"; it has {', '.join(names[:10])}" if names else "; it has none"
    return f"Name the function, too: {Path(file).name}:{names[0] if names else 'FUNCTION'}{found}"


def right(found: bool, feedback: str = "") -> RewardResult:
    return RewardResult(float(found), feedback=feedback)


def reward_of(kind: RewardKind, sample: Sample) -> RewardResult:
    """The reward for a sample. Raises ValueError if the kind returns anything but a number in range."""
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
    """The sandbox used on this machine for a recipe's `sandbox`. Tested, and warned about, once."""
    return sandbox.choose(wanted)


# --- The prompt's own verifier: a task's, reasoning-gym's, or the reward kind that a row names ---


IN_ROWS = (
    "exact",
    "numeric",
    "maths",
    "code",
    "json",
)  # what a row may name: nothing that runs code it chooses


class Verifier(RewardKind):
    """Uses the verifier that each prompt names."""

    name = "verifier"
    by_default = True
    asks_prompt = True

    @cached_property
    def _of_tasks(self) -> TaskVerifier:
        return TaskVerifier(weight=self.weight, time_limit=self.time_limit)

    def covers(self, prompt: Prompt) -> bool:
        return "verifier" in prompt.fields

    def chosen(self, fields: Mapping[str, Any]) -> RewardKind | str:
        name = fields.get("verifier")
        if not isinstance(name, str):
            return "the prompt names no verifier"
        general = {"weight": self.weight, "time_limit": self.time_limit}
        if name.startswith(TASK):
            return self._of_tasks
        if name.startswith(GYM):
            has_entry = isinstance(fields.get("entry"), Mapping)
            return GymVerifier(**general) if has_entry else "the prompt has no `entry` for its scorer"
        if name in IN_ROWS:
            found = registry.find("reward", name)(**general)
            assert isinstance(found, RewardKind)
            return found
        return f"unknown verifier {name!r}"


class TaskVerifier(RewardKind):
    """Checks answers of a built-in task."""

    name = "task"
    in_process = True

    def reward(self, sample: Sample) -> float:
        name = str(sample.prompt.fields["verifier"]).removeprefix(TASK)
        return float(get_task(name).verify(sample.prompt, sample.text))


class GymVerifier(RewardKind):
    """Uses reasoning-gym's scorer. Several scorers evaluate the answer: see `guard_reasoning_gym` and `workers`."""

    name = "reasoning_gym"
    evaluates = True
    package = "reasoning_gym"
    install = "pip install reasoning_gym"

    def load(self) -> None:
        super().load()
        guard_reasoning_gym()

    def reward(self, sample: Sample) -> float:
        import reasoning_gym

        fields = sample.prompt.fields
        score = reasoning_gym.get_score_answer_fn(str(fields["verifier"]).removeprefix(GYM))
        return float(score(answer=sample.text.strip(), entry=fields["entry"]))


# --- Safe evaluation: libraries that evaluate an answer may only do arithmetic ---
# Some of reasoning-gym's scorers call `eval(answer)` or sympy's `parse_expr`, which evals after a few transformations. In a worker
# both are replaced: anything but numbers, names, operators, known functions and lists of these is rejected before it runs.


FUNCTIONS = frozenset(
    [
        "Abs",
        "Ei",
        "Float",
        "Integer",
        "Rational",
        "Si",
        "Ci",
        "abs",
        "acos",
        "acosh",
        "acot",
        "acoth",
        "acsc",
        "asec",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "binomial",
        "cbrt",
        "ceiling",
        "cos",
        "cosh",
        "cot",
        "coth",
        "csc",
        "erf",
        "erfc",
        "exp",
        "factorial",
        "floor",
        "gamma",
        "li",
        "ln",
        "log",
        "root",
        "sec",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "tan",
        "tanh",
    ]
)
ALLOWED = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant, ast.Name, ast.Load, ast.Call, ast.List,
    ast.Tuple, ast.Set, ast.Dict,
)  # fmt: skip
LONGEST_EXPRESSION = 100_000  # characters


def checked(text: Any, functions: frozenset[str] = frozenset(), *, words: bool = False) -> ast.Expression:
    """Parses an expression that can only calculate. Raises ValueError for any other."""
    if not isinstance(text, str) or len(text) > LONGEST_EXPRESSION:
        raise ValueError("not an expression")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"not an expression: {type(error).__name__}") from None
    for node in ast.walk(tree):
        if not isinstance(node, ALLOWED):
            raise ValueError(f"{type(node).__name__} is not arithmetic")
        if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)) and not words:
            raise ValueError("text is not arithmetic")
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            raise ValueError(f"{node.id} is not arithmetic")
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in functions):
            raise ValueError("this call is not arithmetic")
        if isinstance(node, ast.Call) and node.keywords:
            raise ValueError("this call is not arithmetic")
    return tree


def calculate(text: Any, *_: Any) -> Any:
    """Replaces `eval`: evaluates literals and operators.

    >>> calculate("[[0, 1], [1 + 1, 'x']]")
    [[0, 1], [2, 'x']]
    """
    return eval(compile(checked(text, words=True), "answer", "eval"), {"__builtins__": {}})


def guard_reasoning_gym() -> None:
    """Called once per worker, before it sees an answer."""
    import reasoning_gym
    import sympy
    from sympy.parsing import sympy_parser

    if vars(reasoning_gym).get("guarded"):
        return
    parse = sympy_parser.parse_expr

    def parse_checked(text: Any, *arguments: Any, **options: Any) -> Any:
        checked(text, FUNCTIONS)
        return parse(text, *arguments, **options)

    vars(sympy)["parse_expr"] = vars(sympy_parser)["parse_expr"] = parse_checked
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "reasoning_gym":
            vars(module)["eval"] = calculate
            if vars(module).get("parse_expr") is parse:
                vars(module)["parse_expr"] = parse_checked
    vars(reasoning_gym)["guarded"] = True


# --- A recipe's `rewards`: one reward or a weighted sum, for all domains or by domain ---


Sandbox = Literal["auto", "bubblewrap", "namespaces", "none"]
DEFAULT = ByDomain.default
One = Annotated[RewardKind, FAMILY]


class Rewards(BaseModel):
    """The rewards of a stage by domain, and their common settings."""

    model_config = SETTINGS
    domains: dict[str, Annotated[list[One], Field(min_length=1), SHORT_FORMS["rewards.DOMAIN"]]] = Field(
        default_factory=dict, description="by domain, or `default`; domains without an entry: the prompt's own verifier"
    )
    sandbox: Sandbox = Field("auto", description="for everything that may run model-written code; none: no isolation")
    stop_after: Positive = Field(5, description="steps in a row without any reward before the run stops")

    @property
    def need_no_answer(self) -> bool:
        """Whether rows without an answer can be rewarded."""
        return any(not reward.asks_prompt for rewards in self.domains.values() for reward in rewards)


AnyRewards = Annotated[Rewards, SHORT_FORMS["rewards"]]
