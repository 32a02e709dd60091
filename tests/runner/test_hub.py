"""The hub where there is none: rejected in one sentence, at once; and models kept at the commit a run began with."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.utils import filter_repo_objects

from opd.cluster.on_ray import ServerWorker, commits_of, served_name
from opd.common.errors import DataError, ModelError, RecipeError, UserError
from opd.common.files import SEALS, write_sealed
from opd.data.sources import DatasetPrompts, open_source
from opd.models import load_config, load_model
from opd.models.load import locate
from opd.recipe import Hub, Stage
from opd.runner import inputs
from opd.runner.checkpoint import push, require_access
from opd.runner.checks import check_stage
from opd.runner.stage import open_stage
from opd.serve import server as serving
from opd.serve.server import ServeSettings
from opd.store import RolloutStore
from opd.teachers.kinds import ModelRef, ModelTeacher, TeacherInputs
from opd.teachers.scoring import LocalTeacher
from tests.support.helpers import save_tiny

NOWHERE = "http://127.0.0.1:9"  # nobody listens


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", NOWHERE)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_test")


def stage(**changes: object) -> Stage:
    return Stage.model_validate({"student": "org/nmae", "prompts": ["task:addition"]} | changes)


def two_commits(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with a model that is at commit a…, and has a later one, b…."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    root = cache / "models--org--name"
    for number, commit in enumerate("ab"):
        save_tiny(root / "snapshots" / (commit * 40), seed=number)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("a" * 40)
    return root


def test_a_misspelt_name_is_rejected_at_once(offline: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "huggingface_hub"):
        for ask in (lambda: load_config("org/nmae"), lambda: inputs.inputs_of([stage()], print)):
            with pytest.raises(ModelError, match=r"'org/nmae'.*no answer from http://127.0.0.1:9.*Check the spelling"):
                ask()
        with pytest.raises(DataError, match=r"'rows.jsnl'.*no answer from http://127.0.0.1:9.*Check the spelling"):
            open_source(stage(prompts=[{"source": "rows.jsnl"}]).prompts[0])
    assert "Retrying" not in caplog.text


def test_a_push_without_a_network_is_rejected_at_the_start_and_reported_at_the_end(
    offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)  # a push tries again and again
    with pytest.raises(RecipeError, match=r"hub.repo 'me/mine' cannot be written to"):
        require_access(stage(hub={"repo": "me/mine"}))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert "hf upload me/mine" in str(push(tmp_path / "model", Hub(repo="me/mine")))


def cached(root: Path, *commits: str) -> Path:
    for commit in commits:
        (root / "snapshots" / commit).mkdir(parents=True)
        (root / "snapshots" / commit / "config.json").write_text("{}")
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(commits[0])
    return root


def test_the_base_of_an_adapter_stays_at_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    root, adapter = cached(tmp_path / "models--org--base", "a" * 40, "b" * 40), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    spec = stage(student=str(adapter), teachers={"t": {"model": "org/base", "revision": "b" * 40}})
    recorded = inputs.inputs_of([spec], print)["main"]
    assert {name: facts.get("commit") for name, facts in recorded.items() if name.startswith("hub:")} == {
        "hub:org/base": "a" * 40,
        f"hub:org/base@{'b' * 40}": "b" * 40,
    }
    (root / "refs" / "main").write_text("b" * 40)
    found = inputs.revision_begun_with(recorded, str(adapter), None)
    assert (found, inputs.revision_begun_with(recorded, "org/base", "b" * 40)) == ("a" * 40, "b" * 40)
    assert locate(str(adapter), found).arguments["revision"] == "a" * 40


def test_servers_of_a_cluster_have_the_commit_a_run_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = two_commits(tmp_path, monkeypatch)
    spec = stage(student="tiny/spelling", teachers={"t": "org/name"})
    assert commits_of(["org/name", "tiny/spelling"], tmp_path / "run") == {"org/name": "a" * 40}
    (tmp_path / "run").mkdir()
    write_sealed(tmp_path / "run" / SEALS, {"inputs": inputs.inputs_of([spec], print)})
    (root / "refs" / "main").write_text("b" * 40)
    commits = commits_of(["org/name", "tiny/spelling"], tmp_path / "run")
    assert commits == {"org/name": "a" * 40}
    command = ServerWorker(["tiny/spelling", "org/name"], "token", "cpu", "float32", None, commits)._command
    name = served_name("org/name")
    assert command[command.index("--revision") + 1] == f"{name}={'a' * 40}"
    named, settings = {name: "org/name", "newest": "org/name"}, ServeSettings(device="cpu")
    served = serving._load(named, serving._revisions([f"{name}={'a' * 40}"], named), settings, print)
    begun, newest = served[name], served["newest"]
    own = load_model(str(root / "snapshots" / ("a" * 40)))
    assert torch.equal(begun.head.weight, own.head.weight)
    assert not torch.equal(newest.head.weight, own.head.weight)
    with pytest.raises(UserError, match="expected NAME=REVISION"):
        serving._revisions(["other=main"], named)


class Borrowed(ModelTeacher):
    """A kind of one's own, which names its model as it likes."""

    name = "borrowed"
    lender: str

    def reads(self) -> tuple[ModelRef, ...]:
        return (ModelRef(self.lender),)

    def make(self, name: str, supplies: TeacherInputs) -> LocalTeacher:
        return LocalTeacher(name, self.role, supplies.load(*self.reads()), self.batch_tokens, supplies.stop_ids)


