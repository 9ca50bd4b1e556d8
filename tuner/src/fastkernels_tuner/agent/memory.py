"""What an agent campaign remembers: events of the store's ledger, and views of them.

Every step is an event, appended under the controller's lease; `History` is what they amount to, so
that another process goes on where the last one ended, and the Markdown that agents and people read
can be written again at any time. A number is taken by an event alone: an experiment with a plan and
no result is reserved, whatever happened to who reserved it.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fastkernels_tuner.agent import proposal
from fastkernels_tuner.agent.backends import Account, Role, Turn
from fastkernels_tuner.agent.proposal import Plan
from fastkernels_tuner.agent.workspace import Patch
from fastkernels_tuner.model import Knob, Model, canonical, digest
from fastkernels_tuner.store import Event, Lease, Store

BEGUN, RESERVED = "agent.begun", "agent.reserved"
TURN_BEGUN, TURN_ENDED = "agent.turn.begun", "agent.turn.ended"
LEVEL, DECIDED = "agent.level", "agent.decided"
LESSON, CONTRADICTED = "agent.lesson", "agent.lesson.contradicted"
KINDS = (BEGUN, RESERVED, TURN_BEGUN, TURN_ENDED, LEVEL, DECIDED, LESSON, CONTRADICTED)

Choice = Literal["archive", "promote_global", "promote_dispatch", "reject"]
LEVELS = ("quick", "knobs", "stride", "full", "harden")


# ---- events -------------------------------------------------------------------------------------


class Begun(Model):
    """What the campaign is about. `files`: blob of the shipped files. `limit_usd`: None is none."""

    route: str
    files: str
    constitution: dict[str, Any]
    limit_usd: float | None = None
    planned: int = 20  # experiments that the level of the tests is spread over
    is_safe: bool = True  # whether agents run in a sandbox: without one nothing is promoted
    backend: dict[str, Any] = {}  # as the command line has it, to be made again


class Reserved(Model):
    """`plan`: a critic's, for the next turn to carry out."""

    experiment: int
    by: Role
    base: str  # blob of the files that are changed
    plan: Plan | None = None


class TurnBegun(Model):
    turn: int
    role: Role
    experiment: int
    reserve_usd: float


class TurnEnded(Model):
    """`patch`: blob; empty where nothing changed. `refused`: by name and reason."""

    turn: int
    role: Role
    experiment: int
    came: Turn
    cost_usd: float
    patch: str = ""
    plan: Plan | None = None
    refused: str = ""


class Level(Model):
    """What a level found out: `evidence` is a blob, the rest its summary. A `fail` is the
    candidate's fault, after a `stop` it is not worth going on, or nothing is proven."""

    experiment: int
    level: Literal["quick", "knobs", "stride", "full", "harden"]
    outcome: Literal["pass", "fail", "stop"]
    cause: str
    message: str
    evidence: str
    device_s: float = 0.0


class Decided(Model):
    """The end of an experiment. `files`: blob of what was measured; `regimes`: ids of those that
    it serves from now on."""

    experiment: int
    choice: Choice
    cause: str
    message: str
    files: str = ""
    config: dict[str, Knob] = {}
    structure: str = ""
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    regimes: tuple[str, ...] = ()
    device_s: float = 0.0
    constitution: str = ""
    policy: str = ""

    @property
    def is_promotion(self) -> bool:
        return self.choice in ("promote_global", "promote_dispatch")


# ---- lessons ------------------------------------------------------------------------------------

LessonKind = Literal["anti_pattern", "mechanism", "constant", "measurement"]
Status = Literal["active", "unverified", "expired", "contradicted"]


