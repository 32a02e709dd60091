"""The shipped tiny models: intact, small, as able and as forgetful as promised, and reproducible."""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from opd.common.errors import ModelError
from opd.data.tasks import Task
from opd.runner import tiny_models

ROOT = Path(str(resources.files("opd") / "models" / "tiny"))
MANIFEST = json.loads((ROOT / "manifest.json").read_text(encoding="utf-8"))
SPECIALISTS = tuple(tiny_models.DOMAINS)
NAMES = ("generalist", *SPECIALISTS, "pairs")
HOME = {name: name for name in SPECIALISTS} | {"pairs": "arithmetic"}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load(name: str) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(ROOT / name, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(ROOT / name)


def greedy_score(model: Any, tokenizer: Any, task: Task, n: int) -> float:
    prompts = [task.prompt("heldout", index) for index in range(n)]
    texts = [tokenizer.apply_chat_template(p.messages, add_generation_prompt=True, tokenize=False) for p in prompts]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    out = model.generate(**inputs, max_new_tokens=9, do_sample=False)
    answers = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(task.verify(p, text) for p, text in zip(prompts, answers, strict=True)) / n


def test_files_match_the_manifest_and_are_small() -> None:
    assert tuple(MANIFEST["models"]) == NAMES
    for name, facts in MANIFEST["models"].items():
        found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (ROOT / name).iterdir()}
        assert found == facts["sha256"]
        assert {
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        } <= set(found)
    assert sum(path.stat().st_size for path in ROOT.rglob("*") if path.is_file()) <= 12e6


def test_tokenizer_covers_english_and_renders_chats() -> None:
    model, tokenizer = load("generalist")
    text = "".join(map(chr, range(32, 127))) + "\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]
    chat = [{"role": "user", "content": "add 12+30"}, {"role": "assistant", "content": "42"}]
    assert tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, tokenize=False) == "add 12+30="
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "add 12+30=42<eos>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert model.config.max_position_embeddings >= 256


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_as_promised(name: str) -> None:
    model, tokenizer = load(name)
    low, high = MANIFEST["thresholds"]["generalist"]
    before = MANIFEST["models"]["generalist"]["scores"]
    counts = {domain: 500 if domain == HOME.get(name) else 200 for domain in tiny_models.DOMAINS}
    scores = {
        domain: tiny_models.accuracy(model, tiny_models.task_rows(tokenizer, task, "heldout", 0, counts[domain]))
        for domain, task in tiny_models.DOMAINS.items()
    }
    if name == "generalist":
        assert all(low <= value <= high for value in scores.values()), scores
    else:
        assert scores[HOME[name]] >= MANIFEST["thresholds"]["specialist"], scores
        drops = [before[domain] - scores[domain] for domain in SPECIALISTS if domain != HOME[name]]
        assert min(drops) > 0, scores
        assert sum(drops) / len(drops) >= MANIFEST["thresholds"]["forgotten"], scores


def test_one_pass_scores_like_real_decoding() -> None:
    model, tokenizer = load("generalist")
    for task in tiny_models.DOMAINS.values():
        one_pass = tiny_models.accuracy(model, tiny_models.task_rows(tokenizer, task, "heldout", 0, 200))
        assert abs(greedy_score(model, tokenizer, task, 200) - one_pass) <= 0.01  # left padding rounds differently


@pytest.mark.slow
def test_building_twice_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_models, "EVAL_PROMPTS", 20)
    first = tiny_models.build(tmp_path / "a", only=("generalist", "sorting"), steps=2)
    second = tiny_models.build(tmp_path / "b", only=("generalist", "sorting"), steps=2)
    assert first == second
    assert first["models"]["generalist"]["sha256"] != first["models"]["sorting"]["sha256"]
    assert json.loads((tmp_path / "a" / "manifest.json").read_text(encoding="utf-8")) == first


def test_unknown_model_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'poet': no such model"):
        tiny_models.build(tmp_path, only=("poet",))
