"""A cluster rejects processes of another version of Paceline. The message names both versions."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.version import __version__

from .running import Commands
from .test_roles import end, start_scheduler

_OTHER = 'import paceline.version\npaceline.version.__version__ = "9.8.7"\n'


@pytest.mark.parametrize(
    "commands",
    [
        pytest.param([["server"]], id="server"),
        pytest.param([["server"], ["worker"], ["train", "data.tsv"]], id="all", marks=pytest.mark.thorough),
    ],
)
def test_members_of_another_version(
    paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path, commands: list[list[str]]
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text(_OTHER)
    (tmp_path / "data.tsv").symlink_to(click_log[0])
    path = os.pathsep.join(filter(None, [str(tmp_path / "other"), os.environ.get("PYTHONPATH")]))
    environment = {**paceline.environment, "PYTHONPATH": path}
    other = replace(paceline, environment=environment, afresh=True)
    scheduler, address = start_scheduler(paceline)
    joining = [other.start(*command, "--scheduler", address, "--token-file", "token") for command in commands]
    for member in joining:
        refused = member.wait()
        assert (refused.status, refused.out, len(refused.err.splitlines())) == (1, "", 1), refused
        assert "paceline 9.8.7" in refused.err
        assert f"paceline {__version__}" in refused.err
        assert "nstall the same version" in refused.err
    server = paceline.start("server", "--scheduler", address, "--token-file", "token")
    server.wait_line("listening on")
    end(scheduler, server)
