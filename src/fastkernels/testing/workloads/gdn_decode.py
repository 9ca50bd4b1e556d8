"""gdn_decode: rows, inputs and float64 results on the device, bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fastkernels.core import dispatch
from fastkernels.core.device import DeviceInfo
from fastkernels.core.route import Operator
from fastkernels.core.spec import Tolerance
from fastkernels.ops._shared.compare import Error
from fastkernels.ops._shared.gdn import gates, resolve_scale
from fastkernels.ops._shared.gdn_inputs import draw_gates, draw_heads, draw_state
from fastkernels.ops.gdn_decode.inputs import CONTEST, SERVING, Case, gap_cases, make_inputs
from fastkernels.ops.gdn_decode.problem import Inputs
from fastkernels.ops.gdn_decode.reference import Expected as OracleExpected
from fastkernels.ops.gdn_decode.reference import reference
from fastkernels.ops.gdn_decode.spec import SPEC

# Qwen3-Next at TP 1, 2 and 8; TP 4 is the definition itself.
OTHER_HEADS = ((16, 32), (8, 16), (2, 4))
# Both ends first: a table needs them, should the time run out in between.
OTHER_HEADS_BATCHES = (1, 1024, 16, 256, 4, 64)
# Beyond that a table's boundary is no batch size that anyone decodes with.
LARGEST_GAP_BATCH = 2048
# The oracle steps through (row, head) pairs in Python: about 2 s at this size.
ORACLE_BATCH = 128
# Fields of a case that shape contents or form rather than sizes.
_SHAPING = ("keys", "gates", "layout", "state", "indices", "padding", "scale")


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


# ---- inputs -------------------------------------------------------------------------------------


def own_inputs(case: Case, device: torch.device) -> Inputs:
    if _shapes_contents(case):
        return make_inputs(case, device)
    inputs = make_inputs(dataclasses.replace(case, mode="functional"), device)
    return _in_form(inputs, case.mode, case.seed)


def fresh_inputs(case: Case, seed: int, device: torch.device) -> Inputs:
    """As the contest draws them, on the device: other numbers than the CPU's from equal seeds.
    Cases that shape their contents are drawn on the CPU."""
    if _shapes_contents(case):
        return make_inputs(dataclasses.replace(case, seed=seed), device)
    B, Hk, Hv, D = case.batch_size, case.num_q_heads, case.num_v_heads, case.head_size
    rng = torch.Generator(device).manual_seed(seed)
    with torch.device(device):
        q, k, v = (t.unsqueeze(1) for t in draw_heads(rng, B, Hk, Hv, D, fused=False))
        state = draw_state(rng, B, Hv, D, padded=False)
        A_log, a, dt_bias, b = draw_gates(rng, B, Hv, "contest", fused=False)
    inputs = Inputs(q, k, v, state, A_log, a.unsqueeze(1), dt_bias, b.unsqueeze(1))
    return _in_form(inputs, case.mode, seed)


def _shapes_contents(case: Case) -> bool:
    plain = Case(case.name, case.batch_size)
    return any(getattr(case, name) != getattr(plain, name) for name in _SHAPING)


def _in_form(inputs: Inputs, mode: str, seed: int) -> Inputs:
    """The same call in place, or on a pool: 2 B slots, half of them in use, in random order; what
    lies in the others (NaN) must not be touched."""
    if mode == "functional":
        return inputs
    if mode == "inplace":
        return inputs._replace(inplace=True)
    assert inputs.state is not None
    batch_size = inputs.state.shape[0]
    order = torch.randperm(2 * batch_size, generator=torch.Generator().manual_seed(seed))
    read = order[:batch_size].to(inputs.state.device)
    pool = torch.full_like(inputs.state, float("nan")).repeat(2, 1, 1, 1)
    pool.index_copy_(0, read, inputs.state)
    return inputs._replace(state=pool, read_indices=read.int())


def updates(case: Case) -> bool:
    return case.mode != "functional"


def live(inputs: Inputs) -> Inputs:
    """Inputs that a call may overwrite; the same ones where it does not."""
    if not inputs.inplace and inputs.read_indices is None:
        return inputs
    assert inputs.state is not None
    return inputs._replace(state=inputs.state.clone())


def restore(live: Inputs, inputs: Inputs) -> None:
    if live.state is not inputs.state:
        assert live.state is not None
        assert inputs.state is not None
        live.state.copy_(inputs.state)


def outputs(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    output = torch.empty_like(inputs.v)
    if inputs.inplace or inputs.read_indices is not None:
        return (output,)
    assert inputs.state is not None
    return output, torch.empty_like(inputs.state)


# ---- results ------------------------------------------------------------------------------------


class Expected(NamedTuple):
    """float64 rows, the norms that their errors are measured against, and of a pool the slots of
    the rows and the bits before the call."""

    output: torch.Tensor  # [B, Hv, V]
    state: torch.Tensor  # [B, Hv, V, K]
    output_norm: torch.Tensor  # [B, Hv]
    state_norm: torch.Tensor  # [B, Hv]
    slots: torch.Tensor | None
    pool: torch.Tensor | None

    def judge(self, outputs: tuple[torch.Tensor, ...]) -> list[Error]:
        """By the spec's limits, as the oracle judges; only the worst row is not located."""
        output, state = outputs
        changed = 0
        if self.slots is not None and self.pool is not None:
            others = torch.ones(self.pool.shape[0], dtype=torch.bool, device=state.device)
            others[self.slots] = False
            bits = [tensor[others].view(torch.int32) for tensor in (state, self.pool)]
            changed = int((bits[0] != bits[1]).sum())
            state = state.index_select(0, self.slots)
        limits = SPEC.tolerances
        found = [
            (limits[0], _worst(output[:, 0], self.output, self.output_norm)),
            (limits[1], _worst(state, self.state, self.state_norm)),
        ]
        errors = [Error(limit.output, limit.metric, value, limit.limit) for limit, value in found]
        return [*errors, Error("new_state", "changed elements", float(changed), 0.0)]

    def judge_official(self, outputs: tuple[torch.Tensor, ...]) -> list[Error]:
        """By the contest's limits; of a pool, the rows' slots."""
        output, state = outputs
        if self.slots is not None:
            state = state.index_select(0, self.slots)
        return [
            _official(SPEC.tolerances[0], output[:, 0], self.output),
            _official(SPEC.tolerances[1], state, self.state),
        ]


