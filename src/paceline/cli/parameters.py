"""Generate parameters of commands from dataclasses."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Final, TypeGuard, get_args, get_type_hints

import typer
import typer.core
from typing_extensions import override

from paceline.command_options import given_values

_METAVARS: Final = {
    int | None: "N",
    float | None: "X",
    float: "X",
    Path | None: "PATH",
    str: "TEXT",
    str | None: "TEXT",
}
"""Placeholders for values in the help text, by type."""
_OPTIONAL_PORTS: Final = {"dashboard": "0"}
"""Options whose value, a port, may be missing, and the value in this case."""

_hints = functools.partial(get_type_hints, include_extras=True)


class PanelCommand(typer.core.TyperCommand):
    """A command whose help lists options by panel, in the order of each panel's first option.

    An option's value is not the name of another option.
    """

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command line."""
        return super().parse_args(ctx, _complete_values(args, self.get_params(ctx), ctx))

    @override
    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the panels. Options without a panel, such as ``--help``, go into the first panel."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            is_argument = parameter.param_type_name == "argument"
            panel = "Arguments" if is_argument else getattr(parameter, "rich_help_panel", None)
            if record is not None:
                sections.setdefault(panel or [*sections, "Options"][1], []).append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


def _complete_values(words: Sequence[str], parameters: Sequence[Any], context: Any) -> list[str]:
    """Insert missing ports; end the words after another option whose value is missing, so the parser reports it."""
    options = {name: parameter for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}
    normalize = context.token_normalize_func or str
    complete: list[str] = []
    unread = list(words)
    while unread and unread[0] != "--" and (unread[0].startswith("-") or context.allow_interspersed_args):
        complete.append(unread.pop(0))
        option = options.get(normalize(complete[-1]))
        if option is None or not complete[-1].startswith("-") or option.is_flag or option.count:
            continue
        if option.name in _OPTIONAL_PORTS and not re.fullmatch(r"(.+:)?\d+", unread[0] if unread else ""):
            complete.append(_OPTIONAL_PORTS[option.name])
            continue
        if unread and unread[0].startswith("--") and normalize(unread[0]) in options:
            return complete
        complete += unread[: option.nargs]
        unread = unread[option.nargs :]
    return complete + unread


def expand_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a command whose type is a dataclass by one parameter per field.

    A field is declared with :mod:`paceline.command_options` or as an ``Annotated`` parameter of Typer, or its type is
    another such dataclass. The command receives the dataclasses with the values of the command line. A field without
    a panel is in the panel of its dataclass, or of the outer dataclass.
    """
    hints = _hints(command)
    parameters: list[Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        default = parameter.default
        parameters += _parameters(hint) if _is_flags(hint) else [_parameter(parameter.name, hint, default)]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(**{name: build_flags(hint, name, values) for name, hint in hints.items() if name != "return"})

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def given_options(flags: Any) -> list[str]:
    """Return the names of a dataclass's options that are not None, including those of nested dataclasses."""
    return [f"--{name.replace('_', '-')}" for name in given_values(flags)]


def _parameters(flags: type, outer: str | None = None) -> Iterator[Parameter]:
    hints = _hints(flags)
    for field in fields(flags):
        hint = hints[field.name]
        panel = field.metadata.get("panel") or getattr(flags, "panel", None) or outer
        if _is_flags(hint):
            yield from _parameters(hint, panel)
        else:
            default = Parameter.empty if field.default is MISSING else field.default
            yield _parameter(field.name, _with_settings(field, hint, panel), default)


def _parameter(name: str, hint: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _with_settings(flag: Field[Any], hint: Any, panel: str | None) -> Any:
    """Return a field's type with its settings in Typer's format."""
    if "parameter" not in flag.metadata:
        kind, *parameters = get_args(hint)
        return Annotated[(kind, *(_in_panel(parameter, kind, panel) for parameter in parameters))]
    settings = dict(flag.metadata)
    for name in ("panel", "effect"):
        settings.pop(name, None)
    parameter = getattr(typer, settings.pop("parameter"))(*settings.pop("names"), **settings)
    return Annotated[hint, _in_panel(parameter, hint, panel)]


def _in_panel(parameter: Any, hint: Any, panel: str | None) -> Any:
    parameter = copy.copy(parameter)
    parameter.rich_help_panel = panel
    if isinstance(parameter, typer.models.OptionInfo):
        parameter.metavar = parameter.metavar or _METAVARS.get(hint)
    return parameter


def build_flags(hint: Any, name: str, values: Mapping[str, Any]) -> Any:
    """Return ``values[name]`` or, if `hint` is a dataclass, the dataclass with the values of its fields."""
    if not _is_flags(hint):
        return values[name]
    hints = _hints(hint)
    return hint(**{field.name: build_flags(hints[field.name], field.name, values) for field in fields(hint)})


def _is_flags(hint: Any) -> TypeGuard[type[Any]]:
    return isinstance(hint, type) and is_dataclass(hint)
