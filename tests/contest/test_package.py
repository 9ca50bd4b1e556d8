"""Contest packages: files, and torch routes that run with torch alone."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from fastkernels import catalog
from fastkernels.contest.definition import definition, reference_text
from fastkernels.contest.package import PackError, pack
from fastkernels.core import archs
from fastkernels.core.problem import torch_dtype
from fastkernels.errors import ArgumentError
from fastkernels.ops._shared.cases import Case
from tests.contest.packages import (
    Calls,
    arguments,
    entry_of,
    poisoned_outputs,
    run_text,
    user_table,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OPERATORS = [operator.name for operator in catalog.OPERATORS]


def small_contest(op: str) -> list[Case]:
    """Workloads of the contest, as far as a CPU serves and judges them in seconds: caches with
    fewer pages, experts with fewer columns, not the longest."""
    cases: list[Any] = list(catalog.module(op, "inputs").CONTEST)
    if op == "gdn_decode":
        return [case for case in cases if case.batch_size <= 8]
    if op == "gdn_prefill":
        return [case for case in cases if sum(case.lengths) <= 100]
    if op == "dsa_sparse_attention":
        return [dataclasses.replace(case, num_pages=64) for case in cases]
    if op == "dsa_topk_indexer":
        short = [case for case in cases if sum(case.seq_lens) <= 600]
        long = next(case for case in cases if max(case.seq_lens) > case.topk)
        return [dataclasses.replace(case, num_pages=256) for case in (*short, long)]
    if op == "moe_fp8_block_scale":
        small = {"hidden_size": 256, "intermediate_size": 128}
        return [dataclasses.replace(case, **small) for case in cases if case.seq_len <= 80]
    return cases


# ---- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", archs.ARCHS)
@pytest.mark.parametrize("op", OPERATORS)
def test_a_package_is_what_the_contests_packer_takes(op: str, arch: str, tmp_path: Path) -> None:
    package = pack(op, arch, "an author", "a-name")
    package.write(tmp_path / "out")
    config = tomllib.loads((tmp_path / "out/config.toml").read_text())
    document = json.loads((tmp_path / "out/solution.json").read_text())
    assert config["solution"] == {
        "name": "a-name",
        "definition": definition(op)["name"],
        "author": "an author",
    }
    # The packer refuses `python`, descends into no folder and takes an empty file for an error.
    assert config["build"]["language"] == document["spec"]["language"] == "triton"
    assert config["build"]["entry_point"] == document["spec"]["entry_point"] == "main.py::run"
    (path,) = (tmp_path / "out/solution/triton").iterdir()
    assert document["sources"] == [{"path": path.name, "content": path.read_text()}]
    run = next(n for n in ast.parse(path.read_text()).body if getattr(n, "name", "") == "run")
    assert isinstance(run, ast.FunctionDef)
    names = [*definition(op)["inputs"], *definition(op)["outputs"]]
    assert [argument.arg for argument in run.args.args] == names
    assert not run.args.defaults


@pytest.mark.parametrize("op", OPERATORS)
def test_a_package_imports_nothing_of_ours(op: str) -> None:
    for text in (entry_of(pack(op, "sm90", "a", "b")), reference_text(op)):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("fastkernels") for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("fastkernels")


@pytest.mark.parametrize("op", OPERATORS)
def test_equal_sources_make_equal_packages(op: str) -> None:
    assert pack(op, "sm90", "a", "b").files == pack(op, "sm90", "a", "b").files


def test_what_cannot_be_packed(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"operator 'gdn', expected|operator 'gdn' is unknown"):
        pack("gdn", "sm90", "a", "b")
    with pytest.raises(ArgumentError, match="arch 'cpu', expected one of sm90, sm100"):
        pack("gdn_decode", "cpu", "a", "b")
    with pytest.raises(ArgumentError, match=r"name '\.\./x', expected letters"):
        pack("gdn_decode", "sm90", "a", "../x")
    (tmp_path / "stray.cu").write_text("")
    with pytest.raises(PackError, match="not an empty folder"):
        pack("gdn_decode", "sm90", "a", "b").write(tmp_path)


def test_a_table_that_leaves_a_workload_out_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    user_table(monkeypatch, tmp_path, "dsa_topk_indexer", "pass_through")
    # Rows of more than 2048 positions have something to select.
    with pytest.raises(PackError, match="'pass_through' declines the contest's"):
        pack("dsa_topk_indexer", "sm90", "a", "b")


COMPILED = [
    pytest.param(operator.name, route.name, id=f"{operator.name}-{route.name}")
    for operator in catalog.OPERATORS
    for route in operator.routes[:-1]
]


@pytest.mark.parametrize(("op", "route"), COMPILED)
def test_a_package_follows_its_table(
    op: str, route: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever route a table names, its sources and its plan go in, and nothing of the others."""
    user_table(monkeypatch, tmp_path, op, route)
    try:
        text = entry_of(pack(op, "sm90", "a", "b"))
    except PackError as error:
        assert route == "pass_through"
        assert "declines the contest's" in str(error)  # noqa: PT017
        return
    assigned = {
        node.targets[0].id: node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    (plan,) = ast.literal_eval(assigned["PLANS"])
    kernel = next(
        k for k in import_module(f"fastkernels.ops.{op}.kernels").KERNELS if k.name == route
    )
    assert len(plan["variants"]) == len(plan["arguments"]) == len(kernel.variants)
    sources = ast.literal_eval(assigned["SOURCES"])
    assert f"{op}/binding.cc" in sources
    assert "common/cubin.cc" in sources
    for code in plan["variants"]:
        if "source" in code:
            assert code["source"] in sources
            assert "arch=compute_90a,code=sm_90a" in code["flags"]
        else:
            assert f"{code['module'].replace('.', '/')}.py" in sources
    for name, source in sources.items():
        assert not re.search(r"^\s*(from|import) fastkernels\b", source, re.MULTILINE), name


# ---- what they compute --------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPERATORS)
def test_torch_routes_run_with_torch_alone(
    op: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    user_table(monkeypatch, tmp_path / "tables", op)
    cases = small_contest(op)
    assert cases
    inputs = [catalog.module(op, "inputs").make_inputs(case) for case in cases]
    calls: Calls = [
        (arguments(op, x), poisoned_outputs(op, case.axes))
        for x, case in zip(inputs, cases, strict=True)
    ]
    results = run_text(entry_of(pack(op, "sm90", "a", "b")), calls, tmp_path)
    reference = catalog.module(op, "reference").reference
    for case, x, outputs in zip(cases, inputs, results, strict=True):
        expected = reference(x)
        for error in (*expected.judge(outputs), *expected.judge_official(outputs)):
            assert error.ok, f"{case}: {error}"


@pytest.mark.parametrize("op", OPERATORS)
def test_the_reference_is_the_oracle(op: str, tmp_path: Path) -> None:
    cases = small_contest(op)[:3]
    inputs = [catalog.module(op, "inputs").make_inputs(case) for case in cases]
    calls: Calls = [(arguments(op, x), []) for x in inputs]
    results = run_text(definition(op)["reference"], calls, tmp_path)
    reference = catalog.module(op, "reference").reference
    spec = catalog.operator(op).spec
    for x, outputs in zip(inputs, results, strict=True):
        expected = reference(x)
        for out, tensor in zip(spec.outputs, outputs, strict=True):
            want = getattr(expected, out.name).to(torch_dtype(out.dtypes[0]))
            assert torch.equal(tensor, want), out.name


def test_an_empty_sequence_has_a_state_of_zeros(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The definition's, in package and reference; the library keeps the state before it."""
    user_table(monkeypatch, tmp_path / "tables", "gdn_prefill")
    module = catalog.module("gdn_prefill", "inputs")
    case = module.Case("empty", (3, 0, 2, 0), seed=1)
    inputs = module.make_inputs(case)
    given = arguments("gdn_prefill", inputs)
    outputs = poisoned_outputs("gdn_prefill", case.axes)
    texts = [entry_of(pack("gdn_prefill", "sm90", "a", "b")), reference_text("gdn_prefill")]
    for text, out in zip(texts, (outputs, []), strict=True):
        ((_, new_state),) = run_text(text, [(given, out)], tmp_path)
        is_zero = (new_state == 0).flatten(1).all(1)
        assert is_zero.tolist() == [False, True, False, True]
    expected = catalog.module("gdn_prefill", "reference").reference(inputs)
    assert torch.equal(expected.new_state[1], inputs.state[1].double())


def test_a_reference_runs_nothing_that_judges() -> None:
    for op in OPERATORS:
        assert "def judge" not in reference_text(op)
