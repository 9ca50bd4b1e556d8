"""The store on SQLite: ledger, queue, leases, blobs, full disks, damage, bundles."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import math
import multiprocessing
import os
import shutil
import signal
import sqlite3
import tarfile
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import event

from fastkernels_tuner.errors import TunerError
from fastkernels_tuner.model import Cause, Failure, canonical, digest
from fastkernels_tuner.store import (
    CampaignExists,
    DiskFull,
    Event,
    Job,
    LeaseLost,
    LeaseTaken,
    Store,
    StoreCorrupt,
    StoreError,
    StoreUnavailable,
    StoreVersionError,
    UnfitFileSystem,
    UnknownBlob,
    UnknownCampaign,
    bundle,
    database,
    ledger,
    rows,
    studies,
    study_storage,
)
from tuner.tests.stores import Clock, claim, create, enqueue, hang, spec, study_of, work

NUMERIC = Failure(cause=Cause.NUMERIC, message="off by one")
GPU_LOST = Failure(cause=Cause.GPU_LOST, message="gone")
LEASE_LOST = Failure(cause=Cause.LEASE_LOST, message="the time is used up")


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with nothing in it: to copy one is quicker than to make Optuna's tables anew."""
    path = tmp_path_factory.mktemp("empty") / "tune.db"
    Store.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def path(empty: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Of a store that is empty, or has the `campaign` that the test asks for."""
    path = tmp_path / "tune.db"
    if "campaign" in request.fixturenames:
        request.getfixturevalue("campaign")
    else:
        shutil.copy(empty, path)
    return path


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(path: Path, clock: Clock) -> Iterator[Store]:
    with Store.open(f"sqlite:///{path}", clock=clock) as opened:
        yield opened


@pytest.fixture(scope="session")
def model(empty: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a store that has one of everything, and a bundle of its campaign."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copy(empty, folder)
    with Store.open(f"sqlite:///{folder}/tune.db", clock=Clock()) as opened:
        campaign = furnish(opened)
        furnish_studies(opened, campaign)
        opened.put(b"of no campaign")
        enqueue(opened, 2)
        opened.export(campaign, folder / "bundle.tar.gz")
    assert not (folder / "tune.db-wal").exists()  # all of it is in the one file
    (folder / "tune.db.reserve").unlink()  # eight megabytes that need no copying
    return folder, campaign


@pytest.fixture
def campaign(model: tuple[Path, str], tmp_path: Path) -> str:
    """Copies the model to where `path` and `store` are, and names its campaign."""
    shutil.copytree(model[0], tmp_path, dirs_exist_ok=True)
    return model[1]


@pytest.fixture
def file(model: tuple[Path, str], tmp_path: Path) -> Path:
    """The model's bundle, to do as one likes with."""
    return Path(shutil.copy(model[0] / "bundle.tar.gz", tmp_path / "bundle.tar.gz"))


def raises(kind: type[StoreError], match: str, *methods: Callable[[], Any]) -> None:
    for method in methods:
        with pytest.raises(kind, match=match):
            method()


def sql(path: Path, *statements: str) -> None:
    """What no method of the store would do."""
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def furnish(store: Store) -> str:
    """A campaign with one of everything."""
    campaign, _ = enqueue(store, 4)
    store.finish(claim(store), {"us": [1.5, 2.5]})
    store.fail(claim(store), NUMERIC)
    store.fail(claim(store), GPU_LOST, max_attempts=2)
    claim(store, ttl_s=1000)
    store.append(campaign, "compiled", {"artifact": store.put(b"artifact" * 50)})
    store.append(campaign, "verdict", {"decision": "keep"})
    return campaign


def furnish_studies(store: Store, campaign: str) -> None:
    """Studies with trials of every state, and numbers that JSON does not have."""
    make = optuna.trial.create_trial
    spaces: dict[str, optuna.distributions.BaseDistribution] = {
        "warps": optuna.distributions.CategoricalDistribution([4, 8]),
        "stages": optuna.distributions.IntDistribution(1, 7, step=2),
        "alpha": optuna.distributions.FloatDistribution(1e-3, 1.0, log=True),
    }
    params = {"warps": 8, "stages": 3, "alpha": 0.1}
    states = optuna.trial.TrialState
    with studies.opened(store.url) as storage:
        study = optuna.create_study(study_name=f"{campaign}/toy/plain", storage=storage)
        study.set_user_attr("space", {"warps": [4, 8]})
        study.add_trials(
            [
                make(
                    value=1.25, params=params, distributions=spaces, user_attrs={"us": [1.0, 2.0]}
                ),
                make(value=math.inf, params=params, distributions=spaces),
                make(
                    state=states.PRUNED,
                    params=params,
                    distributions=spaces,
                    intermediate_values={0: 0.1, 1: math.nan, 2: math.inf},
                ),
                make(state=states.FAIL, system_attrs={"reason": "hang"}),
            ]
        )
        study.enqueue_trial({"warps": 4})
        study.ask()
        study.enqueue_trial({"warps": 8})
        optuna.create_study(
            study_name=f"{campaign}/toy/both", storage=storage, directions=["minimize", "maximize"]
        ).add_trial(make(values=[1.0, 2.0], params=params, distributions=spaces))
        optuna.create_study(study_name="not/ours", storage=storage)


# ---- campaigns and ledger -----------------------------------------------------------------------


def test_campaigns_are_listed_with_who_holds_them(store: Store, clock: Clock) -> None:
    first = store.create(spec())
    clock.forward(1)
    second = store.create(spec(device="cuda:0"))
    assert first.startswith(spec().id + "-")
    assert first != second
    assert store.spec(first) == spec()
    store.hold(second, "host:1", ttl_s=10)
    one, two = store.campaigns()
    assert (one.id, one.op, one.device, one.events, one.owner) == (first, "toy", "cpu", 1, "")
    assert (two.id, two.device, two.owner, two.created) == (second, "cuda:0", "host:1", clock.now)
    clock.forward(11)
    assert [row.owner for row in store.campaigns()] == ["", ""]


def test_unknown_names_exit_2(store: Store) -> None:
    unknown: list[Callable[[str], Any]] = [
        store.spec,
        store.events,
        store.jobs,
        store.check,
        lambda name: store.hold(name, "me"),
        lambda name: store.append(name, "note", {}),
        lambda name: store.enqueue(name, "evaluate", {}),
        lambda name: store.export(name, Path("never.tar.gz")),
    ]
    for method in unknown:
        with pytest.raises(UnknownCampaign, match="no campaign 'nowhere'") as caught:
            method("nowhere")
        assert caught.value.exit_code == 2
    with pytest.raises(UnknownBlob):
        store.get("0" * 64)


def test_a_spec_of_other_fields_is_no_corruption(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = store.create(spec())

    class Other:
        @staticmethod
        def model_validate(data: Any) -> None:
            type(spec()).model_validate({**data, "unheard_of": 1})

    monkeypatch.setattr(rows, "CampaignSpec", Other)
    with pytest.raises(StoreVersionError, match="unheard_of"):
        store.spec(campaign)


def test_events_come_back_in_order_and_by_kind(store: Store, clock: Clock, path: Path) -> None:
    campaign, other = store.create(spec()), store.create(spec())
    for number in range(5):
        clock.forward(0.000001)
        store.append(campaign, "even" if number % 2 == 0 else "odd", {"number": number, "µ": 0.1})
        store.append(other, "noise", {})
    with Store.open(f"sqlite:///{path}") as again:
        events = again.events(campaign)
        assert [event.seq for event in events] == [1, 2, 3, 4, 5, 6]
        assert [event.payload["number"] for event in again.events(campaign, "odd")] == [1, 3]
        assert events[-1].payload == {"number": 4, "µ": 0.1}
        assert events[-1].created == clock.now
        assert events[-1].created.utcoffset() == timedelta(0)
        assert [e.previous for e in events[1:]] == [e.digest for e in events[:-1]]
        again.check(campaign)


def test_what_is_no_json_and_the_kinds_of_the_store_are_refused(store: Store) -> None:
    campaign, _ = enqueue(store, 1)
    for payload in ({"us": math.nan}, {"us": math.inf}):
        with pytest.raises(ValueError, match="not JSON compliant"):
            store.append(campaign, "note", payload)
    for kind in ("job.finished", "campaign.created"):
        with pytest.raises(ValueError, match="are the store's"):
            store.append(campaign, kind, {})
    job = claim(store)
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.finish(job, {"us": math.nan})
    store.finish(job, {"us": 1.0})
    assert len(store.events(campaign)) == 4


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
PAYLOADS = st.dictionaries(st.text(), JSON, max_size=4)
TIMES = st.datetimes(
    min_value=datetime(1970, 1, 1), max_value=datetime(2200, 1, 1), timezones=st.just(timezone.utc)
)


def chain(payloads: list[dict[str, Any]], times: list[datetime]) -> list[Event]:
    events: list[Event] = []
    for number, (payload, time) in enumerate(zip(payloads, times, strict=False), start=1):
        previous = events[-1].digest if events else ledger.GENESIS
        events.append(ledger.link("c", number, f"kind{number % 3}", payload, time, previous))
    return events


@given(payload=PAYLOADS, time=TIMES)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_json_payload_survives(store: Store, payload: dict[str, Any], time: datetime) -> None:
    store._clock = lambda: time
    campaign = store.create(spec())
    written = store.append(campaign, "note", payload)
    assert store.events(campaign)[-1] == written
    assert (written.payload, written.created) == (payload, time)
    store.check(campaign)


@given(
    payloads=st.lists(PAYLOADS, min_size=3, max_size=5),
    times=st.lists(TIMES, min_size=6, max_size=6),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_any_change_of_a_chain_is_found(
    payloads: list[dict[str, Any]], times: list[datetime], data: st.DataObject
) -> None:
    events = chain(payloads, times)
    seq, head = events[-1].seq, events[-1].digest
    ledger.verify("c", events, seq, head)
    at = data.draw(st.integers(0, len(events) - 1))
    other = data.draw(st.integers(0, len(events) - 1).filter(lambda i: i != at))
    old = events[at]
    changed = {
        "payload": dataclasses.replace(old, text=canonical({**old.payload, "new": 1})),
        "spaces": dataclasses.replace(old, text=old.text + " "),
        "kind": dataclasses.replace(old, kind=old.kind + "x"),
        "time": dataclasses.replace(old, created=old.created + timedelta(microseconds=1)),
        "number": dataclasses.replace(old, seq=old.seq + 1),
        "campaign": dataclasses.replace(old, campaign="d"),
        "digest": dataclasses.replace(old, digest=digest(old.digest)),
        "another": events[other],
        # Consistent in itself: only its successor, or the head, tells.
        "rewritten": ledger.link("c", old.seq, "z", old.payload, old.created, old.previous),
    }
    for replaced in changed.values():
        with pytest.raises(StoreCorrupt):
            ledger.verify("c", [*events[:at], replaced, *events[at + 1 :]], seq, head)
    swapped = list(events)
    swapped[at], swapped[other] = swapped[other], swapped[at]
    for wrong in (
        [*events[:at], *events[at + 1 :]],
        [*events[:at], old, *events[at:]],
        events[:at],
        swapped,
    ):
        with pytest.raises(StoreCorrupt):
            ledger.verify("c", wrong, seq, head)


# ---- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM tuner_events WHERE seq = (SELECT max(seq) FROM tuner_events)",
        "DELETE FROM tuner_events WHERE seq = 7",
        "DELETE FROM tuner_events WHERE seq = 1",
        "DELETE FROM tuner_events",
        "UPDATE tuner_events SET payload = replace(payload, '1.5', '1.4')",
        "UPDATE tuner_events SET payload = x'00ff' WHERE seq = 3",
        "UPDATE tuner_events SET payload = '{' WHERE kind = 'verdict'",
        "UPDATE tuner_events SET kind = 'job.finished' WHERE kind = 'job.failed'",
        "UPDATE tuner_events SET created = created + 1 WHERE seq = 2",
        "UPDATE tuner_events SET created = 'noon' WHERE seq = 2",
        "UPDATE tuner_events SET seq = 100 WHERE seq = 2",
        "UPDATE tuner_events SET seq = -seq; UPDATE tuner_events SET seq = 15 + seq",
        "UPDATE tuner_campaigns SET seq = seq - 1",
        "UPDATE tuner_campaigns SET digest = (SELECT digest FROM tuner_events WHERE seq = 3)",
        "DELETE FROM tuner_campaigns",
        "DELETE FROM tuner_jobs WHERE status = 'done'",
        "UPDATE tuner_jobs SET status = 'queued' WHERE status = 'failed'",
        "UPDATE tuner_jobs SET attempt = 1 WHERE status = 'queued' AND attempt = 0",
        "UPDATE tuner_jobs SET token = token + 1 WHERE status = 'running'",
        "UPDATE tuner_jobs SET settled = NULL WHERE status = 'done'",
        "UPDATE tuner_jobs SET device = 'cuda:0'",
        "UPDATE tuner_jobs SET key = key || 'x' WHERE status = 'done'",
    ],
)
def test_edited_tables_are_corrupt(store: Store, path: Path, campaign: str, statement: str) -> None:
    store.check(campaign)
    sql(path, *statement.split("; "))
    with pytest.raises(StoreCorrupt) as caught:
        store.check(campaign)
    assert caught.value.exit_code == 7
    with pytest.raises(StoreCorrupt):
        store.hold(campaign, "me")
    with pytest.raises(StoreCorrupt):
        store.export(campaign, path.with_name("never.tar.gz"))
    assert not path.with_name("never.tar.gz").exists()


def test_events_of_another_campaign_do_not_fit(store: Store, path: Path) -> None:
    one, two = store.create(spec()), store.create(spec())
    first = store.append(one, "verdict", {"decision": "promote"})
    store.append(two, "verdict", {"decision": "reject"})
    sql(
        path,
        f"DELETE FROM tuner_events WHERE campaign = '{two}' AND seq = 2",
        f"UPDATE tuner_events SET campaign = '{two}' WHERE digest = '{first.digest}'",
    )
    for campaign in (one, two):
        with pytest.raises(StoreCorrupt):
            store.events(campaign)


def test_nothing_is_added_to_a_chain_cut_short(store: Store, path: Path, campaign: str) -> None:
    seq = store.events(campaign)[-1].seq
    sql(path, f"DELETE FROM tuner_events WHERE seq = {seq}")
    with pytest.raises(StoreCorrupt, match=f"event {seq} is gone"):
        store.append(campaign, "verdict", {})
    sql(path, f"UPDATE tuner_campaigns SET seq = {seq - 1}")
    with pytest.raises(StoreCorrupt, match="not the one that was recorded"):
        store.append(campaign, "verdict", {})


def test_a_row_in_the_way_is_corruption(store: Store, path: Path) -> None:
    campaign = store.create(spec())
    store.append(campaign, "note", {})
    sql(
        path,
        "UPDATE tuner_campaigns SET seq = 1, digest = (SELECT previous FROM tuner_events "
        "WHERE seq = 2)",
    )
    with pytest.raises(StoreCorrupt, match="contradict themselves"):
        store.append(campaign, "note", {})


@pytest.mark.parametrize("size", [0, 50, 4096, 0.5, 0.99])
def test_a_truncated_file_is_corrupt(path: Path, campaign: str, size: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(size * len(data)) if 0 < size < 1 else int(size)])
    with (
        pytest.raises(StoreCorrupt) as caught,
        Store.open(f"sqlite:///{path}") as store,
    ):
        store.check(campaign)
    assert caught.value.exit_code == 7


