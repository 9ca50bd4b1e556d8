"""dsa_sparse_attention's compiled routes on a GPU: what the contract tests do not ask.

Every route over every case, poisoned outputs and guard bytes: test_contracts.py. Capture, streams
and synchronisation of the dispatched route: tests/graph/test_gpu.py. Not here: tensors on a GPU
that is not current, which needs two.
"""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastkernels
from bench import sweep
from fastkernels import ArgumentError, catalog, dsa_sparse_attention
from fastkernels.core import dispatch, extension
from fastkernels.core.device import named_device
from fastkernels.core.problem import key_from_axes
from fastkernels.ops.dsa_sparse_attention.inputs import CORNER, CORRECTNESS, Case, make_inputs
from fastkernels.ops.dsa_sparse_attention.kernels import KERNELS, ClusterSplit
from fastkernels.ops.dsa_sparse_attention.problem import Inputs
from fastkernels.ops.dsa_sparse_attention.reference import reference
from fastkernels.testing.compare import clone, run_case, same_bits

pytestmark = pytest.mark.gpu

OPERATOR = catalog.operator("dsa_sparse_attention")
ROUTES = pytest.mark.parametrize("route", [kernel.name for kernel in KERNELS])
PAGES = 64
VALID = (2048, 0, 33, 1, 700)
CASE = Case("test", 5, seed=1, num_pages=PAGES, valid=VALID, padding="scattered")


@pytest.fixture(autouse=True)
def library() -> None:
    """These tests are about the library: where there is none, they fail."""
    state = extension.state()
    assert state.status == "ok", state.found


def inputs_of(**fields: Any) -> Inputs:
    return make_inputs(Case(**(vars(CASE) | fields)), "cuda")


def attend(
    inputs: Inputs, route: str | None = None, config: Any = None, **options: Any
) -> tuple[Tensor, Tensor]:
    if route is None:
        return dsa_sparse_attention(**inputs._asdict(), **options)
    with fastkernels.force_route("dsa_sparse_attention", route, config):
        return dsa_sparse_attention(**inputs._asdict(), **options)


def assert_right(inputs: Inputs, outputs: tuple[Tensor, Tensor]) -> None:
    errors = reference(inputs).judge(tuple(x.cpu() for x in outputs))
    assert all(error.ok for error in errors), "; ".join(map(str, errors))


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


SWEPT = sweep.choices(OPERATOR, Path(sweep.__file__).parent / "sweeps" / f"{OPERATOR.name}.json")
SWEPT_CASES = ("t8-contest", "h128", "k64-page16", "tail", "outside", "huge", "poisoned",
               "strided-packed", "strided-padded", "natural-lse", "largest")  # fmt: skip


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


# ---- clusters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", [2, 4, 8, 16])
def test_exchange_under_changing_validity(cluster: int) -> None:
    """Thousands of calls over memory that never gets cold: the same bits as the first call on the
    same contents, whatever blocks of a cluster had to do in the call before."""
    config = ClusterSplit(cluster, 32, 2)
    route = OPERATOR.route("cluster_split")
    assert route is not None
    key = key_from_axes(OPERATOR.spec, CASE.axes, named_device("cuda"), CASE.mode)
    decline = route.declines(key, config)
    if decline is not None:
        pytest.skip(decline.reason)
    kinds: list[tuple[tuple[int, ...], str]] = [
        ((2048,) * 5, "scattered"),
        ((0,) * 5, "scattered"),
        ((1, 2, 15, 16, 17), "outside"),
        ((33, 2048, 0, 500, 1), "scattered"),
        ((129, 255, 256, 257, 1999), "outside"),
    ]
    problems = [
        inputs_of(valid=valid, padding=padding, seed=seed)
        for seed, (valid, padding) in enumerate(kinds)
    ]
    wanted = [attend(each, "cluster_split", config) for each in problems]
    for each, want in zip(problems, wanted, strict=True):
        assert_right(each, want)
    rng = torch.Generator().manual_seed(cluster)
    outputs = torch.empty_like(wanted[0][0]), torch.empty_like(wanted[0][1])
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for choice in torch.randint(len(problems), (4000,), generator=rng).tolist():
        for x in outputs:
            x.fill_(math.nan)
        attend(problems[choice], "cluster_split", config, out=outputs)
        for x, y in zip(outputs, wanted[choice], strict=True):
            kind = torch.int16 if x.dtype == torch.bfloat16 else torch.int32
            different += (x.view(kind) != y.view(kind)).sum()
    assert int(different) == 0


