"""The search, with a fake measurement: noise, wrong numbers, crashes, hangs, and ends by signal.

Public reports about Optuna, by the issue that each test names. Not tested here, since not done
here: that a hung candidate and its children are killed (#1484: Optuna's timeout does not do it
either; `measure` does, here it only has to survive what comes back); that storage on a network disk
is refused (#820, #4994: the store opens the database first); that measurements on one GPU exclude
each other (#2286: the device's lock and the campaign's lease).
"""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
import random
import signal
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from sqlalchemy import text

from fastkernels import catalog
from fastkernels.core.device import DeviceInfo
from fastkernels.core.problem import ProblemKey
from fastkernels.core.route import ANY_DEVICE, Decline, Route
from fastkernels_tuner import search as searches
from fastkernels_tuner.errors import UnfitError
from fastkernels_tuner.model import (
    Block,
    Candidate,
    Cause,
    Evaluation,
    Failure,
    Policy,
    Regime,
    Trials,
    Workload,
    canonical,
)
from fastkernels_tuner.search import Outage, Search, SearchError, TakenOver, TrialResult, plan
from fastkernels_tuner.space import Space, configs, find_route, space_of
from fastkernels_tuner.store import Store, study_storage

OP = "gdn_decode"
SIZES = (1, 2, 4, 8, 16, 32, 64)
WORKLOADS = [
    Workload(op=OP, listed="gap", case={"name": f"b{size}", "batch_size": size}) for size in SIZES
]
REGIME = Regime(op=OP, mode="functional", constants={}, bounds={"batch_size": (1, 64)})
POLICY = Policy(
    name="test", timer="wall", is_promotable=False, max_trials=40, exhaustive_below=64,
    rungs=((1, 3), (3, 5), (7, 5)),
)  # fmt: skip


@dataclass(frozen=True)
class Tiles:
    tile: int = 8
    warps: int = 4
    mode: str = "plain"

    def __post_init__(self) -> None:
        if self.tile * self.warps > 64:
            raise ValueError(f"{self.tile} x {self.warps} does not fit")


@dataclass(frozen=True)
class NoKnobs:
    pass


def launch(*_: Any) -> None:
    raise AssertionError("a search launches nothing itself")


def supports(key: ProblemKey, device: DeviceInfo, config: Any) -> Decline | None:
    if config.mode == "wide" and key.axis("batch_size") < 2:
        return Decline("mode wide needs two rows")
    return None


SMALL = {"tile": (4, 8, 16, 32), "warps": (2, 4, 8)}
"""Nine of these twelve are legal."""
BIG = {"tile": (1, 2, 4, 8, 16, 32), "warps": (1, 2, 4, 8, 16), "mode": tuple("abcdef")}
"""24 of tile and warps are legal, times six modes and the default's."""


def offer(monkeypatch: pytest.MonkeyPatch, candidates: dict[str, Any], **options: Any) -> Space:
    """gdn_decode with a route of these candidates more, so that its cases serve."""
    route = Route("toy_tiles", "torch", ANY_DEVICE, Tiles(), launch, candidates, **options)
    bare = Route("toy_bare", "torch", ANY_DEVICE, NoKnobs(), launch)
    monkeypatch.undo()
    found = catalog.operator(OP)
    toy = dataclasses.replace(found, routes=(route, bare, found.safe_route))
    monkeypatch.setattr(catalog, "OPERATORS", (toy,))
    return space_of(route, OP)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Space:
    return offer(monkeypatch, SMALL)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Space:
    """Four configs: a database takes its time."""
    return offer(monkeypatch, {"tile": (8, 16), "warps": (2, 4)})


