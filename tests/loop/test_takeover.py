"""Take-overs: episodes that are played again up to a turn, which the teacher or the environment's advice replaces."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opd
from opd.common.errors import DataError, RecipeError
from opd.data.sources import Opening, Scan, prompt_source
from opd.data.tasks import MOVES, World, get_task
from opd.engines.requests import request_key
from opd.environments.dialogue import DialogueEpisode
from opd.loop import takeover
from opd.loop.takeover import first_wrong
from opd.models.load import load_tokenizer
from opd.objective.batch import own_turns
from opd.recipe import load_recipe
from opd.records import Author, Prompt, Rollout
from opd.registry import find
from opd.rollouts.environments import Step
from opd.rollouts.episodes import KEY_TURN, TAKEOVER, Dialogue, key_rewards
from opd.rollouts.settings import Takeover
from opd.store import RolloutStore
from tests.support.interrupted import Crash

RECIPE: dict[str, Any] = {
    "student": "tiny/generalist",
    "teachers": {"arithmetic": "tiny/arithmetic"},
    "prompts": [{"source": "task:dialogue"}],
    "rollout": {"prompts": 3, "samples": 2, "max_new_tokens": 64, "environment": {"kind": "dialogue", "turn_tokens": 6}, "takeover": {"attempts": 2}},
    "objective": {"divergence": "reverse_kl", "on": ["student", "teacher"]},
    "train": {"steps": 1, "lr": 1e-3},
    "eval": {"prompts": 0},
    "log": {"start_table": False},
    "device": "cpu",
}  # fmt: skip


def distance(world: World, place: str, has_key: bool) -> int:
    """Moves to the door, by searching outwards from the state, without the world's own search."""
    seen, ahead = {(place, has_key)}, deque([(place, has_key, 0)])
    while ahead:
        place, has_key, moves = ahead.popleft()
        if has_key and place == world.door:
            return moves
        for move in MOVES:
            there = world.moved(place, move)
            if (state := (there, has_key or there == world.key)) not in seen:
                seen.add(state)
                ahead.append((*state, moves + 1))
    raise AssertionError("a world has a way to the door")


def wrong_turn(world: World, texts: list[str]) -> int | None:
    place, has_key = world.start, world.start == world.key
    for number, text in enumerate(texts):
        before = distance(world, place, has_key)
        if text not in MOVES:
            return number
        place = world.moved(place, text)
        has_key = has_key or place == world.key
        if distance(world, place, has_key) != before - 1:
            return number
    return None


def world_of(prompt: Prompt) -> World:
    assert prompt.messages is not None
    return World.read(str(prompt.messages[0]["content"]))


class Known(Dialogue):
    """Reads no tokens: for `first_wrong`, which is given texts."""

    def __init__(self, kind: str) -> None:
        self.environment = find("environment", kind)()


def found_in(prompt: Prompt, texts: list[str], kind: str) -> int | None:
    candidate = takeover.Candidate(opd.records.Visit(prompt, 0, 0), None, None)  # type: ignore[arg-type]
    return first_wrong(Known(kind), candidate, texts)


@given(st.integers(0, 60), st.integers(0, 12), st.lists(st.sampled_from([*MOVES, "x", ""]), max_size=4))
@settings(max_examples=60, deadline=None)
def test_the_first_wrong_turn_of_the_grid_is_found(index: int, right: int, more: list[str]) -> None:
    prompt = get_task("grid").prompt("train", index)
    world = world_of(prompt)
    way = [*world.path(world.start, False)]
    texts = way[:right] if right >= len(way) else way[:right] + more[: len(way) - right]  # the episode ends at the door
    assert found_in(prompt, texts, "grid") == wrong_turn(world, texts)


@given(st.integers(0, 60), st.lists(st.booleans(), min_size=3, max_size=3))
@settings(max_examples=30, deadline=None)
def test_the_first_wrong_turn_of_a_dialogue_is_found(index: int, right: list[bool]) -> None:
    prompt = get_task("dialogue").prompt("train", index)
    answers = find("environment", "dialogue")().oracle(prompt)
    texts = [text if good else "?" for text, good in zip(answers, right, strict=True)]
    assert found_in(prompt, texts, "dialogue") == (right.index(False) if False in right else None)


@pytest.fixture(scope="module")
def score(tmp_path_factory: pytest.TempPathFactory) -> opd.Run:
    changes = ["train.steps=1", "rollout.prompts=3", "stages.2.rollout.samples=2", "eval.prompts=0", "device=cpu"]
    return opd.run("methods/score", overrides=changes, out=tmp_path_factory.mktemp("score") / "run")


