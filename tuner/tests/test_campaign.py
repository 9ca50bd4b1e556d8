"""Whole campaigns over a bench that measures nothing: what they conclude, and that they go on from
wherever they were interrupted."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fastkernels.core import dispatch
from fastkernels.core import table as tables
from fastkernels.core.device import named_device
from fastkernels.errors import ArgumentError
from fastkernels_tuner import controller, emit, evidence, gates, plan, policy, promote, sweep
from fastkernels_tuner.campaign import Campaign
from fastkernels_tuner.cli import campaigns, main
from fastkernels_tuner.controller import Controller, Worker
from fastkernels_tuner.errors import EvidenceError, OutOfBudget
from fastkernels_tuner.measure import Rejected
from fastkernels_tuner.model import Candidate, Cause, Evaluation, Failure, Policy, Workload
from fastkernels_tuner.promote import NotPromoted, Unproven
from fastkernels_tuner.search import SETTLED, Outage, TrialResult
from fastkernels_tuner.space import candidate as make_candidate
from fastkernels_tuner.stages import STAGES, name_of, verify
from fastkernels_tuner.stages import report as report_stage
from fastkernels_tuner.store import LeaseTaken, Store
from fastkernels_tuner.terminal import Terminal
from tuner.tests.fake import ENVIRONMENT, FakeBench, Killed

OP = "gdn_prefill"


def small(**changes: Any) -> Policy:
    return policy.default("cpu").model_copy(
        update={"max_trials": 3, "max_workloads": 2, "max_probes": 2, "buckets": 1, **changes}
    )


def prefers(chunk: int, beyond: int = 10**9, then: int = 0) -> Callable[..., float]:
    """Fastest with `chunk`; from `beyond` tokens on with `then`."""

    def us(candidate: Candidate, workload: Workload) -> float:
        tokens = max(sum(workload.case["lengths"]), 1)
        wanted = then if tokens >= beyond else chunk
        away = abs(int(candidate.config["chunk_size"]).bit_length() - wanted.bit_length())
        return float((100 + tokens) * (1 + 0.2 * away))

    return us


@pytest.fixture(autouse=True)
def _short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what a dead process held runs out soon, and nobody waits for other workers."""
    monkeypatch.setattr(controller, "TTL_S", 2.0)
    monkeypatch.setattr(controller, "PATIENCE_S", 0.0)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as opened:
        yield opened


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Changes of the policy under which this machine's tables could be promoted."""
    monkeypatch.setitem(gates.FACTS, "CPU", gates.Facts(bandwidth=1e15, l2_bytes=0, launch_us=0.1))
    return {"is_promotable": True, "timer": "cupti"}


def begin(store: Store, folder: Path, **changes: Any) -> Campaign:
    environment = ENVIRONMENT.model_copy(update={"timer": changes.get("timer", "wall")})
    spec = plan.make(OP, "cpu", small(**changes), environment, seed=3)
    number = store.create(spec)
    return Campaign(store, number, folder / number)


def bench_of(shipped: dict[str, Any]) -> FakeBench:
    environment = ENVIRONMENT.model_copy(update={"timer": shipped["timer"]})
    return FakeBench(prefers(64), environment=environment)


def go_on(
    campaign: Campaign,
    bench: FakeBench,
    until: float | None = None,
    *,
    second: FakeBench | None = None,
    last: str = "report",
) -> Campaign:
    """As another process would: nothing in memory is left from before. `second`: of another GPU."""
    fresh = Campaign(campaign.store, campaign.id, campaign.folder, until=until)
    worker = Worker(campaign.store, "cpu", "CPU", bench, campaign.folder.parent)
    other = None
    if second is not None:
        fresh.at_hand = (bench.environment.uuid, second.environment.uuid)
        other = Worker(
            campaign.store, "cpu", second.environment.uuid, second, campaign.folder.parent
        )
    with campaign.store.hold(campaign.id, "test", 60) as lease:
        Controller(fresh, worker, lease, other).run(last)
    return fresh


