"""Extract the text model from a wrapper checkpoint (see `load.reject_wrapper`) into its own directory.

It is written only after its logits on plain text match the wrapper's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from opd.common.errors import ModelError
from opd.common.text import first_line
from opd.models.files import reading_model
from opd.models.language_model import LanguageModel
from opd.models.load import (
    Location,
    inner_text_config,
    load_complete,
    load_tokenizer,
    locate,
    quiet_bars,
    read_config,
    reject_wrapper,
    text_class,
)
from opd.models.routes import FOREIGN, far
from opd.models.sharded import module_without_weights

LENGTH = 24  # tokens of the text that both models read


def extract_text_model(name: str, to: Path) -> None:
    config, tokenizer = read_config(name), load_tokenizer(name)
    if not text_class(config):
        reject_wrapper(name, config)
    location = locate(name)
    quiet_bars()
    with reading_model(name, "the model", location.directory):
        whole = load_complete(_class_of(name, config), location.path, name, dtype="auto", **location.arguments).eval()
        module = _text_model(name, whole, inner_text_config(config), location)
    module.generation_config = whole.generation_config
    _compare(name, whole, module, len(tokenizer))
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


def _compare(name: str, whole: Any, module: Any, size: int) -> None:
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
            f"model {name!r}: by itself its text model gives other logits than {type(whole).__name__} does on the same text. "
            "Choose a text-only checkpoint."
        )
