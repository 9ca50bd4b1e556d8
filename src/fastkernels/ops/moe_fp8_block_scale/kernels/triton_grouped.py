"""moe_fp8_block_scale in Triton: route, list, two grouped products, combine.

Plan: `route`, a block for each token, chooses its experts and leaves local ones and weights, in the
token's slots. `list`, a block for each local expert, gives each of its slots a row, in the order of
the tokens. `gemm1` and `gemm2` are persistent: each block finds its tiles from the experts' counts,
token tiles of an expert's rows of weights next to one another, so that weights leave DRAM once. The
weights are the first operand (64 to 256 rows, WGMMA or tcgen05) and the tokens the second (16 to
128): a few tokens fill no more of the tensor core than they need. `gemm1` gathers the tokens' rows,
has the linear and the gate rows of its columns in one tile, and leaves C; `gemm2` leaves weighted
partial outputs, a row for each (token, local expert); `combine`, blocks for each token, adds up its
rows in the order of its slots. Nothing depends on the order in which blocks run: equal calls give
equal bits.

Precision. Both operands of both products are e4m3, as they lie in memory: converting weights to a
wider type would cost instructions in the stage that has to keep up with DRAM. C would be too coarse
as one e4m3 code (2.5e-2), so it is two: the code of C / scale and the code of what remains, 8 bits
of C in all (7e-4), with a scale for each row and `rows` columns; the second product takes both, at
the rate that 16-bit operands would have. Hopper adds e4m3 products with about 14 bits, aligned to
the largest: sums of at most 128 products are made there (256 with both codes), and added up in
float32 registers, where the block scales are applied, too.

The sigmoid of the routing is computed in float64 and rounded, as the torch route does: 256 of them
a token cost 8 us at 14107 tokens, and equal logits give equal ids everywhere.

Constraints: at most 256 experts, 256 local ones, topk 16; parameters are the fields of
csrc/moe_fp8_block_scale/params.h in their order. Grids and workspace: see `kernels/__init__.py`.
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
from fastkernels.ops.moe_fp8_block_scale import kernels as declared
from fastkernels.ops.moe_fp8_block_scale.kernels import TritonGrouped

MAX_EXPERTS = tl.constexpr(declared.MAX_EXPERTS)
MAX_LOCAL = tl.constexpr(declared.MAX_LOCAL)
MAX_TOPK = tl.constexpr(declared.MAX_TOPK)
COLUMNS = tl.constexpr(declared.COLUMNS)
SCALED = tl.constexpr(declared.SCALED)
# Words of 4 bytes that the workspace's regions are aligned to.
ALIGNMENT = tl.constexpr(declared.ALIGNMENT // 4)

BLOCK = tl.constexpr(128)  # columns of a scale; those of a step of the first product
GROUPS = tl.constexpr(declared.GROUPS)
SLOTS = tl.constexpr(2048)  # of a step of `list`

# Variants without a knob. One warp chooses a token's experts alone: four do it in the same time.
WARPS = {
    "route": 1, "route_any": 4, "list": 8,
    "combine": 4, "combine_any": 4, "combine_half": 4, "combine_half_any": 4,
}  # fmt: skip

INF = tl.constexpr(float("inf"))
LOWEST = tl.constexpr(-(2**62))  # below every key
LARGEST_CODE = tl.constexpr(448.0)
# Below it scales are not divided by: C is under 3e-34 there.
SMALLEST_SCALE = tl.constexpr(2.0**-120)
SMALLEST_SIGMOID = tl.constexpr(2.0**-126)


# ---- the workspace ------------------------------------------------------------------------------


@triton.jit
def _rounded(words):
    return (words + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT


@triton.jit
def _slot_weights(workspace, slots):
    pointer: tl.constexpr = tl.pointer_type(tl.float32)
    return (workspace + _rounded(slots.to(tl.int64))).to(pointer, bitcast=True)


@triton.jit
def _slot_rows(workspace, slots):
    return workspace + 2 * _rounded(slots.to(tl.int64))


@triton.jit
def _row_slots(workspace, slots):
    return workspace + 3 * _rounded(slots.to(tl.int64))


@triton.jit
def _counts(workspace, slots):
    return workspace + 4 * _rounded(slots.to(tl.int64))


@triton.jit
def _intermediates(workspace, slots, intermediate_size):
    """Scales and codes."""
    scales = _counts(workspace, slots) + MAX_LOCAL
    codes = scales + _rounded(slots.to(tl.int64) * (intermediate_size // SCALED))
    numbers: tl.constexpr = tl.pointer_type(tl.float32)
    e4m3: tl.constexpr = tl.pointer_type(tl.float8e4nv)
    return scales.to(numbers, bitcast=True), codes.to(e4m3, bitcast=True)


@triton.jit
def _partials(workspace, slots, intermediate_size):
    scales, _ = _intermediates(workspace, slots, intermediate_size)
    scale_words = _rounded(slots.to(tl.int64) * (intermediate_size // SCALED))
    return scales + scale_words + slots.to(tl.int64) * (intermediate_size // 2)


# ---- routing ------------------------------------------------------------------------------------


@triton.jit
def _key(value, index):
    """Orders as the value does, and equal values by index, the lower one higher."""
    bits = value.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 16) | (0xFFFF - index).to(tl.int64)


@triton.jit
def _value(key):
    ordered = (key >> 16).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _rankable(value):
    return tl.where(value == value, value, -INF)  # NaN is below everything


@triton.jit
def _group_key(members, group, has_pairs):
    """Of each group, whose members' keys are a row, by its two largest values."""
    best = tl.max(members, 1)
    second = tl.max(tl.where(members == best[:, None], LOWEST, members), 1)
    return _key(_rankable(_value(best) + tl.where(has_pairs, _value(second), 0.0)), group)


