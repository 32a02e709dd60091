"""The objects that the steps of a stage use. `runner.stage.open_stage` creates them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from opd.common.context import RunContext
from opd.engines.alongside import LoggingSampler, SamplerProcesses, ThreadSampler, TurnProcesses
from opd.engines.calls import Partner
from opd.engines.kinds import SamplerKind
from opd.engines.requests import weights_of
from opd.loop.ranks import Ranks
from opd.models.language_model import LanguageModel
from opd.recipe import Stage
from opd.records import Rollout, TeacherLike, TokenSampler, WeightsRef
from opd.store import RolloutStore

if TYPE_CHECKING:
    from opd.data.sources import Source
    from opd.data.stream import PromptStream
    from opd.evaluation import Question
    from opd.loop.learner import Optimiser, Trainer
    from opd.loop.producer import Producer, RolloutRewards
    from opd.loop.scorer import Scorer
    from opd.objective.objective import Objective
    from opd.rollouts.rollouter import Rollouter

OnRollouts = Callable[[Sequence[Rollout], Mapping[str, float | None]], None]


@dataclass
class StageParts:
    spec: Stage
    context: RunContext
    ranks: Ranks
    device: torch.device
    store: RolloutStore
    sources: Sequence[Source]
    questions: Mapping[str, list[Question]]  # held-out prompts, by domain
    room: int  # tokens that a prompt may have in the sampler
    stream: PromptStream
    student: LanguageModel
    teachers: Mapping[str, TeacherLike]
    stop_ids: tuple[int, ...]
    teacher_of: Mapping[str, str]  # domain -> teacher, if one teacher scores the whole domain
    samplers: Samplers
    rollouter: Rollouter
    rewards: RolloutRewards
    scorer: Scorer
    trainer: Trainer
    producer: Producer
    on_rollouts: OnRollouts = lambda rollouts, rewards: None

    @property
    def place(self) -> str:
        """Where the stage runs, for messages."""
        return f"{self.device}{self.ranks.title}"

    @property
    def objective(self) -> Objective:
        return self.trainer.objective

    @property
    def optimiser(self) -> Optimiser:
        return self.trainer.optimiser

    @property
    def engine(self) -> TokenSampler:
        """The student's sampler."""
        return self.samplers.student

    def text(self, rollout: Rollout) -> str:
        return self.rewards.text(rollout)

    def publish(self, version: int | None = None, step: int | None = None) -> None:
        """Publish the current weights to the samplers, and after a step also to teachers that follow the student."""
        weights = self.samplers.publish(self.student, self.samplers.version + 1 if version is None else version)
        if step is not None:
            self.producer.trained(step)
            for teacher in self.teachers.values():
                teacher.observe(step, weights)

    def close(self) -> None:
        """Stop all threads, processes and connections of the stage."""
        self.producer.close()
        self.rewards.rewarder.close()
        self.samplers.close()
        if self.rewards.demonstrator is not None:
            self.rewards.demonstrator.close()
        if self.scorer.pager is not None:
            self.scorer.pager.close()


# --- The samplers: the student's, and those of teachers, which are opened on first use ---


