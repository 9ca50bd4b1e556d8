"""What a campaign of an agent remembers: the fold over its events, views, lessons."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastkernels_tuner.agent import memory
from fastkernels_tuner.agent.backends import Turn
from fastkernels_tuner.agent.memory import (
    Begun,
    Decided,
    History,
    Lesson,
    Level,
    Memory,
    Reserved,
    TurnBegun,
    TurnEnded,
    structure_of,
)
from fastkernels_tuner.agent.proposal import EXAMPLE, parse
from fastkernels_tuner.agent.workspace import Patch
from fastkernels_tuner.store import LeaseLost, LeaseTaken, Store
from tuner.tests.stores import Clock, spec

PLAN = parse(EXAMPLE)
FILES = {"kernel.py": "a = 1\n"}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}", clock=clock) as opened:
        yield opened


@pytest.fixture
def campaign(store: Store) -> str:
    return store.create(spec())


def begun(store: Store, campaign: str, **fields: Any) -> Memory:
    made = Memory(store, campaign, store.hold(campaign, "test", 60))
    files = made.keep(FILES)
    made.add(memory.BEGUN, Begun(route="plain", files=files, constitution={}, **fields))
    return made


def reserve(made: Memory, **fields: Any) -> int:
    number = made.history.next_number
    assert made.history.begun is not None
    base = made.history.begun.files
    event = Reserved(experiment=number, by="optimiser", base=base, **fields)
    made.add(memory.RESERVED, event)
    return number


def begin_turn(made: Memory, number: int, reserve_usd: float = 1.0) -> int:
    turn = made.history.turns
    made.add(
        memory.TURN_BEGUN,
        TurnBegun(turn=turn, role="optimiser", experiment=number, reserve_usd=reserve_usd),
    )
    return turn


def end_turn(made: Memory, number: int, cost_usd: float = 0.25, **fields: Any) -> None:
    turn = begin_turn(made, number)
    ended = TurnEnded(
        turn=turn, role="optimiser", experiment=number, came=Turn(backend="x"), cost_usd=cost_usd,
        **fields,
    )  # fmt: skip
    made.add(memory.TURN_ENDED, ended)


def change(made: Memory, number: int, text: str = "a = 2\n") -> None:
    patch = made.keep(Patch(files={"kernel.py": text}).model_dump(mode="json"))
    end_turn(made, number, patch=patch, plan=PLAN)


def decide(made: Memory, number: int, choice: Any = "archive", **fields: Any) -> None:
    made.add(
        memory.DECIDED,
        Decided(experiment=number, choice=choice, cause="slower", message="no | gain", **fields),
    )


def reread(store: Store, campaign: str) -> History:
    return History.of(store.events(campaign))


def test_an_experiment_as_far_as_it_has_come(store: Store, campaign: str) -> None:
    made = begun(store, campaign, limit_usd=5.0)
    assert not made.history.experiments
    number = reserve(made)
    states = [made.history.experiments[0].state]
    end_turn(made, number)  # which changed nothing
    assert made.history.account.idle == 1
    change(made, number)
    states.append(made.history.experiments[0].state)
    evidence = made.keep({"blocks": []})
    made.add(
        memory.LEVEL,
        Level(experiment=number, level="quick", outcome="pass", cause="", message="2 right",
              evidence=evidence, device_s=1.5),
    )  # fmt: skip
    states.append(made.history.experiments[0].state)
    assert reread(store, campaign).open is not None
    decide(made, number)
    states.append(made.history.experiments[0].state)
    assert states == ["reserved", "planned", "quick", "archive"]
    assert reread(store, campaign).open is None
    assert made.history.next_number == 2
    assert made.history.account.spent_usd == 0.5
    assert made.history.account.idle == 0
    assert made.history.device_s() == 1.5
    assert reread(store, campaign) == made.history
    store.check(campaign)


def test_a_turn_that_was_cut_short_costs_what_it_might_have(store: Store, campaign: str) -> None:
    made = begun(store, campaign, limit_usd=5.0)
    number = reserve(made)
    begin_turn(made, number, 2.0)
    assert reread(store, campaign).account.spent_usd == 0.0
    change(made, number)
    assert made.history.account.spent_usd == 2.25
    assert made.history.turns == 2


def test_one_controller_at_a_time_takes_numbers(store: Store, campaign: str, clock: Clock) -> None:
    made = begun(store, campaign)
    with pytest.raises(LeaseTaken):
        store.hold(campaign, "another", 60)
    clock.forward(61)
    other = Memory(store, campaign, store.hold(campaign, "another", 60))
    assert reserve(other) == 1
    with pytest.raises(LeaseLost):
        reserve(made)
    assert [each.number for each in reread(store, campaign).experiments] == [1]


def test_a_critic_reserves_with_a_plan(store: Store, campaign: str) -> None:
    made = begun(store, campaign)
    number = reserve(made, plan=PLAN)
    found = made.history.experiments[0]
    assert (found.number, found.plan, found.state) == (number, PLAN, "reserved")
    texts = memory.views(made.history, made.kept, "", "")
    assert "experiments/exp_001/plan.md" in texts
    assert "experiments/exp_001/result.md" not in texts


def test_champions_by_regime(store: Store, campaign: str) -> None:
    made = begun(store, campaign)
    for choice, regimes in (
        ("promote_global", ("r1", "r2")), ("archive", ()), ("promote_dispatch", ("r2",)),
    ):  # fmt: skip
        number = reserve(made)
        change(made, number)
        decide(made, number, choice, regimes=regimes)
    champions = made.history.champions()
    assert {regime: each.experiment for regime, each in champions.items()} == {"r1": 1, "r2": 3}
    best = made.history.best()
    assert best is not None
    assert best.experiment == 3


# ---- views --------------------------------------------------------------------------------------


def test_views_are_rendered_from_the_ledger(store: Store, campaign: str, tmp_path: Path) -> None:
    made = begun(store, campaign, limit_usd=5.0)
    number = reserve(made)
    change(made, number)
    decide(made, number, gain=0.031, low=0.01, high=0.05, device_s=2.0)
    made.learn(lesson(claim="q in registers | helps"))
    texts = memory.views(made.history, made.kept, "s", "t")
    assert (
        "| 1 | keep q in registers over the heads of a group | register_reuse |"
        in texts["summary.md"]
    )
    assert "3.10% (1.00% to 5.00%) | archive | slower: no / gain |" in texts["summary.md"]
    assert "$0.25 of $5.00" in texts["summary.md"]
    assert "q in registers / helps (exp_001)" in texts["LESSONS.md"]
    assert "-a = 1\n+a = 2\n" in texts["experiments/exp_001/change.diff"]
    memory.write_views(tmp_path, texts, FILES)
    (tmp_path / "experiments/exp_007").mkdir()
    memory.write_views(tmp_path, texts, FILES)
    assert sorted(p.name for p in (tmp_path / "experiments").iterdir()) == ["exp_001"]
    assert (tmp_path / "kernel/kernel.py").read_text() == "a = 1\n"


# ---- lessons ------------------------------------------------------------------------------------


def lesson(**fields: Any) -> Lesson:
    values: dict[str, Any] = {
        "kind": "measurement", "subject": "register_reuse", "claim": "c", "scope": {"op": "toy"},
        "evidence": (1,), "structure": "s", "toolchain": "t",
    }  # fmt: skip
    return Lesson(**values | fields)


@pytest.mark.parametrize(
    ("fields", "structure", "toolchain", "status"),
    [
        ({}, "other", "other", "active"),
        ({"evidence": ()}, "s", "t", "unverified"),
        ({"kind": "constant"}, "s", "other", "active"),
        ({"kind": "constant"}, "other", "t", "expired"),
        ({"kind": "mechanism"}, "other", "t", "active"),
        ({"kind": "mechanism"}, "s", "other", "expired"),
    ],
)
def test_lessons_expire_with_what_they_rest_on(
    fields: dict[str, Any], structure: str, toolchain: str, status: str
) -> None:
    assert lesson(**fields).status(structure, toolchain, ()) == status


def test_new_evidence_contradicts_an_old_lesson(store: Store, campaign: str) -> None:
    """16 splits cost a third, until a rewrite: then they won. Only on one subject and scope, and
    only where both intervals leave zero out."""
    made = begun(store, campaign)
    old = lesson(subject="splits", low=-0.5, high=-0.33)
    kept = [
        old.model_copy(update={"subject": "warps"}),
        old.model_copy(update={"scope": {"op": "other"}}),
        old.model_copy(update={"high": 0.1}),
    ]
    for each in (old, *kept):
        made.learn(each)
    new = lesson(subject="splits", low=0.158, high=0.195, evidence=(51,))
    made.learn(new)
    made.learn(new)
    assert made.history.contradicted == {old.id}
    assert len(made.history.lessons) == 5
    assert old.status("s", "t", made.history.contradicted) == "contradicted"
    assert "splits" in memory.views(made.history, made.kept, "s", "t")["LESSONS.md"]
    assert reread(store, campaign).contradicted == {old.id}


def test_structure_is_what_code_does_apart_from_numbers() -> None:
    def py(text: str) -> str:
        return structure_of({"k.py": text})

    def cu(text: str) -> str:
        return structure_of({"k.cu": text})

    assert py("def f():\n    '''Docs.'''\n    return 16 * x  # why\n") == py(
        "def f():\n    '''Other.'''\n    return (8 * x)\n"
    )
    assert py("def f():\n    return x * 2\n") != py("def f():\n    return x + 2\n")
    assert py("a = True\n") != py("a = False\n")
    assert cu("int a = 16; // why\n") == cu("int  a = 0x20u; /* other */")
    assert cu("a<4>();") != cu("b<4>();")
    assert structure_of({"k.py": "def f(:"}) != py("")
