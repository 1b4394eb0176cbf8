"""Collect stacks and metrics from all machines of a job.

Each launcher of a job runs an agent: ``paceline run`` on each node, and each ``paceline scheduler``, ``server`` and
``worker``. The agents meet in a store, which the scheduler, the coordinator, or the launcher of node 0 serves. An agent
waits there for requests of ``paceline stacks``, and answers with the stacks of its processes. Launchers that collect
metrics write them to the store every second, and the launcher of node 0 reads them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from typing_extensions import override

from paceline.closing import Closing
from paceline.errors import PacelineError, PeerError
from paceline.meeting.network_store import AGENT, NetworkStore
from paceline.observe.collector import AgedReport, Collector
from paceline.observe.stuck.report import without_files
from paceline.observe.stuck.stacks import ProcessState, collect
from paceline.transport import TLS, Address, Hello
from paceline.transport.decoding import reader

_MEMBERS: Final = "job members"
"""The key for the names of the agents."""
_SOURCES: Final = "job metrics"
"""The key for the names of the agents that write metrics. It keeps the names of agents that have ended."""
_WANTED: Final = "job wants metrics"
"""The key that is set if a process collects the metrics of all launchers."""
_NUMBER: Final = "job requests"
"""The key for the number of requests so far."""
_WAIT_S: Final = 20.0
_METRICS_S: Final = 1.0
_RETRY_S: Final = 1.0
_CONNECT_S: Final = 5.0
_ANSWER_S: Final = 6.0
"""The time in which agents answer a request. Stopped processes are waited for two seconds."""
_END_S: Final = 3.0
"""The launcher of node 0 waits this long for the last metrics of the others."""

_decode_names = reader(list[str], "the names of a job's launchers")
_decode_number = reader(int, "the number of requests for stacks")
_decode_states = reader(list[ProcessState], "the stacks of processes")


class Published(msgspec.Struct, frozen=True):
    """The metrics of a launcher's ranks. The number rises with each writing."""

    number: int
    reports: list[AgedReport]


_decode_published = reader(Published, "the metrics of a launcher")


class JobAddress(NamedTuple):
    """The address and the credentials of the store in which a job's agents meet."""

    address: Address
    token: str
    tls: TLS | None

    def connect(self, name: str) -> NetworkStore:
        """Connect as the process `name`. Raises the errors of :meth:`Transport.connect`."""
        hello = Hello(role=AGENT, name=name)
        return NetworkStore(self.address, self.token, hello, timeout_s=_CONNECT_S, answer_s=_CONNECT_S, tls=self.tls)


