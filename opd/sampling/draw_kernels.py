# mypy: ignore-errors
"""`sampling.draw` for a GPU, in two kernels: one pass over the logits, and one look at the piece that holds the token.

Probabilities are summed in fp64, piece by piece, as there; what a row draws depends on nothing but that row.
"""

import torch
import triton
import triton.language as tl

from opd.sampling.draws import BITS, GAMMA, MULTIPLIERS

PIECE = 4096  # ids of a program


def _signed(value):
    return tl.constexpr(value - 2**64 if value >= 2**63 else value)


START, FIRST, SECOND = _signed(GAMMA), _signed(MULTIPLIERS[0]), _signed(MULTIPLIERS[1])
LOW_34, LOW_37, LOW_33, LOW_24 = (tl.constexpr(2**bits - 1) for bits in (34, 37, 33, BITS))
SHIFT, STEPS = tl.constexpr(64 - BITS), tl.constexpr(2.0**-BITS)


@triton.jit
def _uniform(key, position):
    """`draws.uniforms_at`; a shift right has to drop the copied sign bits."""
    mixed = key + position + START
    mixed = (mixed ^ ((mixed >> 30) & LOW_34)) * FIRST
    mixed = (mixed ^ ((mixed >> 27) & LOW_37)) * SECOND
    mixed = mixed ^ ((mixed >> 31) & LOW_33)
    return ((mixed >> SHIFT) & LOW_24).to(tl.float32) * STEPS


@triton.jit
def _shares(z, top, heat, keep, at, inside, FILTERED: tl.constexpr):
    """Probabilities of some ids as they are drawn, relative to that of `top`."""
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
    """Of one piece of one row: the largest logit, where it is, and the sums of exponentials at temperature 1 and as drawn."""
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
    """The logit of stopping, with whatever id, less the best; and whether the token is one of them."""
    which = tl.arange(0, LANES)
    ends = tl.load(stop + which, mask=which < STOPS, other=-1)
    z = tl.load(logits + ends, mask=which < STOPS, other=float("-inf")) - best
    top = tl.max(z, 0)
    return top + tl.log(tl.sum(tl.exp(z - top), 0)), tl.max(tl.where(ends == token, 1, 0), 0) > 0


@triton.jit
def _lane_of(part, rest, PIECE: tl.constexpr):
    """The first lane whose running sum exceeds the rest; the likeliest, should two sums disagree by a rounding."""
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
    """Token, log-prob, log-prob as drawn, log-prob of stopping, of one row."""
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
    """(4, N) fp64: tokens, their log-probs, those as drawn, and those of stopping.

    `keep` (N, V): the ids that top-k and top-p leave, where any row has them.
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
