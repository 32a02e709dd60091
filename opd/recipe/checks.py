"""Checks across keys: keys that would do nothing, and combinations that cannot work.

The values of one key are checked where it is declared. These checks read the recipe only.
"""

from __future__ import annotations

from collections.abc import Iterator

from opd.common.errors import RecipeError
from opd.data.prompts import DOMAIN
from opd.objective.term import module_mistakes, objective_mistakes, present_authors
from opd.recipe.graph import STAGE_PREFIX
from opd.recipe.stage import Recipe, Stage
from opd.registry import StageView, changed

METRIC = "pass@1"


def require_valid_recipe(recipe: Recipe) -> None:
    """Check what stages say about each other."""
    _require_same_retain(recipe)
    named = {stage.name: stage for stage in recipe.stages}
    for stage in recipe.stages:
        if stage.select is not None and not named[stage.select.stage].eval.prompts:
            raise RecipeError(
                f"stages.{stage.name}.select: stage {stage.select.stage!r} is not evaluated (eval.prompts is 0), so nothing can be "
                "chosen by it. Set eval.prompts there."
            )
        first = recipe.stages[0].log
        if (stage.log.to, stage.log.project) != (first.to, first.project):
            raise RecipeError(
                f"stages.{stage.name}.log: trackers are opened once for the whole run. Set `to` and `project` at the "
                "top, not in a stage."
            )


def _require_same_retain(recipe: Recipe) -> None:
    """All stages share one rollout log, whose oldest segments are deleted first."""
    keeping = [stage.name for stage in recipe.stages if stage.store.retain is None]
    if len(keeping) == len(recipe.stages):
        return
    if keeping:
        raise RecipeError(
            f"stages.{keeping[0]}.store.retain: all stages share one rollout store, and other stages delete from it. Set store.retain at the "
            "top, for all of them."
        )
    for stage in recipe.stages:
        read = [(f"prompts.{number}.source", source.source) for number, source in enumerate(stage.prompts)]
        read += [(f"teachers.{name}.run", run) for name, kind in stage.teachers.items() for run in kind.earlier()]
        for key, where in read:
            if where.startswith(STAGE_PREFIX):
                raise RecipeError(
                    f"stages.{stage.name}.{key}: {where!r} reads the rollouts of that stage, but store.retain deletes them. "
                    "Set store.retain: null."
                )


def require_valid_stage(stage: Stage, where: str = "") -> None:
    """Raise all mistakes of a stage in one message."""
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
    if rollout.temperature == 0 and rollout.by_sample.count(None) > 1 and shares["student"] == 1:
        yield f"rollout.temperature 0 gives {rollout.samples} equal samples of every prompt. Set samples: 1, or sample."
    if rollout.rescue is not None:
        yield from (f"rollout.rescue: {mistake}" for mistake in rollout.rescue.mistakes(rollout.samples))
        if rollout.rescue.hint is not None and rollout.rescue.hint.by == "teacher" and not stage.teachers:
            yield "rollout.rescue.hint: there is no teacher to write it. Give one, or set by: student."
    if rollout.takeover is not None:
        yield from (f"rollout.takeover: {mistake}" for mistake in rollout.takeover.mistakes(stage))
    if rollout.experience is not None:
        if not any("experience" in kind.view.shows() for kind in stage.teachers.values()):
            yield "rollout.experience is written, and no teacher's view shows it: name {experience} in a template, or drop it."
        if rollout.experience.by == "teacher" and not stage.teachers:
            yield "rollout.experience: there is no teacher to write it. Give one, or set by: student."
    if stage.train.minibatches > rollout.prompts:
        yield (
            f"train.minibatches ({stage.train.minibatches}) must not be more than rollout.prompts ({rollout.prompts}): "
            "groups are never split. Lower it."
        )


