"""The oracle of gdn_prefill: the recurrence in float64, token by token; how outputs are judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from fastkernels.ops._shared.compare import Error, official, relative_rows, unchanged, wrong_shape
from fastkernels.ops._shared.gdn import gates, resolve_scale
from fastkernels.ops.gdn_prefill.problem import Inputs
from fastkernels.ops.gdn_prefill.spec import SPEC

YARDSTICK_CHUNK = 64
YARDSTICK_FACTOR = 2.0
# A yardstick with a larger error than this has lost the result itself and excuses nothing.
YARDSTICK_LOST = 0.1


@dataclass(frozen=True)
class Expected:
    """float64 outputs, per row the norm of the same row from absolute values (`kappa`), and what is
    added to the limit of an ill-conditioned row (`slack`).

    A row of the output is all tokens of a sequence for one head, [N, Hv] rows; one of the state a
    [V, K] matrix. In pool form `new_state` is the whole pool. States in `kept` must keep their
    bits: slots that nothing writes, and those of empty sequences.
    """

    output: torch.Tensor
    new_state: torch.Tensor
    output_kappa: torch.Tensor
    new_state_kappa: torch.Tensor
    output_slack: torch.Tensor
    new_state_slack: torch.Tensor
    kept: torch.Tensor
    offsets: tuple[int, ...]

    def judge(self, outputs: tuple[torch.Tensor, ...]) -> list[Error]:
        """Ours: worst (sequence, head) of output and state, and what must keep its bits."""
        output, new_state = outputs
        return [
            self._judge_output(output),
            relative_rows(
                SPEC.tolerances[1],
                new_state,
                self.new_state,
                self.new_state_kappa,
                row_dims=2,
                slack=self.new_state_slack,
            ),
            unchanged("new_state", new_state, self.new_state, self.kept),
        ]

    def judge_official(self, outputs: tuple[torch.Tensor, ...]) -> list[Error]:
        return [
            official(SPEC.tolerances[0], outputs[0], self.output),
            official(SPEC.tolerances[1], outputs[1], self.new_state),
        ]

    def _judge_output(self, got: torch.Tensor) -> Error:
        if got.shape != self.output.shape:
            return wrong_shape(SPEC.tolerances[0], got, tuple(self.output.shape))
        total, num_v_heads = self.output.shape[:2]
        nothing = self.output_kappa.new_zeros(num_v_heads)
        # Tokens of no sequence are rows with kappa 0: only exact zeros pass.
        rows = [
            (0, self.offsets[0], nothing, nothing),
            (self.offsets[-1], total, nothing, nothing),
        ]
        for i, (begin, end) in enumerate(pairwise(self.offsets)):
            rows.append((begin, end, self.output_kappa[i], self.output_slack[i]))
        errors = [
            _at_token(
                begin,
                relative_rows(
                    SPEC.tolerances[0],
                    got[begin:end].transpose(0, 1),
                    self.output[begin:end].transpose(0, 1),
                    kappa,
                    row_dims=2,
                    slack=slack,
                ),
            )
            for begin, end, kappa, slack in rows
        ]
        return max(errors, key=lambda error: error.value)


def _at_token(begin: int, error: Error) -> Error:
    """The error with its place as (token, head, column), from (head, token, column)."""
    if not error.at:
        return error
    head, token, column = error.at
    return dataclasses.replace(error, at=(begin + token, head, column))


class Values(NamedTuple):
    """Inputs in float64 per value head: q, k [T, Hv, K], v [T, Hv, V], log_g and beta [T, Hv]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_g: torch.Tensor
    beta: torch.Tensor

    def tokens(self, begin: int, end: int) -> Values:
        return Values(*(values[begin:end] for values in self))


def clean_offsets(values: Sequence[int], total: int) -> tuple[int, ...]:
    """The running maximum of the offsets clamped to the tokens that there are."""
    offsets: list[int] = []
    for value in values:
        offsets.append(max(min(max(value, 0), total), offsets[-1] if offsets else 0))
    return tuple(offsets)


class Run(NamedTuple):
    """One sequence to its end: output [L, Hv, V], state [Hv, V, K], and norms of the kappa of both
    [Hv]."""

    output: torch.Tensor
    state: torch.Tensor
    output_kappa: torch.Tensor
    state_kappa: torch.Tensor