@pytest.fixture
def big(monkeypatch: pytest.MonkeyPatch) -> Space:
    return offer(monkeypatch, BIG)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Of a store; its path has what means something to Optuna, and nothing here."""
    with Store.open(str(tmp_path / "{tune} 1.db")) as store:
        return store.url


def pace(config: dict[str, Any], size: int) -> float:
    """True microseconds: the best are tile 16, warps 2, then 4 and 2."""
    away = abs(math.log2(config["tile"] / 16)) + 0.6 * abs(math.log2(config["warps"] / 2))
    return size * (1 + away / 4) * (1.3 if config["mode"] in "ace" else 1)


Outcome = Callable[[Candidate, Workload, int], Evaluation | None]


class Fake:
    """A measurement with noise of 1 %. `outcome` gives or raises something else where it likes."""

    def __init__(self, outcome: Outcome | None = None, *, noise: float = 0.01) -> None:
        self.outcome, self.noise = outcome, noise
        self.calls: list[tuple[dict[str, Any], int, int]] = []

    def __call__(self, candidate: Candidate, workload: Workload, iterations: int) -> Evaluation:
        size = workload.case["batch_size"]
        self.calls.append((candidate.config, size, iterations))
        special = self.outcome(candidate, workload, iterations) if self.outcome else None
        if special is not None:
            return special
        # Not by the candidate's id, in which the text of this file is.
        rng = random.Random(f"{canonical(candidate.config)}{workload.id}{iterations}")
        us = pace(candidate.config, size)
        times = [us * math.exp(rng.gauss(0, self.noise)) for _ in range(iterations)]
        return timed(candidate, workload, times)

    @property
    def configs(self) -> list[dict[str, Any]]:
        """The config of each trial that measured something, in order."""
        found: list[dict[str, Any]] = []
        for config, _, _ in self.calls:
            if config not in found[-1:]:
                found.append(config)
        return found


def timed(
    candidate: Candidate, workload: Workload, us: Sequence[float], discarded: str = ""
) -> Evaluation:
    block = Block(
        candidate=candidate.id, workload=workload.id, environment="here", lease=1, number=0,
        order=0, us=tuple(us), discarded=discarded,
    )  # fmt: skip
    return Evaluation(candidate=candidate.id, workload=workload.id, blocks=(block,))


def fails(candidate: Candidate, workload: Workload, cause: Cause) -> Evaluation:
    failure = Failure(cause=cause, message="as told", seed=3)
    return Evaluation(candidate=candidate.id, workload=workload.id, failure=failure)


def make(space: Space, url: str | None = None, **options: Any) -> Search:
    policy = POLICY.model_copy(update=options.pop("policy", {}))
    arguments = {"campaign": "c1", "regime": REGIME, "device": "cpu", "seed": 0, **options}
    return Search(url, space=space, policy=policy, **arguments)


def by_config(results: Sequence[TrialResult]) -> dict[str, TrialResult]:
    """The last result of each config."""
    ordered = sorted(results, key=lambda r: r.number)
    return {json.dumps(r.candidate.config): r for r in ordered}


def tiles(result: TrialResult) -> tuple[Any, Any]:
    return result.candidate.config["tile"], result.candidate.config["warps"]


def is_config(candidate: Candidate, tile: int, warps: int) -> bool:
    return (candidate.config["tile"], candidate.config["warps"]) == (tile, warps)


# ---- what is tried ------------------------------------------------------------------------------


def test_a_small_space_is_tried_completely_and_once(small: Space) -> None:
    """#4621: of 40 trials on a 12-point grid Optuna's sampler made 12 distinct ones."""
    fake = Fake()
    results = make(small).run(fake, WORKLOADS)
    assert len(results) == len(by_config(results)) == len(fake.configs) == small.size == 9
    assert fake.configs[0] == small.default
    assert tiles(results[0]) == (16, 2)
    assert results[0].state == "complete"


def test_a_large_space_is_searched_up_to_the_budget_without_repeats(big: Space) -> None:
    fake = Fake()
    results = make(big).run(fake, WORKLOADS)
    assert big.size == 24 * 7
    assert len(results) == len(by_config(results)) == 40
    assert fake.configs[0] == big.default
    assert tiles(results[0]) == (16, 2)
    # Pruning saves most calls, and leaves enough to choose finalists from.
    everything = len(results) * (3 + 3 * 5 + 7 * 5)
    assert sum(calls for _, _, calls in fake.calls) < everything / 2
    assert Counter(r.state for r in results)["complete"] >= POLICY.finalists


def test_a_space_that_the_budget_cannot_exhaust_is_sampled(small: Space) -> None:
    results = make(small, policy={"max_trials": 5}).run(Fake(), WORKLOADS)
    assert len(by_config(results)) == 5
    assert small.default in [r.candidate.config for r in results]


def test_sampling_beats_chance(big: Space) -> None:
    """The best of 24 of 168 configs at random is the 7th, on average."""
    true = sorted(pace(config, 1) for config in configs(big))
    ranks = []
    for seed in range(4):
        search = make(big, seed=seed, policy={"max_trials": 24, "rungs": ((1, 1),)})
        best = search.run(Fake(), WORKLOADS)[0]
        ranks.append(true.index(pace(best.candidate.config, 1)) + 1)
    assert statistics.mean(ranks) <= 4, ranks


def test_a_seed_fixes_the_order(big: Space) -> None:
    def order(seed: int) -> list[dict[str, Any]]:
        fake = Fake()
        make(big, seed=seed, policy={"max_trials": 12}).run(fake, WORKLOADS)
        return fake.configs

    assert order(1) == order(1) != order(2)


def test_a_route_without_knobs_is_one_trial(small: Space) -> None:
    space = space_of(find_route(OP, "toy_bare"), OP)
    search = make(space)

    def measure(candidate: Candidate, workload: Workload, iterations: int) -> Evaluation:
        return timed(candidate, workload, [2.0] * iterations)

    for _ in range(2):
        (only,) = search.run(measure, WORKLOADS)
        assert only.candidate.config == {}
        assert only.us == pytest.approx(2.0)
    assert search.importances() == {}


def test_configs_that_decline_a_workload_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    space = offer(monkeypatch, {"mode": ("plain", "wide")}, supports=supports)
    search = make(space)
    results = search.run(Fake(), WORKLOADS)
    assert [r.candidate.config["mode"] for r in results] == ["plain"]
    assert search.declined == {"mode wide needs two rows": 1}
    assert len(make(space).run(Fake(), WORKLOADS[1:])) == 2


def test_a_route_that_serves_nothing_here_has_no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    space = offer(monkeypatch, SMALL, available=lambda device, config: Decline("no library"))
    search = make(space)
    assert search.run(Fake(), WORKLOADS) == []
    assert search.declined == {"no library": 9}
    assert search.best is None


# ---- rungs --------------------------------------------------------------------------------------


