"""The bench on the CPU: real processes, candidates that work, and such that do what they must not.

One bench serves nearly all tests, as it does a campaign.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastkernels_tuner.measure import (
    Bench,
    InfrastructureFault,
    Rejected,
    TimerMissing,
    Unstable,
    broker,
)
from fastkernels_tuner.measure.broker import Infrastructure, Process, Seat
from fastkernels_tuner.measure.guards import Reading, Verdict
from fastkernels_tuner.measure.protocol import Check, Collected, Diagnose, Fill, Lend, Open, Step
from fastkernels_tuner.model import Candidate, Cause, Failure, Policy, Workload

FAULTS = Path(__file__).with_name("faults.py")
# On busy cores a call that takes 1 ms may take 2 for a while, `dawdles` never takes less than 50.
POLICY = Policy(name="test", timer="wall", is_promotable=False, trial_timeout_s=60.0, hopeless=10.0)
DECODE = Workload(
    op="gdn_decode",
    listed="serving",
    case={"name": "x", "batch_size": 2, "num_q_heads": 1, "num_v_heads": 2},
)
PREFILL = Workload(
    op="gdn_prefill",
    listed="serving",
    case={"name": "y", "lengths": (9, 0, 20), "num_q_heads": 1, "num_v_heads": 2},
)


class Quiet:
    """A guard without an opinion, or with those it is given."""

    def __init__(self, *reasons: str) -> None:
        self.reasons = list(reasons)

    def read(self) -> Reading:
        return Reading()

    def judge(self, readings: Any, own: Any) -> Verdict:
        return Verdict({"readings": len(readings)}, self.reasons.pop(0) if self.reasons else "")


@pytest.fixture(scope="module")
def shared() -> Iterator[Bench]:
    # The folder of files with bytecode is the tests' own: peers are imported as `faults`.
    with Bench(
        "cpu", POLICY, seed=1, routes=str(FAULTS), code="commit", lease=7, guard=Quiet()
    ) as made:
        yield made


@pytest.fixture
def bench(shared: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """The one bench, on the record of no earlier test, and without what one had lent: how many
    calls are judged together depends on that."""
    monkeypatch.setattr(shared, "_blocks", 0)
    monkeypatch.setattr(shared, "_discarded", 0)
    shared._loan = None
    return shared


def candidate(route: str) -> Candidate:
    return Candidate(op="gdn_decode", route=route, config={}, source="s")


HONEST = candidate("honest")
PEERS_RIGHT = {"other": "tuner.tests.faults:other"}
PEERS = {"other": "tuner.tests.faults:other", "wrong_other": "tuner.tests.faults:wrong_other"}


def record(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """What processes are asked from now on, with their ids."""
    asked: list[tuple[int, Any]] = []
    ask_all = Process.ask_all

    def recording(self: Process, messages: Any, *arguments: Any) -> Any:
        asked.extend((self.pid, message) for message in messages)
        return ask_all(self, messages, *arguments)

    monkeypatch.setattr(Process, "ask_all", recording)
    return asked


def is_gone(pid: int) -> bool:
    """No such process, or one that only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(*pids: int) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not all(map(is_gone, pids)):
        time.sleep(0.02)
    return all(map(is_gone, pids))


# ---- candidates that work -----------------------------------------------------------------------


def test_a_candidate_is_judged_and_timed(bench: Bench) -> None:
    """A shipped route, on contents that no call saw before."""
    found = bench.evaluate(candidate("torch_recurrent"), DECODE, iterations=5, trials=2)
    assert found.failure is None
    assert found.attempts == ()
    assert (found.candidate, found.workload) == (candidate("torch_recurrent").id, DECODE.id)
    (trials,) = found.trials
    # Two before, then the first call, two among the timed ones and one after them.
    assert (trials.stratum, trials.trials, trials.failures) == (DECODE.id, 6, ())
    assert 0.0 < trials.worst < 1.0
    (block,) = found.blocks
    assert len(block.us) == 5
    assert min(block.us) > 1.0
    assert (block.lease, block.number, block.order, block.side) == (7, 0, 0, 0)
    assert block.environment == bench.environment.id
    assert block.guard["readings"] == 3
    assert 7 <= block.guard["contents"] <= 8
    assert not block.discarded


def test_the_environment(bench: Bench) -> None:
    found = bench.environment
    assert (found.device, found.arch, found.timer, found.code) == ("cpu", "cpu", "wall", "commit")
    assert {"fastkernels", "python", "torch"} <= set(found.versions)


@pytest.mark.parametrize("mode", ["inplace", "pool"])
def test_calls_that_update_their_state(bench: Bench, mode: str) -> None:
    workload = DECODE.model_copy(update={"case": {**DECODE.case, "mode": mode}})
    found = bench.evaluate(HONEST, workload, iterations=2, trials=1)
    assert found.failure is None, found.failure


