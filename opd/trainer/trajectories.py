"""The answers of a step, from their writers into the store.

Who writes is decided per visit by a draw keyed like the sampler's, so it depends on nothing else in the batch.

What an earlier process of the same run left in the store is used: finished rollouts as they are, unfinished ones from their
last durable token on. They are never begun again, since that would favour short answers: long ones are interrupted more often.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from opd.data.render import render_prompt
from opd.data.source import PromptSource
from opd.data.stream import Visit
from opd.errors import DataError, TrainingError
from opd.sampling.ahead import KeepsTokens
from opd.sampling.draws import request_key, uniforms
from opd.sampling.replay import RunSource
from opd.sampling.rollouts import Rollouts
from opd.sampling.writers import AUTHORS, Desk, Writer
from opd.store import RolloutStore
from opd.trainer.world import World
from opd.types import (
    Author,
    Finished,
    Prompt,
    Rollout,
    SampledToken,
    SampleRequest,
    Sampling,
    TokenColumns,
    TokenSampler,
)

COMMIT_TOKENS = 512  # group commit: tokens buffered before they are written
DEMONSTRATION = "/demonstration"  # behind the id of the answer that it replaces
SAMPLED_UNDER = "sampled_under"  # in a rollout's extras: ids of the prompt that it was sampled under
REPLAY = "replay"  # the source of rollouts that an earlier run drew
TRAJECTORY_DRAW = -1  # the sample number that keys "who writes?"


@dataclass(frozen=True)
class Planned:
    """A rollout to be: who writes it, and what is read where that is not the prompt that it is trained on under."""

    visit: Visit
    sample: int
    writer: Writer
    shown: Prompt | None = None
    source: str = ""  # what the store notes; else what the writer says
    beside: str = ""  # what keeps it out of the group of its visit
    sampling: Sampling | None = None  # other than the stage's


@dataclass
class Trajectories:
    """Collects rollouts for visits."""

    stage: str
    seed: int
    spec: Rollouts
    sources: Sequence[PromptSource]
    tokenizer: object
    sampling: Sampling
    store: RolloutStore
    desk: Desk
    max_prompt_tokens: int
    max_length: int  # of a sequence in the sampler
    replays: Mapping[int, RunSource] = field(default_factory=dict)  # sources that bring their answers, by number
    exact: bool = False  # replay unfinished rollouts token by token instead of prefilling them
    check_stop: Callable[[], None] = lambda: None
    on_token: Callable[[], None] = lambda: None
    world: World = field(default_factory=World)
    consumed: int | None = 0  # rollouts in the store of earlier steps and stages; None: unknown, it was repaired
    looked_at: dict[str, np.ndarray] = field(default_factory=dict)  # ids of prompts that somebody has rendered for us
    newest: list[str] = field(default_factory=list)  # ids of the latest batch
    used: int = 0  # rollouts of the latest batch that an earlier process had finished
    continued: int = 0  # and those it had begun
    unshown: int = 0  # prompts of the latest batch that a view had nothing to show for: they were answered plainly
    _replay: dict[str, DurableTokens] = field(default_factory=dict)

    def collect(
        self,
        visits: Sequence[Visit],
        version: int,
        prompts: Mapping[str, np.ndarray] | None = None,
        *,
        durable: bool = True,
    ) -> list[str]:
        """Ids of the finished rollouts, in the order of the visits. Nothing is returned that is not in the store.

        `prompts`: what `rendered` gave. `durable`: whether to wait for the disk. Who reads them waits for it anyway.
        """
        planned: dict[str, Planned] = {}
        self.unshown = self.used = self.continued = 0
        for visit in visits:
            writer, shown = self._chosen(visit)
            for sample in range(self.spec.samples):
                plan = Planned(visit, sample, writer, shown)
                if planned.setdefault(self.rollout_id(visit, sample), plan) is not plan:
                    raise _twice(visit.prompt)
        prompts = self.rendered(visits) if prompts is None else prompts
        self.newest = self.carry_out(planned, version, prompts, durable=durable)
        return self.newest

    def rendered(self, visits: Sequence[Visit]) -> dict[str, np.ndarray]:
        """Ids of their prompts, by prompt."""
        found = {visit.prompt.id: self.prompt_ids(visit.prompt, self.sources[visit.source]) for visit in visits}
        self.looked_at.clear()  # those of visits that nobody followed, too
        return found

    def carry_out(
        self,
        planned: Mapping[str, Planned],
        version: int,
        prompts: Mapping[str, np.ndarray] | None = None,
        *,
        durable: bool = True,
    ) -> list[str]:
        """Have rollouts written, by id. `prompts`: ids by prompt, where they are known."""
        sampled = [plan for plan in planned.values() if plan.visit.source not in self.replays]
        writers: dict[tuple[str, str], Writer] = {
            (plan.writer.source(plan.visit, self.desk), plan.writer.author): plan.writer for plan in sampled
        }
        requests, self.used, self.continued = self.world.share(lambda: self._requests(planned, version, prompts))
        for (source, author), wanted in requests.items():
            self._sample(writers[source, author].sampler(source, self.desk), wanted, AUTHORS[author])
        self.store.commit(sync=durable)
        self.consumed = None if self.consumed is None else self.consumed + len(planned)
        return list(planned)

    def _requests(
        self, planned: Mapping[str, Planned], version: int, prompts: Mapping[str, np.ndarray] | None
    ) -> tuple[dict[tuple[str, str], list[SampleRequest]], int, int]:
        """What is to be sampled, by source and author; and how many rollouts an earlier process had finished, and begun.

        Everything else that is planned is in the store already, or is put there.
        """
        if prompts is None:
            prompts = {plan.visit.prompt.id: self._rendered(plan.visit.prompt, plan) for plan in planned.values()}
        shown = {name: self._rendered(plan.shown, plan) for name, plan in planned.items() if plan.shown is not None}
        durable = self._take_up(planned, prompts, shown)
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
                requests.setdefault((source, writer.author), []).append(request)
        return requests, self.used, self.continued

    def demonstrate(self, failed: Rollout, visit: Visit, source: str, text: str, version: int) -> str:
        """Write a text that somebody else gave beside an answer that failed; the id of its rollout."""
        rollout_id = failed.id + DEMONSTRATION
        self.consumed = None if self.consumed is None else self.consumed + 1
        self.newest.append(rollout_id)
        known = self.store.entries.get(rollout_id)
        if known is not None and known.stop is not None:
            return rollout_id  # an earlier process had it
        durable = None if known is None else self.store.partial([rollout_id])[0]
        if durable is None:
            plan = Planned(visit, failed.sample, self.spec.everyone[-1])
            self._begin(rollout_id, plan, source, failed.prompt_ids, None)
        self._write(rollout_id, self.desk.completion(visit, text), Author.TEACHER, version, durable)
        return rollout_id

    @property
    def taken_up(self) -> bool:
        """Whether the latest batch has rollouts of an earlier process, which may have been rewarded and scored already."""
        return bool(self.used or self.continued)

    def rollout_id(self, visit: Visit, sample: int) -> str:
        return f"{self.stage}/{visit.prompt.id}/{visit.visit}/{sample}"

    # What an earlier process left

    def _take_up(
        self, planned: Mapping[str, Planned], prompts: Mapping[str, np.ndarray], shown: Mapping[str, np.ndarray]
    ) -> dict[str, Rollout]:
        """Unfinished rollouts of this batch, with their durable tokens."""
        known = {
            rollout_id: self.store.entries[rollout_id] for rollout_id in planned if rollout_id in self.store.entries
        }
        for rollout_id, entry in known.items():
            if self.consumed is not None and entry.number < self.consumed:
                raise _twice(planned[rollout_id].visit.prompt)
        open_ids = [rollout_id for rollout_id, entry in known.items() if entry.stop is None]
        finished = [rollout_id for rollout_id, entry in known.items() if entry.stop is not None]
        durable = dict(zip(open_ids, self.store.partial(open_ids), strict=True)) if open_ids else {}
        self.used, self.continued = self.used + len(finished), self.continued + len(open_ids)
        for rollout in [*(self.store.load(finished) if finished else ()), *durable.values()]:
            read = shown.get(rollout.id, prompts[rollout.prompt_id])
            replayed = planned[rollout.id].visit.source in self.replays  # which brings what was read
            same = np.array_equal(rollout.prompt_ids, prompts[rollout.prompt_id])
            if not same or not (replayed or np.array_equal(sampled_under(rollout), read)):
                raise DataError(
                    f"prompt {rollout.prompt_id!r} reads differently now than when the run began. Its source has changed: put it back, "
                    "or start a new run."
                )
        return durable

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
        """Whether the sampler has room for a prompt that the start could not look at. `context`: of who reads it."""
        ids = render_prompt(prompt, self.tokenizer, self.sources[visit.source].chat_template_kwargs)
        return ids.size + (new_tokens or self.spec.max_new_tokens) <= min(self.max_length, context)

    def _chosen(self, visit: Visit) -> tuple[Writer, Prompt | None]:
        """Who answers, and what is read if it is not the prompt. Where there is nothing to show, the student answers plainly."""
        writer = self._writer(visit)
        if not writer.shows_more or visit.source in self.replays:
            return writer, None
        shown = writer.asks(visit.prompt)
        if shown is None or not self.fits(shown, visit):
            self.unshown += 1
            return self.spec.everyone[-1], None
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
        """An answer of an earlier run, with its authors and the log-probs of the policy that drew it."""
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

    def _sample(self, sampler: TokenSampler | KeepsTokens, requests: Sequence[SampleRequest], author: Author) -> None:
        """Tokens of one step of the sampler, one of each request, go into the store together."""
        if isinstance(sampler, KeepsTokens):
            for count in sampler.keep(requests, author):
                for _ in range(count):
                    self.on_token()
            return
        drawn: dict[str, SampledToken] = {}
        waiting = 0
        try:
            for event in sampler.sample(requests):
                if isinstance(event, SampledToken):
                    self.on_token()
                    replay = self._replay.get(event.request_id)
                    if replay is not None and replay.holds(event):
                        continue
                    if event.request_id in drawn:  # the next step has begun
                        self._keep(drawn, author)
                    drawn[event.request_id] = event
                    waiting += 1
                    if waiting >= COMMIT_TOKENS:
                        self.store.commit()
                        waiting = 0
                elif isinstance(event, Finished):
                    self._keep(drawn, author)
                    self.store.finish(event.request_id, event.stop)
                    self._replay.pop(event.request_id, None)
                self.check_stop()
        finally:
            self._keep(drawn, author)

    def _keep(self, drawn: dict[str, SampledToken], author: Author) -> None:
        if drawn:
            ids, *columns = zip(*drawn.values(), strict=True)
            self.store.append_many(TokenColumns(ids, *map(np.array, columns)), author)
            drawn.clear()


def sampled_under(rollout: Rollout) -> np.ndarray:
    """The prompt that the writer read."""
    return np.asarray(rollout.extras.get(SAMPLED_UNDER, rollout.prompt_ids), dtype=np.int32)


def as_trained(rollout: Rollout) -> Rollout:
    """Log-probs under another prompt say nothing about the one that is trained on: they are unknown here."""
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
        """Whether the store has this token already. One that differs is an error: the rest would differ too."""
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
