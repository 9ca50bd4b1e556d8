"""CUDA kernels of csrc/ on a CPU: their own source, compiled by the host's compiler against
`cuda_block.h` and another `common/ptx_sm90.cuh`, and run thread by thread.

It shows what the kernels compute, races between warps included (blocks and warps take turns by a
seed, asynchronous copies land as early or as late as they may), and says nothing about time.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from fastkernels.core import toolchain
from fastkernels.core.kernels import Kernel, csrc_folder

HERE = Path(__file__).parent
C_TYPES = {
    "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float,
    "double": ctypes.c_double,
}  # fmt: skip
FIELD = re.compile(
    r"^  (?:const )?(void|int32_t|int64_t|float|double)(\*?) ([\w, ]+);", re.MULTILINE
)


def compile_kernel(
    kernel: Kernel, config: Any, variant: str, folder: Path, together: int = 1
) -> Any:
    """The kernel as a C function `(params, blocks, threads, seed)`."""
    # What nvcc is told, without the architecture.
    flags = toolchain._nvcc_flags(kernel, config, "sm90", variant)
    flags = [*flags, f"-DFK_TOGETHER={together}"]
    name = re.sub(r"\W+", "-", f"{kernel.op}-{kernel.name}-{config}-{variant}-{together}")
    target = folder / f"{name}.so"
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(kernel, flags, target)
    return ctypes.CDLL(str(target)).emulate


def _compile(kernel: Kernel, flags: Sequence[str], target: Path) -> None:
    part = target.with_suffix(".part")
    command: list[str | Path] = [
        "g++", "-std=c++17", "-O2", "-shared", "-fPIC",
        "-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-sign-compare", "-Wno-unused-variable",
        *(flag for flag in flags if flag.startswith("-DFK_")),
        f"-DEMULATED_SOURCE=\"{kernel.source}\"",
        f"-DEMULATED_NAMESPACE=fastkernels::{kernel.op}",
        f"-DEMULATED_KERNEL={kernel.op}_{kernel.name}",
        "-I", HERE, "-I", csrc_folder(),
        "-isystem", toolchain.cuda_include(toolchain.find_nvcc()),
        "-o", part, HERE / "kernel.cc",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    part.replace(target)


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """One for all processes of a test run: what one has compiled the others load."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulated"
    folder.mkdir(exist_ok=True)
    return folder


def params_of(op: str, values: dict[str, Any]) -> ctypes.Structure:
    """`Params` of csrc/<op>/params.h; tensors become addresses, None a null pointer."""
    text = (csrc_folder() / op / "params.h").read_text()
    text = text.split("struct Params {")[1].split("\n};")[0]
    fields: list[tuple[str, Any]] = []
    for kind, pointer, names in FIELD.findall(text):
        c_type = ctypes.c_void_p if pointer else C_TYPES[kind]
        fields += [(name, c_type) for name in names.split(", ")]
    assert [name for name, _ in fields] == list(values), "the struct's fields, in their order"
    structure = type("Params", (ctypes.Structure,), {"_fields_": fields})
    return structure(*(v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values.values()))


@dataclass
class Emulator:
    """Kernels compiled into a folder when they are first wanted."""

    folder: Path
    _compiled: dict[Any, Any] = field(default_factory=dict)

    def launch(
        self,
        kernel: Kernel,
        config: Any,
        variant: str,
        params: Any,
        blocks: int,
        seed: int,
        *,
        together: int = 1,
    ) -> None:
        """`together`: so many blocks, of which `blocks` is a multiple, run side by side where the
        kernel has no clusters."""
        identity = (kernel.name, config, variant, together)
        if identity not in self._compiled:
            self._compiled[identity] = compile_kernel(
                kernel, config, variant, self.folder, together
            )
        assert kernel.launch_shape is not None
        threads = kernel.launch_shape(config, variant)[0]
        self._compiled[identity](ctypes.byref(params), blocks, threads, seed)


def is_aligned(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether a launcher takes the variant for multiples of 16 bytes."""
    return all(
        t.data_ptr() % 16 == 0 and all(s * t.element_size() % 16 == 0 for s in t.stride()[:-1])
        for t in tensors
    )
