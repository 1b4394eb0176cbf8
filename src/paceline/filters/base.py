"""Define the interfaces and the registry of filters: frozen dataclasses that change messages.

Each filter has its own file, in this package or in a user's module (:mod:`paceline.filters.modules`). The definition of
its class registers the filter in :data:`FILTERS`. A message between a worker and a server has keys (uint64 [n]), values
(float32 [n, dim]), or both: a push has both, a pull has keys, and the reply to a pull has values. A
:class:`~paceline.filters.chain.FilterChain` applies filters in the order of their stages, each through its own
interface:

1. :class:`RowFilter` selects, on the worker, the rows of a push to send.

2. :class:`KeyFilter` encodes the keys in fewer bytes.

3. :class:`ValueFilter` encodes the values in fewer bytes.

4. :class:`ByteFilter` compresses the remaining bytes.

The server decodes a message before it processes, replicates or deduplicates the message. After a lost connection, or to
another server, the sender sends a message again in its decoded form, so that all copies are equal despite random
rounding.
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
"""The property of values that a filter preserves. ``exact``: every bit. ``unbiased``: the mean over many random
encodings. ``bounded``: each value, up to a maximum error that the class documents.
"""

FILTERS: Final[dict[str, type[Filter]]] = {}
"""All filters by name."""


class Filter(ABC):
    """A filter changes messages. Abstract: a filter is a subclass of one of the four kinds in this module."""

    name: ClassVar[str]
    """The name in ``--filters`` and in messages, such as ``top-k``."""
    version: ClassVar[int] = 1
    """Increment this number when the wire format changes, because both ends need the same version."""
    preserves: ClassVar[Preserves]
    stage: ClassVar[int]
    """The position in a chain."""

    def __init_subclass__(cls, is_abstract: bool = False) -> None:
        if is_abstract:
            return
        check_class(cls)
        FILTERS[cls.name] = cls

    def __str__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return ":".join([self.name, *(f"{getattr(self, field.name):g}" for field in fields)])

    def describe(self) -> dict[str, Any]:
        """Return name, version and settings as values for JSON and msgpack."""
        settings: dict[str, Any] = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {"name": self.name, "version": self.version, **settings}


class RowFilter(Filter, is_abstract=True):
    """Selects, on the worker, the rows of a push to send. The server has no code for this filter.

    If :attr:`keeps_residual`, the worker keeps unsent rows and adds them to the next push of the same rows (error
    feedback). Such a filter only delays a row's changes, if the row is pushed again later.
    """

    stage: ClassVar[int] = 1
    keeps_residual: ClassVar[bool]
    needs_l1: ClassVar[bool] = False
    """Whether the filter implements :meth:`choose_zeros`, which needs an L1 penalty in the table's update rule."""

    @abstractmethod
    def choose(self, keys: Keys, rows: Floats, clock: int, seed: int) -> npt.NDArray[np.bool_]:
        """Return the rows to send in iteration `clock`; `rows` (float32 [n, dim]) include kept residuals."""

    def choose_zeros(self, rows: Floats, l1: float) -> npt.NDArray[np.bool_]:
        """Return which of these rows to send. They were 0 in the last pull and have not been sent since then.

        For rows of zeros, the chain calls this method instead of :meth:`choose`. `l1` is the penalty in the table's
        rule.
        """
        return np.ones(len(rows), np.bool_)

    def rescale(self) -> float:
        """Return the factor that multiplies the values of sent rows."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class ShareFilter(RowFilter, is_abstract=True):
    """Sends a `share` of the rows. Raises UsageError unless the share is above 0 and at most 1."""

    share: float

    def __post_init__(self) -> None:
        is_number = isinstance(self.share, (int, float)) and not isinstance(self.share, bool)
        if not is_number or not 0 < self.share <= 1:
            raise UsageError(f"{type(self).__name__}(share={self.share!r}): expected a number above 0 and at most 1")


class KeyFilter(Filter, is_abstract=True):
    """Encodes keys in fewer bytes. Users cannot add key filters, because :mod:`.chain` has code for each one."""

    stage: ClassVar[int] = 2
    preserves: ClassVar[Preserves] = "exact"


class ValueFilter(Filter, is_abstract=True):
    """Encodes values in fewer bytes; :meth:`num_bytes` depends only on the number of values."""

    stage: ClassVar[int] = 3

    @property
    def keeps_error(self) -> bool:
        """Return whether a worker adds this filter's errors to later pushes of a row (error feedback)."""
        return False

    @property
    def for_pulls(self) -> ValueFilter:
        """Return the filter for pulls if the user gives none. It is stateless, because pulls have no error feedback."""
        return self

    @abstractmethod
    def num_bytes(self, count: int) -> int:
        """Return the size in bytes of `count` encoded values."""

    @abstractmethod
    def encode(self, values: Floats, seed: int | None, out: Bytes) -> None:
        """Write values (float32 [count]) to `out` (uint8). Randomness depends only on `seed` (64 bits).

        If `seed` is None, values are rounded to nearest. The sender then adds the error to later values, so the error
        must be smaller than the value.
        """

    @abstractmethod
    def decode(self, data: Bytes, out: Floats) -> None:
        """Write the decoded values to `out`. The values must be equal in every call and on every host."""


