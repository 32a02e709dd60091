# mypy: ignore-errors
"""Kernels over the few numbers beside a tile: a row's running values, merged events, chosen columns. Each stands for a
dozen small operations of torch, whose launches would keep the GPU waiting.

close_kernel             what finished rows' running values say
chosen_kernel            log-probs of both sides at chosen ids
chosen_gradient_kernel   the gradient at chosen ids, and that of the events
event_gradient_kernel    a divergence's gradient in the events' logits
members_kernel           from the gradient of events to that of their members

Axis legend: n = rows of a tile, K = chosen columns, E = merged events, M = their member ids.
"""

import torch
import triton
import triton.language as tl

from opd.divergences.triton_kernels import GONE, LOG_ZERO, _mean_slope, _normaliser, _terms

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["state_stride", "count"])  # the number of tokens, another one each time
def close_kernel(state_ptr, state_stride, out_ptr, count, BOTH: tl.constexpr, BLOCK: tl.constexpr):
    """(6, n): normalisers of both sides, entropies of both sides, reverse and forward KL. Not BOTH: there is no teacher."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    state, out = state_ptr + row, out_ptr + row
    s_top, s_sum, s_logit, s_gap = _side(state, state_stride, inside)
    s_lse = tl.div_rn(s_top + tl.log2(s_sum), LOG2_E)
    tl.store(out, s_lse, mask=inside)
    tl.store(out + 2 * count, s_lse - _mean(s_logit, s_sum), mask=inside)
    if BOTH:
        t_top, t_sum, t_logit, t_gap = _side(state + 4 * state_stride, state_stride, inside)
        t_lse = tl.div_rn(t_top + tl.log2(t_sum), LOG2_E)
        tl.store(out + count, t_lse, mask=inside)
        tl.store(out + 3 * count, t_lse - _mean(t_logit, t_sum), mask=inside)
        tl.store(out + 4 * count, _mean(s_gap, s_sum) - s_lse + t_lse, mask=inside)
        tl.store(out + 5 * count, _mean(t_gap, t_sum) - t_lse + s_lse, mask=inside)


@triton.jit
def _mean(weighted, total):
    """Of a sum in base 2; rounded to the nearest, since large numbers cancel in what it is taken from."""
    return tl.div_rn(tl.div_rn(weighted, LOG2_E), total)


@triton.jit
def _side(state, stride, inside):
    top = tl.load(state, mask=inside, other=0.0)
    total = tl.load(state + stride, mask=inside, other=1.0)
    logit = tl.load(state + 2 * stride, mask=inside, other=0.0)
    return top, total, logit, tl.load(state + 3 * stride, mask=inside, other=0.0)


@triton.jit
def _chosen_logits(row_ptr, ids, columns, scale, cap, first_ptr, event_ptr, events, SOFTCAP: tl.constexpr):
    """Logits at the ids; LOG_ZERO where an id is -1 or its column is not one. Merged ids have their event's."""
    raw = tl.load(row_ptr + ids, mask=(ids >= 0) & (ids < columns), other=LOG_ZERO)
    z = raw * scale
    if SOFTCAP:
        z = (2 * tl.sigmoid(2 * z) - 1) * cap
    z = tl.where(raw <= GONE, LOG_ZERO, z)
    for event in range(events):
        z = tl.where(ids == tl.load(first_ptr + event), tl.load(event_ptr + event), z)
    return z


