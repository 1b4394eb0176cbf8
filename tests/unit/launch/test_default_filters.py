"""The default filters of a training."""

from __future__ import annotations

from paceline.protocol.membership import Member, ProcessIdentity, Role
from paceline.training.options import BETWEEN_MACHINES, TrafficFilters
from paceline.transport import Address, Endpoint

LOCAL_ENDPOINT = Endpoint(tcp=Address.parse("127.0.0.1:7"))


def member(role: str, machine: str | None, rank: int = 0) -> Member:
    process = None if machine is None else ProcessIdentity(machine, 7, 1)
    endpoint = LOCAL_ENDPOINT if role == "server" else None
    return Member(node=f"{role}{rank}", role=Role(role), rank=rank, incarnation=1, address=endpoint, process=process)


def test_keys_are_filtered_between_machines() -> None:
    apart = [member("server", "one/pid:4"), member("worker", "one/pid:4"), member("worker", "two/pid:4", 1)]
    assert TrafficFilters().suited_to(apart).of("train") == (BETWEEN_MACHINES, None)
    assert TrafficFilters().suited_to(apart).of("evaluate") == ("key-caching:64", None)
    assert TrafficFilters(pulled="quantize:8").suited_to(apart).of("train") == (BETWEEN_MACHINES, "quantize:8")
    for text in ("none", "", "quantize:8"):
        assert TrafficFilters(pushed=text).suited_to(apart).of("train") == (text, None)


def test_nothing_is_filtered_on_one_machine() -> None:
    containers = [member("server", "one/pid:4"), member("worker", "one/pid:5")]
    unknown = [member("server", "one/pid:4"), member("worker", None)]
    for members in (containers, unknown, []):
        assert TrafficFilters().suited_to(members).of("train") == ("", None)
