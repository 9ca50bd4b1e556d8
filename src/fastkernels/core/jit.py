"""Machine code of a config that the library lacks: compiled once, kept by content.

A kept file is called `<recipe>.<digest of the compiler's version>.cubin`; the recipe is everything
else that its code depends on (sources, config, flags). It is written under another name and moved
into place, and checked when it is read. One process compiles, others wait on a lock that the kernel
of the system releases with its holder. A folder that cannot be written is replaced by one of this
process in the temporary directory, with one warning.

Where a process may and can compile, only code of its own compiler's version is used. Where it may
not or cannot, code of any version is, the newest first: a folder that was filled on one machine
serves on another one that has no compiler.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fastkernels import envs
from fastkernels.core import toolchain
from fastkernels.core.kernels import Binary, Kernel

MAGIC = b"fastkernels cubin 2\n"


def declines(
    kernel: Kernel, config: Any, arch: str, variants: Sequence[str] | None = None
) -> str | None:
    """Why a config's machine code is not kept and may not or cannot be compiled; None if all its
    `variants` are kept, or can be compiled."""
    variants = kernel.variants if variants is None else variants
    makers = dict.fromkeys(kernel.maker(config, variant)[0] for variant in variants)
    reasons = [_no_compile(maker, arch) for maker in makers]
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is None or envs.jit() == "off" or arch not in kernel.archs:
        return reason
    folder = envs.cache_folder()
    if folder is None:
        return reason
    try:
        if all(find(folder, kernel, config, arch, variant) for variant in variants):
            return None
    except OSError:  # sources that cannot be read: nobody knows what was made from them
        return reason
    return f"{reason}; {folder} does not hold its machine code either"


def _no_compile(kernel: Kernel, arch: str) -> str | None:
    """Why this process may not or cannot compile a kernel."""
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
    """The kept machine code, or a compile. Raises ToolchainError, too where `declines` would."""
    kernel, config = kernel.maker(config, variant)
    reason = _no_compile(kernel, arch)
    wanted = envs.cache_folder()
    if reason is not None:
        kept = None
        if wanted is not None and envs.jit() != "off":
            kept = find(wanted, kernel, config, arch, variant)
        if kept is None:
            what = f"route {kernel.name!r} with {config} for {arch} ({variant})"
            raise toolchain.ToolchainError(
                f"{kernel.op}: no machine code of {what}: {reason}", reason
            )
        return kept
    compiler = _compiler(kernel)
    if wanted is not None:  # even where it is read-only
        kept = find(wanted, kernel, config, arch, variant, compiler)
        if kept is not None:
            return kept
    folder = _folder(wanted)
    recipe = toolchain.recipe(kernel, config, arch, variant)
    with _locked(_path(folder, recipe, compiler).with_suffix(".lock")):
        kept = find(folder, kernel, config, arch, variant, compiler)
        if kept is not None:
            return kept
        start = time.perf_counter()
        made = toolchain.compile_kernel(kernel, config, arch, variant)
        envs.logger().info(
            "%s: compiled route %r with %s for %s (%s) just in time in %.1f s",
            kernel.op, kernel.name, config, arch, variant, time.perf_counter() - start,
        )  # fmt: skip
        try:
            _write(folder, recipe, compiler, made)
        except OSError as error:  # a full disk costs the next process a compile, not this one
            envs.logger().warning("%s: a compiled kernel could not be kept: %s", folder, error)
    return made


# ---- files --------------------------------------------------------------------------------------


def find(
    folder: Path, kernel: Kernel, config: Any, arch: str, variant: str, compiler: str | None = None
) -> Binary | None:
    """Kept machine code that is sound, of this version of the compiler; without one, of the newest
    version that is there. Raises OSError where the kernel's sources cannot be read."""
    recipe = toolchain.recipe(kernel, config, arch, variant)
    if compiler is not None:
        kept = _read(_path(folder, recipe, compiler), recipe)
        return kept.binary if kept is not None and kept.compiler == compiler else None
    try:
        names = [n for n in os.listdir(folder) if n.startswith(recipe) and n.endswith(".cubin")]
    except OSError:
        return None
    found = [kept for name in names if (kept := _read(folder / name, recipe)) is not None]
    found.sort(key=lambda kept: (toolchain.numbers(kept.compiler), kept.compiler))
    return found[-1].binary if found else None


def keep(folder: Path, kernel: Kernel, config: Any, arch: str, variant: str) -> Binary:
    """Compile into a folder that is there, whatever FASTKERNELS_JIT says and the folder holds.

    Raises ToolchainError, and OSError where the file cannot be written.
    """
    kernel, config = kernel.maker(config, variant)
    compiler = _compiler(kernel)
    made = toolchain.compile_kernel(kernel, config, arch, variant)
    _write(folder, toolchain.recipe(kernel, config, arch, variant), compiler, made)
    return made


def _compiler(kernel: Kernel) -> str:
    """The version of a kernel's compiler; where it is gone meanwhile, the compile will say so."""
    return toolchain.versions().get(kernel.language, "")


class _Kept(NamedTuple):
    binary: Binary
    compiler: str


def _path(folder: Path, recipe: str, compiler: str) -> Path:
    return folder / f"{recipe}.{hashlib.sha256(compiler.encode()).hexdigest()[:8]}.cubin"


def _read(path: Path, recipe: str) -> _Kept | None:
    """A kept file; None where there is none, it is damaged or of another recipe."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if not data.startswith(MAGIC):
        return None
    checksum, _, rest = data[len(MAGIC) :].partition(b"\n")
    if hashlib.sha256(rest).hexdigest().encode() != checksum:
        return None
    head, _, cubin = rest.partition(b"\n")
    try:
        facts = json.loads(head)
        if facts["recipe"] != recipe:
            return None
        made = Binary(cubin, facts["symbol"], facts["threads"], facts["shared_bytes"])
        return _Kept(made, facts["compiler"])
    except (ValueError, KeyError, TypeError):
        return None


def _write(folder: Path, recipe: str, compiler: str, made: Binary) -> None:
    facts = {
        "recipe": recipe,
        "compiler": compiler,
        "symbol": made.symbol,
        "threads": made.threads,
        "shared_bytes": made.shared_bytes,
    }
    rest = json.dumps(facts).encode() + b"\n" + made.cubin
    checksum = hashlib.sha256(rest).hexdigest().encode()
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=recipe[:16])
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(MAGIC + checksum + b"\n" + rest)
        os.chmod(temporary, 0o644)  # a cache may be shared between users
        os.replace(temporary, _path(folder, recipe, compiler))
    except BaseException:
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
