"""The oracle of dsa_sparse_attention: the equations in float64, token by token, and how outputs are
judged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fastkernels.ops._shared.compare import Error, absolute, official, relative_rows
from fastkernels.ops.dsa_sparse_attention.problem import Inputs
from fastkernels.ops.dsa_sparse_attention.spec import SPEC

LOGIT_SLACK = 2.0**-20
"""Rounding of a logit not held against a kernel, relative to `sm_scale * sum |q_d k_jd|`."""

LSE_RELATIVE = 2.0**-18


@dataclass(frozen=True)
class Expected:
    """float64 outputs, and what the limits need.

    output_kappa: `sum P |ckv|`, shaped like output.   slack: [T, H], the logits' rounding.
    """

    output: torch.Tensor
    lse: torch.Tensor
    output_kappa: torch.Tensor
    slack: torch.Tensor

    def judge(self, outputs: tuple[torch.Tensor, ...]) -> list[Error]:
        """Ours: worst (token, head) of the output, worst element of lse."""
        output, lse = outputs
        of_output, of_lse = SPEC.tolerances
        allowed = of_lse.limit + LSE_RELATIVE * self.lse.abs() + self.slack
        return [
            relative_rows(of_output, output, self.output, self.output_kappa, 1, self.slack),
            absolute(of_lse, lse, self.lse, allowed),
        ]

    def judge_official(self, outputs: tuple[torch.Tensor, ...]) -> list[Error]:
        return [
            official(SPEC.tolerances[0], outputs[0], self.output),
            official(SPEC.tolerances[1], outputs[1], self.lse),
        ]


def _on_cpu(inputs: Inputs) -> Inputs:
    tensors: dict[str, Any] = {
        name: value.cpu()
        for name, value in inputs._asdict().items()
        if isinstance(value, torch.Tensor)
    }
    return inputs._replace(**tensors)


def reference(inputs: Inputs) -> Expected:
    """Runs on the CPU; `inputs` are not changed."""
    x = _on_cpu(inputs)
    num_pages, page_size, _ = x.ckv_cache.shape
    output = torch.zeros(x.q_nope.shape, dtype=torch.float64)
    kappa = torch.zeros_like(output)
    lse = torch.full(x.q_nope.shape[:2], -math.inf, dtype=torch.float64)
    slack = torch.zeros_like(lse)
    for token, row in enumerate(x.sparse_indices.long()):
        named = row[(row >= 0) & (row < num_pages * page_size)]
        if named.numel() == 0:
            continue
        ckv = x.ckv_cache[named // page_size, named % page_size].double()  # [n, D]
        kpe = x.kpe_cache[named // page_size, named % page_size].double()
        q_nope, q_pe = x.q_nope[token].double(), x.q_pe[token].double()  # [H, D]
        logits = x.sm_scale * (q_nope @ ckv.T + q_pe @ kpe.T)  # [H, n]
        magnitude = q_nope.abs() @ ckv.abs().T + q_pe.abs() @ kpe.abs().T
        lse[token] = torch.logsumexp(logits, dim=1)
        weights = (logits - lse[token][:, None]).exp()
        output[token], kappa[token] = weights @ ckv, weights @ ckv.abs()
        slack[token] = LOGIT_SLACK * abs(x.sm_scale) * magnitude.amax(dim=1)
    if x.lse_base == 2:
        lse = lse / math.log(2.0)
    return Expected(output, lse, kappa, slack.nan_to_num(nan=0.0, posinf=0.0))
