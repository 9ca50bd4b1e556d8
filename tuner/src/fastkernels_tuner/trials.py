"""How often a candidate is judged before it counts as right, on what, and what comes of it.

A stratum is one workload under fresh draws, or one adversarial generator of the operator
(`ops/<op>/adversarial.py`), as a workload of the list "adversarial". Failure rates are bounded for
each stratum, since a pooled count hides one bad row among many good ones, and for their sum over
rows, since one wrong row loses a run over all of them.

Rules: the first wrong number ends it; a stratum is done when the Clopper-Pearson upper bound of
its failure rate is at most `p_max` of its risk class; when time ends first the answer is NeedMore,
never Pass. Only typed faults of the infrastructure are retried, and every attempt is kept. What
failed once is in a corpus that every later candidate of the operator meets first.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import importlib.util
import os
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import torch
from pydantic import Field

from fastkernels import catalog
from fastkernels.core.device import DeviceInfo
from fastkernels.core.problem import key_from_axes
from fastkernels.core.route import Route
from fastkernels.ops._shared.cases import Case
from fastkernels.testing.contracts import all_axes
from fastkernels_tuner.errors import TunerError
from fastkernels_tuner.model import (
    Candidate,
    Cause,
    Failure,
    Model,
    Policy,
    Trials,
    Workload,
    read_line,
)
from fastkernels_tuner.stats import trials_needed, upper_bound

ADVERSARIAL = "adversarial"
"""The list of workloads that are generators: `case` holds the stratum's name, a seed, and fields
that replace those of its case."""

T = TypeVar("T")

Risk = Literal["low", "medium", "high"]
RISKS: tuple[Risk, ...] = ("low", "medium", "high")

BOUNDLESS = 1e9
"""An error of so many limits stands for larger ones and for NaN, which JSON cannot hold."""


class TrialsError(TunerError):
    """A stratum that does not exist, a judge that answers something else, a corpus out of shape."""


# ---- outcomes -----------------------------------------------------------------------------------


class Pass(Model):
    kind: Literal["pass"] = "pass"


class Fail(Model):
    """Final, whatever comes later."""

    kind: Literal["fail"] = "fail"
    cause: Cause
    message: str
    workload: str = ""
    seed: int | None = None

    @property
    def is_quarantine(self) -> bool:
        """Suspicion, not proof: for a second judge, with all evidence kept."""
        return self.cause is Cause.CHEAT_SUSPECT

    @staticmethod
    def of(failure: Failure) -> Fail:
        return Fail(
            cause=failure.cause,
            message=failure.message,
            workload=failure.workload,
            seed=failure.seed,
        )


class NeedMore(Model):
    """Nothing is wrong so far, and `n` more trials (or rows, as `message` says) are needed."""

    kind: Literal["need_more"] = "need_more"
    n: int
    message: str


class Inconclusive(Model):
    """The evidence says nothing either way; `is_environment` where the machine is to blame."""

    kind: Literal["inconclusive"] = "inconclusive"
    message: str
    is_environment: bool = False


Outcome = Annotated[Pass | Fail | NeedMore | Inconclusive, Field(discriminator="kind")]

_GRAVITY = ("fail", "inconclusive", "need_more", "pass")


def gravest(outcomes: Iterable[Outcome]) -> Outcome:
    """The first of the gravest: Fail, Inconclusive, NeedMore, Pass. Nothing passes."""
    return min(outcomes, key=lambda outcome: _GRAVITY.index(outcome.kind), default=Pass())


def wrong(trials: Trials) -> tuple[Failure, ...]:
    """What the candidate is to blame for in some trials. An error above its limit counts though no
    failure was reported."""
    found = tuple(f for f in trials.failures if not f.cause.is_infrastructure)
    if found or trials.worst <= 1.0:  # false for NaN
        return found
    message = f"the worst error is {trials.worst:g} times its limit"
    return (Failure(cause=Cause.NUMERIC, message=message),)


# ---- strata -------------------------------------------------------------------------------------


class Stratum(Model):
    """What one bound is about. `proof`: why the stratum is trivial, so that class low does; empty
    where it is not."""

    workload: Workload
    risk: Risk
    proof: str = ""

    @property
    def id(self) -> str:
        """Names the stratum in `Trials`."""
        return self.workload.id

    @property
    def is_adversarial(self) -> bool:
        return self.workload.listed == ADVERSARIAL

    @property
    def is_row(self) -> bool:
        """Whether its rate is a term of the sum over rows."""
        return not self.is_adversarial and not self.proof

    def __str__(self) -> str:
        return str(self.workload)


# Selection and routing decide by comparisons, and one lost element is a wrong answer; a recurrence
# carries an error on; a dense operator compares every element with slack. What is not listed counts
# as the worst.
_OPERATORS: dict[str, Risk] = {
    "gdn_decode": "medium",
    "gdn_prefill": "medium",
    "dsa_sparse_attention": "low",
    "dsa_topk_indexer": "high",
    "moe_fp8_block_scale": "high",
}

# In these the author places every barrier and fence; torch and Triton place them by themselves.
_HAND_SYNCHRONISED = ("cuda", "cute")


def risk_class(op: str, route: Route | str, *, has_failed: bool = False) -> Risk:
    """The class of a route of an operator; one higher after a failure in its lineage."""
    found = catalog.operator(op).route(route) if isinstance(route, str) else route
    if found is None:
        raise TrialsError(f"{op} has no route {route!r}")
    base = _OPERATORS.get(op, "high")
    if base == "low" and found.language in _HAND_SYNCHRONISED:
        base = "medium"
    return RISKS[min(RISKS.index(base) + has_failed, len(RISKS) - 1)]


def triviality(op: str, case: Case) -> str:
    """Why a workload cannot show a rare error, with the reason; empty where it can."""
    operator = catalog.operator(op)
    axes = all_axes(operator, case)
    if all(any(axes[name] == 0 for name in output.shape) for output in operator.spec.outputs):
        return "no output has an element"
    lengths: tuple[int, ...] | None = getattr(case, "seq_lens", None)
    if op == "dsa_topk_indexer" and lengths is not None and max(lengths) <= axes["topk"]:
        return f"no row is longer than topk={axes['topk']}: every position is an answer"
    return ""


def strata(
    candidate: Candidate,
    workloads: Sequence[Workload],
    device: DeviceInfo,
    corpus: Corpus,
    **fields: Any,
) -> tuple[Stratum, ...]:
    """A stratum of every workload and of every adversarial generator whose inputs the candidate
    serves on `device`; `fields` replace fields of the generators' cases (sizes, say)."""
    has_failed = corpus.has_failed(candidate.op, candidate.route)
    risk = risk_class(candidate.op, candidate.route, has_failed=has_failed)
    found = []
    for workload in (*workloads, *adversarial(candidate, device, **fields)):
        proof = triviality(candidate.op, case_of(workload))
        found.append(Stratum(workload=workload, risk="low" if proof else risk, proof=proof))
    return tuple(found)


