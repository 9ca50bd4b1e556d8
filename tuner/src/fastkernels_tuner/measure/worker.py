"""The candidate process: calls what it is told to on tensors that are lent to it, and times it.

It learns neither seeds, nor expected results, nor which of its calls is judged. Times and the
checks on its own timer are the word of a process that runs foreign code; what it computes is read
from lent memory by the judge.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import importlib.util
import resource
import signal
import statistics
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter as _now
from typing import Any, Literal, NamedTuple, Protocol

import torch

from fastkernels import catalog
from fastkernels.core import dispatch
from fastkernels.core.problem import dtype_name
from fastkernels.core.route import Operator, Route
from fastkernels.errors import ArgumentError, UnsupportedProblem
from fastkernels.testing import cupti
from fastkernels.testing.compare import as_tuple
from fastkernels_tuner.measure import buffers
from fastkernels_tuner.measure.protocol import (
    AnyMessage,
    Channel,
    Closed,
    Collect,
    Collected,
    Done,
    Hello,
    Lane,
    Loan,
    Open,
    Opened,
    Problem,
    Ready,
    Returned,
    Step,
)
from fastkernels_tuner.model import Cause

# What a timer rests on; looked at again after every series.
_WATCHED: tuple[tuple[Any, str], ...] = (
    (time, "perf_counter"),
    (time, "perf_counter_ns"),
    (time, "monotonic"),
    (statistics, "median"),
    (torch.cuda, "synchronize"),
    (torch.cuda.Event, "elapsed_time"),
    (torch.cuda.Event, "record"),
    (cupti, "assign"),
    *(
        (cupti.Recorder, name)
        for name in (
            "overwrite_l2", "synchronize", "timestamp", "drain", "pause", "resume", "_completed",
        )
    ),
)  # fmt: skip
_BEFORE = tuple(getattr(owner, name) for owner, name in _WATCHED)

# Longer than the broker waits: only a process whose broker is gone gets there.
_GRACE_S = 10.0
_MAX_FILE_BYTES = 4 << 30


def tampered() -> tuple[str, ...]:
    """Functions that a timer rests on and that are not what they were."""
    return tuple(
        f"{getattr(owner, '__name__', owner)}.{name}"
        for (owner, name), before in zip(_WATCHED, _BEFORE, strict=True)
        if getattr(owner, name) is not before
    )


# ---- timers -------------------------------------------------------------------------------------


class Timer(Protocol):
    """Times the steps of a series."""

    def begin(self) -> None: ...

    def step(self, prepare: Callable[[], Callable[[], Any]], finish: Callable[[Any], Any]) -> Any:
        """Time what `prepare` gives, then `finish` with its result; neither counts."""

    def collect(self) -> Collected:
        """Of the steps since it was last asked for, or since the beginning."""


class Wall:
    """Host time of a synchronous call."""

    def __init__(self) -> None:
        self._us: list[float | None] = []

    def begin(self) -> None:
        self._us = []

    def step(self, prepare: Callable[[], Callable[[], Any]], finish: Callable[[Any], Any]) -> Any:
        self._us.append(None)
        call = prepare()
        start = _now()
        result = call()
        self._us[-1] = (_now() - start) * 1e6
        return finish(result)

    def collect(self) -> Collected:
        found, self._us = tuple(self._us), []
        return Collected(us=found)


class Untimed(Wall):
    """A GPU without CUPTI, or a series in which nothing is timed: calls only."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def step(self, prepare: Callable[[], Callable[[], Any]], finish: Callable[[Any], Any]) -> Any:
        self._us.append(None)
        result = finish(prepare()())
        torch.cuda.synchronize(self._device)
        return result


class Windows(NamedTuple):
    """Host timestamps of a step: from where on it owns the device, and around the call."""

    begin: int
    call: cupti.Window
    end: int


