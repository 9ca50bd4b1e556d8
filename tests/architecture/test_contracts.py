"""The import contracts of pyproject.toml hold, and each of them can fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")

# Contract, module that breaks it, the statement that does.
VIOLATIONS = [
    ("house", "core/route.py", "from fastkernels.ops.gdn_decode import spec"),
    ("house", "ops/_shared/cases.py", "from fastkernels import catalog"),
    ("house", "envs.py", "from fastkernels.core import archs"),
    ("house", "stray.py", ""),
    ("core", "core/spec.py", "from fastkernels.core import problem"),
    ("core", "core/stray.py", ""),
    ("data", "core/table.py", "import torch"),
    ("data", "errors.py", "import torch"),
    ("operators", "ops/gdn_prefill/spec.py", "from fastkernels.ops.gdn_decode import problem"),
    ("operators", "ops/_shared/gdn.py", "from fastkernels.ops.gdn_decode import spec"),
    ("operator", "ops/gdn_decode/spec.py", "from fastkernels.ops.gdn_decode import problem"),
    ("operator", "ops/gdn_decode/problem.py", "from fastkernels.ops.gdn_decode import routes"),
    ("oracle", "ops/gdn_decode/op.py", "from fastkernels.ops.gdn_decode import reference"),
    ("oracle", "ops/gdn_decode/problem.py", "from fastkernels.ops.gdn_decode import inputs"),
]


def lint(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LINT_IMPORTS, "--no-logo", "--no-cache", *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "src"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )


def test_contracts_hold() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(("contract", "module", "statement"), VIOLATIONS)
def test_a_violation_is_found(tmp_path: Path, contract: str, module: str, statement: str) -> None:
    """Also shows that lint-imports reads the copy, not an installed package."""
    shutil.copytree(
        ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.jsonl")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "src" / "fastkernels" / module).open("a") as file:
        file.write(f"\n{statement}\n")
    done = lint(tmp_path, "--contract", contract)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 broken" in done.stdout
