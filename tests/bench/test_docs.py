"""docs/benchmarks.md is true: its files, figures, peers, options and commands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")  # of the page

from bench import compare, page, peers, report, run, targets
from fastkernels import catalog

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "benchmarks.md").read_text()
COMMANDS = {
    "bench/run.py": run.main, "bench/compare.py": compare.main, "bench/report.py": report.main,
    "bench/page.py": page.main, "bench/targets.py": targets.main,
}  # fmt: skip


def table(first: str) -> list[list[str]]:
    """The cells of a table by its first heading, without the head."""
    found = re.search(rf"^\| {first} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", TEXT, flags=re.MULTILINE)
    assert found is not None, first
    return [[cell.strip() for cell in line.strip("|").split(" | ")]
            for line in found[1].splitlines()]  # fmt: skip


def test_every_result_file_is_named_with_its_figures() -> None:
    rows = table("device")
    for device, op, name, commit, num_rows, own_peers in rows:
        data = json.loads((ROOT / name.strip("`")).read_text())
        assert op.strip("`") == data["op"]
        assert data["code"]["commit"].startswith(commit)
        assert int(num_rows) == len(data["rows"])
        where = data["device"]
        assert device == where["product"] + (
            f", {where['threads']} threads" if "threads" in where else ""
        )
        found = {peer for row in data["rows"] for peer in row.get("peers", {})}
        assert set(own_peers.split(", ")) == (found or {"none"})
    published = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "bench" / "results").glob("*/*.json")
        if "rows" in json.loads(path.read_text()) and not path.name.endswith(".sweep.json")
    }
    assert {name.strip("`") for _, _, name, *_ in rows} == published


def test_every_path_is_there() -> None:
    for name in re.findall(r"bench/[\w./]+\.(?:json|py)", TEXT):
        assert (ROOT / name).exists(), name


def test_every_peer_is_named_with_what_it_adapts() -> None:
    found = {
        (op.strip("`"), name.strip("`")): (package, adapted)
        for op, name, package, adapted in table("operator")
    }
    known = {
        (operator.name, peer.name): (f"{peer.package} {peer.version}", peer.adapted)
        for operator in catalog.OPERATORS
        for peer in peers.of(operator.name).values()
    }
    assert found == known
    without = [op.name for op in catalog.OPERATORS if not peers.of(op.name)]
    sentence = " and ".join(f"`{name}`" for name in without)
    assert (f"{sentence} have none yet" in TEXT) == bool(without)


LINES = re.findall(r"python (bench/\w+\.py)([^`\n]*)", TEXT)


@pytest.mark.parametrize(("script", "arguments"), LINES)
def test_commands_have_these_options(script: str, arguments: str) -> None:
    command = COMMANDS[script]
    known = {option for each in command.params for option in each.opts}
    given = {word for word in shlex.split(arguments) if word.startswith("--")}
    assert given <= known


def test_options_in_the_text_exist() -> None:
    known = {option for main in COMMANDS.values() for each in main.params for option in each.opts}
    named = set(re.findall(r"`(--[\w-]+)", TEXT))
    assert "--quick" in named
    assert named <= known


def test_the_commands_of_the_cpu_files_pick_their_rows() -> None:
    lines = [
        shlex.split(rest) for script, rest in LINES if rest.endswith("--out bench/results/cpu")
    ]
    assert len(lines) == len(catalog.OPERATORS)
    for words in lines:
        with run.main.make_context("run", words) as context:
            given = context.params
        rows = run.Filter(given["where"], given["limit"], (), (), False).rows(
            catalog.operator(given["name"]), None, False
        )
        path = ROOT / given["out"] / f"{given['name']}.json"
        expected = [(row["list"], row["id"]) for row in json.loads(path.read_text())["rows"]]
        assert [(listed, case.source or case.name) for listed, case in rows] == expected


def test_the_budget_and_the_quick_rows_are_those_of_the_code() -> None:
    assert f"a budget of {run.QUICK_BUDGET_S:.0f} s" in TEXT
    assert f"{run.QUICK['iterations']} iterations, one round of host times" in TEXT
    assert run.QUICK["host_rounds"] == 1
    assert peers.TOLERANCE == 10
    assert "ten times our limits" in TEXT
