"""Chunked form in batched torch operations, float32 with decays in float64: the safe route.

For a chunk of tokens t with start state S, `d[t, s]` the decay from token s to t and `d[t]` from S
to t, the recurrence is a unit lower triangular system (the UT transform of the WY form):

    (I + tril(beta_t d[t, s] k_t.k_s, -1)) U = beta (V - d K S^T)
    O  = scale (d Q S^T + tril(d[t, s] q_t.k_s) U)
    S' = d[last] S + (d[last, s] U)^T K

It is solved by forward substitution, never by a Neumann series, whose terms grow like binomials for
near-parallel keys. Chunks of one sequence follow each other; sequences advance side by side,
longest first, `seqs_per_batch` at a time.

Nothing synchronises, so a CUDA graph can hold a call: sequences are sorted by length on the device,
and since the r-th longest of sequences with T tokens together (from r = 0) has at most
`T // (r + 1)`, shapes alone bound the steps of every batch. The first batch always takes
`ceil(T / chunk_size)` steps there, however short its sequences are. On the CPU the lengths
themselves are read.

Products follow torch.set_float32_matmul_precision: with TF32 operands states are off by 3e-4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fastkernels.core.route import ANY_DEVICE, Route, require_positive
from fastkernels.ops._shared.gdn import gates, load_rows, resolve_scale, store_rows
from fastkernels.ops.gdn_prefill.problem import Inputs

# exp(-1000) is 0 in float64, so this changes no gate, and sums over a chunk keep differences exact
# to 1e-10. Unclamped, one log_g of -1e18 would swallow every later gate of its chunk.
_LEAST_LOG_G = -1000.0


@dataclass(frozen=True)
class Config:
    """chunk_size: tokens per triangular system.   seqs_per_batch: sequences that advance together.
    The scratch memory grows with both."""

    # 64 is up to a third faster on a CPU, but takes twice the launches (H200, 8192 tokens in 57
    # sequences: 228 ms, 128: 91 ms).
    chunk_size: int = 128
    seqs_per_batch: int = 32

    def __post_init__(self) -> None:
        require_positive(self)


class _Tokens(NamedTuple):
    """Per token: q, k, v as given, gates in float64 [T, Hv]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_g: torch.Tensor
    beta: torch.Tensor

    def take(self, token: torch.Tensor, inside: torch.Tensor) -> _Tokens:
        """The tokens [n, W] of n chunks, as [n, Hv, W, ..]; zeros (g = 1) where not `inside`."""
        num_v_heads = self.v.shape[1]

        def pick(values: torch.Tensor) -> torch.Tensor:
            rows = values.index_select(0, token.view(-1)).unflatten(0, token.shape).transpose(1, 2)
            mask = inside.view(inside.shape[0], 1, -1, *[1] * (rows.dim() - 3))
            return torch.where(mask, rows, 0.0).repeat_interleave(
                num_v_heads // rows.shape[1], dim=1
            )

        q, k, v = (pick(values).float() for values in (self.q, self.k, self.v))
        return _Tokens(q, k, v, pick(self.log_g), pick(self.beta))


