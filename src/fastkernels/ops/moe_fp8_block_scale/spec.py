"""Twin of the contest definition `moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048`,
with what we accept beyond it: other counts of experts and groups, sizes in whole blocks, routing
that was computed elsewhere."""

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

BLOCK = 128
"""Columns that share an activation scale; rows and columns that share a weight scale."""

MODES = ("logits", "precomputed")

_LOGITS_HINT = "rounding router logits changes which experts are chosen"

SPEC = OpSpec(
    name="moe_fp8_block_scale",
    definition="moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048",
    axes=(
        Axis("seq_len", "tokens"),
        Axis("num_experts", "experts of all ranks", value=256, is_open=True, at_least=1),
        Axis("num_local_experts", "experts held here", value=32, is_open=True, at_least=1),
        Axis(
            "hidden_size",
            "width of a token",
            value=7168,
            is_open=True,
            at_least=BLOCK,
            multiple_of=BLOCK,
        ),
        Axis(
            "intermediate_size",
            "width inside an expert",
            value=2048,
            is_open=True,
            at_least=BLOCK,
            multiple_of=BLOCK,
        ),
        Axis(
            "gemm1_out_size", "linear half, gate half", derived=Derived("intermediate_size", mul=2)
        ),
        Axis("num_hidden_blocks", "blocks of 128", derived=Derived("hidden_size", div=BLOCK)),
        Axis(
            "num_intermediate_blocks",
            "blocks of 128",
            derived=Derived("intermediate_size", div=BLOCK),
        ),
        Axis(
            "num_gemm1_out_blocks",
            "blocks of 128",
            derived=Derived("intermediate_size", mul=2, div=BLOCK),
        ),
        Axis("topk", "experts of a token", value=8, is_open=True, at_least=1),
        Axis("num_groups", "groups of experts", value=8, is_open=True, at_least=1),
        Axis("topk_groups", "groups that a token may use", value=4, is_open=True, at_least=1),
    ),
    inputs=(
        TensorSpec(
            "routing_logits",
            ("seq_len", "num_experts"),
            ("float32",),
            optional=True,
            doc="None if topk_ids is given",
            hint=_LOGITS_HINT,
        ),
        TensorSpec("routing_bias", ("num_experts",), ("bfloat16",), optional=True),
        TensorSpec("hidden_states", ("seq_len", "hidden_size"), ("float8_e4m3fn",)),
        TensorSpec(
            "hidden_states_scale",
            ("num_hidden_blocks", "seq_len"),
            ("float32",),
            dense=0,
            doc="block by token; a .t() view of a token by block tensor is read by stride",
        ),
        TensorSpec(
            "gemm1_weights",
            ("num_local_experts", "gemm1_out_size", "hidden_size"),
            ("float8_e4m3fn",),
            doc="first half of the rows linear, second half gate",
        ),
        TensorSpec(
            "gemm1_weights_scale",
            ("num_local_experts", "num_gemm1_out_blocks", "num_hidden_blocks"),
            ("float32",),
        ),
        TensorSpec(
            "gemm2_weights",
            ("num_local_experts", "hidden_size", "intermediate_size"),
            ("float8_e4m3fn",),
        ),
        TensorSpec(
            "gemm2_weights_scale",
            ("num_local_experts", "num_hidden_blocks", "num_intermediate_blocks"),
            ("float32",),
        ),
        ScalarSpec("local_expert_offset", "int", doc="global id of the first local expert"),
        ScalarSpec("routed_scaling_factor", "float", doc="not applied to given topk_weights"),
    ),
    outputs=(TensorSpec("output", ("seq_len", "hidden_size"), ("bfloat16",)),),
    options=(
        ScalarSpec("topk", "int", default=8),
        ScalarSpec("num_groups", "int", default=8),
        ScalarSpec("topk_groups", "int", default=4),
        TensorSpec("topk_ids", ("seq_len", "topk"), ("int32", "int64"), True, 0),
        TensorSpec("topk_weights", ("seq_len", "topk"), ("float32",), True, 0),
        ScalarSpec("deterministic", "bool", default=False),
    ),
    constraints=(
        Constraint(
            "routing_logits",
            "num_experts a multiple of num_groups",
            lambda axes: axes["num_experts"] % axes["num_groups"] == 0,
        ),
        Constraint(
            "topk_groups",
            "topk_groups at most num_groups",
            lambda axes: axes["topk_groups"] <= axes["num_groups"],
        ),
    ),
    tolerances=(
        Tolerance(
            "output",
            "rel_frobenius",
            5e-3,
            official_abs=1.0,
            official_rel=0.3,
            official_share=0.9,
        ),
    ),
    modes=MODES,
)

REQUANTISED = Tolerance("output", "rel_frobenius", 3e-2)
"""Instead of the spec's limit, for a route that requantises the intermediate activations to FP8."""

REQUANTISED_COSINE = 0.9995
"""The least cosine, per token, between such a route's output and the oracle's."""
