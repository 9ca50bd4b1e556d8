"""Runs a campaign: a controller that asks and concludes, and workers that do one job at a time.

One process is both on one GPU. `worker` is another GPU's or host's: it needs the store and nothing
else. A job runs whole on one worker, so no comparison ever spans two GPUs. Most jobs are of any GPU
of a product; one that names a GPU waits for whoever serves that one.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from fastkernels_tuner.campaign import Campaign, Measures
from fastkernels_tuner.errors import TunerError
from fastkernels_tuner.model import Cause, Environment, Failure
from fastkernels_tuner.stages import BY_NAME, STAGES, Stage, name_of
from fastkernels_tuner.store import Job, Lease, LeaseLost, Store

TTL_S = 60.0
POLL_S = 0.5
PATIENCE_S = 5.0
"""An idle worker on the GPU that a job names has taken it by then: workers look every second."""


class StageFailed(TunerError):
    """A stage lost every piece of its work to the infrastructure."""

    exit_code = 3


class Opened(Measures, Protocol):
    """Measuring processes that are started for a campaign and end with it."""

    @property
    def environment(self) -> Environment: ...
    def __enter__(self) -> Opened: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def identity() -> str:
    """Of this process, for leases: host, process and thread."""
    return f"{socket.gethostname()}:{os.getpid()}:{threading.get_ident()}"


def is_alive(owner: str) -> bool:
    """Whether the process that calls itself so may be: one of another host always may."""
    host, _, rest = owner.partition(":")
    pid = rest.partition(":")[0]
    if host != socket.gethostname() or not pid.isdigit():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@dataclass
class Worker:
    """Does jobs of any campaign in a store, on one device.

    `queue` is what jobs name as their device: the product, so that equal GPUs share the work, or
    the UUID of a GPU that is there for the jobs that name it alone.
    """

    store: Store
    device: str
    queue: str
    bench: Opened
    folder: Path
    say: Callable[[str], None] = lambda line: None
    peers: Mapping[str, str] = field(default_factory=dict)
    name: str = field(default_factory=identity)

    def once(self, in_place_of: str = "", until: float | None = None) -> bool:
        """One job; False where there is none for this device. `in_place_of`: the UUID of a GPU that
        nobody serves, whose jobs are taken, too. `until`: as of a campaign."""
        gpu = self.bench.environment.uuid
        job = self.store.claim(self.name, device=self.queue, gpu=in_place_of or gpu, ttl_s=TTL_S)
        if job is None:
            return False
        campaign = Campaign(
            self.store,
            job.campaign,
            self.folder / job.campaign,
            self.say,
            self.peers,
            until=until,
        )
        with beating(lambda: self.store.heartbeat(job, TTL_S), TTL_S) as lost:
            try:
                started, self.bench.lease = time.monotonic(), job.token
                result = BY_NAME[job.kind].run(campaign, job.payload, self.bench)
                seconds = round(time.monotonic() - started, 3)
                result = {**result, "device_s": seconds, "gpu": gpu}
            except LeaseLost:
                return True
            except TunerError:
                self._give_back(job, "the worker could not go on")
                raise
            except KeyboardInterrupt:
                self._give_back(job, "interrupted")
                raise
            except Exception as error:
                # What a candidate does wrong is a result; what ends up here is a fault of ours.
                failure = Failure(
                    cause=Cause.HARNESS_BUG, message=f"{type(error).__name__}: {error}"[:2000]
                )
                self.say(f"{job.kind}: {failure.message}")
                self._fail(job, failure, campaign.policy.max_retries)
                return True
        if not lost.is_set():
            try:
                self.store.finish(job, result)
            except LeaseLost:
                self.say(f"{job.kind}: another worker has taken over; this result is dropped")
        return True

    def _fail(self, job: Job, failure: Failure, max_retries: int) -> None:
        with suppress(LeaseLost):
            self.store.fail(job, failure, max_attempts=1 + max_retries)

    def _give_back(self, job: Job, why: str) -> None:
        """Back into the queue at once; an interruption counts as no attempt of the job's own."""
        failure = Failure(cause=Cause.LEASE_LOST, message=why)
        self._fail(job, failure, max_retries=job.attempt)


