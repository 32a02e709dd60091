"""Teachers on third-party servers. No torch here.

vllm      a vLLM server with its pooling runner: exact hidden states, so every divergence over the full vocabulary
sglang    an SGLang server that returns hidden states: the same, from its own endpoint
openai    any server with OpenAI's /v1/completions that gives log-probs of the prompt: sampled tokens, and likeliest ids
"""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, field_validator

from opd.common.context import RunContext
from opd.common.errors import RemoteError, ServerAway
from opd.common.http import Addresses, Remote, Variable
from opd.common.text import plain
from opd.models.tokenizers import RemoteVocabulary, fingerprint, require_same
from opd.records import Rendered, Rollout, Signal, SignalKind, SignalNeed, TeacherLike, TopK, WeightsRef
from opd.registry import Address, Dtype, Positive, StageView, Word
from opd.teachers.kinds import RemoteFacts, TeacherInputs, TeacherKind
from opd.teachers.scoring import Page, ScoringTeacher, tempered
from opd.teachers.served import GLANCE, RemoteProbe
from opd.teachers.views import response_after

if TYPE_CHECKING:
    from torch import Tensor

    from opd.divergences import Projection

    pass


class ForeignTeacher(TeacherKind):
    """Base of these kinds: an address, the model's name on the server, and where its tokenizer is read from locally."""

    address: Addresses = Field(description="of the server: http://HOST:PORT; or of several that serve the same")
    model: Word = Field(description="its name on the server")
    revision: Word | None = None
    token_env: Variable | None = Field(
        None, description="the environment variable that holds the server's token, if it needs one"
    )
    concurrency: int = Field(8, ge=1, le=256, description="requests at once")
    timeout: float = Field(300.0, gt=0, le=86_400, description="seconds to wait for one answer")
    patience: float = Field(3600.0, ge=0, le=31_536_000, description="seconds to wait for an unreachable server")
    tolerance: float = Field(
        0.5, gt=0, le=10, description="nats by which its log-probs of one text may differ between two requests"
    )

    @field_validator("address")
    @classmethod
    def _http(cls, value: list[str]) -> list[str]:
        return [one.removesuffix("/v1") for one in value]

    @property
    def local(self) -> str:
        """The same model as a local directory or hub id."""
        return self.model

    @property
    def title(self) -> str:
        return f"{self.model} at {', '.join(self.address)}"

    def connect(self, context: RunContext, patience: float | None = None) -> Remote:
        return Remote(
            self.address,
            self.token_env,
            timeout=self.timeout if patience is None else GLANCE,
            patience=self.patience if patience is None else patience,
            concurrency=self.concurrency,
            say=context.say,
            check=context.check_stop,
        )

    def longest(self, remote: Remote) -> int | None:
        """The server's context length in tokens; None: not stated. Raises if the server does not know the model's name."""
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

    def inquire(self, name: str, tokenizer: Any, student: str) -> RemoteFacts:
        where = f"teachers.{name}: {plain(self.title)}"
        try:
            length = self.longest(self.connect(RunContext(say=lambda line: None), patience=0.0))
        except ServerAway as error:
            return RemoteFacts(notes=(f"{where}: not reachable now ({plain(error, 300)}). A run waits for it",))
        known = (
            "it does not say how long a text may be"
            if length is None
            else f"texts of up to {self.room(length):,} tokens"
        )
        return RemoteFacts(notes=(f"{where}: {known}",))

    def room(self, length: int | None) -> int:
        """Longest text in tokens that fits into the server's context."""
        return sys.maxsize if length is None else length

    def require(self, name: str, tokenizer: Any, signals: Collection[SignalKind]) -> None:
        """Does not contact the server, which may start later."""
        from opd.models.language_model import describe_head
        from opd.models.tokenizers import require_same

        require_same(
            tokenizer, describe_head(self.local, self.revision).tokenizer, "of this recipe", f"{name} ({self.local})"
        )

    def vocabulary(self, context: RunContext) -> RemoteVocabulary | None:
        from opd.models.language_model import describe_head
        from opd.models.tokenizers import RemoteVocabulary

        head = describe_head(self.local, self.revision)
        return RemoteVocabulary(self.title, head.stop_ids, head.rows)


class HiddenTeacher(ForeignTeacher):
    """A server that gives hidden states. The head is read locally."""

    never_changes = True
    offers = frozenset({"logprobs_at", "hidden", "topk"})

    weights: Address | None = Field(
        None, description="directory or hub id that the output head is read from; default: `model`"
    )
    dtype: Dtype | None = Field(None, description="of the head; default: that of the student's weights")
    batch_tokens: Positive = Field(32768, description="tokens per request")
    temperature: float = Field(1.0, ge=0.01, le=100, description="of the teacher's distribution alone")

    @property
    def local(self) -> str:
        return self.weights or self.model


