"""The part of a text that a reader has in memory: a window that moves along a stream."""

from __future__ import annotations

from paceline.data.reader import BLOCK_BYTES
from paceline.data.streams import open_stream

MAX_LINE_BYTES = 1 << 24
_PADDING = 64  # the kernels may load eight bytes behind the end, and a final newline may be missing


class TextWindow:
    """A file's text, of which ``buffer[begin:end]`` is in memory; ``buffer[0]`` is byte `base` of the text.

    At least 64 bytes follow `end` in the buffer.
    """

    def __init__(self, path: str, block_bytes: int = BLOCK_BYTES) -> None:
        self._stream = open_stream(path)
        self.buffer = bytearray(block_bytes + _PADDING)
        self.base = self.begin = self.end = 0
        self.num_bytes: int | None = None
        """The length of the text, once its end was seen."""

    @property
    def position(self) -> int:
        """The byte of the text that ``buffer[begin]`` is."""
        return self.base + self.begin

    def close(self) -> None:
        """Close the stream."""
        self._stream.close()

    def seek(self, position: int) -> None:
        """Begin, and end, at `position`."""
        self._stream.seek(position)
        self.base, self.begin, self.end = self._stream.position, 0, 0
        self.num_bytes = None

    def fill(self, num_bytes: int) -> None:
        """Have `num_bytes` from `begin` on, or all there is."""
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