class Call:
    """The sequences of one call, and what it must give once each of them was run: `reference` runs
    them one after the other on the CPU. Lies on `device`; `inputs` are not changed."""

    def __init__(self, inputs: Inputs, device: torch.device | str = "cpu") -> None:
        x = Inputs._make(
            t.detach().to(device) if isinstance(t, torch.Tensor) else t for t in inputs
        )
        total, num_v_heads, head_size = x.v.shape
        self.offsets = clean_offsets(x.cu_seqlens.tolist(), total)
        self.scale = resolve_scale(x.scale, head_size)
        group = num_v_heads // x.q.shape[1]
        self.values = Values(
            x.q.double().repeat_interleave(group, dim=1),
            x.k.double().repeat_interleave(group, dim=1),
            x.v.double(),
            *gates(x.A_log, x.a, x.dt_bias, x.b),
        )
        num_seqs = len(self.offsets) - 1
        if x.state is None:
            shape = (num_seqs, num_v_heads, head_size, head_size)
            self.before = x.v.new_zeros(shape, dtype=torch.float64)
        else:
            self.before = x.state.double()
        read = range(num_seqs) if x.read_indices is None else x.read_indices.tolist()
        write = read if x.write_indices is None else x.write_indices.tolist()
        self._slots = list(zip(read, write, strict=True))

    def sequences(self) -> Iterator[tuple[int, torch.Tensor, Values]]:
        """Number, start state and tokens of each that is no padding."""
        for i, (begin, end) in enumerate(pairwise(self.offsets)):
            read, _ = self._slots[i]
            if 0 <= read < self.before.shape[0]:
                yield i, self.before[read], self.values.tokens(begin, end)

    def expected(self, runs: Mapping[int, Run]) -> Expected:
        """`runs` by the numbers of their sequences."""
        num_states, num_v_heads = self.before.shape[:2]
        num_seqs, new_zeros = len(self.offsets) - 1, self.before.new_zeros
        after, output = self.before.clone(), torch.zeros_like(self.values.v)
        output_kappa, output_slack = new_zeros(2, num_seqs, num_v_heads)
        state_kappa, state_slack = new_zeros(2, num_states, num_v_heads)
        kept = torch.ones(num_states, dtype=torch.bool, device=after.device)
        for i, S, tokens in self.sequences():
            run, (begin, end) = runs[i], self.offsets[i : i + 2]
            out_slack, S_slack = _slack(S, tokens, self.scale, run)
            output[begin:end], output_kappa[i], output_slack[i] = (
                run.output, run.output_kappa, out_slack,
            )  # fmt: skip
            _, write = self._slots[i]
            if 0 <= write < num_states:
                after[write], kept[write] = run.state, begin == end
                state_kappa[write], state_slack[write] = run.state_kappa, S_slack
        return Expected(
            output, after, output_kappa, state_kappa, output_slack, state_slack, kept, self.offsets
        )  # fmt: skip


def reference(inputs: Inputs) -> Expected:
    """Runs on the CPU; `inputs` are not changed."""
    call = Call(inputs)
    return call.expected({i: recurrence(S, x, call.scale) for i, S, x in call.sequences()})


def recurrence(S: torch.Tensor, x: Values, scale: float) -> Run:
    """Of one sequence, [Hv, V, K] its start state."""
    heads = [
        _recurrence_of_head(S[h], Values(*(values[:, h] for values in x)))
        for h in range(S.shape[0])
    ]
    out, S_new, out_kappa, S_kappa = (torch.stack(part) for part in zip(*heads, strict=True))
    return Run(scale * out.transpose(0, 1), S_new, abs(scale) * out_kappa, S_kappa)


