"""gdn_prefill in Triton: chunks of 64 tokens, the state of `rows` rows of V in registers.

For a chunk with start state S [V, K], d[t] the decay from its start to token t, d[t, s] that from
token s to t, and everything transposed, so that rows of V are rows of each product:

    A    = tril(beta_t d[t, s] k_t.k_s, -1)     T = (I + A)^-1 - I
    P    = scale tril(d[t, s] q_t.k_s)
    R    = (V^T - S K^T diag(d)) diag(beta)
    U^T  = R + R T^T
    O^T  = S Q^T diag(scale d) + U^T P^T
    S'   = d[last] S + U^T diag(d[last, s]) K

Plan: a block of stage `chain` or `fused` takes `rows` rows of one value head's state through a
sequence. S stays in float32 and is, like R and U^T, an operand from registers (64 rows and more;
fewer are not WGMMA's); only K, Q, T and P pass through shared memory. T lacks the identity, so that
the larger part of U is not rounded on its way. `fused`
makes T and P itself, once in every block of a head. For `chain` they lie in the workspace, where
stage `prepare`, a block for each chunk and value head, has put them without waiting for a state.
Products take bfloat16 operands and sum in float32; the inverse is made in float32: 16x16 blocks by
forward substitution, merged to 32 and 64 by products. Decays are exponentials of differences of
sums of log_g, which are held in two parts (`_gates`).

Tokens beyond the sequence are loaded as zeros: k = v = q = 0, beta = 0, log_g = 0. A token that is
not finite would reach earlier ones of its chunk as 0 * NaN. So a chunk says whether it is dirty
(k, v, a or b of some token not finite); a dirty one is computed without such entries and gets NaN
put in from that token on (`_advance`). That finite inputs overflow float32 halfway is not caught.

Shared memory (the compiler's): `stages` times 48 KiB and 3 KiB in `chain`; `stages` times 32 KiB
and up to 42 KiB in `fused`; 33 KiB in `prepare`.
Constraints: head_size 128; parameters are the fields of csrc/gdn_prefill/params.h in their order.
Grids: see `kernels/__init__.py`.
"""

# mypy: ignore-errors
# Triton compiles this code from its text; what its stubs say does not hold for the source.

from __future__ import annotations

import tempfile
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastkernels.core.kernels import Binary
from fastkernels.ops._shared.kernels.gdn_triton import LOG2E, find_slot, log_gate, sigmoid
from fastkernels.ops.gdn_prefill import kernels as declared
from fastkernels.ops.gdn_prefill.kernels import TritonFused, TritonSplit

HEAD_SIZE = tl.constexpr(declared.HEAD_SIZE)
CHUNK = tl.constexpr(declared.CHUNK)
# A chunk's part of the workspace; see `workspace_bytes`.
ENTRY_BYTES = tl.constexpr(declared.ENTRY_BYTES)
MATRIX = tl.constexpr(declared.CHUNK * declared.CHUNK)

# exp(-110) is 0 in float32, so this changes no gate; unclamped, one log_g of -1e18 would swallow
# the later ones of its chunk.
LEAST_LOG_G = tl.constexpr(-110.0)
# Offsets that a block looks at together.
OFFSETS = tl.constexpr(512)
NAN = tl.constexpr(float("nan"))
INF = tl.constexpr(float("inf"))


# ---- sequences and chunks -----------------------------------------------------------------------


@triton.jit
def _offsets(cu_seqlens, stride, idx, mask, num_tokens, words):
    """Offsets clamped to 0..num_tokens; 0 where masked."""
    at = cu_seqlens + idx.to(tl.int64) * stride * words
    low = tl.load(at, mask=mask, other=0)
    high = tl.load(at + 1, mask=mask & (words > 1), other=low >> 31)
    beyond = (high > 0) | (low < 0) | (low > num_tokens)
    return tl.where(high < 0, 0, tl.where(beyond, num_tokens, low))


