"""Agents behind one protocol: any command, an OpenAI-compatible endpoint, a script.

A turn is one piece of an agent's work in a folder: it reads `TASK.md` and what lies beside it, and
leaves changed files. What it says besides is for people; nothing is decided by it.
"""

from __future__ import annotations

import json
import random
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import httpx
from pydantic import ValidationError

from fastkernels_tuner.agent import files, process
from fastkernels_tuner.errors import OutOfBudget, SourceError, TunerError
from fastkernels_tuner.model import Model

TASK = "TASK.md"
IDLE_TURNS = 3
SAID_CHARS = 4000  # of what an agent said, from its end

Role = Literal["optimiser", "critic"]


class GivenUp(TunerError):
    """The agent has nothing to offer any more."""

    exit_code = 1


@dataclass(frozen=True)
class Task:
    """`number` counts the turns of a campaign, from 0."""

    role: Role
    number: int
    folder: Path

    @property
    def prompt(self) -> str:
        return (self.folder / TASK).read_text(encoding="utf-8")


class Turn(Model):
    """What came of a turn, apart from the files. `cost_usd` is None where the backend did not say;
    `failure` is why the turn counts for nothing, whatever it left."""

    backend: str
    seconds: float = 0.0
    cost_usd: float | None = None
    said: str = ""
    failure: str = ""


class Backend(Protocol):
    """`ceiling_usd`: the most that a turn is to cost, and what one counts that does not say."""

    @property
    def name(self) -> str: ...
    @property
    def ceiling_usd(self) -> float: ...
    def turn(self, task: Task) -> Turn:
        """Never raises over what the agent does wrong."""


class Account(Model):
    """Money and patience, folded from the turns so far. `limit_usd` None: no limit."""

    limit_usd: float | None = None
    spent_usd: float = 0.0
    idle: int = 0  # turns in a row without a change

    def require(self, ceiling_usd: float) -> None:
        """Before a turn. Raises OutOfBudget where it might cost more than is left, GivenUp after
        IDLE_TURNS turns without a change."""
        if self.idle >= IDLE_TURNS:
            raise GivenUp(f"{self.idle} turns in a row changed nothing")
        if self.limit_usd is not None and self.spent_usd + ceiling_usd > self.limit_usd:
            raise OutOfBudget(
                f"${self.spent_usd:.2f} of ${self.limit_usd:.2f} are spent, "
                f"a turn may cost ${ceiling_usd:.2f}"
            )

    def book(self, cost_usd: float, *, has_changed: bool) -> Account:
        """After a turn."""
        idle = 0 if has_changed else self.idle + 1
        return self.model_copy(update={"spent_usd": self.spent_usd + cost_usd, "idle": idle})


def cost_of(turn: Turn, ceiling_usd: float) -> float:
    """What a turn counts: silence about money is no discount."""
    return ceiling_usd if turn.cost_usd is None else turn.cost_usd


# ---- any command --------------------------------------------------------------------------------


class Box(Protocol):
    """What a command runs in: see `sandbox`."""

    def wrap(self, argv: Sequence[str], folder: Path) -> list[str]:
        """The command line that runs `argv` in `folder`, inside."""

    def environment(self) -> dict[str, str]: ...


@dataclass(frozen=True)
class Command:
    """A coding agent's command line, for every turn anew; no shell reads it.

    `{workspace}`, `{prompt_file}` and `{budget_usd}` in `argv` are replaced; without
    `{prompt_file}` the task comes by stdin. The cost is the last `total_cost_usd` or `cost_usd` in
    a JSON object among the lines of its output.
    """

    argv: tuple[str, ...]
    box: Box
    ceiling_usd: float
    timeout_s: float = 1800.0
    max_bytes: int = 16 << 20
    name: str = "command"

    @staticmethod
    def split(text: str) -> tuple[str, ...]:
        """A command as people write it. Raises SourceError."""
        try:
            argv = tuple(shlex.split(text))
        except ValueError as error:
            raise SourceError(f"command {text!r}: {error}") from None
        if not argv:
            raise SourceError("an empty command")
        return argv

    def turn(self, task: Task) -> Turn:
        values = {
            "{workspace}": str(task.folder),
            "{prompt_file}": str(task.folder / TASK),
            "{budget_usd}": f"{self.ceiling_usd:.2f}",
        }
        takes_file = any("{prompt_file}" in part for part in self.argv)
        try:
            ended = process.run(
                self.box.wrap([_filled(part, values) for part in self.argv], task.folder),
                folder=task.folder,
                env=self.box.environment(),
                stdin=b"" if takes_file else task.prompt.encode(),
                timeout_s=self.timeout_s,
                max_bytes=self.max_bytes,
            )
        except OSError as error:
            return Turn(backend=self.name, cost_usd=0.0, failure=f"does not start: {error}")
        out = ended.stdout.decode(errors="replace")
        failure = ended.why
        if not failure and ended.status:
            told = ended.stderr.decode(errors="replace").strip()[-500:]
            failure = f"ended with status {ended.status}: {told}"
        return Turn(
            backend=self.name,
            seconds=round(ended.seconds, 3),
            cost_usd=_told_cost(out),
            said=out[-SAID_CHARS:],
            failure=failure,
        )


