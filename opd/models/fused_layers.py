"""Replace parts of decoder layers by fused kernels, if a model's own classes compute the same formulas.

    fuse_layers(module)      # -> "RMS norms, gated activations, rotary embeddings"

A module is recognised by its parts and then by its results: on small random input it must match the formula bit for bit. It
keeps its parameters and name, and its class becomes a subclass that runs the kernel for half precision on a GPU and the stock
code otherwise. Under torch.compile, which fuses by itself, `stock_layers` restores the classes.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import types
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from opd.models.attention import OLDEST

HALF = (torch.bfloat16, torch.float16)
NORMS = ((0.0, True), (0.0, False), (1.0, False))  # (added to the weight, whether to round before multiplying by it)
GATED = {"gate_proj", "up_proj", "down_proj"}
ROTARY = "apply_rotary_pos_emb"
STOCK = "_stock_class"  # attribute of a fused class: the class it was made from


class NormFormula(NamedTuple):
    """An RMS norm. `offset` is added to the weight; `early`: round before multiplying by the weight."""

    weight: Tensor
    eps: float
    offset: float
    early: bool

    def like(self, other: NormFormula) -> bool:
        return self[1:] == other[1:]


def fuse_layers(module: nn.Module) -> str:
    """Fuse in place. Returns what was fused, as text. Call it only if `kernels_on` the module's device."""
    found: dict[str, None] = {}
    for child in module.modules():
        what, fused = _recognised(child)
        if fused is not None:
            child.__class__ = fused
            found[what] = None
    return ", ".join(found)


def kernels_on(device: torch.device | str) -> bool:
    """Whether fused kernels run on this device."""
    return torch.device(device).type == "cuda" and not why_stock(device)


@cache
def why_stock(device: torch.device | str) -> str:
    """Why this GPU cannot run fused kernels; empty if it can, or if the device is not a GPU."""
    if torch.device(device).type != "cuda":
        return ""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    found = torch.cuda.get_device_capability(device)
    return f"compute capability {found[0]}.{found[1]}, and kernels need 8.0" if found < OLDEST else ""


def stock_layers(module: nn.Module) -> None:
    """Undo `fuse_layers`."""
    for child in module.modules():
        child.__class__ = vars(type(child)).get(STOCK, type(child))


def is_fused(child: nn.Module) -> bool:
    return STOCK in vars(type(child))


def stock_class(child: nn.Module) -> type[nn.Module]:
    """The original class of a fused module."""
    found: type[nn.Module] = vars(type(child))[STOCK]
    return found


def norm_of(child: nn.Module) -> NormFormula | None:
    """The formula of a fused norm. None: this is not one."""
    return child.formula() if is_fused(child) and isinstance(child, KnownNorm) else None


@runtime_checkable
class KnownNorm(Protocol):
    def formula(self) -> NormFormula: ...


def _recognised(child: nn.Module) -> tuple[str, type[nn.Module] | None]:
    base: Any = type(child)
    if STOCK in vars(base):
        return "", None
    if base.__name__.endswith("RMSNorm"):
        epsilon = _epsilon(child)
        kind = _norm_kind(child, epsilon) if epsilon else None
        return "RMS norms", None if kind is None else _norm_class(base, epsilon, *kind)
    if {name for name, _ in child.named_children()} - {"act_fn"} == GATED:
        return "gated activations", _gated_class(base) if _is_gated(child) else None
    if base.__name__.endswith("Attention"):
        return "rotary embeddings", _turning_class(base)
    return "", None


