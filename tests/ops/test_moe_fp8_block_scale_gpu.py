"""moe_fp8_block_scale's compiled routes on a GPU: what the contract tests do not ask.

Every route over every case, poisoned outputs and guard bytes: test_contracts.py. Capture, streams
and synchronisation of the dispatched route: tests/graph/test_gpu.py. Not here: tensors on a GPU
that is not current, which needs two.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastkernels
from bench import sweep
from fastkernels import ArgumentError, catalog, moe_fp8_block_scale
from fastkernels.core import dispatch, extension
from fastkernels.core.device import named_device
from fastkernels.core.problem import key_from_axes
from fastkernels.ops.moe_fp8_block_scale.adversarial import STRATA, Stratum
from fastkernels.ops.moe_fp8_block_scale.inputs import (
    CORNER,
    CORRECTNESS,
    ROUTED,
    SMALL,
    Case,
    Weights,
    make_inputs,
    make_weights,
)
from fastkernels.ops.moe_fp8_block_scale.kernels import CHUNK, KERNELS, LONG_CHUNK
from fastkernels.ops.moe_fp8_block_scale.problem import Inputs
from fastkernels.ops.moe_fp8_block_scale.reference import reference
from fastkernels.testing.compare import run_case, same_bits

pytestmark = pytest.mark.gpu

OPERATOR = catalog.operator("moe_fp8_block_scale")
ROUTES = pytest.mark.parametrize("route", [kernel.name for kernel in KERNELS])
CASE = Case("test", 21, seed=1, logits="all_local", **ROUTED)


@pytest.fixture(autouse=True)
def library() -> None:
    """These tests are about the library: where there is none, they fail."""
    state = extension.state()
    assert state.status == "ok", state.found


@pytest.fixture(autouse=True)
def route_is_for_this_device(request: pytest.FixtureRequest) -> None:
    """Not every route has code for every architecture."""
    found = (
        OPERATOR.route(request.getfixturevalue("route"))
        if "route" in request.fixturenames
        else None
    )
    if found is not None and named_device("cuda").arch not in found.archs:
        pytest.skip(f"{found.name} is for {', '.join(found.archs)}")


def inputs_of(weights: Weights | None = None, **fields: Any) -> Inputs:
    return make_inputs(replace(CASE, **fields), "cuda", weights)


def call(inputs: Inputs, route: str | None = None, config: Any = None, **options: Any) -> Tensor:
    if route is None:
        return moe_fp8_block_scale(**inputs._asdict(), **options)
    with fastkernels.force_route("moe_fp8_block_scale", route, config):
        return moe_fp8_block_scale(**inputs._asdict(), **options)


def assert_right(inputs: Inputs, output: Tensor) -> None:
    errors = reference(inputs).judge((output.cpu(),))
    assert all(error.ok for error in errors), "; ".join(map(str, errors))


SWEEPS = Path(sweep.__file__).parent / "sweeps"
SWEPT = sweep.choices(OPERATOR, SWEEPS / f"{OPERATOR.name}.json")
SWEPT_CASES = (
    "small-t1", "small-t17", "routed-t128", "wide", "strided", "strided-precomputed", "ties",
    "one-expert", "repeated", "hostile-ids", "straddling", "largest",
)  # fmt: skip


@pytest.mark.parametrize("choice", SWEPT, ids=sweep.label)
def test_configs_of_the_sweep(choice: sweep.Choice) -> None:
    """Those that the library or a cache has."""
    route, config = choice
    for case in (*CORRECTNESS, *CORNER):
        if case.name not in SWEPT_CASES:
            continue
        key = key_from_axes(OPERATOR.spec, case.axes, named_device("cuda"), case.mode)
        decline = route.declines(key, config)
        if decline is not None:
            pytest.skip(decline.reason)
        report = run_case(OPERATOR, case, route, "cuda", config)
        assert report.ok, str(report)


@ROUTES
@pytest.mark.parametrize("name", STRATA)
def test_adversarial_inputs(route: str, name: str) -> None:
    inputs, _ = STRATA[name].draw(7, "cuda")
    assert_right(inputs, call(inputs, route))


# ---- full size ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full_weights() -> Weights:
    return Weights(*(tensor.cuda() for tensor in make_weights(Case("full", 1))))


@ROUTES
@pytest.mark.parametrize("seq_len", [1, 2, 7, 14, 15, 57, 80])
def test_the_definitions_sizes(route: str, seq_len: int, full_weights: Weights) -> None:
    """Tensor cores add up e4m3 products with fewer bits than float32: only here sums are long."""
    for offset in (0, 96, 17):
        case = Case("full", seq_len, seed=seq_len, local_expert_offset=offset)
        inputs = make_inputs(case, "cuda", full_weights)
        assert_right(inputs, call(inputs, route))


@pytest.mark.parametrize(
    "config", [config for route, config in SWEPT if route.name == "wgmma_grouped"]
)
@pytest.mark.parametrize("seq_len", [901, 2048, 17000])
def test_many_tokens(seq_len: int, config: Any, full_weights: Weights) -> None:
    """Against the other compiled route, where the oracle would take minutes; 17000 are two chunks.
    Both are off by what C and partial outputs are rounded to."""
    case = Case("many", seq_len, seed=seq_len)
    found = OPERATOR.route("wgmma_grouped")
    assert found is not None
    decline = found.declines(
        key_from_axes(OPERATOR.spec, case.axes, named_device("cuda"), case.mode), config
    )
    if decline is not None:
        pytest.skip(decline.reason)
    inputs = make_inputs(case, "cuda", full_weights)
    got = call(inputs, "wgmma_grouped", config).float()
    want = call(inputs, "triton_grouped").float()
    assert got.isfinite().all()
    has_output = want.norm(dim=1) > 0
    assert not got[~has_output].any()
    error = (got - want).norm(dim=1)[has_output] / want.norm(dim=1)[has_output]
    assert float(error.max()) < 5e-3
    assert float(error.square().mean().sqrt()) < 3e-3


@ROUTES
def test_tokens_are_the_same_among_others(route: str, full_weights: Weights) -> None:
    """C73: one token repeated, to the bit, whatever tile, chunk or number of tokens it is in."""
    alone = make_inputs(Case("alone", 1, seed=3), "cuda", full_weights)
    wanted = call(alone, route)
    assert_right(alone, wanted)
    for count in (2, 129, 255, 256, 257, 513, CHUNK + 3, LONG_CHUNK + 3):
        assert alone.routing_logits is not None
        many = alone._replace(
            routing_logits=alone.routing_logits.expand(count, -1).contiguous(),
            hidden_states=alone.hidden_states.expand(count, -1).contiguous(),
            hidden_states_scale=alone.hidden_states_scale.expand(-1, count).contiguous(),
        )
        got = call(many, route)
        assert same_bits(got, wanted.expand_as(got).contiguous())


@ROUTES
def test_c74_indices_beyond_32_bits(route: str) -> None:
    """65,537 tokens with all eight experts local: 2^32 bytes of intermediate codes and more, in
    chunks; the last token against the same one alone."""
    case = Case("many", 65_537, seed=4, logits="all_local", **{**SMALL, "topk": 8})
    case = replace(case, hidden_size=7168, intermediate_size=256)
    inputs = make_inputs(case, "cuda")
    last = slice(case.seq_len - 1, case.seq_len)
    assert inputs.routing_logits is not None
    alone = inputs._replace(
        routing_logits=inputs.routing_logits[last],
        hidden_states=inputs.hidden_states[last],
        hidden_states_scale=inputs.hidden_states_scale[:, last],
    )
    got = call(inputs, route)
    assert same_bits(got[last], call(alone, route))
    assert_right(alone, got[last])


@ROUTES
def test_other_models(route: str) -> None:
    """Qwen3-like: 128 experts, softmax routing given as ids."""
    case = Case(
        "qwen", 24, seed=5, mode="precomputed", num_experts=128, num_local_experts=16,
        hidden_size=4096, intermediate_size=1536, num_groups=1, topk_groups=1,
    )  # fmt: skip
    for ids in ("int32", "int64", "hostile"):
        inputs = make_inputs(replace(case, ids=ids), "cuda")
        assert_right(inputs, call(inputs, route))


# ---- calls --------------------------------------------------------------------------------------


@ROUTES
def test_equal_bits_run_to_run(route: str) -> None:
    for deterministic in (False, True):
        inputs = inputs_of(seq_len=150, deterministic=deterministic)
        first = call(inputs, route)
        assert all(same_bits(call(inputs, route), first) for _ in range(50))


@ROUTES
def test_two_streams_and_two_threads(route: str) -> None:
    problems = [inputs_of(seed=3, seq_len=40), inputs_of(seed=4, seq_len=40, logits="normal")]
    wanted = [call(each, route) for each in problems]
    torch.cuda.synchronize()
    failures: list[str] = []

    def work(problem: Inputs, want: Tensor) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            got = [call(problem, route) for _ in range(200)]
            stream.synchronize()
        if not all(same_bits(each, want) for each in got):
            failures.append("other bits")

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(problems, wanted, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@ROUTES
def test_replay_with_other_contents(route: str) -> None:
    """A graph holds sizes, not routing."""
    static = inputs_of()
    call(static, route)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(static, route)
    for seed, logits in enumerate(("none_local", "one_expert", "all_local", "vanishing"), 40):
        given = inputs_of(seed=seed, logits=logits)
        wanted = call(given, route)
        for target, value in zip(static, given, strict=True):
            if isinstance(target, Tensor):
                assert isinstance(value, Tensor)
                target.copy_(value)
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(captured, wanted)


@ROUTES
@pytest.mark.parametrize("fill", [0x00, 0x7F, 0xFF])
def test_workspaces(route: str, fill: int) -> None:
    """Allocated or given, whatever was in it before: the same bits; nothing beyond its size is
    written."""
    inputs = inputs_of()
    found = OPERATOR.route(route)
    assert found is not None
    size = found.workspace_bytes(CASE.axes, found.default_config)
    wanted = call(inputs, route)
    guard = 4096
    room = torch.full((size + guard,), fill, dtype=torch.uint8, device="cuda")
    assert same_bits(call(inputs, route, workspace=room), wanted)
    assert bool((room[size:] == fill).all())
    with pytest.raises(ArgumentError, match=f"'workspace' has {size - 1} bytes, expected at least"):
        call(inputs, route, workspace=room[: size - 1])


@ROUTES
def test_memory_that_is_not_aligned(route: str) -> None:
    inputs = inputs_of()
    wanted = call(inputs, route)
    tensors: dict[str, Any] = {}
    for name in ("hidden_states", "gemm1_weights", "gemm2_weights"):
        x = getattr(inputs, name)
        room = torch.empty(x.numel() + 1, dtype=torch.uint8, device="cuda")
        tensors[name] = room[1:].view(x.dtype).view(x.shape).copy_(x)
    room = torch.empty(wanted.numel() + 1, dtype=torch.bfloat16, device="cuda")
    out = room[1:].view(wanted.shape)
    for each in ({name: tensor} for name, tensor in tensors.items()):
        assert same_bits(call(inputs._replace(**each), route), wanted)
    call(inputs._replace(**tensors), route, out=out)
    assert same_bits(out.clone(), wanted)


@ROUTES
def test_no_tokens(route: str) -> None:
    assert call(inputs_of(seq_len=0), route).shape == (0, 256)


def test_the_short_way_is_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of()
    dispatch.reload_tables()
    with dispatch.attest() as served:
        first = call(inputs)
    if dispatch.select(OPERATOR, served[0][0]).route.language == "torch":
        pytest.skip("no compiled route serves this yet")
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "run", None)
        second = call(inputs)
    assert same_bits(first, second)


@ROUTES
@pytest.mark.parametrize("name", ["nan_tokens", "one_expert"])
def test_nan_stays_where_it_is_used(route: str, name: str) -> None:
    """In experts that nobody uses, and in tokens without a local expert, in whatever tile."""
    stratum: Stratum = STRATA[name]
    inputs, _ = stratum.draw(9, "cuda", seq_len=100)
    output = call(inputs, route)
    assert output.isfinite().all()
    assert_right(inputs, output)
