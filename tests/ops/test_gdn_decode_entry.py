"""The library's own checks against Python's, on host tensors: plans -1 and -2 launch nothing.

Whatever the library takes, Python takes: else a call whose sizes were served before would skip a
check. What Python takes and the library does not goes the long way, which is only slower.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkernels import ArgumentError
from fastkernels.core import extension
from fastkernels.ops.gdn_decode.inputs import Case, make_inputs
from fastkernels.ops.gdn_decode.problem import Inputs, bind
from fastkernels.testing.compare import clone

pytestmark = pytest.mark.toolchain

MODES = ("functional", "inplace", "pool")
TENSORS = ("q", "k", "v", "state", "A_log", "a", "dt_bias", "b", "read_indices", "write_indices")
INPUTS = {
    mode: make_inputs(Case("small", 3, num_q_heads=1, num_v_heads=2, mode=mode, seed=1))
    for mode in MODES
}


@pytest.fixture(scope="module")
def entry() -> Any:
    state = extension.state()
    assert state.status == "ok", state.found
    return extension.function("gdn_decode")


def outputs_of(inputs: Inputs, mode: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    output = torch.empty(inputs.v.shape, dtype=torch.bfloat16)
    return output, torch.empty(3, 2, 128, 128) if mode == "functional" else None


def library_takes(
    entry: Any, inputs: Inputs, output: Any, new_state: Any, is_checked: bool = False
) -> bool:
    try:
        return bool(
            entry(
                -2 if is_checked else -1,
                *inputs[:8], inputs.scale or 0.0, *inputs[9:11], output, new_state,
            )
        )  # fmt: skip
    except Exception:  # as `op._enter`
        return False


def python_takes(inputs: Inputs, output: Any, new_state: Any) -> bool:
    try:
        bind(inputs, output if new_state is None else (output, new_state), None)
    except ArgumentError:
        return False
    return True


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["contiguous", "fused"])
@pytest.mark.parametrize("indices", ["int32", "int64"])
def test_plain_calls_take_the_short_way(entry: Any, mode: str, layout: str, indices: str) -> None:
    case = Case("c", 3, num_q_heads=1, num_v_heads=2, mode=mode, layout=layout, indices=indices)
    inputs = make_inputs(case)
    assert library_takes(entry, inputs, *outputs_of(inputs, mode))


def test_no_state_and_no_rows_take_the_short_way(entry: Any) -> None:
    none = INPUTS["functional"]._replace(state=None)
    assert library_takes(entry, none, *outputs_of(none, "functional"))
    case = Case("empty", 0, num_q_heads=1, num_v_heads=2)
    empty = make_inputs(case)
    assert library_takes(entry, empty, torch.empty_like(empty.v), torch.empty_like(empty.v).float()
                         .new_empty(0, 2, 128, 128))  # fmt: skip


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
    "double rows": lambda t: torch.stack((t, t), 1)[:, 0],
}


def mixes_widths(inputs: Inputs) -> bool:
    """Served by the torch route."""
    read, write = inputs.read_indices, inputs.write_indices
    return read is not None and write is not None and read.dtype != write.dtype


@settings(max_examples=400, deadline=None)
@given(
    mode=st.sampled_from(MODES),
    changes=st.lists(
        st.tuples(st.sampled_from((*TENSORS, "output", "new_state")), st.sampled_from([*CHANGES])),
        min_size=1,
        max_size=2,
    ),
)
def test_what_the_library_takes_python_takes(
    entry: Any, mode: str, changes: list[tuple[str, str]]
) -> None:
    inputs = clone(INPUTS[mode])
    output, new_state = outputs_of(inputs, mode)
    given_outputs = {"output": output, "new_state": new_state}
    for name, change in changes:
        value = given_outputs[name] if name in given_outputs else getattr(inputs, name)
        if not isinstance(value, torch.Tensor):
            continue
        try:
            changed = CHANGES[change](value)
        except (RuntimeError, IndexError):
            continue
        if name not in given_outputs:
            inputs = inputs._replace(**{name: changed})
        elif changed is not None:
            given_outputs[name] = changed
    arguments = (inputs, given_outputs["output"], given_outputs["new_state"])
    if library_takes(entry, *arguments):
        assert python_takes(*arguments), changes
    elif python_takes(*arguments) and not mixes_widths(inputs):
        # What is legal and not plainly so: Python has looked, and the library may not refuse.
        assert library_takes(entry, *arguments, is_checked=True), changes


@settings(max_examples=200, deadline=None)
@given(
    mode=st.sampled_from(MODES),
    name=st.sampled_from((*TENSORS, "output", "new_state")),
    target=st.sampled_from(("output", "new_state")),
    shift=st.integers(-2, 2),
)
def test_memory_that_is_shared(entry: Any, mode: str, name: str, target: str, shift: int) -> None:
    """An output in an argument's memory, whole or in part."""
    inputs = clone(INPUTS[mode])
    output, new_state = outputs_of(inputs, mode)
    updated = inputs.state if new_state is None else new_state
    assert updated is not None
    goal = output if target == "output" else updated
    own = {"output": output, "new_state": updated}
    other = own.get(name, getattr(inputs, name, None))
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
    assert not library_takes(entry, *arguments)
    assert not python_takes(*arguments)


def test_a_state_that_overlaps_itself_is_not_updated(entry: Any) -> None:
    inputs = INPUTS["inplace"]
    assert inputs.state is not None
    folded = inputs._replace(state=inputs.state.as_strided(inputs.state.shape, (0, 16384, 128, 1)))
    output = torch.empty_like(inputs.v)
    assert not library_takes(entry, folded, output, None)
    assert not python_takes(folded, output, None)


def test_python_has_the_last_word_on_shared_memory(entry: Any) -> None:
    """Rows of one buffer side by side share bytes of a range, and no element."""
    inputs = INPUTS["functional"]
    room = torch.zeros(3, 1, 2, 256, dtype=torch.bfloat16)
    inputs = inputs._replace(v=room[..., :128])
    output, new_state = room[..., 128:], torch.empty(3, 2, 128, 128)
    assert python_takes(inputs, output, new_state)
    assert not library_takes(entry, inputs, output, new_state)
    assert library_takes(entry, inputs, output, new_state, is_checked=True)


@pytest.mark.parametrize("name", ["q", "k", "v", "a", "b", "state", "output", "new_state"])
def test_empty_tensors_may_have_any_strides(entry: Any, name: str) -> None:
    empty = make_inputs(Case("empty", 0, num_q_heads=1, num_v_heads=2))
    outputs = {"output": torch.empty_like(empty.v), "new_state": torch.empty(0, 2, 128, 128)}
    tensor = outputs[name] if name in outputs else getattr(empty, name)
    wide = torch.empty(0, *tensor.shape[1:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[..., ::2]
    if name in outputs:
        outputs[name] = wide
    else:
        changed: dict[str, Any] = {name: wide}
        empty = empty._replace(**changed)
    assert python_takes(empty, outputs["output"], outputs["new_state"])
    assert library_takes(entry, empty, outputs["output"], outputs["new_state"], is_checked=True)
