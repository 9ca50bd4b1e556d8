"""gdn_decode in CuTe DSL: a block takes `rows_per_block` rows of one head's state.

Plan: `lanes_per_row` lanes share a row of K, each with groups of four neighbouring elements, and
keep `rows_per_lane` rows in registers. A lane asks for all of its state first and computes the
gates while the loads are under way; both dots of a row, with k and with q, are taken on the old
state, and only the lanes of a row talk to one another (warp shuffles). No shared memory.
Constraints: head_size 128; parameters are the fields of csrc/gdn_decode/params.h in their order.
"""

# mypy: ignore-errors
# The DSL rewrites this code before it runs; what its stubs say does not hold for the source.

import tempfile
from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute.runtime import nullptr

from fastkernels.core.archs import ARCHS
from fastkernels.core.kernels import Binary
from fastkernels.ops.gdn_decode.kernels import HEAD_SIZE, CuteRows

LOG2E = 1.4426950408889634
# ln 2 in two parts; the upper one has 15 bits, so that its product with an exponent is exact.
LN2_HIGH = 0.693145751953125
LN2_LOW = 1.4286068203094172e-06


class Params(NamedTuple):
    """Each field becomes a parameter of the kernel."""

    q: cute.Pointer
    k: cute.Pointer
    v: cute.Pointer
    state: cute.Pointer
    A_log: cute.Pointer
    a: cute.Pointer
    dt_bias: cute.Pointer
    b: cute.Pointer
    read_indices: cute.Pointer
    write_indices: cute.Pointer
    output: cute.Pointer
    new_state: cute.Pointer
    q_stride_b: Int64
    q_stride_h: Int64
    k_stride_b: Int64
    k_stride_h: Int64
    v_stride_b: Int64
    v_stride_h: Int64
    state_stride_slot: Int64
    state_stride_h: Int64
    a_stride_b: Int64
    b_stride_b: Int64
    read_stride: Int64
    write_stride: Int64
    output_stride_b: Int64
    output_stride_h: Int64
    new_state_stride_slot: Int64
    new_state_stride_h: Int64
    batch_size: Int32
    num_q_heads: Int32
    num_v_heads: Int32
    num_slots: Int32
    has_state: Int32
    index_words: Int32
    scale: Float32


@cute.jit
def _exp2(x: Float32) -> Float32:
    return cute.math.exp2(x, fastmath=True)


@cute.jit
def _exp(high: Float32, low: Float32) -> Float32:
    """exp(high + low), to 3e-7 where one ex2.approx is off by |high| * 1e-7."""
    if high > 200.0:  # inf; also keeps inf - inf out of what follows
        high = Float32(200.0)
        low = Float32(0.0)
    if high < -200.0:
        high = Float32(-200.0)
        low = Float32(0.0)
    n = cute.math.floor(high * LOG2E)
    rest = (high - n * LN2_HIGH) - n * LN2_LOW + low
    return _exp2(n) * _exp2(rest * LOG2E)