def test_a_trial_climbs_the_rungs(small: Space) -> None:
    fake = Fake()
    (first,) = make(small, policy={"max_trials": 1}).run(fake, WORKLOADS)
    assert [(size, calls) for _, size, calls in fake.calls] == [
        (8, 3),
        *((size, 5) for size in (1, 8, 64)),
        *((size, 5) for size in SIZES),
    ]
    assert first.rungs == 3
    assert first.medians.keys() == {workload.id for workload in WORKLOADS}
    assert first.us == pytest.approx(statistics.geometric_mean(first.medians.values()))
    assert first.us == pytest.approx(
        statistics.geometric_mean(pace(small.default, size) for size in SIZES), rel=0.02
    )


def test_rungs_spread_over_the_sizes_whatever_the_order() -> None:
    shuffled = random.Random(1).sample(WORKLOADS, len(WORKLOADS))
    found = plan(shuffled, ((1, 5), (2, 6), (4, 7), (99, 8)))
    sizes = [([w.case["batch_size"] for w in level], calls) for level, calls in found]
    assert sizes == [([8], 5), ([1, 64], 6), ([1, 4, 16, 64], 7), (list(SIZES), 8)]
    assert [len(level) for level, _ in plan(WORKLOADS[:1], POLICY.rungs)] == [1, 1, 1]


def test_the_slow_are_pruned_early_and_near_ties_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    space = offer(monkeypatch, {"tile": tuple(range(1, 13))})
    slow = {"tile": 1.01}

    def outcome(candidate: Candidate, workload: Workload, iterations: int) -> Evaluation:
        factor = slow.get("tile", 1) if candidate.config["tile"] % 2 else 3.0
        return timed(candidate, workload, [factor if candidate.config["tile"] != 8 else 1.0])

    results = make(space).run(Fake(outcome), WORKLOADS)
    states = {r.candidate.config["tile"]: (r.state, r.rungs) for r in results}
    assert {states[tile] for tile in (1, 3, 5, 7, 8, 9, 11)} == {("complete", 3)}
    assert {states[tile] for tile in (2, 4, 6, 10, 12)} == {("pruned", 1)}
    assert results[0].candidate.config["tile"] == 8


def test_results_are_complete_then_pruned_then_failed(small: Space) -> None:
    def outcome(candidate: Candidate, workload: Workload, _: int) -> Evaluation | None:
        if is_config(candidate, 4, 8):
            return fails(candidate, workload, Cause.COMPILE)
        if is_config(candidate, 4, 4):
            return fails(candidate, workload, Cause.THROTTLED)
        return None

    results = make(small).run(Fake(outcome), WORKLOADS)
    states = [r.state for r in results]
    assert states == sorted(states, key=searches.STATES.index)
    assert set(states) == set(searches.STATES)
    for state in ("complete", "pruned"):
        keys = [(-r.rungs, r.us or 0.0) for r in results if r.state == state]
        assert keys == sorted(keys)


# ---- what is wrong is never best ----------------------------------------------------------------

NAN, INF = math.nan, math.inf

BAD: dict[str, tuple[Callable[[Candidate, Workload], Evaluation], str, Cause]] = {
    "wrong": (lambda c, w: fails(c, w, Cause.NUMERIC), "failed", Cause.NUMERIC),
    "killed-hang": (lambda c, w: fails(c, w, Cause.HANG), "failed", Cause.HANG),
    "crash": (lambda c, w: fails(c, w, Cause.CRASH), "failed", Cause.CRASH),
    "compile": (lambda c, w: fails(c, w, Cause.COMPILE), "failed", Cause.COMPILE),
    "gpu-lost": (lambda c, w: fails(c, w, Cause.GPU_LOST), "abandoned", Cause.GPU_LOST),
    "nan": (lambda c, w: timed(c, w, [NAN] * 5), "failed", Cause.UNCLASSIFIED),
    "one-nan": (lambda c, w: timed(c, w, [0.1, NAN, 0.1]), "failed", Cause.UNCLASSIFIED),
    "inf": (lambda c, w: timed(c, w, [INF]), "failed", Cause.UNCLASSIFIED),
    "one-minus-inf": (lambda c, w: timed(c, w, [0.1, -INF, 0.1]), "failed", Cause.UNCLASSIFIED),
    "zero": (lambda c, w: timed(c, w, [0.0, 0.1, 0.1]), "failed", Cause.UNCLASSIFIED),
    "negative": (lambda c, w: timed(c, w, [-1.0]), "failed", Cause.UNCLASSIFIED),
    "no-times": (lambda c, w: timed(c, w, []), "abandoned", Cause.HARNESS_BUG),
    "nothing": (
        lambda c, w: Evaluation(candidate=c.id, workload=w.id), "abandoned", Cause.HARNESS_BUG,
    ),
    "discarded": (lambda c, w: timed(c, w, [0.1], "hot"), "abandoned", Cause.THROTTLED),
    "somebody-else": (
        lambda c, w: timed(c.model_copy(update={"source": "x"}), w, [0.1]),
        "abandoned", Cause.HARNESS_BUG,
    ),
    "elsewhere": (
        lambda c, w: timed(c, w.with_seed(9), [0.1]), "abandoned", Cause.HARNESS_BUG,
    ),
    "wrong-but-timed": (
        lambda c, w: timed(c, w, [0.1]).model_copy(
            update={
                "trials": (
                    Trials(
                        stratum="s",
                        trials=2,
                        failures=(Failure(cause=Cause.DROPPED_ELEMENT, message="one"),),
                    ),
                )
            }
        ),
        "failed", Cause.DROPPED_ELEMENT,
    ),
    "times-out": (lambda c, w: throw(TimeoutError("60 s")), "failed", Cause.HANG),
    "pipe-breaks": (lambda c, w: throw(BrokenPipeError()), "failed", Cause.CRASH),
    "worker-ends": (lambda c, w: throw(EOFError()), "failed", Cause.CRASH),
    "memory": (lambda c, w: throw(MemoryError()), "failed", Cause.OUT_OF_MEMORY),
    "surprise": (lambda c, w: throw(RuntimeError("what?")), "failed", Cause.UNCLASSIFIED),
}  # fmt: skip


