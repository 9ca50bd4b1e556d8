"""gdn_decode in Triton: a block takes `rows_per_block` rows of one head's state.

Plan: the tile is held in registers as [chunks, rows, lanes * 4], so that `lanes_per_row` lanes
share a row and each of them owns `chunks` groups of four neighbouring elements. Both dots of a row,
with k and with q, are taken on the old state in the one pass that loads it; the update and the
output follow from them. Only the lanes of a row talk to one another (warp shuffles).
Constraints: head_size 128; parameters are the fields of csrc/gdn_decode/params.h in their order.
With no more than 4 * lanes_per_row threads Triton passes k and q through shared memory (slower).
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

from fastkernels.core.kernels import Binary
from fastkernels.ops._shared.kernels.gdn_triton import LOG2E, find_slot, log_gate, sigmoid
from fastkernels.ops.gdn_decode.kernels import HEAD_SIZE, TritonRows


@triton.jit
def gdn_decode_rows(
    q,
    k,
    v,
    state,
    A_log,
    a,
    dt_bias,
    b,
    read_indices,
    write_indices,
    output,
    new_state,
    q_stride_b,
    q_stride_h,
    k_stride_b,
    k_stride_h,
    v_stride_b,
    v_stride_h,
    state_stride_slot,
    state_stride_h,
    a_stride_b,
    b_stride_b,
    read_stride,
    write_stride,
    output_stride_b,
    output_stride_h,
    new_state_stride_slot,
    new_state_stride_h,
    batch_size,
    num_q_heads,
    num_v_heads,
    num_slots,
    has_state,
    index_words,
    scale,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    WIDTH: tl.constexpr = 4 * LANES
    CHUNKS: tl.constexpr = HEAD_SIZE // WIDTH
    blocks_per_head: tl.constexpr = HEAD_SIZE // ROWS
    v_head = (tl.program_id(0) // blocks_per_head).to(tl.int64)
    q_head = v_head // (num_v_heads // num_q_heads)
    row = tl.program_id(0) % blocks_per_head * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    tile = row[:, None] * HEAD_SIZE + column

    batch_idx = tl.program_id(1)
    while batch_idx < batch_size:  # not range(): the interpreter of 3.6 needs numpy < 2.4 for it
        batch = batch_idx.to(tl.int64)
        output_row = output + batch * output_stride_b + v_head * output_stride_h + row
        slot, is_valid = find_slot(
            read_indices, read_stride, batch_idx, batch_size, num_slots, index_words
        )
        if is_valid:
            old = state + slot * state_stride_slot + v_head * state_stride_h + tile
            k_row = k + batch * k_stride_b + q_head * k_stride_h + column
            q_row = q + batch * q_stride_b + q_head * q_stride_h + column
            b_state, b_k, b_q = (), (), ()
            for i in tl.static_range(CHUNKS):
                b_state += (tl.load(old + i * WIDTH, mask=has_state != 0, other=0.0),)
            slot, is_stored = find_slot(
                write_indices, write_stride, batch_idx, batch_size, num_slots, index_words
            )
            for i in tl.static_range(CHUNKS):
                b_k += (tl.load(k_row + i * WIDTH).to(tl.float32),)
                b_q += (tl.load(q_row + i * WIDTH).to(tl.float32),)
            b_v = tl.load(v + batch * v_stride_b + v_head * v_stride_h + row).to(tl.float32)
            gate = tl.load(a + batch * a_stride_b + v_head).to(tl.float32)
            log_g = log_gate(tl.load(A_log + v_head), gate, tl.load(dt_bias + v_head))
            g = tl.exp2(log_g * LOG2E)
            beta = sigmoid(tl.load(b + batch * b_stride_b + v_head).to(tl.float32))

            kq = tl.zeros([1, WIDTH], tl.float32)
            Sk = tl.zeros([ROWS, WIDTH], tl.float32)
            Sq = tl.zeros([ROWS, WIDTH], tl.float32)
            for i in tl.static_range(CHUNKS):
                kq += b_k[i] * b_q[i]
                Sk += b_state[i] * b_k[i]
                Sq += b_state[i] * b_q[i]
            u = beta * (b_v - g * tl.sum(Sk, 1))
            b_output = scale * (g * tl.sum(Sq, 1) + u * tl.sum(kq, 1))
            tl.store(output_row, b_output.to(tl.bfloat16))

            new = new_state + slot * new_state_stride_slot + v_head * new_state_stride_h + tile
            for i in tl.static_range(CHUNKS):
                b_new = g * b_state[i] + u[:, None] * b_k[i]
                tl.store(new + i * WIDTH, b_new, mask=is_stored)
        else:
            tl.store(output_row, tl.zeros([ROWS], tl.bfloat16))
        batch_idx += tl.num_programs(1)


TYPES = {
    "*bf16": ("q", "k", "v", "a", "b", "output"),
    "*fp32": ("state", "A_log", "dt_bias", "new_state"),
    "*i32": ("read_indices", "write_indices"),
    "fp32": ("scale",),
    "constexpr": ("HEAD_SIZE", "ROWS", "LANES"),
}
# What `aligned` promises: pointers are multiples of so many bytes, strides of so many elements.
MULTIPLES = {
    16: ("q", "k", "state", "new_state"),
    8: ("q_stride_b", "q_stride_h", "k_stride_b", "k_stride_h"),
    4: (
        "state_stride_slot",
        "state_stride_h",
        "new_state_stride_slot",
        "new_state_stride_h",
    ),
}


def constants(config: TritonRows) -> dict[str, int]:
    """The compile-time arguments of a config."""
    return {"HEAD_SIZE": HEAD_SIZE, "ROWS": config.rows_per_block, "LANES": config.lanes_per_row}


def build(config: TritonRows, arch: str, variant: str) -> Any:
    """Triton's compiled kernel; needs no GPU."""
    names = gdn_decode_rows.arg_names
    types = {name: kind for kind, named in TYPES.items() for name in named}
    hints = MULTIPLES if variant == "aligned" else {}
    source = ASTSource(
        gdn_decode_rows,
        # What TYPES leaves out are strides and counts.
        signature={n: types.get(n) or ("i64" if "_stride" in n else "i32") for n in names},
        constexprs=constants(config),
        attrs={
            (names.index(name),): [["tt.divisibility", multiple]]
            for multiple, named in hints.items()
            for name in named
        },
    )
    target = GPUTarget("cuda", int(arch.removeprefix("sm")), 32)
    knobs = triton.knobs
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = folder
        knobs.compilation.disable_line_info = True  # paths of the machine that builds
        return triton.compile(source, target=target, options={"num_warps": config.warps})


def compile(config: TritonRows, arch: str, variant: str) -> Binary:
    kernel = build(config, arch, variant)
    metadata = kernel.metadata
    return Binary(kernel.asm["cubin"], metadata.name, 32 * metadata.num_warps, metadata.shared)
