"""Stacks of processes and their last operations: the buffer, the groups of equal stacks, and PyTorch's format."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.waiting import join

from paceline.errors import PacelineError, UsageError
from paceline.observe.stuck.jobs import find_jobs, start_job
from paceline.observe.stuck.processes import WatchedProcess, find_start, flight_recorder, read_processes, unwatch, watch
from paceline.observe.stuck.recorder import (
    BUFFER_BYTES,
    COLLECTIVE,
    MESSAGE,
    NUM_EVENTS,
    REQUEST,
    FlightRecorder,
    RecordedEvent,
    RecordedGroup,
    RecordedOperation,
    read_events,
)
from paceline.observe.stuck.report import describe, format_stacks, name_processes
from paceline.observe.stuck.stacks import ProcessState, StackFrame, collect, parse_stacks
from paceline.observe.stuck.torch_files import to_torch_format

_REDUCE = RecordedOperation(COLLECTIVE, "all_reduce", 0, "float32", (1000,), "sum")
_GROUPS = {0: RecordedGroup(0, "world", (0, 1, 2, 3))}
_TEXT = """Thread 0x00007f01 (most recent call first):
  File "/x/threading.py", line 10 in wait
  File "/x/threading.py", line ??? in run

Current thread 0x0000ab02 (most recent call first):
  File "/home/a b/train.py", line 7 in <lambda>
  File "/home/a b/train.py", line 20 in <module>
