"""Every operator x route x case from the catalog, against the oracle, and in hostile surroundings.

A route that is listed in its operator's ROUTES is tested here without another line.
"""

from __future__ import annotations

from typing import Any

import pytest

from fastkernels import catalog
from fastkernels.core.device import CPU, named_device
from fastkernels.core.problem import key_from_axes
from fastkernels.core.route import Operator, Route
from fastkernels.ops._shared.cases import Case
from fastkernels.testing import contracts, hostile, workloads

# The whole CONTEST and SERVING lists are for the GPU; on two CPU cores these stand for them: full
# geometry, every form of the draw, at the small end of the variable axes.
CPU_CONTEST = {
    "gdn_decode": 6,
    "gdn_prefill": 10,
    "dsa_sparse_attention": 2,  # 0.6 GB of caches a case
    "dsa_topk_indexer": 5,
    "moe_fp8_block_scale": 0,  # 1.4 GB of weights a case: `fastkernels demo` runs three of them
}


def _params(*lists: str) -> list[Any]:
    params = []
    for operator in catalog.OPERATORS:
        for name in lists:
            pairs = list(contracts.pairs(operator, name, CPU))
            if name == "CONTEST":
                pairs = _spread(pairs, CPU_CONTEST.get(operator.name, 4))
            for route, case in pairs:
                name = f"{operator.name}-{route.name}-{case.name}"
                params.append(pytest.param(operator, route, case, id=name))
    return params


def _spread(pairs: list[tuple[Route, Case]], count: int) -> list[tuple[Route, Case]]:
    """`count` cases of the smaller half, evenly spaced by size."""
    pairs = sorted(pairs, key=lambda pair: list(pair[1].axes.values()))
    half = pairs[: max(count, (len(pairs) + 1) // 2)]
    return [half[i * (len(half) - 1) // max(count - 1, 1)] for i in range(count)]


@pytest.mark.parametrize(("operator", "route", "case"), _params("CORRECTNESS", "CORNER", "CONTEST"))
def test_oracle(operator: Operator, route: Route, case: Case) -> None:
    contracts.check_oracle(operator, route, case, "cpu")


@pytest.mark.parametrize("layout", hostile.LAYOUTS[1:])  # torch routes do not look at alignment
@pytest.mark.parametrize(("operator", "route", "case"), _params("CORNER"))
def test_given_outputs(operator: Operator, route: Route, case: Case, layout: str) -> None:
    contracts.check_given_outputs(operator, route, case, "cpu", layout)


@pytest.mark.parametrize(("operator", "route", "case"), _params("CORNER"))
def test_fresh_outputs(operator: Operator, route: Route, case: Case) -> None:
    contracts.check_fresh_outputs(operator, route, case, "cpu")


def _gpu_params(*lists: str) -> list[Any]:
    """Every route with every case; which of them this GPU serves is seen at run time."""
    return [
        pytest.param(operator, route, case, id=f"{operator.name}-{route.name}-{case.name}")
        for operator in catalog.OPERATORS
        for name in lists
        for case in contracts.cases(operator, name)
        for route in operator.routes
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("operator", "route", "case"), _gpu_params("CORRECTNESS", "CORNER", "CONTEST")
)
def test_oracle_gpu(operator: Operator, route: Route, case: Case) -> None:
    _skip_declined(operator, route, case)
    work = workloads.load(operator.name)  # whose float64 results tests compare with the oracle's
    expect = None if work.oracle(case) else work.expect
    contracts.check_oracle(operator, route, case, "cuda", expect)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", hostile.LAYOUTS)
@pytest.mark.parametrize(("operator", "route", "case"), _gpu_params("CORNER"))
def test_given_outputs_gpu(operator: Operator, route: Route, case: Case, layout: str) -> None:
    _skip_declined(operator, route, case)
    contracts.check_given_outputs(operator, route, case, "cuda", layout)


@pytest.mark.gpu
@pytest.mark.parametrize(("operator", "route", "case"), _gpu_params("CORNER"))
def test_fresh_outputs_gpu(operator: Operator, route: Route, case: Case) -> None:
    _skip_declined(operator, route, case)
    contracts.check_fresh_outputs(operator, route, case, "cuda")


def _skip_declined(operator: Operator, route: Route, case: Case) -> None:
    key = key_from_axes(operator.spec, case.axes, named_device("cuda"), case.mode)
    decline = route.declines(key, route.default_config)
    if decline is not None:
        pytest.skip(decline.reason)
