"""Checkpoints that wrap a text model with others: recognised and rejected everywhere, and their text model can be written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGES
from typer.testing import CliRunner

from opd.cli import app
from opd.common.errors import ModelError
from opd.models import load_config, load_model, load_tokenizer, parameter_count
from opd.models.load import export
from tests.support.helpers import save_tiny
from tests.support.wrappers import WRAPPERS, save_wrapper

STANDING_ALONE = [name for name, (_, text) in WRAPPERS.items() if text]


@pytest.mark.parametrize("model_type", WRAPPERS)
def test_a_wrapper_is_named_as_one_before_anything_is_built(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = save_wrapper(model_type, tmp_path / "w")
    monkeypatch.setattr("opd.models.load.empty_model", lambda config: pytest.fail("a model was built"))
    for load in (load_config, load_model, parameter_count):
        with pytest.raises(ModelError, match=f"is a {type(stock).__name__}: a wrapper around the text model") as caught:
            load(str(tmp_path / "w"))
        wanted = WRAPPERS[model_type][1]
        assert ("opd models export" in str(caught.value)) == bool(wanted)
        assert (wanted or "ends in ForCausalLM") in str(caught.value)


@pytest.mark.parametrize("model_type", STANDING_ALONE)
def test_the_text_model_of_a_wrapper_says_what_the_wrapper_says(model_type: str, tmp_path: Path) -> None:
    stock = save_wrapper(model_type, tmp_path / "w")
    export(str(tmp_path / "w"), tmp_path / "text")
    assert type(load_model(str(tmp_path / "text")).module).__name__ == WRAPPERS[model_type][1]
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    ids = torch.randint(4, 70, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = stock(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        torch.testing.assert_close(alone(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-4)
    assert (
        load_tokenizer(str(tmp_path / "text"))("1+1=").input_ids
        == load_tokenizer(str(tmp_path / "w"))("1+1=").input_ids
    )


@pytest.mark.parametrize("model_type", sorted(WRAPPERS.keys() - set(STANDING_ALONE)))
def test_a_text_model_that_cannot_stand_alone_is_not_written(model_type: str, tmp_path: Path) -> None:
    save_wrapper(model_type, tmp_path / "w")
    with pytest.raises(ModelError):
        export(str(tmp_path / "w"), tmp_path / "text")
    assert not (tmp_path / "text").exists()


def test_a_text_model_that_differs_from_its_wrapper_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_wrapper("llava", tmp_path / "w")
    forward = LlamaForCausalLM.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = 2 * out.logits
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", doubled)
    with pytest.raises(ModelError, match="gives other logits than LlavaForConditionalGeneration"):
        export(str(tmp_path / "w"), tmp_path / "text")
    assert not (tmp_path / "text").exists()


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_a_run_and_a_dry_run_say_it_without_a_traceback(role: str, tmp_path: Path) -> None:
    save_wrapper("gemma3", tmp_path / "w")
    save_tiny(tmp_path / "plain")
    wrapped, plain = json.dumps(str(tmp_path / "w")), json.dumps(str(tmp_path / "plain"))
    student, teacher = (wrapped, plain) if role == "student" else (plain, wrapped)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"student: {student}\nteachers: {{t: {teacher}}}\nprompts: task:addition\ntrain: {{steps: 1}}\ndevice: cpu\n"
    )
    for more in (["--dry-run"], ["--out", str(tmp_path / "run")]):
        found = CliRunner().invoke(app, ["run", str(recipe), *more])
        said = found.output + repr(found.exception)
        assert "Gemma3ForConditionalGeneration: a wrapper around the text model" in said, said
        assert "Traceback" not in said


@pytest.mark.slow
def test_every_wrapper_for_images_that_transformers_knows_is_recognised(tmp_path: Path) -> None:
    """By its default config alone; those whose default config needs files of the hub are left out."""
    found = {}
    for model_type, architecture in IMAGES.items():
        cls = CONFIG_MAPPING[model_type]
        if "text_config" not in cls.sub_configs:
            continue
        directory = tmp_path / model_type
        config = cls(architectures=[architecture])
        config.save_pretrained(directory)
        save_file({f"t{number}": torch.zeros(1) for number in range(200)}, directory / "model.safetensors")
        with pytest.raises(ModelError) as caught:
            load_config(str(directory))
        found[model_type] = "a wrapper around the text model" in str(caught.value)
    assert len(found) > 40
    assert all(found.values()), [name for name, right in found.items() if not right]
