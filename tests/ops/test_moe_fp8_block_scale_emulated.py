"""CUDA kernels of moe_fp8_block_scale on a CPU (tests/emulator), against the oracle. What the
launches around the products compute: test_moe_fp8_block_scale_triton.py; here it is put in."""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastkernels.core import toolchain
from fastkernels.ops.moe_fp8_block_scale.adversarial import STRATA
from fastkernels.ops.moe_fp8_block_scale.inputs import (
    CORNER,
    CORRECTNESS,
    ROUTED,
    SMALL,
    Case,
    make_inputs,
)
from fastkernels.ops.moe_fp8_block_scale.kernels import (
    KERNELS,
    LONG_CHUNK,
    ONE_CODE_LEAST,
    WgmmaGrouped,
    regions,
    rounded,
    workspace_bytes,
)
from fastkernels.ops.moe_fp8_block_scale.problem import Inputs
from fastkernels.ops.moe_fp8_block_scale.reference import activations, gated, reference
from fastkernels.ops.moe_fp8_block_scale.routing import route_tokens
from tests.emulator import Emulator, is_aligned, params_of, shared_folder

pytestmark = pytest.mark.toolchain

KERNEL = next(kernel for kernel in KERNELS if kernel.name == "wgmma_grouped")
CONFIGS = {
    "alone": WgmmaGrouped(128, 1, 2),
    "pair": WgmmaGrouped(128, 2, 2),
    "small": WgmmaGrouped(64, 1, 2),
    "small-pair": WgmmaGrouped(64, 2, 2),
    "one-code": WgmmaGrouped(128, 2, 1),
}
PRODUCTS = ("gemm1", "gemm2")
Emulate = Callable[..., "Result"]


# ---- what stands around the products ------------------------------------------------------------


