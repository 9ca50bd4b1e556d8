"""gdn_decode beyond the contract: the oracle against another formulation, reports, refusals.

The oracle over all cases, poisoned outputs and aliasing are in test_contracts.py, graphs and
streams in tests/graph. C16 (compilations per batch size) and C17 (host time per call) are in
test_gdn_decode_gpu.py;
C08 (the layout that prefill hands over) is in test_gdn_prefill.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastkernels import ArgumentError, gdn_decode
from fastkernels.ops._shared.gdn import gates
from fastkernels.ops.gdn_decode.inputs import SERVING, Case, gap_cases, make_inputs
from fastkernels.ops.gdn_decode.problem import Inputs
from fastkernels.ops.gdn_decode.reference import Expected, reference
from fastkernels.ops.gdn_decode.routes import torch_recurrent
from fastkernels.ops.gdn_decode.spec import SPEC
from fastkernels.testing.compare import clone, same_bits

SMALL: dict[str, Any] = {"num_q_heads": 2, "num_v_heads": 4, "head_size": 16}
UNREAD = 10**6  # an index far outside of every pool


def inputs_of(batch_size: int, **fields: Any) -> Inputs:
    return make_inputs(Case("test", batch_size, **(SMALL | fields)))


def decode(inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    return gdn_decode(**inputs._asdict(), **options)


def pool_of(slots: int) -> Tensor:
    return torch.randn(slots, 4, 16, 16, generator=torch.Generator().manual_seed(slots))


def assert_judged(expected: Expected, outputs: tuple[Tensor, ...]) -> None:
    errors = expected.judge(outputs)
    assert all(error.ok for error in errors), "; ".join(map(str, errors))


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def constant(inputs: Inputs, **values: float) -> Inputs:
    """The inputs with whole arguments set to one value."""
    tensors: dict[str, Any] = {n: torch.full_like(getattr(inputs, n), x) for n, x in values.items()}
    return inputs._replace(**tensors)


# ---- the oracle and the torch route -------------------------------------------------------------


@pytest.mark.parametrize("gate_kind", ["contest", "extreme"])
def test_oracle_against_the_transfer_matrix(gate_kind: str) -> None:
    """S' = S g (I - beta k k^T) + beta v k^T in einsums, value head h with key head h // 3."""
    inputs = inputs_of(5, num_v_heads=6, gates=gate_kind, scale=0.3, seed=1)
    assert inputs.state is not None
    log_g, beta = gates(inputs.A_log, inputs.a[:, 0], inputs.dt_bias, inputs.b[:, 0])
    q, k = (t[:, 0].double()[:, [0, 0, 0, 1, 1, 1]] for t in (inputs.q, inputs.k))
    v = inputs.v[:, 0].double()
    erase = torch.eye(16).double() - torch.einsum("bh,bhi,bhj->bhij", beta, k, k)
    state = torch.einsum("bh,bhvi,bhij->bhvj", log_g.exp(), inputs.state.double(), erase)
    state = state + torch.einsum("bh,bhv,bhk->bhvk", beta, v, k)
    expected = reference(inputs)
    torch.testing.assert_close(expected.new_state, state, rtol=1e-10, atol=1e-13)
    output = 0.3 * torch.einsum("bhvk,bhk->bhv", state, q)
    torch.testing.assert_close(expected.output[:, 0], output, rtol=1e-10, atol=1e-13)


def test_the_judge_sees_one_bad_row() -> None:
    inputs = inputs_of(9, mode="pool", seed=2)
    expected = reference(inputs)
    output, state = decode(inputs)
    assert_judged(expected, (output, state))
    kept, written = (int(rows.nonzero()[-1]) for rows in (expected.kept, ~expected.kept))
    assert inputs.read_indices is not None
    padding = inputs.read_indices.tolist().index(-1)
    for change, wrong in (
        (lambda o, s: o[padding, 0, 0].fill_(1e-30), [True, False, False]),
        (lambda o, s: o[0, 0, 3].mul_(1.1), [True, False, False]),
        (lambda o, s: o[0, 0, 3, 2:3].fill_(math.nan), [True, False, False]),
        (lambda o, s: s[written, 1].mul_(1.0001), [False, True, False]),
        (lambda o, s: s[written, 1].copy_(s[written, 1].mT.clone()), [False, True, False]),
        (lambda o, s: s[kept, 1, 0, 0].add_(1e-6), [False, False, True]),
    ):
        outputs = (output.clone(), state.clone())
        change(*outputs)
        assert [not error.ok for error in expected.judge(outputs)] == wrong


