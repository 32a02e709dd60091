"""Modules under their old names: plugins of kept runs import them so."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import opd
from opd.common.moved_modules import MOVED, PACKAGES, current_name
from opd.objective.gates import SelectKD
from opd.registry import StageView
from opd.rollouts.settings import Rollouts

PLUGIN = '''
import numpy as np
from pydantic import Field

import opd
from opd.objective.gates import Gate
from opd.objective.reward_gates import RewardGate
from opd.sampling.writers import Writer
from opd.settings import Needs
from opd.types import Author


@opd.register
class OldGate(Gate):
    """Written for an earlier version."""

    name = "old_gate"
    after: int = Field(1, ge=0)

    def factors(self, view):
        return [(np.arange(rollout.response_ids.size) >= self.after).astype(float) for rollout in view.rollouts]
'''


@pytest.mark.parametrize("old", [*MOVED, "opd.sampling.alongside", "opd.trainer.step", "opd.config.graph"])
def test_an_old_name_is_the_module_of_today(old: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        module = importlib.import_module(old)
    name = current_name(old)
    assert name is not None
    assert module is importlib.import_module(name)
    assert module.__name__ == name
    assert module.__spec__ is not None
    assert module.__spec__.name == name


def test_it_says_so_once_and_todays_names_say_nothing() -> None:
    code = "import opd.types, opd.records, opd.rollouts.writers, opd.sampling.writers; import opd.types"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stderr.count("opd.types is now opd.records: import it by that name.") == 1
    assert found.stderr.count("FutureWarning") == 2
    assert "opd.sampling" in PACKAGES


def test_a_plugin_of_an_earlier_version_runs(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(PLUGIN)
    spec = {
        "student": "tiny/generalist", "teachers": {"arithmetic": "tiny/arithmetic"}, "plugins": [str(tmp_path / "old.py")],
        "prompts": [{"source": "task:addition", "domain": "arithmetic"}], "objective": {"gate": {"kind": "old_gate", "after": 2}},
        "rollout": {"prompts": 2, "max_new_tokens": 4}, "train": {"steps": 2}, "eval": {"prompts": 0}, "device": "cpu",
    }  # fmt: skip
    sys.modules.pop("opd.settings", None)
    with pytest.warns(FutureWarning, match=r"opd\.settings is now opd\.registry"):
        run = opd.run(spec, out=tmp_path / "run", overrides=["train.steps=1"])
    assert len(opd.resume(run.directory, overrides=["train.steps=2"]).metrics) == 2


def test_a_plugin_that_defines_refuse_is_checked_as_before() -> None:
    with pytest.warns(FutureWarning, match="Outer.refuse is now `check`"):

        class Outer(SelectKD):
            name = "outer_gate"

            def refuse(self, view):  # type: ignore[no-untyped-def, override]
                yield "outer"
                yield from super().refuse(view)

    with pytest.warns(FutureWarning):

        class Inner(Outer):
            name = "inner_gate"

            def refuse(self, view):  # type: ignore[no-untyped-def, override]
                yield "inner"
                yield from super().refuse(view)

    class Today(Inner):
        name = "todays_gate"

        def check(self, view: StageView) -> Iterator[str]:
            yield "today"
            yield from super().check(view)

    view = StageView(Rollouts(temperature=0.5), None, [])
    ours = list(SelectKD(accept="speculative").check(view))
    assert ours
    assert list(Today(accept="speculative").check(view)) == ["today", "inner", "outer", *ours]
    assert list(Inner(accept="speculative").check(view)) == ["inner", "outer", *ours]
