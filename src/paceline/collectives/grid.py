"""Arrange ranks in a Cartesian grid for stencil computations, and exchange ghost layers.

The module provides ``MPI_Cart_create``, ``MPI_Dims_create``, ``MPI_Cart_shift`` and ``MPI_Neighbor_alltoall`` of MPI
4.1 (chapters 8.5 and 8.6). In addition it provides an exchange of ghost layers, which MPI does not have.

>>> from paceline.collectives import init
>>> grid = Grid(init(rank=0, world_size=1), [1, 1], periodic=True)
>>> block = np.zeros((4, 5))                    # 2 x 3 own cells, and one ghost layer on each side
>>> block[1:-1, 1:-1] = [[1, 2, 3], [4, 5, 6]]
>>> grid.exchange_halos(block)
>>> block[1].tolist()
[3.0, 1.0, 2.0, 3.0, 1.0]
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np

from paceline.collectives.group import Group
from paceline.collectives.ticket import CollectiveTicket
from paceline.errors import GroupClosedError, UsageError

_Array: TypeAlias = np.ndarray[Any, Any]

_TAG: Final = 1 << 62
"""The first tag of the grid's messages. Each axis has one tag for messages to lower coordinates, and one for messages
to higher coordinates.
"""
_MAX_PLANS: Final = 256
_LOW, _HIGH = -1, 1


class Grid:
    """The ranks of a group as the points of a grid. Ranks are numbered row by row, as in MPI.

    Every rank creates the same grid and makes the same exchanges in the same order. Other calls, sends and receives of
    the group may run between exchanges; tags from 2^62 are reserved for the grid. Use the grids of a group in one
    thread at a time. After a failed exchange (RankLostError, MismatchError) the grid raises GroupClosedError.
    """

    def __init__(
        self, group: Group, shape: Sequence[int] | None = None, *, periodic: Sequence[bool] | bool = False
    ) -> None:
        """Arrange the ranks as `shape`, whose product is the group's size. :func:`dims_create` replaces zeros.

        ``None`` means two axes of nearly equal length. On `periodic` axes the first point follows the last one. The
        constructor sends no messages. Raises UsageError.
        """
        self.group = group
        self.shape = dims_create(group.size, (0, 0) if shape is None else shape)
        """The number of ranks along each axis."""
        periodic_axes = [periodic] * len(self.shape) if isinstance(periodic, (bool, np.bool_)) else list(periodic)
        if len(periodic_axes) != len(self.shape):
            raise UsageError(
                f"got periodic for {len(periodic_axes)} axes, the grid {list(self.shape)} has {len(self.shape)}; pass "
                "one bool for each axis, or one for all"
            )
        self.periodic = tuple(bool(flag) for flag in periodic_axes)
        """Whether each axis is periodic."""
        self.coordinates = self.coordinates_of(group.rank)
        """Coordinates of this rank."""
        self._plans: dict[tuple[Any, ...], list[list[_Side]]] = {}
        self._pending: list[CollectiveTicket] = []

    def __repr__(self) -> str:
        return f"Grid({'x'.join(map(str, self.shape))} of {self.group!r}, at {self.coordinates})"

    def coordinates_of(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank of the group."""
        if not 0 <= rank < self.group.size:
            raise UsageError(f"got rank {rank}, expected a rank from 0 to {self.group.size - 1}")
        coordinates = []
        for count in reversed(self.shape):
            rank, coordinate = divmod(rank, count)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    def rank_of(self, coordinates: Sequence[int]) -> int:
        """Return the rank at these coordinates, modulo the shape on periodic axes. Raises UsageError beyond an edge."""
        rank = self._find(coordinates)
        if rank is None:
            raise UsageError(
                f"got coordinates {list(coordinates)}, which are not in the grid {list(self.shape)} (periodic: "
                f"{list(self.periodic)})"
            )
        return rank

    def neighbour(self, axis: int, step: int) -> int | None:
        """Return the rank at distance `step` along an axis (negative: to lower coordinates); None beyond an edge."""
        if not 0 <= axis < len(self.shape):
            raise UsageError(f"got axis {axis}, expected an axis from 0 to {len(self.shape) - 1}")
        coordinates = list(self.coordinates)
        coordinates[axis] += step
        return self._find(coordinates)

    def shift(self, axis: int, step: int = 1) -> tuple[int | None, int | None]:
        """Return the ranks at distance `-step` (the source) and `step` (the target) on an axis, as ``MPI_Cart_shift``
        does. A rank beyond an edge is None.
        """
        return self.neighbour(axis, -step), self.neighbour(axis, step)

    def local_slice(self, global_shape: Sequence[int], *, rank: int | None = None) -> tuple[slice, ...]:
        """Return the part of an array of `global_shape` that `rank` (default: this rank) owns, without ghost layers.

        The first axes are divided over the grid's axes by :func:`split_evenly`. The remaining axes are not divided.
        """
        if len(global_shape) < len(self.shape):
            raise UsageError(
                f"got an array of shape {list(global_shape)} for the grid {list(self.shape)}; it needs at least "
                f"{len(self.shape)} axes"
            )
        coordinates = self.coordinates if rank is None else self.coordinates_of(rank)
        split = [split_evenly(n, parts)[i] for n, parts, i in zip(global_shape, self.shape, coordinates, strict=False)]
        return (*split, *(slice(0, n) for n in global_shape[len(self.shape) :]))

    def exchange_halos(self, array: _Array, width: int = 1, *, corners: bool = False) -> None:
        """Fill the ghost layers of this rank's block with cells of the neighbours' blocks, in place.

        `array` is a writable NumPy array whose first axes are the axes of the grid. Along each of these axes it has
        `width` ghost layers on both sides, and at least `width` own cells between them. Further axes, such as
        components, are not divided.

        Without `corners`, all axes are exchanged at the same time. Corner cells (cells in the ghost layers of several
        axes) then keep their values, which a 5-point stencil does not read. With `corners`, the axes are exchanged one
        after another, and each exchange includes the ghost cells of the previous axes. Ghost cells beyond an edge of
        the grid always keep their values.

        Raises UsageError for an invalid array (before any message is sent), MismatchError if a neighbour's block has
        another shape or dtype, and RankLostError if a neighbour is lost.
        """
        self._check(array, width)
        key = (array.shape, array.strides, array.dtype, width, bool(corners))
        phases = self._plans.get(key)
        if phases is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            phases = self._plans[key] = self._plan(array, width, corners)
        for sides in phases:
            incoming, outgoing = [], []
            for side in sides:
                incoming.append(array[side.ghost_cells] if side.incoming is None else side.incoming)
                if side.outgoing is None:
                    outgoing.append(array[side.sent_cells])
                else:
                    side.outgoing[...] = array[side.sent_cells]
                    outgoing.append(side.outgoing)
            self._transfer(sides, outgoing, incoming)
            for side in sides:
                if side.incoming is not None:
                    array[side.ghost_cells] = side.incoming

    def neighbour_all_to_all(self, array: _Array, *, out: _Array | None = None) -> _Array:
        """Send one row of `array` to each neighbour, and return the rows received from the neighbours.

        `array` has two rows for each axis, in MPI's order: the row for the lower neighbour, then the row for the higher
        neighbour. The row of a missing neighbour is neither sent nor written. Without `out`, the result is a new array,
        in which the rows of missing neighbours are zero.
        """
        rows = 2 * len(self.shape)
        if not array.ndim or array.shape[0] != rows:
            raise UsageError(
                f"got an array of shape {list(array.shape)}, expected {rows} rows: two for each axis of the grid"
            )
        if out is None:
            out = np.zeros(array.shape, array.dtype)
        if out.shape != array.shape or out.dtype != array.dtype or not (out.flags.writeable and out.flags.c_contiguous):
            raise UsageError(
                f"got out of {out.dtype}{list(out.shape)}, expected a contiguous, writable array of "
                f"{array.dtype}{list(array.shape)}; leave `out` out to get a new array"
            )
        sides, outgoing, incoming = [], [], []
        for axis in range(len(self.shape)):
            for row, direction in enumerate((_LOW, _HIGH), 2 * axis):
                neighbour = self.neighbour(axis, direction)
                if neighbour is not None:
                    sides.append(_Side(neighbour, _tag(axis, direction), _tag(axis, -direction)))
                    outgoing.append(np.ascontiguousarray(array[row]))
                    incoming.append(out[row : row + 1])
        self._transfer(sides, outgoing, incoming)
        return out

    def neighbour_all_gather(self, array: _Array, *, out: _Array | None = None) -> _Array:
        """Send `array` to all neighbours, and return their arrays as rows; see :meth:`neighbour_all_to_all`."""
        return self.neighbour_all_to_all(np.broadcast_to(array, (2 * len(self.shape), *array.shape)), out=out)

    def _find(self, coordinates: Sequence[int]) -> int | None:
        if len(coordinates) != len(self.shape):
            raise UsageError(
                f"got coordinates {list(coordinates)} for the grid {list(self.shape)}; pass one for each axis"
            )
        rank = 0
        for coordinate, count, periodic in zip(coordinates, self.shape, self.periodic, strict=True):
            if not (periodic or 0 <= coordinate < count):
                return None
            rank = rank * count + operator.index(coordinate) % count
        return rank

    def _check(self, array: _Array, width: int) -> None:
        if not isinstance(array, np.ndarray):
            raise UsageError(
                f"got {type(array).__name__}, expected a NumPy array; for a CPU tensor pass .numpy(), which shares "
                "its memory"
            )
        if width < 1:
            raise UsageError(f"got width {width}, expected at least 1 ghost layer")
        if array.ndim < len(self.shape):
            raise UsageError(
                f"got a block of shape {list(array.shape)} for the grid {list(self.shape)}; it needs at least "
                f"{len(self.shape)} axes"
            )
        own_cells = [length - 2 * width for length in array.shape[: len(self.shape)]]
        if min(own_cells) < width:
            raise UsageError(
                f"got a block of shape {list(array.shape)} with {width} ghost layers on both sides: {own_cells} own "
                f"cells, expected at least {width} along each of the first {len(own_cells)} axes; use fewer ranks or "
                "layers"
            )
        if not array.flags.writeable:
            raise UsageError("got a read-only array, expected an array with writable ghost layers")

    def _plan(self, array: _Array, width: int, corners: bool) -> list[list[_Side]]:
        phases: list[list[_Side]] = []
        for axis in range(len(self.shape)):
            length = array.shape[axis]
            cut = [
                slice(width, array.shape[other] - width)
                if not corners or other > axis
                # Include the ghost cells of the axes that were exchanged before, except ghost cells beyond an edge of
                # the grid, for which no neighbour has values.
                else slice(
                    width if self.neighbour(other, _LOW) is None else 0,
                    array.shape[other] - (width if self.neighbour(other, _HIGH) is None else 0),
                )
                for other in range(len(self.shape))
            ]
            sides = []
            for direction, sent_cells, ghost_cells in (
                (_LOW, slice(width, 2 * width), slice(0, width)),
                (_HIGH, slice(length - 2 * width, length - width), slice(length - width, length)),
            ):
                neighbour = self.neighbour(axis, direction)
                if neighbour is not None:
                    out_of, into = ((*cut[:axis], layers, *cut[axis + 1 :]) for layers in (sent_cells, ghost_cells))
                    buffers = _buffer(array[out_of]), _buffer(array[into])
                    tags = _tag(axis, direction), _tag(axis, -direction)
                    sides.append(_Side(neighbour, *tags, out_of, into, *buffers))
            phases.append(sides)
        return phases if corners else [[side for sides in phases for side in sides]]

    def _transfer(self, sides: Sequence[_Side], outgoing: Sequence[_Array], incoming: Sequence[_Array]) -> None:
        """Exchange messages with the neighbours of ``sides``. Receives start before sends, so that arriving messages
        are written directly to their arrays.
        """
        if self._pending:
            raise GroupClosedError(
                f"{self!r} refuses further exchanges because an earlier one failed; create a new group and grid"
            )
        # After a failure, unfinished tickets may still use their buffers. So keep the tickets and buffers alive.
        tickets = self._pending
        try:
            for side, array in zip(sides, incoming, strict=True):
                tickets.append(self.group.recv_async(_plain(array), side.neighbour, tag=side.receive_tag))
            for side, array in zip(sides, outgoing, strict=True):
                tickets.append(self.group.send_async(_plain(array), side.neighbour, tag=side.send_tag))
        except GroupClosedError:
            for ticket in tickets:  # if a ticket has failed, raise its error
                ticket.wait()
            raise
        for ticket in tickets:
            ticket.wait()
        tickets.clear()


