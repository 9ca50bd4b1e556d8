"""Result files: from judged and timed rows to ratios, with peers that fail, on a pretended GPU.

Cases C146 (flags win), C148 (what a ratio is), C149 (preparing is not timed), C151.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from bench import facts, floor, peers, prebuild, report, run, sanitize, sweep
from bench.gpu import Bench, Options, RowFailed, _identity
from bench.peers import Call, Found, Peer
from bench.sets import Verdict, num_sets
from bench.summary import BEST, finite, peer_us, ratios, summarise
from bench.sweep import Sweep
from fastkernels import catalog
from fastkernels.core import dispatch, jit
from fastkernels.core.device import named_device
from fastkernels.core.kernels import Binary
from fastkernels.core.route import Route
from fastkernels.core.toolchain import ToolchainError
from fastkernels.ops._shared.compare import Error
from fastkernels.ops.gdn_decode.inputs import CONTEST, Case
from fastkernels.ops.gdn_decode.problem import Inputs, bind
from fastkernels.testing import cupti
from fastkernels.testing.cupti import Launch, Work
from fastkernels.testing.workloads import gdn_decode as work

OPERATOR = catalog.operator("gdn_decode")
CPU = torch.device("cpu")
OPTIONS = Options(CPU, iterations=4, trials=1, host_calls=10, growth_calls=100)


class Recorder:
    """Every call launches one kernel of 2 us, whatever it does."""

    def __init__(self) -> None:
        self._clock = 0

    def overwrite_l2(self) -> None: ...

    def resume(self) -> None: ...

    def pause(self) -> None: ...

    def synchronize(self) -> None: ...

    def timestamp(self) -> int:
        self._clock += 10
        return self._clock

    def drain(self, force: bool = False) -> tuple[list[Launch], list[Work]]:
        starts = range(10, self._clock + 10, 20)
        launches = [Launch(start + 1, start) for start in starts]
        return launches, [Work("kernel", 9 * s, 9 * s + 2000, s) for s in starts]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *a: (10**9, 10**9))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *a: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(facts, "device", lambda index, clocks: DEVICE | {"sm_clock_mhz": clocks})
    return Recorder()


DEVICE = {"product": "NVIDIA H200", "arch": "sm90", "num_sms": 132, "uuid": "x", "driver": "1"}


def right(inputs: Any, mode: str) -> Call:
    live = work.live(inputs)
    last: list[Any] = [None]

    def call() -> None:
        last[0] = OPERATOR.function(**live._asdict())

    return Call(call, lambda: last[0], lambda: work.restore(live, inputs), adapt_and_run=call)


def wrong(inputs: Any, mode: str) -> Call:
    call = right(inputs, mode)
    return Call(call.run, lambda: (call.outputs()[0] * 1.5, call.outputs()[1]), call.restore)


def raising(inputs: Any, mode: str) -> Call:
    def call() -> None:
        raise RuntimeError("no kernel image")

    return Call(call, lambda: (), lambda: None)


def unbindable(inputs: Any, mode: str) -> Call:
    raise ImportError("its extension is missing")


BOTH = {"functional": "pool", "inplace": "inplace"}
PEERS = [
    Peer("right", "right-package", "right", "1", BOTH, right),
    Peer("wrong", "wrong-package", "wrong", "1", BOTH, wrong),
    Peer("raising", "raising-package", "raising", "1", BOTH, raising),
    Peer("unbindable", "unbindable-package", "unbindable", "1", {"functional": "x"}, unbindable),
]


def bench() -> Bench:
    return Bench(OPERATOR, work, Found(list(PEERS)), OPTIONS, lambda text: None)


ROWS = [("contest", CONTEST[0]), ("serving", Case("serving-b2", 2, mode="inplace"))]


@pytest.fixture
def measured(recorder: Any) -> Any:
    made = bench()
    made.measure_host([case for _, case in ROWS])
    made.measure(ROWS, recorder, lambda: None)
    stamp = {"selected": 1, "passed": 1, "failed": 0, "skipped": 0, "sanitizer": {}}
    return json.loads(json.dumps(made.result(None, [1980, 1980], stamp), allow_nan=False))


def test_a_file_is_complete(measured: dict[str, Any]) -> None:
    assert set(measured) >= {
        "schema", "op", "device", "code", "versions", "protocol", "created", "tests", "rows",
        "summary", "missing", "host",
    }  # fmt: skip
    assert measured["protocol"] == {
        "timer": "cupti", "l2": "cold", "order": "interleaved", "iterations": 4,
        "statistic": "median", "inputs": "fresh pool of 4",
    }  # fmt: skip
    assert measured["missing"] == []
    assert measured["versions"]["peers"]["right-package"] == "1"
    assert set(measured["code"]) == {"commit", "dirty", "library_sha256", "table_sha256"}
    first, second = measured["rows"]
    assert (first["list"], first["id"], first["mode"]) == (
        "contest",
        CONTEST[0].source,
        "functional",
    )
    assert (second["id"], second["mode"]) == ("serving-b2", "inplace")
    for row in (first, second):
        assert row["us"] == {"median": 2.0, "p10": 2.0, "p90": 2.0}
        assert (row["span_us"], row["kernels"], row["floor_us"]) == (2.0, 1, 2.0)
        assert (row["work"], "variants" in row) == ({}, False)
        assert row["route"] == "torch_recurrent"
        assert row["failures"] == 0
        # The oracle, four sets, a fresh draw, two of the timed calls.
        assert row["trials"] == 1 + 4 + 1 + 2
        assert row["error"]["value"] <= row["error"]["limit"]
        assert row["host_us"] > 0
        assert row["host_out_us"] > 0
    assert any(error["metric"] == "official" for error in first["errors"])
    assert measured["host"]["growth"]["calls"] == 100


def test_only_peers_that_are_right_count(measured: dict[str, Any]) -> None:
    first, second = (row["peers"] for row in measured["rows"])
    assert first["right"]["sum_us"] == first["right"]["span_us"] == 2.0
    assert first["right"]["adapted_sum_us"] == first["right"]["adapted_span_us"] == 2.0
    assert first["right"]["mode"] == "pool"
    assert first["right"]["host_us"] > 0
    for row in (first, second):
        assert "sum_us" not in row["wrong"]
        assert row["wrong"]["left_out"].startswith("wrong: ")
        assert row["wrong"]["error"] > 0.05
        assert row["raising"]["left_out"] == "RuntimeError: no kernel image"
    assert first["unbindable"]["left_out"] == "ImportError: its extension is missing"
    assert "unbindable" not in second  # it has no such mode
    assert set(measured["summary"]["contest"]["functional"]) == {"right", BEST}
    assert measured["summary"]["contest"]["functional"]["right"]["worst_id"] == CONTEST[0].source
    assert measured["summary"]["gap"] == {}


def test_a_wrong_row_is_missing_and_not_timed(
    recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench()

    def spoilt(**arguments: Any) -> Any:
        output, state = OPERATOR.function(**arguments)
        return output.mul_(1.5), state

    made.operator = types.SimpleNamespace(name="gdn_decode", function=spoilt)  # type: ignore[assignment]
    with pytest.raises(RowFailed, match="wrong: 6 of 6 wrong"):
        made.row("contest", CONTEST[0], recorder)
    made.measure(ROWS, recorder, lambda: None)
    assert not made.rows
    assert [each["id"] for each in made.missing] == [CONTEST[0].source, "serving-b2"]
    assert all(each["why"].startswith("wrong: ") for each in made.missing)


def test_what_goes_wrong_while_it_is_timed_counts(recorder: Any) -> None:
    """C151: right when judged beforehand, wrong from the tenth call on."""
    made = bench()
    made.peers = Found()
    calls: list[int] = []

    def tires(**arguments: Any) -> Any:
        output, state = OPERATOR.function(**arguments)
        calls.append(1)
        return (output.zero_() if len(calls) > 9 else output), state

    made.operator = types.SimpleNamespace(name="gdn_decode", function=tires)  # type: ignore[assignment]
    with pytest.raises(RowFailed, match="host time"):
        made.row("contest", CONTEST[0], recorder)
    made.host[_identity(CONTEST[0])] = {"host_us": 1.0, "host_out_us": 1.0, "peers": {}}
    calls.clear()
    row = made.row("contest", CONTEST[0], recorder)
    assert row["failures"] == 2


def test_the_time_budget_is_kept(recorder: Any) -> None:
    made = Bench(OPERATOR, work, Found(), Options(CPU, budget_s=-1.0), lambda text: None)
    made.measure(ROWS, recorder, lambda: None)
    assert [each["why"] for each in made.missing] == ["time budget used up"] * 2


# ---- ratios -------------------------------------------------------------------------------------


def row(name: str, us: float, span: float, **others: tuple[float, float]) -> dict[str, Any]:
    return {
        "list": "contest", "id": name, "mode": "functional", "us": {"median": us}, "span_us": span,
        "peers": {n: {"sum_us": a, "span_us": b} for n, (a, b) in others.items()},
    }  # fmt: skip


def test_ratios_by_hand() -> None:
    rows = [
        row("x", 2.0, 2.0, fast=(3.0, 8.0), slow=(4.0, 4.0)),
        row("y", 4.0, 5.0, fast=(4.0, 5.0), slow=(16.0, 20.0)),
        row("z", 1.0, 1.0, slow=(1.5, 1.5)),
    ]
    rows[2]["peers"]["fast"] = {"error": 9.0, "left_out": "wrong"}
    assert ratios(rows, "fast") == {
        "rows": 2, "ratio_of_means": round(7 / 6, 4), "mean_of_ratios": 1.25,
        "geomean": round(math.sqrt(1.5), 4), "worst": 1.0, "worst_id": "y",
        "ratio_of_means_span": round(13 / 7, 4), "mean_of_ratios_span": 2.5, "worst_span": 1.0,
    }  # fmt: skip
    best = ratios(rows, BEST)
    assert best["rows"] == 3
    assert best["mean_of_ratios"] == round((1.5 + 1.0 + 1.5) / 3, 4)
    assert peer_us(rows[0], BEST, "span_us") == 4.0
    summary = summarise(rows)
    assert set(summary) == {"contest", "serving", "gap"}
    assert set(summary["contest"]["functional"]) == {"fast", "slow", BEST}
    assert summarise([row("alone", 1.0, 1.0)])["contest"] == {"functional": {}}


def test_json_holds_no_infinity() -> None:
    assert finite({"a": [math.inf, (1.0, math.nan)], "b": "x"}) == {
        "a": [None, [1.0, None]],
        "b": "x",
    }


def test_verdicts() -> None:
    verdict = Verdict()
    verdict.add([Error("o", "m", 0.5, 1.0), Error("s", "changed", 0.0, 0.0)])
    verdict.add([Error("o", "m", 0.25, 1.0), Error("s", "changed", 0.0, 0.0)])
    assert (verdict.trials, verdict.failures) == (2, 0)
    assert verdict.error == {"output": "o", "metric": "m", "value": 0.5, "limit": 1.0}
    verdict.add([Error("o", "m", math.nan, 1.0)])
    verdict.add([Error("s", "changed", 1.0, 0.0)])
    assert verdict.failures == 2
    lenient = Verdict(peers.TOLERANCE)
    lenient.add([Error("o", "m", 2.0, 1.0)])
    assert lenient.failures == 0


def test_sets_fit_the_memory() -> None:
    case = Case("x", 64)
    needed = work.held_bytes(case, 4)
    assert num_sets(work, case, 2 * needed) == 4
    assert num_sets(work, case, needed) < 4
    assert num_sets(work, case, 1000) == 0


# ---- peers, floor, facts ------------------------------------------------------------------------


def test_peers_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flashinfer", "fla"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace(__version__="0.7.3"))
    monkeypatch.setitem(sys.modules, "fla", None)
    found = peers.load("gdn_decode", ["flashinfer", "fla", "other"])
    assert not found.peers
    assert found.left_out["flashinfer"] == (
        "flashinfer-python is 0.7.3: pip install flashinfer-python==0.7.4"
    )
    assert re.fullmatch(r".*Error: .*fla.*: pip install fla-core==0\.6\.0", found.left_out["fla"])
    assert "unknown; bench/peers/gdn_decode.py has flashinfer, fla" in found.left_out["other"]
    assert set(peers.load("gdn_decode").left_out) == {"flashinfer", "fla"}  # all, if none is named
    monkeypatch.setitem(sys.modules, "fla", types.SimpleNamespace(__version__="0.6.0"))
    assert peers.load("gdn_decode", ["fla"]).versions == {"fla-core": "0.6.0"}
    assert peers.load("gdn_decode", []) == Found()
    assert peers.load("dsa_topk_indexer") == Found()  # nobody has one yet


def test_the_floor_moves_the_same_bytes() -> None:
    for is_update in (False, True):
        ((source, target),) = floor.buffers(1_054_000, is_update, CPU, 1)
        assert (source is target) == is_update
        assert source.numel() % 16 == 0
        assert 0 <= 8 * source.numel() - 1_054_000 < 128
        for name, kernel in floor.candidates(is_update).items():
            if name.startswith("torch"):
                kernel(source, target)


def test_sanitizer_logs(tmp_path: Path) -> None:
    clean = "========= COMPUTE-SANITIZER\n3 calls of Config()\n========= ERROR SUMMARY: 0 errors\n"
    races = "========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)\n"
    assert facts.sanitizer_verdict(clean * 2) == "clean"
    assert facts.sanitizer_verdict(races) == "3 reports"
    assert facts.sanitizer_verdict("killed") == "no summary in the log"
    assert facts.sanitizer_verdict(clean.replace("3 calls", "0 calls")) != "clean"
    assert facts.sanitizer_verdict("ERROR SUMMARY: 0 errors") != "clean"
    log, junit = tmp_path / "memcheck.log", tmp_path / "a.xml"
    log.write_text(clean)
    junit.write_text("<testsuite><testcase/><testcase><skipped/></testcase></testsuite>")
    assert facts.tests([junit], {"memcheck": [log]}) == {
        "selected": 2, "passed": 1, "failed": 0, "skipped": 1, "sanitizer": {"memcheck": "clean"},
    }  # fmt: skip
    assert run.sanitizer_logs([f"memcheck={log}", f"memcheck={log}"]) == {"memcheck": [log, log]}


def test_the_stamp_names_the_code(tmp_path: Path) -> None:
    stamp, table = tmp_path / "stamp.json", tmp_path / "t.toml"
    stamp.write_text('{"commit": "abc", "dirty": false}')
    table.write_text("")
    found = facts.code(stamp, str(table))
    assert (found["commit"], found["dirty"]) == ("abc", False)
    assert found["table_sha256"].startswith("e3b0c442")


def test_other_routes_stand_beside_what_serves(recorder: Any) -> None:
    """Each with its errors: one that is right, one that is wrong, one that raises; ours, too."""
    safe = OPERATOR.safe_route

    def spoil(inputs: Any, outputs: Any, workspace: Any, config: Any) -> None:
        safe.launch(inputs, outputs, workspace, config)
        outputs[0].mul_(1.5)

    def fail(*arguments: Any) -> None:
        raise RuntimeError("no kernel image")

    def other(name: str, launch: Any, language: str = "cuda") -> Route:
        return dataclasses.replace(safe, name=name, language=language, launch=launch)

    routes = (
        other("right", safe.launch), other("wrong", spoil), other("raising", fail),
        other("slow", safe.launch, "torch"), safe,
    )  # fmt: skip
    operator: Any = None

    def function(**arguments: Any) -> Any:
        out = arguments.pop("out", None)
        return dispatch.run(operator, bind(Inputs(**arguments), out, None))

    operator = dataclasses.replace(OPERATOR, routes=routes, function=function)
    options = dataclasses.replace(OPTIONS, variants=True)
    made = Bench(operator, work, Found(), options, lambda text: None)
    made.host[_identity(CONTEST[0])] = {"host_us": 1.0, "host_out_us": 1.0, "peers": {}}
    row = made.row("contest", CONTEST[0], recorder)
    found = row["variants"]
    assert set(found) == {"right", "wrong", "slow", safe.name}
    assert found["right"]["us"] == found[safe.name]["us"] == {"median": 2.0, "p10": 2.0, "p90": 2.0}
    assert "us" not in found["slow"]
    assert [found[name]["failures"] > 0 for name in ("right", "wrong", "slow")] == [0, 1, 0]
    for entry in found.values():
        assert {error["output"] for error in entry["errors"]} == {"output", "new_state"}
        assert entry["config"] == {}


PREFILL = str(Path(__file__).parents[2] / "bench" / "results" / "cpu" / "gdn_prefill.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda"], "--out is needed"),
        (["--device", "cuda", "--out", "x", "--route", "y"], "a matter of --sweep"),
        (["--device", "cuda", "--out", "x", "--sanitizer-log", "lint=x"], "expected memcheck"),
        (["--where", "tokens=3"], "not an axis"),
        (["--page"], "--out is needed"),
        (["--lists", "contst"], "--lists contst: expected of contest, gap, serving"),
        (["--modes", "default"], "--modes default: expected of functional, inplace, pool"),
        (["--lists", "gap"], "no row is left"),
        (["--against", "nowhere"], "--against: nowhere/gdn_decode.json: no such file"),
        (["--against", PREFILL], "gdn_prefill.json is of another operator"),
        (["--device", "cuda", "--out", "x", "--sweep", "all", "--quick"], "without --quick"),
        (["--sweep", "all"], "on a GPU"),
    ],
)
def test_wrong_options_say_so(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(run.main, ["--op", "gdn_decode", *arguments])
    assert done.exit_code == 2
    assert message in done.output


def test_all_are_those_that_a_gpu_has_kernels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    index = torch.device("cuda:0")
    monkeypatch.setattr(run, "device_info", lambda index: named_device("h200"))
    assert run.named("all", index) == list(catalog.OPERATORS)
    assert run.named("gdn_decode", index) == [OPERATOR]
    compiled, safe = OPERATOR.routes[0], OPERATOR.safe_route
    other = dataclasses.replace(compiled, archs=("sm80",))
    kernels, torch_alone, elsewhere = (
        dataclasses.replace(OPERATOR, routes=routes)
        for routes in ((compiled, safe), (safe,), (other, safe))
    )
    monkeypatch.setattr(catalog, "OPERATORS", (kernels, torch_alone, elsewhere))
    assert run.named("all", index) == [kernels]
    assert run.named("all", None) == [kernels, torch_alone, elsewhere]


def test_a_quick_run_takes_the_smallest_and_the_middle_row() -> None:
    everything = run.Filter((), 0, (), (), False)
    rows = everything.rows(OPERATOR, None, False)
    few = dataclasses.replace(everything, is_quick=True).rows(OPERATOR, None, False)
    found = [(listed, case.axes["batch_size"]) for listed, case in few]
    sizes = {
        listed: sorted(case.axes["batch_size"] for each, case in rows if each == listed)
        for listed in ("contest", "serving")
    }
    assert found == [
        (listed, size) for listed in sizes for size in (sizes[listed][0],
                                                        sizes[listed][len(sizes[listed]) // 2])
    ]  # fmt: skip
    gap = [
        ("gap", Case("gap", 3)),
        ("serving", Case("x", 5)),
        ("serving", Case("y", 5, mode="pool")),
    ]
    assert run.quick(gap, OPERATOR) == gap[1:]
    in_place = dataclasses.replace(everything, modes=("inplace",), lists=("contest",))
    assert not in_place.rows(OPERATOR, None, False)  # on a CPU lists stand as they are


def test_quick_options_give_way_to_those_asked_for() -> None:
    quick = run.thorough(CPU, True, None, None, False, 3.0)
    full = run.thorough(CPU, False, None, None, True, 3.0)
    assert (quick.iterations, quick.trials, quick.sets, quick.host_rounds) == (10, 0, 2, 1)
    assert full == Options(CPU, variants=True, budget_s=3.0)
    assert run.thorough(CPU, True, 40, 7, False, 3.0).iterations == 40
    assert run.thorough(CPU, False, None, 0, False, 3.0).trials == 0


# ---- the command on a pretended GPU -------------------------------------------------------------


@pytest.fixture
def gpu(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--device cuda` up to the kernels: those are calls on the CPU."""

    @contextmanager
    def recording(device: torch.device) -> Iterator[Any]:
        yield Recorder()

    monkeypatch.setattr(run, "started_for", lambda device: CPU)
    monkeypatch.setattr(run, "device_info", lambda index: named_device("h200"))
    monkeypatch.setattr(run, "clock", lambda device: 1980)
    monkeypatch.setattr(cupti, "recording", recording)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "a pretended GPU")
    for name in ("flashinfer", "fla"):
        monkeypatch.setitem(sys.modules, name, None)


