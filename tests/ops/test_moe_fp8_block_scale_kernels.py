"""The short way of a call into the library: with an entry that stands for it, and the library's own
checks against Python's on host tensors (plans -1 and -2 launch nothing). What the kernels compute:
test_moe_fp8_block_scale_triton.py; both together on a GPU: test_moe_fp8_block_scale_gpu.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkernels import ArgumentError, LaunchError, moe_fp8_block_scale
from fastkernels.core import dispatch, extension
from fastkernels.core.device import named_device
from fastkernels.core.extension import LaunchFailed
from fastkernels.core.problem import key_from_axes
from fastkernels.core.route import ShortWay
from fastkernels.ops.moe_fp8_block_scale.inputs import CORNER, CORRECTNESS, SMALL, Case, make_inputs
from fastkernels.ops.moe_fp8_block_scale.kernels import KERNELS, WgmmaGrouped
from fastkernels.ops.moe_fp8_block_scale.problem import Inputs, bind
from fastkernels.ops.moe_fp8_block_scale.routes import library as routes
from fastkernels.ops.moe_fp8_block_scale.spec import SPEC
from tests.ops.entry_changes import ANY_ARGUMENT

CASE = Case("small", 3, seed=1, **SMALL)
GIVEN = Case("given", 3, seed=1, mode="precomputed", **SMALL)
WEIGHTS = ("hidden_states", "hidden_states_scale", "gemm1_weights", "gemm1_weights_scale",
           "gemm2_weights", "gemm2_weights_scale")  # fmt: skip
TENSORS = {
    "logits": ("routing_logits", "routing_bias", *WEIGHTS),
    "precomputed": ("topk_ids", "topk_weights", *WEIGHTS),
}


def output_of(inputs: Inputs) -> torch.Tensor:
    return torch.empty(inputs.hidden_states.shape, dtype=torch.bfloat16)


# ---- what the caller hands over and gets back ---------------------------------------------------


class Library:
    """Takes every call, and keeps it by the names of its arguments."""

    names = (*(a.name for a in SPEC.inputs), *(a.name for a in SPEC.options), "output", "workspace")

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.answer: bool | Exception = True

    def __call__(self, plan: int, *arguments: Any) -> bool:
        assert plan == 0  # the one that is remembered
        self.calls.append(dict(zip(self.names, arguments, strict=True)))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def library() -> Iterator[Library]:
    found = Library()
    dispatch._short_ways[SPEC.name] = ShortWay(found, lambda: None)
    yield found
    dispatch.reload_tables()


@pytest.mark.parametrize("case", [CASE, GIVEN], ids=lambda case: case.name)
@pytest.mark.parametrize("is_given", [False, True])
def test_arguments_and_output(library: Library, case: Case, is_given: bool) -> None:
    inputs = make_inputs(case)
    out = output_of(inputs) if is_given else None
    result = moe_fp8_block_scale(**inputs._asdict(), out=out)
    (call,) = library.calls
    assert call.pop("output") is result
    assert result is out or out is None
    assert (result.shape, result.dtype) == (inputs.hidden_states.shape, torch.bfloat16)
    assert result.is_contiguous()
    assert call.pop("workspace") is None
    assert all(value is getattr(inputs, name) for name, value in call.items())


OTHERS: dict[str, dict[str, Any]] = {
    "workspace": {"workspace": torch.empty(0, dtype=torch.uint8)},
    "offset of one element": {"local_expert_offset": torch.tensor(0)},
    "boolean offset": {"local_expert_offset": False},
    "factor as text": {"routed_scaling_factor": "2.5"},
    "fractional topk": {"topk": 4.0},
    "deterministic as a number": {"deterministic": 1},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS.keys())
def test_what_is_not_plain_goes_the_long_way(library: Library, options: dict[str, Any]) -> None:
    with contextlib.suppress(ArgumentError):
        moe_fp8_block_scale(**make_inputs(CASE)._asdict() | options)
    assert not library.calls


def test_gradients_and_negative_views_go_the_long_way(library: Library) -> None:
    inputs = make_inputs(CASE)
    assert inputs.routing_logits is not None
    for logits in (inputs.routing_logits.clone().requires_grad_(),
                   torch._neg_view(inputs.routing_logits)):  # fmt: skip
        with pytest.raises(ArgumentError, match="routing_logits"):
            moe_fp8_block_scale(**inputs._replace(routing_logits=logits)._asdict())
    assert not library.calls


def test_refused_calls_go_the_long_way(library: Library) -> None:
    arguments = make_inputs(CASE)._asdict()
    expected = moe_fp8_block_scale(**arguments, workspace=torch.empty(0, dtype=torch.uint8))
    for answer in (False, TypeError("not an argument of the entry")):
        library.answer = answer
        assert torch.equal(moe_fp8_block_scale(**arguments), expected)
    assert len(library.calls) == 2


def test_a_failed_launch_is_named(library: Library) -> None:
    library.answer = LaunchFailed("launch gave CUDA_ERROR_X")
    with pytest.raises(LaunchError, match=r"moe_fp8_block_scale.*CUDA_ERROR_X"):
        moe_fp8_block_scale(**make_inputs(CASE)._asdict())


# ---- what the library takes ---------------------------------------------------------------------


def library_takes(inputs: Inputs, output: Any, is_checked: bool = False) -> bool:
    entry = extension.function("moe_fp8_block_scale")
    try:
        return routes.call(entry, -2 if is_checked else -1, inputs, (output,), None)
    except Exception:  # as `op._enter`
        return False


def python_takes(inputs: Inputs, output: Any) -> bool:
    try:
        bind(inputs, output, None)
    except ArgumentError:
        return False
    return True


@pytest.mark.toolchain
@pytest.mark.parametrize("case", [*CORRECTNESS, *CORNER], ids=lambda case: case.name)
def test_plain_calls_take_the_short_way(case: Case) -> None:
    state = extension.state()
    assert state.status == "ok", state.found
    inputs = make_inputs(case)
    assert library_takes(inputs, output_of(inputs))


CHANGES: dict[str, Any] = {
    **ANY_ARGUMENT,
    "half": lambda t: t.to(torch.float16),
    "int32": lambda t: t.int(),
    "int64": lambda t: t.long(),
    "list": lambda t: [t],
}
NUMBERS: dict[str, Any] = {
    "topk": (0, 1, 16, 17, -1), "num_groups": (0, 1, 3, 32, 64, -8), "topk_groups": (0, 1, 8, 9),
    "local_expert_offset": (-(2**31), 2**31 - 1, 2**31, -(2**40)),
}  # fmt: skip


def assert_agreement(case: Case, changes: list[tuple[str, Any]]) -> None:
    inputs = make_inputs(case)
    output: Any = output_of(inputs)
    for name, change in changes:
        if name in NUMBERS:
            inputs = inputs._replace(**{name: change})
            continue
        value = output if name == "output" else getattr(inputs, name)
        if not isinstance(value, torch.Tensor):
            continue
        try:
            changed = CHANGES[change](value)
        except (RuntimeError, IndexError):
            continue
        if name != "output":
            inputs = inputs._replace(**{name: changed})
        elif changed is not None:
            output = changed
    if library_takes(inputs, output):
        assert python_takes(inputs, output), changes
    elif python_takes(inputs, output) and inputs.topk <= 16:
        # What is legal and not plainly so: Python has looked, and the library may not refuse.
        assert library_takes(inputs, output, is_checked=True), changes


@pytest.mark.toolchain
@pytest.mark.parametrize("case", [CASE, GIVEN], ids=lambda case: case.name)
def test_one_change_to_any_argument(case: Case) -> None:
    for name in (*TENSORS[case.mode], "output"):
        for change in CHANGES:
            assert_agreement(case, [(name, change)])
    for name, values in NUMBERS.items():
        for value in values:
            assert_agreement(case, [(name, value)])


@pytest.mark.toolchain
@pytest.mark.parametrize("case", [CASE, GIVEN], ids=lambda case: case.name)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_two_changes(case: Case, data: st.DataObject) -> None:
    names = st.sampled_from([*TENSORS[case.mode], "output", *NUMBERS])
    changes = []
    for _ in range(2):
        name = data.draw(names)
        changes.append((name, data.draw(st.sampled_from(NUMBERS.get(name, tuple(CHANGES))))))
    assert_agreement(case, changes)


@pytest.mark.toolchain
def test_memory_that_is_shared_goes_the_long_way() -> None:
    inputs = make_inputs(CASE)
    assert library_takes(inputs, output_of(inputs))
    memory = torch.zeros(3, 256, dtype=torch.bfloat16)
    hidden = memory.view(torch.float8_e4m3fn)[:, :256]
    assert not library_takes(inputs._replace(hidden_states=hidden), memory)
    once = torch.empty(1, 256, dtype=torch.bfloat16).expand(3, 256)
    assert not library_takes(inputs, once)


# ---- what the routes serve ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "mode", "words"),
    [
        ({}, "logits", None),
        ({"num_experts": 128, "num_groups": 1, "topk_groups": 1}, "logits", None),
        ({"hidden_size": 4096, "intermediate_size": 1536, "num_local_experts": 128}, "precomputed",
         None),
        ({"num_local_experts": 257}, "logits", "serves num_local_experts <= 256, got 257"),
        ({"num_experts": 512}, "logits", "serves num_experts <= 256, got 512"),
        ({"num_experts": 512}, "precomputed", None),
        ({"topk": 17}, "logits", "serves topk <= 16, got 17"),
        ({"intermediate_size": 2**23}, "logits",
         "serves intermediate_size <= 4129760, got 8388608"),
    ],
)  # fmt: skip
def test_geometries(axes: dict[str, int], mode: str, words: str | None) -> None:
    sizes = {"seq_len": 5} | SPEC.constants | axes
    key = key_from_axes(SPEC, sizes, named_device("h200"), mode)
    decline = routes.supports(key, key.device, KERNELS[0].config)
    assert (None if decline is None else decline.reason) == words


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (2048, None),
        (1024, None),
        (896, "serves intermediate_size >= 1024 with 1 code, got 896"),
    ],
)
def test_one_code_is_for_long_rows(size: int, words: str | None) -> None:
    """Of few columns the rounding of one code does not average out."""
    axes = {"seq_len": 5} | SPEC.constants | {"intermediate_size": size}
    key = key_from_axes(SPEC, axes, named_device("h200"), "logits")
    decline = routes.supports(key, key.device, WgmmaGrouped(128, 2, 1))
    assert (None if decline is None else decline.reason) == words
    assert routes.supports(key, key.device, WgmmaGrouped(128, 2, 2)) is None


def test_what_a_plan_is_remembered_by() -> None:
    """Sizes that lead to other kernels or another workspace are in it, each in a place of its own;
    those that mean nothing are not."""
    device = named_device("h200")
    base = {"seq_len": 5} | SPEC.constants

    def fixed(mode: str = "logits", **axes: int) -> tuple[int, ...]:
        return routes.fixed(key_from_axes(SPEC, base | axes, device, mode))

    others = [
        fixed("logits", **{name: base[name] * 2})
        for name in ("num_experts", "num_local_experts", "hidden_size", "intermediate_size", "topk",
                     "num_groups", "topk_groups")
    ]  # fmt: skip
    assert len({fixed(), fixed("precomputed"), *others}) == 9
    assert fixed(seq_len=9) == fixed()
    assert fixed("precomputed", num_groups=4) == fixed("precomputed")
    assert all(len(each) == 6 for each in (fixed(), fixed("precomputed")))
