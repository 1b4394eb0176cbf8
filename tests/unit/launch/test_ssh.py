"""Ranks on several hosts over a fake ``ssh``, which runs the commands on this machine."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.waiting import wait_until
from tests.warm.processes import RANKS, RELAYED_COMMAND, WarmProcess

from paceline.cli import main
from paceline.errors import UsageError
from paceline.launch.engines import ssh
from paceline.launch.engines.engine import RunEnd, RunRole
from paceline.launch.engines.options import EngineFlags
from paceline.launch.engines.ssh import Ssh, parse_hosts
from paceline.launch.run.options import RunOptions
from paceline.launch.run.setup import find_placement, plan_node
from paceline.testing import ENGINE_CHECKS, check_engine

FAKE = """#!{python}
import os, sys
from pathlib import Path
folder = Path({folder!r})
*_, host, command = sys.argv
if "-G" in sys.argv:
    print("hostname 127.0.0.1")
    sys.exit()
with (folder / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv) + "\\n")
print("Welcome to", host, flush=True)
replacement = folder / (host + ".sh")
command = command.replace({python!r} + " -m", {forking!r})
os.execv("/bin/sh", ["sh", "-c", replacement.read_text() if replacement.exists() else command])
"""
"""The program ``ssh``. On a host, it forks Python from a process with loaded modules."""
_WAIT_S = 120.0
MODULE = "paceline.launch.engines.ssh_host"
SCRIPT = """
import os, sys, time
from pathlib import Path
rank = os.environ["RANK"]
Path("pid" + rank).write_text(str(os.getpid()))
print("started", os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], *sys.argv[1:], flush=True)
if sys.argv[1:] == ["fails"] and rank == "2":
    while not (Path("pid0").exists() and Path("pid1").exists()):
        time.sleep(0.01)
    sys.exit(7)
if sys.argv[1:]:
    time.sleep(600)
"""


def replace_program(statements: str) -> str:
    """Return a command that runs some statements on a host, and then Paceline's program for the host."""
    program = f"import runpy\n{statements}\nrunpy.run_module('{MODULE}', run_name='__main__')"
    return f"exec {sys.executable} -c {shlex.quote(program)}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script and the fake ``ssh``. The fake runs ``HOST.sh`` instead of the command if it exists."""
    path = tmp_path / "bin" / "ssh"
    path.parent.mkdir()
    path.write_text(FAKE.format(python=sys.executable, forking=RELAYED_COMMAND, folder=str(tmp_path)))
    path.chmod(0o755)
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv(RANKS, "plain")
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    monkeypatch.setattr("paceline.cli.raise_on_sigterm", lambda: None)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["paceline", "run", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return int(str(end.value.code or 0))


_SELDOM = ("check_description", "check_status", "check_roles")
"""Checks whose behaviour other tests of this file or the checks of other engines cover."""


@pytest.mark.parametrize(
    "check", [pytest.param(check, marks=[pytest.mark.thorough] * (check in _SELDOM)) for check in ENGINE_CHECKS]
)
def test_engine_conforms(folder: Path, check: str) -> None:
    check_engine(lambda: Ssh(EngineFlags(hosts="a,b")), folder, only=check)


@pytest.mark.parametrize(
    ("text", "names", "num_ranks"),
    [
        ("a:4,b:2", ("a", "b"), (4, 2)),
        ("ada@a.example.org", ("ada@a.example.org",), None),
        ("[::1]:2,10.0.0.1:1", ("::1", "10.0.0.1"), (2, 1)),
        ("@hosts", ("a", "b"), (4, 4)),
    ],
)
def test_hosts(folder: Path, text: str, names: tuple[str, ...], num_ranks: tuple[int, ...] | None) -> None:
    Path("hosts").write_text("a:4\nb:4\n")
    hosts = parse_hosts(text)
    assert (hosts.names, hosts.num_ranks) == (names, num_ranks)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "''"), ("a,-oProxyCommand=x", "-oProxyCommand"), ("a:0", "'a:0'"), ("a,b:2", "number"), ("a,a", "twice"),
     ("a b;c", "'b;c'"), ("::1", "'::1'"), ("@nowhere", "nowhere")],
)  # fmt: skip
def test_unreadable_hosts(folder: Path, text: str, reason: str) -> None:
    with pytest.raises(UsageError, match="--hosts") as error:
        parse_hosts(text)
    assert reason in str(error.value)


def test_unequal_hosts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run(monkeypatch, "--hosts", "a:2,b:1", "train.py") == 0
    output, errors = capfdbinary.readouterr()
    lines = sorted(line for line in output.splitlines() if b"Welcome" not in line)
    assert lines == [b"[a] [rank 0] started 0 2", b"[a] [rank 1] started 1 2", b"[b] [rank 2] started 0 1"], errors


