"""Views: what a teacher reads of a rollout. The response keeps exactly the sampled ids; the text before it may differ.

Spans (s0, s1, t0, t1) pair positions: response tokens s0..s1 are at t0..t1 of the teacher's text, so prompts of any length line
up. A rollout for which a view has nothing to show is masked and counted. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, ValidationInfo, field_validator, model_validator

from opd.common.errors import RecipeError
from opd.data.prompts import asking, field_texts, fields_of, filled, question, replaced, well_formed, with_system
from opd.models.tokenizers import Span, common_spans, open_end, pieces, readable
from opd.objective.batch import own_turns
from opd.records import Prompt, Rendered, Rollout
from opd.registry import Choice, Count, Family, Needs, Positive, StageView, Word, changed

if TYPE_CHECKING:
    from opd.rollouts.bridge import Bridge

Text = Annotated[str, Field(min_length=1, max_length=100_000)]
CUT = " ... "  # replaces the part that was cut from a long text
QUESTION = "prompt"  # the template field of the question
THOUGHT = "</think>"  # end of thinking; a chat template may have opened it before the answer begins


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt, their rewards, and what is needed to render another prompt before them."""

    rollouts: Sequence[Rollout]
    tokenizer: Any
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()
    feedback: Mapping[str, str] = field(default_factory=dict)  # feedback that came with the rewards, if any
    student: Any = None  # the tokenizer of the responses, if `tokenizer` is the teacher's
    turn_feedback: Mapping[str, Sequence[str]] = field(default_factory=dict)  # what an environment said about each turn

    def response_after(self, prompt: Prompt, rollout: Rollout, skip: int = 0) -> Rendered:
        """The response after another prompt. Its first `skip` tokens are read but not scored."""
        return response_after(self.prompt_ids(prompt), rollout, skip)

    def prompt_ids(self, prompt: Prompt) -> np.ndarray:
        from opd.data.prompts import render_prompt

        return render_prompt(prompt, self.tokenizer, self.template_kwargs)

    def answer(self, rollout: Rollout) -> str:
        """A response as text without its thinking, whether `</think>` is plain text or a special token."""
        from opd.data.prompts import response_text

        ids, end = rollout.response_ids, self.tokenizer.convert_tokens_to_ids(THOUGHT)
        known = end is not None and end != self.tokenizer.unk_token_id
        ids = ids[np.flatnonzero(ids == end)[-1] + 1 :] if known and (ids == end).any() else ids
        return response_text(ids, self.tokenizer, self.stop_ids).rpartition(THOUGHT)[2].strip()


def response_after(prompt_ids: np.ndarray, rollout: Rollout, skip: int = 0) -> Rendered:
    start, size = prompt_ids.size, rollout.response_ids.size
    skip = min(skip, size)
    return Rendered(
        np.concatenate([prompt_ids, rollout.response_ids]), ((skip, size, start + skip, start + size),), SameView.name
    )


class View(Choice):
    """Override `rewrite` to change the prompt alone, or `render` to use other rollouts."""

    family = "view"
    reads_feedback: ClassVar[bool] = False  # reads feedback, so that it is kept with the rewards
    by_turn: ClassVar[bool] = False  # shows every turn of an episode after a text of its own
    crosses: ClassVar[bool] = False  # the teacher reads the response in the tokens of its own tokenizer
    of_prompt: ClassVar[bool] = True  # depends on the prompt alone
    reprompts: ClassVar[bool] = True  # shows a prompt, so that answers can be sampled under it

    skip: Count = Field(0, description="first tokens of every response that are read, but not scored")
    chat_template: Literal["student", "teacher"] = Field(
        "student", description="whose chat template renders the text; the response keeps the sampled ids"
    )

    @property
    def as_sampled(self) -> bool:
        """Whether it shows exactly what the student read, so there is always something to show."""
        return False

    @property
    def instructs(self) -> bool:
        """Whether it changes the style of answers. A teacher that closely follows the student would overdo it."""
        return False

    def check(self, view: StageView) -> Iterable[str]:
        if self.skip >= view.rollout.max_new_tokens:
            yield f"view {self.name}: skip {self.skip} leaves nothing of {view.rollout.max_new_tokens} tokens to score. Lower it."

    @property
    def idle_for_student(self) -> Iterable[str]:
        """Settings that have no effect if the student reads the view and answers."""
        if self.chat_template == "teacher" and self.reprompts:
            yield f"under the view {self.name} the student answers, with its own chat template. Drop chat_template."
        if self.skip:
            yield f"skip is for tokens that a teacher scores, and under the view {self.name} the student answers. Drop it."

    def rewrite(self, prompt: Prompt) -> Prompt | None:
        """The prompt to show instead; None: nothing to show for this prompt."""
        return prompt

    def shows(self) -> set[str]:
        """The fields of a row that it uses."""
        return set()

    def reprompt(self, prompt: Prompt, rollout: Rollout, group: Group) -> Prompt | None:
        """The prompt to show for this answer."""
        return self.rewrite(prompt)

    def render(self, prompt: Prompt, rollout: Rollout, group: Group) -> Rendered | None:
        shown = self.reprompt(prompt, rollout, group)
        return None if shown is None else group.response_after(shown, rollout, self.skip)


