"""What the tests of both databases share: a campaign, and what runs in processes of its own."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from multiprocessing.connection import Connection
from typing import Any

import optuna

from fastkernels_tuner.model import CampaignSpec, Environment, Policy, Regime
from fastkernels_tuner.store import Job, Store, study_storage

POLICY = Policy(name="test", timer="wall", is_promotable=False)


def spec(**changes: Any) -> CampaignSpec:
    environment = Environment(
        device="cpu", arch="cpu", uuid="host", driver="", versions={}, code="0", timer="wall"
    )
    regime = Regime(op="toy", mode="only", constants={"k_dim": 128}, bounds={"rows": (1, 8)})
    fields: dict[str, Any] = {
        "op": "toy",
        "device": "cpu",
        "environment": environment,
        "policy": POLICY,
        "routes": ("plain",),
        "regimes": (regime,),
        "workloads": (),
    }
    return CampaignSpec(**fields | changes)


class Clock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.now = datetime(2026, 12, 1, 12, tzinfo=timezone.utc)

    def __call__(self) -> datetime:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


def study_of(url: str, campaign: str) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(
        study_name=f"{campaign}/toy", storage=study_storage(url), load_if_exists=True
    )


def work(url: str, name: str, start: Any, ready: Connection, hangs_after: int | None) -> None:
    """A worker: takes jobs until all are settled, with an Optuna trial for each. The others at the
    barrier `start` take their first two jobs at the same time.

    With `hangs_after`, it sends the job that follows so many through `ready` and stays with it.
    """
    with Store.open(url) as store:
        (campaign,) = store.campaigns()
        study = study_of(url, campaign.id)
        done = 0
        while any(job.settled is None for job in store.jobs(campaign.id)):
            store.recover(1 + POLICY.max_retries)
            job = store.claim(name, device="cpu")
            if job is None:
                time.sleep(0.05)
                continue
            if done < 2:
                start.wait(60)
            if done == hangs_after:
                store.heartbeat(job, ttl_s=1)
                ready.send(job)
                time.sleep(600)
            trial = study.ask()
            study.tell(trial, trial.suggest_float("x", 0, 1))
            store.finish(job, {"number": job.payload["number"], "trial": trial.number})
            done += 1
    ready.send(done)


def hang(url: str, ready: Connection) -> None:
    """Takes a job and stays with it."""
    with Store.open(url) as store:
        ready.send(store.claim("victim", device="cpu", ttl_s=60))
        time.sleep(600)


def create(url: str, start: Any, ready: Connection) -> None:
    """Opens a store that nobody made yet."""
    start.wait()
    with Store.open(url) as store:
        ready.send(store.create(spec()))


def enqueue(store: Store, number: int) -> tuple[str, list[int]]:
    campaign = store.create(spec())
    return campaign, [store.enqueue(campaign, "evaluate", {"number": i}) for i in range(number)]


def claim(store: Store, worker: str = "worker", **options: Any) -> Job:
    job = store.claim(worker, device="cpu", **options)
    assert job is not None
    return job
