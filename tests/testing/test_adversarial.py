"""The adversarial strata: legal calls that the safe route answers rightly, which are what their
names say, and which the mistakes that they are for do not survive."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from fastkernels import catalog
from fastkernels.core import dispatch
from fastkernels.core.device import CPU
from fastkernels.core.problem import key_from_axes
from fastkernels.core.route import Operator
from fastkernels.ops._shared import adversarial as shared
from fastkernels.ops._shared.adversarial import Draws
from fastkernels.ops.dsa_topk_indexer.adversarial import BOUNDARY, MARGINS
from fastkernels.ops.dsa_topk_indexer.reference import Row
from fastkernels.ops.dsa_topk_indexer.reference import reference as indexer_reference
from fastkernels.ops.dsa_topk_indexer.spec import SPEC as INDEXER_SPEC
from fastkernels.ops.gdn_prefill import reference as gdn_prefill_reference
from fastkernels.ops.moe_fp8_block_scale.reference import admissible_routing
from fastkernels.testing.compare import Report, as_tuple, clone, judge, same_bits

SEEDS = (3, 2**31 - 1)


def strata(op: str) -> Any:
    return catalog.module(op, "adversarial").STRATA


def draw(op: str, name: str, seed: int = 1, **fields: Any) -> Any:
    return strata(op)[name].draw(seed, **fields)


ALL = [
    pytest.param(operator, name, id=f"{operator.name}-{name}")
    for operator in catalog.OPERATORS
    for name in strata(operator.name)
]


def judged(op: str, name: str, change: Callable[[Any], Any], seed: int = 3) -> Report:
    """What the oracle says of the stratum when the safe route is given changed inputs."""
    operator = catalog.operator(op)
    inputs, case = draw(operator.name, name, seed)
    with dispatch.force_route(operator, operator.safe_route.name):
        outputs = as_tuple(operator.function(**change(clone(inputs))._asdict()))
    return judge(operator, operator.safe_route, None, case, inputs, outputs)


@pytest.mark.parametrize(("operator", "name"), ALL)
def test_safe_route_is_right(operator: Operator, name: str) -> None:
    for seed in SEEDS:
        inputs, case = draw(operator.name, name, seed)
        assert case.seed == seed
        problem = catalog.module(operator.name, "problem").bind(clone(inputs), None, None)
        traits = problem.key.traits
        assert problem.key == key_from_axes(operator.spec, case.axes, CPU, case.mode, traits)
        pristine = clone(inputs)
        with dispatch.force_route(operator, operator.safe_route.name):
            outputs = as_tuple(operator.function(**inputs._asdict()))
        report = judge(operator, operator.safe_route, None, case, pristine, outputs)
        assert report.ok, str(report)
        # A right answer that is NaN would be no yardstick.
        assert not any(output.isnan().any() for output in outputs[:1]), name


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("operator", "name"),
    [
        pytest.param(operator, name, id=f"{operator.name}-{name}")
        for operator in catalog.OPERATORS
        for name, stratum in strata(operator.name).items()
        if getattr(stratum, "draws_anywhere", False)  # the MoE has strata of its own kind
    ],
)
def test_a_device_draws_what_the_cpu_would(operator: Operator, name: str) -> None:
    """In sizes, layouts and whatever is no number of its own; the same again for the same seed, and
    right by the safe route."""
    found, case = draw(operator.name, name, 3, device="cuda")
    again, _ = draw(operator.name, name, 3, device="cuda")
    on_cpu, _ = draw(operator.name, name, 3)
    for field, own, same, cpu in zip(found._fields, found, again, on_cpu, strict=True):
        if not isinstance(cpu, torch.Tensor):
            assert own == cpu, field
            continue
        assert own.is_cuda, field
        assert (own.dtype, own.shape, own.stride()) == (cpu.dtype, cpu.shape, cpu.stride()), field
        assert same_bits(own, same), field
        if not own.is_floating_point():
            assert torch.equal(own.cpu(), cpu), field
    pristine = clone(found)
    with dispatch.force_route(operator, operator.safe_route.name):
        outputs = as_tuple(operator.function(**found._asdict()))
    report = judge(operator, operator.safe_route, None, case, pristine, outputs)
    assert report.ok, str(report)


def test_what_a_device_draws_is_changed_there() -> None:
    """A change's own numbers are drawn on the device, so the inputs have to be there, too."""

    @dataclass(frozen=True)
    class Seeded:
        seed: int = 0

    class Numbers(NamedTuple):
        x: torch.Tensor

    class Drawn(Draws):
        draws_anywhere = True

        @staticmethod
        def make_inputs(case: Seeded, device: Any = "cpu", *, drawn_on: Any = "cpu") -> Numbers:
            return Numbers(torch.ones(case.seed, device=drawn_on).to(device))

    seen = []

    def change(inputs: Numbers, rng: torch.Generator) -> Numbers:
        seen.append(inputs.x.device.type)
        return Numbers(inputs.x * torch.full((3,), 2.0))

    # A generator of the CPU stands in for the device's: meta tensors have none.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shared, "generator", lambda seed, device: torch.Generator())
        inputs, case = Drawn(Seeded(), change).draw(3, device="meta")
    assert case == Seeded(3)
    assert seen == [inputs.x.device.type] == ["meta"]


