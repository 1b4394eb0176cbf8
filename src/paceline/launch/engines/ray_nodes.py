"""The nodes of a run on a Ray cluster: placement groups with one bundle per node, and the actors in the bundles."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from typing_extensions import Self, override

from paceline.closing import Closing
from paceline.errors import PeerError, UsageError, printable
from paceline.version import __version__

try:
    import ray
    from ray.exceptions import RayError
    from ray.util import placement_group, remove_placement_group
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ImportError("Ray is not installed. Install it: pip install 'paceline[ray]'") from error

_Call = TypeVar("_Call")
_CONNECT_S: Final = 5.0
RETRY_S: Final = 10.0
"""The pause before each attempt to start the ranks of a lost node again."""
MOST_REQUESTS: Final = 8
"""Maximum number of nodes that a growing run requests at the same time."""
_SHOWN_CHARS: Final = 400
_HTTP2_SETTINGS: Final = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""An empty frame of the type SETTINGS, which both ends of HTTP/2 send first."""
_HTTP2_START: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _HTTP2_SETTINGS


@dataclass(frozen=True, slots=True)
class NodePlace:
    """The node on which an actor runs."""

    address: str
    node: str
    """Ray's identifier of the node."""
    version: str
    """The version of Paceline on the node."""

    @property
    def name(self) -> str:
        """The name of the node in messages."""
        return f"Ray node {self.address} ({self.node[:8]})"

    @property
    def problem(self) -> str | None:
        """The reason why the node cannot take part; None if it can."""
        if self.version == __version__:
            return None
        return f"{self.name} has Paceline {self.version}, expected {__version__}. Install it there"


class NodeActor:
    """The base class of the actors of a run. An actor needs a thread for each method that runs at the same time."""

    def __init__(self) -> None:
        self._is_stopped = threading.Event()

    def find_place(self) -> NodePlace:
        return NodePlace(ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), __version__)

    def stop(self) -> None:
        """End the actor's processes."""
        self._is_stopped.set()


