"""What a stage measures on its held-out questions: the student, its teachers, and the plain average of their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from opd.evaluation import Measures, evaluate
from opd.evaluation.passk import is_right
from opd.models.average import weight_average
from opd.models.language_model import LanguageModel
from opd.runner.stage import StageRun
from opd.types import RewardResult, Sample, Sampling, TokenSampler

STUDENT = "student"  # whose answers, in answers.jsonl; of a teacher: teacher:NAME


def measure_answers(run: StageRun, sampler: TokenSampler, who: str) -> dict[str, Measures]:
    """By domain; nothing where there are no questions. A few answers are kept to be written down."""
    if not run.questions:
        return {}
    spec, rollout = run.spec.eval, run.spec.rollout

    def reward(samples: Sequence[Sample]) -> list[RewardResult]:
        with run.rewarding:
            return run.world.share(lambda: run.rewarder(samples))

    limit = spec.max_new_tokens or rollout.max_new_tokens
    return evaluate(
        sampler,
        run.questions,
        Sampling(limit, stop_ids=run.stop_ids, stop_strings=tuple(rollout.stop)),
        run.student.tokenizer,
        greedy=spec.greedy,
        k=spec.k,
        temperature=spec.temperature,
        seed=run.spec.seed,
        check_stop=run.check_stop,
        reward=reward,
        on_answers=partial(_keep_answers, run, who),
    )


def _keep_answers(
    run: StageRun, who: str, domain: str, samples: Sequence[Sample], results: Sequence[RewardResult]
) -> None:
    """To the same few questions every time, so that before and after can be laid side by side."""
    asked = run.questions[domain][: run.spec.log.samples] if run.world.leads else ()
    run.answered += [
        {
            "who": who,
            "domain": domain,
            "prompt_id": question.prompt.id,
            "prompt": run.student.tokenizer.decode(question.prompt_ids.tolist()),
            "response": sample.text,
            "reward": result.reward,
            "right": None if math.isnan(right := is_right(result)) else bool(right),
        }
        for question, sample, result in zip(asked, samples, results, strict=False)
    ]


def measure_student(run: StageRun) -> dict[str, Measures]:
    return measure_answers(run, run.engine, STUDENT)


def measure_teachers(run: StageRun) -> dict[str, dict[str, Measures]]:
    """Every teacher of the role `teacher` with a model of its own, on every domain: its own, and what it has forgotten."""
    return {
        name: _measure_model(run, run.teachers[name].model, name)
        for name in dict.fromkeys(run.routes.get("teacher", {}).values())
        if run.spec.teachers[name].has_model
        and not run.spec.teachers[name].of_student
        and not run.spec.teachers[name].view.crosses  # it would have to be asked in its own tokens
    }


def _measure_model(run: StageRun, model: LanguageModel, name: str) -> dict[str, Measures]:
    with model.resident() as here:
        return measure_answers(run, run.samplers.of(here), f"teacher:{name}")


def measure_weight_average(run: StageRun) -> dict[str, Measures]:
    models = [run.teachers[name].model for name in dict.fromkeys(run.routes.get("teacher", {}).values())]
    return measure_answers(run, run.samplers.of(weight_average(models)), "average")
