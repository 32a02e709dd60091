"""Episodes of several turns: who wrote which token, rewards of turns, evaluation, interruption; and several writers per prompt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opd
from opd.common.errors import DataError, RecipeError, TrainingError
from opd.engines.kinds import BuiltInSampler
from opd.engines.requests import request_key
from opd.models import load_model
from opd.recipe import load_recipe
from opd.records import Author, Prompt, SampleRequest, Sampling
from opd.rollouts.environments import Environment, Episode, Step, Turn
from opd.rollouts.episodes import Dialogues, Playing, TurnSource
from opd.rollouts.rollouter import MemorySink, answers
from opd.runner.plan import make_plan

PLUGIN = '''
"""A guessing game: the student answers until it is right."""

import opd
from opd.rollouts.environments import Environment, Episode, Step


@opd.register
class Guess(Environment):
    name = "guess"
    reply: str = "no"

    def open(self, prompt, key, tokenizer):
        return GuessEpisode(self, prompt.fields["answer"], tokenizer)


class GuessEpisode(Episode):
    def __init__(self, settings, wanted, tokenizer):
        self.settings, self.wanted, self.tokenizer = settings, wanted, tokenizer

    def step(self, turn):
        right = turn.text == self.wanted
        ids = self.tokenizer.encode(f"{self.settings.reply}{turn.number}", add_special_tokens=False)
        return Step(ids, reward=float(right) - 0.25 * turn.number, done=right, feedback=f"turn {turn.number}")
'''
MORE = """

from opd.engines.kinds import SamplerKind


@opd.register
class GuessOutside(Guess):
    name = "guess_outside"
    effects = "outside"


@opd.register
class AtOnce(SamplerKind):
    name = "at_once"

    def open(self, model, max_length, *, merge_stop, partner=None):
        raise NotImplementedError