def test_a_lost_file_is_not_made_anew_beside_its_blobs(path: Path, campaign: str) -> None:
    path.unlink()
    with pytest.raises(StoreCorrupt, match=r"is gone, but tune\.db\.blobs is there"):
        Store.open(f"sqlite:///{path}")
    assert not path.exists()


def test_no_flipped_byte_changes_what_is_read(path: Path, campaign: str) -> None:
    data = path.read_bytes()

    def contents() -> Any:
        with Store.open(f"sqlite:///{path}") as store:
            store.check(campaign)
            return store.events(campaign), timeless(store, campaign), store.spec(campaign)

    expected, found = contents(), 0
    ours = [data.find(word.encode()) for word in ("decision", "off by one", '"us":[1.5')]
    assert -1 not in ours
    used = [position for position, byte in enumerate(data) if byte]
    # In the header SQLite may find a request for a newer SQLite, which is no corruption.
    for position in [*ours, *range(0, 100, 9), *used[:: len(used) // 40]]:
        flipped = bytearray(data)
        flipped[position] ^= 0xFF
        path.write_bytes(flipped)
        try:
            assert contents() == expected, position
        except (StoreCorrupt, StoreUnavailable, StoreVersionError) as error:
            found += isinstance(error, StoreCorrupt) or position < 100
        else:
            assert position not in ours
    assert found > 15


def test_a_newer_store_and_half_a_store_are_refused(path: Path) -> None:
    sql(path, "UPDATE tuner_store SET version = 99")
    with pytest.raises(StoreVersionError, match=r"schema 99, this one reads 1\); update") as caught:
        Store.open(f"sqlite:///{path}")
    assert caught.value.exit_code == 2
    sql(path, "UPDATE tuner_store SET version = 0")
    with pytest.raises(StoreCorrupt, match="expected schema version 1"):
        Store.open(f"sqlite:///{path}")
    sql(path, "DELETE FROM tuner_store")
    with pytest.raises(StoreCorrupt, match="expected schema version 1"):
        Store.open(f"sqlite:///{path}")
    sql(path, "DROP TABLE tuner_blobs")
    with pytest.raises(StoreCorrupt, match="no table tuner_blobs"):
        Store.open(f"sqlite:///{path}")


# ---- where a store may be -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "expected sqlite:///path/to/file"),
        ("sqlite://", "expected sqlite:///path/to/file"),
        ("sqlite:///:memory:", "expected sqlite:///path/to/file"),
        ("sqlite:///file:x?mode=ro&uri=true", "expected sqlite:///path/to/file"),
        ("mysql://host/name", "expected a path"),
        ("postgresql+psycopg2://host/name", "expected a path"),
        ("://", "expected a path"),
    ],
)
def test_other_urls_are_refused(url: str, words: str) -> None:
    with pytest.raises(StoreError, match=words) as caught:
        Store.open(url)
    assert caught.value.exit_code == 2


