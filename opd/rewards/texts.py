"""Rewards that read the text of an answer: exact match, numbers, a regular expression, a JSON schema, mathematical equality.

First come the functions that find the answer in a text. They are linear in the text and never raise on garbage.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from opd.records import Prompt, RewardResult, Sample
from opd.rewards.reward import MISSING, RewardKind, right

LONGEST = 20_000  # characters at the end that are searched for a number
DIGITS = 400  # a longer number, or a larger exponent, is not an answer
FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
FRACTION = re.compile(r"\\[dt]?frac\{([-+]?[\d.,]+)\}\{([\d.,]+)\}")
NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}])[-+])?\$?"
    r"(?P<whole>\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?P<part>\.\d+)?(?(whole)|(?(part)|(?!)))"
    r"(?:[eE](?P<exponent>[-+]?\d+)| ?(?:\\times|\\cdot|×|·|\*) ?10(?:\^|\*\*)\{?(?P<power>[-+]?\d+)\}?)?"
    r"(?: ?/ ?(?P<divisor>\d+(?:\.\d+)?))?"
    r"(?P<percent> ?\\?%)?",
    re.ASCII,
)
ARTICLES = re.compile(r"\b(?:a|an|the)\b", re.IGNORECASE)
PLAIN = {"\u2212": "-", "{,}": ",", "\\,": ",", "\\!": "", "\\$": "$"}


class Number(NamedTuple):
    value: Fraction
    percent: bool = False


def written(reference: Any) -> str:
    """A reference as text, including integers of any length."""
    return str(Decimal(reference)) if type(reference) is int else str(reference)


def boxed(text: str) -> str | None:
    r"""The content of the last \boxed{…} with closed braces.

    >>> boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for brace in re.finditer(r"[{}]", text[begin:]):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[begin : begin + brace.start()]
    return None


