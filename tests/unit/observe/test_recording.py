"""The recorder of a rank: phases of the training loop, and reports."""

from __future__ import annotations

import msgspec
import pytest
from tests.waiting import in_threads

from paceline.observe import recording
from paceline.observe.collector import Collector, ExchangeTimes
from paceline.observe.history import RunHistory
from paceline.observe.metrics import Samples
from paceline.observe.recording import RankReport, Recorder
from paceline.torch.strategies.step_phases import begin_exchange


class Clock:
    def __init__(self) -> None:
        self.time_s = 100.0

    def __call__(self) -> float:
        return self.time_s


def samples_of(recorder: Recorder) -> Samples:
    return {name: dict(values) for name, values in recorder.report().samples.items()}


def phases_of(recorder: Recorder) -> dict[str, float]:
    found = samples_of(recorder).get("paceline_step_phase_seconds_total", {})
    return {labels[0]: value for labels, value in found.items() if isinstance(value, float) and value}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(clock: Clock) -> Recorder:
    return Recorder(rank=1, world_size=2, clock=clock)


def test_phases_take_the_whole_time_of_the_loop(recorder: Recorder, clock: Clock) -> None:
    def batches():  # type: ignore[no-untyped-def]
        for number in range(2):
            clock.time_s += 1.0
            yield number

    for _ in recorder.steps(batches()):
        clock.time_s += 2.0
        assert recorder.enter("forward") == "other"
        clock.time_s += 4.0
        before = recorder.enter("communication")
        assert before == "forward"
        clock.time_s += 8.0
        assert recorder.enter(before) == "communication"
        clock.time_s += 16.0
    clock.time_s += 1000.0  # outside of the loop
    assert recorder.enter("optimizer") is None
    clock.time_s += 1000.0
    assert phases_of(recorder) == {"data": 2.0, "other": 4.0, "forward": 40.0, "communication": 16.0}
    [step] = samples_of(recorder)["paceline_step_seconds"].values()
    assert isinstance(step, list)
    assert (step[0], sum(step[1:])) == (62.0, 2)


def test_a_report_includes_the_running_phase(recorder: Recorder, clock: Clock) -> None:
    recorder.begin_step()
    clock.time_s += 3.0
    assert phases_of(recorder) == {"data": 3.0}
    clock.time_s += 2.0
    assert phases_of(recorder) == {"data": 5.0}
    recorder.enter("forward")
    assert phases_of(recorder) == {"data": 5.0}


def test_a_loop_that_the_program_leaves_ends(recorder: Recorder, clock: Clock) -> None:
    for _ in recorder.steps(iter([1, 2])):
        break
    clock.time_s += 5.0
    assert phases_of(recorder) == {}


def test_other_threads_do_not_change_the_phase(recorder: Recorder, clock: Clock) -> None:
    recorder.begin_step()
    in_threads(lambda: recorder.enter("communication"))
    clock.time_s += 1.0
    assert phases_of(recorder) == {"data": 1.0}


