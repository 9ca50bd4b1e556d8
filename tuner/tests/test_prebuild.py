"""Candidates compiled ahead: which, in what order, and what a failure or an interruption costs."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from fastkernels import ArgumentError, catalog, envs
from fastkernels.core import compiled, jit, toolchain
from fastkernels.core.device import named_device
from fastkernels.core.kernels import Binary, Kernel, knobs
from fastkernels_tuner import prebuild
from fastkernels_tuner.errors import UnfitError
from fastkernels_tuner.prebuild import Pair, PrebuildError, build, candidates
from fastkernels_tuner.space import SpaceError, configs, space_of

OPERATOR = catalog.operator("gdn_decode")
ROUTES = [route for route in OPERATOR.routes if route.language != "torch"]
LOG = "FASTKERNELS_TEST_PREBUILD_LOG"


def keep(folder: Path, kernel: Kernel, config: Any, arch: str, variant: str) -> Binary:
    """In the compiling process: a compile that fails, crashes or hangs for some configs."""
    with open(os.environ[LOG], "a") as log:
        log.write(f"{knobs(config)} {variant}\n")
    trouble = {8: "fails", 16: "crashes", 32: "hangs"}
    what = trouble.get(config.lanes_per_row) if config.warps == 8 else None

    def compile_kernel(*arguments: Any) -> Binary:
        print("the compiler says something")
        if what == "fails":
            raise toolchain.ToolchainError("long words", "too many registers")
        if what == "crashes":
            print("LLVM ERROR: no such thing", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        if what == "hangs":
            time.sleep(600)
        return Binary(b"\x7fELF code", "entry", 128, 0)

    toolchain.compile_kernel = compile_kernel  # type: ignore[assignment]
    toolchain.versions = lambda: {"triton": "3.6.0"}
    return jit.keep(folder, kernel, config, arch, variant)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[str]]:
    """A machine with a compiler of Triton as `keep` pretends it; the compiles that it was asked."""
    path = tmp_path / "log"
    path.touch()
    monkeypatch.setenv(LOG, str(path))
    monkeypatch.setattr(toolchain, "versions", lambda: {"triton": "3.6.0"})
    monkeypatch.setattr(toolchain, "missing", lambda language, arch: None)
    return lambda: path.read_text().splitlines()


def pairs(*wanted: tuple[int, int]) -> list[Pair]:
    """Configs of the Triton route by lanes per row and warps."""
    found = candidates(OPERATOR, "sm90", ["triton_rows"])
    first = {(c.lanes_per_row, c.warps): (kernel, c) for kernel, c in reversed(found)}
    return [first[each] for each in wanted]


# ---- which --------------------------------------------------------------------------------------


def test_all_legal_configs_of_all_compiled_routes() -> None:
    found = candidates(OPERATOR, "h200")
    assert found == candidates(OPERATOR, "sm90")
    assert len(set(found)) == len(found)
    for route in ROUTES:
        of_route = [knobs(config) for kernel, config in found if kernel.name == route.name]
        assert of_route == list(configs(space_of(route, OPERATOR.name)))


def test_a_beginning_of_the_list_has_some_of_every_route() -> None:
    found = candidates(OPERATOR, "sm90")
    beginning = found[: len(ROUTES)]
    assert [config for _, config in beginning] == [route.default_config for route in ROUTES]
    names = [kernel.name for kernel, _ in found[: 20 * len(ROUTES)]]
    assert {name: names.count(name) for name in names} == {route.name: 20 for route in ROUTES}


def test_routes_that_are_named() -> None:
    found = candidates(OPERATOR, "sm90", ["cute_rows", "torch_recurrent"])
    assert {kernel.name for kernel, _ in found} == {"cute_rows"}
    with pytest.raises(SpaceError, match="has no route 'cute_row', expected one of"):
        candidates(OPERATOR, "sm90", ["cute_row"])


def test_a_device_without_machine_code() -> None:
    assert candidates(OPERATOR, "cpu") == []
    assert candidates(catalog.operator("gdn_prefill"), "cpu") == []
    with pytest.raises(ArgumentError, match="'sm91' is unknown"):
        candidates(OPERATOR, "sm91")


# ---- compiling ----------------------------------------------------------------------------------


def test_what_fails_is_listed_and_the_rest_is_there(
    log: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new" / "folder"
    wanted = pairs((8, 2), (8, 8), (16, 8), (32, 8), (16, 2))
    whole = wanted[0][0]
    lines: list[str] = []
    summary = build(
        [*wanted, wanted[0]], "sm90", folder, jobs=1, say=lines.append, timeout_s=3, keep=keep
    )
    assert (summary.built, summary.kept) == (2, 0)
    reasons = {failed.config["lanes_per_row"]: failed.reason for failed in summary.failed}
    assert reasons[8] == "variant 'aligned': too many registers"
    assert "ended with -11: " in reasons[16]
    assert "LLVM ERROR: no such thing" in reasons[16]
    assert reasons[32] == "took more than 3 s"
    assert [line.split()[0] for line in lines] == [f"[{i}/5]" for i in range(1, 6)]
    assert "[2/5] triton_rows(" in lines[1]
    assert "warps=8) failed: variant 'aligned': too many registers" in lines[1]
    assert summary.bytes == 2 * len(whole.variants) * len(b"\x7fELF code")
    kept = [path.suffix for path in folder.iterdir()]
    assert kept == [".cubin"] * (2 * len(whole.variants)), "no locks, nothing half written"

    # Again: only what is not there, by the variant.
    next(folder.glob("*.cubin")).unlink()
    before = len(log())
    again = build([wanted[0], wanted[4]], "sm90", folder, jobs=1, keep=keep)
    assert (again.built, again.kept, again.failed) == (1, 1, ())
    assert again.bytes == summary.bytes
    assert len(log()) == before + 1

    # Without a compiler, what is there counts all the same.
    monkeypatch.setattr(toolchain, "versions", dict)
    monkeypatch.setattr(toolchain, "missing", lambda language, arch: f"no {language}")
    there = build([wanted[0], wanted[4]], "sm90", folder, keep=keep)
    assert (there.built, there.kept, there.failed) == (0, 2, ())
    assert str(there).startswith("0 built, 2 kept, 0 failed, 0.0 MB")


def test_an_interruption_loses_nothing_that_is_finished(
    log: Callable[[], list[str]], tmp_path: Path
) -> None:
    wanted = pairs((8, 2), (16, 2), (32, 2), (8, 4), (16, 4), (32, 4))
    num_variants = len(wanted[0][0].variants)

    def ctrl_c(line: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    # A shell's background jobs begin with it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            build(wanted, "sm90", tmp_path / "folder", jobs=1, say=ctrl_c, keep=keep)
    finally:
        signal.signal(signal.SIGINT, before)
    finished = len(log())
    assert num_variants <= finished
    assert finished % num_variants == 0, "a compile that runs may end"
    rest = build(wanted, "sm90", tmp_path / "folder", jobs=1, keep=keep)
    assert (rest.kept, rest.built) == (finished // num_variants, 6 - finished // num_variants)
    assert sorted(log()) == sorted(
        f"{knobs(config)} {variant}" for (_, config), variant
        in itertools.product(wanted, wanted[0][0].variants)
    )  # fmt: skip


def test_a_disk_that_is_full_fails_configs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*arguments: Any) -> Binary:
        raise OSError(28, "No space left on device")

    ((_, config),) = pairs((8, 2))
    job = prebuild._Job("gdn_decode", "triton_rows", knobs(config), "sm90", ("any",))
    answer = prebuild._compile(job, tmp_path, full)
    assert answer.reason is not None
    assert "variant 'any' cannot be kept" in answer.reason
    assert "No space left" in answer.reason


def test_a_folder_that_cannot_be_written() -> None:
    with pytest.raises(UnfitError, match="/dev/null/folder cannot be written") as error:
        build(pairs((8, 2)), "sm90", Path("/dev/null/folder"))
    assert error.value.exit_code == 3


def test_a_device_that_nothing_is_built_for(tmp_path: Path) -> None:
    with pytest.raises(PrebuildError, match="built for sm90, sm100, not for cpu") as error:
        build(pairs((8, 2)), "cpu", tmp_path)
    assert error.value.exit_code == 2
    with pytest.raises(ArgumentError, match="'sm91' is unknown"):
        build(pairs((8, 2)), "sm91", tmp_path)


@pytest.mark.toolchain
def test_real_code_serves_a_machine_without_compilers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    routes = ["bulk_rows", "triton_rows", "cute_rows"]
    # The last ones of each route are far from the defaults: no library holds them.
    wanted = [candidates(OPERATOR, "sm90", [route])[-1] for route in routes]
    summary = build(wanted, "h200", tmp_path, jobs=2)
    assert (summary.built, summary.failed) == (3, ())

    def nothing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    h200 = named_device("h200")
    monkeypatch.setattr(toolchain, "_nvcc_candidates", list)
    monkeypatch.setattr(metadata, "version", nothing)
    monkeypatch.setattr(jit, "_missing", toolchain.missing)
    for kernel, config in wanted:
        decline = compiled.available(kernel, h200, config)
        assert decline is not None
        assert "is not in the compiled library" in decline.reason
    monkeypatch.setenv(envs.CACHE, str(tmp_path))
    size = 0
    for kernel, config in wanted:
        assert compiled.available(kernel, h200, config) is None
        for variant in kernel.variants:
            binary = jit.binary(kernel, config, "sm90", variant)
            assert binary.symbol.encode() in binary.cubin
            size += len(binary.cubin)
    assert size == summary.bytes
