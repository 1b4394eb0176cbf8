"""Links between the ranks of a group: created when needed, closed when a rank leaves."""

from __future__ import annotations

import os
import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from tests.waiting import in_thread

from paceline.collectives.network.mesh import Link, Mesh
from paceline.errors import AuthenticationError, GroupClosedError, RankLostError, UsageError
from paceline.meeting.node import Node, NodeInfo

from .ranks import TOKEN, meshes, nodes, on_ranks, soon


def send_all(link: Link, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[link.send_nowait([view]) :]


def receive_all(link: Link, size: int) -> bytes:
    got = bytearray(size)
    view = memoryview(got)
    while view:
        view = view[link.receive_nowait(view) :]
    return bytes(got)


def without_unix(info: NodeInfo) -> NodeInfo:
    return msgspec.structs.replace(info, endpoint=msgspec.structs.replace(info.endpoint, unix=None))


@pytest.mark.parametrize("unix", [True, False])
def test_every_rank_reaches_every_other_rank(unix: bool) -> None:
    size = 4
    with nodes(size) as made:
        infos = [node.info if unix else without_unix(node.info) for node in made]
        links = [Mesh(node, "all", rank, infos) for rank, node in enumerate(made)]

        def talk(rank: int) -> dict[int, bytes]:
            peers = [other for other in range(size) if other != rank]
            for other in peers:
                send_all(links[rank].link(other, soon()), b"%d to %d" % (rank, other))
            return {other: receive_all(links[rank].link(other, soon()), 6) for other in peers}

        for rank, got in enumerate(on_ranks(size, talk)):
            assert got == {other: b"%d to %d" % (other, rank) for other in range(size) if other != rank}
        assert [link.rank for link in links[0].connected()] == [1, 2, 3]
        number = links[0].link(1, soon()).fileno()
        assert not os.get_blocking(number)
        with socket.socket(fileno=os.dup(number)) as connected:
            assert connected.family == (socket.AF_UNIX if unix else socket.AF_INET)
        for connection in links:
            connection.close()
            connection.close()


def test_a_link_is_opened_once() -> None:
    with meshes(2) as links:
        first = on_ranks(2, lambda rank: links[rank].link(1 - rank, soon()))
        again = on_ranks(2, lambda rank: links[rank].link(1 - rank, soon()))
        assert first == again


def test_links_of_groups_and_purposes_are_separate() -> None:
    with nodes(2) as made:
        infos = [node.info for node in made]
        first = [Mesh(node, "first", rank, infos) for rank, node in enumerate(made)]
        second = [Mesh(node, "second", rank, infos) for rank, node in enumerate(made)]
        send_all(first[0].link(1, soon()), b"first")
        send_all(second[0].link(1, soon()), b"other")
        assert receive_all(second[1].link(0, soon()), 5) == b"other"
        assert receive_all(first[1].link(0, soon()), 5) == b"first"
        for link in (*first, *second):
            link.close()


def test_many_buffers_are_sent_in_several_calls() -> None:
    with meshes(2) as links:
        ends = on_ranks(2, lambda rank: links[rank].link(1 - rank, soon()))
        parts = [memoryview(bytes([number])) for number in range(200)]
        assert ends[0].send_nowait(parts) == 64
        assert receive_all(ends[1], 64) == bytes(range(64))
        assert ends[1].receive_nowait(memoryview(bytearray(1))) == 0
        assert ends[1].receive_nowait(memoryview(b"")) == 0


def test_a_full_link_accepts_no_bytes() -> None:
    with meshes(2) as links:
        ends = on_ranks(2, lambda rank: links[rank].link(1 - rank, soon()))
        block = memoryview(bytes(1 << 20))
        while ends[0].send_nowait([block]):
            pass
        assert ends[0].send_nowait([block, block]) == 0


def test_the_end_of_a_link_names_the_rank() -> None:
    with meshes(2) as links:
        ends = on_ranks(2, lambda rank: links[rank].link(1 - rank, soon()))
        ends[0].close()
        with pytest.raises(RankLostError, match="rank 0 has closed its connection") as lost:
            receive_all(ends[1], 1)
        assert lost.value.ranks == (0,)
        with pytest.raises(RankLostError, match="rank 0"):
            send_all(ends[1], bytes(1 << 20))
        with pytest.raises(GroupClosedError):
            ends[0].send_nowait([memoryview(b"x")])


def test_connecting_to_a_dead_rank_fails_immediately() -> None:
    with nodes(2) as made:
        infos = [node.info for node in made]
        links = Mesh(made[0], "all", 0, infos)
        made[1].close()
        start = time.monotonic()
        with pytest.raises(RankLostError, match="rank 1 cannot be reached") as lost:
            links.link(1, soon())
        assert lost.value.ranks == (1,)
        assert time.monotonic() - start < 20


def test_waiting_for_a_dead_rank_fails_quickly() -> None:
    with nodes(2) as made:
        infos = [node.info for node in made]
        links = Mesh(made[1], "all", 1, infos)
        made[0].close()
        with pytest.raises(RankLostError, match="rank 0 cannot be reached"):
            links.link(0, soon())


def test_the_error_at_the_deadline_names_the_missing_rank() -> None:
    with meshes(2) as links:
        with pytest.raises(RankLostError, match="rank 0 did not connect to rank 1 within 0") as lost:
            links[1].link(0, soon(0.05))
        assert lost.value.ranks == (0,)


def test_another_token_is_refused() -> None:
    stranger = Node("another token for tests")
    with nodes(1) as made:
        links = Mesh(stranger, "all", 0, [stranger.info, made[0].info])
        with pytest.raises(AuthenticationError, match="refused the token") as refused:
            links.link(1, soon())
        assert TOKEN not in str(refused.value)
        links.close()
    stranger.close()


def test_a_closed_mesh_opens_no_links_and_wakes_waiting_threads() -> None:
    with meshes(2) as links, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(links[1].link, 0, soon())
        links[1].close()
        links[0].link(1, soon())
        with pytest.raises(GroupClosedError):
            waiting.result()
        with pytest.raises(GroupClosedError):
            links[1].link(0, soon())


def test_links_to_the_own_or_an_unknown_rank_are_rejected() -> None:
    with meshes(2) as links:
        for rank in (0, 2, -1):
            with pytest.raises(UsageError):
                links[0].link(rank, soon())


def test_close_wakes_polling_threads() -> None:
    with meshes(2) as links:
        ends = on_ranks(2, lambda rank: links[rank].link(1 - rank, soon()))
        poller = select.poll()
        poller.register(ends[0].fileno(), select.POLLIN)
        with in_thread(ends[0].close):
            assert poller.poll(5000)
