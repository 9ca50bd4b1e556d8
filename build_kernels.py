"""The ahead-of-time build: machine code of every config that is promised, in one shared library.

setup.py calls `build`. Loads the declarations of `src/fastkernels` without the package itself and
without torch, compiles in processes of their own, embeds every cubin, and writes a manifest that
says what is inside and what is not, and why.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "src" / "fastkernels"
TABLES = ROOT / "dispatch_tables"

if "fastkernels" not in sys.modules:
    # Importing the package would import torch; under this one its modules are found all the same.
    sys.modules["fastkernels"] = types.ModuleType("fastkernels")
    sys.modules["fastkernels"].__path__ = [str(PACKAGE)]

from fastkernels.core import toolchain  # noqa: E402
from fastkernels.core.archs import ARCHS  # noqa: E402
from fastkernels.core.kernels import Binary, Kernel, csrc_folder, knobs  # noqa: E402
from fastkernels.version import __version__  # noqa: E402

SCHEMA = 1
LIBRARY = "libfastkernels.so"
MANIFEST = "manifest.json"
HOST = "host library"
# Importing CuTe DSL or Triton takes seconds, so a process compiles several; not all of them, so
# that every core has work.
JOBS_PER_PROCESS = 6
SLOWEST_FIRST = ("cute", "triton", "cuda")

CXX_FLAGS = [
    "-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden",
    "-ffunction-sections", "-fdata-sections", "-Wall", "-Wextra", "-Werror",
]  # fmt: skip
# No run path: tvm_ffi is loaded, and found by its name, before our library is. The C++ runtime is
# inside and hidden: the library must not care which one torch brings. libgcc stays outside: built
# in, it would need glibc 2.35, which RHEL 9 lacks; and one unwinder per process is enough.
LINK_FLAGS = [
    "-shared", f"-Wl,-soname,{LIBRARY}", "-static-libstdc++",
    "-Wl,-z,defs", "-Wl,-z,relro", "-Wl,-z,now", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections",
    "-Wl,-s", "-Wl,--version-script=exports",
]  # fmt: skip
EXPORTS = "{ global: __tvm_ffi_*; local: *; };\n"


class BuildError(Exception):
    """The sources contradict one another, or a release would lack something."""


@dataclass(frozen=True)
class Job:
    """One entry point to compile."""

    kernel: Kernel
    config: Any
    arch: str
    variant: str

    @property
    def what(self) -> str:
        """Its name in the manifest's list of what is missing; a config counts with all variants."""
        k = self.kernel
        return f"{k.op}: route {k.name!r} ({k.language}) with {knobs(self.config)} for {self.arch}"

    @property
    def maker(self) -> Kernel:
        """The kernel whose machine code it is."""
        return self.kernel.maker(self.config, self.variant)[0]

    def order(self) -> tuple[Any, ...]:
        k = self.kernel
        position = list(ARCHS).index(self.arch)
        config = json.dumps(knobs(self.config), sort_keys=True)
        return k.op, k.name, position, config, k.variants.index(self.variant)


# ---- what to build ------------------------------------------------------------------------------


def declared() -> list[Kernel]:
    """Every kernel of every operator that has any."""
    kernels: list[Kernel] = []
    for path in sorted(PACKAGE.glob("ops/[!_]*/kernels/__init__.py")):
        module = importlib.import_module(f"fastkernels.ops.{path.parent.parent.name}.kernels")
        kernels += module.KERNELS
    return kernels


def collect(kernels: Iterable[Kernel], tables: Path = TABLES) -> list[Job]:
    """Each kernel's default config for all its architectures, and what the tables name."""
    jobs: dict[Job, None] = {}  # a set that keeps the order
    for kernel in kernels:
        wanted = [(arch, kernel.config) for arch in kernel.archs]
        for path in sorted((tables / kernel.op).glob("*.toml")):
            if path.name != "pins.toml":  # read by the tuner alone
                wanted += _named(path, kernel)
        for arch, config in wanted:
            for variant in kernel.variants:
                jobs[Job(kernel, config, arch, variant)] = None
    return sorted(jobs, key=Job.order)


