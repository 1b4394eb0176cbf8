"""What every filter is: a frozen dataclass that users write, what it does to a message, and what it preserves.

A filter is one file of this package, found here by :data:`FILTERS` as soon as its class exists. A message between a
worker and a server is a list of keys (uint64 [n]) with or without values (float32 [n, dim]): a push has both, a pull
has keys, its answer has values. A :class:`~paceline.filters.chain.FilterChain` works on each in the order of the
filters' stages, and there is one interface for each:

1. :class:`RowFilter` chooses, on the worker, which rows of a push go out at all.
2. :class:`KeyFilter` writes the keys in fewer bytes.
3. :class:`ValueFilter` writes the values in fewer bytes.
4. :class:`ByteFilter` packs the bytes that the others have left.

The server decodes a message before its tables, replicas and the filter of duplicates see it. What goes out again, after
a cut or to another server, goes as it was decoded: so all copies are equal, whatever chance has decided.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.errors import UsageError
from paceline.tables.types import Floats, Keys

Bytes: TypeAlias = npt.NDArray[np.uint8]
Preserves: TypeAlias = Literal["exact", "unbiased", "bounded", "nothing"]
"""``exact``: every bit. ``unbiased``: the expectation, over the filter's own chance. ``bounded``: each value, to an
error that the class states.
"""

FILTERS: Final[dict[str, type[Filter]]] = {}
"""Every filter by its name."""


class Filter(ABC):
    """What may be done to messages. Abstract: a filter is a subclass of one of the four kinds below."""

    name: ClassVar[str]
    """What it is called, ``top-k`` for instance: in ``--filters``, and between processes."""
    version: ClassVar[int] = 1
    """To be raised when what goes over the wire changes: both ends must have the same one."""
    preserves: ClassVar[Preserves]
    ns_per_value: ClassVar[float]
    """About what both ends together take for a value (a key, where it is about keys), in messages of some thousand."""
    stage: ClassVar[int]
    """Where in a chain it stands."""

    def __init_subclass__(cls, is_abstract: bool = False) -> None:
        if is_abstract:
            return
        other = FILTERS.get(cls.name)
        if other is not None and other.__qualname__ != cls.__qualname__:
            raise UsageError(f"there is a filter {cls.name!r} already, {other.__name__}: give this one another name")
        FILTERS[cls.name] = cls

    def __str__(self) -> str:
        """As ``--filters`` has it."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return ":".join([self.name, *(f"{getattr(self, field.name):g}" for field in fields)])

    def describe(self) -> dict[str, Any]:
        """Return name, version and settings, fit for JSON and msgpack."""
        settings: dict[str, Any] = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {"name": self.name, "version": self.version, **settings}


class RowFilter(Filter, is_abstract=True):
    """Chooses the rows of a push that go out. The server knows nothing of it.

    With :attr:`keeps_rest` the worker adds to a row what was held back of it before (error feedback), and keeps what it
    holds back now; such a filter loses nothing for good, as long as the row comes again.
    """

    stage: ClassVar[int] = 1
    keeps_rest: ClassVar[bool]

    @abstractmethod
    def choose(self, keys: Keys, rows: Floats, clock: int, seed: int) -> npt.NDArray[np.bool_]:
        """Return which rows (float32 [n, dim], with what was held back) go out in iteration `clock`."""

    def rescale(self) -> float:
        """Return what the values of chosen rows are multiplied by."""
        return 1.0


class KeyFilter(Filter, is_abstract=True):
    """Writes keys in fewer bytes. A chain knows these filters by name: they are part of the format of a message."""

    stage: ClassVar[int] = 2
    preserves: ClassVar[Preserves] = "exact"


class ValueFilter(Filter, is_abstract=True):
    """Writes values in fewer bytes: as many for any values as :meth:`num_bytes` says."""

    stage: ClassVar[int] = 3

    @abstractmethod
    def num_bytes(self, count: int) -> int:
        """Return how many bytes `count` values take."""

    @abstractmethod
    def encode(self, values: Floats, seed: int, out: Bytes) -> None:
        """Write values (float32 [count]) to `out`, of that many bytes. Chance may go by `seed` (64 bits) alone."""

    @abstractmethod
    def decode(self, data: Bytes, out: Floats) -> None:
        """Write the values to `out`: the same at every call, on every host."""


class ByteFilter(Filter, is_abstract=True):
    """Packs bytes."""

    stage: ClassVar[int] = 4
    preserves: ClassVar[Preserves] = "exact"

    @abstractmethod
    def pack(self, data: Bytes) -> Bytes:
        """Return the bytes packed; a longer result is not sent."""

    @abstractmethod
    def unpack(self, data: Bytes, num_bytes: int) -> Bytes:
        """Return the `num_bytes` bytes that were packed; raise ValueError if these are not what :meth:`pack` returns.

        A peer may have sent anything: no more memory than `num_bytes` is taken.
        """


def from_description(fields: dict[str, Any]) -> Filter:
    """Return the filter that :meth:`Filter.describe` described. Raises UsageError if it is not had here."""
    settings = dict(fields)
    name, version = settings.pop("name", None), settings.pop("version", None)
    kind = FILTERS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise UsageError(f"there is no filter {str(name)[:99]!r} here, only {', '.join(sorted(FILTERS))}")
    if version != kind.version:
        raise UsageError(
            f"filter {name!r} is of version {kind.version} here and of version {str(version)[:20]} there: install the "
            "same version of paceline on both"
        )
    try:
        return kind(**settings)
    except TypeError as error:
        raise UsageError(f"filter {name!r} does not take these settings: {error}") from None


def parse_filter(text: str) -> Filter:
    """Return the filter of a text such as ``quantize:8``: its name, then its settings in their order."""
    name, *arguments = text.strip().split(":")
    kind = FILTERS.get(name)
    if kind is None:
        raise UsageError(f"there is no filter {name!r}: expected one of {', '.join(sorted(FILTERS))}")
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    if len(arguments) > len(fields):
        names = ", ".join(field.name for field in fields) or "none"
        raise UsageError(f"filter {text!r} has {len(arguments)} settings: {name} takes {len(fields)} ({names})")
    settings: dict[str, Any] = {}
    for field, argument in zip(fields, arguments, strict=False):
        try:
            settings[field.name] = float(argument) if field.type in ("float", float) else int(argument)
        except ValueError:
            raise UsageError(f"filter {text!r}: {field.name} is a number, {argument!r} was given") from None
    try:
        return kind(**settings)
    except TypeError:
        needed = [field.name for field in fields if field.default is dataclasses.MISSING]
        raise UsageError(f"filter {text!r} lacks settings: {name}:{':'.join(needed).upper()}") from None


def check_share(chosen: Filter, share: float) -> None:
    """Raise unless a share of rows is above 0 and at most 1."""
    is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
    if not is_number or not 0 < share <= 1:
        raise UsageError(f"{type(chosen).__name__}(share={share!r}): expected a number above 0, at most 1")
