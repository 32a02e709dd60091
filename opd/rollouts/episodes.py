"""Playing rollouts in environments, while the sampler works on other requests.

    the sampler's thread   turn ends -> parsed -> ............ -> bridge ids into the store -> next turn is requested
    other threads                            step, logged ----^

Only the sampler's thread touches the tokenizer and writes tokens. An interrupted rollout plays its stored turns again first; see
`environments.py` for what `effects` allows.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np

from opd.common.errors import DataError, ModelError, OpdError, RemoteError, Stopped, TrainingError
from opd.common.text import first_line, shortened
from opd.data.prompts import render_prompt, response_text
from opd.engines.requests import request_key, why_over
from opd.objective.batch import own_turns
from opd.records import (
    Author,
    EnvironmentRecord,
    Message,
    Prompt,
    Rollout,
    Sample,
    SampledToken,
    SampleRequest,
    StopReason,
    TokenColumns,
)
from opd.rollouts.bridge import Bridge
from opd.rollouts.environments import (
    OPENINGS,
    Environment,
    Episode,
    Step,
    Turn,
    close_aside,
    limited,
    require_messages,
    unlimited,
)
from opd.rollouts.tool_calls import Malformed, ToolFormat, tool_format, turn_text

WRITERS = {author: author.name.lower() for author in Author} | {Author.ENV: "environment", Author.DATA: "dataset"}
TURNS = 16  # turns with a metric each
TURN_OF = "turn_of"  # in the extras of a rollout that is one turn of a stored one: the stored one's id
PARTS = "parts"  # in the notes of a rollout with an agent: where its conversations are
LARGEST = 2 << 20  # bytes of a step as JSON, which is logged and tokenised
GRACE = 2.0  # seconds that the end of a run waits for running steps, and then for episodes to close
TAKEOVER = (
    "takeover"  # begins the source of an episode with one, and names its facts in `extras`: turn, right, wrong, of
)
FIRST_TURNS = "first_turns"  # the field of a prompt with the ids of the turns that its rollouts begin with
KEY_TURN = "key_turn"  # and the field with the corrected turn: `right`, `wrong`, three `rewards`, the episode's `key`
ROUNDING = 1e-9  # room when sums of rewards are compared
FAILURES = ("timeouts", "errors", "lost")
COUNTS = ("calls", "malformed", *FAILURES)  # noted with every rollout that has any
ASKED = ("conversations", "retries", "dropped", "refused", "unused")  # of agents that ask for turns


class TurnSink(Protocol):
    """Where the environment's tokens and a rollout's end are written."""

    def append_many(self, tokens: TokenColumns, author: Author | np.ndarray = Author.STUDENT) -> None: ...
    def extend(self, id: str, response_ids: np.ndarray, author: Author, version: int) -> None: ...
    def finish(self, id: str, stop: StopReason) -> None: ...
    def note(self, id: str, **facts: Any) -> None: ...


class StepLog(Protocol):
    """Makes calls durable: `opd.store.rollouts.Replay`. `logged`: what is known of the next call."""

    @property
    def logged(self) -> EnvironmentRecord | None: ...

    def call(self, key: Any, execute: Callable[[], Any]) -> Any: ...

    def sync(self) -> None: ...


@dataclass(frozen=True)
class GivenTurn:
    """A turn that is played as it stands. `copied`: the rollout and the place that its tokens are copied from, with their log-probs."""

    ids: np.ndarray  # int32, the stop token included
    author: Author
    copied: tuple[Rollout, int] | None = None

    def write(self, id: str, sink: TurnSink) -> None:
        if self.copied is None:
            sink.extend(id, self.ids, self.author, -1)
            return
        rollout, first = self.copied
        *columns, author = (
            getattr(rollout, name)[first : first + self.ids.size]
            for name in ("response_ids", "logprob", "logprob_sampled", "logprob_stop", "version", "author")
        )
        sink.append_many(TokenColumns(id, *columns), author)


@dataclass(frozen=True)
class GivenTurns:
    """The turns that a rollout begins with."""

    turns: Sequence[GivenTurn]
    key: int | None = None  # of the episode; default: the request's own
    alone: bool = False  # the rollout ends after them


class Dialogue:
    """Reads turns and writes messages for one environment, tokenizer and chat template."""

    def __init__(
        self, environment: Environment, tokenizer: Any, stop_ids: Sequence[int], template_kwargs: Mapping[str, Any]
    ) -> None:
        self.environment, self.tokenizer, self.stop_ids = environment, tokenizer, tuple(stop_ids)
        self._kwargs = {name: value for name, value in template_kwargs.items() if name != "tools"}
        self.tools = tuple(environment.tools())
        if environment.turns > 1 and not environment.takes_tokenizer:
            self.require_template()

    def require_template(self) -> None:
        """Raise an error now if the chat template cannot be bridged, or does not show how tools are called."""
        _ = self.bridge, self.format if self.tools else None

    @cached_property
    def format(self) -> ToolFormat:
        return tool_format(self.environment.tool_calls, self.tokenizer, self.stop_ids, self._kwargs)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the vocabulary's longest token."""
        return max(map(len, self.tokenizer.get_vocab()))

    @cached_property
    def bridge(self) -> Bridge:
        rendered = self.tools if self.environment.tool_calls == "auto" else ()
        return Bridge(self.tokenizer, self.stop_ids, self._kwargs, rendered)

    def turn(self, number: int, ids: np.ndarray, stop: StopReason, calls: int) -> Turn | Malformed:
        """`calls`: those of earlier turns."""
        text = response_text(ids, self.tokenizer, self.stop_ids)
        if not self.tools:
            return Turn(number, text, ids, stop)
        found = self.format.parse(turn_text(ids, self.tokenizer, self.stop_ids), self.tools, calls)
        return found if isinstance(found, Malformed) else Turn(number, text, ids, stop, tuple(found))

    def written(self, text: str) -> np.ndarray:
        """The ids of a turn that somebody else writes, with a stop id."""
        stop = self.tokenizer.eos_token_id if self.tokenizer.eos_token_id in self.stop_ids else self.stop_ids[0]
        return np.array([*self.tokenizer(text, add_special_tokens=False)["input_ids"], stop], dtype=np.int32)

    def spoken(self, step: Step, turn: Turn) -> list[dict[str, Any]]:
        """The turn and what answered it, as messages."""
        if self.bridge.ends_differ:
            raise ModelError(
                "history split: this chat template writes turns in several channels, so a turn's text cannot be rendered again. Use keep."
            )
        if not step.messages:
            raise TrainingError(
                f"history split: environment {self.environment.name} gives ids instead of messages. Use keep."
            )
        text = turn_text(turn.ids, self.tokenizer, self.stop_ids)
        marker = str(getattr(self.format, "open", "")).split("\n")[0] if turn.calls else ""
        return [dict(message) for message in self.bridge.spoken(text, step.messages, turn.calls, marker)]

    def ids(self, step: Step, turn: Turn) -> np.ndarray:
        """What the student reads next."""
        if not step.messages:
            known = len(self.tokenizer)
            if any(not 0 <= index < known for index in step.ids):
                raise DataError(
                    f"the environment gave token ids outside the tokenizer's {known:,}: {shortened(step.ids)}."
                )
            return np.array(step.ids, dtype=np.int32)
        stopped = bool(turn.ids.size) and int(turn.ids[-1]) in self.stop_ids
        return self.bridge.ids(step.messages, stopped=stopped, calls=turn.calls)


