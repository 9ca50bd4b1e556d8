"""The judge, what it lends and says, and the guards: in this process, on the CPU."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fastkernels import catalog
from fastkernels.ops._shared.compare import Error
from fastkernels.testing import cupti, workloads
from fastkernels.testing.compare import as_tuple
from fastkernels.testing.workloads import gdn_forms
from fastkernels_tuner.measure import buffers, guards, judge, worker
from fastkernels_tuner.measure.guards import DeviceBusy, GpuGuard, LoadGuard, Reading
from fastkernels_tuner.measure.judge import Judge, JudgeFailed
from fastkernels_tuner.measure.protocol import (
    MAX_BYTES,
    Call,
    Channel,
    Check,
    Checked,
    Closed,
    Done,
    Draw,
    Facts,
    Fault,
    Fill,
    Hello,
    Lend,
    Loan,
    Malformed,
    Problem,
    Returned,
    Step,
    TimedOut,
)
from fastkernels_tuner.model import Cause, Workload

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"num_q_heads": 1, "num_v_heads": 2, "head_size": 64}
Spoil = Callable[[Any, tuple[torch.Tensor, ...]], object]


def decode(batch_size: int = 3, **fields: Any) -> Workload:
    case = {"name": "x", "batch_size": batch_size, **SMALL, **fields}
    return Workload(op="gdn_decode", listed="contest", case=case)


def listed(op: str, name: str) -> Workload:
    inputs = catalog.module(op, "inputs")
    case = next(c for c in (*inputs.CORRECTNESS, *inputs.CORNER) if name in ("", c.name))
    return Workload(op=op, listed="correctness", case=dataclasses.asdict(case))


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    monkeypatch.setattr(judge, "_LEAST_SLAB", 1)  # random bytes take their time
    made = Judge(CPU)
    yield made
    made.close()


def call(made: Judge, loan: Loan, slot: int = 0, spoil: Spoil | None = None) -> tuple[Any, ...]:
    """What a candidate process does in a step: call the operator on what is lent."""
    bound = _sets(made, loan)[slot]
    out = bound.out if len(bound.out) > 1 else bound.out[0]
    result = as_tuple(catalog.operator(loan.op).function(**bound.inputs._asdict(), out=out))
    if spoil is not None:
        spoil(bound.inputs, bound.results)
    return tuple(Returned(dtype=str(x.dtype)[6:], shape=tuple(x.shape)) for x in result)


def fill(made: Judge, slot: int, seed: int, is_flipped: bool = False) -> float:
    return made.fill([Draw(slot=slot, seed=seed)], is_flipped)


def check(made: Judge, slot: int, is_judged: bool, allowance: float, returned: Any) -> Checked:
    (found,) = made.check([Call(slot=slot, returned=returned)], is_judged, allowance)
    return found


def _sets(made: Judge, loan: Loan) -> tuple[worker.Set, ...]:
    """Through the buffer that another process would map."""
    return worker.bind_sets(buffers.attach(made.share(), CPU), loan)


def judged(
    made: Judge,
    workload: Workload,
    spoil: Spoil | None = None,
    *,
    seed: int = 5,
    again: Spoil | None = None,
    allowance: float = 1.0,
) -> Checked:
    """A judged call, and where it is wrong the diagnosis after a repetition spoilt by `again`."""
    loan = made.lend(workload, 2)
    fill(made, 1, seed)
    returned = call(made, loan, 1, spoil)
    found = check(made, 1, True, allowance, returned)
    failure = found.failure
    if failure is None or failure.cause not in (Cause.NUMERIC, Cause.NONFINITE):
        return found
    fill(made, 1, seed, is_flipped=True)
    call(made, loan, 1, spoil if again is None else again)
    return made.diagnose(1, allowance)


def cause(found: Checked) -> Cause | None:
    return None if found.failure is None else found.failure.cause


# ---- what is right ------------------------------------------------------------------------------

RIGHT = [
    *(
        ("gdn_decode", name)
        for name in (
            "definition-b3", "no-state", "inplace", "pool", "pool-int64", "scale", "extreme",
            "raw-keys", "empty", "strided", "strided-inplace", "strided-pool", "all-invalid",
        )
    ),
    ("gdn_prefill", "one-sequence"),
    ("gdn_prefill", "strided-pool"),
    ("gdn_prefill", "empty"),
    ("dsa_topk_indexer", ""),
    ("dsa_sparse_attention", ""),
    ("moe_fp8_block_scale", ""),
]  # fmt: skip


@pytest.mark.parametrize(("op", "name"), RIGHT)
def test_what_is_right_passes(bare: Judge, op: str, name: str) -> None:
    """In every form and layout, through memory laid out with its strides."""
    found = judged(bare, listed(op, name))
    assert found.failure is None, found.failure
    assert 0.0 <= found.worst <= 1.0


@pytest.mark.parametrize(
    ("op", "name"), [("gdn_decode", "huge_state"), ("dsa_topk_indexer", "around_topk")]
)
def test_adversarial_draws_are_judged_by_the_oracle(bare: Judge, op: str, name: str) -> None:
    workload = Workload(op=op, listed="adversarial", case={"name": name, "seed": 0})
    assert judged(bare, workload).failure is None
    assert cause(judged(bare, workload, lambda inputs, results: results[0].zero_())) is not None


def test_official_limits_apply_to_contest_draws(bare: Judge) -> None:
    """One element off by 0.5: a thousandth of a peer's allowance, and more than the contest's."""

    def spoil(inputs: Any, results: Any) -> None:
        results[0][0, 0, 0, 0] += 0.5

    wide = {"allowance": 1e6}
    assert cause(judged(bare, decode(), spoil, **wide)) is None  # type: ignore[arg-type]
    official = judged(bare, decode(source="uuid"), spoil, **wide)  # type: ignore[arg-type]
    assert official.failure is not None
    assert official.failure.detail["metric"] == "official"


def test_an_allowance_widens_the_limits(bare: Judge) -> None:
    def spoil(inputs: Any, results: Any) -> None:
        results[0].mul_(1.02)

    assert cause(judged(bare, decode(), spoil)) == Cause.NUMERIC
    found = judged(bare, decode(), spoil, allowance=10.0)
    assert found.failure is None
    assert 0.1 < found.worst < 1.0


# ---- what is wrong ------------------------------------------------------------------------------


def add_to(name: str) -> Spoil:
    def spoil(inputs: Any, results: Any) -> None:
        tensor = getattr(inputs, name)
        tensor[(0,) * tensor.dim()] += 1

    return spoil


@pytest.mark.parametrize("name", ["q", "k", "v", "state", "A_log", "a", "dt_bias", "b"])
def test_a_changed_input_is_named(bare: Judge, name: str) -> None:
    found = judged(bare, decode(), add_to(name))
    assert cause(found) == Cause.MUTATED_INPUT
    assert found.failure is not None
    assert repr(name) in found.failure.message
    assert (found.failure.seed, found.failure.workload) == (5, decode().id)


def test_an_updated_input_may_change_and_is_judged(bare: Judge) -> None:
    found = judged(bare, decode(mode="inplace"), add_to("state"))
    assert cause(found) == Cause.NUMERIC
    assert found.failure is not None
    assert found.failure.detail["output"] == "new_state"


@pytest.mark.parametrize("name", ["read_indices", "write_indices"])
def test_indices_of_a_pool_may_not_change(bare: Judge, name: str) -> None:
    assert (
        cause(judged(bare, listed("gdn_decode", "strided-pool"), add_to(name)))
        == Cause.MUTATED_INPUT
    )


def test_a_slot_of_a_pool_that_nobody_names_may_not_change(bare: Judge) -> None:
    found = judged(bare, decode(mode="pool"), lambda inputs, results: _unnamed(inputs).fill_(1.0))
    assert found.failure is not None
    assert found.failure.detail["metric"] == "changed elements"


def _unnamed(inputs: Any) -> torch.Tensor:
    named = inputs.read_indices.tolist()
    slot: torch.Tensor = next(s for i, s in enumerate(inputs.state) if i not in named)
    return slot


@pytest.mark.parametrize("shift", [-1, -256, 0, 255])
def test_a_byte_outside_is_seen(bare: Judge, shift: int) -> None:
    """Just before q, which lies first, and just after the last output."""
    loan = bare.lend(decode(), 1)
    fill(bare, 0, 5)
    returned = call(bare, loan)
    first, last = loan.tensors[0], loan.tensors[-1]
    place = first.offset + shift if shift < 0 else last.offset + last.nbytes + shift
    bare.slot(0)[place] ^= 0x10
    found = check(bare, 0, False, 1.0, returned)
    assert cause(found) == Cause.OUT_OF_BOUNDS
    assert found.failure is not None
    expected = (
        f"{-shift} bytes before 'q'" if shift < 0 else f"{shift + 1} bytes past the end of 'new_"
    )
    assert expected in found.failure.message


def test_a_byte_that_is_put_back_counts(bare: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """By work that goes on beside the judge: it is no fault of the harness, to be tried again."""
    loan = bare.lend(decode(), 1)
    fill(bare, 0, 5)
    returned = call(bare, loan)
    place, changed = loan.tensors[0].offset, bare._changed

    def then_back(slots: list[int]) -> list[bool]:
        bare.slot(0)[place] ^= 0x10
        found = changed(slots)
        bare.slot(0)[place] ^= 0x10
        return found

    monkeypatch.setattr(bare, "_changed", then_back)
    assert cause(check(bare, 0, True, 1.0, returned)) == Cause.OUT_OF_BOUNDS


def test_a_byte_between_rows_of_an_updated_tensor_is_seen(bare: Judge) -> None:
    """Padding between the slots of a server's pool."""
    loan = bare.lend(listed("gdn_decode", "strided-inplace"), 1)
    fill(bare, 0, 5)
    returned = call(bare, loan)
    state = next(lent for lent in loan.tensors if lent.name == "state")
    size = 4 * state.shape[1] * state.shape[2] * state.shape[3]
    assert state.stride[0] * 4 > size
    bare.slot(0)[state.offset + size + 1] ^= 0x10
    found = check(bare, 0, True, 1.0, returned)
    assert cause(found) == Cause.OUT_OF_BOUNDS
    assert found.failure is not None
    assert "between elements of 'state'" in found.failure.message