# A row of batch 1 in each of two modes.
ONE = ("--where", "batch_size=1")


def invoke(out: Path, *arguments: str, op: str = "gdn_decode") -> Any:
    common = ["--op", op, "--device", "cuda", "--out", str(out), "--lists", "contest", "--quick"]
    few = ["--rows", "2", "--iterations", "4"]
    return CliRunner().invoke(run.main, [*common, *few, *arguments])


@pytest.mark.usefixtures("gpu")
def test_missing_peers_are_listed_with_what_brings_them(tmp_path: Path) -> None:
    done = invoke(tmp_path, *ONE)
    assert done.exit_code == 0, done.output
    data = json.loads((tmp_path / "gdn_decode.quick.json").read_text())
    assert list(data["peers_left_out"]) == ["flashinfer", "fla"]
    for name, package in (("flashinfer", "flashinfer-python==0.7.4"), ("fla", "fla-core==0.6.0")):
        assert data["peers_left_out"][name].endswith(f": pip install {package}")
        assert f"missing peer {name} of gdn_decode: " in done.output
    assert data["protocol"]["inputs"] == "fresh pool of 2"
    assert data["protocol"]["iterations"] == 4
    assert "median of 1 rounds" in data["host"]["how"]
    assert "batches of up to 50 calls" in data["host"]["how"]
    assert {row["mode"] for row in data["rows"]} == {"functional", "inplace"}
    assert all(row["reason"] for row in data["rows"])
    assert "[2/2 " in done.output
    assert invoke(tmp_path, *ONE, "--peers", "none").exit_code == 0
    path = tmp_path / "gdn_decode.quick.json"
    assert json.loads(path.read_text())["peers_left_out"] == {}


