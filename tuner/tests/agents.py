"""Campaigns of scripted agents over a lab that measures nothing: what a kernel takes, and whether
it is right, stands in its own comments."""

from __future__ import annotations

import functools
import hashlib
import random
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastkernels import catalog
from fastkernels_tuner import plan, policy
from fastkernels_tuner.agent import policy as constitutions
from fastkernels_tuner.agent import sources
from fastkernels_tuner.agent.backends import Backend, Replay, Script, Scripted
from fastkernels_tuner.agent.loop import Loop
from fastkernels_tuner.agent.memory import BEGUN, Begun, History, Memory
from fastkernels_tuner.agent.policy import Constitution
from fastkernels_tuner.agent.workspace import PLAN
from fastkernels_tuner.campaign import Campaign
from fastkernels_tuner.model import Block, Candidate, Policy, Workload, canonical, digest
from fastkernels_tuner.store import Store
from tuner.tests.fake import ENVIRONMENT, FakeBench

OP, ROUTE = "gdn_prefill", "torch_chunked"
OPERATOR = catalog.operator(OP)
FILES = sources.editable(OPERATOR, OPERATOR.safe_route)
(NAME,) = FILES


def small(**changes: Any) -> Policy:
    fields = {"max_trials": 4, "max_workloads": 2, "buckets": 1, "rungs": ((1, 2), (2, 2))}
    return policy.default("cpu").model_copy(update=fields | changes)


def chance(*parts: object) -> float:
    """Between 0 and 1, the same for the same parts in every process."""
    text = ":".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") / 2**64


@dataclass
class FakeLab(FakeBench):
    """`# fake: us=0.9` multiplies the time, `us_<mode>=` of a mode, `us_chunk_<n>=` of a config;
    `wrong=0.015` is the share of draws that are wrong, `random=1` gives other bits every time."""

    us: Any = None
    texts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.us = self._us
        self.wrong = self._wrong

    def provide(self, source: str, files: Mapping[str, str]) -> None:
        self.texts[source] = "\n".join(files.values())

    def _said(self, candidate: Candidate, key: str, otherwise: float) -> float:
        found = re.findall(rf"# fake:.*\b{key}=([\d.]+)", self.texts.get(candidate.source, ""))
        return float(found[-1]) if found else otherwise

    def _us(self, candidate: Candidate, workload: Workload) -> float:
        us = 1000.0 * self._said(candidate, "us", 1.0)
        us *= self._said(candidate, f"us_{workload.case['mode']}", 1.0)
        return us * self._said(candidate, f"us_chunk_{candidate.config['chunk_size']}", 1.0)

    def _wrong(self, candidate: Candidate, workload: Workload, seed: int) -> bool:
        share = self._said(candidate, "wrong", 0.0)
        return share > 0 and chance(candidate.source, workload.case["name"], seed) < share

    def repeat(
        self, candidate: Candidate, workload: Workload, seed: int, *, calls: int = 3
    ) -> tuple[str, ...]:
        self.is_random = self._said(candidate, "random", 0.0) > 0
        return super().repeat(candidate, workload, seed, calls=calls)

    def pair(
        self, a: Candidate, b: Candidate, workload: Workload, *, number: int, iterations: int
    ) -> tuple[Block, ...]:
        # Of what is measured, not of when: an interrupted campaign sees the same noise again.
        self.rng = random.Random(f"{a.id}:{b.id}:{workload.id}:{number}")
        blocks = super().pair(a, b, workload, number=number, iterations=iterations)
        return tuple(block.model_copy(update={"number": number}) for block in blocks)


def plan_text(**changes: Any) -> str:
    fields: dict[str, Any] = {
        "hypothesis": "too many bytes", "change": "fewer bytes", "family": "bytes",
        "bottleneck": "memory", "expected_gain": 0.1, "falsified_by": "no gain",
    }  # fmt: skip
    return "".join(f"{k} = {_toml(v)}\n" for k, v in (fields | changes).items())


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    return repr(list(value)) if isinstance(value, tuple) else repr(value)


def kernel(said: str, more: str = "") -> str:
    """Of another structure than any that says something else."""
    variant = f"variant_{digest(said)[:8]} = True\n" if said else ""
    return f"{FILES[NAME]}# fake: {said}\n{variant}{more}"


def edits(said: str, more: str = "", **plan_fields: Any) -> Scripted:
    """A turn that makes the kernel what it says."""
    fields = {"change": said, **plan_fields}
    return Scripted(files={NAME: kernel(said, more), PLAN: plan_text(**fields)}, cost_usd=0.5)


def script(*turns: Scripted) -> Replay:
    return Replay(Script(turns=turns), ceiling_usd=1.0)


@functools.cache
def _empty() -> bytes:
    """A store's database; Optuna's tables take a while to make."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "store.db")
        Store.open(f"sqlite:///{path}").close()
        return path.read_bytes()


def opened(folder: Path) -> Store:
    path = folder / "store.db"
    path.write_bytes(_empty())
    return Store.open(f"sqlite:///{path}")


def begin(
    store: Store,
    folder: Path,
    *,
    rules: Policy | None = None,
    constitution: Constitution | None = None,
    **fields: Any,
) -> Campaign:
    """A campaign as `agent` begins it."""
    rules = rules or small()
    environment = ENVIRONMENT.model_copy(update={"timer": rules.timer})
    spec = plan.make(OP, "cpu", rules, environment, routes=(ROUTE,), seed=3)
    number = store.create(spec)
    campaign = Campaign(store, number, folder / number)
    constitution = constitution or constitutions.default()
    with store.hold(number, "begin", 60) as lease:
        made = Memory(store, number, lease)
        begun = Begun(
            route=ROUTE, files=made.keep(FILES),
            constitution=constitution.model_dump(mode="json"), **fields,
        )  # fmt: skip
        made.add(BEGUN, begun)
    return campaign


def go_on(
    campaign: Campaign,
    backend: Backend,
    *,
    lab: FakeLab | None = None,
    rounds: int = 20,
    critic: Backend | None = None,
    others: Sequence[Backend] = (),
    watch: Callable[[Memory], None] = lambda memory: None,
    constitution: Constitution | None = None,
    **fields: Any,
) -> str:
    """As another process would: nothing in memory is left from before. Why it ended."""
    store = campaign.store
    fresh = Campaign(store, campaign.id, campaign.folder, campaign.say)
    if lab is None:
        lab = FakeLab(noise=0.002)
    lab.environment = fresh.spec.environment
    with store.hold(campaign.id, "test", 60) as lease:
        memory = Memory(store, campaign.id, lease)
        watch(memory)
        loop = Loop(
            fresh, memory, lab, constitution or constitutions.default(), (backend, *others),
            critic or script(), rounds, **fields,
        )  # fmt: skip
        return loop.run()


def history(campaign: Campaign) -> History:
    return History.of(campaign.store.events(campaign.id))


def decisions(campaign: Campaign) -> list[tuple[str, str]]:
    return [(each.choice, each.cause) for each in history(campaign).decisions]


def ending(campaign: Campaign) -> str:
    """Everything that was decided and learnt, but for seconds and words (what is known to be wrong
    is not judged again, and says so): what must not depend on crashes."""
    found = history(campaign)
    apart = {"device_s", "message"}
    decided = [d.model_dump(mode="json", exclude=apart) for d in found.decisions]
    lessons = [lesson.id for lesson in found.lessons]
    champions = {regime: each.experiment for regime, each in found.champions().items()}
    return canonical([decided, lessons, sorted(found.contradicted), champions])
