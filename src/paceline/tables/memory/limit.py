"""The memory limit of a server's rows: ``--memory-limit 8G --spill-dir DIR``."""

from __future__ import annotations

import resource
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from paceline.errors import UsageError
from paceline.protocol import NUM_BUCKETS

SIZE_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_IN_MEMORY: Final = ("tmpfs", "ramfs")
_MAPPINGS_BY_TABLE: Final = 2 * NUM_BUCKETS  # each bucket has one mapping for its index and one for wide rows
_LEAST_MAPPINGS: Final = 16 * _MAPPINGS_BY_TABLE


def parse_size(text: str) -> int | None:
    """Return the number of bytes of a size such as ``4``, ``16K`` or ``8G`` (K = 1024). Return None if invalid."""
    number, unit = text.strip().upper(), ""
    if number and number[-1] in SIZE_UNITS:
        number, unit = number[:-1], number[-1]
    return int(number) * SIZE_UNITS[unit] if number.isascii() and number.isdigit() and int(number) > 0 else None


def most_mappings() -> int | None:
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _overcommits() -> bool:
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip() in ("0", "1")
    except OSError:
        return False


_OVERCOMMITS: Final = _overcommits()


def system_may_refuse() -> bool:
    """Return whether the system may reject a block, although it is smaller than the machine's memory.

    With its default settings, Linux rejects such a block only if the process has a resource limit. Another process may
    set this limit at any time.
    """
    return not _OVERCOMMITS or any(
        resource.getrlimit(kind)[0] != resource.RLIM_INFINITY for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    )


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """The memory limit for the rows of a server's sparse tables. Rows above the limit are stored in files.

    Raises UsageError for an invalid limit.
    """

    num_bytes: int
    """The limit per server in bytes. It includes the index of wide rows. Dense tables do not count."""
    spill_dir: str = field(default_factory=tempfile.gettempdir)
    """The folder for the files, on a disk with enough space. The files have no names and disappear with the process."""

    def __post_init__(self) -> None:
        if self.num_bytes <= 0:
            raise UsageError(f"memory limit {self.num_bytes}: expected a positive number of bytes")

    @classmethod
    def parse(cls, text: str | None, spill_dir: Path | None) -> MemoryLimit | None:
        """Return the limit for ``--memory-limit`` and ``--spill-dir``. Raises UsageError for invalid values."""
        if text is None:
            if spill_dir is not None:
                raise UsageError(f"--spill-dir {spill_dir} has no effect without a limit. Pass --memory-limit too")
            return None
        num_bytes = parse_size(text)
        if num_bytes is None:
            raise UsageError(f"--memory-limit {text}: expected a positive number of bytes such as 512M, 8G or 1T")
        limit = cls(num_bytes=num_bytes, spill_dir=str((spill_dir or Path(tempfile.gettempdir())).absolute()))
        limit.check_folder()
        return limit

    def check_folder(self) -> None:
        try:
            tempfile.TemporaryFile(dir=self.spill_dir).close()
        except OSError as error:
            raise UsageError(
                f"--spill-dir {self.spill_dir}: cannot store rows there: {error.strerror}. Pass a folder with write "
                "permission"
            ) from None

    @property
    def warning(self) -> str | None:
        """A warning if the folder is in memory or the system allows too few mappings; None otherwise."""
        most = most_mappings()
        if most is not None and most < _LEAST_MAPPINGS:
            return (
                f"the system allows a process {most:,} mappings (vm.max_map_count), but a table with rows in files "
                f"needs up to {_MAPPINGS_BY_TABLE:,}. Set it to {_LEAST_MAPPINGS:,} or more"
            )
        return self._in_memory_warning

    @property
    def _in_memory_warning(self) -> str | None:
        folder = Path(self.spill_dir).resolve()
        mounts = [disk for disk in psutil.disk_partitions(all=True) if folder.is_relative_to(disk.mountpoint)]
        mount = max(mounts, key=lambda disk: len(disk.mountpoint), default=None)
        if mount is None or mount.fstype not in _IN_MEMORY:
            return None
        return (
            f"{self.spill_dir} is a {mount.fstype}, which stores files in memory, so rows in it save no memory. Pass a "
            "folder on a disk with --spill-dir"
        )
