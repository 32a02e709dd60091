"""The rollouts of a step, from the first token into the store. Each combines a writer, a sampler and, optionally, an environment.

    visits -> who writes each sample -> requests -> sampler -> (environment -> next turn) -> store

One writer may answer all samples of a prompt. A keyed draw chooses it, so the choice depends on nothing else in the batch. Or a
writer has some samples of every group (`writers: [{kind: data, samples: 1}]`).

Rollouts that an earlier process of the same run left in the store are used. Finished ones stay as they are; unfinished ones
continue after their last durable token. Restarting those would favour short answers, because long ones are interrupted more often.
Evaluation, the start-up table and `opd.Sampler` draw answers in memory with the same loop: see `answers`.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from opd.common.context import Peers
from opd.common.errors import DataError, TrainingError
from opd.data.render import render_prompt, response_text
from opd.data.sources import PromptSource
from opd.engines.alongside import LoggingSampler
from opd.engines.draws import request_key, uniforms
from opd.engines.requests import why_over
from opd.objective.batch import Written
from opd.records import (
    Author,
    Finished,
    Prompt,
    Rollout,
    SampledToken,
    SampleRequest,
    Sampling,
    StopReason,
    TokenColumns,
    TokenSampler,
    Visit,
)
from opd.rollouts.environments import Environment, Step, Turn
from opd.rollouts.replay import RunSource
from opd.rollouts.settings import Rollouts
from opd.rollouts.writers import AUTHORS, Writer, WriterContext
from opd.store import RolloutStore

COMMIT_TOKENS = 512  # group commit: tokens buffered before they are written
DEMONSTRATION = "/demonstration"  # appended to the id of the answer that it replaces
SAMPLED_UNDER = "sampled_under"  # in a rollout's extras: ids of the prompt that it was sampled from
REPLAY = "replay"  # source of rollouts drawn by an earlier run
TRAJECTORY_DRAW = -1  # sample number that keys the choice of writer


@dataclass(frozen=True)
class Planned:
    """A rollout to write: who writes it, and what the writer reads if that differs from the training prompt."""

    visit: Visit
    sample: int
    writer: Writer
    shown: Prompt | None = None
    source: str = ""  # the source noted in the store; default: the writer's
    beside: str = ""  # set for a rollout outside the group of its visit
    sampling: Sampling | None = None  # replaces the stage's sampling


@dataclass
class Rollouter:
    """Collects rollouts for visits."""

    stage: str
    seed: int
    spec: Rollouts
    sources: Sequence[PromptSource]
    tokenizer: object
    sampling: Sampling
    store: RolloutStore
    desk: WriterContext
    max_prompt_tokens: int
    max_length: int  # tokens of a sequence in the sampler
    replays: Mapping[int, RunSource] = field(default_factory=dict)  # by number: sources with stored answers
    exact: bool = False  # replay unfinished rollouts token by token instead of prefilling them
    check_stop: Callable[[], None] = lambda: None
    on_token: Callable[[], None] = lambda: None
    ranks: Peers = field(default_factory=Peers)
    environment: Environment | None = None
    consumed: int | None = 0  # stored rollouts of earlier steps and stages; None: unknown after a repair
    looked_at: dict[str, np.ndarray] = field(default_factory=dict)  # prompt ids rendered in advance
    _replay: dict[str, DurableTokens] = field(default_factory=dict)
    _playing: dict[str, Playing] = field(default_factory=dict)

    def collect(
        self,
        visits: Sequence[Visit],
        version: int,
        prompts: Mapping[str, np.ndarray] | None = None,
        *,
        durable: bool = True,
    ) -> Written:
        """The finished rollouts, in the order of the visits. All of them are in the store.

        `prompts`: the result of `rendered`. `durable`: whether to wait for the disk. Readers of the rollouts wait for it anyway.
        """
        planned: dict[str, Planned] = {}
        unshown = 0
        for visit in visits:
            writer, shown = self._chosen(visit)
            unshown += writer is None
            writer = writer or self.spec.everyone[-1]
            for sample, other in enumerate(self.spec.by_sample):
                plan = Planned(visit, sample, writer, shown) if other is None else Planned(visit, sample, other)
                if planned.setdefault(self.rollout_id(visit, sample), plan) is not plan:
                    raise _twice(visit.prompt)
        prompts = self.rendered(visits) if prompts is None else prompts
        written = self.carry_out(planned, version, prompts, durable=durable)
        written.prompts, written.unshown = len(visits), unshown
        return written

    def for_thread(self, student: TokenSampler | LoggingSampler, check_stop: Callable[[], None]) -> Rollouter:
        """A copy for another thread with its own sampler. It gets its own tokenizer, because tokenizers change their settings while they encode."""
        tokenizer = copy.deepcopy(self.tokenizer)
        desk = replace(self.desk, tokenizer=tokenizer, student=student)
        return replace(
            self, tokenizer=tokenizer, desk=desk, check_stop=check_stop, looked_at={}, _replay={}, _playing={}
        )

    def rendered(self, visits: Sequence[Visit]) -> dict[str, np.ndarray]:
        """Prompt id -> token ids of the visits' prompts."""
        found = {visit.prompt.id: self.prompt_ids(visit.prompt, self.sources[visit.source]) for visit in visits}
        self.looked_at.clear()  # including those of visits that were not used
        return found

    def carry_out(
        self,
        planned: Mapping[str, Planned],
        version: int,
        prompts: Mapping[str, np.ndarray] | None = None,
        *,
        durable: bool = True,
    ) -> Written:
        """Write the planned rollouts, by id. `prompts`: token ids by prompt, if known."""
        sampled = [plan for plan in planned.values() if plan.visit.source not in self.replays]
        writers: dict[tuple[str, str], Writer] = {
            (plan.writer.source(plan.visit, self.desk), plan.writer.author): plan.writer for plan in sampled
        }
        requests, finished, continued = self.ranks.share(lambda: self._requests(planned, version, prompts))
        for (source, author), wanted in requests.items():
            self._sample(writers[source, author].sampler(source, self.desk), wanted, AUTHORS[author])
        self.store.commit(sync=durable)
        self.consumed = None if self.consumed is None else self.consumed + len(planned)
        return Written(list(planned), finished, continued)

    def _requests(
        self, planned: Mapping[str, Planned], version: int, prompts: Mapping[str, np.ndarray] | None
    ) -> tuple[dict[tuple[str, str], list[SampleRequest]], int, int]:
        """The requests to sample, by source and author; and how many rollouts an earlier process had finished and begun.

        All other planned rollouts are in the store already or are written to it here.
        """
        if prompts is None:
            prompts = {plan.visit.prompt.id: self._rendered(plan.visit.prompt, plan) for plan in planned.values()}
        shown = {name: self._rendered(plan.shown, plan) for name, plan in planned.items() if plan.shown is not None}
        durable, finished = self._take_up(planned, prompts, shown)
        requests: dict[tuple[str, str], list[SampleRequest]] = {}
        for rollout_id, plan in planned.items():
            if rollout_id in self.store.entries and rollout_id not in durable:
                continue  # finished by an earlier process
            visit, writer, prompt_ids = plan.visit, plan.writer, prompts[plan.visit.prompt.id]
            if visit.source in self.replays:
                self._replay_stored(rollout_id, plan, prompt_ids, durable.get(rollout_id))
                continue
            source = writer.source(visit, self.desk)
            if rollout_id not in durable:
                self._begin(rollout_id, plan, source, prompt_ids, shown.get(rollout_id))
            completion = writer.completion(visit, self.desk)
            if completion is not None:
                self._write(rollout_id, completion, AUTHORS[writer.author], version, durable.get(rollout_id))
            else:
                key = request_key(self.seed, visit.prompt.id, visit.visit, plan.sample)
                read = shown.get(rollout_id, prompt_ids)
                request = SampleRequest(rollout_id, read, key, plan.sampling or self.sampling)
                request = self._go_on(request, durable.get(rollout_id), writer, version)
                if self.environment is not None and not plan.beside:
                    request = self._play(request, visit.prompt, durable.get(rollout_id))
                requests.setdefault((source, writer.author), []).append(request)
        return requests, finished, len(durable)

    def demonstrate(self, failed: Rollout, visit: Visit, source: str, text: str, version: int) -> str:
        """Store a given text as a demonstration for a failed answer; returns the id of its rollout."""
        rollout_id = failed.id + DEMONSTRATION
        self.consumed = None if self.consumed is None else self.consumed + 1
        known = self.store.entries.get(rollout_id)
        if known is not None and known.stop is not None:
            return rollout_id  # written by an earlier process
        durable = None if known is None else self.store.partial([rollout_id])[0]
        if durable is None:
            plan = Planned(visit, failed.sample, self.spec.everyone[-1])
            self._begin(rollout_id, plan, source, failed.prompt_ids, None)
        self._write(rollout_id, self.desk.completion(visit, text), Author.TEACHER, version, durable)
        return rollout_id

    def rollout_id(self, visit: Visit, sample: int) -> str:
        return f"{self.stage}/{visit.prompt.id}/{visit.visit}/{sample}"

    # Rollouts of an earlier process

    def _take_up(
        self, planned: Mapping[str, Planned], prompts: Mapping[str, np.ndarray], shown: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, Rollout], int]:
        """The unfinished rollouts of this batch with their durable tokens, and the number of finished ones."""
        known = {
            rollout_id: self.store.entries[rollout_id] for rollout_id in planned if rollout_id in self.store.entries
        }
        for rollout_id, entry in known.items():
            if self.consumed is not None and entry.number < self.consumed:
                raise _twice(planned[rollout_id].visit.prompt)
        open_ids = [rollout_id for rollout_id, entry in known.items() if entry.stop is None]
        finished = [rollout_id for rollout_id, entry in known.items() if entry.stop is not None]
        durable = dict(zip(open_ids, self.store.partial(open_ids), strict=True)) if open_ids else {}
        for rollout in [*(self.store.load(finished) if finished else ()), *durable.values()]:
            read = shown.get(rollout.id, prompts[rollout.prompt_id])
            replayed = planned[rollout.id].visit.source in self.replays  # it stores what its writer read
            same = np.array_equal(rollout.prompt_ids, prompts[rollout.prompt_id])
            if not same or not (replayed or np.array_equal(sampled_under(rollout), read)):
                raise DataError(
                    f"prompt {rollout.prompt_id!r} reads differently now than when the run began. Its source has changed: put it back, "
                    "or start a new run."
                )
        return durable, len(finished)

    def _go_on(self, request: SampleRequest, durable: Rollout | None, writer: Writer, version: int) -> SampleRequest:
        if durable is None or not durable.response_ids.size:
            return request
        versions = sorted({*durable.version.tolist(), version})
        if writer.author == "student" and len(versions) > 1 and self.spec.mixed_versions == "refuse":
            raise TrainingError(
                f"rollout {request.id!r} was begun by policy version {versions[0]} and would go on with version {version}; "
                "rollout.mixed_versions is `refuse`. Set it to `allow`: every token keeps its own version and log-prob."
            )
        if self.exact:
            self._replay[request.id] = DurableTokens(durable)
            return request
        return replace(request, prefix_ids=durable.response_ids)

    def prompt_ids(self, prompt: Prompt, source: PromptSource) -> np.ndarray:
        known = self.looked_at.get(prompt.id)
        ids = render_prompt(prompt, self.tokenizer, source.chat_template_kwargs) if known is None else known
        if ids.size > self.max_prompt_tokens:
            raise DataError(
                f"prompt {prompt.id!r} has {ids.size} tokens, and at most {self.max_prompt_tokens} fit beside rollout.max_new_tokens "
                f"{self.spec.max_new_tokens}. Shorten it, or lower rollout.max_new_tokens."
            )
        return ids

    def _rendered(self, prompt: Prompt, plan: Planned) -> np.ndarray:
        return render_prompt(prompt, self.tokenizer, self.sources[plan.visit.source].chat_template_kwargs)

    def fits(self, prompt: Prompt, visit: Visit, new_tokens: int | None = None, context: int = sys.maxsize) -> bool:
        """Whether a prompt that was not checked at the start fits into the sampler. `context`: tokens that its reader can take."""
        ids = render_prompt(prompt, self.tokenizer, self.sources[visit.source].chat_template_kwargs)
        return ids.size + (new_tokens or self.spec.max_new_tokens) <= min(self.max_length, context)

    def _chosen(self, visit: Visit) -> tuple[Writer | None, Prompt | None]:
        """The writer, and what it reads instead of the prompt. Without a writer there is nothing to show, and the student answers."""
        writer = self._writer(visit)
        if not writer.shows_more or visit.source in self.replays:
            return writer, None
        shown = writer.asks(visit.prompt)
        if shown is None or not self.fits(shown, visit):
            return None, None
        return writer, shown

    def _writer(self, visit: Visit) -> Writer:
        everyone: list[Writer] = self.spec.everyone
        if len(everyone) == 1:
            return everyone[0]
        draw = uniforms(request_key(self.seed, visit.prompt.id, visit.visit, TRAJECTORY_DRAW), 0, 1)[0]
        below = 0.0
        for writer in everyone[:-1]:
            below += writer.share
            if draw < below:
                return writer
        return everyone[-1]

    def _begin(
        self, rollout_id: str, plan: Planned, source: str, prompt_ids: np.ndarray, shown: np.ndarray | None
    ) -> None:
        prompt, visit = plan.visit.prompt, plan.visit.visit
        extras = {} if shown is None else {SAMPLED_UNDER: shown.tolist()}
        self.store.begin(
            id=rollout_id, prompt_id=prompt.id, visit=visit, sample=plan.sample, domain=prompt.domain, source=plan.source or source,
            group=f"{prompt.id}/{visit}{plan.beside}", prompt_ids=prompt_ids, extras=extras,
        )  # fmt: skip

    def _write(
        self,
        rollout_id: str,
        completion: tuple[np.ndarray, bool],
        author: Author,
        version: int,
        durable: Rollout | None,
    ) -> None:
        ids, cut = completion
        done = durable.response_ids.size if durable is not None else 0
        self.store.extend(rollout_id, ids[done:], author, version)
        self.store.finish(rollout_id, "length" if cut else "stop")

    def _replay_stored(self, rollout_id: str, plan: Planned, prompt_ids: np.ndarray, durable: Rollout | None) -> None:
        """Store an answer of an earlier run, with its authors and the log-probs of the policy that drew it."""
        visit = plan.visit
        stored = self.replays[visit.source].rollout(visit.prompt, plan.sample)
        if not np.array_equal(stored.prompt_ids, prompt_ids):
            raise DataError(
                f"prompt {visit.prompt.id!r} is rendered to other ids than in the run that answered it: another tokenizer or chat "
                "template, other chat_template_kwargs, or a source that has changed. Put them back."
            )
        if durable is None:
            shown = sampled_under(stored) if SAMPLED_UNDER in stored.extras else None
            self._begin(rollout_id, plan, REPLAY, prompt_ids, shown)
        done = durable.response_ids.size if durable is not None else 0
        *columns, author = (
            getattr(stored, name)[done:]
            for name in ("response_ids", "logprob", "logprob_sampled", "logprob_stop", "version", "author")
        )
        self.store.append_many(TokenColumns(rollout_id, *columns), author)
        assert stored.stop is not None
        self.store.finish(rollout_id, stored.stop)

    def _play(self, request: SampleRequest, prompt: Prompt, durable: Rollout | None) -> SampleRequest:
        """The first turn of an episode, or the turn in which an earlier process was interrupted."""
        assert self.environment is not None
        playing = Playing(self.environment, request, prompt, self.tokenizer)
        if durable is not None:
            playing.play_again(durable)
        self._playing[request.id] = playing
        return playing.turn_request()

    def _sample(
        self, sampler: TokenSampler | LoggingSampler, requests: Sequence[SampleRequest], author: Author
    ) -> None:
        if isinstance(sampler, LoggingSampler):
            for count in sampler.keep(requests, author):
                for _ in range(count):
                    self.on_token()
            return
        playing = {request.id: self._playing.pop(request.id) for request in requests if request.id in self._playing}
        draw_into(
            sampler,
            requests,
            self.store,
            author,
            playing,
            skip=self._replayed,
            check_stop=self.check_stop,
            on_token=lambda token: self.on_token(),
        )

    def _replayed(self, event: SampledToken) -> bool:
        """Whether a token drawn again is already in the store."""
        replay = self._replay.get(event.request_id)
        return replay is not None and replay.holds(event)


