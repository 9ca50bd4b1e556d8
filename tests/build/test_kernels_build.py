"""The library of kernels as it is built: what is promised, what is missing and why; the toolchain.

Cases C94, C110 (the build's cache), C115, C116, C118. Tests without a marker need no compiler.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import build_kernels
from build_kernels import BuildError, Job, build, collect, declared
from fastkernels.core import toolchain
from fastkernels.core.archs import ARCHS
from fastkernels.core.kernels import Binary, Kernel, knobs
from fastkernels.core.toolchain import ToolchainError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
MAX_SECONDS = 600
# What the library may need of the system; C116's neighbour: a library that loads nowhere.
LIBRARIES = re.compile(r"lib(tvm_ffi|c|m|dl|gcc_s|pthread)\.so.*|ld-linux.*")
FOREIGN = re.compile(r"^(cuda|cu[A-Z]|cublas|_Z?\w*(torch|c10|at6native|ATen))")

pytestmark = pytest.mark.timeout(900)


@dataclasses.dataclass(frozen=True)
class Config:
    warps: int = 4
    hint: bool = False


def kernel(name: str = "toy_rows", language: str = "triton", **changes: Any) -> Kernel:
    fields: dict[str, Any] = {
        "op": "toy",
        "archs": ("sm90", "sm100"),
        "config": Config(),
        "source": "__init__.py",
        "tile": lambda c: (c.warps,),
    }
    if language == "cuda":
        fields["launch_shape"] = lambda c, _: (32 * c.warps, 0)
    return Kernel(name=name, language=language, **(fields | changes))


@pytest.fixture(autouse=True)
def toy_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy operator has no files."""
    digest = Kernel.digest
    monkeypatch.setattr(Kernel, "digest", lambda self: "toy" if self.op == "toy" else digest(self))


@pytest.fixture
def tables(tmp_path: Path) -> Callable[..., Path]:
    def write(entries: str, arch: str = "sm90") -> Path:
        folder = tmp_path / "tables"
        (folder / "toy").mkdir(parents=True, exist_ok=True)
        head = f'op = "toy"\n[device]\narch = "{arch}"\n'
        (folder / "toy" / f"{arch}-h200.toml").write_text(head + entries)
        return folder

    return write


# ---- what is built ------------------------------------------------------------------------------


def test_defaults_are_built_for_every_architecture_and_variant(tmp_path: Path) -> None:
    jobs = collect([kernel()], tmp_path)
    assert [(job.arch, job.variant, job.config) for job in jobs] == [
        (arch, variant, Config()) for arch in ("sm90", "sm100") for variant in ("aligned", "any")
    ]


def test_what_tables_name_is_built_once_for_their_architecture(
    tables: Callable[..., Path],
) -> None:
    folder = tables(
        """
[[regime]]
route = "toy_rows"
config = { warps = 8, hint = true }
[[regime]]
route = "toy_rows"
config = { hint = true, warps = 8 }
[[regime]]
route = "toy_rows"
config = { warps = 4, hint = false }
[[regime]]
route = "torch_other"
config = {}
[[fallback]]
route = "toy_rows"
config = { warps = 1, hint = false }
[[fallback]]
route = "toy_rows"
"""
    )
    (folder / "toy" / "pins.toml").write_text("anything = 1\n")
    jobs = collect([kernel(variants=("any",))], folder)
    assert [(job.arch, job.config.warps, job.config.hint) for job in jobs] == [
        ("sm90", 1, False),
        ("sm90", 4, False),
        ("sm90", 8, True),
        ("sm100", 4, False),
    ]


def test_one_fallback_table_counts_as_a_list(tables: Callable[..., Path]) -> None:
    folder = tables('[fallback]\nroute = "toy_rows"\nconfig = { warps = 2, hint = false }\n')
    assert {job.config.warps for job in collect([kernel()], folder)} == {2, 4}


