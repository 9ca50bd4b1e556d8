#!/usr/bin/env python3
"""Launch an operator's compiled routes on its small cases, for compute-sanitizer to watch: with the
default config, with every config that this GPU's table names, and with those of a sweep.

    for tool in memcheck racecheck initcheck synccheck; do
      compute-sanitizer --tool $tool --error-exitcode 9 \\
          python bench/sanitize.py --op gdn_prefill --configs bench/sweeps/gdn_prefill.json \\
          --calls 12 > $tool.log
    done

Results are not judged here: that is the contract tests' work, and an oracle under a sanitizer takes
minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import click
import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # a script finds what lies beside it, not itself

from bench.sweep import Choice, choices
from fastkernels import catalog, force_route
from fastkernels.core import dispatch
from fastkernels.core.device import DeviceInfo, named_device
from fastkernels.core.problem import key_from_axes
from fastkernels.core.route import Operator, Route
from fastkernels.ops._shared.cases import Case
from fastkernels.testing import contracts, hostile


def watched(operator: Operator, device: DeviceInfo, sweep: Path | None) -> dict[Any, Route]:
    """Every config to launch, with its route."""
    routes = [route for route in operator.routes if route.language != "torch"]
    table, _ = dispatch.find_table(operator, device)
    found: list[Choice] = [(route, route.default_config) for route in routes]
    if table is not None:
        found += [(r, r.make_config(knobs)) for r in routes for knobs in table.configs(r.name)]
    if sweep is not None:
        found += choices(operator, sweep)
    return {config: route for route, config in found}


def small_cases(operator: Operator, largest: int, device: str) -> Iterator[tuple[Case, Any]]:
    """Cases with inputs of at most so many bytes."""
    make_inputs = catalog.module(operator.name, "inputs").make_inputs
    for case in (*contracts.cases(operator, "CORRECTNESS"), *contracts.cases(operator, "CORNER")):
        inputs = make_inputs(case, device)
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        if sum(x.numel() * x.element_size() for x in tensors) <= largest:
            yield case, inputs


def spread(pairs: list[Any], most: int) -> list[Any]:
    """At most so many, evenly spaced; all for 0."""
    if most == 0 or len(pairs) <= most:
        return pairs
    return [pairs[i * len(pairs) // most] for i in range(most)]


@click.command()
@click.option("--op", "name", required=True, help="Operator.")
@click.option(
    "--largest", default=10_000_000, help="Bytes of inputs beyond which a case is left out."
)
@click.option(
    "--configs", default=None, type=click.Path(path_type=Path, exists=True), help="Of a sweep."
)
@click.option("--calls", "most", default=0, help="At most this many a config; 0: all.")
def main(name: str, largest: int, configs: Path | None, most: int) -> None:
    """Call each (route, config, case); exit status 1 if a config served nothing."""
    operator, device = catalog.operator(name), named_device("cuda")
    cases = list(small_cases(operator, largest, "cuda"))
    calls = {}
    for config, route in watched(operator, device, configs).items():
        served = [
            (case, inputs)
            for case, inputs in cases
            if route.declines(key_from_axes(operator.spec, case.axes, device, case.mode), config)
            is None
        ]
        chosen = spread(list(product(served, hostile.LAYOUTS)), most)
        for (case, inputs), layout in chosen:
            is_updated = case.mode in ("inplace", "pool")
            outputs = operator.spec.outputs[:1] if is_updated else operator.spec.outputs
            axes = contracts.all_axes(operator, case)
            guards = hostile.guarded_outputs(outputs, axes, "cuda", layout)
            out = tuple(guard.tensor for guard in guards)
            with force_route(name, route.name, config):
                operator.function(**inputs._asdict(), out=out if len(out) > 1 else out[0])
        torch.cuda.synchronize()
        calls[config] = len(chosen)
        click.echo(f"{len(chosen)} calls of {config}")
    raise SystemExit(0 if all(calls.values()) else 1)


if __name__ == "__main__":
    main()
