"""Where edited kernels are measured: a `Bench` whose candidates import a copy of the package with
the edited files in it, in processes of their own. The judge runs what is installed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastkernels.core.kernels import PACKAGE, csrc_folder
from fastkernels_tuner.agent import files as agent_files
from fastkernels_tuner.measure import Bench
from fastkernels_tuner.model import Policy

LIBRARY = "_lib"  # compiled kernels, which no edit changes: linked, not copied


class Laboratory(Bench):
    """`folder`: of the copies, one for each version; one that is gone is made again."""

    def __init__(self, device: str, policy: Policy, folder: Path, **options: Any) -> None:
        super().__init__(device, policy, **options)
        self._folder = folder

    def __enter__(self) -> Laboratory:
        return self

    def provide(self, source: str, files: Mapping[str, str]) -> None:
        """Candidates with this `source` are made from the package with these files in it."""
        copy = self._folder / source[:16]
        if not copy.exists():
            _copy(copy, files)
        self.overlay(source, copy / "src")


def _copy(folder: Path, files: Mapping[str, str]) -> None:
    """A checkout in small. It is there completely or not at all."""
    part = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    skip = shutil.ignore_patterns("__pycache__", LIBRARY, "_csrc")
    shutil.copytree(PACKAGE, part / "src" / PACKAGE.name, ignore=skip)
    if (PACKAGE / LIBRARY).exists():
        (part / "src" / PACKAGE.name / LIBRARY).symlink_to(PACKAGE / LIBRARY)
    if csrc_folder().exists():
        shutil.copytree(csrc_folder(), part / "csrc")
    for name, text in files.items():
        agent_files.write(part, name, text)
    part.rename(folder)
