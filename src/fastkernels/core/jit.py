"""Machine code of a config that the library lacks: compiled once, kept by content.

A kept file is named by everything its code depends on (sources, config, flags, compiler version),
written under another name and moved into place, and checked when it is read. One process compiles,
others wait on a lock that the kernel of the system releases with its holder. A folder that cannot
be written is replaced by one of this process in the temporary directory, with one warning.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from fastkernels import envs
from fastkernels.core import toolchain
from fastkernels.core.kernels import Binary, Kernel

MAGIC = b"fastkernels cubin 1\n"


def declines(kernel: Kernel, arch: str) -> str | None:
    """Why a kernel may not or cannot be compiled just in time; None if it can."""
    policy = envs.jit()
    if policy == "off":
        return f"{envs.JIT} is off"
    if kernel.language == "cuda" and policy != "cuda":
        return f"CUDA is compiled just in time only with {envs.JIT}=cuda"
    return _missing(kernel.language, arch)


@cache
def _missing(language: str, arch: str) -> str | None:
    return toolchain.missing(language, arch)


def binary(kernel: Kernel, config: Any, arch: str, variant: str) -> Binary:
    """The kept machine code, or a compile. Raises ToolchainError."""
    name = f"{toolchain.identity(kernel, config, arch, variant)}.cubin"
    wanted = envs.cache_folder()
    kept = None if wanted is None else _read(wanted / name)  # even where it is read-only
    if kept is not None:
        return kept
    path = _folder(wanted) / name
    with _locked(path.with_suffix(".lock")):
        kept = _read(path)
        if kept is not None:
            return kept
        start = time.perf_counter()
        made = toolchain.compile_kernel(kernel, config, arch, variant)
        envs.logger().info(
            "%s: compiled route %r with %s for %s (%s) just in time in %.1f s",
            kernel.op, kernel.name, config, arch, variant, time.perf_counter() - start,
        )  # fmt: skip
        try:
            _write(path, made)
        except OSError as error:  # a full disk costs the next process a compile, not this one
            envs.logger().warning("%s: a compiled kernel could not be kept: %s", path, error)
    return made


def _read(path: Path) -> Binary | None:
    """A kept file; None where there is none or it is damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if not data.startswith(MAGIC):
        return None
    head, _, cubin = data[len(MAGIC) :].partition(b"\n")
    try:
        facts = json.loads(head)
        if hashlib.sha256(cubin).hexdigest() != facts["sha256"]:
            return None
        return Binary(cubin, facts["symbol"], facts["threads"], facts["shared_bytes"])
    except (ValueError, KeyError, TypeError):
        return None


def _write(path: Path, made: Binary) -> None:
    facts = {
        "symbol": made.symbol,
        "threads": made.threads,
        "shared_bytes": made.shared_bytes,
        "sha256": hashlib.sha256(made.cubin).hexdigest(),
    }
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem[:16])
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(MAGIC + json.dumps(facts).encode() + b"\n" + made.cubin)
        os.chmod(temporary, 0o644)  # a cache may be shared between users
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError:  # another user's: two may compile the same, and the later file stays
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _folder(wanted: Path | None) -> Path:
    if wanted is not None and _is_writable(wanted):
        return wanted
    temporary = _temporary_folder()
    envs.log_once(
        logging.WARNING,
        ("jit", wanted),
        f"{wanted or 'no home'}: not writable; kernels compiled just in time are kept in "
        f"{temporary} for this process; set {envs.CACHE}",
    )
    return temporary


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


@cache
def _temporary_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fastkernels-jit-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
