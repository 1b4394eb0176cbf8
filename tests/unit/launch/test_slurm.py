"""Slurm: a launcher's placement in a step, the job's script, and the states of a job with fake Slurm commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.cli import main
from paceline.errors import UsageError
from paceline.launch.engines.engine import RunEnd, RunRole
from paceline.launch.engines.options import EngineFlags, SlurmFlags
from paceline.launch.engines.slurm import Slurm, read_placement
from paceline.launch.run.options import RunOptions
from paceline.launch.run.setup import find_placement, plan_node

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_CPUS_ON_NODE": "8",
}
SCRIPT_OF_JOB = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "5"}


def test_placement_in_a_step() -> None:
    placement = read_placement(STEP)
    assert placement is not None
    assert (placement.launcher, placement.num_launchers) == (3, 5)
    assert (placement.local_launcher, placement.num_local_launchers, placement.num_cores) == (1, 2, 8)
    assert placement.address == "n1"


@pytest.mark.parametrize("variables", [{}, SCRIPT_OF_JOB])
def test_there_is_no_placement_outside_of_a_step(variables: dict[str, str]) -> None:
    assert read_placement(variables) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_STEP_NODELIST", "n[1-"),
        ("SLURM_STEP_NODELIST", "n[1-4]"),
        ("SLURM_STEP_TASKS_PER_NODE", ""),
        ("SLURM_STEP_TASKS_PER_NODE", "2,2"),
        ("SLURM_STEP_NUM_TASKS", "4"),
        ("SLURM_PROCID", "-1"),
        ("SLURM_LOCALID", "x"),
        ("SLURM_NODEID", "3"),
    ],
)
def test_unreadable_variables_are_named(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=name):
        read_placement({**STEP, name: value})


@pytest.fixture
def in_step(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Set the variables of a step whose first node is this machine."""
    for name, value in {**STEP, "SLURM_STEP_NODELIST": "127.0.0.[1-3]"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    return monkeypatch


def test_ranks_of_a_launcher_in_a_step(in_step: pytest.MonkeyPatch) -> None:
    options = RunOptions(script="train.py", nproc_per_node=2)
    setup = plan_node(options, find_placement(options))
    assert setup.layout is not None
    assert setup.layout.ranks == (6, 7)
    assert (setup.layout.local_ranks, setup.layout.local_world_size) == ((2, 3), 4)
    assert (setup.layout.world_size, setup.layout.master_addr) == (10, "127.0.0.1")
    assert (setup.choice.name, setup.num_cores, setup.share) == ("all-reduce", 8, None)
    in_step.setenv("SLURM_STEP_ID", "1")
    other = plan_node(options, find_placement(options))
    assert other.layout is not None
    assert other.layout.master_port != setup.layout.master_port  # two steps of a job may run at the same time
    assert other.token == setup.token
    in_step.setenv("SLURM_JOB_ID", "8")
    assert plan_node(options, find_placement(options)).token != setup.token


def test_a_step_of_servers_and_a_step_of_ranks_use_the_same_scheduler(in_step: pytest.MonkeyPatch) -> None:
    servers = RunOptions(strategy="parameter-server", servers=7, job="server", nnodes=5, nproc_per_node=2)
    server = plan_node(servers, find_placement(servers))
    assert server.layout is None
    assert server.share is not None
    assert (list(server.share.servers), server.share.runs_scheduler, server.num_ranks) == ([3], False, 10)
    in_step.setenv("SLURM_STEP_ID", "1")
    ranks = RunOptions(script="t.py", strategy="parameter-server", servers=7, job="worker", nproc_per_node=2)
    worker = plan_node(ranks, find_placement(ranks))
    assert worker.share is not None
    assert worker.layout is not None
    assert (worker.share.scheduler, worker.token, worker.layout.ranks) == (server.share.scheduler, server.token, (6, 7))
    assert not worker.share.servers
    alone = RunOptions(job="server", nnodes=2)
    with pytest.raises(UsageError, match="--job server"):
        plan_node(alone, find_placement(alone))


def test_options_with_addresses_override_the_step(in_step: pytest.MonkeyPatch) -> None:
    for options in (RunOptions(nnodes=1), RunOptions(node_rank=0), RunOptions(master_addr="n1")):
        assert find_placement(options) is None
    in_step.setenv("SLURM_STEP_NODELIST", "n1")
    in_step.setenv("SLURM_STEP_TASKS_PER_NODE", "1")
    for name, value in (("STEP_NUM_TASKS", "1"), ("PROCID", "0"), ("LOCALID", "0"), ("NODEID", "0")):
        in_step.setenv(f"SLURM_{name}", value)
    assert find_placement(RunOptions()) is None  # a single launcher ignores the step


def test_the_script_of_a_job() -> None:
    flags = EngineFlags(
        slurm=SlurmFlags(partition="p", time="30", requeue=True, sbatch=["--gres=gpu:4", "signal=TERM@600"])
    )
    ranks = RunRole(name="ranks", command=("paceline", "run", "a b.py"), num_nodes=4, num_cpus=8)
    servers = RunRole(name="servers", command=("paceline", "run", "--job", "server"), num_nodes=2, num_cpus=1)
    script = Slurm(flags, "a b").describe([servers, ranks])
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=True).returncode == 0
    settings = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {"nodes=4", "cpus-per-task=9", "partition=p", "time=30", "gres=gpu:4", "job-name=a_b"} <= {*settings}
    assert settings.index("signal=TERM@120") < settings.index("signal=TERM@600")  # the user's option is the last
    first, second = (
        line.removesuffix(" &") for line in script.replace("\\\n", "").splitlines() if line.startswith("srun")
    )
    assert "--overlap --nodes=2 --ntasks=2" in first
    assert second.endswith("paceline run 'a b.py'")
    assert "&" not in Slurm(EngineFlags(on="slurm"), "t").describe([ranks])


