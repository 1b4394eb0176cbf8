"""A static cluster, described by a file: ``{"server": ["host:port", …], "worker": ["host:port", …]}``.

Pure, but for reading the file. As TensorFlow's users know it: the ``cluster`` of TF_CONFIG, with each process told its
job and its index.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import AddressError, UsageError
from paceline.transport import Address

JOBS = ("server", "worker")
_WANTED = 'expected {"server": ["host:port", ...], "worker": ["host:port", ...]}'
_ELSEWHERE = {
    "ps": 'TensorFlow\'s "ps" is "server" here',
    "chief": 'TensorFlow\'s "chief" is the first "worker" here',
    "master": 'TensorFlow\'s "master" is the first "worker" here',
    "cluster": 'give what is under "cluster", without "task"',
    "task": "the task is told by --job and --index",
}


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """The addresses of all processes, checked."""

    servers: tuple[Address, ...]
    """Where servers listen; at the first, the scheduler does."""
    workers: tuple[Address, ...]
    """The first is where the ranks meet; of the others, only the hosts matter."""

    def check_task(self, job: str | None, index: int | None) -> tuple[str, int]:
        """Return job and index if the cluster has such a process. Raises UsageError."""
        if job is None or index is None:
            raise UsageError("--cluster: say which of its processes this is, by --job server|worker and --index N")
        if job not in JOBS:
            raise UsageError(f"--job {job}: expected one of {', '.join(JOBS)}")
        count = len(self.servers if job == "server" else self.workers)
        if not 0 <= index < count:
            told = f"expected a number from 0 to {count - 1}" if count else "give its addresses in the file"
            raise UsageError(f"--job {job} --index {index}: the cluster has {count} of that job, {told}")
        return job, index


def read_cluster_file(path: Path) -> ClusterFile:
    """Read a cluster's description. Raises UsageError that names the file and what is wrong in it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"--cluster {path}: it cannot be read: {reason}") from None
    return parse_cluster(text, str(path))


def parse_cluster(text: str, name: str) -> ClusterFile:
    """Check a description; `name` is what errors call it."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is no JSON ({error}): {_WANTED}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{name} holds {type(found).__name__}: {_WANTED}")
    for key in found:
        if key not in JOBS:
            raise UsageError(f"{name} has a job {key!r}: {_ELSEWHERE.get(key, _WANTED)}")
    servers, workers = (_addresses(found.get(job, []), job, name) for job in JOBS)
    if not workers:
        raise UsageError(f'{name} has no worker: {_WANTED}, where "server" may be missing')
    everywhere: dict[str, str] = {}
    for job, places in (("server", servers), ("worker", workers)):
        for index, place in enumerate(places):
            here = f"{job} {index}"
            other = everywhere.setdefault(place.netloc, here)
            if other != here:
                raise UsageError(
                    f"{name} has the address {place.netloc} twice, for {other} and {here}: give each its own"
                )
    return ClusterFile(servers, workers)


def _addresses(found: Any, job: str, name: str) -> tuple[Address, ...]:
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise UsageError(f"{name} has {found!r} for {job!r}, a list of addresses was expected: {_WANTED}")
    return tuple(_address(each, f"{job} {index}", name) for index, each in enumerate(found))


def _address(found: Any, who: str, name: str) -> Address:
    try:
        place = Address.parse(found) if isinstance(found, str) else None
    except AddressError:
        place = None
    if place is None or place.scheme != "tcp" or not place.port:
        raise UsageError(f"{name} has {found!r} for {who}: expected host:port with a port from 1 to 65535")
    return place