"""
RECIPE: dict[str, Any] = {
    "student": "tiny/generalist",
    "teachers": {"arithmetic": "tiny/arithmetic"},
    "prompts": [{"source": "task:addition", "domain": "arithmetic"}],
    "rollout": {
        "prompts": 4, "samples": 2, "max_new_tokens": 24, "environment": {"kind": "guess", "turns": 3, "turn_tokens": 4},
    },
    "objective": [{"divergence": "reverse_kl"}, {"form": "policy_gradient", "advantage": {"outcome_weight": 1}}],
    "train": {"steps": 3, "lr": 1e-3},
    "eval": {"prompts": 4, "teachers": False},
    "log": {"start_table": False},
    "device": "cpu",
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "guess.py").write_text(PLUGIN)
    return RECIPE | {"plugins": [str(tmp_path / "guess.py")]}


def changed(recipe: dict[str, Any], **rollout: Any) -> dict[str, Any]:
    return recipe | {"rollout": recipe["rollout"] | rollout}


def test_a_multi_turn_environment_in_one_plugin_file(recipe: dict[str, Any], tmp_path: Path) -> None:
    run = opd.run(recipe, out=tmp_path / "run")
    rollouts = run.rollouts.load(list(run.rollouts.entries))
    assert len(rollouts) == 24
    several = [rollout for rollout in rollouts if (rollout.author == Author.ENV).any()]
    assert several
    for rollout in rollouts:
        env = rollout.author == Author.ENV
        assert rollout.stop in ("env", "length")
        assert rollout.response_ids.size <= 24
        assert np.isnan(rollout.logprob[env]).all()
        assert not np.isnan(rollout.logprob[~env]).any()
        assert not env[0]
        assert not env[-1]
        turns = np.flatnonzero(np.diff(env.astype(int)) == -1).size + 1
        notes = run.rollouts.entries[rollout.id].notes
        assert len(notes["turn_rewards"]) == turns <= 3
        assert notes["reward"] == pytest.approx(sum(notes["turn_rewards"]))
        assert notes["feedback"].splitlines() == [f"turn {number}" for number in range(turns)]
    assert all(line["reward"] is not None for line in run.metrics)
    (stage,) = run.summary["stages"]
    assert stage["evals"]["arithmetic"]["n"] == 4


def interrupted(monkeypatch: pytest.MonkeyPatch, recipe: dict[str, Any], out: Path) -> None:
    """A run that is killed when some episodes of its first step are in their second turn."""
    original, ended = Playing.accept, 0

    def crash(self: Any, *given: Any) -> Any:
        nonlocal ended
        ended += 1
        if ended == 14:
            raise KeyboardInterrupt
        return original(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Playing, "accept", crash)
        with pytest.raises(KeyboardInterrupt):
            opd.run(recipe, out=out)


def test_an_interrupted_episode_is_played_again(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe | {"eval": {"prompts": 0}}
    whole = opd.run(recipe, out=tmp_path / "whole")
    interrupted(monkeypatch, recipe, tmp_path / "run")
    before = opd.Run(tmp_path / "run").rollouts
    begun = {name: before.partial([name])[0] for name, entry in before.entries.items() if entry.stop is None}
    assert any((rollout.author == Author.ENV).any() for rollout in begun.values())
    run = opd.resume(tmp_path / "run")
    for name in list(whole.rollouts.entries)[:8]:  # of the first step, which has the same weights
        ours, theirs = (one.rollouts.load([name])[0] for one in (run, whole))
        assert ours.response_ids.tolist() == theirs.response_ids.tolist()
        assert ours.author.tolist() == theirs.author.tolist()
        notes = [one.rollouts.entries[name].notes for one in (run, whole)]
        assert notes[0]["turn_rewards"] == notes[1]["turn_rewards"]
    assert run.metrics[0]["loss"] == pytest.approx(whole.metrics[0]["loss"], rel=1e-4)


def test_tokens_of_environments_have_no_version_to_mix(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = changed(recipe, mixed_versions="refuse") | {"eval": {"prompts": 0}, "train": {"steps": 1, "lr": 1e-3}}
    interrupted(monkeypatch, recipe, tmp_path / "run")
    assert len(opd.resume(tmp_path / "run").metrics) == 1


def test_an_environment_that_changes_its_mind_is_noticed(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, recipe | {"eval": {"prompts": 0}}, tmp_path / "run")
    step = Playing.answer

    def another(self: Any, turn: Any) -> Step:
        found = step(self, turn)
        return Step([*found.ids, 1], found.reward, found.done)

    monkeypatch.setattr(Playing, "answer", another)
    with pytest.raises(TrainingError, match=r"answered turn .* differently than before the interruption"):
        opd.resume(tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("rollout.environment.turn_tokens=25", "counts all turns"),
        ("rollout.environment.turns=0", "greater than or equal to 1"),
        ("rollout.environment.kind=gues", "did you mean 'guess'"),
        ("rollout.teacher_mix=0.2", "one turn"),
        ("sampler.engine=at_once", "takes all requests of a batch at once"),
        ("checkpoint.resume=exact rollout.environment.kind=guess_outside", "an interrupted call is not repeated"),
    ],
)
def test_what_environments_cannot_do_is_said_when_the_recipe_is_read(
    recipe: dict[str, Any], change: str, words: str
) -> None:
    with open(recipe["plugins"][0], "a") as file:
        file.write(MORE)
    with pytest.raises(RecipeError, match=words):
        load_recipe(recipe, change.split())


FLAKY = """

class Flaky(Environment):
    name = "flaky"

    def open(self, prompt, key):
        if key % 3:
            raise OSError("no room")
        return FlakyEpisode()


class FlakyEpisode(Episode):
    def step(self, turn):
        return Step(messages=[{"role": "user", "content": "go on"}], reward=1.0)


opd.register(Flaky)
"""


def test_episodes_that_cannot_be_opened_do_not_end_the_run(recipe: dict[str, Any], tmp_path: Path) -> None:
    with open(recipe["plugins"][0], "a") as file:
        file.write(FLAKY)
    spec = changed(recipe, environment={"kind": "flaky", "turns": 2, "turn_tokens": 4})
    run = opd.run(spec | {"train": {"steps": 2, "lr": 1e-3}}, out=tmp_path / "run")
    entries = list(run.rollouts.entries.values())
    lost = [entry for entry in entries if entry.length == 0]
    assert 0 < len(lost) < len(entries) == 16
    assert all("no room" in entry.notes["feedback"] and entry.notes["reward"] is None for entry in lost)
    assert sum(line["env/lost"] for line in run.metrics) == len(lost)
    assert all(np.isfinite(line["loss"]) for line in run.metrics)


DARK = """
from pathlib import Path


