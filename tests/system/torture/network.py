"""Hosts as network namespaces, and a switch between them that cuts, loses, delays and resets on command.

Every host has a TUN device, and this process holds the other end. It reads each packet from one host and writes it to
the other host, or drops it. TCP therefore repairs losses, and a cut is silent, as in a real network.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

SUBNET = "10.203.9"
_MTU = 9000
_MOST_QUEUED_S = 0.5  # size of the queue of a slow link; further packets are dropped
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_TCP = 6
_SYN, _RST = 0x02, 0x04
_RESETS = 8  # reset more than one packet of a connection, because a packet may be out of order


@dataclass(frozen=True)
class Way:
    """The treatment of packets from one host to another."""

    loss: float = 0.0
    """The share of dropped packets. If 1, the link is cut."""
    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    """If 0, there is no limit."""


CUT = Way(loss=1.0)


class Network:
    """`num_hosts` hosts on one switch. Host 0 is this process's own namespace. A thread forwards the packets."""

    def __init__(self, num_hosts: int, seed: int) -> None:
        self._names = ["", *(f"host{number}" for number in range(1, num_hosts))]
        self._ways: dict[tuple[int, int], Way] = {}
        self._chance = random.Random(seed)
        self._due: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()
        self._free_at: dict[tuple[int, int], float] = {}
        self._resets = Resets()
        self._devices: list[int] = []
        self._is_closing = False
        for number in range(num_hosts):
            self._devices.append(self._make_host(number))
        self._thread = threading.Thread(target=self._run, name="switch", daemon=True)
        self._thread.start()

    def address(self, host: int) -> str:
        """Return a host's IP address."""
        return f"{SUBNET}.{host + 1}"

    @property
    def num_hosts(self) -> int:
        """Return the number of hosts."""
        return len(self._names)

    def namespace(self, host: int) -> Path | None:
        """Return the file of a host's namespace, or None for this process's namespace."""
        return Path("/run/netns", self._names[host]) if host else None

    def set_way(self, source: int, target: int, way: Way | None) -> None:
        """Set the treatment of packets in one direction. None means to deliver packets unchanged."""
        if way is None:
            self._ways.pop((source, target), None)
        else:
            self._ways[source, target] = way

    def heal(self) -> None:
        """End all cuts, losses and delays."""
        self._ways.clear()

    def reset(self, one: int, other: int | None = None) -> None:
        """Reset the connections of two hosts, or of one host with all others, at their next packet."""
        self._resets.begin(one, other)

    def close(self) -> None:
        """Stop forwarding packets. The kernel removes the namespaces together with this process's namespace."""
        self._is_closing = True
        self._thread.join(5.0)  # it ends within its poll
        for device in self._devices:
            os.close(device)

    def _make_host(self, number: int) -> int:
        name, device = self._names[number], f"pltun{number}"
        found = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(found, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
        inside = ["-n", name] if name else []
        if name:
            run("ip", "netns", "add", name)
            run("ip", "link", "set", device, "netns", name)
        run("ip", *inside, "addr", "add", f"{self.address(number)}/24", "dev", device)
        run("ip", *inside, "link", "set", device, "mtu", f"{_MTU}", "up")
        run("ip", *inside, "link", "set", "lo", "up")
        return found

    # The switch.

    def _run(self) -> None:
        poll = select.poll()
        numbers = {device: number for number, device in enumerate(self._devices)}
        for device in self._devices:
            poll.register(device, select.POLLIN)
        while not self._is_closing:
            wait_s = min(self._due[0][0] - time.monotonic(), 0.05) if self._due else 0.05
            for device, _ in poll.poll(max(wait_s, 0.0) * 1000):
                self._drain(device, numbers[device])
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                _, _, target, packet = heapq.heappop(self._due)
                self._write(target, packet)

    def _drain(self, device: int, source: int) -> None:
        for _ in range(64):
            try:
                packet = os.read(device, 1 << 16)
            except BlockingIOError:
                return
            target = packet[19] - 1 if len(packet) >= 20 and packet[0] >> 4 == 4 else -1
            if 0 <= target < len(self._devices):
                self._carry(source, target, packet)

    def _carry(self, source: int, target: int, packet: bytes) -> None:
        way = self._ways.get((source, target))
        if way is not None and way.loss and self._chance.random() < way.loss:
            return
        if resets := self._resets.answers(source, target, packet):
            for host, reset in zip((target, source), resets, strict=True):
                self._write(host, reset)
        elif way is None or not (way.delay_s or way.bytes_per_s):
            self._write(target, packet)
        else:
            now = time.monotonic()
            free_at = max(self._free_at.get((source, target), 0.0), now)
            if free_at - now <= _MOST_QUEUED_S:
                free_at += len(packet) / way.bytes_per_s if way.bytes_per_s else 0.0
                self._free_at[source, target] = free_at
                heapq.heappush(self._due, (free_at + way.delay_s, next(self._order), target, packet))

    def _write(self, target: int, packet: bytes) -> None:
        try:
            os.write(self._devices[target], packet)
        except OSError:
            pass  # the device's queue is full, so the packet is lost


class Resets:
    """Resets of TCP connections. A reset needs the sequence numbers of the connection's next packet."""

    def __init__(self) -> None:
        self._until: dict[tuple[int, int | None], float] = {}
        self._counts: dict[frozenset[bytes], int] = {}
        self._fresh: set[frozenset[bytes]] = set()

    def begin(self, one: int, other: int | None) -> None:
        """Reset the connections of two hosts for some time, or of one host with all others if `other` is None."""
        self._counts.clear()
        self._fresh.clear()
        self._until[one, other] = time.monotonic() + 1.0

    def answers(self, source: int, target: int, packet: bytes) -> tuple[bytes, bytes] | None:
        """Return the resets that replace a packet: to its target and to its source."""
        if not self._until or packet[9] != _TCP or not self._concerns(source, target):
            return None
        start = (packet[0] & 15) * 4
        ports, sequence, acknowledged = (
            packet[start : start + 4],
            packet[start + 4 : start + 8],
            packet[start + 8 : start + 12],
        )
        flow = frozenset((packet[12:16] + ports[:2], packet[16:20] + ports[2:]))
        if packet[start + 13] & (_SYN | _RST) or flow in self._fresh:
            self._fresh.add(flow)
            return None
        self._counts[flow] = self._counts.get(flow, 0) + 1
        if self._counts[flow] > _RESETS:
            return None
        back = ports[2:] + ports[:2]
        return (
            make_reset(packet[12:16], packet[16:20], ports, sequence),
            make_reset(packet[16:20], packet[12:16], back, acknowledged),
        )

    def _concerns(self, source: int, target: int) -> bool:
        now = time.monotonic()
        for key, until in list(self._until.items()):
            if now > until:
                self._until.pop(key, None)
            elif key in ((source, target), (target, source), (source, None), (target, None)):
                return True
        return False


def make_reset(source: bytes, target: bytes, ports: bytes, sequence: bytes) -> bytes:
    """Return a packet that ends a TCP connection (RFC 9293) if the receiver expects `sequence`."""
    tcp = ports + sequence + bytes(4) + bytes([5 << 4, _RST]) + bytes(6)
    pseudo = source + target + struct.pack("!HH", _TCP, len(tcp))
    tcp = tcp[:16] + struct.pack("!H", checksum(pseudo + tcp)) + tcp[18:]
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 0, 0, 64, _TCP, 0) + source + target
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + tcp


def checksum(data: bytes) -> int:
    """Return the internet checksum (RFC 1071) of an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def run(*words: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(words, check=True, capture_output=True, text=True)
