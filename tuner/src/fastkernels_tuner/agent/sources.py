"""The files of one operator's kernel that an agent may edit, by their names in a checkout."""

from __future__ import annotations

import sys
from pathlib import Path

from fastkernels import catalog
from fastkernels.core.kernels import PACKAGE, csrc_folder
from fastkernels.core.route import Operator, Route
from fastkernels_tuner.errors import SourceError


def editable(operator: Operator, route: Route) -> dict[str, str]:
    """Texts by name: of a route in torch its module; of a compiled one its kernel's own sources.
    What other operators share is nobody's to edit. Raises SourceError where there are none."""
    paths = _torch(route) if route.language == "torch" else _kernel(operator.name, route.name)
    own = (PACKAGE / "ops" / operator.name, csrc_folder() / operator.name)
    found = {
        name_of(path): path.read_text(encoding="utf-8")
        for path in paths
        if any(path.is_relative_to(folder) for folder in own)
    }
    if not found:
        raise SourceError(f"{operator.name}: the route {route.name!r} has no file of its own")
    return found


def name_of(path: Path) -> str:
    """`src/fastkernels/...` or `csrc/...`, also where the package is installed from a wheel."""
    for folder, head in ((csrc_folder(), "csrc"), (PACKAGE, "src/fastkernels")):
        if path.is_relative_to(folder):
            return f"{head}/{path.relative_to(folder).as_posix()}"
    raise ValueError(f"{path} is no source of fastkernels")


def _torch(route: Route) -> list[Path]:
    file = getattr(sys.modules.get(route.launch.__module__), "__file__", None)
    return [] if file is None else [Path(file).resolve()]


def _kernel(op: str, name: str) -> list[Path]:
    kernels = catalog.module(op, "kernels").KERNELS
    return [path for kernel in kernels if kernel.name == name for path in kernel.sources()]