def test_a_path_alone_and_odd_names_will_do(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "50 %41 {x}?.db"
    with Store.open(str(path)) as store:
        campaign = store.create(spec())
        study_of(store.url, campaign)
        with Store.open(store.url) as same:
            assert same.spec(campaign) == spec()
    assert path.exists()


def test_a_folder_that_cannot_be_made_exits_3(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TunerError) as caught:
        Store.open(f"sqlite:///{tmp_path}/file/tune.db")
    assert caught.value.exit_code == 3


MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
28 27 0:30 / /home rw,relatime shared:5 - nfs4 server:/home rw
29 28 0:31 / /home/me/local\\040disk rw,relatime - xfs /dev/vdb rw
30 27 0:32 / /data rw - fuse.sshfs server: rw
31 27 0:33 / /data rw - btrfs /dev/vdc rw
32 27 0:34 / /share rw - cifs //server/share rw
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/var/tune.db", ""),
        ("/home/me/tune.db", "nfs4"),
        ("/home/me/local disk/tune.db", ""),
        ("/homework/tune.db", ""),
        ("/data/tune.db", ""),  # the later of two mounts covers the earlier
        ("/share/deep/tune.db", "cifs"),
    ],
)
def test_network_file_systems_are_told_by_mountinfo(
    tmp_path: Path, path: str, expected: str
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert database.file_system(Path(path), mounts) == expected
    assert database.file_system(Path(path), tmp_path / "absent") == ""


def test_sqlite_on_a_network_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "file_system", lambda path: "nfs4")
    with pytest.raises(UnfitFileSystem, match=r"is on nfs4.*postgresql://") as caught:
        Store.open(f"sqlite:///{tmp_path}/folder/tune.db")
    assert caught.value.exit_code == 3
    assert not (tmp_path / "folder").exists()


def test_a_lock_held_for_too_long_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.1)
    other = sqlite3.connect(path, isolation_level=None)
    with Store.open(f"sqlite:///{path}") as store:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="locked by another process") as caught:
            store.create(spec())
        assert store.campaigns() == []  # readers do not wait
        other.execute("ROLLBACK")
        store.create(spec())
    other.close()
    assert caught.value.exit_code == 3


def test_the_database_is_in_wal_and_commits_to_disk(store: Store) -> None:
    with store._database.read() as connection:
        pragma = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    assert pragma == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


# ---- blobs --------------------------------------------------------------------------------------


def blob_file(path: Path, name: str) -> Path:
    return path.with_name("tune.db.blobs") / "sha256" / name[:2] / name


def test_blobs_are_kept_under_their_digest(store: Store, path: Path) -> None:
    data = bytes(range(256)) * 40
    name = store.put(data)
    assert name == digest(data)
    assert store.put(data) == name
    assert store.get(name) == data
    assert store.get(store.put(b"")) == b""
    files = [file for file in path.with_name("tune.db.blobs").rglob("*") if file.is_file()]
    assert sorted(file.name for file in files) == sorted([name, digest(b"")])


