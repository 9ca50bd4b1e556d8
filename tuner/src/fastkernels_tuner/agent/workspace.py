"""What an agent sees and may change: a copy of the operator's editable files, read-only context.

After a turn the changed files are a patch. Everything else that is different is refused by name:
the agent's edits reach nothing but this folder, and nothing but the patch leaves it.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fastkernels_tuner.agent.files import Refused, checked, write
from fastkernels_tuner.model import Model, canonical, digest

PLAN = "plan.toml"
"""What the agent hands in besides the patch: one change, and what is expected of it."""

SCRATCH = "scratch"
"""A folder that an agent may use as it likes; nobody looks there. So are, at the top, folders whose
names begin with a dot (agents keep their settings there), and everywhere bytecode."""

MAX_ENTRIES = 10_000  # of a folder that is looked through


class Permit(Model):
    """What may be changed: `files` by name, and new ones that match `added` (`fnmatch`)."""

    files: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    max_files: int = 64
    max_bytes: int = 1 << 20  # together

    def allows(self, name: str) -> bool:
        return name in self.files or any(fnmatch.fnmatchcase(name, each) for each in self.added)


class Patch(Model):
    """Whole new texts of changed files; None of one that was deleted."""

    files: dict[str, str | None] = {}

    def __bool__(self) -> bool:
        return bool(self.files)

    def apply(self, base: Mapping[str, str]) -> dict[str, str]:
        merged: dict[str, str | None] = {**base, **self.files}
        return {name: text for name, text in sorted(merged.items()) if text is not None}

    def diff(self, base: Mapping[str, str]) -> str:
        """For a person, and for `patch -p1`."""
        parts: list[str] = []
        for name, text in sorted(self.files.items()):
            before = base.get(name)
            lines = difflib.unified_diff(
                (before or "").splitlines(keepends=True),
                (text or "").splitlines(keepends=True),
                "/dev/null" if before is None else f"a/{name}",
                "/dev/null" if text is None else f"b/{name}",
            )
            parts += (_ended(line) for line in lines)
        return "".join(parts)


def _ended(line: str) -> str:
    return line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def version_of(files: Mapping[str, str]) -> str:
    """Identity of a set of files, by content."""
    return digest(canonical(dict(files)))


@dataclass(frozen=True)
class Workspace:
    """`base`: the editable files as they are now. `context`: what is there to be read."""

    folder: Path
    permit: Permit
    base: Mapping[str, str]
    context: Mapping[str, str]

    def create(self) -> None:
        """The folder anew, whatever an interrupted turn left there."""
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)
        for name, text in {**self.context, **self.base}.items():
            write(self.folder, name, text)
        for name in self.context:
            (self.folder / name).chmod(0o444)
        (self.folder / SCRATCH).mkdir(exist_ok=True)

    def collect(self) -> tuple[Patch, str]:
        """The patch, and the text of PLAN. Raises Refused over the first thing, by name, that is
        not permitted."""
        found, changed, size, plan = set[str](), dict[str, str | None](), 0, ""
        for name, path, is_file in _entries(self.folder):
            checked(name)
            if not is_file:
                raise Refused(name, "is neither a file nor a folder")
            before = self.context.get(name, self.base.get(name))
            data = _read(name, path, self.permit.max_bytes)
            found.add(name)
            if before is not None and data == before.encode():
                continue
            text = _text(name, data)
            if name == PLAN:
                plan = text
                continue
            self._require(name)
            changed[name] = text
            size += len(data)
            if len(changed) > self.permit.max_files or size > self.permit.max_bytes:
                raise Refused(
                    name, f"is one change too many: at most {self.permit.max_files} files and "
                    f"{self.permit.max_bytes} bytes",
                )  # fmt: skip
        for name in sorted({*self.context, *self.base} - found):
            if name in self.context or name in self.permit.files:
                raise Refused(name, "was deleted")
            changed[name] = None
        return Patch(files=changed), plan

    def _require(self, name: str) -> None:
        if name in self.context:
            raise Refused(name, "is read-only")
        if not self.permit.allows(name):
            raise Refused(name, "is not among the files that may be changed")


def _entries(folder: Path) -> Iterator[tuple[str, Path, bool]]:
    """Everything below a folder but folders, with names relative to it, sorted."""
    open_folders, seen = [""], 0
    while open_folders:
        inside = open_folders.pop(0)
        for entry in sorted(os.scandir(folder / inside), key=lambda entry: entry.name):
            seen += 1
            name = f"{inside}{entry.name}"
            if seen > MAX_ENTRIES:
                raise Refused(name, f"is one of more than {MAX_ENTRIES} files")
            if entry.is_dir(follow_symlinks=False):
                if not _is_scratch(name):
                    open_folders.append(f"{name}/")
                continue
            if entry.is_symlink():
                raise Refused(name, "is a symlink")
            yield name, Path(entry.path), entry.is_file(follow_symlinks=False)


def _is_scratch(name: str) -> bool:
    head, _, rest = name.partition("/")
    return (not rest and (head == SCRATCH or head[0] == ".")) or name.endswith("__pycache__")


def _read(name: str, path: Path, max_bytes: int) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise Refused(name, "is no file")
        if facts.st_nlink > 1:  # another name for a file of somebody else's
            raise Refused(name, "is a hard link")
        if facts.st_size > max_bytes:
            raise Refused(name, f"has {facts.st_size} bytes, at most {max_bytes} are read")
        return file.read(max_bytes + 1)


def _text(name: str, data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise Refused(name, "is binary, expected UTF-8 text") from None
    if "\0" in text:
        raise Refused(name, "is binary, expected UTF-8 text")
    return text
