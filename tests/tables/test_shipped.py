"""The tables that ship with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fastkernels
from fastkernels import catalog
from fastkernels.core import archs, dispatch, table
from fastkernels.core.route import Operator

SHIPPED = sorted(dispatch.shipped_tables().glob("*/*.toml"))
GPUS = [name for name, product in archs.PRODUCTS.items() if product.arch in archs.ARCHS]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_table_is_clean(path: Path) -> None:
    operator = catalog.operator(path.parent.name)
    assert dispatch.lint_table(operator, table.read(path, operator.spec)) == []


@pytest.mark.parametrize("product", GPUS)
@pytest.mark.parametrize("operator", catalog.OPERATORS, ids=lambda op: op.name)
def test_every_operator_has_a_table_for_the_gpus_we_build_for(
    operator: Operator, product: str
) -> None:
    found = archs.PRODUCTS[product]
    path = dispatch.shipped_tables() / operator.name / table.file_name(found.arch, found.name)
    assert path in SHIPPED
    parsed = table.read(path, operator.spec)
    assert (parsed.arch, parsed.product, parsed.num_sms) == (found.arch, found.name, found.num_sms)


def test_no_table_claims_measurements_of_a_gpu_we_do_not_have() -> None:
    for path in SHIPPED:
        operator = catalog.operator(path.parent.name)
        parsed = table.read(path, operator.spec)
        assert parsed.status == "unmeasured" or parsed.product == "NVIDIA H200"


@pytest.mark.parametrize("operator", catalog.OPERATORS, ids=lambda op: op.name)
def test_explain_names_the_shipped_table(operator: Operator) -> None:
    axes: dict[str, Any] = dict.fromkeys(operator.spec.variable_axes, 8)
    explanation = fastkernels.explain(operator.name, device="h200", **axes)
    assert explanation.table is not None
    assert Path(explanation.table).name == "sm90-h200.toml"
    assert explanation.others.keys() == {r.name for r in operator.routes} - {explanation.route}
