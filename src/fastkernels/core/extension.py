"""The compiled library and its manifest: found and loaded when a kernel is first wanted.

A library that is absent, damaged or made for another version is a state with words, which routes
decline with and `fastkernels doctor` shows; it is never an import error and never a crash.
"""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fastkernels.core import toolchain
from fastkernels.core.kernels import PACKAGE, Binary, Kernel, csrc_folder, knobs
from fastkernels.version import __version__

SCHEMA = 1
REBUILD = "build it with `make kernels` in a checkout, or install a wheel that holds it"


class LaunchFailed(RuntimeError):
    """The driver refused a launch; of a type of its own, so that it is no refused argument."""


class LibraryState(NamedTuple):
    """`status` is ok, missing or wrong; `cost` says what follows if it is not ok."""

    status: str
    found: str
    cost: str = ""


class Library(NamedTuple):
    """A loaded library: its TVM-FFI module, and its manifest."""

    module: Any
    manifest: dict[str, Any]


def folder() -> Path:
    return PACKAGE / "_lib"


@cache
def manifest() -> dict[str, Any] | None:
    """The manifest beside the library; None where nothing was built or it makes no sense."""
    try:
        found = json.loads((folder() / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if _has(found, MANIFEST) and _is_sound(found) else None


MANIFEST = {"schema": int, "version": str, "kernels": list, "missing": list}
LIBRARY = {"file": str, "sha256": str, "bytes": int, "sources_sha256": str}
KERNEL = {
    "op": str, "route": str, "language": str, "config": dict, "arch": str, "variant": str,
    "binary": int, "symbol": str, "threads": int, "shared_bytes": int, "sources_sha256": str,
}  # fmt: skip


def _has(data: Any, types: dict[str, type]) -> bool:
    return isinstance(data, dict) and all(type(data.get(name)) is t for name, t in types.items())


def _is_sound(found: dict[str, Any]) -> bool:
    """Whether everything that is read later is there, so that nothing has to look again."""
    library = found.get("library")
    return (
        found["schema"] == SCHEMA
        and (library is None or _has(library, LIBRARY))
        and all(_has(entry, KERNEL) for entry in found["kernels"])
        and all(_has(entry, {"what": str, "reason": str}) for entry in found["missing"])
    )


@cache
def load() -> Library | LibraryState:
    """The library, or why there is none. Loading needs neither a GPU nor a driver."""
    cost = "calls are served by the torch routes"
    found = manifest()
    path = folder() / "manifest.json"
    if found is None:
        if os.path.lexists(path):
            return LibraryState("wrong", f"{path} is no manifest of this version; {REBUILD}", cost)
        return LibraryState("missing", f"none in {folder()}; {REBUILD}", cost)
    if found["version"] != __version__:
        text = f"made for fastkernels {found['version']}, this is {__version__}"
        return LibraryState("wrong", f"{text}; {REBUILD}", cost)
    if found["library"] is None:
        reasons = "; ".join(f"{m['what']}: {m['reason']}" for m in found["missing"][:1])
        return LibraryState("missing", f"not built ({reasons})", cost)
    if _is_stale(found["library"]["sources_sha256"]):
        return LibraryState("wrong", f"made from other host sources than csrc/; {REBUILD}", cost)
    return _open(folder() / found["library"]["file"], found, cost)


def _is_stale(sources_sha256: str) -> bool:
    """Whether a checkout's host sources have changed; an installed package has none."""
    is_checkout = (csrc_folder() / "common" / "cubin.cc").is_file()
    return is_checkout and toolchain.host_digest() != sources_sha256


def _open(path: Path, found: dict[str, Any], cost: str) -> Library | LibraryState:
    try:
        data = path.read_bytes()
    except OSError as error:
        return LibraryState("wrong", f"{path} cannot be read: {error}; {REBUILD}", cost)
    # A truncated library can end a process while it is mapped: look before.
    if len(data) != found["library"]["bytes"]:
        text = f"{path} has {len(data)} bytes, its manifest says {found['library']['bytes']}"
        return LibraryState("wrong", f"{text}; {REBUILD}", cost)
    if hashlib.sha256(data).hexdigest() != found["library"]["sha256"]:
        return LibraryState("wrong", f"{path} is not what its manifest says; {REBUILD}", cost)
    try:
        import tvm_ffi  # late: a call on a CPU does not need it

        tvm_ffi.register_error("LaunchFailed", LaunchFailed)
        module = tvm_ffi.load_module(str(path))
        version = module.get_function("version")()
    except Exception as error:  # whatever a foreign library or another TVM-FFI raises
        return LibraryState("wrong", f"{path} does not load: {error}", cost)
    if version != __version__:
        return LibraryState("wrong", f"{path} says it is version {version}; {REBUILD}", cost)
    return Library(module, found)


def state() -> LibraryState:
    """What `fastkernels doctor` says about the library."""
    library = load()
    if isinstance(library, LibraryState):
        return library
    info = library.manifest["library"]
    kernels = len({(k["op"], k["route"], str(k["config"])) for k in library.manifest["kernels"]})
    archs = ", ".join(sorted({k["arch"] for k in library.manifest["kernels"]})) or "no architecture"
    return LibraryState(
        "ok", f"{info['file']}, {info['bytes'] / 1e6:.1f} MB: {kernels} kernels for {archs}"
    )


def built(kernel: Kernel, config: Any, arch: str) -> list[dict[str, Any]] | None:
    """The manifest's entries of a kernel, in the order of its variants; None where the library
    lacks one of them or was built from other sources."""
    library = load()
    if isinstance(library, LibraryState):
        return None
    wanted = (kernel.op, kernel.name, knobs(config), arch)
    makers = {variant: kernel.maker(config, variant) for variant in kernel.variants}
    found = {
        entry["variant"]: entry
        for entry in library.manifest["kernels"]
        if (entry["op"], entry["route"], entry["config"], entry["arch"]) == wanted
        and entry["variant"] in makers
        and entry["sources_sha256"] == _digest(makers[entry["variant"]][0])
    }
    if any(variant not in found for variant in kernel.variants):
        return None
    entries = [found[variant] for variant in kernel.variants]
    for entry in entries:
        maker, its = makers[entry["variant"]]
        if maker.launch_shape is not None:  # a checkout's may have changed since
            shape = maker.launch_shape(its, entry["variant"])
            if (entry["threads"], entry["shared_bytes"]) != shape:
                return None
    return entries


@cache
def _digest(kernel: Kernel) -> str:
    try:
        return kernel.digest()
    except OSError:  # sources that cannot be read match nothing
        return ""


@cache
def driver_problem() -> str | None:
    """Why this machine's driver cannot load the library's machine code; asked once."""
    library = load()
    assert isinstance(library, Library)
    try:
        library.module.get_function("driver_version")()
    except RuntimeError as error:  # too old, or none at all
        return str(error)
    return None


_ARGUMENTS = {"cuda": 0, "cute": 1, "triton": 2}  # enum class Arguments of csrc/common/cubin.h


def open_plan(kernel: Kernel, config: Any, binaries: list[tuple[int | bytes, Binary]]) -> int:
    """A handle of a kernel's machine code: per variant an index into the library or a cubin."""
    library = load()
    assert isinstance(library, Library)
    return int(
        library.module.get_function("open_plan")(
            f"{kernel.op}: route {kernel.name!r} with {config}",
            [_ARGUMENTS[kernel.maker(config, v)[0].language] for v in kernel.variants],
            [code for code, _ in binaries],
            [binary.symbol for _, binary in binaries],
            [binary.threads for _, binary in binaries],
            [binary.shared_bytes for _, binary in binaries],
            list(kernel.tile(config)),
        )
    )


def function(name: str) -> Any:
    """An entry of the loaded library."""
    library = load()
    assert isinstance(library, Library)
    return library.module.get_function(name)


def forget() -> None:
    """Look at the files again; plans that are open stay."""
    manifest.cache_clear()
    load.cache_clear()
    driver_problem.cache_clear()
    _digest.cache_clear()
