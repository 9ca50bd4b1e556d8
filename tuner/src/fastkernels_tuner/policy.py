"""Policies: the rules that come with the package, and a user's own."""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fastkernels_tuner.errors import SourceError
from fastkernels_tuner.model import Policy

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def default(device: str) -> Policy:
    """The policy for a device (`cpu`, `cuda`, `cuda:1`)."""
    name = "cpu" if device == "cpu" else "gpu"
    found = resources.files("fastkernels_tuner").joinpath("policies").joinpath(f"{name}.toml")
    return parse(found.read_text(encoding="utf-8"), f"policies/{name}.toml")


def read(path: Path) -> Policy:
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: cannot be read: {error}") from error


def parse(text: str, where: str) -> Policy:
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where}: not TOML: {error}") from error
    try:
        return Policy(**data)
    except (ValidationError, TypeError) as error:
        if not isinstance(error, ValidationError):
            raise SourceError(f"{where}: {error}") from error
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        known = ", ".join(Policy.model_fields)
        hint = f" (known: {known})" if first["type"] == "extra_forbidden" else ""
        raise SourceError(f"{where}: {place}: {first['msg']}{hint}") from None
