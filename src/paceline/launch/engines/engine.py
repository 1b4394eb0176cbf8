"""The interface of an engine, such as Slurm, which starts the roles (kinds of processes) of a run on several nodes."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from typing_extensions import Self, override

from paceline.closing import Closing
from paceline.environment import Environment
from paceline.errors import UsageError
from paceline.transport.decoding import register_type

LOST_NODE_STATUS: Final = 75
"""Exit status of an elastic launcher that cannot continue, except on node 0 (``EX_TEMPFAIL`` in C).

Node 0's exit status is the result of the training.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRole:
    """The processes of a run that have the same command. Raises UsageError for a command that is not UTF-8."""

    name: str
    command: tuple[str, ...]
    num_nodes: int
    """Number of nodes, with one process each. Every role starts at the first node, so roles share nodes."""
    num_cpus: int
    """Number of cores of each process."""
    files: tuple[str, ...] = ()
    """Files that every node needs, relative to the current folder."""
    is_elastic: bool = False
    """Whether the processes continue if any node except the first one is lost."""

    def __post_init__(self) -> None:
        check_utf8(self.command)


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The result of a run whose roles have all ended."""

    status: int
    """The exit status of the run, 0 to 255."""
    reason: str | None
    """The engine's reason if it ended the run itself, or if the run never started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The number and the node of this launcher among the launchers that an engine has started."""

    launcher: int
    """Number of this launcher, from 0."""
    num_launchers: int
    local_launcher: int = 0
    """Number of this launcher among those on its node."""
    num_local_launchers: int = 1
    num_cores: int | None = None
    """Number of cores for all launchers on this node; None if the engine does not report it."""
    address: str
    """Address of launcher 0's node."""
    job: str
    """Identifier of the engine's job, which all its launchers share."""
    step: str = ""
    """Identifier of these launchers within the job."""
    num_ranks: tuple[int, ...] | None = None
    """Number of ranks of each launcher; None if the options set one number for all launchers."""

    @classmethod
    def on_nodes(cls, addresses: Sequence[str], number: int, job: str, **fields: Any) -> Self:
        """Return the placement of launcher `number`. `addresses` are the addresses of all launchers' nodes."""
        return cls(
            launcher=number,
            num_launchers=len(addresses),
            local_launcher=addresses[:number].count(addresses[number]),
            num_local_launchers=addresses.count(addresses[number]),
            address=addresses[0],
            job=job,
            **fields,
        )

    @classmethod
    def of_environment(cls, variables: Environment) -> Self | None:
        """Return the placement that :meth:`variables` stores; None without one. Raises UsageError."""
        if variables.placement is None:
            return None
        try:
            return msgspec.json.decode(variables.placement, type=register_type(cls))
        except msgspec.MsgspecError as error:
            raise UsageError(f"the environment variable PACELINE_PLACEMENT is unreadable: {error}. Unset it") from None

    def variables(self) -> dict[str, str]:
        return {"PACELINE_PLACEMENT": msgspec.json.encode(self).decode()}


class RunEngine(ABC, Closing):
    """Runs the roles of one run. :meth:`close` cancels the roles that have not ended."""

    @abstractmethod
    def describe(self, roles: Sequence[RunRole]) -> str:
        """Return the text that :meth:`start` passes to the engine, for a person to read."""

    @abstractmethod
    def start(self, roles: Sequence[RunRole]) -> None:
        """Request the processes of all roles. The run ends when its last role ends or a process fails.

        The failure of a process of an elastic role does not end the run, except on the first node.

        Raises UsageError if the engine is not installed or rejects the request.
        """

    @abstractmethod
    def poll(self) -> RunEnd | None:
        """Print new output and changes of the state; return the result if the run has ended. Waits at most 0.5 s."""

    @abstractmethod
    @override
    def close(self) -> None:
        """Cancel the run unless it has ended, and wait until its resources are free. Idempotent."""


def check_utf8(texts: Iterable[str]) -> None:
    """Raise UsageError for a text that is not UTF-8, because scripts, messages and manifests must be UTF-8."""
    for text in texts:
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise UsageError(f"{text!r} is not UTF-8, so an engine cannot pass it on. Rename it")


def report(text: str) -> None:
    """Print a line about the run on standard error."""
    print(f"paceline run: {text}", file=sys.stderr, flush=True)
