"""Small parts of rpc: futures, errors, names of workers, frames on a socket."""

from __future__ import annotations

import concurrent.futures
import errno
import math
import os
import socket
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.waiting import in_thread

from paceline import rpc
from paceline.errors import ConnectionLostError, DeadlineError, PeerError, ProtocolError, UsageError
from paceline.rpc import Future, RemoteError
from paceline.rpc.allowed import Allowed
from paceline.rpc.functions import promise_of
from paceline.rpc.futures import seconds_of
from paceline.rpc.wire import framed_socket
from paceline.rpc.wire.framed_socket import FramedSocket
from paceline.rpc.wire.messages import CallFailure, failure_meta, failure_of
from paceline.rpc.wire.shared_bodies import SharedBodies, can_share
from paceline.rpc.workers import Directory, Introduction, check_name
from paceline.transport import pack_header


def test_the_public_names() -> None:
    assert rpc.__all__ == [
        "BackendType",
        "Future",
        "RRef",
        "RemoteError",
        "TensorPipeRpcBackendOptions",
        "WorkerInfo",
        "allow",
        "async_execution",
        "collect_all",
        "get_rpc_timeout",
        "get_worker_info",
        "init_rpc",
        "is_available",
        "remote",
        "rpc_async",
        "rpc_sync",
        "shutdown",
        "wait_all",
    ]
    with pytest.raises(AttributeError):
        rpc.nothing  # noqa: B018
    with pytest.raises(UsageError, match=r"call paceline\.rpc\.init_rpc"):
        rpc.rpc_sync("a", "b:c")