@cute.jit
def _two_sum(x: Float32, y: Float32):
    """x + y, and what its rounding lost."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


@cute.jit
def _log_gate(A_log: Float32, a: Float32, dt_bias: Float32) -> Float32:
    """-exp(A_log) * softplus(a + dt_bias).

    softplus(x) is x + log1p(exp(-x)) for x > 0; for x <= 0 it is exp(x) times a factor near 1, and
    exp(A_log) * exp(x) is taken as one exponential, so that neither 0 * inf nor a subnormal arises.
    """
    x, x_low = _two_sum(a, dt_bias)
    sign = Float32(-1.0) if x > 0.0 else Float32(1.0)
    w = _exp(sign * x, sign * x_low)
    # log1p(w) / w through the series of 2 * atanh(w / (2 + w)), w / (2 + w) <= 1/3.
    inverse = cute.math.rcp(2.0 + w, approx=True)
    t = w * inverse * (w * inverse)
    series = Float32(1 / 15)
    for n in cutlass.range_constexpr(13, 0, -2):
        series = 1 / n + t * series
    ratio = 2.0 * inverse * series
    factor = ratio
    exponent, low = _two_sum(A_log, x)
    low += x_low
    if x > 0.0:
        factor = x + w * ratio
        exponent = A_log
        low = Float32(0.0)
    log_g = -_exp(exponent, low) * factor
    # inf * 0 counts as 0; exp(A_log) is 0 in the oracle's float64 below -745.
    if x == -Float32.inf:
        log_g = Float32(0.0)
    if x == Float32.inf:
        log_g = -Float32.inf
        if A_log < -745.0:
            log_g = Float32(0.0)
    return log_g


@cute.jit
def _slot(indices: cute.Pointer, stride: Int64, batch_idx: Int32, params: Params):
    """The slot of a batch row (the row itself in packed form), and whether it lies in the pool."""
    low = batch_idx
    high = Int32(0)
    limit = params.batch_size
    if params.index_words > 0:
        entry = indices + Int64(batch_idx) * stride * Int64(params.index_words)
        low = entry.load()
        high = low >> 31
        limit = params.num_slots
        # An int64 index must be the sign extension of its lower word.
        if params.index_words > 1:
            high = (entry + 1).load()
    return Int64(low), (high == low >> 31) & (low >= 0) & (low < limit)


@cute.kernel
def gdn_decode_rows(
    params: Params, lanes: cutlass.Constexpr, rows: cutlass.Constexpr, aligned: cutlass.Constexpr
):
    chunks = HEAD_SIZE // (4 * lanes)
    thread, _, _ = cute.arch.thread_idx()
    tile, first, _ = cute.arch.block_idx()
    threads, _, _ = cute.arch.block_dim()
    _, step, _ = cute.arch.grid_dim()
    row_step = threads // lanes  # rows of a block at once
    blocks_per_head = HEAD_SIZE // (row_step * rows)
    head = tile // blocks_per_head
    v_head = Int64(head)
    q_head = Int64(head // (params.num_v_heads // params.num_q_heads))
    lane = thread % lanes
    first_row = tile % blocks_per_head * (row_step * rows) + thread // lanes
    first_element = first_row * HEAD_SIZE + lane * 4

    row_layout = cute.make_layout((4, chunks), stride=(1, 4 * lanes))
    tile_layout = cute.make_layout((4, chunks, rows), stride=(1, 4 * lanes, row_step * HEAD_SIZE))
    rS = cute.make_rmem_tensor((4, chunks, rows), Float32)
    rQ = cute.make_rmem_tensor((4, chunks), BFloat16)
    rK = cute.make_rmem_tensor((4, chunks), BFloat16)
    rV = cute.make_rmem_tensor((rows,), Float32)

    for batch_idx in cutlass.range(first, params.batch_size, step, unroll=1):
        batch = Int64(batch_idx)
        output = params.output + batch * params.output_stride_b + v_head * params.output_stride_h
        slot, is_valid = _slot(params.read_indices, params.read_stride, batch_idx, params)
        if is_valid:
            old = slot * params.state_stride_slot + v_head * params.state_stride_h + first_element
            if params.has_state != 0:
                cute.autovec_copy(_tensor(params.state, old, tile_layout, aligned), rS)
            else:
                rS.fill(0.0)
            slot, is_stored = _slot(params.write_indices, params.write_stride, batch_idx, params)
            k = batch * params.k_stride_b + q_head * params.k_stride_h + lane * 4
            q = batch * params.q_stride_b + q_head * params.q_stride_h + lane * 4
            cute.autovec_copy(_tensor(params.k, k, row_layout, aligned), rK)
            cute.autovec_copy(_tensor(params.q, q, row_layout, aligned), rQ)
            v = params.v + batch * params.v_stride_b + v_head * params.v_stride_h
            for r in cutlass.range_constexpr(rows):
                rV[r] = Float32((v + (first_row + r * row_step)).load())
            a = Float32((params.a + batch * params.a_stride_b + v_head).load())
            b = Float32((params.b + batch * params.b_stride_b + v_head).load())
            A_log = (params.A_log + v_head).load()
            log_g = _log_gate(A_log, a, (params.dt_bias + v_head).load())
            g = _exp2(log_g * LOG2E)
            beta = cute.math.rcp(1.0 + _exp(-b, Float32(0.0)), approx=True)

            fK = rK.load().to(Float32)
            fQ = rQ.load().to(Float32)
            kq = _row_sum(fK * fQ, lanes)
            for r in cutlass.range_constexpr(rows):
                S = rS[None, None, r].load()
                Sk = _row_sum(S * fK, lanes)
                Sq = _row_sum(S * fQ, lanes)
                u = beta * (rV[r] - g * Sk)
                rS[None, None, r].store(g * S + u * fK)
                if lane == 0:
                    value = params.scale * (g * Sq + u * kq)
                    (output + (first_row + r * row_step)).store(BFloat16(value))
            if is_stored:
                new = slot * params.new_state_stride_slot + v_head * params.new_state_stride_h
                new += first_element
                cute.autovec_copy(rS, _tensor(params.new_state, new, tile_layout, aligned))
        else:
            if lane == 0:
                for r in cutlass.range_constexpr(rows):
                    (output + (first_row + r * row_step)).store(BFloat16(0.0))


# In place of a name made of the arguments' types; CuTe appends "_0".
gdn_decode_rows.set_name_prefix(
    "gdn_decode_rows", remove_cutlass_symbol=True, keep_mangled_name=False
)


@cute.jit
def _tensor(
    base: cute.Pointer, offset: Int64, layout: cute.Layout, aligned: cutlass.Constexpr
) -> cute.Tensor:
    """The elements of a lane; four neighbours are one access where `aligned`."""
    start = base + offset
    if cutlass.const_expr(aligned):
        start = start.align(base.dtype.width // 2)
    return cute.make_tensor(start, layout)


@cute.jit
def _row_sum(values: cute.TensorSSA, lanes: cutlass.Constexpr) -> Float32:
    total = values.reduce(cute.ReductionOp.ADD, Float32(0.0), reduction_profile=0)
    return cute.arch.warp_reduction_sum(total, threads_in_group=lanes)


@cute.jit
def _launch(
    params: Params,
    threads: cutlass.Constexpr,
    lanes: cutlass.Constexpr,
    rows: cutlass.Constexpr,
    aligned: cutlass.Constexpr,
):
    # Only the machine code is kept: the grid is the launcher's.
    gdn_decode_rows(params, lanes, rows, aligned).launch(grid=(1, 1, 1), block=(threads, 1, 1))


def _example(name: str, kind: Any) -> Any:
    if kind is not cute.Pointer:
        return kind(0)
    floats = ("state", "A_log", "dt_bias", "new_state")
    dtype = Float32 if name in floats else Int32 if name.endswith("indices") else BFloat16
    return nullptr(dtype, cute.AddressSpace.gmem)


def build(config: CuteRows, arch: str, variant: str) -> Any:
    """CuTe's compiled function; needs no GPU."""
    params = Params(*(_example(*field) for field in Params.__annotations__.items()))
    with tempfile.TemporaryDirectory() as folder:
        options = (
            f"--gpu-arch sm_{ARCHS[arch].nvcc_target} --keep-cubin --keep-ptx --dump-dir {folder}"
        )
        return cute.compile(
            _launch,
            params,
            32 * config.warps,
            config.lanes_per_row,
            config.rows_per_lane,
            variant == "aligned",
            options=options,
        )


def compile(config: CuteRows, arch: str, variant: str) -> Binary:
    compiled = build(config, arch, variant)
    (symbol,) = compiled.kernel_info
    return Binary(compiled.__cubin__, symbol, 32 * config.warps, 0)