def _replaced(stage: Stage) -> Iterator[str]:
    """Failed answers that are replaced are the student's: some group, or some answer, must be."""
    rollout = stage.rollout
    writes = "student" in rollout.ever_positive and None in rollout.by_sample
    if rollout.rescue is not None:
        fixed = [writer.name for writer in rollout.writers if writer.samples]
        if not writes:
            yield "rollout.rescue answers again what the student failed, but others write all answers. Drop it."
        elif fixed:
            yield f"rollout.rescue is for groups that the student wrote alone, and the writer {fixed[0]} has samples of every group. Drop one."
        elif rollout.teacher_mix:
            yield f"rollout.rescue is for groups that the student wrote alone, and teacher_mix {rollout.teacher_mix} mixes a teacher in. Drop one."
    shown = any(writer.author == "student" for writer in rollout.writers)
    if rollout.demonstrations is not None and not writes and not shown:
        yield "rollout.demonstrations replaces answers that the student failed, but others write all answers. Drop it."


def _teacher_prefix(stage: Stage) -> Iterator[str]:
    rollout, prefix = stage.rollout, stage.rollout.teacher_prefix
    if prefix is None:
        return
    if not any(kind.role == "teacher" for kind in stage.teachers.values()):
        yield "rollout.teacher_prefix: there is no teacher to write it. Give one, or drop it."
    if max(prefix.tokens, prefix.to) >= rollout.max_new_tokens:
        yield (
            f"rollout.teacher_prefix of {max(prefix.tokens, prefix.to)} tokens leaves the student none of rollout.max_new_tokens "
            f"{rollout.max_new_tokens}. Lower it."
        )
    if not present_authors(rollout)["student"] or None not in rollout.by_sample:
        yield "rollout.teacher_prefix begins the student's answers, but others write all of them. Drop it."
    if stage.checkpoint.resume == "exact":
        yield "rollout.teacher_prefix with checkpoint.resume exact: the student draws no token of the prefix. Use prefill."


def _segment(stage: Stage) -> Iterator[str]:
    """Settings that need whole answers in the step that begins them."""
    rollout = stage.rollout
    if rollout.segment is None:
        return
    key = f"rollout.segment {rollout.segment}"
    if rollout.segment >= rollout.max_new_tokens:
        yield f"{key} is not below rollout.max_new_tokens {rollout.max_new_tokens}, so no answer would span steps. Lower it."
    if rollout.staleness:
        yield f"{key} with rollout.staleness {rollout.staleness}: sampling ahead of training samples whole answers. Drop one."
    if stage.environments:
        yield f"{key} with an environment: an episode is played within one step. Drop one."
    whole = (
        "rescue",
        "demonstrations",
        "takeover",
        "experience",
        "contrast",
        "teacher_prefix",
        "share_schedule",
        "length_schedule",
    )
    for name in whole:
        if getattr(rollout, name):
            yield f"{key} with rollout.{name}, which decides about the answers of a step, and these span several. Drop one."
    if rollout.replaying:
        yield f"{key} with the writer replay: answers are repeated whole. Drop one."
    if rollout.mixed_versions == "refuse":
        yield f"{key} continues answers with newer weights, and rollout.mixed_versions is refuse. Set it to allow."
    if stage.store.retain is not None:
        yield f"{key} continues answers of earlier steps, and store.retain {stage.store.retain} may delete them. Set store.retain: null."
    if not stage.train.learn:
        yield f"{key} with train.learn false: no step needs to be short, and answers would be unfinished in the end. Drop it."


