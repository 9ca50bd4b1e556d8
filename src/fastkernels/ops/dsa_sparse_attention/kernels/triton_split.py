"""dsa_sparse_attention in Triton: compact the indices, attend in splits, merge them.

Plan: `compact`, a block for each token, puts the valid indices of its row in front and counts them,
so that padding costs nothing from there on, wherever it stood. `attend`, a block for each token,
split and 16 heads, takes every `splits`-th tile of `keys` indices: rows of both caches are gathered
to shared memory by cp.async, `stages` tiles ahead; each row of ckv is read from there twice, as key
and as value. Products take bfloat16 operands and sum in float32; the scale comes after the product,
in float32, since a scaled query would be rounded to bfloat16 again. The softmax is the online one,
in base 2, and weights are normalised at the end. `merge`, a block for each token and head, weighs
what the splits left in the workspace; with one split `attend` writes the outputs.

16 heads are the 16 rows of mma.sync on either architecture; WGMMA and tcgen05 would take 64 rows of
which 16 count, or keys as rows, whose tiles of shared memory leave no room for a second block.

Nothing is read for padding: masked rows are zeros in shared memory, so 0 * NaN does not arise. Of
splits without keys, which are always the last ones, nothing is written and nothing is read.

Shared memory of `attend` (the compiler's): `stages` times `keys` times 1152 bytes, and 18 KiB of
queries; after them, the output's tile in the same place.
Constraints: ckv 512 and kpe 64 wide, topk at most 2048; parameters are the fields of
csrc/dsa_sparse_attention/params.h in their order. Grids and workspace: see `kernels/__init__.py`.
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
from fastkernels.ops.dsa_sparse_attention import kernels as declared
from fastkernels.ops.dsa_sparse_attention.kernels import TritonSplit

CKV = tl.constexpr(declared.CKV)
KPE = tl.constexpr(declared.KPE)
MAX_TOPK = tl.constexpr(declared.MAX_TOPK)
HEADS = tl.constexpr(declared.HEADS)
PARTS = tl.constexpr(declared.PARTS)
# Words of 4 bytes that the workspace's regions are aligned to.
ALIGNMENT = tl.constexpr(declared.ALIGNMENT // 4)

# 8 indices a thread. `merge` has 4 columns of every split in a thread, so that it sums alone.
COMPACT_WARPS = 8
MERGE_WARPS = 4

INF = tl.constexpr(float("inf"))


# ---- the workspace ------------------------------------------------------------------------------


@triton.jit
def _rounded(words):
    return (words + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT


@triton.jit
def _counts(workspace, num_tokens, topk):
    return workspace + _rounded(num_tokens.to(tl.int64) * topk)


@triton.jit
def _partials(workspace, num_tokens, topk, num_parts):
    """Outputs and statistics of the parts."""
    outputs = _counts(workspace, num_tokens, topk) + _rounded(num_tokens.to(tl.int64))
    statistics = outputs + num_parts.to(tl.int64) * (HEADS * CKV)
    pointer: tl.constexpr = tl.pointer_type(tl.float32)
    return outputs.to(pointer, bitcast=True), statistics.to(pointer, bitcast=True)


@triton.jit
def _splits_of(num_tokens, blocks, SPLITS: tl.constexpr):
    return tl.minimum(tl.maximum(PARTS // (num_tokens * blocks), 1), SPLITS)


@triton.jit
def _shift(maximum):
    """What exponents are taken against: -inf - -inf would be NaN."""
    return tl.where(maximum == -INF, 0.0, maximum)


# ---- the stages ---------------------------------------------------------------------------------


@triton.jit
def _compact(indices, workspace, indices_stride_t, num_tokens, topk, num_rows):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, MAX_TOPK)
    b_index = tl.load(indices + token * indices_stride_t + slot, mask=slot < topk, other=-1)
    is_valid = (b_index >= 0) & (b_index < num_rows)
    end = tl.cumsum(is_valid.to(tl.int32), 0)
    tl.store(workspace + token * topk + (end - 1), b_index, mask=is_valid)
    tl.store(_counts(workspace, num_tokens, topk) + token, tl.max(end, 0))


@triton.jit
def _attend(
    q_nope,
    q_pe,
    ckv,
    kpe,
    output,
    lse,
    workspace,
    q_nope_stride_t,
    q_nope_stride_h,
    q_pe_stride_t,
    q_pe_stride_h,
    ckv_stride_page,
    ckv_stride_row,
    kpe_stride_page,
    kpe_stride_row,
    output_stride_t,
    output_stride_h,
    lse_stride_t,
    num_tokens,
    num_heads,
    topk,
    page_size,
    scale_log2,
    lse_scale,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    blocks = tl.cdiv(num_heads, HEADS)
    splits = _splits_of(num_tokens, blocks, SPLITS)
    part = tl.program_id(0)
    token = (part // (blocks * splits)).to(tl.int64)
    split = part // blocks % splits
    row = tl.arange(0, HEADS)
    head = part % blocks * HEADS + row
    is_head = head < num_heads
    key = tl.arange(0, KEYS)
    c = tl.arange(0, CKV)
    p = tl.arange(0, KPE)

    q_nope += token * q_nope_stride_t + head[:, None] * q_nope_stride_h + c[None, :]
    q_pe += token * q_pe_stride_t + head[:, None] * q_pe_stride_h + p[None, :]
    b_q_nope = tl.load(q_nope, mask=is_head[:, None], other=0.0)
    b_q_pe = tl.load(q_pe, mask=is_head[:, None], other=0.0)
    if PDL:
        gdc_wait()  # blocks without keys, too, do not end before `compact`
    count = tl.load(_counts(workspace, num_tokens, topk) + token)
    indices = workspace + token * topk

    acc = tl.zeros([HEADS, CKV], tl.float32)
    maximum = tl.full([HEADS], -INF, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    # Two steps ahead for each tile: its indices, then its rows.
    for slot in tl.range(split * KEYS, count, splits * KEYS, num_stages=2 * STAGES + 1):
        is_key = key < count - slot
        b_index = tl.load(indices + slot + key, mask=is_key, other=0)
        page = (b_index // page_size).to(tl.int64)
        offset = (b_index % page_size).to(tl.int64)
        ckv_row = ckv + page * ckv_stride_page + offset * ckv_stride_row
        kpe_row = kpe + page * kpe_stride_page + offset * kpe_stride_row
        b_ckv = tl.load(ckv_row[:, None] + c[None, :], mask=is_key[:, None], other=0.0)
        b_kpe = tl.load(kpe_row[:, None] + p[None, :], mask=is_key[:, None], other=0.0)
        logits = tl.dot(b_q_nope, tl.trans(b_ckv))
        logits = tl.dot(b_q_pe, tl.trans(b_kpe), logits)
        logits = tl.where(is_key[None, :], logits * scale_log2, -INF)
        before = maximum
        maximum = tl.maximum(before, tl.max(logits, 1))
        shift = _shift(maximum)
        weights = tl.exp2(logits - shift[:, None])
        decay = tl.exp2(before - shift)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(tl.bfloat16), b_ckv, acc * decay[:, None])

    if splits == 1:
        out = acc * (1.0 / tl.where(count == 0, 1.0, total))[:, None]
        to = output + token * output_stride_t + head[:, None] * output_stride_h + c[None, :]
        tl.store(to, out.to(tl.bfloat16), mask=is_head[:, None])
        to_lse = lse + token * lse_stride_t + head
        tl.store(to_lse, (_shift(maximum) + tl.log2(total)) * lse_scale, mask=is_head)
    elif split * KEYS < count:
        outputs, statistics = _partials(workspace, num_tokens, topk, num_tokens * splits * blocks)
        rows = part.to(tl.int64) * HEADS + row
        tl.store(outputs + rows[:, None] * CKV + c[None, :], acc, mask=is_head[:, None])
        pair = rows[:, None] * 2 + tl.arange(0, 2)[None, :]
        tl.store(statistics + pair, tl.join(maximum, total), mask=is_head[:, None])


@triton.jit
def _merge(
    output,
    lse,
    workspace,
    output_stride_t,
    output_stride_h,
    lse_stride_t,
    num_tokens,
    num_heads,
    topk,
    lse_scale,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    blocks = tl.cdiv(num_heads, HEADS)
    splits = _splits_of(num_tokens, blocks, SPLITS)
    token = (tl.program_id(0) // num_heads).to(tl.int64)
    head = tl.program_id(0) % num_heads
    split = tl.arange(0, SPLITS)
    c = tl.arange(0, CKV)
    outputs, statistics = _partials(workspace, num_tokens, topk, num_tokens * splits * blocks)
    rows = ((token * splits + split) * blocks + head // HEADS) * HEADS + head % HEADS
    if PDL:
        gdc_wait()
    count = tl.load(_counts(workspace, num_tokens, topk) + token)
    is_there = (split < splits) & (split * KEYS < count)
    maxima = tl.load(statistics + rows * 2, mask=is_there, other=-INF)
    totals = tl.load(statistics + rows * 2 + 1, mask=is_there, other=0.0)
    tile = rows[:, None] * CKV + c[None, :]
    parts = tl.load(outputs + tile, mask=is_there[:, None], other=0.0)
    shift = _shift(tl.max(maxima, 0))
    decay = tl.exp2(maxima - shift)
    total = tl.sum(totals * decay, 0)
    out = tl.sum(parts * decay[:, None], 0) * (1.0 / tl.where(count == 0, 1.0, total))
    tl.store(output + token * output_stride_t + head * output_stride_h + c, out.to(tl.bfloat16))
    lse += token * lse_stride_t + head
    tl.store(lse, (shift + tl.log2(total)) * lse_scale)


# ---- the kernel ---------------------------------------------------------------------------------


def _name(specialization: Any) -> str:
    return f"dsa_sparse_attention_{specialization.constants['STAGE']}"


@triton.jit(repr=_name)
def dsa_sparse_attention_split(
    q_nope,
    q_pe,
    ckv,
    kpe,
    indices,
    output,
    lse,
    workspace,
    q_nope_stride_t,
    q_nope_stride_h,
    q_pe_stride_t,
    q_pe_stride_h,
    ckv_stride_page,
    ckv_stride_row,
    kpe_stride_page,
    kpe_stride_row,
    indices_stride_t,
    output_stride_t,
    output_stride_h,
    lse_stride_t,
    num_tokens,
    num_heads,
    topk,
    page_size,
    num_rows,
    scale_log2,
    lse_scale,
    STAGE: tl.constexpr,
    KEYS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One launch of `STAGE` compact, attend or merge; see `TritonSplit` for the other constants.
    PDL: each stage lets the next one start early, and waits for the one before."""
    if PDL and STAGE != "merge":
        gdc_launch_dependents()
    if STAGE == "compact":
        _compact(indices, workspace, indices_stride_t, num_tokens, topk, num_rows)
    elif STAGE == "attend":
        _attend(
            q_nope, q_pe, ckv, kpe, output, lse, workspace,
            q_nope_stride_t, q_nope_stride_h, q_pe_stride_t, q_pe_stride_h,
            ckv_stride_page, ckv_stride_row, kpe_stride_page, kpe_stride_row,
            output_stride_t, output_stride_h, lse_stride_t,
            num_tokens, num_heads, topk, page_size, scale_log2, lse_scale,
            KEYS, STAGES, SPLITS, PDL,
        )  # fmt: skip
    else:
        _merge(
            output, lse, workspace, output_stride_t, output_stride_h, lse_stride_t,
            num_tokens, num_heads, topk, lse_scale, KEYS, SPLITS, PDL,
        )  # fmt: skip