"""


def test_the_buffer_contains_the_last_operations() -> None:
    buffer = mmap.mmap(-1, BUFFER_BYTES)
    recorder = FlightRecorder(buffer)
    for sequence in range(1, NUM_EVENTS + 11):
        number = recorder.begin_collective(_REDUCE.encode(), sequence)
        recorder.end(number, has_failed=sequence == NUM_EVENTS)
    running = recorder.begin(RecordedOperation(REQUEST, "pull", -1, "w", (16,), "", 1).encode(), 7, 500, 3)
    recorder.end(1)  # the event was overwritten, so another event must not end
    events = read_events(buffer[:])
    assert len(events) == NUM_EVENTS
    assert [event.sequence for event in events[:-1]] == list(range(12, NUM_EVENTS + 11))
    assert [event.sequence for event in events if event.end_ns < 0] == [NUM_EVENTS]
    assert events[0].operation == _REDUCE
    assert events[0].count == 11
    assert events[0].start_ns <= events[0].end_ns <= time.time_ns()
    assert (events[-1].number, events[-1].end_ns) == (running, 0)
    assert describe(events[-1], {}) == "pull of 500 keys of table 'w' at server 1, request 7, iteration 3"


@pytest.mark.parametrize("name", ["x" * 500, "\N{SNOWMAN}" * 100])
def test_long_names_and_shapes_are_cut(name: str) -> None:
    buffer = mmap.mmap(-1, BUFFER_BYTES)
    FlightRecorder(buffer).begin(RecordedOperation(COLLECTIVE, name, 0, name, (2**60,) * 100).encode(), 1)
    [event] = read_events(buffer[:])
    assert name.startswith(event.operation.name)
    assert event.operation.name


def test_stacks_are_parsed_with_the_innermost_call_last() -> None:
    assert parse_stacks(_TEXT) == {
        0x7F01: (StackFrame("/x/threading.py", 0, "run"), StackFrame("/x/threading.py", 10, "wait")),
        0xAB02: (StackFrame("/home/a b/train.py", 20, "<module>"), StackFrame("/home/a b/train.py", 7, "<lambda>")),
    }


def _state(name: str, *frames: StackFrame, end_ns: int = 0, sequence: int = 5, problem: str = "") -> ProcessState:
    event = RecordedEvent(1, _REDUCE, time.time_ns() - 10**9, end_ns, sequence)
    return ProcessState(WatchedProcess(name, 1, "", 9), {9: frames}, problem, [event], _GROUPS)


def test_processes_with_equal_stacks_are_one_group_and_the_different_rank_is_last() -> None:
    inside = StackFrame(f"{sys.prefix}/lib/site-packages/torch/distributed/x.py", 3, "wait")
    waiting = (StackFrame("/train.py", 20, "main"), StackFrame(f"{sys.prefix}/lib/site-packages/torch/y.py", 1, "call"))
    ranks = [_state(f"rank {rank}", *waiting, *[inside] * rank) for rank in (3, 0, 1, 5)]
    different = _state("rank 2", StackFrame("/train.py", 18, "load"), end_ns=time.time_ns(), sequence=4)
    silent = _state("server 0", problem="it is stopped")
    text = format_stacks([different, silent, *ranks])
    blocks = [block.splitlines() for block in text.split("\n\n")]
    assert [block[0] for block in blocks] == ["ranks 0-1, 3, 5", "rank 2", "server 0"]
    assert blocks[0][1] == "  in all_reduce(float32[1000], sum), call 5 of group 'world', for 1.0 s"
    assert blocks[0][2:] == ["  /train.py, line 20, in main"]
    assert blocks[1][1].startswith("  in no operation; the last was all_reduce(float32[1000], sum), call 4 of group")
    assert blocks[2][-1] == "  no stack: it is stopped"
    assert text.count("thread") == 0
    assert "main thread" in format_stacks([different], is_full=True)


def test_different_operations_with_equal_stacks_are_named() -> None:
    frame = StackFrame("/train.py", 20, "main")
    text = format_stacks([_state("rank 0", frame), _state("rank 1", frame, sequence=6), _state("rank 2", frame)])
    assert "  ranks 0, 2: in all_reduce(float32[1000], sum), call 5" in text
    assert "  rank 1: in all_reduce(float32[1000], sum), call 6" in text


def test_names_of_one_process_and_of_processes_without_numbers() -> None:
    assert name_processes([_state("scheduler")]) == "scheduler"
    assert name_processes([_state("driver"), _state("driver")]) == "driver, driver"


def test_messages_name_the_other_rank() -> None:
    event = RecordedEvent(1, RecordedOperation(MESSAGE, "recv", 0, "int64", (3,), "", -1), 0, 0, 2)
    assert describe(event, _GROUPS) == "recv(int64[3]) from any rank, message 2 of group 'world'"


def test_a_process_writes_its_stack_while_it_holds_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    job = start_job("tcp://127.0.0.1:1234")
    assert job is not None
    with job:
        watch("rank 3", job.folder)
        job.add("rank 3", os.getpid())  # does not replace the description that the process has written
        job.add("rank 4", os.getppid())
        number = flight_recorder().begin_collective(_REDUCE.encode(), 1)
        states: list[list[ProcessState]] = []
        done = threading.Event()

        def request() -> None:
            states.append(collect([job.folder]))
            done.set()

        thread = threading.Thread(target=request)
        thread.start()
        while not done.wait(0.01):
            sum(range(1_000_000))
        join(thread)
        own, other = states[0]
        assert (own.process.name, own.problem) == ("rank 3", "")
        assert any(frame.file == __file__ for frame in own.main_stack)
        assert any(event.number == number and event.end_ns == 0 for event in own.events)
        assert "has not imported torch" in other.problem
        assert [found.info.scheduler for found in find_jobs("localhost:1234")] == ["127.0.0.1:1234"]
        assert [found.folders for found in find_jobs(str(os.getpid()))] == [(job.folder,)]
        unwatch()
    assert not list(tmp_path.iterdir())


def test_a_process_that_has_ended_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    job = start_job()
    assert job is not None
    with job:
        job.add("rank 0", 2**22 + 1)
        assert [process.name for process in read_processes(job.folder)] == ["rank 0"]
        assert collect([job.folder]) == []


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
def test_the_id_of_an_ended_process_may_belong_to_another_process() -> None:
    assert WatchedProcess("rank 0", os.getpid(), find_start(os.getpid())).is_alive()
    assert not WatchedProcess("rank 0", os.getpid(), "1").is_alive()


def test_bad_targets_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(PacelineError, match="no job runs on this machine"):
        find_jobs(None)
    with pytest.raises(UsageError, match="there is no process with this id"):
        find_jobs(str(2**22 + 1))
    with pytest.raises(UsageError, match=rf"process {os.getpid()} \(.*\) belongs to no job"):
        find_jobs(str(os.getpid()))
    with pytest.raises(UsageError, match="no process of a cluster with this scheduler"):
        find_jobs("10.0.0.1:7337")
    with pytest.raises(UsageError, match="no process of a cluster with this scheduler"):
        find_jobs("²")  # a digit, but no number
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(UsageError, match=r"belongs to user .*\. Run the command as this user"):
        find_jobs(str(os.getpid()))


def test_the_format_of_pytorch_has_sizes_dtypes_and_states() -> None:
    group = {0: RecordedGroup(0, "part", (1, 3))}
    events = [
        RecordedEvent(8, RecordedOperation(COLLECTIVE, "all_gather", 0, "float32", (3, 2)), 5_000_000, 7_000_000, 1, 4),
        RecordedEvent(9, RecordedOperation(MESSAGE, "send", 0, "float32", (3,), "", 1), 1, 0, 1),
        RecordedEvent(10, RecordedOperation(COLLECTIVE, "reduce_scatter (uneven)", 0, "int64", (2, 1, 1)), 1, -5, 2, 5),
        RecordedEvent(11, RecordedOperation(COLLECTIVE, "barrier", 0), 1, 0, 3, 6),
        RecordedEvent(12, RecordedOperation(COLLECTIVE, "all_reduce", 7, "float32"), 1, 0, 3, 7),
    ]
    content = to_torch_format(events, group)
    assert content["pg_config"] == {"part": {"name": "part", "desc": "undefined", "ranks": "[1, 3]"}}
    assert content["pg_status"]["part"] == {
        "last_enqueued_collective": 3,
        "last_started_collective": 3,
        "last_completed_collective": 1,
    }
    gather, scatter, barrier = content["entries"]
    assert (gather["profiling_name"], gather["state"], gather["duration_ms"]) == ("gloo:all_gather", "completed", 2.0)
    assert (gather["input_sizes"], gather["output_sizes"]) == ([[3, 2]], [[6, 2]])
    assert (gather["input_dtypes"], gather["record_id"], gather["collective_seq_id"]) == (["Float"], 4, 1)
    assert (scatter["profiling_name"], scatter["state"]) == ("gloo:reduce_scatter_v", "started")
    assert (barrier["profiling_name"], barrier["input_sizes"]) == ("gloo:barrier", [])


def test_a_child_of_a_rank_is_not_shown_as_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = "from paceline.observe.stuck.processes import watch_rank; watch_rank(); input()"
    job = start_job()
    assert job is not None
    with job:
        variables = {**os.environ, **job.variables, "RANK": "1", "WORLD_SIZE": "2"}
        command = [sys.executable, "-c", program]
        ranks: list[subprocess.Popen[bytes]] = []
        for _ in range(2):
            ranks.append(subprocess.Popen(command, env=variables, stdin=subprocess.PIPE))
            while not read_processes(job.folder):
                assert ranks[0].poll() is None
        ranks[1].communicate(b"\n")
        assert [(process.name, process.pid) for process in read_processes(job.folder)] == [("rank 1", ranks[0].pid)]
        ranks[0].communicate(b"\n")


def test_names_that_are_not_utf8_are_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["paceline", "run", "\udcff.py", "\x1b[31m"])
    job = start_job()
    assert job is not None
    with job:
        assert [found.info.command for found in find_jobs(None)] == [r"paceline run '\udcff.py' '\x1b[31m'"]


def test_files_of_a_script_that_closes_all_descriptors_receive_no_stack(tmp_path: Path) -> None:
    program = """
