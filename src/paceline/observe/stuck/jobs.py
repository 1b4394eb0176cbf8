"""Jobs of this machine: the folder with the files of a job's processes, and the search for it."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct
from typing_extensions import override

from paceline.closing import Closing
from paceline.decoded_types import register_type
from paceline.errors import PacelineError, UsageError, printable
from paceline.observe.stuck.processes import ABOUT, WatchedProcess, find_start, read_processes, write_process
from paceline.output_files import replacing
from paceline.temporary import TemporaryFolder


class JobInfo(Struct, frozen=True):
    """The description of a job on this machine."""

    command: str
    launcher: WatchedProcess
    scheduler: str = ""
    """The address of the cluster's scheduler, as ``host:port``; empty if the job has none."""


class LaunchedJob(Closing):
    """The folder of a job's processes on this machine. Its launcher creates and removes it."""

    def __init__(self, folder: Path, info: JobInfo, temporary: TemporaryFolder | None = None) -> None:
        """Use an existing folder, and own `temporary`; :func:`start_job` creates it."""
        self.folder, self.info, self._temporary = folder, info, temporary
        self.variables = {"PACELINE_JOB_DIR": str(folder)}
        """The environment variables of the job's processes."""

    def set_scheduler(self, address: str) -> None:
        """Set the address by which ``paceline stacks`` finds the job."""
        self.info = msgspec.structs.replace(self.info, scheduler=address.removeprefix("tcp://"))
        with replacing(self.folder / ABOUT) as aside:
            aside.write_bytes(msgspec.json.encode(self.info))

    def add(self, name: str, pid: int) -> None:
        """Add a process, which may not be able to write its stack yet."""
        with contextlib.suppress(OSError):  # the process works without its files
            write_process(self.folder, WatchedProcess(name, pid, find_start(pid)), keeps_existing=True)

    @override
    def close(self) -> None:
        """End the job, and remove its own folder. Idempotent."""
        if self in _open_jobs:
            _open_jobs.remove(self)
        if self._temporary is not None:
            self._temporary.close()


_open_jobs: list[LaunchedJob] = []


def start_job(scheduler: str = "", *, cluster: Path | None = None) -> LaunchedJob | None:
    """Create the folder for the job that this process launches; return None if the disk is full or not writable.

    With `cluster`, it is a subfolder of this folder, whose owner removes both.
    """
    launcher = WatchedProcess("launcher", os.getpid(), find_start(os.getpid()))
    command = shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]]) if sys.argv[0] else "python"
    command = printable(command)  # names of files need not be UTF-8
    try:
        if cluster is None:
            temporary = TemporaryFolder.make("job")
            job = LaunchedJob(temporary.path, JobInfo(command, launcher), temporary)
        else:
            job = LaunchedJob(cluster / "job", JobInfo(command, launcher))
            job.folder.mkdir()
        job.set_scheduler(scheduler)
    except OSError:
        return None
    _open_jobs.append(job)
    return job


def current_job() -> LaunchedJob | None:
    """Return the job that this process has started and not closed."""
    return next((job for job in _open_jobs if job.info.launcher.pid == os.getpid()), None)


class FoundJob(Struct, frozen=True):
    """A running job, with a folder for each of its launchers on this machine."""

    info: JobInfo
    folders: tuple[Path, ...]


def find_jobs(target: str | None) -> list[FoundJob]:
    """Return the running jobs of this machine: all jobs of this user, the job of a process, or a cluster's processes.

    `target` is the id of a process or the address of a scheduler. Raises UsageError if it belongs to no job of this
    user, and PacelineError if no job runs.
    """
    if target is not None and target.isdecimal():
        return _jobs_of_process(int(target))
    jobs = _merge(_running(os.getuid(), {tempfile.gettempdir()}))
    if target is None:
        if not jobs:
            raise PacelineError(
                "no job runs on this machine. Start one with paceline run or paceline train, or pass the id of its "
                "process if it has another TMPDIR"
            )
        return jobs
    address = target.removeprefix("tcp://").replace("localhost:", "127.0.0.1:")
    jobs = [job for job in jobs if job.info.scheduler == address]
    if not jobs:
        raise UsageError(
            f"{target}: no process of a cluster with this scheduler runs on this machine. Pass the scheduler's address "
            "as HOST:PORT, or the id of a process"
        )
    return jobs


def _jobs_of_process(pid: int) -> list[FoundJob]:
    import psutil

    try:
        process = psutil.Process(pid)
        owner, name, user = process.uids().real, process.name(), process.username()
    except psutil.NoSuchProcess:
        raise UsageError(f"{pid}: there is no process with this id. Pass the id of a job's process") from None
    if owner != os.getuid():  # files in the folder of another user are not trusted, not even by root
        raise UsageError(f"process {pid} belongs to user {user}. Run the command as this user")
    places, related = {tempfile.gettempdir()}, {pid}
    with contextlib.suppress(psutil.Error):
        places.add(process.environ().get("TMPDIR") or tempfile.gettempdir())
        relatives = [*process.parents(), *process.children(recursive=True)]
        related |= {relative.pid for relative in relatives}
    jobs = [
        job
        for job in _merge(_running(owner, places))
        if related & {job.info.launcher.pid, *(found.pid for folder in job.folders for found in read_processes(folder))}
    ]
    if not jobs:
        raise UsageError(f"process {pid} ({name}) belongs to no job of Paceline. Pass the id of a job's process")
    return jobs


def _running(owner: int, places: set[str]) -> Iterator[tuple[JobInfo, Path]]:
    """Yield the jobs of a user whose launchers live."""
    for place in places:
        for folder in (*Path(place).glob("paceline-job-*"), *Path(place).glob("paceline-cluster-*/job")):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                if folder.lstat().st_uid == owner:
                    info = msgspec.json.decode((folder / ABOUT).read_bytes(), type=register_type(JobInfo))
                    if info.launcher.is_alive():
                        yield info, folder


def _merge(found: Iterator[tuple[JobInfo, Path]]) -> list[FoundJob]:
    """Combine the launchers of one cluster, which have the same scheduler."""
    jobs: dict[str, FoundJob] = {}
    for info, folder in sorted(found, key=lambda pair: pair[0].launcher.pid):
        key = info.scheduler or str(folder)
        known = jobs.get(key)
        jobs[key] = FoundJob(info, (folder,)) if known is None else FoundJob(known.info, (*known.folders, folder))
    return list(jobs.values())
