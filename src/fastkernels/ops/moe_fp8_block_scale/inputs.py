"""Seeded inputs of moe_fp8_block_scale, and the lists of cases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from fastkernels.core.table import Table, gap_values
from fastkernels.ops._shared.cases import contest_seed, contest_workloads, generator, move
from fastkernels.ops.moe_fp8_block_scale.problem import Inputs
from fastkernels.ops.moe_fp8_block_scale.routing import route_tokens
from fastkernels.ops.moe_fp8_block_scale.spec import BLOCK

E4M3_MAX = 448.0
NAN_CODE = 0x7F
WEIGHT_STD = 107.0  # of the e4m3 values: a block's largest of 16384 normals, 4.2 sigma, gets 448
SCALE_RANGE = 4.0  # largest by smallest weight scale of a tensor
POOL = 1 << 24
PAD = 64  # elements of padding in the strided layout


@dataclass(frozen=True)
class Case:
    """Sizes and what shapes the contents.

    mode: logits; precomputed (topk_ids and topk_weights as computed from the logits).
    logits: normal; negative (-6..-5); vanishing (rows of equal logits, -40 to -200); ties
        (integers); none_local (no token uses a local expert); one_expert (every token uses the
        first local expert and no other one); all_local (only local ones, where they are enough);
        repeated (one token repeated); large_bias (logits near -17, bias 12); nonfinite (NaN and
        infinities among normal ones).
    weights: normal; tiny (gemm1 scales 1e-4 and 1e-8); poisoned (NaN in all experts but the first).
    layout: contiguous; strided (transposed scale, padded rows and experts, NaN between them).
    ids: int32; int64; hostile (padding, ids beyond every expert, one id twice in a row).
    weight_seed: weights come from a generator of their own, so that cases can share them.
    """

    name: str
    seq_len: int
    seed: int = 0
    num_experts: int = 256
    num_local_experts: int = 32
    hidden_size: int = 7168
    intermediate_size: int = 2048
    topk: int = 8
    num_groups: int = 8
    topk_groups: int = 4
    local_expert_offset: int = 0
    routed_scaling_factor: float = 2.5
    mode: str = "logits"
    logits: str = "normal"
    weights: str = "normal"
    layout: str = "contiguous"
    ids: str = "int32"
    deterministic: bool = False
    weight_seed: int = 0
    source: str = ""

    @property
    def axes(self) -> dict[str, int]:
        return {
            "seq_len": self.seq_len,
            "num_experts": self.num_experts,
            "num_local_experts": self.num_local_experts,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "topk": self.topk,
            "num_groups": self.num_groups,
            "topk_groups": self.topk_groups,
        }


class Weights(NamedTuple):
    """The four weight arguments, by their public names."""

    gemm1_weights: torch.Tensor
    gemm1_weights_scale: torch.Tensor
    gemm2_weights: torch.Tensor
    gemm2_weights_scale: torch.Tensor


def make_inputs(
    case: Case, device: torch.device | str = "cpu", weights: Weights | None = None
) -> Inputs:
    """Inputs of a case, drawn on the CPU in the definition's order, then moved to `device`.

    Full-size weights are 1.4 GB. Cases that agree in geometry, `weights`, `layout` and
    `weight_seed` can share them: build them once with `make_weights` and pass them.
    """
    rng = generator(case.seed)
    logits, bias = draw_routing(rng, case)
    hidden_states, hidden_states_scale = _draw_activations(rng, case)
    if case.logits == "repeated":
        hidden_states = _take_rows(hidden_states, torch.zeros(case.seq_len, dtype=torch.int64))
        hidden_states_scale = hidden_states_scale[:, :1].expand(-1, case.seq_len).contiguous()
    ids = topk_weights = None
    if case.mode == "precomputed":
        ids, topk_weights = _precompute(case, logits, bias)
    if case.layout == "strided":
        logits, hidden_states = _pad_rows(logits), _pad_rows(hidden_states)
        hidden_states_scale = hidden_states_scale.t().contiguous().t()
        if ids is not None and topk_weights is not None:
            ids, topk_weights = ids.t().contiguous().t(), _pad_rows(topk_weights)
    given = case.mode == "precomputed"
    inputs = Inputs(
        None if given else logits,
        None if given else bias,
        hidden_states,
        hidden_states_scale,
        *(make_weights(case) if weights is None else weights),
        case.local_expert_offset,
        case.routed_scaling_factor,
        case.topk,
        case.num_groups,
        case.topk_groups,
        ids,
        topk_weights,
        case.deterministic,
    )
    tensors: dict[str, Any] = {
        name: move(value, device)
        for name, value in inputs._asdict().items()
        if isinstance(value, torch.Tensor)
    }
    return inputs._replace(**tensors)


def draw_routing(rng: torch.Generator, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, num_experts] float32 and bias [num_experts] bfloat16."""
    T, E = case.seq_len, case.num_experts
    logits = torch.randn(T, E, generator=rng)
    bias = (0.02 * torch.randn(E, generator=rng)).bfloat16()
    expert = torch.arange(E)
    is_local = (expert >= case.local_expert_offset) & (
        expert < case.local_expert_offset + case.num_local_experts
    )
    if case.logits == "negative":
        logits = -5.0 - torch.rand(T, E, generator=rng)
    elif case.logits == "vanishing":
        rows = torch.tensor([-40.0, -46.0, -48.0, -60.0, -89.0, -200.0])
        logits = rows[torch.arange(T) % len(rows), None].expand(T, E).contiguous()
    elif case.logits == "ties":
        logits, bias = logits.round(), (bias.float() * 25).round().div(4).bfloat16()
    elif case.logits == "none_local":
        logits[:, is_local] -= 50.0
    elif case.logits == "one_expert":
        logits[:, is_local & (expert != case.local_expert_offset)] -= 50.0
        bias[case.local_expert_offset] = 8.0
    elif case.logits == "all_local":
        logits[:, ~is_local] -= 50.0
    elif case.logits == "repeated":
        logits = logits[:1].expand(T, E).contiguous()
    elif case.logits == "large_bias":
        logits, bias = -17.0 + logits.clamp(-1.0, 1.0), torch.full((E,), 12.0).bfloat16()
    elif case.logits == "nonfinite":
        for i, value in enumerate((math.nan, math.inf, -math.inf)):
            logits[:, i::5] = torch.where(logits[:, i::5] > 0.5, value, logits[:, i::5])
    elif case.logits != "normal":
        raise ValueError(f"unknown logits {case.logits!r}")
    return logits, bias