@triton.jit
def _span(cu_seqlens, stride, seq, num_tokens, num_seqs, words):
    """First token of a sequence and the one after its last: running maxima of the offsets."""
    start = 0
    end = 0
    begin = 0
    while begin <= tl.minimum(seq + 1, num_seqs):
        idx = begin + tl.arange(0, OFFSETS)
        mask = (idx <= seq + 1) & (idx <= num_seqs)
        offsets = _offsets(cu_seqlens, stride, idx, mask, num_tokens, words)
        start = tl.maximum(start, tl.max(tl.where(idx <= seq, offsets, 0), 0))
        end = tl.maximum(end, tl.max(offsets, 0))
        begin += OFFSETS
    return start, end


@triton.jit
def _sequence_of(number, cu_seqlens, stride, num_tokens, num_seqs, words):
    """The last sequence whose first chunk's number is at most `number`; -1 if there is none.

    With c the offsets as given, sequence i begins later iff some j <= i has c_j / 64 + i > number.
    So the first such i is the smallest max(j, number + 1 - c_j / 64), and no prefix is scanned.
    """
    first_later = num_seqs
    begin = 0
    while begin < num_seqs:
        idx = begin + tl.arange(0, OFFSETS)
        offsets = _offsets(cu_seqlens, stride, idx, idx < num_seqs, num_tokens, words)
        later = tl.maximum(idx, number + 1 - offsets // CHUNK)
        first_later = tl.minimum(first_later, tl.min(tl.where(idx < num_seqs, later, num_seqs), 0))
        begin += OFFSETS
    return first_later - 1


@triton.jit
def _load_tile(base, stride_t, token, inside, WIDTH: tl.constexpr):
    """[64, WIDTH] from token `token` on; 0 where not `inside`."""
    row = (token + tl.arange(0, CHUNK)).to(tl.int64)[:, None] * stride_t
    at = base + row + tl.arange(0, WIDTH)[None, :]
    return tl.load(at, mask=inside[:, None], other=0.0)


@triton.jit
def _zero_output(output, stride_t, begin, end, ROWS: tl.constexpr):
    row = tl.arange(0, CHUNK).to(tl.int64)[:, None] * stride_t
    zeros = tl.zeros([CHUNK, ROWS], tl.bfloat16)
    while begin < end:
        at = output + begin.to(tl.int64) * stride_t + (row + tl.arange(0, ROWS)[None, :])
        tl.store(at, zeros, mask=(tl.arange(0, CHUNK) < end - begin)[:, None])
        begin += tl.minimum(end - begin, CHUNK)


# ---- the inverse --------------------------------------------------------------------------------


@triton.jit
def _quarters(x, N: tl.constexpr):
    """The upper left, lower left and lower right [B, N, N] of [B, 2 N, 2 N]."""
    left, right = x.reshape(x.shape[0], 2, N, 2, N).permute(0, 2, 4, 1, 3).split()
    upper_left, lower_left = left.split()
    _, lower_right = right.split()
    return upper_left, lower_left, lower_right


@triton.jit
def _assemble(upper_left, lower_left, lower_right):
    """The inverse of `_quarters`, with zeros in the upper right."""
    B: tl.constexpr = upper_left.shape[0]
    N: tl.constexpr = upper_left.shape[1]
    upper = tl.join(upper_left, tl.zeros_like(upper_left)).permute(0, 1, 3, 2)
    lower = tl.join(lower_left, lower_right).permute(0, 1, 3, 2)
    both = tl.join(upper.reshape(B, N, 2 * N), lower.reshape(B, N, 2 * N))
    return both.permute(0, 3, 1, 2).reshape(B, 2 * N, 2 * N)


@triton.jit
def _interleave(even, odd):
    """[2 B, N, N] from its matrices of even and of odd number."""
    N: tl.constexpr = even.shape[1]
    return tl.join(even, odd).permute(0, 3, 1, 2).reshape(2 * even.shape[0], N, N)


@triton.jit
def _deinterleave(x):
    N: tl.constexpr = x.shape[1]
    return x.reshape(x.shape[0] // 2, 2, N, N).permute(0, 2, 3, 1).split()


@triton.jit
def _substitute(A, WARPS: tl.constexpr):
    """(I + A)^-1 of strictly lower A [4, 16, 16].

    As [16 rows, blocks, 16 columns] with as many copies of the four blocks as give each thread a
    column, rows lie in registers: a row is taken out at no cost, an entry of A comes from the lane
    of its column.
    """
    COPIES: tl.constexpr = WARPS // 2
    B: tl.constexpr = 4 * COPIES
    A = A.permute(1, 0, 2)[:, None, :, :].broadcast_to(16, COPIES, 4, 16).reshape(16, B, 16)
    row = tl.arange(0, 16)[:, None, None]
    X = tl.where(row == tl.arange(0, 16)[None, None, :], 1.0, 0.0).broadcast_to(16, B, 16)
    for j in tl.static_range(15):
        # A sum of integers, since adding 0 to them is no instruction.
        bits = tl.where(row == j, X.to(tl.int32, bitcast=True), 0)
        X_j = tl.sum(bits, 0).to(tl.float32, bitcast=True)
        A_j = tl.gather(A, tl.full([16, B, 16], j, tl.int32), axis=2)
        X = tl.where(row > j, X - A_j * X_j[None, :, :], X)
    X = X.reshape(16, COPIES, 4, 16).permute(2, 0, 3, 1)
    if COPIES == 4:
        X, _ = X.reshape(4, 16, 16, 2, 2).split()
    X, _ = X.split()
    return X


@triton.jit
def _product(x, y):
    """In float32: near-parallel keys make terms of size 1 cancel."""
    return tl.dot(x, y, input_precision="ieee")


@triton.jit
def _inverse(A, WARPS: tl.constexpr):
    """(I + A)^-1 of strictly lower A [64, 64]."""
    A00, A10, A11 = _quarters(A[None, :, :], 32)
    a00, a10, a11 = _quarters(_interleave(A00, A11), 16)
    x00, x11 = _deinterleave(_substitute(_interleave(a00, a11), WARPS))
    x10 = -_product(_product(x11, a10), x00)
    X00, X11 = _deinterleave(_assemble(x00, x10, x11))
    X10 = -_product(_product(X11, A10), X00)
    return _assemble(X00, X10, X11).reshape(CHUNK, CHUNK)


# ---- one chunk ----------------------------------------------------------------------------------


@triton.jit
def _gates(A_log, dt_bias, a, b, stride_a, stride_b, token, inside):
    """`(high, low, beta)` of 64 tokens; `high + low` is the sum of log_g up to each.

    log_g is split into a multiple of 2^-6 and the rest: sums of the former are exact, sums of the
    latter small. So small steps after large ones keep their digits. From a token on whose gates are
    not finite, `low` is NaN and beta 0.
    """
    idx = token.to(tl.int64) + tl.arange(0, CHUNK)
    b_a = tl.load(a + idx * stride_a, mask=inside, other=0.0).to(tl.float32)
    b_b = tl.load(b + idx * stride_b, mask=inside, other=0.0).to(tl.float32)
    log_g = log_gate(A_log, b_a, dt_bias)
    beta = sigmoid(b_b)
    log_g = tl.where(log_g < LEAST_LOG_G, LEAST_LOG_G, log_g)
    log_g = tl.where(inside, tl.where(beta == beta, log_g, NAN), 0.0)
    high = tl.floor(log_g * 64.0 + 0.5) * (1 / 64)
    low = tl.cumsum(log_g - high, 0)
    # What depends on a scan is not computed again for every layout that it is wanted in.
    return tl.cumsum(high, 0), low, tl.where(inside & (low == low), beta, 0.0)


@triton.jit
def _last(x):
    """Of a vector, its last entry."""
    return tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, x, 0.0), 0)


