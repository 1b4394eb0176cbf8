"""The command line: parse arguments, call the packages below, report an error in one sentence."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from paceline.cli.termination import Terminated, raise_no_more, raise_on_sigterm

if TYPE_CHECKING:
    from paceline.launch.fork_server import ForkServer

_HELP = ("-h", "--help")


def main() -> None:
    """Run ``paceline``; exit with 0, 1 for a failure, 2 for wrong usage, 128 plus the number after a signal.

    SIGINT (Ctrl-C) gives 130, SIGTERM 143 and SIGHUP 129.
    """
    try:
        with start_fork_server(sys.argv[1:]) as fork_server:
            _run(sys.argv[1:], fork_server)
    except KeyboardInterrupt:  # Ctrl-C during the import of modules, or after the command
        _fail("interrupted", 130)
    except RuntimeError as error:
        # Python up to 3.11 wraps exceptions raised in __set_name__, such as Ctrl-C during the creation of a dataclass.
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        _fail("interrupted", 130)


@functools.cache
def load_commands() -> Any:
    """Return the group of all commands."""
    import typer

    from .app import app

    return typer.main.get_command(app)


def _run(words: list[str], fork_server: ForkServer | None) -> None:
    import typer

    from paceline.errors import PacelineError, UsageError
    from paceline.observe.work import show_progress

    raise_on_sigterm()
    show_progress()
    # Typer contains a copy of click, whose exception class has no public name. Get it from a subclass.
    wrong_usage: type[Exception] = typer.BadParameter.__bases__[0]
    commands = load_commands()
    try:
        # Do not call app(), because it handles signals itself.
        with commands.make_context("paceline", words, obj=fork_server) as context:
            context.command.invoke(context)
    except typer.Exit as error:
        sys.exit(error.exit_code)
    except Terminated as end:
        _fail("ended by a signal", 128 + end.number)
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    except wrong_usage as error:
        from .wrong_usage import describe_wrong_usage

        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            sys.exit(2)
        _fail(describe_wrong_usage(error, words), 2)
    except UsageError as error:
        from .wrong_usage import name_options

        command = commands.commands.get(words[0])
        _fail(name_options(_message(error), () if command is None else command.params), 2)
    except PacelineError as error:
        _fail(_message(error), 1)
    except BrokenPipeError:
        # The reader closed standard output. Redirect it, because Python would flush again at exit and fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _fail(f"{error.filename or 'the system'}: {error.strerror or error}", 1)


@contextlib.contextmanager
def start_fork_server(words: Sequence[str]) -> Iterator[ForkServer | None]:
    """Run a fork server during the block if the command `words` is a training with its own cluster; else yield None.

    Call this first: the fork server needs half a second to load, and this process imports Typer in the meantime.
    """
    starts = words[:1] == ["train"] and len(words) > 1
    if not starts or any(word in _HELP or word.startswith("--scheduler") for word in words):
        yield None
        return
    from paceline.launch.fork_server import ForkServer

    with ForkServer.start() as fork_server:
        yield fork_server


def _message(error: Exception) -> str:
    from paceline.data.streams.standard_input import name_for_people

    return name_for_people(str(error))


def _fail(text: str, status: int) -> None:
    raise_no_more()
    with contextlib.suppress(OSError):  # the terminal is closed
        print(f"paceline: {text}", file=sys.stderr)
    sys.exit(status)
