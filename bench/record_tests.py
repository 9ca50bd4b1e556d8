#!/usr/bin/env python3
"""Turn JUnit files of a test run into the record that is published for a device.

    python -m pytest -m gpu --junit-xml gpu.xml
    python bench/record_tests.py --device cuda --stamp stamp.json --out tests.json gpu.xml

The stamp is `{"commit": ..., "dirty": ...}`, written where the repository's history is, since the
GPU machine may have none. Exit status 1 if a test failed or none ran.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from fastkernels.testing.record import environment


def outcomes(path: Path) -> Counter[str]:
    """How many tests of a JUnit file passed, failed (errors included) and were skipped."""
    counts: Counter[str] = Counter()
    for case in ET.parse(path).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            counts["failed"] += 1
        elif "skipped" in kinds:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return counts


def summary(counts: Counter[str]) -> dict[str, int]:
    return {
        "selected": sum(counts.values()),
        **{kind: counts[kind] for kind in ("passed", "failed", "skipped")},
    }


@click.command()
@click.argument("junit", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--device", default="cpu")
@click.option("--stamp", required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--out", required=True, type=click.Path(path_type=Path))
def main(junit: tuple[Path, ...], device: str, stamp: Path, out: Path) -> None:
    """Write OUT from the JUnit files of one commit."""
    runs = {path.stem: outcomes(path) for path in sorted(junit)}
    total = sum(runs.values(), Counter[str]())
    record: dict[str, Any] = {
        "schema": 1,
        "environment": environment(device),
        "code": json.loads(stamp.read_text()),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "tests": summary(total),
        "runs": {name: summary(counts) for name, counts in runs.items()},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    click.echo(json.dumps(record["tests"]))
    raise SystemExit(1 if total["failed"] or not total["passed"] else 0)


if __name__ == "__main__":
    main()
