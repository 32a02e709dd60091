"""Teachers that scored once: stages that only score, rollouts that are replayed, and training without the teacher's model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import opd
from opd.common.errors import DataError, RecipeError, RunDirectoryError
from opd.models import load_model
from opd.models.load import export
from opd.records import Author, SignalNeed

DIRECT = {"form": "direct", "divergence": "reverse_kl"}
SAMPLED = {"form": "policy_gradient", "advantage": {"student": "proximal"}}
VIEW = {"kind": "template", "template": "The answer is {answer}. {prompt}"}


def recipe(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """A run that only scores: two groups of two in each of two steps."""
    teacher = tmp_path / "teacher"
    if not teacher.exists():
        export("tiny/arithmetic", teacher)
    given: dict[str, Any] = {
        "name": "score",
        "student": "tiny/generalist",
        "teachers": {"arithmetic": {"model": str(teacher)}},
        "prompts": [{"source": "task:addition", "domain": "arithmetic"}],
        "rollout": {"prompts": 4, "samples": 2, "max_new_tokens": 6},
        "sampler": {"slots": 8},
        "objective": DIRECT,
        "train": {"steps": 2, "learn": False},
        "eval": {"prompts": 0},
        "device": "cpu",
        "threads": 1,
    }
    return given | changes


def scored(tmp_path: Path, **changes: Any) -> opd.Run:
    return opd.run(recipe(tmp_path, **changes), out=tmp_path / "scored")


def from_cache(tmp_path: Path, cached: bool = True, **changes: Any) -> dict[str, Any]:
    """Two steps over the same rollouts, with their scores or with the teacher itself."""
    there, given = str(tmp_path / "scored"), recipe(tmp_path, train={"steps": 2, "lr": 1e-3}, **changes)
    kind = {"kind": "cached", "run": there} if cached else {}
    given["teachers"] = {name: {**settings, **kind} for name, settings in given["teachers"].items()}
    return {**given, "name": "train", "prompts": [{"source": f"run:{there}"}]}


def weights(run: opd.Run) -> dict[str, torch.Tensor]:
    return load_file(run.model / "model.safetensors")


@pytest.mark.parametrize(
    ("objective", "view"),
    [pytest.param(DIRECT, VIEW, id="hidden"), pytest.param(SAMPLED, None, id="logprobs", marks=pytest.mark.slow)],
)
def test_training_from_scores_equals_training_with_the_teacher(
    objective: dict[str, Any], view: dict[str, Any] | None, tmp_path: Path
) -> None:
    teachers = {"arithmetic": {"model": str(tmp_path / "teacher"), **({"view": view} if view else {})}}
    shared = {
        "teachers": teachers,
        "objective": objective,
        "rollout": {"prompts": 8, "samples": 2, "max_new_tokens": 6},
    }
    first = scored(tmp_path, **shared, train={"steps": 1, "learn": False})
    assert [line["loss"] for line in first.metrics] == [None]
    assert all(torch.equal(tensor, weights(first)[name]) for name, tensor in load_file(untouched()).items())
    live = opd.run(from_cache(tmp_path, cached=False, **shared), out=tmp_path / "live")
    shutil.rmtree(tmp_path / "teacher")  # from here on, nobody could load it
    without = from_cache(tmp_path, **shared)
    without["teachers"]["arithmetic"].pop("model")
    cached = opd.run(without, out=tmp_path / "cached")
    assert [line["loss"] for line in live.metrics] == pytest.approx([line["loss"] for line in cached.metrics], abs=1e-6)
    assert live.metrics[0]["loss"] == cached.metrics[0]["loss"]  # all rollouts in one batch, as they were scored
    for name, tensor in weights(live).items():
        torch.testing.assert_close(tensor, weights(cached)[name], atol=1e-6, rtol=0)


def untouched() -> Path:
    from opd.models.load import tiny_models

    return tiny_models()["tiny/generalist"] / "model.safetensors"


def test_replayed_rollouts_are_those_of_the_run_token_by_token(tmp_path: Path) -> None:
    first = scored(tmp_path)
    again = opd.run(from_cache(tmp_path), out=tmp_path / "again")
    drawn = {(found.prompt_id, found.sample): found for found in first.rollouts.where()}
    replayed = list(again.rollouts.where())
    assert len(replayed) == len(drawn) == 16
    for rollout in replayed:
        origin = drawn[rollout.prompt_id, rollout.sample]
        assert rollout.source == "replay"
        assert (rollout.author == Author.STUDENT).all()
        for name in ("prompt_ids", "response_ids", "logprob", "logprob_sampled", "logprob_stop", "version", "author"):
            assert np.array_equal(getattr(rollout, name), getattr(origin, name), equal_nan=True)
    more = opd.run({**from_cache(tmp_path), "train": {"steps": 4}}, out=tmp_path / "more")  # a second pass over them
    assert len(more.rollouts.where(visit=1)) == 16


@pytest.mark.slow
def test_stages_of_one_run_score_and_train_and_a_killed_one_resumes(tmp_path: Path) -> None:
    small = ["rollout.prompts=4", "sampler.slots=8", "stages.0.train.steps=2", "stages.1.train.steps=2"]
    small += ["stages.1.eval.prompts=4", "device=cpu", "threads=1"]
    whole = opd.run("methods/lightning", overrides=small, out=tmp_path / "whole")

    def stop(live: Any, metrics: dict[str, Any]) -> None:
        if (metrics["stage"], metrics["step"]) in (("score", 1), ("train", 1)):
            live.stop()

    run = opd.run("methods/lightning", overrides=small, out=tmp_path / "parts", on_step=stop)
    run = opd.resume(run.directory, on_step=stop)
    run = opd.resume(run.directory)
    assert [line["stage"] for line in run.metrics] == ["score", "score", "train", "train"]
    assert [line["loss"] for line in run.metrics] == [line["loss"] for line in whole.metrics]
    assert run.metrics[2]["reverse_kl"] is not None


STALE: dict[str, tuple[dict[str, Any], str]] = {
    "weights": ({"model": "tiny/spelling"}, "the weights differs"),
    "view": ({"view": VIEW}, "the view differs"),
    "stage": ({"stage": "other"}, "no stage 'other'"),
    "teacher": ({"teacher": "spelling"}, "Say whose are meant"),
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    scored(folder)
    return folder


@pytest.mark.parametrize("what", STALE)
def test_a_stale_key_is_an_error_that_says_which_part_differs(what: str, kept: Path, tmp_path: Path) -> None:
    changes, message = STALE[what]
    given = from_cache(kept)
    given["teachers"]["arithmetic"] |= changes
    with pytest.raises(DataError, match=message):
        opd.run(given, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_of_equal_answers_the_one_that_read_the_same_counts(kept: Path) -> None:
    teacher: Any = opd.Teacher({"kind": "cached", "run": str(kept / "scored")}, load_model("tiny/generalist"))
    first, *others = list(opd.Run(kept / "scored").rollouts.where())
    other = next(rollout for rollout in others if rollout.prompt_id != first.prompt_id)
    (before,) = teacher.score([first], SignalNeed("hidden"))
    for names in teacher._opened._ids.values():
        names.append(other.id)  # as if it had the same ids, and a view had shown something else
    (after,) = teacher.score([first], SignalNeed("hidden"))
    assert torch.equal(before.values, after.values)
    for names in teacher._opened._ids.values():
        names[:] = [other.id]
    with pytest.raises(DataError, match="what the view shows"):
        teacher.score([first], SignalNeed("hidden"))


def test_a_revision_is_of_a_model(kept: Path, tmp_path: Path) -> None:
    given = from_cache(kept)
    given["teachers"]["arithmetic"] = {"kind": "cached", "run": str(kept / "scored"), "revision": "main"}
    with pytest.raises(RecipeError, match="`revision` is that of `model`"):
        opd.run(given, out=tmp_path / "run")


def test_other_ids_are_an_error_that_says_which(kept: Path, tmp_path: Path) -> None:
    given = from_cache(kept) | {"prompts": [{"source": "task:addition", "domain": "arithmetic"}], "seed": 7}
    with pytest.raises(DataError, match=r"the (prompt|response)'s ids are not among those that were scored"):
        opd.run(given, out=tmp_path / "run")


def test_another_tokenizer_is_an_error(kept: Path, tmp_path: Path) -> None:
    student = tmp_path / "student"
    export("tiny/generalist", student)
    text = (student / "tokenizer.json").read_text(encoding="utf-8")
    assert '"7"' in text
    (student / "tokenizer.json").write_text(text.replace('"7"', '"§"').replace("7 ", "§ "), encoding="utf-8")
    given = from_cache(kept) | {"student": str(student)}
    with pytest.raises(DataError, match="the tokenizer differs"):
        opd.run(given, out=tmp_path / "run")


def test_scores_that_were_not_kept_are_asked_for_in_vain(kept: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="logprobs_at is needed, and teacher 'arithmetic' stored hidden"):
        opd.run(from_cache(kept) | {"objective": SAMPLED}, out=tmp_path / "run")


def test_a_run_that_trains_keeps_no_scores_and_says_how_to(tmp_path: Path) -> None:
    opd.run(recipe(tmp_path, train={"steps": 1}), out=tmp_path / "scored")
    with pytest.raises(DataError, match="learn: false"):
        opd.run(from_cache(tmp_path), out=tmp_path / "run")
    again = recipe(tmp_path, prompts=[{"source": f"run:{tmp_path / 'scored'}"}], train={"steps": 1, "learn": False})
    over = opd.run(again, out=tmp_path / "over")  # scored now, over the rollouts of the run that trained
    given = from_cache(tmp_path) | {"prompts": [{"source": f"run:{over.directory}"}], "train": {"steps": 1}}
    given["teachers"]["arithmetic"]["run"] = str(over.directory)
    assert opd.run(given, out=tmp_path / "trained").summary["status"] == "done"


def test_an_altered_head_and_changed_scores_are_noticed(tmp_path: Path) -> None:
    scored(tmp_path)

    def stop(live: Any, metrics: dict[str, Any]) -> None:
        live.stop()

    run = opd.run(from_cache(tmp_path), out=tmp_path / "run", on_step=stop)
    (head,) = (tmp_path / "scored" / "teachers" / "heads").iterdir()
    data = bytearray(head.read_bytes())
    data[-1] ^= 1
    head.write_bytes(bytes(data))
    with pytest.raises(RunDirectoryError, match=r"teacher arithmetic\) has changed"):
        opd.resume(run.directory)
    with pytest.raises(DataError, match="was altered"):
        opd.run(from_cache(tmp_path), out=tmp_path / "new")


def test_what_the_recipe_says_of_replayed_rollouts_has_to_be_true(kept: Path, tmp_path: Path) -> None:
    given = from_cache(kept)
    for key, value in {"samples": 4, "temperature": 0.5, "max_new_tokens": 3}.items():
        with pytest.raises(RecipeError, match=f"rollout.{key} is {value}"):
            opd.run(given | {"rollout": {**given["rollout"], key: value}}, out=tmp_path / "run")
    with pytest.raises(RecipeError, match=r"has its own answers, so rollout.data_share"):
        opd.run(given | {"rollout": {**given["rollout"], "data_share": 0.5}}, out=tmp_path / "run")
    growing = {"length_schedule": {"kind": "line", "start": 2}}
    with pytest.raises(RecipeError, match=r"has its own answers, so rollout.length_schedule"):
        opd.run(given | {"rollout": {**given["rollout"], **growing}}, out=tmp_path / "run")
    with pytest.raises(RecipeError, match=r"has its own answers, so rollout.teacher_prefix"):
        opd.run(given | {"rollout": {**given["rollout"], "teacher_prefix": {"tokens": 1}}}, out=tmp_path / "run")
    with pytest.raises(RecipeError, match=r"has its own answers, so rollout.rescue"):
        opd.run(given | {"rollout": {**given["rollout"], "rescue": {"view": "sibling"}}}, out=tmp_path / "run")
    with pytest.raises(RecipeError, match="no other stage is called 'nowhere'"):
        opd.run(given | {"prompts": [{"source": "stage:nowhere"}]}, out=tmp_path / "run")
    with pytest.raises(DataError, match="is not a run directory"):
        opd.run(given | {"prompts": [{"source": f"run:{tmp_path / 'none'}"}]}, out=tmp_path / "run")