@pytest.mark.parametrize(
    ("config", "arch", "words"),
    [
        ("{ warps = 2 }", "sm90", "expected ['hint', 'warps']"),
        ("{ warps = 2, hint = false, depth = 1 }", "sm90", "expected ['hint', 'warps']"),
        ("{ warps = true, hint = false }", "sm90", "knob 'warps' is True, expected int"),
        ("{ warps = 2, hint = false }", "sm120", "route 'toy_rows' is not for sm120"),
    ],
)
def test_a_table_that_no_kernel_can_serve_stops_the_build(
    tables: Callable[..., Path], config: str, arch: str, words: str
) -> None:
    folder = tables(f'[[fallback]]\nroute = "toy_rows"\nconfig = {config}\n', arch)
    with pytest.raises(BuildError, match=re.escape(words)) as error:
        collect([kernel()], folder)
    assert f"{arch}-h200.toml" in str(error.value)


def test_every_language_is_declared_for_every_architecture() -> None:
    """C116: what a release promises."""
    promised = {(job.kernel.language, job.arch) for job in collect(declared())}
    assert promised == {
        (language, arch) for language in ("cuda", "triton", "cute") for arch in ARCHS
    }


def test_accepted_versions_stand_in_pyproject_too() -> None:
    """C118."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    jit = {entry.partition(";")[0] for entry in project["optional-dependencies"]["jit"]}
    assert jit == {package.requirement for package in toolchain.PACKAGES.values()}
    assert toolchain.TVM_FFI.requirement in project["dependencies"]


# ---- looking for compilers ----------------------------------------------------------------------


class Machine:
    """A machine with the compilers that a test puts on it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.patch = monkeypatch
        for variable in ("CUDA_HOME", "CUDA_PATH", "CXX", "NVCC_CCBIN"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("PATH", str(folder / "path"))
        monkeypatch.setattr(toolchain, "USUAL_NVCC", folder / "usual" / "nvcc")
        monkeypatch.setattr(toolchain, "_nvidia_wheels", lambda: [folder / "nvidia"])
        (folder / "path").mkdir()

    def script(self, where: str, text: str) -> Path:
        path = self.folder / where
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    def nvcc(self, where: str, version: str) -> Path:
        text = f"Cuda compilation tools, release {version.rpartition('.')[0]}, V{version}"
        return self.script(where, f"echo '{text}'")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def complaint() -> str:
    with pytest.raises(ToolchainError) as error:
        toolchain.find_nvcc()
    message = str(error.value)
    assert message.startswith("needed: nvcc 13.0 or newer; found: ")
    assert "set CUDA_HOME" in message
    assert toolchain.missing("cuda", "sm90") == message
    assert "cuda" not in toolchain.versions()
    return message


def test_no_nvcc(machine: Machine) -> None:
    assert "found: none;" in complaint()


def test_cuda_home_pointing_nowhere(machine: Machine) -> None:
    machine.patch.setenv("CUDA_HOME", "/nowhere")
    assert "CUDA_HOME: /nowhere/bin/nvcc (no such file)" in complaint()


def test_nvcc_too_old(machine: Machine) -> None:
    """C94, C115: found and needed, also where an unknown target would fail first."""
    path = machine.nvcc("path/nvcc", "12.4.131")
    assert f"PATH: {path} (12.4.131)" in complaint()
    assert "12.4.131" in str(toolchain.missing("cuda", "sm100"))


@pytest.mark.parametrize("text", ["exit 1", "echo hello", "exec /nowhere/nvcc"])
def test_half_installed_nvcc(machine: Machine, text: str) -> None:
    machine.script("path/nvcc", text)
    assert "prints no version" in complaint()


def test_nvcc_that_does_not_start(machine: Machine) -> None:
    machine.script("home/bin/nvcc", "").chmod(0o644)
    machine.patch.setenv("CUDA_HOME", str(machine.folder / "home"))
    assert "does not start: Permission denied" in complaint()


def test_the_first_fit_nvcc_is_taken(machine: Machine) -> None:
    order = ["home/bin/nvcc", "cuda_path/bin/nvcc", "path/nvcc", "usual/nvcc"]
    order.append("nvidia/cu13/bin/nvcc")
    machine.patch.setenv("CUDA_HOME", str(machine.folder / "home"))
    machine.patch.setenv("CUDA_PATH", str(machine.folder / "cuda_path"))
    for minor, where in enumerate(reversed(order)):
        path = machine.nvcc(where, f"13.{minor}.88")
        assert toolchain.find_nvcc() == (path, f"13.{minor}.88")
    machine.nvcc(order[0], "12.9.1")
    assert toolchain.find_nvcc().path == machine.folder / order[1]


def test_nvcc_needs_a_host_compiler(machine: Machine) -> None:
    machine.nvcc("path/nvcc", "13.0.88")
    assert "no g++ on PATH" in str(toolchain.missing("cuda", "sm90"))
    machine.script("path/g++", "")
    assert toolchain.missing("cuda", "sm90") is None


def test_an_architecture_that_kernels_are_not_built_for() -> None:
    for language in ("cuda", "triton", "cute"):
        words = "kernels are built for sm90, sm100, not for sm120"
        assert toolchain.missing(language, "sm120") == words


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "needed: triton>=3.6,<4; found: none"),
        ("3.5.1", "needed: triton>=3.6,<4; found: 3.5.1"),
        ("4.0.0", "needed: triton>=3.6,<4; found: 4.0.0"),
        ("unknown", "needed: triton>=3.6,<4; found: unknown"),
        ("3.6.0+git1", None),
        ("3.10.0", None),
    ],
)
def test_a_package_out_of_range(
    monkeypatch: pytest.MonkeyPatch, found: str | None, words: str | None
) -> None:
    """C118."""

    def version(name: str) -> str:
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    reason = toolchain.missing("triton", "sm90")
    assert reason == words if words is None else str(reason).startswith(words)


