"""gdn_decode's compiled routes on a GPU: what the contract tests do not ask.

Every route over every case, poisoned outputs and guard bytes: test_contracts.py. Capture, streams
and synchronisation of the dispatched route: tests/graph/test_gpu.py. Not here: C91 (tensors on a
GPU that is not current) needs two GPUs; C101 (scratch inside a graph): decode has none.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import fastkernels
from fastkernels import LaunchError, catalog, gdn_decode
from fastkernels.core import compiled, dispatch, extension, toolchain
from fastkernels.core.device import named_device
from fastkernels.ops.gdn_decode.inputs import SERVING, Case, make_inputs
from fastkernels.ops.gdn_decode.kernels import KERNELS
from fastkernels.ops.gdn_decode.problem import Inputs
from fastkernels.ops.gdn_decode.reference import reference
from fastkernels.ops.gdn_decode.routes.library import sizes
from fastkernels.testing.compare import clone, run_case, same_bits

pytestmark = pytest.mark.gpu

OPERATOR = catalog.operator("gdn_decode")
ROUTES = pytest.mark.parametrize("route", [kernel.name for kernel in KERNELS])
MODES = pytest.mark.parametrize("mode", OPERATOR.spec.modes)


@pytest.fixture(autouse=True)
def library() -> None:
    """These tests are about the library: where there is none, they fail."""
    state = extension.state()
    assert state.status == "ok", state.found


def inputs_of(batch_size: int, **fields: Any) -> Inputs:
    return make_inputs(Case("test", batch_size, **fields), "cuda")


def decode(inputs: Inputs, route: str | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    if route is None:
        return gdn_decode(**inputs._asdict(), **options)
    with fastkernels.force_route("gdn_decode", route):
        return gdn_decode(**inputs._asdict(), **options)


def assert_right(pristine: Inputs, outputs: tuple[Tensor, ...]) -> None:
    errors = reference(pristine).judge(outputs)
    assert all(error.ok for error in errors), "; ".join(map(str, errors))


def shifted(tensor: Tensor, elements: int = 1) -> Tensor:
    """The same values `elements` past an aligned address."""
    room = torch.empty(tensor.numel() + elements, dtype=tensor.dtype, device=tensor.device)
    copy = room[elements:].view(tensor.shape)
    return copy.copy_(tensor)


# ---- dispatch -----------------------------------------------------------------------------------


@pytest.mark.sm90
@MODES
def test_the_table_serves_with_compiled_routes(mode: str) -> None:
    for batch_size in (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 512, 1024):
        with dispatch.attest() as served:
            decode(inputs_of(batch_size if batch_size < 100 else 5, mode=mode))
        assert served[0][1].route.language != "torch"
        explained = fastkernels.explain("gdn_decode", mode=mode, batch_size=batch_size)
        assert explained.language != "torch"
        assert explained.status == "measured"
        assert not explained.is_fallback


@MODES
def test_the_short_way_is_the_long_way(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call goes through Python's checks, later ones do not: the same bits."""
    inputs = inputs_of(5, mode=mode, seed=3)
    dispatch.reload_tables()
    first = decode(clone(inputs))
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "run", None)
        second = decode(clone(inputs))
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))


