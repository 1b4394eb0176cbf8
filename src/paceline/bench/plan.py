"""Describe the plan and the results of ``bench collectives``, for the command and its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from paceline.errors import UsageError
from paceline.tables.memory.limit import SIZE_UNITS, parse_size

OPS: Final = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier")
ITEM_BYTES: Final = {"float32": 4, "float64": 8, "int32": 4, "int64": 8}
"""The bytes per item of each dtype that all libraries can reduce."""
PACELINE: Final = "paceline"
PEERS: Final = (PACELINE, "gloo", "mpi")
ROUNDS: Final = 9
"""In each round, every peer runs one batch of repetitions."""
DEFAULT_SIZES: Final = "4,1K,16K,64K,256K,1M,4M,16M,100M"
_CUT: Final = ("all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """One run of the benchmark. Raises UsageError for invalid values."""

    op: str = "all_reduce"
    ranks: int = 2
    sizes: tuple[int, ...]
    """Bytes of the array. For all_gather this is the gathered array, for reduce_scatter the array to reduce."""
    peers: tuple[str, ...] = PEERS
    algorithm: str | None = None
    """Paceline's algorithm; None: the tuner's choice."""
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise UsageError(f"--op {self.op}: expected one of {', '.join(OPS)}")
        if self.dtype not in ITEM_BYTES:
            raise UsageError(f"--dtype {self.dtype}: expected one of {', '.join(ITEM_BYTES)}")
        if self.ranks < 2:
            raise UsageError(f"--ranks {self.ranks}: expected at least 2")
        for peer in self.peers:
            if peer not in PEERS:
                raise UsageError(f"--peer {peer}: expected {', '.join(PEERS[:-1])} or {PEERS[-1]}")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One peer's results for one size, in microseconds."""

    op: str
    bytes: int
    ranks: int
    peer: str
    algorithm: str
    """The library's algorithm; empty if unknown."""
    median_us: float
    low_us: float
    """The lower quartile."""
    high_us: float
    """The upper quartile."""

    @property
    def gb_per_s(self) -> float:
        """The algorithmic bandwidth: bytes of the array per time, regardless of the bytes that are sent."""
        return self.bytes / self.median_us / 1e3

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        return (self.high_us - self.low_us) / 2 / self.median_us

    def as_json(self) -> dict[str, Any]:
        """Return the object for ``--json``."""
        names = ("op", "bytes", "ranks", "peer", "algorithm", "median_us")
        return {name: getattr(self, name) for name in names}


def plan_sizes(text: str | None, *, op: str, ranks: int, dtype: str) -> tuple[int, ...]:
    """Return the sizes in ``--sizes`` (or the default sizes), in bytes and without duplicates.

    Each size is rounded up to whole items. If an operation has one part per rank, the parts are equal.
    """
    if op == "barrier":
        if text is not None:
            raise UsageError("--sizes: a barrier moves no data; leave this option out")
        return (0,)
    item_bytes = ITEM_BYTES.get(dtype, 1)
    sizes = parse_sizes(text or DEFAULT_SIZES)
    for size in sizes:
        if size % item_bytes and text is not None:
            raise UsageError(f"--sizes {text}: {size} bytes is not a multiple of {item_bytes}, the size of {dtype}")
    unit = item_bytes * ranks if op in _CUT else item_bytes
    return tuple(dict.fromkeys(-(-size // unit) * unit for size in sizes))


def parse_sizes(text: str) -> list[int]:
    """Return the bytes of sizes such as ``4,16K,100M``, in units of 1024. Raises UsageError."""
    sizes = []
    for part in text.split(","):
        size = parse_size(part)
        if size is None:
            raise UsageError(
                f"--sizes {text}: got {part.strip()!r}, expected bytes such as 4, 16K or 100M, separated by commas"
            )
        sizes.append(size)
    return sizes


def format_size(num_bytes: int) -> str:
    """Format a size so that :func:`parse_sizes` can read it."""
    for unit, factor in reversed(SIZE_UNITS.items()):
        if num_bytes >= factor and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return str(num_bytes)