@ROUTES
def test_two_streams_and_two_threads(route: str) -> None:
    problems = [inputs_of(seed=seed, valid=valid) for seed, valid in ((3, VALID), (4, (9,) * 5))]
    wanted = [attend(each, route) for each in problems]
    torch.cuda.synchronize()
    failures: list[str] = []

    def work(problem: Inputs, want: tuple[Tensor, Tensor]) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            got = [attend(problem, route) for _ in range(200)]
            stream.synchronize()
        if not all(same_bits(a, b) for each in got for a, b in zip(each, want, strict=True)):
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
    """A graph holds sizes, not validity."""
    static = inputs_of()
    attend(static, route)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(static, route)
    for seed, valid in enumerate(((2048,) * 5, (0, 0, 0, 0, 1), (64, 65, 1, 0, 2047)), 40):
        given = inputs_of(seed=seed, valid=valid, padding="outside")
        wanted = attend(given, route)
        for target, value in zip(static, given, strict=True):
            if isinstance(target, Tensor):
                assert isinstance(value, Tensor)
                target.copy_(value)
        for x in captured:
            x.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, wanted)
        assert_right(given, captured)


# ---- workspace ----------------------------------------------------------------------------------


def size_of(inputs: Inputs, route: str) -> int:
    found = OPERATOR.route(route)
    assert found is not None
    axes = {
        "num_tokens": inputs.q_nope.shape[0],
        "num_qo_heads": inputs.q_nope.shape[1],
        "topk": inputs.sparse_indices.shape[1],
    }
    return found.workspace_bytes(axes, found.default_config)


def test_workspaces() -> None:
    """Allocated or given, whatever was in it before: the same bits; nothing beyond its size is
    written."""
    route = "triton_split"
    inputs = inputs_of()
    size = size_of(inputs, route)
    assert size > 0
    assert size_of(inputs, "cluster_split") == 0
    wanted = attend(inputs, route)
    guard = 4096
    for fill in (0xFF, 0x00):
        room = torch.full((size + guard,), fill, dtype=torch.uint8, device="cuda")
        assert_same(attend(inputs, route, workspace=room), wanted)
        assert bool((room[size:] == fill).all())
    with pytest.raises(ArgumentError, match=f"'workspace' has {size - 1} bytes, expected at least"):
        attend(inputs, route, workspace=room[: size - 1])


# ---- the short way ------------------------------------------------------------------------------


def test_the_short_way_is_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of()
    dispatch.reload_tables()
    with dispatch.attest() as served:
        first = attend(inputs)
    if dispatch.select(OPERATOR, served[0][0]).route.language == "torch":
        pytest.skip("no compiled route serves this yet")
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "run", None)
        second = attend(inputs)
    assert_same(first, second)
    for change, words in (
        ({"q_pe": inputs.q_pe.float()}, "'q_pe' is float32, expected bfloat16"),
        ({"sparse_indices": inputs.sparse_indices.long()}, "'sparse_indices' is int64"),
        ({"kpe_cache": inputs.kpe_cache.cpu()}, "'kpe_cache' is on cpu, expected cuda"),
        ({"sm_scale": "1"}, "'sm_scale' is str, expected a float"),
    ):
        with pytest.raises(ArgumentError, match="dsa_sparse_attention") as error:
            attend(inputs._replace(**change))
        assert words in str(error.value)


# ---- geometry -----------------------------------------------------------------------------------


