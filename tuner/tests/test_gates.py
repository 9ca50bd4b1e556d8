"""Gates: each is shown to fail, honest candidates pass, and nothing launders a wrong number."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from fastkernels import catalog
from fastkernels.core.route import Operator, Route
from fastkernels_tuner import gates
from fastkernels_tuner.gates import (
    FACTS,
    GATES,
    Decided,
    Evidence,
    Repeat,
    Traffic,
    banned,
    decide,
    exit_code,
    floor_us,
    retried,
    traffic,
)
from fastkernels_tuner.model import (
    Block,
    Cause,
    Environment,
    Evaluation,
    Failure,
    Policy,
    Trials,
    Workload,
)
from fastkernels_tuner.space import candidate
from fastkernels_tuner.trials import (
    ADVERSARIAL,
    Fail,
    Inconclusive,
    NeedMore,
    Outcome,
    Pass,
    Stratum,
    budget,
    gravest,
)

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "h200" / "gdn_decode.json"

POLICY = Policy(name="gpu", timer="cupti", is_promotable=True)
HERE = Environment(
    device="NVIDIA H200", arch="sm90", uuid="GPU-1", driver="1", versions={}, code="c",
    timer="cupti",
)  # fmt: skip
WHO = candidate("gdn_decode", "torch_recurrent", {})
ROWS = tuple(
    Workload.of("gdn_decode", "contest", case)
    for case in catalog.module("gdn_decode", "inputs").CONTEST[:3]
)
GENERATOR = Workload(op="gdn_decode", listed=ADVERSARIAL, case={"name": "beta_1", "seed": 0})
STRATA = tuple(Stratum(workload=workload, risk="medium") for workload in (*ROWS, GENERATOR))
WRONG = Failure(cause=Cause.NUMERIC, message="off by one", seed=5)
LOST = Failure(cause=Cause.GPU_LOST, message="gone")


def block(workload: Workload, us: float = 20.0, discarded: str = "") -> Block:
    return Block(
        candidate=WHO.id, workload=workload.id, environment=HERE.id, lease=1, number=0, order=0,
        us=(us, us + 0.1, us + 0.2), discarded=discarded,
    )  # fmt: skip


def measured(workload: Workload, **changes: Any) -> Evaluation:
    return Evaluation(
        **{"candidate": WHO.id, "workload": workload.id, "blocks": (block(workload),), **changes}
    )


def judged(stratum: Stratum, **changes: Any) -> Trials:
    rows = len(ROWS) if stratum.is_row else 1
    number = budget(stratum.risk, POLICY, rows)
    return Trials(**{"stratum": stratum.id, "trials": number, "worst": 0.5, **changes})


def evidence(**changes: Any) -> Evidence:
    """Of a candidate with which everything is in order, but for the changes."""
    given: dict[str, Any] = {
        "policy": POLICY,
        "gathered_under": (POLICY.id,),
        "environment": HERE,
        "workloads": ROWS,
        "strata": STRATA,
        "smoke": (ROWS[0].id,),
        "sources": gates.sources(WHO),
        "is_built": True,
        "evaluations": tuple(measured(row) for row in ROWS),
        "trials": tuple(judged(stratum) for stratum in STRATA),
        "repeats": (Repeat(workload=ROWS[0].id, seed=1, digests=("a", "a")),),
        "floors": {row.id: floor_us(row, FACTS["NVIDIA H200"]) for row in ROWS},
    }
    return Evidence(**{**given, **changes})


def test_order_passes_every_gate() -> None:
    decided = decide(WHO, evidence())
    assert decided.outcome == Pass(), decided
    assert list(decided.gates) == list(GATES)
    assert exit_code(decided.outcome) == 0
    assert Decided.model_validate_json(decided.model_dump_json()) == decided


EVALUATIONS = evidence().evaluations
TRIALS = evidence().trials

DISORDER: dict[str, tuple[str, dict[str, Any], type, Any]] = {
    # name: (gate, what is wrong, outcome, cause or words)
    "nobody scanned": ("static", {"sources": {}}, NeedMore, "scanned"),
    "banned import": ("static", {"sources": {"a.py": "import ctypes"}}, Fail, Cause.STATIC_BAN),
    "not built": ("compile", {"is_built": None}, NeedMore, "build"),
    "does not compile": (
        "compile", {"is_built": False, "build_message": "ptxas"}, Fail, Cause.COMPILE),
    "does not compile here": (
        "compile",
        {"evaluations": (measured(ROWS[1], failure=Failure(cause=Cause.COMPILE, message="jit")),)},
        Fail, Cause.COMPILE),
    "no smoke": ("smoke", {"smoke": ()}, NeedMore, "regime"),
    "smoke not judged": ("smoke", {"smoke": (ROWS[0].id, "f" * 16)}, NeedMore, "1 regimes"),
    "smoke crashes": (
        "smoke",
        {"evaluations": (*EVALUATIONS, measured(
            ROWS[0], failure=Failure(cause=Cause.CRASH, message="", workload=ROWS[0].id)))},
        Fail, Cause.CRASH),
    "wrong": ("numerics", {"trials": (*TRIALS, judged(STRATA[1], failures=(WRONG,)))}, Fail,
              Cause.NUMERIC),
    "beyond its limit": (
        "numerics", {"trials": (*TRIALS, judged(STRATA[1], worst=1.5))}, Fail, Cause.NUMERIC),
    "wrong while searching": (
        "numerics",
        {"evaluations": (*EVALUATIONS, measured(
            ROWS[2], trials=(Trials(stratum="x", trials=1, failures=(WRONG,)),)))},
        Fail, Cause.NUMERIC),
    "hangs": (
        "numerics",
        {"evaluations": (*EVALUATIONS, measured(
            ROWS[1], failure=Failure(cause=Cause.HANG, message="30 s")))},
        Fail, Cause.HANG),
    "too few trials": (
        "numerics", {"trials": (judged(STRATA[0], trials=10), *TRIALS[1:])}, NeedMore, "more"),
    "no adversarial strata": (
        "adversarial", {"strata": STRATA[:3], "trials": TRIALS[:3]}, Inconclusive, "gdn_decode"),
    "adversarial not judged": ("adversarial", {"trials": TRIALS[:3]}, NeedMore, "beta_1"),
    "bits differ": (
        "determinism",
        {"repeats": (Repeat(workload=ROWS[1].id, seed=1, digests=("a", "b")),)},
        Fail, Cause.NONDETERMINISTIC),
    "called once": (
        "determinism", {"repeats": (Repeat(workload=ROWS[0].id, seed=1, digests=("a",)),)},
        NeedMore, "not called twice"),
    "too fast": (
        "floor", {"evaluations": (*EVALUATIONS, measured(ROWS[0], blocks=(block(ROWS[0], 0.1),)))},
        Fail, Cause.CHEAT_SUSPECT),
    "no floor": ("floor", {"floors": {}}, Inconclusive, "3 rows"),
    "wall times": (
        "timer", {"environment": HERE.model_copy(update={"timer": "wall"})}, Inconclusive, "wall"),
    "other environment": (
        "environment", {"environment": HERE.model_copy(update={"uuid": "GPU-2"})},
        Inconclusive, "other environments"),
    "a third GPU": (
        "environment",
        {"environment": HERE.model_copy(update={"uuid": "GPU-2"}), "gpus": ("GPU-3",)},
        Inconclusive, "other environments"),
    "the other GPU's driver": (
        "environment",
        {"environment": HERE.model_copy(update={"uuid": "GPU-2", "driver": "2"}),
         "gpus": (HERE.uuid,)},
        Inconclusive, "other environments"),
    "throttled": (
        "environment",
        {"evaluations": tuple(
            measured(row, blocks=(block(row), block(row, discarded="throttled"))) for row in ROWS)},
        Inconclusive, "3 of 6 blocks were discarded (throttled)"),
    "retried too often": (
        "environment",
        {"evaluations": (*(measured(ROWS[0], blocks=(), failure=LOST) for _ in range(4)),
                         *EVALUATIONS)},
        Inconclusive, "4 attempts in a row"),
    "other policy": ("policy", {"gathered_under": (POLICY.id, "0" * 16)}, Inconclusive, "0" * 16),
    "no policy": ("policy", {"gathered_under": ()}, Inconclusive, "none"),
    "a row is missing": (
        "completeness", {"evaluations": EVALUATIONS[:2]}, NeedMore, "1 of 3 rows"),
    "a row was lost": (
        "completeness",
        {"evaluations": (*EVALUATIONS[:2], measured(ROWS[2], blocks=(), failure=LOST))},
        NeedMore, "1 of 3 rows"),
    "a row nobody wanted": (
        "completeness", {"workloads": ROWS[:2]}, Inconclusive, "1 rows that were not expected"),
    "no rows": ("completeness", {"workloads": ()}, Inconclusive, "0 rows"),
    "rows twice": ("completeness", {"workloads": (*ROWS, ROWS[0])}, Inconclusive, "3 distinct"),
}  # fmt: skip


@pytest.mark.parametrize("name", DISORDER)
def test_each_disorder_is_stopped_by_its_gate(name: str) -> None:
    gate, changes, kind, found = DISORDER[name]
    decided = decide(WHO, evidence(**changes))
    assert (decided.gate, type(decided.outcome)) == (gate, kind), decided.outcome
    if isinstance(decided.outcome, Fail):
        assert decided.outcome.cause is found
    else:
        assert not isinstance(decided.outcome, Pass)
        assert found in decided.outcome.message
    assert exit_code(decided.outcome) != 0


def test_every_gate_has_been_seen_to_stop_something() -> None:
    assert {gate for gate, *_ in DISORDER.values()} == set(GATES)


def test_exit_codes() -> None:
    def code(name: str) -> int:
        return exit_code(decide(WHO, evidence(**DISORDER[name][1])).outcome)

    assert code("wrong") == 5
    assert code("too fast") == 8
    assert code("throttled") == code("wall times") == 3
    assert code("other policy") == code("too few trials") == 6


def test_gates_are_pure() -> None:
    given = evidence()
    before = given.model_dump_json()
    assert [gate(WHO, given) for gate in GATES.values()] == [
        gate(WHO, given) for gate in GATES.values()
    ]
    assert given.model_dump_json() == before


def test_upto_stops_early() -> None:
    decided = decide(WHO, evidence(trials=TRIALS[:1]), upto="smoke")
    assert decided.outcome == Pass()
    assert list(decided.gates) == ["static", "compile", "smoke"]


# ---- no laundering ------------------------------------------------------------------------------


def test_a_wrong_number_is_final_whatever_comes_later() -> None:
    """In any place, in any order, beside any number of right ones and of lost attempts."""
    rng = random.Random(1)
    right = [judged(stratum) for stratum in STRATA]
    for stratum, copies in itertools.product(STRATA, (1, 5)):
        bad = Trials(stratum=stratum.id, trials=1, failures=(WRONG, LOST))
        everything = [*right * copies, bad]
        rng.shuffle(everything)
        decided = decide(WHO, evidence(trials=tuple(everything)))
        assert isinstance(decided.outcome, Fail), stratum
        assert decided.outcome.cause is Cause.NUMERIC
    for place in range(len(EVALUATIONS) + 1):
        spoiled = measured(ROWS[0], trials=(Trials(stratum="", trials=1, failures=(WRONG,)),))
        later = (*EVALUATIONS[:place], spoiled, *EVALUATIONS[place:])
        assert isinstance(decide(WHO, evidence(evaluations=later)).outcome, Fail)


def test_a_fail_outweighs_what_is_missing_before_it() -> None:
    decided = decide(WHO, evidence(is_built=None, trials=(judged(STRATA[0], failures=(WRONG,)),)))
    assert isinstance(decided.outcome, Fail)
    assert isinstance(decided.gates["compile"], NeedMore)


def test_what_the_infrastructure_took_away_is_no_blame_and_no_row() -> None:
    lost = measured(ROWS[0], blocks=(), failure=LOST)
    assert decide(WHO, evidence(evaluations=(lost, lost, *EVALUATIONS))).outcome == Pass()
    without = (lost, *EVALUATIONS[1:])
    assert isinstance(decide(WHO, evidence(evaluations=without)).outcome, NeedMore)


def test_trials_of_a_search_count_towards_no_bound() -> None:
    """A search judges every candidate on the same few draws."""
    many = tuple(measured(row, trials=(Trials(stratum=row.id, trials=9999),)) for row in ROWS)
    decided = decide(WHO, evidence(evaluations=many, trials=TRIALS[3:]))
    assert isinstance(decided.gates["numerics"], NeedMore)


def attempts(*failures: Failure | None) -> tuple[Evaluation, list[Evaluation], int]:
    ledger: list[Evaluation] = []
    script = iter(failures)
    found = retried(lambda: measured(ROWS[0], failure=next(script)), POLICY, ledger.append)
    return found, ledger, len(ledger)


@pytest.mark.parametrize(
    ("failures", "number", "last"),
    [
        ((None,), 1, None),
        ((LOST, None), 2, None),
        ((LOST, LOST, None), 3, None),
        ((LOST, LOST, LOST, None), 3, LOST),
        ((WRONG, None), 1, WRONG),
        ((LOST, WRONG, None), 2, WRONG),
        ((Failure(cause=Cause.UNCLASSIFIED, message="?"), None), 1, None),
    ],
)
def test_only_typed_faults_are_retried(
    failures: tuple[Failure | None, ...], number: int, last: Failure | None
) -> None:
    found, ledger, made = attempts(*failures)
    assert made == number
    assert ledger[-1] == found
    assert [each.failure for each in ledger] == list(failures[:number])
    assert last is None or found.failure == last


def test_a_fault_beside_a_wrong_number_is_not_retried() -> None:
    trials = (Trials(stratum="", trials=2, failures=(WRONG,)),)
    assert not gates.is_retryable(measured(ROWS[0], failure=LOST, trials=trials))
    assert not gates.is_retryable(measured(ROWS[0]))
    beyond = (Trials(stratum="", trials=2, worst=2.0),)
    assert not gates.is_retryable(measured(ROWS[0], failure=LOST, trials=beyond))


def test_gravest() -> None:
    fail = Fail(cause=Cause.NUMERIC, message="")
    more, unclear = NeedMore(n=1, message=""), Inconclusive(message="")
    outcomes: tuple[Outcome, ...] = (Pass(), more, unclear, fail)
    assert gravest([]) == Pass()
    for order in itertools.permutations(outcomes):
        assert gravest(order) == fail
        assert gravest(each for each in order if each != fail) == unclear


# ---- sources ------------------------------------------------------------------------------------

ROUTES = [
    pytest.param(operator, route, id=f"{operator.name}-{route.name}")
    for operator in catalog.OPERATORS
    for route in operator.routes
]


@pytest.mark.parametrize(("operator", "route"), ROUTES)
def test_our_own_routes_are_clean(operator: Operator, route: Route) -> None:
    who = candidate(operator.name, route, dataclasses.asdict(route.default_config))
    files = gates.sources(who)
    own = f"{route.name}.py"
    if route.language != "torch":
        kernels = catalog.module(operator.name, "kernels").KERNELS
        own = next(kernel.source for kernel in kernels if kernel.name == route.name)
    assert any(path.endswith(own) for path in files)
    assert not any("reference.py" in path for path in files)
    assert banned(files) == []


@pytest.mark.parametrize(
    "code",
    [
        "import ctypes",
        "import threading as t",
        "from multiprocessing.pool import Pool",
        "import gc",
        "import inspect",
        "from time import perf_counter",
        "import flashinfer",
        "from vllm.model_executor import layers",
        "from torch.utils.cpp_extension import load_inline",
        "from torch.utils import cpp_extension",
        "from fastkernels.ops.gdn_decode.reference import reference",
        "from fastkernels.ops.gdn_decode import inputs",
        "import fastkernels.testing.compare",
        "from fastkernels_tuner import gates",
        "g = torch.cuda.CUDAGraph()",
        "m = __import__('gc')",
        "import importlib\nimportlib.import_module('gc')",
        "try:\n    fast(x)\nexcept Exception:\n    x = slow(x)",
        "def f(:",
    ],
)
def test_python_that_is_banned(code: str) -> None:
    (found,) = banned({"route.py": f'"""A route."""\n{code}\n'})
    assert found.startswith("route.py:")
    assert not banned({"README.md": code})


@pytest.mark.parametrize(
    "code",
    [
        "import math\nfrom fastkernels.ops.gdn_decode.problem import Inputs",
        "from fastkernels.ops._shared.gdn import gates",
        "try:\n    x = f()\nexcept ValueError as error:\n    raise RuntimeError('f') from error",
        "x = 1  # time, threading, CUDAGraph",
    ],
)
def test_python_that_is_not(code: str) -> None:
    assert banned({"route.py": code}) == []


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("\n__nanosleep(20);", 2),
        ("x = clock64();", 1),
        ('asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));', 1),
        ("__device__ int counter;", 1),
        ("int a;\nstatic __device__ float4 cache[64];\n", 2),
        ("cudaGraphLaunch(graph, stream);", 1),
        ("cudaMallocAsync(&p, n, s);", 1),
    ],
)
def test_device_code_that_is_banned(code: str, line: int) -> None:
    (found,) = banned({"kernel.cu": code})
    assert found.startswith(f"kernel.cu:{line}: ")


@pytest.mark.parametrize(
    "code",
    [
        "// __nanosleep(20);",
        "/* clock64()\n */ int x;",
        "__device__ __forceinline__ float f(float x) { return x; }",
        "static __device__ Pair split(const Params& p);",
        "__device__ constexpr int kTable[2] = {1, 2};",
        "int clock_rate = 3;",
    ],
)
def test_device_code_that_is_not(code: str) -> None:
    assert banned({"kernel.cu": code}) == []


# ---- floors -------------------------------------------------------------------------------------


def made(op: str, **fields: Any) -> Workload:
    case = catalog.module(op, "inputs").Case("x", **fields)
    return Workload.of(op, "test", case)


STATE = 8 * 128 * 128 * 4


@pytest.mark.parametrize(
    ("workload", "read", "written"),
    [
        (made("gdn_decode", batch_size=64), 64 * (STATE + 4096), 64 * (STATE + 2048)),
        (made("gdn_decode", batch_size=2, state="none"), 2 * 4096, 2 * (STATE + 2048)),
        # Of rows 0..5, 1 and 4 are padding and 3 is not stored.
        (made("gdn_decode", batch_size=6, mode="pool"), 4 * (STATE + 4096), 3 * STATE + 4 * 2048),
        (made("gdn_decode", batch_size=6, mode="pool", padding="all"), 0, 0),
        (made("gdn_prefill", lengths=(3, 0, 5)), 2 * STATE + 8 * 4096, 2 * STATE + 8 * 2048),
        (
            made("dsa_sparse_attention", num_tokens=2, valid=(10, 0)),
            10 * 576 * 2 + 16 * 576 * 2 + 2 * 2048 * 4,
            2 * 16 * (1024 + 4),
        ),
        # Short rows need no score, and rows share pages of a small cache.
        (made("dsa_topk_indexer", seq_lens=(2048, 10), max_num_pages=40), 0, 2 * 2048 * 4),
        (made("dsa_topk_indexer", seq_lens=(3000, 10), max_num_pages=47), 3000 * 132, 2 * 8192),
        (
            made("dsa_topk_indexer", seq_lens=(3000, 3000), max_num_pages=47, num_pages=50),
            50 * 64 * 132,
            2 * 8192,
        ),
        (made("moe_fp8_block_scale", seq_len=1), 0, 7168 * 2),
        (
            made("moe_fp8_block_scale", seq_len=4096),
            32 * 3 * 2048 * 7168,
            4096 * 7168 * 2,
        ),
        (made("moe_fp8_block_scale", seq_len=4096, logits="none_local"), 0, 4096 * 7168 * 2),
    ],
)
def test_traffic(workload: Workload, read: int, written: int) -> None:
    assert traffic(workload) == Traffic(read, written)


def test_few_tokens_choose_few_experts() -> None:
    """Never more experts than the draws of a workload are sure to choose."""
    inputs = catalog.module("moe_fp8_block_scale", "inputs")
    routing = catalog.module("moe_fp8_block_scale", "routing")
    for tokens in (1, 7, 16, 55, 128):
        workload = made("moe_fp8_block_scale", seq_len=tokens)
        floor_experts = traffic(workload).read / (3 * 2048 * 7168)
        for seed in range(10):
            case = workload.with_seed(seed).build()
            logits, bias = inputs.draw_routing(inputs.generator(seed), case)
            ids, _ = routing.route_tokens(
                logits, bias, topk=8, num_groups=8, topk_groups=4, routed_scaling_factor=1.0
            )
            assert ids[ids < 32].unique().numel() >= floor_experts


def test_floor_of_the_largest_decode() -> None:
    """7.0 us for the states' bytes at 4.8 TB/s; what is written fits into L2."""
    assert floor_us(made("gdn_decode", batch_size=64), FACTS["NVIDIA H200"]) == pytest.approx(
        0.9 * 64 * (STATE + 4096) / 4.8e6
    )
    larger = floor_us(made("gdn_decode", batch_size=512), FACTS["NVIDIA H200"])
    both = 0.9 * 2 * 512 * STATE / 4.8e6
    assert 0.85 * both < larger < both
    assert floor_us(made("gdn_decode", batch_size=1), FACTS["NVIDIA H200"]) == 0.45