@settings(max_examples=25, deadline=None)
@given(
    batch_size=st.integers(0, 9),
    heads=st.sampled_from(((1, 1), (2, 2), (2, 4), (1, 3))),
    head_size=st.sampled_from((16, 33)),  # one bfloat16 alone may round by 3.9e-3
    gate_kind=st.sampled_from(("contest", "keep", "forget", "slow", "extreme")),
    keys=st.sampled_from(("unit", "raw")),
    mode=st.sampled_from(SPEC.modes),
    layout=st.sampled_from(("contiguous", "fused")),
    indices=st.sampled_from(("int32", "int64")),
    seed=st.integers(0, 2**16),
)
def test_route_against_the_oracle(
    batch_size: int, heads: tuple[int, int], gate_kind: str, **fields: Any
) -> None:
    num_q_heads, num_v_heads = heads
    fields |= {"num_q_heads": num_q_heads, "num_v_heads": num_v_heads, "gates": gate_kind}
    inputs = inputs_of(batch_size, **fields)
    expected = reference(inputs)
    outputs = decode(clone(inputs))
    assert_judged(expected, outputs)


def test_route_is_exact_to_float32() -> None:
    """Far below the limits, against the norm of the result itself."""
    inputs = inputs_of(33, seed=3)
    expected = reference(inputs)
    output, state = decode(inputs)
    assert relative(state, expected.new_state) < 1e-6
    assert relative(output, expected.output) < 2.5e-3  # bfloat16's rounding is 1.7e-3


@pytest.mark.parametrize("mode", SPEC.modes)
def test_route_reads_no_value_off_the_cpu(mode: str) -> None:
    """Meta tensors have no values: an operation that would synchronise a GPU fails on them."""
    inputs = make_inputs(Case("meta", 7, mode=mode, **SMALL))
    on_meta = Inputs._make(x.to("meta") if isinstance(x, Tensor) else x for x in inputs)
    assert on_meta.state is not None
    outputs = (torch.empty_like(on_meta.v), torch.empty_like(on_meta.state))
    torch_recurrent.launch(on_meta, outputs, None, torch_recurrent.Config())


# ---- reports about kernels of this kind ---------------------------------------------------------


def test_c01_padding_row_is_not_slot_zero() -> None:
    pool = pool_of(3)
    before = pool.clone()
    inputs = inputs_of(2, seed=4)._replace(state=pool)
    output, state = decode(inputs._replace(read_indices=torch.tensor([1, -1], dtype=torch.int32)))
    alone = decode(inputs._replace(state=before[[1, 0]]))
    assert state is pool
    assert same_bits(output[0], alone[0][0])
    assert not output[1].any()
    assert same_bits(pool[1], alone[1][0])
    assert same_bits(pool[[0, 2]], before[[0, 2]])


def test_c02_indices_as_a_strided_column() -> None:
    table = torch.full((3, 4), UNREAD, dtype=torch.int32)
    table[:, 0] = torch.tensor([2, 0, 1])
    inputs = inputs_of(3, seed=5)
    strided, packed = (
        decode(inputs._replace(state=pool_of(3), read_indices=indices))
        for indices in (table[:, 0], table[:, 0].clone())
    )
    assert table[:, 0].stride() == (4,)
    assert all(same_bits(a, b) for a, b in zip(strided, packed, strict=True))


