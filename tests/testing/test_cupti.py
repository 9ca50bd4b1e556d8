"""CUPTI's records become times: what belongs to a call, statistics, interleaving; cases C139, C140
(a second stream), C145 (the L2 flush), C151 (timed calls are checked). No GPU needed."""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable
from typing import Any

import pytest

from fastkernels.testing import cupti, timing
from fastkernels.testing.cupti import Launch, Spread, Variant, Window, Work, assign


class Device:
    """A GPU that does what calls tell it, and its recorder; the host's clock ticks once per event.

    `log` holds every event in order. A call is `device.kernel(name, ns)`.
    """

    def __init__(self, late: bool = False) -> None:
        self.log: list[str] = []
        self.lost = False
        self.is_recording = False
        self._late = late
        self._clock = 0
        self._number = 0
        self._launches: list[Launch] = []
        self._works: list[Work] = []

    def kernel(self, name: str, duration: int = 1000) -> None:
        self._clock += 1
        self.log.append(name)
        self._number += 1
        if not self.is_recording:
            return
        number = self._number
        self._launches.append(Launch(self._clock, number))
        start = 1_000_000 * number
        self._works.append(Work(name, start, start + duration, number))

    def call(self, name: str, duration: int = 1000) -> Callable[[], None]:
        return lambda: self.kernel(name, duration)

    def resume(self) -> None:
        self.is_recording = True

    def pause(self) -> None:
        self.is_recording = False

    def overwrite_l2(self) -> None:
        self.kernel("flush", 60_000)

    def synchronize(self) -> None:
        if self.lost:
            raise RuntimeError("an illegal memory access was encountered")

    def timestamp(self) -> int:
        self._clock += 1
        self.log.append("|")
        return self._clock

    def drain(self, force: bool = False) -> tuple[list[Launch], list[Work]]:
        works = [] if self._late and not force else self._works
        if works:
            self._works = []
        launches, self._launches = self._launches, []
        self.log.append("drain")
        return launches, works


def test_a_call_owns_what_it_launched() -> None:
    """On any stream, fills included; not the flush before it, not what follows it."""
    launches = [Launch(9, 1), Launch(12, 3), Launch(11, 2), Launch(25, 4), Launch(19, 5)]
    works = [
        Work("flush", 100, 160, 1), Work("next", 300, 310, 4), Work("second stream", 190, 230, 3),
        Work("memset", 170, 180, 2), Work("kernel", 200, 210, 2),
    ]  # fmt: skip
    (group,) = assign([Window(10, 20)], launches, works)
    assert [work.name for work in group] == ["memset", "second stream", "kernel"]
    measured = cupti.timing([group])
    assert measured.kernels == 3
    assert measured.us.median == pytest.approx(0.06)  # 10 + 40 + 10 ns
    assert measured.span.median == pytest.approx(0.06)  # 170 to 230: both overlap
    assert assign([Window(26, 30)], launches, works) == [[]]


def test_sum_and_span_differ_by_the_gaps() -> None:
    group = [Work("a", 0, 1000, 1), Work("b", 5000, 7000, 2)]
    measured = cupti.timing([group] * 3)
    assert (measured.us.median, measured.span.median) == (3.0, 7.0)
    assert measured.names == ("a", "b")


def test_spread_interpolates() -> None:
    assert Spread.of([float(n) for n in range(11)]) == Spread(5.0, 1.0, 9.0)
    assert Spread.of([2.0, 1.0]) == Spread(1.5, 1.1, 1.9)
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of([1 / 3]).to_dict() == {"median": 0.333, "p10": 0.333, "p90": 0.333}


def test_missing_records_are_an_error() -> None:
    group = [Work("a", 0, 1000, 1)]
    assert cupti.timing([group] * 9 + [[]]).calls == 9
    with pytest.raises(ValueError, match="in 3 of 5 calls"):
        cupti.timing([group] * 3 + [[], []])
    with pytest.raises(ValueError, match="in 0 of 0 calls"):
        cupti.timing([])


