"""A linear layer and its adapter in one step forwards and one backwards: y = x Wᵀ + b + scale · (x Aᵀ) Bᵀ.

peft casts the input of each layer to the adapter's fp32, keeps that copy, and multiplies, scales, adds and casts back by itself:
seventeen kernels for a layer and its gradient, most of them over whole activations. Here factors are rounded to the type of the
weight beside them, which is what they are small changes to; the input is kept as it is, and gradients of factors are fp32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class AdaptedLinear(torch.autograd.Function):
    """Rows (N, in) and a frozen weight (out, in); `down` (rank, in) and `up` (out, rank) may be of a wider type than those."""

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
    """Scaled, and of that type; not rounded to its operands' on the way."""
    out = left.new_empty(left.shape[0], right.shape[1], dtype=dtype)
    if left.is_cuda and left.dtype != dtype:
        return torch.addmm(out, left, right, out_dtype=dtype, beta=0, alpha=scale, out=out)
    return out.addmm_(left.to(dtype), right.to(dtype), beta=0, alpha=scale)


def join_adapters(module: nn.Module) -> None:
    """peft's plain linear layers get a subclass, which leaves everything but bf16 on a GPU to peft."""
    from peft.tuners.lora import Linear

    for child in module.modules():
        if type(child) is Linear and _is_plain(child):
            child.__class__ = _joined_class()


def _is_plain(layer: Any) -> bool:
    """One adapter, of two factors and nothing else."""
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
    """Half precision on a GPU, over a weight that is frozen, and neither quantised nor in parts."""
    plain = type(weight) is nn.Parameter and not weight.requires_grad
    return plain and x.is_cuda and x.dtype == weight.dtype == torch.bfloat16
