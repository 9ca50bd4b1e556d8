"""What the store hands out, and how it is read from and written to the tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection, Row, insert, select, update

from fastkernels_tuner.model import CampaignSpec, Failure
from fastkernels_tuner.store import schema
from fastkernels_tuner.store.errors import LeaseLost, StoreCorrupt, StoreVersionError
from fastkernels_tuner.store.ledger import Event, Position, Status

events, jobs, campaigns = schema.events, schema.jobs, schema.campaigns


@dataclass(frozen=True)
class CampaignRow:
    id: str
    op: str
    device: str
    created: datetime
    events: int
    owner: str  # of the controller's lease; "" if nobody holds the campaign now


@dataclass(frozen=True)
class Job:
    """A job under a lease: `attempt` counts from 1, `token` grows with every lease of the store."""

    id: int
    campaign: str
    key: str
    kind: str
    payload: dict[str, Any]
    device: str
    worker: str
    attempt: int
    token: int


@dataclass(frozen=True)
class JobRow:
    """A job as it stands. `failure` is the final one; earlier attempts are `job.retried` events."""

    id: int
    campaign: str
    key: str
    kind: str
    payload: dict[str, Any]
    device: str
    status: Status
    attempt: int  # attempts begun
    worker: str  # of the last attempt
    expires: datetime | None  # of the lease, while running
    queued: datetime
    settled: datetime | None
    result: dict[str, Any] | None
    failure: Failure | None


def owner_of(campaign: Row[Any], now: datetime) -> str:
    """Who holds the campaign now; "" for nobody."""
    is_held = campaign.token and campaign.expires and campaign.expires > now
    return str(campaign.owner) if is_held else ""


def event_of(row: Row[Any]) -> Event:
    """Raises StoreCorrupt if it was edited."""
    values = {name: getattr(row, name) for name in Event.__dataclass_fields__ if name != "text"}
    event = Event(text=row.payload, **values)
    event.verify()
    return event


def event_values(event: Event) -> dict[str, Any]:
    values = asdict(event)
    values["payload"] = values.pop("text")
    return values


def read_events(connection: Connection, campaign: str, *kinds: str) -> list[Event]:
    """All, or those of some kinds."""
    query = select(events).where(events.c.campaign == campaign).order_by(events.c.seq)
    if kinds:
        query = query.where(events.c.kind.in_(kinds))
    return [event_of(row) for row in connection.execute(query)]


def read_event(connection: Connection, campaign: str, seq: int) -> Event:
    query = select(events).where(events.c.campaign == campaign, events.c.seq == seq)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise StoreCorrupt(f"{campaign}: event {seq} is gone")
    return event_of(row)


def spec_of(event: Event) -> CampaignSpec:
    try:
        return CampaignSpec.model_validate(event.payload["spec"])
    except ValidationError as error:
        raise StoreVersionError(
            f"{event.campaign}: its spec is not of this version of fastkernels-tune: {error}"
        ) from error


def set_lease(connection: Connection, campaign: str, **values: Any) -> None:
    connection.execute(update(campaigns).where(campaigns.c.id == campaign).values(values))


def insert_job(
    connection: Connection, campaign: str, position: Position, expires: datetime | None = None
) -> int:
    values = {"campaign": campaign, "expires": expires, **asdict(position)}
    key = connection.execute(insert(jobs).values(values)).inserted_primary_key
    assert key is not None
    return int(key[0])


def set_job(connection: Connection, number: int, **values: Any) -> None:
    connection.execute(update(jobs).where(jobs.c.id == number).values(values))


def lock_job(connection: Connection, number: int) -> Row[Any] | None:
    query = select(jobs).where(jobs.c.id == number)
    return connection.execute(query.with_for_update()).one_or_none()


def require_held(row: Row[Any] | None, job: Job) -> Row[Any]:
    """The job's row. Raises LeaseLost unless `job` has its lease."""
    if row is None or row.status != "running" or row.token != job.token:
        raise LeaseLost(
            f"job {job.key} of {job.campaign}: attempt {job.attempt} of {job.worker} (token "
            f"{job.token}) was taken back; the job is {words(row and position_of(row))}"
        )
    return row


def position_of(row: Row[Any]) -> Position:
    return Position(**{name: getattr(row, name) for name in Position.__dataclass_fields__})


def words(position: Position | None) -> str:
    if position is None:
        return "missing"
    return f"{position.status} (attempt {position.attempt}, token {position.token})"


def job_row(row: Row[Any], queued: Event, settled: Event | None) -> JobRow:
    outcome: Mapping[str, Any] = {} if settled is None else settled.payload
    failure = outcome.get("failure")
    return JobRow(
        id=row.id,
        campaign=row.campaign,
        key=row.key,
        kind=row.kind,
        payload=queued.payload["payload"],
        device=row.device,
        status=row.status,
        attempt=row.attempt,
        worker=row.worker,
        expires=row.expires,
        queued=queued.created,
        settled=None if settled is None else settled.created,
        result=outcome.get("result"),
        failure=None if failure is None else Failure.model_validate(failure),
    )