# One of each way to make inputs: from a list, changed, changed in the cache.
@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("gdn_decode", "raw_keys"),
        ("gdn_prefill", "late_forget"),
        ("dsa_sparse_attention", "one_dominates"),
        ("dsa_topk_indexer", "near_ties"),
        ("moe_fp8_block_scale", "negative_zeros"),
    ],
)
def test_a_seed_gives_the_same_inputs_again_and_another_one_others(op: str, name: str) -> None:
    def tensors(seed: int) -> list[torch.Tensor]:
        inputs, _ = draw(op, name, seed)
        return [x for x in inputs if isinstance(x, torch.Tensor)]

    first, again, other = tensors(1), tensors(1), tensors(2)
    assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))
    assert not all(same_bits(a, b) for a, b in zip(first, other, strict=True))


def test_fields_replace_those_of_the_case() -> None:
    inputs, case = draw("moe_fp8_block_scale", "t17", 1, hidden_size=128, weight_seed=5)
    assert inputs.hidden_states.shape == (17, 128)
    assert (case.hidden_size, case.weight_seed) == (128, 5)


# ---- gdn ----------------------------------------------------------------------------------------


def test_gates_reach_their_ends() -> None:
    inputs, _ = draw("gdn_decode", "widest_gates")
    step = torch.nn.functional.softplus(inputs.a[0, 0].double() + inputs.dt_bias.double())
    g = (-inputs.A_log.double().exp() * step).exp()
    assert inputs.A_log.aminmax() == (-30.0, 80.0)
    assert ((g > 0.05) & (g < 0.95)).all()
    inputs, _ = draw("gdn_prefill", "steep_decay")
    step = torch.nn.functional.softplus(inputs.a.float())
    log_g = (-inputs.A_log.exp() * step).cumsum(0)
    assert float(log_g[63].max()) < math.log(torch.finfo(torch.float32).tiny)  # within one chunk


def test_states_have_their_sizes() -> None:
    for name, size in (("huge_state", 1e20), ("tiny_state", 1e-20)):
        for op in ("gdn_decode", "gdn_prefill"):
            state = draw(op, name)[0].state
            assert 0.01 * size < float(state.abs().mean()) < size


def test_prefixes_are_prefixes() -> None:
    inputs, case = draw("gdn_prefill", "prefixes")
    *begins, last = inputs.cu_seqlens[:-1].tolist()
    for begin, length in zip(begins, case.lengths[:-1], strict=True):
        assert same_bits(inputs.k[begin : begin + length], inputs.k[last : last + length])
        assert same_bits(inputs.a[begin : begin + length], inputs.a[last : last + length])
    assert all(same_bits(inputs.state[0], state) for state in inputs.state)


