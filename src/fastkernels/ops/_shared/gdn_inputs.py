"""Draws that the inputs of decode and prefill share (`rows` are batch rows or tokens).

q and k are L2-normalised per head, v, a, b standard normal, `A_log = log U(0, 16)`, dt_bias such
that `softplus(dt_bias)` is log-uniform in 1e-3..1e-1, the state 0.1 * normal.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

PAD = 64  # elements between slots of a padded pool, as a server leaves them


def draw_heads(
    rng: torch.Generator,
    rows: int,
    num_q_heads: int,
    num_v_heads: int,
    head_size: int,
    fused: bool,
    keys: str = "unit",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k [rows, Hk, D] and v [rows, Hv, D]; `fused`: slices of one [rows, (2 Hk + Hv) D] tensor.

    keys: unit; parallel (one unit vector per head plus 1 % noise in every component); long (norm
    about 1.3); raw (standard normal: states grow by a factor near D / 2 a token, so keep sequences
    short).
    """
    q, k = (torch.randn(rows, num_q_heads, head_size, generator=rng) for _ in range(2))
    q = torch.nn.functional.normalize(q, dim=-1)
    if keys == "parallel":
        k = torch.nn.functional.normalize(k[:1], dim=-1) + 0.01 * k
    elif keys != "raw":
        k = torch.nn.functional.normalize(k, dim=-1) * {"unit": 1.0, "long": 1.3}[keys]
    q, k = q.bfloat16(), k.bfloat16()
    v = torch.randn(rows, num_v_heads, head_size, generator=rng).bfloat16()
    if not fused:
        return q, k, v
    sizes = [num_q_heads * head_size, num_q_heads * head_size, num_v_heads * head_size]
    projection = torch.cat([t.flatten(1) for t in (q, k, v)], dim=1)
    q, k, v = (part.unflatten(1, (-1, head_size)) for part in torch.split(projection, sizes, dim=1))
    return q, k, v


def draw_state(
    rng: torch.Generator,
    slots: int,
    num_v_heads: int,
    head_size: int,
    padded: bool,
    is_pool: bool = False,
) -> torch.Tensor:
    """[slots, Hv, V, K] float32; `padded`: with PAD unused elements (NaN) after every slot.

    Slot 0 of a pool is NaN: no row names it, and it is where a clamped padding index would lead.
    """
    shape = (slots, num_v_heads, head_size, head_size)
    state = 0.1 * torch.randn(shape, generator=rng)
    if is_pool:
        state[:1] = math.nan
    if not padded:
        return state
    size = num_v_heads * head_size * head_size
    buffer = torch.full((slots, size + PAD), math.nan)
    view = buffer[:, :size].unflatten(1, shape[1:])
    view.copy_(state)
    return view


def draw_gates(
    rng: torch.Generator, rows: int, num_v_heads: int, kind: str, fused: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A_log [Hv], a [rows, Hv], dt_bias [Hv], b [rows, Hv]; `fused`: a and b slices of one tensor.

    kind: contest; keep (g = 1); forget (g = 0); slow (g near 0.999); extreme (rows in turn g = 1,
    g = 0, beta = 0, beta = 1); parallel (g and beta near 1).
    """
    A_log = torch.log(16.0 * torch.rand(num_v_heads, generator=rng).clamp(min=1e-4))
    a = torch.randn(rows, num_v_heads, generator=rng)
    step = torch.exp(
        math.log(1e-3) + (math.log(1e-1) - math.log(1e-3)) * torch.rand(num_v_heads, generator=rng)
    )
    dt_bias = torch.log(torch.expm1(step))
    b = torch.randn(rows, num_v_heads, generator=rng)
    if kind == "keep":
        a = torch.full_like(a, -200.0)
    elif kind == "forget":
        A_log, a = torch.full_like(A_log, 20.0), torch.full_like(a, 100.0)
    elif kind == "slow":
        A_log, a = torch.full_like(A_log, math.log(0.02)), torch.full_like(a, -3.0)
    elif kind == "parallel":
        a, b = torch.full_like(a, -20.0), torch.full_like(b, 20.0)
    elif kind == "extreme":
        a[0::4], a[1::4] = -200.0, 200.0
        b[2::4], b[3::4] = -30.0, 30.0
    elif kind != "contest":
        raise ValueError(f"unknown gates {kind!r}")
    a, b = a.bfloat16(), b.bfloat16()
    if fused:
        both = torch.cat([a, b], dim=1)
        a, b = both[:, :num_v_heads], both[:, num_v_heads:]
    return A_log, a, dt_bias, b


_OUTSIDE = (-1, 10**6, -(2**31))


def pool_layout(
    mode: str, rows: int, dtype: str, padding: str = "some"
) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """`(read, write, slots)`, the indices columns of a block table (stride 4); None in other modes.

    Slots are read in reversed order, every third row (1, 4, ..) is padding, row 2 of every 4
    writes a slot of its own, row 3 of every 4 is not stored. padding: some; all (every row is
    padding). It is -1, or an index outside the pool, in turn.
    """
    if mode != "pool":
        return None, None, rows
    row = torch.arange(rows)
    outside = torch.tensor(_OUTSIDE)[row // 3 % len(_OUTSIDE)]
    read = torch.where((row % 3 == 1) | (padding == "all"), outside, rows - row)
    write = torch.where(row % 4 == 2, rows + 1 + row, read)
    write = torch.where(row % 4 == 3, outside, write)
    table = torch.full((rows, 4), 10**6, dtype=getattr(torch, dtype))
    table[:, 0], table[:, 2] = read, write
    return table[:, 0], table[:, 2], 2 * rows + 2


def split_tokens(rng: torch.Generator, total: int, parts: int, sigma: float = 1.9) -> list[int]:
    """`parts` lengths of together `total` tokens, log-normal with `sigma`, at least 1 each where
    `total` allows; the rest of the rounding goes to the longest."""
    if parts == 0:
        return []
    least = 1 if total >= parts else 0
    share = torch.exp(sigma * torch.randn(parts, generator=rng, dtype=torch.float64))
    lengths = ((total - least * parts) * share / share.sum()).long() + least
    lengths[lengths.argmax()] += total - lengths.sum()
    return [int(length) for length in lengths]


def between(rng: torch.Generator, values: list[int]) -> list[int]:
    """One integer drawn strictly between each two neighbours of sorted `values` that leave room."""
    return [
        int(torch.randint(low + 1, high, (), generator=rng))
        for low, high in pairwise(values)
        if high - low > 1
    ]
