"""The short way of a call into the library: with an entry that stands for it, and the library's own
checks against Python's on host tensors (plans -1 and -2 launch nothing). Both together on a GPU:
test_dsa_sparse_attention_gpu.py."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkernels import ArgumentError, LaunchError, dsa_sparse_attention
from fastkernels.core import dispatch, extension
from fastkernels.core.extension import LaunchFailed
from fastkernels.core.route import ShortWay
from fastkernels.ops.dsa_sparse_attention.inputs import Case, make_inputs
from fastkernels.ops.dsa_sparse_attention.problem import Inputs, bind
from fastkernels.ops.dsa_sparse_attention.routes.library import LSE_SCALE
from tests.ops.entry_changes import ANY_ARGUMENT

CASE = Case("small", 3, seed=1, num_qo_heads=2, num_pages=2, page_size=4, topk=8, valid=(8, 0, 3))
TENSORS = ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "sparse_indices")
OUTPUTS = ("output", "lse")


def outputs_of(inputs: Inputs) -> dict[str, Any]:
    return {
        "output": torch.empty(inputs.q_nope.shape, dtype=torch.bfloat16),
        "lse": torch.empty(inputs.q_nope.shape[:2]),
    }


# ---- what the caller hands over and gets back ---------------------------------------------------


class Library:
    """Takes every call, and keeps it by the names of its arguments."""

    names = (*TENSORS, "sm_scale", "lse_scale", *OUTPUTS, "workspace")

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
    dispatch._short_ways["dsa_sparse_attention"] = ShortWay(found, lambda: None)
    yield found
    dispatch.reload_tables()


def test_outputs_are_allocated_and_returned(library: Library) -> None:
    inputs = make_inputs(CASE)
    output, lse = dsa_sparse_attention(*inputs[:6])
    (call,) = library.calls
    assert call["output"] is output
    assert call["lse"] is lse
    assert (output.shape, output.dtype) == (inputs.q_nope.shape, torch.bfloat16)
    assert (lse.shape, lse.dtype) == (inputs.q_nope.shape[:2], torch.float32)
    assert output.is_contiguous()
    assert lse.is_contiguous()
    assert all(call[name] is getattr(inputs, name) for name in TENSORS)
    assert call["sm_scale"] == inputs.sm_scale
    assert call["lse_scale"] == 1.0
    assert call["workspace"] is None


def test_outputs_are_given(library: Library) -> None:
    inputs = make_inputs(CASE)
    out = tuple(outputs_of(inputs).values())
    result = dsa_sparse_attention(*inputs[:6], lse_base="e", out=out)
    (call,) = library.calls
    assert result[0] is call["output"] is out[0]
    assert result[1] is call["lse"] is out[1]
    assert call["lse_scale"] == math.log(2.0)


OTHERS: dict[str, dict[str, Any]] = {
    "workspace": {"workspace": torch.empty(0, dtype=torch.uint8)},
    "out is a list": {"out": [None, None]},
    "one output": {"out": (None,)},
    "scale of one element": {"sm_scale": torch.tensor(0.1)},
    "boolean scale": {"sm_scale": True},
    "unknown base": {"lse_base": 10},
    "base as a number of another kind": {"lse_base": 2.0},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS.keys())
def test_what_is_not_plain_goes_the_long_way(library: Library, options: dict[str, Any]) -> None:
    given = make_inputs(CASE)._asdict() | options
    with contextlib.suppress(ArgumentError):
        dsa_sparse_attention(**given)
    assert not library.calls


def test_gradients_go_the_long_way(library: Library) -> None:
    inputs = make_inputs(CASE)
    with pytest.raises(ArgumentError, match="requires grad"):
        dsa_sparse_attention(inputs.q_nope.requires_grad_(), *inputs[1:6])
    assert not library.calls


def test_a_negative_view_of_an_output_goes_the_long_way(library: Library) -> None:
    inputs = make_inputs(CASE)
    outputs = outputs_of(inputs)
    lse = torch._neg_view(outputs["lse"])
    with contextlib.suppress(ArgumentError):
        dsa_sparse_attention(*inputs[:6], out=(outputs["output"], lse))
    assert not library.calls


def test_refused_calls_go_the_long_way(library: Library) -> None:
    inputs = make_inputs(CASE)
    expected = dsa_sparse_attention(*inputs[:6], workspace=torch.empty(0, dtype=torch.uint8))
    for answer in (False, TypeError("not an argument of the entry")):
        library.answer = answer
        got = dsa_sparse_attention(*inputs[:6])
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert len(library.calls) == 2


def test_a_failed_launch_is_named(library: Library) -> None:
    library.answer = LaunchFailed("launch gave CUDA_ERROR_X")
    with pytest.raises(LaunchError, match=r"dsa_sparse_attention.*CUDA_ERROR_X"):
        dsa_sparse_attention(*make_inputs(CASE)[:6])


# ---- what the library takes ---------------------------------------------------------------------


def library_takes(inputs: Inputs, outputs: dict[str, Any], is_checked: bool = False) -> bool:
    entry = extension.function("dsa_sparse_attention")
    try:
        return bool(
            entry(
                -2 if is_checked else -1,
                *inputs[:6],
                LSE_SCALE[inputs.lse_base],
                *outputs.values(),
                None,
            )
        )
    except Exception:  # as `op._enter`
        return False


def python_takes(inputs: Inputs, outputs: dict[str, Any]) -> bool:
    try:
        bind(inputs, tuple(outputs.values()), None)
    except ArgumentError:
        return False
    return True


def is_served(inputs: Inputs) -> bool:
    """By the widths and counts of the compiled routes."""
    return inputs.q_nope.shape[-1] == 512 and inputs.q_pe.shape[-1] == 64


@pytest.mark.toolchain
@pytest.mark.parametrize("layout", ["contiguous", "packed", "padded"])
@pytest.mark.parametrize("fields", [{}, {"num_tokens": 0, "valid": ()}, {"page_size": 1}])
def test_plain_calls_take_the_short_way(layout: str, fields: dict[str, Any]) -> None:
    state = extension.state()
    assert state.status == "ok", state.found
    case = Case(**(vars(CASE) | {"layout": layout, "valid": (2, 0, 1)} | fields))
    inputs = make_inputs(case)
    assert library_takes(inputs, outputs_of(inputs))


CHANGES: dict[str, Any] = {
    **ANY_ARGUMENT,
    "dtype": lambda t: t.to(torch.float16),
    "wider index": lambda t: t.long(),
    "list": lambda t: t.tolist(),
}


def assert_agreement(changes: list[tuple[str, str]]) -> None:
    given: dict[str, Any] = make_inputs(CASE)._asdict()
    given |= outputs_of(make_inputs(CASE))
    for name, change in changes:
        value = given[name]
        if isinstance(value, torch.Tensor):
            try:
                changed = CHANGES[change](value)
            except (RuntimeError, IndexError):
                continue
            if changed is not None or name in TENSORS:
                given[name] = changed
    outputs = {name: given.pop(name) for name in OUTPUTS}
    inputs = Inputs(**given)
    if library_takes(inputs, outputs):
        assert python_takes(inputs, outputs), changes
    elif python_takes(inputs, outputs) and is_served(inputs):
        # What is legal and not plainly so: Python has looked, and the library may not refuse.
        assert library_takes(inputs, outputs, is_checked=True), changes


@pytest.mark.toolchain
@pytest.mark.parametrize("change", CHANGES)
def test_one_change_to_any_argument(change: str) -> None:
    for name in (*TENSORS, *OUTPUTS):
        assert_agreement([(name, change)])


@pytest.mark.toolchain
@settings(max_examples=300, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.sampled_from([*TENSORS, *OUTPUTS]), st.sampled_from([*CHANGES])),
        min_size=2,
        max_size=2,
    )
)
def test_two_changes(changes: list[tuple[str, str]]) -> None:
    assert_agreement(changes)


@pytest.mark.toolchain
def test_memory_that_is_shared_goes_the_long_way() -> None:
    inputs = make_inputs(CASE)
    outputs = outputs_of(inputs)
    assert library_takes(inputs, outputs)
    assert not library_takes(inputs, outputs | {"output": inputs.q_nope})
    both = torch.empty(3 * 2 * 512 + 12, dtype=torch.bfloat16)
    output = both[: 3 * 2 * 512].view(3, 2, 512)
    lse = both[-14:-2].view(torch.float32).view(3, 2)
    assert not library_takes(inputs, {"output": output, "lse": lse})
    once = torch.empty(1, 2, 512, dtype=torch.bfloat16).expand(3, 2, 512)
    assert not library_takes(inputs, outputs | {"output": once})


@pytest.mark.toolchain
def test_more_indices_than_kernels_list_go_the_long_way() -> None:
    inputs = make_inputs(Case("wide", 1, num_qo_heads=1, num_pages=33, topk=2049))
    assert not library_takes(inputs, outputs_of(inputs))
