"""A model's weights as another engine can load them, of exactly the policy that is trained.

    WeightsFile      a file that is sent
    vllm_weights.py  memory that engines on the same machine read

A tied head is written out: vLLM's CPU build keeps the old one when tied weights are put in place. Ids beyond the shared
vocabulary are cut off, as our own sampler never draws them.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from opd.models.language_model import LanguageModel, share_module

if TYPE_CHECKING:
    from opd.sampling.vllm_replica import Replica

FILE = "model.safetensors"
WHOLE = "100TB"  # of a shard: one file


class Exported:
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

    @property
    def config(self) -> dict[str, Any]:
        return dict(self._module.config.to_dict())

    def state(self) -> tuple[dict[str, Tensor], set[str]]:
        """Tensors by their names in the model, and which of them are rows of the vocabulary. Nothing is copied."""
        model = self._model
        tables = {id(model.module.get_input_embeddings().weight), id(model.head.weight)}
        if model.head.bias is not None:
            tables.add(id(model.head.bias))
        parameters = dict(model.module.named_parameters(remove_duplicate=False))
        rows = {name for name, parameter in parameters.items() if id(parameter) in tables}
        state = {
            name: parameter.detach()[: model.size] if name in rows else parameter.detach()
            for name, parameter in parameters.items()
        }
        return state | {name: one for name, one in model.module.state_dict().items() if name not in state}, rows

    def close(self) -> None:
        self._scratch.cleanup()


class WeightsFile(Exported):
    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self._newest: Path | None = None

    def write(self, version: int) -> Path:
        """A file of its own. The one before goes: whoever reads it may do so to its end."""
        state, rows = self.state()
        apart = {name: tensor.clone() if name in rows else tensor for name, tensor in state.items()}
        folder = self.folder / f"version-{version}"
        shutil.rmtree(folder, ignore_errors=True)
        self._module.save_pretrained(folder, state_dict=apart, max_shard_size=WHOLE)
        before, self._newest = self._newest, folder
        if before not in (None, folder):
            shutil.rmtree(before)
        return folder / FILE

    def give(self, replica: Replica, version: int, path: Path) -> bool:
        return put_file(replica, version, path, "weights")


def put_file(replica: Replica, version: int, path: Path, what: str) -> bool:
    """Whether it was still there; else newer ones are."""
    try:
        replica.put(version, path, what)
    except FileNotFoundError:
        return False
    return True
