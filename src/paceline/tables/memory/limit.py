"""How much memory a server's rows may take: what ``--memory-limit 8G --spill-dir DIR`` says."""

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
_MAPPINGS_BY_TABLE: Final = 2 * NUM_BUCKETS  # of each bucket the index, and the rows if they are wide
_LEAST_MAPPINGS: Final = 16 * _MAPPINGS_BY_TABLE


def parse_size(text: str) -> int | None:
    """Return the bytes of a size such as ``4``, ``16K`` or ``8G``, in units of 1024; None if it is none."""
    number, unit = text.strip().upper(), ""
    if number and number[-1] in SIZE_UNITS:
        number, unit = number[:-1], number[-1]
    return int(number) * SIZE_UNITS[unit] if number.isascii() and number.isdigit() and int(number) > 0 else None


def most_mappings() -> int | None:
    """Return how many mappings the system lets a process have; None if it does not say."""
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
    """Return whether the system may refuse memory to this process, in blocks that are smaller than the machine's.

    By default Linux does so only if the process has a resource limit, which may be set from outside at any time.
    """
    return not _OVERCOMMITS or any(
        resource.getrlimit(each)[0] != resource.RLIM_INFINITY for each in (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    )


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """How much memory the rows of a server's sparse tables take before more of them lie in files.

    Raises UsageError where there can be no such limit.
    """

    num_bytes: int
    """Of each server; what its index of wide rows takes counts too. Dense tables stay in memory, and do not count."""
    spill_dir: str = field(default_factory=tempfile.gettempdir)
    """Folder of the files, on a disk with room for the rest. They have no names, and go with the process."""

    def __post_init__(self) -> None:
        if self.num_bytes <= 0:
            raise UsageError(f"a memory limit of {self.num_bytes} bytes: expected a positive number")

    @classmethod
    def parse(cls, text: str | None, spill_dir: Path | None) -> MemoryLimit | None:
        """Return what ``--memory-limit`` and ``--spill-dir`` ask for; raise UsageError for what cannot be."""
        if text is None:
            if spill_dir is not None:
                raise UsageError(f"--spill-dir {spill_dir} is for rows beyond a limit: give --memory-limit too")
            return None
        num_bytes = parse_size(text)
        if num_bytes is None:
            raise UsageError(f"--memory-limit {text}: expected a positive number of bytes such as 512M, 8G or 1T")
        limit = cls(num_bytes=num_bytes, spill_dir=str((spill_dir or Path(tempfile.gettempdir())).absolute()))
        limit.check_folder()
        return limit

    def check_folder(self) -> None:
        """Raise UsageError unless files can be made in the folder."""
        try:
            tempfile.TemporaryFile(dir=self.spill_dir).close()
        except OSError as error:
            raise UsageError(
                f"rows beyond the memory limit cannot be kept in {self.spill_dir}: {error.strerror}; name a folder "
                "that can be written to with --spill-dir"
            ) from None

    @property
    def warning(self) -> str | None:
        """Say if the folder lies in memory itself, or the system lets few files be mapped; None if all is well."""
        most = most_mappings()
        if most is not None and most < _LEAST_MAPPINGS:
            return (
                f"the system lets a process map {most:,} files (vm.max_map_count), and a table whose rows lie in files "
                f"takes up to {_MAPPINGS_BY_TABLE:,}: set it to {_LEAST_MAPPINGS:,} or more"
            )
        return self._in_memory_warning

    @property
    def _in_memory_warning(self) -> str | None:
        folder = Path(self.spill_dir).resolve()
        mounts = [each for each in psutil.disk_partitions(all=True) if folder.is_relative_to(each.mountpoint)]
        mount = max(mounts, key=lambda each: len(each.mountpoint), default=None)
        if mount is None or mount.fstype not in _IN_MEMORY:
            return None
        return (
            f"{self.spill_dir} is a {mount.fstype}, whose files lie in memory: rows beyond the memory limit save none "
            "there; name a folder on a disk with --spill-dir"
        )
