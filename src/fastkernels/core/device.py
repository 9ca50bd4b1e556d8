"""What is known about a device, asked once per process and device index."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch

from fastkernels.core import archs
from fastkernels.errors import ArgumentError


class DeviceInfo(NamedTuple):
    """The facts that dispatch may depend on. `arch` is `sm90`, ..., or torch's device type."""

    arch: str
    product: str
    num_sms: int

    @property
    def is_gpu(self) -> bool:
        return self.arch.startswith("sm")


CPU = DeviceInfo("cpu", "CPU", 0)
override: DeviceInfo | None = None
"""What `override_device` puts in the place of every device."""


@cache
def _query_cuda(index: int) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(index)
    arch = archs.arch_name((properties.major, properties.minor))
    return DeviceInfo(arch, properties.name, properties.multi_processor_count)


def device_info(device: torch.device) -> DeviceInfo:
    """Facts about the device that a tensor lies on; a query per index and process, then cached."""
    if override is not None:
        return override
    if device.type == "cpu":
        return CPU
    if device.type == "cuda":
        return _query_cuda(torch.cuda.current_device() if device.index is None else device.index)
    return DeviceInfo(device.type, device.type.upper(), 0)


def index_of(name: str | torch.device | DeviceInfo | None) -> int:
    """The index of a device given as for `named_device`: the current GPU's where none is named."""
    if isinstance(name, DeviceInfo):
        return 0
    if isinstance(name, str) and name.lower() in archs.PRODUCTS:
        return 0
    device = torch.device("cuda" if name is None else name)
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    return device.index if ":" in str(device) else torch.cuda.current_device()


def named_device(name: str | torch.device | DeviceInfo | None) -> DeviceInfo:
    """A device by name, present or not: `h200`, `b200`, `cpu`, `cuda:1`; None is the default one
    (the current GPU where there is one, else the CPU)."""
    if isinstance(name, DeviceInfo):
        return name
    if name is None:
        if override is not None:
            return override
        return device_info(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if isinstance(name, str) and name.lower() in archs.PRODUCTS:
        product = archs.PRODUCTS[name.lower()]
        return DeviceInfo(product.arch, product.name, product.num_sms)
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        known = ", ".join(archs.PRODUCTS)
        raise ArgumentError(
            f"device {name!r} is unknown, expected one of {known}, or a torch device"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(f"device {name!r} is not present; name a product, e.g. 'h200'")
    return device_info(device)


@contextmanager
def override_device(name: str | DeviceInfo) -> Iterator[DeviceInfo]:
    """Make every tensor appear to lie on `name`: dispatch as there, on a machine without it."""
    global override
    previous, override = override, named_device(name)
    try:
        yield override
    finally:
        override = previous
