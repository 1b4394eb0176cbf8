from __future__ import annotations

import subprocess
import sys
from inspect import ismodule

import paceline.data


def test_all_is_sorted_and_complete() -> None:
    names = paceline.data.__all__
    assert names == sorted(names)
    public = {name for name, value in vars(paceline.data).items() if not name.startswith("_") and not ismodule(value)}
    assert public - {"annotations"} == set(names)


def test_importing_data_imports_neither_numba_nor_pyarrow() -> None:
    code = "import sys, paceline.data; sys.exit(bool({'numba', 'pyarrow', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
