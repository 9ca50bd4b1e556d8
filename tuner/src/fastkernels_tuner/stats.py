"""What measurements allow us to say: how rare failures are, and whether a candidate is faster.

Log ratios are ln(candidate / champion): negative where the candidate is faster. A gain is the
fraction of its time that the champion would save, 1 - exp(mean log ratio), so 0.02 is 2 %. Means
over workloads are geometric unless a name says otherwise. `Policy` holds the constants.

The noise that this is made for, and `simulate` makes:

- what all blocks of one process pair share (clocks, temperature): cancels within a pair of blocks;
- drift, the same for all workloads of a block: ABBA order cancels what is linear; the rest is why
  a pair of blocks, not a workload or a call, is the unit that is counted;
- noise of single measurements: averages out over workloads and pairs;
- what a process keeps as long as it lives (memory layout, code placement): no number of pairs in
  the same processes averages it out. Hence `confirm`: a second run in fresh processes with fresh
  data has to win on its own; and `Policy.session_sd`, its size as `calibrate` finds it in A/A runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy.optimize import brentq
from scipy.special import bdtr, betainc, betaincinv, ndtr, ndtri, stdtrit

from fastkernels_tuner.model import Block, Decision, Model, Policy

Array = NDArray[np.float64]


# ---- failures among trials ----------------------------------------------------------------------


def upper_bound(failures: int, trials: int, confidence: float = 0.95) -> float:
    """One-sided Clopper-Pearson upper bound of the failure rate; 1 where nothing was tried."""
    _check_counts(failures, trials)
    _check_open("confidence", confidence)
    if failures == trials:
        return 1.0
    return float(betaincinv(failures + 1, trials - failures, confidence))


def lower_bound(failures: int, trials: int, confidence: float = 0.95) -> float:
    """One-sided Clopper-Pearson lower bound of the failure rate; 0 where nothing was tried."""
    _check_counts(failures, trials)
    _check_open("confidence", confidence)
    if failures == 0:
        return 0.0
    return float(betaincinv(failures, trials - failures + 1, 1 - confidence))


def trials_needed(p_max: float, confidence: float = 0.95, failures: int = 0) -> int:
    """The fewest trials, `failures` of them wrong, whose `upper_bound` is at most `p_max`."""
    _check_open("p_max", p_max)
    _check_open("confidence", confidence)
    if failures < 0:
        raise ValueError(f"failures must not be negative, got {failures}")

    def suffices(trials: int) -> bool:
        return float(bdtr(failures, trials, p_max)) <= 1 - confidence

    low, high = failures, failures + 1  # `low` does not suffice: its bound is 1
    while not suffices(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def _check_counts(failures: int, trials: int) -> None:
    if not 0 <= failures <= trials:
        raise ValueError(f"expected 0 <= failures <= trials, got {failures} of {trials}")


def _check_open(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}")


# ---- one pair of blocks -------------------------------------------------------------------------


class Ratio(NamedTuple):
    """What one ABBA pair of blocks says about one workload."""

    log: float  # ln(candidate / champion)
    champion_us: float


Pair = Mapping[str, Ratio]  # of one pair of blocks, by workload

# A factor of 5e8: no ratio of two times. Also keeps every exponential below finite.
_MAX_LOG = 20.0


def log_ratio(candidate: Sequence[Block], champion: Sequence[Block]) -> Ratio:
    """The ratio of two sides, each the geometric mean of the medians of its blocks.

    Which side a block belongs to is for the caller to say: in an A/A run names cannot tell. Raises
    ValueError unless both sides have equally many blocks of one workload, environment and pair, in
    an order that cancels linear drift, none of them discarded.
    """
    blocks = [*candidate, *champion]
    if not candidate or len(candidate) != len(champion):
        raise ValueError(
            f"expected as many blocks on both sides, got {len(candidate)} and {len(champion)}"
        )
    for name in ("workload", "environment", "number"):
        values = {str(getattr(block, name)) for block in blocks}
        if len(values) > 1:
            raise ValueError(f"expected blocks of one {name}, got {', '.join(sorted(values))}")
    for block in blocks:
        if block.discarded:
            raise ValueError(f"block {block.order} does not count: {block.discarded}")
        if not block.us or not all(math.isfinite(us) and us > 0 for us in block.us):
            raise ValueError(f"block {block.order} needs positive, finite times, got {block.us}")
    orders = [[block.order for block in side] for side in (candidate, champion)]
    if sum(orders[0]) != sum(orders[1]) or len({*orders[0], *orders[1]}) < len(blocks):
        raise ValueError(f"expected a balanced order such as ABBA, got places {orders}")
    ours, theirs = (
        float(np.mean([math.log(np.median(block.us)) for block in side]))
        for side in (candidate, champion)
    )
    return Ratio(ours - theirs, math.exp(theirs))


def _matrix(pairs: Sequence[Pair], workloads: Sequence[str]) -> Array:
    """Log ratios, [pairs, workloads]."""
    return np.array([[pair[workload].log for workload in workloads] for pair in pairs])


def _check_pair(pair: Pair, workloads: Sequence[str]) -> None:
    if set(pair) != set(workloads):
        missing, foreign = set(workloads) - set(pair), set(pair) - set(workloads)
        raise ValueError(
            f"a pair of blocks covers every workload of the test: missing {sorted(missing)}, "
            f"foreign {sorted(foreign)}"
        )
    for workload, (log, champion_us) in pair.items():
        if not abs(log) <= _MAX_LOG:  # so that NaN is refused too
            raise ValueError(
                f"workload {workload}: expected the finite log ratio of two times, got {log}"
            )
        if not (math.isfinite(champion_us) and champion_us > 0):
            raise ValueError(
                f"workload {workload}: expected a positive, finite time, got {champion_us} us"
            )


# ---- the level of a look ------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def nominal_level(looks: tuple[int, ...], alpha: float) -> float:
    """The one-sided level of every look, the same for all (Pocock's choice), at which Student's t
    after `looks` observations exceeds its quantile at any look with probability `alpha`, where the
    observations are normal with mean 0.

    Not Pocock's constants, which are for a known variance: with a handful of observations and at
    the levels that a `Budget` grants those promote more often than they say.
    """
    _check_open("alpha", alpha)
    if not looks or looks[0] < 2 or any(a >= b for a, b in itertools.pairwise(looks)):
        raise ValueError(f"looks must increase from at least 2 pairs, got {looks}")
    bonferroni = alpha / len(looks)
    # That far out two looks are hardly ever exceeded together, and the quadrature would need more
    # points: for looks that double, this is less than a tenth below the exact level.
    if len(looks) == 1 or alpha < 0.01:
        return bonferroni
    log_level = brentq(
        lambda log_level: math.log(_crossing(math.exp(log_level), looks) / alpha),
        math.log(bonferroni / 1.1),  # beyond it, as the quadrature errs by up to 2 %
        math.log(alpha),
        xtol=1e-4,
    )
    return max(bonferroni, math.exp(log_level))


def _crossing(level: float, looks: tuple[int, ...], num_cells: int = 100, order: int = 24) -> float:
    """P(t exceeds its quantile at `level` at any look), where the mean is 0.

    After n observations let u be their sum over sqrt(n * sum of squares): t is an increasing
    function of u. Directions do not depend on lengths, so from look to look u is a Markov chain:
        u' = (sqrt(n f) u + sqrt(m (1 - f)) v) / sqrt(n + m),
    with m new observations, v their own u, and f = Beta(n/2, m/2) the old ones' share of the sum of
    squares. Followed by the mass in cells up to the quantile.
    """
    edges = ndtr(np.linspace(-8, -ndtri(level), num_cells + 1))  # as probabilities of t
    middles = ndtr((ndtri(edges[1:]) + ndtri(edges[:-1])) / 2)
    mass, total = np.diff(edges), level
    points, weights = np.polynomial.legendre.leggauss(order)
    for n, after in itertools.pairwise(looks):
        m = after - n
        f = betaincinv(n / 2, m / 2, (1 + points) / 2)
        start, end = _direction(middles, n), _direction(edges, after)
        v = math.sqrt(after) * end[:, None] - np.sqrt(n * f) * start[:, None, None]
        v = np.clip(v / np.sqrt(m * (1 - f)), -1, 1)
        below = (1 + np.sign(v) * betainc(0.5, (m - 1) / 2, v**2)) / 2 @ (weights / 2)
        total += float(mass @ (1 - below[:, -1]))
        mass = mass @ np.diff(below, axis=1)
    return total


def _direction(probability: Array, n: int) -> Array:
    t = stdtrit(n - 1, probability)
    return np.asarray(t / np.sqrt(n - 1 + t**2))


# ---- the paired test ----------------------------------------------------------------------------


class Estimate(Model):
    """A gain and its one-sided bounds, as fractions."""

    gain: float
    low: float
    high: float
    required: float  # what a promotion needs
    error: float  # standard error of the mean log ratio, by the scatter of the pairs alone
    gains: dict[str, float]  # by workload


class Verdict(Model):
    """What a `PairedTest` says after `pairs` pairs of blocks.

    promote: the gain is above 0 at the level of the looks, and itself at least what is required.
    keep: the gain is below what is required, at `alpha`.
    inconclusive: neither; where `more` > 0, so many pairs are missing until the next look.
    """

    decision: Decision
    reason: str
    session: str
    workloads: tuple[str, ...]
    pairs: int
    more: int
    discarded: int
    level: float  # of `estimate.low`
    alpha: float  # of `estimate.high`
    estimate: Estimate | None  # None: fewer than 2 pairs


def _gain(log: float | Array) -> Array:
    return -np.expm1(np.minimum(log, _MAX_LOG))  # few pairs at a tiny level: wider than exp takes


@dataclass(frozen=True)
class _Rule:
    """The decision at a look, of one test or of many at once."""

    policy: Policy
    num_workloads: int
    level: float
    alpha: float

    def bounds(self, means: Array) -> tuple[Array, Array, Array]:
        """Gain, low and high by the means over workloads of the log ratios, [..., pairs]."""
        n = means.shape[-1]
        mean = means.mean(axis=-1)
        # What a process keeps does not shrink with n. Student's quantile for the sum of an
        # estimated and a known variance errs on the safe side.
        kept = self.policy.session_sd**2 / self.num_workloads
        spread = np.sqrt(means.var(axis=-1, ddof=1) / n + kept)
        low = mean - stdtrit(n - 1, self.level) * spread
        high = mean + stdtrit(n - 1, self.alpha) * spread
        return _gain(mean), _gain(low), _gain(high)

    def required(self, champion_us: float) -> float:
        return max(self.policy.min_gain, self.policy.min_gain_us / champion_us)

    def decide(
        self, gain: Array, low: Array, high: Array, required: float
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Whether to promote, and whether to keep: never both, as low <= gain <= high."""
        return (gain >= required) & (low > 0), high < required

    def estimate(self, pairs: Sequence[Pair], workloads: Sequence[str]) -> Estimate:
        logs = _matrix(pairs, workloads)
        means = logs.mean(axis=1)
        gain, low, high = map(float, self.bounds(means))
        times = [ratio.champion_us for pair in pairs for ratio in pair.values()]
        return Estimate(
            gain=gain,
            low=low,
            high=high,
            required=self.required(float(np.exp(np.log(times).mean()))),
            error=float(means.std(ddof=1)) / math.sqrt(len(pairs)),
            gains=dict(zip(workloads, _gain(logs.mean(axis=0)).tolist(), strict=True)),
        )


class PairedTest:
    """Is a candidate faster than the champion? Group-sequential, fed a pair of blocks at a time.

    It looks after `policy.looks` pairs. The unit is the mean over workloads of one pair's log
    ratios, tested with Student's t at `nominal_level`: a candidate without any gain is promoted
    with probability `alpha` at most. The gain also has to be at least `policy.min_gain`, and at
    least `policy.min_gain_us` of the geometric mean of the champion's times. Stopping to keep the
    champion goes by the policy's alpha whatever `alpha` is: it cannot cause a false promotion.

    Assumed: pairs are independent given their processes, and their means about normal, being means
    over workloads of logs of medians. The workloads are all that matters, not a sample of others,
    and one of them can outweigh the rest: see `Estimate.gains` and `aggregate`. What processes keep
    is covered as far as `policy.session_sd` says, beyond that by `confirm`.

    `workloads` are names that stay when the seed of the data changes; `session` names processes and
    data; `alpha` is what `Budget.reserve` granted, by default the policy's.
    """

    def __init__(
        self,
        policy: Policy,
        workloads: Sequence[str],
        *,
        session: str = "",
        alpha: float | None = None,
    ) -> None:
        if not workloads or len(set(workloads)) < len(workloads):
            raise ValueError(f"expected workloads of different names, got {list(workloads)}")
        self.policy = policy
        self.workloads = tuple(sorted(workloads))
        self.session = session
        self.pairs: list[Pair] = []
        self.discarded = 0
        level = nominal_level(policy.looks, policy.alpha if alpha is None else alpha)
        self._rule = _Rule(policy, len(workloads), level, policy.alpha)
        self._verdict = self._judge()

    def add(self, pair: Pair) -> Verdict:
        """Counts one pair of blocks, measured on every workload. Raises ValueError where a ratio is
        missing or not finite, and after the decision."""
        self._check_undecided()
        _check_pair(pair, self.workloads)
        self.pairs.append(dict(pair))
        self._verdict = self._judge()
        return self._verdict

    def discard(self) -> Verdict:
        """Counts a pair that the guard has refused; nothing is promoted while these are more than
        `policy.max_discarded` of all pairs. Raises ValueError after the decision."""
        self._check_undecided()
        self.discarded += 1
        self._verdict = self._judge()
        return self._verdict

    def verdict(self) -> Verdict:
        return self._verdict

    def _check_undecided(self) -> None:
        if not self._verdict.more:
            raise ValueError(
                f"decided after {len(self.pairs)} pairs: {self._verdict.decision}; "
                "going on would be choosing when to stop"
            )

    def _judge(self) -> Verdict:
        n, looks = len(self.pairs), self.policy.looks
        found = self._rule.estimate(self.pairs, self.workloads) if n >= 2 else None
        decision: Decision = "inconclusive"
        more = next((look - n for look in looks if look > n), 0)
        reason = f"the next look is after {n + more} pairs"
        if found and n in looks:
            gain, low, high = np.array([found.gain, found.low, found.high])
            promote, keep = self._rule.decide(gain, low, high, found.required)
            if keep or (promote and not self._is_unfit(n)):
                decision, more = "keep" if keep else "promote", 0
            if not more:
                reason = (
                    f"gain {found.gain:.2%}, from {found.low:.2%} to {found.high:.2%}; "
                    f"required: {found.required:.2%}"
                )
        if decision == "inconclusive" and self._is_unfit(looks[-1]):  # good pairs cannot mend it
            more = 0
            reason = (
                f"the guard discarded {self.discarded} of {self.discarded + n} pairs; "
                f"at most {self.policy.max_discarded:.0%} may be"
            )
        return Verdict(
            decision=decision,
            reason=reason,
            session=self.session,
            workloads=self.workloads,
            pairs=n,
            more=more,
            discarded=self.discarded,
            level=self._rule.level,
            alpha=self.policy.alpha,
            estimate=found,
        )

    def _is_unfit(self, pairs: int) -> bool:
        return self.discarded > self.policy.max_discarded * (self.discarded + pairs)


class Control(Model):
    """What became of workloads that a candidate does not touch; `low` and `high` are two-sided."""

    is_disturbed: bool
    reason: str
    pairs: int
    estimate: Estimate


def control(policy: Policy, pairs: Sequence[Pair]) -> Control:
    """The negative control: `pairs` are of workloads that candidate and champion serve alike.

    Disturbed where they differ, at the policy's alpha (two-sided), by at least what a promotion
    requires: what does that may be the candidate's gain too. Effects smaller than the distance of
    the bounds are not seen.
    """
    if len(pairs) < 2 or not pairs[0]:
        raise ValueError(f"a control needs 2 pairs of blocks and a workload, got {list(pairs)}")
    workloads = tuple(pairs[0])
    for pair in pairs:
        _check_pair(pair, workloads)
    rule = _Rule(policy, len(workloads), policy.alpha / 2, policy.alpha / 2)
    found = rule.estimate(pairs, workloads)
    return Control(
        is_disturbed=abs(found.gain) >= found.required and not found.low <= 0 <= found.high,
        reason=f"untouched workloads: gain {found.gain:.2%}, "
        f"from {found.low:.2%} to {found.high:.2%}",
        pairs=len(pairs),
        estimate=found,
    )


class Confirmation(Model):
    """What two independent runs say together.

    `gain` is the second run's: the first's was chosen for being large, by `shrinkage` more. `low`
    is the one-sided bound, at the policy's alpha, of the gain in both. All are None where the
    second run had fewer than 2 pairs.
    """

    decision: Decision
    reason: str
    first: Verdict
    second: Verdict
    gain: float | None
    shrinkage: float | None
    low: float | None


def confirm(first: Verdict, second: Verdict, controls: Sequence[Control] = ()) -> Confirmation:
    """Promote only if a second run promotes on its own, the two agree, and no control is disturbed.

    The second run takes fresh processes and fresh data, hence another `session`. What processes
    keep shows in how far the two runs are apart, workload by workload; the joint gain has to be
    above 0 by that measure too. Assumed: that is independent from workload to workload. A process
    that is slower on all of them alike is caught by the runs only as often as chance has it.

    Raises ValueError where there is nothing to confirm, or the runs are not two of one comparison.
    """
    if first.decision != "promote" or first.estimate is None:
        raise ValueError(f"nothing to confirm: the first run says {first.decision}")
    if second.more:
        raise ValueError(f"the second run is not decided: {second.reason}")
    if first.session == second.session:
        raise ValueError(
            f"a confirmation needs fresh processes and data, got session {first.session!r} twice"
        )
    if first.workloads != second.workloads:
        raise ValueError(
            f"expected the same workloads, got {first.workloads} and {second.workloads}"
        )
    decision, reason = second.decision, second.reason
    gain = shrinkage = low = None
    if second.estimate:
        gain = second.estimate.gain
        shrinkage = first.estimate.gain - gain
        runs = (first.estimate, second.estimate)
        low = float(
            _joint_low(
                np.log1p([[-run.gains[name] for name in first.workloads] for run in runs]),
                np.array([run.error for run in runs]),
                np.array([first.pairs, second.pairs]),
                first.alpha,
            )
        )
        if decision == "promote" and low <= 0:
            decision = "inconclusive"
            reason = f"the runs are too far apart: both together gain from {low:.2%}"
    for found in controls:
        if decision == "promote" and found.is_disturbed:
            decision, reason = "inconclusive", found.reason
    return Confirmation(
        decision=decision,
        reason=reason,
        first=first,
        second=second,
        gain=gain,
        shrinkage=shrinkage,
        low=low,
    )


def _joint_low(logs: Array, errors: Array, pairs: Array, alpha: float) -> Array:
    """The lower bound of the gain in two runs, of one comparison or of many at once.

    `logs` are mean log ratios, [2, ..., workloads]; `errors` and `pairs` are [2, ...]. Student's t
    with Welch's degrees of freedom. The variance of the two means' sum: the scatter of the pairs of
    either run, and the differences between runs by workload; noise of measurement is in both, which
    is on the safe side.
    """
    num_workloads = logs.shape[-1]
    apart = ((logs[0] - logs[1]) ** 2).mean(axis=-1) / num_workloads
    parts = np.stack([errors[0] ** 2, errors[1] ** 2, apart])
    freedom = np.stack([pairs[0] - 1, pairs[1] - 1, np.full_like(apart, num_workloads)])
    total = parts.sum(axis=0)
    # Without any scatter the bound is the mean, whatever the degrees of freedom.
    df = total**2 / np.maximum((parts**2 / freedom).sum(axis=0), np.finfo(float).tiny)
    half = np.sqrt(total) / 2
    return _gain(logs.mean(axis=(0, -1)) - stdtrit(np.maximum(df, 1), alpha) * half)


# ---- the campaign's budget ----------------------------------------------------------------------


class Budget(Model):
    """Alpha-investing (Foster and Stine 2008) over the comparisons of a campaign.

    Whatever is compared, in whatever order: E[false promotions] <= alpha (E[promotions] + 1 -
    alpha). So of a campaign without a single better candidate at most a share `alpha` promotes
    anything, and each confirmed promotion pays for further tests. Needs tests that are valid at the
    level granted; confirmation comes on top.

    A test at level a costs a / (1 - a) of the wealth when it is reserved, so tests may run at the
    same time. The wealth is spread evenly over the tests still planned; past the plan each
    test takes half of what is left. Frozen and JSON: `reserve` and `settle` return what to store.
    """

    alpha: float = Field(gt=0, lt=1)
    planned: int = Field(ge=1)
    levels: dict[str, float] = Field(default_factory=dict)  # reserved, by comparison
    promoted: dict[str, bool] = Field(default_factory=dict)  # settled, by comparison

    @property
    def wealth(self) -> float:
        earned = self.alpha * sum(self.promoted.values())
        spent = sum(level / (1 - level) for level in self.levels.values())
        return self.alpha * (1 - self.alpha) + earned - spent

    def reserve(self, comparison: str) -> Budget:
        """With `levels[comparison]`, the `alpha` for its `PairedTest`; the same if it was reserved
        before and interrupted. ValueError if it is settled: testing again until it wins is what
        this is against."""
        if comparison in self.promoted:
            raise ValueError(f"{comparison} is settled; a second test of it is not independent")
        if comparison in self.levels:
            return self
        cost = self.wealth / max(self.planned - len(self.levels), 2)
        level = min(cost / (1 + cost), self.alpha)
        return self.model_copy(update={"levels": {**self.levels, comparison: level}})

    def settle(self, comparison: str, promoted: bool) -> Budget:
        """`promoted`: and confirmed. Settling twice alike changes nothing."""
        if comparison not in self.levels:
            raise ValueError(f"{comparison} was never reserved")
        if self.promoted.get(comparison, promoted) != promoted:
            raise ValueError(f"{comparison} is settled the other way")
        return self.model_copy(update={"promoted": {**self.promoted, comparison: promoted}})


# ---- A/A runs -----------------------------------------------------------------------------------


class Calibration(Model):
    """What A/A runs say about the constants of a policy.

    hold: the rate of false promotions is at most alpha, at the confidence asked for; broken: it is
    above; unproven: too few repeats to tell.
    """

    state: Literal["hold", "unproven", "broken"]
    reason: str
    repeats: int
    promoted: int
    confirmed: int  # of these by the session after, whose processes and data are others
    lower: float  # one-sided Clopper-Pearson bounds of the rate
    upper: float
    session_sd: float  # what processes keep, as `Policy.session_sd`

    @property
    def rate(self) -> float:
        return self.promoted / self.repeats


def calibrate(
    policy: Policy, repeats: Sequence[Sequence[Pair]], *, confidence: float = 0.95
) -> Calibration:
    """From repeats of an A/A run, each with processes of its own and pairs up to the last look.

    `session_sd` is the larger of two estimates, what single workloads and what their mean show
    beyond the scatter of the pairs: the second also sees what all workloads of a process share. It
    reads a little high where there is none. Pairs that stop at the decision would bias it.
    """
    if not repeats:
        raise ValueError("a calibration needs at least one A/A run, got none")
    verdicts: list[Verdict] = []
    alone, joint = [], []
    for i, pairs in enumerate(repeats):
        if len(pairs) < policy.looks[-1]:
            raise ValueError(
                f"A/A run {i} has {len(pairs)} pairs, expected {policy.looks[-1]}: all looks"
            )
        test = PairedTest(policy, tuple(pairs[0]), session=str(i))
        for pair in pairs:
            if test.verdict().more:
                test.add(pair)
            else:
                _check_pair(pair, test.workloads)
        verdicts.append(test.verdict())
        logs = _matrix(pairs, test.workloads)
        n, num_workloads = logs.shape
        alone.append(np.mean(logs.mean(axis=0) ** 2 - logs.var(axis=0, ddof=1) / n))
        means = logs.mean(axis=1)
        joint.append(num_workloads * (means.mean() ** 2 - means.var(ddof=1) / n))
    session_sd = math.sqrt(max(float(np.mean(alone)), float(np.mean(joint)), 0.0))
    promotions = [i for i, verdict in enumerate(verdicts) if verdict.decision == "promote"]
    promoted = len(promotions)
    confirmed = sum(
        len(verdicts) > 1
        and confirm(verdicts[i], verdicts[(i + 1) % len(verdicts)]).decision == "promote"
        for i in promotions
    )
    lower = lower_bound(promoted, len(repeats), confidence)
    upper = upper_bound(promoted, len(repeats), confidence)
    state: Literal["hold", "unproven", "broken"] = "unproven"
    if upper <= policy.alpha:
        state = "hold"
    elif lower > policy.alpha:
        state = "broken"
    return Calibration(
        state=state,
        reason=(
            f"{promoted} of {len(repeats)} A/A runs promoted, {confirmed} of them confirmed by the "
            f"run after: a rate from {lower:.1%} to {upper:.1%}, allowed: {policy.alpha:.1%}; "
            f"processes keep {session_sd:.2%}, the policy says {policy.session_sd:.2%}"
        ),
        repeats=len(repeats),
        promoted=promoted,
        confirmed=confirmed,
        lower=lower,
        upper=upper,
        session_sd=session_sd,
    )


# ---- operating characteristics ------------------------------------------------------------------


@dataclass(frozen=True)
class Noise:
    """Standard deviations of log times. The defaults are assumed, not measured."""

    session: float = 0.01  # of all blocks of a session: cancels
    measurement: float = 0.012  # of a block's median on a workload
    drift: float = 0.004  # of a block, on all workloads
    process: float = 0.0  # of a process on a workload, as long as it lives


class Operating(NamedTuple):
    """How often a policy decides what, of `runs` simulated comparisons with a true `gain`."""

    gain: float
    runs: int
    promoted: int  # by the first run
    kept: int
    confirmed: int  # by `confirm`
    pairs: float  # mean, of the first run


def simulate(
    policy: Policy,
    noise: Noise,
    gain: float,
    *,
    num_workloads: int = 24,
    champion_us: float = 100.0,
    runs: int = 4000,
    seed: int = 0,
    alpha: float | None = None,
) -> Operating:
    """Runs of `PairedTest` with `alpha`, and where that promotes another run and `confirm`."""
    rng = np.random.default_rng(seed)

    def rule(alpha: float) -> _Rule:
        level = nominal_level(policy.looks, alpha)
        return _Rule(policy, num_workloads, level, policy.alpha)

    logs = _simulated(policy, noise, gain, num_workloads, runs, rng)
    first = _outcomes(rule(policy.alpha if alpha is None else alpha), logs, champion_us)
    logs = _simulated(policy, noise, gain, num_workloads, int(first.promoted.sum()), rng)
    second = _outcomes(rule(policy.alpha), logs, champion_us)
    low = _joint_low(
        np.stack([first.logs[first.promoted], second.logs]),
        np.stack([first.error[first.promoted], second.error]),
        np.stack([first.pairs[first.promoted], second.pairs]),
        policy.alpha,
    )
    return Operating(
        gain=gain,
        runs=runs,
        promoted=int(first.promoted.sum()),
        kept=int(first.kept.sum()),
        confirmed=int((second.promoted & (low > 0)).sum()),
        pairs=float(first.pairs.mean()),
    )


class _Outcomes(NamedTuple):
    """Of many runs at once, as each stopped."""

    promoted: NDArray[np.bool_]
    kept: NDArray[np.bool_]
    pairs: Array
    logs: Array  # [runs, workloads]
    error: Array


def _outcomes(rule: _Rule, logs: Array, champion_us: float) -> _Outcomes:
    """`logs` are [runs, pairs, workloads]."""
    num_runs, _, num_workloads = logs.shape
    found = _Outcomes(
        np.zeros(num_runs, bool),
        np.zeros(num_runs, bool),
        np.zeros(num_runs),
        np.zeros((num_runs, num_workloads)),
        np.zeros(num_runs),
    )
    means = logs.mean(axis=2)
    for n in rule.policy.looks:
        is_open = ~(found.promoted | found.kept)
        now = means[is_open, :n]
        found.pairs[is_open] = n
        found.logs[is_open] = logs[is_open, :n].mean(axis=1)
        found.error[is_open] = now.std(axis=1, ddof=1) / math.sqrt(n)
        promote, keep = rule.decide(*rule.bounds(now), rule.required(champion_us))
        found.promoted[is_open], found.kept[is_open] = promote, keep
    return found


def _simulated(
    policy: Policy,
    noise: Noise,
    gain: float,
    num_workloads: int,
    num_runs: int,
    rng: np.random.Generator,
) -> Array:
    """Log ratios of ABBA pairs of blocks, [runs, pairs, workloads]."""
    shape = (num_runs, policy.looks[-1], 4, num_workloads)
    logs: Array = noise.measurement * rng.standard_normal(shape)
    logs += noise.drift * rng.standard_normal(shape[:3])[..., None]
    logs += noise.session * rng.standard_normal(num_runs)[:, None, None, None]
    process = noise.process * rng.standard_normal((num_runs, 1, 2, num_workloads))
    process[:, :, 0] += math.log1p(-gain)
    logs += process[:, :, [0, 1, 1, 0]]
    ratios: Array = (logs[:, :, 0] + logs[:, :, 3] - logs[:, :, 1] - logs[:, :, 2]) / 2
    return ratios


# ---- aggregations -------------------------------------------------------------------------------


AGGREGATIONS = ("ratio_of_means", "mean_of_ratios", "geomean")


class Aggregates(Model):
    """Speed of ours against theirs over workloads: above 1, ours is faster."""

    ratio_of_means: float
    mean_of_ratios: float
    geomean: float
    gated: float  # the official score: mean_of_ratios, or 0 where any row is wrong
    leave_one_out: dict[str, tuple[float, float]]  # each aggregation's range without one workload
    worst: str  # workload of the lowest ratio
    worst_ratio: float
    is_split: bool  # the aggregations do not agree on who is faster


def aggregate(
    ours_us: Mapping[str, float],
    theirs_us: Mapping[str, float],
    wrong: Iterable[str] = (),
) -> Aggregates:
    """Times by workload, the same workloads on both sides; `wrong` names rows of ours that are not
    correct. With one workload `leave_one_out` is empty. Raises ValueError over a missing row or a
    time that is not positive and finite: a row that was left out is no row that passed."""
    wrong = set(wrong)
    names, (ours, theirs) = _table({"ours": ours_us, "theirs": theirs_us})
    if not wrong <= set(names):
        raise ValueError(f"not among the workloads: {sorted(wrong - set(names))}")
    found = _aggregations(ours, theirs)
    signs = {(value > 1) - (value < 1) for value in found.values()}
    without: dict[str, tuple[float, float]] = {}
    if len(names) > 1:
        rest = [_aggregations(np.delete(ours, i), np.delete(theirs, i)) for i in range(len(names))]
        without = {
            name: (min(row[name] for row in rest), max(row[name] for row in rest))
            for name in AGGREGATIONS
        }
    ratios = theirs / ours
    worst = int(ratios.argmin())
    return Aggregates(
        **found,
        gated=0.0 if wrong else found["mean_of_ratios"],
        leave_one_out=without,
        worst=names[worst],
        worst_ratio=float(ratios[worst]),
        is_split=len(signs) > 1,
    )


def winners(
    times_us: Mapping[str, Mapping[str, float]], theirs_us: Mapping[str, float]
) -> dict[str, str]:
    """The candidate that each aggregation puts first, of times by candidate and workload; the first
    one named where several tie. More than one value: the choice depends on the aggregation."""
    if not times_us:
        raise ValueError("expected at least one candidate, got none")
    _, (theirs, *rows) = _table({"the baseline": theirs_us, **times_us})
    found = {name: _aggregations(row, theirs) for name, row in zip(times_us, rows, strict=True)}
    return {by: max(found, key=lambda name: found[name][by]) for by in AGGREGATIONS}


def _table(rows: Mapping[str, Mapping[str, float]]) -> tuple[list[str], list[Array]]:
    names = list(next(iter(rows.values())))
    if not names:
        raise ValueError("expected at least one workload, got none")
    for label, row in rows.items():
        if set(row) != set(names):
            raise ValueError(
                f"{label}: expected times of the workloads {sorted(names)}, got {sorted(row)}"
            )
        for name, us in row.items():
            if not (math.isfinite(us) and us > 0):
                raise ValueError(
                    f"{label}, workload {name}: expected a positive, finite time, got {us} us"
                )
    return names, [np.array([row[name] for name in names]) for row in rows.values()]


def _aggregations(ours: Array, theirs: Array) -> dict[str, float]:
    ratios = theirs / ours
    return {
        "ratio_of_means": float(theirs.mean() / ours.mean()),
        "mean_of_ratios": float(ratios.mean()),
        "geomean": float(np.exp(np.log(ratios).mean())),
    }
