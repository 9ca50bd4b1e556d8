"""gdn_prefill's compiled routes on a GPU: what the contract tests do not ask.

What gdn_decode's must hold, too: test_gdn_gpu.py. Every route over every case, poisoned outputs and
guard bytes: test_contracts.py. Not here: C91 (tensors on a GPU that is not current) needs two GPUs;
C31 (times per release): bench/results.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastkernels
from bench import sweep
from fastkernels import ArgumentError, catalog, gdn_decode, gdn_prefill
from fastkernels.core import dispatch, extension, toolchain
from fastkernels.core.device import named_device
from fastkernels.core.problem import key_from_axes
from fastkernels.ops.gdn_prefill.inputs import CONTEST, CORNER, CORRECTNESS, Case, make_inputs
from fastkernels.ops.gdn_prefill.kernels import KERNELS
from fastkernels.ops.gdn_prefill.problem import Inputs
from fastkernels.ops.gdn_prefill.reference import reference
from fastkernels.testing.compare import clone, run_case, same_bits
from fastkernels.testing.workloads import gdn_prefill as work

pytestmark = pytest.mark.gpu

OPERATOR = catalog.operator("gdn_prefill")
ROUTES = pytest.mark.parametrize("route", [kernel.name for kernel in KERNELS])
WITH_WORKSPACE = pytest.mark.parametrize(
    "route", [kernel.name for kernel in KERNELS if kernel.tile(kernel.config)[1]]
)
MODES = pytest.mark.parametrize("mode", OPERATOR.spec.modes)
FEW: dict[str, Any] = {"num_q_heads": 1, "num_v_heads": 2}
LENGTHS = (3, 1, 70, 0, 17, 64, 2, 5, 130)


@pytest.fixture(autouse=True)
def library() -> None:
    """These tests are about the library: where there is none, they fail."""
    state = extension.state()
    assert state.status == "ok", state.found


def inputs_of(*lengths: int, **fields: Any) -> Inputs:
    return make_inputs(Case("test", lengths, **fields), "cuda")


def prefill(
    inputs: Inputs, route: str | None = None, config: Any = None, **options: Any
) -> tuple[Tensor, Tensor]:
    if route is None:
        return gdn_prefill(**inputs._asdict(), **options)
    with fastkernels.force_route("gdn_prefill", route, config):
        return gdn_prefill(**inputs._asdict(), **options)


def assert_judged(expected: Any, outputs: tuple[Tensor, ...]) -> None:
    errors = expected.judge(outputs)
    assert all(error.ok for error in errors), "; ".join(map(str, errors))


def assert_right(pristine: Inputs, outputs: tuple[Tensor, ...]) -> None:
    """By float64 on the device where it has a way: large problems."""
    assert_judged(work.expect(pristine), outputs)


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def offsets_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], device="cuda")


# ---- dispatch -----------------------------------------------------------------------------------


@pytest.fixture
def table() -> Any:
    found, _ = dispatch.find_table(OPERATOR, named_device("cuda"))
    if found is None or found.status != "measured":
        pytest.skip("there is no measured table of this GPU")
    return found


@pytest.mark.sm90
@pytest.mark.usefixtures("table")
@MODES
def test_the_table_serves_with_compiled_routes(mode: str) -> None:
    sizes = {(c.axes["total_seq_len"], c.axes["num_seqs"]) for c in CONTEST}
    for total, num_seqs in sorted(sizes | {(16384, 1), (16384, 32), (65536, 4), (4096, 1024)}):
        explained = fastkernels.explain(
            "gdn_prefill", mode=mode, total_seq_len=total, num_seqs=num_seqs
        )
        assert explained.language != "torch"
        assert explained.status == "measured"
        assert not explained.is_fallback


@pytest.mark.usefixtures("table")
def test_c16_no_compile_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every size of the table is served by kernels that are in the library."""

    def compile_kernel(*arguments: Any) -> Any:
        raise AssertionError(f"compiled {arguments}")

    monkeypatch.setattr(toolchain, "compile_kernel", compile_kernel)
    for mode in OPERATOR.spec.modes:
        for total in (*range(1, 130, 3), 500, 1000, 3000, 8192, 16384):
            for num_seqs in (1, 2, 7, 40):
                fastkernels.warmup("gdn_prefill", mode=mode, total_seq_len=total, num_seqs=num_seqs)
    for case in CONTEST[::9]:
        prefill(make_inputs(case, "cuda"))


