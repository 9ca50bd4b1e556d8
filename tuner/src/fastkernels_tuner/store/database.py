"""What SQLite and PostgreSQL do differently: connections, transactions, clocks, blobs, full disks.

SQLite: WAL, so that readers never wait; every write transaction is BEGIN IMMEDIATE, so that none
fails half-way because another process wrote since it began to read. Blobs are files. PostgreSQL:
rows are locked one by one, and leases go by the server's clock, which all hosts share.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    Pool,
    create_engine,
    event,
    func,
    make_url,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    InternalError,
    OperationalError,
)

from fastkernels_tuner.errors import TunerError, UnfitError
from fastkernels_tuner.model import digest
from fastkernels_tuner.store import schema
from fastkernels_tuner.store.errors import (
    DiskFull,
    StoreCorrupt,
    StoreError,
    StoreUnavailable,
    UnfitFileSystem,
    UnknownBlob,
)

T = TypeVar("T")

BUSY_S = 30  # longest wait for a lock that another process holds
MIN_FREE = 0.05  # of the file system; below it no new work is accepted
RESERVE_BYTES = 8 << 20

# SQLite's WAL needs memory that all its processes share, and locks that hold across them.
_NETWORK = re.compile(
    r"nfs\d*|cifs|smb\d*|smbfs|afs|ceph|lustre|gpfs|beegfs|pvfs2|orangefs"
    r"|fuse\.(sshfs|glusterfs|ceph.*|s3fs|rclone|gcsfuse|mount\.glusterfs)"
)


def connect(url: str) -> Database:
    """The database behind a URL or the path of a SQLite file, not yet looked at.

    Raises StoreError over one we do not serve.
    """
    try:
        parsed = make_url(url) if "://" in url else URL.create("sqlite", database=url)
    except ArgumentError:
        raise StoreError(f"expected a path or postgresql://host/name, got {url!r}") from None
    backend, _, driver = parsed.drivername.partition("+")
    if backend == "sqlite" and driver in ("", "pysqlite"):
        return Sqlite(parsed)
    if backend in ("postgresql", "postgres") and driver in ("", "psycopg"):
        return Postgres(parsed.set(drivername="postgresql+psycopg"))
    raise StoreError(
        f"{parsed.drivername}: expected a path, sqlite:///path or postgresql+psycopg://host/name"
    )


class Database(ABC):
    url: URL
    engine: Engine
    insert: Callable[..., Any]  # the dialect's, which knows ON CONFLICT

    def __init__(self, url: URL, engine: Engine) -> None:
        self.url = url
        self.engine = engine
        self._writer = engine.execution_options(tuner_write=True)
        self._pid = os.getpid()
        self._inherited: list[Pool] = []

    def __str__(self) -> str:
        return self.url.render_as_string(hide_password=True)

    # ---- transactions ---------------------------------------------------------------------------

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One moment of the database, however many queries it takes."""
        with self._typed(), self._fresh(self.engine).connect() as connection:
            yield self._snapshot(connection)

    def write(self, body: Callable[[Connection], T], *, is_work: bool = False) -> T:
        """Runs `body` in one transaction.

        New work is refused when space runs short (DiskFull). What finishes work is not: on a full
        disk the reserve is given away and `body`, rolled back, runs once more.
        """
        if is_work:
            self.require_room()
        try:
            return self.transact(body)
        except DiskFull:
            if is_work or not self._spend_reserve():
                raise
            return self.transact(body)

    def transact(self, body: Callable[[Connection], T]) -> T:
        """Runs `body` in one transaction, with the space there is."""
        with self._typed(), self._fresh(self._writer).begin() as connection:
            return body(connection)

    def _fresh(self, engine: Engine) -> Engine:
        """Connections do not survive a fork: to share one corrupts SQLite and confuses a server."""
        if os.getpid() != self._pid:
            self._inherited.append(self.engine.pool)  # kept: to collect it would close them
            self.engine.dispose(close=False)
            self._pid = os.getpid()
        return engine

    @contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            yield
        except IntegrityError as error:
            # No method of ours breaks a constraint on sound tables.
            raise StoreCorrupt(f"{self}: the tables contradict themselves: {error.orig}") from error
        except Exception as error:
            meant = self._meaning(error)
            if meant is None:
                raise
            raise meant from error

    # ---- per database ---------------------------------------------------------------------------

    @abstractmethod
    def opening(self) -> AbstractContextManager[None]:
        """Held while the schema is looked at and made: one process at a time."""

    @abstractmethod
    def now(self, connection: Connection) -> datetime: ...

    @abstractmethod
    def _meaning(self, error: Exception) -> TunerError | None:
        """What an error of the driver comes to; None for any other."""

    def _snapshot(self, connection: Connection) -> Connection:
        return connection

    @abstractmethod
    def require_room(self) -> None:
        """Raises DiskFull where less than MIN_FREE of the file system is free."""

    def _spend_reserve(self) -> bool:
        return False

    @abstractmethod
    def verify(self) -> None:
        """Raises StoreCorrupt if the database itself is damaged."""

    @abstractmethod
    def put(self, connection: Connection, name: str, data: bytes) -> bytes | None:
        """Keeps a blob's bytes; returns what belongs into its row."""

    @abstractmethod
    def fetch(self, name: str, data: bytes | None) -> bytes:
        """A blob's bytes, given its row's."""

    @abstractmethod
    def discard(self, name: str) -> None:
        """Removes what `put` keeps outside the row."""


