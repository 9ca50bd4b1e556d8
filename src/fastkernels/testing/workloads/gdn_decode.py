"""gdn_decode: rows, inputs and float64 results on the device, bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from fastkernels.core import dispatch
from fastkernels.core.device import DeviceInfo
from fastkernels.core.route import Operator
from fastkernels.ops._shared.gdn import gates, resolve_scale
from fastkernels.ops.gdn_decode.inputs import CONTEST, SERVING, Case, gap_cases, make_inputs
from fastkernels.ops.gdn_decode.problem import Inputs
from fastkernels.ops.gdn_decode.reference import Expected as OracleExpected
from fastkernels.ops.gdn_decode.reference import reference
from fastkernels.ops.gdn_decode.spec import SPEC
from fastkernels.testing.workloads import gdn_forms
from fastkernels.testing.workloads.gdn_forms import (
    OTHER_HEADS,
    Expected,
    in_form,
    pool_before,
    shapes_contents,
)

# Both ends first: a table needs them, should the time run out in between.
OTHER_HEADS_BATCHES = (1, 1024, 16, 256, 4, 64)
# Beyond that a table's boundary is no batch size that anyone decodes with.
LARGEST_GAP_BATCH = 2048
# The oracle steps through (row, head) pairs in Python: about 2 s at this size.
ORACLE_BATCH = 128


def rows(
    operator: Operator, device: DeviceInfo, modes: Sequence[str]
) -> Iterator[tuple[str, Case]]:
    """Contest rows functional and in place; serving rows in pool form, too; then what lies around
    the boundaries of the device's table for the definition's heads."""
    table, _ = dispatch.find_table(operator, device)
    if table is not None:
        own_heads = tuple(regime for regime in table.regimes if not regime.constants)
        table = dataclasses.replace(table, regimes=own_heads)
    gap = [c for c in gap_cases(table) if 0 < c.batch_size <= LARGEST_GAP_BATCH]
    for listed, cases, own in (
        ("contest", CONTEST, ("functional", "inplace")),
        ("serving", SERVING, ("functional", "inplace", "pool")),
        ("gap", gap, ("functional", "inplace")),
    ):
        for mode in own:
            if mode in modes:
                yield from ((listed, dataclasses.replace(case, mode=mode)) for case in cases)


def sweep_rows(modes: Sequence[str]) -> Iterator[tuple[str, Case]]:
    """Every batch size of the lists at the definition's heads, then few at other head counts."""
    sizes = {case.batch_size: "serving" for case in SERVING}
    sizes |= {case.batch_size: "contest" for case in CONTEST}
    for mode in modes:
        for size in sorted(sizes):
            yield sizes[size], Case(f"b{size}", size, mode=mode)
    for num_q_heads, num_v_heads in OTHER_HEADS:
        for mode in modes:
            for size in OTHER_HEADS_BATCHES:
                name = f"b{size}-h{num_q_heads}x{num_v_heads}"
                yield (
                    "serving",
                    Case(name, size, num_q_heads=num_q_heads, num_v_heads=num_v_heads, mode=mode),
                )


def details(case: Case) -> dict[str, int]:
    return {}


# ---- inputs -------------------------------------------------------------------------------------

updates = gdn_forms.updates
live = gdn_forms.live
restore = gdn_forms.restore
outputs = gdn_forms.outputs


def own_inputs(case: Case, device: torch.device) -> Inputs:
    if shapes_contents(case):
        return make_inputs(case, device)
    inputs = make_inputs(dataclasses.replace(case, mode="functional"), device)
    return in_form(inputs, case.mode, case.seed)


def fresh_inputs(case: Case, seed: int, device: torch.device) -> Inputs:
    """As the contest draws them, on the device: other numbers than the CPU's from equal seeds.
    Cases that shape their contents are drawn on the CPU."""
    if shapes_contents(case):
        return make_inputs(dataclasses.replace(case, seed=seed), device)
    plain = dataclasses.replace(case, seed=seed, mode="functional")
    inputs = make_inputs(plain, device, drawn_on=device)
    return in_form(inputs, case.mode, seed)


# ---- results ------------------------------------------------------------------------------------


