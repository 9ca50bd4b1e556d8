"""The package as users get it: wheel, sdist and editable install, outside the repository.

Needs the package index: setuptools for the isolated builds, and the run-time dependencies.
"""

from __future__ import annotations

import email
import email.message
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
CSRC = ("*.h", "*.cuh", "*.cu")
SHIPPED = ("*.py", "*.json", "*.jsonl", "README.md", "py.typed")

pytestmark = pytest.mark.timeout(900)

USE = """
import json
from importlib.resources import files
import torch, fastkernels
B, Hk, Hv, D = 2, 4, 8, 128
bf16 = torch.bfloat16
q, k = torch.randn(B, 1, Hk, D, dtype=bf16), torch.randn(B, 1, Hk, D, dtype=bf16)
v, state = torch.randn(B, 1, Hv, D, dtype=bf16), torch.randn(B, Hv, D, D)
a, b = torch.randn(B, 1, Hv, dtype=bf16), torch.randn(B, 1, Hv, dtype=bf16)
output, new_state = fastkernels.gdn_decode(q, k, v, state, torch.rand(Hv), a, torch.rand(Hv), b)
assert output.shape == (B, 1, Hv, D) and new_state.shape == state.shape
assert output.isfinite().all() and new_state.isfinite().all()
folders = [entry for entry in files("fastkernels._tables").iterdir() if entry.is_dir()]
tables = [f"{d.name}/{f.name}" for d in folders for f in d.iterdir() if f.name.endswith(".toml")]
print(json.dumps({"file": fastkernels.__file__, "version": fastkernels.__version__,
                  "tables": sorted(tables)}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """stdout of a command in an environment that knows nothing of the repository."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        and not name.startswith("FASTKERNELS_")
    }
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    # The package without kernels; tests/build/test_kernels_build.py has the one with them.
    environment["FASTKERNELS_NO_CUDA"] = "1"
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def link_torch(site_packages: Path) -> None:
    """This environment's torch and what it requires, linked: a second one would take 0.8 GB on
    disk, or 7 GB with CUDA. Nothing may be uninstalled there."""
    pending, linked = ["torch"], set()
    while pending:
        name = pending.pop()
        linked.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # required on another platform or Python
            continue
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site_packages / top).exists():
                (site_packages / top).symlink_to(str(distribution.locate_file(top)))
        for requirement in distribution.requires or ():
            match = re.match(r"[\w.-]+", requirement)
            if match and "extra ==" not in requirement and match[0] not in linked:
                pending.append(match[0])


