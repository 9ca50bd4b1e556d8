"""What a package does in an evaluator's process: compile, load, choose, launch.

This goes into packages as text (`contest.flatten`): it works on plain data, and of this package
takes the way to nvcc alone. Host code is the library's own, compiled for one operator: a package
launches exactly as `core.compiled` does. TVM-FFI, which it binds to, is what flashinfer-bench
itself needs.
"""

from __future__ import annotations

import atexit
import base64
import hashlib
import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastkernels.core.toolchain import cuda_include, find_nvcc

CXX_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden")
LINK_FLAGS = ("-shared", "-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wl,-z,defs")
# Cubins are handed over when a plan is opened; the library itself embeds none.
NO_BLOBS = """#include <cstdint>
struct FastkernelsBlob { const unsigned char* data; uint64_t size; };
extern "C" {
extern const FastkernelsBlob fastkernels_blobs[];
extern const uint64_t fastkernels_num_blobs;
const FastkernelsBlob fastkernels_blobs[1] = {};
const uint64_t fastkernels_num_blobs = 0;
}
"""


class Compiled(NamedTuple):
    """The loaded host library; per plan its variants: (cubin, symbol, threads, shared bytes)."""

    library: Any
    plans: list[list[tuple[bytes, str, int, int]]]


def serve(
    table: Sequence[tuple[Mapping[str, tuple[int, int]], tuple[Any, ...]]],
    sizes: Mapping[str, int],
    inputs: Any,
    outputs: tuple[torch.Tensor, ...],
) -> None:
    """Launch what stands beside the first box of the table that holds the sizes: a function, and
    what it is given before inputs and outputs."""
    for box, (launch, *bound) in table:
        if all(low <= sizes[name] <= high for name, (low, high) in box.items()):
            launch(*bound, inputs, outputs)
            return
    raise RuntimeError(f"no entry of the table holds {dict(sizes)}")


# ---- compiling ----------------------------------------------------------------------------------


def compile_package(
    sources: Mapping[str, str], plans: Sequence[Mapping[str, Any]], arch: str
) -> Compiled:
    """Host library and machine code, compiled or found where an earlier process left them."""
    import tvm_ffi

    what = [sources, plans, arch, find_nvcc().version, tvm_ffi.__version__]
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]
    root = _cache_folder()
    kept = root / key
    if not kept.is_dir():
        scratch = Path(tempfile.mkdtemp(dir=root, prefix="building-"))
        try:
            _compile_into(scratch, sources, plans, arch)
            os.rename(scratch, kept)
        except OSError:  # another process was faster
            if not kept.is_dir():
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    facts = json.loads((kept / "plans.json").read_text())
    return Compiled(
        tvm_ffi.load_module(str(kept / "library.so")),
        [[((kept / name).read_bytes(), *rest) for name, *rest in plan] for plan in facts],
    )


