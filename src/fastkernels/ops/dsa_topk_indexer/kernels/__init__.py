"""Compiled kernels of dsa_topk_indexer as data; device code stands beside this file and in csrc/.

`tile` is `(select, score, most, aside)`: blocks that select among a row's keys (0: nothing is
scored), pages that a block of a launch of its own scores (0: there is no such launch), the most
columns of a block table (0: any number), and bytes in the workspace for keys of a row that are put
aside. Blocks lie along x, those of a row first.

One launch:
- `pass_through`: ceil(topk / CHUNK) blocks a row. One variant, for output at any address.
- `cluster_select`: `select` blocks a row. Variant `aligned` where queries and pages of the cache
  start at multiples of 16 bytes, else `any`.

Two launches over one workspace, a score variant and then `select`:
- `score..`: ceil(max_num_pages / score) blocks a row. Writes the row's keys: integers in the order
  of the scores, 0 for what is no candidate, of all positions up to the end of the row's last page;
  nothing for rows of at most `topk` positions. `score_any` for queries or pages that are not
  aligned; `score` (CUDA), or `score_64` and `score_32` (Triton) for so many heads, where they are;
  in Triton `score_any` also for other numbers of heads.
- `select`: `select` blocks a row. Writes the output.
The workspace holds keys, uint32 [rows, max_num_pages * 64], then what Triton puts aside of rows
that may have more than `slots` of them: keys and positions, uint32 [2, rows, slots].
Both wait by themselves (griddepcontrol) before they touch the workspace, so that each may be
launched with programmatic stream serialization behind the other. Rows come in groups whose keys fit
WORKSPACE_BYTES, a group after the other in the same workspace.

Without rows nothing is launched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastkernels.core.kernels import Kernel

OP = "dsa_topk_indexer"
ARCHS = ("sm90", "sm100")
MAX_HEADS = 64
PAGE_SIZE = 64
PAGE_BYTES = PAGE_SIZE * (128 + 4)
CHUNK = 2048
SELECT_WARPS = 16
MOST_SHARED_BYTES = 227 * 1024

WORKSPACE_BYTES = 64 * 2**20
"""Keys of a group of rows: 128 rows of 128 K positions. One row alone may need more."""

PAGE_KEYS_BYTES = 4 * PAGE_SIZE


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


def _selection_bytes(warps: int) -> int:
    """`sizeof(Selection)` of csrc/dsa_topk_indexer/select.cuh; the compiler compares them."""
    counts, sums = 3 * 4 * 2048, 3 * 4 * 64
    return counts + sums + 2 * warps * 4 * 64 + warps * 8 + 8


def _ring_bytes(stages: int) -> int:
    """mbarriers and counters of a ring of pages."""
    return (8 + 4) * stages


def _check(config: ClusterSelect | TiledSelect, pages: tuple[int, ...]) -> None:
    if config.cluster not in (1, 2, 4, 8, 16):
        raise ValueError(f"knob 'cluster' is {config.cluster}, expected 1, 2, 4, 8 or 16")
    if config.warps not in (4, 8):
        raise ValueError(f"knob 'warps' is {config.warps}, expected 4 or 8")
    if config.pages not in pages:
        raise ValueError(f"knob 'pages' is {config.pages}, expected one of {pages}")
    if config.stages not in (2, 4, 6, 8) or config.shared_bytes > MOST_SHARED_BYTES:
        raise ValueError(
            f"knob 'stages' is {config.stages}, expected 2, 4, 6 or 8, as many as a block's shared "
            "memory holds"
        )


@dataclass(frozen=True)
class PassThrough:
    """`warps` warps share CHUNK entries of a row."""

    warps: int

    def __post_init__(self) -> None:
        if self.warps not in (4, 8, 16):
            raise ValueError(f"knob 'warps' is {self.warps}, expected 4, 8 or 16")


@dataclass(frozen=True)
class ClusterSelect:
    """`cluster` blocks of `warps` warps share a row, at most `pages` pages each, of which `stages`
    are on their way."""

    cluster: int
    warps: int
    stages: int
    pages: int

    def __post_init__(self) -> None:
        _check(self, (16, 64, 256, 640))

    @property
    def shared_bytes(self) -> int:
        """`kRing + sizeof(Shared)` of csrc/dsa_topk_indexer/cluster_select.cu."""
        shared = _aligned(_selection_bytes(self.warps), 16)
        shared = _aligned(shared + self.pages * (PAGE_KEYS_BYTES + 4), 8)
        return self.stages * PAGE_BYTES + _aligned(shared + _ring_bytes(self.stages), 16)


@dataclass(frozen=True)
class TiledSelect:
    """Blocks of `warps` warps score `pages` pages each, of which `stages` are on their way;
    `cluster` blocks select among a row's keys."""

    cluster: int
    warps: int
    stages: int
    pages: int

    def __post_init__(self) -> None:
        _check(self, (8, 16, 32, 64))

    @property
    def shared_bytes(self) -> int:
        """Of `score`: `kRing + sizeof(Shared)` of csrc/dsa_topk_indexer/tiled_select.cu."""
        shared = 4 * self.pages + _ring_bytes(self.stages)
        return self.stages * PAGE_BYTES + _aligned(shared, 16)


