"""Views that look at rewards and at other answers to the same prompt. No torch here."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from pydantic import Field, field_validator

from opd.settings import Needs, StageView
from opd.teachers.views import QUESTION, Group, Text, View, asking, behind, field_texts, fields_of, filled, question
from opd.types import Prompt, Rendered, Rollout

SIBLING = "sibling"


class RewardedView(View):
    """What it shows depends on rewards."""

    threshold: float = Field(1.0, description="the least reward of an answer that counts as right")

    def needs(self) -> Needs:
        return Needs(rewards=True)

    def right(self, rollout: Rollout, group: Group) -> bool | None:
        """None: nobody can say."""
        reward = group.rewards.get(rollout.id)
        return None if reward is None else reward >= self.threshold


class SiblingView(RewardedView):
    """Another answer of the group that was right, never the answer itself; its thinking is left out (SDPO)."""

    name = "sibling"
    template: Text = Field(
        "{prompt}\n\nThis is a correct answer:\n\n{sibling}\n\nNow answer the question yourself.",
        description="`{sibling}` is the other answer, `{prompt}` the question, `{FIELD}` a column of its row",
    )

    @field_validator("template")
    @classmethod
    def _shows_it(cls, value: str) -> str:
        if SIBLING not in fields_of(value):
            raise ValueError("the template does not name {sibling}, the answer that is shown")
        return value

    def refuse(self, view: StageView) -> Iterable[str]:
        if view.rollout.samples == 1:
            yield "view sibling shows another answer to the same prompt, and rollout.samples is 1. Set it to 2 or more."

    def render(self, prompt: Prompt, rollout: Rollout, group: Group) -> Rendered | None:
        others = [other for other in group.rollouts if self._teaches(other, rollout, group)]
        if not others:
            return None
        later = [
            other for other in others if other.sample > rollout.sample
        ]  # in turn, so that not all see the same one
        answer = group.answer((later or others)[0])
        known = {**field_texts(prompt.fields), QUESTION: question(prompt), SIBLING: answer}
        if not answer or any(name not in known for name in fields_of(self.template)):
            return None
        return group.behind(asking(prompt, filled(self.template, known)), rollout, self.skip)

    def _teaches(self, other: Rollout, rollout: Rollout, group: Group) -> bool:
        same = other.id == rollout.id or np.array_equal(other.response_ids, rollout.response_ids)
        return not same and self.right(other, group) is True


class RevisionView(RewardedView):
    """The answer, a phrase that depends on its reward, and the answer again, which is what is scored (SD-Zero)."""

    name = "revision"
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
        before = np.concatenate([rollout.prompt_ids, answer, np.asarray(phrase, dtype=np.int32)])
        return behind(before, rollout, self.skip)
