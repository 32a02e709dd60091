"""Python callables as rewards: forked workers, what a run records of them, and that they are given again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import opd
from opd.common.errors import RecipeError, RunDirectoryError
from opd.recipe import load_recipe
from opd.records import Prompt, Sample
from opd.rewards import Rewarder, Rewards
from opd.rewards.custom import with_callables
from tests.support.helpers import save_tiny


def sample(text: str, domain: str = "d") -> Sample:
    return Sample(Prompt("p", domain), text)


def limited(function: Any) -> Rewards:
    """A callable with a time limit of a second in the domain `endless`, and of many elsewhere."""
    rewards, seconds = with_callables(Rewards(), {"endless": function, "default": function}), {"endless": 1.0}
    domains = {
        key: [kind.model_copy(update={"time_limit": seconds.get(key, 100.0)}) for kind in kinds]
        for key, kinds in rewards.domains.items()
    }
    return rewards.model_copy(update={"domains": domains})


def test_a_callable_of_this_process_is_asked_in_forks(tmp_path: Path) -> None:
    """It sees what it closes over, and whatever it does costs one sample."""
    factor, touched = 2.0, [0]
    file = (tmp_path / "open").open("w")

    def length(sample: Sample) -> Any:
        touched[0] += 1
        match sample.text:
            case "hang":
                time.sleep(3600)
            case "die":
                os._exit(1)
            case "raise":
                raise KeyError("boom")
            case "parent":
                os.kill(os.getppid(), 9)
            case "write":
                os.write(file.fileno(), b"x")
            case "none" | "nan" | "huge":
                return {"none": None, "nan": float("nan"), "huge": 1e9}[sample.text]
        return factor * len(sample.text) + touched[0]

    bad = ("hang", "die", "raise", "none", "nan", "huge")
    texts = [text for kind in bad for text in (kind, f"after {kind}")]
    rewarder = Rewarder(limited(length))
    asked = [sample(text, "endless" if text == "hang" else "d") for text in texts]
    found = dict(zip(texts, rewarder(asked), strict=True))
    for kind in bad:
        assert found[kind].reward is None
        assert found[kind].error
        assert (
            found[f"after {kind}"].reward == 2 * len(f"after {kind}") + 1
        )  # nothing of an answer reaches the next one
    assert "boom" in found["raise"].error
    assert "longer than 1 seconds" in found["hang"].error
    assert rewarder([sample("parent"), sample("well")])[1].reward == 9.0
    assert rewarder([sample("write")])[0].reward == 11.0
    file.close()
    assert (tmp_path / "open").read_bytes() == b""  # what is open here is not open there
    assert touched == [0]
    pids = [worker.process.pid for worker in rewarder._forks.workers]
    rewarder.close()
    assert pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


PROGRAM = """
import opd
from opd.recipe import load_recipe
from opd.rewards import Rewarder
from opd.records import Prompt, Sample

@opd.register
class Twice(opd.Reward):
    name = "twice"
    factor: float = 2.0

    def reward(self, sample):
        print("not for anybody's eyes")
        return self.factor * len(sample.text)

recipe = {"student": "s", "prompts": "p", "rewards": {"kind": "twice", "factor": 3}}
print(Rewarder(load_recipe(recipe).stages[0].rewards)([Sample(Prompt("p", "d"), "four")])[0].reward)
"""


def test_a_class_of_the_program_itself_is_asked_in_forks_too(tmp_path: Path) -> None:
    """As in a notebook: there is no file that a worker could import."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "12.0\n", done.stdout + done.stderr


def test_callables_by_domain_stand_before_the_recipes_own() -> None:
    own = load_recipe({"student": "s", "prompts": "p", "rewards": {"a": "numeric", "b": "exact"}}).stages[0].rewards
    both = with_callables(own, {"a": lambda sample: 0.25, "c": lambda sample: 0.75})
    labels = {domain: kinds[0].label for domain, kinds in both.domains.items()}
    assert labels == {"a": "python callable <lambda> for a", "b": "exact", "c": "python callable <lambda> for c"}
    rewarder = Rewarder(both)
    assert [found.reward for found in rewarder([sample("x", "a"), sample("x", "c")])] == [0.25, 0.75]
    rewarder.close()
    assert set(with_callables(own, len).domains) == {"default"}
    for wrong in ({}, {"a": 1}, {1: len}, "numeric", 3):
        with pytest.raises(RecipeError, match="function of one sample"):
            with_callables(own, wrong)  # type: ignore[arg-type]


def test_a_run_records_its_callables_and_asks_for_them_again(tmp_path: Path) -> None:
    student = save_tiny(tmp_path / "student")
    recipe = {
        "student": student,
        "teachers": {"t": student},
        "prompts": [{"source": "task:addition", "domain": "sums"}],
        "rollout": {"prompts": 2, "max_new_tokens": 4},
        "train": {"steps": 2},
        "eval": {"prompts": 2},
        "device": "cpu",
    }
    owner = os.getpid()

    def elsewhere(sample: Sample) -> float:
        return float(os.getpid() != owner)

    run = opd.run(recipe, rewards=elsewhere, out=tmp_path / "run")
    assert run.metrics[0]["reward"] == 1.0
    assert run.summary["stages"][0]["evals"]["sums"]["after"] == 1.0
    recorded = yaml.safe_load((run.directory / "resolved.yaml").read_text())["stages"][0]["rewards"]["domains"]
    assert (recorded["default"][0]["kind"], recorded["default"][0]["function"]) == ("python callable", "elsewhere")
    with pytest.raises(RunDirectoryError, match=r"python callable elsewhere.*opd\.resume\("):
        opd.resume(run.directory)
    with pytest.raises(
        RunDirectoryError, match="begun with python callable elsewhere, and not with python callable len"
    ):
        opd.resume(run.directory, rewards=len)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"python callable elsewhere cannot be read from a file.*opd\.run\("):
        opd.run(str(run.directory / "resolved.yaml"), out=tmp_path / "again")
    assert not (tmp_path / "again").exists()
    assert opd.resume(run.directory, rewards=elsewhere).metrics == run.metrics
    assert opd.run(recipe, rewards=elsewhere, out=run.directory, resume=True).metrics == run.metrics
    broken: dict[str, Any] = {"sums": lambda sample: "high"}
    with pytest.raises(
        RecipeError, match=r"python callable <lambda> gives no reward in domain 'sums'.*could not convert"
    ):
        opd.run(recipe, rewards=broken, out=tmp_path / "broken")
    assert not (tmp_path / "broken").exists()
