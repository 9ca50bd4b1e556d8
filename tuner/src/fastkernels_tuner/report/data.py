"""What a report is made from. Candidates and peers are named by their labels, `str(Candidate)`.

Fractions are fractions (0.02 is 2 %), times are in the unit of their name. A number that nobody
knows is None: NaN and infinities are refused. Order is kept, the most important comes first.
"""

from __future__ import annotations

from typing import Literal

from pydantic import AwareDatetime, ConfigDict, Field

from fastkernels_tuner.model import Cause, Decision, Environment, Model, Policy

# `candidate`: a table was written and waits for `promote`. `kept`: nothing beat the champion.
Outcome = Literal["promoted", "candidate", "kept", "rejected", "inconclusive", "unfinished"]
Verdict = Literal["pass", "fail", "need_more", "inconclusive"]


class Data(Model):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


# ---- times --------------------------------------------------------------------------------------


class Point(Data):
    size: int
    us: float = Field(gt=0)  # median
    p10: float | None = None
    p90: float | None = None


class Curve(Data):
    name: str
    kind: Literal["candidate", "champion", "peer", "floor"]
    points: tuple[Point, ...]


class Curves(Data):
    """Times over one axis, for one mode, one choice of constants and, where an operator has other
    variable axes, `fixed` sizes of those."""

    axis: str
    mode: str = ""
    constants: dict[str, int] = Field(default_factory=dict)
    fixed: dict[str, int] = Field(default_factory=dict)
    curves: tuple[Curve, ...]


# ---- what was chosen ----------------------------------------------------------------------------


class FittedRegime(Data):
    """A box over the variable axes, both ends included, and the candidate that serves it."""

    mode: str = ""
    constants: dict[str, int] = Field(default_factory=dict)
    bounds: dict[str, tuple[int, int]]
    candidate: str
    previous: str | None = None  # what the champion serves here; None: not known
    measured: tuple[dict[str, int], ...] = ()  # sizes that this rests on
    slowdown: float | None = None  # largest loss against the fastest of a size
    runner_up: str = ""
    margin: float | None = None  # by how much that is slower, at `at`, where it shows most
    at: dict[str, int] = Field(default_factory=dict)
    spread_us: float | None = None
    worst_us: float | None = None
    trials: int = 0
    failures: int = 0


# ---- how it was found ---------------------------------------------------------------------------


class Study(Data):
    """One Optuna study. `trials` counts by state, `importances` are fractions by knob."""

    regime: str
    route: str
    sampler: str = ""
    space: int | None = None  # legal configs
    trials: dict[str, int] = Field(default_factory=dict)
    best: str = ""
    best_us: float | None = None
    importances: dict[str, float] = Field(default_factory=dict)


class Budget(Data):
    """Judged calls of a candidate on a stratum, against what its risk class requires."""

    candidate: str
    stratum: str
    risk: str
    trials: int
    failures: int
    upper_bound: float  # of the rate of failures, one-sided, at the policy's confidence
    required: float  # p_max
    verdict: Verdict
    worst: float | None = None  # largest error in units of its limit
    proof: str = ""  # why the stratum is trivial, where it is


class Comparison(Data):
    """A sequential paired test. Positive: the challenger is faster, by so much of the baseline."""

    about: str  # regime or workload
    challenger: str
    baseline: str
    effect: float
    ci: tuple[float, float]
    gain_us: float | None = None
    workloads: int = 1
    pairs: int
    discarded: int = 0  # pairs
    decision: Decision
    is_confirmation: bool = False  # an independent second run
    uuid: str = ""  # of the GPU


class Aggregate(Data):
    """Ratios theirs / ours over the rows of a list: above 1, ours is faster."""

    listed: str
    mode: str = ""
    against: str  # "champion", or a peer's name
    rows: int
    ratio_of_means: float
    mean_of_ratios: float
    geomean: float
    gated: float | None = None  # the official score, 0 where a row is wrong
    leave_one_out: tuple[float, float] | None = None  # range of the geomean
    worst: float
    worst_workload: str = ""


class Problem(Data):
    """Something that went wrong, `count` times alike."""

    cause: Cause
    candidate: str = ""
    stage: str = ""
    workload: str = ""
    seed: int | None = None
    message: str = ""
    count: int = 1


class StageCost(Data):
    stage: str
    device_s: float
    wall_s: float | None = None


class Cost(Data):
    stages: tuple[StageCost, ...] = ()
    budget_s: float | None = None  # of device time
    trials: dict[str, int] = Field(default_factory=dict)  # of every study, by state
    blocks: int = 0  # timed blocks, discarded ones included
    discarded: dict[str, int] = Field(default_factory=dict)  # blocks by reason

    @property
    def device_s(self) -> float:
        return sum(stage.device_s for stage in self.stages)


# ---- all of it ----------------------------------------------------------------------------------


class CampaignReport(Data):
    """Everything that a report says; only the first five fields are needed."""

    campaign: str
    op: str
    environment: Environment
    policy: Policy
    outcome: Outcome
    summary: str = ""  # a sentence or two under the verdict
    started: AwareDatetime | None = None
    finished: AwareDatetime | None = None
    status: Literal["measured", "unmeasured"] = "measured"
    table: str = ""  # path of the table that was written
    champion: str = ""  # path or digest of the table compared with
    protocol: dict[str, str | int | float] = Field(default_factory=dict)
    ids: dict[str, str] = Field(default_factory=dict)  # candidate ids by label
    aggregates: tuple[Aggregate, ...] = ()  # the first one is the headline
    comparisons: tuple[Comparison, ...] = ()
    regimes: tuple[FittedRegime, ...] = ()
    curves: tuple[Curves, ...] = ()
    studies: tuple[Study, ...] = ()
    budgets: tuple[Budget, ...] = ()
    problems: tuple[Problem, ...] = ()
    cost: Cost = Cost()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
