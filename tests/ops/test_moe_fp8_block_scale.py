"""What the operator contract cannot say about moe_fp8_block_scale: the oracle and the routing
against independent formulations, and the public reports about this operator (C61 to C80, C142).

C74 (65537 tokens on one rank, activation indices beyond 32 bits) is not here: it concerns device
code, and the torch route indexes with 64 bits.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from fastkernels.errors import ArgumentError
from fastkernels.ops._shared.cases import generator
from fastkernels.ops.moe_fp8_block_scale import inputs as cases
from fastkernels.ops.moe_fp8_block_scale.inputs import ROUTED, SMALL, Case, make_inputs
from fastkernels.ops.moe_fp8_block_scale.op import moe_fp8_block_scale
from fastkernels.ops.moe_fp8_block_scale.problem import Inputs, bind
from fastkernels.ops.moe_fp8_block_scale.reference import Expected, admissible_routing, reference
from fastkernels.ops.moe_fp8_block_scale.routes.torch_grouped import combine
from fastkernels.ops.moe_fp8_block_scale.routing import route_tokens
from fastkernels.ops.moe_fp8_block_scale.spec import BLOCK, SPEC
from fastkernels.testing.compare import same_bits

FP8 = torch.float8_e4m3fn
LOCAL8: dict[str, Any] = {"num_local_experts": 8, "hidden_size": 256}


def call(inputs: Inputs, **options: Any) -> torch.Tensor:
    return moe_fp8_block_scale(**inputs._asdict(), **options)


def failures(expected: Expected, output: torch.Tensor, **options: Any) -> list[str]:
    return [str(error) for error in expected.judge((output,), **options) if not error.ok]


def official_ok(expected: Expected, output: torch.Tensor) -> bool:
    return all(error.ok for error in expected.judge_official((output,)))


def route(
    logits: torch.Tensor, bias: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing with the definition's constants unless told otherwise."""
    given = {"topk": 8, "num_groups": 8, "topk_groups": 4, "routed_scaling_factor": 2.5}
    return route_tokens(logits, bias, **{**given, **options})


def chosen(logits: torch.Tensor, bias: torch.Tensor, **options: Any) -> list[list[int]]:
    return route(logits, bias, **options)[0].sort(dim=1).values.tolist()


def no_bias(num_experts: int = 256) -> torch.Tensor:
    return torch.zeros(num_experts, dtype=torch.bfloat16)


def with_routing(inputs: Inputs, logits: torch.Tensor, bias: torch.Tensor | None = None) -> Inputs:
    bias = no_bias(logits.shape[1]) if bias is None else bias
    return inputs._replace(routing_logits=logits, routing_bias=bias)


# ---- the oracle and the routing against other formulations ---------------------------------------


def beats_count_routing(
    logits: list[float], bias: list[float], topk: int, num_groups: int, topk_groups: int
) -> list[int]:
    """The chosen experts, best first, from the rule alone: a place is taken by what fewer than
    `count` others beat, and a beats b if it is larger, or equal and of lower index."""

    def best(values: dict[int, float], count: int) -> list[int]:
        def beaten_by(b: int) -> int:
            return sum((v > values[b]) or (v == values[b] and a < b) for a, v in values.items())

        rank = {key: beaten_by(key) for key in values}
        return sorted((key for key in values if rank[key] < count), key=lambda key: rank[key])

    def float32(x: float) -> float:
        return float(torch.tensor(x, dtype=torch.float32))

    c = [float32(float32(1 / (1 + math.exp(-x))) + b) for x, b in zip(logits, bias, strict=True)]
    size = len(c) // num_groups
    scores = {}
    for g in range(num_groups):
        members = sorted(c[g * size : (g + 1) * size], reverse=True)
        scores[g] = float32(sum(members[:2]))
    kept = best(scores, topk_groups)
    return best({e: c[e] for g in kept for e in range(g * size, (g + 1) * size)}, topk)


@st.composite
def routing_problems(draw: st.DrawFn) -> tuple[list[list[float]], list[float], int, int, int]:
    """Few distinct values, so that most rows hold ties within and between groups."""
    num_groups = draw(st.integers(1, 5))
    size = draw(st.integers(1, 5))
    topk_groups = draw(st.integers(1, num_groups))
    topk = draw(st.integers(1, topk_groups * size))
    values = st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0])
    experts = num_groups * size
    rows = draw(
        st.lists(st.lists(values, min_size=experts, max_size=experts), min_size=1, max_size=3)
    )
    bias = draw(st.lists(st.sampled_from([-0.5, 0.0, 0.25]), min_size=experts, max_size=experts))
    return rows, bias, topk, num_groups, topk_groups


