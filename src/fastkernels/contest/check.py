"""A package judged by flashinfer-bench: schema, packer, build, and on a GPU the official evaluator
on every workload of the contest."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastkernels import catalog
from fastkernels.contest import official, substitute
from fastkernels.contest.baselines import baseline
from fastkernels.contest.dataset import write_dataset
from fastkernels.contest.definition import definition
from fastkernels.contest.package import Package
from fastkernels.core import archs
from fastkernels.errors import FastkernelsError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RUNNERS = ("isolated", "persistent")
NEEDED = "flashinfer_bench"

# What the organisers passed besides the tolerances; elsewhere the evaluator's defaults hold.
_SETTINGS: dict[str, dict[str, Any]] = {
    "gdn_prefill": {"warmup_runs": 1, "iterations": 5, "num_trials": 3}
}
# Judged element by element, a right selection in another order would be wrong.
_OWN_EVALUATOR = {"dsa_topk_indexer": "DsaTopkIndexerEvaluator"}


class CheckError(FastkernelsError):
    """A package did not pass, or cannot be checked here."""


@dataclass(frozen=True)
class Row:
    """The verdict of the official evaluator on one workload and solution."""

    uuid: str
    solution: str
    status: str
    latency_ms: float | None
    log: str
    trace: Mapping[str, Any]  # as flashinfer-bench writes it


def available() -> bool:
    """Whether flashinfer-bench is installed; it is not imported here."""
    return importlib.util.find_spec(NEEDED) is not None


def check_build(package: Package) -> list[str]:
    """Schemas, the contest's own packer, and a build in an empty folder with an empty cache.

    Returns lines for people. Raises CheckError.
    """
    with tempfile.TemporaryDirectory(prefix="fastkernels-check-") as name:
        scratch = Path(name)
        package.write(scratch / "package")
        config = tomllib.loads((scratch / "package" / "config.toml").read_text())
        sources = scratch / "package" / "solution" / package.solution["spec"]["language"]
        found = _ask(
            scratch,
            {
                "do": "build",
                "definition": definition(package.op),
                "solution": package.solution,
                "config": config,
                "sources": str(sources),
            },
        )
    if found["differing"]:
        raise CheckError(
            f"the contest's packer makes another solution.json: {', '.join(found['differing'])}"
        )
    return [
        f"schema and packer of flashinfer-bench {found['version']}: ok",
        f"builds in an empty folder with an empty cache; evaluator {found['evaluator']}",
    ]


def reason_not_to_run(package: Package) -> str | None:
    """Why the official evaluator cannot run a package on this machine."""
    if not torch.cuda.is_available():
        return "no GPU here"
    found, wanted = torch.cuda.get_device_capability(), archs.ARCHS[package.arch].capability
    if found != wanted:
        name = torch.cuda.get_device_name()
        return f"{name} has compute capability {found[0]}.{found[1]}, not {wanted[0]}.{wanted[1]}"
    return None


def check_run(package: Package, runner: str, given: Mapping[str, Any] | None = None) -> list[str]:
    """The official evaluator on all workloads; `given` is the baseline's solution, if not ours.

    Returns lines for people. Raises CheckError unless every row of the package PASSED.
    """
    spec = catalog.operator(package.op).spec
    reference = given or baseline(package.op, spec.definition)
    solutions = [package.solution, *([reference] if reference else [])]
    version, rows, uuids = _evaluate(package.op, solutions, runner, is_alone=True)
    lines = [f"evaluator of flashinfer-bench {version}, {runner} runner"]
    ours = [row for row in rows if row.solution == package.solution["name"]]
    lines.append(_all_passed(ours, uuids))
    if reference is None:
        return [*lines, "no score: no call of FlashInfer is known here; give one by --baseline"]
    return [*lines, score_line(ours, [r for r in rows if r.solution == reference["name"]], uuids)]


def evaluate_installed(op: str, runner: str) -> list[dict[str, Any]]:
    """Traces of the solution that calls this package, on every workload of the contest, by the
    official evaluator. Raises CheckError unless all PASSED."""
    own = substitute.solution(op)
    _, rows, uuids = _evaluate(op, [own], runner, is_alone=False)
    _all_passed(rows, uuids)
    return [substitute.without_files(row.trace) for row in rows]


def _evaluate(
    op: str, solutions: Sequence[Mapping[str, Any]], runner: str, *, is_alone: bool
) -> tuple[str, list[Row], list[str]]:
    """flashinfer-bench's version, its verdicts, and the workloads' uuids. `is_alone`: solutions
    must not find this package."""
    with tempfile.TemporaryDirectory(prefix="fastkernels-check-") as name:
        scratch = Path(name)
        own = _OWN_EVALUATOR.get(op)
        if own is not None and not _has_evaluator(scratch, own):
            raise CheckError(
                f"this flashinfer-bench has no {own}: install it from its repository, commit "
                "40e6ca7844b514eb4b1c7edba6d6a7377df57870 or later"
            )
        uuids = write_dataset(op, scratch / "dataset", solutions)
        request = {
            "do": "run",
            "root": str(scratch / "dataset"),
            "settings": settings(op) | {"use_isolated_runner": runner == "isolated"},
        }
        answer = _ask(scratch, request, is_alone=is_alone)
    return answer["version"], [Row(**row) for row in answer["rows"]], uuids


def settings(op: str) -> dict[str, Any]:
    """What the organisers ran an operator with. The reference is an oracle, not a rival: it is not
    timed."""
    (tolerance,) = {
        (t.official_abs, t.official_rel, t.official_share)
        for t in catalog.operator(op).spec.tolerances
    }
    found = {"atol": tolerance[0], "rtol": tolerance[1], "profile_baseline": False}
    if tolerance[2] < 1:
        found["required_matched_ratio"] = tolerance[2]
    return found | _SETTINGS.get(op, {})


def _all_passed(rows: Sequence[Row], uuids: Sequence[str]) -> str:
    """Raises CheckError unless there is one PASSED row for every workload: the evaluator leaves
    workloads that fail in its own process out of its traces."""
    if sorted(row.uuid for row in rows) != sorted(uuids):
        raise CheckError(f"{len(rows)} of {len(uuids)} workloads have a trace, expected one each")
    wrong = [row for row in rows if row.status != "PASSED"]
    if wrong:
        first = wrong[0]
        raise CheckError(
            f"{len(wrong)} of {len(rows)} workloads not PASSED; {first.uuid} is {first.status}: "
            f"{first.log}"
        )
    return f"{len(rows)} of {len(uuids)} workloads PASSED"


def score_line(ours: Sequence[Row], theirs: Sequence[Row], uuids: Sequence[str]) -> str:
    """The contest's score of a definition: mean over workloads of FlashInfer's time over ours."""
    passed = {row.uuid: row.latency_ms for row in theirs if row.status == "PASSED"}
    if set(passed) != set(uuids):
        first = next((row for row in theirs if row.status != "PASSED"), None)
        why = f"; {first.uuid} is {first.status}: {first.log}" if first else ""
        return (
            f"no score: FlashInfer's baseline PASSED {len(passed)} of {len(uuids)} workloads{why}"
        )
    ratios = [_ms(passed[row.uuid]) / _ms(row.latency_ms) for row in ours]
    total = sum(_ms(t) for t in passed.values()) / sum(_ms(row.latency_ms) for row in ours)
    return (
        f"score against FlashInfer: {sum(ratios) / len(ratios):.3f} (mean of ratios; worst row "
        f"{min(ratios):.3f}, ratio of sums {total:.3f})"
    )


def _ms(value: float | None) -> float:
    assert value is not None  # PASSED rows have one
    return value


def _has_evaluator(scratch: Path, name: str) -> bool:
    script = "import flashinfer_bench.bench.evaluators as e, sys; sys.exit(not hasattr(e, {!r}))"
    done = _python(scratch, script.format(name), "")
    return done.returncode == 0


def _ask(scratch: Path, request: Mapping[str, Any], *, is_alone: bool = True) -> dict[str, Any]:
    answer = scratch / "answer.json"
    source = Path(official.__file__).read_text(encoding="utf-8")
    text = json.dumps({**request, "answer": str(answer)})
    done = _python(scratch, source, text, is_alone=is_alone)
    if done.returncode != 0 or not answer.is_file():
        raise CheckError(f"flashinfer-bench ended with {done.returncode}: {done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def _python(
    scratch: Path, script: str, text: str, *, is_alone: bool = True
) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter in a folder of its own, with caches of its own and, where it is to be
    alone, no fastkernels, which its children lack, too: a package stands alone."""
    paths = [os.environ.get("PYTHONPATH", "")]
    if is_alone:
        shadow = scratch / "shadow" / "fastkernels"
        shadow.mkdir(parents=True, exist_ok=True)
        (shadow / "__init__.py").write_text("raise ImportError('a package must not import it')\n")
        paths.insert(0, str(shadow.parent))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "FIB_CACHE_PATH": str(scratch / "cache"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
    }
    (scratch / "empty").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", script], cwd=scratch / "empty", env=environment, input=text,
        capture_output=True, text=True,
    )  # fmt: skip
