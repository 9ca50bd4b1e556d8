"""Trace sets for flashinfer-bench's `apply`: solutions that call the installed package. Tests that
need flashinfer-bench are skipped only where it cannot be imported; the evaluator needs a GPU."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from fastkernels import catalog, cli, gdn_decode
from fastkernels.contest import check, substitute
from fastkernels.contest.definition import definition
from fastkernels.core.spec import TensorSpec
from fastkernels.testing import contracts
from fastkernels.testing.compare import as_tuple, same_bits
from tests.contest.packages import bench

OPERATORS = [operator.name for operator in catalog.OPERATORS]


def trace(op: str, **axes: int) -> dict[str, Any]:
    """A PASSED trace of our solution, as flashinfer-bench writes one; its figures are nobody's."""
    document, own = definition(op), substitute.solution(op)
    inputs = {
        name: {"type": "safetensors", "path": "x", "tensor_key": name} if each["shape"] is not None
        else {"type": "scalar", "value": 0.5}
        for name, each in document["inputs"].items()
    }  # fmt: skip
    return {
        "definition": own["definition"],
        "solution": own["name"],
        "workload": {"uuid": f"w{axes}", "axes": axes, "inputs": inputs},
        "evaluation": {
            "status": "PASSED",
            "environment": {"hardware": "a test", "libs": {}},
            "timestamp": "2026-01-01T00:00:00",
            "log": "",
            "correctness": {"max_absolute_error": 0.25, "max_relative_error": 3.0},
            "performance": {
                "latency_ms": 1.0, "reference_latency_ms": 2.0, "speedup_factor": 2.0,
            },
        },
    }  # fmt: skip


def small_case(op: str) -> Any:
    operator = catalog.operator(op)
    cases = contracts.cases(operator, "CORRECTNESS")
    return next(case for case in cases if case.mode == operator.spec.modes[0])


@pytest.mark.parametrize("op", OPERATORS)
def test_a_solution_is_the_operator(op: str) -> None:
    spec = catalog.operator(op).spec
    inputs = catalog.module(op, "inputs").make_inputs(small_case(op))
    given = {argument.name: getattr(inputs, argument.name) for argument in spec.inputs}
    expected = as_tuple(catalog.operator(op).function(**given))
    (source,) = substitute.solution(op)["sources"]
    space: dict[str, Any] = {}
    exec(source["content"], space)
    outputs = {
        out.name: torch.full_like(each, 1) for out, each in zip(spec.outputs, expected, strict=True)
    }
    assert list(given) == list(definition(op)["inputs"])
    assert list(outputs) == list(definition(op)["outputs"])
    assert space["run"](*given.values(), *outputs.values()) is None
    assert all(same_bits(a, b) for a, b in zip(outputs.values(), expected, strict=True))


def test_an_empty_sequence_ends_as_the_definition_says() -> None:
    case = next(
        case
        for case in contracts.cases(catalog.operator("gdn_prefill"), "CORNER")
        if case.name == "empty-sequences"
    )
    inputs = catalog.module("gdn_prefill", "inputs").make_inputs(case)
    spec = catalog.operator("gdn_prefill").spec
    given = [getattr(inputs, argument.name) for argument in spec.inputs]
    (source,) = substitute.solution("gdn_prefill")["sources"]
    space: dict[str, Any] = {}
    exec(source["content"], space)
    output, new_state = torch.ones_like(inputs.v), torch.ones_like(inputs.state)
    space["run"](*given, output, new_state)
    assert (inputs.cu_seqlens.diff() == 0).all()
    assert not new_state.any()


def test_a_set_of_several_operators(tmp_path: Path) -> None:
    for op in ("gdn_decode", "dsa_topk_indexer"):
        files = substitute.write_trace_set(op, tmp_path, [trace(op)])
        assert all(path.is_file() for path in files)
    assert len(list(tmp_path.rglob("*.json"))) == 4
    assert len(list(tmp_path.rglob("*.jsonl"))) == 2


def test_a_trace_names_no_file() -> None:
    given = substitute.without_files(trace("gdn_decode", batch_size=2))
    inputs = given["workload"]["inputs"]
    assert inputs["q"] == {"type": "random"}
    assert inputs["scale"] == {"type": "scalar", "value": 0.5}
    assert "safetensors" not in json.dumps(given)
    assert given["evaluation"] == trace("gdn_decode")["evaluation"]
    worse = trace("gdn_decode")
    worse["evaluation"]["correctness"] = {"max_absolute_error": 0.5, "max_relative_error": 1.0}
    assert substitute.largest_errors([given, worse]) == (0.5, 3.0)