SWEPT = sweep.choices(OPERATOR, Path(sweep.__file__).parent / "sweeps" / "gdn_prefill.json")
SWEPT_CASES = ("pool", "extreme", "parallel", "tail", "strided-inplace", "stray-tokens")


@pytest.mark.parametrize("choice", SWEPT, ids=sweep.label)
def test_configs_of_the_sweep(choice: sweep.Choice) -> None:
    """Those that the library or a cache has."""
    route, config = choice
    for case in (*CORRECTNESS, *CORNER):
        if case.name not in SWEPT_CASES:
            continue
        key = key_from_axes(OPERATOR.spec, case.axes, named_device("cuda"), case.mode)
        decline = route.declines(key, config)
        if decline is not None:
            pytest.skip(decline.reason)
        report = run_case(OPERATOR, case, route, "cuda", config)
        assert report.ok, str(report)


# ---- workspace ----------------------------------------------------------------------------------


def size_of(inputs: Inputs, route: str) -> int:
    kernel = next(kernel for kernel in KERNELS if kernel.name == route)
    found = OPERATOR.route(route)
    assert found is not None
    axes = {
        "total_seq_len": inputs.q.shape[0],
        "num_seqs": inputs.cu_seqlens.shape[0] - 1,
        "num_v_heads": inputs.v.shape[1],
    }
    return found.workspace_bytes(axes, kernel.config)


@WITH_WORKSPACE
@MODES
@pytest.mark.parametrize("lengths", [LENGTHS, (2500, 3, 1100, 4000)], ids=["short", "long"])
def test_workspaces(route: str, mode: str, lengths: tuple[int, ...]) -> None:
    """Allocated or given, full of NaN before, the same bits; nothing beyond its size is written."""
    inputs = inputs_of(*lengths, mode=mode, seed=1)
    size = size_of(inputs, route)
    assert size > 0
    wanted = prefill(clone(inputs), route)
    guard = 4096
    for fill in (0xFF, 0x00):
        room = torch.full((size + guard,), fill, dtype=torch.uint8, device="cuda")
        outputs = prefill(clone(inputs), route, workspace=room)
        assert_same(outputs, wanted)
        assert bool((room[size:] == fill).all())
    exact = torch.empty(size, dtype=torch.uint8, device="cuda")
    assert_same(prefill(clone(inputs), route, workspace=exact), wanted)
    with pytest.raises(ArgumentError, match=f"'workspace' has {size - 1} bytes, expected at least"):
        prefill(clone(inputs), route, workspace=exact[:-1])
    with pytest.raises(ArgumentError, match="expected a multiple of 256"):
        prefill(clone(inputs), route, workspace=room[1 : size + 1])


def test_the_asked_workspace_is_enough() -> None:
    """`workspace_size` of the largest problem serves smaller ones, whatever route takes them."""
    inputs = inputs_of(*LENGTHS, seed=2)
    size = fastkernels.workspace_size("gdn_prefill", total_seq_len=4096, num_seqs=64)
    room = torch.empty(size, dtype=torch.uint8, device="cuda")
    assert_same(prefill(inputs, workspace=room), prefill(inputs))
    for kernel in KERNELS:
        assert_same(prefill(inputs, kernel.name, workspace=room), prefill(inputs, kernel.name))


