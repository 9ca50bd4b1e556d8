"""gdn_prefill beyond the contract: the oracle against other formulations, reports, refusals.

The oracle over all cases, poisoned outputs and aliasing are in test_contracts.py, graphs and
streams in tests/graph. C23 (a spawned worker), C29 (2^31 elements) and C31 (slowdown per release)
need a GPU.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastkernels import ArgumentError, force_route, gdn_decode, gdn_prefill
from fastkernels.ops._shared.gdn import gates
from fastkernels.ops.gdn_prefill.inputs import (
    CORNER,
    CORRECTNESS,
    SERVING,
    Case,
    gap_cases,
    make_inputs,
    split_case,
)
from fastkernels.ops.gdn_prefill.problem import Inputs, bind
from fastkernels.ops.gdn_prefill.reference import Expected, clean_offsets, reference
from fastkernels.ops.gdn_prefill.routes import torch_chunked
from fastkernels.ops.gdn_prefill.spec import SPEC
from fastkernels.testing.compare import clone, same_bits

SMALL: dict[str, Any] = {"num_q_heads": 2, "num_v_heads": 4, "head_size": 16}
UNREAD = 10**6  # an index far outside of every pool


def inputs_of(*lengths: int, **fields: Any) -> Inputs:
    return make_inputs(Case("test", lengths, **(SMALL | fields)))


def prefill(inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    return gdn_prefill(**inputs._asdict(), **options)


def assert_judged(expected: Expected, outputs: tuple[Tensor, ...]) -> None:
    errors = expected.judge(outputs)
    assert all(error.ok for error in errors), "; ".join(map(str, errors))


def rejected(expected: Expected, outputs: tuple[Tensor, ...]) -> list[bool]:
    """For output, state, and what must keep its bits: whether the judge objects."""
    return [not error.ok for error in expected.judge(outputs)]


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def constant(inputs: Inputs, **values: float) -> Inputs:
    """The inputs with whole arguments set to one value."""
    tensors: dict[str, Any] = {n: torch.full_like(getattr(inputs, n), x) for n, x in values.items()}
    return inputs._replace(**tensors)


# ---- the oracle ---------------------------------------------------------------------------------


def per_head(inputs: Inputs, sequence: int, head: int) -> tuple[Tensor, ...]:
    """(S, q, k, v, g, beta) of one sequence and value head in float64."""
    begin, end = inputs.cu_seqlens[sequence], inputs.cu_seqlens[sequence + 1]
    key_head = head // (inputs.v.shape[1] // inputs.q.shape[1])
    log_g, beta = gates(inputs.A_log, inputs.a, inputs.dt_bias, inputs.b)
    q, k = (t[begin:end, key_head].double() for t in (inputs.q, inputs.k))
    assert inputs.state is not None
    return (
        inputs.state[sequence, head].double(),
        q,
        k,
        inputs.v[begin:end, head].double(),
        log_g[begin:end, head].exp(),
        beta[begin:end, head],
    )


def by_transfer_matrices(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """S <- S g (I - beta k k^T) + beta v k^T."""
    rows = []
    for t in range(len(g)):
        M = g[t] * (torch.eye(len(k[t]), dtype=S.dtype) - beta[t] * torch.outer(k[t], k[t]))
        S = S @ M + beta[t] * torch.outer(v[t], k[t])
        rows.append(S @ q[t])
    return torch.stack(rows), S


def by_one_chunk(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """The whole sequence as one chunk: decays as products of gates, a dense inverse."""
    length = len(g)
    decay = torch.zeros(length, length, dtype=S.dtype)
    for t in range(length):
        for s in range(t + 1):
            decay[t, s] = g[s + 1 : t + 1].prod()
    start = g.cumprod(0)[:, None]
    A = (beta[:, None] * decay * (k @ k.T)).tril(-1)
    T = torch.linalg.inv(torch.eye(length, dtype=S.dtype) + A)
    u = T @ (beta[:, None] * (v - start * (k @ S.T)))
    return start * (q @ S.T) + (decay * (q @ k.T)) @ u, start[-1] * S + (
        decay[-1][:, None] * u
    ).T @ k


@pytest.mark.parametrize("form", [by_transfer_matrices, by_one_chunk])
@pytest.mark.parametrize("gate_kind", ["contest", "extreme"])
def test_oracle_against_other_formulations(form: Any, gate_kind: str) -> None:
    inputs = inputs_of(7, 1, 33, num_v_heads=6, gates=gate_kind, scale=0.3, seed=1)
    expected = reference(inputs)
    for i, (begin, end) in enumerate(pairwise(expected.offsets)):
        for head in range(6):
            out, S = form(*per_head(inputs, i, head))
            torch.testing.assert_close(
                expected.output[begin:end, head], 0.3 * out, rtol=1e-10, atol=1e-12
            )
            torch.testing.assert_close(expected.new_state[i, head], S, rtol=1e-10, atol=1e-12)


def test_oracles_kappa_is_the_recurrence_of_absolute_values() -> None:
    inputs = inputs_of(3, seed=2)
    S, q, k, v, g, beta = per_head(inputs, 0, 3)
    rows = []
    for t in range(3):
        decayed = g[t] * S
        u = beta[t] * (v[t] - decayed @ k[t])
        S = decayed + torch.outer(u, k[t])
        S_kappa = decayed.abs() + torch.outer(u.abs(), k[t].abs())
        rows.append(0.25 * S_kappa @ q[t].abs())
    expected = reference(inputs)
    assert float(expected.output_kappa[0, 3]) == pytest.approx(float(torch.stack(rows).norm()))
    assert float(expected.new_state_kappa[0, 3]) == pytest.approx(float(S_kappa.norm()))


def test_the_judge_sees_one_bad_row() -> None:
    """One wrong head of one sequence, a transposed state, a changed slot, stray and NaN tokens."""
    inputs = inputs_of(40, 3, 0, 9, stray=2, seed=3)
    expected = reference(inputs)
    output, state = prefill(inputs)
    assert rejected(expected, (output, state)) == [False, False, False]

    wrong = output.clone()
    wrong[40:43, 1] *= 1.2
    error = expected.judge((wrong, state))[0]
    assert not error.ok
    assert 40 <= error.at[0] < 43
    assert error.at[1] == 1
    for token, value in ((52, 1e-30), (53, math.nan), (7, math.nan), (7, math.inf)):
        wrong = output.clone()
        wrong[token, 0, 0] = value
        assert rejected(expected, (wrong, state)) == [True, False, False], (token, value)

    assert rejected(expected, (output, state.mT)) == [False, True, True]
    wrong = state.clone()
    wrong[2, 0, 0, 0] += 1e-6  # an empty sequence's
    assert rejected(expected, (output, wrong)) == [False, False, True]
    wrong = state.clone()
    wrong[0, 2] *= 1.01
    assert rejected(expected, (output, wrong)) == [False, True, False]


def test_twice_the_yardstick_is_allowed_for_ill_conditioned_rows_alone() -> None:
    for kind in ("parallel", "keep"):
        expected = reference(inputs_of(128, keys="parallel", gates=kind, head_size=64))
        assert 0 < float(expected.new_state_slack.max()) < 0.05, kind
    for kind in ("contest", "keep", "slow", "forget", "extreme"):
        expected = reference(inputs_of(70, 3, gates=kind, head_size=64))
        assert float(expected.new_state_slack.abs().max()) == 0, kind
        assert float(expected.output_slack.abs().max()) == 0, kind
    mixed = inputs_of(128, head_size=64, gates="keep", keys="parallel")
    mixed.k[:, 1] = mixed.q[:, 1]
    slack = reference(mixed).new_state_slack[0]
    assert (slack > 0).tolist() == [True, True, False, False]


# ---- the torch route ----------------------------------------------------------------------------


def step_by_shape(patch: pytest.MonkeyPatch) -> None:
    """Let the route take the steps that shapes alone allow, as on a GPU."""
    patch.setattr(
        torch_chunked,
        "most_tokens",
        lambda lengths, total: torch_chunked.most_tokens_by_shape(len(lengths), total),
    )


@pytest.mark.parametrize("config", [{"chunk_size": c} for c in (16, 32, 64, 128)], ids=str)
def test_route_is_exact_to_float32(config: dict[str, int]) -> None:
    """Every chunk size, batches of three; far below the limits, against the norm of the result."""
    inputs = inputs_of(1, 15, 16, 17, 0, 63, 64, 65, 127, 130, seed=4)
    expected = reference(inputs)
    with force_route("gdn_prefill", "torch_chunked", {**config, "seqs_per_batch": 3}):
        output, state = prefill(inputs)
    assert relative(state, expected.new_state) < 1e-6
    assert relative(output, expected.output) < 2.5e-3  # bfloat16's rounding is 1.7e-3
    assert_judged(expected, (output, state))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.sampled_from((0, 1, 2, 3, 15, 16, 17, 33)), max_size=6),
    gate_kind=st.sampled_from(("contest", "keep", "forget", "slow", "extreme")),
    keys=st.sampled_from(("unit", "parallel", "long")),
    mode=st.sampled_from(("functional", "inplace", "pool")),
    layout=st.sampled_from(("contiguous", "fused")),
    stray=st.integers(0, 3),
    seqs_per_batch=st.sampled_from((1, 2, 32)),
    by_shape=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_route_against_the_oracle(
    lengths: list[int], seqs_per_batch: int, by_shape: bool, gate_kind: str, **fields: Any
) -> None:
    inputs = inputs_of(*lengths, gates=gate_kind, **fields)
    problem = bind(clone(inputs), None, None)
    with pytest.MonkeyPatch.context() as patch:
        if by_shape:
            step_by_shape(patch)
        config = torch_chunked.Config(16, seqs_per_batch)
        torch_chunked.launch(problem.inputs, problem.outputs, None, config)
    assert_judged(reference(inputs), problem.outputs)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20))
def test_shapes_bound_sorted_lengths(lengths: list[int]) -> None:
    at_most = torch_chunked.most_tokens_by_shape(len(lengths), sum(lengths))
    assert all(x <= y for x, y in zip(sorted(lengths, reverse=True), at_most, strict=True))


@pytest.mark.parametrize("mode", SPEC.modes)
def test_route_reads_no_value_off_the_cpu(mode: str) -> None:
    """Meta tensors have no values: an operation that would synchronise a GPU fails on them."""
    inputs = make_inputs(Case("meta", (5, 0, 200), mode=mode, **SMALL))
    on_meta = Inputs._make(x.to("meta") if isinstance(x, Tensor) else x for x in inputs)
    assert on_meta.state is not None
    outputs = (torch.empty_like(on_meta.v), torch.empty_like(on_meta.state))
    torch_chunked.launch(on_meta, outputs, None, torch_chunked.Config())


def test_one_enormous_gate_leaves_later_gates_of_its_chunk_alone() -> None:
    """Rate e^40: a = 5 gives log_g = -1e18, a = -40.75 gives log_g = -0.47 in the same chunk."""
    inputs = constant(inputs_of(40, seed=5), A_log=40.0, dt_bias=0.0, a=-40.75)
    inputs.a[7::16] = 5.0
    output, state = prefill(inputs)
    expected = reference(inputs)
    assert relative(state, expected.new_state) < 1e-6
    assert_judged(expected, (output, state))


def test_many_one_token_sequences_are_a_decode_step() -> None:
    inputs = inputs_of(*[1] * 100, seed=6)
    output, state = prefill(inputs)
    q, k, v, a, b = (x.unsqueeze(1) for x in (inputs.q, inputs.k, inputs.v, inputs.a, inputs.b))
    step = gdn_decode(q, k, v, inputs.state, inputs.A_log, a, inputs.dt_bias, b)
    torch.testing.assert_close(output, step[0][:, 0], rtol=8e-3, atol=1e-3)
    torch.testing.assert_close(state, step[1], rtol=1e-5, atol=1e-6)


# ---- reports about kernels of this kind ---------------------------------------------------------


def test_c01_padding_sequence_is_not_slot_zero() -> None:
    inputs = inputs_of(4, 3)._replace(read_indices=torch.tensor([1, -1], dtype=torch.int32))
    pool = torch.randn(3, 4, 16, 16)
    before = pool.clone()
    output, state = prefill(inputs._replace(state=pool))
    alone = prefill(inputs_of(4, 3)._replace(state=before[[1, 0]]))
    assert state is pool
    assert same_bits(output[:4], alone[0][:4])
    assert not output[4:].any()
    assert same_bits(pool[1], alone[1][0])
    assert same_bits(pool[[0, 2]], before[[0, 2]])


def test_c02_indices_as_a_strided_column() -> None:
    table = torch.full((3, 4), UNREAD, dtype=torch.int32)
    table[:, 0] = torch.tensor([2, 0, 1])
    pools = [torch.randn(3, 4, 16, 16, generator=torch.Generator().manual_seed(1)) for _ in "ab"]
    inputs = inputs_of(4, 3, 5)
    results = [
        prefill(inputs._replace(state=pool, read_indices=indices))
        for pool, indices in zip(pools, (table[:, 0], table[:, 0].clone()), strict=True)
    ]
    assert table[:, 0].stride() == (4,)
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("mode", ["inplace", "pool"])
def test_c04_padded_slots_are_updated_where_they_lie(mode: str) -> None:
    buffer = torch.full((4, 1024 + 64), 7.0)
    state = buffer[:, :1024].unflatten(1, (4, 16, 16))
    state.copy_(torch.randn(4, 4, 16, 16))
    before = state.clone()
    inputs = inputs_of(3, 17, 1, 2)._replace(state=state)
    if mode == "pool":
        slots = torch.tensor([-1, -1, 2, -1])
        output, result = prefill(inputs._replace(read_indices=slots))
        assert same_bits(state[[0, 1, 3]], before[[0, 1, 3]])
        expected = prefill(inputs._replace(state=before))[1][2]
        torch.testing.assert_close(state[2], expected, rtol=1e-5, atol=1e-6)
    else:
        output, result = prefill(inputs._replace(inplace=True))
        assert same_bits(state.contiguous(), prefill(inputs._replace(state=before))[1])
    assert result is state
    assert bool((buffer[:, 1024:] == 7.0).all())
    assert output.isfinite().all()


def test_c05_slices_of_fused_projections() -> None:
    fused = inputs_of(5, 20, 3, layout="fused", seed=8)
    assert not fused.q.is_contiguous()
    assert not fused.a.is_contiguous()
    assert fused.state is not None
    assert fused.state.stride(0) == 4 * 16 * 16 + 64
    packed = Inputs._make(x.contiguous() if isinstance(x, Tensor) else x for x in fused)
    assert all(same_bits(a, b) for a, b in zip(prefill(fused), prefill(packed), strict=True))


def test_c07_results_are_not_buffers_of_later_calls() -> None:
    first = prefill(inputs_of(5, 20, seed=9))
    kept = [t.clone() for t in first]
    second = prefill(inputs_of(5, 20, seed=10))
    for result, before, other in zip(first, kept, second, strict=True):
        assert same_bits(result, before)
        assert result.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def decode_chain(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """One sequence token by token through gdn_decode."""
    state, outputs = inputs.state, []
    for t in range(inputs.q.shape[0]):
        q, k, v, a, b = (
            x[t].unsqueeze(0).unsqueeze(0)
            for x in (inputs.q, inputs.k, inputs.v, inputs.a, inputs.b)
        )
        output, state = gdn_decode(q, k, v, state, inputs.A_log, a, inputs.dt_bias, b)
        outputs.append(output[:, 0])
    return torch.cat(outputs), state


def test_c08_prefill_hands_its_state_to_decode() -> None:
    """Prefill of 5 tokens, then one decode step, against 6 decode steps."""
    whole = make_inputs(Case("c08", (6,), seed=11))
    _, after_5 = prefill(tokens(whole, 0, 5))
    last = tokens(whole, 5, 6)._replace(state=after_5)
    output, state = decode_chain(last)
    outputs, expected = decode_chain(whole)
    assert state is not None
    assert expected is not None
    assert relative(state, expected) < 1e-6
    torch.testing.assert_close(output[0], outputs[5], rtol=8e-3, atol=1e-4)


def test_c08_state_is_v_by_k() -> None:
    inputs = constant(inputs_of(1, state="none"), k=0.0, b=20.0)
    inputs.k[..., 3] = 1.0
    _, state = prefill(inputs)
    assert bool((state[..., 3] != 0).all())
    state[..., 3] = 0
    assert not state.any()


@pytest.mark.parametrize(
    ("A_log", "a", "kept"),
    [(20.0, 100.0, False), (0.0, -200.0, True), (-100.0, 0.0, True), (90.0, 0.0, False)],
)
def test_c10_gates_at_the_ends_of_their_range(A_log: float, a: float, kept: bool) -> None:
    """With beta near 0 a gate of 1 keeps the state over 20 tokens, a gate of 0 forgets it."""
    inputs = constant(inputs_of(20, seed=12), A_log=A_log, dt_bias=0.0, a=a, b=-30.0)
    output, state = prefill(inputs)
    assert output.isfinite().all()
    assert inputs.state is not None
    torch.testing.assert_close(state, inputs.state * kept, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("A_log", "a", "g"),
    [(-30.0, 3.0, 1.0), (80.0, -200.0, 1.0), (80.0, -50.0, 0.0), (1e3, -1e3, 1.0), (1e3, 0.0, 0.0)],
)
def test_c10_large_rates_and_tiny_steps(A_log: float, a: float, g: float) -> None:
    """exp(A_log) beyond float32, or infinite, times a step that underflows: never NaN."""
    inputs = constant(inputs_of(3, seed=13), A_log=A_log, dt_bias=0.0, a=a, b=-30.0)
    _, state = prefill(inputs)
    assert inputs.state is not None
    torch.testing.assert_close(state, inputs.state * g, rtol=1e-5, atol=1e-6)


def test_c11_keys_and_queries_are_not_normalised() -> None:
    inputs = constant(inputs_of(1, head_size=128, state="none"), q=0.0, k=0.0, v=1.0, b=30.0)
    inputs.k[..., 3], inputs.q[..., 3] = 2.0, 1.0
    output, state = prefill(inputs)
    torch.testing.assert_close(state[..., 3], torch.full_like(state[..., 3], 2.0))
    assert float(output.float().mean()) == pytest.approx(2 / math.sqrt(128), rel=4e-3)


def test_c13_read_and_write_slots_differ() -> None:
    pool = torch.randn(4, 4, 16, 16)
    before = pool.clone()
    inputs = inputs_of(4, 3)._replace(
        state=pool, read_indices=torch.tensor([1, 2]), write_indices=torch.tensor([3, -1])
    )
    output, _ = prefill(inputs)
    alone = prefill(inputs_of(4, 3)._replace(state=before[1:3]))
    assert same_bits(output, alone[0])
    assert same_bits(pool[3], alone[1][0])
    assert same_bits(pool[:3], before[:3])


def test_c13_an_empty_sequence_carries_its_state_to_the_other_slot() -> None:
    pool = torch.randn(4, 4, 16, 16)
    before = pool.clone()
    inputs = inputs_of(0, 3)._replace(
        state=pool, read_indices=torch.tensor([1, -1]), write_indices=torch.tensor([3, 0])
    )
    prefill(inputs)
    assert same_bits(pool, before[[0, 1, 2, 1]])


@pytest.mark.parametrize("state", ["random", "none"])
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_c14_c18_nothing_to_do(lengths: tuple[int, ...], state: str) -> None:
    inputs = inputs_of(*lengths, state=state)
    output, new_state = prefill(inputs)
    assert output.shape == (0, 4, 16)
    assert new_state.shape == (len(lengths), 4, 16, 16)
    kept = torch.zeros_like(new_state) if inputs.state is None else inputs.state
    assert same_bits(new_state, kept)


@pytest.mark.parametrize("by_shape", [False, True])
@pytest.mark.parametrize("mode", ["functional", "inplace"])
def test_c18_empty_sequence_in_the_middle_keeps_its_state(
    mode: str, by_shape: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, also where a multiplication by a gate of 1 would not: -0.0, inf, NaN."""
    if by_shape:
        step_by_shape(monkeypatch)
    inputs = inputs_of(3, 0, 2, mode=mode, seed=14)
    assert inputs.state is not None
    inputs.state[1, 0, 0, :3] = torch.tensor([-0.0, math.inf, math.nan])
    before = clone(inputs)
    assert before.state is not None
    output, state = prefill(inputs)
    assert same_bits(state[1], before.state[1])
    apart = prefill(
        inputs_of(3, 2, seed=14)._replace(
            **{n: getattr(before, n) for n in ("q", "k", "v", "a", "b", "A_log", "dt_bias")},
            state=before.state[[0, 2]],
        )
    )
    assert same_bits(output, apart[0])
    assert same_bits(state[[0, 2]], apart[1])


