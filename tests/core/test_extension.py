"""States of the compiled library: absent, damaged, foreign, made for another version."""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastkernels
from fastkernels import doctor, explain
from fastkernels.core import compiled, extension, toolchain
from fastkernels.core.device import named_device
from fastkernels.core.extension import LibraryState
from fastkernels.ops.gdn_decode.kernels import KERNELS

KERNEL = KERNELS[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in the library's place."""
    monkeypatch.setattr(extension, "folder", lambda: tmp_path)
    extension.forget()
    yield tmp_path
    monkeypatch.undo()
    extension.forget()


def write(
    folder: Path, data: bytes = b"no library at all", sources_sha256: str = "", **changes: Any
) -> None:
    """A manifest that fits `data`, with some entries changed."""
    library = {
        "file": "libfastkernels.so",
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
        "sources_sha256": sources_sha256 or toolchain.host_digest(),
    }
    manifest: dict[str, Any] = {
        "schema": extension.SCHEMA,
        "version": fastkernels.__version__,
        "library": library,
        "kernels": [],
        "missing": [],
    }
    (folder / "libfastkernels.so").write_bytes(data)
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


def load() -> LibraryState:
    state = extension.load()
    assert isinstance(state, LibraryState)
    return state


def test_no_library_is_a_state_with_words(folder: Path) -> None:
    state = load()
    assert state.status == "missing"
    assert "make kernels" in state.found
    decline = compiled.available(KERNEL, named_device("h200"), KERNEL.config)
    assert decline is not None
    assert "the compiled library is missing" in decline.reason
    others = explain("gdn_decode", device="h200", batch_size=4).others
    assert others[KERNEL.name] == decline.reason
    assert [f for f in doctor.examine() if f.state == "missing" and f.found == state.found]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "manifest.json").write_text("{"), "no manifest of this version"),
        (lambda f: (f / "manifest.json").write_text("[]"), "no manifest of this version"),
        (lambda f: write(f, schema=99), "no manifest of this version"),
        (lambda f: write(f, kernels=None), "no manifest of this version"),
        (lambda f: write(f, library={"file": 5}), "no manifest of this version"),
        (lambda f: write(f, missing=[{}]), "no manifest of this version"),
        (lambda f: (f / "manifest.json").write_text("[" * 10**5), "no manifest of this version"),
        (lambda f: write(f, sources_sha256="0"), "other host sources"),
        (lambda f: write(f, version="9.9.9"), "made for fastkernels 9.9.9"),
        (lambda f: (f / "libfastkernels.so").unlink(), "cannot be read"),
        (lambda f: (f / "libfastkernels.so").write_bytes(b"no lib"), "has 6 bytes"),
        (lambda f: (f / "libfastkernels.so").write_bytes(b"no library at xxx"), "is not what its"),
        (lambda f: write(f), "does not load"),
        (lambda f: write(f, Path("/lib/x86_64-linux-gnu/libm.so.6").read_bytes()), "does not load"),
    ],
    ids=[
        "manifest-torn", "manifest-foreign", "other-schema", "no-kernels", "odd-library",
        "odd-missing", "deep", "stale", "other-version", "gone", "truncated",
        "damaged", "no-library", "foreign-library",
    ],
)  # fmt: skip
def test_damage_is_a_state_with_words(
    folder: Path, damage: Callable[[Path], Any], words: str
) -> None:
    write(folder)
    damage(folder)
    state = load()
    assert state.status == "wrong"
    assert words in state.found
    assert state.cost
    decline = compiled.available(KERNEL, named_device("h200"), KERNEL.config)
    assert decline is not None
    assert words in decline.reason


def test_a_build_without_a_compiler_says_so(folder: Path) -> None:
    reason = "needed: a C++ compiler; found: none"
    write(folder, library=None, missing=[{"what": "library", "reason": reason}])
    state = load()
    assert state.status == "missing"
    assert reason in state.found


def test_c94_a_driver_that_is_too_old_is_a_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Selection falls back to the torch route; it is no launch error."""

    def version() -> int:
        raise RuntimeError("the driver supports CUDA 12.8, machine code needs 13.0 or newer")

    module = types.SimpleNamespace(get_function=lambda name: version)
    monkeypatch.setattr(extension, "load", lambda: extension.Library(module, {"kernels": []}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    decline = compiled.available(KERNEL, named_device("h200"), KERNEL.config)
    assert decline is not None
    assert "the driver supports CUDA 12.8" in decline.reason
