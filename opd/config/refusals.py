"""Recipes that make no sense as a whole: keys that would do nothing, and combinations that cannot work.

What a key may be is said where it is declared; here are the cross-checks. All of them need the recipe alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from opd.config.stage import Recipe, Stage
from opd.errors import RecipeError
from opd.objective.term import present_authors, refusals
from opd.settings import StageView, changed

STAGE_PREFIX = "stage:"  # `student: stage:NAME` is the model that stage NAME saved
METRIC = "pass@1"


def refuse_recipe(recipe: Recipe) -> None:
    """What stages say about each other."""
    earlier: list[str] = []
    for stage in recipe.stages:
        models = [("student", stage.student.model)]
        models += [(f"teachers.{name}", ref.model) for name, kind in stage.teachers.items() for ref in kind.reads()]
        for key, model in models:
            name = model.removeprefix(STAGE_PREFIX)
            if name != model and name not in earlier:
                raise RecipeError(
                    f"stages.{stage.name}.{key}: model {model!r}: no earlier stage is called {name!r}; "
                    f"there are {', '.join(earlier) or 'none'}."
                )
        earlier.append(stage.name)
        first = recipe.stages[0].log
        if (stage.log.to, stage.log.project) != (first.to, first.project):
            raise RecipeError(
                f"stages.{stage.name}.log: trackers are opened once for the whole run. Set `to` and `project` at the "
                "top, not in a stage."
            )


def refuse_stage(stage: Stage, where: str = "") -> None:
    """Every mistake of a stage, in one message."""
    found = [where + mistake for check in CHECKS for mistake in check(stage)]
    if found:
        raise RecipeError("\n".join(found))


def _rollouts(stage: Stage) -> Iterator[str]:
    rollout, shares = stage.rollout, present_authors(stage.rollout)
    if rollout.teacher_mix and not shares["student"]:
        yield (
            f"rollout.teacher_mix {rollout.teacher_mix} mixes the teacher into the student's tokens, but the other "
            "writers answer every prompt. Set teacher_mix: 0."
        )
    if rollout.temperature == 0 and (rollout.top_p < 1 or rollout.top_k):
        yield "rollout.temperature 0 takes the likeliest token, so top_p and top_k do nothing. Drop them, or sample."
    if rollout.temperature == 0 and rollout.samples > 1 and shares["student"] == 1:
        yield f"rollout.temperature 0 gives {rollout.samples} equal samples of every prompt. Set samples: 1, or sample."
    if stage.train.minibatches > rollout.prompts:
        yield (
            f"train.minibatches ({stage.train.minibatches}) must not be more than rollout.prompts ({rollout.prompts}): "
            "groups are never split. Lower it."
        )


def _authors(stage: Stage) -> Iterator[str]:
    """Tokens that nobody trains on."""
    trained = {author for term in stage.objective for author in term.authors}
    for author, share in present_authors(stage.rollout).items():
        if share and author not in trained and author != "student":
            yield (
                f"rollout.{author}_share {share:g}, but no term of the objective trains on {author} tokens. "
                "Add a term with it in `on:`, or set the share to 0."
            )


def _coefficients(stage: Stage) -> Iterator[str]:
    steps = range(1, min(stage.train.steps, 10_000) + 1)
    waits = any("plateau" in (term.coefficient.until, term.coefficient.after) for term in stage.objective)
    if not waits and not any(term.coefficient.at(step, None) for term in stage.objective for step in steps):
        yield f"objective: every coefficient is 0 in all {stage.train.steps} steps, so nothing is trained."


def _objective(stage: Stage) -> Iterator[str]:
    """What the terms and their parts find themselves."""
    yield from refusals(StageView.of(stage))


def _choices(stage: Stage) -> Iterator[str]:
    view = StageView.of(stage)
    yield from stage.sampler.refuse(view)
    for number, source in enumerate(stage.prompts):
        yield from (f"prompts.{number}: {mistake}" for mistake in source.refuse(view))
    for domain, rewards in stage.rewards.domains.items():
        for number, reward in enumerate(rewards):
            yield from (f"rewards.{domain}.{number}: {mistake}" for mistake in reward.refuse(view))


def _teachers(stage: Stage) -> Iterator[str]:
    asked = list(dict.fromkeys(["teacher", *(role for term in stage.objective for role in term.roles)]))
    for name, kind in stage.teachers.items():
        if kind.role not in asked:  # `teacher` is there for evaluation and sampling too
            yield (
                f"teachers.{name}: nobody asks for the role {kind.role!r}; the roles asked for are {', '.join(asked)}."
            )
        if kind.domains is not None and len(set(kind.domains)) < len(kind.domains):
            yield f"teachers.{name}.domains: {', '.join(kind.domains)}: a domain comes twice."
        for choice in (kind, kind.view):
            yield from (f"teachers.{name}: {mistake}" for mistake in choice.refuse(StageView.of(stage)))
    asking = [name for name, kind in stage.teachers.items() if kind.role == "teacher"]
    if stage.eval.prompts and stage.eval.weight_average and len(asking) < 2:
        yield f"eval.weight_average averages teachers, but the number of teachers is {len(asking)}. Set it to false."
    yield from _offers(stage)


def _offers(stage: Stage) -> Iterator[str]:
    """What teachers cannot give: a signal that a term needs, or a model to sample from."""
    updates = stage.train.epochs * stage.train.minibatches
    for number, term in enumerate(stage.objective):
        place = "objective" if len(stage.objective) == 1 else f"objective term {number}"
        for role, signal in term.needs(updates).signals:
            for name, kind in stage.teachers.items():
                if kind.role == role and signal not in kind.offers:
                    yield (
                        f"{place}: {term.name} needs {signal!r} of the role {role!r}, and teachers.{name}, of kind "
                        f"{kind.name}, offers {', '.join(sorted(kind.offers))}. Use another form of loss, or another "
                        "kind of teacher."
                    )
    drawn = {f"rollout.{key}": getattr(stage.rollout, key) for key in ("teacher_share", "teacher_mix")}
    drawn["eval.weight_average"] = bool(stage.eval.prompts) and stage.eval.weight_average
    for key in (key for key, value in drawn.items() if value):
        for name, kind in stage.teachers.items():
            if kind.role == "teacher" and not kind.has_model:
                yield (
                    f"{key} needs a model in this process, but teachers.{name}, of kind {kind.name}, has none. Drop it."
                )


def _evaluation(stage: Stage) -> Iterator[str]:
    spec, given = stage.eval, changed(stage.eval)
    periodic = bool(spec.every and spec.prompts)
    if "temperature" in given and not spec.k:
        yield "eval.temperature belongs to the sampled evaluation, but eval.k is 0. Set k, or drop it."
    if spec.early_stop is not None and not periodic:
        yield "eval.early_stop needs periodic evaluations: set eval.every and eval.prompts, or drop it."
    elif spec.early_stop is not None:
        yield from spec.early_stop.refuse(StageView.of(stage))
    if "metric" in given and not spec.prompts:
        yield (
            f"eval.metric {spec.metric!r} is watched in evaluations, but eval.prompts is 0. Set it, or drop the metric."
        )
    waits = any("plateau" in (term.coefficient.until, term.coefficient.after) for term in stage.objective)
    if "plateau" in given and not waits:
        yield "eval.plateau is for coefficients that wait for one (`until: plateau`), but none does. Drop it."
    if spec.metric != METRIC and not spec.metric.startswith(f"{METRIC}/"):
        yield f"eval.metric {spec.metric!r}: expected {METRIC}, or {METRIC}/DOMAIN."


def _files(stage: Stage) -> Iterator[str]:
    if stage.checkpoint.keep_every and not stage.checkpoint.every:
        yield (
            "checkpoint.keep_every keeps some of the checkpoints that checkpoint.every makes, "
            "but checkpoint.every is 0. Set it."
        )
    if "samples_every" in changed(stage.log) and not stage.log.samples:
        yield "log.samples_every says how often samples are written, but log.samples is 0. Drop it."
    for number, tracker in enumerate(stage.log.to):
        if tracker in stage.log.to[:number]:
            yield f"log.to: {tracker.name} comes twice with the same settings. Drop one."
        yield from tracker.refuse(StageView.of(stage))


CHECKS = (_rollouts, _authors, _coefficients, _objective, _choices, _teachers, _evaluation, _files)