def _cache_folder() -> Path:
    """Beside what flashinfer-bench builds: its isolated runner imports a package once per workload
    and deletes the sources every time."""
    try:
        asked = os.environ.get("FIB_CACHE_PATH") or "~/.cache/flashinfer_bench/cache"
        folder = Path(asked).expanduser() / "fastkernels"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # read-only, or nobody's home
        folder = Path(tempfile.mkdtemp(prefix="fastkernels-contest-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder


def _compile_into(
    folder: Path, sources: Mapping[str, str], plans: Sequence[Mapping[str, Any]], arch: str
) -> None:
    for name, text in sources.items():
        path = folder / "sources" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    codes = {_identity(code): code for plan in plans for code in plan["variants"]}
    nvcc = find_nvcc().path
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        library = pool.submit(compile_library, folder / "sources", folder / "library.so")
        running = {
            key: pool.submit(_compile_cuda, folder, code, nvcc)
            for key, code in codes.items()
            if "flags" in code
        }
        made = {key: _compile_python(folder, c, arch) for key, c in codes.items() if "module" in c}
        made |= {key: future.result() for key, future in running.items()}
        library.result()
    facts: list[list[Any]] = []
    for plan in plans:
        facts.append([])
        for code in plan["variants"]:
            cubin, *rest = made[_identity(code)]
            name = hashlib.sha256(cubin).hexdigest()[:16] + ".cubin"
            (folder / name).write_bytes(cubin)
            facts[-1].append([name, *rest])
    (folder / "plans.json").write_text(json.dumps(facts))


def _identity(code: Mapping[str, Any]) -> str:
    return json.dumps(code, sort_keys=True)


def _compile_cuda(folder: Path, code: Mapping[str, Any], nvcc: Path) -> tuple[bytes, str, int, int]:
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch, "kernel.cubin")
        source = folder / "sources" / code["source"]
        _run([nvcc, *shlex.split(code["flags"]), "-I", folder / "sources", "-o", target, source])
        return target.read_bytes(), code["symbol"], code["threads"], code["shared_bytes"]


def _compile_python(
    folder: Path, code: Mapping[str, Any], arch: str
) -> tuple[bytes, str, int, int]:
    """Triton or CuTe DSL: the module compiles itself; both read its source from the file."""
    sys.path.insert(0, str(folder / "sources"))
    try:
        module = importlib.import_module(code["module"])
        configs = importlib.import_module(code["config_module"])
    finally:
        sys.path.remove(str(folder / "sources"))
    config = getattr(configs, code["config"])(**code["knobs"])
    cubin, symbol, threads, shared_bytes = module.compile(config, arch, code["variant"])
    return cubin, symbol, threads, shared_bytes


def compile_library(sources: Path, target: Path) -> None:
    """The launchers: every .cc below `sources`, linked to TVM-FFI."""
    from tvm_ffi import libinfo

    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    (sources / "common" / "no_blobs.cc").write_text(NO_BLOBS)
    # No path of this machine stands in the code's messages.
    command: list[str | Path] = [*compiler, *CXX_FLAGS, f"-ffile-prefix-map={sources}=csrc"]
    command += ['-DFASTKERNELS_VERSION="contest"', "-I", sources]
    for folder in (
        libinfo.find_include_path(), libinfo.find_dlpack_include_path(), cuda_include(find_nvcc())
    ):  # fmt: skip
        command += ["-isystem", folder]
    units = sorted(sources.glob("**/*.cc"))
    with tempfile.TemporaryDirectory() as scratch:
        objects = [Path(scratch, f"{number}.o") for number in range(len(units))]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            pairs = zip(units, objects, strict=True)
            list(pool.map(lambda pair: _run([*command, "-c", pair[0], "-o", pair[1]]), pairs))
        library = Path(libinfo.find_libtvm_ffi())
        _run([*compiler, *LINK_FLAGS, *objects, library, "-ldl", "-o", target])


def _run(command: Sequence[str | Path]) -> None:
    # Elsewhere than in the evaluator's folder: nvcc leaves files where it runs.
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            command, cwd=scratch, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    if done.returncode != 0:
        words = shlex.join(map(str, command))
        raise RuntimeError(f"{words} failed ({done.returncode})\n{done.stdout}{done.stderr}")


def unpack_package(
    library: str, cubins: Sequence[str], plans: Sequence[Mapping[str, Any]]
) -> Compiled:
    """What `compile_package` would give, from text (`encode`). Nothing is compiled."""
    import tvm_ffi

    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(decode(library))
        file.flush()
        module = tvm_ffi.load_module(file.name)  # stays mapped when the file is gone
    code = [decode(text) for text in cubins]
    return Compiled(module, [[(code[i], *rest) for i, *rest in plan["variants"]] for plan in plans])


def decode(text: str) -> bytes:
    """From base 85 of zlib; white space does not count."""
    return zlib.decompress(base64.b85decode("".join(text.split())))


# ---- launching ----------------------------------------------------------------------------------


class Kernels:
    """The plans of one operator. They are opened on a device at their first use: that needs a
    driver, and an import must not."""

    def __init__(
        self,
        op: str,
        capability: tuple[int, int],
        plans: Sequence[Mapping[str, Any]],
        compiled: Compiled,
    ) -> None:
        self.op, self.capability, self.plans, self.compiled = op, capability, plans, compiled
        self.entry = compiled.library.get_function(op)
        self.handles: dict[int, int] = {}
        self.loaded: set[tuple[int, int]] = set()

    def launch(
        self, index: int, call: Callable[..., bool], inputs: Any, outputs: tuple[torch.Tensor, ...]
    ) -> None:
        """A problem to plan `index`, through the operator's `call` (routes/library.py)."""
        device = outputs[0].device
        if (index, device.index) not in self.loaded:
            self._load(index, device)
        if not call(self.entry, self.handles[index], inputs, outputs, None):
            raise RuntimeError(
                f"{self.plans[index]['label']}: nothing was launched: the arguments are not those "
                "of the definition, or too large"
            )

    def _load(self, index: int, device: torch.device) -> None:
        wanted = ".".join(map(str, self.capability))
        if device.type != "cuda":
            raise RuntimeError(f"{self.op}: tensors on {device}, expected a GPU of {wanted}")
        found = torch.cuda.get_device_capability(device)
        if found != self.capability:
            raise RuntimeError(
                f"{self.op}: {device} has compute capability {found[0]}.{found[1]}, this package "
                f"is for {wanted}"
            )
        if index not in self.handles:
            plan, code = self.plans[index], self.compiled.plans[index]
            self.handles[index] = self.compiled.library.get_function("open_plan")(
                plan["label"],
                list(plan["arguments"]),
                *(list(column) for column in zip(*code, strict=True)),
                list(plan["tile"]),
            )
        self.compiled.library.get_function("load_plan")(self.handles[index], device.index)
        self.loaded.add((index, device.index))


def launch_torch(
    launch: Callable[..., None], config: Any, inputs: Any, outputs: tuple[torch.Tensor, ...]
) -> None:
    """A problem to a route of torch operations, in float32 whatever the caller's autocast says."""
    kind = outputs[0].device.type
    with torch.no_grad(), torch.autocast(kind, enabled=False):
        launch(inputs, outputs, None, config)


def zero_empty_sequences(new_state: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    """The contest's definition of gdn_prefill writes zeros as the state after an empty sequence,
    the library keeps the state before it. A pass over `new_state`, since nothing synchronises."""
    is_empty = cu_seqlens[1:] <= cu_seqlens[:-1]
    new_state.masked_fill_(is_empty[:, None, None, None], 0.0)