def test_apply_calls_the_operator_where_a_trace_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fib = bench()
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    substitute.write_trace_set(
        "gdn_decode",
        tmp_path / "set",
        [substitute.without_files(trace("gdn_decode", batch_size=2))],
    )
    make_inputs = catalog.module("gdn_decode", "inputs").make_inputs
    Case = catalog.module("gdn_decode", "inputs").Case
    name = substitute.solution("gdn_decode")["definition"]
    arguments = [a.name for a in catalog.operator("gdn_decode").spec.inputs]

    def asked(batch_size: int, **policy: Any) -> tuple[bool, tuple[torch.Tensor, ...], Any]:
        inputs = make_inputs(Case("x", batch_size, seed=batch_size, scale=0.5))
        kwargs = {argument: getattr(inputs, argument) for argument in arguments}
        config = import_module("flashinfer_bench.apply").ApplyConfig(
            max_atol=0.25, max_rtol=3.0, **policy
        )
        own = []
        with fib.enable_apply(str(tmp_path / "set"), config):
            result = fib.apply(name, kwargs=kwargs, fallback=lambda **_: own.append(1))
        return bool(own), result, gdn_decode(**kwargs)

    is_fallback, result, expected = asked(2)
    assert not is_fallback
    assert all(same_bits(a, b) for a, b in zip(result, expected, strict=True))
    assert asked(3)[0]  # no trace of that size
    is_fallback, result, expected = asked(3, on_miss_policy="use_def_best")
    assert not is_fallback
    assert all(same_bits(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("status", ["PASSED", "INCORRECT_NUMERICAL"])
def test_traces_are_the_official_evaluators_and_all_passed(
    status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trace("gdn_decode", batch_size=2)

    def ask(scratch: Path, request: Any, *, is_alone: bool) -> dict[str, Any]:
        assert not is_alone  # the solution imports this package
        assert request["settings"]["use_isolated_runner"] is False
        row = {"uuid": "u", "solution": "s", "status": status, "latency_ms": 1.0, "log": "off"}
        return {"version": "1", "rows": [{**row, "trace": found}]}

    monkeypatch.setattr(check, "_ask", ask)
    monkeypatch.setattr(check, "write_dataset", lambda op, root, solutions: ["u"])
    if status == "PASSED":
        traces = check.evaluate_installed("gdn_decode", "persistent")
        assert traces == [substitute.without_files(found)]
    else:
        with pytest.raises(check.CheckError, match="1 of 1 workloads not PASSED"):
            check.evaluate_installed("gdn_decode", "persistent")


def test_the_command_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(cli.main, ["traces", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "needs a GPU" in done.output
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(check, "available", lambda: False)
    done = CliRunner().invoke(cli.main, ["traces", "--out", str(tmp_path)])
    assert "pip install 'fastkernels[pack]'" in done.output


def test_the_command_writes_what_the_evaluator_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = []

    def evaluate(op: str, runner: str) -> list[dict[str, Any]]:
        asked.append((op, runner))
        if op == "dsa_topk_indexer":
            raise check.CheckError("3 of 128 workloads not PASSED")
        return [trace(op)]

    monkeypatch.setattr(check, "evaluate_installed", evaluate)
    arguments = ["traces", "--out", str(tmp_path), "--op", "gdn_decode", "--op", "dsa_topk_indexer"]
    done = CliRunner().invoke(cli.main, arguments)
    assert done.exit_code == 1
    assert "gdn_decode: 1 traces, errors up to 0.25 (max_atol) and 3 (max_rtol)" in done.output
    assert "WRONG: dsa_topk_indexer: 3 of 128" in done.output
    assert asked == [("gdn_decode", "persistent"), ("dsa_topk_indexer", "persistent")]
    (line,) = next(tmp_path.rglob("*.jsonl")).read_text().splitlines()
    assert json.loads(line)["evaluation"]["status"] == "PASSED"


def test_every_tensor_of_a_definition_is_an_input() -> None:
    for op in OPERATORS:
        spec = catalog.operator(op).spec
        tensors = [a.name for a in spec.inputs if isinstance(a, TensorSpec)]
        shaped = [n for n, each in definition(op)["inputs"].items() if each["shape"] is not None]
        assert tensors == shaped
