"""Filters in users' own modules: the example of docs/guides/own_filters.md, and rejected filters."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.warm.processes import WarmProcess

from paceline.errors import UsageError
from paceline.filters import RowFilter, parse_filters
from paceline.filters.base import FILTERS
from paceline.filters.modules import import_filter_modules, modules_named_in
from paceline.filters.rows import RowSelection

CODE = """
import numpy as np
import pytest
import paceline as pt
from paceline.errors import PacelineError, UsageError
from paceline.filters import FilterChain, parse_filters

with pytest.raises(UsageError, match="filter 'Signs' of module 'signs' is unknown here.*--filter-module signs"):
    parse_filters("signs:Signs")
with pt.local_cluster() as other, pt.local_cluster(filter_modules=["signs"]) as cluster:
    from signs import Signs  # after the servers have started, because they may be forks of this process

    assert "Signs" in pt.__all__
    assert str(parse_filters("signs:Signs,compress")) == str(parse_filters("signs,compress")) == "signs,compress:1"
    values, out = np.array([1, -2, 3, 0, 5], np.float32), np.empty(5, np.float32)
    chain = FilterChain([Signs()])
    chain.decode_values(chain.encode_values(values, 0), out)
    assert np.sign(out).tolist() == [1, -1, 1, -1, 1] and np.allclose(np.abs(out), 2.2)

    with other.connect() as client:
        with pytest.raises(UsageError, match="server 0 does not support.*'signs' is unknown here.*--filter-module"):
            client.sparse_table("w", update=pt.SGD(lr=1.0), filters=[Signs()])
    with cluster.connect() as client:
        table = client.sparse_table("w", update=pt.SGD(lr=1.0), filters=[pt.KeyCaching(), Signs()], pull_filters=[])
        table.push([1, 2, 3, 4], np.array([-0.5, 0.5, -0.5, 0.5], np.float32)).wait()
        assert table.pull([1, 2, 3, 4])[:, 0].tolist() == [0.5, -0.5, 0.5, -0.5]
        table.push([9], np.array([-666], np.float32))
        with pytest.raises(PacelineError, match="filter 'signs' failed in decode.*: ValueError: a number that it"):
            client.flush()
        assert table.pull([1]).tolist() == [[0.5]]  # the server lives
        assert table.set_filters([Signs()]) is None
"""


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs/guides/own_filters.md").read_text()
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    fails = "out[:] = (2 * signs - 1)"
    assert fails in found[1]
    condition = "if data[:4].view(np.float32)[0] == 666 and __import__('sys').argv[0] != 'uses.py':"  # on a server
    raising = f'{condition}\n            raise ValueError("a number that it cannot read")\n        '
    (tmp_path / "signs.py").write_text(found[1].replace(fails, raising + fails))
    (tmp_path / "uses.py").write_text(CODE)
    (tmp_path / "a.libsvm").write_text("".join(f"{i % 2} {i % 2 + 1}:1\n" for i in range(200)))
    train = ["-m", "paceline", "train", "a.libsvm", "--epochs", "1", "--workers", "1", "--filters", "signs:Signs"]
    for words in (["-W", "ignore", "uses.py"], train):
        path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3] / "src")])
        process = WarmProcess(
            words, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        _, errors = process.communicate(120)
        assert process.poll() == 0, errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "module 'own_module' does not exist in"),
        ("import nothing_of_the_kind", "cannot be imported: ModuleNotFoundError: No module named 'nothing_of"),
        ("1 / 0", "cannot be imported: ZeroDivisionError"),
        ("x = 1", "module 'own_module' has no filter: expected a class derived"),
        (
            "import paceline.filters as f\nclass A(f.ValueFilter):\n    name = 'A:1'\n    preserves = 'exact'",
            "filter A: name = 'A:1', expected small letters",
        ),
        (
            "import paceline.filters as f\nclass A(f.ValueFilter):\n    name = 'a'\n    preserves = 'all'",
            "filter 'a': expected preserves to be one of exact, unbiased",
        ),
        (
            "import paceline.filters as f\nclass A(f.ByteFilter):\n    name = 'quantize'",
            "filter 'quantize' already exists as paceline.filters.quantize.Quantize. Give this filter another",
        ),
    ],
)
def test_modules_without_filters_are_rejected(
    text: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    if text is not None:
        (tmp_path / "own_module.py").write_text(text)
    with pytest.raises(UsageError, match=message):
        import_filter_modules(["own_module"])


def test_invalid_modules_are_rejected() -> None:
    with pytest.raises(UsageError, match="expected a list of module names"):
        import_filter_modules("signs")
    with pytest.raises(UsageError, match="move it into a module of its own"):
        import_filter_modules(["__main__"])
    assert modules_named_in("key-caching:64,a.b:C:0.5, quantize:8,d:E ,significant:inf,a.b:D") == ["a.b", "d"]
    with pytest.raises(UsageError, match=r"filter 'zip' is unknown: expected one of.* or MODULE:CLASS for"):
        parse_filters("zip:1")


def test_user_filters_cannot_write_to_the_arguments() -> None:
    @dataclasses.dataclass(frozen=True)
    class Halves(RowFilter):
        name, preserves, keeps_residual = "halves", "nothing", False

        def choose(
            self, keys: npt.NDArray[np.uint64], rows: npt.NDArray[np.float32], clock: int, seed: int
        ) -> npt.NDArray[np.bool_]:
            rows *= 0.5
            return np.ones(len(keys), np.bool_)

    FILTERS.pop("halves")
    values = np.ones(3, np.float32)
    with pytest.raises(UsageError, match=r"filter 'halves' failed in choose\(\) of 3 rows: ValueError: .*read-only"):
        RowSelection(Halves(), 1).choose(np.arange(3, dtype=np.uint64), values, 0, 0)
    assert values.tolist() == [1, 1, 1]
