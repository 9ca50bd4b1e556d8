"""What every operator's test cases have in common, and the contest workloads as shipped data."""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from typing import Any, Protocol

import torch


class Case(Protocol):
    """A frozen dataclass per operator: sizes, then what shapes the contents.

    `name` is unique within its list; `source` is the contest uuid for recorded workloads.
    """

    @property
    def name(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def mode(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def axes(self) -> dict[str, int]: ...


def generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of the CPU, unless other numbers on another device will do: cases are drawn on
    the CPU, so that every device sees the same ones."""
    return torch.Generator(device).manual_seed(seed)


def contest_workloads(op: str) -> list[dict[str, Any]]:
    """The contest's workloads of an operator, in file order (`contest.jsonl` beside its spec)."""
    text = resources.files(f"fastkernels.ops.{op}").joinpath("contest.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def contest_seed(workload: dict[str, Any]) -> int:
    """The draw's seed, or the first four bytes (big-endian) of SHA-256 of the uuid."""
    draw = workload.get("draw", {})
    if "seed" in draw:
        return int(draw["seed"])
    return int.from_bytes(hashlib.sha256(workload["uuid"].encode()).digest()[:4], "big")


def move(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor on `device` with the same strides (`Tensor.to` makes views contiguous)."""
    if tensor.numel() == 0 or tensor.device == torch.device(device):
        return tensor.to(device)
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((extent,), (1,), tensor.storage_offset()).to(device)
    return flat.as_strided(tensor.shape, tensor.stride())
