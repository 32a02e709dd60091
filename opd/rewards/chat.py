"""A model on a chat endpoint grades an answer with a digit, 0 to 9. Needs no sandbox; many questions are sent at once.

If its reply does not contain a single digit there is no reward: the sample is masked and counted, never 0.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Callable, Sequence

from pydantic import Field, field_validator

from opd.common.chat_client import CallLog, Chat, ChatQuestion, Endpoint
from opd.common.errors import RecipeError
from opd.common.http import nothing, token_of
from opd.data.prompts import field_texts, fields_of, filled, question, well_formed
from opd.records import Prompt, RewardResult, Sample
from opd.rewards.reward import RewardKind

PROMPT, ANSWER = "prompt", "response"
BEST = 9
THOUGHT = "</think>"
TEMPLATE = (
    "Here is a question and an answer to it.\n\nQuestion:\n{prompt}\n\nAnswer:\n{response}\n\n"
    "How good is the answer? Reply with one digit from 0 (useless) to 9 (right and complete), and nothing else."
)
_NAMED = re.compile(r"(?:score|rating|grade)\W{0,6}(?:is\W{0,3})?(?<![\s:=]-)([0-9])(?![\w.]?\d)", re.IGNORECASE)
_ALONE = re.compile(r"(?<![\w.])(?<!\B-)(\d+(?:\.\d+)?)(?:\s*/\s*(?:9|10))?(?![\w])")


def digit_of(text: str) -> int | None:
    """The score in a reply: a digit after `score`, else the only number in it. None: no score.

    >>> [digit_of(text) for text in ("7", "Score: 8", "It is a 3.", "10", "4 or 5", "-3", "fine")]
    [7, 8, 3, None, None, None, None]
    """
    text = text.rpartition(THOUGHT)[2].replace("*", "")
    named = {int(found) for found in _NAMED.findall(text)}
    if named:
        return named.pop() if len(named) == 1 else None
    numbers = set(_ALONE.findall(text))
    alone = numbers.pop() if len(numbers) == 1 else ""
    return int(alone) if len(alone) == 1 else None


class ChatReward(RewardKind):
    """A model on a chat endpoint grades the answer from 0 to 9; the reward is the grade divided by 9."""

    name = "chat"
    sees_prompt = True
    asks_elsewhere = True

    endpoint: Endpoint = Field(description="of chat: `address`, `model`, `token_env`, `price`, …")
    template: str = Field(
        TEMPLATE,
        min_length=1,
        max_length=100_000,
        description="of chat: `{prompt}` is the question, `{response}` the student's answer, `{FIELD}` a column of its row",
    )

    @field_validator("template")
    @classmethod
    def _well_formed(cls, value: str) -> str:
        if ANSWER not in fields_of(well_formed(value)):
            raise ValueError("the template does not show the answer: put {response} into it")
        return value

    @property
    def label(self) -> str:
        return f"chat {self.endpoint.model}"

    def require(self, sandbox: str) -> None:
        if importlib.util.find_spec("httpx") is None:
            raise RecipeError("rewards: kind chat needs the httpx package: pip install 'opd[remote]'.")
        token_of(self.endpoint.token_env, self.endpoint.address)

    def covers(self, prompt: Prompt) -> bool:
        return not self._missing(prompt)

    def _missing(self, prompt: Prompt) -> list[str]:
        known = {PROMPT, ANSWER, *field_texts(prompt.fields)}
        return [name for name in fields_of(self.template) if name not in known]

    def open(self, calls: CallLog | None, check: Callable[[], None] = nothing) -> ChatRewards:
        purpose = f"reward {hashlib.blake2b(self.template.encode(), digest_size=6).hexdigest()}"
        return ChatRewards(self, Chat(self.endpoint, calls, check, purpose))

    def question(self, sample: Sample) -> ChatQuestion:
        values = {**field_texts(sample.prompt.fields), PROMPT: question(sample.prompt), ANSWER: sample.text}
        return ChatQuestion(sample.rollout.id if sample.rollout is not None else None, filled(self.template, values))


class ChatRewards:
    """An open endpoint. Counts replies without a digit."""

    def __init__(self, kind: ChatReward, chat: Chat) -> None:
        self._kind, self._chat, self._unparsed = kind, chat, 0

    def reward(self, samples: Sequence[Sample]) -> list[RewardResult]:
        answers = self._chat.ask([self._kind.question(sample) for sample in samples])
        return [RewardResult(None, error=found.error) if found.error else self._read(found.text) for found in answers]

    def _read(self, text: str) -> RewardResult:
        digit = digit_of(text)
        if digit is None:
            self._unparsed += 1
            return RewardResult(None, error=f"no single digit in the reply {text[:100]!r}")
        return RewardResult(digit / BEST, feedback=text[:2000])

    def drain(self) -> dict[str, float]:
        found, self._unparsed = {**self._chat.drain(), "unparsed": self._unparsed}, 0
        return found

    def close(self) -> None:
        self._chat.close()