@triton.jit(do_not_specialize=["state_stride"])
def chosen_kernel(
    s_ptr, t_ptr, s_stride, t_stride, ids_ptr, state_ptr, state_stride, first_ptr, s_event_ptr, t_event_ptr,
    s_out_ptr, t_out_ptr, k, columns, events, s_scale, s_cap, t_scale, t_cap,
    S_SOFTCAP: tl.constexpr, T_SOFTCAP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """(n, K) log-probs of both sides."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    ids = tl.load(ids_ptr + row * k + lanes, mask=lanes < k, other=-1)
    s_event, t_event = s_event_ptr + row * events, t_event_ptr + row * events
    s = _chosen_logits(s_ptr + row * s_stride, ids, columns, s_scale, s_cap, first_ptr, s_event, events, S_SOFTCAP)
    t = _chosen_logits(t_ptr + row * t_stride, ids, columns, t_scale, t_cap, first_ptr, t_event, events, T_SOFTCAP)
    tl.store(s_out_ptr + row * k + lanes, s - _normaliser(state_ptr + row, state_stride), mask=lanes < k)
    t_lse = _normaliser(state_ptr + 4 * state_stride + row, state_stride)
    tl.store(t_out_ptr + row * k + lanes, t - t_lse, mask=lanes < k)


@triton.jit(do_not_specialize=["state_stride"])
def chosen_gradient_kernel(
    grad_ptr, grad_stride, ids_ptr, slope_ptr, total_ptr, logprob_ptr, state_ptr, state_stride, first_ptr, event_ptr,
    event_grad_ptr, k, columns, events, factor, cap, SOFTCAP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """slope - S total, in raw values over the tile at the ids; and the same in the events' logits (n, E)."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    ids = tl.load(ids_ptr + row * k + lanes, mask=lanes < k, other=-1)
    slope = tl.load(slope_ptr + row * k + lanes, mask=ids >= 0, other=0.0)
    logprob = tl.load(logprob_ptr + row * k + lanes, mask=ids >= 0, other=LOG_ZERO)
    total, lse = tl.load(total_ptr + row), _normaliser(state_ptr + row, state_stride)
    grad = slope - tl.exp(logprob) * total
    if SOFTCAP:
        tanh = (logprob + lse) / cap
        grad = tl.where(logprob <= GONE, 0.0, grad * (1 - tanh * tanh))
    grad *= factor
    inside = (ids >= 0) & (ids < columns)
    tl.store(grad_ptr + row * grad_stride + ids, grad.to(grad_ptr.dtype.element_ty), mask=inside)
    for event in range(events):
        hit = tl.sum(tl.where(ids == tl.load(first_ptr + event), slope, 0.0), 0)
        share = tl.exp(tl.load(event_ptr + row * events + event) - lse)
        tl.store(event_grad_ptr + row * events + event, hit - share * total)


@triton.jit(do_not_specialize=["state_stride"])
def event_gradient_kernel(
    s_event_ptr, t_event_ptr, state_ptr, state_stride, phi_ptr, slope_ptr, factor_ptr, event_grad_ptr, events, a,
    KIND: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """`gradient_kernel` in the logits of merged events (n, E)."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    inside, at = lanes < events, row * events + lanes
    s_state, t_state = state_ptr + row, state_ptr + 4 * state_stride + row
    s_lse, t_lse = _normaliser(s_state, state_stride), _normaliser(t_state, state_stride)
    factor = tl.load(factor_ptr + row)
    mean, factor = _mean_slope(s_state, state_stride, s_lse, t_lse, phi_ptr + row, slope_ptr + row, factor, KIND)
    ls = tl.load(s_event_ptr + at, mask=inside, other=0.0) - s_lse
    lt = tl.load(t_event_ptr + at, mask=inside, other=0.0) - t_lse
    _, slope, s = _terms(ls, lt, a, KIND)
    tl.store(event_grad_ptr + at, (slope - s * mean) * factor, mask=inside)


@triton.jit
def members_kernel(
    grad_ptr, grad_stride, event_grad_ptr, share_ptr, logit_ptr, of_event_ptr, place_ptr, ids_ptr,
    start, count, events, members, factor, cap, SOFTCAP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """`count` members lie in this tile, at `place` among all; `share` and `logit` are (n, M)."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    inside = lanes < count
    place = tl.load(place_ptr + lanes, mask=inside, other=0)
    column = tl.load(ids_ptr + lanes, mask=inside, other=0) - start
    event = tl.load(of_event_ptr + place, mask=inside, other=0)
    grad = tl.load(event_grad_ptr + row * events + event, mask=inside, other=0.0)
    grad *= tl.load(share_ptr + row * members + place, mask=inside, other=0.0)
    if SOFTCAP:
        tanh = tl.load(logit_ptr + row * members + place, mask=inside, other=0.0) / cap
        grad *= 1 - tanh * tanh
    grad *= factor
    tl.store(grad_ptr + row * grad_stride + column, grad.to(grad_ptr.dtype.element_ty), mask=inside)


def closing_values(state, both):
    """(n,) each, from running values (8, n): normalisers of both sides, entropies of both sides, reverse and forward KL.

    Without `both` the first and the third alone say something.
    """
    n = state.shape[1]
    found = torch.empty((6, n), dtype=torch.float32, device=state.device)
    close_kernel[(triton.cdiv(n, 256),)](state, state.stride(0), found, n, BOTH=both, BLOCK=256, num_warps=4)
    return found.unbind()


def event_gradient(student, teacher, state, phi, slope, weight, parameter, kind):
    """(n, E) gradient in the events' logits (n, E)."""
    found, events = torch.empty_like(student), student.shape[1]
    event_gradient_kernel[(len(student),)](
        student, teacher, state, state.stride(0), phi, slope, weight, found, events, parameter,
        KIND=kind, LANES=triton.next_power_of_2(events), num_warps=_warps(events),
    )  # fmt: skip
    return found


def members_gradient_(grad, events, share, logit, of_event, here, factor, reading):
    """Spread a gradient in the events' logits (n, E) over `grad`'s columns. `here`: place, id and first column of those in it."""
    place, ids, start = here
    if len(ids):
        members_kernel[(len(grad),)](
            grad, grad.stride(0), events, share, logit, of_event, place, ids, start, len(ids), events.shape[1],
            share.shape[1], factor, reading.cap, SOFTCAP=reading.softcap, LANES=triton.next_power_of_2(len(ids)), num_warps=_warps(len(ids)),
        )  # fmt: skip


def chosen_logprobs(tile, ids, state, first, student, teacher):
    """(n, K) log-probs of both sides at the ids; `student` and `teacher` are the events' logits (n, E), or None."""
    n, k = ids.shape
    s, t = (torch.empty((n, k), dtype=torch.float32, device=ids.device) for _ in range(2))
    events = 0 if first is None else len(first)
    none = events == 0
    chosen_kernel[(n,)](
        tile.student, tile.teacher, tile.student.stride(0), tile.teacher.stride(0), ids, state, state.stride(0),
        ids if none else first, s if none else student, t if none else teacher, s, t, k, tile.student.shape[1], events,
        tile.s.scale, tile.s.cap, tile.t.scale, tile.t.cap, S_SOFTCAP=tile.s.softcap, T_SOFTCAP=tile.t.softcap,
        LANES=triton.next_power_of_2(max(k, 1)), num_warps=_warps(k),
    )  # fmt: skip
    return s, t


def chosen_gradient_(grad, ids, slope, total, logprob, state, first, student, factor, reading):
    """At the ids of `grad`, which has -S total elsewhere; returns that in the events' logits (n, E)."""
    n, k = ids.shape
    events = 0 if first is None else len(first)
    found = torch.empty((n, events), dtype=torch.float32, device=ids.device)
    chosen_gradient_kernel[(n,)](
        grad, grad.stride(0), ids, slope, total, logprob, state, state.stride(0), ids if events == 0 else first,
        slope if events == 0 else student, slope if events == 0 else found, k, grad.shape[1], events, factor, reading.cap,
        SOFTCAP=reading.softcap, LANES=triton.next_power_of_2(max(k, 1)), num_warps=_warps(k),
    )  # fmt: skip
    return found


def _warps(count):
    return min(max(triton.next_power_of_2(max(count, 1)) // 64, 1), 16)
