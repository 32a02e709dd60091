"""What no gradient reaches is told before a run and by `--dry-run`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opd.cli import app
from opd.models.load import untrained_notes
from opd.recipe import Lora
from tests.support.families import family_named
from tests.support.helpers import tiny_tokenizer

TOLD = "indexers, which choose the tokens that attention reads, are not trained (model.layers.0.self_attn.indexer."


def save(name: str, directory: Path) -> str:
    family_named(name).build().save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("name", ["DeepSeek-V3.2", "GLM-MoE-DSA"])
def test_a_dry_run_says_that_indexers_are_not_trained(name: str, tmp_path: Path) -> None:
    student = save(name, tmp_path / "m")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"1+{number}="}) + "\n" for number in range(40)))
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"student: {json.dumps(student)}\nteachers: {{t: {json.dumps(student)}}}\nprompts: {json.dumps(str(prompts))}\ntrain: {{steps: 1}}\n"
        "device: cpu\n"
    )
    found = CliRunner().invoke(app, ["run", str(recipe), "--dry-run"])
    assert found.exit_code == 0, found.output
    assert TOLD in " ".join(found.output.split())


def test_a_fully_trained_model_has_no_such_note() -> None:
    assert not untrained_notes(family_named("Llama").build(), None)
    assert not untrained_notes(family_named("DeepSeek-V3").build(), None)


def test_with_adapters_only_targets_that_learn_nothing_are_reported() -> None:
    module = family_named("DeepSeek-V3.2").build()
    (note,) = untrained_notes(module, Lora(rank=2))
    assert "adapters on them learn nothing" in note
    assert not untrained_notes(module, Lora(rank=2, targets=["gate_proj", "up_proj"]))
