"""A bench that measures nothing: times from a formula, faults on request."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from fastkernels_tuner.model import (
    Block,
    Candidate,
    Cause,
    Environment,
    Evaluation,
    Failure,
    Trials,
    Workload,
)

ENVIRONMENT = Environment(
    device="CPU", arch="cpu", uuid="here", driver="none", versions={"torch": "2"}, code="abc",
    timer="wall",
)  # fmt: skip

Time = Callable[[Candidate, Workload], float]


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the code under test may catch it."""


@dataclass
class FakeBench:
    """`us` gives the time of a call. `wrong` names the (candidate, seed) pairs that give a wrong
    number; `dies_at` counts calls after which the process is gone, `lost_at` those after which the
    GPU is."""

    us: Time
    wrong: Callable[[Candidate, Workload, int], bool] = lambda candidate, workload, seed: False
    noise: float = 0.0
    dies_at: int | None = None
    lost_at: int | None = None
    calls: int = 0
    is_random: bool = False  # equal calls give other bits
    lease: int = 0
    environment: Environment = ENVIRONMENT
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __enter__(self) -> FakeBench:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def close(self) -> None:
        pass

    def repeat(
        self, candidate: Candidate, workload: Workload, seed: int, *, calls: int = 3
    ) -> tuple[str, ...]:
        self._count()
        return tuple(str(n if self.is_random else seed) for n in range(calls))

    def _count(self) -> None:
        self.calls += 1
        if self.dies_at is not None and self.calls >= self.dies_at:
            raise Killed

    def _block(
        self, candidate: Candidate, workload: Workload, iterations: int, order: int, side: int
    ) -> Block:
        us = self.us(candidate, workload)
        return Block(
            candidate=candidate.id,
            workload=workload.id,
            environment=self.environment.id,
            lease=self.lease,
            number=0,
            order=order,
            side=side,
            us=tuple(us * (1 + self.rng.gauss(0, self.noise)) for _ in range(iterations)),
            kernels=1,
        )

    def evaluate(
        self, candidate: Candidate, workload: Workload, *, iterations: int, trials: int
    ) -> Evaluation:
        judged = self.judge(candidate, workload, range(trials))
        failure = judged.failures[0] if judged.failures else None
        blocks = () if failure else (self._block(candidate, workload, iterations, 0, 0),)
        return Evaluation(
            candidate=candidate.id, workload=workload.id, blocks=blocks, trials=(judged,),
            failure=failure,
        )  # fmt: skip

    def judge(self, candidate: Candidate, workload: Workload, seeds: Sequence[int]) -> Trials:
        self._count()
        if self.lost_at is not None and self.calls >= self.lost_at:
            lost = Failure(
                cause=Cause.GPU_LOST, message="judge: no CUDA device", workload=workload.id
            )
            return Trials(stratum=workload.id, trials=0, failures=(lost,))
        failures = tuple(
            Failure(cause=Cause.NUMERIC, message="off", workload=workload.id, seed=seed)
            for seed in seeds
            if self.wrong(candidate, workload, seed)
        )
        return Trials(
            stratum=workload.id,
            trials=len(seeds),
            failures=failures,
            worst=2.0 if failures else 0.1,
        )

    def judge_all(
        self, candidates: Sequence[Candidate], workload: Workload, seeds: Sequence[int]
    ) -> list[Trials]:
        return [self.judge(candidate, workload, seeds) for candidate in candidates]

    def pair(
        self, a: Candidate, b: Candidate, workload: Workload, *, number: int, iterations: int
    ) -> tuple[Block, ...]:
        self._count()
        return tuple(
            self._block((a, b)[side], workload, iterations, order, side)
            for order, side in enumerate((0, 1, 1, 0))
        )

    def interleave(
        self,
        candidates: Sequence[Candidate],
        workload: Workload,
        *,
        iterations: int,
        peers: Mapping[str, str] | None = None,
    ) -> list[Evaluation]:
        return [
            self.evaluate(candidate, workload, iterations=iterations, trials=1)
            for candidate in candidates
        ]