class Sink(Protocol):
    """Where tokens are written: the rollout store, or memory."""

    def append_many(self, tokens: TokenColumns, author: Author | np.ndarray = Author.STUDENT) -> None: ...
    def extend(self, id: str, response_ids: np.ndarray, author: Author, version: int) -> None: ...
    def finish(self, id: str, stop: StopReason) -> None: ...
    def note(self, id: str, **facts: Any) -> None: ...
    def commit(self) -> None: ...


def draw_into(
    sampler: TokenSampler,
    requests: Sequence[SampleRequest],
    sink: Sink,
    author: Author = Author.STUDENT,
    playing: Mapping[str, Playing] | None = None,
    *,
    skip: Callable[[SampledToken], bool] = lambda token: False,
    check_stop: Callable[[], None] = lambda: None,
    on_token: Callable[[SampledToken], None] = lambda token: None,
) -> None:
    """Sample answers to requests. The tokens of one sampler step, one per request, go into the sink together.

    `author`: the author of tokens for which the sampler gives none. `playing`: the episodes of requests in an environment. When a turn
    ends, the environment's tokens are added and the next turn is requested, while the sampler works on the other requests.
    """
    drawn: dict[str, SampledToken] = {}
    playing, waiting = playing or {}, 0
    turns: Any = TurnSource(requests)  # gives None when nothing is ready yet
    try:
        for event in sampler.sample(turns if playing else requests):
            if isinstance(event, SampledToken):
                on_token(event)
                if skip(event):
                    continue
                if event.request_id in drawn:  # the next step has begun
                    _keep(drawn, sink, author)
                drawn[event.request_id] = event
                if event.request_id in playing:
                    playing[event.request_id].ids.append(event.token)
                waiting += 1
                if waiting >= COMMIT_TOKENS:
                    sink.commit()
                    waiting = 0
            elif isinstance(event, Finished):
                _keep(drawn, sink, author)
                episode = playing.get(event.request_id)
                following = None if episode is None else episode.end_turn(event.stop, sink)
                turns.ended(following)
                if following is None:
                    sink.finish(event.request_id, event.stop if episode is None else episode.stop)
            check_stop()
    finally:
        _keep(drawn, sink, author)


