"""Sandboxes, as far as this machine has them, and the refusal where it has none; workspaces."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastkernels_tuner.agent import process, sandbox
from fastkernels_tuner.agent.backends import TASK, Command, Task
from fastkernels_tuner.agent.files import Refused
from fastkernels_tuner.agent.sandbox import (
    Bubblewrap,
    Limits,
    Namespaces,
    NoSandbox,
    Sandbox,
    Unsandboxed,
    find,
)
from fastkernels_tuner.agent.workspace import PLAN, Patch, Permit, Workspace, version_of

PYTHON = os.path.realpath(sys.executable)
LIMITS = Limits(read=(sys.base_prefix,), pass_on=("AGENT_KEY",))


def made(kind: str, limits: Limits) -> Sandbox:
    return Bubblewrap(limits) if kind == "bubblewrap" else Namespaces(limits)


@pytest.fixture(scope="module", params=["bubblewrap", "namespaces"])
def kind(request: pytest.FixtureRequest) -> str:
    found = str(request.param)
    if reason := sandbox.why_not(made(found, Limits())):
        pytest.skip(f"{found}: {reason}")
    return found


def python(box: Sandbox, folder: Path, code: str, **options: Any) -> process.Ended:
    fields: dict[str, Any] = {"timeout_s": 60.0, "max_bytes": 1 << 16}
    return process.run(
        box.wrap([PYTHON, "-ISc", code], folder),
        folder=folder,
        env=box.environment(),
        **fields | options,
    )


LOOK = """
import json, os, socket, sys
def can(act):
    try:
        act()
    except OSError:
        return False
    return True
def write(path):
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
def connect():
    socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5).close()
