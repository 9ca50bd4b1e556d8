"""What a candidate has to get past before its times mean anything: gates, in order.

A gate is a pure function `(candidate, evidence) -> Pass | Fail(cause) | NeedMore(n) | Inconclusive`
of what was found out, all of it: evidence holds every attempt, and whatever blames the candidate
in any of them is final. A retry cannot make a wrong number right; it can only replace what the
infrastructure took away.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from fastkernels import catalog
from fastkernels.ops._shared.gdn_inputs import pool_layout
from fastkernels_tuner.model import (
    Block,
    Candidate,
    Cause,
    Environment,
    Evaluation,
    Failure,
    Model,
    Policy,
    Trials,
    Workload,
)
from fastkernels_tuner.trials import (
    Fail,
    Inconclusive,
    NeedMore,
    Outcome,
    Pass,
    Stratum,
    count,
    gravest,
    wrong,
)

__all__ = [
    "FACTS", "GATES", "Decided", "Evidence", "Facts", "Fail", "Inconclusive", "NeedMore", "Outcome",
    "Pass", "Repeat", "banned", "decide", "exit_code", "floor_us", "is_retryable", "promises_bits",
    "retried", "sources", "traffic",
]  # fmt: skip


class Repeat(Model):
    """Digests of the outputs of calls with equal inputs; of the indexer, with each row sorted."""

    workload: str
    seed: int
    digests: tuple[str, ...]


class Evidence(Model):
    """Everything that was found out about one candidate, failed attempts included.

    gathered_under: ids of the policies under which the parts were gathered.
    gpus: UUIDs of further GPUs, alike in everything else, that parts may have been measured on.
    sources: texts by path.   is_built: None where nobody tried.
    smoke: ids of the rows that are judged first, one of each regime.
    trials: of workloads and generators, no draw twice: what bounds are computed from. Those inside
    `evaluations` (of a search, say) can show a candidate wrong, and count towards no bound.
    floors: microseconds by workload, see `floor_us`.
    """

    policy: Policy
    gathered_under: tuple[str, ...]
    environment: Environment
    gpus: tuple[str, ...] = ()
    workloads: tuple[Workload, ...]
    strata: tuple[Stratum, ...]
    smoke: tuple[str, ...]
    sources: dict[str, str]
    is_built: bool | None = None
    build_message: str = ""
    evaluations: tuple[Evaluation, ...] = ()
    trials: tuple[Trials, ...] = ()
    repeats: tuple[Repeat, ...] = ()
    floors: dict[str, float] = Field(default_factory=dict)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for each in self.evaluations for block in each.blocks)

    @property
    def all_trials(self) -> tuple[Trials, ...]:
        """A judged call in an evaluation counts for its workload, whatever the judge named it."""
        inside = (
            each.model_copy(update={"stratum": evaluation.workload})
            for evaluation in self.evaluations
            for each in evaluation.trials
        )
        return (*self.trials, *inside)

    def blame(self) -> Iterator[Failure]:
        """What the candidate is to blame for, in any attempt."""
        for evaluation in self.evaluations:
            failure = evaluation.failure
            if failure is not None and not failure.cause.is_infrastructure:
                where = failure.workload or evaluation.workload
                yield failure.model_copy(update={"workload": where})
        for each in self.all_trials:
            for failure in wrong(each):
                yield failure.model_copy(update={"workload": failure.workload or each.stratum})


Gate = Callable[[Candidate, Evidence], Outcome]


# ---- retries ------------------------------------------------------------------------------------


def is_retryable(evaluation: Evaluation) -> bool:
    """Whether the infrastructure alone is to blame."""
    failures = [f for each in evaluation.trials for f in each.failures]
    failures += [evaluation.failure] if evaluation.failure is not None else []
    if not failures or any(wrong(each) for each in evaluation.trials):
        return False
    return all(failure.cause.is_infrastructure for failure in failures)


def retried(
    attempt: Callable[[], Evaluation], policy: Policy, record: Callable[[Evaluation], None]
) -> Evaluation:
    """The last of at most `1 + policy.max_retries` attempts; `record` gets each of them."""
    for _ in range(policy.max_retries + 1):
        found = attempt()
        record(found)
        if not is_retryable(found):
            break
    return found


# ---- sources ------------------------------------------------------------------------------------

_MODULES = {
    name: why
    for why, names in {
        "looks at or changes what runs it": "ctypes cffi gc inspect mmap sys",
        "lets work go on beside the call": "concurrent multiprocessing signal subprocess threading",
        "sees the clock": "time timeit",
        "carries results between calls or hosts": "pickle shelve socket",
        "is an implementation by others": "deep_gemm fla flash_attn flash_mla flashinfer "
        "flashinfer_bench sgl_kernel sglang transformer_engine vllm xformers",
        "compiles past the build": "torch.utils.cpp_extension",
        "is the judge's": "bench fastkernels.testing fastkernels_tuner",
    }.items()
    for name in names.split()
}
_OFFLINE = ("inputs", "reference", "adversarial")  # of an operator, the judge's as well

_DEVICE_CODE = (
    (re.compile(r"nanosleep"), "waits for time to pass"),
    (re.compile(r"\bclock(64)?\s*\(|%clock|globaltimer"), "sees the clock"),
    (re.compile(r"\bcudaGraph|\bcuGraph"), "replays a graph"),
    (re.compile(r"\b\w*(accessPolicyWindow|ersistingL2)\w*"), "changes what stays in L2"),
    (re.compile(r"\bcuda(Malloc|HostAlloc)|\bcuMem(Alloc|HostAlloc)"), "keeps memory of its own"),
    (
        re.compile(r"^\s*(static\s+)?__device__\s+(?!.*\b(const|constexpr)\b)[^(]*;", re.MULTILINE),
        "keeps state between calls",
    ),
)


def banned(files: Mapping[str, str]) -> list[str]:
    """What implementations must not contain, each as `path:line: what`: imports of others'
    implementations, of the judge and of what reaches around it; clocks; graphs; state that outlives
    a call; exceptions that end in something else. A scan, not a proof: the other gates hold alone.
    """
    found: list[str] = []
    for path, text in sorted(files.items()):
        if path.endswith(".py"):
            found += (f"{path}:{line}: {what}" for line, what in _scan_python(path, text))
        for pattern, what in _DEVICE_CODE:
            for match in pattern.finditer(_without_comments(text)):
                line = text.count("\n", 0, match.end()) + 1
                found.append(f"{path}:{line}: {match.group().strip()!r} {what}")
    return found


def _without_comments(text: str) -> str:
    """C comments blanked, line by line."""
    text = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.DOTALL)
    return re.sub(r"//[^\n]*", lambda m: " " * len(m.group()), text)


def _scan_python(path: str, text: str) -> Iterator[tuple[int, str]]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        yield getattr(error, "lineno", None) or 1, f"is not Python: {error}"
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if name in ("CUDAGraph", "make_graphed_callables", "__import__", "import_module"):
                yield node.lineno, f"{name!r} is not for implementations"
            continue
        elif isinstance(node, ast.ExceptHandler):
            if not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                yield node.lineno, "an exception is answered by something else"
            continue
        else:
            continue
        for name in names:
            why = _why_banned(name)
            if why:
                yield node.lineno, f"{name!r} {why}"
                break


def _why_banned(module: str) -> str:
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        why = _MODULES.get(".".join(parts[:length]))
        if why:
            return why
    if parts[:2] == ["fastkernels", "ops"] and len(parts) > 3 and parts[3] in _OFFLINE:
        return _MODULES["fastkernels.testing"]
    return ""


def sources(candidate: Candidate) -> dict[str, str]:
    """Texts that a candidate is made from, by path: the route's module, the operator's own modules
    but those of tests, and a compiled kernel's sources."""
    route, _ = candidate.bind()
    file = getattr(sys.modules.get(route.launch.__module__), "__file__", None)
    paths = set() if file is None else {Path(file)}
    if route.language != "torch":
        kernels = catalog.module(candidate.op, "kernels").KERNELS
        paths |= {p for kernel in kernels if kernel.name == route.name for p in kernel.sources()}
    folder = Path(str(catalog.__file__)).parent / "ops" / candidate.op
    offline = {f"{name}.py" for name in (*_OFFLINE, "op", "__init__")}
    paths |= {path for path in folder.glob("*.py") if path.name not in offline}
    return {str(path): path.read_text(encoding="utf-8") for path in sorted(paths)}


