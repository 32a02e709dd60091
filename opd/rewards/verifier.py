"""The prompt's own verifier: a task's, reasoning-gym's, or the kind of reward that a row names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opd import families
from opd.data.generators import GYM, TASK
from opd.data.tasks import get_task
from opd.rewards.guards import guard_reasoning_gym
from opd.rewards.reward import RewardKind, right
from opd.types import Prompt, RewardResult, Sample

IN_ROWS = (
    "exact",
    "numeric",
    "maths",
    "code",
    "json",
)  # what a row may name: nothing that runs a function of its choice


class Verifier(RewardKind):
    """Asks each prompt."""

    name = "verifier"
    by_default = True
    asks_prompt = True

    def covers(self, prompt: Prompt) -> bool:
        return "verifier" in prompt.fields

    def chosen(self, fields: Mapping[str, Any]) -> RewardKind | str:
        name = fields.get("verifier")
        if not isinstance(name, str):
            return "the prompt names no verifier"
        general = {"weight": self.weight, "time_limit": self.time_limit}
        if name.startswith(TASK):
            return TaskVerifier(**general)
        if name.startswith(GYM):
            has_entry = isinstance(fields.get("entry"), Mapping)
            return GymVerifier(**general) if has_entry else "the prompt has no `entry` for its scorer"
        if name in IN_ROWS:
            found = families.find("reward", name)(**general)
            assert isinstance(found, RewardKind)
            return found
        return f"unknown verifier {name!r}"


class TaskVerifier(RewardKind):
    """A built-in task knows its answers."""

    name = "task"
    in_process = True

    def reward(self, sample: Sample) -> RewardResult:
        name = str(sample.prompt.fields["verifier"]).removeprefix(TASK)
        return right(get_task(name).verify(sample.prompt, sample.text))


class GymVerifier(RewardKind):
    """reasoning-gym's own scorer. Several of them evaluate the answer: see `guards` and `worker`."""

    name = "reasoning_gym"
    evaluates = True
    package = "reasoning_gym"
    install = "pip install reasoning_gym"

    def load(self) -> None:
        super().load()
        guard_reasoning_gym()

    def reward(self, sample: Sample) -> float:
        import reasoning_gym

        fields = sample.prompt.fields
        score = reasoning_gym.get_score_answer_fn(str(fields["verifier"]).removeprefix(GYM))
        return float(score(answer=sample.text.strip(), entry=fields["entry"]))