def listen():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
print(json.dumps({
    "own": can(lambda: write("kernel.py")),
    "tmp": can(lambda: write("/tmp/x")),
    "usr": can(lambda: write("/usr/x")),
    "root": can(lambda: write("/x")),
    "python": can(lambda: write(os.path.join(sys.base_prefix, "x"))),
    "sysctl": can(lambda: write("/proc/sys/kernel/core_pattern")),
    "shadow": can(lambda: open("/etc/shadow").close()),
    "ours": os.path.exists(sys.argv[2]),
    "host": can(connect),
    "loopback": can(listen),
    "devices": sorted(os.listdir("/dev")),
    "processes": sum(name.isdigit() for name in os.listdir("/proc")),
    "environment": dict(os.environ),
}))
"""


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def look(box: Sandbox, folder: Path, port: int) -> dict[str, Any]:
    here = str(Path(__file__).parent)
    ended = process.run(
        box.wrap([PYTHON, "-ISc", LOOK, str(port), here], folder),
        folder=folder, env=box.environment(), timeout_s=60.0, max_bytes=1 << 16,
    )  # fmt: skip
    assert ended.status == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_inside_there_is_the_folder_and_nothing_of_ours(
    kind: str, tmp_path: Path, port: int
) -> None:
    limits = Limits(LIMITS.read, ("AGENT_KEY",), environ={**os.environ, "AGENT_KEY": "k", "X": "x"})
    found = look(made(kind, limits), tmp_path, port)
    reached = {name for name, can in found.items() if can is True}
    assert reached == {"own", "tmp", "loopback"}
    assert (tmp_path / "kernel.py").exists()
    assert not [name for name in found["devices"] if name.startswith(("nvidia", "dri", "sd", "vd"))]
    assert found["processes"] <= 4
    environment = found["environment"]
    assert environment["AGENT_KEY"] == "k"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "X" not in environment
    assert environment["HOME"] == sandbox.HOME


def test_the_network_is_there_where_it_is_let_through(kind: str, tmp_path: Path, port: int) -> None:
    found = look(made(kind, Limits(LIMITS.read, network=True)), tmp_path, port)
    assert found["host"]


def test_nobody_outlives_the_sandbox(kind: str, tmp_path: Path) -> None:
    """Not even in a session of its own, which a process group does not reach."""
    mark = tmp_path / "alive"
    ended = python(
        made(kind, LIMITS),
        tmp_path,
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    for number in range(6000):\n"
        "        open('alive', 'w').write(str(number)); time.sleep(0.01)\n"
        "while not os.path.exists('alive'): time.sleep(0.01)\n",
    )
    assert (ended.status, ended.why) == (0, "")
    deadline = time.monotonic() + 20  # the kernel ends it, when it comes to it
    before = ""
    while mark.read_text() != before and time.monotonic() < deadline:
        before = mark.read_text()
        time.sleep(0.1)
    assert mark.read_text() == before


def test_a_command_in_a_sandbox_tells_how_it_ended(kind: str, tmp_path: Path) -> None:
    box = made(kind, LIMITS)
    assert python(box, tmp_path, "import sys; sys.exit(7)").status == 7
    assert python(box, tmp_path, "import time; time.sleep(600)", timeout_s=1.0).why
    (tmp_path / TASK).write_text("do")
    command = Command((PYTHON, "-ISc", "print(open('{prompt_file}').read())"), box, ceiling_usd=1.0)
    turn = command.turn(Task("optimiser", 0, tmp_path))
    assert (turn.said.strip(), turn.failure) == ("do", "")
    gone = Command(("no-such-agent",), box, ceiling_usd=1.0).turn(Task("optimiser", 0, tmp_path))
    assert "no-such-agent" in gone.failure


def test_nothing_starts_without_a_sandbox() -> None:
    def find_nothing(**options: Any) -> Sandbox:
        return find(
            Limits(),
            which=lambda name: None,
            why_not=lambda box: "Operation not permitted",
            **options,
        )

    with pytest.raises(NoSandbox, match="not installed") as caught:
        find_nothing()
    assert "namespaces: Operation not permitted" in str(caught.value)
    assert caught.value.exit_code == 3
    chosen = find_nothing(allow_none=True)
    assert not chosen.is_safe
    assert chosen.wrap(["agent"], Path("/x")) == ["agent"]
    assert chosen.environment()["CUDA_VISIBLE_DEVICES"] == ""


def test_bubblewrap_comes_first_if_it_works() -> None:
    def why_not(box: Sandbox) -> str:
        return "" if type(box) is works else "no"

    works: type[Sandbox] = Bubblewrap
    assert find(Limits(), which=lambda _: "/usr/bin/bwrap", why_not=why_not) == Bubblewrap(
        Limits(), "/usr/bin/bwrap"
    )
    works = Namespaces
    assert find(Limits(), which=lambda _: "/usr/bin/bwrap", why_not=why_not) == Namespaces(Limits())


def test_a_program_that_does_not_start_is_no_sandbox() -> None:
    assert sandbox.why_not(Bubblewrap(Limits(), "/no/such/bwrap"))
    assert sandbox.why_not(Bubblewrap(Limits(), "/bin/false")) == "status 1"
    assert not sandbox.why_not(Unsandboxed(Limits()))


# ---- workspaces ---------------------------------------------------------------------------------

BASE = {"src/kernel.py": "a = 1\n", "src/route.py": "b = 1\n"}
CONTEXT = {"AGENTS.md": "rules\n", "context/reference.py": "r\n"}
PERMIT = Permit(files=tuple(BASE), added=("src/*.py",), max_files=2, max_bytes=1000)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    space = Workspace(tmp_path / "work", PERMIT, BASE, CONTEXT)
    space.create()
    return space


def test_what_changed_is_a_patch(workspace: Workspace) -> None:
    folder = workspace.folder
    assert workspace.collect() == (Patch(), "")
    (folder / "src/kernel.py").write_text("a = 2\n")
    (folder / "src/helper.py").write_text("c = 3")
    (folder / PLAN).write_text("hypothesis = 'x'\n")
    (folder / "scratch/notes.bin").write_bytes(b"\xff" * 5000)
    (folder / ".agent").mkdir()
    (folder / ".agent/settings").symlink_to("/etc/passwd")
    (folder / "src/__pycache__").mkdir()
    (folder / "src/__pycache__/kernel.pyc").write_bytes(b"\xff")
    patch, plan = workspace.collect()
    assert patch.files == {"src/kernel.py": "a = 2\n", "src/helper.py": "c = 3"}
    assert plan == "hypothesis = 'x'\n"
    assert patch.apply(BASE) == {**BASE, **patch.files}
    assert patch.diff(BASE) == (
        "--- /dev/null\n+++ b/src/helper.py\n@@ -0,0 +1 @@\n+c = 3\n"
        "\\ No newline at end of file\n"
        "--- a/src/kernel.py\n+++ b/src/kernel.py\n@@ -1 +1 @@\n-a = 1\n+a = 2\n"
    )


def test_a_file_that_was_added_may_go_again(tmp_path: Path) -> None:
    base = {**BASE, "src/helper.py": "c = 3\n"}
    space = Workspace(tmp_path / "work", PERMIT, base, {})
    space.create()
    (space.folder / "src/helper.py").unlink()
    patch, _ = space.collect()
    assert patch.files == {"src/helper.py": None}
    assert version_of(patch.apply(base)) == version_of(BASE)


def _write(name: str, data: bytes = b"x\n") -> Any:
    def act(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(data)

    return act


def _hard_link(folder: Path) -> None:
    (folder.parent / "harness.py").write_text("ours\n")
    (folder / "src/kernel.py").unlink()
    os.link(folder.parent / "harness.py", folder / "src/kernel.py")


def _symlink(folder: Path) -> None:
    (folder / "src/kernel.py").unlink()
    (folder / "src/kernel.py").symlink_to("/etc/passwd")


def _linked_folder(folder: Path) -> None:
    (folder / "src/more").symlink_to("/etc")


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "src/pipe.py")


REFUSED = {
    "harness": (_write("tuner/gates.py"), "tuner/gates.py", "not among the files"),
    "reference": (_write("context/reference.py"), "context/reference.py", "read-only"),
    "rules": (_write("AGENTS.md"), "AGENTS.md", "read-only"),
    "test": (_write("tests/test_x.py"), "tests/test_x.py", "not among the files"),
    "store": (_write("store.db", b"SQLite\n"), "store.db", "not among the files"),
    "symlink": (_symlink, "src/kernel.py", "symlink"),
    "linked folder": (_linked_folder, "src/more", "symlink"),
    "hard link": (_hard_link, "src/kernel.py", "hard link"),
    "pipe": (_pipe, "src/pipe.py", "neither a file"),
    "huge": (_write("src/kernel.py", b"x" * 1001), "src/kernel.py", "1001 bytes, at most 1000"),
    "binary": (_write("src/kernel.py", b"\xff\xfe"), "src/kernel.py", "binary"),
    "nul": (_write("src/kernel.py", b"a\0b"), "src/kernel.py", "binary"),
    "deleted": (lambda folder: (folder / "src/kernel.py").unlink(), "src/kernel.py", "deleted"),
    "deleted rules": (lambda folder: (folder / "AGENTS.md").unlink(), "AGENTS.md", "deleted"),
    "hidden below": (_write("src/.kernel.so"), "src/.kernel.so", "not among the files"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(workspace: Workspace, name: str) -> None:
    act, at, reason = REFUSED[name]
    act(workspace.folder)
    with pytest.raises(Refused, match=reason) as caught:
        workspace.collect()
    assert caught.value.name == at
    workspace.create()  # and the next turn begins anew
    assert workspace.collect() == (Patch(), "")


def test_too_many_files_are_refused(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        (workspace.folder / f"src/more{number}.py").write_text("x")
    with pytest.raises(Refused, match="one change too many"):
        workspace.collect()
    workspace.create()
    monkeypatch.setattr("fastkernels_tuner.agent.workspace.MAX_ENTRIES", 6)
    with pytest.raises(Refused, match="more than 6 files"):
        workspace.collect()
