"""Result files as `bench/run.py` wrote them. Needs no GPU and no torch."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

Result = Mapping[str, Any]


class NotAResult(ValueError):
    """What was named is no result file, or is not there."""


def read(name: str) -> Result:
    """Of a path, or of a file in history as `git show` names it: `<commit>:<path>`, the path from
    the root of this repository. Raises NotAResult."""
    path = Path(name)
    if path.is_file():
        return parse(path.read_text(), name)
    commit, colon, _ = name.partition(":")
    if not colon:
        raise NotAResult(f"{name}: no such file")
    done = subprocess.run(["git", "show", name], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise NotAResult(
            f"{name}: neither a file nor one of commit {commit}: {done.stderr.strip()}"
        )
    return parse(done.stdout, name)


def parse(text: str, name: str) -> Result:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise NotAResult(f"{name}: not JSON ({error})") from error
    wanted = ("op", "device", "code", "versions", "protocol", "created", "rows")
    lacking = [key for key in wanted if key not in data] if isinstance(data, dict) else wanted
    if lacking:
        raise NotAResult(f"{name}: no result file of bench/run.py: it has no {', '.join(lacking)}")
    found: Result = data
    return found


def is_sweep(data: Result) -> bool:
    return data.get("kind") == "sweep"


def provenance(data: Result) -> str:
    """Device, commit and date on one line."""
    device, code = data["device"], data["code"]
    state = " (dirty)" if code.get("dirty") else ""
    return f"{device['product']}, commit {code['commit'][:12]}{state}, {data['created']}"
