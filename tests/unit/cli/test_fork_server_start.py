"""A training's fork server is started before its command line is parsed, and ends with the command."""

from __future__ import annotations

import sys

import pytest

from paceline import cli
from paceline.launch.fork_server import ForkServer


class _Recorded(ForkServer):
    """A fork server that starts no process and counts its closes."""

    def __init__(self) -> None:
        super().__init__(None)
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[_Recorded]:
    """Replace ``ForkServer.start`` by a fake; return the list of the created fakes."""
    started: list[_Recorded] = []

    def start() -> ForkServer:
        started.append(_Recorded())
        return started[-1]

    monkeypatch.setattr(ForkServer, "start", start)
    monkeypatch.setattr(cli, "raise_on_sigterm", lambda: None)
    return started


def test_the_fork_server_is_closed_with_the_command(started: list[_Recorded]) -> None:
    with cli.start_fork_server(["train", "x.svm", "--eval", "y.svm"]) as found:
        assert [found] == started
        assert started[0].num_closed == 0
    assert started[0].num_closed == 1


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--version"],
        ["train"],
        ["train", "--help"],
        ["train", "x.svm", "-h"],
        ["train", "x.svm", "--scheduler", "host:1"],
        ["train", "x.svm", "--scheduler=host:1"],
        ["predict", "train", "x.svm"],
    ],
)
def test_commands_without_forks_start_no_fork_server(started: list[_Recorded], words: list[str]) -> None:
    with cli.start_fork_server(words) as found:
        assert found is None
    assert started == []


def test_the_fork_server_is_closed_after_wrong_usage(
    started: list[_Recorded], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["paceline", "train", "x.svm", "--no-such-option"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, "unknown option" in capsys.readouterr().err) == (2, True)
    assert [process.num_closed for process in started] == [1]
