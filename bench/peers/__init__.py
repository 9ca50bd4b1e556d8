"""Other implementations to measure beside ours; `src/` never imports them.

`bench/peers/<op>.py` lists its adapters in `PEERS`. A peer that is absent or has another version is
recorded with the line that installs it; one that raises or computes something else, with the
reason; both are left out of the ratios.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from types import ModuleType
from typing import Any

import torch

from fastkernels.testing.cupti import describe

# A peer rounds as it likes; what is wrong is off by more than this many of our limits.
TOLERANCE = 10.0


@dataclass(frozen=True)
class Call:
    """A peer bound to one set of inputs.

    `run` launches it; `outputs` gives the last run's result in our layout; `restore` puts back what
    a run overwrote. `adapt_and_run`, where inputs were adapted beforehand: the same from ours on.
    """

    run: Callable[[], object]
    outputs: Callable[[], tuple[torch.Tensor, ...]]
    restore: Callable[[], object] = lambda: None
    adapt_and_run: Callable[[], object] | None = None


@dataclass(frozen=True)
class Peer:
    """One adapter. `modes`: ours to what the call is named there. `bind(inputs, mode)` gives the
    call; whatever it prepares (layouts, index tensors, outputs) is not timed; it raises over inputs
    that the peer cannot serve. `adapted` says what of the inputs it changed beforehand, or "none".
    `module`, where it has no `__version__`, is of the version of the distribution `package`."""

    name: str
    package: str
    module: str
    version: str
    modes: Mapping[str, str]
    bind: Callable[[Any, str], Call]
    adapted: str = "none"

    @property
    def pip(self) -> str:
        return f"pip install {self.package}=={self.version}"


@dataclass
class Found:
    """Peers that can be called, and why others cannot."""

    peers: list[Peer] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def versions(self) -> dict[str, str]:
        return {peer.package: peer.version for peer in self.peers}


def of(op: str) -> dict[str, Peer]:
    """Every peer of an operator by name, installed or not."""
    name = f"{__name__}.{op}"
    if importlib.util.find_spec(name) is None:
        return {}
    return {peer.name: peer for peer in importlib.import_module(name).PEERS}


def load(op: str, names: Sequence[str] | None = None) -> Found:
    """The named peers of an operator, or all, imported and of the pinned version."""
    found, known = Found(), of(op)
    for name in known if names is None else names:
        if name not in known:
            has = ", ".join(known) or "none"
            found.left_out[name] = f"unknown; bench/peers/{op}.py has {has}"
            continue
        peer = known[name]
        try:
            version = _version(importlib.import_module(peer.module), peer.package)
        except Exception as error:  # whatever a foreign package raises while it is imported
            found.left_out[name] = f"{describe(error)}: {peer.pip}"
            continue
        if version != peer.version:
            found.left_out[name] = f"{peer.package} is {version}: {peer.pip}"
        else:
            found.peers.append(peer)
    return found


def _version(module: ModuleType, package: str) -> str:
    """Part of a distribution, as a submodule is, need not say its version itself."""
    return getattr(module, "__version__", None) or metadata.version(package)
