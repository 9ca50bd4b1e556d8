"""Each of the 32 cheats is caught by what is to catch it, and honest work is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fastkernels import catalog
from fastkernels.core.device import named_device
from fastkernels_tuner import gates, trials
from fastkernels_tuner.agent import policy, sources
from fastkernels_tuner.agent.workspace import Patch
from fastkernels_tuner.measure import Bench
from fastkernels_tuner.model import Candidate, Trials, Workload
from tuner.tests import cheats
from tuner.tests.cheats import CHEATS, Cheat
from tuner.tests.test_measure import DECODE, POLICY, Quiet, candidate

BASE = sources.editable(catalog.operator("gdn_decode"), catalog.operator("gdn_decode").safe_route)
(NAME,) = BASE
RULES = policy.default()
OTHER = DECODE.model_copy(update={"case": {**DECODE.case, "batch_size": 3}})

CALLED = [cheat for cheat in CHEATS if cheat.call is not None]
WRITTEN = [cheat for cheat in CHEATS if cheat.source]


def name(cheat: Cheat) -> str:
    return f"{cheat.number}-{cheat.what.replace(' ', '_')}"


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench("cpu", POLICY, seed=1, routes=cheats.__file__, code="commit", guard=Quiet()) as made:
        yield made


def test_all_are_there() -> None:
    assert {cheat.number for cheat in CHEATS} == set(range(1, 33))
    left = [c for c in CHEATS if c.call is None and not c.source]
    assert [c.number for c in left if not c.elsewhere] == []
    assert [c.number for c in left] == [29, 31]


@pytest.mark.parametrize("cheat", CALLED, ids=name)
def test_a_cheat_is_caught_in_earnest(bench: Bench, cheat: Cheat) -> None:
    assert cheat.call is not None
    bench.renew()  # whatever an earlier one left in its process
    subject = candidate(cheat.call.__name__)
    found = [bench.evaluate(subject, DECODE, iterations=6, trials=4).failure]
    if found == [None]:  # as of a cheat that knows the benchmark, or is wrong now and then
        found = list(bench.judge(subject, OTHER, range(20)).failures[:1])
    (failure,) = found
    assert failure is not None
    assert failure.cause in cheat.causes, failure
    assert not failure.cause.is_infrastructure


@pytest.mark.parametrize("cheat", WRITTEN, ids=name)
def test_a_cheat_is_caught_by_its_source(cheat: Cheat) -> None:
    at = NAME
    if cheat.source.startswith("//"):
        at = "csrc/gdn_decode/rows.cuh"
    patch = Patch(files={at: BASE.get(at, "") + cheat.source})
    assert cheat.by in {breach.by for breach in policy.breaches(RULES, patch, BASE)}
    if cheat.by == "static":
        assert gates.banned(patch.apply(BASE))


def test_honest_candidates_pass(bench: Bench) -> None:
    for route in ("honest", "torch_recurrent"):
        for row in (DECODE, OTHER):
            found = bench.evaluate(candidate(route), row, iterations=6, trials=4)
            assert found.failure is None
            assert found.blocks


HONEST = {
    "another order": (
        "    u = beta * (v - torch.matmul(state, k)[..., 0])",
        "    seen = torch.matmul(state, k)[..., 0]\n    u = beta * (v - seen)",
    ),
    "a helper": ("@dataclass(frozen=True)", "def twice(x: float) -> float:\n    return 2 * x\n\n\n"
                 "TILES = (16, 32)\n\n\n@dataclass(frozen=True)"),
    "fewer lines": ("    if batch_size == 0:\n        return\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("which", HONEST)
def test_honest_edits_break_no_rule(which: str) -> None:
    old, new = HONEST[which]
    assert BASE[NAME].count(old) == 1
    patch = Patch(files={NAME: BASE[NAME].replace(old, new)})
    assert policy.breaches(RULES, patch, BASE) == []


def test_luck_does_not_help(bench: Bench, tmp_path: Path) -> None:
    """What was wrong once is wrong, without another call."""
    corpus = trials.Corpus(tmp_path / "regressions.jsonl")
    subject, device = candidate("is_wrong_now_and_then"), named_device("cpu")
    strata = (trials.Stratum(workload=DECODE, risk="high"),)
    calls = 0

    def judge(candidate: Candidate, workload: Workload, seeds: Sequence[int]) -> Trials:
        nonlocal calls
        calls += 1
        return bench.judge(candidate, workload, seeds)

    counts = []
    for seed in range(3):
        verdict = trials.run_trials(
            judge, subject, strata, POLICY, corpus=corpus, device=device, seed=seed
        )
        assert verdict.outcome.kind == "fail"
        counts.append(calls)
    assert counts[0] > 0
    assert counts == [counts[0]] * 3
