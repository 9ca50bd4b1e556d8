"""The store of campaigns: a ledger for each, a queue of jobs over it, blobs, leases, bundles."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, inspect, select, update

from fastkernels_tuner.model import CampaignSpec, Cause, Failure, canonical, digest
from fastkernels_tuner.store import bundle, ledger, rows, schema, studies
from fastkernels_tuner.store.database import connect, get_blob, put_blob
from fastkernels_tuner.store.errors import (
    CampaignExists,
    LeaseLost,
    LeaseTaken,
    StoreCorrupt,
    StoreVersionError,
    UnknownCampaign,
)
from fastkernels_tuner.store.ledger import Event, Status, link, replay
from fastkernels_tuner.store.rows import CampaignRow, Job, JobRow

events, jobs, campaigns = schema.events, schema.jobs, schema.campaigns


@dataclass(frozen=True)
class Lease:
    """A controller's hold on a campaign; a context that releases it."""

    store: Store
    campaign: str
    owner: str
    token: int
    ttl_s: float

    def renew(self) -> None:
        """Another `ttl_s` from now. Raises LeaseLost if another controller has taken over."""
        self.store._renew(self)

    def release(self) -> None:
        """Lets others hold the campaign at once; nothing happens if they do already."""
        self.store._release(self)

    def _require(self, row: Row[Any]) -> None:
        if row.id != self.campaign or row.token != self.token:
            holder = f"{row.owner} holds it" if row.owner else "nobody holds it"
            raise LeaseLost(f"campaign {row.id}: the lease of {self.owner} is over, {holder}")

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Store:
    """Campaigns in one SQL database, shared with Optuna (`url`, see `studies.study_storage`).

    Safe to use from several threads, processes and, on PostgreSQL, hosts. Every method may raise
    StoreCorrupt, StoreUnavailable, DiskFull. `clock` replaces the database's, for tests.
    """

    def __init__(self, url: str, clock: Callable[[], datetime] | None = None) -> None:
        self._database = connect(url)
        self._clock = clock
        self.url = self._database.url.render_as_string(hide_password=False)

    @staticmethod
    def open(url: str, *, clock: Callable[[], datetime] | None = None) -> Store:
        """The store at `sqlite:///path` (or the path alone) or `postgresql+psycopg://...`, made if
        there is none.

        Raises StoreError over another kind of URL, StoreVersionError over a store of a newer
        version, StoreCorrupt over a damaged one, UnfitFileSystem over SQLite on a network.
        """
        store = Store(url, clock)
        store._prepare()
        return store

    def close(self) -> None:
        self._database.engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _prepare(self) -> None:
        with self._database.opening():
            with self._database.read() as connection:
                found = set(inspect(connection).get_table_names())
            ours = set(schema.metadata.tables)
            if not ours & found:
                self._database.write(self._create_tables)
            elif not ours <= found:
                raise StoreCorrupt(f"{self._database}: no table {', '.join(sorted(ours - found))}")
            self._require_version()
            if "alembic_version" not in found:
                # Here, since two processes that make Optuna's tables at once collide.
                with studies.opened(self.url):
                    pass
        self._database.verify()

    def _create_tables(self, connection: Connection) -> None:
        schema.metadata.create_all(connection)
        connection.execute(insert(schema.store).values(id=1, version=schema.VERSION, token=0))

    def _require_version(self) -> None:
        with self._database.read() as connection:
            versions = connection.execute(select(schema.store.c.version)).scalars().all()
        if versions == [schema.VERSION]:
            return
        if len(versions) == 1 and isinstance(versions[0], int) and versions[0] > schema.VERSION:
            raise StoreVersionError(
                f"{self._database}: written by a newer fastkernels-tune (schema {versions[0]}, "
                f"this one reads {schema.VERSION}); update fastkernels-tuner"
            )
        raise StoreCorrupt(
            f"{self._database}: expected schema version {schema.VERSION}, got {versions}"
        )

    def _now(self, connection: Connection) -> datetime:
        return self._database.now(connection) if self._clock is None else self._clock()

    # ---- campaigns ------------------------------------------------------------------------------

    def create(self, spec: CampaignSpec) -> str:
        """A new campaign; its id is the spec's with a random suffix, its first event the spec."""
        campaign = f"{spec.id}-{secrets.token_hex(3)}"
        payload = {"spec": spec.model_dump(mode="json")}

        def body(connection: Connection) -> None:
            values = {"id": campaign, "seq": 0, "digest": ledger.GENESIS}
            connection.execute(insert(campaigns).values(values))
            self._append(connection, campaign, ledger.CREATED, payload)

        self._database.write(body, is_work=True)
        return campaign

    def campaigns(self) -> list[CampaignRow]:
        """All campaigns, oldest first."""
        with self._database.read() as connection:
            now = self._now(connection)
            found = connection.execute(select(campaigns)).all()
            first = {row.id: rows.read_event(connection, row.id, 1) for row in found}
        listed = [
            CampaignRow(
                id=row.id,
                op=first[row.id].payload["spec"]["op"],
                device=first[row.id].payload["spec"]["device"],
                created=first[row.id].created,
                events=row.seq,
                owner=rows.owner_of(row, now),
            )
            for row in found
        ]
        return sorted(listed, key=lambda row: (row.created, row.id))

    def spec(self, campaign: str) -> CampaignSpec:
        """Raises UnknownCampaign; StoreVersionError if this version has other fields."""
        with self._database.read() as connection:
            self._row(connection, campaign)
            event = rows.read_event(connection, campaign, 1)
        return rows.spec_of(event)

    # ---- the controller's lease -----------------------------------------------------------------

    def hold(self, campaign: str, owner: str, ttl_s: float = 30) -> Lease:
        """Makes `owner` the one controller for `ttl_s` seconds, and for as long as it renews.

        The ledger and the queue are verified first: nothing continues over a gap. Raises LeaseTaken
        while another controller's lease lasts, whose holder may be dead, UnknownCampaign.
        """

        def body(connection: Connection) -> int:
            row = self._row(connection, campaign, lock=True)
            now = self._now(connection)
            if owner_now := rows.owner_of(row, now):
                raise LeaseTaken(campaign, owner_now, row.expires)
            self._verify(connection, campaign)
            token = self._next_token(connection)
            expires = now + timedelta(seconds=ttl_s)
            rows.set_lease(connection, campaign, token=token, owner=owner, expires=expires)
            return token

        return Lease(self, campaign, owner, self._database.write(body), ttl_s)

    def _renew(self, lease: Lease) -> None:
        def body(connection: Connection) -> None:
            lease._require(self._row(connection, lease.campaign, lock=True))
            expires = self._now(connection) + timedelta(seconds=lease.ttl_s)
            rows.set_lease(connection, lease.campaign, expires=expires)

        self._database.write(body)

    def _release(self, lease: Lease) -> None:
        def body(connection: Connection) -> None:
            if self._row(connection, lease.campaign, lock=True).token == lease.token:
                rows.set_lease(connection, lease.campaign, token=0, owner="", expires=None)

        self._database.write(body)

    # ---- the ledger -----------------------------------------------------------------------------

    def append(
        self, campaign: str, kind: str, payload: dict[str, Any], lease: Lease | None = None
    ) -> Event:
        """Adds an event for ever. With a lease: only while it is the current one, else LeaseLost.

        `payload` is JSON: NaN and infinities raise ValueError, as do the store's own kinds.
        """
        if kind.startswith(ledger.RESERVED):
            raise ValueError(
                f"event kind {kind!r}: {' and '.join(ledger.RESERVED)} are the store's"
            )

        def body(connection: Connection) -> Event:
            if lease is not None:
                lease._require(self._row(connection, campaign, lock=True))
            return self._append(connection, campaign, kind, payload)

        return self._database.write(body)

    def events(self, campaign: str, kind: str | None = None) -> list[Event]:
        """The ledger in order, verified; of one kind, each event for itself (`check` does all)."""
        with self._database.read() as connection:
            row = self._row(connection, campaign)
            found = rows.read_events(connection, campaign, *([kind] if kind else []))
        if kind is None:
            ledger.verify(campaign, found, row.seq, row.digest)
        return found

    def check(self, campaign: str) -> None:
        """Raises StoreCorrupt unless the database is sound, the ledger is whole and unedited, the
        queue is what the ledger says, and every blob that it names is what was put."""
        self._database.verify()
        with self._database.read() as connection:
            found = self._verify(connection, campaign)
            names = self._blobs_of(connection, found)
        for name in names:
            self.get(name)

    def _append(
        self, connection: Connection, campaign: str, kind: str, payload: dict[str, Any]
    ) -> Event:
        row = self._row(connection, campaign, lock=True)
        if row.seq:
            last = rows.read_event(connection, campaign, row.seq)
            if last.digest != row.digest:
                raise StoreCorrupt(f"{campaign}: the last event is not the one that was recorded")
        event = link(campaign, row.seq + 1, kind, payload, self._now(connection), row.digest)
        connection.execute(insert(events).values(rows.event_values(event)))
        head = {"seq": event.seq, "digest": event.digest}
        connection.execute(update(campaigns).where(campaigns.c.id == campaign).values(head))
        return event

    def _verify(self, connection: Connection, campaign: str) -> list[Event]:
        row = self._row(connection, campaign)
        found = rows.read_events(connection, campaign)
        ledger.verify(campaign, found, row.seq, row.digest)
        expected = replay(found)
        queue = connection.execute(select(jobs).where(jobs.c.campaign == campaign))
        actual = {row.key: rows.position_of(row) for row in queue}
        for key in expected.keys() | actual.keys():
            if expected.get(key) != actual.get(key):
                raise StoreCorrupt(
                    f"{campaign}: job {key} is {rows.words(actual.get(key))} in the queue, "
                    f"{rows.words(expected.get(key))} in the ledger"
                )
        return found

    def _row(self, connection: Connection, campaign: str, *, lock: bool = False) -> Row[Any]:
        query = select(campaigns).where(campaigns.c.id == campaign)
        row = connection.execute(query.with_for_update() if lock else query).one_or_none()
        if row is not None:
            return row
        orphans = select(func.count()).select_from(events).where(events.c.campaign == campaign)
        if count := connection.execute(orphans).scalar_one():
            raise StoreCorrupt(f"{campaign}: {count} events of a campaign that is not there")
        raise UnknownCampaign(f"{self._database} has no campaign {campaign!r}")

    def _next_token(self, connection: Connection) -> int:
        connection.execute(update(schema.store).values(token=schema.store.c.token + 1))
        token: int = connection.execute(select(schema.store.c.token)).scalar_one()
        return token

    # ---- blobs ----------------------------------------------------------------------------------

    def put(self, data: bytes) -> str:
        """Keeps bytes and returns their SHA-256. A blob stays while an event names it, in full, and
        travels with the campaign of that event."""
        return put_blob(self._database, data, self._now)

    def get(self, digest: str) -> bytes:
        """The bytes of that digest, verified. Raises UnknownBlob, StoreCorrupt."""
        return get_blob(self._database, digest)

    def collect(self, older_than_s: float = 86400) -> list[str]:
        """Removes blobs that no event names and that were not put since; returns their digests."""

        def body(connection: Connection) -> list[str]:
            cutoff = self._now(connection) - timedelta(seconds=older_than_s)
            query = select(schema.blobs.c.digest).where(schema.blobs.c.touched < cutoff)
            old = set(connection.execute(query.with_for_update()).scalars())
            texts = connection.execute(select(events.c.payload)).scalars()
            orphans = sorted(old - ledger.named(texts))
            for name in orphans:
                connection.execute(delete(schema.blobs).where(schema.blobs.c.digest == name))
                self._database.discard(name)
            return orphans

        return self._database.write(body)

    def _blobs_of(self, connection: Connection, found: Sequence[Event]) -> list[str]:
        known = set(connection.execute(select(schema.blobs.c.digest)).scalars())
        return sorted(known & ledger.named(event.text for event in found))

    # ---- the queue ------------------------------------------------------------------------------

    def enqueue(
        self, campaign: str, kind: str, payload: dict[str, Any], *, device: str = "", key: str = ""
    ) -> int:
        """Queues a job once: a second call with its key returns the same id and changes nothing.

        `device`: the only one that may run it, "" for any. `key`: unique in the campaign; by
        default the digest of everything else.
        """
        key = key or digest(canonical([kind, payload, device]))
        queued = {"job": key, "kind": kind, "device": device, "payload": payload}

        def body(connection: Connection) -> int:
            self._row(connection, campaign, lock=True)
            same = select(jobs.c.id).where(jobs.c.campaign == campaign, jobs.c.key == key)
            if (known := connection.execute(same).scalar_one_or_none()) is not None:
                return int(known)
            event = self._append(connection, campaign, ledger.QUEUED, queued)
            (position,) = replay([event]).values()
            return rows.insert_job(connection, campaign, position)

        return self._database.write(body, is_work=True)

    def claim(
        self,
        worker: str,
        *,
        device: str,
        gpu: str = "",
        ttl_s: float = 60,
        kinds: Sequence[str] = (),
    ) -> Job | None:
        """The oldest queued job that `device` may run, or that names `gpu` as its device, of one of
        `kinds` if any, leased to `worker` for `ttl_s` seconds; None if there is none."""
        query = (
            select(jobs)
            .where(jobs.c.status == "queued", jobs.c.device.in_(["", device, gpu]))
            .order_by(jobs.c.id)
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        if kinds:
            query = query.where(jobs.c.kind.in_(kinds))

        def body(connection: Connection) -> Job | None:
            row = connection.execute(query).one_or_none()
            if row is None:
                return None
            payload = rows.read_event(connection, row.campaign, row.queued).payload["payload"]
            self._row(connection, row.campaign, lock=True)  # before the token, as `hold` does
            token, attempt = self._next_token(connection), row.attempt + 1
            claimed = {"job": row.key, "worker": worker, "device": device}
            claimed |= {"attempt": attempt, "token": token}
            self._append(connection, row.campaign, ledger.CLAIMED, claimed)
            expires = self._now(connection) + timedelta(seconds=ttl_s)
            lease = {"attempt": attempt, "token": token, "worker": worker, "expires": expires}
            rows.set_job(connection, row.id, status="running", **lease)
            return Job(
                id=row.id,
                campaign=row.campaign,
                key=row.key,
                kind=row.kind,
                payload=payload,
                device=device,
                worker=worker,
                attempt=attempt,
                token=token,
            )

        return self._database.write(body, is_work=True)

    def heartbeat(self, job: Job, ttl_s: float = 60) -> None:
        """Another `ttl_s` seconds from now. Raises LeaseLost."""

        def body(connection: Connection) -> None:
            rows.require_held(rows.lock_job(connection, job.id), job)
            rows.set_job(
                connection, job.id, expires=self._now(connection) + timedelta(seconds=ttl_s)
            )

        self._database.write(body)

    def finish(self, job: Job, result: dict[str, Any]) -> None:
        """Records the result; job and event change together. Raises LeaseLost on an old token.

        To finish with the same result again does nothing: a worker that saw the connection break
        may try again.
        """

        def body(connection: Connection) -> None:
            row = rows.lock_job(connection, job.id)
            if row is not None and row.status == "done" and row.token == job.token:
                before = rows.read_event(connection, row.campaign, row.settled).payload["result"]
                if canonical(before) == canonical(result):
                    return
            row = rows.require_held(row, job)
            self._settle(connection, row, ledger.FINISHED, {"result": result})

        self._database.write(body)

    def fail(self, job: Job, failure: Failure, *, max_attempts: int = 1) -> None:
        """Records the failure. Raises LeaseLost on an old token.

        It is final if the candidate is to blame, and from attempt `max_attempts` on; else the job
        goes back into the queue.
        """

        def body(connection: Connection) -> None:
            row = rows.require_held(rows.lock_job(connection, job.id), job)
            self._fail(connection, row, failure, max_attempts)

        self._database.write(body)

    def recover(self, max_attempts: int, campaign: str | None = None) -> list[int]:
        """Takes running jobs back whose lease has run out: into the queue, or, from attempt
        `max_attempts` on (1 + policy.max_retries), as failed with `node_lost`.

        Of one campaign or of all. Returns their ids. What their workers still report is dropped.
        """

        def body(connection: Connection) -> int | None:
            now = self._now(connection)
            stale = jobs.c.expires < now
            query = select(jobs).where(jobs.c.status == "running", stale).order_by(jobs.c.id)
            if campaign is not None:
                query = query.where(jobs.c.campaign == campaign)
            row = connection.execute(query.limit(1).with_for_update(skip_locked=True)).one_or_none()
            if row is None:
                return None
            words = f"{row.worker} gave no sign of life until {row.expires.isoformat()}"
            until = {"until": row.expires.isoformat()}
            failure = Failure(cause=Cause.NODE_LOST, message=words, detail=until)
            self._fail(connection, row, failure, max_attempts)
            return int(row.id)

        found = []
        # One transaction a job: two that lock several campaigns each could wait for one another.
        while (number := self._database.write(body)) is not None:
            found.append(number)
        return found

    def lost_s(self, campaign: str) -> dict[str, float]:
        """By kind of job the seconds of attempts that gave no result. One that was never heard of
        again counts until its lease ran out, up to a `ttl_s` more than it took; where it came with
        a bundle, up to the last event."""
        with self._database.read() as connection:
            ends = (ledger.RETRIED, ledger.FAILED)
            found = rows.read_events(connection, campaign, ledger.QUEUED, ledger.CLAIMED, *ends)
        kinds: dict[str, str] = {}
        begun: dict[int, datetime] = {}
        lost: dict[str, float] = defaultdict(float)
        for event in found:
            payload = event.payload
            if event.kind == ledger.QUEUED:
                kinds[payload["job"]] = payload["kind"]
            elif event.kind == ledger.CLAIMED:
                begun[payload["token"]] = event.created
            else:
                until = payload["failure"]["detail"].get("until")
                ended = event.created if until is None else datetime.fromisoformat(until)
                seconds = (ended - begun[payload["token"]]).total_seconds()
                lost[kinds[payload["job"]]] += max(seconds, 0.0)
        return dict(lost)

    def jobs(self, campaign: str, status: Status | None = None) -> list[JobRow]:
        """The campaign's jobs in the order of queueing."""
        query = select(jobs).where(jobs.c.campaign == campaign).order_by(jobs.c.id)
        if status is not None:
            query = query.where(jobs.c.status == status)
        ends = (ledger.QUEUED, ledger.FINISHED, ledger.FAILED)
        with self._database.read() as connection:
            self._row(connection, campaign)
            queue = connection.execute(query).all()
            by_seq = {event.seq: event for event in rows.read_events(connection, campaign, *ends)}
        try:
            return [
                rows.job_row(row, by_seq[row.queued], by_seq[row.settled] if row.settled else None)
                for row in queue
            ]
        except KeyError as error:
            raise StoreCorrupt(f"{campaign}: a job rests on event {error}, which is gone") from None

    def _fail(
        self, connection: Connection, row: Row[Any], failure: Failure, max_attempts: int
    ) -> None:
        # Who gave the job back for want of time has not tried it.
        given_back = sum(
            event.payload["job"] == row.key
            and event.payload["failure"]["cause"] == Cause.LEASE_LOST.value
            for event in rows.read_events(connection, row.campaign, ledger.RETRIED)
        )
        attempts = row.attempt - given_back
        is_final = not failure.cause.is_infrastructure or attempts >= max_attempts
        payload = {"failure": failure.model_dump(mode="json")}
        self._settle(connection, row, ledger.FAILED if is_final else ledger.RETRIED, payload)

    def _settle(
        self, connection: Connection, row: Row[Any], kind: str, payload: dict[str, Any]
    ) -> None:
        """Ends an attempt: one event, and the row as `replay` would have it."""
        attempt = {"attempt": row.attempt, "token": row.token, "worker": row.worker}
        event = self._append(connection, row.campaign, kind, {"job": row.key, **attempt, **payload})
        if kind == ledger.RETRIED:
            rows.set_job(connection, row.id, status="queued", token=0, expires=None)
        else:
            status = "done" if kind == ledger.FINISHED else "failed"
            rows.set_job(connection, row.id, status=status, settled=event.seq, expires=None)

    # ---- bundles --------------------------------------------------------------------------------

    def export(self, campaign: str, path: Path) -> None:
        """Writes a bundle (`bundle`) that another store can `import_`: the same campaign gives the
        same bytes. Checks the campaign first. Raises UnknownCampaign, StoreCorrupt."""
        self._database.verify()
        with self._database.read() as connection:
            found = self._verify(connection, campaign)
            names = self._blobs_of(connection, found)
        with studies.opened(self.url) as storage:
            kept = studies.dump(storage, campaign)
        with bundle.writing(Path(path)) as file:
            bundle.write(file, campaign, found, kept, {name: self.get(name) for name in names})

    def import_(self, path: Path) -> str:
        """Takes a campaign from a bundle, verified before anything is written; returns its id.

        A store that has the campaign already takes what is new if the bundle continues its history,
        and nothing if it has all of it; else CampaignExists. Jobs that ran elsewhere when the
        bundle was written count as lost: `recover` takes them back. Raises StoreCorrupt over a
        damaged bundle, StoreVersionError over a newer one, LeaseTaken.
        """
        self._database.require_room()
        found = bundle.read(Path(path))
        campaign = found.campaign
        rows.spec_of(found.events[0])
        known = self._compare(found)
        if known == len(found.events):
            return campaign
        lease = self.hold(campaign, "import") if known else None
        try:
            for data in bundle.blobs(Path(path)):
                self.put(data)
            # Optuna commits on its own; if we are cut short here, to import again repairs it.
            with studies.opened(self.url) as storage:
                studies.load(storage, campaign, found.studies)
            self._database.write(lambda c: self._take(c, found, known, lease), is_work=True)
        finally:
            if lease is not None:
                lease.release()
        return campaign

    def _compare(self, found: bundle.Bundle) -> int:
        """How many of the bundle's events the store has."""
        try:
            have = self.events(found.campaign)
        except UnknownCampaign:
            return 0
        shared = min(len(have), len(found.events))
        if have[:shared] != found.events[:shared]:
            first = next(i for i in range(shared) if have[i] != found.events[i]) + 1
            raise CampaignExists(
                f"{self._database} has campaign {found.campaign} with another event {first}: "
                "it went on in two places"
            )
        return shared

    def _take(
        self, connection: Connection, found: bundle.Bundle, known: int, lease: Lease | None
    ) -> None:
        campaign, last = found.campaign, found.events[-1]
        # Jobs before the campaign, as `finish` locks them.
        connection.execute(select(jobs.c.id).where(jobs.c.campaign == campaign).with_for_update())
        if lease is None:
            values = {"id": campaign, "seq": 0, "digest": ledger.GENESIS}
            add = self._database.insert(campaigns).values(values).on_conflict_do_nothing()
            connection.execute(add)
        row = self._row(connection, campaign, lock=True)
        if lease is not None:
            lease._require(row)
        if row.seq != known:
            raise CampaignExists(f"{self._database}: campaign {campaign} changed meanwhile")
        connection.execute(
            insert(events), [rows.event_values(event) for event in found.events[known:]]
        )
        head = {"seq": last.seq, "digest": last.digest}
        connection.execute(update(campaigns).where(campaigns.c.id == campaign).values(head))
        connection.execute(delete(jobs).where(jobs.c.campaign == campaign))
        over = min(self._now(connection), last.created)  # not when it was brought here
        for position in replay(found.events).values():
            expires = over if position.status == "running" else None
            rows.insert_job(connection, campaign, position, expires)
        # Tokens go on from the highest of the two stores.
        claimed = (e.payload["token"] for e in found.events if e.kind == ledger.CLAIMED)
        newest = max(claimed, default=0)
        higher = update(schema.store).where(schema.store.c.token < newest)
        connection.execute(higher.values(token=newest))
