"""Compiled kernels of moe_fp8_block_scale as data; device code stands beside this file.

`tile` is `(rows, tokens, outs, blocks)`, the knobs of `TritonGrouped` that the grids follow from.

Route `triton_grouped`: a call is cut into chunks of at most CHUNK tokens, each of them five
launches over one workspace, all along x:
- `route`: a block for each token. Variant `route`: MAX_EXPERTS experts in GROUPS groups, or given
  routing; `route_any`: any number of either.
- `list`: a block for each local expert.
- `gemm1`: at most `blocks` blocks for each SM, fewer where `tiles_bound` gives fewer tiles of
  `rows` of the intermediate columns. Variant `gemm1`: hidden_states and gemm1_weights start at
  multiples of 16 bytes, and so does each of their rows; `gemm1_any` assumes the alignment of an
  element.
- `gemm2`: the same with tiles of `outs` of the output's columns; `gemm2_any` likewise, by
  gemm2_weights.
- `combine`: num_tokens * ceil(hidden_size / COLUMNS) blocks, columns fastest; `combine_any`
  likewise, by output.
Each stage waits by itself (griddepcontrol) before it touches memory, so all of them but the first
one of a call may be launched with programmatic stream serialization. Without tokens nothing is
launched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastkernels.core.kernels import Kernel

OP = "moe_fp8_block_scale"
ARCHS = ("sm90", "sm100")
MAX_EXPERTS = 256
GROUPS = 8
MAX_LOCAL = 256
MAX_TOPK = 16

CHUNK = 8192
"""Tokens of one pass at most: bounds the workspace. So many tokens keep the tensor cores busy for
longer than it takes to read the weights once more."""

COLUMNS = 512
"""Of the output, in a block of `combine`."""

SCALED = 32
"""The fewest columns of an intermediate row that share a scale; sizes the workspace, whatever the
config."""

ALIGNMENT = 256
SM_REGISTERS = 65536
OTHER_REGISTERS = 90  # of a thread of either product: addresses, scales, counts
SM_SHARED_BYTES = 228 * 1024
# Of each block: the system's share, and the compiler's for what is no operand.
OTHER_SHARED_BYTES = 2048


@dataclass(frozen=True)
class TritonGrouped:
    """A tile of the first product is `rows` columns of each half by `tokens` tokens, one of the
    second `outs` columns by `tokens`; `stages` steps of either lie in shared memory, and `blocks`
    blocks of `warps` warps share an SM."""

    rows: int
    tokens: int
    outs: int
    warps: int
    stages: int
    blocks: int

    def __post_init__(self) -> None:
        for knob, values in (
            ("rows", (32, 64, 128)),
            ("tokens", (16, 32, 64, 128)),
            ("outs", (64, 128)),
            ("warps", (4, 8)),
            ("stages", (2, 3, 4, 5, 6, 8)),
            ("blocks", (1, 2, 3, 4)),
        ):
            value = getattr(self, knob)
            if value not in values:
                raise ValueError(f"knob {knob!r} is {value}, expected one of {values}")
        sums = max(2 * self.rows, self.outs) * self.tokens // (32 * self.warps)
        if 2 * sums + OTHER_REGISTERS > self.registers:
            raise ValueError(
                f"knob 'tokens' is {self.tokens}, expected fewer: {sums} sums in a thread, and as "
                f"many products, do not fit {self.registers} registers"
            )
        if self.warps == 8 and min(2 * self.rows, self.outs) < 128:
            raise ValueError("knob 'warps' is 8, expected 4 where a tile has 64 rows")
        if self.blocks * (self.shared_bytes + OTHER_SHARED_BYTES) > SM_SHARED_BYTES:
            raise ValueError(
                f"knob 'stages' is {self.stages}, expected as many as the shared memory holds of "
                f"{self.blocks} blocks"
            )

    @property
    def registers(self) -> int:
        """Of a thread, so that `blocks` blocks fit an SM."""
        return min(SM_REGISTERS // (32 * self.warps * self.blocks) // 8 * 8, 255)

    @property
    def shared_bytes(self) -> int:
        """Of operands, in a block of the first product or the second."""
        first = (2 * self.rows + self.tokens) * 128
        second = (self.outs + 2 * self.tokens) * self.rows
        return self.stages * max(first, second)


def regions(axes: Mapping[str, int]) -> dict[str, int]:
    """What `triton_grouped` keeps in the workspace, in bytes, by the axes of the definition.

    With slots = topk for each token of a chunk, and rows, of which each (token, local expert) pair
    has one, ordered by expert and then by token, one after another and each from a multiple of
    ALIGNMENT bytes on:
        slot_expert  int32 [slots], the local expert, -1 where there is none
        slot_weight  float32 [slots]
        slot_row     int32 [slots], where there is a local expert
        row_slot     int32 [slots], of the rows that there are
        counts       int32 [MAX_LOCAL], rows of each expert
        scales       float32 [slots, intermediate_size / rows], of the codes
        codes        e4m3 [slots, 2, intermediate_size], C as a code and the code of its remainder
        partials     float32 [slots, hidden_size], weighted outputs of a row's expert
    There is room for every slot being local: how many are is not known before the launch.
    """
    slots = min(axes["seq_len"], CHUNK) * axes["topk"]
    return {
        "slot_expert": 4 * slots,
        "slot_weight": 4 * slots,
        "slot_row": 4 * slots,
        "row_slot": 4 * slots,
        "counts": 4 * MAX_LOCAL,
        "scales": 4 * slots * (axes["intermediate_size"] // SCALED),
        "codes": slots * 2 * axes["intermediate_size"],
        "partials": 4 * slots * axes["hidden_size"],
    }


def rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def workspace_bytes(axes: Mapping[str, int]) -> int:
    """What `regions` take."""
    return sum(map(rounded, regions(axes).values()))


def tiles_bound(slots: int, num_local: int, tokens: int) -> int:
    """The most tiles of `tokens` tokens that so many slots fill, however they are dealt."""
    return slots // tokens + min(num_local, slots)


KERNELS: tuple[Kernel, ...] = (
    Kernel(
        OP, "triton_grouped", "triton", ARCHS, TritonGrouped(64, 16, 128, 4, 6, 2),
        "triton_grouped.py",
        tile=lambda c: (c.rows, c.tokens, c.outs, c.blocks),
        variants=(
            "route", "route_any", "list", "gemm1", "gemm1_any", "gemm2", "gemm2_any",
            "combine", "combine_any",
        ),
        candidates={
            "rows": (32, 64, 128), "tokens": (16, 32, 64, 128), "outs": (64, 128),
            "warps": (4, 8), "stages": (2, 3, 4, 5, 6, 8), "blocks": (1, 2, 3, 4),
        },
    ),
)  # fmt: skip
