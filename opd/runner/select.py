"""`select`: a stage trains only on domains that an earlier stage's evaluations choose, and is evaluated on all of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from opd.recipe import Recipe, Stage
from opd.runner.results import Selected, StageResult


def require_selections(recipe: Recipe) -> None:
    """Reject a stage that selects by evaluations that will not exist, if the recipe alone shows it."""
    named = {stage.name: stage for stage in recipe.stages}
    for stage in recipe.stages:
        if stage.select is not None:
            earlier = named[stage.select.stage]
            sources = (*earlier.prompts, *earlier.eval.further)
            evaluated = [source.only_domain for source in sources if source.only_domain is not None]
            if len(evaluated) == len(sources):  # otherwise the rows name their domains
                stage.select.require(stage.name, stage.named_domains, evaluated)


def require_evaluated(recipe: Recipe, chosen: Collection[str], stage: str, evaluated: Collection[str]) -> None:
    """The same check for stages to be carried out that select by a stage which is about to train."""
    for later in recipe.stages:
        if later.name in chosen and later.select is not None and later.select.stage == stage:
            later.select.require(later.name, later.named_domains, evaluated)


def selected(stage: Stage, results: Sequence[StageResult]) -> Selected | None:
    """The domains that an earlier stage's evaluations choose. None: the stage does not select."""
    if stage.select is None:
        return None
    earlier = next(result for result in results if result.name == stage.select.stage)
    domains = stage.named_domains
    values = {domain: found for domain in domains if (found := _values(earlier, domain))}
    stage.select.require(stage.name, domains, values)
    chosen = [domain for domain, found in values.items() if stage.select.chooses(found)]
    return Selected(earlier.name, chosen, [domain for domain in domains if domain not in chosen])


def narrowed(stage: Stage, found: Selected | None) -> Stage | None:
    """The stage with the chosen prompts and their teachers, still evaluated on all domains. None: no domain is chosen."""
    if found is None:
        return stage
    if not found.chosen:
        return None
    dropped = found.left_out
    measured = [*stage.eval.further, *(source for source in stage.prompts if source.domain in dropped)]
    changes = {
        "prompts": [source for source in stage.prompts if source.domain not in dropped],
        "teachers": _teachers(stage, dropped),
        "eval": stage.eval.model_copy(update={"further": measured if stage.eval.prompts else []}),
    }
    return stage.model_copy(update=changes)


def _values(result: StageResult, domain: str) -> list[float]:
    """The domain's evaluations, from before the first step to after the last."""
    before = result.before.get(domain)
    known = [before.value if before is not None else None, *(line.get(domain) for line in result.history)]
    return [value for value in known if value is not None]


def _teachers(stage: Stage, dropped: Collection[str]) -> dict[str, object]:
    """The teachers that still have something to score."""
    kept: dict[str, object] = {}
    for name, kind in stage.teachers.items():
        alone = sum(other.role == kind.role for other in stage.teachers.values()) == 1
        if kind.domains is None and (alone or name not in dropped):
            kept[name] = kind
        elif kind.domains is not None and (left := [domain for domain in kind.domains if domain not in dropped]):
            kept[name] = kind.model_copy(update={"domains": left})
    return kept