def throw(error: Exception) -> Evaluation:
    raise error


@pytest.mark.parametrize(
    ("name", "rung"), [*((name, 1) for name in BAD), ("wrong", 0), ("wrong", 2), ("gpu-lost", 2)]
)
def test_what_is_wrong_is_recorded_and_never_best(name: str, rung: int, small: Space) -> None:
    """The best config is fast as a dream up to a rung, and then bad. C124, #1484: the study goes
    on with the others."""
    bad, state, cause = BAD[name]

    def outcome(candidate: Candidate, workload: Workload, iterations: int) -> Evaluation | None:
        if not is_config(candidate, 16, 2):
            return None
        seen = sum(config == candidate.config for config, _, _ in fake.calls)
        if (seen - 1) % [1, 2, 5][rung] < [0, 1, 4][rung]:  # of each try the calls before the bad
            return timed(candidate, workload, [1e-6] * iterations)
        return bad(candidate, workload)

    fake = Fake(outcome)
    search = make(small)
    results = search.run(fake, WORKLOADS)
    assert search.best is not None
    assert tiles(search.best) == tiles(results[0]) == (16, 4)
    mine = [r for r in results if tiles(r) == (16, 2)]
    assert {(r.state, r.cause, r.rungs) for r in mine} == {(state, cause, rung)}
    assert len(mine) == (3 if state == "abandoned" else 1)  # a fault is retried twice
    assert all(r.failure and r.failure.workload and r.failure.message for r in mine)
    assert {tiles(r) for r in results if r.state in ("failed", "abandoned")} == {(16, 2)}
    assert search.study.best_trial.params == {"tile": 16, "warps": 4}


def test_a_wrong_config_prunes_nobody(small: Space) -> None:
    """Optuna's own successive halving would measure all against its first rung."""

    def outcome(candidate: Candidate, workload: Workload, iterations: int) -> Evaluation | None:
        if candidate.config != small.default:
            return None
        if iterations == 3:
            return timed(candidate, workload, [1e-6])
        return fails(candidate, workload, Cause.NUMERIC)

    results = make(small).run(Fake(outcome), WORKLOADS)
    assert by_config(results)[json.dumps(small.default)].state == "failed"
    assert tiles(results[0]) == (16, 2)
    assert results[0].state == "complete"


@pytest.mark.parametrize("seed", range(4))
def test_whatever_fails_the_best_is_the_best_of_the_right(seed: int, small: Space) -> None:
    rng = random.Random(seed)
    doomed: dict[str, str] = {}

    def outcome(candidate: Candidate, workload: Workload, _: int) -> Evaluation | None:
        name = doomed.setdefault(candidate.id, rng.choice(["", *BAD]))
        return BAD[name][0](candidate, workload) if name and rng.random() < 0.6 else None

    search, fake, results = make(small), Fake(outcome), list[TrialResult]()
    while not results:
        with suppress(Outage):  # by chance the machine may seem out of order
            results = search.run(fake, WORKLOADS)
    ended = by_config(results)
    right = [r for r in ended.values() if r.state == "complete"]
    assert len(ended) == 9
    assert not right or results[0].us == min(r.us for r in right if r.us)
    assert all(r.failure is None for r in right)


def test_a_fault_of_the_infrastructure_is_retried(small: Space) -> None:
    faults = iter([Cause.FOREIGN_PROCESS, Cause.ECC_XID])

    def outcome(candidate: Candidate, workload: Workload, _: int) -> Evaluation | None:
        cause = next(faults, None) if is_config(candidate, 16, 2) else None
        return fails(candidate, workload, cause) if cause else None

    results = make(small).run(Fake(outcome), WORKLOADS)
    mine = sorted((r for r in results if tiles(r) == (16, 2)), key=lambda r: r.number)
    assert [r.cause for r in mine] == [Cause.FOREIGN_PROCESS, Cause.ECC_XID, None]
    assert mine[-1] == results[0]
    assert mine[-1].state == "complete"


