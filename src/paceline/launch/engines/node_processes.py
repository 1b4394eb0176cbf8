"""The common part of the engines ssh and Ray, which start the processes on each node themselves."""

from __future__ import annotations

import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, Generic, TypeVar

from typing_extensions import override

from paceline.environment import environment
from paceline.transport.security.authentication import check_or_make_token
from paceline.version import __version__

from .engine import RunEnd, RunEngine, RunRole, check_utf8, report
from .placement import Placement
from .ssh_host import HostRequest

END_S: Final = 35.0
"""Time limit for the end of the processes after a request. Ranks have 30 seconds for a checkpoint."""
POLL_S: Final = 0.5
LAST_S: Final = 10.0
"""Time limit for the end of the other nodes after the first node of an elastic run has ended."""
_PASSED_ON: Final = ("PACELINE_", "HOROVOD_", "PYTHON", "OMP_")


class NodeProcess(ABC):
    """A process of a role on a node."""

    def __init__(self, role: RunRole, number: int, node: str) -> None:
        """`number` is the number of the node, and `node` its name in messages."""
        self.role, self.number, self.node = role, number, node
        self.has_started = False
        self.problem: str | None = None
        """The reason why the command cannot start."""

    @abstractmethod
    def status(self) -> int | None:
        """Return the exit status; None until the process has ended and all its output was received."""

    @property
    @abstractmethod
    def loss(self) -> str | None:
        """The reason if the connection to the process was lost; None otherwise."""

    def describe_end(self) -> str:
        end = self.loss or self.problem or f"{self.role.name} ended with status {self.status()}"
        return f"{self.node}: {end}"


_Process = TypeVar("_Process", bound=NodeProcess)


class NodeEngine(RunEngine, Generic[_Process]):
    """Waits for the ends of processes. Starts processes of elastic roles again if their nodes were lost."""

    retry_s: ClassVar[float]
    """The pause before each attempt to start the process of a lost node again."""

    def __init__(self) -> None:
        self._processes: list[_Process] = []
        self._job = secrets.token_hex(8)
        self._variables: dict[str, str] = {}
        self._has_failed = False
        self._next_attempts: dict[_Process, float] = {}
        """The lost processes of elastic roles, and the times at which to start them again."""
        self._ends_s = 0.0
        """The time at which an elastic run ends, after the end of its first node."""

    @abstractmethod
    def _receive(self) -> None:
        """Wait for output and ends of processes, and print the output. Waits at most :data:`POLL_S`."""

    @abstractmethod
    def _discard(self, process: _Process) -> None:
        """Close the connection to a process, and end the process if it lives."""

    @abstractmethod
    def _start_again(self, lost: _Process) -> None:
        """Try to start the process of a lost node."""

    @override
    def poll(self) -> RunEnd | None:
        self._receive()
        for process in list(self._processes):
            if not (status := process.status()):
                continue
            if process.role.is_elastic and process.number:
                self._continue_without(process)
                continue
            self._has_failed = True
            return RunEnd(1 if process.loss else status, f"{process.describe_end()}; the other nodes were ended")
        started = [process for process in self._processes if process.has_started]
        last = [process for process in started if process.role is started[-1].role]
        if all(process.status() == 0 for process in last) or self._is_over(last[0]):
            return RunEnd(0, None)
        for process, due_s in list(self._next_attempts.items()):
            if time.monotonic() >= due_s and started[0].status() is None:
                del self._next_attempts[process]
                self._start_again(process)
        return None

    def _is_over(self, first: _Process) -> bool:
        """Return whether an elastic role has ended, because its `first` process ended successfully some time ago.

        Other processes may still exist: a node that joins at the end of the run would wait for the first node.
        """
        if not first.role.is_elastic or first.status() != 0:
            return False
        self._ends_s = self._ends_s or time.monotonic() + LAST_S
        return time.monotonic() >= self._ends_s

    def _continue_without(self, process: _Process) -> None:
        self._processes.remove(process)
        end = f"{process.describe_end()}; the other nodes continue"
        if process.loss:
            self._try_later(process)
            end += f". The next attempt to start its ranks is in {self.retry_s:g} s"
        self._discard(process)
        report(end)

    def _try_later(self, process: _Process) -> None:
        self._next_attempts[process] = time.monotonic() + self.retry_s

    def _request_of(
        self, process: _Process, addresses: Sequence[str], num_ranks: tuple[int, ...] | None = None
    ) -> HostRequest:
        """Return the request for a process, given the addresses of the role's nodes and each node's number of ranks."""
        role = process.role
        placement = Placement.on_nodes(
            addresses,
            process.number,
            self._job,
            num_launchers=role.num_nodes,
            num_ranks=num_ranks,
            can_grow=role.num_more > 0,
        )
        return HostRequest(
            version=__version__,
            folder=os.getcwd(),
            files=role.files,
            command=role.command,
            variables={**self._variables, **placement.variables()},
            first_host=addresses[0],
        )


def variables_of(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the nodes, with the token. They are not in command lines, which other users can read."""
    variables = {name: value for name, value in inherited.items() if name.startswith(_PASSED_ON)}
    check_utf8([os.getcwd(), *variables.values()])
    return {**variables, "PACELINE_TOKEN": check_or_make_token(environment().token, "PACELINE_TOKEN")}