class Lesson(Model):
    """A claim and what it rests on. `subject` is what it is about (a family, a knob); a later one
    of the same subject and scope whose interval lies on the other side of zero contradicts it.

    A `constant` holds for one structure of the kernel, a `mechanism` for one toolchain; what has no
    evidence is `unverified`. None of these is shown to an agent as known.
    """

    kind: LessonKind
    subject: str
    claim: str
    scope: dict[str, str]  # op, route, device
    evidence: tuple[int, ...]  # experiments
    low: float | None = None  # of the gain
    high: float | None = None
    structure: str = ""
    toolchain: str = ""

    def status(self, structure: str, toolchain: str, contradicted: Iterable[str]) -> Status:
        if self.id in contradicted:
            return "contradicted"
        if not self.evidence:
            return "unverified"
        if self.kind == "constant" and self.structure != structure:
            return "expired"
        if self.kind == "mechanism" and self.toolchain != toolchain:
            return "expired"
        return "active"

    def contradicts(self, other: Lesson) -> bool:
        if (self.subject, self.scope, bool(self.evidence)) != (other.subject, other.scope, True):
            return False
        mine, theirs = _side(self), _side(other)
        return mine * theirs < 0


def _side(lesson: Lesson) -> int:
    """On which side of zero its gain lies; 0 where that is not known."""
    if lesson.low is not None and lesson.low > 0:
        return 1
    return -1 if lesson.high is not None and lesson.high < 0 else 0


def structure_of(files: Mapping[str, str]) -> str:
    """Identity of what files do, apart from comments, layout, and the values of numbers."""
    return digest(canonical({name: _structure(name, text) for name, text in files.items()}))[:16]


def _structure(name: str, text: str) -> str:
    if name.endswith(".py"):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            return text
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and type(node.value) in (int, float):
                node.value = 0
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and _is_text(body[0]):
                body[0] = ast.Pass()
        return ast.dump(tree)
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    text = re.sub(r"\b(0[xX][0-9a-fA-F]+|\d+(\.\d+)?([eE][-+]?\d+)?)[uUlLfF]*\b", "0", text)
    return " ".join(text.split())


def _is_text(node: ast.AST) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)  # type: ignore[attr-defined]


# ---- history ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    """One number of the ledger: as far as it has come."""

    number: int
    reserved: Reserved
    turns: tuple[TurnEnded, ...] = ()
    levels: Mapping[str, Level] = field(default_factory=dict)
    decided: Decided | None = None

    @property
    def turned(self) -> TurnEnded | None:
        """The turn that brought a change, or something to be refused."""
        return next((t for t in self.turns if t.patch or t.refused), None)

    @property
    def plan(self) -> Plan | None:
        turned = self.turned
        return (turned and turned.plan) or self.reserved.plan

    @property
    def state(self) -> str:
        if self.decided is not None:
            return self.decided.choice
        if self.levels:
            return [name for name in LEVELS if name in self.levels][-1]
        return "planned" if self.turned else "reserved"