@pytest.mark.parametrize("mode", ["inplace", "pool"])
def test_c04_padded_slots_are_updated_where_they_lie(mode: str) -> None:
    buffer = torch.full((4, 1024 + 64), 7.0)
    state = buffer[:, :1024].unflatten(1, (4, 16, 16))
    state.copy_(pool_of(4))
    inputs = inputs_of(4, seed=6)._replace(state=state)
    expected = decode(inputs._replace(state=pool_of(4)))[1]
    if mode == "pool":
        _, result = decode(inputs._replace(read_indices=torch.tensor([-1, -1, 2, -1])))
        assert same_bits(state[[0, 1, 3]], pool_of(4)[[0, 1, 3]])
        assert same_bits(state[2], expected[2])
    else:
        _, result = decode(inputs._replace(inplace=True))
        assert same_bits(state, expected)
    assert result is state
    assert bool((buffer[:, 1024:] == 7.0).all())


def test_c05_slices_of_fused_projections() -> None:
    fused = inputs_of(5, layout="fused", seed=7)
    assert not fused.q.is_contiguous()
    assert not fused.a.is_contiguous()
    packed = Inputs._make(x.contiguous() if isinstance(x, Tensor) else x for x in fused)
    assert all(same_bits(a, b) for a, b in zip(decode(fused), decode(packed), strict=True))


def test_c07_results_are_not_buffers_of_later_calls() -> None:
    first = decode(inputs_of(5, seed=8))
    kept = [t.clone() for t in first]
    second = decode(inputs_of(5, seed=9))
    for result, before, other in zip(first, kept, second, strict=True):
        assert same_bits(result, before)
        assert result.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("A_log", "a", "g"),
    [
        (20.0, 100.0, 0.0),
        (0.0, -200.0, 1.0),
        (-100.0, 0.0, 1.0),
        (90.0, 0.0, 0.0),
        (90.0, -200.0, 1.0),  # the definition's float32 arithmetic gives inf * 0 = NaN
        (80.0, -50.0, 0.0),
        (-30.0, 3.0, 1.0),
        (1e3, -1e3, 1.0),
        (1e3, 0.0, 0.0),
    ],
)
def test_c10_gates_at_the_ends_of_their_range(A_log: float, a: float, g: float) -> None:
    """With beta near 0 a gate of 1 keeps the state, a gate of 0 forgets it."""
    inputs = constant(inputs_of(3, seed=10), A_log=A_log, dt_bias=0.0, a=a, b=-30.0)
    output, state = decode(inputs)
    assert output.isfinite().all()
    assert inputs.state is not None
    torch.testing.assert_close(state, inputs.state * g, rtol=1e-6, atol=1e-10)


def test_c10_softplus_is_the_identity_for_large_arguments() -> None:
    """log_g = -exp(A_log) * a for a = 21 and 30: g = exp(-0.021) and exp(-0.03)."""
    inputs = constant(inputs_of(2, seed=11), A_log=math.log(1e-3), dt_bias=0.0, b=-30.0)
    inputs.a[0], inputs.a[1] = 21.0, 30.0
    _, state = decode(inputs)
    assert inputs.state is not None
    for row, value in enumerate((21.0, 30.0)):
        wanted = inputs.state[row] * math.exp(-1e-3 * value)
        torch.testing.assert_close(state[row], wanted, rtol=1e-6, atol=1e-10)


def test_c11_keys_and_queries_are_not_normalised() -> None:
    inputs = constant(inputs_of(2, head_size=128, state="none"), q=0.0, k=0.0, v=1.0, b=30.0)
    inputs.k[..., 3], inputs.q[..., 3] = 2.0, 1.0
    output, state = decode(inputs)
    torch.testing.assert_close(state[..., 3], torch.full_like(state[..., 3], 2.0))
    assert float(output.float().mean()) == pytest.approx(2 / math.sqrt(128), rel=4e-3)
    state[..., 3] = 0
    assert not state.any()


def test_c13_read_and_write_slots_differ() -> None:
    pool = pool_of(4)
    before = pool.clone()
    inputs = inputs_of(2, seed=12)
    output, _ = decode(
        inputs._replace(
            state=pool, read_indices=torch.tensor([1, 2]), write_indices=torch.tensor([3, -1])
        )
    )
    alone = decode(inputs._replace(state=before[1:3]))
    assert same_bits(output, alone[0])
    assert same_bits(pool[3], alone[1][0])
    assert same_bits(pool[:3], before[:3])


