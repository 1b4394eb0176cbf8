"""Parameters of commands, generated from dataclasses."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import Parameter
from typing import Annotated, Any, TypeGuard, get_type_hints

import typer

from paceline.command_options import given_values

_hints = functools.partial(get_type_hints, include_extras=True)


def expand_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a command whose type is a dataclass by one parameter per field.

    A field is a field of :mod:`paceline.command_options`, an ``Annotated`` parameter of Typer, or a dataclass with
    fields of its own. The command receives the dataclasses with the values of the command line.
    """
    hints = _hints(command)
    parameters: list[Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        default = parameter.default
        parameters += _parameters(hint) if _is_flags(hint) else [_parameter(parameter.name, hint, default)]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(**{name: _build(hint, name, values) for name, hint in hints.items() if name != "return"})

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def given_options(flags: Any) -> list[str]:
    """Return the names of a dataclass's options that are not None, those of nested dataclasses included."""
    return [f"--{name.replace('_', '-')}" for name in given_values(flags)]


def _parameters(flags: type) -> Iterator[Parameter]:
    hints = _hints(flags)
    for field in fields(flags):
        hint = hints[field.name]
        if _is_flags(hint):
            yield from _parameters(hint)
        else:
            default = Parameter.empty if field.default is MISSING else field.default
            yield _parameter(field.name, _with_settings(field, hint), default)


def _parameter(name: str, hint: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _with_settings(flag: Field[Any], hint: Any) -> Any:
    """Return the type of a field with its settings, in the form that Typer reads."""
    if not flag.metadata:
        return hint
    settings = dict(flag.metadata)
    kind = getattr(typer, settings.pop("parameter"))
    return Annotated[hint, kind(*settings.pop("names"), **settings)]


def _build(hint: Any, name: str, values: Mapping[str, Any]) -> Any:
    if not _is_flags(hint):
        return values[name]
    return hint(**{name: _build(field_hint, name, values) for name, field_hint in _hints(hint).items()})


def _is_flags(hint: Any) -> TypeGuard[type[Any]]:
    return isinstance(hint, type) and is_dataclass(hint)
