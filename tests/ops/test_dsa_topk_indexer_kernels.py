"""Compiled routes of dsa_topk_indexer without a GPU: machine code, what each route serves, and the
short way of a call into the library: with an entry that stands for it, and the library's own checks
against Python's on host tensors (plans -1 and -2 launch nothing)."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkernels import ArgumentError, LaunchError, catalog, dsa_topk_indexer
from fastkernels.core import dispatch, extension, toolchain
from fastkernels.core.device import named_device
from fastkernels.core.extension import LaunchFailed
from fastkernels.core.kernels import Kernel
from fastkernels.core.problem import key_from_axes
from fastkernels.core.route import ShortWay
from fastkernels.ops.dsa_topk_indexer.inputs import Case, make_inputs
from fastkernels.ops.dsa_topk_indexer.kernels import (
    KERNELS,
    PAGE_KEYS_BYTES,
    WORKSPACE_BYTES,
    group_rows,
    row_bytes,
    workspace_bytes,
)
from fastkernels.ops.dsa_topk_indexer.problem import Inputs, bind
from tests.ops.entry_changes import ANY_ARGUMENT

OPERATOR = catalog.operator("dsa_topk_indexer")
CASE = Case("small", (70, 0, 128), 3, 4, seed=1, num_index_heads=2, topk=40)
TENSORS = ("q_index_fp8", "k_index_cache_fp8", "weights", "seq_lens", "block_table")


# ---- machine code -------------------------------------------------------------------------------

STAGES = [
    (kernel, variant)
    for kernel in KERNELS
    if kernel.language == "cuda"
    for variant in kernel.variants
    if variant != "score_any"
]


@pytest.mark.toolchain
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize(("kernel", "variant"), STAGES, ids=lambda x: getattr(x, "name", x))
def test_machine_code(kernel: Kernel, variant: str, arch: str, tmp_path: Path) -> None:
    """Of the default config: nothing in local memory, whose traffic no count of bytes shows."""
    triton = pytest.importorskip("triton")
    file = tmp_path / "kernel.cubin"
    file.write_bytes(toolchain.compile_kernel(kernel, kernel.config, arch, variant).cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    found = re.search(r" STACK:(\d+) .* LOCAL:(\d+) ", usage.stdout)
    assert found is not None, usage.stdout
    assert found.groups() == ("0", "0"), usage.stdout


# ---- what routes serve --------------------------------------------------------------------------


def reason(route_name: str, **axes: int) -> str | None:
    """Why a route declines a problem on an H200, whatever is installed here."""
    route = OPERATOR.route(route_name)
    assert route is not None
    default = {"batch_size": 4, "num_index_heads": 64, "topk": 2048, "max_num_pages": 91,
               "num_pages": 11923}  # fmt: skip
    key = key_from_axes(OPERATOR.spec, default | axes, named_device("h200"), "default")
    decline = route.unsuited(key, route.default_config)
    return None if decline is None else decline.reason


def test_declines_have_reasons() -> None:
    assert reason("pass_through") == "serves max_num_pages * 64 <= topk, got 5824 and 2048"
    assert reason("pass_through", max_num_pages=32, num_index_heads=100) is None
    assert reason("cluster_select", max_num_pages=512) is None
    assert str(reason("cluster_select", max_num_pages=513)).startswith(
        "serves max_num_pages <= 512 with ClusterSelect(cluster=8, "
    )
    for route in ("cluster_select", "tiled_select"):
        assert reason(route, num_index_heads=65) == "serves num_index_heads <= 64, got 65"
        assert reason(route, num_index_heads=1, topk=1) is None
        assert "would take" in str(reason(route, batch_size=2**28))
    assert reason("tiled_select", max_num_pages=2**25 - 1) is None
    assert "max_num_pages <= 33554431" in str(reason("tiled_select", max_num_pages=2**25))
    assert reason("triton_tiled", max_num_pages=2**24 - 1, num_index_heads=65) is None
    assert "max_num_pages <= 16777215" in str(reason("triton_tiled", max_num_pages=2**24))


@pytest.mark.parametrize("aside", [0, 8 * 4096, 8 * 8192])
def test_workspace_is_bounded_and_monotone(aside: int) -> None:
    widths, long = (0, 1, 63, 64, 65, 127, 128, 129, 2**21), 2**21 * PAGE_KEYS_BYTES + aside
    sizes = [
        [workspace_bytes({"batch_size": rows, "max_num_pages": n}, aside) for n in widths]
        for rows in (0, 1, 3, 64, 10**6)
    ]
    for row in sizes:
        assert row == sorted(row)
    for column in zip(*sizes, strict=True):
        assert list(column) == sorted(column)
    assert sizes[1][3] == 64 * PAGE_KEYS_BYTES
    assert sizes[4][3] == WORKSPACE_BYTES
    assert sizes[1][8] == sizes[4][8] == long  # a row that alone needs more
    for pages in widths:
        size = workspace_bytes({"batch_size": 10**6, "max_num_pages": pages}, aside)
        assert min(group_rows(pages, aside), 10**6) * row_bytes(pages, aside) <= size


def test_several_tokens_a_row_are_refused_by_name() -> None:
    inputs = make_inputs(CASE)
    with pytest.raises(ArgumentError, match="'seq_lens'"):
        dsa_topk_indexer(**inputs._replace(seq_lens=inputs.seq_lens[:, None])._asdict())


# ---- what the caller hands over and gets back ---------------------------------------------------


class Library:
    """Takes every call, and keeps it by the names of its arguments."""

    names = (*TENSORS, "output", "workspace")

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.answer: bool | Exception = True

    def __call__(self, plan: int, *arguments: Any) -> bool:
        assert plan == 0  # the one that is remembered
        self.calls.append(dict(zip(self.names, arguments, strict=True)))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def library() -> Iterator[Library]:
    found = Library()
    dispatch._short_ways["dsa_topk_indexer"] = ShortWay(found, lambda: None)
    yield found
    dispatch.reload_tables()


def call(inputs: Inputs, **options: Any) -> torch.Tensor:
    return dsa_topk_indexer(**inputs._asdict(), **options)


def output_of(inputs: Inputs) -> torch.Tensor:
    return torch.empty((inputs.q_index_fp8.shape[0], inputs.topk), dtype=torch.int32)


def test_output_is_allocated_and_returned(library: Library) -> None:
    inputs = make_inputs(CASE)
    output = call(inputs)
    (seen,) = library.calls
    assert seen["output"] is output
    assert (output.shape, output.dtype) == ((3, 40), torch.int32)
    assert output.is_contiguous()
    assert all(seen[name] is getattr(inputs, name) for name in TENSORS)
    assert seen["workspace"] is None


def test_output_is_given(library: Library) -> None:
    inputs = make_inputs(CASE)
    out = output_of(inputs)
    assert call(inputs, out=out) is out
    assert library.calls[0]["output"] is out


OTHERS: dict[str, dict[str, Any]] = {
    "workspace": {"workspace": torch.empty(0, dtype=torch.uint8)},
    "out is a tuple": {"out": (torch.empty((3, 40), dtype=torch.int32),)},
    "out of another width": {"out": torch.empty((3, 41), dtype=torch.int32)},
    "top-k is a bool": {"topk": True},
    "top-k is a float": {"topk": 40.0},
    "negative view": {"weights": torch._neg_view(torch.ones(3, 2))},
    "negative lengths": {"seq_lens": torch._neg_view(torch.ones(3, dtype=torch.int32))},
    "negative output": {"out": torch._neg_view(torch.empty((3, 40), dtype=torch.int32))},
    "gradients": {"weights": torch.ones(3, 2, requires_grad=True)},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS.keys())
def test_what_is_not_plain_goes_the_long_way(library: Library, options: dict[str, Any]) -> None:
    with contextlib.suppress(ArgumentError):
        dsa_topk_indexer(**(make_inputs(CASE)._asdict() | options))
    assert not library.calls


def test_refused_calls_go_the_long_way(library: Library) -> None:
    inputs = make_inputs(CASE)
    expected = call(inputs, workspace=torch.empty(0, dtype=torch.uint8))
    for answer in (False, TypeError("not an argument of the entry")):
        library.answer = answer
        assert torch.equal(call(inputs), expected)
    assert len(library.calls) == 2


def test_a_failed_launch_is_named(library: Library) -> None:
    library.answer = LaunchFailed("launch gave CUDA_ERROR_X")
    with pytest.raises(LaunchError, match=r"dsa_topk_indexer.*CUDA_ERROR_X"):
        call(make_inputs(CASE))


# ---- what the library takes ---------------------------------------------------------------------


def library_takes(inputs: Inputs, output: Any, is_checked: bool = False) -> bool:
    entry = extension.function("dsa_topk_indexer")
    try:
        return bool(entry(-2 if is_checked else -1, *inputs[:5], output, None))
    except Exception:  # as `op._enter`
        return False


def python_takes(inputs: Inputs, output: Any) -> bool:
    try:
        bind(inputs, output, None)
    except ArgumentError:
        return False
    return True


@pytest.mark.toolchain
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"seq_lens": ()}, {"num_pages": 0}, {"max_num_pages": 0}, {"cache_dtype": "uint8"}],
    ids=str,
)
def test_plain_calls_take_the_short_way(layout: str, fields: dict[str, Any]) -> None:
    state = extension.state()
    assert state.status == "ok", state.found
    inputs = make_inputs(replace(CASE, layout=layout, **fields))
    assert library_takes(inputs, output_of(inputs))


CHANGES: dict[str, Any] = {
    **ANY_ARGUMENT,
    "bytes": lambda t: t.view(torch.int8),
    "half": lambda t: t.half(),
    "wider index": lambda t: t.long(),
    "list": lambda t: t.tolist(),
}


def assert_agreement(changes: list[tuple[str, str]]) -> None:
    given: dict[str, Any] = make_inputs(CASE)._asdict()
    given["output"] = output_of(make_inputs(CASE))
    for name, change in changes:
        value = given[name]
        if isinstance(value, torch.Tensor):
            try:
                changed = CHANGES[change](value)
            except (RuntimeError, IndexError):
                continue
            if changed is not None or name in TENSORS:
                given[name] = changed
    output = given.pop("output")
    inputs = Inputs(**given)
    if isinstance(output, torch.Tensor) and output.dim() == 2 and output.shape[1] != inputs.topk:
        return  # `_enter` has compared them
    if library_takes(inputs, output):
        assert python_takes(inputs, output), changes
    elif python_takes(inputs, output):
        # What is legal and not plainly so: Python has looked, and the library may not refuse.
        assert library_takes(inputs, output, is_checked=True), changes


@pytest.mark.toolchain
@pytest.mark.parametrize("change", CHANGES)
def test_one_change_to_any_argument(change: str) -> None:
    for name in (*TENSORS, "output"):
        assert_agreement([(name, change)])


@pytest.mark.toolchain
@settings(max_examples=200, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.sampled_from([*TENSORS, "output"]), st.sampled_from([*CHANGES])),
        min_size=2,
        max_size=2,
    )
)
def test_two_changes(changes: list[tuple[str, str]]) -> None:
    assert_agreement(changes)


@pytest.mark.toolchain
def test_memory_that_is_shared_goes_the_long_way() -> None:
    inputs = make_inputs(replace(CASE, topk=3))
    assert library_takes(inputs, output_of(inputs))
    assert not library_takes(inputs, inputs.block_table)
    assert not library_takes(inputs, output_of(inputs)[:1].expand(3, 3))
