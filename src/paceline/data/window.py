"""The part of a text in a reader's memory: a window that moves along a stream."""

from __future__ import annotations

from paceline.data.reader import BLOCK_BYTES
from paceline.data.streams import open_stream

MAX_LINE_BYTES = 1 << 24
_PADDING = 64  # kernels may load eight bytes after the end, and a final newline may be added


class TextWindow:
    """A window of a file's text: ``buffer[begin:end]``, where ``buffer[0]`` is byte `base` of the text.

    At least 64 bytes follow `end` in the buffer.
    """

    def __init__(self, path: str, block_bytes: int = BLOCK_BYTES) -> None:
        self._stream = open_stream(path)
        self.buffer = bytearray(block_bytes + _PADDING)
        self.base = self.begin = self.end = 0
        self.num_bytes: int | None = None
        """The length of the text, once its end was read."""

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
