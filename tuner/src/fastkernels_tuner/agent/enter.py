"""Runs a command in namespaces of its own; a script for `python -I`, with nothing but the library.

    python -I enter.py '{"folder": ..., "read": [...], "network": false}' command ...

What the command sees: the folder (writable, at its own path), the listed paths (read-only), a
private /tmp and /dev/shm, a few harmless devices, its own processes. It has no capabilities, gains
none by set-uid files, and ends with this process.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
from typing import Any

# linux/sched.h, linux/mount.h, linux/prctl.h
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MS_NOEXEC = 2, 4, 4096, 16384, 1 << 18, 8
MNT_DETACH = 2
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CAPABILITY_VERSION_3 = 0x20080522
SIOCSIFFLAGS, IFF_UP = 0x8914, 1

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
MAX_FILE_BYTES = 256 << 20
MAX_PROCESSES = 2048

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    """A C function that says by a negative result that it failed. Raises OSError."""
    given = [a.encode() if isinstance(a, str) else a for a in arguments]
    if getattr(libc, name)(*given) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    call("mount", source, target, kind, ctypes.c_ulong(flags), options)


def make_read_only(path: str) -> None:
    """With what is mounted below, which a remount would leave as it is."""
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    call(
        "syscall", SYS_MOUNT_SETATTR, AT_FDCWD, path, AT_RECURSIVE, attributes,
        ctypes.sizeof(attributes),
    )  # fmt: skip


def build_root(root: str, paths: list[tuple[str, int | str, bool]]) -> None:
    """`paths`: where it lies, an open descriptor or what a symlink says, and whether it may be
    written."""
    for name in ("dev/shm", "tmp"):  # first: the folder may lie below /tmp
        os.makedirs(f"{root}/{name}", exist_ok=True)
        mount("tmpfs", f"{root}/{name}", "tmpfs", MS_NOSUID | MS_NODEV, "size=1g,mode=1777")
    for path, source, is_writable in paths:
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if isinstance(source, str):
            os.symlink(source, target)
            continue
        origin = f"/proc/self/fd/{source}"
        if os.path.isdir(origin):
            os.makedirs(target, exist_ok=True)
        else:
            open(target, "w").close()
        mount(origin, target, "none", MS_BIND | MS_REC)
        if not is_writable:
            make_read_only(target)
    os.makedirs(f"{root}/proc", exist_ok=True)
    mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    make_read_only(f"{root}/proc")  # the owner of /proc/sys needs no capability to write there
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{root}/dev/{name}")
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    os.makedirs(f"{root}/tmp/home")


def opened(given: dict[str, Any]) -> list[tuple[str, int | str, bool]]:
    """Everything that is to be seen, before anything covers it; what is not there is left out."""
    found: list[tuple[str, int | str, bool]] = []
    for path in given["read"]:
        if os.path.islink(path):
            found.append((path, os.readlink(path), False))
        elif os.path.exists(path):
            found.append((path, os.open(path, os.O_PATH), False))
    for name in DEVICES:
        if os.path.exists(f"/dev/{name}"):
            found.append((f"/dev/{name}", os.open(f"/dev/{name}", os.O_PATH), True))
    found.append((given["folder"], os.open(given["folder"], os.O_PATH), True))
    return found


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP) + bytes(22))


def drop_capabilities() -> None:
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("capset", (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def wait_for(pid: int) -> int:
    """The exit status of a process, as a shell tells it; reaps everybody else meanwhile."""
    while True:
        found, status = os.wait()
        if found == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def inside(given: dict[str, Any], argv: list[str]) -> int:
    """As process 1 of the new namespaces: everything ends with it."""
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    mount("none", "/", "none", MS_REC | MS_PRIVATE)
    if not given["network"]:
        raise_loopback()
    paths = opened(given)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    build_root("/tmp", paths)
    for _, source, _ in paths:
        if isinstance(source, int):
            os.close(source)
    os.chdir("/tmp")
    call("pivot_root", ".", ".")
    call("umount2", ".", MNT_DETACH)
    make_read_only_root()
    os.chdir(given["folder"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_NPROC, (MAX_PROCESSES, MAX_PROCESSES))
    drop_capabilities()
    pid = os.fork()
    if pid == 0:
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            print(f"{argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)
    return wait_for(pid)


def make_read_only_root() -> None:
    """Only the root itself: what is mounted below says so for itself."""
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, "/", 0, attributes, ctypes.sizeof(attributes))


def main() -> int:
    given, argv = json.loads(sys.argv[1]), sys.argv[2:]
    uid, gid = os.geteuid(), os.getegid()
    flags = NEWUSER | NEWNS | NEWPID | NEWIPC | NEWUTS | (0 if given["network"] else NEWNET)
    call("unshare", flags)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{uid} {uid} 1")
    write("/proc/self/gid_map", f"{gid} {gid} 1")
    pid = os.fork()
    if pid == 0:
        status = 126
        try:
            status = inside(given, argv)
        except OSError as error:
            print(f"sandbox: {error}", file=sys.stderr, flush=True)
        os._exit(status)
    return wait_for(pid)


if __name__ == "__main__":
    sys.exit(main())
