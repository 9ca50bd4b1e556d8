"""Workloads of gdn_prefill: float64 results on the device, rows, bytes; its peers and targets."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import peers, sweep, targets
from bench.peers.gdn_prefill import PEERS
from fastkernels import catalog
from fastkernels.core.device import named_device
from fastkernels.ops.gdn_prefill.inputs import CONTEST, CORNER, CORRECTNESS, Case, make_inputs
from fastkernels.ops.gdn_prefill.reference import reference
from fastkernels.ops.gdn_prefill.spec import SPEC
from fastkernels.testing.workloads import gdn_prefill as work

CPU = torch.device("cpu")
MODES = SPEC.modes
OPERATOR = catalog.operator("gdn_prefill")
SMALL: dict[str, Any] = {"num_q_heads": 1, "num_v_heads": 2, "head_size": 16}


def result(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    output, state = OPERATOR.function(**work.live(inputs)._asdict())
    return output, state


def small(case: Case) -> Case:
    """The same lengths and contents, one query and two value heads of 16."""
    return dataclasses.replace(case, **SMALL)


ON_DEVICE = [
    small(case)
    for case in (*CORRECTNESS, *CORNER, CONTEST[20])
    if case.state == "random" and case.keys == "unit" and case.padding == "some"
]


@pytest.mark.parametrize("case", ON_DEVICE, ids=lambda case: case.name)
def test_float64_on_the_device_is_the_oracle(case: Case) -> None:
    """Where every sequence of a pool is used; padding is for the contract tests."""
    if case.mode == "pool":
        plain = Case(case.name, case.lengths, stray=case.stray, mode="pool", **SMALL)
        inputs = work.own_inputs(plain, CPU)
    else:
        inputs = make_inputs(case)
    ours, oracle = work.expect_on_device(inputs), reference(inputs)
    state = oracle.new_state if ours.slots is None else oracle.new_state[ours.slots]
    torch.testing.assert_close(ours.output, oracle.output, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(ours.state, state, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(ours.output_kappa, oracle.output_kappa, rtol=1e-11, atol=1e-13)
    got = result(inputs)
    for mine, theirs in zip(ours.judge(got), oracle.judge(got), strict=True):
        assert (mine.output, mine.metric, mine.limit) == (
            theirs.output, theirs.metric, theirs.limit,
        )  # fmt: skip
        assert mine.value == pytest.approx(theirs.value, rel=1e-6)
    judged = zip(ours.judge_official(got), oracle.judge_official(got), strict=True)
    assert all((a.output, a.value, a.limit) == (b.output, b.value, b.limit) for a, b in judged)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_wrong_is_found(mode: str) -> None:
    """One row among others, a token of no sequence, an empty sequence's state, an unused slot."""
    case = Case("x", (40, 3, 0, 70), stray=2, mode=mode, **SMALL)
    inputs = work.fresh_inputs(case, 5, CPU)
    expected = work.expect_on_device(inputs)
    output, state = result(inputs)
    assert all(error.ok for error in expected.judge((output, state)))
    rows = range(4) if expected.slots is None else expected.slots.tolist()
    for which, spoil in (
        (0, lambda o, s: o[40:43, 1].mul_(1.2)),
        (0, lambda o, s: o[114, 0].fill_(1e-20)),
        (0, lambda o, s: o[5, 0, 0].fill_(math.nan)),
        (1, lambda o, s: s[rows[1], 1].mul_(1.01)),
        (1, lambda o, s: s[rows[3], 0, 5, 7].fill_(math.inf)),
        (2, lambda o, s: s[rows[2], 0, 0, 0].add_(1e-6)),
    ):
        wrong = output.clone(), state.clone()
        spoil(*wrong)
        found = [error.ok for error in expected.judge(wrong)]
        assert not found[which]
        assert found[: 2 - (which == 2)].count(False) == (which < 2)
    if mode == "pool":
        wrong = output.clone(), state.clone()
        other = next(i for i in range(8) if i not in rows)
        wrong[1][other, 0, 0, 0] = 1.0
        assert expected.judge(wrong)[2].value == 1


