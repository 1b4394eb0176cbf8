"""``paceline run``: environment and output of the ranks, and cleanup after failures."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest
from tests.free_ports import free_port, two_free_ports
from tests.waiting import wait_until
from tests.warm.processes import RANKS, WarmProcess

from .running import MARK, PROMPT_S, Commands, Running, our_processes
from .test_roles import make_certificates

_REPORT = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
         "PACELINE_ROLE", "PACELINE_STRATEGY", "PACELINE_TOKEN", "PACELINE_SCHEDULER", "OMP_NUM_THREADS")
values = {name: os.environ.get(name) for name in names}
print(json.dumps({**values, "argv": sys.argv, "path": sys.path[0], "name": __name__, "torch": "torch" in sys.modules}))
"""
_WAIT = """
import os, subprocess, sys, time
if os.environ.get("CHILD"):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("waits", os.getpid(), flush=True)
time.sleep(600)
"""
_CONNECT = """
import os
import numpy as np
import paceline
with paceline.connect(rank=int(os.environ["RANK"]), timeout_s=20) as client:
    table = client.dense_table("net", size=4, update=paceline.SGD(lr=1.0))
    table.push(np.full(4, client.rank + 1.0, np.float32))
    client.tick()
    print(client.consistency, table.pull().tolist(), flush=True)
"""
_FAIL = """
import os, sys
import numpy as np
from tests.free_ports import free_port

from paceline import collectives
group = collectives.init()
group.all_reduce(np.ones(3, np.float32))
if group.rank == 1:
    raise ValueError("the bad one")
group.barrier()
"""
_FAIL_LATE = """
import atexit, os, sys, time, traceback
import numpy as np
from paceline import collectives
from tests.free_ports import free_port
case = sys.argv[1]
group = collectives.init()
group.all_reduce(np.ones(3, np.float32))
try:
    if group.rank == 1:
        if case == "leaves":
            group.close()
            time.sleep(1.5)
        elif case == "ends slowly":
            atexit.register(time.sleep, 1.5)
            atexit.register(group.close)
        elif case == "exits":
            sys.exit(3)
        elif case == "exits in a thread":
            import threading
            threading.Thread(target=os._exit, args=(4,)).start()
            time.sleep(5)
        elif case == "is killed":
            os.kill(os.getpid(), 9)
        raise ValueError("the bad one")
    group.barrier()
except Exception:
    if case == "is killed":
        traceback.print_exc()
        sys.exit(5)  # rank 0, which reports the lost rank with a status of its own
    raise
"""


def script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return "script.py"


def wait_pids(running: Running, count: int) -> list[int]:
    """Wait until all ranks wait; return their process ids."""
    found = [running.wait_line(f"[rank {rank}] waits") for rank in range(count)]
    return [int(line.split()[-1]) for line in found]


def processes_left(paceline: Commands) -> list[psutil.Process]:
    return our_processes(paceline.environment[MARK])


@pytest.fixture
def forking(paceline: Commands) -> Commands:
    """Run commands whose ranks are forked too."""
    paceline.environment[RANKS] = "plain"
    return paceline


def test_ranks_receive_rank_and_world_size(paceline: Commands, tmp_path: Path) -> None:
    arguments = ["--epochs", "3", "-h", "--", "--nproc_per_node"]
    finished = paceline.succeed("run", "--nproc_per_node", "2", "--threads=3", script(tmp_path, _REPORT), *arguments)
    lines = sorted(finished.out.splitlines())
    assert [line[:9] for line in lines] == ["[rank 0] ", "[rank 1] "]
    reports = [json.loads(line[9:]) for line in lines]
    for rank, output in enumerate(reports):
        assert output.pop("RANK") == output.pop("LOCAL_RANK") == str(rank)
        assert output["argv"] == ["script.py", *arguments]
        assert (output["name"], output["torch"], output["GROUP_RANK"]) == ("__main__", False, "0")
        assert (output["WORLD_SIZE"], output["LOCAL_WORLD_SIZE"], output["OMP_NUM_THREADS"]) == ("2", "2", "3")
        assert (output["PACELINE_ROLE"], output["PACELINE_STRATEGY"]) == ("worker", "all-reduce")
        assert output["PACELINE_SCHEDULER"] is None
        assert output["PACELINE_TOKEN"]
        assert output["path"] == str(tmp_path)
    assert reports[0] == reports[1]  # the ranks join one group