def test_horovodrun_on_hosts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    for name in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_CACHE_CAPACITY", "PYTHONUNBUFFERED"):
        monkeypatch.setenv(name, "")  # so that the variables are restored
    monkeypatch.delenv(RANKS)  # the ranks are not Python programs
    program = "echo $HOROVOD_RANK/$HOROVOD_SIZE $HOROVOD_CROSS_RANK/$HOROVOD_CROSS_SIZE $HOROVOD_CACHE_CAPACITY"
    words = ["-np", "3", "-H", "a:2,b:2", "-p", "77", "--cache-capacity", "5", "sh", "-c", program]
    monkeypatch.setattr(sys, "argv", ["paceline", "horovodrun", *words])
    with pytest.raises(SystemExit) as end:
        main()
    output, errors = capfdbinary.readouterr()
    assert end.value.code == 0, errors
    lines = sorted(line for line in output.splitlines() if b"Welcome" not in line)
    assert lines == [b"[a] [rank 0] 0/3 0/2 5", b"[a] [rank 1] 1/3 0/1 5", b"[b] [rank 2] 2/3 1/2 5"], errors
    calls = (folder / "calls").read_text().splitlines()
    assert all("ssh -T -oPort=77 -oBatchMode=yes" in call for call in calls)


def test_servers_know_all_ranks_of_unequal_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = (
        '{"launcher": 1, "num_launchers": 2, "local_launcher": 0, "num_local_launchers": 1, "num_cores": null, '
        '"address": "127.0.0.1", "job": "j", "step": "", "num_ranks": [2, 1, 4]}'
    )
    monkeypatch.setenv("PACELINE_PLACEMENT", placement)
    monkeypatch.setenv("PACELINE_TOKEN", "0123456789abcdef")
    options = RunOptions(strategy="parameter-server", servers=3, job="server", nnodes=3)
    setup = plan_node(options, find_placement(options))
    assert setup.num_ranks == 7
    assert setup.share is not None
    assert [*setup.share.servers] == [1]
    options = RunOptions(strategy="parameter-server", servers=3, job="worker")
    worker = plan_node(options, find_placement(options))
    assert worker.layout is not None
    assert (worker.layout.ranks, worker.layout.world_size, worker.layout.local_world_size) == ((2,), 7, 1)
    assert worker.share is not None
    assert worker.share.scheduler == setup.share.scheduler
    monkeypatch.setenv("PACELINE_PLACEMENT", "{}")
    with pytest.raises(UsageError, match="PACELINE_PLACEMENT"):
        find_placement(options)


def test_the_first_failure_ends_all_hosts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--hosts", "a:2,b:1", "train.py", "fails") == 7
    assert capfd.readouterr().err.splitlines()[-1].startswith("paceline run: host b: ranks ended with status 7")
    assert not living(folder, 3)


def test_a_lost_connection_ends_all_hosts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "b.sh").write_text(replace_program(_LOSES))
    assert run(monkeypatch, "--hosts", "a:2,b:1", "train.py") == 1
    assert "host b: the connection was lost" in capfd.readouterr().err.splitlines()[-1]


_ELASTIC = """
import os, sys, time
from pathlib import Path
is_first = '"launcher":0' in os.environ["PACELINE_PLACEMENT"].replace(" ", "")
if not is_first:
    Path("back").touch()
while is_first and not Path("back").exists():
    time.sleep(0.01)
sys.exit(int(sys.argv[1]) if not is_first else 0)
"""

_LOSES = "import os\nos.chdir = lambda folder: os._exit(255)"
"""Lose the connection at the start of the command."""


def run_elastic(status: int) -> RunEnd:
    """Run an elastic role on hosts a and b; return its end. The process on host b ends with `status`."""
    command = (sys.executable, "-c", _ELASTIC, str(status))
    engine = Ssh(EngineFlags(hosts="a,b"))
    with engine:
        engine.start([RunRole(name="ranks", command=command, num_nodes=2, num_cpus=1, is_elastic=True)])
        while (end := engine.poll()) is None:
            pass
    return end


def test_a_lost_host_of_an_elastic_role_is_started_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Ssh, "retry_s", 0.1)
    monkeypatch.setattr(ssh, "_ATTEMPT_S", 3.0)
    host = f"cd {shlex.quote(str(folder))}; if mkdir lost 2>/dev/null; then {replace_program(_LOSES)}; fi; "
    host += f"if mkdir silent 2>/dev/null; then exec sleep 60; fi; exec {RELAYED_COMMAND} {MODULE}"
    (folder / "b.sh").write_text(host)
    assert run_elastic(0) == RunEnd(0, None)
    errors = capfd.readouterr().err
    assert "host b: the connection was lost; the other nodes continue" in errors
    assert "host b: no reply within 3 s. The next attempt is in 0.1 s" in errors