def _filled(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def _told_cost(out: str) -> float | None:
    for line in reversed(out.splitlines()):
        if "cost_usd" not in line:
            continue
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            for key in ("total_cost_usd", "cost_usd"):
                cost = event.get(key)
                if isinstance(cost, int | float) and not isinstance(cost, bool) and 0 <= cost < 1e6:
                    return float(cost)
    return None


# ---- an endpoint --------------------------------------------------------------------------------


class Answer(Model):
    """What an endpoint's model answers: whole files by name, `null` for one to delete."""

    files: dict[str, str | None]
    notes: str = ""


class Prices(NamedTuple):
    """Dollars per million tokens."""

    prompt: float
    completion: float


class _Failed(Exception):
    """Why a turn came to nothing."""


FORMAT = """
Answer with one JSON object and nothing else: {"files": {"<name>": "<whole new text>", ...},
"notes": "<one paragraph>"}. Name only files that you change; null as the text deletes a file.
"""


@dataclass
class Endpoint:
    """A model behind `<url>/chat/completions`, one request a turn, and one more to mend an answer
    that is not as it should be. Waits and tries again over 429 and 5xx alone."""

    url: str
    model: str
    key: str
    ceiling_usd: float
    prices: Prices | None = None
    timeout_s: float = 900.0
    max_tokens: int = 32_000
    max_bytes: int = 8 << 20
    max_prompt_chars: int = 400_000
    attempts: int = 5
    sleep: Callable[[float], None] = time.sleep
    rng: random.Random = field(default_factory=random.Random)
    name: str = "endpoint"

    @staticmethod
    def of(environ: Mapping[str, str], model: str, ceiling_usd: float, **more: Any) -> Endpoint:
        """By FASTKERNELS_AGENT_URL and FASTKERNELS_AGENT_KEY. Raises SourceError."""
        url = environ.get("FASTKERNELS_AGENT_URL", "").rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise SourceError("FASTKERNELS_AGENT_URL: expected the base URL of an endpoint")
        key = environ.get("FASTKERNELS_AGENT_KEY", "")
        return Endpoint(url, model, key, ceiling_usd, **more)

    def turn(self, task: Task) -> Turn:
        began, spent = time.monotonic(), _Usage(self.prices)
        messages = [{"role": "user", "content": self._prompt(task)}]
        said = failure = ""
        try:
            for is_last in (False, True):
                said = self._ask(messages, spent, began + self.timeout_s)
                try:
                    _apply(Answer.model_validate_json(said), task.folder)
                    break
                except ValidationError as error:
                    first = error.errors(include_url=False, include_input=False)[0]
                    where = ".".join(map(str, first["loc"]))
                    fault = f"the answer is not as asked for: {where} {first['msg']}"
                    if is_last:
                        raise _Failed(fault) from None
                    messages += [
                        {"role": "assistant", "content": said},
                        {"role": "user", "content": f"{fault}\n{FORMAT}"},
                    ]
        except _Failed as error:
            failure = str(error)
        except files.Refused as error:
            failure = f"handed in a file that is none: {error}"
        except OSError as error:  # a file that is read-only, or a folder
            failure = f"cannot be written: {error}"
        return Turn(
            backend=self.name,
            seconds=round(time.monotonic() - began, 3),
            cost_usd=spent.cost_usd,
            said=said[-SAID_CHARS:],
            failure=failure,
        )

    def _prompt(self, task: Task) -> str:
        """The task, the format, and every file of the workspace that there is room for."""
        parts = [task.prompt, FORMAT]
        room = self.max_prompt_chars - sum(map(len, parts))
        for name, text in _texts(task.folder):
            part = f"\n==== {name}\n{text}"
            # Rules and sources come first: what does not fit is history.
            if len(part) <= room:
                parts.append(part)
                room -= len(part)
        return "".join(parts)

    def _ask(self, messages: Sequence[Mapping[str, str]], spent: _Usage, until: float) -> str:
        body = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": self.max_tokens,
            "response_format": {"type": "json_object"},
        }
        with httpx.Client(timeout=httpx.Timeout(60.0, read=self.timeout_s)) as client:
            for attempt in range(1, self.attempts + 1):
                status, headers, data = self._post(client, body, until)
                if status == 200:
                    return _content(data, spent)
                if status != 429 and status < 500:
                    raise _Failed(f"status {status}: {data[:500].decode(errors='replace')}")
                pause = self._pause(attempt, headers)
                if attempt == self.attempts or time.monotonic() + pause > until:
                    raise _Failed(f"status {status} after {attempt} attempts")
                self.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _post(
        self, client: httpx.Client, body: Any, until: float
    ) -> tuple[int, httpx.Headers, bytes]:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        url, data = f"{self.url}/chat/completions", bytearray()
        try:
            with client.stream("POST", url, json=body, headers=headers) as response:
                for part in response.iter_bytes():
                    data += part
                    if len(data) > self.max_bytes:
                        raise _Failed(f"an answer of more than {self.max_bytes} bytes")
                    if time.monotonic() > until:
                        raise _Failed(f"no answer within {self.timeout_s:g} s")
                return response.status_code, response.headers, bytes(data)
        except httpx.HTTPError as error:
            raise _Failed(f"{self.url}: {type(error).__name__}: {error}") from None

    def _pause(self, attempt: int, headers: httpx.Headers) -> float:
        """Doubling from a second, with jitter so that many clients do not come back at once; what
        the server asks for where that is longer, up to a minute."""
        told = headers.get("retry-after", "")
        wanted = float(told) if told.isdecimal() else 0.0
        return min(max(2.0 ** (attempt - 1) * self.rng.uniform(0.5, 1.5), wanted), 60.0)