@pytest.mark.parametrize("output", [0, 1])
def test_an_element_that_nobody_wrote(bare: Judge, output: int) -> None:
    """One of hundreds, whose poison is as plausible as a result, in bfloat16 and in float32."""
    poison: list[float] = []

    def spoil(inputs: Any, results: Any) -> None:
        results[output][1, 0, 1, 7] = poison.pop()

    loan = bare.lend(decode(), 1)
    sets = _sets(bare, loan)
    for is_flipped in (False, True):
        fill(bare, 0, 5, is_flipped)
        poison.append(float(sets[0].results[output][1, 0, 1, 7]))
        returned = call(bare, loan, 0, spoil)
        if not is_flipped:
            assert cause(check(bare, 0, True, 1.0, returned)) == Cause.NUMERIC
    found = bare.diagnose(0, 1.0)
    assert cause(found) == Cause.DROPPED_ELEMENT
    assert found.failure is not None
    assert found.failure.detail["dropped"] == 1
    assert found.failure.detail["first"] == [1, 0, 1, 7]


def test_a_wrong_number_stays_wrong_when_the_repetition_is_right(bare: Judge) -> None:
    """What is rarely wrong must not be laundered by the diagnosis."""
    found = judged(
        bare,
        decode(),
        lambda inputs, results: results[0][2].mul_(1.5),
        again=lambda inputs, results: None,
    )
    assert cause(found) == Cause.NUMERIC
    assert found.failure is not None
    assert found.failure.detail["again"] == "right"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite(bare: Judge, value: float) -> None:
    found = judged(bare, decode(), lambda inputs, results: results[1][0, 0, 0, 0].fill_(value))
    assert cause(found) == Cause.NONFINITE
    assert found.failure is not None
    found.failure.canonical()  # no infinity in it, which is not JSON


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ((("bfloat16", (3, 1, 2, 64)),), Cause.SHAPE),
        ((("bfloat16", (3, 1, 2, 64)), ("float32", (3, 2, 64))), Cause.SHAPE),
        ((("float32", (3, 1, 2, 64)), ("float32", (3, 2, 64, 64))), Cause.DTYPE),
        ((("bfloat16", (3, 1, 2, 64)), ("float32", (3, 2, 64, 64))), None),
    ],
)
def test_what_is_returned_has_the_shape_and_dtype_of_the_spec(
    bare: Judge, returned: Any, expected: Cause | None
) -> None:
    loan = bare.lend(decode(), 1)
    fill(bare, 0, 5)
    call(bare, loan)
    metadata = tuple(Returned(dtype=dtype, shape=shape) for dtype, shape in returned)
    assert cause(check(bare, 0, False, 1.0, metadata)) == expected


