"""Copy standard input to a temporary file, because several processes read the data several times."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO

from paceline.data.streams.packed import PACKED
from paceline.temporary import TemporaryFolder, pattern_of

_KIND = "stdin"


def make_folder() -> TemporaryFolder:
    return TemporaryFolder.make(_KIND)


def keep(source: BinaryIO, folder: Path) -> Path:
    """Copy `source` to a file in `folder`, with a suffix if the data is compressed. Return its path. Raises OSError."""
    path = folder / "stdin"
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as out:
        shutil.copyfileobj(source, out, 1 << 20)
    with open(path, "rb") as file:
        head = file.read(4)
    suffix = next((kind.suffix for kind in PACKED if head.startswith(kind.magics)), "")
    return path.rename(path.with_suffix(suffix)) if suffix else path


def name_for_people(text: str) -> str:
    """Replace the copy's file name in a message by `standard input`."""
    parent = re.escape(os.path.join(tempfile.gettempdir(), ""))
    return re.sub(rf"{parent}{pattern_of(_KIND)}/stdin(?:\.gz|\.zst)?\b", "standard input", text)