# ---- the roofline floor -------------------------------------------------------------------------


class Facts(Model):
    """What a device cannot beat. Memory bandwidth in bytes per second (data sheet); an empty kernel
    takes longer than `launch_us`."""

    bandwidth: float
    l2_bytes: int
    launch_us: float


FACTS: dict[str, Facts] = {
    "NVIDIA H200": Facts(bandwidth=4.8e12, l2_bytes=60 * 2**20, launch_us=0.5),
    "NVIDIA B200": Facts(bandwidth=8.0e12, l2_bytes=126 * 2**20, launch_us=0.5),
}

FLOOR_SLACK = 0.9


class Traffic(NamedTuple):
    """The fewest bytes that any implementation reads and writes, legitimate skips considered."""

    read: int
    written: int


def floor_us(workload: Workload, facts: Facts) -> float:
    """A time that no honest call on a cold L2 can beat. What is written may still lie in L2 when
    the kernel ends, so only what exceeds it counts."""
    read, written = traffic(workload)
    num_bytes = read + max(0, written - facts.l2_bytes)
    return FLOOR_SLACK * max(facts.launch_us, 1e6 * num_bytes / facts.bandwidth)


def traffic(workload: Workload) -> Traffic:
    """Lower bounds over every draw of a workload. (0, 0) for an operator that is not known."""
    known: dict[str, Callable[[Any], Traffic]] = {
        "gdn_decode": _gdn_decode,
        "gdn_prefill": _gdn_prefill,
        "dsa_sparse_attention": _dsa_sparse_attention,
        "dsa_topk_indexer": _dsa_topk_indexer,
        "moe_fp8_block_scale": _moe_fp8_block_scale,
    }
    if workload.op not in known:
        return Traffic(0, 0)
    return known[workload.op](workload.build())