def test_looking_imports_no_compiler() -> None:
    code = (
        "import sys; import build_kernels; from fastkernels.core import toolchain\n"
        "build_kernels.collect(build_kernels.declared()); toolchain.versions()\n"
        "[toolchain.missing(l, 'sm90') for l in ('cuda', 'triton', 'cute')]\n"
        "build_kernels.requirements()\n"
        "print(*{'torch', 'triton', 'cutlass', 'tvm_ffi', 'cuda'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_requirements_bring_nvcc_only_where_there_is_none(machine: Machine) -> None:
    def names() -> set[str]:
        return {re.split(r"[<>=]", entry)[0] for entry in build_kernels.requirements()}

    packages = {"apache-tvm-ffi", "triton", "nvidia-cutlass-dsl"}
    if sys.version_info < (3, 11):
        packages.add("tomli")
    assert names() > packages
    assert "nvidia-cuda-nvcc" in names()
    machine.nvcc("path/nvcc", "13.0.88")
    assert names() == packages


# ---- compiling ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("binary", "words"),
    [
        (Binary(b"PTX", "f", 32, 0), "which is no cubin"),
        (Binary(b"\x7fELF\0g\0", "f", 32, 0), "no entry point 'f'"),
        (Binary(b"\x7fELF\0f\0", "f", 32, 300000), "takes 300000 bytes of shared memory"),
        (RuntimeError("ptxas died"), "RuntimeError: ptxas died"),
    ],
)
def test_a_compile_that_fails_says_for_what(
    monkeypatch: pytest.MonkeyPatch, binary: Binary | Exception, words: str
) -> None:
    class Module:
        @staticmethod
        def compile(config: Config, arch: str, variant: str) -> Binary:
            if isinstance(binary, Exception):
                raise binary
            return binary

    monkeypatch.setattr(toolchain, "missing", lambda language, arch: None)
    monkeypatch.setattr(importlib, "import_module", lambda name: Module)
    with pytest.raises(ToolchainError, match=words) as error:
        toolchain.compile_kernel(kernel(), Config(), "sm90", "any")
    head = "toy: route 'toy_rows' (triton) with {'warps': 4, 'hint': False} for sm90, variant 'any'"
    assert str(error.value).startswith(head)
    assert words in error.value.reason
    assert "toy_rows" not in error.value.reason


