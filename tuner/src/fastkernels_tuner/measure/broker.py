"""The broker: has a judge and candidate processes, and makes evaluations out of what they say.

It holds no tensors. A candidate that hangs or crashes is killed with its process group and
restarted; verdicts so far are kept. A wrong number is final; only faults of the infrastructure are
tried again, and every attempt is recorded.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar

import fastkernels
from fastkernels_tuner.errors import TunerError
from fastkernels_tuner.measure.guards import GpuGuard, Guard, LoadGuard, Reading, exclusive
from fastkernels_tuner.measure.protocol import (
    AnyMessage,
    Call,
    Channel,
    Check,
    Checked,
    Closed,
    Collect,
    Collected,
    Diagnose,
    Digest,
    Digested,
    Done,
    Draw,
    Facts,
    Fault,
    FileBuffer,
    Fill,
    Filled,
    Hello,
    Lane,
    Lend,
    Lending,
    Loan,
    Malformed,
    Open,
    Opened,
    Ping,
    Pong,
    Ready,
    Reap,
    Reaped,
    Share,
    Shared,
    Spawn,
    Spawned,
    Step,
    TimedOut,
    Verdicts,
)
from fastkernels_tuner.model import (
    Block,
    Candidate,
    Cause,
    Environment,
    Evaluation,
    Failure,
    Policy,
    Trials,
    Workload,
)

NURSERY = "fastkernels_tuner.measure.nursery"

SLOTS = 4
"""Input sets in the pool of a workload that is timed, at most."""

JUDGED_SLOTS = 32
"""The same where nothing is timed: so many calls are filled, made and judged at a time, at most. A
call alone costs three round trips between processes, each with a change of the GPU's context: 2.4
of the 5.5 ms of a judged call on an H200. What is small is also judged by one look."""

TIMED_SHARE = 0.125
"""Of the series that are judged alone, those that are timed all the same: a candidate that could
tell them from others might be right in them alone."""

CHECKS = 2
"""Judged calls among the timed ones of a block, at random places; the first call and one after the
timed ones are judged, too."""

WARMUP = {"wall": (1, 2), "cupti": (3, 6)}
"""Calls before the timed ones, at least and at most: a candidate cannot count on a number."""

REDRAW_S = 0.25
"""Inputs that take longer to draw are not drawn for every call, only for every block."""

PEER_ALLOWANCE = 10.0
"""A peer rounds as it likes; what is wrong is off by more than this many of our limits."""

MAX_OVERLAYS = 2
"""Nurseries of overlays at a time: a candidate's, and that of what it is compared with."""

LEAST_RECORDED = 0.8
"""Of a block's timed calls; with fewer records something is wrong with the recording."""

LOG_BYTES = 4000  # of what a process printed last
START_TIMEOUT_S = 180.0
JUDGE_TIMEOUT_S = 900.0  # the oracle on a CPU takes its time
CALL_TIMEOUT_S = 60.0  # for each further call of one message
REAP_TIMEOUT_S = 30.0
LOCK_TIMEOUT_S = 600.0
# Blocks before the share of discarded ones says something about the machine.
_SETTLED = 10

T = TypeVar("T")
M = TypeVar("M")


class TimerMissing(TunerError):
    """The device has no timer of the kind that the policy asks for; nothing else is used."""

    exit_code = 3


class Unstable(TunerError):
    """More blocks had to be discarded than the policy allows."""

    exit_code = 3


class InfrastructureFault(TunerError):
    """A fault of the infrastructure that outlasted its retries; `attempts` are all of them."""

    exit_code = 3

    def __init__(self, attempts: Sequence[Failure]) -> None:
        super().__init__(f"{attempts[-1].cause.value}: {attempts[-1].message}")
        self.attempts = tuple(attempts)


class Rejected(TunerError):
    """A candidate failed where only times were asked for."""

    exit_code = 5

    def __init__(self, candidate: str, failure: Failure) -> None:
        super().__init__(f"{candidate}: {failure.cause.value}: {failure.message}")
        self.candidate = candidate
        self.failure = failure


# ---- processes ----------------------------------------------------------------------------------


