"""`select`: a stage trains on those domains alone that an earlier stage's evaluations choose, and is measured on all of them."""

from __future__ import annotations

from collections.abc import Sequence

from opd.config import Stage
from opd.errors import RecipeError
from opd.runner.results import StageResult


def narrowed(stage: Stage, results: Sequence[StageResult]) -> Stage | None:
    """The stage with what is left of its prompts and teachers; None: nothing is chosen."""
    if stage.select is None:
        return stage
    earlier = next(result for result in results if result.name == stage.select.stage)
    domains = list(dict.fromkeys(source.domain for source in stage.prompts if source.domain is not None))
    values = {domain: _values(earlier, domain) for domain in domains}
    unknown = [domain for domain, found in values.items() if not found]
    if unknown:
        raise RecipeError(
            f"stages.{stage.name}.select: stage {earlier.name!r} has not evaluated {', '.join(unknown)}. Give it such prompts, or "
            "name them in its eval.further."
        )
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
