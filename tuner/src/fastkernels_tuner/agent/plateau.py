"""When a campaign is stuck, how, and what is done about it: computed, not felt.

Pure functions of the history. A signal counts experiments since the last critic or promotion, so
that each is answered once; every answer in a row is one rung further up the ladder.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from fastkernels_tuner.agent.memory import Decided, Experiment, History
from fastkernels_tuner.agent.policy import Constitution
from fastkernels_tuner.agent.skills import TECHNIQUES
from fastkernels_tuner.model import Workload
from fastkernels_tuner.trials import triviality

REPETITION = "repetition"
"""The cause of an experiment that was rejected because its files are those of a dead one."""

NORMAL_95 = 1.645  # one-sided

Kind = Literal["plateau", "wall", "repetition", "budget"]
Rung = Literal["critic", "other_backend", "restart", "reopen", "stop"]
LADDER: tuple[Rung, ...] = ("critic", "other_backend", "restart", "reopen", "stop")
"""What follows signals with no promotion between them: a critic; the same with another backend; a
new beginning from the shipped files; one that sees expired lessons, too; the end."""


class Signal(NamedTuple):
    kind: Kind
    reason: str


def assess(history: History, constitution: Constitution) -> Signal | None:
    """What is wrong with the last experiments, if anything."""
    recent = _since_last_answer(history)
    for find in (_wall, _repetition, _plateau, _budget):
        reason = find(recent, constitution)
        if reason:
            kind: Kind = find.__name__.strip("_")  # type: ignore[assignment]
            return Signal(kind, reason)
    return None


def rung(history: History) -> Rung:
    """What the next signal is answered with."""
    since = max((d.experiment for d in history.decisions if d.is_promotion), default=0)
    answered = sum(critic.experiment > since for critic in history.critics)
    return LADDER[min(answered, len(LADDER) - 1)]


def last_rung(history: History) -> Rung | None:
    """What the last critic since a promotion was; None where there was none."""
    since = max((d.experiment for d in history.decisions if d.is_promotion), default=0)
    answered = sum(critic.experiment > since for critic in history.critics)
    return LADDER[min(answered, len(LADDER)) - 1] if answered else None


def _since_last_answer(history: History) -> list[Experiment]:
    """Decided experiments since the last critic, or the last promotion if that was later; with it,
    since a win is part of the picture."""
    critic = max((critic.experiment for critic in history.critics), default=0)
    return [e for e in history.experiments if e.decided is not None and e.number >= critic]


def _decided(recent: Sequence[Experiment]) -> list[Decided]:
    return [each.decided for each in recent if each.decided is not None]


def _wall(recent: Sequence[Experiment], constitution: Constitution) -> str:
    """Correctness: the same cause again and again."""
    last = _decided(recent)[-constitution.wall :]
    causes = {each.cause for each in last if each.choice == "reject"}
    if len(last) < constitution.wall or len(causes) != 1 or causes == {REPETITION}:
        return ""
    if any(each.choice != "reject" for each in last):
        return ""
    return f"{len(last)} experiments in a row were rejected: {causes.pop()}"


def _repetition(recent: Sequence[Experiment], constitution: Constitution) -> str:
    """What is dead is tried again: the same files, or one structure with other numbers."""
    last = _decided(recent)[-constitution.wall :]
    repeated = [each for each in last if each.cause == REPETITION]
    if len(repeated) >= 2:
        return f"{len(repeated)} of the last {len(last)} experiments had been made before"
    structures = {each.structure for each in last}
    is_one = len(last) == constitution.wall and len(structures) == 1 and structures != {""}
    if is_one and not any(each.is_promotion for each in last):
        return f"{len(last)} experiments in a row vary the numbers of one structure"
    return ""


def _plateau(recent: Sequence[Experiment], constitution: Constitution) -> str:
    """No promotion, and all that was measured is worth nothing even if luck was against it. Wins,
    however small, are none: neither are experiments that are not measured."""
    last = _decided(recent)[-constitution.window :]
    measured = [each for each in last if each.gain is not None]
    if len(last) < constitution.window or len(measured) < 2:
        return ""
    if any(each.is_promotion for each in last):
        return ""
    upper = _upper_bound(measured)
    if upper >= constitution.plateau_gain:
        return ""
    return f"the last {len(last)} experiments gained at most {upper:.2%} on average"


def _upper_bound(measured: Sequence[Decided]) -> float:
    """Of the mean gain (95 %), from the intervals of each."""
    gains = [each.gain or 0.0 for each in measured]
    errors = [
        (each.high - each.low) / (2 * NORMAL_95)
        for each in measured
        if each.low is not None and each.high is not None
    ]
    spread = math.sqrt(sum(error**2 for error in errors)) / len(gains)
    return sum(gains) / len(gains) + NORMAL_95 * spread


def _budget(recent: Sequence[Experiment], constitution: Constitution) -> str:
    """The device's time buys too little."""
    last = _decided(recent)[-constitution.window :]
    hours = sum(each.device_s for each in last) / 3600
    if len(last) < constitution.window or hours <= 0:
        return ""
    gained = sum(each.gain or 0.0 for each in last if each.is_promotion)
    if gained / hours >= constitution.min_gain_per_hour:
        return ""
    return f"{gained:.2%} gained in {hours:.2f} hours on the device"