@pytest.mark.parametrize("good", [0, 20])
def test_fault_upon_fault_ends_the_search_and_counts_against_no_config(
    good: int, url: str, big: Space
) -> None:
    """The device is lost after so many calls, for good, and later it is back."""
    lost = True

    def outcome(candidate: Candidate, workload: Workload, _: int) -> Evaluation | None:
        is_lost = lost and len(fake.calls) > good
        return fails(candidate, workload, Cause.GPU_LOST) if is_lost else None

    fake = Fake(outcome)
    options: dict[str, Any] = {"policy": {"max_trials": 12}}
    heard: list[TrialResult] = []
    with pytest.raises(Outage, match=r"6 trials in a row.*gpu_lost: as told.*resume") as caught:
        make(big, url, **options).run(fake, WORKLOADS, progress=heard.append)
    assert caught.value.exit_code == 3
    assert [r.cause for r in heard[-6:]] == [Cause.GPU_LOST] * 6
    learnt = [r for r in heard if r.state in searches.SETTLED]
    assert bool(learnt) == bool(good)
    assert len(heard) == len(learnt) + 6
    with pytest.raises(Outage, match="6 trials in a row"):  # it was resumed too soon
        make(big, url, **options).run(fake, WORKLOADS)
    lost = False
    results = make(big, url, **options).run(fake, WORKLOADS)
    assert Counter(r.state == "abandoned" for r in results) == {True: 12, False: 12}
    ended = by_config(results)
    assert ended[json.dumps(big.default)].state in ("complete", "pruned")
    assert len([r for r in ended.values() if r.state != "abandoned"]) == 12


def test_faults_are_the_configs_own_where_others_can_be_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space = offer(monkeypatch, {"tile": tuple(range(1, 13))})
    controls = []

    def outcome(candidate: Candidate, workload: Workload, _: int) -> Evaluation | None:
        if candidate.config == space.default:
            controls.append(workload)
            return None
        return fails(candidate, workload, Cause.HARNESS_BUG)

    results = make(space).run(Fake(outcome), WORKLOADS)
    assert Counter(r.state for r in results) == {"complete": 1, "abandoned": 3 * 11}
    assert len(controls) == 1 + 3 + 7 + 33 // 6


def test_a_study_of_faults_alone_concludes_nothing(small: Space) -> None:
    space, is_lost = space_of(find_route(OP, "toy_bare"), OP), True

    def measure(candidate: Candidate, workload: Workload, _: int) -> Evaluation:
        if is_lost:
            return fails(candidate, workload, Cause.NODE_LOST)
        return timed(candidate, workload, [2.0])

    search = make(space)
    with pytest.raises(Outage, match="3 trials in a row"):
        search.run(measure, WORKLOADS)
    is_lost = False
    assert [r.state for r in search.run(measure, WORKLOADS)] == ["complete"] + ["abandoned"] * 3


# ---- what is known before -----------------------------------------------------------------------


def test_known_configs_are_tried_first(big: Space) -> None:
    known = [
        {"tile": 16, "warps": 2, "mode": "b"},
        {"tile": 16, "warps": 4},  # mode as in the default
        {"tile": 16, "warps": 2, "mode": "b"},
        big.default,
    ]
    fake = Fake()
    results = make(big, known=known, policy={"max_trials": 6}).run(fake, WORKLOADS)
    assert fake.configs[:3] == [big.default, known[0], {"tile": 16, "warps": 4, "mode": "plain"}]
    origins = [r.origin for r in sorted(results, key=lambda r: r.number)]
    assert origins == ["default", "known", "known", "sampled", "sampled", "sampled"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"tile": 64}, "64 x 4 does not fit"),
        ({"tile": 5}, "knob 'tile' is 5, expected one of"),
        ({"tile": 16.0}, "expected int"),
        ({"stages": 2}, "no knob 'stages'"),
    ],
)
def test_what_is_not_of_the_space_is_refused_before_the_study(
    config: dict[str, Any], reason: str, small: Space
) -> None:
    """#4002: enqueued values outside the choices were tried all the same."""
    search = make(small, known=[config, {"tile": 4}])
    assert [c for c, _ in search.refused] == [config]
    assert reason in search.refused[0][1]
    results = search.run(Fake(), WORKLOADS)
    assert Counter(r.origin for r in results) == {"default": 1, "known": 1, "sampled": 7}


def test_what_is_queued_twice_is_measured_once(small: Space) -> None:
    """#4002: two processes may queue the same before either measures it."""
    search = make(small)
    for _ in range(2):
        search.study.enqueue_trial(
            {"tile": 8, "warps": 4}, user_attrs={"config": small.default, "origin": "default"}
        )
    fake = Fake()
    results = search.run(fake, WORKLOADS, stop=lambda: len(search.study.trials) > 2)
    assert fake.configs == [small.default]
    assert [r.origin for r in results if r.state == "complete"] == ["default"]
    assert search.study.trials[1].user_attrs["is_duplicate"]


# ---- ends and resumes ---------------------------------------------------------------------------


def test_a_study_resumes_and_counts_its_trials_once(url: str, tiny: Space) -> None:
    """#2286, #1883: `n_trials` of a resumed Optuna study are so many more."""
    first = make(tiny, url, policy={"max_trials": 2}).run(Fake(), WORKLOADS)
    assert len(first) == 2
    fake = Fake()
    assert make(tiny, url, policy={"max_trials": 2}).run(fake, WORKLOADS) == first
    assert fake.calls == []
    results = make(tiny, url).run(fake, WORKLOADS)
    assert len(by_config(results)) == len(results) == 4
    assert len(fake.configs) == 2


