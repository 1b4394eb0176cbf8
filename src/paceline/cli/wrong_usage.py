"""Describe arguments that Typer rejects, in one sentence."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any, Final

_SAME_OPTION: Final = {
    "--learning-rate": "--lr",
    "--optimizer": "--update",
    "--num-workers": "--workers",
    "--num-servers": "--servers",
    "--label-column": "--label",
    "--output": "--save",
    "--test": "--eval",
    "--num-epochs": "--epochs",
    "--passes": "--epochs",
}
"""Options of other programs, and the corresponding options of this program."""
_EXPECTED: Final = (
    (r"valid integer|not a valid int", "a whole number"),
    (r"valid number|not a valid float", "a number"),
    (r"greater than or equal to ([^ ]+)", r"a number of \1 or more"),
    (r"greater than ([^ ]+)", r"a number greater than \1"),
    (r"less than or equal to ([^ ]+)", r"a number of at most \1"),
)
"""Patterns for Typer's messages, and phrases for the expected value."""


def describe_wrong_usage(error: Any, words: Sequence[str]) -> str:
    """Return a sentence with the problem, the received value and the remedy. `words` is the command line."""
    context = getattr(error, "ctx", None)
    more = "" if context is None else f". See '{context.command_path} --help'"
    unknown = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and unknown is not None:
        known = [] if context is None else [name for parameter in context.command.params for name in parameter.opts]
        similar = [name for name in (_SAME_OPTION.get(unknown),) if name in known]
        similar += difflib.get_close_matches(unknown, known, 1, 0.7)
        similar += [name for name in known if name.startswith(unknown)]
        return f"unknown option {unknown}" + (f". Did you mean {similar[0]}?" if similar else more)
    parameter = getattr(error, "param", None)
    options = [] if parameter is None else list(parameter.opts)
    for pattern, expected in _EXPECTED:
        found = re.search(pattern, error.message)
        if found and options:
            given = _value_of(options, words)
            return f"{given}: expected {found.expand(expected)}"
    if type(error).__name__ == "BadOptionUsage":
        return f"{unknown}: the value is missing. Pass it, as in {unknown} VALUE"
    return f"{error.format_message().rstrip('.').replace('?.', '?')}{more if '?' not in error.format_message() else ''}"


def name_options(text: str, parameters: Sequence[Any]) -> str:
    """Replace settings in an error message by options of the command: ``min_replicas=2`` by ``--min-replicas 2``."""
    options = {parameter.name: parameter.opts[0] for parameter in parameters if parameter.opts[0].startswith("--")}

    def option(found: re.Match[str]) -> str:
        name, value = found.groups()
        before = text[: found.start()]
        is_argument = before.count("(") > before.count(")")  # as in SGD(lr=0.1)
        return found[0] if is_argument or name not in options else f"{options[name]} {value.strip(chr(39))}"

    return re.sub(r"\b([a-z_]+)=('[^']*'|[^\s,:;()]+)", option, text)


def _value_of(options: Sequence[str], words: Sequence[str]) -> str:
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in options:
            return f"{name} {value if equals else (*words, '')[at + 1]}"
    return options[0]