@pytest.mark.parametrize("state", ["random", "none"])
def test_c14_empty_batch(state: str) -> None:
    output, new_state = decode(inputs_of(0, state=state, num_v_heads=8, head_size=128))
    assert output.shape == (0, 1, 8, 128)
    assert new_state.shape == (0, 8, 128, 128)


def test_c14_empty_pool_with_padding_rows() -> None:
    inputs = inputs_of(2)._replace(state=pool_of(0), read_indices=torch.tensor([-1, 0]))
    output, state = decode(inputs)
    assert not output.any()
    assert state.shape[0] == 0


@pytest.mark.parametrize("scale", [None, 0.0, 0])
def test_c134_state_none_is_zeros_and_scale_none_the_default(scale: float | None) -> None:
    inputs = inputs_of(3, state="none", seed=13)
    zeros = inputs._replace(state=torch.zeros(3, 4, 16, 16), scale=0.25)
    results = zip(decode(inputs._replace(scale=scale)), decode(zeros), strict=True)
    assert all(same_bits(a, b) for a, b in results)


# ---- values on the device -----------------------------------------------------------------------


def test_slots_outside_the_pool_are_padding() -> None:
    """Such an index is never dereferenced; on the write side the state is not stored."""
    pool = pool_of(4)
    before = pool.clone()
    inputs = inputs_of(4, seed=14)._replace(
        state=pool,
        read_indices=torch.tensor([UNREAD, 1, -(2**31), 2], dtype=torch.int32),
        write_indices=torch.tensor([0, UNREAD, 3, 2], dtype=torch.int32),
    )
    expected = reference(inputs)
    output, _ = decode(inputs)
    assert_judged(expected, (output, pool))
    assert output.flatten(1).any(1).tolist() == [False, True, False, True]
    assert same_bits(pool[[0, 1, 3]], before[[0, 1, 3]])


def test_nan_in_padding_rows_and_unnamed_slots() -> None:
    pool = torch.full((4, 4, 16, 16), math.nan)
    pool[2] = pool_of(1)[0]
    inputs = inputs_of(2, seed=15)._replace(state=pool, read_indices=torch.tensor([-1, 2]))
    for x in (inputs.q, inputs.k, inputs.v, inputs.a, inputs.b):
        x[0] = math.nan
    output, _ = decode(inputs)
    assert not output[0].any()
    assert output[1].isfinite().all()
    assert pool[2].isfinite().all()
    assert pool[[0, 1, 3]].isnan().all()