@triton.jit
def _nothing(x):
    """0, or NaN if an entry is not finite."""
    return tl.sum(x.to(tl.float32) * 0.0)


@triton.jit
def _matrices(b_k, b_q, high, low, beta, scale, WARPS: tl.constexpr):
    """T and P in bfloat16, and 0, or NaN if a key is not finite. T is always finite; P is not from
    the row on of a token that is not."""
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    kk = tl.dot(b_k, tl.trans(b_k))
    nothing = _nothing(kk)
    qk = tl.dot(b_q, tl.trans(b_k))
    # Masked before the exponential, which overflows above the diagonal. The sum starts from a
    # product's entries, as 0 of them, so that all of it takes their layout, and only vectors change
    # theirs.
    decay = tl.where(row >= column, tl.minimum(tl.abs(kk), 0.0), -INF)
    decay = decay + high[:, None] - high[None, :] + low[:, None] - low[None, :]
    decay = tl.exp2(decay * LOG2E)
    A = beta[:, None] * decay * kk
    A = tl.where((row > column) & (tl.abs(A) < INF), A, 0.0)
    P = tl.where(row >= column, scale * decay * qk, 0.0)
    T = tl.where(row > column, _inverse(A, WARPS), 0.0)
    return T.to(tl.bfloat16), P.to(tl.bfloat16), nothing