def test_without_judging_numbers_are_not_looked_at(bare: Judge) -> None:
    loan = bare.lend(decode(), 1)
    fill(bare, 0, 5)
    returned = call(bare, loan, 0, lambda inputs, results: results[0].zero_())
    assert check(bare, 0, False, 1.0, returned) == Checked()
    assert cause(check(bare, 0, True, 1.0, returned)) == Cause.NUMERIC


# ---- poison and draws ---------------------------------------------------------------------------


def outputs_of(made: Judge, loan: Loan) -> list[torch.Tensor]:
    return [x.clone() for x in _sets(made, loan)[0].out]


def test_poison_is_plausible_and_flips_in_every_element(bare: Judge) -> None:
    loan = bare.lend(decode(), 1)
    fill(bare, 0, 5)
    one = outputs_of(bare, loan)
    fill(bare, 0, 5)
    same = outputs_of(bare, loan)
    fill(bare, 0, 5, is_flipped=True)
    flipped = outputs_of(bare, loan)
    fill(bare, 0, 6)
    other = outputs_of(bare, loan)
    for a, b, c, d in zip(one, same, flipped, other, strict=True):
        assert a.isfinite().all()
        assert 0.01 < float(a.float().std()) < 2.0
        assert torch.equal(a, b)
        assert bool((judge._bits(a) != judge._bits(c)).all())
        assert not torch.equal(a, d)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bool])
def test_poison_of_integers(dtype: torch.dtype) -> None:
    tensor = torch.zeros(1000, dtype=dtype)
    judge.plausible(tensor, torch.Generator().manual_seed(1))
    assert len(tensor.unique()) > 1
    before = tensor.clone()
    judge.flip(tensor)
    assert bool((tensor != before).all())


def test_a_slot_is_drawn_anew_only_for_another_seed(bare: Judge) -> None:
    bare.lend(decode(), 2)
    assert fill(bare, 0, 5) > 0.0
    assert fill(bare, 0, 5) == 0.0
    assert fill(bare, 1, 5) > 0.0
    assert fill(bare, 0, 6) > 0.0


def test_the_cases_own_seed_gives_its_own_inputs(bare: Judge) -> None:
    loan = bare.lend(decode(seed=77), 1)
    fill(bare, 0, 77)
    own = catalog.module("gdn_decode", "inputs").make_inputs(decode(seed=77).build())
    assert torch.equal(_sets(bare, loan)[0].inputs.state, own.state)
    fill(bare, 0, 78)
    assert not torch.equal(_sets(bare, loan)[0].inputs.state, own.state)


