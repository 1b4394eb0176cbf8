"""Record the frames that a server or a scheduler handles, for the timeline of a run."""

from __future__ import annotations

from typing import Final

from typing_extensions import override

from paceline.observe.spans.window import StepWindow
from paceline.observe.stuck.processes import flight_recorder
from paceline.observe.stuck.recorder import FRAME, RecordedOperation
from paceline.ps import messages
from paceline.transport import Handler, Header, Peer

_NAMES: Final = {
    messages.PUSH: "push",
    messages.PULL: "pull",
    messages.PUSH_PULL: "push_pull",
    messages.FILTERED_PUSH: "push",
    messages.FILTERED_PULL: "pull",
    messages.FILTERED_PUSH_PULL: "push_pull",
    messages.TICK: "tick",
    messages.CALL: "call",
    messages.NOTICE: "notification",
    messages.FORWARD: "forwarded push",
}


class RecordedFrames(Handler):
    """Passes frames to a handler, and records them while ranks are in the steps of the timeline."""

    def __init__(self, handler: Handler, window: StepWindow) -> None:
        self._handler, self._window = handler, window
        self._operations: dict[tuple[int, int, int], bytes] = {}

    @override
    def connected(self, peer: Peer) -> None:
        self._handler.connected(peer)

    @override
    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        if not self._window.is_open or header.kind not in _NAMES:
            self._handler.frame_received(peer, header, meta, body)
            return
        rank = peer.hello.rank if peer.hello.role == "worker" else -1
        key = (header.kind, header.table, rank)
        operation = self._operations.get(key)
        if operation is None:
            subject = f"table {header.table}" if header.kind != messages.CALL else ""
            operation = RecordedOperation(FRAME, _NAMES[header.kind], subject=subject, peer=rank).encode()
            self._operations[key] = operation
        recorder = flight_recorder()
        event = recorder.begin(operation, header.request, len(body), header.clock)
        try:
            self._handler.frame_received(peer, header, meta, body)
        finally:
            recorder.end(event)

    @override
    def disconnected(self, peer: Peer, reason: Exception | None) -> None:
        self._handler.disconnected(peer, reason)