def test_identity_is_by_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """C110: anything that changes the code changes the name; nothing else does."""
    cuda = kernel(language="cuda")
    monkeypatch.setattr(toolchain, "versions", lambda: {"cuda": "13.0.88"})
    first = toolchain.identity(cuda, Config(), "sm90", "any")
    assert first == toolchain.identity(cuda, Config(), "sm90", "any")
    others = {
        toolchain.identity(cuda, Config(2), "sm90", "any"),
        toolchain.identity(cuda, Config(), "sm100", "any"),
        toolchain.identity(cuda, Config(), "sm90", "aligned"),
    }
    monkeypatch.setattr(toolchain, "versions", lambda: {"cuda": "13.1.0"})
    others.add(toolchain.identity(cuda, Config(), "sm90", "any"))
    monkeypatch.setattr(toolchain, "versions", lambda: {"cuda": "13.0.88"})
    monkeypatch.setattr(Kernel, "digest", lambda self: "changed")
    others.add(toolchain.identity(cuda, Config(), "sm90", "any"))
    assert len(others) == 5
    assert first not in others


# ---- what a build with a partial toolchain says -------------------------------------------------


def cubin(job: Job) -> Binary:
    """Equal for both variants."""
    return Binary(b"\x7fELF" + f"{job.kernel.name} {job.arch}".encode(), "f", 128, 64)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host toolchain that works, and device compilers for whatever is not missing."""

    def run_worker(jobs: dict[str, Job], cache: Path, environment: Any) -> dict[str, str]:
        for key, job in jobs.items():
            build_kernels._keep(cache / key, cubin(job))
        return {}

    monkeypatch.setattr(build_kernels, "_host_objects", lambda *arguments: [])
    monkeypatch.setattr(build_kernels, "_link", lambda objects, blobs, *rest: b"".join(blobs))
    monkeypatch.setattr(build_kernels, "_run_worker", run_worker)


def no_triton(language: str, arch: str) -> str | None:
    return "no Triton" if language == "triton" else None


def test_a_partial_toolchain_is_recorded(
    host: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(toolchain, "missing", no_triton)
    kernels = [kernel(), kernel("toy_tiles", "cuda")]
    target = tmp_path / "lib"
    manifest = build(target, tmp_path / "cache", version="1.2.3", kernels=kernels, tables=tmp_path)
    assert json.loads((target / "manifest.json").read_text()) == manifest
    config = {"warps": 4, "hint": False}
    assert manifest["missing"] == [
        {"what": f"toy: route 'toy_rows' (triton) with {config} for {arch}", "reason": "no Triton"}
        for arch in ("sm90", "sm100")
    ]
    assert manifest["archs"] == ["sm90", "sm100"]
    assert manifest["version"] == "1.2.3"
    library = (target / "libfastkernels.so").read_bytes()
    assert manifest["library"]["bytes"] == len(library)
    assert manifest["library"]["sha256"] == hashlib.sha256(library).hexdigest()
    entries = manifest["kernels"]
    assert [(e["arch"], e["variant"], e["binary"]) for e in entries] == [
        ("sm90", "aligned", 0),
        ("sm90", "any", 0),
        ("sm100", "aligned", 1),
        ("sm100", "any", 1),
    ]
    assert entries[0] == {
        "op": "toy",
        "route": "toy_tiles",
        "language": "cuda",
        "config": config,
        "arch": "sm90",
        "variant": "aligned",
        "binary": 0,
        "symbol": "f",
        "threads": 128,
        "shared_bytes": 64,
        "tile": [4],
        "sources_sha256": "toy",
    }


def test_a_release_refuses_to_lack_anything(
    host: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """C116."""
    monkeypatch.setattr(toolchain, "missing", no_triton)
    with pytest.raises(BuildError, match="2 missing in a release") as error:
        build(tmp_path / "lib", tmp_path / "c", True, kernels=[kernel()], tables=tmp_path)
    assert "for sm90: no Triton" in str(error.value)
    assert "for sm100: no Triton" in str(error.value)
    assert not (tmp_path / "lib").exists()


def test_a_config_counts_only_with_all_its_variants(
    host: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run_worker(jobs: dict[str, Job], cache: Path, environment: Any) -> dict[str, str]:
        for key, job in jobs.items():
            build_kernels._keep(cache / key, cubin(job))
        return {
            key: "too many registers"
            for key, job in jobs.items()
            if (job.arch, job.variant) == ("sm90", "any")
        }

    monkeypatch.setattr(toolchain, "missing", lambda language, arch: None)
    monkeypatch.setattr(build_kernels, "_run_worker", run_worker)
    manifest = build(tmp_path, tmp_path / "c", kernels=[kernel()], tables=tmp_path)
    assert {entry["arch"] for entry in manifest["kernels"]} == {"sm100"}
    assert [entry["reason"] for entry in manifest["missing"]] == ["too many registers"]
    assert manifest["archs"] == ["sm100"]


def test_no_host_compiler(machine: Machine, tmp_path: Path) -> None:
    """Nothing can hold kernels then, so none is compiled; an older library does not stay."""
    target = tmp_path / "lib"
    target.mkdir()
    (target / "libfastkernels.so").write_bytes(b"old")
    manifest = build(target, tmp_path / "cache", kernels=[kernel()], tables=tmp_path)
    assert manifest["library"] is None
    assert manifest["kernels"] == manifest["archs"] == []
    assert manifest["missing"][0] == {
        "what": "host library",
        "reason": "needed: a C++ compiler; found: no g++ on PATH; set CXX",
    }
    assert {entry["reason"] for entry in manifest["missing"][1:]} == {"there is no host library"}
    assert [path.name for path in target.iterdir()] == ["manifest.json"]


def test_a_compiling_process_that_dies_is_a_reason(tmp_path: Path) -> None:
    job = Job(kernel(), Config(), "sm90", "any")  # of an operator that the process cannot find
    reasons = build_kernels._run_worker({"key": job}, tmp_path, dict(os.environ))
    assert "ended with 1" in reasons["key"]
    assert "KeyError" in reasons["key"]


@pytest.mark.parametrize("damage", ["truncated", "swapped", "no facts", "no code"])
def test_kept_code_that_is_damaged_is_made_again(tmp_path: Path, damage: str) -> None:
    """C110."""
    path = tmp_path / "key"
    made = Binary(b"\x7fELF code", "f", 128, 0)
    build_kernels._keep(path, made)
    assert build_kernels._kept(path) == made
    if damage == "truncated":
        path.with_suffix(".cubin").write_bytes(made.cubin[:-1])
    elif damage == "swapped":
        path.with_suffix(".cubin").write_bytes(made.cubin[::-1])
    elif damage == "no facts":
        path.with_suffix(".json").write_text("{")
    else:
        path.with_suffix(".cubin").unlink()
    assert build_kernels._kept(path) is None


# ---- setup.py -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def setuptools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A setuptools as new as pyproject.toml asks for."""
    folder = tmp_path_factory.mktemp("setuptools")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--target", folder)
    subprocess.run([*pip, "setuptools>=77"], check=True)
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    copy = tmp_path / "checkout"
    ignored = shutil.ignore_patterns(
        ".*", "build", "dist", "*.egg-info", "__pycache__", "_lib", "tests", "bench", "docs"
    )
    shutil.copytree(ROOT, copy, ignore=ignored)
    return copy


