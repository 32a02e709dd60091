# mypy: ignore-errors
"""The k largest columns of every row, without sorting: three kernels, of which only the first reads whole rows.

Each block of columns is represented by its maximum. The k blocks with the largest maxima hold the k largest columns, and which
these are is found by bisection: fp32 numbers are in the order of their bits. Among equal ones the first are taken.
"""

import torch
import triton
import triton.language as tl

BLOCK = 64  # columns of a block
BLOCKS = 64  # of a program
MOST = 256  # columns that can be asked for: their blocks fit into registers
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def maxima_kernel(values, maxima, stride, columns, blocks, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = number[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    found = tl.max(tl.load(values + row * stride + at, mask=at < columns, other=LOWEST), 1)
    tl.store(maxima + row * blocks + number, found, mask=number < blocks)


@triton.jit
def _among_largest(value, k):
    """Which lanes hold the k largest, and the place of each among them."""
    bits = value.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    low = tl.full((), -2147483648, tl.int64)
    high = tl.full((), 2147483648, tl.int64)
    for _ in range(32):
        middle = (low + high) >> 1
        enough = tl.sum((order >= middle.to(tl.int32)).to(tl.int32), 0) >= k
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    edge = low.to(tl.int32)
    above, level = order > edge, order == edge
    left = k - tl.sum(above.to(tl.int32), 0)
    taken = above | (level & (tl.cumsum(level.to(tl.int32), 0) <= left))
    return taken, tl.cumsum(taken.to(tl.int32), 0) - 1


@triton.jit
def blocks_kernel(maxima, chosen, blocks, k, LANES: tl.constexpr):
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    value = tl.load(maxima + row * blocks + lanes, mask=lanes < blocks, other=LOWEST)
    taken, place = _among_largest(value, k)
    tl.store(chosen + row * k + place, lanes, mask=taken)


@triton.jit
def columns_kernel(values, chosen, found, ids, stride, columns, k, LANES: tl.constexpr, BLOCK: tl.constexpr):
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    block = tl.load(chosen + row * k + lanes // BLOCK, mask=lanes // BLOCK < k, other=0)
    at = block * BLOCK + lanes % BLOCK
    value = tl.load(values + row * stride + at, mask=(lanes // BLOCK < k) & (at < columns), other=LOWEST)
    taken, place = _among_largest(value, k)
    tl.store(found + row * k + place, value, mask=taken)
    tl.store(ids + row * k + place, at.to(tl.int64), mask=taken)


def takes(values, k):
    """Whether it is for these."""
    return k <= MOST and values.shape[-1] > 4 * k * BLOCK and values.stride(-1) == 1 and values.dtype == torch.float32


def largest_columns(values, k):
    """The k largest of every row (n, C) of fp32 numbers, in any order: values and columns (n, k)."""
    rows, columns = values.shape
    blocks = triton.cdiv(columns, BLOCK)
    maxima = torch.empty((rows, blocks), dtype=torch.float32, device=values.device)
    chosen = torch.empty((rows, k), dtype=torch.int32, device=values.device)
    found = torch.empty((rows, k), dtype=torch.float32, device=values.device)
    ids = torch.empty((rows, k), dtype=torch.int64, device=values.device)
    stride = values.stride(0)
    maxima_kernel[(rows, triton.cdiv(blocks, BLOCKS))](
        values, maxima, stride, columns, blocks, BLOCKS=BLOCKS, BLOCK=BLOCK, num_warps=4
    )
    lanes = triton.next_power_of_2(blocks)
    blocks_kernel[(rows,)](maxima, chosen, blocks, k, LANES=lanes, num_warps=_warps(lanes))
    lanes = triton.next_power_of_2(k) * BLOCK
    columns_kernel[(rows,)](
        values, chosen, found, ids, stride, columns, k, LANES=lanes, BLOCK=BLOCK, num_warps=_warps(lanes)
    )
    return found, ids


def _warps(lanes):
    return min(max(lanes // 512, 1), 16)