class Dialogues:
    """One `Dialogue` for each environment and its arguments of the chat template."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        self._tokenizer, self._stop_ids, self._known = tokenizer, stop_ids, dict[str, Dialogue]()

    def of(self, prompt: Prompt) -> Dialogue:
        kwargs = {name: value for name, value in prompt.template_kwargs.items() if name != "tools"}
        key = f"{id(prompt.environment)} {sorted(kwargs.items())!r}"
        if key not in self._known:
            self._known[key] = Dialogue(prompt.environment, self._tokenizer, self._stop_ids, kwargs)
        return self._known[key]


class Playing:
    """One rollout in its environment. `stop`: why it ended."""

    def __init__(
        self, dialogue: Dialogue, request: SampleRequest, prompt: Prompt,
        durable: Rollout | None = None, log: StepLog | None = None, step: int | None = None, draws_again: bool = False,
        given: GivenTurns | None = None,
    ) -> None:  # fmt: skip
        """`step`: of training, for a curriculum. `draws_again`: turns that `durable` has are sampled once more, for an exact resume.

        `given`: the first turns; default: those of the prompt or of the curriculum's oracle.
        """
        self.dialogue, self.environment, self.request = dialogue, dialogue.environment, request
        self._prompt, self._log = prompt, None if self.environment.inline else log
        self._stored = (
            [] if durable is None else parts_by_author(durable)
        )  # what an earlier process left, not yet taken
        self._draws_again = draws_again
        self._turns = self.environment.turns_at(step)
        self._given = given or given_turns(dialogue, prompt, step)
        if self._given.alone:
            self._turns = min(self._turns, len(self._given.turns))
        self._key_turn: str | None = None  # what was written in the first turn after the given ones
        self._episode: Episode | None = None
        self._unopened = ""  # why there is no episode
        self._closing, self._abandoned = threading.Lock(), False
        self.ids: list[int] = []  # the response so far
        self._start = self._turn = 0  # where the current turn begins, and its number
        self._rewards: list[float | None] = []
        self._feedback: list[str] = []  # of every turn, or ""
        self._counts: Counter[str] = Counter()
        self._said: list[list[dict[str, Any]]] = []  # with history split: every turn and what answered it, as messages
        self._read: np.ndarray | None = None  # with history split: what the current turn reads, after the first
        self.lost = ""  # why the rollout cannot be continued
        self.stop: StopReason = "env"

    # In the pool, one call at a time

    def open(self) -> None:
        environment, key = self.environment, self.request.key if self._given.key is None else self._given.key

        def opened() -> Episode:
            given = (self.dialogue.tokenizer,) if environment.takes_tokenizer else ()
            episode = environment.open(self._prompt, key, *given)
            try:
                if not environment.takes_tokenizer:
                    episode.reset()
            except BaseException:
                close_aside(episode)
                raise
            return episode

        for attempt in range(1, OPENINGS + 1):
            try:
                if environment.inline:
                    self._episode = unlimited(opened)
                else:
                    self._episode = limited(opened, environment.call_seconds, late=close_aside)
                break
            except Exception as error:  # an environment may raise anything
                if _ends_run(error):
                    raise
                if attempt == OPENINGS:
                    self._unopened = (
                        f"environment {environment.name} could not open an episode of prompt {self._prompt.id!r} in {OPENINGS} attempts: "
                        f"{type(error).__name__}: {first_line(error)}"
                    )
        if self._abandoned:
            self.close()

    def answer(self, turn: Turn) -> Step:
        """The environment's response, from the log if it is there."""
        assert self._episode is not None
        if self._log is None:
            return self._execute(self._episode.step, turn)
        logged = self._log.logged
        key = {"turn": turn.number, "text": turn.text, "calls": [call.message()["function"] for call in turn.calls]}
        step = step_from_json(
            self._log.call(key, lambda: step_as_json(self._first_answer(turn, begun=logged is not None)))
        )
        if logged is None or not logged.finished or self.environment.effects == "outside" or step.counts.get("lost"):
            return step
        again = self._execute(partial(self._episode.resumed, step=step), turn)
        if step_as_json(again) == step_as_json(step):
            return step
        if any(one.counts.get(name) for one in (step, again) for name in FAILURES):
            return _lost(
                "the episode could not be rebuilt after an interruption: a call failed that had not, or had failed otherwise"
            )
        raise self._differently(turn.number)

    def _first_answer(self, turn: Turn, begun: bool) -> Step:
        """`begun`: an earlier process began this step, and died in it."""
        assert self._episode is not None
        if not begun or self.environment.effects != "outside":
            return self._execute(self._episode.step, turn)
        recovered = self._execute(self._episode.recover, turn, optional=True)
        return (
            _lost("the run was interrupted during a call that cannot be repeated") if recovered is None else recovered
        )

    def _execute(self, step: Callable[[Turn], Any], turn: Turn, optional: bool = False) -> Any:
        """Run a step. Its failure loses the rollout, not the run. `optional`: it may give None."""
        seconds = self.environment.call_seconds * max(1, len(turn.calls)) + 1
        try:
            call = partial(step, turn)
            found = unlimited(call) if self.environment.inline else limited(call, seconds)
            found = found if found is None and optional else _checked(found)
        except TimeoutError:
            found = _lost(f"a step took longer than {self.environment.call_seconds:g} s", timeouts=1)
        except Exception as error:  # an environment may raise anything
            if _ends_run(error):
                raise
            found = _lost(f"{type(error).__name__}: {first_line(error)}", errors=1)
        if self._abandoned:  # the end of the run may have closed the episode under the step: its result does not count
            raise Stopped
        return found

    def _differently(self, turn: int) -> TrainingError:
        return TrainingError(
            f"rollout {self.request.id!r}: environment {self.environment.name} answered turn {turn + 1} differently than before the "
            "interruption. Its steps have to be a function of the prompt, the key and the turns; otherwise set its `effects`."
        )

    # In the sampler's thread

    def drawn(self, token: SampledToken) -> None:
        self.ids.append(token.token)

    def proceed(self, sink: TurnSink) -> Turn | Malformed | SampleRequest | None:
        """After opening, and after each response: the stored turn to play again, the given turn, or the turn to sample."""
        if self._unopened:
            self._counts.update(lost=1, errors=1)
            self._feedback.append(self._unopened)
            self._end(sink)
            return None
        known = None
        while self._stored:
            own, part = self._stored[0]
            if not own:
                return self._written_turn()
            self._stored.pop(0)
            if self._draws_again:  # its tokens are compared with these as they are drawn
                known = part
                break
            self.ids += part.tolist()
        if self._turn < len(self._given.turns) and len(self.ids) == self._start:
            turn = self._given.turns[self._turn]
            if self._start + turn.ids.size < self.request.sampling.max_new_tokens:
                if known is None:
                    turn.write(self.request.id, sink)
                elif not np.array_equal(known, turn.ids):
                    raise self._differently(self._turn)
                self.ids += turn.ids.tolist()
                return self._written_turn()
        if self._given.alone and len(self.ids) > self._start:  # an earlier process wrote it, and its answer is missing
            return self._written_turn()
        if self._given.alone:
            self.stop = "length"
            self._end(sink)
            return None
        return self.turn_request()

    def _written_turn(self) -> Turn | Malformed:
        """The current turn, which is written already."""
        written = self.ids if self._read is None else self.ids[self._start :]
        return self.turn_ended(why_over(written, self.turn_request(), self.dialogue.tokenizer) or "length")

    def turn_request(self) -> SampleRequest:
        """A request for the turn that begins, or continues, after the tokens so far."""
        whole = self.request.sampling
        left = whole.max_new_tokens - self._start
        if self._read is not None:
            left = min(left, self.request.prompt_ids.size + whole.max_new_tokens - self._read.size)
            own = np.array(self.ids[self._start :], dtype=np.int32)
            return replace(
                self.request,
                prompt_ids=self._read,
                prefix_ids=own if own.size else None,
                key=request_key(self.request.key, self._prompt.id, self._turn, 0),  # positions begin again
                sampling=replace(whole, max_new_tokens=min(left, self.environment.turn_tokens or left)),
            )
        sampling = replace(whole, max_new_tokens=min(left, self.environment.turn_tokens or left))
        prefix = np.array(self.ids, dtype=np.int32) if self.ids else None
        return replace(self.request, prefix_ids=prefix, start=self._start, sampling=sampling)

    def turn_ended(self, stop: StopReason) -> Turn | Malformed:
        ids = np.array(self.ids[self._start :], dtype=np.int32)
        self._last = self.dialogue.turn(self._turn, ids, stop, self._counts["calls"])
        if isinstance(self._last, Turn):
            self._counts["calls"] += len(self._last.calls)
        return self._last

    def accept(self, step: Step, sink: TurnSink) -> Turn | Malformed | SampleRequest | None:
        """Take the response to the turn. Returns what comes next; None: the rollout is over, and rewards and feedback are noted."""
        turn = self._last
        if isinstance(turn, Malformed):
            turn = Turn(self._turn, "", np.array(self.ids[self._start :], dtype=np.int32), "stop")
        if self._turn == len(self._given.turns):
            self._key_turn = response_text(turn.ids, self.dialogue.tokenizer, self.dialogue.stop_ids).strip()
        self._turn += 1
        self._rewards.append(step.reward)
        self._feedback.append(step.feedback)
        self._counts.update(step.counts)
        over, more = step.done or self._turn >= self._turns, np.zeros(0, np.int32)
        try:
            more = more if over else self.dialogue.ids(step, turn)
        except (DataError, ModelError) as error:
            self._unreadable(error)
        over = over or not more.size
        if self._counts["lost"]:
            self._stored.clear()  # the rollout ends as it is
        if self._stored and (over or not np.array_equal(more, self._stored[0][1])):
            raise self._differently(turn.number)
        if not over and len(self.ids) + more.size < self.request.sampling.max_new_tokens and self._remember(step, turn):
            if self._stored:
                self._stored.pop(0)
            else:
                sink.extend(self.request.id, more, Author.ENV, -1)
            self.ids += more.tolist()
            self._start = len(self.ids)
            return self.proceed(sink)
        self.stop = "env" if over else "length"
        self._end(sink)
        return None

    def _remember(self, step: Step, turn: Turn) -> bool:
        """With history split: what the next turn reads. Returns whether there is room for a token after it."""
        if self.environment.history == "keep":
            return True
        said = [*self._said, self.dialogue.spoken(step, turn)]
        try:
            self._read = render_prompt(after_turns(self._prompt, said), self.dialogue.tokenizer)
        except DataError as error:
            self._unreadable(error)
            return False
        self._said = said
        return self._read.size < self.request.prompt_ids.size + self.request.sampling.max_new_tokens

    def _unreadable(self, error: OpdError) -> None:
        """The chat template rejects what the environment gave: the rollout is lost."""
        self._counts.update(lost=1, errors=1)
        self._feedback[-1] = first_line(error)

    def _end(self, sink: TurnSink) -> None:
        facts: dict[str, Any] = {name: self._counts[name] for name in COUNTS if self._counts[name]}
        if KEY_TURN in self._prompt.fields and not self._counts["lost"]:
            self._rewards = key_rewards(
                self._rewards, len(self._given.turns), self._key_turn, self._prompt.fields[KEY_TURN]
            )
        if any(one is not None for one in self._rewards) or self._counts["lost"]:
            facts["turn_rewards"] = self._rewards
        if any(self._feedback):
            facts["feedback"] = "\n".join(filter(None, self._feedback))
            facts["turn_feedback"] = self._feedback
        if self._said:
            facts["conversation"] = self._said
        if self._counts["lost"]:
            self.lost = next(filter(None, reversed(self._feedback)), "lost")
        if facts:
            sink.note(self.request.id, **facts)
        self.close()

    # The end

    def abandon(self) -> None:
        """The run ends: results of steps that still run no longer count."""
        self._abandoned = True

    def close(self) -> threading.Thread | None:
        """Close the episode. Returns the thread that does."""
        with self._closing:
            episode, self._episode = self._episode, None
        if episode is None:
            return None
        if self.environment.inline:
            with contextlib.suppress(Exception):
                episode.close()
            return None
        return close_aside(episode)


