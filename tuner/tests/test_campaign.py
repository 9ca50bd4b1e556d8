"""Whole campaigns over a bench that measures nothing: what they conclude, and that they go on from
wherever they were interrupted."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastkernels.core import dispatch
from fastkernels.core import table as tables
from fastkernels_tuner import controller, emit, gates, plan, policy, promote, sweep
from fastkernels_tuner.campaign import Campaign
from fastkernels_tuner.controller import Controller, OutOfBudget, Worker
from fastkernels_tuner.errors import EvidenceError
from fastkernels_tuner.model import Candidate, Policy, Workload
from fastkernels_tuner.promote import NotPromoted, Unproven
from fastkernels_tuner.stages import STAGES, name_of
from fastkernels_tuner.store import LeaseTaken, Store
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
    """So that what a dead process held runs out soon."""
    monkeypatch.setattr(controller, "TTL_S", 2.0)


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


def go_on(campaign: Campaign, bench: FakeBench, until: float | None = None) -> Campaign:
    """As another process would: nothing in memory is left from before."""
    fresh = Campaign(campaign.store, campaign.id, campaign.folder)
    worker = Worker(campaign.store, "cpu", "CPU", bench, campaign.folder.parent)
    with campaign.store.hold(campaign.id, "test", 60) as lease:
        Controller(fresh, worker, lease, until).run()
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
    assert (campaign.folder / "report.html").read_text().lstrip().startswith("<!")
    store.check(campaign.id)


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
    deadline = time.monotonic() + controller.TTL_S
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


@pytest.fixture
def champion(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], None]]:
    """Makes the table of a campaign that prefers some chunk size the one that serves."""

    def reign(chunk: int) -> None:
        campaign = go_on(begin(store, tmp_path, max_trials=25), FakeBench(prefers(chunk)))
        folder = tmp_path / "reigning"
        shutil.copytree(campaign.folder / "dispatch_tables", folder)
        monkeypatch.setenv("FASTKERNELS_TABLES", str(folder))
        dispatch.reload_tables()

    yield reign
    monkeypatch.undo()
    dispatch.reload_tables()


def test_what_is_faster_twice_takes_over(
    store: Store, tmp_path: Path, champion: Callable[[int], None]
) -> None:
    champion(32)
    campaign = begin(store, tmp_path, max_trials=25)
    assert campaign.spec.champion
    campaign = go_on(campaign, FakeBench(prefers(64), noise=0.002))
    comparisons = campaign.require("confirm")["comparisons"]
    assert {c["decision"] for c in comparisons} == {"promote"}
    assert {done.payload["session"] for done in campaign.done("confirm")} == {1, 2}
    levels = {done.payload["mode"]: done.payload["alpha"] for done in campaign.done("confirm")}
    assert sum(levels.values()) <= campaign.policy.alpha
    assert served(campaign) == {mode: {64} for mode in campaign.operator.spec.modes}


def test_what_is_no_faster_leaves_the_champion(
    store: Store, tmp_path: Path, champion: Callable[[int], None]
) -> None:
    """Half a percent is below what the policy promotes for; a table does not flip over it."""
    champion(32)

    def us(candidate: Candidate, workload: Workload) -> float:
        return 100.0 if candidate.config["chunk_size"] == 32 else 99.5

    campaign = go_on(
        begin(store, tmp_path, max_trials=25, slowdown=0.0), FakeBench(us, noise=0.0005)
    )
    assert {c["decision"] for c in campaign.require("confirm")["comparisons"]} <= {"keep"}
    assert served(campaign) == {mode: {32} for mode in campaign.operator.spec.modes}
