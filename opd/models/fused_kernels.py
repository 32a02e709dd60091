"""Triton kernels for the parts of a decoder layer around its matrix products: RMS norm, gated activation, rotary embedding.

In plain torch each takes five to ten kernels, most of them in fp32: most of the launches in a decode step, and most of the
memory traffic in a training step. Sums are kept in fp32 and rounded at the same points as in torch.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

# mypy: ignore-errors


ELEMENTS = 2048  # per tile
PROGRAMS = 528  # most programs that share the rows of a backward pass: four per multiprocessor of a large device


@triton.jit(do_not_specialize=["count"])
def rms_norm_kernel(
    x, weight, out, scales, count, eps, WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    OFFSET: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, LANES)
    real = (rows[:, None] < count) & (lanes[None, :] < WIDTH)
    values = tl.load(x + rows[:, None] * WIDTH + lanes[None, :], mask=real, other=0.0).to(tl.float32)
    gain = tl.load(weight + lanes, mask=lanes < WIDTH, other=0.0).to(tl.float32) + OFFSET
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 1) / WIDTH + eps)
    values = values * scale[:, None]
    if EARLY:
        values = values.to(out.dtype.element_ty).to(tl.float32)
    values = values * gain[None, :]
    tl.store(out + rows[:, None] * WIDTH + lanes[None, :], values.to(out.dtype.element_ty), mask=real)
    tl.store(scales + rows, scale, mask=rows < count)


@triton.jit(do_not_specialize=["count"])
def rms_norm_backward_kernel(
    grad, x, weight, scales, grad_x, grad_weight, count, WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    OFFSET: tl.constexpr, LEARNS: tl.constexpr,
):  # fmt: skip
    """Each program strides over tiles of rows, and stores its part of the weight's gradient."""
    lanes = tl.arange(0, LANES)
    gain = tl.load(weight + lanes, mask=lanes < WIDTH, other=0.0).to(tl.float32) + OFFSET
    total = tl.zeros([LANES], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        real = (rows[:, None] < count) & (lanes[None, :] < WIDTH)
        at = rows[:, None] * WIDTH + lanes[None, :]
        scale = tl.load(scales + rows, mask=rows < count, other=0.0)
        unit = tl.load(x + at, mask=real, other=0.0).to(tl.float32) * scale[:, None]
        outer = tl.load(grad + at, mask=real, other=0.0).to(tl.float32)
        inner = outer * gain[None, :]
        found = (inner - unit * (tl.sum(inner * unit, 1) / WIDTH)[:, None]) * scale[:, None]
        tl.store(grad_x + at, found.to(grad_x.dtype.element_ty), mask=real)
        if LEARNS:
            total += tl.sum(outer * unit, 0)
    if LEARNS:
        tl.store(grad_weight + tl.program_id(0).to(tl.int64) * WIDTH + lanes, total, mask=lanes < WIDTH)


@triton.jit
def gated_silu_kernel(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < count
    value = tl.load(gate + at, mask=real, other=0.0).to(tl.float32)
    value = (value / (1.0 + tl.exp(-value))).to(out.dtype.element_ty).to(tl.float32)
    value = value * tl.load(up + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=real)


@triton.jit
def gated_silu_backward_kernel(grad, gate, up, grad_gate, grad_up, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < count
    outer = tl.load(grad + at, mask=real, other=0.0).to(tl.float32)
    value = tl.load(gate + at, mask=real, other=0.0).to(tl.float32)
    other = tl.load(up + at, mask=real, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-value))
    tl.store(grad_up + at, (outer * value * share).to(grad_up.dtype.element_ty), mask=real)
    slope = share * (1.0 + value * (1.0 - share))
    tl.store(grad_gate + at, (outer * other * slope).to(grad_gate.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["tokens"])
def rotate_kernel(
    query, key, cos, sin, query_out, key_out, tokens, query_row, query_token, query_head, key_row, key_token, key_head,
    out_row, out_token, out_head, key_out_row, key_out_token, key_out_head, turn_row, turn_token,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    """All heads of one token. BACK: the gradient, which rotates the other way."""
    row, token = tl.program_id(0).to(tl.int64) // tokens, tl.program_id(0).to(tl.int64) % tokens
    lanes, heads = tl.arange(0, LANES), tl.arange(0, PADDED)
    turn, inside = row * turn_row + token * turn_token + lanes, lanes < HALF
    cos_1 = tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_2 = tl.load(cos + turn + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_2 = tl.load(sin + turn + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    if BACK:
        sin_1, sin_2 = -sin_2, -sin_1
    real = (heads[:, None] < HEADS) & inside[None, :]
    at = query + row * query_row + token * query_token + heads[:, None] * query_head + lanes[None, :]
    to = query_out + row * out_row + token * out_token + heads[:, None] * out_head + lanes[None, :]
    first = tl.load(at, mask=real, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=real, other=0.0).to(tl.float32)
    tl.store(to, (first * cos_1 - second * sin_1).to(query_out.dtype.element_ty), mask=real)
    tl.store(to + HALF, (second * cos_2 + first * sin_2).to(query_out.dtype.element_ty), mask=real)
    real = (heads[:, None] < GROUPS) & inside[None, :]
    at = key + row * key_row + token * key_token + heads[:, None] * key_head + lanes[None, :]
    to = key_out + row * key_out_row + token * key_out_token + heads[:, None] * key_out_head + lanes[None, :]
    first = tl.load(at, mask=real, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=real, other=0.0).to(tl.float32)
    tl.store(to, (first * cos_1 - second * sin_1).to(key_out.dtype.element_ty), mask=real)
    tl.store(to + HALF, (second * cos_2 + first * sin_2).to(key_out.dtype.element_ty), mask=real)


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, offset, early):
        out, scales = _norm(x, weight, eps, offset, early)
        ctx.save_for_backward(x, weight, scales)
        ctx.offset = offset
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, scales = ctx.saved_tensors
        grad, width = grad.contiguous(), x.shape[-1]
        count, (lanes, rows, warps) = scales.numel(), _tile(width)
        learns, programs = ctx.needs_input_grad[1], min(PROGRAMS, triton.cdiv(count, rows))
        grad_x = torch.empty_like(grad)
        parts = torch.empty((programs, width) if learns else (1, 1), dtype=torch.float32, device=x.device)
        with _on(x):
            rms_norm_backward_kernel[(programs,)](
                grad, x, weight, scales, grad_x, parts, count, WIDTH=width, LANES=lanes, ROWS=rows, OFFSET=ctx.offset,
                LEARNS=learns, num_warps=warps,
            )  # fmt: skip
        return grad_x, parts.sum(0).to(weight.dtype) if learns else None, None, None, None


def rms_norm(x, weight, eps, offset=0.0, early=True):
    """(…, D): x / rms(x) * (weight + offset). `early`: round before multiplying by the weight, as Llama does."""
    x = x.contiguous()
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return RmsNorm.apply(x, weight, eps, offset, early)
    return _norm(x, weight, eps, offset, early)[0]


def _norm(x, weight, eps, offset, early):
    width = x.shape[-1]
    count, (lanes, rows, warps) = x.numel() // width, _tile(width)
    out, scales = torch.empty_like(x), torch.empty(count, dtype=torch.float32, device=x.device)
    with _on(x):
        rms_norm_kernel[(triton.cdiv(count, rows),)](
            x, weight, out, scales, count, eps, WIDTH=width, LANES=lanes, ROWS=rows, OFFSET=offset, EARLY=early,
            num_warps=warps,
        )  # fmt: skip
    return out, scales


class GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        grad, grad_gate, grad_up = grad.contiguous(), torch.empty_like(gate), torch.empty_like(up)
        with _on(gate):
            gated_silu_backward_kernel[(triton.cdiv(gate.numel(), ELEMENTS),)](
                grad, gate, up, grad_gate, grad_up, gate.numel(), BLOCK=ELEMENTS, num_warps=4
            )
        return grad_gate, grad_up


def gated_silu(gate, up):
    """silu(gate) * up"""
    gate, up = gate.contiguous(), up.contiguous()
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return GatedSilu.apply(gate, up)
    return _gated(gate, up)


def _gated(gate, up):
    out = torch.empty_like(gate)
    with _on(gate):
        gated_silu_kernel[(triton.cdiv(gate.numel(), ELEMENTS),)](
            gate, up, out, gate.numel(), BLOCK=ELEMENTS, num_warps=4
        )
    return out


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate(query, key, cos, sin, back=False)

    @staticmethod
    def backward(ctx, grad_query, grad_key):
        return *_rotate(_lanes(grad_query), _lanes(grad_key), *ctx.saved_tensors, back=True), None, None


def rotate(query, key, cos, sin):
    """query (B, H, T, D), key (B, G, T, D), cos and sin (B or 1, T, D), no gradient -> both, rotated, in their layout."""
    query, key, cos, sin = (_lanes(tensor) for tensor in (query, key, cos, sin))
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return Rotate.apply(query, key, cos, sin)
    return _rotate(query, key, cos, sin, back=False)


def _rotate(query, key, cos, sin, back):
    rows, heads, tokens, width = query.shape
    groups, half = key.shape[1], width // 2
    turned = torch.empty_like(query), torch.empty_like(key)

    def steps(tensor):
        return tensor.stride(0), tensor.stride(2), tensor.stride(1)

    with _on(query):
        rotate_kernel[(rows * tokens,)](
            query, key, cos, sin, *turned, tokens, *steps(query), *steps(key), *steps(turned[0]), *steps(turned[1]),
            0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1), HEADS=heads, GROUPS=groups,
            PADDED=triton.next_power_of_2(max(heads, groups)), HALF=half, LANES=triton.next_power_of_2(half), BACK=back,
            num_warps=4,
        )  # fmt: skip
    return turned


def _lanes(tensor):
    """The tensor with a contiguous last axis."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _tile(width):
    """Lanes, rows and warps of a tile of full rows."""
    lanes = triton.next_power_of_2(width)
    return lanes, max(1, ELEMENTS // lanes), min(max(lanes // 512, 4), 16)


def _on(tensor):
    """Make the tensor's device current: Triton launches kernels on the current device."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)
