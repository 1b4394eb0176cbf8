from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.collectives.shared.segment import Segment, SegmentError
from paceline.testing import nothing_left


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with nothing_left():
        yield


def test_two_segments_share_the_memory() -> None:
    with Segment.create(10_000) as one:
        assert not one.bytes.any()
        with Segment.open(one.path, 10_000, pid=os.getpid()) as other:
            one.bytes[9_999] = 7
            assert other.bytes[9_999] == 7
            assert other.address != one.address


def test_a_hidden_segment_cannot_be_opened_but_stays_usable() -> None:
    with Segment.create(4096) as one, Segment.open(one.path, 4096, pid=os.getpid()) as other:
        path = one.path
        one.hide()
        other.hide()
        with pytest.raises(SegmentError, match="cannot open"):
            Segment.open(path, 4096, pid=os.getpid())
        one.bytes[0] = 5
        assert other.bytes[0] == 5


def test_closing_is_idempotent() -> None:
    one = Segment.create(4096)
    one.close()
    one.close()
    assert len(one.bytes) == 0


def test_another_size_is_refused() -> None:
    with Segment.create(4096) as one, pytest.raises(SegmentError, match="has 4096 bytes, expected 8192"):
        Segment.open(one.path, 8192, pid=os.getpid())


def test_missing_shared_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(SegmentError, match=r"5 MB of shared memory \(No space left on device\)"):
        Segment.create(5 << 20)


def test_a_failed_mapping_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with Segment.create(4096) as one:

        def fail(*_: object) -> None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        with monkeypatch.context() as patched:
            patched.setattr(mmap, "mmap", fail)
            with pytest.raises(SegmentError, match="Cannot allocate memory"):
                Segment.open(one.path, 4096, pid=os.getpid())


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no os.memfd_create")
def test_only_segments_of_the_process_are_mapped(tmp_path: Path) -> None:
    plain = tmp_path / "paceline"
    plain.write_bytes(bytes(4096))
    with plain.open("r+b") as file:
        own = os.getpid()
        with pytest.raises(SegmentError, match=f"expected a path of process {own}"):
            Segment.open(str(plain), 4096, pid=own)
        with pytest.raises(SegmentError, match="not a shared memory segment"):
            Segment.open(f"/proc/{own}/fd/{file.fileno()}", 4096, pid=own)
        plain.unlink()
        with pytest.raises(SegmentError, match="not a shared memory segment"):
            Segment.open(f"/proc/{own}/fd/{file.fileno()}", 4096, pid=own)
    with Segment.create(4096) as one, pytest.raises(SegmentError, match=f"expected a path of process {own + 1}"):
        Segment.open(one.path, 4096, pid=own + 1)