_DAMAGE = "malformed", "not a database", "unsupported file format", "no such", "decode to UTF-8"


class Sqlite(Database):
    insert = staticmethod(sqlite.insert)

    def __init__(self, url: URL) -> None:
        if not url.database or url.database.startswith((":memory:", "file:")) or url.query:
            raise StoreError(
                f"{url}: expected sqlite:///path/to/file: the processes of a campaign share it"
            )
        self.path = Path(url.database).absolute()
        if found := file_system(self.path):
            raise UnfitFileSystem(
                f"{self.path} is on {found}, where SQLite's locks are not safe: "
                "put it on a local disk, or use postgresql://host/name"
            )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnfitError(f"{self.path.parent}: {error.strerror}") from None
        url = url.set(drivername="sqlite", database=str(self.path))
        super().__init__(url, create_engine(url, connect_args={"timeout": BUSY_S}))
        self._reserve = self.path.with_name(self.path.name + ".reserve")
        self._blobs = self.path.with_name(self.path.name + ".blobs")

        @event.listens_for(self.engine, "connect")
        def configure(connection: Any, record: Any) -> None:
            connection.isolation_level = None  # the driver's own BEGIN would be a deferred one
            connection.execute("PRAGMA foreign_keys = ON")
            # A verdict that was reported stays, through a power failure too.
            connection.execute("PRAGMA synchronous = FULL")

        @event.listens_for(self.engine, "begin")
        def begin(connection: Connection) -> None:
            is_write = connection.get_execution_options().get("tuner_write", False)
            connection.exec_driver_sql("BEGIN IMMEDIATE" if is_write else "BEGIN")

    @contextmanager
    def opening(self) -> Iterator[None]:
        try:
            # The folder, since closing any descriptor of the database drops SQLite's own locks.
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise UnfitError(f"{self.path.parent}: {error.strerror}") from None
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            self._require_whole()
            with self._typed():
                self._use_wal()
                yield
            with suppress(DiskFull):  # a store can be opened, read and finished without room
                self.require_room()
        finally:
            os.close(folder)

    def _require_whole(self) -> None:
        """An empty file is a sound, empty database to SQLite; not so beside a store's files."""
        is_empty = not self.path.exists() or self.path.stat().st_size == 0
        beside = [path for path in (self._reserve, self._blobs) if path.exists()]
        if is_empty and beside:
            raise StoreCorrupt(
                f"{self.path} is {'empty' if self.path.exists() else 'gone'}, but "
                f"{beside[0].name} is there: restore it, import a bundle elsewhere, or remove both"
            )

    def _use_wal(self) -> None:
        connection = self.engine.raw_connection()
        try:
            mode = connection.cursor().execute("PRAGMA journal_mode = WAL").fetchone()[0]
        finally:
            connection.close()
        if mode != "wal":
            raise UnfitFileSystem(f"{self.path}: SQLite has no WAL here, its mode stays {mode!r}")

    def now(self, connection: Connection) -> datetime:
        return datetime.now(timezone.utc)

    def _meaning(self, error: Exception) -> TunerError | None:
        if isinstance(error, UnicodeDecodeError):  # SQLite quotes from a damaged schema
            return StoreCorrupt(f"{self.path}: {error}")
        # SQLite's own come from the PRAGMAs of a new connection, which SQLAlchemy does not wrap.
        if not isinstance(error, DBAPIError | sqlite3.Error):
            return None
        # By words: the driver of Python 3.10 does not hand out SQLite's codes.
        message = str(error.orig if isinstance(error, DBAPIError) else error)
        if "disk is full" in message:
            return DiskFull(f"{self.path}: {message}")
        if any(words in message for words in _DAMAGE):
            return StoreCorrupt(f"{self.path}: {message}")
        if "locked" in message:
            return StoreUnavailable(f"{self.path}: locked by another process for {BUSY_S} s")
        if "disk I/O error" in message and self._free() < RESERVE_BYTES:
            return DiskFull(f"{self.path}: {message}")  # memory for the WAL's index
        if any(words in message for words in ("disk I/O error", "unable to open", "readonly")):
            return StoreUnavailable(f"{self.path}: {message}")
        return None

    def _free(self) -> int:
        return shutil.disk_usage(self.path.parent).free

    def require_room(self) -> None:
        usage = shutil.disk_usage(self.path.parent)
        if usage.free < MIN_FREE * usage.total:
            raise DiskFull(
                f"{self.path.parent}: {usage.free >> 20} of {usage.total >> 20} MiB are free, less "
                f"than {MIN_FREE:.0%}: no new work is accepted, what runs can be finished"
            )
        if not self._reserve.exists():
            _write_durably(self._reserve, lambda f: os.posix_fallocate(f, 0, RESERVE_BYTES))

    def _spend_reserve(self) -> bool:
        if not self._reserve.exists():
            return False
        self._reserve.unlink(missing_ok=True)
        return True

    def verify(self) -> None:
        with self.read() as connection:
            found = connection.execute(text("PRAGMA integrity_check(1)")).scalar_one()
        if found != "ok":
            raise StoreCorrupt(f"{self.path}: {found}")

    def _file(self, name: str) -> Path:
        return self._blobs / "sha256" / name[:2] / name

    def put(self, connection: Connection, name: str, data: bytes) -> None:
        path = self._file(name)
        try:
            if digest(path.read_bytes()) == name:
                return
        except FileNotFoundError:
            pass

        def write(descriptor: int) -> None:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(data)

        _write_durably(path, write)

    def fetch(self, name: str, data: bytes | None) -> bytes:
        try:
            return self._file(name).read_bytes()
        except FileNotFoundError:
            raise StoreCorrupt(f"blob {name}: {self._file(name)} is gone") from None

    def discard(self, name: str) -> None:
        self._file(name).unlink(missing_ok=True)


