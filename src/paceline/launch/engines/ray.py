"""Ray: run the roles as actors in placement groups with one bundle per node, and print their output."""

from __future__ import annotations

import logging
import math
import os
import selectors
import shlex
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from typing_extensions import override

from paceline.errors import PeerError
from paceline.launch.screen import LineSplitter, Screen
from paceline.launch.supervisor import Child, Supervisor

from .engine import RunRole, report
from .node_processes import END_S, POLL_S, NodeEngine, NodeProcess, variables_of
from .options import EngineFlags
from .ray_nodes import MOST_REQUESTS, RETRY_S, NodeActor, NodePlace, RayNodes, connect, find_places, receive
from .ssh_host import CANNOT_START, GRACE_S, HostRequest, find_problem, run_command

_PAUSE_S: Final = 0.05
_NOTE_S: Final = 5.0
"""Time after which a note reports that resources are missing."""
_START_S: Final = 120.0
"""Time limit for the start of the actors in their reserved resources."""
_MARGIN_S: Final = 5.0
"""Time for the replies of the actors, in addition to the time for the end of their commands."""


class CommandActor(NodeActor):
    """The actor of a process. It runs the command and returns the output. It needs three threads, one per method."""

    def __init__(self) -> None:
        super().__init__()
        self._grace_s = GRACE_S
        pipes = os.pipe(), os.pipe()
        self._selector = selectors.DefaultSelector()
        for is_error, (read_end, _) in zip((False, True), pipes, strict=True):
            self._selector.register(read_end, selectors.EVENT_READ, is_error)
        self._write_ends = [write_end for _, write_end in pipes]
        """The pipes of the command's standard output and standard error, until the command has started."""

    def run(self, request: HostRequest) -> tuple[int, str | None]:
        """Run a command. Return its exit status, and the reason if it cannot start."""
        try:
            problem = find_problem(request)
            if problem is not None:
                return 1, problem
            output, errors = self._write_ends
            return run_command(request, self._wait_end, cwd=request.folder, stdout=output, stderr=errors), None
        except OSError as error:
            return CANNOT_START, f"cannot start {request.command[0]}: {error.strerror}"
        finally:
            self._close_write_ends()

    def _wait_end(self, _: Supervisor, child: Child) -> float:
        self._close_write_ends()  # so that the output ends with the command
        while child.is_alive() and not self._is_stopped.wait(_PAUSE_S):
            pass
        return self._grace_s

    def _close_write_ends(self) -> None:
        while self._write_ends:
            os.close(self._write_ends.pop())

    def read(self) -> list[tuple[bool, bytes]]:
        """Wait for output. Return pairs of a stream (True: standard error) and its data; empty at the end of both."""
        output: list[tuple[bool, bytes]] = []
        while not output and self._selector.get_map():
            for key, _ in self._selector.select():
                if data := os.read(key.fd, 1 << 16):
                    output.append((key.data, data))
                else:
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
        return output

    @override
    def stop(self, grace_s: float = GRACE_S) -> None:
        """End the command, and kill it if it lives for `grace_s` more seconds."""
        self._grace_s = grace_s
        self._is_stopped.set()


class _RayProcess(NodeProcess):
    """A process of a role on a Ray node, and its actor."""

    loss: str | None = None

    def __init__(self, role: RunRole, number: int, node: str, actor: Any) -> None:
        super().__init__(role, number, node)
        self.actor = actor
        self.splitters = LineSplitter(), LineSplitter()
        self.exit_status: int | None = None
        self.is_read = False
        """Whether all output was received."""

    @override
    def status(self) -> int | None:
        return self.exit_status if self.is_read else None

    def end(self, result: tuple[int, str | None]) -> None:
        self.exit_status, self.problem = result

    def lose(self, reason: str) -> None:
        self.exit_status, self.is_read, self.loss = 1, True, reason


