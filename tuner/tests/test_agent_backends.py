"""Backends: commands that misbehave, an endpoint on the loopback, scripts; money and patience."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fastkernels_tuner.agent import files
from fastkernels_tuner.agent.backends import (
    TASK,
    Account,
    Command,
    Endpoint,
    GivenUp,
    Prices,
    Replay,
    Script,
    Task,
    Turn,
    cost_of,
)
from fastkernels_tuner.errors import OutOfBudget, SourceError


class Bare:
    """No box at all."""

    def wrap(self, argv: Sequence[str], folder: Path) -> list[str]:
        return list(argv)

    def environment(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"]}


@pytest.fixture
def task(tmp_path: Path) -> Task:
    (tmp_path / TASK).write_text("make it faster\n")
    return Task("optimiser", 0, tmp_path)


# ---- commands -----------------------------------------------------------------------------------


def python(code: str, *more: str, **options: Any) -> Command:
    fields: dict[str, Any] = {"ceiling_usd": 2.0, "timeout_s": 60.0, "max_bytes": 1 << 16}
    return Command((sys.executable, "-I", "-S", "-c", code, *more), Bare(), **fields | options)


def test_a_command_gets_the_task_by_stdin_and_says_its_cost(task: Task) -> None:
    turn = python(
        "import sys, json; open('kernel.py', 'w').write(sys.stdin.read());"
        "print(json.dumps({'type': 'result', 'total_cost_usd': 0.25})); print('done')"
    ).turn(task)
    assert (turn.failure, turn.cost_usd) == ("", 0.25)
    assert turn.said.endswith("done\n")
    assert (task.folder / "kernel.py").read_text() == "make it faster\n"


def test_placeholders_are_arguments_and_no_shell_reads_them(task: Task) -> None:
    argv = Command.split("{python} -ISc 'import sys; print(sys.argv[1:])' {prompt_file} '$HOME; x'")
    command = python("")
    command = Command((sys.executable, *argv[1:]), command.box, ceiling_usd=2.0)
    turn = command.turn(task)
    assert turn.said.strip() == str([str(task.folder / TASK), "$HOME; x"])
    assert turn.cost_usd is None
    assert cost_of(turn, 2.0) == 2.0


@pytest.mark.parametrize("text", ["", "claude 'unclosed"])
def test_a_command_that_is_none(text: str) -> None:
    with pytest.raises(SourceError):
        Command.split(text)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_command_that_hangs_is_killed_with_what_it_forked(task: Task) -> None:
    turn = python(
        "import os, time\n"
        "pid = os.fork()\n"
        "if pid: open('pid', 'w').write(str(pid))\n"
        "time.sleep(600)",
        timeout_s=1.0,
    ).turn(task)
    assert turn.failure == "did not end in time"
    assert turn.seconds < 60
    assert _soon_gone(int((task.folder / "pid").read_text()))


def _soon_gone(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not is_gone(pid):
        time.sleep(0.01)
    return is_gone(pid)


def test_what_a_command_leaves_running_ends_with_it(task: Task) -> None:
    """Though it holds the output open."""
    turn = python(
        "import os, time\n"
        "pid = os.fork()\n"
        "if pid: open('pid', 'w').write(str(pid)); os._exit(0)\n"
        "time.sleep(600)"
    ).turn(task)
    assert turn.failure == ""
    assert _soon_gone(int((task.folder / "pid").read_text()))


def test_a_command_that_floods_is_cut_short(task: Task) -> None:
    turn = python("while True: print('x' * 1000)").turn(task)
    assert turn.failure == "wrote more than 65536 bytes"
    assert len(turn.said) <= 4000


def test_a_command_that_fails_says_how(task: Task) -> None:
    turn = python("import sys; sys.exit('no credit left')").turn(task)
    assert turn.failure == "ended with status 1: no credit left"
    missing = Command(("/no/such/agent",), Bare(), ceiling_usd=2.0).turn(task)
    assert "does not start" in missing.failure
    assert missing.cost_usd == 0.0


@pytest.mark.parametrize(
    "line",
    ['{"total_cost_usd": "1"}', '{"total_cost_usd": -1}', '{"total_cost_usd": true}', "cost_usd 3",
     '{"total_cost_usd": NaN}', "[" * 100_000 + "cost_usd"],
    ids=["text", "negative", "bool", "prose", "nan", "deep"],
)  # fmt: skip
def test_a_cost_that_is_none_is_not_believed(task: Task, line: str) -> None:
    (task.folder / "out").write_text(line)
    turn = python("print(open('out').read())", max_bytes=1 << 20).turn(task)
    assert (turn.cost_usd, turn.failure) == (None, "")


# ---- an endpoint --------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """Answers with what it is given, in order, and keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def says(self, content: Any, **more: Any) -> None:
        """One completion whose message is `content`."""
        text = content if isinstance(content, str) else json.dumps(content)
        choice = {
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
            **more,
        }
        usage = {"prompt_tokens": 1000, "completion_tokens": 200}
        self.answers.append((200, {}, json.dumps({"choices": [choice], "usage": usage}).encode()))

    def fails(self, status: int, **headers: str) -> None:
        self.answers.append((status, headers, b"no"))


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        size = int(self.headers["content-length"])
        self.server.asked.append(json.loads(self.rfile.read(size)))
        self.server.keys.append(self.headers.get("authorization"))
        status, headers, data = self.server.answers.pop(0)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        with suppress(OSError):  # it hung up over a long answer
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    made = Server()
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def endpoint(server: Server, **options: Any) -> tuple[Endpoint, list[float]]:
    slept: list[float] = []
    fields = {"prices": Prices(1.0, 10.0), "sleep": slept.append, "rng": random.Random(0)} | options
    made = Endpoint.of(
        {"FASTKERNELS_AGENT_URL": f"{server.url}/", "FASTKERNELS_AGENT_KEY": "secret"},
        "some-model", 1.0, **fields,
    )  # fmt: skip
    return made, slept