@triton.jit
def _advance(S, b_k, b_q, b_v, b_T, b_P, beta, start, end, last, scale, is_dirty):
    """`(O^T, S')` of one chunk. In a dirty one, a row of V that becomes not finite at some token is
    0 there and later as an operand, and NaN from there on in what is given back."""
    token = tl.arange(0, CHUNK)
    b_S = S.to(tl.bfloat16)
    R = tl.trans(b_v).to(tl.float32) - tl.dot(b_S, tl.trans(b_k)) * start[None, :]
    R *= beta[None, :]
    out = tl.dot(b_S, tl.trans(b_q)) * (scale * start)[None, :]
    first = tl.full([S.shape[0]], CHUNK, tl.int32)
    if is_dirty:
        is_finite = tl.abs(R) < INF
        first = tl.min(tl.where(is_finite, CHUNK, token[None, :]), 1)
        R = tl.where(is_finite, R, 0.0)
    U = tl.dot(R.to(tl.bfloat16), tl.trans(b_T), R)
    out = tl.dot(U.to(tl.bfloat16), tl.trans(b_P), out)
    S = tl.dot((U * end[None, :]).to(tl.bfloat16), b_k, S * last)
    if is_dirty:
        out = tl.where(first[:, None] <= token[None, :], NAN, out)
        S = tl.where(first[:, None] < CHUNK, NAN, S)
    return out, S


# ---- the kernel ---------------------------------------------------------------------------------


def _name(specialization: Any) -> str:
    return f"gdn_prefill_{specialization.constants['STAGE']}"