def test_c19_one_long_among_many_short() -> None:
    """63 sequences of one token and one of 300: no state, zeros and random all finish."""
    lengths = (1,) * 40 + (300,) + (1,) * 23
    inputs = inputs_of(*lengths, seed=15)
    assert inputs.state is not None
    none = prefill(inputs._replace(state=None))
    zeros = prefill(inputs._replace(state=torch.zeros_like(inputs.state)))
    assert all(same_bits(a, b) for a, b in zip(none, zeros, strict=True))
    assert_judged(reference(inputs), prefill(inputs))


@pytest.mark.parametrize(("first", "second"), list(pairwise((1, 15, 16, 17, 63, 64, 65, 130, 1))))
def test_c20_no_token_leaks_into_the_sequence_before_or_after(first: int, second: int) -> None:
    """Other tokens in one sequence, NaN among them: the other's results keep their bits."""
    inputs = inputs_of(first, second, seed=16)
    output, state = prefill(inputs)
    for changed, kept, row in (
        (slice(first, None), slice(0, first), 0),
        (slice(0, first), slice(first, None), 1),
    ):
        other = clone(inputs)
        for x in (other.q, other.k, other.v, other.a, other.b):
            x[changed] = -2 * x[changed] + 1
        other.k[changed][0] = math.nan
        output_2, state_2 = prefill(other)
        assert same_bits(output_2[kept], output[kept])
        assert same_bits(state_2[row], state[row])
        assert not same_bits(output_2[changed], output[changed])


