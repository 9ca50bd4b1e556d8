"""The README is true: its example runs, its commands exist, its figures name their result file."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

from fastkernels import catalog, cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    for name in ("output", "state", "lse", "best", "y"):
        assert name in names
    used = set(re.findall(r"fk\.(\w+)\(", example))
    assert used == {operator.name for operator in catalog.OPERATORS}


def test_commands_and_variables_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", README):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    for command in re.findall(r"fastkernels (\w+)(?= |\n)", README):
        if command in cli.main.commands:
            continue
        assert command not in ("demo", "doctor", "explain")
    sources = (ROOT / "src" / "fastkernels" / "envs.py").read_text()
    sources += (ROOT / "setup.py").read_text()
    for variable in set(re.findall(r"FASTKERNELS_\w+", README)):
        assert f'"{variable}"' in sources, variable


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_h200_times_are_those_of_the_result_file() -> None:
    section = README.split("## Times on an H200")[1].split("\n## ")[0]
    result = json.loads((ROOT / "bench/results/h200/gdn_decode.json").read_text())
    assert result["code"]["commit"].startswith(re.findall(r"commit\n?(?: |)(\w{7})\)", section)[0])
    rows = re.findall(r"^\| (\w+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|", section, flags=re.MULTILINE)
    assert len(rows) == 24
    for mode, batch, ours, flashinfer in rows:
        found = [
            row
            for row in result["rows"]
            if row["list"] in ("contest", "serving")
            and row["mode"] == mode
            and row["axes"]["batch_size"] == int(batch)
        ]
        assert f"{statistics.mean(r['us']['median'] for r in found):.2f}" == ours
        peer = statistics.mean(r["peers"]["flashinfer"]["sum_us"] for r in found)
        assert f"{peer:.2f}" == flashinfer
    summary = result["summary"]
    ratios = [
        f"{summary[listed][mode]['flashinfer'][what]:.{digits}f}"
        for listed, mode, digits in (
            ("contest", "functional", 2), ("contest", "inplace", 2),
            ("serving", "functional", 2), ("serving", "inplace", 3),
        )
        for what in ("mean_of_ratios", "worst")
    ]  # fmt: skip
    found = re.findall(r"([\d.]+)(?: functional| in\s+place) \(worst row ([\d.]+)", section)
    assert [figure for pair in found for figure in pair] == ratios
    hosts = [row for row in result["rows"] if row["host_us"] is not None]
    for name, words in (("host_out_us", "the host with `out="), ("host_us", "`out=` and ")):
        each = [row[name] for row in hosts]
        assert f"{min(each):.1f} to {max(each):.1f}" in section, words


def test_cpu_times_are_those_of_the_result_files() -> None:
    """Every row of the table is the row of the named result file, to the printed digits."""
    section = README.split("## Times on a CPU")[1].split("\n## ")[0]
    rows = re.findall(
        r"^\| `(\w+)` \| ([^|]+) \| ([\d.]+) s \| ([\d.]+) MB \|", section, flags=re.MULTILINE
    )
    assert len(rows) >= 5
    for op, sizes, seconds, megabytes in rows:
        assert f"bench/results/cpu/{op}.json" in section
        result = json.loads((ROOT / "bench" / "results" / "cpu" / f"{op}.json").read_text())
        wanted = {n: int(s) for n, s in (text.split("=") for text in sizes.split(", "))}
        found = [r for r in result["rows"] if all(r["axes"][n] == s for n, s in wanted.items())]
        assert any(
            f"{r['us']['median'] / 1e6:.3g}" == seconds and f"{r['peak_extra_mb']:.0f}" == megabytes
            for r in found
        ), (op, sizes)
