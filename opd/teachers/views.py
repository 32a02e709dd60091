"""Views: what a teacher reads of a rollout. The response stays exactly the ids that were sampled; what stands before it may differ.

Positions are paired by spans (s0, s1, t0, t1): response tokens s0..s1 stand at t0..t1 of what the teacher reads, so prompts of any
length line up. A rollout for which a view has nothing to show is masked and counted. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator

from opd.errors import RecipeError
from opd.settings import Choice, Count, Family
from opd.types import Message, Prompt, Rendered, Rollout

Text = Annotated[str, Field(min_length=1, max_length=100_000)]
QUESTION = "prompt"  # in a template: the question itself
THOUGHT = "</think>"  # where thinking ends; a chat template may have opened it before the answer begins


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt, their rewards, and what is needed to render another prompt in front of them."""

    rollouts: Sequence[Rollout]
    tokenizer: Any
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()

    def behind(self, prompt: Prompt, rollout: Rollout, skip: int = 0) -> Rendered:
        """The response behind another prompt; its first `skip` tokens are read, not scored."""
        from opd.data.render import render_prompt

        return behind(render_prompt(prompt, self.tokenizer, self.template_kwargs), rollout, skip)

    def answer(self, rollout: Rollout) -> str:
        """A response as text, without its thinking, whether that ends in text or in a special token."""
        from opd.data.render import response_text

        ids, end = rollout.response_ids, self.tokenizer.convert_tokens_to_ids(THOUGHT)
        known = end is not None and end != self.tokenizer.unk_token_id
        ids = ids[np.flatnonzero(ids == end)[-1] + 1 :] if known and (ids == end).any() else ids
        return response_text(ids, self.tokenizer, self.stop_ids).rpartition(THOUGHT)[2].strip()


def behind(prompt_ids: np.ndarray, rollout: Rollout, skip: int = 0) -> Rendered:
    start, size = prompt_ids.size, rollout.response_ids.size
    skip = min(skip, size)
    return Rendered(
        np.concatenate([prompt_ids, rollout.response_ids]), ((skip, size, start + skip, start + size),), SameView.name
    )


class View(Choice):
    """`rewrite` is enough for a view that changes the prompt alone; one that looks at other rollouts overrides `render`."""

    family = "view"

    skip: Count = Field(0, description="first tokens of every response that are read, but not scored")

    def rewrite(self, prompt: Prompt) -> Prompt | None:
        """What stands in place of the prompt; None: it has nothing to show for this one."""
        return prompt

    def render(self, prompt: Prompt, rollout: Rollout, group: Group) -> Rendered | None:
        rewritten = self.rewrite(prompt)
        return None if rewritten is None else group.behind(rewritten, rollout, self.skip)


AnyView = Annotated[View, Family("view")]


class SameView(View):
    """What the student read."""

    name = "same"

    def render(self, prompt: Prompt, rollout: Rollout, group: Group) -> Rendered | None:
        return behind(rollout.prompt_ids, rollout, self.skip)


class InstructionView(View):
    """An instruction that the student is not given: "Be concise.", a system prompt, experience, a document."""

    name = "instruction"
    instruction: Text = Field(description="its text")
    place: Literal["system", "before", "after"] = Field(
        "before", description="as the system message, or before or after the question"
    )

    def rewrite(self, prompt: Prompt) -> Prompt | None:
        if self.place == "system" and prompt.messages is not None:
            return replace(prompt, messages=_with_system(prompt.messages, self.instruction))
        parts = [question(prompt), self.instruction] if self.place == "after" else [self.instruction, question(prompt)]
        return asking(prompt, "\n\n".join(parts))


class TemplateView(View):
    """The question and fields of its row that the student is not given: a solution, a hint, a document."""

    name = "template"
    template: Text = Field(description="`{prompt}` is the question, `{FIELD}` a column of its row; `{{` is a brace")

    @field_validator("template")
    @classmethod
    def _named(cls, value: str) -> str:
        if not fields_of(value):
            raise ValueError("a template names at least one field, such as {prompt} or {answer}")
        return value

    def rewrite(self, prompt: Prompt) -> Prompt | None:
        known = {QUESTION: question(prompt), **field_texts(prompt.fields)}
        if any(name not in known for name in fields_of(self.template)):
            return None
        return asking(prompt, filled(self.template, known))


# Questions and templates


def question(prompt: Prompt) -> str:
    """The last thing that is asked."""
    if prompt.messages is None:
        return prompt.text or ""
    return str(prompt.messages[_last_question(prompt.messages)]["content"])


def asking(prompt: Prompt, text: str) -> Prompt:
    """The same prompt with another question."""
    if prompt.messages is None:
        return replace(prompt, text=text)
    messages, at = list(prompt.messages), _last_question(prompt.messages)
    messages[at] = {**messages[at], "content": text}
    return replace(prompt, messages=tuple(messages))


def _last_question(messages: Sequence[Message]) -> int:
    asked = [number for number, message in enumerate(messages) if message["role"] == "user"]
    return asked[-1] if asked else len(messages) - 1


def _with_system(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """In front of what the system message says already."""
    if messages and messages[0]["role"] == "system":
        return ({**messages[0], "content": f"{text}\n\n{messages[0]['content']}"}, *messages[1:])
    return ({"role": "system", "content": text}, *messages)


def fields_of(template: str) -> list[str]:
    return [name for name in _FIELD.findall(template) if name]


def filled(template: str, values: Mapping[str, str]) -> str:
    """What is filled in is text and never read as a template."""
    return _FIELD.sub(lambda found: values[found[1]] if found[1] else found[0][0], template)


_FIELD = re.compile(r"\{\{|\}\}|\{(\w+)\}")


def field_texts(fields: Mapping[str, Any]) -> dict[str, str]:
    """Fields that hold something that can be written."""
    return {name: str(value) for name, value in fields.items() if value is not None and value != ""}


# A batch


def texts_for(
    view: View, rollouts: Sequence[Rollout], prompts: Mapping[str, Prompt], groups: Mapping[str, Group], context: int
) -> list[Rendered | None]:
    """What each rollout looks like to a teacher that can read `context` tokens; None: nothing, or more than it can read."""
    found: list[Rendered | None] = []
    for rollout in rollouts:
        text = view.render(prompts[rollout.prompt_id], rollout, groups[rollout.group])
        if text is None or text.ids.size > context:
            found.append(None)
            continue
        require_aligned(view, text, rollout)
        found.append(replace(text, view=view.name))
    return found


def require_aligned(view: View, text: Rendered, rollout: Rollout) -> None:
    """Every span pairs response tokens with the same ids in what is read, behind at least one token."""
    end = 0
    for s0, s1, t0, t1 in text.spans:
        same = np.array_equal(text.ids[t0:t1], rollout.response_ids[s0:s1])
        if not (end <= s0 <= s1 <= rollout.response_ids.size and t0 >= 1 and t1 - t0 == s1 - s0 and same):
            raise RecipeError(
                f"view {view.name}: its span {(s0, s1, t0, t1)} of rollout {rollout.id!r} does not pair the response with itself. "
                "Keep the response's ids as they were sampled."
            )
        end = s1
