"""Code repair: the student writes a program, reads what the tests say in the sandbox, and repairs it.

rollout: {environment: {kind: repair, turns: 4}}
{"prompt": "Write add(a, b).", "tests": ["assert add(1, 2) == 3"]}
"""

from __future__ import annotations

from pydantic import Field

from opd.records import Prompt, Sample
from opd.rewards.code import Code
from opd.rewards.reward import Sandbox
from opd.rollouts.environments import Environment, Episode, Step, Turn, result_text


class Repair(Environment):
    """Runs the last Python block of every turn against the prompt's `tests` or `cases`, until they pass."""

    name = "repair"
    call_seconds: float = Field(
        120.0, gt=0, le=86_400, description="a step or a tool call that takes longer is given up"
    )
    sandbox: Sandbox = Field("auto", description="of repair: where programs run")
    partial: bool = Field(False, description="of repair: the last program earns the share of tests that it passes")

    def open(self, prompt: Prompt, key: int) -> Episode:
        return RepairEpisode(self, prompt)


class RepairEpisode(Episode):
    def __init__(self, environment: Repair, prompt: Prompt) -> None:
        self.environment, self.prompt = environment, prompt
        self.code = Code(sandbox=environment.sandbox, partial=environment.partial)

    def step(self, turn: Turn) -> Step:
        result = self.code.reward(Sample(self.prompt, turn.text))
        if result.reward is None:
            raise RuntimeError(result.error)
        last = turn.number + 1 == self.environment.turns
        if result.reward >= 1 or last:
            return Step(reward=result.reward, done=True, feedback=result.feedback)
        said = result_text(result.feedback or "wrong results", self.environment.result_characters)
        text = f"The tests fail:\n{said}\nWrite the whole program again."
        return Step(messages=[{"role": "user", "content": text}])

    def resumed(self, turn: Turn, step: Step) -> Step:
        return step  # a turn has the whole program, so nothing depends on earlier steps
