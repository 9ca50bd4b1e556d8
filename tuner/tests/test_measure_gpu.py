"""The bench on a GPU: memory lent between processes, kernel times, candidates that spoil a device.

Needs nothing built: the torch route is a candidate; compiled ones are where they are available.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fastkernels import catalog
from fastkernels.core import dispatch
from fastkernels.core.device import device_info
from fastkernels.core.problem import key_from_axes
from fastkernels.core.route import Route
from fastkernels.testing import cupti, workloads
from fastkernels_tuner.measure import Bench, TimerMissing, broker
from fastkernels_tuner.model import Candidate, Cause, Evaluation, Policy, Workload
from fastkernels_tuner.space import candidate as make_candidate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

FAULTS = Path(__file__).with_name("faults.py")
POLICY = Policy(name="test", timer="cupti", is_promotable=True, trial_timeout_s=120.0)
OPERATOR = catalog.operator("gdn_decode")
DEVICE = torch.device("cuda:0")


def decode(batch_size: int, **fields: Any) -> Workload:
    case = {"name": f"b{batch_size}", "batch_size": batch_size, **fields}
    return Workload(op="gdn_decode", listed="serving", case=case)


SMALL = decode(8)


def candidate(route: str) -> Candidate:
    return Candidate(op="gdn_decode", route=route, config={}, source="s")


SAFE = candidate("torch_recurrent")
HONEST = candidate("honest")


def available() -> list[Route]:
    """Routes that this installation serves on this GPU, the safe one first."""
    key = key_from_axes(OPERATOR.spec, {"batch_size": 8}, device_info(DEVICE), "functional")
    found = [r for r in OPERATOR.routes if r.declines(key, r.default_config) is None]
    return found[::-1]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench("cuda:0", POLICY, seed=1, routes=str(FAULTS), code="commit") as made:
        yield made


def show(found: Evaluation) -> str:
    blocks = [(statistics.median(b.us), b.kernels, b.guard, b.discarded) for b in found.blocks]
    return f"{found.failure} {found.attempts} {blocks}"


def test_the_environment(bench: Bench) -> None:
    found = bench.environment
    assert found.timer == "cupti"
    assert found.uuid.startswith("GPU-")
    assert found.device == torch.cuda.get_device_name(DEVICE)
    assert found.driver not in ("", "unknown")
    assert found.versions["cupti-python"]


@pytest.mark.parametrize("mode", ["functional", "inplace", "pool"])
def test_every_route_is_judged_and_timed(bench: Bench, mode: str) -> None:
    for route in available():
        chosen = make_candidate("gdn_decode", route.name, _knobs(route))
        for batch_size in (1, 64):
            workload = decode(batch_size, mode=mode)
            found = bench.evaluate(chosen, workload, iterations=10, trials=2)
            print(f"{route.name} {workload} {mode}: {show(found)}")
            assert found.failure is None, show(found)
            block = next(block for block in found.blocks if not block.discarded)
            assert len(block.us) == len(block.span_us) == 10
            assert block.kernels >= 1
            assert all(0.5 < us < 1e5 for us in block.us)
            # Two clocks' readings of one thing; with one kernel they are one number.
            assert all(us <= span + 0.01 for us, span in zip(block.us, block.span_us, strict=True))
            assert block.guard["source"] in ("nvml", "nvidia-smi", "none")
            assert block.guard["contents"] >= 10  # fresh for every call
            assert found.trials[0].trials == 6


def _knobs(route: Route) -> dict[str, Any]:
    return dict(vars(route.default_config))


def test_times_are_those_of_one_process(bench: Bench) -> None:
    """The same route timed in this process by the shared module."""
    route = available()[-1]
    workload = decode(64)
    chosen = make_candidate("gdn_decode", route.name, _knobs(route))
    found = bench.evaluate(chosen, workload, iterations=30, trials=1)
    assert found.failure is None, show(found)
    ours = statistics.median(found.blocks[-1].us)
    work, case = workloads.load("gdn_decode"), workload.build()
    inputs = work.fresh_inputs(case, 3, DEVICE)
    out = work.outputs(inputs)

    def call() -> None:
        with dispatch.force_route(OPERATOR, route.name, route.default_config):
            OPERATOR.function(**inputs._asdict(), out=out)

    with cupti.recording(DEVICE) as recorder:
        timings, errors = cupti.measure({"here": cupti.Variant([call])}, recorder)
    assert not errors
    print(f"{route.name}: {ours:.3f} us by the bench, {timings['here'].us.median:.3f} us here")
    assert ours == pytest.approx(timings["here"].us.median, rel=0.08, abs=0.3)
    assert found.blocks[-1].kernels == timings["here"].kernels


@pytest.mark.parametrize("op", ["gdn_prefill", "dsa_sparse_attention"])
def test_operators_that_are_judged_on_the_cpu(bench: Bench, op: str) -> None:
    inputs = catalog.module(op, "inputs")
    case = dict(vars(inputs.CORRECTNESS[0]))
    safe = catalog.operator(op).safe_route
    chosen = make_candidate(op, safe.name, _knobs(safe))
    workload = Workload(op=op, listed="correctness", case=case)
    found = bench.evaluate(chosen, workload, iterations=3, trials=1)
    assert found.failure is None, show(found)


@pytest.mark.parametrize("name", ["huge_state", "decay_near_1"])
def test_adversarial_inputs(bench: Bench, name: str) -> None:
    workload = Workload(op="gdn_decode", listed="adversarial", case={"name": name, "seed": 0})
    found = bench.judge(SAFE, workload, [1, 2, 3])
    assert (found.trials, found.failures) == (3, ())


def test_calls_are_judged_several_at_a_time(bench: Bench) -> None:
    """Of adversarial strata and of workloads, on pools, too."""
    for name in ("huge_state", "pool"):
        workload = Workload(op="gdn_decode", listed="adversarial", case={"name": name, "seed": 0})
        found = bench.judge(SAFE, workload, range(20))
        assert (found.trials, found.failures) == (20, ())
    for workload in (SMALL, decode(256), decode(8, mode="pool")):
        found = bench.judge(SAFE, workload, range(20))
        assert (found.trials, found.failures) == (20, ())


@pytest.mark.parametrize(
    ("route", "cause"),
    [
        ("third_is_wrong", Cause.NUMERIC),
        ("third_drops", Cause.DROPPED_ELEMENT),
        ("third_raises", Cause.UNCLASSIFIED),
        ("third_asserts", Cause.CRASH),
        ("third_crashes", Cause.CRASH),
    ],
)
def test_the_call_that_fails_among_others_is_found(bench: Bench, route: str, cause: Cause) -> None:
    """With the verdicts before it, also where the device's context went with it."""
    bench.renew()  # calls are counted by process
    found = bench.judge(candidate(route), SMALL, [31, 7, 99, 4, 12, 50, 2, 1])
    assert [(f.cause, f.seed) for f in found.failures] == [(cause, 99)]
    assert found.trials == 3
    assert bench.judge(HONEST, SMALL, range(8)).failures == ()


