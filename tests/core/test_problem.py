"""Metadata checks: every refusal names operator, argument, what was expected and what came."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastkernels.core.device import CPU
from fastkernels.core.outputs import overlaps, overlaps_itself
from fastkernels.core.problem import key_from_axes
from fastkernels.errors import ArgumentError
from tests.core.toy import SPEC, toy


def x(rows: int = 2, cols: int = 8, heads: int = 4) -> torch.Tensor:
    return torch.randn(rows, cols, heads)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": None}, "toy: 'x' is None, expected a tensor"),
        ({"x": [1.0]}, "toy: 'x' is a list, expected a tensor"),
        ({"x": x().double()}, "toy: 'x' is float64, expected float32; toys are float32"),
        ({"x": x()[0]}, "toy: 'x' has shape (8, 4), expected 3 axes (rows, cols, heads)"),
        ({"x": x(heads=65, cols=65)}, "toy: 'x' has heads=65, expected 1..64"),
        ({"x": x(heads=7)}, "toy: 'x' gives heads=7, expected heads other than 7"),
        (
            {"x": x(cols=4, heads=8).transpose(1, 2)},
            "toy: 'x' has strides (32, 1, 8), expected contiguous (heads)",
        ),
        ({"x": x().to_sparse()}, "toy: 'x' has layout torch.sparse_coo, expected torch.strided"),
        ({"x": x().requires_grad_()}, "toy: 'x' requires grad, expected no gradient"),
        (
            {"x": x(), "offsets": torch.arange(4)},
            "toy: 'offsets' has shape (4,), expected (rows_plus_one=3)",
        ),
        ({"x": x(), "offsets": torch.arange(3).float()}, "is float32, expected int64 or int32"),
        (
            {"x": x(), "offsets": torch.arange(3, device="meta")},
            "is on meta, expected cpu like 'x'",
        ),
        ({"x": x(), "factor": "2"}, "toy: 'factor' is str, expected a float or None"),
        ({"x": x(), "factor": True}, "toy: 'factor' is bool, expected a float or None"),
        ({"x": x(), "out": (x(),)}, "toy: 'out' is a tuple, expected one tensor (y)"),
        ({"x": x(), "out": x().half()}, "toy: 'y' is float16, expected float32"),
        (
            {"x": x(), "out": x(rows=3)},
            "toy: 'y' has shape (3, 8, 4), expected (rows=2, cols=8, heads=4)",
        ),
        ({"x": x(), "out": x(rows=1).expand(2, 8, 4)}, "expected every element at its own address"),
        ({"x": x(), "out": torch.empty(2, 8, 4, device="meta")}, "is on meta, expected cpu"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        toy(**arguments)
    assert message in str(caught.value)


def test_gradients_are_fine_where_none_is_recorded() -> None:
    leaf = x().requires_grad_()
    with torch.no_grad():
        assert torch.equal(toy(leaf), leaf)


def test_strided_inputs_are_honoured() -> None:
    wide = torch.randn(2, 8, 9)
    assert torch.equal(toy(wide[..., 2:6]), wide[..., 2:6])
    assert torch.equal(toy(wide[..., 2:6].transpose(0, 1)), wide[..., 2:6].transpose(0, 1))


def test_out_that_overlaps_is_refused() -> None:
    buffer = torch.randn(2, 8, 8)
    y = toy(buffer[..., :4], out=buffer[..., 4:])  # side by side in one buffer
    assert torch.equal(y, buffer[..., :4])
    with pytest.raises(ArgumentError, match="'y' overlaps 'x', expected memory of its own"):
        toy(buffer[..., :4], out=buffer[..., 3:7])
    with pytest.raises(ArgumentError, match="'y' overlaps 'x'"):
        toy(buffer[..., :4], out=buffer[..., :4])


sizes = st.integers(1, 4)
views = st.tuples(
    st.tuples(sizes, sizes), st.tuples(st.integers(1, 12), st.integers(1, 4)), st.integers(0, 20)
)


@given(views, views)
def test_overlap_is_never_missed(a: Any, b: Any) -> None:
    """Against the set of addresses: a real overlap is always found; a false alarm is only allowed
    where the byte ranges interleave."""
    buffer = torch.zeros(200)
    first, second = (buffer.as_strided(shape, stride, offset) for shape, stride, offset in (a, b))
    addresses = [
        {o + i * t[0] + j * t[1] for i in range(s[0]) for j in range(s[1])} for s, t, o in (a, b)
    ]
    if addresses[0] & addresses[1]:
        assert overlaps(first, second)
    if max(addresses[0]) < min(addresses[1]) or max(addresses[1]) < min(addresses[0]):
        assert not overlaps(first, second)
    if len(addresses[0]) < first.numel():
        assert overlaps_itself(first)


@pytest.mark.parametrize(
    ("axes", "mode", "message"),
    [
        ({"rows": 1}, None, "toy: axis 'cols' is missing"),
        ({"rows": 1, "cols": 4, "depth": 1}, None, "toy: axis 'depth' is unknown"),
        ({"rows": 1, "cols": 4.0}, None, "toy: axis 'cols' is 4.0, expected an integer"),
        ({"rows": -1, "cols": 4}, None, "toy: got rows=-1, expected >= 0"),
        ({"rows": 1, "cols": 4, "fixed": 3}, None, "toy: got fixed=3, expected 2"),
        ({"rows": 1, "cols": 4, "rows_plus_one": 3}, None, "axis 'rows_plus_one' is 3, expected 2"),
        ({"rows": 1, "cols": 5, "heads": 7}, None, "expected heads other than 7"),
        ({"rows": 1, "cols": 4}, "odd", "toy: mode 'odd' is unknown, expected one of plain, fancy"),
    ],
)
def test_keys_from_axes_are_checked(axes: dict[str, Any], mode: str | None, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        key_from_axes(SPEC, axes, CPU, mode)
    assert message in str(caught.value)


def test_keys_default_to_the_definition() -> None:
    key = key_from_axes(SPEC, {"rows": 1, "cols": 4, "fixed": 2, "rows_plus_one": 2}, CPU)
    assert key.axes == (("rows", 1), ("cols", 4), ("heads", 4))
    assert key.mode == "plain"


def test_the_digest_follows_meaning_not_prose() -> None:
    from dataclasses import replace

    prose = replace(SPEC.axes[0], doc="other words", hint="other advice")
    assert replace(SPEC, axes=(prose, *SPEC.axes[1:])).digest == SPEC.digest
    meaning = replace(SPEC.axes[2], at_most=65)
    assert replace(SPEC, axes=(*SPEC.axes[:2], meaning, *SPEC.axes[3:])).digest != SPEC.digest
    assert replace(SPEC, revision=2).digest != SPEC.digest


def test_strides_of_axes_of_one_element_do_not_matter() -> None:
    wide = torch.randn(2, 1, 9, 4)
    odd = wide.as_strided((2, 8, 1), (36, 4, 77))
    assert torch.equal(toy(odd), odd)


def test_outputs_and_workspace_must_not_meet() -> None:
    """Two outputs in one memory, and a workspace that reaches into the second output."""
    import dataclasses

    from fastkernels.core.outputs import check_workspace, prepare_outputs
    from fastkernels.core.spec import TensorSpec
    from tests.core.toy import Inputs

    two = dataclasses.replace(
        SPEC, outputs=(*SPEC.outputs, TensorSpec("z", ("rows", "cols", "heads"), ("float32",)))
    )
    axes = {"rows": 2, "cols": 8, "heads": 4}
    inputs, cpu = Inputs(x()), torch.device("cpu")
    memory = torch.zeros(512)
    memory = memory[(-memory.data_ptr() % 256) // 4 :]
    y, z, shifted = (memory[o : o + 64].view(2, 8, 4) for o in (0, 64, 32))
    assert prepare_outputs(two, inputs, axes, cpu, (y, z)) == (y, z)
    with pytest.raises(ArgumentError, match="'z' overlaps 'y'"):
        prepare_outputs(two, inputs, axes, cpu, (y, shifted))
    scratch = memory[64:128].view(torch.uint8)
    with pytest.raises(ArgumentError, match="'workspace' overlaps 'z'"):
        check_workspace(two, inputs, scratch, (y, z), cpu)
    with pytest.raises(ArgumentError, match="'workspace' is on meta, expected cpu"):
        check_workspace(two, inputs, torch.empty(8, dtype=torch.uint8, device="meta"), (y, z), cpu)


def test_traits_are_part_of_the_key() -> None:
    from fastkernels.core.problem import problem_key

    axes = {"rows": 2, "cols": 8, "heads": 4}
    cpu = torch.device("cpu")
    plain, special = (problem_key(SPEC, axes, cpu, None, traits) for traits in ((), ("special",)))
    assert plain != special
    assert special.traits == ("special",)


def test_the_digest_knows_layouts_and_derived_axes() -> None:
    from dataclasses import replace

    from fastkernels.core.spec import Derived

    dense = replace(SPEC.outputs[0], dense=2)
    assert replace(SPEC, outputs=(dense,)).digest != SPEC.digest
    moved = replace(SPEC.axes[4], derived=Derived("rows", add=2))
    assert replace(SPEC, axes=(*SPEC.axes[:4], moved)).digest != SPEC.digest


def test_derived_axes_invert_where_they_can() -> None:
    from fastkernels.core.spec import Derived

    assert Derived("n", add=1).base(5) == 4
    assert Derived("n", add=1).base(0) == 0  # too short: the shape check then says so
    assert Derived("n", mul=2).base(4) is None