def make_weights(case: Case) -> Weights:
    """Weights of a case, on the CPU, of variance 1 / fan_in after dequantisation.

    Rows are windows at random places of one pool of normal values: 1.4 GB in about 2 s.
    """
    rng = generator(case.weight_seed)
    shape13 = (case.num_local_experts, 2 * case.intermediate_size, case.hidden_size)
    shape2 = (case.num_local_experts, case.hidden_size, case.intermediate_size)
    w13, w2 = _draw_codes(rng, *shape13), _draw_codes(rng, *shape2)
    s13, s2 = _draw_scales(rng, *shape13), _draw_scales(rng, *shape2)
    if case.weights == "tiny":
        s13 = torch.where(torch.rand(s13.shape, generator=rng) < 0.5, 1e-4, 1e-8)
    elif case.weights == "poisoned":
        for codes, scales in ((w13, s13), (w2, s2)):
            codes.view(torch.uint8)[1:], scales[1:] = NAN_CODE, math.nan
    elif case.weights != "normal":
        raise ValueError(f"unknown weights {case.weights!r}")
    if case.layout == "strided":
        w13, w2, s13, s2 = (_pad_rows(t) for t in (w13, w2, s13, s2))
    return Weights(w13, s13, w2, s2)


def _draw_codes(rng: torch.Generator, experts: int, rows: int, columns: int) -> torch.Tensor:
    """[experts, rows, columns] float8_e4m3fn."""
    size = min(POOL, experts * rows * columns)
    pool = (WEIGHT_STD * torch.randn(size + columns, generator=rng)).clamp_(-E4M3_MAX, E4M3_MAX)
    codes = pool.to(torch.float8_e4m3fn).view(torch.uint8)
    start = torch.randint(0, size, (experts * rows,), generator=rng)
    windows = codes.unfold(0, columns, 1).index_select(0, start)
    return windows.view(torch.float8_e4m3fn).view(experts, rows, columns)


