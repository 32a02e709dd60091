"""Monitors: they speak on runs that failed, are quiet on those that went well, and their remedies can be carried out."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import opd
from opd import registry
from opd.common.errors import RecipeError
from opd.loop.metrics import calibration_error, dominance, spread_metrics
from opd.monitors.monitor import Evaluated, History, Lengthening, Monitor, Shortening, StageFacts, usual_monitors
from opd.recipe import load_recipe
from opd.records import Author, Rollout
from opd.runner.monitoring import StageMonitors
from opd.runner.plan import make_plan
from opd.runner.results import StageResult

RECORDED: dict[str, dict[str, list[float | None]]] = json.loads(
    (Path(__file__).parent / "recorded_metrics.json").read_text(encoding="utf-8")
)
STUDENT = "tiny/generalist"
QUIETLY = ("quickstart", "privileged", "concise")
ALARMS = {"collapse": {"kl", "stopping", "diversity"}, "collapse of stopping": {"stopping", "diversity"}}
ACROSS = {"before": lambda: Evaluated(0, {"a": 0.5}, {"a": 0.02}, {"a": 0.8}, {"a": 0.02})}


def every_monitor() -> list[Monitor]:
    return [registry.find("monitor", name)() for name in registry.names("monitor")]  # type: ignore[misc]


def fired(columns: Mapping[str, Sequence[float | None]], only: str | None = None, **facts: Any) -> dict[str, int]:
    """Monitor -> the first step at which it had a reason to speak."""
    history, found = History(StageFacts(**facts)), dict[str, int]()
    for number in range(max(map(len, columns.values()))):
        line = {name: values[number] for name, values in columns.items() if number < len(values)}
        history.add({"step": number + 1, "stage": "main"} | line)
        for monitor in every_monitor():
            if only in (None, monitor.name) and (alarm := monitor.alarm(history)) is not None:
                assert math.isfinite(alarm.value + alarm.threshold)
                assert alarm.words
                found.setdefault(monitor.name, number + 1)
    return found


@pytest.mark.parametrize("name", QUIETLY)
def test_quiet_on_runs_that_went_well(name: str) -> None:
    assert fired(RECORDED[name], instructed=name == "concise") == {}


@pytest.mark.parametrize("name", ALARMS)
def test_alarms_on_recorded_collapses(name: str) -> None:
    assert fired(RECORDED[name], instructed=True, followed_within=1).keys() == ALARMS[name]


def steps(*parts: tuple[float | None, int]) -> list[float | None]:
    return [value for value, count in parts for _ in range(count)]


def evaluated(name: str, *values: float, every: int = 2) -> list[float | None]:
    return [value for number in values for value in (*steps((None, every - 1)), number)]


TAKEN = steps((0.3, 3))
FAST = [0.098, 0.094, 0.091, 0.016, 0.015]  # made up, shaped like the first steps of a healthy 1.5B student


def scored(value: float) -> list[float | None]:
    """An evaluation after the fifth step."""
    return [None, None, None, None, value]


FAILING: dict[str, list[tuple[dict[str, Sequence[float | None]], dict[str, Any]]]] = {
    "kl": [
        ({"reverse_kl": [2.6, 2.7, 2.64, 0.34, 0.33]}, {"followed_within": 3}),
        ({"reverse_kl": [2.6, 2.7, 2.64, 0.34, 0.33], "distinct": [0.5, 0.5, 0.5, 0.05, 0.04]}, {}),
        ({"reverse_kl": [2.6, 2.7, 2.64, 0.34, 0.33], "reward": [0.4, 0.3, 0.4, 0.05, 0.0]}, {}),
        ({"reverse_kl": FAST, "eval/a": scored(0.3), "eval_stderr/a": scored(0.02)}, ACROSS),
        ({"reverse_kl": FAST, "eval/a": [None, 0.8], "eval_stderr/a": [None, 0.02]}, {"followed_within": 3, **ACROSS}),  # older than the fall
        ({"reverse_kl": [1.5, 9.0, 8.0]}, {}),
        ({"reverse_kl": steps((0.2, 100), (0.9, 3))}, {}),
    ],
    "diversity": [
        ({"eval/a": evaluated("a", 0.55), "eval_k/a": evaluated("a", 0.7), "eval_k_stderr/a": evaluated("a", 0.02)}, ACROSS),
        ({"entropy": steps((0.30, 10), (0.20, 10)), "reward": steps((0.5, 20))}, {}),
        ({"entropy": steps((0.30, 10), (0.20, 10)), "distinct": steps((0.5, 10), (0.1, 10))}, {}),
        ({"entropy": steps((None, 20)), "entropy_sampled": steps((0.30, 10), (0.20, 10)), "reward": steps((0.5, 20))}, {}),
        ({"entropy": steps((0.30, 10), (None, 10)), "entropy_sampled": steps((None, 10), (0.20, 10)), "reward": steps((0.5, 20))}, {}),
    ],
    "stopping": [
        ({"truncated": [0.0] * 10 + [0.05 * n for n in range(11)], "response_length": steps((10, 21))}, {}),
        ({"truncated": steps((0.0, 10), (0.1, 10)), "response_length": steps((10, 10), (21, 10))}, {}),
    ],
    "shortening": [({"response_length": steps((100, 10), (60, 10)), "reward": steps((0.5, 20))}, {})],
    "lengthening": [({"response_length": steps((100, 10), (210, 10)), "reward": steps((0.5, 20))}, {})],
    "token": [
        ({"kl_top": steps((0.8, 10)), "kl_largest": steps((8.0, 10))}, {}),
        ({"kl_top": steps((0.1, 10)), "kl_one": steps((0.6, 10)), "kl_largest": steps((8.0, 10))}, {}),
    ],
    "mismatch": [({"mismatch_outside": steps((0.03, 10))}, {}), ({"mismatch": steps((0.3, 10))}, {})],
    "staleness": [({"staleness/max": [1, 3, 5]}, {})],
    "calibration": [
        ({"ece": steps((0.10, 20), (0.17, 20))}, {}),
        ({"ece/teacher": steps((0.10, 5), (0.17, 5))}, {}),
    ],
    "together": [
        ({"reverse_kl": [0.5, 0.5, 0.4, 0.4, 0.3, 0.3], "eval/a": evaluated("a", 0.45, 0.4, 0.3)}, ACROSS),
    ],
    "saturation": [
        ({"eval/a": evaluated("a", 0.5, 0.51), "eval_stderr/a": evaluated("a", 0.02, 0.02)}, {"self_taught": True, **ACROSS}),
    ],
    "conflict": [
        ({"cosine/a": [-0.4, -0.3, -0.2], "eval/a": steps((None, 2), (0.4, 1)), "eval_stderr/a": steps((None, 2), (0.02, 1))}, ACROSS),
    ],
    "prefix": [({"takeover/first": TAKEN, "takeover/late": steps((0.02, 3)), "reward": steps((0.5, 40))}, {})],
    "turns": [({"kl_turns": steps((0.1, 20), (0.7, 20))}, {})],
}  # fmt: skip
HEALTHY: dict[str, list[tuple[dict[str, Sequence[float | None]], dict[str, Any]]]] = {
    "kl": [
        ({"reverse_kl": [1.7, 1.8, 1.7, 0.32, 1.6, 1.7]}, {}),  # one odd batch
        ({"reverse_kl": [0.01, 0.011, 0.01, 0.001, 0.001]}, {}),  # too little to fall from
        ({"reverse_kl": [0.045, 0.0045, 0.028, 0.02, 0.028, 0.049, 0.055, 0.0034, 0.0025]}, {}),  # it scatters
        ({"reverse_kl": steps((0.01, 50), (0.05, 9))}, {}),
        ({"reverse_kl": FAST}, {}),  # a frozen teacher cannot become the student
        ({"reverse_kl": FAST, "distinct": [0.5, 0.48, 0.45, 0.4, 0.4], "reward": [0.2, 0.3, 0.2, 0.4, 0.4]}, {}),
        ({"reverse_kl": FAST, "eval/a": scored(0.7), "eval_stderr/a": scored(0.02)}, ACROSS),
        ({"reverse_kl": FAST}, {"followed_within": 50}),  # nor one that has not been renewed yet
        ({"reverse_kl": FAST, "eval/a": scored(0.7), "eval_stderr/a": scored(0.02)}, {"followed_within": 1, **ACROSS}),
        ({"reverse_kl": FAST, "reward": [0.02, 0.03, 0.02, 0.0, 0.0], "truncated": steps((0.97, 5))}, {}),
    ],
    "diversity": [
        ({"entropy": steps((0.30, 10), (0.10, 10)), "reward": steps((0.5, 10), (0.9, 10))}, {}),
        ({"entropy": steps((0.30, 10), (0.10, 10))}, {}),  # learning looks like this, too
        ({"entropy": steps((0.02, 10), (0.01, 10)), "reward": steps((0.98, 20))}, {}),  # sure of itself already
        ({"entropy": steps((0.30, 10), (0.20, 10)), "reward": steps((0.0, 20)), "truncated": steps((0.95, 20))}, {}),  # all cut
        ({"entropy": steps((0.30, 10), (0.20, 10)), "reward": steps((0.5, 20)), "eval/a": evaluated("a", 0.7), "eval_stderr/a": evaluated("a", 0.02)}, ACROSS),
        ({"eval/a": evaluated("a", 0.7), "eval_k/a": evaluated("a", 0.78), "eval_k_stderr/a": evaluated("a", 0.02)}, ACROSS),
    ],
    "stopping": [({"truncated": steps((0.9, 30)), "response_length": steps((10, 30))}, {})],
    "shortening": [
        ({"response_length": steps((100, 10), (60, 10)), "reward": steps((0.5, 10), (0.7, 10))}, {}),
        ({"response_length": steps((100, 10), (60, 10)), "reward": steps((0.5, 20))}, {"instructed": True}),
        ({"response_length": steps((100, 10), (60, 10))}, {}),
    ],
    "lengthening": [
        ({"response_length": steps((100, 10), (210, 10)), "reward": steps((0.5, 10), (0.7, 10))}, {}),
        ({"response_length": steps((100, 10), (210, 10)), "reward": steps((0.5, 20))}, {"instructed": True}),
        ({"response_length": steps((100, 10), (180, 10)), "reward": steps((0.5, 20))}, {}),
        ({"response_length": steps((100, 10), (210, 10)), "truncated": steps((0.0, 20))}, {}),  # without rewards who can tell
    ],
    "token": [
        ({"kl_top": steps((0.9, 10)), "kl_one": steps((0.9, 10)), "kl_largest": steps((1.0, 10))}, {}),
        ({"kl_top": steps((0.6, 10)), "kl_one": steps((0.3, 10)), "kl_largest": steps((9.0, 10))}, {}),
    ],
    "mismatch": [({"mismatch_outside": steps((0.001, 10)), "mismatch": steps((0.09, 10))}, {})],
    "staleness": [({"staleness/max": [4, 4, 4]}, {})],
    "calibration": [
        ({"ece": steps((0.27, 20), (0.05, 20))}, {}),
        ({"ece": steps((0.70, 20), (0.80, 20)), "truncated": steps((0.95, 40))}, {}),  # cut answers are never right
    ],
    "together": [({"reverse_kl": [0.5, 0.5, 0.4, 0.4, 0.3, 0.3], "eval/a": evaluated("a", 0.45, 0.46, 0.3)}, ACROSS)],
    "saturation": [
        ({"eval/a": evaluated("a", 0.5, 0.51), "eval_stderr/a": evaluated("a", 0.02, 0.02)}, ACROSS),
        ({"eval/a": evaluated("a", 0.6, 0.7), "eval_stderr/a": evaluated("a", 0.02, 0.02)}, {"self_taught": True, **ACROSS}),
    ],
    "conflict": [
        ({"cosine/a": [-0.4, -0.3, -0.2], "eval/a": steps((None, 2), (0.49, 1)), "eval_stderr/a": steps((None, 2), (0.02, 1))}, ACROSS),
        ({"cosine/a": [0.4, 0.3, 0.2], "eval/a": steps((None, 2), (0.4, 1)), "eval_stderr/a": steps((None, 2), (0.02, 1))}, ACROSS),
    ],
    "turns": [({"kl_turns": steps((0.1, 20), (0.3, 20))}, {}), ({"kl_turns": steps((0.6, 20), (0.7, 20))}, {})],
    "prefix": [
        ({"takeover/first": TAKEN, "takeover/late": steps((0.2, 3)), "reward": steps((0.5, 40))}, {}),
        ({"takeover/first": steps((0.02, 3)), "takeover/late": steps((0.02, 3)), "reward": steps((0.5, 40))}, {}),  # no gap is left
        ({"takeover/first": [0.16, 0.03, 0.16], "takeover/late": steps((0.0, 3)), "reward": steps((0.8, 40))}, {}),  # as much as chance brings
        ({"takeover/first": TAKEN, "takeover/late": steps((0.02, 3)), "reward": [0.5 + 0.05 * (step % 2) + 0.002 * step for step in range(40)]}, {}),  # slowly
        ({"takeover/first": TAKEN, "takeover/late": steps((0.02, 3)), "reward": steps((0.5, 6), (0.9, 34))}, {}),
        ({"takeover/first": TAKEN, "takeover/late": steps((0.02, 3)), "reward": steps((0.5, 40)), "eval/a": evaluated("a", 0.7), "eval_stderr/a": evaluated("a", 0.02)}, ACROSS),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", registry.names("monitor"))
def test_every_monitor_tells_failing_runs_from_others(name: str) -> None:
    for columns, facts in FAILING[name]:
        assert fired(columns, name, **facts), columns
    for columns, facts in HEALTHY[name]:
        assert not fired(columns, name, **facts), columns
    assert not fired({"loss": [1.0] * 40}, name)  # without what it reads it says nothing


def fast_start(dice: random.Random, **columns: Sequence[float | None]) -> dict[str, Sequence[float | None]]:
    """Made-up metrics of forty healthy steps, shaped like those of a 1.5B student with a larger teacher: the KL falls to a sixth within five steps."""
    kl = [0.098 * max(0.13, 0.98**step if step < 3 else 0.16) * dice.uniform(0.95, 1.05) for step in range(40)]
    entropy = [0.32 * (0.65 + 0.35 * 0.8**step) * dice.uniform(0.97, 1.03) for step in range(40)]
    distinct = [0.41 * (0.85 + 0.15 * 0.8**step) * dice.uniform(0.98, 1.02) for step in range(40)]
    lengths = [dice.uniform(190, 210) for _ in range(40)]
    found: dict[str, Sequence[float | None]] = {
        "reverse_kl": kl, "entropy": entropy, "distinct": distinct, "response_length": lengths,
        "truncated": [dice.uniform(0.0, 0.1) for _ in range(40)],
        "reward": [min(0.75, 0.45 + 0.01 * step) + dice.uniform(-0.05, 0.05) for step in range(40)],
        "mismatch": steps((0.02, 40)), "kl_top": steps((0.3, 40)), "kl_largest": steps((4.0, 40)),
    }  # fmt: skip
    return found | columns


def test_a_fast_start_is_no_failure() -> None:
    """Neither with exact divergences nor with sampled tokens, evaluated or not, nor where answers are cut on purpose."""
    dice = random.Random(0)
    risen = {"eval/a": [*steps((None, 4)), 0.62], "eval_stderr/a": [*steps((None, 4)), 0.02]}
    noisy = [value * dice.uniform(0.7, 1.3) - 0.002 for value in fast_start(dice)["reverse_kl"] if value is not None]
    cut = {"truncated": steps((1.0, 40)), "response_length": steps((64, 40)), "reward": steps((0.0, 40))}
    sure = {"ece": [0.7 + 0.003 * step for step in range(40)]}  # answers that are cut are never right, however sure
    runs: dict[str, tuple[dict[str, Sequence[float | None]], dict[str, Any]]] = {
        "reverse KL": (fast_start(dice), {}),
        "evaluated": (fast_start(dice, **risen), ACROSS),
        "forward KL": (fast_start(dice, entropy=[0.3 + 0.003 * step for step in range(40)]), {}),
        "sampled tokens": (fast_start(dice, reverse_kl=noisy, kl_one=steps((0.1, 40))), {}),
        "cut": (fast_start(dice, **cut, **sure), {}),
        "a copy of the student that is not renewed yet": (fast_start(dice), {"followed_within": 50}),
    }
    assert {name: fired(columns, **facts) for name, (columns, facts) in runs.items()} == {name: {} for name in runs}
    sudden = fast_start(dice, distinct=[*steps((0.4, 3), (0.03, 37))])
    assert fired(sudden)["kl"] == 5
    assert fired(fast_start(dice), followed_within=2)["kl"] == 5


@pytest.mark.parametrize(
    ("teacher", "within"),
    [
        ("tiny/arithmetic", None),
        ({"kind": "self"}, None),
        ({"kind": "ema", "rate": 0.02}, 50),
        ({"kind": "refresh", "every": 30}, 30),
        ({"kind": "mixture", "parts": {"x": {"kind": "refresh", "every": 40}, "y": "tiny/arithmetic"}}, 40),
    ],
)
def test_monitors_know_which_teachers_follow_the_student(teacher: Any, within: int | None, tmp_path: Path) -> None:
    recipe = load_recipe({
        "student": "tiny/generalist", "teachers": {"a": teacher}, "prompts": {"source": "task:addition", "domain": "a"}
    })  # fmt: skip
    watch = StageMonitors(recipe, recipe.stages[0], tmp_path, StageResult("main"), print, lambda: None)
    assert watch._history.facts.followed_within == within


def test_rare_probes_are_not_forgotten() -> None:
    """However many steps lie between them."""
    between = steps((None, 199))
    cosines = [value for cosine in (-0.4, -0.3, -0.2) for value in (*between, cosine)]
    lost = {"eval/a": steps((None, 599), (0.4, 1)), "eval_stderr/a": steps((None, 599), (0.02, 1))}
    assert fired({"cosine/a": cosines, **lost}, "conflict", **ACROSS) == {"conflict": 600}
    errors = [value for error in (*[0.1] * 5, *[0.2] * 5) for value in (*between, error)]
    assert fired({"ece/teacher": errors}, "calibration") == {"calibration": 2000}


# Recipes


def loads(stages: list[dict[str, Any]]) -> bool:
    try:
        load_recipe({"name": "remedied", "stages": stages})
    except RecipeError:
        return False
    return True


def test_remedies_load() -> None:
    found: dict[str, set[str]] = {}
    for shipped in (
        "quickstart",
        "methods/thinking-machines",
        "methods/refresh",
        "methods/grpo",
        "methods/multi-turn-opd",
    ):
        (stage,) = load_recipe(shipped).model_dump(mode="json")["stages"][:1]
        before = json.dumps(stage)
        for monitor in every_monitor():
            if any(loads([changed]) and changed != stage for changed in monitor.remedies(stage)):
                found.setdefault(monitor.name, set()).add(shipped)
        assert json.dumps(stage) == before
    assert found.keys() == set(registry.names("monitor"))
    assert {"kl", "diversity", "stopping", "token", "calibration"} <= {
        name for name, recipes in found.items() if "quickstart" in recipes
    }


def test_settings_are_read_and_mistakes_rejected() -> None:
    plain = load_recipe("quickstart").stages[0].monitors
    assert plain.action == "warn"
    assert [monitor.name for monitor in plain.watch] == usual_monitors()
    assert load_recipe("quickstart", ["monitors=off"]).stages[0].monitors.watch == []
    own = load_recipe("quickstart", ["monitors={watch: [{kind: kl, fall: 9, action: stop}], ignore: token}"])
    first, *others = own.stages[0].monitors.watch
    assert (first.name, own.stages[0].monitors.action_of(first)) == ("kl", "stop")
    assert "token" not in [monitor.name for monitor in others]
    assert len(others) == len(plain.watch) - 2
    assert load_recipe(yaml.safe_load(own.to_yaml())) == own
    for wrong, told in (
        ("{action: off, ignore: kl}", "watches nothing"),
        ("{watch: [kl, kl]}", "is listed twice"),
        ("{ignore: kll}", "not a default monitor"),
        ("{watch: kl, ignore: kl}", "keep one"),
        ("{watch: {kind: kll}}", "did you mean 'kl'"),
        ("loudly", "'warn', 'stop' or 'off'"),
    ):
        with pytest.raises(RecipeError, match=told):
            load_recipe("quickstart", [f"monitors={wrong}"])


# Metrics


def rollout_of(ids: list[int], name: str = "r") -> Rollout:
    tokens, half = np.array(ids, dtype=np.int32), np.full(len(ids), math.log(0.5), dtype=np.float32)
    author = np.full(len(ids), Author.STUDENT, dtype=np.uint8)
    return Rollout(name, "p", 0, 0, "a", "student", tokens[:1], tokens, author, half, half, half, tokens * 0, "stop")


def test_metrics_of_what_means_hide() -> None:
    values = np.full(200, 0.01)
    values[:2] = 9.0
    alike = [rollout_of([5, 6, 5, 6]), rollout_of([5, 6, 5, 6])]
    found = spread_metrics(values, np.array([0.0, 0.1, 0.8, math.nan]), alike)
    assert found["kl_top"] == pytest.approx(18 / (18 + 1.98))
    assert found["kl_largest"] == 9
    assert found["mismatch_outside"] == pytest.approx(1 / 3)
    assert found["distinct"] == pytest.approx(2 / 6)
    assert spread_metrics(np.zeros(0), np.zeros(0), []) == {}
    often = np.array([7, 8, 9, 10] * 50)  # a quarter of the text, and nearly all of the KL
    assert dominance(often, np.where(often == 7, 6.0, 0.0))["kl_one"] == pytest.approx(0.75)
    assert dominance(often, np.ones(200))["kl_one"] == pytest.approx(0.0)
    assert dominance(often, np.where(often == 7, math.nan, 1.0))["kl_one"] == pytest.approx(0.0)
    assert dominance(often[:50], np.ones(50)) == dominance(often, np.zeros(200)) == {}
    sure = [rollout_of([5, 6], name=str(number)) for number in range(20)]
    right = {rollout.id: float(int(rollout.id) < 5) for rollout in sure}
    assert all((rollout.author == Author.STUDENT).all() for rollout in sure)
    confidence = float(np.exp(sure[0].logprob.mean()))
    assert calibration_error(sure, right)["ece"] == pytest.approx(abs(confidence - 0.25))
    assert calibration_error(sure, {}) == {}
    unknown = [replace(one, id=f"{one.id}?", logprob=np.full_like(one.logprob, np.nan)) for one in sure]
    rewards = right | {one.id: 0.0 for one in unknown}
    assert calibration_error([*sure, *unknown], rewards) == calibration_error(sure, right)


# Runs


def failing(action: str) -> dict[str, Any]:
    """A learning rate that no model survives."""
    return {
        "student": STUDENT,
        "teachers": {"a": "tiny/arithmetic"},
        "prompts": {"source": "task:addition", "domain": "a"},
        "rollout": {"prompts": 8, "max_new_tokens": 6},
        "train": {"steps": 5, "lr": 0.3, "clip": None},
        "checkpoint": {"every": 2, "keep": 9, "background": False, "resume": "exact"},
        "eval": {"prompts": 0},
        "log": {"samples": 0, "start_table": False},
        "monitors": action,
        "device": "cpu",
        "threads": 1,
    }


@pytest.mark.slow
def test_a_failing_run_alarms_once_and_stops_and_resumes(tmp_path: Path) -> None:
    warned = opd.run(failing("warn"), out=tmp_path / "warned")
    off = opd.run(failing("off"), out=tmp_path / "off")
    losses = [line["loss"] for line in warned.metrics]
    assert losses == [line["loss"] for line in off.metrics]
    assert off.monitors == []
    (alarm,) = [line for line in warned.monitors if line["monitor"] == "kl"]  # once, not at every step
    assert alarm["value"] > alarm["threshold"]
    assert alarm["words"]
    assert alarm["remedy"]
    log = (warned.directory / "log.txt").read_text(encoding="utf-8")
    assert log.count("ALARM (kl)") == 1

    recipe = load_recipe(warned.directory / alarm["recipe"])
    base = max((path for path in warned.checkpoints if int(path.name[-6:]) < alarm["step"]), default=None)
    assert recipe.stages[0].student.model == (STUDENT if base is None else str(base))
    assert recipe.stages[0].train.lr == pytest.approx(0.1)
    assert recipe.stages[0].train.steps == 5 - (0 if base is None else int(base.name[-6:]))
    assert make_plan(recipe)
    assert alarm["changes"] == ["train.lr: 0.3 → 0.1"]  # and not all that the monitor's words speak of
    assert alarm["command"] == f"opd run {warned.directory / alarm['recipe']}"
    written = (warned.directory / alarm["recipe"]).read_text(encoding="utf-8")
    assert all(f"{told}\n" in written for told in (alarm["changes"][0], alarm["command"]))
    assert f"To continue with {alarm['changes'][0]}: {alarm['command']}\n" in log.replace("\r", "")

    few = failing("warn") | {"checkpoint": {"every": 1, "keep": 1, "background": False}}
    kept = opd.run(few, out=tmp_path / "kept")  # the checkpoint that it would go back to has made room
    written = load_recipe(kept.directory / kept.monitors[0]["recipe"])
    assert Path(written.stages[0].student.model).is_dir()

    stopped = opd.run(failing("stop"), out=tmp_path / "stopped")
    assert stopped.summary["status"] == "stopped"
    assert stopped.metrics[-1]["step"] == alarm["step"] < 5
    taken_up = opd.resume(stopped.directory)
    assert taken_up.summary["status"] == "done"
    assert [line["loss"] for line in taken_up.metrics] == losses
    assert [(line["step"], line["value"]) for line in taken_up.monitors if line["monitor"] == "kl"] == [
        (alarm["step"], alarm["value"])
    ]


def test_a_remedy_takes_the_stage_up_and_leaves_its_start_where_it_was(tmp_path: Path) -> None:
    """Of a stage that starts from another one, whose teachers are the student as it was then."""
    short = {**failing("off"), "train": {"steps": 1}, "checkpoint": {"every": 1}}
    mixed = {"kind": "mixture", "parts": {"x": {"kind": "self"}, "y": "tiny/arithmetic"}, "domains": ["a"]}
    second: dict[str, Any] = {"name": "second", "student": {"lora": {"rank": 2}}}
    second["teachers"] = {"a": None, "m": mixed, "b": {"kind": "base"}}
    second["prompts"] = [{"source": "task:addition", "domain": "a"}, {"source": "task:reverse", "domain": "b"}]
    recipe = {**short, "stages": [{"name": "first"}, second]}
    run = opd.run(recipe, out=tmp_path / "run")
    start, base = (str(next((run.directory / "checkpoints" / name).glob("step-*"))) for name in ("first", "second"))

    def remedied(student: Mapping[str, Any]) -> opd.Recipe:
        watched = {
            **second,
            "student": student,
            "monitors": {"action": "warn", "watch": {"kind": "shortening", "window": 1}},
        }
        found = load_recipe({**recipe, "stages": [{"name": "first"}, watched, {"name": "third"}]})
        told: list[str] = []
        watch = StageMonitors(found, found.stages[1], run.directory, StageResult("second"), told.append, lambda: None)
        lines = [
            watch.step({"step": step, "response_length": length, "reward": 0.5}) for step, length in ((1, 9), (2, 3))
        ]
        ((line,),) = lines[1:]
        assert [change.split(":")[0] for change in line["changes"]] == ["teachers.start", "objective.1"]
        assert line["command"] == f"opd run {run.directory / line['recipe']} --reuse {run.directory}"
        assert told[0].endswith(line["command"])
        return load_recipe(run.directory / line["recipe"])

    stage, _ = remedied(second["student"]).stages
    assert stage.student.model == base
    assert stage.teachers["start"].role == "reference"
    models = [[ref.model for ref in stage.teachers[name].reads()] for name in ("m", "b", "start")]
    assert models == [[start, "tiny/arithmetic"], [start], [start]]
    assert make_plan(load_recipe({"name": "again", "stages": [stage.model_dump(mode="json")]}))
    merged = {"merge": {"models": [STUDENT, "tiny/arithmetic"]}, "lora": {"rank": 2}}
    stage, _ = remedied(merged).stages
    assert [ref.model for ref in stage.teachers["start"].reads()] == [str(run.directory / "merged/second")]


def test_lengths_that_only_scatter_raise_no_alarm() -> None:
    dice = random.Random(0)
    for _ in range(30):  # runs of 60 steps with 8 prompts, whose answers are of very different lengths
        history = History()
        for step in range(60):
            lengths = [100 * math.exp(dice.gauss(0, 0.6)) for _ in range(8)]
            history.add({"step": step + 1, "response_length": sum(lengths) / 8, "reward": dice.random()})
            assert Shortening().alarm(history) is None
            assert Lengthening().alarm(history) is None


def test_a_student_with_another_teacher_is_not_only_taught_by_itself(tmp_path: Path) -> None:
    alone = {"spelling": {"kind": "self"}}
    for teachers, expected in ((alone, True), ({**alone, "arithmetic": "tiny/arithmetic"}, False)):
        prompts = [{"source": "task:addition", "domain": name} for name in teachers]
        recipe = load_recipe({"student": "tiny/generalist", "teachers": teachers, "prompts": prompts})
        watch = StageMonitors(recipe, recipe.stages[0], tmp_path, StageResult("main"), print, lambda: None)
        assert watch._history.facts.self_taught is expected
