"""gdn_prefill in CuTe DSL, route cute_split: takes 64 rows of V of a state through a sequence.

Chunks of 64 tokens; T, P and the gates of each lie in the workspace (`prepare` of chunk_split).
Everything is transposed: rows of V are the rows of the products, so that each result is the next
one's left operand in the very registers that it came in, and K, Q, T and P are right operands as
they lie in memory. With S [64, 128] of the chunk's start, d_t the decay from its start to token t:

    X  = S K^T                    Y  = beta_t (V^T - d_t X)
    U  = Y + Y T^T                S' = d_last S + (d_last / d_t U) K
    O  = d_t S Q^T + U P^T

T lacks the identity of the inverse that it is, and beta is not in it: so the larger part of U is
not rounded on its way.

Plan: 4 warps take the state on, a warp 16 rows; 4 warps make the output of the same rows; 4 warps
load, `stages` chunks ahead. S and X (then Y, then U) are float32 accumulators of the state warps, O
of the output warps; left operands are bfloat16 copies in registers, which have the accumulators'
layout. So a lane of an output warp wants of S and U what the same lane of a state warp holds: it
finds it in shared memory, bank by bank, and no other exchange is needed. What must follow upon one
another is S K^T, Y, the product with T, the last product; everything else stands beside a product:
beta_t V^T beside S K^T, the scaling of S beside the product with T, gates of the next chunk and U
for the output warps beside the last one. The loading warps copy 16-byte pieces (cp.async, no tensor
maps); a barrier of each stage counts the copies, another one the warps that are done.

A chunk took 1.39 us (H200, one sequence of 8192 tokens) when the state warps made the output, too.
The machine code accounts for 1400 to 1700 of these 2700 cycles; the rest is put down to the fence
between copies and WGMMA's reads, which stood behind the stores of the output: now no thread that
stores to global memory within the loop waits for a fence. Least time by the tensor cores of sm_90
(2048 multiply-adds a cycle): 256 cycles each for S K^T, S Q^T and the new S, 96 each for T and P
(128 where `columns` is 64), in all 960, of which the state warps wait for 608. A chunk of theirs is
1080 to 1200 cycles by the machine code, one of the output warps 800 (estimated, not measured).

Registers: 168 a thread at first; the state warps hold S, X, the copy of S and beta_t V^T together
and take what the loading warps give back. Beyond their bound the compiler would make WGMMA wait for
each instruction, silently; so it does where parts of a sum are instructions of different widths
(hence `columns` for all), where a fence parts the instructions of a sum, and where warps may
diverge in its eyes. The tests look for it.

A token that is not finite must not reach earlier ones through 0 * NaN in the products with T and P:
what is not finite in Y or U (as bfloat16) is taken out, and put back into the output from that
token on; the row's state becomes NaN. Whether there is any, a sum of 0 times each operand tells.

Shared memory: `CuteSplit.shared_bytes`. Barriers: 0 of the block, else mbarriers.
Constraints: head_size 128; parameters are the fields of csrc/gdn_prefill/params.h in their order;
grid as for chunk_split with 64 rows a block. Launched with programmatic stream serialization.
"""

# mypy: ignore-errors
# The DSL rewrites this code before it runs; what its stubs say does not hold for the source.

import tempfile
from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint16, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import nullptr
from cutlass.cutlass_dsl import T

from fastkernels.core.archs import ARCHS
from fastkernels.core.kernels import Binary
from fastkernels.ops.gdn_prefill.kernels import (
    CHUNK,
    HEAD_SIZE,
    KEYS_BYTES,
    PAIRS_BYTES,
    PREPARED_BYTES,
    CuteSplit,
)

ROWS = CuteSplit.rows_per_block
GROUP = 128  # threads of each of the three groups of warps
THREADS = 3 * GROUP
# A thread starts with 168; what the loading warps give back, the state warps take.
STATE_REGISTERS, LOAD_REGISTERS = 240, 96

# A stage: K and Q as two panels of 64 columns, V [tokens, rows], T, P, gates. Rows of 128 bytes,
# swizzled, which is what WGMMA's descriptors want and keeps ldmatrix free of bank conflicts.
PANEL_BYTES = KEYS_BYTES // 2
AT_K = 0
AT_Q = AT_K + KEYS_BYTES
AT_V = AT_Q + KEYS_BYTES
AT_T = AT_V + 2 * CHUNK * ROWS
AT_P = AT_T + PAIRS_BYTES
AT_GATES = AT_P + PAIRS_BYTES
STAGE_BYTES = CuteSplit.stage_bytes
# ChunkGates of csrc/gdn_prefill/common.cuh, as far as this chain reads them.
GATES_BYTES = 528
AT_DECAY = AT_GATES
AT_BETA = AT_DECAY + 4 * CHUNK
AT_FIRST_BAD = AT_BETA + 4 * CHUNK
# Beyond the stages: for each state warp and the output warp of the same rows what the one hands to
# the other (S, U and the first tokens that are not finite; each lane's pieces where the same lane
# of the other finds them); of the state warp d_last / d_t and -beta_t d_t; of the output warp d_t,
# and its columns of the output in rows of 48 bytes, which lie in different banks; the barriers;
# what the search for the sequence needs.
OUTPUT_PITCH = 48
AT_S = 0
AT_U = AT_S + 2 * ROWS // 4 * HEAD_SIZE
AT_ROWS_BAD = AT_U + 4 * ROWS // 4 * CHUNK
AT_REST = AT_ROWS_BAD + 2 * 4 * 32
AT_FACTORS = AT_REST + 4 * CHUNK
AT_D = AT_FACTORS + 4 * CHUNK
AT_OUTPUT = AT_D + 4 * CHUNK
WARP_BYTES = AT_OUTPUT + CHUNK * OUTPUT_PITCH
BARRIER_BYTES = 128
SEARCH_BYTES = 4 * THREADS + 64
assert AT_GATES + GATES_BYTES <= STAGE_BYTES
assert CuteSplit.exchange_bytes == 4 * WARP_BYTES + BARRIER_BYTES + SEARCH_BYTES

# Barriers. Of each stage: its copies are there; it is free again. Beyond the stages' two: what the
# state warps hand to the output warps is there, and has been taken.
S_IS_THERE, S_IS_TAKEN, U_IS_THERE, U_IS_TAKEN = range(4)