TYPES = {
    "*bf16": ("q_nope", "q_pe", "ckv", "kpe", "output"),
    "*fp32": ("lse",),
    "*i32": ("indices", "workspace"),
    "fp32": ("scale_log2", "lse_scale"),
    "constexpr": ("STAGE", "KEYS", "WARPS", "STAGES", "SPLITS", "PDL"),
}
# Pointers are multiples of so many bytes, strides of so many elements: always, and what variant
# `attend` promises. The other stages touch too little of caller's memory to have a variant for it.
ALWAYS = {16: ("workspace",)}
ALIGNED = {
    16: ("q_nope", "q_pe", "ckv", "kpe", "output"),
    8: (
        *("q_nope_stride_t", "q_nope_stride_h", "q_pe_stride_t", "q_pe_stride_h"),
        *("ckv_stride_page", "ckv_stride_row", "kpe_stride_page", "kpe_stride_row"),
        *("output_stride_t", "output_stride_h"),
    ),
}


def constants(config: TritonSplit, variant: str) -> dict[str, Any]:
    """The compile-time arguments of a config."""
    stage = variant.partition("_")[0]
    warps = {"compact": COMPACT_WARPS, "attend": config.warps, "merge": MERGE_WARPS}
    return {
        "STAGE": stage, "KEYS": config.keys, "WARPS": warps[stage], "STAGES": config.stages,
        "SPLITS": config.splits, "PDL": 1,
    }  # fmt: skip


def build(config: TritonSplit, arch: str, variant: str) -> Any:
    """Triton's compiled kernel; needs no GPU."""
    names = dsa_sparse_attention_split.arg_names
    types = {name: kind for kind, named in TYPES.items() for name in named}
    hints = [ALWAYS, ALIGNED] if variant == "attend" else [ALWAYS]
    values = constants(config, variant)
    source = ASTSource(
        dsa_sparse_attention_split,
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
        return triton.compile(source, target=target, options={"num_warps": values["WARPS"]})


def compile(config: TritonSplit, arch: str, variant: str) -> Binary:
    kernel = build(config, arch, variant)
    metadata = kernel.metadata
    return Binary(kernel.asm["cubin"], metadata.name, 32 * metadata.num_warps, metadata.shared)
