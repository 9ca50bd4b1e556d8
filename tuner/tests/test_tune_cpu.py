"""The command for real, on the CPU: processes, store, files; killed and resumed as a person would.

Small sizes and few trials; that such a campaign also chooses well is test_campaign.py's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fastkernels.core import table as tables
from fastkernels_tuner.plan import operator_of

POLICY = """
name = "test"
timer = "wall"
is_promotable = false
max_trials = 2
rungs = [[1, 2]]
finalists = 2
max_workloads = 2
buckets = 1
iterations = 3
search_trials = 1
p_max = { low = 0.95, medium = 0.95, high = 0.95 }
looks = [2, 3]
min_gain = 0.05
probe_rounds = 0
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fastkernels_tuner", *arguments]


def environment() -> dict[str, str]:
    paths = [path for path in sys.path if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def tune(folder: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        command(*arguments, "--json"), cwd=folder, env=environment(), capture_output=True,
        text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_campaign_that_is_killed_goes_on(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(POLICY)
    first = subprocess.Popen(
        command("--op", "gdn_decode", "--device", "cpu", "--policy", "policy.toml"),
        cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        text=True, start_new_session=True,
    )  # fmt: skip
    assert first.stderr is not None
    for line in first.stderr:
        if line.startswith("== compare"):
            break
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    number = tune(tmp_path, "status")["campaigns"][0]["campaign"]
    assert tune(tmp_path, "status", number)["stages"]["search"]
    ended = tune(tmp_path, "resume", "--device", "cpu")
    assert ended["campaign"] == number
    operator = operator_of("gdn_decode")
    table = tables.read(tmp_path / ended["table"], operator.spec)
    assert {regime.mode for regime in table.regimes} == set(operator.spec.modes)
    page = (tmp_path / ended["report"]).read_text()
    assert number in page
    assert "never" in page  # shipped
    shown = tune(tmp_path, "status", number)
    assert {job["status"] for job in shown["jobs"]} == {"done"}
    tune(tmp_path, "export", number, "bundle.tar.gz")
    assert tune(tmp_path, "import", "bundle.tar.gz", "--folder", "elsewhere")["campaign"] == number
    deadline = time.monotonic() + 10  # nothing of the killed one outlives it for long
    while _left_behind(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not _left_behind(tmp_path)


def _left_behind(folder: Path) -> list[int]:
    """Processes that still work in the campaign's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if (entry / "cwd").resolve() == folder.resolve():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