@WITH_WORKSPACE
def test_c101_scratch_inside_a_graph(route: str) -> None:
    """Captured calls keep theirs while eager ones of all sizes run, and two captured calls that
    share one given workspace follow each other."""
    problems = [inputs_of(*LENGTHS, seed=3), inputs_of(200, 30, 1, seed=4)]
    wanted = [prefill(each, route) for each in problems]
    size = max(size_of(each, route) for each in problems)
    room = torch.empty(size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    every: tuple[dict[str, Any], ...] = ({}, {"workspace": room})
    for options in every:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [prefill(each, route, **options) for each in problems]
        for _ in range(3):
            for outputs in captured:
                for tensor in outputs:
                    tensor.zero_()
            prefill(inputs_of(900, 2), route)
            torch.empty(1 << 28, dtype=torch.uint8, device="cuda").fill_(255)
            graph.replay()
            torch.cuda.synchronize()
            for outputs, want in zip(captured, wanted, strict=True):
                assert_same(outputs, want)


# ---- graphs -------------------------------------------------------------------------------------


def replays(
    route: str, mode: str, splits: tuple[tuple[int, ...], ...], *offsets: list[int], **heads: int
) -> Iterator[tuple[Inputs, tuple[Tensor, ...]]]:
    """What was given to each replay of one graph, and its outputs, which are those of a call."""
    static = inputs_of(*splits[0], mode=mode, seed=5, **heads)
    graph = torch.cuda.CUDAGraph()
    prefill(clone(static), route)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = prefill(static, route)
    every = [offsets_of(split) for split in splits]
    every += [torch.tensor(values, device="cuda") for values in offsets]
    for seed, values in enumerate(every, 60):
        given = inputs_of(*splits[0], mode=mode, seed=seed, **heads)._replace(cu_seqlens=values)
        wanted = prefill(clone(given), route)
        for target, value in zip(static, given, strict=True):
            if isinstance(target, Tensor):
                assert isinstance(value, Tensor)
                target.copy_(value)
        captured[0].fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, wanted)
        yield given, captured


@ROUTES
@MODES
def test_replay_with_other_lengths_and_contents(route: str, mode: str) -> None:
    """A graph holds sizes, not lengths: one long sequence, many short ones, empty ones, stray
    tokens, offsets that decrease."""
    splits = (
        (57, 57, 57, 57, 57, 57, 58), (394, 1, 1, 1, 1, 1, 1), (0, 0, 0, 400, 0, 0, 0),
        (1, 63, 64, 65, 127, 80, 0), (5, 5, 5, 5, 5, 5, 5),
    )  # fmt: skip
    wrong = [9, 100, 50, 10**12, -5, 400, 399, 400]
    for given, captured in replays(route, mode, splits, wrong, **FEW):
        assert captured[0].shape[0] == 400
        assert_judged(reference(given), captured)


@MODES
def test_replay_with_other_segments(mode: str) -> None:
    """Lengths decide on the device where sequences are cut, every 1024 tokens; in place the last
    segment's state lies over the one that the first segment starts from."""
    splits = (
        (1200, 1200, 1200, 1200, 1200), (5996, 1, 1, 1, 1), (0, 3000, 0, 3000, 0),
        (1023, 1024, 1025, 2048, 880), (1, 3073, 2, 1, 300),
    )  # fmt: skip
    wrong = [70, 4000, 3000, 10**12, -5, 6000]
    for given, captured in replays(
        "chunk_parallel", mode, splits, wrong, num_q_heads=1, num_v_heads=1
    ):
        assert_right(given, captured)


# ---- lengths ------------------------------------------------------------------------------------


@ROUTES
def test_int32_offsets_are_equal(route: str) -> None:
    """C25."""
    inputs = inputs_of(*LENGTHS, seed=6)
    narrow = inputs._replace(cu_seqlens=inputs.cu_seqlens.int())
    assert_same(prefill(inputs, route), prefill(narrow, route))


OFFSETS: dict[str, list[int]] = {
    "decreasing": [0, 70, 20, 90, 100],
    "negative": [-5, 30, 30, -(2**40), 100],
    "beyond": [0, 30, 2**40 + 3, 40, 100],
    "late start": [10, 30, 31, 40, 90],
    "lower words are legal": [2**32, 2**32 + 30, 60, 80, 100],
}


@ROUTES
@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS.keys())
def test_offsets_are_not_trusted(route: str, offsets: list[int]) -> None:
    inputs = inputs_of(25, 25, 25, 25, seed=7, **FEW)
    inputs = inputs._replace(cu_seqlens=torch.tensor(offsets, device="cuda"))
    assert_judged(reference(inputs), prefill(inputs, route))


