"""A PostgreSQL server of our own for the tests: temporary data, a unix socket, no network."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import URL


def find(name: str) -> Path | None:
    """The newest of Debian's, which are not on the path, or the one on the path."""
    folders = Path("/usr/lib/postgresql").glob("*/bin")
    newest_first = sorted(folders, key=lambda folder: folder.parent.name.zfill(4), reverse=True)
    found = shutil.which(name, path=os.pathsep.join(map(str, newest_first))) or shutil.which(name)
    return Path(found) if found else None


def missing() -> list[str]:
    return [name for name in ("initdb", "pg_ctl", "postgres") if find(name) is None]


@contextmanager
def server() -> Iterator[URL]:
    """The URL of the server's empty database `postgres`; the server ends with the context."""
    # Not pytest's folder: a socket's path has at most 107 bytes, and the server's user, who is not
    # root, has to get there.
    with tempfile.TemporaryDirectory(prefix="fk-pg-") as name:
        folder = Path(name)
        owner = "postgres" if os.geteuid() == 0 else ""
        if owner:
            shutil.chown(folder, owner)

        def run(program: str, *arguments: str) -> None:
            path = find(program)
            assert path is not None
            drop = ["runuser", "-u", owner, "--"] if owner else []
            log = folder / "log"
            command = [*drop, str(path), "-D", str(folder / "data"), *arguments]
            done = subprocess.run(
                command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            if done.returncode:
                words = log.read_text() if log.exists() else ""
                raise RuntimeError(f"{' '.join(command)}: {done.stdout}\n{words}")

        run("initdb", "--no-sync", "-A", "trust", "-U", "tuner", "-E", "UTF8", "--locale=C")
        # It need not survive a crash of the machine.
        options = f"-k {folder} -c listen_addresses='' -c fsync=off -c max_connections=40"
        run("pg_ctl", "-w", "-t", "60", "-l", str(folder / "log"), "-o", options, "start")
        try:
            yield URL.create(
                "postgresql+psycopg",
                username="tuner",
                database="postgres",
                query={"host": str(folder)},
            )
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop")