def test_c22_nearly_parallel_keys() -> None:
    """k = unit vector + 1 % noise, beta and g near 1, 128 tokens, no state."""
    case = next(case for case in CORRECTNESS if case.name == "parallel")
    inputs = make_inputs(case)
    log_g, beta = gates(inputs.A_log, inputs.a, inputs.dt_bias, inputs.b)
    assert float(log_g.min()) > -1e-5
    assert float(beta.min()) > 1 - 1e-5
    output, state = prefill(inputs)
    expected = reference(inputs)
    assert relative(state, expected.new_state) < 1e-5
    assert relative(output, expected.output) < 2.5e-3
    assert float(output.abs().max()) < 0.2
    assert float(state.abs().max()) < 2.0


def test_c25_int32_offsets_are_equal() -> None:
    inputs = inputs_of(5, 0, 20, seed=17)
    narrow = inputs._replace(cu_seqlens=inputs.cu_seqlens.int())
    assert all(same_bits(a, b) for a, b in zip(prefill(inputs), prefill(narrow), strict=True))


def test_c25_offsets_elsewhere_or_of_another_kind() -> None:
    inputs = inputs_of(5, 20)
    on_meta = Inputs._make(x.to("meta") if isinstance(x, Tensor) else x for x in inputs)
    with pytest.raises(ArgumentError, match="'cu_seqlens' is on cpu, expected meta like 'q'"):
        prefill(on_meta._replace(cu_seqlens=inputs.cu_seqlens))
    cases: tuple[tuple[Any, str], ...] = (
        ([0, 5, 25], "'cu_seqlens' is a list, expected a tensor"),
        (None, "'cu_seqlens' is None, expected a tensor"),
        (inputs.cu_seqlens.float(), "'cu_seqlens' is float32, expected int64 or int32"),
        (inputs.cu_seqlens[None], r"'cu_seqlens' has shape \(1, 3\), expected 1 axes"),
        (torch.zeros(6, dtype=torch.int64)[::2], "'cu_seqlens' has strides"),
        (inputs.cu_seqlens[:2], r"'cu_seqlens' has shape \(2,\), expected \(len_cu_seqlens=3\)"),
    )
    for offsets, message in cases:
        with pytest.raises(ArgumentError, match=message):
            prefill(inputs._replace(cu_seqlens=offsets))


