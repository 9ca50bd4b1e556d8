"""Compilers on this machine, and machine code of one kernel and config. Imports no torch.

The ahead-of-time build and `core.jit` compile through here alone, so both make the same code. The
languages' packages are imported by a compile, never by a look at what is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from fastkernels.core.archs import ARCHS
from fastkernels.core.kernels import Binary, Kernel, csrc_folder, knobs

MINIMUM_NVCC = (13, 0)
USUAL_NVCC = Path("/usr/local/cuda/bin/nvcc")
# CUDA 13 keeps binaries valid on every driver of its major version, 580 and newer; code of CUDA 12
# would be another promise (CUDA Compatibility, minor version compatibility).
MINIMUM_DRIVER_CUDA = (13, 0)


class Package(NamedTuple):
    """A Python package that compiles a language: `minimum <= version < limit`."""

    name: str
    module: str
    minimum: tuple[int, ...]
    limit: tuple[int, ...]

    @property
    def requirement(self) -> str:
        """As pyproject.toml spells it."""
        low, high = (".".join(map(str, version)) for version in (self.minimum, self.limit))
        return f"{self.name}>={low},<{high}"

    @property
    def pin(self) -> str:
        """The release that a build takes: the oldest, whose code was verified and measured. A newer
        one may compile to other code (Triton 3.10 no longer fuses multiply and add)."""
        return f"{self.name}=={'.'.join(map(str, self.minimum))}.*"


# pyproject.toml says the same (`jit` extra, dependencies); tests/build compares.
PACKAGES = {
    "triton": Package("triton", "triton", (3, 6), (4,)),
    "cute": Package("nvidia-cutlass-dsl", "cutlass", (4, 8), (5,)),
}

TVM_FFI = Package("apache-tvm-ffi", "tvm_ffi", (0, 1, 11), (0, 2))
"""Binds the library's host code to Python: a dependency of the package, with headers to build."""

# nvcc of the package index, all of one release: nvcc 13.0 asks for whatever nvvm is newest, whose
# PTX the assembler of 13.0 rejects.
NVCC_WHEELS = tuple(
    f"{name}==13.0.*"
    for name in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime",
                 "nvidia-cuda-cccl")
)  # fmt: skip


class ToolchainError(Exception):
    """Something cannot be compiled here: no compiler, an unfit one, or what the compiler said.

    `reason` is the message without the kernel's name, for a list that names it already.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason or message


class Nvcc(NamedTuple):
    """A CUDA compiler that is new enough."""

    path: Path
    version: str  # "13.0.88"


def find_nvcc() -> Nvcc:
    """The first fit nvcc of $CUDA_HOME, $CUDA_PATH, PATH, /usr/local/cuda and installed wheels."""
    rejected = []
    for origin, path in _nvcc_candidates():
        version = _nvcc_version(path) if path.is_file() else "no such file"
        if numbers(version) >= MINIMUM_NVCC:
            return Nvcc(path, version)
        rejected.append(f"{origin}: {path} ({version})")
    needed = ".".join(map(str, MINIMUM_NVCC))
    raise ToolchainError(
        f"needed: nvcc {needed} or newer; found: {'; '.join(rejected) or 'none'}; "
        "set CUDA_HOME to a CUDA toolkit, put nvcc on PATH, or run "
        f"pip install {' '.join(repr(wheel) for wheel in NVCC_WHEELS)}"
    )


def missing(language: str, arch: str) -> str | None:
    """Why this machine cannot compile a language for an architecture; None if it can."""
    if arch not in ARCHS:
        return f"kernels are built for {', '.join(ARCHS)}, not for {arch}"
    if language in PACKAGES:
        return missing_package(PACKAGES[language])
    try:
        find_nvcc()
    except ToolchainError as error:
        return str(error)
    host = os.environ.get("NVCC_CCBIN") or "g++"
    if shutil.which(host) is None:
        return f"needed: a C++ compiler for nvcc; found: no {host} on PATH; set NVCC_CCBIN"
    return None


def missing_package(package: Package) -> str | None:
    """Why a package cannot be used; reads its metadata and does not import it."""
    try:
        version = metadata.version(package.name)
        there = importlib.util.find_spec(package.module) is not None
    except (metadata.PackageNotFoundError, ValueError):
        there = False
    if not there:
        return (
            f"needed: {package.requirement}; found: none; run pip install {package.requirement!r}"
        )
    if not package.minimum <= numbers(version) < package.limit:
        return f"needed: {package.requirement}; found: {version}"
    return None


def versions() -> dict[str, str]:
    """The version of each language's compiler, where a fit one is there."""
    found = {}
    with contextlib.suppress(ToolchainError):
        found["cuda"] = find_nvcc().version
    for language, package in PACKAGES.items():
        if missing_package(package) is None:
            found[language] = metadata.version(package.name)
    return dict(sorted(found.items()))


def numbers(version: str) -> tuple[int, ...]:
    """`3.6.0+git1` -> (3, 6, 0); () where a version does not start with numbers."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def host_digest() -> str:
    """Identity of the library's host sources, by content."""
    folder = csrc_folder()
    total = hashlib.sha256()
    for path in sorted(p for p in folder.glob("**/*") if p.suffix in (".cc", ".h")):
        name = path.relative_to(folder).as_posix()
        total.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def cuda_include(nvcc: Nvcc) -> Path:
    """The folder of cuda.h. nvcc itself says so: it may be a script that starts another one."""
    command: list[str | Path] = [nvcc.path, "--dryrun", "-cubin", "-x", "cu", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True)
    match = re.search(r'INCLUDES="-I(.*?)"', done.stdout + done.stderr)
    return Path(match[1] if match else nvcc.path.parents[1] / "include")