LARGEST = 3.3895313892515355e38  # of bfloat16


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
    cu_seqlens: cute.Pointer
    read_indices: cute.Pointer
    write_indices: cute.Pointer
    output: cute.Pointer
    new_state: cute.Pointer
    workspace: cute.Pointer
    q_stride_t: Int64
    q_stride_h: Int64
    k_stride_t: Int64
    k_stride_h: Int64
    v_stride_t: Int64
    v_stride_h: Int64
    state_stride_slot: Int64
    state_stride_h: Int64
    a_stride_t: Int64
    b_stride_t: Int64
    cu_stride: Int64
    read_stride: Int64
    write_stride: Int64
    output_stride_t: Int64
    output_stride_h: Int64
    new_state_stride_slot: Int64
    new_state_stride_h: Int64
    num_tokens: Int32
    num_seqs: Int32
    num_q_heads: Int32
    num_v_heads: Int32
    num_slots: Int32
    has_state: Int32
    offset_words: Int32
    index_words: Int32
    scale: Float32


class Variant(NamedTuple):
    """What is known when the kernel is compiled."""

    stages: int
    columns: int  # tokens that an instruction of WGMMA takes
    is_aligned: bool  # rows start at multiples of 16 bytes
    is_warpgroup: bool  # WGMMA, else mma of a warp


# ---- instructions -------------------------------------------------------------------------------


def _pack(x: Float32, y: Float32) -> Int32:
    """Two bfloat16 values, x in the lower half."""
    return Int32(
        llvm.inline_asm(
            T.i32(), [y.ir_value(), x.ir_value()], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f",
            has_side_effects=False,
        )
    )  # fmt: skip


def _add_nothing(word: Int32, total: Int32) -> Int32:
    """`total` plus 0 times two bfloat16 values: not zero (NaN) once one of them is not finite."""
    zero = Int32(0)
    return Int32(
        llvm.inline_asm(
            T.i32(), [word.ir_value(), zero.ir_value(), total.ir_value()],
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", has_side_effects=False,
        )
    )  # fmt: skip


def _exp2(x: Float32) -> Float32:
    return cute.math.exp2(x, fastmath=True)


def _upper(word: Int32) -> Float32:
    """The upper bfloat16 value of a word."""
    return _as_float(word & Int32(-65536))


def _lower(word: Int32) -> Float32:
    return _as_float(word << 16)


def _as_float(bits: Int32) -> Float32:
    return Float32(llvm.bitcast(T.f32(), bits.ir_value()))


def _load_matrices(address: Int32, transposed: bool = False) -> tuple[Int32, ...]:
    """ldmatrix: four 8x8 matrices; lanes 8 i to 8 i + 7 give the addresses of matrix i's rows."""
    trans = ".trans" if transposed else ""
    return cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def _store_matrices_transposed(address: Int32, words: list[Int32]) -> None:
    """stmatrix, the inverse of `_load_matrices` with `transposed`."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *words],
    )


def _copy_async(shared: Int32, x: cute.Pointer, num_bytes: Int32) -> None:
    """cp.async of 16 bytes, of which only the first `num_bytes` are read and the rest are zeros."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[shared, x.toint(), num_bytes],
    )


def _mma(sums: cute.Tensor, at: int, a: list[Int32], b0: Int32, b1: Int32) -> None:
    """mma.m16n8k16: adds to sums[at : at + 4]."""
    kind = llvm.StructType.get_literal([T.f32()] * 4)
    made = llvm.inline_asm(
        kind,
        [x.ir_value() for x in (*a, b0, b1, *(sums[at + i] for i in range(4)))],
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,0,1,2,3",
        has_side_effects=False,
    )
    for i in range(4):
        sums[at + i] = Float32(llvm.extractvalue(T.f32(), made, [i]))


# ---- shared memory ------------------------------------------------------------------------------


def _swizzle(row: Int32, piece: Int32) -> Int32:
    """The byte of a 16-byte piece in a tile of 128-byte rows."""
    return row * 128 + ((piece ^ (row & 7)) << 4)


def _aligned(x: cute.Pointer, num_bytes: int) -> cute.Pointer:
    """The same address, known to be a multiple; `align` would compute one."""
    return cute.make_ptr(x.dtype, x.toint(), x.memspace, assumed_align=num_bytes)


def _float_at(shared: cute.Pointer, at: Int32) -> cute.Pointer:
    return cute.recast_ptr(shared + at, dtype=Float32)


def _int_at(shared: cute.Pointer, at: Int32) -> cute.Pointer:
    return cute.recast_ptr(shared + at, dtype=Int32)


def _barrier_at(shared: cute.Pointer, at: Int32) -> cute.Pointer:
    return cute.recast_ptr(_aligned(shared + at, 8), dtype=Int64)