@triton.jit(repr=_name)
def gdn_prefill_chunks(
    q,
    k,
    v,
    state,
    A_log,
    a,
    dt_bias,
    b,
    cu_seqlens,
    read_indices,
    write_indices,
    output,
    new_state,
    workspace,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    state_stride_slot,
    state_stride_h,
    a_stride_t,
    b_stride_t,
    cu_stride,
    read_stride,
    write_stride,
    output_stride_t,
    output_stride_h,
    new_state_stride_slot,
    new_state_stride_h,
    num_tokens,
    num_seqs,
    num_q_heads,
    num_v_heads,
    num_slots,
    has_state,
    offset_words,
    index_words,
    scale,
    STAGE: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One launch of `STAGE` fused, prepare or chain. ROWS counts for the state's slab (prepare: all
    of V), STAGES chunks are loaded ahead; PDL: prepare lets chain start early."""
    if PDL and STAGE == "prepare":
        gdc_launch_dependents()
    slabs: tl.constexpr = HEAD_SIZE // ROWS
    slab = tl.program_id(0) % slabs * ROWS
    unit = tl.program_id(0) // slabs
    v_head = (unit % num_v_heads).to(tl.int64)
    q_head = v_head // (num_v_heads // num_q_heads)
    q += q_head * q_stride_h
    k += q_head * k_stride_h
    v += v_head * v_stride_h + slab
    a += v_head
    b += v_head
    unit //= num_v_heads
    token = tl.arange(0, CHUNK)
    tile = token[:, None] * CHUNK + token[None, :]
    pairs = token[:, None] * 2 + tl.arange(0, 2)[None, :]

    if STAGE == "prepare":
        seq = _sequence_of(unit, cu_seqlens, cu_stride, num_tokens, num_seqs, offset_words)
        if seq >= 0:
            start, end = _span(cu_seqlens, cu_stride, seq, num_tokens, num_seqs, offset_words)
            first = start + (unit - start // CHUNK - seq) * CHUNK
            if first < end:
                inside = token < end - first
                b_k = _load_tile(k, k_stride_t, first, inside, HEAD_SIZE)
                b_q = _load_tile(q, q_stride_t, first, inside, HEAD_SIZE)
                b_v = _load_tile(v, v_stride_t, first, inside, HEAD_SIZE)
                high, low, beta = _gates(
                    tl.load(A_log + v_head), tl.load(dt_bias + v_head), a, b,
                    a_stride_t, b_stride_t, first, inside,
                )  # fmt: skip
                h_low = _last(low)
                d_start = tl.exp2((high + low) * LOG2E)
                d_end = tl.exp2(((_last(high) - high) + (h_low - low)) * LOG2E)
                nothing = _nothing(b_v) + h_low * 0.0
                b_T, b_P, k_nothing = _matrices(b_k, b_q, high, low, beta, scale, WARPS)
                is_dirty = nothing + k_nothing != 0.0
                entry = workspace + (unit.to(tl.int64) * num_v_heads + v_head) * (ENTRY_BYTES // 2)
                vectors = (entry + 2 * MATRIX).to(tl.pointer_type(tl.float32), bitcast=True)
                tl.store(entry + tile, b_T)
                tl.store(entry + MATRIX + tile, b_P)
                tl.store(vectors + pairs, tl.join(d_start, d_end))
                tl.store(vectors + 2 * CHUNK + token, beta)
                tl.store(vectors + 3 * CHUNK, is_dirty.to(tl.float32))
    else:
        seq = unit
        start, end = _span(cu_seqlens, cu_stride, seq, num_tokens, num_seqs, offset_words)
        output += v_head * output_stride_h + slab
        if seq == 0:
            _zero_output(output, output_stride_t, start * 0, start, ROWS)
        if seq + 1 >= num_seqs:
            _zero_output(output, output_stride_t, end, num_tokens, ROWS)
        if seq < num_seqs:
            slot, is_valid = find_slot(
                read_indices, read_stride, seq, num_seqs, num_slots, index_words
            )
            if is_valid:
                row = (slab + tl.arange(0, ROWS))[:, None] * HEAD_SIZE
                slab_tile = row + tl.arange(0, HEAD_SIZE)[None, :]
                old = state + slot * state_stride_slot + v_head * state_stride_h
                S = tl.load(old + slab_tile, mask=has_state != 0, other=0.0)
                if STAGE == "fused":
                    h_A_log, h_dt_bias = tl.load(A_log + v_head), tl.load(dt_bias + v_head)
                slot, is_stored = find_slot(
                    write_indices, write_stride, seq, num_seqs, num_slots, index_words
                )
                number = start // CHUNK + seq
                if PDL and STAGE == "chain":
                    gdc_wait()
                for j in tl.range(
                    0, tl.cdiv(end - start, CHUNK), num_stages=STAGES, disable_licm=STAGE == "fused"
                ):
                    first = start + j * CHUNK
                    inside = token < end - first
                    b_k = _load_tile(k, k_stride_t, first, inside, HEAD_SIZE)
                    b_q = _load_tile(q, q_stride_t, first, inside, HEAD_SIZE)
                    b_v = _load_tile(v, v_stride_t, first, inside, ROWS)
                    if STAGE == "fused":
                        high, low, beta = _gates(
                            h_A_log, h_dt_bias, a, b, a_stride_t, b_stride_t, first, inside
                        )
                        h_high, h_low = _last(high), _last(low)
                        d_start = tl.exp2((high + low) * LOG2E)
                        d_end = tl.exp2(((h_high - high) + (h_low - low)) * LOG2E)
                        d_last = tl.exp2((h_high + h_low) * LOG2E)
                        nothing = _nothing(b_v) + h_low * 0.0
                        b_T, b_P, k_nothing = _matrices(b_k, b_q, high, low, beta, scale, WARPS)
                        is_dirty = nothing + k_nothing != 0.0
                    else:
                        entry = (number + j).to(tl.int64) * num_v_heads + v_head
                        entry = workspace + entry * (ENTRY_BYTES // 2)
                        vectors = (entry + 2 * MATRIX).to(tl.pointer_type(tl.float32), bitcast=True)
                        b_T = tl.load(entry + tile)
                        b_P = tl.load(entry + MATRIX + tile)
                        d_start, d_end = tl.load(vectors + pairs).split()
                        d_last = tl.load(vectors + 2 * (CHUNK - 1))
                        beta = tl.load(vectors + 2 * CHUNK + token)
                        is_dirty = tl.load(vectors + 3 * CHUNK) != 0.0
                    out, S = _advance(
                        S, b_k, b_q, b_v, b_T, b_P, beta, d_start, d_end, d_last, scale, is_dirty
                    )
                    at = output + (first + token).to(tl.int64)[:, None] * output_stride_t
                    at += tl.arange(0, ROWS)[None, :]
                    tl.store(at, tl.trans(out.to(tl.bfloat16)), mask=inside[:, None])
                new = new_state + slot * new_state_stride_slot + v_head * new_state_stride_h
                tl.store(new + slab_tile, S, mask=is_stored)
            else:
                _zero_output(output, output_stride_t, start, end, ROWS)
        if PDL and STAGE == "chain":
            gdc_wait()  # blocks without chunks, too, do not end before `prepare`


TYPES = {
    "*bf16": ("q", "k", "v", "a", "b", "output", "workspace"),
    "*fp32": ("state", "A_log", "dt_bias", "new_state"),
    "*i32": ("cu_seqlens", "read_indices", "write_indices"),
    "fp32": ("scale",),
    "constexpr": ("STAGE", "ROWS", "WARPS", "STAGES", "PDL"),
}
# Pointers are multiples of so many bytes, strides of so many elements: always, and what the
# variants without `any` promise.
ALWAYS = {16: ("workspace",)}
ALIGNED = {
    16: ("q", "k", "v", "state", "output", "new_state"),
    8: (
        *("q_stride_t", "q_stride_h", "k_stride_t", "k_stride_h", "v_stride_t", "v_stride_h"),
        *("output_stride_t", "output_stride_h"),
    ),
    4: ("state_stride_slot", "state_stride_h", "new_state_stride_slot", "new_state_stride_h"),
}


def constants(config: TritonFused | TritonSplit, variant: str) -> dict[str, Any]:
    """The compile-time arguments of a config."""
    if isinstance(config, TritonFused):
        return {
            "STAGE": "fused", "ROWS": config.rows, "WARPS": config.warps, "STAGES": config.stages,
            "PDL": 0,
        }  # fmt: skip
    if variant.startswith("prepare"):
        return {
            "STAGE": "prepare", "ROWS": declared.HEAD_SIZE, "WARPS": config.prepare_warps,
            "STAGES": 1, "PDL": 1,
        }  # fmt: skip
    return {
        "STAGE": "chain", "ROWS": config.rows, "WARPS": config.chain_warps,
        "STAGES": config.stages, "PDL": 1,
    }  # fmt: skip


def build(config: TritonFused | TritonSplit, arch: str, variant: str) -> Any:
    """Triton's compiled kernel; needs no GPU."""
    names = gdn_prefill_chunks.arg_names
    types = {name: kind for kind, named in TYPES.items() for name in named}
    hints = [ALWAYS] if "any" in variant.split("_") else [ALWAYS, ALIGNED]
    values = constants(config, variant)
    source = ASTSource(
        gdn_prefill_chunks,
        # What TYPES leaves out are strides and counts.
        signature={
            n: types.get(n) or ("i64" if n.endswith("_stride") or "_stride_" in n else "i32")
            for n in names
        },
        constexprs=values,
        attrs={
            (names.index(name),): [["tt.divisibility", multiple]]
            for promised in hints
            for multiple, named in promised.items()
            for name in named
        },
    )
    target = GPUTarget("cuda", int(arch.removeprefix("sm")), 32)
    knobs = triton.knobs
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = folder
        knobs.compilation.disable_line_info = True  # paths of the machine that builds
        return triton.compile(source, target=target, options={"num_warps": values["WARPS"]})


def compile(config: TritonFused | TritonSplit, arch: str, variant: str) -> Binary:
    kernel = build(config, arch, variant)
    metadata = kernel.metadata
    return Binary(kernel.asm["cubin"], metadata.name, 32 * metadata.num_warps, metadata.shared)
