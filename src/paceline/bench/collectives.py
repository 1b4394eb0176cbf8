"""What collective operations cost on this machine, beside Gloo and Open MPI where they are installed, in the same run.

Every rank process takes part in all peers. For every size there are several rounds, in each of which every peer has its
turn at a batch of calls, so what else the machine does meets all alike. The arrays are the same memory for all. Each
peer's result is checked once for every size, on known values; then the arrays are zeros. The clock is rank 0's, around
each call, with no barrier between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import psutil

from paceline.bench.others import Others
from paceline.bench.peers import find_absent
from paceline.bench.plan import (
    DEFAULT_SIZES,
    ITEM_BYTES,
    OPS,
    OURS,
    PEERS,
    BenchPlan,
    Measurement,
    format_size,
    parse_sizes,
    plan_sizes,
)
from paceline.bench.progress import BenchProgress
from paceline.bench.ranks import BenchRanks
from paceline.bench.table import format_absent, format_footer, format_header, format_row
from paceline.errors import UsageError
from paceline.launch.kernels import prepare_kernels

__all__ = [
    "DEFAULT_SIZES",
    "ITEM_BYTES",
    "OPS",
    "OURS",
    "PEERS",
    "Absent",
    "BenchProgress",
    "Measurement",
    "Others",
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
"""By peer, why it is not measured."""
_COPIES = 4
"""Of an array, on one rank: what is given, taken and compared, and a peer's own buffer."""
_PROCESS_BYTES = 64 << 20
"""Of one rank with no arrays and no other peers, at least: so many that nothing fits are refused, and not tried."""


def choose_peers(wanted: list[str] | None) -> tuple[tuple[str, ...], Absent]:
    """Return the peers to measure, ours first, and those that are not here.

    Raises UsageError if one that is wanted by name is unknown or not here.
    """
    for name in wanted or ():
        if name not in PEERS:
            raise UsageError(f"--peer {name}: expected one of {', '.join(PEERS)}")
    absent = find_absent()
    for name in wanted or ():
        if name in absent:
            raise UsageError(f"--peer {name}: {absent[name]}")
    chosen = [name for name in PEERS if name == OURS or (name not in absent and (not wanted or name in wanted))]
    return tuple(chosen), {} if wanted else absent


def bench_collectives(
    plan: BenchPlan,
    *,
    say: Callable[[str], None] = lambda text: None,
    on_absent: Callable[[str, str], None] | None = None,
) -> Iterator[list[Measurement]]:
    """Measure; yield the figures of all peers for each size, ours first, as they come.

    `say` is told what is being done, `on_absent` which peer cannot be measured after all, and why.

    Raises UsageError (no such algorithm, no memory for the sizes) or PeerError (a rank died, a result was wrong).
    """
    _check_memory(plan)
    prepare_kernels()
    say(f"starting {plan.ranks} ranks ...")
    with BenchRanks(mpirun="mpi" in plan.peers) as ranks:
        ranks.start(plan)
        for message in ranks.messages():
            if "absent" in message and on_absent is not None:
                on_absent(message["absent"], message["why"])
            elif "size" in message:
                number = plan.sizes.index(message["size"]) + 1
                say(f"{plan.op} of {format_size(message['size'])}, {number} of {len(plan.sizes)} ...")
            elif "measured" in message:
                yield [Measurement(**each) for each in message["measured"]]


def _check_memory(plan: BenchPlan) -> None:
    needed = plan.ranks * (_COPIES * max(plan.sizes) + _PROCESS_BYTES)
    free = psutil.virtual_memory().available
    if needed > free:
        raise UsageError(
            f"{plan.ranks} ranks need about {needed / 2**30:.1f} GiB of memory for {format_size(max(plan.sizes))}, of "
            f"which {free / 2**30:.1f} are free; give smaller --sizes or fewer --ranks"
        )
