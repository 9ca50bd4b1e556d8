"""GPU architectures and the products we know by name: pure data.

Capabilities match exactly. `sm_90a` and `sm_100a` code runs on 9.0 and 10.0 alone (CUDA C++
Programming Guide, architecture-specific features), so 10.3 or 12.0 is not "at least 10.0".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """One architecture that kernels are built for."""

    name: str
    capability: tuple[int, int]
    nvcc_target: str
    max_shared_bytes: int  # per block, opt-in
    features: frozenset[str]


@dataclass(frozen=True)
class Product:
    """A device that can be named where it is not present, as in `explain --device h200`."""

    name: str
    arch: str
    num_sms: int


ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("sm90", (9, 0), "90a", 232448, frozenset({"tma", "cluster", "wgmma", "pdl"})),
        Arch("sm100", (10, 0), "100a", 232448, frozenset({"tma", "cluster", "tcgen05", "pdl"})),
    )
}

PRODUCTS: dict[str, Product] = {
    "h200": Product("NVIDIA H200", "sm90", 132),
    "b200": Product("NVIDIA B200", "sm100", 148),
    "cpu": Product("CPU", "cpu", 0),
}


def arch_name(capability: tuple[int, int]) -> str:
    """The tag of a compute capability, e.g. `sm90`; also for GPUs that have no row in ARCHS."""
    return f"sm{capability[0]}{capability[1]}"


def product_slug(product: str) -> str:
    """`NVIDIA H200` -> `h200`: the product's part of a table's file name."""
    words = product.lower().replace("nvidia", "").replace("/", " ").split()
    return "-".join(words) or "unknown"