def _draw_scales(rng: torch.Generator, experts: int, rows: int, columns: int) -> torch.Tensor:
    """[experts, rows / 128, columns / 128] float32, log-uniform."""
    shape = (experts, rows // BLOCK, columns // BLOCK)
    spread = SCALE_RANGE ** (torch.rand(shape, generator=rng) - 0.5)
    mean_square = (SCALE_RANGE - 1 / SCALE_RANGE) / (2 * math.log(SCALE_RANGE))
    return spread / (WEIGHT_STD * math.sqrt(mean_square * columns))


def _draw_activations(rng: torch.Generator, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal values, quantised per token and block: codes [T, H] and scales [H / 128, T]."""
    x = torch.randn(case.seq_len, case.hidden_size // BLOCK, BLOCK, generator=rng)
    scale = x.abs().amax(-1) / E4M3_MAX
    codes = x.div_(scale[..., None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(1), scale.t().contiguous()


def _precompute(
    case: Case, logits: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    ids, weights = route_tokens(
        logits,
        bias,
        topk=case.topk,
        num_groups=case.num_groups,
        topk_groups=case.topk_groups,
        routed_scaling_factor=case.routed_scaling_factor,
    )
    if case.ids == "hostile":
        ids[:, 0] = case.local_expert_offset  # with [:, 1] the same local expert twice
        ids[:, 1] = torch.where(torch.arange(case.seq_len) % 2 == 0, ids[:, 0], -1)
        ids[:, 2] = torch.iinfo(torch.int32).max
        weights[:, 2] = math.nan
    return ids.to(torch.int64 if case.ids == "int64" else torch.int32), weights


def _take_rows(codes: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8).index_select(0, rows).view(torch.float8_e4m3fn)


def _pad_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same contents with PAD NaN elements after every step of the first axis."""
    inner = tensor.shape[1:].numel()
    buffer = tensor.new_empty((tensor.shape[0], inner + PAD))
    if tensor.dtype == torch.float8_e4m3fn:
        buffer.view(torch.uint8).fill_(NAN_CODE)
    else:
        buffer.fill_(math.nan)
    view = buffer[:, :inner].unflatten(1, tensor.shape[1:])
    view.copy_(tensor)
    return view


# ---- cases --------------------------------------------------------------------------------------

# 8 groups of 4 experts; two GEMM1 row blocks, so that the halves have scales of their own.
SMALL: dict[str, Any] = {
    "num_experts": 32,
    "num_local_experts": 8,
    "hidden_size": 256,
    "intermediate_size": 128,
    "topk": 4,
}
# The definition's routing on small matrices.
ROUTED: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 128}

CORRECTNESS = (
    Case("small-t1", 1, seed=5, **SMALL),
    *(Case(f"small-t{T}", T, seed=T, **SMALL) for T in (2, 3, 5, 7, 16, 17, 64, 130)),
    Case("routed-t1", 1, seed=2, **ROUTED),
    *(Case(f"routed-t{T}", T, seed=T, **ROUTED) for T in (7, 33, 128)),
    Case("wide", 9, seed=1, **{**SMALL, "hidden_size": 640, "intermediate_size": 384}),
    Case("offset", 21, seed=2, local_expert_offset=96, **ROUTED),
    Case("precomputed", 21, seed=3, mode="precomputed", **SMALL),
    Case("precomputed-int64", 21, seed=4, mode="precomputed", ids="int64", **ROUTED),
    Case("one-group", 12, seed=5, **{**SMALL, "num_groups": 1, "topk_groups": 1}),
    Case("single-expert-groups", 12, seed=6, **{**SMALL, "num_groups": 32, "topk_groups": 8}),
    Case("deterministic", 40, seed=7, deterministic=True, **SMALL),
)

CORNER = (
    Case("empty", 0, **SMALL),
    Case("one", 1, seed=3, **ROUTED),
    Case("tail", 37, seed=2, **ROUTED),
    Case("strided", 13, seed=3, layout="strided", **SMALL),
    Case("strided-precomputed", 13, seed=4, mode="precomputed", layout="strided", **SMALL),
    Case("none-local", 8, seed=5, logits="none_local", **ROUTED),
    Case("largest", 700, seed=6, **SMALL),
    Case("negative", 9, seed=9, logits="negative", **ROUTED),
    Case("vanishing", 12, seed=8, logits="vanishing", **ROUTED),
    Case("ties", 40, seed=9, logits="ties", **ROUTED),
    Case("large-bias", 5, seed=10, logits="large_bias", **ROUTED),
    Case("nonfinite", 11, seed=11, logits="nonfinite", **ROUTED),
    Case("one-expert", 65, seed=12, logits="one_expert", weights="poisoned", **ROUTED),
    Case("all-local", 65, seed=13, logits="all_local", **ROUTED),
    Case("repeated", 257, seed=8, logits="repeated", **SMALL),
    Case("tiny-scales", 4, seed=15, weights="tiny", **ROUTED),
    Case("hostile-ids", 14, seed=16, mode="precomputed", ids="hostile", **SMALL),
    Case("straddling", 30, seed=17, local_expert_offset=17, **ROUTED),
    Case("before-the-first", 30, seed=18, local_expert_offset=-5, **SMALL),
    Case("past-the-last", 30, seed=19, local_expert_offset=29, **SMALL),
    Case("far-away", 3, seed=20, local_expert_offset=2**31 - 1, **SMALL),
    Case("every-expert-local", 30, seed=21, **{**SMALL, "num_local_experts": 32}),
)

CONTEST = tuple(
    Case(
        f"contest-{w['uuid'][:8]}",
        seq_len=w["axes"]["seq_len"],
        seed=contest_seed(w),
        local_expert_offset=w["draw"]["local_expert_offset"],
        routed_scaling_factor=w["draw"]["routed_scaling_factor"],
        source=w["uuid"],
    )
    for w in contest_workloads("moe_fp8_block_scale")
)

SERVING = tuple(
    Case(f"serving-t{T}", seq_len=T, seed=T) for T in (128, 256, 512, 1024, 2048, 4096, 8192)
)


def gap_cases(table: Table | None, seed: int = 0) -> tuple[Case, ...]:
    """Token counts around every regime boundary of a table, and one between each two neighbours."""
    rng = generator(seed)
    edges = gap_values(table, "seq_len")
    between = [
        int(torch.randint(low + 1, high, (1,), generator=rng))
        for low, high in pairwise(edges)
        if high - low > 1
    ]
    return tuple(Case(f"gap-t{T}", T, seed=seed + T) for T in sorted({*edges, *between}))