def test_inputs_that_change_their_shape_with_the_seed_are_the_harness_fault(
    bare: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare.lend(decode(), 1)
    draw = bare._now.draw
    monkeypatch.setattr(bare._now, "draw", lambda seed: draw(seed)._replace(q=torch.zeros(1)))
    reply = judge.answer(bare, Fill(draws=(Draw(slot=0, seed=9),)))
    assert isinstance(reply, Fault)
    assert reply.cause == Cause.HARNESS_BUG
    assert "'q' of seed 9" in reply.message


def test_nan_in_the_expected_output_is_the_harness_fault(
    bare: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    loan = bare.lend(decode(), 2)
    expect = bare._now.expect

    def spoilt(many: Any) -> Any:
        return expect([x._replace(v=torch.full_like(x.v, float("nan"))) for x in many])

    monkeypatch.setattr(bare._now, "expect", spoilt)
    bare.fill([Draw(slot=0, seed=5), Draw(slot=1, seed=6)])
    calls = tuple(Call(slot=slot, returned=call(bare, loan, slot)) for slot in range(2))
    for asked in (calls[:1], calls):
        reply = judge.answer(bare, Check(calls=asked, is_judged=True, allowance=1.0))
        assert isinstance(reply, Fault)
        assert reply.cause == Cause.HARNESS_BUG
        assert "of seed 5 has NaN" in reply.message


# ---- several at a time --------------------------------------------------------------------------


@pytest.mark.parametrize("op", [operator.name for operator in catalog.OPERATORS])
def test_a_draw_does_not_depend_on_those_before_it(bare: Judge, op: str) -> None:
    """Bit by bit, of every generator: each seed has numbers of its own, and nobody takes any from
    torch's own generator."""
    strata = [{"name": name, "seed": 0} for name in catalog.module(op, "adversarial").STRATA]
    workloads_of = [Workload(op=op, listed="adversarial", case=case) for case in strata]
    workloads_of += [listed(op, name) for other, name in RIGHT if other == op]
    for workload in workloads_of:
        bare.lend(workload, 1)
        before = torch.get_rng_state()
        found = {seed: bare._now.draw(seed) for seed in (5, 6, 7)}
        for seed in (7, 6, 5):
            for a, b in zip(found[seed], bare._now.draw(seed), strict=True):
                assert _same(a, b) if isinstance(a, torch.Tensor) else a == b, workload
        assert torch.equal(torch.get_rng_state(), before)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """In layout and every bit: NaN is equal to itself."""
    bits = [torch.empty(x.shape, dtype=x.dtype).copy_(x).view(-1).view(torch.uint8) for x in (a, b)]
    return (a.dtype, a.stride()) == (b.dtype, b.stride()) and torch.equal(*bits)


def test_several_calls_are_checked_together(bare: Judge) -> None:
    """What comes after the first that is wrong is not looked at."""
    loan = bare.lend(decode(), 4)
    draws = [Draw(slot=slot, seed=seed) for slot, seed in ((2, 5), (0, 6), (3, 7), (1, 8))]
    bare.fill(draws)
    calls = [Call(slot=d.slot, returned=call(bare, loan, d.slot)) for d in draws]
    right = bare.check(calls, True, 1.0)
    assert [found.failure for found in right] == [None] * 4
    assert all(0.0 < found.worst < 1.0 for found in right)
    sets = _sets(bare, loan)
    sets[3].results[0][0, 0, 1, 5] += 1.0
    sets[1].inputs.v[0, 0, 0, 0] += 1
    found = bare.check(calls, True, 1.0)
    assert [cause(each) for each in found] == [None, None, Cause.NUMERIC]
    assert found[2].failure is not None
    assert found[2].failure.seed == 7
    (alone,) = bare.check(calls[3:], False, 1.0)
    assert cause(alone) == Cause.MUTATED_INPUT
    assert alone.failure is not None
    assert alone.failure.seed == 8


ONE_LOOK = [
    decode(),
    decode(state="none"),
    decode(mode="inplace"),
    decode(mode="pool"),
    *(
        Workload(op="gdn_decode", listed="adversarial", case={"name": name, "seed": 0})
        for name in ("huge_state", "pool", "pool_int64", "pool_of_padding", "inplace", "no_rows")
    ),
]


@pytest.mark.parametrize("workload", ONE_LOOK, ids=str)
def test_one_look_at_all_results_says_what_a_look_at_each_does(
    bare: Judge, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    loan = bare.lend(workload, 5)
    draws = [Draw(slot=slot, seed=seed) for slot, seed in ((4, 5), (0, 6), (2, 7), (1, 8))]
    bare.fill(draws)
    calls = [Call(slot=d.slot, returned=call(bare, loan, d.slot)) for d in draws]
    each = [bare.check([one], True, 0.5)[0] for one in calls]
    assert [found.failure for found in each] == [None] * 4
    with monkeypatch.context() as patched:
        patched.setattr(bare, "_check", None)  # nobody looks at a single one
        together = bare.check(calls, True, 0.5)
        patched.setattr(judge, "_JOINED_BYTES", 3 * loan.slot_bytes)
        in_groups = bare.check(calls, True, 0.5)
    worst = max(found.worst for found in each)
    for found in (*together, *in_groups):
        assert found.failure is None
        assert found.worst == pytest.approx(worst, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("workload", ONE_LOOK[:-2], ids=str)
def test_one_look_overlooks_nothing(bare: Judge, workload: Workload, which: int) -> None:
    """One wrong element of one call, which is named as if it had been looked at alone. (Outputs of
    padding are 0, and there is nothing to spoil where there are no rows.)"""
    loan = bare.lend(workload, 4)
    draws = [Draw(slot=slot, seed=seed) for slot, seed in ((3, 5), (0, 6), (2, 7), (1, 8))]
    bare.fill(draws)
    calls = [Call(slot=d.slot, returned=call(bare, loan, d.slot)) for d in draws]
    result = _sets(bare, loan)[draws[which].slot].results[0]
    result[0, 0, 1, 5] += 0.5 * result[0, 0, 1].double().norm() + 1e-3
    found = bare.check(calls, True, 1.0)
    assert [cause(each) for each in found] == [*[None] * which, Cause.NUMERIC]
    (alone,) = bare.check(calls[which : which + 1], True, 1.0)
    assert found[which] == alone


def test_what_is_known_to_be_wrong_outlives_the_judges_own_faults(
    bare: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry after them would pass what was wrong once."""
    loan = bare.lend(decode(), 4)
    draws = [Draw(slot=slot, seed=slot + 5) for slot in range(4)]
    bare.fill(draws)
    calls = [Call(slot=d.slot, returned=call(bare, loan, d.slot)) for d in draws]
    expect = bare._now.expect

    def no_memory(many: Any) -> Any:
        raise torch.OutOfMemoryError("no memory for that")

    # The joined look alone fails: each is looked at by itself.
    with monkeypatch.context() as patched:
        patched.setattr(bare, "_joined_errors", no_memory)
        assert [found.failure for found in bare.check(calls, True, 1.0)] == [None] * 4
    # So do the results of all of them at once: each gets its own.
    for drawn in bare._now.drawn.values():
        drawn.expected = None

    def one_alone(many: Any) -> Any:
        return expect(many) if len(many) == 1 else no_memory(many)

    with monkeypatch.context() as patched:
        patched.setattr(bare._now, "join", lambda many: None)
        patched.setattr(bare._now, "expect", one_alone)
        assert [found.failure for found in bare.check(calls, True, 1.0)] == [None] * 4
    # It says wrong, and what each should have given cannot be computed.
    _sets(bare, loan)[2].results[0][0, 0, 1, 5] += 1.0
    bare.fill([])
    for drawn in bare._now.drawn.values():
        drawn.expected = None
    joined = iter([expect])
    with monkeypatch.context() as patched:
        patched.setattr(bare._now, "expect", lambda many: next(joined, no_memory)(many))
        (found,) = bare.check(calls, True, 1.0)
    assert cause(found) == Cause.NUMERIC
    assert found.failure is not None
    assert "one of the calls of seeds [5, 6, 7, 8], which could not be" in found.failure.message
    # A changed input is known before anything is computed.
    _sets(bare, loan)[0].inputs.v[0, 0, 0, 0] += 1
    with monkeypatch.context() as patched:
        patched.setattr(bare._now, "expect", no_memory)
        (found,) = bare.check(calls, True, 1.0)
    assert cause(found) == Cause.MUTATED_INPUT


def test_results_of_calls_together_do_not_pile_up(bare: Judge) -> None:
    loan = bare.lend(decode(), 4)
    bare.fill([Draw(slot=slot, seed=slot + 5) for slot in range(4)])
    calls = [Call(slot=slot, returned=call(bare, loan, slot)) for slot in range(4)]
    for count in (4, 3, 2):
        bare.check(calls[:count], True, 1.0)
        assert [len(key) for key in bare._now.joined] == [count]
    _sets(bare, loan)[1].results[0][0, 0, 1, 5] += 1.0
    bare.check(calls, True, 1.0)
    assert not bare._now.joined


def test_a_draw_that_changed_is_looked_at_anew(bare: Judge) -> None:
    loan = bare.lend(decode(), 2)
    for seeds in ((5, 6), (5, 7), (8, 7)):
        draws = [Draw(slot=slot, seed=seed) for slot, seed in enumerate(seeds)]
        bare.fill(draws)
        calls = [Call(slot=d.slot, returned=call(bare, loan, d.slot)) for d in draws]
        assert [found.failure for found in bare.check(calls, True, 1.0)] == [None, None]
        assert len(bare._now.joined) == 1


def test_the_share_that_the_contest_allows_is_one_calls(
    bare: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it allows a tenth, an eighth of one call is too much, though it is little of all."""

    def judge_official(self: gdn_forms.Expected, results: tuple[torch.Tensor, ...]) -> list[Error]:
        share = (results[0].float() > 50.0).double().mean()
        return [Error("output", "official", float(share), 0.1)]

    def none_of_ours(error: Error) -> float:
        return error.value / error.limit if error.metric == "official" else 0.0

    monkeypatch.setattr(gdn_forms.Expected, "judge_official", judge_official)
    monkeypatch.setattr(judge, "closeness", none_of_ours)
    loan = bare.lend(decode(source="contest"), 8)
    draws = [Draw(slot=slot, seed=slot + 5) for slot in range(8)]
    bare.fill(draws)
    calls = [Call(slot=d.slot, returned=call(bare, loan, d.slot)) for d in draws]
    assert [found.worst for found in bare.check(calls, True, 1.0)] == [0.0] * 8
    spoilt = _sets(bare, loan)[6].results[0].view(-1)
    for share, expected in ((16, None), (8, Cause.NUMERIC)):
        spoilt[: spoilt.numel() // share] += 100.0
        assert cause(bare.check(calls, True, 1.0)[-1 if expected is None else 6]) == expected
    assert len(bare.check(calls, True, 1.0)) == 7


def test_slots_in_between_are_nobodys_fault(bare: Judge) -> None:
    """Only those that were called on are looked at, whatever lies in the others."""
    loan = bare.lend(decode(), 4)
    bare.fill([Draw(slot=slot, seed=5) for slot in range(4)])
    calls = [Call(slot=slot, returned=call(bare, loan, slot)) for slot in (3, 1)]
    bare.slot(2)[:] ^= 0xFF
    bare.slot(0)[:] ^= 0xFF
    assert [found.failure for found in bare.check(calls, True, 1.0)] == [None, None]
    bare.slot(1)[3] ^= 0xFF
    assert [cause(found) for found in bare.check(calls, True, 1.0)] == [None, Cause.OUT_OF_BOUNDS]


@pytest.mark.parametrize("kind", ["guard", "input", "output"])
def test_what_a_call_writes_into_another_slot_shows_there(bare: Judge, kind: str) -> None:
    loan = bare.lend(decode(), 2)
    bare.fill([Draw(slot=0, seed=5), Draw(slot=1, seed=6)])
    calls = [Call(slot=slot, returned=call(bare, loan, slot)) for slot in (1, 0)]
    by_name = {lent.name: lent for lent in loan.tensors}
    place = {"guard": 3, "input": by_name["k"].offset, "output": by_name["new_state"].offset + 2}
    bare.slot(1)[place[kind]] ^= 0x40
    (found,) = bare.check(calls, True, 1.0)
    expected = {"guard": Cause.OUT_OF_BOUNDS, "input": Cause.MUTATED_INPUT}
    assert cause(found) == expected.get(kind, Cause.NUMERIC)


def test_one_of_several_is_diagnosed_by_itself(bare: Judge) -> None:
    """The others keep what they hold."""
    loan = bare.lend(decode(), 3)
    draws = [Draw(slot=slot, seed=slot + 5) for slot in range(3)]
    bare.fill(draws)
    sets = _sets(bare, loan)
    for is_flipped in (False, True):
        if is_flipped:
            bare.fill(draws[1:2], is_flipped=True)
        poison = sets[1].results[0][2, 0, 1, 3].clone()
        slots = (1,) if is_flipped else (0, 1, 2)
        calls = [Call(slot=slot, returned=call(bare, loan, slot)) for slot in slots]
        sets[1].results[0][2, 0, 1, 3] = poison
        if not is_flipped:
            found = bare.check(calls, True, 1.0)
            assert [cause(each) for each in found] == [None, Cause.NUMERIC]
            others = bare.slot(2).clone()
    final = bare.diagnose(1, 1.0)
    assert cause(final) == Cause.DROPPED_ELEMENT
    assert final.failure is not None
    assert (final.failure.seed, final.failure.detail["first"]) == (6, [2, 0, 1, 3])
    assert torch.equal(bare.slot(2), others)


def test_a_draw_that_fails_among_several_is_the_harness_fault(
    bare: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare.lend(decode(), 2)
    draw = bare._now.draw

    def fails(seed: int) -> Any:
        if seed == 9:
            raise ValueError("no such seed")
        return draw(seed)

    monkeypatch.setattr(bare._now, "draw", fails)
    reply = judge.answer(bare, Fill(draws=(Draw(slot=0, seed=8), Draw(slot=1, seed=9))))
    assert isinstance(reply, Fault)
    assert reply.cause == Cause.HARNESS_BUG
    assert "no such seed" in reply.message


# ---- lending ------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["gdn_decode", "gdn_prefill"])
@pytest.mark.parametrize("seed", [0, 1, 77])
def test_what_is_lent_is_known_without_the_cases_own_inputs(
    bare: Judge, monkeypatch: pytest.MonkeyPatch, op: str, seed: int
) -> None:
    """Which the CPU draws, element by element."""
    sizes = {"batch_size": 3} if op == "gdn_decode" else {"lengths": (5, 9)}
    workload = Workload(op=op, listed="contest", case={"name": "x", "seed": seed, **sizes, **SMALL})
    module = workloads.load(op)
    drawn: list[int] = []
    own_inputs = module.own_inputs

    def counting(case: Any, device: torch.device) -> Any:
        drawn.append(case.seed)
        return own_inputs(case, device)

    monkeypatch.setattr(module, "own_inputs", counting)
    bare.lend(workload, 2)
    assert drawn == []
    fill(bare, 0, seed)
    assert drawn == [seed]


@pytest.mark.parametrize(("op", "name"), RIGHT)
def test_own_and_fresh_inputs_are_laid_out_alike(bare: Judge, op: str, name: str) -> None:
    workload = listed(op, name)
    bare.lend(workload, 1)
    for seed in (workload.case["seed"], 2**31 - 1, 0):
        fill(bare, 0, seed)


def test_nothing_but_inputs_and_outputs_is_lent(bare: Judge) -> None:
    loan = bare.lend(decode(mode="pool", scale=0.5), 2)
    text = loan.model_dump_json()
    assert "seed" not in text
    assert "contest" not in text
    names = [lent.name for lent in loan.tensors]
    assert names == ["q", "k", "v", "state", "A_log", "a", "dt_bias", "b", "read_indices",
                     "write_indices", "output"]  # fmt: skip
    assert loan.results == ("output", "state")
    assert loan.scalars == {"scale": 0.5, "inplace": False}
    assert [lent.is_output for lent in loan.tensors].index(True) == len(names) - 1


def test_tensors_keep_their_distance_alignment_and_strides(bare: Judge) -> None:
    workload = listed("gdn_decode", "strided-pool")
    loan = bare.lend(workload, 1)
    drawn = catalog.module("gdn_decode", "inputs").make_inputs(workload.build())
    end = 0
    for lent in loan.tensors:
        assert lent.offset % buffers.ALIGNMENT == 0
        assert lent.offset - end >= buffers.GUARD_BYTES
        end = lent.offset + lent.nbytes
        if not lent.is_output:
            assert lent.stride == getattr(drawn, lent.name).stride()
    assert loan.slot_bytes - end >= buffers.GUARD_BYTES


def test_memory_decides_how_many_slots_there_are(
    bare: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = bare.lend(decode(), 4).slot_bytes
    assert bare.lend(decode(), 4).slots == 4
    for free, slots in ((size * (1 + judge._COPIES + judge._JOINED_COPIES) * 2 * 3, 3), (size, 1)):
        monkeypatch.setattr(bare, "_free_bytes", lambda free=free: free)
        assert bare.lend(decode(), 4).slots == slots


def test_a_slab_grows_by_a_new_one_and_goes_with_the_judge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judge, "_LEAST_SLAB", 1)
    made = Judge(CPU)
    small = made.lend(decode(1), 1)
    path = Path(made.share().path)  # type: ignore[union-attr]
    assert made.lend(decode(1), 1).slab == small.slab
    assert path.exists()
    assert made.lend(decode(9), 1).slab != small.slab
    assert not path.exists()
    path = Path(made.share().path)  # type: ignore[union-attr]
    made.close()
    assert not path.exists()


def test_no_room_for_a_slab(bare: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    before = set(Path("/dev/shm").iterdir())
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(JudgeFailed, match="no room for") as caught:
        bare.lend(decode(), 1)
    assert caught.value.cause == Cause.DISK_FULL
    assert {p for p in Path("/dev/shm").iterdir() if "lent" in p.name} <= before


def test_answers(bare: Judge) -> None:
    facts = judge.answer(bare, Hello())
    assert isinstance(facts, Facts)
    assert (facts.device, facts.arch, facts.timer) == ("cpu", "cpu", "wall")
    assert facts.versions["torch"] == torch.__version__
    reply = judge.answer(bare, Lend(workload=Workload(op="no", listed="", case={}), slots=1))
    assert isinstance(reply, Fault)
    assert reply.cause == Cause.HARNESS_BUG
    assert "'no' is unknown" in reply.message


# ---- the protocol -------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield Channel(ours), theirs
    ours.close()
    theirs.close()


def test_messages_come_as_they_went(ends: tuple[Channel, socket.socket], bare: Judge) -> None:
    channel, theirs = ends
    loan = bare.lend(decode(), 1)
    done = Done(problem=Problem(cause=Cause.COMPILE, message="ü", is_fatal=True))
    for message in (Step(lane=1, slot=2), done, Hello()):
        Channel(theirs).send("n", message)
        envelope = channel.receive(1.0)
        assert (envelope.nonce, envelope.message) == ("n", message)
    assert Loan.model_validate_json(loan.model_dump_json()) == loan


@pytest.mark.parametrize(
    "text",
    [
        b"garbage",
        b'{"nonce":"n"}',
        b'{"nonce":"n","message":{"kind":"unheard of"}}',
        b'{"nonce":"n","message":{"kind":"step","lane":"1","slot":0}}',
        b'{"nonce":"n","message":{"kind":"step","lane":1,"slot":0,"seed":3}}',
        b'{"nonce":"n","message":{"kind":"collected","us":[NaN]}}',
        b'{"nonce":"n","message":{"kind":"collected","us":[1e999]}}',
    ],
)
def test_what_is_no_message(ends: tuple[Channel, socket.socket], text: bytes) -> None:
    channel, theirs = ends
    theirs.sendall(struct.pack(">I", len(text)) + text)
    with pytest.raises(Malformed):
        channel.receive(1.0)


def test_a_frame_beyond_the_limit_is_not_read(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    theirs.sendall(struct.pack(">I", MAX_BYTES + 1))
    with pytest.raises(Malformed, match="expected at most"):
        channel.receive(1.0)


def test_half_a_frame(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    theirs.sendall(struct.pack(">I", 10) + b"{")
    with pytest.raises(TimedOut):
        channel.receive(0.05)
    theirs.close()
    with pytest.raises(Closed):
        channel.receive(1.0)
    with pytest.raises(Closed):
        channel.send("n", Hello())


# ---- kernel times -------------------------------------------------------------------------------


class Records:
    """A device on which every call is a script: (name, start, end) of its kernels."""

    def __init__(self) -> None:
        self.now = 0
        self.launches: list[cupti.Launch] = []
        self.works: list[cupti.Work] = []

    def work(self, duration: int, gap: int = 0) -> None:
        self.now += 10
        correlation = len(self.launches)
        self.launches.append(cupti.Launch(self.now, correlation))
        start = self.now + 100 + gap
        self.works.append(cupti.Work("kernel", start, start + duration, correlation))

    def resume(self) -> None: ...

    def pause(self) -> None: ...

    def overwrite_l2(self) -> None:
        self.work(50_000)

    def synchronize(self) -> None:
        self.now += 1000

    def timestamp(self) -> int:
        self.now += 1
        return self.now

    def drain(self, force: bool = False) -> tuple[list[cupti.Launch], list[cupti.Work]]:
        found = self.launches, self.works
        if force:
            self.launches, self.works = [], []
            return found
        return [], []  # CUPTI may hold them back


def steps(*scripts: Callable[[Records], object]) -> tuple[Any, Records]:
    records = Records()
    timer = worker.Kernels(records)
    timer.begin()
    for script in scripts:
        try:
            timer.step(partial(partial, script, records), lambda result: result)
        except RuntimeError:
            continue
    return timer.collect(), records


def two(records: Records) -> None:
    records.work(2000)
    records.work(3000, gap=2500)


def test_times_are_sums_and_spans_of_a_calls_kernels() -> None:
    found, _ = steps(two, lambda records: records.work(1500))
    assert found.us == (5.0, 1.5)
    assert found.span_us == (5.51, 1.5)
    assert found.kernels == (2, 1)
    assert found.strays == (0, 0)


def test_times_are_told_once() -> None:
    """Collected in the middle of a series, and at its end."""
    records = Records()
    timer = worker.Kernels(records)
    timer.begin()
    for duration in (1000, 2000):
        timer.step(partial(partial, records.work, duration), lambda result: result)
    assert timer.collect().us == (1.0, 2.0)
    timer.step(lambda: lambda: records.work(3000), lambda result: result)
    found = timer.collect()
    assert (found.us, found.kernels, found.strays) == ((3.0,), (1,), (0,))
    wall = worker.Wall()
    wall.step(lambda: lambda: None, lambda result: result)
    assert len(wall.collect().us) == 1
    assert wall.collect().us == ()


def test_a_call_without_a_record_or_with_an_error_has_no_time() -> None:
    def fails(records: Records) -> None:
        records.work(1000)
        raise RuntimeError

    found, _ = steps(lambda records: None, fails, two)
    assert found.us == (None, None, 5.0)


def test_work_outside_the_call_is_counted() -> None:
    """Deferred until the caller synchronises, or launched between two calls."""

    def defers(records: Records) -> None:
        records.work(1000)
        before = records.synchronize

        def late() -> None:
            records.synchronize = before  # type: ignore[method-assign]
            before()
            records.work(9000)

        records.synchronize = late  # type: ignore[method-assign]

    found, _ = steps(two, defers, two)
    assert found.us == (5.0, 1.0, 5.0)
    assert found.strays == (0, 1, 0)


def test_what_a_timer_rests_on_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker.tampered() == ()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(cupti.Recorder, "timestamp", lambda self: 0)
    assert worker.tampered() == ("torch.cuda.synchronize", "Recorder.timestamp")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), Cause.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), Cause.OUT_OF_BOUNDS),
        (RuntimeError("CUDA error: unspecified launch failure"), Cause.CRASH),
        (RuntimeError("uncorrectable ECC error encountered"), Cause.ECC_XID),
        (RuntimeError("GPU has fallen off the bus"), Cause.GPU_LOST),
        (RuntimeError("something else"), Cause.COMPILE),
    ],
)
def test_causes_of_errors(error: Exception, expected: Cause) -> None:
    assert worker.cause_of(error, Cause.COMPILE) == expected


# ---- guards -------------------------------------------------------------------------------------


def test_a_device_is_locked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    with guards.exclusive("gpu", 0.0):
        with guards.exclusive("another", 0.0):
            pass
        with pytest.raises(DeviceBusy, match=r"gpu\.lock") as caught, guards.exclusive("gpu", 0.05):
            pass
        assert caught.value.exit_code == 3
        # Who waits keeps its place: the holder cannot have the lock twice before it.
        with (
            guards._flocked(tmp_path / "fastkernels-tune-gpu.queue", 0.0),
            pytest.raises(DeviceBusy, match=r"gpu\.queue"),
            guards.exclusive("gpu", 0.0),
        ):
            pass
    with guards.exclusive("gpu", 0.0):
        pass


def gpu(*readings: Reading, own: tuple[int, ...] = (1, 2)) -> list[guards.Verdict]:
    """Blocks of one reading each."""
    guard = GpuGuard("GPU-0", 0.95, iter(readings).__next__)
    return [guard.judge([guard.read()], own) for _ in readings]


def test_a_low_clock_spoils_a_block() -> None:
    found = gpu(Reading(1980, 50), Reading(1900, 50), Reading(1800, 60), Reading())
    assert [v.reason for v in found] == [
        "", "", "SM clock 1800 MHz, expected at least 1881", "",
    ]  # fmt: skip
    assert found[2].cause == Cause.THROTTLED
    assert found[2].facts == {"source": "given", "sm_mhz": [1800], "temperature_c": [60]}


def test_the_highest_reading_of_a_block_counts() -> None:
    guard = GpuGuard("GPU-0", 0.95, Reading)
    assert not guard.judge([Reading(345), Reading(1980), Reading(1200)], ()).reason


def test_throttling_spoils_a_block() -> None:
    (found,) = gpu(Reading(1980, 90, ("sw_thermal_slowdown",)))
    assert found.reason == "throttled: sw_thermal_slowdown"
    assert guards.throttle_reasons(0x1 | 0x2) == ()
    assert guards.throttle_reasons(0x4 | 0x40) == ("sw_power_cap", "hw_thermal_slowdown")


@pytest.mark.parametrize(
    ("pids", "foreign"), [((1, 2), 0), ((), 0), ((1, 9), 1), ((7, 8), 0), ((7, 8, 9), 1)]
)
def test_foreign_processes_spoil_a_block(pids: tuple[int, ...], foreign: int) -> None:
    """In a container the driver's ids are the host's, and can only be counted."""
    (found,) = gpu(Reading(pids=frozenset(pids)))
    assert found.facts.get("foreign", 0) == foreign
    assert (found.cause == Cause.FOREIGN_PROCESS) == bool(foreign)
    assert bool(found.reason) == bool(foreign)


def test_what_nvidia_smi_says() -> None:
    read = guards.parse_smi("1980, 41, 0x0000000000000020", "11\n12")
    assert read == Reading(1980, 41, ("sw_thermal_slowdown",), frozenset({11, 12}))
    assert guards.parse_smi("[N/A], [N/A], [N/A]", "") == Reading()
    assert guards.parse_smi("", "[Not Found]") == Reading()


def test_without_a_source_every_block_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "_nvml", lambda uuid: (_ for _ in ()).throw(ImportError()))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(OSError()))
    guard = GpuGuard("GPU-0", 0.95)
    verdict = guard.judge([guard.read()], ())
    assert verdict.facts["source"] == "none"
    assert not verdict.reason


def test_a_swamped_machine_spoils_a_block() -> None:
    guard = LoadGuard(2.0, lambda: Reading(load=2.5))
    found = guard.judge([guard.read(), Reading(load=2.25)], ())
    assert found.reason == "2.25 running tasks per core, expected at most 2"
    assert found.cause == Cause.FOREIGN_PROCESS
    assert not guard.judge([guard.read(), Reading(load=1.0)], ()).reason
    load = LoadGuard().read().load
    assert load is not None
    assert load > 0


def test_a_draw_that_lies_there_is_not_made_again(bare: Judge) -> None:
    """Nor is what it has to give: the next candidate is judged on both."""
    loan = bare.lend(decode(), 2)
    counts: Counter[str] = Counter()

    def counted(name: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(argument: Any) -> Any:
            counts[name] += 1
            return function(argument)

        return call

    now = bare._now
    now.draw, now.expect = counted("draw", now.draw), counted("expect", now.expect)
    for spoil in (None, lambda _, results: results[0].add_(1.0), None):
        bare.fill([Draw(slot=0, seed=4), Draw(slot=1, seed=5)])
        for slot in (0, 1):
            found = check(bare, slot, True, 1.0, call(bare, loan, slot, spoil))
            assert (found.failure is None) == (spoil is None)
    bare.fill([Draw(slot=0, seed=6)])
    assert check(bare, 0, True, 1.0, call(bare, loan)).failure is None
    assert counts == {"draw": 3, "expect": 3}


def test_what_writes_while_a_slot_is_filled_is_in_no_draw(
    bare: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of a candidate that outlives its call: the next ones get what was drawn."""
    loan = bare.lend(decode(), 2)
    (v,) = (lent for lent in loan.tensors if lent.name == "v")
    lay = bare._lay

    def late(draw: Draw, is_flipped: bool) -> None:
        lay(draw, is_flipped)
        bare.slot(0)[v.offset : v.offset + v.nbytes] ^= 0x3F

    monkeypatch.setattr(bare, "_lay", late)
    for _ in range(3):
        fill(bare, 0, 5)
        assert check(bare, 0, True, 1.0, call(bare, loan)).failure is None


def test_a_draw_that_lies_there_is_laid_as_before(bare: Judge) -> None:
    """Guard bytes and poison, too, whatever a call or a diagnosis did to them."""
    loan = bare.lend(decode(), 2)
    fill(bare, 1, 5)
    first, other = bare.slot(1).clone(), bare.slot(0).clone()
    bare.slot(1)[:] ^= 0xFF
    fill(bare, 1, 5)
    assert torch.equal(bare.slot(1), first)
    fill(bare, 1, 5, is_flipped=True)
    lent = next(each for each in loan.tensors if each.is_output)
    assert not torch.equal(buffers.view(first, lent), buffers.view(bare.slot(1), lent))
    assert check(bare, 1, True, 1.0, call(bare, loan, 1)).failure is None
    fill(bare, 1, 5)
    assert torch.equal(bare.slot(1), first)
    assert torch.equal(bare.slot(0), other)
    fill(bare, 1, 6)
    assert not torch.equal(bare.slot(1), first)
