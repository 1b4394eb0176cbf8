"""Read line formats (criteo, libsvm, vw, JSON lines): read lines from ranges of bytes, and parse them.

A shard is a range of bytes of the decompressed text. A line belongs to the shard of its first byte, so each line is in
exactly one shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.bad_lines import NUM_KEPT, BadLine, shorten
from paceline.data.batch import Batch
from paceline.data.dialect import BYTE_ORDER_MARK
from paceline.data.reader import BLOCK_BYTES, OtherFormatError, ReadSettings, Report
from paceline.data.streams import open_stream, text_size
from paceline.errors import DataError
from paceline.kernels.text.codes import MISSING_LABEL

MAX_LINE_BYTES = 1 << 24
_PADDING = 64  # kernels may read eight bytes beyond the end, and a final newline may be added


class TextWindow:
    """A window of a file's text: ``buffer[begin:end]``, where ``buffer[0]`` is byte `base` of the text.

    At least 64 bytes follow `end` in the buffer.
    """

    def __init__(self, path: str, block_bytes: int = BLOCK_BYTES) -> None:
        self._stream = open_stream(path)
        self.buffer = bytearray(block_bytes + _PADDING)
        self.base = self.begin = self.end = 0
        self.num_bytes: int | None = None
        """The length of the text; None until its end is read."""

    @property
    def position(self) -> int:
        return self.base + self.begin

    def close(self) -> None:
        self._stream.close()

    def seek(self, position: int) -> None:
        self._stream.seek(position)
        self.base, self.begin, self.end = self._stream.position, 0, 0
        self.num_bytes = None

    def fill(self, num_bytes: int) -> None:
        """Read until the window has `num_bytes`, or the text ends."""
        held = self.end - self.begin
        if held >= num_bytes or self.num_bytes is not None:
            return
        if num_bytes + _PADDING > len(self.buffer):
            larger = bytearray(num_bytes + _PADDING)
            larger[:held] = memoryview(self.buffer)[self.begin : self.end]
            self.buffer = larger
        else:
            self.buffer[:held] = self.buffer[self.begin : self.end]
        self.base += self.begin
        self.begin, self.end = 0, held
        with memoryview(self.buffer) as view:
            while self.end < num_bytes:
                count = self._stream.readinto(view[self.end : num_bytes])
                if not count:
                    self.num_bytes = self.base + self.end
                    break
                self.end += count


@dataclass(slots=True)
class Block:
    """Complete lines ``buffer[start:stop]``; ``buffer[0]`` is byte `base` of the text."""

    buffer: bytearray
    start: int
    stop: int
    base: int
    last: bool


class LineReader:
    """Reads the lines of byte ranges. All blocks share one buffer.

    Invariant: the window begins with the first line that begins at `low` or later.
    """

    def __init__(self, path: str, block_bytes: int = BLOCK_BYTES) -> None:
        self._path = path
        self._window = TextWindow(path, block_bytes)
        self._block_bytes = block_bytes
        self._low = 0

    @property
    def num_bytes(self) -> int | None:
        """The length of the text; None until its end is read."""
        return self._window.num_bytes

    def close(self) -> None:
        self._window.close()

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """Yield blocks of the lines that begin in [start, stop). A block is valid until the next one."""
        self._go_to(start)
        window = self._window
        grown = 0
        while window.position < stop:
            window.fill(grown or min(self._block_bytes, max(stop - window.position + 4096, 65536)))
            buffer, begin, base = window.buffer, window.begin, window.base
            cut = buffer.rfind(b"\n", begin, window.end) + 1
            if base + cut >= stop:  # the last line that begins before stop has byte stop - 1
                cut = buffer.find(b"\n", max(stop - 1 - base, begin), window.end) + 1
                end = cut
            elif window.num_bytes is not None:
                end = cut = window.end
                if begin == cut:
                    break
                if buffer[cut - 1] != 10:
                    buffer[cut] = 10
                    end = cut + 1
            elif cut == 0:
                if window.end - begin >= MAX_LINE_BYTES:
                    raise DataError(
                        f"{self._path} has a line of more than {MAX_LINE_BYTES >> 20} MiB, "
                        f"from byte {base + begin:,} on: expected text with one example per line"
                    )
                grown = min(2 * (window.end - begin), MAX_LINE_BYTES)
                continue
            else:
                end = cut
            window.begin = cut
            self._low = min(base + cut, stop)
            grown = 0
            yield Block(buffer, begin, end, base, base + cut == window.num_bytes)

    def _go_to(self, start: int) -> None:
        window = self._window
        if self._low <= start <= window.position:
            return
        if start == 0:
            window.seek(0)
        else:
            if start < self._low or start - 1 > window.base + window.end:
                window.seek(start - 1)
            else:
                window.begin = start - 1 - window.base
            while not (newline := window.buffer.find(b"\n", window.begin, window.end) + 1):
                window.begin = window.end
                if window.num_bytes is not None:
                    break
                window.fill(65536)
            else:
                window.begin = newline
        self._low = min(start, window.position)


@dataclass(slots=True)
class Parsed:
    """A parser's result for a part of a block: the rows, and the first bad lines' positions and codes."""

    batch: Batch
    position: int
    num_bad: int
    bad: list[tuple[int, int]]


Parse = Callable[[npt.NDArray[np.uint8], int, int], Parsed]


class SparseArrays:
    """Arrays for parsed rows and pairs, in the order of the kernels' arguments."""

    def __init__(self, capacity: int) -> None:
        self._labels, self._weights = np.empty(capacity, np.float32), np.empty(capacity, np.float32)
        self._indptr = np.empty(capacity + 1, np.int64)
        self._keys, self._values = np.empty(capacity, np.uint64), np.empty(capacity, np.float32)
        self._fields = np.empty(capacity, np.uint32)
        self.all = self._labels, self._weights, self._indptr, self._keys, self._values, self._fields

    def batch(self, rows: int, pairs: int, *, all_ones: bool, is_weighted: bool) -> Batch:
        """Return copies of the filled part, so that the large arrays can be freed."""
        values = None if all_ones else self._values[:pairs].copy()
        weights = self._weights[:rows].copy() if is_weighted else None
        indptr = self._indptr[: rows + 1].copy()
        fields = self._fields[:pairs].copy()
        return Batch(self._labels[:rows].copy(), indptr, self._keys[:pairs].copy(), values, weights, fields)