@ROUTES
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0), (3, 0, 2), (0, 0, 7, 0, 70, 0)], ids=str)
@pytest.mark.parametrize("state", ["random", "none"])
def test_c14_c18_nothing_to_do(route: str, lengths: tuple[int, ...], state: str) -> None:
    """Empty sequences keep their state to the bit, also what a multiplication would not keep."""
    inputs = inputs_of(*lengths, state=state, seed=8)
    empty = torch.tensor([i for i, n in enumerate(lengths) if n == 0], dtype=torch.int64)
    if inputs.state is not None and len(empty):
        inputs.state[empty[0], 0, 0, :3] = torch.tensor([-0.0, math.inf, math.nan])
    output, new_state = prefill(inputs, route)
    kept = torch.zeros_like(new_state) if inputs.state is None else inputs.state
    assert same_bits(new_state[empty], kept[empty])
    assert output.isfinite().all()
    if sum(lengths):
        assert_judged(reference(inputs), (output, new_state))


@ROUTES
@pytest.mark.timeout(60)
def test_c19_one_long_among_many_short(route: str) -> None:
    """63 sequences of one token and one of 4,096: no state, zeros and random."""
    inputs = inputs_of(*(1,) * 40, 4096, *(1,) * 23, seed=9)
    assert inputs.state is not None
    none = prefill(inputs._replace(state=None), route)
    zeros = prefill(inputs._replace(state=torch.zeros_like(inputs.state)), route)
    assert_same(none, zeros)
    assert_right(inputs, prefill(inputs, route))


@ROUTES
@pytest.mark.parametrize(("first", "second"), list(pairwise((1, 15, 16, 17, 63, 64, 65, 130, 1))))
def test_c20_no_token_leaks_into_the_sequence_before_or_after(
    route: str, first: int, second: int
) -> None:
    """Other tokens in one sequence, NaN among them: the other's results keep their bits."""
    inputs = inputs_of(first, second, seed=16, **FEW)
    output, state = prefill(inputs, route)
    for changed, kept, row in (
        (slice(first, None), slice(0, first), 0),
        (slice(0, first), slice(first, None), 1),
    ):
        other = clone(inputs)
        for x in (other.q, other.k, other.v, other.a, other.b):
            x[changed] = -2 * x[changed] + 1
        other.k[changed][0] = math.nan
        output_2, state_2 = prefill(other, route)
        assert same_bits(output_2[kept], output[kept])
        assert same_bits(state_2[row], state[row])
        assert not same_bits(output_2[changed], output[changed])


