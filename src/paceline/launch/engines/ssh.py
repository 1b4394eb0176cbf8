"""ssh: run the roles on hosts where the user can log in without a password, over the system's ``ssh``.

Each process has its own connection to a host, where :mod:`.ssh_host` runs it. Before the first process starts, this
program checks all hosts, and the hosts check that they can connect to each other. A process ends when its connection
ends, so all processes end if this program is killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from typing_extensions import override

from paceline.decoded_types import register_type
from paceline.errors import UsageError, printable
from paceline.launch.screen import LineSplitter, Screen
from paceline.version import __version__

from .engine import RunRole, report
from .node_processes import END_S, POLL_S, NodeEngine, NodeProcess, variables_of
from .options import EngineFlags
from .ssh_host import GRACE_S, REPLY, HostPeer, HostReply, HostRequest

_OPTIONS: Final = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=10")
_REPLY_S: Final = 120.0
"""Time limit for the login on a host, the import of Paceline, and the check of the request."""
_ATTEMPT_S: Final = 30.0
"""Time limit for each step of an attempt to start a lost host again. The other hosts' output waits for the attempt."""
_CLOSE_S: Final = GRACE_S + 10.0
_LOST_STATUS: Final = 255  # status of ssh if it cannot connect or loses the connection
_SHOWN_CHARS: Final = 300
_HOST = re.compile(r"(?P<name>(?!-)(?:[\w.-]+@)?(?:[\w.-]+|\[[\w:.%]+\]))(?::(?P<count>\d{1,6}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of ``--hosts``."""

    names: tuple[str, ...]
    num_ranks: tuple[int, ...] | None
    """Number of ranks on each host; None if no host has a number."""


def parse_hosts(text: str) -> Hosts:
    """Return the hosts of a list such as ``a:4,b:4``, or of ``@FILE`` with such a list. Raises UsageError.

    A file may also have lines such as ``a slots=4``.
    """
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
            raise UsageError(f"--hosts {text}: cannot read this file: {reason}") from None
        text = re.sub(r"[ \t]+slots *= *", ":", text)
    found = [(entry, _HOST.fullmatch(entry)) for entry in re.split(r"[\s,]+", text.strip())]
    wrong = next((entry for entry, host in found if host is None or host["count"] == "0"), None)
    if wrong is not None:
        raise UsageError(
            f"--hosts: {wrong!r} is not a host, expected a list such as a:4,b:4 or ada@10.0.0.1,ada@10.0.0.2"
        )
    hosts = [host for _, host in found if host is not None]
    names = tuple(re.sub(r"[\[\]]", "", host["name"]) for host in hosts)
    counts = [int(host["count"]) for host in hosts if host["count"]]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--hosts: the host {twice} occurs twice. Add its numbers of ranks")
    if counts and len(counts) < len(names):
        raise UsageError(
            f"--hosts: {len(counts)} of {len(names)} hosts have a number of ranks. Add it to all, or to none"
        )
    return Hosts(names, tuple(counts) or None)


class _HostProcess(NodeProcess):
    """A process on a host, and the local end of its connection."""

    def __init__(self, role: RunRole, number: int, host: str, command: Sequence[str]) -> None:
        """`command` starts ``ssh``."""
        super().__init__(role, number, f"host {host}")
        self.host = host
        self.reply: HostReply | None = None
        self._reported: int | None = None
        """The command's exit status in the host's last reply."""
        self.errors: list[bytes] = []
        """Lines on standard error before the start."""
        self.num_open = 2
        """Number of streams (output and error) that have not ended."""
        pipe = subprocess.PIPE
        try:
            self.ssh = subprocess.Popen(
                command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError:
            raise UsageError("--hosts: no command ssh on this machine. Install OpenSSH's client") from None

    @override
    def status(self) -> int | None:
        """Return the command's exit status, or ``ssh``'s if the host reported none; None while output may arrive."""
        if self.num_open or (status := self.ssh.poll()) is None:
            return None
        return status if self._reported is None else self._reported

    @property
    @override
    def loss(self) -> str | None:
        status = self.status()
        is_lost = self._reported is None and status is not None and (status == _LOST_STATUS or status < 0)
        return "the connection was lost" if is_lost else None

    def receive(self, lines: Sequence[bytes]) -> list[bytes]:
        """Split lines into output and replies; store the reply and return the output."""
        output: list[bytes] = []
        for line in lines:
            text, mark, reply = line.partition(REPLY)
            if mark:
                self.reply = msgspec.json.decode(reply, type=register_type(HostReply))
                self._reported = self.reply.status
                text += b"\n" if text else b""
            output += [text] if text else []
        return output

    def close(self) -> None:
        """Kill the connection's process and close its pipes. The host then ends the command."""
        self.ssh.kill()
        self.ssh.__exit__(None, None, None)

    def send(self, line: bytes) -> None:
        assert self.ssh.stdin is not None
        try:
            self.ssh.stdin.write(line + b"\n")
        except BrokenPipeError:
            pass  # the connection has ended


class Ssh(NodeEngine[_HostProcess]):
    """Runs processes on several hosts. All ranks connect to the first host at their start."""

    retry_s = 30.0

    def __init__(self, flags: EngineFlags) -> None:
        """Raises UsageError for an invalid list of hosts."""
        super().__init__()
        assert flags.hosts is not None
        self._hosts = parse_hosts(flags.hosts)
        self._options = flags.ssh_option or []
        self._screen = Screen(self._hosts.names.__getitem__)
        self._selector = selectors.DefaultSelector()
        self._address = ""

    @override
    def describe(self, roles: Sequence[RunRole]) -> str:
        lines = [f"# in {os.getcwd()} on each host"]
        for role in roles:
            for host in self._hosts.names[: role.num_nodes]:
                ssh = shlex.join(_ssh_command(host, self._options))
                lines += [f"{ssh}  # {role.name}", f"  {shlex.join(role.command)}"]
        return "\n".join([*lines, ""])

    @override
    def start(self, roles: Sequence[RunRole]) -> None:
        self._processes = [
            self._connect(role, index, host)
            for role in roles
            for index, host in enumerate(self._hosts.names[: role.num_nodes])
        ]
        self._address, self._variables = _find_address(self._hosts.names[0]), variables_of(os.environ)
        replies = self._exchange(self._processes, [self._host_request(process) for process in self._processes])
        peers = {
            process.number: HostPeer(name=process.host, address=reply.address, port=reply.port)
            for process, reply in zip(self._processes, replies, strict=True)
        }
        others = [[peers[index] for index in peers if index != process.number] for process in self._processes]
        self._exchange(self._processes, others)
        for process in self._processes:
            self._begin(process)

    def _connect(self, role: RunRole, index: int, host: str) -> _HostProcess:
        process = _HostProcess(role, index, host, _ssh_command(host, self._options))
        for stream, is_error in ((process.ssh.stdout, False), (process.ssh.stderr, True)):
            assert stream is not None
            self._selector.register(stream, selectors.EVENT_READ, (process, LineSplitter(), is_error))
        return process

    def _begin(self, process: _HostProcess) -> None:
        process.has_started = True
        self._screen.write(process.number, process.errors, is_error=True)
        process.send(b"start")

    def _exchange(
        self,
        processes: Sequence[_HostProcess],
        contents: Sequence[HostRequest | list[HostPeer]],
        limit_s: float = _REPLY_S,
    ) -> list[HostReply]:
        """Send each process a line; return the replies. Raises UsageError, which names the host, for a problem."""
        for process, content in zip(processes, contents, strict=True):
            process.reply = None
            process.send(msgspec.json.encode(content))
        deadline = time.monotonic() + limit_s
        replies: list[HostReply] = []
        while len(replies) < len(processes):
            self._read(POLL_S)
            for process in processes:
                problem = None if process.reply is None else process.reply.problem
                if process.reply is None and (status := process.status()) is not None:
                    problem = _explain(status, process.errors)
                elif process.reply is None and time.monotonic() >= deadline:
                    problem = f"no reply within {limit_s:g} s"
                if problem is not None:
                    raise UsageError(f"--hosts: host {process.host}: {problem}")
            replies = [process.reply for process in processes if process.reply is not None]
        return replies

    def _host_request(self, process: _HostProcess) -> HostRequest:
        names = self._hosts.names[1 : process.role.num_nodes]
        return self._request_of(process, [self._address, *names], self._hosts.num_ranks)

    @override
    def _receive(self) -> None:
        self._read(POLL_S)

    @override
    def _discard(self, process: _HostProcess) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data[0] is process:
                self._selector.unregister(key.fileobj)
        process.close()

    @override
    def _start_again(self, lost: _HostProcess) -> None:
        process = self._connect(lost.role, lost.number, lost.host)
        self._processes.append(process)
        try:
            self._exchange([process], [self._host_request(process)], _ATTEMPT_S)
            self._exchange([process], [[]], _ATTEMPT_S)
        except UsageError as error:
            report(f"{error}. The next attempt is in {self.retry_s:g} s")
            self._try_later(process)
            self._processes.remove(process)
            self._discard(process)
        else:
            self._begin(process)

    @override
    def close(self) -> None:
        try:
            if not self._has_failed and any(process.has_started for process in self._processes):
                for process in self._processes:
                    process.send(b"end")
                self._wait(END_S)
        finally:
            for process in self._processes:
                assert process.ssh.stdin is not None
                process.ssh.stdin.close()
            with contextlib.suppress(BrokenPipeError):
                self._wait(_CLOSE_S)
            for process in self._processes:
                process.close()
            self._processes = []
            self._selector.close()

    def _wait(self, seconds: float) -> None:
        """Print output until all processes have ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(process.status() is None for process in self._processes):
            self._read(POLL_S)

    def _read(self, timeout_s: float) -> None:
        """Wait for output and print it, except replies and errors before the start, which are stored."""
        for key, _ in self._selector.select(timeout_s):
            process, splitter, is_error = key.data
            data = os.read(key.fd, 1 << 16)
            if not data:
                self._selector.unregister(key.fileobj)
                process.num_open -= 1
            lines = splitter.feed(data) if data else splitter.flush()
            if is_error and not process.has_started:
                process.errors += lines
            else:
                self._screen.write(process.number, lines if is_error else process.receive(lines), is_error=is_error)


def _ssh_command(host: str, options: Sequence[str]) -> tuple[str, ...]:
    words = [f"-o{option}" for option in (*options, *_OPTIONS)]  # ssh uses the first value of an option
    return ("ssh", "-T", *words, "--", host, f"exec {shlex.join([sys.executable, '-m', HostRequest.__module__])}")


def _find_address(name: str) -> str:
    """Return the address of a host in the user's configuration of ssh; its name by default."""
    try:
        done = subprocess.run(["ssh", "-G", "--", name], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        done = None
    found = done and re.search(r"^hostname (\S+)$", done.stdout, re.MULTILINE)
    return found[1] if found else name.rpartition("@")[2]


def _explain(status: int, errors: Sequence[bytes]) -> str:
    """Return the reason why the connection to a host ended before the process started there."""
    lines = [printable(line.decode(errors="replace").strip(), _SHOWN_CHARS) for line in errors if line.strip()]
    last = lines[-1] if lines else f"ended with status {status}"
    if status == _LOST_STATUS:
        return f"ssh cannot log in: {last}. Log in once with ssh, without a password"
    if status in (126, 127):
        return f"no program {sys.executable}. Install Python and Paceline at the same path as here"
    if "No module named" in last:
        return f"{sys.executable} has no Paceline {__version__}. Install it there"
    return last
