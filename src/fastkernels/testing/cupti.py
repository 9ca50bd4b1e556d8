"""Kernel times from CUPTI's activity records, every call on a cold L2, variants interleaved.

A call is timed between two host timestamps, with the device idle before and after it. An API record
that starts between them belongs to the call, and so does every kernel, copy and fill that carries
such a record's correlation id, whatever stream it ran on. What overwrites the L2 is launched before
and does not count. `flashinfer.testing.bench_gpu_time_with_cupti` measures the span in the same
way; here the sum of kernel times stands beside it.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

NEEDS = (
    "GPU times need CUPTI: install fastkernels[bench] (cupti-python 13). CUDA events are no"
    " substitute: they count what the host leaves between kernels"
)
# Of a variant's calls; with fewer records than that something is wrong with the recording.
_LEAST_RECORDED = 0.8


class CuptiMissing(RuntimeError):
    """cupti-python is not installed, or too old."""


class Launch(NamedTuple):
    """An API call: host time in ns, and the id that its kernels carry."""

    start: int
    correlation: int


class Work(NamedTuple):
    """A kernel, copy or fill on the device; times in ns."""

    name: str
    start: int
    end: int
    correlation: int


class Window(NamedTuple):
    """Host timestamps in ns around one timed call."""

    start: int
    end: int


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile, in microseconds."""

    median: float
    p10: float
    p90: float

    @staticmethod
    def of(samples: Iterable[float]) -> Spread:
        ordered = sorted(samples)
        return Spread(*(quantile(ordered, share) for share in (0.5, 0.1, 0.9)))

    def to_dict(self) -> dict[str, float]:
        return {name: round(getattr(self, name), 3) for name in ("median", "p10", "p90")}


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of sorted samples, interpolated between neighbours."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True)
class Timing:
    """One variant: the sum of its kernels' times, their span (first start to last end), how many
    kernels a call launched, their names, and how many calls were recorded."""

    us: Spread
    span: Spread
    kernels: int
    names: tuple[str, ...]
    calls: int


def assign(
    windows: Sequence[Window], launches: Iterable[Launch], works: Iterable[Work]
) -> list[list[Work]]:
    """Per window what was launched in it, in order of its start on the device."""
    by_id: dict[int, list[Work]] = defaultdict(list)
    for work in works:
        by_id[work.correlation].append(work)
    ordered = sorted(launches)
    starts = [launch.start for launch in ordered]
    groups = []
    for window in windows:
        first, last = bisect_left(starts, window.start), bisect_right(starts, window.end)
        ids = {launch.correlation for launch in ordered[first:last]}
        found = [work for each in ids for work in by_id.get(each, ())]
        groups.append(sorted(found, key=lambda work: work.start))
    return groups


def timing(groups: Sequence[Sequence[Work]]) -> Timing:
    """Statistics of one variant's calls. Raises ValueError if too many left no record."""
    recorded = [group for group in groups if group]
    if not recorded or len(recorded) < _LEAST_RECORDED * len(groups):
        raise ValueError(f"CUPTI recorded kernels in {len(recorded)} of {len(groups)} calls")
    kernels, _ = Counter(len(group) for group in recorded).most_common(1)[0]
    usual = next(group for group in recorded if len(group) == kernels)
    return Timing(
        Spread.of(sum(work.end - work.start for work in group) / 1e3 for group in recorded),
        Spread.of((max(work.end for work in group) - group[0].start) / 1e3 for group in recorded),
        kernels,
        tuple(work.name for work in usual),
        len(recorded),
    )


# ---- the measurement ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One way to compute. `calls[i]` runs on input set i.

    `prepare(i, is_checked)` comes before every call and `check(i)` after a few of the timed ones;
    neither is timed.
    """

    calls: Sequence[Callable[[], object]]
    prepare: Callable[[int, bool], object] | None = None
    check: Callable[[int], object] | None = None


class Records(Protocol):
    """What `measure` needs of a device and its recorder."""

    def overwrite_l2(self) -> object: ...
    def synchronize(self) -> object: ...
    def timestamp(self) -> int: ...
    def drain(self, force: bool = False) -> tuple[list[Launch], list[Work]]: ...
    def resume(self) -> None: ...
    def pause(self) -> None: ...


def measure(
    variants: Mapping[str, Variant],
    records: Records,
    *,
    iterations: int = 30,
    warmup: int = 5,
    checks: int = 2,
    seed: int = 0,
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time variants side by side: (timings, errors) by name.

    In each iteration every variant runs once, in an order drawn anew, on the next input set. One
    that raises is left out with its error. An error that outlives its call (a sticky CUDA error) is
    raised: nothing after it would mean anything.

    Nothing is recorded afterwards, until the next time: drawing and judging launch thousands of
    small kernels, and with a record of each a step of gdn_prefill's oracle took 24 ms, not 1.
    """
    records.resume()
    try:
        return _measure(variants, records, iterations, warmup, checks, seed)
    finally:
        records.pause()


