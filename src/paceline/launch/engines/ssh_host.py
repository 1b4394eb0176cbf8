"""The part of ``paceline run --hosts`` on a host: check the request, and run its command while the connection lasts.

Standard input has one line per step: the request, the other hosts, the start, and perhaps the request to end. If
standard input ends, the connection has ended, so this module ends the command.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from paceline.decoded_types import register_type
from paceline.errors import AddressError
from paceline.launch.supervisor import Child, Supervisor, read_line, spawn
from paceline.meeting.rendezvous import own_host
from paceline.version import __version__

REPLY: Final = b"\x1epaceline "
"""The beginning of a reply on standard output. Other output, such as a host's greeting, may come before it."""
GRACE_S: Final = 3.0
"""Time limit for the end of the command after the connection has ended."""
CANNOT_START: Final = 127
"""The status of a command that cannot start, as in a shell."""
_CONNECT_S: Final = 5.0
_MOST_PEERS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRequest:
    """A command for a host. The host must have this :attr:`version` of Paceline."""

    version: str
    folder: str
    files: tuple[str, ...]
    """Paths of the files that the command needs, relative to the folder."""
    command: tuple[str, ...]
    variables: dict[str, str] = field(repr=False)
    """Environment variables, with the token."""
    first_host: str
    """Address of the first host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPeer:
    """The address and an open port of another host, to check that this host can connect to it."""

    name: str
    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReply:
    """The result of a step, or the end of the command."""

    problem: str | None = None
    status: int | None = None
    """Exit status of the command, at its end."""
    address: str = ""
    """The address at which other hosts can reach this host."""
    port: int = 0
    """A port on which this host listens until the start."""


def main() -> int:
    """Run the command of a request; return its status."""
    request = msgspec.json.decode(_read_line(), type=register_type(HostRequest))
    problem = find_problem(request)
    try:
        host = own_host(request.first_host)
    except AddressError:
        problem = problem or f"the address {request.first_host} of the first host is unknown here"
    if problem is not None:
        _reply(HostReply(problem=problem))
        return 1
    # The other hosts only check that they can connect, so this host never accepts their connections.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=_MOST_PEERS) as listener:
        _reply(HostReply(address=host, port=listener.getsockname()[1]))
        peers = msgspec.json.decode(_read_line(), type=register_type(list[HostPeer]))
        _reply(HostReply(problem=_find_unreachable(peers)))
        _read_line()
    os.chdir(request.folder)
    try:
        status = run_command(request, _wait_end)
    except OSError as error:
        print(f"cannot start {request.command[0]}: {error.strerror}", file=sys.stderr)
        status = CANNOT_START
    _reply(HostReply(status=status))
    return status


def _read_line() -> str:
    """Read one line from standard input. End this process at the end of input, because the connection has ended."""
    return read_line() or sys.exit(1)


def _reply(reply: HostReply) -> None:
    sys.stdout.buffer.write(REPLY + msgspec.json.encode(reply) + b"\n")
    sys.stdout.buffer.flush()


def find_problem(request: HostRequest) -> str | None:
    """Return the reason why this host cannot run a request; None if it can."""
    if request.version != __version__:
        return f"Paceline {__version__} is installed, expected {request.version}. Install this version"
    if not os.path.isdir(request.folder):
        return f"no folder {request.folder}. All hosts need the same files at the same paths"
    missing = next((file for file in request.files if not Path(request.folder, file).exists()), None)
    return missing and f"no file {Path(request.folder, missing)}. All hosts need the same files at the same paths"


def _find_unreachable(peers: Sequence[HostPeer]) -> str | None:
    def find(peer: HostPeer) -> str | None:
        try:
            socket.create_connection((peer.address, peer.port), _CONNECT_S).close()
        except OSError as error:
            reason = error.strerror or error
            return f"cannot connect to host {peer.name} at {peer.address}, port {peer.port}: {reason}"
        return None

    if not peers:
        return None
    with ThreadPoolExecutor(min(len(peers), 32)) as threads:
        return next(filter(None, threads.map(find, peers)), None)


def run_command(request: HostRequest, wait_end: Callable[[Supervisor, Child], float], **options: Any) -> int:
    """Run the command of a request, and return its status: 128 plus the number of the signal that killed it.

    `wait_end` waits until the command has ended or must end, and returns its time for the end. `options` are those of
    ``Popen``. Raises OSError if the command cannot start.
    """
    supervisor = Supervisor()
    variables = {**os.environ, **request.variables}
    launch = partial(spawn, request.command, env=variables, stdin=subprocess.DEVNULL, **options)
    grace_s = 0.0
    try:
        child = supervisor.start("command", launch, is_foreign=True)
        grace_s = wait_end(supervisor, child)
    finally:
        supervisor.close(grace_s, signal.SIGTERM)
    status = child.process.wait()
    return status if status >= 0 else 128 - status


def _wait_end(supervisor: Supervisor, child: Child) -> float:
    """Wait until the command or standard input ends. Each line of input is a request to end."""
    ended, end = os.pipe()

    def wait() -> None:
        child.process.wait()
        os.close(end)

    threading.Thread(target=wait, daemon=True).start()
    while ended not in select.select([0, ended], [], [])[0]:
        if not os.read(0, 4096):
            break
        supervisor.signal(child, signal.SIGTERM, group=True)
    return GRACE_S


if __name__ == "__main__":
    sys.exit(main())
