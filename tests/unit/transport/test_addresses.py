from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import msgspec
import pytest

from paceline.errors import AddressError
from paceline.transport import Address, Endpoint, host_identity
from paceline.transport.addresses import announced_host, bind_unix, remove_unix
from paceline.transport.client import open_socket


@pytest.mark.parametrize(
    ("text", "address", "written"),
    [
        ("tcp://a.example:9000", Address("tcp", "a.example", 9000), "tcp://a.example:9000"),
        ("a.example:0", Address("tcp", "a.example", 0), "tcp://a.example:0"),
        ("[::1]:80", Address("tcp", "::1", 80), "tcp://[::1]:80"),
        ("tcp://[fe80::1]:80", Address("tcp", "fe80::1", 80), "tcp://[fe80::1]:80"),
        ("unix:///tmp/x/s", Address("unix", path="/tmp/x/s"), "unix:///tmp/x/s"),
        ("unix://@x", Address("unix", path="@x"), "unix://@x"),
        ("memory://name", Address("memory", "name"), "memory://name"),
    ],
)
def test_an_address_is_read_and_written(text: str, address: Address, written: str) -> None:
    assert Address.parse(text) == address
    assert str(address) == written
    assert Address.parse(written) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        ":9000",
        "host:port",
        "host:65536",
        "host:-1",
        "::1:80",
        "unix://relative",
        "http://a:1",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(AddressError, match="is no address; write"):
        Address.parse(text)


def test_an_endpoint_knows_the_best_way(tmp_path: Path) -> None:
    path = tmp_path / "s"
    endpoint = Endpoint(Address("tcp", "10.0.0.1", 1), Address("unix", path=str(path)), host_identity())
    assert endpoint.best() == endpoint.tcp  # the path cannot be seen from here
    path.touch()
    assert endpoint.best() == endpoint.unix
    assert endpoint.best(here="another host") == endpoint.tcp
    assert Endpoint(endpoint.tcp).best() == endpoint.tcp
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(endpoint), type=Endpoint) == endpoint


@pytest.mark.skipif(sys.platform != "linux", reason="abstract names are Linux's")
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


def test_a_wildcard_is_announced_as_an_address_of_this_machine() -> None:
    assert announced_host("10.1.2.3") == "10.1.2.3"
    assert announced_host("0.0.0.0") not in ("", "0.0.0.0")


def test_network_namespaces_are_different_hosts() -> None:
    own = os.readlink("/proc/self/ns/net") if os.path.exists("/proc/self/ns/net") else ""
    assert host_identity().endswith(own)
    assert host_identity().count("/") == (2 if own else 1)
