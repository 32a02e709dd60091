# mypy: ignore-errors
"""Decoder layers for one new token per slot, with as few launches as products allow.

A decode step reads every weight once and computes next to nothing with it, so what counts is how many kernels it takes: the
gap between two of them is as long as many of them run. Queries, keys and values are one product, gate and up with their
activation another; norms take the residual sum with them; and one kernel normalises, turns and stores.
"""

import torch
import triton
import triton.language as tl

from opd.models.fused_kernels import gated_silu

MOST_ROWS = 128  # slots up to which reading the weights is all that a product costs
TILE = 64  # slots of a tile
RESERVED = 8 * 1024  # bytes of shared memory that are left to Triton
COLUMNS = 32  # outputs of a tile: enough tiles for all processors of a large device


@triton.jit
def _product(x, weight, rows, first, WIDTH: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr):
    """A tile of x @ weight.T: some slots by the outputs from `first` on."""
    slots = tl.program_id(1) * TALL + tl.arange(0, TALL)
    outputs, lanes = first + tl.arange(0, WIDE), tl.arange(0, DEEP)
    total = tl.zeros((TALL, WIDE), tl.float32)
    for start in range(0, WIDTH, DEEP):
        left = tl.load(x + slots[:, None] * WIDTH + start + lanes[None, :], mask=slots[:, None] < rows, other=0.0)
        right = tl.load(weight + outputs[:, None].to(tl.int64) * WIDTH + start + lanes[None, :])
        total = tl.dot(left, tl.trans(right), total)
    return total


@triton.jit
def joined_kernel(
    x,
    weight_1,
    weight_2,
    weight_3,
    bias_1,
    bias_2,
    bias_3,
    out,
    rows,
    END_1: tl.constexpr,
    END_2: tl.constexpr,
    COUNT: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
):
    """x @ weight.T + bias of three weights, side by side."""
    at = tl.program_id(0) * WIDE
    weight, bias, first = weight_1, bias_1, at
    if at >= END_2:
        weight, bias, first = weight_3, bias_3, at - END_2
    elif at >= END_1:
        weight, bias, first = weight_2, bias_2, at - END_1
    total = _product(x, weight, rows, first, WIDTH, TALL, WIDE, DEEP)
    if BIAS:
        total += tl.load(bias + first + tl.arange(0, WIDE)).to(tl.float32)[None, :]
    slots, outputs = tl.program_id(1) * TALL + tl.arange(0, TALL), at + tl.arange(0, WIDE)
    to = out + slots[:, None] * COUNT + outputs[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=slots[:, None] < rows)


@triton.jit
def gated_kernel(
    x,
    gate,
    up,
    out,
    rows,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
):
    """silu(x @ gate.T) * (x @ up.T), rounded where separate kernels round."""
    at = tl.program_id(0) * WIDE
    slots = tl.program_id(1) * TALL + tl.arange(0, TALL)
    outputs, lanes = at + tl.arange(0, WIDE), tl.arange(0, DEEP)
    value, other = tl.zeros((TALL, WIDE), tl.float32), tl.zeros((TALL, WIDE), tl.float32)
    for start in range(0, WIDTH, DEEP):
        left = tl.load(x + slots[:, None] * WIDTH + start + lanes[None, :], mask=slots[:, None] < rows, other=0.0)
        right = tl.load(gate + outputs[:, None].to(tl.int64) * WIDTH + start + lanes[None, :])
        value = tl.dot(left, tl.trans(right), value)
        right = tl.load(up + outputs[:, None].to(tl.int64) * WIDTH + start + lanes[None, :])
        other = tl.dot(left, tl.trans(right), other)
    value = value.to(out.dtype.element_ty).to(tl.float32)
    value = (value / (1.0 + tl.exp(-value))).to(out.dtype.element_ty).to(tl.float32)
    value = value * other.to(out.dtype.element_ty).to(tl.float32)
    to = out + slots[:, None] * COUNT + outputs[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=slots[:, None] < rows)


@triton.jit
def add_norm_kernel(
    stream,
    change,
    weight,
    out,
    eps,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    ADDS: tl.constexpr,
    OFFSET: tl.constexpr,
    EARLY: tl.constexpr,
):
    """stream += change, and its RMS norm, of one slot."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    at, inside = row * WIDTH + lanes, lanes < WIDTH
    values = tl.load(stream + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        sums = (values + tl.load(change + at, mask=inside, other=0.0).to(tl.float32)).to(out.dtype.element_ty)
        tl.store(stream + at, sums, mask=inside)
        values = sums.to(tl.float32)
    gain = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32) + OFFSET
    values = values / tl.sqrt(tl.sum(values * values, 0) / WIDTH + eps)
    if EARLY:
        values = values.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + at, (values * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit
def place_kernel(
    joined,
    cos,
    sin,
    query_gain,
    key_gain,
    query,
    keys,
    values,
    column,
    eps,
    turn_row,
    cache_slot,
    cache_head,
    cache_column,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    LANES: tl.constexpr,
    NORMED: tl.constexpr,
    OFFSET: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One head of one slot: a query is normalised and turned, a key stored as well, a value stored as it is."""
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, LANES)
    inside = lanes < HALF
    kind = joined.dtype.element_ty
    at = joined + (slot * (HEADS + 2 * GROUPS) + head) * 2 * HALF + lanes
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + GROUPS:
        if NORMED:
            gain = query_gain
            if head >= HEADS:
                gain = key_gain
            scale = tl.sqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF) + eps)
            first, second = first / scale, second / scale
            if EARLY:
                first, second = first.to(kind).to(tl.float32), second.to(kind).to(tl.float32)
            first *= tl.load(gain + lanes, mask=inside, other=0.0).to(tl.float32) + OFFSET
            second *= tl.load(gain + HALF + lanes, mask=inside, other=0.0).to(tl.float32) + OFFSET
            first, second = first.to(kind).to(tl.float32), second.to(kind).to(tl.float32)
        turn = slot * turn_row + lanes
        cos_1 = tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)
        cos_2 = tl.load(cos + turn + HALF, mask=inside, other=0.0).to(tl.float32)
        sin_1 = tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)
        sin_2 = tl.load(sin + turn + HALF, mask=inside, other=0.0).to(tl.float32)
        first, second = first * cos_1 - second * sin_1, second * cos_2 + first * sin_2
    where = tl.load(column + slot)
    cached = slot * cache_slot + where * cache_column + lanes
    to = query + (slot * HEADS + head) * 2 * HALF + lanes
    if head >= HEADS + GROUPS:
        to = values + cached + (head - HEADS - GROUPS) * cache_head
    elif head >= HEADS:
        to = keys + cached + (head - HEADS) * cache_head
    tl.store(to, first.to(kind), mask=inside)
    tl.store(to + HALF, second.to(kind), mask=inside)