class VllmTeacher(HiddenTeacher):
    """Scores on a vLLM server with its pooling runner: exact hidden states."""

    name = "vllm"

    transfer: Dtype = Field(
        "float32",
        description="of hidden states over the network; bfloat16 takes half the bytes of float32, and is exact if the server computes in it",
    )

    def open(self, name: str, supplies: TeacherInputs) -> TeacherLike:

        return PoolingTeacher(name, self, supplies)


class SglangTeacher(HiddenTeacher):
    """Scores on an SGLang server started with --return-hidden-states-mode full: exact hidden states."""

    name = "sglang"

    def open(self, name: str, supplies: TeacherInputs) -> TeacherLike:

        return SglangHidden(name, self, supplies)


class OpenAITeacher(ForeignTeacher):
    """Reads log-probs of the prompt from /v1/completions: of the tokens themselves, and of the likeliest ids."""

    name = "openai"
    never_changes = True
    offers = frozenset({"logprobs_at", "topk"})

    tokenizer: Address | None = Field(
        None, description="directory or hub id of the same model, for tokenizer and stop ids; default: `model`"
    )
    max_logprobs: Positive = Field(20, description="most log-probs that it gives at a position: --max-logprobs of vLLM")

    @property
    def local(self) -> str:
        return self.tokenizer or self.model

    def room(self, length: int | None) -> int:
        return super().room(length) if length is None else length - 1  # the server has to generate a token

    def check(self, view: StageView) -> Iterable[str]:
        for term in view.terms:
            for role, k in term.needs().topk:
                if role == self.role and k > self.max_logprobs:
                    yield (
                        f"a term needs its {k} likeliest ids, and max_logprobs is {self.max_logprobs}. Set the term's k: "
                        f"{self.max_logprobs}, or start the server with --max-logprobs {k} and set max_logprobs: {k}."
                    )

    def open(self, name: str, supplies: TeacherInputs) -> TeacherLike:

        return CompletionsTeacher(name, self, supplies)


# --- Log-probs of a prompt's tokens from /v1/completions ---
# The server knows neither our stop event nor the mass outside its list. The sum over several stop ids is known only if all are
# listed, or if unlisted ones cannot change it; otherwise it is missing and masked.


SHARP = 1e-3  # largest change of the stop event by unlisted ids, in nats
LEAST = -9000.0  # vLLM writes -9999 for log 0
Listed = Mapping[int, float]  # id -> log-prob: the likeliest ids of a position, and the token in the text


