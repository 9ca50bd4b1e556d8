"""The events of a campaign as a hash chain, and the queue that they amount to. Pure functions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from fastkernels_tuner.model import canonical, digest
from fastkernels_tuner.store.errors import StoreCorrupt

GENESIS = "0" * 64

CREATED = "campaign.created"
QUEUED, CLAIMED, RETRIED, FINISHED, FAILED = (
    "job.queued", "job.claimed", "job.retried", "job.finished", "job.failed",
)  # fmt: skip
RESERVED = ("campaign.", "job.")

Status = Literal["queued", "running", "done", "failed"]


@dataclass(frozen=True)
class Event:
    """One entry of a campaign's ledger: `digest` covers everything else, and through `previous`
    (the digest of the event before, zeros for the first) all that came before it."""

    campaign: str
    seq: int  # 1, 2, 3, ...
    kind: str
    text: str  # canonical JSON
    created: datetime  # UTC
    previous: str
    digest: str

    @property
    def payload(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.text)
        return data

    def verify(self) -> None:
        """Raises StoreCorrupt if the digest is not that of the contents."""
        try:
            is_sound = self.digest == _digest(self)
        except (AttributeError, TypeError):  # a damaged row may hold any type
            is_sound = False
        if not is_sound:
            raise StoreCorrupt(f"{self.campaign}: event {self.seq} ({self.kind}) was edited")


def _digest(event: Event) -> str:
    created = event.created.isoformat(timespec="microseconds")
    return digest(
        canonical(
            [event.campaign, event.seq, event.kind, event.text, created, event.previous],
        )
    )


def link(
    campaign: str, seq: int, kind: str, payload: dict[str, Any], created: datetime, previous: str
) -> Event:
    """The next event of a chain. Raises ValueError over NaN and infinities in the payload."""
    event = Event(campaign, seq, kind, canonical(payload), created, previous, "")
    return replace(event, digest=_digest(event))


def verify(campaign: str, events: Sequence[Event], seq: int, head: str) -> None:
    """Raises StoreCorrupt unless these are all events of the campaign, in order and unedited, up to
    number `seq` with digest `head`."""
    previous = GENESIS
    for number, event in enumerate(events, start=1):
        if event.campaign != campaign:
            raise StoreCorrupt(f"{campaign}: event {number} is of campaign {event.campaign}")
        if event.seq != number:
            raise StoreCorrupt(f"{campaign}: expected event {number}, got event {event.seq}")
        if event.previous != previous:
            raise StoreCorrupt(f"{campaign}: event {number} does not follow the one before it")
        event.verify()
        previous = event.digest
    if len(events) != seq:
        raise StoreCorrupt(f"{campaign}: the ledger ends at event {len(events)}, expected {seq}")
    if previous != head:
        raise StoreCorrupt(f"{campaign}: the last event is not the one that was recorded")


@dataclass(frozen=True)
class Position:
    """Where a job stands, as the ledger tells it."""

    key: str
    kind: str
    device: str
    status: Status
    attempt: int  # attempts begun
    token: int  # of the last attempt; 0 if it was taken back
    worker: str
    queued: int  # seq
    settled: int | None  # seq


def replay(events: Iterable[Event]) -> dict[str, Position]:
    """The queue by key, in the order of queueing. Raises StoreCorrupt over events without sense."""
    queue: dict[str, Position] = {}
    try:
        for event in events:
            if event.kind.startswith("job."):
                key = event.payload["job"]
                queue[key] = _step(queue.get(key), event)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StoreCorrupt(f"{event.campaign}: event {event.seq} is malformed: {error!r}") from None
    return queue


_FROM: dict[str, Status | None] = {
    QUEUED: None, CLAIMED: "queued", RETRIED: "running", FINISHED: "running", FAILED: "running",
}  # fmt: skip


def _step(job: Position | None, event: Event) -> Position:
    payload = event.payload
    before = None if job is None else job.status
    if _FROM[event.kind] != before:
        raise ValueError(f"{event.kind} of a job that is {before}")
    if job is None:
        return Position(
            payload["job"], payload["kind"], payload["device"], "queued", 0, 0, "", event.seq, None
        )
    if event.kind == CLAIMED:
        if payload["attempt"] != job.attempt + 1:
            raise ValueError(f"attempt {payload['attempt']} after {job.attempt}")
        return replace(
            job,
            status="running",
            attempt=payload["attempt"],
            token=payload["token"],
            worker=payload["worker"],
        )
    if payload["token"] != job.token:
        raise ValueError(f"token {payload['token']} where {job.token} was current")
    if event.kind == RETRIED:
        return replace(job, status="queued", token=0)
    return replace(job, status="done" if event.kind == FINISHED else "failed", settled=event.seq)


_DIGEST = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


def named(texts: Iterable[str]) -> set[str]:
    """What may be a blob's digest in the payloads: a blob belongs to the campaigns that name it."""
    return {found for text in texts for found in _DIGEST.findall(text)}
