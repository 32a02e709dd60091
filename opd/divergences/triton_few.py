# mypy: ignore-errors
"""Kernels over the few numbers beside a tile: a row's running values, merged events, chosen columns. Each stands for a
dozen small operations of torch, whose launches would keep the GPU waiting.

close_kernel             what finished rows' running values say
chosen_kernel            log-probs of both sides at chosen ids
take_kernel              logits of both sides at chosen ids, which are taken out of the tile
tail_kernel              log-probs of what was taken and of all that was left
chosen_gradient_kernel   the gradient at chosen ids, and that of the events
event_gradient_kernel    a divergence's gradient in the events' logits
members_kernel           from the gradient of events to that of their members

Axis legend: n = rows of a tile, K = chosen columns, E = merged events, M = their member ids.
"""

import torch
import triton
import triton.language as tl

from opd.divergences.triton_kernels import FAR, GONE, LN_2, LOG_ZERO, _mean_slope, _normaliser, _online, _terms

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
def take_kernel(
    s_ptr, t_ptr, s_stride, t_stride, ids_ptr, state_ptr, state_stride, first_ptr, s_event_ptr, t_event_ptr,
    s_out_ptr, t_out_ptr, k, columns, events, s_scale, s_cap, t_scale, t_cap,
    S_SOFTCAP: tl.constexpr, T_SOFTCAP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Logits of both sides at the ids into (n, K + 1), and LOG_ZERO in their place in the tile. A row's running values begin
    anew, with the events that are not among the ids.
    """
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    ids = tl.load(ids_ptr + row * k + lanes, mask=lanes < k, other=-1)
    s_row, t_row = s_ptr + row * s_stride, t_ptr + row * t_stride
    s_event, t_event = s_event_ptr + row * events, t_event_ptr + row * events
    s = _chosen_logits(s_row, ids, columns, s_scale, s_cap, first_ptr, s_event, events, S_SOFTCAP)
    t = _chosen_logits(t_row, ids, columns, t_scale, t_cap, first_ptr, t_event, events, T_SOFTCAP)
    tl.debug_barrier()
    inside, gone = (ids >= 0) & (ids < columns), tl.full((LANES,), LOG_ZERO, tl.float32)
    tl.store(s_row + ids, gone, mask=inside)
    tl.store(t_row + ids, gone, mask=inside)
    tl.store(s_out_ptr + row * (k + 1) + lanes, s, mask=lanes < k)
    tl.store(t_out_ptr + row * (k + 1) + lanes, t, mask=lanes < k)
    s_top, s_sum, s_logit, s_gap = _no_columns()
    t_top, t_sum, t_logit, t_gap = _no_columns()
    for event in range(events):
        taken = tl.max((ids == tl.load(first_ptr + event)).to(tl.int32), 0) > 0
        s_one = tl.where(taken, LOG_ZERO, tl.load(s_event + event) * LOG2_E)
        t_one = tl.where(taken, LOG_ZERO, tl.load(t_event + event) * LOG2_E)
        s_top, s_sum, s_logit, s_gap = _online(s_one, s_one - t_one, s_top, s_sum, s_logit, s_gap, True)
        t_top, t_sum, t_logit, t_gap = _online(t_one, t_one - s_one, t_top, t_sum, t_logit, t_gap, True)
    state = state_ptr + row
    _store_side(state, state_stride, s_top, s_sum, s_logit, s_gap)
    _store_side(state + 4 * state_stride, state_stride, t_top, t_sum, t_logit, t_gap)


@triton.jit
def _no_columns():
    """A side's running values before the first column."""
    none = tl.full((), 0.0, tl.float32)
    return tl.full((), LOG_ZERO, tl.float32), none, none, none


@triton.jit
def _store_side(state, stride, top, total, logit, gap):
    tl.store(state, top)
    tl.store(state + stride, total)
    tl.store(state + 2 * stride, logit)
    tl.store(state + 3 * stride, gap)


@triton.jit(do_not_specialize=["state_stride", "count"])
def tail_kernel(
    state_ptr, state_stride, rest_ptr, count, s_out_ptr, t_out_ptr, k, LANES: tl.constexpr
):  # fmt: skip
    """From logits (n, K + 1) of what was taken to log-probs; the last is that of all that was left, which the running values
    hold. They then hold the whole row; `rest` (2, n) keeps the student's maximum and sum of what was left.
    """
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    s_out, t_out = s_out_ptr + row * (k + 1), t_out_ptr + row * (k + 1)
    s = tl.load(s_out + lanes, mask=lanes < k, other=LOG_ZERO) * LOG2_E
    t = tl.load(t_out + lanes, mask=lanes < k, other=LOG_ZERO) * LOG2_E
    s_state, t_state = state_ptr + row, state_ptr + 4 * state_stride + row
    top, total = tl.load(s_state), tl.load(s_state + state_stride)
    nothing = top < FAR  # every column was taken
    tl.store(rest_ptr + row, tl.where(nothing, 0.0, top))
    tl.store(rest_ptr + count + row, tl.where(nothing, 1.0, total))
    tl.debug_barrier()
    _join_taken(s_state, state_stride, s, s - t, s_out, lanes, k)
    _join_taken(t_state, state_stride, t, t - s, t_out, lanes, k)


@triton.jit
def _join_taken(state, stride, z, gap, out, lanes, k):
    """One side of `tail_kernel`, in base 2. Two logarithms are subtracted, so a tail may be as small as it likes."""
    top, total = tl.load(state), tl.load(state + stride)
    logit, apart = tl.load(state + 2 * stride), tl.load(state + 3 * stride)
    nothing = top < FAR
    peak = tl.maximum(tl.max(z, 0), top)
    e = tl.exp2(z - peak)
    old = tl.where(nothing, 0.0, tl.exp2(top - peak))
    whole = total * old + tl.sum(e, 0)
    tl.debug_barrier()
    _store_side(state, stride, peak, whole, logit * old + tl.sum(e * z, 0), apart * old + tl.sum(e * gap, 0))
    log_whole = tl.log2(whole)
    tl.store(out + lanes, (z - peak - log_whole) * LN_2, mask=lanes < k)
    tail = (top - peak + tl.log2(total) - log_whole) * LN_2
    tl.store(out + k, tl.where(nothing, LOG_ZERO, tail))


@triton.jit(do_not_specialize=["state_stride", "rest_stride"])
def chosen_gradient_kernel(
    grad_ptr, grad_stride, ids_ptr, slope_ptr, total_ptr, outside_ptr, logprob_ptr, state_ptr, state_stride, rest_ptr,
    rest_stride, first_ptr, event_ptr, event_grad_ptr, k, width, columns, events, factor, cap,
    SOFTCAP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """slope - S total, in raw values over the tile at the ids; and the same in the logits of events (n, E) among the ids. Other
    events have their share of `rest` times `outside`. `slope` and log-probs are (n, width).
    """
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    ids = tl.load(ids_ptr + row * k + lanes, mask=lanes < k, other=-1)
    slope = tl.load(slope_ptr + row * width + lanes, mask=ids >= 0, other=0.0)
    logprob = tl.load(logprob_ptr + row * width + lanes, mask=ids >= 0, other=LOG_ZERO)
    total, lse = tl.load(total_ptr + row), _normaliser(state_ptr + row, state_stride)
    outside, rest = tl.load(outside_ptr + row), _normaliser(rest_ptr + row, rest_stride)
    grad = slope - tl.exp(logprob) * total
    if SOFTCAP:
        tanh = (logprob + lse) / cap
        grad = tl.where(logprob <= GONE, 0.0, grad * (1 - tanh * tanh))
    grad *= factor
    inside = (ids >= 0) & (ids < columns)
    tl.store(grad_ptr + row * grad_stride + ids, grad.to(grad_ptr.dtype.element_ty), mask=inside)
    for event in range(events):
        here = ids == tl.load(first_ptr + event)
        logit = tl.load(event_ptr + row * events + event)
        chosen = tl.sum(tl.where(here, slope, 0.0), 0) - tl.exp(logit - lse) * total
        other = tl.exp(logit - rest) * outside
        taken = tl.max(here.to(tl.int32), 0) > 0
        tl.store(event_grad_ptr + row * events + event, tl.where(taken, chosen, other))


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


def take_chosen_(tile, ids, state, first, student, teacher):
    """(n, K + 1) logits of both sides at the ids, which are then no longer in the tile, nor in the running values; their last
    column is left for `tail_logprobs_`."""
    n, k = ids.shape
    s, t = (torch.empty((n, k + 1), dtype=torch.float32, device=ids.device) for _ in range(2))
    events = 0 if first is None else len(first)
    none = events == 0
    take_kernel[(n,)](
        tile.student, tile.teacher, tile.student.stride(0), tile.teacher.stride(0), ids, state, state.stride(0),
        ids if none else first, s if none else student, t if none else teacher, s, t, k, tile.student.shape[1], events,
        tile.s.scale, tile.s.cap, tile.t.scale, tile.t.cap, S_SOFTCAP=tile.s.softcap, T_SOFTCAP=tile.t.softcap,
        LANES=triton.next_power_of_2(max(k, 1)), num_warps=_warps(k),
    )  # fmt: skip
    return s, t


def tail_logprobs_(student, teacher, state):
    """Log-probs over the logits (n, K + 1) of both sides that were taken, when all else is folded into the running values; the
    last column is the tail. The running values then hold the whole row; returned are the student's of the rest, (2, n)."""
    n, width = student.shape
    rest = torch.empty((2, n), dtype=torch.float32, device=student.device)
    tail_kernel[(n,)](
        state, state.stride(0), rest, n, student, teacher, width - 1,
        LANES=triton.next_power_of_2(max(width - 1, 1)), num_warps=_warps(width - 1),
    )  # fmt: skip
    return rest


def chosen_gradient_(grad, ids, slope, total, outside, logprob, state, rest, first, student, factor, reading):
    """At the ids of `grad`; returns that in the events' logits (n, E). `slope` and log-probs may have a column more, the tail.

    `rest`: running values of what `outside` is spread over, as it is over the other columns of `grad`.
    """
    n, k = ids.shape
    events = 0 if first is None else len(first)
    found = torch.empty((n, events), dtype=torch.float32, device=ids.device)
    chosen_gradient_kernel[(n,)](
        grad, grad.stride(0), ids, slope, total, outside, logprob, state, state.stride(0), rest, rest.stride(0),
        ids if events == 0 else first, slope if events == 0 else student, slope if events == 0 else found,
        k, slope.shape[1], grad.shape[1], events, factor, reading.cap, SOFTCAP=reading.softcap, LANES=triton.next_power_of_2(max(k, 1)), num_warps=_warps(k),
    )  # fmt: skip
    return found


def _warps(count):
    return min(max(triton.next_power_of_2(max(count, 1)) // 64, 1), 16)
