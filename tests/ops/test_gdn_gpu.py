"""gdn_decode's and gdn_prefill's compiled routes on a GPU: what both must hold, and the contract
tests do not ask.

Every route over every case, poisoned outputs and guard bytes: test_contracts.py. Capture, streams
and synchronisation of the dispatched route: tests/graph/test_gpu.py. What only one of them has:
test_gdn_decode_gpu.py, test_gdn_prefill_gpu.py.
"""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import fastkernels
from fastkernels import ArgumentError, LaunchError, catalog
from fastkernels.core import compiled, dispatch, extension
from fastkernels.core.device import named_device
from fastkernels.core.problem import ProblemKey
from fastkernels.testing.compare import clone, same_bits
from tests.ops.gdn_calls import DECODE, MODES, PREFILL, Calls

pytestmark = pytest.mark.gpu

# Of none, of one, of more than a chunk's tokens.
LENGTHS = (3, 1, 70, 0, 17, 64, 2, 5, 9)
ROUTES = pytest.mark.parametrize(
    ("calls", "route"),
    [
        pytest.param(calls, kernel.name, id=f"{calls.name}-{kernel.name}")
        for calls in (DECODE, PREFILL)
        for kernel in catalog.module(calls.name, "kernels").KERNELS
    ],
)
BOTH = pytest.mark.parametrize("calls", [DECODE, PREFILL], ids=lambda calls: calls.name)
EVERY_MODE = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(autouse=True)
def library() -> None:
    """These tests are about the library: where there is none, they fail."""
    state = extension.state()
    assert state.status == "ok", state.found


def sized(calls: Calls, batch_size: int, lengths: tuple[int, ...]) -> dict[str, Any]:
    """The field of a case that says how much there is to do."""
    return {"batch_size": batch_size} if calls is DECODE else {"lengths": lengths}


def inputs_of(calls: Calls, mode: str = "functional", **fields: Any) -> Any:
    """Nine rows, unless `sized` says something else."""
    own: dict[str, Any] = {"num_q_heads": 4, "num_v_heads": 8, **sized(calls, 9, LENGTHS)}
    return calls.inputs(mode, "cuda", **(own | fields))


