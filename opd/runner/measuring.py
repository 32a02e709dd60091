"""What a stage measures on its held-out questions: the student, its teachers, and the plain average of their weights."""

from __future__ import annotations

from collections.abc import Sequence

from opd.evaluation import Measures, evaluate
from opd.models.average import weight_average
from opd.models.language_model import LanguageModel
from opd.runner.stage import StageRun
from opd.types import RewardResult, Sample, Sampling, TokenSampler


def measure_answers(run: StageRun, sampler: TokenSampler) -> dict[str, Measures]:
    """By domain; nothing where there are no questions."""
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
    )


def measure_student(run: StageRun) -> dict[str, Measures]:
    return measure_answers(run, run.engine)


def measure_teachers(run: StageRun) -> dict[str, dict[str, Measures]]:
    """Every teacher of the role `teacher` with a model of its own, on every domain: its own, and what it has forgotten."""
    return {
        name: _measure_model(run, run.teachers[name].model)
        for name in dict.fromkeys(run.routes.get("teacher", {}).values())
        if run.spec.teachers[name].has_model
        and not run.spec.teachers[name].of_student
        and not run.spec.teachers[name].view.crosses  # it would have to be asked in its own tokens
    }


def _measure_model(run: StageRun, model: LanguageModel) -> dict[str, Measures]:
    with model.resident() as here:
        return measure_answers(run, run.samplers.of(here))


def measure_weight_average(run: StageRun) -> dict[str, Measures]:
    models = [run.teachers[name].model for name in dict.fromkeys(run.routes.get("teacher", {}).values())]
    return measure_answers(run, run.samplers.of(weight_average(models)))