class Dark(Environment):
    name = "dark"
    every: int
    switch: str

    def open(self, prompt, key):
        number = int(prompt.id.rpartition("/")[2])
        return DarkEpisode(Path(self.switch).exists() and number % self.every == 0)


class DarkEpisode(Episode):
    def __init__(self, dark):
        self.dark = dark

    def reset(self):
        if self.dark:
            raise LookupError("no light")
        return [{"role": "user", "content": "add 1+2"}]

    def step(self, turn):
        return Step(reward=1.0, done=True)


opd.register(Dark)
"""


@pytest.mark.parametrize("every", [3, 1])
def test_a_prompt_whose_environment_does_not_begin_is_skipped(
    recipe: dict[str, Any], tmp_path: Path, every: int
) -> None:
    with open(recipe["plugins"][0], "a") as file:
        file.write(DARK)
    dark = {"kind": "dark", "every": every, "switch": str(tmp_path / "off"), "turns": 1}
    spec = recipe | {"prompts": "episodes:dark", "train": {"steps": 3, "lr": 1e-3}, "eval": {"prompts": 0}}

    def run() -> opd.Run:
        return opd.run(
            changed(spec, environment=dark), out=tmp_path / "run", on_step=lambda *_: (tmp_path / "off").touch()
        )

    if every == 1:  # none begins any more
        with pytest.raises(DataError, match="no light"):
            run()
        return
    metrics = run().metrics
    assert [line["env/lost"] for line in metrics] == [0, 0, 0]
    assert metrics[-1]["prompts/skipped"] >= 2
    assert "no light" in (tmp_path / "run" / "log.txt").read_text()


def test_effects_of_evaluation_are_announced(recipe: dict[str, Any]) -> None:
    with open(recipe["plugins"][0], "a") as file:
        file.write(MORE)

    def notes(*changes: str) -> str:
        return " ".join(make_plan(load_recipe(recipe, list(changes)))[0].notes)

    assert "evaluation also plays environments with effects outside" in notes("rollout.environment.kind=guess_outside")
    assert "outside" not in notes("rollout.environment.kind=guess_outside", "eval.prompts=0") + notes()


def test_an_experience_is_made_from_whole_episodes(recipe: dict[str, Any], tmp_path: Path) -> None:
    """The model that writes it reads the turns, what the environment said, and what they earned."""
    view = {"kind": "template", "template": "{experience} {prompt}"}
    experience = {"template": "{trajectories}", "trajectories": 2, "max_new_tokens": 6}
    spec = changed(recipe, experience=experience) | {"train": {"steps": 1, "lr": 1e-3}, "eval": {"prompts": 0}}
    spec["teachers"] = {"arithmetic": {"kind": "self", "view": view}}
    run = opd.run(spec, out=tmp_path / "run")
    (name,) = [name for name, entry in run.rollouts.entries.items() if entry.source.startswith("experience")]
    (written,) = run.rollouts.load([name])
    read = load_model("tiny/generalist").tokenizer.decode(written.prompt_ids.tolist(), skip_special_tokens=True)
    assert "environment: no0\nstudent: " in read
    assert read.count("(reward ") == 2
    assert set(written.author.tolist()) == {int(Author.STUDENT)}  # nobody plays it


class Echo(Environment):
    name = "echo"

    def open(self, prompt: Prompt, key: int, tokenizer: Any) -> Episode:
        return EchoEpisode()


class EchoEpisode(Episode):
    """Says back what the student said; the answer to a turn may be its own stop id, which ends nothing."""

    def step(self, turn: Turn) -> Step:
        return Step(turn.ids[::-1], reward=float(turn.ids.size), done=turn.number == 3)


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_turns_are_the_same_alone_and_in_a_crowd(slots: int) -> None:
    model = load_model("tiny/generalist")
    sampling = Sampling(40, stop_ids=model.stop_ids)
    echo = Echo(turns=4, turn_tokens=5)
    prompts = {f"p{number}": Prompt(f"p{number}", "d", text=f"add {number}+1", environment=echo) for number in range(6)}
    requests = [
        SampleRequest(name, np.array(model.tokenizer.encode(prompt.text), np.int32), request_key(0, name, 0, 0), sampling)
        for name, prompt in prompts.items()
    ]  # fmt: skip
    play: dict[str, Any] = {"prompts": prompts, "tokenizer": model.tokenizer}
    sampler = BuiltInSampler(slots=slots).open(model.inference_copy(), 64, merge_stop=model.stop_ids)
    together = answers(sampler, requests, **play)
    alone = [answers(sampler, [request], **play)[0] for request in requests]
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.response_ids.tolist() == theirs.response_ids.tolist()
        assert ours.author.tolist() == theirs.author.tolist()
        assert np.allclose(ours.logprob, theirs.logprob, atol=1e-5, equal_nan=True)
        assert (ours.author == Author.ENV).any()


class Recording(Environment):
    """Keeps why each turn ended."""

    name = "recording"

    def open(self, prompt: Prompt, key: int, tokenizer: Any) -> Episode:
        return RecordingEpisode(STOPS)


class RecordingEpisode(Episode):
    def __init__(self, stops: list[str]) -> None:
        self.stops = stops

    def step(self, turn: Turn) -> Step:
        self.stops.append(turn.stop)
        return Step([5, 6])


STOPS: list[str] = []


def test_a_replayed_turn_ends_for_the_reason_it_had() -> None:
    """Also with stop strings, which no id shows."""
    model = load_model("tiny/generalist")
    prompt = Prompt("p", "d", text="add 12+13")
    ids = np.array(model.tokenizer.encode(prompt.text), np.int32)
    sampling = Sampling(24, stop_ids=model.stop_ids, stop_strings=("3", "7"))
    request = SampleRequest("p", ids, request_key(3, "p", 0, 0), sampling)
    prompt = replace(prompt, environment=Recording(turns=5, turn_tokens=2))
    sampler = BuiltInSampler(slots=2).open(model.inference_copy(), 64, merge_stop=model.stop_ids)
    STOPS.clear()
    (played,) = answers(sampler, [request], prompts={"p": prompt}, tokenizer=model.tokenizer)
    assert len(first := list(STOPS)) == 5
    assert set(first) == {"stop", "length"}
    STOPS.clear()
    dialogue = Dialogues(model.tokenizer, model.stop_ids).of(prompt)
    again = TurnSource([request], {"p": Playing(dialogue, request, prompt, played)}, MemorySink([request]))
    last = next(again)
    assert last is not None
    assert last.prefix_ids is not None
    assert last.prefix_ids.tolist() == played.response_ids.tolist()
    assert first[:-1] == STOPS  # the last turn has not been answered


def test_a_source_that_has_nothing_yet_says_so() -> None:
    request = SampleRequest("a", np.array([1]), 0, Sampling(40))
    prompt = Prompt("a", "d", text="add 12+13", environment=Echo(turns=2))
    model = load_model("tiny/generalist")
    played = Playing(Dialogues(model.tokenizer, model.stop_ids).of(prompt), request, prompt)
    source = TurnSource([request], {"a": played}, MemorySink([request]))
    assert next(source).id == "a"  # type: ignore[union-attr]
    assert next(source) is None
    played.ids = [5, 6]
    source.ended("a", "stop")
    following = next(source)
    assert following is not None
    assert following.start == 4
    played.ids += [7]
    source.ended("a", "stop")
    with pytest.raises(StopIteration):
        next(source)


# Several writers per prompt


def rows(tmp_path: Path) -> str:
    path = tmp_path / "sums.jsonl"
    lines = [{"prompt": f"add {n}+{n}", "answer": str(2 * n), "completion": str(2 * n), "domain": "arithmetic"} for n in range(10, 50)]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_group_of_the_student_and_one_of_the_data(tmp_path: Path) -> None:
    spec = RECIPE | {
        "prompts": [{"source": rows(tmp_path)}],
        "rollout": {"prompts": 3, "samples": 8, "max_new_tokens": 8, "writers": [{"kind": "data", "samples": 1}]},
        "objective": [
            {"form": "policy_gradient", "advantage": {"outcome_weight": 1}},
            {"form": "cross_entropy", "on": ["data"], "coefficient": 0.1},
        ],
        "rewards": "exact",
    }
    run = opd.run(spec, out=tmp_path / "run")
    rollouts = run.rollouts.load(list(run.rollouts.entries))
    groups: dict[str, list[str]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout.source)
        author = Author.DATA if rollout.source == "data" else Author.STUDENT
        assert (rollout.author == author).all()
    assert all(sources == ["student"] * 7 + ["data"] for sources in groups.values())
    plain = RECIPE | {"prompts": spec["prompts"], "rollout": spec["rollout"] | {"writers": []}, "rewards": "exact"}
    alone = opd.run(plain, out=tmp_path / "alone", overrides=["train.steps=1"])
    for entry in alone.rollouts.load(list(alone.rollouts.entries)):
        if entry.sample < 7:  # what the student draws does not depend on who else writes
            (same,) = run.rollouts.load([entry.id])
            assert same.response_ids.tolist() == entry.response_ids.tolist()


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ({"writers": [{"kind": "data", "samples": 9}]}, "9 samples of every group"),
        ({"writers": [{"kind": "data", "samples": 1, "share": 0.5}]}, "Set one of them"),
        ({"writers": [{"kind": "data"}]}, "has no share of the prompts"),
        ({"writers": [{"kind": "teacher", "samples": 1}]}, "trains on teacher tokens"),
    ],
)
def test_wrong_numbers_of_samples(tmp_path: Path, rollout: dict[str, Any], words: str) -> None:
    spec = RECIPE | {
        "prompts": [{"source": rows(tmp_path)}], "rollout": {"prompts": 3, "samples": 8, "max_new_tokens": 8} | rollout,
        "objective": {"form": "policy_gradient"},
    }  # fmt: skip
    with pytest.raises(RecipeError, match=words):
        load_recipe(spec)


def test_pairs_need_two_writers_in_one_group(tmp_path: Path) -> None:
    spec = RECIPE | {
        "prompts": [{"source": rows(tmp_path)}],
        "teachers": {"base": {"model": "tiny/sorting", "role": "reference"}},
        "objective": {"form": "pairwise", "on": ["student", "data"]},
        "rewards": "exact",
    }
    alone = {"prompts": 3, "samples": 4, "max_new_tokens": 8, "data_share": 0.5}
    with pytest.raises(RecipeError, match="no pair has two authors"):
        load_recipe(spec | {"rollout": alone})
    mixed = {"prompts": 3, "samples": 4, "max_new_tokens": 8, "writers": [{"kind": "data", "samples": 1}]}
    run = opd.run(spec | {"rollout": mixed}, out=tmp_path / "run")
    assert sum(line["pairs/0:pairwise"] for line in run.metrics) > 0


def test_pairs_of_the_dataset_need_no_sampling(tmp_path: Path) -> None:
    lines = [{"prompt": f"add {n}+{n}", "chosen": str(2 * n), "rejected": str(3 * n)} for n in range(10, 30)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    writers = [{"kind": "data", "samples": 1}, {"kind": "rejected", "samples": 1}]
    spec = {
        "student": "tiny/generalist", "teachers": {"start": {"kind": "self", "role": "reference"}}, "device": "cpu",
        "prompts": [{"source": str(path)}], "rollout": {"prompts": 4, "samples": 2, "max_new_tokens": 8, "writers": writers},
        "objective": {"form": "pairwise", "pairs": "authors", "chosen": "data", "rejected": "rejected"}, "eval": {"prompts": 0},
        "train": {"steps": 3, "lr": 1e-3}, "log": {"start_table": False},
    }  # fmt: skip
    run = opd.run(spec, out=tmp_path / "run")
    found = run.rollouts.load(list(run.rollouts.entries))
    assert [(rollout.source, int(rollout.author[0])) for rollout in found] == [
        ("data", Author.DATA),
        ("rejected", Author.REJECTED),
    ] * 12
    assert [line["pairs/0:pairwise"] for line in run.metrics] == [4, 4, 4]
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