def test_stop_ends_within_a_trial(small: Space) -> None:
    fake = Fake()
    search = make(small)
    heard: list[TrialResult] = []
    search.run(fake, WORKLOADS, stop=lambda: len(fake.calls) >= 4, progress=heard.append)
    assert len(fake.calls) == 4
    assert [(r.state, r.failure) for r in heard] == [("abandoned", None)]
    results = search.run(fake, WORKLOADS)
    assert fake.configs[0] == small.default
    assert Counter(r.state for r in results)["abandoned"] == 1
    assert len(by_config(results)) == 9
    assert all(r.state != "abandoned" for r in by_config(results).values())


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, UnfitError])
def test_an_interruption_leaves_a_study_that_resumes(
    error: type[BaseException], small: Space
) -> None:
    """#485, #913: after Ctrl-C trials stayed RUNNING."""

    def outcome(*_: Any) -> None:
        if len(fake.calls) % 15 == 8:
            raise error

    fake = Fake(outcome)
    search = make(small)
    interruptions = 0
    results: list[TrialResult] = []
    while not results:
        try:
            results = search.run(fake, WORKLOADS)
        except error:
            interruptions += 1
            states = {trial.state for trial in search.study.get_trials(deepcopy=False)}
            assert TrialState.RUNNING not in states
    assert interruptions > 1
    assert Counter(r.state for r in results)["abandoned"] == interruptions
    ended = by_config(results)
    assert len(ended) == 9
    assert all(r.state in ("complete", "pruned") for r in ended.values())
    assert tiles(results[0]) == (16, 2)


def fork(target: Callable[..., None], *args: Any) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    return process


def killed_after(url: str, space: Space, calls: int) -> None:
    def outcome(*_: Any) -> None:
        if len(fake.calls) == calls:
            os.kill(os.getpid(), signal.SIGKILL)

    fake = Fake(outcome)
    make(space, url).run(fake, WORKLOADS)


def test_a_killed_search_resumes_without_its_ghosts(url: str, tiny: Space) -> None:
    """#913, #3215: a killed trial is RUNNING for ever."""
    child = fork(killed_after, url, tiny, 15)
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    search = make(tiny, url)
    (ghost,) = search.study.get_trials(states=(TrialState.RUNNING,))
    kept = [json.dumps(r.candidate.config) for r in search.results()]
    assert kept
    fake = Fake()
    results = search.run(fake, WORKLOADS)
    assert not set(kept) & set(map(json.dumps, fake.configs))  # nothing twice
    assert ghost.user_attrs["config"] == fake.configs[0]  # nothing lost
    assert [r.cause for r in results if r.state == "abandoned"] == [Cause.NODE_LOST]
    assert len(by_config(results)) == 4
    assert all(r.state in ("complete", "pruned") for r in by_config(results).values())
    assert tiles(results[0]) == (16, 2)


def killed_by(url: str, space: Space) -> None:
    def outcome(candidate: Candidate, *_: Any) -> None:
        if is_config(candidate, 8, 8):
            os.kill(os.getpid(), signal.SIGKILL)

    make(space, url).run(Fake(outcome), WORKLOADS)


