"""Read the configuration file of ``horovodrun``, in YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from paceline.errors import UsageError, first_line

_SECTIONS: Final = {
    "params": "", "autotune": "autotune-", "timeline": "timeline-", "stall_check": "stall-check-",
    "library_options": "", "logging": "log-",
}  # fmt: skip
"""The sections, and the beginnings of the names of their options."""


def read_config(path: Path) -> list[str]:
    """Return the options of a file as words of the command line. Raises UsageError."""
    try:
        import yaml
    except ImportError:
        raise UsageError(f"--config-file {path}: needs PyYAML. Install it: pip install 'paceline[horovod]'") from None
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else first_line(error)
        raise UsageError(f"--config-file {path}: cannot read this file: {reason}") from None
    words: list[str] = []
    for section, options in (content if isinstance(content, dict) else {"": content}).items():
        if section == "controller" and options in ("gloo", "mpi"):
            words.append(f"--{options}")
        elif section in _SECTIONS and isinstance(options, dict):
            for name, value in options.items():
                words += _words_of_option(section, str(name), value)
        else:
            known = ", ".join(_SECTIONS)
            raise UsageError(f"--config-file {path}: {section}: {options!r} is unknown, expected {known}")
    return words


def _words_of_option(section: str, name: str, value: Any) -> list[str]:
    option = f"--{_SECTIONS[section]}{name.replace('_', '-')}"
    if name == "enabled":
        option, value = ("--no-stall-check", not value) if section == "stall_check" else (f"--{section}", value)
    if isinstance(value, bool):
        return [option] if value else []
    return [] if value is None else [option, str(value)]