@pytest.mark.parametrize("mode", MODES)
def test_restoring_undoes_a_call(mode: str) -> None:
    inputs: Any = work.fresh_inputs(Case("x", (5, 9), mode=mode, **SMALL), 5, CPU)
    pristine = inputs.state.clone()
    live: Any = work.live(inputs)
    OPERATOR.function(**live._asdict())
    torch.testing.assert_close(inputs.state, pristine, rtol=0, atol=0, equal_nan=True)
    work.restore(live, inputs)
    torch.testing.assert_close(live.state, pristine, rtol=0, atol=0, equal_nan=True)
    assert len(work.outputs(inputs)) == (2 if mode == "functional" else 1)


def test_draws_are_seeded_and_like_the_contests() -> None:
    case = Case("x", (5, 9), **SMALL)
    draws: list[Any] = [work.fresh_inputs(case, seed, CPU) for seed in (1, 1, 2)]
    one, same, other = draws
    assert torch.equal(one.state, same.state)
    assert not torch.equal(one.state, other.state)
    drawn: Any = make_inputs(case)
    for mine, theirs in zip(one, drawn, strict=True):
        if isinstance(theirs, torch.Tensor):
            assert (mine.shape, mine.dtype, mine.stride()) == (
                theirs.shape, theirs.dtype, theirs.stride(),
            )  # fmt: skip
    assert torch.equal(one.cu_seqlens, drawn.cu_seqlens)


# ---- rows ---------------------------------------------------------------------------------------


def test_rows() -> None:
    count: dict[Any, int] = {}
    for listed, case in work.rows(OPERATOR, named_device("h200"), MODES):
        count[listed, case.mode] = count.get((listed, case.mode), 0) + 1
    assert count["contest", "functional"] == 100
    assert count["serving", "functional"] == count["serving", "pool"] == 6
    assert set(count) == {
        ("contest", "functional"), ("serving", "functional"), ("serving", "pool"),
        ("gap", "functional"),
    }  # fmt: skip
    only = list(work.rows(OPERATOR, named_device("h200"), ("pool",)))
    assert {case.mode for _, case in only} == {"pool"}