def _recurrence_of_head(
    S: torch.Tensor, x: Values
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One head, in place: 128 KiB stay in cache, and a tensor of that size needs no thread team."""
    S = S.clone()
    out, kappa = torch.zeros_like(x.v), torch.zeros_like(x.v)
    u, absolute = torch.zeros_like(S[:, 0]), torch.zeros_like(S)
    abs_q, abs_kq = x.q.abs(), (x.k.abs() * x.q.abs()).sum(-1).tolist()
    g, beta = x.log_g.exp().tolist(), x.beta.tolist()
    for t in range(x.v.shape[0]):
        S.mul_(g[t])
        u = beta[t] * (x.v[t] - S.mv(x.k[t]))
        torch.abs(S, out=absolute)
        torch.addmv(u.abs(), absolute, abs_q[t], beta=abs_kq[t], out=kappa[t])
        S.addr_(u, x.k[t])
        torch.mv(S, x.q[t], out=out[t])
    if x.v.shape[0]:
        absolute += torch.outer(u.abs(), x.k[-1].abs())
    return out, S, torch.linalg.vector_norm(kappa), torch.linalg.vector_norm(absolute)


# ---- ill-conditioned inputs ---------------------------------------------------------------------


def ill_conditioned(x: Values) -> torch.Tensor:
    """[Hv]: where one sequence amplifies rounding, so that the usual limit asks too much of a
    chunked form: keys longer than 1, neighbouring keys nearly parallel, or nothing ever forgotten
    (g = 1) while every token replaces what its key held (beta = 1)."""
    norm = torch.linalg.vector_norm(x.k, dim=-1)
    long_keys = (norm > 1.05).any(0)
    cosine = (x.k[1:] * x.k[:-1]).sum(-1) / (norm[1:] * norm[:-1] + 1e-30)
    parallel = (cosine.sum(0) > 0.9 * cosine.shape[0]) & (cosine.shape[0] > 0)
    undamped = (x.log_g > -1e-3).all(0) & (x.beta > 0.999).all(0)
    return (long_keys | parallel | undamped) & (x.k.shape[0] > 0)


def _slack(S: torch.Tensor, x: Values, scale: float, run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """What is added to the limits of ill-conditioned heads, so that they become twice the error of
    the plain bfloat16 form if that is more. 0 for the others."""
    wanted = ill_conditioned(x)
    if not wanted.any():
        return torch.zeros_like(run.output_kappa), torch.zeros_like(run.state_kappa)
    out_bf16, S_bf16 = chunked_bf16(S, x, scale)
    pairs = (
        (out_bf16, run.output, run.output_kappa, (0, 2)),
        (S_bf16, run.state, run.state_kappa, (1, 2)),
    )
    slack = []
    for tolerance, (got, want, kappa, dims) in zip(SPEC.tolerances, pairs, strict=True):
        size = torch.maximum(torch.linalg.vector_norm(want, dim=dims), kappa) + 1e-30
        error = torch.linalg.vector_norm(got - want, dim=dims) / size
        usable = wanted & (error <= YARDSTICK_LOST)  # false for NaN
        slack.append(
            torch.where(usable, YARDSTICK_FACTOR * error - tolerance.limit, 0.0).clamp(min=0.0)
        )
    return slack[0], slack[1]


def chunked_bf16(S: torch.Tensor, x: Values, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The yardstick: one sequence in the plain chunked WY form, every matrix product with bfloat16
    operands and float32 sums, gates and the triangular inverse in float32. (O [L, Hv, V], S')."""
    S = S.float()
    out = torch.zeros_like(x.v)
    for begin in range(0, x.v.shape[0], YARDSTICK_CHUNK):
        part = x.tokens(begin, begin + YARDSTICK_CHUNK)
        q, k, v, log_g, beta = (t.transpose(0, 1).float() for t in part)  # [Hv, W, ..]
        total, beta = log_g.cumsum(-1), beta[..., None]
        decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
        start, end = total.exp()[..., None], decay[:, -1, :, None]
        one = torch.eye(q.shape[1], device=q.device).expand(q.shape[0], -1, -1)
        inverse = torch.linalg.solve_triangular(
            one + (beta * decay * _mm(k, k.mT)).tril(-1), one, upper=False
        )
        w = _mm(inverse, beta * start * k)
        u = _mm(inverse, beta * v) - _mm(w, S.mT)
        out[begin : begin + YARDSTICK_CHUNK] = (
            (scale * (_mm(start * q, S.mT) + _mm(decay * _mm(q, k.mT), u)))
            .transpose(0, 1)
            .bfloat16()
        )
        S = start[:, -1:] * S + _mm((end * u).mT, k)
    return out, S.double()


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.bfloat16().float() @ b.bfloat16().float()