def test_a_single_rank_writes_unchanged_output(paceline: Commands, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text("import sys; print(__name__, sys.argv[1:]); sys.exit(7)")
    finished = paceline.run("run", "-m", "package.module", "--x")
    assert (finished.status, finished.out, finished.err) == (7, "__main__ ['--x']\n", "")


def test_lines_and_logs_are_complete(paceline: Commands, tmp_path: Path) -> None:
    text = """
import os, sys, time
rank = os.environ["RANK"]
for i in range(300):
    sys.stdout.write(rank * 40); sys.stdout.write(f" line {i}\\n")
sys.stderr.buffer.write(b"bar 1\\rbar 2\\rbar 3\\n\\xff\\xfe last")
sys.stderr.flush()
"""
    command = ["-m", "paceline", "run", "--nproc-per-node", "2", "--log-dir", "a/logs", script(tmp_path, text)]
    launcher = WarmProcess(
        command, env=paceline.environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    output, errors = launcher.communicate(60.0)
    assert launcher.returncode == 0, errors
    for rank in ("0", "1"):
        own = [line for line in output.decode().splitlines() if line.startswith(f"[rank {rank}] ")]
        assert own == [f"[rank {rank}] {rank * 40} line {i}" for i in range(300)]
        assert f"[rank {rank}] bar 3\n".encode() in errors
        assert f"[rank {rank}] ".encode() + b"\xff\xfe last\n" in errors
        logs = tmp_path / "a" / "logs"
        assert (logs / f"rank{rank}.stdout").read_text() == "".join(f"{rank * 40} line {i}\n" for i in range(300))
        assert (logs / f"rank{rank}.stderr").read_bytes() == b"bar 1\rbar 2\rbar 3\n\xff\xfe last"
    assert output.count(b"\n") == 600


def test_the_traceback_of_the_responsible_rank_is_printed_first_and_last(forking: Commands, tmp_path: Path) -> None:
    finished = forking.run("run", "--nproc-per-node", "3", "--log-dir", "logs", script(tmp_path, _FAIL))
    assert finished.status == 1
    lines = finished.err.splitlines()
    assert lines[0] == "[rank 1] Traceback (most recent call last):"
    assert lines[-1] == "ValueError: the bad one"
    assert finished.err.count("ValueError: the bad one") == 2
    assert "RankLostError" not in finished.err
    assert re.search(
        r"paceline run: rank 1 of 3 failed with exit status 1 after [\d.]+ s; the other ranks were ended", finished.err
    )


@pytest.mark.parametrize(
    ("case", "status"),
    [
        ("leaves", 1),
        pytest.param("ends slowly", 1, marks=pytest.mark.thorough),
        ("exits", 3),
        pytest.param("exits in a thread", 4, marks=pytest.mark.thorough),
        ("is killed", 137),
    ],
)
def test_the_failed_rank_is_named_instead_of_a_waiting_rank(
    case: str, status: int, forking: Commands, tmp_path: Path
) -> None:
    finished = forking.run("run", "--nproc-per-node", "2", script(tmp_path, _FAIL_LATE), case)
    assert "paceline run: rank 1 of 2 " in finished.err
    assert finished.status == status


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.thorough)])
def test_a_killed_rank_ends_the_other_ranks(paceline: Commands, tmp_path: Path, number: int) -> None:
    running = paceline.start("run", "--nproc-per-node", "2", script(tmp_path, _WAIT))
    pids = wait_pids(running, 2)
    os.kill(pids[1], number)
    finished = running.wait(PROMPT_S)
    assert finished.status == 128 + number
    assert f"rank 1 of 2 was killed by {signal.Signals(number).name}" in finished.err
    assert processes_left(paceline) == []


