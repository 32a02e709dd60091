"""A text world on a grid: the student fetches a key and carries it to a door, one step per turn.

    student reads   at b2, key c1, door d4, walls a3 b4
    student: e      environment:  c2
    student: n      environment:  c1 key

A world is solvable, and drawn by its prompt alone (`task:grid`). `World.path` is the oracle: a shortest path from any state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import Field

from opd.data.prompts import question
from opd.data.tasks import MOVES, World
from opd.records import Prompt
from opd.registry import Positive, StageView
from opd.rollouts.environments import Environment, Episode, Step, Turn


class Grid(Environment):
    """The world of a prompt of `task:grid`. Reward 1 at the door with the key."""

    name = "grid"
    inline = True
    turns: Positive = Field(16, le=10_000, description="of the student, at most")
    progress: float = Field(
        0.0, ge=0, le=1, description="of grid: reward for each step that shortens the way, by its share"
    )

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if self.turn_tokens is None:
            yield "environment grid: a turn is one letter. Set turn_tokens, for example to 4."

    def open(self, prompt: Prompt, key: int) -> Episode:
        return GridEpisode(self, World.read(question(prompt)))

    def oracle(self, prompt: Prompt) -> Sequence[str]:
        world = World.read(question(prompt))
        return list(world.path(world.start, False))

    def advice(self, prompt: Prompt, turns: Sequence[str]) -> Sequence[str]:
        """All moves that shorten the way."""
        episode = GridEpisode(self, World.read(question(prompt)))
        for move in turns:
            episode.move(move.strip()[:1])
        world, length = episode.world, len(episode.way)
        return [move for move in MOVES if length and len(world.path(*episode.after(move))) == length - 1]


class GridEpisode(Episode):
    def __init__(self, environment: Grid, world: World) -> None:
        self.environment, self.world = environment, world
        self.place, self.has_key = world.start, world.start == world.key
        self.length = len(self.way)

    @property
    def way(self) -> str:
        """A shortest path to the door from here."""
        return self.world.path(self.place, self.has_key)

    def after(self, move: str) -> tuple[str, bool]:
        """The place, and whether the student has the key, after a move."""
        place = self.world.moved(self.place, move)
        return place, self.has_key or place == self.world.key

    def move(self, move: str) -> None:
        """Make a move. Other texts change nothing."""
        if move in MOVES:
            self.place, self.has_key = self.after(move)

    def step(self, turn: Turn) -> Step:
        move = turn.text.strip()[:1]
        if move not in MOVES:
            return Step(messages=[_user(f" {'/'.join(MOVES)}?")], reward=0.0, counts={"malformed": 1})
        before = len(self.way)
        self.move(move)
        if self.has_key and self.place == self.world.door:
            return Step(reward=1.0, done=True)
        closer = len(self.way) < before
        reward = self.environment.progress * closer / self.length
        return Step(messages=[_user(f" {self.place}{' key' if self.has_key else ''}")], reward=reward)


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}
