"""Pure parts of the executor: the responsible rank of a failure, and messages in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.collectives.aborts import Abort
from paceline.collectives.calls import CollectiveCall
from paceline.collectives.network.blocks import collide, remaining_overlaps
from paceline.collectives.network.culprits import Status, find_culprits
from paceline.collectives.network.frames import Heads, MessageKind, Scanner, pack_abort
from paceline.errors import ProtocolError

CALL = CollectiveCall("barrier")


@pytest.mark.parametrize(
    ("answers", "guilty"),
    [
        ({1: Status(17, CALL, (2,)), 2: Status(16, None, ()), 3: Status(17, CALL, (1,))}, (2,)),
        ({1: Status(17, CALL, (2,)), 2: None, 3: Status(16, None, ())}, (2, 3)),
        # This rank is still in the earlier call; the rank that did not join that call is at fault.
        ({1: Status(16, CALL, (2,)), 2: Status(15, None, ()), 3: Status(17, CALL, (1,))}, (2,)),
        ({1: Status(16, CALL, (2,)), 2: Status(16, CALL, ()), 3: Status(17, CALL, (1,))}, (2,)),
        ({1: Status(16, CALL, (2,)), 2: Status(16, CALL, (1,)), 3: Status(17, CALL, (1,))}, (1, 2)),
        # No rank is late: the problem is between this rank and the awaited ranks.
        ({1: Status(17, CALL, (0,)), 2: Status(17, None, ()), 3: Status(18, CALL, (0,))}, (1,)),
        ({1: Status(17, CALL, (2,)), 2: Status(-1, None, ()), 3: Status(17, None, ())}, (2,)),
    ],
)
def test_the_responsible_rank_follows_from_the_states_of_the_ranks(
    answers: dict[int, Status | None], guilty: tuple[int, ...]
) -> None:
    assert tuple(find_culprits(answers, 17, (1,))) == guilty


def test_description_of_a_responsible_rank() -> None:
    def text_of(status: Status | None) -> str:
        return find_culprits({1: status}, 17, (1,))[1]

    assert text_of(Status(16, None, ())) == "has not called it (it finished call 16 and is not in a collective)"
    assert text_of(Status(-1, None, ())) == "has not called it (it has made no call yet)"
    assert (
        text_of(Status(16, CALL, (3,))) == "has not called it (it is still in call 16, barrier() and waits for rank 3)"
    )
    assert "does not answer" in text_of(None)


@given(st.lists(st.integers(0, 100), max_size=5), st.lists(st.integers(1, 200), min_size=1, max_size=20))
def test_messages_are_found_however_the_bytes_are_divided(bodies: list[int], cuts: list[int]) -> None:
    heads = Heads(CALL, 3)
    abort = Abort("lost", "text", (1, 2), {4: CALL}, 3)
    stream = b"".join(heads.head(nbytes) + b"x" * nbytes for nbytes in bodies) + pack_abort(abort)
    scanner = Scanner()
    at = index = 0
    while at < len(stream):
        scanner.feed(stream[at : at + cuts[index % len(cuts)]])
        at += cuts[index % len(cuts)]
        index += 1
    assert [frame.header.nbytes for frame in scanner.frames] == [*bodies, 0]
    assert scanner.frames[-1].header.kind == MessageKind.ABORT


def test_a_scanner_may_start_within_the_body_of_a_message() -> None:
    scanner = Scanner(skip=5)
    scanner.feed(b"abc")
    scanner.feed(b"de" + Heads(CALL, 1).head(0))
    assert len(scanner.frames) == 1
    with pytest.raises(ProtocolError, match="magic"):
        scanner.feed(b"z" * 40)


ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=4).map(
    lambda spans: [(start, start + nbytes) for start, nbytes in spans]
)


@given(ranges, ranges)
def test_collisions_equal_shared_bytes(written: list[tuple[int, int]], read: list[tuple[int, int]]) -> None:
    bytes_written = [byte for span in written for byte in range(*span)]
    bytes_read = {byte for span in read for byte in range(*span)}
    expected = len(set(bytes_written)) < len(bytes_written) or bool(bytes_read & set(bytes_written))
    assert collide(written, read) == expected


@given(ranges, st.integers(0, 30), st.integers(0, 30), st.integers(1, 10))
def test_remaining_bytes_of_a_message_overlap_a_range(
    spans: list[tuple[int, int]], done: int, low: int, nbytes: int
) -> None:
    left = [byte for span in spans for byte in range(*span)][done:]
    assert remaining_overlaps(spans, done, low, low + nbytes) == bool(set(left) & set(range(low, low + nbytes)))
