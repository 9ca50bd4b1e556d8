"""`fastkernels doctor`: what this machine has, and what each missing piece costs."""

from __future__ import annotations

import ctypes
import os
import platform
import textwrap
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fastkernels
from fastkernels import catalog, envs
from fastkernels.core import archs, dispatch, extension, toolchain
from fastkernels.core.device import named_device
from fastkernels.core.table import file_name, read
from fastkernels.errors import ArgumentError, TableError

COMPILERS = {"cuda": "nvcc"} | {k: p.name for k, p in toolchain.PACKAGES.items()}
# Read by setup.py alone; somebody who just built has them set.
BUILD_VARIABLES = ("FASTKERNELS_NO_CUDA", "FASTKERNELS_RELEASE")
PEERS = ("flashinfer-python", "fla-core", "flash-mla", "deep-gemm", "vllm")


@dataclass(frozen=True)
class Finding:
    """One thing looked for. `state` is ok, missing or wrong; `cost` says what follows if not ok."""

    name: str
    state: str
    found: str
    cost: str = ""


def examine() -> list[Finding]:
    """Everything that decides how fast this installation can be; asks the driver, no more."""
    return [
        Finding(
            "fastkernels", "ok", f"{fastkernels.__version__} in {Path(fastkernels.__file__).parent}"
        ),
        Finding("python", "ok", f"{platform.python_version()} on {platform.machine()}"),
        Finding("torch", "ok", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"),
        *_gpus(),
        _driver(),
        _package("apache-tvm-ffi", "the compiled library could not be bound"),
        *_library(),
        *_compilers(),
        _peers(),
        *_tables(),
        *_variables(),
    ]


def _package(name: str, cost: str) -> Finding:
    try:
        return Finding(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, "missing", "not installed", cost)


def _library() -> list[Finding]:
    """The compiled library, and what its build could not make."""
    findings = [Finding("compiled library", *extension.state())]
    manifest = extension.manifest()
    if findings[0].state == "ok" and manifest is not None:
        for entry in manifest["missing"]:
            # The rest of a compiler's message was printed by the build.
            cost = textwrap.shorten(entry["reason"], 200, placeholder=" ...")
            findings.append(Finding("not in the library", "missing", entry["what"], cost))
    return findings


def _compilers() -> list[Finding]:
    """What could compile a config that is not in the library."""
    versions = toolchain.versions()
    findings = []
    for language, name in COMPILERS.items():
        reasons = [toolchain.missing(language, arch) for arch in archs.ARCHS]
        reason = next(filter(None, reasons), None)
        if reason is None:
            where = f" in {toolchain.find_nvcc().path}" if language == "cuda" else ""
            findings.append(Finding(name, "ok", versions[language] + where))
        else:
            cost = "configs outside the library cannot be compiled just in time in this language"
            findings.append(Finding(name, "missing", reason, cost))
    return findings


def _peers() -> Finding:
    versions = {}
    for name in PEERS:
        finding = _package(name, "")
        if finding.state == "ok":
            versions[name] = finding.found
    found = ", ".join(f"{name} {version}" for name, version in versions.items()) or "none"
    absent = [name for name in PEERS if name not in versions]
    cost = f"benchmarks do not compare with {', '.join(absent)}" if absent else ""
    return Finding("peers", "missing" if absent else "ok", found, cost)


def _gpus() -> list[Finding]:
    if not torch.cuda.is_available():
        return [Finding("GPU", "missing", "none", "calls run on the CPU, by the torch routes")]
    findings = []
    for index in range(torch.cuda.device_count()):
        info = named_device(f"cuda:{index}")
        known = info.arch in archs.ARCHS
        cost = "" if known else f"kernels are built for {', '.join(archs.ARCHS)}: torch routes only"
        findings.append(
            Finding(
                f"cuda:{index}", "ok" if known else "missing", f"{info.product}, {info.arch}", cost
            )
        )
    return findings


def _driver() -> Finding:
    try:
        version = ctypes.c_int()
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return Finding("driver", "missing", "no libcuda.so.1", "no GPU can be used")
    if status != 0:
        return Finding("driver", "wrong", f"cuDriverGetVersion gave {status}", "no GPU can be used")
    cuda = (version.value // 1000, version.value % 1000 // 10)
    needed = ".".join(map(str, toolchain.MINIMUM_DRIVER_CUDA))
    if cuda < toolchain.MINIMUM_DRIVER_CUDA:
        cost = f"kernels need a driver for CUDA {needed} or newer (580 or newer)"
        return Finding("driver", "wrong", f"supports CUDA {cuda[0]}.{cuda[1]}", cost)
    return Finding("driver", "ok", f"supports CUDA {cuda[0]}.{cuda[1]}")


def _tables() -> list[Finding]:
    """The table of each operator for this machine's device, and every file that does not hold."""
    device = named_device(None)
    findings = []
    for operator in catalog.OPERATORS:
        table, notes = dispatch.find_table(operator, device)
        label = f"table {operator.name}"
        if table is not None:
            status = "ok" if table.status == "measured" else "missing"
            findings.append(
                Finding(label, status, f"{table.path} ({table.status})", "; ".join(notes))
            )
        elif device.is_gpu or notes:
            name = file_name(device.arch, device.product)
            cost = "; ".join(notes) or "the safe route serves every call"
            findings.append(Finding(label, "missing", f"no {name}", cost))
        findings += _broken_tables(operator.name)
    return findings


def _broken_tables(name: str) -> list[Finding]:
    operator = catalog.operator(name)
    findings = []
    for folder in dispatch.table_folders():
        for path in sorted((folder / name).glob("*.toml")):
            try:
                problems = dispatch.lint_table(operator, read(path, operator.spec))
            except TableError as error:
                problems = [str(error)]
            if problems:
                cost = "; ".join(problems)
                findings.append(Finding(f"table {name}", "wrong", str(path), cost))
    return findings


def _complaint() -> str:
    """What reading the variables says about a value that is not legal."""
    for read_variable in (envs.check_values, envs.strict, envs.jit, envs.logger):
        try:
            read_variable()
        except ArgumentError as error:
            return str(error)
    return ""


def _variables() -> list[Finding]:
    known = (envs.TABLES, envs.CHECK, envs.STRICT, envs.LOG, envs.JIT, envs.CACHE, *BUILD_VARIABLES)
    findings = []
    for name, value in sorted(os.environ.items()):
        if name.startswith("FASTKERNELS_"):
            cost = "" if name in known else f"unknown; known are {', '.join(known)}"
            cost = cost or _complaint()
            findings.append(Finding(name, "wrong" if cost else "ok", value, cost))
    return findings


def as_json(findings: list[Finding]) -> list[dict[str, Any]]:
    return [asdict(finding) for finding in findings]
