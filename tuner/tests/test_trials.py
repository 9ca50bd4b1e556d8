"""How often candidates are judged, that rare failures are found, and that no retry hides one."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastkernels import catalog
from fastkernels.core import dispatch
from fastkernels.core.device import CPU, named_device
from fastkernels.testing.compare import as_tuple, clone, judge, same_bits
from fastkernels_tuner import trials
from fastkernels_tuner.model import Candidate, Cause, Failure, Policy, Trials, Workload
from fastkernels_tuner.space import candidate
from fastkernels_tuner.stats import upper_bound
from fastkernels_tuner.trials import (
    Corpus,
    Fail,
    Inconclusive,
    NeedMore,
    Pass,
    Regression,
    Stratum,
    TrialsError,
    Verdict,
    budget,
    draw,
    first_seed,
    generator_version,
    risk_class,
    run_trials,
    strata,
    sum_bound,
    triviality,
)

POLICY = Policy(name="test", timer="wall", is_promotable=False)
SELECTOR = candidate("dsa_topk_indexer", "torch_tiled", {"row_tile": 8, "page_tile": 64})
OTHER = candidate("dsa_topk_indexer", "torch_tiled", {"row_tile": 2, "page_tile": 64})
DECODE = candidate("gdn_decode", "torch_recurrent", {})


def indexer_rows(number: int) -> list[Workload]:
    """Long rows of the contest: something is selected in each."""
    cases = catalog.module("dsa_topk_indexer", "inputs").CONTEST
    long = [case for case in cases if max(case.seq_lens) > 2048]
    return [Workload.of("dsa_topk_indexer", "contest", case) for case in long[:number]]


def high(number: int) -> list[Stratum]:
    return [Stratum(workload=workload, risk="high") for workload in indexer_rows(number)]


def of_class(name: str) -> Stratum:
    return high(1)[0].model_copy(update={"risk": name})


class FakeJudge:
    """Right, but at a rate of its own on each stratum; keeps what it was asked."""

    def __init__(self, rates: dict[str, float] | None = None, seed: int = 0) -> None:
        self.rates = rates or {}
        self.rng = np.random.default_rng(seed)
        self.asked: dict[str, list[int]] = defaultdict(list)
        self.calls = 0

    def __call__(self, _: Candidate, workload: Workload, seeds: Sequence[int]) -> Trials:
        self.calls += 1
        self.asked[workload.id] += seeds
        rate = self.rates.get(workload.id, 0.0)
        first = int(self.rng.geometric(rate)) if rate else len(seeds) + 1
        if first > len(seeds):
            return Trials(stratum="any", trials=len(seeds), worst=0.5)
        failure = Failure(
            cause=Cause.DROPPED_ELEMENT, message="a winner is missing", seed=seeds[first - 1]
        )
        return Trials(stratum="any", trials=first, failures=(failure,), worst=0.5)


def run(judge: Any, found: Sequence[Stratum], **options: Any) -> Verdict:
    options = {"corpus": Corpus(), "device": CPU, **options}
    who = options.pop("candidate", SELECTOR)
    policy = options.pop("policy", POLICY)
    return run_trials(judge, who, found, policy, **options)


def test_candidates_meet_at_what_they_share() -> None:
    """One question for both where they share a stratum and its seeds; each verdict is that of a
    run of its own, and one that is wrong leaves the other alone."""
    mine, shared, other = high(3)
    asked: list[tuple[list[str], str, int]] = []
    wrong_one = SELECTOR.model_copy(update={"route": "another"})

    def judge(
        candidates: Sequence[Candidate], workload: Workload, seeds: Sequence[int]
    ) -> list[Trials]:
        asked.append((sorted(c.route for c in candidates), workload.id, len(seeds)))
        failure = Failure(cause=Cause.NUMERIC, message="off", seed=seeds[0])
        is_wrong = workload.id == other.id and len(seeds) == 8  # of its second batch
        return [
            Trials(stratum="any", trials=1, failures=(failure,), worst=2.0)
            if c is wrong_one and is_wrong
            else Trials(stratum="any", trials=len(seeds), worst=0.5)
            for c in candidates
        ]

    recorded: Counter[str] = Counter()
    subjects = [
        trials.Subject(SELECTOR, [mine, shared]),
        trials.Subject(wrong_one, [shared, other]),
    ]
    found = trials.run_together(
        judge,
        subjects,
        POLICY,
        corpus=Corpus(),
        device=CPU,
        record=lambda c, each: recorded.update({c.route: each.trials}),
    )
    alone = run(FakeJudge(), [mine, shared])
    assert found[0].budgets == alone.budgets
    assert [v.outcome.kind for v in found] == ["pass", "fail"]
    both = sorted([SELECTOR.route, "another"])
    of_shared = [routes for routes, workload, _ in asked if workload == shared.id]
    assert of_shared[:2] == [both, both]
    assert all(routes == [SELECTOR.route] for routes in of_shared[2:])
    assert sum(len(routes) * n for routes, _, n in asked) >= sum(recorded.values())
    assert recorded[SELECTOR.route] == sum(b.trials for b in alone.budgets)


# ---- budgets ------------------------------------------------------------------------------------


def test_budgets_are_those_of_the_bound() -> None:
    assert [budget(risk, POLICY) for risk in trials.RISKS] == [59, 299, 896]  # 0.334 %: 895.6
    assert budget("high", POLICY.model_copy(update={"p_max": {"high": 0.005}})) == 598
    strict = POLICY.model_copy(update={"confidence": 0.99})
    assert [budget(risk, strict) for risk in ("low", "medium")] == [90, 459]
    for rows in (1, 2, 59, 128):
        number = budget("high", POLICY, rows)
        assert sum_bound(0, number, rows, 0.95) <= 0.00334 < sum_bound(0, number - 1, rows, 0.95)
        assert upper_bound(0, number, 0.95) <= 0.00334


def test_the_sum_over_rows_costs_almost_nothing_more_than_each_row() -> None:
    """All rows clean is one observation about their sum: ln(20) / 0.00334 trials on each do,
    however many rows there are; the pooled count of one row's budget would not."""
    assert budget("high", POLICY, 59) == 897 == math.ceil(math.log(20) / 0.00334)
    assert sum_bound(0, 3, 128, 0.95) > 0.9
    assert upper_bound(0, 384, 0.95) < 0.008  # what pooling says of the same trials