def test_teachers_of_every_kind_stay_at_the_commit_a_run_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = two_commits(tmp_path, monkeypatch)
    student = str(root / "snapshots" / ("a" * 40))
    spec = stage(student=student, sampler={"slots": 2}, eval={"prompts": 0}, teachers={"t": "org/name"}, device="cpu")
    spec = spec.model_copy(update={"teachers": {"t": Borrowed(lender="org/name")}})
    recorded = inputs.inputs_of([spec], print)["main"]
    (root / "refs" / "main").write_text("b" * 40)
    run = open_stage(
        spec,
        RolloutStore(tmp_path / "rollouts"),
        revision_of=partial(inputs.revision_begun_with, recorded),
    )
    (teacher,), own = run.teachers.values(), run.student.module.state_dict()
    assert all(bool((value == own[name]).all()) for name, value in teacher.model.module.state_dict().items())


def test_every_revision_of_a_model_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    root = tmp_path / "models--org--name"
    fine, broken = "a" * 40, "b" * 40
    save_tiny(root / "snapshots" / fine)
    save_tiny(root / "snapshots" / broken)
    (root / "snapshots" / broken / "config.json").write_text("{}")
    revisions = {"one": broken, "two": fine}
    teachers = {
        name: {"model": "org/name", "revision": revision, "domains": [name]} for name, revision in revisions.items()
    }
    prompts = [{"source": "task:addition", "domain": name} for name in teachers]
    spec = stage(student=str(root / "snapshots" / fine), teachers=teachers, prompts=prompts, device="cpu")
    with pytest.raises(ModelError, match="org/name"):
        check_stage(spec, str)


def test_two_splits_of_a_dataset_are_two_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last goes by the plain name, as in runs that knew one alone."""
    monkeypatch.setattr(DatasetPrompts, "fingerprint", lambda self: self.split)
    prompts = [{"source": "org/rows", "split": split} for split in ("one", "two")]
    found = inputs.inputs_of([stage(student="tiny/generalist", prompts=prompts)], print)["main"]
    facts = {name: facts["fingerprint"] for name, facts in found.items() if "fingerprint" in facts}
    assert facts == {"org/rows#1": "one", "org/rows": "two"}


def test_a_push_leaves_what_is_not_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ignored: list[str] = []

    def refused(self: HfApi, *, ignore_patterns: list[str], **settings: object) -> None:
        ignored.extend(ignore_patterns)
        raise RuntimeError("no")

    monkeypatch.setattr(HfApi, "upload_folder", refused)
    said = str(push(tmp_path, Hub(repo="me/mine")))
    names = ["model.safetensors", "optimiser.safetensors", "teachers/weights.safetensors", "trainer.json"]
    assert list(filter_repo_objects(names, ignore_patterns=ignored)) == ["model.safetensors"]
    assert "--exclude 'teachers/*'" in said
