"""The gated delta rule's parts that decode and prefill share: gates, forms of the state, its pool.

`log_g = -exp(A_log) * softplus(a + dt_bias)`, `beta = sigmoid(b)`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fastkernels import envs
from fastkernels.core.outputs import (
    check_no_overlap,
    check_workspace,
    overlaps_itself,
    prepare_outputs,
)
from fastkernels.core.problem import Problem, check_inputs, input_device, problem_key
from fastkernels.core.spec import OpSpec, TensorSpec
from fastkernels.errors import ArgumentError

MODES = ("functional", "inplace", "pool")
UPDATE_OPTIONS = ("read_indices", "write_indices", "inplace")

MIXED_INDICES = "mixed_indices"
"""Trait of a call in pool form whose index tensors differ in dtype."""

POOL_STATE = ("num_slots", "num_v_heads", "head_size", "head_size")
STATE_HINT = (
    "the state is float32 [.., V, K] with K contiguous; bfloat16 states are not supported yet"
)


def pool_options(rows: str) -> tuple[TensorSpec, ...]:
    """The index arguments of the pool form, one entry per `rows` (batch_size or num_seqs)."""
    dtypes = ("int32", "int64")
    return (
        TensorSpec("read_indices", (rows,), dtypes, True, 0, "slot each row reads; -1 is padding"),
        TensorSpec("write_indices", (rows,), dtypes, True, 0, "slot each row writes; -1 is none"),
    )


def gates(
    A_log: torch.Tensor, a: torch.Tensor, dt_bias: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(log_g, beta)` in float64, shaped like `a`. `inf * 0` counts as 0, so g is 1 there."""
    rate = A_log.double().exp()
    step = torch.nn.functional.softplus(a.double() + dt_bias.double())
    log_g = torch.where((rate == 0) | (step == 0), 0.0, -rate * step)
    return log_g, torch.sigmoid(b.double())


def resolve_scale(scale: float | None, head_size: int) -> float:
    """None and 0.0 both mean the default, as in the definition."""
    return float(scale) if scale else head_size**-0.5


# ---- forms of the state -------------------------------------------------------------------------


class Form(NamedTuple):
    """How a call holds its state."""

    mode: str
    updates_state: bool


def state_form(spec: OpSpec, inputs: Any) -> Form:
    """The form of a call, and whether it overwrites `state`; refuses contradictory arguments."""
    if inputs.read_indices is not None:
        mode = "pool"
    elif inputs.write_indices is not None:
        raise ArgumentError(
            f"{spec.name}: 'read_indices' is None, expected a tensor beside 'write_indices'"
        )
    else:
        mode = "inplace" if inputs.inplace is True else "functional"
    if mode != "functional" and inputs.state is None:
        raise ArgumentError(f"{spec.name}: 'state' is None, expected a tensor in {mode} form")
    return Form(mode, mode != "functional")


def bind_call(spec: OpSpec, inputs: Any, out: Any, workspace: Any) -> Problem:
    """Check a call and prepare its outputs. In pool and in-place form the second output of the
    problem is `state` itself."""
    form = state_form(spec, inputs)
    axes = check_inputs(spec, inputs, {"state": POOL_STATE} if form.mode == "pool" else None)
    device = input_device(inputs, spec)
    if form.updates_state:
        check_updated_state(spec, inputs)
        (output,) = prepare_outputs(spec, inputs, axes, device, out, spec.outputs[:1])
        outputs: tuple[torch.Tensor, ...] = (output, inputs.state)
    else:
        outputs = prepare_outputs(spec, inputs, axes, device, out)
    check_workspace(spec, inputs, workspace, outputs, device)
    if envs.check_values() and form.mode == "pool":
        check_slots(spec.name, inputs)
    traits = () if _widths_agree(inputs) else (MIXED_INDICES,)
    return Problem(problem_key(spec, axes, device, form.mode, traits), inputs, outputs, workspace)


def _widths_agree(inputs: Any) -> bool:
    read, write = inputs.read_indices, inputs.write_indices
    return write is None or read.dtype == write.dtype


def check_updated_state(spec: OpSpec, inputs: Any) -> None:
    """A state that is written must not share memory with itself or with another argument."""
    if overlaps_itself(inputs.state):
        raise ArgumentError(
            f"{spec.name}: 'state' has strides {tuple(inputs.state.stride())}, expected every "
            "element at its own address since it is updated"
        )
    check_no_overlap(spec, inputs._replace(state=None), (inputs.state,), ("state",))


def check_slots(op: str, inputs: Any) -> None:
    """Value checks of the pool form (FASTKERNELS_CHECK=values); synchronises."""
    slots = inputs.state.shape[0]
    legal = f"-1 or 0..{slots - 1}" if slots else "-1 (the pool has no slots)"
    write = inputs.read_indices if inputs.write_indices is None else inputs.write_indices
    for name, indices in (("read_indices", inputs.read_indices), ("write_indices", write)):
        wrong = ((indices < -1) | (indices >= slots)).nonzero()
        if wrong.numel():
            row = int(wrong[0])
            raise ArgumentError(f"{op}: {name!r}[{row}] is {int(indices[row])}, expected {legal}")
    writer: dict[int, int] = {}
    for row, (source, target) in enumerate(
        zip(inputs.read_indices.tolist(), write.tolist(), strict=True)
    ):
        if source < 0 or target < 0:
            continue
        if target in writer:
            raise ArgumentError(
                f"{op}: 'write_indices'[{row}] is {target}, expected a slot that no other row "
                f"writes (row {writer[target]} does)"
            )
        writer[target] = row
    for row, source in enumerate(inputs.read_indices.tolist()):
        if source >= 0 and writer.get(source, row) != row:
            raise ArgumentError(
                f"{op}: 'read_indices'[{row}] is {source}, expected a slot that no other row "
                f"writes (row {writer[source]} does)"
            )


# ---- pool access of the torch routes ------------------------------------------------------------


def load_rows(pool: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`(rows, valid)`: copies of the slots that `indices` name. Where an index is outside the pool,
    `valid` is False and the row is any slot's: neither read nor store it."""
    slots = pool.shape[0]
    valid = (indices >= 0) & (indices < slots)
    if slots == 0:
        return pool.new_zeros((indices.shape[0], *pool.shape[1:])), valid
    return pool.index_select(0, torch.where(valid, indices, 0)), valid


def store_rows(
    pool: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor
) -> None:
    """Write `rows` to the slots named by `indices`, skipping rows that are not valid or outside.

    Without a synchronisation a skipped row cannot be dropped from the index list, so it repeats the
    write of a row that is stored; if none is, slot 0 is rewritten with its own contents.
    """
    slots = pool.shape[0]
    if slots == 0 or indices.shape[0] == 0:
        return
    stored = valid & (indices >= 0) & (indices < slots)
    if pool.device.type == "cpu":
        pool[indices[stored].long()] = rows[stored]
        return
    donor = stored.to(torch.int8).argmax().view(1)
    source = torch.where(stored, torch.arange(indices.shape[0], device=pool.device), donor)
    target = torch.where(stored.any(), indices.index_select(0, source), 0)
    values = torch.where(stored.any(), rows.index_select(0, source), pool[:1])
    pool.index_copy_(0, target.long(), values)
