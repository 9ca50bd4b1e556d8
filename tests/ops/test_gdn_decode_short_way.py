"""The short way of a call, with an entry that stands for the library: what it is handed, what the
caller gets back, and when it is not taken. The library's own checks: test_gdn_decode_entry.py; both
together on a GPU: test_gdn_decode_gpu.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fastkernels
from fastkernels import ArgumentError, LaunchError, gdn_decode
from fastkernels.core import dispatch
from fastkernels.core.device import override_device
from fastkernels.core.extension import LaunchFailed
from fastkernels.core.route import ShortWay
from fastkernels.ops.gdn_decode import op
from fastkernels.ops.gdn_decode.inputs import Case, make_inputs
from fastkernels.ops.gdn_decode.problem import Inputs

MODES = ("functional", "inplace", "pool")


class Library:
    """Takes every call, and keeps it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answer: bool | Exception = True

    def __call__(self, *arguments: Any) -> bool:
        plan, *call = arguments
        assert plan == 0  # the one that is remembered
        self.calls.append(tuple(call))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def library() -> Iterator[Library]:
    yield Library()
    dispatch.reload_tables()


def inputs_of(library: Library, mode: str, **fields: Any) -> Inputs:
    """Inputs of an operator of which `library` served problems before."""
    sizes = {"num_q_heads": 1, "num_v_heads": 2, "head_size": 16, "seed": 5}
    inputs = make_inputs(Case("short", 3, mode=mode, **(sizes | fields)))
    dispatch._short_ways["gdn_decode"] = ShortWay(library, lambda: None)
    return inputs


@pytest.mark.parametrize("mode", MODES)
def test_outputs_are_allocated_and_returned(library: Library, mode: str) -> None:
    inputs = inputs_of(library, mode)
    output, new_state = gdn_decode(**inputs._asdict())
    (call,) = library.calls
    assert all(a is b for a, b in zip(call[:8], inputs[:8], strict=True))
    assert call[8] == 0.0
    assert call[9] is inputs.read_indices
    assert call[10] is inputs.write_indices
    assert call[11] is output
    assert (output.shape, output.dtype) == (inputs.v.shape, torch.bfloat16)
    assert output.is_contiguous()
    if mode == "functional":
        assert call[12] is new_state
        assert inputs.state is not None
        assert (new_state.shape, new_state.dtype) == (inputs.state.shape, torch.float32)
        assert new_state.is_contiguous()
        assert new_state.data_ptr() != inputs.state.data_ptr()
    else:
        assert call[12] is None
        assert new_state is inputs.state


@pytest.mark.parametrize("mode", MODES)
def test_outputs_are_given(library: Library, mode: str) -> None:
    inputs = inputs_of(library, mode)
    output = torch.empty_like(inputs.v)
    out: Any = (output, torch.empty(3, 2, 16, 16)) if mode == "functional" else output
    result = gdn_decode(**inputs._asdict(), out=out)
    (call,) = library.calls
    assert result[0] is output
    assert call[11] is output
    assert result[1] is (out[1] if mode == "functional" else inputs.state)


def test_layouts_of_the_inputs_are_not_those_of_the_outputs(library: Library) -> None:
    inputs = inputs_of(library, "functional", layout="fused")
    assert inputs.state is not None
    inputs = inputs._replace(state=inputs.state[:1].expand(3, -1, -1, -1))
    output, new_state = gdn_decode(**inputs._asdict())
    assert output.is_contiguous()
    assert new_state.is_contiguous()
    output, new_state = gdn_decode(**inputs._replace(state=None)._asdict())
    assert (new_state.shape, new_state.dtype) == ((3, 2, 16, 16), torch.float32)
    assert library.calls[1][3] is None
    assert library.calls[1][12] is new_state


@pytest.mark.parametrize(("scale", "handed"), [(None, 0.0), (0.0, 0.0), (0.25, 0.25), (2, 2)])
def test_scale(library: Library, scale: float | None, handed: float) -> None:
    gdn_decode(**inputs_of(library, "functional")._replace(scale=scale)._asdict())
    assert library.calls[0][8] == handed


@pytest.mark.parametrize("mode", MODES)
def test_refused_calls_go_the_long_way(library: Library, mode: str) -> None:
    inputs = inputs_of(library, mode)
    for answer in (False, TypeError("no tensor"), RuntimeError("cannot be handed over")):
        library.answer = answer
        output, _ = gdn_decode(**inputs._asdict())
        assert output.isfinite().all()
    assert len(library.calls) == 3


def test_a_failed_launch_is_an_error(library: Library) -> None:
    inputs = inputs_of(library, "functional")
    library.answer = LaunchFailed("launch gave CUDA_ERROR_X")
    with pytest.raises(
        LaunchError, match=r"gdn_decode: route .* failed on .*batch_size=3.*ERROR_X"
    ):
        gdn_decode(**inputs._asdict())
    assert len(library.calls) == 1


def long_way(library: Library, inputs: Inputs, **options: Any) -> None:
    """A legal call that does not reach the entry."""
    gdn_decode(**inputs._asdict(), **options)
    assert not library.calls


