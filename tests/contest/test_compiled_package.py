"""Packages whose table names compiled kernels: what they compile, and what they launch.

A fake driver takes the GPU's place: host library, choice of a kernel, grid and parameters are the
package's own. That kernels compute what they should is for the GPU's test at the end.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from fastkernels import catalog
from fastkernels.contest.definition import contest_axes
from fastkernels.contest.flatten import flatten
from fastkernels.contest.package import (
    PackError,
    encode,
    host_sources,
    pack,
    package_sources,
)
from fastkernels.contest.standalone import compile_library, decode
from fastkernels.core import archs, dispatch, toolchain
from fastkernels.core.device import named_device
from fastkernels.ops.gdn_decode.kernels import KERNELS
from fastkernels.testing.compare import clone
from tests.contest.packages import arguments, entry_of, poisoned_outputs, user_table

OP = "gdn_decode"
NAMES = ("q", "k", "v", "state", "A_log", "a", "dt_bias", "b", "output", "new_state")

# Tensors of a CPU that say they lie on a GPU, to the library alone.
LAUNCH = """
import ctypes, importlib.util, json, sys
import torch
torch.cuda.get_device_capability = lambda device=None: CAPABILITY
spec = importlib.util.spec_from_file_location("main", ENTRY)
module = importlib.util.module_from_spec(spec)
sys.modules["main"] = module
spec.loader.exec_module(module)
pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
class OnGpu:
    device = torch.device("cuda", 0)
    def __init__(self, tensor):
        self.tensor, self.shape = tensor, tensor.shape
    def __dlpack_device__(self):
        return (2, 0)
    def __dlpack__(self, **_):
        capsule = torch.utils.dlpack.to_dlpack(self.tensor)
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8).value = 2
        return capsule
addresses = []
for batch in BATCHES:
    shapes = {
        "q": (batch, 1, 4, 128), "k": (batch, 1, 4, 128), "v": (batch, 1, 8, 128),
        "state": (batch, 8, 128, 128), "A_log": (8,), "a": (batch, 1, 8), "dt_bias": (8,),
        "b": (batch, 1, 8), "output": (batch, 1, 8, 128), "new_state": (batch, 8, 128, 128),
    }
    is_float = ("state", "new_state", "A_log", "dt_bias")
    t = {
        name: torch.empty(shape, dtype=torch.float32 if name in is_float else torch.bfloat16)
        for name, shape in shapes.items()
    }
    given = [OnGpu(t[name]) for name in shapes]
    module.run(*given[:8], 0.25, *given[8:])
    addresses.append([x.data_ptr() for x in t.values()])
sums = [list(checksums(plan)) for plan in module.KERNELS.compiled.plans]
print(json.dumps({"addresses": addresses, "sums": sums}))
"""

CHECKSUMS = """
def checksums(plan):
    for cubin, *_ in plan:
        end, total = int.from_bytes(cubin[40:48], "little"), 14695981039346656037
        for byte in cubin[:end]:
            total = (total ^ byte) * 1099511628211 % 2**64
        yield f"{total:x}"
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where packages of this module keep what they compiled."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1 that only writes down what it should launch."""
    folder = tmp_path_factory.mktemp("driver")
    include = toolchain.cuda_include(toolchain.find_nvcc())
    source = Path(__file__).with_name("fake_driver.cc")
    target = folder / "libcuda.so.1"
    command: list[str | Path] = ["g++", "-shared", "-fPIC", "-isystem", include, source]
    subprocess.run([*command, "-o", target], check=True)
    return folder


@pytest.fixture(scope="module")
def ready_compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in for g++ that gives gdn_decode's launchers, compiled once for all tests here."""
    folder = tmp_path_factory.mktemp("compiler")
    for name, text in host_sources(OP).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    compile_library(folder, folder / "library.so")
    script = folder / "g++"
    script.write_text(f'#!/bin/sh\nfor target; do :; done\ncp {folder}/library.so "$target"\n')
    script.chmod(0o755)
    return script


