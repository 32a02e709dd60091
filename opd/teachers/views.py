"""Views: what a teacher reads of a rollout. The response stays exactly the ids that were sampled; what stands before it may differ.

Positions are paired by spans (s0, s1, t0, t1): response tokens s0..s1 stand at t0..t1 of what the teacher reads, so prompts of any
length line up. A rollout for which a view has nothing to show is masked and counted. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from opd.data.questions import asking, field_texts, fields_of, filled, question, replaced, well_formed, with_system
from opd.errors import RecipeError
from opd.settings import Choice, Count, Family, Positive, StageView, Word, changed
from opd.types import Prompt, Rendered, Rollout

Text = Annotated[str, Field(min_length=1, max_length=100_000)]
CUT = " ... "  # where a text that was too long lacks a part
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
    feedback: Mapping[str, str] = field(default_factory=dict)  # what came with the rewards, where anything did
    student: Any = None  # the tokenizer of the responses, where `tokenizer` is the teacher's

    def behind(self, prompt: Prompt, rollout: Rollout, skip: int = 0) -> Rendered:
        """The response behind another prompt; its first `skip` tokens are read, not scored."""
        return behind(self.prompt_ids(prompt), rollout, skip)

    def prompt_ids(self, prompt: Prompt) -> np.ndarray:
        from opd.data.render import render_prompt

        return render_prompt(prompt, self.tokenizer, self.template_kwargs)

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
    reads_feedback: ClassVar[bool] = False  # so that what came with a reward is kept
    crosses: ClassVar[bool] = False  # the teacher has another tokenizer, and reads the response in its own tokens
    of_prompt: ClassVar[bool] = True  # the prompt alone says what it shows
    reprompts: ClassVar[bool] = True  # what it shows is a prompt, so that answers can be sampled under it

    skip: Count = Field(0, description="first tokens of every response that are read, but not scored")
    chat_template: Literal["student", "teacher"] = Field(
        "student", description="whose chat template stands around what is read; the response stays as it was sampled"
    )

    @property
    def as_sampled(self) -> bool:
        """Whether it shows exactly what the student read, so that there always is something to show."""
        return False

    @property
    def instructs(self) -> bool:
        """Whether it asks for another manner of answering, which a close follower overdoes."""
        return False

    def refuse(self, view: StageView) -> Iterable[str]:
        if self.skip >= view.rollout.max_new_tokens:
            yield f"view {self.name}: skip {self.skip} leaves nothing of {view.rollout.max_new_tokens} tokens to score. Lower it."

    @property
    def idle_for_student(self) -> Iterable[str]:
        """Settings that mean nothing where it is the student that reads and answers."""
        if self.chat_template == "teacher" and self.reprompts:
            yield f"the student reads the view {self.name} through its own chat template. Drop chat_template."
        if self.skip:
            yield f"skip is for tokens that a teacher scores, and under the view {self.name} the student answers. Drop it."

    def rewrite(self, prompt: Prompt) -> Prompt | None:
        """What stands in place of the prompt; None: it has nothing to show for this one."""
        return prompt

    def shows(self) -> set[str]:
        """Fields of a row that it names."""
        return set()

    def reprompt(self, prompt: Prompt, rollout: Rollout, group: Group) -> Prompt | None:
        """What stands in place of the prompt for this answer."""
        return self.rewrite(prompt)

    def render(self, prompt: Prompt, rollout: Rollout, group: Group) -> Rendered | None:
        shown = self.reprompt(prompt, rollout, group)
        return None if shown is None else group.behind(shown, rollout, self.skip)


AnyView = Annotated[View, Family("view", default="same")]


class SameView(View):
    """What the student read."""

    name = "same"
    by_default = True

    @property
    def as_sampled(self) -> bool:
        return self.chat_template == "student"

    def render(self, prompt: Prompt, rollout: Rollout, group: Group) -> Rendered | None:
        if not self.as_sampled:
            return super().render(prompt, rollout, group)
        return behind(rollout.prompt_ids, rollout, self.skip)


class InstructionView(View):
    """An instruction that the student is not given: "Be concise.", a system prompt, experience, a document."""

    name = "instruction"
    instruction: Text = Field(description="its text")
    place: Literal["system", "before", "after"] = Field(
        "before", description="as the system message, or before or after the question"
    )

    @property
    def instructs(self) -> bool:
        return True

    def rewrite(self, prompt: Prompt) -> Prompt | None:
        if self.place == "system" and prompt.messages is not None:
            return replace(prompt, messages=with_system(prompt.messages, self.instruction))
        parts = [question(prompt), self.instruction] if self.place == "after" else [self.instruction, question(prompt)]
        return asking(prompt, "\n\n".join(parts))


class ShowingView(View):
    """Views that show texts beside the question. The question is never cut, and neither is the response."""

    longest: Positive | None = Field(None, description="characters of each text that is shown; longer ones are cut")
    keep: Literal["start", "end", "both"] = Field("start", description="with longest: the part of a text that stays")

    @model_validator(mode="after")
    def _cuts(self) -> ShowingView:
        if "keep" in changed(self) and self.longest is None:
            raise ValueError("`keep` says which part of a text stays when it is longer than `longest`: set that, too")
        return self

    def cut(self, text: str) -> str:
        if self.longest is None or len(text) <= self.longest:
            return text
        head = {"start": self.longest, "end": 0, "both": self.longest - self.longest // 2}[self.keep]
        return text[:head] + CUT + text[len(text) - (self.longest - head) :]


class TemplateView(ShowingView):
    """The question and fields of its row that the student is not given: a solution, a hint, a document."""

    name = "template"
    template: Text = Field(description="`{prompt}` is the question, `{FIELD}` a column of its row; `{{` is a brace")

    @field_validator("template")
    @classmethod
    def _named(cls, value: str) -> str:
        if not fields_of(well_formed(value)):
            raise ValueError("a template names at least one field, such as {prompt} or {answer}")
        return value

    @property
    def instructs(self) -> bool:
        """One that shows nothing of the row but the question is an instruction around it."""
        return not self.shows() and self.template.strip() != f"{{{QUESTION}}}"

    def shows(self) -> set[str]:
        return set(fields_of(self.template)) - {QUESTION}

    def rewrite(self, prompt: Prompt) -> Prompt | None:
        known = {name: self.cut(text) for name, text in field_texts(prompt.fields).items()}
        known = {QUESTION: question(prompt), **known}
        if any(name not in known for name in fields_of(self.template)):
            return None
        return asking(prompt, filled(self.template, known))


class ContextView(ShowingView):
    """A shorter text in place of the long one that the student reads: only what the question is about (OPSDL)."""

    name = "context"
    document: Word = Field("document", description="of context: the column with the text that stands in the prompt")
    instead: Word = Field("relevant", description="of context: the column with what is read in its place")

    @model_validator(mode="after")
    def _differs(self) -> ContextView:
        if self.document == self.instead:
            raise ValueError(f"`document` and `instead` are both {self.document!r}, so nothing would change")
        return self

    def shows(self) -> set[str]:
        return {self.document, self.instead}

    def rewrite(self, prompt: Prompt) -> Prompt | None:
        texts = field_texts(prompt.fields)
        long, short = texts.get(self.document), texts.get(self.instead)
        if long is None or short is None:
            return None
        return replaced(prompt, long, self.cut(short))


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
    """Every span pairs response tokens with the same ids in what is read, behind at least one token; with those of another
    tokenizer, which cover the same bytes, where the teacher has one.
    """
    end = 0
    for s0, s1, t0, t1 in text.spans:
        same = t1 > t0 and s1 > s0 if text.crossed else np.array_equal(text.ids[t0:t1], rollout.response_ids[s0:s1])
        inside = end <= s0 <= s1 <= rollout.response_ids.size and 1 <= t0 <= t1 <= text.ids.size
        if not (inside and same and (text.crossed or t1 - t0 == s1 - s0)):
            raise RecipeError(
                f"view {view.name}: its span {(s0, s1, t0, t1)} of rollout {rollout.id!r} does not pair the response with itself. "
                "Keep the response's ids as they were sampled."
            )
        end = s1