def expect(inputs: Inputs) -> Expected | OracleExpected:
    """On the inputs' device; by the oracle where there is no state, or where rows of a pool are
    padding or write elsewhere."""
    if inputs.state is None or inputs.write_indices is not None:
        return reference(inputs)
    return expect_on_device(inputs)


def expect_on_device(inputs: Inputs) -> Expected:
    """`reference.py` batched; tests compare the two. Needs a state and no row that is padding."""
    assert inputs.state is not None
    group = inputs.v.shape[2] // inputs.q.shape[2]
    q, k = (t[:, 0].double().repeat_interleave(group, dim=1) for t in (inputs.q, inputs.k))
    v = inputs.v[:, 0].double()
    log_g, beta = gates(inputs.A_log, inputs.a[:, 0], inputs.dt_bias, inputs.b[:, 0])
    scale = resolve_scale(inputs.scale, inputs.q.shape[3])
    slots = None if inputs.read_indices is None else inputs.read_indices.long()
    before = inputs.state if slots is None else inputs.state.index_select(0, slots)
    S = before.double() * log_g.exp()[..., None, None]
    u = beta[..., None] * (v - _times(S, k))
    kappa = S.abs().addcmul_(u.abs()[..., None], k.abs()[..., None, :])
    S.addcmul_(u[..., None], k[..., None, :])
    output, output_kappa = scale * _times(S, q), abs(scale) * _times(kappa, q.abs())
    return Expected(
        output,
        S,
        torch.maximum(output.norm(dim=-1), output_kappa.norm(dim=-1)),
        torch.maximum(S.flatten(2).norm(dim=-1), kappa.flatten(2).norm(dim=-1)),
        slots,
        None if slots is None else inputs.state,
    )


def _times(matrices: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    return torch.matmul(matrices, vectors[..., None])[..., 0]


def _worst(got: torch.Tensor, want: torch.Tensor, norm: torch.Tensor) -> float:
    """Largest relative Frobenius error of a (row, head); anything not finite is infinitely off."""
    error = (got.double() - want).flatten(2).norm(dim=-1) / (norm + 1e-30)
    return float(error.nan_to_num(nan=torch.inf, posinf=torch.inf).max()) if error.numel() else 0.0


def _official(tolerance: Tolerance, got: torch.Tensor, want: torch.Tensor) -> Error:
    """The share of elements beyond both official limits, as `_shared.compare.official` counts."""
    gap = (got.double() - want).abs().nan_to_num(nan=torch.inf)
    beyond = (gap / (want.abs() + 1e-8) > tolerance.official_rel) | ~gap.isfinite()
    wrong = beyond & (gap > tolerance.official_abs)
    share = float(wrong.double().mean()) if wrong.numel() else 0.0
    return Error(tolerance.output, "official", share, 1.0 - tolerance.official_share)


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
