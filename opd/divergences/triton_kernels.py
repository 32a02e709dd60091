"""Row kernels over tiles of raw logits: one program per row, fp32 arithmetic, no atomics.

Every run gives the same bits. A tile is (n, C): some rows, and all or a slab of the vocabulary's columns. Kernels
convert raw logits to logits on reading (bias, scale, softcap, temperature). A column of LOG_ZERO does not exist: it is
padding, or an id merged into an event, which the caller adds itself.

    statistics_kernel   online softmax of both sides: enough for both KLs and both entropies
    sums_kernel         sums of a divergence's `phi` and `S g`, given the normalisers
    gradient_kernel     gradient in the raw logits, written over the student's tile in the head's own type
    logprob_kernel      the same for one id's log-prob
    mix_kernel          adds one teacher to a mixture
    scale_kernel        a gradient times a factor in GPU memory
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# mypy: ignore-errors
# ruff: noqa: SIM108


LOG_ZERO = tl.constexpr(-1e30)
GONE = tl.constexpr(-5e29)  # raw values at or below this are not columns
FAR = tl.constexpr(-1e20)  # log-probs below this belong to missing columns, whatever their scale
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _logits(row_ptr, columns, inside, bias_ptr, scale, cap, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """Logits of some columns; `scale` holds 1/temperature (1/softcap with a softcap, then `cap` = softcap/temperature).

    A missing column stays very negative under any positive scale; only a softcap would change that.
    """
    raw = tl.load(row_ptr + columns, mask=inside, other=LOG_ZERO)
    z = raw
    if BIAS:
        z += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    z = z * scale
    if SOFTCAP:
        z = tl.where(raw <= GONE, LOG_ZERO, (2 * tl.sigmoid(2 * z) - 1) * cap)
    return z


@triton.jit
def _online(z, gap, old_max, total, logit, apart, GAP: tl.constexpr):
    """One step of an online softmax per lane. One of its two factors is 1, the other 2^-|z - max|."""
    rise = z > old_max
    power = tl.exp2(-tl.abs(z - old_max))
    e, scale = tl.where(rise, 1.0, power), tl.where(rise, power, 1.0)
    if GAP:
        apart = apart * scale + e * gap
    return tl.maximum(old_max, z), total * scale + e, logit * scale + e * z, apart


@triton.jit
def _log(x):
    """Natural logarithm from the base-2 one, which is a single GPU instruction; the natural one is a polynomial."""
    return tl.log2(x) * LN_2


@triton.jit
def _normaliser(state_ptr, stride):
    """Log of a side's sum of exponentials, from its running values in base 2."""
    return (tl.load(state_ptr) + tl.log2(tl.load(state_ptr + stride))) * LN_2


@triton.jit
def _terms(ls, lt, a, KIND: tl.constexpr):
    """`Formula.terms` of the reference, column by column: phi, S times the slope, and S.

    Two exponentials suffice: of the larger log-prob, and of minus the distance to the smaller one. A mixture
    share * first + (1 - share) * second is then `high * blend`, and equals its parts exactly if the two are equal.
    """
    up = lt > ls
    near = tl.exp(-tl.abs(lt - ls))  # smaller over larger
    top = tl.maximum(ls, lt)
    high = tl.exp(top)
    low = high * near
    s = tl.where(up, low, high)
    t = tl.where(up, high, low)
    if KIND == 0:  # reverse_kl
        s = tl.exp(ls)
        phi = s * (ls - lt)
        slope = phi
    elif KIND == 1:  # forward_kl
        phi = t * (lt - ls)
        slope = s - t
    elif KIND == 2:  # jsd
        heavy = tl.where(up, a, 1 - a)
        lm = top + _log(heavy + (1 - heavy) * near)
        slope = (1 - a) * s * (ls - lm)
        phi = a * t * (lt - lm) + slope
    elif KIND == 3:  # skew_kl
        heavy = tl.where(up, a, 1 - a)
        blend = heavy + (1 - heavy) * near
        phi = t * (lt - top - _log(blend))
        slope = (1 - a) * (s - low / blend)
    elif KIND == 4:  # skew_reverse_kl
        heavy = tl.where(up, 1 - a, a)
        blend = heavy + (1 - heavy) * near
        phi = s * (ls - top - _log(blend))
        slope = phi + a * (s - s * tl.where(up, near, 1.0) / blend)
    elif KIND == 5:  # alpha
        power = tl.where(top < FAR, 0.0, tl.exp(a * lt + (1 - a) * ls))
        phi = (power - s) / (a * (a - 1))
        slope = (s - power) / a
    elif KIND == 6:  # tvd
        phi = tl.abs(t - s) * 0.5
        slope = tl.where(up, -0.5 * s, tl.where(lt < ls, 0.5 * s, 0.0))
    elif KIND == 7:  # hellinger
        root = high * tl.sqrt(near)
        phi = s + t - 2 * root
        slope = s - root
    elif KIND == 9:  # detached_skew_reverse_kl
        heavy = tl.where(up, 1 - a, a)
        phi = s * (ls - top - _log(heavy + (1 - heavy) * near))
        slope = phi
    else:  # acceptance
        phi = low
        slope = tl.where(up, -s, 0.0)
    return phi, slope, s