def launch(
    inputs: Inputs,
    outputs: tuple[torch.Tensor, ...],
    workspace: torch.Tensor | None,
    config: Config,
) -> None:
    output, new_state = outputs
    num_tokens, num_seqs = inputs.q.shape[0], inputs.cu_seqlens.shape[0] - 1
    device = output.device
    offsets = inputs.cu_seqlens.long().clamp(0, num_tokens).cummax(0).values
    starts, lengths = offsets[:-1], offsets.diff()

    valid = None
    if inputs.read_indices is not None:
        assert inputs.state is not None
        states, valid = load_rows(inputs.state, inputs.read_indices)
        lengths = torch.where(valid, lengths, 0)  # a padding row has no tokens
    else:
        states = new_state
        if inputs.state is None:
            states.zero_()
        elif not inputs.inplace:
            states.copy_(inputs.state)

    lengths, order = lengths.sort(descending=True, stable=True)
    starts = starts.index_select(0, order)
    at_most = most_tokens(lengths, num_tokens)

    log_g, beta = gates(inputs.A_log, inputs.a, inputs.dt_bias, inputs.b)
    tokens = _Tokens(inputs.q, inputs.k, inputs.v, log_g.clamp(min=_LEAST_LOG_G), beta)
    scale = resolve_scale(inputs.scale, inputs.q.shape[2])
    # One row beyond the tokens takes what is computed past the end of a sequence.
    result = torch.zeros((num_tokens + 1, *output.shape[1:]), dtype=output.dtype, device=device)
    for first in range(0, num_seqs, config.seqs_per_batch):
        last = min(first + config.seqs_per_batch, num_seqs)
        if at_most[first] == 0:
            break
        rows = order[first:last]
        batch = states.index_select(0, rows)
        for begin in range(0, at_most[first], config.chunk_size):
            n = sum(length > begin for length in at_most[first:last])
            width = min(config.chunk_size, at_most[first] - begin)
            position = begin + torch.arange(width, device=device)
            inside = position < lengths[first : first + n, None]  # [n, W]
            token = starts[first : first + n, None] + position
            chunk = tokens.take(torch.where(inside, token, 0), inside)
            out, after = advance(batch[:n], chunk, scale)
            # An empty rest keeps the state's bits: 1 * S + 0 would not keep an infinity.
            batch[:n] = torch.where(inside[:, :1, None, None], after, batch[:n])
            slot = torch.where(inside, token, num_tokens).view(-1)
            result.index_copy_(0, slot, out.transpose(1, 2).flatten(0, 1).to(result.dtype))
        states.index_copy_(0, rows, batch)

    output.copy_(result[:num_tokens])
    if inputs.read_indices is not None:
        assert valid is not None
        write = inputs.read_indices if inputs.write_indices is None else inputs.write_indices
        store_rows(new_state, write, states, valid)


def most_tokens(lengths: torch.Tensor, num_tokens: int) -> list[int]:
    """The lengths, sorted in descending order, or off the CPU what they can be at most."""
    if lengths.device.type == "cpu":
        return [int(length) for length in lengths.tolist()]
    return most_tokens_by_shape(lengths.shape[0], num_tokens)


def most_tokens_by_shape(num_seqs: int, num_tokens: int) -> list[int]:
    """The most that the longest, second longest, .. of sequences have with so many together."""
    return [num_tokens // (rank + 1) for rank in range(num_seqs)]


def advance(S: torch.Tensor, chunk: _Tokens, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`(O [n, Hv, W, V], S')` of one chunk each; S is [n, Hv, V, K], all in float32."""
    q, k, v = chunk.q, chunk.k, chunk.v
    beta = chunk.beta.float()[..., None]  # [n, Hv, W, 1]
    since_start = chunk.log_g.cumsum(-1)  # [n, Hv, W] float64
    since_token = since_start[..., :, None] - since_start[..., None, :]
    causal = torch.ones(since_token.shape[-2:], dtype=torch.bool, device=S.device).tril()
    # Masked before the exponential, which overflows above the diagonal.
    decay = torch.where(causal, since_token, -torch.inf).exp().float()
    decay_start = since_start.exp().float()[..., None]
    S_t = S.transpose(-1, -2)
    k_t = k.transpose(-1, -2)

    u = torch.linalg.solve_triangular(
        beta * decay * (k @ k_t),
        beta * (v - decay_start * (k @ S_t)),
        upper=False,
        unitriangular=True,
    )
    # A token that is not finite must not reach earlier ones through 0 * NaN: it is taken out of the
    # product and put back from its own row on.
    pairs = torch.where(causal, decay * (q @ k_t), 0.0)
    out = scale * (decay_start * (q @ S_t) + pairs @ u.nan_to_num(0.0, 0.0, 0.0))
    out += (u * 0.0).cumsum(-2)
    decay_end = decay[..., -1, :, None]
    after = decay_start[..., -1:, :] * S + (decay_end * u).transpose(-1, -2) @ k
    return out, after


ROUTE = Route(
    "torch_chunked",
    "torch",
    ANY_DEVICE,
    Config(),
    launch,
    candidates={"chunk_size": (16, 32, 64, 128), "seqs_per_batch": (8, 32, 128)},
)