def python(
    setuptools: Path, checkout: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    kept = {name: v for name, v in os.environ.items() if not name.startswith("FASTKERNELS_")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=checkout,
        env={**kept, "PYTHONPATH": str(setuptools), **variables},
        capture_output=True,
        text=True,
    )


def test_a_direct_build_without_a_compiler(setuptools: Path, checkout: Path) -> None:
    """A source install goes on and says what is missing; a release does not."""
    command = ("setup.py", "--quiet", "build_kernels", "--inplace")
    done = python(setuptools, checkout, *command, CXX="/nowhere/g++")
    assert done.returncode == 0, done.stderr
    assert "not built: host library: needed: a C++ compiler; found: no /nowhere/g++" in done.stderr
    written = checkout / "src" / "fastkernels" / "_lib" / "manifest.json"
    assert json.loads(written.read_text())["library"] is None
    written.unlink()
    done = python(setuptools, checkout, *command, CXX="/nowhere/g++", FASTKERNELS_RELEASE="1")
    assert done.returncode != 0
    assert "missing in a release" in done.stderr
    assert not written.exists()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"FASTKERNELS_NO_CUDA": "1", "FASTKERNELS_RELEASE": "1"}, "promises kernels"),
        ({"FASTKERNELS_NO_CUDA": "yes"}, "FASTKERNELS_NO_CUDA is 'yes', expected '0' or '1'"),
    ],
)
def test_variables_that_make_no_sense(
    setuptools: Path, checkout: Path, variables: dict[str, str], words: str
) -> None:
    done = python(setuptools, checkout, "setup.py", "--version", **variables)
    assert done.returncode != 0
    assert words in done.stderr