@pytest.mark.parametrize("segment", [256, 512, 1024, 2048])
def test_an_erased_state_is_not_its_product_with_a_matrix(segment: int) -> None:
    """What the tokens before the last 6 make of the unit matrix, by the plain bfloat16 form, is of
    no use, although what the same form makes of the state itself is right."""
    for seed in SEEDS:
        inputs, case = draw("gdn_prefill", "erased_state", seed)
        call = gdn_prefill_reference.Call(inputs)
        _, S, x = next(call.sequences())
        expected = call.expected({0: gdn_prefill_reference.recurrence(S, x, call.scale)})
        assert float(S.norm()) > 1000.0 * float(expected.new_state.norm())
        end = case.lengths[0] - 6
        first, middle = x.tokens(0, end - segment), x.tokens(end - segment, end)
        S = gdn_prefill_reference.recurrence(S, first, call.scale).state

        def taken(S: torch.Tensor, x: gdn_prefill_reference.Values) -> torch.Tensor:
            return gdn_prefill_reference.chunked_bf16(S, x, 1.0)[1]

        matrix = taken(torch.eye(128)[None], middle._replace(v=torch.zeros_like(middle.v)))
        ends = {True: taken(S, middle), False: S @ matrix + taken(torch.zeros_like(S), middle)}
        for is_right, at_end in ends.items():
            new_state = taken(at_end, x.tokens(end, case.lengths[0]))[None]
            report = expected.judge((expected.output, new_state))[1]
            assert report.ok is is_right, (seed, is_right, str(report))


def test_offsets_taken_as_they_are_would_be_wrong() -> None:
    def cleaned(inputs: Any) -> Any:
        return inputs._replace(cu_seqlens=inputs.cu_seqlens.clamp(0, inputs.q.shape[0]))

    report = judged("gdn_prefill", "hostile_offsets", cleaned)
    assert report.ok, str(report)  # clamping alone changes nothing: the running maximum does
    sort = judged(
        "gdn_prefill",
        "hostile_offsets",
        lambda inputs: inputs._replace(cu_seqlens=inputs.cu_seqlens.sort().values),
    )
    assert not sort.ok


