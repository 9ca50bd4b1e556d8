"""Campaigns of scripted agents to their end, with real gates and a fake timer: what is promoted,
what is not, and that they go on from wherever they were killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastkernels_tuner import gates
from fastkernels_tuner.agent import policy as constitutions
from fastkernels_tuner.agent.backends import GivenUp, Scripted, Task, Turn
from fastkernels_tuner.agent.memory import Memory
from fastkernels_tuner.agent.workspace import PLAN
from fastkernels_tuner.campaign import Campaign
from fastkernels_tuner.controller import StageFailed
from fastkernels_tuner.errors import OutOfBudget
from fastkernels_tuner.store import DiskFull, LeaseTaken, Store
from tuner.tests.agents import (
    FILES,
    NAME,
    FakeLab,
    begin,
    decisions,
    edits,
    ending,
    go_on,
    history,
    kernel,
    opened,
    plan_text,
    script,
    small,
)
from tuner.tests.fake import Killed


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with opened(tmp_path) as made:
        yield made


def test_what_is_faster_and_right_is_promoted_and_nothing_else(
    store: Store, tmp_path: Path
) -> None:
    campaign = begin(store, tmp_path)
    said = [
        edits("us=0.8"),
        edits("us=0.8 noise"),
        edits("us=1.2"),
        edits("us=0.5 wrong=0.4"),
        edits("us=0.5 random=1"),
        edits("us=0.6"),
    ]
    why = go_on(campaign, script(*said), rounds=6)
    assert why == "the rounds are over: 6"
    assert decisions(campaign) == [
        ("promote_global", "faster"),
        ("archive", "not_faster"),
        ("archive", "not_faster"),
        ("reject", "numeric"),
        ("reject", "nondeterministic"),
        ("promote_global", "faster"),
    ]
    found = history(campaign)
    gains = [d.gain for d in found.decisions]
    assert gains[0] == pytest.approx(0.2, abs=0.02)
    assert gains[5] == pytest.approx(0.25, abs=0.02)
    assert found.account.spent_usd == 3.0
    assert (campaign.folder / "kernel" / NAME).read_text() == kernel("us=0.6")
    summary = (campaign.folder / "summary.md").read_text()
    assert "| 4 | us=0.5 wrong=0.4 | bytes |  | reject | numeric: off |" in summary
    assert "+# fake: us=0.8" in (campaign.folder / "experiments/exp_001/change.diff").read_text()
    assert "harden: pass" in (campaign.folder / "experiments/exp_006/bench.log").read_text()
    assert "(exp_004)" in (campaign.folder / "LESSONS.md").read_text()
    store.check(campaign.id)


def test_a_kernel_that_is_wrong_in_15_of_1000_draws_is_never_promoted(
    store: Store, tmp_path: Path
) -> None:
    """Three trials would miss it 19 times of 20, and nothing washes it clean later."""
    rules = small(p_max={"low": 0.01, "medium": 0.01, "high": 0.00334})
    campaign = begin(store, tmp_path, rules=rules)
    again = edits("us=0.5 wrong=0.015", more="\n")
    go_on(campaign, script(edits("us=0.5 wrong=0.015"), again), rounds=2)
    assert decisions(campaign) == [("reject", "numeric")] * 2
    first, second = history(campaign).experiments
    assert "harden" in first.levels
    assert list(second.levels) == ["quick"] or "harden" in second.levels
    assert (tmp_path / "regressions.jsonl").read_text()


def test_what_wins_in_one_mode_alone_is_promoted_there(store: Store, tmp_path: Path) -> None:
    campaign = begin(store, tmp_path)
    go_on(campaign, script(edits("us=1.3 us_pool=0.5"), edits("us=0.9 us_pool=0.5")), rounds=2)
    first, second = history(campaign).decisions
    regimes = {regime.id: regime.mode for regime in campaign.spec.regimes}
    assert (first.choice, {regimes[r] for r in first.regimes}) == ("promote_dispatch", {"pool"})
    assert second.choice == "promote_global"
    assert {regimes[r] for r in second.regimes} == set(regimes.values())
    store.check(campaign.id)


def test_declared_knobs_are_searched_with_the_change_in_place(store: Store, tmp_path: Path) -> None:
    campaign = begin(store, tmp_path)
    said = "us=0.95 us_chunk_32=0.7 us_chunk_64=0.9"
    known = edits(said, parameters={"chunk_size": (32, 64)})
    unknown = edits("us=0.5", parameters={"tile": (32, 64)})
    illegal = edits("us=0.5 ", parameters={"chunk_size": (0, 64)})
    go_on(campaign, script(known, unknown, illegal), rounds=3)
    assert decisions(campaign) == [
        ("promote_global", "faster"), ("reject", "static_ban"), ("reject", "static_ban"),
    ]  # fmt: skip
    promoted, *rejected = history(campaign).decisions
    assert promoted.config == {"chunk_size": 32, "seqs_per_batch": 32}
    assert promoted.gain == pytest.approx(0.335, abs=0.02)
    assert "'tile'" in rejected[0].message
    assert any(lesson.kind == "constant" for lesson in history(campaign).lessons)


def test_an_agent_that_reaches_for_the_harness_is_refused(store: Store, tmp_path: Path) -> None:
    campaign = begin(store, tmp_path)
    faster: dict[str, str | None] = {NAME: kernel("us=0.5")}
    script_ = script(
        Scripted(files={**faster, PLAN: plan_text(), "tuner/src/fastkernels_tuner/gates.py": ""}),
        Scripted(files={**faster, PLAN: plan_text(), "context/reference.py": "x = 1\n"}),
        Scripted(files=faster),
        Scripted(files={**faster, PLAN: "hypothesis = 1"}),
        edits("us=0.5", more="import time\n"),
        edits("us=0.5", more="_kept = {}\n"),
    )
    strict = constitutions.default().model_copy(update={"wall": 10, "window": 10})
    go_on(campaign, script_, rounds=6, constitution=strict)
    assert decisions(campaign) == [("reject", "static_ban")] * 6
    reasons = [d.message for d in history(campaign).decisions]
    for reason, words in zip(
        reasons, ("gates.py", "read-only", "missing", "as asked for", "'time'", "container"),
        strict=True,
    ):  # fmt: skip
        assert words in reason
    assert not list(campaign.folder.glob("workspace/*"))


def test_an_agent_that_only_talks_is_given_up(store: Store, tmp_path: Path) -> None:
    campaign = begin(store, tmp_path)
    prose = Scripted(said="Shall I go on?", cost_usd=0.1)
    with pytest.raises(GivenUp, match="3 turns"):
        go_on(campaign, script(prose, Scripted(failure="status 500"), prose, edits("us=0.5")))
    found = history(campaign)
    assert (len(found.experiments), found.decisions, found.turns) == (1, (), 3)
    assert found.experiments[0].state == "reserved"


def test_the_end_of_the_money_is_the_end(store: Store, tmp_path: Path) -> None:
    """No turn begins that might cost more than is left; with more money it goes on."""
    campaign = begin(store, tmp_path, limit_usd=1.7)
    turns = script(edits("us=0.9"), edits("us=1.1"), edits("us=1.2"))
    with pytest.raises(OutOfBudget, match=r"\$1\.00 of \$1\.70"):
        go_on(campaign, turns)
    assert len(decisions(campaign)) == 2
    assert history(campaign).account.spent_usd == 1.0


def test_the_end_of_the_time_and_of_the_device_is_the_end(store: Store, tmp_path: Path) -> None:
    campaign = begin(store, tmp_path)
    seconds = iter(range(10**6))
    with pytest.raises(OutOfBudget, match="used up"):
        go_on(campaign, script(edits("us=0.9")), until=0.5, clock=lambda: float(next(seconds)))
    assert decisions(campaign) == []
    with pytest.raises(OutOfBudget, match="on the device"):
        go_on(
            campaign, script(edits("us=0.9"), edits("us=0.5")), max_device_s=1.0,
            clock=lambda: float(next(seconds)),
        )  # fmt: skip
    assert decisions(campaign) == [("promote_global", "faster")]


def test_an_experiment_that_takes_too_long_is_archived(store: Store, tmp_path: Path) -> None:
    campaign = begin(store, tmp_path)
    hours = iter(range(10**6))
    go_on(campaign, script(edits("us=0.5")), rounds=1, clock=lambda: 3600.0 * next(hours))
    assert decisions(campaign) == [("archive", "over_budget")]


def test_without_a_sandbox_nothing_is_promoted(store: Store, tmp_path: Path) -> None:
    campaign = begin(store, tmp_path, is_safe=False)
    go_on(campaign, script(edits("us=0.5")), rounds=1)
    assert decisions(campaign) == [("archive", "unsandboxed")]


def test_a_policy_that_ships_needs_every_gate(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a known floor nothing is proven; below it something is wrong."""
    rules = small(is_promotable=True, timer="cupti")
    campaign = begin(store, tmp_path, rules=rules)
    go_on(campaign, script(edits("us=0.5")), rounds=1)
    assert decisions(campaign) == [("archive", "unproven")]
    assert "floor" in history(campaign).decisions[0].message
    facts = gates.Facts(bandwidth=1e15, l2_bytes=0, launch_us=700.0)
    monkeypatch.setitem(gates.FACTS, "CPU", facts)
    go_on(campaign, script(edits(""), edits("us=0.51"), edits("us=0.7")), rounds=3)
    assert decisions(campaign)[1:] == [("reject", "cheat_suspect"), ("promote_global", "faster")]


