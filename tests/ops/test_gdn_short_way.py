"""The short way of a call, with an entry that stands for the library: what it is handed, what the
caller gets back, and when it is not taken. The library's own checks: test_gdn_entry.py; both
together on a GPU: test_gdn_decode_gpu.py, test_gdn_prefill_gpu.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fastkernels
from fastkernels import ArgumentError, LaunchError, catalog
from fastkernels.core import dispatch
from fastkernels.core.device import override_device
from fastkernels.core.extension import LaunchFailed
from fastkernels.core.route import ShortWay
from tests.ops.gdn_calls import DECODE, MODES, PREFILL, Calls


class Library:
    """Takes every call, and keeps it by the names of its arguments."""

    def __init__(self, of: Calls) -> None:
        self.of = of
        self.calls: list[dict[str, Any]] = []
        self.answer: bool | Exception = True
        spec = of.operator.spec
        self.names = (
            *(argument.name for argument in spec.inputs), "read_indices", "write_indices",
            "output", "new_state", *("workspace" for _ in of.rest),
        )  # fmt: skip

    def __call__(self, plan: int, *arguments: Any) -> bool:
        assert plan == 0  # the one that is remembered
        self.calls.append(dict(zip(self.names, arguments, strict=True)))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def inputs(self, mode: str = "functional", **fields: Any) -> Any:
        """Inputs of an operator of which the library served problems before."""
        inputs = self.of.inputs(mode, **({"head_size": 16, "seed": 5} | fields))
        dispatch._short_ways[self.of.name] = ShortWay(self, lambda: None)
        return inputs

    def call(self, inputs: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output, new_state = self.of.operator.function(**{**inputs._asdict(), **options})
        return output, new_state

    def long_way(self, inputs: Any, **options: Any) -> None:
        """A legal call that does not reach the entry."""
        self.call(inputs, **options)
        assert not self.calls


@pytest.fixture(params=[DECODE, PREFILL], ids=lambda calls: calls.name)
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    yield Library(request.param)
    dispatch.reload_tables()


@pytest.mark.parametrize("mode", MODES)
def test_outputs_are_allocated_and_returned(library: Library, mode: str) -> None:
    inputs = library.inputs(mode)
    output, new_state = library.call(inputs)
    (call,) = library.calls
    assert call.pop("scale") == 0.0
    assert call.pop("workspace", None) is None
    assert call.pop("output") is output
    assert (output.shape, output.dtype) == (inputs.v.shape, torch.bfloat16)
    assert output.is_contiguous()
    handed = call.pop("new_state")
    if mode == "functional":
        assert handed is new_state
        assert (new_state.shape, new_state.dtype) == (inputs.state.shape, torch.float32)
        assert new_state.is_contiguous()
        assert new_state.data_ptr() != inputs.state.data_ptr()
    else:
        assert handed is None
        assert new_state is inputs.state
    assert all(value is getattr(inputs, name) for name, value in call.items())


@pytest.mark.parametrize("mode", MODES)
def test_outputs_are_given(library: Library, mode: str) -> None:
    inputs = library.inputs(mode)
    output = torch.empty_like(inputs.v)
    is_functional = mode == "functional"
    out: Any = (output, torch.empty(inputs.state.shape)) if is_functional else output
    result = library.call(inputs, out=out)
    (call,) = library.calls
    assert result[0] is output
    assert call["output"] is output
    assert result[1] is (out[1] if is_functional else inputs.state)


def test_layouts_of_the_inputs_are_not_those_of_the_outputs(library: Library) -> None:
    inputs = library.inputs(layout="fused")
    shape = inputs.state.shape
    inputs = inputs._replace(state=inputs.state[:1].expand(3, -1, -1, -1))
    output, new_state = library.call(inputs)
    assert output.is_contiguous()
    assert new_state.is_contiguous()
    output, new_state = library.call(inputs, state=None)
    assert (new_state.shape, new_state.dtype) == (shape, torch.float32)
    assert library.calls[1]["state"] is None
    assert library.calls[1]["new_state"] is new_state


@pytest.mark.parametrize(("scale", "handed"), [(None, 0.0), (0.0, 0.0), (0.25, 0.25), (2, 2)])
def test_scale(library: Library, scale: float | None, handed: float) -> None:
    library.call(library.inputs(), scale=scale)
    assert library.calls[0]["scale"] == handed


@pytest.mark.parametrize("mode", MODES)
def test_refused_calls_go_the_long_way(library: Library, mode: str) -> None:
    inputs = library.inputs(mode)
    for answer in (False, TypeError("no tensor"), RuntimeError("cannot be handed over")):
        library.answer = answer
        output, _ = library.call(inputs)
        assert output.isfinite().all()
    assert len(library.calls) == 3


def test_a_failed_launch_is_an_error(library: Library) -> None:
    inputs = library.inputs()
    library.answer = LaunchFailed("launch gave CUDA_ERROR_X")
    words = rf"{library.of.name}: route .* failed on .*num_v_heads=2.*ERROR_X"
    with pytest.raises(LaunchError, match=words):
        library.call(inputs)
    assert len(library.calls) == 1


def test_when_somebody_decides_or_watches(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = library.inputs("pool")
    with fastkernels.force_route(library.of.name, library.of.operator.safe_route.name):
        library.long_way(inputs)
    with dispatch.attest() as served:
        library.long_way(inputs)
    assert len(served) == 1
    with override_device("cpu"):
        library.long_way(inputs)
    with monkeypatch.context() as patch:
        patch.setenv("FASTKERNELS_CHECK", "values")
        library.long_way(inputs, write_indices=None)
    library.long_way(inputs, workspace=torch.empty(0, dtype=torch.uint8))
    library.call(inputs)
    assert len(library.calls) == 1


def test_offsets_are_checked_where_values_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of gdn_prefill in every form; gdn_decode has none."""
    monkeypatch.setenv("FASTKERNELS_CHECK", "values")
    library = Library(PREFILL)
    for mode in MODES:
        inputs = library.inputs(mode)
        with pytest.raises(ArgumentError, match=r"'cu_seqlens'\[3\] is 4, expected 5"):
            library.call(inputs, cu_seqlens=torch.tensor([0, 2, 2, 4]))
    assert not library.calls
    dispatch.reload_tables()


