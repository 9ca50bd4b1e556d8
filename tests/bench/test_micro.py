"""bench/micro: programs that only a GPU can run, compiled."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fastkernels.core import toolchain

MICRO = Path(__file__).parents[2] / "bench" / "micro"


@pytest.mark.toolchain
@pytest.mark.parametrize("source", sorted(MICRO.glob("*.cu")), ids=lambda path: path.name)
def test_a_program_compiles(source: Path, tmp_path: Path) -> None:
    nvcc = toolchain.find_nvcc()
    flags = ("-std=c++17", "-O3", "-arch=sm_90a", "-cubin")
    command: list[str | Path] = [nvcc.path, *flags, "-o", tmp_path / "x", source]
    subprocess.run(command, check=True, capture_output=True)
