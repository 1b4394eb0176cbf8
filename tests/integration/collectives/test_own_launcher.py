"""Ranks that are their own launchers: they report their starts and ends, and the coordinator notices their deaths."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from tests.waiting import wait_until
from typing_extensions import override

from paceline.environment import Environment
from paceline.errors import AuthenticationError, DeadlineError, PeerError, UsageError
from paceline.meeting.coordinator import OPTIONS, TIMEOUT_MS, CoordinatorServer
from paceline.meeting.own_launcher import announce_rank
from paceline.protocol.launchers import Launchers, OwnLaunchers
from paceline.protocol.quorum import Coordinator, QuorumInstruction
from paceline.transport import Address, make_token

_RANK = """
import os, signal, sys, time
from paceline.environment import environment
from paceline.meeting.own_launcher import announce_rank

with announce_rank(environment(), None, 20.0) as launcher:
    print(launcher.member, launcher.is_newcomer, launcher.options, flush=True)
    {in_block}
{after}
"""
WAIT_S = 20.0


class Rules(Coordinator):
    """A coordinator that records the ends of processes."""

    def __init__(self, min_ranks: int = 1, start_timeout_s: float = 300.0) -> None:
        super().__init__(
            min_ranks=min_ranks, max_ranks=9, report_timeout_s=9.0, num_places=2, start_timeout_s=start_timeout_s
        )
        self.ends: list[bool] = []

    @override
    def ended(self, *members: int, is_failure: bool) -> list[QuorumInstruction]:
        self.ends += [is_failure] * len(members)
        return super().ended(*members, is_failure=is_failure)


class Served:
    """A served coordinator, and the processes that join it."""

    def __init__(self) -> None:
        self.token = make_token()
        self.processes: list[subprocess.Popen[str]] = []
        self.servers: list[CoordinatorServer] = []

    def serve(self, rules: Coordinator, *, timeout_s: float = 1000.0) -> CoordinatorServer:
        extra: dict[str, int | str] = {OPTIONS: "the options", TIMEOUT_MS: round(1000 * timeout_s)}
        return self._start(rules, OwnLaunchers(timeout_s=timeout_s), extra)

    def serve_run(self) -> CoordinatorServer:
        """Serve the coordinator of ``paceline run`` with one rank."""
        rules = Coordinator(range(1), min_ranks=1, max_ranks=1, report_timeout_s=9.0)
        return self._start(rules, Launchers(1, timeout_s=9.0, start_by_s=time.monotonic() + 9.0), {})

    def _start(self, rules: Coordinator, launchers: Launchers, extra: dict[str, int | str]) -> CoordinatorServer:
        address = Address("tcp", "127.0.0.1", 0)
        server = CoordinatorServer(rules, launchers, address, self.token, None, lambda member: None, extra=extra)
        self.launchers = launchers
        self.servers.append(server)
        return server

    def variables(self, server: CoordinatorServer, token: str | None = None) -> Environment:
        return Environment(coordinator=server.address.netloc, token=token or self.token)

    def start(self, server: CoordinatorServer, in_block: str = "pass", after: str = "") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _RANK.format(in_block=in_block, after=after)],
            env={**os.environ, "PACELINE_COORDINATOR": server.address.netloc, "PACELINE_TOKEN": self.token},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.processes.append(process)
        return process


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served()
    yield found
    for process in found.processes:
        process.kill()
        process.communicate(timeout=WAIT_S)
    for server in found.servers:
        server.close()


@pytest.mark.parametrize(
    ("in_block", "after", "is_failure"),
    [
        ("pass", "sys.exit(1)", False),  # the rank has left before
        ("sys.exit()", "", False),
        ("sys.exit(1)", "", True),
        ("1 / 0", "", True),
        ("os.kill(os.getpid(), signal.SIGKILL)", "", True),
    ],
)
def test_the_end_of_a_process_is_reported(served: Served, in_block: str, after: str, *, is_failure: bool) -> None:
    rules = Rules()
    process = served.start(served.serve(rules), in_block, after)
    assert process.communicate(timeout=WAIT_S)[0].startswith("0 False the options")
    wait_until(lambda: rules.ends)
    assert rules.ends == [is_failure]


def test_an_exception_after_the_start_is_a_failure(served: Served) -> None:
    """The script does not use the strategy as a context manager."""
    rules = Rules()
    text = "launcher = announce_rank(environment(), None, 20.0); 1 / 0"
    served.start(served.serve(rules), after=text).communicate(timeout=WAIT_S)
    wait_until(lambda: len(rules.ends) == 2)
    assert rules.ends == [False, True]


def test_an_earlier_exception_of_the_process_is_not_a_failure(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook stores the exception of an earlier cell."""
    monkeypatch.setattr(sys, "last_value", ZeroDivisionError(), raising=False)
    rules = Rules()
    with announce_rank(served.variables(served.serve(rules)), None, WAIT_S):
        pass
    assert rules.ends == [False]


def test_the_death_of_a_process_with_children_is_noticed_at_once(served: Served) -> None:
    """Forked children, such as the workers of a loader, have copies of the process's connections."""
    rules = Rules()
    server = served.serve(rules)
    served.start(server, "os.fork() or sys.stdin.read(); time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)")
    wait_until(lambda: rules.ends)
    assert rules.ends == [True]
    assert [note.rpartition(" ")[2] for note in server.take_notes()] == ["arrived", "lost"]


def test_a_process_ends_if_the_training_fails(served: Served) -> None:
    process = served.start(served.serve(Rules(min_ranks=2, start_timeout_s=0.2)), "time.sleep(1000)")
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "--min-ranks is 2" in err


def test_a_process_ends_if_it_was_declared_lost(served: Served) -> None:
    process = served.start(served.serve(Rules()), "time.sleep(1000)")
    wait_until(lambda: served.launchers.expel(0))
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "the other ranks continue" in err


def test_a_process_after_the_first_quorum_is_a_newcomer(served: Served) -> None:
    variables = served.variables(served.serve(Rules()))
    with contextlib.ExitStack() as stack:
        launchers = [stack.enter_context(announce_rank(variables, None, WAIT_S)) for _ in range(3)]
        found = [(launcher.member, launcher.is_newcomer) for launcher in launchers]
    assert found == [(0, False), (1, False), (2, True)]


def test_wrong_coordinators(served: Served) -> None:
    with pytest.raises(AuthenticationError, match="PACELINE_TOKEN"):
        announce_rank(served.variables(served.serve(Rules()), make_token()), None, WAIT_S)
    with pytest.raises(UsageError, match="paceline run"):
        announce_rank(served.variables(served.serve_run()), None, WAIT_S)
    failed = served.serve(Rules(min_ranks=2, start_timeout_s=0.0))
    served.start(failed, "time.sleep(1000)")
    wait_until(lambda: failed.failure)
    with pytest.raises(PeerError, match="--min-ranks is 2"):
        announce_rank(served.variables(failed), None, WAIT_S)
    variables = Environment(coordinator="127.0.0.1:1", token=served.token)
    with pytest.raises(DeadlineError, match="PACELINE_COORDINATOR"):
        announce_rank(variables, None, 0.1)
