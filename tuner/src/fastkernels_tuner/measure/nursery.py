"""Forks judges and candidate processes: it has imported what they need, and nothing else is in it.

    python -m fastkernels_tuner.measure.nursery FD

Importing torch takes seconds; a candidate that crashed is back at once. The nursery never touches a
GPU, draws no input and runs no candidate, so that nothing of one process reaches another.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
import traceback

import torch

from fastkernels_tuner.measure import judge, worker
from fastkernels_tuner.measure.protocol import (
    AnyMessage,
    Channel,
    Closed,
    Hello,
    Ready,
    Reap,
    Reaped,
    Spawn,
    Spawned,
)


def serve(channel: Channel) -> None:
    """Until the broker closes the connection; what was forked has connections of its own."""
    while True:
        try:
            envelope = channel.receive()
            channel.send(envelope.nonce, _answer(channel, envelope.message))
        except Closed:
            return


def _answer(channel: Channel, message: AnyMessage) -> AnyMessage:
    if isinstance(message, Spawn):
        fd = channel.receive_fd()
        pid = os.fork()
        if pid == 0:
            channel.close()
            _become(message, fd)
        os.close(fd)
        return Spawned(pid=pid)
    if isinstance(message, Reap):
        return Reaped(status=_reap(message.pid, message.timeout_s))
    assert isinstance(message, Hello), message.kind
    return Ready(timer="none")


def _become(message: Spawn, fd: int) -> None:
    """What the forked process does; does not return."""
    status = 1
    try:
        os.setsid()  # a group of its own, to be killed with all that it starts
        os.chdir(message.folder)
        log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        channel, device = Channel(socket.socket(fileno=fd)), torch.device(message.device)
        if message.role == "judge":
            judge.run(channel, device)
        else:
            worker.run(channel, device, message.limit_s)
        status = 0
        # Nobody reads the log of a process that ends in order, and its broker may be gone.
        shutil.rmtree(message.folder, ignore_errors=True)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _reap(pid: int, timeout_s: float) -> int | None:
    deadline = time.monotonic() + timeout_s
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.005)


if __name__ == "__main__":
    serve(Channel(socket.socket(fileno=int(sys.argv[1]))))
