"""Every exception type that fastkernels raises on purpose."""

from __future__ import annotations


class FastkernelsError(Exception):
    """Base of all errors below."""


class ArgumentError(FastkernelsError, ValueError):
    """An argument has the wrong type, dtype, device, shape, stride or value."""


class UnsupportedProblem(FastkernelsError):
    """The arguments are legal, but no route serves them on this device."""


class NotWarmedUp(FastkernelsError):
    """A kernel would have to be loaded or compiled inside a CUDA graph capture."""


class FallbackError(FastkernelsError):
    """FASTKERNELS_STRICT is set and no regime of the device's own table serves a call."""


class LaunchError(FastkernelsError, RuntimeError):
    """A route failed while running; it is never retried on another route."""


class TableError(FastkernelsError):
    """A dispatch table is malformed or does not belong to this operator, spec or device."""
