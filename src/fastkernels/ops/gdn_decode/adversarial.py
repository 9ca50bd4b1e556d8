"""Inputs that implementations of gdn_decode get wrong, by name: what a candidate is judged on
beside its workloads. Where a list in `inputs` has them already, its case is taken."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fastkernels.ops._shared.adversarial import Draws, in_turn
from fastkernels.ops.gdn_decode.inputs import CORNER, CORRECTNESS, Case, make_inputs
from fastkernels.ops.gdn_decode.problem import Inputs


class Stratum(Draws):
    make_inputs = staticmethod(make_inputs)
    draws_anywhere = True  # a draw of 8 MB took an H200's host 3 to 20 ms


def _listed(name: str) -> Stratum:
    return Stratum(next(case for case in (*CORRECTNESS, *CORNER) if case.name == name))


def _state(inputs: Inputs) -> torch.Tensor:
    assert inputs.state is not None
    return inputs.state


def _scaled(*factors: float) -> Callable[[Inputs, torch.Generator], Inputs]:
    """State and v of every row times the factors in turn: the step is linear in the two."""

    def change(inputs: Inputs, rng: torch.Generator) -> Inputs:
        rows = in_turn(factors, inputs.q.shape[0])[:, None, None, None]
        return inputs._replace(state=_state(inputs) * rows, v=(inputs.v * rows).bfloat16())

    return change


def _zeros(*names: str) -> Callable[[Inputs, torch.Generator], Inputs]:
    """Row i has zeros for the name i (in turn) and is left alone where names run out."""

    def change(inputs: Inputs, rng: torch.Generator) -> Inputs:
        changed = {name: getattr(inputs, name).clone() for name in names}
        for i, name in enumerate(names):
            changed[name][i :: len(names) + 1] = 0.0
        return inputs._replace(**changed)

    return change


def _betas(*values: float) -> Callable[[Inputs, torch.Generator], Inputs]:
    """Every head of every row has one of these b, at random."""

    def change(inputs: Inputs, rng: torch.Generator) -> Inputs:
        which = torch.randint(len(values), inputs.b.shape, generator=rng)
        return inputs._replace(b=torch.tensor(values)[which].bfloat16())

    return change


def _widest_gates(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """A_log from -30 to 80 over the heads, with dt_bias such that g is neither 0 nor 1: rates and
    steps at the ends of float32, products near 1."""
    A_log = torch.linspace(-30.0, 80.0, inputs.A_log.shape[0])
    step = (0.1 + 2.0 * torch.rand(A_log.shape, generator=rng)).double() * (-A_log).double().exp()
    dt_bias = torch.where(step > 20.0, step, torch.log(torch.expm1(step.clamp(max=20.0))))
    return inputs._replace(A_log=A_log, dt_bias=dt_bias.float(), a=torch.zeros_like(inputs.a))


def _softplus_edges(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Arguments of softplus around the threshold of 20, where exp leaves float32 (88) and where
    `1 + exp(x)` rounds to 1 (-17)."""
    edges = torch.tensor([19.5, 20.0, 20.125, 87.0, 88.5, 89.0, -16.5, -17.5, -40.0])
    a = edges[torch.randint(len(edges), inputs.a.shape, generator=rng)]
    rate = torch.exp(-2.0 - 4.0 * torch.rand(inputs.A_log.shape, generator=rng))
    return inputs._replace(
        A_log=rate.log(), a=a.bfloat16(), dt_bias=torch.zeros_like(inputs.dt_bias)
    )


def _nothing_to_add(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """v = S k and g = 1: what the step adds is rounding alone."""
    k = inputs.k[:, 0].float()
    group = inputs.v.shape[2] // k.shape[1]
    held = torch.einsum("bhvk,bhk->bhv", _state(inputs), k.repeat_interleave(group, dim=1))
    return inputs._replace(v=held.unsqueeze(1).bfloat16(), a=torch.full_like(inputs.a, -200.0))


_ROWS = 8

STRATA: dict[str, Stratum] = {
    "no_rows": _listed("empty"),
    "no_state": _listed("no-state"),
    "decay_1": _listed("keep"),
    "decay_0": _listed("forget"),
    "decay_near_1": _listed("slow"),
    "decays_and_betas_in_turn": _listed("extreme"),
    "beta_0": Stratum(Case("beta-0", _ROWS), _betas(-30.0, -100.0, -math.inf)),
    "beta_1": Stratum(Case("beta-1", _ROWS), _betas(30.0, 100.0, math.inf)),
    "widest_gates": Stratum(Case("widest-gates", _ROWS), _widest_gates),
    "softplus_edges": Stratum(Case("softplus-edges", _ROWS), _softplus_edges),
    "huge_state": Stratum(Case("huge-state", _ROWS), _scaled(1e20)),
    "tiny_state": Stratum(Case("tiny-state", _ROWS), _scaled(1e-20)),
    "mixed_states": Stratum(Case("mixed-states", _ROWS), _scaled(1e20, 1e-20, 1.0, 0.0)),
    "zeros": Stratum(Case("zeros", _ROWS), _zeros("q", "k", "v", "state")),
    "nothing_to_add": Stratum(Case("nothing-to-add", _ROWS), _nothing_to_add),
    "raw_keys": _listed("raw-keys"),
    "inplace": _listed("strided-inplace"),  # new_state is state
    "pool": _listed("strided-pool"),  # padding, and slots written that are not those read
    "pool_int64": _listed("pool-int64"),
    "pool_of_padding": _listed("all-invalid"),
}
