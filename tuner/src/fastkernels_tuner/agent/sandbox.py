"""What an agent's commands run in: their own folder, no network, no GPU, nothing of ours.

By bubblewrap, else by user namespaces (`enter`); where neither works nothing starts unless told so
explicitly, and nothing is promoted then.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fastkernels_tuner.agent import enter, process
from fastkernels_tuner.errors import UnfitError

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# Of /etc what programs need to start and to verify certificates; no account's secrets.
SETTINGS = (
    "/etc/alternatives", "/etc/ca-certificates", "/etc/group", "/etc/ld.so.cache",
    "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime", "/etc/nsswitch.conf", "/etc/passwd",
    "/etc/pki", "/etc/ssl",
)  # fmt: skip
NETWORK = ("/etc/hosts", "/etc/resolv.conf")
HOME = "/tmp/home"
PROBE_S = 30.0


class NoSandbox(UnfitError):
    """Neither bubblewrap nor user namespaces work here."""


@dataclass(frozen=True)
class Limits:
    """What is let through. `read`: paths that are seen besides the system's, read-only, such as the
    agent's own installation. `pass_on`: variables by name, such as the key of a model. `network`:
    the host's, all of it; else none."""

    read: tuple[str, ...] = ()
    pass_on: tuple[str, ...] = ()
    network: bool = False
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def environment(self, home: str) -> dict[str, str]:
        """A fresh one, in which no program finds a GPU."""
        passed = {name: self.environ[name] for name in self.pass_on if name in self.environ}
        path = self.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin")
        return {"LANG": "C.UTF-8", **passed, "PATH": path, "HOME": home, "CUDA_VISIBLE_DEVICES": ""}

    def seen(self) -> list[str]:
        return [*SYSTEM, *SETTINGS, *(NETWORK if self.network else ()), *self.read]


@dataclass(frozen=True)
class Bubblewrap:
    """https://github.com/containers/bubblewrap"""

    limits: Limits
    program: str = "bwrap"
    is_safe = True

    def wrap(self, argv: Sequence[str], folder: Path) -> list[str]:
        seen: list[str] = []
        for path in self.limits.seen():
            if os.path.islink(path):
                seen += ["--symlink", os.readlink(path), path]
            else:
                seen += ["--ro-bind-try", path, path]
        place = str(folder.absolute())
        return [
            self.program, "--unshare-all", *(["--share-net"] if self.limits.network else []),
            "--die-with-parent", "--new-session", "--cap-drop", "ALL",
            "--proc", "/proc", *_covered(), "--dev", "/dev", "--tmpfs", "/tmp", "--dir", HOME,
            *seen, "--bind", place, place, "--remount-ro", "/", "--chdir", place, "--", *argv,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        return self.limits.environment(HOME)


def _covered() -> list[str]:
    """What the owner of the machine may write in /proc without any capability: bubblewrap leaves it
    so where it is no set-uid program (0.8)."""
    paths = [f"/proc/{name}" for name in ("sys", "sysrq-trigger", "irq", "bus")]
    return [word for path in paths for word in ("--ro-bind-try", path, path)]


@dataclass(frozen=True)
class Namespaces:
    """User, mount, process, IPC and network namespaces, by `enter`."""

    limits: Limits
    is_safe = True

    def wrap(self, argv: Sequence[str], folder: Path) -> list[str]:
        given = {
            "folder": str(folder.absolute()),
            "read": self.limits.seen(),
            "network": self.limits.network,
        }
        return [sys.executable, "-I", "-S", str(enter.__file__), json.dumps(given), *argv]

    def environment(self) -> dict[str, str]:
        return self.limits.environment(HOME)


@dataclass(frozen=True)
class Unsandboxed:
    """Nothing between the agent and this machine but the environment."""

    limits: Limits
    is_safe = False

    def wrap(self, argv: Sequence[str], folder: Path) -> list[str]:
        return list(argv)

    def environment(self) -> dict[str, str]:
        return self.limits.environment(self.limits.environ.get("HOME", "/"))


Sandbox = Bubblewrap | Namespaces | Unsandboxed


def why_not(sandbox: Sandbox) -> str:
    """Why a command does not run in it here; empty where one does."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = process.run(
                sandbox.wrap(["/bin/sh", "-c", ": > works"], Path(folder)),
                folder=Path(folder),
                env=sandbox.environment(),
                timeout_s=PROBE_S,
                max_bytes=1 << 16,
            )
        except OSError as error:
            return str(error)
        if Path(folder, "works").exists():
            return ""
    told = ended.stderr.decode(errors="replace").strip()
    return ended.why or told[-300:] or f"status {ended.status}"


def find(
    limits: Limits,
    *,
    allow_none: bool = False,
    which: Callable[[str], str | None] = shutil.which,
    why_not: Callable[[Sandbox], str] = why_not,
) -> Sandbox:
    """The first one that works here. Raises NoSandbox where none does, unless `allow_none`."""
    program = which("bwrap")
    reasons = []
    if program is None:
        reasons.append("bubblewrap: not installed")
    choices: list[Sandbox] = [Bubblewrap(limits, program)] if program is not None else []
    for choice in (*choices, Namespaces(limits)):
        reason = why_not(choice)
        if not reason:
            return choice
        reasons.append(f"{type(choice).__name__.lower()}: {reason}")
    if allow_none:
        return Unsandboxed(limits)
    raise NoSandbox(
        "an agent's commands are not started without a sandbox:\n  "
        + "\n  ".join(reasons)
        + "\ninstall bubblewrap, or say --unsafe-no-sandbox, and nothing will be promoted"
    )