WRONG = [
    ("wrong", Cause.NUMERIC),
    ("later_wrong", Cause.NUMERIC),
    ("nonfinite", Cause.NONFINITE),
    ("drops_an_element", Cause.DROPPED_ELEMENT),
    ("idles", Cause.DROPPED_ELEMENT),
    ("mutates", Cause.MUTATED_INPUT),
    ("overruns", Cause.OUT_OF_BOUNDS),
    ("underruns", Cause.OUT_OF_BOUNDS),
    ("remembers", Cause.NUMERIC),
    ("asks_for_too_much", Cause.OUT_OF_MEMORY),
    ("asserts", Cause.CRASH),
    ("crashes", Cause.CRASH),
    ("leaves", Cause.CRASH),
    ("lingers", Cause.CHEAT_SUSPECT),
    ("stops_the_clock", Cause.CHEAT_SUSPECT),
]


@pytest.mark.parametrize(("route", "cause"), WRONG, ids=[route for route, _ in WRONG])
def test_a_candidate_that_does_what_it_must_not(bench: Bench, route: str, cause: Cause) -> None:
    found = bench.evaluate(candidate(route), SMALL, iterations=6, trials=1)
    assert found.failure is not None, show(found)
    assert found.failure.cause == cause, show(found)
    assert found.attempts == ()
    after = bench.evaluate(HONEST, SMALL, iterations=3, trials=1)
    assert after.failure is None, show(after)


