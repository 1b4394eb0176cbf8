"""Lines assembled from pieces; the choice of the rank that caused a failure; when tracebacks are printed."""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.run.blame import (
    RankFailure,
    Tracebacks,
    choose_culprit,
    describe_failure,
    exit_status,
    follow_names,
    is_consequence,
    last_words,
    waiting_time,
)
from paceline.launch.run.streams import Stream
from paceline.launch.screen import LineSplitter, Screen, label

_START = b"Traceback (most recent call last):"
_FRAME = [b'  File "x.py", line 1, in <module>', b"    f()"]


def traceback(error: bytes) -> list[bytes]:
    return [_START, *_FRAME, error]


OWN = traceback(b"ValueError: bad")
LOST = traceback(b"paceline.errors.RankLostError: rank 1 is gone")


def lost_to(rank: int) -> list[bytes]:
    return traceback(b"paceline.torch.backend.errors.BackendRankLostError: rank %d left the group" % rank)


LOST_TO_1 = lost_to(1)


def feed(shown: Tracebacks, rank: int, lines: list[bytes], now: float) -> list[bytes]:
    return [line for chunk in lines for line in shown.feed(rank, chunk, now)]


class TestLines:
    @given(st.binary(max_size=200).map(lambda data: data.replace(b"\r", b"")), st.lists(st.integers(0, 200)))
    def test_no_output_is_lost_however_it_is_divided(self, data: bytes, cuts: list[int]) -> None:
        splitter, lines = LineSplitter(), []
        places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
        for start, end in itertools.pairwise(places):
            lines += splitter.feed(data[start:end])
        lines += splitter.flush()
        assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
        assert b"".join(lines) == (data if not data or data.endswith(b"\n") else data + b"\n")

    def test_only_the_last_state_of_a_progress_bar_is_shown(self) -> None:
        splitter = LineSplitter()
        assert splitter.feed(b"\r10%") == []
        assert splitter.glimpse() == [b"10%\n"]
        assert splitter.glimpse() == []  # no new output
        assert splitter.feed(b"\r50%\r") == []
        assert splitter.glimpse() == [b"50%\n"]
        assert splitter.feed(b"100%\nnext\r\n") == [b"100%\n", b"next\n"]
        assert splitter.feed(b"\r100%") == []
        assert splitter.glimpse() == [b"100%\n"]
        assert splitter.feed(b"\n") == []  # this line has been shown
        assert splitter.feed(b"bar\r   \r\nplain\n\n") == [b"plain\n", b"\n"]

    def test_an_endless_line_is_not_stored_completely(self) -> None:
        splitter = LineSplitter()
        lines = splitter.feed(b"x" * (3 << 20))
        assert sum(map(len, lines)) >= 2 << 20
        bar = LineSplitter()
        for _ in range(100):
            bar.feed(b"\r" + b"#" * 100_000)
        assert bar.glimpse() == [b"#" * 100_000 + b"\n"]

    def test_labels(self) -> None:
        assert label("rank 3", 3, coloured=False) == b"[rank 3] "
        assert label("rank 0", 0, coloured=True) != label("rank 0", 1, coloured=True)


