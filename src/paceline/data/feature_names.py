"""Find and store the names of features. Keys are hashes, so finding names requires reading the data again."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.data.streams import ByteStream, open_stream
from paceline.errors import ModelError
from paceline.kernels.hashing import hash_bytes, name_seed
from paceline.output_files import replacing

FEATURE_NAMES = "feature-names.tsv"
"""The file with the names, in a model's directory."""

_ROWS = 16384

Keys = npt.NDArray[np.uint64]


class NameFinder:
    """Collects the names of the `wanted` keys."""

    def __init__(self, wanted: Keys) -> None:
        self._wanted = set(wanted.tolist())
        self.names: dict[int, str] = {}

    def add(self, key: int, name: str) -> None:
        if key in self._wanted:
            self.names[key] = name

    def read(self, names: Sequence[str], seeds: Sequence[int], rows: Iterator[Sequence[str]]) -> None:
        seen: list[set[str]] = [set() for _ in names]
        while len(self.names) < len(self._wanted) and (block := list(islice(rows, _ROWS))):
            for column, (name, seed) in enumerate(zip(names, seeds, strict=True)):
                fresh = {row[column] for row in block} - seen[column]
                seen[column] |= fresh
                self._add_values(name, seed, sorted(fresh))

    def read_pairs(self, features: Iterator[tuple[str, str | None, str]]) -> None:
        seen: set[tuple[str, str | None]] = set()
        for outer, inner, name in features:
            if len(self.names) == len(self._wanted):
                return
            if (outer, inner) not in seen:
                seen.add((outer, inner))
                seed = name_seed(outer)
                self.add(seed if inner is None else hash_bytes(encoded(inner), seed), name)

    def _add_values(self, name: str, seed: int, values: list[str]) -> None:
        from paceline.kernels.text import lines as kernels

        if not values:
            return
        texts = list(map(encoded, values))
        offsets = np.zeros(len(values) + 1, np.int64)
        np.cumsum(list(map(len, texts)), out=offsets[1:])
        data = np.frombuffer(b"".join(texts) or b"\0", np.uint8)
        keys = np.empty(len(values), np.uint64)
        kernels.hash_strings(kernels.read_only(data), kernels.read_only(offsets), np.uint64(seed), keys, 0, 1)
        for key, value in zip(keys.tolist(), values, strict=True):
            self.add(key, f"{name}={value}")


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def decoded(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")


def text_lines(files: Sequence[str], newline: str = "\n") -> Iterator[str]:
    for file in files:
        with io.BufferedReader(_TextFile(open_stream(file)), 1 << 20) as raw:
            yield from io.TextIOWrapper(raw, "utf-8-sig", "surrogateescape", newline=newline)


class _TextFile(io.RawIOBase):
    """A raw stream of :mod:`io` for a data file."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        with memoryview(buffer).cast("B") as view:  # type: ignore[arg-type]
            return self._stream.readinto(view)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


# Names in a model's directory.


def write_feature_names(directory: Path, names: Mapping[int, str]) -> None:
    """Write names to a model's directory. Each line has a key, a tab and the name as JSON. Raises OSError."""
    lines = [f"{key}\t{json.dumps(name, ensure_ascii=False)}\n" for key, name in sorted(names.items())]
    with replacing(directory / FEATURE_NAMES) as aside:
        aside.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")


def read_feature_names(directory: Path) -> dict[int, str]:
    """Return the names by key from a model's directory; no names if the file is missing. Raises ModelError."""
    names: dict[int, str] = {}
    try:
        with open(directory / FEATURE_NAMES, encoding="utf-8") as lines:
            for line in lines:
                key, _, name = line.partition("\t")
                names[int(key)] = str(json.loads(name))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        raise ModelError(f"{directory / FEATURE_NAMES} has no names of features: {error}") from None
    return names