def _named(fused: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    fused.__name__ = fused.__qualname__ = f"Fused{base.__name__}"
    setattr(fused, STOCK, base)
    return fused


def _takes(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in HALF and x.numel() > 0


# RMS norms


def _epsilon(child: nn.Module) -> str:
    """The attribute that holds the epsilon, if the module has only a weight and an epsilon; else empty."""
    plain = [name for name, _ in child.named_parameters()] == ["weight"] and not list(child.children())
    alone = len(inspect.signature(type(child).forward).parameters) == 2  # self and the hidden states
    names = [name for name in ("variance_epsilon", "eps") if isinstance(vars(child).get(name), float)]
    return names[0] if plain and alone and names else ""


def _norm_kind(child: nn.Module, epsilon: str) -> tuple[float, bool] | None:
    """The usual formula that the module matches bit for bit; None if there is none."""
    generator = torch.Generator().manual_seed(0)
    probe = copy.copy(child)
    weight = nn.Parameter(torch.rand(48, generator=generator).bfloat16())
    vars(probe)["_parameters"] = {"weight": weight}
    x = (3 * torch.randn(64, 48, generator=generator)).bfloat16()
    with torch.no_grad():
        given = probe(x)
        fits = [kind for kind in NORMS if torch.equal(given, norm_formula(x, weight, vars(child)[epsilon], *kind))]
    return fits[0] if fits else None


def norm_formula(x: Tensor, weight: Tensor, eps: float, offset: float, early: bool) -> Tensor:
    wide = x.float()
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * unit.to(x.dtype) if early else (unit * (weight.float() + offset)).to(x.dtype)


@cache
def _norm_class(base: Any, epsilon: str, offset: float, early: bool) -> type[nn.Module]:
    class Fused(base):
        def forward(self, x: Tensor) -> Tensor:
            if not _takes(x) or self.weight.dtype != x.dtype:
                stock: Tensor = super().forward(x)
                return stock
            from opd.models.fused_kernels import rms_norm

            found: Tensor = rms_norm(x, self.weight, vars(self)[epsilon], offset, early)
            return found

        def formula(self) -> NormFormula:
            return NormFormula(self.weight, vars(self)[epsilon], offset, early)

    return _named(Fused, base)


# Gated activations


def _is_gated(child: nn.Module) -> bool:
    """Whether the module computes exactly down(silu(gate(x)) * up(x))."""
    parts = dict(child.named_children())
    alone = len(inspect.signature(type(child).forward).parameters) == 2
    if not alone or not all(isinstance(parts[name], nn.Linear) for name in GATED):
        return False
    probe, generator = copy.copy(child), torch.Generator().manual_seed(0)
    shapes = {"gate_proj": (8, 6), "up_proj": (8, 6), "down_proj": (6, 8)}
    small = {
        name: nn.utils.skip_init(nn.Linear, *shape) for name, shape in shapes.items()
    }  # leaves the global random state alone
    for parameter in nn.ModuleDict(small).parameters():
        nn.init.uniform_(parameter, -1, 1, generator)
    vars(probe)["_modules"] = parts | small
    x = torch.linspace(-3, 3, 32).view(4, 8)
    with torch.no_grad():
        wanted = small["down_proj"](silu(small["gate_proj"](x)) * small["up_proj"](x))
        return torch.equal(probe(x), wanted)


@cache
def _gated_class(base: Any) -> type[nn.Module]:
    class Fused(base):
        def forward(self, x: Tensor) -> Tensor:
            if not _takes(x):
                stock: Tensor = super().forward(x)
                return stock
            from opd.models.fused_kernels import gated_silu

            found: Tensor = self.down_proj(gated_silu(self.gate_proj(x), self.up_proj(x)))
            return found

    return _named(Fused, base)


# Rotary embeddings


@cache
def _turning_class(base: Any) -> type[nn.Module] | None:
    """A subclass with the same forward pass, except that queries and keys are rotated by the fused kernel."""
    forward = base.forward
    if not inspect.isfunction(forward) or ROTARY not in forward.__code__.co_names:
        return None
    turn = forward.__globals__.get(ROTARY)
    if not inspect.isfunction(turn) or not _turns_halves(turn):
        return None
    names = forward.__globals__ | {ROTARY: _turning(turn)}
    copied = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return _named(type("Fused", (base,), {"forward": copied}), base)


def _turns_halves(turn: Callable[..., Any]) -> bool:
    if list(inspect.signature(turn).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return False
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (torch.randn(2, *shape, generator=generator) for shape in ((3, 5, 8), (1, 5, 8), (5, 8), (5, 8)))
    try:
        given = turn(q, k, cos, sin)
    except (RuntimeError, IndexError):  # the function expects other shapes
        return False
    wanted = (x * cos[:, None] + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin[:, None] for x in (q, k))
    return all(a.shape == b.shape and torch.allclose(a, b, atol=1e-5) for a, b in zip(given, wanted, strict=True))


def _turning(turn: Callable[..., Any]) -> Callable[..., Any]:
    def fused(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **settings: Any) -> Any:
        usual = not others and not settings and cos.dim() == 3 and cos.shape[0] in (1, q.shape[0])
        fits = q.shape[-1] == k.shape[-1] == cos.shape[-1] and q.shape[-1] % 2 == 0 and cos.stride() == sin.stride()
        if not (usual and fits and _takes(q) and q.dtype == k.dtype == cos.dtype):
            return turn(q, k, cos, sin, *others, **settings)
        from opd.models.fused_kernels import rotate

        return rotate(q, k, cos, sin)

    return fused
