"""Writers whose shares move, and answers that are trained on again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opd
from opd.common.errors import RecipeError
from opd.recipe import load_recipe
from opd.rollouts.pace import LineGrowth, LineSchedule, LossSchedule, Pace
from opd.rollouts.replay import EarlierRun
from opd.rollouts.settings import Rollouts
from tests.support.crash import same_run
from tests.support.helpers import save_tiny
from tests.support.interrupted import SAMPLED, SCORED, Crash, small, strike
from tests.support.ranks import Job, differences, together

DISTILLM = {
    "data_share": 1.0,
    "writers": [{"kind": "replay"}],
    "share_schedule": {"kind": "validation_loss", "start": 0.5, "margin": 0.0},
}
LOSS = {"prompts": 4, "every": 1, "loss": True, "teachers": False}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(root / name, seed=seed) for seed, name in enumerate(("student", "teacher"))}


def published(losses: list[float], start: float, rise: float, margin: float) -> float:
    """DistiLLM's finetune.py: the threshold rises at an evaluation that is worse, by the margin, than the one that is kept."""
    threshold, kept = start, losses[0]
    for loss in losses[1:]:
        if loss >= kept + margin:
            threshold = min(threshold + rise, 1.0)
            kept = loss
    return threshold


def test_the_students_share_rises_as_published_when_the_validation_loss_rises() -> None:
    draw = random.Random(0)
    for _ in range(50):
        losses = [draw.uniform(0, 2) for _ in range(draw.randint(1, 12))]
        start, rise, margin = draw.choice([0, 0.2]), draw.choice([0.1, 0.3]), draw.choice([0.0, 0.1, 0.5])
        share = published(losses, start, rise, margin)
        schedule = LossSchedule(start=start, rise=rise, margin=margin)
        step, steps = draw.randint(1, 40), 40
        found = schedule.at({"data_share": 0.7, "writers.0": 0.3, "writers.1": 0}, ["writers.1"], step, steps, losses)
        assert found == pytest.approx(
            {"data_share": 0.7 * (1 - share), "writers.0": 0.3 * (1 - share), "writers.1": share * step / steps}
        )  # what remains is answered anew: share * (1 - step / steps)


def test_a_line_moves_from_the_recipes_share_to_its_end_and_stays() -> None:
    line = LineSchedule(to={"data_share": 0.0, "teacher_share": 0.5}, over=5)
    shares = {"data_share": 0.8, "teacher_share": 0.0, "writers.0": 0.2}
    found = [line.at(shares, [], step, 100, []) for step in (1, 3, 5, 60)]
    assert [one["data_share"] for one in found] == pytest.approx([0.8, 0.4, 0, 0])
    assert [one["teacher_share"] for one in found] == pytest.approx([0, 0.25, 0.5, 0.5])
    assert {one["writers.0"] for one in found} == {0.2}
    assert line.ever(shares, []) == {"data_share", "teacher_share", "writers.0", "student"}
    assert Pace(Rollouts(data_share=1, share_schedule={"kind": "line", "to": {"data_share": 0}}), 11).shares(6) == {
        "data_share": 0.5
    }


