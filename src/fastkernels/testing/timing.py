"""Timers for demonstrations and tests, and of the host. Published GPU times come from `cupti`."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
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


def host_us(
    call: Callable[[], Any],
    synchronize: Callable[[], Any],
    calls: int = 200,
    batches: int = 15,
) -> float:
    """Microseconds until an asynchronous call returns: median over batches of `calls` calls.

    A batch is small enough not to fill the launch queue (about a thousand kernels), beyond which a
    call waits for the GPU; synchronisation between batches and the first calls after it are not
    counted.
    """
    return statistics.median(_batches(call, synchronize, calls, batches, _UNCOUNTED))


# After a synchronisation the driver and the allocator take 20 to 80 us for the first call and 1.2
# times the usual for a few more: seen on an H200's host.
_UNCOUNTED = 10


@dataclass(frozen=True)
class Growth:
    """Host time of the first and the last tenth of many calls, and memory that they left behind."""

    calls: int
    first_us: float
    last_us: float
    kept_bytes: int


def host_growth(
    call: Callable[[], Any],
    synchronize: Callable[[], Any],
    allocated: Callable[[], int],
    calls: int = 10_000,
) -> Growth:
    """Whether call number 10,000 costs more than the first; `allocated` tells the bytes in use."""
    before = allocated()
    samples = list(_batches(call, synchronize, max(1, calls // 50), 50))
    return Growth(
        calls, statistics.median(samples[:5]), statistics.median(samples[-5:]), allocated() - before
    )


def _batches(
    call: Callable[[], Any],
    synchronize: Callable[[], Any],
    calls: int,
    batches: int,
    uncounted: int = 0,
) -> Iterator[float]:
    collects = gc.isenabled()
    gc.disable()  # as timeit does: a collection's cost is that of whatever else is imported
    try:
        for _ in range(batches):
            synchronize()
            for _ in range(uncounted):
                call()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            yield (time.perf_counter() - start) / calls * 1e6
        synchronize()
    finally:
        if collects:
            gc.enable()