@pytest.mark.parametrize("shape", ["equal", "one", "half"])
def test_the_sum_is_covered(shape: str) -> None:
    """Whatever the rates are: with a sum above the bound, clean runs are rarer than 5 %."""
    rows, number = 20, 100
    total = 1.02 * sum_bound(0, number, rows, 0.95)
    share = {"equal": rows, "one": 1, "half": rows // 2}[shape]
    rates = np.zeros(rows)
    rates[:share] = total / share
    assert float(np.prod((1 - rates) ** number)) < 0.05


def test_a_count_with_failures_bounds_the_sum() -> None:
    rng = np.random.default_rng(1)
    rates = rng.dirichlet(np.ones(10)) * 0.05
    failures = rng.binomial(100, rates, size=(4000, 10)).sum(axis=1)
    covered = [sum_bound(int(f), 100, 10, 0.95) >= rates.sum() for f in failures[:500]]
    assert np.mean(covered) >= 0.93


# ---- risk and strata ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "route", "risk"),
    [
        ("gdn_decode", "torch_recurrent", "medium"),
        ("gdn_decode", "warp_rows", "medium"),
        ("gdn_prefill", "torch_chunked", "medium"),
        ("dsa_sparse_attention", "torch_gather", "low"),
        ("dsa_topk_indexer", "torch_tiled", "high"),
        ("moe_fp8_block_scale", "torch_grouped", "high"),
    ],
)
def test_risk_classes(op: str, route: str, risk: str) -> None:
    assert risk_class(op, route) == risk
    above = {"low": "medium", "medium": "high", "high": "high"}
    assert risk_class(op, route, has_failed=True) == above[risk]


def test_barriers_placed_by_hand_raise_a_dense_operator() -> None:
    route = catalog.operator("dsa_sparse_attention").safe_route
    classes = [
        risk_class("dsa_sparse_attention", dataclasses.replace(route, language=language))
        for language in ("torch", "triton", "cuda", "cute")
    ]
    assert classes == ["low", "low", "medium", "medium"]


def test_an_unknown_route_is_named() -> None:
    with pytest.raises(TrialsError, match="no route 'fast'"):
        risk_class("gdn_decode", "fast")


