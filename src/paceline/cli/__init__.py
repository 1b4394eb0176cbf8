"""The command line: it parses arguments, calls the packages below, and says in one sentence what went wrong."""

from __future__ import annotations

import contextlib
import os
import sys

from paceline.cli.termination import Terminated, raise_no_more, raise_on_sigterm


def main() -> None:
    """Run ``paceline``; exit with 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C, 143 and 129 after SIGTERM
    and SIGHUP.
    """
    import typer

    from paceline.errors import PacelineError, UsageError

    from .app import app

    raise_on_sigterm()
    # Typer brought its own copy of click at some point, so what it raises is named by where it is derived from.
    wrong_usage: type[Exception] = typer.BadParameter.__bases__[0]
    try:
        # Not app(), which has its own idea of what a signal means.
        with typer.main.get_command(app).make_context("paceline", sys.argv[1:]) as context:
            context.command.invoke(context)
    except typer.Exit as error:
        sys.exit(error.exit_code)
    except Terminated as end:
        _fail("told to end", 128 + end.number)
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    except wrong_usage as error:
        error.show()  # type: ignore[attr-defined]
        sys.exit(2)
    except UsageError as error:
        _fail(_message(error), 2)
    except PacelineError as error:
        _fail(_message(error), 1)
    except BrokenPipeError:
        # Whoever read our output has had enough. Python would flush it again at exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _fail(f"{error.filename or 'the system'}: {error.strerror or error}", 1)


def _message(error: Exception) -> str:
    from paceline.data.streams.standard_input import name_for_people

    return name_for_people(str(error))


def _fail(text: str, status: int) -> None:
    raise_no_more()
    with contextlib.suppress(OSError):  # a terminal that is closed
        print(f"paceline: {text}", file=sys.stderr)
    sys.exit(status)