def test_an_endpoint_writes_whole_files(server: Server, task: Task) -> None:
    (task.folder / "src").mkdir()
    (task.folder / "src/kernel.py").write_text("slow = True\n")
    (task.folder / "old.py").write_text("")
    server.says({"files": {"src/kernel.py": "slow = False\n", "old.py": None}, "notes": "faster"})
    backend, _ = endpoint(server)
    turn = backend.turn(task)
    assert turn.failure == ""
    assert (task.folder / "src/kernel.py").read_text() == "slow = False\n"
    assert not (task.folder / "old.py").exists()
    assert turn.cost_usd == pytest.approx(0.003)
    (asked,) = server.asked
    assert asked["model"] == "some-model"
    assert server.keys == ["Bearer secret"]
    text = asked["messages"][0]["content"]
    assert "make it faster" in text
    assert "slow = True" in text


def test_an_endpoint_is_asked_once_more_to_mend_its_answer(server: Server, task: Task) -> None:
    server.says("Sure! Here is the faster kernel:")
    server.says({"files": {"kernel.py": "x\n"}})
    turn = endpoint(server)[0].turn(task)
    assert turn.failure == ""
    assert [m["role"] for m in server.asked[1]["messages"]] == ["user", "assistant", "user"]
    assert turn.cost_usd == pytest.approx(0.006)


@pytest.mark.parametrize(
    "content", ["prose", "{", '{"files": {"a.py": 3}}', '{"files": {}, "more": 1}'],
    ids=["prose", "half", "number", "unknown"],
)  # fmt: skip
def test_an_answer_that_stays_malformed_fails_the_turn(
    server: Server, task: Task, content: str
) -> None:
    server.says(content)
    server.says(content)
    turn = endpoint(server)[0].turn(task)
    assert turn.failure.startswith("the answer is not as asked for")
    assert sorted(p.name for p in task.folder.iterdir()) == [TASK]


def test_an_endpoint_that_is_busy_or_broken_is_asked_again(server: Server, task: Task) -> None:
    server.fails(429, retry_after="7")
    server.fails(503)
    server.says({"files": {"kernel.py": "x\n"}})
    backend, slept = endpoint(server)
    assert backend.turn(task).failure == ""
    assert slept[0] == 7.0
    assert 1.0 <= slept[1] <= 3.0


def test_no_end_of_trouble_fails_the_turn(server: Server, task: Task) -> None:
    for _ in range(3):
        server.fails(500)
    backend, slept = endpoint(server, attempts=3)
    assert backend.turn(task).failure == "status 500 after 3 attempts"
    assert len(slept) == 2
    server.fails(429, retry_after="10000")
    backend, slept = endpoint(server, timeout_s=30.0)
    assert backend.turn(task).failure == "status 429 after 1 attempts"
    assert not slept


def test_a_refusal_is_not_tried_again(server: Server, task: Task) -> None:
    server.fails(401)
    backend, slept = endpoint(server)
    assert backend.turn(task).failure == "status 401: no"
    assert not slept


def test_an_overlong_answer_fails_the_turn(server: Server, task: Task) -> None:
    server.says({"files": {"kernel.py": "x" * 100_000}})
    assert "more than 10000 bytes" in endpoint(server, max_bytes=10_000)[0].turn(task).failure
    server.says('{"files": {"kernel', finish_reason="length")
    turn = endpoint(server)[0].turn(task)
    assert "cut off" in turn.failure
    assert turn.cost_usd == pytest.approx(0.003)


