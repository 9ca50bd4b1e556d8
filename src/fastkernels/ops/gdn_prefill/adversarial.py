"""Inputs that implementations of gdn_prefill get wrong, by name: what a candidate is judged on
beside its workloads. Where a list in `inputs` has them already, its case is taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch

from fastkernels.ops._shared.adversarial import Draws, in_turn
from fastkernels.ops.gdn_prefill.inputs import CORNER, CORRECTNESS, Case, make_inputs
from fastkernels.ops.gdn_prefill.problem import Inputs


class Stratum(Draws):
    make_inputs = staticmethod(make_inputs)
    draws_anywhere = True


def _listed(name: str) -> Stratum:
    return Stratum(next(case for case in (*CORRECTNESS, *CORNER) if case.name == name))


def _state(inputs: Inputs) -> torch.Tensor:
    assert inputs.state is not None
    return inputs.state


def _scaled(*factors: float) -> Callable[[Inputs, torch.Generator], Inputs]:
    """State and v of every sequence times the factors in turn: the recurrence is linear in them."""

    def change(inputs: Inputs, rng: torch.Generator) -> Inputs:
        lengths = inputs.cu_seqlens.diff()
        seqs = in_turn(factors, lengths.shape[0])
        tokens = seqs.repeat_interleave(lengths)[:, None, None]
        state = _state(inputs) * seqs[:, None, None, None]
        return inputs._replace(state=state, v=(inputs.v * tokens).bfloat16())

    return change


def _betas(*values: float) -> Callable[[Inputs, torch.Generator], Inputs]:
    """Every head of every token has one of these b, at random."""

    def change(inputs: Inputs, rng: torch.Generator) -> Inputs:
        which = torch.randint(len(values), inputs.b.shape, generator=rng)
        return inputs._replace(b=torch.tensor(values)[which].bfloat16())

    return change


def _steep(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """g between 1 and e**-60 from token to token: within a chunk the product underflows, and the
    inverse of a partial product overflows."""
    a = 6.0 * torch.rand(inputs.a.shape, generator=rng) - 3.0
    return inputs._replace(
        A_log=torch.full_like(inputs.A_log, math.log(20.0)),
        a=a.bfloat16(),
        dt_bias=torch.zeros_like(inputs.dt_bias),
    )


def _late_forget(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """g = 1 everywhere but at one random token of each sequence and head, where it is 0."""
    A_log, a = torch.full_like(inputs.A_log, 20.0), torch.full_like(inputs.a, -200.0)
    for begin, end in pairwise(inputs.cu_seqlens.tolist()):
        token = torch.randint(begin, end, (a.shape[1],), generator=rng)
        a.scatter_(0, token[None], 100.0)
    return inputs._replace(A_log=A_log, a=a)


def _prefixes(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Every sequence is a prefix of the last one, from the same state: each state of the longest
    one's way is asked for."""
    offsets = inputs.cu_seqlens.tolist()

    def repeated(tokens: torch.Tensor) -> torch.Tensor:
        last = tokens[offsets[-2] :]
        return torch.cat([last[: end - begin] for begin, end in pairwise(offsets)])

    state = _state(inputs)
    return inputs._replace(
        q=repeated(inputs.q),
        k=repeated(inputs.k),
        v=repeated(inputs.v),
        a=repeated(inputs.a),
        b=repeated(inputs.b),
        state=state[-1:].expand_as(state).clone(),
    )


def _erased(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """A state of 1e4 in one direction, with g = 1: keys leave it alone, then every other one of 256
    overwrites it, which leaves 1/2,000 of the state, and the last 6 mend nothing. An error in
    proportion to the state before, however small, is one to what remains."""
    half = inputs.k.shape[2] // 2
    direction = torch.nn.functional.normalize(torch.randn(half, generator=rng), dim=0).bfloat16()
    k = torch.randn(inputs.k.shape, generator=rng)
    k[..., :half] = 0.0
    k = torch.nn.functional.normalize(k, dim=-1)
    k[-262:-6:2] = torch.cat([direction, torch.zeros_like(direction)])
    state = torch.zeros_like(_state(inputs))
    state[..., :half] = 1e4 * torch.randn(*state.shape[:-1], 1, generator=rng) * direction
    return inputs._replace(
        k=k.bfloat16(),
        state=state,
        A_log=torch.zeros_like(inputs.A_log),
        a=torch.full_like(inputs.a, -200.0),
        dt_bias=torch.zeros_like(inputs.dt_bias),
    )


def _hostile_offsets(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Offsets that fall, are negative and lie beyond the tokens; what counts is the running maximum
    of their values within 0..T."""
    offsets = inputs.cu_seqlens.clone()
    middle = int(offsets[2])
    offsets[0], offsets[1], offsets[3], offsets[4] = -7, middle, middle - 3, 2**31 - 1
    return inputs._replace(cu_seqlens=offsets)


# Cut into segments of 4 to 64 chunks of 64 tokens, the last one is the last 6 tokens.
_ERASED = Case("erased", (4102,), num_q_heads=1, num_v_heads=1)

# Around the chunk sizes 16, 32 and 64; 128 is crossed by `steep_decay` and `late_forget`.
_AROUND = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65)

STRATA: dict[str, Stratum] = {
    "no_sequences": _listed("empty"),
    "zero_length_sequences": _listed("empty-around"),  # pool form, with padding
    "only_zero_length_sequences": _listed("empty-sequences"),
    "stray_tokens": _listed("stray-tokens"),
    "many_of_length_1": Stratum(Case("many-of-length-1", (1,) * 24)),
    "around_chunks": Stratum(Case("around-chunks", _AROUND)),
    "one_long": Stratum(Case("one-long", (256,), gates="slow")),
    "prefixes": Stratum(Case("prefixes", (1, 16, 63, 64, 65)), _prefixes),
    "no_state": _listed("no-state"),
    "decay_1": _listed("keep"),
    "decay_0": _listed("forget"),
    "decays_and_betas_in_turn": _listed("extreme"),
    "steep_decay": Stratum(Case("steep-decay", (129, 17)), _steep),
    "late_forget": Stratum(Case("late-forget", (129, 1)), _late_forget),
    "beta_0": Stratum(Case("beta-0", (70, 3)), _betas(-30.0, -100.0, -math.inf)),
    "beta_1": Stratum(Case("beta-1", (70, 3)), _betas(30.0, 100.0, math.inf)),
    "huge_state": Stratum(Case("huge-state", (66, 1)), _scaled(1e20)),
    "tiny_state": Stratum(Case("tiny-state", (66, 1)), _scaled(1e-20)),
    "erased_state": Stratum(_ERASED, _erased),
    "mixed_states": Stratum(Case("mixed-states", (9, 33, 17, 65)), _scaled(1e20, 1e-20, 1.0, 0.0)),
    "parallel_keys": _listed("parallel-keep"),
    "long_keys": _listed("long-keys"),
    "raw_keys": _listed("raw-keys"),
    "hostile_offsets": Stratum(Case("hostile-offsets", (20, 13, 9, 30, 5)), _hostile_offsets),
    "inplace": _listed("strided-inplace"),
    "pool": _listed("strided-pool"),
    "pool_of_padding": _listed("all-invalid"),
}
