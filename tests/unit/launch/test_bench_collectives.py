"""The benchmark of collectives: its arguments, its check of the results, and its table."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.bench import other_load as _bench_load
from paceline.bench.buffers import Buffers
from paceline.bench.collectives import (
    DEFAULT_SIZES,
    OPS,
    BenchPlan,
    Measurement,
    OtherLoad,
    bench_collectives,
    choose_peers,
    format_absent,
    format_footer,
    format_header,
    format_row,
    format_size,
    parse_sizes,
    plan_sizes,
)
from paceline.bench.peers import PacelineLibrary
from paceline.errors import UsageError


def measurement(peer: str, median_us: float, *, num_bytes: int = 1 << 20, algorithm: str = "") -> Measurement:
    return Measurement(
        op="all_reduce",
        bytes=num_bytes,
        ranks=2,
        peer=peer,
        algorithm=algorithm,
        median_us=median_us,
        low_us=median_us * 0.9,
        high_us=median_us * 1.2,
    )


def test_sizes_are_read() -> None:
    assert parse_sizes("4,1K, 16k ,2M,1G") == [4, 1024, 16_384, 2 << 20, 1 << 30]
    assert parse_sizes(DEFAULT_SIZES)[-1] == 100 << 20


@pytest.mark.parametrize("text", ["", ",", "4,,8", "x", "4X", "-4", "0", "1.5K", "K", "4 K", "٣", "1KB"])
def test_invalid_sizes_are_rejected(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--sizes .*: got .*, expected bytes such as 4, 16K or 100M") as caught:
        parse_sizes(text)
    assert "\n" not in str(caught.value)


def test_formatted_sizes_equal_the_parsed_text() -> None:
    for text in ("4", "1K", "1000", "16K", "1M", "100M", "1025", "3G"):
        assert format_size(parse_sizes(text)[0]) == text
    assert format_size(0) == "0"


def test_sizes_fit_the_operation() -> None:
    assert plan_sizes("4,8,1K", op="all_reduce", ranks=3, dtype="float32") == (4, 8, 1024)
    assert plan_sizes("4,8,1K", op="all_gather", ranks=3, dtype="float32") == (12, 1032)
    assert plan_sizes(None, op="all_reduce", ranks=2, dtype="int64")[:2] == (8, 1024)
    assert plan_sizes(None, op="barrier", ranks=2, dtype="float32") == (0,)
    with pytest.raises(UsageError, match="6 bytes is not a multiple of 4, the size of float32"):
        plan_sizes("6", op="all_reduce", ranks=2, dtype="float32")
    with pytest.raises(UsageError, match="a barrier moves no data"):
        plan_sizes("4", op="barrier", ranks=2, dtype="float32")


def test_wrong_plans_are_refused() -> None:
    with pytest.raises(UsageError, match="--op all_redcue: expected one of all_reduce, "):
        BenchPlan(op="all_redcue", sizes=(4,))
    with pytest.raises(UsageError, match="--dtype float8: expected one of float32, "):
        BenchPlan(dtype="float8", sizes=(4,))
    with pytest.raises(UsageError, match="--ranks 1: expected at least 2"):
        BenchPlan(ranks=1, sizes=(4,))
    with pytest.raises(UsageError, match="--peer nccl: expected one of paceline, gloo, mpi"):
        choose_peers(["nccl"])
    with pytest.raises(UsageError, match="of memory for 1024T"):
        next(bench_collectives(BenchPlan(sizes=(1 << 50,), peers=("paceline",))))
    with pytest.raises(UsageError, match=r"^1000000 ranks need about 62500\.0 GiB of memory for 4"):
        next(bench_collectives(BenchPlan(ranks=1_000_000, sizes=(4,), peers=("paceline",))))


def test_paceline_is_always_among_the_peers() -> None:
    assert choose_peers(["paceline"]) == (("paceline",), {})
    chosen, absent = choose_peers(None)
    assert chosen[0] == "paceline"
    assert sorted([*chosen[1:], *absent]) == ["gloo", "mpi"]


def test_a_row_has_every_figure_under_the_column_name() -> None:
    measured = [measurement("paceline", 100.0, algorithm="direct"), measurement("gloo", 1234.5)]
    header, row = format_header(["gloo", "mpi"]), format_row(measured, ["gloo", "mpi"])
    assert row.split() == ["1M", "100.0", "15%", "10.49", "direct", "1,234.5", "15%", "12.3", "-", "-", "-"]
    assert len(header) == len(row)
    for name, figure in (("size", "1M"), ("paceline µs", "100.0"), ("gloo µs", "1,234.5"), ("GB/s", "10.49")):
        assert header.index(name) + len(name) == row.index(figure) + len(figure)


def test_a_barrier_has_no_bandwidth() -> None:
    assert format_row([measurement("paceline", 2.5, num_bytes=0)], []).split() == ["0", "2.50", "15%", "-", "-"]


def test_json_has_the_documented_keys() -> None:
    found = measurement("gloo", 5.0).as_json()
    assert found == {
        "op": "all_reduce", "bytes": 1 << 20, "ranks": 2, "peer": "gloo", "algorithm": "", "median_us": 5.0,
    }  # fmt: skip


def test_measurements_are_reported() -> None:
    text = format_footer(BenchPlan(ranks=4, sizes=(4,)), 0.125)
    assert text.startswith("all_reduce of float32, in place; 4 ranks on ")
    assert "Medians over 9 interleaved rounds" in text
    assert "used 12% of the cores' time" in text
    assert format_absent("mpi", "not installed").startswith("Open MPI is not in the table: not installed")


def test_the_load_of_other_programs_excludes_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"busy": 10.0, "own": 1.0, "clock": 100.0}
    monkeypatch.setattr(_bench_load, "busy_s", lambda: seconds["busy"])
    monkeypatch.setattr(_bench_load, "own_s", lambda: seconds["own"])
    monkeypatch.setattr("time.monotonic", lambda: seconds["clock"])
    monkeypatch.setattr("psutil.cpu_count", lambda: 2)
    load = OtherLoad()
    seconds |= {"busy": 14.0, "own": 2.0, "clock": 103.0}
    assert load.share() == pytest.approx(0.5)


@pytest.mark.parametrize("op", OPS[:-1])
def test_the_check_rejects_a_missing_result(op: str) -> None:
    for rank in range(3):
        buffers = Buffers(op, 1200, "float32", rank, 3)
        buffers.fill()
        if op != "broadcast" or rank != buffers.root:
            assert not buffers.is_right()
        buffers.clear()
        assert not buffers.given.any()
        assert not buffers.result.any()


def test_the_check_rejects_parts_in_the_wrong_order() -> None:
    ranks = [Buffers("all_to_all", 1200, "float32", rank, 3) for rank in range(3)]
    for buffers in ranks:
        buffers.fill()
    for buffers in ranks:
        parts = [np.split(other.given, 3)[buffers.rank] for other in ranks]
        buffers.result[...] = np.concatenate(parts)
        assert buffers.is_right()
        buffers.result[...] = np.concatenate(parts[::-1])
        assert not buffers.is_right()


def test_every_operation_can_be_called() -> None:
    from paceline.collectives import init

    with init(rank=0, world_size=1) as group:
        for op in OPS:
            buffers = Buffers(op, 0 if op == "barrier" else 400, "float32", 0, 1)
            buffers.fill()
            PacelineLibrary(group).prepare(op, buffers)()
            assert buffers.is_right(), op