@MODES
def test_sizes_that_were_not_served_take_the_long_way(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch.reload_tables()
    decode(inputs_of(5, mode=mode))
    others = [
        inputs_of(6, mode=mode),
        inputs_of(5, mode=mode, num_q_heads=2),
        inputs_of(5, mode=mode, num_v_heads=16),
        *(inputs_of(5, mode=other) for other in OPERATOR.spec.modes if other != mode),
    ]
    ran: list[int] = []
    run = dispatch.run

    def count(operator: Any, problem: Any) -> Any:
        ran.append(1)
        return run(operator, problem)

    monkeypatch.setattr(dispatch, "run", count)
    for each in others:
        decode(each)
    assert len(ran) == len(others)
    for each in (inputs_of(5, mode=mode), *others):
        decode(each)
    assert len(ran) == len(others)
    dispatch.reload_tables()
    decode(others[0])
    assert len(ran) == len(others) + 1


@MODES
def test_wrong_arguments_after_right_ones(mode: str) -> None:
    """The library refuses, and Python says why: the words are those of a first call."""
    inputs = inputs_of(5, mode=mode)
    decode(clone(inputs))
    assert inputs.state is not None
    for change, words in (
        ({"k": inputs.k.float()}, "'k' is float32, expected bfloat16"),
        ({"a": inputs.a.cpu()}, "'a' is on cpu, expected cuda"),
        ({"b": inputs.b[:, :, :7]}, "'b' has shape"),
        ({"state": inputs.state.mT}, "'state' has strides"),
        ({"state": inputs.state.half()}, "'state' is float16, expected float32"),
        ({"A_log": [1.0] * 8}, "'A_log' is a list, expected a tensor"),
        ({"scale": "1"}, "'scale' is str, expected a float"),
        ({"inplace": 1}, "'inplace' is int, expected a bool"),
        ({"A_log": torch._neg_view(inputs.A_log)}, "'A_log' is a lazy negation"),
    ):
        with pytest.raises(fastkernels.ArgumentError, match="gdn_decode: .*" + words[:12]) as error:
            decode(inputs._replace(**change))
        assert words in str(error.value)
    for name in ("q", "A_log", "state"):
        grown = getattr(inputs, name).clone().requires_grad_()
        with pytest.raises(fastkernels.ArgumentError, match=f"'{name}' requires grad"):
            decode(inputs._replace(**{name: grown}))


def test_outputs_that_share_memory_are_refused_after_right_ones() -> None:
    inputs = inputs_of(5)
    assert inputs.state is not None
    output, new_state = decode(inputs)
    with pytest.raises(fastkernels.ArgumentError, match="'new_state' overlaps 'state'"):
        decode(inputs, out=(output, inputs.state))
    with pytest.raises(fastkernels.ArgumentError, match="'output' overlaps 'v'"):
        decode(inputs, out=(inputs.v, new_state))
    with pytest.raises(fastkernels.ArgumentError, match="'out' is Tensor, expected a tuple"):
        decode(inputs, out=output)
    before = inputs.state.clone()
    with pytest.raises(fastkernels.ArgumentError, match="'new_state' is None, expected a tensor"):
        decode(inputs, out=(output, None))
    assert same_bits(inputs.state, before)
    as_list = decode(inputs, out=[output, new_state])
    assert type(as_list) is tuple
    with pytest.raises(fastkernels.ArgumentError, match="'out' is generator"):
        decode(inputs, out=(tensor for tensor in (output, new_state)))
    pool = inputs.state[:1].expand(10**7, -1, -1, -1)  # indices forgotten; 5 TB if it were copied
    with pytest.raises(fastkernels.ArgumentError, match="'state' has shape"):
        decode(inputs._replace(state=pool))


def test_indices_of_two_widths_go_to_the_torch_route() -> None:
    inputs = inputs_of(5, mode="pool")
    assert inputs.read_indices is not None
    decode(clone(inputs))
    mixed = inputs._replace(write_indices=inputs.read_indices.long())
    pristine = clone(mixed)
    with dispatch.attest() as served:
        assert_right(pristine, decode(clone(mixed)))
    assert served[0][1].route.language == "torch"
    assert_right(pristine, decode(mixed))


def test_c16_no_compile_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch size of the table is served by kernels that are in the library."""

    def compile_kernel(*arguments: Any) -> Any:
        raise AssertionError(f"compiled {arguments}")

    monkeypatch.setattr(toolchain, "compile_kernel", compile_kernel)
    for mode in OPERATOR.spec.modes:
        for batch_size in range(1, 65):
            fastkernels.warmup("gdn_decode", mode=mode, batch_size=batch_size)
            decode(inputs_of(batch_size, mode=mode) if batch_size % 8 == 1 else inputs_of(1))


def test_c17_host_time_does_not_grow() -> None:
    """10,000 calls; the budget itself is measured by bench/run.py."""
    inputs = inputs_of(1)
    out = decode(inputs)
    batches = []
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            gdn_decode(*inputs[:8], out=out)
        batches.append(time.perf_counter() - start)
    early, late = sorted(batches[:10])[5], sorted(batches[-10:])[5]
    assert late < 1.5 * early, f"{early / 200 * 1e6:.1f} us a call, later {late / 200 * 1e6:.1f}"


def test_no_allocation_with_given_outputs() -> None:
    inputs = inputs_of(4)
    out = decode(inputs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        gdn_decode(*inputs[:8], out=out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


# ---- every compiled route -----------------------------------------------------------------------


@ROUTES
@MODES
@pytest.mark.parametrize("which", ["q", "k", "state", "new_state", "all"])
def test_addresses_that_are_not_aligned(route: str, mode: str, which: str) -> None:
    """A slower variant, the same result."""
    inputs = inputs_of(5, mode=mode, seed=7)
    pristine = clone(inputs)
    wanted = decode(clone(inputs), route)
    names = ("q", "k", "v", "state", "a", "b", "A_log", "dt_bias") if which == "all" else (which,)
    moved = clone(inputs)._replace(
        **{n: shifted(getattr(inputs, n)) for n in names if n != "new_state"}
    )
    options = {}
    if mode == "functional" and which in ("new_state", "all"):
        options["out"] = (shifted(wanted[0]).zero_(), shifted(wanted[1]).zero_())
    outputs = decode(moved, route, **options)
    assert_right(pristine, outputs)
    for got, want in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-5, equal_nan=True)


@ROUTES
def test_c01_padding_rows(route: str) -> None:
    inputs = inputs_of(2, mode="pool", seed=1)
    pool = torch.randn(3, 8, 128, 128, device="cuda")
    before = pool.clone()
    for row in (inputs.q, inputs.k, inputs.v, inputs.a, inputs.b):
        row[1] = float("nan")
    indices = torch.tensor([1, -1], dtype=torch.int32, device="cuda")
    inputs = inputs._replace(state=pool, read_indices=indices, write_indices=None)
    pristine = clone(inputs)
    output, state = decode(inputs, route)
    assert state is pool
    assert bool((output[1] == 0).all())
    assert same_bits(pool[[0, 2]], before[[0, 2]])
    assert not same_bits(pool[1], before[1])
    packed = pristine._replace(
        q=pristine.q[:1], k=pristine.k[:1], v=pristine.v[:1], a=pristine.a[:1], b=pristine.b[:1],
        state=before[1:2], read_indices=None, write_indices=None,
    )  # fmt: skip
    assert_right(packed, (output[:1], pool[1:2]))


@ROUTES
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_c02_c13_strided_indices_read_and_write_slots(route: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(3, mode="pool", seed=2)
    pool = torch.randn(6, 8, 128, 128, device="cuda")
    table = torch.tensor([[1, 9, 4, 9], [2, 9, -1, 9], [0, 9, 5, 9]], dtype=dtype, device="cuda")
    inputs = inputs._replace(state=pool, read_indices=table[:, 0], write_indices=table[:, 2])
    pristine = clone(inputs)
    assert_right(pristine, decode(inputs, route))
    assert pristine.state is not None
    assert same_bits(pool[:4], pristine.state[:4])


@ROUTES
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("wrong", [-2, 3, 2**31 - 1, -(2**31), 2**32 + 1, -(2**63), 2**63 - 1])
def test_slots_outside_the_pool_are_padding(route: str, dtype: torch.dtype, wrong: int) -> None:
    if not torch.iinfo(dtype).min <= wrong <= torch.iinfo(dtype).max:
        wrong = -7
    inputs = inputs_of(3, mode="pool", seed=3)
    pool = torch.randn(3, 8, 128, 128, device="cuda")
    read = torch.tensor([0, wrong, 2], dtype=dtype, device="cuda")
    write = torch.tensor([0, 1, wrong], dtype=dtype, device="cuda")
    inputs = inputs._replace(state=pool, read_indices=read, write_indices=write)
    pristine = clone(inputs)
    output, _ = decode(inputs, route)
    assert bool((output[1] == 0).all())
    assert pristine.state is not None
    assert same_bits(pool[1:], pristine.state[1:])
    assert_right(pristine, (output, pool))


@ROUTES
def test_c04_padded_slots(route: str) -> None:
    room = torch.randn(4, 131_136, device="cuda")
    before = room.clone()
    inputs = inputs_of(1, mode="pool", seed=4)
    indices = torch.tensor([2], device="cuda")
    pool = room[:, :131_072].view(4, 8, 128, 128)
    decode(inputs._replace(state=pool, read_indices=indices, write_indices=None), route)
    assert not same_bits(room[2, :131_072], before[2, :131_072])
    assert same_bits(room[2, 131_072:], before[2, 131_072:])
    assert same_bits(room[[0, 1, 3]], before[[0, 1, 3]])


@ROUTES
@pytest.mark.parametrize(("heads"), [(1, 1), (1, 3), (2, 4), (3, 15), (8, 16), (16, 32), (5, 5)])
def test_head_counts(route: str, heads: tuple[int, int]) -> None:
    case = Case("heads", 3, seed=5, num_q_heads=heads[0], num_v_heads=heads[1])
    report = run_case(OPERATOR, case, OPERATOR.route(route), "cuda")
    assert report.ok, str(report)


@ROUTES
@pytest.mark.parametrize("state", ["transposed", "expanded"])
def test_strides_over_slots_and_heads(route: str, state: str) -> None:
    """Heads before slots; one state read by all rows."""
    inputs = inputs_of(4, seed=6)
    assert inputs.state is not None
    if state == "transposed":
        view = inputs.state.transpose(0, 1).contiguous().transpose(0, 1)
    else:
        view = inputs.state[:1].expand(4, -1, -1, -1)
    strided = inputs._replace(state=view)
    assert_right(inputs._replace(state=view.contiguous()), decode(strided, route))


@ROUTES
def test_more_rows_than_a_grid_has(route: str) -> None:
    """Batch 70,000 exceeds the 65,535 blocks of a grid's second axis; 4.6 GB of state."""
    batch_size = 70_000
    small = inputs_of(7, num_q_heads=1, num_v_heads=1, seed=8)
    picks = [0, 1, 65_534, 65_535, 65_536, 69_998, 69_999]
    rows: dict[str, Any] = {}
    for name in ("q", "k", "v", "a", "b", "state"):
        few = getattr(small, name)
        rows[name] = few[torch.arange(batch_size, device="cuda") % 7].contiguous()
        rows[name][picks] = few
    inputs = small._replace(**rows, inplace=True)
    output, state = decode(inputs, route)
    assert_right(small, (output[picks], state[picks]))
    assert_right(small, (output[7:14], state[7:14]))


@ROUTES
def test_slots_beyond_two_to_the_31_elements(route: str) -> None:
    """64-bit offsets: the second slot lies 2^31 + 64 elements after the first, the third behind."""
    stride = 2**31 + 64
    room = torch.empty(2 * stride + 8 * 128 * 128, device="cuda")
    pool = room.as_strided((3, 8, 128, 128), (stride, 128 * 128, 128, 1))
    pool.copy_(torch.randn(3, 8, 128, 128, device="cuda"))
    packed = inputs_of(3, seed=9)._replace(state=pool.contiguous())
    order = torch.tensor([2, 0, 1], dtype=torch.int32, device="cuda")
    inputs = packed._replace(state=pool, read_indices=order, write_indices=order)
    pristine = packed._replace(state=packed.state[[2, 0, 1]])  # type: ignore[index]
    output, _ = decode(inputs, route)
    assert_right(pristine, (output, pool[[2, 0, 1]]))


@ROUTES
@pytest.mark.parametrize(
    ("A_log", "a", "g"),
    [
        (float("inf"), -float("inf"), 1), (-float("inf"), float("inf"), 1), (-110, float("inf"), 0),
        (float("inf"), 1, 0), (-float("inf"), 1, 1), (90, -200, None), (120, 0, 0), (-100, 0, 1),
    ],
)  # fmt: skip
def test_c10_gates_beyond_their_range(route: str, A_log: float, a: float, g: int | None) -> None:
    """Finite, and inf * 0 counts as 0."""
    inputs = inputs_of(2, seed=15)
    old = inputs.state
    assert old is not None
    inputs = inputs._replace(
        A_log=torch.full_like(inputs.A_log, A_log), a=torch.full_like(inputs.a, a),
        b=torch.full_like(inputs.b, -100.0),
    )  # fmt: skip
    outputs = decode(inputs, route)
    assert all(bool(tensor.isfinite().all()) for tensor in outputs)
    assert_right(inputs, outputs)
    if g is not None:
        torch.testing.assert_close(outputs[1], g * old, rtol=1e-5, atol=1e-12)


@ROUTES
def test_many_seeds_give_equal_bits_twice(route: str) -> None:
    for seed in range(12):
        inputs = inputs_of(9, seed=seed, gates=("contest", "extreme")[seed % 2])
        first, second = decode(inputs, route), decode(inputs, route)
        assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))
        assert_right(inputs, first)


