"""One measured call as data, with the environment it was measured in."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import fastkernels
from fastkernels.core.device import named_device
from fastkernels.testing.compare import Report
from fastkernels.testing.timing import Timing


def environment(device: str = "cpu") -> dict[str, Any]:
    """Versions and device, as they belong beside every measurement."""
    info = named_device(device)
    return {
        "fastkernels": fastkernels.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": info.product,
        "arch": info.arch,
        "num_sms": info.num_sms,
        "threads": torch.get_num_threads(),
        "platform": sys.platform,
    }


@dataclass(frozen=True)
class Measurement:
    """One row: the workload, what served it and why, its time, its errors and their limits."""

    op: str
    name: str
    source: str
    axes: dict[str, int]
    mode: str
    route: str
    config: dict[str, Any]
    reason: str
    timing: Timing
    errors: list[dict[str, Any]] = field(default_factory=list)
    ok: bool = False

    @staticmethod
    def of(report: Report, reason: str, config: dict[str, Any], timing: Timing) -> Measurement:
        case = report.case
        errors = [
            {"output": e.output, "metric": e.metric, "value": e.value, "limit": e.limit}
            for e in (*report.errors, *report.official)
        ]
        return Measurement(
            report.op, case.name, case.source, case.axes, case.mode, report.route, config, reason,
            timing, errors, report.ok,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