class Samplers:
    """`version`: the version of the student's weights that was published last."""

    def __init__(
        self,
        spec: Stage,
        student: LanguageModel,
        teachers: Mapping[str, TeacherLike],
        max_length: int,
        stop_ids: tuple[int, ...],
        ranks: Ranks,
        context: RunContext | None = None,
        revision: str | None = None,
        store: RolloutStore | None = None,
    ) -> None:
        """`revision`: the loaded revision of the student's model. `store`: for samplers that write into it themselves."""
        self._ranks, self._context, self._store = ranks, context or RunContext(stage=spec.name), store
        self._spec, self._model, self._models = spec, student, teachers
        self.max_length, self._stop_ids = max_length, stop_ids
        self._teachers: dict[str, TokenSampler] = {}
        self._mixed: dict[str, TokenSampler] = {}
        self.version = 0
        config = student.module.config
        self._swaps = student.lora is not None and spec.sampler.takes_adapters(config, student.lora)
        ahead, kind = bool(spec.rollout.staleness), spec.sampler
        kind = (
            kind.for_frozen_models() if ahead and kind.leader_only else kind
        )  # its engines sample ahead, with other weights
        leads = kind.leader_only or bool(
            spec.environments
        )  # the leader samples for all: episodes are played in one process
        opens = ranks.opens_sampler(leads)
        copied = student.copied(self._dtype, opens)  # the model that the student samples with
        # a copy that is on every rank and that each may use independently
        self.copy = copied if student.passes_alone or ranks.samples_everywhere(leads) else None
        self._own = self._opened(copied, kind=kind) if opens and copied is not None else None
        self.why_slow = (
            "" if self._own is None else kind.why_slow(self._own)
        )  # why sampling is slower than usual, if it is
        read = spec.model_copy(update={"student": spec.student.model_copy(update={"revision": revision})})
        self.student = ranks.student_sampler(self._own, leads, read, copied or student, max_length, stop_ids)
        self._close: list[Callable[[], None]] = [] if self._own is None else [partial(kind.close, self._own)]
        # samples batches alongside training; without a store, nothing is trained
        self.ahead = self._open_ahead(revision) if ahead and store is not None else None

    def _open_ahead(self, revision: str | None) -> ThreadSampler | LoggingSampler | TurnProcesses:
        spec, student, rollout = self._spec, self._model, self._spec.rollout
        kind = spec.sampler.for_batches(rollout.prompts * rollout.samples, student)
        count, threads = spec.sampler_processes
        if count:
            assert self._store is not None
            check, say = self._context.check_stop, self._context.say_of_stage
            facts = {
                "revision": revision,
                "sampler": kind.model_dump(mode="json"),
                "max_length": self.max_length,
                "stop_ids": list(self._stop_ids),
                "threads": threads,
                "in_flight": rollout.in_flight,
                "commit_ms": spec.store.commit_ms,
                "fsync": spec.store.fsync,
            }
            processes: SamplerProcesses | TurnProcesses = (
                TurnProcesses(student, count, kind.sequences(), facts, check, say)
                if spec.environments
                else SamplerProcesses(student, count, self._store, facts, check, say)
            )
            self._close.append(processes.close)
            return processes
        sampler = self._opened(student.inference_copy(self._dtype, own=True), kind=kind)
        self._close.append(partial(kind.close, sampler))
        return ThreadSampler(sampler, student, rollout.in_flight)

    def teacher(self, name: str) -> TokenSampler:
        if name not in self._teachers:
            self._teachers[name] = self.of(self._models[name].model)
        return self._teachers[name]

    def mixed(self, name: str) -> TokenSampler:
        """The student mixed with a teacher, for `rollout.teacher_mix`."""
        if name not in self._mixed:
            partner = Partner(self._models[name].model, self._spec.rollout.teacher_mix)
            self._mixed[name] = self._open(self._model.inference_copy(self._dtype), partner)
            self._mixed[name].load(self._model.weights(self.version))
        return self._mixed[name]

    def of(self, model: LanguageModel) -> TokenSampler:
        """A sampler of a frozen model in its own precision. Texts shown to the student may be longer than this model can read."""
        copy = model.inference_copy(None)
        length = min(self.max_length, model.context)
        return self._ranks.sampler(self._spec.sampler.for_frozen_models().open(copy, length, merge_stop=self._stop_ids))

    def publish(self, student: LanguageModel, version: int) -> WeightsRef:
        """Load the student's current weights into all samplers that use them. All ranks must call this."""
        weights = weights_of(student, version, self._swaps)
        self.version = version
        for sampler in (self.student, *self._mixed.values(), *([] if self.ahead is None else [self.ahead])):
            sampler.load(weights)
        return weights

    def close(self) -> None:
        for close in self._close:
            close()

    @property
    def _dtype(self) -> torch.dtype | None:
        return getattr(torch, self._spec.sampler.dtype) if self._spec.sampler.dtype else None

    def _open(self, model: LanguageModel, partner: Partner | None = None) -> TokenSampler:
        return self._ranks.sampler(self._opened(model, partner))

    def _opened(
        self, model: LanguageModel, partner: Partner | None = None, kind: SamplerKind | None = None
    ) -> TokenSampler:
        kind = kind or self._spec.sampler
        sampler = kind.open(model, self.max_length, merge_stop=self._stop_ids, partner=partner)
        kind.poll_stop(
            sampler, self._ranks.stop_check(self._context.check_stop) if kind.leader_only else self._context.check_stop
        )
        return sampler
