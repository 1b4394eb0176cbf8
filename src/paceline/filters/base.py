"""What every filter is: a frozen dataclass that users write, what it does to a message, and what it preserves.

A filter is one file, of this package or of a user (:mod:`paceline.filters.modules`), found here by :data:`FILTERS` as
soon as its class exists. A message between a worker and a server is a list of keys (uint64 [n]) with or without values
(float32 [n, dim]): a push has both, a pull has keys, its answer has values. A
:class:`~paceline.filters.chain.FilterChain` works on each in the order of the filters' stages, and there is one
interface for each:

1. :class:`RowFilter` chooses, on the worker, which rows of a push go out at all.
2. :class:`KeyFilter` writes the keys in fewer bytes.
3. :class:`ValueFilter` writes the values in fewer bytes.
4. :class:`ByteFilter` packs the bytes that the others have left.

The server decodes a message before its tables, replicas and the filter of duplicates see it. What goes out again, after
a cut or to another server, goes as it was decoded: so all copies are equal, whatever chance has decided.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final, Literal, TypeAlias, get_args

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
        check_class(cls)
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
    needs_l1: ClassVar[bool] = False
    """Whether it is for tables whose update rule has an L1 penalty, and asked by :meth:`choose_zeros` too."""

    @abstractmethod
    def choose(self, keys: Keys, rows: Floats, clock: int, seed: int) -> npt.NDArray[np.bool_]:
        """Return which rows (float32 [n, dim], with what was held back) go out in iteration `clock`."""

    def choose_zeros(self, rows: Floats, l1: float) -> npt.NDArray[np.bool_]:
        """Return which of these rows go out, whose weights are 0 by what this worker has pulled since it sent them.

        It is asked of them in place of :meth:`choose`; `l1` is the penalty of the table's rule.
        """
        return np.ones(len(rows), np.bool_)

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

    @property
    def keeps_error(self) -> bool:
        """Whether a worker adds to a row that it pushes what this filter took of it before (error feedback)."""
        return False

    @property
    def for_pulls(self) -> ValueFilter:
        """What pulled values go behind where nobody says it: they have no memory of what was taken of them before."""
        return self

    @abstractmethod
    def num_bytes(self, count: int) -> int:
        """Return how many bytes `count` values take."""

    @abstractmethod
    def encode(self, values: Floats, seed: int | None, out: Bytes) -> None:
        """Write values (float32 [count]) to `out`, of that many bytes. Chance may go by `seed` (64 bits) alone.

        Without a seed there is no chance: the sender keeps the error, which then has to be less than the values.
        """

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


def check_class(kind: type[Filter]) -> None:
    """Raise UsageError unless a class says what every filter says of itself, by a name that no other has."""
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9._-]*", name):
        raise UsageError(f"filter {kind.__name__}: name = {name!r}, expected small letters, digits and hyphens")
    if getattr(kind, "preserves", None) not in get_args(Preserves):
        raise UsageError(f"filter {name!r}: expected preserves to be one of {', '.join(get_args(Preserves))}")
    other = FILTERS.get(name)
    if other is not None and (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
        raise UsageError(
            f"there is a filter {name!r} already, {other.__module__}.{other.__qualname__}: give this one another name"
        )


def from_description(fields: dict[str, Any]) -> Filter:
    """Return the filter that :meth:`Filter.describe` described. Raises UsageError if it is not had here."""
    settings = dict(fields)
    name, version = settings.pop("name", None), settings.pop("version", None)
    kind = FILTERS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise UsageError(
            f"there is no filter {str(name)[:99]!r} here, only {', '.join(sorted(FILTERS))}; for one of your own say "
            "at this process's start where it is: --filter-module MODULE, or filter_modules= of a local cluster"
        )
    if version != kind.version:
        raise UsageError(
            f"filter {name!r} is of version {kind.version} here and of version {str(version)[:20]} there: install the "
            f"same version of {kind.__module__.partition('.')[0]} on both"
        )
    if not all(isinstance(each, (int, float)) for each in settings.values()):
        raise UsageError(f"filter {name!r} has settings that are no numbers")
    try:
        return kind(**settings)
    except (TypeError, ValueError) as error:
        raise UsageError(f"filter {name!r} does not take these settings: {error}") from None


def parse_filter(text: str) -> Filter:
    """Return the filter of a text such as ``quantize:8``: its name, then its settings in their order.

    Instead of the name there may be MODULE:CLASS, of a module that has been imported.
    """
    name, *arguments = text.strip().split(":")
    kind = FILTERS.get(name)
    if arguments and (own := _find_class(name, arguments[0])) is not None:
        kind, name, arguments = own, own.name, arguments[1:]
    elif (path := class_path(text)) is not None:
        raise UsageError(
            f"there is no filter {path[1]!r} of a module {path[0]!r} here: see that the module has such a class, and "
            f"say at this process's start that it is to be imported: --filter-module {path[0]}"
        )
    if kind is None:
        raise UsageError(
            f"there is no filter {name!r}: expected one of {', '.join(sorted(FILTERS))}, or MODULE:CLASS for one of "
            "your own"
        )
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


def class_path(text: str) -> tuple[str, str] | None:
    """Return module and class if this text of a filter begins with them, as ``my_module:MyFilter`` does."""
    found = re.match(r"\s*([^\W\d][\w.]*):([^\W\d]\w*)\s*(:|$)", text)
    is_ours = found is not None and found[1] in FILTERS and FILTERS[found[1]].__module__.startswith("paceline.")
    return None if found is None or is_ours else (found[1], found[2])


def _find_class(module: str, name: str) -> type[Filter] | None:
    found = (kind for kind in FILTERS.values() if (kind.__module__, kind.__qualname__) == (module, name))
    return next(found, None)


def check_share(chosen: Filter, share: float) -> None:
    """Raise unless a share of rows is above 0 and at most 1."""
    is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
    if not is_number or not 0 < share <= 1:
        raise UsageError(f"{type(chosen).__name__}(share={share!r}): expected a number above 0, at most 1")