def test_an_operator_with_knobs_and_without_workloads_of_its_own(bench: Bench) -> None:
    knobs: dict[str, Any] = {"chunk_size": 16, "seqs_per_batch": 8}
    chunked = Candidate(op="gdn_prefill", route="torch_chunked", config=knobs, source="s")
    found = bench.evaluate(chunked, PREFILL, iterations=2, trials=1)
    assert found.failure is None, found.failure
    illegal = chunked.model_copy(update={"config": {"chunk_size": 0, "seqs_per_batch": 8}})
    refused = bench.evaluate(illegal, PREFILL, iterations=2, trials=1)
    assert refused.failure is not None
    assert "knob 'chunk_size' is 0" in refused.failure.message


def test_inputs_that_are_slow_to_draw_are_used_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "REDRAW_S", 0.0)
    other = DECODE.with_seed(8)  # whose draws nobody has timed yet
    found = bench.evaluate(HONEST, other, iterations=9, trials=1)
    assert found.failure is None
    assert 1 <= found.blocks[0].guard["contents"] <= broker.SLOTS


def test_printing_disturbs_nobody(bench: Bench) -> None:
    found = bench.evaluate(candidate("prints"), DECODE, iterations=2, trials=1)
    assert found.failure is None


def test_what_a_candidate_process_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither seeds, nor what is judged, nor what is expected."""
    asked = record(monkeypatch)
    found = bench.evaluate(HONEST, DECODE, iterations=4, trials=2)
    assert found.failure is None
    assert bench._judge is not None
    told = [message for pid, message in asked if pid != bench._judge.pid]
    assert {message.kind for message in told} == {"hello", "open", "step", "collect"}
    text = "".join(message.model_dump_json() for message in told)
    # Paths are of the machine: a checkout may lie below /check.
    text = re.sub(r'"/[^"]*"', '"path"', text)
    assert not re.search(r"seed|judge|expect|serving|flip|check|\bx\b", text)


# ---- candidates that do not ---------------------------------------------------------------------

WRONG = [
    ("wrong", Cause.NUMERIC, "output: rel_frobenius"),
    ("later_wrong", Cause.NUMERIC, "output: rel_frobenius"),
    ("nonfinite", Cause.NONFINITE, "new_state: rel_frobenius inf"),
    ("drops_an_element", Cause.DROPPED_ELEMENT, "1 of 512 elements were not written"),
    ("idles", Cause.DROPPED_ELEMENT, "512 of 512 elements were not written"),
    ("mutates", Cause.MUTATED_INPUT, "changed 'v', 10 bytes from its start"),
    ("overruns", Cause.OUT_OF_BOUNDS, "past the end of 'output'"),
    ("underruns", Cause.OUT_OF_BOUNDS, "2 bytes before 'q'"),
    ("reshapes", Cause.SHAPE, "'output' has shape (512,), expected (2, 1, 2, 128)"),
    ("retypes", Cause.DTYPE, "'output' is float32, expected bfloat16"),
    ("raises", Cause.UNCLASSIFIED, "does not feel like it"),
    ("out_of_memory", Cause.OUT_OF_MEMORY, "out of memory"),
    ("does_not_compile", Cause.COMPILE, "expected a ';'"),
    ("declines", Cause.UNCLASSIFIED, "serves nobody"),
    ("no_such_route", Cause.UNCLASSIFIED, "has no route 'no_such_route'"),
    ("remembers", Cause.NUMERIC, "rel_frobenius"),
    ("stops_the_clock", Cause.CHEAT_SUSPECT, "replaced time.perf_counter"),
    ("forges", Cause.CHEAT_SUSPECT, "answers what it was not asked"),
    ("crashes", Cause.CRASH, "ended by SIGSEGV in the middle of 'step'"),
    ("crashes_the_compiler", Cause.CRASH, "ended by SIGABRT in the middle of 'open'"),
    ("leaves", Cause.CRASH, "ended with status 0 in the middle of 'step'"),
]


@pytest.mark.parametrize(("route", "cause", "words"), WRONG, ids=[route for route, *_ in WRONG])
def test_a_candidate_that_does_what_it_must_not(
    bench: Bench, route: str, cause: Cause, words: str
) -> None:
    found = bench.evaluate(candidate(route), DECODE, iterations=6, trials=1)
    assert found.failure is not None
    assert (found.failure.cause, found.blocks) == (cause, ()), found.failure
    assert words in found.failure.message
    assert found.failure.workload == DECODE.id
    assert found.attempts == ()  # it was not tried again
    if cause in (Cause.NUMERIC, Cause.CRASH) and "open" not in found.failure.message:
        assert found.failure.seed is not None


def test_the_bench_goes_on_after_all_of_them(bench: Bench) -> None:
    found = bench.evaluate(HONEST, DECODE, iterations=3, trials=1)
    assert found.failure is None
    assert len(found.blocks) == 1


def test_one_that_hangs_is_killed_with_what_it_started(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.evaluate(HONEST, DECODE, iterations=0, trials=1).failure is None
    monkeypatch.setattr(bench, "policy", POLICY.model_copy(update={"trial_timeout_s": 2.0}))
    found = bench.evaluate(candidate("hangs"), DECODE, iterations=2, trials=1)
    assert found.failure is not None
    assert found.failure.cause == Cause.HANG
    assert found.failure.message == "no answer to 'step' within 2 s"
    log = found.failure.detail["log"]
    assert "in hangs" in log  # where it hung
    child = re.search(r"child (\d+)", log)
    assert child is not None
    assert wait_until_gone(int(child[1]))


# ---- trials -------------------------------------------------------------------------------------


def test_one_judged_call_per_seed(bench: Bench) -> None:
    found = bench.judge(HONEST, DECODE, range(5))
    assert (found.stratum, found.trials, found.failures) == (DECODE.id, 5, ())
    assert bench.judge(HONEST, DECODE, []).trials == 0


def test_judging_ends_at_the_first_that_fails_and_names_its_seed(bench: Bench) -> None:
    found = bench.judge(candidate("later_wrong"), DECODE, range(100, 130))
    (failure,) = found.failures
    assert failure.cause == Cause.NUMERIC
    assert failure.seed == 100 + found.trials - 1
    assert found.worst > 1.0
    assert 1 <= found.trials < 30


def test_calls_are_judged_several_at_a_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds for 20 calls: in each the judge is asked twice, and the candidate for each."""
    monkeypatch.setattr(broker, "JUDGED_SLOTS", 8)
    own = DECODE.model_copy(update={"case": {**DECODE.case, "batch_size": 3}})  # its own loan
    asked = record(monkeypatch)
    found = bench.judge(HONEST, own, range(20))
    assert (found.trials, found.failures) == (20, ())
    fills = [message for _, message in asked if isinstance(message, Fill)]
    assert [draw.seed for fill in fills for draw in fill.draws] == list(range(20))
    assert [len(fill.draws) for fill in fills] == [8, 8, 4]
    slots = [[draw.slot for draw in fill.draws] for fill in fills]
    assert [sorted(each) for each in slots[:2]] == [list(range(8))] * 2
    assert len(set(slots[2])) == 4
    checks = [message for _, message in asked if isinstance(message, Check)]
    assert [[call.slot for call in check.calls] for check in checks] == slots
    steps = [message.slot for _, message in asked if isinstance(message, Step)]
    assert steps == [slot for each in slots for slot in each]


