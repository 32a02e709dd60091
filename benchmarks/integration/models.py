"""Models of an edition as small files: adapters in bfloat16 over a base that can be built again from one of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from integration.domains import Split, read, right

if TYPE_CHECKING:
    from opd.models.language_model import LanguageModel
    from opd.rollouts.rollouter import Sampler

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def pack(adapter: Path, to: Path, base: str) -> None:
    """An adapter rounded to bfloat16: half the size, and what is carried along is what was measured."""
    import torch
    from safetensors.torch import load_file, save_file

    to.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(adapter / WEIGHTS).items()}
    save_file(tensors, to / WEIGHTS)
    config = json.loads((adapter / CONFIG).read_text(encoding="utf-8")) | {"base_model_name_or_path": base}
    (to / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def unpack(model: str, to: Path) -> Path:
    """A model as a plain directory, in bfloat16."""
    if not (to / "config.json").is_file():
        import opd

        _save(opd.load_model(model, device="cpu"), to)
    return to


def build(adapter: Path, to: Path) -> Path:
    """The adapter's weights merged into its base on a CPU, in bfloat16: the same bytes wherever it is built."""
    if not (to / "config.json").is_file():
        import opd

        _save(opd.load_model(str(adapter), device="cpu"), to)
    return to


def _save(model: LanguageModel, to: Path) -> None:
    import torch

    model.module.to(torch.bfloat16)
    partial = to.with_name(to.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save(partial)
    partial.rename(to)


def _sampler(model: str, settings: dict[str, Any]) -> Sampler:
    """Greedy, unless `settings` say otherwise."""
    import opd

    return opd.Sampler(
        opd.load_model(model, device=settings["device"], dtype=settings["dtype"]),
        max_new_tokens=settings["max_new_tokens"],
        temperature=settings.get("temperature", 0.0),
        settings=settings["sampler"],
    )


def write_answers(model: str, data: Path, domain: str, settings: dict[str, Any], to: Path) -> None:
    """The rows for training with the model's own answers, one sample each, as a dataset. Those that did not end, or say nothing, are left out."""
    import opd

    rows = read(data, domain, "train")
    sampler = _sampler(model, settings | {"temperature": 1.0})
    prompts = [
        opd.Prompt(id=str(number), domain=domain, messages=tuple(row["prompt"])) for number, row in enumerate(rows)
    ]
    ended = [rollout for rollout in sampler.sample(prompts) if rollout.stop == "stop"]
    said = [(rows[int(rollout.prompt_id)], sampler.text(rollout)) for rollout in ended]
    lines = [json.dumps(row | {"completion": text}) + "\n" for row, text in said if text.strip()]
    partial = to.with_suffix(".partial")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(to)


def marks(model: str, data: Path, domains: list[str], split: Split, settings: dict[str, Any]) -> dict[str, Any]:
    """Answers to a split: by domain one digit per prompt in the order of the file, how many of its samples are right (of
    one, greedy, unless `settings` say otherwise); tokens per answer; and, where they are asked for, the answers.
    """
    import opd

    sampler = _sampler(model, settings)
    found: dict[str, str] = {}
    tokens: dict[str, float] = {}
    texts: dict[str, list[str]] = {}
    for domain in domains:
        rows = read(data, domain, split)[: settings["prompts"]]
        prompts = [
            opd.Prompt(id=f"{domain}/{split}/{number}", domain=domain, messages=tuple(row["prompt"]))
            for number, row in enumerate(rows)
        ]
        counts = dict.fromkeys((prompt.id for prompt in prompts), 0)
        references = {prompt.id: row["answer"] for prompt, row in zip(prompts, rows, strict=True)}
        rollouts = sampler.sample(prompts, settings.get("samples", 1))
        for rollout in rollouts:
            texts.setdefault(domain, []).append(sampler.text(rollout))
            counts[rollout.prompt_id] += right(texts[domain][-1], references[rollout.prompt_id])
        found[domain] = "".join(map(str, counts.values()))
        tokens[domain] = sum(rollout.response_ids.size for rollout in rollouts) / len(rollouts)
    return {"marks": found, "tokens": tokens} | ({"answers": texts} if settings.get("answers") else {})
