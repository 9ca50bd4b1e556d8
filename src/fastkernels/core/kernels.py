"""Compiled kernels as data: what to build from which source, for which config. Imports no torch.

An operator lists its kernels in `ops/<op>/kernels/__init__.py`. The build makes machine code of
every (kernel, config) that a table names, and of each default; `core.jit` makes others when they
are first needed; both go through `core.toolchain`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).parents[1]

LANGUAGES = ("cuda", "triton", "cute")
"""Device languages; in each, machine code is a cubin that one launcher loads."""


class Binary(NamedTuple):
    """Machine code of one entry point. `shared_bytes` is dynamic shared memory."""

    cubin: bytes
    symbol: str
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class Kernel:
    """Device code of one route.

    `config` is the default, an instance of a frozen dataclass of knobs; `candidates` lists the
    values that a tuner may try for each. `source` is a path below
    csrc/ (CUDA), or the module beside the operator's `kernels/__init__.py` whose
    `compile(config, arch, variant)` gives a `Binary` (Triton, CuTe DSL). `variants` are compiled
    side by side; the launcher picks one per call, or one for each launch of a call. The words of
    their names, joined by `_`, are macros in CUDA (FK_POOL is 1 in `compact_pool`, else 0).
    `lent` names variants whose machine code is that of another kernel's default config, which must
    not depend on its knobs: one stage that two routes share.
    `launch_shape(config, variant)` is `(threads, shared_bytes)` for CUDA, whose compiler does not
    tell (FK_THREADS and FK_SHARED_BYTES there). `tile(config)` holds the integers that the
    operator's launcher needs to lay out the grid.
    """

    op: str
    name: str
    language: str
    archs: tuple[str, ...]
    config: Any
    source: str
    tile: Callable[[Any], tuple[int, ...]]
    candidates: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, hash=False)
    variants: tuple[str, ...] = ("aligned", "any")
    lent: Mapping[str, Kernel] = field(default_factory=dict, hash=False)
    launch_shape: Callable[[Any, str], tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        assert self.language in LANGUAGES
        assert (self.launch_shape is not None) == (self.language == "cuda")
        for variant, lender in self.lent.items():
            assert variant in self.variants
            assert variant in lender.variants
            assert set(self.archs) <= set(lender.archs)

    def maker(self, config: Any, variant: str) -> tuple[Kernel, Any]:
        """The kernel and the config whose machine code a variant is."""
        lender = self.lent.get(variant)
        return (self, config) if lender is None else (lender, lender.config)

    @property
    def module(self) -> str:
        """The module with the device code, for Triton and CuTe DSL."""
        return f"fastkernels.ops.{self.op}.kernels.{self.source.removesuffix('.py')}"

    def sources(self) -> list[Path]:
        """The files that machine code and its launch depend on."""
        declared = PACKAGE / "ops" / self.op / "kernels" / "__init__.py"
        if self.language == "cuda":
            folder = csrc_folder()
            headers = (p for name in ("common", self.op) for p in (folder / name).glob("*.*h"))
            return sorted({declared, folder / self.source, *headers})
        shared = (PACKAGE / "ops" / "_shared" / "kernels").glob(f"*_{self.language}.py")
        return sorted({declared, declared.parent / self.source, *shared})

    def digest(self) -> str:
        """Identity of the sources, by content."""
        total = hashlib.sha256()
        for path in self.sources():
            total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return total.hexdigest()


def csrc_folder() -> Path:
    """The CUDA sources: shipped as `fastkernels._csrc`, in a checkout `csrc/`."""
    shipped = PACKAGE / "_csrc"
    return shipped if shipped.is_dir() else PACKAGE.parents[1] / "csrc"


def knobs(config: Any) -> dict[str, Any]:
    """A config as a table spells it."""
    return dataclasses.asdict(config)