def _named(path: Path, kernel: Kernel) -> Iterator[tuple[str, Any]]:
    """What a table asks of a kernel. That its routes exist is the table tests' business."""
    table = _read_toml(path)
    fallbacks = table.get("fallback", [])
    entries = [*table.get("regime", []), *([fallbacks] if type(fallbacks) is dict else fallbacks)]
    for entry in entries:
        if entry["route"] == kernel.name:
            arch = table["device"]["arch"]
            if arch not in kernel.archs:
                raise BuildError(f"{path}: route {kernel.name!r} is not for {arch}")
            try:
                yield arch, _config(kernel, entry.get("config"))
            except ValueError as error:
                raise BuildError(f"{path}: route {kernel.name!r}: {error}") from error


def _config(kernel: Kernel, named: dict[str, Any] | None) -> Any:
    if named is None:
        return kernel.config
    defaults = knobs(kernel.config)
    if set(named) != set(defaults):
        raise ValueError(f"its config has the knobs {sorted(named)}, expected {sorted(defaults)}")
    for name, value in named.items():
        if type(value) is not type(defaults[name]):  # True would count as 1 otherwise
            raise ValueError(
                f"knob {name!r} is {value!r}, expected {type(defaults[name]).__name__}"
            )
    return type(kernel.config)(**named)


def _read_toml(path: Path) -> dict[str, Any]:
    # Late: below 3.11 tomli is a requirement of the build, unknown while setup.py states them.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    return table


def requirements() -> list[str]:
    """What an isolated build needs beside setuptools. Nothing here may bring torch."""
    needed = [toolchain.TVM_FFI.requirement]
    needed += [package.pin for package in toolchain.PACKAGES.values()]
    if sys.version_info < (3, 11):
        needed.append("tomli>=2,<3")
    try:
        toolchain.find_nvcc()
    except toolchain.ToolchainError:
        needed += toolchain.NVCC_WHEELS
    return needed


# ---- the build ----------------------------------------------------------------------------------


def build(
    target: Path,
    cache: Path,
    release: bool = False,
    version: str = __version__,
    kernels: Iterable[Kernel] | None = None,
    tables: Path = TABLES,
) -> dict[str, Any]:
    """Writes library and manifest into `target`, and returns the manifest.

    Machine code and objects are kept in `cache` by all that they depend on. `release`: raises
    BuildError where anything is missing, and leaves `target` alone.
    """
    start = time.perf_counter()
    jobs = collect(declared() if kernels is None else kernels, tables)
    missing: dict[str, str] = {}
    (cache / "host").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fastkernels-build-") as name:
        scratch = Path(name)
        objects = _host_objects(cache / "host", version, missing)
        if HOST in missing:  # nothing could hold the kernels
            missing.update((job.what, f"there is no {HOST}") for job in jobs)
            binaries: dict[Job, Binary] = {}
        else:
            binaries = _compile(jobs, cache, scratch, missing)
        binaries = {job: made for job, made in binaries.items() if job.what not in missing}
        blobs = {made.cubin: index for index, made in enumerate(_distinct(binaries.values()))}
        library = None
        if HOST not in missing:
            library = _link(objects, list(blobs), scratch, missing)
        if library is None:
            binaries = {}
        order = dict.fromkeys([HOST, *(job.what for job in jobs)])
        missing = {what: missing[what] for what in order if what in missing}
        manifest = {
            "schema": SCHEMA,
            "version": version,
            "library": library and {
                "file": LIBRARY,
                "sha256": hashlib.sha256(library).hexdigest(),
                "bytes": len(library),
                "sources_sha256": toolchain.host_digest(),
            },
            "versions": _versions(),
            "min_driver_cuda": list(toolchain.MINIMUM_DRIVER_CUDA),
            "archs": [arch for arch in ARCHS if any(job.arch == arch for job in binaries)],
            "kernels": [_entry(job, made, blobs[made.cubin]) for job, made in binaries.items()],
            "missing": [{"what": what, "reason": reason} for what, reason in missing.items()],
        }  # fmt: skip
        if release and missing:
            lines = [f"\n  {what}: {reason}" for what, reason in missing.items()]
            raise BuildError(f"{len(lines)} missing in a release:{''.join(lines)}")
        _write(target, library, manifest)
    _report(manifest, time.perf_counter() - start)
    return manifest