class JobAgent(Closing):
    """Answers the requests for one launcher, in a thread, until it is closed. It connects again after failures."""

    def __init__(
        self, job: JobAddress, folder: Path, *, collector: Collector | None = None, collects_all: bool = False
    ) -> None:
        """Start the agent of the job in `folder`.

        The agent writes the metrics of `collector` to the store. With `collects_all`, it adds the metrics of the other
        launchers to `collector` instead.
        """
        self._job, self._folder, self._collector = job, folder, collector
        self._collects_all = collects_all and collector is not None
        self._name = f"{socket.gethostname()}, process {os.getpid()}"
        self._closed = threading.Event()
        self._store: NetworkStore | None = None
        self._published: bytes | None = None
        self._num_published = 0
        self._seen: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="paceline-job-agent", daemon=True)
        self._thread.start()

    @override
    def close(self) -> None:
        """Exchange the last metrics, and stop. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        store = self._store
        if store is None:
            return
        store.close()  # ends the call that waits for a request
        self._thread.join(2 * _CONNECT_S)
        with contextlib.suppress(PacelineError), contextlib.closing(self._job.connect(self._name)) as store:
            _change_names(store, _MEMBERS, lambda names: [name for name in names if name != self._name])
            until = time.monotonic() + _END_S
            self._exchange_metrics(store)
            while self._collector is not None and not self._has_all_metrics() and time.monotonic() < until:
                time.sleep(0.05)
                self._exchange_metrics(store)

    def _has_all_metrics(self) -> bool:
        assert self._collector is not None
        return self._collector.has_last_reports(of_all_machines=self._collects_all)

    def _run(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(PacelineError), contextlib.closing(self._job.connect(self._name)) as store:
                self._store = store
                self._serve(store)
            self._store = None
            self._closed.wait(_RETRY_S)

    def _serve(self, store: NetworkStore) -> None:
        number = _number_of(store.find(_NUMBER))
        self._published = None
        _change_names(store, _MEMBERS, lambda names: [*names, self._name])
        if self._collects_all:
            store.set(_WANTED, b"")
        elif self._collector is not None:
            _change_names(store, _SOURCES, lambda names: [*names, self._name])
        wait_s = _WAIT_S if self._collector is None else _METRICS_S
        while not self._closed.is_set():
            (request,) = store.collect([_request(number + 1)], time.monotonic() + wait_s)
            if request is not None:
                number += 1
                states = [without_files(state) for state in collect([self._folder])]
                store.set(_answer(number, self._name), msgspec.msgpack.encode(states))
            self._exchange_metrics(store)

    def _exchange_metrics(self, store: NetworkStore) -> None:
        if self._collector is None:
            return
        if not self._collects_all:
            self._num_published += 1
            published = msgspec.msgpack.encode(Published(self._num_published, self._collector.reports()))
            _, self._published = store.replace(_metrics(self._name), self._published, published)
            return
        names = _names_of(store.find(_SOURCES))
        for name, found in zip(names, store.collect([_metrics(name) for name in names], time.monotonic()), strict=True):
            if found is not None:
                values: Published = _decode_published(found)
                if values.number != self._seen.get(name):  # otherwise, the launcher may be stopped
                    self._seen[name] = values.number
                    self._collector.add_reports(values.reports)


def wants_metrics(job: JobAddress) -> bool:
    """Return whether a process collects the metrics of this job; False if its store does not answer."""
    with contextlib.suppress(PacelineError), contextlib.closing(job.connect("paceline worker")) as store:
        return store.find(_WANTED) is not None
    return False


def collect_everywhere(job: JobAddress) -> tuple[list[ProcessState], list[str]]:
    """Return the states of the processes on all machines of a job, and the names of launchers that do not answer.

    Raises PeerError if the job has no launchers, and the errors of :meth:`JobAddress.connect`.
    """
    with contextlib.closing(job.connect("paceline stacks")) as store:
        names = _names_of(store.find(_MEMBERS))
        if not names:
            raise PeerError(f"{job.address.netloc}: no launcher of Paceline has joined this job. Start it again")
        number = _decode_number(store.update(_NUMBER, _next_number))
        store.set(_request(number), b"")
        keys = [_answer(number, name) for name in names]
        answers = store.collect(keys, time.monotonic() + _ANSWER_S)
        for key in keys:
            store.delete(key)
    states: list[ProcessState] = []
    missing: list[str] = []
    for name, answer in zip(names, answers, strict=True):
        if answer is None:
            missing.append(name)
        else:
            states += _decode_states(answer)
    return states, missing


def _request(number: int) -> str:
    return f"job request {number}"


def _answer(number: int, name: str) -> str:
    return f"job answer {number} {name}"


def _metrics(name: str) -> str:
    return f"job metrics {name}"


def _names_of(found: bytes | None) -> list[str]:
    names: list[str] = [] if found is None else _decode_names(found)
    return names


def _number_of(found: bytes | None) -> int:
    number: int = 0 if found is None else _decode_number(found)
    return number


def _next_number(found: bytes | None) -> bytes:
    return msgspec.msgpack.encode(_number_of(found) + 1)


def _change_names(store: NetworkStore, key: str, change: Callable[[list[str]], list[str]]) -> None:
    store.update(key, lambda found: msgspec.msgpack.encode(list(dict.fromkeys(change(_names_of(found))))))