AnyView = Annotated[View, Family("view", default="same")]


class SameView(View):
    """Shows exactly what the student read."""

    name = "same"
    by_default = True

    @property
    def as_sampled(self) -> bool:
        return self.chat_template == "student"

    def render(self, prompt: Prompt, rollout: Rollout, group: Group) -> Rendered | None:
        if not self.as_sampled:
            return super().render(prompt, rollout, group)
        return response_after(rollout.prompt_ids, rollout, self.skip)


class InstructionView(View):
    """Adds an instruction that the student does not see: "Be concise.", a system prompt, experience, a document."""

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
    """Views that show texts next to the question. Neither the question nor the response is ever cut."""

    longest: Positive | None = Field(None, description="characters of each text that is shown; longer ones are cut")
    keep: Literal["start", "end", "both"] = Field("start", description="with longest: the part of a text that is kept")

    @model_validator(mode="after")
    def _cuts(self) -> ShowingView:
        if "keep" in changed(self) and self.longest is None:
            raise ValueError("`keep` says which part of a longer text is kept: set `longest` as well")
        return self

    def cut(self, text: str) -> str:
        if self.longest is None or len(text) <= self.longest:
            return text
        head = {"start": self.longest, "end": 0, "both": self.longest - self.longest // 2}[self.keep]
        return text[:head] + CUT + text[len(text) - (self.longest - head) :]


class TemplateView(ShowingView):
    """Shows the question with fields of its row that the student does not see: a solution, a hint, a document."""

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
        """A template without fields other than the question is an instruction."""
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
    """Replaces the long document that the student reads by its relevant part (OPSDL)."""

    name = "context"
    document: Word = Field("document", description="of context: the column with the text in the prompt")
    instead: Word = Field("relevant", description="of context: the column with the text that replaces it")

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


# --- Rendering a batch ---


def texts_for(
    view: View, rollouts: Sequence[Rollout], prompts: Mapping[str, Prompt], groups: Mapping[str, Group], context: int
) -> list[Rendered | None]:
    """What a teacher with a context of `context` tokens reads of each rollout; None: nothing to show, or too long."""
    found: list[Rendered | None] = []
    for rollout in rollouts:
        text = view.render(prompts[rollout.prompt_id], rollout, groups[rollout.group])
        if text is None or max(text.lengths) > context:
            found.append(None)
            continue
        require_aligned(view, text, rollout)
        found.append(replace(text, view=view.name))
    return found


def require_aligned(view: View, text: Rendered, rollout: Rollout) -> None:
    """Raises unless every span pairs response tokens with the same ids in the text, after at least one token. With another
    tokenizer, the spans pair tokens that cover the same bytes.
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


# --- Views that use rewards and other answers to the same prompt ---


SIBLING, FEEDBACK, NEXT = "sibling", "feedback", "next"


class RewardedView(View):
    """Views that depend on rewards."""

    of_prompt = False

    threshold: float = Field(1.0, description="the least reward of an answer that counts as right")

    def needs(self) -> Needs:
        return Needs(rewards=True)

    def right(self, rollout: Rollout, group: Group) -> bool | None:
        """Whether the answer is right; None: not known."""
        reward = group.rewards.get(rollout.id)
        return None if reward is None else reward >= self.threshold


class SiblingView(RewardedView, ShowingView):
    """Shows another right sample of the group without its thinking, even if its tokens are the same (SDPO)."""

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

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if view.rollout.samples == 1:
            yield "view sibling shows another answer to the same prompt, and rollout.samples is 1. Set it to 2 or more."

    def shows(self) -> set[str]:
        return set(fields_of(self.template)) - {QUESTION, SIBLING}

    def rewrite(self, prompt: Prompt, answer: str = "") -> Prompt | None:
        """Without an answer, the shortest possible text. None: the row lacks a column that the template names."""
        known = {name: self.cut(text) for name, text in field_texts(prompt.fields).items()}
        known |= {QUESTION: question(prompt), SIBLING: self.cut(answer)}
        if not known.keys() >= set(fields_of(self.template)):
            return None
        return asking(prompt, filled(self.template, known))

    def reprompt(self, prompt: Prompt, rollout: Rollout, group: Group) -> Prompt | None:
        answer = right_sibling(self, rollout, group)
        return self.rewrite(prompt, answer) if answer else None


class FeedbackView(RewardedView, ShowingView):
    """Shows the feedback on the answer itself, another right answer, or both (SDPO with rich feedback)."""

    name = "feedback"
    reads_feedback = True
    feedback: Text = Field(
        "\n\nFeedback on an earlier answer:\n\n{feedback}", description="of feedback: added after the question"
    )
    sibling: Text | None = Field(
        None, description="of feedback: added before it where another answer was right, for example {sibling}"
    )
    feedback_beside_sibling: bool = Field(True, description="of feedback: show it even where a sibling is shown")
    closing: str = Field(
        "\n\nNow answer the question.", max_length=100_000, description="of feedback: added at the end"
    )

    @field_validator("feedback", "sibling")
    @classmethod
    def _named(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and fields_of(well_formed(value)) != [info.field_name]:
            raise ValueError(f"the text names {{{info.field_name}}} once, and no other field")
        return value

    @model_validator(mode="after")
    def _has_sibling(self) -> FeedbackView:
        if self.sibling is None and not self.feedback_beside_sibling:
            raise ValueError("feedback_beside_sibling belongs to `sibling`, which is not given")
        return self

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if self.sibling is not None and view.rollout.samples == 1:
            yield "view feedback has a `sibling`, and rollout.samples is 1. Set it to 2 or more, or drop `sibling`."

    def rewrite(self, prompt: Prompt, feedback: str = "", sibling: str = "") -> Prompt:
        """Without either, the shortest possible text."""
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
    """The text of the next right answer of the group, so that not all see the same one; empty if there is none.

    Only the answer's own index is excluded: two samples with the same tokens teach each other.
    """
    others = [other for other in group.rollouts if other.id != rollout.id and view.right(other, group) is True]
    others.sort(key=lambda other: other.sample <= rollout.sample)  # stable: later ones first, then from the beginning
    texts = (group.answer(other) for other in others)
    return next((text for text in texts if text), "")


class RevisionView(RewardedView):
    """Shows the answer, a phrase that depends on its reward, and the answer again, which is scored (SD-Zero)."""

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
        if answer.size and int(answer[-1]) in group.stop_ids:  # the conversation continues
            answer = answer[:-1]
        phrase = group.tokenizer(self.correct if right else self.wrong, add_special_tokens=False)["input_ids"]
        asked = rollout.prompt_ids if self.chat_template == "student" else group.prompt_ids(prompt)
        before = np.concatenate([asked, answer, np.asarray(phrase, dtype=np.int32)])
        return response_after(before, rollout, self.skip)


# --- A view by turn ---


class TurnsView(ShowingView):
    """Shows every turn of an episode after a hint of its own: what the environment said after that turn (OpenClaw-RL).

    A hint is read before its own turn, at the end of the message that the turn answers; other turns are read without it.
    """

    name = "turns"
    of_prompt = False
    reprompts = False
    by_turn = True
    hint: Text = Field(
        "\n\nHint: {feedback}", description="of turns: `{feedback}` on the turn, and `{next}`, what followed it"
    )
    shortest: Count = Field(
        1, description="of turns: a turn whose feedback or next message has fewer characters is not scored"
    )

    @field_validator("hint")
    @classmethod
    def _of_the_turn(cls, value: str) -> str:
        if not set(fields_of(well_formed(value))) & {FEEDBACK, NEXT} or set(fields_of(value)) - {FEEDBACK, NEXT}:
            raise ValueError("a hint names {feedback} or {next}, and no other field")
        return value

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if self.chat_template == "teacher":
            yield "view turns shows the episode as the student read it, so chat_template teacher has no effect. Drop it."
        if not view.environments:
            yield "view turns shows what an environment says after a turn, and there is none. Set rollout.environment, or use feedback."

    def render(self, prompt: Prompt, rollout: Rollout, group: Group) -> Rendered | None:
        turns, texts = own_turns(rollout), list[Rendered]()
        begins = [*(first for first, _ in turns[1:]), rollout.response_ids.size]
        frame, asked = message_frame(prompt, group), rollout.prompt_ids
        names = fields_of(self.hint)
        bridge = bridge_of(prompt, group) if NEXT in names else None
        feedback = [*group.turn_feedback.get(rollout.id, ()), *[""] * len(turns)]
        for (first, end), begin, said in zip(turns, begins, feedback, strict=False):
            following = rollout.response_ids[end:begin]
            known = {FEEDBACK: said.strip(), NEXT: message_text(following, bridge, group) if NEXT in names else ""}
            short = any(len(known[name]) < max(self.shortest, 1) for name in names)
            before = np.concatenate([asked, rollout.response_ids[:first]])
            if short or end - first <= self.skip or not frame.ends(before):
                continue
            text = filled(self.hint, {name: self.cut(value) for name, value in known.items()})
            hint = group.tokenizer(text, add_special_tokens=False)["input_ids"]
            place = before.size - len(frame.tail)
            read = [before[:place], np.asarray(hint, dtype=np.int32), before[place:], rollout.response_ids[first:end]]
            start = before.size + len(hint)
            span = (first + self.skip, end, start + self.skip, start + end - first)
            texts.append(Rendered(np.concatenate(read), (span,), self.name))
        return read_apart(texts) if texts else None


def read_apart(texts: Sequence[Rendered]) -> Rendered:
    """Texts that a teacher reads apart, as one: each has the positions of some turns."""
    starts = np.cumsum([0, *(text.length for text in texts)]).tolist()
    spans = [
        (s0, s1, start + t0, start + t1)
        for start, text in zip(starts[:-1], texts, strict=True)
        for s0, s1, t0, t1 in text.spans
    ]
    ids = np.concatenate([text.ids for text in texts])
    return Rendered(ids, tuple(spans), texts[0].view, breaks=tuple(starts[1:-1]))


@dataclass(frozen=True)
class MessageFrame:
    """What a chat template writes around a user's message. `tail`: ids from the end of its content to the answer."""

    tail: tuple[int, ...]

    def ends(self, ids: np.ndarray) -> bool:
        """Whether a text ends as the template ends a user's message."""
        return tuple(ids[ids.size - len(self.tail) :].tolist()) == self.tail


def message_frame(prompt: Prompt, group: Group) -> MessageFrame:
    """The frame of a user's message. Text prompts have none."""
    if prompt.messages is None:
        return MessageFrame(())
    one, other = (
        group.prompt_ids(replace(prompt, messages=({"role": "user", "content": digit},))).tolist() for digit in "01"
    )
    same = next((n for n, (a, b) in enumerate(zip(one[::-1], other[::-1], strict=True)) if a != b), 0)
    return MessageFrame(tuple(one[len(one) - same :]))


def bridge_of(prompt: Prompt, group: Group) -> Bridge | None:
    """What rendered the messages between an episode's turns. None: the environment gave ids."""
    from opd.rollouts.bridge import Bridge

    environment = prompt.environment
    if prompt.messages is None or (environment is not None and environment.takes_tokenizer):
        return None
    kwargs = {**group.template_kwargs, **prompt.template_kwargs}
    kwargs.pop("tools", None)
    tools = environment.tools() if environment is not None and environment.tool_calls == "auto" else ()
    return Bridge(group.tokenizer, group.stop_ids, kwargs, tools)


def message_text(ids: np.ndarray, bridge: Bridge | None, group: Group) -> str:
    """What an environment said between two turns."""
    found = None if bridge is None else bridge.content(ids)
    return str(group.tokenizer.decode(ids.tolist(), skip_special_tokens=True)).strip() if found is None else found


# --- A view for teachers with another tokenizer ---
# Spans pair tokens of both tokenizers that cover the same bytes; each span is one event with the product of its tokens'
# probabilities, and so is the stop. At the end of a cut text the teacher's tokens may differ ("1" for "18"), so they are left out.


class BytesView(View):
    """Shows the response in the teacher's own tokens, paired with the student's by the bytes they cover."""

    name = "bytes"
    crosses = True
    reprompts = False  # shows ids of another tokenizer
    chat_template: Literal["teacher"] = Field("teacher", description="of bytes: always the teacher's own")

    def render(self, prompt: Prompt, rollout: Rollout, group: Group) -> Rendered | None:
        from opd.data.prompts import ids_after

        response, stopped = _without_stop(rollout.response_ids, group.stop_ids)
        asked, ours = group.prompt_ids(prompt), pieces(group.student, response)
        whole = b"".join(ours)
        text = readable(whole)
        theirs = ids_after(prompt, text, group.tokenizer, group.template_kwargs) if text else []
        read = pieces(group.tokenizer, theirs)
        spans, start = common_spans(ours, read), asked.size
        complete, cut = _reaches_both_ends(spans, len(ours), len(theirs)), 0
        if rollout.stop == "length" or len(text.encode()) < len(whole):
            kept = _before_open_end(spans, read, group.tokenizer)
            cut = sum(s1 - max(s0, self.skip) for s0, s1, _, _ in spans[len(kept) :] if s1 > self.skip)
            spans = kept
        eos = group.tokenizer.eos_token_id
        if stopped and complete and eos is not None:
            spans, theirs = [*spans, (len(ours), len(ours) + 1, len(theirs), len(theirs) + 1)], [*theirs, eos]
        placed = tuple((s0, s1, start + t0, start + t1) for s0, s1, t0, t1 in spans if s0 >= self.skip)
        if rollout.response_ids.size and not placed and not cut:
            return None
        ids = np.concatenate([asked, np.asarray(theirs, dtype=np.int32)])
        return Rendered(ids, placed, self.name, crossed=True, cut=cut)


def _before_open_end(spans: list[Span], theirs: list[bytes], tokenizer: object) -> list[Span]:
    """The spans that the teacher would tokenise in the same way whatever came next."""
    ends, last = np.cumsum([len(piece) for piece in theirs]), open_end(tokenizer, b"".join(theirs))
    return [span for span in spans if ends[span[3] - 1] <= last]


def _without_stop(ids: np.ndarray, stop_ids: tuple[int, ...]) -> tuple[np.ndarray, bool]:
    stopped = bool(ids.size) and int(ids[-1]) in stop_ids
    return (ids[:-1] if stopped else ids), stopped


def _reaches_both_ends(spans: list[Span], ours: int, theirs: int) -> bool:
    return (spans[-1][1], spans[-1][3]) == (ours, theirs) if spans else not ours and not theirs


def aligned_bytes(rollout: Rollout, text: Rendered, student: object, stop_ids: tuple[int, ...]) -> tuple[int, int]:
    """(bytes of a response in spans, bytes of the response)."""
    response, _ = _without_stop(rollout.response_ids, stop_ids)
    sizes = np.array([len(piece) for piece in pieces(student, response)], dtype=np.int64)
    inside = np.zeros(sizes.size, dtype=bool)
    for s0, s1, _, _ in text.spans:
        inside[s0 : min(s1, sizes.size)] = True
    end = text.spans[-1][1] if text.spans else 0
    inside[end : end + text.cut] = True  # tokens left out at a cut count as aligned
    return int(sizes[inside].sum()), int(sizes.sum())
