"""The tables. The ledger (`tuner_events`) is the truth; jobs are a queue over it, derived from it
but for ids and deadlines. Optuna's tables lie beside these and share no name with them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)

from fastkernels_tuner.store.errors import StoreCorrupt

VERSION = 1

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class Utc(TypeDecorator[datetime]):
    """Aware datetimes as microseconds since 1970: the same number, to the last digit, in every
    database, since the ledger's digests cover it."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Any) -> int | None:
        return None if value is None else (value - _EPOCH) // timedelta(microseconds=1)

    def process_result_value(self, value: int | None, dialect: Any) -> datetime | None:
        try:
            return None if value is None else _EPOCH + timedelta(microseconds=value)
        except (OverflowError, TypeError):
            raise StoreCorrupt(f"expected microseconds since 1970, got {value!r}") from None


metadata = MetaData()

# One row. `token` is the last fencing token given out, for jobs and controllers alike.
store = Table(
    "tuner_store",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("token", BigInteger, nullable=False),
)

# `seq` and `digest` are those of the last event: without them a chain cut short would look whole.
# `token`, `owner` and `expires` are the controller's lease; token 0 is none.
campaigns = Table(
    "tuner_campaigns",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("seq", Integer, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("token", BigInteger, nullable=False, default=0),
    Column("owner", Text, nullable=False, default=""),
    Column("expires", Utc),
)

events = Table(
    "tuner_events",
    metadata,
    Column("campaign", ForeignKey("tuner_campaigns.id"), primary_key=True),
    Column("seq", Integer, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("payload", Text, nullable=False),  # canonical JSON, which the digest covers as text
    Column("created", Utc, nullable=False),
    Column("previous", String(64), nullable=False),
    Column("digest", String(64), nullable=False),
)

# `queued` and `settled` are the events that hold the payload and the outcome. `token` 0: nobody's.
jobs = Table(
    "tuner_jobs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("campaign", ForeignKey("tuner_campaigns.id"), nullable=False),
    Column("key", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("device", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("token", BigInteger, nullable=False),
    Column("worker", Text, nullable=False),
    Column("queued", Integer, nullable=False),
    Column("settled", Integer),
    Column("expires", Utc),
    UniqueConstraint("campaign", "key"),
    Index("tuner_jobs_by_status", "status", "id"),
    sqlite_autoincrement=True,  # an id is never given out twice
)

# `data` is NULL on SQLite, where the bytes lie in a file beside the database.
blobs = Table(
    "tuner_blobs",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("touched", Utc, nullable=False),
    Column("data", LargeBinary),
)
