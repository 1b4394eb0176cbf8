"""Every option of every command is in the documentation, and the documentation's commands have no other options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from paceline.cli.app import app

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs/reference/command_line.md"})]
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
SCRIPT = re.compile(r"\S+\.py\b|\s-- ")
"""What follows a script, or stands behind `--`, is not the command's."""


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the commands that are no groups, by what is written behind `paceline`."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for part, each in command.commands.items():
        yield from commands(each, f"{name} {part}".strip())


def options(command: Any) -> set[str]:
    """Return the long options of a command."""
    return {"--help", *(name for each in command.params for name in each.opts if name.startswith("--"))}


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_documented(name: str) -> None:
    documented = set(OPTION.findall("\n".join(page.read_text(encoding="utf-8") for page in PAGES)))
    assert sorted(options(COMMANDS[name]) - documented - {"--help"}) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_commands_have_these_options(page: Path) -> None:
    names = "|".join(sorted(COMMANDS, key=len, reverse=True))
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.finditer(rf"paceline ({names})\b([^`\n#|;]*)", text):
        mine = SCRIPT.split(line[2])[0]
        unknown = set(OPTION.findall(mine)) - options(COMMANDS[line[1]])
        assert not unknown, f"{line[0]}: paceline {line[1]} has no {', '.join(sorted(unknown))}"
