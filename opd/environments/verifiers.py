"""Environments of verifiers (`verifiers.v1`), each episode in a program of its own.

    prompts: "episodes:sums"
    rollout:
      environment:
        kind: verifiers
        python: .venv-verifiers/bin/python
        settings: {taskset: {id: my-sums}, agent: {harness: {id: bash}, runtime: {type: docker}}}

verifiers plays the agent and scores what it did. Its model is the student, at the endpoint of environment `agent`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from opd.common.text import plain
from opd.environments.agent import AgentEnvironment
from opd.records import Message, Prompt
from opd.registry import StageView, changed

PROGRAM = Path(__file__).with_name("verifiers_program.py")


class VerifiersEnvironment(AgentEnvironment):
    """A taskset, a harness and rewards of verifiers."""

    name = "verifiers"
    python: str = Field(
        "python", min_length=1, description="the Python that has verifiers and the taskset; it needs nothing of opd"
    )
    settings: dict[str, Any] = Field(
        description="verifiers' settings of an environment: `taskset` with its `id`, `agent` with `harness` and `runtime`, and so on"
    )

    @property
    def program(self) -> Sequence[str]:
        return [
            self.python,
            "-P",
            str(PROGRAM),
            json.dumps(self.settings),
        ]  # -P: modules in its folder stay out of the way

    def check(self, view: StageView) -> Iterable[str]:
        others = sorted(changed(self) & {"command", "port", "host", "token_env", "columns"})
        if others:
            yield f"{others[0]} belongs to environment agent: verifiers starts its own program, with the tasks of its taskset. Remove it."
            return
        yield from super().check(view)
        if shutil.which(self.python) is None:
            yield f"python: there is no program {plain(self.python, 200)!r}. Give the path of the Python that has verifiers."
        if not isinstance(self.settings.get("taskset"), dict) or not self.settings["taskset"].get("id"):
            yield "settings need the id of a taskset: {taskset: {id: NAME}}."

    def opening(self, prompt: Prompt) -> Sequence[Message]:
        """Stands for the task, whose text only verifiers knows. The student does not read it."""
        return () if prompt.messages else [{"role": "user", "content": prompt.id}]
