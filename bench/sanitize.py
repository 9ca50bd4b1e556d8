#!/usr/bin/env python3
"""Launch an operator's compiled routes on its small cases, for compute-sanitizer to watch: with the
default config, and with every config that this GPU's table names.

    for tool in memcheck racecheck initcheck synccheck; do
      compute-sanitizer --tool $tool --error-exitcode 9 \\
          python bench/sanitize.py --op gdn_decode > $tool.log
    done

Results are not judged here: that is the contract tests' work, and an oracle under a sanitizer takes
minutes.
"""

from __future__ import annotations

from itertools import product

import click
import torch

from fastkernels import catalog, force_route
from fastkernels.core import dispatch
from fastkernels.core.device import named_device
from fastkernels.core.problem import key_from_axes
from fastkernels.testing import contracts, hostile


@click.command()
@click.option("--op", "name", required=True, help="Operator.")
@click.option(
    "--largest", default=5_000_000, help="Bytes of inputs beyond which a case is left out."
)
def main(name: str, largest: int) -> None:
    """Call each (route, config, case); exit status 1 if a config served nothing."""
    operator = catalog.operator(name)
    make_inputs = catalog.module(name, "inputs").make_inputs
    device = named_device("cuda")
    routes = [route for route in operator.routes if route.language != "torch"]
    table, _ = dispatch.find_table(operator, device)
    configs = {
        route.name: list(
            dict.fromkeys(
                [route.default_config]
                + [route.make_config(c) for c in (table.configs(route.name) if table else ())]
            )
        )
        for route in routes
    }
    calls = dict.fromkeys((str(c) for found in configs.values() for c in found), 0)
    for case in (*contracts.cases(operator, "CORRECTNESS"), *contracts.cases(operator, "CORNER")):
        inputs = make_inputs(case, "cuda")
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        if sum(x.numel() * x.element_size() for x in tensors) > largest:
            continue
        key = key_from_axes(operator.spec, case.axes, device, case.mode)
        is_updated = case.mode in ("inplace", "pool")
        outputs = operator.spec.outputs[:1] if is_updated else operator.spec.outputs
        axes = contracts.all_axes(operator, case)
        for route in routes:
            for config, layout in product(configs[route.name], hostile.LAYOUTS):
                if route.declines(key, config) is not None:
                    continue
                guards = hostile.guarded_outputs(outputs, axes, "cuda", layout)
                out = tuple(guard.tensor for guard in guards)
                with force_route(name, route.name, config):
                    operator.function(**inputs._asdict(), out=out if len(out) > 1 else out[0])
                calls[str(config)] += 1
    torch.cuda.synchronize()
    for config, count in calls.items():
        click.echo(f"{count} calls of {config}")
    raise SystemExit(0 if all(calls.values()) else 1)


if __name__ == "__main__":
    main()