class Kernels:
    """Sums of kernel times by CUPTI on a cold L2; see `fastkernels.testing.cupti`."""

    def __init__(self, records: cupti.Records) -> None:
        self._records = records
        self._steps: list[Windows] = []
        self._failed: set[int] = set()

    def begin(self) -> None:
        self._records.drain(force=True)
        self._steps, self._failed = [], set()

    def step(self, prepare: Callable[[], Callable[[], Any]], finish: Callable[[Any], Any]) -> Any:
        records = self._records
        begin = start = end = records.timestamp()
        which = len(self._steps)
        self._failed.add(which)
        try:
            call = prepare()
            records.overwrite_l2()
            records.synchronize()
            start = end = records.timestamp()
            result = call()
            end = records.timestamp()
            records.synchronize()
            finished = finish(result)
            records.synchronize()
            self._failed.discard(which)
            return finished
        finally:
            self._steps.append(Windows(begin, cupti.Window(start, end), records.timestamp()))

    def collect(self) -> Collected:
        """A step whose call left no record has no time. Work of ours besides the call is one fill
        of the L2; peers also prepare and copy, within the step."""
        launches, works = self._records.drain()
        late_launches, late_works = self._records.drain(force=True)
        launches, works = launches + late_launches, works + late_works
        groups = cupti.assign([step.call for step in self._steps], launches, works)
        found = Collected(
            us=tuple(
                sum(work.end - work.start for work in group) / 1e3
                if group and i not in self._failed
                else None
                for i, group in enumerate(groups)
            ),
            span_us=tuple(
                (max(work.end for work in group) - group[0].start) / 1e3 if group else None
                for group in groups
            ),
            kernels=tuple(len(group) for group in groups),
            strays=self._strays(launches, works, {w for group in groups for w in group}),
        )
        self._steps, self._failed = [], set()
        return found

    def _strays(
        self,
        launches: Sequence[cupti.Launch],
        works: Sequence[cupti.Work],
        counted: set[cupti.Work],
    ) -> tuple[int, ...]:
        """Per step, work launched after it began and before the next one, beside its call: all but
        the fill of the L2. Without a launch record it counts where it started on the device."""
        strays = [-1] * len(self._steps)  # the fill
        begins = [step.begin for step in self._steps]
        launched = {launch.correlation: launch.start for launch in launches}
        for work in works:
            if work in counted:
                continue
            which = bisect_right(begins, launched.get(work.correlation, work.start)) - 1
            if which >= 0:
                strays[which] += 1
        return tuple(max(0, n) for n in strays)


# ---- what is called -----------------------------------------------------------------------------


class Set(NamedTuple):
    """A slot, bound: the operator's `Inputs`, tensors to give as `out`, and those that hold the
    results afterwards."""

    inputs: Any
    out: tuple[torch.Tensor, ...]
    results: tuple[torch.Tensor, ...]


class Bound(Protocol):
    """A lane, bound to every slot."""

    def surroundings(self) -> Any: ...

    def prepare(self, which: int) -> Callable[[], Any]: ...

    def finish(self, which: int, result: Any) -> tuple[Returned, ...]: ...


@dataclass(frozen=True)
class Ours:
    """A route of the operator, through its public function."""

    operator: Operator
    route: str
    config: Any
    calls: tuple[Callable[[], Any], ...]

    @staticmethod
    def bind(operator: Operator, lane: Lane, sets: Sequence[Set]) -> Ours:
        """Compiles or loads what the route needs. Raises what that raises."""
        route = operator.route(lane.route)
        if route is None:
            raise ArgumentError(f"{operator.name} has no route {lane.route!r}")
        config = route.make_config(lane.config)
        bind = catalog.module(operator.name, "problem").bind
        with dispatch.force_route(operator, route.name, config):
            for each in sets[:1]:
                dispatch.warmup(operator, bind(each.inputs, _given(each), None).key)
        calls = tuple(
            functools.partial(operator.function, **each.inputs._asdict(), out=_given(each))
            for each in sets
        )
        return Ours(operator, route.name, config, calls)

    def surroundings(self) -> Any:
        return dispatch.force_route(self.operator, self.route, self.config)

    def prepare(self, which: int) -> Callable[[], Any]:
        return self.calls[which]

    def finish(self, which: int, result: Any) -> tuple[Returned, ...]:
        return _metadata(as_tuple(result))