def _keep(drawn: dict[str, SampledToken], sink: Sink, author: Author) -> None:
    if drawn:
        ids, *columns, authors = zip(*drawn.values(), strict=True)
        mixed = any(one is not None for one in authors)
        by = np.array([author if one is None else one for one in authors], dtype=np.uint8) if mixed else author
        sink.append_many(TokenColumns(ids, *map(np.array, columns)), by)
        drawn.clear()


class TurnSource:
    """Requests, some of which are added later. Gives None while another turn may follow."""

    def __init__(self, requests: Iterable[SampleRequest]) -> None:
        self._ready = deque(requests)
        self._open = len(self._ready)  # requested and not ended

    def ended(self, following: SampleRequest | None) -> None:
        """A request has ended. `following`: the next turn of its rollout."""
        if following is None:
            self._open -= 1
        else:
            self._ready.append(following)

    def __iter__(self) -> TurnSource:
        return self

    def __next__(self) -> SampleRequest | None:
        if self._ready:
            return self._ready.popleft()
        if self._open <= 0:
            raise StopIteration
        return None


class Playing:
    """One rollout in its environment. `stop`: why the rollout ended."""

    def __init__(self, environment: Environment, request: SampleRequest, prompt: Prompt, tokenizer: Any) -> None:
        self._environment, self._request, self._tokenizer = environment, request, tokenizer
        self._episode = environment.open(prompt, request.key, tokenizer)
        self.ids: list[int] = []  # the response so far
        self._start = self._turn = 0  # where the current turn begins, and its number
        self._rewards: list[float | None] = []
        self._feedback: list[str] = []
        self.stop: StopReason = "env"

    def turn_request(self) -> SampleRequest:
        """A request for the turn that begins, or continues, after the tokens so far."""
        whole = self._request.sampling
        left = whole.max_new_tokens - self._start
        sampling = replace(whole, max_new_tokens=min(left, self._environment.turn_tokens or left))
        prefix = np.array(self.ids, dtype=np.int32) if self.ids else None
        return replace(self._request, prefix_ids=prefix, start=self._start, sampling=sampling)

    def end_turn(self, stop: StopReason, sink: Sink) -> SampleRequest | None:
        """End the turn. Returns the next turn, or None at the end of the rollout, when rewards and feedback are noted."""
        step = self._step(stop)
        more = np.array(step.ids, dtype=np.int32)
        over = step.done or self._turn == self._environment.turns or not more.size
        if not over and len(self.ids) + more.size < self._request.sampling.max_new_tokens:
            sink.extend(self._request.id, more, Author.ENV, -1)
            self._begin_turn(more)
            return self.turn_request()
        self.stop = "env" if over else "length"
        facts: dict[str, Any] = {}
        if any(one is not None for one in self._rewards):
            facts["turn_rewards"] = self._rewards
        if self._feedback:
            facts["feedback"] = "\n".join(self._feedback)
        if facts:
            sink.note(self._request.id, **facts)
        return None

    def _step(self, stop: StopReason) -> Step:
        ids = np.array(self.ids[self._start :], dtype=np.int32)
        text = response_text(ids, self._tokenizer, self._request.sampling.stop_ids)
        step = self._episode.step(Turn(self._turn, text, ids, stop))
        self._turn += 1
        self._rewards.append(step.reward)
        if step.feedback:
            self._feedback.append(step.feedback)
        return step

    def _begin_turn(self, more: np.ndarray) -> None:
        self.ids += more.tolist()
        self._start = len(self.ids)

    def play_again(self, durable: Rollout) -> None:
        """Replay the stored turns. The environment must answer them as it did before."""
        ids, own = durable.response_ids, durable.author != Author.ENV
        begins = [0, *(np.flatnonzero(np.diff(own.astype(np.int8))) + 1).tolist(), ids.size]
        for first, end in itertools.pairwise(begins):
            part = ids[first:end]
            if own[first:end].all():
                self.ids += part.tolist()
                continue
            step = self._step(why_over(self.ids, self.turn_request(), self._tokenizer) or "length")
            if not np.array_equal(np.array(step.ids, dtype=np.int32), part):
                raise TrainingError(
                    f"rollout {self._request.id!r}: environment {self._environment.name} answered turn {self._turn} differently than "
                    "before the interruption. Its steps have to be a function of the prompt, the key and the turns."
                )
            self._begin_turn(part)


