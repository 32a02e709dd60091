"""The samplers of a stage: the student's, and those of teachers as they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from opd.config import Stage
from opd.models.language_model import LanguageModel
from opd.sampling.ahead import AheadSampler
from opd.sampling.graphs import Partner
from opd.sampling.samplers import SamplerKind
from opd.trainer.world import World
from opd.types import TeacherLike, TokenSampler, WeightsRef


class StageSamplers:
    def __init__(
        self,
        spec: Stage,
        student: LanguageModel,
        teachers: Mapping[str, TeacherLike],
        max_length: int,
        stop_ids: tuple[int, ...],
        world: World,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._world, self._check_stop = world, check_stop
        self._spec, self._model, self._models = spec, student, teachers
        self.max_length, self._stop_ids = max_length, stop_ids
        self._teachers: dict[str, TokenSampler] = {}
        self._mixed: dict[str, TokenSampler] = {}
        self._version = 0
        ahead, kind = bool(spec.rollout.staleness), spec.sampler
        kind = kind.beside() if ahead and kind.led else kind  # its engines sample ahead, and have other weights then
        opens = world.opens_sampler(kind.led)
        copied = student.copied(self._dtype, opens)  # what the student samples with
        # a copy that every rank has, and may pass through by itself
        self.copy = copied if student.passes_alone or world.samples_everywhere(kind.led) else None
        self._own = self._opened(copied, kind=kind) if opens and copied is not None else None
        self.manner = "" if self._own is None else kind.manner(self._own)  # where that is slower than usual
        self.student = world.student_sampler(self._own, kind.led, spec, copied or student, max_length, stop_ids)
        wide = spec.sampler.for_batches(spec.rollout.prompts * spec.rollout.samples, student)
        self._ahead = self._opened(student.inference_copy(self._dtype, own=True), kind=wide) if ahead else None
        self.ahead: AheadSampler | None = None  # samples for batches, in a thread of its own
        if self._ahead is not None:
            self.ahead = AheadSampler(self._ahead, student, spec.rollout.in_flight)
        self._close = [(kind, self._own), (spec.sampler, self._ahead)]

    def teacher(self, name: str) -> TokenSampler:
        if name not in self._teachers:
            self._teachers[name] = self.of(self._models[name].model)
        return self._teachers[name]

    def mixed(self, name: str) -> TokenSampler:
        """The student with a teacher reading along, for `rollout.teacher_mix`."""
        if name not in self._mixed:
            partner = Partner(self._models[name].model, self._spec.rollout.teacher_mix)
            self._mixed[name] = self._open(self._model.inference_copy(self._dtype), partner)
            self._mixed[name].load(self._model.weights(self._version))
        return self._mixed[name]

    def of(self, model: LanguageModel) -> TokenSampler:
        """Of a model that does not learn, in its own precision. What the student is shown may be longer than it can read."""
        copy = model.inference_copy(None)
        length = min(self.max_length, model.context)
        return self._world.sampler(self._spec.sampler.beside().open(copy, length, merge_stop=self._stop_ids))

    def load(self, weights: WeightsRef) -> None:
        """The student's, wherever it samples."""
        self._version = weights.version
        for sampler in (self.student, *self._mixed.values(), *([] if self.ahead is None else [self.ahead])):
            sampler.load(weights)

    def close(self) -> None:
        for kind, sampler in self._close:
            if sampler is not None:
                kind.close(sampler)

    @property
    def _dtype(self) -> torch.dtype | None:
        return getattr(torch, self._spec.sampler.dtype) if self._spec.sampler.dtype else None

    def _open(self, model: LanguageModel, partner: Partner | None = None) -> TokenSampler:
        return self._world.sampler(self._opened(model, partner))

    def _opened(
        self, model: LanguageModel, partner: Partner | None = None, kind: SamplerKind | None = None
    ) -> TokenSampler:
        kind = kind or self._spec.sampler
        sampler = kind.open(model, self.max_length, merge_stop=self._stop_ids, partner=partner)
        kind.heed(sampler, self._check_stop)
        return sampler