@pytest.mark.usefixtures("gpu")
def test_a_run_is_compared_with_what_lay_there_before(tmp_path: Path) -> None:
    """Also where the reference is the file that this run overwrites."""
    path, kept = tmp_path / "gdn_decode.quick.json", tmp_path / "kept"
    assert invoke(tmp_path, *ONE).exit_code == 0
    same = invoke(tmp_path, *ONE, "--against", str(path))
    assert same.exit_code == 0, same.output
    assert "0 slower, 0 faster, 2 within the spread" in same.output
    faster = json.loads(path.read_text())
    faster["rows"][0]["us"] = {"median": 1.0, "p10": 1.0, "p90": 1.0}
    path.write_text(json.dumps(faster))
    kept.mkdir()
    faster["device"]["product"] = "NVIDIA B200"
    (kept / "gdn_decode.json").write_text(json.dumps(faster))
    worse = invoke(tmp_path, *ONE, "--against", str(path))
    assert worse.exit_code == 1
    assert "SLOWER: contest" in worse.output
    refused = invoke(tmp_path, *ONE, "--against", str(kept))  # a folder
    assert refused.exit_code == 1
    assert "not compared: two devices: product NVIDIA H200 and NVIDIA B200" in refused.output
    absent = invoke(tmp_path, "--against", str(tmp_path / "nowhere"))
    assert absent.exit_code == 2
    assert "--against: " in absent.output


