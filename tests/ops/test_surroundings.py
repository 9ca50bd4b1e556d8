"""What a caller's surroundings must not change, and what every operator refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fastkernels
from fastkernels import catalog, envs
from fastkernels.core.route import Operator
from fastkernels.core.spec import ScalarSpec
from fastkernels.ops._shared.cases import Case
from fastkernels.testing import contracts
from fastkernels.testing.compare import as_tuple, clone, judge, same_bits

OPERATORS = pytest.mark.parametrize("operator", catalog.OPERATORS, ids=lambda op: op.name)
MODES = pytest.mark.parametrize(
    ("operator", "mode"),
    [
        pytest.param(operator, mode, id=f"{operator.name}-{mode}")
        for operator in catalog.OPERATORS
        for mode in operator.spec.modes
    ],
)


def first_case(operator: Operator, mode: str) -> Case:
    return next(c for c in contracts.cases(operator, "CORRECTNESS") if c.mode == mode)


def make(operator: Operator, mode: str | None = None) -> Any:
    case = first_case(operator, mode or operator.spec.modes[0])
    return catalog.module(operator.name, "inputs").make_inputs(case)


def call(operator: Operator, inputs: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    return as_tuple(operator.function(**inputs._asdict(), **options))


@MODES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing(operator: Operator, mode: str, dtype: torch.dtype) -> None:
    inputs = make(operator, mode)
    expected = call(operator, clone(inputs))
    with torch.autocast("cpu", dtype=dtype):
        got = call(operator, clone(inputs))
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


@MODES
def test_tensors_made_in_inference_mode_are_served_outside(operator: Operator, mode: str) -> None:
    """A server's pool and buffers, allocated under inference mode, are filled like any other."""
    with torch.inference_mode():
        inputs = clone(make(operator, mode))
    expected = call(operator, clone(make(operator, mode)))
    with torch.inference_mode():
        outputs = tuple(
            torch.empty_like(t) for t in expected[: 1 if mode in ("inplace", "pool") else 2]
        )
    out = outputs if len(outputs) > 1 else outputs[0]
    got = call(operator, inputs, out=out)
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
    assert not call(operator, make(operator, mode))[0].is_inference()


