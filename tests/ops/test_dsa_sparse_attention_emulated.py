"""CUDA kernels of dsa_sparse_attention on a CPU (tests/emulator), against the oracle."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastkernels.ops.dsa_sparse_attention.adversarial import STRATA
from fastkernels.ops.dsa_sparse_attention.inputs import CORNER, CORRECTNESS, Case, make_inputs
from fastkernels.ops.dsa_sparse_attention.kernels import (
    CKV,
    KERNELS,
    KPE,
    MAX_TOPK,
    ClusterSplit,
    head_blocks,
)
from fastkernels.ops.dsa_sparse_attention.problem import Inputs
from fastkernels.ops.dsa_sparse_attention.reference import reference
from tests.emulator import Emulator, is_aligned, params_of, shared_folder

pytestmark = pytest.mark.toolchain

KERNEL = {kernel.name: kernel for kernel in KERNELS}
CONFIGS: dict[str, tuple[str, Any]] = {
    "alone": ("cluster_split", ClusterSplit(1, 32, 2)),
    "alone-64": ("cluster_split", ClusterSplit(1, 64, 2)),
    "alone-ahead": ("cluster_split", ClusterSplit(1, 32, 3)),
    "cluster-2": ("cluster_split", ClusterSplit(2, 32, 2)),
    "cluster-4": ("cluster_split", ClusterSplit(4, 32, 4)),
    "cluster-8": ("cluster_split", ClusterSplit(8, 64, 2)),
    "cluster-16": ("cluster_split", ClusterSplit(16, 32, 4)),
}
Emulate = Callable[..., tuple[Tensor, Tensor]]


def values_of(inputs: Inputs, output: Tensor, lse: Tensor) -> Any:
    """The fields of csrc/dsa_sparse_attention/params.h, as binding.cc fills them."""
    x = inputs
    num_pages, page_size, _ = x.ckv_cache.shape
    caches = (x.ckv_cache, x.kpe_cache)
    is_even = all(t.stride(0) == page_size * t.stride(1) for t in caches)
    return params_of("dsa_sparse_attention", {
        "q_nope": x.q_nope, "q_pe": x.q_pe, "ckv": x.ckv_cache, "kpe": x.kpe_cache,
        "indices": x.sparse_indices, "output": output, "lse": lse, "workspace": None,
        "q_nope_stride_t": x.q_nope.stride(0), "q_nope_stride_h": x.q_nope.stride(1),
        "q_pe_stride_t": x.q_pe.stride(0), "q_pe_stride_h": x.q_pe.stride(1),
        "ckv_stride_page": x.ckv_cache.stride(0), "ckv_stride_row": x.ckv_cache.stride(1),
        "kpe_stride_page": x.kpe_cache.stride(0), "kpe_stride_row": x.kpe_cache.stride(1),
        "indices_stride_t": x.sparse_indices.stride(0),
        "output_stride_t": output.stride(0), "output_stride_h": output.stride(1),
        "lse_stride_t": lse.stride(0),
        "num_tokens": x.q_nope.shape[0], "num_heads": x.q_nope.shape[1],
        "topk": x.sparse_indices.shape[1], "page_size": 2**31 - 1 if is_even else page_size,
        "num_rows": num_pages * page_size, "scale_log2": x.sm_scale / math.log(2.0),
        "lse_scale": 1.0 if x.lse_base == 2 else math.log(2.0),
    })  # fmt: skip


@pytest.fixture(scope="module")
def emulate(tmp_path_factory: pytest.TempPathFactory) -> Emulate:
    emulator = Emulator(shared_folder(tmp_path_factory))

    def run(name: str, inputs: Inputs, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Outputs of a config of CONFIGS, over NaN."""
        route, config = CONFIGS[name]
        kernel = KERNEL[route]
        output = torch.full(inputs.q_nope.shape, math.nan, dtype=torch.bfloat16)
        lse = torch.full(inputs.q_nope.shape[:2], math.nan)
        used = (inputs.q_nope, inputs.q_pe, inputs.ckv_cache, inputs.kpe_cache, output)
        variant = "aligned" if is_aligned(used) else "any"
        num_tokens, num_heads = inputs.q_nope.shape[:2]
        blocks = kernel.tile(config)[0] * head_blocks(num_heads) * num_tokens
        emulator.launch(kernel, config, variant, values_of(inputs, output, lse), blocks, seed)
        return output, lse

    return run