def _gdn_decode(case: Any) -> Traffic:
    return _gdn(case, [1] * case.batch_size)


def _gdn_prefill(case: Any) -> Traffic:
    return _gdn(case, case.lengths)


def _gdn(case: Any, lengths: Iterable[int]) -> Traffic:
    """States that are read and stored, and q, k, v and output of the tokens in between."""
    lengths = tuple(lengths)
    read, write, slots = pool_layout(case.mode, len(lengths), case.indices, case.padding)
    reads = [True] * len(lengths) if read is None else [0 <= i < slots for i in read.tolist()]
    stores = [True] * len(lengths) if write is None else [0 <= i < slots for i in write.tolist()]
    active = [is_read and length > 0 for is_read, length in zip(reads, lengths, strict=True)]
    tokens = sum(length for length, is_on in zip(lengths, active, strict=True) if is_on)
    Hk, Hv, D = case.num_q_heads, case.num_v_heads, case.head_size
    state = Hv * D * D * 4
    states_read = 0 if case.state == "none" else sum(active)
    states_stored = sum(a and b for a, b in zip(active, stores, strict=True))
    return Traffic(
        states_read * state + tokens * (2 * Hk + Hv) * D * 2,
        states_stored * state + tokens * Hv * D * 2,
    )


def _dsa_sparse_attention(case: Any) -> Traffic:
    """The rows of one token: those of another may be the same ones."""
    full = min(case.topk, case.num_rows)
    valid = case.valid or (full,) * case.num_tokens
    rows = max(valid, default=0) if case.law != "repeated" else 1
    width = case.head_dim_ckv + case.head_dim_kpe
    queries = sum(1 for number in valid if number) * case.num_qo_heads * width * 2
    indices = case.num_tokens * case.topk * 4
    outputs = case.num_tokens * case.num_qo_heads * (case.head_dim_ckv * 2 + 4)
    return Traffic(rows * width * 2 + queries + indices, outputs)


def _dsa_topk_indexer(case: Any) -> Traffic:
    """Keys and scales of rows longer than topk: others need no score. Rows share pages where the
    cache has fewer than they use."""
    share = {"distinct": 1.0, "repeated": 0.5}.get(case.pages, 0.5)
    limit = case.max_num_pages * 64
    lengths = [min(length, limit) for length in case.seq_lens]
    scored = sum(int(share * length) for length in lengths if length * share > case.topk)
    return Traffic(min(scored, case.num_pages * 64) * 132, case.batch_size * case.topk * 4)


def _moe_fp8_block_scale(case: Any) -> Traffic:
    """Weights of the local experts that tokens choose: four standard deviations fewer than are
    expected, since draws differ. Other laws of the logits may choose none."""
    written = case.seq_len * case.hidden_size * 2
    if case.logits != "normal" or not 0 <= case.local_expert_offset < case.num_experts:
        return Traffic(0, written)
    local = min(case.num_local_experts, case.num_experts - case.local_expert_offset)
    hit = 1.0 - (1.0 - case.topk / case.num_experts) ** case.seq_len
    fewest = max(0, int(local * hit - 4.0 * (local * hit * (1.0 - hit)) ** 0.5))
    return Traffic(fewest * 3 * case.intermediate_size * case.hidden_size, written)


# ---- gates --------------------------------------------------------------------------------------