@ROUTES
@pytest.mark.parametrize("num_heads", [1, 8, 16, 17, 32, 64, 128])
@pytest.mark.parametrize("topk", [64, 192, 2048])
def test_heads_and_indices(route: str, num_heads: int, topk: int) -> None:
    inputs = inputs_of(num_qo_heads=num_heads, topk=topk, valid=(topk, 0, 1, topk // 2, 63))
    assert_right(inputs, attend(inputs, route))


@ROUTES
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("layout", ["contiguous", "packed", "padded"])
def test_pages(route: str, page_size: int, layout: str) -> None:
    inputs = inputs_of(page_size=page_size, num_pages=4096 // page_size, layout=layout)
    assert_right(inputs, attend(inputs, route))


@ROUTES
@pytest.mark.parametrize("num_tokens", [9, 31, 66, 133, 530])
def test_any_number_of_tokens(route: str, num_tokens: int) -> None:
    valid = tuple(VALID[i % 5] % 300 for i in range(num_tokens))
    inputs = inputs_of(num_tokens=num_tokens, valid=valid, topk=320)
    assert_right(inputs, attend(inputs, route))


@ROUTES
def test_c34_c41_a_token_is_the_same_among_others(route: str) -> None:
    """With one config, to the bit: alone, at any place, at every token count."""
    alone = inputs_of(num_tokens=1, valid=(700,))
    wanted = attend(alone, route)
    other = inputs_of(num_tokens=1, valid=(1500,), seed=2)
    for count in (2, 63, 64, 65, 128, 1024):
        place = count // 3
        rows: dict[str, Any] = {}
        for name in ("q_nope", "q_pe", "sparse_indices"):
            x = getattr(other, name).repeat_interleave(count, 0)
            x[place] = getattr(alone, name)[0]
            rows[name] = x
        got = attend(alone._replace(**rows), route)
        if route == "cluster_split":
            assert_same(tuple(x[place] for x in got), tuple(x[0] for x in wanted))
        else:  # the number of splits follows from that of the tokens
            torch.testing.assert_close(got[0][place], wanted[0][0], rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(got[1][place], wanted[1][0], rtol=1e-5, atol=1e-4)
        rest = [i for i in range(count) if i != place]
        for x in got:
            assert same_bits(x[rest], x[rest[0]].expand_as(x[rest]).contiguous())


@ROUTES
def test_memory_that_is_not_aligned(route: str) -> None:
    inputs = inputs_of()
    names = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
    tensors: dict[str, Any] = {}
    for name in names:
        x = getattr(inputs, name)
        room = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")
        tensors[name] = room[1:].view(x.shape).copy_(x)
    assert_right(inputs, attend(inputs._replace(**tensors), route))


@ROUTES
def test_c43_rows_beyond_two_to_the_31_elements(route: str) -> None:
    """65,600 pages of 64 rows: their last rows start 2^31 elements and more after the first."""
    small = inputs_of()
    pages = 65_600
    ckv = torch.empty((pages, 64, 512), dtype=torch.bfloat16, device="cuda")
    kpe = torch.empty((pages, 64, 64), dtype=torch.bfloat16, device="cuda")
    ckv[-PAGES:] = small.ckv_cache
    kpe[-PAGES:] = small.kpe_cache
    shift = (pages - PAGES) * 64
    indices = torch.where(
        small.sparse_indices >= 0, small.sparse_indices + shift, small.sparse_indices
    )
    big = small._replace(ckv_cache=ckv, kpe_cache=kpe, sparse_indices=indices)
    assert_same(attend(big, route), attend(small, route))


# ---- numbers ------------------------------------------------------------------------------------


@ROUTES
def test_nan_stays_where_it_is_named(route: str) -> None:
    """Also in row 0, beside which padding must not be multiplied by zero."""
    inputs = inputs_of(valid=(40, 0, 40, 1, 0))
    clean = attend(inputs, route)
    named = torch.zeros(PAGES * 64, dtype=torch.bool, device="cuda")
    named[inputs.sparse_indices[inputs.sparse_indices >= 0].long()] = True
    dirty = clone(inputs)
    for cache in (dirty.ckv_cache, dirty.kpe_cache):
        cache.view(PAGES * 64, -1)[~named] = math.nan
    assert_same(attend(dirty, route), clean)


@ROUTES
def test_equal_bits_run_to_run(route: str) -> None:
    inputs = inputs_of(num_tokens=40, valid=VALID * 8)
    first = attend(inputs, route)
    for _ in range(50):
        assert_same(attend(inputs, route), first)