def _staleness(stage: Stage) -> Iterator[str]:
    """Settings that do not work when sampling runs ahead of training."""
    rollout = stage.rollout
    if not rollout.staleness:
        return
    key = f"rollout.staleness {rollout.staleness}"
    if not present_authors(rollout)["student"]:
        yield f"{key} lets sampling run ahead of training, but the student writes nothing. Set it to 0."
    of_teachers = [
        name for name in ("teacher_share", "teacher_mix") if getattr(rollout, name, 0) or name in rollout.ever_positive
    ]
    of_teachers += [f"writers.{number}" for number, writer in enumerate(rollout.writers) if writer.samples_teacher]
    of_teachers += ["teacher_prefix"] if rollout.teacher_prefix is not None else []
    of_teachers = [f"rollout.{name}" for name in of_teachers]
    of_teachers += [f"monitors.watch {monitor.name}" for monitor in stage.monitors.watch if monitor.samples_teacher]
    for name in of_teachers:
        yield f"{key} with {name}: a teacher would have to sample and score at once. Set one of them to 0."
    for name in ("rescue", "takeover", "experience", "demonstrations"):
        if getattr(rollout, name) is not None:
            yield f"{key} with rollout.{name}, which depends on a batch's rewards and the weights of its step. Drop one of them."
    if rollout.contrast:
        yield (
            f"{key} with rollout.contrast {rollout.contrast}: how many prompts a step takes would be known only once they are rewarded. "
            "Set one of them to 0."
        )
    if rollout.mixed_versions == "refuse":
        yield f"{key} with rollout.mixed_versions refuse: an interrupted run could not resume. Set it to allow."
    if stage.checkpoint.resume == "exact":
        yield (
            f"{key} with checkpoint.resume exact: which weights drew a token depends on how fast the two threads were. "
            "Set it to prefill."
        )


def _environment(stage: Stage) -> Iterator[str]:
    rollout = stage.rollout
    if not stage.environments:
        return
    places = {f"prompts.{number}.environment": source.environment for number, source in enumerate(stage.prompts)}
    for key, environment in {"rollout.environment": rollout.environment, **places}.items():
        if environment is None:
            continue
        yield from (f"{key}: {mistake}" for mistake in environment.check(StageView.of(stage)))
        if environment.turn_tokens is not None and environment.turn_tokens > rollout.max_new_tokens:
            yield (
                f"{key}.turn_tokens {environment.turn_tokens} is above rollout.max_new_tokens {rollout.max_new_tokens}, "
                "which counts all turns. Lower it."
            )
        if environment.history == "split":
            yield from (f"{key}.history split {mistake}" for mistake in _split_turns(stage))
    if not stage.sampler.takes_turns:
        yield (
            f"rollout.environment with sampler {stage.sampler.name}: it takes all requests of a batch at once, and an episode's next turn "
            "is requested later. Use the built-in sampler or vllm."
        )
    if stage.checkpoint.resume == "exact":
        outside = next((one for one in stage.environments if one.effects == "outside"), None)
        if outside is not None:
            yield (
                f"rollout.environment {outside.name} with checkpoint.resume exact: its effects are outside, so an interrupted call is not "
                "repeated, and the run cannot end as if nothing had happened. Use prefill."
            )
    fixed = next((one for one in stage.environments if not one.replays), None)
    if fixed is not None and (rollout.takeover is not None or stage.checkpoint.resume == "exact"):
        what = "rollout.takeover" if rollout.takeover is not None else "checkpoint.resume exact"
        yield f"rollout.environment {fixed.name} with {what}: turns are asked for from outside, so none can be played again. Drop one."
    others = [key for key in ("rescue", "demonstrations", "teacher_mix", "teacher_prefix") if getattr(rollout, key)]
    if others:
        yield f"rollout.environment with rollout.{others[0]}, which answers a prompt in one turn. Drop one."
    if any(prompt.brings_answers for prompt in stage.prompts):
        yield "rollout.environment with prompts that bring their answers: nothing is played. Drop it."


def _split_turns(stage: Stage) -> Iterator[str]:
    """What needs whole rollouts, or the text that the prompt was rendered to."""
    viewed = [name for name, teacher in stage.teachers.items() if not teacher.view.as_sampled]
    if viewed:
        yield f"with the view of teachers.{viewed[0]}, which is shown for a prompt's first turn only. Set history to keep."
    if not stage.train.learn:
        yield "with train.learn false: scores are kept for whole rollouts. Set history to keep."


def _plain_text(stage: Stage) -> Iterator[str]:
    """Sources of plain text, whose every token is data."""
    for number, source in enumerate(stage.prompts):
        if not source.gives_plain_text:
            continue
        if not any("data" in term.authors for term in stage.objective):
            yield (
                f"prompts.{number}.plain_text, but no term of the objective trains on data tokens. Add one, such as "
                "{form: cross_entropy, domains: [DOMAIN]}."
            )
        if stage.rollout.environment is not None:
            yield f"prompts.{number}.plain_text with rollout.environment: nobody answers plain text. Drop one of them."


