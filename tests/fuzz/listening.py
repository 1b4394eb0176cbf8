"""A fuzzed listener and its clients, in one thread and one event loop, so the seed determines all events."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import msgspec
from tests.memory_transport import MemoryChannel, MemoryTransport

from paceline.transport import HEADER_BYTES, FrameKind, Header, Hello, frame_parts, padded, unpack_header

from .mutations import Frame, Mutator

_SHOWN_FRAMES = 6
_SHOWN_BYTES = 200


class FoundError(AssertionError):
    """A listener violated a rule."""


class Line:
    """A connection that sends arbitrary bytes, and the frames that it receives."""

    def __init__(self, transport: MemoryTransport, target: Any, hello: Hello) -> None:
        channel = transport.connect(target, hello)
        assert isinstance(channel, MemoryChannel)
        self._channel = channel
        self._got = bytearray()

    def send(self, data: bytes) -> None:
        """Send bytes. The listener closes the connection if it has no memory for the announced size."""
        try:
            self._channel._pipe.receive(data)
        except MemoryError:  # like asyncio
            self.close()

    @property
    def is_open(self) -> bool:
        """Whether the connection is open."""
        return not (self._channel._is_ended or self._channel._is_closed)

    def close(self) -> None:
        """Close the connection, within any frame."""
        self._channel.close()

    def answers(self) -> Iterator[tuple[Header, bytes, bytes]]:
        """Yield received frames: header, meta and body."""
        arrived, got = self._channel._arrived, self._got
        while arrived:
            got += arrived.popleft()
        at = 0
        while len(got) - at >= HEADER_BYTES:
            header = unpack_header(got, at)
            body_at = at + HEADER_BYTES + padded(header.meta_bytes)
            end = body_at + padded(header.body_bytes)
            if len(got) < end:
                break
            yield (
                header,
                bytes(got[at + HEADER_BYTES : at + HEADER_BYTES + header.meta_bytes]),
                bytes(got[body_at : body_at + header.body_bytes]),
            )
            at = end
        del got[:at]

    def exchange(self, kind: int, **fields: Any) -> tuple[Header, bytes, bytes]:
        """Send a valid frame, and return its immediate reply."""
        self.send(b"".join(map(bytes, frame_parts(kind, **fields))))
        answers = list(self.answers())
        if len(answers) != 1 or answers[0][0].kind == FrameKind.ERROR:
            raise FoundError(f"an honest frame of kind {kind} got {answers}, {'open' if self.is_open else 'closed'}")
        return answers[0]


class Attacker:
    """A process that has the token and sends arbitrary frames, on one connection after another."""

    def __init__(self, random: Random, mutator: Mutator, transport: MemoryTransport, target: Any, hello: Hello) -> None:
        self._random = random
        self._mutator = mutator
        self._transport = transport
        self._target = target
        self._hello = hello
        self._line: Line | None = None
        self.sent: deque[bytes] = deque(maxlen=_SHOWN_FRAMES)
        self.first: bytes = b""
        """The first bytes on every connection."""

    def attack(self, frame: Frame, kinds: Sequence[int]) -> int:
        """Send the mutations of a frame; return their number."""
        frames = self._mutator.vary(frame, kinds)
        for varied in frames:
            line = self._line
            if line is None or not line.is_open:
                line = self._line = self._connect()
            data = varied.encode()
            self.sent.append(data)
            if not varied.is_whole and self._random.random() < 0.3:
                data = data[: self._random.randrange(len(data))]
            line.send(data)
            for header, meta, _ in line.answers():
                check_answer(header, meta)
            if not varied.is_whole or self._random.random() < 0.002:
                line.close()
        return len(frames)

    def close(self) -> None:
        """Close the connection and forget its state."""
        if self._line is not None:
            self._line.close()

    def _connect(self) -> Line:
        line = Line(self._transport, self._target, self._alter_hello())
        if self.first:
            line.send(self.first)
        return line

    def _alter_hello(self) -> Hello:
        if self._random.random() < 0.5:
            return self._hello
        values: list[dict[str, Any]] = [
            {"extra": {"timeout_ms": "soon"}}, {"extra": {"timeout_ms": -1}}, {"extra": {"timeout_ms": 1 << 62}},
            {"extra": {"timeout_ms": ""}}, {"rank": -1}, {"rank": 1 << 62}, {"name": "x" * 1000}, {"name": "\x1b[2J"},
            {"extra": {str(n): n for n in range(50)}}, {"role": "observer"}, {"role": "a\n"}, {"incarnation": 0},
            {"incarnation": -1}, {"incarnation": 1 << 62},
        ]  # fmt: skip
        return msgspec.structs.replace(self._hello, **self._random.choice(values))


def check_answer(header: Header, meta: bytes) -> None:
    """Raise FoundError if the log reports an internal error."""
    if header.kind in (FrameKind.ERROR, FrameKind.REFUSED):
        failure = msgspec.msgpack.decode(meta)
        if failure["error"] == "InternalError":
            raise FoundError(failure["message"])


class Episode(ABC):
    """One listener from its start to its end, and the connections to it."""

    name: ClassVar[str]
    weight: ClassVar[int] = 1
    """Weight of the episode among all frames."""

    def __init__(self, random: Random, folder: Path) -> None:
        self.random = random
        self.folder = folder
        self.mutator = Mutator(random)
        self.failures: list[BaseException] = []
        """Exceptions that would have ended the listener's process."""

    @abstractmethod
    async def begin(self) -> None:
        """Start the listener and connect."""

    @abstractmethod
    def feed(self) -> int:
        """Send a frame or its mutations; return the number of frames."""

    @abstractmethod
    def check_now(self) -> None:
        """Check that honest clients receive their replies."""

    @abstractmethod
    async def end(self) -> None:
        """End the listener."""

    def sent(self) -> Sequence[bytes]:
        """Return the last frames."""
        return ()


class _Watch(logging.Handler):
    """Collects the listener's log messages about unexpected exceptions."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[BaseException | str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.found.append(record.exc_info[1])


def play(kind: type[Episode], seed: str, num_frames: int, folder: Path) -> int:
    """Play one episode of at least `num_frames` frames; return the number of frames. Raises FoundError."""
    episode = kind(Random(seed), folder)
    watch = _Watch()
    loggers = [logging.getLogger("paceline"), logging.getLogger("asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(watch)
        logger.propagate = False
        logger.setLevel(logging.WARNING)
    try:
        return asyncio.run(_play(episode, watch, num_frames))
    except Exception as error:
        sent = "\n".join(f"  {data[:_SHOWN_BYTES]!r}" for data in episode.sent())
        raise FoundError(f"{kind.name}: {type(error).__name__}: {error}\nlast frames:\n{sent}") from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(watch)
            logger.propagate = True
            logger.setLevel(level)


async def _play(episode: Episode, watch: _Watch, num_frames: int) -> int:
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: watch.found.append(context.get("exception") or str(context["message"]))
    )

    def check() -> None:
        for found in (*episode.failures, *watch.found):
            raise found if isinstance(found, BaseException) else FoundError(found)

    await episode.begin()
    done = 0
    try:
        while done < num_frames:
            done += episode.feed()
            check()
            if episode.random.random() < 0.03:
                episode.check_now()
                await asyncio.sleep(0)
                check()
    finally:
        await episode.end()
    check()
    return done