def turns_of(rollout: Rollout) -> list[list[int]]:
    return [rollout.response_ids[first:end].tolist() for first, end in own_turns(rollout)]


def loaded(run: opd.Run, stage: str) -> dict[str, Rollout]:
    names = [name for name in run.rollouts.entries if name.startswith(f"{stage}/")]
    return {rollout.id: rollout for rollout in run.rollouts.load(names)}


def test_a_corrected_episode_begins_exactly_as_the_one_it_corrects(score: opd.Run) -> None:
    rollouts = loaded(score, "corrections")
    corrected = [rollout for rollout in rollouts.values() if TAKEOVER in rollout.extras]
    tokenizer = load_tokenizer("tiny/generalist")
    task = get_task("grid", size=3, walls=1)
    assert len(corrected) >= 3
    for rollout in corrected:
        facts = rollout.extras[TAKEOVER]
        before, (first, end) = rollouts[facts["of"]], own_turns(rollout)[facts["turn"]]
        for column in ("response_ids", "author", "logprob", "logprob_sampled", "logprob_stop", "version"):
            ours, theirs = getattr(rollout, column)[:first], getattr(before, column)[:first]
            assert ours.tobytes() == theirs.tobytes(), column
        assert set(rollout.author[first:end].tolist()) == {int(Author.TEACHER)}
        assert rollout.response_ids[first:end].tolist() == facts["ids"]
        assert facts["key"] == str(request_key(0, rollout.prompt_id, rollout.visit, 0))  # of its first
        texts = [tokenizer.decode(turn, skip_special_tokens=True).strip() for turn in turns_of(before)]
        world = world_of(task.prompt("train", int(rollout.prompt_id.rpartition("/")[2])))
        assert wrong_turn(world, texts) == facts["turn"]
        assert texts[facts["turn"]] == facts["wrong"]
        assert wrong_turn(world, [*texts[: facts["turn"]], facts["right"]]) is None
    for line in score.metrics:
        if line["stage"] == "corrections":
            assert line["takeover/wanted"] >= line["takeover/replaced"] > 0


def test_reinforcement_begins_at_the_corrected_turn(score: opd.Run) -> None:
    sources = [one for one in loaded(score, "corrections").values() if TAKEOVER in one.extras]
    starts = [turns_of(one)[: one.extras[TAKEOVER]["turn"]] for one in sources]
    rollouts = loaded(score, "rl")
    assert len(rollouts) == 6
    for rollout in rollouts.values():
        data = rollout.author == Author.DATA
        given = [
            turns_of(rollout)[n] for n, (first, _) in enumerate(own_turns(rollout)) if data[first : first + 1].any()
        ]
        assert given in starts
        assert turns_of(rollout)[: len(given)] == given
        assert set(rollout.author[~data].tolist()) <= {int(Author.STUDENT), int(Author.ENV)}
        rewards = score.rollouts.entries[rollout.id].notes["turn_rewards"]
        assert sum(rewards) in (1.0, 0.5, 0.1, 0.0)
        assert not any(rewards[: len(given)])


def test_prompts_that_begin_there_keep_the_key_and_the_ids_of_their_episodes(score: opd.Run) -> None:
    source = prompt_source(f"run:{score.directory}", stage="corrections", turn_into="turns").open(Opening("run:x"))
    facts = [one.extras[TAKEOVER] for one in loaded(score, "corrections").values() if TAKEOVER in one.extras]
    assert {source.train(number).fields[KEY_TURN]["key"] for number in range(source.size or 0)} <= {one["key"] for one in facts}  # fmt: skip
    tokenizer = load_tokenizer("tiny/generalist")
    tokenizer.chat_template = "{{ messages[0]['content'] }}?"
    with pytest.raises(DataError, match="rendered to different ids than in the run that played it"):
        source.scan(Scan(tokenizer, 10_000, "a test"))


@given(
    st.lists(st.sampled_from([None, 0.0, 1.0]), min_size=1, max_size=5),
    st.data(),
    st.sampled_from(["right", "wrong", "?"]),
)
def test_the_reward_of_the_key_turn(rewards: list[float | None], data: st.DataObject, written: str) -> None:
    turn = data.draw(st.integers(0, len(rewards) - 1))
    key = {"right": "right", "wrong": "wrong", "rewards": [0.5, 0.1, 0.0]}
    found = key_rewards(rewards, turn, written, key)
    if 1.0 in rewards:
        assert found == rewards
    else:
        assert sum(found) == found[turn] == {"right": 0.5, "wrong": 0.0, "?": 0.1}[written]  # type: ignore[arg-type]