def _authors(stage: Stage) -> Iterator[str]:
    """Tokens that no term trains on."""
    trained = {author for term in stage.objective for author in term.authors}
    if any(kind.reads_others for kind in stage.modules.values()):
        return  # answers by others train a module
    for key, writer in stage.rollout.writers_by_key.items():
        part = f"{writer.share:g}" if not writer.samples else f"{writer.name} with samples {writer.samples}"
        if (
            (key in stage.rollout.ever_positive or writer.samples)
            and writer.author not in trained
            and writer.author != "student"
        ):
            yield (
                f"rollout.{key} {part}, but no term of the objective trains on {writer.author} tokens. "
                "Add a term with it in `on:`, or drop the share."
            )


def _demonstrations(stage: Stage) -> Iterator[str]:
    spec = stage.rollout.demonstrations
    if spec is None:
        return
    if not any("teacher" in term.authors for term in stage.objective):
        yield (
            "rollout.demonstrations, but no term of the objective trains on teacher tokens. Add one, such as {form: cross_entropy, "
            "on: [teacher]}: terms with ratios do not work, because the log-probs of the author are not known."
        )
    if spec.endpoint is None and not any(kind.role == "teacher" for kind in stage.teachers.values()):
        yield "rollout.demonstrations: neither an endpoint nor a teacher writes them. Set endpoint, or give a teacher."
    if spec.cut != "none" and stage.checkpoint.resume == "exact":
        yield "rollout.demonstrations.cut with checkpoint.resume exact: a teacher draws no token of what is kept. Use prefill."
    if spec.by is not None:
        yield from (f"rollout.demonstrations.by: {mistake}" for mistake in spec.by.check(StageView.of(stage)))
    if stage.rollout.rescue is not None:
        yield "rollout.demonstrations and rollout.rescue both replace answers that failed. Drop one."
    if stage.rollout.contrast:
        yield "rollout.demonstrations with rollout.contrast: groups that were all wrong would be dropped first. Set contrast: 0."


def _coefficients(stage: Stage) -> Iterator[str]:
    steps = range(1, min(stage.train.steps, 10_000) + 1)
    waits = any("plateau" in (term.coefficient.until, term.coefficient.after) for term in stage.objective)
    if (
        stage.objective
        and not waits
        and not any(term.coefficient.at(step, None) for term in stage.objective for step in steps)
    ):
        yield f"objective: every coefficient is 0 in all {stage.train.steps} steps, so nothing is trained."


def _objective(stage: Stage) -> Iterator[str]:
    """The checks of the terms and their parts."""
    if (
        not stage.objective
        and stage.train.learn
        and not any(kind.own and kind.learns for kind in stage.modules.values())
    ):
        yield "objective: it has no term, and no module learns by itself. Add a term, such as objective: {form: direct}."
    yield from objective_mistakes(StageView.of(stage))
    yield from module_mistakes(stage.objective, stage.modules)
    for name, kind in stage.modules.items():
        yield from (f"modules.{name}: {mistake}" for mistake in kind.check(StageView.of(stage)))
    yield from _hidden_spaces(stage)


def _hidden_spaces(stage: Stage) -> Iterator[str]:
    """Terms on hidden states read those of one model."""
    roles = {f"objective: {term.name}": term.role for term in stage.objective if term.one_model}
    roles |= {f"modules.{name}": kind.maps_to for name, kind in stage.modules.items() if kind.maps_to}
    for place, role in roles.items():
        found = {name: kind for name, kind in stage.teachers.items() if kind.role == role}
        if len(found) != 1 and place.startswith("modules"):
            yield (
                f"{place}: projectors map to the hidden space of one teacher, and the role {role!r} has {', '.join(found) or 'none'}. "
                "Give each teacher a role of its own, with a module and a dskd term for each."
            )
        for name in (name for name, kind in found.items() if kind.blends):
            yield f"{place}: teachers.{name} is a mixture, which has no hidden states of its own. Name a single model."


