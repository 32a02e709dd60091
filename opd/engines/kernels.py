"""Triton kernels for decoding one token per slot: writing keys and values, attention, drawing tokens, and decoder layers.

An attention program reads the used columns of one slot and key/value head, for all query heads that share it. Nothing is
gathered, repeated or masked. With few slots, columns are split into parts, so that the whole device has work.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from opd.engines.requests import BITS, GAMMA, MULTIPLIERS
from opd.models.fused_kernels import gated_silu

# mypy: ignore-errors


LOG2_E = 1.4426950408889634
PROGRAMS = 512  # enough to fill a large device
ATTENTION_COLUMNS = 64  # columns read at a time
FEWEST = 256  # the fewest columns per part
ATTENTION_RESERVED = 24 * 1024  # bytes of shared memory for queries, weights and Triton itself


@triton.jit
def decode_kernel(
    query, key, value, column, out, top, mass,
    query_slot, query_head, key_slot, key_head, key_column, value_slot, value_head, value_column, span, window,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, PARTS: tl.constexpr,
    WINDOWED: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Online softmax over the columns of a part, in base 2. With several parts, stores sums, maxima and masses."""
    slot, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    rows, lanes, offsets = tl.arange(0, ROWS), tl.arange(0, LANES), tl.arange(0, BLOCK)
    real = (rows[:, None] < GROUP) & (lanes[None, :] < WIDTH)
    last = tl.minimum(tl.load(column + slot), span - 1).to(tl.int32)  # idle slots may exceed the span
    first = tl.maximum(last - window + 1, 0) if WINDOWED else last * 0
    size = tl.cdiv(tl.cdiv(last + 1 - first, PARTS), BLOCK) * BLOCK
    start = first + part * size
    stop = tl.minimum(start + size, last + 1)
    q = tl.load(
        query + slot * query_slot + (head * GROUP + rows[:, None]) * query_head + lanes[None, :], mask=real, other=0.0
    )
    best = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, LANES], tl.float32)
    for begin in range(start, stop, BLOCK):
        at = begin + offsets
        seen = at < stop
        here = seen[:, None] & (lanes[None, :] < WIDTH)
        k = tl.load(
            key + slot * key_slot + head * key_head + at[:, None] * key_column + lanes[None, :], mask=here, other=0.0
        )
        v = tl.load(
            value + slot * value_slot + head * value_head + at[:, None] * value_column + lanes[None, :],
            mask=here,
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(k)) * SCALE
        scores = tl.where(seen[None, :], scores, -1e30)
        new = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp2(best - new)
        weights = tl.where(seen[None, :], tl.exp2(scores - new[:, None]), 0.0)
        total = total * shrink + tl.sum(weights, 1)
        found = found * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        best = new
    heads = tl.num_programs(1) * GROUP
    place = (slot * heads + head * GROUP + rows) * PARTS + part
    if PARTS == 1:
        found = found / tl.maximum(total, 1e-30)[:, None]
    else:
        tl.store(top + place, best, mask=rows < GROUP)
        tl.store(mass + place, total, mask=rows < GROUP)
    tl.store(out + place[:, None] * WIDTH + lanes[None, :], found.to(out.dtype.element_ty), mask=real)


