"""Every environment variable that fastkernels reads, and its logger.

Variables are read when they are needed, never at import, so that a program may set them late.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from fastkernels.errors import ArgumentError

TABLES = "FASTKERNELS_TABLES"
"""Folder with dispatch tables that come before the user's and the shipped ones."""

CHECK = "FASTKERNELS_CHECK"
"""`values`: also check values on the device (index ranges, offsets); costs a synchronisation."""

STRICT = "FASTKERNELS_STRICT"
"""`1`: a call that no table regime serves raises FallbackError instead of falling back."""

LOG = "FASTKERNELS_LOG"
"""Log level by name (`DEBUG`, `INFO`, `WARNING`, ...); unset leaves it to the application."""

JIT = "FASTKERNELS_JIT"
"""What may be compiled just in time: `off` (kept code is not used either); `on` (default), Triton
and CuTe DSL where they are installed; `cuda`, with nvcc, too. With `on` kept code of any language
is used."""

CACHE = "FASTKERNELS_CACHE"
"""Folder of kernels compiled just in time; default: `fastkernels` in the user's cache folder. Where
a kernel may not or cannot be compiled, what is kept serves, whichever compiler made it."""


def tables_folder() -> Path | None:
    """The folder that FASTKERNELS_TABLES names; a leading ~ of a known user is expanded."""
    value = os.environ.get(TABLES)
    return Path(os.path.expanduser(value)) if value else None


def user_tables_folder() -> Path | None:
    """The user's tables, `$XDG_DATA_HOME/fastkernels/tables`; None for a user without a home."""
    data = os.environ.get("XDG_DATA_HOME")
    if data:
        return Path(data) / "fastkernels" / "tables"
    try:
        return Path.home() / ".local" / "share" / "fastkernels" / "tables"
    except RuntimeError:  # an unmapped uid in a container has neither HOME nor a passwd entry
        return None


def check_values() -> bool:
    value = os.environ.get(CHECK)
    if not value or value == "metadata":
        return False
    if value == "values":
        return True
    raise ArgumentError(f"{CHECK} is {value!r}, expected 'values' or 'metadata'")


def strict() -> bool:
    value = os.environ.get(STRICT)
    if value not in (None, "", "0", "1"):
        raise ArgumentError(f"{STRICT} is {value!r}, expected '0' or '1'")
    return value == "1"


def jit() -> str:
    value = os.environ.get(JIT) or "on"
    if value not in ("off", "on", "cuda"):
        raise ArgumentError(f"{JIT} is {value!r}, expected 'off', 'on' or 'cuda'")
    return value


def cache_folder() -> Path | None:
    """Where kernels compiled just in time are kept; None for a user without a home."""
    value = os.environ.get(CACHE)
    if value:
        return Path(os.path.expanduser(value))
    cache = os.environ.get("XDG_CACHE_HOME")
    if cache:
        return Path(cache) / "fastkernels"
    try:
        return Path.home() / ".cache" / "fastkernels"
    except RuntimeError:
        return None


_seen: set[object] = set()
_logger: logging.Logger | None = None


def logger() -> logging.Logger:
    global _logger
    if _logger is None:
        log = logging.getLogger("fastkernels")
        level = os.environ.get(LOG)
        if level:
            if not isinstance(logging.getLevelName(level.upper()), int):
                raise ArgumentError(
                    f"{LOG} is {level!r}, expected a level such as DEBUG or WARNING"
                )
            log.setLevel(level.upper())
            if not log.hasHandlers():
                handler = logging.StreamHandler()
                handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
                log.addHandler(handler)
        _logger = log
    return _logger


def log_once(level: int, key: object, message: str) -> None:
    """Log `message` the first time this process sees `key`."""
    if key not in _seen:
        _seen.add(key)
        logger().log(level, message)