def test_a_series_keeps_to_its_pool_where_more_is_lent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And asks for one call after the other."""
    assert bench.judge(HONEST, DECODE, range(2 * broker.JUDGED_SLOTS)).failures == ()
    assert bench._loan is not None
    assert bench._loan.loan.slots == broker.JUDGED_SLOTS
    asked = record(monkeypatch)
    assert bench.evaluate(HONEST, DECODE, iterations=20, trials=0).failure is None
    fills = [message for _, message in asked if isinstance(message, Fill)]
    assert {len(fill.draws) for fill in fills} == {1}
    assert {fill.draws[0].slot for fill in fills} == set(range(broker.SLOTS))
    assert not any(isinstance(message, Lend) for _, message in asked)


SEEDS = [31, 7, 99, 4, 12, 50, 2, 1]

AMONG_OTHERS = [
    ("third_is_wrong", Cause.NUMERIC, 99, 3),
    ("third_drops", Cause.DROPPED_ELEMENT, 99, 3),
    ("third_raises", Cause.UNCLASSIFIED, 99, 3),
    ("third_raises_fourth_crashes", Cause.UNCLASSIFIED, 99, 3),
    ("third_crashes", Cause.CRASH, 99, 3),
    ("second_is_wrong_third_crashes", Cause.NUMERIC, 7, 2),
]


@pytest.mark.parametrize(
    ("route", "cause", "seed", "trials"), AMONG_OTHERS, ids=[route for route, *_ in AMONG_OTHERS]
)
def test_the_call_that_fails_among_others_is_found(
    bench: Bench, route: str, cause: Cause, seed: int, trials: int
) -> None:
    """By its seed, with the verdicts before it, and without a word about those after it."""
    bench.renew()  # calls are counted by process
    found = bench.judge(candidate(route), DECODE, SEEDS)
    assert [(f.cause, f.seed) for f in found.failures] == [(cause, seed)]
    assert found.trials == trials
    assert bench.judge(HONEST, DECODE, SEEDS).failures == ()


@pytest.mark.parametrize("together", [4, 5, 9])
def test_a_drop_is_no_wrong_number_however_many_are_judged_together(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    bench.renew()
    asked = record(monkeypatch)
    found = bench.judge(candidate("third_drops"), DECODE, range(100, 100 + 2 * together))
    fills = [message for _, message in asked if isinstance(message, Fill)]
    assert [len(fill.draws) for fill in fills] == [together, 1]
    (failure,) = found.failures
    assert (failure.cause, failure.seed, found.trials) == (Cause.DROPPED_ELEMENT, 102, 3)
    assert failure.detail == {"output": "output", "dropped": 1, "first": [0, 0, 1, 7]}


def test_candidates_judged_together_get_the_same_draws_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is called on memory filled anew, and is right or wrong by itself, also where one ends
    the process that it shares with the others."""
    bench.renew()
    monkeypatch.setattr(broker, "SLOTS", len(SEEDS))  # all at a time
    names = ["third_is_wrong", "honest", "third_crashes", "later_wrong"]
    asked = record(monkeypatch)
    found = bench.judge_all([candidate(name) for name in names], DECODE, SEEDS)
    causes = [[(f.cause, f.seed) for f in each.failures] for each in found]
    assert causes[:3] == [[(Cause.NUMERIC, 99)], [], [(Cause.CRASH, 99)]]
    assert [each.trials for each in found[:3]] == [3, 8, 3]
    assert found[3].trials == 8  # wrong from its ninth call of a process on
    fills = [
        message for _, message in asked if isinstance(message, Fill) and len(message.draws) > 1
    ]
    assert [[draw.seed for draw in fill.draws] for fill in fills] == [SEEDS] * 4
    assert len({fill.draws for fill in fills}) == 1  # in the same slots: nothing is drawn again
    assert [
        each.failures
        for each in bench.judge_all([HONEST, candidate("torch_recurrent")], DECODE, range(20))
    ] == [(), ()]


