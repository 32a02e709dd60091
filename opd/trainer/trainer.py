"""A student, what it minimises and how it is updated, in one object: the pipeline's, and that of a loop of one's own.

trainer = opd.Trainer(student, opd.Objective({"divergence": "jsd"}, teacher, sampler), {"lr": 2e-4})
result = trainer.step(trainer.batch(sampler.sample(prompts)))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from opd.config import Rollouts, Train
from opd.config.stage import WEIGHTS
from opd.errors import RecipeError, UserError
from opd.models.graphed import PassGraphs
from opd.models.language_model import LanguageModel
from opd.objective.batch import RewardsById, TrainingBatch
from opd.objective.objective import Objective
from opd.objective.term import refusals
from opd.settings import StageView, by_hand
from opd.teachers.router import by_teacher
from opd.text import shortened
from opd.trainer.halving import MicroBudget
from opd.trainer.result import StepResult
from opd.trainer.step import train_step
from opd.trainer.world import World
from opd.types import Rollout, Signal, SignalKind


class Trainer:
    """`train`: a recipe's `train` keys. `teacher_of`: domain -> teacher, so that micro-batches hold one teacher's rollouts.

    `told`: hears of the new size of micro-batches, where memory ran out.
    """

    def __init__(
        self,
        student: LanguageModel,
        objective: Objective,
        train: Train | Mapping[str, Any] | None = None,
        *,
        seed: int = 0,
        teacher_of: Mapping[str, str] | None = None,
        check_stop: Callable[[], None] = lambda: None,
        world: World | None = None,
        told: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self.world = world or World()
        self.student, self.objective = student, objective
        self.train: Train = by_hand("train", Train, train if train is not None else {})
        self._require_precision()
        self._refuse()
        self.optimiser = self.world.optimiser(student.trainable(), self.train)
        if self.world.size == 1:
            student.graphs = PassGraphs.of(student)
        self.steps = 0  # the newest
        self._budget = MicroBudget(self.train.micro_budget, told)
        self._seed, self._teacher_of, self._check_stop = seed, teacher_of or {}, check_stop

    def __repr__(self) -> str:
        return f"Trainer({self.student.name!r}, {self.objective!r}, lr={self.train.lr:g}, steps={self.steps})"

    def _require_precision(self) -> None:
        """A student that was loaded by hand is as it was loaded."""
        half = any(parameter.dtype == torch.bfloat16 for parameter in self.student.module.parameters())
        wanted = WEIGHTS.get(self.train.precision)
        if wanted is not None and (wanted == "bfloat16") != half:
            raise UserError(
                f"train.precision {self.train.precision} computes with {wanted} weights, and the student has others. "
                f"Load it with dtype={wanted!r}, or leave precision out."
            )

    def _refuse(self) -> None:
        """What the terms cannot do with rollouts that are drawn like this.

        Who writes them and how many answers a prompt gets is seen only in a batch, so a mistake is what is one either way.
        """
        drawing = self.objective.drawing
        drawn = {
            "samples": 2,
            "max_new_tokens": drawing.max_new_tokens,
            "temperature": drawing.temperature,
            "top_p": drawing.top_p,
            "top_k": drawing.top_k,
            "teacher_mix": drawing.teacher_mix,
        }
        roles = frozenset(teacher.role for teacher in self.objective.teachers.values())
        found: list[list[str]] = []
        for shares in ({}, {"data_share": 0.25, "teacher_share": 0.25}):
            rollout: Rollouts = by_hand("drawing", Rollouts, {**drawn, **shares})
            lora = self.student.adapter is not None
            found.append(refusals(StageView(rollout, self.train, self.objective.terms, roles, lora=lora)))
        mistakes = [mistake for mistake in found[0] if mistake in found[1]]
        if mistakes:
            raise RecipeError("\n".join(mistakes))

    def batch(self, rollouts: Sequence[Rollout], rewards: RewardsById | None = None) -> TrainingBatch:
        """Rollouts, scored by the objective's teachers as its terms need it. `rewards`: by rollout id."""
        if not rewards and any(term.needs().rewards for term in self.objective.terms):
            raise UserError("the objective uses rewards. Give them: trainer.batch(rollouts, {rollout.id: reward, …})")
        signals: dict[tuple[str, SignalKind], dict[str, Signal]] = {}
        for role, kind in self.objective.needs(self.steps + 1, self.train.updates):
            table = {rollout.domain: self._teacher(role, rollout.domain) for rollout in rollouts}
            answers = signals[role, kind] = {}
            for name, asked in by_teacher(rollouts, table).items():
                found = self.objective.teachers[name].score(asked, self.objective.need_beside(signals, role, kind))
                answers |= {rollout.id: signal for rollout, signal in zip(asked, found, strict=True)}
        return TrainingBatch(rollouts, signals, rewards or {})

    def _teacher(self, role: str, domain: str) -> str:
        """The only one of its role, or the one named after the domain."""
        names = [name for name, teacher in self.objective.teachers.items() if teacher.role == role]
        if len(names) != 1 and domain not in names:
            known = ", ".join(names) or "none"
            raise UserError(f"domain {domain!r} has no teacher of the role {role!r}; there are: {known}.")
        return names[0] if len(names) == 1 else domain

    def step(self, batch: TrainingBatch, step: int | None = None) -> StepResult:
        """Train on one scored batch: `.loss`, `.metrics` and more of the result say how it went. `step` counts from 1, for schedules; by itself it goes up by one."""
        if not isinstance(batch, TrainingBatch):
            raise UserError(f"trainer.step: expected trainer.batch(rollouts), got {shortened(batch)}.")
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
            world=self.world,
            budget=self._budget,
        )