class MemorySink:
    """Rollouts in memory, for evaluation and custom loops."""

    def __init__(self, requests: Sequence[SampleRequest]) -> None:
        self._columns: dict[str, list[list[Any]]] = {request.id: [[] for _ in range(6)] for request in requests}
        self._stops: dict[str, StopReason] = {}
        self.notes: dict[str, dict[str, Any]] = {}
        for request in requests:
            if request.prefix_ids is not None:
                self.extend(request.id, request.prefix_ids, Author.STUDENT, -1)

    def append_many(self, tokens: TokenColumns, author: Author | np.ndarray = Author.STUDENT) -> None:
        names, *columns = tokens
        authors = [author] * len(names) if isinstance(author, Author) else author
        for name, *values in zip(names, *columns, authors, strict=True):  # type: ignore[arg-type]
            for column, value in zip(self._columns[name], values, strict=True):
                column.append(value)

    def extend(self, id: str, response_ids: np.ndarray, author: Author, version: int) -> None:
        nan = float("nan")
        for token in response_ids:
            for column, value in zip(self._columns[id], (token, nan, nan, nan, version, author), strict=True):
                column.append(value)

    def finish(self, id: str, stop: StopReason) -> None:
        self._stops[id] = stop

    def note(self, id: str, **facts: Any) -> None:
        self.notes.setdefault(id, {}).update(facts)

    def commit(self) -> None:
        pass

    def rollout(self, request: SampleRequest) -> Rollout:
        token, logprob, sampled, stop, version, author = self._columns[request.id]
        return Rollout(
            id=request.id,
            prompt_id=request.id,
            visit=0,
            sample=0,
            domain="",
            source="student",
            group=request.id,
            prompt_ids=request.prompt_ids,
            response_ids=np.array(token, dtype=np.int32),
            author=np.array(author, dtype=np.uint8),
            logprob=np.array(logprob, dtype=np.float32),
            logprob_sampled=np.array(sampled, dtype=np.float32),
            logprob_stop=np.array(stop, dtype=np.float32),
            version=np.array(version, dtype=np.int32),
            stop=self._stops.get(request.id),
        )


