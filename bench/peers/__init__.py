"""Other implementations to measure beside ours; `src/` never imports them.

`bench/peers/<op>.py` lists its adapters in `PEERS`. A peer that is absent, has another version,
raises or computes something else is recorded with the reason and left out of the ratios.
"""

from __future__ import annotations

import importlib
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


@dataclass
class Found:
    """Peers that can be called, and why others cannot."""

    peers: list[Peer] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def versions(self) -> dict[str, str]:
        return {peer.package: peer.version for peer in self.peers}


def load(op: str, names: Sequence[str]) -> Found:
    """The named peers of an operator, imported and of the pinned version."""
    found = Found()
    if not names:
        return found
    known = {peer.name: peer for peer in importlib.import_module(f"bench.peers.{op}").PEERS}
    for name in names:
        if name not in known:
            found.left_out[name] = f"unknown; bench/peers/{op}.py has {', '.join(known)}"
            continue
        peer = known[name]
        try:
            version = _version(importlib.import_module(peer.module), peer.package)
        except Exception as error:  # whatever a foreign package raises while it is imported
            found.left_out[name] = describe(error)
            continue
        if version != peer.version:
            found.left_out[name] = f"{peer.package} is {version}, pinned {peer.version}"
        else:
            found.peers.append(peer)
    return found


def _version(module: ModuleType, package: str) -> str:
    """Part of a distribution, as a submodule is, need not say its version itself."""
    return getattr(module, "__version__", None) or metadata.version(package)
