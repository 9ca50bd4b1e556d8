#!/usr/bin/env python3
"""Compile what a sweep will want, where there is no GPU.

    python bench/prebuild.py --op gdn_prefill --configs bench/sweeps/gdn_prefill.json --out kept

Carried to the GPU machine, the folder serves there: `FASTKERNELS_CACHE=kept`. What it holds already
is not compiled again.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # a script finds what lies beside it, not itself

from bench.sweep import choices, label
from fastkernels import catalog
from fastkernels.core import jit, toolchain


@click.command()
@click.option("--op", "name", required=True, help="Operator.")
@click.option("--configs", required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--out", "folder", required=True, type=click.Path(path_type=Path))
@click.option("--arch", default="sm90", show_default=True)
def main(name: str, configs: Path, folder: Path, arch: str) -> None:
    """Fill a folder with the machine code of a sweep's configs; exit status 1 if one fails."""
    operator = catalog.operator(name)
    kernels = {kernel.name: kernel for kernel in catalog.module(name, "kernels").KERNELS}
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for route, config in choices(operator, configs):
        kernel, start = kernels[route.name], time.monotonic()
        try:
            made = [
                jit.find(folder, kernel, config, arch, variant)
                or jit.keep(folder, kernel, config, arch, variant)
                for variant in kernel.variants
            ]
        except toolchain.ToolchainError as error:
            failed += 1
            click.echo(f"{label((route, config))}: FAILED: {error}")
            continue
        size = sum(len(binary.cubin) for binary in made)
        click.echo(f"{label((route, config))}: {size} B, {time.monotonic() - start:.1f} s")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