def served(campaign: Campaign) -> dict[str, set[Any]]:
    """Per mode the chunk sizes of the candidate table."""
    emitted = campaign.require("emit")
    text = (campaign.folder / emitted["table"]).read_text()
    table = tables.parse(text, campaign.operator.spec)
    return {
        mode: {r.config["chunk_size"] for r in table.regimes if r.mode == mode}
        for mode in campaign.operator.spec.modes
    }


def test_a_campaign_finds_the_fastest_config(store: Store, tmp_path: Path) -> None:
    campaign = go_on(begin(store, tmp_path, max_trials=25), FakeBench(prefers(64)))
    assert served(campaign) == {mode: {64} for mode in campaign.operator.spec.modes}
    assert all(campaign.conclusion(name_of(stage)) for stage in STAGES)
    assert "64" in (campaign.folder / "report.md").read_text()
    (study, *_) = report_stage.build(campaign).studies
    assert (study.sampler, study.space) == ("TPE", sum(study.trials.values()))  # more than 8
    assert (campaign.folder / "report.html").read_text().lstrip().startswith("<!")
    store.check(campaign.id)


def test_what_a_campaign_costs_is_told_stage_by_stage(store: Store, tmp_path: Path) -> None:
    """While it runs, by `status`, and in the report."""
    told: list[str] = []
    begun = begin(store, tmp_path)
    campaign = Campaign(store, begun.id, begun.folder, told.append)
    worker = Worker(store, "cpu", "CPU", Slow(prefers(64)), begun.folder.parent)
    with store.hold(campaign.id, "test", 60) as lease:
        Controller(campaign, worker, lease).run("report")
    spent = campaign.device_s()
    assert {"search", "compare", "verify"} <= set(spent)
    for stage, seconds in spent.items():
        (line,) = [line for line in told if line.startswith(f"{stage}: ") and "device" in line]
        assert line.startswith(f"{stage}: {seconds:.1f} s on the device, ")
    assert spent["search"] >= 0.2
    shown = CliRunner().invoke(
        main, ["status", campaign.id, "--storage", store.url, "--folder", str(tmp_path)]
    )
    assert shown.exit_code == 0, shown.output
    (line,) = [line for line in shown.output.splitlines() if line.startswith("  search ")]
    assert f"{spent['search']:.1f} s" in line
    total = sum(spent.values())
    assert f"{total:.1f} s on the device: search {spent['search']:.1f}, " in shown.output
    costs = {stage.stage: stage.device_s for stage in report_stage._cost(campaign).stages}
    assert costs == {"fit": 0.0, "confirm": 0.0, **spent}


class Slow(FakeBench):
    """Takes its time."""

    def evaluate(self, *arguments: Any, **options: Any) -> Evaluation:
        time.sleep(0.03)
        return super().evaluate(*arguments, **options)


def test_a_wrong_candidate_never_serves(store: Store, tmp_path: Path) -> None:
    """The fastest one is wrong once in a while, too rarely for the search to see."""
    bench = FakeBench(
        prefers(64), wrong=lambda c, w, seed: c.config["chunk_size"] == 64 and seed % 7 == 3
    )
    campaign = go_on(
        begin(store, tmp_path, max_trials=25, p_max={"low": 0.05, "medium": 0.05, "high": 0.05}),
        bench,
    )
    assert all(64 not in sizes for sizes in served(campaign).values())
    outcomes = campaign.require("verify")["outcomes"].values()
    assert any(each[-1]["kind"] == "fail" for each in outcomes)
    assert (tmp_path / "regressions.jsonl").read_text()


