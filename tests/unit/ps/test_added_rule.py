"""An update rule is added in one file, like in docs/contributing/extending.md. The test runs in a separate process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

CODE = """
import sign_sgd
import sign_sgd_reference
import numpy as np
import paceline
from paceline.protocol.buckets import ALL
from tests.reference.rule_cases import ARRAY_CASES, SPARSE_CASES
from paceline.tables.rules import RULES
from paceline.tables.settings import from_fields, to_fields
from paceline.tables.part import Selection
from paceline.tables.sparse_part import make_part
from paceline.tables.spec import TableSpec

rule, start = paceline.SignSGD(lr=0.5), paceline.Constant(value=1)
assert "SignSGD" in paceline.__all__ and from_fields(RULES, to_fields(rule)) == rule
for sizes in ({"kind": "sparse", "dim": 1}, {"kind": "dense", "size": 7}):
    part = make_part(TableSpec(name="w", update=to_fields(rule), initializer=to_fields(start), **sizes), ALL)
    keys, found = Selection(np.arange(3, dtype=np.uint64)), np.empty(3, np.float32)
    part.push(keys, np.array([2, -3, 0], np.float32))
    part.pull(keys, found)
    assert found.tolist() == [0.5, 1.5, 1.0]
cases = [case for case in ARRAY_CASES if case.label.startswith(("dense_push SignSGD 1000", "dense_push_at SignSGD"))]
assert len(cases) == 2
for case in cases:
    kernel_arguments, reference_arguments = case.arguments(), case.arguments()
    case.kernel(*kernel_arguments)
    case.twin(*reference_arguments)
    np.testing.assert_allclose(kernel_arguments[1], reference_arguments[1], rtol=1e-6)
assert [case.name for case in SPARSE_CASES if "SignSGD" in case.name] == ["SignSGD dim 3, 500 rows"]
"""


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs/contributing/extending.md").read_text()
    rule, reference, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "sign_sgd.py").write_text(rule)
    (tmp_path / "sign_sgd_reference.py").write_text(
        f"from sign_sgd import *\nfrom tests.reference.update_rules import *\n{reference}"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    # The JIT is off, because a new rule requires the compilation of all kernels.
    environment = {**os.environ, "PYTHONPATH": path, "NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], env=environment, check=True, timeout=120)
