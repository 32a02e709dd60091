"""Adapter directories as peft writes them: low-rank weights and the name of the model they belong to.

Such a directory is a model like any other: `teachers: {maths: runs/maths/checkpoints/latest/adapter}`. Its weights are
merged into the base while it is loaded. The base is a directory (its path may be relative to the adapter's), a hub id,
a .gguf file or a built-in model.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from opd.errors import ModelError
from opd.models.directory import read_json, reading_model

CONFIG, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def smol_models() -> dict[str, Path]:
    """Adapters of SmolLM2 that come with the package."""
    root = Path(str(resources.files("opd") / "models" / "smol"))
    return {f"smol/{path.parent.name}": path.parent for path in sorted(root.glob(f"*/{CONFIG}"))}


def is_adapter(directory: Path) -> bool:
    return (directory / CONFIG).is_file() and not (directory / "config.json").is_file()


def base_of(name: str, directory: Path) -> str:
    """The model an adapter was made for."""
    with reading_model(name, "its adapter", directory):
        base = read_json(directory / CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(f"model {name!r}: {CONFIG} names no base model. Set base_model_name_or_path in it.")
    if not (directory / WEIGHTS_FILE).is_file():
        raise ModelError(f"model {name!r}: the adapter has no {WEIGHTS_FILE}; pickled weights are never opened.")
    beside = directory / base
    return str(beside) if beside.is_dir() else base


def merge_adapter(module: Any, name: str, directory: Path) -> Any:
    """The base with the adapter's weights added to its own."""
    from opd.models.lora import require_peft

    require_peft()
    from peft import PeftModel

    with reading_model(name, "its adapter", directory):
        merged = PeftModel.from_pretrained(module, str(directory), is_trainable=False).merge_and_unload(safe_merge=True)
    return merged.requires_grad_(True)  # peft has frozen the base, and a student learns with all of its weights