def test_nobody_is_blamed_for_a_judge_that_ends_over_another(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the dead judge had lent is gone; the process has to be lent anew."""
    bench.renew()
    ask = Bench._ask_judge
    deaths = 0

    def dying(self: Bench, message: Any, *arguments: Any) -> Any:
        nonlocal deaths
        if isinstance(message, Diagnose) and not deaths:
            deaths += 1
            assert self._judge is not None
            os.kill(self._judge.pid, signal.SIGKILL)
        return ask(self, message, *arguments)

    monkeypatch.setattr(Bench, "_ask_judge", dying)
    honest, wrong = bench.judge_all([HONEST, candidate("third_is_wrong")], DECODE, range(100, 120))
    assert deaths == 1
    assert (honest.trials, honest.failures) == (20, ())
    assert [(f.cause, f.seed) for f in wrong.failures] == [(Cause.NUMERIC, 102)]


@pytest.mark.parametrize("seeds", [[5], [5, 6, 7], list(range(9))], ids=len)
def test_nobody_passes_on_what_another_left_in_memory(bench: Bench, seeds: list[int]) -> None:
    """The second one forgets to fill its scratch, in which the first one's result may lie."""
    workload = DECODE.model_copy(update={"case": {**DECODE.case, "batch_size": 4}})
    bench.renew()
    names = ("by_way_of_scratch", "forgets_its_scratch")
    right, wrong = bench.judge_all([candidate(name) for name in names], workload, seeds)
    assert (right.trials, right.failures) == (len(seeds), ())
    assert wrong.failures


def test_a_wrong_call_among_others_is_repeated_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.renew()
    asked = record(monkeypatch)
    found = bench.judge(candidate("third_is_wrong"), DECODE, SEEDS)
    assert found.failures[0].detail["again"] == "right"
    first, second = [message for _, message in asked if isinstance(message, Fill)]
    assert (len(first.draws), first.is_flipped) == (broker.judged_slots(len(SEEDS)), False)
    assert second == Fill(draws=first.draws[2:3], is_flipped=True)


def test_one_that_hangs_among_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is that of a call, not of all of them."""
    bench.renew()
    monkeypatch.setattr(bench, "policy", POLICY.model_copy(update={"trial_timeout_s": 2.0}))
    found = bench.judge(candidate("third_hangs"), DECODE, SEEDS)
    assert [(f.cause, f.seed) for f in found.failures] == [(Cause.HANG, 99)]
    assert found.failures[0].message == "no answer to 'step' within 2 s"
    assert found.trials == 3


def test_a_judged_series_is_timed_now_and_then(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether one is says nothing of whether its results count."""
    asked = record(monkeypatch)
    for seed in range(40):
        assert bench.judge(HONEST, DECODE, [seed]).failures == ()
    opened = [message.is_timed for _, message in asked if isinstance(message, Open)]
    assert len(opened) == 40
    assert 0 < sum(opened) < 20


def test_a_series_that_cannot_begin_is_nobodys_fault(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recording of a GPU's activity, say; tried again in another process."""
    ask, opens = broker.Seat.ask, 0

    def fails(self: Any, message: Any, *arguments: Any) -> Any:
        nonlocal opens
        answer = ask(self, message, *arguments)
        opens += isinstance(message, Open)
        if isinstance(message, Open) and opens == 1:
            return answer.model_copy(update={"fault": "CUPTI says no"})
        return answer

    monkeypatch.setattr(broker.Seat, "ask", fails)
    found = bench.evaluate(HONEST, DECODE, iterations=4, trials=2)
    assert found.failure is None
    assert [a.message for a in found.attempts] == ["a series could not begin: CUPTI says no"]
    assert found.attempts[0].cause == Cause.HARNESS_BUG


def test_calls_that_nobody_could_judge_are_made_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge ends before its word on the second batch: the first one counts, and each of the
    second once."""
    monkeypatch.setattr(broker, "JUDGED_SLOTS", 8)
    ask, checks = bench._ask_judge, 0

    def ends(message: Any, *arguments: Any) -> Any:
        nonlocal checks
        checks += isinstance(message, Check)
        if isinstance(message, Check) and checks == 2:
            raise Infrastructure(Failure(cause=Cause.HARNESS_BUG, message="once"))
        return ask(message, *arguments)

    monkeypatch.setattr(bench, "_ask_judge", ends)
    asked = record(monkeypatch)
    found = bench.evaluate(HONEST, DECODE, iterations=0, trials=12)
    assert found.failure is None
    assert [a.message for a in found.attempts] == ["once"]
    assert found.trials[0].trials == 12
    fills = [message for _, message in asked if isinstance(message, Fill)]
    seeds = [[draw.seed for draw in fill.draws] for fill in fills]
    assert [len(each) for each in seeds] == [6, 6, 6]
    assert seeds[1] == seeds[2]


def test_a_crash_is_final_where_nobody_could_judge_what_came_before(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = bench._ask_judge

    def ends(message: Any, *arguments: Any) -> Any:
        if isinstance(message, Check):
            raise Infrastructure(Failure(cause=Cause.HARNESS_BUG, message="gone"))
        return ask(message, *arguments)

    bench.renew()
    monkeypatch.setattr(bench, "_ask_judge", ends)
    found = bench.judge(candidate("third_crashes"), DECODE, SEEDS)
    assert [(f.cause, f.seed) for f in found.failures] == [(Cause.CRASH, 99)]
    assert found.trials == 1


def test_a_process_that_ends_leaves_the_verdicts_before_it(bench: Bench) -> None:
    found = bench.judge(candidate("leaves"), DECODE, [11, 12])
    assert [(f.cause, f.seed) for f in found.failures] == [(Cause.CRASH, 11)]


def test_nobody_is_blamed_for_a_process_that_ended_before(bench: Bench) -> None:
    bench.judge(HONEST, DECODE, [1])
    process = bench._seats[0].process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    assert bench.judge(HONEST, DECODE, [1]).failures == ()


def test_adversarial_inputs(bench: Bench) -> None:
    workload = Workload(
        op="gdn_decode", listed="adversarial", case={"name": "huge_state", "seed": 0}
    )
    found = bench.judge(HONEST, workload, [1, 2])
    assert (found.trials, found.failures) == (2, ())


# ---- several ------------------------------------------------------------------------------------


def test_candidates_and_peers_side_by_side(bench: Bench) -> None:
    """What fails drops out, also with its process; the others are timed."""
    routes = ("honest", "wrong", "crashes", "torch_recurrent", "does_not_compile")
    found = bench.interleave([candidate(r) for r in routes], DECODE, iterations=4, peers=PEERS)
    assert [e.candidate for e in found] == [*(candidate(r).id for r in routes), *PEERS]
    by_name = dict(zip((*routes, *PEERS), found, strict=True))
    causes = {name: e.failure.cause for name, e in by_name.items() if e.failure is not None}
    assert causes == {
        "wrong": Cause.NUMERIC,
        "crashes": Cause.CRASH,
        "does_not_compile": Cause.COMPILE,
        "wrong_other": Cause.NUMERIC,
    }
    for name, evaluation in by_name.items():
        assert len(evaluation.blocks) == (name not in causes)
        assert all(len(block.us) == 4 for block in evaluation.blocks)
    # A peer that is off by more than our limit, and by less than a peer's.
    assert 0.0 < by_name["other"].trials[0].worst < 1.0


def test_what_is_hopeless_is_soon_left_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is that of a few calls; peers and the others go on. It is hopeless beside what is
    right, however fast something wrong is."""
    asked = record(monkeypatch)
    routes = ("honest", "dawdles", "torch_recurrent", "idles")
    peers = {"slow": "tuner.tests.faults:slow_other"}
    found = bench.interleave([candidate(r) for r in routes], DECODE, iterations=12, peers=peers)
    honest, dawdles, recurrent, idles, slow = found
    assert [e.failure for e in (honest, dawdles, recurrent, slow)] == [None] * 4
    assert idles.failure is not None
    assert [len(e.blocks[0].us) for e in (honest, dawdles, recurrent, slow)] == [12, 6, 12, 12]
    assert min(dawdles.blocks[0].us) > 50_000
    steps = [message.lane for _, message in asked if isinstance(message, Step)]
    assert steps.count(1) < steps.count(0)
    alone = bench.evaluate(candidate("dawdles"), DECODE, iterations=8, trials=0)
    assert len(alone.blocks[0].us) == 8


def test_a_hopeless_one_comes_back_where_the_best_is_wrong_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside nothing that is right it is not hopeless."""
    monkeypatch.setattr(broker, "CHECKS", 30)
    bench.renew()
    late, dawdles = bench.interleave(
        [candidate("later_wrong"), candidate("dawdles")], DECODE, iterations=30
    )
    assert late.failure is not None
    assert late.failure.cause == Cause.NUMERIC
    assert dawdles.failure is None
    assert len(dawdles.blocks[-1].us) == 30


@pytest.mark.parametrize("what", ["fill", "judge"])
def test_a_diagnosis_that_fails_harms_nobody_else(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The wrong number stands; the others' times are theirs, whether the judge had no memory for
    the repetition or ended over it."""
    ask, is_done = bench._ask_judge, False

    def ends(message: Any, *arguments: Any) -> Any:
        nonlocal is_done
        is_flipped = isinstance(message, Fill) and message.is_flipped
        if not is_done and (is_flipped if what == "fill" else isinstance(message, Diagnose)):
            is_done = True
            if what == "judge":
                assert bench._judge is not None
                bench._judge.kill()
                bench._forget_judge()
            raise Infrastructure(Failure(cause=Cause.HARNESS_BUG, message="once"))
        return ask(message, *arguments)

    monkeypatch.setattr(bench, "_ask_judge", ends)
    routes = ("honest", "torch_recurrent", "wrong")
    honest, recurrent, bad = bench.interleave([candidate(r) for r in routes], DECODE, iterations=6)
    assert is_done
    assert bad.failure is not None
    assert bad.failure.cause == Cause.NUMERIC
    for each in (honest, recurrent):
        assert each.failure is None
        assert len(each.blocks[-1].us) == 6


def test_a_hopeless_one_comes_back_beside_a_peer_alone(bench: Bench) -> None:
    """What was faster turned out wrong, and peers are nobody to be hopeless beside."""
    bench.renew()
    late, dawdles, _ = bench.interleave(
        [candidate("later_wrong"), candidate("dawdles")], DECODE, iterations=20, peers=PEERS_RIGHT
    )
    assert late.failure is not None
    assert dawdles.failure is None
    assert len(dawdles.blocks[-1].us) == 20


def test_what_is_hopeless_was_judged_among_its_timed_calls(bench: Bench) -> None:
    for _ in range(20):
        places = bench._checks(12, 6)
        assert len(places) == broker.CHECKS
        assert min(places) < 6
    assert {len(bench._checks(n, 0)) for n in (0, 1, 2, 9)} == {0, 1, 2}
    with pytest.raises(ValueError, match="greater than 1"):
        Policy(name="p", timer="wall", is_promotable=False, hopeless=0.9)


def test_answers_that_came_before_a_process_ended_count(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it was gone before it was told of the next call."""
    bench.renew()
    put = broker.put

    def slowly(channel: Any, message: Any) -> str:
        nonce = put(channel, message)
        if isinstance(message, Step):
            time.sleep(0.15)
        return nonce

    monkeypatch.setattr(broker, "put", slowly)
    found = bench.judge(candidate("third_crashes"), DECODE, SEEDS)
    assert [(f.cause, f.seed) for f in found.failures] == [(Cause.CRASH, 99)]
    assert found.trials == 3


def test_new_processes_beside_the_same_judge(bench: Bench) -> None:
    def pids() -> tuple[int, int]:
        assert bench.evaluate(HONEST, DECODE, iterations=2, trials=1).failure is None
        candidate, judge = bench._seats[0].process, bench._judge
        assert candidate is not None
        assert judge is not None
        return candidate.pid, judge.pid

    first = pids()
    assert pids() == first
    bench.renew()
    second = pids()
    assert second[0] != first[0]
    assert second[1] == first[1]


def test_a_compiler_that_takes_the_process_along(bench: Bench) -> None:
    pair = [HONEST, candidate("crashes_the_compiler")]
    good, bad = bench.interleave(pair, DECODE, iterations=2)
    assert good.failure is None
    assert len(good.blocks) == 1
    assert bad.failure is not None
    assert bad.failure.cause == Cause.CRASH


def test_a_pair_of_blocks(bench: Bench) -> None:
    other = candidate("torch_recurrent")
    orders = set()
    for number in range(4):
        blocks = bench.pair(HONEST, other, DECODE, number=number, iterations=2)
        assert [block.order for block in blocks] == [0, 1, 2, 3]
        assert {block.number for block in blocks} == {number}
        assert not any(block.discarded for block in blocks)
        for block in blocks:
            assert block.candidate == (HONEST, other)[block.side].id
            assert len(block.us) == 2
        orders.add(tuple(block.side for block in blocks))
    assert orders <= {(0, 1, 1, 0), (1, 0, 0, 1)}
    one, two = (seat.process for seat in bench._seats)
    assert one is not None
    assert two is not None
    assert one.pid != two.pid


def test_a_candidate_against_itself_and_a_peer(bench: Bench) -> None:
    blocks = bench.pair(HONEST, HONEST, DECODE, number=0, iterations=1)
    assert sorted(block.side for block in blocks) == [0, 0, 1, 1]
    bench.interleave([], DECODE, iterations=1, peers=PEERS)
    blocks = bench.pair(HONEST, "other", DECODE, number=0, iterations=1)
    assert {block.candidate for block in blocks} == {HONEST.id, "other"}


def test_a_pair_with_one_that_is_wrong(bench: Bench) -> None:
    with pytest.raises(Rejected, match="numeric") as caught:
        bench.pair(HONEST, candidate("wrong"), DECODE, number=0, iterations=2)
    assert caught.value.exit_code == 5
    assert caught.value.candidate == candidate("wrong").id
    assert caught.value.failure.cause == Cause.NUMERIC


# ---- the machine --------------------------------------------------------------------------------


def test_a_spoilt_block_is_measured_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_guard", Quiet("too hot"))
    found = bench.evaluate(HONEST, DECODE, iterations=2, trials=1)
    assert found.failure is None
    assert [block.discarded for block in found.blocks] == ["too hot", ""]
    assert [a.cause for a in found.attempts] == [Cause.THROTTLED]


def test_a_machine_that_stays_unfit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two more attempts, then a failure that is not the candidate's; in the end none at all."""
    monkeypatch.setattr(bench, "_guard", Quiet(*["too hot"] * 100))
    found = bench.evaluate(HONEST, DECODE, iterations=1, trials=1)
    assert found.failure is not None
    assert found.failure.cause == Cause.THROTTLED
    assert [block.discarded for block in found.blocks] == ["too hot"] * 3
    assert len(found.attempts) == 3
    for _ in range(3):
        bench.evaluate(HONEST, DECODE, iterations=1, trials=0)
    with pytest.raises(Unstable, match="12 of 12 blocks were discarded, expected at most 30%"):
        bench.evaluate(HONEST, DECODE, iterations=1, trials=0)
    assert bench.evaluate(HONEST, DECODE, iterations=0, trials=1).failure is None


def test_a_spoilt_block_spoils_its_pair(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_guard", Quiet("", "too hot"))
    blocks = bench.pair(HONEST, HONEST, DECODE, number=0, iterations=1)
    assert [block.discarded for block in blocks] == ["of a pair: too hot", "too hot"]
    assert len(bench.pair(HONEST, HONEST, DECODE, number=1, iterations=1)) == 4


def test_a_judge_that_ends_is_replaced(bench: Bench) -> None:
    """Its end is no word about the candidate; what was judged before is not judged again."""
    bench.judge(HONEST, DECODE, [1])
    assert bench._judge is not None
    os.kill(bench._judge.pid, signal.SIGKILL)
    found = bench.evaluate(HONEST, DECODE, iterations=2, trials=2)
    assert found.failure is None
    assert [a.cause for a in found.attempts] == [Cause.HARNESS_BUG]
    assert "ended by SIGKILL" in found.attempts[0].message
    os.kill(bench._judge.pid, signal.SIGKILL)
    trials = bench.judge(HONEST, DECODE, [1])  # whoever counts trials tries again by itself
    assert (trials.trials, [f.cause for f in trials.failures]) == (0, [Cause.HARNESS_BUG])


def test_a_wrong_number_is_final_whatever_comes_after_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge ends while the wrong call is repeated, and later while others are timed."""
    ask = bench._ask_judge

    def ends(message: Any, *arguments: Any) -> Any:
        if isinstance(message, Fill) and message.is_flipped:
            raise Infrastructure(Failure(cause=Cause.GPU_LOST, message="gone"))
        return ask(message, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(bench, "_ask_judge", ends)
        found = bench.evaluate(candidate("wrong"), DECODE, iterations=1, trials=2)
    assert found.failure is not None
    assert (found.failure.cause, found.attempts) == (Cause.NUMERIC, ())
    assert found.trials[0].trials == 1

    class Ends(Quiet):
        def read(self) -> Reading:
            monkeypatch.setattr(bench, "_guard", Quiet())
            raise Infrastructure(Failure(cause=Cause.HARNESS_BUG, message="once"))

    monkeypatch.setattr(bench, "_guard", Ends())
    right, wrong = bench.interleave([HONEST, candidate("wrong")], DECODE, iterations=2)
    assert [a.message for a in right.attempts] == ["once"]
    assert right.failure is None
    assert wrong.failure is not None
    assert (wrong.failure.cause, wrong.trials[0].trials) == (Cause.NUMERIC, 1)


@pytest.mark.parametrize(
    ("us", "cause", "words"),
    [
        ((1.0,), Cause.CHEAT_SUSPECT, "times of [1] calls, expected"),
        ((0.0,), Cause.CHEAT_SUSPECT, "not positive"),
        ((None,), Cause.HARNESS_BUG, "times of 0 of 3 calls recorded"),
    ],
)
def test_times_that_cannot_be(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, us: Any, cause: Cause, words: str
) -> None:
    """What comes from a candidate process is believed no further than it can be checked."""
    ask = Seat.ask

    def forged(self: Seat, message: Any, reply: Any, timeout_s: float) -> Any:
        found = ask(self, message, reply, timeout_s)
        if isinstance(found, Collected):
            count = 1 if us == (1.0,) else len(found.us)
            return found.model_copy(update={"us": us * count})
        return found

    monkeypatch.setattr(Seat, "ask", forged)
    found = bench.evaluate(HONEST, DECODE, iterations=3, trials=0)
    assert found.failure is not None
    assert (found.failure.cause, found.blocks) == (cause, ())
    assert words in found.failure.message
    assert len(found.attempts) == (3 if cause.is_infrastructure else 0)


def test_a_fault_that_stays(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workload that cannot be drawn: recorded three times, and no failure of the candidate's."""
    broken = DECODE.model_copy(update={"case": {**DECODE.case, "num_v_heads": 3, "num_q_heads": 2}})
    found = bench.evaluate(HONEST, broken, iterations=1, trials=1)
    assert found.failure is not None
    assert found.failure.cause == Cause.HARNESS_BUG
    assert len(found.attempts) == 1 + POLICY.max_retries
    with pytest.raises(InfrastructureFault, match="harness_bug: judge: ") as caught:
        bench.pair(HONEST, HONEST, broken, number=0, iterations=1)
    assert len(caught.value.attempts) == 1 + POLICY.max_retries


def test_without_the_timer_of_the_policy_nothing_is_timed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "policy", POLICY.model_copy(update={"timer": "cupti"}))
    with pytest.raises(TimerMissing, match="timed by wall, policy 'test' asks for cupti") as caught:
        bench.evaluate(HONEST, DECODE, iterations=1, trials=1)
    assert caught.value.exit_code == 3
    with pytest.raises(TimerMissing):
        bench.pair(HONEST, HONEST, DECODE, number=0, iterations=1)
    with pytest.raises(TimerMissing):
        bench.interleave([HONEST], DECODE, iterations=1)
    assert bench.evaluate(HONEST, DECODE, iterations=0, trials=1).failure is None
    assert bench.judge(HONEST, DECODE, [1]).trials == 1


def test_usage(bench: Bench) -> None:
    with pytest.raises(ValueError, match="is of gdn_decode, the workload of gdn_prefill"):
        bench.judge(HONEST, PREFILL, [1])
    with pytest.raises(ValueError, match="peer 'nobody' is unknown"):
        bench.pair(HONEST, "nobody", DECODE, number=0, iterations=1)
    with pytest.raises(ValueError, match="device 'tpu' is unknown"):
        Bench("tpu", POLICY, seed=1)


# ---- the end ------------------------------------------------------------------------------------


def test_an_interruption_leaves_nothing_half_done(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a candidate is at work: its answer must not come to a later question."""
    bench.judge(HONEST, DECODE, [1])
    process = bench._seats[0].process
    assert process is not None

    def interrupted(timeout_s: float | None = None) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(process._channel, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.judge(HONEST, DECODE, [1])
    assert wait_until_gone(process.pid)
    assert bench.judge(HONEST, DECODE, [1, 2]).trials == 2


def test_processes_end_with_their_broker_and_are_replaced(shared: Bench) -> None:
    """As if it had been killed: nobody tells them, but their connections are closed. What they lent
    ends with them; so does, in another way, what replaced them."""
    shared.judge(HONEST, DECODE, [1])
    processes = [shared._judge, *(seat.process for seat in shared._seats)]
    alive = [process for process in processes if process is not None and process.is_alive]
    files = set(shared._files)
    assert len(alive) >= 2
    assert any(Path(path).exists() for path in files)
    assert shared._nurseries[""] is not None
    for process in alive:
        process._channel.close()
    shared._nurseries[""]._channel.close()
    assert wait_until_gone(*(process.pid for process in alive), shared._nurseries[""]._process.pid)
    assert not any(Path(path).exists() for path in files)
    found = shared.evaluate(HONEST, DECODE, iterations=1, trials=1)
    assert found.failure is None
    (attempt,) = found.attempts
    assert attempt.message.startswith("judge: gone with its nursery")
    assert shared._judge is not None
    assert shared._nurseries[""] is not None
    pids = [shared._judge.pid, shared._nurseries[""]._process.pid]
    pids += [seat.process.pid for seat in shared._seats if seat.process is not None]
    files = set(shared._files)
    shared.close()
    shared.close()
    assert wait_until_gone(*pids)
    assert files
    assert not any(Path(path).exists() for path in files)
