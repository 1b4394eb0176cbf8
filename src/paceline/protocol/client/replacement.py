"""What takes the place of unanswered requests at a view change: the same pushes and pulls, for who leads their buckets.

Everything goes out again in the order in which it was made; servers tell a push that comes twice by its number, so to
send too much is never wrong, but to send a later push of a bucket before an earlier one would be. Of one push there is
one request for each server, whatever its parts before: of two frames of one number a server would take the second for
a repetition. A push that also reads becomes a push and a pull behind it, since it may have ended the iteration, and the
worker's clock is said apart.
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
    """All that is unanswered or unstable of one push."""

    unanswered: list[Request] = field(default_factory=list)
    retained: list[tuple[ServerSession, Request]] = field(default_factory=list)


def replace(
    given_up: Iterable[Request], before: Iterable[ServerSession], after: Mapping[int, ServerSession], follows: bool
) -> Iterator[Transmit]:
    """Yield what is sent in the place of the requests given up, and of the pushes that `before` retain.

    `after` are the sessions of the new view by server, by whose `leads` requests are cut; `follows` says that no view
    lies between. Retained pushes stay with their servers as far as those still lead the buckets.
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
    # A pull bears the number of the last push before it.
    ordered: list[tuple[int, int, _Push | Request]] = [(sequence, 0, push) for sequence, push in pushes.items()]
    ordered += [(pull.sequence, 1, pull) for pull in pulls]
    ordered.sort(key=lambda each: each[:2])
    for _, _, each in ordered:
        yield from _push_again(each, after, follows) if isinstance(each, _Push) else _pull_again(each, after)


def _push_again(push: _Push, after: Mapping[int, ServerSession], follows: bool) -> Iterator[Transmit]:
    wanted = 0
    for request in push.unanswered:
        assert request.payload is not None
        wanted |= request.payload.buckets
    for session, request in push.retained:
        # What its server still leads it still has; unless there was a view between in which it did not.
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
