"""What is measured of an experiment: quick, knobs, stride, full, harden.

Each level is a function of the candidate and of what the ledger has: measured again, it asks the
same questions. It says what it found; what follows from that is the loop's to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

from fastkernels.core.kernels import knobs
from fastkernels.core.route import Route
from fastkernels_tuner import gates, plan, trials
from fastkernels_tuner.agent import plateau
from fastkernels_tuner.agent.memory import Decided, Experiment, Memory
from fastkernels_tuner.agent.policy import Constitution
from fastkernels_tuner.agent.workspace import Patch, version_of
from fastkernels_tuner.campaign import Campaign, Measures
from fastkernels_tuner.controller import StageFailed
from fastkernels_tuner.measure import Rejected
from fastkernels_tuner.model import (
    Block,
    Candidate,
    Cause,
    Environment,
    Evaluation,
    Knob,
    Model,
    Workload,
)
from fastkernels_tuner.search import Search
from fastkernels_tuner.space import Space, candidate
from fastkernels_tuner.stages.verify import corpus_of
from fastkernels_tuner.stats import Budget, PairedTest, Ratio, Verdict, confirm, log_ratio

QUICK_P_MAX = 0.63
"""Three judged calls of every row: what is often wrong is found before anything is timed."""

NOT_FASTER, UNPROVEN = "not_faster", "unproven"


class Lab(Measures, Protocol):
    """Where candidates are measured; see `lab`."""

    @property
    def environment(self) -> Environment: ...
    def provide(self, source: str, files: Mapping[str, str]) -> None:
        """The files that candidates with this `source` are made from."""


class Version(NamedTuple):
    """Files and a config of the route. `blob`: of the files."""

    blob: str
    files: Mapping[str, str]
    config: Mapping[str, Knob]


class Found(NamedTuple):
    """What a level says."""

    outcome: Literal["pass", "fail", "stop"]
    cause: str
    message: str
    evidence: dict[str, Any]


@dataclass
class Levels:
    """A campaign's experiments, measured. `clock`: seconds."""

    campaign: Campaign
    memory: Memory
    lab: Lab
    constitution: Constitution
    clock: Callable[[], float]

    def run(self, experiment: Experiment, name: str) -> Found:
        """Raises StageFailed, and what the lab raises, where the machine did not let us."""
        if not self.rows:
            raise StageFailed(f"{self.campaign.id}: no workload that {self.route.name} serves")
        levels: dict[str, Callable[[Experiment, Candidate], Found]] = {
            "quick": self._quick,
            "knobs": self._knobs,
            "stride": self._stride,
            "full": self._full,
            "harden": self._harden,
        }
        try:
            return levels[name](experiment, self.candidate(self.changed(experiment)))
        except Rejected as error:
            failure = error.failure
            return Found("fail", failure.cause.value, failure.message, _json(failure))

    # ---- what is measured -----------------------------------------------------------------------

    def base(self) -> Version:
        """What the next change begins from: the last promotion, or anew what is shipped."""
        best = self.memory.history.best()
        if best is None or plateau.last_rung(self.memory.history) == "restart":
            return self.shipped
        return self.version(best)

    @cached_property
    def shipped(self) -> Version:
        begun = self.memory.history.begun
        assert begun is not None, "a campaign of agents begins with what it is about"
        return Version(begun.files, self.memory.kept(begun.files), knobs(self.route.default_config))

    @property
    def route(self) -> Route:
        begun = self.memory.history.begun
        assert begun is not None
        found = self.campaign.operator.route(begun.route)
        assert found is not None, begun.route
        return found

    def version(self, decided: Decided) -> Version:
        return Version(decided.files, self.memory.kept(decided.files), decided.config)

    def changed(self, experiment: Experiment) -> Version:
        """What an experiment is about: its base with its patch, its knobs as far as searched."""
        turned = experiment.turned
        assert turned is not None
        base = self.memory.kept(experiment.reserved.base)
        files = Patch(**self.memory.kept(turned.patch)).apply(base)
        config: Mapping[str, Knob] = self.base().config
        if "knobs" in experiment.levels:
            config = self.memory.kept(experiment.levels["knobs"].evidence).get("config", config)
        return Version(self.memory.keep(files), files, config)

    def candidate(self, version: Version) -> Candidate:
        if version.files == self.shipped.files:
            return candidate(self.campaign.spec.op, self.route, version.config)
        source = version_of(version.files)
        self.lab.provide(source, version.files)
        return Candidate(
            op=self.campaign.spec.op,
            route=self.route.name,
            config=dict(version.config),
            source=source,
        )

    @cached_property
    def rows(self) -> tuple[Workload, ...]:
        """The workloads that the route serves."""
        own = candidate(self.campaign.spec.op, self.route, knobs(self.route.default_config))
        found = (
            w for w in self.campaign.spec.workloads if trials.serves(own, w, self.campaign.info)
        )
        return tuple(found)

    @cached_property
    def regime(self) -> dict[str, str]:
        """Of a row's id the regime's."""
        operator, regimes = self.campaign.operator, self.campaign.spec.regimes
        return {
            row.id: next(r.id for r in regimes if plan.inside(operator, r, row))
            for row in self.rows
        }

    def inside(self, regimes: Iterable[str]) -> list[Workload]:
        wanted = set(regimes)
        return [row for row in self.rows if self.regime[row.id] in wanted]

    def champion(self, row: Workload) -> Candidate:
        """What serves a row now: a promotion of this campaign's, or what served it before."""
        decided = self.memory.history.champions().get(self.regime[row.id])
        if decided is None:
            return self.campaign.served(row)
        return self.candidate(self.version(decided))

    def _quick(self, experiment: Experiment, subject: Candidate) -> Found:
        """Right on the smallest and the largest row of every regime, and on what failed once."""
        ends: dict[str, list[Workload]] = {}
        for row in self.rows:
            ends.setdefault(self.regime[row.id], []).append(row)
        chosen = {row.id: row for each in ends.values() for row in (each[0], each[-1])}
        few = self.campaign.policy.model_copy(
            update={"p_max": dict.fromkeys(trials.RISKS, QUICK_P_MAX)}
        )
        corpus = corpus_of(self.campaign)
        strata = trials.strata(subject, list(chosen.values()), self.campaign.info, corpus)
        rows = [stratum for stratum in strata if not stratum.is_adversarial]
        verdict = trials.run_trials(
            self.lab.judge, subject, rows, few, corpus=corpus, device=self.campaign.info,
            seed=self.campaign.spec.seed + experiment.number,
        )  # fmt: skip
        return _of_trials(verdict, f"{len(rows)} rows are right")

    def _knobs(self, experiment: Experiment, subject: Candidate) -> Found:
        """The declared knobs, searched with the change in place."""
        assert experiment.plan is not None
        own = knobs(self.route.default_config)
        unknown = sorted(set(experiment.plan.parameters) - set(own))
        if unknown:
            message = f"the route has no knob {unknown[0]!r}, expected one of {', '.join(own)}"
            return Found("fail", Cause.STATIC_BAN.value, message, {})
        values = {
            name: tuple(
                dict.fromkeys((subject.config[name], *experiment.plan.parameters.get(name, ())))
            )
            for name in own
        }
        for name, each in values.items():
            for value in each:
                try:
                    self.route.make_config({**subject.config, name: value})
                except ValueError as error:
                    return Found("fail", Cause.STATIC_BAN.value, str(error), {})
        spec = self.campaign.spec
        study = Search(
            self.campaign.store.url, f"{self.campaign.id}/exp{experiment.number}",
            Space(spec.op, self.route.name, values), spec.regimes[0], spec.device, spec.policy,
            seed=spec.seed, known=[subject.config], environment=spec.environment.id,
            source=subject.source,
        )  # fmt: skip

        def measure(candidate: Candidate, row: Workload, iterations: int) -> Evaluation:
            return self.lab.evaluate(
                candidate, row, iterations=iterations, trials=spec.policy.search_trials
            )

        results = study.run(measure, self.rows)
        if study.best is None:
            return Found("fail", Cause.UNCLASSIFIED.value, "no config of its knobs is right", {})
        config = study.best.candidate.config
        searched = {name: config[name] for name in experiment.plan.parameters}
        evidence = {"config": config, "results": [r.model_dump(mode="json") for r in results]}
        return Found("pass", "", f"{searched} of {len(results)} configs", evidence)

    def _stride(self, experiment: Experiment, subject: Candidate) -> Found:
        """Is a full sweep worth it? A few rows of all regimes, up to the first look: not where the
        whole and every regime for itself are too slow."""
        rows, look = self._spread(), self.campaign.policy.looks[0]
        session = f"{self.campaign.id}/{experiment.number}/0"
        groups: dict[str, list[str]] = {}
        for row in rows:
            groups.setdefault(self.regime[row.id], []).append(row.id)
        names = [[row.id for row in rows], *groups.values()]
        whole, *parts = (PairedTest(self.campaign.policy, each, session=session) for each in names)
        run = _Session(self, subject, rows, seed=1000)
        while whole.verdict().more and len(whole.pairs) < look:
            _feed([whole, *parts], run.pair())
        verdict = whole.verdict()
        evidence = {"verdict": _json(verdict), "regimes": [_json(t.verdict()) for t in parts]}
        if len(whole.pairs) < look:
            raise StageFailed(f"{self.campaign.id}: {verdict.reason}")
        if all(test.verdict().decision == "keep" for test in (whole, *parts)):
            return Found("stop", NOT_FASTER, verdict.reason, evidence)
        return Found("pass", "", f"{len(rows)} rows: {verdict.reason}", evidence)

    def _spread(self) -> list[Workload]:
        """One row of each regime, its middle one, and others evenly, up to `stride_rows`."""
        groups: dict[str, list[Workload]] = {}
        for row in self.rows:
            groups.setdefault(self.regime[row.id], []).append(row)
        found = {each[len(each) // 2].id: each[len(each) // 2] for each in groups.values()}
        wanted = max(self.constitution.stride_rows, len(found))
        for index in range(wanted):
            if len(found) >= wanted:
                break
            row = self.rows[index * len(self.rows) // wanted]
            found.setdefault(row.id, row)
        return list(found.values())

    def _full(self, experiment: Experiment, subject: Candidate) -> Found:
        """Every row, paired with what serves it: the whole, and each regime for itself."""
        alpha = self._alpha(experiment)
        regimes = sorted(set(self.regime.values()))
        session = f"{self.campaign.id}/{experiment.number}/1"
        # Half of the level for the whole, half for the regimes together: one of them may win alone.
        share = alpha if len(regimes) == 1 else alpha / 2
        whole = self._test(regimes, session, share)
        parts = {r: self._test([r], session, share / len(regimes)) for r in regimes}
        tests = [whole] if len(regimes) == 1 else [whole, *parts.values()]
        run = _Session(self, subject, self.rows, seed=2000)
        while any(test.verdict().more for test in tests):
            _feed(tests, run.pair())
        won = self._won(whole, parts, regimes)
        evidence = {
            "alpha": alpha,
            "verdict": _json(whole.verdict()),
            "regimes": {name: _json(test.verdict()) for name, test in parts.items()},
            "won": won,
            "medians": run.medians(),
            "evaluations": [_json(each) for each in run.evaluations()],
        }
        reason = whole.verdict().reason
        if not won:
            return Found("stop", NOT_FASTER, reason, evidence)
        return Found(
            "pass", "", f"faster in {len(won)} of {len(regimes)} regimes: {reason}", evidence
        )

    def _test(self, regimes: Iterable[str], session: str, alpha: float) -> PairedTest:
        names = [row.id for row in self.inside(regimes)]
        return PairedTest(self.campaign.policy, names, session=session, alpha=alpha)

    def _won(
        self, whole: PairedTest, parts: Mapping[str, PairedTest], regimes: Sequence[str]
    ) -> list[str]:
        """All regimes, where the whole is faster and none of them is much slower; else those that
        are faster on their own."""
        estimate = whole.verdict().estimate
        if whole.verdict().decision == "promote" and estimate is not None:
            gains: dict[str, list[float]] = {}
            for name, gain in estimate.gains.items():
                gains.setdefault(self.regime[name], []).append(gain)
            worst = min(sum(each) / len(each) for each in gains.values())
            if worst >= -self.constitution.max_regime_loss:
                return list(regimes)
        if len(regimes) == 1:
            return []
        return [name for name in regimes if parts[name].verdict().decision == "promote"]

    def _alpha(self, experiment: Experiment) -> float:
        """The level of this comparison, by what earlier ones spent and earned."""
        begun = self.memory.history.begun
        assert begun is not None
        budget = Budget(alpha=self.campaign.policy.alpha, planned=begun.planned)
        for other in self.memory.history.experiments:
            name = str(other.number)
            if other.number == experiment.number:
                break
            if "full" in other.levels and other.decided is not None:
                budget = budget.reserve(name).settle(name, other.decided.is_promotion)
        return budget.reserve(str(experiment.number)).levels[str(experiment.number)]

    def _harden(self, experiment: Experiment, subject: Candidate) -> Found:
        """Right until its failure rate is known to be low, the same bits twice, faster once more in
        fresh processes on fresh data; then every gate on everything that is known."""
        full = self.memory.kept(experiment.levels["full"].evidence)
        rows = self.inside(full["won"])
        corpus = corpus_of(self.campaign)
        strata = trials.strata(subject, rows, self.campaign.info, corpus)
        ends = self.clock() + self.campaign.policy.verify_s
        verdict = trials.run_trials(
            self.lab.judge, subject, strata, self.campaign.policy, corpus=corpus,
            device=self.campaign.info, seed=self.campaign.spec.seed,
            stop=lambda: self.clock() > ends,
        )  # fmt: skip
        if verdict.outcome.kind != "pass":
            return _of_trials(verdict, "")
        smoke = list({self.regime[row.id]: row for row in reversed(rows)}.values())
        repeats = [
            gates.Repeat(
                workload=row.id, seed=0, digests=self.lab.repeat(subject, row, 0)
            )
            for row in smoke
            if gates.promises_bits(row)
        ]  # fmt: skip
        first = self._first(experiment, full)
        second, run = self._confirm(experiment, subject, rows, full["alpha"])
        evaluations = [Evaluation(**each) for each in full["evaluations"]]
        ids = {row.id for row in rows}
        decided = gates.decide(
            subject,
            gates.Evidence(
                policy=self.campaign.policy,
                gathered_under=(self.campaign.policy.id,),
                environment=self.lab.environment,
                workloads=tuple(rows),
                strata=strata,
                smoke=tuple(row.id for row in smoke),
                sources=dict(self.changed(experiment).files),
                is_built=True,
                evaluations=(*(e for e in evaluations if e.workload in ids), *run.evaluations()),
                trials=verdict.trials,
                repeats=tuple(repeats),
                floors=self.floors(),
            ),
        )
        evidence = {
            "verdict": _json(verdict),
            "repeats": [_json(each) for each in repeats],
            "first": _json(first),
            "second": _json(second),
            "gates": _json(decided),
        }
        if decided.outcome.kind == "fail":
            return Found("fail", decided.outcome.cause.value, decided.outcome.message, evidence)
        if decided.outcome.kind != "pass":
            message = f"gate {decided.gate}: {decided.outcome.message}"
            return Found("stop", UNPROVEN, message, evidence)
        agreed = confirm(first, second)
        evidence["confirmation"] = _json(agreed)
        if agreed.decision != "promote":
            return Found("stop", NOT_FASTER, f"not confirmed: {agreed.reason}", evidence)
        return Found("pass", "", agreed.reason, evidence)

    def _first(self, experiment: Experiment, full: Mapping[str, Any]) -> Verdict:
        """What is to be confirmed: of the whole, or of the regimes that won, taken together."""
        whole = Verdict(**full["verdict"])
        if whole.decision == "promote" and set(full["won"]) == set(self.regime.values()):
            return whole
        won = [Verdict(**full["regimes"][name]) for name in full["won"]]
        if len(won) == 1:
            return won[0]
        weakest = min(won, key=lambda each: each.estimate.low if each.estimate else 0.0)
        names = tuple(sorted(row.id for row in self.inside(full["won"])))
        assert weakest.estimate is not None
        gains = {k: v for each in won if each.estimate for k, v in each.estimate.gains.items()}
        estimate = weakest.estimate.model_copy(update={"gains": gains})
        return weakest.model_copy(update={"workloads": names, "estimate": estimate})

    def _confirm(
        self, experiment: Experiment, subject: Candidate, rows: Sequence[Workload], alpha: float
    ) -> tuple[Verdict, _Session]:
        self.lab.close()  # fresh processes
        session = f"{self.campaign.id}/{experiment.number}/2"
        names = [row.id for row in rows]
        test = PairedTest(self.campaign.policy, names, session=session, alpha=alpha)
        run = _Session(self, subject, rows, seed=3000)
        while test.verdict().more:
            _feed([test], run.pair())
        return test.verdict(), run

    def medians(self) -> dict[str, float]:
        """Of what serves now, as the last promotion's full level found it; display only."""
        best = self.memory.history.best()
        for each in self.memory.history.experiments:
            if best is not None and each.number == best.experiment and "full" in each.levels:
                found: dict[str, float] = self.memory.kept(each.levels["full"].evidence)["medians"]
                return found
        return {}

    def floors(self) -> dict[str, float]:
        facts = gates.FACTS.get(self.campaign.info.product)
        return {} if facts is None else {w.id: gates.floor_us(w, facts) for w in self.rows}


class _Session:
    """Pairs of a candidate with what serves each row, in order, with what they gave."""

    def __init__(
        self, levels: Levels, subject: Candidate, rows: Sequence[Workload], seed: int
    ) -> None:
        self._levels, self._subject, self._seed = levels, subject, seed
        self._rows = [(row, levels.champion(row)) for row in rows]
        self._number = 0
        self._blocks: dict[str, list[Block]] = {row.id: [] for row in rows}

    def pair(self) -> dict[str, Ratio] | None:
        """By row id; None where a block does not count. Raises Rejected over the candidate."""
        ratios = {}
        number, self._number = self._number, self._number + 1
        for row, champion in self._rows:
            blocks = self._levels.lab.pair(
                self._subject, champion, row.with_seed(self._seed),
                number=number, iterations=self._levels.campaign.policy.iterations,
            )  # fmt: skip
            # Blocks name the row that was drawn anew; they speak for the one of the list.
            blocks = tuple(block.model_copy(update={"workload": row.id}) for block in blocks)
            ours = [block for block in blocks if block.side == 0]
            self._blocks[row.id] += ours
            if any(block.discarded for block in blocks):
                return None
            ratios[row.id] = log_ratio(ours, [block for block in blocks if block.side == 1])
        return ratios

    def evaluations(self) -> list[Evaluation]:
        return [
            Evaluation(candidate=self._subject.id, workload=row, blocks=tuple(blocks))
            for row, blocks in self._blocks.items()
        ]

    def medians(self) -> dict[str, float]:
        found = {}
        for row, blocks in self._blocks.items():
            us = sorted(u for block in blocks if not block.discarded for u in block.us)
            if us:
                found[row] = us[len(us) // 2]
        return found


def _feed(tests: Iterable[PairedTest], ratios: Mapping[str, Ratio] | None) -> None:
    """One pair to all tests that are undecided, to each its own rows of it."""
    for test in tests:
        if not test.verdict().more:
            continue
        if ratios is None:
            test.discard()
        else:
            test.add({name: ratios[name] for name in test.workloads})


def _of_trials(verdict: trials.Verdict, right: str) -> Found:
    """Raises StageFailed where the machine did not let us judge."""
    outcome, evidence = verdict.outcome, {"verdict": _json(verdict)}
    if isinstance(outcome, trials.Fail):
        return Found("fail", outcome.cause.value, outcome.message, evidence)
    if isinstance(outcome, trials.Inconclusive):
        raise StageFailed(outcome.message)
    if isinstance(outcome, trials.NeedMore):
        return Found("stop", UNPROVEN, outcome.message, evidence)
    return Found("pass", "", right, evidence)


def _json(model: Model) -> dict[str, Any]:
    dumped: dict[str, Any] = model.model_dump(mode="json")
    return dumped
