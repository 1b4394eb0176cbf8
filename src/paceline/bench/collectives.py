"""Measure collective operations on this machine, with Gloo and Open MPI in the same run if installed.

A *peer* is one of these libraries, and every rank process uses all peers. Each size is measured in several rounds, and
in each round every peer runs a batch of calls, so disturbances affect all peers equally. All peers use the same arrays.
Each peer's result is checked once for every size on known values. Then the arrays are set to zero. Rank 0 measures each
call. There are no barriers between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import psutil

from paceline.bench.other_load import OtherLoad
from paceline.bench.peers import find_absent
from paceline.bench.plan import (
    DEFAULT_SIZES,
    ITEM_BYTES,
    OPS,
    PACELINE,
    PEERS,
    BenchPlan,
    Measurement,
    format_size,
    parse_sizes,
    plan_sizes,
)
from paceline.bench.ranks import BenchRanks
from paceline.bench.table import format_absent, format_footer, format_header, format_row
from paceline.errors import UsageError
from paceline.launch.kernels import prepare_kernels

__all__ = [
    "DEFAULT_SIZES",
    "ITEM_BYTES",
    "OPS",
    "PACELINE",
    "PEERS",
    "Absent",
    "Measurement",
    "OtherLoad",
    "BenchPlan",
    "bench_collectives",
    "choose_peers",
    "format_absent",
    "format_footer",
    "format_header",
    "format_row",
    "format_size",
    "parse_sizes",
    "plan_sizes",
]

Absent: TypeAlias = dict[str, str]
"""The reason why a library is not measured, for each such library."""
_COPIES = 4
"""Arrays of a message's size on one rank: input, result, expected result, and a peer's buffer."""
_PROCESS_BYTES = 64 << 20
"""Memory of a rank without arrays and other peers. With it, too many ranks are rejected before they start."""


def choose_peers(wanted: list[str] | None) -> tuple[tuple[str, ...], Absent]:
    """Return the peers to measure, Paceline first, and the missing peers.

    Raises UsageError if a requested peer is unknown or missing.
    """
    for name in wanted or ():
        if name not in PEERS:
            raise UsageError(f"--peer {name}: expected one of {', '.join(PEERS)}")
    absent = find_absent()
    for name in wanted or ():
        if name in absent:
            raise UsageError(f"--peer {name}: {absent[name]}")
    chosen = [name for name in PEERS if name == PACELINE or (name not in absent and (not wanted or name in wanted))]
    return tuple(chosen), {} if wanted else absent


def bench_collectives(
    plan: BenchPlan,
    *,
    show: Callable[[str], None] = lambda text: None,
    on_absent: Callable[[str, str], None] | None = None,
) -> Iterator[list[Measurement]]:
    """Measure each size, and yield the figures of all peers. Paceline is the first.

    `show` receives the current step. `on_absent` receives a peer that cannot be measured, and the reason.

    Raises UsageError (unknown algorithm, not enough memory for the sizes) or PeerError (a rank died, a wrong result).
    """
    _check_memory(plan)
    prepare_kernels()
    show(f"starting {plan.ranks} ranks ...")
    with BenchRanks(mpirun="mpi" in plan.peers) as ranks:
        ranks.start(plan)
        for message in ranks.messages():
            if "absent" in message and on_absent is not None:
                on_absent(message["absent"], message["why"])
            elif "size" in message:
                number = plan.sizes.index(message["size"]) + 1
                show(f"{plan.op} of {format_size(message['size'])}, {number} of {len(plan.sizes)} ...")
            elif "measured" in message:
                yield [Measurement(**fields) for fields in message["measured"]]


def _check_memory(plan: BenchPlan) -> None:
    needed = plan.ranks * (_COPIES * max(plan.sizes) + _PROCESS_BYTES)
    free = psutil.virtual_memory().available
    if needed > free:
        raise UsageError(
            f"{plan.ranks} ranks need about {needed / 2**30:.1f} GiB of memory for {format_size(max(plan.sizes))}, but "
            f"{free / 2**30:.1f} GiB are free; pass smaller --sizes or fewer --ranks"
        )
