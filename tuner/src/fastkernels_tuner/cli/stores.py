"""Campaigns as files that can be carried: export and import."""

from __future__ import annotations

from pathlib import Path

import click

from fastkernels_tuner.cli.common import (
    ANY_PATH,
    FILE,
    command,
    folder_option,
    json_option,
    opened,
    storage_option,
)
from fastkernels_tuner.terminal import Terminal


@click.command()
@click.argument("campaign")
@click.argument("path", type=ANY_PATH)
@folder_option
@storage_option
@json_option
@command
def export(campaign: str, path: Path, folder: Path, storage: str | None, terminal: Terminal) -> int:
    """Write a campaign with everything it rests on into one file."""
    with opened(folder, storage) as store:
        store.export(campaign, path)
    terminal.result({"campaign": campaign, "path": str(path)}, f"{campaign}: {path}")
    return 0


@click.command("import")
@click.argument("path", type=FILE)
@folder_option
@storage_option
@json_option
@command
def import_command(path: Path, folder: Path, storage: str | None, terminal: Terminal) -> int:
    """Take a campaign from such a file; every digest is checked."""
    with opened(folder, storage) as store:
        campaign = store.import_(path)
    terminal.result({"campaign": campaign}, campaign)
    return 0
