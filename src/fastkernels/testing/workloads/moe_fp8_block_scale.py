"""moe_fp8_block_scale: weights that cases share, and rows in both modes; the rest as `Generic`.

The weights are 1.4 GB and the same under every seed of a case, so they are made once for each
device and kept until other ones are asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from fastkernels import catalog
from fastkernels.ops._shared.cases import move
from fastkernels.ops.moe_fp8_block_scale.inputs import (
    CONTEST,
    SERVING,
    Case,
    Weights,
    make_inputs,
    make_weights,
)
from fastkernels.ops.moe_fp8_block_scale.problem import Inputs
from fastkernels.ops.moe_fp8_block_scale.spec import BLOCK
from fastkernels.testing.workloads.generic import Generic

_generic = Generic(catalog.operator("moe_fp8_block_scale"))

rows = _generic.rows
details = _generic.details
updates = _generic.updates
live = _generic.live
restore = _generic.restore
outputs = _generic.outputs
expect, expect_by_oracle = _generic.expect, _generic.expect_by_oracle
join = _generic.join
oracle = _generic.oracle
moved_bytes = _generic.moved_bytes


def sweep_rows(modes: Sequence[str]) -> Iterator[tuple[str, Case]]:
    """The lists in every mode, although their cases are all of the first one: a table has both."""
    for mode in modes:
        for listed, cases in (("contest", CONTEST), ("serving", SERVING)):
            yield from ((listed, dataclasses.replace(case, mode=mode)) for case in cases)


def own_inputs(case: Case, device: torch.device) -> Inputs:
    """As `make_inputs` draws them, on the weights of all such cases, which nobody may change."""
    return make_inputs(case, device, _weights(_family(case), device))


def fresh_inputs(case: Case, seed: int, device: torch.device) -> Inputs:
    """Drawn on the CPU; the weights are those of every seed."""
    return own_inputs(dataclasses.replace(case, seed=seed), device)


def _family(case: Case) -> Case:
    """What all cases with these weights have in common."""
    return Case(
        "weights",
        0,
        num_local_experts=case.num_local_experts,
        hidden_size=case.hidden_size,
        intermediate_size=case.intermediate_size,
        weights=case.weights,
        layout=case.layout,
        weight_seed=case.weight_seed,
    )


@lru_cache(maxsize=1)  # on a GPU, candidates need the memory
def _weights(family: Case, device: torch.device) -> Weights:
    return Weights._make(move(tensor, device) for tensor in make_weights(family))


def held_bytes(case: Case, sets: int) -> int:
    """An estimate from above: the weights once, and twice as much for peers that repack them."""
    codes = 3 * case.num_local_experts * case.hidden_size * case.intermediate_size
    weights = codes + 4 * codes // BLOCK**2
    return 3 * weights + 3 * (sets + 1) * (moved_bytes(case) - weights)
