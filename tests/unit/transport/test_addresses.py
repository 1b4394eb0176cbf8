from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.errors import AddressError
from paceline.transport import Address, Endpoint, host_identity
from paceline.transport.addresses import announced_host, bind_tcp
from paceline.transport.client import open_socket
from paceline.transport.opening import dial


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
def test_invalid_addresses_are_rejected(text: str) -> None:
    with pytest.raises(AddressError, match="is not an address"):
        Address.parse(text)


def test_an_endpoint_returns_its_fastest_address(tmp_path: Path) -> None:
    path = tmp_path / "s"
    endpoint = Endpoint(Address("tcp", "10.0.0.1", 1), Address("unix", path=str(path)), host_identity())
    assert endpoint.best() == endpoint.tcp  # this process does not see the path
    path.touch()
    assert endpoint.best() == endpoint.unix
    assert endpoint.best(local_host="another host") == endpoint.tcp
    assert Endpoint(endpoint.tcp).best() == endpoint.tcp
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(endpoint), type=Endpoint) == endpoint


def test_the_announced_host_is_no_wildcard() -> None:
    assert announced_host("10.1.2.3") == "10.1.2.3"
    assert announced_host("0.0.0.0") not in ("", "0.0.0.0")


def _name_of(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    """Make the name "both.example" resolve to these hosts."""
    resolve = socket.getaddrinfo

    def fake_lookup(host: str, *args: Any, **options: Any) -> list[Any]:
        if host != "both.example":
            return resolve(host, *args, **options)
        if options.get("flags", 0) & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        return [found for listening in hosts for found in resolve(listening, *args, **options)]

    monkeypatch.setattr("socket.getaddrinfo", fake_lookup)


def test_a_listener_binds_every_address_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _name_of(monkeypatch, "127.0.0.1", "192.0.2.7", "127.0.0.2")  # this machine lacks the second address
    with ExitStack() as stack:
        bound = [stack.enter_context(listening) for listening in bind_tcp(Address("tcp", "both.example", 0))]
        port = bound[0].getsockname()[1]
        assert [listening.getsockname() for listening in bound] == [("127.0.0.1", port), ("127.0.0.2", port)]
        with pytest.raises(AddressError, match="in use"):
            bind_tcp(Address("tcp", "127.0.0.2", port))
    _name_of(monkeypatch, "192.0.2.7")
    with pytest.raises(AddressError, match="no such address"):
        bind_tcp(Address("tcp", "both.example", 0))


def _full_listener(stack: ExitStack) -> socket.socket:
    """Return a listener with a full queue: the kernel does not answer new connection requests."""
    listening = stack.enter_context(socket.socket())
    listening.bind(("127.0.0.2", 0))
    listening.listen(0)
    for _ in range(4):
        waiting = stack.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(listening.getsockname())
    return listening


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the address 127.0.0.2 by default")
def test_the_next_address_is_tried_before_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    _name_of(monkeypatch, "127.0.0.2", "127.0.0.1")
    with ExitStack() as stack:
        port = 0
        while not port:  # find a port that is free on the other address
            answering = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                at = _full_listener(stack).getsockname()[1]
                answering.bind(("127.0.0.1", at))
                answering.listen()
                port = at
        address = Address("tcp", "both.example", port)
        stack.enter_context(asyncio.run(dial(address, 4.0)))
        with open_socket(address, 4.0) as connected:
            assert connected.getpeername() == ("127.0.0.1", port)


def test_the_ipv6_wildcard_is_announced_as_the_outgoing_ipv6_address(monkeypatch: pytest.MonkeyPatch) -> None:
    class Probe(contextlib.closing[Any]):
        def __init__(self, family: int, kind: int) -> None:
            super().__init__(self)
            self.family = family

        def close(self) -> None:
            pass

        def connect(self, sockaddr: tuple[str, int]) -> None:
            assert sockaddr[0] == ("2001:db8::1" if self.family == socket.AF_INET6 else "192.0.2.1")

        def getsockname(self) -> tuple[str, int]:
            return ("fd00::7" if self.family == socket.AF_INET6 else "10.0.0.7", 9)

    monkeypatch.setattr("socket.socket", Probe)
    assert (announced_host("::"), announced_host("0.0.0.0")) == ("fd00::7", "10.0.0.7")


def test_network_namespaces_are_different_hosts() -> None:
    own = os.readlink("/proc/self/ns/net") if os.path.exists("/proc/self/ns/net") else ""
    assert host_identity().endswith(own)
    assert host_identity().count("/") == (2 if own else 1)