def test_a_damaged_blob_is_found_and_can_be_put_again(store: Store, path: Path) -> None:
    campaign, name = store.create(spec()), store.put(b"artifact")
    store.append(campaign, "compiled", {"deep": [{"artifact": f"sha256:{name}"}]})
    store.check(campaign)
    blob_file(path, name).write_bytes(b"artefact")
    words = f"blob {name}: 8 bytes of digest"
    raises(StoreCorrupt, words, lambda: store.get(name), lambda: store.check(campaign))
    blob_file(path, name).unlink()
    with pytest.raises(StoreCorrupt, match="is gone"):
        store.check(campaign)
    assert store.put(b"artifact") == name
    store.check(campaign)


def test_a_blob_cut_off_by_a_crash_is_not_there(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        store.put(b"artifact")
    monkeypatch.undo()
    with pytest.raises(UnknownBlob):
        store.get(digest(b"artifact"))
    assert store.get(store.put(b"artifact")) == b"artifact"


def test_blobs_that_nothing_names_are_collected(store: Store, path: Path, clock: Clock) -> None:
    campaign = store.create(spec())
    named, orphan, touched = (store.put(data) for data in (b"named", b"orphan", b"touched"))
    store.append(campaign, "compiled", {"artifact": named})
    assert store.collect() == []
    clock.forward(90_000)
    store.put(b"touched")
    assert store.collect() == [orphan]
    assert not blob_file(path, orphan).exists()
    with pytest.raises(UnknownBlob):
        store.get(orphan)
    assert (store.get(named), store.get(touched)) == (b"named", b"touched")
    assert store.get(store.put(b"orphan")) == b"orphan"


# ---- full disks ---------------------------------------------------------------------------------


def test_below_5_percent_work_is_refused_but_finished(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign, _ = enqueue(store, 3)
    lease = store.hold(campaign, "me")
    jobs = [claim(store), claim(store)]
    store.export(campaign, tmp_path / "bundle.tar.gz")
    usage = shutil._ntuple_diskusage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 951, 49))
    refused: list[Callable[[], Any]] = [
        lambda: store.create(spec()),
        lambda: store.enqueue(campaign, "evaluate", {"number": 9}),
        lambda: store.claim("worker", device="cpu"),
        lambda: store.import_(tmp_path / "bundle.tar.gz"),
    ]
    for method in refused:
        with pytest.raises(DiskFull, match="less than 5%") as caught:
            method()
        assert caught.value.exit_code == 3
    lease.renew()
    store.heartbeat(jobs[0])
    store.finish(jobs[0], {"evidence": store.put(b"evidence")})
    store.fail(jobs[1], NUMERIC)
    store.append(campaign, "stopped", {"reason": "disk"}, lease)
    lease.release()
    store.check(campaign)
    with Store.open(store.url) as again:
        assert [job.status for job in again.jobs(campaign)] == ["done", "failed", "queued"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 950, 50))
    claim(store)


def test_a_full_disk_takes_the_reserve_to_finish(store: Store, path: Path) -> None:
    campaign, _ = enqueue(store, 3)
    job, reserve = claim(store), path.with_name("tune.db.reserve")
    assert reserve.stat().st_size == reserve.stat().st_blocks * 512 == database.RESERVE_BYTES
    with store._database.read() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()

    @event.listens_for(store._database.engine, "begin")
    def limit(connection: Any) -> None:
        # SQLite's own "database or disk is full", until the reserve is free.
        room = pages if reserve.exists() else 10 * pages + 1000
        connection.exec_driver_sql(f"PRAGMA max_page_count = {room}")

    big = {"us": [0.125] * 50_000}
    with pytest.raises(DiskFull, match="disk is full"):
        store.enqueue(campaign, "evaluate", big)
    assert reserve.exists()
    store.finish(job, big)
    assert not reserve.exists()
    assert store.jobs(campaign, "done")[0].result == big
    store.check(campaign)
    event.remove(store._database.engine, "begin", limit)
    claim(store)  # there is space again, for the reserve too
    assert reserve.exists()


def test_a_full_disk_keeps_no_half_blob(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match="No space left"):
        store.put(b"artifact")
    monkeypatch.undo()
    assert [file for file in path.with_name("tune.db.blobs").rglob("*") if file.is_file()] == []
    assert path.with_name("tune.db.reserve").exists()


# ---- the controller's lease ---------------------------------------------------------------------


def test_a_second_controller_is_refused(store: Store, clock: Clock) -> None:
    campaign, other = store.create(spec()), store.create(spec())
    lease = store.hold(campaign, "host:1", ttl_s=30)
    clock.forward(29)
    with pytest.raises(LeaseTaken, match="is held by host:1 until 2026-12-01T12:00:30") as caught:
        store.hold(campaign, "host:2")
    assert caught.value.exit_code == 2
    assert (caught.value.owner, caught.value.expires) == (
        "host:1", clock.now + timedelta(seconds=1),
    )  # fmt: skip
    store.hold(other, "host:2")
    lease.renew()
    clock.forward(29)
    with pytest.raises(LeaseTaken):
        store.hold(campaign, "host:2")
    store.append(campaign, "note", {}, lease)


def test_a_controller_that_slept_cannot_write(store: Store, clock: Clock) -> None:
    campaign, other = store.create(spec()), store.create(spec())
    slow = store.hold(campaign, "host:1", ttl_s=30)
    clock.forward(31)
    quick = store.hold(campaign, "host:2")
    assert quick.token > slow.token
    words = "host:1 is over, host:2 holds it"
    raises(LeaseLost, words, lambda: store.append(campaign, "note", {}, slow), slow.renew)
    slow.release()  # takes nothing from the other
    with pytest.raises(LeaseLost):
        store.append(other, "note", {}, quick)
    assert [event.kind for event in store.events(campaign)] == ["campaign.created"]
    with quick:
        store.append(campaign, "note", {}, quick)
    with pytest.raises(LeaseLost, match="nobody holds it"):
        store.append(campaign, "note", {}, quick)
    store.hold(campaign, "host:3")


# ---- the queue ----------------------------------------------------------------------------------


def test_jobs_are_queued_once_and_taken_in_order(store: Store, clock: Clock) -> None:
    campaign, numbers = enqueue(store, 3)
    again = [store.enqueue(campaign, "evaluate", {"number": i}) for i in range(3)]
    assert again == numbers
    named = store.enqueue(campaign, "compare", {"a": 1}, key="a-b")
    assert store.enqueue(campaign, "compare", {"a": 2}, key="a-b") == named
    other, other_numbers = enqueue(store, 1)
    assert len({*numbers, named, *other_numbers}) == 5
    taken = [claim(store) for _ in range(5)]
    assert [job.id for job in taken] == [*numbers, named, *other_numbers]
    assert [job.payload for job in taken[2:4]] == [{"number": 2}, {"a": 1}]
    assert [job.campaign for job in taken[3:]] == [campaign, other]
    assert [job.token for job in taken] == [1, 2, 3, 4, 5]
    assert store.claim("worker", device="cpu") is None
    first = store.jobs(campaign)[0]
    assert (first.status, first.worker, first.attempt) == ("running", "worker", 1)
    assert (first.queued, first.expires) == (clock.now, clock.now + timedelta(seconds=60))


