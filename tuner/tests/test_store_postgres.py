"""The store on a real PostgreSQL, which several GPUs and hosts share."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import optuna
import psycopg
import pytest
from sqlalchemy import URL, create_engine, text

from fastkernels_tuner.model import Cause, Failure, digest
from fastkernels_tuner.store import (
    DiskFull,
    LeaseLost,
    LeaseTaken,
    Store,
    StoreCorrupt,
    StoreUnavailable,
    UnknownBlob,
    study_storage,
)
from tuner.tests import postgres
from tuner.tests.stores import Clock, claim, enqueue, spec, study_of, work

pytestmark = [
    pytest.mark.service,
    pytest.mark.skipif(
        bool(postgres.missing()),
        reason=f"PostgreSQL's {', '.join(postgres.missing())} not found (Debian: postgresql)",
    ),
]


@pytest.fixture(scope="module")
def server() -> Iterator[URL]:
    with postgres.server() as url:
        yield url


@pytest.fixture(scope="module")
def template(server: URL) -> str:
    """A database with an empty store: to copy one is quicker than to make Optuna's tables anew."""
    execute(server, "CREATE DATABASE template_store")
    Store.open(render(server.set(database="template_store"))).close()
    return "template_store"


@pytest.fixture
def url(server: URL, template: str, request: pytest.FixtureRequest) -> str:
    name = f"t{digest(request.node.nodeid)[:12]}"
    execute(server, f"CREATE DATABASE {name} TEMPLATE {template}")
    return render(server.set(database=name))


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        yield opened


def render(url: URL) -> str:
    return url.render_as_string(hide_password=False)


