"""A filter that is added in one file: the example of docs/filters.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

CODE = """
import signs
import numpy as np
import paceline
from paceline.filters import FilterChain, parse_filters

assert "Signs" in paceline.__all__
chain = parse_filters("signs,compress")
values, out = np.array([1, -2, 3, 0, 5], np.float32), np.empty(5, np.float32)
chain.decode_values(chain.encode_values(values, 0), out)
assert np.sign(out).tolist() == [1, -1, 1, -1, 1] and np.allclose(np.abs(out), 2.2)
assert str(chain) == "signs,compress:1"
"""


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs/filters.md").read_text()
    found = re.search(r"how long it takes:\n\n```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    (tmp_path / "signs.py").write_text(found[1])
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], env=environment, check=True, timeout=120)
