"""The command line: exit codes, JSON, and errors that say what to type instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from fastkernels import cli, demo, doctor, envs
from fastkernels.core import dispatch, extension
from fastkernels.ops.gdn_decode.op import OPERATOR as GDN_DECODE


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments))


def test_demo_runs_smallest_median_and_largest() -> None:
    result = invoke("demo", "--op", "gdn_decode", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    rows = document["rows"]
    assert [row["axes"]["batch_size"] for row in rows] == [1, 16, 64]
    assert all(row["ok"] for row in rows)
    assert {row["route"] for row in rows} == {"torch_recurrent"}
    assert document["environment"]["arch"] == "cpu"


def test_demo_table_shows_the_route_and_why() -> None:
    result = invoke("demo", "--op", "gdn_decode", "--device", "cpu")
    assert result.exit_code == 0, result.output
    for part in ("batch_size=64", "3 of 3 workloads right", "why this route"):
        assert part in result.stdout


def test_a_wrong_number_is_exit_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    route = GDN_DECODE.safe_route

    def off_by_a_tenth(inputs: Any, outputs: Any, workspace: Any, config: Any) -> None:
        route.launch(inputs, outputs, workspace, config)
        outputs[0][-1].mul_(1.1)

    import dataclasses

    broken = dataclasses.replace(
        GDN_DECODE, routes=(dataclasses.replace(route, launch=off_by_a_tenth),)
    )
    monkeypatch.setattr("fastkernels.ops.gdn_decode.op.OPERATOR", broken)
    monkeypatch.setattr(demo, "chosen_cases", lambda *_: _smallest())
    result = invoke("demo", "--op", "gdn_decode", "--device", "cpu")
    assert result.exit_code == 1, result.output
    assert "WRONG" in result.stdout
    assert "0 of 1 workloads right" in result.stdout


def _smallest() -> tuple[Any, ...]:
    from fastkernels.ops.gdn_decode.inputs import CONTEST

    return (min(CONTEST, key=lambda case: case.batch_size),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "--op", "gdn"), "operator 'gdn' is unknown, expected one of gdn_decode"),
        (("demo", "--device", "h300"), "h300"),
        (("explain", "gdn"), "operator 'gdn' is unknown"),
        (("explain", "gdn_decode"), "axis 'batch_size' is missing"),
        (("explain", "gdn_decode", "--axis", "batch_size"), "expected NAME=SIZE"),
        (("explain", "gdn_decode", "--axis", "batch_size=-1"), "expected NAME=SIZE"),
        (("explain", "gdn_decode", "--axis", "batch=8"), "axis 'batch' is unknown"),
        (("explain", "gdn_decode", "--axis", "batch_size=8", "--mode", "fast"), "mode 'fast'"),
        (("explain", "gdn_decode", "--axis", "batch_size=8", "--device", "h300"), "h300"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize("device", ["h200", "b200", "cpu"])
def test_explain(device: str) -> None:
    arguments = ("explain", "gdn_decode", "--axis", "batch_size=8", "--device", device)
    text = invoke(*arguments)
    assert text.exit_code == 0, text.output
    for part in ("gdn_decode", "route", "why", "table"):
        assert part in text.stdout
    document = json.loads(invoke(*arguments, "--json").stdout)
    assert document["axes"]["batch_size"] == 8
    assert document["route"] in {route.name for route in GDN_DECODE.routes}


def test_doctor_says_what_is_missing() -> None:
    result = invoke("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)}
    assert findings["torch"]["found"].startswith(torch.__version__)
    assert result.exit_code == (1 if any(f["state"] == "wrong" for f in findings.values()) else 0)
    for finding in findings.values():
        assert finding["state"] in ("ok", "missing", "wrong")
        assert finding["cost"] or finding["state"] == "ok", finding
    screen = invoke("doctor")
    assert len(screen.stdout.splitlines()) <= 50
    for name in ("driver", "triton", "nvidia-cutlass-dsl", "flashinfer-python"):
        assert name in screen.stdout


def test_doctor_reports_broken_tables_and_unknown_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gdn_decode").mkdir()
    (tmp_path / "gdn_decode" / "sm90-h200.toml").write_text("schema = 7\n")
    monkeypatch.setenv(envs.TABLES, str(tmp_path))
    monkeypatch.setenv("FASTKERNELS_TABELS", "x")
    dispatch.reload_tables()
    result = invoke("doctor", "--json")
    assert result.exit_code == 1
    wrong = [f for f in json.loads(result.stdout) if f["state"] == "wrong"]
    assert {f["name"] for f in wrong} == {"table gdn_decode", "FASTKERNELS_TABELS"}
    assert any("schema is 7" in f["cost"] for f in wrong)


def test_doctor_lists_what_the_build_could_not_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line each: compilers are long-winded, and the build printed it all."""
    missing = [
        {"what": "a kernel for sm90", "reason": "nvcc failed (1)\nerror: one\nerror: two"},
        {"what": "a kernel for sm100", "reason": "word " * 1000},
    ]
    monkeypatch.setattr(extension, "state", lambda: extension.LibraryState("ok", "a library"))
    monkeypatch.setattr(extension, "manifest", lambda: {"missing": missing})
    findings = [f for f in doctor.examine() if f.name == "not in the library"]
    assert [f.found for f in findings] == ["a kernel for sm90", "a kernel for sm100"]
    assert {f.state for f in findings} == {"missing"}
    assert findings[0].cost == "nvcc failed (1) error: one error: two"
    assert len(findings[1].cost) <= 200


def test_doctor_prints_what_it_found_to_the_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets are no markup; values that calls would refuse are wrong here, too."""
    monkeypatch.setenv("FASTKERNELS_X", "[/bold]")
    assert "[/bold]" in invoke("doctor").stdout
    monkeypatch.delenv("FASTKERNELS_X")
    for name, value in ((envs.CHECK, "bogus"), (envs.STRICT, "yes")):
        monkeypatch.setenv(name, value)
        findings = {f["name"]: f for f in json.loads(invoke("doctor", "--json").stdout)}
        assert findings[name]["state"] == "wrong"
        assert value in findings[name]["cost"]
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "gdn_decode", "--axis", "mode=3"),
        ("explain", "gdn_decode", "--axis", "device=3"),
        ("explain", "gdn_decode", "--axis", "batch_size=" + "9" * 5000),
        ("demo", "--device", "meta"),
    ],
)
def test_odd_arguments_are_usage_errors(arguments: tuple[str, ...]) -> None:
    assert invoke(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("version", "state", "said"),
    [(12080, "wrong", "need a driver for CUDA 13.0"), (13000, "ok", ""), (13020, "ok", "")],
)
def test_c94_a_driver_too_old_is_named_with_what_is_needed(
    version: int, state: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel ships yet that could fail to load; the check that names found and needed does."""
    from types import SimpleNamespace

    from fastkernels import doctor

    def get_version(pointer: Any) -> int:
        pointer._obj.value = version
        return 0

    driver = SimpleNamespace(cuDriverGetVersion=get_version)
    monkeypatch.setattr("ctypes.CDLL", lambda name: driver)
    found = doctor._driver()
    assert found.state == state
    assert said in found.cost
    assert f"CUDA {version // 1000}.{version % 1000 // 10}" in found.found