@pytest.mark.parametrize(
    ("rollout", "more", "why"),
    [
        ({"share_schedule": {"kind": "line", "to": {"dat_share": 1}}}, {}, "names 'dat_share'"),
        ({"teacher_share": 0.7, "share_schedule": {"kind": "line", "to": {"data_share": 0.5}}}, {}, "sum of 1.2"),
        ({"share_schedule": {"kind": "line", "to": {"data_share": 0}}}, {}, "ends where it begins"),
        ({"share_schedule": "validation_loss"}, {"eval": LOSS}, "add up to 0"),
        ({"data_share": 1, "share_schedule": "validation_loss"}, {"eval": {"every": 1}}, "eval.loss: true"),
        (DISTILLM | {"staleness": 1}, {"eval": LOSS}, "before the loss is known"),
        ({"writers": [{"kind": "replay"}]}, {}, "no share"),
        ({"samples": 2, "writers": [{"kind": "replay", "samples": 1}]}, {}, "repeats whole groups"),
        ({"writers": [{"kind": "replay", "share": 0.1}] * 2}, {}, "one buffer"),
        ({"writers": [{"kind": "replay", "share": 0.1, "least": 9, "capacity": 3}]}, {}, "never be ready"),
        ({"writers": [{"kind": "replay", "share": 0.1}], "staleness": 1}, {}, "how fast sampling is"),
        ({"writers": [{"kind": "replay", "share": 0.1}]}, {"store": {"retain": 1}, "checkpoint": {"every": 1}}, "deletes them"),
        ({}, {"eval": {"prompts": 0, "loss": True}}, "eval.prompts is 0"),
        ({"length_schedule": {"kind": "line", "start": 128}}, {}, "must be less than rollout.max_new_tokens"),
        ({"length_schedule": {"kind": "matched", "start": 9}, "staleness": 1}, {}, "before the distance is known"),
        ({"samples": 2, "length_schedule": {"kind": "line", "start": 9}},
         {"objective": {"form": "policy_gradient", "advantage": {"outcome_weight": 1, "overlong": "mask"}}}, "cut off on purpose"),
        ({"length_schedule": {"kind": "line", "start": 9}}, {"objective": {"gate": "finished"}}, "gate finished would close"),
        ({"length_schedule": {"kind": "line", "start": 9}, "environment": {"kind": "dialogue", "turn_tokens": 8}},
         {"prompts": [{"source": "task:dialogue", "domain": "arithmetic"}]}, "counts the tokens of all turns"),
        ({"samples": 2, "writers": [{"kind": "data", "samples": 1}],
          "share_schedule": {"kind": "line", "to": {"writers.0": 0.5}}}, {}, "has samples of every group"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_rejected(rollout: dict[str, Any], more: dict[str, Any], why: str) -> None:
    base = {"student": "x", "teachers": {"a": "y"}, "prompts": [{"source": "task:addition", "domain": "a"}]}
    with pytest.raises(RecipeError, match=why):
        load_recipe({**base, "rollout": rollout, **more})


def test_replayed_answers_keep_their_tokens_and_come_from_trained_steps(models: dict[str, str], tmp_path: Path) -> None:
    rollout = {
        "prompts": 6,
        "samples": 2,
        "max_new_tokens": 6,
        "writers": [{"kind": "replay", "share": 0.5, "capacity": 8}],
    }
    spec = small(models, rollout=rollout, objective={"form": "policy_gradient", "advantage": {"outcome_weight": 1}})
    run = opd.run(spec | {"train": {"steps": 5, "lr": 1e-2}}, out=tmp_path / "run")
    by_id = {item.id: item for item in run.rollouts}
    again = [item for item in by_id.values() if item.source == "replay"]
    assert len(again) >= 6
    order = list(by_id)
    for item in again:
        first_id, _, step = item.id.rpartition("/replay-")
        first = by_id[first_id]
        for name in ("prompt_ids", "response_ids", "author", "logprob", "logprob_sampled", "logprob_stop", "version"):
            assert np.array_equal(getattr(item, name), getattr(first, name), equal_nan=name.startswith("logprob")), name
        assert first.source == "student"
        assert order.index(first_id) < 12 * (int(step) - 1)  # twelve rollouts per step
        assert item.version.max() < int(step) - 1
        assert run.rollouts.entries[item.id].notes["reward"] == run.rollouts.entries[first_id].notes["reward"]
    shares = [line.get("written/replay", 0.0) for line in run.metrics]
    assert shares[0] == 0
    assert 0.2 < np.mean(shares[1:]) < 0.8
    earlier = EarlierRun(tmp_path / "run")  # a later stage reads each answer once
    read = [item.id for item in earlier.store.load_rows(earlier.rows)]
    assert sorted(read) == sorted(item.id for item in by_id.values() if item.source == "student")


@pytest.mark.parametrize("place", [SCORED, pytest.param(SAMPLED, marks=pytest.mark.slow)])
def test_an_interrupted_run_draws_the_same_writers_and_replays(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    spec = small(
        models, rollout={"prompts": 6, "max_new_tokens": 6, **DISTILLM}, eval=LOSS, train={"steps": 5, "lr": 0.1}
    )
    reference = opd.run(spec, out=tmp_path / "reference")
    assert any(line.get("written/replay") for line in reference.metrics)
    strike(monkeypatch, place, 4, Crash)
    with pytest.raises(Crash):
        opd.run(spec, out=tmp_path / "run")
    same_run(opd.resume(tmp_path / "run"), reference)


def test_limits_grow_on_a_line_or_once_the_student_is_close() -> None:
    line = LineGrowth(start=10, over=5)
    assert [line.at(step, 99, 50, {}) for step in (1, 2, 3, 5, 9)] == [10, 20, 30, 50, 50]
    pace = Pace(
        Rollouts(max_new_tokens=20, length_schedule={"kind": "matched", "start": 4, "steps": 2, "factor": 2.5}), 9
    )
    limits = []
    for kl in (0.5, 0.09, 0.05, None, 0.05, 0.2, 0.0, 0.0, 0.0):
        limits.append(pace.limit(1))
        pace.note({"reverse_kl": kl})
        again = Pace(pace.spec, 9)
        again.restore(pace.state())
        assert again.limit(1) == pace.limit(1)
    assert limits == [4, 4, 4, 10, 10, 10, 10, 10, 20]  # 25 is above max_new_tokens


def test_answers_end_at_the_limit_of_their_step_also_after_an_interruption(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth = {"kind": "matched", "start": 2, "below": 9.0, "steps": 2, "factor": 1.5}
    rollout = {"prompts": 4, "max_new_tokens": 8, "data_share": 0.3, "length_schedule": growth}
    spec = small(models, rollout=rollout, train={"steps": 6, "lr": 1e-2}, eval={"prompts": 0})
    reference = opd.run(spec, out=tmp_path / "reference")
    assert [line["limit"] for line in reference.metrics] == [2, 2, 3, 3, 5, 5]
    lengths = [len(item.response_ids) for item in reference.rollouts]
    assert all(length <= limit for length, limit in zip(lengths, np.repeat([2, 2, 3, 3, 5, 5], 4), strict=True))
    strike(monkeypatch, SCORED, 5, Crash)
    with pytest.raises(Crash):
        opd.run(spec, out=tmp_path / "run")
    same_run(opd.resume(tmp_path / "run"), reference)


@pytest.mark.slow
def test_a_matched_limit_reaches_a_score_in_fewer_tokens(tmp_path: Path) -> None:
    """The first words of seven letters' answers teach nearly as much as whole answers, and the limit then grows (Fast OPD)."""
    tokens = {}
    schedules = {"full": None, "matched": {"kind": "matched", "start": 4, "below": 0.35, "steps": 1, "factor": 2}}
    for name, schedule in schedules.items():
        recipe = {
            "student": "tiny/generalist", "teachers": {"spelling": "tiny/spelling"}, "prompts": [{"source": "task:reverse", "domain": "spelling"}],
            "rollout": {"prompts": 32, "max_new_tokens": 16, "length_schedule": schedule}, "train": {"steps": 10, "lr": 1e-3, "warmup": 5},
            "eval": {"prompts": 200, "every": 2, "teachers": False, "early_stop": {"kind": "target", "value": 0.9}}, "log": {"start_table": False}, "device": "cpu", "threads": 1,
        }  # fmt: skip
        run, spent = opd.run(recipe, out=tmp_path / name), 0
        assert run.summary["stages"][0]["evals"]["spelling"]["before"] < 0.7
        for line in run.metrics:
            spent += line["tokens"]
            if line.get("eval/spelling", 0) >= 0.9:
                tokens.setdefault(name, spent)
    assert tokens.keys() == schedules.keys()  # both reached it
    assert tokens["matched"] < 0.85 * tokens["full"]


@pytest.mark.scale
def test_two_ranks_draw_what_one_draws(tmp_path: Path) -> None:
    changes = [
        "train.steps=4", "eval.prompts=8", "eval.every=1", "rollout.prompts=9", "rollout.writers.0.least=2",
        "rollout.share_schedule.start=0.5", "rollout.share_schedule.margin=0", "eval.teachers=false",
    ]  # fmt: skip
    for size in (1, 2):
        together(size, tmp_path / f"log-{size}", Job(tmp_path / f"run-{size}", "methods/distillm", changes))
    assert differences(tmp_path / "run-1", tmp_path / "run-2") == []
