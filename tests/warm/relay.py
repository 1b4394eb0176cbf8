"""Run a program as a fork of a warm process: ``python relay.py KIND PROGRAM ARGUMENT…``.

Launchers of other packages start it. The fork has this process's environment, folder and streams. A killed relay does
not end its program.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    from tests.warm.processes import WarmProcess

    status = WarmProcess(sys.argv[2:], kind=sys.argv[1], env=os.environ, cwd=os.getcwd()).wait()
    sys.exit(status if status >= 0 else 128 - status)