class Workspace:
    """Full of NaN, with what `route` and `list` leave in it."""

    def __init__(self, inputs: Inputs) -> None:
        x = inputs
        num_tokens, hidden_size = x.hidden_states.shape
        self.axes = {
            "seq_len": num_tokens, "topk": x.topk, "hidden_size": hidden_size,
            "intermediate_size": x.gemm2_weights.shape[2],
        }  # fmt: skip
        self.size = workspace_bytes(self.axes, LONG_CHUNK, 2)
        self.memory = torch.full((self.size // 4 + 1024,), math.nan)
        ids, weights = x.topk_ids, x.topk_weights
        if ids is None:
            assert x.routing_logits is not None
            assert x.routing_bias is not None
            ids, weights = route_tokens(
                x.routing_logits, x.routing_bias, topk=x.topk, num_groups=x.num_groups,
                topk_groups=x.topk_groups, routed_scaling_factor=x.routed_scaling_factor,
            )  # fmt: skip
        assert weights is not None
        num_local = x.gemm1_weights.shape[0]
        local = ids.long() - x.local_expert_offset
        is_local = (ids >= 0) & (local >= 0) & (local < num_local)
        self.expert = torch.where(is_local, local, -1).flatten()
        self.order = self.expert.argsort(stable=True)[int((self.expert < 0).sum()) :]
        counts = self.expert[self.expert >= 0].bincount(minlength=num_local)
        self.put("slot_weight", weights.flatten().float())
        self.put("row_slot", self.order.int())
        self.put("counts", counts.int())

    def region(self, name: str) -> Tensor:
        at = 0
        for each, size in regions(self.axes, LONG_CHUNK, 2).items():
            if each == name:
                return self.memory[at // 4 : (at + size) // 4]
            at += rounded(size)
        raise KeyError(name)

    def put(self, name: str, values: Tensor) -> None:
        self.region(name)[: values.numel()].view(values.dtype).copy_(values)

    @property
    def tokens(self) -> Tensor:
        """Of each row."""
        return self.order // self.axes["topk"]

    def intermediates(self, codes: int) -> Tensor:
        """[rows, intermediate_size] as gemm2 takes them."""
        size, rows = self.axes["intermediate_size"], self.order.numel()
        coded = self.region("codes").view(torch.float8_e4m3fn).view(-1, 2, size)
        scales = self.region("scales")[: rows * (size // 128)].view(rows, size // 128)
        values = coded[:rows, :codes].float().sum(1)
        return values * scales.repeat_interleave(128, 1)

    def combined(self) -> Tensor:
        """What `combine` makes of the partial outputs."""
        hidden_size = self.axes["hidden_size"]
        partials = self.region("partials").view(torch.bfloat16).view(-1, hidden_size)
        output = torch.zeros(self.axes["seq_len"], hidden_size)
        output.index_add_(0, self.tokens, partials[: self.order.numel()].float())
        return output.bfloat16()


def product_of(inputs: Inputs, workspace: Workspace, product: str) -> tuple[str, Any]:
    """The variant and its parameters, as binding.cc fills them."""
    x = inputs
    num_tokens, hidden_size = x.hidden_states.shape
    num_local, _, intermediate_size = x.gemm2_weights.shape
    nothing: dict[str, Any] = dict.fromkeys(("logits", "bias", "topk_ids", "topk_weights"))
    strides = ("logits_stride_t", "ids_stride_t", "ids_stride_k", "weights_stride_t",
               "weights_stride_k")  # fmt: skip
    params = params_of("moe_fp8_block_scale", {
        **nothing, "x": x.hidden_states, "x_scale": x.hidden_states_scale,
        "w13": x.gemm1_weights, "w13_scale": x.gemm1_weights_scale,
        "w2": x.gemm2_weights, "w2_scale": x.gemm2_weights_scale, "output": None,
        "workspace": workspace.memory, **dict.fromkeys(strides, 0),
        "x_stride_t": x.hidden_states.stride(0),
        "x_scale_stride_b": x.hidden_states_scale.stride(0),
        "x_scale_stride_t": x.hidden_states_scale.stride(1),
        "w13_stride_e": x.gemm1_weights.stride(0), "w13_stride_n": x.gemm1_weights.stride(1),
        "w13_scale_stride_e": x.gemm1_weights_scale.stride(0),
        "w13_scale_stride_n": x.gemm1_weights_scale.stride(1),
        "w2_stride_e": x.gemm2_weights.stride(0), "w2_stride_n": x.gemm2_weights.stride(1),
        "w2_scale_stride_e": x.gemm2_weights_scale.stride(0),
        "w2_scale_stride_n": x.gemm2_weights_scale.stride(1),
        "output_stride_t": 0, "num_tokens": num_tokens, "slots": num_tokens * x.topk,
        "num_experts": 0, "num_local": num_local, "hidden_size": hidden_size,
        "intermediate_size": intermediate_size, "topk": x.topk, "num_groups": 0,
        "topk_groups": 0, "offset": 0, "id_words": 0, "factor": 0.0,
    })  # fmt: skip
    weights = x.gemm1_weights if product == "gemm1" else x.gemm2_weights
    given = (weights, x.hidden_states) if product == "gemm1" else (weights,)
    stride_e, stride_n, _ = weights.stride()
    expert_rows = stride_e // stride_n if num_local > 1 else 0
    is_matrix = num_local == 1 or stride_e % stride_n == 0
    rows = (num_local - 1) * expert_rows + weights.shape[1]
    # The twin's `Matrix`.
    matrix = (weights.data_ptr(), weights.shape[2], rows, stride_n, 128, 64)
    pointers = ("slot_weight", "row_slot", "counts", "scales", "codes", "partials")
    kind: Any = type("ProductParams", (ctypes.Structure,), {
        "_fields_": [("weights", ctypes.c_int64 * 16), ("expert_rows", ctypes.c_int32),
                     *((name, ctypes.c_void_p) for name in pointers), ("params", type(params))],
    })  # fmt: skip
    memory = torch.zeros(ctypes.sizeof(kind) + 64, dtype=torch.uint8)  # which 64 bytes align
    values = kind.from_buffer(memory.numpy())
    values.weights[: len(matrix)] = matrix
    values.expert_rows, values.params = expert_rows, params
    for name in pointers:
        setattr(values, name, workspace.region(name).data_ptr())
    return product if is_aligned(given) and is_matrix else f"{product}_any", values


class Result(Workspace):
    variants: tuple[str, ...] = ()


@pytest.fixture(scope="module")
def emulate(tmp_path_factory: pytest.TempPathFactory) -> Emulate:
    emulator = Emulator(shared_folder(tmp_path_factory))

    def run(
        inputs: Inputs, name: str, seed: int = 0, clusters: int = 3, products: Any = PRODUCTS
    ) -> Result:
        config = CONFIGS[name]
        result = Result(inputs)
        for product in products:
            variant, values = product_of(inputs, result, product)
            result.variants += (variant,)
            emulator.launch(KERNEL, config, variant, values, clusters * config.cluster, seed)
        assert result.memory[result.size // 4 :].isnan().all(), "wrote beyond the workspace"
        return result

    return run


def assert_judged(inputs: Inputs, result: Result, requantised: bool = False) -> None:
    errors = reference(inputs).judge((result.combined(),), requantised)
    assert all(error.ok for error in errors), "; ".join(map(str, errors))


def given_ids(counts: list[int], seed: int = 1, **fields: Any) -> Inputs:
    """Inputs in which expert e has `counts[e]` tokens, each token one of them."""
    total = sum(counts)
    case = Case("given", total, seed=seed, mode="precomputed", **{**SMALL, "topk": 1, **fields})
    case = replace(case, num_local_experts=len(counts))
    inputs = make_inputs(case)
    rng = torch.Generator().manual_seed(seed)
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ids = ids[torch.randperm(total, generator=rng)].int()[:, None]
    return inputs._replace(topk_ids=ids.contiguous(), topk_weights=torch.rand(total, 1) + 0.5)


# ---- the products -------------------------------------------------------------------------------

COUNTS: dict[str, list[int]] = {
    "one": [1], "a-unit": [64], "a-unit-and-one": [65], "a-tile": [128], "a-pair-less-one": [255],
    "a-pair-and-one": [257], "gaps": [0, 0, 70, 0, 130, 0], "many": [3, 1, 64, 190, 0, 33],
}  # fmt: skip


@pytest.mark.parametrize("name", ["alone", "pair", "small", "small-pair"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_first_product(emulate: Emulate, counts: list[int], name: str) -> None:
    """C, to 8 bits of it, a largest value of a scale to the code."""
    for seed in range(2):
        inputs = given_ids(counts, seed, intermediate_size=256)
        result = emulate(inputs, name, seed, products=["gemm1"])
        x = activations(inputs, torch.arange(inputs.hidden_states.shape[0]))[result.tokens]
        scale = inputs.gemm1_weights_scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
        weights = inputs.gemm1_weights.float() * scale
        expert = result.expert[result.order]
        want = gated(torch.einsum("rh,rnh->rn", x.float(), weights[expert]))
        got = result.intermediates(codes=2)
        error = (got - want).norm(dim=1) / want.norm(dim=1)
        assert error.max() < 1.2e-3
        assert error.square().mean().sqrt() < 8e-4
        blocks, found = want.unflatten(1, (-1, 128)), got.unflatten(1, (-1, 128))
        largest = blocks.abs().argmax(2, keepdim=True)
        torch.testing.assert_close(
            found.gather(2, largest), blocks.gather(2, largest), rtol=1e-5, atol=0
        )


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "one-code"])
@pytest.mark.parametrize("counts", ["one", "a-pair-and-one", "gaps"])
def test_both_products(emulate: Emulate, counts: str, name: str) -> None:
    inputs = given_ids(COUNTS[counts], 5, hidden_size=384)  # half a tile of the second product
    result = emulate(inputs, name, 1)
    assert result.variants == PRODUCTS
    assert_judged(inputs, result)


def test_one_code_needs_the_looser_limits(emulate: Emulate) -> None:
    size = {"hidden_size": 384, "intermediate_size": ONE_CODE_LEAST}
    inputs = make_inputs(Case("one-code", 40, seed=3, **(SMALL | size)))
    result = emulate(inputs, "one-code")
    assert_judged(inputs, result, requantised=True)
    errors = reference(inputs).judge((result.combined(),))
    assert not all(error.ok for error in errors)


LISTED = [
    case
    for case in (*CORRECTNESS, *CORNER)
    if case.name not in ("largest", "empty", "routed-t128", "every-expert-local")
]


@pytest.mark.parametrize("case", LISTED, ids=lambda case: case.name)
def test_cases(emulate: Emulate, case: Case) -> None:
    inputs = make_inputs(case)
    assert_judged(inputs, emulate(inputs, "pair", case.seed))


@pytest.mark.parametrize("stratum", ["nan_tokens", "saturated", "scale_extremes", "negative_zeros"])
def test_strata(emulate: Emulate, stratum: str) -> None:
    inputs, _ = STRATA[stratum].draw(1)
    assert_judged(inputs, emulate(inputs, "pair", 1))


@pytest.mark.parametrize("name", ["alone", "pair"])
def test_any_order_gives_the_same_bits(emulate: Emulate, name: str) -> None:
    """Blocks, warps and copies in other orders, other numbers of blocks."""
    inputs = make_inputs(Case("orders", 90, seed=2, logits="all_local", **SMALL))
    wanted = emulate(inputs, name)
    for seed in range(1, 6):
        result = emulate(inputs, name, seed, clusters=seed)
        for region in ("codes", "scales", "partials"):
            same = result.region(region).view(torch.int32) == wanted.region(region).view(
                torch.int32
            )
            assert same.all(), region


def test_a_token_is_the_same_among_others(emulate: Emulate) -> None:
    """C73: whatever tile, place in it and block of a cluster."""
    inputs = make_inputs(Case("repeated", 300, seed=4, logits="repeated", **SMALL))
    for name in ("alone", "pair"):
        output = emulate(inputs, name).combined()
        assert torch.equal(output, output[:1].expand_as(output))


def test_memory_that_is_not_aligned(emulate: Emulate) -> None:
    """Byte by byte, and the same bits."""
    inputs = make_inputs(Case("bytes", 70, seed=6, **{**SMALL, "hidden_size": 384}))
    wanted = emulate(inputs, "pair").combined()
    for names in (("hidden_states",), ("gemm1_weights",), ("gemm2_weights",),
                  ("hidden_states", "gemm1_weights", "gemm2_weights")):  # fmt: skip
        changed: dict[str, Any] = {}
        for name in names:
            x = getattr(inputs, name)
            room = torch.empty(x.numel() + 1, dtype=torch.uint8)
            changed[name] = room[1:].view(x.dtype).view(x.shape)
            changed[name].view(torch.uint8).copy_(x.view(torch.uint8))
        for config in ("alone", "pair"):
            result = emulate(inputs._replace(**changed), config)
            assert any(variant.endswith("_any") for variant in result.variants)
            assert torch.equal(result.combined(), wanted)


def test_experts_that_are_no_matrix(emulate: Emulate) -> None:
    """An expert that starts within another one's row, and one that all others are."""
    inputs = make_inputs(Case("experts", 30, seed=7, **SMALL))
    want = emulate(inputs, "pair").combined()
    x = inputs.gemm2_weights
    room = torch.zeros(x.shape[0], x[0].numel() + 16, dtype=torch.uint8)
    shifted = room[:, : x[0].numel()].view(x.dtype).view(x.shape)
    shifted.view(torch.uint8).copy_(x.view(torch.uint8))
    result = emulate(inputs._replace(gemm2_weights=shifted), "pair")
    assert result.variants == ("gemm1", "gemm2_any")
    assert torch.equal(result.combined(), want)
    same = inputs._replace(gemm2_weights=x[:1].expand_as(x))
    result = emulate(same, "pair")
    assert result.variants == PRODUCTS
    assert_judged(same, result)


def test_no_rows(emulate: Emulate) -> None:
    inputs = make_inputs(Case("none", 8, seed=5, logits="none_local", **ROUTED))
    result = emulate(inputs, "pair")
    assert result.region("partials").isnan().all()
    assert not result.combined().any()


# ---- machine code -------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS.values(), ids=str)
@pytest.mark.parametrize("variant", ["gemm1", "gemm1_any", "gemm2", "gemm2_any"])
def test_machine_code(config: WgmmaGrouped, variant: str, tmp_path: Path) -> None:
    """No spills, no product that waits for another one by the compiler's doing, registers that the
    other warps leave."""
    binary = toolchain.compile_kernel(KERNEL, config, "sm90", variant)
    assert binary.threads == config.threads
    assert binary.shared_bytes == config.shared_bytes(variant)
    triton = pytest.importorskip("triton")
    file = tmp_path / "kernel.cubin"
    file.write_bytes(binary.cubin)
    tools = triton.knobs.nvidia
    usage = subprocess.run(
        [tools.cuobjdump.path, "-res-usage", file], capture_output=True, text=True, check=True
    )
    # The registers of a block are those that its warps may take from one another.
    assert " REG:168 STACK:0 " in usage.stdout, usage.stdout
    code = subprocess.run(
        [tools.cuobjdump.path, "-sass", file], capture_output=True, text=True, check=True
    ).stdout
    parts = config.codes if variant.startswith("gemm2") else 1
    products = re.findall(r"QGMMA\.64x128x32\.F32\.E4M3\.E4M3 .*?;", code)
    assert len(products) == 4 * parts * config.tokens // 64
    assert sum("gsb0" in product for product in products) == config.tokens // 64
    assert code.count("WARPGROUP.DEPBAR") == config.tokens // 64
    assert ("UTMALDG.2D" in code) == ("any" not in variant)
    assert ("MULTICAST" in code) == (config.cluster > 1 and "any" not in variant)