def _entry(job: Job, made: Binary, index: int) -> dict[str, Any]:
    return {
        "op": job.kernel.op,
        "route": job.kernel.name,
        "language": job.maker.language,
        "config": knobs(job.config),
        "arch": job.arch,
        "variant": job.variant,
        "binary": index,
        "symbol": made.symbol,
        "threads": made.threads,
        "shared_bytes": made.shared_bytes,
        "tile": list(job.kernel.tile(job.config)),
        "sources_sha256": job.maker.digest(),
    }


def _distinct(binaries: Iterable[Binary]) -> list[Binary]:
    """Two configs or variants may compile to the same code."""
    return list({made.cubin: made for made in binaries}.values())


def _write(target: Path, library: bytes | None, manifest: dict[str, Any]) -> None:
    """Whole files only, the manifest last: a process that reads meanwhile sees a mismatch at worst,
    and one that has the old library mapped keeps it."""
    target.mkdir(parents=True, exist_ok=True)
    contents = {MANIFEST: json.dumps(manifest, indent=1).encode() + b"\n"}
    if library is None:
        (target / LIBRARY).unlink(missing_ok=True)
    else:
        contents = {LIBRARY: library, **contents}
    for name, data in contents.items():
        _replace(target / name, data)


def _replace(path: Path, data: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


def _report(manifest: dict[str, Any], seconds: float) -> None:
    for entry in manifest["missing"]:
        print(f"fastkernels: not built: {entry['what']}: {entry['reason']}", file=sys.stderr)
    size = f"{manifest['library']['bytes'] / 1e6:.1f} MB" if manifest["library"] else "no library"
    print(
        f"fastkernels: {size}, {len(manifest['kernels'])} entry points for "
        f"{', '.join(manifest['archs']) or 'no architecture'}, {len(manifest['missing'])} missing, "
        f"{seconds:.1f} s",
        flush=True,
    )


def _versions() -> dict[str, str]:
    found = dict(toolchain.versions())
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["tvm_ffi"] = metadata.version(toolchain.TVM_FFI.name)
    if shutil.which(_cxx()[0]):
        found["cxx"] = _cxx_version()
    return found


# ---- device code --------------------------------------------------------------------------------


def _compile(
    jobs: list[Job], cache: Path, scratch: Path, missing: dict[str, str]
) -> dict[Job, Binary]:
    """Machine code of all jobs that can be compiled; what could not is added to `missing`."""
    made: dict[Job, Binary] = {}
    keys = {job: toolchain.identity(job.kernel, job.config, job.arch, job.variant) for job in jobs}
    batches: dict[tuple[int, str], list[Job]] = {}
    for job in jobs:
        kept = _kept(cache / keys[job])
        reason = toolchain.missing(job.maker.language, job.arch)
        if kept is not None:
            made[job] = kept
        elif reason is not None:
            missing.setdefault(job.what, reason)
        else:
            place = SLOWEST_FIRST.index(job.maker.language)
            batches.setdefault((place, job.arch), []).append(job)
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",  # the same build with and without a GPU
        "TRITON_DISABLE_LINE_INFO": "1",  # it names folders of this machine
        "TRITON_CACHE_DIR": str(scratch / "triton"),  # nothing stale, nothing left behind
        "CUTE_DSL_CACHE_DIR": str(scratch / "cute"),
    }
    with ThreadPoolExecutor(_num_cores()) as pool:
        running: list[tuple[list[Job], Future[dict[str, str]]]] = []
        for _, batch in sorted(batches.items()):
            for first in range(0, len(batch), JOBS_PER_PROCESS):
                chunk = batch[first : first + JOBS_PER_PROCESS]
                named = {keys[job]: job for job in chunk}
                running.append((chunk, pool.submit(_run_worker, named, cache, environment)))
        for chunk, future in running:
            reasons = future.result()
            for job in chunk:
                kept = _kept(cache / keys[job])
                if keys[job] in reasons or kept is None:
                    missing.setdefault(job.what, reasons.get(keys[job], "cannot be kept"))
                else:
                    made[job] = kept
    return {job: made[job] for job in jobs if job in made}