@pytest.mark.parametrize("dies_at", [1, 7, 20])
def test_it_goes_on_after_a_kill(store: Store, tmp_path: Path, dies_at: int) -> None:
    """No job is lost, none counts twice, and the best that was measured serves."""
    campaign = begin(store, tmp_path)
    bench = FakeBench(prefers(256), dies_at=dies_at)
    worker = Worker(store, "cpu", "CPU", bench, tmp_path)
    lease = store.hold(campaign.id, "the one that dies", 0.2)
    with pytest.raises(Killed):
        Controller(Campaign(store, campaign.id, campaign.folder), worker, lease).run()
    _expire(store)
    ended = go_on(campaign, FakeBench(prefers(256)))
    tried = [
        (result["us"], result["candidate"]["config"]["chunk_size"])
        for done in ended.done("search")
        for result in done.result["results"]
        if result["state"] == "complete"
    ]
    assert min(tried)[1] in set.union(*served(ended).values())
    rows = store.jobs(campaign.id)
    assert {row.status for row in rows} == {"done"}
    assert len({row.key for row in rows}) == len(rows)
    store.check(campaign.id)


def test_a_campaign_is_read_away_from_its_gpu(store: Store, tmp_path: Path) -> None:
    """Its table and report can be made where it is brought to."""
    h200 = ENVIRONMENT.model_copy(update={"device": "NVIDIA H200", "arch": "sm90"})
    spec = plan.make(OP, "cpu", small(), h200, seed=3).model_copy(update={"device": "cuda:0"})
    campaign = Campaign(store, store.create(spec), tmp_path)
    assert campaign.info == named_device("h200")
    other = spec.model_copy(update={"environment": h200.model_copy(update={"device": "GTX 480"})})
    with pytest.raises(ArgumentError, match="gtx-480"):
        _ = Campaign(store, store.create(other), tmp_path).info


def test_a_second_controller_is_refused(store: Store, tmp_path: Path) -> None:
    campaign = begin(store, tmp_path)
    with store.hold(campaign.id, "first", 60), pytest.raises(LeaseTaken, match="first"):
        go_on(campaign, FakeBench(prefers(64)))


def test_time_that_is_up_is_no_failure(store: Store, tmp_path: Path) -> None:
    campaign = begin(store, tmp_path)
    with pytest.raises(OutOfBudget) as raised:
        go_on(campaign, FakeBench(prefers(64)), until=0.0)
    assert raised.value.exit_code == 4
    go_on(campaign, FakeBench(prefers(64)))
    assert campaign.conclusion("report")


def test_what_is_measured_is_concluded_whatever_time_it_is(store: Store, tmp_path: Path) -> None:
    campaign = begin(store, tmp_path)
    go_on(campaign, FakeBench(prefers(64)), last="confirm")
    measured = FakeBench(prefers(64))
    go_on(campaign, measured, until=0.0)
    assert (measured.calls, bool(campaign.conclusion("report"))) == (0, True)


