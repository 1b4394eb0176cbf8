"""Write output files through temporary files, so that a reader never finds half a file."""

from __future__ import annotations

import os
import re
import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from paceline.errors import UsageError

USER_FOLDER: Final = Path(".cache", "paceline")
"""The folder in a user's home for keys and stored measurements."""
_OPEN_DESCRIPTORS: Final = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path for writing an output file, so that `path` never contains half a file.

    A regular or absent target, reached through symbolic links, is written to a temporary file and replaced at the end.
    The temporary file is removed after an error. A device, a FIFO or an open descriptor (``/dev/stdout``) is written in
    place. Temporary files left by killed processes of this host are removed.
    """
    if str(path).startswith(_OPEN_DESCRIPTORS) or (path.exists() and not path.is_file()):
        yield path
        return
    target = Path(os.path.realpath(path))
    aside = target.with_name(f".{target.name}.{process_mark()}")
    remove_leftovers(target.parent, re.compile(rf"\.{re.escape(target.name)}\.([0-9a-f]{{16}})"))
    try:
        yield aside
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def naming_output(option: str, path: Path) -> Iterator[None]:
    """Raise UsageError with the option of an output file instead of OSError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror or error}. Choose another path") from None


def check_output(option: str, path: Path) -> None:
    """Raise UsageError if an output file cannot be written, so that a wrong path is reported at the start.

    The file is not changed, and an absent file remains absent.
    """
    with naming_output(option, path):
        is_absent = not path.exists()
        path.open("ab").close()
        if is_absent:
            os.unlink(os.path.realpath(path))


def process_mark() -> str:
    """Return 16 hexadecimal digits for names of temporary files, which identify this host and process."""
    return f"{_host_mark()}{os.getpid():08x}"


def remove_leftovers(folder: Path, names: re.Pattern[str], min_age_s: float = 0.0) -> None:
    """Remove files of ended processes. The first group of the pattern `names` is a :func:`process_mark`."""
    host, oldest = _host_mark(), time.time() - min_age_s  # noqa: TID251  # modification times are wall-clock times
    try:
        entries = [(Path(entry.path), names.fullmatch(entry.name)) for entry in os.scandir(folder)]
        for path, found in entries:
            if found is None or found[1][:8] != host or path.lstat().st_mtime > oldest:
                continue
            try:
                os.kill(int(found[1][8:], 16), 0)
            except ProcessLookupError:
                path.unlink(missing_ok=True)
            except (OSError, OverflowError):
                pass  # the process belongs to another user, or the id is impossible
    except OSError:
        pass  # the file is gone or cannot be removed; both are harmless


def _host_mark() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"