class ByteFilter(Filter, is_abstract=True):
    """Compresses bytes."""

    stage: ClassVar[int] = 4
    preserves: ClassVar[Preserves] = "exact"

    @abstractmethod
    def pack(self, data: Bytes) -> Bytes:
        """Return the compressed bytes. If the result is longer, the original bytes are sent."""

    @abstractmethod
    def unpack(self, data: Bytes, num_bytes: int) -> Bytes:
        """Return the `num_bytes` decompressed bytes.

        Raises ValueError for input that :meth:`pack` did not return. The input is untrusted, so the method must not
        allocate more than `num_bytes` for its result.
        """


def check_class(kind: type[Filter]) -> None:
    """Raise UsageError unless a class declares the required attributes and an unused name."""
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9._-]*", name):
        raise UsageError(f"filter {kind.__name__}: name = {name!r}, expected small letters, digits and hyphens")
    if getattr(kind, "preserves", None) not in get_args(Preserves):
        raise UsageError(f"filter {name!r}: expected preserves to be one of {', '.join(get_args(Preserves))}")
    other = FILTERS.get(name)
    if other is not None and (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
        raise UsageError(
            f"filter {name!r} already exists as {other.__module__}.{other.__qualname__}. Give this filter another name"
        )


def from_description(fields: dict[str, Any]) -> Filter:
    """Create the filter for the output of :meth:`Filter.describe`. Raises UsageError if it is unknown."""
    settings = dict(fields)
    name, version = settings.pop("name", None), settings.pop("version", None)
    kind = FILTERS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise UsageError(
            f"filter {str(name)[:99]!r} is unknown here, only {', '.join(sorted(FILTERS))} are known. For your own "
            "filter, start this process with --filter-module MODULE, or filter_modules= for a local cluster"
        )
    if version != kind.version:
        raise UsageError(
            f"filter {name!r} has version {kind.version} here and version {str(version)[:20]} there. Install the "
            f"same version of {kind.__module__.partition('.')[0]} on both"
        )
    if not all(isinstance(setting, (int, float)) for setting in settings.values()):
        raise UsageError(f"filter {name!r} has settings that are not numbers")
    try:
        return kind(**settings)
    except (TypeError, ValueError) as error:
        raise UsageError(f"filter {name!r} does not take these settings: {error}") from None


def parse_filter(text: str) -> Filter:
    """Create the filter for a text such as ``quantize:8``: its name, then its settings in order.

    For a filter in an imported module, the name can be MODULE:CLASS.
    """
    name, *arguments = text.strip().split(":")
    kind = FILTERS.get(name)
    if arguments and (own := _find_class(name, arguments[0])) is not None:
        kind, name, arguments = own, own.name, arguments[1:]
    elif (path := class_path(text)) is not None:
        raise UsageError(
            f"filter {path[1]!r} of module {path[0]!r} is unknown here. Check that the module has such a class, and "
            f"start this process with --filter-module {path[0]}"
        )
    if kind is None:
        raise UsageError(
            f"filter {name!r} is unknown: expected one of {', '.join(sorted(FILTERS))}, or MODULE:CLASS for your own"
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
            raise UsageError(f"filter {text!r}: {field.name} must be a number, got {argument!r}") from None
    try:
        return kind(**settings)
    except TypeError:
        needed = [field.name for field in fields if field.default is dataclasses.MISSING]
        raise UsageError(f"filter {text!r} lacks settings: {name}:{':'.join(needed).upper()}") from None


def class_path(text: str) -> tuple[str, str] | None:
    """Return the module and the class if a filter's text begins with both (``my_module:MyFilter``)."""
    found = re.match(r"\s*([^\W\d][\w.]*):([^\W\d]\w*)\s*(:|$)", text)
    is_builtin = found is not None and found[1] in FILTERS and FILTERS[found[1]].__module__.startswith("paceline.")
    return None if found is None or is_builtin else (found[1], found[2])


def _find_class(module: str, name: str) -> type[Filter] | None:
    found = (kind for kind in FILTERS.values() if (kind.__module__, kind.__qualname__) == (module, name))
    return next(found, None)
