"""The rewards themselves: one function per kind, sample in, judgement out.

The line they all keep: an answer that is no answer (garbage where a number was asked for, code that hangs or crashes) is
wrong, score 0. A check that could not be made (no reference answer, a scorer that crashed or hung) has no score.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from opd.config import RewardSpec
from opd.data.generators import GYM, TASK
from opd.data.tasks import get_task
from opd.rewards import answers
from opd.rewards.code import code
from opd.rewards.guards import guard_reasoning_gym
from opd.rewards.travel import RANGE
from opd.types import Judgement, Sample

MISSING = Judgement(None, error="the prompt has no reference answer")


def right(verdict: bool, feedback: str = "") -> Judgement:
    return Judgement(float(verdict), feedback=feedback)


def references(spec: RewardSpec, sample: Sample) -> list[Any]:
    """The reference answer, or several of which any is right."""
    found = sample.prompt.fields.get(spec.field)
    if found is None:
        return []
    return list(found) if isinstance(found, (list, tuple)) else [found]


def exact(spec: RewardSpec, sample: Sample) -> Judgement:
    wanted = references(spec, sample)
    if not wanted:
        return MISSING
    answer = answers.extract(sample.text, "all" if spec.extract == "auto" else spec.extract)
    if answer is None:
        return right(False, "no boxed answer")
    answer = answers.normalise(answer, spec.ignore)
    return right(any(answer == answers.normalise(answers.written(reference), spec.ignore) for reference in wanted))


def numeric(spec: RewardSpec, sample: Sample) -> Judgement:
    known = [answers.last_number(answers.written(reference)) for reference in references(spec, sample)]
    wanted = [reference for reference in known if reference is not None]
    if not wanted:
        return Judgement(None, error=f"the prompt's {spec.field!r} holds no number")
    text = answers.boxed(sample.text) if spec.extract == "auto" else answers.extract(sample.text, spec.extract)
    if text is None:
        if spec.extract != "auto":
            return right(False, "no boxed answer")
        text = sample.text
    found = answers.last_number(text, alone=spec.extract == "all")
    if found is None:
        return right(False, "no number")
    return right(any(answers.close(found, reference, spec.tolerance, spec.absolute) for reference in wanted))


def form(spec: RewardSpec, sample: Sample) -> Judgement:
    pattern = re.compile(spec.pattern or "", re.DOTALL)
    return right(bool(pattern.fullmatch(sample.text.strip()) if spec.whole else pattern.search(sample.text)))


def maths(spec: RewardSpec, sample: Sample) -> Judgement:
    """Mathematical equality by math-verify. Its own time limits use signals, so they are off; the pool keeps the time."""
    from math_verify import parse
    from math_verify import verify as equal

    wanted: list[Any] = []
    for reference in references(spec, sample):
        text = answers.written(reference)
        wanted += parse(f"${text}$", parsing_timeout=None) or parse(text, parsing_timeout=None)
    if not wanted:
        return Judgement(None, error=f"math-verify cannot read the prompt's {spec.field!r}")
    found = parse(sample.text, parsing_timeout=None)
    if not found:
        return right(False, "no mathematical expression")
    return right(bool(equal(wanted, found, timeout_seconds=None, raise_on_error=True)))


def structured(spec: RewardSpec, sample: Sample) -> Judgement:
    import jsonschema

    schema = spec.json_schema if spec.json_schema is not None else sample.prompt.fields.get("schema")
    if isinstance(schema, str):
        schema = json.loads(schema)
    if not isinstance(schema, Mapping):
        return Judgement(None, error="no JSON schema: neither json_schema in the recipe nor a field `schema`")
    fenced = [content for language, content in answers.blocks(sample.text) if language in ("json", "")]
    try:
        found = json.loads(fenced[-1] if fenced else sample.text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return right(False, f"not JSON: {error}"[:200])
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator.check_schema(schema)
    problem = next(iter(validator(schema).iter_errors(found)), None)
    return right(problem is None, "" if problem is None else problem.message[:200])


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def gym(spec: RewardSpec, sample: Sample) -> Judgement:
    """The task's own scorer. Several of them evaluate the answer: see `guards` and `worker`."""
    import reasoning_gym

    task = str(sample.prompt.fields["verifier"]).removeprefix(GYM)
    score = reasoning_gym.get_score_answer_fn(task)(answer=sample.text.strip(), entry=sample.prompt.fields["entry"])
    return Judgement(float(score))


def custom(spec: RewardSpec, sample: Sample) -> Judgement:
    found = function(spec.function or "")(sample)
    if found is None:
        return Judgement(None, error=f"{spec.function} gave no score")
    judgement = found if isinstance(found, Judgement) else Judgement(float(found))
    low, high = RANGE["custom"]
    for value in (judgement.score, *judgement.per_turn):
        if value is not None and not (math.isfinite(value) and low <= value <= high):
            raise ValueError(f"{spec.function} gave {value}; a score is a number from {low:g} to {high:g}")
    return judgement


@cache
def function(name: str) -> Callable[[Sample], Any]:
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


def task(spec: RewardSpec, sample: Sample) -> Judgement:
    name = str(sample.prompt.fields["verifier"]).removeprefix(TASK)
    return right(get_task(name).verify(sample.prompt, sample.text))


SCORERS: dict[str, Callable[[RewardSpec, Sample], Judgement]] = {
    "exact": exact, "numeric": numeric, "format": form, "maths": maths, "json": structured, "code": code, "custom": custom,
    "task": task, "gym": gym,
}  # fmt: skip
IN_PROCESS = ("exact", "numeric", "task")  # linear in the text: they cannot hang
EVALUATING = ("maths", "gym")  # libraries that may run what they parse: only behind the sandbox's walls
MODULES = {"maths": "math_verify", "json": "jsonschema", "gym": "reasoning_gym"}


def forks(name: str, spec: RewardSpec) -> bool:
    """Whether every answer gets a process of its own."""
    return name in EVALUATING or (name == "custom" and spec.fresh)


def load(name: str, spec: RewardSpec) -> None:
    """Everything a scorer imports, so that it is not the sample's time. What an answer may reach is guarded first."""
    if name in MODULES:
        importlib.import_module(MODULES[name])
    if name == "gym":
        guard_reasoning_gym()
    if name == "custom":
        function(spec.function or "")


def resolve(spec: RewardSpec, fields: Mapping[str, Any]) -> tuple[str, RewardSpec] | str:
    """The scorer a sample gets, or why there is none. `verifier` asks the prompt, whose rows may name any kind but custom."""
    if spec.kind != "verifier":
        return spec.kind, spec
    name = fields.get("verifier")
    if not isinstance(name, str):
        return "the prompt names no verifier"
    if name.startswith(TASK):
        return "task", spec
    if name.startswith(GYM):
        return ("gym", spec) if isinstance(fields.get("entry"), Mapping) else "the prompt has no `entry` for its scorer"
    if name in ("exact", "numeric", "maths", "code", "json"):
        return name, RewardSpec.model_validate({"kind": name, "weight": spec.weight, "time_limit": spec.time_limit})
    return f"unknown verifier {name!r}"