def test_a_worker_takes_what_it_can_run(store: Store) -> None:
    campaign = store.create(spec())
    first = store.enqueue(campaign, "compare", {}, device="cuda:0")
    second = store.enqueue(campaign, "compare", {}, device="cuda:1")
    either = store.enqueue(campaign, "evaluate", {})
    assert first != second
    job = store.claim("b", device="cuda:1", kinds=["evaluate", "verify"])
    assert job is not None
    assert (job.id, job.device) == (either, "cuda:1")
    job = store.claim("b", device="cuda:1")
    assert job is not None
    assert job.id == second
    assert store.claim("b", device="cuda:1") is None
    assert [row.id for row in store.jobs(campaign, "queued")] == [first]
    named = store.enqueue(campaign, "confirm", {}, device="GPU-1")
    assert store.claim("b", device="cuda:1", gpu="GPU-2") is None
    job = store.claim("b", device="cuda:1", gpu="GPU-1")
    assert job is not None
    assert (job.id, job.device) == (named, "cuda:1")


def test_a_result_counts_once(store: Store, clock: Clock) -> None:
    campaign, _ = enqueue(store, 1)
    job = claim(store)
    clock.forward(5)
    store.finish(job, {"us": 1.5})
    store.finish(job, {"us": 1.5})  # the answer to the first was lost
    with pytest.raises(LeaseLost, match=r"taken back; the job is done"):
        store.finish(job, {"us": 1.4})
    raises(LeaseLost, "taken back", lambda: store.heartbeat(job), lambda: store.fail(job, NUMERIC))
    (row,) = store.jobs(campaign)
    assert (row.status, row.result, row.failure) == ("done", {"us": 1.5}, None)
    assert (row.settled, row.expires) == (clock.now, None)
    (finished,) = store.events(campaign, "job.finished")
    assert finished.payload == {
        "job": job.key, "attempt": 1, "token": job.token, "worker": "worker", "result": {"us": 1.5},
    }  # fmt: skip


def test_a_wrong_number_is_final_and_a_lost_gpu_is_tried_again(store: Store) -> None:
    campaign, _ = enqueue(store, 2)
    store.fail(claim(store), NUMERIC, max_attempts=3)
    for attempt in (1, 2, 3):
        job = claim(store)
        assert job.attempt == attempt
        store.fail(job, GPU_LOST, max_attempts=3)
    assert store.claim("worker", device="cpu") is None
    wrong, lost = store.jobs(campaign)
    assert (wrong.status, wrong.failure, wrong.attempt) == ("failed", NUMERIC, 1)
    assert (lost.status, lost.failure, lost.attempt) == ("failed", GPU_LOST, 3)
    assert len(store.events(campaign, "job.retried")) == 2
    assert len(store.events(campaign, "job.failed")) == 2
    store.check(campaign)


def test_attempts_that_gave_nothing_have_cost_their_time(store: Store, clock: Clock) -> None:
    """One that was cut off until then, one that vanished until its lease ran out, however much
    later somebody looks."""
    campaign, _ = enqueue(store, 2)
    given_back, done = claim(store), claim(store)
    clock.forward(7)
    store.finish(done, {})
    store.fail(given_back, GPU_LOST, max_attempts=3)
    vanished = claim(store, ttl_s=60)
    clock.forward(20)
    store.heartbeat(vanished, ttl_s=60)
    clock.forward(3600)
    assert store.recover(3) == [vanished.id]
    store.fail(claim(store), NUMERIC)
    assert store.lost_s(campaign) == {"evaluate": 7 + 80}


def test_a_job_that_was_given_back_was_not_tried(store: Store, clock: Clock) -> None:
    """However many pieces its campaign is cut into, it may be lost as often as any other."""
    campaign, (number,) = enqueue(store, 1)
    for _ in range(5):
        job = claim(store)
        store.fail(job, LEASE_LOST, max_attempts=1 + job.attempt)
    for status in ("queued", "queued", "failed"):
        claim(store, ttl_s=60)
        clock.forward(61)
        assert store.recover(3) == [number]
        assert store.jobs(campaign)[0].status == status
    store.check(campaign)


def test_stale_jobs_are_tried_again_as_often_as_allowed(store: Store, clock: Clock) -> None:
    campaign, (number,) = enqueue(store, 1)
    dead = []
    for attempt in (1, 2, 3):
        job = claim(store, ttl_s=60)
        assert job.attempt == attempt
        clock.forward(50)
        store.heartbeat(job, ttl_s=60)
        clock.forward(59)
        assert store.recover(3) == []
        clock.forward(2)
        assert store.recover(3, campaign="another") == []
        assert store.recover(3) == [number]
        assert store.recover(3) == []
        dead.append(job)
        finish, beat = partial(store.finish, job, {}), partial(store.heartbeat, job)
        raises(LeaseLost, "taken back", finish, beat)
    (row,) = store.jobs(campaign)
    assert row.status == "failed"
    assert row.failure is not None
    assert row.failure.cause is Cause.NODE_LOST
    assert [job.token for job in dead] == sorted({job.token for job in dead})
    retried = store.events(campaign, "job.retried")
    assert [event.payload["attempt"] for event in retried] == [1, 2]
    assert {event.payload["failure"]["cause"] for event in retried} == {"node_lost"}
    store.check(campaign)


def test_a_slow_worker_that_nobody_replaced_still_counts(store: Store, clock: Clock) -> None:
    campaign, _ = enqueue(store, 1)
    job = claim(store, ttl_s=60)
    clock.forward(1000)
    store.finish(job, {"us": 1.0})
    assert store.recover(3) == []
    assert store.jobs(campaign)[0].status == "done"


def test_a_late_result_does_not_touch_the_next_attempt(store: Store, clock: Clock) -> None:
    campaign, _ = enqueue(store, 1)
    late = claim(store, "late", ttl_s=10)
    clock.forward(11)
    store.recover(3)
    now = claim(store, "now")
    words = r"attempt 1 of late .*running \(attempt 2"
    finish, fail = partial(store.finish, late, {"us": 0.1}), partial(store.fail, late, NUMERIC)
    raises(LeaseLost, words, finish, fail)
    store.finish(now, {"us": 2.0})
    assert store.jobs(campaign)[0].result == {"us": 2.0}


