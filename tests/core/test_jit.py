"""Just-in-time compiles: what is allowed, what is kept and serves where, and who may be killed."""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import os
import shutil
import signal
import time
import types
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from fastkernels import ArgumentError, envs
from fastkernels.core import compiled, extension, jit, kernels, toolchain
from fastkernels.core.device import named_device
from fastkernels.core.kernels import Binary, Kernel
from fastkernels.core.toolchain import ToolchainError
from fastkernels.ops.gdn_decode.kernels import KERNELS

CUDA = next(kernel for kernel in KERNELS if kernel.language == "cuda")
MADE = Binary(b"\x7fELF code\nwith lines", "entry", 128, 4096)


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """Compiles that happened, each instead of a compiler's work."""
    done: list[tuple[Any, ...]] = []

    def compile_kernel(*arguments: Any) -> Binary:
        done.append(arguments)
        return MADE

    monkeypatch.setattr(toolchain, "compile_kernel", compile_kernel)
    monkeypatch.setattr(toolchain, "versions", lambda: {"cuda": "13.0.88"})
    monkeypatch.setattr(jit, "_missing", lambda language, arch: None)
    monkeypatch.setenv(envs.CACHE, str(tmp_path / "cache"))
    monkeypatch.setenv(envs.JIT, "cuda")
    return done