def expect(inputs: Inputs) -> Expected | OracleExpected:
    """On the inputs' device; by the oracle where there is no state, or where rows of a pool are
    padding or write elsewhere."""
    if inputs.state is None or inputs.write_indices is not None:
        return expect_by_oracle([inputs])[0]
    return expect_on_device(inputs)


def expect_by_oracle(many: Sequence[Inputs]) -> list[OracleExpected]:
    return [reference(inputs, inputs.q.device) for inputs in many]


def expect_on_device(inputs: Inputs) -> Expected:
    """`reference.py` batched; tests compare the two. Needs a state and no row that is padding."""
    assert inputs.state is not None
    group = inputs.v.shape[2] // inputs.q.shape[2]
    q, k = (t[:, 0].double().repeat_interleave(group, dim=1) for t in (inputs.q, inputs.k))
    v = inputs.v[:, 0].double()
    log_g, beta = gates(inputs.A_log, inputs.a[:, 0], inputs.dt_bias, inputs.b[:, 0])
    scale = resolve_scale(inputs.scale, inputs.q.shape[3])
    batch_size = q.shape[0]
    unwritten = torch.zeros(batch_size, dtype=torch.bool, device=q.device)
    slots, before, kept = pool_before(inputs, unwritten)
    S = (before if slots is None else before.index_select(0, slots)).double()
    S *= log_g.exp()[..., None, None]
    u = beta[..., None] * (v - _times(S, k))
    kappa = S.abs().addcmul_(u.abs()[..., None], k.abs()[..., None, :])
    S.addcmul_(u[..., None], k[..., None, :])
    output, output_kappa = scale * _times(S, q), abs(scale) * _times(kappa, q.abs())
    return Expected(
        SPEC,
        output,
        torch.arange(batch_size, device=q.device),
        S,
        output_kappa.norm(dim=-1),
        kappa.flatten(2).norm(dim=-1),
        slots,
        before,
        kept,
    )


def join(inputs: Sequence[Inputs]) -> Inputs:
    """A batch of all their rows, in which every row has an A_log and a dt_bias of its own."""
    first = inputs[0]
    rows, num_v_heads = first.v.shape[0], first.v.shape[2]
    joined: dict[str, torch.Tensor] = {
        name: torch.cat([getattr(each, name) for each in inputs])
        for name in ("q", "k", "v", "a", "b")
    }
    for name in ("A_log", "dt_bias"):
        joined[name] = torch.cat([getattr(each, name).expand(rows, num_v_heads) for each in inputs])
    if first.state is not None:
        joined["state"] = torch.cat([each.state for each in inputs if each.state is not None])
    for name in ("read_indices", "write_indices"):
        if getattr(first, name) is not None:
            joined[name] = _slots([getattr(each, name) for each in inputs], first.state)
    return first._replace(**joined)  # type: ignore[arg-type]


def _slots(indices: Sequence[torch.Tensor], pool: torch.Tensor | None) -> torch.Tensor:
    """Indices into pools of equal size, of those pools one after the other; -1 for padding."""
    assert pool is not None
    own, size = torch.stack([each.long() for each in indices]), pool.shape[0]
    begin = size * torch.arange(len(indices), device=own.device)[:, None]
    return torch.where((own >= 0) & (own < size), own + begin, -1).flatten()


def _times(matrices: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    return torch.matmul(matrices, vectors[..., None])[..., 0]


def oracle(case: Case) -> bool:
    return case.batch_size * case.num_v_heads <= ORACLE_BATCH * 8


# ---- bytes --------------------------------------------------------------------------------------


def moved_bytes(case: Case) -> int:
    """The state read and written, and the small tensors once."""
    B, Hk, Hv, D = case.batch_size, case.num_q_heads, case.num_v_heads, case.head_size
    state = 2 * 4 * B * Hv * D * D
    rows = 2 * B * (2 * Hk * D + 2 * Hv * D + 2 * Hv)  # q, k; v, output; a, b
    return state + rows + 2 * 4 * Hv


def held_bytes(case: Case, sets: int) -> int:
    """Device memory of `sets` input sets with outputs, float64 results, peers and floor, and of
    what judging needs for a while. An estimate from above."""
    state = 4 * case.batch_size * case.num_v_heads * case.head_size**2
    return state * (sets * (13 if case.mode == "pool" else 9) + 10)
