"""Commands whose parameters are the fields of dataclasses."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer

from paceline.cli.app import app
from paceline.cli.parameters import PanelCommand, expand_flags, given_options
from paceline.command_options import argument, option


@dataclass(frozen=True, kw_only=True)
class PlaceFlags:
    host: str = option("Address.", default="localhost")
    tcp_port: int | None = option("Port.", "--port", "-p", min=1)


@dataclass(frozen=True, kw_only=True)
class DemoFlags:
    name: str | None = argument("Name.")
    place: PlaceFlags
    names: list[str] | None = option("Names.")
    loud: Annotated[bool, typer.Option("--loud", help="Loudly.")] = False


def run(*words: str) -> tuple[int, DemoFlags]:
    """Return the values that a command receives."""
    received: list[tuple[int, DemoFlags]] = []

    @expand_flags
    def demo(*, count: int = 3, flags: DemoFlags) -> None:
        received.append((count, flags))

    app = typer.Typer()
    app.command()(demo)
    typer.main.get_command(app)(list(words), standalone_mode=False)
    return received[0]


def test_every_field_is_a_parameter() -> None:
    flags = DemoFlags(name="a", place=PlaceFlags(host="h", tcp_port=7), names=["x", "y"], loud=True)
    words = "--count 2 a --host h -p 7 --names x --names y --loud"
    assert run(*words.split()) == (2, flags)


def test_defaults_equal_the_dataclass_defaults() -> None:
    assert run() == (3, DemoFlags(place=PlaceFlags()))


def test_parameters_are_in_the_order_of_the_fields() -> None:
    def demo(*, first: int = 1, flags: DemoFlags, last: int = 2) -> None: ...

    names = list(inspect.signature(expand_flags(demo)).parameters)
    assert names == ["first", "name", "host", "tcp_port", "names", "loud", "last"]


def test_the_options_that_differ_from_their_defaults_are_returned() -> None:
    flags = DemoFlags(place=PlaceFlags(tcp_port=7), names=["x"], loud=True)
    assert given_options(flags) == ["--host", "--tcp-port", "--names", "--loud"]


def test_the_command_line_imports_no_large_package() -> None:
    code = "import sys, paceline.cli.app; print(sorted({'numpy', 'torch', 'paceline.protocol'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("name", "common"), [("train", ["--eval", "--model", "--save"]), ("run", ["--strategy"])])
def test_help_lists_common_options_first_and_every_option_in_one_panel(
    name: str, common: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    help = command.get_help(command.make_context(name, [], resilient_parsing=True))
    panels = re.split(r"\n(?=\S.*:\n)", help)
    assert [panel.partition(":")[0] for panel in panels[1:3]] == ["Arguments", "Common options"]
    assert set(common) <= set(re.findall(r"--[\w-]+", panels[2]))
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    assert len(re.findall(r"(?m)^  (?:-\w, )?--", "".join(panels[1:]))) == len(options) + 1
    assert {parameter.rich_help_panel for parameter in options} == {panel.partition(":")[0] for panel in panels[2:]}
    assert max(map(len, help.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--dashboard", (None, "0", [])),
        ("--dashboard --name a x", ("a", "0", ["x"])),
        ("--dashboard x", (None, "0", ["x"])),
        ("--dashboard 80 x", (None, "80", ["x"])),
        ("--dashboard host:80 x --dashboard y", (None, "host:80", ["x", "--dashboard", "y"])),
        ("--dashboard=80 --name=a x", ("a", "80", ["x"])),
        ("--name -a -- --dashboard x", ("-a", None, ["--dashboard", "x"])),
    ],
)
def test_the_port_of_an_option_may_be_missing(words: str, expected: tuple[str | None, str | None, list[str]]) -> None:
    assert dashboard_command(*words.split()) == expected


@pytest.mark.parametrize("words", ["--name --dashboard 80", "--name"])
def test_the_name_of_an_option_is_no_value(words: str) -> None:
    with pytest.raises(Exception, match="--name"):
        dashboard_command(*words.split())


def dashboard_command(*words: str) -> tuple[str | None, str | None, list[str]]:
    """Return the values that a command with a dashboard and other words receives."""
    received: list[tuple[str | None, str | None, list[str]]] = []

    def command(name: str | None = None, dashboard: str | None = None, rest: list[str] | None = None) -> None:
        received.append((name, dashboard, list(rest or [])))

    command.__annotations__["rest"] = Annotated[list[str] | None, typer.Argument()]
    app = typer.Typer()
    app.command(cls=PanelCommand, context_settings={"allow_interspersed_args": False})(command)
    typer.main.get_command(app)(list(words), standalone_mode=False)
    return received[0]