@triton.jit
def _largest(keys, count):
    """Marks the largest keys, and all that equal one."""
    is_kept = keys < LOWEST
    for _ in range(count):
        is_largest = keys == tl.max(keys, 0)
        is_kept |= is_largest
        keys = tl.where(is_largest, LOWEST, keys)
    return is_kept


@triton.jit
def _choose(logits, bias, num_experts, topk, num_groups, topk_groups, factor, EVEN: tl.constexpr):
    """A token's experts and weights, best first: int64 and float32 [MAX_TOPK]; no expert is -1.
    EVEN: MAX_EXPERTS experts in GROUPS groups."""
    expert = tl.arange(0, MAX_EXPERTS)
    is_expert = expert < num_experts
    logit = _rankable(tl.load(logits + expert, mask=is_expert, other=0.0))
    score = (1.0 / (1.0 + tl.exp(-logit.to(tl.float64)))).to(tl.float32)
    score = tl.where(score < SMALLEST_SIGMOID, 0.0, score)
    biased = score + _rankable(tl.load(bias + expert, mask=is_expert, other=0.0).to(tl.float32))
    key = tl.where(is_expert, _key(biased, expert), LOWEST)

    if EVEN:
        members = tl.reshape(key, [GROUPS, MAX_EXPERTS // GROUPS])
        group_key = _group_key(members, tl.arange(0, GROUPS), True)
        is_kept = tl.broadcast_to(_largest(group_key, topk_groups)[:, None], members.shape)
        is_kept = tl.reshape(is_kept, [MAX_EXPERTS])
    else:
        group_of = expert // (num_experts // num_groups)
        group_key = tl.full([MAX_EXPERTS], LOWEST, tl.int64)  # of each expert's group
        for first in range(0, num_groups, GROUPS):
            group = first + tl.arange(0, GROUPS)
            is_member = (group_of[None, :] == group[:, None]) & is_expert[None, :]
            members = tl.where(is_member, key[None, :], LOWEST)
            of_group = _group_key(members, group, num_groups < num_experts)
            of_expert = tl.max(tl.where(is_member, of_group[:, None], LOWEST), 0)
            group_key = tl.maximum(group_key, of_expert)
        is_kept = _largest(group_key, topk_groups)
    candidate = tl.where(is_kept, key, LOWEST)

    slot = tl.arange(0, MAX_TOPK)
    ids = tl.full([MAX_TOPK], -1, tl.int64)
    chosen = tl.zeros([MAX_TOPK], tl.float32)
    for place in range(topk):
        best = tl.max(candidate, 0)
        is_best = candidate == best
        ids = tl.where(slot == place, 0xFFFF - (best & 0xFFFF), ids)
        chosen = tl.where(slot == place, tl.sum(tl.where(is_best, score, 0.0), 0), chosen)
        candidate = tl.where(is_best, LOWEST, candidate)
    share = chosen.to(tl.float64)
    return ids, (share / (tl.sum(share, 0) + 1e-20) * factor).to(tl.float32)


@triton.jit
def _given(topk_ids, topk_weights, ids_stride_k, weights_stride_k, topk, id_words):
    """The same from the caller's tensors, of whose ids `id_words` words of 4 bytes are one."""
    slot = tl.arange(0, MAX_TOPK)
    is_slot = slot < topk
    low = tl.load(topk_ids + slot * ids_stride_k, mask=is_slot, other=-1)
    is_wide = is_slot & (id_words == 2)
    high = tl.load(topk_ids + slot * ids_stride_k + 1, mask=is_wide, other=-1)
    wide = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    weights = tl.load(topk_weights + slot * weights_stride_k, mask=is_slot, other=0.0)
    return tl.where(is_wide, wide, low.to(tl.int64)), weights


@triton.jit
def _route(
    logits,
    bias,
    topk_ids,
    topk_weights,
    workspace,
    logits_stride_t,
    ids_stride_t,
    ids_stride_k,
    weights_stride_t,
    weights_stride_k,
    slots,
    num_experts,
    num_local,
    topk,
    num_groups,
    topk_groups,
    offset,
    id_words,
    factor,
    EVEN: tl.constexpr,
):
    token = tl.program_id(0)
    far = token.to(tl.int64)
    if id_words == 0:
        ids, weights = _choose(
            logits + far * logits_stride_t,
            bias,
            num_experts,
            topk,
            num_groups,
            topk_groups,
            factor,
            EVEN,
        )
    else:
        ids, weights = _given(
            topk_ids + far * ids_stride_t, topk_weights + far * weights_stride_t,
            ids_stride_k, weights_stride_k, topk, id_words,
        )  # fmt: skip
    local = ids - offset
    is_local = (ids >= 0) & (local >= 0) & (local < num_local)
    slot = tl.arange(0, MAX_TOPK)
    to = token * topk + slot
    tl.store(workspace + to, tl.where(is_local, local, -1).to(tl.int32), mask=slot < topk)
    tl.store(_slot_weights(workspace, slots) + to, weights, mask=slot < topk)


@triton.jit
def _list(workspace, slots, used):
    this = tl.program_id(0)
    step = tl.arange(0, SLOTS)
    before = 0
    for first in tl.range(0, used, SLOTS, num_stages=3):
        expert = tl.load(workspace + first + step, mask=first + step < used, other=-1)
        before += tl.sum(((expert >= 0) & (expert < this)).to(tl.int32), 0)
    end = before
    for first in tl.range(0, used, SLOTS, num_stages=3):
        slot = first + step
        is_hit = tl.load(workspace + slot, mask=slot < used, other=-1) == this
        row = end + tl.cumsum(is_hit.to(tl.int32), 0) - 1
        tl.store(_slot_rows(workspace, slots) + slot, row, mask=is_hit)
        tl.store(_row_slots(workspace, slots) + row, slot, mask=is_hit)
        end += tl.sum(is_hit.to(tl.int32), 0)
    tl.store(_counts(workspace, slots) + this, end - before)


# ---- the products -------------------------------------------------------------------------------


@triton.jit
def _token_tiles(workspace, slots, num_local, TOKENS: tl.constexpr):
    """How many rows each expert has, and how many tiles it and those before it have."""
    expert = tl.arange(0, MAX_LOCAL)
    count = tl.load(_counts(workspace, slots) + expert, mask=expert < num_local, other=0)
    return count, tl.cumsum(tl.cdiv(count, TOKENS), 0)


@triton.jit
def _locate(tile, columns, counts, ends, TOKENS: tl.constexpr):
    """A tile's expert and column, the expert's first row and count, and which of its token tiles it
    is. Those of one column are next to one another."""
    index = tl.arange(0, MAX_LOCAL)
    expert = tl.sum((ends * columns <= tile).to(tl.int32), 0)
    first_tile = tl.max(tl.where(index < expert, ends, 0), 0)
    first_row = tl.sum(tl.where(index < expert, counts, 0), 0)
    count = tl.sum(tl.where(index == expert, counts, 0), 0)
    parts = tl.cdiv(count, TOKENS)
    within = tile - first_tile * columns
    return expert, within // parts, first_row, count, within % parts


@triton.jit
def _gemm1(
    x,
    x_scale,
    w13,
    w13_scale,
    workspace,
    x_stride_t,
    x_scale_stride_b,
    x_scale_stride_t,
    w13_stride_e,
    w13_stride_n,
    w13_scale_stride_e,
    w13_scale_stride_n,
    slots,
    num_local,
    hidden_size,
    intermediate_size,
    topk,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
):
    columns = intermediate_size // ROWS
    counts, ends = _token_tiles(workspace, slots, num_local, TOKENS)
    scales, codes = _intermediates(workspace, slots, intermediate_size)
    n = tl.arange(0, TOKENS)
    m = tl.arange(0, 2 * ROWS)  # the linear rows, then those of the gate
    k = tl.arange(0, BLOCK)
    i = tl.arange(0, ROWS)
    for tile in range(tl.program_id(0), tl.max(ends, 0) * columns, tl.num_programs(0)):
        expert, column, first_row, count, part = _locate(tile, columns, counts, ends, TOKENS)
        # Beyond the expert's rows its last one is taken again, and not stored.
        row = first_row + tl.minimum(part * TOKENS + n, count - 1)
        token = (tl.load(_row_slots(workspace, slots) + row) // topk).to(tl.int64)
        weight_row = (column * ROWS + m % ROWS + m // ROWS * intermediate_size).to(tl.int64)
        w_tile = w13 + expert.to(tl.int64) * w13_stride_e + weight_row * w13_stride_n
        x_tile = x + token * x_stride_t
        s_x = x_scale + token * x_scale_stride_t
        s_linear = w13_scale + expert.to(tl.int64) * w13_scale_stride_e
        s_linear += (column * ROWS // BLOCK).to(tl.int64) * w13_scale_stride_n
        s_gate = s_linear + (intermediate_size // BLOCK).to(tl.int64) * w13_scale_stride_n

        acc = tl.zeros([2 * ROWS, TOKENS], tl.float32)
        for step in tl.range(0, hidden_size // BLOCK, num_stages=STAGES):
            at = (k + step * BLOCK)[None, :]
            b_w = tl.load(w_tile[:, None] + at)
            b_x = tl.load(x_tile[:, None] + at)
            b_s_x = tl.load(s_x + step * x_scale_stride_b)
            b_s_w = tl.where(m < ROWS, tl.load(s_linear + step), tl.load(s_gate + step))
            acc += tl.dot(b_w, tl.trans(b_x)) * b_s_w[:, None] * b_s_x[None, :]

        linear, gate = tl.split(tl.permute(tl.reshape(acc, [2, ROWS, TOKENS]), [1, 2, 0]))
        c = gate / (1.0 + tl.exp(-gate)) * linear
        scale = tl.maximum(tl.max(tl.abs(c), 0) / LARGEST_CODE, SMALLEST_SCALE)
        scaled = c * (1.0 / scale)[None, :]
        code = scaled.to(tl.float8e4nv)
        rest = (scaled - code.to(tl.float32)).to(tl.float8e4nv)
        is_row = part * TOKENS + n < count
        far = row.to(tl.int64)
        to = codes + far[None, :] * (2 * intermediate_size) + (column * ROWS + i)[:, None]
        tl.store(to, code, mask=is_row[None, :])
        tl.store(to + intermediate_size, rest, mask=is_row[None, :])
        tl.store(scales + far * columns + column, scale, mask=is_row)


@triton.jit
def _gemm2(
    w2,
    w2_scale,
    workspace,
    w2_stride_e,
    w2_stride_n,
    w2_scale_stride_e,
    w2_scale_stride_n,
    slots,
    num_local,
    hidden_size,
    intermediate_size,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    columns = hidden_size // OUTS
    counts, ends = _token_tiles(workspace, slots, num_local, TOKENS)
    scales, codes = _intermediates(workspace, slots, intermediate_size)
    n = tl.arange(0, TOKENS)
    m = tl.arange(0, OUTS)
    k = tl.arange(0, ROWS)  # columns that share a scale
    for tile in range(tl.program_id(0), tl.max(ends, 0) * columns, tl.num_programs(0)):
        expert, column, first_row, count, part = _locate(tile, columns, counts, ends, TOKENS)
        row = first_row + tl.minimum(part * TOKENS + n, count - 1)
        slot = tl.load(_row_slots(workspace, slots) + row)
        weight = tl.load(_slot_weights(workspace, slots) + slot)
        far = row.to(tl.int64)
        w_tile = w2 + expert.to(tl.int64) * w2_stride_e
        w_tile += (column * OUTS + m).to(tl.int64) * w2_stride_n
        c_tile = codes + far * (2 * intermediate_size)
        s_c = scales + far * (intermediate_size // ROWS)
        s_w = w2_scale + expert.to(tl.int64) * w2_scale_stride_e
        s_w += (column * OUTS // BLOCK).to(tl.int64) * w2_scale_stride_n

        acc = tl.zeros([OUTS, TOKENS], tl.float32)
        for step in tl.range(0, intermediate_size // ROWS, num_stages=STAGES):
            at = (k + step * ROWS)[None, :]
            b_w = tl.load(w_tile[:, None] + at)
            b_code = tl.load(c_tile[:, None] + at)
            b_rest = tl.load(c_tile[:, None] + intermediate_size + at)
            b_s_w = tl.load(s_w + step * ROWS // BLOCK)
            b_s_c = tl.load(s_c + step)
            product = tl.dot(b_w, tl.trans(b_rest))
            product = tl.dot(b_w, tl.trans(b_code), product)
            acc += product * b_s_w * b_s_c[None, :]

        to = _partials(workspace, slots, intermediate_size) + far[None, :] * hidden_size
        is_row = part * TOKENS + n < count
        tl.store(to + (column * OUTS + m)[:, None], acc * weight[None, :], mask=is_row[None, :])


@triton.jit
def _combine(
    output,
    workspace,
    output_stride_t,
    slots,
    hidden_size,
    intermediate_size,
    topk,
    HALF: tl.constexpr,
):
    blocks = tl.cdiv(hidden_size, COLUMNS)
    token = tl.program_id(0) // blocks
    h = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    is_column = h < hidden_size
    slot = tl.arange(0, MAX_TOPK)
    expert = tl.load(workspace + token * topk + slot, mask=slot < topk, other=-1)
    is_local = expert >= 0
    rows = _slot_rows(workspace, slots) + token * topk + slot
    row = tl.load(rows, mask=is_local, other=0).to(tl.int64)
    partials = _partials(workspace, slots, intermediate_size)
    if HALF:
        partials = partials.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    mask = is_local[:, None] & is_column[None, :]
    parts = tl.load(partials + row[:, None] * hidden_size + h[None, :], mask=mask, other=0.0)
    to = output + token.to(tl.int64) * output_stride_t + h
    tl.store(to, tl.sum(parts.to(tl.float32), 0).to(tl.bfloat16), mask=is_column)


# ---- the kernel ---------------------------------------------------------------------------------


def _name(specialization: Any) -> str:
    return f"moe_fp8_block_scale_{specialization.constants['STAGE']}"


@triton.jit(repr=_name)
def moe_fp8_block_scale_grouped(
    logits,
    bias,
    topk_ids,
    topk_weights,
    x,
    x_scale,
    w13,
    w13_scale,
    w2,
    w2_scale,
    output,
    workspace,
    logits_stride_t,
    ids_stride_t,
    ids_stride_k,
    weights_stride_t,
    weights_stride_k,
    x_stride_t,
    x_scale_stride_b,
    x_scale_stride_t,
    w13_stride_e,
    w13_stride_n,
    w13_scale_stride_e,
    w13_scale_stride_n,
    w2_stride_e,
    w2_stride_n,
    w2_scale_stride_e,
    w2_scale_stride_n,
    output_stride_t,
    num_tokens,
    slots,
    num_experts,
    num_local,
    hidden_size,
    intermediate_size,
    topk,
    num_groups,
    topk_groups,
    offset,
    id_words,
    factor,
    STAGE: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """One launch of `STAGE` route, list, gemm1, gemm2 or combine; see `TritonGrouped` for the other
    constants. HALF: partial outputs are bfloat16, in the first half of their room. PDL: each stage
    waits for the one before, and lets the next one start and wait."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if STAGE == "route":
        _route(
            logits, bias, topk_ids, topk_weights, workspace,
            logits_stride_t, ids_stride_t, ids_stride_k, weights_stride_t, weights_stride_k,
            slots, num_experts, num_local, topk, num_groups, topk_groups, offset, id_words, factor,
            EVEN,
        )  # fmt: skip
    elif STAGE == "list":
        _list(workspace, slots, num_tokens * topk)
    elif STAGE == "gemm1":
        _gemm1(
            x, x_scale, w13, w13_scale, workspace,
            x_stride_t, x_scale_stride_b, x_scale_stride_t, w13_stride_e, w13_stride_n,
            w13_scale_stride_e, w13_scale_stride_n,
            slots, num_local, hidden_size, intermediate_size, topk, ROWS, TOKENS, STAGES,
        )  # fmt: skip
    elif STAGE == "gemm2":
        _gemm2(
            w2, w2_scale, workspace,
            w2_stride_e, w2_stride_n, w2_scale_stride_e, w2_scale_stride_n,
            slots, num_local, hidden_size, intermediate_size, ROWS, TOKENS, OUTS, STAGES,
        )  # fmt: skip
    else:
        _combine(
            output, workspace, output_stride_t, slots, hidden_size, intermediate_size, topk, HALF
        )  # fmt: skip


TYPES = {
    "*fp32": ("logits", "topk_weights", "x_scale", "w13_scale", "w2_scale"),
    "*bf16": ("bias", "output"),
    "*i32": ("topk_ids", "workspace"),
    "*fp8e4nv": ("x", "w13", "w2"),
    "fp64": ("factor",),
    "constexpr": ("STAGE", "EVEN", "ROWS", "TOKENS", "OUTS", "WARPS", "STAGES", "HALF", "PDL"),
}
# Pointers are multiples of so many bytes, strides and sizes of so many elements: always, and what
# each stage's own variant promises beside.
ALWAYS = {16: ("workspace", "hidden_size", "intermediate_size")}
ALIGNED = {
    "gemm1": {16: ("x", "w13", "x_stride_t", "w13_stride_e", "w13_stride_n")},
    "gemm2": {16: ("w2", "w2_stride_e", "w2_stride_n")},
    "combine": {16: ("output",), 8: ("output_stride_t",)},
    "combine_half": {16: ("output",), 8: ("output_stride_t",)},
}


def constants(config: TritonGrouped, variant: str) -> dict[str, Any]:
    """The compile-time arguments of a config."""
    stage, *words = variant.split("_")
    return {
        "STAGE": stage, "EVEN": int(variant == "route"), "ROWS": config.rows,
        "TOKENS": config.tokens, "OUTS": config.outs, "WARPS": WARPS.get(variant, config.warps),
        "STAGES": config.stages, "HALF": int("half" in words), "PDL": 1,
    }  # fmt: skip


def build(config: TritonGrouped, arch: str, variant: str) -> Any:
    """Triton's compiled kernel; needs no GPU."""
    names = moe_fp8_block_scale_grouped.arg_names
    types = {name: kind for kind, named in TYPES.items() for name in named}
    hints = [ALWAYS, ALIGNED.get(variant, {})]
    values = constants(config, variant)
    source = ASTSource(
        moe_fp8_block_scale_grouped,
        # What TYPES leaves out are strides and counts.
        signature={n: types.get(n) or ("i64" if "_stride_" in n else "i32") for n in names},
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
        options = {"num_warps": values["WARPS"]}
        if variant not in WARPS:
            options["maxnreg"] = config.registers
        return triton.compile(source, target=target, options=options)


def compile(config: TritonGrouped, arch: str, variant: str) -> Binary:
    kernel = build(config, arch, variant)
    metadata = kernel.metadata
    return Binary(kernel.asm["cubin"], metadata.name, 32 * metadata.num_warps, metadata.shared)
