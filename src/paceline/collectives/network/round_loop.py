"""Run a round of a schedule: try all links, poll for a short time, then sleep until a link is ready."""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable, Sequence

from paceline.collectives.network.receiving import PeerMessages
from paceline.collectives.network.rounds import Round
from paceline.errors import GroupClosedError
from paceline.transport.spinning import Spinner

_IN = select.POLLIN
_OUT = select.POLLOUT
_MOVED = (-1, 0)  # an event without a poll, which means that bytes were sent or received
_MAX_TRIED = 3  # for more links, one poll is cheaper than one attempt per link


class RoundLoop:
    """Sends and receives the messages of rounds. Between rounds, the sockets stay registered for polling."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._watched: dict[int, int] = {}
        self._spinner = Spinner()

    def finish(self, round_: Round, wake: Callable[[Round], float]) -> None:
        """Run all actions of a round. Before each sleep, ``wake`` returns the time (``time.monotonic``) at which the
        sleep must end, or raises an error that ends the call.
        """
        sending: Sequence[PeerMessages] = round_.sending
        receiving: Sequence[PeerMessages] = round_.receiving
        while True:
            if _advance(round_, sending, receiving):
                round_.prune()
                if round_.is_done:
                    return
                sending, receiving = round_.sending, round_.receiving
            elif round_.is_done:
                return
            else:
                sending, receiving = self._wait(round_, wake)

    def _wait(
        self, round_: Round, wake: Callable[[Round], float]
    ) -> tuple[Sequence[PeerMessages], Sequence[PeerMessages]]:
        all_peers = round_.sending, round_.receiving
        try_links: Callable[[int], list[tuple[int, int]]]
        if len(round_.sending) + len(round_.receiving) <= _MAX_TRIED:

            def try_links(_: int) -> list[tuple[int, int]]:
                return [_MOVED] if _advance(round_, *all_peers) else []

            if self._spinner.poll(try_links):
                round_.prune()
                return round_.sending, round_.receiving
            self._watch(round_)
            events: list[tuple[int, int]] = []
        else:
            self._watch(round_)
            events = self._spinner.poll(self._poll.poll)
        while not events:
            wait_s = wake(round_) - time.monotonic()
            events = self._poll.poll(max(0, math.ceil(wait_s * 1e3)))
        return _ready(round_, events)

    def _watch(self, round_: Round) -> None:
        """Register the round's sockets for polling. A link that only sends is polled for reads too, because the other
        rank may send an ABORT.
        """
        wanted = {peer.link.fileno(): _IN for peer in round_.receiving if peer.wants_bytes}
        for peer in round_.sending:
            fd = peer.link.fileno()
            watches = wanted.get(fd, _IN if not (peer.receives or peer.has_next_head) else 0)
            wanted[fd] = watches | _OUT
        if -1 in wanted:
            raise GroupClosedError("the group was closed during a call")
        watched = self._watched
        if wanted == watched:
            return
        for fd in [fd for fd in watched if fd not in wanted]:
            self._poll.unregister(fd)
            del watched[fd]
        for fd, events in wanted.items():
            if watched.get(fd) != events:
                self._poll.register(fd, events)
                watched[fd] = events


def _advance(round_: Round, sending: Sequence[PeerMessages], receiving: Sequence[PeerMessages]) -> bool:
    moved = False
    for peer in sending:
        if peer.push():
            moved = True
    for copy in round_.copies:
        if not copy.is_done and copy.advance():
            moved = True
    for peer in receiving:
        if peer.pull():
            moved = True
    return moved


def _ready(round_: Round, events: Sequence[tuple[int, int]]) -> tuple[Sequence[PeerMessages], Sequence[PeerMessages]]:
    ready = dict(events)
    sending = [peer for peer in round_.sending if ready.get(peer.link.fileno(), 0) & ~_IN]
    for peer in round_.sending:
        if ready.get(peer.link.fileno(), 0) & ~_OUT and not peer.receives:
            peer.peek()
    if sending:  # received bytes of any link may wait in scratch memory until these sends are done
        return sending, round_.receiving
    return sending, [peer for peer in round_.receiving if peer.link.fileno() in ready]