@pytest.mark.usefixtures("gpu")
def test_all_operators_go_on_when_one_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    stopping = catalog.operator("gdn_prefill")
    monkeypatch.setattr(catalog, "OPERATORS", (stopping, OPERATOR))
    load = peers.load

    def stop(op: str, names: Any) -> Found:
        if op == stopping.name:
            raise RuntimeError("the device is lost")
        return load(op, names)

    monkeypatch.setattr(peers, "load", stop)
    done = invoke(tmp_path, "--rows", "1", "--page", op="all")
    assert done.exit_code == 1
    assert "gdn_prefill: STOPPED: RuntimeError: the device is lost" in done.output
    assert "gdn_decode: 1 rows, 0 missing, 0 wrong calls" in done.output
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"gdn_decode.quick.json", "gdn_decode.quick.svg", "index.html"}
    with pytest.raises(RuntimeError, match="the device is lost"):
        raise invoke(tmp_path, "--rows", "1", op="gdn_prefill").exception


@pytest.mark.usefixtures("gpu")
def test_a_budget_is_kept_by_all(tmp_path: Path) -> None:
    done = invoke(tmp_path, *ONE, "--budget-s", "-1")
    assert done.exit_code == 1
    data = json.loads((tmp_path / "gdn_decode.quick.json").read_text())
    assert [each["why"] for each in data["missing"]] == ["time budget used up"] * 2
    assert "gdn_decode: 0 rows, 2 missing, 0 wrong calls" in done.output


