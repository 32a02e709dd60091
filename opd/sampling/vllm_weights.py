"""The newest weights in memory that engines on the same machine read: `sampler.weights: shared`.

    cuda    memory of the trainer's GPU, which others open by a handle (CUDA IPC)
    cpu     memory without a path, which others open through the process that has it

It is one stretch of bytes. What an engine gets is where it is, and where each tensor lies in it: nothing is written to a disk
or sent. It reads while it answers, and never afterwards, so one place suffices: `write` waits for those that are reading.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import sys
import threading
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from opd.errors import RemoteError
from opd.models.language_model import LanguageModel
from opd.sampling.export import Exported
from opd.sampling.vllm_memory import cuda_handle, tensors_in
from opd.sampling.vllm_replica import Replica

ALIGN = 64  # bytes between which a tensor may begin


class WeightsBuffer(Exported):
    """A copy of the model's weights: the model's own may be those that train, and change while an engine starts again."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self._turn = threading.Condition()
        self._readers, self._writes = 0, 0
        self.tensors: list[dict[str, Any]] = []
        end = 0
        for name, tensor in self._named().items():
            entry = {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            self.tensors.append(entry | {"start": end})
            end += -(-math.prod(tensor.shape) * tensor.element_size() // ALIGN) * ALIGN
        self.memory: CudaMemory | PlainMemory = (
            CudaMemory(end, model.device) if model.device.type == "cuda" else PlainMemory(end)
        )
        self._places = dict(tensors_in(self.memory.bytes, self.tensors))

    def _named(self) -> dict[str, Tensor]:
        """By the names that `save_pretrained` would give them in a file; layers that are used twice are there once."""
        state, rows = self.state()
        ignored = self._module._keys_to_ignore_on_save or ()
        kept = {name: tensor for name, tensor in state.items() if name not in ignored and name not in rows}
        kept = remove_tied_weights_from_state_dict(kept, self._module)
        return dict(revert_weight_conversion(self._module, kept | {name: state[name] for name in sorted(rows)}))

    @torch.no_grad()
    def write(self, version: int) -> int:
        """Says which writing it was, for `give`."""
        with self._turn:  # nobody begins to read meanwhile
            self._turn.wait_for(lambda: not self._readers)
            for name, tensor in self._named().items():
                self._places[name].copy_(tensor)
            self.memory.settle()
            self._writes += 1
            return self._writes

    def give(self, replica: Replica, version: int, written: int) -> bool:
        """Whether these weights were still there; else newer ones are. When it returns, or raises, the engine has read them or is lost."""
        with self._turn:
            if written != self._writes:
                return False
            self._readers += 1
        try:
            replica.ask("POST", "/weights", {"version": version, "memory": self.memory.handle, "tensors": self.tensors})
        finally:
            with self._turn:
                self._readers -= 1
                self._turn.notify_all()
        return True

    def close(self) -> None:
        self._places = {}
        self.memory.close()
        super().close()


class PlainMemory:
    """It goes with the last process that has it, even by kill -9: unlike a file in /dev/shm."""

    def __init__(self, size: int) -> None:
        if sys.platform != "linux":
            raise RemoteError("sampler.weights shared needs Linux. Set sampler.weights: file.")
        name = f"opd-vllm-weights-{secrets.token_hex(8)}"
        self._descriptor = os.memfd_create(name)
        os.ftruncate(self._descriptor, size)
        self.bytes = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)
        self.handle = {"process": os.getpid(), "descriptor": self._descriptor, "name": name}

    def settle(self) -> None:
        """What is written is there for others at once."""

    def close(self) -> None:
        self.bytes = torch.empty(0)
        os.close(self._descriptor)


class CudaMemory:
    """Shared once. torch would count who has opened it so that nobody frees what another reads; here the answer says that."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        fields = self.bytes.untyped_storage()._share_cuda_()
        self.handle = cuda_handle(str(torch.cuda.get_device_properties(device).uuid), fields)
        self._counter, self._device = fields[4:6], device

    def settle(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()  # another process does not wait for our stream

    def close(self) -> None:
        """Its count is one, since engines do not touch it; at zero torch gives the memory back with the last tensor in it."""
        torch.UntypedStorage._release_ipc_counter_cuda(*self._counter)
        self.bytes = torch.empty(0)