@pytest.mark.parametrize(("factor", "status"), [(3, 0), (-3, 5)])
def test_an_elastic_job_has_the_status_of_its_first_process(factor: int, status: int) -> None:
    """Process 0 ends with status 0 and then with 5, and process 1 always with 3 or 2."""
    command = ("bash", "-c", f"exit $(( ({factor} < 0) * 5 + {factor} * SLURM_PROCID ))")
    ranks = RunRole(name="ranks", command=command, num_nodes=2, num_cpus=1, is_elastic=True)
    script = Slurm(EngineFlags(on="slurm"), "t").describe([ranks])
    assert "#SBATCH --no-kill" in script
    fake = """srun() {
        while [[ $1 == --* ]]; do shift; done
        SLURM_PROCID=0 "$@"; SLURM_PROCID=1 "$@"
    }\n"""
    ended = subprocess.run(["bash", "-u"], input=f"SLURM_CPUS_PER_TASK=1\n{fake}{script}", text=True, check=False)
    assert ended.returncode == status


FAKE = """#!{python}
import json, os, sys
from pathlib import Path
folder, name, words = Path({folder!r}), Path(sys.argv[0]).name, sys.argv[1:]
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps([name, *words]) + "\\n")
replies = folder / name
lines = replies.read_text().splitlines() if replies.exists() else []
if not lines:
    sys.exit(0)
if len(lines) > 1:
    replies.write_text("\\n".join(lines[1:]))
status, _, text = lines[0].partition(" ")
if name == "sbatch":
    (folder / "script").write_text(sys.stdin.read())
print(text, file=sys.stderr if int(status) else sys.stdout)
sys.exit(int(status))
"""


