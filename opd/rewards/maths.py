"""Mathematical equality, by math-verify."""

from __future__ import annotations

from typing import Any

from opd.rewards import answers
from opd.rewards.reward import right
from opd.rewards.texts import Referenced
from opd.types import RewardResult, Sample


class Maths(Referenced):
    """math-verify finds answer and reference equal. Its own time limits use signals, so they are off; the pool keeps the time."""

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
