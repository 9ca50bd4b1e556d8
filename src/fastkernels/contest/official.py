"""The part of a check that runs in flashinfer-bench's own process, where this package cannot be
imported: `check` hands the text of this file to a fresh interpreter. A request comes as JSON on
stdin, the answer goes to the file that it names.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any


def main() -> None:
    request = json.load(sys.stdin)
    answer = {"build": build, "run": run}[request["do"]](request)
    Path(request["answer"]).write_text(json.dumps(answer))


def build(request: dict[str, Any]) -> dict[str, Any]:
    """Schemas, the contest's packer, and both builds: `entry` and the definition's reference."""
    data = import_module("flashinfer_bench.data")
    packer = import_module("flashinfer_bench.agents.solution_handler").pack_solution_from_files
    definition = data.Definition(**request["definition"])
    solution = data.Solution(**request["solution"])
    config = request["config"]
    packed = packer(
        path=request["sources"],
        spec=data.BuildSpec(target_hardware=["cuda"], **config["build"]),
        **config["solution"],
    )
    differing = [
        field
        for field in ("name", "definition", "author", "spec", "sources")
        if getattr(packed, field) != getattr(solution, field)
    ]
    registry = import_module("flashinfer_bench.compile").BuilderRegistry.get_instance()
    registry.build_reference(definition)
    registry.build(definition, solution)
    evaluators = import_module("flashinfer_bench.bench.evaluators")
    return {
        "version": metadata_version(),
        "differing": differing,
        "evaluator": evaluators.resolve_evaluator(definition).__name__,
    }


def run(request: dict[str, Any]) -> dict[str, Any]:
    """The official evaluator over a data set; one line per workload and solution."""
    bench = import_module("flashinfer_bench.bench")
    traces = import_module("flashinfer_bench.data").TraceSet.from_path(request["root"])
    benchmark = bench.Benchmark(traces, bench.BenchmarkConfig(**request["settings"]))
    try:
        done = benchmark.run_all(dump_traces=False)
    finally:
        benchmark.close()
    rows = []
    for trace in [trace for each in done.traces.values() for trace in each]:
        found = trace.evaluation
        rows.append({
            "uuid": trace.workload.uuid,
            "solution": trace.solution,
            "status": found.status.value,
            "latency_ms": found.performance.latency_ms if found.performance else None,
            "log": "" if found.status.value == "PASSED" else found.log[-2000:],
            "trace": json.loads(trace.model_dump_json()),
        })  # fmt: skip
    return {"version": metadata_version(), "rows": rows}


def metadata_version() -> str:
    try:
        return metadata.version("flashinfer-bench")
    except metadata.PackageNotFoundError:  # a checkout on the path
        return "unknown"


if __name__ == "__main__":
    main()
