"""The search of one route's knobs for one regime on one device: an Optuna study.

A trial is one config. It climbs the policy's rungs, each more workloads and more timed calls than
the one before, is pruned between two of them if it falls behind, and is valued by its last rung:
the geometric mean over workloads of the median time. What a trial says about a config is one of

- complete, pruned: right on every workload that it met. Only complete ones can be best.
- failed: the config is wrong, crashes, hangs, does not compile, or has no time. Final.
- abandoned: nothing was learnt. The process was interrupted or died, or the infrastructure failed;
  the config is tried again, up to `Policy.max_retries` times after a fault.

The last two are FAIL to Optuna, so that nothing in it takes them for a result.

Where fault follows upon fault and what was measured before cannot be measured any more, or where a
study would end with nothing but faults, it is the machine that is out of order: the search ends
with an `Outage`, and these trials count against no config when it goes on.

A study belongs to one version of the space, sources, rungs and environment, since Optuna refuses
to change the choices of a knob. A new version starts with what an older one of the same campaign
found out: its trials where only the values of knobs changed, else its best configs, to be measured
anew.

One process at a time is meant to run a study (the campaign's lease sees to that); if there are
several, they share the work. Make the `Search` before starting them, and no `Search` before a fork
is used after it: a database connection belongs to one process.
"""

from __future__ import annotations

import math
import os
import random
import socket
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import ExperimentalWarning, TrialPruned, UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from fastkernels_tuner.errors import TunerError, UnfitError
from fastkernels_tuner.model import (
    Candidate,
    Cause,
    Evaluation,
    Failure,
    Knob,
    Model,
    Policy,
    Regime,
    Workload,
    canonical,
    digest,
)
from fastkernels_tuner.space import Space, configs, problem_keys, source_digest
from fastkernels_tuner.store import study_storage

# Every trial is told to `progress`; Optuna's own lines would say it twice.
optuna.logging.set_verbosity(optuna.logging.ERROR)

Measure = Callable[[Candidate, Workload, int], Evaluation]
Origin = Literal["default", "known", "sampled", "imported"]
State = Literal["complete", "pruned", "failed", "abandoned"]
STATES: tuple[State, ...] = ("complete", "pruned", "failed", "abandoned")
SETTLED = STATES[:3]

HEARTBEAT_S = 20
GRACE_S = 60
"""A trial of another machine without a heartbeat for so long is dead."""
REDUCTION = 3
"""One in so many trials climbs to the next rung."""
PATIENCE = 2
"""After so many configs' attempts that were all faults the machine is looked at: one config may be
the cause of its own."""
DRAWS = 10
"""How often TPE may propose what was tried before."""
FEWEST_FOR_IMPORTANCES = 6


class SearchError(TunerError):
    """A search that makes no sense: no workloads, or others than the study was begun with."""


class Outage(UnfitError):
    """Trial after trial failed for no fault of the configs: the device is lost, or the like."""


class TakenOver(TunerError):
    """Another process gave up on this one's trial, and goes on with the study."""

    exit_code = 130


class TrialResult(Model):
    """What one trial found out. `us` is the geometric mean of `medians` (workload id to us), both
    of the last rung that it finished; `rungs` counts those. `failure` also says why a trial was
    abandoned, where the infrastructure failed."""

    study: str
    number: int
    candidate: Candidate
    origin: Origin
    state: State
    us: float | None
    rungs: int
    medians: dict[str, float]
    failure: Failure | None
    duration_s: float

    @property
    def cause(self) -> Cause | None:
        return self.failure.cause if self.failure else None

    @property
    def is_fault(self) -> bool:
        """Whether the infrastructure failed, not the config."""
        return self.state == "abandoned" and self.failure is not None


