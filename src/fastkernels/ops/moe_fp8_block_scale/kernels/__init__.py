"""Compiled kernels of moe_fp8_block_scale as data; device code stands beside this file.

`tile` is `(rows, tokens, outs, blocks, cluster, chunk, partial_bytes)`: the grids and the workspace
follow from it. Clusters of `cluster` blocks take a tile of `tokens` tokens together.

Route `triton_grouped`: a call is cut into chunks of at most `chunk` tokens, each of them five
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
  likewise, by output. `combine_half` and `combine_half_any`: of bfloat16 partial outputs.
Each stage waits by itself (griddepcontrol) before it touches memory, so all of them but the first
one of a call may be launched with programmatic stream serialization. Without tokens nothing is
launched.

Route `wgmma_grouped`: the same with products in CUDA, which leave the same things in the workspace,
but partial outputs as bfloat16, for `combine_half`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fastkernels.core.kernels import Kernel

OP = "moe_fp8_block_scale"
ARCHS = ("sm90", "sm100")
MAX_EXPERTS = 256
GROUPS = 8
MAX_LOCAL = 256
MAX_TOPK = 16

CHUNK, LONG_CHUNK = 8192, 16384
"""Tokens of one pass at most, with float32 and with bfloat16 partial outputs: they bound the
workspace. So many tokens keep the tensor cores busy for longer than it takes to read the weights
once more."""

ONE_CODE_LEAST = 1024
"""Columns of C that one code will do for: with fewer the worst of many tokens comes too close to
3e-2 (2.92e-2 of 4000 with 512, 2.74e-2 with 1024, 2.66e-2 with 2048)."""

COLUMNS = 512
"""Of the output, in a block of `combine`."""

SCALED = 32
"""The fewest columns of an intermediate row that share a scale; sizes the workspace, whatever the
config."""

ALIGNMENT = 256
SM_REGISTERS = 65536
OTHER_REGISTERS = 90  # of a thread of either product: addresses, scales, counts
SM_SHARED_BYTES = 228 * 1024
MAX_SHARED_BYTES = 227 * 1024  # of a block
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


@dataclass(frozen=True)
class WgmmaGrouped:
    """A block takes `tokens` tokens by 256 rows of weights, which the blocks of a cluster of
    `cluster` share. C has `codes` codes: 2 keep 8 bits of it. With 1 the second product takes half
    the time, and its error is that of a route that requantises C (see the README)."""

    tokens: int
    cluster: int
    codes: int

    # No knobs: a consumer group holds 128 columns, and C has a scale for as many.
    rows: ClassVar[int] = 128
    outs: ClassVar[int] = 256
    threads: ClassVar[int] = 384

    def __post_init__(self) -> None:
        for knob, values in (("tokens", (64, 128)), ("cluster", (1, 2)), ("codes", (1, 2))):
            value = getattr(self, knob)
            if value not in values:
                raise ValueError(f"knob {knob!r} is {value}, expected one of {values}")

    def shared_bytes(self, variant: str) -> int:
        """Of a block of `gemm1` or `gemm2`: as many stages as fit, and `Shared` of
        csrc/moe_fp8_block_scale/wgmma_grouped.cu."""
        parts = self.codes if variant.startswith("gemm2") else 1
        stage = (parts * self.tokens + 256) * 128
        # Of a stage two barriers, the tokens' scales and the weights'; then largest values of C,
        # and sums of rows and tiles.
        beside = 2 * 8 + 4 * self.tokens + 8
        fixed = 2 * 4 * self.tokens + 2 * 4 * MAX_LOCAL
        stages = (MAX_SHARED_BYTES - fixed - 16) // (stage + beside)
        return stages * stage + (stages * beside + fixed + 15) // 16 * 16


def regions(axes: Mapping[str, int], chunk: int = CHUNK, partial_bytes: int = 4) -> dict[str, int]:
    """What a route keeps in the workspace, in bytes, by the axes of the definition.

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
        partials     float32 or bfloat16 [slots, hidden_size], weighted outputs of a row's expert
    There is room for every slot being local: how many are is not known before the launch.
    """
    slots = min(axes["seq_len"], chunk) * axes["topk"]
    return {
        "slot_expert": 4 * slots,
        "slot_weight": 4 * slots,
        "slot_row": 4 * slots,
        "row_slot": 4 * slots,
        "counts": 4 * MAX_LOCAL,
        "scales": 4 * slots * (axes["intermediate_size"] // SCALED),
        "codes": slots * 2 * axes["intermediate_size"],
        "partials": partial_bytes * slots * axes["hidden_size"],
    }


def rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def workspace_bytes(axes: Mapping[str, int], chunk: int = CHUNK, partial_bytes: int = 4) -> int:
    """What `regions` take."""
    return sum(map(rounded, regions(axes, chunk, partial_bytes).values()))


def tiles_bound(slots: int, num_local: int, tokens: int) -> int:
    """The most tiles of `tokens` tokens that so many slots fill, however they are dealt."""
    return slots // tokens + min(num_local, slots)


TRITON_GROUPED = Kernel(
    OP, "triton_grouped", "triton", ARCHS, TritonGrouped(64, 16, 128, 4, 6, 2),
    "triton_grouped.py",
    tile=lambda c: (c.rows, c.tokens, c.outs, c.blocks, 1, CHUNK, 4),
    variants=(
        "route", "route_any", "list", "gemm1", "gemm1_any", "gemm2", "gemm2_any",
        "combine", "combine_any", "combine_half", "combine_half_any",
    ),
    candidates={
        "rows": (32, 64, 128), "tokens": (16, 32, 64, 128), "outs": (64, 128),
        "warps": (4, 8), "stages": (2, 3, 4, 5, 6, 8), "blocks": (1, 2, 3, 4),
    },
)  # fmt: skip

# A launcher finds variants by their place.
PRODUCTS = ("gemm1", "gemm1_any", "gemm2", "gemm2_any")
ROUTING, COMBINE = ("route", "route_any", "list"), ("combine_half", "combine_half_any")

KERNELS: tuple[Kernel, ...] = (
    TRITON_GROUPED,
    Kernel(
        OP, "wgmma_grouped", "cuda", ("sm90",), WgmmaGrouped(128, 2, 2),
        "moe_fp8_block_scale/wgmma_grouped.cu",
        tile=lambda c: (c.rows, c.cluster * c.tokens, c.outs, 1, c.cluster, LONG_CHUNK, 2),
        variants=(*ROUTING, *PRODUCTS, *COMBINE),
        lent=dict.fromkeys((*ROUTING, *COMBINE), TRITON_GROUPED),
        launch_shape=lambda c, variant: (c.threads, c.shared_bytes(variant)),
        candidates={"tokens": (64, 128), "cluster": (1, 2), "codes": (2,)},
    ),
)  # fmt: skip
