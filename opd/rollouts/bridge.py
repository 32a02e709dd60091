"""The ids between two turns, without rendering or tokenising the history again.

    student:  … It is 7.<|im_end|>                                         sampled; kept as it is
    bridge:   \\n<|im_start|>user\\nAre you sure?<|im_end|>\\n<|im_start|>assistant\\n

Rendering the whole conversation again would change what the student wrote: templates drop old thinking and trim text, and text
tokenises in more than one way. Instead `[user, assistant MARK, new messages]` is rendered, and the text after MARK is the bridge,
without the stop token if the student sampled it. `Bridge` checks at the start that this works with the chat template.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from opd.common.errors import DataError, ModelError
from opd.data.prompts import prompt_text
from opd.records import Message, Prompt
from opd.rollouts.tool_calls import Call, Tool

MARK, ASK, REPLY = "qMARKz", "qASKz", "qREPLYz"
KNOWN = 4096  # messages between turns whose ids are kept: those of games repeat, and rendering takes a millisecond
SEAMS = ("ok", "It is 7.", "7", "}", "\n", "</tool_call>")  # endings of turns that the start-up check tries

# How results of tools are rendered: after a turn with calls, after a turn with text, or as a user's message.
ToolStyle = Literal["calls", "text", "user"]


def tool_message(call: Call, content: str) -> dict[str, Any]:
    """The result of a call as a message."""
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}


class Bridge:
    """Bridges for one tokenizer and chat template.

    `tools`: the tools that the template renders, if any. The constructor rejects templates that cannot be bridged.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: Sequence[int],
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
    ) -> None:
        self._tokenizer, self._stop_ids = tokenizer, tuple(stop_ids)
        self._kwargs = dict(template_kwargs or {})
        if tools:
            self._kwargs["tools"] = [tool.schema() for tool in tools]
        self._known: dict[tuple[str, bool], np.ndarray] = {}  # ids of messages that were rendered before
        self._stops = self._stop_texts()
        self._special = re.compile("|".join(map(re.escape, sorted({*self._specials(), MARK}, key=len, reverse=True))))
        self.ends_differ = False  # whether another token ends the last turn than earlier ones
        self._ends = {"user": self._checked_end("user")}  # by style: what the template writes until the turn has ended
        self.tools: ToolStyle = self._tool_style(tools) if tools else "user"

    def ids(self, messages: Sequence[Message], *, stopped: bool, calls: Sequence[Call] = ()) -> np.ndarray:
        """The ids from the end of a turn to the beginning of the next one.

        `stopped`: whether the turn ended with a stop id that was sampled. `calls`: the calls that the messages of role `tool`
        answer. Special tokens in the messages' text are broken up, so no text can end or begin a turn.
        """
        if calls:  # their ids are new each time
            return self._rendered_ids(messages, stopped, calls)
        known = (repr(messages), stopped)
        if known not in self._known:
            if len(self._known) >= KNOWN:
                self._known.clear()
            self._known[known] = self._rendered_ids(messages, stopped, ())
        return self._known[known].copy()

    def _rendered_ids(self, messages: Sequence[Message], stopped: bool, calls: Sequence[Call]) -> np.ndarray:
        style, messages = self._styled(messages, calls)
        text = self._after_mark(_answer(calls if style == "calls" else ()), messages)
        before, end = self._ends[style]
        if not text.startswith(before + end):
            raise DataError(
                f"the chat template ends a turn differently before these messages ({text[:60]!r}) than before others "
                f"({before + end!r}). Give the messages other roles."
            )
        if stopped or style == "calls":  # the student has written what comes before the end
            text = text[len(before) :]
        return np.array(self._encode(text)[int(stopped and bool(end)) :], dtype=np.int32)

    def content(self, ids: np.ndarray) -> str | None:
        """The text of the messages between two turns, without what the chat template writes around them. None: it wrote nothing there."""
        text = str(self._tokenizer.decode(ids.tolist())).strip()
        heads, betweens, tails = self._frames()
        ends = [found.end() for head in heads if (found := re.match(head, text))]
        begins = [found.start() for tail in tails if (found := re.search(rf"(?:{tail})\Z", text))]
        if not ends or not begins:
            return None
        text = text[max(ends) : min(begins)]
        for between in betweens:
            text = re.sub(between, "\n", text)
        return text.strip()

    def _frames(self) -> tuple[list[str], list[str], list[str]]:
        """Patterns for what the template writes before, between and after a user's messages and results of tools.

        Decoding may add or drop spaces around special tokens, so the patterns ignore white space.
        """
        call = Call("tool", {"argument": "value"})
        user, tool = _user(REPLY), tool_message(call, REPLY)
        heads, betweens, tails = list[str](), list[str](), list[str]()
        for new in ([user], [tool], [tool, tool], [tool, user]):
            calls = [call] * sum(message["role"] == "tool" for message in new)
            style, messages = self._styled(new, calls)
            try:
                head, *between, tail = self._after_mark(_answer(calls if style == "calls" else ()), messages).split(
                    REPLY
                )
            except DataError:  # many templates take only one call, or require roles to alternate
                continue
            before, end = self._ends[style]
            rest = head.removeprefix(before + end)
            heads.append(rf"(?:{_loosely(before)})?\s*(?:{_loosely(end)})?\s*{_loosely(rest)}\s*")
            betweens += [rf"\s*{_loosely(part)}\s*" for part in between if part.strip()]
            tails.append(rf"\s*{_loosely(tail)}")
        return heads, sorted({*betweens}, key=len, reverse=True), tails

    def spoken(self, text: str, messages: Sequence[Message], calls: Sequence[Call], call_marker: str) -> list[Message]:
        """A turn and the messages after it, for rendering the conversation again.

        `text`: of the turn. What begins with `call_marker` is rendered from the calls if the template does that.
        """
        style, messages = self._styled(messages, calls)
        if style != "calls":
            return [_assistant(text), *messages]
        said = text.partition(call_marker)[0].rstrip() if call_marker else ""
        return [{**_assistant(said), "tool_calls": [call.message() for call in calls]}, *messages]

    def _styled(self, messages: Sequence[Message], calls: Sequence[Call]) -> tuple[ToolStyle, list[Message]]:
        """How the template takes these messages, and the messages in that form with harmless text."""
        given = [self.harmless_message(message) for message in messages]
        style = self.tools if any(message["role"] == "tool" for message in given) else "user"
        if style == "calls" and not calls:
            style = "user"
        return style, _as_user(given) if style == "user" else [*given]

    # The start-up check

    def _tool_style(self, tools: Sequence[Tool]) -> ToolStyle:
        """The first style in which the template shows the result of a tool."""
        for style in ("calls", "text"):
            try:
                self._ends[style] = self._checked_end(style, tools[0])
            except (DataError, ModelError):
                continue
            if style == "text" or self._ends[style][1]:
                return style
        return "user"

    def _checked_end(self, style: ToolStyle, tool: Tool | None = None) -> tuple[str, str]:
        """What the template writes between MARK and the new messages: until the end of the turn, and the token that ends it.

        The student has written the first part itself; it is empty except for calls.
        """
        call = Call(tool.name if tool else "tool", {"argument": "value"})
        answer = _answer([call] if style == "calls" else ())
        new = [{"role": "user", "content": REPLY} if style == "user" else tool_message(call, REPLY)]
        text = self._after_mark(answer, new)
        again = self._after_mark(answer, new, earlier=[_user("One."), _assistant("Two."), _user("Three.")])
        if REPLY not in text:
            raise ModelError(f"the chat template leaves out messages of role {new[0]['role']!r} after an answer.")
        if text != again:
            raise ModelError(
                f"the chat template renders a new message differently after a longer conversation: {text!r} and {again!r}. "
                "So earlier turns cannot be kept as they were sampled. Use another template."
            )
        before, end = self._end_of_turn(answer, text[: text.find(REPLY)])
        if style == "calls" and not end:
            raise ModelError("the chat template does not end a turn with calls by one of the model's stop ids.")
        if end and len(self._encode(end)) != 1:
            raise ModelError(f"the token that ends a turn, {end!r}, is not one id. Add it to the tokenizer.")
        self._check_seams(text)
        self._check_seams(text[len(before) :])
        return before, end

    def _end_of_turn(self, answer: Message, text: str) -> tuple[str, str]:
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            place, stop = min(found)
            return text[:place], stop
        last = self._after_mark(answer, (), open_turn=False)
        if any(last.startswith(stop) for stop in self._stops):  # another token ends the turn once a message follows
            special = self._special.match(text)
            self.ends_differ = True
            return "", special[0] if special else ""
        return "", ""

    def _check_seams(self, text: str) -> None:
        """Whether the ids of the bridge are the same alone and after a turn."""
        alone = self._encode(text)
        for turn in SEAMS:
            if self._encode(turn + text) != self._encode(turn) + alone:
                raise ModelError(
                    f"the tokenizer merges the end of a turn with what follows: {turn!r} and {text[:40]!r} have other ids together "
                    "than alone. Use a chat template that ends turns with a special token."
                )

    # Rendering and encoding

    def _after_mark(
        self, answer: Message, new: Sequence[Message], earlier: Sequence[Message] = (), *, open_turn: bool = True
    ) -> str:
        """What the template writes after MARK. Of several calls, the last one that it renders."""
        messages = (*(earlier or (_user(ASK),)), answer, *new)
        prompt = Prompt("a message between two turns", "", messages=messages)
        text = prompt_text(prompt, self._tokenizer, self._kwargs, open_turn=open_turn)
        _, found, after = text.rpartition(MARK)
        if not found:
            raise ModelError("the chat template does not render the assistant's turns. Use another template.")
        return after

    def _encode(self, text: str) -> list[int]:
        """The end of the turn is encoded along, because some tokenizers treat the beginning of a text differently."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _stop_texts(self) -> list[str]:
        texts = {index: str(self._tokenizer.decode([index])) for index in self._stop_ids}
        return [text for index, text in texts.items() if text and self._encode(text) == [index]]

    def _specials(self) -> Iterable[str]:
        added = self._tokenizer.added_tokens_decoder.values()
        return [*self._stops, *(token.content for token in added if token.special and token.content)]

    def harmless(self, content: Any) -> str:
        """Text in which no special token can end or begin a turn."""
        text = re.sub("[\ud800-\udfff]", "\ufffd", str(content or ""))  # halves of surrogate pairs, as in broken JSON
        return self._special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

    def harmless_message(self, message: Message) -> dict[str, Any]:
        texts = {key: message[key] for key in ("content", "name", "tool_call_id") if key in message}
        return {**message, **{key: self.harmless(text) for key, text in texts.items()}}


def _loosely(text: str) -> str:
    """A pattern for a text with any white space between its words."""
    return r"\s*".join(re.escape(word) for word in text.split())


def _answer(calls: Sequence[Call] = ()) -> Message:
    if not calls:
        return _assistant(MARK)
    marked = [Call(call.name, {"argument": MARK}, call.id).message() for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": marked}


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _as_user(messages: Sequence[Message]) -> list[Message]:
    """Results of tools as a user's message. Neighbouring messages of a user are joined, since many templates alternate roles."""
    joined: list[Message] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        if joined and joined[-1]["role"] == role == "user":
            joined[-1] = _user(f"{joined[-1]['content']}\n\n{content}")
        else:
            joined.append({**message, "role": role, "content": content})
    return joined
