"""Compiled kernels of gdn_decode as data; device code stands beside this file and in csrc/.

Every kernel works on tiles of `rows_per_block` rows of one [V, K] state. The launcher's grid is
`(num_v_heads * 128 / rows_per_block, min(batch_size, 65535))`, so a kernel strides over the batch
by `gridDim.y`; with `blocks_per_sm > 0` it is `blocks_per_sm * num_sms` blocks that stride over
`batch_size * num_v_heads * (128 / rows_per_block)` tiles. `tile` is `(rows_per_block,
blocks_per_sm)`. Variant `aligned`: q, k, state and new_state start at multiples of 16 bytes and so
does each of their rows; variant `any` assumes the alignment of an element. Variants `compact` (of
packed form) and `compact_pool` assume more, see `is_compact` in csrc/gdn_decode/binding.cc.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastkernels.core.kernels import Kernel

OP = "gdn_decode"
ARCHS = ("sm90", "sm100")
HEAD_SIZE = 128


@dataclass(frozen=True)
class LaneRows:
    """`lanes_per_row` lanes share a row of K, `rows_per_lane` rows pass through each lane's
    registers at once, `warps` warps make a block."""

    lanes_per_row: int
    rows_per_lane: int
    warps: int

    def __post_init__(self) -> None:
        if self.lanes_per_row not in (8, 16, 32):
            raise ValueError(f"knob 'lanes_per_row' is {self.lanes_per_row}, expected 8, 16 or 32")
        if self.rows_per_lane not in (1, 2, 4, 8) or self.warps not in (1, 2, 4, 8):
            raise ValueError("knobs 'rows_per_lane' and 'warps' are 1, 2, 4 or 8")
        if self.rows_per_block > HEAD_SIZE:
            raise ValueError(f"a block would take {self.rows_per_block} of {HEAD_SIZE} rows")

    @property
    def rows_per_block(self) -> int:
        return 32 // self.lanes_per_row * self.rows_per_lane * self.warps


@dataclass(frozen=True)
class WarpRows(LaneRows):
    """`streaming`: 0 no cache hints, 1 loads of the state pass L1 by and leave L2 first, 2 its
    stores are marked as used once, too."""

    streaming: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.streaming not in (0, 1, 2):
            raise ValueError(f"knob 'streaming' is {self.streaming}, expected 0, 1 or 2")


@dataclass(frozen=True)
class TritonRows:
    """`lanes_per_row` lanes share a row of K, `warps` warps share the rows of a block."""

    rows_per_block: int
    lanes_per_row: int
    warps: int

    def __post_init__(self) -> None:
        if self.lanes_per_row not in (8, 16, 32):
            raise ValueError(f"knob 'lanes_per_row' is {self.lanes_per_row}, expected 8, 16 or 32")
        if self.warps not in (1, 2, 4, 8):
            raise ValueError(f"knob 'warps' is {self.warps}, expected 1, 2, 4 or 8")
        at_once = 32 // self.lanes_per_row * self.warps
        if self.rows_per_block not in (at_once, 2 * at_once, 4 * at_once, 8 * at_once):
            raise ValueError(
                f"knob 'rows_per_block' is {self.rows_per_block}, expected 1, 2, 4 or 8 times the "
                f"{at_once} rows that the lanes hold at once"
            )
        if self.rows_per_block > HEAD_SIZE:
            raise ValueError(f"a block would take {self.rows_per_block} of {HEAD_SIZE} rows")


@dataclass(frozen=True)
class CuteRows(LaneRows):
    """The knobs of `LaneRows`."""


@dataclass(frozen=True)
class BulkRows:
    """Each of `warps` warps brings its share of `rows_per_block` rows by bulk copies into a ring of
    `stages` buffers. `bulk_store`: 1 the new state leaves by bulk copies, too, 0 from registers."""

    rows_per_block: int
    stages: int
    warps: int
    blocks_per_sm: int
    bulk_store: int

    def __post_init__(self) -> None:
        if self.warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"knob 'warps' is {self.warps}, expected 1, 2, 4, 8 or 16")
        if self.rows_per_block not in [n * self.warps for n in (4, 8, 16, 32)]:
            raise ValueError("knob 'rows_per_block' is 4, 8, 16 or 32 times 'warps'")
        if self.rows_per_block > HEAD_SIZE:
            raise ValueError(f"a block would take {self.rows_per_block} of {HEAD_SIZE} rows")
        if not 2 <= self.stages <= 8:
            raise ValueError(f"knob 'stages' is {self.stages}, expected 2 to 8")
        if self.bulk_store not in (0, 1):
            raise ValueError(f"knob 'bulk_store' is {self.bulk_store}, expected 0 or 1")
        # 16 warps leave 128 registers a thread; an SM of either architecture has 228 KiB of shared
        # memory, of which each block takes 1 KiB besides its own.
        if self.blocks_per_sm < 1 or self.warps * self.blocks_per_sm > 16:
            raise ValueError("knob 'blocks_per_sm' is at least 1, and at most 16 / 'warps'")
        if self.blocks_per_sm * (self.shared_bytes + 1024) > 228 * 1024:
            raise ValueError(f"{self.blocks_per_sm} blocks of {self.shared_bytes} bytes on an SM")

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.rows_per_block * HEAD_SIZE * 4 + 8 * self.warps)


LANE_ROWS = {"lanes_per_row": (8, 16, 32), "rows_per_lane": (1, 2, 4, 8), "warps": (1, 2, 4, 8)}

KERNELS: tuple[Kernel, ...] = (
    Kernel(
        OP, "warp_rows", "cuda", ARCHS, WarpRows(16, 1, 4, 0), "gdn_decode/warp_rows.cu",
        tile=lambda c: (c.rows_per_block, 0),
        launch_shape=lambda c, _: (32 * c.warps, 0),
        variants=("aligned", "any", "compact", "compact_pool"),
        candidates=LANE_ROWS | {"streaming": (0, 1, 2)},
    ),
    Kernel(
        OP, "bulk_rows", "cuda", ARCHS, BulkRows(32, 3, 4, 4, 0), "gdn_decode/bulk_rows.cu",
        tile=lambda c: (c.rows_per_block, c.blocks_per_sm),
        launch_shape=lambda c, _: (32 * c.warps, c.shared_bytes),
        candidates={
            "rows_per_block": (16, 32, 64, 128), "stages": (2, 3, 4, 6), "warps": (2, 4, 8, 16),
            "blocks_per_sm": (1, 2, 3, 4, 8), "bulk_store": (0, 1),
        },
    ),
    Kernel(
        OP, "triton_rows", "triton", ARCHS, TritonRows(16, 16, 4), "triton_rows.py",
        tile=lambda c: (c.rows_per_block, 0),
        candidates={
            "rows_per_block": (8, 16, 32, 64), "lanes_per_row": (8, 16, 32), "warps": (2, 4, 8),
        },
    ),
    Kernel(
        OP, "cute_rows", "cute", ARCHS, CuteRows(16, 4, 4), "cute_rows.py",
        tile=lambda c: (c.rows_per_block, 0),
        candidates=LANE_ROWS,
    ),
)  # fmt: skip
