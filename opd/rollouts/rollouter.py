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
import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Protocol

import numpy as np
import torch

from opd.common.context import Peers
from opd.common.errors import DataError, TrainingError, UserError
from opd.common.text import shortened
from opd.data.prompts import render_prompt, response_text
from opd.data.sources import PromptSource, Source
from opd.engines.alongside import LoggingSampler, SharedSampler
from opd.engines.kinds import SAMPLERS, SamplerKind
from opd.engines.requests import request_key, uniforms, weights_of
from opd.models.language_model import LanguageModel
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
from opd.registry import validate_settings
from opd.rollouts.episodes import PARTS, Dialogue, Dialogues, GivenTurn, GivenTurns, Playing, TurnSink, TurnSource
from opd.rollouts.pace import Pace
from opd.rollouts.replay import RunSource, numbered_prompt
from opd.rollouts.settings import Rollouts
from opd.rollouts.writers import AUTHORS, DataWriter, ReplayWriter, TeacherWriter, Writer, WriterContext
from opd.store import RolloutStore
from opd.store.rollouts import Replay

COMMIT_TOKENS = 512  # group commit: tokens buffered before they are written
DEMONSTRATION = "/demonstration"  # appended to the id of the answer that it replaces
PREFIX = "/prefix"  # appended to the id of the answer that begins with it
SAMPLED_UNDER = "sampled_under"  # in a rollout's extras: ids of the prompt that it was sampled from
REPLAY = "replay"  # source of rollouts drawn by an earlier run or step
SAMPLED = ("student", "mixed")  # sources of answers that can be trained on again
LOST_STEPS = 3  # in a row without a rollout that its environment finished end the run
PLAIN_TEXT = DataWriter()
TRAJECTORY_DRAW = -1  # sample number that keys the choice of writer


