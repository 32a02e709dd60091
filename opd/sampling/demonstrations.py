"""Answers that a model behind a chat endpoint writes in place of those that failed. No torch, no httpx here."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, field_validator

from opd.chat import ChatQuestion, Endpoint
from opd.data.questions import field_texts, fields_of, filled, question, well_formed
from opd.settings import SETTINGS, Family
from opd.types import Prompt

PROMPT = "prompt"


class Demonstrations(BaseModel):
    """Which answers are replaced, and who is asked for better ones."""

    model_config = SETTINGS
    endpoint: Endpoint = Field(description="`address`, `model`, `token_env`, `price`, …")
    template: str = Field(
        "{prompt}",
        min_length=1,
        max_length=100_000,
        description="what is asked: `{prompt}` is the question, `{FIELD}` a column of its row",
    )
    system: str | None = Field(None, min_length=1, max_length=100_000, description="system message of that question")
    below: float = Field(1.0, description="answers with a smaller reward are replaced")
    by: Annotated[Any, Family("reward")] | None = Field(
        None, description="the reward that decides; default: that of the stage. OVD: kind chat"
    )

    @field_validator("template")
    @classmethod
    def _well_formed(cls, value: str) -> str:
        return well_formed(value)

    def question(self, about: str, prompt: Prompt) -> ChatQuestion | None:
        """None: the prompt lacks a column that the template shows."""
        values = {**field_texts(prompt.fields), PROMPT: question(prompt)}
        if any(name not in values for name in fields_of(self.template)):
            return None
        return ChatQuestion(about, filled(self.template, values), self.system)
