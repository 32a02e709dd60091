"""Low-rank adapters through peft: choose the weights that get one, check what peft did, and merge adapters into weights.

`all-linear` is every linear layer except the output head, plus the experts of a mixture, which transformers keeps as one
three-dimensional parameter per projection. Routers, norms and embeddings get an adapter only if they are named.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from opd.common.errors import ModelError

if TYPE_CHECKING:
    from opd.models.settings import Lora


ADAPTER = "default"
EVERYTHING = "all-linear"
# Model types whose kernels may read out_proj's matrix directly, bypassing its adapter; peft rejects an adapter there.
MAMBA = frozenset({"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"})
# peft takes these for the old names of experts, from before transformers fused them, and would adapt the experts instead.
OLD_EXPERT_NAMES = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


def require_peft(what: str = "student.lora") -> None:
    if importlib.util.find_spec("peft") is None:
        instead = " Or remove `lora` to train all weights." if what == "student.lora" else ""
        raise ModelError(f"{what} needs the peft package, which is not installed: pip install 'opd[lora]'.{instead}")


class GradientDropout(nn.Module):
    """Dropout only while gradients are recorded: in training passes, and when checkpointing recomputes them."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, values: Tensor) -> Tensor:
        return nn.functional.dropout(values, self.share, training=torch.is_grad_enabled())


@dataclass(frozen=True)
class Targets:
    """Full names. peft wraps a module and adds to its output, or wraps a parameter's module and adds to the parameter."""

    modules: list[str]
    parameters: list[str]

    @property
    def weights(self) -> set[str]:
        return {f"{name}.weight" for name in self.modules} | set(self.parameters)


def attach(module: Any, head: nn.Linear, lora: Lora) -> Any:
    """Add adapters to the module's layers and return peft's wrapper. Only adapters remain trainable."""
    require_peft()
    from peft import LoraConfig, get_peft_model

    targets = find_targets(module, head, lora)
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets.modules,
        target_parameters=targets.parameters or None, task_type="CAUSAL_LM",
    )  # fmt: skip
    try:
        adapter = get_peft_model(module, config, adapter_name=ADAPTER)
    except ValueError as error:
        raise ModelError(f"lora.targets {lora.targets!r}: {str(error).splitlines()[0]}") from None
    adapted = {name for name, _ in adapted_layers(module)}
    if adapted != targets.weights:
        odd = sorted(adapted ^ targets.weights)
        raise ModelError(
            f"lora.targets {lora.targets!r}: peft adapted other weights than requested ({', '.join(odd[:3])}). "
            "Name fewer targets, for example the attention's projections."
        )
    for _, layer in adapted_layers(module):
        if lora.dropout:
            layer.lora_dropout[ADAPTER] = GradientDropout(lora.dropout)
    join_adapters(module)
    module.eval()
    return adapter


def find_targets(module: Any, head: nn.Linear, lora: Lora) -> Targets:
    """The weights that `lora.targets` names in this model. Rejects those that an adapter would not reach or must not change."""
    modules = {name: child for name, child in module.named_modules() if name}
    experts = {name: parameter for name, parameter in module.named_parameters() if _is_experts(name, parameter)}
    everything = _everything(modules, module.config.model_type, head)
    chosen = (
        everything + list(experts)
        if lora.targets == EVERYTHING
        else _chosen(lora.targets, modules, list(experts), head)
    )
    named = [name for name in chosen if name not in experts]
    for name in named:
        _check_target(name, modules[name], head)
        if lora.targets != EVERYTHING and _is_linear(modules[name]) and name not in everything:
            raise ModelError(
                f"lora.targets names {name}, which shares its matrix with another layer or is read directly by Mamba's kernels, bypassing "
                "its adapter. Leave it out of the targets."
            )
    fused = [name for name in chosen if name in experts]
    renamed = [name for name in named if experts and name.rpartition(".")[2] in OLD_EXPERT_NAMES]
    if lora.dropout and (fused or renamed):
        raise ModelError(
            f"lora.dropout {lora.dropout} with adapters on {(fused or renamed)[0]}: the experts of a mixture are adapted as one "
            "parameter, whose input cannot be dropped. Set lora.dropout: 0, or name the attention's projections in lora.targets."
        )
    return Targets([name for name in named if name not in renamed], fused + [f"{name}.weight" for name in renamed])


