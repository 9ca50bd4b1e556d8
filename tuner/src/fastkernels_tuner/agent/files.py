"""Text files by relative names, as agents hand them in: legal names, and how one is written."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from fastkernels_tuner.errors import TunerError


class Refused(TunerError):
    """A file that an agent may not hand in, by its name and the reason."""

    exit_code = 5

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name!r} {reason}")
        self.name = name
        self.reason = reason


def checked(name: str) -> PurePosixPath:
    """The name as a path below a folder. Raises Refused where it is none, or leads out of one."""
    if not name or "\0" in name or "\\" in name:
        raise Refused(name, "is no file name")
    path = PurePosixPath(name)
    if path.is_absolute():
        raise Refused(name, "is an absolute path")
    if ".." in path.parts:
        raise Refused(name, "leads out of the workspace")
    if str(path) != name:
        raise Refused(name, f"is not in normal form, expected {str(path)!r}")
    return path


def write(folder: Path, name: str, text: str) -> None:
    """Writes one file below `folder`, through no symlink. Raises Refused."""
    path = folder
    for part in checked(name).parts:
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise Refused(name, f"lies below {path.name!r}, which is no folder")
        path = path / part
    if path.is_symlink() or path.is_dir():
        raise Refused(name, "is a symlink or a folder")
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise Refused(name, "is not text") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
