"""gdn_prefill: rows, inputs and float64 results on the device, bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from fastkernels.core import dispatch
from fastkernels.core.device import DeviceInfo
from fastkernels.core.route import Operator
from fastkernels.ops._shared.gdn import gates, resolve_scale
from fastkernels.ops.gdn_prefill.inputs import (
    CONTEST,
    SERVING,
    Case,
    gap_cases,
    make_inputs,
    split_case,
)
from fastkernels.ops.gdn_prefill.kernels import CHUNK
from fastkernels.ops.gdn_prefill.problem import Inputs
from fastkernels.ops.gdn_prefill.reference import Call, Run, Values, clean_offsets, reference
from fastkernels.ops.gdn_prefill.reference import Expected as OracleExpected
from fastkernels.ops.gdn_prefill.spec import SPEC
from fastkernels.testing.workloads import gdn_forms
from fastkernels.testing.workloads.gdn_forms import (
    OTHER_HEADS,
    Expected,
    in_form,
    pool_before,
    shapes_contents,
)

SKEWED = (
    Case("skewed-alone", (8000,), seed=1),
    Case("skewed", (6,) * 15 + (8000,) + (6,) * 15, seed=2),
)
"""A long sequence, and the same length among short ones."""

# Rows of the gap list: with two axes, a table has more boundaries than anyone has time for.
MOST_GAP_ROWS = 40
LARGEST_GAP = {"total_seq_len": 65536, "num_seqs": 1024}
# (tokens, sequences) of a sweep beyond the lists, up to where a table shall reach.
BEYOND = (
    (64, 16), (128, 64), (512, 16), (1024, 8), (1024, 256), (4096, 32), (4096, 1024), (8192, 1),
    (8192, 4), (8192, 8), (8192, 4096), (16384, 256), (65536, 256), (131072, 1), (131072, 64),
)  # fmt: skip
# Both ends first: a table needs them, should the time run out in between.
OTHER_SIZES = (
    (16, 1), (16384, 32), (64, 1), (64, 4), (256, 1), (256, 16), (1024, 2), (4096, 1), (4096, 8),
    (2048, 512), (16384, 1),
)  # fmt: skip
# The oracle takes 2 to 3 ms of a CPU for a token of 8 heads.
ORACLE_TOKENS = 512


def rows(
    operator: Operator, device: DeviceInfo, modes: Sequence[str]
) -> Iterator[tuple[str, Case]]:
    """Contest rows functional, serving rows in pool form, too; then the skewed pair, and what lies
    around the boundaries of the device's table for the definition's heads."""
    table, _ = dispatch.find_table(operator, device)
    if table is not None:
        own_heads = tuple(regime for regime in table.regimes if not regime.constants)
        table = dataclasses.replace(table, regimes=own_heads)
    gap = [
        case
        for case in gap_cases(table)
        if all(0 < case.axes[name] <= largest for name, largest in LARGEST_GAP.items())
    ]
    step = max(1, -(-len(gap) // MOST_GAP_ROWS))
    for listed, cases, own in (
        ("contest", CONTEST, ("functional",)),
        ("serving", SERVING, ("functional", "pool")),
        ("gap", (*SKEWED, *gap[::step]), ("functional",)),
    ):
        for mode in own:
            if mode in modes:
                yield from ((listed, dataclasses.replace(case, mode=mode)) for case in cases)


def sweep_rows(modes: Sequence[str]) -> Iterator[tuple[str, Case]]:
    """Every size of the lists once, functional and with the definition's heads; few sizes in other
    modes and with other heads."""
    own: dict[tuple[int, int], tuple[str, Case]] = {}
    for total, num_seqs in BEYOND:
        own[total, num_seqs] = "serving", _sized(total, num_seqs)
    for listed, cases in (("serving", SERVING), ("contest", CONTEST)):
        for case in cases:
            own[sum(case.lengths), len(case.lengths)] = listed, case
    if "functional" in modes:
        yield from (own[size] for size in sorted(own))
    for heads in (None, *OTHER_HEADS):
        for mode in modes:
            if heads is not None or mode != "functional":
                yield from (("serving", _sized(*size, heads, mode)) for size in OTHER_SIZES)


def _sized(
    total: int, num_seqs: int, heads: tuple[int, int] | None = None, mode: str = "functional"
) -> Case:
    case = split_case(f"t{total}-n{num_seqs}", total, num_seqs, seed=total + num_seqs)
    if heads is not None:
        name = f"{case.name}-h{heads[0]}x{heads[1]}"
        case = dataclasses.replace(case, name=name, num_q_heads=heads[0], num_v_heads=heads[1])
    return dataclasses.replace(case, mode=mode)


def details(case: Case) -> dict[str, int]:
    """Tokens of the longest sequence, and its chunks, which follow each other."""
    longest = max(case.lengths, default=0)
    return {"longest": longest, "chunks": -(-longest // CHUNK)}


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
    """As the contest draws them, on the device: other numbers than the CPU's from equal seeds, the
    same lengths. Cases that shape their contents are drawn on the CPU."""
    if shapes_contents(case):
        return make_inputs(dataclasses.replace(case, seed=seed), device)
    plain = dataclasses.replace(case, seed=seed, mode="functional")
    inputs = make_inputs(plain, device, drawn_on=device)
    return in_form(inputs, case.mode, seed)


# ---- results ------------------------------------------------------------------------------------

# exp(-1000) is 0, and sums over a chunk keep differences exact to 1e-10.
_LEAST_LOG_G = -1000.0


def expect(inputs: Inputs) -> Expected | OracleExpected:
    """On the inputs' device; by the oracle where there is no state, or where sequences of a pool
    are padding or write elsewhere."""
    if inputs.state is None or inputs.write_indices is not None:
        return expect_by_oracle([inputs])[0]
    return expect_on_device(inputs)


def expect_by_oracle(many: Sequence[Inputs]) -> list[OracleExpected]:
    """On a GPU all sequences of all calls side by side."""
    if all(inputs.q.device.type == "cpu" for inputs in many):
        return [reference(inputs) for inputs in many]
    return expect_side_by_side(many)


def expect_side_by_side(many: Sequence[Inputs]) -> list[OracleExpected]:
    """The oracle's recurrence, on the inputs' device. Reads there what `reference` reads of
    offsets and indices."""
    calls = [Call(inputs, inputs.q.device) for inputs in many]
    places = [(c, i, S, x) for c, call in enumerate(calls) for i, S, x in call.sequences()]
    runs: list[dict[int, Run]] = [{} for _ in calls]
    found = side_by_side([S for *_, S, _ in places], [x for *_, x in places])
    for (c, i, *_), run in zip(places, found, strict=True):
        scale = calls[c].scale
        runs[c][i] = run._replace(
            output=scale * run.output, output_kappa=abs(scale) * run.output_kappa
        )
    return [call.expected(each) for call, each in zip(calls, runs, strict=True)]


# What states and tokens of sequences side by side may take; what is made of them on the way takes
# as much again twice.
_SIDE_BY_SIDE_BYTES = 1 << 30


def side_by_side(starts: Sequence[torch.Tensor], tokens: Sequence[Values]) -> list[Run]:
    """`reference.recurrence` of many sequences, without their scale."""
    found: dict[int, Run] = {}
    left = sorted(range(len(starts)), key=lambda i: -tokens[i].v.shape[0])
    while left:
        longest = tokens[left[0]]  # the others of a group are padded to it
        each = 8 * (starts[left[0]].numel() + sum(values.numel() for values in longest))
        at_once = max(1, _SIDE_BY_SIDE_BYTES // each)
        chosen, left = left[:at_once], left[at_once:]
        runs = _side_by_side([starts[i] for i in chosen], [tokens[i] for i in chosen])
        found |= dict(zip(chosen, runs, strict=True))
    return [found[i] for i in range(len(starts))]


def _side_by_side(starts: list[torch.Tensor], tokens: list[Values]) -> list[Run]:
    """Of sequences from the longest to the shortest: those that go on are always the first."""
    lengths = [each.v.shape[0] for each in tokens]
    S = torch.stack(starts)  # [R, Hv, V, K]
    padded = Values(*(pad_sequence(list(part)) for part in zip(*tokens, strict=True)))  # [L, R, ..]
    q, k, v, g, beta = padded._replace(log_g=padded.log_g.exp())
    out, square = torch.zeros_like(v), S.new_zeros(S.shape[:2])
    state_kappa = S.new_zeros(S.shape[:2])
    for t in range(v.shape[0]):
        n = sum(length > t for length in lengths)
        state = S[:n].mul_(g[t, :n, :, None, None])
        u = beta[t, :n, :, None] * (v[t, :n] - _times(state, k[t, :n]))
        size, key, query = u.abs(), k[t, :n].abs(), q[t, :n].abs()
        absolute = state.abs()
        kappa = _times(absolute, query) + size * (key * query).sum(-1, keepdim=True)
        square[:n] += kappa.square().sum(-1)
        state += u[..., :, None] * k[t, :n, :, None, :]
        out[t, :n] = _times(state, q[t, :n])
        ended = slice(sum(length > t + 1 for length in lengths), n)
        last = absolute[ended] + size[ended, :, :, None] * key[ended, :, None, :]
        state_kappa[ended] = last.flatten(2).norm(dim=-1)
    output_kappa = square.sqrt()
    return [
        Run(out[:length, i], S[i], output_kappa[i], state_kappa[i])
        for i, length in enumerate(lengths)
    ]


def _times(matrices: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    return torch.matmul(matrices, vectors[..., None])[..., 0]


def join(inputs: Sequence[Inputs]) -> None:
    """Offsets of one call cannot leave out tokens in its middle."""


class _Chunk(NamedTuple):
    """Tokens of one sequence, float64: q, k, v [Hv, C, D], log_g and beta [Hv, C]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_g: torch.Tensor
    beta: torch.Tensor


