"""CUDA kernels of dsa_topk_indexer on a CPU (tests/emulator), against the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastkernels.ops.dsa_topk_indexer.adversarial import STRATA
from fastkernels.ops.dsa_topk_indexer.inputs import (
    CORNER,
    CORRECTNESS,
    E4M3_NAN,
    Case,
    make_inputs,
    pack_pages,
)
from fastkernels.ops.dsa_topk_indexer.kernels import (
    CHUNK,
    KERNELS,
    MAX_HEADS,
    PAGE_KEYS_BYTES,
    ClusterSelect,
    PassThrough,
    TiledSelect,
)
from fastkernels.ops.dsa_topk_indexer.problem import Inputs
from fastkernels.ops.dsa_topk_indexer.reference import reference
from fastkernels.ops.dsa_topk_indexer.spec import PAGE_BYTES, PAGE_KEY_BYTES, PAGE_SIZE
from tests.emulator import Emulator, is_aligned, params_of, shared_folder

pytestmark = pytest.mark.toolchain

KERNEL = {kernel.name: kernel for kernel in KERNELS}
CONFIGS: dict[str, tuple[str, Any]] = {
    "pass": ("pass_through", PassThrough(16)),
    "pass-4": ("pass_through", PassThrough(4)),
    "alone": ("cluster_select", ClusterSelect(1, 8, 2, 256)),
    "cluster-2": ("cluster_select", ClusterSelect(2, 4, 4, 256)),
    "cluster-8": ("cluster_select", ClusterSelect(8, 4, 2, 64)),
    "cluster-16": ("cluster_select", ClusterSelect(16, 4, 4, 16)),
    "tiled-1": ("tiled_select", TiledSelect(1, 8, 2, 16)),
    "tiled-8": ("tiled_select", TiledSelect(8, 4, 6, 8)),
}
Emulate = Callable[..., Tensor]


def values_of(inputs: Inputs, output: Tensor, workspace: Tensor | None) -> Any:
    """The fields of csrc/dsa_topk_indexer/params.h, as binding.cc fills them."""
    x = inputs
    return params_of("dsa_topk_indexer", {
        "q": x.q_index_fp8, "cache": x.k_index_cache_fp8, "weights": x.weights,
        "seq_lens": x.seq_lens, "block_table": x.block_table, "output": output,
        "workspace": workspace,
        "q_stride_b": x.q_index_fp8.stride(0), "q_stride_h": x.q_index_fp8.stride(1),
        "cache_stride_page": x.k_index_cache_fp8.stride(0),
        "weights_stride_b": x.weights.stride(0), "seq_lens_stride_b": x.seq_lens.stride(0),
        "table_stride_b": x.block_table.stride(0), "table_stride_p": x.block_table.stride(1),
        "output_stride_b": output.stride(0), "batch_size": x.q_index_fp8.shape[0],
        "num_heads": x.q_index_fp8.shape[1], "topk": x.topk,
        "max_num_pages": x.block_table.shape[1], "num_pages": x.k_index_cache_fp8.shape[0],
    })  # fmt: skip


@pytest.fixture(scope="module")
def emulate(tmp_path_factory: pytest.TempPathFactory) -> Emulate:
    emulator = Emulator(shared_folder(tmp_path_factory))

    def run(name: str, inputs: Inputs, seed: int = 0, output: Tensor | None = None) -> Tensor:
        """The output of a config of CONFIGS, over junk."""
        route, config = CONFIGS[name]
        kernel = KERNEL[route]
        rows, width = inputs.block_table.shape
        if output is None:
            output = torch.full((rows, inputs.topk), 7 * 10**6, dtype=torch.int32)
        select, score, *_ = kernel.tile(config)
        if select == 0:
            blocks = -(-inputs.topk // CHUNK) * rows
            emulator.launch(kernel, config, "any", values_of(inputs, output, None), blocks, seed)
            return output
        aligned = is_aligned((inputs.q_index_fp8, inputs.k_index_cache_fp8[:, 0, 0]))
        if score == 0:
            variant = "aligned" if aligned else "any"
            values = values_of(inputs, output, None)
            emulator.launch(kernel, config, variant, values, select * rows, seed)
            return output
        workspace = torch.full((rows * width * PAGE_KEYS_BYTES,), 0xEE, dtype=torch.uint8)
        values = values_of(inputs, output, workspace)
        if width > 0:
            variant = "score" if aligned else "score_any"
            emulator.launch(kernel, config, variant, values, -(-width // score) * rows, seed)
        emulator.launch(kernel, config, "select", values, select * rows, seed)
        return output

    return run


def assert_judged(inputs: Inputs, output: Tensor) -> None:
    errors = reference(inputs).judge((output,))
    assert all(error.ok for error in errors), "; ".join(map(str, errors))


def is_served(case: Case, name: str) -> bool:
    route, config = CONFIGS[name]
    select, _, most, _ = KERNEL[route].tile(config)
    if select == 0:
        return case.max_num_pages * PAGE_SIZE <= case.topk
    return case.num_index_heads <= MAX_HEADS and (most == 0 or case.max_num_pages <= most)


def pairs(cases: list[Case], names: list[str]) -> list[Any]:
    return [
        pytest.param(case, name, id=f"{case.name}-{name}")
        for case in cases
        for name in names
        if is_served(case, name)
    ]


# Each costs a second or more; what only fills the machine is left to the GPU's tests.
LISTED = [case for case in (*CORRECTNESS, *CORNER) if case.name not in ("largest", "crowded")]


@pytest.mark.parametrize(
    ("case", "name"),
    [
        *pairs(LISTED, ["pass", "cluster-16", "tiled-8"]),
        *pairs([case for case in LISTED if case.num_index_heads < MAX_HEADS], ["alone"]),
    ],
)
def test_cases(emulate: Emulate, case: Case, name: str) -> None:
    inputs = make_inputs(case)
    assert_judged(inputs, emulate(name, inputs))


STRESSED = ["one_bin", "near_ties", "few_winners", "winners_together", "lone_winner", "no_weight",
            "negative_weights", "scale_extremes", "wide_scores", "page_edges"]  # fmt: skip


@pytest.mark.parametrize("name", ["cluster-8"])
@pytest.mark.parametrize("stratum", STRESSED)
def test_strata(emulate: Emulate, stratum: str, name: str) -> None:
    """Inputs that are made to hurt (ops/dsa_topk_indexer/adversarial.py) and not listed above."""
    inputs, _ = STRATA[stratum].draw(1)
    few = inputs._replace(
        q_index_fp8=inputs.q_index_fp8[:3],
        weights=inputs.weights[:3],
        seq_lens=inputs.seq_lens[:3],
        block_table=inputs.block_table[:3],
    )
    if stratum == "page_edges":
        few = inputs
    assert_judged(few, emulate(name, few))


# ---- scores to the bit --------------------------------------------------------------------------

ONE = 0x38  # 1.0 in e4m3


def scored(scores: Tensor, topk: int) -> Inputs:
    """A row whose scores are these, exactly: one head of weight 1, keys of 1.0 in their first byte
    (or -1.0 and a negative weight, which gives scores below 0), and the scores' sizes as scales."""
    length = scores.numel()
    pages = -(-length // PAGE_SIZE)
    keys = torch.zeros((pages * PAGE_SIZE, 128), dtype=torch.uint8)
    keys[:length, 0] = torch.where(scores.signbit(), 0, ONE).to(torch.uint8)
    keys[:length, 1] = torch.where(scores.signbit(), ONE, 0).to(torch.uint8)
    scales = torch.zeros(pages * PAGE_SIZE)
    scales[:length] = scores.abs()
    q = torch.zeros((1, 2, 128), dtype=torch.uint8)
    q[0, 0, 0] = q[0, 1, 1] = ONE
    cache = pack_pages(keys.view(torch.float8_e4m3fn), scales).view(torch.int8)
    return Inputs(
        q.view(torch.float8_e4m3fn),
        cache.unflatten(1, (PAGE_SIZE, 1, -1)),
        torch.tensor([[1.0, -1.0]]),
        torch.tensor([length], dtype=torch.int32),
        torch.arange(pages, dtype=torch.int32)[None],
        topk,
    )


def by_rule(scores: Tensor, topk: int) -> list[int]:
    """The rule's answer as a set in order of position; NaN above inf, -0.0 as 0.0."""
    best = torch.sort(scores + 0.0, descending=True, stable=True).indices[:topk]
    return best.sort().values.tolist()


def bits(low: int, high: int, count: int, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (count,), generator=rng).int().view(torch.float32)


def mixed(*parts: Tensor) -> Tensor:
    scores = torch.cat(parts)
    return scores[torch.randperm(scores.numel(), generator=torch.Generator().manual_seed(9))]


SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**-126, 1e-45, -1e-45, 3.4e38, -3.4e38, 5.0])
SCORES: dict[str, Tensor] = {
    "constant": torch.full((1500,), 3.0),
    "constant-negative": torch.full((1500,), -3.0),
    "zeros-of-both-signs": torch.tensor([0.0, -0.0]).repeat(750),
    "one-bucket": bits(0x40000000, 0x40200000, 1500, 1),  # agree in the upper 11 bits
    "one-bucket-negative": -bits(0x40000000, 0x40200000, 1500, 2),
    "two-digits-agree": bits(0x40000000, 0x40000400, 1500, 3),  # in the upper 22 bits, many ties
    "last-bit": bits(0x40000000, 0x40000002, 1500, 4),
    "every-exponent": mixed(bits(0, 0x7F800000, 750, 5), -bits(0, 0x7F800000, 750, 6)),
    "special": SPECIAL.repeat(150),
    "few-above-a-plateau": mixed(torch.full((1400,), 1.0), torch.full((100,), 2.0)),
    "threshold-is-a-value": mixed(torch.full((500,), 2.0), torch.full((1000,), 1.0)),
    "rising": torch.arange(1500.0),
    "falling": torch.arange(1500.0).flip(0),
}


