"""Creates the parts of a stage, and checks everything before the first token is sampled."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from opd.common.context import RunContext
from opd.common.errors import RecipeError
from opd.common.text import plain
from opd.engines import prefork
from opd.loop.interventions import Demonstrator
from opd.loop.learner import Trainer
from opd.loop.parts import OnRollouts, Samplers, StageParts
from opd.loop.producer import (
    AheadProducer,
    BatchMaker,
    InlineProducer,
    LatePrompts,
    Producer,
    RolloutRewards,
    StopThreads,
)
from opd.loop.ranks import Ranks
from opd.loop.scorer import Scorer
from opd.models import load_model
from opd.models.language_model import LanguageModel
from opd.models.load import weights_directory, weights_hash
from opd.models.modules import ModuleKind
from opd.models.tokenizers import fingerprint
from opd.objective.objective import Objective
from opd.recipe import Stage
from opd.recipe.stage import WEIGHTS
from opd.records import Sampling, TeacherLike
from opd.rollouts.pace import Pace
from opd.rollouts.replay import RunSource
from opd.rollouts.rollouter import ReplayBuffer, Rollouter, Segments
from opd.rollouts.writers import WriterContext
from opd.runner.checks import Checked, RevisionOf, as_named, check_stage, open_stream, response_limit, shown_room
from opd.runner.plan import keep_smaller_budget, settle_sizes
from opd.store import RolloutStore
from opd.store.rollouts import StoredCalls
from opd.teachers.cached import FOLDER, ScoredStage, scored_by
from opd.teachers.kinds import ModelRef
from opd.teachers.paging import Pager
from opd.teachers.pool import movable, open_teachers
from opd.teachers.quantised import load_teacher

SIGN_OF_LIFE = 10.0  # seconds between messages about reading prompts


def open_stage(
    spec: Stage,
    store: RolloutStore,
    resolve_model: Callable[[str], str] = str,
    *,
    context: RunContext | None = None,
    ranks: Ranks | None = None,
    revision_of: RevisionOf = as_named,
    on_token: Callable[..., None] = lambda *token: None,
    on_rollouts: OnRollouts = lambda rollouts, rewards: None,
) -> StageParts:
    """Open everything that the steps of a stage use. The store is in the run's directory."""
    prefork.start_interpreters(*spec.sampler_processes)
    ranks, context, directory = ranks or Ranks(), context or RunContext(say=lambda line: None), store.directory.parent
    threads = StopThreads(context.check_stop)
    check_stop = threads.check if spec.rollout.staleness else context.check_stop
    context = replace(context, directory=directory, stage=spec.name, ranks=ranks, check_stop=check_stop)
    _set_threads(spec)
    torch.manual_seed(spec.seed)
    checked = check_stage(spec, resolve_model, ReadingProgress(context), context.say, revision_of)
    context.on_phase("loading")
    spec = settle_sizes(spec, directory, checked, resolve_model, ranks)
    device = ranks.device(checked.device, spec.device)
    stream = open_stream(spec, checked.sources)
    models = load_models(spec, device, resolve_model, revision_of, context, ranks)
    stop_ids, teachers, tokenizer = models.stop_ids, models.teachers, models.student.tokenizer
    for note in (*checked.inputs.notes, *spec.sampler.notes()):
        context.say_of_stage(note)
    samplers = _open_samplers(spec, checked, models, ranks, context, revision_of, store)
    student = ranks.shard(models.student, spec.cluster)
    objective = Objective(spec.objective, teachers, spec.rollout, stop_ids, spec.seed)
    objective.overlap = spec.overlap
    on_smaller = partial(keep_smaller_budget, directory, spec.name, context.say)
    trainer = Trainer(
        student, objective, spec.train, seed=spec.seed, check_stop=context.check_stop, ranks=ranks, on_smaller=on_smaller,
        modules=located_modules(spec, resolve_model, revision_of),
    )  # fmt: skip
    scorer = Scorer(
        spec, teachers, checked.routes, checked.templates, objective, store, ranks, context, models.pager, models.kept
    )
    rollouter = _rollouter(spec, store, tokenizer, samplers, scorer, checked, stop_ids, ranks)
    rollouter = replace(rollouter, check_stop=context.check_stop, on_token=on_token)
    late = LatePrompts(spec, tokenizer, rollouter, context)
    fits = late.fits if checked.inputs.scanned.open_ended else None
    stream.leave_out(checked.inputs.scanned.unusable, fits, late.skips)
    rewards = _rewards(spec, checked, store, tokenizer, stop_ids, ranks, context)
    maker = BatchMaker(spec, stream, rollouter, rewards, scorer, samplers, store, ranks, student)
    producer: Producer = AheadProducer(maker, threads, device) if spec.rollout.staleness else InlineProducer(maker)
    parts = StageParts(
        spec, context, ranks, device, store, checked.sources, checked.inputs.questions, checked.inputs.room, stream,
        student, teachers, stop_ids, checked.teacher_of, samplers, rollouter, rewards, scorer, trainer, producer, on_rollouts,
    )  # fmt: skip
    parts.publish(version=0)
    return parts


