"""Generate the reference of the command line from the options of the commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from paceline.cli.app import app

HEAD = """\
# Command line

This page is generated from the commands. `paceline COMMAND --help` prints the same text.
"""


def find_commands(command: Any, name: str = "paceline") -> Iterator[tuple[str, Any]]:
    """Yield each command that is not a group, with its full name."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for part, subcommand in command.commands.items():
        yield from find_commands(subcommand, f"{name} {part}")


def describe(name: str, command: Any) -> str:
    """Return the section of one command: its help, and its arguments and options by panel."""
    lines = [f"## `{name}`", "", _plain(command.help), ""]
    panels: dict[str, list[str]] = {}
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        is_option = parameter.param_type_name == "option"
        panel = (getattr(parameter, "rich_help_panel", None) or "Options") if is_option else "Arguments"
        names = ", ".join(parameter.opts + parameter.secondary_opts) if is_option else parameter.name.upper()
        panels.setdefault(panel, []).extend([f"`{names}`", f": {_plain(parameter.help)}", ""])
    for panel, parameters in panels.items():
        lines += [f"**{panel}**", "", *parameters]
    return "\n".join(lines)


def _plain(text: str | None) -> str:
    """Return the paragraphs of a help text, each on one line; examples become blocks of code."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text or "")]
    return "\n\n".join(re.sub(r"^Example: (.*)", r"```text\n\1\n```", paragraph) for paragraph in paragraphs)


def write_command_line(path: Path) -> None:
    """Write the page if its text changed, so that an unchanged page is not built again."""
    text = "\n".join([HEAD, *(describe(*found) for found in find_commands(typer.main.get_command(app)))])
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