@ROUTES
def test_inputs_written_just_before(route: str) -> None:
    """C106: 2,000 times a kernel writes the inputs right before; each result is that of a calm
    call."""
    inputs = inputs_of(2, seed=10)
    other = inputs_of(2, seed=11)
    wanted = [decode(each, route) for each in (inputs, other)]
    static = clone(inputs)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with fastkernels.force_route("gdn_decode", route):
        for turn in range(2000):
            source = (inputs, other)[turn % 2]
            for target, value in zip(static[:8], source[:8], strict=True):
                target.copy_(value)
            output, new_state = gdn_decode(*static[:8])
            wrong += (output != wanted[turn % 2][0]).sum() + (
                new_state != wanted[turn % 2][1]
            ).sum()
    assert int(wrong) == 0


@ROUTES
def test_capture_at_the_highest_log_level(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C103, C100: nothing looks at values, and replay survives eager calls of other sizes."""
    monkeypatch.setenv("FASTKERNELS_LOG", "DEBUG")
    inputs = inputs_of(3, seed=12)
    wanted = decode(inputs, route)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode(inputs, route)
    for tensor in captured:
        tensor.zero_()
    decode(inputs_of(64), route)
    room = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").fill_(255)
    graph.replay()
    torch.cuda.synchronize()
    del room
    assert all(same_bits(a, b) for a, b in zip(captured, wanted, strict=True))


def test_a_kernel_that_is_not_loaded_is_refused_in_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "_prepared", set())
    inputs = inputs_of(3)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(fastkernels.NotWarmedUp, match="warmup"), torch.cuda.graph(graph):
        decode(inputs, KERNELS[0].name)
    torch.cuda.synchronize()


# ---- threads and errors -------------------------------------------------------------------------


@ROUTES
def test_two_threads(route: str) -> None:
    """Threads of their own have no current context; each has its own stream."""
    problems = [inputs_of(9, seed=13), inputs_of(9, seed=14, gates="extreme")]
    wanted = [decode(each, route) for each in problems]
    torch.cuda.synchronize()
    failures: list[str] = []

    def work(side: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                outputs = decode(problems[side], route)
            torch.cuda.current_stream().synchronize()
            if not all(same_bits(a, b) for a, b in zip(outputs, wanted[side], strict=True)):
                failures.append(f"thread {side}")

    threads = [threading.Thread(target=work, args=(side,)) for side in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("binaries", ["no cubin", "missing symbol"])
def test_machine_code_that_does_not_load_is_named(binaries: str) -> None:
    kernel = KERNELS[0]
    entries = extension.built(kernel, kernel.config, named_device("cuda").arch)
    assert entries is not None
    open_plan = extension.function("open_plan")
    code: Any = b"\x7fELF nonsense" if binaries == "no cubin" else entries[0]["binary"]
    with pytest.raises(RuntimeError, match="the label: the machine code of nothing does not load"):
        open_plan("the label", 0, [code], ["nothing"], [128], [0], [16, 0])


def test_a_launch_that_fails_names_operator_route_and_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1025 threads are no block: the long way and the short way say the same."""
    kernel = KERNELS[0]
    arch = named_device("cuda").arch
    entries = extension.built(kernel, kernel.config, arch)
    assert entries is not None
    handle = extension.function("open_plan")(
        "broken", 0, [e["binary"] for e in entries], [e["symbol"] for e in entries],
        [1025] * len(entries), [0] * len(entries), list(kernel.tile(kernel.config)),
    )  # fmt: skip
    inputs = inputs_of(2)
    words = r"gdn_decode: route '.*' with .* failed on gdn_decode\(batch_size=2.*broken.*INVALID"
    dispatch.reload_tables()
    decode(inputs)
    key = dispatch.key_for(OPERATOR, "cuda", "functional", {"batch_size": 2})
    extension.function("remember")("gdn_decode", list(sizes(key)), int(handle))
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "run", None)
        with pytest.raises(LaunchError, match=words):
            decode(inputs)
    dispatch.reload_tables()
    monkeypatch.setitem(compiled._plans, (kernel.op, kernel.name, kernel.config, arch), int(handle))
    with pytest.raises(LaunchError, match=words.replace(".*", kernel.name, 1)):
        decode(inputs, kernel.name)
    torch.cuda.synchronize()