def assert_judged(inputs: Inputs, outputs: tuple[Tensor, Tensor]) -> None:
    errors = reference(inputs).judge(outputs)
    assert all(error.ok for error in errors), "; ".join(map(str, errors))


def served(case: Case) -> Case:
    """The case in the widths that kernels serve, with few heads and tokens."""
    return dataclasses.replace(
        case,
        head_dim_ckv=CKV,
        head_dim_kpe=KPE,
        num_qo_heads=min(case.num_qo_heads, 20),
        num_tokens=min(case.num_tokens, 5),
        valid=case.valid[:5],
    )


SERVED = [served(case) for case in (*CORRECTNESS, *CORNER) if case.topk <= MAX_TOPK]


@pytest.mark.parametrize("name", ["alone", "cluster-2", "cluster-8", "cluster-16"])
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_cases(emulate: Emulate, case: Case, name: str) -> None:
    inputs = make_inputs(case)
    assert_judged(inputs, emulate(name, inputs))


@pytest.mark.parametrize("name", ["alone-64", "cluster-16"])
@pytest.mark.parametrize("stratum", STRATA)
def test_strata(emulate: Emulate, stratum: str, name: str) -> None:
    """Inputs that are made to hurt (ops/dsa_sparse_attention/adversarial.py)."""
    inputs, _ = STRATA[stratum].draw(1)
    few = inputs._replace(
        q_nope=inputs.q_nope[:2], q_pe=inputs.q_pe[:2], sparse_indices=inputs.sparse_indices[:2]
    )
    assert_judged(few, emulate(name, few))


MIXED = Case("mixed", 4, seed=31, num_pages=8, topk=512, valid=(512, 0, 1, 97), padding="outside")


@pytest.mark.parametrize("name", CONFIGS)
def test_schedules(emulate: Emulate, name: str) -> None:
    """Whatever order blocks and warps run in: the same bits."""
    inputs = make_inputs(dataclasses.replace(MIXED, num_qo_heads=2))
    first = emulate(name, inputs)
    assert_judged(inputs, first)
    for seed in range(1, 12):
        again = emulate(name, inputs, seed)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def shifted(x: Tensor) -> Tensor:
    """The same values, one element beyond what is aligned."""
    return torch.cat((x.reshape(-1)[:1], x.reshape(-1)))[1:].view(x.shape)


@pytest.mark.parametrize("name", CONFIGS)
def test_memory_that_is_not_aligned(emulate: Emulate, name: str) -> None:
    inputs = make_inputs(dataclasses.replace(MIXED, num_qo_heads=17))
    expected = emulate(name, inputs)
    names = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
    tensors: dict[str, Any] = {name: shifted(getattr(inputs, name)) for name in names}
    got = emulate(name, inputs._replace(**tensors))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("name", ["alone", "cluster-8"])
