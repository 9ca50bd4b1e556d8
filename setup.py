"""What TOML cannot say: the packages that lie outside src/, and the ahead-of-time build.

`FASTKERNELS_NO_CUDA=1` builds no kernels, and a wheel for any platform. `FASTKERNELS_RELEASE=1`
makes an error of anything that cannot be built, which `fastkernels doctor` says otherwise.
`python setup.py build_kernels --inplace` builds the library of a checkout with what is installed.

Imports neither torch nor fastkernels; an isolated build holds setuptools and `setup_requires`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # a build front end does not put it there

import build_kernels  # noqa: E402

TABLES, CSRC = "fastkernels._tables", "fastkernels._csrc"


def _flag(name: str) -> bool:
    value = os.environ.get(name)
    if value not in (None, "", "0", "1"):
        sys.exit(f"{name} is {value!r}, expected '0' or '1'")
    return value == "1"


RELEASE = _flag("FASTKERNELS_RELEASE")
NO_CUDA = _flag("FASTKERNELS_NO_CUDA") or sys.platform != "linux"
if RELEASE and NO_CUDA:
    sys.exit("FASTKERNELS_RELEASE=1 promises kernels, FASTKERNELS_NO_CUDA=1 builds none")


class BuildKernels(Command):
    """A step of `build`; setuptools sets `editable_mode`."""

    description = "build the library of kernels"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = [
        ("inplace", "i", "write into src/fastkernels/_lib")
    ]
    boolean_options: ClassVar[list[str]] = ["inplace"]
    editable_mode = False
    inplace = False
    build_lib: str | None = None
    build_base: str | None = None

    def initialize_options(self) -> None:
        self.build_lib = self.build_base = None

    def finalize_options(self) -> None:
        names = ("build_lib", "build_base")
        self.set_undefined_options("build", *((name, name) for name in names))

    def run(self) -> None:
        assert self.build_base is not None
        cache = Path(self.build_base).resolve() / "kernels"
        try:
            build_kernels.build(self._target(), cache, RELEASE)
        except build_kernels.BuildError as error:
            sys.exit(f"fastkernels: {error}")

    def _target(self) -> Path:
        assert self.build_lib is not None
        in_place = self.inplace or self.editable_mode
        root = build_kernels.PACKAGE if in_place else Path(self.build_lib, "fastkernels")
        return root / "_lib"

    def get_outputs(self) -> list[str]:
        assert self.build_lib is not None
        names = [path.name for path in self._target().glob("*")]
        return [str(Path(self.build_lib, "fastkernels", "_lib", name)) for name in names]

    def get_output_mapping(self) -> dict[str, str]:
        """Where an editable installation finds them."""
        outputs = self.get_outputs() if self.editable_mode else []
        return {output: str(self._target() / Path(output).name) for output in outputs}

    def get_source_files(self) -> list[str]:
        return []  # MANIFEST.in names them


class Wheel(bdist_wheel):
    """One wheel for every Python: the library binds through TVM-FFI, not through Python's ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", "any" if NO_CUDA else super().get_tag()[2]


class KernelDistribution(Distribution):
    def has_ext_modules(self) -> bool:  # decides between purelib and platlib
        return not NO_CUDA


if not NO_CUDA:
    build.sub_commands = [*build.sub_commands, ("build_kernels", None)]

# A direct call uses what is installed; setuptools would install requirements by itself.
is_direct = NO_CUDA or "build_kernels" in sys.argv

setup(
    distclass=KernelDistribution,
    cmdclass={"build_kernels": BuildKernels, "bdist_wheel": Wheel},
    setup_requires=[] if is_direct else build_kernels.requirements(),
    # A mapping without a list would build a wheel that holds only the tables.
    packages=[*find_packages("src"), TABLES, CSRC],
    package_dir={"": "src", TABLES: "dispatch_tables", CSRC: "csrc"},
    package_data={
        "": ["py.typed", "*.json", "*.jsonl", "README.md"],
        TABLES: ["*/*.toml"],
        CSRC: ["*/*.h", "*/*.cuh", "*/*.cu"],  # for compiling just in time
    },
)