@triton.jit
def join_kernel(
    parts, top, mass, out, PARTS: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    number, lanes = tl.arange(0, COUNT), tl.arange(0, LANES)
    there = number < PARTS
    best = tl.load(top + row * PARTS + number, mask=there, other=-1e30)
    weight = tl.where(there, tl.exp2(best - tl.max(best, 0)), 0.0)
    total = tl.sum(weight * tl.load(mass + row * PARTS + number, mask=there, other=0.0), 0)
    real = there[:, None] & (lanes[None, :] < WIDTH)
    values = tl.load(parts + (row * PARTS + number[:, None]) * WIDTH + lanes[None, :], mask=real, other=0.0)
    found = tl.sum(values * weight[:, None], 0) / tl.maximum(total, 1e-30)
    tl.store(out + row * WIDTH + lanes, found.to(out.dtype.element_ty), mask=lanes < WIDTH)


@triton.jit
def store_kernel(
    key, value, keys, values, column, key_slot, key_head, value_slot, value_head,
    keys_slot, keys_head, keys_column, values_slot, values_head, values_column,
    GROUPS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Store keys and values of all heads of one slot."""
    slot, heads, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)[:, None], tl.arange(0, LANES)[None, :]
    real = (heads < GROUPS) & (lanes < WIDTH)
    at = tl.load(column + slot)
    new = tl.load(key + slot * key_slot + heads * key_head + lanes, mask=real)
    tl.store(keys + slot * keys_slot + heads * keys_head + at * keys_column + lanes, new, mask=real)
    new = tl.load(value + slot * value_slot + heads * value_head + lanes, mask=real)
    tl.store(values + slot * values_slot + heads * values_head + at * values_column + lanes, new, mask=real)


def store_slots(keys, values, key, value, column):
    """Store key and value (B, G, D) of one token per slot in caches (S, G, W, D), at `column` (B,)."""
    slots, groups, width = key.shape
    store_kernel[(slots,)](
        key, value, keys, values, column, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2), values.stride(0), values.stride(1), values.stride(2),
        GROUPS=groups, PADDED=_power_of_2(groups), WIDTH=width, LANES=_power_of_2(width), num_warps=4,
    )  # fmt: skip


def attend_slots(query, key, value, column, span, scale, window=None, room=0):
    """query (B, H, D), caches (S, G, W, D), of which the first B slots are used, column (B,) -> (B, H, D).

    `room`: bytes of shared memory. It is an argument since torch.compile cannot query the device.
    """
    slots, heads, width = query.shape
    groups = key.shape[1]
    parts = max(1, min(PROGRAMS // (slots * groups), span // FEWEST, 16))
    lanes, rows = max(_power_of_2(width), 16), max(_power_of_2(heads // groups), 16)  # `tl.dot` needs at least 16
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    halves = out if parts == 1 else torch.empty((slots, heads, parts, width), dtype=torch.float32, device=query.device)
    top, mass = torch.empty((2, slots, heads, parts), dtype=torch.float32, device=query.device)
    decode_kernel[(slots, groups, parts)](
        query, key, value, column, halves, top, mass, query.stride(0), query.stride(1),
        key.stride(0), key.stride(1), key.stride(2), value.stride(0), value.stride(1), value.stride(2),
        span, 0 if window is None else window, GROUP=heads // groups, ROWS=rows, WIDTH=width, LANES=lanes,
        PARTS=parts, WINDOWED=window is not None, BLOCK=ATTENTION_COLUMNS, SCALE=scale * LOG2_E, num_warps=4,
        num_stages=stages_in(room, lanes, query.element_size()),
    )  # fmt: skip
    if parts > 1:
        join_kernel[(slots * heads,)](
            halves, top, mass, out, PARTS=parts, COUNT=_power_of_2(parts), WIDTH=width, LANES=lanes, num_warps=1
        )  # fmt: skip
    return out


def stages_in(room, width, size):
    """Pipeline stages that fit into `room` bytes. Tiles have `width` elements per column, of `size` bytes each."""
    return max(1, min(3, (room - ATTENTION_RESERVED) // (2 * ATTENTION_COLUMNS * width * size)))


def _power_of_2(number):
    """The smallest power of 2 that is at least `number`."""
    return 1 << (number - 1).bit_length()


# --- Drawing tokens: `requests.draw` in two kernels ---
#
# The first reads all logits, the second only the piece that holds the token. Probabilities are summed in fp64 per piece, as in
# `requests.draw`. A row's token depends only on that row.


# mypy: ignore-errors


PIECE = 4096  # ids per program


def _signed(value):
    return tl.constexpr(value - 2**64 if value >= 2**63 else value)


START, FIRST, SECOND = _signed(GAMMA), _signed(MULTIPLIERS[0]), _signed(MULTIPLIERS[1])
LOW_34, LOW_37, LOW_33, LOW_24 = (tl.constexpr(2**bits - 1) for bits in (34, 37, 33, BITS))
SHIFT, STEPS = tl.constexpr(64 - BITS), tl.constexpr(2.0**-BITS)


@triton.jit
def _uniform(key, position):
    """`draws.uniforms_at`. A right shift has to drop the copied sign bits."""
    mixed = key + position + START
    mixed = (mixed ^ ((mixed >> 30) & LOW_34)) * FIRST
    mixed = (mixed ^ ((mixed >> 27) & LOW_37)) * SECOND
    mixed = mixed ^ ((mixed >> 31) & LOW_33)
    return ((mixed >> SHIFT) & LOW_24).to(tl.float32) * STEPS


@triton.jit
def _shares(z, top, heat, keep, at, inside, FILTERED: tl.constexpr):
    """Sampling probabilities of some ids, relative to that of the logit `top`."""
    share = tl.where(inside, tl.exp((z - top) / heat), 0.0)
    if FILTERED:
        share = tl.where(tl.load(keep + at, mask=inside, other=0) != 0, share, 0.0)
    return share.to(tl.float64)


@triton.jit
def pieces_kernel(
    logits,
    keep,
    temperature,
    found,
    stride,
    size,
    pieces,
    FILTERED: tl.constexpr,
    PIECE: tl.constexpr,
):
    """For one piece of a row: the largest logit, its id, and the sums of exponentials at temperature 1 and as sampled."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = piece * PIECE + tl.arange(0, PIECE)
    inside = ids < size
    z = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf"))
    heat = tl.load(temperature + row)
    heat = tl.where(heat == 0.0, 1.0, heat)
    top = tl.max(z, 0)
    to = row * pieces + piece
    plane = tl.num_programs(0).to(tl.int64) * pieces
    tl.store(found + to, top.to(tl.float64))
    tl.store(found + plane + to, tl.min(tl.where(z == top, ids, size), 0).to(tl.float64))
    tl.store(found + 2 * plane + to, tl.sum(tl.where(inside, tl.exp(z - top), 0.0).to(tl.float64), 0))
    tl.store(found + 3 * plane + to, tl.sum(_shares(z, top, heat, keep, row * size + ids, inside, FILTERED), 0))


@triton.jit
def _stop_event(logits, best, token, stop, STOPS: tl.constexpr, LANES: tl.constexpr):
    """(logit of stopping with any stop id, minus the best logit; whether the token is a stop id)."""
    which = tl.arange(0, LANES)
    ends = tl.load(stop + which, mask=which < STOPS, other=-1)
    z = tl.load(logits + ends, mask=which < STOPS, other=float("-inf")) - best
    top = tl.max(z, 0)
    return top + tl.log(tl.sum(tl.exp(z - top), 0)), tl.max(tl.where(ends == token, 1, 0), 0) > 0


@triton.jit
def _lane_of(part, rest, PIECE: tl.constexpr):
    """The first lane with a running sum above `rest`; the likeliest lane if rounding makes the two sums disagree."""
    lanes = tl.arange(0, PIECE)
    index = tl.sum(tl.where(tl.cumsum(part, 0) <= rest, 1, 0), 0)
    held = tl.sum(tl.where(lanes == index, part, 0.0), 0)
    likeliest = tl.min(tl.where(part == tl.max(part, 0), lanes, PIECE), 0)
    return tl.where(held > 0.0, index, likeliest)


@triton.jit
def pick_kernel(
    logits,
    keep,
    temperature,
    keys,
    positions,
    stop,
    found,
    out,
    stride,
    size,
    pieces,
    rows,
    FILTERED: tl.constexpr,
    STOPS: tl.constexpr,
    STOP_LANES: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """For one row: token, log-prob, log-prob under the sampling distribution, log-prob of stopping."""
    row, number = tl.program_id(0).to(tl.int64), tl.arange(0, PIECES)
    there, at, plane = number < pieces, found + row * pieces + number, tl.num_programs(0).to(tl.int64) * pieces
    heat = tl.load(temperature + row)
    greedy = heat == 0.0
    heat = tl.where(greedy, 1.0, heat)
    top = tl.load(at, mask=there, other=float("-inf")).to(tl.float32)
    best = tl.max(top, 0)
    scale = tl.where(there, tl.exp(top - best), 0.0).to(tl.float64)
    total = tl.log(tl.sum(scale * tl.load(at + 2 * plane, mask=there, other=0.0), 0))
    cooled = tl.where(there, tl.exp((top - best) / heat), 0.0).to(tl.float64)
    share = cooled * tl.load(at + 3 * plane, mask=there, other=0.0)
    before = tl.cumsum(share, 0)
    mass = tl.max(before, 0)
    target = _uniform(tl.load(keys + row), tl.load(positions + row)).to(tl.float64) * mass
    chosen = tl.minimum(tl.sum(tl.where(there & (before <= target), 1, 0), 0), pieces - 1)
    rest = target - tl.max(tl.where(number < chosen, before, 0.0), 0)
    here = tl.max(tl.where(number == chosen, top, float("-inf")), 0)
    factor = tl.sum(tl.where(number == chosen, cooled, 0.0), 0)

    ids = chosen * PIECE + tl.arange(0, PIECE)
    inside = ids < size
    z = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf"))
    part = factor * _shares(z, here, heat, keep, row * size + ids, inside, FILTERED)
    index = _lane_of(part, rest, PIECE)
    place = tl.load(at + plane, mask=there, other=0.0).to(tl.int32)
    first = tl.min(tl.where(there & (top == best), place, size), 0)
    token = tl.minimum(tl.where(greedy, first, chosen * PIECE + index), size - 1)
    logit = tl.load(logits + row * stride + token) - best
    logprob = logit.to(tl.float64) - total
    sampled = tl.where(greedy, 0.0, (logit / heat).to(tl.float64) - tl.log(mass))
    stopping = total * float("nan")
    if STOPS > 0:
        event, stopped = _stop_event(logits + row * stride, best, token, stop, STOPS, STOP_LANES)
        stopping = event.to(tl.float64) - total
        logprob = tl.where(stopped, stopping, logprob)
    tl.store(out + row, token.to(tl.float64))
    tl.store(out + rows + row, logprob)
    tl.store(out + 2 * rows + row, sampled)
    tl.store(out + 3 * rows + row, stopping)


def draw_rows(logits, settings, stop, keep=None):
    """(4, N) fp64: tokens, their log-probs, those under the sampling distribution, and those of stopping.

    `keep` (N, V): the ids that pass top-k and top-p, if any row uses them.
    """
    (rows, size), device = logits.shape, logits.device
    pieces, filtered = triton.cdiv(size, PIECE), keep is not None
    found = torch.empty((4, rows, pieces), dtype=torch.float64, device=device)
    out = torch.empty((4, rows), dtype=torch.float64, device=device)
    keep = keep.view(torch.int8) if filtered else found
    temperature, *state = (part.contiguous() for part in (settings.temperature, settings.key, settings.position))
    pieces_kernel[(rows, pieces)](
        logits,
        keep,
        temperature,
        found,
        logits.stride(0),
        size,
        pieces,
        FILTERED=filtered,
        PIECE=PIECE,
        num_warps=8,
    )
    sizes = {"STOPS": len(stop), "STOP_LANES": triton.next_power_of_2(max(len(stop), 1))}
    pick_kernel[(rows,)](
        logits,
        keep,
        temperature,
        *state,
        stop,
        found,
        out,
        logits.stride(0),
        size,
        pieces,
        rows,
        FILTERED=filtered,
        **sizes,
        PIECES=triton.next_power_of_2(pieces),
        PIECE=PIECE,
        num_warps=8,
    )
    return out


# --- Decoder layers for one token per slot, with few kernel launches ---
#
# A decode step reads every weight once and computes little, so the number of kernels counts: the gap between two is as long as
# many of them run. Queries, keys and values are one kernel; gate, up and activation another; norm and residual sum a third;
# head norm, rotation and cache write a fourth.


# mypy: ignore-errors


MOST_ROWS = 128  # slots; up to here, reading the weights dominates the cost of a product
TILE = 64  # slots per tile
LAYER_RESERVED = 8 * 1024  # bytes of shared memory reserved for Triton
LAYER_COLUMNS = 32  # outputs per tile: gives enough tiles for all processors of a large device


@triton.jit
def _product(x, weight, rows, first, WIDTH: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr):
    """A tile of x @ weight.T: TALL slots by WIDE outputs from `first` on."""
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
    """x @ weight.T + bias for three weights, concatenated."""
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
    """stream += change, and the RMS norm of the sum, for one slot."""
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
    """One head of one slot: normalise and rotate a query; normalise, rotate and store a key; store a value."""
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
    joined_kernel[(count // LAYER_COLUMNS, triton.cdiv(rows, tall))](
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
        WIDE=LAYER_COLUMNS,
        DEEP=deep,
        num_warps=4,
        num_stages=_stages(room, (tall + LAYER_COLUMNS) * deep),
    )
    return out


def gated_products(x, gate, up, room):
    """x (B, D), two weights (N, D) -> silu(x @ gate.T) * (x @ up.T)"""
    (rows, width), count = x.shape, gate.shape[0]
    if rows > MOST_ROWS:
        return gated_silu(torch.mm(x, gate.T), torch.mm(x, up.T))
    out = torch.empty((rows, count), dtype=x.dtype, device=x.device)
    tall, deep = _tile(rows, width)
    gated_kernel[(count // LAYER_COLUMNS, triton.cdiv(rows, tall))](
        x,
        gate,
        up,
        out,
        rows,
        COUNT=count,
        WIDTH=width,
        TALL=tall,
        WIDE=LAYER_COLUMNS,
        DEEP=deep,
        num_warps=4,
        num_stages=_stages(room, (tall + 2 * LAYER_COLUMNS) * deep),
    )
    return out


def add_norm(stream, change, weight, eps, offset, early):
    """The norm of stream + change, (B, D). The stream is updated in place. If `change` is None, only the norm."""
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
    """joined (B, (H + 2 G) D) -> queries (B, H, D). Keys and values go into caches (S, G, W, D) with equal strides.

    `turns`: cosines and sines (B, D). `gains`: weights (D,) of the query and key norms, or None.
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
    """Whether the weight divides into whole tiles."""
    return weight.shape[0] % LAYER_COLUMNS == 0 and weight.shape[1] % 32 == 0 and weight.is_contiguous()


def _tile(rows, width):
    """(slots per tile, elements of the inner axis read at a time)."""
    return min(max(triton.next_power_of_2(rows), 16), TILE), next(deep for deep in (128, 64, 32) if width % deep == 0)


def _stages(room, elements):
    """Pipeline stages of half-precision tiles that fit into `room` bytes."""
    return max(1, min(5, (room - LAYER_RESERVED) // (2 * elements)))
