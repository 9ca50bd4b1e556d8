"""What flashinfer-bench makes of packages, and how its verdicts are read. Tests that need it are
skipped only where it cannot be imported."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from fastkernels import catalog, cli
from fastkernels.contest import check, dataset
from fastkernels.contest.dataset import write_dataset
from fastkernels.contest.definition import contest_axes, definition
from fastkernels.contest.package import Package, pack
from fastkernels.core.problem import torch_dtype
from tests.contest.packages import bench, user_table

OPERATORS = [operator.name for operator in catalog.OPERATORS]


# ---- with flashinfer-bench ----------------------------------------------------------------------


@pytest.mark.parametrize("op", OPERATORS)
def test_schema_packer_and_build(op: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench()
    user_table(monkeypatch, tmp_path, op, product="b200")
    schema, built = check.check_build(pack(op, "sm100", "an author", "a-name"))
    assert schema.endswith("ok")
    assert built.startswith("builds in an empty folder with an empty cache")


def test_a_package_that_needs_us_does_not_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench()
    user_table(monkeypatch, tmp_path, "dsa_topk_indexer")
    package = pack("dsa_topk_indexer", "sm90", "a", "b")
    (source,) = package.solution["sources"]
    text = source["content"] + "\nimport fastkernels\n"
    document = {**package.solution, "sources": [{**source, "content": text}]}
    files = {
        **package.files,
        "solution/triton/main.py": text,
        "solution.json": json.dumps(document),
    }
    with pytest.raises(check.CheckError, match="a package must not import it"):
        check.check_build(Package(package.op, package.arch, files, ()))


def test_a_document_that_the_packer_would_not_make_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench()
    user_table(monkeypatch, tmp_path, "dsa_topk_indexer")
    package = pack("dsa_topk_indexer", "sm90", "a", "b")
    files = {**package.files, "solution/triton/second.py": "x = 1\n"}
    with pytest.raises(check.CheckError, match=r"makes another solution\.json: sources"):
        check.check_build(Package(package.op, package.arch, files, ()))


@pytest.mark.parametrize("op", OPERATORS)
def test_definitions_keep_to_the_schema(op: str) -> None:
    document = definition(op)
    found = bench("flashinfer_bench.data").Definition(**document)
    assert list(found.inputs) == list(document["inputs"])


def test_workload_files_hold_our_inputs(tmp_path: Path) -> None:
    traces = bench("flashinfer_bench.data").TraceSet
    utils = bench("flashinfer_bench.bench.utils")
    package = pack("gdn_prefill", "sm90", "a", "b")
    uuids = write_dataset("gdn_prefill", tmp_path, [package.solution], limit=2)
    found = traces.from_path(str(tmp_path))
    name = definition("gdn_prefill")["name"]
    assert [trace.workload.uuid for trace in found.workloads[name]] == uuids
    assert [solution.name for solution in found.solutions[name]] == ["b"]
    module = catalog.module("gdn_prefill", "inputs")
    for trace, case in zip(found.workloads[name], module.CONTEST, strict=False):
        assert dict(trace.workload.axes) in contest_axes("gdn_prefill")
        tensors = utils.load_safetensors(found.definitions[name], trace.workload, tmp_path)
        given = utils.gen_inputs(found.definitions[name], trace.workload, "cpu", tensors)
        for ours, theirs in zip(module.make_inputs(case)[:9], given, strict=False):
            assert torch.equal(ours, theirs)
        assert given[9] == pytest.approx(128**-0.5)


def test_the_official_check_of_correctness_passes_a_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Package, reference and workload files together, as far as the evaluator goes on a CPU."""
    utils = bench("flashinfer_bench.bench.utils")
    evaluators, config = (
        bench("flashinfer_bench.bench.evaluators"),
        bench("flashinfer_bench.bench.config"),
    )
    user_table(monkeypatch, tmp_path / "tables", "gdn_prefill")
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    package = pack("gdn_prefill", "sm90", "a", "a package of torch routes")
    write_dataset("gdn_prefill", tmp_path / "dataset", [package.solution], limit=2)
    found = bench("flashinfer_bench.data").TraceSet.from_path(str(tmp_path / "dataset"))
    (described,) = found.definitions.values()
    registry = bench("flashinfer_bench.compile").BuilderRegistry.get_instance()
    runnable = registry.build(described, found.solutions[described.name][0])
    reference = registry.build_reference(described)
    kind = getattr(config, "ResolvedEvalConfig", config.BenchmarkConfig)
    for trace in found.workloads[described.name]:
        tensors = utils.load_safetensors(described, trace.workload, tmp_path / "dataset")
        inputs = utils.gen_inputs(described, trace.workload, "cpu", tensors)
        correctness, wrong = evaluators.resolve_evaluator(described).check_correctness(
            definition=described,
            sol_runnable=runnable,
            inputs=[inputs],
            ref_outputs=[list(reference(*inputs))],
            cfg=kind(**check.settings("gdn_prefill")),
            log_path="",
            device="cpu",
        )
        assert wrong is None, wrong
        assert 0 < correctness.max_absolute_error < 1e-2


