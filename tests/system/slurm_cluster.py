"""A Slurm of four virtual nodes on this machine, for tests.

It needs root and, on Debian, `apt-get install slurmctld slurmd slurm-client munge`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.free_ports import free_port
from tests.waiting import wait_until
from tests.warm.processes import RELAYING

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
_WAIT_S = 60.0

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.sock
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait={kill_wait_s}
SlurmctldPort={controller}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=small Nodes=n1 MaxTime=INFINITE State=UP
"""


def is_possible() -> bool:
    """Return whether the programs are installed and can run here."""
    return os.getuid() == 0 and all(shutil.which(name) for name in PROGRAMS)


class SlurmCluster:
    """The daemons of Slurm. Its commands find the daemons by `variables`; :meth:`close` ends the daemons."""

    def __init__(self, folder: Path, *, kill_wait_s: int = 60) -> None:
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        (folder / "state").mkdir()
        path = folder / "slurm.conf"
        self.variables = {**os.environ, "SLURM_CONF": str(path)}
        self.bin = folder / "bin"
        """A folder with an ``sbatch`` whose jobs fork Python from a warm process."""
        self.bin.mkdir()
        (self.bin / "sbatch").write_text(f'#!/bin/sh\n{RELAYING} | exec {shutil.which("sbatch")} "$@"\n')
        (self.bin / "sbatch").chmod(0o755)
        host = socket.gethostname()
        nodes = [
            f"NodeName=n{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=4 RealMemory=1000\n"
            for node in range(1, 5)
        ]
        settings = {"host": host, "folder": folder, "controller": free_port(), "kill_wait_s": kill_wait_s}
        path.write_text(_CONFIGURATION.format(**settings) + "".join(nodes))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder = folder
        try:
            files = {"socket": "munge.sock", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "seed"}
            words = [f"--{name}={folder / file}" for name, file in files.items()]
            self._start("munged", "--foreground", "--force", f"--key-file={key}", *words)
            self._wait(lambda: (folder / "munge.sock").exists())
            self._start("slurmctld", "-D", "-f", str(path))
            for node in range(1, 5):
                (folder / f"n{node}").mkdir()
                self._start("slurmd", "-D", "-f", str(path), "-N", f"n{node}")
            self._wait(lambda: self.call("sinfo", "-h", "-o", "%D %t", "-p", "all") == "4 idle")
        except BaseException:
            self.close()
            raise

    def call(self, *command: str) -> str:
        """Run a command of Slurm; return its output, or an empty text if it fails."""
        done = subprocess.run(command, env=self.variables, capture_output=True, text=True, timeout=60, check=False)
        return "" if done.returncode else done.stdout.strip()

    def wait_empty(self) -> None:
        """Wait until no job is left."""
        self._wait(lambda: self.call("squeue", "-h") == "")

    def close(self) -> None:
        self.call("scancel", "--signal=KILL", "--user=root")
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, *command: str) -> None:
        with (self._folder / f"{command[-1].rpartition('/')[2]}.out").open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    command, env=self.variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    start_new_session=True,
                )
            )  # fmt: skip

    def _wait(self, condition: Callable[[], object]) -> None:
        wait_until(condition, f"Slurm does not work; its files: {self._folder}", _WAIT_S)
