"""The command line: it parses arguments, calls the rooms below, and says in one sentence what went wrong."""

from __future__ import annotations

import sys


def main() -> None:
    """Run ``paceline``; exit with 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C."""
    import click

    from ..errors import PacelineError, UsageError
    from .app import app

    try:
        status = app(standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except click.exceptions.Abort:
        _fail("interrupted", 130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except UsageError as error:
        _fail(str(error), 2)
    except PacelineError as error:
        _fail(str(error), 1)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)


def _fail(text: str, status: int) -> None:
    print(f"paceline: {text}", file=sys.stderr)
    sys.exit(status)
