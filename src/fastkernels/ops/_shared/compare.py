"""How far an output is from the oracle: comparators by meaning, per row, so that one bad row cannot
hide among good ones. Limits come from the spec's tolerances."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fastkernels.core.spec import Tolerance


@dataclass(frozen=True)
class Error:
    """The worst row of one output against one limit; of a wrong one also what is needed to look at
    it, which a right one is spared: on a GPU every number that is read is a synchronisation."""

    output: str
    metric: str
    value: float
    limit: float
    at: tuple[int, ...] = ()
    got: str = ""
    want: str = ""

    @property
    def ok(self) -> bool:
        return self.value <= self.limit  # false for NaN

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "WRONG"
        text = f"{self.output}: {self.metric} {self.value:.3g} (limit {self.limit:.3g}) {verdict}"
        return text if self.ok else f"{text}; first at {self.at}: got {self.got}, want {self.want}"


def relative_rows(
    tolerance: Tolerance,
    got: torch.Tensor,
    want: torch.Tensor,
    kappa: torch.Tensor,
    row_dims: int,
    slack: torch.Tensor | None = None,
) -> Error:
    """Worst relative Frobenius error over rows; the last `row_dims` axes are one row.

    A row's error is taken against `max(norm(want), norm(kappa))`; `kappa` is the oracle's row
    computed from absolute values, so that cancellation to zero is not held against a kernel.
    `slack` (one value a row) is added to the limit, relative to the same norm. Non-finite values
    must match.
    """
    if got.shape != want.shape:
        return wrong_shape(tolerance, got, tuple(want.shape))
    got64, want64 = got.detach().to(want.device).double(), want.double()
    lead = want.shape[: want.dim() - row_dims]
    if want.numel() == 0:
        return Error(tolerance.output, tolerance.metric, 0.0, tolerance.limit)
    rows_got, rows_want = (
        rows.reshape(-1, *_tail(want, row_dims)).flatten(1) for rows in (got64, want64)
    )
    rows_kappa = kappa.double().reshape(rows_want.shape[0], -1)
    scale = torch.maximum(_finite_norm(rows_want), _finite_norm(rows_kappa)) + 1e-30
    allowed = None if slack is None else slack.double().reshape(-1)
    difference = rows_got - rows_want
    error = _relative(difference, scale, allowed)
    value = float(error.max())
    if value <= tolerance.limit:  # nearly always: whatever is not finite makes NaN or inf of it
        return Error(tolerance.output, tolerance.metric, value, tolerance.limit)
    same = (rows_got == rows_want) | (rows_got.isnan() & rows_want.isnan())
    difference = torch.where(same, 0.0, difference)
    error = _relative(difference, scale, allowed)
    error = torch.where(difference.isfinite().all(1), error, torch.inf)
    value = float(error.max())
    if value <= tolerance.limit:
        return Error(tolerance.output, tolerance.metric, value, tolerance.limit)
    worst = int(error.argmax())
    column = int(difference[worst].abs().nan_to_num(nan=torch.inf).argmax())
    at = _unravel(worst, lead) + _unravel(column, _tail(want, row_dims))
    return Error(
        tolerance.output,
        tolerance.metric,
        value,
        tolerance.limit,
        at,
        f"{float(rows_got[worst, column]):.6g}",
        f"{float(rows_want[worst, column]):.6g}",
    )


def _relative(
    difference: torch.Tensor, scale: torch.Tensor, slack: torch.Tensor | None
) -> torch.Tensor:
    """Norms of rows in units of `scale`, less `slack`."""
    error = torch.linalg.vector_norm(difference, dim=1) / scale
    return error if slack is None else (error - slack).clamp(min=0.0)


def wrong_shape(tolerance: Tolerance, got: torch.Tensor, want: tuple[int, ...]) -> Error:
    """Nothing can be compared; the shapes stand where values would."""
    return Error(
        tolerance.output,
        "shape",
        math.inf,
        tolerance.limit,
        got=str(tuple(got.shape)),
        want=str(want),
    )


def unchanged(output: str, got: torch.Tensor, want: torch.Tensor, rows: torch.Tensor) -> Error:
    """How many float32 elements differ in a bit from `want` in the first axis' `rows` (bool); none
    may. A shape that differs is for the other comparators to report."""
    if got.shape != want.shape:
        return Error(output, "changed elements", math.inf, 0.0)
    got, want = got.detach().to(want.device).float(), want.float()
    differ = got.view(torch.int32) != want.view(torch.int32)
    differ &= rows.reshape(-1, *(1 for _ in want.shape[1:]))
    if not differ.any():
        return Error(output, "changed elements", 0.0, 0.0)
    place = _unravel(int(differ.reshape(-1).to(torch.int8).argmax()), tuple(want.shape))
    return Error(
        output,
        "changed elements",
        float(differ.sum()),
        0.0,
        place,
        f"{float(got[place]):.6g}",
        f"{float(want[place]):.6g}",
    )


def absolute(
    tolerance: Tolerance, got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor
) -> Error:
    """Worst `abs(got - want) / allowed` over elements, against 1; non-finite values must match."""
    if got.shape != want.shape:
        return wrong_shape(tolerance, got, tuple(want.shape))
    if want.numel() == 0:
        return Error(tolerance.output, tolerance.metric, 0.0, 1.0)
    got64, want64 = got.detach().to(want.device).double(), want.double()
    same = (got64 == want64) | (got64.isnan() & want64.isnan())
    ratio = torch.where(same, 0.0, (got64 - want64).abs() / allowed.double())
    ratio = torch.where(ratio.isnan(), torch.inf, ratio).reshape(-1)
    value = float(ratio.max())
    if value <= 1.0:
        return Error(tolerance.output, tolerance.metric, value, 1.0)
    worst = int(ratio.argmax())
    return Error(
        tolerance.output,
        tolerance.metric,
        value,
        1.0,
        _unravel(worst, want.shape),
        f"{float(got64.reshape(-1)[worst]):.6g}",
        f"{float(want64.reshape(-1)[worst]):.6g}",
    )


def official(tolerance: Tolerance, got: torch.Tensor, want: torch.Tensor) -> Error:
    """The contest's rule, stricter where it is blind: the share of elements beyond both limits.

    An element counts as wrong, too, where only one side is finite or both are unequal infinities.
    """
    if got.shape != want.shape:
        return wrong_shape(tolerance, got, tuple(want.shape))
    limit = official_limit(tolerance)
    if want.numel() == 0:
        return Error(tolerance.output, "official", 0.0, limit)
    got64, want64 = got.detach().to(want.device).double(), want.double()
    same = (got64 == want64) | (got64.isnan() & want64.isnan())
    gap = torch.where(same, 0.0, (got64 - want64).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    relative = gap / (want64.abs() + 1e-8)
    wrong = (gap > tolerance.official_abs) & ((relative > tolerance.official_rel) | ~gap.isfinite())
    wrong = wrong.reshape(-1)
    share = float(wrong.double().mean())
    if share <= limit:
        return Error(tolerance.output, "official", share, limit)
    first = int(wrong.to(torch.int8).argmax())
    return Error(
        tolerance.output,
        "official",
        share,
        limit,
        _unravel(first, want.shape),
        f"{float(got64.reshape(-1)[first]):.6g}",
        f"{float(want64.reshape(-1)[first]):.6g}",
    )


def official_limit(tolerance: Tolerance) -> float:
    """The largest share of elements that may be beyond the limits: 1 - 0.9 in float is below 0.1,
    and a tenth may."""
    return round(1.0 - tolerance.official_share, 12)


def _tail(tensor: torch.Tensor, row_dims: int) -> tuple[int, ...]:
    return tuple(tensor.shape[tensor.dim() - row_dims :])


def _finite_norm(rows: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(rows.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0), dim=1)


def _unravel(index: int, shape: tuple[int, ...] | torch.Size) -> tuple[int, ...]:
    position: list[int] = []
    for size in reversed(shape):
        position.append(index % size)
        index //= size
    return tuple(reversed(position))