def test_variants_take_turns_on_fresh_sets() -> None:
    device = Device()
    names = ("a", "b", "c")
    variants = {
        name: Variant([device.call(f"{name}{i}", 1000 * (i + 1)) for i in range(4)])
        for name in names
    }
    timings, errors = cupti.measure(variants, device, iterations=8, warmup=0, seed=3)
    assert not errors
    for each in timings.values():
        assert each.us.median == 2.5
        assert (each.us.p10, each.us.p90) == (1.0, 4.0)
        assert each.kernels == 1
        assert each.calls == 8
    timed = [event for event in device.log[device.log.index("drain") :] if event[0] in "abc"]
    rounds = [timed[i : i + 3] for i in range(0, len(timed), 3)]
    for iteration, events in enumerate(rounds):
        assert sorted(events) == [f"{name}{iteration % 4}" for name in names]
    assert len({tuple(event[0] for event in events) for events in rounds}) > 1
    again = Device()
    cupti.measure(
        {n: Variant([again.call(f"{n}{i}") for i in range(4)]) for n in names}, again,
        iterations=8, warmup=0, seed=3,
    )  # fmt: skip
    assert again.log == device.log


def test_records_only_while_it_measures() -> None:
    """Also where it ends with an error."""
    device = Device()
    device.kernel("a draw")
    cupti.measure({"a": Variant([device.call("a")])}, device, iterations=2)
    assert not device.is_recording
    device.kernel("an oracle")
    assert device.drain(force=True) == ([], [])
    device.lost = True
    with pytest.raises(RuntimeError):
        cupti.measure({"a": Variant([device.call("a")])}, device)
    assert not device.is_recording


def test_nothing_but_the_call_is_between_the_timestamps() -> None:
    device = Device()
    variant = Variant(
        [device.call("call")],
        lambda which, is_checked: device.kernel("restore and poison" if is_checked else "restore"),
        lambda which: device.kernel("check"),
    )
    timings, _ = cupti.measure({"a": variant}, device, iterations=5, warmup=1, checks=2)
    timed = device.log[device.log.index("drain") + 1 : -1]
    usual = ["restore", "flush", "|", "call", "|"]
    checked = ["restore and poison", "flush", "|", "call", "|", "check"]
    while timed:
        part = checked if timed[0] == checked[0] else usual
        assert timed[: len(part)] == part
        timed = timed[len(part) :]
    assert device.log.count("check") == 2
    assert timings["a"].us.median == 1.0


def test_a_variant_that_raises_is_left_out() -> None:
    device = Device()
    calls: list[int] = []

    def fails_later() -> None:
        calls.append(1)
        device.kernel("late")
        if len(calls) > 7:
            raise ValueError("no\n  more")

    def fails() -> None:
        raise RuntimeError("not here")

    variants = {
        "a": Variant([device.call("a")]), "never": Variant([fails]), "late": Variant([fails_later]),
        "nothing": Variant([lambda: None]),
    }  # fmt: skip
    timings, errors = cupti.measure(variants, device, iterations=6, warmup=5)
    assert list(timings) == ["a"]
    assert timings["a"].calls == 6
    assert errors == {
        "never": "RuntimeError: not here",
        "late": "ValueError: no more",
        "nothing": "CUPTI recorded kernels in 0 of 6 calls",
    }


def test_a_lost_device_ends_the_measurement() -> None:
    device = Device()

    def breaks() -> None:
        device.lost = True

    with pytest.raises(RuntimeError, match="illegal memory access"):
        cupti.measure({"a": Variant([breaks])}, device)


def test_records_that_are_held_back_are_forced() -> None:
    device = Device(late=True)
    timings, errors = cupti.measure({"a": Variant([device.call("a")])}, device, iterations=3)
    assert not errors
    assert timings["a"].calls == 3


def test_without_cupti_there_is_an_error_and_no_substitute(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "cupti":
            raise ModuleNotFoundError("No module named 'cupti'")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(cupti.CuptiMissing, match=r"fastkernels\[bench\].*No module named"):
        cupti.load()


def test_host_time_leaves_out_the_synchronisation() -> None:
    events: list[str] = []

    def synchronize() -> None:
        events.append("sync")
        time.sleep(0.02)

    def call() -> None:  # slow right after a synchronisation
        if events[-5:].count("sync"):
            time.sleep(0.02)
        events.append("call")

    us = timing.host_us(call, synchronize, calls=10, batches=3)
    assert us < 1000
    assert events == (["sync"] + ["call"] * 20) * 3 + ["sync"]


def test_growth_shows() -> None:
    calls: list[int] = []

    def slower() -> None:
        calls.append(1)
        if len(calls) > 900:
            time.sleep(0.001)

    grown = timing.host_growth(slower, lambda: None, lambda: len(calls), calls=1000)
    assert grown.calls == grown.kept_bytes == len(calls) == 1000
    assert grown.last_us > 900 > grown.first_us