class _Failed(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class _Stopped(Exception):
    """The caller wants an end."""


class _Duplicate(Exception):
    """Another process has this config."""


class Search:
    """One study. `known`: configs of the shipped table and of neighbouring regimes, tried after the
    default; missing knobs are as in the default. `refused` lists those that are not of the space,
    each with the reason. `environment`: the id of what times may be compared within. `source`: of
    candidates that are not made from what is installed.

    A space of at most `Policy.exhaustive_below` configs is tried completely if `Policy.max_trials`
    suffices, another one by TPE. `storage_url` is a store's; None keeps the study in memory.
    """

    def __init__(
        self,
        storage_url: str | None,
        campaign: str,
        space: Space,
        regime: Regime,
        device: str,
        policy: Policy,
        *,
        seed: int,
        known: Sequence[Mapping[str, Any]] = (),
        environment: str = "",
        source: str = "",
    ) -> None:
        self.space, self.device, self.policy, self.seed = space, device, policy, seed
        self.source = source or source_digest(space.op, space.route)
        self.refused: list[tuple[dict[str, Any], str]] = []
        self.declined: Counter[str] = Counter()  # of the last run: reasons, and how many configs
        self._known: list[dict[str, Knob]] = []
        self._legal: dict[str, dict[str, Knob]] = {}  # by their JSON
        self._is_exhaustive = False
        self._plan: list[tuple[list[Workload], int]] = []
        self._measure: Measure = _no_measure
        self._stop: Callable[[], bool] = lambda: False
        self._is_lost = False
        self.distributions: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(space.values[name]) for name in space.searched
        }
        # What two trials must have in common for their values to be compared.
        self._conditions = {
            "source": self.source,
            "rungs": [list(rung) for rung in policy.rungs],
            "environment": environment,
        }
        family = f"{campaign}/{space.op}/{space.route}/{regime.mode}-{regime.id}/{device}/"
        version = digest(canonical({"space": space.digest, **self._conditions}))
        self.name = family + version[:12]
        for config in known:
            self._know(config)
        self.study = self._open(storage_url, family, regime)

    def run(
        self,
        measure: Measure,
        workloads: Sequence[Workload],
        *,
        stop: Callable[[], bool] = lambda: False,
        progress: Callable[[TrialResult], None] = lambda result: None,
    ) -> list[TrialResult]:
        """Try configs until the space or `Policy.max_trials` is used up, or `stop()`.

        `measure(candidate, workload, iterations)` judges and times; it has to end by itself. What
        it raises is the candidate's failure, but for a TunerError, which is raised on, as Ctrl-C
        is: the study stays as it should be, and another `run` resumes it. `progress` hears of each
        trial that ended. Gives `results()`. Raises SearchError, TakenOver, Outage.
        """
        self._prepare(workloads)
        self._measure, self._stop = measure, stop
        faults: list[TrialResult] = []  # the last trials of this run, as long as they are such
        try:
            self._release()
            self._enqueue()
            while not stop() and self._has_more():
                for result in self._next():
                    progress(result)
                    faults = [*faults, result] if result.is_fault else []
                if len(faults) >= PATIENCE * (1 + self.policy.max_retries):
                    if not self._is_well():
                        self._call_off(faults)
                    faults = []
            if faults and not stop() and not any(r.state in SETTLED for r in self.results()):
                self._call_off(faults)
        finally:
            self._release()
        return self.results()

    def results(self) -> list[TrialResult]:
        """Every ended trial: complete ones by time, then pruned ones by how far they came and by
        time, then failed and abandoned ones."""
        found = filter(None, map(self._result, self.study.get_trials(deepcopy=False)))
        return sorted(
            found,
            key=lambda r: (STATES.index(r.state), -r.rungs, r.us or math.inf, r.number),
        )

    @property
    def best(self) -> TrialResult | None:
        """The fastest complete trial."""
        return next((r for r in self.results() if r.state == "complete"), None)

    @property
    def sampler(self) -> str:
        """How the last run chose: every legal config, or some by TPE."""
        return "grid" if self._is_exhaustive else "TPE"

    @property
    def num_legal(self) -> int:
        """Configs that the last run could choose among."""
        return len(self._legal)

    def importances(self) -> dict[str, float]:
        """The share of each searched knob in what makes a config one of the fastest quarter, by
        PED-ANOVA; the largest first, 1 in total. Empty where too few trials tell."""
        right = (TrialState.COMPLETE, TrialState.PRUNED)
        sample = optuna.create_study(storage=None)
        for trial in self.study.get_trials(deepcopy=False, states=right):
            # The first rung has everybody; completed trials alone would be a choice of the best.
            if 0 in trial.intermediate_values:
                sample.add_trial(
                    optuna.create_trial(
                        value=trial.intermediate_values[0],
                        params=trial.params,
                        distributions=trial.distributions,
                    )
                )
        values = {trial.value for trial in sample.get_trials(deepcopy=False)}
        if len(values) < FEWEST_FOR_IMPORTANCES or not self.distributions:
            return {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `normalize` is experimental
            found = optuna.importance.get_param_importances(
                sample,
                evaluator=optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.25),
                normalize=False,  # which would make equal shares of nothing
            )
        total = sum(found.values())
        return {name: share / total for name, share in found.items()} if total > 0 else {}

    # ---- a study and what it begins with --------------------------------------------------------

    def _open(self, url: str | None, family: str, regime: Regime) -> optuna.Study:
        storage = None if url is None else _storage(url, os.getpid())
        study = optuna.create_study(
            storage=storage,
            study_name=self.name,
            load_if_exists=True,
            sampler=_Untried(self),
            pruner=_Halving(self.policy.slowdown),
        )
        if "conditions" not in study.user_attrs:
            study.set_user_attr("regime", str(regime))
            study.set_user_attr("conditions", self._conditions)
        if storage is not None and "transferred" not in study.user_attrs:
            for name in optuna.get_all_study_names(storage):
                if name.startswith(family) and name != self.name:
                    self._transfer(study, optuna.load_study(study_name=name, storage=storage))
            # Last, so that a transfer that was cut short is done again; it repeats nothing.
            study.set_user_attr("transferred", self._known)
        self._known += [c for c in study.user_attrs.get("transferred", ()) if c not in self._known]
        return study

    def _transfer(self, study: optuna.Study, old: optuna.Study) -> None:
        """Take the trials of an older version over where its times compare, else its best configs
        as known ones."""
        present = [_config_of(trial) for trial in study.get_trials(deepcopy=False)]
        attrs = old.user_attrs
        if attrs.get("conditions") == self._conditions:
            if "workloads" in attrs and "workloads" not in study.user_attrs:
                study.set_user_attr("workloads", attrs["workloads"])
            for trial in old.get_trials(deepcopy=False):
                config = _config_of(trial)
                if config is None or _state(trial) in (None, "abandoned") or config in present:
                    continue
                if self.space.refuses(config) is None:
                    study.add_trial(self._imported(trial, config, old.study_name))
            return
        complete = old.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        for trial in sorted(complete, key=lambda t: t.value or math.inf)[: self.policy.finalists]:
            config = _config_of(trial)
            if config is not None:
                self._know(config)

    def _imported(self, trial: FrozenTrial, config: dict[str, Any], study: str) -> FrozenTrial:
        return optuna.create_trial(
            state=trial.state,
            value=trial.value if trial.state == TrialState.COMPLETE else None,
            params={name: config[name] for name in self.distributions},
            distributions=self.distributions,
            intermediate_values=trial.intermediate_values,
            user_attrs={
                **trial.user_attrs,
                "origin": "imported",
                "from": f"{study}#{trial.number}",
            },
        )

    def _know(self, config: Mapping[str, Any]) -> None:
        whole: dict[str, Any] = {**self.space.default, **config}
        reason = self.space.refuses(whole)
        if reason is not None:
            self.refused.append((dict(config), reason))
        elif whole not in self._known:
            self._known.append({name: whole[name] for name in self.space.values})

    def _prepare(self, workloads: Sequence[Workload]) -> None:
        unique = list({workload.id: workload for workload in workloads}.values())
        if not unique:
            raise SearchError(f"{self.name}: a search needs at least one workload")
        wrong = sorted({workload.op for workload in unique} - {self.space.op})
        if wrong:
            raise SearchError(f"{self.name}: a workload is of {wrong[0]}, not of {self.space.op}")
        self._plan = plan(unique, self.policy.rungs)
        ids = [[workload.id for workload in level] for level, _ in self._plan]
        begun = self.study.user_attrs.get("workloads")
        if begun is None:
            self.study.set_user_attr("workloads", ids)
        elif begun != ids:
            raise SearchError(
                f"{self.name}: the study was begun on other workloads, so times would not compare; "
                "start another campaign"
            )
        keys = problem_keys(unique, self.device)
        self.declined.clear()
        self._legal.clear()
        for config in configs(self.space):
            reason = self.space.declines(config, keys)
            if reason is None:
                self._legal[canonical(config)] = config
            else:
                self.declined[reason] += 1
        limit = min(self.policy.exhaustive_below, self.policy.max_trials)
        self._is_exhaustive = len(self._legal) <= limit

    def _enqueue(self) -> None:
        """The default and what is known go first, also after they were abandoned."""
        trials = self.study.get_trials(deepcopy=False)
        waiting = [_config_of(t) for t in trials if t.state == TrialState.WAITING]
        again, fresh = self._open_configs(trials)
        default = self.space.default
        for config in (default, *(known for known in self._known if known != default)):
            if config in again + fresh and config not in waiting:
                self.study.enqueue_trial(
                    {name: config[name] for name in self.distributions},
                    user_attrs={
                        "config": config,
                        "origin": "default" if config == default else "known",
                    },
                )

    # ---- trials ---------------------------------------------------------------------------------

    def _has_more(self) -> bool:
        trials = self.study.get_trials(deepcopy=False)
        spent = sum(
            _state(trial) in SETTLED and trial.user_attrs["origin"] != "imported"
            for trial in trials
        )
        return spent < self.policy.max_trials and any(self._open_configs(trials))

    def _is_well(self) -> bool:
        """Whether the best config can still be measured: what failed has its own faults then."""
        if self.best is None:
            return False
        workloads, iterations = self._plan[0]
        try:
            self._median(self.best.candidate, workloads[0], iterations)
        except _Failed as error:
            return not error.failure.cause.is_infrastructure
        return True

    def _call_off(self, faults: Sequence[TrialResult]) -> NoReturn:
        """Raises Outage over these trials, which count as no attempts of their configs any more."""
        excused = self.study.user_attrs.get("excused", [])
        self.study.set_user_attr("excused", [*excused, *(fault.number for fault in faults)])
        last = faults[-1].failure
        assert last is not None
        raise Outage(
            f"{self.name}: {len(faults)} trials in a row failed for no fault of their configs, the"
            f" last one with {last.cause.value}: {last.message}; `fastkernels-tune resume` goes on,"
            " and they do not count"
        )

    def _open_configs(
        self, trials: Sequence[FrozenTrial]
    ) -> tuple[list[dict[str, Knob]], list[dict[str, Knob]]]:
        """Legal configs that nobody is trying: to be tried again, and never tried."""
        excused = self.study.user_attrs.get("excused", [])
        closed: set[str] = set()
        attempts: Counter[str] = Counter()
        for trial in trials:
            config, state = canonical(_config_of(trial)), _state(trial)
            if trial.state == TrialState.RUNNING or state in SETTLED:
                closed.add(config)
            elif trial.number in excused or "stopped" in trial.user_attrs:
                continue
            elif state == "abandoned":
                # A config that takes the controller down with it must not do so for ever.
                attempts[config] += 1
        open_configs = {name: config for name, config in self._legal.items() if name not in closed}
        retries = range(1, self.policy.max_retries + 1)
        again = [config for name, config in open_configs.items() if attempts[name] in retries]
        fresh = [config for name, config in open_configs.items() if not attempts[name]]
        return again, fresh

    def _next(self) -> list[TrialResult]:
        ended: list[FrozenTrial] = []
        self._is_lost = False
        try:
            self.study.optimize(
                self._objective,
                n_trials=1,
                catch=(_Failed, _Stopped, _Duplicate),
                callbacks=[lambda study, trial: ended.append(trial)],
            )
        except ValueError as error:  # Optuna cannot tell a trial that has ended
            if not self._is_lost:
                raise
            trial = self.study.get_trials(deepcopy=False)[self._number]
            if trial.state == TrialState.FAIL and "is_duplicate" not in trial.user_attrs:
                raise TakenOver(f"{self.name}: another process has taken over") from error
            # Two processes were given one enqueued trial, which SQLite allows; the other was first.
        return list(filter(None, map(self._result, ended)))

    def _objective(self, trial: optuna.Trial) -> float:
        began, self._number = time.monotonic(), trial.number
        medians: dict[str, float] = {}
        try:
            config = self.space.default
            for name in self.distributions:
                config[name] = cast(Knob, trial.suggest_categorical(name, self.space.values[name]))
            trial.set_user_attr("owner", _owner())
            for attr, value in (("origin", "sampled"), ("config", config)):
                if attr not in trial.user_attrs:  # as it is where the trial was enqueued
                    trial.set_user_attr(attr, value)
            self._refuse_duplicate(trial.number, config)
            return self._climb(trial, self._candidate(config), medians)
        except TrialPruned:
            raise
        except _Duplicate:
            self._note(trial, "is_duplicate", True)
            raise
        except _Failed as error:
            self._note(trial, "failure", error.failure.model_dump(mode="json"))
            raise
        except UpdateFinishedTrialError:
            self._is_lost = True
            raise
        except BaseException as error:
            self._note(trial, "stopped", type(error).__name__)
            raise
        finally:
            self._note(trial, "medians", medians)
            self._note(trial, "duration_s", time.monotonic() - began)

    def _note(self, trial: optuna.Trial, name: str, value: Any) -> None:
        """Before the end of a trial; `tell` complains if somebody else has ended it."""
        try:
            trial.set_user_attr(name, value)
        except UpdateFinishedTrialError:
            self._is_lost = True

    def _refuse_duplicate(self, number: int, config: Mapping[str, Knob]) -> None:
        for other in self.study.get_trials(deepcopy=False):
            is_same = other.number < number and _config_of(other) == config
            if is_same and (other.state == TrialState.RUNNING or _state(other) in SETTLED):
                raise _Duplicate

    def _climb(self, trial: optuna.Trial, candidate: Candidate, medians: dict[str, float]) -> float:
        """Its time on the last rung. `medians` takes those of the last one that it finished."""
        us = math.inf
        for rung, (workloads, iterations) in enumerate(self._plan):
            level: dict[str, float] = {}
            for workload in workloads:
                if self._stop():
                    raise _Stopped
                level[workload.id] = self._median(candidate, workload, iterations)
            medians.clear()
            medians.update(level)
            us = statistics.geometric_mean(medians.values())
            trial.report(us, rung)
            if rung + 1 < len(self._plan) and trial.should_prune():
                raise TrialPruned
        return us

    def _median(self, candidate: Candidate, workload: Workload, iterations: int) -> float:
        """Raises _Failed over anything but a right result with times."""

        def failed(cause: Cause, message: str) -> _Failed:
            return _Failed(Failure(cause=cause, message=message, workload=workload.id))

        try:
            found = self._measure(candidate, workload, iterations)
        except TunerError:
            raise
        except Exception as error:
            cause = next((c for kind, c in _CAUSES if isinstance(error, kind)), Cause.UNCLASSIFIED)
            raise failed(cause, f"{type(error).__name__}: {error}") from error
        failures = [f for trials in found.trials for f in trials.failures]
        if found.failure is not None:
            failures.insert(0, found.failure)
        if failures:
            first = failures[0]
            raise _Failed(first.model_copy(update={"workload": first.workload or workload.id}))
        if (found.candidate, found.workload) != (candidate.id, workload.id):
            what = f"{found.candidate} on {found.workload}"
            expected = f"{candidate.id} on {workload.id}"
            raise failed(Cause.HARNESS_BUG, f"measured {what}, expected {expected}")
        times = [us for block in found.blocks if not block.discarded for us in block.us]
        if found.blocks and all(block.discarded for block in found.blocks):
            why = "; ".join(sorted({block.discarded for block in found.blocks}))
            raise failed(Cause.THROTTLED, f"every block was discarded: {why}")
        if not times:
            raise failed(Cause.HARNESS_BUG, "neither a time nor a failure")
        odd = [us for us in times if not (math.isfinite(us) and us > 0)]
        if odd:
            raise failed(Cause.UNCLASSIFIED, f"a call took {odd[0]} us, expected a positive time")
        return statistics.median(times)

    def _candidate(self, config: Mapping[str, Knob]) -> Candidate:
        return Candidate(
            op=self.space.op, route=self.space.route, config=dict(config), source=self.source
        )

    def _result(self, trial: FrozenTrial) -> TrialResult | None:
        config, state = _config_of(trial), _state(trial)
        if state is None or config is None:
            return None
        attrs = trial.user_attrs
        medians = attrs.get("medians", {})
        failure = Failure(**attrs["failure"]) if "failure" in attrs else None
        if state == "abandoned" and failure is None and "stopped" not in attrs:
            failure = Failure(cause=Cause.NODE_LOST, message="the process died during the trial")
        return TrialResult(
            study=self.study.study_name,
            number=trial.number,
            candidate=self._candidate(config),
            origin=attrs.get("origin", "sampled"),
            state=state,
            us=statistics.geometric_mean(medians.values()) if medians else None,
            rungs=len(trial.intermediate_values),
            medians=medians,
            failure=failure,
            duration_s=attrs.get("duration_s", 0.0),
        )

    def _release(self) -> None:
        """End the trials of processes that are no more, as Optuna's heartbeat does for other
        machines, and what this process left when it was interrupted."""
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            owner = trial.user_attrs.get("owner")
            if owner is None:  # it died, or is just about to say who it is
                began = trial.datetime_start or datetime.min
                is_dead = datetime.now() - began > timedelta(seconds=GRACE_S)
            else:
                is_dead = owner["host"] == socket.gethostname() and (
                    owner["pid"] == os.getpid() or owner["started"] != _started(owner["pid"])
                )
            if is_dead:
                self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def propose(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Knob]:
        """A config that nobody has tried, unless one is to be tried again."""
        again, fresh = self._open_configs(study.get_trials(deepcopy=False))
        if again:
            return again[0]
        if not fresh:  # another process was faster; what is tried already ends as a duplicate
            return self.space.default
        # From the trial's number, so that a resumed study does not repeat its first draws.
        rng = random.Random(f"{self.seed}/{trial.number}")
        if not self._is_exhaustive:
            sampler = optuna.samplers.TPESampler(
                seed=rng.getrandbits(32),
                n_startup_trials=min(10, self.policy.max_trials // 4),
                constant_liar=False,  # running configs are no choice anyway
            )
            for _ in range(DRAWS):
                drawn = sampler.sample_relative(study, trial, self.distributions)
                if drawn and self.space.default | drawn in fresh:
                    return self.space.default | drawn
        return rng.choice(fresh)


class _Untried(optuna.samplers.BaseSampler):
    """Each legal config at most once: Optuna's own samplers repeat themselves, and know no
    combinations that are illegal."""

    def __init__(self, search: Search) -> None:
        self._search = search

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self._search.distributions

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        config = self._search.propose(study, trial)
        return {name: config[name] for name in search_space}

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        raise AssertionError(f"{param_name} is not of the space")


class _Halving(optuna.pruners.BasePruner):
    """Asynchronous successive halving: a trial climbs on if it is in the best third of those that
    reached its rung, or within `tolerance` of the best, which so few calls cannot tell apart.

    Why not Optuna's: its successive halving also counts trials that failed later, so that one wrong
    and fast config would prune right ones for ever; its Wilcoxon test compares workload by
    workload and cannot reject anything on the one to three workloads of the first rungs, which is
    where time is saved.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        step = trial.last_step
        assert step is not None
        right = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        own = trial.intermediate_values[step]
        others = [t.intermediate_values[step] for t in right if step in t.intermediate_values]
        values = sorted((*others, own))
        last = values[max(len(values) // REDUCTION, 1) - 1]
        return own > max(last, values[0] * (1 + self._tolerance))


def plan(
    workloads: Sequence[Workload], rungs: Sequence[tuple[int, int]]
) -> list[tuple[list[Workload], int]]:
    """The workloads and calls of each rung: evenly spread from the smallest problem to the largest,
    the middle one where it is one."""
    ordered = sorted(workloads, key=lambda w: (tuple(w.build().axes.values()), w.id))
    return [([ordered[i] for i in _spread(len(ordered), n)], calls) for n, calls in rungs]


def _spread(size: int, count: int) -> list[int]:
    if count >= size:
        return list(range(size))
    if count == 1:
        return [(size - 1) // 2]
    return [round(i * (size - 1) / (count - 1)) for i in range(count)]


# What a measurement raises where it cannot return a failure.
_CAUSES: tuple[tuple[type[Exception], Cause], ...] = (
    (TimeoutError, Cause.HANG),
    (MemoryError, Cause.OUT_OF_MEMORY),
    (ConnectionError, Cause.CRASH),
    (EOFError, Cause.CRASH),
)


def _no_measure(candidate: Candidate, workload: Workload, iterations: int) -> Evaluation:
    raise AssertionError("only a run measures")


def _config_of(trial: FrozenTrial) -> dict[str, Knob] | None:
    """None of a trial that died before it had one."""
    config: dict[str, Knob] | None = trial.user_attrs.get("config")
    return config


def _state(trial: FrozenTrial) -> State | None:
    """None of one that has not ended, or measured nothing because it was a duplicate."""
    if trial.state == TrialState.COMPLETE:
        return "complete"
    if trial.state == TrialState.PRUNED:
        return "pruned"
    if trial.state != TrialState.FAIL or "is_duplicate" in trial.user_attrs:
        return None
    failure = trial.user_attrs.get("failure")
    if failure is None or Cause(failure["cause"]).is_infrastructure:
        return "abandoned"
    return "failed"


@cache
def _storage(url: str, pid: int) -> RDBStorage:
    """A second to open for the first time; a connection does not survive a fork."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # of the heartbeat
        return study_storage(url, heartbeat_interval=HEARTBEAT_S, grace_period=GRACE_S)


def _owner() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "started": _started(pid)}


def _started(pid: int) -> str | None:
    """When a living process was started, which tells it from a later one of the same number; None
    where there is none, or no /proc to ask."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
