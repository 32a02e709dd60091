"""The weights of one training client: its own copy of a base model, or adapters over the shared one.

client = TrainedModel(base, lora, seed=0, batch_tokens=8192)
outputs, metrics = client.passes(rows, loss, backward=True)      # gradients are added to those before
client.update(AdamSettings(learning_rate=1e-4))
client.restore(client.state())
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from opd.common.errors import ModelError
from opd.divergences.projection import upload
from opd.loop.learner import Optimiser
from opd.models.attention import Packed
from opd.models.language_model import LanguageModel, pack
from opd.models.settings import Lora
from opd.recipe.stage import Train
from opd.serve.tinker.losses import TokenLoss
from opd.serve.tinker.wire import LossRow
from opd.teachers.served import WireError

WEIGHTS, OPTIMISER, GRADIENT = "weights.", "optimiser.", "gradient."  # prefixes of a saved state's tensors


@dataclass(frozen=True)
class AdamSettings:
    """Of one update. `grad_clip_norm` 0: no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def train(self, precision: str) -> Train:
        """The same as settings of a run. A learning rate of 0 is allowed here."""
        changed = {
            "lr": self.learning_rate,
            "betas": (self.beta1, self.beta2),
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "clip": self.grad_clip_norm if self.grad_clip_norm > 0 else None,
            "precision": precision,
        }
        return Train().model_copy(update=changed)


class _Item(NamedTuple):
    """One datum on its way into a pass."""

    id: str
    row: LossRow

    @property
    def length(self) -> int:
        return self.row.length


class TrainedModel:
    """`lora`: None trains a copy of all weights. `seed`: of the adapters' first values; None: any."""

    def __init__(self, base: LanguageModel, lora: Lora | None, seed: int | None, batch_tokens: int) -> None:
        self.model = base.inference_copy(own=lora is None)
        if lora is None:
            self.model.module.requires_grad_(True)
        else:
            with torch.random.fork_rng(devices=[self.model.device] if self.model.device.type == "cuda" else []):
                torch.manual_seed(torch.seed() if seed is None else seed)
                self.model.add_lora(lora)
        self.lora, self._batch_tokens = lora, batch_tokens
        self._precision = "float32" if self.model.dtype == torch.float32 else "mixed"
        self.optimiser = self._fresh()

    def _fresh(self) -> Optimiser:
        return Optimiser(self.model.trainable(), AdamSettings().train(self._precision), self.model.outer())

    def check(self, rows: Sequence[LossRow], loss: TokenLoss) -> None:
        loss.check(rows, self.model.size, self.model.context)

    def passes(
        self, rows: Sequence[LossRow], loss: TokenLoss, backward: bool
    ) -> tuple[list[dict[str, np.ndarray]], dict[str, float]]:
        """Outputs of every datum, in order, and metrics. Gradients of the sum of all losses are accumulated."""
        outputs: dict[str, dict[str, np.ndarray]] = {}
        total, metrics = 0.0, dict[str, list[float]]()
        items = [_Item(str(number), row) for number, row in enumerate(rows)]
        alike: dict[Hashable, list[_Item]] = {}
        for item in items:
            alike.setdefault(item.row.widths, []).append(item)
        for batch in (batch for group in alike.values() for batch in pack(group, self._batch_tokens)):
            chosen = [item.row for item in batch]
            lengths = [row.length for row in chosen]
            ids = upload(np.concatenate([row.ids for row in chosen]), self.model.device)
            with nullcontext() if backward else torch.no_grad():
                hidden = self.model.hidden(ids, Packed.of(lengths, self.model.device))
                part = loss.part(chosen, self.model.project(hidden), ids)
                value = float(part.loss.detach())
                if not np.isfinite(value):
                    raise WireError(400, f"the loss is {value}: are log-probs or advantages too large?")
                if backward:
                    part.loss.backward()
            total += value
            for name, number in part.metrics.items():
                metrics.setdefault(name, []).append(number)
            arrays = {name: np.split(tensor.float().cpu().numpy(), np.cumsum(lengths)[:-1]) for name, tensor in part.outputs.items()}  # fmt: skip
            for item, each in zip(batch, zip(*arrays.values(), strict=True), strict=True):
                outputs[item.id] = dict(zip(arrays, each, strict=True))
        means = {name: float(np.mean(numbers)) for name, numbers in metrics.items()}
        return [outputs[item.id] for item in items], {"loss:sum": total, **means}

    def update(self, settings: AdamSettings) -> dict[str, float]:
        """Apply the gradients since the last update."""
        if all(master.grad is None for master in self.optimiser.masters):
            raise WireError(400, "optim_step: there are no gradients; call forward_backward first")
        self.optimiser.use(settings.train(self._precision))
        norm = self.optimiser.clip()
        if not np.isfinite(norm):
            self.optimiser.discard()
            raise WireError(400, f"optim_step: the gradient's norm is {norm}; the gradients were dropped")
        self.optimiser.step(self.optimiser.updates + 1)
        return {"grad_norm:mean": norm}

    # Saved states

    def weights(self) -> dict[str, Tensor]:
        """The trained tensors by their own names: adapters, or all weights."""
        return {name: parameter.detach() for name, parameter in self.model.trainable().items()}

    def state(self) -> dict[str, Tensor]:
        parts = {WEIGHTS + name: tensor for name, tensor in self.weights().items()}
        return parts | {OPTIMISER + name: tensor for name, tensor in self.optimiser.tensors().items()}

    def restore(self, tensors: Mapping[str, Tensor], updates: int, optimiser: bool) -> None:
        """`optimiser`: also the moments; otherwise the optimiser starts afresh."""
        own = self.model.trainable()
        saved = {name.removeprefix(WEIGHTS): tensor for name, tensor in tensors.items() if name.startswith(WEIGHTS)}
        odd = sorted(own.keys() ^ saved.keys()) or sorted(name for name in own if own[name].shape != saved[name].shape)
        if odd:
            raise ModelError(f"the checkpoint does not fit this client: {odd[0]} is missing or of another shape.")
        moments = {name.removeprefix(OPTIMISER): t for name, t in tensors.items() if name.startswith(OPTIMISER)}
        if optimiser and updates and not moments:
            raise ModelError("the checkpoint has no optimiser state: it was saved for sampling.")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(saved[name])
        self.optimiser.discard()  # gradients of the weights before
        self.optimiser = self._fresh()
        if optimiser and moments:
            self.optimiser.restore(moments, updates)

    def snapshot(self) -> dict[str, Tensor]:
        """The state in the middle of an update: with its gradients so far."""
        owners = zip(self.model.trainable(), self.optimiser.masters, strict=True)
        return self.state() | {GRADIENT + name: owner.grad for name, owner in owners if owner.grad is not None}

    def resume(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """From a snapshot, bit for bit."""
        self.restore(tensors, updates, optimiser=True)
        for name, owner in zip(self.model.trainable(), self.optimiser.masters, strict=True):
            if GRADIENT + name in tensors:
                owner.grad = tensors[GRADIENT + name].to(owner)
