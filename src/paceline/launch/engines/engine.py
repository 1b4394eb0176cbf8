"""The interface of an engine, such as Slurm, which starts the roles (kinds of processes) of a run on several nodes."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from typing_extensions import override

from paceline.closing import Closing
from paceline.errors import UsageError

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
    num_more: int = 0
    """Number of further nodes, with one process each, that may join an elastic role when the engine has resources."""

    def __post_init__(self) -> None:
        check_utf8(self.command)


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The result of a run whose roles have all ended."""

    status: int
    """The exit status of the run, 0 to 255."""
    reason: str | None
    """The engine's reason if it ended the run itself, or if the run never started."""


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