# ---- sweep --------------------------------------------------------------------------------------


def test_choices(tmp_path: Path) -> None:
    path = tmp_path / "configs.json"
    path.write_text(json.dumps({"torch_recurrent": [{}, {}]}))
    ((route, config),) = sweep.choices(OPERATOR, path)
    assert route.name == "torch_recurrent"
    assert sweep.label((route, config)) == "torch_recurrent {}"
    path.write_text(json.dumps({"torch_recurrent": None}))
    assert len(sweep.choices(OPERATOR, path)) == 1
    path.write_text(json.dumps({"none": None}))
    with pytest.raises(ValueError, match="no route 'none'"):
        sweep.choices(OPERATOR, path)
    assert all(route.language != "torch" for route, _ in sweep.choices(OPERATOR, None))


def test_a_sweep(recorder: Any, tmp_path: Path) -> None:
    path = tmp_path / "configs.json"
    path.write_text(json.dumps({"torch_recurrent": None}))
    choices = sweep.choices(OPERATOR, path)
    saved: list[int] = []
    options = Options(CPU, iterations=3, budget_s=5.0)
    made = Sweep(OPERATOR, work, choices, options, lambda text: None, lambda: 4.5 * len(saved))
    problems = [
        ("contest", Case("b1", 1)), ("serving", Case("b2", 2, mode="pool")),
        ("serving", Case("b3", 3)),
    ]  # fmt: skip
    made.measure(problems, recorder, lambda: saved.append(1))
    data = made.result(None, [None, None])
    assert data["kind"] == "sweep"
    assert data["spec_digest"] == OPERATOR.spec.digest
    assert [r["id"] for r in data["rows"]] == ["b1", "b2"]
    for each in data["rows"]:
        assert each["us"]["median"] == 2.0
        assert (each["trials"], each["failures"]) == (3, 0)
        assert (each["route"], each["config"]) == ("torch_recurrent", {})
        assert each["error"]["value"] <= each["error"]["limit"]
    assert data["left_out"] == [
        {
            "id": "b3",
            "axes": problems[2][1].axes,
            "mode": "functional",
            "why": "time budget used up",
        }
    ]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_sweep_does_not_time_what_is_hopeless(
    recorder: Any, monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    """Nor does it call such a config a failure; a wrong one is kept, however slow."""
    safe = OPERATOR.safe_route
    slow = dataclasses.replace(safe, name="slow")
    operator: Any = dataclasses.replace(OPERATOR, routes=(slow, safe))
    choices = [(slow, slow.default_config), (safe, safe.default_config)]
    options = Options(CPU, iterations=3)
    made = Sweep(operator, work, choices, options, lambda text: None, lambda: 0.0)
    seconds = iter((0.011, 0.001))
    monkeypatch.setattr(Sweep, "_seconds", lambda self, variant: next(seconds))
    if is_wrong:
        monkeypatch.setattr(Verdict, "add", lambda self, errors: setattr(self, "failures", 1))
    made.measure([("contest", Case("b1", 1))], recorder, lambda: None)
    assert [row["route"] for row in made.rows] == ["slow"] * is_wrong + [safe.name]
    assert not made.left_out


# ---- what is compiled, what is watched ----------------------------------------------------------


def test_what_a_sweep_wants_is_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every variant that the folder lacks; a config that fails is said, and the others go on."""
    configs = tmp_path / "configs.json"
    configs.write_text(json.dumps({"triton_rows": [{}, {"warps": 8}], "warp_rows": [{}]}))
    made: list[tuple[str, str]] = []

    def keep(folder: Path, kernel: Any, config: Any, arch: str, variant: str) -> Binary:
        if "warps=8" in str(config):
            raise ToolchainError("too many registers")
        made.append((kernel.name, variant))
        return Binary(b"code", "symbol", 32, 0)

    def find(folder: Path, kernel: Any, config: Any, arch: str, variant: str) -> Binary | None:
        return Binary(b"", "symbol", 32, 0) if variant == "any" else None

    monkeypatch.setattr(jit, "keep", keep)
    monkeypatch.setattr(jit, "find", find)
    arguments = ["--op", "gdn_decode", "--configs", str(configs), "--out", str(tmp_path / "kept")]
    done = CliRunner().invoke(prebuild.main, arguments)
    assert done.exit_code == 1
    assert "FAILED: too many registers" in done.output
    assert made == [
        ("triton_rows", "aligned"), ("warp_rows", "aligned"), ("warp_rows", "compact"),
        ("warp_rows", "compact_pool"),
    ]  # fmt: skip


def test_what_the_sanitizers_watch(tmp_path: Path) -> None:
    """Defaults, the table's configs and those of a sweep, each once; few calls are spread."""
    h200, sweep_file = named_device("h200"), tmp_path / "configs.json"
    compiled = {route.default_config for route in OPERATOR.routes if route.language != "torch"}
    by_table = sanitize.watched(OPERATOR, h200, None)
    assert compiled < set(by_table)
    sweep_file.write_text(
        json.dumps({"warp_rows": [{}, {"warps": 8, "rows_per_lane": 8, "lanes_per_row": 32}]})
    )
    assert len(sanitize.watched(OPERATOR, h200, sweep_file)) == len(by_table) + 1
    assert sanitize.spread([*range(10)], 0) == sanitize.spread([*range(10)], 10) == [*range(10)]
    assert sanitize.spread([*range(10)], 3) == [0, 3, 6]
    cases = {case.name: inputs for case, inputs in sanitize.small_cases(OPERATOR, 10**6, "cpu")}
    assert "empty" in cases
    assert all(x.numel() * x.element_size() <= 10**6 for x in cases["one"] if hasattr(x, "numel"))


# ---- report -------------------------------------------------------------------------------------


def test_the_report_names_its_denominators(measured: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "gdn_decode.json"
    path.write_text(json.dumps(measured))
    done = CliRunner().invoke(report.main, [str(path)])
    assert done.exit_code == 0, done.output
    text = done.output
    assert "NVIDIA H200 (driver 1, SM clock [1980, 1980] MHz)" in text
    assert "right-package 1" in text
    assert "peer / ours" in text
    assert "| contest | functional | right | 1 | 1.000 |" in text
    assert "| batch_size | route | ours, us | floor | ours / floor |" in text


def test_the_plot(measured: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    for path in (first, second):
        report.plot(measured, "batch_size", path)
    assert first.read_bytes() == second.read_bytes()
    assert cupti.NEEDS  # the same extra brings both


def test_every_compiled_route_offers_more_than_its_default() -> None:
    for route in OPERATOR.routes:
        if route.language != "torch":
            found = list(sweep.candidates(route))
            assert len(set(found)) > 10, route.name
            assert found[0] == route.default_config