class TestBlame:
    def test_the_first_failure_that_is_no_consequence_is_the_cause(self) -> None:
        lost, own = RankFailure(0, 1, tuple(LOST)), RankFailure(1, 1, tuple(OWN))
        assert choose_culprit([lost, own]) is own
        assert choose_culprit([lost]) is None
        assert choose_culprit([RankFailure(2, -9, tuple(LOST)), own]).rank == 2  # type: ignore[union-attr]
        assert choose_culprit([RankFailure(2, 3, ()), own]).rank == 2  # type: ignore[union-attr]

    def test_errors_about_other_ranks_are_consequences(self) -> None:
        for text in (
            b"paceline.torch.backend.errors.BackendRankLostError: rank 1 is gone",
            b"GroupClosedError: x",
            b"paceline.errors.ConnectionLostError: x",
            b"paceline.errors.AddressError: cannot reach tcp://10.0.0.1:29500: no process listens there",
            b"RuntimeError: [/pair.cc:534] Connection closed by peer [127.0.0.1]:1",
            b"paceline.horovod.errors.HorovodInternalError: Horovod has been shut down: a rank has called shutdown()",
        ):
            assert is_consequence(RankFailure(0, 1, tuple(traceback(text)))), text
        for text in (b"paceline.errors.MismatchError: x", b"KeyError: 'RankLostError'", b"MyRankLostError: x"):
            assert not is_consequence(RankFailure(0, 1, tuple(traceback(text)))), text

    @pytest.mark.parametrize(
        ("status", "output", "expected"),
        [
            (1, traceback(b"ValueError: bad"), False),
            (1, [], False),
            (3, [], False),
            (3, LOST_TO_1, True),  # the program handled the error and chose its exit status
            (-9, LOST_TO_1, False),
            (-11, [], False),
            (-6, [*traceback(b"RuntimeError: Connection closed by peer [::1]:1"), b"terminate called"], True),
            (-6, [b"terminate called after throwing an instance of 'std::bad_alloc'"], False),
            (1, traceback(b"MemoryError: no room"), False),
            (1, traceback(b"paceline.errors.DeadlineError: rank 1 did not answer in 5 s"), True),
            (1, traceback(b"torch.distributed.DistNetworkError: Failed to recv"), True),
            (1, traceback(b"RuntimeError: Broken pipe"), True),
            (1, traceback(b"paceline.errors.NonFiniteError: rank 1 has pushed NaN"), True),
            (1, traceback(b"paceline.errors.NonFiniteError: rank 0 has pushed NaN"), False),
            (1, traceback(b"ValueError: rank 1 is bad"), False),
            (1, [*OWN, b"Exception ignored in: <function f>", *LOST_TO_1], False),
            (1, [*OWN, b"Error in atexit._run_exitfuncs:", *LOST_TO_1], False),
            (1, [b"Exception in thread Thread-1:", *LOST_TO_1, *OWN], False),
            (1, [b"Exception in thread Thread-1:", *LOST_TO_1], True),
        ],
    )
    def test_the_cause_of_a_failure_of_rank_0(self, status: int, output: list[bytes], expected: bool) -> None:
        assert is_consequence(RankFailure(0, status, tuple(output))) is expected

    @pytest.mark.parametrize(
        ("failures", "living", "expected"),
        [
            # Rank 0 reports that it lost rank 1. Rank 1 is still ending, or has ended without a failure.
            ([(0, LOST_TO_1)], [1], (0, 10.0)),
            ([(0, LOST_TO_1)], [], (0, 1.0)),
            ([(0, LOST_TO_1)], [2], (0, 1.0)),
            ([(0, LOST)], [1, 2], (0, 10.0)),
            # All failures are consequences: the ranks named in the errors lead to the first failed rank.
            ([(0, LOST_TO_1), (1, traceback(b"ConnectionResetError: x"))], [], (1, 1.0)),
            ([(0, LOST_TO_1), (1, lost_to(2)), (2, traceback(b"BrokenPipeError: x"))], [3], (2, 1.0)),
            ([(0, LOST_TO_1), (1, lost_to(2))], [2], (1, 10.0)),
            # The errors of two ranks name each other.
            ([(0, LOST_TO_1), (1, lost_to(0))], [2], (0, 1.0)),
        ],
    )
    def test_ranks_named_in_errors_lead_to_the_cause(
        self, failures: list[tuple[int, list[bytes]]], living: list[int], expected: tuple[int, float]
    ) -> None:
        found = [RankFailure(rank, 1, tuple(output)) for rank, output in failures]
        assert choose_culprit(found) is None
        assert (follow_names(found)[0].rank, waiting_time(found, living)) == expected

    def test_the_first_error_of_a_chain_decides(self) -> None:
        chain = [b"", b"During handling of the above exception, another exception occurred:", b""]
        assert is_consequence(RankFailure(0, 1, tuple(LOST + chain + OWN)))
        assert not is_consequence(RankFailure(0, 1, tuple(OWN + chain + LOST)))
        assert not is_consequence(RankFailure(0, 1, (*LOST, b"went on", *OWN)))
        assert last_words([b"before", *OWN, *chain, *LOST, b"after"]) == [*OWN, *chain, *LOST, b"after"]
        assert last_words([*LOST, b"went on", *OWN]) == OWN

    def test_the_final_message(self) -> None:
        description = describe_failure(
            RankFailure(1, 1, tuple(OWN)), world_size=4, seconds=12.3, num_held=7, log_dir=None
        )
        assert description.startswith(
            b"paceline run: rank 1 of 4 failed with exit status 1 after 12 s; the other ranks were ended; 7"
        )
        assert description.endswith(b"Its last output:\n" + b"\n".join(OWN) + b"\n")
        description = describe_failure(RankFailure(1, -11, ()), world_size=2, seconds=1.0, num_held=0, log_dir=None)
        assert b"was killed by SIGSEGV after 1.0 s" in description
        assert (exit_status(-9), exit_status(3)) == (137, 3)

    def test_long_last_words_are_shortened(self) -> None:
        words = last_words([_START, *_FRAME * 100, b"ValueError: deep"])
        assert len(words) < 70
        assert (words[0], words[-1]) == (_START, b"ValueError: deep")


