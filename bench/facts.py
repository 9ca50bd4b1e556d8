"""What stands beside every measurement: device, code, versions, tests."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bench.record_tests import outcomes, summary
from fastkernels.testing.record import environment

ROOT = Path(__file__).parents[1]
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")


def code(stamp: Path | None, table: str | None = None) -> dict[str, Any]:
    """Commit and dirty from the stamp (the GPU machine may have no history), else from git; the
    compiled library and the table by content."""
    if stamp is not None:
        found = json.loads(stamp.read_text())
    else:
        found = {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    manifest = ROOT / "src" / "fastkernels" / "_lib" / "manifest.json"
    library = json.loads(manifest.read_text()).get("library") if manifest.exists() else None
    return {
        "commit": found["commit"],
        "dirty": found["dirty"],
        "library_sha256": library["sha256"] if library else None,
        "table_sha256": sha256(Path(table)) if table else None,
    }


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def versions(peers: dict[str, str]) -> dict[str, Any]:
    facts = environment("cpu")
    return {
        **{name: facts[name] for name in ("fastkernels", "python", "torch", "cuda")},
        "triton": package_version("triton"),
        "tvm_ffi": package_version("apache-tvm-ffi"),
        "cupti": package_version("cupti-python"),
        "peers": peers,
    }


def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def device(index: torch.device, clocks: Sequence[int | None]) -> dict[str, Any]:
    facts = environment(str(index))
    return {
        "product": facts["device"],
        "arch": facts["arch"],
        "num_sms": facts["num_sms"],
        "uuid": uuid(index),
        "driver": driver(index),
        "sm_clock_mhz": list(clocks),
    }


def uuid(index: torch.device) -> str:
    text = str(getattr(torch.cuda.get_device_properties(index), "uuid", "unknown"))
    return text if text.startswith("GPU-") else f"GPU-{text}"


@cache
def driver(index: torch.device) -> str | None:
    return nvidia_smi(index, "driver_version")


def sm_clock(index: torch.device, work: Callable[[], object]) -> int | None:
    """The SM clock in MHz under load: an idle GPU's says nothing. `work` is launched meanwhile."""
    text = nvidia_smi(index, "clocks.sm", work)
    return int(text) if text and text.isdigit() else None


def nvidia_smi(
    index: torch.device, field: str, work: Callable[[], object] | None = None
) -> str | None:
    """One field of one GPU; None where nvidia-smi is absent or does not know."""
    command = ["nvidia-smi", f"--id={uuid(index)}", f"--query-gpu={field}"]
    try:
        query = subprocess.Popen(
            [*command, "--format=csv,noheader,nounits"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        while work is not None and query.poll() is None:
            for _ in range(50):
                work()
            torch.cuda.synchronize(index)
        text, _ = query.communicate(timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return text.strip() if query.returncode == 0 else None


# ---- tests --------------------------------------------------------------------------------------


def tests(junit: Iterable[Path], sanitizers: Mapping[str, Sequence[Path]]) -> dict[str, Any]:
    """Outcomes of the test run and of compute-sanitizer's tools."""
    total = sum((outcomes(path) for path in junit), Counter[str]())
    return {
        **summary(total),
        "sanitizer": {
            tool: sanitizer_verdict("\n".join(path.read_text(errors="replace") for path in paths))
            for tool, paths in sanitizers.items()
        },
    }


def sanitizer_verdict(log: str) -> str:
    """`clean`, or what compute-sanitizer's summaries count."""
    counts = [int(n) for n in re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", log)]
    if not counts:
        return "no summary in the log"
    if sum(counts):
        return f"{sum(counts)} reports"
    called = re.findall(r"^(\d+) calls of ", log, re.MULTILINE)
    return "clean" if called and "0" not in called else "not every config was called"
