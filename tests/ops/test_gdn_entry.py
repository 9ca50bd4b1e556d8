"""The library's own checks against Python's, on host tensors: plans -1 and -2 launch nothing.

Whatever the library takes, Python takes: else a call whose sizes were served before would skip a
check. What Python takes and the library does not goes the long way, which is only slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkernels.core import extension
from fastkernels.testing.compare import clone
from tests.ops.gdn_calls import DECODE, MODES, OUTPUTS, PREFILL, Calls

pytestmark = pytest.mark.toolchain

Entry = Callable[..., bool]
NAMES = {calls.name: (*calls.tensors, *OUTPUTS) for calls in (DECODE, PREFILL)}
INPUTS = {(calls.name, m): calls.inputs(m) for calls in (DECODE, PREFILL) for m in MODES}


@pytest.fixture(scope="module", params=[DECODE, PREFILL], ids=lambda calls: calls.name)
def calls(request: pytest.FixtureRequest) -> Calls:
    found: Calls = request.param
    return found


@pytest.fixture(scope="module")
def entry(calls: Calls) -> Entry:
    state = extension.state()
    assert state.status == "ok", state.found
    found: Entry = extension.function(calls.name)
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["contiguous", "fused"])
@pytest.mark.parametrize("indices", ["int32", "int64"])
def test_plain_calls_take_the_short_way(
    calls: Calls, entry: Entry, mode: str, layout: str, indices: str
) -> None:
    inputs = calls.inputs(mode, layout=layout, indices=indices)
    assert calls.library_takes(entry, inputs, *calls.outputs(inputs))


def test_no_state_and_no_rows_take_the_short_way(calls: Calls, entry: Entry) -> None:
    inputs = calls.inputs()
    assert calls.library_takes(entry, inputs._replace(state=None), *calls.outputs(inputs))
    empty = calls.inputs(**calls.none)
    assert calls.library_takes(entry, empty, *calls.outputs(empty))


@pytest.mark.parametrize("offsets", ["int32", "int64"])
@pytest.mark.parametrize("mode", MODES)
def test_offsets_of_both_widths_and_stray_tokens_take_the_short_way(
    mode: str, offsets: str
) -> None:
    function = extension.function("gdn_prefill")
    inputs = PREFILL.inputs(mode, offsets=offsets, stray=2)
    assert PREFILL.library_takes(function, inputs, *PREFILL.outputs(inputs))


CHANGES: dict[str, Any] = {
    "dtype": lambda t: t.to(torch.float16),
    "double": lambda t: t.double(),
    "integer": lambda t: t.to(torch.int16),
    "longer": lambda t: torch.cat((t, t[:1])),
    "shorter": lambda t: t[:-1],
    "no rows": lambda t: t[:0],
    "one more axis": lambda t: t[None],
    "one axis less": lambda t: t[0],
    "reversed axes": lambda t: t.movedim(0, -1) if t.dim() > 1 else t,
    "last axes swapped": lambda t: t.mT if t.dim() > 1 else t,
    "gaps between elements": lambda t: torch.stack((t, t), -1)[..., 0],
    "expanded": lambda t: t[:1].expand(t.shape),
    "meta": lambda t: t.to("meta"),
    "none": lambda t: None,
    "list": lambda t: t.tolist(),
    "gaps between rows": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]],
    "narrow": lambda t: t[..., :-1],
    "shifted": lambda t: torch.cat((t.reshape(-1)[:1], t.reshape(-1)))[1:].view(t.shape),
    "wider index": lambda t: t.long(),
    "narrower index": lambda t: t.int(),
    "double rows": lambda t: torch.stack((t, t), 1)[:, 0],
}


def mixes_widths(inputs: Any) -> bool:
    """Served by the torch route."""
    read, write = inputs.read_indices, inputs.write_indices
    return read is not None and write is not None and read.dtype != write.dtype


def assert_agreement(calls: Calls, entry: Entry, mode: str, changes: list[tuple[str, str]]) -> None:
    inputs = clone(INPUTS[calls.name, mode])
    outputs: dict[str, Any] = dict(zip(OUTPUTS, calls.outputs(inputs), strict=True))
    for name, change in changes:
        value = outputs[name] if name in outputs else getattr(inputs, name)
        if not isinstance(value, torch.Tensor):
            continue
        try:
            changed = CHANGES[change](value)
        except (RuntimeError, IndexError):
            continue
        if name not in outputs:
            inputs = inputs._replace(**{name: changed})
        elif changed is not None:
            outputs[name] = changed
    arguments = (inputs, outputs["output"], outputs["new_state"])
    if calls.library_takes(entry, *arguments):
        assert calls.python_takes(*arguments), changes
    elif calls.python_takes(*arguments) and not mixes_widths(inputs):
        # What is legal and not plainly so: Python has looked, and the library may not refuse.
        assert calls.library_takes(entry, *arguments, is_checked=True), changes


@pytest.mark.parametrize("change", CHANGES)
def test_one_change_to_any_argument(calls: Calls, entry: Entry, change: str) -> None:
    for name in NAMES[calls.name]:
        for mode in MODES:
            assert_agreement(calls, entry, mode, [(name, change)])


@settings(max_examples=400, deadline=None)
@given(
    mode=st.sampled_from(MODES),
    changes=st.lists(
        st.tuples(st.sampled_from(NAMES["gdn_prefill"]), st.sampled_from([*CHANGES])),
        min_size=2,
        max_size=2,
    ),
)
def test_two_changes(calls: Calls, entry: Entry, mode: str, changes: list[tuple[str, str]]) -> None:
    own = [(name, change) for name, change in changes if name in NAMES[calls.name]]
    assert_agreement(calls, entry, mode, own)


@settings(max_examples=200, deadline=None)
@given(
    mode=st.sampled_from(MODES),
    name=st.sampled_from(NAMES["gdn_prefill"]),
    target=st.sampled_from(OUTPUTS),
    shift=st.integers(-2, 2),
)
def test_memory_that_is_shared(
    calls: Calls, entry: Entry, mode: str, name: str, target: str, shift: int
) -> None:
    """An output in an argument's memory, whole or in part."""
    inputs = clone(INPUTS[calls.name, mode])
    output, new_state = calls.outputs(inputs)
    own = {"output": output, "new_state": inputs.state if new_state is None else new_state}
    goal, other = own[target], own.get(name, getattr(inputs, name, None))
    if other is None or other is goal:
        return
    room = torch.zeros(goal.numel() * goal.element_size() + 256, dtype=torch.uint8)
    aliased = room[128:-128].view(goal.dtype).view(goal.shape)
    start = 128 + 16 * shift
    size = other.numel() * other.element_size()
    if start + size > room.numel() or start + size <= 128:
        return
    moved = room[start : start + size].view(other.dtype).view(other.shape)
    if name in own:
        own[name] = moved
    else:
        inputs = inputs._replace(**{name: moved})
    own[target] = aliased
    if new_state is None:
        inputs = inputs._replace(state=own["new_state"])
    arguments = (inputs, own["output"], None if new_state is None else own["new_state"])
    assert not calls.library_takes(entry, *arguments)
    assert not calls.python_takes(*arguments)


