"""Routes whose device code is compiled: from the library, else just in time.

A plan is machine code that is ready on a device: `(entry of the library, handle)`. It is made when
a problem is first selected, so a launch finds it in a dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fastkernels.core import extension, jit
from fastkernels.core.device import DeviceInfo, device_info
from fastkernels.core.kernels import Binary, Kernel
from fastkernels.core.problem import ProblemKey
from fastkernels.core.route import Decline, Route, ShortWay, no_workspace
from fastkernels.core.table import Interval

_plans: dict[tuple[str, str, Any, str], int] = {}
_loaded: set[tuple[int, int]] = set()


def compiled_route(
    kernel: Kernel,
    call: Callable[[Any, int, Any, tuple[torch.Tensor, ...], torch.Tensor | None], bool],
    supports: Callable[[ProblemKey, DeviceInfo, Any], Decline | None],
    fixed: Callable[[ProblemKey], Sequence[int]],
    varying: tuple[str, ...],
    workspace_bytes: Callable[[Mapping[str, int], Any], int] = no_workspace,
) -> Route:
    """A route over one kernel. `call(entry, plan, inputs, outputs, workspace)` hands a checked
    problem to the operator's entry of the library and returns what it returns. Where that is handed
    0 for a plan, it finds one that is remembered: by what `fixed(key)` gives, and by the axes
    `varying`, each within a range."""

    def launch(
        inputs: Any,
        outputs: tuple[torch.Tensor, ...],
        workspace: torch.Tensor | None,
        config: Any,
    ) -> None:
        device = outputs[0].device
        handle = plan(kernel, config, device_info(device).arch, device.index)
        if not call(extension.function(kernel.op), handle, inputs, outputs, workspace):
            raise RuntimeError("the library refuses a call that Python's checks let pass")

    def remember(key: ProblemKey, config: Any, ranges: Mapping[str, Interval]) -> ShortWay:
        handle = plan(kernel, config, key.device.arch, key.device_index)
        bounds = [ranges.get(name, (key.axis(name),) * 2) for name in varying]
        low, high = ([bound[end] for bound in bounds] for end in (0, 1))
        extension.function("remember")(kernel.op, list(fixed(key)), low, high, handle)
        return ShortWay(
            extension.function(kernel.op), partial(extension.function("forget"), kernel.op)
        )

    return Route(
        kernel.name,
        kernel.language,
        kernel.archs,
        kernel.config,
        launch,
        candidates=kernel.candidates,
        supports=supports,
        workspace_bytes=workspace_bytes,
        available=partial(available, kernel),
        prepare=lambda key, config: _prepare(kernel, key, config),
        remember=remember,
    )


def available(kernel: Kernel, device: DeviceInfo, config: Any) -> Decline | None:
    """Whether the machine code is in the library, is kept, or can be made."""
    library = extension.load()
    if isinstance(library, extension.LibraryState):
        return Decline(f"the compiled library is {library.status}: {library.found}")
    # A device that is named, not present (`explain --device h200`), has no driver to ask.
    problem = extension.driver_problem() if torch.cuda.is_available() else None
    if problem is not None:
        return Decline(problem)
    if extension.built(kernel, config, device.arch) is not None:
        return None
    if (kernel.op, kernel.name, config, device.arch) in _plans:
        return None  # in memory; a search of the folder of kept code takes 5 ms
    missing = [v for v in kernel.variants if not _is_lent(kernel, config, device.arch, v)]
    reason = jit.declines(kernel, config, device.arch, missing)
    if reason is None:
        return None
    return Decline(f"{config} is not in the compiled library for {device.arch}, and {reason}")


def plan(kernel: Kernel, config: Any, arch: str, device_index: int) -> int:
    """The handle of a kernel's machine code, loaded on a device."""
    identity = (kernel.op, kernel.name, config, arch)
    handle = _plans.get(identity)
    if handle is None:
        handle = _plans[identity] = extension.open_plan(
            kernel, config, _binaries(kernel, config, arch)
        )
    if (handle, device_index) not in _loaded:
        extension.function("load_plan")(handle, device_index)
        _loaded.add((handle, device_index))
    return handle


def _binaries(kernel: Kernel, config: Any, arch: str) -> list[tuple[int | bytes, Binary]]:
    entries = extension.built(kernel, config, arch)
    if entries is not None:
        return [
            (e["binary"], Binary(b"", e["symbol"], e["threads"], e["shared_bytes"]))
            for e in entries
        ]
    return [_binary(kernel, config, arch, variant) for variant in kernel.variants]


def _binary(kernel: Kernel, config: Any, arch: str, variant: str) -> tuple[int | bytes, Binary]:
    """One variant of a config that the library lacks; what is lent may be in it all the same."""
    if _is_lent(kernel, config, arch, variant):
        maker, its = kernel.maker(config, variant)
        return dict(zip(maker.variants, _binaries(maker, its, arch), strict=True))[variant]
    binary = jit.binary(kernel, config, arch, variant)
    return binary.cubin, binary


def _is_lent(kernel: Kernel, config: Any, arch: str, variant: str) -> bool:
    """Whether a variant's machine code is in the library as another kernel's."""
    maker, its = kernel.maker(config, variant)
    return maker is not kernel and extension.built(maker, its, arch) is not None


def _prepare(kernel: Kernel, key: ProblemKey, config: Any) -> None:
    plan(kernel, config, key.device.arch, key.device_index)