class RayNodes(Closing):
    """The placement groups of a run, and its actors. :meth:`close` removes them."""

    def __init__(self, group: PlacementGroup, bundles: Sequence[Mapping[str, float]]) -> None:
        self._bundles = bundles
        self._places = [(group, index) for index in range(len(bundles))]
        """The placement group of each node by number, and the index of the node's bundle."""
        self._ready = group.ready()
        self._is_closed = False

    @classmethod
    def request(cls, bundles: Sequence[Mapping[str, float]]) -> Self:
        """Request a bundle of resources for each node. If there is room, Ray puts all bundles on different nodes."""
        return cls(placement_group([dict(bundle) for bundle in bundles], strategy="SPREAD"), bundles)

    def request_more(self, bundle: Mapping[str, float]) -> tuple[int, Any]:
        """Request the bundle of a further node.

        Return the node's number, and a reference whose result exists when Ray has reserved the bundle.
        """
        group = placement_group([dict(bundle)], strategy="SPREAD")
        self._places.append((group, 0))
        return len(self._places) - 1, group.ready()

    def wait_reserved(self, timeout_s: float) -> bool:
        """Wait until Ray has reserved all bundles; return whether it has."""
        return wait_all([self._ready], timeout_s)

    def describe_shortage(self) -> str:
        """Return the requested, existing and free resources."""
        existing, free = ray.cluster_resources(), ray.available_resources()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return "; ".join(
            f"{len(self._bundles)} x {amount:g} {name} requested, {existing.get(name, 0):g} existing, "
            f"{free.get(name, 0):g} free, {max((node.get(name, 0) for node in nodes), default=0):g} on the largest node"
            for name, amount in self._bundles[0].items()  # the first node has all roles
        )

    def start(self, actor: type[NodeActor], number: int, resources: Mapping[str, float], *, num_threads: int) -> Any:
        """Start an actor with a part of the resources of bundle `number`; return its handle."""
        group, index = self._places[number]
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        options = {"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0), "max_concurrency": num_threads}
        return ray.remote(max_restarts=0, **options)(actor).options(scheduling_strategy=place).remote()

    def kill(self, actor: Any) -> None:
        """Kill an actor. A guard process then ends the actor's processes."""
        ray.kill(actor)

    @property
    def is_connected(self) -> bool:
        """Whether this process is still connected to the cluster."""
        return bool(ray.is_initialized())

    @override
    def close(self) -> None:
        if not self._is_closed and self.is_connected:
            for group, index in self._places:
                if index == 0:
                    remove_placement_group(group)  # kills the actors
        self._is_closed = True


def connect(**options: Any) -> None:
    """Connect to the cluster at RAY_ADDRESS, unless this process is connected. Raises UsageError.

    `options` are those of ``ray.init``.
    """
    if ray.is_initialized():
        return
    handler = signal.getsignal(signal.SIGTERM)
    address = os.environ.get("RAY_ADDRESS")
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():
            _check_server(host.strip("[]"), int(port))
        ray.init(**options)
        if handler != signal.SIG_DFL and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has replaced it by a handler that ends the process
    except (OSError, RuntimeError, ValueError) as error:
        place = f"at RAY_ADDRESS={address}" if address else "on this machine"
        reason = printable(" ".join(str(error).split()), _SHOWN_CHARS).rstrip(".")
        raise UsageError(
            f"no Ray cluster {place}: {reason}. Run ray start --head, or set RAY_ADDRESS to host:port of a cluster"
        ) from None


def _check_server(host: str, port: int) -> None:
    """Raise OSError unless a server with Ray's protocol, gRPC, answers. ``ray.init`` would retry for minutes."""
    with socket.create_connection((host, port), _CONNECT_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return
        connection.sendall(_HTTP2_START)
        if connection.recv(len(_HTTP2_SETTINGS))[3:4] != _HTTP2_SETTINGS[3:4]:
            raise ConnectionError("the server there is not Ray")


def find_places(actors: Sequence[Any], timeout_s: float) -> list[NodePlace]:
    """Wait until all actors have started; return their nodes. Raises UsageError or PeerError."""
    references = [actor.find_place.remote() for actor in actors]
    if not wait_all(references, timeout_s):
        raise UsageError(
            "Ray has reserved the resources but not started its actors in time. Check `ray status`, or wait longer"
        )
    try:
        places: list[NodePlace] = ray.get(references)
    except RayError as error:
        raise PeerError(
            f"a Ray actor cannot start: {_reason_of(error)}. All nodes need Paceline {__version__}"
        ) from error
    for place in places:
        if place.problem is not None:
            raise UsageError(place.problem)
    return places


def wait_all(references: Sequence[Any], timeout_s: float) -> bool:
    """Wait until all results exist; return whether they do."""
    return not ray.wait(references, num_returns=len(references), timeout=max(timeout_s, 0.0))[1]


def receive(pending: MutableMapping[Any, _Call], timeout_s: float) -> Iterator[tuple[_Call, Any, str | None]]:
    """Wait for results, and remove their references from `pending`.

    Yield each call with its value, or with the reason of its failure.
    """
    for reference in ray.wait([*pending], timeout=timeout_s)[0]:
        call = pending.pop(reference)
        try:
            yield call, ray.get(reference), None
        except RayError as error:
            yield call, None, _reason_of(error)


def load_values(arguments: Iterable[Any]) -> list[Any]:
    """Return the arguments, with each ObjectRef replaced by its value."""
    return [ray.get(argument) if isinstance(argument, ray.ObjectRef) else argument for argument in arguments]


def _reason_of(error: RayError) -> str:
    """Return the last line of an error of Ray, which names the cause. The lines before it are tracebacks."""
    return printable(str(error).strip().split("\n")[-1].strip(), _SHOWN_CHARS).rstrip(".")