def test_futures() -> None:
    first: Future[int] = Future()
    doubled = first.then(lambda done: done.wait() * 2)
    failed = first.then(lambda done: 1 // (done.wait() - 4))
    with pytest.raises(DeadlineError, match=r"within 0\.01 s"):
        first.wait(timedelta(milliseconds=10))
    with pytest.raises(UsageError, match="not done"):
        first.value()
    threading.Timer(0.01, first.set_result, (4,)).start()
    assert doubled.wait() == 8
    with pytest.raises(ZeroDivisionError):
        rpc.wait_all([doubled, failed])
    nothing: Any = None
    with pytest.raises(UsageError, match=r"then\(\) got None"):
        first.then(nothing)
    with pytest.raises(UsageError, match="already"):
        first.set_result(1)
    assert first.then(lambda done: done.value()).value() == 4


def test_futures_are_collected() -> None:
    one: Future[int] = Future()
    two: Future[int] = Future()
    collected = rpc.collect_all([one, two])
    two.set_exception(ValueError("two"))
    assert not collected.done()
    one.set_result(1)
    assert collected.wait() == [one, two]
    assert rpc.collect_all([]).wait() == []
    with pytest.raises(ValueError, match="two"):
        rpc.wait_all([one, two])


def test_durations_may_be_numbers_of_seconds() -> None:
    assert seconds_of(timedelta(minutes=1)) == 60
    assert seconds_of(2.5) == 2.5
    assert seconds_of(0) == math.inf
    assert seconds_of(timedelta(0)) == 0
    bad: Any
    for bad in (-2, True, math.nan, "5", None):
        with pytest.raises(UsageError, match=r"timeout=.*: expected seconds"):
            seconds_of(bad)


def test_futures_of_other_libraries_are_accepted() -> None:
    source_future: concurrent.futures.Future[int] = concurrent.futures.Future()
    promise = promise_of(source_future)
    source_future.set_result(3)
    assert promise.wait() == 3
    failing: concurrent.futures.Future[int] = concurrent.futures.Future()
    failing.set_exception(KeyError("k"))
    with pytest.raises(KeyError):
        promise_of(failing).wait()
    torch = pytest.importorskip("torch")
    of_torch = torch.futures.Future()
    promise = promise_of(of_torch)
    of_torch.set_result(4)
    assert promise.wait() == 4
    with pytest.raises(UsageError, match="returned int, expected a Future"):
        promise_of(3)


class ForeignError(Exception):
    def __init__(self, code: int, *, more: str = "") -> None:
        super().__init__(code)
        self.code = code


def test_exceptions_of_allowed_modules_keep_the_class() -> None:
    def raised_error(allowed: Allowed) -> Exception:
        meta = failure_meta(ForeignError(3), with_trace=True)
        return failure_of(meta, "w1", "m:f", allowed)

    kept = raised_error(Allowed([__name__]))
    assert isinstance(kept, ForeignError)
    assert isinstance(kept, RemoteError)
    assert kept.code == 3
    assert f"{__name__}.ForeignError: 3" in str(kept)
    again = failure_of(failure_meta(kept, with_trace=True), "w2", "m:g", Allowed([__name__]))
    assert isinstance(again, ForeignError)
    assert type(raised_error(Allowed())) is RemoteError
    no_class = CallFailure(f"{__name__}:test_futures", "m", "t", [])
    assert type(failure_of(msgspec.msgpack.encode(no_class), "w1", "m:f", Allowed([__name__]))) is RemoteError


def test_a_failure_keeps_the_class() -> None:
    def raised_error(error: Exception) -> Exception:
        try:
            raise error
        except Exception as raised:
            return failure_of(failure_meta(raised, with_trace=True), "w1", "m:f")

    for error in (ValueError("bad"), KeyError("k"), OSError(2, "no file"), UsageError("wrong"), ZeroDivisionError()):
        found = raised_error(error)
        assert isinstance(found, type(error))
        assert isinstance(found, RemoteError)
        assert "m:f failed on worker 'w1'" in str(found)
        assert type(error).__name__ in found.remote_traceback
    assert "\\udcff" in str(raised_error(OSError(2, "no file", "\udcff")))
    again = raised_error(raised_error(ValueError("inner")))
    assert isinstance(again, ValueError)
    assert "inner" in str(again)

    class OwnError(Exception):
        pass

    assert type(raised_error(OwnError("x\x1b[31m"))) is RemoteError
    assert "\x1b" not in str(raised_error(OwnError("x\x1b[31m")))
    decoding = raised_error(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"))
    assert isinstance(decoding, UnicodeDecodeError)
    assert (decoding.object, decoding.reason) == (b"\xff", "x")
    plain = failure_of(failure_meta(UsageError("no"), with_trace=False), "w1", "m:f")
    assert type(plain) is UsageError
    assert type(failure_of(failure_meta(ValueError("no"), with_trace=False), "w1", "m:f")) is PeerError
    with pytest.raises(ProtocolError):
        failure_of(b"\x01", "w1", "m:f")


def test_a_failure_keeps_the_arguments() -> None:
    def raised_error(error: BaseException) -> Exception:
        return failure_of(failure_meta(error, with_trace=True), "w1", "m:f")

    for _ in range(2):
        full = raised_error(FileExistsError(errno.EEXIST, "is there", "/a", None, "/b"))
        assert isinstance(full, FileExistsError)
        assert (full.errno, full.strerror, full.filename, full.filename2) == (errno.EEXIST, "is there", "/a", "/b")
        assert "/a" in str(full)
        full = raised_error(full)  # as if another process had passed the error on
    assert raised_error(KeyError("k", 2)).args == ("k", 2)
    assert raised_error(SystemExit(3)).args == (3,)
    for strange in (ValueError(object()), ValueError(1 << 100), ValueError("\ud800"), ValueError("x" * (1 << 20))):
        assert "ValueError" in raised_error(strange).args[0]
    crafted = CallFailure("OSError", "m", "t", [[1], {}])
    assert isinstance(failure_of(msgspec.msgpack.encode(crafted), "w1", "m:f"), OSError)


def test_names_of_workers() -> None:
    directory = Directory([Introduction("a", False), Introduction("b", True)])
    assert directory.id_of("b") == 1
    assert directory.id_of(directory.workers[0]) == 0
    assert directory.id_of(1) == 1
    wrong: Any
    for wrong in (2, -1, True, None):
        with pytest.raises(UsageError, match="unknown worker"):
            directory.id_of(wrong)
    with pytest.raises(UsageError, match=r"worker 'c'; the workers are 'a', 'b'"):
        directory.id_of("c")
    with pytest.raises(UsageError, match=r"two workers are called 'a': ranks 0 and 1"):
        Directory([Introduction("a", False), Introduction("a", False)])
    for bad in ("", "x" * 200, "a\nb"):
        with pytest.raises(UsageError, match="worker's name"):
            check_name(bad)


def pair() -> tuple[FramedSocket, FramedSocket]:
    left, right = socket.socketpair()
    for end in (left, right):
        end.setblocking(False)
    return FramedSocket(left, "left"), FramedSocket(right, "right")


@pytest.mark.parametrize("is_sealed", [False, True])
def test_frames_of_all_sizes_arrive_complete_and_in_order(is_sealed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_sealed:
        monkeypatch.setattr(framed_socket, "_is_on_host", lambda connected: False)
    left, right = pair()
    soon = time.monotonic() + 10
    sizes = [0, 1, 8, 100, 5000, 16_300, 16_384, 70_000, 3, 1 << 20, 0]
    bodies = [np.arange(size).astype(np.uint8) for size in sizes]

    def send() -> None:
        left.agree_on_seals("secret" * 4, connecting=True, deadline=soon)
        for number, body in enumerate(bodies):
            left.send(20, bytes(number), [body], request=number, deadline=soon)

    with in_thread(send):
        right.agree_on_seals("secret" * 4, connecting=False, deadline=soon)
        for number, body in enumerate(bodies):
            assert right.wait_readable(10)
            header, meta, found = right.receive()
            assert header.request == number
            assert bytes(meta) == bytes(number)
            assert bytes(found) == body.tobytes()
    left.close()
    left.release()
    with pytest.raises(ConnectionLostError):
        right.receive()
    right.release()


def test_frames_under_another_token_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framed_socket, "_is_on_host", lambda connected: False)
    left, right = pair()
    soon = time.monotonic() + 10
    with in_thread(lambda: left.agree_on_seals("one" * 8, connecting=True, deadline=soon)):
        right.agree_on_seals("two" * 8, connecting=False, deadline=soon)
    left.send(20, b"x", deadline=soon)
    with pytest.raises(ConnectionLostError, match="altered"):
        right.receive()
    left.release()
    right.release()


def test_a_frame_with_an_excessive_length_is_refused_before_allocation() -> None:
    raw, other = socket.socketpair()
    other.setblocking(False)
    right = FramedSocket(other, "right")
    raw.send(pack_header(20, body_bytes=1 << 40))
    with pytest.raises(ProtocolError, match="claims"):
        right.receive()
    raw.close()
    right.release()


def test_a_send_times_out_if_the_peer_does_not_receive() -> None:
    left, right = pair()
    with pytest.raises(DeadlineError, match="does not read"):
        left.send(20, body=[np.zeros(1 << 24, np.uint8)], deadline=time.monotonic() + 0.05)
    left.release()
    right.release()


@pytest.mark.skipif(not can_share(), reason="bodies go through the socket on this platform")
def test_large_bodies_are_sent_through_shared_memory_after_it_is_mapped() -> None:
    left, right = pair()
    left.share_bodies()
    soon = time.monotonic() + 10
    sent = [np.full(size, fill, np.uint8) for fill, size in enumerate([1 << 16, 1 << 20, 70_001, 3, 1 << 20, 3 << 20])]
    through = []
    for body in [*sent, *sent]:
        with in_thread(partial(left.send, 20, b"m", [body[:5], body[5:]], deadline=soon)):
            received = right.receive()
        assert bytes(received.meta) == b"m"
        np.testing.assert_array_equal(np.frombuffer(received.body, np.uint8), body)
        through.append(bool(received.header.flags))
    # The socket sends the first body (its message offers the segment), small bodies, and bodies larger than a slot.
    assert through == [False, True, True, False, True, False, True, True, True, False, True, False]
    right.send(20, b"", [sent[1]], request=7, deadline=soon)  # the other direction
    assert left.receive().header.flags
    for _ in range(5):  # nothing is received: slots run out, and the socket sends the last body
        left.send(20, b"", [sent[2]], deadline=soon)
    assert [bool(right.receive().header.flags) for _ in range(5)] == [True, True, True, True, False]
    # Bodies that the receiver retains keep their slots. Later bodies use the other slots.
    kept = []
    for fill in range(8):
        left.send(20, b"", [np.full(1 << 17, fill, np.uint8)], deadline=soon)
        received = right.receive()
        assert received.header.flags
        kept.append(np.frombuffer(received.body, np.uint8)[5:])
    assert [int(array.min()) for array in kept] == [int(array.max()) for array in kept] == list(range(8))
    del received
    for end in (left, right):
        end.close()
        end.release()
    assert [int(array.sum()) for array in kept] == [fill * ((1 << 17) - 5) for fill in range(8)]
    del kept


@pytest.mark.parametrize("flags", [1, 9])
def test_bodies_in_memory_that_is_not_shared_are_rejected(flags: int) -> None:
    raw, other = socket.socketpair()
    other.setblocking(False)
    right = FramedSocket(other, "right")
    raw.send(pack_header(31, meta_bytes=8) + b"/proc/1/")
    raw.send(pack_header(20, flags=flags, body_bytes=8) + bytes(8))
    with pytest.raises(ProtocolError, match="does not share"):
        right.receive()
    raw.close()
    right.release()


@pytest.mark.skipif(not can_share(), reason="bodies are not shared on this platform")
def test_a_forked_child_sees_unchanged_values() -> None:
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far:
        sender = SharedBodies.make()
        assert sender is not None
        receiver = SharedBodies.attach(sender.path, far)
        assert receiver is not None
        assert SharedBodies.attach("/proc/1/fd/\0", far) is None
        slot = sender.put([b"kept"], 4)
        assert slot is not None
        held = receiver.take(slot, 4)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(writing)
            os.read(reading, 1)  # wait until the parent has released its view
            is_kept = bytes(held) == b"kept"
            del held
            os._exit(0 if is_kept else 1)
        del held
        sends = [sender.put([b"next"], 4) for _ in range(4)]
        os.close(writing)
        os.close(reading)
        assert os.waitpid(child, 0)[1] == 0
        assert slot not in sends
        assert sends[3] is None
        second = receiver.take(sends[0] or 0, 4)
        del second  # received after the fork, so the slot is free again
        assert sender.put([b"next"], 4) == sends[0]
        sender.close()
        receiver.close()
