"""Where a node listens, and which of its addresses to take from here."""

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

_WILDCARDS = ("", "0.0.0.0", "::")
_PORT_ATTEMPTS = 16  # a port that is free on one address may be in use on the other
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
# Documentation's own addresses (RFC 5737, RFC 3849), by family: a datagram socket connected there sends nothing, and
# shows by which address this machine would.
_PROBES = ((socket.AF_INET6, "2001:db8::1"), (socket.AF_INET, "192.0.2.1"))


class Address(msgspec.Struct, frozen=True):
    """``tcp://host:port``, ``unix:///path``, ``unix://@name`` or, in tests, ``memory://name``.

    A name after ``@`` is in Linux's abstract namespace of sockets: there is no file, so none can be left behind.
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
                f"{self.host[:300]!r} is no name of a host: one of its labels is empty or too long"
            ) from None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read an address; ``host:port`` alone is TCP, IPv6 hosts stand in brackets. Raises AddressError."""
        scheme, found, rest = text.partition("://")
        if not found:
            scheme, rest = "tcp", text
        if scheme == "unix" and rest.startswith(("/", "@")):
            return cls("unix", path=rest)
        if scheme == "memory" and rest:
            return cls("memory", host=rest)
        host, _, port = rest.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        is_number = port.isascii() and port.isdigit() and int(port) <= 65535
        if scheme != "tcp" or not host or not is_number or (":" in host and not bracketed):
            raise AddressError(f"{text!r} is no address; write tcp://host:port, host:port, [ipv6]:port or unix:///path")
        return cls("tcp", host=host[1:-1] if bracketed else host, port=int(port))

    @property
    def netloc(self) -> str:
        """``host:port``, IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def unix_name(self) -> str:
        """What ``bind`` and ``connect`` of a Unix socket take."""
        return f"\0{self.path[1:]}" if self.is_abstract else self.path

    @property
    def is_abstract(self) -> bool:
        """Whether this is a Unix socket without a file."""
        return self.path.startswith("@")

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix://{self.path}"
        return f"tcp://{self.netloc}" if self.scheme == "tcp" else f"{self.scheme}://{self.host}"


class Endpoint(msgspec.Struct, frozen=True):
    """Every address that one node listens on; goes over the wire so that others find it."""

    tcp: Address
    """The address that works from everywhere (in tests, a ``memory://`` one)."""
    unix: Address | None = None
    """A Unix socket, for peers on the same host."""
    host: str = ""
    """:func:`host_identity` of the node."""
    listener: str = ""
    """Tells the listener from one that has its address later; empty: not known."""

    def best(self, here: str | None = None) -> Address:
        """Return the Unix socket if the node runs on this host and its path can be seen, else TCP."""
        if self.unix is None or self.host != (host_identity() if here is None else here):
            return self.tcp
        return self.unix if self.unix.is_abstract or os.path.exists(self.unix.path) else self.tcp

    def __str__(self) -> str:
        return str(self.tcp)


@functools.cache
def host_identity() -> str:
    """Return a string that is the same in two processes exactly if they run on one boot of one host.

    Two network namespaces (containers, ``ip netns``) of one machine are two hosts.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = f"{uuid.getnode():x}-{int(psutil.boot_time())}"
    return "/".join(filter(None, (socket.gethostname(), boot, namespace("net"))))


def namespace(kind: str) -> str:
    """Return what tells this process's namespace (``net``, ``pid``, ...) from others; empty where there are none."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def bind_tcp(address: Address) -> list[socket.socket]:
    """Return listening TCP sockets, one for each address that the host's name stands for, all with the same port.

    Those that this machine does not have are left out. Raises AddressError if the port cannot be had on all others.
    """
    where = address.netloc
    try:
        found = socket.getaddrinfo(address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise AddressError(f"cannot listen on {where}: the host is not known ({error})") from None
    places = list(dict.fromkeys((family, place) for family, _, _, _, place in found))
    for _ in range(_PORT_ATTEMPTS):
        try:
            return _bind_all(places)
        except OSError as error:
            failure = error
            if address.port or error.errno != errno.EADDRINUSE:
                break
    raise AddressError(_cannot_listen(where, failure)) from failure


def _bind_all(places: Sequence[tuple[socket.AddressFamily, Any]]) -> list[socket.socket]:
    """Listen at all places that this machine has; the first one's port, if any will do, is that of the others."""
    has_both = len({family for family, _ in places}) > 1
    bound: list[socket.socket] = []
    failure: OSError | None = None
    try:
        for family, place in places:
            port = bound[0].getsockname()[1] if bound else place[1]
            try:
                bound.append(_bind(family, (place[0], port, *place[2:]), has_both))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                failure = error
        if failure is not None and not bound:
            raise failure
    except OSError:
        for each in bound:
            each.close()
        raise
    return bound


def _bind(family: socket.AddressFamily, place: Any, has_both: bool) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if has_both and family == socket.AF_INET6:  # else it takes the port of the other one
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(place)
        listening.listen(512)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


def _cannot_listen(where: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"cannot listen on {where}: the port is in use by another program; choose another with --port, "
            "or 0 for a free one"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"cannot listen on {where}: this machine has no such address; give one of its own, or 0.0.0.0"
    if error.errno == errno.EACCES:
        return f"cannot listen on {where}: not permitted; choose a port above 1023 with --port, or 0"
    return f"cannot listen on {where}: {error.strerror or error}"


def announced_host(host: str) -> str:
    """Return where others reach a socket bound to ``host``: a wildcard becomes this machine's own address.

    That of IPv6, where there is a way out by it, if the wildcard is ``::``.
    """
    if host not in _WILDCARDS:
        return host
    for family, place in _PROBES if host == "::" else _PROBES[1:]:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((place, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return socket.gethostname()