@dataclass(frozen=True)
class TritonTiled:
    """Blocks of `warps` warps score `steps` tiles of `pages` pages each, of which `stages` are on
    their way; a block of `select_warps` warps holds `slots` keys of a row in registers."""

    pages: int
    steps: int
    warps: int
    stages: int
    slots: int
    select_warps: int

    def __post_init__(self) -> None:
        if self.pages not in (1, 2):
            raise ValueError(f"knob 'pages' is {self.pages}, expected 1 or 2")
        if not 1 <= self.steps <= 64:
            raise ValueError(f"knob 'steps' is {self.steps}, expected 1 to 64")
        if self.warps not in (4, 4 * self.pages):
            raise ValueError(f"knob 'warps' is {self.warps}, expected 4, or 8 where 'pages' is 2")
        if self.stages not in (1, 2, 3):
            raise ValueError(f"knob 'stages' is {self.stages}, expected 1, 2 or 3")
        if self.slots not in (4096, 8192, 16384):  # counts are packed in 16 bits
            raise ValueError(f"knob 'slots' is {self.slots}, expected 4096, 8192 or 16384")
        if self.select_warps not in (8, 16, 32) or self.slots > 512 * self.select_warps:
            raise ValueError(
                f"knob 'select_warps' is {self.select_warps}, expected 8, 16 or 32, with at most "
                "512 'slots' a warp"
            )


def _tiled_shape(config: TiledSelect, variant: str) -> tuple[int, int]:
    if variant == "select":
        return 32 * SELECT_WARPS, _selection_bytes(SELECT_WARPS)
    return 32 * config.warps, config.shared_bytes


def row_bytes(max_num_pages: int, aside: int) -> int:
    """Workspace of a row; `aside` is `tile`'s, 8 bytes a slot."""
    is_longer = 8 * PAGE_SIZE * max_num_pages > aside
    return PAGE_KEYS_BYTES * max_num_pages + (aside if is_longer else 0)


def group_rows(max_num_pages: int, aside: int) -> int:
    """Rows that a route of two launches takes at once, at most; 1 or more."""
    return max(WORKSPACE_BYTES // max(row_bytes(max_num_pages, aside), 1), 1)


def workspace_bytes(axes: Mapping[str, int], aside: int) -> int:
    """What a route of two launches needs, by the axes of the definition: that of a group."""
    row = row_bytes(axes["max_num_pages"], aside)
    return min(axes["batch_size"] * row, max(row, WORKSPACE_BYTES))


KERNELS: tuple[Kernel, ...] = (
    Kernel(
        OP, "pass_through", "cuda", ARCHS, PassThrough(16), "dsa_topk_indexer/pass_through.cu",
        tile=lambda _: (0, 0, 0, 0),
        variants=("any",),
        launch_shape=lambda c, _: (32 * c.warps, 0),
        candidates={"warps": (4, 8, 16)},
    ),
    Kernel(
        OP, "cluster_select", "cuda", ARCHS, ClusterSelect(8, 4, 4, 64),
        "dsa_topk_indexer/cluster_select.cu",
        tile=lambda c: (c.cluster, 0, c.cluster * c.pages, 0),
        launch_shape=lambda c, _: (32 * c.warps, c.shared_bytes),
        candidates={
            "cluster": (1, 2, 4, 8, 16), "warps": (4, 8), "stages": (2, 4, 6, 8),
            "pages": (16, 64, 256, 640),
        },
    ),
    Kernel(
        OP, "tiled_select", "cuda", ARCHS, TiledSelect(8, 4, 6, 16),
        "dsa_topk_indexer/tiled_select.cu",
        tile=lambda c: (c.cluster, c.pages, 0, 0),
        variants=("score", "score_any", "select"),
        launch_shape=_tiled_shape,
        candidates={
            "cluster": (1, 2, 4, 8, 16), "warps": (4, 8), "stages": (2, 4, 6, 8),
            "pages": (8, 16, 32, 64),
        },
    ),
    Kernel(
        OP, "triton_tiled", "triton", ARCHS, TritonTiled(1, 4, 4, 2, 8192, 16), "triton_tiled.py",
        tile=lambda c: (1, c.pages * c.steps, 2**24 - 1, 8 * c.slots),
        variants=("score_64", "score_32", "score_any", "select"),
        candidates={
            "pages": (1, 2), "steps": (1, 2, 4, 8, 16), "warps": (4, 8), "stages": (1, 2, 3),
            "slots": (4096, 8192, 16384), "select_warps": (8, 16, 32),
        },
    ),
)  # fmt: skip