def test_when_somebody_decides_or_watches(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of(library, "pool")
    with fastkernels.force_route("gdn_decode", "torch_recurrent"):
        long_way(library, inputs)
    with dispatch.attest() as served:
        long_way(library, inputs)
    assert len(served) == 1
    with override_device("cpu"):
        long_way(library, inputs)
    with monkeypatch.context() as patch:
        patch.setenv("FASTKERNELS_CHECK", "values")
        long_way(library, inputs._replace(write_indices=None))
    long_way(library, inputs, workspace=torch.empty(0, dtype=torch.uint8))
    gdn_decode(**inputs._asdict())
    assert len(library.calls) == 1


def test_reloaded_tables_decide_anew(library: Library) -> None:
    inputs = inputs_of(library, "functional")
    forgotten: list[bool] = []
    dispatch._short_ways["gdn_decode"] = ShortWay(library, lambda: forgotten.append(True))
    dispatch.reload_tables()
    assert forgotten == [True]
    long_way(library, inputs)


def test_strict_refuses_a_remembered_fallback(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of(library, "functional")
    monkeypatch.setenv("FASTKERNELS_STRICT", "1")
    gdn_decode(**inputs._asdict())
    assert len(library.calls) == 1  # nothing that is remembered is a fallback
    # After a call that another product's table served.
    dispatch._fallbacks.add("gdn_decode")
    library.calls.clear()
    long_way(library, inputs)


def remembering_route(library: Library) -> Any:
    """The torch route as one that has the library remember what it served."""
    told: list[tuple[Any, Any]] = []

    def remember(key: Any, config: Any) -> ShortWay:
        told.append((key, config))
        return ShortWay(library, told.clear)

    safe = op.OPERATOR.safe_route
    return dataclasses.replace(safe, remember=remember), told


def test_what_is_remembered(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each problem once, by the config that served it; nothing while a route is forced or a device
    overridden; everything anew when there are too many."""
    route, told = remembering_route(library)
    operator = dataclasses.replace(op.OPERATOR, routes=(route,))
    monkeypatch.setattr(op, "OPERATOR", operator)
    monkeypatch.setattr(dispatch, "_MEMO_LIMIT", 2)
    library.answer = False  # as of sizes that it does not remember
    sizes: dict[str, Any] = {"num_q_heads": 1, "num_v_heads": 2, "head_size": 16}
    cases = [make_inputs(Case("b", size, **sizes)) for size in (1, 2, 3)]
    with dispatch.force_route(operator, route.name):
        gdn_decode(**cases[0]._asdict())
    with override_device("cpu"):
        gdn_decode(**cases[0]._asdict())
    assert not told
    dispatch.reload_tables()
    for _ in range(2):
        for each in cases[:2]:
            gdn_decode(**each._asdict())
    assert [key.axis("batch_size") for key, _ in told] == [1, 2]
    assert all(config == route.default_config for _, config in told)
    gdn_decode(**cases[2]._asdict())
    assert [key.axis("batch_size") for key, _ in told] == [3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inplace": 1}, "'inplace' is int, expected a bool"),
        ({"scale": True}, "'scale' is bool, expected a float"),
        ({"v": [1.0]}, "'v' is a list, expected a tensor"),
        ({"out": (None, None)}, "'output' is None, expected a tensor"),
        ({"out": (torch.empty(3, 1, 2, 16, dtype=torch.bfloat16), None)}, "'new_state' is None"),
        ({"out": iter(())}, "'out' is list_iterator|'out' is tuple_iterator"),
        ({"state": torch.zeros(1, 2, 16, 16).expand(10**9, -1, -1, -1)}, "'state' has shape"),
        ({"A_log": torch._neg_view(torch.zeros(2))}, "'A_log' is a lazy negation"),
        ({"dt_bias": torch.zeros(2, requires_grad=True)}, "'dt_bias' requires grad"),
        ({"state": torch.zeros(3, 2, 16, 16).to_sparse()}, "'state' has layout"),
    ],
)
def test_what_the_library_is_never_handed(
    library: Library, change: dict[str, Any], words: str
) -> None:
    inputs = inputs_of(library, "functional")
    with pytest.raises(ArgumentError, match=words):
        gdn_decode(**{**inputs._asdict(), **change})
    assert not library.calls


def test_out_as_a_list_gives_a_tuple(library: Library) -> None:
    inputs = inputs_of(library, "functional")
    out = [torch.empty_like(inputs.v), torch.empty(3, 2, 16, 16)]
    result = gdn_decode(**inputs._asdict(), out=out)  # type: ignore[arg-type]
    assert type(result) is tuple
    assert result[0] is out[0]
    assert not library.calls


def test_gradients_are_allowed_where_none_is_recorded(library: Library) -> None:
    inputs = inputs_of(library, "functional")
    inputs = inputs._replace(A_log=torch.nn.Parameter(inputs.A_log))
    with torch.no_grad():
        gdn_decode(**inputs._asdict())
    assert len(library.calls) == 1