class FakeSlurm:
    """Fake Slurm commands that print prepared replies. The last reply is repeated."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("sbatch", "scontrol", "squeue", "scancel"):
            path = folder / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(FAKE.format(python=sys.executable, folder=str(folder)))
            path.chmod(0o755)
        self.reply("sbatch", "0 7")
        (folder / "train.py").write_text("")
        (folder / "the output").write_text("[rank 0] hello\n")

    def reply(self, name: str, *lines: str) -> None:
        (self.folder / name).write_text("\n".join(lines))

    def states(self, *states: str) -> None:
        output = f"StdOut={self.folder}/the output"
        self.reply("scontrol", *(f"0 JobId=7 JobName=JobState=X {state} {output}" for state in states))

    def calls(self, name: str) -> list[list[str]]:
        calls = map(json.loads, (self.folder / "calls").read_text().splitlines())
        return [call[1:] for call in calls if call[0] == name]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr("paceline.launch.engines.slurm._POLL_S", 0.0)
    monkeypatch.setattr("paceline.launch.engines.slurm._PAUSE_S", 0.0)
    monkeypatch.setattr("paceline.cli.raise_on_sigterm", lambda: None)
    return FakeSlurm(tmp_path)


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["paceline", "run", "--on", "slurm", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return int(str(end.value.code or 0))


PENDING, RUNNING = "JobState=PENDING Reason=Resources", "JobState=RUNNING Reason=None NodeList=n[1-2]"


def test_the_state_and_output_of_a_job_are_shown(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    slurm.states(PENDING, PENDING, RUNNING, "JobState=COMPLETED Reason=None ExitCode=0:0")
    assert run(monkeypatch, "--nodes", "2", "train.py", "--epochs", "3") == 0
    output, notes = capfdbinary.readouterr()
    assert output == b"[rank 0] hello\n"
    assert notes.count(b"pending: Resources") == 1
    assert b"running on n[1-2]" in notes
    assert (slurm.folder / "script").read_text().count("train.py --epochs 3") == 1
    assert slurm.calls("scancel") == []


@pytest.mark.parametrize(
    ("state", "status", "reason"),
    [
        ("JobState=FAILED Reason=NonZeroExitCode ExitCode=3:0", 3, "FAILED"),
        ("JobState=TIMEOUT Reason=TimeLimit ExitCode=0:0", 1, "TimeLimit"),
        ("JobState=OUT_OF_MEMORY Reason=OutOfMemory ExitCode=0:9", 137, "OutOfMemory"),
        ("JobState=CANCELLED Reason=None ExitCode=0:15", 143, "CANCELLED"),
    ],
)
def test_a_job_that_fails(
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    state: str,
    status: int,
    reason: str,
) -> None:
    slurm.states(RUNNING, state)
    assert run(monkeypatch, "train.py") == status
    assert reason in capfd.readouterr().err.splitlines()[-1]
    assert slurm.calls("scancel") == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "PartitionNodeLimit"),
        ([], "QOSMaxCpuPerJobLimit"),
        ([], "launch_failed_requeued_held"),
        (["--queue-timeout", "0"], "Resources"),
    ],
)
def test_a_job_that_cannot_start_is_cancelled(
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    reason: str,
) -> None:
    slurm.states(f"JobState=PENDING Reason={reason}")
    assert run(monkeypatch, *words, "train.py") == 1
    assert reason in capfd.readouterr().err.splitlines()[-1]
    assert slurm.calls("scancel") == [["7"]]


def test_a_requeued_job_is_not_cancelled(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = "JobState=COMPLETED Reason=None ExitCode=0:0"
    slurm.states(RUNNING, "JobState=PENDING Reason=BeginTime", PENDING, RUNNING, ended)
    assert run(monkeypatch, "--requeue", "--queue-timeout", "0", "train.py") == 0  # no timeout after a start


@pytest.mark.parametrize("reply", ["1 scontrol: error: Unable to contact slurm controller", ""])
def test_errors_of_the_controller_are_retried(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, reply: str) -> None:
    slurm.states(RUNNING, "JobState=COMPLETED Reason=None ExitCode=0:0")
    text = (slurm.folder / "scontrol").read_text()
    slurm.reply("scontrol", *([reply, reply] if reply else []), *text.splitlines())
    assert run(monkeypatch, "train.py") == 0
    slurm.reply("scontrol", "1 slurm_load_jobs error: Invalid job id specified")
    assert run(monkeypatch, "train.py") == 1


def test_ctrl_c_cancels_the_job(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.states(RUNNING)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    clock = SimpleNamespace(sleep=interrupt, monotonic=time.monotonic)
    monkeypatch.setattr("paceline.launch.engines.slurm.time", clock)
    assert run(monkeypatch, "train.py") == 130
    assert slurm.calls("scancel") == [["7"]]


def test_a_second_ctrl_c_names_the_job(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*command: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.launch.engines.slurm._call", interrupt)
    assert run(monkeypatch, "train.py") == 130
    assert "Run `scancel 7`" in capfd.readouterr().err


def test_output_that_appears_in_a_newly_opened_file(
    slurm: FakeSlurm, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """In a network file system, an open file may not show new data for some time."""
    with Slurm(EngineFlags(), "t") as engine:
        engine.start([RunRole(name="ranks", command=("true",), num_nodes=1, num_cpus=1)])
        slurm.states(RUNNING)
        assert engine.poll() is None
        (slurm.folder / "new").write_text("[rank 0] hello\nthe end\n")
        (slurm.folder / "new").replace(slurm.folder / "the output")
        slurm.states("JobState=COMPLETED Reason=None ExitCode=0:0")
        assert engine.poll() == RunEnd(0, None)
    assert capfdbinary.readouterr().out == b"[rank 0] hello\nthe end\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--nodes", "0"], "--nnodes 0"),
        (["--sbatch", "a\nb"], "one line"),
        (["--strategy", "mirrored", "--nodes", "2"], "mirrored"),
        (["--min-ranks", "3", "--nodes", "2"], "--min-ranks 3"),
        (["--min-ranks", "1", "--max-ranks", "3", "--nodes", "2", "--strategy", "all-reduce"], "--max-ranks 3"),
        (["--node-rank", "0"], "--node-rank"),
    ],
)
def test_wrong_usage_submits_nothing(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    assert run(monkeypatch, *words, "train.py") == 2
    assert text in capfd.readouterr().err
    assert not (slurm.folder / "calls").exists()


def test_errors_of_sbatch_are_shown(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    slurm.reply("sbatch", "1 sbatch: error: invalid partition specified: nope")
    assert run(monkeypatch, "--partition", "nope", "train.py") == 2
    assert capfd.readouterr().err == (
        "paceline: --on slurm: sbatch rejects the job: invalid partition specified: nope\n"
    )
    monkeypatch.setenv("PATH", str(slurm.folder / "empty"))
    assert run(monkeypatch, "train.py") == 2
    assert "no command sbatch" in capfd.readouterr().err


def test_options_of_engines_need_an_engine(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["paceline", "run", "--partition", "p", __file__])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "--partition" in capfd.readouterr().err