def static(candidate: Candidate, evidence: Evidence) -> Outcome:
    if not evidence.sources:
        return NeedMore(n=1, message="no sources were scanned")
    found = banned(evidence.sources)
    return Fail(cause=Cause.STATIC_BAN, message="; ".join(found)) if found else Pass()


def compile_(candidate: Candidate, evidence: Evidence) -> Outcome:
    if evidence.is_built is None:
        return NeedMore(n=1, message="nobody tried to build it")
    if not evidence.is_built:
        return Fail(cause=Cause.COMPILE, message=evidence.build_message or "does not compile")
    return _first(f for f in evidence.blame() if f.cause is Cause.COMPILE)


def smoke(candidate: Candidate, evidence: Evidence) -> Outcome:
    """One row of each regime was judged, and none was wrong."""
    blame = _first(f for f in evidence.blame() if f.workload in evidence.smoke)
    judged = _judged(evidence)
    missing = [row for row in evidence.smoke if not judged[row]]
    if not evidence.smoke:
        return gravest((blame, NeedMore(n=1, message="no row of any regime is named")))
    if missing:
        message = f"{len(missing)} regimes of which no row was judged"
        return gravest((blame, NeedMore(n=len(missing), message=message)))
    return blame


def numerics(candidate: Candidate, evidence: Evidence) -> Outcome:
    """Nothing was ever wrong, in no attempt, and every workload has its trials."""
    rows = [stratum for stratum in evidence.strata if not stratum.is_adversarial]
    counted = count(rows, evidence.trials, evidence.policy)
    return gravest((_first(evidence.blame()), counted.outcome))


def adversarial(candidate: Candidate, evidence: Evidence) -> Outcome:
    found = [stratum for stratum in evidence.strata if stratum.is_adversarial]
    if not found:
        return Inconclusive(message=f"no adversarial inputs of {candidate.op} that it serves")
    return count(found, evidence.trials, evidence.policy).outcome


def determinism(candidate: Candidate, evidence: Evidence) -> Outcome:
    """Equal inputs gave equal bits wherever that is promised, tried on the smoke rows at least."""
    by_id = {workload.id: workload for workload in evidence.workloads}
    promised = {id_ for id_, workload in by_id.items() if promises_bits(workload)}
    for repeat in evidence.repeats:
        if repeat.workload in promised and len(set(repeat.digests)) > 1:
            return Fail(
                cause=Cause.NONDETERMINISTIC,
                message=f"{by_id[repeat.workload]}: {len(set(repeat.digests))} results of "
                f"{len(repeat.digests)} calls with equal inputs",
                workload=repeat.workload,
                seed=repeat.seed,
            )
    tried = {repeat.workload for repeat in evidence.repeats if len(repeat.digests) > 1}
    missing = (promised & set(evidence.smoke)) - tried
    if missing:
        return NeedMore(n=len(missing), message=f"{len(missing)} rows were not called twice")
    return Pass()


def promises_bits(workload: Workload) -> bool:
    """Whether equal calls promise equal bits: everywhere but in a mixture of experts that is not
    asked for it, where atomic additions may come in any order."""
    return workload.op != "moe_fp8_block_scale" or bool(workload.case.get("deterministic"))


def floor(candidate: Candidate, evidence: Evidence) -> Outcome:
    """No block is faster than memory allows; one that is goes to quarantine."""
    without = []
    for block in evidence.blocks:
        if block.discarded or not block.us:
            continue
        least = evidence.floors.get(block.workload)
        if least is None:
            without.append(block.workload)
        elif statistics.median(block.us) < least:
            return Fail(
                cause=Cause.CHEAT_SUSPECT,
                message=f"{statistics.median(block.us):.3f} us, where moving the bytes takes "
                f"{least:.3f} us",
                workload=block.workload,
            )
    if without and evidence.policy.is_promotable:
        return Inconclusive(message=f"no floor is known for {len(set(without))} rows")
    return Pass()


def timer(candidate: Candidate, evidence: Evidence) -> Outcome:
    policy, found = evidence.policy, evidence.environment.timer
    needed = "cupti" if policy.is_promotable else policy.timer
    if found != needed or policy.timer != needed:
        message = f"times are of {found!r}, expected {needed!r}: they promote nothing"
        return Inconclusive(message=message, is_environment=True)
    return Pass()