@dataclass(frozen=True)
class Play:
    """How to play in-memory rollouts in an environment: the environment, and the prompts by request."""

    environment: Environment
    tokenizer: Any
    prompts: Mapping[str, Prompt]


def answers(
    sampler: TokenSampler,
    requests: Sequence[SampleRequest],
    check_stop: Callable[[], None] = lambda: None,
    on_token: Callable[[SampledToken], None] = lambda token: None,
    play: Play | None = None,
    notes: dict[str, dict[str, Any]] | None = None,
) -> list[Rollout]:
    """Rollouts in memory, in the order of the requests. `on_token`: called for each token as it is drawn. `notes`: receives the environment's notes, by id."""
    sink, playing = MemorySink(requests), dict[str, Playing]()
    if play is not None:
        playing = {
            request.id: Playing(play.environment, request, play.prompts[request.id], play.tokenizer)
            for request in requests
        }
        requests = [playing[request.id].turn_request() for request in requests]
    draw_into(sampler, requests, sink, playing=playing, check_stop=check_stop, on_token=on_token)
    if notes is not None:
        notes |= sink.notes
    return [sink.rollout(request) for request in requests]


def rollout_so_far(request: SampleRequest, tokens: Sequence[SampledToken]) -> Rollout:
    """A rollout that is still being sampled."""
    sink = MemorySink([request])
    for token in tokens:
        _keep({request.id: token._replace(request_id=request.id)}, sink, Author.STUDENT)
    return sink.rollout(request)