def test_a_state_that_overlaps_itself_is_not_updated(calls: Calls, entry: Entry) -> None:
    inputs = INPUTS[calls.name, "inplace"]
    folded = inputs._replace(state=inputs.state.as_strided(inputs.state.shape, (0, 16384, 128, 1)))
    output = torch.empty_like(inputs.v)
    assert not calls.library_takes(entry, folded, output, None)
    assert not calls.python_takes(folded, output, None)


def test_python_has_the_last_word_on_shared_memory(calls: Calls, entry: Entry) -> None:
    """Rows of one buffer side by side share bytes of a range, and no element."""
    inputs = INPUTS[calls.name, "functional"]
    room = torch.zeros(*inputs.v.shape[:-1], 256, dtype=torch.bfloat16)
    inputs = inputs._replace(v=room[..., :128])
    output, new_state = room[..., 128:], torch.empty(inputs.state.shape)
    assert calls.python_takes(inputs, output, new_state)
    assert not calls.library_takes(entry, inputs, output, new_state)
    assert calls.library_takes(entry, inputs, output, new_state, is_checked=True)


@pytest.mark.parametrize("name", ["q", "k", "v", "a", "b", "state", "output", "new_state"])
def test_empty_tensors_may_have_any_strides(calls: Calls, entry: Entry, name: str) -> None:
    empty = calls.inputs(**calls.none)
    outputs: dict[str, Any] = dict(zip(OUTPUTS, calls.outputs(empty), strict=True))
    tensor = outputs[name] if name in outputs else getattr(empty, name)
    wide = torch.empty(0, *tensor.shape[1:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[..., ::2]
    if name in outputs:
        outputs[name] = wide
    else:
        empty = empty._replace(**{name: wide})
    arguments = (empty, outputs["output"], outputs["new_state"])
    assert calls.python_takes(*arguments)
    assert calls.library_takes(entry, *arguments, is_checked=True)