@pytest.fixture
def no_compiler(compiles: list[Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, this is a machine without a compiler, and no policy is set."""

    def leave() -> None:
        monkeypatch.setattr(toolchain, "versions", dict)
        monkeypatch.setattr(jit, "_missing", lambda language, arch: f"no {language}")
        monkeypatch.delenv(envs.JIT)
        compiles.clear()

    return leave


def fill(monkeypatch: pytest.MonkeyPatch, folder: Path, version: str, made: Binary = MADE) -> None:
    """All variants, made by a version of nvcc."""
    monkeypatch.setattr(toolchain, "versions", lambda: {"cuda": version})
    monkeypatch.setattr(toolchain, "compile_kernel", lambda *arguments: made)
    folder.mkdir(exist_ok=True)
    for variant in CUDA.variants:
        jit.keep(folder, CUDA, CUDA.config, "sm90", variant)


def of(version: str) -> Binary:
    return MADE._replace(cubin=MADE.cubin + version.encode())


def binary(kernel: Kernel = CUDA, arch: str = "sm90", variant: str = "aligned") -> Binary:
    return jit.binary(kernel, kernel.config, arch, variant)


def test_a_compile_is_kept(compiles: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fastkernels"):
        assert binary() == MADE
        assert binary() == MADE
    assert len(compiles) == 1
    (line,) = caplog.messages
    assert "gdn_decode: compiled route 'warp_rows'" in line


def test_c110_the_key_is_contents_flags_and_versions(
    compiles: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    csrc = tmp_path / "csrc"
    shutil.copytree(kernels.csrc_folder(), csrc)
    monkeypatch.setattr(kernels, "csrc_folder", lambda: csrc)
    binary()
    moved = tmp_path / "elsewhere"
    csrc.rename(moved)
    monkeypatch.setattr(kernels, "csrc_folder", lambda: moved)
    binary()
    assert len(compiles) == 1, "a path is no content"
    source = moved / CUDA.source
    before = source.stat()
    source.write_text(source.read_text() + "// one more byte\n")
    os.utime(source, (before.st_atime - 3600, before.st_mtime - 3600))
    binary()
    assert len(compiles) == 2, "an older time stamp hides no change"
    binary(arch="sm100")
    binary(variant="any")
    monkeypatch.setattr(toolchain, "versions", lambda: {"cuda": "13.1.0"})
    binary()
    assert len(compiles) == 5


def test_a_lent_variant_is_the_lender_s(
    compiles: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One compile for both kernels; and whoever may not compile the lender's language says so."""
    borrower = dataclasses.replace(
        CUDA, name="borrower", language="cute", launch_shape=None, lent={"any": CUDA}
    )
    assert binary(variant="any") == jit.binary(borrower, object(), "sm90", "any")
    assert [(kernel.name, config) for kernel, config, *_ in compiles] == [(CUDA.name, CUDA.config)]
    monkeypatch.setenv(envs.JIT, "on")
    monkeypatch.setenv(envs.CACHE, "/nowhere")
    assert jit.declines(borrower, borrower.config, "sm90", ["aligned"]) is None
    assert "CUDA is compiled just in time only" in str(
        jit.declines(borrower, borrower.config, "sm90")
    )


def test_a_damaged_file_is_compiled_again(compiles: list[Any], tmp_path: Path) -> None:
    binary()
    (kept,) = (tmp_path / "cache").glob("*.cubin")
    whole = kept.read_bytes()
    damages = (
        b"",
        whole[:-3],
        whole.replace(b"lines", b"limes"),
        whole.replace(b'"threads": 128', b'"threads": 129'),
        whole.replace(b"cubin 2", b"cubin 1"),
        b"something else",
    )
    for damaged in damages:
        assert damaged != whole
        kept.write_bytes(damaged)
        assert binary() == MADE
    assert len(compiles) == 1 + len(damages)
    assert kept.read_bytes() == whole


def test_c112_a_folder_that_cannot_be_written(
    compiles: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(envs.CACHE, "/dev/null/cache")
    monkeypatch.setattr(envs, "_seen", set())
    with caplog.at_level(logging.WARNING, "fastkernels"):
        assert binary() == MADE
        assert binary() == MADE
    assert len(compiles) == 1
    assert len(caplog.messages) == 1
    assert "/dev/null/cache: not writable" in caplog.messages[0]


def test_a_read_only_cache_is_read(
    compiles: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary()
    monkeypatch.setattr(jit, "_is_writable", lambda folder: False)
    assert binary() == MADE
    assert len(compiles) == 1


def test_a_shared_cache(compiles: list[Any], tmp_path: Path) -> None:
    """Others may read what one user keeps; a link in the lock's place is not followed."""
    assert binary() == MADE
    (lock,) = (tmp_path / "cache").glob("*.lock")
    (kept,) = (tmp_path / "cache").glob("*.cubin")
    lock.unlink()
    kept.unlink()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    lock.symlink_to(victim)
    assert binary() == MADE
    assert victim.read_text() == "precious"
    assert kept.stat().st_mode & 0o777 == 0o644


def test_a_full_disk_costs_no_compile(
    compiles: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert binary() == MADE
    assert not list((tmp_path / "cache").glob("*.cubin"))
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_c119_no_home(compiles: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (envs.CACHE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    assert binary() == MADE


@pytest.mark.parametrize(
    ("policy", "language", "reason"),
    [
        ("off", "triton", "FASTKERNELS_JIT is off"),
        ("on", "cuda", "FASTKERNELS_JIT=cuda"),
        ("on", "triton", None),
        ("cuda", "cuda", None),
        ("cuda", "cute", None),
    ],
)
def test_policy(
    policy: str, language: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(envs.JIT, policy)
    monkeypatch.setattr(jit, "_missing", lambda language, arch: None)
    kernel = next(k for k in KERNELS if k.language == language)
    declined = jit.declines(kernel, kernel.config, "sm90")
    assert (declined is None) if reason is None else (declined is not None and reason in declined)


def test_a_compiler_that_is_absent_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.JIT, "cuda")
    monkeypatch.setattr(jit, "_missing", lambda language, arch: f"no {language}")
    declined = jit.declines(CUDA, CUDA.config, "sm90")
    assert declined is not None
    assert declined.startswith("no cuda; ")


def test_an_illegal_policy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.JIT, "yes")
    with pytest.raises(ArgumentError, match="FASTKERNELS_JIT is 'yes', expected 'off', 'on' or"):
        jit.declines(CUDA, CUDA.config, "sm90")


# ---- code that another machine made -------------------------------------------------------------


def test_what_is_kept_serves_without_a_compiler(
    compiles: list[Any], no_compiler: Callable[[], None]
) -> None:
    """FASTKERNELS_JIT=cuda is for compiles."""
    for variant in CUDA.variants:
        binary(variant=variant)
    no_compiler()
    assert jit.declines(CUDA, CUDA.config, "sm90") is None
    assert [binary(variant=variant) for variant in CUDA.variants] == [MADE] * len(CUDA.variants)
    assert not compiles


def test_every_variant_has_to_be_kept(
    compiles: list[Any], no_compiler: Callable[[], None], tmp_path: Path
) -> None:
    for variant in CUDA.variants[:-1]:
        binary(variant=variant)
    no_compiler()
    reason = jit.declines(CUDA, CUDA.config, "sm90")
    assert reason is not None
    assert "FASTKERNELS_JIT=cuda" in reason
    assert f"{tmp_path / 'cache'} does not hold its machine code" in reason
    with pytest.raises(ToolchainError, match=r"gdn_decode: no machine code of route 'warp_rows'"):
        binary(variant=CUDA.variants[-1])
    assert not compiles
    for other in ("sm100", "sm75"):
        assert jit.declines(CUDA, CUDA.config, other) is not None


def test_off_is_off(
    compiles: list[Any], no_compiler: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variant in CUDA.variants:
        binary(variant=variant)
    no_compiler()
    monkeypatch.setenv(envs.JIT, "off")
    assert jit.declines(CUDA, CUDA.config, "sm90") == "FASTKERNELS_JIT is off"
    with pytest.raises(ToolchainError, match="FASTKERNELS_JIT is off"):
        binary()


def test_of_several_versions_the_newest_serves(
    no_compiler: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By number; the order of files and their times say nothing. A damaged one is passed over."""
    folder = tmp_path / "cache"
    for version in ("13.9.3", "13.10.1", "13.0.88"):
        fill(monkeypatch, folder, version, of(version))
    no_compiler()
    assert binary() == of("13.10.1")
    for path in folder.glob("*.cubin"):
        if b'"13.10.1"' in path.read_bytes():
            path.write_bytes(path.read_bytes()[:-1])
    assert jit.declines(CUDA, CUDA.config, "sm90") is None
    assert binary() == of("13.9.3")


def test_a_compiler_uses_its_own_versions_code_alone(
    compiles: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    compile_kernel = toolchain.compile_kernel
    for version in ("13.0.88", "13.1.0"):
        fill(monkeypatch, folder, version, of(version))
    monkeypatch.setattr(toolchain, "compile_kernel", compile_kernel)
    monkeypatch.setattr(toolchain, "versions", lambda: {"cuda": "13.0.88"})
    assert binary() == of("13.0.88")
    monkeypatch.setattr(toolchain, "versions", lambda: {"cuda": "13.0.99"})
    assert binary() == MADE
    assert len(compiles) == 1


def test_a_file_under_another_name_is_not_used(
    compiles: list[Any], no_compiler: Callable[[], None], tmp_path: Path
) -> None:
    binary()
    (kept,) = (tmp_path / "cache").glob("*.cubin")
    recipes = [toolchain.recipe(CUDA, CUDA.config, "sm90", v) for v in CUDA.variants]
    assert kept.name.startswith(f"{recipes[0]}.")
    for recipe in recipes[1:]:
        shutil.copy(kept, kept.with_name(kept.name.replace(recipes[0], recipe)))
    no_compiler()
    assert binary() == MADE
    assert jit.declines(CUDA, CUDA.config, "sm90") is not None
    with pytest.raises(ToolchainError):
        binary(variant="any")


def test_another_compiler_version_under_this_ones_name_is_not_used(
    compiles: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    binary()
    (kept,) = (tmp_path / "cache").glob("*.cubin")
    monkeypatch.setattr(toolchain, "versions", lambda: {"cuda": "13.1.0"})
    binary()
    (newer,) = set((tmp_path / "cache").glob("*.cubin")) - {kept}
    shutil.copy(kept, newer)
    binary()
    assert len(compiles) == 3


def test_sources_that_cannot_be_read(
    compiles: list[Any], no_compiler: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(self: Kernel) -> str:
        raise FileNotFoundError("no sources")

    binary()
    no_compiler()
    monkeypatch.setattr(Kernel, "digest", gone)
    assert jit.declines(CUDA, CUDA.config, "sm90") is not None


def test_a_route_is_available_by_what_is_kept(
    compiles: list[Any], no_compiler: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = extension.Library(types.SimpleNamespace(), {"kernels": []})
    monkeypatch.setattr(extension, "load", lambda: empty)
    monkeypatch.setattr(extension, "driver_problem", lambda: None)
    for variant in CUDA.variants:
        binary(variant=variant)
    no_compiler()
    device = named_device("h200")
    assert compiled.available(CUDA, device, CUDA.config) is None
    monkeypatch.setenv(envs.JIT, "off")
    decline = compiled.available(CUDA, device, CUDA.config)
    assert decline is not None
    assert "is not in the compiled library for sm90, and FASTKERNELS_JIT is off" in decline.reason


def test_what_is_loaded_is_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forced route is asked before every call."""
    monkeypatch.setattr(extension, "load", lambda: extension.Library(None, {"kernels": []}))
    monkeypatch.setattr(extension, "driver_problem", lambda: None)
    monkeypatch.setattr(jit, "declines", lambda *about: "nobody has it")
    monkeypatch.setattr(compiled, "_plans", {("gdn_decode", CUDA.name, CUDA.config, "sm90"): 7})
    assert compiled.available(CUDA, named_device("h200"), CUDA.config) is None
    assert compiled.available(CUDA, named_device("b200"), CUDA.config) is not None
    monkeypatch.setattr(compiled, "_plans", {})
    assert compiled.available(CUDA, named_device("h200"), CUDA.config) is not None


@pytest.mark.toolchain
@pytest.mark.parametrize("name", ["bulk_rows", "triton_rows", "cute_rows"])
def test_real_code_serves_without_the_compiler(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    monkeypatch.setenv(envs.CACHE, str(tmp_path))
    made = [jit.keep(tmp_path, kernel, kernel.config, "sm90", v) for v in kernel.variants]

    def nothing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(toolchain, "_nvcc_candidates", list)
    monkeypatch.setattr(metadata, "version", nothing)
    monkeypatch.setattr(jit, "_missing", toolchain.missing)
    assert toolchain.versions() == {}
    with pytest.raises(ToolchainError, match="needed: "):
        toolchain.compile_kernel(kernel, kernel.config, "sm90", "any")
    assert jit.declines(kernel, kernel.config, "sm90") is None
    assert [jit.binary(kernel, kernel.config, "sm90", v) for v in kernel.variants] == made
    assert all(binary.cubin.startswith(b"\x7fELF") for binary in made)


# ---- several processes --------------------------------------------------------------------------


def _slow_compile(folder: str, log: str, delay: float) -> None:
    """In a process of its own: a compile that takes a while and leaves a line."""
    os.environ |= {envs.CACHE: folder, envs.JIT: "cuda"}

    def compile_kernel(*arguments: Any) -> Binary:
        with open(log, "a") as file:
            file.write("compiled\n")
        time.sleep(delay)
        return MADE

    toolchain.compile_kernel = compile_kernel  # type: ignore[assignment]
    toolchain.versions = lambda: {"cuda": "13.0.88"}
    jit._missing = lambda language, arch: None  # type: ignore[assignment]
    assert binary() == MADE


def test_several_processes_compile_once(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    arguments = (str(tmp_path / "cache"), str(tmp_path / "log"), 0.5)
    workers = [fork.Process(target=_slow_compile, args=arguments) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "compiled\n"


def test_c113_a_killed_compile_leaves_no_lock(compiles: list[Any], tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    worker = fork.Process(target=_slow_compile, args=(str(tmp_path / "cache"), str(log), 600))
    worker.start()
    while not log.exists():
        time.sleep(0.01)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(60)
    assert binary() == MADE
    assert len(compiles) == 1