def test_trivial_needs_a_proof() -> None:
    cases = catalog.module("dsa_topk_indexer", "inputs").CONTEST
    trivial = [case for case in cases if triviality("dsa_topk_indexer", case)]
    assert all(max(case.seq_lens) <= 2048 for case in trivial)
    assert all(max(case.seq_lens) > 2048 for case in cases if case not in trivial)
    assert 0 < len(trivial) < len(cases)
    assert "topk=2048" in triviality("dsa_topk_indexer", trivial[0])
    corner = {case.name: case for case in catalog.module("gdn_prefill", "inputs").CORNER}
    assert triviality("gdn_prefill", corner["empty"])
    # Nothing to compute, but states to keep and stray tokens to zero.
    assert not triviality("gdn_prefill", corner["empty-sequences"])
    assert not triviality("gdn_prefill", corner["only-stray-tokens"])


def test_strata_are_the_workloads_and_every_generator() -> None:
    cases = catalog.module("dsa_topk_indexer", "inputs").CONTEST
    workloads = [Workload.of("dsa_topk_indexer", "contest", case) for case in cases]
    found = strata(SELECTOR, workloads, CPU, corpus=Corpus())
    generators = catalog.module("dsa_topk_indexer", "adversarial").STRATA
    assert [s.workload for s in found[: len(workloads)]] == workloads
    names = [s.workload.case["name"] for s in found if s.is_adversarial]
    assert names == list(generators)
    assert len({s.id for s in found}) == len(found)
    by_name = {str(s): s for s in found}
    assert by_name["adversarial:near_ties"].risk == "high"
    assert by_name["adversarial:no_rows"].risk == "low"
    assert by_name["adversarial:no_rows"].proof
    assert not any(s.is_row for s in found if s.proof or s.is_adversarial)


@pytest.mark.parametrize("op", [operator.name for operator in catalog.OPERATORS])
def test_every_generator_has_a_case_without_a_draw(op: str) -> None:
    route = catalog.operator(op).safe_route
    who = candidate(op, route, dataclasses.asdict(route.default_config))
    for workload in trials.adversarial(who, CPU):
        case = trials.case_of(workload)
        assert set(case.axes) <= {axis.name for axis in catalog.operator(op).spec.axes}


def test_a_generator_that_a_route_does_not_serve_is_left_out() -> None:
    h200 = named_device("h200")
    warp = catalog.operator("gdn_decode").route("warp_rows")
    assert warp is not None
    who = candidate("gdn_decode", warp, dataclasses.asdict(warp.default_config))
    everything = catalog.module("gdn_decode", "adversarial").STRATA
    assert len(list(trials.adversarial(who, h200))) == len(everything)
    assert not list(trials.adversarial(who, h200, head_size=64))
    assert not list(trials.adversarial(who, CPU))


def test_draws_are_those_of_the_operator() -> None:
    inputs_of = catalog.module("gdn_decode", "inputs")
    workload = Workload.of("gdn_decode", "contest", inputs_of.CONTEST[0])
    inputs, case = draw(workload, 7)
    again = inputs_of.make_inputs(dataclasses.replace(inputs_of.CONTEST[0], seed=7))
    assert case.seed == 7
    assert same_bits(inputs.q, again.q)
    (generator,) = [w for w in trials.adversarial(DECODE, CPU) if w.case["name"] == "beta_1"]
    inputs, case = draw(generator, 7)
    direct, _ = catalog.module("gdn_decode", "adversarial").STRATA["beta_1"].draw(7)
    assert same_bits(inputs.state, direct.state)
    assert same_bits(inputs.b, direct.b)
    with pytest.raises(TypeError):  # nobody draws a generator's case by mistake
        generator.build()


def test_an_unknown_generator_is_named() -> None:
    workload = Workload(op="gdn_decode", listed="adversarial", case={"name": "worst", "seed": 0})
    with pytest.raises(TrialsError, match="no adversarial stratum 'worst': no_rows, "):
        draw(workload, 1)


# ---- a run --------------------------------------------------------------------------------------