def python(
    script: str, folder: Path, cache: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**os.environ, "FIB_CACHE_PATH": str(cache), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.toolchain
@pytest.mark.parametrize("embed", [False, True], ids=["sources", "embedded"])
@pytest.mark.parametrize("arch", archs.ARCHS)
def test_a_package_launches_what_the_table_names(
    arch: str,
    embed: bool,
    driver: Path,
    ready_compiler: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", str(ready_compiler))
    entry, log = tmp_path / "main.py", tmp_path / "log"
    entry.write_text(entry_of(pack(OP, arch, "a", "b", embed)))
    batches = sorted({axes["batch_size"] for axes in contest_axes(OP)})
    values = {"CAPABILITY": archs.ARCHS[arch].capability, "ENTRY": str(entry), "BATCHES": batches}
    script = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    environment = {"LD_LIBRARY_PATH": str(driver), "FAKE_DRIVER_LOG": str(log)}
    if embed:  # nothing may be compiled
        environment |= {"CXX": "/bin/false", "NVCC_PREPEND_FLAGS": "--no-such-flag"}
    done = python(script + CHECKSUMS + LAUNCH, tmp_path, cache, environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    launches = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(launches) == len(batches)

    operator = catalog.operator(OP)
    product = next(p for p, info in archs.PRODUCTS.items() if info.arch == arch)
    kernels = {kernel.name: kernel for kernel in KERNELS}
    seen: dict[Any, list[str]] = {}
    for batch, launch, addresses in zip(batches, launches, found["addresses"], strict=True):
        key = dispatch.key_for(operator, product, "functional", {"batch_size": batch})
        table, _ = dispatch.find_table(operator, named_device(product))
        assert table is not None
        hit = table.lookup(dict(key.axes), "functional")
        assert hit is not None
        route = operator.route(hit.entry.route)
        assert route is not None
        config = route.make_config(hit.entry.config)
        rows, _ = kernels[route.name].tile(config)
        assert launch["grid"] == [8 * 128 // rows, batch, 1]
        assert launch["threads"] == 32 * config.warps
        # The kernel is the `compact` variant of the plan of this config.
        sums = next(plan for plan in found["sums"] if launch["kernel"] in plan)
        assert sums.index(launch["kernel"]) == kernels[route.name].variants.index("compact")
        assert seen.setdefault(config, sums) == sums
        _check_params(bytes.fromhex(launch["params"]), batch, addresses)
    assert len({tuple(sums) for sums in seen.values()}) == len(seen)


def _check_params(params: bytes, batch: int, addresses: list[int]) -> None:
    """csrc/gdn_decode/params.h: 12 pointers, 16 strides, 8 words."""
    words = struct.unpack("=12q16q6ifi", params)
    q, k, v, state, A_log, a, dt_bias, b, output, new_state = addresses
    assert list(words[:12]) == [q, k, v, state, A_log, a, dt_bias, b, 0, 0, output, new_state]
    slot = 8 * 128 * 128
    assert list(words[12:28]) == [
        512, 128, 512, 128, 1024, 128, slot, 128 * 128, 8, 8, 0, 0, 1024, 128, slot, 128 * 128,
    ]  # fmt: skip
    assert words[28:] == (batch, 4, 8, batch, 1, 0, 0.25, 1)


@pytest.mark.toolchain
def test_a_package_in_another_language_builds(
    ready_compiler: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(ready_compiler))
    user_table(monkeypatch, tmp_path / "tables", OP, "triton_rows")
    entry = tmp_path / "main.py"
    entry.write_text(entry_of(pack(OP, "sm90", "a", "b")))
    script = f"ENTRY = {str(entry)!r}\nCAPABILITY = (9, 0)\nBATCHES = ()\n{CHECKSUMS}{LAUNCH}"
    done = python(script, tmp_path, cache, {"PYTHONPATH": str(without_ours(tmp_path))})
    assert done.returncode == 0, done.stderr
    (sums,) = json.loads(done.stdout)["sums"]
    assert len(sums) == 2


def without_ours(folder: Path) -> Path:
    """A folder that makes an import of this package an error."""
    (folder / "shadow" / "fastkernels").mkdir(parents=True)
    (folder / "shadow" / "fastkernels" / "__init__.py").write_text("raise ImportError('ours')")
    return folder / "shadow"


COMPILE = """
import json
for code in CODES:
    cubin, symbol, threads, shared_bytes = _compile_python(Path(FOLDER), code, "sm90")
    assert cubin[:4] == b"\x7fELF" and symbol.encode() in cubin, code
    print(json.dumps([code["module"], symbol, threads]))
"""


@pytest.mark.toolchain
@pytest.mark.parametrize("language", ["triton", "cute"])
def test_triton_and_cute_go_in_as_they_are(language: str, cache: Path, tmp_path: Path) -> None:
    """Of every kernel its first variant, from the sources in a package of its own."""
    codes = []
    for operator in catalog.OPERATORS:
        kernels = import_module(f"fastkernels.ops.{operator.name}.kernels").KERNELS
        for kernel in kernels:
            if kernel.language == language:
                texts, (plan,) = package_sources(operator.name, "sm90", [(kernel, kernel.config)])
                codes.append(next(code for code in plan if "module" in code))
                for name, text in texts.items():
                    (tmp_path / "sources" / name).parent.mkdir(parents=True, exist_ok=True)
                    (tmp_path / "sources" / name).write_text(text)
    text = flatten({"fastkernels.contest.standalone": ["_compile_python"]})
    script = f"{text}\nFOLDER = {str(tmp_path)!r}\nCODES = {codes!r}\n{COMPILE}"
    done = python(script, tmp_path, cache, {"PYTHONPATH": str(without_ours(tmp_path))})
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == len(codes) >= 2


@pytest.mark.toolchain
@pytest.mark.parametrize("op", [o.name for o in catalog.OPERATORS if o.name != OP])
def test_the_launchers_of_other_operators_stand_alone(op: str, tmp_path: Path) -> None:
    """With nothing embedded and without the other operators' sources."""
    import tvm_ffi

    for name, text in host_sources(op).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    compile_library(tmp_path, tmp_path / "library.so")
    module = tvm_ffi.load_module(str(tmp_path / "library.so"))
    for function in (op, "open_plan", "load_plan"):
        assert module.get_function(function) is not None


@pytest.mark.toolchain
def test_a_package_for_gpus_says_so_on_a_cpu(
    ready_compiler: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(ready_compiler))
    entry = tmp_path / "main.py"
    entry.write_text(entry_of(pack(OP, "sm90", "a", "b")))
    script = f"""
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("main", {str(entry)!r})
module = importlib.util.module_from_spec(spec)
sys.modules["main"] = module
spec.loader.exec_module(module)
x = torch.empty(1, 1, 8, 128)
module.run(x, x, x, x, x, x, x, x, 0.1, x, x)
"""
    done = python(script, tmp_path, cache, {})
    assert "gdn_decode: tensors on cpu, expected a GPU of 9.0" in done.stderr


def test_an_embedded_package_needs_a_compiler_where_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(toolchain, "missing", lambda *_: "needed: nvcc; found: none")
    with pytest.raises(PackError, match="needed: nvcc; found: none"):
        pack(OP, "sm90", "a", "b", embed=True)


def test_embedded_bytes_come_back() -> None:
    data = bytes(range(256)) * 50
    assert decode(encode(data)) == data
    assert max(map(len, encode(data).splitlines())) < 100


# ---- on a GPU -----------------------------------------------------------------------------------

ON_GPU = """
import importlib.util, sys
import torch
spec = importlib.util.spec_from_file_location("main", ENTRY)
module = importlib.util.module_from_spec(spec)
sys.modules["main"] = module
spec.loader.exec_module(module)
assert "fastkernels" not in sys.modules
results = []
for inputs, outputs in torch.load(CALLS, map_location="cuda"):
    before = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    module.run(*inputs, *outputs)
    torch.cuda.synchronize()
    for now, then in zip(inputs, before):
        assert not isinstance(now, torch.Tensor) or torch.equal(now, then)
    results.append([x.cpu() for x in outputs])
torch.save(results, RESULTS)
"""


@pytest.mark.gpu
@pytest.mark.toolchain
@pytest.mark.parametrize("embed", [False, True], ids=["sources", "embedded"])
def test_every_workload_of_the_contest_on_a_gpu(
    embed: bool, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no nvcc, FASTKERNELS_PACKAGE may name the folder of an embedded package."""
    arch = archs.arch_name(torch.cuda.get_device_capability())
    if arch not in archs.ARCHS:
        pytest.skip(f"packages are made for {', '.join(archs.ARCHS)}, this GPU is {arch}")
    ready = os.environ.get("FASTKERNELS_PACKAGE")
    reason = toolchain.missing("cuda", arch)
    entry = tmp_path / "main.py"
    if reason is None:
        entry.write_text(entry_of(pack(OP, arch, "a", "b", embed)))
    elif embed and ready:
        entry.write_text(Path(ready, "solution", "triton", "main.py").read_text())
    else:
        pytest.skip(reason)
    module = catalog.module(OP, "inputs")
    inputs = [module.make_inputs(case) for case in module.CONTEST]
    pristine = [clone(x) for x in inputs]
    calls = [
        (arguments(OP, x), poisoned_outputs(OP, case.axes))
        for x, case in zip(inputs, module.CONTEST, strict=True)
    ]
    torch.save(calls, tmp_path / "calls.pt")
    paths = {
        "ENTRY": entry,
        "CALLS": tmp_path / "calls.pt",
        "RESULTS": tmp_path / "results.pt",
    }
    script = "".join(f"{name} = {str(path)!r}\n" for name, path in paths.items())
    done = python(script + ON_GPU, tmp_path, cache, {})
    assert done.returncode == 0, done.stderr
    reference = catalog.module(OP, "reference").reference
    results = torch.load(tmp_path / "results.pt")
    for case, x, outputs in zip(module.CONTEST, pristine, results, strict=True):
        expected = reference(x, "cuda")
        for error in (*expected.judge(tuple(outputs)), *expected.judge_official(tuple(outputs))):
            assert error.ok, f"{case}: {error}"
