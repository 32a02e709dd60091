"""A real model: SFT makes SmolLM2 a teacher, then a fresh SmolLM2 learns from it on its own samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import opd

pytestmark = [pytest.mark.smol, pytest.mark.slow]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    recipe = {
        "student": "smol", "prompts": [{"source": "task:sort", "domain": "sorting"}], "objective": {"form": "cross_entropy"},
        "rollout": {"prompts": 8, "max_new_tokens": 8, "data_share": 1.0}, "train": {"steps": 8, "lr": 1e-4, "warmup": 2},
    }  # fmt: skip
    run = opd.run(
        recipe | {"eval": {"prompts": 0}, "device": "cpu", "threads": 1},
        out=tmp_path_factory.mktemp("smol") / "teacher",
    )
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"]
    return str(run.model)


@pytest.mark.parametrize(
    ("student", "lr"),
    [({"model": "smol"}, 5e-5), ({"model": "smol", "lora": {"rank": 16}}, 1e-3)],
    ids=["full", "lora"],
)
def test_distilling_into_smol_closes_a_third_of_the_gap(student: dict, lr: float, teacher: str, tmp_path: Path) -> None:
    recipe = {
        "student": student, "teachers": {"sorting": teacher}, "prompts": [{"source": "task:sort", "domain": "sorting"}],
        "rollout": {"prompts": 8, "max_new_tokens": 8}, "train": {"steps": 8, "lr": lr, "warmup": 2},
        "sampler": {"slots": 8, "prefill_rows": 2, "prefill_chunk": 40},  # no padding to speak of
    }  # fmt: skip
    run = opd.run(recipe | {"eval": {"prompts": 0}, "device": "cpu", "threads": 1}, out=tmp_path / "run")
    kl = [line["reverse_kl"] for line in run.metrics]
    assert np.mean(kl[-2:]) < 2 / 3 * kl[0], kl
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run.model), AutoTokenizer.from_pretrained(run.model)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "sort dcba"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        assert model.generate(**ids, max_new_tokens=3, do_sample=False).shape[1] > ids["input_ids"].shape[1]
    assert (run.model / "adapter").is_dir() == ("lora" in student)