@pytest.mark.parametrize(
    "data",
    [b"<html>", b"[]", b'{"choices": []}', b'{"choices": [{"message": {"content": null}}]}'],
    ids=["html", "list", "empty", "null"],
)  # fmt: skip
def test_what_is_no_completion_fails_the_turn(server: Server, task: Task, data: bytes) -> None:
    server.answers.append((200, {}, data))
    turn = endpoint(server)[0].turn(task)
    assert turn.failure
    assert turn.cost_usd is None


def test_an_answer_cannot_write_outside_the_workspace(server: Server, task: Task) -> None:
    inside = task.folder / "box"
    inside.mkdir()
    (inside / TASK).write_text("x")
    server.says({"files": {"kernel.py": "x", "../out.py": "y"}})
    turn = endpoint(server)[0].turn(Task("optimiser", 0, inside))
    assert "'../out.py' leads out of the workspace" in turn.failure
    assert not (task.folder / "out.py").exists()
    assert not (inside / "kernel.py").exists()


def test_an_endpoint_that_is_not_there(task: Task) -> None:
    backend = Endpoint("http://127.0.0.1:1/v1", "m", "", 1.0)
    assert "ConnectError" in backend.turn(task).failure
    with pytest.raises(SourceError, match="FASTKERNELS_AGENT_URL"):
        Endpoint.of({}, "m", 1.0)


def test_history_gives_way_where_a_prompt_is_too_long(server: Server, task: Task) -> None:
    (task.folder / "AGENTS.md").write_text("the rules")
    (task.folder / "experiments").mkdir()
    (task.folder / "experiments/log.md").write_text("h" * 5000)
    server.says({"files": {}})
    endpoint(server, max_prompt_chars=3000)[0].turn(task)
    text = server.asked[0]["messages"][0]["content"]
    assert "the rules" in text
    assert "hhh" not in text


# ---- a script -----------------------------------------------------------------------------------


def test_a_script_is_replayed_by_turn(task: Task, tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(
        json.dumps(
            {
                "turns": [
                    {"files": {"kernel.py": "a = 1\n"}, "cost_usd": 0.5},
                    {"replace": [{"file": "kernel.py", "old": "1", "new": "2"}]},
                    {"failure": "the backend is down"},
                ]
            }
        )
    )
    replay = Replay.read(path)
    turns = [replay.turn(Task("optimiser", number, task.folder)) for number in range(4)]
    assert (task.folder / "kernel.py").read_text() == "a = 2\n"
    assert [turn.failure for turn in turns] == ["", "", "the backend is down", ""]
    assert turns[0].cost_usd == 0.5


@pytest.mark.parametrize("text", ["{", "{}", '{"turns": [{"file": 1}]}'])
def test_a_script_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(text)
    with pytest.raises(SourceError, match=r"script\.json"):
        Replay.read(path)


def test_a_script_that_does_not_fit_fails_its_turn(task: Task) -> None:
    replace = {"file": "kernel.py", "old": "1", "new": "2"}
    replay = Replay(Script.model_validate({"turns": [{"replace": [replace]}] * 2}))
    assert "No such file" in replay.turn(task).failure
    (task.folder / "kernel.py").write_text("11")
    assert "2 places" in replay.turn(task).failure


# ---- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a\0b", "a\\b", "a/"]
)
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(files.Refused):
        files.write(tmp_path, name, "x")
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_through_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    box = tmp_path / "box"
    box.mkdir()
    (box / "link").symlink_to(tmp_path / "out")
    (box / "file").symlink_to(tmp_path / "out/file")
    for name in ("link/x", "file"):
        with pytest.raises(files.Refused):
            files.write(box, name, "x")
    assert not list((tmp_path / "out").iterdir())


# ---- money and patience -------------------------------------------------------------------------


def test_no_turn_begins_that_might_cost_more_than_is_left() -> None:
    account = Account(limit_usd=2.0)
    for _ in range(2):
        account.require(0.75)
        account = account.book(0.7, has_changed=True)
    with pytest.raises(OutOfBudget, match=r"\$1\.40 of \$2\.00"):
        account.require(0.75)
    account.require(0.5)
    Account().require(1e9)


def test_three_turns_without_a_change_are_the_end() -> None:
    account = Account()
    for has_changed in (False, False, True, False, False):
        account.require(1.0)
        account = account.book(0.0, has_changed=has_changed)
    account = account.book(0.0, has_changed=False)
    with pytest.raises(GivenUp, match="3 turns"):
        account.require(1.0)


def test_silence_about_money_is_no_discount() -> None:
    assert cost_of(Turn(backend="x"), 3.0) == 3.0
    assert cost_of(Turn(backend="x", cost_usd=0.0), 3.0) == 0.0
