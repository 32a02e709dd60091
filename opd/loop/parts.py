"""The objects that the steps of a stage use. `runner.stage.open_stage` creates them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from opd.common.context import RunContext
from opd.data.sources import Source
from opd.data.stream import PromptStream
from opd.evaluation import Question
from opd.loop.learner import Optimiser, Trainer
from opd.loop.producer import Producer
from opd.loop.ranks import Ranks
from opd.loop.rewarding import RolloutRewards
from opd.loop.samplers import Samplers
from opd.loop.scorer import Scorer
from opd.models.language_model import LanguageModel
from opd.objective.objective import Objective
from opd.recipe import Stage
from opd.records import Rollout, TeacherLike, TokenSampler
from opd.rollouts.rollouter import Rollouter
from opd.store import RolloutStore

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
        weights = self.samplers.weights_of(self.student, self.samplers.version + 1 if version is None else version)
        self.samplers.load(weights)
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
