"""The addresses at which a node (a process of the cluster) listens, and the choice of the best address."""

from __future__ import annotations

import errno
import functools
import os
import socket
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import psutil

from paceline.errors import AddressError, UsageError

LOOPBACK = "127.0.0.1"
_WILDCARDS = ("", "0.0.0.0", "::")
_PORT_ATTEMPTS = 16  # attempts to find a port that is free on all addresses of a host
_UNAVAILABLE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
# Addresses reserved for documentation (RFC 5737, RFC 3849). A datagram socket that connects to one of them sends
# nothing, but its local address is then the address with which this machine reaches other hosts.
_PROBES = ((socket.AF_INET6, "2001:db8::1"), (socket.AF_INET, "192.0.2.1"))


class Address(msgspec.Struct, frozen=True):
    """An address: ``tcp://host:port``, ``unix:///path``, ``unix://@name`` or, in tests, ``memory://name``.

    A name with ``@`` is in Linux's abstract namespace of sockets, which needs no file.
    """

    scheme: Annotated[str, msgspec.Meta(pattern=r"^(tcp|unix|memory)\Z")]
    host: Annotated[str, msgspec.Meta(pattern=r"^[^\s\0]*\Z")] = ""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    path: Annotated[str, msgspec.Meta(pattern=r"^([/@][^\0]*)?\Z", max_length=4096)] = ""

    def __post_init__(self) -> None:
        try:
            self.host.encode("idna")
        except UnicodeError:
            raise UsageError(
                f"{self.host[:300]!r} is not a valid host name: one of its labels is empty or too long"
            ) from None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse an address. Text without a scheme must be ``host:port`` or ``[ipv6]:port``, and means TCP.

        Raises AddressError if the text is not an address.
        """
        scheme, found, remainder = text.partition("://")
        if not found:
            scheme, remainder = "tcp", text
        if scheme == "unix" and remainder.startswith(("/", "@")):
            return cls("unix", path=remainder)
        if scheme == "memory" and remainder:
            return cls("memory", host=remainder)
        host, _, port = remainder.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        is_number = port.isascii() and port.isdigit() and int(port) <= 65535
        if scheme != "tcp" or not host or not is_number or (":" in host and not bracketed):
            raise AddressError(
                f"{text!r} is not an address. Use tcp://host:port, host:port, [ipv6]:port or unix:///path"
            )
        return cls("tcp", host=host[1:-1] if bracketed else host, port=int(port))

    @property
    def netloc(self) -> str:
        """Return ``host:port``, with IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def unix_name(self) -> str:
        """Return the name that ``bind`` and ``connect`` of a Unix socket take."""
        return f"\0{self.path[1:]}" if self.is_abstract else self.path

    @property
    def is_abstract(self) -> bool:
        return self.path.startswith("@")

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix://{self.path}"
        return f"tcp://{self.netloc}" if self.scheme == "tcp" else f"{self.scheme}://{self.host}"


class Endpoint(msgspec.Struct, frozen=True):
    """All addresses of a node's listener, as a message for peers."""

    tcp: Address
    """The address that works from all hosts (``memory://`` in tests)."""
    unix: Address | None = None
    """The address of a Unix socket for peers on the node's host; None without a Unix socket."""
    host: str = ""
    """The :func:`host_identity` of the node's host."""
    listener: str = ""
    """The id of the listener, which later listeners at the address do not have; empty if unknown."""

    def best(self, local_host: str | None = None) -> Address:
        """Return the Unix address if the node is on this host and the socket's path exists here.

        Otherwise return TCP.
        """
        if self.unix is None or self.host != (host_identity() if local_host is None else local_host):
            return self.tcp
        return self.unix if self.unix.is_abstract or os.path.exists(self.unix.path) else self.tcp

    def __str__(self) -> str:
        return str(self.tcp)


@functools.cache
def host_identity() -> str:
    """Return a string that only processes on the same host have, until the host's next boot.

    Network namespaces (containers, ``ip netns``) on one machine count as different hosts.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = f"{uuid.getnode():x}-{int(psutil.boot_time())}"
    return "/".join(filter(None, (socket.gethostname(), boot, namespace("net"))))


def namespace(kind: str) -> str:
    """Return the id of this process's Linux namespace of a kind (``net``, ``pid``, ...); empty on other systems."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def bind_tcp(address: Address) -> list[socket.socket]:
    """Return TCP sockets that listen on all addresses of the host name, with one port for all.

    Addresses of other machines are skipped. Raises AddressError if another socket uses the port on an address.
    """
    netloc = address.netloc
    try:
        found = socket.getaddrinfo(address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise AddressError(f"cannot listen on {netloc}: the host is unknown ({error})") from None
    sockaddrs = list(dict.fromkeys((family, sockaddr) for family, _, _, _, sockaddr in found))
    for _ in range(_PORT_ATTEMPTS):
        try:
            return _bind_all(sockaddrs)
        except OSError as error:
            failure = error
            if address.port or error.errno != errno.EADDRINUSE:
                break
    raise AddressError(_cannot_listen(netloc, failure)) from failure


def _bind_all(sockaddrs: Sequence[tuple[socket.AddressFamily, Any]]) -> list[socket.socket]:
    """Listen on those of the addresses that this machine has. Port 0 becomes a port that is free on all of them."""
    has_both = len({family for family, _ in sockaddrs}) > 1
    bound: list[socket.socket] = []
    failure: OSError | None = None
    try:
        for family, sockaddr in sockaddrs:
            port = bound[0].getsockname()[1] if bound else sockaddr[1]
            try:
                bound.append(_bind(family, (sockaddr[0], port, *sockaddr[2:]), has_both))
            except OSError as error:
                if error.errno not in _UNAVAILABLE:
                    raise
                failure = error
        if failure is not None and not bound:
            raise failure
    except OSError:
        for listening in bound:
            listening.close()
        raise
    return bound


def _bind(family: socket.AddressFamily, sockaddr: Any, has_both: bool) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if has_both and family == socket.AF_INET6:  # otherwise the IPv6 socket would occupy the IPv4 port too
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(sockaddr)
        listening.listen(512)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


def _cannot_listen(netloc: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"cannot listen on {netloc}: the port is in use by another program. Choose another with --port, "
            "or 0 for a free port"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"cannot listen on {netloc}: this machine has no such address. Use one of its addresses, or 0.0.0.0"
    if error.errno == errno.EACCES:
        return f"cannot listen on {netloc}: not permitted. Choose a port above 1023 with --port, or 0"
    return f"cannot listen on {netloc}: {error.strerror or error}"


def announced_host(host: str) -> str:
    """Return the host name or address with which peers reach a socket that listens on ``host``.

    A wildcard (``0.0.0.0`` or ``::``) becomes this machine's own address. For ``::`` this is the IPv6 address if the
    machine has an IPv6 route.
    """
    if host not in _WILDCARDS:
        return host
    for family, sockaddr in _PROBES if host == "::" else _PROBES[1:]:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((sockaddr, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return socket.gethostname()
