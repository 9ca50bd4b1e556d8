"""Bounds against closed forms, decisions case by case, and error rates by simulation."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, norm, ttest_1samp
from scipy.stats import t as student

from fastkernels_tuner import stats
from fastkernels_tuner.model import Block, Policy
from fastkernels_tuner.stats import (
    AGGREGATIONS,
    Budget,
    Noise,
    Pair,
    PairedTest,
    Ratio,
    Verdict,
    aggregate,
    calibrate,
    confirm,
    control,
    log_ratio,
    lower_bound,
    nominal_level,
    simulate,
    trials_needed,
    upper_bound,
    winners,
)

POLICY = Policy(name="test", timer="cupti", is_promotable=True)


def policy(**changes: Any) -> Policy:
    return POLICY.model_copy(update=changes)


def pairs_of(logs: Any, champion_us: float = 100.0) -> list[Pair]:
    """From log ratios, [pairs, workloads]."""
    return [{f"w{i}": Ratio(float(x), champion_us) for i, x in enumerate(row)} for row in logs]


def run(
    logs: Any,
    rules: Policy = POLICY,
    *,
    champion_us: float = 100.0,
    session: str = "",
    alpha: float | None = None,
) -> Verdict:
    """What a test says that is fed until it decides."""
    pairs = pairs_of(logs, champion_us)
    test = PairedTest(rules, tuple(pairs[0]), session=session, alpha=alpha)
    for pair in pairs:
        if not test.verdict().more:
            break
        test.add(pair)
    return test.verdict()


def steady(gain: float, scatter: float = 0.001, workloads: int = 1) -> list[list[float]]:
    """16 pairs of a gain, whose mean and standard deviation at every look are exact."""
    return [[math.log1p(-gain) + scatter * (-1) ** i] * workloads for i in range(16)]


# ---- failures among trials ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p_max", "confidence", "trials"),
    [
        (0.05, 0.95, 59),
        (0.01, 0.95, 299),
        (0.005, 0.95, 598),
        (1 - 0.99 ** (1 / 3), 0.95, 895),  # so that three official trials pass at 99 %
        (0.00334, 0.95, 896),
        (0.001, 0.95, 2995),
        (0.05, 0.99, 90),
        (0.01, 0.99, 459),
        (0.005, 0.99, 919),
        (0.001, 0.99, 4603),
    ],
)
def test_trials_without_a_failure(p_max: float, confidence: float, trials: int) -> None:
    assert trials_needed(p_max, confidence) == trials
    assert upper_bound(0, trials, confidence) == pytest.approx(1 - (1 - confidence) ** (1 / trials))


@pytest.mark.parametrize(
    ("failures", "trials", "bound"),
    [(0, 3, 0.632), (0, 200, 0.0149), (0, 1206, 0.0025), (3, 200, 0.038), (6, 100, 0.115)],
)
def test_bounds_known_from_elsewhere(failures: int, trials: int, bound: float) -> None:
    assert upper_bound(failures, trials) == pytest.approx(bound, rel=0.01)


@settings(deadline=None)
@given(st.floats(1e-3, 0.5), st.floats(0.5, 0.999), st.integers(0, 20))
def test_trials_needed_is_the_fewest(p_max: float, confidence: float, failures: int) -> None:
    trials = trials_needed(p_max, confidence, failures)
    assert upper_bound(failures, trials, confidence) <= p_max * (1 + 1e-9)
    assert upper_bound(failures, trials - 1, confidence) >= p_max * (1 - 1e-9)


@pytest.mark.parametrize("trials", [1, 7, 59, 200])
@pytest.mark.parametrize("p", [0.004, 0.05, 0.3, 0.9])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_a_bound_covers_as_often_as_it_says(trials: int, p: float, confidence: float) -> None:
    """Exactly, over all numbers of failures."""
    counts = [k for k in range(trials + 1) if upper_bound(k, trials, confidence) >= p]
    assert binom.pmf(counts, trials, p).sum() >= confidence - 1e-9


@settings(deadline=None)
@given(st.integers(0, 100), st.integers(0, 100), st.floats(0.01, 0.99))
def test_bounds_mirror_each_other(failures: int, passed: int, confidence: float) -> None:
    trials = failures + passed
    lower, upper = (f(failures, trials, confidence) for f in (lower_bound, upper_bound))
    assert 0 <= lower <= 1
    assert 0 <= upper <= 1
    assert lower == pytest.approx(1 - upper_bound(passed, trials, confidence), abs=1e-12)
    if trials and confidence >= 0.5:
        assert lower <= failures / trials <= upper


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: upper_bound(4, 3), "got 4 of 3"),
        (lambda: upper_bound(-1, 3), "got -1 of 3"),
        (lambda: lower_bound(4, 3), "got 4 of 3"),
        (lambda: upper_bound(0, 3, 1.0), "confidence must lie between 0 and 1"),
        (lambda: trials_needed(0.0), "p_max must lie between 0 and 1"),
        (lambda: trials_needed(math.nan), "p_max must lie between 0 and 1"),
        (lambda: trials_needed(0.1, failures=-1), "must not be negative"),
    ],
)
def test_impossible_counts_are_refused(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_nothing_tried_says_nothing() -> None:
    assert (lower_bound(0, 0), upper_bound(0, 0)) == (0, 1)
    assert (lower_bound(5, 5) > 0, upper_bound(5, 5)) == (True, 1)


# ---- the level of a look ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_looks", "alpha", "z"),
    [(2, 0.025, 2.178), (3, 0.05, 1.992)],
)
def test_with_many_observations_the_levels_are_pocock_s(
    num_looks: int, alpha: float, z: float
) -> None:
    looks = tuple(100 * (i + 1) for i in range(num_looks))
    assert norm.isf(nominal_level(looks, alpha)) == pytest.approx(z, abs=0.01)


@pytest.mark.parametrize("looks", [(4, 8, 16), (2, 3, 4), (3, 10)])
def test_looks_together_are_wrong_as_often_as_alpha(looks: tuple[int, ...]) -> None:
    runs, alpha = 50_000, 0.05
    draws = np.random.default_rng(5).standard_normal((runs, looks[-1]))
    level = nominal_level(looks, alpha)
    wrong = np.zeros(runs, bool)
    for n in looks:
        wrong |= ttest_1samp(draws[:, :n], 0, axis=1, alternative="greater").pvalue < level
    assert wrong.mean() == pytest.approx(alpha, abs=3.5 * math.sqrt(alpha * (1 - alpha) / runs))


@pytest.mark.parametrize("looks", [(5,), (2, 3), (4, 8, 16), (4, 5, 6, 7, 8)])
@pytest.mark.parametrize("alpha", [1e-12, 1e-3, 0.01, 0.05])
def test_a_level_lies_between_bonferroni_s_and_that_of_one_look(
    looks: tuple[int, ...], alpha: float
) -> None:
    assert alpha / len(looks) <= nominal_level(looks, alpha) <= alpha


@pytest.mark.parametrize("looks", [(), (1, 2), (4, 4), (8, 4)])
def test_looks_have_to_increase_from_two(looks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="looks must increase from at least 2 pairs"):
        nominal_level(looks, 0.05)


# ---- one pair of blocks -------------------------------------------------------------------------


def block(order: int, *us: float, **changes: Any) -> Block:
    fields = {"candidate": "x", "workload": "w", "environment": "e", "lease": 1, "number": 0}
    return Block(**{**fields, "order": order, "us": us, **changes})


def test_a_ratio_is_of_geometric_means_of_medians() -> None:
    found = log_ratio(
        [block(0, 1, 2, 9), block(3, 8, 8)], [block(1, 4, 4, 4), block(2, 9, 1, 16, 25, 2)]
    )
    assert found.log == pytest.approx(math.log(4 / 6))
    assert found.champion_us == pytest.approx(6)


@settings(max_examples=50, deadline=None)
@given(st.floats(0.5, 2), st.floats(0.5, 2), st.booleans())
def test_drift_by_a_factor_per_block_cancels(ratio: float, drift: float, swap: bool) -> None:
    ours, theirs = ((1, 2), (0, 3)) if swap else ((0, 3), (1, 2))
    found = log_ratio(
        [block(i, 10 * ratio * drift**i) for i in ours], [block(i, 10 * drift**i) for i in theirs]
    )
    assert found.log == pytest.approx(math.log(ratio), abs=1e-12)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ([], [], "as many blocks on both sides, got 0 and 0"),
        ([block(0, 1)], [block(1, 1), block(2, 1)], "got 1 and 2"),
        ([block(0, 1)], [block(1, 1)], "balanced order"),
        ([block(0, 1), block(1, 1)], [block(2, 1), block(3, 1)], "balanced order"),
        ([block(1, 1), block(1, 1)], [block(0, 1), block(2, 1)], "balanced order"),
        (
            [block(0, 1), block(3, 1)],
            [block(1, 1), block(2, 1, workload="v")],
            "blocks of one workload, got v, w",
        ),
        (
            [block(0, 1), block(3, 1)],
            [block(1, 1), block(2, 1, environment="f")],
            "blocks of one environment, got e, f",
        ),
        (
            [block(0, 1), block(3, 1)],
            [block(1, 1), block(2, 1, number=7)],
            "blocks of one number, got 0, 7",
        ),
        (
            [block(0, 1), block(3, 1, discarded="clock at 80 %")],
            [block(1, 1), block(2, 1)],
            "block 3 does not count: clock at 80 %",
        ),
        ([block(0, 1), block(3)], [block(1, 1), block(2, 1)], "block 3 needs positive, finite"),
        ([block(0, 0), block(3, 1)], [block(1, 1), block(2, 1)], "block 0 needs positive, finite"),
        (
            [block(0, 1), block(3, 1, math.inf)],
            [block(1, 1), block(2, 1)],
            "block 3 needs positive, finite",
        ),
    ],
)
def test_blocks_that_cannot_be_compared(ours: list[Block], theirs: list[Block], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        log_ratio(ours, theirs)


# ---- the paired test ----------------------------------------------------------------------------


def test_a_clear_gain_is_promoted_at_the_first_look() -> None:
    found = run(steady(0.02, workloads=3))
    assert (found.decision, found.pairs, found.more) == ("promote", 4, 0)
    assert found.estimate is not None
    assert found.estimate.gain == pytest.approx(0.02)
    assert found.estimate.gains == pytest.approx({"w0": 0.02, "w1": 0.02, "w2": 0.02})
    assert found.estimate.low > 0.015
    assert "gain 2.00%" in found.reason


def test_a_loss_is_kept_out_at_the_first_look() -> None:
    found = run(steady(-0.01))
    assert (found.decision, found.pairs) == ("keep", 4)


def test_noise_leaves_it_open() -> None:
    """Not to be mistaken for the proof that there is no gain."""
    found = run(steady(0.005, scatter=0.03))
    assert (found.decision, found.pairs, found.more) == ("inconclusive", 16, 0)
    assert found.estimate is not None
    assert found.estimate.low < 0 < found.estimate.required < found.estimate.high


def test_nothing_is_decided_between_looks() -> None:
    test = PairedTest(POLICY, ["w0"])
    assert (test.verdict().more, test.verdict().estimate) == (4, None)
    scattered = np.full(16, math.log1p(-0.003)) + np.tile([0.03, -0.03], 8)
    seen = []
    for pair in pairs_of(scattered[:, None]):
        found = test.add(pair)
        seen.append(found.more)
        assert found.decision == "inconclusive"
    assert seen == [3, 2, 1, 4, 3, 2, 1, 8, 7, 6, 5, 4, 3, 2, 1, 0]


def test_bounds_are_student_s() -> None:
    logs = np.random.default_rng(3).normal(-0.001, 0.01, (16, 5))
    found = run(logs)
    assert found.pairs == 16
    assert found.estimate is not None
    test = ttest_1samp(logs.mean(axis=1), 0)
    slow = test.confidence_interval(1 - 2 * found.level).high
    fast = test.confidence_interval(1 - 2 * POLICY.alpha).low
    assert found.estimate.low == pytest.approx(1 - math.exp(slow))
    assert found.estimate.high == pytest.approx(1 - math.exp(fast))
    assert found.estimate.error == pytest.approx(logs.mean(axis=1).std(ddof=1) / 4)


@pytest.mark.parametrize(
    ("gain", "champion_us", "decision"),
    [
        (0.0031, 100, "promote"),
        (0.0029, 100, "keep"),
        (0.0101, 2, "promote"),  # 20 ns are 1 % of 2 us
        (0.0099, 2, "keep"),
    ],
)
def test_a_gain_below_either_minimum_is_none(
    gain: float, champion_us: float, decision: str
) -> None:
    found = run(steady(gain, scatter=1e-6), champion_us=champion_us)
    assert found.decision == decision


def test_the_absolute_minimum_is_of_the_geometric_mean() -> None:
    test = PairedTest(POLICY, ["small", "large"])
    for i in range(4):
        log = -0.02 + 1e-5 * (-1) ** i
        test.add({"small": Ratio(log, 1.0), "large": Ratio(log, 100.0)})
    estimate = test.verdict().estimate
    assert estimate is not None
    assert estimate.required == pytest.approx(0.002 * 1.5, rel=1e-9)  # 0.3 %; 20 ns are 0.2 %
    small = PairedTest(policy(min_gain_us=0.2), ["small", "large"])
    small.add({"small": Ratio(0, 1.0), "large": Ratio(0, 100.0)})
    estimate = small.add({"small": Ratio(0, 1.0), "large": Ratio(0, 100.0)}).estimate
    assert estimate is not None
    assert estimate.required == pytest.approx(0.02)


def test_a_significant_gain_needs_more_evidence_at_a_lower_level() -> None:
    logs = steady(0.005, scatter=0.003)
    assert run(logs).pairs < run(logs, alpha=0.001).pairs
    assert run(logs, alpha=0.001).decision == "promote"
    # Giving up does not depend on it.
    assert run(steady(-0.002, 0.003), alpha=1e-6).pairs == run(steady(-0.002, 0.003)).pairs


def test_what_processes_keep_does_not_average_out() -> None:
    """1 % per workload is 0.5 % on the mean of 4, however many pairs there are."""
    logs = steady(0.008, scatter=1e-4, workloads=4)
    assert run(logs).decision == "promote"
    found = run(logs, policy(session_sd=0.01))
    assert found.decision == "inconclusive"
    assert found.estimate is not None
    assert found.estimate.low < 0
    assert run(steady(0.03, 1e-4, 4), policy(session_sd=0.01)).decision == "promote"


def test_measurements_without_scatter() -> None:
    assert run(steady(0.01, scatter=0)).decision == "promote"
    assert run(steady(0.0, scatter=0)).decision == "keep"
    assert run(np.zeros((4, 3))).decision == "keep"


def test_the_decision_is_the_end() -> None:
    test = PairedTest(POLICY, ["w0"])
    pairs = pairs_of(steady(0.02))
    for pair in pairs[:4]:
        test.add(pair)
    with pytest.raises(ValueError, match="decided after 4 pairs: promote"):
        test.add(pairs[4])
    with pytest.raises(ValueError, match="decided after 4 pairs: promote"):
        test.discard()
    assert test.verdict().pairs == 4


def test_too_many_discarded_pairs_are_no_win() -> None:
    """2 of 6 are above 30 % and wait for the next look; 7 of 23 would still be."""
    test = PairedTest(POLICY, ["w0"])
    pairs = pairs_of(steady(0.02))
    test.discard()
    test.discard()
    for pair in pairs[:4]:
        found = test.add(pair)
    assert (found.decision, found.more) == ("inconclusive", 4)
    for pair in pairs[4:8]:
        found = test.add(pair)
    assert (found.decision, found.pairs, found.discarded) == ("promote", 8, 2)

    test = PairedTest(POLICY, ["w0"])
    for _ in range(6):
        assert test.discard().more == 4
    found = test.discard()
    assert (found.decision, found.more) == ("inconclusive", 0)
    assert "discarded 7 of 7 pairs; at most 30%" in found.reason


@pytest.mark.parametrize("log", [math.nan, math.inf, -math.inf, 21.0])
def test_a_ratio_that_is_none_is_refused(log: float) -> None:
    test = PairedTest(POLICY, ["a", "b"])
    with pytest.raises(ValueError, match="workload b: expected the finite log ratio"):
        test.add({"a": Ratio(0.0, 1.0), "b": Ratio(log, 1.0)})
    assert test.verdict().pairs == 0


@pytest.mark.parametrize("us", [math.nan, math.inf, 0.0, -1.0])
def test_a_time_that_is_none_is_refused(us: float) -> None:
    with pytest.raises(ValueError, match="workload a: expected a positive, finite time"):
        PairedTest(POLICY, ["a"]).add({"a": Ratio(0.0, us)})


def test_a_pair_covers_exactly_the_workloads() -> None:
    with pytest.raises(ValueError, match=r"missing \['b'\], foreign \['c'\]"):
        PairedTest(POLICY, ["a", "b"]).add({"a": Ratio(0, 1), "c": Ratio(0, 1)})
    with pytest.raises(ValueError, match="missing"):
        PairedTest(POLICY, ["a"]).add({})
    for workloads in ([], ["a", "a"]):
        with pytest.raises(ValueError, match="expected workloads of different names"):
            PairedTest(POLICY, workloads)


def _logs(workloads: int, mean: float, scatter: float, seed: int) -> Any:
    return np.random.default_rng(seed).normal(mean, scatter, (16, workloads))


logs = st.builds(
    _logs,
    st.integers(1, 4),
    st.sampled_from([-0.02, -0.005, -0.003, 0.0, 0.005]),
    st.sampled_from([0.0, 1e-6, 0.002, 0.01, 0.1]),
    st.integers(0, 10**6),
)


@settings(max_examples=50, deadline=None)
@given(logs, st.sampled_from([0.5, 5.0, 500.0]), st.sampled_from([None, 1e-12, 0.01]))
def test_what_a_verdict_means(found: Any, us: float, alpha: float | None) -> None:
    verdict = run(found, champion_us=us, alpha=alpha)
    estimate = verdict.estimate
    assert verdict.more == 0
    assert verdict.pairs in POLICY.looks
    assert estimate is not None
    assert estimate.low <= estimate.gain <= estimate.high
    is_proven = estimate.low > 0 and estimate.gain >= estimate.required
    assert (verdict.decision == "promote") == is_proven
    assert (verdict.decision == "keep") == (estimate.high < estimate.required)
    if verdict.decision == "inconclusive":
        assert verdict.pairs == POLICY.looks[-1]
    assert Verdict.model_validate_json(verdict.canonical()) == verdict


@settings(max_examples=50, deadline=None)
@given(logs)
def test_never_both_ways(found: Any) -> None:
    assert [run(found).decision, run(-found).decision].count("promote") <= 1


@settings(max_examples=50, deadline=None)
@given(logs, st.randoms(use_true_random=False))
def test_the_order_of_workloads_does_not_matter(found: Any, shuffle: Any) -> None:
    verdict = run(found)
    order = list(range(len(found[0])))
    shuffle.shuffle(order)
    test = PairedTest(POLICY, [f"w{i}" for i in order])
    for pair in pairs_of(found)[: verdict.pairs]:
        test.add({f"w{i}": pair[f"w{i}"] for i in order})
    assert test.verdict() == verdict


# ---- control and confirmation -------------------------------------------------------------------


def test_an_untouched_group_shows_an_effect_or_none() -> None:
    quiet = control(POLICY, pairs_of(np.random.default_rng(1).normal(0, 0.004, (8, 6))))
    assert not quiet.is_disturbed
    for gain in (0.02, -0.02):
        found = control(POLICY, pairs_of(steady(gain, workloads=2)))
        assert found.is_disturbed
        assert f"gain {gain:.2%}" in found.reason
    # Significant, but less than a promotion needs; large, but not significant.
    assert not control(POLICY, pairs_of(steady(0.001, scatter=1e-5))).is_disturbed
    assert not control(POLICY, pairs_of(steady(0.02, scatter=0.5))).is_disturbed


def test_controls_are_disturbed_by_chance_as_often_as_alpha() -> None:
    draws = np.random.default_rng(2).normal(0, 0.01, (1000, 6, 2))
    rules = policy(min_gain=0.0, min_gain_us=0.0)
    disturbed = sum(control(rules, pairs_of(draw)).is_disturbed for draw in draws)
    assert lower_bound(disturbed, 1000, 0.999) < rules.alpha < upper_bound(disturbed, 1000, 0.999)


@pytest.mark.parametrize("pairs", [[], pairs_of([[0.0]]), [{}, {}]])
def test_a_control_needs_something(pairs: list[Pair]) -> None:
    with pytest.raises(ValueError, match="a control needs 2 pairs of blocks and a workload"):
        control(POLICY, pairs)


def test_a_control_takes_numbers() -> None:
    with pytest.raises(ValueError, match="expected the finite log ratio"):
        control(POLICY, pairs_of([[0.0], [math.nan]]))


def test_two_wins_are_a_confirmation() -> None:
    first = run(steady(0.03, workloads=4), session="a")
    second = run(steady(0.02, workloads=4), session="b")
    found = confirm(first, second, [control(POLICY, pairs_of(steady(0.0)))])
    assert found.decision == "promote"
    assert found.gain == pytest.approx(0.02)
    assert found.shrinkage == pytest.approx(0.01)
    assert found.low is not None
    assert 0 < found.low < 0.025
    assert json.loads(found.canonical())["decision"] == "promote"


@pytest.mark.parametrize(
    ("second", "decision"),
    [(steady(-0.01), "keep"), (steady(0.005, scatter=0.03), "inconclusive")],
)
def test_without_a_second_win_there_is_none(second: Any, decision: str) -> None:
    found = confirm(run(steady(0.03), session="a"), run(second, session="b"))
    assert found.decision == decision


def test_a_disturbed_control_leaves_it_open() -> None:
    first, second = (run(steady(0.03), session=name) for name in "ab")
    quiet, disturbed = (control(POLICY, pairs_of(steady(gain))) for gain in (0.0, 0.02))
    assert confirm(first, second, [quiet]).decision == "promote"
    found = confirm(first, second, [quiet, disturbed])
    assert (found.decision, found.reason) == ("inconclusive", disturbed.reason)
    # It is no reason to look for a win where there was none.
    lost = run(steady(-0.01), session="b")
    assert confirm(first, lost, [disturbed]).decision == "keep"


def test_runs_that_are_too_far_apart_leave_it_open() -> None:
    """Both are sure of themselves, and what their processes keep is as large as the gain."""
    first = run(steady(0.05, scatter=1e-4), session="a")
    second = run(steady(0.01, scatter=1e-4), session="b")
    assert (first.decision, second.decision) == ("promote", "promote")
    found = confirm(first, second)
    assert found.decision == "inconclusive"
    assert "too far apart" in found.reason
    # Twelve workloads that differ as much, each in its own way, say more.
    apart = 0.02 * np.resize([1, -1], 12)
    ones = np.array(steady(0.03, 1e-4, 12))
    assert confirm(
        run(ones + apart, session="a"), run(ones - apart, session="b")
    ).decision == "promote"  # fmt: skip


def test_the_joint_bound_of_one_workload_has_one_degree_of_freedom() -> None:
    first, second = (run(steady(g, 1e-6), session=f"{g}") for g in (0.03, 0.025))
    slow, fast = math.log(0.975), math.log(0.97)
    limit = (slow + fast) / 2 + student.ppf(0.95, 1) * (slow - fast) / 2
    assert confirm(first, second).low == pytest.approx(1 - math.exp(limit), rel=1e-3)


def test_runs_without_scatter_are_confirmed() -> None:
    first, second = (run(steady(0.03, scatter=0), session=name) for name in "ab")
    assert confirm(first, second).decision == "promote"


def test_a_guard_that_refused_all_of_the_second_run() -> None:
    test = PairedTest(POLICY, ["w0"], session="b")
    while test.verdict().more:
        test.discard()
    found = confirm(run(steady(0.03), session="a"), test.verdict())
    assert (found.decision, found.gain, found.low) == ("inconclusive", None, None)


def test_what_cannot_be_confirmed() -> None:
    won, also = (run(steady(0.03), session=name) for name in "ab")
    with pytest.raises(ValueError, match="nothing to confirm: the first run says keep"):
        confirm(run(steady(-0.01), session="a"), also)
    with pytest.raises(ValueError, match="fresh processes and data, got session 'a' twice"):
        confirm(won, won)
    with pytest.raises(ValueError, match="expected the same workloads"):
        confirm(won, run(steady(0.03, workloads=2), session="b"))
    with pytest.raises(ValueError, match="the second run is not decided"):
        confirm(won, PairedTest(POLICY, ["w0"], session="b").verdict())


# ---- the campaign's budget ----------------------------------------------------------------------


def test_a_budget_is_spread_over_what_is_planned() -> None:
    budget = Budget(alpha=0.05, planned=60)
    for i in range(60):
        budget = budget.reserve(f"c{i}").settle(f"c{i}", promoted=False)
    levels = list(budget.levels.values())
    assert levels[:58] == pytest.approx([0.05 * 0.95 / 60] * 58, rel=1e-3)
    assert sum(levels) < 0.05  # expected false promotions; 3 at the level of a single test
    unplanned = budget.reserve("more").levels["more"]
    assert 0 < unplanned < levels[-1]


def test_a_promotion_pays_for_further_tests() -> None:
    start = Budget(alpha=0.05, planned=10)
    reserved = start.reserve("a")
    assert start.levels == {}
    lost, won = (reserved.settle("a", promoted=outcome) for outcome in (False, True))
    assert won.wealth == pytest.approx(lost.wealth + 0.05)
    assert won.reserve("b").levels["b"] > lost.reserve("b").levels["b"]


def test_an_interrupted_comparison_gets_the_same_level_and_a_settled_one_none() -> None:
    budget = Budget(alpha=0.05, planned=10).reserve("a").reserve("b")
    again = Budget.model_validate_json(budget.canonical())
    assert again == budget
    assert again.reserve("a") == budget
    settled = again.settle("a", promoted=True)
    assert settled.settle("a", promoted=True) == settled
    with pytest.raises(ValueError, match="a is settled"):
        settled.reserve("a")
    with pytest.raises(ValueError, match="settled the other way"):
        settled.settle("a", promoted=False)
    with pytest.raises(ValueError, match="never reserved"):
        settled.settle("c", promoted=False)


@settings(max_examples=50, deadline=None)
@given(
    st.floats(0.001, 0.2),
    st.integers(1, 30),
    st.lists(st.sampled_from(["reserve", "lose", "win"]), max_size=60),
)
def test_the_wealth_lasts(alpha: float, planned: int, moves: list[str]) -> None:
    """Whatever is open at the same time; and without a promotion no more than alpha is risked."""
    budget = Budget(alpha=alpha, planned=planned)
    waiting: list[str] = []
    for i, move in enumerate(moves):
        if move == "reserve":
            budget = budget.reserve(f"c{i}")
            waiting.append(f"c{i}")
            assert 0 < budget.levels[f"c{i}"] <= alpha
        elif waiting:
            budget = budget.settle(waiting.pop(), promoted=move == "win")
        assert budget.wealth > 0
    if not any(budget.promoted.values()):
        assert sum(budget.levels.values()) <= alpha


def test_false_promotions_stay_a_share_of_all() -> None:
    """E[false] <= alpha (E[all] + 1 - alpha), with 1 in 5 candidates better."""
    rng = np.random.default_rng(11)
    campaigns, false, promotions = 200, 0, 0
    for _ in range(campaigns):
        budget = Budget(alpha=0.05, planned=40)
        is_better = rng.random(40) < 0.2
        p = norm.sf(rng.standard_normal(40) + 4 * is_better)
        for i in range(40):
            budget = budget.reserve(f"{i}")
            wins = bool(p[i] < budget.levels[f"{i}"])
            budget = budget.settle(f"{i}", promoted=wins)
            false += wins and not is_better[i]
            promotions += wins
    assert promotions > 0.8 * campaigns * 8
    allowed = 0.05 * (promotions + campaigns * 0.95)
    assert false < allowed
    assert false > 0.02 * campaigns  # the bound is not met by never being wrong


# ---- A/A runs -----------------------------------------------------------------------------------


def a_a_runs(noise: Noise, repeats: int, workloads: int, seed: int) -> list[list[Pair]]:
    rng = np.random.default_rng(seed)
    logs = stats._simulated(POLICY, noise, 0.0, workloads, repeats, rng)
    return [pairs_of(run) for run in logs]


def test_quiet_a_a_runs_prove_the_constants() -> None:
    found = calibrate(POLICY, a_a_runs(Noise(measurement=0.004, drift=0.001), 60, 4, seed=1))
    assert (found.state, found.promoted, found.rate) == ("hold", 0, 0)
    assert found.upper == pytest.approx(1 - 0.05 ** (1 / 60))
    assert found.session_sd < 0.002


def test_scatter_of_the_pairs_is_not_what_processes_keep() -> None:
    """Drift alone, whose mean over 16 pairs has a standard deviation of 0.5 %: over 8 workloads
    that would be taken for 1.4 % kept by each."""
    found = calibrate(POLICY, a_a_runs(Noise(measurement=0.002, drift=0.02), 100, 8, seed=6))
    assert found.session_sd < 0.009


def test_a_few_a_a_runs_prove_nothing() -> None:
    found = calibrate(POLICY, a_a_runs(Noise(), 10, 4, seed=2))
    assert found.state == "unproven"
    assert "of 10 A/A runs promoted" in found.reason


def test_what_processes_keep_is_found_and_then_allowed_for() -> None:
    runs = a_a_runs(Noise(process=0.02), 100, 4, seed=3)
    found = calibrate(POLICY, runs)
    assert found.state == "broken"
    assert found.session_sd == pytest.approx(0.02 * math.sqrt(2), rel=0.2)
    corrected = policy(session_sd=found.session_sd)
    again = calibrate(corrected, a_a_runs(Noise(process=0.02), 100, 4, seed=4))
    assert again.state != "broken"
    assert again.promoted <= 5


def test_what_a_process_keeps_of_all_workloads_alike_is_found() -> None:
    rng = np.random.default_rng(5)
    runs = rng.normal(0, 0.002, (60, 16, 8)) + rng.normal(0, 0.01, (60, 1, 1))
    found = calibrate(POLICY, [pairs_of(logs) for logs in runs])
    assert found.state == "broken"
    assert found.session_sd / math.sqrt(8) == pytest.approx(0.01, rel=0.3)  # on the mean
    again = calibrate(policy(session_sd=found.session_sd), [pairs_of(logs) for logs in runs])
    assert again.state != "broken"


def test_a_promotion_is_confirmed_by_the_run_after_or_not_at_all() -> None:
    none, gain = pairs_of(steady(0.0)), pairs_of(steady(0.03))
    alone = calibrate(POLICY, [none, gain, none, none])
    assert (alone.promoted, alone.confirmed) == (1, 0)
    twice = calibrate(POLICY, [none, gain, gain, none])
    assert (twice.promoted, twice.confirmed) == (2, 1)
    assert (calibrate(POLICY, [gain]).promoted, calibrate(POLICY, [gain]).confirmed) == (1, 0)
    assert "2 of 4 A/A runs promoted, 1 of them confirmed" in twice.reason


def test_a_calibration_needs_whole_runs() -> None:
    with pytest.raises(ValueError, match="at least one A/A run, got none"):
        calibrate(POLICY, [])
    whole = pairs_of(steady(0.0))
    with pytest.raises(ValueError, match="A/A run 1 has 15 pairs, expected 16"):
        calibrate(POLICY, [whole, whole[:15]])
    with pytest.raises(ValueError, match="expected the finite log ratio"):  # past the decision too
        calibrate(POLICY, [[*whole[:15], {"w0": Ratio(math.nan, 1.0)}]])


# ---- error rates, by simulation under the assumed noise -----------------------------------------


def rate_at_most(count: int, runs: int, limit: float) -> bool:
    return upper_bound(count, runs, 0.99) <= limit


def rate_at_least(count: int, runs: int, limit: float) -> bool:
    return lower_bound(count, runs, 0.99) >= limit


def test_one_test_under_the_assumed_noise() -> None:
    none, better, worse = (simulate(POLICY, Noise(), gain) for gain in (0.0, 0.02, -0.01))
    assert rate_at_most(none.promoted, none.runs, 0.05)
    assert rate_at_most(none.confirmed, none.runs, 0.005)
    assert none.kept > 0.75 * none.runs
    assert rate_at_least(better.confirmed, better.runs, 0.9)
    assert better.pairs < 4.5
    assert rate_at_most(worse.promoted, worse.runs, 0.002)
    assert worse.pairs < 4.5


@pytest.mark.parametrize("num_workloads", [1, 4])
@pytest.mark.parametrize("alpha", [0.05, 0.01])
def test_the_level_holds_without_a_minimum_gain(num_workloads: int, alpha: float) -> None:
    rules = policy(min_gain=0.0, min_gain_us=0.0)
    runs = 20_000
    found = simulate(rules, Noise(), 0.0, num_workloads=num_workloads, runs=runs, alpha=alpha)
    assert not rate_at_least(found.promoted, runs, alpha)
    assert not rate_at_most(found.promoted, runs, 0.7 * alpha)  # nor is it idle


def test_half_a_percent_is_found_where_fixed_thresholds_see_nothing() -> None:
    found = simulate(POLICY, Noise(), 0.005)
    assert rate_at_least(found.promoted, found.runs, 0.9)


def test_what_processes_keep_wins_tests_but_no_confirmation() -> None:
    """1 % per process and workload: the single test is fooled, two runs are not."""
    noise = Noise(process=0.01)
    none, better, worse = (simulate(POLICY, noise, gain) for gain in (0.0, 0.02, -0.01))
    assert rate_at_least(none.promoted, none.runs, 0.1)
    assert rate_at_most(none.confirmed, none.runs, 0.05)
    assert rate_at_least(better.confirmed, better.runs, 0.9)
    assert rate_at_most(worse.confirmed, worse.runs, 0.002)


def test_on_few_workloads_it_takes_the_distance_of_the_runs() -> None:
    """Two wins alone would come by chance in 10 % of all cases."""
    noise = Noise(process=0.01)
    none, better = (simulate(POLICY, noise, gain, num_workloads=4) for gain in (0.0, 0.02))
    assert rate_at_most(none.confirmed, none.runs, 0.06)
    assert rate_at_least(better.confirmed, better.runs, 0.9)


def test_with_the_calibrated_constant_the_single_test_holds_too() -> None:
    noise, rules = Noise(process=0.01), policy(session_sd=0.01 * math.sqrt(2))
    none, better = (simulate(rules, noise, gain) for gain in (0.0, 0.02))
    assert rate_at_most(none.promoted, none.runs, 0.05)
    assert rate_at_most(none.confirmed, none.runs, 0.002)
    assert rate_at_least(better.confirmed, better.runs, 0.9)


def test_at_the_levels_of_a_campaign_two_percent_is_still_found() -> None:
    level = Budget(alpha=POLICY.alpha, planned=60).reserve("a").levels["a"]
    for num_workloads in (4, 24):
        none, better = (
            simulate(POLICY, Noise(), gain, num_workloads=num_workloads, alpha=level)
            for gain in (0.0, 0.02)
        )
        assert rate_at_most(none.promoted, none.runs, 0.005)
        assert rate_at_most(none.confirmed, none.runs, 0.002)
        assert rate_at_least(better.confirmed, better.runs, 0.9)


@pytest.mark.parametrize("gain", [0.0, 0.01])
def test_the_simulation_decides_as_the_test_does(gain: float) -> None:
    noise, runs, num_workloads = Noise(process=0.005), 25, 3
    rules = policy(session_sd=0.005)
    rule = stats._Rule(rules, num_workloads, nominal_level(rules.looks, 0.02), rules.alpha)

    def both(seed: int, session: str) -> tuple[Any, list[Verdict]]:
        rng = np.random.default_rng(seed)
        logs = stats._simulated(rules, noise, gain, num_workloads, runs, rng)
        alike = [run(row, rules, session=session, alpha=0.02) for row in logs]
        return stats._outcomes(rule, logs, 100.0), alike

    (first, one), (second, two) = both(1, "a"), both(2, "b")
    assert [v.decision == "promote" for v in one] == first.promoted.tolist()
    assert [v.decision == "keep" for v in one] == first.kept.tolist()
    assert [v.pairs for v in one] == first.pairs.tolist()
    low = stats._joint_low(
        np.stack([first.logs, second.logs]),
        np.stack([first.error, second.error]),
        np.stack([first.pairs, second.pairs]),
        rules.alpha,
    )
    for i in np.flatnonzero(first.promoted):
        found = confirm(one[i], two[i])
        assert found.low == pytest.approx(low[i])
        assert (found.decision == "promote") == bool(second.promoted[i] and low[i] > 0)


# ---- aggregations -------------------------------------------------------------------------------


def test_aggregations_by_hand() -> None:
    found = aggregate({"a": 1.0, "b": 100.0, "c": 4.0}, {"a": 3.0, "b": 90.0, "c": 4.0})
    assert found.ratio_of_means == pytest.approx(97 / 105)
    assert found.mean_of_ratios == found.gated == pytest.approx((3 + 0.9 + 1) / 3)
    assert found.geomean == pytest.approx((3 * 0.9) ** (1 / 3))
    assert found.worst == "b"
    assert found.worst_ratio == pytest.approx(0.9)
    assert found.leave_one_out["mean_of_ratios"] == pytest.approx((0.95, 2.0))
    assert found.leave_one_out["ratio_of_means"] == pytest.approx((94 / 104, 7 / 5))
    assert found.leave_one_out["geomean"] == pytest.approx((0.9**0.5, 3**0.5))
    assert found.is_split  # slower by the ratio of means, faster by the others


def test_one_wrong_row_is_worth_nothing() -> None:
    found = aggregate({"a": 1, "b": 1}, {"a": 4, "b": 4}, wrong=["b"])
    assert (found.gated, found.mean_of_ratios) == (0, 4)
    with pytest.raises(ValueError, match=r"not among the workloads: \['c'\]"):
        aggregate({"a": 1}, {"a": 1}, wrong=["c"])


def test_one_workload_cannot_be_left_out() -> None:
    found = aggregate({"a": 2.0}, {"a": 3.0})
    assert found.leave_one_out == {}
    assert [getattr(found, by) for by in AGGREGATIONS] == pytest.approx([1.5] * 3)
    assert not found.is_split


times = st.floats(0.5, 2000)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(times, times), min_size=1, max_size=12), st.floats(0.1, 10))
def test_what_holds_for_all_aggregations(rows: list[tuple[float, float]], factor: float) -> None:
    ours = {f"w{i}": row[0] for i, row in enumerate(rows)}
    theirs = {f"w{i}": row[1] for i, row in enumerate(rows)}
    found, swapped = aggregate(ours, theirs), aggregate(theirs, ours)
    ratios = [b / a for a, b in rows]
    slack = 1 + 1e-9
    for by in AGGREGATIONS:
        value = getattr(found, by)
        assert min(ratios) / slack <= value <= max(ratios) * slack
        low, high = found.leave_one_out.get(by, (value, value))
        assert low / slack <= value <= high * slack
    assert found.worst_ratio == min(ratios)
    assert found.geomean <= found.mean_of_ratios * slack
    assert swapped.geomean == pytest.approx(1 / found.geomean)
    assert swapped.ratio_of_means == pytest.approx(1 / found.ratio_of_means)
    slower = aggregate({name: us * factor for name, us in ours.items()}, theirs)
    assert slower.geomean == pytest.approx(found.geomean / factor)


def test_winners_by_aggregation() -> None:
    theirs = {"a": 10.0, "b": 1000.0}
    small, large = {"a": 2.0, "b": 1000.0}, {"a": 10.0, "b": 800.0}
    assert winners({"small": small, "large": large}, theirs) == {
        "ratio_of_means": "large",
        "mean_of_ratios": "small",
        "geomean": "small",
    }
    assert set(winners({"first": small, "same": small}, theirs).values()) == {"first"}


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ({}, {}, "at least one workload, got none"),
        ({"a": 1.0}, {"a": 1.0, "b": 1.0}, r"theirs: expected times of the workloads \['a'\]"),
        (
            {"a": math.nan},
            {"a": 1.0},
            "ours, workload a: expected a positive, .* got nan",
        ),
        ({"a": 1.0}, {"a": math.inf}, "theirs, workload a: .* got inf"),
        ({"a": 0.0}, {"a": 1.0}, "ours, workload a: .* got 0.0"),
        ({"a": -1.0}, {"a": 1.0}, "ours, workload a: .* got -1.0"),
    ],
)
def test_rows_that_cannot_be_aggregated(ours: Any, theirs: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        aggregate(ours, theirs)


def test_no_candidate_wins_nothing() -> None:
    with pytest.raises(ValueError, match="at least one candidate, got none"):
        winners({}, {"a": 1.0})