def test_the_command_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench()
    user_table(monkeypatch, tmp_path / "tables", "dsa_sparse_attention", product="b200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["--op", "dsa_sparse_attention", "--arch", "sm100", "--author", "a", "--name", "n"]
    out = ["--out", str(tmp_path / "out"), "--check"]
    result = CliRunner().invoke(cli.main, ["pack", *arguments, *out])
    assert result.exit_code == 0, result.output
    assert "schema and packer of flashinfer-bench" in result.stdout
    assert "not run: no GPU here" in result.stdout


# ---- without ------------------------------------------------------------------------------------


def test_the_command_writes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["pack", "--op", "gdn_prefill", "--arch", "sm100", "--author", "a", "--name", "n"]
    result = CliRunner().invoke(cli.main, [*arguments, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()) == [
        "config.toml", "solution.json", "solution/triton/main.py",
    ]  # fmt: skip
    assert "unmeasured" in result.stdout
    again = CliRunner().invoke(cli.main, [*arguments, "--out", str(out)])
    assert again.exit_code == 1
    assert "not an empty folder" in again.stderr


def test_check_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "available", lambda: False)
    arguments = ["--op", "gdn_prefill", "--arch", "sm100", "--author", "a", "--name", "n"]
    result = CliRunner().invoke(cli.main, ["pack", *arguments, "--check"])
    assert result.exit_code == 2
    assert "pip install 'fastkernels[pack]'" in result.stderr


def test_a_gpu_of_another_architecture_does_not_run_a_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = pack("gdn_prefill", "sm100", "a", "b")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    reason = check.reason_not_to_run(package)
    assert reason == "NVIDIA H200 has compute capability 9.0, not 10.0"


def rows(solution: str, times: dict[str, float | None]) -> list[dict[str, Any]]:
    return [
        {
            "uuid": uuid, "solution": solution, "latency_ms": ms, "log": "", "trace": {},
            "status": "PASSED" if ms else "INCORRECT_NUMERICAL",
        }
        for uuid, ms in times.items()
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "theirs", "lines"),
    [
        (
            {"u": 1.0, "v": 2.0},
            {"u": 3.0, "v": 2.0},
            ["2 of 2 workloads PASSED", "score against FlashInfer: 2.000 (mean of ratios; worst row"
             " 1.000, ratio of sums 1.667)"],
        ),
        (
            {"u": 1.0, "v": 2.0},
            {"u": 3.0, "v": None},
            ["2 of 2 workloads PASSED", "no score: FlashInfer's baseline PASSED 1 of 2 workloads; "
             "v is INCORRECT_NUMERICAL: "],
        ),
        ({"u": 1.0}, {"u": 1.0, "v": 1.0}, "1 of 2 workloads have a trace, expected one each"),
        ({"u": 1.0, "v": None}, {}, "1 of 2 workloads not PASSED; v is INCORRECT_NUMERICAL"),
    ],
)  # fmt: skip
def test_verdicts_and_score(
    ours: dict[str, float | None],
    theirs: dict[str, float | None],
    lines: list[str] | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = pack("gdn_prefill", "sm90", "a", "mine")
    asked: list[dict[str, Any]] = []

    def ask(scratch: Path, request: dict[str, Any], *, is_alone: bool) -> dict[str, Any]:
        assert is_alone
        asked.append(request)
        return {"version": "0", "rows": rows("mine", ours) + rows("flashinfer_baseline", theirs)}

    monkeypatch.setattr(check, "write_dataset", lambda *_: ["u", "v"])
    monkeypatch.setattr(check, "_ask", ask)
    if isinstance(lines, str):
        with pytest.raises(check.CheckError, match=lines):
            check.check_run(package, "isolated")
    else:
        assert check.check_run(package, "isolated")[1:] == lines
    (request,) = asked
    assert request["settings"] == {
        "atol": 0.01, "rtol": 0.01, "profile_baseline": False, "warmup_runs": 1, "iterations": 5,
        "num_trials": 3, "use_isolated_runner": True,
    }  # fmt: skip


def test_settings_of_the_mixture_of_experts() -> None:
    found = check.settings("moe_fp8_block_scale")
    assert (found["atol"], found["rtol"], found["required_matched_ratio"]) == (1.0, 0.3, 0.9)


# A flashinfer-bench that passes every row of one solution and times nothing.
STAND_IN = {
    "__init__.py": "",
    "data.py": """
import json
from pathlib import Path
class TraceSet:
    @classmethod
    def from_path(cls, path):
        self = cls()
        lines = [x for p in sorted(Path(path).rglob("*.jsonl")) for x in p.read_text().split("\\n")]
        self.rows = [json.loads(line) for line in lines if line]
        files = Path(path, "solutions").rglob("*.json")
        self.solutions = [json.loads(file.read_text()) for file in files]
        return self
""",
    "bench.py": """
from types import SimpleNamespace as Some
class BenchmarkConfig:
    def __init__(self, *, atol, rtol, profile_baseline, warmup_runs, iterations, num_trials,
                 use_isolated_runner):
        assert use_isolated_runner is False and profile_baseline is False
class Benchmark:
    def __init__(self, traces, config):
        self.traces = traces
    def run_all(self, dump_traces):
        assert dump_traces is False
        found = []
        for row in self.traces.rows:
            for solution in self.traces.solutions:
                time = Some(latency_ms=2.0 if solution["author"] == "flashinfer" else 1.0)
                status = Some(value="PASSED")
                found.append(Some(
                    workload=Some(uuid=row["workload"]["uuid"]), solution=solution["name"],
                    evaluation=Some(status=status, performance=time, log="x"),
                    model_dump_json=lambda: '{"evaluation": {"status": "PASSED"}}',
                ))
        return Some(traces={"a definition": found})
    def close(self):
        pass
""",
}


def test_the_evaluators_answer_comes_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Data set, request and answer between the two processes, with a stand-in for the evaluator."""
    (tmp_path / "flashinfer_bench").mkdir()
    for name, text in STAND_IN.items():
        (tmp_path / "flashinfer_bench" / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(dataset, "_save", lambda *_: None)  # safetensors may be missing
    monkeypatch.setattr(dataset, "MAX_PROCESSES", 1)

    def two_rows(op: str, root: Path, solutions: list[dict[str, Any]]) -> list[str]:
        return write_dataset(op, root, solutions, limit=2)

    monkeypatch.setattr(check, "write_dataset", two_rows)
    lines = check.check_run(pack("gdn_prefill", "sm90", "a", "mine"), "persistent")
    assert lines[0].endswith("persistent runner")
    assert lines[1:] == [
        "2 of 2 workloads PASSED",
        "score against FlashInfer: 2.000 (mean of ratios; worst row 2.000, ratio of sums 2.000)",
    ]


@pytest.mark.parametrize(
    ("op", "names"),
    [
        ("gdn_decode", set()),
        ("gdn_prefill", set()),
        ("dsa_sparse_attention", {"ckv_cache", "kpe_cache"}),
        ("dsa_topk_indexer", {"k_index_cache_fp8"}),
        ("moe_fp8_block_scale", {"gemm1_weights", "gemm2_weights"}),
    ],
)
def test_large_inputs_of_one_shape_are_written_once(op: str, names: set[str]) -> None:
    """gemm*_weights_scale and routing_bias have one shape, too, but are small."""
    spec = catalog.operator(op).spec
    sizes = dict(catalog.module(op, "inputs").CONTEST[0].axes)
    for axis in spec.axes:
        sizes.setdefault(axis.name, axis.derived.value(sizes) if axis.derived else axis.value or 0)
    first = SimpleNamespace(**{
        argument.name: torch.empty(
            [sizes[name] for name in argument.shape],
            dtype=torch_dtype(argument.dtypes[0]),
            device="meta",
        )
        for argument in spec.tensors
        if all(name in sizes for name in argument.shape)
    })  # fmt: skip
    assert dataset._shared(op, first) == names


def test_the_indexer_asks_for_an_evaluator_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """0.1.2 would compare indices element by element."""
    folder = tmp_path / "flashinfer_bench" / "bench" / "evaluators"
    folder.mkdir(parents=True)
    for place in (folder, folder.parent, folder.parent.parent):
        (place / "__init__.py").write_text("class DefaultEvaluator: pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(check.CheckError, match="has no DsaTopkIndexerEvaluator: install it"):
        check.check_run(pack("dsa_topk_indexer", "sm90", "a", "b"), "isolated")