def test_time_that_is_up_within_a_verification_loses_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece of a campaign ends between two batches; what these found is not judged again."""
    campaign = begin(store, tmp_path)
    go_on(campaign, FakeBench(prefers(64)), last="fit")
    first, second = FakeBench(prefers(64)), FakeBench(prefers(64))
    with monkeypatch.context() as patch:
        patch.setattr(Campaign, "is_out_of_time", property(lambda self: first.calls >= 20))
        with pytest.raises(OutOfBudget, match="resume it later"):
            go_on(campaign, first)
    kept = sum(e.payload["trials"]["trials"] for e in store.events(campaign.id, verify.TRIALS))
    assert kept > 0
    assert store.lost_s(campaign.id)["verify"] > 0
    ended = go_on(campaign, second, last="verify")
    (done,) = ended.done("verify")
    found = [trials for verdict in done.result["verdicts"] for trials in verdict["trials"]]
    alone = go_on(begin(store, tmp_path / "other"), FakeBench(prefers(64)), last="verify")
    (at_once,) = alone.done("verify")
    assert found == [
        trials for verdict in at_once.result["verdicts"] for trials in verdict["trials"]
    ]
    assert ended.device_s()["verify"] > done.result["device_s"]


@pytest.mark.parametrize("lost_at", [1, 4])
def test_a_lost_gpu_ends_the_search_and_a_resumed_one_tries_everything(
    store: Store, tmp_path: Path, lost_at: int
) -> None:
    campaign = begin(store, tmp_path, max_trials=25)
    bench = FakeBench(prefers(64), lost_at=lost_at)
    with pytest.raises(Outage, match=r"gpu_lost: judge: no CUDA device.*resume") as raised:
        go_on(campaign, bench)
    assert raised.value.exit_code == 3
    assert bench.calls < 20  # of 25 trials for each of six studies
    assert {row.status for row in store.jobs(campaign.id)} == {"queued"}
    ended = go_on(campaign, FakeBench(prefers(64)))
    for done in ended.done("search"):
        results = [TrialResult(**result) for result in done.result["results"]]
        learnt = [r.candidate.id for r in results if r.state in SETTLED]
        assert len(set(learnt)) == len(learnt)
        assert {r.candidate.id for r in results} == set(learnt)
    assert served(ended) == {mode: {64} for mode in ended.operator.spec.modes}


def test_a_cpu_table_is_never_promoted(store: Store, tmp_path: Path) -> None:
    campaign = go_on(begin(store, tmp_path), FakeBench(prefers(64)))
    with pytest.raises(NotPromoted, match="never shipped"):
        promote.require_promotable(campaign, campaign.policy)


def test_a_changed_policy_authorises_nothing(
    store: Store, tmp_path: Path, shipped: dict[str, Any]
) -> None:
    campaign = go_on(begin(store, tmp_path, **shipped), bench_of(shipped))
    with pytest.raises(EvidenceError, match="judged under the policy"):
        promote.require_promotable(campaign, small(**shipped, alpha=0.01))
    promote.require_promotable(campaign, campaign.policy)


@pytest.mark.parametrize(
    ("faults", "gate"),
    [({"is_random": True}, "determinism"), ({"us": lambda candidate, workload: 0.05}, "floor")],
)
def test_a_gate_stops_a_promotion(
    store: Store, tmp_path: Path, shipped: dict[str, Any], faults: dict[str, Any], gate: str
) -> None:
    bench = bench_of(shipped)
    for name, value in faults.items():
        setattr(bench, name, value)
    campaign = go_on(begin(store, tmp_path, **shipped), bench)
    with pytest.raises(Unproven, match=gate):
        promote.require_promotable(campaign, campaign.policy)


def _expire(store: Store) -> None:
    """What the dead process held runs out."""
    deadline = time.monotonic() + controller.TTL_S + 60  # a busy machine looks late
    while store.recover(3) == [] and any(
        row.status == "running" for c in store.campaigns() for row in store.jobs(c.id)
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_too_few_trials_are_no_pass(store: Store, tmp_path: Path, shipped: dict[str, Any]) -> None:
    """Time that ends before the bound holds: NeedMore, and no promotion."""
    campaign = go_on(begin(store, tmp_path, **shipped, verify_s=0.0), bench_of(shipped))
    assert campaign.require("verify")["unproven"]
    with pytest.raises(Unproven) as raised:
        promote.require_promotable(campaign, campaign.policy)
    assert raised.value.exit_code == 6


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "checkout" / "dispatch_tables").mkdir(parents=True)
    return tmp_path / "checkout"


def test_a_promotion_is_whole_or_not_at_all(
    store: Store,
    tmp_path: Path,
    checkout: Path,
    shipped: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed between its two files it is taken back; ended, `emit` gives the same table again."""
    campaign = go_on(begin(store, tmp_path, **shipped), bench_of(shipped))
    paths = promote.targets(campaign, checkout)
    paths["table"].parent.mkdir(parents=True)
    paths["table"].write_text("the old one")
    replace, calls = os.replace, []

    def dies(source: Any, target: Any) -> None:
        if Path(target) == paths["table"]:
            raise Killed
        calls.append(target)
        replace(source, target)

    with store.hold(campaign.id, "test", 60) as lease:
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", dies)
            with pytest.raises(Killed):
                promote.install(campaign, lease, paths)
        assert paths["evidence"].exists()
        assert promote.repair(campaign, lease) == "undone"
        assert not paths["evidence"].exists()
        assert paths["table"].read_text() == "the old one"
        assert promote.repair(campaign, lease) == ""
        promote.install(campaign, lease, paths)
        assert promote.repair(campaign, lease) == ""
    assert emit.render(sweep.draft(paths["evidence"])) == paths["table"].read_text()
    assert sorted(p.name for p in paths["table"].parent.iterdir()) == [paths["table"].name]