@ROUTES
@pytest.mark.parametrize("argument", ["q", "k", "v", "a", "b"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_behind(route: str, argument: str, value: float) -> None:
    """Earlier tokens and other sequences do not see it; the token's own and later results are not
    finite where the recurrence has them so."""
    inputs = inputs_of(100, 30, seed=10, **FEW)
    clean = prefill(inputs, route)
    dirty = clone(inputs)
    getattr(dirty, argument)[70].fill_(value)
    output, new_state = prefill(dirty, route)
    torch.testing.assert_close(output[:70], clean[0][:70], rtol=2e-2, atol=1e-3)
    assert same_bits(output[100:], clean[0][100:])
    assert same_bits(new_state[1], clean[1][1])
    expected = reference(dirty)
    assert not output.cpu()[~expected.output.isfinite()].isfinite().any()
    assert not new_state.cpu()[~expected.new_state.isfinite()].isfinite().any()


@ROUTES
@pytest.mark.parametrize("cuts", [(63,), (64,), (129,), (63, 64, 129)])
def test_c28_a_prompt_in_pieces(route: str, cuts: tuple[int, ...]) -> None:
    whole = inputs_of(130, seed=18)
    carried, outputs = whole.state, []
    for begin, end in pairwise((0, *cuts, 130)):
        names = ("q", "k", "v", "a", "b")
        cut: dict[str, Any] = {name: getattr(whole, name)[begin:end] for name in names}
        piece = whole._replace(**cut, cu_seqlens=offsets_of((end - begin,)), state=carried)
        part, carried = prefill(piece, route)
        outputs.append(part)
    assert carried is not None
    assert_judged(reference(whole), (torch.cat(outputs), carried))


@ROUTES
def test_c08_prefill_hands_its_state_to_decode(route: str) -> None:
    """5 tokens and a decode step; 6 steps."""
    inputs = inputs_of(6, seed=19)
    cut: dict[str, Any] = {n: getattr(inputs, n)[:5] for n in ("q", "k", "v", "a", "b")}
    head = inputs._replace(**cut, cu_seqlens=offsets_of((5,)))
    _, state = prefill(head, route)
    q, k, v, a, b = (x[5:][None] for x in (inputs.q, inputs.k, inputs.v, inputs.a, inputs.b))
    output, state = gdn_decode(q, k, v, state, inputs.A_log, a, inputs.dt_bias, b)
    assert_judged(reference(inputs), (torch.cat((prefill(head, route)[0], output[0])), state))


@ROUTES
def test_many_sequences(route: str) -> None:
    """Of few tokens each, more than a grid's second axis has blocks; and a longer one behind."""
    small = inputs_of(2, 1, 0, 3, seed=20, num_q_heads=1, num_v_heads=1)
    repeats, last = 17_000, 90  # 68,000 sequences, 4.5 GB of states
    tail = inputs_of(last, seed=21, num_q_heads=1, num_v_heads=1)
    big: dict[str, Any] = {}
    for name in ("q", "k", "v", "a", "b", "state"):
        few = getattr(small, name)
        rows = few.repeat(repeats, *[1] * (few.dim() - 1))
        big[name] = torch.cat((rows, getattr(tail, name)))
    lengths = (2, 1, 0, 3) * repeats + (last,)
    inputs = small._replace(**big, cu_seqlens=offsets_of(lengths), inplace=True)
    output, state = prefill(inputs, route)
    assert_judged(reference(small), (output[:6], state[:4]))
    middle = 4 * (repeats // 2)
    assert_judged(
        reference(small),
        (output[6 * (repeats // 2) :][:6], state[middle : middle + 4]),
    )
    tail = tail._replace(A_log=small.A_log, dt_bias=small.dt_bias)
    assert_judged(reference(tail), (output[-last:], state[-1:]))


# ---- pools --------------------------------------------------------------------------------------


@ROUTES
def test_c01_padding_sequences(route: str) -> None:
    inputs = inputs_of(4, 70, seed=22)
    pool = torch.randn(3, 8, 128, 128, device="cuda")
    before = pool.clone()
    for x in (inputs.q, inputs.k, inputs.v, inputs.a, inputs.b):
        x[4:] = math.nan
    indices = torch.tensor([1, -1], dtype=torch.int32, device="cuda")
    inputs = inputs._replace(state=pool, read_indices=indices, write_indices=None)
    pristine = clone(inputs)
    output, state = prefill(inputs, route)
    assert state is pool
    assert bool((output[4:] == 0).all())
    assert same_bits(pool[[0, 2]], before[[0, 2]])
    assert not same_bits(pool[1], before[1])
    assert_judged(reference(pristine), (output, pool))


@ROUTES
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_c02_c13_strided_indices_read_and_write_slots(route: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(2, 70, 5, seed=23)
    pool = torch.randn(6, 8, 128, 128, device="cuda")
    table = torch.tensor([[1, 9, 4, 9], [2, 9, -1, 9], [0, 9, 5, 9]], dtype=dtype, device="cuda")
    inputs = inputs._replace(state=pool, read_indices=table[:, 0], write_indices=table[:, 2])
    pristine = clone(inputs)
    assert_judged(reference(pristine), prefill(inputs, route))
    assert pristine.state is not None
    assert same_bits(pool[:4], pristine.state[:4])


@ROUTES
@pytest.mark.parametrize("mode", ["inplace", "pool"])
def test_c04_padded_slots(route: str, mode: str) -> None:
    room = torch.randn(4, 131_136, device="cuda")
    before = room.clone()
    state = room[:, :131_072].view(4, 8, 128, 128)
    if mode == "pool":
        written = [2]
        inputs = inputs_of(70, seed=24)._replace(
            state=state, read_indices=torch.tensor(written, device="cuda")
        )
    else:
        written = [0, 1, 2, 3]
        inputs = inputs_of(70, 1, 9, 64, seed=24, mode=mode)._replace(state=state)
    prefill(inputs, route)
    assert same_bits(room[:, 131_072:], before[:, 131_072:])
    for slot in range(4):
        assert same_bits(room[slot], before[slot]) == (slot not in written)


@ROUTES
def test_c05_slices_of_fused_projections(route: str) -> None:
    fused = inputs_of(*LENGTHS, layout="fused", seed=25)
    assert not fused.q.is_contiguous()
    assert_judged(reference(fused), prefill(fused, route))


@ROUTES
def test_slots_beyond_two_to_the_31_elements(route: str) -> None:
    """64-bit offsets: the second slot lies 2^31 + 64 elements after the first, the third behind."""
    stride = 2**31 + 64
    room = torch.empty(2 * stride + 8 * 128 * 128, device="cuda")
    pool = room.as_strided((3, 8, 128, 128), (stride, 128 * 128, 128, 1))
    pool.copy_(torch.randn(3, 8, 128, 128, device="cuda"))
    packed = inputs_of(2, 70, 5, seed=26)._replace(state=pool.contiguous())
    order = torch.tensor([2, 0, 1], dtype=torch.int32, device="cuda")
    inputs = packed._replace(state=pool, read_indices=order, write_indices=order)
    pristine = packed._replace(state=packed.state[[2, 0, 1]])  # type: ignore[index]
    output, _ = prefill(inputs, route)
    assert_judged(reference(pristine), (output, pool[[2, 0, 1]]))


@ROUTES
def test_c29_tokens_beyond_two_to_the_31_elements(route: str) -> None:
    """2,048 sequences of 1,024 tokens and one of 65 behind them: v and the output pass 2^31
    elements. The last sequence's numbers are those of a call of its own."""
    lengths = (1024,) * 2048 + (65,)
    total = sum(lengths)
    tail = inputs_of(65, seed=27)
    rng = torch.Generator("cuda").manual_seed(1)
    big: dict[str, Any] = {}
    for name in ("q", "k", "v", "a", "b"):
        last = getattr(tail, name)
        x = torch.empty((total, *last.shape[1:]), dtype=last.dtype, device="cuda")
        x.normal_(generator=rng)
        if name in "qk":
            x.mul_(128**-0.5)
        x[-65:] = last
        big[name] = x
    state = torch.zeros((len(lengths), 8, 128, 128), device="cuda")
    assert tail.state is not None
    state[-1] = tail.state[0]
    inputs = tail._replace(**big, state=state, cu_seqlens=offsets_of(lengths), inplace=True)
    output, new_state = prefill(inputs, route)
    assert_judged(reference(tail), (output[-65:], new_state[-1:]))
    # Its neighbour, too, lies beyond: by its own tokens alone.
    begin = total - 65 - 1024
    cut = {name: x[begin : begin + 1024] for name, x in big.items()}
    alone = tail._replace(**cut, state=torch.zeros_like(tail.state), cu_seqlens=offsets_of((1024,)))
    assert_right(alone, (output[begin : begin + 1024], new_state[-2:-1]))


# ---- numbers ------------------------------------------------------------------------------------

LONG: dict[str, dict[str, str]] = {
    "contest": {}, "slow": {"gates": "slow"}, "keep": {"gates": "keep"},
    "forget": {"gates": "forget"}, "extreme": {"gates": "extreme"},
    "parallel": {"keys": "parallel", "gates": "parallel"},
    "parallel-slow": {"keys": "parallel", "gates": "slow"}, "long-keys": {"keys": "long"},
}  # fmt: skip


@cache
def long_case(kind: str) -> tuple[Inputs, Any]:
    """8,192 tokens in one sequence, and what the oracle makes of them."""
    inputs = inputs_of(8192, seed=28, num_q_heads=1, num_v_heads=1, **LONG[kind])
    return inputs, reference(inputs)


@ROUTES
@pytest.mark.parametrize("kind", LONG)
def test_8192_tokens(route: str, kind: str) -> None:
    """Nothing adds up over 128 chunks: slow and no decay, none kept, beta 0 and 1, near-parallel
    keys, keys longer than 1."""
    inputs, expected = long_case(kind)
    assert_judged(expected, prefill(inputs, route))


@ROUTES
@pytest.mark.parametrize("num_seqs", [1, 40])
def test_serving_sizes(route: str, num_seqs: int) -> None:
    lengths = (16384 - 37 * (num_seqs - 1), *(37,) * (num_seqs - 1))
    inputs = work.fresh_inputs(Case("serving", lengths), 1, torch.device("cuda"))
    assert_right(inputs, prefill(inputs, route))


@ROUTES
def test_c31_memory_of_131072_tokens(route: str) -> None:
    """Outputs and the workspace are all that a call takes."""
    inputs = work.fresh_inputs(Case("long", (131072,)), 2, torch.device("cuda"))
    size = size_of(inputs, route)
    prefill(inputs_of(64), route)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = prefill(inputs, route)
    peak = torch.cuda.max_memory_allocated() - before
    results = sum(x.numel() * x.element_size() for x in outputs)
    assert peak <= results + size + (1 << 22)
    assert_right(inputs, outputs)


@ROUTES
@pytest.mark.parametrize(
    ("A_log", "a", "g"),
    [
        (math.inf, -math.inf, 1), (-math.inf, math.inf, 1), (-110, math.inf, 0), (math.inf, 1, 0),
        (-math.inf, 1, 1), (-800, math.inf, 1), (90, -200, None), (120, 0, 0), (-100, 0, 1),
        (20, 100, 0),
    ],
)  # fmt: skip
def test_c10_gates_beyond_their_range(route: str, A_log: float, a: float, g: int | None) -> None:
    """Finite, and inf * 0 counts as 0."""
    inputs = inputs_of(3, 70, seed=29)
    old = inputs.state
    assert old is not None
    inputs = inputs._replace(
        A_log=torch.full_like(inputs.A_log, A_log), a=torch.full_like(inputs.a, a),
        b=torch.full_like(inputs.b, -100.0),
    )  # fmt: skip
    outputs = prefill(inputs, route)
    assert all(bool(tensor.isfinite().all()) for tensor in outputs)
    assert_judged(reference(inputs), outputs)
    if g is not None:
        torch.testing.assert_close(outputs[1], g * old, rtol=1e-5, atol=1e-12)


@ROUTES
def test_c11_keys_and_queries_are_not_normalised(route: str) -> None:
    inputs = inputs_of(1, state="none")
    hot = torch.zeros(1, 4, 128, dtype=torch.bfloat16, device="cuda")
    hot[..., 3] = 1
    output, state = prefill(
        inputs._replace(
            q=hot, k=2 * hot, v=torch.ones_like(inputs.v), b=torch.full_like(inputs.b, 30.0)
        ),
        route,
    )
    wanted = torch.zeros_like(state)
    wanted[..., 3] = 2
    torch.testing.assert_close(state, wanted, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(
        output.float(), torch.full_like(output, 2 * 128**-0.5).float(), rtol=1e-2, atol=0
    )


# ---- time ---------------------------------------------------------------------------------------


def us_of(call: Callable[[], object]) -> float:
    """Of the GPU alone: replays of a graph of ten calls, between events; the median of 30."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    samples = []
    for _ in range(30):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(100.0 * start.elapsed_time(end))
    return statistics.median(samples)


@pytest.mark.sm90
@pytest.mark.usefixtures("table")
def test_a_skewed_batch_falls_off_no_cliff() -> None:
    """One sequence of 8,000 among 30 of 6 tokens against the long one alone, as dispatched."""
    alone, skewed = (make_inputs(case, "cuda") for case in work.SKEWED)
    alone_us, skewed_us = (us_of(lambda x=x: prefill(x)) for x in (alone, skewed))  # type: ignore[misc]
    assert skewed_us <= 1.3 * alone_us + 10, f"{skewed_us:.1f} us, alone {alone_us:.1f}"


# ---- processes ----------------------------------------------------------------------------------


def child() -> list[str]:
    """The first thing that this process does on the GPU is a call."""
    inputs = make_inputs(Case("child", LENGTHS, seed=30), "cuda")
    wrong = []
    for kernel in KERNELS:
        errors = reference(inputs).judge(prefill(inputs, kernel.name))
        wrong += [f"{kernel.name}: {error}" for error in errors if not error.ok]
    return wrong


def test_c23_a_spawned_worker() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(child).result(timeout=240) == []