def identity(kernel: Kernel, config: Any, arch: str, variant: str) -> str:
    """Name of the machine code by all that it depends on: the recipe and its compiler's version."""
    maker, _ = kernel.maker(config, variant)
    parts = [recipe(kernel, config, arch, variant), versions().get(maker.language)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def recipe(kernel: Kernel, config: Any, arch: str, variant: str) -> str:
    """Name of what a compiler is asked for: all that machine code depends on, except the compiler's
    version; contents, never times or paths (C110). Equal on machines with and without it."""
    kernel, config = kernel.maker(config, variant)
    parts = [
        kernel.op, kernel.name, kernel.language, kernel.digest(), knobs(config), arch, variant,
        _nvcc_flags(kernel, config, arch, variant) if kernel.language == "cuda" else [],
        kernel.launch_shape(config, variant) if kernel.launch_shape else [],  # kept beside the code
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def compile_kernel(kernel: Kernel, config: Any, arch: str, variant: str) -> Binary:
    """Machine code of one entry point. Raises ToolchainError, whatever goes wrong."""
    kernel, config = kernel.maker(config, variant)
    reason = missing(kernel.language, arch)
    if reason is None:
        try:
            if kernel.language == "cuda":
                binary = _compile_cuda(kernel, config, arch, variant)
            else:
                binary = importlib.import_module(kernel.module).compile(config, arch, variant)
            reason = _unfit(binary, arch)
        except ToolchainError as error:
            reason = str(error)
        except Exception as error:  # the compilers of Triton and CuTe DSL raise anything
            reason = f"{type(error).__name__}: {error}"
        if reason is None:
            return Binary(*binary)
    raise ToolchainError(
        f"{kernel.op}: route {kernel.name!r} ({kernel.language}) with {knobs(config)} for {arch}, "
        f"variant {variant!r}, cannot be compiled: {reason}",
        reason,
    )


# ---- looking ------------------------------------------------------------------------------------


def _nvcc_candidates() -> list[tuple[str, Path]]:
    candidates = []
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            candidates.append((variable, Path(os.environ[variable], "bin", "nvcc")))
    on_path = shutil.which("nvcc")
    if on_path is not None:
        candidates.append(("PATH", Path(on_path)))
    if USUAL_NVCC.is_file():
        candidates.append(("usual place", USUAL_NVCC))
    wheels = (folder / "cu13" / "bin" / "nvcc" for folder in _nvidia_wheels())
    return [*candidates, *(("wheel", path) for path in wheels if path.is_file())]


def _nvidia_wheels() -> list[Path]:
    found = importlib.util.find_spec("nvidia")  # a namespace: found without running anything
    return [Path(folder) for folder in (found and found.submodule_search_locations) or ()]


def _nvcc_version(path: Path) -> str:
    """`13.0.88`, or in words why there is none."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True)
    except OSError as error:
        return f"does not start: {error.strerror}"
    match = re.search(r"\bV(\d+\.\d+\.\d+)", done.stdout)
    return match[1] if match else f"--version prints no version: {done.stdout + done.stderr!r:.200}"


# ---- compiling ----------------------------------------------------------------------------------


def _nvcc_flags(kernel: Kernel, config: Any, arch: str, variant: str) -> list[str]:
    """All that shapes the code, paths aside."""
    target = ARCHS[arch].nvcc_target
    values = {name.upper(): _macro(value) for name, value in knobs(config).items()}
    words = {word for name in kernel.variants for word in name.split("_")} - {"aligned", "any"}
    values |= {word.upper(): str(int(word in variant.split("_"))) for word in words}
    values["ALIGNED"] = str(int("any" not in variant.split("_")))
    assert kernel.launch_shape is not None
    threads, shared_bytes = kernel.launch_shape(config, variant)
    values |= {"THREADS": str(threads), "SHARED_BYTES": str(shared_bytes)}
    return [
        "-cubin", "-std=c++17", "-O3", "--Werror", "all-warnings",
        "-gencode", f"arch=compute_{target},code=sm_{target}",
        *(f"-DFK_{name}={value}" for name, value in sorted(values.items())),
    ]  # fmt: skip


def _macro(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _compile_cuda(kernel: Kernel, config: Any, arch: str, variant: str) -> Binary:
    assert kernel.launch_shape is not None
    folder = csrc_folder()
    with tempfile.TemporaryDirectory(prefix="fastkernels-nvcc-") as scratch:
        target = Path(scratch, "kernel.cubin")
        command: list[str | Path] = [
            find_nvcc().path, *_nvcc_flags(kernel, config, arch, variant),
            "-I", folder, "-o", target, folder / kernel.source,
        ]  # fmt: skip
        # In the scratch folder, since nvcc leaves files where it runs when it is interrupted.
        done = subprocess.run(
            command, cwd=scratch, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise ToolchainError(f"nvcc failed ({done.returncode})\n{done.stdout}{done.stderr}")
        cubin = target.read_bytes()
    return Binary(cubin, f"{kernel.op}_{kernel.name}", *kernel.launch_shape(config, variant))


def _unfit(binary: Binary, arch: str) -> str | None:
    """What a launch of the machine code would trip over, found while somebody looks."""
    if not binary.cubin.startswith(b"\x7fELF"):
        return f"the compiler gave {binary.cubin[:8]!r}..., which is no cubin"
    if b"\0" + binary.symbol.encode() + b"\0" not in binary.cubin:
        return f"the cubin has no entry point {binary.symbol!r}"
    limit = ARCHS[arch].max_shared_bytes
    if binary.shared_bytes > limit:
        return f"it takes {binary.shared_bytes} bytes of shared memory, a block of {arch} {limit}"
    return None