import os, sys
from paceline.observe.stuck.processes import watch_rank
watch_rank()
os.closerange(3, 200)
files = [open(f"{sys.argv[1]}/{number}", "wb") for number in range(10)]
print("ready", flush=True)
input()
"""
    job = start_job()
    assert job is not None
    with job:
        variables = {**os.environ, **job.variables, "RANK": "0", "WORLD_SIZE": "1"}
        command = [sys.executable, "-c", program, str(tmp_path)]
        with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
            assert rank.stdout is not None
            rank.stdout.readline()
            [state] = collect([job.folder])
            rank.communicate(b"\n")
        assert not state.problem
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 0


def test_the_reason_for_a_missing_stack_is_shown(tmp_path: Path) -> None:
    program = """
import faulthandler, sys, threading
from paceline.observe.stuck.processes import STACK_SIGNAL, watch_rank
watch_rank()
if sys.argv[1] == "threads":
    for _ in range(100):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
else:
    faulthandler.unregister(STACK_SIGNAL)
print("ready", flush=True)
input()
"""
    job = start_job()
    assert job is not None
    with job:
        for number, reason in enumerate(("threads", "handler")):
            variables = {**os.environ, **job.variables, "RANK": str(number), "WORLD_SIZE": "2"}
            command = [sys.executable, "-c", program, reason]
            with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
                assert rank.stdout is not None
                rank.stdout.readline()
                [state] = collect([job.folder])
                rank.communicate(b"\n")
            assert f"more than 100 {reason}" in state.problem or f"removed the {reason}" in state.problem
