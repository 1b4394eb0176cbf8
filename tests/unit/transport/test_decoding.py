"""Several threads may decode a type concurrently for the first time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import paceline

_CODE = """
from __future__ import annotations
import sys, threading
from typing import Annotated, Any
import msgspec
from paceline.transport import read_meta, register_type

sys.setswitchinterval(1e-6)

def define(number, inner):
    class Thing(msgspec.Struct, array_like=True):
        number: Annotated[int, msgspec.Meta(le=5)] | None = None
        lists: dict[str, list[int]] = {}
        inner: Inner | None = None
        texts: tuple[str, ...] = ()
    globals().update({f"Inner{number}": inner, "Inner": inner})
    return Thing

data, inner = msgspec.msgpack.encode([1, {}, None, []]), int
for number in range(50):
    inner = thing = define(number, inner)
    start = threading.Barrier(4)
    def decode():
        start.wait()
        read_meta(data, thing, "a thing")
    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("decoded")
"""


def test_several_threads_may_be_the_first_to_decode_a_type() -> None:
    result = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "decoded"), result.stderr


def test_no_type_is_decoded_without_registration() -> None:
    direct = re.compile(
        r"msgspec\.(?:(?:msgpack|json)\.(?:decode\(.*type=|Decoder\()|convert\(\w+, )(?!register_type\()"
    )
    folder = Path(paceline.__file__).parent
    found = [
        f"{path.relative_to(folder)}: {line.strip()}"
        for path in sorted(folder.rglob("*.py"))
        for line in path.read_text().splitlines()
        if direct.search(line)
    ]
    assert found == ["decoded_types.py: msgspec.msgpack.Decoder(kind)"]