def test_gap_rows_are_few_and_bearable(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [Case(f"gap-{n}", (n,)) for n in (0, *range(1, 200), 65536, 65537)]
    monkeypatch.setattr(work, "gap_cases", lambda table: seen)
    gap = [c for listed, c in work.rows(OPERATOR, named_device("h200"), MODES) if listed == "gap"]
    assert gap[:2] == list(work.SKEWED)
    assert len(gap) <= 2 + work.MOST_GAP_ROWS
    assert all(0 < sum(case.lengths) <= 65536 for case in gap)


def test_sweep_rows_are_distinct_and_reach_both_ends() -> None:
    groups: dict[Any, list[tuple[int, int]]] = {}
    for _, case in work.sweep_rows(MODES):
        key = case.mode, case.num_q_heads, case.num_v_heads
        size = case.axes["total_seq_len"], case.axes["num_seqs"]
        groups.setdefault(key, []).append(size)
    assert len(groups) == 3 * 4
    for sizes in groups.values():
        assert len(set(sizes)) == len(sizes)
    own = groups["functional", 4, 8]
    assert {(c.axes["total_seq_len"], c.axes["num_seqs"]) for c in CONTEST} < set(own)
    assert (min(own), max(own)) == ((6, 1), (131072, 64))
    assert max(num_seqs for _, num_seqs in own) == 4096


def test_the_sweeps_configs_are_legal() -> None:
    path = Path(sweep.__file__).parent / "sweeps" / "gdn_prefill.json"
    chosen = sweep.choices(OPERATOR, path)
    assert len(chosen) == sum(map(len, json.loads(path.read_text()).values()))  # none twice
    assert {route.name for route, _ in chosen} == {
        route.name for route in OPERATOR.routes if route.language != "torch"
    }
    defaults = {config for _, config in chosen}
    assert all(r.default_config in defaults for r in OPERATOR.routes if r.language != "torch")


def test_skewed_cases_differ_in_short_sequences_alone() -> None:
    alone, skewed = work.SKEWED
    assert alone.lengths == (8000,)
    assert sorted(skewed.lengths) == [6] * 30 + [8000]


def test_bytes_and_details() -> None:
    case = Case("x", (100, 65, 3), stray=2)
    assert work.moved_bytes(case) == 170 * 6176 + 3 * 2**20 + 8 * 4 + 2 * 4 * 8
    assert work.held_bytes(case, 4) > 4 * work.moved_bytes(case)
    assert work.details(case) == {"longest": 100, "chunks": 2}
    assert work.details(Case("none", ())) == {"longest": 0, "chunks": 0}


# ---- peers --------------------------------------------------------------------------------------


def recurrence(
    q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, state: Any, offsets: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k, v [T, H, D], g itself and beta [T, Hv]."""
    group = v.shape[1] // q.shape[1]
    q, k = (t.double().repeat_interleave(group, 1) for t in (q, k))
    S, output = state.double(), torch.zeros(v.shape, dtype=torch.float64)
    for i, (begin, end) in enumerate(pairwise(offsets)):
        for t in range(begin, end):
            S[i] *= g[t, :, None, None]
            u = beta[t, :, None] * (v[t] - (S[i] @ k[t, :, :, None])[..., 0])
            S[i] += u[..., None] * k[t, :, None]
            output[t] = scale * (S[i] @ q[t, :, :, None])[..., 0]
    return output.to(v.dtype), S.float()


def flashinfer(
    q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any, initial_state: Any,
    output_final_state: bool, cu_seqlens: Any, output: Any, output_state: Any, state_indices: Any,
    backend: str, use_gate_in_kernel: bool = False, A_log: Any = None, dt_bias: Any = None,
    beta_is_logit: bool = False,
) -> Any:  # fmt: skip
    """What its documentation says that it computes."""
    assert backend == "flashinfer"
    assert output_final_state
    if use_gate_in_kernel:
        g = torch.exp(-A_log.exp() * torch.nn.functional.softplus(g.float() + dt_bias))
        beta = beta.float().sigmoid()
        assert beta_is_logit
    assert g.dtype == beta.dtype == torch.float32
    rows = slice(None) if state_indices is None else state_indices.long()
    result, state = recurrence(
        q, k, v, g, beta, scale or q.shape[-1] ** -0.5, initial_state[rows], cu_seqlens.tolist()
    )
    output.copy_(result)
    output_state[rows] = state
    return output, output_state


def fla(
    q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any, initial_state: Any,
    output_final_state: bool, state_v_first: bool, cu_seqlens: Any, use_gate_in_kernel: bool,
    A_log: Any, dt_bias: Any, use_beta_sigmoid_in_kernel: bool,
) -> Any:  # fmt: skip
    assert output_final_state
    assert state_v_first
    assert use_gate_in_kernel
    assert use_beta_sigmoid_in_kernel
    g = torch.exp(-A_log.exp() * torch.nn.functional.softplus(g.float() + dt_bias))
    output, state = recurrence(
        q[0], k[0], v[0], g[0], beta[0].float().sigmoid(), scale or q.shape[-1] ** -0.5,
        initial_state, cu_seqlens.tolist(),
    )  # fmt: skip
    return output[None], state


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in (
        ("flashinfer.gdn_prefill", flashinfer), ("fla.ops.gated_delta_rule", fla),
    ):  # fmt: skip
        top, version = name.partition(".")[0], {"flashinfer": "0.7.4", "fla": "0.6.0"}
        package = types.SimpleNamespace(__version__=version[top])
        monkeypatch.setitem(sys.modules, top, package)
        if top == "fla":
            monkeypatch.setitem(sys.modules, "fla.ops", types.SimpleNamespace())
        module = types.SimpleNamespace(chunk_gated_delta_rule=function)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_peers_are_called_as_they_document_it(peer: peers.Peer, mode: str) -> None:
    """Twice, with what a call overwrote put back in between."""
    if mode not in peer.modes:
        pytest.skip(f"{peer.name} has no such form")
    inputs = work.fresh_inputs(Case("x", (5, 0, 9), mode=mode, **SMALL), 3, CPU)
    pristine = inputs.state.clone()  # type: ignore[union-attr]
    expected = work.expect(inputs)
    call = peer.bind(inputs, mode)
    runs = [call.run, call.run]
    if peer.adapted != "none":
        assert call.adapt_and_run is not None
        runs.append(call.adapt_and_run)
    for run in runs:
        call.restore()
        run()
        errors = expected.judge(call.outputs())
        assert all(error.ok for error in errors), [str(error) for error in errors]
    torch.testing.assert_close(inputs.state, pristine, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("packages")
def test_peers_are_pinned() -> None:
    found = peers.load("gdn_prefill", ["flashinfer", "fla"])
    assert found.versions == {"flashinfer-python": "0.7.4", "fla-core": "0.6.0"}


# ---- targets ------------------------------------------------------------------------------------


def row(total: int, num_seqs: int, us: float, chunks: int = 1, **fields: Any) -> dict[str, Any]:
    return {
        "list": "contest", "id": f"{total}/{num_seqs}", "mode": "functional",
        "axes": {"total_seq_len": total, "num_seqs": num_seqs}, "work": {"chunks": chunks},
        "us": {"median": us}, "span_us": us, "host_us": 12.0, "failures": 0,
        "peers": {"flashinfer": {"sum_us": 4 * us, "span_us": 20 * us}}, **fields,
    }  # fmt: skip


def missed(*rows: dict[str, Any], missing: int = 0) -> list[str]:
    data = {"op": "gdn_prefill", "rows": rows, "missing": [{}] * missing}
    return [target.name for target in targets.targets(data) if not target.is_met]


@pytest.mark.parametrize(
    ("total", "num_seqs", "chunks", "limit"),
    [
        (6, 1, 1, 4.0), (139, 3, 2, 9.0), (525, 1, 9, 18.0), (35, 2, 1, None), (461, 2, 8, None),
        (574, 2, 9, 26.3), (2107, 1, 33, 43.1), (5709, 2, 89, 82.3), (8192, 20, 40, 50.0),
        (8192, 32, 59, 61.3),
    ],
)  # fmt: skip
def test_what_a_row_may_take(total: int, num_seqs: int, chunks: int, limit: float | None) -> None:
    assert targets.prefill_us(row(total, num_seqs, 1.0, chunks)) == (limit and pytest.approx(limit))


def test_targets() -> None:
    assert missed(row(6, 1, 4.0)) == []
    assert [name[:2] for name in missed(row(6, 1, 4.1))] == ["us"]
    assert missed(row(7, 1, 1.0, failures=1), missing=1) == ["wrong calls", "missing rows"]
    assert missed(row(7, 1, 1.0, host_us=15.1)) == ["host_us, worst"]
    slow = row(7, 1, 1.0, peers={"fla": {"sum_us": 0.9, "span_us": 9.0}})
    assert len(missed(slow)) == 3  # both means, and the worst row
    close = {"flashinfer": {"sum_us": 129.0, "span_us": 1.0}}
    serving = row(16384, 1, 100.0, list="serving", peers=close)
    assert missed(serving) == ["serving, worst ratio to flashinfer"]
    alone = row(8000, 1, 100.0, list="gap", id="skewed-alone", host_us=None)
    for us, count in ((140.0, 0), (140.1, 1)):
        skewed = row(8180, 31, us, list="gap", id="skewed", host_us=None)
        assert len(missed(alone, skewed)) == count
    assert targets.targets({"op": "gdn_decode", "rows": [], "missing": []})