def _ends_run(error: BaseException) -> bool:
    """Whether an error ends the run. Others lose a rollout, or are tried again; so are those of servers."""
    return isinstance(error, (OpdError, Stopped)) and not isinstance(error, RemoteError)


def _lost(reason: str, **counts: int) -> Step:
    return Step(done=True, feedback=reason, counts={"lost": 1, **counts})


def _checked(step: Any) -> Step:
    """A step as it is logged."""
    if not isinstance(step, Step):
        raise TypeError(f"a step must be a Step, got {type(step).__name__}")
    require_messages(step.messages)
    if step.reward is not None and not math.isfinite(step.reward):
        raise ValueError(f"a step's reward must be a finite number, got {step.reward}")
    if not isinstance(step.feedback, str):
        raise TypeError(f"a step's feedback must be text, got {type(step.feedback).__name__}")
    if any(type(count) is not int or count < 0 for count in step.counts.values()):
        raise TypeError(f"a step's counts must be whole numbers, got {shortened(step.counts, 100)}")
    plain = step_as_json(step)
    if (size := len(json.dumps(plain))) > LARGEST:
        raise ValueError(f"a step has {size:,} bytes as JSON; at most {LARGEST:,} are accepted")
    return step_from_json(plain)


def after_turns(prompt: Prompt, said: Sequence[Sequence[Message]]) -> Prompt:
    """The prompt with the turns that followed it."""
    return replace(prompt, messages=(*(prompt.messages or ()), *itertools.chain.from_iterable(said)))