def test_what_was_made_before_is_not_measured_again(store: Store, tmp_path: Path) -> None:
    campaign = begin(store, tmp_path)
    lab = FakeLab(noise=0.002)
    go_on(campaign, script(edits("us=1.2"), edits("us=1.2", family="other")), rounds=2, lab=lab)
    assert decisions(campaign) == [("archive", "not_faster"), ("reject", "repetition")]
    assert "exp_001" in history(campaign).decisions[1].message


# ---- critics ------------------------------------------------------------------------------------


class Recording:
    """A backend that keeps what it saw."""

    name, ceiling_usd = "recording", 1.0

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files
        self.seen: list[dict[str, str]] = []

    def turn(self, task: Task) -> Turn:
        self.seen.append(
            {
                path.relative_to(task.folder).as_posix(): path.read_text()
                for path in task.folder.rglob("*")
                if path.is_file()
            }
        )
        for name, text in self.files.items():
            (task.folder / name).unlink(missing_ok=True)
            (task.folder / name).write_text(text)
        return Turn(backend=self.name, cost_usd=0.25)


SLOW = [edits(f"us=1.{n}", more=f"y{n} = {n}\n", hypothesis=f"belief {n}") for n in range(1, 9)]


def test_a_critic_sees_measurements_and_its_plan_is_carried_out(
    store: Store, tmp_path: Path
) -> None:
    campaign = begin(store, tmp_path)
    critic = Recording({PLAN: plan_text(change="from the critic", family="rewrite")})
    follows = Scripted(
        files={NAME: kernel("us=0.5")}, cost_usd=0.5
    )  # by the plan that it was given
    turns = script(*SLOW[:5], SLOW[5], follows)
    go_on(campaign, turns, critic=critic, rounds=6)
    assert decisions(campaign) == [("archive", "not_faster")] * 5 + [("promote_global", "faster")]
    (seen,) = critic.seen
    assert "plateau" in seen["TASK.md"]
    assert "belief" not in json.dumps(seen)
    assert "Missing fundamental technique" in seen["diagnoses.md"]
    assert "experiments/exp_003/bench.log" in seen
    found = history(campaign)
    assert found.experiments[5].reserved.by == "critic"
    plan = found.experiments[5].plan
    assert plan is not None
    assert plan.change == "from the critic"
    assert found.account.spent_usd == pytest.approx(5 * 0.5 + 0.25 + 0.5)


