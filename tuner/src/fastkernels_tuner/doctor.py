"""What this machine has for tuning, and what each missing piece costs."""

from __future__ import annotations

import importlib.util
import shutil
from typing import NamedTuple

import torch


class Finding(NamedTuple):
    what: str
    is_well: bool
    found: str


def findings() -> list[Finding]:
    """fastkernels' own findings are `fastkernels doctor`'s; these are the tuner's."""
    has_gpu = torch.cuda.is_available()
    gpu = torch.cuda.get_device_name() if has_gpu else "none: CPU routes, tables are never shipped"
    found = [Finding("GPU", has_gpu, gpu)]
    for module, cost in (
        ("cupti", "on a GPU nothing is timed, and nothing promoted"),
        ("pynvml", "clocks, temperature and other processes are not watched"),
        ("psycopg", "campaigns on PostgreSQL, so on several GPUs, are not possible"),
    ):
        there = importlib.util.find_spec(module) is not None
        found.append(Finding(module, there, "there" if there else f"missing: {cost}"))
    nvcc = shutil.which("nvcc")
    found.append(Finding("nvcc", nvcc is not None, nvcc or "missing: see `fastkernels doctor`"))
    return found