@pytest.mark.parametrize("name", ["alone", "cluster-8", "tiled-1"])
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES.keys())
def test_selection(emulate: Emulate, scores: Tensor, name: str) -> None:
    """Exactly the rule's set, whatever bits the scores agree in."""
    for topk in (1, 500, 512, 1499):
        answer = emulate(name, scored(scores, topk))[0]
        assert answer.sort().values.tolist() == by_rule(scores, topk)


@pytest.mark.parametrize("name", ["cluster-2", "cluster-16", "tiled-8"])
def test_nonfinite_scores(emulate: Emulate, name: str) -> None:
    """NaN of scales and keys on top, inf next, -inf last; padding heads change nothing."""
    scores = torch.arange(1.0, 1301.0)
    inputs = scored(scores, 700)
    pages = inputs.k_index_cache_fp8.view(torch.uint8).view(-1, PAGE_BYTES)
    scales = pages[:, PAGE_KEY_BYTES:].view(torch.float32)
    keys = pages[:, :PAGE_KEY_BYTES].view(-1, PAGE_SIZE, 128)
    for position, value in ((3, math.nan), (64, math.inf), (700, math.inf), (1299, math.nan)):
        scales[position // 64, position % 64] = value
    keys[5, 5, 0] = E4M3_NAN
    # One head alone, so that an infinite scale meets no product of 0.
    one = inputs._replace(q_index_fp8=inputs.q_index_fp8[:, :1], weights=inputs.weights[:, :1])
    output = emulate(name, one)
    assert_judged(one, output)
    assert {3, 64, 325, 700, 1299} <= set(output[0].tolist())
    falling = one._replace(weights=-one.weights)
    output = emulate(name, falling)
    assert_judged(falling, output)
    assert {3, 325, 1299} <= set(output[0].tolist())
    assert not {64, 700} & set(output[0].tolist())


# ---- lengths, pages, heads ----------------------------------------------------------------------


@pytest.mark.parametrize("topk", [512, 1024, 2048])
@pytest.mark.parametrize("num_index_heads", [32, 64])
def test_widths(emulate: Emulate, topk: int, num_index_heads: int) -> None:
    lengths = (topk - 1, topk, topk + 1, topk + 63, topk + 64, topk + 65)
    case = Case("widths", lengths, topk // 64 + 2, 160, 5, num_index_heads, topk, tail="junk")
    inputs = make_inputs(case)
    assert_judged(inputs, emulate("cluster-8" if num_index_heads == 32 else "tiled-1", inputs))


@pytest.mark.parametrize("name", ["cluster-2", "cluster-16", "tiled-8"])
@pytest.mark.parametrize("length", [65, 128, 191, 192, 193, 1023, 1024, 1025])
def test_every_share(emulate: Emulate, name: str, length: int) -> None:
    """Blocks of a cluster without pages, with one position, and full ones."""
    case = Case("share", (length,), 20, 64, length, 16, 64, tail="junk", poisoned=True)
    inputs = make_inputs(case)
    assert_judged(inputs, emulate(name, inputs))


@pytest.mark.parametrize("name", ["pass", "pass-4"])
@pytest.mark.parametrize("topk", [2048, 2050, 5000])
def test_rows_that_return_all(emulate: Emulate, name: str, topk: int) -> None:
    """Several blocks a row; pages that are none of the cache's, the last one among them."""
    width = topk // 64
    lengths = (width * 64, width * 64 - 63, width * 64 - 1, 64, 63, 1, 0, 40 * 64)
    for pages in ("distinct", "invalid"):
        inputs = make_inputs(Case("all", lengths, width, 256, 3, 1, topk, pages=pages))
        if pages == "invalid":
            inputs.block_table[0, width - 1] = -1
            inputs.block_table[1, 0] = 256
        assert_judged(inputs, emulate(name, inputs))


def test_outputs_at_any_address(emulate: Emulate) -> None:
    inputs = make_inputs(Case("address", (700, 200), 12, 64, 3, 4, 300))
    for name in ("cluster-2", "tiled-1"):
        expected = emulate(name, inputs)
        room = torch.full((2, 301 + 2), -7, dtype=torch.int32)
        emulate(name, inputs, output=room[:, 1:301])
        assert torch.equal(room[:, 1:301], expected)
        assert bool((room[:, 0] == -7).all())
        assert bool((room[:, 301:] == -7).all())


@pytest.mark.parametrize("name", ["cluster-2", "tiled-1"])
def test_inputs_that_are_not_aligned(emulate: Emulate, name: str) -> None:
    inputs = make_inputs(Case("shifted", (700, 200), 12, 64, 3, 64, 256))
    expected = emulate(name, inputs)

    def shifted(x: Tensor) -> Tensor:
        flat = x.reshape(-1).view(torch.uint8)
        return torch.cat((flat[:1], flat))[1:].view(x.dtype).view(x.shape)

    got = emulate(name, inputs._replace(q_index_fp8=shifted(inputs.q_index_fp8)))
    assert torch.equal(got, expected)
    got = emulate(name, inputs._replace(k_index_cache_fp8=shifted(inputs.k_index_cache_fp8)))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_schedules(emulate: Emulate, name: str) -> None:
    """Whatever order blocks and warps run in, and bulk copies land in: the same entries."""
    if CONFIGS[name][0] == "pass_through":
        case = Case("mixed", (300, 64, 0, 511), 8, 64, 3, 4, 512, pages="invalid")
    else:
        case = Case("mixed", (700, 64, 0, 1100), 20, 64, 3, 4, 512, pages="invalid", tail="junk")
    inputs = make_inputs(case)
    first = emulate(name, inputs)
    assert_judged(inputs, first)
    for seed in range(1, 9):
        assert torch.equal(emulate(name, inputs, seed), first)


def test_a_row_is_the_same_everywhere(emulate: Emulate) -> None:
    """The same set from every route and config; scores do not depend on who makes them."""
    inputs = make_inputs(Case("same", (1800,), 30, 64, 3, 64, 512, keys="crowded"))
    names = [name for name, (route, _) in CONFIGS.items() if route != "pass_through"]
    answers = [emulate(name, inputs).sort(1).values for name in names]
    assert all(torch.equal(answer, answers[0]) for answer in answers)


# ---- configs ------------------------------------------------------------------------------------


def test_configs_that_do_not_fit_are_refused() -> None:
    assert ClusterSelect(16, 8, 2, 640).shared_bytes <= 227 * 1024
    with pytest.raises(ValueError, match="stages"):
        ClusterSelect(16, 8, 8, 640)
    with pytest.raises(ValueError, match="cluster"):
        ClusterSelect(3, 4, 4, 16)
    with pytest.raises(ValueError, match="pages"):
        TiledSelect(8, 4, 4, 12)
    with pytest.raises(ValueError, match="warps"):
        PassThrough(3)
