"""One campaign as its stages see it: what it sets out to do, what is known so far, where it writes.

The store is the truth. Everything here is read from it, so that a campaign goes on after an
interruption, in another process or on another machine, as if nothing had happened.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fastkernels.core import dispatch
from fastkernels.core.archs import product_slug
from fastkernels.core.device import DeviceInfo, named_device
from fastkernels.core.route import Operator
from fastkernels.core.table import Regime as TableRegime
from fastkernels.core.table import Table
from fastkernels.errors import ArgumentError
from fastkernels_tuner import plan
from fastkernels_tuner.errors import EvidenceError, OutOfBudget
from fastkernels_tuner.model import (
    Block,
    CampaignSpec,
    Candidate,
    Evaluation,
    Policy,
    Regime,
    Trials,
    Workload,
)
from fastkernels_tuner.store import Store


class Measures(Protocol):
    """What a stage needs of the measuring processes; `measure.Bench` in earnest. `lease` is the
    token of the job at hand, which its blocks carry."""

    lease: int

    def evaluate(
        self, candidate: Candidate, workload: Workload, *, iterations: int, trials: int
    ) -> Evaluation: ...

    def judge(self, candidate: Candidate, workload: Workload, seeds: Sequence[int]) -> Trials: ...

    def judge_all(
        self, candidates: Sequence[Candidate], workload: Workload, seeds: Sequence[int]
    ) -> list[Trials]: ...

    def pair(
        self, a: Candidate, b: Candidate, workload: Workload, *, number: int, iterations: int
    ) -> tuple[Block, ...]: ...

    def interleave(
        self,
        candidates: Sequence[Candidate],
        workload: Workload,
        *,
        iterations: int,
        peers: Mapping[str, str] | None = None,
    ) -> list[Evaluation]: ...

    def repeat(
        self, candidate: Candidate, workload: Workload, seed: int, *, calls: int = 3
    ) -> tuple[str, ...]: ...

    def close(self) -> None:
        """End every process; the next call starts fresh ones."""


class Done(NamedTuple):
    """A finished piece of work: what was asked, and what came of it."""

    payload: dict[str, Any]
    result: dict[str, Any]

    @property
    def gpu(self) -> str:
        """The UUID of the GPU on which it was done."""
        return str(self.result["gpu"])


@dataclass
class Campaign:
    """`say` takes lines for the person at the terminal; `at_hand` are the UUIDs of the GPUs that
    this process can measure on; `until`: when the time of this process is up."""

    store: Store
    id: str
    folder: Path  # of this campaign's files
    say: Callable[[str], None] = lambda line: None
    peers: Mapping[str, str] = field(default_factory=dict)  # name to module:function
    at_hand: tuple[str, ...] = ()
    until: float | None = None  # time.monotonic()

    @cached_property
    def spec(self) -> CampaignSpec:
        return self.store.spec(self.id)

    @property
    def policy(self) -> Policy:
        return self.spec.policy

    @cached_property
    def operator(self) -> Operator:
        return plan.operator_of(self.spec.op)

    @cached_property
    def info(self) -> DeviceInfo:
        """The device; away from it what its product says, which is all that tables and reports
        need."""
        product = product_slug(self.spec.environment.device)
        try:
            here = named_device(self.spec.device)
        except ArgumentError:
            return named_device(product)
        return here if product_slug(here.product) == product else named_device(product)

    @cached_property
    def champion(self) -> Table | None:
        """The measured table of this product that is in force. Raises EvidenceError where it is
        another one than when the campaign began."""
        now, then = plan.champion(self.operator, self.info), self.spec.champion
        if now.get("sha256") != then.get("sha256"):
            raise EvidenceError(f"{self.id}: the table in force changed since the campaign began")
        table, _ = dispatch.find_table(self.operator, self.info)
        if table is None or table.status != "measured" or table.product != self.info.product:
            return None
        return table

    def reigning(self, group: plan.Group) -> list[TableRegime]:
        """The champion's regimes of a mode and constants: none where there is no champion, or it
        serves them by a fallback."""
        mode, constants = group
        bounds = {name: (size, size) for name, size in constants}
        regimes = self.champion.regimes if self.champion is not None else ()
        return [r for r in regimes if r.mode == mode and r.constants == bounds]

    @cached_property
    def workloads(self) -> dict[str, Workload]:
        return {workload.id: workload for workload in self.spec.workloads}

    @cached_property
    def regimes(self) -> dict[str, Regime]:
        return {regime.id: regime for regime in self.spec.regimes}

    def inside(self, regime: Regime) -> list[Workload]:
        return plan.workloads_of(self.operator, self.spec, regime)

    def served(self, workload: Workload) -> Candidate:
        """What serves a workload without this campaign."""
        return plan.served(self.operator, workload, self.info)

    def done(self, kind: str) -> list[Done]:
        """Finished jobs of a kind, in the order in which they were asked for."""
        rows = (row for row in self.store.jobs(self.id, "done") if row.kind == kind)
        return [Done(row.payload, row.result or {}) for row in rows]

    def gpus(self) -> list[str]:
        """UUIDs of the GPUs at hand, then of those on which jobs were done, also by others."""
        done = (row.result or {} for row in self.store.jobs(self.id, "done"))
        return list(dict.fromkeys([*self.at_hand, *(result["gpu"] for result in done)]))

    @property
    def is_out_of_time(self) -> bool:
        return self.until is not None and time.monotonic() > self.until

    def require_time(self) -> None:
        """Raises OutOfBudget where the time of this process is up."""
        if self.is_out_of_time:
            raise OutOfBudget(f"{self.id}: the time is used up; resume it later")

    def device_s(self) -> dict[str, float]:
        """Seconds on a device by kind of job: of those that are done, and of attempts that were cut
        off or lost."""
        spent = Counter(self.store.lost_s(self.id))
        for row in self.store.jobs(self.id, "done"):
            spent[row.kind] += (row.result or {}).get("device_s", 0.0)
        return {kind: round(seconds, 1) for kind, seconds in spent.items()}

    def conclusion(self, stage: str) -> dict[str, Any] | None:
        """What a finished stage concluded; None while it has not."""
        events = self.store.events(self.id, f"stage.{stage}")
        return events[-1].payload if events else None

    def require(self, stage: str) -> dict[str, Any]:
        found = self.conclusion(stage)
        if found is None:
            raise LookupError(f"the stage {stage!r} of {self.id} has not ended")
        return found
