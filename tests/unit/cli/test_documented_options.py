"""Every option of every command is in the documentation, and the documentation's commands have no other options."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.pages import PAGES, ROOT

from paceline.cli.app import app

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
SCRIPT = re.compile(r"\S+\.py\b|\s-- ")
"""Arguments after a script, or after `--`, are not checked: they do not belong to the command."""


def options(command: Any) -> set[str]:
    """Return the long options of a command."""
    return {"--help", *(name for param in command.params for name in param.opts if name.startswith("--"))}


find_commands = runpy.run_path(str(ROOT / "docs/command_line.py"))["find_commands"]
COMMANDS = {name.removeprefix("paceline "): command for name, command in find_commands(typer.main.get_command(app))}
"""Every command by its name after ``paceline``."""


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_documented(name: str) -> None:
    documented = set(OPTION.findall("\n".join(page.read_text(encoding="utf-8") for page in PAGES)))
    assert sorted(options(COMMANDS[name]) - documented - {"--help"}) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_commands_have_the_options(page: Path) -> None:
    names = "|".join(sorted(COMMANDS, key=len, reverse=True))
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.finditer(rf"paceline ({names})\b([^`\n#|;]*)", text):
        own_text = SCRIPT.split(line[2])[0]
        known = options(COMMANDS[line[1]])
        if line[1] == "manifests":  # the arguments are another command, with its options
            inner = re.search(r" (run|scheduler|train)\b", own_text)
            known = known | (options(COMMANDS[inner[1]]) if inner else set())
        unknown = set(OPTION.findall(own_text)) - known
        assert not unknown, f"{line[0]}: paceline {line[1]} has no {', '.join(sorted(unknown))}"
