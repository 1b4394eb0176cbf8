"""Unix sockets: their address, and the user at the other end."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import AddressError
from paceline.transport import Address, Endpoint, host_identity
from paceline.transport.client import open_socket
from paceline.transport.unix_sockets import bind_unix, is_other_user, remove_unix


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract socket names")
def test_a_unix_socket_has_no_file() -> None:
    listening, address = bind_unix()
    with listening, open_socket(address, 5.0):
        assert address.is_abstract
        assert Endpoint(Address("tcp", "10.0.0.1", 1), address, host_identity()).best() == address
    remove_unix(address)
    with pytest.raises(AddressError):
        open_socket(address, 5.0)


def test_a_unix_socket_is_private_short_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    listening, address = bind_unix()
    with listening:
        folder = os.path.dirname(address.path)
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        assert len(address.path) < 100
    remove_unix(address)
    assert not os.path.exists(folder)


def test_a_long_temporary_directory_is_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    monkeypatch.setattr("sys.platform", "darwin")
    listening, address = bind_unix()
    listening.close()
    assert len(address.path) < 100
    assert os.listdir(long) == []
    remove_unix(address)


def test_the_kernel_identifies_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = socket.socketpair()
    try:
        assert not is_other_user(ends[0])
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert is_other_user(ends[0])
    finally:
        for end in ends:
            end.close()
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as tcp:
        assert not is_other_user(tcp)
    assert is_other_user(ends[0])  # the socket is closed


_CONNECT_AS_ANOTHER = """
import os, socket, sys
os.setuid(12345)
connected = socket.socket(socket.AF_UNIX)
connected.connect("\\0" + sys.argv[1])
connected.recv(1)
"""


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="only root can run a process as another user")
def test_a_process_of_another_user_is_recognized() -> None:
    listening, address = bind_unix()
    listening.settimeout(20)
    command = [sys.executable, "-c", _CONNECT_AS_ANOTHER, address.path[1:]]
    with listening, subprocess.Popen(command) as other:
        connected, _ = listening.accept()
        assert is_other_user(connected)
        connected.close()
        assert other.wait(20) == 0