def test_hooks_of_backward_may_run_in_a_thread_of_autograd(
    recorder: Recorder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward on a GPU calls them in the device's thread, while the training loop waits."""
    monkeypatch.setattr(recording, "recorder", recorder)

    def run_hook() -> None:
        in_threads(lambda: begin_exchange(is_for_all=True))

    recorder.begin_step()
    run_hook()  # of a backward outside of the loop
    clock.time_s += 1.0
    recorder.enter("backward")
    clock.time_s += 2.0
    run_hook()
    clock.time_s += 4.0
    recorder.enter("other")
    assert phases_of(recorder) == {"data": 1.0, "backward": 2.0, "communication": 4.0}


def test_a_report_has_a_limited_number_of_names(recorder: Recorder) -> None:
    names = [f"name {number} " + 80 * "\U0001f389" for number in range(10_000)]

    def report_names() -> None:
        for name in (*names, 1000 * "n"):
            recorder.set("paceline_reported_value", 1.0, name)

    with pytest.warns(UserWarning, match="paceline_reported_value: the values of .* are not reported") as warned:
        report_names()
    assert len(warned) == 1
    recorder.set("paceline_reported_value", 2.0, names[0])
    values = samples_of(recorder)["paceline_reported_value"]
    assert values[(names[0],)] == 2.0
    assert 100 < len(values) < 1000
    assert len(msgspec.msgpack.encode(recorder.report())) < recording.MAX_REPORT_BYTES


def test_names_that_are_not_utf8_do_not_end_the_reports(recorder: Recorder) -> None:
    """A label may come from the name of a file, which need not be UTF-8."""
    with pytest.warns(UserWarning, match=r"the values of \('\\udcff',\) are not reported"):
        recorder.set("paceline_reported_value", 1.0, "\udcff")
    recorder.set("paceline_reported_value", 2.0, "\u2028 \n")
    datagram = msgspec.msgpack.encode(recorder.report())
    collector = Collector()
    collector.receive(datagram)
    assert collector.samples()["paceline_reported_value"] == {("1", "\u2028 \n"): 2.0}


def test_a_rank_that_has_ended_is_not_silent(recorder: Recorder, clock: Clock) -> None:
    collector = Collector(clock=clock)
    history = RunHistory("paceline run", clock=clock)
    recorder.add("paceline_examples_total", 5)
    collector.receive(msgspec.msgpack.encode(recorder.report(is_last=True)))
    clock.time_s += 60.0
    collector.find_silent()
    assert not collector.recent_events()
    history.write(collector.samples(), is_last=True)
    [rank] = history.state()["ranks"]
    assert (rank["rank"], rank["examples_per_s"] > 0, rank["last_seen_s"]) == (1, True, 0.0)
    collector.receive(msgspec.msgpack.encode(recorder.report()))  # the process has started again
    clock.time_s += 60.0
    collector.find_silent()
    assert [text for _, text in collector.recent_events()] == ["rank 1 has sent no report for 5 s"]


def test_a_collector_has_the_ranks_of_another_machine(recorder: Recorder, clock: Clock) -> None:
    there, here = Collector(clock=clock), Collector(clock=clock)
    recorder.add("paceline_examples_total", 5)
    recorder.arrive()
    there.receive(msgspec.msgpack.encode(recorder.report()))
    clock.time_s += 3.0
    here.add_reports(there.reports())
    samples = here.samples()
    assert samples["paceline_examples_total"] == {("1",): 5.0}
    assert samples["paceline_rank_last_seen_seconds"] == {("1",): 3.0}
    assert [report.arrivals for report, _ in here.reports()] == [()]
    assert not here.has_last_reports(of_all_machines=False)
    there.receive(msgspec.msgpack.encode(recorder.report(is_last=True)))
    here.add_reports(there.reports())
    assert here.has_last_reports(of_all_machines=False)
    assert not here.has_last_reports(of_all_machines=True)  # rank 0 has sent none
    here.receive(msgspec.msgpack.encode(Recorder(rank=0, world_size=2, clock=clock).report(is_last=True)))
    assert here.has_last_reports(of_all_machines=True)


def test_nothing_is_recorded_without_a_launcher() -> None:
    assert recording.recorder is None
    batches = iter([1])
    assert recording.steps(batches) is batches
    with recording.waiting():
        pass
    recording.flush()


def test_waits_for_the_last_rank() -> None:
    times = ExchangeTimes()

    def report(rank: int, *arrivals: tuple[int, float]) -> RankReport:
        return RankReport(rank, 3, 0, {}, arrivals)

    assert list(times.add(report(0, (1, 10.0), (2, 20.0)))) == []
    assert list(times.add(report(1, (1, 12.0)))) == []
    assert sorted(times.add(report(2, (1, 11.0), (2, 21.0)))) == [(0, 1, 2.0), (2, 1, 1.0)]
    assert sorted(times.add(report(1, (2, 20.5)))) == [(0, 2, 1.0), (1, 2, 0.5)]
    # A new process of rank 1 counts from 1, so its numbers are those of other exchanges.
    assert list(times.add(report(0, (3, 30.0)))) == list(times.add(report(2, (3, 31.0)))) == []
    assert list(times.add(RankReport(1, 3, 7, {}, ((1, 80.0), (2, 81.0), (3, 82.0))))) == []


def test_a_collector_adds_ranks_and_drops_malformed_reports(recorder: Recorder, clock: Clock) -> None:
    collector = Collector(clock=clock)
    recorder.add("paceline_examples_total", 5)
    recorder.observe("paceline_collective_seconds", 0.25, "all_reduce", "shared")
    collector.receive(msgspec.msgpack.encode(recorder.report()))
    malformed = RankReport(2, 2, 0, {"paceline_examples_total": [(("too", "many"), 1.0)], "unknown": [((), 1.0)]})
    collector.receive(msgspec.msgpack.encode(malformed))
    for datagram in (b"", b"\xff" * 20, msgspec.msgpack.encode(["text"]), msgspec.msgpack.encode([-1, 2, 0, {}])):
        collector.receive(datagram)
    clock.time_s += 4.0
    samples = collector.samples()
    assert samples["paceline_examples_total"] == {("1",): 5.0}
    [(labels, histogram)] = samples["paceline_collective_seconds"].items()
    assert labels == ("1", "all_reduce", "shared")
    assert isinstance(histogram, list)
    assert histogram[0] == 0.25
    assert samples["paceline_rank_last_seen_seconds"] == {("1",): 4.0, ("2",): 4.0}
    assert "unknown" not in samples
    collector.find_silent()
    assert not collector.recent_events()
    clock.time_s += 4.0
    collector.find_silent()
    collector.find_silent()
    collector.receive(msgspec.msgpack.encode(RankReport(2, 2, 1, {})))
    assert [text for _, text in collector.recent_events()] == [
        "rank 1 has sent no report for 5 s",
        "rank 2 has sent no report for 5 s",
        "rank 2 has a new process",
        "rank 2 reports again",
    ]