# ---- with the toolchain -------------------------------------------------------------------------


class Built(NamedTuple):
    folder: Path
    cache: Path
    manifest: dict[str, Any]
    seconds: float

    @property
    def library(self) -> Path:
        return self.folder / "libfastkernels.so"


def fresh(folder: Path) -> Built:
    start = time.perf_counter()
    manifest = build(folder / "lib", folder / "cache")
    return Built(folder / "lib", folder / "cache", manifest, time.perf_counter() - start)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return fresh(tmp_path_factory.mktemp("built"))


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.toolchain
def test_the_library_holds_all_that_is_promised(built: Built) -> None:
    """C116."""
    manifest = built.manifest
    assert manifest["missing"] == []
    assert manifest["archs"] == list(ARCHS)
    promised = collect(declared())
    assert [
        (e["op"], e["route"], e["config"], e["arch"], e["variant"]) for e in manifest["kernels"]
    ] == [(j.kernel.op, j.kernel.name, knobs(j.config), j.arch, j.variant) for j in promised]
    assert {entry["language"] for entry in manifest["kernels"]} == {"cuda", "triton", "cute"}
    assert set(manifest["versions"]) == {"cuda", "triton", "cute", "tvm_ffi", "cxx"}
    library = built.library.read_bytes()
    cubins = [path.read_bytes() for path in built.cache.glob("*.cubin")]
    assert {entry["binary"] for entry in manifest["kernels"]} == set(range(len(set(cubins))))
    for cubin in cubins:
        assert library.find(cubin) % 16 == 0  # the section, too, is aligned in the file


@pytest.mark.toolchain
def test_the_build_is_quick(built: Built) -> None:
    assert built.seconds < MAX_SECONDS


@pytest.mark.toolchain
def test_the_library_needs_neither_torch_nor_a_cuda_runtime(built: Built) -> None:
    dynamic = output("readelf", "-dW", built.library)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    assert [name for name in needed if not LIBRARIES.fullmatch(name)] == []
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic
    undefined = [line.split()[-1] for line in output("nm", "-Du", built.library).splitlines()]
    assert [name for name in undefined if FOREIGN.match(name)] == []
    exported = output("nm", "-D", "--defined-only", built.library).split("\n")[:-1]
    assert [line for line in exported if not line.split()[-1].startswith("__tvm_ffi_")] == []
    segments = output("readelf", "-lW", built.library)
    assert re.search(r"GNU_STACK.* RW ", segments)
    assert "GNU_RELRO" in segments