@pytest.mark.parametrize("verb", ["finish", "fail", "retry", "claim", "recover"])
def test_job_and_event_change_together_or_not_at_all(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    campaign, _ = enqueue(store, 2)
    job = claim(store, ttl_s=5)
    clock.forward(6)
    act: Callable[[], Any] = {
        "finish": lambda: store.finish(job, {}),
        "fail": lambda: store.fail(job, NUMERIC),
        "retry": lambda: store.fail(job, GPU_LOST, max_attempts=2),
        "claim": lambda: store.claim("worker", device="cpu"),
        "recover": lambda: store.recover(3),
    }[verb]
    before = store.events(campaign), store.jobs(campaign)

    def crash(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rows, "set_job", crash)
    with pytest.raises(KeyboardInterrupt):
        act()
    monkeypatch.undo()
    assert (store.events(campaign), store.jobs(campaign)) == before
    act()
    assert len(store.events(campaign)) == len(before[0]) + 1
    store.check(campaign)


class QueueMachine(RuleBasedStateMachine):
    """The queue against a model of it."""

    store: Store
    clock: Clock
    MAX_ATTEMPTS = 2

    def __init__(self) -> None:
        super().__init__()
        self.campaign = self.store.create(spec())
        self.keys: list[str] = []
        self.state: dict[str, str] = {}
        self.attempts: dict[str, int] = {}
        self.held: dict[str, tuple[Job, datetime]] = {}
        self.old: list[Job] = []
        self.tokens = [0]

    def settle(self, job: Job, state: str) -> None:
        del self.held[job.key]
        self.old.append(job)
        self.state[job.key] = state

    @rule(name=st.sampled_from("abcd"))
    def enqueue(self, name: str) -> None:
        self.store.enqueue(self.campaign, "evaluate", {"name": name}, key=name)
        if name not in self.state:
            self.keys.append(name)
            self.state[name], self.attempts[name] = "queued", 0

    @rule(ttl=st.integers(5, 20))
    def claim(self, ttl: int) -> None:
        job = self.store.claim("worker", device="cpu", ttl_s=ttl)
        waiting = [key for key in self.keys if self.state[key] == "queued"]
        assert (job.key if job else None) == (waiting[0] if waiting else None)
        if job is not None:
            self.attempts[job.key] += 1
            assert (job.attempt, job.payload) == (self.attempts[job.key], {"name": job.key})
            assert job.token > self.tokens[-1]
            self.tokens.append(job.token)
            self.held[job.key] = job, self.clock.now + timedelta(seconds=ttl)
            self.state[job.key] = "running"

    @precondition(lambda self: self.held)
    @rule(data=st.data(), verb=st.sampled_from(["finish", "fail", "retry", "beat"]))
    def report(self, data: st.DataObject, verb: str) -> None:
        job, _ = self.held[data.draw(st.sampled_from(sorted(self.held)))]
        if verb == "beat":
            self.store.heartbeat(job, ttl_s=20)
            self.held[job.key] = job, self.clock.now + timedelta(seconds=20)
        elif verb == "finish":
            self.store.finish(job, {"by": job.token})
            self.settle(job, "done")
        elif verb == "fail":
            self.store.fail(job, NUMERIC, max_attempts=self.MAX_ATTEMPTS)
            self.settle(job, "failed")
        else:
            self.store.fail(job, GPU_LOST, max_attempts=self.MAX_ATTEMPTS)
            self.settle(job, "failed" if job.attempt == self.MAX_ATTEMPTS else "queued")

    @precondition(lambda self: self.old)
    @rule(data=st.data())
    def report_late(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.old))
        raises(
            LeaseLost,
            "taken back",
            lambda: self.store.finish(job, {"late": True}),
            lambda: self.store.fail(job, NUMERIC),
            lambda: self.store.heartbeat(job),
        )

    @rule(seconds=st.integers(1, 15))
    def recover(self, seconds: int) -> None:
        self.clock.forward(seconds)
        stale = [job for job, expires in self.held.values() if expires < self.clock.now]
        assert sorted(self.store.recover(self.MAX_ATTEMPTS)) == sorted(job.id for job in stale)
        for job in stale:
            self.settle(job, "failed" if job.attempt == self.MAX_ATTEMPTS else "queued")

    @invariant()
    def agrees(self) -> None:
        jobs = self.store.jobs(self.campaign)
        assert {job.key: job.status for job in jobs} == self.state
        assert {job.key: job.attempt for job in jobs} == self.attempts

    def teardown(self) -> None:
        self.store.check(self.campaign)
        for finished in self.store.events(self.campaign, "job.finished"):
            assert finished.payload["result"] == {"by": finished.payload["token"]}
        # The next example shares the store.
        while self.store.claim("sweeper", device="cpu") is not None:
            pass
        self.clock.forward(3600)
        self.store.recover(0)


def test_any_sequence_of_calls_agrees_with_the_model(store: Store, clock: Clock) -> None:
    machine = type("Machine", (QueueMachine,), {"store": store, "clock": clock})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=8, stateful_step_count=14, deadline=None, database=None),
    )


# ---- several processes --------------------------------------------------------------------------