@pytest.mark.parametrize("state", ["random", "none"])
def test_offsets_of_length_zero(state: str) -> None:
    inputs = inputs_of(state=state)._replace(cu_seqlens=torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ArgumentError, match=r"'cu_seqlens' has shape \(0,\), expected .*=1\)"):
        prefill(inputs)


def test_c26_batched_tensors() -> None:
    inputs = inputs_of(5, 5)
    with pytest.raises(
        ArgumentError, match=r"'q' has shape \(2, 5, 2, 16\), expected 3 axes .*cut by"
    ):
        prefill(inputs._replace(q=inputs.q.unflatten(0, (2, 5))))


def tokens(inputs: Inputs, begin: int, end: int) -> Inputs:
    """One sequence's tokens begin..end as a call of their own."""
    cut = {name: getattr(inputs, name)[begin:end] for name in ("q", "k", "v", "a", "b")}
    return inputs._replace(**cut, cu_seqlens=torch.tensor([0, end - begin]))


@pytest.mark.parametrize("cuts", [(63,), (64,), (129,), (63, 64, 129)])
def test_c28_a_prompt_in_pieces(cuts: tuple[int, ...]) -> None:
    whole = inputs_of(130, seed=18, head_size=64)
    output, state = prefill(whole)
    carried, outputs = whole.state, []
    for begin, end in pairwise((0, *cuts, 130)):
        part, carried = prefill(tokens(whole, begin, end)._replace(state=carried))
        outputs.append(part)
    assert carried is not None
    assert relative(carried, state) < 1e-6
    torch.testing.assert_close(torch.cat(outputs), output, rtol=8e-3, atol=1e-4)
    assert_judged(reference(whole), (torch.cat(outputs), carried))


