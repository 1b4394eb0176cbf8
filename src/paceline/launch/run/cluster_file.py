"""Read the description of a static cluster: ``{"server": ["host:port", …], "worker": ["host:port", …]}``.

It is TensorFlow's ``cluster`` of TF_CONFIG; each process gets its job and its index as options. Pure, except for
reading the file.
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
    "cluster": 'pass the object under "cluster", without "task"',
    "task": "pass the task as --job and --index",
}


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """The addresses of all processes, checked."""

    servers: tuple[Address, ...]
    """The servers' addresses; the scheduler listens at the first one."""
    workers: tuple[Address, ...]
    """The ranks meet at the first address; of the other ones, only the hosts matter."""

    def check_task(self, job: str | None, index: int | None) -> tuple[str, int]:
        """Return job and index if the cluster has this process. Raises UsageError."""
        if job is None or index is None:
            raise UsageError("--cluster: pass --job server|worker and --index N too, for this process")
        if job not in JOBS:
            raise UsageError(f"--job {job}: expected one of {', '.join(JOBS)}")
        count = len(self.servers if job == "server" else self.workers)
        if not 0 <= index < count:
            hint = f"expected a number from 0 to {count - 1}" if count else "add its addresses to the file"
            raise UsageError(f"--job {job} --index {index}: the cluster has {count} of that job, {hint}")
        return job, index


def read_cluster_file(path: Path) -> ClusterFile:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(f"--cluster {path}: cannot read it: {reason}") from None
    return parse_cluster(text, str(path))


def parse_cluster(text: str, name: str) -> ClusterFile:
    """Check a description; `name` is its name in errors. Raises UsageError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not valid JSON ({error}): {_WANTED}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{name} holds {type(found).__name__}: {_WANTED}")
    for key in found:
        if key not in JOBS:
            raise UsageError(f"{name} has a job {key!r}: {_ELSEWHERE.get(key, _WANTED)}")
    servers, workers = (_addresses(found.get(job, []), job, name) for job in JOBS)
    if not workers:
        raise UsageError(f'{name} has no worker: {_WANTED}; "server" may be missing')
    everywhere: dict[str, str] = {}
    for job, places in (("server", servers), ("worker", workers)):
        for index, place in enumerate(places):
            task = f"{job} {index}"
            other = everywhere.setdefault(place.netloc, task)
            if other != task:
                raise UsageError(
                    f"{name} has the address {place.netloc} twice, for {other} and {task}: use different addresses"
                )
    return ClusterFile(servers, workers)


def _addresses(found: Any, job: str, name: str) -> tuple[Address, ...]:
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise UsageError(f"{name} has {found!r} for {job!r}, expected a list of addresses: {_WANTED}")
    return tuple(_address(address, f"{job} {index}", name) for index, address in enumerate(found))


def _address(found: Any, task: str, name: str) -> Address:
    try:
        place = Address.parse(found) if isinstance(found, str) else None
    except AddressError:
        place = None
    if place is None or place.scheme != "tcp" or not place.port:
        raise UsageError(f"{name} has {found!r} for {task}: expected host:port with a port from 1 to 65535")
    return place
