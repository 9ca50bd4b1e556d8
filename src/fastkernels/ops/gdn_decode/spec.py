"""Twin of the contest definition `gdn_decode_qk4_v8_d128_k_last`, with what we accept beyond it:
any head counts with num_v_heads a multiple of num_q_heads, any head size, a state pool."""

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

_ONE_TOKEN = "several tokens per decode call are not supported yet; use gdn_prefill"

SPEC = OpSpec(
    name="gdn_decode",
    definition="gdn_decode_qk4_v8_d128_k_last",
    axes=(
        Axis("batch_size", "sequences decoded in this call"),
        Axis("seq_len", "tokens per sequence", value=1, hint=_ONE_TOKEN),
        Axis("num_q_heads", "query heads", value=4, is_open=True, at_least=1),
        Axis("num_k_heads", "key heads", derived=Derived("num_q_heads")),
        Axis("num_v_heads", "value heads", value=8, is_open=True, at_least=1),
        Axis("head_size", "K and V", value=128, is_open=True, at_least=1),
    ),
    inputs=(
        TensorSpec("q", ("batch_size", "seq_len", "num_q_heads", "head_size"), ("bfloat16",)),
        TensorSpec("k", ("batch_size", "seq_len", "num_k_heads", "head_size"), ("bfloat16",)),
        TensorSpec("v", ("batch_size", "seq_len", "num_v_heads", "head_size"), ("bfloat16",)),
        TensorSpec(
            "state",
            ("batch_size", "num_v_heads", "head_size", "head_size"),
            ("float32",),
            optional=True,
            dense=2,
            hint=STATE_HINT,
        ),
        TensorSpec("A_log", ("num_v_heads",), ("float32",)),
        TensorSpec("a", ("batch_size", "seq_len", "num_v_heads"), ("bfloat16",)),
        TensorSpec("dt_bias", ("num_v_heads",), ("float32",)),
        TensorSpec("b", ("batch_size", "seq_len", "num_v_heads"), ("bfloat16",)),
        ScalarSpec("scale", "float", optional=True, doc="None and 0.0 mean head_size ** -0.5"),
    ),
    outputs=(
        TensorSpec("output", ("batch_size", "seq_len", "num_v_heads", "head_size"), ("bfloat16",)),
        TensorSpec(
            "new_state",
            ("batch_size", "num_v_heads", "head_size", "head_size"),
            ("float32",),
            dense=2,
        ),
    ),
    options=(*pool_options("batch_size"), ScalarSpec("inplace", "bool", default=False)),
    constraints=(
        Constraint(
            "v",
            "num_v_heads a multiple of num_q_heads",
            lambda axes: axes["num_v_heads"] % axes["num_q_heads"] == 0,
        ),
    ),
    tolerances=(
        Tolerance("output", "rel_frobenius", 2.5e-3),
        Tolerance("new_state", "rel_frobenius", 1e-5),
    ),
    modes=MODES,
    updated="state",
    update_options=UPDATE_OPTIONS,
)