def test_an_interrupt_ends_all_processes_and_a_second_interrupt_kills_them(paceline: Commands, tmp_path: Path) -> None:
    paceline.environment["CHILD"] = "1"
    stubborn = "import signal; signal.signal(signal.SIGTERM, lambda *a: print('received', flush=True))" + _WAIT.replace(
        "time.sleep(600)\n", "while True: time.sleep(600)\n"
    )
    for text, numbers, status in ((_WAIT, [signal.SIGINT], 130), (stubborn, [signal.SIGTERM, signal.SIGINT], 143)):
        running = paceline.start("run", "--nproc-per-node", "2", script(tmp_path, text))
        wait_pids(running, 2)
        for turn, number in enumerate(numbers):
            if turn:
                running.wait_line("[rank 0] received")
                running.wait_line("[rank 1] received")
            running.signal(number)
        finished = running.wait(PROMPT_S)
        assert finished.status == status, finished
        assert "[rank 0] waits" in finished.out
        wait_until(lambda: processes_left(paceline) == [], "processes are left")


def test_a_killed_launcher_leaves_no_process(paceline_spawned: Commands, tmp_path: Path) -> None:
    paceline_spawned.environment["CHILD"] = "1"
    running = paceline_spawned.start("run", "--nproc-per-node", "2", "--strategy", "hybrid", script(tmp_path, _WAIT))
    wait_pids(running, 2)
    assert len(processes_left(paceline_spawned)) >= 1 + 2 + 2 + 2  # with scheduler and server
    running.kill()
    wait_until(lambda: processes_left(paceline_spawned) == [], "processes are left")


def test_a_strategy_with_servers_starts_servers_for_the_ranks(forking: Commands, tmp_path: Path) -> None:
    command = ["run", "--nproc-per-node", "2", "--strategy", "parameter-server", "--servers", "2"]
    finished = forking.succeed(*command, script(tmp_path, _CONNECT))
    expected = "sequential:mean [-1.5, -1.5, -1.5, -1.5]"
    assert sorted(finished.out.splitlines()) == [f"[rank {rank}] {expected}" for rank in range(2)]


def test_servers_and_ranks_use_tls(forking: Commands, tmp_path: Path) -> None:
    good, _ = (make_certificates(tmp_path)(name) for name in ("good", "bad"))
    command = ["run", "--nproc-per-node", "2", "--strategy", "parameter-server"]
    ran = forking.succeed(*command, *good, script(tmp_path, _CONNECT))
    assert len(ran.out.splitlines()) == 2
    stranger = ["import os", "os.environ['PACELINE_TLS_CA'] = 'bad-ca.pem'", _CONNECT]
    failed = forking.run(*command, *good, script(tmp_path, "\n".join(stranger)))
    assert failed.status == 1
    assert "no TLS connection" in failed.err
    missing = forking.run(*command, "--tls-cert", "none.pem", "script.py")
    assert (missing.status, len(missing.err.splitlines())) == (2, 1), missing
    assert "none.pem" in missing.err


def test_a_lost_server_is_named(paceline: Commands, tmp_path: Path) -> None:
    running = paceline.start("run", "--nproc-per-node", "2", "--strategy", "hybrid", script(tmp_path, _WAIT))
    wait_pids(running, 2)
    server = next(
        process for process in processes_left(paceline) if any('"role": "server"' in word for word in process.cmdline())
    )
    server.kill()
    finished = running.wait(PROMPT_S)
    assert finished.status == 1
    assert finished.err == "paceline run: server 0 was killed by SIGKILL. The ranks cannot continue and were ended\n"