class CompletionsTeacher:
    offers: frozenset[SignalKind] = frozenset({"logprobs_at", "topk"})
    model = None

    def __init__(self, name: str, kind: OpenAITeacher, supplies: TeacherInputs) -> None:
        from opd.models.language_model import describe_head

        self.name, self.role, self._kind = name, kind.role, kind
        student, head = supplies.student, describe_head(kind.local, kind.revision)
        require_same(student.tokenizer, head.tokenizer, student.name, f"{name} ({kind.local})")
        self._stops, self._fingerprint = supplies.stop_ids, fingerprint(head.tokenizer)
        self.elsewhere = RemoteVocabulary(kind.title, head.stop_ids, head.rows)
        self.version = int(self._fingerprint[:12], 16)
        self._remote = kind.connect(supplies.context)
        self.context = min(head.context, kind.room(kind.longest(self._remote)))
        self._same = RemoteProbe(self, self._remote, student.size, kind.tolerance)
        self._same.open(self._stops)
        plain = next(index for index in range(student.size) if index not in self._stops)
        self._ask([plain, plain], kind.max_logprobs)  # fails early if max_logprobs is too large

    def score(
        self, rollouts: Sequence[Rollout], need: SignalNeed, seen: Sequence[Rendered] | None = None
    ) -> list[Signal]:
        if need.kind not in self.offers or need.ids is not None:
            raise ValueError(
                f"teacher {self.name!r} gives {', '.join(sorted(self.offers))} of the response tokens only"
            )
        seen = seen if seen is not None else [response_after(rollout.prompt_ids, rollout) for rollout in rollouts]
        several = self._kind.max_logprobs if len(self._stops) > 1 else 0
        k = max(several, need.k or 0)
        answers = self._same.map([partial(self._ask, text.ids.tolist(), k) for text in seen])
        return [
            self._signal(rollout, text, listed, need.kind, k)
            for rollout, text, listed in zip(rollouts, seen, answers, strict=True)
        ]

    def _ask(self, ids: list[int], k: int) -> list[Listed | None]:
        """The list at every position of a text; None where there is none, as at the first."""
        body = {
            "model": self._kind.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": k,
        }
        found = self._remote.json("POST", "/v1/completions", body, load=len(ids))
        try:
            entries = found["choices"][0]["prompt_logprobs"]
            listed = [None if entry is None else _listed(entry) for entry in entries]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise RemoteError(
                f"{self._kind.title}: its answer has no readable `prompt_logprobs`, so it does not give log-probs of a "
                "prompt's tokens. vLLM's generate server does; one that answers with texts alone cannot score."
            ) from None
        wrong = [
            place for place, (token, entry) in enumerate(zip(ids, listed, strict=False)) if token not in (entry or ids)
        ]
        if len(listed) != len(ids) or wrong:
            raise RemoteError(
                f"{self._kind.title}: {len(ids)} tokens were sent, and the answer covers {len(listed)}"
                f"{f', another one at {wrong[0]}' if wrong else ''}. It has to score exactly the ids that it is given."
            )
        return listed

    def _signal(self, rollout: Rollout, text: Rendered, listed: list[Listed | None], kind: str, k: int) -> Signal:
        size = rollout.response_ids.size
        mask, own = np.zeros(size, dtype=bool), np.full(size, np.nan, dtype=np.float32)
        ids, logprobs = (
            np.full((size, max(k, 1)), -1, dtype=np.int32),
            np.full((size, max(k, 1)), np.nan, dtype=np.float32),
        )
        tops = TopK(ids, logprobs, own.copy(), own.copy(), self._fingerprint)
        for s0, s1, t0, _ in text.spans:
            for place in range(s0, s1):
                token = t0 + place - s0
                entry = listed[token]
                if entry is None:
                    continue
                if kind == "topk":
                    self._fill(tops, place, entry, k)
                    mask[place] = True
                else:
                    own[place] = self._logprob(entry, int(text.ids[token]), k)
                    mask[place] = not math.isnan(own[place])
        values = tops if kind == "topk" else own
        return Signal(self.name, self.version, self.role, text.view, text.spans, values, mask)

    def _logprob(self, entry: Listed, token: int, k: int) -> float:
        if token in self._stops and len(self._stops) > 1:
            return self._stop(entry, k)
        return entry[token] if entry[token] > LEAST else math.nan

    def _fill(self, tops: TopK, place: int, entry: Listed, k: int) -> None:
        """Fills in the k likeliest ids. The text's own token is left out if it is not among them."""
        import torch

        from opd.divergences.torch_backend import sum_resolution

        likeliest = sorted(entry.items(), key=lambda item: -item[1])[: tops.ids.shape[1]]
        tops.ids[place, : len(likeliest)] = [index for index, _ in likeliest]
        tops.logprobs[place, : len(likeliest)] = [value for _, value in likeliest]
        rest = 1.0 - math.fsum(math.exp(value) for _, value in likeliest)
        tops.tail[place] = math.log(rest) if rest > sum_resolution(torch.float32) else math.nan  # else rounding
        tops.stop_logprob[place] = self._stop(entry, k)

    def _stop(self, entry: Listed, k: int) -> float:
        """Log-prob of all stop ids together; NaN if not known. An unlisted id is at most as likely as the last of the k likeliest.

        The text's own token is listed in addition, however unlikely it is.
        """
        known = [entry[index] for index in self._stops if index in entry]
        if not known:
            return math.nan
        mass = math.fsum(math.exp(value) for value in known)
        last = sorted(entry.values(), reverse=True)[:k][-1]
        unlisted = (len(self._stops) - len(known)) * math.exp(last)
        return math.log(mass) if mass > 0 and math.log1p(unlisted / mass) <= SHARP else math.nan

    def project(self, hidden: Any) -> Any:
        raise ValueError(f"teacher {self.name!r} gives no hidden states")

    def observe(self, step: int, weights: WeightsRef) -> None:
        """Does nothing: it never changes."""

    def state(self) -> Mapping[str, Any]:
        return self._same.state()

    def restore(self, version: int, tensors: Mapping[str, Any]) -> None:
        self._same.restore(version, tensors)


def _listed(entry: Mapping[str, Any]) -> Listed:
    found = {int(index): float(value["logprob"]) for index, value in entry.items()}
    if not found or not all(value <= 0.01 for value in found.values()):  # NaN fails as well
        raise ValueError("no log-probs")
    return found


# --- Exact hidden states from third-party servers; the head is local ---


