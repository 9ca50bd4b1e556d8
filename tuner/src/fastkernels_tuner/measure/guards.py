"""Whether the machine is fit to be measured on: a lock per device, clocks, foreign processes."""

from __future__ import annotations

import fcntl
import importlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from fastkernels_tuner.errors import TunerError
from fastkernels_tuner.model import Cause


def uuid_of(device: torch.device) -> str:
    """A GPU's, as nvidia-smi writes it."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


class DeviceBusy(TunerError):
    """Another broker of this host measures on the device."""

    exit_code = 3


@contextmanager
def exclusive(device: str, timeout_s: float) -> Iterator[None]:
    """Hold the host's lock of a device ("cpu", or a GPU's uuid). Raises DeviceBusy.

    Locks on files end with the process that holds them. Who waits holds the place at the head of
    the queue, so that one that measures again and again does not keep the others out.
    """
    stem = Path(tempfile.gettempdir()) / f"fastkernels-tune-{device}"
    deadline = time.monotonic() + timeout_s
    with ExitStack() as held:
        with _flocked(stem.with_suffix(".queue"), deadline):
            held.enter_context(_flocked(stem.with_suffix(".lock"), deadline))
        yield


@contextmanager
def _flocked(path: Path, deadline: float) -> Iterator[None]:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        handle = os.open(path, flags)  # another user's may be opened, but not created again
    except FileNotFoundError:
        handle = os.open(path, flags | os.O_CREAT, 0o644)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise DeviceBusy(f"{path} is held by another process that measures") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(handle)


# ---- readings -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """The state of a device at one moment; None and nothing where the source does not tell.

    `throttle` are reasons for a low clock that spoil a time, `pids` processes on the GPU, `load`
    running tasks per core.
    """

    sm_mhz: int | None = None
    temperature_c: int | None = None
    throttle: tuple[str, ...] = ()
    pids: frozenset[int] = frozenset()
    load: float | None = None


@dataclass(frozen=True)
class Verdict:
    """What to record beside a block, and why it does not count, if so."""

    facts: dict[str, Any]
    reason: str = ""
    cause: Cause = Cause.THROTTLED


class Guard(Protocol):
    def read(self) -> Reading: ...

    def judge(self, readings: Sequence[Reading], own: Sequence[int]) -> Verdict:
        """`own`: the ids of our processes."""


# Bits of nvmlClocksEventReasons. Idleness, application clocks and the like do not spoil a time.
_REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}


def throttle_reasons(bits: int) -> tuple[str, ...]:
    return tuple(name for bit, name in _REASONS.items() if bits & bit)


class GpuGuard:
    """A block counts if its SM clock reached `min_clock` of the highest one seen, nothing throttled
    it, and no foreign process was on the GPU.

    The highest of a block's readings counts: between two calls a clock may already be falling.
    """

    def __init__(
        self, uuid: str, min_clock: float, source: Callable[[], Reading] | None = None
    ) -> None:
        self._min_clock = min_clock
        self._highest = 0
        self._name = "given"
        if source is None:
            self._name, source = _source(uuid)
        self._read = source

    def read(self) -> Reading:
        return self._read()

    def judge(self, readings: Sequence[Reading], own: Sequence[int]) -> Verdict:
        clocks = [reading.sm_mhz for reading in readings if reading.sm_mhz is not None]
        heat = [r.temperature_c for r in readings if r.temperature_c is not None]
        throttle = sorted({reason for reading in readings for reason in reading.throttle})
        foreign = max((_foreign(reading.pids, own) for reading in readings), default=0)
        self._highest = max([self._highest, *clocks])
        facts: dict[str, Any] = {"source": self._name, "sm_mhz": clocks, "temperature_c": heat}
        if throttle:
            facts["throttle"] = throttle
        if foreign:
            reason = f"{foreign} foreign process{'es' if foreign > 1 else ''} on the GPU"
            return Verdict(facts | {"foreign": foreign}, reason, Cause.FOREIGN_PROCESS)
        if throttle:
            return Verdict(facts, f"throttled: {', '.join(throttle)}")
        if clocks and max(clocks) < self._min_clock * self._highest:
            least = self._min_clock * self._highest
            return Verdict(facts, f"SM clock {max(clocks)} MHz, expected at least {least:.0f}")
        return Verdict(facts)


def _foreign(pids: frozenset[int], own: Sequence[int]) -> int:
    """Processes on the GPU that are not ours. In a container the driver may name them as the host
    does; there none of ours is among them, and they can only be counted."""
    others = pids - set(own)
    if len(others) < len(pids) or not own:
        return len(others)
    return max(0, len(pids) - len(own))


class LoadGuard:
    """On a CPU: a block counts unless the machine is swamped.

    A busy machine only widens the spread, and CPU times are never shipped, so the limit is high.
    """

    def __init__(self, max_load: float = 16.0, source: Callable[[], Reading] | None = None) -> None:
        self._max_load = max_load
        self.read = _read_load if source is None else source

    def judge(self, readings: Sequence[Reading], own: Sequence[int]) -> Verdict:
        loads = [round(reading.load, 2) for reading in readings if reading.load is not None]
        facts = {"source": "loadavg", "load": loads}
        if loads and min(loads) > self._max_load:
            reason = f"{min(loads):g} running tasks per core, expected at most {self._max_load:g}"
            return Verdict(facts, reason, Cause.FOREIGN_PROCESS)
        return Verdict(facts)


def _read_load() -> Reading:
    running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
    return Reading(load=int(running) / (os.cpu_count() or 1))


# ---- sources ------------------------------------------------------------------------------------


def _source(uuid: str) -> tuple[str, Callable[[], Reading]]:
    """NVML by nvidia-ml-py where it is installed, else nvidia-smi; without either, readings are
    empty, and every block says so."""
    try:
        return "nvml", _nvml(uuid)
    except Exception:  # not installed, or no driver behind it: the other source will tell
        pass
    if _smi(uuid, "uuid"):
        return "nvidia-smi", lambda: _read_smi(uuid)
    return "none", Reading


def _nvml(uuid: str) -> Callable[[], Reading]:
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)

    def read() -> Reading:
        return Reading(
            nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            throttle_reasons(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
            frozenset(p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
        )

    read()  # what is not permitted fails here
    return read


def _read_smi(uuid: str) -> Reading:
    for bits in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):  # new, old name
        line = _smi(uuid, f"clocks.sm,temperature.gpu,{bits}")
        if line is not None:
            break
    return parse_smi(line or "", _smi(uuid, "pid", "compute-apps") or "")


def parse_smi(line: str, pids: str) -> Reading:
    """From `clocks.sm,temperature.gpu,clocks_event_reasons.active` of nvidia-smi, and its pids."""
    fields = [field.strip() for field in line.split(",")]
    clock, heat, bits = fields if len(fields) == 3 else ("", "", "")
    return Reading(
        int(clock) if clock.isdigit() else None,
        int(heat) if heat.isdigit() else None,
        throttle_reasons(int(bits, 16)) if bits.startswith("0x") else (),
        frozenset(int(pid) for pid in pids.split() if pid.isdigit()),
    )


def _smi(uuid: str, fields: str, of: str = "gpu") -> str | None:
    command = ["nvidia-smi", f"--id={uuid}", f"--query-{of}={fields}"]
    try:
        done = subprocess.run(
            [*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
