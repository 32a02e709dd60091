"""Every monitor speaks on a short run of tiny models that is built to fail its way. Their thresholds are set on other runs."""

from __future__ import annotations

import copy
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import opd
from opd import registry
from opd.cli import app
from opd.engines.kinds import BuiltInSampler
from opd.models.load import TINY_ROOT
from opd.monitors.monitor import usual_monitors
from opd.objective.gates import Arrays, Gate, GateView
from opd.recipe import load_recipe
from opd.records import Author, TokenSampler, WeightsRef

SUMS = {"source": "task:addition", "domain": "a"}


class TooLate(Gate):
    """The last quarter of an answer alone, where no advice helps any more."""

    name = "too_late"

    def factors(self, view: GateView) -> Arrays:
        sizes = [rollout.response_ids.size for rollout in view.rollouts]
        return [(np.arange(size) >= int(0.75 * size)).astype(float) for size in sizes]


class LaterTurns(Gate):
    """The turns of an episode after the first."""

    name = "later_turns"

    def factors(self, view: GateView) -> Arrays:
        return [1 - np.cumprod(rollout.author != Author.ENV).astype(float) for rollout in view.rollouts]


class Deaf:
    """A sampler that new weights never reach."""

    def __init__(self, inner: TokenSampler) -> None:
        self.inner, self.loaded = inner, False

    def load(self, weights: WeightsRef) -> None:
        if not self.loaded:
            self.inner.load(weights)
        self.loaded = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class DeafSampler(BuiltInSampler):
    name = "deaf"
    by_default = False

    def open(self, model: Any, *given: Any, **more: Any) -> Any:
        apart = copy.copy(model)  # weights of its own: those of a copy for sampling are the student's
        apart.module = copy.deepcopy(model.module)
        apart.head = apart.module.get_output_embeddings()
        return Deaf(super().open(apart, *given, **more))

    def why_slow(self, sampler: Any) -> str:
        return super().why_slow(sampler.inner)


@pytest.fixture(autouse=True)
def _own_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    for choice in (TooLate, LaterTurns, DeafSampler):
        monkeypatch.setitem(registry._registered, f"{choice.family}.{choice.name}", choice)


def changed_copy(to: Path, of: str, change: Callable[[Any], None]) -> str:
    """A tiny model with another table of tokens, which is its head as well."""
    shutil.copytree(TINY_ROOT / of, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors["model.embed_tokens.weight"])
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return str(to)


def unending(folder: Path) -> str:
    def swap(table: Any) -> None:
        table[[1, 2]] = table[[2, 1]]

    return changed_copy(folder / "unending", "arithmetic", swap)


def late(folder: Path) -> str:
    """It can add, and says more before it ends."""

    def weaken(table: Any) -> None:
        table[1] *= 0.15

    return changed_copy(folder / "late", "arithmetic", weaken)


def shy_of(folder: Path, letter: str) -> str:
    """It would never say this letter, and knows as much as the student otherwise."""

    def forget(table: Any) -> None:
        number = opd.load_model("tiny/generalist").tokenizer.convert_tokens_to_ids(letter)
        table[number] = -table[number]

    return changed_copy(folder / "shy", "generalist", forget)


def two_teachers(folder: Path) -> dict[str, Any]:
    """The same sums under two names: who can add says one thing, who cannot another, and more often."""
    return {
        "teachers": {"a": "tiny/arithmetic", "b": "tiny/spelling"},
        "prompts": [SUMS, {"source": "task:addition", "domain": "b", "share": 4}],
        "train": {"steps": 20, "lr": 5e-4},
        "eval": {"prompts": 100, "every": 6},
        "monitors": {"watch": {"kind": "conflict", "every": 4}},
    }


