"""A model's weights as a file that another engine can load, of exactly the policy that is trained.

A tied head is written out: vLLM's CPU build keeps the old one when tied weights are put in place. Ids beyond the shared
vocabulary are cut off, as our own sampler never draws them.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from opd.models.language_model import LanguageModel, share_module

FILE = "model.safetensors"
WHOLE = "100TB"  # of a shard: one file


class WeightsFile:
    """`model` is read anew for every `write`: whoever holds it loads weights into its tensors."""

    def __init__(self, model: LanguageModel) -> None:
        self._model, self._module = model, share_module(model.module)
        config = self._module.config
        for part in {id(one): one for one in (config, config.get_text_config())}.values():
            part.tie_word_embeddings = False
        config.get_text_config().vocab_size = model.size
        config.architectures = [type(self._module).__name__]
        self._scratch = tempfile.TemporaryDirectory(prefix="opd-weights-")
        self.folder = Path(self._scratch.name)
        self._newest: Path | None = None

    @property
    def config(self) -> dict[str, Any]:
        return dict(self._module.config.to_dict())

    def write(self, version: int) -> Path:
        """A file of its own. The one before goes: whoever reads it may do so to its end."""
        model, module = self._model, self._module
        tables = {id(model.module.get_input_embeddings().weight), id(model.head.weight)}
        if model.head.bias is not None:
            tables.add(id(model.head.bias))
        state = {
            name: parameter.detach()[: model.size].clone() if id(parameter) in tables else parameter.detach()
            for name, parameter in model.module.named_parameters(remove_duplicate=False)
        }
        state |= {name: tensor for name, tensor in model.module.state_dict().items() if name not in state}
        folder = self.folder / f"version-{version}"
        shutil.rmtree(folder, ignore_errors=True)
        module.save_pretrained(folder, state_dict=state, max_shard_size=WHOLE)
        before, self._newest = self._newest, folder
        if before not in (None, folder):
            shutil.rmtree(before)
        return folder / FILE

    def close(self) -> None:
        self._scratch.cleanup()
