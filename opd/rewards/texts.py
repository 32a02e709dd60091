"""Rewards that read the text of an answer: exact match, numbers, a regular expression, a JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from opd import registry
from opd.data.tasks import GYM, TASK, get_task
from opd.records import Prompt, RewardResult, Sample
from opd.rewards import answers
from opd.rewards.answers import guard_reasoning_gym
from opd.rewards.reward import MISSING, RewardKind, right

Extract = Literal["auto", "all", "last_line", "boxed"]
WHERE = "where the answer stands; auto: all of it (exact), the boxed or else last number (numeric)"


class Referenced(RewardKind):
    """Base of rewards that compare with a reference answer."""

    field: str = Field("answer", description="the prompt's field that holds the right answer")

    def references(self, sample: Sample) -> list[Any]:
        """The reference answers, any of which is right."""
        found = sample.prompt.fields.get(self.field)
        if found is None:
            return []
        return list(found) if isinstance(found, (list, tuple)) else [found]


class Exact(Referenced):
    """1 if the answer is the reference text, else 0."""

    name = "exact"
    in_process = True
    extract: Extract = Field("auto", description=WHERE)
    ignore: list[Literal["case", "space", "punctuation", "articles"]] = Field(
        default_factory=list, description="differences an exact match overlooks"
    )

    def doubt(self, prompt: Prompt) -> str:
        known = [answers.written(reference) for reference in self.references(Sample(prompt, ""))]
        ends = [answers.solution_end(text) for text in known]
        if not known or any(self._can_match(text, end) for text, end in zip(known, ends, strict=True)):
            return ""
        number = answers.last_number(ends[0] or "", alone="####" not in known[0])
        fits = "maths" if number is None else "numeric"
        return (
            f"the prompts' {self.field!r} is a worked solution that ends in {known[0].strip()[-20:]!r}, and an answer is right only "
            f"if it is that whole text. Set `rewards: {fits}`, which compares what they end in, or give rows the final answer alone"
        )

    def _can_match(self, text: str, end: str | None) -> bool:
        """Whether an answer can be expected to match a reference. `end`: the final answer of a worked solution."""
        on_its_line = self.extract == "last_line" and "\n" not in text.strip()
        return not end or on_its_line or answers.normalise(text, self.ignore) == answers.normalise(end, self.ignore)

    def reward(self, sample: Sample) -> RewardResult:
        wanted = self.references(sample)
        if not wanted:
            return MISSING
        answer = answers.extract(sample.text, "all" if self.extract == "auto" else self.extract)
        if answer is None:
            return right(False, "no boxed answer")
        answer = answers.normalise(answer, self.ignore)
        return right(any(answer == answers.normalise(answers.written(reference), self.ignore) for reference in wanted))


class Numeric(Referenced):
    """1 if the answer's number equals the reference's within a tolerance, else 0."""

    name = "numeric"
    in_process = True
    extract: Extract = Field("auto", description=WHERE)
    tolerance: float = Field(1e-6, ge=0, allow_inf_nan=False, description="largest relative difference of two numbers")
    absolute: float = Field(0.0, ge=0, allow_inf_nan=False, description="largest absolute difference of two numbers")

    def reward(self, sample: Sample) -> RewardResult:
        known = [answers.last_number(answers.written(reference)) for reference in self.references(sample)]
        wanted = [reference for reference in known if reference is not None]
        if not wanted:
            return RewardResult(None, error=f"the prompt's {self.field!r} holds no number")
        text = answers.boxed(sample.text) if self.extract == "auto" else answers.extract(sample.text, self.extract)
        if text is None:
            if self.extract != "auto":
                return right(False, "no boxed answer")
            text = sample.text
        found = answers.last_number(text, alone=self.extract == "all")
        if found is None:
            return right(False, "no number")
        return right(any(answers.close(found, reference, self.tolerance, self.absolute) for reference in wanted))


class Format(RewardKind):
    """1 if a regular expression matches the answer, else 0."""

    name = "format"
    pattern: str = Field(description="regular expression; `.` crosses lines")
    whole: bool = Field(False, description="the pattern must match all of the answer, not a part")

    @model_validator(mode="before")
    @classmethod
    def _has_pattern(cls, settings: Any) -> Any:
        if isinstance(settings, Mapping) and settings.get("pattern") is None:
            raise ValueError("a format reward needs a pattern")
        return settings

    @field_validator("pattern")
    @classmethod
    def _pattern(cls, value: str) -> str:
        try:
            re.compile(value)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"not a regular expression ({error})") from None
        return value

    def reward(self, sample: Sample) -> RewardResult:
        pattern = re.compile(self.pattern, re.DOTALL)
        return right(bool(pattern.fullmatch(sample.text.strip()) if self.whole else pattern.search(sample.text)))


class Json(RewardKind):
    """1 if the answer, or its last JSON block, satisfies a schema, else 0."""

    name = "json"
    package = "jsonschema"
    install = "pip install 'opd[json]'"
    json_schema: dict[str, Any] | None = Field(None, description="default: the prompt's field `schema`")

    def reward(self, sample: Sample) -> RewardResult:
        import jsonschema

        schema = self.json_schema if self.json_schema is not None else sample.prompt.fields.get("schema")
        if isinstance(schema, str):
            schema = json.loads(schema)
        if not isinstance(schema, Mapping):
            return RewardResult(None, error="no JSON schema: neither json_schema in the recipe nor a field `schema`")
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


# --- Mathematical equality, by math-verify ---


class Maths(Referenced):
    """1 if math-verify finds answer and reference equal, else 0. Its time limits use signals, so the pool's limit replaces them."""

    name = "maths"
    evaluates = True
    package = "math_verify"
    install = "pip install 'opd[maths]'"

    def reward(self, sample: Sample) -> RewardResult:
        from math_verify import parse
        from math_verify import verify as equal

        wanted: list[Any] = []
        for reference in self.references(sample):
            text = answers.written(reference)
            wanted += parse(f"${text}$", parsing_timeout=None) or parse(text, parsing_timeout=None)
        if not wanted:
            return RewardResult(None, error=f"math-verify cannot read the prompt's {self.field!r}")
        found = parse(sample.text, parsing_timeout=None)
        if not found:
            return right(False, "no mathematical expression")
        return right(bool(equal(wanted, found, timeout_seconds=None, raise_on_error=True)))


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

    def covers(self, prompt: Prompt) -> bool:
        return "verifier" in prompt.fields

    def chosen(self, fields: Mapping[str, Any]) -> RewardKind | str:
        name = fields.get("verifier")
        if not isinstance(name, str):
            return "the prompt names no verifier"
        general = {"weight": self.weight, "time_limit": self.time_limit}
        if name.startswith(TASK):
            return TaskVerifier(**general)
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

    def reward(self, sample: Sample) -> RewardResult:
        name = str(sample.prompt.fields["verifier"]).removeprefix(TASK)
        return right(get_task(name).verify(sample.prompt, sample.text))


class GymVerifier(RewardKind):
    """Uses reasoning-gym's scorer. Several scorers evaluate the answer: see `answers.guard_reasoning_gym` and `worker`."""

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
