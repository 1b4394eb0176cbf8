"""Replacement of unanswered requests at a view change: the same pushes and pulls, for the new primaries.

Requests are resent in their original order. Servers detect duplicate pushes by number, so resending too much is safe,
but a later push to a bucket must not overtake an earlier one. The parts of one push for the same server are merged
into one request, because the server would take a second frame with the same number for a duplicate. A push that also
reads becomes a push and a pull after it: the push may have ended the iteration, and the resync sends the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from paceline.protocol.buckets import Buckets
from paceline.protocol.client.instructions import Transmit
from paceline.protocol.client.requests import PUSHES, READS, Request, RequestKind
from paceline.protocol.client.session import ServerSession


@dataclass(eq=False, slots=True)
class _Push:
    """The unanswered and unstable parts of one push."""

    unanswered: list[Request] = field(default_factory=list)
    retained: list[tuple[ServerSession, Request]] = field(default_factory=list)


def replace(
    given_up: Iterable[Request], before: Iterable[ServerSession], after: Mapping[int, ServerSession], follows: bool
) -> Iterator[Transmit]:
    """Yield the replacements of abandoned requests and of the pushes retained in the sessions `before`.

    `after` are the sessions of the new view by server; their `leads` determine the split. `follows` means that no view
    was missed. Retained pushes stay with servers that still lead their buckets.
    """
    pushes: dict[int, _Push] = {}
    pulls: list[Request] = []
    for session in before:
        for request in session.retained:
            pushes.setdefault(request.sequence, _Push()).retained.append((session, request))
    for request in given_up:
        request.replacements = []
        if request.kind in PUSHES:
            pushes.setdefault(request.sequence, _Push()).unanswered.append(request)
        if request.kind in READS:
            pulls.append(request)
    # A pull has the number of the last push before it.
    ordered: list[tuple[int, int, _Push | Request]] = [(sequence, 0, push) for sequence, push in pushes.items()]
    ordered += [(pull.sequence, 1, pull) for pull in pulls]
    ordered.sort(key=lambda entry: entry[:2])
    for _, _, item in ordered:
        yield from _push_again(item, after, follows) if isinstance(item, _Push) else _pull_again(item, after)


def _push_again(push: _Push, after: Mapping[int, ServerSession], follows: bool) -> Iterator[Transmit]:
    wanted = 0
    for request in push.unanswered:
        assert request.payload is not None
        wanted |= request.payload.buckets
    for session, request in push.retained:
        # The server still has the buckets that it still leads, unless it lost them in a missed view.
        wanted |= request.held_buckets & ~(_leads(session, after) if follows else 0)
    sent = 0
    for session in after.values():
        buckets = wanted & session.leads
        if buckets:
            sent |= buckets
            yield _push_to(session, push, buckets)
    for session, request in push.retained:
        request.held = request.held_buckets & _leads(session, after) & ~sent


def _push_to(session: ServerSession, push: _Push, buckets: Buckets) -> Transmit:
    pieces: list[tuple[Request, Buckets]] = []
    parents: list[Request] = []
    for request in push.unanswered:
        assert request.payload is not None
        if request.payload.buckets & buckets:
            pieces.append((request, request.payload.buckets & buckets))
            parents.append(request)
    for _, request in push.retained:
        if request.held_buckets & buckets:
            pieces.append((request, request.held_buckets & buckets))
    former = pieces[0][0]
    request = session.request(RequestKind.PUSH, former.clock, former.sequence)
    return _in_place_of(parents, request, pieces)


def _pull_again(former: Request, after: Mapping[int, ServerSession]) -> Iterator[Transmit]:
    assert former.payload is not None
    for session in after.values():
        buckets = former.payload.buckets & session.leads
        if buckets:
            request = session.request(RequestKind.PULL, former.clock + former.ends_iteration, former.sequence)
            yield _in_place_of([former], request, [(former, buckets)])


def _in_place_of(parents: list[Request], request: Request, pieces: list[tuple[Request, Buckets]]) -> Transmit:
    request.parents = parents
    for parent in parents:
        assert parent.replacements is not None
        parent.replacements.append(request)
    return Transmit(request, tuple(pieces))


def _leads(session: ServerSession, after: Mapping[int, ServerSession]) -> Buckets:
    return session.leads if session.server in after else 0
