"""Shapes of models for a plan on paper: of what is on this machine, of the hub's cache, or as they are given. Nothing is asked
of a network, and no torch is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from opd.config import parse_yaml
from opd.config.cluster import ModelSize
from opd.errors import ModelError, UserError
from opd.models.directory import read_json, stored_tensors
from opd.models.load import weights_directory
from opd.runner.cost import ModelShape
from opd.settings import by_hand

VOCABULARY = 151_936  # of a model that says nothing about it
TIED = 4e9  # parameters below which the head usually is the embedding
KEY_VALUES = 2048  # eight heads of 128, keys and values


def given_sizes(options: list[str]) -> dict[str, ModelSize]:
    """`NAME=32B`, or `NAME={parameters: 671B, active: 37B, width: 7168}`."""
    found = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not name or not equals or not value:
            raise UserError(f"--size {option!r}: expected NAME=PARAMETERS, for example student=32B.")
        size = parse_yaml(value, f"--size {name}") if value.startswith("{") else value
        found[name] = by_hand(f"--size {name}", ModelSize, size)
    return found


def guessed(size: ModelSize) -> ModelShape:
    """What a model of so many parameters usually looks like, where it was not told."""
    active = size.active or size.parameters
    width = size.width or max(64, 128 * round((active * 80 / 12) ** (1 / 3) / 128))
    vocabulary = size.vocabulary or VOCABULARY
    tied = size.tied if size.tied is not None else size.parameters < TIED
    inside = max(active - vocabulary * width * (1 if tied else 2), active // 10)
    layers = size.layers or max(1, round(inside / (12 * width**2)))
    kept = size.key_values or min(KEY_VALUES, 2 * width)
    return ModelShape(size.parameters, width, layers, vocabulary, kept, active, tied)


def shape_of(model: str, revision: str | None, sizes: Mapping[str, ModelSize], called: str) -> ModelShape:
    """`called`: the part that the model plays, by which --size may name it, too."""
    size = sizes.get(called) or sizes.get(model)
    if size is not None:
        return guessed(size)
    try:
        directory = weights_directory(model, revision)
    except ModelError as error:
        raise ModelError(f"{error} To plan without it, give its size: --size {called}=32B.") from None
    if directory is None or not (directory / "config.json").is_file():
        raise ModelError(
            f"model {model!r} ({called}) is not on this machine, so its size is not known. Give it: --size {called}=32B, or "
            f"in the recipe, cluster: {{sizes: {{{model}: 32B}}}}."
        )
    return of_directory(directory)


def of_directory(directory: Path) -> ModelShape:
    """Of its config, and of the headers of its weight files where they are here."""
    raw = read_json(directory / "config.json")
    raw = raw.get("text_config", raw)
    names = {"hidden_size": ("n_embd", "d_model"), "num_hidden_layers": ("n_layer", "num_layers"), "vocab_size": ()}
    for name, others in names.items():
        found = next((raw[key] for key in (name, *others) if isinstance(raw.get(key), int)), None)
        if found is None:
            raise ModelError(f"{directory / 'config.json'} says nothing about {name}. Give the size: --size NAME=32B.")
        raw[name] = found
    config = SimpleNamespace(**{"tie_word_embeddings": True, **raw})
    everything, active = _counted(config)
    if any(directory.glob("*.safetensors")):
        stored = sum(stored_tensors(directory).values())
        active, everything = math.ceil(stored * active / everything), stored
    return ModelShape.of(config, everything, active)


def _counted(config: Any) -> tuple[int, int]:
    """Parameters, and those that one token goes through, of a decoder with gated layers."""

    def number(*names: str) -> int:
        return next((int(value) for name in names if isinstance(value := vars(config).get(name), int) and value), 0)

    width, layers = config.hidden_size, config.num_hidden_layers
    queries = number("num_attention_heads", "n_head") or 1
    head = number("head_dim") or width // queries
    attention = 2 * width * head * (queries + (number("num_key_value_heads") or queries))
    inner = number("intermediate_size") or 4 * width
    experts, chosen = number("num_experts", "n_routed_experts", "num_local_experts"), number("num_experts_per_tok") or 1
    each = 3 * width * (number("moe_intermediate_size") or inner)
    shared = each * number("n_shared_experts")
    outside = config.vocab_size * width * (1 if config.tie_word_embeddings else 2)
    dense = min(number("first_k_dense_replace"), layers) if experts else layers
    everything = outside + layers * attention + dense * 3 * width * inner + (layers - dense) * (shared + experts * each)
    active = outside + layers * attention + dense * 3 * width * inner + (layers - dense) * (shared + chosen * each)
    return everything, active
