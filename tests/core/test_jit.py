"""Just-in-time compiles: what is allowed, what is kept, and who may be killed."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fastkernels import ArgumentError, envs
from fastkernels.core import jit, kernels, toolchain
from fastkernels.core.kernels import Binary, Kernel
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
    monkeypatch.setenv(envs.CACHE, str(tmp_path / "cache"))
    return done


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


def test_a_damaged_file_is_compiled_again(compiles: list[Any], tmp_path: Path) -> None:
    binary()
    (kept,) = (tmp_path / "cache").glob("*.cubin")
    whole = kept.read_bytes()
    for damaged in (b"", whole[:-3], whole.replace(b"lines", b"limes"), b"something else"):
        kept.write_bytes(damaged)
        assert binary() == MADE
    assert len(compiles) == 5
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
    name = toolchain.identity(CUDA, CUDA.config, "sm90", "aligned")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / f"{name}.lock").symlink_to(victim)
    assert binary() == MADE
    assert victim.read_text() == "precious"
    (kept,) = (tmp_path / "cache").glob("*.cubin")
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
    declined = jit.declines(kernel, "sm90")
    assert (declined is None) if reason is None else (declined is not None and reason in declined)


def test_a_compiler_that_is_absent_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.JIT, "cuda")
    monkeypatch.setattr(jit, "_missing", lambda language, arch: f"no {language}")
    assert jit.declines(CUDA, "sm90") == "no cuda"


def test_an_illegal_policy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.JIT, "yes")
    with pytest.raises(ArgumentError, match="FASTKERNELS_JIT is 'yes', expected 'off', 'on' or"):
        jit.declines(CUDA, "sm90")


def _slow_compile(folder: str, log: str, delay: float) -> None:
    """In a process of its own: a compile that takes a while and leaves a line."""
    os.environ[envs.CACHE] = folder

    def compile_kernel(*arguments: Any) -> Binary:
        with open(log, "a") as file:
            file.write("compiled\n")
        time.sleep(delay)
        return MADE

    toolchain.compile_kernel = compile_kernel  # type: ignore[assignment]
    toolchain.versions = lambda: {"cuda": "13.0.88"}
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