def test_a_right_candidate_passes_after_its_budget() -> None:
    found = [*high(3), *strata(SELECTOR, [], CPU, corpus=Corpus())]
    fake = FakeJudge()
    verdict = run(fake, found)
    assert verdict.outcome == Pass()
    for stratum, row in zip(found, verdict.budgets, strict=True):
        rows = 3 if stratum.is_row else 1
        assert row.trials == row.trials_needed == budget(stratum.risk, POLICY, rows)
        assert row.upper_bound <= row.required
        seeds = fake.asked[stratum.id]
        assert len(seeds) == len(set(seeds)) == row.trials
        assert all(0 <= seed < trials.SEEDS for seed in seeds)
    (total,) = verdict.sums
    assert (total.rows, total.risk) == (3, "high")
    assert total.upper_bound <= total.required
    assert (verdict.candidate, verdict.policy) == (SELECTOR.id, POLICY.id)
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


def test_seeds_depend_on_the_campaign_and_the_stratum() -> None:
    one, other = (s.id for s in high(2))
    assert first_seed(0, one) != first_seed(0, other)
    assert first_seed(0, one) != first_seed(1, one)
    assert first_seed(0, one) == first_seed(0, one)


def test_adversarial_strata_and_small_batches_come_first() -> None:
    found = [*high(1), *strata(SELECTOR, [], CPU, corpus=Corpus())]
    worst = next(s for s in found if str(s) == "adversarial:near_ties")
    fake = FakeJudge({worst.id: 1.0})
    verdict = run(fake, found)
    assert isinstance(verdict.outcome, Fail)
    assert fake.calls < len(found)
    assert sum(len(seeds) for seeds in fake.asked.values()) <= trials.FIRST_BATCH * len(found)
    assert not fake.asked[found[0].id]


def test_when_time_ends_more_is_needed_and_a_resumed_run_goes_on() -> None:
    found = high(2)
    whole, first, second = FakeJudge(), FakeJudge(), FakeJudge()
    expected = run(whole, found)
    ledger: list[Trials] = []
    cut = run(first, found, stop=lambda: first.calls >= 7, record=ledger.append)
    assert isinstance(cut.outcome, NeedMore)
    done = sum(each.trials for each in ledger)
    assert cut.outcome.n == sum(row.trials_needed for row in cut.budgets) - done > 0
    assert {row.verdict for row in cut.budgets} == {"need_more"}
    resumed = run(second, found, earlier=ledger)
    assert resumed.outcome == Pass()
    assert resumed.budgets == expected.budgets
    for stratum in found:
        assert first.asked[stratum.id] + second.asked[stratum.id] == whole.asked[stratum.id]


def test_no_time_at_all_is_no_pass() -> None:
    verdict = run(FakeJudge(), high(1), stop=lambda: True)
    assert verdict.outcome == NeedMore(
        n=896, message=f"896 more trials on 1 strata, {high(1)[0]} among them"
    )
    assert verdict.budgets[0].upper_bound == 1.0


def test_a_judge_that_answers_something_else() -> None:
    def short(_: Candidate, workload: Workload, seeds: Sequence[int]) -> Trials:
        return Trials(stratum=workload.id, trials=len(seeds) - 1)

    with pytest.raises(TrialsError, match="answered for 3 calls, expected 4"):
        run(short, high(1))


@pytest.mark.parametrize("worst", [1.001, math.inf, math.nan])
def test_an_error_above_its_limit_is_wrong_though_nobody_says_so(worst: float) -> None:
    def silent(_: Candidate, workload: Workload, seeds: Sequence[int]) -> Trials:
        return Trials(stratum=workload.id, trials=len(seeds), worst=worst)

    verdict = run(silent, high(1))
    assert isinstance(verdict.outcome, Fail)
    assert verdict.outcome.cause is Cause.NUMERIC
    assert len(verdict.regressions) == trials.FIRST_BATCH  # nobody said which
    assert Verdict.model_validate_json(verdict.model_dump_json()).outcome == verdict.outcome
    assert verdict.canonical()


# ---- the selector that is wrong in 1.5 % of trials ---------------------------------------------


