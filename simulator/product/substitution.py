"""Replace system modules in the product while a simulation runs.

Modules of the product import `time`, `threading`, `secrets` and similar modules by name. During a simulation these
names refer to the virtual clock, threads and random numbers in all product modules.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import random
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Final, NoReturn

from paceline.protocol.membership import ProcessIdentity
from paceline.ps import Scheduler, Server, make_node_name
from paceline.ps.fail_stop import end_process
from paceline.ps.scheduler.processes import own_process
from paceline.transport import SocketTransport, new_event_loop
from simulator.network import VirtualNetwork
from simulator.product.loop import VirtualLoop
from simulator.product.primitives import Executor, Numbers, Threading, VirtualFuture, VirtualTime
from simulator.product.snapshots import Disk
from simulator.product.transport import VirtualTransport
from simulator.world import Killed, VirtualWorld

_PRODUCT: Final = tuple(f"paceline.{package}" for package in ("launch.roles", "ps", "storage", "tables", "transport"))


@contextlib.contextmanager
def product_in(world: VirtualWorld, network: VirtualNetwork, disk: Disk) -> Iterator[None]:
    """Return a context in which the product's modules use this world, network and disk."""
    stand_ins = _stand_ins(world, network, disk)
    changed: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module_name, module in list(sys.modules.items()):
            if not module_name.startswith(_PRODUCT):
                continue
            names = vars(module)
            for name, value in list(names.items()):
                stand_in = stand_ins.get(id(value))
                if stand_in is not None:
                    changed.append((names, name, value))
                    names[name] = stand_in
        yield
    finally:
        for names, name, value in changed:
            names[name] = value


def _stand_ins(world: VirtualWorld, network: VirtualNetwork, disk: Disk) -> dict[int, Any]:
    numbers = Numbers(world)
    pairs: list[tuple[Any, Any]] = [
        (time, VirtualTime(world)),
        (threading, Threading(world)),
        (random, numbers),
        (secrets, numbers),
        (concurrent.futures.Future, lambda: VirtualFuture(world)),
        (concurrent.futures.ThreadPoolExecutor, lambda *_, **__: Executor(world, disk.delay_s)),
        (new_event_loop, lambda: VirtualLoop(world)),
        (SocketTransport, lambda *_, **__: VirtualTransport(network)),
        (end_process, lambda role_name, error: _end(world, error)),
        (own_process, lambda: _process_info(world)),
        (Scheduler, lambda *settings, **options: _role(world, Scheduler(*settings, **options))),
        (Server, lambda *settings, **options: _role(world, _forgetful(Server(*settings, **options)))),
        (make_node_name, lambda role: f"{role}-{world.current.process.name}-{world.random.randbytes(3).hex()}"),
    ]
    return {id(real): stand_in for real, stand_in in (*pairs, *disk.stand_ins())}


def _role(world: VirtualWorld, role: Any) -> Any:
    """Record a server or scheduler in its process, and return it."""
    process = world.current.process
    process.role, process.loop = role, asyncio.get_running_loop()
    return role


def _forgetful(server: Server) -> Server:
    """Limit the server's memory for cached keys, so that it often drops them; return the server."""
    server.filters.max_key_bytes = 1000
    return server


def _process_info(world: VirtualWorld) -> ProcessIdentity:
    """Return an identity that exists on no host, because the simulation itself reports the ends of processes."""
    return ProcessIdentity("virtual", world.current.process.number, 0)


def _end(world: VirtualWorld, error: BaseException) -> NoReturn:
    process = world.current.process
    if process.is_dead:
        raise Killed
    world.note(f"{process.name} ends itself: {type(error).__name__}: {error}")
    process.failure = error
    process.kill()
    raise Killed