def adapter_size(module: Any, head: nn.Linear, lora: Lora) -> int:
    """Number of parameters that adapters would add: two factors per matrix and per expert."""
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    found = [shapes[name] for name in find_targets(module, head, lora).weights]
    return sum(lora.rank * math.prod(shape[:-2]) * (shape[-2] + shape[-1]) for shape in found)


def _everything(modules: dict[str, Any], model_type: str, head: nn.Linear) -> list[str]:
    """Linear layers that share their matrix with no other: an adapter would change one such layer, but merging it changes both."""
    linear = {name: child for name, child in modules.items() if _is_linear(child) and child is not head}
    uses = Counter(id(child.weight) for child in linear.values())
    left_out = "out_proj" if model_type in MAMBA else ""
    return [name for name, child in linear.items() if uses[id(child.weight)] == 1 and not _ends_with(name, left_out)]


def _chosen(targets: str | list[str], modules: dict[str, Any], experts: list[str], head: nn.Linear) -> list[str]:
    names = [*modules, *experts]
    if isinstance(targets, str):
        try:
            found = [name for name in names if re.fullmatch(targets, name)]
        except re.error as error:
            raise ModelError(f"lora.targets {targets!r} is not a regular expression: {error}.") from None
        missing = [] if found else [targets]
    else:
        found = [name for name in names if any(_ends_with(name, target) for target in targets)]
        missing = [target for target in targets if not any(_ends_with(name, target) for name in found)]
    if missing or not found:
        fit = [name for name in names if name in experts or (_is_linear(modules[name]) and modules[name] is not head)]
        last = dict.fromkeys(name.rpartition(".")[2] for name in fit)
        raise ModelError(
            f"lora.targets: {', '.join(map(repr, missing)) or 'nothing'} matches nothing in this model. It has "
            f"{', '.join(last)}. A string is a regular expression over full names; a list holds the last parts of names."
        )
    return found


def _check_target(name: str, child: Any, head: nn.Linear) -> None:
    if child is head:
        raise ModelError(
            f"lora.targets names the output head ({name}). Exact divergences read the head's matrix itself, so an adapter "
            "there would not be part of the loss. Leave the head out of the targets."
        )
    if isinstance(child, nn.Embedding):
        if child.weight is head.weight:
            raise ModelError(
                f"lora.targets names {name}, whose matrix is also the output head's: an adapter would change only one of the two. "
                "Leave it out of the targets."
            )
    elif not _is_linear(child):
        raise ModelError(
            f"lora.targets names {name}, a {type(child).__name__}; adapters go on linear layers, embeddings and experts."
        )


def _is_linear(child: Any) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(child, (nn.Linear, Conv1D)) and "Router" not in type(child).__name__  # routers return tuples


