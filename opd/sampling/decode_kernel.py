# mypy: ignore-errors
"""One new token per slot: its key and value into the slot cache, and attention straight from there; one Triton kernel each.

A program reads the columns in use of one slot and key/value head, for all query heads that share it; nothing is
gathered, repeated or masked. Few slots are cut into parts along their columns, so that the whole device has work.
"""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
PROGRAMS = 512  # enough to fill a large device
COLUMNS = 64  # read at a time
FEWEST = 256  # columns that a part is worth
RESERVED = 24 * 1024  # bytes of shared memory for queries, weights and what Triton needs itself


@triton.jit
def decode_kernel(
    query, key, value, column, out, top, mass,
    query_slot, query_head, key_slot, key_head, key_column, value_slot, value_head, value_column, span, window,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, PARTS: tl.constexpr,
    WINDOWED: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Online softmax over the columns of a part, base 2. Several parts leave their sums, maxima and masses."""
    slot, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    rows, lanes, offsets = tl.arange(0, ROWS), tl.arange(0, LANES), tl.arange(0, BLOCK)
    real = (rows[:, None] < GROUP) & (lanes[None, :] < WIDTH)
    last = tl.minimum(tl.load(column + slot), span - 1).to(tl.int32)  # idle slots run on
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
    """All heads of one slot."""
    slot, heads, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)[:, None], tl.arange(0, LANES)[None, :]
    real = (heads < GROUPS) & (lanes < WIDTH)
    at = tl.load(column + slot)
    new = tl.load(key + slot * key_slot + heads * key_head + lanes, mask=real)
    tl.store(keys + slot * keys_slot + heads * keys_head + at * keys_column + lanes, new, mask=real)
    new = tl.load(value + slot * value_slot + heads * value_head + lanes, mask=real)
    tl.store(values + slot * values_slot + heads * values_head + at * values_column + lanes, new, mask=real)


def store_slots(keys, values, key, value, column):
    """key and value (B, G, D) of one token per slot into caches (S, G, W, D), at the column (B,) of each."""
    slots, groups, width = key.shape
    store_kernel[(slots,)](
        key, value, keys, values, column, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2), values.stride(0), values.stride(1), values.stride(2),
        GROUPS=groups, PADDED=_power_of_2(groups), WIDTH=width, LANES=_power_of_2(width), num_warps=4,
    )  # fmt: skip


def attend_slots(query, key, value, column, span, scale, window=None, room=0):
    """query (B, H, D), caches (S, G, W, D) whose first B slots are meant, column (B,) of each token -> (B, H, D).

    `room`: bytes of shared memory. Torch compiles this, so it asks no device for them itself.
    """
    slots, heads, width = query.shape
    groups = key.shape[1]
    parts = max(1, min(PROGRAMS // (slots * groups), span // FEWEST, 16))
    lanes, rows = max(_power_of_2(width), 16), max(_power_of_2(heads // groups), 16)  # as small as a product can be
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    halves = out if parts == 1 else torch.empty((slots, heads, parts, width), dtype=torch.float32, device=query.device)
    top, mass = torch.empty((2, slots, heads, parts), dtype=torch.float32, device=query.device)
    decode_kernel[(slots, groups, parts)](
        query, key, value, column, halves, top, mass, query.stride(0), query.stride(1),
        key.stride(0), key.stride(1), key.stride(2), value.stride(0), value.stride(1), value.stride(2),
        span, 0 if window is None else window, GROUP=heads // groups, ROWS=rows, WIDTH=width, LANES=lanes,
        PARTS=parts, WINDOWED=window is not None, BLOCK=COLUMNS, SCALE=scale * LOG2_E, num_warps=4,
        num_stages=stages_in(room, lanes, query.element_size()),
    )  # fmt: skip
    if parts > 1:
        join_kernel[(slots * heads,)](
            halves, top, mass, out, PARTS=parts, COUNT=_power_of_2(parts), WIDTH=width, LANES=lanes, num_warps=1
        )  # fmt: skip
    return out


def stages_in(room, width, size):
    """How many tiles of keys and values, so wide and of so many bytes each, are on their way at once in `room` bytes."""
    return max(1, min(3, (room - RESERVED) // (2 * COLUMNS * width * size)))


def _power_of_2(number):
    """At least as large."""
    return 1 << (number - 1).bit_length()