def environment(candidate: Candidate, evidence: Evidence) -> Outcome:
    """One environment, on any GPU of the product, few discarded blocks, no more attempts than the
    policy allows."""
    policy, blocks, here = evidence.policy, evidence.blocks, evidence.environment
    alike = {here.model_copy(update={"uuid": uuid}).id for uuid in (here.uuid, *evidence.gpus)}
    other = {block.environment for block in blocks} - alike
    if other:
        message = f"blocks were measured in other environments: {', '.join(sorted(other))}"
        return Inconclusive(message=message, is_environment=True)
    lost = [block.discarded for block in blocks if block.discarded]
    if len(lost) > policy.max_discarded * len(blocks):
        reason, _ = Counter(lost).most_common(1)[0]
        message = (
            f"{len(lost)} of {len(blocks)} blocks were discarded ({reason}), "
            f"at most {policy.max_discarded:.0%} may be"
        )
        return Inconclusive(message=message, is_environment=True)
    in_a_row: Counter[str] = Counter()
    for each in evidence.evaluations:
        in_a_row[each.workload] = in_a_row[each.workload] + 1 if is_retryable(each) else 0
        if in_a_row[each.workload] > policy.max_retries + 1:
            message = (
                f"{each.workload}: {in_a_row[each.workload]} attempts in a row were lost, "
                f"at most {policy.max_retries + 1} may be made"
            )
            return Inconclusive(message=message, is_environment=True)
    return Pass()


def policy_digest(candidate: Candidate, evidence: Evidence) -> Outcome:
    other = set(evidence.gathered_under) - {evidence.policy.id}
    if other or not evidence.gathered_under:
        found = ", ".join(sorted(other)) or "none"
        return Inconclusive(
            message=f"gathered under policy {found}, the current one is {evidence.policy.id}"
        )
    return Pass()


def completeness(candidate: Candidate, evidence: Evidence) -> Outcome:
    """The rows that were judged and timed are those that were expected, all of them and no other: a
    missing row is not a failed one, and nobody would notice."""
    expected = [workload.id for workload in evidence.workloads]
    if not expected or len(set(expected)) < len(expected):
        return Inconclusive(message=f"{len(expected)} rows expected, {len(set(expected))} distinct")
    judged = {s.id for s in evidence.strata if not s.is_adversarial and _judged(evidence)[s.id]}
    timed = {block.workload for block in evidence.blocks if block.us and not block.discarded}
    stray = (judged | timed) - set(expected)
    if stray:
        return Inconclusive(message=f"{len(stray)} rows that were not expected: {min(stray)}")
    missing = [row for row in expected if row not in judged or row not in timed]
    if missing:
        message = f"{len(missing)} of {len(expected)} rows were not judged and timed"
        return NeedMore(n=len(missing), message=message)
    return Pass()


def _first(failures: Iterable[Failure]) -> Outcome:
    for failure in failures:
        return Fail.of(failure)
    return Pass()


def _judged(evidence: Evidence) -> Counter[str]:
    found: Counter[str] = Counter()
    for each in evidence.all_trials:
        found[each.stratum] += each.trials
    return found


GATES: dict[str, Gate] = {
    "static": static,
    "compile": compile_,
    "smoke": smoke,
    "numerics": numerics,
    "adversarial": adversarial,
    "determinism": determinism,
    "floor": floor,
    "timer": timer,
    "environment": environment,
    "policy": policy_digest,
    "completeness": completeness,
}
"""In order."""


class Decided(Model):
    """The gravest outcome, the gate that it is of, and the outcomes of all gates up to a Fail."""

    candidate: str
    policy: str
    outcome: Outcome
    gate: str
    gates: dict[str, Outcome]


def decide(candidate: Candidate, evidence: Evidence, upto: str = "completeness") -> Decided:
    """Through the gates in order, up to the first Fail or past the gate `upto`.

    A Fail outweighs what is missing before it: more trials would not mend it.
    """
    found: dict[str, Outcome] = {}
    for name, gate in GATES.items():
        found[name] = gate(candidate, evidence)
        if found[name].kind == "fail" or name == upto:
            break
    outcome = gravest(found.values())
    at = next(name for name, each in found.items() if each == outcome)
    return Decided(
        candidate=candidate.id, policy=evidence.policy.id, outcome=outcome, gate=at, gates=found
    )


def exit_code(outcome: Outcome) -> int:
    """0 passed, 3 the machine is unfit, 5 rejected, 6 inconclusive, 8 quarantined."""
    if isinstance(outcome, Fail):
        return 8 if outcome.is_quarantine else 5
    if isinstance(outcome, Inconclusive):
        return 3 if outcome.is_environment else 6
    return 6 if isinstance(outcome, NeedMore) else 0