def split_turns(rollout: Rollout, prompt: Prompt, said: Sequence[Sequence[Message]], tokenizer: Any) -> list[Rollout]:
    """A rollout for every turn of a rollout that was sampled with history split, each with what the student read."""
    found = []
    for number, (first, end) in enumerate(own_turns(rollout)[: len(said) + 1]):  # a lost one may have more turns
        columns = {
            name: getattr(rollout, name)[first:end]
            for name in ("response_ids", "author", "logprob", "logprob_sampled", "logprob_stop", "version")
        }
        read = render_prompt(after_turns(prompt, said[:number]), tokenizer) if number else rollout.prompt_ids
        extras = {**rollout.extras, TURN_OF: rollout.id}
        found.append(replace(rollout, id=f"{rollout.id}/turn{number}", prompt_ids=read, extras=extras, **columns))
    return found


def given_turns(dialogue: Dialogue, prompt: Prompt, step: int | None) -> GivenTurns:
    """The turns before the student's first: stored ones of the prompt, whose episode opens as theirs did, or those of a curriculum's oracle."""
    stored = prompt.fields.get(FIRST_TURNS)
    if stored is not None:
        key = prompt.fields.get(KEY_TURN, {}).get("key")  # runs of earlier versions have none
        turns = [GivenTurn(np.array(ids, dtype=np.int32), Author.DATA) for ids in stored]
        return GivenTurns(turns, None if key is None else int(key))
    oracle = dialogue.environment.oracle_turns(prompt, step)
    return GivenTurns([GivenTurn(dialogue.written(text), Author.DATA) for text in oracle])