def test_a_failing_host_of_an_elastic_role_is_not_started_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Ssh, "retry_s", 0.0)
    assert run_elastic(3) == RunEnd(0, None)
    errors = capfd.readouterr().err
    assert errors.count("host b: ranks ended with status 3; the other nodes continue") == 1, errors


def living(folder: Path, num_ranks: int) -> list[int]:
    """Return the living processes of all ranks; each rank must have started."""
    pids = [int((folder / f"pid{rank}").read_text()) for rank in range(num_ranks)]
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_no_process_is_left_after_a_signal(folder: Path, number: int, status: int) -> None:
    words = ["-m", "paceline", "run", "--hosts", "a:2", "train.py", "long"]
    variables = {**os.environ, "PACELINE_TOKEN": "the-token-of-this-test"}
    running = WarmProcess(words, env=variables, cwd=folder, stdout=subprocess.PIPE)
    pids = [folder / f"pid{rank}" for rank in (0, 1)]
    wait_until(lambda: all(path.exists() and path.stat().st_size for path in pids), "the ranks have not started")
    commands = [" ".join(process.cmdline()) for process in psutil.Process(running.pid).children(recursive=True)]
    assert sum(MODULE in command for command in commands) == 1
    assert not any("the-token" in command for command in [*commands, (folder / "calls").read_text()])
    running.send_signal(number)
    assert running.wait(_WAIT_S) == status
    wait_until(lambda: not living(folder, 2), "processes of ranks are left")
    assert running.stdout is not None
    running.stdout.close()


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("echo connect to host b: refused >&2; exit 255", "ssh cannot log in: connect to host b: refused"),
        ("exec /nowhere/python", f"no program {sys.executable}"),
        (f"exec {sys.executable} -m paceline_is_missing", "has no Paceline"),
        (replace_program("import paceline.version as v; v.__version__ = '0.0.1'"), "Paceline 0.0.1 is installed"),
        pytest.param(
            replace_program("import os.path as p; p.isdir = lambda path: False"), "no folder",
            marks=pytest.mark.thorough,
        ),
        (replace_program("import pathlib as p; p.Path.exists = lambda path: False"), "train.py"),
        pytest.param(
            replace_program("import paceline.meeting.rendezvous as r, paceline.errors as e\n"
                            "def fail(host): raise e.AddressError(host)\nr.own_host = fail"),
            "127.0.0.1 of the first host is unknown", marks=pytest.mark.thorough,
        ),
        (
            replace_program("import socket, errno\ndef fail(*words): raise OSError(errno.EHOSTUNREACH, 'No route')\n"
                            "socket.create_connection = fail"),
            "cannot connect to host a at 127.0.0.1",
        ),
    ],
    ids=["login", "python", "paceline", "version", "folder", "script", "name", "route"],
)  # fmt: skip
def test_problems_of_a_host_are_found_before_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], command: str, text: str
) -> None:
    (folder / "b.sh").write_text(command)
    assert run(monkeypatch, "--hosts", "a,b" if "host a" in text else "b", "train.py") == 2
    errors = capfd.readouterr().err
    assert errors.startswith("paceline: --hosts: host b: "), errors
    assert errors.count("\n") == 1, errors
    assert text in errors
    assert not (folder / "pid0").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--nodes", "2"], "--nodes 2"),
        (["--partition", "p"], "--partition"),
        (["--on", "slurm"], "--on"),
        (["--nproc-per-node", "2"], "--nproc-per-node 2"),
        (["--strategy", "mirrored"], "mirrored"),
        (["--min-ranks", "3"], "--min-ranks 3"),
        (["--master-addr", "a"], "--master-addr"),
    ],
)
def test_wrong_usage_starts_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    assert run(monkeypatch, "--hosts", "a:1,b:1", *words, "train.py") == 2
    assert text in capfd.readouterr().err
    assert not (folder / "calls").exists()


@pytest.mark.parametrize("name", ["argument", "variable"])
def test_text_that_is_not_utf8(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    if name == "variable":
        monkeypatch.setenv("PYTHONPATH", "\udcff")
    assert run(monkeypatch, "--hosts", "a", "train.py", "\udcff" if name == "argument" else "x") == 2
    errors = capfd.readouterr().err
    assert "not UTF-8" in errors
    assert errors.count("\n") == 1, errors
    assert not (folder / "pid0").exists()


def test_an_engine_without_ssh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    role = RunRole(name="ranks", command=("true",), num_nodes=1, num_cpus=1)
    with pytest.raises(UsageError, match="no command ssh"), Ssh(EngineFlags(hosts="a")) as engine:
        engine.start([role])
