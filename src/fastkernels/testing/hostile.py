"""Hostile surroundings for a call: poisoned outputs between guard bytes, strided and offset
outputs, inputs that are watched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastkernels.core.problem import torch_dtype
from fastkernels.core.spec import OpSpec, TensorSpec
from fastkernels.testing.compare import clone, same_bits

GUARD_BYTES = 512
_GUARD = 0xA5
LAYOUTS = ("contiguous", "offset", "strided")


@dataclass(frozen=True)
class Guarded:
    """An output tensor inside a larger buffer whose other bytes must not change."""

    name: str
    tensor: torch.Tensor
    buffer: torch.Tensor
    inside: torch.Tensor  # True where the buffer's byte belongs to the tensor

    def assert_intact(self) -> None:
        """Raise if a byte outside the tensor was written."""
        wrong = ((self.buffer != _GUARD) & ~self.inside).nonzero()
        if wrong.numel():
            start = int(self.inside.to(torch.int8).argmax())
            raise AssertionError(
                f"out {self.name!r}: byte {int(wrong[0]) - start} relative to its start was written"
            )


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with what a kernel that skips an element cannot have meant: NaN, or 123 for integers."""
    return tensor.fill_(float("nan") if tensor.is_floating_point() else 123)


def guarded_output(
    output: TensorSpec,
    axes: Mapping[str, int],
    device: torch.device | str,
    layout: str = "contiguous",
) -> Guarded:
    """A poisoned output between guard bytes.

    layout: contiguous; offset (16 bytes past the allocation's alignment); strided (padding after
    every entry of the first axis, as a slot of a larger buffer).
    """
    dtype = torch_dtype(output.dtypes[0])
    item = dtype.itemsize
    shape = [axes[name] for name in output.shape]
    stride = list(torch.empty(shape, device="meta").stride())
    if layout == "strided" and shape:
        stride[0] += 64 // item
    count = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    start = GUARD_BYTES + (16 if layout == "offset" else 0)
    total = start + count * item + GUARD_BYTES
    total += -total % 16
    buffer = torch.full((total,), _GUARD, dtype=torch.uint8, device=device)
    tensor = buffer.view(dtype).as_strided(shape, stride, start // item)
    inside = torch.zeros(total, dtype=torch.uint8, device=device)
    index = torch.arange(total // item, device=device).as_strided(shape, stride, start // item)
    inside.view(-1, item)[index.reshape(-1)] = 1
    return Guarded(output.name, poison(tensor), buffer, inside.bool())


def guarded_outputs(
    outputs: Sequence[TensorSpec],
    axes: Mapping[str, int],
    device: torch.device | str,
    layout: str = "contiguous",
) -> tuple[Guarded, ...]:
    return tuple(guarded_output(output, axes, device, layout) for output in outputs)


class Watch:
    """Remembers the bits of every input tensor, to tell afterwards which one a call changed."""

    def __init__(self, spec: OpSpec, inputs: Any) -> None:
        self._spec = spec
        self._inputs = inputs
        self._before = clone(inputs)

    def assert_unchanged(self, except_for: str = "") -> None:
        for argument in self._spec.tensors:
            now, before = getattr(self._inputs, argument.name), getattr(self._before, argument.name)
            if now is None or argument.name == except_for:
                continue
            if not same_bits(now, before):
                raise AssertionError(f"{self._spec.name}: the call changed {argument.name!r}")