@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("layout", ["contiguous", "padded"])
def test_pages(emulate: Emulate, name: str, page_size: int, layout: str) -> None:
    """Rows that are evenly spaced across pages, and such that are not."""
    inputs = make_inputs(
        dataclasses.replace(
            MIXED,
            num_pages=-(-600 // page_size),
            page_size=page_size,
            layout=layout,
            num_qo_heads=3,
        )
    )
    assert_judged(inputs, emulate(name, inputs))


@pytest.mark.parametrize("name", ["alone", "cluster-2", "cluster-16"])
def test_nan_stays_where_it_is_named(emulate: Emulate, name: str) -> None:
    """Also in row 0, beside which padding must not be multiplied by zero, and in neighbours of the
    queries that a block of 16 heads has room for."""
    inputs = make_inputs(dataclasses.replace(MIXED, num_qo_heads=5))
    named = torch.arange(200, 240, dtype=torch.int32)
    indices = torch.full_like(inputs.sparse_indices, -1)
    indices[0, 7:47] = named
    indices[1, 100:140] = named.flip(0)
    indices[2, ::13] = named
    clean = emulate(name, inputs._replace(sparse_indices=indices))
    ckv, kpe = inputs.ckv_cache.clone(), inputs.kpe_cache.clone()
    for cache in (ckv, kpe):
        rows = cache.view(-1, cache.shape[-1])
        rows[:200] = math.nan
        rows[240:] = math.nan
    dirty = inputs._replace(ckv_cache=ckv, kpe_cache=kpe, sparse_indices=indices)
    got = emulate(name, dirty)
    assert all(torch.equal(a, b) for a, b in zip(clean, got, strict=True))
    kpe.view(-1, kpe.shape[-1])[0] = 1.0
    ckv.view(-1, ckv.shape[-1])[0] = math.nan
    indices[3, 5] = 0
    output, lse = emulate(name, dirty)
    assert output[3].isnan().all()
    assert lse[3].isnan().all()
    assert torch.equal(output[:3], clean[0][:3])


@pytest.mark.parametrize("name", ["alone", "cluster-8"])
@pytest.mark.parametrize("has_inf", [True, False])
def test_infinite_logits(emulate: Emulate, name: str, has_inf: bool) -> None:
    """NaN, as the softmax is, where all logits are -inf, and where one of them is inf."""
    inputs = make_inputs(
        dataclasses.replace(MIXED, num_qo_heads=2, valid=(40, 2, 0, 300), padding="prefix")
    )
    q_nope, ckv = inputs.q_nope.clone(), inputs.ckv_cache.clone()
    q_nope[0, 0, 0] = -math.inf
    ckv[..., 0] = 1.0
    if has_inf:
        ckv.view(-1, CKV)[inputs.sparse_indices[0, 7], 0] = -1.0
    inputs = inputs._replace(q_nope=q_nope, ckv_cache=ckv)
    output, lse = emulate(name, inputs)
    assert output[0, 0].isnan().all()
    assert bool(lse[0, 0].isnan()) == has_inf
    assert has_inf or lse[0, 0] == -math.inf
    q_nope[0, 0, 0] = 0.0
    clean = emulate(name, inputs)
    assert torch.equal(output[0, 1], clean[0][0, 1])
    assert torch.equal(output[1:], clean[0][1:])


@pytest.mark.parametrize("name", ["alone-64", "alone-ahead", "cluster-8", "cluster-16"])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 31, 32, 33, 64, 65, 255, 256, 257, 511, 512])
def test_every_number_of_keys(emulate: Emulate, name: str, count: int) -> None:
    """Whatever share of a cluster, of a slab and of 16 keys is left over."""
    case = dataclasses.replace(MIXED, num_tokens=1, valid=(count,), padding="scattered", seed=count)
    inputs = make_inputs(dataclasses.replace(case, num_qo_heads=1))
    assert_judged(inputs, emulate(name, inputs))


@pytest.mark.parametrize("name", ["cluster-4", "cluster-8", "cluster-16"])
def test_all_keys_in_one_block(emulate: Emulate, name: str) -> None:
    """Valid entries only where one block of a cluster looks, as many as it can find."""
    num_blocks = KERNEL["cluster_split"].tile(CONFIGS[name][1])[0]
    case = dataclasses.replace(MIXED, num_tokens=1, topk=MAX_TOPK, valid=(MAX_TOPK,), num_pages=40)
    inputs = make_inputs(dataclasses.replace(case, num_qo_heads=1))
    block = torch.arange(MAX_TOPK) // 8 % num_blocks
    inputs.sparse_indices[0, block != 1] = -1
    assert_judged(inputs, emulate(name, inputs))


def test_configs_that_do_not_fit_are_refused() -> None:
    assert ClusterSplit(16, 64, 2).shared_bytes <= 227 * 1024
    with pytest.raises(ValueError, match="stages"):
        ClusterSplit(16, 64, 3)
    with pytest.raises(ValueError, match="cluster"):
        ClusterSplit(3, 64, 2)
