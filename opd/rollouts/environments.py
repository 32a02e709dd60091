"""Environments: they answer the student between its turns.

    class Countdown(Environment):                      # a choice in a recipe: rollout.environment
        def open(self, prompt, key, tokenizer): ...    # one episode per rollout

    episode.step(turn) -> Step                         # after every turn: the tokens that come next, a reward, whether it is over

An episode is a pure function of its prompt, its key and the turns so far, so an interrupted rollout is replayed from its stored
turns. The environment gives the tokens between two turns as ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from opd.records import Prompt, StopReason
from opd.registry import Choice, Family, Positive


@dataclass(frozen=True)
class Turn:
    """What the student wrote in one turn. `text` is without its stop token."""

    number: int  # from 0
    text: str
    ids: np.ndarray  # int32, the stop token included
    stop: StopReason


@dataclass(frozen=True)
class Step:
    """An environment's response to a turn."""

    ids: Sequence[int] = ()  # what the student reads before its next turn, including the start of that turn
    reward: float | None = None  # for this turn; None: no reward
    done: bool = False
    feedback: str = ""


class Episode(ABC):
    @abstractmethod
    def step(self, turn: Turn) -> Step:
        """The next step. The same turns must give the same steps."""


class Environment(Choice):
    family = "environment"
    rewards: ClassVar[bool] = True  # whether its steps give rewards: the rollout gets their sum; else `rewards` applies

    turns: Positive = Field(8, le=10_000, description="of the student, at most")
    turn_tokens: Positive | None = Field(
        None, description="tokens of one turn; default: what rollout.max_new_tokens leaves"
    )

    @abstractmethod
    def open(self, prompt: Prompt, key: int, tokenizer: Any) -> Episode:
        """`key`: 64 random bits of (seed, prompt, visit, sample)."""


AnyEnvironment = Annotated[Environment, Family("environment")]