# ---- diagnoses ----------------------------------------------------------------------------------


def diagnoses(
    history: History, op: str, files: Mapping[str, str], workloads: Sequence[Workload]
) -> str:
    """diagnoses.md: what a critic has to work through, each with what the machine says about it."""
    found = (
        ("Repetition loop", _loops(history)),
        ("Local minimum", _local_minimum(history)),
        ("Correctness wall", _causes(history)),
        ("Wrong bottleneck", _bottlenecks(history)),
        ("Missing fundamental technique", _missing(history, op)),
        ("Over-engineering", _growth(history)),
        ("Ignored earlier plan", _ignored(history)),
        ("Buffers made in the call", _buffers(files)),
        ("Workload shortcut missed", _shortcuts(op, workloads)),
    )
    lines = ["# Diagnoses", "", "Work through all nine; cite experiments by number.", ""]
    lines += [f"{n}. **{name}.** {says}" for n, (name, says) in enumerate(found, start=1)]
    return "\n".join(lines) + "\n"


def _numbers(experiments: Sequence[int]) -> str:
    return ", ".join(f"exp_{number:03d}" for number in experiments) or "none"


def _loops(history: History) -> str:
    repeated = [d.experiment for d in history.decisions if d.cause == REPETITION]
    return f"Made before: {_numbers(repeated)}."


def _families(history: History) -> dict[str, list[Experiment]]:
    found: dict[str, list[Experiment]] = {}
    for each in history.experiments:
        if each.plan is not None and each.decided is not None:
            found.setdefault(each.plan.family, []).append(each)
    return found


def _local_minimum(history: History) -> str:
    small = {
        family: [e.number for e in each if e.decided and 0 < (e.decided.gain or 0.0) < 0.05]
        for family, each in _families(history).items()
    }
    stuck = [f"{family} ({_numbers(each)})" for family, each in small.items() if len(each) >= 5]
    return f"Five or more small gains of one family: {'; '.join(stuck) or 'none'}."


def _causes(history: History) -> str:
    causes = Counter(d.cause for d in history.decisions if d.choice == "reject")
    told = ", ".join(f"{cause} {count} times" for cause, count in causes.most_common())
    return f"Rejections: {told or 'none'}."


def _bottlenecks(history: History) -> str:
    declared: dict[str, list[Decided]] = {}
    for each in history.experiments:
        if each.plan is not None and each.decided is not None:
            declared.setdefault(each.plan.bottleneck, []).append(each.decided)
    told = [
        f"{name}: {sum(d.is_promotion for d in each)} of {len(each)} promoted"
        for name, each in declared.items()
    ]
    return f"Declared, without counters: {'; '.join(told) or 'none'}. See profile.md."


def _missing(history: History, op: str) -> str:
    tried = " ".join(
        f"{e.plan.family} {e.plan.change} {e.plan.hypothesis}".lower().replace("_", " ")
        for e in history.experiments
        if e.plan is not None
    )
    missing = [each for each in TECHNIQUES.get(op, ()) if each.lower() not in tried]
    return f"Not named by any plan: {', '.join(missing) or 'none'}."


def _growth(history: History) -> str:
    unclear = [
        d.experiment
        for d in history.decisions
        if d.low is not None and d.high is not None and d.low <= 0 <= d.high
    ]
    return f"Changes whose gain may as well be nothing: {_numbers(unclear)}."


def _ignored(history: History) -> str:
    off = [
        e.number
        for e in history.experiments
        if e.reserved.plan is not None and e.plan is not None
        and e.plan.family != e.reserved.plan.family
    ]  # fmt: skip
    return f"A critic's plan that was not followed: {_numbers(off)}."


_ALLOCATIONS = re.compile(r"\b(?:torch\.|\.)(?:empty|zeros|ones|new_\w+|clone|full)(?:_like)?\(")


def _buffers(files: Mapping[str, str]) -> str:
    found = {name: len(_ALLOCATIONS.findall(text)) for name, text in files.items()}
    told = [f"{name}: {count}" for name, count in found.items() if count]
    return f"Allocations and fills: {'; '.join(told) or 'none'}."


def _shortcuts(op: str, workloads: Sequence[Workload]) -> str:
    trivial = sum(bool(triviality(op, workload.build())) for workload in workloads)
    return f"{trivial} of {len(workloads)} workloads are trivial; see workload_profile.md."