@settings(max_examples=150, deadline=None)
@given(routing_problems())
def test_routing_follows_the_rule_with_ties(
    problem: tuple[list[list[float]], list[float], int, int, int],
) -> None:
    rows, bias, topk, num_groups, topk_groups = problem
    ids, weights = route(
        torch.tensor(rows),
        torch.tensor(bias).bfloat16(),
        topk=topk,
        num_groups=num_groups,
        topk_groups=topk_groups,
    )
    for row, got, weight in zip(rows, ids.tolist(), weights.tolist(), strict=True):
        want = beats_count_routing(row, bias, topk, num_groups, topk_groups)
        assert got == want
        s = [1 / (1 + math.exp(-row[e])) for e in want]
        assert weight == pytest.approx([2.5 * value / sum(s) for value in s], rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(routing_problems())
def test_oracle_admits_the_rule_with_ties(
    problem: tuple[list[list[float]], list[float], int, int, int],
) -> None:
    """Ties of equal inputs leave no choice, so the preferred variant is the rule's."""
    rows, bias, topk, num_groups, topk_groups = problem
    variants = admissible_routing(routing_only(rows, bias, topk, num_groups, topk_groups))
    for t, row in enumerate(rows):
        want = beats_count_routing(row, bias, topk, num_groups, topk_groups)
        assert variants.ids[t].tolist() == sorted(want)


def routing_only(
    rows: list[list[float]], bias: list[float], topk: int, num_groups: int, topk_groups: int
) -> Inputs:
    """Inputs of which only the routing is looked at."""
    unused = torch.empty(0)
    return Inputs(
        torch.tensor(rows), torch.tensor(bias).bfloat16(),
        unused, unused, unused, unused, unused, unused, 0, 2.5, topk, num_groups, topk_groups,
    )  # fmt: skip


def test_oracle_equals_two_plain_loops() -> None:
    case = Case(
        "tiny", 5, seed=3, num_experts=8, num_local_experts=5, hidden_size=256,
        intermediate_size=128, topk=3, num_groups=4, topk_groups=2, local_expert_offset=2,
    )  # fmt: skip
    x = make_inputs(case)
    assert x.routing_logits is not None
    assert x.routing_bias is not None
    want = torch.zeros(5, 256, dtype=torch.float64)
    kappa = torch.zeros_like(want)

    def spread(scale: torch.Tensor) -> torch.Tensor:
        return scale.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)

    for t in range(5):
        logits = x.routing_logits[t].tolist()
        ids = beats_count_routing(logits, x.routing_bias.tolist(), 3, 4, 2)
        s = [1 / (1 + math.exp(-logits[e])) for e in ids]
        activation = x.hidden_states[t].double() * x.hidden_states_scale[
            :, t
        ].double().repeat_interleave(BLOCK)
        for e, value in zip(ids, s, strict=True):
            if not 2 <= e < 7:
                continue
            w13 = x.gemm1_weights[e - 2].double() * spread(x.gemm1_weights_scale[e - 2])
            w2 = x.gemm2_weights[e - 2].double() * spread(x.gemm2_weights_scale[e - 2])
            G = w13 @ activation
            C = G[128:] / (1 + torch.exp(-G[128:])) * G[:128]
            weight = value / (sum(s) + 1e-20) * 2.5
            want[t] += weight * (w2 @ C)
            kappa[t] += weight * (w2.abs() @ C.abs())
    expected = reference(x)
    assert want.abs().amax(1).min() > 0.01
    torch.testing.assert_close(expected.output.double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(expected.kappa.double(), kappa.norm(dim=1), rtol=1e-5, atol=0)
    assert (expected.rms < expected.kappa).all()


def test_equal_logits_stay_equal_at_every_position() -> None:
    """torch's float32 sigmoid differs in the last place between positions of one tensor."""
    for num_experts in (12, 36, 100):
        for value in torch.linspace(-20, 5, 100).tolist():
            logits = torch.full((3, num_experts), value)
            rows = chosen(logits, no_bias(num_experts), topk=3, num_groups=4, topk_groups=2)
            assert rows == [[0, 1, 2]] * 3


def test_nonfinite_logits_rank_as_infinities() -> None:
    logits = torch.randn(6, 256, generator=generator(1))
    logits[:, 3::7] = math.nan
    logits[:, 5::31] = math.inf
    logits[:, 6::13] = -math.inf
    ids, weights = route(logits, no_bias())
    replaced_ids, replaced_weights = route(logits.nan_to_num(nan=-math.inf, posinf=1e4), no_bias())
    assert torch.equal(ids, replaced_ids)
    assert torch.equal(weights, replaced_weights)
    assert weights.isfinite().all()
    ids, weights = route(torch.full((1, 256), math.nan), torch.full((256,), math.nan).bfloat16())
    assert ids.tolist() == [list(range(8))]
    assert weights.tolist() == [[0.0] * 8]


def test_contest_draws_route_as_recorded() -> None:
    """All 19 contest workloads give their recorded numbers of active experts and routed slots."""
    text = resources.files(cases.__package__).joinpath("contest.jsonl").read_text()
    recorded = [json.loads(line) for line in text.splitlines()]
    assert len(recorded) == len(cases.CONTEST) == 19
    for case, workload in zip(cases.CONTEST, recorded, strict=True):
        ids, _ = route(*cases.draw_routing(generator(case.seed), case))
        local = ids[(ids >= case.local_expert_offset) & (ids < case.local_expert_offset + 32)]
        assert local.unique().numel() == workload["draw"]["active_experts"], case.name
        assert local.numel() == workload["draw"]["routed_slots"], case.name


# ---- in-band decisions ---------------------------------------------------------------------------


def near_tie(gap_ulps: int, slots: int = 2) -> Inputs:
    """One token: expert 0 clearly first, then experts 1 and 2 with sigmoids `gap_ulps` ulps apart,
    2 the larger one, of which `slots - 1` fit."""
    x = make_inputs(Case("near", 1, seed=2, **{**SMALL, "num_local_experts": 32, "topk": slots}))
    logits = torch.full((1, 32), -4.0)
    logits[0, 0] = 2.0
    target = torch.tensor(0.75)
    s = torch.tensor([target, target + gap_ulps * 2.0**-24]).double()
    logits[0, 1:3] = (s / (1 - s)).log().float()
    return with_routing(x, logits)


def with_ids(inputs: Inputs, ids: list[int]) -> Inputs:
    """The same call with these experts and the weights that the logits give them."""
    assert inputs.routing_logits is not None
    s = torch.sigmoid(inputs.routing_logits[:, ids].double())
    weights = s / (s.sum(1, keepdim=True) + 1e-20) * inputs.routed_scaling_factor
    return inputs._replace(
        routing_logits=None,
        routing_bias=None,
        topk_ids=torch.tensor([ids], dtype=torch.int32),
        topk_weights=weights.float(),
    )


def test_in_band_decision_accepts_either_choice_and_no_other() -> None:
    x = near_tie(gap_ulps=4)
    expected = reference(x)
    assert [ids.tolist() for ids in expected.variants.ids] == [[0, 2], [0, 1]]
    assert expected.variants.mismatches(torch.tensor([[1, 0]])) == []
    assert expected.variants.mismatches(torch.tensor([[0, 3]])) == [0]
    assert not failures(expected, call(x))
    assert not failures(expected, call(with_ids(x, [0, 1])))
    assert not failures(expected, call(with_ids(x, [0, 2])))
    assert failures(expected, call(with_ids(x, [0, 3])))


def test_decision_beyond_the_band_has_one_answer() -> None:
    expected = reference(near_tie(gap_ulps=64))
    assert expected.variants.ids.tolist() == [[0, 2]]
    assert failures(expected, call(with_ids(near_tie(gap_ulps=64), [0, 1])))


def test_exact_tie_is_no_band() -> None:
    x = near_tie(gap_ulps=0)
    expected = reference(x)
    assert expected.variants.ids.tolist() == [[0, 1]]
    assert x.routing_logits is not None
    assert chosen(x.routing_logits, no_bias(32), topk=2) == [[0, 1]]
    assert failures(expected, call(with_ids(x, [0, 2])))


def test_in_band_groups_give_variants() -> None:
    """Groups 0 and 1 differ by less than the band, one of them fits."""
    logits = torch.full((1, 8), -3.0)
    logits[0, :2], logits[0, 4:6] = 1.0, torch.tensor([1.0, 1.0 + 2e-7])
    x = routing_only(logits.tolist(), [0.0] * 8, topk=2, num_groups=2, topk_groups=1)
    assert sorted(admissible_routing(x).ids.tolist()) == [[0, 1], [4, 5]]


def test_massive_band_is_cut_and_keeps_float32_arithmetic() -> None:
    """Sigmoids of 4e-8 vanish beside a bias of 12: every expert is in one band."""
    case = Case("large-bias", 3, seed=1, logits="large_bias")
    logits, bias = cases.draw_routing(generator(case.seed), case)
    x = routing_only(logits.tolist(), bias.tolist(), 8, 8, 4)
    variants = admissible_routing(x)
    assert variants.token.shape[0] <= 3 * 64
    assert variants.ids[:3].tolist() == [list(range(8))] * 3
    assert variants.mismatches(route(logits, bias)[0]) == []


# ---- public reports ------------------------------------------------------------------------------


def test_c61_negative_bias() -> None:
    logits = torch.randn(1, 256, generator=generator(61))
    bias = torch.full((256,), -3.0).bfloat16()
    ids, weights = route(logits, bias)
    assert ids.tolist() == route(logits, no_bias())[0].tolist()
    assert float(weights.sum()) == pytest.approx(2.5, rel=1e-6)


def test_c62_negative_logits() -> None:
    case = Case("negative", 64, seed=62, logits="negative", **ROUTED)
    x = make_inputs(case)
    assert x.routing_logits is not None
    assert x.routing_bias is not None
    ids, weights = route(x.routing_logits, x.routing_bias)
    variants = admissible_routing(x)
    assert variants.mismatches(ids) == []
    order = ids.argsort(dim=1)
    torch.testing.assert_close(weights.gather(1, order), variants.weights[:64], rtol=1e-6, atol=0)
    assert not failures(reference(x), call(x))


def test_c63_vanishing_sigmoids() -> None:
    levels = [-40.0, -46.0, -48.0, -60.0, -89.0, -200.0]
    logits = torch.tensor(levels)[:, None].expand(-1, 256).contiguous()
    _, weights = route(logits, no_bias())
    sums = weights.sum(dim=1).tolist()
    assert sums[:4] == pytest.approx([2.4993, 2.2347, 1.3318, 1.75e-5], rel=1e-3)
    assert sums[4:] == [0.0, 0.0]
    x = with_routing(make_inputs(Case("vanishing", 6, seed=63, **ROUTED)), logits)
    output = call(x)
    assert output.isfinite().all()
    assert output[0].abs().max() > 0.01
    assert (output[4:] == 0).all()


def test_c63_subnormal_sigmoids_pass_and_wrong_small_weights_do_not() -> None:
    """At -89 float32 has a subnormal sigmoid or none; at -60 the weights are small but exact."""
    logits = torch.tensor([[-60.0], [-89.0]]).expand(-1, 256).contiguous()
    x = with_routing(make_inputs(Case("subnormal", 2, seed=63, **ROUTED)), logits)
    expected = reference(x)
    assert (expected.output[1] == 0).all()
    s = torch.sigmoid(logits[:, :8].double())
    weights = (s / (s.sum(1, keepdim=True) + 1e-20) * 2.5).float()
    given = x._replace(
        routing_logits=None,
        routing_bias=None,
        topk_ids=torch.arange(8).expand(2, 8),
        topk_weights=weights,
    )
    kept = call(given)
    assert 0 < kept[1].abs().max() < 1e-17
    assert not failures(expected, kept)
    assert failures(expected, call(given._replace(topk_weights=weights * 1.1)))


def test_c64_large_bias_tiny_sigmoid() -> None:
    logits = -17.0 + torch.rand(5, 256, generator=generator(64)) * 2 - 1
    _, weights = route(logits, torch.full((256,), 12.0).bfloat16())
    assert weights.sum(dim=1).tolist() == pytest.approx([2.5] * 5, rel=1e-6)
    assert (weights > 0).all()


def test_c65_weights_are_unbiased() -> None:
    favoured = [0, 1, 32, 33, 64, 65, 96, 97]
    bias = no_bias()
    bias[favoured] = 1.0
    ids, weights = route(torch.full((1, 256), -4.0), bias)
    assert ids.tolist() == [favoured]
    assert weights.tolist() == [[0.3125] * 8]


def test_c67_logits_are_float32() -> None:
    """The eighth and ninth expert differ by 1e-4: float32 tells them apart, bfloat16 does not."""
    logits = torch.full((1, 256), -5.0)
    logits[0, :7] = 3.0
    logits[0, 7], logits[0, 8] = 1.0, 1.0001
    assert chosen(logits, no_bias()) == [[*range(7), 8]]
    assert chosen(logits.bfloat16().float(), no_bias()) == [[*range(8)]]
    x = with_routing(make_inputs(Case("dtype", 1, **ROUTED)), logits.bfloat16())
    with pytest.raises(ArgumentError, match=r"'routing_logits' is bfloat16, expected float32"):
        call(x)


def test_c68_group_rule() -> None:
    logits = torch.full((1, 256), -10.0)
    logits[0, 0] = 6.0
    expected = [32, 33, 64, 65, 96, 97, 128, 129]
    logits[0, expected] = 1.0
    assert chosen(logits, no_bias()) == [expected]


def test_c70_no_tokens() -> None:
    x = make_inputs(Case("empty", 0, **ROUTED))
    assert x.hidden_states_scale.shape == (2, 0)
    output = call(x)
    assert output.shape == (0, 256)
    assert output.dtype == torch.bfloat16
    assert reference(x).output.shape == (0, 256)


def test_c71_no_token_for_this_rank() -> None:
    x = make_inputs(Case("none", 8, seed=71, logits="none_local", **ROUTED))
    out = torch.full((8, 256), math.nan, dtype=torch.bfloat16)
    call(x, out=out)
    assert (out == 0).all()


def test_c73_repeated_token_gives_equal_rows() -> None:
    longest = make_inputs(Case("repeated", 513, seed=8, logits="repeated", **SMALL))
    assert longest.routing_logits is not None
    first = []
    for T in (255, 256, 257, 512, 513):
        output = call(
            longest._replace(
                routing_logits=longest.routing_logits[:T],
                hidden_states=longest.hidden_states[:T],
                hidden_states_scale=longest.hidden_states_scale[:, :T],
            )
        ).float()
        torch.testing.assert_close(output, output[:1].expand_as(output), rtol=2**-7, atol=1e-6)
        assert output.abs().max() > 0.01
        first.append(output[0])
    for row in first[1:]:
        torch.testing.assert_close(row, first[0], rtol=2**-7, atol=1e-6)


def test_c73_repeated_expert_counts_each_time() -> None:
    x = make_inputs(Case("twice", 3, seed=73, mode="precomputed", **SMALL))
    twice = x._replace(
        topk_ids=torch.tensor([[1, 1, 5, 40], [2, 3, 2, 2], [-1, 4, 4, 4]]),
        topk_weights=torch.tensor(
            [[0.5, 0.25, 1.0, 9.0], [0.5, 1.0, 0.5, 0.5], [9.0, 0.5, 0.5, 1.0]]
        ),
    )
    once = x._replace(
        topk_ids=torch.tensor([[1, 5, -1, -1], [2, 3, -1, -1], [4, -1, -1, -1]]),
        topk_weights=torch.tensor([[0.75, 1.0, 0, 0], [1.5, 1.0, 0, 0], [2.0, 0, 0, 0]]),
    )
    torch.testing.assert_close(call(twice), call(once), rtol=2**-7, atol=0)
    assert not failures(reference(twice), call(twice))


def test_c76_very_small_scales() -> None:
    """Weight scales of 1e-4 and 1e-8 cost no accuracy; the official rule could not tell."""
    tiny = make_inputs(Case("tiny", 4, seed=15, weights="tiny", **ROUTED))
    expected = reference(tiny)
    output = call(tiny)
    error, normal = (
        max(e.value for e in reference(x).judge((call(x),)))
        for x in (tiny, make_inputs(Case("normal", 4, seed=15, **ROUTED)))
    )
    assert 0 < error < 1.5 * normal
    scales = tiny.gemm1_weights_scale
    flushed = call(tiny._replace(gemm1_weights_scale=torch.where(scales < 1e-6, 0.0, scales)))
    assert official_ok(expected, torch.zeros_like(output))
    assert failures(expected, torch.zeros_like(output))
    assert official_ok(expected, flushed)


@pytest.mark.parametrize("T", [1, 2, 3, 5, 7])
def test_c77_scale_views_are_read_by_stride(T: int) -> None:
    x = make_inputs(Case("odd", T, seed=3, **{**SMALL, "num_local_experts": 32}))
    rows_first = x.hidden_states_scale.t().contiguous()  # [T, H / 128]
    assert torch.equal(call(x._replace(hidden_states_scale=rows_first.t())), call(x))
    assert not failures(reference(x), call(x))


def test_c77_untransposed_scale_is_refused() -> None:
    x = make_inputs(Case("layout", 3, **SMALL))
    wrong = x._replace(hidden_states_scale=x.hidden_states_scale.t().contiguous())
    with pytest.raises(ArgumentError, match=r"'hidden_states_scale' has shape \(3, 2\), expected "):
        call(wrong)
    square = make_inputs(Case("square", 2, seed=5, **{**SMALL, "num_local_experts": 32}))
    untransposed = square._replace(hidden_states_scale=square.hidden_states_scale.t())
    assert failures(
        reference(square), call(untransposed)
    )  # no check can see it, the value shows it


def test_c79_second_half_is_the_gate() -> None:
    ones, identity = torch.ones(1, 128), torch.eye(128)
    w13 = torch.cat([torch.full((128, 128), 1 / 128), torch.full((128, 128), -4 / 128)])
    output = moe_fp8_block_scale(
        None, None, ones.to(FP8), torch.ones(1, 1),
        w13.to(FP8)[None], torch.ones(1, 2, 1), identity.to(FP8)[None], torch.ones(1, 1, 1), 0, 2.5,
        topk=1, topk_ids=torch.zeros(1, 1, dtype=torch.int32), topk_weights=torch.ones(1, 1),
    )  # fmt: skip
    torch.testing.assert_close(output, torch.full_like(output, -0.0719), rtol=4e-3, atol=0)


@pytest.mark.parametrize("reads_values", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_c80_unused_nan_never_arrives(layout: str, reads_values: bool) -> None:
    """NaN in experts nobody uses, around every argument, and in an unused token's scale."""
    case = Case(
        "poison",
        7,
        mode="precomputed",
        logits="one_expert",
        weights="poisoned",
        layout=layout,
        **ROUTED,
    )
    x = make_inputs(case)
    assert x.topk_ids is not None
    x.topk_ids[3] = -1
    x.hidden_states_scale[:, 3] = math.nan
    assert x.gemm1_weights[1:].float().isnan().all()
    output = combine(x, 1024, reads_values)
    assert output.isfinite().all()
    assert (output[3] == 0).all()
    assert output[0].abs().max() > 0.01
    assert not failures(reference(x), output)


def without_expert(inputs: Inputs, expert: int) -> Inputs:
    scales = inputs.gemm2_weights_scale.clone()
    scales[expert] = 0.0
    return inputs._replace(gemm2_weights_scale=scales)


def test_c142_our_limits_see_what_the_official_ones_miss() -> None:
    """Realistic scales, sums of 1024 terms: few outputs pass 1, below which atol = 1 is blind."""
    x = make_inputs(Case("visible", 12, seed=142, **{**LOCAL8, "intermediate_size": 1024}))
    expected = reference(x)
    output = call(x)
    assert expected.output.abs().max() > 0.1
    assert not failures(expected, output)
    active = admissible_routing(x).ids
    used = int(active[active < 8][0])
    wrong = {
        "zeroed": torch.zeros_like(output),
        "expert dropped": call(without_expert(x, used)),
        "factor 2.0": call(x._replace(routed_scaling_factor=2.0)),
    }
    for name, candidate in wrong.items():
        assert failures(expected, candidate), name
        assert failures(expected, candidate, requantised=True), name
        assert official_ok(expected, candidate), name


def test_kappa_alone_would_miss_a_wrong_factor() -> None:
    """Why outputs are also judged against the root of summed squares."""
    x = make_inputs(
        Case("kappa", 4, seed=5, logits="all_local", **{**LOCAL8, "intermediate_size": 2048})
    )
    kappa, rms = reference(x).judge((call(x._replace(routed_scaling_factor=2.4)),))
    assert kappa.ok
    assert rms.value > 0.03


def test_requantising_needs_the_looser_limits() -> None:
    """Rounding C to e4m3 per token and 128 columns: 2.3e-2 to 2.7e-2 of the norm."""
    x = make_inputs(Case("requantised", 3, seed=6, mode="precomputed", **SMALL))
    x = x._replace(
        topk_ids=torch.tensor([[1, -1, -1, -1], [4, -1, -1, -1], [7, -1, -1, -1]]),
        topk_weights=torch.ones(3, 4),
    )
    output = torch.zeros(3, 256)
    for t, e in enumerate((1, 4, 7)):
        w13, w2 = (
            (
                w[e].float().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
                * s[e][:, None, :, None]
            )
            .flatten(2)
            .flatten(0, 1)
            for w, s in (
                (x.gemm1_weights, x.gemm1_weights_scale),
                (x.gemm2_weights, x.gemm2_weights_scale),
            )
        )
        G = w13 @ (
            x.hidden_states[t].float() * x.hidden_states_scale[:, t].repeat_interleave(BLOCK)
        )
        C = torch.nn.functional.silu(G[128:]) * G[:128]
        scale = C.abs().max() / 448
        output[t] = w2 @ ((C / scale).to(FP8).float() * scale)
    expected = reference(x)
    assert not failures(expected, output, requantised=True)
    assert failures(expected, output)
    assert failures(expected, 1.05 * output, requantised=True)
    assert any("cosine" in text for text in failures(expected, output.flip(0), requantised=True))


# ---- ranks, offsets, forms -----------------------------------------------------------------------


@pytest.mark.parametrize("split", [(8, 8, 8, 8), (5, 12, 15), (1, 30, 1)])
def test_ranks_add_up_to_the_unsharded_result(split: tuple[int, ...]) -> None:
    whole = make_inputs(Case("whole", 20, seed=9, **{**SMALL, "num_local_experts": 32}))
    total = torch.zeros(20, 256)
    for offset, count in zip(itertools.accumulate((0, *split[:-1])), split, strict=True):
        part = {
            name: getattr(whole, name)[offset : offset + count] for name in cases.Weights._fields
        }
        total += combine(whole._replace(local_expert_offset=offset, **part), 1024, True)
    torch.testing.assert_close(total, combine(whole, 1024, True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offset", [-(2**31), -8, 32, 1000, 2**31 - 1])
def test_offset_outside_leaves_zeros(offset: int) -> None:
    x = make_inputs(Case("outside", 6, seed=1, **SMALL))._replace(local_expert_offset=offset)
    out = torch.full((6, 256), math.nan, dtype=torch.bfloat16)
    call(x, out=out)
    assert (out == 0).all()


def test_padding_ids_are_no_expert_at_a_negative_offset() -> None:
    x = make_inputs(Case("padding", 2, mode="precomputed", **SMALL))
    x = x._replace(topk_ids=torch.full((2, 4), -1), local_expert_offset=-1)
    assert (call(x) == 0).all()
    assert (reference(x).output == 0).all()


def test_precomputed_routing_equals_computed() -> None:
    computed = make_inputs(Case("both", 33, seed=4, **ROUTED))
    for ids in ("int32", "int64"):
        case = Case("both", 33, seed=4, mode="precomputed", ids=ids, **ROUTED)
        assert torch.equal(call(make_inputs(case)), call(computed))


def test_deterministic_repeats_bit_for_bit() -> None:
    x = make_inputs(Case("again", 50, seed=5, deterministic=True, **SMALL))
    first = call(x)
    assert all(torch.equal(call(x), first) for _ in range(3))
    assert bind(x, None, None).key.traits == ("deterministic",)
    assert bind(x._replace(deterministic=False), None, None).key.traits == ()


VANISHING = {"empty", "none-local", "far-away"}


@pytest.mark.parametrize("case", [*cases.CORRECTNESS, *cases.CORNER], ids=lambda case: case.name)
def test_masked_form_and_what_cases_cover(case: Case) -> None:
    """The form of the torch route that GPUs get is right, and no case is right by being zero."""
    x = make_inputs(case)
    expected = reference(x)
    assert not failures(expected, combine(x, token_tile=128, reads_values=False))
    assert bool((expected.output != 0).any()) != (case.name in VANISHING)


def test_masked_form_never_synchronises() -> None:
    """Fake tensors have no values, so reading one fails."""
    x = make_inputs(Case("fake", 9, seed=2, **SMALL))
    with FakeTensorMode() as mode:
        tensors: dict[str, Any] = {
            name: mode.from_tensor(value)
            for name, value in x._asdict().items()
            if isinstance(value, torch.Tensor)
        }
        fake = x._replace(**tensors)
        assert combine(fake, 4, reads_values=False).shape == (9, 256)
        with pytest.raises(DynamicOutputShapeException):
            combine(fake, 4, reads_values=True)


def test_token_tile_changes_nothing_visible() -> None:
    x = make_inputs(Case("tiles", 70, seed=7, logits="all_local", **ROUTED))
    whole = combine(x, 1024, True)
    for tile in (1, 16, 69):
        torch.testing.assert_close(combine(x, tile, True), whole, rtol=1e-4, atol=1e-5)


def test_outputs_may_be_strided_and_are_fully_written() -> None:
    x = make_inputs(Case("out", 6, seed=1, **SMALL))
    buffer = torch.full((6, 300), math.nan, dtype=torch.bfloat16)
    assert call(x, out=buffer[:, 10:266]) is not None
    assert torch.equal(buffer[:, 10:266], call(x))
    assert buffer[:, :10].isnan().all()
    assert buffer[:, 266:].isnan().all()


# ---- inputs --------------------------------------------------------------------------------------


def test_drawn_tensors_have_the_stated_variance() -> None:
    x = make_inputs(
        Case("drawn", 64, seed=1, hidden_size=1024, intermediate_size=512, num_local_experts=8)
    )
    spread = x.hidden_states_scale.t().repeat_interleave(BLOCK, 1)
    assert float((x.hidden_states.float() * spread).var()) == pytest.approx(1.0, rel=0.02)
    for weight, scale, fan_in in (
        (x.gemm1_weights, x.gemm1_weights_scale, 1024),
        (x.gemm2_weights, x.gemm2_weights_scale, 512),
    ):
        w = weight.float() * scale.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
        assert float(w.var()) * fan_in == pytest.approx(1.0, rel=0.1)
        assert weight.float().abs().max() == 448
        assert 2.0 < float(scale.max() / scale.min()) <= 4.0


def test_weights_can_be_shared() -> None:
    first, second = (Case("shared", T, seed=T, **SMALL) for T in (3, 5))
    weights = cases.make_weights(first)
    for case in (first, second):
        shared, own = make_inputs(case, weights=weights), make_inputs(case)
        assert shared.gemm1_weights is weights.gemm1_weights
        for a, b in zip(shared, own, strict=True):
            if isinstance(a, torch.Tensor):
                assert isinstance(b, torch.Tensor)
                assert same_bits(a, b)


def test_case_names_are_unique() -> None:
    for group in (cases.CORRECTNESS, cases.CORNER, cases.CONTEST, cases.SERVING):
        assert len({case.name for case in group}) == len(group)
    assert cases.gap_cases(None) == ()


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"routing_logits": None}, "'routing_logits' is None, expected a tensor, or 'topk_ids'"),
        ({"routing_bias": None}, "'routing_bias' is None, expected a tensor"),
        ({"topk_ids": torch.zeros(2, 4, dtype=torch.int32)}, "'topk_weights' is None, expected"),
        ({"topk_weights": torch.zeros(2, 4)}, "'topk_ids' is None, expected a tensor beside"),
        (
            {"topk_ids": torch.zeros(2, 4, dtype=torch.int32), "topk_weights": torch.zeros(2, 4)},
            "'routing_logits' is given, expected None beside",
        ),
        ({"num_groups": 5}, "num_experts=32, num_groups=5, expected num_experts a multiple of"),
        ({"topk_groups": 9}, "expected topk_groups at most num_groups"),
        ({"topk": 17}, "'topk' is 17, expected at most 16, the experts of topk_groups=4 groups"),
        ({"topk": 0}, "topk=0, expected >= 1"),
        ({"topk": 2.0}, "'topk' is float, expected an int"),
        ({"local_expert_offset": 2**31}, "'local_expert_offset' is 2147483648, expected an int32"),
        ({"local_expert_offset": torch.tensor(0)}, "'local_expert_offset' is Tensor, expected an"),
        ({"routed_scaling_factor": None}, "'routed_scaling_factor' is NoneType, expected a float"),
        ({"deterministic": 1}, "'deterministic' is int, expected a bool"),
        ({"hidden_states": torch.zeros(2, 200).to(FP8)}, "hidden_size=200, expected >= 128, a m"),
        ({"hidden_states": torch.zeros(2, 256)}, "'hidden_states' is float32, expected float8"),
        ({"hidden_states": torch.zeros(3, 256).to(FP8)}, "'hidden_states' has shape"),
        ({"routing_bias": torch.zeros(32)}, "'routing_bias' is float32, expected bfloat16"),
        ({"gemm1_weights_scale": torch.zeros(8, 2, 3)}, "'gemm1_weights_scale' has shape"),
        ({"gemm2_weights": torch.zeros(8, 128, 128).to(FP8)}, "'gemm2_weights' has shape"),
        (
            {"gemm1_weights": torch.zeros(8, 256, 256).to(FP8).transpose(1, 2)},
            "'gemm1_weights' has strides",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    x = make_inputs(Case("checks", 2, **SMALL))
    with pytest.raises(ArgumentError) as caught:
        call(x._replace(**changes))
    assert str(caught.value).startswith("moe_fp8_block_scale: ")
    assert message in str(caught.value)


def test_given_ids_must_have_topk_columns() -> None:
    x = make_inputs(Case("columns", 2, mode="precomputed", **SMALL))
    with pytest.raises(
        ArgumentError, match=r"'topk_ids' has shape \(2, 4\), expected \(.*, topk=8\)"
    ):
        call(x._replace(topk=8))


def test_groups_mean_nothing_beside_given_ids() -> None:
    x = make_inputs(Case("groups", 3, seed=1, mode="precomputed", **SMALL))
    key = bind(x, None, None).key
    odd = x._replace(num_groups=7, topk_groups=9)
    assert bind(odd, None, None).key == key
    assert key.mode == "precomputed"
    assert torch.equal(call(odd), call(x))
    many = torch.arange(200).expand(3, 200) % 8
    call(x._replace(topk=200, topk_ids=many, topk_weights=torch.full((3, 200), 0.01)))


def test_out_must_not_overlap_an_input() -> None:
    x = make_inputs(Case("overlap", 2, **SMALL))
    memory = torch.zeros(2, 256, dtype=torch.bfloat16)
    hidden = memory.view(FP8)[:, :256]
    with pytest.raises(ArgumentError, match="'output' overlaps 'hidden_states'"):
        call(x._replace(hidden_states=hidden), out=memory)


def test_sizes_that_are_options_are_in_the_key() -> None:
    x = make_inputs(Case("key", 2, **SMALL))
    assert dict(bind(x, None, None).key.axes) == {
        "seq_len": 2, "num_experts": 32, "num_local_experts": 8, "hidden_size": 256,
        "intermediate_size": 128, "topk": 4, "num_groups": 8, "topk_groups": 4,
    }  # fmt: skip
    assert (
        replace(cases.CONTEST[0], seq_len=2).axes.keys()
        == dict(bind(x, None, None).key.axes).keys()
    )
    assert SPEC.constants["topk"] == 8
