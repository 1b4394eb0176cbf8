"""Place operations on devices: by name, or by a planner. Pure."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from paceline.errors import UsageError
from paceline.torch.partitioning.graph import Operation


@dataclass(frozen=True)
class TransferTimes:
    """The cost of a transfer to another device."""

    seconds: float = 50e-6
    """Time from the end of a segment to the start of the next segment in another thread."""
    bytes_per_s: float = 8e9
    """An estimate: half the rate of a PCI Express 4.0 link with 16 lanes in one direction."""

    def transfer_s(self, cost: Cost) -> float:
        return self.seconds + cost.num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Cost:
    """The cost of an operation."""

    seconds: float = 0.0
    num_bytes: int = 0


def place_by_name(
    operations: Sequence[Operation], paths: Mapping[str, str], placement: Mapping[str, int]
) -> dict[str, int]:
    """Return the device of each operation, given the devices of modules and single operations.

    `paths` has the module of each operation. A module's device applies to all operations and modules inside it that are
    not in `placement`. Any other operation runs on the device of its last input that has a device. Without such an
    input, it runs on the device of the first operation that uses it, else on device 0. Raises UsageError for a name in
    `placement` that is neither a module nor an operation.
    """
    known = {operation.name for operation in operations}
    known |= {prefix for path in paths.values() for prefix in _prefixes(path)}
    for name in placement:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known - {""}), 3)
            hint = f"; near it are {', '.join(near)}" if near else ""
            raise UsageError(f"placement: got {name!r}, expected the name of a module or an operation{hint}")
    devices: dict[str, int] = {}
    for operation in operations:
        names = [operation.name, *reversed(_prefixes(paths.get(operation.name, "")))]
        device = next((placement[name] for name in names if name in placement), None)
        if device is None:
            device = next((devices[value] for value in reversed(operation.inputs) if value in devices), None)
        if device is not None:
            devices[operation.name] = device
    _place_with_users(operations, devices)
    return devices


def _prefixes(path: str) -> list[str]:
    """Return the paths of a module and the modules around it, from the model's (empty) path to the module's own."""
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
        by_device = {devices[name]: name for name in group}
        if len(by_device) > 1:
            places = ", ".join(f"{name} is on device {device}" for device, name in sorted(by_device.items()))
            raise UsageError(
                f"placement: {places}, expected one device for operations of the same module. Name the module"
            )


def plan(
    operations: Sequence[Operation],
    costs: Mapping[str, Cost],
    together: Sequence[Collection[str]],
    group_bytes: Sequence[int],
    room: Sequence[int],
    times: TransferTimes,
) -> dict[str, int]:
    """Choose a device for each operation, so that a forward takes little time.

    This is a list scheduler (HEFT: Topcuoglu, Hariri, Wu, IEEE TPDS 13(3), 2002). It first places the operations with
    the longest path to the graph's end, each on the device where the operation ends earliest. `together` has groups of
    operations that share memory and need one device, `group_bytes` the memory of each group, and `room` the available
    bytes of each device. Raises UsageError if a group does not fit.
    """
    group_of = {name: number for number, group in enumerate(together) for name in group}
    to_end = _seconds_to_end(operations, costs, times)
    num_devices = len(room)
    free_at, left = [0.0] * num_devices, list(room)
    placed: dict[int, int] = {}
    devices: dict[str, int] = {}
    ends: dict[str, float] = {}

    def start_of(operation: Operation, device: int) -> float:
        arrivals = [0.0]
        for name in (*operation.inputs, *operation.after):
            if name in ends:
                is_local = devices[name] == device
                arrivals.append(ends[name] + (0.0 if is_local else times.transfer_s(costs[name])))
        return max(free_at[device], *arrivals)

    place = {operation.name: number for number, operation in enumerate(operations)}
    for operation in sorted(operations, key=lambda operation: (-to_end[operation.name], place[operation.name])):
        group = group_of.get(operation.name)
        if group is not None and group in placed:
            choices = [placed[group]]
        else:
            need = 0 if group is None else group_bytes[group]
            choices = [device for device in range(num_devices) if left[device] >= need]
            if not choices:
                raise UsageError(
                    f"{operation.name} needs {need:,} bytes, but the devices have {', '.join(f'{n:,}' for n in left)} "
                    "left. Give them more memory, or a placement"
                )
        device = min(choices, key=partial(start_of, operation))
        if group is not None and group not in placed:
            placed[group] = device
            left[device] -= group_bytes[group]
        ends[operation.name] = free_at[device] = start_of(operation, device) + costs[operation.name].seconds
        devices[operation.name] = device
    return devices


def _seconds_to_end(
    operations: Sequence[Operation], costs: Mapping[str, Cost], times: TransferTimes
) -> dict[str, float]:
    """Return the seconds of the longest path from the start of each operation to the end of the graph."""
    after_value: dict[str, float] = {}
    to_end: dict[str, float] = {}
    for operation in reversed(operations):
        cost = costs[operation.name]
        remaining = after_value.get(operation.name)
        to_end[operation.name] = cost.seconds + (0.0 if remaining is None else times.transfer_s(cost) + remaining)
        for name in (*operation.inputs, *operation.after):
            after_value[name] = max(after_value.get(name, 0.0), to_end[operation.name])
    return to_end


def place_evenly(
    operations: Sequence[Operation],
    costs: Mapping[str, Cost],
    together: Sequence[Collection[str]],
    group_bytes: Sequence[int],
    num_devices: int,
    times: TransferTimes,
) -> dict[str, int]:
    """Return the result of :func:`plan` with about the same memory on all devices.

    The limit per device starts at an equal share, and grows until a plan fits. A plan always fits if the limit is an
    equal share plus the size of the largest group.
    """
    share, largest = -(-sum(group_bytes) // num_devices), max(group_bytes, default=0)
    for room in sorted({max(int(share * more), largest) for more in (1.0, 1.05, 1.1, 1.25)}):
        with contextlib.suppress(UsageError):
            return plan(operations, costs, together, group_bytes, [room] * num_devices, times)
    return plan(operations, costs, together, group_bytes, [share + largest] * num_devices, times)