@OPERATORS
def test_default_dtype_and_device_change_nothing(operator: Operator) -> None:
    inputs = make(operator)
    expected = call(operator, inputs)
    torch.set_default_dtype(torch.float64)
    try:
        got = call(operator, inputs)
        with torch.device("meta"):
            elsewhere = call(operator, inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    for outputs in (got, elsewhere):
        assert all(same_bits(a, b) for a, b in zip(outputs, expected, strict=True))


@OPERATORS
def test_knobs_must_be_positive(operator: Operator) -> None:
    """A tile of -1 would skip every row in silence."""
    route = operator.safe_route
    inputs = make(operator)
    for knob in vars(route.default_config):
        for value in (0, -1):
            with (
                pytest.raises(fastkernels.ArgumentError, match=f"knob '{knob}' is {value}"),
                fastkernels.force_route(operator.name, route.name, {knob: value}),
            ):
                call(operator, inputs)


@OPERATORS
def test_candidates_are_legal_knobs_and_right(operator: Operator) -> None:
    """Every value that a tuner may try gives a right result."""
    route = operator.safe_route
    case = first_case(operator, operator.spec.modes[0])
    inputs = make(operator)
    for knob, values in route.candidates.items():
        for value in values:
            with fastkernels.force_route(operator.name, route.name, {knob: value}):
                outputs = call(operator, inputs)
            report = judge(operator, route, {knob: value}, case, inputs, outputs)
            assert report.ok, str(report)


@OPERATORS
def test_numbers_beyond_float64_are_refused(operator: Operator) -> None:
    inputs = make(operator)
    for argument in (*operator.spec.inputs, *operator.spec.options):
        if isinstance(argument, ScalarSpec) and argument.kind == "float":
            with pytest.raises(fastkernels.ArgumentError, match=f"'{argument.name}' is beyond"):
                call(operator, inputs._replace(**{argument.name: 10**400}))


@MODES
def test_every_scalar_is_checked(operator: Operator, mode: str) -> None:
    inputs = make(operator, mode)
    for argument in (*operator.spec.inputs, *operator.spec.options):
        if isinstance(argument, ScalarSpec):
            with pytest.raises(fastkernels.ArgumentError, match=f"'{argument.name}' is"):
                call(operator, inputs._replace(**{argument.name: object()}))


@MODES
def test_an_unknown_check_level_is_an_error(
    operator: Operator, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(envs.CHECK, "everything")
    with pytest.raises(ValueError, match="FASTKERNELS_CHECK is 'everything'"):
        call(operator, make(operator, mode))


@OPERATORS
def test_the_judge_sees_shapes(operator: Operator) -> None:
    """A missing row or column, an extra one, and a flat result are wrong, whatever they hold."""
    case = first_case(operator, operator.spec.modes[0])
    inputs = make(operator)
    right = call(operator, inputs)
    route = operator.safe_route
    wrong = [
        right[0][:-1],
        right[0][..., :-1],
        torch.cat([right[0], right[0]]),
        right[0].flatten(),
    ]
    for output in wrong:
        report = judge(operator, route, None, case, inputs, (output, *right[1:]))
        assert not report.ok, output.shape


def test_a_kept_slot_must_keep_its_sign_of_zero() -> None:
    operator = catalog.operator("gdn_decode")
    case = first_case(operator, "pool")
    inputs = make(operator, "pool")
    inputs.state[0] = -0.0  # slot 0 is read and written by no row
    output, pool = call(operator, clone(inputs))
    assert judge(operator, operator.safe_route, None, case, inputs, (output, pool)).ok
    pool[0] = 0.0
    assert not judge(operator, operator.safe_route, None, case, inputs, (output, pool)).ok


@pytest.mark.parametrize(("A_log", "a"), [(-800.0, math.inf), (800.0, -800.0), (math.inf, -800.0)])
def test_infinity_times_zero_in_a_gate_is_zero(A_log: float, a: float) -> None:
    """The decay is then 1: with beta = 0 the state is kept."""
    operator = catalog.operator("gdn_decode")
    inputs = make(operator)
    inputs.A_log.fill_(A_log)
    inputs.a.fill_(a)
    inputs.b.fill_(-1000.0)
    output, state = call(operator, inputs)
    assert torch.equal(state, inputs.state)
    assert output.isfinite().all()


@pytest.mark.parametrize("name", ["k", "v", "a", "b"])
@pytest.mark.parametrize("value", [math.nan, 1e25])
def test_a_wild_token_spoils_no_earlier_one(name: str, value: float) -> None:
    """C28: what stands before a cut does not depend on what comes after, whatever it is."""
    from fastkernels.ops.gdn_prefill.inputs import Case as PrefillCase
    from fastkernels.ops.gdn_prefill.inputs import make_inputs

    case = PrefillCase("wild", lengths=(40,), num_q_heads=1, num_v_heads=2, head_size=16)
    clean = make_inputs(case)
    wild = clone(clean)
    getattr(wild, name)[25] = value
    function = fastkernels.gdn_prefill
    (expected, _), (got, _) = (function(**x._asdict()) for x in (clean, wild))
    assert torch.equal(got[:25], expected[:25])
    if math.isnan(value):
        assert got[25:].isnan().all()


def test_attention_scales_before_it_multiplies() -> None:
    """q.k overflows float32 here, the logit does not."""
    q = torch.full((1, 1, 64), 1e19).bfloat16()
    cache = torch.full((1, 64, 64), 1e19).bfloat16()
    indices = torch.arange(4, dtype=torch.int32)[None]
    output, lse = fastkernels.dsa_sparse_attention(q, q, cache, cache, indices, 1e-38)
    expected = 2 + 2 * 64 * float(q[0, 0, 0]) ** 2 * 1e-38 / math.log(2)
    assert lse.item() == pytest.approx(expected, rel=1e-5)
    assert torch.equal(output[0, 0], cache[0, 0])