def call(
    calls: Calls, inputs: Any, route: str | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    function = calls.operator.function
    if route is None:
        output, new_state = function(**inputs._asdict(), **options)
    else:
        with fastkernels.force_route(calls.name, route):
            output, new_state = function(**inputs._asdict(), **options)
    return output, new_state


def expected(calls: Calls, pristine: Any) -> Any:
    return catalog.module(calls.name, "reference").reference(pristine)


def assert_right(calls: Calls, pristine: Any, outputs: tuple[Tensor, ...]) -> None:
    errors = expected(calls, pristine).judge(outputs)
    assert all(error.ok for error in errors), "; ".join(map(str, errors))


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def shifted(tensor: Tensor, elements: int = 1) -> Tensor:
    """The same values `elements` past an aligned address."""
    room = torch.empty(tensor.numel() + elements, dtype=tensor.dtype, device=tensor.device)
    copy = room[elements:].view(tensor.shape)
    return copy.copy_(tensor)


def key_of(calls: Calls, inputs: Any) -> ProblemKey:
    with dispatch.attest() as served:
        call(calls, clone(inputs))
    return served[0][0]


# ---- the short way ------------------------------------------------------------------------------


@BOTH
@EVERY_MODE
def test_the_short_way_is_the_long_way(
    calls: Calls, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call goes through Python's checks, later ones do not: the same bits."""
    inputs = inputs_of(calls, mode, seed=3)
    dispatch.reload_tables()
    first = call(calls, clone(inputs))
    if call_is_by_torch(calls, inputs):
        pytest.skip("no compiled route serves this yet")
    call(calls, clone(inputs))
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "run", None)
        second = call(calls, clone(inputs))
    assert_same(first, second)


def call_is_by_torch(calls: Calls, inputs: Any) -> bool:
    """As long as a table sends a call to the torch route, nothing of it is remembered."""
    key = key_of(calls, inputs)
    return dispatch.select(calls.operator, key).route.language == "torch"


@BOTH
@EVERY_MODE
def test_which_calls_take_the_short_way(
    calls: Calls, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of sizes that were served, or that lie in a served one's regime; others once, and all
    anew when tables are read again."""
    first = inputs_of(calls, mode)
    if call_is_by_torch(calls, first):
        pytest.skip("no compiled route serves this yet")
    key = key_of(calls, first)
    ranges = dispatch._ranges(key, dispatch.select(calls.operator, key))
    neighbour = inputs_of(calls, mode, **sized(calls, 10, (*LENGTHS[:-1], 8)))
    sizes = dict(key_of(calls, neighbour).axes)
    is_near = bool(ranges) and all(
        low <= sizes[name] <= high for name, (low, high) in ranges.items()
    )
    others = [
        inputs_of(calls, mode, num_q_heads=2),
        inputs_of(calls, mode, num_v_heads=16),
        *(inputs_of(calls, other) for other in MODES if other != mode),
    ]
    others = [each for each in others if not call_is_by_torch(calls, each)]
    dispatch.reload_tables()
    ran: list[int] = []
    run = dispatch.run

    def count(operator: Any, problem: Any) -> Any:
        ran.append(1)
        return run(operator, problem)

    monkeypatch.setattr(dispatch, "run", count)
    call(calls, clone(first))
    call(calls, clone(neighbour))
    assert len(ran) == 1 + (not is_near)
    before = len(ran)
    for _ in range(2):
        for each in (first, neighbour, *others):
            call(calls, clone(each))
    assert len(ran) == before + len(others)
    dispatch.reload_tables()
    call(calls, clone(first))
    assert len(ran) == before + len(others) + 1


@BOTH
@EVERY_MODE
def test_wrong_arguments_after_right_ones(calls: Calls, mode: str) -> None:
    """The library refuses, and Python says why: the words are those of a first call."""
    inputs = inputs_of(calls, mode)
    for _ in range(2):
        call(calls, clone(inputs))
    for change, words in (
        ({"k": inputs.k.float()}, "'k' is float32, expected bfloat16"),
        ({"a": inputs.a.cpu()}, "'a' is on cpu, expected cuda"),
        ({"b": inputs.b[..., :7]}, "'b' has shape"),
        ({"state": inputs.state.mT}, "'state' has strides"),
        ({"state": inputs.state.half()}, "'state' is float16, expected float32"),
        ({"A_log": [1.0] * 8}, "'A_log' is a list, expected a tensor"),
        ({"scale": "1"}, "'scale' is str, expected a float"),
        ({"inplace": 1}, "'inplace' is int, expected a bool"),
        ({"A_log": torch._neg_view(inputs.A_log)}, "'A_log' is a lazy negation"),
    ):
        with pytest.raises(ArgumentError, match=calls.name) as error:
            call(calls, inputs._replace(**change))
        assert words in str(error.value)
    for name in ("q", "A_log", "state"):
        grown = getattr(inputs, name).clone().requires_grad_()
        with pytest.raises(ArgumentError, match=f"'{name}' requires grad"):
            call(calls, inputs._replace(**{name: grown}))


@BOTH
def test_outputs_that_share_memory_are_refused_after_right_ones(calls: Calls) -> None:
    inputs = inputs_of(calls)
    output, new_state = call(calls, inputs)
    call(calls, inputs)
    with pytest.raises(ArgumentError, match="'new_state' overlaps 'state'"):
        call(calls, inputs, out=(output, inputs.state))
    with pytest.raises(ArgumentError, match="'output' overlaps 'v'"):
        call(calls, inputs, out=(inputs.v, new_state))
    with pytest.raises(ArgumentError, match="'out' is Tensor, expected a tuple"):
        call(calls, inputs, out=output)
    before = inputs.state.clone()
    with pytest.raises(ArgumentError, match="'new_state' is None, expected a tensor"):
        call(calls, inputs, out=(output, None))
    assert same_bits(inputs.state, before)
    as_list = call(calls, inputs, out=[output, new_state])
    assert type(as_list) is tuple
    with pytest.raises(ArgumentError, match="'out' is generator"):
        call(calls, inputs, out=(tensor for tensor in (output, new_state)))
    pool = inputs.state[:1].expand(10**7, -1, -1, -1)  # indices forgotten; 5 TB if it were copied
    with pytest.raises(ArgumentError, match=" has shape"):
        call(calls, inputs._replace(state=pool))


@BOTH
def test_indices_of_two_widths_go_to_the_torch_route(calls: Calls) -> None:
    inputs = inputs_of(calls, "pool")
    call(calls, clone(inputs))
    mixed = inputs._replace(write_indices=inputs.read_indices.long())
    pristine = clone(mixed)
    with dispatch.attest() as served:
        assert_right(calls, pristine, call(calls, clone(mixed)))
    assert served[0][1].route.language == "torch"
    assert_right(calls, pristine, call(calls, mixed))


@BOTH
def test_c17_host_time_does_not_grow(calls: Calls) -> None:
    """10,000 calls; the budget itself is measured by bench/run.py."""
    inputs = inputs_of(calls, **sized(calls, 1, (6,)))
    if call_is_by_torch(calls, inputs):
        pytest.skip("no compiled route serves this yet")
    out = call(calls, inputs)
    arguments = [getattr(inputs, argument.name) for argument in calls.operator.spec.inputs]
    function = calls.operator.function
    batches = []
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            function(*arguments, out=out)
        batches.append(time.perf_counter() - start)
    early, late = sorted(batches[:10])[5], sorted(batches[-10:])[5]
    assert late < 1.5 * early, f"{early / 200 * 1e6:.1f} us a call, later {late / 200 * 1e6:.1f}"


@ROUTES
def test_no_memory_is_kept(calls: Calls, route: str) -> None:
    """With outputs given, a call leaves nothing behind, nor does it take more than its workspace in
    between: a hundred calls need no more than one."""
    inputs = inputs_of(calls)
    out = call(calls, inputs, route)
    torch.cuda.synchronize()
    gc.collect()  # what other tests left must not go in between
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(calls, inputs, route, out=out)
    peak = torch.cuda.max_memory_allocated()
    for _ in range(100):
        call(calls, inputs, route, out=out)
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() == peak


# ---- every compiled route -----------------------------------------------------------------------


@ROUTES
@EVERY_MODE
@pytest.mark.parametrize("which", ["q", "k", "v", "state", "new_state", "all"])
def test_addresses_that_are_not_aligned(calls: Calls, route: str, mode: str, which: str) -> None:
    """A slower variant, the same result."""
    inputs = inputs_of(calls, mode, seed=7)
    pristine = clone(inputs)
    names = ("q", "k", "v", "state", "a", "b", "A_log", "dt_bias") if which == "all" else (which,)
    moved = clone(inputs)._replace(
        **{n: shifted(getattr(inputs, n)) for n in names if n != "new_state"}
    )
    options = {}
    if mode == "functional" and which in ("new_state", "all"):
        options["out"] = (shifted(torch.empty_like(inputs.v)), shifted(inputs.state).zero_())
    assert_right(calls, pristine, call(calls, moved, route, **options))


@ROUTES
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("wrong", [-2, 3, 2**31 - 1, -(2**31), 2**32 + 1, -(2**63), 2**63 - 1])
def test_slots_outside_the_pool_are_padding(
    calls: Calls, route: str, dtype: torch.dtype, wrong: int
) -> None:
    if not torch.iinfo(dtype).min <= wrong <= torch.iinfo(dtype).max:
        wrong = -7
    row = slice(1, 2) if calls is DECODE else slice(2, 72)
    inputs = inputs_of(calls, "pool", seed=3, **sized(calls, 3, (2, 70, 5)))
    pool = torch.randn(3, 8, 128, 128, device="cuda")
    read = torch.tensor([0, wrong, 2], dtype=dtype, device="cuda")
    write = torch.tensor([0, 1, wrong], dtype=dtype, device="cuda")
    inputs = inputs._replace(state=pool, read_indices=read, write_indices=write)
    pristine = clone(inputs)
    output, _ = call(calls, inputs, route)
    assert bool((output[row] == 0).all())
    assert same_bits(pool[1:], pristine.state[1:])
    assert_right(calls, pristine, (output, pool))


@ROUTES
@pytest.mark.parametrize("state", ["transposed", "expanded"])
def test_strides_over_slots_and_heads(calls: Calls, route: str, state: str) -> None:
    """Heads before slots; one state read by all rows."""
    inputs = inputs_of(calls, seed=6)
    if state == "transposed":
        view = inputs.state.transpose(0, 1).contiguous().transpose(0, 1)
    else:
        view = inputs.state[:1].expand(inputs.state.shape)
    strided = inputs._replace(state=view)
    packed = inputs._replace(state=view.contiguous())
    assert_right(calls, packed, call(calls, strided, route))


@ROUTES
@pytest.mark.parametrize("heads", [(1, 1), (1, 3), (2, 4), (3, 15), (8, 16), (16, 32), (5, 5)])
def test_head_counts(calls: Calls, route: str, heads: tuple[int, int]) -> None:
    inputs = inputs_of(calls, seed=5, num_q_heads=heads[0], num_v_heads=heads[1])
    assert_right(calls, inputs, call(calls, inputs, route))


@ROUTES
def test_many_seeds_give_equal_bits_twice(calls: Calls, route: str) -> None:
    for seed in range(12):
        inputs = inputs_of(calls, seed=seed, gates=("contest", "extreme")[seed % 2])
        first, second = call(calls, inputs, route), call(calls, inputs, route)
        assert_same(first, second)
        assert_right(calls, inputs, first)


# ---- streams, graphs, threads -------------------------------------------------------------------


@ROUTES
def test_inputs_written_just_before(calls: Calls, route: str) -> None:
    """C106: 2,000 times a kernel writes the inputs right before; each result is that of a calm
    call."""
    inputs = inputs_of(calls, seed=10)
    other = inputs_of(calls, seed=11)
    wanted = [call(calls, each, route) for each in (inputs, other)]
    static = clone(inputs)
    pairs = [
        [(to, at) for to, at in zip(static, each, strict=True) if isinstance(to, Tensor)]
        for each in (inputs, other)
    ]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    function = calls.operator.function
    with fastkernels.force_route(calls.name, route):
        for turn in range(2000):
            for target, value in pairs[turn % 2]:
                target.copy_(value)
            for got, want in zip(function(**static._asdict()), wanted[turn % 2], strict=True):
                wrong += (got != want).sum()
    assert int(wrong) == 0


@ROUTES
def test_no_synchronisation(calls: Calls, route: str) -> None:
    """C104: nothing in a call waits for the device."""
    inputs = inputs_of(calls)
    call(calls, inputs, route)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(calls, inputs, route)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@ROUTES
def test_the_callers_stream(calls: Calls, route: str) -> None:
    """C92: inputs written late on a side stream, then the call, then a reader, in order."""
    inputs = inputs_of(calls, seed=16)
    wanted = call(calls, inputs, route)
    late = clone(inputs)
    pairs = [(to, at) for to, at in zip(late, inputs, strict=True) if isinstance(to, Tensor)]
    for target, _ in pairs:
        target.zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for target, value in pairs:
            target.copy_(value)
        kept = tuple(output.clone() for output in call(calls, late, route))
    stream.synchronize()
    assert_same(kept, wanted)


@ROUTES
def test_two_streams_at_once(calls: Calls, route: str) -> None:
    """Calls on two streams do not meet in scratch or outputs."""
    problems = [inputs_of(calls, seed=seed) for seed in (17, 18)]
    wanted = [call(calls, each, route) for each in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results: list[list[tuple[Tensor, ...]]] = [[], []]
    for _ in range(20):
        for side, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[side].append(call(calls, problems[side], route))
    torch.cuda.synchronize()
    for side in (0, 1):
        for outputs in results[side]:
            assert_same(outputs, wanted[side])


@ROUTES
def test_capture_at_the_highest_log_level(
    calls: Calls, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C103, C100: nothing looks at values, and replay survives eager calls of other sizes."""
    monkeypatch.setenv("FASTKERNELS_LOG", "DEBUG")
    inputs = inputs_of(calls, seed=12)
    wanted = call(calls, inputs, route)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(calls, inputs, route)
    for tensor in captured:
        tensor.zero_()
    call(calls, inputs_of(calls, **sized(calls, 700, (2500, 7))), route)
    room = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").fill_(255)
    graph.replay()
    torch.cuda.synchronize()
    del room
    assert_same(captured, wanted)


@BOTH
def test_a_kernel_that_is_not_loaded_is_refused_in_a_capture(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_prepared", set())
    inputs = inputs_of(calls)
    first = catalog.module(calls.name, "kernels").KERNELS[0].name
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(fastkernels.NotWarmedUp, match="warmup"), torch.cuda.graph(graph):
        call(calls, inputs, first)
    torch.cuda.synchronize()


@ROUTES
def test_two_threads(calls: Calls, route: str) -> None:
    """Threads of their own have no current context; each has its own stream."""
    problems = [inputs_of(calls, seed=13), inputs_of(calls, seed=14, gates="extreme")]
    wanted = [call(calls, each, route) for each in problems]
    torch.cuda.synchronize()
    failures: list[str] = []

    def work(side: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                outputs = call(calls, problems[side], route)
            torch.cuda.current_stream().synchronize()
            if not all(same_bits(a, b) for a, b in zip(outputs, wanted[side], strict=True)):
                failures.append(f"thread {side}")

    threads = [threading.Thread(target=work, args=(side,)) for side in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("binaries", ["no cubin", "missing symbol"])
def test_machine_code_that_does_not_load_is_named(binaries: str) -> None:
    kernel = catalog.module("gdn_decode", "kernels").KERNELS[0]
    entries = extension.built(kernel, kernel.config, named_device("cuda").arch)
    assert entries is not None
    open_plan = extension.function("open_plan")
    code: Any = b"\x7fELF nonsense" if binaries == "no cubin" else entries[0]["binary"]
    with pytest.raises(RuntimeError, match="the label: the machine code of nothing does not load"):
        open_plan("the label", [0], [code], ["nothing"], [128], [0], [16, 0])


@BOTH
def test_a_launch_that_fails_names_operator_route_and_config(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1025 threads are no block: the long way and the short way say the same."""
    kernel = catalog.module(calls.name, "kernels").KERNELS[0]
    arch = named_device("cuda").arch
    entries = extension.built(kernel, kernel.config, arch)
    assert entries is not None
    handle = extension.function("open_plan")(
        "broken", [0] * len(entries), [e["binary"] for e in entries],
        [e["symbol"] for e in entries], [1025] * len(entries), [0] * len(entries),
        list(kernel.tile(kernel.config)),
    )  # fmt: skip
    inputs = inputs_of(calls)
    words = rf"{calls.name}: route '.*' with .* failed on {calls.name}\(.*broken.*INVALID"
    if not call_is_by_torch(calls, inputs):
        dispatch.reload_tables()
        key = key_of(calls, inputs)
        call(calls, inputs)
        route = calls.operator.route(kernel.name)
        assert route is not None
        assert route.remember is not None
        identity = (kernel.op, kernel.name, kernel.config, arch)
        extension.function("forget")(calls.name)
        with monkeypatch.context() as patch:
            patch.setitem(compiled._plans, identity, int(handle))
            route.remember(key, kernel.config, {})
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "run", None)
            with pytest.raises(LaunchError, match=words):
                call(calls, inputs)
    dispatch.reload_tables()
    monkeypatch.setitem(compiled._plans, (kernel.op, kernel.name, kernel.config, arch), int(handle))
    with pytest.raises(LaunchError, match=words.replace(".*", kernel.name, 1)):
        call(calls, inputs, kernel.name)
    torch.cuda.synchronize()
