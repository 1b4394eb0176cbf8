"""The format on disk: what the manifests of models and of snapshots say.

Rows lie in parts, safetensors files of `keys` and `records`, by key and not by server. A manifest names the parts of
each table with their sizes and checksums; files that it does not name are of no account. What a manifest says may have
come from anywhere: names in it are plain names, and numbers have bounds.

Models and snapshots differ in what they keep beside the tables (:class:`ModelManifest`, :class:`SnapshotManifest`).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, TypeAlias

import msgspec
from msgspec import Meta

from paceline.errors import UsageError
from paceline.protocol.jobs import JobAccount
from paceline.tables.bounds import Bucket, Natural, Sha256, Words
from paceline.tables.spec import TableSpec
from paceline.version import __version__

VERSION: Final = 2
"""Version 1, which 0.1 wrote, is read too: its snapshots are like these, its models are in :mod:`.version_1`."""

FileName: TypeAlias = Annotated[str, Meta(pattern=r"^(snapshot-\d{6,19}/)?\w[\w.-]{0,200}\Z")]
"""A file in the directory of a model, or in a snapshot's folder within the directory of snapshots."""
FolderName: TypeAlias = Annotated[str, Meta(pattern=r"^snapshot-\d{6,19}\Z")]
"""The folder of a snapshot."""
Directory: TypeAlias = Annotated[str, Meta(pattern=r"^(/|[A-Za-z]:)[^\0]*\Z", max_length=4096)]
"""An absolute path."""


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that belongs to a model or a snapshot."""

    file: FileName
    num_bytes: Natural
    sha256: Sha256


class StoredPart(StoredFile, frozen=True, kw_only=True):
    """A file of rows of a table: `keys` uint64 [n] and `records` float32 [n, words] (values, then the rule's state).

    A snapshot's part holds bucket after bucket. A model's is not divided: it has no `buckets`, and one number of rows.
    """

    table: str
    buckets: tuple[Bucket, ...] = ()
    rows: tuple[Natural, ...]
    """Of each bucket."""
    words: Words
    """Of each record; the pass included, if there is one."""
    has_passes: bool = False
    """Whether records end with the number of the pass over the data in which the row was last pushed."""

    def __post_init__(self) -> None:
        is_divided = len(self.buckets) == len(self.rows) and len(set(self.buckets)) == len(self.buckets)
        if not is_divided and (self.buckets or len(self.rows) != 1):
            raise UsageError(f"{self.file} holds {len(self.buckets)} buckets, and rows of {len(self.rows)}")
        if self.num_rows * (8 + 4 * self.words) > self.num_bytes:
            raise UsageError(f"{self.file} cannot hold {self.num_rows} rows of {self.words} words")

    @property
    def num_rows(self) -> int:
        """Rows of all buckets."""
        return sum(self.rows)


class PartUse(msgspec.Struct, frozen=True, kw_only=True):
    """A part, and which of its buckets are used (a later snapshot has others of them anew)."""

    part: StoredPart
    buckets: tuple[Bucket, ...] = ()

    def __post_init__(self) -> None:
        if not set(self.buckets) <= set(self.part.buckets):
            raise UsageError(f"{self.part.file} does not hold all the buckets that are used of it")


class StoredTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table on disk; each of its buckets is used from one part at most."""

    spec: TableSpec
    rows: Natural
    uses: tuple[PartUse, ...]

    def __post_init__(self) -> None:
        used = [bucket for use in self.uses for bucket in use.buckets]
        if len(set(used)) != len(used):
            raise UsageError(f"table {self.spec.name!r} has a bucket twice")
        for part in self.parts:
            if part.words != self.spec.record_words + part.has_passes:
                raise UsageError(f"{part.file} has records of {part.words} float32, table {self.spec} has others")

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        """The files that hold its rows."""
        return tuple(use.part for use in self.uses)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What models and snapshots have in common."""

    FORMAT: ClassVar[str]
    NAME: ClassVar[str]
    """What it describes, in errors."""
    ABSENT: ClassVar[str]
    """What errors say of a folder without one."""

    format: str
    version: int = VERSION
    paceline: str = __version__
    """The version that wrote it."""
    tables: tuple[StoredTable, ...]

    @property
    def files(self) -> set[str]:
        """The names of all files."""
        return {part.file for table in self.tables for part in table.parts}


class ModelManifest(Manifest, frozen=True, kw_only=True):
    """A model, or a checkpoint of a PyTorch program; `model` is the description of whoever saved it."""

    FORMAT: ClassVar[str] = "paceline-model"
    NAME: ClassVar[str] = "a Paceline model"
    ABSENT: ClassVar[str] = "holds no model"

    format: str = FORMAT
    tensors: dict[str, StoredFile] = {}
    """Files of named tensors (a PyTorch model's, its optimizer's), by what they are."""
    model: dict[str, Any] = {}

    @property
    def files(self) -> set[str]:
        """The names of all files."""
        return super().files | {each.file for each in self.tensors.values()}


class SnapshotManifest(Manifest, frozen=True, kw_only=True):
    """A snapshot of a cluster: what was done by then, and of what training it is."""

    FORMAT: ClassVar[str] = "paceline-snapshot"
    NAME: ClassVar[str] = "a snapshot"
    ABSENT: ClassVar[str] = "is no whole snapshot"

    format: str = FORMAT
    number: Natural
    full: bool
    """Whether it needs no parts of earlier ones."""
    iteration: Natural | None
    """Sequential consistency: it is the state after so many iterations of that run. Else None: buckets, each consistent
    in itself, were copied one after the other."""
    account: JobAccount | None = None
    training: dict[str, Any] = {}
