"""dsa_topk_indexer in Triton: score tiles of pages into order-preserving keys, select by row.

Plan: `score`, a block for each row and tile of pages, puts a uint32 key for every position of the
row into the workspace. `select`, a block for each row, finds the topk-th key and writes the indices
of what lies above it, and of the lowest positions that equal it. Rows of at most topk positions are
not scored.

Scores: e4m3 bytes become float16, which holds each of them, NaN included; products are exact and
sums in float32. The scale's sign comes before relu and its magnitude after the sum over heads, so
that nothing overflows before the sum does; an infinite or NaN scale acts where the formula has it.
Keys are the scores' bits, negative ones inverted, others with the sign bit set: unsigned order is
that of the scores. -0.0 is made +0.0, NaN is the largest key, and 0, which no score has, marks a
position whose page lies outside the cache. Such a page is not read, nor are entries of the block
table or parts of a page beyond the row's length.

Selection is exact for any keys. Up to `slots` keys are held in registers and their range is halved
until it holds one key, or no more than are wanted lie above (`_boundary`): at most 32 counts, 10 to
20 of scores that differ. A longer row is first narrowed: a sample of `slots` keys suggests a bound,
one pass counts the keys above it and puts them aside; they are taken only if the count says that
they hold the boundary and all fit. Else the range is halved, a pass each, until that is so or one
key is left (`_narrow`). So nothing overflows, and the sample costs time alone, never a position.
Positions are written in their order, by prefix sums.

Shared memory (the compiler's): of `score`, `stages` times `pages` times 8 KiB and 16 KiB of
queries; of `select`, 8 bytes a slot.
Constraints: max_num_pages below 2^24; parameters are the fields of csrc/dsa_topk_indexer/params.h
in their order.
Workspace, uint32: keys [batch_size, max_num_pages * 64], of positions up to the end of a row's last
page; then, where rows may be longer than `slots`, keys and positions that are put aside, each
[batch_size, slots].
Grids, along x: `score`, batch_size * ceil(max_num_pages / (pages * steps)) blocks, tiles of a row
fastest; `select`, batch_size blocks. Both wait by themselves (griddepcontrol) before they touch the
workspace.
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

PAGE_SIZE = tl.constexpr(64)
KEY_BYTES = tl.constexpr(128)
PAGE_KEY_BYTES = tl.constexpr(64 * 128)
# Heads of a product where their number is not known; 32 of them, since few is the usual reason.
ANY_HEADS = 32

INF = tl.constexpr(float("inf"))
LARGEST = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _length(seq_lens, stride, row, max_num_pages):
    length = tl.load(seq_lens + row * stride)
    return tl.minimum(tl.maximum(length, 0), max_num_pages * PAGE_SIZE)


@triton.jit
def _pages(block_table, stride_p, position, inside, num_pages):
    """Of each position, its page, and whether there is one."""
    column = (position // PAGE_SIZE).to(tl.int64)
    page = tl.load(block_table + column * stride_p, mask=inside, other=-1)
    return page, (page >= 0) & (page < num_pages)


@triton.jit
def _in_pages(position, length):
    """Whether a position lies in a page that the row reaches. Constant in each page, so that four
    keys are one access; keys beyond the row's length are 0 there."""
    return position // PAGE_SIZE * PAGE_SIZE < length


# ---- scores -------------------------------------------------------------------------------------


@triton.jit
def _halves(x):
    return x.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def _scales(at, mask, ALIGNED: tl.constexpr):
    """float32 at byte addresses; without ALIGNED, byte by byte."""
    if ALIGNED:
        return tl.load(at.to(tl.pointer_type(tl.float32), bitcast=True), mask=mask, other=0.0)
    bits = tl.load(at, mask=mask, other=0).to(tl.uint32)
    for i in tl.static_range(1, 4):
        bits |= tl.load(at + i, mask=mask, other=0).to(tl.uint32) << (8 * i)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _queries(q, stride_h, weights, first, num_heads, HEADS: tl.constexpr, MASKED: tl.constexpr):
    """HEADS queries as the columns of a product, and their weights; zeros beyond the last head."""
    head = first + tl.arange(0, HEADS)
    d = tl.arange(0, KEY_BYTES)
    q += head[None, :].to(tl.int64) * stride_h + d[:, None]
    if MASKED:
        b_q = tl.load(q, mask=(head < num_heads)[None, :], other=0)
        return _halves(b_q), tl.load(weights + head, mask=head < num_heads, other=0.0)
    return _halves(tl.load(q)), tl.load(weights + head)


