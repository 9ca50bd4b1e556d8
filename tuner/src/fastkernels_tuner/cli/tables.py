"""Commands about tables: emit, dispatch build, dispatch check."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from fastkernels_tuner import emit, rules, sweep
from fastkernels_tuner.cli.common import FILE as _FILE
from fastkernels_tuner.errors import TunerError

_DIFFERS = 1


@click.command("emit")
@click.option("--sweep", "sweeps", multiple=True, type=_FILE, help="From times; repeatable.")
@click.option("--rules", "rule_files", multiple=True, type=_FILE, help="By rule; repeatable.")
@click.option(
    "--out",
    default="dispatch_tables",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the tables.",
)
@click.option("--check", is_flag=True, help="Write nothing; exit status 1 if a file differs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def emit_command(
    sweeps: tuple[Path, ...], rule_files: tuple[Path, ...], out: Path, check: bool, as_json: bool
) -> None:
    """Write <out>/<op>/<arch>-<product>.toml from sweep files (status measured) and rule files
    (status unmeasured). Nothing is written unless every table is sound."""
    if not sweeps and not rule_files:
        raise click.UsageError("nothing to emit: name a source by --sweep or --rules")
    try:
        made = _make(sweeps, rule_files)
        tables = []
        for draft, text in made:
            path = out / draft.file
            state = emit.state(path, text)
            if not check and state != "unchanged":
                emit.write(path, text)
                state = "written"
            elif state != "unchanged" and not as_json:
                _show_difference(path, text)
            tables.append(
                {
                    "path": str(path),
                    "source": str(draft.source.path),
                    "status": draft.status,
                    "state": state,
                    "regimes": len(draft.regimes),
                    "notes": list(draft.notes),
                }
            )
    except TunerError as error:
        _report({"error": str(error), "exit_code": error.exit_code}, as_json)
        sys.exit(error.exit_code)
    well = all(table["state"] in ("written", "unchanged") for table in tables)
    _report({"tables": tables, "exit_code": 0 if well else _DIFFERS}, as_json)
    sys.exit(0 if well else _DIFFERS)


def _make(sweeps: tuple[Path, ...], rule_files: tuple[Path, ...]) -> list[tuple[emit.Draft, str]]:
    work: list[tuple[Callable[[Path], emit.Draft], Path]] = [
        *((sweep.draft, path) for path in sweeps),
        *((rules.draft, path) for path in rule_files),
    ]
    drafts = [read(path) for read, path in work]
    files = [draft.file for draft in drafts]
    for file in files:
        if files.count(file) > 1:
            raise click.UsageError(f"two sources make {file}")
    return [(draft, emit.render(draft)) for draft in drafts]


def _show_difference(path: Path, text: str) -> None:
    there = path.read_text(errors="replace") if path.exists() else ""
    lines = difflib.unified_diff(
        there.splitlines(), text.splitlines(), str(path), "as emitted", lineterm=""
    )
    click.echo("\n".join(lines), err=True)


def _report(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(document, indent=1))
        return
    if "error" in document:
        click.echo(f"error: {document['error']}", err=True)
    for table in document.get("tables", ()):
        for note in table["notes"]:
            click.echo(f"note: {table['source']}: {note}", err=True)
        what = f"{table['status']}, {table['regimes']} regimes"
        click.echo(f"{table['path']}: {table['state']} ({what})")


@click.group("dispatch")
def dispatch_group() -> None:
    """Tables from evidence: `build` is `emit`, `check` is `emit --check`."""


dispatch_group.add_command(emit_command, "build")
dispatch_group.add_command(
    click.Command(
        "check",
        callback=lambda **options: emit_command.callback(check=True, **options),  # type: ignore[misc]
        params=[option for option in emit_command.params if option.name != "check"],
        help="Exit status 1 if a table on disk is not what its sources give.",
    )
)