class _Usage:
    """What the requests of a turn cost; None once one did not say."""

    def __init__(self, prices: Prices | None) -> None:
        self._prices = prices
        self.cost_usd: float | None = 0.0

    def add(self, usage: Any) -> None:
        told = usage if isinstance(usage, dict) else {}
        tokens = [told.get(f"{kind}_tokens") for kind in Prices._fields]
        counts = [number for number in tokens if isinstance(number, int) and number >= 0]
        if self.cost_usd is None or self._prices is None or len(counts) < len(tokens):
            self.cost_usd = None
            return
        self.cost_usd += sum(n * p for n, p in zip(counts, self._prices, strict=True)) / 1e6


def _content(data: bytes, spent: _Usage) -> str:
    try:
        document = json.loads(data)
        spent.add(document.get("usage"))
        choice = document["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        spent.add(None)
        raise _Failed("the endpoint's answer is not that of a chat completion") from None
    if reason == "length":
        raise _Failed("the answer was cut off: it is longer than max_tokens")
    if not isinstance(text, str):
        raise _Failed("an answer without text")
    return text


def _apply(answer: Answer, folder: Path) -> None:
    for name in answer.files:
        files.checked(name)
    for name, text in answer.files.items():
        if text is None:
            (folder / name).unlink(missing_ok=True)
        else:
            files.write(folder, name, text)


def _texts(folder: Path) -> Iterator[tuple[str, str]]:
    """Files of a workspace, what an agent cannot do without first."""
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    order = ("AGENTS.md", "src/", "csrc/", "skills/", "context/", "LESSONS.md", "summary.md")

    def rank(name: str) -> tuple[int, str]:
        return next((i for i, head in enumerate(order) if name.startswith(head)), len(order)), name

    for name in sorted(names, key=rank):
        if name not in (TASK, "CLAUDE.md"):  # the same text as AGENTS.md
            try:
                yield name, (folder / name).read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


# ---- a script -----------------------------------------------------------------------------------


class Replacement(Model):
    file: str
    old: str
    new: str


class Scripted(Model):
    """One turn of a script: whole `files`, then `replace` in place; `failure` as if the backend had
    failed."""

    files: dict[str, str | None] = {}
    replace: tuple[Replacement, ...] = ()
    cost_usd: float | None = 0.0
    said: str = ""
    failure: str = ""


class Script(Model):
    turns: tuple[Scripted, ...]


@dataclass(frozen=True)
class Replay:
    """Turns from a file, by their number, so that an interrupted campaign goes on as it began; past
    its end nothing is changed any more."""

    script: Script
    ceiling_usd: float = 0.0
    name: str = "replay"

    @staticmethod
    def read(path: Path) -> Replay:
        """Raises SourceError."""
        try:
            return Replay(Script.model_validate_json(path.read_bytes()))
        except OSError as error:
            raise SourceError(f"{path}: {error}") from error
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise SourceError(f"{path}: {where}: {first['msg']}") from None

    def turn(self, task: Task) -> Turn:
        if task.number >= len(self.script.turns):
            return Turn(backend=self.name, cost_usd=0.0, said="the script is over")
        scripted = self.script.turns[task.number]
        failure = scripted.failure
        try:
            _apply(Answer(files=scripted.files), task.folder)
            for each in scripted.replace:
                path = task.folder / files.checked(each.file)
                text = path.read_text(encoding="utf-8")
                if text.count(each.old) != 1:
                    failure = f"{each.file}: {text.count(each.old)} places to replace, expected 1"
                    break
                files.write(task.folder, each.file, text.replace(each.old, each.new))
        except files.Refused as error:
            failure = f"handed in a file that is none: {error}"
        except OSError as error:
            failure = f"the script does not fit: {error}"
        return Turn(
            backend=self.name, cost_usd=scripted.cost_usd, said=scripted.said, failure=failure
        )