def adversarial(candidate: Candidate, device: DeviceInfo, **fields: Any) -> Iterator[Workload]:
    """The operator's generators whose inputs the candidate serves, as workloads."""
    for name in _generators(candidate.op):
        workload = Workload(
            op=candidate.op, listed=ADVERSARIAL, case={"name": name, "seed": 0, **fields}
        )
        if serves(candidate, workload, device):
            yield workload


def serves(candidate: Candidate, workload: Workload, device: DeviceInfo) -> bool:
    """Whether the candidate's route is made for this problem on `device`."""
    route, config = candidate.bind()
    case = case_of(workload)
    traits = ("deterministic",) if getattr(case, "deterministic", False) else ()
    key = key_from_axes(candidate.operator().spec, case.axes, device, case.mode, traits)
    return route.unsuited(key, config) is None


def case_of(workload: Workload) -> Case:
    """The case of a workload, also of a generator."""
    if workload.listed != ADVERSARIAL:
        return workload.build()
    fields = {name: value for name, value in workload.case.items() if name != "name"}
    found: Case = dataclasses.replace(_stratum_of(workload).case, **fields)
    return found


def draw(
    workload: Workload, seed: int, device: torch.device | str = "cpu", **shared: Any
) -> tuple[Any, Case]:
    """Inputs of a workload under a seed, on `device`, and their case: what a judge draws with.

    `shared` goes to the operator's `make_inputs` (`weights` of moe_fp8_block_scale).
    """
    if workload.listed == ADVERSARIAL:
        fields = {k: v for k, v in workload.case.items() if k not in ("name", "seed")}
        drawn: tuple[Any, Case] = _stratum_of(workload).draw(seed, device, **shared, **fields)
        return drawn
    case = workload.with_seed(seed).build()
    return catalog.module(workload.op, "inputs").make_inputs(case, device, **shared), case


