"""What importing the package costs and needs; cases C107, C109, C112 (import and lookup), C119.

Each test looks at a fresh interpreter, and at what `import torch` alone does not do.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fastkernels

PACKAGE = Path(fastkernels.__file__).parent
# Packages that neither importing the library nor a call on the CPU may need.
OPTIONAL = (
    "cuda", "cupti", "cutlass", "flashinfer", "flashinfer_bench", "hypothesis", "numpy", "optuna",
    "pytest", "safetensors", "tilelang", "triton", "tvm_ffi",
)  # fmt: skip
COMMAND_LINE = ("click", "rich")
# 47 and 4 (tomllib) for five operators with one route each, after torch 2.13 on Python 3.11.
MAX_OWN_MODULES = 80
MAX_STANDARD_MODULES = 20

BLOCK = """
import importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Block())
"""

IMPORT_ALL = """
import importlib, json, pkgutil, warnings
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import fastkernels
names = [m.name for m in pkgutil.walk_packages(fastkernels.__path__, "fastkernels.")]
failed = {}
for name in names:
    if name.startswith(SKIPPED) or ".kernels." in name:
        continue  # device code is imported by its compiler alone
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = repr(error)
import torch
assert not torch.cuda.is_initialized()
print(json.dumps({"names": names, "failed": failed}))
"""

CALL = """
import torch, fastkernels
B, Hk, Hv, D = 2, 1, 2, 8
q, k = (torch.ones(B, 1, Hk, D, dtype=torch.bfloat16) for _ in "qk")
v, state = torch.ones(B, 1, Hv, D, dtype=torch.bfloat16), torch.zeros(B, Hv, D, D)
a, b = (torch.zeros(B, 1, Hv, dtype=torch.bfloat16) for _ in "ab")
output, _ = fastkernels.gdn_decode(q, k, v, state, torch.zeros(Hv), a, torch.zeros(Hv), b)
assert output.isfinite().all()
"""

EXPLAIN = """
from fastkernels.cli import main
main(["explain", "gdn_decode", "--axis", "batch_size=8", "--device", "h200"])
"""


def environment(**changes: str | None) -> dict[str, str]:
    """This process's, without a GPU and without our variables; None removes a name."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("FASTKERNELS_")
    }
    merged = {
        **kept,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(PACKAGE.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
        **changes,
    }
    return {name: value for name, value in merged.items() if value is not None}


def python(
    *arguments: str, prefix: tuple[str, ...] = (), env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*prefix, sys.executable, *arguments],
        env=environment() if env is None else env,
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def run(code: str, **constants: Any) -> Any:
    """The last line that `code` prints, as JSON."""
    head = "".join(f"{name} = {value!r}\n" for name, value in constants.items())
    return json.loads(python("-c", head + code).stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def imported() -> Any:
    """What `import fastkernels` adds to an interpreter that has torch."""
    return run(
        """
import contextlib, io, json, logging, os, sys, threading
import torch
records = []
handler = logging.Handler(0)
handler.emit = lambda record: records.append(record.getMessage())
logging.getLogger().addHandler(handler)
logging.getLogger().setLevel(0)
before, variables, threads = set(sys.modules), dict(os.environ), threading.active_count()
printed = io.StringIO()
with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
    import fastkernels
print(json.dumps({
    "modules": sorted(set(sys.modules) - before),
    "records": records,
    "printed": printed.getvalue(),
    "handlers": len(logging.getLogger("fastkernels").handlers),
    "threads": threading.active_count() - threads,
    "environment": dict(os.environ) == variables,
    "cuda": torch.cuda.is_initialized(),
}))
"""
    )


def test_import_loads_no_oracle_no_kernel_and_no_command_line(imported: Any) -> None:
    """C109: the budget is counted in modules, so that a slow machine cannot break it."""
    own = [name for name in imported["modules"] if name.startswith("fastkernels")]
    unwanted = re.compile(
        r"fastkernels\.(testing|contest|cli|demo|doctor)\b"
        r"|fastkernels\.ops\.[a-z_0-9]+\.(kernels\.|inputs\b|reference\b)"
    )
    assert [name for name in own if unwanted.match(name)] == []
    assert "fastkernels.ops.gdn_decode.op" in own
    assert len(own) <= MAX_OWN_MODULES


def test_import_adds_nothing_heavy_to_torch(imported: Any) -> None:
    """C109: little and standard; a part of torch that torch itself leaves out counts, too."""
    others = [name for name in imported["modules"] if not name.startswith("fastkernels")]
    foreign = {name.partition(".")[0] for name in others} - sys.stdlib_module_names
    assert foreign <= {"tomli"}
    assert len(others) <= MAX_STANDARD_MODULES, others


def test_import_is_quiet_and_leaves_the_process_alone(imported: Any) -> None:
    assert imported["records"] == []
    assert imported["printed"] == ""
    assert imported["handlers"] == 0
    assert imported["threads"] == 0
    assert imported["environment"] is True
    assert imported["cuda"] is False


def test_every_module_imports_without_a_gpu() -> None:
    """C107, first half; `walk_packages` must see every file, or a folder lacks its __init__.py."""
    result = run(IMPORT_ALL, SKIPPED=("fastkernels._tables",))
    assert result["failed"] == {}
    files = {
        ".".join(("fastkernels", *path.relative_to(PACKAGE).with_suffix("").parts))
        for path in PACKAGE.rglob("*.py")
    }
    expected = {name.removesuffix(".__init__") for name in files} - {"fastkernels"}
    assert expected <= set(result["names"])


def test_every_module_imports_without_optional_packages() -> None:
    """C107, second half: the library without the command line's packages, and a call on the CPU."""
    skipped = ("fastkernels._tables", "fastkernels.cli")
    blocked = (*OPTIONAL, *COMMAND_LINE)
    result = run(BLOCK + CALL + IMPORT_ALL, BLOCKED=blocked, SKIPPED=skipped)
    assert result["failed"] == {}


def test_the_command_imports_without_optional_packages() -> None:
    result = run(BLOCK + 'import fastkernels.cli\nprint("true")', BLOCKED=OPTIONAL, SKIPPED=())
    assert result is True


def tree(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


@pytest.mark.parametrize("data", [None, "/proc/nowhere"], ids=["home", "xdg"])
def test_a_home_that_cannot_be_written(data: str | None) -> None:
    """C112: the kernel refuses folders below /proc to everybody, root too."""
    before = tree(PACKAGE)
    env = environment(HOME="/proc/nowhere", XDG_DATA_HOME=data, XDG_CACHE_HOME=None)
    assert "gdn_decode" in python("-c", CALL + EXPLAIN, env=env).stdout
    assert tree(PACKAGE) == before


UNNAMED = next(uid for uid in range(996, 60000) if uid not in {e.pw_uid for e in pwd.getpwall()})
# May read everything, since the interpreter may lie in root's home, and write nothing here.
AS_UNNAMED = (
    "setpriv", f"--reuid={UNNAMED}", f"--regid={UNNAMED}", "--clear-groups", "--no-new-privs",
    "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
)  # fmt: skip


def can_become_unnamed() -> bool:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return False
    return subprocess.run([*AS_UNNAMED, "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_become_unnamed(), reason="needs root with setpriv (util-linux)")
def test_a_user_without_a_name() -> None:
    """C119 and C112: no passwd entry, HOME or USER, and the package's folder is read-only."""
    env = environment(HOME=None, USER=None, LOGNAME=None, XDG_DATA_HOME=None, XDG_CACHE_HOME=None)
    check = f"import os\nassert os.getuid() == {UNNAMED}\n"
    check += f"assert not os.access({str(PACKAGE)!r}, os.W_OK)\n"
    done = python("-c", check + CALL + EXPLAIN, prefix=AS_UNNAMED, env=env)
    assert "gdn_decode" in done.stdout
