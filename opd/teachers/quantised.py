"""Teachers with linear layers quantised by torchao, and the KL that this costs.

A model is loaded on the host and quantised layer by layer on the device that scores. Head and embeddings are not quantised, since
exact divergences read the head. The original weights stay on the host until the first batch, whose texts are scored with both.
Layers are brought back one at a time, so the device never holds more than the quantised model and one layer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from opd.common.errors import RecipeError
from opd.divergences import statistics
from opd.models import load_model
from opd.models.language_model import LanguageModel
from opd.records import Rendered, WeightsRef
from opd.teachers.kinds import ModelRef, Quantisation
from opd.teachers.scoring import LocalTeacher, Page

MEASURED = 2048  # at most this many tokens of the first batch, but at least one text
GROUPS = {"int4": 128, "mxfp4": 32}  # weights that share a scale
TRIAL = (256, 256)  # shape of the layer that tests whether a device supports the kind


def require_quantiser(whose: str, kind: Quantisation, dtype: str, device: torch.device | str) -> None:
    """Quantises and runs a small layer, to raise before weights are loaded if the kind does not run here."""
    if importlib.util.find_spec("torchao") is None:
        raise RecipeError(f"{whose}: quantise: {kind} needs the torchao package: pip install 'opd[quantised]'.")
    from torchao.quantization import quantize_

    like: Any = {"dtype": getattr(torch, dtype), "device": device}
    layer = nn.Linear(*TRIAL, bias=False, **like)
    try:
        with torch.no_grad():
            quantize_(layer, _config(kind))
            layer(torch.ones(2, TRIAL[0], **like))
    except (ImportError, RuntimeError, AssertionError, NotImplementedError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RecipeError(
            f"{whose}: quantise: {kind} with {dtype} does not run on {device}: {reason}. Use int8, which runs everywhere"
            + (", or set dtype: bfloat16." if dtype != "bfloat16" else ".")
        ) from None


def _config(kind: Quantisation) -> Any:
    """Quantises weights only; for mxfp4 torchao quantises activations too: both are rounded and multiplied in bfloat16, on any
    device. `set_inductor_config` would change the precision of all matrix products in the process.
    """
    from torchao.quantization import Float8WeightOnlyConfig, Int4WeightOnlyConfig, Int8WeightOnlyConfig

    if kind == "int8":
        return Int8WeightOnlyConfig(set_inductor_config=False)
    if kind == "fp8":
        return Float8WeightOnlyConfig(set_inductor_config=False)
    if kind == "mxfp4":
        from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        four = {"activation_dtype": torch.float4_e2m1fn_x2, "weight_dtype": torch.float4_e2m1fn_x2}
        return MXDynamicActivationMXWeightConfig(GROUPS[kind], kernel_preference=KernelPreference.EMULATED, **four)
    return Int4WeightOnlyConfig(GROUPS[kind], int4_packing_format="tile_packed_to_4d", set_inductor_config=False)


def load_teacher(ref: ModelRef, name: str, revision: str | None, dtype: str, device: str) -> LanguageModel:
    """`name`, `dtype` and `device`: those of the reference, as resolved in this run."""
    if ref.quantise is None:
        return load_model(name, dtype=dtype, revision=revision, device=device)
    model = load_model(name, dtype=dtype, revision=revision, device="cpu")
    quantise_(model, ref.quantise, device)
    return model


def quantise_(model: LanguageModel, kind: Quantisation, device: torch.device | str = "cpu") -> None:
    """Quantises in place while moving to the device. `model.unquantised` keeps the original weights until they are dropped."""
    from torchao.quantization import quantize_

    def chosen(module: nn.Module, name: str = "") -> bool:
        if not isinstance(module, nn.Linear) or module is model.head:
            return False
        return module.in_features % GROUPS.get(kind, 1) == 0

    layers = {name: layer for name, layer in model.module.named_modules() if chosen(layer)}
    if not layers:
        raise RecipeError(
            f"model {model.name!r} has no layers that quantise: {kind} can change. Leave `quantise` out for it."
        )
    model.module.requires_grad_(False)
    model.unquantised = {name: layer.weight.detach() for name, layer in layers.items()}
    with torch.no_grad():
        quantize_(model.module, _config(kind), chosen, device=device)
    model.module.to(device)


class QuantisedTeacher(LocalTeacher):
    """Scores with quantised weights."""

    def measure(self, texts: Sequence[Rendered]) -> dict[str, float]:
        """KL(original || quantised) in nats per token on these texts. Measured once; the original weights are then dropped."""
        model = self.model
        if not model.unquantised or not texts:
            return {}
        page = Page.of(_few(texts), self.device)
        with torch.no_grad():
            now = self.project(self.hidden(page))
            with _put_back(model.module, model.unquantised):
                before = self.project(self.hidden(page))
            found = statistics(before, now, merge=(self.stop_ids,)).reverse_kl
        assert found is not None
        self._forget()
        return {f"quantised_kl/{self.name}": float(found.mean())}

    def _forget(self) -> None:
        self.model.unquantised = {}

    def observe(self, step: int, weights: WeightsRef) -> None:
        self._forget()

    def restore(self, version: int, tensors: Any) -> None:
        super().restore(version, tensors)
        self._forget()


def _few(texts: Sequence[Rendered]) -> list[Rendered]:
    chosen, total = [texts[0]], texts[0].length
    for text in texts[1:]:
        total += text.length
        if total > MEASURED:
            break
        chosen.append(text)
    return chosen


@contextmanager
def _put_back(module: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """A context in which every layer uses its original weight, which is on the device only during use."""
    handles = []
    for name, layer in module.named_modules():
        if name in weights:
            before, after = _exchange(weights[name], layer._parameters["weight"])
            handles += [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


Hook = Callable[..., None]


def _exchange(plain: Tensor, quantised: Any) -> tuple[Hook, Hook]:
    def before(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        layer._parameters["weight"] = nn.Parameter(plain.to(inputs[0].device), requires_grad=False)

    def after(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        layer._parameters["weight"] = quantised

    return before, after
