"""The rewards themselves: one function per kind, sample in, judgement out.

The line they all keep: an answer that is no answer (garbage where a number was asked for, code that hangs or crashes) is
wrong, score 0. A check that could not be made (no reference answer, a scorer that crashed or hung) has no score.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from opd.config import RewardSpec
from opd.data.sources import GYM, TASK
from opd.data.tasks import get_task
from opd.rewards import answers
from opd.rewards.code import code
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
    return right(any(answer == answers.normalise(str(reference), spec.ignore) for reference in wanted))


def numeric(spec: RewardSpec, sample: Sample) -> Judgement:
    known = [answers.last_number(str(reference)) for reference in references(spec, sample)]
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
        wanted += parse(f"${reference}$", parsing_timeout=None) or parse(str(reference), parsing_timeout=None)
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
    """The task's own scorer. Several of them evaluate the answer with sympy, which runs it: see `pool`."""
    import reasoning_gym

    task = str(sample.prompt.fields["verifier"]).removeprefix(GYM)
    score = reasoning_gym.get_score_answer_fn(task)(answer=sample.text.strip(), entry=sample.prompt.fields["entry"])
    return Judgement(float(score))


def custom(spec: RewardSpec, sample: Sample) -> Judgement:
    module, _, name = (spec.function or "").partition(":")
    found = getattr(importlib.import_module(module), name)(sample)
    if isinstance(found, Judgement):
        return found
    return Judgement(None, error=f"{spec.function} gave no score") if found is None else Judgement(float(found))


def task(spec: RewardSpec, sample: Sample) -> Judgement:
    name = str(sample.prompt.fields["verifier"]).removeprefix(TASK)
    return right(get_task(name).verify(sample.prompt, sample.text))


SCORERS: dict[str, Callable[[RewardSpec, Sample], Judgement]] = {
    "exact": exact, "numeric": numeric, "format": form, "maths": maths, "json": structured, "code": code, "custom": custom,
    "task": task, "gym": gym,
}  # fmt: skip
IN_PROCESS = ("exact", "numeric", "task")  # linear in the text: they cannot hang
CONFINED = ("format", "maths", "json", "gym")  # foreign code on foreign text, in workers behind the sandbox's walls


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
        return "gym", spec
    if name in ("exact", "numeric", "maths", "code", "json"):
        return name, RewardSpec.model_validate({"kind": name, "weight": spec.weight, "time_limit": spec.time_limit})
    return f"unknown verifier {name!r}"