def test_a_config_that_kills_the_search_is_given_up(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = offer(monkeypatch, {"warps": (4, 8)})
    codes = []
    for _ in range(4):
        child = fork(killed_by, url, space)
        child.join(60)
        codes.append(child.exitcode)
    assert codes == [-signal.SIGKILL] * 3 + [0]
    states = Counter((r.candidate.config["warps"], r.state) for r in make(space, url).results())
    assert states == {(4, "complete"): 1, (8, "abandoned"): 3}


@pytest.fixture
def neighbour() -> Iterator[int]:
    """The id of another living process."""
    child = multiprocessing.get_context("fork").Process(target=signal.pause)
    child.start()
    yield child.pid or 0
    child.kill()
    child.join()


def running(search: Search, config: dict[str, Any], **owner: Any) -> optuna.Trial:
    trial = search.study.ask({})
    for name, value in {"config": config, **({"owner": owner} if owner else {})}.items():
        trial.set_user_attr(name, value)
    return trial


def test_only_trials_of_the_dead_are_ended(small: Space, neighbour: int) -> None:
    search = make(small)
    host = searches._owner()["host"]
    started = searches._started(neighbour)
    assert started
    tried = [{"tile": 4, "warps": warps, "mode": "plain"} for warps in (2, 4, 8)]
    owners = [
        {"host": host, "pid": neighbour, "started": started},
        {"host": host, "pid": neighbour, "started": started + "0"},  # its number had another before
        {"host": "elsewhere", "pid": neighbour, "started": started},  # left to the heartbeat
    ]
    for config, owner in zip(tried, owners, strict=True):
        running(search, config, **owner)
    running(search, tried[0])  # it has not said yet who it is
    fake = Fake()
    search.run(fake, WORKLOADS)
    assert tried[1] in fake.configs
    assert tried[0] not in fake.configs
    assert tried[2] not in fake.configs
    states = [trial.state for trial in search.study.trials[:4]]
    assert states == [TrialState.RUNNING, TrialState.FAIL, TrialState.RUNNING, TrialState.RUNNING]


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")  # this test beats by hand
@pytest.mark.parametrize("minutes", [0, 2])
def test_a_trial_of_another_machine_lives_by_its_heartbeat(
    minutes: int, url: str, tiny: Space
) -> None:
    search = make(tiny, url)
    trial = running(search, tiny.default, host="elsewhere", pid=1, started="1")
    storage = searches._storage(url, os.getpid())
    storage.record_heartbeat(trial._trial_id)
    with storage.engine.begin() as connection:
        past = datetime.now(timezone.utc) - timedelta(minutes=minutes)
        connection.execute(
            text("UPDATE trial_heartbeats SET heartbeat = :past"),
            {"past": past.strftime("%Y-%m-%d %H:%M:%S.%f")},
        )
    fake = Fake()
    results = search.run(fake, WORKLOADS)
    assert (tiny.default in fake.configs) == (minutes == 2)
    causes = [r.cause for r in results if r.state == "abandoned"]
    assert causes == [Cause.NODE_LOST] * (minutes == 2)


def test_a_trial_that_never_said_whose_it_is_ends_later(
    small: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = make(small)
    search.study.ask({})

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(seconds=61)

    monkeypatch.setattr(searches, "datetime", Later)
    search.run(Fake(), WORKLOADS, stop=lambda: True)
    assert search.study.trials[0].state == TrialState.FAIL
    assert search.results() == []  # nobody knows what it was about to try


def test_a_process_that_was_taken_over_ends(url: str, tiny: Space) -> None:
    """It slept too long, and another one ended its trial."""

    def outcome(*_: Any) -> None:
        if len(fake.calls) == 3:
            other = make(tiny, url).study
            (mine,) = other.get_trials(states=(TrialState.RUNNING,))
            other.tell(mine.number, state=TrialState.FAIL)

    fake = Fake(outcome)
    search = make(tiny, url)
    with pytest.raises(TakenOver) as caught:
        search.run(fake, WORKLOADS)
    assert caught.value.exit_code == 130
    assert len(by_config(search.run(Fake(), WORKLOADS))) == 4


def work(url: str, space: Space, seed: int, calls: Any) -> None:
    fake = Fake()
    make(space, url, seed=seed, policy={"rungs": ((1, 1),)}).run(fake, WORKLOADS)
    calls.put([json.dumps(config) for config in fake.configs])


def test_several_processes_share_one_study(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """#820, #5125: "database is locked", initialisation twice, trials updated twice."""
    space = offer(monkeypatch, {"tile": tuple(range(1, 11))})
    # The parent creates the storage, once.
    search = make(space, url, policy={"rungs": ((1, 1),)})
    calls = multiprocessing.get_context("fork").SimpleQueue()
    children = [fork(work, url, space, seed, calls) for seed in range(3)]
    for child in children:  # what they put fits into a pipe
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 3
    tried = [config for _ in children for config in calls.get()]
    results = search.results()
    assert {r.state for r in results} == {"complete"}
    assert len(by_config(results)) == 10  # nothing lost
    # Two may be given one enqueued config at the same moment: both try it, one result stands.
    assert set(tried) == {json.dumps(r.candidate.config) for r in results}
    assert len(tried) >= len(results)
    assert len(results) <= 12  # two may begin with the same config at the same moment


def test_studies_lie_in_the_store(url: str, tiny: Space) -> None:
    make(tiny, url)
    assert optuna.get_all_study_names(study_storage(url)) == [make(tiny).name]
    with searches._storage(url, os.getpid()).engine.connect() as connection:
        pragmas = [
            connection.execute(text(f"PRAGMA {name}")).scalar()
            for name in ("journal_mode", "synchronous", "busy_timeout")
        ]
    assert pragmas == ["wal", 1, 30_000]


# ---- versions of a space ------------------------------------------------------------------------


def test_a_widened_space_resumes(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """#2328, #2199, #372: Optuna refuses a study whose choices have changed."""
    narrow = offer(monkeypatch, {"tile": (4, 8)})

    def outcome(candidate: Candidate, workload: Workload, _: int) -> Evaluation | None:
        return fails(candidate, workload, Cause.NUMERIC) if is_config(candidate, 4, 4) else None

    old = make(narrow, url)
    before = by_config(old.run(Fake(outcome), WORKLOADS))
    wide = offer(monkeypatch, {"tile": (4, 8), "warps": (2, 4)})
    fake = Fake()
    new = make(wide, url)
    assert new.name != old.name
    results = new.run(fake, WORKLOADS)
    after = by_config(results)
    assert len(before) == 2
    assert len(after) == len(results) == 4
    for config, result in before.items():
        assert after[config].origin == "imported"
        kept = {"state", "us", "medians", "failure", "duration_s", "candidate", "rungs"}
        assert after[config].model_dump(include=kept) == result.model_dump(include=kept)
    assert len(fake.configs) == 2  # what was measured is not measured again, not even if wrong
    assert tiles(results[0]) == (8, 2)
    assert by_config(make(wide, url).run(fake, WORKLOADS)).keys() == after.keys()
    # And back to another one: only what is of that space.
    back = make(offer(monkeypatch, {"warps": (2, 4)}), url)
    assert len(by_config(back.run(fake, WORKLOADS))) == 2
    assert len(fake.configs) == 2


def test_imports_leave_the_budget_to_what_is_new(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"policy": {"max_trials": 2, "rungs": ((1, 1),)}}
    make(offer(monkeypatch, {"tile": (4, 8)}), url, **options).run(Fake(), WORKLOADS)
    fake = Fake()
    make(offer(monkeypatch, SMALL), url, **options).run(fake, WORKLOADS)
    assert len(fake.configs) == 2


@pytest.mark.parametrize("change", ["source", "rungs", "environment"])
def test_where_times_do_not_compare_the_best_are_measured_anew(
    change: str, url: str, big: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"policy": {"max_trials": 2, "finalists": 1, "rungs": ((1, 1),)}}
    fast = {"tile": 16, "warps": 2, "mode": "b"}
    first = make(big, url, known=[fast], **options).run(Fake(), WORKLOADS)
    assert [r.candidate.config for r in first] == [fast, big.default]
    if change == "source":
        monkeypatch.setattr(searches, "source_digest", lambda op, route: "edited")
    elif change == "rungs":
        options["policy"] |= {"rungs": ((2, 4),)}
    else:
        options["environment"] = "another GPU"
    make(big, url, **options)  # ends before it ran; what is known stays known
    fake = Fake()
    results = make(big, url, **options).run(fake, WORKLOADS)
    assert fake.configs == [big.default, fast]
    assert sorted(r.origin for r in results) == ["default", "known"]


def test_regimes_devices_and_campaigns_have_studies_of_their_own(url: str, small: Space) -> None:
    other = REGIME.model_copy(update={"bounds": {"batch_size": (65, 128)}})
    options: list[dict[str, Any]] = [{}, {"regime": other}, {"campaign": "c2"}]
    searched = [make(small, url, policy={"max_trials": 1}, **each) for each in options]
    assert len({search.name for search in searched}) == 3
    searched[0].run(Fake(), WORKLOADS)
    assert len(searched[0].results()) == 1
    assert searched[1].results() == searched[2].results() == []
    assert make(small, device="cuda:0").name != make(small).name


def test_a_long_name_of_a_regime_is_no_long_name_of_a_study(small: Space) -> None:
    wordy = REGIME.model_copy(update={"constants": {f"constant_{i}": i for i in range(50)}})
    search = make(small, regime=wordy)
    assert len(search.name) < 200
    assert search.study.user_attrs["regime"] == str(wordy)


def test_a_study_is_of_one_set_of_workloads(small: Space) -> None:
    search = make(small, policy={"max_trials": 1})
    search.run(Fake(), WORKLOADS)
    with pytest.raises(SearchError, match="begun on other workloads"):
        search.run(Fake(), WORKLOADS[:3])
    assert len(search.run(Fake(), WORKLOADS[::-1], stop=lambda: True)) == 1  # the same, reordered


def test_workloads_are_needed_and_of_the_operator(small: Space) -> None:
    with pytest.raises(SearchError, match="at least one workload"):
        make(small).run(Fake(), [])
    stranger = Workload(op="gdn_prefill", listed="gap", case={"name": "x", "lengths": (3,)})
    with pytest.raises(SearchError, match="of gdn_prefill, not of gdn_decode"):
        make(small).run(Fake(), [*WORKLOADS, stranger])


# ---- what is told -------------------------------------------------------------------------------


def test_progress_hears_every_trial_once(small: Space) -> None:
    heard: list[TrialResult] = []
    results = make(small).run(Fake(), WORKLOADS, progress=heard.append)
    assert sorted(heard, key=lambda r: r.number) == sorted(results, key=lambda r: r.number)
    assert all(r.duration_s >= 0 for r in results)
    assert [TrialResult(**r.model_dump(mode="json")) for r in results] == results


def test_importances_name_the_knob_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    space = offer(monkeypatch, {"tile": (1, 2, 4, 8), "mode": tuple("abcd")})

    def outcome(candidate: Candidate, workload: Workload, iterations: int) -> Evaluation:
        rng = random.Random(f"{canonical(candidate.config)}{workload.id}")
        return timed(candidate, workload, [int(candidate.config["tile"]) * rng.uniform(1, 1.1)])

    search = make(space)
    search.run(Fake(outcome), WORKLOADS)
    found = search.importances()
    assert list(found) == ["tile", "mode"]
    assert sum(found.values()) == pytest.approx(1)
    assert found["tile"] > 0.7


def test_importances_of_a_tiny_or_flat_study_are_empty(small: Space) -> None:
    search = make(small, policy={"max_trials": 4})
    assert search.importances() == {}
    search.run(Fake(), WORKLOADS)
    assert search.importances() == {}
    flat = make(small)
    flat.run(Fake(lambda c, w, n: timed(c, w, [1.0])), WORKLOADS)
    assert flat.importances() == {}


def test_optuna_is_quiet(url: str, tiny: Space, capfd: pytest.CaptureFixture[str]) -> None:
    def outcome(candidate: Candidate, workload: Workload, _: int) -> Evaluation | None:
        return fails(candidate, workload, Cause.CRASH) if is_config(candidate, 8, 2) else None

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(tiny, url).run(Fake(outcome), WORKLOADS)
        search = make(tiny)
        search.run(Fake(outcome), WORKLOADS)
        search.importances()
    assert capfd.readouterr() == ("", "")
