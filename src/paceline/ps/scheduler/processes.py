"""Detection of ended member processes.

A broken connection does not mean that the process has ended. For a process on the scheduler's own host, the kernel
reports the end. The end of a process on another host is probable if the host refuses connections to the process's
address.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
from collections.abc import Callable, Collection
from pathlib import Path

import psutil

from paceline.protocol.membership import Member, ProcessIdentity
from paceline.ps.fail_stop import Fail, watch_task
from paceline.transport import Endpoint, host_identity
from paceline.transport.addresses import namespace
from paceline.transport.backoff import Backoff

_POLL_S = 0.05
_PROBE_S = 2.0
_LAST_WORDS_S = 1.0
"""The longest time to wait for the end of a connection after its process has ended."""


@functools.cache
def own_host() -> str:
    """Return a text that is equal in two processes only if their process ids belong to one kernel and namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = host_identity()
    return f"{boot}/{namespace('pid')}"


def own_process() -> ProcessIdentity:
    pid = os.getpid()
    return ProcessIdentity(own_host(), pid, begin_of(pid) or 0)


def begin_of(pid: int) -> int | None:
    """Return the start time of a process; None if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else int(fields[19])
    except (OSError, IndexError, ValueError):
        pass
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time() * 1000)
    except psutil.Error:
        return None


class ProcessWatch:
    """Watches the processes of members, in the event loop's thread.

    Calls `on_ended` with the incarnation of a member whose process has certainly ended, and `on_doubted` if the process
    has probably ended. An end is reported after the connection broke (:meth:`disconnected`), so that the last messages
    are handled first. `fail` receives the exceptions of background tasks.
    """

    def __init__(self, on_ended: Callable[[int], None], on_doubted: Callable[[int], None], fail: Fail) -> None:
        self._fail = fail
        self._on_ended = on_ended
        self._on_doubted = on_doubted
        self._watched: dict[int, tuple[ProcessIdentity | None, Endpoint | None]] = {}
        self._descriptors: dict[int, int] = {}  # incarnation → process descriptor
        self._connected: set[int] = set()
        self._polls: dict[int, asyncio.TimerHandle] = {}
        self._probes: dict[int, asyncio.Task[None]] = {}

    def watch(self, member: Member, *, connected: bool) -> None:
        incarnation, process, endpoint = member.incarnation, member.process, member.address
        is_watched = self._watched.get(incarnation) == (process, endpoint)
        if not is_watched:  # another cluster may use the same incarnation for another process
            self.forget(incarnation)
        if connected:
            self._connected.add(incarnation)
        if is_watched:
            return
        self._watched[incarnation] = (process, endpoint)
        if process is not None and process.host == own_host() and hasattr(os, "pidfd_open"):
            self._open(incarnation, process)
        if not connected:
            self.disconnected(incarnation)

    def forget(self, incarnation: int) -> None:
        self._watched.pop(incarnation, None)
        self._connected.discard(incarnation)
        descriptor = self._descriptors.pop(incarnation, None)
        if descriptor is not None:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
        for waiting in (self._polls.pop(incarnation, None), self._probes.pop(incarnation, None)):
            if waiting is not None:
                waiting.cancel()

    def keep(self, incarnations: Collection[int]) -> None:
        """Stop watching all processes except these."""
        for incarnation in self._watched.keys() - set(incarnations):
            self.forget(incarnation)

    def disconnected(self, incarnation: int) -> None:
        """Check whether the process of a disconnected member lives."""
        self._connected.discard(incarnation)
        process, endpoint = self._watched.get(incarnation, (None, None))
        if process is not None and process.host == own_host():
            self._poll(incarnation)
        elif endpoint is not None and incarnation not in self._probes:
            probing = asyncio.get_running_loop().create_task(self._probe(incarnation, endpoint))
            self._probes[incarnation] = probing
            watch_task(probing, self._fail)

    def close(self) -> None:
        for incarnation in list(self._watched):
            self.forget(incarnation)

    def _open(self, incarnation: int, process: ProcessIdentity) -> None:
        try:
            descriptor = os.pidfd_open(process.pid)
        except OSError:  # the process has ended or is not accessible, so it is checked when its connection breaks
            return
        self._descriptors[incarnation] = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._ended, incarnation)

    def _ended(self, incarnation: int) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._descriptors[incarnation])
        if incarnation in self._connected:  # report the end later, after the last messages of the process were read
            self._polls[incarnation] = loop.call_later(_LAST_WORDS_S, self._poll, incarnation)
        else:
            self._poll(incarnation)

    def _poll(self, incarnation: int) -> None:
        self._cancel_poll(incarnation)
        process, _ = self._watched.get(incarnation, (None, None))
        if process is None:
            return
        if begin_of(process.pid) != process.started:
            self.forget(incarnation)
            self._on_ended(incarnation)
        elif incarnation not in self._connected:
            # The connections of a killed process break a moment before the process has ended.
            delay_s = _POLL_S if incarnation not in self._descriptors else 1.0
            self._polls[incarnation] = asyncio.get_running_loop().call_later(delay_s, self._poll, incarnation)

    def _cancel_poll(self, incarnation: int) -> None:
        poll = self._polls.pop(incarnation, None)
        if poll is not None:
            poll.cancel()

    async def _probe(self, incarnation: int, endpoint: Endpoint) -> None:
        """Connect to a member's address until the result is clear or the member has reconnected."""
        address, backoff = endpoint.tcp, Backoff(_POLL_S, _PROBE_S)
        while address.scheme == "tcp" and incarnation in self._watched and incarnation not in self._connected:
            try:
                opening = asyncio.open_connection(address.host, address.port)
                _, writer = await asyncio.wait_for(opening, _PROBE_S)
                writer.close()
            except ConnectionRefusedError:
                # in a thread, because it may look up a name
                is_ours = await asyncio.to_thread(_is_own_address, address.host)
                if incarnation in self._connected:
                    break
                self._probes.pop(incarnation, None)
                (self._on_ended if is_ours else self._on_doubted)(incarnation)
                return
            except (OSError, asyncio.TimeoutError):
                pass
            await asyncio.sleep(backoff.next_s())
        self._probes.pop(incarnation, None)


def _is_own_address(host: str) -> bool:
    """Return whether this host has an address, so that its own kernel has refused the connection."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True