def joined_products(x, weights, biases, room):
    """x (B, D) with three weights (N_i, D) -> (B, sum N_i). `room`: bytes of shared memory."""
    rows, width = x.shape
    ends = [weights[0].shape[0], weights[0].shape[0] + weights[1].shape[0]]
    count = ends[1] + weights[2].shape[0]
    out = torch.empty((rows, count), dtype=x.dtype, device=x.device)
    if rows > MOST_ROWS:
        for weight, bias, part in zip(weights, biases, out.split([len(weight) for weight in weights], 1), strict=True):
            product = torch.mm(x, weight.T, out=part)
            if bias is not None:
                product += bias
        return out
    biased = biases[0] is not None
    tall, deep = _tile(rows, width)
    joined_kernel[(count // COLUMNS, triton.cdiv(rows, tall))](
        x,
        *weights,
        *(biases if biased else weights),
        out,
        rows,
        END_1=ends[0],
        END_2=ends[1],
        COUNT=count,
        BIAS=biased,
        WIDTH=width,
        TALL=tall,
        WIDE=COLUMNS,
        DEEP=deep,
        num_warps=4,
        num_stages=_stages(room, (tall + COLUMNS) * deep),
    )
    return out


def gated_products(x, gate, up, room):
    """x (B, D), two weights (N, D) -> silu(x @ gate.T) * (x @ up.T)"""
    (rows, width), count = x.shape, gate.shape[0]
    if rows > MOST_ROWS:
        return gated_silu(torch.mm(x, gate.T), torch.mm(x, up.T))
    out = torch.empty((rows, count), dtype=x.dtype, device=x.device)
    tall, deep = _tile(rows, width)
    gated_kernel[(count // COLUMNS, triton.cdiv(rows, tall))](
        x,
        gate,
        up,
        out,
        rows,
        COUNT=count,
        WIDTH=width,
        TALL=tall,
        WIDE=COLUMNS,
        DEEP=deep,
        num_warps=4,
        num_stages=_stages(room, (tall + 2 * COLUMNS) * deep),
    )
    return out


def add_norm(stream, change, weight, eps, offset, early):
    """The norm of stream + change, (B, D); the sum is written over the stream. Without a change, the norm alone."""
    rows, width = stream.shape
    out, lanes = torch.empty_like(stream), triton.next_power_of_2(width)
    add_norm_kernel[(rows,)](
        stream,
        stream if change is None else change,
        weight,
        out,
        eps,
        WIDTH=width,
        LANES=lanes,
        ADDS=change is not None,
        OFFSET=offset,
        EARLY=early,
        num_warps=min(max(lanes // 512, 1), 16),
    )
    return out


def place_heads(joined, turns, gains, keys, values, column, groups, eps=0.0, offset=0.0, early=True):
    """joined (B, (H + 2 G) D) -> queries (B, H, D); keys and values go into the caches (S, G, W, D), which are alike.

    `turns`: cosines and sines (B, D). `gains`: weights (D,) of the norms of queries and keys, or None.
    """
    (slots, count), width = joined.shape, keys.shape[-1]
    heads = count // width - 2 * groups
    query = torch.empty((slots, heads, width), dtype=joined.dtype, device=joined.device)
    place_kernel[(slots, heads + 2 * groups)](
        joined,
        *turns,
        *(gains or (joined, joined)),
        query,
        keys,
        values,
        column,
        eps,
        turns[0].stride(0),
        *keys.stride()[:3],
        HEADS=heads,
        GROUPS=groups,
        HALF=width // 2,
        LANES=triton.next_power_of_2(width // 2),
        NORMED=gains is not None,
        OFFSET=offset,
        EARLY=early,
        num_warps=1,
    )
    return query


def takes_product(weight):
    """Whether its tiles are whole."""
    return weight.shape[0] % COLUMNS == 0 and weight.shape[1] % 32 == 0 and weight.is_contiguous()


def _tile(rows, width):
    """Slots of a tile, and how much of the inner axis is read at a time."""
    return min(max(triton.next_power_of_2(rows), 16), TILE), next(deep for deep in (128, 64, 32) if width % deep == 0)


def _stages(room, elements):
    """How many tiles of half precision are on their way at once."""
    return max(1, min(5, (room - RESERVED) // (2 * elements)))