def test_what_was_published_is_above_the_floors() -> None:
    """The honest control: every row of a published run."""
    rows = json.loads(RESULTS.read_text())["rows"]
    assert len(rows) > 100
    for row in rows:
        axes = {name: size for name, size in row["axes"].items() if name != "seq_len"}
        workload = made("gdn_decode", mode=row["mode"], **axes)
        least = floor_us(workload, FACTS["NVIDIA H200"])
        assert row["us"]["median"] > least, row["id"]


def test_an_operator_that_is_not_known_has_the_launch_alone() -> None:
    unknown = made("gdn_decode", batch_size=1).model_copy(update={"op": "toy"})
    assert traffic(unknown) == Traffic(0, 0)


def test_a_floor_is_asked_for_where_tables_are_shipped() -> None:
    policy = Policy(name="cpu", timer="wall", is_promotable=False)
    here = HERE.model_copy(update={"timer": "wall"})
    blocks = tuple(
        measured(row, blocks=(block(row).model_copy(update={"environment": here.id}),))
        for row in ROWS
    )
    decided = decide(
        WHO,
        evidence(
            policy=policy, gathered_under=(policy.id,), environment=here, evaluations=blocks,
            floors={},
        ),
    )  # fmt: skip
    assert decided.outcome == Pass()


def test_bits_are_promised_but_where_sums_may_come_in_any_order() -> None:
    assert gates.promises_bits(made("dsa_topk_indexer", seq_lens=(1,), max_num_pages=1))
    assert gates.promises_bits(made("moe_fp8_block_scale", seq_len=1, deterministic=True))
    assert not gates.promises_bits(made("moe_fp8_block_scale", seq_len=1))