@dataclass(frozen=True)
class Theirs:
    """A peer: `function(inputs, mode)` gives an object with `run()` and `outputs()`.

    It is bound anew before every call, since it may copy what it is given, and what it computed is
    copied into the lent tensors.
    """

    function: Callable[[Any, str], Any]
    mode: str
    sets: tuple[Set, ...]
    last: list[Any]

    @staticmethod
    def bind(loan: Loan, lane: Lane, sets: Sequence[Set]) -> Theirs:
        module, _, name = lane.peer.partition(":")
        function = getattr(importlib.import_module(module), name)
        return Theirs(function, loan.mode, tuple(sets), [None])

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        with torch.inference_mode():
            yield

    def prepare(self, which: int) -> Callable[[], Any]:
        self.last[0] = self.function(self.sets[which].inputs, self.mode)
        run: Callable[[], Any] = self.last[0].run
        return run

    def finish(self, which: int, result: Any) -> tuple[Returned, ...]:
        outputs = self.last[0].outputs()
        for ours, theirs in zip(self.sets[which].results, outputs, strict=True):
            if ours.shape != theirs.shape:
                return _metadata(outputs)
            ours.copy_(theirs)
        return _metadata(self.sets[which].results)


def _given(each: Set) -> Any:
    return each.out if len(each.out) > 1 else each.out[0]


def _metadata(results: Sequence[Any]) -> tuple[Returned, ...]:
    return tuple(
        Returned(dtype=dtype_name(result.dtype), shape=tuple(result.shape))
        if isinstance(result, torch.Tensor)
        else Returned(dtype=type(result).__name__, shape=())
        for result in results
    )


def bind_sets(slab: torch.Tensor, loan: Loan) -> tuple[Set, ...]:
    made = catalog.module(loan.op, "problem").Inputs
    sets = []
    for which in range(loan.slots):
        slot = slab[which * loan.slot_bytes : (which + 1) * loan.slot_bytes]
        views = {lent.name: buffers.view(slot, lent) for lent in loan.tensors}
        outputs = {lent.name for lent in loan.tensors if lent.is_output}
        inputs = {name: tensor for name, tensor in views.items() if name not in outputs}
        sets.append(
            Set(
                made(**inputs, **loan.scalars),
                tuple(tensor for name, tensor in views.items() if name in outputs),
                tuple(views[name] for name in loan.results),
            )
        )
    return tuple(sets)


def with_routes(operator: Operator, where: str) -> Operator:
    """The operator with the routes of a module (a name, or the path of a file) in front, which
    lists them by operator in `ROUTES`."""
    if not where:
        return operator
    more: tuple[Route, ...] = tuple(_load(where).ROUTES.get(operator.name, ()))
    return replace(operator, routes=(*more, *operator.routes))


