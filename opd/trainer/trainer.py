"""A student, what it minimises and how it is updated, in one object: the pipeline's, and that of a loop of one's own.

trainer = opd.Trainer(student, opd.Objective({"divergence": "jsd"}, teacher, sampler), {"lr": 2e-4})
result = trainer.step(trainer.batch(sampler.sample(prompts)))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from opd.config import Train
from opd.models.language_model import LanguageModel
from opd.objective.batch import TrainingBatch
from opd.objective.objective import Objective
from opd.settings import by_hand
from opd.trainer.optimiser import Optimiser
from opd.trainer.step import StepResult, train_step


class Trainer:
    """`train`: a recipe's `train` keys. `teacher_of`: domain -> teacher, so that micro-batches hold one teacher's rollouts."""

    def __init__(
        self,
        student: LanguageModel,
        objective: Objective,
        train: Train | Mapping[str, Any] | None = None,
        *,
        seed: int = 0,
        teacher_of: Mapping[str, str] | None = None,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self.student, self.objective = student, objective
        self.train: Train = by_hand("train", Train, train if train is not None else {})
        self.optimiser = Optimiser(student.trainable(), self.train)
        self.steps = 0  # the newest
        self._seed, self._teacher_of, self._check_stop = seed, teacher_of or {}, check_stop

    def step(self, batch: TrainingBatch, step: int | None = None) -> StepResult:
        """Train on one scored batch. `step` counts from 1, for schedules; by itself it goes up by one."""
        self.steps = self.steps + 1 if step is None else step
        return train_step(
            self.student,
            batch,
            self.objective,
            self.optimiser,
            step=self.steps,
            train=self.train,
            seed=self._seed,
            teacher_of=self._teacher_of,
            check_stop=self._check_stop,
        )
