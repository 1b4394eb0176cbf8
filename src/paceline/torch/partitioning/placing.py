"""On which device an operation runs: as names say, or as a planner finds it fast. Pure."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.torch.partitioning.graph import Operation


@dataclass(frozen=True)
class TransferTimes:
    """What it takes to bring a value to another device."""

    seconds: float = 50e-6
    """From the end of a segment to the start of one that waits for it: a thread is woken."""
    bytes_per_s: float = 8e9
    """Half of what a PCI Express 4.0 link of 16 lanes has one way, as a planner's guess."""

    def transfer_s(self, cost: Cost) -> float:
        """Return the seconds for the value of an operation."""
        return self.seconds + cost.num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Cost:
    """What an operation takes."""

    seconds: float = 0.0
    num_bytes: int = 0
    """The size of its value."""


def place_by_name(
    operations: Sequence[Operation], paths: Mapping[str, str], placement: Mapping[str, int]
) -> dict[str, int]:
    """Return the device of each operation, given those of modules.

    `paths` has the module that each operation belongs to, as in ``named_modules``; `placement` the devices of modules,
    which hold for all within them that is not named itself, and of single operations. An operation without is where the
    last placed one of its inputs is, else where the first operation is that takes its value, else on device 0.

    Raises UsageError for a name in `placement` that no operation is called or lies in.
    """
    names = {operation.name for operation in operations}
    known = names | {prefix for path in paths.values() for prefix in _prefixes(path)}
    for name in placement:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known - {""}), 3)
            hint = f"; near it are {', '.join(near)}" if near else ""
            raise UsageError(f"placement: got {name!r}, expected the name of a module or an operation{hint}")
    devices: dict[str, int] = {}
    for operation in operations:
        named = [operation.name, *reversed(_prefixes(paths.get(operation.name, "")))]
        device = next((placement[each] for each in named if each in placement), None)
        if device is None:
            device = next((devices[each] for each in reversed(operation.inputs) if each in devices), None)
        if device is not None:
            devices[operation.name] = device
    _place_with_users(operations, devices)
    return devices


def _prefixes(path: str) -> list[str]:
    """Return a module's path and those of all that it lies in, the outermost first: the model's own is empty."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]


def _place_with_users(operations: Sequence[Operation], devices: dict[str, int]) -> None:
    users: dict[str, int] = {}
    for operation in reversed(operations):
        device = devices.setdefault(operation.name, users.get(operation.name, 0))
        users.update(dict.fromkeys(operation.inputs, device))


def check_together(devices: Mapping[str, int], together: Sequence[Collection[str]]) -> None:
    """Raise UsageError unless the operations of each group are on one device."""
    for group in together:
        found = {devices[name]: name for name in group}
        if len(found) > 1:
            raise UsageError(
                f"placement: {', '.join(f'{name} is on device {device}' for device, name in sorted(found.items()))}, "
                "expected one device for operations of the same module; name the module"
            )


def plan(
    operations: Sequence[Operation],
    costs: Mapping[str, Cost],
    together: Sequence[Collection[str]],
    group_bytes: Sequence[int],
    room: Sequence[int],
    times: TransferTimes,
) -> dict[str, int]:
    """Return devices for operations so that the last one ends early.

    A list scheduler: operations in the order of the longest way from each to the end, each on the device on which it
    ends first (HEFT: Topcuoglu, Hariri, Wu, IEEE TPDS 13(3), 2002). The groups `together` keep to one device each, for
    what they hold, `group_bytes`; `room` is how many bytes devices have for that. Raises UsageError where a group finds
    no room.
    """
    group_of = {name: number for number, group in enumerate(together) for name in group}
    to_end = _seconds_to_end(operations, costs, times)
    num_devices = len(room)
    free_at, left = [0.0] * num_devices, list(room)
    placed: dict[int, int] = {}
    devices: dict[str, int] = {}
    ends: dict[str, float] = {}

    def start_of(operation: Operation, device: int) -> float:
        arrived = [0.0]
        for each in (*operation.inputs, *operation.after):
            if each in ends:
                is_here = devices[each] == device
                arrived.append(ends[each] + (0.0 if is_here else times.transfer_s(costs[each])))
        return max(free_at[device], *arrived)

    place = {operation.name: number for number, operation in enumerate(operations)}
    for operation in sorted(operations, key=lambda each: (-to_end[each.name], place[each.name])):
        group = group_of.get(operation.name)
        if group is not None and group in placed:
            choice = [placed[group]]
        else:
            need = 0 if group is None else group_bytes[group]
            choice = [device for device in range(num_devices) if left[device] >= need]
            if not choice:
                raise UsageError(
                    f"{operation.name} needs {need:,} bytes, and the devices have {', '.join(f'{n:,}' for n in left)} "
                    "left; give them more memory, or a placement"
                )
        device = min(choice, key=lambda each: start_of(operation, each))
        if group is not None and group not in placed:
            placed[group] = device
            left[device] -= group_bytes[group]
        ends[operation.name] = free_at[device] = start_of(operation, device) + costs[operation.name].seconds
        devices[operation.name] = device
    return devices


def _seconds_to_end(
    operations: Sequence[Operation], costs: Mapping[str, Cost], times: TransferTimes
) -> dict[str, float]:
    """Return the longest way from the start of each operation to the end; always longer than those that follow it."""
    behind: dict[str, float] = {}
    to_end: dict[str, float] = {}
    for operation in reversed(operations):
        cost = costs[operation.name]
        follows = behind.get(operation.name)
        to_end[operation.name] = cost.seconds + (0.0 if follows is None else times.transfer_s(cost) + follows)
        for each in (*operation.inputs, *operation.after):
            behind[each] = max(behind.get(each, 0.0), to_end[operation.name])
    return to_end


def place_evenly(
    operations: Sequence[Operation],
    costs: Mapping[str, Cost],
    together: Sequence[Collection[str]],
    group_bytes: Sequence[int],
    num_devices: int,
    times: TransferTimes,
) -> dict[str, int]:
    """Return devices as :func:`plan` does, so that all hold about as much: the even share, if groups can be packed so.

    The most that a device holds is the even share and the largest group: were there no room for one then, all would
    hold more than the share.
    """
    share, largest = -(-sum(group_bytes) // num_devices), max(group_bytes, default=0)
    for room in sorted({max(int(share * more), largest) for more in (1.0, 1.05, 1.1, 1.25)}):
        with contextlib.suppress(UsageError):
            return plan(operations, costs, together, group_bytes, [room] * num_devices, times)
    return plan(operations, costs, together, group_bytes, [share + largest] * num_devices, times)