def _overlap(stage: Stage) -> Iterator[str]:
    """The overlap of likeliest ids needs distributions over the student's own ids."""
    if not stage.overlap:
        return
    key = "log.overlap" if stage.log.overlap else "curriculum overlap"
    if stage.log.overlap not in (0, stage.overlap):
        yield f"log.overlap {stage.log.overlap} and k {stage.overlap} of curriculum overlap: one number is measured. Drop log.overlap."
    needs = [need for term in stage.objective for need in term.needs(stage.train.updates).possible]
    if not {("teacher", "hidden"), ("teacher", "topk")} & {*needs}:
        yield (
            f"{key} compares distributions, and no term asks teachers for more than the log-probs of given tokens. Add a term such as "
            "{form: direct}, or drop it."
        )
    least = min(
        [k for term in stage.objective for role, k in term.needs(stage.train.updates).topk if role == "teacher"],
        default=None,
    )
    limited = [name for name, kind in stage.teachers.items() if kind.role == "teacher" and "hidden" not in kind.offers]
    if limited and least is not None and least < stage.overlap:
        yield f"{key} {stage.overlap}: teachers.{limited[0]} gives the {least} likeliest ids that a term asks for. Lower it."
    crossed = [name for name, kind in stage.teachers.items() if kind.role == "teacher" and kind.view.crosses]
    if crossed:
        yield f"{key}: the tokenizer of teachers.{crossed[0]} differs, so its ids cannot be compared. Drop it."


def _choices(stage: Stage) -> Iterator[str]:
    view = StageView.of(stage)
    yield from stage.sampler.check(view)
    yield from stage.shares.check(view)
    if stage.curriculum is not None:
        yield from (f"curriculum: {mistake}" for mistake in stage.curriculum.check(view))
    yield from _overlap(stage)
    for monitor in stage.monitors.watch:
        yield from (f"monitors.watch: {mistake}" for mistake in monitor.check(view))
    for key, writer in stage.rollout.writers_by_key.items():
        yield from (f"rollout.{key}: {mistake}" for mistake in writer.check(view))
    for name in ("share_schedule", "length_schedule"):
        schedule = getattr(stage.rollout, name)
        if schedule is not None:
            yield from (f"rollout.{name}: {mistake}" for mistake in schedule.check(view))
    for number, source in enumerate(stage.prompts):
        yield from (f"prompts.{number}: {mistake}" for mistake in source.check(view))
    for number, source in enumerate(stage.eval.further):
        yield from (f"eval.further.{number}: {mistake}" for mistake in source.check(view))
    for domain, rewards in stage.rewards.domains.items():
        for number, reward in enumerate(rewards):
            yield from (f"rewards.{domain}.{number}: {mistake}" for mistake in reward.check(view))


def _teachers(stage: Stage) -> Iterator[str]:
    asked = list(dict.fromkeys(["teacher", *(role for term in stage.objective for role in term.roles)]))
    for name, kind in stage.teachers.items():
        if kind.role not in asked:  # `teacher` is there for evaluation and sampling too
            yield (
                f"teachers.{name}: no term asks for the role {kind.role!r}; the roles asked for are {', '.join(asked)}."
            )
        if kind.domains is not None and len(set(kind.domains)) < len(kind.domains):
            yield f"teachers.{name}.domains: {', '.join(kind.domains)}: a domain is listed twice."
        if kind.view.chat_template == "teacher" and not kind.reads():
            yield (
                f"teachers.{name}.view: chat_template teacher, but a teacher of kind {kind.name} has no chat template of its own. "
                "Drop it."
            )
        if kind.view.by_turn and not kind.has_model:
            yield (
                f"teachers.{name}.view {kind.view.name}: every turn is a text of its own, and a teacher of kind {kind.name} reads one text "
                "per answer. Use a model in this process."
            )
        for choice in (kind, kind.view):
            yield from (f"teachers.{name}: {mistake}" for mistake in choice.check(StageView.of(stage)))
    if stage.route != DOMAIN and not stage.teachers:
        yield f"route {stage.route!r} says which teacher scores a prompt, but there is none. Drop it."
    asking = [name for name, kind in stage.teachers.items() if kind.role == "teacher"]
    if stage.eval.prompts and stage.eval.weight_average and len(asking) < 2:
        yield f"eval.weight_average averages teachers, but the number of teachers is {len(asking)}. Set it to false."
    for name in asking if stage.eval.prompts and stage.eval.weight_average else ():
        if stage.teachers[name].has_model and not stage.teachers[name].has_plain_weights:
            yield f"eval.weight_average averages weights, and those of teachers.{name} are quantised. Set it to false."
    yield from _offers(stage)


