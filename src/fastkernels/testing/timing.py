"""Timers for demonstrations and tests. Published figures need CUPTI and a cold L2; these do not."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, 10th and 90th percentile over `repeats`."""

    median_us: float
    p10_us: float
    p90_us: float
    repeats: int
    timer: str


def time_call(
    function: Callable[[], Any], device: torch.device | str, repeats: int = 5, budget_s: float = 2.0
) -> Timing:
    """Time `function` after the caller has warmed it up; stops early after `budget_s`.

    CPU: wall clock. GPU: CUDA events around each call, L2 as the previous call left it.
    """
    device = torch.device(device)
    clock = _event_us if device.type == "cuda" else _wall_us
    samples: list[float] = []
    start = time.perf_counter()
    while len(samples) < repeats and (not samples or time.perf_counter() - start < budget_s):
        samples.append(clock(function))
    samples.sort()
    last = len(samples) - 1
    return Timing(
        statistics.median(samples),
        samples[round(0.1 * last)],
        samples[round(0.9 * last)],
        len(samples),
        "cuda events, warm L2" if device.type == "cuda" else "wall clock",
    )


def _wall_us(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e6


def _event_us(function: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3
