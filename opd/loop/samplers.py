"""The samplers of a stage: the student's, and those of teachers, which are opened on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from opd.common.context import RunContext
from opd.engines.alongside import LoggingSampler, ThreadSampler
from opd.engines.calls import Partner
from opd.engines.kinds import SamplerKind
from opd.engines.requests import weights_of
from opd.loop.ranks import Ranks
from opd.models.language_model import LanguageModel
from opd.recipe import Stage
from opd.records import TeacherLike, TokenSampler, WeightsRef
from opd.store import RolloutStore


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
        kind = kind.beside() if ahead and kind.led else kind  # its engines sample ahead, with other weights
        opens = ranks.opens_sampler(kind.led)
        copied = student.copied(self._dtype, opens)  # the model that the student samples with
        # a copy that is on every rank and that each may use independently
        self.copy = copied if student.passes_alone or ranks.samples_everywhere(kind.led) else None
        self._own = self._opened(copied, kind=kind) if opens and copied is not None else None
        self.manner = "" if self._own is None else kind.manner(self._own)  # why sampling is slower than usual, if it is
        read = spec.model_copy(update={"student": spec.student.model_copy(update={"revision": revision})})
        self.student = ranks.student_sampler(self._own, kind.led, read, copied or student, max_length, stop_ids)
        self._close: list[Callable[[], None]] = [] if self._own is None else [partial(kind.close, self._own)]
        # samples batches alongside training; without a store, nothing is trained
        self.ahead = self._beside(revision) if ahead and store is not None else None

    def _beside(self, revision: str | None) -> ThreadSampler | LoggingSampler:
        spec, student, rollout = self._spec, self._model, self._spec.rollout
        kind = spec.sampler.for_batches(rollout.prompts * rollout.samples, student)
        count, threads = spec.sampler_processes
        if count:
            from opd.engines.alongside import SamplerProcesses

            assert self._store is not None
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
            processes = SamplerProcesses(
                student, count, self._store, facts, self._context.check_stop, self._context.say_of_stage
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
        return self._ranks.sampler(self._spec.sampler.beside().open(copy, length, merge_stop=self._stop_ids))

    def weights_of(self, student: LanguageModel, version: int) -> WeightsRef:
        """What `load` needs from the student's current weights. All ranks must call this."""
        return weights_of(student, version, self._swaps)

    def load(self, weights: WeightsRef) -> None:
        """Load the student's weights into all samplers that use them."""
        self.version = weights.version
        for sampler in (self.student, *self._mixed.values(), *([] if self.ahead is None else [self.ahead])):
            sampler.load(weights)

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
            sampler, self._ranks.stop_check(self._context.check_stop) if kind.led else self._context.check_stop
        )
        return sampler
