"""The gated delta rule's parts that Triton kernels of decode and prefill share."""

# mypy: ignore-errors
# Triton compiles this code from its text; what its stubs say does not hold for the source.

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# ln 2 in two parts; the upper one has 15 bits, so that its product with an exponent is exact.
LN2_HIGH = tl.constexpr(0.693145751953125)
LN2_LOW = tl.constexpr(1.4286068203094172e-06)


@triton.jit
def exp_of_sum(high, low):
    """exp(high + low), to 3e-7 where tl.exp is off by |high| * 1e-7."""
    outside = tl.abs(high) > 200.0  # 0 or inf; also keeps inf - inf out of what follows
    high = tl.where(outside, tl.where(high > 0.0, 200.0, -200.0), high)
    low = tl.where(outside, 0.0, low)
    n = tl.floor(high * LOG2E)
    rest = (high - n * LN2_HIGH) - n * LN2_LOW + low
    return tl.exp2(n) * tl.exp2(rest * LOG2E)


@triton.jit
def two_sum(x, y):
    """x + y, and what its rounding lost."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


@triton.jit
def log_gate(A_log, a, dt_bias):
    """-exp(A_log) * softplus(a + dt_bias).

    softplus(x) is x + log1p(exp(-x)) for x > 0; for x <= 0 it is exp(x) times a factor near 1, and
    exp(A_log) * exp(x) is taken as one exponential, so that neither 0 * inf nor a subnormal arises.
    """
    x, x_low = two_sum(a, dt_bias)
    w = exp_of_sum(-tl.abs(x), tl.where(x > 0.0, -x_low, x_low))
    # log1p(w) / w through the series of 2 * atanh(w / (2 + w)), w / (2 + w) <= 1/3.
    inverse = 1.0 / (2.0 + w)
    t = w * inverse * (w * inverse)
    series = 1 / 13 + t * (1 / 15)
    series = 1 / 11 + t * series
    series = 1 / 9 + t * series
    series = 1 / 7 + t * series
    series = 1 / 5 + t * series
    series = 1 / 3 + t * series
    ratio = 2.0 * inverse * (1.0 + t * series)
    exponent, low = two_sum(A_log, tl.where(x > 0.0, 0.0, x))
    rate = exp_of_sum(exponent, low + tl.where(x > 0.0, 0.0, x_low))
    log_g = -rate * tl.where(x > 0.0, x + w * ratio, ratio)
    # inf * 0 counts as 0; exp(A_log) is 0 in the oracle's float64 below -745.
    log_g = tl.where(x == float("-inf"), 0.0, log_g)
    return tl.where(x == float("inf"), tl.where(A_log < -745.0, 0.0, float("-inf")), log_g)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + exp_of_sum(-x, 0.0))


@triton.jit
def find_slot(indices, stride, row_idx, num_rows, num_slots, words):
    """The slot of a row or sequence (itself in packed form), and whether it lies in the pool."""
    row = row_idx.to(tl.int64)
    low = tl.load(indices + row * stride * words, mask=words > 0, other=row_idx)
    # An int64 index must be the sign extension of its lower word.
    high = tl.load(indices + row * stride * words + 1, mask=words > 1, other=low >> 31)
    limit = tl.where(words > 0, num_slots, num_rows)
    return low.to(tl.int64), (high == low >> 31) & (low >= 0) & (low < limit)