@pytest.fixture(scope="module")
def reigning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables of a campaign that preferred chunks of 32."""
    folder = tmp_path_factory.mktemp("reigning")
    with Store.open(f"sqlite:///{folder / 'store.db'}") as store:
        campaign = begin(store, folder, max_trials=25)
        go_on(campaign, FakeBench(prefers(32)), last="emit")
    return campaign.folder / "dispatch_tables"


@pytest.fixture
def _champion(reigning: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """They serve."""
    monkeypatch.setenv("FASTKERNELS_TABLES", str(reigning))
    dispatch.reload_tables()
    yield
    monkeypatch.undo()
    dispatch.reload_tables()


@pytest.mark.usefixtures("_champion")
def test_what_is_faster_twice_takes_over(store: Store, tmp_path: Path) -> None:
    campaign = begin(store, tmp_path, max_trials=25)
    assert campaign.spec.champion
    campaign = go_on(campaign, FakeBench(prefers(64), noise=0.002))
    comparisons = campaign.require("confirm")["comparisons"]
    assert {c["decision"] for c in comparisons} == {"promote"}
    assert {done.payload["session"] for done in campaign.done("confirm")} == {1, 2}
    levels = {done.payload["mode"]: done.payload["alpha"] for done in campaign.done("confirm")}
    assert sum(levels.values()) <= campaign.policy.alpha
    assert served(campaign) == {mode: {64} for mode in campaign.operator.spec.modes}


PROBED = {"max_trials": 25, "max_workloads": 8, "max_probes": 20, "probe_rounds": 2}


@pytest.mark.parametrize("dies_at", [3, 7])
def test_an_interrupted_round_of_probes_is_ended_before_the_next(
    store: Store, tmp_path: Path, dies_at: int
) -> None:
    """Else the next is planned from half of its results, and what is left is measured twice."""
    us = prefers(64, beyond=20, then=512)
    campaign = begin(store, tmp_path, **PROBED | {"max_probes": 8})
    go_on(campaign, FakeBench(us), last="compare")
    with pytest.raises(Killed):
        go_on(campaign, FakeBench(us, dies_at=dies_at), last="fit")
    _expire(store)
    ended = go_on(campaign, FakeBench(us), last="fit")
    assert {done.payload["round"] for done in ended.done("fit")} == {1, 2}
    measured = [(w.id, c.id) for w, c, _ in evidence.evaluations(ended)]
    assert len(set(measured)) == len(measured)


@pytest.mark.parametrize(("best_from", "decisions"), [(22, {"promote"}), (20, set())])
def test_a_gain_beside_a_boundary_is_confirmed_and_taken(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    best_from: int,
    decisions: set[str],
) -> None:
    """The champion is the best on every listed workload; its boundary, where nobody had looked,
    leaves 21 tokens to the wrong side."""
    us = prefers(64, beyond=best_from, then=512)
    first = begin(store, tmp_path, **PROBED | {"max_probes": 0})
    go_on(first, FakeBench(us), last="emit")
    monkeypatch.setenv("FASTKERNELS_TABLES", str(first.folder / "dispatch_tables"))
    dispatch.reload_tables()
    try:
        second = go_on(begin(store, tmp_path, **PROBED), FakeBench(us, noise=0.002), last="emit")
        assert {c["decision"] for c in second.require("confirm")["comparisons"]} == decisions
        compared = [w["listed"] for d in second.done("confirm") for w, _, _ in d.payload["pairs"]]
        assert set(compared) == ({"gap"} if decisions else set())
        emitted = second.folder / second.require("emit")["table"]
        table = tables.parse(emitted.read_text(), second.operator.spec)
        lasts = {r.axes["total_seq_len"][1] for r in table.regimes if r.config["chunk_size"] == 64}
        assert lasts == {best_from - 1 if decisions else 20}
    finally:
        monkeypatch.undo()
        dispatch.reload_tables()


@pytest.mark.usefixtures("_champion")
def test_what_the_sweep_shows_no_gain_of_is_not_compared(store: Store, tmp_path: Path) -> None:
    """Two configs that are alike: which one fits is chance, and a session would say so slowly."""

    def us(candidate: Candidate, workload: Workload) -> float:
        return 100.0 if candidate.config["chunk_size"] in (32, 64) else 200.0

    campaign = begin(store, tmp_path, max_trials=25)
    campaign = go_on(campaign, FakeBench(us), last="emit")
    assert campaign.done("confirm") == []
    assert served(campaign) == {mode: {32} for mode in campaign.operator.spec.modes}
    for comparison in campaign.require("confirm")["comparisons"]:
        assert comparison["decision"] == "keep"
        assert "0.00%: not compared" in comparison["reason"]


@pytest.mark.usefixtures("_champion")
def test_what_is_no_faster_leaves_the_champion(store: Store, tmp_path: Path) -> None:
    """Half a percent is below what the policy promotes for; a table does not flip over it."""

    def us(candidate: Candidate, workload: Workload) -> float:
        return 100.0 if candidate.config["chunk_size"] == 32 else 99.5

    campaign = go_on(
        begin(store, tmp_path, max_trials=25, slowdown=0.0), FakeBench(us, noise=0.0005)
    )
    assert {c["decision"] for c in campaign.require("confirm")["comparisons"]} <= {"keep"}
    assert served(campaign) == {mode: {32} for mode in campaign.operator.spec.modes}


@pytest.mark.usefixtures("_champion")
@pytest.mark.parametrize("seed", range(3))
def test_noise_between_equals_stops_no_campaign(store: Store, tmp_path: Path, seed: int) -> None:
    """What serves today is chosen again, though its rival was faster by less than is known."""

    def us(candidate: Candidate, workload: Workload) -> float:
        return 100.0 if candidate.config["chunk_size"] in (32, 64) else 200.0

    bench = FakeBench(us, noise=0.002, rng=random.Random(seed))
    campaign = go_on(begin(store, tmp_path, max_trials=25), bench, last="emit")
    assert all(sizes <= {32, 64} for sizes in served(campaign).values())


@pytest.mark.usefixtures("_champion")
@pytest.mark.parametrize("wrong_from", [0, 100])
def test_a_champion_that_is_wrong_goes_without_a_comparison(
    store: Store, tmp_path: Path, wrong_from: int
) -> None:
    """However fast it is. Seen when it is compared, or, of some draws, when it is verified; then
    what takes its place is verified in turn."""
    judged = set()
    table, _ = dispatch.find_table(plan.operator_of(OP), named_device("cpu"))
    assert table is not None
    (champion,) = {str(make_candidate(OP, r.route, r.config)) for r in table.regimes}

    def wrong(candidate: Candidate, workload: Workload, seed: int) -> bool:
        if seed >= 100:
            judged.add(str(candidate))
        return str(candidate) == champion and seed >= wrong_from

    bench = FakeBench(prefers(32), wrong=wrong)
    campaign = go_on(begin(store, tmp_path, max_trials=25), bench, last="emit")
    table = tables.parse(
        (campaign.folder / campaign.require("emit")["table"]).read_text(), campaign.operator.spec
    )
    emitted = {str(make_candidate(OP, r.route, r.config)) for r in table.regimes}
    assert emitted <= judged - {champion}
    assert campaign.require("verify")["unproven"] == []
    assert campaign.done("confirm") == []
    for comparison in campaign.require("confirm")["comparisons"]:
        assert comparison["decision"] == "promote"
        assert "what serves today is wrong" in comparison["reason"]


@pytest.mark.usefixtures("_champion")
def test_what_is_wrong_in_a_session_changes_nothing(store: Store, tmp_path: Path) -> None:
    """Also where nothing was compared: it was trusted everywhere until then."""
    bench = FakeBench(prefers(64), noise=0.002)
    pair = bench.pair

    def rejects(a: Candidate, b: Candidate, workload: Workload, **options: Any) -> Any:
        if workload.build().mode == "inplace":
            failure = Failure(cause=Cause.NUMERIC, message="off", workload=workload.id)
            raise Rejected(a.id, failure)
        return pair(a, b, workload, **options)

    bench.pair = rejects  # type: ignore[method-assign]
    campaign = go_on(begin(store, tmp_path, max_trials=25), bench, last="emit")
    decisions = {c["decision"] for c in campaign.require("confirm")["comparisons"]}
    assert decisions == {"reject"}
    assert served(campaign) == {mode: {32} for mode in campaign.operator.spec.modes}


@pytest.mark.usefixtures("_champion")
def test_a_table_that_changed_meanwhile_is_no_champion(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = begin(store, tmp_path, max_trials=25)
    go_on(campaign, FakeBench(prefers(64)), last="fit")
    monkeypatch.setenv("FASTKERNELS_TABLES", str(tmp_path / "nothing"))
    dispatch.reload_tables()
    with pytest.raises(EvidenceError, match="changed since the campaign began"):
        go_on(campaign, FakeBench(prefers(64)))


# ---- two GPUs -----------------------------------------------------------------------------------

HERE, THERE = ENVIRONMENT.uuid, "there"


def there(us: Callable[..., float], **options: Any) -> FakeBench:
    """Another GPU of the same product."""
    environment = ENVIRONMENT.model_copy(update={"uuid": THERE})
    return FakeBench(us, environment=environment, noise=0.002, **options)


def sessions(campaign: Campaign) -> dict[str, list[str]]:
    """Per mode the GPUs of the sessions, in order."""
    return {
        comparison["mode"]: [session["gpu"] for session in comparison["sessions"]]
        for comparison in campaign.require("confirm")["comparisons"]
    }


def evidence_of(campaign: Campaign) -> Any:
    return json.loads((campaign.folder / campaign.require("emit")["evidence"]).read_text())


@pytest.mark.usefixtures("_champion")
@pytest.mark.parametrize(
    ("chunk", "decision", "reason"),
    [
        (64, "promote", "gain"),
        (32, "inconclusive", "faster on here, slower on there"),
        (45, "keep", "gain"),  # as far from either: a tie
    ],
)
def test_a_second_gpu_has_to_confirm(
    store: Store,
    tmp_path: Path,
    chunk: int,
    decision: str,
    reason: str,
) -> None:
    second = there(lambda c, w: 100.0 if chunk == 45 else prefers(chunk)(c, w))
    campaign = go_on(
        begin(store, tmp_path, max_trials=25),
        FakeBench(prefers(64), noise=0.002),
        second=second,
        last="emit",
    )
    modes = campaign.operator.spec.modes
    assert sessions(campaign) == {mode: [HERE, THERE] for mode in modes}
    assert served(campaign) == {mode: {64 if decision == "promote" else 32} for mode in modes}
    found = campaign.require("confirm")
    assert found["gpus"] == sorted([HERE, THERE])
    for comparison in found["comparisons"]:
        assert comparison["decision"] == decision
        assert reason in comparison["reason"]
        first, other = (session["gain"] for session in comparison["sessions"])
        assert first > 0.1
        assert (other > 0.1) == (decision == "promote")
    assert evidence_of(campaign)["confirmation"] == {
        "gpus": found["gpus"], "comparisons": found["comparisons"],
    }  # fmt: skip
    assert {row.device for row in store.jobs(campaign.id) if row.kind != "confirm"} == {"CPU"}
    if decision == "promote":
        report_stage.write(campaign)
        report = (campaign.folder / "report.md").read_text()
        assert "Each confirmation ran on another GPU" in report
        assert f"| `{HERE}` |" in report
        assert f"| `{THERE}` |" in report


@pytest.mark.usefixtures("_champion")
def test_one_gpu_is_said_to_be_one(store: Store, tmp_path: Path) -> None:
    campaign = begin(store, tmp_path, max_trials=25)
    campaign = go_on(campaign, FakeBench(prefers(64), noise=0.002))
    assert sessions(campaign) == {mode: [HERE, HERE] for mode in campaign.operator.spec.modes}
    assert evidence_of(campaign)["confirmation"]["gpus"] == [HERE]
    assert "no other one of the product took part" in (campaign.folder / "report.md").read_text()


@pytest.mark.usefixtures("_champion")
def test_the_command_uses_a_second_gpu_at_hand(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def open_bench(device: str, policy: Policy, *, seed: int) -> FakeBench:
        opened.append((device, seed))
        return there(prefers(64))

    monkeypatch.setattr(campaigns, "Bench", open_bench)
    monkeypatch.setattr(campaigns, "uuid_of", lambda device: THERE)
    campaign = begin(store, tmp_path, max_trials=25)
    bench: Any = FakeBench(prefers(64), noise=0.002)
    campaign = campaigns.drive_to(
        "confirm", store, campaign.id, bench, tmp_path, None, {}, Terminal(True), "cuda:1"
    )
    assert opened == [("cuda:1", 3)]
    assert sessions(campaign) == {mode: [HERE, THERE] for mode in campaign.operator.spec.modes}


@pytest.mark.usefixtures("_champion")
def test_a_second_gpu_that_is_gone_is_not_waited_for(store: Store, tmp_path: Path) -> None:
    """Nor is there a second session twice, whatever GPUs there are when the campaign goes on."""
    campaign = begin(store, tmp_path, max_trials=25)
    bench = FakeBench(prefers(64), noise=0.002)
    with pytest.raises(Killed):
        go_on(campaign, bench, second=there(prefers(64), dies_at=1))
    _expire(store)
    campaign = go_on(campaign, bench, last="emit")
    confirmed = [row for row in store.jobs(campaign.id) if row.kind == "confirm"]
    modes = campaign.operator.spec.modes
    assert [row.device for row in confirmed] == ["CPU"] * len(modes) + [THERE] * len(modes)
    assert sessions(campaign) == {mode: [HERE, HERE] for mode in modes}
    assert evidence_of(campaign)["confirmation"]["gpus"] == [HERE]


@pytest.mark.usefixtures("_champion")
def test_a_worker_on_another_gpu_confirms(
    store: Store,
    tmp_path: Path,
    shipped: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The controller knows of it by the jobs that it did, and what both measured is promoted."""
    monkeypatch.setattr(controller, "PATIENCE_S", 60.0)
    campaign = begin(store, tmp_path, max_trials=25, **shipped)
    environment = ENVIRONMENT.model_copy(update={"timer": shipped["timer"]})
    took_part, over = threading.Event(), threading.Event()

    def here(candidate: Candidate, workload: Workload) -> float:
        assert took_part.wait(60)
        return prefers(64)(candidate, workload)

    def elsewhere(candidate: Candidate, workload: Workload) -> float:
        took_part.set()
        return prefers(64)(candidate, workload)

    def work() -> None:
        bench = FakeBench(
            elsewhere, environment=environment.model_copy(update={"uuid": THERE}), noise=0.002
        )
        with Store.open(store.url) as own:
            worker = Worker(own, "cpu", "CPU", bench, tmp_path)
            while not over.is_set():
                if not worker.once():
                    time.sleep(0.05)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        campaign = go_on(
            campaign, FakeBench(here, environment=environment, noise=0.002), last="emit"
        )
    finally:
        over.set()
        thread.join()
    assert {frozenset(gpus) for gpus in sessions(campaign).values()} == {frozenset({HERE, THERE})}
    assert {c["decision"] for c in campaign.require("confirm")["comparisons"]} == {"promote"}
    promote.require_promotable(campaign, campaign.policy)
    store.check(campaign.id)