class Installation:
    """A virtual environment with torch alone, and a folder elsewhere to run from."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "venv" / "bin"
        self.elsewhere = folder / "elsewhere"
        self.elsewhere.mkdir()
        run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
        (self.site_packages,) = (folder / "venv").glob("lib/python*/site-packages")
        link_torch(self.site_packages)

    def pip(self, *arguments: str | Path) -> None:
        command = (self.bin / "python", "-m", "pip", "install", "--quiet", "--no-compile")
        run(*command, *arguments, cwd=self.elsewhere)

    def use(self) -> dict[str, Any]:
        """What a user sees after one call of an operator."""
        lines = run(self.bin / "python", "-c", USE, cwd=self.elsewhere).splitlines()
        seen: dict[str, Any] = json.loads(lines[-1])
        return seen

    def fastkernels(self, *arguments: str) -> str:
        return run(self.bin / "fastkernels", *arguments, cwd=self.elsewhere)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fastkernels-wheel-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def checkout(folder: Path) -> Path:
    """A clean copy of the sources: no build/ of former builds to leak into the wheel."""
    copy = folder / "checkout"
    built = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "_lib")
    shutil.copytree(ROOT, copy, ignore=built)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, folder: Path) -> Path:
    run(sys.executable, "-m", "pip", "wheel", checkout, "--no-deps", "-w", folder, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel_metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def installed(wheel: Path, folder: Path) -> Installation:
    installation = Installation(folder)
    installation.pip(wheel)
    return installation


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def sources() -> set[str]:
    """What must ship, by its name in the wheel."""
    package = ROOT / "src" / "fastkernels"
    tables = ROOT / "dispatch_tables"
    csrc = ROOT / "csrc"
    return {
        *(
            f"fastkernels/{f.relative_to(package)}"
            for p in SHIPPED
            for f in package.rglob(p)
            if f.parent.name != "_lib"
        ),
        *(f"fastkernels/_csrc/{f.relative_to(csrc)}" for p in CSRC for f in csrc.glob(f"*/{p}")),
        *(f"fastkernels/_tables/{f.relative_to(tables)}" for f in tables.glob("*/*.toml")),
        "fastkernels/_tables/__init__.py",
        "fastkernels/_tables/README.md",
    }


def contents(package: Path) -> dict[str, str]:
    """Digest of every file below a folder, bytecode aside."""
    return {
        str(path.relative_to(package)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def table_names() -> list[str]:
    return sorted(f"{f.parent.name}/{f.name}" for f in (ROOT / "dispatch_tables").glob("*/*.toml"))


def test_the_build_asks_for_setuptools_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert [r.split(">")[0] for r in project["build-system"]["requires"]] == ["setuptools"]


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel: Path) -> None:
    shipped = {name for name in names(wheel) if ".dist-info/" not in name}
    assert shipped == sources()


def test_without_kernels_the_wheel_is_for_any_platform(wheel: Path) -> None:
    """FASTKERNELS_NO_CUDA=1, which `run` sets."""
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not any("/_lib/" in name for name in names(wheel))


def test_metadata(wheel_metadata: email.message.Message) -> None:
    required = wheel_metadata.get_all("Requires-Dist", [])
    assert {r.partition(";")[0].strip() for r in required if "extra ==" not in r} == {
        "torch>=2.10",
        "apache-tvm-ffi<0.2,>=0.1.11",
        "click<9,>=8.1",
        "rich<16,>=13",
        "tomli<3,>=2",
    }
    assert set(wheel_metadata.get_all("Provides-Extra", [])) == {"bench", "dev", "jit", "pack"}
    assert wheel_metadata["Requires-Python"] == ">=3.10"
    assert wheel_metadata["License-Expression"] == "Apache-2.0"
    assert wheel_metadata.get_all("License-File") == ["LICENSE"]


def test_an_sdist_builds_the_same_wheel(checkout: Path, wheel: Path, folder: Path) -> None:
    tools = folder / "setuptools"
    pip = (sys.executable, "-m", "pip")
    run(*pip, "install", "--quiet", "--target", tools, "setuptools>=77", cwd=folder)
    build = (
        f"import sys; sys.path.insert(0, {str(tools)!r}); from setuptools import build_meta; "
        f"build_meta.build_sdist({str(folder)!r})"
    )
    run(sys.executable, "-c", build, cwd=checkout)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("/LICENSE") for name in archive.getnames())
    target = folder / "from-sdist"
    run(*pip, "wheel", sdist, "--no-deps", "-w", target, cwd=folder)
    (rebuilt,) = target.glob("*.whl")
    assert names(rebuilt) == names(wheel)


def test_the_wheel_works_elsewhere(
    installed: Installation, wheel_metadata: email.message.Message
) -> None:
    """A call, the tables, the command and the version; nothing writes into the package."""
    package = installed.site_packages / "fastkernels"
    before = contents(package)
    assert (package / "py.typed").is_file()
    seen = installed.use()
    assert Path(seen["file"]).parent == package
    assert seen["version"] == wheel_metadata["Version"]
    assert seen["tables"] == table_names()
    json.loads(installed.fastkernels("doctor", "--json"))
    problem = ("--axis", "batch_size=8", "--device", "h200")
    assert "gdn_decode" in installed.fastkernels("explain", "gdn_decode", *problem)
    assert contents(package) == before


def test_an_editable_install_sees_the_tables(installed: Installation, checkout: Path) -> None:
    installed.pip("--no-deps", "--editable", checkout)
    seen = installed.use()
    assert Path(seen["file"]).is_relative_to(checkout)
    assert seen["tables"] == table_names()