@pytest.fixture(scope="session")
def processes() -> multiprocessing.context.ForkServerContext:
    """Processes that start in no time: what they import is imported once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tuner.tests.stores", "optuna.storages"])
    return context


def test_two_workers_lose_nothing_and_count_nothing_twice(
    path: Path, processes: multiprocessing.context.ForkServerContext
) -> None:
    url = f"sqlite:///{path}"
    with Store.open(url) as store:
        campaign, numbers = enqueue(store, 14)
        study_of(url, campaign)
        start = processes.Barrier(2)
        pipes = [processes.Pipe(duplex=False) for _ in range(2)]
        workers = [
            processes.Process(target=work, args=(url, f"w{i}", start, pipe[1], None))
            for i, pipe in enumerate(pipes)
        ]
        for worker in workers:
            worker.start()
        # Meanwhile a third process, this one, queues the same jobs again, reads and writes.
        assert [store.enqueue(campaign, "evaluate", {"number": i}) for i in range(14)] == numbers
        for worker in workers:
            worker.join(60)
        assert [worker.exitcode for worker in workers] == [0, 0]
        done = [pipe[0].recv() for pipe in pipes]
        assert sum(done) == 14
        assert min(done) >= 2
        jobs = store.jobs(campaign)
        assert [job.result and job.result["number"] for job in jobs] == list(range(14))
        assert {job.attempt for job in jobs} == {1}
        claimed = store.events(campaign, "job.claimed")
        assert len({event.payload["token"] for event in claimed}) == len(claimed) == 14
        assert len(store.events(campaign, "job.finished")) == 14
        store.check(campaign)
        # Optuna's trials in the same file, from both processes.
        trials = study_of(url, campaign).trials
        assert [trial.number for trial in trials] == list(range(14))
        assert {trial.state.name for trial in trials} == {"COMPLETE"}
        assert sorted(job.result["trial"] for job in jobs if job.result) == list(range(14))


def test_a_killed_worker_is_replaced_and_its_late_result_dropped(
    path: Path, clock: Clock, processes: multiprocessing.context.ForkServerContext
) -> None:
    url = f"sqlite:///{path}"
    with Store.open(url) as store:
        campaign, numbers = enqueue(store, 1)
        ours, theirs = processes.Pipe(duplex=False)
        victim = processes.Process(target=hang, args=(url, theirs))
        victim.start()
        assert ours.poll(60)
        dead = ours.recv()
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(60)
        assert victim.exitcode == -signal.SIGKILL
        assert store.claim("heir", device="cpu") is None
        assert store.recover(3) == []
    clock.now = datetime.now(timezone.utc) + timedelta(seconds=61)
    with Store.open(url, clock=clock) as store:
        assert store.recover(3) == numbers
        with pytest.raises(LeaseLost):
            store.finish(dead, {"us": 0.1})
        heir = claim(store, "heir")
        assert (heir.id, heir.attempt) == (dead.id, 2)
        assert heir.token > dead.token
        with pytest.raises(LeaseLost, match="of victim"):
            store.finish(dead, {"us": 0.1})
        store.finish(heir, {"us": 2.0})
        (job,) = store.jobs(campaign)
        assert (job.result, job.attempt, job.worker) == ({"us": 2.0}, 2, "heir")
        kinds = [event.kind for event in store.events(campaign) if event.kind.startswith("job.")]
        assert kinds == ["job.queued", "job.claimed", "job.retried", "job.claimed", "job.finished"]
        store.check(campaign)


def test_two_processes_make_one_store(
    tmp_path: Path, processes: multiprocessing.context.ForkServerContext
) -> None:
    url = f"sqlite:///{tmp_path}/new/tune.db"
    start = processes.Barrier(2)
    ours, theirs = processes.Pipe(duplex=False)
    makers = [processes.Process(target=create, args=(url, start, theirs)) for _ in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(60)
    assert [maker.exitcode for maker in makers] == [0, 0]
    with Store.open(url) as store:
        assert {row.id for row in store.campaigns()} == {ours.recv(), ours.recv()}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_connections_of_its_own(store: Store) -> None:
    campaign, pool = store.create(spec()), store._database.engine.pool
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for _ in range(5):
                store.append(campaign, "child", {})
            status = 2 if store._database.engine.pool is pool else 0
        finally:
            os._exit(status)
    for _ in range(5):
        store.append(campaign, "parent", {})
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    kinds = sorted(event.kind for event in store.events(campaign))
    assert kinds == ["campaign.created", *["child"] * 5, *["parent"] * 5]
    assert store._database.engine.pool is pool
    store.check(campaign)


# ---- bundles ------------------------------------------------------------------------------------


@pytest.fixture
def other(empty: Path, tmp_path: Path) -> Iterator[Store]:
    """A second store, empty."""
    (tmp_path / "other").mkdir()
    copy = shutil.copy(empty, tmp_path / "other" / "tune.db")
    with Store.open(f"sqlite:///{copy}") as opened:
        yield opened


def test_days_on_the_way_cost_no_time_on_a_device(
    store: Store, clock: Clock, empty: Path, tmp_path: Path
) -> None:
    """A machine dies with a job, and its campaign goes on elsewhere."""
    campaign, _ = enqueue(store, 1)
    claim(store)
    clock.forward(30)
    store.append(campaign, "note", {})
    store.export(campaign, tmp_path / "bundle.tar.gz")
    clock.forward(3 * 86400)
    copy = shutil.copy(empty, tmp_path / "elsewhere.db")
    with Store.open(f"sqlite:///{copy}", clock=clock) as elsewhere:
        elsewhere.import_(tmp_path / "bundle.tar.gz")
        assert len(elsewhere.recover(3)) == 1
        assert elsewhere.lost_s(campaign) == {"evaluate": 30.0}


def timeless(store: Store, campaign: str) -> list[Any]:
    """Jobs without what belongs to one store: ids and deadlines."""
    return [dataclasses.replace(job, id=0, expires=None) for job in store.jobs(campaign)]


def test_a_campaign_travels_whole(
    store: Store, other: Store, campaign: str, file: Path, tmp_path: Path
) -> None:
    one, two = file, tmp_path / "two.tar.gz"
    enqueue(other, 1)
    assert other.import_(one) == campaign
    other.check(campaign)
    assert other.spec(campaign) == store.spec(campaign)
    assert other.events(campaign) == store.events(campaign)
    assert timeless(other, campaign) == timeless(store, campaign)
    assert other.get(digest(b"artifact" * 50)) == b"artifact" * 50
    with pytest.raises(UnknownBlob):
        other.get(digest(b"of no campaign"))
    # Equal bytes are equal studies: every field of every trial is in them.
    other.export(campaign, two)
    assert one.read_bytes() == two.read_bytes()
    names = optuna.get_all_study_names(study_storage(other.url))
    assert sorted(names) == [f"{campaign}/toy/both", f"{campaign}/toy/plain"]
    old, new = (
        optuna.load_study(study_name=f"{campaign}/toy/plain", storage=study_storage(s.url))
        for s in (store, other)
    )
    assert [t.state.name for t in new.trials] == [
        "COMPLETE", "COMPLETE", "PRUNED", "FAIL", "RUNNING", "WAITING",
    ]  # fmt: skip
    assert new.trials[0].params == old.trials[0].params
    assert math.isnan(new.trials[2].intermediate_values[1])
    assert new.best_trial.number == 0
    assert new.ask().params == old.ask().params == {}
    assert new.trials[5].system_attrs == {"fixed_params": {"warps": 8}}


def test_a_campaign_goes_on_elsewhere_and_comes_back(
    store: Store, other: Store, campaign: str, file: Path
) -> None:
    other.import_(file)
    (running,) = other.jobs(campaign, "running")
    assert other.recover(3) == [running.id]  # its worker is elsewhere
    newest = max(event.payload["token"] for event in store.events(campaign, "job.claimed"))
    job = claim(other, "elsewhere")
    assert (job.attempt, job.key) == (3, running.key)
    assert job.token > newest
    other.finish(job, {"us": 3.0})
    study = optuna.load_study(study_name=f"{campaign}/toy/plain", storage=study_storage(other.url))
    study.tell(study.ask(), 0.5)
    other.export(campaign, file)
    with store.hold(campaign, "host:1"), pytest.raises(LeaseTaken):
        store.import_(file)
    for _ in range(2):  # the second time there is nothing to do
        assert store.import_(file) == campaign
        assert store.events(campaign) == other.events(campaign)
        assert timeless(store, campaign) == timeless(other, campaign)
        assert store.campaigns()[0].owner == ""
        store.check(campaign)
    assert study_of_plain(store, campaign).best_value == 0.5
    store.append(campaign, "note", {"here": True})
    assert store.import_(file) == campaign  # an older bundle takes nothing away
    assert store.events(campaign)[-1].payload == {"here": True}
    other.append(campaign, "note", {"here": False})
    other.export(campaign, file)
    before = store.events(campaign), store.jobs(campaign)
    with pytest.raises(CampaignExists, match="it went on in two places") as caught:
        store.import_(file)
    assert caught.value.exit_code == 2
    assert (store.events(campaign), store.jobs(campaign)) == before


def test_no_token_is_given_out_twice_in_a_campaign_that_moved(
    store: Store, other: Store, tmp_path: Path
) -> None:
    campaign, _ = enqueue(store, 1)
    for _ in range(3):
        store.fail(claim(store), GPU_LOST, max_attempts=9)
    store.export(campaign, tmp_path / "bundle.tar.gz")
    other.import_(tmp_path / "bundle.tar.gz")
    job = claim(other)
    assert (job.attempt, job.token) == (4, 4)


def study_of_plain(store: Store, campaign: str) -> optuna.Study:
    return optuna.load_study(study_name=f"{campaign}/toy/plain", storage=study_storage(store.url))


def test_no_damaged_bundle_is_taken(other: Store, file: Path, tmp_path: Path) -> None:
    data, whole = file.read_bytes(), bundle.read(file)
    plain = gzip.decompress(data)
    damaged = [data[: len(data) * i // 8] for i in range(8)] + [plain, data + data]
    # A flipped byte below the compression, whose own checksum is made to fit.
    for position in range(5, len(plain), len(plain) // 60):
        flipped = bytearray(plain)
        flipped[position] ^= 0x01
        damaged.append(gzip.compress(bytes(flipped)))
    harmless = 0
    for number, content in enumerate(damaged):
        file.write_bytes(content)
        try:
            found = bundle.read(file)
        except (StoreCorrupt, StoreVersionError):
            with pytest.raises(StoreError):
                other.import_(file)
        else:  # the mode or owner of a member, or padding
            assert number >= 10
            assert found == whole
            harmless += 1
    assert harmless < len(damaged) // 2
    assert other.campaigns() == []
    assert list((tmp_path / "other").rglob("sha256")) == []
    with pytest.raises(StoreError, match="no such file"):
        other.import_(tmp_path / "absent.tar.gz")


def members(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as archive:
        return {info.name: archive.extractfile(info).read() for info in archive}  # type: ignore[union-attr]


def pack(file: Path, entries: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    with tarfile.open(file, "w:gz") as archive:
        for info, data in entries:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def regular(contents: dict[str, bytes]) -> list[tuple[tarfile.TarInfo, bytes]]:
    return [(tarfile.TarInfo(name), data) for name, data in contents.items()]


def listed(contents: dict[str, bytes]) -> dict[str, bytes]:
    """With a manifest that fits the members: an attacker's, or another program's."""
    manifest = json.loads(contents["bundle.json"])
    manifest["members"] = {
        name: {"sha256": digest(data), "size": len(data)}
        for name, data in contents.items()
        if name != "bundle.json"
    }
    return {**contents, "bundle.json": json.dumps(manifest).encode()}


def test_hostile_bundles_are_refused(
    other: Store, model: tuple[Path, str], file: Path, tmp_path: Path
) -> None:
    campaign, good = model[1], members(file)
    before = sorted(tmp_path.rglob("*"))

    def refused(entries: list[tuple[tarfile.TarInfo, bytes]], words: str) -> None:
        pack(file, entries)
        with pytest.raises(StoreCorrupt, match=words):
            other.import_(file)
        assert other.campaigns() == []
        assert sorted(tmp_path.rglob("*")) == before

    for name in ("../escape", "/tmp/escape", "blobs/../../escape", f"blobs/{'0' * 64}/x", "x"):
        refused(regular(good) + regular({name: b"x"}), "unexpected")
        refused(regular(listed({**good, name: b"x"})), "unexpected member")
    blob = next(name for name in good if name.startswith("blobs/"))
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE):
        special = tarfile.TarInfo(blob)
        special.type, special.linkname = kind, "/etc/passwd"
        rest = {name: data for name, data in good.items() if name != blob}
        refused(regular(rest) + [(special, b"")], "unexpected member")
    refused(regular(good) + regular({blob: good[blob]}), "unexpected")
    refused(regular({n: d for n, d in good.items() if n != "studies.jsonl"}), "studies.jsonl|as it")
    refused(regular(listed({n: d for n, d in good.items() if n != "events.jsonl"})), "expected ev")
    refused(regular(listed({**good, f"blobs/{'0' * 64}": b"x"})), "has digest")
    refused(regular(dict(reversed(good.items()))), "unexpected member")
    # Manifest and members fit; the ledger does not.
    lines = good["events.jsonl"].splitlines(keepends=True)
    for events in (
        lines[:-1],
        lines[1:],
        [*lines[:3], lines[4], lines[3], *lines[5:]],
        [line.replace(b"1.5", b"1.4") for line in lines],
        [b"[]\n", *lines[1:]],
        [b"[" * 10_000, *lines[1:]],
        [b"\xff\n", *lines[1:]],
        [],
    ):
        refused(regular(listed({**good, "events.jsonl": b"".join(events)})), ".")
    manifest = json.loads(good["bundle.json"])
    changes: list[dict[str, Any]] = [
        {"campaign": "../../x"},
        {"campaign": 3},
        {"seq": "x"},
        {"members": []},
    ]
    for change in changes:
        wrong = json.dumps({**manifest, **change}).encode()
        refused(regular({**good, "bundle.json": wrong}), ".")
    foreign = good["studies.jsonl"].replace(campaign.encode(), b"0" * len(campaign))
    refused(regular(listed({**good, "studies.jsonl": foreign})), "is not of campaign")
    for old, new in ((b'"COMPLETE"', b'"FINISHED"'), (b"IntDistribution", b"NoDistribution")):
        assert old in good["studies.jsonl"]
        wrong = good["studies.jsonl"].replace(old, new)
        refused(regular(listed({**good, "studies.jsonl": wrong})), "a study is malformed")
    pack(file, regular({**good, "bundle.json": json.dumps({**manifest, "format": 2}).encode()}))
    with pytest.raises(StoreVersionError, match="bundle format 2, this fastkernels-tune reads 1"):
        other.import_(file)
    pack(file, regular(good))
    assert other.import_(file) == campaign


def test_a_ledger_without_sense_is_refused_though_its_chain_holds() -> None:
    time = datetime(2026, 12, 1, tzinfo=timezone.utc)
    queued = {"job": "k", "kind": "evaluate", "device": "", "payload": {}}
    claimed = {"job": "k", "worker": "w", "device": "cpu", "attempt": 1, "token": 1}
    done = {"job": "k", "worker": "w", "attempt": 1, "token": 1, "result": {}}

    def replayed(*steps: tuple[str, dict[str, Any]]) -> dict[str, ledger.Position]:
        return ledger.replay(
            ledger.link("c", number, kind, payload, time, ledger.GENESIS)
            for number, (kind, payload) in enumerate(steps, start=1)
        )

    sound = ("job.queued", queued), ("job.claimed", claimed), ("job.finished", done)
    assert replayed(*sound)["k"].status == "done"
    for steps in (
        sound[1:],
        sound[::2],
        (sound[0], sound[0]),
        (*sound, sound[2]),
        (*sound[:2], sound[1]),
        (sound[0], ("job.claimed", {**claimed, "attempt": 2})),
        (*sound[:2], ("job.finished", {**done, "token": 2})),
        (("job.invented", queued),),
        (("job.queued", {"job": "k"}),),
        (("job.queued", {}),),
    ):
        with pytest.raises(StoreCorrupt, match="is malformed"):
            replayed(*steps)


def test_an_import_cut_short_is_repaired_by_the_next(
    other: Store, model: tuple[Path, str], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "_take", crash)
    with pytest.raises(KeyboardInterrupt):
        other.import_(file)
    monkeypatch.undo()
    assert other.campaigns() == []
    campaign = model[1]
    assert other.import_(file) == campaign
    names = optuna.get_all_study_names(study_storage(other.url))
    assert sorted(names) == [f"{campaign}/toy/both", f"{campaign}/toy/plain"]
    other.check(campaign)
