"""The records that travel between sampler, store, teachers and trainer.

Frozen and torch-free; per-token arrays are numpy. Every fact is on the record it belongs to, so no parallel lists
can get out of step. Axis suffixes: T = response tokens, P = prompt tokens, N = rows, D = width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from opd.common.text import shortened

Message = Mapping[str, Any]  # {"role": "user", "content": "…"}
StopReason = Literal["stop", "length", "env"]
SignalKind = Literal["logprobs_at", "topk", "hidden", "layers", "score", "text"]
Layers = Literal["last", "all", "even", "odd"]  # of a model; even, odd: counted from 0


class Author(IntEnum):
    """Who wrote a response token. Every loss term derives its mask from this."""

    STUDENT = 0
    TEACHER = 1
    DATA = 2
    ENV = 3
    TEMPLATE = 4
    REJECTED = 5  # the dataset's rejected answer


@dataclass(frozen=True, repr=False)
class Prompt:
    """One question. Verifiers, rewards and views read `fields`: answer, completion, hint, document…

    >>> Prompt(id="task:addition/train/7", messages=({"role": "user", "content": "add 12+30"},),
    ...        domain="arithmetic", fields={"answer": "42"})  # doctest: +ELLIPSIS
    Prompt(...)
    """

    id: str
    domain: str
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    environment: Any = None  # that answers between turns: `opd.rollouts.environments.Environment`
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # of the chat template, such as tools

    plain: bool = False  # plain text: every token after the first is data, and nobody answers it

    def __repr__(self) -> str:
        """One line, whatever the content."""
        said = self.text if self.messages is None else self.messages[-1].get("content") if self.messages else None
        kind = "text" if self.messages is None else f"messages={len(self.messages)}, last"
        facts = "".join(f", {name}={shortened(value)}" for name, value in list(self.fields.items())[:3])
        return f"Prompt(id={shortened(self.id)}, domain={self.domain!r}, {kind}={shortened(said)}{facts})"


@dataclass(frozen=True)
class Visit:
    """A prompt, and the number of the pass over it."""

    prompt: Prompt
    visit: int
    source: int  # index into the recipe's list of sources
    replay: int = 0  # the step that trains on its stored answers again; 0: it is answered anew


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy. The policy itself is always untempered (semantics 8)."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    stop_ids: tuple[int, ...] = ()  # together one event
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class SampleRequest:
    """One rollout to sample. `key` is the 64-bit random key of (seed, prompt, visit, sample): see `opd.engines.requests`.

    `prefix_ids` are existing response tokens: sampling continues after them. Tokens before `start` are earlier turns; they
    neither end the answer nor count against its limit.
    """

    id: str
    prompt_ids: np.ndarray  # (P,) int32
    key: int
    sampling: Sampling
    prefix_ids: np.ndarray | None = None
    start: int = 0


class SampledToken(NamedTuple):
    """One sampled token. Log-probs as in `Rollout`."""

    request_id: str
    token: int
    logprob: float
    logprob_sampled: float
    logprob_stop: float
    version: int
    author: Author | None = None  # None: the author that the request is for


class TokenColumns(NamedTuple):
    """Many sampled tokens as columns: arrays, or one value for all. `request_ids`: one for all, or one each."""

    request_ids: str | Sequence[str]
    token: np.ndarray
    logprob: np.ndarray | float
    logprob_sampled: np.ndarray | float
    logprob_stop: np.ndarray | float
    version: np.ndarray | int


class Finished(NamedTuple):
    request_id: str
    stop: StopReason


TURN_OF = "turn_of"  # in the extras of a rollout that is one turn of an episode: the episode's id


@dataclass(frozen=True, eq=False, repr=False)
class Rollout:
    """A trajectory with everything known about each token. Ids are exact, never re-tokenised text."""

    id: str
    prompt_id: str
    visit: int  # which pass over this prompt
    sample: int
    domain: str
    source: str  # student | data | teacher:NAME | mixed:NAME | replay
    prompt_ids: np.ndarray  # (P,) int32
    response_ids: np.ndarray  # (T,) int32
    author: np.ndarray  # (T,) uint8, see Author
    logprob: np.ndarray  # (T,) float32, under the policy itself: untempered, full support, stop ids merged
    logprob_sampled: np.ndarray  # (T,) float32, under the actual sampling distribution (temperature, top-p)
    logprob_stop: np.ndarray  # (T,) float32, of the merged stop event at each position
    version: np.ndarray  # (T,) int32, policy version of each token
    stop: StopReason | None  # None: unfinished; it can be continued, but is never trained on
    group: str = ""  # rollouts that an objective needs together: never split across micro-batches
    pair: str = ""
    turns: tuple[tuple[int, int], ...] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        sizes = f"{self.prompt_ids.size} + {self.response_ids.size} tokens"
        return f"Rollout(id={shortened(self.id)}, domain={self.domain!r}, source={self.source!r}, {sizes}, stop={self.stop!r})"

    @property
    def length(self) -> int:
        return int(self.prompt_ids.size + self.response_ids.size)

    @property
    def unit(self) -> str:
        """What stays together when a batch is divided: the pair, or else the group."""
        return self.pair or self.group

    @property
    def episode(self) -> str:
        """Id of the whole answer: its own, or that of the episode that it is a turn of (`history: split`)."""
        return str(self.extras.get(TURN_OF, self.id))


@dataclass(frozen=True)
class SignalNeed:
    """What a term needs from a teacher. `logprobs_at` without ids means at the response tokens."""

    kind: SignalKind
    ids: np.ndarray | None = None
    k: int | None = None
    layers: Layers = "last"  # of the kind `layers`
    hidden: Mapping[str, Signal] | None = (
        None  # hidden states already computed, by rollout id: log-probs follow from them
    )


@dataclass(frozen=True, eq=False)
class Rendered:
    """What a teacher reads of a rollout: ids, and the positions of response tokens in them as spans (s0, s1, t0, t1)."""

    ids: np.ndarray  # int32
    spans: tuple[tuple[int, int, int, int], ...]
    view: str = "same"
    crossed: bool = False  # another tokenizer: a span pairs tokens that cover the same bytes, and is one event
    cut: int = (
        0  # response tokens after the spans, left out because the text was cut: a longer text might tokenise otherwise
    )
    breaks: tuple[int, ...] = ()  # where further texts begin, which are read apart from each other: a view by turn

    @property
    def length(self) -> int:
        return int(self.ids.size)

    @property
    def lengths(self) -> list[int]:
        """Of the texts that are read apart."""
        edges = (0, *self.breaks, self.length)
        return [end - first for first, end in pairwise(edges)]


@dataclass(frozen=True, eq=False, repr=False)
class Signal:
    """A teacher's scores for one rollout. Missing values are NaN and masked out, never 0.

    `spans` pairs response positions with teacher positions (s0, s1, t0, t1). `values` is (T,) for `logprobs_at`,
    (T, D) for `hidden`, (T, L, D) for `layers`; hidden states stay tensors on the teacher's device.
    """

    teacher: str
    teacher_version: int
    role: str
    view: str
    spans: tuple[tuple[int, int, int, int], ...]
    values: Any
    mask: np.ndarray  # (T,) bool
    key: str = ""  # hash of the text that was read, if kept: `opd.teachers.cached.text_key`
    crossed: np.ndarray | None = None  # ids of the teacher's tokens in the spans, if its tokenizer differs

    def __repr__(self) -> str:
        known = f"{int(self.mask.sum())} of {self.mask.size} tokens"
        return f"Signal({self.teacher!r}, role={self.role!r}, {type(self.values).__name__} of {known})"


@dataclass(frozen=True, eq=False, repr=False)
class TopK:
    """The likeliest ids at each position, most likely first, at temperature 1. Missing entries are id -1, NaN."""

    ids: np.ndarray  # (T, K)
    logprobs: np.ndarray  # (T, K)
    tail: np.ndarray  # (T,) log of the mass outside the list; NaN: not known beyond one minus the listed sum
    stop_logprob: np.ndarray  # (T,) of all stop ids together, listed or not; NaN: not known
    fingerprint: str

    def __repr__(self) -> str:
        return f"TopK({self.ids.shape[0]} tokens, {self.ids.shape[1]} ids each)"

    def rows(self, index: np.ndarray) -> TopK:
        """Selects positions."""
        return TopK(self.ids[index], self.logprobs[index], self.tail[index], self.stop_logprob[index], self.fingerprint)

    def spread(self, mask: np.ndarray) -> TopK:
        """Puts the rows at the positions where `mask` is true; the others are missing."""
        place = np.where(mask, np.cumsum(mask) - 1, self.tail.size)
        nothing = np.full((1, max(self.ids.shape[1], 1)), np.nan, dtype=self.logprobs.dtype)
        alone = TopK(
            np.full(nothing.shape, -1, self.ids.dtype), nothing, nothing[:, 0], nothing[:, 0], self.fingerprint
        )
        return TopK.join([self, alone]).rows(place)

    @classmethod
    def join(cls, parts: Sequence[TopK]) -> TopK:
        """Concatenates; shorter lists of ids are padded."""
        if not parts:
            return cls(np.zeros((0, 1), np.int64), np.zeros((0, 1)), np.zeros(0), np.zeros(0), "")
        width = max(part.ids.shape[1] for part in parts)

        def columns(values: np.ndarray, filling: float) -> np.ndarray:
            wide = np.full((values.shape[0], width), filling, dtype=values.dtype)
            wide[:, : values.shape[1]] = values
            return wide

        return cls(
            np.concatenate([columns(part.ids, -1) for part in parts]),
            np.concatenate([columns(part.logprobs, np.nan) for part in parts]),
            np.concatenate([part.tail for part in parts]),
            np.concatenate([part.stop_logprob for part in parts]),
            parts[0].fingerprint,
        )


@dataclass(frozen=True)
class EnvironmentRecord:
    """One call to a tool or sandbox and its result, both plain JSON. `order` counts the calls of a rollout."""

    order: int
    call: Any
    result: Any
    finished: bool = True  # False: the process died before the result was logged


@dataclass(frozen=True)
class RewardResult:
    """The reward for one sample. None means no reward: the sample is masked and counted, never a zero.

    `by_answer`: the answer itself made the reward fail; an evaluation counts it as wrong. `full`: the least reward
    that an evaluation counts as right.
    """

    reward: float | None
    per_turn: tuple[float, ...] = ()
    feedback: str = ""
    error: str = ""
    by_answer: bool = False
    full: float = 1.0


@dataclass(frozen=True)
class Sample:
    """The input of a reward: the prompt and the decoded response (without its stop token).

    In an environment, `text` is the last turn, and `transcript` has all turns with what the environment said.
    """

    prompt: Prompt
    text: str
    rollout: Rollout | None = None
    transcript: str = ""


@dataclass(frozen=True)
class WeightsRef:
    """Weights to publish to a sampler: a policy version and its tensors by parameter name (LoRA already merged).

    `adapter`: LoRA factors by their names in peft's files, for samplers that load them separately.
    """

    version: int
    tensors: Mapping[str, Any]
    adapter: Mapping[str, Any] = field(default_factory=dict)


class TokenSampler(Protocol):
    """Draws tokens. `opd.Sampler` turns them into rollouts.

    Some also accept requests that arrive later (`SamplerKind.takes_turns`): an iterator that yields None has none yet and is polled again.
    """

    def sample(self, requests: Iterable[SampleRequest]) -> Iterator[SampledToken | Finished]: ...

    def load(self, weights: WeightsRef) -> None: ...


class TeacherLike(Protocol):
    """An open teacher. `opd.teachers.scoring.ScoringTeacher` is the usual base class."""

    name: str
    role: str
    offers: frozenset[SignalKind]
    version: int  # of its weights; stored in every signal
    context: int  # tokens it can read

    @property
    def model(self) -> Any:
        """A `LanguageModel` in this process, for sampling, mixing and averaging; None if there is none."""

    def score(
        self, rollouts: Sequence[Rollout], need: SignalNeed, seen: Sequence[Rendered] | None = None
    ) -> list[Signal]:
        """Signals in the order of the rollouts. `seen`: the text it reads for each; default: what the student read."""

    def project(self, hidden: Any) -> Any:
        """Turns its hidden states into its distribution (`opd.Projection`)."""

    def observe(self, step: int, weights: WeightsRef) -> None:
        """Receives the student's weights after a step."""

    def state(self) -> Mapping[str, Any]:
        """Tensors to save in a checkpoint; none for a frozen teacher."""

    def restore(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Restores the state of a checkpoint. The student has already been restored."""


Rewarding = Callable[[Sequence[Sample]], list[RewardResult]]