def call_kernel(kernel: Any, num_counts: int, *arguments: Any) -> tuple[list[int], list[tuple[int, int]]]:
    """Return a kernel's counts (the second counts bad lines), and the first bad lines' positions and codes."""
    bad_at, bad_why, counts = (np.empty(size, np.int64) for size in (NUM_KEPT, NUM_KEPT, num_counts))
    kernel(*arguments, bad_at, bad_why, counts)
    num_bad = int(counts[1])
    return counts.tolist(), list(zip(bad_at[:num_bad].tolist(), bad_why[:num_bad].tolist(), strict=True))


class TextReader:
    """Shards of a text file with one example per line."""

    def __init__(self, path: str, format: str, parse: Parse, settings: ReadSettings) -> None:
        self._path = path
        self._format = format
        self._shard_bytes = settings.shard_bytes
        self._lines = LineReader(path)
        self._parse = parse
        size = text_size(path, settings.num_bytes)
        self.num_shards = None if size is None else -(-size // self._shard_bytes)

    def close(self) -> None:
        self._lines.close()

    def blocks(self, shard: int, report: Report) -> Iterator[Batch]:
        start = shard * self._shard_bytes
        for block in self._lines.blocks(start, start + self._shard_bytes):
            yield from self.parse_block(block, report)
        if self.num_shards is None and self._lines.num_bytes is not None:
            self.num_shards = -(-self._lines.num_bytes // self._shard_bytes)
            if not self._lines.num_bytes:
                raise DataError(f"{self._path} is empty after decompression")

    def parse_block(self, block: Block, report: Report) -> Iterator[Batch]:
        text = np.frombuffer(block.buffer, np.uint8)
        position = block.start
        if block.base + position == 0 and block.buffer.startswith(BYTE_ORDER_MARK):
            position += len(BYTE_ORDER_MARK)
        is_judged = block.base + block.start > 0
        while position < block.stop:
            parsed = self._parse(text, position, block.stop)
            position = parsed.position
            if parsed.num_bad:
                no_good = not is_judged and not parsed.batch.num_examples and parsed.bad[0][1] != MISSING_LABEL
                if no_good and (parsed.num_bad >= 10 or (block.last and position >= block.stop)):
                    raise self._other_format(block)
                report(parsed.num_bad, [self._describe(block, at, why) for at, why in parsed.bad])
            is_judged = True
            if parsed.batch.num_examples:
                yield parsed.batch

    def _describe(self, block: Block, at: int, why: int) -> BadLine:
        from paceline.kernels.text.codes import REASONS

        line = bytes(block.buffer[at : block.buffer.find(b"\n", at)][:1000])
        return BadLine(self._path, block.base + at, None, shorten(line), REASONS[why])

    def _other_format(self, block: Block) -> OtherFormatError:
        first = bytes(block.buffer[block.start : block.stop][:1000]).partition(b"\n")[0]
        return OtherFormatError(f"{self._path} does not look like {self._format}: its first line is '{shorten(first)}'")
