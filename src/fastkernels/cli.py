"""The `fastkernels` command: demo, explain, doctor, pack, traces."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import fastkernels
from fastkernels import catalog, demo, doctor
from fastkernels.contest import check as contest
from fastkernels.contest import substitute
from fastkernels.contest.package import PackError, pack
from fastkernels.core import archs, dispatch
from fastkernels.core.device import named_device
from fastkernels.errors import ArgumentError, FastkernelsError
from fastkernels.testing.record import Measurement, environment

_WRONG = 1
_PRODUCTS = ", ".join(archs.PRODUCTS)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(fastkernels.__version__, prog_name="fastkernels")
def main() -> None:
    """Fast operators of DeepSeek-V3.2 and Qwen3-Next for PyTorch inference."""


@main.command("demo")
@click.option("--op", "names", multiple=True, help="Only this operator (repeatable).")
@click.option(
    "--device", default=None, help="cpu or cuda[:N]; default: the GPU where there is one."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def demo_command(names: tuple[str, ...], device: str | None, as_json: bool) -> None:
    """Run contest workloads of every operator and judge each against its oracle.

    Per operator the smallest, the median and the largest workload that fits this machine, at real
    shapes with seeded inputs. Exit status 1 if any result is wrong.
    """
    try:
        operators = tuple(catalog.operator(name) for name in names) or catalog.OPERATORS
        target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        named_device(target)
        if target.type not in ("cpu", "cuda"):
            raise ArgumentError(f"device {device!r}, expected cpu or cuda[:N]")
    except (FastkernelsError, RuntimeError) as error:
        raise click.UsageError(str(error)) from None
    work = demo.plan(operators, target)
    rows: list[Measurement] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(work))
        for operator, case in work:

            def show(what: str, name: str = f"{operator.name} {case.name}") -> None:
                progress.update(task, description=f"{name}: {what}")

            rows.append(demo.measure(operator, case, target, show))
            progress.advance(task)
    if as_json:
        document = {
            "environment": environment(str(target)),
            "rows": [row.to_dict() for row in rows],
        }
        click.echo(json.dumps(document, indent=1))
    else:
        _print_demo(rows, str(target))
    sys.exit(0 if all(row.ok for row in rows) else _WRONG)


def _print_demo(rows: list[Measurement], device: str) -> None:
    facts = environment(device)
    table = Table(
        title=f"fastkernels {facts['fastkernels']} on {facts['device']}, torch {facts['torch']}, "
        f"{facts['threads']} threads",
        caption="error: the one nearest its limit, against the float64 oracle (MoE: float32)",
    )
    for name in ("operator", "shape", "route", "time", "error", "limit", "verdict"):
        table.add_column(
            name,
            justify="right" if name in ("time", "error", "limit") else "left",
            no_wrap=True,
        )
    for row in rows:
        operator = catalog.operator(row.op)
        shape = "\n".join(f"{name}={row.axes[name]}" for name in operator.spec.variable_axes)
        worst = max(row.errors, key=lambda e: e["value"] / e["limit"] if e["limit"] else e["value"])
        verdict = "[green]ok[/]" if row.ok else "[bold red]WRONG[/]"
        table.add_row(
            row.op,
            shape,
            row.route,
            _duration(row.timing.median_us),
            f"{worst['value']:.2g}",
            f"{worst['limit']:.2g}",
            verdict,
        )
    console = _console()
    console.print(table)
    for reason in dict.fromkeys(row.reason for row in rows):
        console.print(f"why this route: {escape(reason)}", highlight=False)
    console.print(f"{sum(row.ok for row in rows)} of {len(rows)} workloads right", highlight=False)


def _console() -> Console:
    """A terminal's own width; a file or a pipe has none."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def _duration(us: float) -> str:
    for unit, factor in (("us", 1.0), ("ms", 1e3)):
        if us < 1000 * factor:
            return f"{us / factor:.3g} {unit}"
    return f"{us / 1e6:.3g} s"


