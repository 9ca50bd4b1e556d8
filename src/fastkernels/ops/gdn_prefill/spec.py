"""Twin of the contest definition `gdn_prefill_qk4_v8_d128_k_last`, with what we accept beyond it:
any head counts with num_v_heads a multiple of num_q_heads, any head size, int32 offsets, a state
pool.
"""

from __future__ import annotations

from fastkernels.core.spec import (
    Axis,
    Constraint,
    Derived,
    OpSpec,
    ScalarSpec,
    TensorSpec,
    Tolerance,
)
from fastkernels.ops._shared.gdn import MODES, STATE_HINT, UPDATE_OPTIONS, pool_options

_NOT_BATCHED = "sequences are concatenated along the first axis and cut by cu_seqlens"
_OFFSETS = (
    "num_seqs + 1 offsets on the device of q; num_seqs is that of state, or of read_indices in the "
    "pool form"
)
_STATE = ("num_seqs", "num_v_heads", "head_size", "head_size")

SPEC = OpSpec(
    name="gdn_prefill",
    definition="gdn_prefill_qk4_v8_d128_k_last",
    axes=(
        Axis("total_seq_len", "tokens of all sequences together"),
        Axis("num_seqs", "sequences, empty ones counted"),
        Axis("num_q_heads", "query heads", value=4, is_open=True, at_least=1),
        Axis("num_k_heads", "key heads", derived=Derived("num_q_heads")),
        Axis("num_v_heads", "value heads", value=8, is_open=True, at_least=1),
        Axis("head_size", "K and V", value=128, is_open=True, at_least=1),
        Axis("len_cu_seqlens", "offsets", derived=Derived("num_seqs", add=1)),
    ),
    inputs=(
        TensorSpec(
            "q", ("total_seq_len", "num_q_heads", "head_size"), ("bfloat16",), hint=_NOT_BATCHED
        ),
        TensorSpec("k", ("total_seq_len", "num_k_heads", "head_size"), ("bfloat16",)),
        TensorSpec("v", ("total_seq_len", "num_v_heads", "head_size"), ("bfloat16",)),
        TensorSpec("state", _STATE, ("float32",), optional=True, dense=2, hint=STATE_HINT),
        TensorSpec("A_log", ("num_v_heads",), ("float32",)),
        TensorSpec("a", ("total_seq_len", "num_v_heads"), ("bfloat16",)),
        TensorSpec("dt_bias", ("num_v_heads",), ("float32",)),
        TensorSpec("b", ("total_seq_len", "num_v_heads"), ("bfloat16",)),
        TensorSpec("cu_seqlens", ("len_cu_seqlens",), ("int64", "int32"), hint=_OFFSETS),
        ScalarSpec("scale", "float", optional=True, doc="None and 0.0 mean head_size ** -0.5"),
    ),
    outputs=(
        TensorSpec("output", ("total_seq_len", "num_v_heads", "head_size"), ("bfloat16",)),
        TensorSpec("new_state", _STATE, ("float32",), dense=2),
    ),
    options=(*pool_options("num_seqs"), ScalarSpec("inplace", "bool", default=False)),
    constraints=(
        Constraint(
            "v",
            "num_v_heads a multiple of num_q_heads",
            lambda axes: axes["num_v_heads"] % axes["num_q_heads"] == 0,
        ),
    ),
    tolerances=(
        Tolerance("output", "rel_frobenius", 8e-3),
        Tolerance("new_state", "rel_frobenius", 5e-3),
    ),
    modes=MODES,
    updated="state",
    update_options=UPDATE_OPTIONS,
)