# What a step of `_advance` costs in steps of `side_by_side`, on an H200: 0.8 to 1 ms by its
# operations, against 0.34 to 0.46.
_TOKENS_A_CHUNK = 2.5


def expect_on_device(inputs: Inputs) -> Expected:
    """`reference.py`, by chunks of one sequence after the other or by tokens of all of them side by
    side, whichever are fewer steps; tests compare both. Needs a state, no sequence that is padding,
    and finite values. Reads the offsets on the host."""
    offsets = clean_offsets(inputs.cu_seqlens.tolist(), inputs.v.shape[0])
    lengths = [end - begin for begin, end in pairwise(offsets)]
    num_chunks = sum(-(-length // CHUNK) for length in lengths)
    is_side_by_side = max(lengths, default=0) < _TOKENS_A_CHUNK * num_chunks
    return _expect_on_device(inputs, offsets, _run_tokens if is_side_by_side else _run_chunks)


def _expect_on_device(
    inputs: Inputs,
    offsets: Sequence[int],
    run: Callable[[torch.Tensor, list[Values]], list[Run]],
) -> Expected:
    """`run` gives for the states that sequences start from, and their tokens, what becomes of them,
    but for the scale."""
    assert inputs.state is not None
    num_tokens, num_v_heads, _ = inputs.v.shape
    device = inputs.v.device
    num_seqs = len(offsets) - 1
    group = num_v_heads // inputs.q.shape[1]
    scale = resolve_scale(inputs.scale, inputs.q.shape[2])

    is_empty = torch.tensor([end == begin for begin, end in pairwise(offsets)], device=device)
    slots, before, kept = pool_before(inputs, is_empty.bool())
    S = (before if slots is None else before.index_select(0, slots)).double()
    output = torch.zeros(inputs.v.shape, dtype=torch.float64, device=device)
    row = torch.full((num_tokens,), num_seqs, device=device)
    output_kappa, state_kappa = torch.zeros(2, num_seqs, num_v_heads, device=device).double()
    tokens = Values(
        inputs.q.double().repeat_interleave(group, dim=1),
        inputs.k.double().repeat_interleave(group, dim=1),
        inputs.v.double(),
        *gates(inputs.A_log, inputs.a, inputs.dt_bias, inputs.b),
    )
    found = run(S, [tokens.tokens(begin, end) for begin, end in pairwise(offsets)])
    for i, each in enumerate(found):
        begin, end = offsets[i : i + 2]
        row[begin:end] = i
        output[begin:end], S[i], output_kappa[i], state_kappa[i] = each
    return Expected(
        SPEC, scale * output, row, S, abs(scale) * output_kappa, state_kappa, slots, before, kept
    )


def _run_tokens(S: torch.Tensor, tokens: list[Values]) -> list[Run]:
    return side_by_side(list(S), tokens)


def _run_chunks(S: torch.Tensor, tokens: list[Values]) -> list[Run]:
    return [_run_sequence(start, each) for start, each in zip(S, tokens, strict=True)]


def _run_sequence(S: torch.Tensor, tokens: Values) -> Run:
    heads_first = _Chunk(*(values.transpose(0, 1) for values in tokens))
    heads_first = heads_first._replace(log_g=heads_first.log_g.clamp(min=_LEAST_LOG_G))
    output, square = torch.zeros_like(tokens.v), S.new_zeros(S.shape[0])
    state_kappa = S.new_zeros(S.shape[0])
    for first in range(0, tokens.v.shape[0], CHUNK):
        chunk = _Chunk(*(values[:, first : first + CHUNK] for values in heads_first))
        out, S, kappa, state_kappa = _advance(S, chunk)
        output[first : first + CHUNK] = out.transpose(0, 1)
        square += kappa
    return Run(output, S, square.sqrt(), state_kappa)


def _advance(
    S: torch.Tensor, x: _Chunk
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(O / scale [Hv, C, V], S', squared norm of kappa of O / scale [Hv], norm of kappa of S'
    [Hv])`; the operator's README has the equations."""
    since_start = x.log_g.cumsum(-1)  # [Hv, C]
    since_token = since_start[..., :, None] - since_start[..., None, :]
    causal = torch.ones(since_token.shape[-2:], dtype=torch.bool, device=S.device).tril()
    decay = torch.where(causal, since_token, -torch.inf).exp()  # [Hv, C, C]
    start, beta = since_start.exp()[..., None], x.beta[..., None]  # [Hv, C, 1]
    u = torch.linalg.solve_triangular(
        beta * decay * (x.k @ x.k.mT),
        beta * (x.v - start * (x.k @ S.mT)),
        upper=False,
        unitriangular=True,
    )
    out = start * (x.q @ S.mT) + (decay * (x.q @ x.k.mT)) @ u
    after = start[:, -1:] * S + (decay[:, -1, :, None] * u).mT @ x.k
    # Each token's g S, [Hv, C, V, K]: what kappa is the absolute value of.
    updates = (u[..., :, None] * x.k[..., None, :]).flatten(2)
    decayed = (start * S.flatten(1)[:, None]).baddbmm_(decay.tril(-1), updates)
    decayed = decayed.unflatten(2, S.shape[1:]).abs_()
    kappa = (decayed @ x.q.abs()[..., None])[..., 0]
    kappa += u.abs() * (x.q.abs() * x.k.abs()).sum(-1, keepdim=True)
    last = decayed[:, -1] + u[:, -1, :, None].abs() * x.k[:, -1, None, :].abs()
    return out, after, kappa.square().sum((1, 2)), last.flatten(1).norm(dim=-1)


def oracle(case: Case) -> bool:
    return case.axes["total_seq_len"] * case.num_v_heads <= ORACLE_TOKENS * 8


# ---- bytes --------------------------------------------------------------------------------------


def moved_bytes(case: Case) -> int:
    """Every tensor of the functional call once."""
    T, N = case.axes["total_seq_len"], case.axes["num_seqs"]
    Hk, Hv, D = case.num_q_heads, case.num_v_heads, case.head_size
    tokens = 2 * T * (2 * Hk * D + 2 * Hv * D + 2 * Hv)  # q, k; v, output; a, b
    return tokens + 2 * 4 * N * Hv * D * D + 8 * (N + 1) + 2 * 4 * Hv


def held_bytes(case: Case, sets: int) -> int:
    """Device memory of `sets` input sets with outputs, float64 results, peers and floor, and of
    what judging needs for a while. An estimate from above."""
    T, N = case.axes["total_seq_len"], case.axes["num_seqs"]
    Hv, D = case.num_v_heads, case.head_size
    state = 4 * N * Hv * D * D * (sets * (13 if case.mode == "pool" else 9) + 10)
    tokens = 2 * T * Hv * D * (sets * 10 + 40)
    return state + tokens + 3 * 8 * CHUNK * Hv * D * D
