"""Connect the ranks of one group."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from paceline.collectives.aborts import Abort
from paceline.collectives.calls import CollectiveCall
from paceline.collectives.group_setup import GroupLayout, GroupSetup
from paceline.collectives.network import verdicts as _verdicts
from paceline.collectives.network.culprits import Status
from paceline.collectives.network.engine import Choose, Layered, NetworkEngine
from paceline.collectives.network.executor import ScheduleExecutor
from paceline.collectives.network.mesh import Mesh
from paceline.collectives.p2p.point_to_point import PointToPoint
from paceline.errors import CollectiveError, GroupClosedError, RankLostError
from paceline.meeting.world import World
from paceline.transport import read_meta

_STATUS_TIMEOUT_S = 1.0
_UNKNOWN_CALL = CollectiveCall("a call")


class Connections:
    """Creates, at first use, the connections and the shared memory of one rank in a group."""

    def __init__(
        self,
        world: World,
        ranks: Sequence[int],
        name: str,
        timeout_s: float,
        on_failure: Callable[[CollectiveError, bool], None] | None = None,
    ) -> None:
        """`ranks` are world ranks in the order of the group. See :class:`PointToPoint` for `on_failure`."""
        self._world, self._timeout_s, self._on_failure = world, timeout_s, on_failure
        self.layout = GroupLayout(name, ranks, world.rank, world.infos)
        self.at: tuple[int, CollectiveCall | None] = (-1, None)
        """The number of the current call and the call. Between calls: the number of the last call, and None."""
        self._executor: ScheduleExecutor | None = None
        self._network: NetworkEngine | None = None
        self._point_to_point: PointToPoint | None = None
        self._creating = threading.Lock()
        self._is_closed = False
        self._abort: Abort | None = None
        deadline = time.monotonic() + timeout_s
        setup = GroupSetup(world, self.layout)
        self.shared = setup.share(deadline)
        try:
            self._has_layers = setup.agree_on_layers(self.shared, deadline)
        except BaseException:
            if self.shared is not None:
                self.shared.close()
            raise
        self._world.node.set_status(self._identity, self._status)

    def names_in_program(self) -> tuple[str, tuple[int, ...], str]:
        """Return the group's name, its ranks in the world, and the world's name."""
        name, world = self.layout.name, self._world.name
        return name if name.startswith(world) else self._identity, self.layout.ranks, world

    @property
    def _identity(self) -> str:
        return f"{self._world.name}/{self.layout.name}"

    def network(self, choose: Choose) -> NetworkEngine:
        if self._network is None:
            with self._creating:
                self._check_open()
                mesh = Mesh(self._world.node, self._identity, self.layout.rank, self.layout.infos)
                self._executor = ScheduleExecutor(mesh, group=self.layout.name, request_status=self._request_status)
                layered = None
                if self._has_layers:
                    layered = Layered(self._executor, self.shared, self.layout.hosts, self.layout.rank)
                self._network = NetworkEngine(mesh, self._executor, self.layout.hosts, choose, layered)
        return self._network

    def point_to_point(self) -> PointToPoint:
        if self._point_to_point is None:
            with self._creating:
                self._check_open()
                if self._point_to_point is None:
                    self._point_to_point = PointToPoint(
                        self._world.node,
                        self._identity,
                        self.layout.rank,
                        self.layout.infos,
                        connect_timeout_s=self._timeout_s,
                        request_status=self._request_status,
                        on_failure=self._on_failure,
                    )
        return self._point_to_point

    def _check_open(self) -> None:
        if self._is_closed:
            raise GroupClosedError(f"group {self.layout.name!r} was closed or aborted")

    def abort(self, error: BaseException, sequence: int) -> None:
        """Make the other ranks raise ``error`` in their current or next call.

        Only the thread that runs the group's calls may call this method.
        """
        if not isinstance(error, GroupClosedError):
            report = self._to_report(error)
            self._abort = self._abort or Abort.of(report)
            if self._point_to_point is not None:
                self._point_to_point.fail(report)
        if self.shared is not None:
            self.shared.abort(error)
        if self._executor is not None:
            self._executor.abort(_UNKNOWN_CALL, sequence, error)

    def interrupt(self, error: CollectiveError) -> None:
        """End the current call, which another thread runs, on this rank and the other ranks.

        The caller must call :meth:`abort` after the current call has ended.
        """
        self._abort = self._abort or Abort.of(error)
        if self.shared is not None:
            self.shared.abort(error)
        if self._executor is not None:
            self._executor.interrupt(error)

    def _to_report(self, error: BaseException) -> CollectiveError:
        if isinstance(error, CollectiveError):
            return error
        current = _verdicts.CurrentCall(self.layout.name, self.layout.rank, self.at[1] or _UNKNOWN_CALL, self.at[0])
        return CollectiveError(_verdicts.failed(current, error).message)

    def end_all(self) -> None:
        """End all calls that other threads of this rank run, and notify the other ranks that this rank aborted."""
        with self._creating:
            self._is_closed = True
        if self.shared is not None:
            self.shared.abort(
                RankLostError(f"rank {self.layout.rank} aborted group {self.layout.name!r}", (self.layout.rank,))
            )
        if self._network is not None:
            self._network.close()
        if self._point_to_point is not None:
            self._point_to_point.close("aborted")

    def close(self) -> None:
        with self._creating:
            self._is_closed = True
        for part in (self.shared, self._network, self._point_to_point):
            if part is not None:
                part.close()
        self._world.node.forget(self._identity)

    # The following methods are for status requests between ranks.

    def _status(self) -> bytes:
        waiting_for = () if self._executor is None or self.at[1] is None else self._executor.status().waiting_for
        if self.at[1] is None and self._point_to_point is not None:
            waiting_for = self._point_to_point.waiting_for()
        return msgspec.msgpack.encode(Status(*self.at, waiting_for, self._abort))

    def _request_status(self, rank: int) -> Status | None:
        answer = self._world.node.request_status(self.layout.infos[rank], self._identity, _STATUS_TIMEOUT_S)
        if answer is None:
            return None
        return read_meta(answer, Status, f"an answer of rank {rank}") if answer else Status(-1, None, ())
