"""Two hosts, ``a`` and ``b``, for tests: one ``sshd`` at two addresses of this machine.

On Debian it needs `apt-get install openssh-server openssh-client`.
"""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from tests.free_ports import free_port
from tests.warm.processes import PLACE, RANKS, RELAYING, are_warm

PROGRAMS = ("sshd", "ssh", "ssh-keygen")
_PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
_WAIT_S = 30.0

_SERVER = """
ListenAddress 127.0.0.1:{port}
ListenAddress 127.0.0.2:{port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
"""
_CLIENT = """
Host a
  HostName 127.0.0.1
Host b
  HostName 127.0.0.2
Host *
  Port {port}
  User {user}
  IdentityFile {folder}/user
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known
  StrictHostKeyChecking yes
"""


def is_possible() -> bool:
    """Return whether the programs are installed and can run here."""
    return all(shutil.which(name, path=_PATH) for name in PROGRAMS)


class SshHosts:
    """The ssh daemon, until :meth:`close`. The folder `bin` has an ``ssh`` with the configuration of the hosts."""

    def __init__(self, folder: Path, variables: Mapping[str, str], *, forks: bool = False) -> None:
        """`variables` are set in the sessions on the hosts. If `forks`, Python is forked from a warm process there."""
        if forks := forks and are_warm():
            variables = {**variables, RANKS: "plain", PLACE: os.environ[PLACE]}
        self.bin, port = folder / "bin", free_port()
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd needs this folder, which Debian creates at boot
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        key = (folder / "host.pub").read_text()
        (folder / "known").write_text("".join(f"[127.0.0.{number}]:{port} {key}" for number in (1, 2)))
        settings = " ".join(f'"{name}={value}"' for name, value in variables.items())
        server = _SERVER.format(folder=folder, port=port) + (f"SetEnv {settings}\n" if settings else "")
        if forks:
            (folder / "run").write_text(f'eval "$(echo "$SSH_ORIGINAL_COMMAND" | {RELAYING})"\n')
            server += f"ForceCommand exec sh {folder}/run\n"
        (folder / "server").write_text(server)
        (folder / "client").write_text(_CLIENT.format(folder=folder, port=port, user=getpass.getuser()))
        self.bin.mkdir()
        (self.bin / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/client "$@"\n')
        (self.bin / "ssh").chmod(0o755)
        with (folder / "log").open("wb") as log:
            command: list[str | Path] = [str(shutil.which("sshd", path=_PATH)), "-D", "-e", "-f", folder / "server"]
            self._daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + _WAIT_S
        while subprocess.run([self.bin / "ssh", "a", "true"], check=False, stderr=subprocess.DEVNULL).returncode:
            if time.monotonic() >= deadline or self._daemon.poll() is not None:
                self.close()
                raise AssertionError(f"sshd does not work: {(folder / 'log').read_text()}")
            time.sleep(0.1)

    def close(self) -> None:
        self._daemon.terminate()
        self._daemon.wait(10)