def key_rewards(
    rewards: Sequence[float | None], turn: int, written: str | None, key: Mapping[str, Any]
) -> list[float | None]:
    """The rewards of turns of a rollout that begins at a corrected turn: SCoRe's, if the episode was not won.

    >>> key_rewards([None, 0.0, 0.0], 1, "e", {"right": "e", "wrong": "n", "rewards": [0.5, 0.1, 0.0]})
    [0.0, 0.5, 0.0]
    """
    if written is None or math.fsum(reward or 0.0 for reward in rewards) >= 1 - ROUNDING:
        return list(rewards)
    as_corrected, other, again = key["rewards"]
    earned = as_corrected if written == key["right"] else again if written == key["wrong"] else other
    return [earned if number == turn else 0.0 for number in range(len(rewards))]


def split_conversations(
    rollout: Rollout, conversations: Sequence[tuple[tuple[int, int], Sequence[tuple[int, int]]]]
) -> list[Rollout]:
    """A rollout for every conversation of an agent. Each is given by its places in the response: the prompt, then the rest."""
    found = []
    for number, ((first, end), parts) in enumerate(conversations):
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(rollout, name)[a:b] for a, b in parts])
            for name in ("response_ids", "author", "logprob", "logprob_sampled", "logprob_stop", "version")
        }
        read, extras = rollout.response_ids[first:end], {**rollout.extras, TURN_OF: rollout.id}
        found.append(
            replace(rollout, id=f"{rollout.id}/conversation{number}", prompt_ids=read, extras=extras, **columns)
        )
    return found


