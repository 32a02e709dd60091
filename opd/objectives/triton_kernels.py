# mypy: ignore-errors
# ruff: noqa: SIM108
"""Row kernels over tiles of raw logits: one program per row, fp32 arithmetic, no atomics, so every run gives the same bits.

A tile is (n, C): some rows, and all or a slab of the vocabulary's columns. Raw logits become logits as they are read
(bias, scale, softcap, temperature). A column at or below LOG_ZERO / 2 does not exist: padding, or an id whose mass moved
to a merged event, which the caller adds itself.

    statistics_kernel   online softmax of both sides: enough for both KLs and both entropies
    sums_kernel         sums of a divergence's `phi` and `S g`, given the normalisers
    gradient_kernel     gradient in the raw logits, written over the student's tile in the head's own type
    mix_kernel          adds one teacher to a mixture
"""

import triton
import triton.language as tl

LOG_ZERO = tl.constexpr(-1e30)
GONE = tl.constexpr(-5e29)  # at or below: not a column


@triton.jit
def _logits(row_ptr, columns, inside, bias_ptr, scale, cap, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """Logits of some columns; `scale` holds 1/temperature (1/softcap with a softcap, then `cap` = softcap/temperature)."""
    raw = tl.load(row_ptr + columns, mask=inside, other=LOG_ZERO)
    z = raw
    if BIAS:
        z += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    z = z * scale
    if SOFTCAP:
        z = (2 * tl.sigmoid(2 * z) - 1) * cap
    return tl.where(raw <= GONE, LOG_ZERO, z)


@triton.jit
def _log_blend(first, second, share):
    """log(share e^first + (1 - share) e^second), exactly `first` where the two are equal."""
    heavy = tl.where(first > second, share, 1 - share)
    return tl.maximum(first, second) + tl.log(heavy + (1 - heavy) * tl.exp(-tl.abs(first - second)))


@triton.jit
def _terms(ls, lt, a, KIND: tl.constexpr):
    """`Form.terms` of the reference, column by column: phi, S times the slope, and S."""
    s = tl.exp(ls)
    t = tl.exp(lt)
    if KIND == 0:  # reverse_kl
        phi = s * (ls - lt)
        slope = phi
    elif KIND == 1:  # forward_kl
        phi = t * (lt - ls)
        slope = s - t
    elif KIND == 2:  # jsd
        lm = _log_blend(lt, ls, a)
        slope = (1 - a) * s * (ls - lm)
        phi = a * t * (lt - lm) + slope
    elif KIND == 3:  # skew_kl
        lm = _log_blend(lt, ls, a)
        phi = t * (lt - lm)
        slope = (1 - a) * (s - tl.exp(ls + lt - lm))
    elif KIND == 4:  # skew_reverse_kl
        lm = _log_blend(ls, lt, a)
        phi = s * (ls - lm)
        slope = phi + a * (s - tl.exp(2 * ls - lm))
    elif KIND == 5:  # alpha
        power = tl.exp(a * lt + (1 - a) * ls)
        phi = (power - s) / (a * (a - 1))
        slope = (s - power) / a
    elif KIND == 6:  # tvd
        phi = tl.abs(t - s) * 0.5
        slope = tl.where(t > s, -0.5 * s, tl.where(t < s, 0.5 * s, 0.0))
    elif KIND == 7:  # hellinger
        root = tl.exp(0.5 * (ls + lt))
        phi = s + t - 2 * root
        slope = s - root
    else:  # acceptance
        phi = tl.minimum(s, t)
        slope = tl.where(t > s, -s, 0.0)
    return phi, slope, s


@triton.jit
def _fold(state_ptr, stride, lane_max, lane_sum, lane_logit, lane_gap):
    """Reduce the lanes of one side and add them to the row's running (max, sum, sum e z, sum e (z - other z))."""
    old_max = tl.load(state_ptr)
    new_max = tl.maximum(old_max, tl.max(lane_max, axis=0))
    lane_scale = tl.exp(lane_max - new_max)
    old_scale = tl.exp(old_max - new_max)
    tl.store(state_ptr, new_max)
    for part in tl.static_range(3):
        pointer = state_ptr + (part + 1) * stride
        lane = lane_sum if part == 0 else (lane_logit if part == 1 else lane_gap)
        tl.store(pointer, tl.load(pointer) * old_scale + tl.sum(lane * lane_scale, axis=0))


@triton.jit
def statistics_kernel(
    s_ptr, t_ptr, s_stride, t_stride, s_bias, t_bias, state_ptr, state_stride, columns_total,
    s_scale, s_cap, t_scale, t_cap,
    S_BIAS: tl.constexpr, T_BIAS: tl.constexpr, S_SOFTCAP: tl.constexpr, T_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fold a tile into each row's eight running sums. Every lane keeps its own maximum: no reduction inside the loop."""
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
        zt = _logits(t_row, columns, inside, t_bias, t_scale, t_cap, T_BIAS, T_SOFTCAP)
        gap = zs - zt
        new = tl.maximum(s_max, zs)
        scale = tl.exp(s_max - new)
        e = tl.exp(zs - new)
        s_sum = s_sum * scale + e
        s_logit = s_logit * scale + e * zs
        s_gap = s_gap * scale + e * gap
        s_max = new
        new = tl.maximum(t_max, zt)
        scale = tl.exp(t_max - new)
        e = tl.exp(zt - new)
        t_sum = t_sum * scale + e
        t_logit = t_logit * scale + e * zt
        t_gap = t_gap * scale - e * gap
        t_max = new
    state = state_ptr + row
    _fold(state, state_stride, s_max, s_sum, s_logit, s_gap)
    _fold(state + 4 * state_stride, state_stride, t_max, t_sum, t_logit, t_gap)


@triton.jit
def sums_kernel(
    s_ptr, t_ptr, s_stride, t_stride, s_bias, t_bias, s_lse_ptr, t_lse_ptr, phi_ptr, slope_ptr, columns_total, a,
    s_scale, s_cap, t_scale, t_cap,
    S_BIAS: tl.constexpr, T_BIAS: tl.constexpr, S_SOFTCAP: tl.constexpr, T_SOFTCAP: tl.constexpr,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add a tile's sums of phi and S g to each row's."""
    row = tl.program_id(0).to(tl.int64)
    s_row, t_row = s_ptr + row * s_stride, t_ptr + row * t_stride
    s_lse, t_lse = tl.load(s_lse_ptr + row), tl.load(t_lse_ptr + row)
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
def gradient_kernel(
    s_ptr, t_ptr, s_stride, t_stride, s_bias, t_bias, s_lse_ptr, t_lse_ptr, mean_ptr, factor_ptr, grad_ptr, grad_stride,
    columns_total, a, s_scale, s_cap, t_scale, t_cap,
    S_BIAS: tl.constexpr, T_BIAS: tl.constexpr, S_SOFTCAP: tl.constexpr, T_SOFTCAP: tl.constexpr,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """factor (S g - S G), back through the softcap, over the student's tile.

    `grad` may be the student's own memory in a narrower type: block j of a row is then written to bytes that blocks up
    to j have been read from. Only within one block could a write overtake a read; the barrier forbids that.
    """
    row = tl.program_id(0).to(tl.int64)
    s_row, t_row, grad_row = s_ptr + row * s_stride, t_ptr + row * t_stride, grad_ptr + row * grad_stride
    s_lse, t_lse = tl.load(s_lse_ptr + row), tl.load(t_lse_ptr + row)
    mean, factor = tl.load(mean_ptr + row), tl.load(factor_ptr + row)
    for start in range(0, columns_total, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < columns_total
        zs = _logits(s_row, columns, inside, s_bias, s_scale, s_cap, S_BIAS, S_SOFTCAP)
        zt = _logits(t_row, columns, inside, t_bias, t_scale, t_cap, T_BIAS, T_SOFTCAP)
        _, slope, s = _terms(zs - s_lse, zt - t_lse, a, KIND)
        grad = (slope - s * mean) * factor
        if S_SOFTCAP:
            tanh = zs / s_cap
            grad = tl.where(zs <= GONE, 0.0, grad * (1 - tanh * tanh))
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
