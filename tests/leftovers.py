"""Checks that tests leave nothing: files in the folder for temporary files, threads, open files."""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil
import pytest

_PREFIX: Final = "pt-"
_PATIENCE_S: Final = 20.0  # the processes of the last test may still be ending
_FOREIGN_PREFIXES: Final = ("sklearn_testing_",)
"""Files that other packages leave until their process ends."""


class TemporaryFiles:
    """The folder for temporary files of this process and its children."""

    def __init__(self) -> None:
        before = tempfile.gettempdir()
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", before)  # the files that pytest keeps for inspection
        # Keep torch's compiled code for the next session.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(before, f"torchinductor_{getpass.getuser()}"))
        # The path is short, because the path of a Unix socket may have only about 100 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp" if os.path.isdir("/tmp") else None))
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.folder)

    def names(self) -> set[str]:
        """Return the existing files and folders."""
        return {name for name in os.listdir(self.folder) if not name.startswith(_FOREIGN_PREFIXES)}

    def wait_removed(self, before: set[str]) -> set[str]:
        """Wait until no new files are left; remove and return the files that remain."""
        deadline = time.monotonic() + _PATIENCE_S
        while (left := self.names() - before) and time.monotonic() < deadline:
            time.sleep(0.01)
        for name in left:
            path = self.folder / name
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        return left

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Check that the test has ended its threads and closed its files."""
    process = psutil.Process()
    threads, files = threading.active_count(), process.num_fds()
    yield
    deadline = time.monotonic() + 5
    while (threading.active_count(), process.num_fds()) > (threads, files) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threading.active_count() <= threads, threading.enumerate()
    assert process.num_fds() <= files
