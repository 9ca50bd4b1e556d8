"""A campaign as one file: tar.gz of its ledger, its Optuna studies and the blobs that it names.

    bundle.json      what is in here: campaign, number and digest of the last event, digest and size
                     of every other member
    events.jsonl     the ledger, which holds the jobs too: what was queued, claimed, and came of it
    studies.jsonl    Optuna's studies
    blobs/<digest>

The same campaign gives the same bytes. Nothing in a bundle becomes a path: members are read by
their names here, and any other member makes the bundle a broken one.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from fastkernels_tuner.errors import UnfitError
from fastkernels_tuner.model import canonical, digest
from fastkernels_tuner.store import ledger, studies
from fastkernels_tuner.store.errors import StoreCorrupt, StoreError, StoreVersionError
from fastkernels_tuner.store.ledger import Event

FORMAT = 1
_MANIFEST, _EVENTS, _STUDIES = "bundle.json", "events.jsonl", "studies.jsonl"
_BLOB = re.compile(r"blobs/([0-9a-f]{64})")
_CAMPAIGN = re.compile(r"[0-9a-f]{16}-[0-9a-f]{6}")
_MAX_BYTES = 1 << 30  # of a member: what a header may make us allocate


@dataclass(frozen=True)
class Bundle:
    campaign: str
    events: list[Event]
    studies: list[dict[str, Any]]
    blobs: tuple[str, ...]


def write(
    file: BinaryIO,
    campaign: str,
    events: list[Event],
    found: list[dict[str, Any]],
    blobs: Mapping[str, bytes],
) -> None:
    members = {
        _EVENTS: _lines([_dump_event(event) for event in events]),
        _STUDIES: _lines(found),
        **{f"blobs/{name}": blobs[name] for name in sorted(blobs)},
    }
    manifest = {
        "format": FORMAT,
        "campaign": campaign,
        "seq": events[-1].seq,
        "digest": events[-1].digest,
        "members": {n: {"sha256": digest(d), "size": len(d)} for n, d in members.items()},
    }
    # No name, no time: the bytes depend on the campaign alone.
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, data in {_MANIFEST: canonical(manifest).encode(), **members}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def read(path: Path) -> Bundle:
    """The bundle without its blobs' bytes; every byte of it was verified.

    Raises StoreCorrupt over anything that `write` would not have written, StoreVersionError over a
    newer format, StoreError if there is no such file.
    """
    texts: dict[str, bytes] = {}
    names = []
    with _reading(path):
        for name, data in _members(path):
            if not (blob := _BLOB.fullmatch(name)):
                texts[name] = data
            elif digest(data) != blob[1]:
                raise StoreCorrupt(f"{path}: {name} has digest {digest(data)}")
            else:
                names.append(blob[1])
        manifest = json.loads(texts[_MANIFEST])
        campaign = manifest["campaign"]
        if not _CAMPAIGN.fullmatch(campaign):
            raise StoreCorrupt(f"{path}: {campaign!r} is not a campaign's id")
        events = [_load_event(campaign, line) for line in texts[_EVENTS].splitlines()]
        found = [json.loads(line) for line in texts[_STUDIES].splitlines()]
    ledger.verify(campaign, events, manifest["seq"], manifest["digest"])
    if not events or events[0].kind != ledger.CREATED:
        raise StoreCorrupt(f"{path}: the first event is not {ledger.CREATED}")
    ledger.replay(events)
    studies.verify(campaign, found)
    return Bundle(campaign, events, found, tuple(names))


def blobs(path: Path) -> Iterator[bytes]:
    """The blobs' bytes, one after the other."""
    with _reading(path):
        for name, data in _members(path):
            if _BLOB.fullmatch(name):
                yield data


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise StoreError(f"{path}: no such file") from None
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise StoreCorrupt(f"{path}: not a whole bundle: {error}") from error
    except OSError as error:
        raise UnfitError(f"{path}: {error.strerror}") from error
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise StoreCorrupt(f"{path}: malformed: {error!r}") from error


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and verified bytes of each member, the manifest first."""
    expected: dict[str, dict[str, Any]] = {}
    with gzip.open(path) as packed, tarfile.open(fileobj=packed, mode="r|") as archive:
        for info in archive:
            is_first = not expected
            name = info.name
            if not info.isreg() or is_first != (name == _MANIFEST) or info.size > _MAX_BYTES:
                raise StoreCorrupt(f"{path}: unexpected member {name!r}")
            if not is_first and expected.get(name, {}).get("size") != info.size:
                raise StoreCorrupt(f"{path}: member {name!r} is not in {_MANIFEST} as it is here")
            file = archive.extractfile(info)
            data = b"" if file is None else file.read()
            if is_first:
                expected = _load_manifest(path, data)
            elif digest(data) != expected.pop(name)["sha256"]:
                raise StoreCorrupt(f"{path}: member {name!r} was edited")
            yield name, data
            if not expected:
                break
        if expected or archive.next() is not None or packed.read(1 << 16).strip(b"\0"):
            raise StoreCorrupt(f"{path}: {', '.join(expected) or 'unexpected data at the end'}")


def _load_manifest(path: Path, data: bytes) -> dict[str, dict[str, Any]]:
    manifest = json.loads(data)
    if manifest["format"] > FORMAT:
        raise StoreVersionError(
            f"{path}: bundle format {manifest['format']}, this fastkernels-tune reads {FORMAT}"
        )
    expected: dict[str, dict[str, Any]] = manifest["members"]
    for name in expected:
        if name not in (_EVENTS, _STUDIES) and not _BLOB.fullmatch(name):
            raise StoreCorrupt(f"{path}: unexpected member {name!r}")
    if not {_EVENTS, _STUDIES} <= expected.keys():
        raise StoreCorrupt(f"{path}: expected {_EVENTS} and {_STUDIES} in {_MANIFEST}")
    return expected


def _dump_event(event: Event) -> dict[str, Any]:
    return {
        "seq": event.seq,
        "kind": event.kind,
        "payload": event.payload,
        "created": event.created.isoformat(timespec="microseconds"),
        "previous": event.previous,
        "digest": event.digest,
    }


def _load_event(campaign: str, line: bytes) -> Event:
    data = json.loads(line)
    if not isinstance(data["kind"], str) or not isinstance(data["payload"], dict):
        raise ValueError(f"event {data['seq']} has no kind or no payload")
    created = datetime.fromisoformat(data["created"]).astimezone(timezone.utc)
    return Event(
        campaign,
        data["seq"],
        data["kind"],
        canonical(data["payload"]),
        created,
        data["previous"],
        data["digest"],
    )


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(canonical(row) + "\n" for row in rows).encode()


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A file that appears at `path` whole, or not at all."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError as error:
        raise UnfitError(f"{path}: {error.strerror}") from error
    finally:
        scratch.unlink(missing_ok=True)
