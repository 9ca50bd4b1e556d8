"""dsa_topk_indexer's compiled routes on a GPU: what the contract tests do not ask.

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
from fastkernels import ArgumentError, catalog, dsa_topk_indexer
from fastkernels.core import dispatch, extension
from fastkernels.core.device import named_device
from fastkernels.core.problem import key_from_axes
from fastkernels.ops.dsa_topk_indexer.adversarial import STRATA
from fastkernels.ops.dsa_topk_indexer.inputs import CORNER, CORRECTNESS, Case, make_inputs
from fastkernels.ops.dsa_topk_indexer.kernels import KERNELS
from fastkernels.ops.dsa_topk_indexer.problem import Inputs
from fastkernels.ops.dsa_topk_indexer.reference import reference
from fastkernels.testing.compare import run_case

pytestmark = pytest.mark.gpu

OPERATOR = catalog.operator("dsa_topk_indexer")
SELECTING = [kernel.name for kernel in KERNELS if kernel.tile(kernel.config)[0] > 0]
TILED = [kernel.name for kernel in KERNELS if kernel.tile(kernel.config)[1] > 0]
ROUTES = pytest.mark.parametrize("route", SELECTING)
LENGTHS = (5806, 0, 2049, 2048, 94)
CASE = Case("test", LENGTHS, 91, 512, seed=1)


@pytest.fixture(autouse=True)
def library() -> None:
    """These tests are about the library: where there is none, they fail."""
    state = extension.state()
    assert state.status == "ok", state.found


def inputs_of(**fields: Any) -> Inputs:
    return make_inputs(Case(**(vars(CASE) | fields)), "cuda")


def index(inputs: Inputs, route: str | None = None, config: Any = None, **options: Any) -> Tensor:
    if route is None:
        return dsa_topk_indexer(**inputs._asdict(), **options)
    with fastkernels.force_route("dsa_topk_indexer", route, config):
        return dsa_topk_indexer(**inputs._asdict(), **options)


def assert_right(inputs: Inputs, output: Tensor) -> None:
    errors = reference(inputs).judge((output.cpu(),))
    assert all(error.ok for error in errors), "; ".join(map(str, errors))


def sets(output: Tensor) -> Tensor:
    return output.sort(1).values


SWEPT = sweep.choices(OPERATOR, Path(sweep.__file__).parent / "sweeps" / f"{OPERATOR.name}.json")
SWEPT_CASES = ("b2-short", "b9-mixed", "h32-topk512", "short", "equal", "plateau", "nonfinite",
               "invalid-pages", "poisoned", "strided")  # fmt: skip


@pytest.mark.parametrize("choice", SWEPT, ids=sweep.label)
def test_configs_of_the_sweep(choice: sweep.Choice) -> None:
    """Those that the library or a cache has, on what they serve."""
    route, config = choice
    served = 0
    for case in (*CORRECTNESS, *CORNER):
        if case.name not in SWEPT_CASES:
            continue
        key = key_from_axes(OPERATOR.spec, case.axes, named_device("cuda"), case.mode)
        decline = route.available(key.device, config)
        if decline is not None:
            pytest.skip(decline.reason)
        if route.unsuited(key, config) is None:
            report = run_case(OPERATOR, case, route, "cuda", config)
            assert report.ok, str(report)
            served += 1
    assert served > 0


@ROUTES
@pytest.mark.parametrize("stratum", STRATA)
def test_strata(route: str, stratum: str) -> None:
    for seed in range(3):
        inputs, _ = STRATA[stratum].draw(seed)
        moved = inputs._replace(
            **{n: v.cuda() for n, v in inputs._asdict().items() if isinstance(v, Tensor)}
        )
        assert_right(inputs, index(moved, route))


@ROUTES
def test_many_random_rows(route: str) -> None:
    """20,480 rows against torch's, whose scores may differ within rounding: those rows are judged
    by the oracle."""
    cases = 160
    judged = 0
    for seed in range(cases):
        rng = torch.Generator().manual_seed(seed)
        lengths = tuple(torch.randint(0, 5825, (128,), generator=rng).tolist())
        keys = ("normal", "lognormal", "crowded", "plateau")[seed % 4]
        inputs = inputs_of(seq_lens=lengths, seed=seed, keys=keys)
        got, want = index(inputs, route), index(inputs, "torch_tiled")
        differs = (sets(got) != sets(want)).any(1).nonzero().flatten()
        judged += differs.numel()
        if differs.numel():
            some = inputs._replace(
                q_index_fp8=inputs.q_index_fp8[differs], weights=inputs.weights[differs],
                seq_lens=inputs.seq_lens[differs], block_table=inputs.block_table[differs],
            )  # fmt: skip
            assert_right(some, got[differs])
    assert judged < cases * 128


@ROUTES
@pytest.mark.parametrize("pages", [1024, 4096])
def test_c47_crowded_scores(route: str, pages: int) -> None:
    inputs = inputs_of(
        seq_lens=(pages * 64,), max_num_pages=pages, num_pages=pages, keys="crowded", seed=7
    )
    decline = declines(route, inputs)
    if decline is not None:
        pytest.skip(decline)
    output = index(inputs, route)
    assert_right(inputs, output)
    assert torch.equal(index(inputs, route), output)


def declines(route: str, inputs: Inputs) -> str | None:
    found = OPERATOR.route(route)
    assert found is not None
    axes = {
        "batch_size": inputs.q_index_fp8.shape[0],
        "num_index_heads": inputs.q_index_fp8.shape[1],
        "topk": inputs.topk,
        "max_num_pages": inputs.block_table.shape[1],
        "num_pages": inputs.k_index_cache_fp8.shape[0],
    }
    key = key_from_axes(OPERATOR.spec, axes, named_device("cuda"), "default")
    decline = found.declines(key, found.default_config)
    return None if decline is None else decline.reason


@ROUTES
@pytest.mark.parametrize("length", [32769, 98304, 131072, 262144])
def test_c59_long_rows(route: str, length: int) -> None:
    pages = -(-length // 64)
    inputs = inputs_of(seq_lens=(length, 100), max_num_pages=pages, num_pages=pages + 2)
    decline = declines(route, inputs)
    if decline is not None:
        pytest.skip(decline)
    assert_right(inputs, index(inputs, route))


@pytest.mark.parametrize("route", TILED)
def test_groups_of_rows(route: str) -> None:
    """More keys than the workspace holds: groups of rows follow one another in it."""
    rows, pages = 300, 1024
    rng = torch.Generator().manual_seed(3)
    lengths = tuple(torch.randint(0, pages * 64, (rows,), generator=rng).tolist())
    inputs = inputs_of(seq_lens=lengths, max_num_pages=pages, num_pages=4096, num_index_heads=2)
    for _ in range(3):
        assert torch.equal(sets(index(inputs, route)), sets(index(inputs, "torch_tiled")))


@ROUTES
def test_thousands_of_calls(route: str) -> None:
    """Over memory that never gets cold: the same entries as the first call on the same contents."""
    kinds: tuple[tuple[int, ...], ...] = (
        LENGTHS, (5806,) * 5, (0,) * 5, (2049, 2112, 2113, 4000, 1), (5806, 1, 1, 5806, 2048),
    )  # fmt: skip
    problems = [inputs_of(seq_lens=lengths, seed=i) for i, lengths in enumerate(kinds)]
    wanted = [index(each, route) for each in problems]
    for each, want in zip(problems, wanted, strict=True):
        assert_right(each, want)
    output = torch.empty_like(wanted[0])
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    rng = torch.Generator().manual_seed(5)
    for choice in torch.randint(len(problems), (4000,), generator=rng).tolist():
        output.fill_(7)
        index(problems[choice], route, out=output)
        different += (output != wanted[choice]).sum()
    assert int(different) == 0


@ROUTES
def test_two_streams_and_two_threads(route: str) -> None:
    problems = [inputs_of(seed=3), inputs_of(seed=4, seq_lens=(5806, 5806, 9, 9, 3000))]
    wanted = [index(each, route) for each in problems]
    torch.cuda.synchronize()
    failures: list[str] = []

    def work(problem: Inputs, want: Tensor) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            got = [index(problem, route) for _ in range(200)]
            stream.synchronize()
        if not all(torch.equal(each, want) for each in got):
            failures.append("other entries")

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
    """A graph holds sizes, not lengths; 10,000 replays."""
    static = inputs_of()
    index(static, route)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = index(static, route)
    for seed, lengths in enumerate(((5806,) * 5, (0, 1, 64, 65, 2047), (2049, 3000, 2048, 1, 5))):
        given = inputs_of(seed=seed + 40, seq_lens=lengths)
        wanted = index(given, route)
        assert_right(given, wanted)
        for target, value in zip(static, given, strict=True):
            if isinstance(target, Tensor):
                assert isinstance(value, Tensor)
                target.copy_(value)
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(3334):
            captured.fill_(7)
            graph.replay()
            different += (captured != wanted).sum()
        assert int(different) == 0


@pytest.mark.parametrize("route", TILED)
def test_workspaces(route: str) -> None:
    """Allocated or given, whatever was in it before: the same entries; nothing beyond its size is
    written."""
    inputs = inputs_of()
    found = OPERATOR.route(route)
    assert found is not None
    axes = {"batch_size": len(LENGTHS), "max_num_pages": 91}
    size = found.workspace_bytes(axes, found.default_config)
    assert size > 0
    wanted = index(inputs, route)
    for fill in (0xFF, 0x00):
        room = torch.full((size + 4096,), fill, dtype=torch.uint8, device="cuda")
        assert torch.equal(index(inputs, route, workspace=room), wanted)
        assert bool((room[size:] == fill).all())
    with pytest.raises(ArgumentError, match=f"'workspace' has {size - 1} bytes, expected at least"):
        index(inputs, route, workspace=room[: size - 1])


def test_the_short_way_is_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of()
    dispatch.reload_tables()
    with dispatch.attest() as served:
        first = index(inputs)
    if dispatch.select(OPERATOR, served[0][0]).route.language == "torch":
        pytest.skip("no compiled route serves this yet")
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "run", None)
        second = index(inputs)
    assert torch.equal(first, second)


@ROUTES
def test_c50_nan_scores_give_indices_in_range(route: str) -> None:
    inputs = inputs_of()
    inputs.weights[0, 3] = math.nan
    output = index(inputs, route)
    assert_right(inputs, output)
    assert bool(((output >= -1) & (output < 512 * 64)).all())


@ROUTES
def test_pages_far_apart(route: str) -> None:
    """Pages whose bytes start 2^31 and more after the cache."""
    small = inputs_of()
    room = torch.zeros((512, 8448 * 520), dtype=torch.int8, device="cuda")
    room[:, :8448] = small.k_index_cache_fp8.reshape(512, 8448)
    far = room[:, :8448].unflatten(1, (64, 1, 132))
    assert far.stride(0) * 511 > 2**31
    got = index(small._replace(k_index_cache_fp8=far), route)
    assert torch.equal(got, index(small, route))