def earned_by(notes: Mapping[str, Any]) -> float | None:
    """The sum of the turns' rewards; None if the environment lost the rollout."""
    return None if "lost" in notes else float(sum(reward for reward in notes["turn_rewards"] if reward is not None))


def played_sample(prompt: Prompt, rollout: Rollout, tokenizer: Any, stop_ids: tuple[int, ...]) -> Sample:
    """What a reward sees of a rollout in an environment: the last turn, and everything as the transcript."""
    first = own_turns(rollout)[-1][0]
    text = response_text(rollout.response_ids[first:], tokenizer, stop_ids)
    return Sample(prompt, text, rollout, transcript(rollout, tokenizer))


def transcript(rollout: Rollout, tokenizer: Any) -> str:
    """A response with a line for each turn: `student: 42`, then `environment: add 5+17`."""
    edges = [0, *(np.flatnonzero(np.diff(rollout.author.astype(np.int8))) + 1).tolist(), rollout.author.size]
    lines = []
    for first, end in itertools.pairwise(edges):
        who = WRITERS[Author(rollout.author[first])] if end > first else ""
        text = str(tokenizer.decode(rollout.response_ids[first:end].tolist(), skip_special_tokens=True)).strip()
        lines += [f"{who}: {text}"] if who else []
    return "\n".join(lines)