class TestTracebacks:
    def test_the_first_failure_is_printed_completely_and_later_failures_are_held(self) -> None:
        shown = Tracebacks()
        assert feed(shown, 0, OWN[:-1], 0.0) == []
        assert feed(shown, 1, [b"a warning"], 0.0) == [b"a warning"]
        assert feed(shown, 1, OWN, 0.0) == OWN  # rank 1's traceback is complete before rank 0's traceback
        assert feed(shown, 0, OWN[-1:], 0.1) == []
        assert shown.blame(1) == []
        assert feed(shown, 0, [b"more"], 0.2) == []
        assert shown.finish() == []
        assert shown.num_dropped == len(OWN) + 1

    def test_a_consequence_waits_for_the_cause(self) -> None:
        shown = Tracebacks()
        assert feed(shown, 0, LOST, 0.0) == []
        assert feed(shown, 1, OWN, 0.5) == OWN
        assert shown.overdue(0.6) == []
        shown.blame(1)
        assert shown.due() is None
        assert (shown.finish(), shown.num_dropped) == ([], len(LOST))

    def test_a_consequence_without_a_cause_is_shown(self) -> None:
        shown = Tracebacks()
        feed(shown, 0, LOST, 0.0)
        assert shown.blame(0) == LOST
        shown = Tracebacks()
        feed(shown, 0, LOST, 0.0)
        due = shown.due()
        assert due is not None
        assert shown.overdue(due) == [(0, LOST)]

    def test_the_traceback_of_a_rank_that_ended_is_shown_before_all_others_are_dropped(self) -> None:
        shown = Tracebacks()
        lost = traceback(b"torch.distributed.DistNetworkError: address already in use")
        feed(shown, 0, lost, 0.0)
        feed(shown, 1, LOST, 0.0)
        assert shown.release(0) == lost
        assert (shown.blame(None), shown.finish(), shown.num_dropped) == ([], [], len(LOST))

    def test_logged_exceptions_of_a_program_are_shown(self) -> None:
        shown = Tracebacks()
        assert feed(shown, 0, [*OWN, b"next"], 0.0) == [*OWN, b"next"]
        assert feed(shown, 1, [*OWN, b"next"], 0.1) == []
        due = shown.due()
        assert due is not None
        assert shown.overdue(due) == [(1, [b"the same traceback as rank 0\n", b"next"])]
        assert feed(shown, 1, [b"later"], due) == [b"later"]

    def test_a_traceback_that_the_user_has_seen_is_not_repeated(self) -> None:
        shown = Tracebacks()
        other = traceback(b"ValueError: another one")
        assert feed(shown, 0, OWN, 0.0) == OWN
        assert feed(shown, 1, OWN, 0.1) == feed(shown, 2, other, 0.1) == []
        assert shown.release(1) == [b"the same traceback as rank 0\n"]
        assert shown.release(2) == other

    def test_an_incomplete_traceback_is_printed(self) -> None:
        shown = Tracebacks()
        feed(shown, 0, [_START, b"  only this"], 0.0)
        assert shown.overdue(10.0) == [(0, [_START, b"  only this"])]
        feed(shown, 0, [_START], 20.0)
        assert shown.finish() == [(0, [_START])]

    def test_the_prefix_of_torch_is_removed(self, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
        for number in (0, 2):  # an elastic rank is rank 0 of its own torch.distributed
            reading, writing = os.pipe()
            shown = Tracebacks()
            stream = Stream(
                2, reading, Screen(None), is_error=True, log=None, tracebacks=shown, clock=lambda: 0.0
            )  # fmt: skip
            os.write(writing, b"".join(b"[rank%d]: %s\n" % (number, line) for line in LOST))
            os.close(writing)
            stream.close(drain=True)
            assert is_consequence(RankFailure(2, 1, tuple(stream.recent)))
            shown.blame(None)
            assert (shown.finish(), shown.num_dropped) == ([], len(LOST))
        assert capfdbinary.readouterr().err == b""