class Infrastructure(Exception):
    """One attempt failed for no fault of the candidate's."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ProcessFailed(Exception):
    """A process gave no answer, ended, or talked nonsense; it was killed."""

    def __init__(self, cause: Cause, message: str, log: str) -> None:
        super().__init__(message)
        self.cause = cause
        self.log = log


def put(channel: Channel, message: AnyMessage) -> str:
    """Ask, and the nonce that the answer has to repeat. Raises Closed."""
    nonce = secrets.token_hex(8)
    channel.send(nonce, message)
    return nonce


def take(
    channel: Channel, nonce: str, message: AnyMessage, reply: type[M], timeout_s: float
) -> M | Fault:
    """The answer to a message. Raises Closed, TimedOut, Malformed."""
    envelope = channel.receive(timeout_s)
    if envelope.nonce != nonce:
        raise Malformed("it answers what it was not asked")
    if not isinstance(envelope.message, (reply, Fault)):
        raise Malformed(f"{envelope.message.kind!r} is no answer to {message.kind!r}")
    return envelope.message


class Nursery:
    """The process that forks the others; see `nursery`. Raises Infrastructure where it fails.
    `overlay`: a folder that it imports from before anything else."""

    def __init__(self, overlay: str = "") -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", NURSERY, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env=_before(overlay, _environment()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        self._channel = Channel(ours)
        self.is_alive = True

    def spawn(self, message: Spawn, fd: int) -> int:
        """The process id."""
        return self._ask(message, Spawned, START_TIMEOUT_S, fd).pid

    def reap(self, pid: int, timeout_s: float) -> int | None:
        message = Reap(pid=pid, timeout_s=timeout_s)
        return self._ask(message, Reaped, timeout_s + START_TIMEOUT_S).status

    def close(self) -> str:
        """End it, and what it wrote about its troubles."""
        if not self.is_alive:
            return ""
        self.is_alive = False
        self._channel.close()
        self._process.kill()
        _, text = self._process.communicate()
        return text.decode(errors="replace").strip()[-LOG_BYTES:]

    def _ask(self, message: AnyMessage, reply: type[M], timeout_s: float, fd: int = -1) -> M:
        try:
            nonce = put(self._channel, message)
            if fd >= 0:
                self._channel.send_fd(fd)
            answer = take(self._channel, nonce, message, reply, timeout_s)
        except (Closed, TimedOut, Malformed) as error:
            failure = Failure(
                cause=Cause.HARNESS_BUG,
                message=f"processes cannot be started: {type(error).__name__} {error}",
                detail={"log": self.close()},
            )
            raise Infrastructure(failure) from error
        except BaseException:  # interrupted: the answer would come to the next question
            self.close()
            raise
        assert isinstance(answer, reply)
        return answer


class Process:
    """A process in a session and a folder of its own, asked one thing at a time."""

    def __init__(
        self, nursery: Nursery, role: Literal["judge", "worker"], device: str, limit_s: float
    ) -> None:
        self._nursery = nursery
        self._folder = Path(tempfile.mkdtemp(prefix="fastkernels-measure-"))
        self._tail = ""
        message = Spawn(role=role, device=device, folder=str(self._folder), limit_s=limit_s)
        ours, theirs = socket.socketpair()
        with theirs:
            self.pid = nursery.spawn(message, theirs.fileno())
        self._channel = Channel(ours)
        self.is_alive = True

    def ask(self, message: AnyMessage, reply: type[M], timeout_s: float) -> M:
        """Raises ProcessFailed; the process is gone then, unless it says what its fault is."""
        answers, error = self.ask_all([message], reply, timeout_s)
        if error is not None:
            raise error
        return answers[0]

    def ask_all(
        self, messages: Sequence[AnyMessage], reply: type[M], timeout_s: float
    ) -> tuple[list[M], ProcessFailed | None]:
        """Ask several things at once, each to be answered within `timeout_s` of the one before:
        the answers, and what failed where they are fewer."""
        answers: list[M] = []
        message = messages[0]
        try:
            nonces = []
            for message in messages:
                try:
                    nonces.append(put(self._channel, message))
                except Closed:  # over one of those before, whose answers may be here already
                    break
            for message, nonce in zip(messages, nonces, strict=False):
                answer = take(self._channel, nonce, message, reply, timeout_s)
                if isinstance(answer, Fault):
                    return answers, ProcessFailed(answer.cause, answer.message, "")
                answers.append(answer)
            if len(answers) < len(messages):
                raise Closed
        except TimedOut:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)  # writes to the log where it is
            time.sleep(0.2)
            self.kill()
            what = f"no answer to {message.kind!r} within {timeout_s:g} s"
            return answers, ProcessFailed(Cause.HANG, what, self._tail)
        except Closed:
            what = f"{self.kill()} in the middle of {message.kind!r}"
            return answers, ProcessFailed(Cause.CRASH, what, self._tail)
        except Malformed as error:
            self.kill()
            what = f"sent what is not of the protocol: {error}"
            return answers, ProcessFailed(Cause.CHEAT_SUSPECT, what, self._tail)
        except BaseException:  # interrupted: the answer would come to the next question
            self.kill()
            raise
        return answers, None

    def kill(self) -> str:
        """End the process group, if it did not end by itself, and say how it ended."""
        if not self.is_alive:
            return "ended before"
        self.is_alive = False
        self._channel.close()
        try:
            # A process that closed its end is about to end: how it does is worth a moment.
            status = self._nursery.reap(self.pid, 0.5)
            self._kill_group()
            if status is None and self._nursery.reap(self.pid, REAP_TIMEOUT_S) is None:
                what = f"process {self.pid} cannot be killed: the driver holds it"
                raise ProcessFailed(Cause.GPU_LOST, what, self._read_log())
        except Infrastructure:  # without its nursery init reaps it, and nobody knows how it ended
            self._kill_group()
            return "gone with its nursery"
        finally:
            self._tail = self._read_log()
            shutil.rmtree(self._folder, ignore_errors=True)
        if status is None:
            return "killed"
        if status < 0:
            return f"ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _read_log(self) -> str:
        try:
            text = (self._folder / "log").read_bytes()[-LOG_BYTES:]
        except FileNotFoundError:
            return ""
        return text.decode(errors="replace").strip()


def _before(overlay: str, environment: dict[str, str]) -> dict[str, str]:
    """The environment, with `overlay` before everything else that is imported from."""
    if not overlay:
        return environment
    return {**environment, "PYTHONPATH": os.pathsep.join((overlay, environment["PYTHONPATH"]))}


def _environment() -> dict[str, str]:
    """This process's, with its import path, and without what CUDA memory cannot be shared under."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    }
    path = [str(Path(entry).absolute()) for entry in sys.path if entry]
    return {**kept, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


@dataclass
class Seat:
    """Where a candidate process sits, if one does, the slab that it has mapped (0: none), and the
    overlay that it was started with."""

    process: Process | None = None
    slab: int = 0
    overlay: str = ""

    def is_taken(self) -> bool:
        return self.process is not None and self.process.is_alive

    def ask(self, message: AnyMessage, reply: type[M], timeout_s: float) -> M:
        """Raises ProcessFailed."""
        assert self.process is not None, "nobody sits here"
        return self.process.ask(message, reply, timeout_s)

    def ask_all(
        self, messages: Sequence[AnyMessage], reply: type[M], timeout_s: float
    ) -> tuple[list[M], ProcessFailed | None]:
        assert self.process is not None, "nobody sits here"
        return self.process.ask_all(messages, reply, timeout_s)

    def clear(self) -> None:
        if self.process is not None:
            self.process.kill()
        self.process, self.slab = None, 0


# ---- results under way --------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """What is called under which name: a candidate by its id, a peer by its own. `overlay` as of a
    nursery."""

    label: str
    lane: Lane
    allowance: float = 1.0
    overlay: str = ""


@dataclass
class Tally:
    """Judged calls of one entry, and what it is to blame for: kept through every attempt, so that
    no fault of the infrastructure can make up for a wrong number."""

    stratum: str
    trials: int = 0
    worst: float = 0.0
    failures: list[Failure] = field(default_factory=list)

    def add(self, checked: Checked) -> None:
        self.trials += 1
        self.worst = max(self.worst, checked.worst)
        if checked.failure is not None:
            self.failures.append(checked.failure)

    @property
    def failure(self) -> Failure | None:
        return self.failures[0] if self.failures else None

    def close(self) -> Trials:
        return Trials(
            stratum=self.stratum,
            trials=self.trials,
            failures=tuple(self.failures),
            worst=self.worst,
        )


@dataclass(frozen=True)
class Held:
    """A loan of the judge's, and how many slots it was asked for: it may have fewer."""

    workload: str
    asked: int
    loan: Loan


Tallies = Mapping[str, Tally]
"""By the entry's label."""


@dataclass
class Samples:
    """Timed calls of one entry."""

    us: list[float] = field(default_factory=list)
    span_us: list[float] = field(default_factory=list)
    kernels: list[int] = field(default_factory=list)
    asked: int = 0


@dataclass
class Series:
    """Timed calls of entries in one process, side by side; the state of the machine meanwhile, and
    how many contents the inputs had."""

    samples: dict[str, Samples]
    readings: list[Reading]
    contents: int


# ---- the bench ----------------------------------------------------------------------------------


class Bench:
    """Judges and times candidates on one device: "cpu", or a GPU such as "cuda:0".

    `peers` maps a name to the "module:function" that candidate processes import for it; the
    function takes `(inputs, mode)` and gives an object with `run()` and `outputs()`, as
    `bench/peers/<op>.py` has them. `routes` names a module or a .py file with further routes, in a
    dictionary `ROUTES` of tuples by operator. `code` is the commit, by default git's; `lease` is
    written into blocks. Use it as a context manager: processes start when they are first needed.

    Every call holds the host's lock of the device and raises DeviceBusy where it cannot have it;
    TimerMissing where times are asked for and the device has no timer of the policy's kind;
    Unstable where too many blocks had to be discarded. Faults of the infrastructure are tried again
    up to `policy.max_retries` times; what outlasts that is a failure with such a cause or, where
    there is no place for one, InfrastructureFault.
    """

    def __init__(
        self,
        device: str,
        policy: Policy,
        *,
        seed: int,
        peers: Mapping[str, str] | None = None,
        routes: str = "",
        guard: Guard | None = None,
        code: str = "",
        lease: int = 0,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
    ) -> None:
        if device != "cpu" and not device.startswith("cuda"):
            raise ValueError(f"device {device!r} is unknown, expected 'cpu' or 'cuda:<index>'")
        self.device = "cuda:0" if device == "cuda" else device
        self.policy = policy
        self.lease = lease
        self._rng = random.Random(seed)
        self._peers = dict(peers or {})
        self._routes = str(Path(routes).absolute()) if routes.endswith(".py") else routes
        self._code = code
        self._lock_timeout_s = lock_timeout_s
        self._guard = guard
        self._overlays: dict[str, str] = {}  # by the candidates' source
        self._nurseries: dict[str, Nursery] = {}  # by overlay, the one used last at the end
        self._judge: Process | None = None
        self._facts: Facts | None = None
        self._environment: Environment | None = None
        self._seats = (Seat(), Seat())
        self._loan: Held | None = None
        self._files: set[str] = set()  # slabs that a judge may have left behind
        self._draw_s: list[float] = []
        self._blocks = self._discarded = 0

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process."""
        for seat in self._seats:
            seat.clear()
        if self._judge is not None:
            self._judge.kill()
            self._forget_judge()
        for nursery in self._nurseries.values():
            nursery.close()
        self._nurseries.clear()

    def overlay(self, source: str, folder: Path) -> None:
        """Candidates with this `source` import from `folder` before anything else, in processes of
        their own: what is there (an edited copy of the package, say) takes the place of what is
        installed. The judge never does."""
        self._overlays[source] = str(folder.absolute())

    def renew(self) -> None:
        """End the candidates' processes: what comes next runs in new ones. The judge stays, which
        takes seconds to start and is no part of what is timed."""
        for seat in self._seats:
            seat.clear()

    @property
    def environment(self) -> Environment:
        """Where this bench measures. `timer` is "cupti" on a GPU that has it; without it a GPU is
        said to have "wall" and refuses to time anything."""
        if self._environment is None:
            facts, _ = self._retrying(self._ask_facts)
            self._environment = Environment(
                device=facts.device,
                arch=facts.arch,
                uuid=facts.uuid,
                driver=facts.driver,
                versions=facts.versions,
                code=self._code or commit(),
                timer="cupti" if facts.timer == "cupti" else "wall",
            )
        return self._environment

    # ---- what stages ask for --------------------------------------------------------------------

    def evaluate(
        self, candidate: Candidate, workload: Workload, *, iterations: int, trials: int
    ) -> Evaluation:
        """Judge `trials` calls on fresh draws, then time `iterations` calls in one block.

        Judged are calls within and after the timed ones, too, and count among the trials. Whatever
        is wrong ends it: there is a failure then and no time.
        """
        (entry,) = self._entries([candidate], workload)
        if iterations:
            self._require_timer()
            self._require_stability()
        with self._exclusive():
            tally, seeds = Tally(workload.id), self._seeds(trials)
            tallies = {entry.label: tally}
            attempts: list[Failure] = []
            _, fault = self._attempt(
                partial(self._judged, [entry], workload, seeds, tallies), attempts
            )
            if fault is not None:
                return self._evaluation(entry, workload, [], fault, tally, attempts)
            if not iterations:
                return self._evaluation(entry, workload, [], None, tally, attempts)
            blocks, fault = self._timed([entry], workload, iterations, tallies, attempts)
            return self._evaluation(entry, workload, blocks[entry.label], fault, tally, attempts)

    def judge(self, candidate: Candidate, workload: Workload, seeds: Sequence[int]) -> Trials:
        """One judged call per seed, without timing, up to the first that fails.

        A fault of the infrastructure ends it as well and is among the failures: whoever bounds
        failure rates begins such a batch anew, and counts the attempts.
        """
        (found,) = self.judge_all([candidate], workload, seeds)
        return found

    def judge_all(
        self, candidates: Sequence[Candidate], workload: Workload, seeds: Sequence[int]
    ) -> list[Trials]:
        """The same for several candidates, in one process where they come from the same sources.
        Each finds the same draws in newly filled memory: these, and what they have to give, are
        made once."""
        entries = self._entries(candidates, workload)
        with self._exclusive():
            tallies = {entry.label: Tally(workload.id) for entry in entries}
            try:
                for together in self._together(entries, workload, len(seeds)):
                    self._judged(together, workload, list(seeds), tallies)
            except Infrastructure as error:
                self._recover(error.failure)
                for tally in tallies.values():
                    if tally.failure is None and tally.trials < len(seeds):
                        tally.failures.append(error.failure)
            return [tallies[entry.label].close() for entry in entries]

    def _together(
        self, entries: Sequence[Entry], workload: Workload, count: int
    ) -> Iterator[list[Entry]]:
        """Those that may be judged side by side: of equal sources, in rounds of two draws or more.
        Whose first draw is the last one of the entry before could find that one's results in memory
        that it should have written itself: such entries are judged one by one, and on a single draw
        each in a process of its own."""
        slots = self._lend(workload, judged_slots(count)).slots if count else 0
        for overlay in dict.fromkeys(entry.overlay for entry in entries):
            own = [entry for entry in entries if entry.overlay == overlay]
            if len(own) == 1 or (count >= 2 and slots >= 3):
                yield own
                continue
            for entry in own:
                if count == 1 and entry is not own[0]:
                    self._seats[0].clear()
                yield [entry]

    def repeat(
        self, candidate: Candidate, workload: Workload, seed: int, *, calls: int = 3
    ) -> tuple[str, ...]:
        """Digests of the results of judged calls with equal inputs and poison. Raises Rejected
        where a call fails or is wrong."""
        (entry,) = self._entries([candidate], workload)
        with self._exclusive():
            digests, _ = self._retrying(partial(self._repeat, entry, workload, seed, calls))
            return digests

    def _repeat(self, entry: Entry, workload: Workload, seed: int, calls: int) -> tuple[str, ...]:
        seat, tally, found = self._seats[0], Tally(workload.id), []
        self._open(seat, workload, [entry], {entry.label: tally}, is_timed=False)
        for _ in range(calls):
            slot = self._draw()
            if tally.failure is None:
                tally.add(self._call(seat, workload, entry, 0, slot, seed, is_judged=True))
            if tally.failure is not None:
                raise Rejected(entry.label, tally.failure)
            found.append(self._ask_judge(Digest(slot=slot), Digested).digest)
        return tuple(found)

    def pair(
        self,
        a: Candidate | str,
        b: Candidate | str,
        workload: Workload,
        *,
        number: int,
        iterations: int,
    ) -> tuple[Block, ...]:
        """Blocks in the order A B B A or, by a coin, B A A B, each candidate (or peer, by name) in
        a process of its own.

        Where one block does not count none does: all are marked as discarded, those that were not
        measured any more are left out, and it is for the caller to ask for another pair. Raises
        Rejected where a call fails or is wrong.
        """
        entries = self._entries([a, b], workload)
        self._require_timer()
        with self._exclusive():
            order = (0, 1, 1, 0) if self._rng.random() < 0.5 else (1, 0, 0, 1)
            tallies = {entry.label: Tally(workload.id) for entry in entries}
            blocks, attempts = self._retrying(
                partial(self._pair, entries, order, workload, number, iterations, tallies)
            )
            if not attempts:
                return blocks
            faults = {"attempts": [attempt.model_dump(mode="json") for attempt in attempts]}
            return tuple(
                block.model_copy(update={"guard": {**block.guard, **faults}}) for block in blocks
            )

    def _pair(
        self,
        entries: Sequence[Entry],
        order: Sequence[int],
        workload: Workload,
        number: int,
        iterations: int,
        tallies: Tallies,
    ) -> tuple[Block, ...]:
        blocks: list[Block] = []
        for place, side in enumerate(order):
            entry = entries[side]
            series = self._series(self._seats[side], [entry], workload, iterations, tallies)
            failure = tallies[entry.label].failure
            if failure is not None:
                raise Rejected(entry.label, failure)
            assert series is not None
            block, _ = self._make_block(series, entry, workload, number, place, side)
            blocks.append(block)
            if block.discarded:
                why = f"of a pair: {block.discarded}"
                return tuple(
                    each.model_copy(update={"discarded": each.discarded or why}) for each in blocks
                )
        return tuple(blocks)

    def interleave(
        self,
        candidates: Sequence[Candidate],
        workload: Workload,
        *,
        iterations: int,
        peers: Mapping[str, str] | None = None,
    ) -> list[Evaluation]:
        """Time candidates and peers side by side in one process: in every round each is called
        once, in an order drawn anew. One evaluation each, candidates first; of one that fails or is
        wrong it says so, and the others go on. What is hopeless by `policy.first_look` has the
        times until then. `peers` as for the bench."""
        self._peers.update(peers or {})
        entries = self._entries([*candidates, *(peers or ())], workload)
        self._require_timer()
        self._require_stability()
        with self._exclusive():
            attempts: list[Failure] = []
            tallies = {entry.label: Tally(workload.id) for entry in entries}
            look = self.policy.first_look
            blocks, fault = self._timed(entries, workload, iterations, tallies, attempts, look)
            return [
                self._evaluation(
                    entry, workload, blocks[entry.label], fault, tallies[entry.label], attempts
                )
                for entry in entries
            ]

    @staticmethod
    def _evaluation(
        entry: Entry,
        workload: Workload,
        blocks: Sequence[Block],
        fault: Failure | None,
        tally: Tally,
        attempts: Sequence[Failure],
    ) -> Evaluation:
        """`fault`: of the infrastructure; what the candidate did comes first."""
        return Evaluation(
            candidate=entry.label,
            workload=workload.id,
            blocks=tuple(blocks) if tally.failure is None else (),
            trials=(tally.close(),),
            failure=tally.failure or fault,
            attempts=tuple(attempts),
        )

    # ---- questions of usage ---------------------------------------------------------------------

    def _entries(self, wanted: Sequence[Candidate | str], workload: Workload) -> list[Entry]:
        entries = []
        for each in wanted:
            if isinstance(each, str):
                if each not in self._peers:
                    known = ", ".join(self._peers) or "none"
                    raise ValueError(f"peer {each!r} is unknown, expected one of: {known}")
                lane = Lane(peer=self._peers[each])
                entries.append(Entry(each, lane, PEER_ALLOWANCE))
                continue
            if each.op != workload.op:
                raise ValueError(f"{each} is of {each.op}, the workload of {workload.op}")
            lane = Lane(route=each.route, config=each.config)
            overlay = self._overlays.get(each.source, "")
            entries.append(Entry(each.id, lane, overlay=overlay))
        return entries

    def _require_timer(self) -> None:
        timer = self.environment.timer
        assert self._facts is not None
        if self._facts.timer == "none":
            raise TimerMissing(f"{self.device}: {self._facts.why}")
        if timer != self.policy.timer:
            raise TimerMissing(
                f"{self.device} is timed by {timer}, policy {self.policy.name!r} asks for"
                f" {self.policy.timer}"
            )

    def _require_stability(self) -> None:
        limit = self.policy.max_discarded
        if self._blocks >= _SETTLED and self._discarded > limit * self._blocks:
            raise Unstable(
                f"{self._discarded} of {self._blocks} blocks were discarded, expected at most"
                f" {limit:.0%}"
            )

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        uuid = self.environment.uuid
        with exclusive(uuid if self.device != "cpu" else "cpu", self._lock_timeout_s):
            yield

    def _seeds(self, count: int) -> list[int]:
        return [self._rng.getrandbits(31) for _ in range(count)]

    # ---- attempts -------------------------------------------------------------------------------

    def _retrying(self, work: Callable[[], T]) -> tuple[T, list[Failure]]:
        """What `work` gives, tried again where the infrastructure failed. Raises
        InfrastructureFault."""
        attempts: list[Failure] = []
        while True:
            try:
                return work(), attempts
            except Infrastructure as error:
                attempts.append(error.failure)
                self._recover(error.failure)
                if len(attempts) > self.policy.max_retries:
                    raise InfrastructureFault(attempts) from error

    def _recover(self, failure: Failure) -> None:
        """Whatever held a lost device starts anew."""
        if failure.cause in (Cause.GPU_LOST, Cause.ECC_XID):
            self.close()

    def _attempt(
        self, work: Callable[[], T], attempts: list[Failure]
    ) -> tuple[T | None, Failure | None]:
        """The same, with the attempts recorded; the fault that outlasted them as a value."""
        try:
            result, faults = self._retrying(work)
        except InfrastructureFault as error:
            attempts += error.attempts
            return None, error.attempts[-1]
        attempts += faults
        return result, None

    def _judged(
        self, entries: Sequence[Entry], workload: Workload, seeds: list[int], tallies: Tallies
    ) -> None:
        """One judged call per seed and entry until it fails, as many at a time as there are slots;
        `seeds` are those left, should it be tried again. Raises Infrastructure."""
        seat, wanted = self._seats[0], judged_slots(len(seeds))
        lanes: list[str] = []  # as the process that sits there knows them
        opened: Loan | None = None

        def right() -> list[Entry]:
            return [entry for entry in entries if tallies[entry.label].failure is None]

        while seeds and right():
            loan = self._lend(workload, wanted)
            if loan is not opened:  # the judge ended over a verdict that stands, with what it lent
                lanes = []
            size = min(loan.slots, len(seeds))
            size -= len(entries) > 1 and len(seeds) - size == 1  # see `_together`
            slots = self._rng.sample(range(loan.slots), size)
            draws = [Draw(slot=slot, seed=seed) for slot, seed in zip(slots, seeds, strict=False)]
            for entry in entries:
                tally = tallies[entry.label]
                while tally.failure is None and not (lanes and seat.is_taken()):
                    together = right()
                    is_timed = self._rng.random() < TIMED_SHARE
                    opened = self._open(
                        seat, workload, together, tallies, wanted, is_timed=is_timed
                    )
                    lanes = [each.label for each in together]
                if tally.failure is None:
                    lane = lanes.index(entry.label)
                    for checked in self._calls(seat, workload, entry, lane, draws, is_judged=True):
                        tally.add(checked)
            del seeds[: len(draws)]

    def _timed(
        self,
        entries: Sequence[Entry],
        workload: Workload,
        iterations: int,
        tallies: Tallies,
        attempts: list[Failure],
        look: int = 0,
    ) -> tuple[dict[str, list[Block]], Failure | None]:
        """By label one block of every entry that is right, measured side by side, and before it
        discarded ones; the fault of the infrastructure that prevented it. `look` as of a series."""
        blocks: dict[str, list[Block]] = {entry.label: [] for entry in entries}
        distinct = list({entry.label: entry for entry in entries}.values())
        spoilt = 0
        while True:
            active = [entry for entry in distinct if tallies[entry.label].failure is None]
            if not active:
                return blocks, None
            series, fault = self._attempt(
                partial(self._series, self._seats[0], active, workload, iterations, tallies, look),
                attempts,
            )
            if fault is not None:
                return blocks, fault
            if series is None:
                continue  # without those that failed
            reason, cause = "", Cause.THROTTLED
            for entry in active:
                if tallies[entry.label].failure is None:
                    block, cause = self._make_block(series, entry, workload, 0, 0, 0)
                    blocks[entry.label].append(block)
                    reason = block.discarded
            if not reason:
                return blocks, None
            spoilt += 1
            fault = Failure(cause=cause, message=reason, workload=workload.id)
            attempts.append(fault)
            if spoilt > self.policy.max_retries:
                return blocks, fault

    def _make_block(
        self,
        series: Series,
        entry: Entry,
        workload: Workload,
        number: int,
        order: int,
        side: int,
    ) -> tuple[Block, Cause]:
        samples = series.samples[entry.label]
        verdict = self._get_guard().judge(series.readings, self._own_pids())
        self._blocks += 1
        self._discarded += bool(verdict.reason)
        kernels = Counter(samples.kernels).most_common(1)
        block = Block(
            candidate=entry.label,
            workload=workload.id,
            environment=self.environment.id,
            lease=self.lease,
            number=number,
            order=order,
            side=side,
            us=tuple(samples.us),
            span_us=tuple(samples.span_us),
            kernels=kernels[0][0] if kernels else 0,
            guard={**verdict.facts, "contents": series.contents},
            discarded=verdict.reason,
        )
        return block, verdict.cause

    # ---- calls ----------------------------------------------------------------------------------

    def _series(
        self,
        seat: Seat,
        entries: Sequence[Entry],
        workload: Workload,
        iterations: int,
        tallies: Tallies,
        look: int = 0,
    ) -> Series | None:
        """Warm-up, timed calls and a last one that is judged, every entry once in each round.

        Failures go to the tallies, and an entry that has one is not called any more; nor, after
        `look` timed calls (0: never), is one that is hopeless beside the best. None where nobody
        was left, or the process ended. Raises Infrastructure.
        """
        entries = [entry for entry in entries if tallies[entry.label].failure is None]
        if not entries:
            return None
        self._open(seat, workload, entries, tallies)
        series = Series({entry.label: Samples() for entry in entries}, [], 0)
        lanes = {entry.label: lane for lane, entry in enumerate(entries)}
        places = range(iterations)
        look = look if look < iterations else 0
        checks = {label: self._checks(iterations, look) for label in lanes}
        warmup = self._rng.randint(*WARMUP[self.policy.timer])
        readings = {warmup, warmup + iterations // 2, warmup + iterations}
        steps: list[tuple[str, bool]] = []
        contents: dict[int, int] = {}  # seeds by slot, where drawing is slow
        seeds: set[int] = set()
        seen: dict[str, list[int]] = {label: [] for label in lanes}
        hopeless: set[str] = set()
        right: set[str] = set()
        for number in range(warmup + iterations + 1):
            place = number - warmup
            if number in readings:
                series.readings.append(self._get_guard().read())
            if 0 < place == look:
                if not self._note(seat, workload, entries, steps, series, tallies):
                    return None
                steps = []
                hopeless = self._hopeless(entries, series, tallies)
                right = self._right(entries, tallies)
            order = [
                entry
                for entry in entries
                if tallies[entry.label].failure is None and entry.label not in hopeless
            ]
            if not order or not seat.is_taken():
                return None
            self._rng.shuffle(order)
            for entry in order:
                label = entry.label
                is_judged = number == 0 or place == iterations or place in checks[label]
                slot, seed = self._draw(), self._rng.getrandbits(31)
                if place == iterations:  # where it was before, with contents that were not
                    slot = self._rng.choice(seen[label])
                if self._is_slow():
                    seed = contents.setdefault(slot, seed)
                seen[label].append(slot)
                seeds.add(seed)
                steps.append((label, place in places))
                checked = self._call(
                    seat, workload, entry, lanes[label], slot, seed,
                    is_judged=is_judged, steps=steps,
                )  # fmt: skip
                if is_judged or checked.failure is not None:
                    tallies[label].add(checked)
                if not seat.is_taken():
                    return None
        series.contents = len(seeds)
        if not self._note(seat, workload, entries, steps, series, tallies):
            return None
        # Beside what turned out wrong since nobody is hopeless: once more without it.
        is_other = bool(hopeless) and self._right(entries, tallies) != right
        if is_other and hopeless - self._hopeless(entries, series, tallies):
            return None
        return series

    def _checks(self, iterations: int, look: int) -> set[int]:
        """Which of the timed calls are judged; where there is a look one of those before it, since
        there may be no others."""
        places = list(range(iterations))
        first = self._rng.sample(places[:look], min(1, look))
        rest = [place for place in places if place not in first]
        return {*first, *self._rng.sample(rest, min(CHECKS - len(first), len(rest)))}

    @staticmethod
    def _right(entries: Sequence[Entry], tallies: Tallies) -> set[str]:
        return {entry.label for entry in entries if tallies[entry.label].failure is None}

    def _hopeless(self, entries: Sequence[Entry], series: Series, tallies: Tallies) -> set[str]:
        """Labels of the candidates that are far behind the best one. Peers stay, whatever they
        take: they are what a report compares with."""
        medians = {
            entry.label: statistics.median(series.samples[entry.label].us)
            for entry in entries
            if not entry.lane.peer and tallies[entry.label].failure is None
        }
        limit = self.policy.hopeless * min(medians.values(), default=0.0)
        return {label for label, us in medians.items() if us > limit}

    def _note(
        self,
        seat: Seat,
        workload: Workload,
        entries: Sequence[Entry],
        steps: Sequence[tuple[str, bool]],
        series: Series,
        tallies: Tallies,
    ) -> bool:
        """The times of these steps into the series. False where the process ended over it, or
        betrays itself. Raises Infrastructure."""
        got = self._collect(seat, workload, entries, steps, tallies)
        if got is None:
            return False
        self._sort(got, steps, series)
        self._audit(got, steps, series, entries, workload, tallies)
        return True

    def _collect(
        self,
        seat: Seat,
        workload: Workload,
        entries: Sequence[Entry],
        steps: Sequence[tuple[str, bool]],
        tallies: Tallies,
    ) -> Collected | None:
        """The times of some steps. None where the process ended over it, or betrays itself."""
        try:
            got = seat.ask(Collect(), Collected, self.policy.trial_timeout_s)
        except ProcessFailed as error:
            failure = self._mourn(seat, error, workload, None)
        else:
            columns = [got.us]
            if self.policy.timer == "cupti":
                columns += [got.span_us, got.kernels, got.strays]
            lengths = sorted({len(column) for column in columns})
            if lengths != [len(steps)]:
                what = f"times of {lengths} calls, expected {len(steps)}"
            elif any(us is not None and us <= 0 for us in got.us):
                what = "times that are not positive"
            elif got.tampered:
                what = f"replaced {', '.join(got.tampered)}"
            else:
                return got
            failure = Failure(cause=Cause.CHEAT_SUSPECT, message=what, workload=workload.id)
            seat.clear()
        for entry in entries:
            tallies[entry.label].failures.append(failure)
        return None

    def _sort(self, got: Collected, steps: Sequence[tuple[str, bool]], series: Series) -> None:
        """Timed steps to their entries."""
        for i, (label, is_timed) in enumerate(steps):
            if not is_timed:
                continue
            samples, us = series.samples[label], got.us[i]
            samples.asked += 1
            if us is None:
                continue
            samples.us.append(us)
            if self.policy.timer == "cupti":
                span = got.span_us[i]
                samples.span_us.append(us if span is None else span)
                samples.kernels.append(got.kernels[i])

    def _audit(
        self,
        got: Collected,
        steps: Sequence[tuple[str, bool]],
        series: Series,
        entries: Sequence[Entry],
        workload: Workload,
        tallies: Tallies,
    ) -> None:
        """Work beside the calls is suspicious; too few records are nobody's fault but ours."""
        strays: Counter[str] = Counter()
        for (label, _), count in zip(steps, got.strays, strict=False):
            strays[label] += count
        for entry in entries:
            if strays[entry.label] and not entry.lane.peer:
                failure = Failure(
                    cause=Cause.CHEAT_SUSPECT,
                    message=f"{strays[entry.label]} kernels, copies or fills outside its calls",
                    workload=workload.id,
                )
                tallies[entry.label].failures.append(failure)
        for entry in entries:
            samples = series.samples[entry.label]
            if tallies[entry.label].failure is not None:
                continue
            if len(samples.us) < LEAST_RECORDED * samples.asked:
                what = f"times of {len(samples.us)} of {samples.asked} calls recorded"
                raise Infrastructure(
                    Failure(cause=Cause.HARNESS_BUG, message=what, workload=workload.id)
                )

    def _call(
        self,
        seat: Seat,
        workload: Workload,
        entry: Entry,
        lane: int,
        slot: int,
        seed: int,
        *,
        is_judged: bool,
        steps: list[tuple[str, bool]] | None = None,
    ) -> Checked:
        """One call; `steps` get its repetition, if there is one."""
        draws = [Draw(slot=slot, seed=seed)]
        (checked,) = self._calls(
            seat, workload, entry, lane, draws, is_judged=is_judged, steps=steps
        )
        return checked

    def _calls(
        self,
        seat: Seat,
        workload: Workload,
        entry: Entry,
        lane: int,
        draws: Sequence[Draw],
        *,
        is_judged: bool,
        steps: list[tuple[str, bool]] | None = None,
    ) -> tuple[Checked, ...]:
        """Fresh inputs into slots, a call on each, and what these did, up to the first that failed;
        those after it were made, and nobody looks at them. Raises Infrastructure where that is all
        that is known: where a call failed besides, that is final."""
        calls, failure = self._step(seat, workload, lane, draws, is_flipped=False)
        verdicts: tuple[Checked, ...] = ()
        if calls:
            check = Check(calls=calls, is_judged=is_judged, allowance=entry.allowance)
            try:
                verdicts = self._ask_judge(check, Verdicts, len(calls)).calls
            except Infrastructure:
                if failure is None:
                    raise
        if any(checked.failure is not None for checked in verdicts):
            *right, wrong = verdicts
            draw = draws[len(right)]
            return (*right, self._diagnose(seat, workload, entry, lane, draw, wrong, steps))
        if failure is not None:
            verdicts = (*verdicts, Checked(failure=failure))
        return verdicts

    def _diagnose(
        self,
        seat: Seat,
        workload: Workload,
        entry: Entry,
        lane: int,
        draw: Draw,
        wrong: Checked,
        steps: list[tuple[str, bool]] | None,
    ) -> Checked:
        """A call with a wrong number is repeated once, alone, to tell what nobody wrote from what
        was computed wrongly."""
        failure = wrong.failure
        is_number = failure is not None and failure.cause in (Cause.NUMERIC, Cause.NONFINITE)
        if not is_number or not seat.is_taken():
            return wrong
        try:
            again, _ = self._step(
                seat, workload, lane, [draw], is_flipped=True, steps=steps, label=entry.label
            )
            if not again:
                return wrong
            final = self._ask_judge(Diagnose(slot=draw.slot, allowance=entry.allowance), Checked)
        except Infrastructure:  # a wrong number is final, whatever comes after it
            return wrong
        return Checked(failure=final.failure, worst=wrong.worst)

    def _step(
        self,
        seat: Seat,
        workload: Workload,
        lane: int,
        draws: Sequence[Draw],
        *,
        is_flipped: bool,
        steps: list[tuple[str, bool]] | None = None,
        label: str = "",
    ) -> tuple[tuple[Call, ...], Failure | None]:
        """Calls on slots that are filled first: those before the first that failed, and its
        failure. The process is told of all of them at once, and asked for each in turn, so that it
        is known in which one it ended. `steps` get them as untimed ones of `label`, once they are
        sent."""
        fill = Fill(draws=tuple(draws), is_flipped=is_flipped)
        filled = self._ask_judge(fill, Filled, len(draws))
        if filled.draw_s:
            self._draw_s.append(filled.draw_s)
        messages = [Step(lane=lane, slot=draw.slot) for draw in draws]
        if steps is not None:
            steps += [(label, False)] * len(messages)
        found, error = seat.ask_all(messages, Done, self.policy.trial_timeout_s)
        calls: list[Call] = []
        for draw, done in zip(draws, found, strict=False):
            problem = done.problem
            if problem is not None:
                if error is not None or problem.is_fatal:
                    seat.clear()
                if problem.is_fatal:
                    self._ping()
                return tuple(calls), _blame(problem.cause, problem.message, workload, draw.seed)
            calls.append(Call(slot=draw.slot, returned=done.returned))
        if error is not None:
            seed = draws[len(calls)].seed
            return tuple(calls), self._mourn(seat, error, workload, seed)
        return tuple(calls), None

    def _draw(self) -> int:
        """A slot of those that are timed."""
        if self._loan is None:  # the judge ended over the call before, whose verdict stands
            message = "the judge is gone, and what it had lent"
            raise Infrastructure(Failure(cause=Cause.HARNESS_BUG, message=message))
        return self._rng.randrange(min(self._loan.loan.slots, SLOTS))

    def _is_slow(self) -> bool:
        """Whether even the fastest draw takes too long to be made for every call."""
        return min(self._draw_s, default=0.0) > REDRAW_S

    # ---- processes ------------------------------------------------------------------------------

    def _open(
        self,
        seat: Seat,
        workload: Workload,
        entries: Sequence[Entry],
        tallies: Tallies,
        slots: int = SLOTS,
        *,
        is_timed: bool = True,
    ) -> Loan:
        """Lend the workload to the seat's process and bind the entries; why some cannot be goes to
        their tallies. Where the process ends over it, nobody sits there afterwards."""
        loan, overlay = self._lend(workload, slots), entries[0].overlay
        if any(entry.overlay != overlay for entry in entries):
            raise ValueError("candidates of different overlays cannot share a process")
        if seat.overlay != overlay:
            seat.clear()
        if seat.is_taken():
            try:
                seat.ask(Hello(), Ready, self.policy.trial_timeout_s)
            except ProcessFailed:  # ended after its last answer: not these entries' fault
                seat.clear()
        if not seat.is_taken():
            try:
                self._seat(seat, overlay)
            except Infrastructure as error:
                if not overlay:
                    raise
                self._ping()
                # What the overlay has is imported as the process starts, and nothing else differs.
                failure = _unimported(error.failure, workload)
                for entry in entries:
                    tallies[entry.label].failures.append(failure)
                return loan
        buffer = None
        if seat.slab != loan.slab:
            buffer = self._ask_judge(Share(), Shared).buffer
            if isinstance(buffer, FileBuffer):
                self._files.add(buffer.path)
            seat.slab = loan.slab
        message = Open(
            loan=loan,
            buffer=buffer,
            lanes=tuple(entry.lane for entry in entries),
            routes=self._routes,
            is_timed=is_timed,
        )
        try:
            opened = seat.ask(message, Opened, self.policy.trial_timeout_s)
        except ProcessFailed as error:
            failure = self._mourn(seat, error, workload, None)
            if len(entries) == 1:
                tallies[entries[0].label].failures.append(failure)
                return loan
            for entry in entries:  # which of them it was shows when each is tried alone
                self._open(seat, workload, [entry], tallies)
            seat.clear()
            if all(tallies[entry.label].failure is None for entry in entries):
                what = f"all candidates together, and none alone: {failure.message}"
                raise Infrastructure(
                    Failure(cause=Cause.HARNESS_BUG, message=what, workload=workload.id)
                ) from error
            return loan
        if opened.fault:
            seat.clear()
            what = f"a series could not begin: {opened.fault}"
            raise Infrastructure(Failure(cause=Cause.HARNESS_BUG, message=what))
        for entry, problem in zip(entries, opened.problems, strict=True):
            if problem is not None:
                failure = _blame(problem.cause, problem.message, workload)
                tallies[entry.label].failures.append(failure)
        if any(problem is not None and problem.is_fatal for problem in opened.problems):
            seat.clear()
            self._ping()
        return loan

    def _seat(self, seat: Seat, overlay: str = "") -> None:
        """Start a candidate process. Raises Infrastructure."""
        process = self._start("worker", overlay)
        seat.process, seat.slab, seat.overlay = process, 0, overlay
        try:
            ready = process.ask(Hello(), Ready, START_TIMEOUT_S)
        except ProcessFailed as error:
            seat.clear()
            failure = Failure(
                cause=Cause.HARNESS_BUG,
                message=f"a candidate process does not start: {error}",
                detail={"log": error.log},
            )
            raise Infrastructure(failure) from error
        assert self._facts is not None, "the environment is asked for before anything else"
        if ready.timer != self._facts.timer:
            message = f"timer {ready.timer!r} in a candidate process, {self._facts.timer!r} here"
            raise Infrastructure(Failure(cause=Cause.HARNESS_BUG, message=message))

    def _start(self, role: Literal["judge", "worker"], overlay: str = "") -> Process:
        nursery = self._nurseries.pop(overlay, None)
        if nursery is None or not nursery.is_alive:
            self._make_room()
            nursery = Nursery(overlay)
        self._nurseries[overlay] = nursery
        return Process(nursery, role, self.device, self.policy.trial_timeout_s)

    def _make_room(self) -> None:
        """Nurseries of overlays hold some hundred MB each, and most are not needed again."""
        others = [overlay for overlay in self._nurseries if overlay]
        for overlay in others[: -MAX_OVERLAYS + 1]:
            for seat in self._seats:
                if seat.overlay == overlay:
                    seat.clear()
            self._nurseries.pop(overlay).close()

    def _lend(self, workload: Workload, slots: int) -> Loan:
        held = self._loan
        if held is None or held.workload != workload.id or held.asked < slots:
            self._loan = None
            loan = self._ask_judge(Lend(workload=workload, slots=slots), Lending).loan
            self._loan = held = Held(workload.id, slots, loan)
            self._draw_s = []
        return held.loan

    def _ask_facts(self) -> Facts:
        self._facts = self._ask_judge(Hello(), Facts)
        return self._facts

    def _ask_judge(self, message: AnyMessage, reply: type[M], calls: int = 1) -> M:
        """`calls`: how many the message is about. Raises Infrastructure: the judge runs nobody's
        code but ours."""
        if self._judge is None:
            self._judge = self._start("judge")
        try:
            return self._judge.ask(message, reply, JUDGE_TIMEOUT_S + (calls - 1) * CALL_TIMEOUT_S)
        except ProcessFailed as error:
            if not self._judge.is_alive:
                self._forget_judge()
            cause = error.cause if error.cause.is_infrastructure else Cause.HARNESS_BUG
            detail = {"log": error.log} if error.log else {}
            raise Infrastructure(
                Failure(cause=cause, message=f"judge: {error}", detail=detail)
            ) from error

    def _forget_judge(self) -> None:
        """With what it lent, also where it could not clear it away."""
        self._judge, self._loan = None, None
        for seat in self._seats:
            seat.slab = 0
        for path in self._files:
            Path(path).unlink(missing_ok=True)
        self._files.clear()

    def _ping(self) -> None:
        """After a crash: raises Infrastructure where the device went with it."""
        if self.device != "cpu":
            try:
                self._ask_judge(Ping(), Pong)
            except Infrastructure as error:
                failure = error.failure.model_copy(update={"cause": Cause.GPU_LOST})
                raise Infrastructure(failure) from error

    def _mourn(
        self, seat: Seat, error: ProcessFailed, workload: Workload, seed: int | None
    ) -> Failure:
        """The failure of a candidate whose process ended. Raises Infrastructure where that was not
        the candidate's fault."""
        seat.clear()
        self._ping()
        return _blame(error.cause, str(error), workload, seed, error.log)

    def _get_guard(self) -> Guard:
        if self._guard is None:
            uuid = self.environment.uuid
            self._guard = (
                LoadGuard() if self.device == "cpu" else GpuGuard(uuid, self.policy.min_clock)
            )
        return self._guard

    def _own_pids(self) -> list[int]:
        processes = [self._judge, *(seat.process for seat in self._seats)]
        return [os.getpid(), *(p.pid for p in processes if p is not None and p.is_alive)]


def _unimported(fault: Failure, workload: Workload) -> Failure:
    """The failure of a candidate whose files do not let a process start."""
    log = str(fault.detail.get("log", ""))
    last = log.rpartition("\n")[2] or fault.message
    return Failure(
        cause=Cause.COMPILE,
        message=f"its files cannot be imported: {last}",
        workload=workload.id,
        detail={"log": log},
    )


def judged_slots(count: int) -> int:
    """For so many calls: half as many, so that what is kept by address meets a second draw."""
    return max(SLOTS, min(-(-count // 2), JUDGED_SLOTS))


def _blame(
    cause: Cause, message: str, workload: Workload, seed: int | None = None, log: str = ""
) -> Failure:
    """The candidate's failure. Raises Infrastructure where it is none of its own."""
    failure = Failure(
        cause=cause,
        message=message,
        workload=workload.id,
        seed=seed,
        detail={"log": log} if log else {},
    )
    if cause.is_infrastructure:
        raise Infrastructure(failure)
    return failure


def commit() -> str:
    """Of the checkout that the package runs from, "+dirty" where it differs; else its version."""
    folder = Path(fastkernels.__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return f"fastkernels-{fastkernels.__version__}"