def test_reloaded_tables_decide_anew(library: Library) -> None:
    inputs = library.inputs()
    forgotten: list[bool] = []
    dispatch._short_ways[library.of.name] = ShortWay(library, lambda: forgotten.append(True))
    dispatch.reload_tables()
    assert forgotten == [True]
    library.long_way(inputs)


def test_strict_refuses_a_remembered_fallback(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = library.inputs()
    monkeypatch.setenv("FASTKERNELS_STRICT", "1")
    library.call(inputs)
    assert len(library.calls) == 1  # nothing that is remembered is a fallback
    # After a call that another product's table served.
    dispatch._fallbacks.add(library.of.name)
    library.calls.clear()
    library.long_way(inputs)


def test_what_is_remembered(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each problem once, by the config that served it; nothing while a route is forced or a device
    overridden; everything anew when there are too many. A CPU has no table: sizes themselves."""
    told: list[tuple[Any, Any, Any]] = []

    def remember(key: Any, config: Any, ranges: Any) -> ShortWay:
        told.append((key, config, ranges))
        return ShortWay(library, told.clear)

    of = library.of
    route = dataclasses.replace(of.operator.safe_route, remember=remember)
    operator = dataclasses.replace(of.operator, routes=(route,))
    monkeypatch.setattr(catalog.module(of.name, "op"), "OPERATOR", operator)
    monkeypatch.setattr(dispatch, "_REMEMBERED_LIMIT", 2)
    library.answer = False  # as of sizes that it does not remember
    problems = [of.inputs(num_v_heads=heads, head_size=16) for heads in (1, 2, 3)]
    with dispatch.force_route(operator, route.name):
        library.call(problems[0])
    with override_device("cpu"):
        library.call(problems[0])
    assert not told
    dispatch.reload_tables()
    for _ in range(2):
        for each in problems[:2]:
            library.call(each)
    assert [key.axis("num_v_heads") for key, _, _ in told] == [1, 2]
    assert all((config, ranges) == (route.default_config, {}) for _, config, ranges in told)
    library.call(problems[2])
    assert [key.axis("num_v_heads") for key, _, _ in told] == [3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inplace": 1}, "'inplace' is int, expected a bool"),
        ({"scale": True}, "'scale' is bool, expected a float"),
        ({"v": [1.0]}, "'v' is a list, expected a tensor"),
        ({"out": (None, None)}, "'output' is None, expected a tensor"),
        ({"out": ("output", None)}, "'new_state' is None"),
        ({"out": iter(())}, "'out' is list_iterator|'out' is tuple_iterator"),
        ({"state": torch.zeros(1, 2, 16, 16).expand(10**9, -1, -1, -1)}, " has shape"),
        ({"A_log": torch._neg_view(torch.zeros(2))}, "'A_log' is a lazy negation"),
        ({"dt_bias": torch.zeros(2, requires_grad=True)}, "'dt_bias' requires grad"),
        ({"state": torch.zeros(3, 2, 16, 16).to_sparse()}, "'state' has layout"),
    ],
)
def test_what_the_library_is_never_handed(
    library: Library, change: dict[str, Any], words: str
) -> None:
    inputs = library.inputs()
    if "out" in change and change["out"] == ("output", None):
        change = {"out": (torch.empty_like(inputs.v), None)}
    with pytest.raises(ArgumentError, match=words):
        library.call(inputs, **change)
    assert not library.calls


@pytest.mark.parametrize("offsets", [[0, 2, 5], None, torch.zeros(()), torch.zeros(0)])
def test_offsets_that_say_nothing(offsets: Any) -> None:
    library = Library(PREFILL)
    for state in (library.inputs().state, None):
        library.answer = False  # as the library would
        with pytest.raises(ArgumentError, match="'cu_seqlens'"):
            library.call(library.inputs(), cu_seqlens=offsets, state=state)
    dispatch.reload_tables()


def test_out_as_a_list_gives_a_tuple(library: Library) -> None:
    inputs = library.inputs()
    out = [torch.empty_like(inputs.v), torch.empty(inputs.state.shape)]
    result = library.of.operator.function(**inputs._asdict(), out=out)
    assert type(result) is tuple
    assert result[0] is out[0]
    assert not library.calls


def test_gradients_are_allowed_where_none_is_recorded(library: Library) -> None:
    inputs = library.inputs()
    inputs = inputs._replace(A_log=torch.nn.Parameter(inputs.A_log))
    with torch.no_grad():
        library.call(inputs)
    assert len(library.calls) == 1