@dataclass(frozen=True)
class History:
    """What the events of a campaign amount to."""

    begun: Begun | None = None
    experiments: tuple[Experiment, ...] = ()
    account: Account = field(default_factory=Account)
    turns: int = 0  # begun
    open_turn: TurnBegun | None = None  # one that nobody ended
    critics: tuple[TurnEnded, ...] = ()
    lessons: tuple[Lesson, ...] = ()
    contradicted: frozenset[str] = frozenset()

    @staticmethod
    def of(events: Iterable[Event]) -> History:
        history = History()
        for event in events:
            if event.kind in KINDS:
                history = history.after(event.kind, event.payload)
        return history

    def after(self, kind: str, payload: Mapping[str, Any]) -> History:
        """With one more event."""
        if kind == BEGUN:
            begun = Begun(**payload)
            return replace(self, begun=begun, account=Account(limit_usd=begun.limit_usd))
        if kind == RESERVED:
            reserved = Reserved(**payload)
            made = Experiment(reserved.experiment, reserved)
            return replace(self, experiments=(*self.experiments, made))
        if kind == TURN_BEGUN:
            turn = TurnBegun(**payload)
            account = self.account
            if self.open_turn is not None:  # it was cut short: nobody knows what it cost
                spent = account.spent_usd + self.open_turn.reserve_usd
                account = account.model_copy(update={"spent_usd": spent})
            return replace(self, turns=turn.turn + 1, open_turn=turn, account=account)
        if kind == TURN_ENDED:
            return self._turned(TurnEnded(**payload))
        if kind == LEVEL:
            level = Level(**payload)
            return self._changed(
                level.experiment, lambda e: {"levels": {**e.levels, level.level: level}}
            )
        if kind == DECIDED:
            decided = Decided(**payload)
            return self._changed(decided.experiment, lambda e: {"decided": decided})
        if kind == LESSON:
            return replace(self, lessons=(*self.lessons, Lesson(**payload)))
        return replace(self, contradicted=self.contradicted | {payload["lesson"]})

    def _turned(self, ended: TurnEnded) -> History:
        has_changed = bool(ended.patch or ended.refused or (ended.role == "critic" and ended.plan))
        account = self.account.book(ended.cost_usd, has_changed=has_changed)
        history = replace(self, account=account, open_turn=None)
        if ended.role == "critic":
            return replace(history, critics=(*self.critics, ended))
        return history._changed(ended.experiment, lambda e: {"turns": (*e.turns, ended)})

    def _changed(self, number: int, change: Callable[[Experiment], dict[str, Any]]) -> History:
        found = tuple(
            replace(each, **change(each)) if each.number == number else each
            for each in self.experiments
        )
        return replace(self, experiments=found)

    @property
    def next_number(self) -> int:
        return 1 + max((each.number for each in self.experiments), default=0)

    @property
    def open(self) -> Experiment | None:
        """The experiment without a result; there is one at most."""
        return next((each for each in self.experiments if each.decided is None), None)

    @property
    def decisions(self) -> tuple[Decided, ...]:
        return tuple(each.decided for each in self.experiments if each.decided is not None)

    def champions(self) -> dict[str, Decided]:
        """What serves a regime, of those where that is no longer what is shipped."""
        found: dict[str, Decided] = {}
        for decided in self.decisions:
            if decided.is_promotion:
                found |= dict.fromkeys(decided.regimes, decided)
        return found

    def best(self) -> Decided | None:
        """What the next change begins from: the last promotion."""
        promotions = [decided for decided in self.decisions if decided.is_promotion]
        return promotions[-1] if promotions else None

    def device_s(self) -> float:
        return sum(level.device_s for each in self.experiments for level in each.levels.values())


class Memory:
    """The ledger of one campaign, written under its lease."""

    def __init__(self, store: Store, campaign: str, lease: Lease) -> None:
        self._store, self._campaign, self._lease = store, campaign, lease
        self.history = History.of(store.events(campaign))

    def add(self, kind: str, event: Model) -> None:
        """Raises LeaseLost where another controller has taken over."""
        self._store.append(self._campaign, kind, event.model_dump(mode="json"), self._lease)
        self.history = self.history.after(kind, event.model_dump(mode="json"))

    def contradict(self, lesson: Lesson) -> None:
        payload = {"lesson": lesson.id}
        self._store.append(self._campaign, CONTRADICTED, payload, self._lease)
        self.history = self.history.after(CONTRADICTED, payload)

    def learn(self, lesson: Lesson) -> None:
        """Once; what it contradicts is contradicted from now on."""
        if lesson.id in {each.id for each in self.history.lessons}:
            return
        for other in self.history.lessons:
            if lesson.contradicts(other) and other.id not in self.history.contradicted:
                self.contradict(other)
        self.add(LESSON, lesson)

    def keep(self, data: Any) -> str:
        """JSON as a blob; its digest, which an event has to name."""
        return self._store.put(canonical(data).encode())

    def kept(self, blob: str) -> Any:
        return json.loads(self._store.get(blob))


# ---- views --------------------------------------------------------------------------------------