@pytest.mark.parametrize(
    ("name", "stands_for"),
    [
        # One of `a` and `dt_bias` is 0 in these strata, so that changing either changes x. In
        # float32 log(1 + exp(x)) is, for the other x,
        ("widest_gates", lambda x: torch.where(x < -17.0, -200.0, x)),  # 0,
        ("softplus_edges", lambda x: torch.where(x > 88.0, 1e4, x)),  # and inf
    ],
)
def test_a_softplus_without_log1p_is_caught(
    name: str, stands_for: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def naive(inputs: Any) -> Any:
        return inputs._replace(
            a=stands_for(inputs.a.float()).bfloat16(), dt_bias=stands_for(inputs.dt_bias)
        )

    assert judged("gdn_decode", name, lambda inputs: inputs).ok
    assert not judged("gdn_decode", name, naive).ok


# ---- attention ----------------------------------------------------------------------------------


def test_a_maximum_that_starts_at_zero_is_caught() -> None:
    inputs, _ = draw("dsa_sparse_attention", "all_logits_negative")
    row = inputs.sparse_indices[0, 0].long()
    logit = inputs.q_nope[0, 0].float() @ inputs.ckv_cache[row // 64, row % 64].float()
    assert float(logit * inputs.sm_scale) < -1000.0  # exp of it is 0 in float32


def test_logits_ascend_and_descend() -> None:
    inputs, _ = draw("dsa_sparse_attention", "ascending_logits")
    for token, sign in ((0, 1), (1, -1)):
        row = inputs.sparse_indices[token].long()
        keys = inputs.ckv_cache[row // 64, row % 64].float()
        logits = keys @ inputs.q_nope[token, 0].float()
        logits += inputs.kpe_cache[row // 64, row % 64].float() @ inputs.q_pe[token, 0].float()
        logits = sign * inputs.sm_scale * logits
        assert (logits.diff() >= -1e-3).all()
        assert float(logits[-1] - logits[0]) > 88.0  # the first ones vanish beside the last


def test_outputs_cancel() -> None:
    operator = catalog.operator("dsa_sparse_attention")
    inputs, _ = draw("dsa_sparse_attention", "cancelling")
    output, _ = operator.function(**inputs._asdict())
    assert float(output.float().abs().max()) < 1e-6


@pytest.mark.parametrize("name", ["one_index", "interleaved", "empty_tiles", "repeated"])
def test_an_index_lost_is_caught(name: str) -> None:
    """The last valid index of every token, where it stands."""

    def lost(inputs: Any) -> Any:
        indices = inputs.sparse_indices.clone()
        for row in indices:
            row[row == row[row >= 0][-1]] = -1
        return inputs._replace(sparse_indices=indices)

    assert not judged("dsa_sparse_attention", name, lost).ok


# ---- indexer ------------------------------------------------------------------------------------


def rows_of(name: str, seed: int = 1) -> tuple[Row, ...]:
    return indexer_reference(draw("dsa_topk_indexer", name, seed)[0]).rows


def test_near_ties_have_their_margins() -> None:
    topk = 2048
    for margin, row in zip(MARGINS, rows_of("near_ties"), strict=True):
        ranked = row.scores[row.order]
        around = row.order[topk - BOUNDARY : topk + BOUNDARY]
        band = 2.0 * INDEXER_SPEC.tolerances[0].limit * float(row.magnitudes[around].mean())
        gap = float(ranked[topk - 1] - ranked[topk])
        assert gap == pytest.approx(margin * band, abs=0.02 * band)
        assert float(ranked[topk - BOUNDARY] - ranked[topk - 1]) < 0.02 * band
        assert float(ranked[topk] - ranked[topk + BOUNDARY - 1]) < 0.02 * band


def test_one_bin_agrees_in_sixteen_bits() -> None:
    first, second = rows_of("one_bin")
    bins = [row.scores.float().view(torch.int32) >> 16 for row in (first, second)]
    # A rounding of the scale may carry a score over the edge of its bin.
    assert float((bins[0] == bins[0].mode().values).double().mean()) > 0.999
    assert float((bins[1] == bins[1].mode().values).double().mean()) == pytest.approx(
        2 / 3, abs=0.01
    )
    boundary = second.scores[second.order][2047].float().view(torch.int32) >> 16
    assert boundary == bins[1].mode().values


def _by_score(taken: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Row], torch.Tensor]:
    def choose(row: Row) -> torch.Tensor:
        scores = taken(row.scores.float())
        return row.indices[scores.sort(descending=True, stable=True).indices[:2048]]

    return choose


def _upper_16_bits(scores: torch.Tensor) -> torch.Tensor:
    return (scores.view(torch.int32) >> 16 << 16).view(torch.float32)


def _half(scores: torch.Tensor) -> torch.Tensor:
    return scores.half().float()


def _first_1024_of_the_bin(row: Row) -> torch.Tensor:
    """A buffer of 1024 for the candidates of the threshold's bin; what does not fit is lost."""
    order = row.order
    threshold = _upper_16_bits(row.scores.float())[order[2047]]
    in_bin = _upper_16_bits(row.scores.float()) == threshold
    kept = in_bin.nonzero().flatten()[:1024]
    above = order[~in_bin[order]]
    better = above[row.scores[above] > threshold]
    candidates = torch.cat([better, kept[row.scores[kept].sort(descending=True).indices]])
    return row.indices[candidates[:2048]]


def _without_the_best(row: Row) -> torch.Tensor:
    return row.indices[row.order[1:2049]]


def _without_the_last_page(row: Row) -> torch.Tensor:
    whole = row.scores.shape[0] // 64 * 64
    return row.indices[row.scores[:whole].sort(descending=True, stable=True).indices[:2048]]


def _highest_positions(row: Row) -> torch.Tensor:
    scores = row.scores.flip(0)
    return row.indices.flip(0)[scores.sort(descending=True, stable=True).indices[:2048]]


@pytest.mark.parametrize(
    ("name", "select"),
    [
        ("one_bin", _by_score(_upper_16_bits)),
        ("one_bin", _by_score(_half)),
        ("one_bin", _first_1024_of_the_bin),
        ("near_ties", _by_score(_half)),
        ("lone_winner", _without_the_best),
        ("lone_winner", _without_the_last_page),
        ("few_winners", _highest_positions),
        ("all_zero", _highest_positions),
        ("no_weight", _highest_positions),
    ],
)
def test_a_wrong_selection_is_caught(name: str, select: Callable[[Row], torch.Tensor]) -> None:
    expected = indexer_reference(draw("dsa_topk_indexer", name)[0])

    def answer(choose: Callable[[Row], torch.Tensor]) -> bool:
        chosen = torch.full((len(expected.rows), 2048), -1, dtype=torch.int32)
        for i, row in enumerate(expected.rows):
            best = choose(row)
            chosen[i, : best.numel()] = best.int()
        return all(error.ok for error in expected.judge((chosen,)))

    assert answer(_by_score(lambda scores: scores))
    assert not answer(select)


def test_winners_stand_together() -> None:
    front, back, piece, third = (
        row.order[:2048].sort().values for row in rows_of("winners_together")
    )
    assert front.tolist() == list(range(2048))
    assert back.tolist() == list(range(6144 - 2048, 6144))
    assert (piece.diff() == 1).all()
    assert (third.diff() == 3).all()


def test_few_winners_leave_a_plateau() -> None:
    (row,) = rows_of("few_winners")
    assert int((row.scores > 0).sum()) == 100
    assert int(row.is_zero.sum()) == 8220


def test_scales_reach_their_ends() -> None:
    tiny, huge, _ = rows_of("scale_extremes")
    assert float(tiny.scores.abs().max()) < 1e-30
    assert huge.scores.isinf().any()
    assert float(huge.scores[huge.scores.isfinite()].abs().max()) > 1e36


# ---- mixture of experts -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in strata("moe_fp8_block_scale")
        if name not in ("no_tokens", "none_local", "offset_far")
    ],
)
def test_local_experts_are_used(name: str) -> None:
    """Otherwise the right answer is 0 whatever the numbers are."""
    for seed in SEEDS:
        inputs, _ = draw("moe_fp8_block_scale", name, seed)
        local = admissible_routing(inputs).ids - inputs.local_expert_offset
        assert ((local >= 0) & (local < inputs.gemm1_weights.shape[0])).any()


@pytest.mark.parametrize("name", ["equal_logits", "equal_groups", "integer_logits"])
def test_ties_for_the_higher_index_are_caught(name: str) -> None:
    def upside_down(inputs: Any) -> Any:
        """Groups and experts in reverse, with weights to match: the same sums, other ties."""
        x = inputs._replace(local_expert_offset=256 - 32 - inputs.local_expert_offset)
        return x._replace(
            routing_logits=x.routing_logits.flip(1),
            routing_bias=x.routing_bias.flip(0),
            **{key: _flip(getattr(x, key)) for key in x._fields if key.startswith("gemm")},
        )

    assert not judged("moe_fp8_block_scale", name, upside_down).ok


def _flip(tensor: torch.Tensor) -> torch.Tensor:
    codes = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
    return codes.flip(0).contiguous().view(tensor.dtype)


def test_two_groups_decide_by_the_sum() -> None:
    inputs, _ = draw("moe_fp8_block_scale", "two_groups_decide")
    best = inputs.routing_logits.argmax(dim=1)
    assert not (admissible_routing(inputs).ids[: len(best)] == best[:, None]).any()


def test_weights_without_bias() -> None:
    """Routing weights that contain the bias differ where it decides."""
    inputs, _ = draw("moe_fp8_block_scale", "bias_decides")
    chosen = inputs.routing_bias.float()[admissible_routing(inputs).ids]
    assert float(chosen.min()) > 100.0


def test_a_neighbour_of_a_nan_token_is_not_nan() -> None:
    inputs, _ = draw("moe_fp8_block_scale", "nan_tokens")
    codes = inputs.hidden_states.view(torch.uint8)
    has_nan = ((codes & 0x7F) == 0x7F).any(dim=1)
    output = catalog.operator("moe_fp8_block_scale").function(**inputs._asdict())
    assert int(has_nan.sum()) == 6
    assert (output[has_nan] == 0).all()
    assert (output != 0).any(dim=1).sum() > 6
    assert not output.isnan().any()


def test_negative_zeros_are_there() -> None:
    inputs, _ = draw("moe_fp8_block_scale", "negative_zeros")
    assert (inputs.hidden_states.view(torch.uint8)[0] == 0x80).all()
    assert (inputs.gemm1_weights.view(torch.uint8)[0] == 0x80).all()
    assert 0.3 < float((inputs.gemm2_weights.view(torch.uint8) == 0x80).double().mean()) < 0.4
