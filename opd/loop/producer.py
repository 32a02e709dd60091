"""Produces the batch of a step, when it is requested or ahead of training (`rollout.staleness`).

    inline   prompts -> sample -> store -> reward -> batch      with `rollout.segment`, of the groups whose answers have all ended
    ahead    the same in two other threads; batches arrive in the order of the stream, whichever is finished first:
             sampler   prompts -> sample -> store      starts batch k once k <= steps trained + 1 + staleness: waits, never drops
             finisher  store -> reward -> score        one batch after the other; scores at most one batch ahead

Everything goes through the store. A checkpoint keeps the position of stream and store at the end of the batch that the trainer took
last. So a resumed run needs no special handling: it finds what was sampled ahead in the store.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, Protocol

import numpy as np
import torch

from opd.common.context import RunContext
from opd.common.errors import DataError, Stopped, TrainingError, UnopenedEpisode
from opd.common.text import plain
from opd.data.prompts import render_prompts, response_text
from opd.data.stream import PromptStream
from opd.engines.alongside import ThreadSampler
from opd.loop.interventions import Demonstrator, demonstrate, rescue, write_experience
from opd.loop.metrics import Clock
from opd.loop.parts import Samplers
from opd.loop.ranks import Ranks
from opd.loop.scorer import Scorer
from opd.loop.takeover import take_over
from opd.models.attention import alongside_training
from opd.models.language_model import LanguageModel
from opd.objective.batch import CALLS, FAILED_CALLS, Batch, Written
from opd.recipe import Stage
from opd.records import Author, Prompt, Rollout, Sample, Visit
from opd.rewards import Rewarder
from opd.rollouts.episodes import PARTS, earned_by, played_metrics, played_sample, split_conversations, split_turns
from opd.rollouts.rollouter import Rollouter, as_trained
from opd.store import RolloutStore
from opd.teachers.views import Group

POLL = 0.05  # seconds between checks for a stop


class Producer(Protocol):
    """Produces one batch per step."""

    def next(self, step: int, clock: Clock) -> Batch:
        """The batch of this step: rewarded, and scored if that was possible ahead of training."""

    def trained(self, step: int) -> None:
        """Called when the weights of this step are published."""

    def close(self) -> None: ...


@dataclass
class BatchMaker:
    """Turns prompts and rollouts into batches, for both producers."""

    spec: Stage
    stream: PromptStream
    rollouter: Rollouter
    rewards: RolloutRewards
    scorer: Scorer
    samplers: Samplers
    store: RolloutStore
    ranks: Ranks
    student: LanguageModel

    def context_of(self, by: Literal["teacher", "student"], prompt: Prompt) -> int:
        """How many tokens the writer of a text about a prompt can read."""
        return self.student.context if by == "student" else self.scorer.context_of(prompt)

    def load(self, ids: Sequence[str]) -> list[Rollout]:
        return [*map(as_trained, self.ranks.share(partial(self.store.load, ids)))]

    def assemble(
        self, groups: Mapping[str, list[Rollout]], asked: Mapping[str, Visit], rewards: dict[str, float | None],
        written: Written, clock: Clock,
    ) -> Batch:  # fmt: skip
        """The batch of these groups. `asked`: visits by prompt."""
        rollouts = [rollout for members in groups.values() for rollout in members]
        prompts = {name: visit.prompt for name, visit in asked.items()}
        metrics: dict[str, float] = self.rollouter.pace_metrics(rollouts) if self.rollouter.varies else {}
        if any(writer.shows_more for writer in self.rollouter.everyone):
            metrics["rollout/unshown"] = written.unshown / written.prompts
        if self.spec.rollout.experience is not None:
            with clock("experience"):
                prompts, metrics_of_text = write_experience(self, asked[rollouts[0].prompt_id], rollouts, rewards, prompts, written)  # fmt: skip
                metrics |= metrics_of_text
        seen = {
            name: self.rewards.group(asked[members[0].prompt_id], members, rewards) for name, members in groups.items()
        }
        turn_rewards: dict[str, list[float | None]] = {}
        counts: dict[str, Any] = {f"rewards/{name}": count for name, count in self.rewards.rewarder.drain().items()}
        if any(prompt.environment is not None for prompt in prompts.values()):
            notes = self.ranks.share(partial(self._notes, rollouts))
            turn_rewards = {
                rollout.id: noted["turn_rewards"]
                for rollout, noted in zip(rollouts, notes, strict=True)
                if "turn_rewards" in noted
            }
            counts |= played_metrics([
                (rollout, noted) for rollout, noted in zip(rollouts, notes, strict=True)
                if prompts[rollout.prompt_id].environment is not None and (not rollout.author.size or (rollout.author != Author.DATA).any())
            ])  # fmt: skip
            rollouts = [with_calls(rollout, noted) for rollout, noted in zip(rollouts, notes, strict=True)]
            rollouts, rewards = self._split(rollouts, notes, prompts, rewards)
        owners = {}
        if "teacher" in self.scorer.routes:
            scored = self.scorer.scored("teacher", rollouts) if self.scorer.partial else rollouts
            owners = {rollout.id: self.scorer.teacher_for(prompts[rollout.prompt_id]) for rollout in scored}
        return Batch(
            rollouts, rewards=rewards, turn_rewards=turn_rewards, owners=owners, prompts=prompts, groups=seen, written=written, metrics=counts | metrics,
        )  # fmt: skip

    def _notes(self, rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
        """What environments noted about rollouts, from the store."""
        return [dict(self.store.entries[rollout.id].notes) for rollout in rollouts]

    def _split(
        self, rollouts: Sequence[Rollout], notes: Sequence[Mapping[str, Any]], prompts: Mapping[str, Prompt],
        rewards: Mapping[str, float | None],
    ) -> tuple[list[Rollout], dict[str, float | None]]:  # fmt: skip
        """With `history: split`, a rollout for every turn, each with the reward of the whole."""
        found, given = list[Rollout](), dict(rewards)
        for rollout, noted in zip(rollouts, notes, strict=True):
            prompt = prompts[rollout.prompt_id]
            if prompt.environment is None or prompt.environment.history == "keep":
                found.append(rollout)
                continue
            turns = (
                split_conversations(rollout, noted[PARTS])
                if PARTS in noted
                else split_turns(rollout, prompt, noted.get("conversation", ()), self.rollouter.tokenizer)
            )
            found += turns
            if rollout.id in rewards:
                given |= {turn.id: rewards[rollout.id] for turn in turns}
        return found, given


def with_calls(rollout: Rollout, noted: Mapping[str, Any]) -> Rollout:
    """The rollout with the number of its tool calls, and of those that failed or could not be read."""
    failed = sum(noted.get(name, 0) for name in ("errors", "timeouts", "malformed"))
    calls = noted.get("calls", 0) + noted.get("malformed", 0)
    return replace(rollout, extras={**rollout.extras, CALLS: calls, FAILED_CALLS: failed}) if calls else rollout


def grouped(rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    return groups


def contrasts(members: Sequence[Rollout], rewards: Mapping[str, float | None]) -> bool:
    """Whether a group's rewards differ. Groups without rewards, and groups that the dataset wrote, count as such."""
    asked = [rewards[rollout.id] for rollout in members if rollout.id in rewards]
    return (
        not asked
        or all(rollout.source == "data" for rollout in members)
        or len({reward for reward in asked if reward is not None}) > 1
    )


