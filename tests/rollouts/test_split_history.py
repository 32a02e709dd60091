"""`history: split`: what a turn reads, how a rollout is divided into turns, and what is rejected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opd
from opd.common.errors import RecipeError
from opd.data.prompts import render_prompt
from opd.loop import producer
from opd.objective.batch import own_turns
from opd.records import TURN_OF as TURN_OF_RECORDS
from opd.records import Author, Finished, Prompt, SampledToken, SampleRequest, Sampling
from opd.rollouts import episodes
from opd.rollouts.environments import Environment, Episode, Step, Turn
from opd.rollouts.episodes import TURN_OF, split_turns
from opd.rollouts.rollouter import answers
from tests.support.chat_templates import OWN, template_tokenizer

PLUGIN = """
import opd
from opd.rollouts import episodes
from opd.rollouts.environments import Environment, Episode, Step


@opd.register
class Asker(Environment):
    name = "asker"

    def open(self, prompt, key):
        return AskerEpisode()


class AskerEpisode(Episode):
    def step(self, turn):
        return Step(messages=[{"role": "user", "content": f"q{turn.number}"}], reward=1.0, done=turn.number == 2)
"""
TEXTS = ["<think>why</think>a", "<think>so</think>b", "<think>oh</think>c"]


class Asker(Environment):
    name = "asker in memory"

    def open(self, prompt: Prompt, key: int) -> Episode:
        return AskerEpisode()


class AskerEpisode(Episode):
    def step(self, turn: Turn) -> Step:
        return Step(messages=[{"role": "user", "content": f"q{turn.number}"}], reward=1.0, done=turn.number == 2)


class Scripted:
    """Says one text per turn, and keeps the requests."""

    def __init__(self, tokenizer: Any, stop: int) -> None:
        self.tokenizer, self.stop, self.requests = tokenizer, stop, list[SampleRequest]()

    def sample(self, requests: Iterable[SampleRequest | None]) -> Iterator[SampledToken | Finished]:
        for request in requests:
            if request is None:
                continue
            text = TEXTS[len(self.requests)]
            self.requests.append(request)
            for token in [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.stop]:
                yield SampledToken(request.id, token, -1.0, -1.0, -2.0, 0)
            yield Finished(request.id, "stop")

    def load(self, weights: Any) -> None: ...


@pytest.mark.parametrize("history", ["keep", "split"])
def test_what_a_turn_reads(history: Any) -> None:
    tokenizer, stop_ids = template_tokenizer(OWN["drops_thinking"])
    environment = Asker(history=history)
    prompt = environment.opened(Prompt(id="p", domain="", messages=({"role": "user", "content": "Hi."},)), {})
    sampler = Scripted(tokenizer, stop_ids[0])
    request = SampleRequest("r", render_prompt(prompt, tokenizer), 7, Sampling(400, stop_ids=stop_ids))
    notes: dict[str, Any] = {}
    (rollout,) = answers(sampler, [request], prompts={"r": prompt}, tokenizer=tokenizer, notes=notes)
    read = [
        tokenizer.decode([*one.prompt_ids, *(one.prefix_ids if one.prefix_ids is not None else ())])
        for one in sampler.requests
    ]
    assert ["why" in text for text in read] == [False, history == "keep", history == "keep"]
    assert all("<|im_start|>assistant\na<|im_end|>" in text for text in read[1:]) == (history == "split")
    assert len({one.key for one in sampler.requests}) == (3 if history == "split" else 1)
    assert [tokenizer.decode(rollout.response_ids[first : end - 1]) for first, end in own_turns(rollout)] == TEXTS
    if history == "keep":
        assert "conversation" not in notes["r"]
        return
    turns = split_turns(rollout, prompt, notes["r"]["conversation"], tokenizer)
    for turn, asked, text in zip(turns, sampler.requests, TEXTS, strict=True):
        assert turn.prompt_ids.tolist() == asked.prompt_ids.tolist()
        assert tokenizer.decode(turn.response_ids[:-1]) == text
        assert (turn.author == Author.STUDENT).all()
        assert np.isfinite(turn.logprob).all()
        assert turn.extras[TURN_OF] == turn.extras[TURN_OF_RECORDS] == turn.episode == rollout.id
    assert len({turn.id for turn in turns}) == 3


def recipe(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    (tmp_path / "asker.py").write_text(PLUGIN)
    return {
        "student": "tiny/generalist", "teachers": {"arithmetic": "tiny/arithmetic"}, "plugins": [str(tmp_path / "asker.py")],
        "prompts": [{"source": "task:addition", "domain": "arithmetic"}],
        "rollout": {"prompts": 2, "samples": 2, "max_new_tokens": 60, "environment": {"kind": "asker", "turn_tokens": 4, "history": "split"}},
        "objective": [{"divergence": "reverse_kl"}, {"form": "policy_gradient", "advantage": {"outcome_weight": 1}}],
        "train": {"steps": 2, "lr": 1e-3}, "eval": {"prompts": 0}, "log": {"start_table": False}, "device": "cpu",
    } | changes  # fmt: skip


def test_a_run_trains_on_turns(tmp_path: Path) -> None:
    run = opd.run(recipe(tmp_path), out=tmp_path / "run")
    assert len(run.rollouts.entries) == 8  # episodes; their turns are not stored again
    assert all("conversation" in entry.notes for entry in run.rollouts.entries.values())
    assert all(line["reward"] == 3.0 for line in run.metrics)
    assert all(np.isfinite(line["loss"]) for line in run.metrics)


def test_replayed_turns_read_what_they_read_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[str, list[int]] = {}
    divided = producer.split_turns

    def noting(*given: Any) -> Any:
        turns = divided(*given)
        read.update({turn.id: turn.prompt_ids.tolist() for turn in turns})
        return turns

    monkeypatch.setattr(producer, "split_turns", noting)
    plan = recipe(tmp_path)
    plan["rollout"] = {**plan["rollout"], "writers": [{"kind": "replay", "share": 1.0}]}
    opd.run(plan, out=tmp_path / "run")
    again = [name for name in read if "/replay-2/" in name]
    assert any(name.endswith("/turn1") for name in again)
    assert all(read[name] == read[name.replace("/replay-2", "")] for name in again)


def test_an_interrupted_run_continues_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed when some episodes of the first step are in later turns."""
    whole = opd.run(recipe(tmp_path), out=tmp_path / "whole")
    original, ended = episodes.Playing.accept, 0

    def crash(self: Any, *given: Any) -> Any:
        nonlocal ended
        ended += 1
        if ended == 7:
            raise KeyboardInterrupt
        return original(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(episodes.Playing, "accept", crash)
        with pytest.raises(KeyboardInterrupt):
            opd.run(recipe(tmp_path), out=tmp_path / "run")
    assert any(
        (rollout.author == Author.ENV).any()
        for rollout in opd.Run(tmp_path / "run").rollouts.partial(list(opd.Run(tmp_path / "run").rollouts.entries))
    )
    run = opd.resume(tmp_path / "run")
    for name in whole.rollouts.entries:
        (one,), (other,) = whole.rollouts.load([name]), run.rollouts.load([name])
        assert one.response_ids.tolist() == other.response_ids.tolist()
        assert one.author.tolist() == other.author.tolist()
        assert whole.rollouts.entries[name].notes == run.rollouts.entries[name].notes
    assert [line["loss"] for line in run.metrics] == pytest.approx([line["loss"] for line in whole.metrics], rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective": [{"form": "pairwise"}]}, "pairs are made of whole rollouts"),
        ({"objective": [{"gate": "keep"}]}, "gate keep .* chooses among whole rollouts"),
        ({"train": {"steps": 1, "learn": False}}, "scores are kept for whole rollouts"),
        (
            {
                "teachers": {
                    "arithmetic": {"model": "tiny/arithmetic", "view": {"kind": "instruction", "instruction": "Think."}}
                }
            },
            "for a prompt's first turn only",
        ),
    ],
)
def test_what_needs_whole_rollouts_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    from opd.recipe import load_recipe

    with pytest.raises(RecipeError, match=words):
        load_recipe(recipe(tmp_path, **changes))