def rejections(found: Sequence[Stratum], policy: Policy, rate: float, runs: int) -> float:
    """The share of runs, each with a corpus of its own, that end in Fail."""
    bad = found[len(found) // 2].id
    outcomes = [
        run(FakeJudge({bad: rate}, seed), found, policy=policy, batch=2048).outcome
        for seed in range(runs)
    ]
    assert all(isinstance(outcome, Pass | Fail) for outcome in outcomes)
    return float(np.mean([isinstance(outcome, Fail) for outcome in outcomes]))


def test_a_rare_failure_on_one_row_of_many_is_found() -> None:
    """1.5 % on one of 8 rows: P(found) = 1 - 0.985 ** 897, nearly 1."""
    assert rejections(high(8), POLICY, 0.015, 60) >= 0.95


def test_a_failure_as_rare_as_the_class_allows_is_found_in_19_of_20_runs() -> None:
    """The bound means what it says: at p_max itself 95 % are found, at a tenth of it 26 %."""
    assert rejections(high(1), POLICY, 0.00334, 200) == pytest.approx(0.95, abs=0.045)
    assert rejections(high(1), POLICY, 0.000334, 200) == pytest.approx(0.259, abs=0.1)


def test_three_trials_miss_it() -> None:
    """0.985 ** 3 = 95.6 % of the time."""
    three = POLICY.model_copy(update={"p_max": {**POLICY.p_max, "high": 0.64}})
    assert budget("high", three) == 3
    missed = 1.0 - rejections(high(1), three, 0.015, 1000)
    assert missed == pytest.approx(0.956, abs=0.02)


def test_detection_grows_with_trials_as_computed() -> None:
    """3, 100, 200 and 897 trials at 1.5 %: 4.4, 77.9, 95.1 and 100 %."""
    draws = np.random.default_rng(0).geometric(0.015, 200_000)  # of the first wrong trial
    found = [float(np.mean(draws <= n)) for n in (3, 100, 200, budget("high", POLICY, 59))]
    assert found == pytest.approx([0.044, 0.779, 0.951, 1.0], abs=0.005)


# ---- no laundering ------------------------------------------------------------------------------

LOST = Failure(cause=Cause.GPU_LOST, message="the GPU fell off the bus")
WRONG = Failure(cause=Cause.DROPPED_ELEMENT, message="a winner is missing", seed=11)


class Scripted:
    """Answers by a list of failures, then is right for ever."""

    def __init__(self, *answers: tuple[Failure, ...]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, tuple[int, ...]]] = []

    def __call__(self, _: Candidate, workload: Workload, seeds: Sequence[int]) -> Trials:
        self.asked.append((workload.id, tuple(seeds)))
        failures = self.answers.pop(0) if self.answers else ()
        return Trials(stratum="any", trials=len(seeds), failures=failures)


def test_faults_of_the_infrastructure_are_retried_and_kept() -> None:
    fake, ledger = Scripted((LOST,), (LOST,)), list[Trials]()
    verdict = run(fake, high(1), record=ledger.append)
    assert verdict.outcome == Pass()
    assert verdict.faults == (LOST, LOST)
    assert fake.asked[0] == fake.asked[1] == fake.asked[2]  # the same seeds again
    assert sum(len(seeds) for _, seeds in fake.asked) == 896 + 2 * trials.FIRST_BATCH
    # What a lost attempt had found right does not count, and the ledger has it.
    assert [each.trials for each in ledger[:3]] == [0, 0, trials.FIRST_BATCH]
    assert verdict.trials[0].trials == 896


def test_a_third_fault_is_inconclusive() -> None:
    fake = Scripted((LOST,), (LOST,), (LOST,))
    verdict = run(fake, high(1))
    assert isinstance(verdict.outcome, Inconclusive)
    assert "3 attempts, the last one ended by gpu_lost" in verdict.outcome.message
    assert len(verdict.faults) == len(fake.asked) == 3


@pytest.mark.parametrize(
    "script", [[(WRONG,)], [(LOST, WRONG)], [(WRONG, LOST)], [(LOST,), (WRONG,)]]
)
def test_a_wrong_number_is_never_retried(script: list[tuple[Failure, ...]]) -> None:
    fake, corpus = Scripted(*script), Corpus()
    verdict = run(fake, high(1), corpus=corpus)
    assert isinstance(verdict.outcome, Fail)
    assert verdict.outcome.cause is Cause.DROPPED_ELEMENT
    assert len(fake.asked) == len(script)
    assert verdict.budgets[0].verdict == "fail"
    assert [(r.seed, r.candidate, r.cause) for r in corpus] == [
        (11, SELECTOR.id, Cause.DROPPED_ELEMENT)
    ]