def _run_worker(jobs: dict[str, Job], cache: Path, environment: dict[str, str]) -> dict[str, str]:
    """Compiles in another process; gives a reason for each key that failed."""
    request = [
        {
            "key": key,
            "op": job.kernel.op,
            "name": job.kernel.name,
            "config": knobs(job.config),
            "arch": job.arch,
            "variant": job.variant,
        }
        for key, job in jobs.items()
    ]
    with tempfile.TemporaryDirectory(prefix="fastkernels-worker-") as folder:
        answer = Path(folder, "answer.json")
        done = subprocess.run(
            [sys.executable, __file__, str(cache), str(answer)],
            cwd=folder,  # compilers leave dumps where they run
            env=environment,
            input=json.dumps(request),
            capture_output=True,
            text=True,
        )
        reasons: dict[str, str] = json.loads(answer.read_text()) if answer.is_file() else {}
    if done.returncode != 0:
        words = f"the compiling process ended with {done.returncode}: {done.stderr[-2000:]}"
        reasons.update((key, words) for key in jobs if key not in reasons)
    return {key: reason for key, reason in reasons.items() if reason}


def _work(cache: Path, answer: Path) -> None:
    """The other process: compiles what stdin names; notes each outcome, lest a crash loses it."""
    kernels = {(kernel.op, kernel.name): kernel for kernel in declared()}
    reasons: dict[str, str] = {}
    for job in json.load(sys.stdin):
        kernel = kernels[job["op"], job["name"]]
        config = type(kernel.config)(**job["config"])
        try:
            made = toolchain.compile_kernel(kernel, config, job["arch"], job["variant"])
        except toolchain.ToolchainError as error:
            reasons[job["key"]] = error.reason
        else:
            _keep(cache / job["key"], made)
            reasons[job["key"]] = ""
        answer.write_text(json.dumps(reasons))


def _keep(path: Path, made: Binary) -> None:
    facts = {**made._asdict(), "cubin": hashlib.sha256(made.cubin).hexdigest()}
    _replace(path.with_suffix(".cubin"), made.cubin)
    _replace(path.with_suffix(".json"), json.dumps(facts).encode())


def _kept(path: Path) -> Binary | None:
    try:
        facts = json.loads(path.with_suffix(".json").read_bytes())
        cubin = path.with_suffix(".cubin").read_bytes()
    except (OSError, ValueError):
        return None
    if hashlib.sha256(cubin).hexdigest() != facts["cubin"]:
        return None
    return Binary(**{**facts, "cubin": cubin})


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


# ---- host code ----------------------------------------------------------------------------------


def _host_objects(cache: Path, version: str, missing: dict[str, str]) -> list[Path]:
    """The objects of csrc/**/*.cc; a reason in `missing` where they cannot be made."""
    reason = _host_reason()
    if reason is not None:
        missing[HOST] = reason
        return []
    tvm_ffi = _tvm_ffi_folder()
    flags = [*CXX_FLAGS, f'-DFASTKERNELS_VERSION="{version}"']
    includes = [tvm_ffi / "include", tvm_ffi / "3rdparty" / "dlpack" / "include", _cuda_include()]
    identity = json.dumps([toolchain.host_digest(), flags, _versions()], sort_keys=True)
    objects, commands = [], []
    for source in sorted(csrc_folder().glob("**/*.cc")):
        where = source.relative_to(csrc_folder()).as_posix()
        key = hashlib.sha256(f"{identity}\0{where}".encode()).hexdigest()
        objects.append(cache / f"{key}.o")
        if not objects[-1].is_file():
            isystem = [part for folder in includes for part in ("-isystem", str(folder))]
            # No path of this machine stands in the code's messages.
            isystem.append(f"-ffile-prefix-map={tvm_ffi}=tvm_ffi")
            commands.append([*_cxx(), *flags, "-I", ".", *isystem, "-c", where, "-o"])
    if not objects:
        missing[HOST] = f"no source in {csrc_folder()}"
    todo = [path for path in objects if not path.is_file()]
    with ThreadPoolExecutor(_num_cores()) as pool:
        for error in pool.map(_compile_host, commands, todo):
            if error is not None:
                missing.setdefault(HOST, error)
    return objects