def execute(url: URL | str, *statements: str) -> None:
    """What no method of the store would do."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


def test_one_of_two_workers_is_killed_and_nothing_is_lost_or_counted_twice(url: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    number, start = 24, spawn.Barrier(2)
    with Store.open(url) as store:
        campaign, ids = enqueue(store, number)
        study_of(url, campaign)
        pipes = {name: spawn.Pipe(duplex=False) for name in ("victim", "heir")}
        workers = {
            name: spawn.Process(
                target=work, args=(url, name, start, pipe[1], 1 if name == "victim" else None)
            )
            for name, pipe in pipes.items()
        }
        for worker in workers.values():
            worker.start()
        victim = workers["victim"]
        assert pipes["victim"][0].poll(60), "the victim came to no second job"
        dead = pipes["victim"][0].recv()
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        workers["heir"].join(60)
        victim.join(60)
        assert (victim.exitcode, workers["heir"].exitcode) == (-signal.SIGKILL, 0)
        assert pipes["heir"][0].recv() == number - 1

        jobs = store.jobs(campaign)
        assert [job.id for job in jobs] == ids
        assert [job.result and job.result["number"] for job in jobs] == list(range(number))
        finished = store.events(campaign, "job.finished")
        assert sorted(event.payload["job"] for event in finished) == sorted(job.key for job in jobs)
        assert [event.payload["worker"] for event in finished].count("victim") == 1
        (retried,) = store.events(campaign, "job.retried")
        assert retried.payload["token"] == dead.token
        assert Failure.model_validate(retried.payload["failure"]).cause is Cause.NODE_LOST
        assert {job.id: job.attempt for job in jobs} == {
            number: 2 if number == dead.id else 1 for number in ids
        }
        claimed = store.events(campaign, "job.claimed")
        tokens = [event.payload["token"] for event in claimed]
        assert len(set(tokens)) == number + 1
        with pytest.raises(LeaseLost):
            store.finish(dead, {"number": -1})
        store.check(campaign)
        # Optuna's trials in the same database, from both processes.
        trials = study_of(url, campaign).trials
        assert [trial.number for trial in trials] == list(range(number))
        assert sorted(job.result["trial"] for job in jobs if job.result) == list(range(number))


def test_two_threads_open_a_new_database_at_once(server: URL) -> None:
    execute(server, "CREATE DATABASE fresh")
    url, found = render(server.set(database="fresh")), []
    start = threading.Barrier(2)

    def create() -> None:
        start.wait()
        with Store.open(url) as store:
            found.append(store.create(spec()))

    threads = [threading.Thread(target=create) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with Store.open(url) as store:
        assert sorted(row.id for row in store.campaigns()) == sorted(found)
        assert len(found) == 2


def test_threads_share_one_queue_and_one_ledger(store: Store) -> None:
    """Locks are taken in one order: controllers, workers and recovery never wait in a circle."""
    campaigns = [enqueue(store, 10)[0] for _ in range(2)]
    errors: list[BaseException] = []

    def run(body: Any) -> threading.Thread:
        def guarded() -> None:
            try:
                body()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        return thread

    def worker() -> None:
        while (job := store.claim("worker", device="cpu")) is not None:
            store.heartbeat(job)
            store.finish(job, {"number": job.payload["number"]})

    def controller(campaign: str) -> None:
        for number in range(10):
            with store.hold(campaign, "host:1") as lease:
                store.append(campaign, "note", {"number": number}, lease)
                store.enqueue(campaign, "evaluate", {"number": number})
            store.recover(3)

    threads = [run(worker) for _ in range(3)]
    threads += [run(lambda campaign=campaign: controller(campaign)) for campaign in campaigns]
    for thread in threads:
        thread.join(60)
    assert errors == []
    worker()
    for campaign in campaigns:
        store.check(campaign)
        assert [job.attempt for job in store.jobs(campaign)] == [1] * 10
        assert len(store.events(campaign)) == 1 + 3 * 10 + 10


def test_a_job_being_claimed_is_skipped_not_waited_for(store: Store, url: str) -> None:
    _, (first, second) = enqueue(store, 2)
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(f"SELECT * FROM tuner_jobs WHERE id = {first} FOR UPDATE"))
        assert claim(store).id == second
        assert store.claim("worker", device="cpu") is None
    assert claim(store).id == first
    engine.dispose()


def test_leases_go_by_the_clock_of_the_server(store: Store, url: str) -> None:
    campaign, (number,) = enqueue(store, 1)
    lease, job = store.hold(campaign, "host:1", ttl_s=60), claim(store, ttl_s=60)
    with pytest.raises(LeaseTaken, match="is held by host:1"):
        store.hold(campaign, "host:2")
    assert store.recover(3) == []
    minute = timedelta(minutes=2) // timedelta(microseconds=1)
    execute(
        url,
        f"UPDATE tuner_jobs SET expires = expires - {minute}",
        f"UPDATE tuner_campaigns SET expires = expires - {minute}",
    )
    assert store.recover(3) == [number]
    later = store.hold(campaign, "host:2")
    assert later.token > job.token > lease.token
    with pytest.raises(LeaseLost):
        store.append(campaign, "note", {}, lease)
    with pytest.raises(LeaseLost):
        store.finish(job, {})
    created = store.campaigns()[0].created
    assert created.utcoffset() == timedelta(0)
    clock = Clock()
    with Store.open(url, clock=clock) as other:
        assert other.append(campaign, "note", {}).created == clock.now
    store.check(campaign)


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM tuner_events WHERE seq = 3",
        "DELETE FROM tuner_events WHERE seq = (SELECT max(seq) FROM tuner_events)",
        "UPDATE tuner_events SET payload = replace(payload, '1.5', '1.4')",
        "DELETE FROM tuner_jobs WHERE status = 'done'",
        "UPDATE tuner_blobs SET data = 'artefact'::bytea",
        "UPDATE tuner_blobs SET data = NULL",
        "DROP TABLE tuner_jobs",
    ],
)
def test_edited_tables_are_corrupt(store: Store, url: str, statement: str) -> None:
    campaign, _ = enqueue(store, 2)
    store.finish(claim(store), {"us": 1.5})
    store.append(campaign, "compiled", {"artifact": store.put(b"artifact")})
    store.check(campaign)
    execute(url, statement)
    with pytest.raises(StoreCorrupt) as caught:
        store.check(campaign)
    assert caught.value.exit_code == 7


def test_blobs_are_rows(store: Store, url: str) -> None:
    data = bytes(range(256)) * 4000
    name = store.put(data)
    assert store.put(data) == name
    with Store.open(url) as other:
        assert other.get(name) == data
    with pytest.raises(UnknownBlob):
        store.get("0" * 64)
    execute(url, "UPDATE tuner_blobs SET touched = 0")
    assert store.collect() == [name]
    with pytest.raises(UnknownBlob):
        store.get(name)


def test_a_campaign_moves_from_one_gpu_to_several(store: Store, tmp_path: Path) -> None:
    """From SQLite to PostgreSQL and back, byte by byte the same bundle."""
    files = [tmp_path / f"{number}.tar.gz" for number in range(3)]
    with Store.open(f"sqlite:///{tmp_path}/tune.db") as local:
        campaign, _ = enqueue(local, 2)
        job = claim(local)
        local.finish(job, {"artifact": local.put(b"artifact"), "us": [0.1, 1e-300, 1e22]})
        study = study_of(local.url, campaign)
        study.optimize(lambda trial: trial.suggest_float("x", 0, 1, log=False), n_trials=3)
        trial = study.ask()
        trial.report(math.nan, 0)
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        local.export(campaign, files[0])
        assert store.import_(files[0]) == campaign
        store.export(campaign, files[1])
        store.check(campaign)
        assert store.get(digest(b"artifact")) == b"artifact"
        heir = claim(store)
        assert heir.token > job.token
        store.finish(heir, {})
        store.export(campaign, files[2])
        assert local.import_(files[2]) == campaign
        assert local.events(campaign) == store.events(campaign)
        assert [row.status for row in local.jobs(campaign)] == ["done", "done"]
    assert files[0].read_bytes() == files[1].read_bytes()
    name = f"{campaign}/toy"
    assert len(optuna.load_study(study_name=name, storage=study_storage(store.url)).trials) == 4


def test_a_full_disk_of_the_server_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    campaign = store.create(spec())

    def full(*arguments: Any, **options: Any) -> None:
        raise psycopg.errors.DiskFull("could not extend file: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(psycopg.Cursor, "execute", full)
        with pytest.raises(DiskFull, match="could not extend file") as caught:
            store.append(campaign, "note", {})
    assert caught.value.exit_code == 3
    store.append(campaign, "note", {})


def test_a_lost_connection_is_replaced(store: Store, url: str) -> None:
    campaign = store.create(spec())
    execute(url, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> "
                 "pg_backend_pid() AND datname = current_database()")  # fmt: skip
    store.append(campaign, "note", {})
    assert len(store.events(campaign)) == 2


def test_an_absent_server_exits_3_and_tells_no_password(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable) as caught:
        Store.open(f"postgresql://me:secret@/postgres?host={tmp_path}")
    assert caught.value.exit_code == 3
    assert "secret" not in str(caught.value)
    assert str(tmp_path).replace("/", "%2F") in str(caught.value)