def test_a_static_cluster(forking: Commands, tmp_path: Path) -> None:
    forking.environment["PACELINE_TOKEN"] = "a token for tests"
    first, second, third = (f"127.0.0.1:{free_port()}" for _ in range(3))
    (tmp_path / "cluster.json").write_text(json.dumps({"server": [first], "worker": [second, third]}))
    common_arguments = [
        "run",
        "--cluster",
        "cluster.json",
        "--strategy",
        "parameter-server",
        "--consistency",
        "eventual",
        "--job",
    ]
    name = script(tmp_path, _CONNECT)
    processes = [forking.start(*common_arguments, "worker", "--index", str(index), name) for index in range(2)]
    processes.append(forking.start(*common_arguments, "server", "--index", "0"))
    *workers, server = [process.wait() for process in processes]
    for index, finished in enumerate(workers):
        assert finished.status == 0, finished
        assert finished.out.startswith(f"[rank {index}] eventual [-")
    assert server.status == 0, server


def test_two_nodes(forking: Commands, tmp_path: Path) -> None:
    forking.environment["PACELINE_TOKEN"] = "a token for tests"
    command = ["run", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(two_free_ports())]
    command += ["--strategy", "parameter-server", "--servers", "2", "--node-rank"]
    name = script(tmp_path, _CONNECT)
    nodes = [forking.start(*command, str(node), name) for node in (1, 0)]
    for node, running in zip((0, 1), reversed(nodes), strict=True):
        finished = running.wait()
        assert (finished.status, finished.err) == (0, ""), finished
        assert finished.out == f"[rank {node}] sequential:mean [-1.5, -1.5, -1.5, -1.5]\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("predict",), "paceline: predict: expected run, scheduler or train, "),
        (("run", "--node-rank", "1", "train.py"), "paceline: --node-rank: leave it out, "),
        (("run", "--nnodes", "0", "train.py"), "paceline: --nnodes 0: expected 1 or more"),
        (("run", "--threads", "0", "train.py"), "paceline: --threads 0: expected 1 or more"),
        (("run", "--nnodes", "2"), "paceline: no script. "),
        (("scheduler", "--servers", "1", "--replicas", "3"), "paceline: replicas=3 with servers=1: "),
        (("run", "--no-such-option", "train.py"), "paceline: unknown option --no-such-option"),
        (("train", "--scheduler", "a:1", __file__), "paceline: --scheduler: leave it out, "),
    ],
)
def test_wrong_commands_for_manifests(paceline: Commands, words: tuple[str, ...], expected: str) -> None:
    finished = paceline.run("manifests", "--image", "image", *words)
    assert (finished.status, finished.out, finished.err.count("\n")) == (2, "", 1), finished
    assert finished.err.startswith(expected)


def test_a_master_port_in_use_is_one_sentence(paceline: Commands, tmp_path: Path) -> None:
    paceline.environment["PACELINE_TOKEN"] = "a token for tests"
    name = script(tmp_path, _CONNECT)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        where = ("--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", port)
        refused = paceline.run("run", *where, "--strategy", "all-reduce", name)
    assert (refused.status, refused.err.count("\n")) == (2, 1), refused
    assert f"127.0.0.1:{port}: the port is in use" in refused.err


def test_other_launchers_start_an_unchanged_script(paceline: Commands, tmp_path: Path) -> None:
    """The launcher's variables give the script its rank."""
    text = "from paceline import collectives; import numpy as np; group = collectives.init()\n"
    text += (
        "print(f'{group.rank} of {group.size}: {group.all_reduce(np.ones(1))}\\n', end='', flush=True); group.close()\n"
    )
    arguments = ["--standalone", "--nproc-per-node", "2", script(tmp_path, text)]
    launcher = WarmProcess(
        ["-W", "ignore", "-m", "torch.distributed.run", *arguments],
        kind="torch",
        env={**paceline.environment, "TMPDIR": str(tmp_path)},  # the launcher leaves a folder there
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        output, errors = launcher.communicate(60.0)
    finally:
        launcher.end()
    assert launcher.returncode == 0, errors
    assert sorted(output.splitlines()) == ["0 of 2: [2.]", "1 of 2: [2.]"]