def _compile_host(command: list[str], target: Path) -> str | None:
    temporary = target.with_suffix(f".{os.getpid()}.o")
    done = subprocess.run([*command, temporary], cwd=csrc_folder(), capture_output=True, text=True)
    if done.returncode != 0:
        return f"{shlex.join(command)} failed ({done.returncode})\n{done.stdout}{done.stderr}"
    os.replace(temporary, target)
    return None


def _link(
    objects: list[Path], blobs: list[bytes], scratch: Path, missing: dict[str, str]
) -> bytes | None:
    """The library's contents."""
    for index, cubin in enumerate(blobs):
        (scratch / f"{index}.cubin").write_bytes(cubin)
    (scratch / "blobs.s").write_text(_assembly(len(blobs)))
    (scratch / "exports").write_text(EXPORTS)
    tvm_ffi = _tvm_ffi_folder() / "lib"
    done = subprocess.run(
        [
            *_cxx(), *LINK_FLAGS, *map(str, objects), "blobs.s", f"-L{tvm_ffi}", "-ltvm_ffi",
            "-ldl", "-o", LIBRARY,
        ],
        cwd=scratch,
        capture_output=True,
        text=True,
    )  # fmt: skip
    if done.returncode != 0:
        missing[HOST] = f"linking failed ({done.returncode})\n{done.stdout}{done.stderr}"
        return None
    return (scratch / LIBRARY).read_bytes()


def _assembly(num_blobs: int) -> str:
    """`struct FastkernelsBlob { data, size }` per cubin; see csrc/common/cubin.cc."""
    indices = range(num_blobs)
    table = [f"    .quad .Lblob{i}, .Lend{i} - .Lblob{i}" for i in indices]
    contents = [f'    .balign 16\n.Lblob{i}:\n    .incbin "{i}.cubin"\n.Lend{i}:' for i in indices]
    lines = [
        "    .section .rodata.fastkernels_cubins,\"a\",@progbits",
        *contents,
        # Addresses are filled in by the loader, which then makes the section read-only.
        "    .section .data.rel.ro.fastkernels_blobs,\"aw\",@progbits",
        "    .balign 16",
        "    .globl fastkernels_blobs",
        "    .hidden fastkernels_blobs",
        "fastkernels_blobs:",
        *(table or ["    .quad 0, 0"]),
        "    .section .rodata.fastkernels_num_blobs,\"a\",@progbits",
        "    .balign 8",
        "    .globl fastkernels_num_blobs",
        "    .hidden fastkernels_num_blobs",
        "fastkernels_num_blobs:",
        f"    .quad {num_blobs}",
        "    .section .note.GNU-stack,\"\",@progbits",  # the stack needs no execution
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _host_reason() -> str | None:
    cxx = _cxx()[0]
    if shutil.which(cxx) is None:
        return f"needed: a C++ compiler; found: no {cxx} on PATH; set CXX"
    reason = toolchain.missing_package(toolchain.TVM_FFI)
    if reason is None and _cuda_include() is None:
        reason = "needed: cuda.h; found: neither in a CUDA toolkit nor in a package"
    return reason


def _cxx() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def _cxx_version() -> str:
    done = subprocess.run([*_cxx(), "--version"], capture_output=True, text=True)
    return (done.stdout.splitlines() or ["unknown"])[0]


def _package_folder(name: str) -> Path | None:
    """Where a package lies; importing tvm_ffi would import torch where there is one."""
    spec = importlib.util.find_spec(name)
    folders = list((spec and spec.submodule_search_locations) or ())
    return Path(folders[0]) if folders else None


def _tvm_ffi_folder() -> Path:
    folder = _package_folder("tvm_ffi")
    assert folder is not None  # _host_reason has looked
    return folder


def _cuda_include() -> Path | None:
    """A folder with cuda.h: only types and names of the driver, any CUDA from 12.8 has them."""
    candidates = []
    with contextlib.suppress(toolchain.ToolchainError):
        candidates.append(toolchain.cuda_include(toolchain.find_nvcc()))
    for package, below in (("nvidia", "cu13/include"), ("triton", "backends/nvidia/include")):
        folder = _package_folder(package)
        if folder is not None:
            candidates.append(folder / below)
    return next((folder for folder in candidates if (folder / "cuda.h").is_file()), None)


if __name__ == "__main__":
    _work(Path(sys.argv[1]), Path(sys.argv[2]))