@pytest.mark.parametrize("cause", [Cause.CRASH, Cause.HANG, Cause.UNCLASSIFIED, Cause.RACE])
def test_what_is_not_known_to_be_infrastructure_is_the_candidates(cause: Cause) -> None:
    fake = Scripted((Failure(cause=cause, message="?"),))
    assert isinstance(run(fake, high(1)).outcome, Fail)
    assert len(fake.asked) == 1


def test_running_it_again_does_not_help() -> None:
    corpus = Corpus()
    run(Scripted((WRONG,)), high(1), corpus=corpus)
    right = Scripted()
    for options in ({}, {"seed": 1}, {"earlier": ()}):
        again = run(right, high(1), corpus=corpus, **options)
        assert isinstance(again.outcome, Fail)
        assert "was wrong before: a winner is missing" in again.outcome.message
    assert not right.asked


def test_a_wrong_number_in_the_ledger_is_final_without_a_corpus() -> None:
    ledger: list[Trials] = []
    run(Scripted((), (WRONG,)), high(1), record=ledger.append)
    right = Scripted()
    again = run(right, high(1), earlier=ledger)
    assert isinstance(again.outcome, Fail)
    assert again.outcome.seed == 11
    assert not right.asked


def test_many_reruns_of_a_rare_failure_pass_none() -> None:
    """Rerun until lucky, with a corpus that remembers: once wrong is wrong, and a run that was
    lucky is one of the few that the bound allows."""
    found, three = high(1), POLICY.model_copy(update={"p_max": {"high": 0.06}})
    passed = 0
    for attempt in range(100):
        corpus = Corpus()
        fake = FakeJudge({found[0].id: 0.2}, seed=attempt)
        outcomes = [
            run(fake, found, corpus=corpus, policy=three, seed=again).outcome.kind
            for again in range(5)
        ]
        assert "pass" not in outcomes[outcomes.index("fail") :] if "fail" in outcomes else True
        passed += outcomes[-1] == "pass"
    assert passed <= 2


# ---- the corpus ---------------------------------------------------------------------------------


def regression(seed: int, **changes: Any) -> Regression:
    return Regression(
        **{
            "op": SELECTOR.op,
            "route": SELECTOR.route,
            "candidate": SELECTOR.id,
            "workload": indexer_rows(1)[0],
            "seed": seed,
            "generator": generator_version(SELECTOR.op),
            "cause": Cause.NUMERIC,
            **changes,
        }
    )


def ids(records: Iterable[Regression]) -> list[str]:
    return [record.id for record in records]


def test_what_failed_once_is_judged_first_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "corpus" / "regressions.jsonl"
    failed = run(Scripted((), (WRONG,)), high(2), corpus=Corpus(path))
    assert ids(failed.regressions) == ids(Corpus(path))
    fake, corpus = Scripted(), Corpus(path)
    verdict = run(fake, high(2), candidate=OTHER, corpus=corpus)
    assert fake.asked[0] == (failed.regressions[0].workload.id, (11,))
    assert verdict.outcome == Pass()
    # A draw that was chosen counts towards no bound.
    assert all(row.trials == row.trials_needed for row in verdict.budgets)
    assert not any(11 in seeds for _, seeds in fake.asked[1:])
    failing = Scripted((WRONG,))
    assert isinstance(run(failing, high(2), candidate=OTHER, corpus=corpus).outcome, Fail)
    assert len(failing.asked) == 1


def test_a_failure_raises_its_route_alone() -> None:
    corpus = Corpus()
    corpus.add(regression(1, op=DECODE.op, route=DECODE.route, candidate="0" * 16,
                          workload=next(iter(trials.adversarial(DECODE, CPU)))))  # fmt: skip
    raised = strata(DECODE, [], CPU, corpus=corpus)
    assert {s.risk for s in raised if not s.proof} == {"high"}
    assert {s.risk for s in strata(DECODE, [], CPU, corpus=Corpus()) if not s.proof} == {"medium"}
    assert not corpus.has_failed("gdn_decode", "warp_rows")


def test_regressions_that_a_candidate_does_not_serve_are_left_out() -> None:
    corpus = Corpus()
    corpus.add(regression(1))
    assert corpus.of(OTHER, CPU) == tuple(corpus)
    assert corpus.of(DECODE, CPU) == ()
    stale = regression(2)
    lost = stale.workload.model_copy(update={"case": {**stale.workload.case, "gone": 1}})
    corpus.add(regression(2, workload=lost))
    with pytest.raises(TrialsError, match="gone"):
        corpus.of(OTHER, CPU)


