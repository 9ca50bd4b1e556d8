"""When a campaign is stuck: signals, the ladder, diagnoses. Pure functions of a history."""

from __future__ import annotations

from typing import Any

import pytest

from fastkernels_tuner.agent import plateau
from fastkernels_tuner.agent.backends import Turn
from fastkernels_tuner.agent.memory import Choice, Decided, Experiment, History, Reserved, TurnEnded
from fastkernels_tuner.agent.policy import default
from fastkernels_tuner.agent.proposal import EXAMPLE, parse
from fastkernels_tuner.model import Workload

RULES = default().model_copy(update={"min_gain_per_hour": 0.0})
PLAN = parse(EXAMPLE)


def decided(number: int, choice: Choice, cause: str, **fields: Any) -> Experiment:
    values: dict[str, Any] = {"message": "m", "structure": f"s{number}", "device_s": 60.0}
    made = Decided(experiment=number, choice=choice, cause=cause, **values | fields)
    ended = TurnEnded(
        turn=number, role="optimiser", experiment=number, came=Turn(backend="x"), cost_usd=0.0,
        patch="p", plan=PLAN,
    )  # fmt: skip
    reserved = Reserved(experiment=number, by="optimiser", base="b")
    return Experiment(number, reserved, (ended,), {}, made)


def promoted(number: int, gain: float, **fields: Any) -> Experiment:
    spread = {"low": gain - 0.002, "high": gain + 0.002}
    return decided(number, "promote_global", "faster", gain=gain, **spread | fields)


def archived(number: int, gain: float, error: float = 0.003, **fields: Any) -> Experiment:
    spread = {"low": gain - error, "high": gain + error}
    return decided(number, "archive", "not_faster", gain=gain, **spread | fields)


def rejected(number: int, cause: str, **fields: Any) -> Experiment:
    return decided(number, "reject", cause, **fields)


def history(*experiments: Experiment, critics: tuple[int, ...] = ()) -> History:
    ended = tuple(
        TurnEnded(turn=0, role="critic", experiment=n, came=Turn(backend="x"), cost_usd=0.0)
        for n in critics
    )
    return History(experiments=experiments, critics=ended)


def kind(found: History, rules: Any = RULES) -> str:
    signal = plateau.assess(found, rules)
    return signal.kind if signal else ""


def test_nothing_is_wrong_at_first() -> None:
    assert kind(history()) == ""
    assert kind(history(*(archived(n, 0.0) for n in range(1, 5)))) == ""


def test_gains_that_are_nothing_are_a_plateau() -> None:
    assert kind(history(*(archived(n, 0.001) for n in range(1, 6)))) == "plateau"
    signal = plateau.assess(history(*(archived(n, 0.001) for n in range(1, 6))), RULES)
    assert signal is not None
    assert "0.2" in signal.reason


def test_what_nobody_knows_is_no_plateau() -> None:
    """Wide intervals may hide gains, and what was not measured says nothing."""
    assert kind(history(*(archived(n, 0.001, error=0.05) for n in range(1, 6)))) == ""
    causes = ("numeric", "hang", "numeric", "compile", "numeric")
    assert kind(history(*(rejected(n, c) for n, c in enumerate(causes, 1)))) == ""


def test_three_honest_small_wins_on_one_axis_are_no_plateau() -> None:
    wins = [promoted(n, 0.004, structure="one") for n in (3, 4, 5)]
    assert kind(history(archived(1, 0.0), archived(2, 0.0), *wins)) == ""
    assert kind(history(*(promoted(n, 0.004, structure="one") for n in range(1, 8)))) == ""


def test_one_cause_three_times_is_a_wall() -> None:
    assert kind(history(*(rejected(n, "numeric") for n in (1, 2, 3)))) == "wall"
    assert kind(history(rejected(1, "numeric"), rejected(2, "hang"), rejected(3, "numeric"))) == ""
    mixed = (rejected(1, "numeric"), archived(2, 0.0), rejected(3, "numeric"))
    assert kind(history(*mixed, rejected(4, "numeric"))) == ""


def test_the_same_again_is_repetition() -> None:
    again = [rejected(n, plateau.REPETITION) for n in (2, 3)]
    assert kind(history(archived(1, 0.0), *again)) == "repetition"
    numbers = [archived(n, 0.0, structure="one") for n in (1, 2, 3)]
    assert kind(history(*numbers)) == "repetition"


def test_device_time_that_buys_too_little_is_a_signal() -> None:
    rules = RULES.model_copy(update={"min_gain_per_hour": 0.01})
    slow = [promoted(1, 0.02, device_s=3600.0)]
    slow += [archived(n, 0.0, error=0.05, device_s=3600.0) for n in range(2, 6)]
    assert kind(history(*slow), rules) == "budget"
    fast = [promoted(1, 0.06, device_s=3600.0), *slow[1:]]
    assert kind(history(*fast), rules) == ""


def test_a_signal_is_answered_once() -> None:
    stuck = [archived(n, 0.0) for n in range(1, 6)]
    assert kind(history(*stuck, critics=(6,))) == ""
    more = [archived(n, 0.0) for n in range(6, 11)]
    assert kind(history(*stuck, *more, critics=(6,))) == "plateau"


@pytest.mark.parametrize(
    ("critics", "expected", "last"),
    [
        ((), "critic", None),
        ((6,), "other_backend", "critic"),
        ((6, 11), "restart", "other_backend"),
        ((6, 11, 16), "reopen", "restart"),
        ((6, 11, 16, 21), "stop", "reopen"),
        ((6, 11, 16, 21, 26), "stop", "stop"),
    ],
)
def test_the_ladder(critics: tuple[int, ...], expected: str, last: str | None) -> None:
    found = history(*(archived(n, 0.0) for n in range(1, 6)), critics=critics)
    assert (plateau.rung(found), plateau.last_rung(found)) == (expected, last)


def test_a_promotion_begins_the_ladder_anew() -> None:
    found = history(*(archived(n, 0.0) for n in range(1, 6)), promoted(7, 0.1), critics=(6,))
    assert (plateau.rung(found), plateau.last_rung(found)) == ("critic", None)


def test_nine_diagnoses_cite_experiments() -> None:
    case = {"name": "x", "batch_size": 2, "num_q_heads": 1, "num_v_heads": 2}
    rows = [Workload(op="gdn_decode", listed="serving", case=case)]
    found = history(
        *(promoted(n, 0.02) for n in range(1, 6)), archived(6, -0.001),
        rejected(7, plateau.REPETITION), rejected(8, "numeric"),
    )  # fmt: skip
    text = plateau.diagnoses(found, "gdn_decode", {"k.py": "x = torch.empty(3)\n"}, rows)
    assert len([line for line in text.splitlines() if line[:1].isdigit()]) == 9
    for words in (
        "exp_007", "register_reuse (exp_001, exp_002, exp_003, exp_004, exp_005)", "numeric 1",
        "memory: 5 of 8 promoted", "persistent blocks", "exp_006", "k.py: 1", "0 of 1 workloads",
    ):  # fmt: skip
        assert words in text