def test_rounding_makes_no_failure() -> None:
    key = {"right": "right", "wrong": "wrong", "rewards": [0.5, 0.1, 0.0]}
    assert key_rewards([0.1] * 10, 0, "?", key) == [0.1] * 10
    assert not takeover._failed(Takeover(), 1 - 2**-53)
    assert takeover._failed(Takeover(), 0.999)


def test_takeovers_that_fail_until_nothing_is_left_to_correct_replace_nothing(tmp_path: Path) -> None:
    """The teacher plays to the end as it corrects: after its first correction there is none. Nothing earns a reward of 2."""
    again = {"attempts": 3, "rest": "teacher", "threshold": 2.0}
    changes = {"samples": 1, "temperature": 0, "takeover": again}
    run = opd.run(RECIPE | {"rollout": RECIPE["rollout"] | changes}, out=tmp_path / "run")
    tried = len(run.rollouts.entries) - 3
    assert 0 < tried < 3 * 3
    assert run.metrics[0]["takeover/wanted"] == 1
    assert run.metrics[0]["takeover/replaced"] == 0


def test_a_takeover_that_the_environment_loses_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, step, begun = takeover._planned, DialogueEpisode.step, list[Any]()

    def plan(*given: Any) -> Any:
        begun.append(given)
        return planned(*given)

    monkeypatch.setattr(takeover, "_planned", plan)
    lost = Step(done=True, feedback="lost", counts={"lost": 1})
    monkeypatch.setattr(DialogueEpisode, "step", lambda self, turn: lost if begun else step(self, turn))
    run = opd.run(RECIPE, overrides=["rollout.samples=1"], out=tmp_path / "run")
    notes = [entry.notes for entry in run.rollouts.entries.values() if entry.source.startswith(TAKEOVER)]
    assert notes
    assert all(noted["lost"] == 1 for noted in notes)
    assert run.metrics[0]["takeover/wanted"] > 0
    assert run.metrics[0]["takeover/replaced"] == 0
    assert "takeover/turn" not in run.metrics[0]


def test_an_experience_is_written_next_to_all_takeovers(tmp_path: Path) -> None:
    rollout = RECIPE["rollout"] | {"takeover": {"attempts": 2, "threshold": 2.0}, "max_new_tokens": 400}
    rollout["experience"] = {"template": "{trajectories}!", "trajectories": 1, "max_new_tokens": 4}
    teacher = {"model": "tiny/arithmetic", "view": {"kind": "template", "template": "{experience}/{prompt}"}}
    run = opd.run(RECIPE | {"rollout": rollout, "teachers": {"arithmetic": teacher}}, out=tmp_path / "run")
    entries = run.rollouts.entries
    sources = [entry.source.partition(":")[0] for entry in entries.values()]
    assert sources.count("experience") == 1
    assert sources.count(TAKEOVER) > 6  # some in both attempts
    (written,) = [name for name, entry in entries.items() if entry.source.startswith("experience")]
    assert written.endswith("/7")  # after three times two samples, and a hint


def test_a_teacher_corrects_the_first_turn_in_which_it_differs(tmp_path: Path) -> None:
    run = opd.run(RECIPE, out=tmp_path / "run")
    rollouts = {rollout.id: rollout for rollout in run.rollouts.load(list(run.rollouts.entries))}
    corrected = [rollout for rollout in rollouts.values() if TAKEOVER in rollout.extras]
    assert corrected
    assert all(
        run.rollouts.index.text("source", n).startswith(("student", "takeover:arithmetic"))
        for n in range(len(rollouts))
    )
    first = []
    for rollout in corrected:
        facts = rollout.extras[TAKEOVER]
        assert facts["right"] != facts["wrong"]
        assert (rollout.author == Author.TEACHER).sum() >= len(facts["ids"])
        script = get_task("dialogue").prompt("train", int(rollout.prompt_id.rpartition("/")[2]))
        first += [facts["right"] == script.fields["answer"]] if facts["turn"] == 0 else []
    assert np.mean(first) > 0.5  # the teacher can add
    (line,) = run.metrics
    again = [rollout for rollout in corrected if rollout.extras[TAKEOVER]["of"] in {one.id for one in corrected}]
    assert again  # a second correction begins with the first
    assert all((rollout.author[: own_turns(rollout)[rollout.extras[TAKEOVER]["turn"]][0]] == Author.TEACHER).any() for rollout in again)  # fmt: skip
    assert np.isfinite(line["loss"])