def solution_end(text: str) -> str | None:
    r"""The final answer of a worked solution: after `####`, as in GSM8K, or in \boxed{…}. None: not a worked solution.

    >>> solution_end("3 * 4 = <<3*4=12>>12\n#### 12")
    '12'
    """
    marked = text.rpartition("####")
    return marked[2].strip() if marked[1] else boxed(text)


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of every fenced block."""
    return [(match.group(1).lower(), match.group(2)) for match in FENCE.finditer(text)]


def extract(text: str, how: str) -> str | None:
    """Extracts the answer: `all`, `last_line` or `boxed`. None: not found."""
    if how == "boxed":
        return boxed(text)
    return last_line(text) if how == "last_line" else text.strip()


def last_number(text: str, *, alone: bool = False) -> Number | None:
    r"""Reads 1,234.5 · −3 · 2/3 · \frac{2}{3} · 1.5e3 · 1.5 \times 10^{3} · 50% · $20. None: no number, or far too long.

    `alone`: the text must be the number and nothing else.

    >>> last_number("from 1,200 to 50%")
    Number(value=Fraction(50, 1), percent=True)
    """
    text = text[-LONGEST:]
    for old, new in PLAIN.items():
        text = text.replace(old, new)
    text = FRACTION.sub(r"\1/\2", text)
    match = NUMBER.fullmatch(text.strip()) if alone else None
    if not alone:
        for match in NUMBER.finditer(text):  # noqa: B007
            pass
    return None if match is None else _number(match)


def _number(match: re.Match[str]) -> Number | None:
    whole, part = (match["whole"] or "").replace(",", ""), match["part"] or ""
    exponent = match["exponent"] or match["power"] or "0"
    if max(len(whole) + len(part), len(match["divisor"] or "")) > DIGITS:
        return None
    if len(exponent) > 5 or abs(int(exponent)) > DIGITS:
        return None
    value = Fraction((match["sign"] or "") + (whole or "0") + part) * Fraction(10) ** int(exponent)
    if match["divisor"]:
        divisor = Fraction(match["divisor"])
        if not divisor:
            return None
        value /= divisor
    return Number(value, match["percent"] is not None)


def close(answer: Number, reference: Number, relative: float, absolute: float) -> bool:
    """Whether both are equal within the larger tolerance. A percentage is read both ways: 50% is 50 and 0.5."""
    scales = [Fraction(1)]
    if answer.percent != reference.percent:
        scales.append(Fraction(1, 100) if answer.percent else Fraction(100))
    room = max(Fraction(absolute), Fraction(relative) * abs(reference.value))
    return any(abs(answer.value * scale - reference.value) <= room for scale in scales)


def normalise(text: str, ignore: Sequence[str]) -> str:
    """Removes differences that do not count.

    >>> normalise(" The Cat. ", ["case", "punctuation", "articles", "space"])
    'cat'
    """
    if "case" in ignore:
        text = text.casefold()
    if "punctuation" in ignore:
        text = "".join(letter for letter in text if not unicodedata.category(letter).startswith("P"))
    if "articles" in ignore:
        text = ARTICLES.sub("", text)
    return "".join(text.split()) if "space" in ignore else text.strip()


# --- The kinds ---


Extract = Literal["auto", "all", "last_line", "boxed"]
WHERE = "where the answer is; auto: all of it (exact), the boxed or else last number (numeric)"


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
        known = [written(reference) for reference in self.references(Sample(prompt, ""))]
        ends = [solution_end(text) for text in known]
        if not known or any(self._can_match(text, end) for text, end in zip(known, ends, strict=True)):
            return ""
        number = last_number(ends[0] or "", alone="####" not in known[0])
        fits = "maths" if number is None else "numeric"
        return (
            f"the prompts' {self.field!r} is a worked solution that ends in {known[0].strip()[-20:]!r}, and an answer is right only "
            f"if it is that whole text. Set `rewards: {fits}`, which compares what they end in, or give rows the final answer alone"
        )

    def _can_match(self, text: str, end: str | None) -> bool:
        """Whether an answer can be expected to match a reference. `end`: the final answer of a worked solution."""
        on_its_line = self.extract == "last_line" and "\n" not in text.strip()
        return not end or on_its_line or normalise(text, self.ignore) == normalise(end, self.ignore)

    def reward(self, sample: Sample) -> RewardResult:
        wanted = self.references(sample)
        if not wanted:
            return MISSING
        answer = extract(sample.text, "all" if self.extract == "auto" else self.extract)
        if answer is None:
            return right(False, "no boxed answer")
        answer = normalise(answer, self.ignore)
        return right(any(answer == normalise(written(reference), self.ignore) for reference in wanted))


class Numeric(Referenced):
    """1 if the answer's number equals the reference's within a tolerance, else 0."""

    name = "numeric"
    in_process = True
    extract: Extract = Field("auto", description=WHERE)
    tolerance: float = Field(1e-6, ge=0, allow_inf_nan=False, description="largest relative difference of two numbers")
    absolute: float = Field(0.0, ge=0, allow_inf_nan=False, description="largest absolute difference of two numbers")

    def reward(self, sample: Sample) -> RewardResult:
        known = [last_number(written(reference)) for reference in self.references(sample)]
        wanted = [reference for reference in known if reference is not None]
        if not wanted:
            return RewardResult(None, error=f"the prompt's {self.field!r} contains no number")
        text = boxed(sample.text) if self.extract == "auto" else extract(sample.text, self.extract)
        if text is None:
            if self.extract != "auto":
                return right(False, "no boxed answer")
            text = sample.text
        found = last_number(text, alone=self.extract == "all")
        if found is None:
            return right(False, "no number")
        return right(any(close(found, reference, self.tolerance, self.absolute) for reference in wanted))


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
        fenced = [content for language, content in blocks(sample.text) if language in ("json", "")]
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
            text = written(reference)
            wanted += parse(f"${text}$", parsing_timeout=None) or parse(text, parsing_timeout=None)
        if not wanted:
            return RewardResult(None, error=f"math-verify cannot read the prompt's {self.field!r}")
        found = parse(sample.text, parsing_timeout=None)
        if not found:
            return right(False, "no mathematical expression")
        return right(bool(equal(wanted, found, timeout_seconds=None, raise_on_error=True)))