def _by_teachers(stage: Stage) -> list[str]:
    """Keys of `rollout` under which a teacher samples tokens to be trained on."""
    rollout = stage.rollout
    found = [f"rollout.{key}" for key, writer in rollout.writers_by_key.items() if writer.samples_teacher]
    found += ["rollout.teacher_prefix"] if rollout.teacher_prefix is not None else []
    takeover, wanted = rollout.takeover, rollout.demonstrations
    if takeover is not None and "teacher" in (takeover.by, takeover.rest):
        found.append("rollout.takeover")
    return [*found, *(["rollout.demonstrations"] if wanted is not None and wanted.endpoint is None else [])]


def _offers(stage: Stage) -> Iterator[str]:
    """Signals that a term needs and a teacher does not offer, and teachers without a model to sample from."""

    def with_hidden(role: str) -> bool:
        offers = [kind.offers for kind in stage.teachers.values() if kind.role == role]
        return all("hidden" in offered for offered in offers) or not any("topk" in offered for offered in offers)

    for number, term in enumerate(stage.objective):
        place = "objective" if len(stage.objective) == 1 else f"objective term {number}"
        for role, signal in term.needs(stage.train.updates).chosen(with_hidden):
            for name, kind in stage.teachers.items():
                if kind.role == role and signal not in kind.offers:
                    yield (
                        f"{place}: {term.name} needs {signal!r} of the role {role!r}, and teachers.{name}, of kind "
                        f"{kind.name}, offers {', '.join(sorted(kind.offers))}. {term.advice(kind.offers)}"
                    )
    drawn = _by_teachers(stage)
    if stage.rollout.rescue is not None and stage.rollout.rescue.hint is not None:
        drawn += ["rollout.rescue.hint"] if stage.rollout.rescue.hint.by == "teacher" else []
    if stage.rollout.experience is not None and stage.rollout.experience.by == "teacher":
        drawn.append("rollout.experience")
    if stage.eval.prompts and stage.eval.weight_average:
        drawn.append("eval.weight_average")
    drawn += [f"monitors.watch {monitor.name}" for monitor in stage.monitors.watch if monitor.samples_teacher]
    yield from stage.pool.check(stage.teachers, drawn)
    yield from stage.cluster.check(stage.teachers, stage.pool, drawn, stage.eval.prompts > 0 and stage.eval.teachers)
    for key in drawn:
        for name, kind in stage.teachers.items():
            if kind.role == "teacher" and not kind.has_model:
                yield (
                    f"{key} needs a model in this process, but teachers.{name}, of kind {kind.name}, has none. Drop it."
                )


