"""The program of a rank: call the function in a folder, and report its end.

A report is a pickled tuple: the pickled value of the function, its pickled exception, and the text of the traceback. It
is empty if the launcher ended the rank by SIGTERM, because another rank failed.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, Final

import cloudpickle

from paceline.environment import environment
from paceline.errors import UsageError, first_line

PROGRAM: Final = "program"
"""File with ``sys.path`` of the worker, and the pickled function with its arguments."""
REPORT_SUFFIX: Final = ".report"
RANK_MODULE: Final = "paceline.launch.functions.rank"


def main() -> None:
    """Call the function. Its exception ends this process, so that ``paceline run`` ends the other ranks."""
    path = Path(sys.argv[1], f"{environment().rank}.partial")

    def end(number: int, frame: FrameType | None) -> None:
        path.with_suffix(REPORT_SUFFIX).touch()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
    try:
        report = (_call(path.with_name(PROGRAM).read_bytes()), None, "")
        _write(path, report)
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        try:
            _write(path, (None, cloudpickle.dumps(error), text))
        except Exception:  # an exception's own code may raise any error
            _write(path, (None, None, text))
        raise


def _call(program: bytes) -> bytes:
    sys.path[:], pickled = pickle.loads(program)
    try:
        function, arguments = pickle.loads(pickled)
    except Exception as error:
        raise UsageError(
            f"a worker cannot load the function: {first_line(error)}. Install its modules on all workers"
        ) from error
    value: Any = function(*arguments)
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        name = type(value).__name__
        raise UsageError(f"a {name} cannot be returned: {first_line(error)}. Return another value") from error


def _write(path: Path, report: tuple[bytes | None, bytes | None, str]) -> None:
    path.write_bytes(pickle.dumps(report))
    os.replace(path, path.with_suffix(REPORT_SUFFIX))


if __name__ == "__main__":
    main()