FAILING: dict[str, Callable[[Path], dict[str, Any]]] = {
    "prefix": lambda folder: {
        "objective": {"gate": "too_late"},
        "train": {"steps": 24},
        "monitors": {"watch": {"kind": "prefix", "every": 5, "answers": 24, "window": 10}},
    },
    "conflict": two_teachers,
    "diversity": lambda folder: {  # a teacher that says nearly always the same
        "prompts": {"source": "task:reverse", "domain": "a"},
        "train": {"steps": 22, "lr": 1e-3},
    },
    "calibration": lambda folder: {  # sure of itself, and wrong
        "teachers": {"a": {"model": "tiny/spelling", "temperature": 0.5}},
        "train": {"steps": 44, "lr": 1e-4},
    },
    "stopping": lambda folder: {"teachers": {"a": unending(folder)}, "train": {"steps": 22, "lr": 1e-3}},
    "shortening": lambda folder: {
        "prompts": {"source": "task:reverse", "domain": "a"},
        "train": {"steps": 22, "lr": 1e-3},
    },
    "lengthening": lambda folder: {  # the teacher ends where it likes
        "teachers": {"a": late(folder)},
        "objective": {"divergence": "forward_kl"},
        "rollout": {"prompts": 32, "max_new_tokens": 64},
        "train": {"steps": 26, "lr": 5e-4},
    },
    "token": lambda folder: {
        "teachers": {"a": shy_of(folder, "z")},
        "prompts": [SUMS, {"source": "task:reverse", "domain": "a", "share": 0.1}],
        "rollout": {"prompts": 96, "max_new_tokens": 12},
        "train": {"steps": 12, "lr": 1e-6},
    },
    "mismatch": lambda folder: {"sampler": {"engine": "deaf"}, "train": {"steps": 14, "lr": 1e-3}},
    "staleness": lambda folder: {
        "rollout": {"prompts": 4, "max_new_tokens": 2, "staleness": 8},
        "train": {"steps": 16, "epochs": 12},
    },
    "together": lambda folder: {
        "teachers": {"a": "tiny/spelling"},
        "train": {"steps": 11, "lr": 3e-4},
        "eval": {"prompts": 150, "every": 3},
    },
    "saturation": lambda folder: {
        "teachers": {"a": {"kind": "self"}},
        "train": {"steps": 5},
        "eval": {"prompts": 50, "every": 2},
    },
    "kl": lambda folder: {"train": {"steps": 4, "lr": 0.3, "clip": None}},
    "turns": lambda folder: {  # whatever the student says in later turns becomes less likely
        "teachers": {"a": {"kind": "self"}},
        "prompts": {"source": "task:dialogue", "domain": "a"},
        "rollout": {"prompts": 16, "max_new_tokens": 36, "environment": {"kind": "dialogue", "turn_tokens": 8}},
        "objective": [
            {
                "form": "policy_gradient",
                "gate": "later_turns",
                "advantage": {"teacher_weight": 0, "also": [{"kind": "fixed"}]},
            },
            {"form": "direct", "coefficient": 0.01},
        ],
        "train": {"steps": 16, "lr": 2e-4},
        "monitors": {"watch": {"kind": "turns", "window": 4}},
    },
}


BRIEF = {"kind": "instruction", "instruction": "add 1"}
OTHERWISE: dict[
    str, tuple[str, str, dict[str, Any]]
] = {  # monitor, what it says, and the run: of those that look for more than one thing
    "a teacher that becomes its student": (
        "kl",
        "KL to the teacher fell from",
        {
            "teachers": {"a": {"kind": "refresh", "every": 6, "force": True, "view": BRIEF}},
            "train": {"steps": 8, "lr": 1e-2},
        },
    ),
    "one answer to everything": (
        "diversity",
        "pass@k of a fell from",
        {
            "prompts": {"source": "task:reverse", "domain": "a"},
            "train": {"steps": 7, "lr": 1e-3},
            "eval": {"prompts": 24, "k": 4, "every": 6},
        },
    ),
    "a teacher that likes what is wrong": (
        "calibration",
        "the teacher's confidence in the student's answers is",
        {
            "teachers": {"a": {"model": "tiny/spelling", "temperature": 0.5}},
            "train": {"steps": 12},
            "monitors": {"watch": {"kind": "calibration", "every": 1}},
        },
    ),
}


def carried_out(name: str, folder: Path, **changes: Any) -> opd.Run:
    recipe: dict[str, Any] = {
        "name": name,
        "student": "tiny/generalist",
        "teachers": {"a": "tiny/arithmetic"},
        "prompts": SUMS,
        "rollout": {"prompts": 32, "max_new_tokens": 12},
        "train": {"lr": 5e-4},
        "eval": {"prompts": 0},
        "checkpoint": {"every": 10},
        "log": {"samples": 0, "start_table": False},
        "device": "cpu",
        "threads": 1,
        "seed": 11,
    }
    given = (FAILING[name](folder) if name in FAILING else {}) | changes
    given["train"] = {**recipe["train"], **given["train"]}
    if "eval" in given:
        given["eval"] = {"teachers": False, **given["eval"]}
    return opd.run(recipe | given, out=folder / "run")