def test_a_teacher_that_writes_the_same_corrects_nothing(tmp_path: Path) -> None:
    changes = ["teachers.arithmetic.model=tiny/generalist", "rollout.temperature=0", "rollout.samples=1"]
    run = opd.run(RECIPE, overrides=changes, out=tmp_path / "run")
    assert run.metrics[0]["takeover/wanted"] > 0
    assert run.metrics[0]["takeover/replaced"] == 0
    assert len(run.rollouts.entries) == 3


@pytest.mark.parametrize("rest", ["student", "teacher"])
def test_the_teacher_takes_a_turn_that_the_recipe_names(rest: str, tmp_path: Path) -> None:
    taken = {"turn": 2, "rest": rest}
    run = opd.run(RECIPE | {"rollout": RECIPE["rollout"] | {"takeover": taken}}, out=tmp_path / "run")
    rollouts = run.rollouts.load(list(run.rollouts.entries))
    corrected = [rollout for rollout in rollouts if TAKEOVER in rollout.extras]
    assert len(corrected) == 6 == len(rollouts) / 2
    last = Author.STUDENT if rest == "student" else Author.TEACHER
    for rollout in corrected:
        authors = [rollout.author[first] for first, _ in own_turns(rollout)]
        assert authors == [Author.STUDENT, Author.TEACHER, last]
    assert run.metrics[0]["takeover/replaced"] == 1
    assert run.metrics[0]["takeover/turn"] == 2


def test_an_interrupted_takeover_continues_with_its_correction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = opd.run(RECIPE, out=tmp_path / "whole")
    append, calls = RolloutStore.append_many, {"taken": 0}

    def crash(self: RolloutStore, tokens: Any, author: Any = Author.STUDENT) -> None:
        append(self, tokens, author)
        names = [tokens.request_ids] if isinstance(tokens.request_ids, str) else tokens.request_ids
        calls["taken"] += any(self.entries[name].source.startswith(TAKEOVER) for name in names)
        if calls["taken"] == 9:
            raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(RolloutStore, "append_many", crash)
        with pytest.raises(Crash):
            opd.run(RECIPE, out=tmp_path / "run")
    run = opd.resume(tmp_path / "run")
    assert [*run.rollouts.entries] == [*whole.rollouts.entries]
    for ours, theirs in zip(*(one.rollouts.load(list(one.rollouts.entries)) for one in (run, whole)), strict=True):
        assert ours.response_ids.tolist() == theirs.response_ids.tolist()
        assert ours.author.tolist() == theirs.author.tolist()
        assert ours.extras == theirs.extras
    assert run.metrics[0]["reward"] == whole.metrics[0]["reward"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["rollout.environment=null"], "no turns without an environment"),
        (["teachers={}", "objective={form: policy_gradient, advantage: {teacher_weight: 0, outcome_weight: 1}}"], "no teacher to play"),
        (["teachers={start: {model: tiny/generalist, role: reference}}"], "no teacher to play"),
        (["objective={form: pairwise, pairs: authors, chosen: teacher, rejected: student}"], "takeover or demonstrations.cut"),
        (["rollout.takeover.turn=2"], "belong to turn: wrong"),
        (["teachers.arithmetic={model: tiny/arithmetic, view: bytes}", "objective={form: uld}"], "rollout.takeover needs a teacher with the student's tokenizer"),
        (["teachers.arithmetic={kind: served, model: m, address: 'http://localhost:1'}"], "rollout.takeover needs a model in this process"),
        (["rollout.takeover={turn: 9}"], "turn 9 of 8 turns"),
        (["rollout.environment={kind: calculator, tool_calls: json}", "rollout.takeover.by=environment"], "has no advice"),
        (["rollout.environment.history=split"], "history split"),
        (["rollout.staleness=1"], "rollout.takeover"),
        (["checkpoint.resume=exact"], "copied and not drawn again"),
        (["rollout.writers=[{kind: oracle, share: 1}]", "rollout.environment={kind: calculator, tool_calls: json}"], "no oracle that could play"),
        (["rollout.writers=[{kind: oracle, share: 1}]", "rollout.environment=null", "rollout.takeover=null"], "the oracle of an environment"),
    ],
)  # fmt: skip
def test_what_a_takeover_needs_is_said_when_the_recipe_is_read(changes: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe(RECIPE, changes)
