"""Routing by domain, and a local teacher's scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import opd
from opd.common.errors import RecipeError
from opd.models.attention import Packed
from opd.records import SignalNeed
from opd.teachers.kinds import by_teacher, routes
from opd.teachers.scoring import LocalTeacher
from opd.teachers.views import response_after
from tests.support.helpers import save_tiny, tiny_model
from tests.support.rollouts import rollout
from tests.support.teachers import spec


def test_routes_by_name_list_and_alone() -> None:
    assert routes({"a": spec(), "b": spec()}, ["a", "b"], ["teacher"]) == {"teacher": {"a": "a", "b": "b"}}
    assert routes({"big": spec()}, ["a", "b"], ["teacher"]) == {"teacher": {"a": "big", "b": "big"}}
    assert routes({"x": spec(domains=["a", "b"]), "c": spec()}, ["a", "b", "c"], ["teacher"]) == {
        "teacher": {"a": "x", "b": "x", "c": "c"}
    }
    both = routes({"a": spec(), "start": spec(role="reference")}, ["a"], ["teacher"])
    assert both == {"teacher": {"a": "a"}, "reference": {"a": "start"}}
    assert routes({}, ["a"], []) == {}


@pytest.mark.parametrize(
    ("teachers", "domains", "words"),
    [
        ({"a": spec(), "b": spec()}, ["a", "c"], "'c' has no teacher"),
        ({"a": spec(), "b": spec()}, ["a"], "'b' scores no domain"),
        ({"a": spec(domains=["d"]), "b": spec(domains=["d"])}, ["d"], "several teachers"),
        ({"a": spec(domains=["x"])}, ["d"], "'d' has no teacher"),
        ({}, ["d"], "no teacher has it"),
        ({"a": spec(role="reference")}, ["a"], "no teacher has it"),
    ],
)
def test_gaps_and_idle_teachers_are_errors(teachers: dict, domains: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        routes(teachers, domains, ["teacher"])


def test_grouping_by_teacher_knows_every_domain() -> None:
    rollouts = [rollout("1", [1], [2], "a"), rollout("2", [1], [2], "b"), rollout("3", [1], [2], "a")]
    groups = by_teacher(rollouts, {"a": "x", "b": "y"})
    assert {name: [r.id for r in share] for name, share in groups.items()} == {"x": ["1", "3"], "y": ["2"]}
    with pytest.raises(RecipeError, match="'b'"):
        by_teacher(rollouts, {"a": "x"})


def test_scores_match_one_sequence_at_a_time_whatever_the_batch() -> None:
    model = tiny_model("llama")
    rollouts = [rollout("1", [5, 6, 7], [8, 9, 1]), rollout("2", [10], [11, 12]), rollout("3", [3] * 20, [4])]
    for budget in (1, 12, 1000):
        teacher = LocalTeacher("t", "teacher", model, budget, stop_ids=(1, 3))
        for r, signal in zip(rollouts, teacher.score(rollouts, SignalNeed("logprobs_at")), strict=True):
            ids = torch.from_numpy(np.concatenate([r.prompt_ids, r.response_ids]).astype(np.int64))
            with torch.no_grad():
                logprobs = model.project(model.hidden(ids, Packed.of([len(ids)]))).logits().log_softmax(-1)
            for t, token in enumerate(r.response_ids):  # position t - 1 predicts token t; stop ids are one event
                row = logprobs[len(r.prompt_ids) + t - 1]
                expected = row[[1, 3]].logsumexp(-1) if token in (1, 3) else row[token]
                assert signal.values[t] == pytest.approx(float(expected), abs=1e-5)
        hidden = teacher.score(rollouts, SignalNeed("hidden"))
        assert [tuple(signal.values.shape) for signal in hidden] == [(3, 32), (2, 32), (1, 32)]


def test_what_a_teacher_does_not_offer_is_rejected() -> None:
    teacher = LocalTeacher("t", "teacher", tiny_model(), 100, (1,))
    with pytest.raises(ValueError, match="text"):
        teacher.score([], SignalNeed("text"))


def test_hidden_states_from_the_store_and_fresh_ones_come_together() -> None:
    """The former lie on the CPU, the latter on the teacher's device."""
    teacher = LocalTeacher("t", "teacher", tiny_model("llama"), 99, (1,))
    rollouts = [rollout("stored", [5, 6], [8, 9, 1]), rollout("fresh", [10], [11, 12])]
    stored, fresh = teacher.score(rollouts, SignalNeed("hidden"))
    teacher.device = torch.device("meta")
    kept = {"stored": stored, "fresh": replace(fresh, values=fresh.values.to("meta"))}
    found = teacher.score(rollouts, SignalNeed("hidden", hidden=kept))
    assert [(signal.values.device.type, tuple(signal.values.shape)) for signal in found] == [
        ("meta", (3, 32)),
        ("meta", (2, 32)),
    ]


def test_a_teacher_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where terms need hidden states and log-probs, the latter follow from the former, bit for bit."""
    passes: list[int] = []
    original = LocalTeacher.hidden

    def counted(self: LocalTeacher, page: Any) -> torch.Tensor:
        passes.append(len(page.counts))
        return original(self, page)

    monkeypatch.setattr(LocalTeacher, "hidden", counted)
    teacher = LocalTeacher("t", "teacher", tiny_model("llama"), 12, (1,))
    rollouts = [rollout(str(number), list(range(2, 3 + number)), list(range(20, 28 - number))) for number in range(5)]
    seen = [response_after(item.prompt_ids, item, skip=number == 2) for number, item in enumerate(rollouts)]
    given = teacher.score(rollouts, SignalNeed("hidden"), seen)
    once = len(passes)
    need = SignalNeed("logprobs_at", hidden={item.id: signal for item, signal in zip(rollouts, given, strict=True)})
    derived = teacher.score(rollouts, need, seen)
    assert len(passes) == once
    for one, other in zip(derived, teacher.score(rollouts, SignalNeed("logprobs_at"), seen), strict=True):
        np.testing.assert_array_equal(one.values, other.values)
    passes.clear()
    recipe = {
        "student": save_tiny(tmp_path / "student"), "teachers": save_tiny(tmp_path / "teacher", seed=1), "prompts": "task:addition",
        "rollout": {"prompts": 4, "max_new_tokens": 4}, "sampler": {"slots": 4}, "train": {"steps": 2}, "eval": {"prompts": 0},
        "objective": [{"form": "k2"}, {"form": "direct"}], "device": "cpu", "log": {"start_table": False},
    }  # fmt: skip
    opd.run(recipe, out=tmp_path / "run")
    assert passes == [4, 4]
