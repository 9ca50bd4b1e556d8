"""One experiment after another: assess, plan, implement, quick, stride, full, harden, log, decide.

A step does one thing and ends with an event of the ledger; the next step follows from the events
alone. Killed anywhere, another process goes on: a turn that nobody ended is made again, a level
that nobody finished is measured again, and what is in the ledger is never done twice.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastkernels_tuner.agent import memory, plateau, policy, proposal, skills
from fastkernels_tuner.agent.backends import TASK, Backend, Role, Task, cost_of
from fastkernels_tuner.agent.files import Refused
from fastkernels_tuner.agent.levels import Lab, Levels, Version
from fastkernels_tuner.agent.memory import (
    Choice,
    Decided,
    Experiment,
    Lesson,
    Level,
    Memory,
    Reserved,
    TurnBegun,
    TurnEnded,
    structure_of,
)
from fastkernels_tuner.agent.policy import Constitution
from fastkernels_tuner.agent.proposal import Plan
from fastkernels_tuner.agent.workspace import PLAN, Permit, Workspace
from fastkernels_tuner.campaign import Campaign
from fastkernels_tuner.controller import StageFailed
from fastkernels_tuner.errors import OutOfBudget
from fastkernels_tuner.model import (
    Cause,
)

UNSAFE, TOO_LONG = "unsandboxed", "over_budget"


@dataclass
class Loop:
    """A campaign in the hands of agents. `optimisers`: the first one works, the others are for when
    it is stuck. `until` is a time of `clock`; `max_device_s` and `rounds` are the campaign's."""

    campaign: Campaign
    memory: Memory
    lab: Lab
    constitution: Constitution
    optimisers: Sequence[Backend]
    critic: Backend
    rounds: int
    max_device_s: float | None = None
    until: float | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.levels = Levels(
            self.campaign, self.memory, self.lab, self.constitution, lambda: self.clock()
        )

    def run(self) -> str:
        """Until the rounds are over, or nothing helps any more: which of them. Raises OutOfBudget,
        GivenUp, and what measuring raises; it can go on later then."""
        try:
            while (reason := self.step()) is None:
                pass
        finally:
            self.write_views()
        return reason

    def step(self) -> str | None:
        """The next event; why there is none any more."""
        history = self.memory.history
        for each in history.experiments:
            for lesson in self._lessons(each):
                self.memory.learn(lesson)
        experiment = history.open
        if experiment is None:
            if len(history.decisions) >= self.rounds:
                return f"the rounds are over: {self.rounds}"
            self._require_time()
            return self._assess()
        turned = experiment.turned
        if turned is None:
            self._require_time()
            self._optimise(experiment)
        elif turned.refused:
            self._decide(experiment, "reject", Cause.STATIC_BAN.value, turned.refused)
        else:
            self._climb(experiment)
        return None

    def _require_time(self) -> None:
        if self.until is not None and self.clock() > self.until:
            raise OutOfBudget(f"{self.campaign.id}: the time is used up; resume it later")
        spent = self.memory.history.device_s()
        if self.max_device_s is not None and spent >= self.max_device_s:
            raise OutOfBudget(
                f"{self.campaign.id}: {spent:.0f} s on the device, at most {self.max_device_s:.0f}"
            )

    # ---- assess ---------------------------------------------------------------------------------

    def _assess(self) -> str | None:
        """Reserves the next experiment; where the campaign is stuck after a critic's look at it."""
        history = self.memory.history
        signal = plateau.assess(history, self.constitution)
        if signal is not None:
            step = plateau.rung(history)
            if step == "stop":
                return f"{signal.kind}: {signal.reason}; nothing on the ladder is left"
            self.campaign.say(f"{signal.kind}: {signal.reason}; {step}")
            self._criticise(signal)
            history = self.memory.history
        critics = [c for c in history.critics if c.experiment == history.next_number]
        advice = critics[-1].plan if critics else None
        self.memory.add(
            memory.RESERVED,
            Reserved(
                experiment=history.next_number,
                by="optimiser" if advice is None else "critic",
                base=self.levels.base().blob,
                plan=advice,
            ),
        )
        return None

    # ---- turns ----------------------------------------------------------------------------------

    def _criticise(self, signal: plateau.Signal) -> None:
        """A turn that sees measurements alone, and edits nothing; its plan is the next one."""
        number = self.memory.history.next_number
        task = (
            f"# {signal.kind}: {signal.reason}\n\nFind out why, with diagnoses.md, summary.md and "
            f"experiments/. Change no file. Write {PLAN}: the one experiment worth most now,"
            " as AGENTS.md says.\n"
        )
        seen = {
            name: text for name, text in self._views().items() if not name.endswith("/plan.md")
        }  # what the optimiser believed is no evidence
        seen["diagnoses.md"] = plateau.diagnoses(
            self.memory.history, self.campaign.spec.op, self.levels.shipped.files, self.levels.rows
        )
        base = self.levels.base()
        context = {**self._context(base), **seen, **base.files, TASK: task}
        self._turn("critic", self.critic, number, Workspace(self._folder, Permit(), {}, context))

    def _optimise(self, experiment: Experiment) -> None:
        files = self.memory.kept(experiment.reserved.base)
        context = {
            **self._context(self.levels.base()),
            **self._views(),
            TASK: self._task(experiment),
        }
        permit = self.constitution.permit(self.campaign.spec.op, files)
        backend = self.optimisers[0]
        if plateau.last_rung(self.memory.history) == "other_backend":
            backend = self.optimisers[-1]
        workspace = Workspace(self._folder, permit, files, context)
        self._turn("optimiser", backend, experiment.number, workspace, experiment.reserved.plan)

    def _turn(
        self,
        role: Role,
        backend: Backend,
        number: int,
        workspace: Workspace,
        advice: Plan | None = None,
    ) -> None:
        history = self.memory.history
        history.account.require(backend.ceiling_usd)
        turn, ceiling = history.turns, backend.ceiling_usd
        self.memory.add(
            memory.TURN_BEGUN,
            TurnBegun(turn=turn, role=role, experiment=number, reserve_usd=ceiling),
        )
        workspace.create()
        came = backend.turn(Task(role, turn, workspace.folder))
        patch, chosen, refused = "", None, ""
        if not came.failure:
            try:
                patch, chosen = self._collect(role, workspace, advice)
            except Refused as error:
                refused = str(error)
        shutil.rmtree(workspace.folder, ignore_errors=True)
        for what in (came.failure, refused):
            if what:
                self.campaign.say(f"turn {turn}, {role}: {what}")
        self.memory.add(
            memory.TURN_ENDED,
            TurnEnded(
                turn=turn,
                role=role,
                experiment=number,
                came=came,
                cost_usd=cost_of(came, ceiling),
                patch=patch,
                plan=chosen,
                refused=refused,
            ),
        )

    def _collect(
        self, role: Role, workspace: Workspace, advice: Plan | None
    ) -> tuple[str, Plan | None]:
        """The blob of the patch, and the plan; nothing of either where nothing changed. Raises
        Refused, also over a patch that breaks the constitution."""
        patch, text = workspace.collect()
        if not patch and not text:
            return "", None
        chosen = advice if not text and advice is not None else proposal.parse(text)
        if role == "critic":
            return "", chosen
        if not patch and not chosen.parameters:
            return "", None
        for breach in policy.breaches(self.constitution, patch, workspace.base):
            raise Refused(next(iter(patch.files), PLAN), f"breaks {breach.by!r}: {breach}")
        return self.memory.keep(patch.model_dump(mode="json")), chosen

    @property
    def _folder(self) -> Path:
        return self.campaign.folder / "workspace"

    def _task(self, experiment: Experiment) -> str:
        parts = [f"# Experiment {experiment.number}", ""]
        plan_ = experiment.reserved.plan
        if plan_ is not None:
            parts += ["A critic has planned it; carry it out.", "", proposal.render(plan_)]
        else:
            parts += ["Plan one change, and make it.", ""]
        last = self.memory.history.decisions
        if last:
            parts += [f"The last one: {last[-1].choice}, {last[-1].cause}: {last[-1].message}", ""]
        parts += [f"Write {PLAN} and change the kernel, as AGENTS.md says.", ""]
        return "\n".join(parts)

    def _context(self, base: Version) -> dict[str, str]:
        """What an agent can read besides the history."""
        campaign, op = self.campaign, self.campaign.spec.op
        rules = policy.render(self.constitution, op, self.levels.route.name, base.files)
        return {
            "AGENTS.md": rules,
            "CLAUDE.md": rules,
            **skills.context(op),
            **skills.skills(
                campaign.operator,
                self.levels.route,
                campaign.info,
                self.levels.rows,
                campaign.policy,
            ),
        }

    def _views(self) -> dict[str, str]:
        """The history as Markdown. What expired is shown as if it held where nothing else helps."""
        is_reopened = plateau.last_rung(self.memory.history) == "reopen"
        texts = memory.views(
            self.memory.history,
            self.memory.kept,
            structure_of(self.levels.base().files),
            self._toolchain,
            show_expired=is_reopened,
        )
        texts["profile.md"] = skills.profile(
            self.levels.rows, self.levels.medians(), self.levels.floors()
        )
        texts["workload_profile.md"] = skills.workload_profile(self.levels.rows)
        return texts

    def write_views(self) -> None:
        """Into the campaign's folder, for people."""
        memory.write_views(self.campaign.folder, self._views(), self.levels.base().files)

    @property
    def _toolchain(self) -> str:
        versions = self.campaign.spec.environment.versions
        return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))

    # ---- levels ---------------------------------------------------------------------------------

    def _climb(self, experiment: Experiment) -> None:
        """The next level, or the decision."""
        done = [experiment.levels[name] for name in memory.LEVELS if name in experiment.levels]
        last = done[-1] if done else None
        if last is not None and last.outcome == "fail":
            self._decide(experiment, "reject", last.cause, last.message)
            return
        if last is not None and last.outcome == "stop":
            self._decide(experiment, "archive", last.cause, last.message)
            return
        if last is not None and last.level == "harden":
            self._promote(experiment)
            return
        twin = self._twin(experiment)
        if twin is not None:
            message = f"the files of exp_{twin.experiment:03d}, which was {twin.cause}"
            self._decide(experiment, "reject", plateau.REPETITION, message)
            return
        spent = sum(level.device_s for level in experiment.levels.values())
        if spent > self.constitution.max_gpu_s:
            self._decide(experiment, "archive", TOO_LONG, f"{spent:.0f} s on the device")
            return
        self._measure(experiment, _next_level(experiment, last))

    def _twin(self, experiment: Experiment) -> Decided | None:
        """A dead experiment with these very files, which nobody needs to measure again. One that
        searches knobs is no repetition of one that searched others."""
        version = self.levels.changed(experiment)
        parameters = experiment.plan.parameters if experiment.plan else {}
        for other in self.memory.history.experiments:
            decided = other.decided
            same = other.plan is not None and other.plan.parameters == parameters
            if decided is not None and same and decided.files == version.blob:
                return None if decided.is_promotion else decided
        return None

    def _measure(self, experiment: Experiment, name: str) -> None:
        began = self.clock()
        found = self.levels.run(experiment, name)
        self.campaign.say(
            f"experiment {experiment.number}, {name}: {found.outcome}: {found.message}"
        )
        self.memory.add(
            memory.LEVEL,
            Level(
                experiment=experiment.number,
                level=name,  # type: ignore[arg-type]
                outcome=found.outcome,
                cause=found.cause,
                message=found.message,
                evidence=self.memory.keep(found.evidence),
                device_s=round(self.clock() - began, 3),
            ),
        )

    # ---- decide ---------------------------------------------------------------------------------

    def _promote(self, experiment: Experiment) -> None:
        begun = self.memory.history.begun
        assert begun is not None
        full = self.memory.kept(experiment.levels["full"].evidence)
        message = experiment.levels["harden"].message
        if not begun.is_safe:
            self._decide(experiment, "archive", UNSAFE, f"made without a sandbox; {message}")
            return
        if begun.constitution != self.constitution.model_dump(mode="json"):
            raise StageFailed(
                f"{self.campaign.id}: the constitution has changed; verdicts under the old one "
                "promote nothing: begin a new campaign"
            )
        is_global = set(full["won"]) == set(self.levels.regime.values())
        choice: Choice = "promote_global" if is_global else "promote_dispatch"
        self._decide(experiment, choice, "faster", message, regimes=tuple(full["won"]))

    def _decide(
        self,
        experiment: Experiment,
        choice: Choice,
        cause: str,
        message: str,
        regimes: tuple[str, ...] = (),
    ) -> None:
        """The one decision of an experiment, with what was measured of it."""
        values: dict[str, Any] = {}
        turned = experiment.turned
        if turned is not None and turned.patch:
            version = self.levels.changed(experiment)
            values = {
                "files": version.blob,
                "config": dict(version.config),
                "structure": structure_of(version.files),
            }
        self.campaign.say(f"experiment {experiment.number}: {choice}: {cause}: {message}")
        self.memory.add(
            memory.DECIDED,
            Decided(
                experiment=experiment.number,
                choice=choice,
                cause=cause,
                message=message[:2000],
                regimes=regimes,
                device_s=round(sum(level.device_s for level in experiment.levels.values()), 3),
                constitution=self.constitution.id,
                policy=self.campaign.policy.id,
                **self._estimate(experiment),
                **values,
            ),
        )

    def _estimate(self, experiment: Experiment) -> dict[str, Any]:
        """Of the widest level that has one; of a promotion the second session's, since the first
        was chosen for being large."""
        for name, key in (("harden", "second"), ("full", "verdict"), ("stride", "verdict")):
            level = experiment.levels.get(name)
            found = self.memory.kept(level.evidence).get(key) if level is not None else None
            if found and found.get("estimate"):
                estimate = found["estimate"]
                return {each: estimate[each] for each in ("gain", "low", "high")}
        return {}

    def _lessons(self, experiment: Experiment) -> Iterable[Lesson]:
        """What a decided experiment teaches, by its measurements."""
        decided, chosen = experiment.decided, experiment.plan
        if decided is None or chosen is None or decided.cause == plateau.REPETITION:
            return
        spec = self.campaign.spec
        about: dict[str, Any] = {
            "scope": {
                "op": spec.op,
                "route": self.levels.route.name,
                "device": spec.environment.device,
            },
            "evidence": (experiment.number,),
            "structure": decided.structure,
            "toolchain": self._toolchain,
        }
        outcome = decided.cause if decided.gain is None else f"gain {decided.gain:.2%}"
        claim = f"{chosen.change}: {outcome}, {decided.choice}"
        if decided.choice == "reject":
            yield Lesson(kind="anti_pattern", subject=chosen.family, claim=claim, **about)
            return
        kind: memory.LessonKind = "mechanism" if decided.is_promotion else "measurement"
        yield Lesson(
            kind=kind,
            subject=chosen.family,
            claim=claim,
            low=decided.low,
            high=decided.high,
            **about,
        )
        for name in chosen.parameters if "knobs" in experiment.levels else ():
            tried = ", ".join(map(str, chosen.parameters[name]))
            claim = f"{name} = {decided.config.get(name)} is the best of {tried}"
            yield Lesson(kind="constant", subject=f"knob {name}", claim=claim, **about)


def _next_level(experiment: Experiment, last: Level | None) -> str:
    if last is None:
        return "quick"
    searches = experiment.plan is not None and bool(experiment.plan.parameters)
    after = memory.LEVELS[memory.LEVELS.index(last.level) + 1]
    return "stride" if after == "knobs" and not searches else after