@pytest.mark.parametrize(
    ("read", "write", "message"),
    [
        ([3, 4], None, r"'read_indices'\[1\] is 4, expected -1 or 0\.\.3"),
        ([-2, 0], None, r"'read_indices'\[0\] is -2, expected -1 or 0\.\.3"),
        ([0, 1], [0, 4], r"'write_indices'\[1\] is 4, expected -1 or 0\.\.3"),
        ([1, 1], None, r"'write_indices'\[1\] is 1, expected a slot that no other row writes"),
        ([0, 1], [2, 2], r"'write_indices'\[1\] is 2, .*row 0 does"),
        ([0, 1], [1, 3], r"'read_indices'\[1\] is 1, .*row 0 does"),
        ([0, 1], [2, 0], r"'read_indices'\[0\] is 0, .*row 1 does"),
    ],
)
def test_wrong_slots_are_errors_when_values_are_checked(
    read: list[int], write: list[int] | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of(2)._replace(
        state=pool_of(4),
        read_indices=torch.tensor(read),
        write_indices=None if write is None else torch.tensor(write),
    )
    decode(inputs)
    monkeypatch.setenv("FASTKERNELS_CHECK", "values")
    with pytest.raises(ArgumentError, match=message):
        decode(inputs)


@pytest.mark.parametrize(
    ("read", "write"),
    [([3, -1], None), ([-1, -1], [2, 2]), ([0, 0], [1, -1]), ([0, 1], [0, 1]), ([0, 1], [-1, -1])],
)
def test_legal_slots_pass_the_value_check(
    read: list[int], write: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTKERNELS_CHECK", "values")
    inputs = inputs_of(2)._replace(
        state=pool_of(4),
        read_indices=torch.tensor(read),
        write_indices=None if write is None else torch.tensor(write),
    )
    assert_judged(reference(inputs), decode(inputs))


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 2, 2, 16).bfloat16()}, r"seq_len=2|'q' has shape \(3, 2, 2, 16\)"),
        ({"q": torch.zeros(3, 2, 16).bfloat16()}, r"'q' has shape \(3, 2, 16\), expected 4 axes"),
        ({"state": torch.zeros(3, 4, 16, 16).bfloat16()}, "'state' is bfloat16.*not supported yet"),
        ({"state": torch.zeros(2, 4, 16, 16)}, r"'state' has shape \(2, .*batch_size=3"),
        ({"state": torch.zeros(3, 4, 16, 16).mT}, "'state' has strides"),
        ({"state": None, "inplace": True}, "'state' is None, expected a tensor in inplace form"),
        (
            {"state": torch.zeros(1, 4, 16, 16).expand(3, -1, -1, -1), "inplace": True},
            "own address",
        ),
        ({"write_indices": torch.zeros(3, dtype=torch.int32)}, "'read_indices' is None"),
        ({"read_indices": torch.zeros(2, dtype=torch.int32)}, r"'read_indices' has shape \(2,\)"),
        ({"read_indices": torch.zeros(3)}, "'read_indices' is float32, expected int32 or int64"),
        ({"v": torch.zeros(3, 1, 3, 16).bfloat16()}, "num_v_heads=3, expected num_v_heads a mult"),
        ({"k": torch.zeros(3, 1, 1, 16).bfloat16()}, "'k' has shape .*num_k_heads=2"),
        ({"k": torch.zeros(3, 1, 2, 8).bfloat16()}, "'k' has shape .*head_size=16"),
        ({"dt_bias": torch.zeros(4).bfloat16()}, "'dt_bias' is bfloat16, expected float32"),
        ({"scale": "1"}, "'scale' is str, expected a float or None"),
        ({"inplace": 1}, "'inplace' is int, expected a bool"),
    ],
)
def test_refused_arguments(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        decode(inputs_of(3)._replace(**change))


def test_several_tokens_point_to_prefill() -> None:
    inputs = inputs_of(3)
    two = {n: getattr(inputs, n).repeat_interleave(2, 1) for n in ("q", "k", "v", "a", "b")}
    with pytest.raises(ArgumentError, match="seq_len=2, expected 1"):
        decode(inputs._replace(**two))


def test_a_shared_state_may_be_read() -> None:
    """Overlapping rows of a state are refused only where it is written."""
    inputs = inputs_of(3, seed=16)
    shared = pool_of(1).expand(3, -1, -1, -1)
    results = (decode(inputs._replace(state=s)) for s in (shared, shared.contiguous()))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_out_in_every_form() -> None:
    inputs = inputs_of(3, seed=17)
    assert inputs.state is not None
    output, state = torch.empty(3, 1, 4, 16).bfloat16(), torch.empty(3, 4, 16, 16)
    result = decode(inputs, out=(output, state))
    assert result[0] is output
    assert result[1] is state
    with pytest.raises(ArgumentError, match="'new_state' overlaps 'state'"):
        decode(inputs, out=(output, inputs.state))
    with pytest.raises(ArgumentError, match="expected a tuple"):
        decode(inputs, out=output)
    with pytest.raises(ArgumentError, match="expected one tensor"):
        decode(inputs._replace(inplace=True), out=(output, state))
    alone = torch.empty_like(output)
    result = decode(inputs._replace(inplace=True), out=alone)
    assert result[0] is alone
    assert result[1] is inputs.state
    assert same_bits(alone, output)
    assert same_bits(inputs.state, state)


def test_serving_sizes() -> None:
    assert [case.batch_size for case in SERVING] == [96, 128, 256, 512, 1024]
    assert gap_cases(None) == ()
