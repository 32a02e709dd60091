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
from opd.models.directory import read_json, read_shapes, reading_model
from opd.text import first_line

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


def check_merge(name: str, directory: Path, empty: Any) -> None:
    """Refuse an adapter that lacks tensors, or has some for which its base (on the meta device, changed here) has no place.

    peft would leave the first out with a warning, and drop the others without one.
    """
    from opd.models.lora import require_peft

    require_peft()
    with reading_model(name, "its adapter", directory):
        stored = read_shapes(directory / WEIGHTS_FILE)
        wanted = wanted_shapes(name, directory, empty)
        factors = {
            key: shape for key, shape in stored.items() if key in wanted or "lora_" in key
        }  # else: embeddings saved too
        refuse_difference(name, read_json(directory / CONFIG), wanted, factors)


def wanted_shapes(name: str, directory: Path, empty: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that the adapter's config asks for with this base."""
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict

    config = PeftConfig.from_pretrained(str(directory))
    config.inference_mode = True
    try:
        model = PeftModel(empty, config)
    except ValueError as error:
        raise ModelError(
            f"adapter {name!r} does not fit its base {config.base_model_name_or_path!r}: {first_line(error)} "
            "Correct base_model_name_or_path in its config."
        ) from None
    found = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {key: tuple(value.shape) for key, value in found.items()}


def refuse_difference(
    name: str, settings: dict[str, Any], wanted: dict[str, tuple[int, ...]], stored: dict[str, tuple[int, ...]]
) -> None:
    base = settings.get("base_model_name_or_path")
    missing, extra = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    if missing:
        raise ModelError(
            f"adapter {name!r} lacks {missing[0]} and {len(missing) - 1} more tensors that its config and its base {base!r} ask "
            "for. Copy it again, or correct its config."
        )
    if extra:
        raise ModelError(
            f"adapter {name!r} has {extra[0]}, for which its base {base!r} has no place ({len(extra)} such tensors): it was made "
            "for another model. Correct base_model_name_or_path in its config."
        )
    for key, shape in wanted.items():
        if stored[key] != shape:
            rank = stored[key][0 if "lora_A" in key else -1] != shape[0 if "lora_A" in key else -1]
            why = (
                "its config names another rank (r, rank_pattern)"
                if rank
                else f"it was made for another base than {base!r}"
            )
            raise ModelError(
                f"adapter {name!r}: {key} is {stored[key]} and should be {shape}: {why}. Correct its config."
            )