def test_time_may_end_among_the_regressions() -> None:
    corpus = Corpus()
    corpus.add(regression(1), regression(2))
    fake = FakeJudge()
    verdict = run(fake, high(1), candidate=OTHER, corpus=corpus, stop=lambda: fake.calls == 1)
    assert isinstance(verdict.outcome, NeedMore)
    assert "1 draws that failed before" in verdict.outcome.message


def test_the_file_is_plain_and_the_same_whatever_the_order(tmp_path: Path) -> None:
    one, other = Corpus(tmp_path / "a"), Corpus(tmp_path / "b")
    records = [regression(seed) for seed in range(5)]
    one.add(*records)
    for record in reversed(records):
        other.add(record)
        other.add(record)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert ids(Corpus(tmp_path / "a")) == ids(other)
    assert len(one) == 5


def _add(path: Path, seed: int) -> None:
    Corpus(path).add(*(regression(10 * seed + i) for i in range(3)))


def test_processes_add_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "regressions.jsonl"
    stale = Corpus(path)  # read before the others wrote
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_add, args=(path, seed)) for seed in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    stale.add(regression(99))
    assert {record.seed for record in Corpus(path)} == {
        99, *(10 * seed + i for seed in range(4) for i in range(3))
    }  # fmt: skip


@pytest.mark.parametrize("line", ["{", "[]", '{"op": "gdn_decode"}', ""])
def test_a_corpus_out_of_shape_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "regressions.jsonl"
    Corpus(path).add(regression(1))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(TrialsError, match=r"regressions.jsonl:2: expected a regression"):
        Corpus(path)


def test_generators_have_versions() -> None:
    found = {generator_version(operator.name) for operator in catalog.OPERATORS}
    assert len(found) == len(catalog.OPERATORS)
    assert all(version.endswith(f"-torch-{torch.__version__}") for version in found)


# ---- a real judge -------------------------------------------------------------------------------


def on_cpu(spoil: Callable[[Any, int], None]) -> trials.Judge:
    """The safe route's outputs, spoiled, against the oracle."""

    def judged(who: Candidate, workload: Workload, seeds: Sequence[int]) -> Trials:
        operator, (route, config) = who.operator(), who.bind()
        failures, worst = [], 0.0
        for seed in seeds:
            inputs, case = draw(workload, seed)
            pristine = clone(inputs)
            with dispatch.force_route(operator, route.name, config):
                outputs = as_tuple(operator.function(**inputs._asdict()))
            spoil(outputs, seed)
            report = judge(operator, route, config, case, pristine, outputs)
            if not report.ok:
                failures.append(Failure(cause=Cause.NUMERIC, message=str(report), seed=seed))
                break
            near = report.nearest
            worst = max(worst, near.value / near.limit if near.limit else 0.0)
        return Trials(stratum=workload.id, trials=len(seeds), failures=tuple(failures), worst=worst)

    return judged


FEW = POLICY.model_copy(update={"p_max": {"low": 0.63, "medium": 0.63, "high": 0.4}})


def test_a_real_route_passes_and_a_spoiled_one_does_not() -> None:
    wanted = ("no_rows", "zeros", "beta_1", "mixed_states")
    found = [
        s for s in strata(DECODE, [], CPU, corpus=Corpus()) if s.workload.case["name"] in wanted
    ]
    verdict = run(on_cpu(lambda outputs, seed: None), found, candidate=DECODE, policy=FEW)
    assert verdict.outcome == Pass()
    assert max(row.worst for row in verdict.budgets) < 1.0

    def one_element(outputs: Any, seed: int) -> None:
        if outputs[1].numel():
            outputs[1].view(-1)[seed % 100] += 1.0

    corpus = Corpus()
    spoiled = run(on_cpu(one_element), found, candidate=DECODE, policy=FEW, corpus=corpus)
    assert isinstance(spoiled.outcome, Fail)
    assert "new_state" in spoiled.outcome.message
    (kept,) = corpus
    inputs, _ = draw(kept.workload, kept.seed)  # what reproduces it
    assert inputs.q.shape[0] > 0
