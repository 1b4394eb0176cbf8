"""Count the modules between ``paceline train`` and the first trained example.

``python benchmarks/walk.py`` traces a training on 600 generated rows: the main thread of the command until it waits for
the job, and the main thread of the worker until its first push. Functions that run during an import do not count. The
program prints three numbers: the entered modules of ``paceline``, the entered modules of its packages cli, launch and
training, and the modules of these packages that call another module of these packages. A reader of the code must follow
the modules that the third number counts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Final

import paceline

_ROOT: Final = f"{Path(paceline.__file__).parent}{os.sep}"
_ENDS: Final = {("training/job_running.py", "_watch"), ("ps/client/sparse_table.py", "push")}
_DRIVING: Final = ("cli", "launch", "training")
_OPTIMIZED: Final = 2  # flag of functions' code, which modules and class bodies lack


def start_trace(folder: str) -> None:
    """Trace this process and its forked children. Each writes its calls to `folder` at its last traced call."""
    calls: set[tuple[str, str]] = set()
    process = os.getpid()

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal process
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(_ROOT) or not code.co_flags & _OPTIMIZED:
            return
        if os.getpid() != process:
            process = os.getpid()
            calls.clear()
        callers = []
        caller = frame.f_back
        while caller is not None:
            if caller.f_code.co_filename.startswith("<frozen importlib"):
                return
            callers.append(caller.f_code.co_filename)
            caller = caller.f_back
        calling = next((name for name in callers if name.startswith(_ROOT)), _ROOT)
        module = code.co_filename.removeprefix(_ROOT)
        if threading.current_thread() is threading.main_thread():
            calls.add((calling.removeprefix(_ROOT), module))
        if (module, code.co_name) in _ENDS:
            sys.setprofile(None)
            Path(folder, str(process)).write_text("".join(f"{calling} {called}\n" for calling, called in calls))

    sys.setprofile(trace)


def main() -> None:
    """Trace a training and print the numbers."""
    with tempfile.TemporaryDirectory() as folder:
        data, found = Path(folder, "clicks.csv"), Path(folder, "calls")
        found.mkdir()
        rows = (f"{i % 7 % 2},{i % 11},{i % 3},{i % 61}" for i in range(600))
        data.write_text("\n".join(["click,site,device,age", *rows]))
        start = f"import walk; walk.start_trace({str(found)!r})"
        Path(folder, "sitecustomize.py").write_text(
            f"import sys; sys.path.append({str(Path(__file__).parent)!r}); {start}"
        )
        environment = {**os.environ, "PYTHONPATH": folder}
        subprocess.run([sys.executable, "-m", "paceline", "train", str(data)], env=environment, check=True)
        calls = {tuple(line.split()) for file in found.iterdir() for line in file.read_text().splitlines()}
    modules = {called for call in calls for called in call[1:]}
    driving = {module for module in modules if module.split("/")[0] in _DRIVING}
    passing = {call[0] for call in calls if len(call) == 2 and {*call} <= driving and call[0] != call[1]}
    print(f"{len(modules)} modules, {len(driving)} of {', '.join(_DRIVING)}; {len(passing)} pass control on:")
    print("\n".join(sorted(passing)))


if __name__ == "__main__":
    main()