def played_metrics(played: Sequence[tuple[Rollout, Mapping[str, Any]]]) -> dict[str, float]:
    """Of rollouts that were played in environments, with their notes: turns and calls per rollout, and how many things went wrong."""
    if not played:
        return {}
    counts = {name: sum(noted.get(name, 0) for _, noted in played) for name in COUNTS}
    found = {f"env/{name}": float(counts[name]) for name in COUNTS if name != "calls"}
    found["env/turns"] = float(np.mean([len(own_turns(rollout)) for rollout, _ in played]))
    found["env/calls"] = counts["calls"] / len(played)
    for name in ASKED:
        if any(name in noted for _, noted in played):
            found[f"env/{name}"] = float(sum(noted.get(name, 0) for _, noted in played))
    by_turn: dict[int, list[float]] = {}
    for _, noted in played:
        for turn, reward in enumerate(noted.get("turn_rewards", ())[:TURNS], 1):
            by_turn.setdefault(turn, []).extend([] if reward is None else [reward])
    return found | {f"reward_turn/{turn}": float(np.mean(values)) for turn, values in sorted(by_turn.items()) if values}


def malformed_step(found: Malformed) -> Step:
    return Step(messages=[{"role": "user", "content": found.problem}], counts={"malformed": 1})


def parts_by_author(rollout: Rollout) -> list[tuple[bool, np.ndarray]]:
    """(by the student, ids) of neighbouring tokens of a response."""
    own = rollout.author != Author.ENV
    begins = [0, *(np.flatnonzero(np.diff(own.astype(np.int8))) + 1).tolist(), own.size]
    return [
        (bool(own[first]), rollout.response_ids[first:end]) for first, end in itertools.pairwise(begins) if end > first
    ]


def step_as_json(step: Step) -> dict[str, Any]:
    return {
        "messages": [dict(message) for message in step.messages],
        "ids": [int(index) for index in step.ids],
        "reward": None if step.reward is None else float(step.reward),
        "done": bool(step.done),
        "feedback": step.feedback,
        "counts": dict(step.counts),
    }


def step_from_json(found: Mapping[str, Any]) -> Step:
    return Step(**found)


# --- The pool, and requests that become ready when a step has ended ---


@dataclass(frozen=True)
class Done:
    """A finished job of a rollout: what it gave, or what it raised."""

    playing: Playing
    result: Any = None
    error: BaseException | None = None


