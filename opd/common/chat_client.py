"""A client for a model behind an OpenAI-compatible chat endpoint: many questions at once, within a budget.

    chat = Chat(Endpoint(address="http://127.0.0.1:8000/v1", model="big"), calls)
    chat.ask([ChatQuestion("main/p/0/0", "Is this right? …")])      # answers in order; failed ones have an error

Every answered call is logged with its rollout, so a resumed run does not ask again. httpx is imported with the first question.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from pydantic import BaseModel, Field, model_validator

from opd.common.errors import RemoteError, TrainingError
from opd.common.http import HttpAddress, Remote, Variable, nothing
from opd.registry import SETTINGS, Positive, Word

MILLION = 1e6
COUNTED = ("calls", "prompt_tokens", "completion_tokens", "failures")


class Price(BaseModel):
    """Per million tokens, in any currency."""

    model_config = SETTINGS
    input: float = Field(ge=0, description="per million tokens of prompts")
    output: float = Field(ge=0, description="per million tokens of answers")


class Endpoint(BaseModel):
    """The address of a model, how it is asked, and its budget."""

    model_config = SETTINGS
    address: HttpAddress = Field(description="up to the version: http://127.0.0.1:8000/v1")
    model: Word = Field(description="its name there")
    token_env: Variable | None = Field(
        None, description="environment variable that holds the token; never the token itself"
    )
    temperature: float = Field(0.0, ge=0, le=100)
    max_tokens: Positive = Field(1024, description="of an answer")
    concurrency: Positive = Field(8, le=1024, description="questions in progress at once")
    timeout: float = Field(120.0, gt=0, le=86_400, description="seconds for one answer")
    patience: float = Field(600.0, gt=0, le=604_800, description="seconds to wait for an unreachable server")
    price: Price | None = Field(
        None, description="per million tokens: {input: …, output: …}; without it, cost is not counted"
    )
    max_calls: Positive | None = Field(None, description="calls after which the run stops")
    max_cost: float | None = Field(None, gt=0, description="money after which the run stops")

    @model_validator(mode="after")
    def _countable(self) -> Endpoint:
        if self.max_cost is not None and self.price is None:
            raise ValueError("max_cost needs a `price`: {input: …, output: …} per million tokens")
        return self


@dataclass(frozen=True)
class ChatQuestion:
    """`about`: the rollout that the call is logged with; None: the call is not logged."""

    about: str | None
    text: str
    system: str | None = None


@dataclass(frozen=True)
class Answer:
    """`error`: why there is no text."""

    text: str = ""
    error: str = ""


class CallLog(Protocol):
    """Calls and their results, by rollout."""

    def find(self, about: str, call: Any) -> Any:
        """The result of an earlier call that was the same, or None."""

    def add(self, about: str, call: Any, result: Any) -> None: ...

    def earlier(self) -> Sequence[tuple[Any, Any]]:
        """Every (call, result) logged so far."""


class Chat:
    """One endpoint. `drain` returns its counts since the last call, and the total cost.

    `purpose`: what the calls are for. Calls to the same endpoint for another purpose are counted separately.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        calls: CallLog | None = None,
        check: Callable[[], None] = nothing,
        purpose: str = "",
    ) -> None:
        self.endpoint, self._calls, self._purpose = endpoint, calls, purpose
        self._remote = Remote(
            endpoint.address,
            endpoint.token_env,
            timeout=endpoint.timeout,
            patience=endpoint.patience,
            concurrency=endpoint.concurrency,
            check=check,
        )
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self.total: Counter[str] = Counter()
        self._worked = False  # it has answered once
        for call, result in calls.earlier() if calls is not None else ():
            own = {"chat": endpoint.address, "purpose": purpose, "model": endpoint.model}
            if isinstance(call, Mapping) and own.items() <= call.items():
                self._count(self.total, result)
                self._worked = True

    def ask(self, questions: Sequence[ChatQuestion]) -> list[Answer]:
        """Answers in order. It is an error if all fail and none has ever succeeded."""
        bodies = [self._call(question) for question in questions]
        known = [
            None if self._calls is None or question.about is None else self._calls.find(question.about, body)
            for question, body in zip(questions, bodies, strict=True)
        ]
        rest = [number for number, result in enumerate(known) if result is None]
        self._require_budget(len(rest))
        errors: list[RemoteError] = []
        asked = self._remote.map([partial(self._ask, questions[number], bodies[number], errors) for number in rest])
        if errors and not self._worked:
            raise errors[0]
        found = dict(zip(rest, asked, strict=True))
        return [found[number] if result is None else Answer(result["text"]) for number, result in enumerate(known)]

    def drain(self) -> dict[str, float]:
        counts: dict[str, float] = {name: self._counts[name] for name in COUNTED}
        if self.endpoint.price is not None:
            counts |= {"cost": self._cost(self._counts), "cost_total": self._cost(self.total)}
        self._counts.clear()
        return counts

    def close(self) -> None:
        self._remote.close()

    def _call(self, question: ChatQuestion) -> dict[str, Any]:
        """The request as it is logged, without the token."""
        messages = [{"role": "user", "content": question.text}]
        if question.system is not None:
            messages.insert(0, {"role": "system", "content": question.system})
        spec = self.endpoint
        settings = {"temperature": spec.temperature, "max_tokens": spec.max_tokens}
        about = {"chat": spec.address, "purpose": self._purpose, "model": spec.model}
        return {**about, "messages": messages, **settings}

    def _ask(self, question: ChatQuestion, call: Mapping[str, Any], errors: list[RemoteError]) -> Answer:
        self._require_budget(0)
        body = {name: value for name, value in call.items() if name not in ("chat", "purpose")}
        try:
            result = self._read(self._remote.json("POST", "/chat/completions", body))
        except RemoteError as error:
            with self._lock:
                errors.append(error)
                self._counts["failures"] += 1
            return Answer(error=str(error))
        with self._lock:
            self._worked = True
            self._count(self._counts, result)
            self._count(self.total, result)
            if self._calls is not None and question.about is not None:
                self._calls.add(question.about, call, result)
        return Answer(result["text"])

    def _read(self, answer: Any) -> dict[str, Any]:
        """The text and its token counts. Other parts of the answer are ignored."""
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            raise RemoteError(f"{self.endpoint.address}: the answer of {self.endpoint.model!r} has no text.")
        usage = answer.get("usage")
        tokens = [
            usage.get(name) if isinstance(usage, Mapping) else None for name in ("prompt_tokens", "completion_tokens")
        ]
        if not all(isinstance(count, int) and count >= 0 for count in tokens):
            if self.endpoint.price is not None:
                raise RemoteError(f"{self.endpoint.address} does not say how many tokens an answer took. Drop `price`.")
            tokens = [0, 0]
        return {"text": text, "prompt_tokens": tokens[0], "completion_tokens": tokens[1]}

    def _count(self, counts: Counter[str], result: Mapping[str, Any]) -> None:
        counts["calls"] += 1
        for name in ("prompt_tokens", "completion_tokens"):
            counts[name] += result[name]

    def _cost(self, counts: Mapping[str, float]) -> float:
        price = self.endpoint.price
        assert price is not None
        return (counts["prompt_tokens"] * price.input + counts["completion_tokens"] * price.output) / MILLION

    def _require_budget(self, more: int) -> None:
        spec = self.endpoint
        if spec.max_calls is not None and more and self.total["calls"] + more > spec.max_calls:
            raise TrainingError(
                f"{spec.model} at {spec.address}: {self.total['calls']} calls were made, {more} more are needed, and max_calls is "
                f"{spec.max_calls}. Raise it in a new run."
            )
        if spec.max_cost is not None and self._cost(self.total) >= spec.max_cost:
            raise TrainingError(
                f"{spec.model} at {spec.address} has cost {self._cost(self.total):.4g}, and max_cost is {spec.max_cost:g}. "
                "Raise it in a new run."
            )
