"""Episodes with messages and tools: failing tools, time limits, the pool, and what an interruption leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import opd
from opd.common.errors import DataError, ModelError, RemoteError, TrainingError
from opd.data.prompts import render_prompt
from opd.loop.producer import with_calls
from opd.models import load_model
from opd.objective.batch import CALLS, FAILED_CALLS, own_turns
from opd.records import Author, Finished, Message, Prompt, Rollout, SampledToken, SampleRequest, Sampling
from opd.rollouts import environments
from opd.rollouts.environments import Environment, Episode, Step, ToolEnvironment, Turn, json_schema, limited, tool_of
from opd.rollouts.episodes import (
    FIRST_TURNS,
    KEY_TURN,
    Dialogues,
    GivenTurn,
    GivenTurns,
    Playing,
    TurnSource,
    earned_by,
    given_turns,
    played_metrics,
)
from opd.rollouts.rollouter import MemorySink, answers, draw_into
from opd.store import RolloutStore
from opd.store.rollouts import Replay
from tests.support.chat_templates import OWN, template_tokenizer


class ScriptedSampler:
    """Writes given texts: one for every turn of a request, in order."""

    def __init__(self, tokenizer: Any, texts: dict[str, list[str]]) -> None:
        self.tokenizer, self.texts = tokenizer, {name: list(turns) for name, turns in texts.items()}

    def sample(self, requests: Iterable[SampleRequest | None]) -> Iterator[SampledToken | Finished]:
        for request in requests:
            if request is None:
                time.sleep(0.001)
                continue
            text = self.texts[request.id].pop(0)
            ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
            for token in ids:
                yield SampledToken(request.id, token, -1.0, -1.0, -3.0, 0)
            yield Finished(request.id, "stop")

    def load(self, weights: Any) -> None: ...


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_model("tiny/generalist").tokenizer


def request_for(prompt: Prompt, tokenizer: Any, name: str = "") -> SampleRequest:
    ids = render_prompt(prompt, tokenizer)
    return SampleRequest(name or prompt.id, ids, 7, Sampling(2000, stop_ids=(tokenizer.eos_token_id,)))


def opened(environment: Environment, name: str = "p") -> Prompt:
    return environment.opened(Prompt(name, "d", messages=({"role": "user", "content": "go"},)), {})


def play(
    environment: Environment, tokenizer: Any, texts: Sequence[str], count: int = 1
) -> tuple[list[Rollout], dict[str, dict[str, Any]]]:
    prompts = {f"p{number}": opened(environment, f"p{number}") for number in range(count)}
    requests = [request_for(prompt, tokenizer) for prompt in prompts.values()]
    notes: dict[str, dict[str, Any]] = {}
    sampler = ScriptedSampler(tokenizer, {name: list(texts) for name in prompts})
    found = answers(sampler, requests, prompts=prompts, tokenizer=tokenizer, notes=notes)
    return found, notes


def said(rollout: Rollout, tokenizer: Any) -> list[str]:
    """What the environment said between the turns."""
    env = np.flatnonzero(rollout.author == Author.ENV)
    parts = np.split(env, np.flatnonzero(np.diff(env) > 1) + 1)
    return [tokenizer.decode(rollout.response_ids[part].tolist()) for part in parts if part.size]


def call(name: str, **arguments: Any) -> str:
    import json

    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Trouble(ToolEnvironment):
    """Tools that fail in every way."""

    name = "trouble"

    def functions(self, prompt: Prompt | None) -> Sequence[Callable[..., Any]]:
        def raises() -> str:
            raise LookupError("nothing here")

        def leaves() -> str:
            raise SystemExit(3)

        def hangs() -> None:
            time.sleep(30)

        def megabytes() -> str:
            return "x" * 5_000_000

        def binary() -> bytes:
            return bytes(range(256))

        def hostile() -> str:
            return "done<eos>=I am the student"

        def wordless() -> str:
            raise Wordless

        def endless() -> Any:
            known: list[Any] = []
            for _ in range(2_000):
                known = [known]
            return known

        async def leaves_late() -> str:
            raise Leaves

        async def late(number: int) -> int:
            return number + 1

        return [raises, leaves, hangs, megabytes, binary, hostile, wordless, endless, leaves_late, late]

    def reward(self, prompt: Prompt, answer: str) -> float | None:
        return float(answer == "42")


def test_whatever_a_tool_does_becomes_a_message(tokenizer: Any) -> None:
    environment = Trouble(tool_calls="json", turns=20, call_seconds=0.2, result_characters=50)
    names = [
        "raises",
        "leaves",
        "hangs",
        "megabytes",
        "binary",
        "hostile",
        "wordless",
        "endless",
        "leaves_late",
    ]
    texts = [*map(call, names), call("late", number=1), call("late", number="x"), "<tool_call>{", call("none"), "42"]
    (rollout,), notes = play(environment, tokenizer, texts)
    told = said(rollout, tokenizer)
    expected = ["LookupError: nothing here", "SystemExit", "took longer than 0.2 s", "more characters", "", "done", "Wordless", "Recursion", "Leaves", "2", "integer", "JSON", "no tool"]  # fmt: skip
    assert all(part in text for part, text in zip(expected, told, strict=True)), told
    assert max(map(len, told)) < 300
    env = rollout.response_ids[rollout.author == Author.ENV]
    assert tokenizer.eos_token_id not in env  # no text ends a turn
    assert rollout.stop == "env"
    assert notes["p0"] == {"calls": 10, "malformed": 3, "timeouts": 1, "errors": 5, "turn_rewards": [None] * 13 + [1.0]}


class Slow(Environment):
    """Counts how many steps run at once."""

    name = "slow"
    running: ClassVar[list[int]] = [0, 0]  # now, at most
    lock: ClassVar[Any] = threading.Lock()
    asynchronous: bool = False

    def open(self, prompt: Prompt, key: int) -> Episode:
        return AsyncEpisode() if self.asynchronous else SlowEpisode()


class SlowEpisode(Episode):
    def step(self, turn: Turn) -> Step:
        with Slow.lock:
            Slow.running[0] += 1
            Slow.running[1] = max(Slow.running)
        time.sleep(0.02)
        with Slow.lock:
            Slow.running[0] -= 1
        return Step(messages=[{"role": "user", "content": f"turn {turn.number}"}], reward=1.0, done=turn.number == 2)


class AsyncEpisode(Episode):
    async def astep(self, turn: Turn) -> Step:
        return SlowEpisode().step(turn)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_steps_run_at_the_same_time_up_to_a_limit(tokenizer: Any, asynchronous: bool) -> None:
    Slow.running[:] = [0, 0]
    found, notes = play(Slow(workers=3, asynchronous=asynchronous), tokenizer, ["a", "b", "c"], count=12)
    assert [rollout.stop for rollout in found] == ["env"] * 12
    assert all(note == {"turn_rewards": [1.0, 1.0, 1.0]} for note in notes.values())
    assert Slow.running[1] == (1 if asynchronous else 3)  # one event loop runs all coroutines
    assert [said(rollout, tokenizer) for rollout in found] == [["turn 0=", "turn 1="]] * 12


class Broken(Environment):
    name = "broken"
    how: str = "raises"

    def open(self, prompt: Prompt, key: int) -> Episode:
        if self.how == "opens":
            raise ConnectionError("no server")
        return BrokenEpisode(self.how)


class BrokenEpisode(Episode):
    def __init__(self, how: str) -> None:
        self.how = how

    def step(self, turn: Turn) -> Step:
        if turn.number == 0:
            return Step(messages=[{"role": "user", "content": "more"}], reward=1.0)
        if self.how == "hangs":
            time.sleep(30)
        raise RuntimeError("lost connection")


def test_a_failing_environment_loses_rollouts_without_a_reward(tokenizer: Any) -> None:
    (rollout,), notes = play(Broken(), tokenizer, ["a", "b"])
    assert rollout.stop == "env"
    assert notes["p0"]["lost"] == notes["p0"]["errors"] == 1
    assert "lost connection" in notes["p0"]["feedback"]
    (rollout,), notes = play(Broken(how="hangs", call_seconds=0.05), tokenizer, ["a", "b"])
    assert notes["p0"]["lost"] == notes["p0"]["timeouts"] == 1


def test_an_episode_that_cannot_be_opened_is_lost() -> None:
    model, notes = load_model("tiny/generalist"), dict[str, dict[str, Any]]()
    prompt = Prompt("p", "d", messages=({"role": "user", "content": "go"},), environment=Broken(how="opens"))
    (rollout,) = answers(
        ScriptedSampler(model.tokenizer, {}), [request_for(prompt, model.tokenizer)], prompts={"p": prompt},
        tokenizer=model.tokenizer, notes=notes,
    )  # fmt: skip
    assert (rollout.stop, rollout.response_ids.size) == ("env", 0)
    assert notes["p"]["lost"] == notes["p"]["errors"] == 1
    assert "could not open an episode of prompt 'p' in 3 attempts: ConnectionError" in notes["p"]["feedback"]


class Reported(Exception):
    pass


class Wordless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Leaves(BaseException):
    pass


def raises(error: BaseException) -> Any:
    raise error


def says(content: Any, role: Any = "user") -> Step:
    return Step(messages=[{"role": role, "content": content}])


STEPS: dict[str, tuple[Callable[[], Any], str]] = {
    "server": (lambda: raises(RemoteError("the server rejected a step")), "rejected a step"),
    "wordless": (lambda: raises(Wordless()), "Wordless"),
    "leaves": (lambda: raises(Leaves()), "Leaves"),
    "nothing": (lambda: None, "got NoneType"),
    "dictionary": (lambda: {"done": True}, "got dict"),
    "incomplete": (lambda: Step(messages=[{"role": "user"}]), "{role, content}"),
    "no text": (lambda: says([{"type": "text", "text": "a"}]), "both text"),
    "bytes": (lambda: says(b"a"), "both text"),
    "no role": (lambda: says("a", role=5), "both text"),
    "one message": (lambda: Step(messages={"role": "user", "content": "a"}), "must be a list"),  # type: ignore[arg-type]
    "gigabytes": (lambda: says("y" * 3_000_000), "at most 2,097,152"),
    "ids": (lambda: Step([10**12]), "outside the tokenizer's"),
    "negative ids": (lambda: Step([-1]), "outside the tokenizer's"),
    "nan": (lambda: Step(reward=float("nan"), done=True), "nan"),
    "huge": (lambda: Step(reward=10**400, done=True), "too large"),
    "feedback": (lambda: Step(feedback=5, done=True), "feedback must be text"),  # type: ignore[arg-type]
    "counts": (lambda: Step(counts={"errors": "x"}, done=True), "whole numbers"),  # type: ignore[dict-item]
}


class Failing(Environment):
    """A step that fails in a way that could end the run."""

    name = "failing"
    how: str = "server"

    def open(self, prompt: Prompt, key: int) -> Episode:
        return FailingEpisode(self.how)


class FailingInline(Failing):
    name, inline = "failing_inline", True


class FailingEpisode(Episode):
    def __init__(self, how: str) -> None:
        self.how = how

    def step(self, turn: Turn) -> Any:
        return STEPS[self.how][0]()

    def close(self) -> None:
        raises(Reported("closing fails as well"))


@pytest.mark.parametrize("kind", [Failing, FailingInline])
@pytest.mark.parametrize("how", list(STEPS))
def test_a_step_that_cannot_be_used_loses_the_rollout(how: str, kind: type[Failing], tokenizer: Any) -> None:
    _, notes = play(kind(how=how), tokenizer, ["a"])
    assert notes["p0"]["lost"] == notes["p0"]["errors"] == 1
    assert STEPS[how][1] in notes["p0"]["feedback"]


class Rude(Environment):
    """Speaks for the student."""

    name = "rude"

    def open(self, prompt: Prompt, key: int) -> Episode:
        return RudeEpisode()


class RudeEpisode(Episode):
    def step(self, turn: Turn) -> Step:
        return says("x", role="assistant")


@pytest.mark.parametrize("history", ["keep", "split"])
def test_messages_that_the_template_rejects_lose_the_rollout(history: Any) -> None:
    tokenizer, _ = template_tokenizer(OWN["alternating"])
    tokenizer.eos_token = "<end_of_turn>"
    _, notes = play(Rude(history=history), tokenizer, ["a", "b"])
    assert notes["p0"]["lost"] == notes["p0"]["errors"] == 1
    assert "roles must alternate" in notes["p0"]["feedback"]


def test_one_turn_needs_no_bridge() -> None:
    tokenizer, _ = template_tokenizer(OWN["chatml"] + "{{ messages | length }}")
    tokenizer.eos_token = "<|im_end|>"
    (rollout,), notes = play(Slow(turns=1), tokenizer, ["a"])
    assert (rollout.stop, notes["p0"]) == ("env", {"turn_rewards": [1.0]})
    with pytest.raises(ModelError, match="longer conversation"):
        play(Slow(turns=2), tokenizer, ["a", "b"])


class Greeting(Environment):
    """First messages that fail in a way. `left`: how often."""

    name = "greeting"
    how: str = ""
    left: ClassVar[list[int]] = [0]

    def open(self, prompt: Prompt, key: int) -> Episode:
        return GreetingEpisode(self.how)


class GreetingEpisode(Episode):
    def __init__(self, how: str) -> None:
        self.how = how

    def reset(self) -> Any:
        Greeting.left[0] -= 1
        if Greeting.left[0] >= 0:
            raise ConnectionError("busy")
        return [{"role": "user", "content": "\ud800 go"}] if self.how == "broken pair" else STEPS[self.how][0]()

    def close(self) -> None:
        raises(Leaves())


def test_first_messages_that_cannot_be_used_are_an_error() -> None:
    for how, words in (("nothing", "got NoneType"), ("dictionary", "got dict"), ("leaves", "Leaves")):
        with pytest.raises(DataError, match=words):
            opened(Greeting(how=how))
    Greeting.left[0] = 2  # the third attempt succeeds
    messages = opened(Greeting(how="broken pair")).messages
    assert messages is not None
    assert messages[-1]["content"] == "\ufffd go"


def test_a_coroutine_that_exits_does_not_end_the_loop_of_the_others() -> None:
    async def leaves() -> None:
        raise SystemExit(3)

    async def fine() -> int:
        return 1

    with pytest.raises(RuntimeError, match="SystemExit"):
        limited(leaves, 5.0)
    assert limited(fine, 5.0) == 1


def test_a_coroutine_that_blocks_its_loop_blocks_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "BLOCKED", 0.01)
    over = threading.Event()

    async def blocks() -> None:
        over.wait(60)

    async def fine() -> int:
        return 1

    def others_run() -> bool:
        try:
            return bool(limited(fine, 0.5) == 1)
        except TimeoutError:
            return False

    with pytest.raises(TimeoutError):
        limited(blocks, 0.05)
    assert until(others_run)
    over.set()


def test_too_many_hanging_tools_end_the_run(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "HANGING", len(environments._hanging))
    environment = Trouble(tool_calls="json", call_seconds=0.05)
    with pytest.raises(TrainingError, match="calls of environments hang"):
        play(environment, tokenizer, [call("hangs"), "42"])


class Closing(Environment):
    """Counts open episodes. `how`: what takes long."""

    name = "closing"
    how: str = ""
    open_now: ClassVar[list[int]] = []
    late: ClassVar[Any] = threading.Event()

    def open(self, prompt: Prompt, key: int) -> Episode:
        if self.how == "open" and not Closing.late.wait(2.5):
            Closing.late.set()
        Closing.open_now.append(1)
        return ClosingEpisode(self.how)


class ClosingEpisode(Episode):
    def __init__(self, how: str) -> None:
        self.how = how

    def step(self, turn: Turn) -> Step:
        if self.how == "step":
            time.sleep(30)
        return Step(done=True, reward=1.0)

    def close(self) -> None:
        if self.how == "close":
            time.sleep(30)
        Closing.open_now.pop()


def until(true: Callable[[], bool]) -> bool:
    for _ in range(500):
        if true():
            return True
        time.sleep(0.01)
    return False


def test_an_episode_that_does_not_close_holds_nobody_up(tokenizer: Any) -> None:
    Closing.open_now.clear()
    began = time.monotonic()
    (rollout,), _ = play(Closing(how="close"), tokenizer, ["a"])
    assert rollout.stop == "env"
    assert time.monotonic() - began < 20


def test_an_episode_that_opens_too_late_is_closed(tokenizer: Any) -> None:
    Closing.open_now.clear()
    Closing.late.clear()
    environment = Closing(how="open", call_seconds=1)
    prompt = replace(opened(Closing()), environment=environment)
    request = request_for(prompt, tokenizer)
    played = Playing(Dialogues(tokenizer, request.sampling.stop_ids).of(prompt), request, prompt)
    played.open()  # in a later attempt
    assert until(lambda: len(Closing.open_now) == 1)
    assert played.close() is not None
    assert until(lambda: not Closing.open_now)


def test_an_interruption_closes_episodes_and_keeps_no_result_of_a_closed_one(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opd.rollouts.episodes.GRACE", 0.2)
    store, prompt = RolloutStore(tmp_path), opened(Closing())
    prompt = replace(prompt, environment=Ended(how="step"))
    request = request_for(prompt, tokenizer, "main/p/0/0")
    begun(store, request)
    played = Playing(Dialogues(tokenizer, request.sampling.stop_ids).of(prompt), request, prompt, None, Replay(store, request.id))  # fmt: skip
    source = TurnSource([request], {request.id: played}, MemorySink([request]))
    assert until(lambda: next(source) is not None)
    played.ids += tokenizer.encode("go", add_special_tokens=False)
    source.ended(request.id, "stop")
    assert until(lambda: bool(store.environment(request.id)))
    began = time.monotonic()
    source.close()
    assert time.monotonic() - began < 10
    assert Ended.closed.is_set()
    assert until(Ended.answered.is_set)
    time.sleep(0.05)
    (record,) = store.environment(request.id)
    assert not record.finished  # the step answered because its episode was closed


class Ended(Closing):
    """A step that answers once its episode is closed, as a call to a server that was killed."""

    name = "ended"
    closed: ClassVar[Any] = threading.Event()
    answered: ClassVar[Any] = threading.Event()

    def open(self, prompt: Prompt, key: int) -> Episode:
        return EndedEpisode()


class EndedEpisode(Episode):
    def step(self, turn: Turn) -> Step:
        Ended.closed.wait(30)
        Ended.answered.set()
        return Step(messages=[{"role": "user", "content": "error: the server has ended"}])

    def close(self) -> None:
        Ended.closed.set()


def test_failed_calls_are_with_the_rollout(tokenizer: Any) -> None:
    texts = [call("raises"), call("late", number=1), "<tool_call>{", "42"]
    (rollout,), notes = play(Trouble(tool_calls="json", turns=20), tokenizer, texts)
    known = with_calls(rollout, notes[rollout.id])
    assert (known.extras[CALLS], known.extras[FAILED_CALLS]) == (3, 2)
    (plain,), notes = play(Trouble(tool_calls="json"), tokenizer, ["42"])
    assert with_calls(plain, notes.get(plain.id, {})) is plain


def test_every_environment_has_its_own_workers(tokenizer: Any) -> None:
    """Two environments in one batch: the limit of one does not hold for the other."""
    Slow.running[:] = [0, 0]
    other = Failing(how="nothing", workers=8)
    prompts = {f"p{number}": opened(Slow(workers=1), f"p{number}") for number in range(6)}
    environment = prompts["p0"].environment
    prompts = {name: replace(prompt, environment=environment) for name, prompt in prompts.items()}
    prompts["q"] = opened(other, "q")
    requests = [request_for(prompt, tokenizer) for prompt in prompts.values()]
    sampler = ScriptedSampler(tokenizer, {name: ["a", "b", "c"] for name in prompts})
    answers(sampler, requests, prompts=prompts, tokenizer=tokenizer)
    assert Slow.running[1] == 1


def test_a_template_without_calls_is_rejected_before_anything_is_sampled(tokenizer: Any) -> None:
    prompt = opened(Trouble())
    with pytest.raises(ModelError, match="Set tool_calls to json or xml"):
        Dialogues(tokenizer, (tokenizer.eos_token_id,)).of(prompt)


@pytest.mark.parametrize(("how", "words"), [("hangs", "took longer than 0.05 s"), ("raises", "no server")])
def test_first_messages_that_do_not_come_are_an_error(how: str, words: str) -> None:
    with pytest.raises(DataError, match=f"could not open an episode of prompt 'p'.*{words}"):
        opened(Unready(how=how, call_seconds=0.05))


class Unready(Environment):
    name = "unready"
    how: str = "hangs"

    def open(self, prompt: Prompt, key: int) -> Episode:
        if self.how == "raises":
            raise ConnectionError("no server")
        time.sleep(2)
        return Episode()


# Interruptions


class Ledger(Environment):
    """Counts in a list what it has executed. `dies`: the turn in which the process dies."""

    name = "ledger"
    executed: ClassVar[list[int]] = []
    dies: ClassVar[int] = -1
    recovers: bool = True

    def open(self, prompt: Prompt, key: int) -> Episode:
        return LedgerEpisode(self)


class OwnLedger(Ledger):
    effects = "own"


class OutsideLedger(Ledger):
    effects = "outside"


class LedgerEpisode(Episode):
    def __init__(self, environment: Ledger) -> None:
        self.environment, self.total = environment, 0

    def step(self, turn: Turn) -> Step:
        Ledger.executed.append(turn.number)
        self.total += len(turn.text)
        if turn.number == Ledger.dies:
            raise TrainingError("killed")  # what ends the run, like a signal
        return Step(messages=[{"role": "user", "content": f"total {self.total}"}], reward=0.5, done=turn.number == 3)

    def recover(self, turn: Turn) -> Step | None:
        known = Step(messages=[{"role": "user", "content": "recovered"}], reward=0.25)
        return known if self.environment.recovers else None


TEXTS = ["one", "three", "five", "seven"]


def begun(store: RolloutStore, request: SampleRequest) -> None:
    store.begin(
        id=request.id, prompt_id="p", visit=0, sample=0, domain="d", source="student", prompt_ids=request.prompt_ids
    )


def continued(
    store: RolloutStore, environment: Environment, tokenizer: Any, texts: Sequence[str], given: Sequence[str] = ()
) -> None:
    """Sample a rollout, or the rest of it, into the store. `given`: all of its turns, if they are not sampled."""
    prompt = opened(environment)
    request = request_for(prompt, tokenizer, "main/p/0/0")
    durable = None
    if request.id in store.entries:
        (durable,) = store.partial([request.id])
    else:
        begun(store, request)
    dialogue = Dialogues(tokenizer, request.sampling.stop_ids).of(prompt)
    known = GivenTurns([GivenTurn(dialogue.written(text), Author.DATA) for text in given], alone=True)
    played = Playing(dialogue, request, prompt, durable, Replay(store, request.id), given=known if given else None)
    draw_into(ScriptedSampler(tokenizer, {request.id: list(texts)}), [request], store, playing={request.id: played})
    store.commit(sync=True)


class DurableSampler(ScriptedSampler):
    """Ends a continued turn at once, as samplers do when its last token was saved."""

    def sample(self, requests: Iterable[SampleRequest | None]) -> Iterator[SampledToken | Finished]:
        for request in requests:
            if request is not None and request.prefix_ids is not None and request.prefix_ids.size > request.start:
                assert request.prefix_ids[-1] == self.tokenizer.eos_token_id
                yield Finished(request.id, "stop")
            elif request is not None:
                yield from super().sample([request])


def interrupted(path: Path, environment: Environment, tokenizer: Any, turn: int) -> list[int]:
    """A run that dies in the step after a turn and is resumed. Returns what was executed after the death."""
    Ledger.executed.clear()
    Ledger.dies = turn
    with pytest.raises(TrainingError, match="killed"):
        continued(RolloutStore(path), environment, tokenizer, TEXTS)
    Ledger.dies = -1
    Ledger.executed.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(__name__ + ".ScriptedSampler", DurableSampler)
        continued(RolloutStore(path), environment, tokenizer, TEXTS[turn + 1 :])
    return list(Ledger.executed)


@pytest.mark.parametrize("history", ["keep", "split"])
def test_a_given_turn_whose_answer_is_missing_is_played(history: str, tmp_path: Path, tokenizer: Any) -> None:
    continued(RolloutStore(tmp_path / "whole"), Ledger(history=history), tokenizer, [], TEXTS)
    Ledger.dies = 1
    with pytest.raises(TrainingError, match="killed"):
        continued(RolloutStore(tmp_path / "run"), Ledger(history=history), tokenizer, [], TEXTS)
    Ledger.dies = -1
    continued(RolloutStore(tmp_path / "run"), Ledger(history=history), tokenizer, [], TEXTS)
    whole, run = (RolloutStore(tmp_path / name, read_only=True) for name in ("whole", "run"))
    (one,), (other,) = (store.load(["main/p/0/0"]) for store in (whole, run))
    assert one.stop == other.stop == "env"
    assert one.response_ids.tolist() == other.response_ids.tolist()
    assert whole.entries["main/p/0/0"].notes == run.entries["main/p/0/0"].notes


@pytest.mark.parametrize("kind", [Ledger, OwnLedger])
def test_steps_without_outside_effects_are_played_again(kind: type[Ledger], tmp_path: Path, tokenizer: Any) -> None:
    continued(RolloutStore(tmp_path / "whole"), kind(), tokenizer, TEXTS)
    assert interrupted(tmp_path / "run", kind(), tokenizer, 2) == [0, 1, 2, 3]
    whole, run = (RolloutStore(tmp_path / name, read_only=True) for name in ("whole", "run"))
    (one,), (other,) = (store.load(["main/p/0/0"]) for store in (whole, run))
    assert one.response_ids.tolist() == other.response_ids.tolist()
    assert one.author.tolist() == other.author.tolist()
    assert whole.entries["main/p/0/0"].notes == run.entries["main/p/0/0"].notes
    assert [record.finished for record in run.environment("main/p/0/0")] == [True] * 4


def test_a_step_with_outside_effects_runs_once(tmp_path: Path, tokenizer: Any) -> None:
    assert interrupted(tmp_path / "a", OutsideLedger(), tokenizer, 1) == [2, 3]
    store = RolloutStore(tmp_path / "a", read_only=True)
    (rollout,) = store.load(["main/p/0/0"])
    assert said(rollout, tokenizer)[:2] == ["total 3=", "recovered="]
    assert store.entries["main/p/0/0"].notes["turn_rewards"] == [0.5, 0.25, 0.5, 0.5]


def test_a_step_with_unknown_outside_effects_loses_the_rollout(tmp_path: Path, tokenizer: Any) -> None:
    assert interrupted(tmp_path / "a", OutsideLedger(recovers=False), tokenizer, 1) == []
    notes = RolloutStore(tmp_path / "a", read_only=True).entries["main/p/0/0"].notes
    assert notes["lost"] == 1
    assert "interrupted" in notes["feedback"]


class Drifting(OwnLedger):
    """Its second life answers differently."""

    lives: ClassVar[int] = 0

    def open(self, prompt: Prompt, key: int) -> Episode:
        episode = LedgerEpisode(self)
        Drifting.lives += 1
        episode.total = Drifting.lives
        return episode


def test_an_environment_that_is_rebuilt_differently_is_noticed(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(TrainingError, match="answered turn 1 differently than before the interruption"):
        interrupted(tmp_path / "a", Drifting(), tokenizer, 1)


class Flaky(OwnLedger):
    """A call that was too late in its first life, and is not in its second."""

    lives: ClassVar[int] = 0

    def open(self, prompt: Prompt, key: int) -> Episode:
        Flaky.lives += 1
        return FlakyEpisode(self, Flaky.lives)


class FlakyEpisode(LedgerEpisode):
    def __init__(self, environment: Ledger, life: int) -> None:
        super().__init__(environment)
        self.life = life

    def step(self, turn: Turn) -> Step:
        step = super().step(turn)
        if turn.number or self.life > 2:  # the first life only opens the prompt
            return step
        return Step(messages=[{"role": "user", "content": "error: look took longer than 30 s"}], counts={"timeouts": 1})


def test_an_episode_that_cannot_be_rebuilt_because_of_a_time_limit_is_lost(tmp_path: Path, tokenizer: Any) -> None:
    """A difference would end every attempt to resume the run."""
    Flaky.lives = 0
    assert interrupted(tmp_path / "a", Flaky(), tokenizer, 2) == [0]
    store = RolloutStore(tmp_path / "a", read_only=True)
    (rollout,) = store.load(["main/p/0/0"])
    assert rollout.stop == "env"
    notes = store.entries["main/p/0/0"].notes
    assert notes["lost"] == 1
    assert earned_by(notes) is None
    assert "could not be rebuilt" in notes["feedback"]


def test_rollouts_that_ran_out_of_tokens_count_in_the_metrics(tokenizer: Any) -> None:
    """Also those without a reward."""
    ended, notes = play(Trouble(tool_calls="json"), tokenizer, [call("late", number=1), "41"])
    cut = replace(ended[0], stop="length")
    found = played_metrics([(ended[0], notes["p0"]), (cut, {"calls": 3, "timeouts": 2})])
    assert found["env/turns"] == 2
    assert found["env/calls"] == 2
    assert found["env/timeouts"] == 2


def test_a_fresh_log_of_steps_does_not_wait_for_the_disk(tmp_path: Path, tokenizer: Any) -> None:
    store = RolloutStore(tmp_path, commit_ms=0)
    begun(store, request_for(opened(Ledger()), tokenizer, "main/p/0/0"))
    before = store._log.end
    Replay(store, "main/p/0/0", begun=False)
    assert store._log.end == before


# Prompts and recipes


def test_the_first_turn_after_the_given_ones_is_compared_also_if_its_call_is_malformed(tokenizer: Any) -> None:
    key = {"right": "42", "wrong": "<tool_call>{", "rewards": [0.5, 0.1, 0.05], "key": str(2**64 - 1)}
    prompt = replace(opened(Trouble(tool_calls="json")), fields={FIRST_TURNS: [], KEY_TURN: key})
    assert given_turns(Dialogues(tokenizer, (tokenizer.eos_token_id,)).of(prompt), prompt, None).key == 2**64 - 1
    notes: dict[str, dict[str, Any]] = {}
    sampler = ScriptedSampler(tokenizer, {"p": ["<tool_call>{", "41"]})
    answers(sampler, [request_for(prompt, tokenizer)], prompts={"p": prompt}, tokenizer=tokenizer, notes=notes)
    assert notes["p"]["turn_rewards"] == [0.05, 0.0]


class Greeter(Environment):
    name = "greeter"

    def open(self, prompt: Prompt, key: int) -> Episode:
        return GreeterEpisode()


class GreeterEpisode(Episode):
    def reset(self) -> Sequence[Message]:
        return [{"role": "user", "content": " hello"}]

    def step(self, turn: Turn) -> Step:
        return Step(messages=[{"role": "user", "content": "and?"}], reward=1.0, done=turn.number == 1)


def test_the_environment_opens_the_prompt(tokenizer: Any) -> None:
    prompt = opened(Greeter())
    assert tokenizer.decode(render_prompt(prompt, tokenizer).tolist()) == "go hello="
    tools = opened(Trouble(tool_calls="json"))
    assert "megabytes" in tokenizer.decode(render_prompt(tools, tokenizer).tolist())
    assert [tool["function"]["name"] for tool in opened(Trouble()).template_kwargs["tools"]][:2] == ["raises", "leaves"]
    with pytest.raises(DataError, match="Give the prompt as messages"):
        Greeter().opened(Prompt("p", "d", text="go"), {})


def test_one_source_of_prompts_has_an_environment(tmp_path: Path) -> None:
    (tmp_path / "greeter.py").write_text(
        "import opd\nfrom opd.rollouts.environments import Environment, Episode, Step\n"
        "class Greeting(Episode):\n"
        "    def reset(self):\n        return [{'role': 'user', 'content': ' hello'}]\n"
        "    def step(self, turn):\n"
        "        return Step(messages=[{'role': 'user', 'content': 'and?'}], reward=1.0, done=turn.number == 1)\n"
        "@opd.register\nclass Greeter(Environment):\n    name = 'greeter'\n"
        "    def open(self, prompt, key):\n        return Greeting()\n"
    )
    run = opd.run(
        {
            "student": "tiny/generalist",
            "teachers": {"arithmetic": "tiny/arithmetic", "sorting": "tiny/sorting"},
            "prompts": [
                {"source": "task:addition", "environment": {"kind": "greeter", "turn_tokens": 4}},
                {"source": "task:sort"},
            ],
            "plugins": [str(tmp_path / "greeter.py")],
            "rollout": {"prompts": 4, "max_new_tokens": 24},
            "train": {"steps": 2, "lr": 1e-3},
            "eval": {"prompts": 2, "teachers": False},
            "log": {"start_table": False},
            "device": "cpu",
        },
        out=tmp_path / "run",
    )
    for rollout in run.rollouts.load(list(run.rollouts.entries)):
        played = rollout.domain == "arithmetic"
        assert (rollout.author == Author.ENV).any() == played
        assert (rollout.stop == "env") == played
        if played:
            assert run.rollouts.entries[rollout.id].notes["reward"] == 2.0


def test_schemas_come_from_type_hints() -> None:
    def book(city: str, nights: int = 1, tags: list[str] | None = None) -> str:
        """Books a room."""
        return city

    tool = tool_of(book)
    assert tool.description == "Books a room."
    assert tool.parameters["required"] == ["city"]
    assert tool.parameters["properties"]["tags"] == json_schema(list[str] | None)
    with pytest.raises(TypeError, match="needs a type hint"):
        tool_of(lambda x: x)
    with pytest.raises(TypeError, match="not a type that a tool can take"):
        json_schema(Path)


def test_text_prompts_and_replaced_messages_keep_their_environment(tokenizer: Any) -> None:
    prompt = opened(Greeter())
    assert replace(prompt, messages=()).environment == prompt.environment


class Counted(Greeter):
    """Four turns, which an oracle knows."""

    name = "counted"

    def open(self, prompt: Prompt, key: int) -> Episode:
        return LedgerEpisode(Ledger())

    def oracle(self, prompt: Prompt) -> Sequence[str]:
        return ["one", "two", "three", "four"]


@pytest.mark.parametrize(("step", "oracle", "turns"), [(1, 3, 1), (5, 3, 1), (6, 2, 2), (16, 0, 4), (99, 0, 4)])
def test_a_curriculum_over_turns(step: int, oracle: int, turns: int, tokenizer: Any) -> None:
    for curriculum in ("forward", "backward"):
        prompt = opened(Counted(curriculum=curriculum, growth=5))
        request = request_for(prompt, tokenizer)
        dialogue = Dialogues(tokenizer, request.sampling.stop_ids).of(prompt)
        played = Playing(dialogue, request, prompt, step=step)
        sink = MemorySink([request])
        draw_into(ScriptedSampler(tokenizer, {"p": ["a", "b", "c", "d"]}), [request], sink, playing={"p": played})
        rollout = sink.rollout(request)
        authors = [rollout.author[first] for first, _ in own_turns(rollout)]
        if curriculum == "backward":
            assert authors == [Author.DATA] * oracle + [Author.STUDENT] * (4 - oracle)
        else:
            assert authors == [Author.STUDENT] * turns
        assert rollout.stop == "env"
    assert Counted(curriculum="forward").turns_at(None) == 8  # evaluation is not cut
    assert Counted(curriculum="backward").oracle_turns(prompt, None) == ()