def test_a_critic_that_edits_is_ignored_and_the_ladder_ends(store: Store, tmp_path: Path) -> None:
    """The same window of failures again and again: critic, another backend, a new beginning, old
    lessons, the end."""
    campaign = begin(store, tmp_path)
    quick = constitutions.default().model_copy(update={"window": 2, "wall": 9})
    critic = Recording({NAME: "x = 1\n", PLAN: plan_text()})
    other = Recording({})
    lines: list[str] = []
    campaign.say = lines.append
    slow = [edits(f"us=1.{n}", more=f"y{n} = {n}\n") for n in range(10, 40)]
    with pytest.raises(GivenUp):  # the other backend has nothing to say
        go_on(
            campaign, script(*slow), critic=critic, others=(other,), rounds=40, constitution=quick
        )
    assert len(critic.seen) == 2
    assert len(other.seen) == 3
    found = history(campaign)
    assert all("read-only" in ended.refused for ended in found.critics)
    assert all(each.reserved.by == "optimiser" for each in found.experiments)


def test_the_ladder_has_an_end(store: Store, tmp_path: Path) -> None:
    campaign = begin(store, tmp_path)
    quick = constitutions.default().model_copy(update={"window": 2, "wall": 9})
    slow = [edits(f"us=1.{n}", more=f"y{n} = {n}\n") for n in range(10, 40)]
    why = go_on(
        campaign, script(*slow), critic=Recording({PLAN: plan_text()}), rounds=40,
        constitution=quick,
    )  # fmt: skip
    assert "nothing on the ladder is left" in why
    assert len(history(campaign).critics) == 4