START = "Start it with --runner pooling --convert embed --pooler-config.task token_embed, or use kind: openai."


class RemoteHidden(ScoringTeacher):
    """Subclasses implement the request in `_ask`."""

    def __init__(self, name: str, kind: HiddenTeacher, supplies: TeacherInputs) -> None:
        from opd.models.language_model import load_head

        student = supplies.student
        super().__init__(name, kind.role, supplies.stop_ids, kind.batch_tokens, student.device)
        self._kind, self._student, self.temperature = kind, student, kind.temperature
        dtype = kind.dtype or str(student.dtype).removeprefix("torch.")
        self._head = load_head(kind.local, kind.revision, dtype, str(student.device))
        require_same(student.tokenizer, self._head.tokenizer, student.name, f"{name} ({kind.local})")
        self.fingerprint = fingerprint(self._head.tokenizer)
        self.elsewhere = RemoteVocabulary(kind.title, self._head.stop_ids, self._head.rows)
        self.version = int(self._head.digest[:12], 16)
        self._remote = kind.connect(supplies.context)
        self.context = min(self._head.context, kind.room(kind.longest(self._remote)))
        self._same = RemoteProbe(self, self._remote, student.size, kind.tolerance)
        self._same.open(self.stop_ids)

    def hidden(self, page: Page) -> Tensor:
        import torch

        texts = [part.tolist() for part in page.ids_T.cpu().split(list(page.layout.lengths))]
        rows = np.concatenate(self._same.map([partial(self._ask, ids) for ids in texts]))
        return torch.from_numpy(rows)[page.predicting_N.cpu()].to(self.device)

    @abstractmethod
    def _ask(self, ids: list[int]) -> np.ndarray:
        """(T, D) in fp32, after the last norm."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        return self._head.width

    def project(self, hidden: Tensor) -> Projection:
        return tempered(self._head.project(hidden, self._student.size), self.temperature)

    def state(self) -> Mapping[str, Any]:
        return self._same.state()

    def restore(self, version: int, tensors: Mapping[str, Any]) -> None:
        self._same.restore(version, tensors)


class PoolingTeacher(RemoteHidden):
    """vLLM's pooling runner."""

    _kind: VllmTeacher

    def _ask(self, ids: list[int]) -> np.ndarray:
        """(T, D) in fp32, after the last norm."""
        body = {
            "model": self._kind.model,
            "input": ids,
            "task": "token_embed",
            "use_activation": False,  # otherwise every row is normalised to length 1
            "encoding_format": "bytes_only",
            "embed_dtype": self._kind.transfer,
            "endianness": "little",
            "add_special_tokens": False,
        }
        try:
            raw, _ = self._remote.bytes("POST", "/pooling", body, load=len(ids))
        except RemoteError as error:
            if "answered with 404" in str(error) or "pooler-config" in str(error):
                raise RemoteError(f"{error} It does not give hidden states as it was started. {START}") from None
            raise
        each, shape = {"float32": 4, "bfloat16": 2}[self._kind.transfer], (len(ids), self._head.width)
        if len(raw) != each * shape[0] * shape[1]:
            raise RemoteError(
                f"{self._kind.title}: {len(ids)} tokens were answered with {len(raw)} bytes, and the head of {self._head.name} wants "
                f"{shape[1]} numbers of {each} bytes for each. Is it the same model?"
            )
        if each == 4:
            return np.frombuffer(raw, dtype="<f4").reshape(shape).astype(np.float32)
        return (np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)


class SglangHidden(RemoteHidden):
    """SGLang's /generate. It has to generate a token, and returns hidden states as lists of numbers."""

    _kind: SglangTeacher

    def _ask(self, ids: list[int]) -> np.ndarray:
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_hidden_states": True,
        }
        found = self._remote.json("POST", "/generate", body, load=len(ids))
        try:
            rows = np.asarray(found["meta_info"]["hidden_states"][0], dtype=np.float32)
        except (KeyError, IndexError, TypeError, ValueError):
            raise RemoteError(
                f"{self._kind.title}: its answer has no `hidden_states` that can be read. Start it with --return-hidden-states-mode full "
                "(--enable-return-hidden-states in older ones)."
            ) from None
        if rows.shape != (len(ids), self._head.width):
            raise RemoteError(
                f"{self._kind.title}: {len(ids)} tokens were answered with hidden states of shape {rows.shape}, and the head of "
                f"{self._head.name} wants {self._head.width} numbers for each. Start it with --disable-radix-cache: it returns no "
                "hidden states for a cached prefix. Is it the same model?"
            )
        return rows
