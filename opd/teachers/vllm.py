"""Teachers behind a server that others wrote. No torch here.

vllm      a vLLM server with its pooling runner: exact hidden states, so every divergence over the full vocabulary
sglang    an SGLang server that returns hidden states: the same, from its own endpoint
openai    any server with OpenAI's /v1/completions that gives log-probs of the prompt: sampled tokens, and likeliest ids
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from opd.errors import RemoteError, ServerAway
from opd.remote import Addresses, Remote, Variable
from opd.settings import Address, Dtype, Positive, StageView, Word
from opd.teachers.kinds import Outlook, Supplies, Surroundings, TeacherKind
from opd.teachers.served import GLANCE
from opd.text import plain
from opd.types import SignalKind, TeacherLike

if TYPE_CHECKING:
    from opd.models.tokenizers import Elsewhere


class ForeignTeacher(TeacherKind):
    """What the two have in common: an address, the name a model has there, and where its tokenizer is read from here."""

    address: Addresses = Field(description="of the server: http://HOST:PORT; or of several that serve the same")
    model: Word = Field(description="what it is called there")
    revision: Word | None = None
    token_env: Variable | None = Field(
        None, description="the environment variable that holds the server's token, if it wants one"
    )
    concurrency: int = Field(8, ge=1, le=256, description="requests at once")
    timeout: float = Field(300.0, gt=0, le=86_400, description="seconds for one answer")
    patience: float = Field(3600.0, ge=0, le=31_536_000, description="seconds that the server may be away")
    tolerance: float = Field(
        0.5, gt=0, le=10, description="nats by which its log-probs of one text may differ from one time to the next"
    )

    @field_validator("address")
    @classmethod
    def _http(cls, value: list[str]) -> list[str]:
        return [one.removesuffix("/v1") for one in value]

    @property
    def local(self) -> str:
        """The same model as a directory or hub id here."""
        return self.model

    @property
    def title(self) -> str:
        return f"{self.model} at {', '.join(self.address)}"

    def connect(self, around: Surroundings, patience: float | None = None) -> Remote:
        return Remote(
            self.address,
            self.token_env,
            timeout=self.timeout if patience is None else GLANCE,
            patience=self.patience if patience is None else patience,
            concurrency=self.concurrency,
            say=around.say,
            check=around.check,
        )

    def longest(self, remote: Remote) -> int | None:
        """Tokens that the model reads there; None: the server does not say. Refuses a name that it does not know."""
        found = remote.json("GET", "/v1/models")
        entries = found.get("data") if isinstance(found, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise RemoteError(
                f"{remote.address}: GET /v1/models was not answered with a list of models. Is it the right server?"
            )
        by_name = {entry.get("id"): entry for entry in entries}
        if self.model not in by_name:
            raise RemoteError(
                f"{remote.address} has no model {self.model!r}; it has {', '.join(map(str, by_name)) or 'none'}. Correct `model`."
            )
        length = by_name[self.model].get("max_model_len")
        return length if isinstance(length, int) and length > 0 else None

    def inquire(self, name: str, tokenizer: Any, student: str) -> Outlook:
        where = f"teachers.{name}: {plain(self.title)}"
        try:
            length = self.longest(self.connect(Surroundings(say=lambda line: None), patience=0.0))
        except ServerAway as error:
            return Outlook(notes=(f"{where}: not reachable now ({plain(error, 300)}). A run waits for it",))
        known = (
            "it does not say how long a text may be"
            if length is None
            else f"texts of up to {self.room(length):,} tokens"
        )
        return Outlook(notes=(f"{where}: {known}",))

    def room(self, length: int | None) -> int:
        """Tokens of a text that fit into what the server reads."""
        return sys.maxsize if length is None else length

    def require(self, name: str, tokenizer: Any, signals: Collection[SignalKind]) -> None:
        """The server itself need not be there until the teacher is opened."""
        from opd.models.head import describe_head
        from opd.models.tokenizers import require_same

        require_same(
            tokenizer, describe_head(self.local, self.revision).tokenizer, "of this recipe", f"{name} ({self.local})"
        )

    def vocabulary(self, around: Surroundings) -> Elsewhere | None:
        from opd.models.head import describe_head
        from opd.models.tokenizers import Elsewhere

        head = describe_head(self.local, self.revision)
        return Elsewhere(self.title, head.stop_ids, head.rows)


class HiddenTeacher(ForeignTeacher):
    """A server that gives hidden states. The head is read here."""

    stands_still = True
    offers = frozenset({"logprobs_at", "hidden", "topk"})

    weights: Address | None = Field(
        None, description="directory or hub id that the output head is read from; default: `model`"
    )
    dtype: Dtype | None = Field(None, description="of the head; default: that of the student's weights")
    batch_tokens: Positive = Field(32768, description="tokens that are asked for together")
    temperature: float = Field(1.0, ge=0.01, le=100, description="of the teacher's distribution alone")

    @property
    def local(self) -> str:
        return self.weights or self.model


class VllmTeacher(HiddenTeacher):
    """A vLLM server with its pooling runner."""

    name = "vllm"

    transfer: Dtype = Field(
        "float32",
        description="of hidden states on their way; bfloat16 is half of it, and exact if the server computes in it",
    )

    def open(self, name: str, supplies: Supplies) -> TeacherLike:
        from opd.teachers.pooling import PoolingTeacher

        return PoolingTeacher(name, self, supplies)


class SglangTeacher(HiddenTeacher):
    """An SGLang server that was started with --return-hidden-states-mode full."""

    name = "sglang"

    def open(self, name: str, supplies: Supplies) -> TeacherLike:
        from opd.teachers.pooling import SglangHidden

        return SglangHidden(name, self, supplies)


class OpenAITeacher(ForeignTeacher):
    """Log-probs of the prompt from /v1/completions: of the tokens themselves, and of the likeliest ids."""

    name = "openai"
    stands_still = True
    offers = frozenset({"logprobs_at", "topk"})

    tokenizer: Address | None = Field(
        None, description="directory or hub id of the same model, for tokenizer and stop ids; default: `model`"
    )
    max_logprobs: Positive = Field(20, description="most log-probs that it gives at a position: --max-logprobs of vLLM")

    @property
    def local(self) -> str:
        return self.tokenizer or self.model

    def room(self, length: int | None) -> int:
        return super().room(length) if length is None else length - 1  # it has to write a token

    def refuse(self, view: StageView) -> Iterable[str]:
        for term in view.terms:
            for role, k in term.needs().topk:
                if role == self.role and k > self.max_logprobs:
                    yield (
                        f"a term wants its {k} likeliest ids, and max_logprobs is {self.max_logprobs}. Set the term's k: "
                        f"{self.max_logprobs}, or start the server with --max-logprobs {k} and set max_logprobs: {k}."
                    )

    def open(self, name: str, supplies: Supplies) -> TeacherLike:
        from opd.teachers.completions import CompletionsTeacher

        return CompletionsTeacher(name, self, supplies)
