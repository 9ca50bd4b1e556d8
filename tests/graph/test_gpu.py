"""CUDA graphs, streams and synchronisation on a GPU, for every operator and mode as dispatched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastkernels
from fastkernels import catalog
from fastkernels.core.route import Operator
from fastkernels.ops._shared.cases import Case
from fastkernels.testing import contracts
from fastkernels.testing.compare import as_tuple, clone, same_bits

pytestmark = pytest.mark.gpu

MODES = pytest.mark.parametrize(
    ("operator", "mode"),
    [
        pytest.param(operator, mode, id=f"{operator.name}-{mode}")
        for operator in catalog.OPERATORS
        for mode in operator.spec.modes
    ],
)


def inputs_of(operator: Operator, mode: str, position: int = -1) -> Any:
    cases: list[Case] = [c for c in contracts.cases(operator, "CORRECTNESS") if c.mode == mode]
    return catalog.module(operator.name, "inputs").make_inputs(cases[position], "cuda")


def tensors(inputs: Any) -> list[torch.Tensor]:
    return [value for value in inputs if isinstance(value, torch.Tensor)]


def shuffled(inputs: Any) -> Any:
    """The same problem with other contents: floats reversed along their first axis."""
    other = clone(inputs)
    for tensor in tensors(other):
        if tensor.dtype in (torch.bfloat16, torch.float32) and tensor.dim() > 1:
            tensor.copy_(tensor.flip(0).clone())
    return other


def call(operator: Operator, inputs: Any) -> tuple[torch.Tensor, ...]:
    return as_tuple(operator.function(**inputs._asdict()))


@MODES
def test_capture_and_replay_with_other_contents(operator: Operator, mode: str) -> None:
    """A captured call replays on new contents, eager calls and allocations between."""
    first = inputs_of(operator, mode)
    second = shuffled(first)
    expected = [call(operator, clone(inputs)) for inputs in (first, second)]
    static = clone(first)
    fastkernels.warmup(operator.name, mode=mode, **axes(operator, mode))
    call(operator, clone(static))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(operator, static)
    for inputs, wanted in ((first, expected[0]), (second, expected[1]), (first, expected[0])):
        for target, source in zip(tensors(static), tensors(inputs), strict=True):
            target.copy_(source)
        for output in captured:
            if not any(output.data_ptr() == t.data_ptr() for t in tensors(static)):
                output.zero_()
        call(operator, clone(second))
        torch.empty(1 << 28, dtype=torch.uint8, device="cuda").fill_(255)
        graph.replay()
        torch.cuda.synchronize()
        assert all(same_bits(a, b) for a, b in zip(captured, wanted, strict=True))


def axes(operator: Operator, mode: str) -> dict[str, Any]:
    cases = [c for c in contracts.cases(operator, "CORRECTNESS") if c.mode == mode]
    return cases[-1].axes


@MODES
def test_no_synchronisation(operator: Operator, mode: str) -> None:
    """C104: nothing in a call waits for the device."""
    inputs = inputs_of(operator, mode)
    call(operator, clone(inputs))
    again = clone(inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(operator, again)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@MODES
def test_the_callers_stream(operator: Operator, mode: str) -> None:
    """C92: inputs written late on a side stream, then the call, then a reader, in order."""
    inputs = inputs_of(operator, mode)
    expected = call(operator, clone(inputs))
    late = clone(inputs)
    for tensor in tensors(late):
        tensor.zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for target, source in zip(tensors(late), tensors(inputs), strict=True):
            target.copy_(source)
        kept = [output.clone() for output in call(operator, late)]
    stream.synchronize()
    assert all(same_bits(a, b) for a, b in zip(kept, expected, strict=True))


@MODES
def test_two_streams_at_once(operator: Operator, mode: str) -> None:
    """Calls on two streams do not meet in scratch or outputs."""
    problems = [inputs_of(operator, mode), shuffled(inputs_of(operator, mode))]
    expected = [call(operator, clone(inputs)) for inputs in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    copies = [[clone(inputs) for _ in range(8)] for inputs in problems]
    torch.cuda.synchronize()
    results: list[list[tuple[torch.Tensor, ...]]] = [[], []]
    for turn in range(8):
        for side, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[side].append(call(operator, copies[side][turn]))
    torch.cuda.synchronize()
    for side in (0, 1):
        for outputs in results[side]:
            assert all(same_bits(a, b) for a, b in zip(outputs, expected[side], strict=True))


@MODES
def test_device_and_host_tensors_do_not_mix(operator: Operator, mode: str) -> None:
    """A tensor on the host among those on the device is named."""
    inputs = inputs_of(operator, mode)
    _, *others = [t.name for t in operator.spec.tensors if getattr(inputs, t.name) is not None]
    for name in others:
        mixed = inputs._replace(**{name: getattr(inputs, name).cpu()})
        with pytest.raises(fastkernels.ArgumentError, match=f"'{name}' is on cpu, expected cuda"):
            operator.function(**mixed._asdict())
