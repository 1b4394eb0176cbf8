"""Format the table of ``bench collectives`` line by line, as the sizes are measured."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.bench.plan import PACELINE, ROUNDS, BenchPlan, Measurement, format_size
from paceline.environment import num_cores

_PEER_NAMES = {"gloo": "Gloo", "mpi": "Open MPI"}


def format_header(peers: Sequence[str]) -> str:
    """Return the header line. `peers` are the libraries other than Paceline."""
    paceline = f"{'size':>8} {'paceline µs':>12} {'±':>4} {'GB/s':>6}  {'algorithm':10}"
    return (paceline + "".join(f" {f'{peer} µs':>11} {'±':>4} {'ratio':>6}" for peer in peers)).rstrip()


def format_row(measured: Sequence[Measurement], peers: Sequence[str]) -> str:
    """Return the table's line for one message size. Dashes stand for a library without a measurement."""
    found = {result.peer: result for result in measured}
    paceline = found[PACELINE]
    bandwidth = f"{paceline.gb_per_s:6.2f}" if paceline.bytes else f"{'-':>6}"
    line = f"{format_size(paceline.bytes):>8} {_time(paceline):>12} {paceline.spread:4.0%} {bandwidth}"
    line += f"  {paceline.algorithm or '-':10}"
    for peer in peers:
        other = found.get(peer)
        if other is None:
            line += f" {'-':>11} {'-':>4} {'-':>6}"
        else:
            line += f" {_time(other):>11} {other.spread:4.0%} {_ratio(other.median_us / paceline.median_us):>6}"
    return line.rstrip()


def format_footer(plan: BenchPlan, other_share: float) -> str:
    """Return the description of the measurement. `other_share` is other processes' share of the core time."""
    operation = plan.op if plan.op == "barrier" else f"{plan.op} of {plan.dtype}"
    if plan.op == "all_reduce":
        operation += ", in place"
    return (
        f"{operation}; {plan.ranks} ranks on {num_cores()} cores of this machine. Medians over {ROUNDS} interleaved "
        "rounds,\neach call timed on rank 0. ± is half the distance between the quartiles; GB/s is the array's\n"
        "bytes divided by the time; ratio is the peer's time divided by Paceline's; 1K is 1024 bytes.\n"
        f"Other processes used {other_share:.0%} of the cores' time."
    )


def format_absent(peer: str, why: str) -> str:
    """Return the reason for a missing peer."""
    return f"{_PEER_NAMES[peer]} is not in the table: {why}"


def _time(measured: Measurement) -> str:
    median = measured.median_us
    return f"{median:,.{2 if median < 99.995 else 1 if median < 9999.95 else 0}f}"


def _ratio(ratio: float) -> str:
    return f"{ratio:.{2 if ratio < 9.995 else 1 if ratio < 99.95 else 0}f}"