@pytest.mark.parametrize("scale", [None, 0.0, 0])
def test_c134_scale_none_and_zero_are_the_default(scale: float | None) -> None:
    inputs = inputs_of(5, state="none")
    assert same_bits(
        prefill(inputs._replace(scale=scale))[0], prefill(inputs._replace(scale=0.25))[0]
    )


# ---- values on the device -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offsets", "cleaned"),
    [
        ((0, 5, 3, 12), (0, 5, 5, 12)),
        ((2, 5, 9, 10), (2, 5, 9, 10)),
        ((-7, 4, 10**12, 12), (0, 4, 12, 12)),
        ((12, 0, 0, 0), (12, 12, 12, 12)),
        ((-(2**62), -1, 2**62, 3), (0, 0, 12, 12)),
    ],
)
def test_wrong_offsets_are_clamped_to_their_running_maximum(
    offsets: tuple[int, ...], cleaned: tuple[int, ...]
) -> None:
    """Tokens of no sequence give exact zeros, whatever lies in them."""
    assert clean_offsets(offsets, 12) == cleaned
    inputs = inputs_of(3, 4, 5, seed=19)
    output, state = prefill(inputs._replace(cu_seqlens=torch.tensor(offsets)))
    expected = prefill(inputs._replace(cu_seqlens=torch.tensor(cleaned)))
    assert same_bits(output, expected[0])
    assert same_bits(state, expected[1])
    assert not output[: cleaned[0]].any()
    assert not output[cleaned[-1] :].any()
    assert_judged(reference(inputs._replace(cu_seqlens=torch.tensor(offsets))), (output, state))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ((1, 5, 12), r"'cu_seqlens'\[0\] is 1, expected 0"),
        ((-1, 5, 12), r"'cu_seqlens'\[0\] is -1, expected 0"),
        ((0, 5, 4), r"'cu_seqlens'\[2\] is 4, expected >= 5"),
        ((0, 13, 12), r"'cu_seqlens'\[1\] is 13, expected at most 12"),
        ((0, 5, 11), r"'cu_seqlens'\[2\] is 11, expected 12"),
        ((0, 5, 13), r"'cu_seqlens'\[2\] is 13, expected 12"),
    ],
)
def test_wrong_offsets_are_errors_when_values_are_checked(
    offsets: tuple[int, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of(5, 7)
    prefill(inputs._replace(cu_seqlens=torch.tensor(offsets)))
    monkeypatch.setenv("FASTKERNELS_CHECK", "values")
    prefill(inputs)
    with pytest.raises(ArgumentError, match=message):
        prefill(inputs._replace(cu_seqlens=torch.tensor(offsets)))


def test_wrong_slots_are_errors_when_values_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTKERNELS_CHECK", "values")
    inputs = inputs_of(5, 7)._replace(state=torch.randn(4, 4, 16, 16))
    prefill(inputs._replace(read_indices=torch.tensor([3, -1])))
    with pytest.raises(ArgumentError, match=r"'read_indices'\[1\] is 4, expected -1 or 0\.\.3"):
        prefill(inputs._replace(read_indices=torch.tensor([3, 4])))
    with pytest.raises(ArgumentError, match=r"'write_indices'\[1\] is 2, expected a slot that no"):
        prefill(
            inputs._replace(read_indices=torch.tensor([0, 1]), write_indices=torch.tensor([2, 2]))
        )


def test_slots_outside_the_pool_are_padding() -> None:
    """Such an index is never dereferenced; on the write side the state is not stored."""
    pool = torch.randn(4, 4, 16, 16)
    before = pool.clone()
    inputs = inputs_of(2, 3, 4, 5)._replace(
        state=pool,
        read_indices=torch.tensor([UNREAD, 1, -(2**31), 2], dtype=torch.int32),
        write_indices=torch.tensor([0, UNREAD, 3, 2], dtype=torch.int32),
    )
    expected = reference(inputs)
    output, _ = prefill(inputs)
    assert_judged(expected, (output, pool))
    assert not output[:2].any()
    assert output[2:5].any()
    assert not output[5:9].any()
    assert same_bits(pool[[0, 1, 3]], before[[0, 1, 3]])


@pytest.mark.parametrize("mode", ["functional", "pool"])
def test_nan_in_tokens_and_slots_that_nobody_uses(mode: str) -> None:
    """Stray tokens, tokens of padding sequences and slots that no index names may hold NaN."""
    inputs = inputs_of(5, 20, 3, mode=mode, stray=4, seed=20)
    expected = reference(inputs)
    unused = torch.zeros(32, dtype=torch.bool)
    unused[28:] = True
    if mode == "pool":
        unused[5:25] = True
        assert inputs.state is not None
        assert inputs.read_indices is not None
        named = inputs.read_indices[inputs.read_indices >= 0].long()
        slots = torch.ones(len(inputs.state), dtype=torch.bool)
        slots[named] = False
        inputs.state[slots] = math.nan
    for x in (inputs.q, inputs.k, inputs.v, inputs.a, inputs.b):
        x[unused] = math.nan
    output, state = prefill(inputs)
    error = expected.judge((output, state))[0]
    assert error.ok, str(error)
    if mode == "functional":
        assert_judged(expected, (output, state))
    else:
        written = ~expected.kept
        assert written.any()
        assert state[written].isfinite().all()


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": torch.zeros(2, 4, 16, 16).bfloat16()}, "'state' is bfloat16.*not supported yet"),
        (
            {"state": torch.zeros(3, 4, 16, 16)},
            r"'cu_seqlens' has shape \(3,\), expected \(len_cu_seqlens=4\)",
        ),
        ({"state": torch.zeros(2, 4, 16, 16).mT}, "'state' has strides"),
        ({"state": None, "inplace": True}, "'state' is None, expected a tensor in inplace form"),
        ({"write_indices": torch.zeros(2, dtype=torch.int32)}, "'read_indices' is None"),
        ({"read_indices": torch.zeros(3, dtype=torch.int32)}, "'cu_seqlens' has shape"),
        ({"read_indices": torch.zeros(2)}, "'read_indices' is float32, expected int32 or int64"),
        (
            {"v": torch.zeros(12, 3, 16).bfloat16()},
            "num_v_heads=3, expected num_v_heads a multiple",
        ),
        ({"k": torch.zeros(12, 1, 16).bfloat16()}, r"'k' has shape .*num_k_heads=2"),
        (
            {"a": torch.zeros(11, 4).bfloat16()},
            r"'a' has shape \(11, 4\), expected \(total_seq_len",
        ),
        ({"A_log": torch.zeros(4).bfloat16()}, "'A_log' is bfloat16, expected float32"),
        ({"q": torch.zeros(12, 2, 16)}, "'q' is float32, expected bfloat16"),
        ({"scale": "1"}, "'scale' is str, expected a float or None"),
        ({"inplace": 1}, "'inplace' is int, expected a bool"),
    ],
)
def test_refused_arguments(change: dict[str, Any], message: str) -> None:
    inputs = inputs_of(5, 7)._replace(**change)
    with pytest.raises(ArgumentError, match=message):
        prefill(inputs)