def _other_tokenizers(stage: Stage) -> Iterator[str]:
    """Settings that do not work with a teacher that has another tokenizer."""
    for name, kind in stage.teachers.items():
        if not kind.view.crosses:
            continue
        if len(kind.reads()) != 1 or not kind.has_model:
            yield f"teachers.{name}: the view bytes needs a single model with its own tokenizer; kind {kind.name} is not supported."
        for number, term in enumerate(stage.objective):
            place = "objective" if len(stage.objective) == 1 else f"objective term {number}"
            needs, own = term.needs(stage.train.updates), term.form_needs(stage.train.updates)
            asked = {signal for role, signal in needs.signals if role == kind.role}
            asked |= {"topk" for role, _ in needs.topk if role == kind.role}
            formed = {signal for role, signal in own.signals if role == kind.role}
            plain = term.minimises in ("", "reverse_kl") and not any(role != kind.role for role, _ in needs.signals)
            gated = [
                need for gate in term.gate for need in (gate.needs(term.role).signals, gate.needs(term.role).student)
            ]
            by_gate = any(kind.role in entry for entries in gated for entry in entries)
            if not asked <= term.crosses or asked != formed or (asked and not plain) or by_gate:
                yield (
                    f"{place}: teachers.{name} has another tokenizer (view bytes), and {term.name} with these settings compares "
                    "ids one by one. Use policy_gradient with reverse_kl and no gates on the teacher, uld, gold, or dskd."
                )
        drawn = _by_teachers(stage)
        drawn += [f"monitors.watch {monitor.name}" for monitor in stage.monitors.watch if monitor.samples_teacher]
        for key in [*drawn, *(["eval.weight_average"] if stage.eval.prompts and stage.eval.weight_average else [])]:
            if kind.role == "teacher":
                yield f"{key} needs a teacher with the student's tokenizer, and teachers.{name} has another (view bytes). Drop it."


def _evaluation(stage: Stage) -> Iterator[str]:
    spec, given = stage.eval, changed(stage.eval)
    periodic = bool(spec.every and spec.prompts)
    if "temperature" in given and not spec.k:
        yield "eval.temperature belongs to the sampled evaluation, but eval.k is 0. Set k, or drop it."
    if spec.early_stop is not None and not periodic:
        yield "eval.early_stop needs periodic evaluations: set eval.every and eval.prompts, or drop it."
    elif spec.early_stop is not None:
        yield from spec.early_stop.check(StageView.of(stage))
    if spec.loss and not spec.prompts:
        yield "eval.loss is measured on held-out prompts, but eval.prompts is 0. Set it, or drop the loss."
    if spec.further and not spec.prompts:
        yield "eval.further says what else is evaluated, but eval.prompts is 0. Set it, or drop `further`."
    if "metric" in given and not spec.prompts:
        yield (
            f"eval.metric {spec.metric!r} is watched in evaluations, but eval.prompts is 0. Set it, or drop the metric."
        )
    waits = any("plateau" in (term.coefficient.until, term.coefficient.after) for term in stage.objective)
    if "plateau" in given and not waits:
        yield "eval.plateau is for coefficients that wait for one (`until: plateau`), but none does. Drop it."
    if spec.metric != METRIC and not spec.metric.startswith(f"{METRIC}/"):
        yield f"eval.metric {spec.metric!r}: expected {METRIC}, or {METRIC}/DOMAIN."


def _selected(stage: Stage) -> Iterator[str]:
    if stage.select is not None and any(source.domain is None for source in stage.prompts):
        yield "select chooses sources by their domain: give every source of prompts a `domain`."


def _files(stage: Stage) -> Iterator[str]:
    if stage.store.retain is not None and not stage.checkpoint.every:
        yield (
            f"store.retain {stage.store.retain}: rollouts older than the checkpoints are deleted when a checkpoint is saved, but checkpoint.every is 0. "
            "Set it."
        )
    if stage.store.retain is not None and not stage.train.learn:
        yield "store.retain with train.learn false: the result of the stage is its rollouts in the store. Drop retain."
    if stage.checkpoint.keep_every and not stage.checkpoint.every:
        yield (
            "checkpoint.keep_every keeps some of the checkpoints that checkpoint.every makes, "
            "but checkpoint.every is 0. Set it."
        )
    if "samples_every" in changed(stage.log) and not stage.log.samples:
        yield "log.samples_every says how often samples are written, but log.samples is 0. Drop it."
    for number, tracker in enumerate(stage.log.to):
        if tracker in stage.log.to[:number]:
            yield f"log.to: {tracker.name} is listed twice with the same settings. Drop one."
        yield from tracker.check(StageView.of(stage))


CHECKS = (
    _rollouts,
    _segment,
    _staleness,
    _authors,
    _plain_text,
    _environment,
    _demonstrations,
    _teacher_prefix,
    _replaced,
    _coefficients,
    _objective,
    _choices,
    _teachers,
    _other_tokenizers,
    _evaluation,
    _selected,
    _files,
)
