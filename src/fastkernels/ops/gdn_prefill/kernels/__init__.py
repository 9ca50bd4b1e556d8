"""Compiled kernels of gdn_prefill as data; device code stands beside this file and in csrc/.

A sequence's state is split into slabs of `rows` rows of V, which pass through its chunks of 64
tokens alone. `tile` is the rows, and the bytes of workspace for each chunk of each value head (0
where a route has none).

Route `triton_fused`, one launch: blocks (slab, value head, sequence), slabs fastest, along x:
`128 / rows * num_v_heads * max(num_seqs, 1)`. Also without sequences, unless there is no token
either: tokens of no sequence get their zeros from the first and the last sequence's blocks.
Variant `aligned`: q, k, v, output, state and new_state start at multiples of 16 bytes and so does
each of their rows; variant `any` assumes the alignment of an element.

Route `triton_split`, two launches over one workspace: `prepare`, blocks (value head, chunk number),
heads fastest, along x: `num_v_heads * chunk_bound(num_tokens, num_seqs)`; then `chain` with the
grid of `triton_fused`. `chain` waits by itself (griddepcontrol) before it reads the workspace, so
it may be launched with programmatic stream serialization; `prepare` may not. Without a chunk (the
bound is 0) only `chain` is launched. Variants as above, `prepare_any` and `chain_any` for any
alignment.

Route `chunk_parallel`, up to five launches over one workspace, which holds the entries of `prepare`
and behind them `CUT_BYTES` for each cut of each value head. `tile` has two integers more: chunks of
a segment, and these bytes. Blocks, slabs fastest, with `cuts = cut_bound(num_tokens, ..)`:
`prepare` as above; `transfer`, of two matrices' rows, `256 / rows * num_v_heads * cuts`; `scan`,
`8 * num_v_heads * min(cuts, num_seqs)`; `chain`, as above, `cuts` more than there are sequences;
`mend`, `128 / rows * num_v_heads * min(cuts, num_seqs)`. Launches without a block are left out.
All but `prepare` wait by themselves.

Route `chunk_states`, three launches over one workspace: `prepare` and `chain` as above, then
`output` with the grid of `prepare`. `tile` has one integer more: bytes of workspace for each chunk
of each query head, behind the others. `chain` and `output` wait by themselves.

Route `chunk_pipeline`, two launches over one workspace: `clear`, a thread for each entry, in blocks
of 256, then `pipeline`, as many blocks as are resident, two an SM, or fewer where there is less
work: an entry each and those of `chain` above. `pipeline` waits by itself. Without an entry only
`pipeline` is launched.

Routes `chunk_warp` and `cute_split`, as `triton_split`, with `prepare` of `chunk_split`: what
stands between the two launches is bytes in the workspace, so that each may be of another language.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastkernels.core.kernels import Kernel

OP = "gdn_prefill"
ARCHS = ("sm90", "sm100")
HEAD_SIZE = 128
CHUNK = 64

ENTRY_BYTES = 2 * (2 * CHUNK * CHUNK) + 4 * (4 * CHUNK)
"""Of a chunk and value head in the workspace of `triton_split`: T and P as [64, 64] bfloat16; as
float32 for each token the decays from the chunk's start to it and from it to the chunk's end, and
beta; and whether the chunk is dirty (1 or 0), padded to 256 bytes."""


def chunk_bound(num_tokens: int, num_seqs: int) -> int:
    """What numbers of chunks stay below; see csrc/gdn_prefill/params.h."""
    return num_tokens // CHUNK + num_seqs


def cut_bound(num_tokens: int, segment_chunks: int) -> int:
    """What numbers of cuts between segments stay below; see csrc/gdn_prefill/params.h."""
    return num_tokens // (segment_chunks * CHUNK)


def workspace_bytes(num_tokens: int, num_seqs: int, num_v_heads: int) -> int:
    """What `triton_split` needs; `[chunk_bound, num_v_heads, ENTRY_BYTES]`, 256-byte aligned."""
    return chunk_bound(num_tokens, num_seqs) * num_v_heads * ENTRY_BYTES


@dataclass(frozen=True)
class Recurrent:
    """`lanes_per_row` lanes share a row of K, each holds `rows_per_lane` rows, `warps` warps make a
    block."""

    lanes_per_row: int
    rows_per_lane: int
    warps: int

    def __post_init__(self) -> None:
        if self.lanes_per_row not in (4, 8, 16, 32):
            raise ValueError(f"knob 'lanes_per_row' is {self.lanes_per_row}, expected 4, 8, 16, 32")
        if self.rows_per_lane not in (1, 2, 4) or self.warps not in (1, 2, 4, 8):
            raise ValueError("knobs 'rows_per_lane' and 'warps' are 1, 2, 4 (8) at most")
        if self.rows_per_block not in (8, 16, 32, 64, 128):
            raise ValueError(f"a block would take {self.rows_per_block} rows, expected 8 to 128")

    @property
    def rows_per_block(self) -> int:
        return 32 // self.lanes_per_row * self.rows_per_lane * self.warps

    @property
    def shared_bytes(self) -> int:
        tokens = 32  # of a tile
        return tokens * (2 * 2 * HEAD_SIZE + 2 * self.rows_per_block + 8 + 4) + 128


KEYS_BYTES = 2 * CHUNK * HEAD_SIZE  # of q or k of a chunk
PAIRS_BYTES = 2 * CHUNK * CHUNK  # of T or P
GATES_BYTES = 1040
SYSTEM_BYTES = 4 * CHUNK * (CHUNK + 4)  # of A, and of its inverse


@dataclass(frozen=True)
class ChunkFused:
    """A block takes `rows_per_block` rows."""

    rows_per_block: int

    def __post_init__(self) -> None:
        _check_rows(self.rows_per_block)

    @property
    def shared_bytes(self) -> int:
        stages = 2
        return _shared_bytes(self.rows_per_block, stages, pair_stages=1) + 2 * SYSTEM_BYTES


@dataclass(frozen=True)
class ChunkSplit:
    """A block of the chain takes `rows_per_block` rows and has the inputs of `stages` chunks in
    shared memory."""

    rows_per_block: int
    stages: int

    def __post_init__(self) -> None:
        _check_rows(self.rows_per_block)
        if self.stages not in (2, 3, 4) or self.shared_bytes > 227 * 1024:
            raise ValueError(
                f"knob 'stages' is {self.stages}, expected 2, 3 or 4, as many as a block's shared "
                "memory holds"
            )

    @property
    def is_wide(self) -> bool:
        """Whether state, output and copies have warps of their own."""
        return self.rows_per_block <= 32

    @property
    def threads(self) -> int:
        return 384 if self.is_wide else 256

    @property
    def shared_bytes(self) -> int:
        rows = self.rows_per_block
        more = 2 * rows * CHUNK + 96 if self.is_wide else 0
        return _shared_bytes(rows, self.stages, pair_stages=self.stages) + more


@dataclass(frozen=True)
class ChunkWarp:
    """A block of the chain takes `rows_per_block` rows, a warp 16 of them, and has the inputs of
    `stages` chunks in shared memory."""

    rows_per_block: int
    stages: int

    def __post_init__(self) -> None:
        _check_rows(self.rows_per_block)
        if self.stages not in (3, 4) or self.shared_bytes > 227 * 1024:
            raise ValueError(
                f"knob 'stages' is {self.stages}, expected 3, or 4 where 'rows_per_block' is 16"
            )

    @property
    def threads(self) -> int:
        # State warps, output warps (two for 16 rows, else one for each state warp) and 4 that copy
        # the inputs; with 64 rows these are the output warps.
        return 224 if self.rows_per_block == 16 else 256

    @property
    def shared_bytes(self) -> int:
        exchange = 2 * 2 * self.rows_per_block * (HEAD_SIZE + CHUNK) + 64
        return _stages_bytes(self.rows_per_block, self.stages, self.stages) + exchange + 128


@dataclass(frozen=True)
class ChunkStates:
    """A block of the chain takes `rows_per_block` rows and has the inputs of `stages` chunks in
    shared memory."""

    rows_per_block: int
    stages: int

    def __post_init__(self) -> None:
        _check_rows(self.rows_per_block)
        if self.stages not in (3, 4):
            raise ValueError(f"knob 'stages' is {self.stages}, expected 3 or 4")

    def shared_bytes(self, variant: str) -> int:
        match variant.removesuffix("_any"):
            case "prepare":
                return PREPARE_SHARED_BYTES
            case "output":
                return KEYS_BYTES + PAIRS_BYTES + GATES_BYTES + 128
        stage = _state_stage_bytes(self.rows_per_block)
        return self.stages * stage + _state_exchange_bytes(self.rows_per_block) + 64 + 128

    @staticmethod
    def threads(variant: str) -> int:
        return 160 if "chain" in variant else 256


@dataclass(frozen=True)
class ChunkPipeline:
    """A block that takes a state through a sequence has `rows_per_block` rows of it."""

    rows_per_block: int

    def __post_init__(self) -> None:
        if self.rows_per_block not in (16, 32):
            raise ValueError(f"knob 'rows_per_block' is {self.rows_per_block}, expected 16 or 32")

    def shared_bytes(self, variant: str) -> int:
        if variant == "clear":
            return 0
        inputs = KEYS_BYTES + PAIRS_BYTES + GATES_BYTES  # of a chunk, three of them
        exchange = -(-(1024 * self.rows_per_block + 1024 + 96 + 4) // 128) * 128
        sequences = 256  # whose lengths are ranked
        return max(MAKER_BYTES, exchange + 3 * inputs + 128) + 3 * 4 * sequences + 64


@dataclass(frozen=True)
class ChunkCluster:
    """`cluster` blocks take the rows of a head, each 128 / cluster."""

    cluster: int

    def __post_init__(self) -> None:
        if self.cluster not in (4, 8):
            raise ValueError(f"knob 'cluster' is {self.cluster}, expected 4 or 8")

    @property
    def rows_per_block(self) -> int:
        return HEAD_SIZE // self.cluster

    @property
    def shared_bytes(self) -> int:
        stages = 2
        return _shared_bytes(self.rows_per_block, stages, pair_stages=stages) + MAKER_BYTES


@dataclass(frozen=True)
class ChunkParallel:
    """Segments of `segment_chunks` chunks, side by side; a block takes `rows_per_block` rows."""

    rows_per_block: int
    segment_chunks: int

    # No knob: more stages would leave room for one block of `transfer` an SM, not two.
    stages: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _check_rows(self.rows_per_block)
        if self.segment_chunks not in (2, 4, 8, 16, 32, 64, 128):
            raise ValueError(
                f"knob 'segment_chunks' is {self.segment_chunks}, expected a power of 2 from 2 to "
                "128"
            )

    def shared_bytes(self, variant: str) -> int:
        rows, stages = self.rows_per_block, self.stages
        if variant == "scan":
            return 2 * 3 * (HEAD_SIZE // 16) * 32 * 16 + 128
        if variant.removesuffix("_any") in ("chain", "mend"):
            return _shared_bytes(rows, stages, pair_stages=stages)
        return stages * _state_stage_bytes(rows) + _state_exchange_bytes(rows) + 128

    @staticmethod
    def threads(variant: str) -> int:
        return 128 if "transfer" in variant else 256


CUT_BYTES = 2 * 4 * HEAD_SIZE * HEAD_SIZE + 128
"""Of a cut and value head in the workspace of `chunk_parallel`: `kCutBytes` of
csrc/gdn_prefill/segments.cuh."""

MAKER_BYTES = 2 * KEYS_BYTES + GATES_BYTES + 2 * SYSTEM_BYTES  # of `make_chunk` of prepare.cuh
PREPARE_SHARED_BYTES = MAKER_BYTES + 128

PREPARED_BYTES = 17536
"""Of a chunk and value head in the workspace of `chunk_split` and `chunk_cluster`: `kPreparedBytes`
of csrc/gdn_prefill/common.cuh."""


LEFT_BYTES = 49664
"""Of a chunk and value head behind those in the workspace of `chunk_states`: `kLeftBytes` of
csrc/gdn_prefill/states.cuh."""


WY_BYTES = 75008
"""Of a chunk and value head in the workspace of `chunk_pipeline`: `kWyBytes` of
csrc/gdn_prefill/wy.cuh."""


def _check_rows(rows: int) -> None:
    if rows not in (16, 32, 64):
        raise ValueError(f"knob 'rows_per_block' is {rows}, expected 16, 32 or 64")


def _values_bytes(rows: int) -> int:
    return CHUNK * (2 * rows + 16)  # of v or the output, with a pitch


def _stages_bytes(rows: int, stages: int, pair_stages: int) -> int:
    stage = 2 * KEYS_BYTES + _values_bytes(rows) + GATES_BYTES
    return stages * stage + pair_stages * 2 * PAIRS_BYTES


def _state_stage_bytes(rows: int) -> int:
    """Of a stage without q and P."""
    return KEYS_BYTES + PAIRS_BYTES + _values_bytes(rows) + GATES_BYTES


def _state_exchange_bytes(rows: int) -> int:
    """`Chain::kSharedBytes` of csrc/gdn_prefill/chain.cuh without output."""
    return 2 * rows * HEAD_SIZE + 2 * 2 * rows * CHUNK + 2 * 4 * rows


def _shared_bytes(rows: int, stages: int, pair_stages: int) -> int:
    """`Sequence::kSharedBytes` of csrc/gdn_prefill/sequence.cuh; the compiler compares them."""
    values = _values_bytes(rows)
    exchange = 2 * 2 * rows * HEAD_SIZE + 3 * 2 * rows * CHUNK + values + 2 * 4 * rows + 16
    return _stages_bytes(rows, stages, pair_stages) + exchange + 128


@dataclass(frozen=True)
class CuteSplit:
    """A block of the chain takes 64 rows and has the inputs of `stages` chunks in shared memory;
    on sm90, where a product has a column for each token, an instruction takes `columns` of them.
    32 leave out a quarter of the products with T and P."""

    stages: int
    columns: int

    # No knobs: WGMMA takes 64 rows, and cute_chain.py lays out shared memory.
    rows_per_block: ClassVar[int] = 64
    stage_bytes: ClassVar[int] = 2 * KEYS_BYTES + 2 * CHUNK * 64 + 2 * PAIRS_BYTES + 1024
    exchange_bytes: ClassVar[int] = 4 * 12288 + 128 + 1600

    def __post_init__(self) -> None:
        if self.stages not in (2, 3):
            raise ValueError(f"knob 'stages' is {self.stages}, expected 2 or 3")
        if self.columns not in (32, 64):
            raise ValueError(f"knob 'columns' is {self.columns}, expected 32 or 64")

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + self.exchange_bytes


@dataclass(frozen=True)
class TritonFused:
    """`warps` warps take `rows` rows of a state through a sequence, with room for the inputs of
    `stages` chunks."""

    rows: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        _check(self.rows, {"warps": self.warps}, self.stages)


@dataclass(frozen=True)
class TritonSplit:
    """`prepare_warps` warps make the matrices of a chunk, `chain_warps` warps take `rows` rows of a
    state through a sequence, with room for the inputs of `stages` chunks."""

    rows: int
    prepare_warps: int
    chain_warps: int
    stages: int

    def __post_init__(self) -> None:
        warps = {"prepare_warps": self.prepare_warps, "chain_warps": self.chain_warps}
        _check(self.rows, warps, self.stages)


def _check(rows: int, warps: dict[str, int], stages: int) -> None:
    if rows not in (16, 32, 64, 128):
        raise ValueError(f"knob 'rows' is {rows}, expected 16, 32, 64 or 128")
    for name, value in warps.items():
        if value not in (4, 8):
            raise ValueError(f"knob {name!r} is {value}, expected 4 or 8")
        # 4 warps would hold 128 registers of state a thread, and spill others.
        if name != "prepare_warps" and rows == 128 and value == 4:
            raise ValueError(f"knob {name!r} is 4, expected 8 where 'rows' is 128")
    if stages not in (1, 2, 3, 4):
        raise ValueError(f"knob 'stages' is {stages}, expected 1, 2, 3 or 4")


CHUNK_SPLIT = Kernel(
    OP, "chunk_split", "cuda", ARCHS, ChunkSplit(16, 3), "gdn_prefill/chunk_split.cu",
    tile=lambda c: (c.rows_per_block, PREPARED_BYTES),
    launch_shape=lambda c, variant: (
        (256, PREPARE_SHARED_BYTES) if "prepare" in variant else (c.threads, c.shared_bytes)
    ),
    variants=("prepare", "prepare_any", "chain", "chain_any"),
    candidates={"rows_per_block": (16, 32, 64), "stages": (2, 3, 4)},
)  # fmt: skip

KERNELS: tuple[Kernel, ...] = (
    Kernel(
        OP, "recurrent", "cuda", ARCHS, Recurrent(8, 1, 4), "gdn_prefill/recurrent.cu",
        tile=lambda c: (c.rows_per_block, 0),
        launch_shape=lambda c, _: (32 * c.warps, c.shared_bytes),
        candidates={
            "lanes_per_row": (4, 8, 16), "rows_per_lane": (1, 2, 4), "warps": (1, 2, 4, 8),
        },
    ),
    Kernel(
        OP, "chunk_fused", "cuda", ARCHS, ChunkFused(16), "gdn_prefill/chunk_fused.cu",
        tile=lambda c: (c.rows_per_block, 0),
        launch_shape=lambda c, _: (256, c.shared_bytes),
        candidates={"rows_per_block": (16, 32, 64)},
    ),
    CHUNK_SPLIT,
    Kernel(
        OP, "chunk_warp", "cuda", ARCHS, ChunkWarp(16, 3), "gdn_prefill/chunk_warp.cu",
        tile=lambda c: (c.rows_per_block, PREPARED_BYTES),
        launch_shape=lambda c, _: (c.threads, c.shared_bytes),
        variants=CHUNK_SPLIT.variants,
        lent=dict.fromkeys(("prepare", "prepare_any"), CHUNK_SPLIT),
        candidates={"rows_per_block": (16, 32, 64), "stages": (3, 4)},
    ),
    Kernel(
        OP, "chunk_states", "cuda", ARCHS, ChunkStates(16, 3), "gdn_prefill/chunk_states.cu",
        tile=lambda c: (c.rows_per_block, PREPARED_BYTES + LEFT_BYTES, KEYS_BYTES),
        launch_shape=lambda c, variant: (c.threads(variant), c.shared_bytes(variant)),
        variants=(*CHUNK_SPLIT.variants, "output", "output_any"),
        candidates={"rows_per_block": (16, 32, 64), "stages": (3, 4)},
    ),
    Kernel(
        OP, "chunk_pipeline", "cuda", ARCHS, ChunkPipeline(16), "gdn_prefill/chunk_pipeline.cu",
        tile=lambda c: (c.rows_per_block, WY_BYTES),
        launch_shape=lambda c, variant: (256, c.shared_bytes(variant)),
        variants=("clear", "pipeline", "pipeline_any"),
        candidates={"rows_per_block": (16, 32)},
    ),
    Kernel(
        OP, "chunk_cluster", "cuda", ARCHS, ChunkCluster(8), "gdn_prefill/chunk_cluster.cu",
        tile=lambda c: (c.rows_per_block, PREPARED_BYTES),
        launch_shape=lambda c, _: (512, c.shared_bytes),
        candidates={"cluster": (4, 8)},
    ),
    Kernel(
        OP, "chunk_parallel", "cuda", ARCHS, ChunkParallel(64, 16), "gdn_prefill/chunk_parallel.cu",
        tile=lambda c: (c.rows_per_block, PREPARED_BYTES, c.segment_chunks, CUT_BYTES),
        launch_shape=lambda c, variant: (c.threads(variant), c.shared_bytes(variant)),
        variants=(*CHUNK_SPLIT.variants, "transfer", "transfer_any", "scan", "mend", "mend_any"),
        lent=dict.fromkeys(("prepare", "prepare_any"), CHUNK_SPLIT),
        candidates={"rows_per_block": (16, 32, 64), "segment_chunks": (8, 16, 32, 64, 128)},
    ),
    Kernel(
        OP, "cute_split", "cute", ARCHS, CuteSplit(3, 32), "cute_chain.py",
        tile=lambda c: (c.rows_per_block, PREPARED_BYTES),
        variants=CHUNK_SPLIT.variants,
        lent=dict.fromkeys(("prepare", "prepare_any"), CHUNK_SPLIT),
        candidates={"stages": (2, 3), "columns": (32, 64)},
    ),
    Kernel(
        OP, "triton_fused", "triton", ARCHS, TritonFused(64, 8, 2), "triton_chunks.py",
        tile=lambda c: (c.rows, 0),
        candidates={"rows": (16, 32, 64, 128), "warps": (4, 8), "stages": (1, 2, 3)},
    ),
    Kernel(
        OP, "triton_split", "triton", ARCHS, TritonSplit(64, 4, 4, 2), "triton_chunks.py",
        tile=lambda c: (c.rows, ENTRY_BYTES),
        variants=("prepare", "prepare_any", "chain", "chain_any"),
        candidates={
            "rows": (16, 32, 64, 128), "prepare_warps": (4, 8), "chain_warps": (4, 8),
            "stages": (1, 2, 3),
        },
    ),
)  # fmt: skip