def views(
    history: History,
    kept: Callable[[str], Any],
    structure: str,
    toolchain: str,
    *,
    show_expired: bool = False,
) -> dict[str, str]:
    """Markdown by name, for agents and people. `kept` reads a blob; `structure` and `toolchain` are
    today's, by which lessons hold or have expired."""
    shown: tuple[Status, ...] = ("active", "expired") if show_expired else ("active",)
    lessons = [
        (lesson, lesson.status(structure, toolchain, history.contradicted))
        for lesson in history.lessons
    ]
    found = {
        "summary.md": _summary(history),
        "LESSONS.md": _lessons([each for each in lessons if each[1] in shown]),
    }
    for each in history.experiments:
        head = f"experiments/exp_{each.number:03d}"
        if each.plan is not None:
            found[f"{head}/plan.md"] = f"# Experiment {each.number}\n\n{proposal.render(each.plan)}"
        if each.decided is not None:
            found[f"{head}/result.md"] = _result(each)
        if each.levels:
            found[f"{head}/bench.log"] = _log(each)
        turned = each.turned
        if turned is not None and turned.patch:
            patch = Patch(**kept(turned.patch))
            found[f"{head}/change.diff"] = patch.diff(kept(each.reserved.base))
    return found


def write_views(folder: Path, texts: Mapping[str, str], files: Mapping[str, str]) -> None:
    """Into a campaign's folder, for people: the views anew, and the present kernel."""
    for name in ("experiments", "kernel"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name, text in {**texts, **{f"kernel/{n}": t for n, t in files.items()}}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _summary(history: History) -> str:
    lines = [
        "# Experiments",
        "",
        "| exp | change | family | gain | decision | why |",
        "|---|---|---|---|---|---|",
    ]
    for each in history.experiments:
        plan, decided = each.plan, each.decided
        change = _cell(plan.change if plan else "")
        family = _cell(plan.family if plan else "")
        if decided is None:
            lines.append(f"| {each.number} | {change} | {family} | | {each.state} | |")
            continue
        why = _cell(f"{decided.cause}: {decided.message}")
        lines.append(
            f"| {each.number} | {change} | {family} | {_gain(decided)} | {decided.choice} | {why} |"
        )
    account = history.account
    limit = "" if account.limit_usd is None else f" of ${account.limit_usd:.2f}"
    lines += ["", f"{history.turns} turns, ${account.spent_usd:.2f}{limit},"
              f" {history.device_s():.1f} s on the device."]  # fmt: skip
    return "\n".join(lines) + "\n"


def _gain(decided: Decided) -> str:
    if decided.gain is None:
        return ""
    if decided.low is None or decided.high is None:
        return f"{decided.gain:.2%}"
    return f"{decided.gain:.2%} ({decided.low:.2%} to {decided.high:.2%})"


def _result(each: Experiment) -> str:
    decided = each.decided
    assert decided is not None
    lines = [
        f"# Experiment {each.number}: {decided.choice}",
        "",
        f"{decided.cause}: {decided.message}",
    ]
    if gain := _gain(decided):
        lines += ["", f"Gain against the best before it: {gain}."]
    if decided.regimes:
        lines += ["", f"Serves {len(decided.regimes)} regimes: {', '.join(decided.regimes)}."]
    if decided.config:
        lines += ["", f"Config: `{decided.config}`."]
    cost = sum(turn.cost_usd for turn in each.turns)
    lines += ["", f"{len(each.turns)} turns, ${cost:.2f}, {decided.device_s:.1f} s on the device."]
    return "\n".join(lines) + "\n"


def _log(each: Experiment) -> str:
    levels = [each.levels[name] for name in LEVELS if name in each.levels]
    return "".join(
        f"{level.level}: {level.outcome}: {level.message}  [{level.device_s:.1f} s, "
        f"{level.evidence[:12]}]\n"
        for level in levels
    )


def _lessons(lessons: Sequence[tuple[Lesson, Status]]) -> str:
    lines = ["# Lessons", "", "Each rests on the experiments that it names.", ""]
    for lesson, status in lessons:
        evidence = ", ".join(f"exp_{number:03d}" for number in lesson.evidence)
        kind = lesson.kind if status == "active" else f"{status} {lesson.kind}"
        lines.append(f"- {kind}, {lesson.subject}: {_cell(lesson.claim)} ({evidence})")
    return "\n".join(lines if lessons else [*lines, "None yet."]) + "\n"


def _cell(text: str) -> str:
    """One line of a table, whatever an agent wrote."""
    return " ".join(text.split()).replace("|", "/")[:200]
