"""What release.py refuses. The whole of it runs in CI: `make release REHEARSAL=1`."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import release
from fastkernels.version import __version__

KERNEL = {"op": "gdn_decode", "route": "r", "config": {"rows": 4}, "arch": "sm90", "variant": "v"}
OTHER = KERNEL | {"arch": "sm100"}
LICENSE = "fastkernels-1.dist-info/licenses/LICENSE"
NAME = "fastkernels-1-py3-none-manylinux_2_34_x86_64.whl"


@pytest.fixture
def wheel(tmp_path: Path) -> Callable[..., Path]:
    def made(
        *, name: str = NAME, leave_out: str = "", more: tuple[str, ...] = (), **manifest: Any
    ) -> Path:
        written = {"missing": [], "kernels": [KERNEL | {"binary": 0}, OTHER | {"binary": 1}]}
        files = {
            "fastkernels/_lib/libfastkernels.so": "",
            "fastkernels/_lib/manifest.json": json.dumps(written | manifest),
            LICENSE: "",
            **dict.fromkeys(more, ""),
        }
        path = tmp_path / name
        with zipfile.ZipFile(path, "w") as archive:
            for file, text in files.items():
                if file != leave_out:
                    archive.writestr(file, text)
        return path

    return made


def test_a_complete_wheel_passes(wheel: Callable[..., Path]) -> None:
    release.check_wheel(wheel(), [KERNEL, OTHER])
    alias = NAME.replace("2_34_x86_64", "2_17_x86_64.manylinux2014_x86_64")
    release.check_wheel(wheel(name=alias), [KERNEL, OTHER])


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        ({"name": "fastkernels-1-py3-none-linux_x86_64.whl"}, "manylinux"),
        ({"name": NAME.replace("py3-none", "cp312-cp312")}, "any ABI"),
        ({"leave_out": "fastkernels/_lib/libfastkernels.so"}, "lacks .*libfastkernels"),
        ({"leave_out": "fastkernels/_lib/manifest.json"}, "lacks .*manifest"),
        ({"leave_out": LICENSE}, "licence"),
        ({"more": ("tests/test_x.py",)}, "holds tests/test_x.py"),
        ({"more": ("fastkernels.libs/libtvm_ffi-1a2b3c4d.so",)}, "holds .*libtvm_ffi"),
        ({"more": ("fastkernels_other/x.py",)}, "holds fastkernels_other"),
        ({"missing": [{"op": "gdn_decode"}]}, "lacks kernels"),
        ({"kernels": [KERNEL]}, "lacks 1 kernels, the first .*sm100"),
    ],
)
def test_what_is_wrong_with_a_wheel(
    wheel: Callable[..., Path], spoilt: dict[str, Any], message: str
) -> None:
    with pytest.raises(release.ReleaseError, match=message):
        release.check_wheel(wheel(**spoilt), [KERNEL, OTHER])


def test_every_kernel_of_the_declarations_is_promised() -> None:
    promised = release.promised_kernels()
    assert {entry["arch"] for entry in promised} == {"sm90", "sm100"}
    assert {entry["op"] for entry in promised} >= {"gdn_decode", "moe_fp8_block_scale"}


def test_the_changelog_begins_with_this_version() -> None:
    changelog = release.CHANGELOG.read_text(encoding="utf-8")
    release.check_heading(changelog, __version__, is_rehearsal=True)
    tuner = release.ROOT / "tuner" / "src" / "fastkernels_tuner" / "__init__.py"
    assert f'__version__ = "{__version__}"' in tuner.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changelog", "is_rehearsal", "message"),
    [
        ("# Changelog\n", True, "no heading"),
        ("## 0.9.0, 2026-01-01\n", True, "begins with 0.9.0, expected 1.0.0"),
        ("## 1.0.0, unreleased\n\n## 0.9.0, 2026-01-01\n", False, "'unreleased', expected a date"),
    ],
)
def test_what_is_wrong_with_a_changelog(changelog: str, is_rehearsal: bool, message: str) -> None:
    with pytest.raises(release.ReleaseError, match=message):
        release.check_heading(changelog, "1.0.0", is_rehearsal)
    release.check_heading("## 1.0.0, 2026-02-01\n" + changelog, "1.0.0", is_rehearsal=False)


def test_an_installation_has_to_load_its_library() -> None:
    report = [{"name": name, "state": "ok", "found": ""} for name in release.NEEDED]
    release.check_doctor(json.dumps(report))
    for i, name in enumerate(release.NEEDED):
        broken = [dict(entry) for entry in report]
        broken[i] |= {"state": "wrong", "found": "older than its sources"}
        with pytest.raises(release.ReleaseError, match=f"{name} is wrong: older"):
            release.check_doctor(json.dumps(broken))
        with pytest.raises(release.ReleaseError, match=f"{name} is missing"):
            release.check_doctor(json.dumps(report[:i] + report[i + 1 :]))