# ---- crashes ------------------------------------------------------------------------------------

CAMPAIGN = (
    edits("us=0.8"),
    Scripted(said="hm", cost_usd=0.1),
    edits("us=0.5 wrong=0.4"),
    edits("us=0.7", more="import time\n"),
    edits("us=1.3 us_pool=0.5"),
    edits("us=0.75", parameters={"chunk_size": (64,)}),
)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    with opened(folder) as made:
        campaign = begin(made, folder)
        go_on(campaign, script(*CAMPAIGN), rounds=5)
        assert {choice for choice, _ in decisions(campaign)} == {
            "promote_global", "promote_dispatch", "reject",
        }  # fmt: skip
        return ending(campaign)


def until_it_ends(campaign: Campaign, watch: Any, **options: Any) -> int:
    for crashes in range(200):
        try:
            go_on(campaign, script(*CAMPAIGN), rounds=5, watch=watch, **options)
        except (Killed, DiskFull):
            continue
        return crashes
    raise AssertionError("it never ends")


def test_killed_after_every_event_it_comes_to_the_same_end(
    store: Store, tmp_path: Path, expected: str
) -> None:
    campaign = begin(store, tmp_path)

    def watch(memory: Memory) -> None:
        add = memory.add

        def once(kind: str, event: Any) -> None:
            add(kind, event)
            if kind != "agent.turn.begun":  # which script is made again would differ
                raise Killed

        memory.add = once  # type: ignore[method-assign]

    crashes = until_it_ends(campaign, watch)
    assert crashes > 20
    assert ending(campaign) == expected
    store.check(campaign.id)


def test_killed_before_every_event_it_does_the_work_again(
    store: Store, tmp_path: Path, expected: str
) -> None:
    """Whatever a level found out is lost with the process, but for what failed: that is final. The
    disk may be full as well."""
    campaign = begin(store, tmp_path)
    tried: set[int] = set()

    def watch(memory: Memory) -> None:
        add = memory.add

        def twice(kind: str, event: Any) -> None:
            number = len(store.events(campaign.id))
            if kind not in ("agent.turn.begun", "agent.turn.ended") and number not in tried:
                tried.add(number)
                raise Killed if number % 2 else DiskFull("no space left")
            add(kind, event)

        memory.add = twice  # type: ignore[method-assign]

    assert until_it_ends(campaign, watch) > 20
    assert ending(campaign) == expected


def test_a_turn_that_was_cut_short_is_made_again_and_paid_for(store: Store, tmp_path: Path) -> None:
    campaign = begin(store, tmp_path)

    class Dying(Recording):
        def turn(self, task: Task) -> Turn:
            super().turn(task)
            raise Killed

    with pytest.raises(Killed):
        go_on(campaign, Dying({NAME: "half of a ker"}), rounds=1)
    go_on(campaign, script(Scripted(), edits("us=0.8")), rounds=1)
    assert decisions(campaign) == [("promote_global", "faster")]
    assert history(campaign).account.spent_usd == 1.5


@pytest.mark.parametrize("dies_at", [3, 40, 90])
def test_killed_in_the_middle_of_measuring(
    store: Store, tmp_path: Path, expected: str, dies_at: int
) -> None:
    campaign = begin(store, tmp_path)
    with pytest.raises(Killed):
        go_on(campaign, script(*CAMPAIGN), rounds=5, lab=FakeLab(noise=0.002, dies_at=dies_at))
    go_on(campaign, script(*CAMPAIGN), rounds=5)
    assert ending(campaign) == expected


def test_a_lost_device_ends_it_and_it_goes_on_later(
    store: Store, tmp_path: Path, expected: str
) -> None:
    campaign = begin(store, tmp_path)
    with pytest.raises(StageFailed):
        go_on(campaign, script(*CAMPAIGN), rounds=5, lab=FakeLab(noise=0.002, lost_at=2))
    assert decisions(campaign) == []
    go_on(campaign, script(*CAMPAIGN), rounds=5)
    assert ending(campaign) == expected


def test_two_controllers_do_not_share_a_campaign(store: Store, tmp_path: Path) -> None:
    campaign = begin(store, tmp_path)
    with store.hold(campaign.id, "the other one", 60), pytest.raises(LeaseTaken):
        go_on(campaign, script(edits("us=0.5")), rounds=1)
    assert decisions(campaign) == []


def test_the_files_of_the_route_are_what_is_edited() -> None:
    assert list(FILES) == ["src/fastkernels/ops/gdn_prefill/routes/torch_chunked.py"]