@main.command("explain")
@click.argument("op")
@click.option(
    "--axis", "axes", multiple=True, metavar="NAME=SIZE", help="An axis of the definition."
)
@click.option("--mode", default=None, help="Form of the call, e.g. inplace or pool.")
@click.option(
    "--device", default=None, help=f"{_PRODUCTS}, or a torch device; a product need not be present."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain_command(
    op: str, axes: tuple[str, ...], mode: str | None, device: str | None, as_json: bool
) -> None:
    """Say which route serves a problem, from which table and regime, and why no other does."""
    sizes: dict[str, int] = {}
    for text in axes:
        name, _, size = text.partition("=")
        if not name.isidentifier() or not size.isdecimal() or len(size) > 18:
            raise click.UsageError(f"--axis {text!r}, expected NAME=SIZE such as batch_size=8")
        sizes[name] = int(size)
    try:
        operator = catalog.operator(op)
        key = dispatch.key_for(operator, device, mode, sizes)
        explanation = dispatch.explain(operator, key)
    except FastkernelsError as error:
        raise click.UsageError(str(error)) from None
    click.echo(json.dumps(explanation.to_dict(), indent=1) if as_json else str(explanation))


@main.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor_command(as_json: bool) -> None:
    """Say what was found on this machine and what each missing piece costs.

    Exit status 1 if something is wrong, 0 if pieces are merely missing.
    """
    findings = doctor.examine()
    if as_json:
        click.echo(json.dumps(doctor.as_json(findings), indent=1))
    else:
        table = Table(box=None, pad_edge=False)
        for name in ("what", "state", "found", "what follows"):
            table.add_column(name, overflow="fold")
        colours = {"ok": "green", "missing": "yellow", "wrong": "bold red"}
        for f in findings:
            state = f"[{colours[f.state]}]{f.state}[/]"
            table.add_row(escape(f.name), state, escape(f.found), escape(f.cost))
        _console().print(table)
    sys.exit(_WRONG if any(finding.state == "wrong" for finding in findings) else 0)


@main.command("pack")
@click.option("--op", required=True, type=click.Choice([o.name for o in catalog.OPERATORS]))
@click.option("--arch", required=True, type=click.Choice(list(archs.ARCHS)))
@click.option("--author", required=True, help="The solution's author.")
@click.option("--name", required=True, help="The solution's name; another one for other contents.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="A new or empty folder; default: the name."
)
@click.option("--embed", is_flag=True, help="Machine code instead of sources: nothing compiles.")
@click.option("--check", "is_checked", is_flag=True, help="Judge it with flashinfer-bench.")
@click.option(
    "--runner", type=click.Choice(contest.RUNNERS), default="isolated", show_default=True,
    help="The official evaluator's, with --check on a GPU.",
)  # fmt: skip
@click.option(
    "--baseline", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A solution.json that the score divides by; default: a call of FlashInfer.",
)  # fmt: skip
def pack_command(
    op: str,
    arch: str,
    author: str,
    name: str,
    out: Path | None,
    embed: bool,
    is_checked: bool,
    runner: str,
    baseline: Path | None,
) -> None:
    """Write an operator as a solution of the MLSys 2026 FlashInfer contest.

    config.toml, solution/triton/main.py and solution.json, made of what the operator's table for
    the architecture names. Exit status 1 if the package cannot be made or does not pass its check.
    """
    if is_checked and not contest.available():
        raise click.UsageError("--check needs flashinfer-bench; pip install 'fastkernels[pack]'")
    folder = out or Path(name)
    try:
        package = pack(op, arch, author, name, embed)
        package.write(folder)
        click.echo(f"wrote {', '.join(package.files)} to {folder}")
        for note in package.notes:
            click.echo(note)
        if is_checked:
            for line in contest.check_build(package):
                click.echo(line)
            reason = contest.reason_not_to_run(package)
            if reason is not None:
                click.echo(f"not run: {reason}")
            else:
                given = json.loads(baseline.read_text("utf-8")) if baseline else None
                for line in contest.check_run(package, runner, given):
                    click.echo(line)
    except (PackError, contest.CheckError) as error:
        click.echo(f"WRONG: {error}", err=True)
        sys.exit(_WRONG)
    except FastkernelsError as error:
        raise click.UsageError(str(error)) from None


@main.command("traces")
@click.option(
    "--out", required=True, type=click.Path(file_okay=False, path_type=Path),
    help="A folder for flashinfer-bench's trace set; other operators in it stay.",
)  # fmt: skip
@click.option(
    "--op", "ops", multiple=True, type=click.Choice([o.name for o in catalog.OPERATORS]),
    help="Only these operators; repeatable.",
)  # fmt: skip
@click.option(
    "--runner", type=click.Choice(contest.RUNNERS), default="persistent", show_default=True,
    help="The official evaluator's.",
)  # fmt: skip
def traces_command(out: Path, ops: tuple[str, ...], runner: str) -> None:
    """Write a trace set with which flashinfer-bench's `apply` calls these operators.

    Runs the official evaluator on this machine's GPU over the contest's workloads. Exit status 1
    unless every one of them PASSED.
    """
    if not contest.available():
        raise click.UsageError("needs flashinfer-bench; pip install 'fastkernels[pack]'")
    if not torch.cuda.is_available():
        raise click.UsageError("needs a GPU: a trace is what the official evaluator measured there")
    for op in ops or [operator.name for operator in catalog.OPERATORS]:
        try:
            found = contest.evaluate_installed(op, runner)
        except contest.CheckError as error:
            click.echo(f"WRONG: {op}: {error}", err=True)
            sys.exit(_WRONG)
        substitute.write_trace_set(op, out, found)
        absolute, relative = substitute.largest_errors(found)
        click.echo(
            f"{op}: {len(found)} traces, errors up to {absolute:.3g} (max_atol) and {relative:.3g} "
            "(max_rtol)"
        )


if __name__ == "__main__":
    main()