@pytest.mark.parametrize("case", SERVING[:2], ids=lambda case: case.name)
@ROUTES
def test_serving_sizes(route: str, case: Case) -> None:
    """The oracle steps in Python: 256 to 1024 rows are judged by bench/run.py, in float64 on the
    device, and differ from 128 in the grid's size alone."""
    report = run_case(OPERATOR, case, OPERATOR.route(route), "cuda")
    assert report.ok, str(report)


@ROUTES
def test_gates_over_their_whole_range(route: str) -> None:
    """A_log -30..80 against a + dt_bias -60..40, so that log_g is of every size; q, k and the state
    are such that new_state shows g and beta themselves."""
    rows, heads = 256, 32
    A_log = torch.linspace(-30, 80, heads, device="cuda")
    a = torch.linspace(-60, 40, rows, device="cuda").bfloat16().view(rows, 1, 1)
    # As many again where g is neither 0 nor 1: softplus(x) is about exp(-A_log).
    spread = torch.linspace(-4, 4, rows, device="cuda")[:, None]
    near = torch.where(A_log < 0, (-A_log).exp()[None] * spread.exp(), -A_log[None] + spread)
    near = near.bfloat16()
    b = torch.linspace(-20, 20, rows, device="cuda").bfloat16().view(rows, 1, 1)
    for x in (a.expand(rows, 1, heads).contiguous(), near.view(rows, 1, heads)):
        shape: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        key = torch.zeros(rows, 1, 1, 128, **shape)
        key[..., 3] = 1
        inputs = Inputs(
            q=key, k=key, v=torch.zeros(rows, 1, heads, 128, **shape),
            state=torch.ones(rows, heads, 128, 128, device="cuda"), A_log=A_log, a=x,
            dt_bias=torch.zeros(heads, device="cuda"), b=b.expand(rows, 1, heads).contiguous(),
        )  # fmt: skip
        _, state = decode(inputs, route)
        rate, step = A_log.double().exp(), torch.nn.functional.softplus(x[:, 0].double())
        g = torch.exp(torch.where(step == 0, 0.0, -rate * step))
        beta = torch.sigmoid(b[:, 0].double())
        assert bool(((state[:, :, 0, 0] - g).abs() <= 1e-5 * g + 1e-15).all())
        kept = g * (1 - beta)  # column 3 loses what beta erases
        assert bool(((state[:, :, 0, 3] - kept).abs() <= 1e-5 * g + 1e-15).all())
