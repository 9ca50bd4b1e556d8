"""Compiled kernels of dsa_sparse_attention as data; device code stands beside this file and in
csrc/.

`tile` is `(cluster, heads, splits, keys)`: blocks of a cluster (0 where a route has none), heads of
a block, the most splits of a token's keys, and keys of a tile.

Route `cluster_split`, one launch: blocks (block of the cluster, group of 16 heads, token), the
first fastest, along x: `cluster * head_blocks(num_heads) * num_tokens`. Variant `aligned`: as
`attend` below; `any`: as `attend_any`.

Route `triton_split`, two or three launches over one workspace, each along x:
- `compact`: num_tokens blocks, one a token.
- `attend`: num_tokens * splits * head_blocks(num_heads) blocks, head blocks fastest, then splits,
  which are `splits_of` many. Variant `attend`: q_nope, q_pe, ckv, kpe and output start at multiples
  of 16 bytes and so does each of their rows; `attend_any` assumes the alignment of an element.
- `merge`: num_tokens * num_heads blocks, heads fastest; left out where there is one split.
`attend` and `merge` wait by themselves (griddepcontrol) before they read the workspace, so they may
be launched with programmatic stream serialization; `compact` may not. Without tokens nothing is
launched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastkernels.core.kernels import Kernel

OP = "dsa_sparse_attention"
ARCHS = ("sm90", "sm100")
CKV = 512
KPE = 64
MAX_TOPK = 2048
HEADS = 16

PARTS = 1024
"""Blocks of `attend` that splits make at most: several for each SM. Bounds what they leave in the
workspace (32 MiB)."""

PART_BYTES = 4 * HEADS * CKV
STATISTICS_BYTES = 4 * HEADS * 2
ALIGNMENT = 256

ROW_BYTES = 2 * (CKV + KPE)
MOST_SHARED_BYTES = 227 * 1024


@dataclass(frozen=True)
class ClusterSplit:
    """`cluster` blocks share the keys of 16 heads of a token; each takes `slab` keys at a time,
    with `stages` slabs in shared memory."""

    cluster: int
    slab: int
    stages: int

    def __post_init__(self) -> None:
        if self.cluster not in (1, 2, 4, 8, 16):
            raise ValueError(f"knob 'cluster' is {self.cluster}, expected 1, 2, 4, 8 or 16")
        if self.slab not in (32, 64):
            raise ValueError(f"knob 'slab' is {self.slab}, expected 32 or 64")
        if self.stages not in (2, 3, 4, 5) or self.shared_bytes > MOST_SHARED_BYTES:
            raise ValueError(
                f"knob 'stages' is {self.stages}, expected 2 to 5, as many as a block's shared "
                "memory holds"
            )

    @property
    def shared_bytes(self) -> int:
        """`kShared + sizeof(Shared)` of csrc/dsa_sparse_attention/cluster_split.cu; the compiler
        compares them."""
        warps = 8
        parts = warps // (self.slab // HEADS)
        scores = 4 * parts * HEADS * (self.slab + 8)
        exchange = scores + HEADS * (2 * self.slab + 16) + 4 * HEADS
        weights = 4 * HEADS * ((self.cluster + 4) // 4 * 4)
        block = HEADS * ROW_BYTES + exchange + weights
        block += 2 * 8 + 4 * warps + 4 * (MAX_TOPK // self.cluster)
        if self.cluster > 4:  # room of its own for what is received
            block += 4 * HEADS * CKV + 8 * self.cluster * HEADS
        return self.stages * self.slab * ROW_BYTES + block


@dataclass(frozen=True)
class TritonSplit:
    """`warps` warps take tiles of `keys` keys, of which `stages` lie in shared memory. A token's
    keys are dealt to at most `splits` blocks."""

    keys: int
    warps: int
    stages: int
    splits: int

    def __post_init__(self) -> None:
        if self.keys not in (16, 32, 64):
            raise ValueError(f"knob 'keys' is {self.keys}, expected 16, 32 or 64")
        if self.warps not in (4, 8):
            raise ValueError(f"knob 'warps' is {self.warps}, expected 4 or 8")
        # Addresses of 64 rows and the sums of 16 heads in 128 threads: over 255 registers.
        if self.keys == 64 and self.warps == 4:
            raise ValueError("knob 'warps' is 4, expected 8 where 'keys' is 64")
        # Of 3 tiles of 64 keys with the queries, 234 KiB; a block has 227.
        if self.stages not in (1, 2, 3) or self.keys * self.stages > 128:
            raise ValueError(
                f"knob 'stages' is {self.stages}, expected 1, 2 or 3, as many as a block's shared "
                "memory holds"
            )
        if self.splits not in (1, 2, 4, 8, 16):
            raise ValueError(f"knob 'splits' is {self.splits}, expected 1, 2, 4, 8 or 16")


def head_blocks(num_heads: int) -> int:
    return -(-num_heads // HEADS)


def splits_of(num_tokens: int, num_heads: int, config: TritonSplit) -> int:
    """Splits of each token's keys in a call of `triton_split`; num_tokens >= 1."""
    return min(max(PARTS // (num_tokens * head_blocks(num_heads)), 1), config.splits)


def workspace_bytes(axes: Mapping[str, int], config: TritonSplit) -> int:
    """What `triton_split` needs, in bytes, by the axes of the definition.

    With parts = num_tokens * splits * head blocks, of which there are none where there is one
    split, one after another and each from a multiple of 256 bytes on:
        indices     int32 [num_tokens, topk], of each token its valid ones in their order
        counts      int32 [num_tokens], how many these are
        outputs     float32 [parts, 16, 512], unnormalised
        statistics  float32 [parts, 16, 2], maximum (base 2, scaled) and sum of exp2
    Fewer parts are made of more tokens, and none in the end; the bound does not fall with them.
    """
    num_tokens = axes["num_tokens"]
    parts = 0
    if config.splits > 1:
        parts = min(num_tokens * head_blocks(axes["num_qo_heads"]) * config.splits, PARTS)
    regions = (
        4 * num_tokens * axes["topk"],
        4 * num_tokens,
        PART_BYTES * parts,
        STATISTICS_BYTES * parts,
    )
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in regions)


KERNELS: tuple[Kernel, ...] = (
    Kernel(
        OP, "cluster_split", "cuda", ARCHS, ClusterSplit(8, 32, 2),
        "dsa_sparse_attention/cluster_split.cu",
        tile=lambda c: (c.cluster, HEADS, 0, 0),
        launch_shape=lambda c, _: (256, c.shared_bytes),
        candidates={
            "cluster": (1, 2, 4, 8, 16), "slab": (32, 64), "stages": (2, 3, 4),
        },
    ),
    Kernel(
        OP, "triton_split", "triton", ARCHS, TritonSplit(32, 4, 2, 16), "triton_split.py",
        tile=lambda c: (0, HEADS, c.splits, c.keys),
        variants=("compact", "attend", "attend_any", "merge"),
        candidates={
            "keys": (16, 32, 64), "warps": (4, 8), "stages": (1, 2, 3), "splits": (1, 2, 4, 8, 16),
        },
    ),
)  # fmt: skip