class Ray(NodeEngine[_RayProcess]):
    """Runs the roles on the cluster at RAY_ADDRESS, else on the cluster of this machine."""

    retry_s = RETRY_S

    def __init__(self, flags: EngineFlags) -> None:
        super().__init__()
        self._num_gpus, self._queue_timeout_s = flags.pods.gpus or 0, flags.queue_timeout
        self._screen = Screen("node {}".format)
        self._nodes: RayNodes | None = None
        self._calls: dict[Any, tuple[_RayProcess, Callable[[_RayProcess, Any], None]]] = {}
        """The actors' calls that have not returned, with the functions that receive their values."""
        self._addresses: dict[int, str] = {}
        """The addresses of the nodes by number."""
        self._num_more = 0
        """Number of further nodes that are not requested yet."""

    @override
    def describe(self, roles: Sequence[RunRole]) -> str:
        lines = [f"# in {os.getcwd()} on each node"]
        for number, bundle in enumerate(self._bundles_of(roles)):
            resources = ", ".join(f"{amount} {name}" for name, amount in bundle.items())
            lines += [f"# node {number}: {resources}"]
            lines += [f"{shlex.join(role.command)}  # {role.name}" for role in roles if number < role.num_nodes]
        if roles[-1].num_more:
            lines += [f"# up to {roles[-1].num_more} more nodes, when Ray has resources"]
        return "\n".join([*lines, ""])

    def _resources_of(self, role: RunRole, *, is_last: bool) -> dict[str, int]:
        return {"CPU": role.num_cpus} | ({"GPU": self._num_gpus} if self._num_gpus and is_last else {})

    def _bundles_of(self, roles: Sequence[RunRole]) -> list[dict[str, int]]:
        """Return the resources of each node. The last role uses the GPUs."""
        bundles = [dict[str, int]() for _ in range(max(role.num_nodes for role in roles))]
        for role in roles:
            for bundle in bundles[: role.num_nodes]:
                for name, amount in self._resources_of(role, is_last=role is roles[-1]).items():
                    bundle[name] = bundle.get(name, 0) + amount
        return bundles

    @override
    def start(self, roles: Sequence[RunRole]) -> None:
        self._variables, self._last = variables_of(os.environ), roles[-1]
        connect(address="auto", log_to_driver=False, logging_level=logging.WARNING)
        self._nodes = RayNodes.request(self._bundles_of(roles))
        self._wait_reserved(self._nodes)
        for role in roles:
            self._processes += [self._start(role, number) for number in range(role.num_nodes)]
        places = find_places([process.actor for process in self._processes], _START_S)
        self._addresses = {
            process.number: place.address for process, place in zip(self._processes, places, strict=True)
        }
        for process, place in zip(self._processes, places, strict=True):
            self._run(process, place)
        self._num_more = roles[-1].num_more
        for _ in range(MOST_REQUESTS):
            self._request_more()

    def _request_more(self) -> None:
        """Request the resources of a further node, unless all nodes are requested."""
        assert self._nodes is not None
        if self._num_more:
            self._num_more -= 1
            number, ready = self._nodes.request_more(self._resources_of(self._last, is_last=True))
            self._calls[ready] = (_RayProcess(self._last, number, "", None), self._add)

    def _add(self, process: _RayProcess, _: Any) -> None:
        self._start_again(process)
        self._request_more()

    def _wait_reserved(self, nodes: RayNodes) -> None:
        limit_s = math.inf if self._queue_timeout_s is None else self._queue_timeout_s
        deadline, is_reported = time.monotonic() + limit_s, False
        while not nodes.wait_reserved(min(deadline - time.monotonic(), _NOTE_S)):
            text = f"Ray has not reserved the resources: {nodes.describe_shortage()}"
            if time.monotonic() >= deadline:
                raise PeerError(f"{text}. --queue-timeout {limit_s:g} has passed, and the run is cancelled")
            if not is_reported:
                report(f"{text}; Ctrl-C cancels the run")
            is_reported = True

    def _start(self, role: RunRole, number: int, node: str = "") -> _RayProcess:
        assert self._nodes is not None
        resources = self._resources_of(role, is_last=role is self._last)
        actor = self._nodes.start(CommandActor, number, resources, num_threads=3)
        return _RayProcess(role, number, node, actor)

    def _run(self, process: _RayProcess, place: NodePlace) -> None:
        process.node, self._addresses[process.number] = place.name, place.address
        count = max(process.role.num_nodes, process.number + 1)
        addresses = [self._addresses.get(number, "") for number in range(count)]
        request = self._request_of(process, addresses)
        process.has_started = True
        self._calls[process.actor.run.remote(request)] = (process, _RayProcess.end)
        self._calls[process.actor.read.remote()] = (process, self._show)

    def _show(self, process: _RayProcess, output: list[tuple[bool, bytes]]) -> None:
        for is_error, data in output:
            self._screen.write(process.number, process.splitters[is_error].feed(data), is_error=is_error)
        if output:
            self._calls[process.actor.read.remote()] = (process, self._show)
            return
        process.is_read = True
        for is_error, splitter in zip((False, True), process.splitters, strict=True):
            self._screen.write(process.number, splitter.flush(), is_error=is_error)

    @override
    def _receive(self) -> None:
        for (process, take_value), value, problem in receive(self._calls, POLL_S):
            if problem is None:
                take_value(process, value)
            else:
                process.lose(problem)

    @override
    def _discard(self, process: _RayProcess) -> None:
        assert self._nodes is not None
        self._nodes.kill(process.actor)  # the actor may live although Ray cannot reach its node

    @override
    def _start_again(self, lost: _RayProcess) -> None:
        """Start an actor in the bundle of a node. Ray moves the bundle of a lost node to another node."""
        process = self._start(lost.role, lost.number, lost.node)
        self._processes.append(process)
        self._calls[process.actor.find_place.remote()] = (process, self._run)

    @override
    def close(self) -> None:
        nodes, self._nodes = self._nodes, None
        if nodes is None:
            return
        grace_s = GRACE_S if self._has_failed else END_S
        deadline = time.monotonic() + grace_s + _MARGIN_S
        try:
            started = [process for process in self._processes if process.has_started]
            self._calls = {call: target for call, target in self._calls.items() if target[0] in started}
            for process in started:
                process.actor.stop.remote(grace_s)
            while any(process.status() is None for process in started) and time.monotonic() < deadline:
                self._receive()
        finally:
            nodes.close()
            self._processes, self._calls = [], {}
