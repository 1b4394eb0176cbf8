"""Fuzz a leading scheduler, and a scheduler that takes over a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from tests.memory_transport import MemoryTransport

from paceline.protocol import Member, Role
from paceline.protocol.buckets import to_bytes
from paceline.protocol.chains import ChainGroup
from paceline.protocol.jobs import DoneShards, JobMemory, JobRecord, JobSpec, Lease
from paceline.ps import SGD, Scheduler, Zeros, messages
from paceline.ps.messages import CALL, NOTICE, RESULT
from paceline.ps.scheduler.processes import own_process
from paceline.tables.settings import to_fields
from paceline.transport import Address, Endpoint, FrameKind, Hello, Listener

from .listening import Attacker, Episode, FoundError, Line
from .mutations import Frame, tree_of

KINDS = (CALL, CALL, CALL, NOTICE, NOTICE, RESULT, FrameKind.ERROR, FrameKind.HELLO, 16, 77)
HONEST, STRANGERS = 5000, 9000
"""The first incarnations of honest members, and of other members."""
_ANSWERS: Any = msgspec.msgpack.Decoder()
_decode_notice = messages.decode_notice


def spec_of(name: str, lr: float = 1.0) -> messages.TableSpec:
    """Return the spec of a sparse table."""
    return messages.TableSpec(name=name, kind="sparse", update=to_fields(SGD(lr=lr)), initializer=to_fields(Zeros()))


class Honest:
    """An honest member: it prepares views, sends heartbeats, and receives its replies."""

    def __init__(self, line: Line, role: Role, rank: int) -> None:
        self._line = line
        self._request = 0
        self._welcome: messages.Welcome | None = None
        self._results: dict[int, bytes] = {}
        endpoint = Endpoint(Address.parse(f"memory://{role.value}-{rank}"))
        register = messages.Register(node=f"honest-{role.value}-{rank}", role=role, address=endpoint, rank=rank)
        self._send(CALL, register, 1)

    def receive_all(self) -> None:
        """Handle received frames."""
        for header, meta, _ in self._line.answers():
            if header.kind == RESULT:
                self._results[header.request] = meta
            elif header.kind == NOTICE:
                notice = _decode_notice(meta)
                if isinstance(notice, messages.PrepareView):
                    self._send(NOTICE, messages.Prepared(notice.view.term, notice.view.epoch))
                elif isinstance(notice, messages.Expelled):
                    raise FoundError(f"an honest member was expelled: {notice.reason}")
            else:
                raise FoundError(f"an honest member got {meta!r}")

    def welcome(self) -> messages.Welcome:
        """Return the answer to the registration."""
        self.receive_all()
        return msgspec.msgpack.decode(self._results[1], type=messages.Welcome)

    def work(self) -> None:
        """Declare a table again, and send a heartbeat."""
        self._send(NOTICE, messages.Heartbeat())
        number = self.exchange(messages.DeclareTable(spec=spec_of("honest")))["number"]
        specs = self.exchange(messages.ListTables())
        if number != 1 or specs[0]["name"] != "honest":
            raise FoundError(f"an honest member's table is number {number}, and the first of {specs}")

    def exchange(self, message: msgspec.Struct) -> Any:
        """Return the reply, which arrives immediately."""
        self._request += 2
        self._send(CALL, message, self._request)
        self.receive_all()
        if self._request not in self._results:
            raise FoundError(f"an honest member got no answer to {message}")
        return msgspec.msgpack.decode(self._results.pop(self._request))

    def _send(self, kind: int, message: msgspec.Struct, request: int = 0) -> None:
        self._line.send(Frame(kind, messages.encode(message), fields={"request": request}).encode())


class SchedulerEpisode(Episode):
    """A scheduler that leads a cluster."""

    name = "scheduler"
    weight = 5
    replaces = False

    async def begin(self) -> None:
        self.transport = MemoryTransport("0123456789abcdef", direct=True)
        self.scheduler = Scheduler(
            messages.ClusterSettings(num_servers=2, num_workers=2, replicas=1, heartbeat_timeout_s=300.0),
            replaces=self.replaces,
            fail=self.failures.append,
        )
        self.listener: Listener = await self.transport.serve(self.scheduler, Hello(role="scheduler"))
        self.members: list[Honest] = []
        self.attackers: list[Attacker] = []
        if not self.replaces:
            await self._form()
        hello = Hello(role="worker", rank=3)
        target = self.listener.endpoint
        self.attackers = [Attacker(self.random, self.mutator, self.transport, target, hello) for _ in range(3)]
        for attacker, role in zip(self.attackers, ("worker", "server", "worker"), strict=True):
            attacker.first = Frame(
                CALL, messages.encode(self._register(role, extra=role == "server")), fields={"request": 1}
            ).encode()
        self.attackers[2].first = b""  # this process is no member
        self.number = 0

    async def _form(self) -> None:
        self.scheduler.core.cluster.membership._next_incarnation = HONEST
        target = self.listener.endpoint
        for role, rank in ((Role.SERVER, 0), (Role.SERVER, 1), (Role.WORKER, 0)):
            self.members.append(Honest(Line(self.transport, target, Hello(role=role.value, rank=rank)), role, rank))
        for _ in range(6):
            await asyncio.sleep(0.01)  # the worker is flushed
            for member in self.members:
                member.receive_all()
        for member in self.members:
            member.welcome()
        self.members[0].work()
        self.scheduler.core.cluster.membership._next_incarnation = STRANGERS

    def feed(self) -> int:
        attacker = self.random.choice(self.attackers)
        message, body = self.random.choice(_FRAMES)(self)
        self.number += 1
        kind = NOTICE if isinstance(message, _NOTICES) else CALL
        fields = {"request": self.random.randrange(1, 50), "sequence": self.random.choice((0, self.number))}
        return attacker.attack(Frame(kind, tree_of(message), body, fields), KINDS)

    def check_now(self) -> None:
        if self.scheduler.failure is not None:
            return  # a member has reported another scheduler
        for member in self.members:
            member.receive_all()
        for member in self.members:
            member.work()

    async def end(self) -> None:
        self.check_now()
        self.scheduler.close()
        await self.listener.close()
        await asyncio.sleep(0)

    def sent(self) -> list[bytes]:
        return [data for attacker in self.attackers for data in attacker.sent]

    # Valid messages.

    def _register(self, role: str | None = None, *, extra: bool = False) -> messages.Register:
        random = self.random
        role = role or random.choice(("worker", "server", "observer"))
        place = random.choice(("memory://x", "tcp://127.0.0.1:1", "unix://@x"))
        return messages.Register(
            node=f"{role}-{random.randrange(20)}", role=Role(role), address=Endpoint(Address.parse(place)),
            rank=random.choice((None, None, random.randrange(3, 9))), is_extra=extra or role == "server",
            process=random.choice((None, own_process())),
        )  # fmt: skip

    def register(self) -> Any:
        return self._register()

    def rejoin(self) -> Any:
        random = self.random
        role, rank = random.choice(("worker", "server", "server")), random.randrange(2)
        settings = self.scheduler.core.settings
        group = ChainGroup((STRANGERS + 1, STRANGERS + 2), None, to_bytes((1 << 512) - 1))
        members = tuple(
            Member(
                node=f"server-{rank}", role=Role.SERVER, rank=rank, incarnation=STRANGERS + 1 + rank,
                address=Endpoint(Address.parse("memory://y")), process=own_process(),
            )
            for rank in range(2)
        )  # fmt: skip
        lease = Lease(lease=3, epoch=0, file=1, shard=1)
        done = DoneShards(epoch=0, file=0, shards=b"\5", first=random.choice((0, 3)))
        job = JobMemory(
            record=JobRecord(number=1, num_workers=2, done=(done,), ended={1: 4}, done_counters={7: {"examples": 4.0}}),
            working=role == "worker", leases=(lease,), last_lease=4, progress={"job": 1.0, "examples": 3.0},
            posted=random.choice((None, self.job()[0].spec)), taken=((7, 1),),
        )  # fmt: skip
        known = messages.KnownTable(number=3, declared=spec_of("t"), spec=spec_of("t", 0.5))
        return messages.Rejoin(
            member=Member(
                node=f"{role}-{rank}", role=Role(role), rank=rank,
                incarnation=STRANGERS + rank + (1 if role == "server" else 4),
                address=Endpoint(Address.parse("memory://y")), process=own_process(),
            ),
            settings=settings, tables=(known,),
            view=messages.View(
                epoch=3, term=random.choice((0, 0, 1)), members=members, version=2, groups=(group,),
                last_incarnation=STRANGERS + 5,
            ),
            is_leaving=random.random() < 0.2, job=random.choice((None, job)),
        )  # fmt: skip

    def job(self) -> tuple[messages.PostJob, bytes]:
        random = self.random
        done = (DoneShards(epoch=0, file=0, shards=b"\x05"),)
        spec = JobSpec(
            description=b"work", files=random.choice(((3, None), (4, 2), (None,), ())), epochs=random.randrange(1, 3),
            assignment=random.choice(("first-come", "strided")), done=random.choice(((), done)),
            progress={"examples": 3.0},
        )  # fmt: skip
        return messages.PostJob(spec=spec), b""

    def simple(self) -> Any:
        random = self.random
        number = random.choice((1, 2, self.scheduler.core.jobs.last_number))
        return random.choice(
            (
                lambda: messages.GetView(), lambda: messages.GetSettings(), lambda: messages.Leave(),
                lambda: messages.Heartbeat(progress={"job": 1.0, "x": 2.0}, unreachable=(STRANGERS + 1,)),
                lambda: messages.DeclareTable(spec=spec_of(f"t{random.randrange(5)}")),
                lambda: messages.ChangeUpdate(table="t1", update=to_fields(SGD(lr=0.5))),
                lambda: messages.ListTables(), lambda: messages.GetJob(after=random.choice((0, number))),
                lambda: messages.Drain(), lambda: messages.Prepared(term=1, epoch=random.randrange(9)),
                lambda: messages.Promised(term=random.randrange(9)),
                lambda: messages.Filled(1, STRANGERS + 1, to_bytes(7)),
                lambda: messages.JobStatus(job=number), lambda: messages.TakeReports(job=number),
                lambda: messages.GetAccount(job=number), lambda: messages.ClaimCluster(),
                lambda: messages.FileEnded(job=number, file=random.randrange(2), num_shards=3),
                lambda: messages.JobFailed(job=number, error="DataError", message="bad"),
            )
        )()  # fmt: skip

    def at_work(self) -> Any:
        random = self.random
        number = self.scheduler.core.jobs.last_number
        return random.choice(
            (
                lambda: messages.TakeLease(job=number, wait=random.random() < 0.5),
                lambda: messages.LeaseDone(
                    job=number, lease=random.randrange(6), progress={"job": float(number), "x": 1.0}
                ),
                lambda: messages.Report(
                    job=number, fields={"kind": "x", "v": [1, 2.5]}, shard=random.choice((None, (0, 0, 1))),
                    number=random.randrange(9),
                ),
            )
        )()  # fmt: skip

    def ending(self) -> Any:
        return messages.EndCluster() if self.random.random() < 0.02 else messages.GetView()


_NOTICES = (messages.Heartbeat, messages.Drain, messages.Prepared, messages.Promised, messages.Filled)


def _bare(build: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, bytes]]:
    return lambda episode: (build(episode), b"")


_FRAMES: list[Callable[[Any], tuple[Any, bytes]]] = [
    _bare(SchedulerEpisode.register),
    _bare(SchedulerEpisode.rejoin),
    SchedulerEpisode.job,
    *[_bare(SchedulerEpisode.simple)] * 6,
    *[_bare(SchedulerEpisode.at_work)] * 4,
    _bare(SchedulerEpisode.ending),
]


class Recovering(SchedulerEpisode):
    """A scheduler that takes over a cluster from returning members."""

    name = "scheduler-recovering"
    weight = 3
    replaces = True
