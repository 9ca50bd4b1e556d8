"""Compile candidates ahead of a search, where there is a compiler and no GPU.

The folder that is filled is a cache of just-in-time compiles (`FASTKERNELS_CACHE`): carried to a
machine with a GPU, it serves there without a compiler. Compiles run in other processes, so that one
that crashes or hangs is one failure; what is finished is in the folder, whatever becomes of the
rest.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pkgutil
import queue
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from fastkernels import catalog
from fastkernels.core import jit, toolchain
from fastkernels.core.archs import ARCHS
from fastkernels.core.device import DeviceInfo, named_device
from fastkernels.core.kernels import Binary, Kernel, knobs
from fastkernels.core.route import Operator
from fastkernels_tuner.errors import TunerError, UnfitError
from fastkernels_tuner.space import configs, find_route, space_of

Pair = tuple[Kernel, Any]
"""A kernel and an instance of its config."""

START_S = 120.0
"""Time that a process has to import what it needs."""

Keep = Callable[[Path, Kernel, Any, str, str], Binary]
"""Compiles `(kernel, config, arch, variant)` into a folder."""


class PrebuildError(TunerError):
    """A device that no kernel is built for."""


class Failed(NamedTuple):
    """A config of which some variant could not be compiled; `reason` is the compiler's message."""

    op: str
    route: str
    config: dict[str, Any]
    reason: str

    def __str__(self) -> str:
        return f"{_label(self.route, self.config)}: {self.reason}"


class Summary(NamedTuple):
    """Counts of configs: compiled now, there before, failed. `bytes` is the machine code of the
    first two, `seconds` the time that this took."""

    built: int
    kept: int
    failed: tuple[Failed, ...]
    seconds: float
    bytes: int

    def __str__(self) -> str:
        return (
            f"{self.built} built, {self.kept} kept, {len(self.failed)} failed, "
            f"{self.bytes / 1e6:.1f} MB, {self.seconds:.1f} s"
        )


def candidates(
    operator: Operator, device: str | DeviceInfo, routes: Sequence[str] = ()
) -> list[Pair]:
    """Every legal config of every compiled route that an architecture (`sm90`) or device (`h200`)
    has; of these routes alone, if any are named. A device without machine code has none.

    Routes take turns, each with its default first, so that a beginning of the list has some of all.
    Raises SpaceError over an unknown route, ArgumentError over an unknown device.
    """
    arch = _arch(device)
    chosen = [find_route(operator.name, name) for name in routes] or operator.routes
    compiled = [route for route in chosen if route.language != "torch" and arch in route.archs]
    if not compiled:
        return []
    kernels = {kernel.name: kernel for kernel in _kernels(operator.name)}
    of_routes = []
    for route in compiled:
        made = (route.make_config(config) for config in configs(space_of(route, operator.name)))
        of_routes.append([(kernels[route.name], config) for config in made])
    turns = itertools.zip_longest(*of_routes)
    return [pair for turn in turns for pair in turn if pair is not None]


def build(
    pairs: Iterable[Pair],
    device: str | DeviceInfo,
    folder: Path,
    *,
    jobs: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    timeout_s: float = 300.0,
    keep: Keep = jit.keep,
) -> Summary:
    """Compile what a folder lacks, in `jobs` processes (one per core by default).

    `say` takes a line per compiled config; a config that takes longer than `timeout_s` fails.
    KeyboardInterrupt passes through when the compiles that run have ended; the next call goes on
    from there. `keep` is imported by its name in other processes.
    Raises PrebuildError over a device that no kernel is built for, ArgumentError over an unknown
    one, UnfitError over a folder that cannot be written.
    """
    arch = _arch(device)
    if arch not in ARCHS:
        raise PrebuildError(f"kernels are built for {', '.join(ARCHS)}, not for {arch}")
    start = time.monotonic()
    folder = folder.resolve()  # compiles run elsewhere
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UnfitError(f"{folder} cannot be written: {error}") from error
    todo, num_kept, num_bytes = _lacking(pairs, arch, folder)
    failed = []
    with contextlib.closing(_answers(todo, folder, jobs, timeout_s, keep)) as answers:
        for done, (job, answer) in enumerate(answers, 1):
            head = f"[{done}/{len(todo)}] {_label(job.name, job.config)}"
            if answer.reason is None:
                num_bytes += answer.num_bytes
                say(f"{head} {answer.seconds:.1f} s")
            else:
                failed.append(Failed(job.op, job.name, job.config, answer.reason))
                say(f"{head} failed: {answer.reason}")
    num_built = len(todo) - len(failed)
    return Summary(num_built, num_kept, tuple(failed), time.monotonic() - start, num_bytes)


class _Job(NamedTuple):
    """The variants of a config that a folder lacks. Kernels hold functions and cannot be sent."""

    op: str
    name: str
    config: dict[str, Any]
    arch: str
    variants: tuple[str, ...]


class _Answer(NamedTuple):
    seconds: float = 0.0
    num_bytes: int = 0
    reason: str | None = None