@triton.jit
def _fold(state_ptr, stride, lane_max, lane_sum, lane_logit, lane_gap, GAP: tl.constexpr):
    """Reduce the lanes of one side into the row's running (max, sum, sum e z, sum e (z - other z)), in base 2."""
    old_max = tl.load(state_ptr)
    new_max = tl.maximum(old_max, tl.max(lane_max, axis=0))
    lane_scale = tl.exp2(lane_max - new_max)
    old_scale = tl.exp2(old_max - new_max)
    tl.store(state_ptr, new_max)
    state_ptr += stride
    tl.store(state_ptr, tl.load(state_ptr) * old_scale + tl.sum(lane_sum * lane_scale, axis=0))
    state_ptr += stride
    tl.store(state_ptr, tl.load(state_ptr) * old_scale + tl.sum(lane_logit * lane_scale, axis=0))
    if GAP:
        state_ptr += stride
        tl.store(state_ptr, tl.load(state_ptr) * old_scale + tl.sum(lane_gap * lane_scale, axis=0))


@triton.jit(do_not_specialize=["state_stride"])  # the number of tokens, which changes with every call
def statistics_kernel(
    s_ptr, t_ptr, s_stride, t_stride, s_bias, t_bias, state_ptr, state_stride, columns_total,
    s_scale, s_cap, t_scale, t_cap,
    S_BIAS: tl.constexpr, T_BIAS: tl.constexpr, S_SOFTCAP: tl.constexpr, T_SOFTCAP: tl.constexpr,
    FORWARD: tl.constexpr, BOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fold a tile into each row's running sums; `scale` or `cap` converts logits to base 2.

    Every lane keeps its own maximum, so the loop has no reductions. FORWARD: also the teacher's sum for forward KL. Not
    BOTH: there is no teacher.
    """
    row = tl.program_id(0).to(tl.int64)
    s_row, t_row = s_ptr + row * s_stride, t_ptr + row * t_stride
    s_max = tl.full((BLOCK,), LOG_ZERO, tl.float32)
    t_max = tl.full((BLOCK,), LOG_ZERO, tl.float32)
    s_sum = tl.zeros((BLOCK,), tl.float32)
    s_logit = tl.zeros((BLOCK,), tl.float32)
    s_gap = tl.zeros((BLOCK,), tl.float32)
    t_sum = tl.zeros((BLOCK,), tl.float32)
    t_logit = tl.zeros((BLOCK,), tl.float32)
    t_gap = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns_total, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < columns_total
        zs = _logits(s_row, columns, inside, s_bias, s_scale, s_cap, S_BIAS, S_SOFTCAP)
        if BOTH:
            zt = _logits(t_row, columns, inside, t_bias, t_scale, t_cap, T_BIAS, T_SOFTCAP)
            gap = zs - zt
            s_max, s_sum, s_logit, s_gap = _online(zs, gap, s_max, s_sum, s_logit, s_gap, True)
            t_max, t_sum, t_logit, t_gap = _online(zt, -gap, t_max, t_sum, t_logit, t_gap, FORWARD)
        else:
            s_max, s_sum, s_logit, s_gap = _online(zs, zs, s_max, s_sum, s_logit, s_gap, False)
    state = state_ptr + row
    _fold(state, state_stride, s_max, s_sum, s_logit, s_gap, BOTH)
    if BOTH:
        _fold(state + 4 * state_stride, state_stride, t_max, t_sum, t_logit, t_gap, FORWARD)


@triton.jit(do_not_specialize=["state_stride"])  # the number of tokens, which changes with every call
def sums_kernel(
    s_ptr, t_ptr, s_stride, t_stride, s_bias, t_bias, state_ptr, state_stride, phi_ptr, slope_ptr, columns_total, a,
    s_scale, s_cap, t_scale, t_cap,
    S_BIAS: tl.constexpr, T_BIAS: tl.constexpr, S_SOFTCAP: tl.constexpr, T_SOFTCAP: tl.constexpr,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add a tile's sums of phi and S g to each row's."""
    row = tl.program_id(0).to(tl.int64)
    s_row, t_row = s_ptr + row * s_stride, t_ptr + row * t_stride
    s_lse = _normaliser(state_ptr + row, state_stride)
    t_lse = _normaliser(state_ptr + 4 * state_stride + row, state_stride)
    phis = tl.zeros((BLOCK,), tl.float32)
    slopes = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns_total, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < columns_total
        zs = _logits(s_row, columns, inside, s_bias, s_scale, s_cap, S_BIAS, S_SOFTCAP)
        zt = _logits(t_row, columns, inside, t_bias, t_scale, t_cap, T_BIAS, T_SOFTCAP)
        phi, slope, _ = _terms(zs - s_lse, zt - t_lse, a, KIND)
        phis += phi
        slopes += slope
    tl.store(phi_ptr + row, tl.load(phi_ptr + row) + tl.sum(phis, axis=0))
    tl.store(slope_ptr + row, tl.load(slope_ptr + row) + tl.sum(slopes, axis=0))


@triton.jit
def _mean_slope(s_state, state_stride, s_lse, t_lse, phi_ptr, slope_ptr, factor, KIND: tl.constexpr):
    """A row's G, and its factor multiplied by outer'(P)."""
    if KIND == 0:  # reverse_kl: G is its value
        gap = tl.load(s_state + 3 * state_stride) / tl.load(s_state + state_stride)
        mean = gap * LN_2 - s_lse + t_lse
    elif KIND == 1:  # forward_kl
        mean = 0.0
    else:
        mean = tl.load(slope_ptr)
    if KIND == 8:  # acceptance
        factor = factor / tl.load(phi_ptr)
    return mean, factor


@triton.jit(do_not_specialize=["state_stride"])  # the number of tokens, which changes with every call
def gradient_kernel(
    s_ptr, t_ptr, s_stride, t_stride, s_bias, t_bias, state_ptr, state_stride, phi_ptr, slope_ptr, factor_ptr,
    grad_ptr, grad_stride, columns_total, a, s_scale, s_cap, t_scale, t_cap,
    S_BIAS: tl.constexpr, T_BIAS: tl.constexpr, S_SOFTCAP: tl.constexpr, T_SOFTCAP: tl.constexpr,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """factor outer'(P) (S g - S G), back through the softcap, over the student's tile.

    `grad` may be the student's own memory in a narrower type: block j of a row is then written to bytes of blocks up to
    j, which were already read. Only within one block could a write overtake a read; the barrier prevents that.
    """
    row = tl.program_id(0).to(tl.int64)
    s_row, t_row, grad_row = s_ptr + row * s_stride, t_ptr + row * t_stride, grad_ptr + row * grad_stride
    s_state, t_state = state_ptr + row, state_ptr + 4 * state_stride + row
    s_lse, t_lse = _normaliser(s_state, state_stride), _normaliser(t_state, state_stride)
    factor = tl.load(factor_ptr + row)
    mean, factor = _mean_slope(s_state, state_stride, s_lse, t_lse, phi_ptr + row, slope_ptr + row, factor, KIND)
    for start in range(0, columns_total, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < columns_total
        zs = _logits(s_row, columns, inside, s_bias, s_scale, s_cap, S_BIAS, S_SOFTCAP)
        zt = _logits(t_row, columns, inside, t_bias, t_scale, t_cap, T_BIAS, T_SOFTCAP)
        _, slope, s = _terms(zs - s_lse, zt - t_lse, a, KIND)
        grad = (slope - s * mean) * factor
        if S_SOFTCAP:
            tanh = zs / s_cap
            grad = tl.where(zs < FAR, 0.0, grad * (1 - tanh * tanh))
        tl.debug_barrier()
        tl.store(grad_row + columns, grad.to(grad_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["state_stride"])  # the number of tokens, which changes with every call
def logprob_kernel(
    s_ptr, t_ptr, s_stride, t_stride, s_bias, t_bias, state_ptr, state_stride, target_ptr, factor_ptr,
    grad_ptr, grad_stride, columns_total, s_scale, s_cap, t_scale, t_cap,
    S_BIAS: tl.constexpr, T_BIAS: tl.constexpr, S_SOFTCAP: tl.constexpr, T_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """factor (1[column is the target] - S), over the tile as in `gradient_kernel`; there is no teacher."""
    row = tl.program_id(0).to(tl.int64)
    s_row, grad_row = s_ptr + row * s_stride, grad_ptr + row * grad_stride
    s_lse, target, factor = (
        _normaliser(state_ptr + row, state_stride),
        tl.load(target_ptr + row),
        tl.load(factor_ptr + row),
    )
    for start in range(0, columns_total, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < columns_total
        zs = _logits(s_row, columns, inside, s_bias, s_scale, s_cap, S_BIAS, S_SOFTCAP)
        grad = (tl.where(columns == target, 1.0, 0.0) - tl.exp(zs - s_lse)) * factor
        if S_SOFTCAP:
            tanh = zs / s_cap
            grad = tl.where(zs < FAR, 0.0, grad * (1 - tanh * tanh))
        tl.debug_barrier()
        tl.store(grad_row + columns, grad.to(grad_ptr.dtype.element_ty), mask=inside)


@triton.jit
def mix_kernel(
    sum_ptr, part_ptr, sum_stride, part_stride, part_bias, shift_ptr, columns_total, share, part_scale, part_cap,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, GEOMETRIC: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Geometric: sum += share z. Arithmetic: sum = log(e^sum + e^(z + shift)), with shift = log share - normaliser."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < columns_total
    z = _logits(part_ptr + row * part_stride, columns, inside, part_bias, part_scale, part_cap, BIAS, SOFTCAP)
    z = z * share if GEOMETRIC else z + tl.load(shift_ptr + row)
    pointer = sum_ptr + row * sum_stride + columns
    if not FIRST:
        old = tl.load(pointer, mask=inside, other=LOG_ZERO)
        if GEOMETRIC:
            z = old + z
        else:
            z = tl.maximum(old, z) + tl.log(1 + tl.exp(-tl.abs(old - z)))
    tl.store(pointer, z, mask=inside)


@triton.jit
def scale_kernel(grad_ptr, factor_ptr, count, BLOCK: tl.constexpr):
    """grad *= factor. It is usually 1 and then costs nothing; checking it on the CPU would require waiting."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = index < count
        value = tl.load(grad_ptr + index, mask=inside).to(tl.float32) * factor
        tl.store(grad_ptr + index, value.to(grad_ptr.dtype.element_ty), mask=inside)


# --- Kernels for small arrays: running values, merged events, chosen columns ---
#
# Each replaces a dozen small torch operations, because their launches would keep the GPU waiting.
#
# close_kernel             statistics of finished rows, from their running values
# chosen_kernel            log-probs of both sides at chosen ids
# take_kernel              logits of both sides at chosen ids, which are removed from the tile
# tail_kernel              log-probs of the removed ids and of all remaining ones
# chosen_gradient_kernel   the gradient at chosen ids, and that of the events
# event_gradient_kernel    a divergence's gradient in the events' logits
# members_kernel           from the gradient of events to that of their members
#
# Axis legend: n = rows of a tile, K = chosen columns, E = merged events, M = their member ids.


# mypy: ignore-errors


LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["state_stride", "count"])  # the number of tokens, which changes with every call
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
    """Mean from a sum in base 2. Division rounds to nearest, because large numbers cancel in the difference."""
    return tl.div_rn(tl.div_rn(weighted, LOG2_E), total)


@triton.jit
def _side(state, stride, inside):
    top = tl.load(state, mask=inside, other=0.0)
    total = tl.load(state + stride, mask=inside, other=1.0)
    logit = tl.load(state + 2 * stride, mask=inside, other=0.0)
    return top, total, logit, tl.load(state + 3 * stride, mask=inside, other=0.0)


@triton.jit
def _chosen_logits(row_ptr, ids, columns, scale, cap, first_ptr, event_ptr, events, SOFTCAP: tl.constexpr):
    """Logits at the ids; LOG_ZERO for an id of -1 or a missing column. Merged ids have the logit of their event."""
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
    """Move the logits of both sides at the ids to (n, K + 1), and set them to LOG_ZERO in the tile.

    A row's running values restart with the events that are not among the ids.
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
    """Turn the logits (n, K + 1) of the removed ids into log-probs; the last column is all remaining ids.

    The running values hold the remaining ids before, and the whole row after. `rest` (2, n) keeps the student's maximum
    and sum of the remaining ids.
    """
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    s_out, t_out = s_out_ptr + row * (k + 1), t_out_ptr + row * (k + 1)
    s = tl.load(s_out + lanes, mask=lanes < k, other=LOG_ZERO) * LOG2_E
    t = tl.load(t_out + lanes, mask=lanes < k, other=LOG_ZERO) * LOG2_E
    s_state, t_state = state_ptr + row, state_ptr + 4 * state_stride + row
    top, total = tl.load(s_state), tl.load(s_state + state_stride)
    nothing = top < FAR  # every column was removed
    tl.store(rest_ptr + row, tl.where(nothing, 0.0, top))
    tl.store(rest_ptr + count + row, tl.where(nothing, 1.0, total))
    tl.debug_barrier()
    _join_taken(s_state, state_stride, s, s - t, s_out, lanes, k)
    _join_taken(t_state, state_stride, t, t - s, t_out, lanes, k)


@triton.jit
def _join_taken(state, stride, z, gap, out, lanes, k):
    """One side of `tail_kernel`, in base 2. It subtracts two logarithms, so a tail may be arbitrarily small."""
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
    """slope - S total, in raw values over the tile at the ids, and in the logits of events (n, E) among the ids.

    Other events get their share of `rest` times `outside`. `slope` and log-probs are (n, width).
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

    Without `both`, only the first and third are meaningful.
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
    """Spread a gradient in the events' logits (n, E) over `grad`'s columns. `here`: places, ids and first column of members."""
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
    """(n, K + 1) logits of both sides at the ids, which are removed from the tile and the running values.

    The last column is left for `tail_logprobs_`.
    """
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
    """Turn the removed logits (n, K + 1) of both sides into log-probs in place; the last column is the tail.

    All other columns must be folded into the running values first, which then hold the whole row. Returns the student's
    running values of the rest, (2, n).
    """
    n, width = student.shape
    rest = torch.empty((2, n), dtype=torch.float32, device=student.device)
    tail_kernel[(n,)](
        state, state.stride(0), rest, n, student, teacher, width - 1,
        LANES=triton.next_power_of_2(max(width - 1, 1)), num_warps=_warps(width - 1),
    )  # fmt: skip
    return rest


def chosen_gradient_(grad, ids, slope, total, outside, logprob, state, rest, first, student, factor, reading):
    """Write the gradient at the ids of `grad`; return the gradient in the events' logits (n, E).

    `slope` and log-probs may have one more column, the tail. `rest`: running values of the columns that `outside` is
    spread over, as it is over the other columns of `grad`.
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


# --- The k largest columns of every row, without sorting ---
#
# Three kernels; only the first reads whole rows. The k blocks of columns with the largest maxima hold the k largest columns,
# found by bisection on the bits of fp32 numbers, which have the same order. Ties go to the first columns.


# mypy: ignore-errors


BLOCK = 64  # columns of a block
BLOCKS = 64  # blocks per program
MOST = 256  # largest k: its blocks fit into registers
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def maxima_kernel(values, maxima, stride, columns, blocks, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = number[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    found = tl.max(tl.load(values + row * stride + at, mask=at < columns, other=LOWEST), 1)
    tl.store(maxima + row * blocks + number, found, mask=number < blocks)


@triton.jit
def _among_largest(value, k):
    """Mask of the lanes that hold the k largest, and the place of each among them."""
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
    """Whether `largest_columns` supports these values."""
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
    blocks_kernel[(rows,)](maxima, chosen, blocks, k, LANES=lanes, num_warps=_select_warps(lanes))
    lanes = triton.next_power_of_2(k) * BLOCK
    columns_kernel[(rows,)](
        values, chosen, found, ids, stride, columns, k, LANES=lanes, BLOCK=BLOCK, num_warps=_select_warps(lanes)
    )
    return found, ids


def _select_warps(lanes):
    return min(max(lanes // 512, 1), 16)