@contextmanager
def beating(beat: Callable[[], None], ttl_s: float) -> Iterator[threading.Event]:
    """Keeps a lease of `ttl_s` alive from a thread; the event says that it was lost."""
    over, lost = threading.Event(), threading.Event()

    def loop() -> None:
        while not over.wait(ttl_s / 4):
            try:
                beat()
            except LeaseLost:
                lost.set()
                return
            except TunerError:
                continue  # a database that is away for a while; the lease has three more tries

    thread = threading.Thread(target=loop, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield lost
    finally:
        over.set()
        thread.join()


@dataclass
class Controller:
    """Takes a campaign from wherever it stands to its end. `second` is on another GPU, for jobs
    that name it and that no other process takes."""

    campaign: Campaign
    worker: Worker
    lease: Lease
    second: Worker | None = None

    def run(self, last: str = name_of(STAGES[-1])) -> None:
        """Up to the end of the stage `last`. Raises OutOfBudget, StageFailed; KeyboardInterrupt
        passes. After any of them the campaign can be resumed."""
        with beating(self.lease.renew, self.lease.ttl_s):
            for stage in STAGES:
                self._finish(stage, name_of(stage))
                if name_of(stage) == last:
                    break

    def _finish(self, stage: Stage, name: str) -> None:
        if self.campaign.conclusion(name) is None:
            started = time.monotonic()
            self.campaign.say(f"== {name}")
            self._drain(stage, name)
            conclusion = stage.finish(self.campaign)
            conclusion = {**conclusion, "seconds": round(time.monotonic() - started, 1)}
            self.campaign.store.append(self.campaign.id, f"stage.{name}", conclusion, self.lease)
            spent = self.campaign.device_s()
            if name in spent:
                total = sum(spent.values())
                self.campaign.say(
                    f"{name}: {spent[name]:.1f} s on the device, {total:.1f} s so far"
                )

    def sweep(self, stage: Stage) -> dict[str, Any]:
        """Work outside the stages' order: everything `stage` asks for, and what it finds."""
        with beating(self.lease.renew, self.lease.ttl_s):
            self._drain(stage, name_of(stage))
        return stage.finish(self.campaign)

    def _drain(self, stage: Stage, name: str) -> None:
        """Asks until nothing new comes; every job is done whenever it asks, also when it begins: an
        interrupted round of probes would be planned again from half of its results."""
        campaign, asked = self.campaign, set[int]()
        self._work()
        while True:
            numbers = {
                campaign.store.enqueue(
                    campaign.id, name, payload, device=payload.get("gpu") or self.worker.queue
                )
                for payload in stage.jobs(campaign)
            }
            if numbers <= asked:
                break
            asked |= numbers
            self._work()
        rows = [row for row in campaign.store.jobs(campaign.id) if row.kind == name]
        failed = [row for row in rows if row.status == "failed"]
        for row in failed:
            campaign.say(f"{name}: given up: {row.failure.message if row.failure else '?'}")
        if rows and len(failed) == len(rows):
            raise StageFailed(f"{name}: all {len(rows)} pieces of work failed")

    def _work(self) -> None:
        campaign, idle_since = self.campaign, time.monotonic()
        while True:
            if campaign.is_out_of_time and self._is_settled():
                return  # conclusions, tables and reports take none of the time that is counted
            campaign.require_time()
            campaign.store.recover(1 + campaign.policy.max_retries, campaign.id)
            if self.worker.once(until=campaign.until):
                idle_since = time.monotonic()
                continue
            rows = campaign.store.jobs(campaign.id)  # at one moment: others take and settle jobs
            queued = [row for row in rows if row.status == "queued"]
            if any(row.status == "running" for row in rows):
                idle_since = time.monotonic()
            elif not queued:
                return
            elif time.monotonic() - idle_since > PATIENCE_S and self._stand_in(queued[0].device):
                continue
            time.sleep(POLL_S)

    def _is_settled(self) -> bool:
        rows = self.campaign.store.jobs(self.campaign.id)
        return not any(row.status in ("queued", "running") for row in rows)

    def _stand_in(self, gpu: str) -> bool:
        """A job for a GPU that nobody serves: on that GPU if it is ours, else on the first one."""
        if self.second is not None and self.second.queue == gpu:
            return self.second.once(until=self.campaign.until)
        self.campaign.say(f"nobody serves {gpu}: what was left to it is done here")
        return self.worker.once(gpu, self.campaign.until)