@pytest.mark.toolchain
def test_nothing_of_this_machine_stands_in_the_library(built: Built) -> None:
    contents = built.library.read_bytes()
    for word in (str(ROOT), sys.prefix, "site-packages", "/tmp/"):
        assert word.encode() not in contents, word


@pytest.mark.toolchain
def test_the_library_loads_without_a_gpu(built: Built) -> None:
    code = (
        "import tvm_ffi\n"
        f"library = tvm_ffi.load_module({str(built.library)!r})\n"
        "print(library.get_function('version')(), library.get_function('num_binaries')())"
    )
    version, binaries = output(sys.executable, "-c", code).split()
    assert version == built.manifest["version"]
    assert int(binaries) == 1 + max(entry["binary"] for entry in built.manifest["kernels"])


@pytest.mark.toolchain
def test_two_builds_give_the_same(built: Built, tmp_path: Path) -> None:
    again = fresh(tmp_path)
    assert again.manifest == built.manifest
    assert again.library.read_bytes() == built.library.read_bytes()


@pytest.mark.toolchain
def test_what_was_compiled_is_used_again(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_kernels, "_run_worker", None)
    monkeypatch.setattr(build_kernels, "_compile_host", None)
    again = build(tmp_path, built.cache)
    assert again == built.manifest


@pytest.mark.toolchain
def test_without_nvcc_the_other_languages_are_built(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C115, with the rest of the library, whose device code is kept from the other build."""
    monkeypatch.setattr(toolchain, "_nvcc_candidates", list)
    manifest = build(tmp_path, built.cache)
    assert {entry["language"] for entry in manifest["kernels"]} == {"triton", "cute"}
    cuda = {j.what for j in collect(declared()) if j.maker.language == "cuda"}
    assert {entry["what"] for entry in manifest["missing"]} == cuda
    assert all("needed: nvcc 13.0" in entry["reason"] for entry in manifest["missing"])


@pytest.mark.toolchain
def test_a_compilers_message_names_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = next(k for k in declared() if k.language == "cuda")
    monkeypatch.setattr(toolchain, "_macro", lambda value: "oops")
    with pytest.raises(ToolchainError, match="nvcc failed") as error:
        toolchain.compile_kernel(cuda, cuda.config, "sm90", "any")
    assert f"route {cuda.name!r}" in str(error.value)
    assert '"oops" is undefined' in str(error.value)


@pytest.mark.toolchain
def test_the_wheel(built: Built, setuptools: Path, checkout: Path) -> None:
    """One wheel for every Python, and the same library."""
    shutil.copytree(built.cache, checkout / "build" / "kernels")
    code = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    done = python(setuptools, checkout, "-c", code, FASTKERNELS_RELEASE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (checkout / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if "/_lib/" in name}
        assert names == {"fastkernels/_lib/libfastkernels.so", "fastkernels/_lib/manifest.json"}
        assert archive.read("fastkernels/_lib/libfastkernels.so") == built.library.read_bytes()
        manifest = json.loads(archive.read("fastkernels/_lib/manifest.json"))
        (facts,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        assert b"Root-Is-Purelib: false" in archive.read(facts)
    assert manifest == built.manifest


@pytest.mark.toolchain
def test_an_isolated_build_is_not_asked_for_torch(setuptools: Path, checkout: Path) -> None:
    code = (
        "from setuptools import build_meta\n"
        "print('REQUIRES', *build_meta.get_requires_for_build_wheel())"
    )
    done = python(setuptools, checkout, "-c", code)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("REQUIRES"))
    names = {re.split(r"[<>=]", entry)[0] for entry in line.split()[1:]}
    assert names == {re.split(r"[<>=]", entry)[0] for entry in build_kernels.requirements()}
    assert not any("torch" in name for name in names)
    done = python(setuptools, checkout, "-c", code, FASTKERNELS_NO_CUDA="1")
    assert "REQUIRES\n" in done.stdout
