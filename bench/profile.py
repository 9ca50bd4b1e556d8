#!/usr/bin/env python3
"""What the kernels of one call do on a GPU: when each begins and ends, or calls for a profiler.

    python bench/profile.py --op gdn_prefill --where total_seq_len=8192,num_seqs=1 \\
        --choice 'chunk_split={"rows_per_block": 16}' --choice chunk_cluster
    ncu --clock-control none --set full --kernel-name regex:gdn_prefill --launch-skip 6 \\
        --launch-count 2 --export split \\
        python bench/profile.py --op gdn_prefill --where total_seq_len=8192,num_seqs=1 \\
        --choice chunk_split --plain
    ncu --import split.ncu-rep --page source --print-source sass --csv > split.csv

Times are of CUPTI on a cold L2, as `bench/run.py` takes them; of each kernel the median over the
calls of its begin and end, in microseconds after the first one's begin. Kernels that begin before
the one before them has ended overlap, and the sum of their times counts that twice.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # a script finds what lies beside it, not itself

from bench.run import selected
from bench.sets import forced
from bench.sweep import Choice, label
from fastkernels import catalog
from fastkernels.core.device import device_info
from fastkernels.core.route import Operator
from fastkernels.ops._shared.cases import Case
from fastkernels.testing import cupti, workloads

WARMUP = 8


def parse_choice(operator: Operator, text: str) -> Choice:
    """`route` or `route={"knob": value}`; knobs that are not named are the default's."""
    name, _, knobs = text.partition("=")
    route = operator.route(name)
    if route is None:
        raise click.UsageError(f"--choice {name}: {operator.name} has no such route")
    try:
        given = json.loads(knobs or "{}")
        config = route.make_config({**dataclasses.asdict(route.default_config), **given})
    except (ValueError, TypeError) as error:
        raise click.UsageError(f"--choice {text}: {error}") from None
    return route, config


def timeline(calls: list[list[cupti.Work]]) -> list[tuple[str, float, float]]:
    """Per kernel its name, and medians of begin and end in microseconds. Calls of another number
    of kernels than the first one's are left out: one or another was not recorded."""
    alike = [
        sorted(call, key=lambda work: work.start) for call in calls if len(call) == len(calls[0])
    ]
    found = []
    for works in zip(*alike, strict=True):
        begins, ends = (
            [(moment - call[0].start) / 1e3 for moment, call in zip(moments, alike, strict=True)]
            for moments in ([work.start for work in works], [work.end for work in works])
        )
        found.append((works[0].name, statistics.median(begins), statistics.median(ends)))
    return found


def record(call: Callable[[], Any], recorder: cupti.Recorder, calls: int) -> list[list[cupti.Work]]:
    """Kernels of each call, on a cold L2."""
    windows = []
    recorder.drain(force=True)
    for _ in range(calls):
        recorder.overwrite_l2()
        recorder.synchronize()
        start = recorder.timestamp()
        call()
        windows.append(cupti.Window(start, recorder.timestamp()))
        recorder.synchronize()
    launches, works = recorder.drain(force=True)
    return [group for group in cupti.assign(windows, launches, works) if group]


@click.command()
@click.option("--op", "name", required=True, help="Operator.")
@click.option("--where", multiple=True, required=True, metavar="AXIS=SIZE[,..]", help="Repeatable.")
@click.option("--choice", "texts", multiple=True, required=True, help="Route, or ROUTE={knobs}.")
@click.option("--mode", default=None, help="Default: the operator's first.")
@click.option("--calls", default=20, show_default=True)
@click.option("--plain", is_flag=True, help=f"Only call, {WARMUP} times: a profiler watches.")
def main(
    name: str, where: tuple[str, ...], texts: tuple[str, ...], mode: str | None, calls: int,
    plain: bool,
) -> None:  # fmt: skip
    """Per row and choice the kernels of a call."""
    operator, device = catalog.operator(name), torch.device("cuda")
    work = workloads.load(operator.name)
    modes = (mode or operator.spec.modes[0],)
    listed = [case for _, case in work.sweep_rows(modes)]
    listed += [case for _, case in work.rows(operator, device_info(device), modes)]
    cases: list[Case] = selected(operator.spec, list(dict.fromkeys(listed)), where, 1)
    choices = [parse_choice(operator, text) for text in texts]
    with nullcontext() if plain else cupti.recording(device) as recorder:
        for case in cases:
            inputs = work.live(work.fresh_inputs(case, 1, device))
            out = work.outputs(inputs)
            given = inputs._asdict() | {"out": out if len(out) > 1 else out[0]}
            for choice in choices:
                click.echo(f"{case.name} {case.axes} {label(choice)}")
                call = partial(forced(operator, *choice), **given)
                for _ in range(WARMUP):
                    call()
                torch.cuda.synchronize()
                if recorder is None:
                    continue
                for kernel, begin, end in timeline(record(call, recorder, calls)):
                    click.echo(f"  {begin:9.2f} {end:9.2f} {end - begin:9.2f}  {kernel[:90]}")


if __name__ == "__main__":
    main()
