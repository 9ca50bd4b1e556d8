"""What gdn_decode and gdn_prefill share: forms of the state, and results judged on the device.

A row is what an entry of the state serves: one token of gdn_decode, a sequence of gdn_prefill.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch

from fastkernels.core.spec import OpSpec, Tolerance
from fastkernels.ops._shared.compare import Error, official_limit

Inputs = TypeVar("Inputs")

# Query and value heads of Qwen3-Next at TP 1, 2 and 8; TP 4 is the definition itself.
OTHER_HEADS = ((16, 32), (8, 16), (2, 4))
# Fields of a case that shape contents or form rather than sizes.
_SHAPING = ("keys", "gates", "layout", "state", "offsets", "indices", "padding", "scale")


def shapes_contents(case: Any) -> bool:
    """Whether a case wants other contents than the contest's."""
    plain = type(case)
    return any(getattr(case, n) != getattr(plain, n) for n in _SHAPING if hasattr(plain, n))


def in_form(inputs: Inputs, mode: str, seed: int) -> Inputs:
    """Functional inputs as the same call in place, or on a pool: twice the slots, half of them in
    use, in random order; what lies in the others (NaN) must not be touched."""
    given: Any = inputs
    if mode == "functional":
        return inputs
    if mode == "inplace":
        return given._replace(inplace=True)  # type: ignore[no-any-return]
    num_rows = given.state.shape[0]
    order = torch.randperm(2 * num_rows, generator=torch.Generator().manual_seed(seed))
    read = order[:num_rows].to(given.state.device)
    pool = torch.full_like(given.state, float("nan")).repeat(2, 1, 1, 1)
    pool.index_copy_(0, read, given.state)
    return given._replace(state=pool, read_indices=read.int())  # type: ignore[no-any-return]


def updates(case: Any) -> bool:
    return bool(case.mode != "functional")


def live(inputs: Any) -> Any:
    """Inputs that a call may overwrite; the same ones where it does not."""
    if not inputs.inplace and inputs.read_indices is None:
        return inputs
    assert inputs.state is not None
    return inputs._replace(state=inputs.state.clone())


def restore(live: Any, inputs: Any) -> None:
    if live.state is not inputs.state:
        assert live.state is not None
        assert inputs.state is not None
        live.state.copy_(inputs.state)


def outputs(inputs: Any) -> tuple[torch.Tensor, ...]:
    output = torch.empty_like(inputs.v)
    if inputs.inplace or inputs.read_indices is not None:
        return (output,)
    assert inputs.state is not None
    return output, torch.empty_like(inputs.state)


# ---- results ------------------------------------------------------------------------------------


class Expected(NamedTuple):
    """float64 results of R rows, and what their errors are measured against."""

    spec: OpSpec
    output: torch.Tensor  # [T, Hv, V]
    row: torch.Tensor  # [T]: the row of each token, R where it has none
    state: torch.Tensor  # [R, Hv, V, K]
    output_kappa: torch.Tensor  # [R, Hv]: norms of the same rows from absolute values
    state_kappa: torch.Tensor  # [R, Hv]
    slots: torch.Tensor | None  # [R]: of a pool, where the rows' states lie
    before: torch.Tensor  # the state, packed or a pool, before the call
    kept: torch.Tensor  # bool over its first axis: what must keep its bits

    def judge(self, outputs: tuple[torch.Tensor, ...]) -> list[Error]:
        """By the spec's limits, as the oracle judges; only the worst row is not located."""
        output, state = self._own(outputs)
        kept = self.kept.nonzero()[:, 0]
        bits = [t.index_select(0, kept).view(torch.int32) for t in (outputs[1], self.before)]
        changed = (bits[0] != bits[1]).sum().double()
        # Read at once: each number of its own is a synchronisation.
        *found, count = torch.stack(
            [self._worst_output(output), self._worst_state(state), changed]
        ).tolist()
        errors = [
            Error(limit.output, limit.metric, value, limit.limit)
            for limit, value in zip(self.spec.tolerances, found, strict=True)
        ]
        return [*errors, Error("new_state", "changed elements", count, 0.0)]

    def judge_official(self, outputs: tuple[torch.Tensor, ...]) -> list[Error]:
        """By the contest's limits; of a pool, the rows' slots."""
        limits = self.spec.tolerances
        pairs = zip(limits, self._own(outputs), (self.output, self.state), strict=True)
        shares = torch.stack([_beyond(limit, got, want) for limit, got, want in pairs]).tolist()
        return [
            Error(limit.output, "official", share, official_limit(limit))
            for limit, share in zip(limits, shares, strict=True)
        ]

    def _own(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        output, state = outputs
        if self.slots is not None:
            state = state.index_select(0, self.slots)
        return output.reshape(self.output.shape), state

    def _worst_output(self, got: torch.Tensor) -> torch.Tensor:
        """Largest relative Frobenius error of a (row, head). Tokens of no row are rows that are 0:
        nothing but zeros passes."""
        want = self._per_row(self.output.square().sum(-1))
        error = self._per_row((got.double() - self.output).square().sum(-1))
        kappa = torch.nn.functional.pad(self.output_kappa, (0, 0, 0, 1))
        return _worst(error.sqrt(), torch.maximum(want.sqrt(), kappa))

    def _worst_state(self, got: torch.Tensor) -> torch.Tensor:
        error = (got.double() - self.state).flatten(2).norm(dim=-1)
        return _worst(error, torch.maximum(self.state.flatten(2).norm(dim=-1), self.state_kappa))

    def _per_row(self, values: torch.Tensor) -> torch.Tensor:
        """[R + 1, Hv]: sums over each row's tokens of values [T, Hv]."""
        total = values.new_zeros((self.state.shape[0] + 1, values.shape[1]))
        return total.index_add_(0, self.row, values)


def _worst(error: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Anything not finite is infinitely off."""
    error = (error / (norm + 1e-30)).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return error.max() if error.numel() else error.new_zeros(())


def _beyond(tolerance: Tolerance, got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """The share of elements beyond both official limits, as `_shared.compare.official` counts."""
    gap = (got.double() - want).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    beyond = (gap / (want.abs() + 1e-8) > tolerance.official_rel) | ~gap.isfinite()
    wrong = beyond & (gap > tolerance.official_abs)
    return wrong.double().mean() if wrong.numel() else gap.new_zeros(())


def pool_before(
    inputs: Any, unwritten: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """`(slots, before, kept)` of `Expected`; `unwritten`: bool, rows that keep their state."""
    if inputs.read_indices is None:
        return None, inputs.state, unwritten
    slots = inputs.read_indices.long()
    kept = torch.ones(inputs.state.shape[0], dtype=torch.bool, device=slots.device)
    kept[slots] = unwritten
    return slots, inputs.state, kept