@functools.cache
def _load(where: str) -> Any:
    if not where.endswith(".py"):
        return importlib.import_module(where)
    spec = importlib.util.spec_from_file_location("fastkernels_tuner_routes", where)
    if spec is None or spec.loader is None:
        raise ImportError(f"{where} is no module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


# ---- errors -------------------------------------------------------------------------------------

# Words of CUDA's errors; the first that occurs decides.
_WORDS: tuple[tuple[str, Cause], ...] = (
    ("out of memory", Cause.OUT_OF_MEMORY),
    ("uncorrectable ecc", Cause.ECC_XID),
    ("fallen off the bus", Cause.GPU_LOST),
    ("no cuda-capable device", Cause.GPU_LOST),
    ("device is lost", Cause.GPU_LOST),
    ("illegal memory access", Cause.OUT_OF_BOUNDS),
    ("misaligned address", Cause.OUT_OF_BOUNDS),
    ("unspecified launch failure", Cause.CRASH),
    ("device-side assert", Cause.CRASH),
    ("illegal instruction", Cause.CRASH),
)


def cause_of(error: BaseException, otherwise: Cause) -> Cause:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return Cause.OUT_OF_MEMORY
    if isinstance(error, (ArgumentError, UnsupportedProblem)):
        return Cause.UNCLASSIFIED
    text = str(error).lower()
    return next((cause for words, cause in _WORDS if words in text), otherwise)


# ---- the process --------------------------------------------------------------------------------


class Worker:
    def __init__(self, channel: Channel, device: torch.device, limit_s: float) -> None:
        self._channel = channel
        self._device = device
        self._limit_s = limit_s
        self._slab: torch.Tensor | None = None
        self._lanes: tuple[Bound | None, ...] = ()
        self._why = ""
        self._recorder: cupti.Recorder | None = None
        self._timed: Timer = self._find_timer()
        self._timer = self._timed

    def _find_timer(self) -> Timer:
        if self._device.type != "cuda":
            return Wall()
        torch.cuda.set_device(self._device)
        try:
            cupti.load()
        except cupti.CuptiMissing as error:
            self._why = str(error)
            return Untimed(self._device)
        self._recorder = cupti.Recorder(self._device)
        self._recorder.start()  # CUPTI is left with the process
        return Kernels(self._recorder)

    def _begin(self, is_timed: bool) -> None:
        """A series; one that nobody times is spared the records and the cold L2."""
        self._timer = self._timed
        if self._recorder is not None:
            if is_timed:
                self._recorder.resume()
            else:
                self._recorder.pause()
                self._timer = Untimed(self._device)
        self._timer.begin()

    def serve(self) -> None:
        """Until the broker closes the connection."""
        while True:
            try:
                envelope = self._channel.receive()
                # From a thread that needs no interpreter: a call that hangs must not outlive us.
                faulthandler.dump_traceback_later(self._limit_s + _GRACE_S, exit=True)
                reply = self._answer(envelope.message)
                faulthandler.cancel_dump_traceback_later()
                self._channel.send(envelope.nonce, reply)
            except Closed:
                return

    def _answer(self, message: AnyMessage) -> AnyMessage:
        if isinstance(message, Step):
            return self._step(message)
        if isinstance(message, Open):
            return self._open(message)
        if isinstance(message, Collect):
            return self._timer.collect().model_copy(update={"tampered": tampered()})
        assert isinstance(message, Hello), message.kind
        return Ready(timer=self._timer_name(), why=self._why)

    def _timer_name(self) -> Literal["cupti", "wall", "none"]:
        if isinstance(self._timed, Kernels):
            return "cupti"
        return "none" if isinstance(self._timed, Untimed) else "wall"

    def _open(self, message: Open) -> Opened:
        self._lanes = ()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what other candidates needed is the judge's to use
        if message.buffer is not None:
            self._slab = None  # gives the former one back
            self._slab = buffers.attach(message.buffer, self._device)
        assert self._slab is not None, "a loan without its slab"
        sets = bind_sets(self._slab, message.loan)
        lanes: list[Bound | None] = []
        problems: list[Problem | None] = []
        for lane in message.lanes:
            try:
                lanes.append(self._bind(message, lane, sets))
                problems.append(None)
            except Exception as error:
                lanes.append(None)
                problems.append(self._problem(error, Cause.COMPILE))
        self._lanes = tuple(lanes)
        try:
            self._begin(message.is_timed)
        except Exception as error:  # of the recording, which is no lane's
            return Opened(problems=tuple(problems), fault=cupti.describe(error))
        return Opened(problems=tuple(problems))

    def _bind(self, message: Open, lane: Lane, sets: Sequence[Set]) -> Bound:
        if lane.peer:
            return Theirs.bind(message.loan, lane, sets)
        operator = with_routes(catalog.operator(message.loan.op), message.routes)
        return Ours.bind(operator, lane, sets)

    def _step(self, message: Step) -> Done:
        lane = self._lanes[message.lane]
        assert lane is not None, "a step on a lane that could not be opened"
        try:
            with lane.surroundings():
                returned = self._timer.step(
                    functools.partial(lane.prepare, message.slot),
                    functools.partial(lane.finish, message.slot),
                )
        except Exception as error:
            return Done(problem=self._problem(error, Cause.UNCLASSIFIED))
        return Done(returned=returned)

    def _problem(self, error: Exception, otherwise: Cause) -> Problem:
        is_fatal = False
        if self._device.type == "cuda":
            try:
                torch.cuda.synchronize(self._device)
            except Exception as later:  # sticky: the context is lost
                is_fatal, error, otherwise = True, later, Cause.CRASH
        return Problem(
            cause=cause_of(error, otherwise), message=cupti.describe(error), is_fatal=is_fatal
        )


def run(channel: Channel, device: torch.device, limit_s: float) -> None:
    """Serve until the broker closes the connection, or is gone for longer than a call may take."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # how the broker asks where it hangs
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if hard == resource.RLIM_INFINITY or hard > _MAX_FILE_BYTES:
        resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE_BYTES, hard))
    Worker(channel, device, limit_s).serve()