def _write_durably(path: Path, write: Callable[[int], None]) -> None:
    """A file that is whole or not there, through a crash too. Raises DiskFull, UnfitError."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            write(descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(scratch, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"{path}: {error.strerror}") from error
        raise UnfitError(f"{path}: {error.strerror}") from error


def file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the network file system that `path` is on; "" if local, or not to be known."""
    if not mounts.exists():
        return ""
    target = path.resolve()
    best, kind = -1, ""
    for line in mounts.read_text().splitlines():
        left, _, right = line.partition(" - ")
        point = Path(re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), left.split()[4]))
        # Of two mounts on one point the later one is seen.
        if target.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), right.split()[0]
    return kind if _NETWORK.fullmatch(kind) else ""


class Postgres(Database):
    insert = staticmethod(postgresql.insert)

    _OPENING = 0x66617374  # our advisory lock

    def __init__(self, url: URL) -> None:
        arguments: dict[str, Any] = {}
        if "connect_timeout" not in url.query:
            arguments["connect_timeout"] = 10
        if "options" not in url.query:
            # A process stopped inside a transaction must not stop the others for good.
            arguments["options"] = (
                f"-c lock_timeout={BUSY_S}s -c idle_in_transaction_session_timeout={2 * BUSY_S}s"
            )
        super().__init__(url, create_engine(url, connect_args=arguments, pool_pre_ping=True))

    @contextmanager
    def opening(self) -> Iterator[None]:
        with self._typed(), self._fresh(self.engine).begin() as connection:
            connection.execute(select(func.pg_advisory_xact_lock(self._OPENING)))
            yield

    def now(self, connection: Connection) -> datetime:
        now: datetime = connection.execute(select(func.clock_timestamp())).scalar_one()
        return now.astimezone(timezone.utc)

    def _snapshot(self, connection: Connection) -> Connection:
        return connection.execution_options(isolation_level="REPEATABLE READ")

    def _meaning(self, error: Exception) -> TunerError | None:
        if not isinstance(error, DBAPIError):
            return None
        state = getattr(error.orig, "sqlstate", None)
        message = f"{self}: {str(error.orig).strip()}"
        if state == "53100":
            return DiskFull(message)
        if state in ("XX001", "XX002", "42P01", "42703"):  # broken pages, no such table or column
            return StoreCorrupt(message)
        # 08: connection lost, 28 and 3D: refused, 53: out of resources, 57P: shut down, 25P03: idle
        # for too long, 55P03: locked for too long. Without a state there was no connection.
        is_ours = state and not state.startswith(("08", "28", "3D", "53", "57P", "25P03", "55P03"))
        if is_ours or not isinstance(error, OperationalError | InternalError):
            return None
        return StoreUnavailable(message)

    def require_room(self) -> None:
        pass  # a client cannot see the server's disk; the server says when it is full

    def verify(self) -> None:
        pass  # the server's business; a broken page is an error when it is read

    def put(self, connection: Connection, name: str, data: bytes) -> bytes:
        return data

    def fetch(self, name: str, data: bytes | None) -> bytes:
        if data is None:
            raise StoreCorrupt(f"blob {name}: its row has no data")
        return data

    def discard(self, name: str) -> None:
        pass


def put_blob(database: Database, data: bytes, now: Callable[[Connection], datetime]) -> str:
    """Keeps bytes under their digest: bytes first, row second, in one transaction."""
    name = digest(data)

    def body(connection: Connection) -> None:
        stored = database.put(connection, name, data)
        row = {"digest": name, "size": len(data), "touched": now(connection), "data": stored}
        fresh = {"touched": row["touched"], "data": stored}
        connection.execute(
            database.insert(schema.blobs)
            .values(row)
            .on_conflict_do_update(index_elements=["digest"], set_=fresh)
        )

    database.transact(body)  # the reserve is the ledger's
    return name


def get_blob(database: Database, name: str) -> bytes:
    """Bytes by their digest, verified. Raises UnknownBlob, StoreCorrupt."""
    with database.read() as connection:
        row = connection.execute(
            select(schema.blobs).where(schema.blobs.c.digest == name)
        ).one_or_none()
    if row is None:
        raise UnknownBlob(f"no blob {name!r}")
    data = database.fetch(name, row.data)
    if digest(data) != name:
        raise StoreCorrupt(f"blob {name}: {len(data)} bytes of digest {digest(data)}")
    return data