def _lacking(pairs: Iterable[Pair], arch: str, folder: Path) -> tuple[list[_Job], int, int]:
    """What has to be compiled; how many configs are complete; the bytes that are there."""
    versions = {
        language: version
        for language, version in toolchain.versions().items()
        if toolchain.missing(language, arch) is None
    }
    todo, num_kept, num_bytes = [], 0, 0
    for kernel, config in dict.fromkeys(pairs):
        missing = []
        for variant in kernel.variants:
            maker, _ = kernel.maker(config, variant)
            kept = jit.find(folder, kernel, config, arch, variant, versions.get(maker.language))
            if kept is None:
                missing.append(variant)
            else:
                num_bytes += len(kept.cubin)
        if missing:
            todo.append(_Job(kernel.op, kernel.name, knobs(config), arch, tuple(missing)))
        else:
            num_kept += 1
    return todo, num_kept, num_bytes


def _arch(device: str | DeviceInfo) -> str:
    """Of an architecture (`sm90`) or device (`h200`), present or not."""
    return device if isinstance(device, str) and device in ARCHS else named_device(device).arch


def _kernels(op: str) -> tuple[Kernel, ...]:
    found: tuple[Kernel, ...] = catalog.module(op, "kernels").KERNELS
    return found


def _label(route: str, config: dict[str, Any]) -> str:
    return f"{route}({', '.join(f'{name}={value}' for name, value in config.items())})"


# ---- processes ----------------------------------------------------------------------------------


def _answers(
    todo: Sequence[_Job], folder: Path, jobs: int | None, timeout_s: float, keep: Keep
) -> Generator[tuple[_Job, _Answer], None, None]:
    """Each job with what came of it, in the order in which they end."""
    count = min(jobs or len(os.sched_getaffinity(0)), len(todo))
    if count == 0:
        return
    with tempfile.TemporaryDirectory(prefix="fastkernels-prebuild-") as scratch:
        workers = [_Worker(Path(scratch, str(i)), folder, timeout_s, keep) for i in range(count)]
        idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in workers:
            idle.put(worker)

        def ask(job: _Job) -> _Answer:
            worker = idle.get()
            try:
                return worker.ask(job)
            finally:
                idle.put(worker)

        pool = ThreadPoolExecutor(count)
        try:
            futures = {pool.submit(ask, job): job for job in todo}
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            try:
                pool.shutdown(cancel_futures=True)  # lets the compiles end that run
            finally:
                for worker in workers:
                    worker.stop()


class _Died(Exception):
    """Why there will be no answer."""


class _Worker:
    """A process that compiles one job after the other, started anew when it has died."""

    def __init__(self, scratch: Path, folder: Path, timeout_s: float, keep: Keep) -> None:
        scratch.mkdir()
        self.scratch, self.timeout_s = scratch, timeout_s
        name = f"{keep.__module__}:{keep.__qualname__}"
        code = "import sys; from fastkernels_tuner import prebuild; prebuild.work(*sys.argv[1:])"
        self.command = [sys.executable, "-c", code, str(folder), name]
        self.process: subprocess.Popen[str] | None = None

    def ask(self, job: _Job) -> _Answer:
        try:
            if self.process is None:
                self.process = self._start()
                self._line(self.process, START_S)
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it died; reading tells the same
                print(json.dumps(job), file=self.process.stdin, flush=True)
            return _Answer(*json.loads(self._line(self.process, self.timeout_s)))
        except _Died as error:
            self.stop()
            return _Answer(reason=str(error))

    def _start(self) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TMPDIR": str(self.scratch),  # whatever a killed compiler leaves behind
            "CUDA_VISIBLE_DEVICES": "",  # the same code with and without a GPU
            "TRITON_DISABLE_LINE_INFO": "1",  # it names folders of this machine
            "TRITON_CACHE_DIR": str(self.scratch / "triton"),  # nothing stale
            "CUTE_DSL_CACHE_DIR": str(self.scratch / "cute"),
        }
        with self._words.open("w") as words:
            # A session of its own: Ctrl-C reaches the parent alone, a kill all that it started.
            return subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words,
                cwd=self.scratch, env=environment, text=True, start_new_session=True,
            )  # fmt: skip

    def _line(self, process: subprocess.Popen[str], timeout_s: float) -> str:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], timeout_s)[0]:
            raise _Died(f"took more than {timeout_s:g} s")
        line = process.stdout.readline()
        if not line:
            words = self._words.read_text(errors="replace")[-2000:].strip()
            raise _Died(f"the compiling process ended with {process.wait()}: {words}")
        return line

    @property
    def _words(self) -> Path:
        return self.scratch / "stderr"

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.__exit__(None, None, None)


def work(folder: str, keep: str) -> None:
    """The other process: a line of stdout when it is ready; then to each job in a line of stdin its
    answer in one of stdout."""
    jobs, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # compilers print
    compiles: Keep = pkgutil.resolve_name(keep)
    print(file=answers, flush=True)
    for line in jobs:
        answer = _compile(_Job(*json.loads(line)), Path(folder), compiles)
        print(json.dumps(answer), file=answers, flush=True)


def _compile(job: _Job, folder: Path, keep: Keep) -> _Answer:
    start, num_bytes = time.monotonic(), 0
    kernel = next(kernel for kernel in _kernels(job.op) if kernel.name == job.name)
    config = type(kernel.config)(**job.config)
    for variant in job.variants:
        try:
            num_bytes += len(keep(folder, kernel, config, job.arch, variant).cubin)
        except toolchain.ToolchainError as error:
            return _Answer(reason=f"variant {variant!r}: {error.reason}")
        except OSError as error:
            return _Answer(reason=f"variant {variant!r} cannot be kept: {error}")
    return _Answer(time.monotonic() - start, num_bytes)