def _measure(
    variants: Mapping[str, Variant],
    records: Records,
    iterations: int,
    warmup: int,
    checks: int,
    seed: int,
) -> tuple[dict[str, Timing], dict[str, str]]:
    rng = random.Random(seed)
    errors: dict[str, str] = {}
    windows: dict[str, list[Window]] = {name: [] for name in variants}
    checked = {
        name: set(rng.sample(range(iterations), min(checks, iterations))) for name in variants
    }

    def attempt(name: str, step: Callable[[], object]) -> None:
        try:
            step()
        except Exception as error:
            errors[name] = describe(error)
            records.synchronize()  # raises again if the device is lost

    def timed(name: str, iteration: int) -> None:
        is_checked = iteration in checked[name]
        windows[name].append(_timed(variants[name], records, iteration, is_checked))

    for name, variant in variants.items():
        attempt(name, partial(_warm_up, variant, records, warmup))
    records.drain()
    for iteration in range(iterations):
        order = [name for name in variants if name not in errors]
        rng.shuffle(order)
        for name in order:
            attempt(name, partial(timed, name, iteration))
    return _evaluate(windows, records, errors), errors


def _warm_up(variant: Variant, records: Records, warmup: int) -> None:
    for i in range(max(warmup, len(variant.calls))):
        which = i % len(variant.calls)
        if variant.prepare is not None:
            variant.prepare(which, False)
        variant.calls[which]()
    records.synchronize()


def _timed(variant: Variant, records: Records, iteration: int, is_checked: bool) -> Window:
    which = iteration % len(variant.calls)
    call = variant.calls[which]
    if variant.prepare is not None:
        variant.prepare(which, is_checked)
    records.overwrite_l2()
    records.synchronize()
    start = records.timestamp()
    call()
    end = records.timestamp()
    records.synchronize()
    if is_checked and variant.check is not None:
        variant.check(which)
    return Window(start, end)


def _evaluate(
    windows: Mapping[str, Sequence[Window]], records: Records, errors: dict[str, str]
) -> dict[str, Timing]:
    every = [(name, window) for name, own in windows.items() for window in own]
    launches, works = records.drain()
    groups = assign([window for _, window in every], launches, works)
    if not all(groups):  # CUPTI may hold records back until it is forced
        late_launches, late_works = records.drain(force=True)
        launches, works = launches + late_launches, works + late_works
        groups = assign([window for _, window in every], launches, works)
    by_name: dict[str, list[list[Work]]] = defaultdict(list)
    for (name, _), group in zip(every, groups, strict=True):
        by_name[name].append(group)
    timings = {}
    for name, own in by_name.items():
        if name in errors:
            continue
        try:
            timings[name] = timing(own)
        except ValueError as error:
            errors[name] = str(error)
    return timings


def describe(error: BaseException) -> str:
    """An exception on one line of bearable length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400]


# ---- the device ---------------------------------------------------------------------------------


class Recorder:
    """CUPTI's activity records of one GPU, and the buffer whose overwriting makes its L2 cold."""

    def __init__(self, device: torch.device) -> None:
        self._cupti = load()
        kinds = self._cupti.ActivityKind
        self._apis = (kinds.RUNTIME, kinds.DRIVER)
        self._names = {kinds.CONCURRENT_KERNEL: "", kinds.MEMCPY: "memcpy", kinds.MEMSET: "memset"}
        self._launches: list[Launch] = []
        self._works: list[Work] = []
        self._is_recording = False
        # Kept here, since CUPTI calls them from its own thread.
        self._callbacks = (lambda: (8 << 20, 0), self._completed)
        self._device = device
        self._buffer = torch.empty(2 * l2_bytes(device), dtype=torch.int8, device=device)

    def start(self) -> None:
        self.resume()
        self._cupti.activity_register_callbacks(*self._callbacks)

    def stop(self) -> None:
        self.synchronize()
        self._cupti.activity_flush_all(1)
        self.pause()
        self._cupti.finalize()

    def pause(self) -> None:
        """Record nothing until `resume`: every launch and synchronisation costs a record, which
        Python makes an object of."""
        if self._is_recording:
            for kind in (*self._apis, *self._names):
                self._cupti.activity_disable(kind)
        self._is_recording = False

    def resume(self) -> None:
        if not self._is_recording:
            for kind in (*self._apis, *self._names):
                self._cupti.activity_enable(kind)
        self._is_recording = True

    def overwrite_l2(self) -> None:
        """Twice its size, so that every line of it is replaced, by a dirty one."""
        self._buffer.zero_()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def timestamp(self) -> int:
        return int(self._cupti.get_timestamp())

    def drain(self, force: bool = False) -> tuple[list[Launch], list[Work]]:
        """Everything recorded since the last time."""
        self.synchronize()
        self._cupti.activity_flush_all(1 if force else 0)
        launches, works = self._launches, self._works
        self._launches, self._works = [], []
        return launches, works

    def _completed(self, activities: list[Any]) -> None:
        for activity in activities:
            kind, correlation = int(activity.kind), int(activity.correlation_id)
            if kind in self._names:
                name = self._names[kind] or str(activity.name)
                start, end = int(activity.start), int(activity.end)
                self._works.append(Work(name, start, end, correlation))
            elif kind in self._apis:
                self._launches.append(Launch(int(activity.start), correlation))


def load() -> Any:
    """cupti-python's module. Raises CuptiMissing."""
    try:
        from cupti import cupti  # late: an extra
    except ImportError as error:
        raise CuptiMissing(f"{NEEDS} ({error})") from error
    return cupti


@contextmanager
def recording(device: torch.device) -> Iterator[Recorder]:
    """Record a GPU's activity. Host times taken meanwhile count the recording, too."""
    recorder = Recorder(device)
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.stop()


def l2_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size)
