# mypy: ignore-errors
# ruff: noqa: SIM108
"""Row kernels over tiles of raw logits: one program per row, fp32 arithmetic, no atomics, so every run gives the same
bits.

A tile is (n, C): some rows, and all or a slab of the vocabulary's columns. Raw logits become logits as they are read
(bias, scale, softcap, temperature). A column of LOG_ZERO does not exist: padding, or an id whose mass moved
to a merged event, which the caller adds itself.

    statistics_kernel   online softmax of both sides: enough for both KLs and both entropies
    sums_kernel         sums of a divergence's `phi` and `S g`, given the normalisers
    gradient_kernel     gradient in the raw logits, written over the student's tile in the head's own type
    logprob_kernel      the same of one id's log-prob
    mix_kernel          adds one teacher to a mixture
    scale_kernel        a gradient times a factor that only the GPU knows
"""

import triton
import triton.language as tl

LOG_ZERO = tl.constexpr(-1e30)
GONE = tl.constexpr(-5e29)  # raw values at or below: not a column
FAR = tl.constexpr(-1e20)  # log-probs below: those of missing columns, whatever their scale
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _logits(row_ptr, columns, inside, bias_ptr, scale, cap, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """Logits of some columns; `scale` holds 1/temperature (1/softcap with a softcap, then `cap` = softcap/temperature).

    A missing column stays hugely negative under any positive scale; only a softcap would bring it back.
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
    """One step of an online softmax, lane by lane. Of its two factors one is 1 and the other 2^-|z - max|."""
    rise = z > old_max
    power = tl.exp2(-tl.abs(z - old_max))
    e, scale = tl.where(rise, 1.0, power), tl.where(rise, power, 1.0)
    if GAP:
        apart = apart * scale + e * gap
    return tl.maximum(old_max, z), total * scale + e, logit * scale + e * z, apart


@triton.jit
def _log(x):
    """A power of two's logarithm is one instruction on the GPU; a natural one is a polynomial."""
    return tl.log2(x) * LN_2


@triton.jit
def _normaliser(state_ptr, stride):
    """Log of a side's sum of exponentials, from its running values in base 2."""
    return (tl.load(state_ptr) + tl.log2(tl.load(state_ptr + stride))) * LN_2


@triton.jit
def _terms(ls, lt, a, KIND: tl.constexpr):
    """`Formula.terms` of the reference, column by column: phi, S times the slope, and S.

    Two exponentials serve everything: of the larger log-prob, and of minus the distance to the smaller one. A mixture
    share * first + (1 - share) * second is then `high * blend`, and exactly one of its parts where the two are equal.
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
    else:  # acceptance
        phi = low
        slope = tl.where(up, -s, 0.0)
    return phi, slope, s


@triton.jit
def _fold(state_ptr, stride, lane_max, lane_sum, lane_logit, lane_gap, GAP: tl.constexpr):
    """Reduce the lanes of one side and add them to the row's running (max, sum, sum e z, sum e (z - other z)), base
    2.
    """
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


@triton.jit(do_not_specialize=["state_stride"])  # the number of tokens, another one each time
def statistics_kernel(
    s_ptr, t_ptr, s_stride, t_stride, s_bias, t_bias, state_ptr, state_stride, columns_total,
    s_scale, s_cap, t_scale, t_cap,
    S_BIAS: tl.constexpr, T_BIAS: tl.constexpr, S_SOFTCAP: tl.constexpr, T_SOFTCAP: tl.constexpr,
    FORWARD: tl.constexpr, BOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fold a tile into each row's running sums; logits come in base 2, through `scale` or `cap`.

    Every lane keeps its own maximum, so nothing is reduced inside the loop. FORWARD: the teacher's sum for forward KL
    too. Not BOTH: there is no teacher.
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


@triton.jit(do_not_specialize=["state_stride"])  # the number of tokens, another one each time
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
    """A row's G, and its factor times outer'(P)."""
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


@triton.jit(do_not_specialize=["state_stride"])  # the number of tokens, another one each time
def gradient_kernel(
    s_ptr, t_ptr, s_stride, t_stride, s_bias, t_bias, state_ptr, state_stride, phi_ptr, slope_ptr, factor_ptr,
    grad_ptr, grad_stride, columns_total, a, s_scale, s_cap, t_scale, t_cap,
    S_BIAS: tl.constexpr, T_BIAS: tl.constexpr, S_SOFTCAP: tl.constexpr, T_SOFTCAP: tl.constexpr,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """factor outer'(P) (S g - S G), back through the softcap, over the student's tile.

    `grad` may be the student's own memory in a narrower type: block j of a row is then written to bytes that blocks up
    to j have been read from. Only within one block could a write overtake a read; the barrier forbids that.
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


@triton.jit(do_not_specialize=["state_stride"])  # the number of tokens, another one each time
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
    """grad *= factor, which is mostly 1 and then costs nothing; the CPU would have to wait to know it."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = index < count
        value = tl.load(grad_ptr + index, mask=inside).to(tl.float32) * factor
        tl.store(grad_ptr + index, value.to(grad_ptr.dtype.element_ty), mask=inside)
