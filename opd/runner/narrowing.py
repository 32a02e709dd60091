"""`select`: a stage trains on those domains alone that an earlier stage's evaluations choose, and is measured on all of them."""

from __future__ import annotations

from collections.abc import Sequence

from opd.config import Recipe, Stage
from opd.runner.results import StageResult


def require_selections(recipe: Recipe) -> None:
    """Refuse a stage that selects by evaluations which there will not be, where the recipe alone shows it."""
    named = {stage.name: stage for stage in recipe.stages}
    for stage in recipe.stages:
        if stage.select is not None:
            earlier = named[stage.select.stage]
            evaluated = [source.only_domain for source in (*earlier.prompts, *earlier.eval.further)]
            if None not in evaluated:  # else rows say what they are of
                stage.select.require(stage.name, stage.named_domains, evaluated)


def narrowed(stage: Stage, results: Sequence[StageResult]) -> Stage | None:
    """The stage with what is left of its prompts and teachers; None: nothing is chosen."""
    if stage.select is None:
        return stage
    earlier = next(result for result in results if result.name == stage.select.stage)
    domains = stage.named_domains
    values = {domain: found for domain in domains if (found := _values(earlier, domain))}
    stage.select.require(stage.name, domains, values)
    dropped = {domain for domain, found in values.items() if not stage.select.chooses(found)}
    if len(dropped) == len(domains):
        return None
    measured = [*stage.eval.further, *(source for source in stage.prompts if source.domain in dropped)]
    changes = {
        "prompts": [source for source in stage.prompts if source.domain not in dropped],
        "teachers": _teachers(stage, dropped),
        "eval": stage.eval.model_copy(update={"further": measured if stage.eval.prompts else []}),
    }
    return stage.model_copy(update=changes)


def _values(result: StageResult, domain: str) -> list[float]:
    """From before the first step to after the last."""
    before = result.before.get(domain)
    known = [before.value if before is not None else None, *(line.get(domain) for line in result.history)]
    return [value for value in known if value is not None]


def _teachers(stage: Stage, dropped: set[str]) -> dict[str, object]:
    """Without those that have nothing left to score."""
    kept: dict[str, object] = {}
    for name, kind in stage.teachers.items():
        alone = sum(other.role == kind.role for other in stage.teachers.values()) == 1
        if kind.domains is None and (alone or name not in dropped):
            kept[name] = kind
        elif kind.domains is not None and (left := [domain for domain in kind.domains if domain not in dropped]):
            kept[name] = kind.model_copy(update={"domains": left})
    return kept