class StepPool:
    """A few threads for the steps of one environment. They wait for the disk and for the environment, each step with a time limit."""

    def __init__(self, workers: int, done: queue.SimpleQueue[Done]) -> None:
        self.workers, self.unopened, self.opening, self.opened = workers, deque[Playing](), 0, 0
        self._started, self.running, self._done = 0, 0, done
        self._jobs: queue.SimpleQueue[tuple[Playing, Callable[[], Any]] | None] = queue.SimpleQueue()

    @property
    def has_room(self) -> bool:
        """Whether another episode may be opened."""
        opened = self.opened if self.unopened[0].environment.bounded else 0
        return self.opening + opened < self.workers

    def submit(self, playing: Playing, job: Callable[[], Any]) -> None:
        self.running += 1
        if self._started < min(self.running, self.workers):
            self._started += 1
            threading.Thread(target=self._work, name="opd-environment", daemon=True).start()
        self._jobs.put((playing, job))

    def close(self) -> None:
        """End the threads after what they are running now. What waits is not begun."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
                self.running -= 1
        for _ in range(self._started):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            playing, work = job
            try:
                self._done.put(Done(playing, work()))
            except BaseException as error:  # raised again in the sampler's thread
                self._done.put(Done(playing, error=error))


class TurnSource:
    """Requests, of which those in environments are followed by others. Gives None while none is ready and some may follow."""

    def __init__(
        self,
        requests: Iterable[SampleRequest],
        playing: Mapping[str, Playing],
        sink: TurnSink,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._playing, self._sink, self._check_stop = playing, sink, check_stop
        self._ready = deque(request for request in requests if request.id not in playing)
        self._open = len(self._ready) + len(playing)  # rollouts that have not ended
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._pools: dict[int, StepPool] = {}
        for one in playing.values():
            pool = self._pools.setdefault(id(one.environment), StepPool(one.environment.workers, self._done))
            pool.unopened.append(one)

    def ended(self, id: str, stop: StopReason) -> None:
        """A turn has been sampled."""
        if id in self._playing:
            self._continue(self._playing[id], self._playing[id].turn_ended(stop))
        else:
            self._open -= 1
            self._sink.finish(id, stop)

    def close(self) -> None:
        """End all calls within a few seconds. The thread of a call that hangs is abandoned."""
        for pool in self._pools.values():
            pool.close()
        if self._open <= 0:
            return
        self._wait_for_steps(time.monotonic() + GRACE)
        for playing in self._playing.values():
            playing.abandon()
        until = time.monotonic() + GRACE
        for thread in [playing.close() for playing in self._playing.values()]:
            if thread is not None:
                thread.join(max(0.0, until - time.monotonic()))

    def _wait_for_steps(self, until: float) -> None:
        """Steps that end soon are logged, so a resumed run does not have to repeat them, or to find out what became of them."""
        running = sum(pool.running for pool in self._pools.values())
        with contextlib.suppress(queue.Empty):
            for _ in range(running):
                self._done.get(timeout=max(0.0, until - time.monotonic()))

    def __iter__(self) -> TurnSource:
        return self

    def __next__(self) -> SampleRequest | None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._take(self._done.get_nowait())
        for pool in self._pools.values():
            while not self._ready and pool.unopened and pool.has_room:
                self._begin(pool.unopened.popleft())
        if self._ready:
            return self._ready.popleft()
        if self._open <= 0:
            raise StopIteration
        self._check_stop()
        return None

    def _pool(self, playing: Playing) -> StepPool:
        return self._pools[id(playing.environment)]

    def _begin(self, playing: Playing) -> None:
        if playing.environment.inline:
            playing.open()
            self._pool(playing).opened += 1
            self._continue(playing, playing.proceed(self._sink))
        else:
            self._pool(playing).opening += 1
            self._pool(playing).submit(playing, playing.open)

    def _take(self, done: Done) -> None:
        pool, opened = self._pool(done.playing), not isinstance(done.result, Step)
        pool.running -= 1
        pool.opening -= opened
        pool.opened += opened
        if done.error is not None:
            raise done.error
        if opened:
            self._continue(done.playing, done.playing.proceed(self._sink))
        else:
            self._continue(done.playing, done.playing.accept(done.result, self._sink))

    def _continue(self, playing: Playing, following: Turn | Malformed | SampleRequest | None) -> None:
        while isinstance(following, (Turn, Malformed)):
            if isinstance(following, Turn) and not playing.environment.inline:
                self._pool(playing).submit(playing, partial(playing.answer, following))
                return
            step = playing.answer(following) if isinstance(following, Turn) else malformed_step(following)
            following = playing.accept(step, self._sink)
        if following is None:
            self._finish(playing)
        else:
            self._ready.append(following)

    def _finish(self, playing: Playing) -> None:
        self._open -= 1
        self._pool(playing).opened -= 1
        self._sink.finish(playing.request.id, playing.stop)
