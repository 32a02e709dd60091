"""The hub where there is none: refused in one sentence, at once; and models kept at the commit a run began with."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import huggingface_hub.constants
import pytest

from opd.config import Hub, Stage
from opd.data.sources import open_source
from opd.errors import DataError, ModelError, RecipeError
from opd.models import load_config
from opd.models.load import locate
from opd.runner import inputs
from opd.runner.hub import push, require_access

NOWHERE = "http://127.0.0.1:9"  # nobody listens


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", NOWHERE)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_test")


def stage(**changes: object) -> Stage:
    return Stage.model_validate({"student": "org/nmae", "prompts": ["task:addition"]} | changes)


def test_a_misspelt_name_is_refused_at_once(offline: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "huggingface_hub"):
        for ask in (lambda: load_config("org/nmae"), lambda: inputs.inputs_of([stage()], print)):
            with pytest.raises(ModelError, match=r"'org/nmae'.*no answer from http://127.0.0.1:9.*Check the spelling"):
                ask()
        with pytest.raises(DataError, match=r"'rows.jsnl'.*no answer from http://127.0.0.1:9.*Check the spelling"):
            open_source(stage(prompts=[{"source": "rows.jsnl"}]).prompts[0])
    assert "Retrying" not in caplog.text


def test_a_push_without_a_network_is_refused_at_the_start_and_told_at_the_end(
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
    loaded = inputs.pinned(spec, recorded)
    assert (loaded.student.revision, loaded.teachers["t"].revision) == ("a" * 40, "b" * 40)
    assert locate(loaded.student.model, loaded.student.revision).arguments["revision"] == "a" * 40
