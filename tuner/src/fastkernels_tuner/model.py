"""What a campaign is about, as frozen data: candidates, workloads, measurements, verdicts, policy.

Every model is JSON with sorted keys and its identity is the SHA-256 of that JSON, so that what two
processes, runs or machines call by one name is the same thing. Names of candidates are labels.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
from enum import Enum
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fastkernels import catalog
from fastkernels.core.route import Operator, Route
from fastkernels.ops._shared.cases import Case

Knob = int | str | bool | float


class Model(BaseModel):
    """Frozen, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def canonical(self) -> str:
        return canonical(self.model_dump(mode="json"))

    @property
    def id(self) -> str:
        """The first 16 hex digits of the digest of everything in here."""
        return digest(self.canonical())[:16]


M = TypeVar("M", bound=Model)


def canonical(data: Any) -> str:
    """JSON with sorted keys and no spaces; NaN and infinities are refused (ValueError)."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def read_line(line: str, place: str, kind: type[M], what: str, error: type[Exception]) -> M:
    """A model of a file of JSON lines. Raises `error` with the place and the first fault."""
    try:
        return kind.model_validate_json(line)
    except ValidationError as wrong:
        first = wrong.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise error(f"{place}: expected {what} as JSON, {where}: {first['msg']}") from None


# ---- what is measured ---------------------------------------------------------------------------


class Candidate(Model):
    """One way to compute an operator: a route, a config with every knob, and the digest of its
    sources (`space.source_digest`), so that an edited kernel is another candidate."""

    op: str
    route: str
    config: dict[str, Knob]
    source: str

    def __str__(self) -> str:
        return f"{self.route}({', '.join(f'{k}={v}' for k, v in self.config.items())})"

    def operator(self) -> Operator:
        return catalog.operator(self.op)

    def bind(self) -> tuple[Route, Any]:
        """The route and an instance of its config. Raises ValueError over an unknown route."""
        route = self.operator().route(self.route)
        if route is None:
            raise ValueError(f"{self.op} has no route {self.route!r}")
        return route, route.make_config(self.config)


class Workload(Model):
    """One problem of an operator, as the fields of its `Case` (ops/<op>/inputs.py).

    `listed`: contest, serving, gap, or another list that it stands in. `seed` is part of `case`.
    """

    op: str
    listed: str
    case: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.listed}:{self.case['name']}"

    def build(self) -> Case:
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in self.case.items()}
        made: Case = catalog.module(self.op, "inputs").Case(**fields)
        return made

    @staticmethod
    def of(op: str, listed: str, case: Case) -> Workload:
        fields = {field.name: getattr(case, field.name) for field in dataclasses.fields(case)}  # type: ignore[arg-type]
        return Workload(op=op, listed=listed, case=fields)

    def with_seed(self, seed: int) -> Workload:
        return self.model_copy(update={"case": {**self.case, "seed": seed}})


class Regime(Model):
    """Workloads that one study searches together: of one mode and one choice of constants, between
    bounds (both ends included) on the variable axes."""

    op: str
    mode: str
    constants: dict[str, int]
    bounds: dict[str, tuple[int, int]]

    def __str__(self) -> str:
        parts = [f"{k}={v}" for k, v in self.constants.items()]
        parts += [f"{k}={a}..{b}" for k, (a, b) in self.bounds.items()]
        return f"{self.mode}[{','.join(parts)}]"


class Environment(Model):
    """Where something was measured; times of two environments are never compared."""

    device: str  # "cpu", or the product's name
    arch: str
    uuid: str  # of the GPU; of a CPU, the host's name
    driver: str
    versions: dict[str, str]
    code: str  # commit, with "+dirty" where the tree was
    timer: Literal["cupti", "wall"]


# ---- what came of it ----------------------------------------------------------------------------


class Cause(str, Enum):
    """Why something failed. Of the candidate: final. Of the infrastructure: retried, at most twice,
    and every attempt is recorded."""

    NUMERIC = "numeric"
    NONFINITE = "nonfinite"
    DROPPED_ELEMENT = "dropped_element"
    SHAPE = "shape"
    DTYPE = "dtype"
    MUTATED_INPUT = "mutated_input"
    NONDETERMINISTIC = "nondeterministic"
    OUT_OF_BOUNDS = "oob"
    RACE = "race"
    COMPILE = "compile"
    CRASH = "crash"
    HANG = "hang"
    OUT_OF_MEMORY = "oom_candidate"
    CHEAT_SUSPECT = "cheat_suspect"
    STATIC_BAN = "static_ban"
    UNCLASSIFIED = "unclassified"
    # of the infrastructure
    GPU_LOST = "gpu_lost"
    ECC_XID = "ecc_xid"
    LEASE_LOST = "lease_lost"
    NODE_LOST = "node_lost"
    DISK_FULL = "disk_full"
    THROTTLED = "throttled"
    FOREIGN_PROCESS = "foreign_process"
    HARNESS_BUG = "harness_bug"

    @property
    def is_infrastructure(self) -> bool:
        return self in _INFRASTRUCTURE


_INFRASTRUCTURE = frozenset(
    {Cause.GPU_LOST, Cause.ECC_XID, Cause.LEASE_LOST, Cause.NODE_LOST, Cause.DISK_FULL,
     Cause.THROTTLED, Cause.FOREIGN_PROCESS, Cause.HARNESS_BUG}
)  # fmt: skip


class Failure(Model):
    """One thing that went wrong: the cause, words, and what reproduces it."""

    cause: Cause
    message: str
    workload: str = ""  # its id
    seed: int | None = None
    detail: dict[str, Any] = Field(default_factory=dict)


class Trials(Model):
    """Judged calls of one candidate on one stratum: draws of a workload, or one adversarial
    generator. `worst` is the largest error in units of its limit."""

    stratum: str
    trials: int
    failures: tuple[Failure, ...] = ()
    worst: float = 0.0


class Block(Model):
    """Timed calls of one candidate on one workload within one lease. Never averaged in storage."""

    candidate: str
    workload: str
    environment: str
    lease: int
    number: int  # of the pair of blocks
    order: int  # within it: 0 is measured first
    side: int = 0  # 0: of the first candidate of the pair, 1: of the second
    us: tuple[float, ...]  # sums of kernel times per call; wall times on a CPU
    span_us: tuple[float, ...] = ()
    kernels: int = 0
    guard: dict[str, Any] = Field(default_factory=dict)  # clocks, temperature, throttle reasons
    discarded: str = ""  # why the block does not count


class Evaluation(Model):
    """What one job found out about a candidate on a workload: blocks, trials, or a failure.

    `attempts` are the faults of the infrastructure after which it was tried again.
    """

    candidate: str
    workload: str
    blocks: tuple[Block, ...] = ()
    trials: tuple[Trials, ...] = ()
    failure: Failure | None = None
    attempts: tuple[Failure, ...] = ()

    def describe(self) -> str:
        """One line for a person."""
        if self.failure is not None:
            return f"{self.failure.cause.value}: {self.failure.message}"
        us = [each for block in self.blocks if not block.discarded for each in block.us]
        return f"{statistics.median(us):.3f} us" if us else "not timed"


Decision = Literal["promote", "keep", "inconclusive", "reject"]


# ---- policy -------------------------------------------------------------------------------------


class Policy(Model):
    """The rules of a campaign; a verdict counts only under the policy whose digest it carries.

    Fractions are fractions (0.02 is 2 %), times are in the unit of their name.
    """

    name: str
    timer: Literal["cupti", "wall"]
    is_promotable: bool  # whether its tables may be shipped
    # search
    max_trials: int = 40  # per study
    exhaustive_below: int = 64  # spaces of at most so many configs are tried completely
    search_constants: bool = True  # also regimes of other constants than the definition's
    rungs: tuple[tuple[int, int], ...] = ((1, 5), (3, 10), (8, 20))  # (workloads, iterations)
    trial_timeout_s: float = 60.0
    finalists: int = 4  # per regime
    buckets: int = 3  # regimes of the variable axes that are searched apart, per mode and constants
    max_workloads: int = 1000  # per mode and constants
    # correctness
    search_trials: int = 2  # judged calls per evaluation while searching
    confidence: float = 0.95
    p_max: dict[str, float] = Field(
        default_factory=lambda: {"low": 0.05, "medium": 0.01, "high": 0.00334}
    )
    max_retries: int = 2
    verify_s: float = 120.0  # after so long a candidate is not verified, which is no pass
    # statistics
    iterations: int = 30  # timed calls per block
    # Side by side with others, what takes so many times the best candidate's median after the first
    # few timed calls is not called any more. The fit takes the time from these, which is far beyond
    # what it lets a regime lose.
    first_look: int = 6
    hopeless: float = Field(default=1.5, gt=1.0)
    looks: tuple[int, ...] = (4, 8, 16)  # pairs of blocks after which to decide
    alpha: float = 0.05
    min_gain: float = 0.003
    min_gain_us: float = 0.02
    session_sd: float = 0.0  # of a log ratio between process pairs, as A/A runs find it
    max_discarded: float = 0.3
    # fit
    slowdown: float = 0.02  # a regime's route may be that much slower than the best at a size
    probe_rounds: int = 3  # how often boundaries are measured more closely
    max_probes: int = 40  # workloads in each round
    # guard
    min_clock: float = 0.95


class CampaignSpec(Model):
    """What a campaign sets out to do; its id is part of the campaign's."""

    op: str
    device: str
    environment: Environment
    policy: Policy
    routes: tuple[str, ...]
    regimes: tuple[Regime, ...]
    workloads: tuple[Workload, ...]
    champion: dict[str, Any] = Field(default_factory=dict)  # table path, digest
    seed: int = 0
