"""gdn_decode's compiled routes on a GPU: what the contract tests do not ask.

What gdn_prefill's must hold, too: test_gdn_gpu.py. Every route over every case, poisoned outputs
and guard bytes: test_contracts.py. Not here: C91 (tensors on a GPU that is not current) needs two
GPUs; C101 (scratch inside a graph): decode has none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastkernels
from fastkernels import catalog, gdn_decode
from fastkernels.core import dispatch, extension, toolchain
from fastkernels.ops.gdn_decode.inputs import SERVING, Case, make_inputs
from fastkernels.ops.gdn_decode.kernels import KERNELS
from fastkernels.ops.gdn_decode.problem import Inputs
from fastkernels.ops.gdn_decode.reference import reference
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


def test_c16_no_compile_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch size of the table is served by kernels that are in the library."""

    def compile_kernel(*arguments: Any) -> Any:
        raise AssertionError(f"compiled {arguments}")

    monkeypatch.setattr(toolchain, "compile_kernel", compile_kernel)
    for mode in OPERATOR.spec.modes:
        for batch_size in range(1, 65):
            fastkernels.warmup("gdn_decode", mode=mode, batch_size=batch_size)
            decode(inputs_of(batch_size, mode=mode) if batch_size % 8 == 1 else inputs_of(1))


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