@dataclass(frozen=True)
class Planned:
    """A rollout to write: who writes it, and what the writer reads if that differs from the training prompt."""

    visit: Visit
    sample: int
    writer: Writer
    shown: Prompt | None = None
    source: str = ""  # the source noted in the store; default: the writer's
    group_suffix: str = ""  # set for a rollout outside the group of its visit
    sampling: Sampling | None = None  # replaces the stage's sampling
    start: Rollout | None = None  # the answer begins with its tokens; if it has stopped, these are the whole answer
    given: GivenTurns | None = None  # turns of an episode that it begins with
    since: int = 0  # tokens that it may have had before this step
    until: int | None = None  # tokens that it may have after it, if a later step continues
    extras: Mapping[str, Any] = field(default_factory=dict)  # kept with the rollout

    @property
    def in_environment(self) -> bool:
        return self.visit.prompt.environment is not None and not self.group_suffix


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
    context: WriterContext
    max_prompt_tokens: int
    max_length: int  # tokens of a sequence in the sampler
    replays: Mapping[int, RunSource] = field(default_factory=dict)  # by number: sources with stored answers
    exact: bool = False  # replay unfinished rollouts token by token instead of prefilling them
    check_stop: Callable[[], None] = lambda: None
    on_token: Callable[..., None] = lambda *token: (
        None
    )  # called for each token, without it if only its arrival is known
    ranks: Peers = field(default_factory=Peers)
    pace: Pace | None = None  # what changes from step to step
    buffer: ReplayBuffer | None = None  # earlier answers that are trained on again
    segments: Segments | None = None  # answers that span steps
    consumed: int | None = 0  # stored rollouts of earlier steps and stages; None: unknown after a repair
    rendered_ahead: dict[str, np.ndarray] = field(default_factory=dict)  # prompt ids rendered in advance
    _replayed: dict[str, DurableTokens] = field(default_factory=dict)
    _playing: dict[str, Playing] = field(default_factory=dict)
    _lost_steps: int = 0  # in a row, in which every rollout in an environment was lost

    def __post_init__(self) -> None:
        self._dialogues = Dialogues(self.tokenizer, self.sampling.stop_ids)
        self.everyone: list[Writer] = self.spec.everyone
        self._by_sample: list[Writer | None] = self.spec.by_sample
        self._shares = [writer.share for writer in self.everyone[:-1]]
        played = [source.environment or self.spec.environment for source in self.sources]
        grows = any(one is not None and one.curriculum != "none" for one in played)
        self.varies = self.pace is not None or self.buffer is not None or grows
        self._step: int | None = None

    def begin_step(self, step: int) -> list[Visit]:
        """Set what a step's shares are. Returns the visits whose stored answers it trains on again."""
        self._step = step
        shares = {key: writer.share for key, writer in self.spec.writers_by_key.items()}
        if self.pace is not None:
            shares |= self.pace.shares(step)
            limit = self.pace.limit(step)
            self.sampling = replace(self.sampling, max_new_tokens=limit)
            self.context = replace(self.context, max_new_tokens=limit)
        if self.buffer is None:
            self._shares = [shares[key] for key in self.spec.writers_by_key][:-1]
            return []
        again = sum(shares[key] for key in self.spec.replaying)
        drawn = self.ranks.share(partial(self.buffer.draw, self, step, again))
        rest = 1 - again if drawn is not None and again < 1 else 1.0  # until the buffer is ready, the student answers
        self._shares = [
            0.0 if writer.replays else shares[key] / rest for key, writer in list(self.spec.writers_by_key.items())[:-1]
        ]
        return [self.buffer.visit(prompt_id, visit, step) for prompt_id, visit in drawn or ()]

    def pace_metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """The shares of a batch that writers had, counted in its rollouts; and the limit, if it grows."""
        sources = Counter(rollout.source.partition(":")[0] for rollout in rollouts)
        found: dict[str, float] = {f"written/{name}": count / len(rollouts) for name, count in sorted(sources.items())}
        ahead = self.spec.staleness  # another thread's rollouter has the limit then
        return found if self.spec.length_schedule is None or ahead else found | {"limit": self.sampling.max_new_tokens}

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
            if visit.replay:
                planned |= self._repeated(visit)
                continue
            if visit.prompt.plain:
                planned[self.rollout_id(visit, 0)] = Planned(visit, 0, PLAIN_TEXT)
                continue
            writer, shown = self._chosen(visit)
            unshown += writer is None
            writer = writer or self.everyone[-1]
            for sample, other in enumerate(self._by_sample):
                plan = Planned(visit, sample, writer, shown) if other is None else Planned(visit, sample, other)
                if planned.setdefault(self.rollout_id(visit, sample), plan) is not plan:
                    raise _duplicate(visit.prompt)
        prompts = self.rendered(visits) if prompts is None else prompts
        if self.spec.teacher_prefix is not None:
            planned = self._with_prefixes(planned, version, prompts)
        if self.segments is None:
            written = self.carry_out(planned, version, prompts, durable=durable)
        else:
            left = self.ranks.share(partial(self.segments.unfinished, planned, self.store))
            written = self.carry_out(self.segments.plans(planned, left), version, prompts, durable=durable)
            left = self.ranks.share(partial(self.segments.unfinished, planned, self.store, 1))
            written.ids = self.segments.ended(planned, left)
        written.prompts, written.unshown = len(visits), unshown
        return written

    def _with_prefixes(
        self, planned: dict[str, Planned], version: int, prompts: Mapping[str, np.ndarray]
    ) -> dict[str, Planned]:
        """The prompts' teachers write how the student's answers begin. These texts are stored as rollouts outside of any group."""
        assert self.pace is not None
        assert self._step is not None
        tokens = self.pace.prefix(self._step)
        own = {name: plan for name, plan in planned.items() if plan.writer.takes_the_rest}
        if tokens < 1 or not own:
            return planned
        sampling = replace(self.sampling, max_new_tokens=tokens)
        asked = {
            f"{name}{PREFIX}": Planned(
                plan.visit,
                plan.sample,
                TeacherWriter(),
                source="prefix:teacher",
                group_suffix=PREFIX,
                sampling=sampling,
            )
            for name, plan in own.items()
        }
        self.carry_out(asked, version, prompts)
        starts = self.ranks.share(lambda: self.store.load(list(asked)))
        return planned | {
            name: replace(plan, start=start) for (name, plan), start in zip(own.items(), starts, strict=True)
        }

    def for_thread(self, student: TokenSampler | LoggingSampler, check_stop: Callable[[], None]) -> Rollouter:
        """A copy for another thread with its own sampler. It gets its own tokenizer, because tokenizers change their settings while they encode."""
        tokenizer = copy.deepcopy(self.tokenizer)
        context = replace(self.context, tokenizer=tokenizer, student=student)
        return replace(
            self,
            tokenizer=tokenizer,
            context=context,
            check_stop=check_stop,
            rendered_ahead={},
            _replayed={},
            _playing={},
        )

    def rendered(self, visits: Sequence[Visit]) -> dict[str, np.ndarray]:
        """Prompt id -> token ids of the visits' prompts."""
        found = {visit.prompt.id: self.prompt_ids(visit.prompt, self.sources[visit.source]) for visit in visits}
        self.rendered_ahead.clear()  # including those of visits that were not used
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
            (plan.writer.source(plan.visit, self.context), plan.writer.author): plan.writer for plan in sampled
        }
        requests, finished, continued = self.ranks.share(partial(self._requests, planned, version, prompts))
        paused = {name for name, plan in planned.items() if plan.until is not None}
        for (source, author), wanted in requests.items():
            sampler, by = writers[source, author].sampler(source, self.context), AUTHORS[author]
            if isinstance(sampler, LoggingSampler):
                for count in sampler.keep(wanted, by):
                    for _ in range(count):
                        self.on_token()
            elif isinstance(sampler, SharedSampler) and any(planned[request.id].in_environment for request in wanted):
                sampler.lead(partial(self._draw, paused, wanted, by))
            else:
                self._draw(paused, wanted, by, sampler, self.check_stop)
        self.store.commit(sync=durable)
        begun = sum(not plan.since for plan in planned.values())
        self.consumed = None if self.consumed is None else self.consumed + begun
        return Written(list(planned), finished, continued, resumed=finished + continued > 0)

    def _requests(
        self, planned: Mapping[str, Planned], version: int, prompts: Mapping[str, np.ndarray] | None
    ) -> tuple[dict[tuple[str, str], list[SampleRequest]], int, int]:
        """The requests to sample, by source and author; and how many rollouts an earlier process had finished and begun.

        All other planned rollouts are in the store already or are written to it here.
        """
        if prompts is None:
            prompts = {plan.visit.prompt.id: self._rendered(plan.visit.prompt, plan) for plan in planned.values()}
        shown = {name: self._rendered(plan.shown, plan) for name, plan in planned.items() if plan.shown is not None}
        durable, finished = self._load_durable(planned, prompts, shown)
        requests: dict[tuple[str, str], list[SampleRequest]] = {}
        for rollout_id, plan in planned.items():
            if rollout_id in self.store.entries and rollout_id not in durable:
                continue  # finished by an earlier process, or as far as this step samples
            visit, writer, prompt_ids = plan.visit, plan.writer, prompts[plan.visit.prompt.id]
            if visit.source in self.replays or visit.replay:
                self._replay_stored(rollout_id, plan, prompt_ids, durable.get(rollout_id))
                continue
            source = writer.source(visit, self.context)
            if rollout_id not in durable:
                self._begin(rollout_id, plan, source, prompt_ids, shown.get(rollout_id))
            begun = durable.get(rollout_id)
            if plan.start is not None:
                begun = self._started(rollout_id, plan.start, begun)
            completion = writer.completion(visit, self.context)
            if completion is not None:
                self._write(rollout_id, completion, AUTHORS[writer.author], version, begun)
            elif plan.start is not None and plan.start.stop == "stop":
                self.store.finish(rollout_id, "stop")
            else:
                key = request_key(self.seed, visit.prompt.id, visit.visit, plan.sample)
                read = shown.get(rollout_id, prompt_ids)
                request = SampleRequest(rollout_id, read, key, plan.sampling or self.sampling)
                if plan.until is not None:
                    request = replace(request, sampling=replace(request.sampling, max_new_tokens=plan.until))
                if begun is not None and begun.response_ids.size:
                    request = self._resumed(request, begun, writer, version, plan.since)
                environment = None if plan.group_suffix else visit.prompt.environment
                if environment is not None:
                    request = replace(request, prefix_ids=None)
                    self._playing[rollout_id] = environment.player()(
                        self._dialogues.of(visit.prompt),
                        request,
                        visit.prompt,
                        begun,
                        Replay(self.store, rollout_id, begun=rollout_id in durable),
                        self._step,
                        draws_again=self.exact,
                        given=plan.given or self._given(visit, writer),
                    )
                requests.setdefault((source, writer.author), []).append(request)
        continued = [
            name
            for name, begun in durable.items()
            if begun.response_ids.size > planned[name].since or not planned[name].since
        ]
        return requests, finished, len(continued)

    def dialogue(self, prompt: Prompt) -> Dialogue:
        """What reads and writes the turns of a prompt's episodes."""
        return self._dialogues.of(prompt)

    def _given(self, visit: Visit, writer: Writer) -> GivenTurns | None:
        """All turns of a rollout that a writer knows already."""
        turns = writer.turns(visit.prompt)
        if turns is None:
            return None
        dialogue, author = self._dialogues.of(visit.prompt), AUTHORS[writer.author]
        return GivenTurns([GivenTurn(dialogue.written(text), author) for text in turns], alone=True)

    def demonstrate(
        self, failed: Rollout, visit: Visit, source: str, text: str, version: int, start: Rollout | None = None
    ) -> str:
        """Store a given text as a demonstration for a failed answer, after `start`; returns the id of its rollout."""
        rollout_id = failed.id + DEMONSTRATION
        self.consumed = None if self.consumed is None else self.consumed + 1
        known = self.store.entries.get(rollout_id)
        if known is not None and known.stop is not None:
            return rollout_id  # written by an earlier process
        durable = None if known is None else self.store.partial([rollout_id])[0]
        if durable is None:
            plan = Planned(visit, failed.sample, self.everyone[-1])
            self._begin(rollout_id, plan, source, failed.prompt_ids, None)
        ids, cut = self.context.completion(visit, text)
        if start is not None:
            durable, room = self._started(rollout_id, start, durable), self.sampling.max_new_tokens
            ids = np.concatenate([start.response_ids, ids])
            ids, cut = ids[:room], cut or ids.size > room
        self._write(rollout_id, (ids, cut), Author.TEACHER, version, durable)
        return rollout_id

    def rollout_id(self, visit: Visit, sample: int) -> str:
        again = f"/replay-{visit.replay}" if visit.replay else ""
        return f"{self.stage}/{visit.prompt.id}/{visit.visit}/{sample}{again}"

    def _repeated(self, visit: Visit) -> dict[str, Planned]:
        """The group of a visit to a stored prompt."""
        writer, suffix = ReplayWriter(), f"/replay-{visit.replay}"
        return {
            self.rollout_id(visit, sample): Planned(visit, sample, writer, group_suffix=suffix)
            for sample in range(self.spec.samples)
        }

    # Rollouts of an earlier process

    def _load_durable(
        self, planned: Mapping[str, Planned], prompts: Mapping[str, np.ndarray], shown: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, Rollout], int]:
        """The unfinished rollouts of this batch with their durable tokens, and the number of finished ones."""
        known = {
            rollout_id: self.store.entries[rollout_id] for rollout_id in planned if rollout_id in self.store.entries
        }
        for rollout_id, entry in known.items():
            if self.consumed is not None and entry.number < self.consumed and not planned[rollout_id].since:
                raise _duplicate(planned[rollout_id].visit.prompt)
        limits = {rollout_id: planned[rollout_id].until or sys.maxsize for rollout_id in known}
        open_ids = [name for name, entry in known.items() if entry.stop is None and entry.length <= limits[name]]
        finished = [rollout_id for rollout_id, entry in known.items() if entry.stop is not None]
        durable = dict(zip(open_ids, self.store.partial(open_ids), strict=True)) if open_ids else {}
        for rollout in [*(self.store.load(finished) if finished else ()), *durable.values()]:
            read = shown.get(rollout.id, prompts[rollout.prompt_id])
            replayed = planned[rollout.id].visit.source in self.replays  # it stores what its writer read
            same = np.array_equal(rollout.prompt_ids, prompts[rollout.prompt_id])
            if not same or not (replayed or np.array_equal(sampled_under(rollout), read)):
                raise DataError(
                    f"prompt {rollout.prompt_id!r} is rendered differently than when the run began. Its source has changed: restore it, "
                    "or start a new run."
                )
        return durable, len(finished)

    def _resumed(
        self, request: SampleRequest, durable: Rollout, writer: Writer, version: int, since: int
    ) -> SampleRequest:
        """The request to continue a rollout after its durable tokens. `since`: how many of them earlier steps have drawn."""
        versions = sorted({*durable.version[durable.author == Author.STUDENT].tolist(), version})
        if writer.author == "student" and len(versions) > 1 and self.spec.mixed_versions == "refuse":
            raise TrainingError(
                f"rollout {request.id!r} was begun by policy version {versions[0]} and would continue with version {version}; "
                "rollout.mixed_versions is `refuse`. Set it to `allow`: every token keeps its own version and log-prob."
            )
        if self.exact:
            self._replayed[request.id] = DurableTokens(durable, since)
            return replace(request, prefix_ids=durable.response_ids[:since]) if since else request
        return replace(request, prefix_ids=durable.response_ids)

    def prompt_ids(self, prompt: Prompt, source: PromptSource) -> np.ndarray:
        known = self.rendered_ahead.get(prompt.id)
        ids = render_prompt(prompt, self.tokenizer, source.chat_template_kwargs) if known is None else known
        if ids.size > self.max_prompt_tokens:
            raise DataError(
                f"prompt {prompt.id!r} has {ids.size} tokens, and at most {self.max_prompt_tokens} fit, given rollout.max_new_tokens "
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
        writer = self.everyone[-1]
        if len(self.everyone) > 1:
            draw = uniforms(request_key(self.seed, visit.prompt.id, visit.visit, TRAJECTORY_DRAW), 0, 1)[0]
            below = 0.0
            for one, share in zip(self.everyone[:-1], self._shares, strict=True):
                below += share
                if draw < below:
                    writer = one
                    break
        if not writer.shows_more or visit.source in self.replays:
            return writer, None
        shown = writer.asks(visit.prompt)
        if shown is None or not self.fits(shown, visit):
            return None, None
        return writer, shown

    def _begin(
        self, rollout_id: str, plan: Planned, source: str, prompt_ids: np.ndarray, shown: np.ndarray | None
    ) -> None:
        prompt, visit = plan.visit.prompt, plan.visit.visit
        extras = {**plan.extras, **({} if shown is None else {SAMPLED_UNDER: shown.tolist()})}
        self.store.begin(
            id=rollout_id, prompt_id=prompt.id, visit=visit, sample=plan.sample, domain=prompt.domain, source=plan.source or source,
            group=f"{prompt.id}/{visit}{plan.group_suffix}", prompt_ids=prompt_ids, extras=extras,
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

    def _started(self, rollout_id: str, start: Rollout, durable: Rollout | None) -> Rollout:
        """Store the tokens that an answer begins with, as they were drawn. Returns what it has so far."""
        done = durable.response_ids.size if durable is not None else 0
        if durable is not None and done >= start.response_ids.size:
            return durable
        self._append(rollout_id, start, done)
        return start

    def _append(self, rollout_id: str, drawn: Rollout, done: int) -> None:
        """Store tokens of another rollout after the first `done`, with their authors and the log-probs of the policy that drew them."""
        *columns, author = (
            getattr(drawn, name)[done:]
            for name in ("response_ids", "logprob", "logprob_sampled", "logprob_stop", "version", "author")
        )
        self.store.append_many(TokenColumns(rollout_id, *columns), author)

    def _replay_stored(self, rollout_id: str, plan: Planned, prompt_ids: np.ndarray, durable: Rollout | None) -> None:
        """Store an answer of an earlier run or step, with its authors and the log-probs of the policy that drew it."""
        visit = plan.visit
        first = self.rollout_id(replace(visit, replay=0), plan.sample)
        if visit.replay:
            (stored,) = self.store.load([first])
        else:
            stored = self.replays[visit.source].rollout(visit.prompt, plan.sample)
        if not np.array_equal(stored.prompt_ids, prompt_ids):
            raise DataError(
                f"prompt {visit.prompt.id!r} is rendered to different ids than in the run that answered it: it has another tokenizer or chat "
                "template, other chat_template_kwargs, or a source that has changed. Restore them."
            )
        if durable is None:
            shown = sampled_under(stored) if SAMPLED_UNDER in stored.extras else None
            self._begin(rollout_id, plan, REPLAY, prompt_ids, shown)
        self._append(rollout_id, stored, durable.response_ids.size if durable is not None else 0)
        assert stored.stop is not None
        self.store.finish(rollout_id, stored.stop)
        notes = self.store.entries[first].notes if visit.replay else {}
        kept = ("reward", "feedback", "turn_feedback", "turn_rewards", "conversation", PARTS, "lost")
        known = {name: notes[name] for name in kept if name in notes}
        if known:
            self.store.note(rollout_id, **known)

    def _draw(
        self,
        paused: Collection[str],
        requests: Sequence[SampleRequest],
        author: Author,
        sampler: TokenSampler,
        check_stop: Callable[[], None],
    ) -> None:
        playing = {request.id: self._playing.pop(request.id) for request in requests if request.id in self._playing}
        draw_into(
            sampler,
            requests,
            self.store,
            author,
            playing,
            replayed=self._replayed,
            paused=paused,
            check_stop=check_stop,
            on_token=self.on_token,
        )
        if playing:
            self._count_lost(list(playing.values()))

    def _count_lost(self, playing: Sequence[Playing]) -> None:
        """Stop if environments fail for all rollouts of several steps: nothing would be learned."""
        self._lost_steps = self._lost_steps + 1 if all(one.lost for one in playing) else 0
        if self._lost_steps == LOST_STEPS:
            raise TrainingError(
                f"environment {playing[-1].environment.name} failed in every rollout of {LOST_STEPS} steps. The last reason: {playing[-1].lost}. "
                "Fix it, then resume the run."
            )


# --- Answers that are trained on again ---


@dataclass(frozen=True)
class ReplayBuffer:
    """The prompts of this stage that the student answered last, in steps that are trained on."""

    writer: ReplayWriter
    sources: Sequence[Source]

    def draw(self, rollouter: Rollouter, step: int, share: float) -> list[tuple[str, int]] | None:
        """The stored prompts that a step takes, each with its visit. A keyed draw for each prompt of the step decides. None: not ready."""
        spec, store = rollouter.spec, rollouter.store
        if rollouter.consumed is None:
            raise TrainingError(
                "replay: the rollout log was repaired, so it is unknown which answers have been trained on. Start a new run."
            )
        rows = self._rows(rollouter)
        if not self.writer.ready(len(rows)):
            return None
        drawn = []
        for number in range(spec.prompts):
            coin, place = uniforms(request_key(rollouter.seed, REPLAY, step, number), 0, 2)
            if coin < share and rows:
                first = store.entries[rows.pop(int(place * len(rows)))]
                drawn.append((first.prompt_id, first.visit))
        return drawn

    def _rows(self, rollouter: Rollouter) -> list[str]:
        """The first answer of every prompt to draw from, oldest first."""
        index, end = rollouter.store.index, rollouter.consumed or 0
        own = [
            code for code, name in enumerate(index.vocabularies["source"].texts) if name.partition(":")[0] in SAMPLED
        ]
        mask = np.isin(index["source"][:end], own) & (index["sample"][:end] == 0) & (index["stop"][:end] != 0)
        newest = np.flatnonzero(mask)[-self.writer.capacity :]
        ids = [json.loads(index.names[int(row)])[0] for row in newest]
        return [name for name in ids if name.startswith(f"{rollouter.stage}/")]

    def visit(self, prompt_id: str, visit: int, step: int) -> Visit:
        for number, source in enumerate(self.sources):
            prompt = numbered_prompt(source, prompt_id)
            if prompt is not None:
                return Visit(prompt, visit, number, replay=step)
        raise _gone(prompt_id)


# --- Answers that span steps ---


@dataclass
class Segments:
    """Lets a step sample at most `tokens` of an answer; the next step continues it with the weights of that time.

    A group waits until all its answers have ended. `waiting`: by group, the visit and how many segments its answers have had.
    """

    tokens: int
    most: int  # new tokens of a whole answer
    sources: Sequence[Source]
    waiting: dict[tuple[str, int], tuple[Visit, int]] = field(default_factory=dict)

    def unfinished(self, planned: Mapping[str, Planned], store: RolloutStore, more: int = 0) -> list[str]:
        """Rollouts that have not ended with their segments so far, and so many more. An earlier process may have drawn later ones."""
        left = []
        for name, plan in planned.items():
            entry = store.entries.get(name)
            drawn = plan.writer.author in ("student", "teacher")
            limit = (self._had(plan.visit) + more) * self.tokens
            if entry is None or entry.stop is None or (drawn and entry.length > limit):
                left.append(name)
        return left

    def plans(self, planned: Mapping[str, Planned], left: Collection[str]) -> dict[str, Planned]:
        """The plans of those that have not ended, each with the limits of its next segment."""
        found = {}
        for name in left:
            since = self._had(planned[name].visit) * self.tokens
            until = since + self.tokens
            found[name] = replace(planned[name], since=since, until=until if until < self.most else None)
        return found

    def ended(self, planned: Mapping[str, Planned], left: Collection[str]) -> list[str]:
        """The rollouts of groups that are complete now. The others wait."""
        visits = {_group(plan.visit): plan.visit for plan in planned.values()}
        waiting = {_group(planned[name].visit) for name in left}
        self.waiting = {name: (visits[name], self._had(visits[name]) + 1) for name in visits if name in waiting}
        return [name for name, plan in planned.items() if _group(plan.visit) not in waiting]

    def visits(self) -> list[Visit]:
        """Those whose answers were begun in an earlier step and have not all ended."""
        return [visit for visit, _ in self.waiting.values()]

    def state(self) -> list[list[Any]]:
        return [[visit.source, visit.prompt.id, visit.visit, count] for visit, count in self.waiting.values()]

    def restore(self, state: Iterable[Sequence[Any]]) -> None:
        self.waiting = {}
        for source, prompt_id, visit, count in state:
            prompt = numbered_prompt(self.sources[source], prompt_id)
            if prompt is None:
                raise _gone(prompt_id)
            self.waiting[prompt_id, visit] = Visit(prompt, visit, source), count

    def _had(self, visit: Visit) -> int:
        return self.waiting.get(_group(visit), (visit, 0))[1]


def _group(visit: Visit) -> tuple[str, int]:
    return visit.prompt.id, visit.visit


class Sink(TurnSink, Protocol):
    """Where tokens are written: the rollout store, or memory."""

    def commit(self) -> None: ...


def draw_into(
    sampler: TokenSampler,
    requests: Sequence[SampleRequest],
    sink: Sink,
    author: Author = Author.STUDENT,
    playing: Mapping[str, Playing] | None = None,
    *,
    replayed: Mapping[str, DurableTokens] | None = None,
    paused: Collection[str] = (),
    check_stop: Callable[[], None] = lambda: None,
    on_token: Callable[[SampledToken], None] = lambda token: None,
) -> None:
    """Sample answers to requests. The tokens of one sampler step, one per request, go into the sink together.

    `author`: the author of tokens for which the sampler gives none. `replayed`: tokens that are drawn again. `paused`: ids of
    answers that do not end at their limit, because a later step continues them. `playing`: rollouts in an environment, by id. When a turn ends, the environment's tokens are added and the next turn is requested, while the sampler works on
    the other requests.
    """
    drawn: dict[str, SampledToken] = {}
    playing, replayed, waiting = playing or {}, replayed or {}, 0
    turns = TurnSource(requests, playing, sink, check_stop) if playing else None  # gives None when nothing is ready yet
    source: Any = requests if turns is None else turns
    try:
        for event in sampler.sample(source):
            if isinstance(event, SampledToken):
                on_token(event)
                if event.request_id in playing:
                    playing[event.request_id].drawn(event)
                if event.request_id in replayed and replayed[event.request_id].holds(event):
                    continue
                if event.request_id in drawn:  # the next step has begun
                    _keep(drawn, sink, author)
                drawn[event.request_id] = event
                waiting += 1
                if waiting >= COMMIT_TOKENS:
                    sink.commit()
                    waiting = 0
            elif isinstance(event, Finished):
                _keep(drawn, sink, author)
                if turns is None and not (event.stop == "length" and event.request_id in paused):
                    sink.finish(event.request_id, event.stop)
                elif turns is not None:
                    turns.ended(event.request_id, event.stop)
            check_stop()
    finally:
        _keep(drawn, sink, author)
        if turns is not None:
            turns.close()


def _keep(drawn: dict[str, SampledToken], sink: Sink, author: Author) -> None:
    if drawn:
        ids, *columns, authors = zip(*drawn.values(), strict=True)
        mixed = any(one is not None for one in authors)
        by = np.array([author if one is None else one for one in authors], dtype=np.uint8) if mixed else author
        sink.append_many(TokenColumns(ids, *map(np.array, columns)), by)
        drawn.clear()


OnEnvironment = Callable[[str, np.ndarray], None]  # gets a rollout's id and what its environment wrote


def drop_text(id: str, ids: np.ndarray) -> None:
    pass


class MemorySink:
    """Rollouts in memory, for evaluation and custom loops."""

    def __init__(self, requests: Sequence[SampleRequest], on_environment: OnEnvironment = drop_text) -> None:
        self._on_environment = on_environment
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
        if author == Author.ENV:
            self._on_environment(id, response_ids)

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


def answers(
    sampler: TokenSampler,
    requests: Sequence[SampleRequest],
    check_stop: Callable[[], None] = lambda: None,
    on_token: Callable[[SampledToken], None] = lambda token: None,
    prompts: Mapping[str, Prompt] | None = None,
    tokenizer: Any = None,
    notes: dict[str, dict[str, Any]] | None = None,
    on_environment: OnEnvironment = drop_text,
) -> list[Rollout]:
    """Rollouts in memory, in the order of the requests. `on_token`: called for each token as it is drawn.

    `prompts`: by request. Those with an environment are played in it, which needs the `tokenizer`. `notes`: receives what
    environments noted, by id.
    """
    played = any(prompt.environment is not None for prompt in (prompts or {}).values())
    if played and isinstance(sampler, SharedSampler):
        found, noted = sampler.lead(
            lambda own, check: _in_memory(own, requests, check, on_token, prompts or {}, tokenizer)
        )
    else:
        given = prompts or {} if played else {}
        found, noted = _in_memory(sampler, requests, check_stop, on_token, given, tokenizer, on_environment)
    if notes is not None:
        notes |= noted
    return found


def _in_memory(
    sampler: TokenSampler,
    requests: Sequence[SampleRequest],
    check_stop: Callable[[], None],
    on_token: Callable[[SampledToken], None],
    prompts: Mapping[str, Prompt],
    tokenizer: Any,
    on_environment: OnEnvironment = drop_text,
) -> tuple[list[Rollout], dict[str, dict[str, Any]]]:
    """Rollouts, and what environments noted about them."""
    sink, playing = MemorySink(requests, on_environment), dict[str, Playing]()
    if prompts:
        dialogues = Dialogues(tokenizer, requests[0].sampling.stop_ids if requests else ())
        playing = {
            request.id: prompts[request.id].environment.player()(
                dialogues.of(prompts[request.id]), request, prompts[request.id]
            )
            for request in requests
            if prompts[request.id].environment is not None
        }
    draw_into(sampler, requests, sink, playing=playing, check_stop=check_stop, on_token=on_token)
    return [sink.rollout(request) for request in requests], sink.notes


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


def _gone(prompt_id: str) -> DataError:
    return DataError(f"prompt {prompt_id!r} is no longer in the sources of this stage. Restore them.")


def _duplicate(prompt: Prompt) -> DataError:
    return DataError(
        f"prompt {prompt.id!r} appears twice in one pass: two rows or two sources share its id. Give every prompt its own id."
    )


class DurableTokens:
    """The durable tokens of one rollout that a sampler drew, compared bit by bit with the same tokens drawn again."""

    def __init__(self, durable: Rollout, since: int = 0) -> None:
        """`since`: how many of them are not drawn again."""
        self._durable = durable
        drawn = np.flatnonzero(~np.isin(durable.author, (Author.ENV, Author.DATA)))
        self._left = iter(drawn[drawn >= since].tolist())

    def holds(self, token: SampledToken) -> bool:
        """Whether the store already has this token. A different token is an error, because all later ones would differ too."""
        known, at = self._durable, next(self._left, None)
        if at is None:
            return False
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
                "machine, versions and thread count. Continue without it: opd resume RUN --mode prefill"
            )
        return True


# --- `opd.Sampler`: sampling in Python. Answers to prompts, as rollouts in memory ---
#
# sampler = opd.Sampler(student, max_new_tokens=64)
# rollouts = sampler.sample(opd.prompts("task:addition", 8), samples=4)


ROOM = 256  # the least sequence length that is allocated


class Sampler:
    """Samples from a model with its current weights: shared with it or, if that is not possible, copied before every call.

    Draws are keyed by (seed, prompt, visit, sample). Asking the same prompt again is another visit. `settings`: a recipe's
    `sampler` keys. `stop_ids`: in addition to the model's own, for example its teacher's.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_new_tokens: int = 128,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Iterable[str] = (),
        stop_ids: Iterable[int] = (),
        seed: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        drawing = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        validate_settings("sampler", Rollouts, drawing)  # the same checks as for a recipe
        self.model, self.version = model, 0
        self.max_new_tokens, self.temperature, self.teacher_mix = max_new_tokens, temperature, 0.0
        self.top_p, self.top_k = top_p, top_k
        self._stop, self._stop_ids, self._seed = tuple(stop), tuple(stop_ids), seed
        self._kind: SamplerKind = validate_settings("sampler", Annotated[SamplerKind, SAMPLERS], settings or {})
        self._visits: Counter[str] = Counter()
        self._opened: TokenSampler | None = None
        self._room, self._swaps = 0, False
        self._ends: tuple[tuple[int, ...], int] = (), 0  # stop ids, and how many ids it was opened with

    def __repr__(self) -> str:
        drawing = f"max_new_tokens={self.max_new_tokens}, temperature={self.temperature}"
        cut = f", top_p={self.top_p}" * (self.top_p < 1) + f", top_k={self.top_k}" * (self.top_k > 0)
        return f"Sampler({self.model.name!r}, {drawing}{cut}, seed={self._seed})"

    @property
    def sampling(self) -> Sampling:
        """Uses the model's current stop ids, since a teacher opened later may have added some."""
        stops = tuple(dict.fromkeys((*self.model.stop_ids, *self._stop_ids)))
        return Sampling(self.max_new_tokens, self.temperature, self.top_p, self.top_k, stops, self._stop)

    def sample(
        self,
        prompts: Prompt | str | Iterable[Prompt | str],
        samples: int = 1,
        on_token: Callable[[SampledToken], None] = lambda token: None,
        on_environment: OnEnvironment = drop_text,
        notes: dict[str, dict[str, Any]] | None = None,
    ) -> list[Rollout]:
        """`samples` answers to every prompt, or to a single prompt. One group per prompt, in order.

        Prompts with an environment are played in it; `max_new_tokens` is for all turns together. `on_token`: called for each token as it is
        drawn. `on_environment`: called with what an environment writes. `notes`: receives what environments noted, by id.
        """
        if samples < 1:
            raise UserError(f"samples: expected at least 1 for each prompt, got {samples}.")
        planned: dict[str, tuple[Prompt, int, int]] = {}
        requests, sampling = [], self.sampling
        for prompt in map(_prompt, [prompts] if isinstance(prompts, (Prompt, str, Mapping)) else prompts):
            visit = self._visits[prompt.id]
            self._visits[prompt.id] += 1
            ids = render_prompt(prompt, self.model.tokenizer)
            for number in range(samples):
                name = f"{prompt.id}/{visit}/{number}"
                planned[name] = prompt, visit, number
                key = request_key(self._seed, prompt.id, visit, number)
                requests.append(SampleRequest(name, ids, key, sampling))
        if not requests:
            return []
        sampler = self._with_room(max(request.prompt_ids.size for request in requests))
        self.version += 1
        sampler.load(weights_of(self.model, self.version, self._swaps))
        shown = {name: prompt for name, (prompt, _, _) in planned.items()}
        found = answers(
            sampler, requests, on_token=on_token, prompts=shown, tokenizer=self.model.tokenizer, notes=notes,
            on_environment=on_environment,
        )  # fmt: skip
        return [_identified(rollout, *planned[rollout.id]) for rollout in found]

    def text(self, rollout: Rollout) -> str:
        """The response, decoded, without its stop token."""
        return response_text(rollout.response_ids, self.model.tokenizer, self.sampling.stop_ids)

    def _with_room(self, prompt_tokens: int) -> TokenSampler:
        """Open a sampler for the longest prompt so far. Room doubles for longer ones; other stop ids open a new sampler."""
        needed = prompt_tokens + self.max_new_tokens
        ends = self.sampling.stop_ids, self.model.size
        if self._opened is None or needed > self._room or ends != self._ends:
            roomy = min(max(ROOM, 1 << (needed - 1).bit_length()), max(self.model.context, needed))
            self._room, self._ends = max(self._room, roomy), ends
            dtype = getattr(torch, self._kind.dtype) if self._kind.dtype else None
            copy, lora = self.model.inference_copy(dtype), self.model.lora
            self._swaps = lora is not None and self._kind.takes_adapters(self.model.module.config, lora)
            if self._opened is not None:
                self._kind.close(self._opened)
            self._opened = self._kind.open(copy, self._room, merge_stop=ends[0])
        return self._opened


def _prompt(given: object) -> Prompt:
    if isinstance(given, str):
        return Prompt(id=given, domain="", text=given)
    if not isinstance(given, Prompt):
        raise UserError(
            f"prompts: expected texts or opd.Prompts, got {type(given).__name__}: {shortened(given)}. "
            'Messages are given as opd.Prompt(id="…", domain="…", messages=({"role": "user", "content": "…"},)).'
        )
    return given


def _identified(rollout: Rollout, prompt: Prompt, visit: int, sample: int) -> Rollout:
    group = f"{prompt.id}/{visit}"
    return replace(rollout, prompt_id=prompt.id, visit=visit, sample=sample, domain=prompt.domain, group=group)
