"""Simulations of whole clusters: guarantees hold, planted defects are found, runs are reproducible."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from tests.simulation.broken_rules import BREAK

import simulator
from paceline.protocol.consistency import BoundedDelay, Sequential
from paceline.protocol.iterations import Iterations
from paceline.protocol.reachability import Reachability
from simulator import FOLLOWING, KINDS, ProtocolCluster, RunSettings
from simulator.__main__ import main

SEEDS = range(15)  # `make torture` runs thousands
DEFECT_SEEDS = 200


def test_public_names() -> None:
    assert sorted(simulator.__all__) == sorted(
        ["Cluster", "FOLLOWING", "KINDS", "Outcome", "ProtocolCluster", "RunSettings", "Violation"]
    )


def test_no_guarantee_is_violated() -> None:
    outcomes = [ProtocolCluster(seed).run() for seed in SEEDS]
    assert [f"seed {outcome.seed}: {outcome.violation}" for outcome in outcomes if outcome.violation] == []
    assert sum(outcome.num_reads for outcome in outcomes) > 250
    fired = sum((outcome.fired for outcome in outcomes), Counter[str]())
    assert sum(fired[kind] for kind in (*KINDS, *FOLLOWING)) > 75


def test_many_faults_at_once() -> None:
    """Three of these seeds have found errors.

    Two schedulers published; a server that filled another one missed a removal of workers; a new scheduler waited for
    a dead server while another server drained.
    """
    for seed in (11383, 11093, 60, *range(4)):
        outcome = ProtocolCluster(seed, num_faults=24).run()
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"


def test_with_min_replicas_and_enough_servers_all_work_continues() -> None:
    """These seeds have found a deadlock: a fill and an iteration waited for each other."""
    for seed in (66, 1276, 2017, 2566, 3348, 3380, 3501):
        settings = RunSettings.draw(Random(seed))
        if settings.replicas:
            violation = ProtocolCluster(seed, settings=replace(settings, min_replicas=1)).run().violation
            num_left = len(re.findall(r"server\.", (violation or "").partition("chains")[0]))
            assert violation is None or num_left == 1, f"seed {seed}: {violation}"


def test_no_server_treats_a_live_worker_as_departed() -> None:
    """Two seeds found a worker that only a new scheduler knew. The third seed found a lease without a holder."""
    for seed in (2370, 2971, 1870):
        outcome = ProtocolCluster(seed, num_faults=24).run()
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"


def test_a_removed_worker_stays_removed() -> None:
    """This seed has found an error: only a worker had the newest view, and views of workers do not list workers."""
    assert ProtocolCluster(10214).run().violation is None


def test_a_shard_is_leased_again_when_the_worker_is_removed() -> None:
    """This seed found a scheduler that could not commit a view but leased a shard again. It was counted twice."""
    assert ProtocolCluster(6065).run().violation is None


def test_ended_voters_are_found_although_no_newer_view_names_the_voters() -> None:
    """In these seeds, a server dies, and then the scheduler dies before it commits the view without the server."""
    for seed in (3087, 3759):
        outcome = ProtocolCluster(seed, num_faults=24).run()
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"


def test_every_kind_of_fault_occurs() -> None:
    fired: Counter[str] = Counter()
    of_schedulers = ("crash-server", "crash-scheduler", "second-scheduler", "partition")  # for rare faults
    for seed in (37, 12, 18, 94, 21, *SEEDS):  # the first five seeds are usually enough
        fired += ProtocolCluster(seed, num_faults=24).run().fired
        fired += ProtocolCluster(seed, num_faults=24, faults=of_schedulers).run().fired
        if all(fired[kind] for kind in (*KINDS, *FOLLOWING)):
            return
    raise AssertionError(f"never occurred: {[kind for kind in (*KINDS, *FOLLOWING) if not fired[kind]]}")


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_fault_alone_violates_no_guarantee(kind: str) -> None:
    num_fired = 0
    for seed in range(4):
        outcome = ProtocolCluster(seed, faults=(kind,)).run()
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"
        num_fired += outcome.fired[kind]
        if num_fired > 0:
            return
    assert num_fired > 0


def test_a_cut_cable_stops_progress_unless_one_server_is_expelled(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = range(10)
    outcomes = [ProtocolCluster(seed, faults=("cable",), num_faults=4).run() for seed in seeds]
    assert [outcome.violation for outcome in outcomes if outcome.violation] == []
    assert sum(outcome.fired["expel"] for outcome in outcomes) >= 3
    monkeypatch.setattr(Reachability, "decide", lambda *_: None)
    violations = (ProtocolCluster(seed, faults=("cable",), num_faults=4).run().violation for seed in seeds)
    assert any(violation is not None and "(progress)" in violation for violation in violations)


def test_a_restarted_scheduler_recovers_a_death() -> None:
    num_restarts = 0
    for seed in range(5):
        lines: list[str] = []
        faults = ("crash-scheduler", "join-worker", "crash-worker")
        outcome = ProtocolCluster(seed, faults=faults, num_faults=24, trace=lines.append).run()
        assert outcome.violation is None
        views = re.findall(r"\bView\(term=(\d+), epoch=(\d+).*? last_incarnation=(\d+)", "\n".join(lines))
        last = [incarnation for *_, incarnation in sorted(tuple(map(int, view)) for view in views)]
        assert last == sorted(last) != []
        num_restarts += outcome.fired["crash-scheduler"]
    assert num_restarts > 5


def test_without_faults_no_message_is_resent() -> None:
    for seed in range(8):
        outcome = ProtocolCluster(seed, faults=()).run()
        assert outcome.violation is None
        assert outcome.fired["resend"] == outcome.fired["duplicate"] == outcome.fired["dead"] == 0


@pytest.mark.parametrize("promise", BREAK)
def test_a_broken_rule_is_found(promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BREAK[promise](monkeypatch)
    outcomes = (ProtocolCluster(seed).run() for seed in range(DEFECT_SEEDS))
    assert any(f"({promise})" in (outcome.violation or "") for outcome in outcomes)


def test_buckets_are_lost_if_all_servers_of_a_chain_fail() -> None:
    outcomes = [ProtocolCluster(seed, allow_loss=True).run() for seed in range(8)]
    assert [outcome.violation for outcome in outcomes if outcome.violation] == []
    assert any(outcome.lost for outcome in outcomes)


def test_a_seed_gives_the_same_run_every_time() -> None:
    for seed in (7, 8):
        lines: list[list[str]] = [[], []]
        outcomes = [ProtocolCluster(seed, trace=lines[run].append).run() for run in (0, 1)]
        assert lines[0] == lines[1]
        assert outcomes[0] == outcomes[1] == ProtocolCluster(seed).run()


def test_a_seed_gives_the_same_run_in_every_process() -> None:
    code = "from simulator import ProtocolCluster; print(ProtocolCluster(11).run().trace_hash)"
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert hashes == {f"{ProtocolCluster(11).run().trace_hash}\n"}


def test_a_violation_prints_the_replay_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    BREAK["exactly once"](monkeypatch)
    arguments = ["--seeds", "0:12", "--faults", "reset,crash-server"]
    assert main(arguments) == 1
    printed = capsys.readouterr().out
    found = re.search(r"seed (\d+): (.*)\n  python -m simulator (.*)\n", printed)
    assert found is not None
    assert main(found[3].split()) == 1
    replayed = capsys.readouterr().out
    assert f"seed {found[1]}: {found[2]}" in replayed
    assert f"VIOLATION {found[2]}" in replayed


def test_the_table_lists_fired_faults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:6", "--jobs", "2"]) == 0
    printed = capsys.readouterr().out
    assert all(re.search(rf"^{kind} +\d+$", printed, re.MULTILINE) for kind in (*KINDS, *FOLLOWING))
    assert "6 seeds" in printed
    assert "seeds per minute" in printed
    assert "0 violations" in printed


@pytest.mark.parametrize(
    "wrong",
    [
        ["--seeds", "many"],
        ["--faults", "meteor"],
        ["--product", "--allow-loss"],
    ],
)
def test_wrong_usage_is_reported(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(wrong)
    assert caught.value.code == 2


def join_and_leave(seed: int) -> str | None:
    """Return the violation while servers join and leave a cluster with one copy of each bucket."""
    settings = replace(RunSettings.draw(Random(seed)), replicas=0, consistency=Sequential())
    kinds = tuple(kind for kind in KINDS if kind != "crash-server")
    return ProtocolCluster(seed, settings=settings, faults=kinds, num_faults=12).run().violation


def test_servers_join_and_leave_with_sequential_consistency_and_no_replicas() -> None:
    assert [(seed, found) for seed in range(8) if (found := join_and_leave(seed))] == []


def test_a_fill_reported_before_workers_retain_pushes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Iterations, "may_report", lambda iterations, buckets: True)
    assert any("(gate)" in (join_and_leave(seed) or "") for seed in (29, *range(60)))


@pytest.mark.parametrize("consistency", [Sequential(), BoundedDelay(tau=1)])
def test_a_simulation_with_given_settings(consistency: Sequential | BoundedDelay) -> None:
    settings = RunSettings(
        num_servers=3,
        num_workers=3,
        replicas=1,
        consistency=consistency,
        num_buckets=16,
        num_shards=12,
        epochs=2,
        iterations_per_shard=(2,),
        think_s=0.02,
    )
    outcome = ProtocolCluster(1, settings=settings).run()
    assert outcome.violation is None
    assert outcome.num_pushes > 200
