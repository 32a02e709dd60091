"""Is this answer right? The verifier is named by the prompt; what cannot be checked is None, never a zero."""

from __future__ import annotations

from collections.abc import Sequence

from opd.data.sources import GYM, TASK
from opd.data.tasks import get_task
from opd.types import Judgement, Sample


def verify(samples: Sequence[Sample]) -> list[Judgement]:
    return [_verify(sample) for sample in samples]


def _verify(sample: Sample) -> Judgement:
    prompt = sample.prompt
    name = prompt.fields.get("verifier")
    if name is None:
        return Judgement(None, error="the prompt names no verifier")
    if name.startswith(TASK):
        return Judgement(float(get_task(name.removeprefix(TASK)).verify(prompt, sample.text)))
    if name.startswith(GYM):
        return _gym(name.removeprefix(GYM), sample)
    if name == "exact":
        return Judgement(float(sample.text.strip() == str(prompt.fields["answer"]).strip()))
    return Judgement(None, error=f"unknown verifier {name!r}")


def _gym(task: str, sample: Sample) -> Judgement:
    import reasoning_gym

    try:
        score = reasoning_gym.get_score_answer_fn(task)(answer=sample.text.strip(), entry=sample.prompt.fields["entry"])
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        ZeroDivisionError,
        OverflowError,
        RecursionError,
    ) as error:
        return Judgement(None, error=f"{type(error).__name__}: {error}")  # scorers trip over garbage: not a zero
    return Judgement(float(score))