def located_modules(spec: Stage, resolve_model: Callable[[str], str], revision_of: RevisionOf) -> dict[str, ModuleKind]:
    start = spec.student.model, spec.student.revision
    return {name: kind.located(name, start, resolve_model, revision_of) for name, kind in spec.modules.items()}


@dataclass
class Models:
    """The models of a stage in memory. `kept`: where its scores are stored, if the stage only scores."""

    student: LanguageModel
    teachers: dict[str, TeacherLike]
    stop_ids: tuple[int, ...]
    pager: Pager | None
    kept: ScoredStage | None


def load_models(
    spec: Stage, device: torch.device, resolve_model: Callable[[str], str], revision_of: RevisionOf, context: RunContext,
    ranks: Ranks,
) -> Models:  # fmt: skip
    assert context.directory is not None
    models = StageModels(spec, device, resolve_model, revision_of, context.directory, ranks)
    student = models.student(spec, sharded=ranks.sharded)
    teachers, stop_ids = open_teachers(spec.teachers, student, models.teacher, context)
    if models.pager is not None:
        context.say_of_stage(spec.pool.describe(models.pager.sizes, str(device)))
    if not stop_ids:
        raise RecipeError(
            f"student {spec.student.model!r} and its teachers name no stop id. Set eos_token_id in a generation_config.json."
        )
    kept = None
    if not spec.train.learn:
        kept = _keep_scores(spec, student, stop_ids, teachers, context.directory, resolve_model, revision_of)
    return Models(student, teachers, stop_ids, models.pager, kept)


def _open_samplers(
    spec: Stage, checked: Checked, models: Models, ranks: Ranks, context: RunContext, revision_of: RevisionOf,
    store: RolloutStore,
) -> Samplers:  # fmt: skip
    student, teachers = models.student, models.teachers
    shown = shown_room(spec, checked.sources, student.tokenizer, student.context)
    max_length = max(checked.inputs.room + response_limit(spec), shown)
    revision = revision_of(spec.student.model, spec.student.revision)
    samplers = Samplers(spec, student, teachers, max_length, models.stop_ids, ranks, context, revision, store)
    if spec.rollout.teacher_mix:
        names = dict.fromkeys(checked.routes["teacher"].values())
        mixed = [student, *(teachers[name].model for name in set(names))]
        student.inside(partial(spec.sampler.require_mixing, mixed, max_length))
        for name in names if ranks.sharded else ():  # the student is copied while it is not sharded
            samplers.mixed(name)
    for line in slower_models(student, teachers.values(), samplers.why_slow):
        context.say_of_stage(line)
    return samplers


def _set_threads(spec: Stage) -> None:
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    elif spec.rollout.staleness:  # sampling and training get half each
        torch.set_num_threads(min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) // 2)))


class ReadingProgress:
    """Reports progress while a large source is read."""

    def __init__(self, context: RunContext) -> None:
        self._context, self._said = context, time.monotonic()

    def __call__(self, name: str, done: int, total: int) -> None:
        line = f"reading {plain(name)}: {done:,} of {total:,} rows"
        self._context.on_phase(line)
        if time.monotonic() - self._said > SIGN_OF_LIFE:
            self._said = time.monotonic()
            self._context.say_of_stage(line)
        self._context.check_stop()


def _keep_scores(
    spec: Stage, student: LanguageModel, stop_ids: tuple[int, ...], teachers: dict[str, TeacherLike], directory: Path,
    resolve_model: Callable[[str], str], revision_of: RevisionOf,
) -> ScoredStage:  # fmt: skip
    """Begin to store this stage's scores, for teachers of kind cached."""
    own = ModelRef(spec.student.model, spec.student.revision)
    weights = {
        name: {
            ref.identified(ref.model): ref.identified(
                weights_hash(resolve_model(ref.model), revision_of(ref.model, ref.revision))
            )
            for ref in (*kind.scored_with(), *((own,) if kind.of_student else ()))
        }
        for name, kind in spec.teachers.items()
    }
    scored = ScoredStage(
        directory / FOLDER / f"{spec.name}.json",
        fingerprint(student.tokenizer),
        stop_ids,
        student.size,
        {name: scored_by(kind, teachers[name], weights[name]) for name, kind in spec.teachers.items()},
    )
    scored.begin()
    return scored