def test_every_monitor_has_a_run_that_fails_its_way() -> None:
    assert FAILING.keys() == set(registry.names("monitor"))
    assert set(usual_monitors()) == FAILING.keys() - {"prefix"}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILING)
def test_a_run_built_to_fail_raises_the_alarm(name: str, tmp_path: Path) -> None:
    run = carried_out(name, tmp_path)
    (alarm, *_) = [line for line in run.monitors if line["monitor"] == name] or [pytest.fail(str(run.monitors))]
    assert f"ALARM ({name})" in (run.directory / "log.txt").read_text(encoding="utf-8")
    assert alarm["recipe"] is not None
    remedied = load_recipe(run.directory / alarm["recipe"], ["stages.0.train.steps=1", "stages.0.eval.prompts=0"])
    assert opd.run(remedied, out=tmp_path / "remedied").summary["status"] == "done"


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERWISE)
def test_a_run_that_fails_in_another_way_raises_it_too(name: str, tmp_path: Path) -> None:
    monitor, words, changes = OTHERWISE[name]
    run = carried_out(name, tmp_path, **changes)
    said = [line["words"] for line in run.monitors if line["monitor"] == monitor]
    assert said, run.monitors
    assert said[0].startswith(words)


@pytest.mark.slow
def test_a_stopped_run_continues_with_the_command_of_its_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, changes = OTHERWISE["a teacher that becomes its student"]
    steps = {"steps": 12, "lr": 1e-2}
    stopped = carried_out(
        "stopped", tmp_path, **changes | {"train": steps, "monitors": "stop", "checkpoint": {"every": 3}}
    )
    (alarm,) = stopped.monitors
    assert (stopped.summary["status"], stopped.metrics[-1]["step"]) == ("stopped", alarm["step"])
    assert alarm["changes"] == ["teachers.a.every: 6 → 40", "teachers.a.force: true → false"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    _, *arguments = shlex.split(alarm["command"])
    arguments += ["stages.0.monitors=warn"]  # at such a learning rate anything may follow
    monkeypatch.chdir(elsewhere)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    again = opd.Run(elsewhere / "runs" / "stopped-remedy")
    assert again.summary["status"] == "done"
    assert again.metrics[-1]["step"] == 12 - 6  # from the last checkpoint before the alarm


@pytest.mark.slow
def test_probes_are_quiet_where_the_student_learns(tmp_path: Path) -> None:
    """The same two runs without what is built into them."""
    watch = [{"kind": "prefix", "every": 5, "answers": 24, "window": 10}, {"kind": "conflict", "every": 4}]
    prompts = [SUMS, {"source": "task:reverse", "domain": "b"}]
    run = carried_out("conflict", tmp_path, prompts=prompts, monitors={"watch": watch})
    assert {"cosine/a", "cosine/b", "takeover/first", "takeover/late"} <= {key for line in run.metrics for key in line}
    assert [line["monitor"] for line in run.monitors] == []
    shorter = {"train": {"steps": 6, "lr": 5e-4}, "eval": {"prompts": 0}, "monitors": "off"}
    off = carried_out("conflict", tmp_path / "off", prompts=prompts, **shorter)
    assert [line["loss"] for line in off.metrics] == [line["loss"] for line in run.metrics[:6]]  # probes change no bit


TEACHERS: dict[str, tuple[dict[str, Any], bool]] = {  # and whether it can be told how well they are calibrated
    "mixture": (
        {"kind": "mixture", "parts": {"x": {"model": "tiny/arithmetic"}, "y": {"model": "tiny/spelling"}}},
        True,
    ),
    "instructed": ({"kind": "self", "view": {"kind": "instruction", "instruction": "be brief"}}, True),
    "ema": ({"kind": "ema"}, True),
    "another tokenizer": ({"model": "tiny/pairs", "view": "bytes"}, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TEACHERS)
def test_probes_work_with_every_kind_of_teacher(name: str, tmp_path: Path) -> None:
    teacher, told = TEACHERS[name]
    run = carried_out(
        "conflict",
        tmp_path,
        teachers={"a": teacher, "b": teacher},
        objective={"form": "gold"} if not told else {},
        rollout={"prompts": 16, "max_new_tokens": 6},
        train={"steps": 1},
        eval={"prompts": 2, "every": 1},
        monitors={"watch": [{"kind": "conflict", "every": 1}, {"kind": "calibration", "every": 1}]},
    )
    assert "cosine/a" in run.metrics[0] or run.metrics[0]["loss"] == 0  # without a gradient there is none
    assert ("ece/teacher" in run.metrics[0]) is told
