"""torch.compile and torch.library: no graph break, no recompile per size, mutation, fakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import fastkernels
from fastkernels import catalog
from fastkernels.core.route import Operator
from fastkernels.ops._shared.cases import Case
from fastkernels.testing import contracts
from fastkernels.testing.compare import as_tuple, clone, judge, same_bits

FUNCTIONS: dict[str, Callable[..., Any]] = {
    operator.name: getattr(fastkernels, operator.name) for operator in catalog.OPERATORS
}
OPERATORS = pytest.mark.parametrize("operator", catalog.OPERATORS, ids=lambda op: op.name)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def small_case(operator: Operator, mode: str | None = None) -> Case:
    """The first correctness case of a mode."""
    mode = mode or operator.spec.modes[0]
    return next(c for c in contracts.cases(operator, "CORRECTNESS") if c.mode == mode)


def make(operator: Operator, case: Case) -> Any:
    return catalog.module(operator.name, "inputs").make_inputs(case)


def modes() -> list[Any]:
    return [
        pytest.param(operator, mode, id=f"{operator.name}-{mode}")
        for operator in catalog.OPERATORS
        for mode in operator.spec.modes
    ]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("operator", "mode"), modes())
def test_fullgraph_equals_eager(operator: Operator, mode: str, backend: str) -> None:
    """C95: no graph break, the same bits, the same mutation of `state`."""
    function = FUNCTIONS[operator.name]
    inputs = make(operator, small_case(operator, mode))
    direct, compiled_inputs = clone(inputs), clone(inputs)
    expected = as_tuple(function(**direct._asdict()))
    compiled = torch.compile(lambda **k: function(**k), fullgraph=True, backend=backend)
    got = as_tuple(compiled(**compiled_inputs._asdict()))
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
    for name, value in direct._asdict().items():
        if isinstance(value, torch.Tensor):
            assert same_bits(value, getattr(compiled_inputs, name)), name


@OPERATORS
def test_fullgraph_with_given_outputs(operator: Operator) -> None:
    function = FUNCTIONS[operator.name]
    inputs = make(operator, small_case(operator))
    expected = as_tuple(function(**inputs._asdict()))
    out: Any = tuple(torch.empty_like(tensor) for tensor in expected)
    # A functionaliser copies what is mutated; that the copy may be misaligned is not the caller's.
    memory = torch.zeros(1024, dtype=torch.uint8)
    workspace = memory[-memory.data_ptr() % 256 :][:512]
    given = out if len(out) > 1 else out[0]

    def step(out: Any, **named: Any) -> Any:
        return function(**named, out=out, workspace=workspace)

    got = as_tuple(
        torch.compile(step, fullgraph=True, backend="aot_eager")(given, **inputs._asdict())
    )
    for a, b, c in zip(out, got, expected, strict=True):
        assert same_bits(a, c)
        assert same_bits(b, c)
    alone = torch.compile(
        lambda **named: function(**named, workspace=workspace), fullgraph=True, backend="aot_eager"
    )
    again = as_tuple(alone(**inputs._asdict()))
    assert all(same_bits(a, b) for a, b in zip(again, expected, strict=True))


@OPERATORS
def test_dynamic_sizes_compile_at_most_twice(operator: Operator) -> None:
    """C97: new sizes and sequence sets do not recompile; the table choice is inside the op."""
    function = FUNCTIONS[operator.name]
    counter = CompileCounter()
    compiled = torch.compile(
        lambda **named: function(**named), fullgraph=True, backend=counter, dynamic=True
    )
    for case in growing_cases(operator):
        inputs = make(operator, case)
        got = as_tuple(compiled(**inputs._asdict()))
        route = operator.safe_route
        report = judge(operator, route, route.default_config, case, inputs, got)
        assert report.ok, str(report)
    assert counter.frame_count <= 2


def growing_cases(operator: Operator) -> list[Case]:
    """Five sizes of the first variable axis, otherwise the first correctness case."""
    import dataclasses

    first: Any = small_case(operator)
    cases: list[Case] = []
    for size in (1, 2, 3, 7, 16):
        if operator.name == "gdn_prefill":
            changes: dict[str, Any] = {"lengths": tuple(range(1, size + 1))}
        elif operator.name == "dsa_sparse_attention":
            changes = {"num_tokens": size, "valid": (5,) * size}
        elif operator.name == "dsa_topk_indexer":
            changes = {"seq_lens": tuple(range(1, size + 1))}
        else:
            changes = {operator.spec.variable_axes[0]: size}
        cases.append(dataclasses.replace(first, **changes))
    return cases


@pytest.mark.parametrize(("operator", "mode"), modes())
def test_opcheck(operator: Operator, mode: str) -> None:
    """Schema (mutation, aliasing), fake kernels and AOT dispatch agree with the implementation."""
    from fastkernels.core import torch_ops

    inputs = make(operator, small_case(operator, mode))
    plan = torch_ops._PLANS[operator.name]
    values = torch_ops.encoded(plan, inputs._asdict())
    expected = as_tuple(FUNCTIONS[operator.name](**clone(inputs)._asdict()))
    checks: tuple[str, ...] = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    if any("float8_e4m3fn" in tensor.dtypes for tensor in operator.spec.tensors):
        # torch's schema check compares inputs by allclose, which float8 lacks; that inputs keep
        # their bits is checked in test_contracts.py::test_given_outputs.
        checks = checks[1:]
    forms = getattr(torch.ops, torch_ops.NAMESPACE)
    if operator.spec.updated and mode != operator.spec.modes[0]:
        form = getattr(forms, operator.name + "_update")
        given = tuple(values[name] for name in plan.arguments)
        torch.library.opcheck(
            form, (*given, torch.zeros_like(expected[0]), None), test_utils=checks
        )
        return
    given = tuple(values[name] for name in plan.functional)
    torch.library.opcheck(getattr(forms, operator.name), given, test_utils=checks)
    filled = tuple(torch.zeros_like(tensor) for tensor in expected)
    form = getattr(forms, operator.name + "_out")
    torch.library.opcheck(form, (*given, *filled, None), test_utils=checks)


def test_state_updates_under_compile_equal_eager() -> None:
    """C98: a step that updates a pool's slots, and one that passes a clone as out."""
    operator = catalog.operator("gdn_decode")
    inputs = make(operator, small_case(operator, "pool"))

    def pool_step(state: torch.Tensor, rest: dict[str, Any]) -> torch.Tensor:
        output, _ = fastkernels.gdn_decode(state=state, **rest)
        again, _ = fastkernels.gdn_decode(state=state, **rest)
        return output + again

    rest = {name: value for name, value in inputs._asdict().items() if name != "state"}
    for backend in ("eager", "aot_eager"):
        eager, compiled = inputs.state.clone(), inputs.state.clone()
        expected = pool_step(eager, rest)
        got = torch.compile(pool_step, fullgraph=True, backend=backend)(compiled, rest)
        assert same_bits(got, expected)
        assert same_bits(compiled, eager)

    packed = make(operator, small_case(operator))
    rest = {name: value for name, value in packed._asdict().items() if name != "state"}

    def clone_step(state: torch.Tensor) -> Any:
        home = state.clone()
        output = torch.empty_like(rest["v"])
        return fastkernels.gdn_decode(state=state, **rest, out=(output, home))

    before = packed.state.clone()
    expected = clone_step(packed.state)
    got = torch.compile(clone_step, fullgraph=True, backend="aot_eager")(packed.state)
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
    assert same_bits(packed.state, before)


