"""Commands whose parameters are the fields of dataclasses."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from paceline.cli.parameters import expand_flags, given_options
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


def test_each_field_is_a_parameter() -> None:
    flags = DemoFlags(name="a", place=PlaceFlags(host="h", tcp_port=7), names=["x", "y"], loud=True)
    words = "--count 2 a --host h -p 7 --names x --names y --loud"
    assert run(*words.split()) == (2, flags)


def test_defaults_are_those_of_the_dataclasses() -> None:
    assert run() == (3, DemoFlags(place=PlaceFlags()))


def test_parameters_are_in_the_order_of_the_fields() -> None:
    def demo(*, first: int = 1, flags: DemoFlags, last: int = 2) -> None: ...

    names = list(inspect.signature(expand_flags(demo)).parameters)
    assert names == ["first", "name", "host", "tcp_port", "names", "loud", "last"]


def test_given_options() -> None:
    flags = DemoFlags(place=PlaceFlags(tcp_port=7), names=["x"], loud=True)
    assert given_options(flags) == ["--host", "--tcp-port", "--names", "--loud"]


def test_the_command_line_imports_little() -> None:
    code = "import sys, paceline.cli.app; print(sorted({'numpy', 'torch', 'paceline.protocol'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
