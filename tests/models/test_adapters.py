"""Directories that hold an adapter are models: merged into the base they name, or rejected with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import opd
from opd.common.errors import ModelError
from opd.models import load_model, load_tokenizer, parameter_count
from opd.models.attention import Packed
from opd.models.load import CONFIG, WEIGHTS_FILE, smol_models
from opd.recipe import Lora
from opd.recipe.paths import with_absolute_paths
from tests.support.helpers import save_tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/, and whole/ with the merged model and its adapter/, which names its base by a relative path."""
    root = tmp_path_factory.mktemp("adapters")
    save_tiny(root / "base")
    model = load_model(str(root / "base"), lora=Lora(rank=4, alpha=8))
    with torch.no_grad():
        for name, parameter in model.trainable().items():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    model.save(root / "whole")
    change(root / "whole" / "adapter", base_model_name_or_path="../../base")
    return root


def change(adapter: Path, **settings: object) -> Path:
    config = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))
    (adapter / CONFIG).write_text(json.dumps(config | settings), encoding="utf-8")
    return adapter


def copy(adapter: Path, to: Path) -> Path:
    to.mkdir()
    for name in (CONFIG, WEIGHTS_FILE):
        (to / name).write_bytes((adapter / name).read_bytes())
    return to


def logits(name: str) -> torch.Tensor:
    model = load_model(name)
    with torch.no_grad():
        return model.project(model.hidden(torch.arange(2, 12), Packed.of([10]))).logits()


def test_an_adapter_is_the_model_it_was_saved_with(saved: Path) -> None:
    adapted, whole = logits(str(saved / "whole" / "adapter")), logits(str(saved / "whole"))
    torch.testing.assert_close(adapted, whole, atol=1e-5, rtol=1e-5)
    assert (adapted - logits(str(saved / "base"))).abs().max() > 0.1
    assert parameter_count(str(saved / "whole" / "adapter")) == parameter_count(str(saved / "base"))
    assert load_tokenizer(str(saved / "whole" / "adapter")).eos_token == "<eos>"


def test_an_adapter_may_be_the_student(saved: Path, tmp_path: Path) -> None:
    """Without `lora` all of its weights are trained, with it the new ones alone."""
    name = str(saved / "whole" / "adapter")
    assert load_model(name).trainable().keys() == load_model(str(saved / "whole")).trainable().keys()
    assert all("lora_" in key for key in load_model(name, lora=Lora(rank=2)).trainable())
    recipe = {"student": name, "teachers": str(saved / "base"), "prompts": "task:addition", "train": {"steps": 1},
              "rollout": {"prompts": 2, "max_new_tokens": 4}, "eval": {"prompts": 0}, "device": "cpu"}  # fmt: skip
    assert opd.run(recipe, out=tmp_path / "run").metrics[0]["grad_norm"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_model_name_or_path": None}, "names no base model"),
        ({"base_model_name_or_path": "./gone"}, "no such directory"),
        ({"base_model_name_or_path": "self"}, "is an adapter too"),
    ],
)
def test_a_base_that_cannot_be_used_is_named(
    saved: Path, tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    adapter = change(copy(saved / "whole" / "adapter", tmp_path / "adapter"), **settings)
    if settings["base_model_name_or_path"] == "self":
        change(adapter, base_model_name_or_path=str(saved / "whole" / "adapter"))
    with pytest.raises(ModelError, match=message):
        load_model(str(adapter))


def test_pickled_adapters_are_not_opened(saved: Path, tmp_path: Path) -> None:
    adapter = copy(saved / "whole" / "adapter", tmp_path / "adapter")
    (adapter / WEIGHTS_FILE).rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match="pickled weights are never opened"):
        load_model(str(adapter))


def test_shipped_adapters_name_their_base_and_are_no_paths() -> None:
    assert smol_models()
    for name, directory in smol_models().items():
        assert json.loads((directory / CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"] == "smol"
        assert with_absolute_paths(name, Path("/"), ("student",)) == name
    with pytest.raises(ModelError, match="smol/words"):
        load_tokenizer("smol/nope")