def test_out_in_every_form() -> None:
    inputs = inputs_of(5, 7, seed=21)
    output, state = torch.empty(12, 4, 16).bfloat16(), torch.empty(2, 4, 16, 16)
    result = prefill(inputs, out=(output, state))
    assert result[0] is output
    assert result[1] is state
    with pytest.raises(ArgumentError, match="'out' is Tensor, expected a tuple"):
        prefill(inputs, out=output)
    assert inputs.state is not None
    with pytest.raises(ArgumentError, match="'new_state' overlaps 'state'"):
        prefill(inputs, out=(output, inputs.state))
    alone = torch.empty_like(output)
    result = prefill(inputs._replace(inplace=True), out=alone)
    assert result[0] is alone
    assert result[1] is inputs.state
    assert same_bits(alone, output)
    assert same_bits(inputs.state, state)


# ---- cases --------------------------------------------------------------------------------------


def test_serving_splits_are_complete_and_skewed() -> None:
    for case in SERVING:
        total, num_seqs = case.axes["total_seq_len"], case.axes["num_seqs"]
        assert sum(case.lengths) == total
        assert min(case.lengths) >= 1
        assert num_seqs == 1 or max(case.lengths) > 2 * total / num_seqs
    assert {case.axes["total_seq_len"] for case in SERVING} == {16384, 65536}
    assert {case.axes["num_seqs"] for case in SERVING} == {1, 4, 32}


def test_splits_are_seeded_and_legal_for_all_sizes() -> None:
    assert split_case("x", 1000, 7, 3).lengths == split_case("y", 1000, 7, 3).lengths
    assert split_case("x", 1000, 7, 3).lengths != split_case("y", 1000, 7, 4).lengths
    for total, num_seqs in ((0, 0), (5, 0), (0, 3), (2, 5), (5, 5)):
        case = split_case("x", total, num_seqs, 1)
        assert case.axes["total_seq_len"] == total
        assert case.axes["num_seqs"] == num_seqs
        make_inputs(replace(case, **SMALL))
    assert gap_cases(None) == ()


def test_offsets_of_cases_are_their_lengths() -> None:
    for case in CORNER:
        inputs = make_inputs(replace(case, **SMALL))
        assert inputs.cu_seqlens.tolist() == [0, *accumulate(case.lengths)]
        assert inputs.q.shape[0] == sum(case.lengths) + case.stray
