"""The command: exit status, JSON, check mode, all or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from fastkernels.core.device import DeviceInfo
from fastkernels_tuner.cli import common, main
from tuner.tests.toy import RULES, both_modes, crossing, write_rules, write_sweep

pytestmark = pytest.mark.usefixtures("toy")


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["emit", *map(str, arguments)])


def test_emit_writes_then_finds_nothing_to_do(tmp_path: Path) -> None:
    out = tmp_path / "tables"
    arguments = (
        "--sweep", write_sweep(tmp_path, both_modes()),
        "--rules", write_rules(tmp_path),
        "--out", out, "--json",
    )  # fmt: skip
    first = invoke(*arguments)
    assert first.exit_code == 0, first.output
    tables = json.loads(first.stdout)["tables"]
    assert [(t["status"], t["state"], t["regimes"]) for t in tables] == [
        ("measured", "written", 4),
        ("unmeasured", "written", 4),
    ]
    paths = [out / "toy/sm90-h200.toml", out / "toy/sm100-b200.toml"]
    assert [Path(t["path"]) for t in tables] == paths
    before = [path.stat().st_mtime_ns for path in paths]
    again = invoke(*arguments)
    assert {t["state"] for t in json.loads(again.stdout)["tables"]} == {"unchanged"}
    assert [path.stat().st_mtime_ns for path in paths] == before
    assert invoke(*arguments, "--check").exit_code == 0


def test_check_says_what_differs_and_writes_nothing(tmp_path: Path) -> None:
    rules, out = write_rules(tmp_path), tmp_path / "tables"
    path = out / "toy/sm100-b200.toml"
    missing = invoke("--rules", rules, "--out", out, "--check")
    assert (missing.exit_code, path.exists()) == (1, False)
    assert "missing" in missing.stdout
    assert invoke("--rules", rules, "--out", out).exit_code == 0
    text = path.read_text()
    path.write_text(text.replace("tile = 32", "tile = 64"))
    edited = invoke("--rules", rules, "--out", out, "--check")
    assert edited.exit_code == 1
    assert "+config = { tile = 32, fast = true }" in edited.stderr
    assert "tile = 64" in path.read_text()
    document = json.loads(invoke("--rules", rules, "--out", out, "--check", "--json").stdout)
    assert (document["tables"][0]["state"], document["exit_code"]) == ("differs", 1)


def test_one_bad_source_and_nothing_is_written(tmp_path: Path) -> None:
    out = tmp_path / "tables"
    rules, sweep = write_rules(tmp_path), write_sweep(tmp_path, crossing())
    result = invoke("--rules", rules, "--sweep", sweep, "--out", out)
    assert (result.exit_code, out.exists()) == (5, False)
    assert "mode fancy: rows = 1" in result.stderr


def test_exit_status_by_cause(tmp_path: Path) -> None:
    assert invoke().exit_code == 2
    assert invoke("--rules", tmp_path / "absent.toml").exit_code == 2
    rules = write_rules(tmp_path)
    assert invoke("--rules", rules, "--rules", rules, "--out", tmp_path).exit_code == 2
    stale = write_sweep(tmp_path, both_modes(), spec_digest="sha256:0")
    result = invoke("--sweep", stale, "--json")
    assert (result.exit_code, json.loads(result.stdout)["exit_code"]) == (2, 2)
    assert "stale" in json.loads(result.stdout)["error"]
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert invoke("--rules", rules, "--out", blocked / "x").exit_code == 3
    gap = write_rules(tmp_path, RULES.replace("[9, 64]", "[10, 64]"))
    assert invoke("--rules", gap, "--out", tmp_path / "tables").exit_code == 5


def test_left_out_candidates_are_named(tmp_path: Path) -> None:
    rows = both_modes()
    rows[1]["failures"] = 1
    result = invoke("--sweep", write_sweep(tmp_path, rows), "--out", tmp_path / "tables")
    assert result.exit_code == 0, result.output
    assert "tiled(tile=32, fast=True) is out: wrong on contest b1, mode plain" in result.stderr


def test_second_sessions_go_to_another_gpu_of_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    products = ["A", "B", "A", "A"]

    def named_device(name: str) -> DeviceInfo:
        return DeviceInfo("sm90", products[int(name.removeprefix("cuda:"))], 132)

    monkeypatch.setattr(common, "named_device", named_device)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(products))
    assert common.second_gpu("cuda:0", None) == "cuda:2"
    assert common.second_gpu("cuda:2", None) == "cuda:0"
    assert common.second_gpu("cuda:1", None) is None
    assert common.second_gpu("cuda:0", "cuda:3") == "cuda:3"
    assert common.second_gpu("cuda:0", "cuda") is None  # the campaign's own
    with pytest.raises(click.UsageError, match="cuda:1: it is B, expected A"):
        common.second_gpu("cuda:0", "cuda:1")
    assert common.second_gpu("cpu", None) is None
