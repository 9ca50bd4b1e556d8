"""The oracle of gdn_decode: the equations in float64, row by row, and how outputs are judged."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastkernels.ops._shared.compare import Error, official, relative_rows, unchanged
from fastkernels.ops._shared.gdn import gates, resolve_scale
from fastkernels.ops.gdn_decode.problem import Inputs
from fastkernels.ops.gdn_decode.spec import SPEC


@dataclass(frozen=True)
class Expected:
    """float64 outputs, and the same rows from absolute values (`kappa`) as yardstick.

    In pool form `new_state` is the whole pool; slots in `kept` must keep their bits.
    """

    output: torch.Tensor
    new_state: torch.Tensor
    output_kappa: torch.Tensor
    new_state_kappa: torch.Tensor
    kept: torch.Tensor

    def judge(self, outputs: tuple[torch.Tensor, ...]) -> list[Error]:
        """Ours: worst (row, head) of the output and of the state, and what must keep its bits."""
        output, new_state = outputs
        return [
            relative_rows(SPEC.tolerances[0], output, self.output, self.output_kappa, row_dims=1),
            relative_rows(
                SPEC.tolerances[1], new_state, self.new_state, self.new_state_kappa, row_dims=2
            ),
            unchanged("new_state", new_state, self.new_state, self.kept),
        ]

    def judge_official(self, outputs: tuple[torch.Tensor, ...]) -> list[Error]:
        return [
            official(SPEC.tolerances[0], outputs[0], self.output),
            official(SPEC.tolerances[1], outputs[1], self.new_state),
        ]


def step(
    S: torch.Tensor,
    g: float,
    beta: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token of one head: (S', o, kappa of S', kappa of o); S is [V, K]."""
    u = beta * (v - g * (S @ k))
    decayed = g * S if g > 0 else torch.zeros_like(S)
    S_new = decayed + torch.outer(u, k)
    S_kappa = decayed.abs() + torch.outer(u.abs(), k.abs())
    return S_new, scale * (S_new @ q), S_kappa, abs(scale) * (S_kappa @ q.abs())


def reference(inputs: Inputs) -> Expected:
    """Runs on the CPU; `inputs` are not changed."""
    x = Inputs._make(t.detach().cpu() if isinstance(t, torch.Tensor) else t for t in inputs)
    batch_size, _, num_q_heads, head_size = x.q.shape
    num_v_heads = x.v.shape[2]
    group = num_v_heads // num_q_heads
    scale = resolve_scale(x.scale, head_size)
    log_g, beta = gates(x.A_log, x.a[:, 0], x.dt_bias, x.b[:, 0])
    g = log_g.exp()
    q, k, v = x.q[:, 0].double(), x.k[:, 0].double(), x.v[:, 0].double()

    output = torch.zeros((batch_size, 1, num_v_heads, head_size), dtype=torch.float64)
    output_kappa = torch.zeros_like(output)
    if x.state is None:
        before = torch.zeros((batch_size, num_v_heads, head_size, head_size), dtype=torch.float64)
    else:
        before = x.state.double()
    after, after_kappa = before.clone(), torch.zeros_like(before)
    kept = torch.ones(before.shape[0], dtype=torch.bool)
    read = range(batch_size) if x.read_indices is None else x.read_indices.tolist()
    write = read if x.write_indices is None else x.write_indices.tolist()
    for i in range(batch_size):
        if not 0 <= read[i] < before.shape[0]:
            continue
        for h in range(num_v_heads):
            S, o, S_kappa, o_kappa = step(
                before[read[i], h],
                float(g[i, h]),
                float(beta[i, h]),
                q[i, h // group],
                k[i, h // group],
                v[i, h],
                scale,
            )
            output[i, 0, h], output_kappa[i, 0, h] = o, o_kappa
            if 0 <= write[i] < before.shape[0]:
                after[write[i], h], after_kappa[write[i], h] = S, S_kappa
                kept[write[i]] = False
    return Expected(output, after, output_kappa, after_kappa, kept)
