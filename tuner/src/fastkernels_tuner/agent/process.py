"""Runs a command that nobody trusts: bounded in time and output, gone with its group at the end."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

CHUNK = 1 << 16
DRAIN_S = 0.2
"""For what a process wrote just before its end; one that left its group may hold the pipe on."""


class Ended(NamedTuple):
    """How a command ended. `why`: why it was killed, empty where it ended by itself; `status` is
    the negative signal of a process that one ended."""

    status: int
    stdout: bytes
    stderr: bytes
    why: str
    seconds: float


def run(
    argv: Sequence[str],
    *,
    folder: Path,
    env: Mapping[str, str],
    stdin: bytes = b"",
    timeout_s: float,
    max_bytes: int,
) -> Ended:
    """Raises OSError where the command cannot be started. `max_bytes`: of both outputs together."""
    began = time.monotonic()
    # A file, since a pipe that the command does not read would block us.
    with tempfile.TemporaryFile() as given:
        given.write(stdin)
        given.seek(0)
        process = subprocess.Popen(
            list(argv),
            cwd=folder,
            env=dict(env),
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    with process:
        try:
            out, err, why = _listen(process, began + timeout_s, max_bytes)
        finally:
            # Also after a clean end: what it left behind would go on beside the measurements.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return Ended(process.wait(), out, err, why, time.monotonic() - began)


def _listen(
    process: subprocess.Popen[bytes], deadline: float, max_bytes: int
) -> tuple[bytes, bytes, str]:
    assert process.stdout is not None
    assert process.stderr is not None
    found: dict[object, bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    is_over = False
    with selectors.DefaultSelector() as selector:
        for pipe in (process.stdout, process.stderr):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            if not is_over and process.poll() is not None:
                is_over, deadline = True, time.monotonic() + DRAIN_S
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for key, _ in selector.select(min(left, DRAIN_S)):
                data = os.read(key.fd, CHUNK)
                if data:
                    found[key.fileobj] += data
                else:
                    selector.unregister(key.fileobj)
            if sum(map(len, found.values())) > max_bytes:
                return (*_texts(found, max_bytes), f"wrote more than {max_bytes} bytes")
    if not is_over:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    why = "" if is_over or process.poll() is not None else "did not end in time"
    return (*_texts(found, max_bytes), why)


def _texts(found: Mapping[object, bytearray], max_bytes: int) -> tuple[bytes, bytes]:
    """The ends, where what matters stands."""
    out, err = (bytes(data[-max_bytes:]) for data in found.values())
    return out, err
