"""The models of a stage's teachers: each is in memory once, and those that can wait elsewhere do, where the recipe says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from opd.config import Stage
from opd.config.stage import WEIGHTS
from opd.models import load_model
from opd.models.language_model import LanguageModel
from opd.models.load import weights_directory
from opd.runner.checks import RevisionOf
from opd.teachers.kinds import ModelRef
from opd.teachers.paging import Pager
from opd.teachers.pool_settings import movable
from opd.teachers.quantised import load_teacher
from opd.trainer.world import World
from opd.types import TeacherLike

Key = tuple[str, str | None, str, str, str | None]  # model, revision, dtype, device, quantisation


class StageModels:
    """`scratch`: a directory with room for weights that no file holds as they are."""

    def __init__(
        self,
        spec: Stage,
        device: torch.device,
        resolve: Callable[[str], str],
        revision_of: RevisionOf,
        scratch: Path,
        world: World,
    ) -> None:
        self._world = world
        self._spread = set(movable(spec.teachers)) if world.sharded and spec.cluster.teachers == "shard" else set()
        self._device, self._usual = str(device), WEIGHTS[spec.train.precision_on(str(device))]
        self._resolve, self._revision_of = resolve, revision_of
        self._known: dict[Key, LanguageModel] = {}
        self._paged = set(spec.pool.paged(spec.teachers))
        self.pager: Pager | None = None
        if self._paged and spec.pool.resident is not None:
            keep = spec.pool.keep_on(self._device)
            heads: dict[str, int] = {}  # of each role: a mixture needs those of all its parts at once
            for kind in spec.teachers.values():
                heads[kind.role] = max(heads.get(kind.role, 0), len(kind.waiting()))
            self.pager = Pager(spec.pool.resident, keep, scratch, heads=sum(heads.values()))

    def student(self, spec: Stage, *, sharded: bool) -> LanguageModel:
        """What lies below its adapters is never trained, so that teachers can share it, where it stays whole."""
        key = name, revision, dtype, device, _ = self._key(ModelRef(spec.student.model, spec.student.revision))
        checkpointing, lora = spec.student.gradient_checkpointing, spec.student.lora
        parted = self._world.load_student(name, dtype, device, revision, spec.cluster, checkpointing, lora)
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
                model = self._world.load_spread(name, dtype, device, revision)
            else:
                model = load_teacher(ref, name, revision, dtype, device)
            if self.pager is not None and ref in self._paged:
                model = self.pager.take_in(model, weights_directory(name, revision))
            self._known[key] = model
        return self._known[key]

    def _key(self, ref: ModelRef) -> Key:
        revision = self._revision_of(ref.model, ref.revision)
        return self._resolve(ref.model), revision, ref.dtype or self._usual, ref.device or self._device, ref.quantise


def slower_models(student: LanguageModel, teachers: Iterable[TeacherLike], manner: str) -> list[str]:
    """Models that do not run packed, or not in slots, and why: said once."""
    models: list[LanguageModel] = [student, *(teacher.model for teacher in teachers if teacher.model is not None)]
    found = {
        f"{model.name}: sequences go through it {model.route.name}, which is slower than packed: {model.route.why}"
        for model in models
        if model.route.why
    }
    if manner:
        found.add(f"{student.name} {manner}")
    return sorted(found)
