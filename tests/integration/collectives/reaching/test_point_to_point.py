"""Tagged send and receive among threads that are ranks."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.collectives.p2p.matching import MAX_BUFFERED_BYTES
from paceline.collectives.p2p.pending import MESSAGE, pack
from paceline.collectives.p2p.point_to_point import Pending, PointToPoint
from paceline.errors import GroupClosedError, MismatchError, RankLostError, UsageError

from .ranks import PATIENCE_S, nodes, on_ranks, soon, talkers


def empty(size: int) -> memoryview:
    return memoryview(bytearray(size))


def send(end: PointToPoint, data: bytes, to: int, tag: int = 0, label: str = "") -> None:
    end.send(memoryview(data), to, tag, label).wait(PATIENCE_S)


def receive(end: PointToPoint, size: int, source: int | None, tag: int = 0, label: str = "") -> bytes:
    buffer = empty(size)
    end.receive(buffer, source, tag, label).wait(PATIENCE_S)
    return bytes(buffer)


def view(array: NDArray[Any]) -> memoryview:
    given: Any = array
    return memoryview(given)


@pytest.mark.parametrize("size", [0, 1, 8, 4096, 100_000, 5_000_000])
def test_messages_in_both_directions(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    with talkers(2) as ends:

        def talk(rank: int) -> bytes:
            if rank == 0:
                send(ends[0], data, 1)
                return receive(ends[0], size, 1)
            got = receive(ends[1], size, 0)
            send(ends[1], got, 0)
            return got

        assert on_ranks(2, talk) == [data, data]


def test_messages_of_each_tag_are_received_in_order() -> None:
    with talkers(2) as ends:
        for number in range(50):
            send(ends[0], b"a%02d" % number, 1, tag=1)
            send(ends[0], b"b%02d" % number, 1, tag=-2)
        assert [receive(ends[1], 3, 0, tag=-2) for _ in range(50)] == [b"b%02d" % number for number in range(50)]
        assert [receive(ends[1], 3, 0, tag=1) for _ in range(50)] == [b"a%02d" % number for number in range(50)]


def test_receives_posted_first_are_filled_in_order() -> None:
    with talkers(2) as ends:
        buffers = [empty(3) for _ in range(20)]
        pending = [ends[1].receive(buffer, 0, 5) for buffer in buffers]
        assert not any(receive.done() for receive in pending)
        for number in range(20):
            send(ends[0], b"%03d" % number, 1, tag=5)
        assert [receive.wait(PATIENCE_S) for receive in pending] == [0] * 20
        assert [bytes(buffer) for buffer in buffers] == [b"%03d" % number for number in range(20)]


def test_messages_are_received_from_any_rank() -> None:
    with talkers(4) as ends:

        def talk(rank: int) -> dict[int, bytes]:
            if rank:
                send(ends[rank], b"from %d" % rank, 0, tag=9)
                return {}
            got = {}
            for _ in range(3):
                buffer = empty(6)
                source = ends[0].receive(buffer, None, 9).wait(PATIENCE_S)
                got[source] = bytes(buffer)
            return got

        assert on_ranks(4, talk)[0] == {rank: b"from %d" % rank for rank in (1, 2, 3)}


def test_all_ranks_send_to_all_ranks_concurrently() -> None:
    size, length = 4, 300_000
    with talkers(size) as ends:

        def talk(rank: int) -> None:
            peers = [other for other in range(size) if other != rank]
            buffers = {other: empty(length) for other in peers}
            pending = [ends[rank].receive(buffers[other], other, rank) for other in peers]
            pending += [ends[rank].send(memoryview(bytes([rank]) * length), other, other) for other in peers]
            for receive in pending:
                receive.wait(PATIENCE_S)
            assert all(bytes(buffers[other]) == bytes([other]) * length for other in peers)

        on_ranks(size, talk)


def test_a_rank_can_send_to_itself() -> None:
    with talkers(1) as ends:
        send(ends[0], b"before", 0, tag=1)
        assert receive(ends[0], 6, 0, tag=1) == b"before"
        buffer = empty(5)
        pending = ends[0].receive(buffer, None, 2)
        send(ends[0], b"after", 0, tag=2)
        assert (pending.wait(0), bytes(buffer)) == (0, b"after")
        pending = ends[0].receive(empty(5), 0, 3)
        sending = ends[0].send(memoryview(b"four"), 0, 3)
        for operation in (pending, sending):
            with pytest.raises(MismatchError):
                operation.wait(0)
        with pytest.raises(GroupClosedError, match="a message failed: rank 0 sent 4 bytes"):
            ends[0].send(memoryview(b"four"), 0, 4)


def test_a_thread_can_send_to_another_thread_of_its_rank() -> None:
    with talkers(2) as ends, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(receive, ends[0], 4, 0, tag) for tag in range(3)]
        for tag in range(3):
            send(ends[0], b"self", 0, tag)
        assert [receive.result(5.0) for receive in waiting] == [b"self"] * 3


def test_large_messages_are_transferred_without_a_waiting_thread() -> None:
    size = 100 << 20
    with talkers(2) as ends:
        buffers = [np.zeros(size, np.uint8), np.zeros(size, np.uint8)]
        data = [np.full(size, 1 + rank, np.uint8) for rank in range(2)]
        pending = []
        for rank in range(2):
            pending.append(ends[rank].receive(view(buffers[rank]), 1 - rank, 0))
            pending.append(ends[rank].send(view(data[rank]), 1 - rank, 0))
        deadline = time.monotonic() + PATIENCE_S
        idle = threading.Event()
        while not all(receive.done() for receive in pending):  # done() moves nothing
            assert time.monotonic() < deadline
            idle.wait(0.001)
        assert (buffers[0] == 2).all()
        assert (buffers[1] == 1).all()


def test_unrequested_messages_are_stored_up_to_the_limit() -> None:
    with talkers(2, max_buffered_bytes=1 << 20) as ends:
        block = bytes(300_000)
        pending = [ends[0].send(memoryview(block), 1, tag) for tag in range(200)]
        with pytest.raises(RankLostError, match="rank 1 received"):
            pending[-1].wait(0.2)
        assert pending[0].done()


def test_the_limit_does_not_block_a_receive_of_a_later_message() -> None:
    with talkers(2, max_buffered_bytes=1 << 20) as ends:
        block = bytes(300_000)
        pending = [ends[0].send(memoryview(block), 1, tag) for tag in range(100)]
        for tag in reversed(range(100)):
            assert receive(ends[1], len(block), 0, tag) == block
        for pending_receive in pending:
            pending_receive.wait(PATIENCE_S)


@pytest.mark.parametrize("posted_first", [True, False])
@pytest.mark.parametrize(("size", "label"), [(7, "int8[8]"), (8, "uint8[8]"), (0, ""), (5_000_000, "int8[8]")])
def test_a_mismatch_is_reported_to_both_sides(posted_first: bool, size: int, label: str) -> None:
    with talkers(2) as ends:
        waiting = ends[0].receive(empty(1), 1, 9)
        if not posted_first:
            send(ends[0], b"12345678", 1, 4, "int8[8]")
        pending = ends[1].receive(empty(size), 0, 4, label)
        if posted_first:
            send(ends[0], b"12345678", 1, 4, "int8[8]")
        expected = f"rank 0 sent 8 bytes (int8[8]) with tag 4, but rank 1 receives {size} bytes"
        for operation in (pending, waiting):
            with pytest.raises(MismatchError, match=re.escape(expected)):
                operation.wait(PATIENCE_S)
        for end in ends:
            with pytest.raises(GroupClosedError, match=re.escape(expected)):
                end.receive(empty(1), 0, 9)


def test_a_failure_fails_all_messages_of_all_communicating_ranks() -> None:
    """Large messages in flight also fail, in both directions."""
    with talkers(3) as ends:
        send(ends[2], b"known", 0)
        receive(ends[0], 5, 2)
        pending = [
            ends[2].receive(empty(8), 0, 5),
            ends[1].send(memoryview(bytes(2 * MAX_BUFFERED_BYTES)), 2, 2),  # more than the limit of buffered bytes
            ends[0].receive(empty(50 << 20), 1, 3),
            ends[0].receive(empty(1), None, 4),
            ends[1].receive(empty(8), 0, 1),
        ]
        expected = "rank 0 sent 31457280 bytes with tag 1, but rank 1 receives 8 bytes"
        with suppress(MismatchError):  # the message may be complete before rank 1 reports the mismatch
            ends[0].send(memoryview(bytes(30 << 20)), 1, 1).wait(PATIENCE_S)
        for pending_receive in pending:
            with pytest.raises(MismatchError, match=expected):
                pending_receive.wait(PATIENCE_S)


def test_the_error_for_a_missing_message_names_rank_and_tag() -> None:
    with talkers(3) as ends:
        pending = ends[0].receive(empty(4), 2, 7)
        with pytest.raises(RankLostError, match=r"no message with tag 7 .* rank 2 in 0\.05 s") as lost:
            pending.wait(0.05)
        assert lost.value.ranks == (2,)
        with pytest.raises(RankLostError, match="no message with tag 7 arrived from any rank"):
            ends[1].receive(empty(4), None, 7).wait(0)
        for end in ends[:2]:
            with pytest.raises(GroupClosedError, match="no message with tag 7 arrived"):
                end.receive(empty(4), 2, 7)


@pytest.mark.parametrize("has_talked", [True, False])
def test_waiting_ranks_detect_the_end_of_a_rank(has_talked: bool) -> None:
    with nodes(2) as made:
        infos = [node.info for node in made]
        ends = [PointToPoint(node, "all", rank, infos) for rank, node in enumerate(made)]
        if has_talked:
            send(ends[1], b"hello", 0)
            assert receive(ends[0], 5, 1) == b"hello"
        pending = ends[0].receive(empty(4), 1, 7)
        ends[1].close()
        made[1].close()
        with pytest.raises(RankLostError, match="rank 1") as lost:
            pending.wait(PATIENCE_S)
        assert lost.value.ranks == (1,)
        assert "arrived from" not in str(lost.value)
        with pytest.raises(GroupClosedError, match="rank 1"):
            ends[0].receive(empty(4), 1, 8)
        with pytest.raises(GroupClosedError, match="rank 1"):
            ends[0].send(memoryview(bytes(1 << 24)), 1, 0)
        ends[0].close()


def test_messages_sent_before_the_end_are_received() -> None:
    for _ in range(20):
        with talkers(2) as ends:
            send(ends[0], b"hi", 1)
            pending = ends[0].receive(empty(1000), 1, 1)
            send(ends[1], bytes(1000), 0, 1)
            ends[1].close()
            assert pending.wait(PATIENCE_S) == 1


def test_a_receive_from_any_rank_waits_until_all_other_ranks_have_left() -> None:
    with talkers(3) as ends:
        for rank in (1, 2):
            send(ends[rank], b"x", 0)
            receive(ends[0], 1, rank)
        pending = ends[0].receive(empty(4), None, 1)
        ends[1].close()
        send(ends[2], b"last", 0, 1)
        assert pending.wait(PATIENCE_S) == 2
        pending = ends[0].receive(empty(4), None, 1)
        ends[2].close()
        with pytest.raises(RankLostError) as lost:
            pending.wait(PATIENCE_S)
        assert lost.value.ranks == (1, 2)


def test_close_ends_pending_messages() -> None:
    with talkers(2) as ends, ThreadPoolExecutor(2) as pool:
        receives = [ends[0].receive(empty(4), 1, tag) for tag in range(2)]
        unawaited = ends[0].receive(empty(4), None, 9)
        sending = ends[0].send(memoryview(bytes(200 << 20)), 1, 0)
        waiting = [pool.submit(receive.wait, PATIENCE_S) for receive in receives]
        ends[0].close()
        ends[0].close()
        for future in waiting:
            with pytest.raises(GroupClosedError):
                future.result(PATIENCE_S)
        for pending in (unawaited, sending):
            with pytest.raises(GroupClosedError):
                pending.wait(0)
        with pytest.raises(GroupClosedError):
            ends[0].send(memoryview(b""), 1, 0)
        with pytest.raises(GroupClosedError):
            ends[0].receive(empty(0), 1, 0)


def test_many_threads_of_one_rank_communicate() -> None:
    num, rounds = 6, 50
    with talkers(2) as ends:

        def talk(number: int) -> None:
            rank, tag = divmod(number, num)
            for turn in range(rounds):
                data = b"%d %03d" % (tag, turn)
                if rank == 0:
                    send(ends[0], data, 1, tag)
                    assert receive(ends[0], len(data), 1, tag) == data
                else:
                    assert receive(ends[1], len(data), 0, tag) == data
                    send(ends[1], data, 0, tag)

        on_ranks(2 * num, talk)


@pytest.mark.parametrize("nbytes", [1 << 62, (1 << 64) - 1])
@pytest.mark.parametrize("is_posted_first", [True, False])
def test_a_message_of_an_impossible_size_closes_the_connection(nbytes: int, is_posted_first: bool) -> None:
    with nodes(2) as made:
        infos = [node.info for node in made]
        end = PointToPoint(made[0], "all", 0, infos, max_buffered_bytes=100)
        posted = [end.receive(empty(4), 1, 7)] if is_posted_first else []
        with made[1].connect(infos[0], "all", 1, "p2p", soon()) as connected:
            connected.send(pack(MESSAGE, 8, nbytes, ""))
            threading.Event().wait(0.0 if posted else 0.1)  # wait until the sender waits for room
            posted = posted or [end.receive(empty(4), 1, 7)]
            with pytest.raises(RankLostError, match=rf"message of {nbytes} bytes from rank 1"):
                posted[0].wait(PATIENCE_S)
        end.close()


def test_unsendable_arrays_are_rejected_immediately() -> None:
    with talkers(2) as ends:
        gaps = view(np.zeros((4, 4), np.float32)[:, ::2])
        calls: list[Callable[[], Pending]] = [
            lambda: ends[0].send(memoryview(b"x"), 2, 0),
            lambda: ends[0].send(memoryview(b"x"), 1, 1 << 63),
            lambda: ends[0].send(gaps, 1, 0),
            lambda: ends[0].send(memoryview(b"x"), 1, 0, "w" * 41),
            lambda: ends[0].receive(memoryview(b"x"), 1, 0),
            lambda: ends[0].receive(empty(1), -1, 0),
        ]
        for call in calls:
            with pytest.raises(UsageError):
                call()