def _rollouter(
    spec: Stage, store: RolloutStore, tokenizer: Any, samplers: Samplers, scorer: Scorer, checked: Checked,
    stop_ids: tuple[int, ...], ranks: Ranks,
) -> Rollouter:  # fmt: skip
    """Set up who writes the answers and how they are stored."""
    rollout = spec.rollout
    context = WriterContext(
        tokenizer,
        rollout.max_new_tokens,
        stop_ids,
        scorer.teacher_for,
        student=samplers.student,
        teacher=samplers.teacher,
        mixed=samplers.mixed,
        template_kwargs=lambda visit: spec.prompts[visit.source].chat_template_kwargs,
    )
    sampling = Sampling(
        rollout.max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k, stop_ids, tuple(rollout.stop)
    )
    again = next((writer for writer in rollout.writers if writer.replays), None)
    return Rollouter(
        stage=spec.name,
        seed=spec.seed,
        spec=rollout,
        sources=spec.prompts,
        tokenizer=tokenizer,
        sampling=sampling,
        store=store,
        context=context,
        max_prompt_tokens=checked.inputs.room,
        max_length=samplers.max_length,
        replays={number: source for number, source in enumerate(checked.sources) if isinstance(source, RunSource)},
        exact=spec.checkpoint.resume == "exact",
        ranks=ranks,
        pace=Pace.of(rollout, spec.train.steps),
        buffer=ReplayBuffer(again, checked.sources) if again is not None else None,
        segments=Segments(rollout.segment, rollout.max_new_tokens, checked.sources) if rollout.segment else None,
    )


def _rewards(
    spec: Stage, checked: Checked, store: RolloutStore, tokenizer: Any, stop_ids: tuple[int, ...], ranks: Ranks,
    context: RunContext,
) -> RolloutRewards:  # fmt: skip
    calls, wanted = StoredCalls(store, spec.name), spec.rollout.demonstrations
    checked.rewarder.remember(calls, context.check_stop)
    demonstrator = None
    if wanted is not None:
        demonstrator = Demonstrator(wanted, calls, tokenizer.all_special_tokens, context.check_stop, context.say)
    return RolloutRewards(spec, checked.rewarder, store, tokenizer, stop_ids, ranks, demonstrator)


# --- The models of a stage's teachers: each is loaded once, and paged out if the recipe says so ---


Key = tuple[str, str | None, str, str, str | None]  # model, revision, dtype, device, quantisation


class StageModels:
    """`scratch`: a directory for weights that no file holds in the needed form."""

    def __init__(
        self,
        spec: Stage,
        device: torch.device,
        resolve: Callable[[str], str],
        revision_of: RevisionOf,
        scratch: Path,
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        self._spread = set(movable(spec.teachers)) if ranks.sharded and spec.cluster.teachers == "shard" else set()
        self._device, self._usual = str(device), WEIGHTS[spec.train.precision_on(str(device))]
        self._resolve, self._revision_of = resolve, revision_of
        self._known: dict[Key, LanguageModel] = {}
        self._paged = set(spec.pool.paged(spec.teachers))
        self.pager: Pager | None = None
        if self._paged and spec.pool.resident is not None:
            keep = spec.pool.keep_on(self._device)
            heads: dict[str, int] = {}  # per role: a mixture needs the heads of all its parts at once
            for kind in spec.teachers.values():
                heads[kind.role] = max(heads.get(kind.role, 0), len(kind.waiting()))
            self.pager = Pager(spec.pool.resident, keep, scratch, heads=sum(heads.values()))

    def student(self, spec: Stage, *, sharded: bool) -> LanguageModel:
        """Load the student. Its weights below the adapters are never trained, so teachers can share them if it is not sharded."""
        key = name, revision, dtype, device, _ = self._key(ModelRef(spec.student.model, spec.student.revision))
        checkpointing, lora = spec.student.gradient_checkpointing, spec.student.lora
        parted = self._ranks.load_student(name, dtype, device, revision, spec.cluster, checkpointing, lora)
        if parted is not None:
            return parted
        model = load_model(
            name,
            dtype=dtype,
            revision=revision,
            lora=lora,
            gradient_checkpointing=checkpointing,
            device=device,
        )
        if lora is not None and not sharded:
            self._known[key] = model.base()
        return model

    def teacher(self, ref: ModelRef) -> LanguageModel:
        key = name, revision, dtype, device, _ = self._key(ref)
        if key not in self._known:
            if ref in self._spread:
                model = self._ranks.load_sharded_frozen(name, dtype, device, revision)
            else:
                model = load_teacher(ref, name, revision, dtype, device)
            if self.pager is not None and ref in self._paged:
                model = self.pager.add_model(model, weights_directory(name, revision))
            self._known[key] = model
        return self._known[key]

    def _key(self, ref: ModelRef) -> Key:
        revision = self._revision_of(ref.model, ref.revision)
        return self._resolve(ref.model), revision, ref.dtype or self._usual, ref.device or self._device, ref.quantise


def slower_models(student: LanguageModel, teachers: Iterable[TeacherLike], why_slow: str) -> list[str]:
    """Models that cannot run packed or in slots, and why, for a message printed once."""
    models: list[LanguageModel] = [student, *(teacher.model for teacher in teachers if teacher.model is not None)]
    found = {
        f"{model.name}: it runs {model.route.name}, which is slower than packed: {model.route.why}"
        for model in models
        if model.route.why
    }
    if why_slow:
        found.add(f"{student.name} {why_slow}")
    return sorted(found)