def test_a_kernel_that_does_not_end_is_ended(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is free again, and what the judge keeps on it is untouched."""
    assert bench.evaluate(HONEST, SMALL, iterations=0, trials=1).failure is None
    monkeypatch.setattr(bench, "policy", POLICY.model_copy(update={"trial_timeout_s": 5.0}))
    found = bench.evaluate(candidate("sleeps"), SMALL, iterations=2, trials=1)
    assert found.failure is not None
    assert found.failure.cause == Cause.HANG, show(found)
    monkeypatch.setattr(bench, "policy", POLICY)
    after = bench.evaluate(HONEST, SMALL, iterations=3, trials=1)
    assert after.failure is None, show(after)


def test_a_candidate_against_itself(bench: Bench) -> None:
    """Two processes on one GPU, in turn: the medians of both sides agree."""
    route = available()[-1]
    chosen = make_candidate("gdn_decode", route.name, _knobs(route))
    sides: dict[int, list[float]] = {0: [], 1: []}
    for number in range(4):
        blocks = bench.pair(chosen, chosen, decode(64), number=number, iterations=20)
        for block in blocks:
            if not block.discarded:
                sides[block.side].append(statistics.median(block.us))
    print(sides)
    assert min(len(side) for side in sides.values()) >= 4
    assert statistics.mean(sides[0]) == pytest.approx(statistics.mean(sides[1]), rel=0.03)


def test_candidates_and_peers_side_by_side(bench: Bench) -> None:
    peers = {"other": "tuner.tests.faults:other", "wrong_other": "tuner.tests.faults:wrong_other"}
    chosen = [SAFE, HONEST, candidate("wrong"), candidate("asserts")]
    found = bench.interleave(chosen, SMALL, iterations=5, peers=peers)
    causes = [None if e.failure is None else e.failure.cause for e in found]
    assert causes == [None, None, Cause.NUMERIC, Cause.CRASH, None, Cause.NUMERIC]
    safe, honest = found[0].blocks[-1], found[1].blocks[-1]
    assert safe.kernels == honest.kernels > 1
    assert statistics.median(safe.us) == pytest.approx(statistics.median(honest.us), rel=0.2)


def test_a_larger_problem_gets_a_larger_slab(bench: Bench) -> None:
    for workload in (decode(2), decode(256), decode(2)):
        found = bench.evaluate(HONEST, workload, iterations=2, trials=1)
        assert found.failure is None, show(found)


def test_without_cupti_nothing_is_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cupti").mkdir()
    (tmp_path / "cupti" / "__init__.py").write_text("raise ImportError('hidden by a test')\n")
    environment = broker._environment

    def hidden() -> dict[str, str]:
        found = environment()
        return {**found, "PYTHONPATH": f"{tmp_path}:{found['PYTHONPATH']}"}

    monkeypatch.setattr(broker, "_environment", hidden)
    with Bench("cuda:0", POLICY, seed=1, routes=str(FAULTS), code="commit") as bare:
        assert bare.environment.timer == "wall"
        for call in (
            partial(bare.evaluate, SAFE, SMALL, iterations=1, trials=1),
            partial(bare.pair, SAFE, SAFE, SMALL, number=0, iterations=1),
            partial(bare.interleave, [SAFE], SMALL, iterations=1),
        ):
            with pytest.raises(TimerMissing, match="GPU times need CUPTI") as caught:
                call()
            assert caught.value.exit_code == 3
        assert bare.judge(SAFE, SMALL, [1, 2]).failures == ()
        found = bare.evaluate(candidate("wrong"), SMALL, iterations=0, trials=1)
        assert found.failure is not None
        assert found.failure.cause == Cause.NUMERIC