def _is_experts(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 3 and name.split(".")[-2:-1] == ["experts"]


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


def adapted_layers(module: Any) -> Iterator[tuple[str, Any]]:
    """(plain name of the adapted weight, peft's layer)."""
    from peft.tuners.lora import LoraLayer, ParamWrapper

    for name, child in module.named_modules():
        if isinstance(child, LoraLayer):
            owner = name.replace(".base_layer", "")  # wrappers of several parameters are nested
            yield f"{owner}.{child.parameter_name if isinstance(child, ParamWrapper) else 'weight'}", child


def file_name(name: str) -> str:
    """The name of an adapter's parameter in the files that peft writes."""
    return f"base_model.model.{name.replace(f'.{ADAPTER}', '')}"


def merged_weights(module: Any) -> dict[str, Tensor]:
    """Plain name -> adapted weight with its adapter merged."""
    with torch.no_grad():
        return {name: merged(layer) for name, layer in adapted_layers(module)}


def merged(layer: Any) -> Tensor:
    """The weight of one of peft's layers with its adapter merged."""
    from peft.tuners.lora import ParamWrapper

    base: Tensor = layer.get_param() if isinstance(layer, ParamWrapper) else layer.get_base_layer().weight
    return (base + layer.get_delta_weight(ADAPTER)).to(base.dtype)


def save_adapter(adapter: Any, directory: Path) -> None:
    adapter.save_pretrained(directory, save_embedding_layers=False)
    path = (
        directory / "adapter_config.json"
    )  # peft writes targets in set order; sort them so that the same adapter gives the same bytes
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("target_modules", "target_parameters"):
        if isinstance(config.get(key), list):
            config[key].sort()
    path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def load_adapter(adapter: Any, directory: Path) -> None:
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    tensors = load_file(directory / "adapter_model.safetensors")
    wanted = {file_name(name) for name, _ in adapter.base_model.model.named_parameters() if "lora_" in name}
    if wanted != tensors.keys():
        odd = sorted(wanted ^ tensors.keys())
        raise ModelError(f"{directory} does not hold the adapter of this model: {odd[0]} is only in one of the two.")
    set_peft_model_state_dict(adapter, tensors, adapter_name=ADAPTER)


# --- A linear layer and its adapter in one autograd function: y = x Wᵀ + b + scale · (x Aᵀ) Bᵀ ---
#
# peft casts each layer's input to the adapter's fp32, keeps that copy, and multiplies, scales, adds and casts back separately:
# 17 kernels for a layer and its gradient, most of them over full activations. Here factors are rounded to the weight's type, the
# input is kept as it is, and gradients of factors are fp32.


class AdaptedLinear(torch.autograd.Function):
    """Rows (N, in) and a frozen weight (out, in); `down` (rank, in) and `up` (out, rank) may have a wider type."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        low_down, low_up = down.to(rows.dtype), up.to(rows.dtype)
        inner = rows @ low_down.T
        ctx.save_for_backward(rows, weight, low_down, low_up, inner)
        ctx.scale, ctx.dtypes = scale, (down.dtype, up.dtype)
        return nn.functional.linear(rows, weight, bias).addmm_(inner, low_up.T, alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, low_down, low_up, inner = ctx.saved_tensors
        need_rows, _, _, need_down, need_up, _ = ctx.needs_input_grad
        grad_inner = grad @ low_up  # not scaled yet
        grad_rows = (grad @ weight).addmm_(grad_inner, low_down, alpha=ctx.scale) if need_rows else None
        grad_down = _product(grad_inner.T, rows, ctx.scale, ctx.dtypes[0]) if need_down else None
        grad_up = _product(grad.T, inner, ctx.scale, ctx.dtypes[1]) if need_up else None
        return grad_rows, None, None, grad_down, grad_up, None


def _product(left: Tensor, right: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """scale * left @ right in `dtype`, without rounding to the operands' type in between."""
    out = left.new_empty(left.shape[0], right.shape[1], dtype=dtype)
    if left.is_cuda and left.dtype != dtype:
        return torch.addmm(out, left, right, out_dtype=dtype, beta=0, alpha=scale, out=out)
    return out.addmm_(left.to(dtype), right.to(dtype), beta=0, alpha=scale)


def join_adapters(module: nn.Module) -> None:
    """Give peft's plain linear layers a fused subclass. It handles bf16 on a GPU; everything else is left to peft."""
    from peft.tuners.lora import Linear

    for child in module.modules():
        if type(child) is Linear and _is_plain(child):
            child.__class__ = _joined_class()


def _is_plain(layer: Any) -> bool:
    """Whether the layer has one adapter of two factors and nothing else."""
    bare = not layer.lora_variant and not any(layer.lora_bias.values())
    dropped = any(type(child) is not nn.Identity for child in layer.lora_dropout.values())
    return type(layer.base_layer) is nn.Linear and len(layer.scaling) == 1 and bare and not dropped


@cache
def _joined_class() -> Any:
    from peft.tuners.lora import Linear

    class JoinedLinear(Linear):
        def forward(self, x: Tensor, *args: Any, **settings: Any) -> Tensor:
            base = self.base_layer
            if args or settings or self.disable_adapters or self.merged or not runs_joined(x, base.weight):
                stock: Tensor = super().forward(x, *args, **settings)
                return stock
            ((name, scale),) = self.scaling.items()
            rows, down, up = x.flatten(0, -2), self.lora_A[name].weight, self.lora_B[name].weight
            found: Tensor = AdaptedLinear.apply(rows, base.weight, base.bias, down, up, scale)
            return found.view(*x.shape[:-1], up.shape[0])

    return JoinedLinear


def runs_joined(x: Tensor, weight: Tensor) -> bool:
    """Whether the fused path applies: bf16 on a GPU, and a frozen weight that is neither quantised nor sharded."""
    plain = type(weight) is nn.Parameter and not weight.requires_grad
    return plain and x.is_cuda and x.dtype == weight.dtype == torch.bfloat16