def _load(x: cute.Pointer, count: int) -> cute.Tensor:
    """Neighbours in one access; their address is a multiple of their size."""
    loaded = cute.make_rmem_tensor((count,), x.dtype)
    aligned = _aligned(x, count * x.dtype.width // 8)
    cute.autovec_copy(cute.make_tensor(aligned, (count,)), loaded)
    return loaded


def _store(x: cute.Pointer, values: list[Any]) -> None:
    stored = cute.make_rmem_tensor((len(values),), x.dtype)
    for i, value in enumerate(values):
        stored[i] = value
    aligned = _aligned(x, len(values) * x.dtype.width // 8)
    cute.autovec_copy(stored, cute.make_tensor(aligned, (len(values),)))


# ---- sequences ----------------------------------------------------------------------------------


@cute.jit
def _offset(params: Params, idx: Int32) -> Int32:
    """An offset as it counts: clamped to [0, num_tokens]."""
    words = Int64(params.offset_words)
    entry = params.cu_seqlens + Int64(idx) * params.cu_stride * words
    low = entry.load()
    high = (entry + (words - 1)).load()
    result = low
    # With one word, a negative one is its own upper word.
    if (low < 0) | (low > params.num_tokens) | ((params.offset_words > 1) & (high > 0)):
        result = params.num_tokens
    if high < 0:
        result = Int32(0)
    return result


@cute.jit
def _block_max(x: Int32, scratch: cute.Pointer) -> Int32:
    for i in cutlass.range_constexpr(5):
        x = cutlass.max(x, cute.arch.shuffle_sync_bfly(x, 16 >> i))
    thread, _, _ = cute.arch.thread_idx()
    if thread % 32 == 0:
        (scratch + thread // 32).store(x)
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(THREADS // 32):
        x = cutlass.max(x, (scratch + i).load())
    return x


@cute.jit
def _locate(params: Params, position: Int32, shared: cute.Pointer):
    """The sequence at a position, its first token and its length; by all threads together.

    Longest first, as long as a block has a thread for each: blocks start in the order of their
    index, and one long sequence that starts last would keep the others waiting. Beyond, as they
    come. An offset counts as the largest so far.
    """
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % 32
    lengths = _int_at(shared, Int32(0))
    scratch = _int_at(shared, Int32(4 * THREADS))
    seq = position
    start = Int32(0)
    length = Int32(0)
    if (params.num_seqs == 1) | (params.num_seqs > THREADS):
        for i in cutlass.range(thread, position + 1, THREADS, unroll=4):
            start = cutlass.max(start, _offset(params, i))
        start = _block_max(start, scratch)
        length = cutlass.max(_offset(params, position + 1) - start, 0)
    else:
        mine = Int32(0)
        next = Int32(0)
        if thread < params.num_seqs:
            mine = _offset(params, thread)
            next = _offset(params, thread + 1)
        for i in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(mine, 1 << i)
            if lane >= 1 << i:
                mine = cutlass.max(mine, other)
        if lane == 31:
            (scratch + thread // 32).store(mine)
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(THREADS // 32):
            if i < thread // 32:
                mine = cutlass.max(mine, (scratch + i).load())
        my_length = cutlass.max(next - mine, 0)
        (lengths + thread).store(my_length)
        cute.arch.sync_threads()
        found = scratch + THREADS // 32
        if thread < params.num_seqs:
            rank = Int32(0)
            # Beyond the last sequence the lengths are 0 and do not count.
            for i in cutlass.range((params.num_seqs + 3) // 4, unroll=4):
                others = _load(lengths + 4 * i, 4)
                for n in cutlass.range_constexpr(4):
                    is_equal = (others[n] == my_length) & (4 * i + n < thread)
                    rank += Int32((others[n] > my_length) | is_equal)
            if rank == position:
                found.store(thread)
                (found + 1).store(mine)
                (found + 2).store(my_length)
        cute.arch.sync_threads()
        seq = found.load()
        start = (found + 1).load()
        length = (found + 2).load()
    return seq, start, length


@cute.jit
def _slot(indices: cute.Pointer, stride: Int64, seq: Int32, params: Params):
    """The slot of a sequence (itself in packed form), and whether it lies in the pool."""
    low = seq
    high = Int32(0)
    limit = params.num_seqs
    if params.index_words > 0:
        entry = indices + Int64(seq) * stride * Int64(params.index_words)
        low = entry.load()
        limit = params.num_slots
        if params.index_words > 1:
            high = (entry + 1).load()
    is_valid = (high == 0) & (low >= 0) & (low < limit)
    return low, cute.arch.make_warp_uniform(Int32(is_valid)) != 0


# ---- pieces of rows -----------------------------------------------------------------------------


@cute.jit
def _copy_piece(
    shared: cute.Pointer, at: Int32, x: cute.Pointer, is_inside: cutlass.Boolean, variant: Variant
):
    """Eight bfloat16 values to shared memory; zeros where not `is_inside`."""
    to = shared + at
    if cutlass.const_expr(variant.is_aligned):
        _copy_async(to.toint(), x, Int32(16) if is_inside else Int32(0))
    else:
        words = cute.make_rmem_tensor((4,), Int32)
        words.fill(0)
        if is_inside:
            values = cute.recast_ptr(x, dtype=Uint16)
            for i in cutlass.range_constexpr(4):
                high = Int32((values + 2 * i + 1).load()) << 16
                words[i] = Int32((values + 2 * i).load()) | high
        _store(cute.recast_ptr(to, dtype=Int32), [words[i] for i in range(4)])


@cute.jit
def _store_piece(to: cute.Pointer, words: cute.Tensor, variant: Variant):
    if cutlass.const_expr(variant.is_aligned):
        _store(cute.recast_ptr(_aligned(to, 16), dtype=Int32), [words[i] for i in range(4)])
    else:
        values = cute.recast_ptr(to, dtype=Uint16)
        for i in cutlass.range_constexpr(4):
            (values + 2 * i).store(Uint16(words[i]))
            (values + 2 * i + 1).store(Uint16(words[i] >> 16))


@cute.jit
def _clear_output(params: Params, output: cute.Pointer, begin: Int32, end: Int32, variant: Variant):
    """Zeros for this block's columns, from `output` on, of tokens `begin` to `end`."""
    thread, _, _ = cute.arch.thread_idx()
    pieces = ROWS // 8
    zeros = cute.make_rmem_tensor((4,), Int32)
    zeros.fill(0)
    to = output + thread % pieces * 8
    for token in cutlass.range(begin + thread // pieces, end, THREADS // pieces, unroll=1):
        _store_piece(to + Int64(token) * params.output_stride_t, zeros, variant)


# ---- the warps that load ------------------------------------------------------------------------


@cute.jit
def _load_chunks(
    params: Params,
    shared: cute.Pointer,
    barriers: cute.Pointer,
    k: cute.Pointer,
    q: cute.Pointer,
    v: cute.Pointer,
    entry: cute.Pointer,
    length: Int32,
    variant: Variant,
):
    """From the sequence's first token on; `entry`: its first chunk in the workspace."""
    thread, _, _ = cute.arch.thread_idx()
    thread -= 2 * GROUP
    row = thread // 8
    piece = thread % 8
    k += row * params.k_stride_t + piece * 8
    q += row * params.q_stride_t + piece * 8
    v += row * params.v_stride_t + piece * 8
    # Rows of further pieces are 16 below: the swizzle is the same.
    own = _swizzle(row, piece)
    for idx in cutlass.range(_num_chunks(length), unroll=1):
        stage = idx % variant.stages
        at = stage * STAGE_BYTES
        rows = length - idx * CHUNK  # beyond, the next sequence's, which may be NaN: zeros
        # In a barrier's first round, the round before counts as complete.
        cute.arch.mbarrier_wait(barriers + (variant.stages + stage), idx // variant.stages & 1 ^ 1)
        first = Int64(idx) * CHUNK
        # Copies word by word, unrolled, would take more registers than there are.
        for i in cutlass.range(CHUNK // 16, unroll=4 if variant.is_aligned else 1):
            is_inside = row + 16 * i < rows
            skipped = (first + 16 * i) if is_inside else Int64(-row)
            to = at + own + 16 * 128 * i
            of_k = k + skipped * params.k_stride_t
            of_q = q + skipped * params.q_stride_t
            of_v = v + skipped * params.v_stride_t
            for panel in cutlass.range_constexpr(2):
                to_panel = to + panel * PANEL_BYTES
                _copy_piece(shared, AT_K + to_panel, of_k + 64 * panel, is_inside, variant)
                _copy_piece(shared, AT_Q + to_panel, of_q + 64 * panel, is_inside, variant)
            _copy_piece(shared, AT_V + to, of_v, is_inside, variant)
        if idx == 0:
            cute.arch.griddepcontrol_wait()
        prepared = entry + first // CHUNK * params.num_v_heads * PREPARED_BYTES
        for i in cutlass.range_constexpr(CHUNK // 16):
            # Tiles above the diagonal are not there; in shared memory they are zeros.
            if (piece ^ (row & 7)) // 2 <= i:
                passed = (i * GROUP + thread) * 16
                to = (shared + (at + passed)).toint()
                _copy_async(to + AT_T, prepared + passed, Int32(16))
                _copy_async(to + AT_P, prepared + (PAIRS_BYTES + passed), Int32(16))
        if thread < GATES_BYTES // 16:
            to = (shared + (at + AT_GATES + thread * 16)).toint()
            _copy_async(to, prepared + (2 * PAIRS_BYTES + thread * 16), Int32(16))
        cute.arch.cp_async_mbarrier_arrive_noinc(barriers + stage)
        if cutlass.const_expr(not variant.is_aligned):
            cute.arch.mbarrier_arrive(barriers + stage)


def _num_chunks(length: Int32) -> Int32:
    return (length - 1) // CHUNK + 1


# ---- products -----------------------------------------------------------------------------------


def _pin(x: cute.Tensor) -> None:
    """Keeps the compiler from moving uses of registers across the wait for their products."""
    for i in range(cute.size(x)):
        kind, constraint = (T.f32(), "=f,0") if x.dtype is Float32 else (T.i32(), "=r,0")
        x[i] = x.dtype(
            llvm.inline_asm(kind, [x[i].ir_value()], "", constraint, has_side_effects=True)
        )


def _begin(variant: Variant, *registers: cute.Tensor) -> None:
    """Before products that read or write these registers."""
    if variant.is_warpgroup:
        for x in registers:
            _pin(x)
        warpgroup.fence()


def _end(variant: Variant) -> None:
    """Closes a group of products."""
    if variant.is_warpgroup:
        warpgroup.commit_group()


def _wait(variant: Variant, pending: int, *registers: cute.Tensor) -> None:
    """Until all but the newest `pending` groups are complete, whose sums are in `registers`."""
    if variant.is_warpgroup:
        warpgroup.wait_group(pending)
        for x in registers:
            _pin(x)


def _warpgroup_product(
    sums: cute.Tensor,
    left: cute.Tensor,
    tile: cute.Pointer,
    columns: int,
    shape: Any,
    stride: Any,
    major: OperandMajorMode,
    is_sum: bool,
    is_lower: bool = False,
) -> None:
    """sums [64, N] (+)= left [64, K] right^T, asynchronously; `right` [N, K] lies at `tile` with
    `shape` and `stride`; an instruction makes `columns` of its N columns. `is_lower`: without the
    steps that only zeros above the diagonal take part in."""
    kind = warpgroup.MmaF16BF16Op(
        BFloat16, Float32, (ROWS, columns, 16), warpgroup.OperandSource.RMEM,
        OperandMajorMode.K, major,
    )  # fmt: skip
    mma = cute.make_tiled_mma(kind)
    swizzled = cute.recast_ptr(_aligned(tile, 1024), cute.make_swizzle(3, 4, 3), BFloat16)
    right = cute.make_tensor(swizzled, cute.make_layout(shape, stride=stride))
    b = mma.make_fragment_B(mma.get_slice(0).partition_B(right))
    panels, steps = cute.size(b, mode=[1]), cute.size(b, mode=[2])
    assert panels * columns * ROWS == cute.size(sums) * GROUP
    assert steps * 4 == cute.size(left)
    c = cute.make_tensor(
        sums.iterator,
        cute.make_layout(((2, 2, columns // 8), 1, panels), stride=((1, 2, 4), 0, columns // 2)),
    )
    a = cute.make_tensor(
        cute.recast_ptr(left.iterator, dtype=BFloat16),
        cute.make_layout(((2, 2, 2), 1, steps), stride=((1, 2, 4), 0, 8)),
    )
    for step in range(steps):
        mma.set(warpgroup.Field.ACCUMULATE, is_sum or step > 0)
        for panel in range(panels):
            if not is_lower or 16 * step < (panel + 1) * columns:
                part = cute.append_ones(c[None, None, panel], up_to_rank=3)
                right = cute.append_ones(b[None, panel, step], up_to_rank=2)
                cute.gemm(mma, part, a[None, None, step], right, part)


def _multiply_keys(
    sums: cute.Tensor, left: cute.Tensor, shared: cute.Pointer, at: Int32, variant: Variant
) -> None:
    """sums [64, 64] = left [64, 128] right^T; `right` [64, 128] as K and Q lie."""
    if variant.is_warpgroup:
        _warpgroup_product(
            sums, left, shared + at, variant.columns,
            (CHUNK, (64, 2)), (64, (1, PANEL_BYTES // 2)), OperandMajorMode.K, is_sum=False,
        )  # fmt: skip
        return
    sums.fill(0.0)
    row, piece = _right_rows()
    for step in range(HEAD_SIZE // 16):
        for n in range(CHUNK // 16):
            to = at + step // 4 * PANEL_BYTES + _swizzle(16 * n + row, 2 * (step % 4) + piece)
            _multiply_fragment(sums, 8 * n, left, step, _load_matrices((shared + to).toint()))


def _multiply_pairs(
    sums: cute.Tensor, left: cute.Tensor, shared: cute.Pointer, at: Int32, variant: Variant
) -> None:
    """sums [64, 64] += left [64, 64] right^T; `right` [64, 64] lower triangular, as T and P lie."""
    if variant.is_warpgroup:
        _warpgroup_product(
            sums, left, shared + at, variant.columns,
            (CHUNK, CHUNK), (CHUNK, 1), OperandMajorMode.K, is_sum=True, is_lower=True,
        )  # fmt: skip
        return
    row, piece = _right_rows()
    for step in range(CHUNK // 16):
        for n in range(step, CHUNK // 16):
            to = at + _swizzle(16 * n + row, 2 * step + piece)
            _multiply_fragment(sums, 8 * n, left, step, _load_matrices((shared + to).toint()))


def _multiply_tokens(
    sums: cute.Tensor, left: cute.Tensor, shared: cute.Pointer, at: Int32, variant: Variant
) -> None:
    """sums [64, 128] += left [64, 64] right; `right` [64, 128] as K lies."""
    if variant.is_warpgroup:
        _warpgroup_product(
            sums, left, shared + at, HEAD_SIZE,
            ((64, 2), CHUNK), ((1, PANEL_BYTES // 2), 64), OperandMajorMode.MN, is_sum=True,
        )  # fmt: skip
        return
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % 32
    for step in range(CHUNK // 16):
        for n in range(HEAD_SIZE // 16):
            row, piece = 16 * step + lane % 16, 2 * (n % 4) + lane // 16
            to = at + n // 4 * PANEL_BYTES + _swizzle(row, piece)
            b = _load_matrices((shared + to).toint(), transposed=True)
            _multiply_fragment(sums, 8 * n, left, step, b)


def _right_rows() -> tuple[Int32, Int32]:
    """Which of 16 rows and 2 pieces this lane gives ldmatrix."""
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % 32
    return lane % 8 + lane // 16 * 8, lane // 8 % 2


def _multiply_fragment(
    sums: cute.Tensor, at: int, left: cute.Tensor, step: int, b: tuple[Int32, ...]
) -> None:
    """16 columns of `sums`, from its register `at` on."""
    a = [left[4 * step + i] for i in range(4)]
    _mma(sums, at, a, b[0], b[1])
    _mma(sums, at + 4, a, b[2], b[3])


# ---- the warps that compute ---------------------------------------------------------------------
# Lane 4 g + c of warp w holds rows 16 w + g and 16 w + g + 8 of each sum, and of their columns
# 8 j + 2 c and 8 j + 2 c + 1: register 4 j + 2 * (lower row) + (odd column). A left operand holds
# the same in pairs.


def _round(x: cute.Tensor, words: cute.Tensor) -> None:
    """Sums as a left operand."""
    for i in range(cute.size(words)):
        words[i] = _pack(x[2 * i], x[2 * i + 1])


def _scale(x: cute.Tensor, factor: Float32) -> None:
    for i in range(cute.size(x)):
        x[i] = factor * x[i]


def _has_bad(words: cute.Tensor) -> cutlass.Boolean:
    """Whether one of the operands is not finite."""
    totals = [Int32(0), Int32(0)]
    for i in range(cute.size(words)):
        totals[i % 2] = _add_nothing(words[i], totals[i % 2])
    return ((totals[0] | totals[1]) & Int32(0x7FFF7FFF)) != 0


@cute.jit
def _take_out(x: cute.Tensor, first_bad: cute.Tensor):
    """Zeros where `x` is not finite; lowers the first such token of each row."""
    lane = cute.arch.lane_idx()
    for i in cutlass.range_constexpr(CHUNK // 2):
        token = 8 * (i // 4) + lane % 4 * 2 + i % 2
        row = i // 2 % 2
        is_good = (x[i] <= LARGEST) & (x[i] >= -LARGEST)
        first_bad[row] = first_bad[row] if is_good else cutlass.min(first_bad[row], token)
        x[i] = x[i] if is_good else Float32(0.0)
    for row in cutlass.range_constexpr(2):
        for i in cutlass.range_constexpr(2):
            other = cute.arch.shuffle_sync_bfly(first_bad[row], 1 << i)
            first_bad[row] = cutlass.min(first_bad[row], other)


@cute.jit
def _put_back(x: cute.Tensor, first_bad: cute.Tensor):
    """NaN from each row's first bad token on."""
    lane = cute.arch.lane_idx()
    for i in cutlass.range_constexpr(CHUNK // 2):
        token = 8 * (i // 4) + lane % 4 * 2 + i % 2
        x[i] = Float32(float("nan")) if token >= first_bad[i // 2 % 2] else x[i]


@cute.jit
def _spoil(S: cute.Tensor, first_bad: cute.Tensor):
    """NaN in each row that has a bad token."""
    for j in cutlass.range_constexpr(HEAD_SIZE // 8):
        for i in cutlass.range_constexpr(4):
            at = 4 * j + i
            S[at] = Float32(float("nan")) if first_bad[i // 2] < CHUNK else S[at]


@cute.jit
def _stage_output(params: Params, x: cute.Tensor, tile: cute.Pointer):
    """A warp's part of the output as rows of tokens, for `_store_output`."""
    lane = cute.arch.lane_idx()
    at = (lane % 8 + lane // 16 * 8) * OUTPUT_PITCH + lane // 8 % 2 * 16
    address = (tile + at).toint()
    for n in cutlass.range_constexpr(CHUNK // 16):
        words = [
            _pack(params.scale * x[8 * n + 2 * i], params.scale * x[8 * n + 2 * i + 1])
            for i in range(4)
        ]
        _store_matrices_transposed(address + 16 * OUTPUT_PITCH * n, words)


@cute.jit
def _store_output(
    params: Params, tile: cute.Pointer, output: cute.Pointer, length: Int32, variant: Variant
):
    """A warp's 16 columns of `length` tokens; a lane 16 bytes of every 16th."""
    lane = cute.arch.lane_idx()
    for i in cutlass.range_constexpr(CHUNK // 16):
        row = 16 * i + lane // 2
        if row < length:
            words = _load(_int_at(tile, row * OUTPUT_PITCH + lane % 2 * 16), 4)
            to = output + row * params.output_stride_t + lane % 2 * 8
            _store_piece(to, words, variant)


@cute.jit
def _wait_copies(barrier: cute.Pointer, parity: Int32, variant: Variant):
    cute.arch.mbarrier_wait(barrier, parity)
    if cutlass.const_expr(variant.is_warpgroup):
        # Copies and plain stores before the barrier, WGMMA's reads after it; those of the output
        # warps, too, since the state warps hand them S after it.
        cute.arch.fence_view_async_shared()


def _arrivals(warps: int, variant: Variant) -> int:
    """What a barrier counts at which so many warps arrive.

    One lane for its warp: arrivals of every thread would be 768 a chunk. Where rows are not
    aligned, which is slow anyway, all lanes nevertheless: compute-sanitizer's racecheck follows no
    other mbarrier, and both variants hand over the same."""
    return warps if variant.is_aligned else 32 * warps


@cute.jit
def _arrive(barrier: cute.Pointer, variant: Variant):
    """Of the whole warp, after all that its lanes did before."""
    cute.arch.sync_warp()
    if cutlass.const_expr(_arrivals(1, variant) == 1):
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(barrier)
    else:
        cute.arch.mbarrier_arrive(barrier)


def _give(words: cute.Tensor, to: cute.Pointer) -> None:
    """A lane's words for the lane that calls `_take`; lanes beside one another, free of bank
    conflicts."""
    for i in range(cute.size(words) // 4):
        at = 16 * (32 * i + cute.arch.lane_idx())
        piece = cute.recast_ptr(to + at, dtype=words.dtype)
        _store(piece, [words[4 * i + n] for n in range(4)])


def _take(words: cute.Tensor, at: cute.Pointer) -> None:
    for i in range(cute.size(words) // 4):
        piece = at + 16 * (32 * i + cute.arch.lane_idx())
        loaded = _load(cute.recast_ptr(piece, dtype=words.dtype), 4)
        for n in range(4):
            words[4 * i + n] = loaded[n]


def _load_columns(x: cute.Tensor, at: cute.Pointer) -> None:
    """Of 64 float32 values those of a lane's columns."""
    column = cute.arch.lane_idx() % 4 * 2
    for j in range(CHUNK // 8):
        pair = _load(_float_at(at, 32 * j + 4 * column), 2)
        x[2 * j] = pair[0]
        x[2 * j + 1] = pair[1]


# ---- the warps that take the state on -----------------------------------------------------------


@cute.jit
def _load_gates(
    shared: cute.Pointer,
    own: cute.Pointer,
    at: Int32,
    decay: cute.Tensor,
    first_bad: cute.Tensor,
):
    """d_last of a chunk; -beta_t d_t and d_last / d_t go to shared memory, for `_load_columns`."""
    lane = cute.arch.lane_idx()
    pair = _load(_float_at(shared, at + AT_DECAY + 8 * lane), 2)
    last = _float_at(shared, at + (AT_DECAY + 4 * (CHUNK - 1))).load()
    betas = _load(_float_at(shared, at + AT_BETA + 8 * lane), 2)
    _store(_float_at(own, AT_FACTORS + 8 * lane), [-betas[i] * _exp2(pair[i]) for i in range(2)])
    _store(_float_at(own, AT_REST + 8 * lane), [_exp2(last - pair[i]) for i in range(2)])
    first_bad.fill(_int_at(shared, at + AT_FIRST_BAD).load())
    decay[0] = _exp2(last)
    cute.arch.sync_warp()


@cute.jit
def _load_values(shared: cute.Pointer, at: Int32, values: cute.Tensor):
    """beta_t V^T of this lane's elements."""
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % 32
    warp = cute.arch.make_warp_uniform(thread // 32)
    # Columns of V as rows: what the transposed load gives lies as the sums do.
    row = lane % 8 + lane // 16 * 8
    for n in cutlass.range_constexpr(CHUNK // 16):
        from_V = at + AT_V + _swizzle(16 * n + row, 2 * warp + lane // 8 % 2)
        words = _load_matrices((shared + from_V).toint(), transposed=True)
        for h in cutlass.range_constexpr(2):
            j = 2 * n + h
            betas = _load(_float_at(shared, at + (AT_BETA + 32 * j) + lane % 4 * 8), 2)
            for i in cutlass.range_constexpr(2):
                values[4 * j + 2 * i] = betas[0] * _lower(words[2 * h + i])
                values[4 * j + 2 * i + 1] = betas[1] * _upper(words[2 * h + i])
    _pin(values)


@cute.jit
def _advance_state(
    shared: cute.Pointer,
    barriers: cute.Pointer,
    own: cute.Pointer,
    S: cute.Tensor,
    length: Int32,
    variant: Variant,
):
    """Takes S through the sequence's chunks. `own`: this warp's shared memory."""
    num_chunks = _num_chunks(length)
    handed = barriers + 2 * variant.stages
    X = cute.make_rmem_tensor((CHUNK // 2,), Float32)
    left_S = cute.make_rmem_tensor((HEAD_SIZE // 4,), Int32)
    left_Y = cute.make_rmem_tensor((CHUNK // 4,), Int32)
    values = cute.make_rmem_tensor((CHUNK // 2,), Float32)  # beta_t V^T
    factors = cute.make_rmem_tensor((CHUNK // 4,), Float32)  # -beta_t d_t, then d_last / d_t
    decay = cute.make_rmem_tensor((1,), Float32)  # d_last
    first_bad = cute.make_rmem_tensor((2,), Int32)

    # Carried from chunk to chunk: remainders would be computed where S is waited for.
    stage = Int32(0)
    before = Int32(0)
    parity = Int32(0)
    _wait_copies(barriers, parity, variant)
    _load_gates(shared, own, Int32(0), decay, first_bad)
    _load_values(shared, Int32(0), values)
    for idx in cutlass.range(num_chunks, unroll=1):
        at = stage * STAGE_BYTES
        _round(S, left_S)
        _begin(variant, left_S)
        _multiply_keys(X, left_S, shared, at + AT_K, variant)
        _end(variant)
        cute.arch.mbarrier_wait(handed + S_IS_TAKEN, idx & 1 ^ 1)
        _give(left_S, own + AT_S)
        _load_columns(factors, own + AT_FACTORS)
        _pin(factors)
        _arrive(handed + S_IS_THERE, variant)
        if idx > 0:
            _arrive(barriers + (variant.stages + before), variant)
            # In the branch: else the compiler would move the arithmetic behind the wait for X.
            _load_values(shared, at, values)
        _wait(variant, 0, X)

        for i in cutlass.range_constexpr(CHUNK // 2):
            X[i] = values[i] + factors[i // 4 * 2 + i % 2] * X[i]
        _round(X, left_Y)
        if cute.arch.vote_any_sync(_has_bad(left_Y)):
            _take_out(X, first_bad)
            _round(X, left_Y)
        _begin(variant, X, left_Y)
        _multiply_pairs(X, left_Y, shared, at + AT_T, variant)
        _end(variant)
        _load_columns(factors, own + AT_REST)
        _pin(factors)
        # What changes S in a branch keeps the compiler from moving the scaling behind the wait.
        _scale(S, decay[0])
        if cute.arch.vote_any_sync((first_bad[0] < CHUNK) | (first_bad[1] < CHUNK)):
            _spoil(S, first_bad)
        _wait(variant, 0, X)

        for i in cutlass.range_constexpr(CHUNK // 4):
            n = i // 2 * 2
            left_Y[i] = _pack(factors[n] * X[2 * i], factors[n + 1] * X[2 * i + 1])
        _begin(variant, S, left_Y)
        _multiply_tokens(S, left_Y, shared, at + AT_K, variant)
        _end(variant)
        cute.arch.mbarrier_wait(handed + U_IS_TAKEN, idx & 1 ^ 1)
        _give(X, own + AT_U)
        at_bad = AT_ROWS_BAD + 8 * cute.arch.lane_idx()
        _store(_int_at(own, at_bad), [first_bad[0], first_bad[1]])
        _arrive(handed + U_IS_THERE, variant)
        before = stage
        stage += 1
        if stage == variant.stages:
            stage = Int32(0)
            parity ^= 1
        if idx + 1 < num_chunks:
            _wait_copies(barriers + stage, parity, variant)
            _load_gates(shared, own, stage * STAGE_BYTES, decay, first_bad)
        _wait(variant, 0, S)


# ---- the warps that make the output -------------------------------------------------------------


@cute.jit
def _make_output(
    params: Params,
    shared: cute.Pointer,
    barriers: cute.Pointer,
    own: cute.Pointer,
    output: cute.Pointer,
    length: Int32,
    variant: Variant,
):
    """`own`: this warp's shared memory; `output`: its columns of the sequence's first token."""
    lane = cute.arch.lane_idx()
    handed = barriers + 2 * variant.stages
    O = cute.make_rmem_tensor((CHUNK // 2,), Float32)  # noqa: E741
    left_S = cute.make_rmem_tensor((HEAD_SIZE // 4,), Int32)
    U = cute.make_rmem_tensor((CHUNK // 2,), Float32)
    left_U = cute.make_rmem_tensor((CHUNK // 4,), Int32)
    d = cute.make_rmem_tensor((CHUNK // 4,), Float32)
    for idx in cutlass.range(_num_chunks(length), unroll=1):
        stage = idx % variant.stages
        at = stage * STAGE_BYTES
        cute.arch.mbarrier_wait(handed + S_IS_THERE, idx & 1)
        _take(left_S, own + AT_S)
        _arrive(handed + S_IS_TAKEN, variant)
        _begin(variant, left_S)
        _multiply_keys(O, left_S, shared, at + AT_Q, variant)
        _end(variant)
        pair = _load(_float_at(shared, at + AT_DECAY + 8 * lane), 2)
        _store(_float_at(own, AT_D + 8 * lane), [_exp2(pair[i]) for i in range(2)])
        cute.arch.mbarrier_wait(handed + U_IS_THERE, idx & 1)
        _take(U, own + AT_U)
        first_bad = _load(_int_at(own, AT_ROWS_BAD + 8 * lane), 2)
        _arrive(handed + U_IS_TAKEN, variant)
        _round(U, left_U)
        if cute.arch.vote_any_sync(_has_bad(left_U)):
            _take_out(U, first_bad)
            _round(U, left_U)
        _load_columns(d, own + AT_D)
        _wait(variant, 0, O)

        for i in cutlass.range_constexpr(CHUNK // 2):
            O[i] = d[i // 4 * 2 + i % 2] * O[i]
        _begin(variant, O, left_U)
        _multiply_pairs(O, left_U, shared, at + AT_P, variant)
        _end(variant)
        is_dirty = cute.arch.vote_any_sync((first_bad[0] < CHUNK) | (first_bad[1] < CHUNK))
        _wait(variant, 0, O)
        _arrive(barriers + (variant.stages + stage), variant)
        if is_dirty:
            _put_back(O, first_bad)
        _stage_output(params, O, own + AT_OUTPUT)
        cute.arch.sync_warp()
        to = output + Int64(idx) * CHUNK * params.output_stride_t
        _store_output(params, own + AT_OUTPUT, to, length - idx * CHUNK, variant)


@cute.jit
def _visit_state(
    S: cute.Tensor, state: cute.Pointer, column: Int32, is_load: bool, variant: Variant
):
    """Loads or stores a state thread's part of a head's state, in pairs."""
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % 32
    own = state + (column + thread // 32 * 16 + lane // 4) * HEAD_SIZE + lane % 4 * 2
    for j in cutlass.range_constexpr(HEAD_SIZE // 8):
        for row in cutlass.range_constexpr(2):
            at = own + 8 * HEAD_SIZE * row + 8 * j
            i = 4 * j + 2 * row
            if cutlass.const_expr(is_load):
                if cutlass.const_expr(variant.is_aligned):
                    pair = _load(at, 2)
                    S[i] = pair[0]
                    S[i + 1] = pair[1]
                else:
                    S[i] = at.load()
                    S[i + 1] = (at + 1).load()
            else:
                if cutlass.const_expr(variant.is_aligned):
                    _store(at, [S[i], S[i + 1]])
                else:
                    at.store(S[i])
                    (at + 1).store(S[i + 1])


def _new_state(params: Params, slot: Int32, v_head: Int64) -> cute.Pointer:
    """Where it is used: an address would be kept in memory beside all that the loop holds."""
    of_head = v_head * params.new_state_stride_h
    return params.new_state + (Int64(slot) * params.new_state_stride_slot + of_head)


@cute.jit
def _run_sequence(
    params: Params,
    shared: cute.Pointer,
    beyond: cute.Pointer,
    seq: Int32,
    start: Int32,
    length: Int32,
    head: Int32,
    column: Int32,
    output: cute.Pointer,
    variant: Variant,
):
    """`beyond`: shared memory after the stages; `output`: this block's columns of token 0."""
    thread, _, _ = cute.arch.thread_idx()
    slot, is_valid = _slot(params.read_indices, params.read_stride, seq, params)
    target, is_stored = _slot(params.write_indices, params.write_stride, seq, params)
    v_head = Int64(head)
    of_head = Int64(slot) * params.state_stride_slot + v_head * params.state_stride_h
    state = params.state + of_head
    if not is_valid:  # padding
        _clear_output(params, output, start, start + length, variant)
    elif length == 0:
        # Word by word, so that a state keeps its bits.
        if is_stored:
            new_state = _new_state(params, target, v_head)
            begin = column * HEAD_SIZE
            end = begin + ROWS * HEAD_SIZE
            for i in cutlass.range(begin + thread, end, THREADS, unroll=1):
                word = Int32(0)
                if params.has_state != 0:
                    word = cute.recast_ptr(state + i, dtype=Int32).load()
                cute.recast_ptr(new_state + i, dtype=Int32).store(word)
    else:
        barriers = _barrier_at(beyond, Int32(4 * WARP_BYTES))
        if thread == 0:
            for i in cutlass.range_constexpr(variant.stages):
                loads = GROUP if variant.is_aligned else 2 * GROUP
                cute.arch.mbarrier_init(barriers + i, loads)
                users = _arrivals(2 * GROUP // 32, variant)
                cute.arch.mbarrier_init(barriers + (variant.stages + i), users)
            for i in cutlass.range_constexpr(4):
                givers = _arrivals(GROUP // 32, variant)
                cute.arch.mbarrier_init(barriers + (2 * variant.stages + i), givers)
            cute.arch.mbarrier_init_fence()
        # Tiles of T and P above the diagonal, which nobody copies.
        for i in cutlass.range(thread, 2 * PAIRS_BYTES // 16, THREADS, unroll=1):
            row = i // 8 % CHUNK
            if (i % 8 ^ (row & 7)) // 2 > row // 16:
                for stage in cutlass.range_constexpr(variant.stages):
                    to = _int_at(shared, stage * STAGE_BYTES + AT_T + 16 * i)
                    _store(to, [Int32(0)] * 4)
        cute.arch.sync_threads()
        first = Int64(start)
        warp = cute.arch.make_warp_uniform(thread // 32)
        own = beyond + warp % (GROUP // 32) * WARP_BYTES
        if warp < GROUP // 32:
            cute.arch.setmaxregister_increase(STATE_REGISTERS)
            S = cute.make_rmem_tensor((HEAD_SIZE // 2,), Float32)
            if params.has_state != 0:
                _visit_state(S, state, column, True, variant)
            else:
                S.fill(0.0)
            _advance_state(shared, barriers, own, S, length, variant)
            if is_stored:
                _visit_state(S, _new_state(params, target, v_head), column, False, variant)
        elif warp < 2 * GROUP // 32:
            columns = output + first * params.output_stride_t + 16 * (warp % (GROUP // 32))
            _make_output(params, shared, barriers, own, columns, length, variant)
        else:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            q_head = Int64(head // (params.num_v_heads // params.num_q_heads))
            number = Int64(start // CHUNK) + seq
            entry = params.workspace + (number * params.num_v_heads + head) * PREPARED_BYTES
            _load_chunks(
                params, shared, barriers,
                params.k + (first * params.k_stride_t + q_head * params.k_stride_h),
                params.q + (first * params.q_stride_t + q_head * params.q_stride_h),
                params.v + (first * params.v_stride_t + v_head * params.v_stride_h + column),
                entry, length, variant,
            )  # fmt: skip


@cute.kernel
def gdn_prefill_cute_chain(params: Params, variant: cutlass.Constexpr):
    shared = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
    block, _, _ = cute.arch.block_idx()
    slabs = HEAD_SIZE // ROWS
    column = block % slabs * ROWS
    head = block // slabs % params.num_v_heads
    position = block // slabs // params.num_v_heads
    beyond = shared + variant.stages * STAGE_BYTES
    seq = Int32(0)
    start = Int32(0)
    length = Int32(0)
    if params.num_seqs > 0:
        search = beyond + (4 * WARP_BYTES + BARRIER_BYTES)
        found = _locate(params, position, search)
        # WGMMA stays asynchronous only where the compiler sees that warps do not diverge.
        seq, start, length = [cute.arch.make_warp_uniform(x) for x in found]
    output = params.output + (Int64(head) * params.output_stride_h + column)
    # Tokens of no sequence stand before the first and after the last.
    if seq == 0:
        _clear_output(params, output, Int32(0), start, variant)
    if seq + 1 >= params.num_seqs:
        _clear_output(params, output, start + length, params.num_tokens, variant)
    if params.num_seqs > 0:
        _run_sequence(params, shared, beyond, seq, start, length, head, column, output, variant)
    # On every path: a block that ends must not let the next kernel overtake the earlier one.
    cute.arch.griddepcontrol_wait()


# In place of a name made of the arguments' types; CuTe appends "_0".
gdn_prefill_cute_chain.set_name_prefix(
    "gdn_prefill_cute_chain", remove_cutlass_symbol=True, keep_mangled_name=False
)


@cute.jit
def _launch(params: Params, variant: cutlass.Constexpr):
    # Only the machine code is kept: the grid is the launcher's.
    gdn_prefill_cute_chain(params, variant).launch(
        grid=(1, 1, 1),
        block=(THREADS, 1, 1),
        smem=variant.stages * STAGE_BYTES + CuteSplit.exchange_bytes,
        min_blocks_per_mp=1,  # without it the compiler does not give registers to a group
    )


def _example(name: str, kind: Any) -> Any:
    if kind is not cute.Pointer:
        return kind(0)
    words = ("cu_seqlens", "read_indices", "write_indices")
    floats = ("state", "A_log", "dt_bias", "new_state")
    dtype = Int32 if name in words else Float32 if name in floats else BFloat16
    if name == "workspace":
        return nullptr(cutlass.Uint8, cute.AddressSpace.gmem)
    return nullptr(dtype, cute.AddressSpace.gmem)


def build(config: CuteSplit, arch: str, variant: str) -> Any:
    """CuTe's compiled function; needs no GPU."""
    params = Params(*(_example(*field) for field in Params.__annotations__.items()))
    is_aligned = "any" not in variant.split("_")
    known = Variant(config.stages, config.columns, is_aligned, arch == "sm90")
    with tempfile.TemporaryDirectory() as folder:
        options = (
            f"--gpu-arch sm_{ARCHS[arch].nvcc_target} --keep-cubin --keep-ptx --dump-dir {folder}"
        )
        return cute.compile(_launch, params, known, options=options)


def compile(config: CuteSplit, arch: str, variant: str) -> Binary:
    compiled = build(config, arch, variant)
    (symbol,) = compiled.kernel_info
    return Binary(compiled.__cubin__, symbol, THREADS, config.shared_bytes)