@triton.jit
def _terms(b_k, b_q, b_w, before):
    """Products of a tile of positions with some heads: weight * relu(before * q k)."""
    dots = tl.dot(b_k, b_q) * before[:, None]
    return tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * b_w[None, :]


@triton.jit
def _keys(score):
    """uint32 in the order of the scores, above 0."""
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.uint32, bitcast=True)
    bits ^= tl.where(bits >> 31 != 0, LARGEST, 0x80000000).to(tl.uint32)
    return tl.where(score == score, bits, LARGEST).to(tl.uint32)


@triton.jit
def _score(
    q,
    cache,
    weights,
    seq_lens,
    block_table,
    workspace,
    q_stride_b,
    q_stride_h,
    cache_stride_page,
    weights_stride_b,
    seq_lens_stride_b,
    table_stride_b,
    table_stride_p,
    num_heads,
    topk,
    max_num_pages,
    num_pages,
    HEADS: tl.constexpr,
    MASKED: tl.constexpr,
    PAGES: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    POSITIONS: tl.constexpr = PAGES * PAGE_SIZE
    tiles = tl.cdiv(max_num_pages, PAGES * STEPS)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    begin = tl.program_id(0) % tiles * (POSITIONS * STEPS)
    length = _length(seq_lens, seq_lens_stride_b, row, max_num_pages)
    end = tl.minimum(begin + POSITIONS * STEPS, length)
    if PDL:
        gdc_wait()  # blocks without positions, too, do not end before the launch before
    if (length > topk) & (begin < end):
        q += row * q_stride_b
        weights += row * weights_stride_b
        block_table += row * table_stride_b
        workspace += row * max_num_pages * PAGE_SIZE
        d = tl.arange(0, KEY_BYTES)
        if not MASKED:
            b_q, b_w = _queries(q, q_stride_h, weights, 0, num_heads, HEADS, MASKED)
        # Two steps ahead for each tile: its pages, then their bytes.
        for first in tl.range(begin, end, POSITIONS, num_stages=2 * STAGES + 1):
            position = first + tl.arange(0, POSITIONS)
            inside = position < length
            page, is_page = _pages(block_table, table_stride_p, position, inside, num_pages)
            offset = position % PAGE_SIZE
            base = cache + page.to(tl.int64) * cache_stride_page
            at = (base + offset * KEY_BYTES)[:, None] + d[None, :]
            b_k = _halves(tl.load(at, mask=is_page[:, None], other=0))
            scale = _scales(base + (PAGE_KEY_BYTES + offset * 4), is_page, not MASKED)
            is_finite = tl.abs(scale) < INF
            before = tl.where(is_finite, tl.where(scale < 0.0, -1.0, 1.0), scale)
            if MASKED:
                total = tl.zeros([POSITIONS], tl.float32)
                for head in range(0, num_heads, HEADS):
                    b_q, b_w = _queries(q, q_stride_h, weights, head, num_heads, HEADS, MASKED)
                    terms = _terms(b_k, b_q, b_w, before)
                    # No head has no term: 0 * inf is NaN.
                    is_head = head + tl.arange(0, HEADS) < num_heads
                    total += tl.sum(tl.where(is_head[None, :], terms, 0.0), 1)
            else:
                total = tl.sum(_terms(b_k, b_q, b_w, before), 1)
            key = _keys(total * tl.where(is_finite, tl.abs(scale), 1.0))
            tl.store(
                workspace + position, tl.where(is_page, key, 0), mask=_in_pages(position, length)
            )


# ---- selection ----------------------------------------------------------------------------------


@triton.jit
def _boundary(keys, wanted):
    """`(key, above)`: the key at which `wanted` ones are reached, and how many lie above it, which
    is fewer or exactly `wanted`; then none of those at the key is needed. Keys of 0 do not count;
    where fewer than `wanted` do, the key is the smallest of them."""
    low = tl.min(tl.where(keys == 0, LARGEST, keys).to(tl.uint32), 0)
    high = tl.max(keys, 0)
    above = 0
    # Above `high` lie `above` <= wanted; at `low` or above it more, unless all are no more.
    while low < high:
        middle = high - (high - low) // 2
        count = tl.sum((keys >= middle).to(tl.int32), 0)
        above = tl.where(count > wanted, above, count)
        high = tl.where(count > wanted, high, middle - 1)
        low = tl.where(count > wanted, middle, tl.where(count == wanted, middle - 1, low))
    return high, above


@triton.jit
def _wide(slot):
    """Addresses come from int64 so that the compiler rearranges 4 bytes an entry, not pointers."""
    return slot.to(tl.int64)


@triton.jit
def _sample(keys, length, SLOTS: tl.constexpr):
    """SLOTS keys in pieces of 32 (a line of memory) evenly spread over the row; of a row that is
    not longer, all of them, then zeros."""
    slot = tl.arange(0, SLOTS)
    spacing = tl.maximum(length // SLOTS, 1) * 32
    position = slot // 32 * spacing + slot % 32
    return tl.load(keys + position, mask=_in_pages(slot, length), other=0)


@triton.jit
def _put_aside(keys, aside, length, low, high, batch_size, SLOTS: tl.constexpr):
    """How many keys lie in low < key <= high. The first SLOTS of them go to `aside`, and their
    positions, which are in order, to as many places per row behind all rows' keys."""
    positions = aside + batch_size * SLOTS
    found = 0
    for begin in tl.range(0, length, SLOTS, num_stages=3):
        position = begin + tl.arange(0, SLOTS)
        key = tl.load(keys + position, mask=_in_pages(position, length), other=0)
        is_in = (key > low) & (key <= high)
        end = found + tl.cumsum(is_in.to(tl.int32), 0)
        slot = _wide(tl.where(is_in & (end <= SLOTS), end - 1, -1))
        tl.store(aside + slot, key, mask=slot >= 0)
        tl.store(positions + slot, position.to(tl.uint32), mask=slot >= 0)
        found += tl.sum(is_in.to(tl.int32), 0)
    return found


@triton.jit
def _narrow(keys, aside, length, wanted, guess, batch_size, SLOTS: tl.constexpr):
    """`_boundary` of a row of more than SLOTS keys; and, if all keys above the boundary and at it
    were put aside, how many were, else 0.

    Above `high` lie `above` < wanted keys; above `low` as many as are wanted or more, or `low` is
    0. Each pass looks at the keys in between that are above `middle`, and ends the search if they
    are all that matter and fit. Where the guess has too many keys at it or above, all of them may
    be equal, so what is above it is looked at next.
    """
    low = tl.zeros([], tl.uint32)
    high = tl.full([], LARGEST, tl.uint32)
    above = 0
    between = length
    found = length
    middle = tl.where(guess == 0, guess, guess - 1)
    is_done = False
    is_first = True
    while (high - low > 1) & (not is_done):
        tl.debug_barrier()
        found = _put_aside(keys, aside, length, middle, high, batch_size, SLOTS)
        is_enough = (above + found >= wanted) | (middle == low)
        is_done = is_enough & (found <= SLOTS)
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
        above = tl.where(is_enough, above, above + found)
        between = tl.where(is_enough, found, between - found)
        middle = tl.where(is_enough & is_first, low + 1, low + (high - low) // 2)
        middle = tl.where(between <= SLOTS, low, middle)
        is_first = False
    listed = tl.where(is_done & (above == 0), found, 0)
    if is_done:
        tl.debug_barrier()
        slot = tl.arange(0, SLOTS)
        key = tl.load(aside + slot, mask=_in_pages(slot, found), other=0)
        high, count = _boundary(tl.where(slot < found, key, 0), wanted - above)
        above += count
    return high, above, listed


@triton.jit
def _emit(
    keys, positions, block_table, output, stride_p, count, topk, num_pages, is_scored, key, above,
    is_listed, SLOTS: tl.constexpr,
):  # fmt: skip
    """What lies above `key` and the lowest positions at it, in order of position, then -1. The row
    is `count` positions, or those of a list. If it is not scored, all positions have one key."""
    needed = topk - above
    taken = 0
    ties = 0
    begin = 0
    while (begin < count) & (taken + tl.minimum(ties, needed) < topk):
        entry = begin + tl.arange(0, SLOTS)
        inside = entry < count
        if is_scored:
            its_key = tl.load(keys + entry, mask=_in_pages(entry, count), other=0)
            its_key = tl.where(inside, its_key, 0)
        else:
            _, is_page = _pages(block_table, stride_p, entry, inside, num_pages)
            its_key = tl.where(is_page, LARGEST, 0).to(tl.uint32)
        is_above = its_key > key
        is_tie = (its_key == key) & (key != 0)
        # Two sums in one: SLOTS is below 2^15.
        counts = is_above.to(tl.int32) + (is_tie.to(tl.int32) << 16)
        ends = tl.cumsum(counts, 0)
        rank = ties + (ends >> 16)
        is_taken = is_above | (is_tie & (rank <= needed))
        slot = taken + (ends & 0xFFFF) + tl.minimum(rank, needed) - 1
        slot = _wide(tl.where(is_taken, slot, -1))
        position = entry
        if is_listed:
            position = tl.load(positions + entry, mask=slot >= 0, other=0).to(tl.int32)
        page, _ = _pages(block_table, stride_p, position, slot >= 0, num_pages)
        tl.store(output + slot, page * PAGE_SIZE + position % PAGE_SIZE, mask=slot >= 0)
        total = tl.sum(counts, 0)
        taken += total & 0xFFFF
        ties += total >> 16
        begin += SLOTS
    begin = taken + tl.minimum(ties, needed)
    while begin < topk:
        ahead = tl.arange(0, SLOTS)  # a slot beyond the last one may not fit into 32 bits
        is_slot = ahead < topk - begin
        tl.store(output + begin + ahead, tl.full([SLOTS], -1, tl.int32), mask=is_slot)
        begin += tl.minimum(topk - begin, SLOTS)


@triton.jit
def _select(
    seq_lens,
    block_table,
    output,
    workspace,
    seq_lens_stride_b,
    table_stride_b,
    table_stride_p,
    output_stride_b,
    batch_size,
    topk,
    max_num_pages,
    num_pages,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = max_num_pages.to(tl.int64) * PAGE_SIZE
    batch_size = batch_size.to(tl.int64)
    # Where they begin in the workspace.
    keys = row * columns
    aside = batch_size * columns + row * SLOTS
    length = _length(seq_lens, seq_lens_stride_b, row, max_num_pages)
    is_scored = length > topk
    key = tl.zeros([], tl.uint32)
    above = 0
    listed = 0
    if PDL:
        gdc_wait()
    if is_scored:
        # A sample should have as many keys above the boundary as make it likely that the row has
        # at least topk, and at most SLOTS, above its key.
        wanted = topk
        if length > SLOTS:
            likely = (tl.minimum(topk, SLOTS) + SLOTS) // 2
            wanted = tl.maximum((likely.to(tl.int64) * SLOTS // length).to(tl.int32), 1)
        key, above = _boundary(_sample(workspace + keys, length, SLOTS), wanted)
        if length > SLOTS:
            key, above, listed = _narrow(
                workspace + keys, workspace + aside, length, topk, key, batch_size, SLOTS
            )
    _emit(
        workspace + tl.where(listed > 0, aside, keys), workspace + (aside + batch_size * SLOTS),
        block_table + row * table_stride_b, output + row * output_stride_b,
        table_stride_p, tl.where(listed > 0, listed, length), topk, num_pages,
        is_scored, key, above, listed > 0, SLOTS,
    )  # fmt: skip


# ---- the kernel ---------------------------------------------------------------------------------


def _name(specialization: Any) -> str:
    return f"dsa_topk_indexer_{specialization.constants['STAGE']}"


@triton.jit(repr=_name)
def dsa_topk_indexer_tiled(
    q,
    cache,
    weights,
    seq_lens,
    block_table,
    output,
    workspace,
    q_stride_b,
    q_stride_h,
    cache_stride_page,
    weights_stride_b,
    seq_lens_stride_b,
    table_stride_b,
    table_stride_p,
    output_stride_b,
    batch_size,
    num_heads,
    topk,
    max_num_pages,
    num_pages,
    STAGE: tl.constexpr,
    HEADS: tl.constexpr,
    MASKED: tl.constexpr,
    PAGES: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    SLOTS: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One launch of `STAGE` score or select; q and cache are bytes. HEADS are all heads, or, if
    MASKED, the heads of a product. PDL: either lets the other start early, and waits for it."""
    if PDL:
        gdc_launch_dependents()
    if STAGE == "score":
        _score(
            q, cache, weights, seq_lens, block_table, workspace,
            q_stride_b, q_stride_h, cache_stride_page, weights_stride_b, seq_lens_stride_b,
            table_stride_b, table_stride_p,
            num_heads, topk, max_num_pages, num_pages,
            HEADS, MASKED, PAGES, STEPS, STAGES, PDL,
        )  # fmt: skip
    else:
        _select(
            seq_lens, block_table, output, workspace,
            seq_lens_stride_b, table_stride_b, table_stride_p, output_stride_b,
            batch_size, topk, max_num_pages, num_pages,
            SLOTS, PDL,
        )  # fmt: skip


TYPES = {
    "*u8": ("q", "cache"),
    "*fp32": ("weights",),
    "*i32": ("seq_lens", "block_table", "output"),
    "*u32": ("workspace",),
    "constexpr": (
        *("STAGE", "HEADS", "MASKED", "PAGES", "STEPS", "STAGES", "SLOTS", "WARPS", "PDL"),
    ),
}  # fmt: skip
# What is a multiple of 16: always, and what variants `score_64` and `score_32` promise.
ALWAYS = ("workspace",)
ALIGNED = ("q", "cache", "q_stride_b", "q_stride_h", "cache_stride_page")


def constants(config: Any, variant: str) -> dict[str, Any]:
    """The compile-time arguments of a config (`TritonTiled`)."""
    stage, _, heads = variant.partition("_")
    is_any = heads in ("", "any")
    return {
        "STAGE": stage, "HEADS": ANY_HEADS if is_any else int(heads), "MASKED": int(is_any),
        "PAGES": config.pages, "STEPS": config.steps, "STAGES": config.stages,
        "SLOTS": config.slots, "WARPS": config.warps if stage == "score" else config.select_warps,
        "PDL": 1,
    }  # fmt: skip


def build(config: Any, arch: str, variant: str) -> Any:
    """Triton's compiled kernel; needs no GPU."""
    names = dsa_topk_indexer_tiled.arg_names
    types = {name: kind for kind, named in TYPES.items() for name in named}
    values = constants(config, variant)
    multiples = ALWAYS if values["MASKED"] else (*ALWAYS, *ALIGNED)
    source = ASTSource(
        dsa_topk_indexer_tiled,
        # What TYPES leaves out are strides and counts.
        signature={n: types.get(n) or ("i64" if "_stride" in n else "i32") for n in names},
        constexprs=values,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in multiples},
    )
    target = GPUTarget("cuda", int(arch.removeprefix("sm")), 32)
    knobs = triton.knobs
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = folder
        knobs.compilation.disable_line_info = True  # paths of the machine that builds
        return triton.compile(source, target=target, options={"num_warps": values["WARPS"]})


def compile(config: Any, arch: str, variant: str) -> Binary:
    kernel = build(config, arch, variant)
    metadata = kernel.metadata
    return Binary(kernel.asm["cubin"], metadata.name, 32 * metadata.num_warps, metadata.shared)