def _stratum_of(workload: Workload) -> Any:
    known = _generators(workload.op)
    name = workload.case["name"]
    if name not in known:
        raise TrialsError(f"{workload.op} has no adversarial stratum {name!r}: {', '.join(known)}")
    return known[name]


def _generators(op: str) -> Mapping[str, Any]:
    try:
        module = catalog.module(op, "adversarial")
    except ModuleNotFoundError as error:
        raise TrialsError(f"{op} has no adversarial strata: {error}") from None
    found: Mapping[str, Any] = module.STRATA
    return found


# ---- budgets ------------------------------------------------------------------------------------


def sum_bound(failures: int, trials: int, rows: int, confidence: float) -> float:
    """Upper bound of the sum of the failure rates of `rows` strata with at least `trials` trials
    each, `failures` of them wrong in all of them together.

    With n trials on each of R rows and a sum S of the rates, so few failures are seen no more often
    than in R n trials of the one rate S / R (Hoeffding 1956), so S is at most R times the bound of
    the pooled count. Trials beyond the n-th of a row can only add failures, so theirs may count.
    """
    return min(rows * upper_bound(failures, rows * trials, confidence), float(rows))


def budget(risk: Risk, policy: Policy, rows: int = 1) -> int:
    """Trials without failure that each of `rows` strata needs, so that each of their rates and the
    sum of them is at most `p_max` of the class."""
    return -(-trials_needed(policy.p_max[risk] / rows, policy.confidence) // rows)


class Budget(Model):
    """Where a stratum stands."""

    stratum: str
    name: str
    risk: Risk
    required: float  # p_max
    trials: int
    trials_needed: int
    failures: int
    upper_bound: float
    worst: float
    proof: str
    verdict: Literal["pass", "fail", "need_more"]


class Bound(Model):
    """The sum of the failure rates over the rows of one risk class."""

    risk: Risk
    rows: int
    trials: int  # of the row with the fewest
    upper_bound: float
    required: float


class Counted(Model):
    """Trials against what is required of them; `outcome` follows from the rest."""

    outcome: Outcome
    budgets: tuple[Budget, ...]
    sums: tuple[Bound, ...]


def count(strata: Sequence[Stratum], trials: Iterable[Trials], policy: Policy) -> Counted:
    """What some trials say about some strata; trials of anything else say nothing here."""
    by_stratum: dict[str, list[Trials]] = defaultdict(list)
    for each in trials:
        by_stratum[each.stratum].append(each)
    rows: dict[Risk, int] = {r: sum(s.is_row and s.risk == r for s in strata) for r in RISKS}
    budgets = []
    outcomes: list[Outcome] = []
    for stratum in strata:
        found = by_stratum[stratum.id]
        failures = [failure for each in found for failure in wrong(each)]
        number = sum(each.trials for each in found)
        needed = budget(stratum.risk, policy, max(rows[stratum.risk], 1) if stratum.is_row else 1)
        verdict: Literal["pass", "fail", "need_more"] = "pass"
        if failures:
            verdict = "fail"
            outcomes.append(Fail.of(failures[0]))
        elif number < needed:
            verdict = "need_more"
        budgets.append(
            Budget(
                stratum=stratum.id,
                name=str(stratum),
                risk=stratum.risk,
                required=policy.p_max[stratum.risk],
                trials=number,
                trials_needed=needed,
                failures=len(failures),
                upper_bound=upper_bound(min(len(failures), number), number, policy.confidence),
                worst=max((each.worst for each in found), default=0.0),
                proof=stratum.proof,
                verdict=verdict,
            )
        )
    open_ = [b for b in budgets if b.verdict == "need_more"]
    if open_:
        missing = sum(b.trials_needed - b.trials for b in open_)
        outcomes.append(
            NeedMore(n=missing, message=f"{missing} more trials on {len(open_)} strata, "
                     f"{open_[0].name} among them")
        )  # fmt: skip
    sums = tuple(
        _sum_over_rows(risk, [b for b, s in zip(budgets, strata, strict=True) if s.is_row
                              and s.risk == risk], policy)
        for risk in RISKS
        if rows[risk]
    )  # fmt: skip
    return Counted(outcome=gravest(outcomes), budgets=tuple(budgets), sums=sums)


def _sum_over_rows(risk: Risk, rows: Sequence[Budget], policy: Policy) -> Bound:
    fewest = min(row.trials for row in rows)
    failures = min(sum(row.failures for row in rows), fewest * len(rows))
    return Bound(
        risk=risk,
        rows=len(rows),
        trials=fewest,
        upper_bound=sum_bound(failures, fewest, len(rows), policy.confidence),
        required=policy.p_max[risk],
    )


# ---- what failed once ---------------------------------------------------------------------------


class Regression(Model):
    """One draw that one candidate got wrong. Kept for ever; `generator` says whether the seed still
    gives the inputs that it gave then (`generator_version`)."""

    op: str
    route: str
    candidate: str
    workload: Workload
    seed: int
    generator: str
    cause: Cause
    message: str = ""


def generator_version(op: str) -> str:
    """Identity of what turns seeds of an operator into inputs: its modules' contents, and torch."""
    total = hashlib.sha256()
    folder = f"fastkernels.ops.{catalog.operator(op).name}"
    for name in (f"{folder}.inputs", f"{folder}.adversarial", *_SHARED_GENERATORS):
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            spec = None
        if spec is not None and spec.origin is not None:
            total.update(Path(spec.origin).read_bytes())
    return f"{total.hexdigest()[:16]}-torch-{torch.__version__}"


_SHARED_GENERATORS = (
    "fastkernels.ops._shared.adversarial",
    "fastkernels.ops._shared.cases",
    "fastkernels.ops._shared.gdn_inputs",
)


class Corpus:
    """Regressions in a file of JSON lines, sorted, without repeats; without a path in memory. Lines
    are removed by hand alone, after a judge that was wrong itself.

    Several processes may add to one file: it is read again, replaced as a whole, and locked
    meanwhile. Raises TrialsError over a line that is no regression.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._records: tuple[Regression, ...] = () if path is None else _read(path)

    def __iter__(self) -> Iterator[Regression]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def add(self, *records: Regression) -> None:
        if not records:
            return
        if self.path is None:
            self._records = _merged(self._records, records)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.path):
            self._records = _merged(_read(self.path), (*self._records, *records))
            text = "".join(record.canonical() + "\n" for record in self._records)
            _replace(self.path, text)

    def of(self, candidate: Candidate, device: DeviceInfo) -> tuple[Regression, ...]:
        """What a candidate has to be right on first: its operator's records that it serves.

        Raises TrialsError over a record that the operator's cases cannot express any more."""
        found = []
        for record in self._records:
            if record.op != candidate.op:
                continue
            try:
                if serves(candidate, record.workload, device):
                    found.append(record)
            except TypeError as error:
                raise TrialsError(f"regression {record.id} ({record.workload}): {error}") from error
        return tuple(found)

    def has_failed(self, op: str, route: str) -> bool:
        """Whether any candidate of the route ever failed: its lineage."""
        return any(record.op == op and record.route == route for record in self._records)

    def verdict_on(self, candidate: Candidate) -> Regression | None:
        """A record of this very candidate, whose sources are part of its identity."""
        return next((r for r in self._records if r.candidate == candidate.id), None)


def _merged(*groups: Iterable[Regression]) -> tuple[Regression, ...]:
    by_line = {record.canonical(): record for group in groups for record in group}
    return tuple(by_line[line] for line in sorted(by_line))


def _read(path: Path) -> tuple[Regression, ...]:
    if not path.exists():
        return ()
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(
        read_line(line, f"{path}:{number}", Regression, "a regression", TrialsError)
        for number, line in enumerate(lines, start=1)
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with open(fresh, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


# ---- running ------------------------------------------------------------------------------------

Judge = Callable[[Candidate, Workload, Sequence[int]], Trials]
"""Judges one call per seed. `trials` counts calls with a verdict; a failure carries its cause and
seed. `draw` makes the inputs."""

JudgeAll = Callable[[Sequence[Candidate], Workload, Sequence[int]], Sequence[Trials]]
"""The same for several candidates, each on the same draws."""

FIRST_BATCH = 4
BATCH = 64


class Verdict(Model):
    """What came of some trials. `trials` are merged by stratum, with those given as `earlier`;
    `faults` are the infrastructure's, one for every attempt that was lost."""

    candidate: str
    policy: str
    outcome: Outcome
    trials: tuple[Trials, ...]
    budgets: tuple[Budget, ...]
    sums: tuple[Bound, ...]
    faults: tuple[Failure, ...]
    regressions: tuple[Regression, ...]  # new ones; in the corpus already


class Subject(NamedTuple):
    """A candidate, what it is judged on, and trials of it that are known already."""

    candidate: Candidate
    strata: Sequence[Stratum]
    earlier: Sequence[Trials] = ()


def run_trials(
    judge: Judge,
    candidate: Candidate,
    strata: Sequence[Stratum],
    policy: Policy,
    *,
    corpus: Corpus,
    device: DeviceInfo,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
    earlier: Sequence[Trials] = (),
    record: Callable[[Trials], None] = lambda trials: None,
    batch: int = BATCH,
) -> Verdict:
    """Judge a candidate until something is wrong, every bound holds, or `stop` says so.

    The corpus comes first; its draws are not random, so they count towards no bound. Then the
    strata take turns, adversarial ones first, in batches that double from FIRST_BATCH to `batch`:
    what is often wrong is found cheaply. `stop` is asked before every batch. `record` gets what
    each batch brought, for a ledger; given back as `earlier`, with the same `seed`, it is not
    judged again, and a wrong number in it is final. Raises TrialsError where the judge answers for
    another number of calls than it was given.
    """
    (verdict,) = run_together(
        lambda candidates, workload, seeds: [judge(c, workload, seeds) for c in candidates],
        [Subject(candidate, strata, earlier)],
        policy,
        corpus=corpus,
        device=device,
        seed=seed,
        stop=stop,
        record=lambda _, trials: record(trials),
        batch=batch,
    )
    return verdict


def run_together(
    judge: JudgeAll,
    subjects: Sequence[Subject],
    policy: Policy,
    *,
    corpus: Corpus,
    device: DeviceInfo,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
    record: Callable[[Candidate, Trials], None] = lambda candidate, trials: None,
    batch: int = BATCH,
) -> list[Verdict]:
    """`run_trials` for several candidates side by side, one verdict each.

    A stratum has the same seeds under every candidate, and what is asked of several at once goes to
    `judge` in one call: it draws, and computes what is right, once. Whoever is behind goes on
    first, so that those who share strata meet at them.
    """
    runs = [
        _Run(subject, policy, corpus, record).steps(device, seed, stop, batch)
        for subject in subjects
    ]
    waiting: dict[int, _Batch] = {}
    verdicts: dict[int, Verdict] = {}

    def advance(which: int, found: Trials | None) -> None:
        try:
            waiting[which] = next(runs[which]) if found is None else runs[which].send(found)
        except StopIteration as ended:
            verdicts[which] = ended.value

    for which in range(len(runs)):
        advance(which, None)
    while waiting:
        first = min(waiting.values(), key=lambda each: each.place)
        alike = [which for which, each in waiting.items() if each.asks == first.asks]
        candidates = [subjects[which].candidate for which in alike]
        for which in alike:
            del waiting[which]
        answers = judge(candidates, first.workload, first.seeds)
        for which, found in zip(alike, answers, strict=True):
            advance(which, found)
    return [verdicts[which] for which in range(len(runs))]


class _Batch(NamedTuple):
    """Seeds of a stratum that are to be judged; `place`: how far that is."""

    place: tuple[int, int]
    workload: Workload
    seeds: tuple[int, ...]

    @property
    def asks(self) -> tuple[str, tuple[int, ...]]:
        """What makes two of them one."""
        return self.workload.id, self.seeds


SEEDS = 2**31
"""Seeds lie below: torch's CPU generator takes 32 bits."""


def first_seed(seed: int, stratum: str) -> int:
    """Where the consecutive seeds of a stratum begin: no draw repeats within one."""
    text = hashlib.sha256(f"{seed}:{stratum}".encode()).digest()
    return int.from_bytes(text[:4], "big") % SEEDS


def merged(trials: Iterable[Trials]) -> tuple[Trials, ...]:
    """One `Trials` for each stratum, in the order of their first."""
    by_stratum: dict[str, list[Trials]] = defaultdict(list)
    for each in trials:
        by_stratum[each.stratum].append(each)
    return tuple(
        Trials(
            stratum=stratum,
            trials=sum(each.trials for each in group),
            failures=tuple(failure for each in group for failure in each.failures),
            worst=max(each.worst for each in group),
        )
        for stratum, group in by_stratum.items()
    )


_Steps = Generator[_Batch, Trials, T]


class _Run:
    def __init__(
        self,
        subject: Subject,
        policy: Policy,
        corpus: Corpus,
        record: Callable[[Candidate, Trials], None],
    ) -> None:
        self.candidate, self.strata, earlier = subject
        self.policy, self.corpus, self.record = policy, corpus, record
        self.trials = [each for each in earlier if each.trials or each.failures]
        self.faults: list[Failure] = []
        self.found: list[Regression] = []

    def steps(
        self, device: DeviceInfo, seed: int, stop: Callable[[], bool], batch: int
    ) -> _Steps[Verdict]:
        """Asks for batches, takes what came of each, and ends with the verdict."""
        outcome = self._before() or (yield from self._regressions(device, stop))
        if outcome is None:
            outcome = yield from self._sample(seed, stop, batch)
        counted = count(self.strata, self.trials, self.policy)
        return Verdict(
            candidate=self.candidate.id,
            policy=self.policy.id,
            outcome=counted.outcome if outcome is None else gravest((outcome, counted.outcome)),
            trials=merged(self.trials),
            budgets=counted.budgets,
            sums=counted.sums,
            faults=tuple(self.faults),
            regressions=tuple(self.found),
        )

    def _before(self) -> Fail | None:
        """What is known already: a candidate that was wrong once is wrong."""
        for each in self.trials:
            if failures := wrong(each):
                return Fail.of(failures[0])
        known = self.corpus.verdict_on(self.candidate)
        if known is None:
            return None
        return Fail(
            cause=known.cause,
            message=f"was wrong before: {known.message}",
            workload=known.workload.id,
            seed=known.seed,
        )

    def _regressions(self, device: DeviceInfo, stop: Callable[[], bool]) -> _Steps[Outcome | None]:
        records = self.corpus.of(self.candidate, device)
        for done, known in enumerate(records):
            if stop():
                left = len(records) - done
                return NeedMore(n=left, message=f"{left} draws that failed before")
            asked = _Batch((0, done), known.workload, (known.seed,))
            outcome = yield from self._batch(asked, f"regression:{known.id}")
            if outcome is not None:
                return outcome
        return None

    def _sample(self, seed: int, stop: Callable[[], bool], batch: int) -> _Steps[Outcome | None]:
        """The strata in turns; None where all bounds hold."""
        step, turn = FIRST_BATCH, 1
        in_order = sorted(self.strata, key=lambda stratum: not stratum.is_adversarial)
        while True:
            counted = count(self.strata, self.trials, self.policy)
            todo = {b.stratum: b for b in counted.budgets if b.verdict == "need_more"}
            if not todo:
                return None
            for i, stratum in enumerate(in_order):
                if stratum.id not in todo:
                    continue
                if stop():
                    return count(self.strata, self.trials, self.policy).outcome
                done = todo[stratum.id].trials
                size = min(step, todo[stratum.id].trials_needed - done)
                first = first_seed(seed, stratum.id) + done
                seeds = tuple((first + k) % SEEDS for k in range(size))
                asked = _Batch((turn, i), stratum.workload, seeds)
                outcome = yield from self._batch(asked, stratum.id)
                if outcome is not None:
                    return outcome
            step, turn = min(2 * step, batch), turn + 1

    def _batch(self, asked: _Batch, stratum: str) -> _Steps[Outcome | None]:
        """Judge some seeds; None where all were right. An attempt that the infrastructure cut
        short is made again from its beginning, and what it had found right does not count."""
        workload, seeds = asked.workload, asked.seeds
        for _ in range(self.policy.max_retries + 1):
            found = yield asked
            worst = found.worst if found.worst <= BOUNDLESS else BOUNDLESS  # NaN, too
            found = found.model_copy(update={"stratum": stratum, "worst": worst})
            if failures := wrong(found):
                self._keep(found, workload, seeds, failures)
                return Fail.of(failures[0].model_copy(update={"workload": workload.id}))
            if not found.failures:
                if found.trials != len(seeds):
                    raise TrialsError(
                        f"the judge of {workload} answered for {found.trials} calls, "
                        f"expected {len(seeds)}"
                    )
                self.trials.append(found)
                self.record(self.candidate, found)
                return None
            self.faults += found.failures
            self.record(self.candidate, found.model_copy(update={"trials": 0}))
        return Inconclusive(
            message=f"{workload}: {self.policy.max_retries + 1} attempts, the last one ended by "
            f"{self.faults[-1].cause.value}: {self.faults[-1].message}"
        )

    def _keep(
        self, found: Trials, workload: Workload, seeds: Sequence[int], failures: Sequence[Failure]
    ) -> None:
        """File wrong trials, and their seeds: all of the batch where the judge names none."""
        self.faults += [f for f in found.failures if f.cause.is_infrastructure]
        found = found.model_copy(
            update={"trials": max(found.trials, len(failures)), "failures": tuple(failures)}
        )
        self.trials.append(found)
        wrong_seeds = [f.seed for f in failures if f.seed is not None]
        self.found += [
            Regression(
                op=self.candidate.op,
                route=self.candidate.route,
                candidate=self.candidate.id,
                workload=workload,
                seed=seed,
                generator=generator_version(self.candidate.op),
                cause=failures[0].cause,
                message=failures[0].message,
            )
            for seed in wrong_seeds or seeds
        ]
        self.corpus.add(*self.found)
        self.record(self.candidate, found)