@dataclass(frozen=True, slots=True)
class _Side:
    neighbour: int
    send_tag: int
    receive_tag: int
    sent_cells: tuple[slice, ...] = ()
    ghost_cells: tuple[slice, ...] = ()
    outgoing: _Array | None = None
    incoming: _Array | None = None


def dims_create(size: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Replace the zeros in `shape` so that its product is `size`, like ``MPI_Dims_create``.

    The new numbers do not increase from axis to axis, and are as even as possible: the largest number is as small as
    possible, then the second largest, and so on. Some MPI libraries distribute prime factors greedily, and return 12 x
    6 instead of 9 x 8 for 72 ranks (Träff and Lübbe, Specification Guideline Violations by MPI_Dims_create, EuroMPI
    2015).

    Raises UsageError if no shape has this product.

    >>> dims_create(12, [0, 0]), dims_create(12, [0, 0, 0]), dims_create(12, [0, 3, 0])
    ((4, 3), (3, 2, 2), (2, 3, 2))
    """
    if size < 1:
        raise UsageError(f"got {size} ranks, expected at least 1")
    counts = [operator.index(count) for count in shape]
    if not counts or min(counts) < 0:
        raise UsageError(f"got the shape {counts}, expected at least one axis, and no negative numbers")
    fixed = math.prod(count for count in counts if count)
    num_free = counts.count(0)
    if size % fixed or (not num_free and fixed != size):
        needed = f"a multiple of {fixed}" if num_free else fixed
        raise UsageError(f"the shape {counts} needs {needed} ranks, got {size}. Change one of them")
    filled = iter(_even_factors(size // fixed, num_free, size) or ())
    return tuple(count or next(filled) for count in counts)


def split_evenly(n: int, parts: int) -> list[slice]:
    """Return `parts` slices that cover ``range(n)`` in order; the first ``n % parts`` slices have one item more.

    >>> split_evenly(7, 3)
    [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
    """
    if n < 0 or parts < 1:
        raise UsageError(f"got {n} items and {parts} parts, expected at least 0 items and at least 1 part")
    length, longer = divmod(n, parts)
    bounds = [part * length + min(part, longer) for part in range(parts + 1)]
    return [slice(low, high) for low, high in pairwise(bounds)]


def _even_factors(size: int, num_factors: int, most: int) -> tuple[int, ...] | None:
    """Return `num_factors` non-increasing factors of `size`, each at most `most`. The largest factor is as small as
    possible, then the second largest, and so on. Return None if no such factors exist.
    """
    if not num_factors:
        return () if size == 1 else None
    for first in range(1, min(size, most) + 1):
        if size % first == 0 and first**num_factors >= size:
            remainder = _even_factors(size // first, num_factors - 1, first)
            if remainder is not None:
                return (first, *remainder)
    return None


def _tag(axis: int, direction: int) -> int:
    return _TAG + 2 * axis + (direction == _HIGH)


def _buffer(cells: _Array) -> _Array | None:
    if cells.flags.c_contiguous and cells.dtype.isnative:
        return None
    return np.empty(cells.shape, cells.dtype.newbyteorder("="))


def _plain(array: _Array) -> _Array:
    """Return a contiguous array as a vector that a group can send. Complex numbers become pairs of real numbers."""
    flat = array.reshape(-1)
    return flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat
