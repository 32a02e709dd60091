"""Views that look at rewards and at other answers to the same prompt. No torch here."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from pydantic import Field, ValidationInfo, field_validator, model_validator

from opd.data.questions import asking, field_texts, fields_of, filled, question, well_formed
from opd.settings import Needs, StageView
from opd.teachers.views import QUESTION, Group, ShowingView, Text, View, behind
from opd.types import Prompt, Rendered, Rollout

SIBLING, FEEDBACK = "sibling", "feedback"


class RewardedView(View):
    """What it shows depends on rewards."""

    of_prompt = False

    threshold: float = Field(1.0, description="the least reward of an answer that counts as right")

    def needs(self) -> Needs:
        return Needs(rewards=True)

    def right(self, rollout: Rollout, group: Group) -> bool | None:
        """None: nobody can say."""
        reward = group.rewards.get(rollout.id)
        return None if reward is None else reward >= self.threshold


class SiblingView(RewardedView, ShowingView):
    """Another sample of the group that was right, even if its tokens are the same; its thinking is left out (SDPO)."""

    name = "sibling"
    template: Text = Field(
        "{prompt}\n\nThis is a correct answer:\n\n{sibling}\n\nNow answer the question yourself.",
        description="`{sibling}` is the other answer, `{prompt}` the question, `{FIELD}` a column of its row",
    )

    @field_validator("template")
    @classmethod
    def _shows_it(cls, value: str) -> str:
        if SIBLING not in fields_of(well_formed(value)):
            raise ValueError("the template does not name {sibling}, the answer that is shown")
        return value

    def refuse(self, view: StageView) -> Iterable[str]:
        yield from super().refuse(view)
        if view.rollout.samples == 1:
            yield "view sibling shows another answer to the same prompt, and rollout.samples is 1. Set it to 2 or more."

    def shows(self) -> set[str]:
        return set(fields_of(self.template)) - {QUESTION, SIBLING}

    def rewrite(self, prompt: Prompt, answer: str = "") -> Prompt | None:
        """Without an answer, the least there is to read. None: a row lacks a column that the template names."""
        known = {name: self.cut(text) for name, text in field_texts(prompt.fields).items()}
        known |= {QUESTION: question(prompt), SIBLING: self.cut(answer)}
        if not known.keys() >= set(fields_of(self.template)):
            return None
        return asking(prompt, filled(self.template, known))

    def reprompt(self, prompt: Prompt, rollout: Rollout, group: Group) -> Prompt | None:
        answer = right_sibling(self, rollout, group)
        return self.rewrite(prompt, answer) if answer else None


class FeedbackView(RewardedView, ShowingView):
    """What came back with the reward of the answer itself, another answer that was right, or both (SDPO with rich feedback)."""

    name = "feedback"
    reads_feedback = True
    feedback: Text = Field(
        "\n\nFeedback on an earlier answer:\n\n{feedback}", description="of feedback: stands behind the question"
    )
    sibling: Text | None = Field(
        None, description="of feedback: stands before it where another answer was right, for example {sibling}"
    )
    feedback_beside_sibling: bool = Field(True, description="of feedback: show it even where a sibling is shown")
    closing: str = Field(
        "\n\nNow answer the question.", max_length=100_000, description="of feedback: stands at the end"
    )

    @field_validator("feedback", "sibling")
    @classmethod
    def _named(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and fields_of(well_formed(value)) != [info.field_name]:
            raise ValueError(f"the text names {{{info.field_name}}} once, and no other field")
        return value

    @model_validator(mode="after")
    def _beside(self) -> FeedbackView:
        if self.sibling is None and not self.feedback_beside_sibling:
            raise ValueError("feedback_beside_sibling belongs to `sibling`, which is not given")
        return self

    def refuse(self, view: StageView) -> Iterable[str]:
        yield from super().refuse(view)
        if self.sibling is not None and view.rollout.samples == 1:
            yield "view feedback has a `sibling`, and rollout.samples is 1. Set it to 2 or more, or drop `sibling`."

    def rewrite(self, prompt: Prompt, feedback: str = "", sibling: str = "") -> Prompt:
        """Without either, the least there is to read."""
        parts = [question(prompt)]
        if sibling and self.sibling is not None:
            parts.append(filled(self.sibling, {SIBLING: self.cut(sibling)}))
        if feedback:
            parts.append(filled(self.feedback, {FEEDBACK: self.cut(feedback)}))
        return asking(prompt, "".join([*parts, self.closing]))

    def reprompt(self, prompt: Prompt, rollout: Rollout, group: Group) -> Prompt | None:
        sibling = right_sibling(self, rollout, group) if self.sibling is not None else ""
        feedback = group.feedback.get(rollout.id, "").strip()
        if sibling and not self.feedback_beside_sibling:
            feedback = ""
        return self.rewrite(prompt, feedback, sibling) if sibling or feedback else None


def right_sibling(view: RewardedView, rollout: Rollout, group: Group) -> str:
    """The text of the next answer of the group that was right, so that not all see the same one; empty where there is none.

    An answer is excluded by its index alone: two samples with the same tokens teach each other.
    """
    others = [other for other in group.rollouts if other.id != rollout.id and view.right(other, group) is True]
    others.sort(key=lambda other: other.sample <= rollout.sample)  # stable: later ones first, then from the beginning
    texts = (group.answer(other) for other in others)
    return next((text for text in texts if text), "")


class RevisionView(RewardedView):
    """The answer, a phrase that depends on its reward, and the answer again, which is what is scored (SD-Zero)."""

    name = "revision"
    reprompts = False
    correct: Text = Field(
        "\n\nThe answer above is correct. Let me rephrase it:\n\n", description="of revision: after a right answer"
    )
    wrong: Text = Field(
        "\n\nThe answer above is wrong. Let me correct it:\n\n", description="of revision: after a wrong answer"
    )

    def render(self, prompt: Prompt, rollout: Rollout, group: Group) -> Rendered | None:
        right = self.right(rollout, group)
        if right is None:
            return None
        answer = rollout.response_ids
        if answer.size and int(answer[-1]) in group.stop_ids:  # the conversation goes on
            answer = answer[:-1]
        phrase = group.tokenizer(self.correct if right else self.wrong, add_special_tokens=False)["input_ids"]
        asked = rollout.prompt_ids if self.chat_template == "student" else group.prompt_ids(prompt)
        before = np.concatenate([asked, answer, np.asarray(phrase, dtype=np.int32)])
        return behind(before, rollout, self.skip)