def make_requests(
    prompts: Iterable[Prompt], tokenizer: Any, sampling: Sampling, *, seed: int, visit: int = 0
) -> list[SampleRequest]:
    """One request per prompt, with the random key of (seed, prompt, visit, sample 0)."""
    return [
        SampleRequest(prompt.id, render_prompt(prompt, tokenizer), request_key(seed, prompt.id, visit, 0), sampling)
        for prompt in prompts
    ]


def sampled_under(rollout: Rollout) -> np.ndarray:
    """The prompt that the writer read."""
    return np.asarray(rollout.extras.get(SAMPLED_UNDER, rollout.prompt_ids), dtype=np.int32)


def as_trained(rollout: Rollout) -> Rollout:
    """Mark log-probs as unknown if they were drawn under another prompt than the one trained on."""
    if SAMPLED_UNDER not in rollout.extras:
        return rollout
    unknown = np.full(rollout.response_ids.size, np.nan, dtype=np.float32)
    return replace(rollout, logprob=unknown, logprob_sampled=unknown, logprob_stop=unknown)


def _twice(prompt: Prompt) -> DataError:
    return DataError(
        f"prompt {prompt.id!r} comes twice in one pass: two rows or two sources share its id. Give every prompt its own."
    )


class DurableTokens:
    """The durable tokens of one rollout, compared bit by bit with the same tokens drawn again."""

    def __init__(self, durable: Rollout) -> None:
        self._durable, self._next = durable, 0

    def holds(self, token: SampledToken) -> bool:
        """Whether the store already has this token. A different token is an error, because all later ones would differ too."""
        known, at = self._durable, self._next
        if at == known.response_ids.size:
            return False
        self._next += 1
        drawn = np.array([token.logprob, token.logprob_sampled, token.logprob_stop], dtype=np.float32)
        stored = np.array([known.logprob[at], known.logprob_sampled[at], known.logprob_stop[at]], dtype=np.float32)
        if (token.token, token.version, drawn.tobytes()) != (
            known.response_ids[at],
            known.version[at],
            stored.tobytes(),
        ):
            raise TrainingError(
                f"rollout {known.id!r}, token {at}: drawn again it is {token.token} (log-prob {token.logprob:.9g}, version {token.version}), but the "
                f"store holds {known.response_ids[at]} ({known.logprob[at]:.9g}, version {known.version[at]}). An exact resume needs the same "
                "machine, versions and thread count; go on without it: opd resume RUN --mode prefill"
            )
        return True
