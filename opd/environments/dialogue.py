"""A scripted dialogue: the user's messages are a column of the prompt, whatever the student answers.

    {"prompt": "add 12+30", "answer": "42", "script": [{"say": "add 5+17", "answer": "22"}, {"say": "Thanks!"}]}

Each answer that has one in the script is rewarded if it is exactly that, in equal parts that add up to 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field

from opd.common.errors import DataError
from opd.records import Prompt
from opd.registry import Fraction
from opd.rollouts.environments import Environment, Episode, Step, Turn


class ScriptedDialogue(Environment):
    """Plays the `script` of a prompt: `task:dialogue`, or a column of your rows."""

    name = "dialogue"
    inline = True
    cut: Fraction = Field(
        0.0,
        description="of dialogue: share of episodes in which the user goes straight to the last message after some turn",
    )

    @property
    def has_oracle(self) -> bool:
        return not self.cut

    @property
    def cuts(self) -> bool:
        return self.cut > 0

    @property
    def advises(self) -> bool:
        return not self.cut

    def open(self, prompt: Prompt, key: int) -> Episode:
        episode = DialogueEpisode(prompt)
        if self.cut and len(episode.messages) > 1:
            coin, place = np.random.default_rng(key).random(2)
            if coin < self.cut:
                episode.skip_after(int(place * (len(episode.messages) - 1)))
        return episode

    def oracle(self, prompt: Prompt) -> Sequence[str] | None:
        expected = DialogueEpisode(prompt).expected
        return None if None in expected else [str(answer) for answer in expected]

    def advice(self, prompt: Prompt, turns: Sequence[str]) -> Sequence[str]:
        expected = DialogueEpisode(prompt).expected[len(turns)]
        return () if expected is None else [str(expected)]


class DialogueEpisode(Episode):
    def __init__(self, prompt: Prompt) -> None:
        script = read_script(prompt)
        self.messages = [line["say"] for line in script]
        self.expected = [prompt.fields.get("answer"), *(line.get("answer") for line in script)]

    @property
    def part(self) -> float:
        """The reward of a right answer."""
        return 1 / max(1, sum(answer is not None for answer in self.expected))

    def skip_after(self, turn: int) -> None:
        """Leave out what the user says between this turn, from 0, and the last message."""
        self.messages = [*self.messages[:turn], self.messages[-1]]
        self.expected = [*self.expected[: turn + 1], self.expected[-1]]

    def step(self, turn: Turn) -> Step:
        expected = self.expected[turn.number]
        reward = None if expected is None else self.part * (turn.text.strip() == str(expected).strip())
        feedback = "" if expected is None or reward else f"The answer is {expected}."
        if turn.number == len(self.messages):
            return Step(reward=reward, done=True, feedback=feedback)
        said = {"role": "user", "content": self.messages[turn.number]}
        return Step(messages=[said], reward=reward, feedback=feedback)


def read_script(prompt: Prompt) -> list[Mapping[str, Any]]:
    found = prompt.fields.get("script")
    try:
        lines = json.loads(found) if isinstance(found, str) else found
    except ValueError:
        lines = None
    if not isinstance(lines, Sequence) or not all(
        isinstance(line, Mapping) and isinstance(line.get("say"), str) for line in lines
    ):
        raise DataError(
            f"prompt {prompt.id!r}: environment dialogue needs a column `script`, a list of {{say, answer}}, got {found!r:.100}."
        )
    return list(lines)