@pytest.mark.slow
def test_inductor_keeps_the_pool_in_place() -> None:
    """C98: no pool-sized temporary in the compiled step."""
    from torch._inductor.utils import run_and_get_code

    operator = catalog.operator("gdn_decode")
    inputs = make(operator, small_case(operator, "pool"))
    rest = {name: value for name, value in inputs._asdict().items() if name != "state"}

    def step(state: torch.Tensor) -> torch.Tensor:
        output, _ = fastkernels.gdn_decode(state=state, **rest)
        return output * 2

    eager, compiled = inputs.state.clone(), inputs.state.clone()
    expected = step(eager)
    got, sources = run_and_get_code(torch.compile(step, fullgraph=True), compiled)
    assert same_bits(got, expected)
    assert same_bits(compiled, eager)
    shape = ", ".join(map(str, inputs.state.shape))
    assert not any(f"empty_strided_cpu(({shape})" in source for source in sources)


@OPERATORS
def test_no_gradients(operator: Operator) -> None:
    """Inference only: a clear error, directly and inside the registered operator."""
    inputs = make(operator, small_case(operator))
    name, tensor = next(
        (n, t)
        for n, t in inputs._asdict().items()
        if isinstance(t, torch.Tensor) and t.dtype in (torch.bfloat16, torch.float32)
    )
    wanting = inputs._replace(**{name: tensor.clone().requires_grad_()})
    function = FUNCTIONS[operator.name]
    with pytest.raises(fastkernels.ArgumentError, match=f"{operator.name}: '{name}' requires grad"):
        function(**wanting._asdict())
    with torch.inference_mode():
        function(**wanting._asdict())
    with torch.no_grad():
        function(**wanting._asdict())
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(lambda **k: function(**k), backend=backend)
        with pytest.raises(fastkernels.ArgumentError, match="requires grad"):
            compiled(**wanting._asdict())
        torch._dynamo.reset()
        whole = torch.compile(lambda **k: function(**k), backend=backend, fullgraph=True)
        with pytest.raises(Exception, match="requires grad"):  # dynamo wraps it
            whole(**wanting._asdict())
        torch._dynamo.reset()


def test_a_size_that_is_a_number_does_not_recompile() -> None:
    """topk is an output size: new values are new sizes, not new graphs."""
    operator = catalog.operator("dsa_topk_indexer")
    inputs = make(operator, small_case(operator))
    counter = CompileCounter()
    compiled = torch.compile(
        lambda topk, **rest: fastkernels.dsa_topk_indexer(**rest, topk=topk),
        fullgraph=True,
        backend=counter,
        dynamic=True,
    )
    rest = {name: value for name, value in inputs._asdict().items() if name != "topk"}
    for topk in (64, 100, 130, 257, 300):
        got = compiled(topk, **rest)
        assert same_bits(got, fastkernels.dsa_topk_indexer(**rest, topk=topk))
    assert counter.frame_count <= 2