class InlineProducer:
    """Samples and rewards when a batch is requested."""

    def __init__(self, maker: BatchMaker) -> None:
        self._maker = maker

    def next(self, step: int, clock: Clock) -> Batch:
        """With `rollout.contrast`, groups with equal rewards are replaced. If all groups are such, the last round is kept."""
        maker, spec, rewards_of = self._maker, self._maker.spec.rollout, self._maker.rewards
        with rewards_of.lock:
            rewards_of.rewarder.drain()  # drop the statistics of evaluation
        rewards: dict[str, float | None] = {}
        kept: dict[str, list[Rollout]] = {}
        asked: dict[str, Visit] = {}
        metrics: dict[str, float] = {}
        tokens = drawn = 0
        segments = maker.rollouter.segments
        for _ in range(max(spec.contrast, 1)):
            with clock("sample"):
                again = maker.rollouter.begin_step(step) if maker.rollouter.varies else []
                version = maker.samplers.version
                earlier: list[Written] = []
                while True:  # once; with `rollout.segment` until some answers have ended
                    new = maker.stream.take(spec.prompts - len(kept) - len(again))
                    visits = [*(segments.visits() if segments else ()), *new, *again]
                    written = maker.rollouter.collect(visits, version)
                    if segments is None or written.ids:
                        break
                    earlier.append(written)
                for begun in earlier:
                    written.add(begun)
                asked |= {visit.prompt.id: visit for visit in visits}
                rollouts = maker.load(written.ids)
            with clock("reward"):
                rewards |= maker.ranks.share(
                    partial(rewards_of.reward, rollouts, visits, written.resumed or bool(again))
                )
                if rewards_of.demonstrator is not None:
                    rollouts = demonstrate(maker, visits, rollouts, rewards, written, version)
            if spec.rescue is not None:
                with clock("rescue"):
                    rollouts, metrics = rescue(maker, visits, rollouts, rewards, written)
            if spec.takeover is not None:
                with clock("takeover"):
                    rollouts, metrics = take_over(maker, visits, rollouts, rewards, written)
            groups = grouped(rollouts)
            tokens, drawn = tokens + sum(rollout.response_ids.size for rollout in rollouts), drawn + len(groups)
            kept |= {
                name: members for name, members in groups.items() if not spec.contrast or contrasts(members, rewards)
            }
            if len(kept) >= spec.prompts:
                break
        if segments is not None:
            metrics |= {"waiting": len(segments.waiting), **staleness(rollouts, version)}
        if spec.contrast:
            metrics |= {"contrast": len(kept) / drawn, "tokens/sampled": tokens}
        if maker.stream.skipped:  # unusable prompts since the stage began
            metrics["prompts/skipped"] = maker.stream.skipped
        if rewards_of.demonstrator is not None:
            metrics |= rewards_of.demonstrator.drain()
        batch = maker.assemble(kept or groups, asked, rewards, written, clock)
        batch.metrics |= metrics
        return batch

    def trained(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class ProducerClosed(Stopped):
    """The trainer needs no more batches. Raised only inside the producer's threads, to end them."""


class StopThreads:
    """The run's check for a stop, which also ends the threads when they are no longer needed."""

    def __init__(self, check_stop: Callable[[], None]) -> None:
        self._check_stop, self._trainer, self.closing = check_stop, threading.get_ident(), False

    def check(self) -> None:
        self._check_stop()
        if self.closing and threading.get_ident() != self._trainer:
            raise ProducerClosed


@dataclass(frozen=True)
class Sampled:
    """A batch in the store, with the positions of stream and store after it."""

    step: int
    visits: list[Visit]
    written: Written
    stream: dict[str, Any]
    consumed: int | None
    seconds: float


class AheadProducer:
    """Runs `next` and `trained` in the thread that created it, and everything else in two others."""

    def __init__(self, maker: BatchMaker, stop: StopThreads, device: torch.device) -> None:
        self._maker, self._stop, self._device = maker, stop, device
        self._staleness = maker.spec.rollout.staleness
        self._scores = scores_ahead(maker.spec)
        self._moved = threading.Condition()
        self._sampled: deque[tuple[Sampled, Future[Batch]]] = deque()
        self._jobs: set[Future[Batch]] = set()
        self._trained = self._taken = 0  # steps
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    # The trainer

    def next(self, step: int, clock: Clock) -> Batch:
        """Wait for the batch of this step. An error of the other threads is raised here when its batch is due."""
        maker = self._maker
        with clock("wait"):
            self.trained(step - 1)
            if self._thread is None:
                self._start(step)
            while not self._sampled and self._failure is None:
                self._stop.check()
                with self._moved:
                    self._moved.wait_for(lambda: self._sampled or self._failure is not None, POLL)
            if not self._sampled:
                assert self._failure is not None
                raise self._failure
            sampled, job = self._sampled.popleft()
            while not wait([job], POLL).done:
                self._stop.check()
            batch = job.result()
        self._jobs.discard(job)
        maker.stream.restore(sampled.stream)
        maker.rollouter.consumed = sampled.consumed
        with self._moved:
            self._taken = step
            self._moved.notify_all()
        batch.metrics |= staleness(batch.rollouts, maker.samplers.version)
        return batch

    def trained(self, step: int) -> None:
        """The weights of this step are published; start the batches that waited for them."""
        with self._moved:
            self._trained = max(self._trained, step)
            self._moved.notify_all()

    def close(self) -> None:
        """End both threads. What they sampled is in the store. Their errors are ignored."""
        with self._moved:
            self._stop.closing = True
            self._moved.notify_all()
        if self._thread is not None:
            self._thread.join()
        for job in self._jobs:
            job.cancel()
        wait(self._jobs)

    # The sampler

    def _start(self, step: int) -> None:
        maker = self._maker
        self._taken = step - 1
        stream = copy.copy(maker.stream)
        stream.restore(maker.stream.state())
        assert maker.samplers.ahead is not None
        rollouter = maker.rollouter.for_thread(maker.samplers.ahead, self._stop.check)
        work = (step, stream, rollouter)
        self._thread = threading.Thread(target=self._produce, args=work, name="opd-sampler", daemon=True)
        self._thread.start()

    def _produce(self, first: int, stream: PromptStream, rollouter: Rollouter) -> None:
        spec = self._maker.spec
        try:
            with _device(self._device, own_stream=True):
                for step in range(first, spec.train.steps + 1):
                    visits = stream.take(spec.rollout.prompts)
                    prompts = rollouter.rendered(visits)  # rendering does not depend on the step
                    self._wait(lambda step=step: step <= self._trained + 1 + self._staleness)  # type: ignore[misc]
                    sampled = self._sample(step, visits, prompts, stream.state(), rollouter)
                    with self._moved:
                        job = _finisher().submit(self._finish, sampled)
                        self._jobs.add(job)
                        self._sampled.append((sampled, job))
                        self._moved.notify_all()
        except BaseException as error:  # `next` raises it again in the trainer's thread
            with self._moved:
                self._failure = error
                self._moved.notify_all()

    def _sample(
        self,
        step: int,
        visits: list[Visit],
        prompts: dict[str, np.ndarray],
        stream: dict[str, Any],
        rollouter: Rollouter,
    ) -> Sampled:
        """`stream`: the stream's state after these visits."""
        sampler, clock = self._maker.samplers.ahead, Clock()
        assert sampler is not None
        with clock("sample"):
            if rollouter.varies:
                rollouter.begin_step(step)
            if isinstance(sampler, ThreadSampler):
                sampler.take_over()
            written = rollouter.collect(visits, sampler.version, prompts, durable=False)
        return Sampled(step, visits, written, stream, rollouter.consumed, clock.seconds["sample"])

    # The finisher

    def _finish(self, sampled: Sampled) -> Batch:
        """Reward a batch once it is in the store, and score it while the batch before it is trained on."""
        maker, clock, written = self._maker, Clock(), sampled.written
        with _device(self._device):
            maker.store.commit(sync=True)  # nothing is used before it is durable; sampling continues meanwhile
            with clock("reward"):
                rollouts = maker.load(written.ids)
                asked = {visit.prompt.id: visit for visit in sampled.visits}
                with maker.rewards.lock:
                    maker.rewards.rewarder.drain()  # drop the statistics of evaluation
                    given = partial(maker.rewards.reward, rollouts, sampled.visits, written.resumed)
                    rewards = maker.ranks.share(given)
                    batch = maker.assemble(grouped(rollouts), asked, rewards, written, clock)
            if self._scores:
                self._wait(lambda: sampled.step <= self._taken + 1)
                with clock("score"):
                    maker.scorer.score(batch, sampled.step)
        spent = {"sample": sampled.seconds, **clock.seconds}
        batch.metrics |= {f"beside/{name}": round(seconds, 4) for name, seconds in spent.items()}
        if sampled.stream.get("skipped"):
            batch.metrics["prompts/skipped"] = sampled.stream["skipped"]
        return batch

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._stop.check()
        while not ready():
            with self._moved:
                self._moved.wait_for(lambda: self._stop.closing or ready(), 1.0)
            self._stop.check()


def scores_ahead(spec: Stage) -> bool:
    """Whether teachers score alongside training. This requires that neither the questions nor the teachers depend on the step before."""
    waits = any("plateau" in (term.coefficient.until, term.coefficient.after) for term in spec.objective)
    still = all(kind.never_changes for kind in spec.teachers.values())
    return still and not waits and spec.pool.resident is None


def staleness(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    """How many updates older the weights that drew the student's tokens are than the weights being trained."""
    lags = np.concatenate([version - rollout.version[rollout.author == Author.STUDENT] for rollout in rollouts])
    return {"staleness": float(lags.mean()), "staleness/max": int(lags.max())} if lags.size else {}


@cache
def _finisher() -> ThreadPoolExecutor:
    """One thread for the life of the process, because reward workers end with the thread that started them."""
    return ThreadPoolExecutor(1, thread_name_prefix="opd-finisher")


@contextmanager
def _device(device: torch.device, own_stream: bool = False) -> Iterator[None]:
    """Set up a new thread: select the GPU, and a stream on it that does not wait for the trainer's."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device) if own_stream else None
    with alongside_training(), torch.cuda.device(device), torch.cuda.stream(stream):
        yield


# --- Rewards: given to finished rollouts, noted in the store, and shown to teachers' views ---
#
# An interrupted run finds them in the store and does not ask again.


class RolloutRewards:
    """Rewards rollouts of a stage. `lock`: held while rewards are computed, because evaluation may use the rewarder at the same time."""

    def __init__(
        self,
        spec: Stage,
        rewarder: Rewarder,
        store: RolloutStore,
        tokenizer: object,
        stop_ids: tuple[int, ...],
        ranks: Ranks,
        demonstrator: Demonstrator | None,
    ) -> None:
        self.rewarder, self.demonstrator, self.lock = rewarder, demonstrator, threading.Lock()
        self._spec, self._store, self._ranks = spec, store, ranks
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        rescue = spec.rollout.rescue
        views = [*(kind.view for kind in spec.teachers.values()), *([rescue.view] if rescue is not None else [])]
        self._keeps_feedback = any(view.reads_feedback for view in views)
        self._keeps_turn_feedback = any(view.by_turn for view in views)
        self._uses_rewards = spec.uses_rewards
        self._unrewarded = 0  # steps in a row without rewards

    def text(self, rollout: Rollout) -> str:
        return response_text(rollout.response_ids, self._tokenizer, self._stop_ids)

    def reward(self, rollouts: Sequence[Rollout], visits: Sequence[Visit], resumed: bool) -> dict[str, float | None]:
        """Rewards of rollouts with prompts that can be rewarded. None: the reward failed, which is not 0.

        `resumed`: an earlier process may have rewarded some of them.
        """
        known = self._rewarded_before(rollouts) if resumed else {}
        prompts = {visit.prompt.id: visit.prompt for visit in visits}
        played = [rollout for rollout in rollouts if prompts[rollout.prompt_id].environment is not None]
        if played:
            known = self._earned(played) | known
        asked = [
            rollout
            for rollout in rollouts
            if rollout.id not in known
            and not (prompt := prompts[rollout.prompt_id]).plain
            and self.rewarder.covers(prompt)
        ]
        samples = [
            Sample(prompts[rollout.prompt_id], self.text(rollout), rollout)
            if prompts[rollout.prompt_id].environment is None
            else played_sample(prompts[rollout.prompt_id], rollout, self._tokenizer, self._stop_ids)
            for rollout in asked
        ]
        for rollout, result in zip(asked, self.rewarder(samples), strict=True):
            known[rollout.id] = result.reward
            feedback = {"feedback": result.feedback} if self._keeps_feedback and result.feedback else {}
            self._store.note(rollout.id, reward=result.reward, **feedback)
        return {rollout.id: known[rollout.id] for rollout in rollouts if rollout.id in known}

    def _earned(self, rollouts: Sequence[Rollout]) -> dict[str, float | None]:
        """Sums of an environment's turn rewards, for rollouts that have any. Other rewards are not asked for these.

        A rollout that its environment lost has none: it is not a failure of the student.
        """
        earned: dict[str, float | None] = {}
        for rollout in rollouts:
            notes = self._store.entries[rollout.id].notes
            if "lost" in notes or "turn_rewards" in notes:
                earned[rollout.id] = earned_by(notes)
                self._store.note(rollout.id, reward=earned[rollout.id])
        return earned

    def _rewarded_before(self, rollouts: Sequence[Rollout]) -> dict[str, float | None]:
        notes = {rollout.id: self._store.entries[rollout.id].notes for rollout in rollouts}
        return {key: found["reward"] for key, found in notes.items() if "reward" in found}

    def group(self, visit: Visit, rollouts: Sequence[Rollout], rewards: Mapping[str, float | None]) -> Group:
        """The rollouts of one visit, as a teacher's view sees them."""
        kwargs = self._spec.prompts[visit.source].chat_template_kwargs
        feedback = self._ranks.share(partial(self._feedback, rollouts)) if self._keeps_feedback else {}
        by_turn = self._ranks.share(partial(self._turn_feedback, rollouts)) if self._keeps_turn_feedback else {}
        return Group(rollouts, self._tokenizer, rewards, kwargs, self._stop_ids, feedback, turn_feedback=by_turn)

    def _turn_feedback(self, rollouts: Sequence[Rollout]) -> dict[str, list[str]]:
        """What environments said about each turn, from the store."""
        return {rollout.id: self._store.entries[rollout.id].notes.get("turn_feedback", []) for rollout in rollouts}

    def _feedback(self, rollouts: Sequence[Rollout]) -> dict[str, str]:
        """The feedback that came with their rewards, from the store."""
        return {rollout.id: self._store.entries[rollout.id].notes.get("feedback", "") for rollout in rollouts}

    def require_rewarded(self, step: int, rewards: Mapping[str, float | None]) -> None:
        """Stop if terms or views use rewards and no rollout has had one for several steps: nothing would be learned."""
        none = self._uses_rewards and all(reward is None for reward in rewards.values())
        self._unrewarded = self._unrewarded + 1 if none else 0
        if self._unrewarded >= self._spec.rewards.stop_after:
            raise TrainingError(
                f"step {step}: nothing was rewarded for {self._unrewarded} steps. The last reason: {self.rewarder.last_failure}. "
                "log.txt has the first failures of each reward; fix the reward, or raise rewards.stop_after."
            )


# --- Prompts of endless sources, which are checked as they come ---


class LatePrompts:
    """Checks for each prompt of an endless source whether it fits into the sampler."""

    def __init__(self, spec: Stage, tokenizer: Any, rollouter: Rollouter, context: RunContext) -> None:
        self._spec, self._tokenizer, self._room = spec, tokenizer, rollouter.max_prompt_tokens
        self._rollouter, self._context = rollouter, context
        self._warned = False

    def skips(self, error: UnopenedEpisode) -> bool:
        """Whether a prompt whose environment did not begin is skipped. With several ranks it may have begun on others."""
        if self._context.ranks.size > 1:
            return False
        self._context.say_of_stage(f"{plain(error)} This prompt is skipped and counted")
        return True

    def fits(self, visit: Visit) -> bool:
        """Users cannot fix a generated prompt that does not fit, so it never stops a run."""
        kwargs = self._spec.prompts[visit.source].chat_template_kwargs
        (ids,) = render_prompts([visit.prompt], self._tokenizer, kwargs)
        if isinstance(ids, np.ndarray) and ids.size <= self._room:
            if not self._spec.rollout.staleness:  # sampling ahead has its own tokenizer
                self._rollouter.rendered_ahead[visit.prompt.id] = ids
            return True
        reason = str(ids) if isinstance(ids, DataError) else f"prompt {visit.prompt.id!r} has {ids.size:,} tokens"
        if not self._warned:
            self._warned = True
            self._context.say_of_stage(
                f"{plain(reason)}, and the sampler has room for {self._room:,}: prompts like this are skipped and "
                "counted. To allow longer ones, raise rollout.max_prompt_tokens in a new run"
            )
        return False
